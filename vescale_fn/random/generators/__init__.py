"""From counters to values, with the same bits everywhere: no key, no mesh."""
