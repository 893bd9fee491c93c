"""The ops for which DTensor's own propagator is trusted: a sweep found it equal to one device in all layouts tried.

Written by ``python tests/sweep.py --prove``; not by hand. It is asked only about even shards, and only where the table
(`rules.py`) has no rule.
"""

PROVED: frozenset[str] = frozenset()
