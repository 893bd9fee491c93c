"""The moves of a log that another layout would avoid: which, where, and what to write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .._core.base.source_lines import readable
from .._core.sharding.spec import P

_CAUSED = re.compile(r"(\w+) needs (?:dims? ([\d ,and]+) whole|(?!the sum)(\S+)): (\S+)")


class Move(NamedTuple):
    """Moves of one kind at one line: how often, how many bytes on one rank in all, of what, and what to write instead."""

    op: str
    axis: str
    times: int
    bytes: int
    value: str  # the type of what moved
    by: str  # the op that needed it
    line: str
    backward: bool
    instead: str


class Needless:
    """What `needless` returns: a list of `Move`, the most bytes first; printing it shows them as lines of text."""

    def __init__(self, moves: list[Move]) -> None:
        self.moves = moves

    def __iter__(self) -> Iterator[Move]:
        return iter(self.moves)

    def __len__(self) -> int:
        return len(self.moves)

    @property
    def bytes(self) -> int:
        """How many bytes they held on one rank, in all."""
        return sum(move.bytes for move in self.moves)

    def __repr__(self) -> str:
        if not self.moves:
            return "no move that another layout would avoid"
        found = []
        for m in self.moves:
            times = f", {m.times} times" if m.times > 1 else ""
            where = readable(m.line) + (" (backward)" if m.backward else "")
            found.append(f"{where}: {m.op} over {m.axis} of {m.value} for {m.by}: {m.bytes:,} bytes{times}")
            found.append(f"  Instead: {m.instead}")
        return "\n".join(found)


def needless(log: Iterable[Any]) -> Needless:
    """Name the moves of a `comm_log` that another layout, or a rule that keeps a split dim, would avoid.

    A move counts if an op caused it, because an argument was not laid out as the op needs it, and nobody asked for it: an
    all-gather or an all-to-all that `strict` would refuse. Moves that `shard`, `with_sharding`, `unshard`, `grad` (which
    gives gradients the layout of their parameters) or a collective name do not count, and neither do sums, which are a part
    of what is computed. Moves of equal values by one op at one line count as one entry, with the number of times.

    Args:
        log: what `comm_log` recorded.

    Returns:
        The moves, the most bytes first, each with the line, the op, and what to write instead.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(2):
    ...     x = vfn.shard(torch.ones(4, 6), vfn.make_mesh((2,), ("dp",)), P("dp"))
    ...     with vfn.comm_log() as log:
    ...         y = x.cumsum(0), x.cumsum(0)
    >>> found = vfn.needless(log)
    >>> found.bytes, len(found)
    (192, 1)
    >>> print(found.moves[0].instead)
    the value laid out as P() before cumsum, once for all 2 uses: x = vfn.with_sharding(x, P())
    """
    groups: dict[Any, list[Any]] = {}
    for record in log:
        if record.op in ("all_gather", "all_to_all"):
            groups.setdefault((record.op, record.axis, record.why, record.line, record.backward), []).append(record)
    moves = []
    for (op, axis, why, line, backward), records in groups.items():
        cause = _CAUSED.fullmatch(why.removesuffix(" (backward)"))
        if cause is not None:
            by, dims, target, value = cause.groups()
            spec = _spec(target) if target else _without(_spec(value), [int(d) for d in re.findall(r"\d+", dims)])
            moves.append(
                Move(
                    op,
                    axis,
                    len(records),
                    sum(r.bytes for r in records),
                    value,
                    by,
                    line,
                    backward,
                    _advice(by, spec, len(records), backward),
                )
            )
    return Needless(sorted(moves, key=lambda move: -move.bytes))


_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot", "grouped_mm"}
_MERGING = {"view", "unsafe_view", "reshape"}


def _advice(by: str, spec: P, times: int, backward: bool) -> str:
    once = f", once for all {times} uses" if times > 1 else ""
    if by in _PRODUCTS:
        return f"both sides of the product split alike along the dim that is summed over, or this one as {spec!r}{once}"
    if by in _MERGING:
        return (
            f"a size that the axis divides, or the split dim first among those that are merged; of several matrices in "
            f"one, P.merged((n, None), (size, axis)); or the value as {spec!r}{once}"
        )
    if by == "copy" and not backward:
        return (
            f"a target that is split as what is written into it: x.new_zeros(...), of an array x; torch.zeros(...) is whole "
            f"on every rank; or the value as {spec!r}{once}"
        )
    if backward:
        return f"with_sharding of what this line takes or gives, so that its gradient is laid out as {spec!r}{once}"
    return f"the value laid out as {spec!r} before {by}{once}: x = vfn.with_sharding(x, {spec!r})"


def _spec(text: str) -> P:
    """The spec of a type's text: ``f32[8@dp,2*4@tp]``."""
    dims = text[text.index("[") + 1 : text.index("]")]
    entries = []
    for dim in dims.split(",") if dims else []:
        parts = [
            (int(size), tuple(names.split("+")) if names else None)
            for size, _, names in (part.partition("@") for part in dim.split("*"))
        ]
        entries.append(parts[0][1] if len(parts) == 1 else P.merged(*parts))
    unreduced = re.search(r"\{U:([^}]*)\}", text)
    return _without(P(*entries, unreduced=unreduced[1].split(",") if unreduced else ()), [])


def _without(spec: P, dims: list[int]) -> P:
    """The spec with these dims whole, written shortly."""
    entries = [None if d in dims else entry for d, entry in enumerate(spec)]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries, unreduced=spec.unreduced)
