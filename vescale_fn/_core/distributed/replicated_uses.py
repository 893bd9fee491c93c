"""Debug mode: numbers, keys and tensors that count as the same on several ranks, noted where they are used.

A comparison at every use would be a meeting of the ranks at every op. So each use is noted, and what was noted since their
last meeting is compared when ranks meet the next time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = tuple[str, str, list[int], list[str]]  # what it is, the user's line, the ranks (none: all that meet), its values

_VALUES = 32  # of one use in a loop
_ROWS = 10000


class Ledger:
    """What one rank has used since it last met others.

    Uses are known by what they are, their line and the ranks that must have them alike. Where a line runs several times,
    their values are kept in order; ranks that run it a different number of times differ only in values that both have.
    """

    def __init__(self) -> None:
        self._uses: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}

    def note(self, what: str, value: str, ranks: Iterable[int], line: str) -> None:
        """Note a use of `value`, which is to be the same on all these ranks; what follows a NUL in it is not shown."""
        key = what, line, tuple(ranks)
        values = self._uses.get(key)
        if values is None:
            if len(self._uses) < _ROWS:
                self._uses[key] = [value]
        elif len(values) < _VALUES and value not in values:
            values.append(value)

    def told(self, group: Iterable[int]) -> list[Row]:
        """What ranks of `group` must have alike."""
        members, rows = frozenset(group), []
        for (what, line, ranks), values in self._uses.items():
            common = members.intersection(ranks)
            if len(common) > 1:
                rows.append((what, line, [] if common == members else sorted(common), values))
        return rows

    def drop(self, group: Iterable[int]) -> None:
        """Forget what all the ranks that it concerns have compared."""
        members = frozenset(group)
        self._uses = {key: values for key, values in self._uses.items() if not members.issuperset(key[2])}

    def clear(self) -> None:
        """Forget everything."""
        self._uses = {}


def differing(told: Mapping[int, Iterable[Any]]) -> list[str]:
    """What ranks have noted with different values: one line each."""
    first: dict[Any, tuple[int, list[str]]] = {}
    found: dict[Any, str] = {}
    for rank in sorted(told):
        for what, line, ranks, values in told[rank]:
            key = what, line, tuple(ranks)
            one, known = first.setdefault(key, (rank, values))
            pair = next(((a, b) for a, b in zip(known, values) if a != b), None)
            if pair is not None and rank != one and key not in found:
                mine, other = (value.partition("\0")[0] for value in pair)
                found[key] = f"{what} is {mine} on rank {one}, but {other} on rank {rank}, at {line}"
    return list(found.values())
