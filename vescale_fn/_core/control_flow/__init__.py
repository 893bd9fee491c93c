"""Loops and branches as functions: `scan`, `fori_loop`, `while_loop`, `map`, `associative_scan`, `cond`, `switch`."""
