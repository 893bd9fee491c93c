"""The moves of a log that another layout, or a rule, would avoid: which, where, why, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .._core.base.source_lines import quoted, readable
from .._core.sharding.spec import P, split_axes

# what the interpreter says of a move that an op caused
_CAUSED = re.compile(r"(\w+)( has no rule and)? needs (?:dims? ([\d ,and]+) whole|(?!the sum)(\S+)): (\S+)")
_SUMMED = re.compile(r"(\w+) needs the sum: \S+")


class Move(NamedTuple):
    """Moves of one kind at one line: how often, how many bytes on one rank in all, of what, why, and what to write instead."""

    op: str
    axis: str
    times: int
    bytes: int
    value: str  # the type of what moved
    by: str  # the op that needed it
    line: str
    backward: bool
    why: str
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
        found = [f"moves that another layout or a rule would avoid: {self.bytes:,} bytes on each rank"]
        for m in self.moves:
            times = f", {m.times} times" if m.times > 1 else ""
            found += [
                f"{quoted(m.line)}{' (backward)' if m.backward else ''}",
                f"  {m.op} over {m.axis} of {m.value}{times}, {m.bytes:,} bytes: {m.why}",
                f"  Instead: {m.instead}",
            ]
        return "\n".join(found)


def needless(log: Iterable[Any]) -> Needless:
    """Name the moves of a `comm_log` that another layout, or a rule that keeps a split dim, would avoid.

    These are named, with the line and what to write:

    - an all-gather or an all-to-all that `strict` would refuse: an op caused it, as an argument was not laid out as the op
      needs it, or as the op has no rule that says how it shards;
    - the second gather of one value, wherever it is, forward or backward;
    - an all-gather, by an op or by `with_sharding`, of whose result each rank then keeps its own part alone: an all-to-all
      would do, or nothing; and such an all-reduce, where a reduce-scatter would do. An op that takes each element by itself
      may stand between, and what the backward pass does with values of the forward pass does not count.

    Other moves that `shard`, `with_sharding`, `unshard`, `grad` (which gives gradients the layout of their parameters) or a
    collective name do not count, and neither do sums, which are a part of what is computed. Alike moves of several values at
    one line, of a model's layers say, are one entry, with the number of times. A plan that `jit` has made moves what its
    passes have left; of its values nothing is known but what the log says.

    Args:
        log: what `comm_log` recorded.

    Returns:
        The moves, the most bytes first, each with the line, the reason, and what to write instead.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(2):
    ...     x = vfn.shard(torch.ones(4, 6), vfn.make_mesh((2,), ("dp",)), P("dp"))
    ...     with vfn.comm_log() as log:
    ...         y = x.cumsum(0), x.cumsum(0)
    ...         z = vfn.with_sharding(vfn.with_sharding(x, P()).sin(), P(None, "dp"))
    >>> found = vfn.needless(log)
    >>> found.bytes, len(found)
    (288, 2)
    >>> for move in found:
    ...     print(move.instead)
    x = vfn.with_sharding(x, P()) before it, once for all 2 uses; vfn.jit does so by itself
    x = vfn.with_sharding(x, P(None, 'dp')) to begin with: an all-to-all
    """
    alike: dict[Any, list[list[Any]]] = {}
    for records in _by_value(log):
        here = [(_kept_apart(r) or r.why, r.line, r.backward) for r in records]
        alike.setdefault((records[0].op, records[0].axis, *here), []).append(records)
    moves = [move for values in alike.values() if (move := _move(values)) is not None]
    return Needless(sorted(moves, key=lambda move: -move.bytes))


def _by_value(log: Iterable[Any]) -> list[list[Any]]:
    """The records, those together that are the same move of the same value, where that is known."""
    groups: dict[Any, list[Any]] = {}
    for i, record in enumerate(log):
        moved = None if record.op == "all_reduce" or _kept_apart(record) else record.moved
        key = i if moved is None else (record.op, record.axes, moved.number)
        groups.setdefault(key, []).append(record)
    return list(groups.values())


def _kept_apart(record: Any) -> tuple[Any, ...]:
    """Of a value that was made whole, and of which each rank then kept its own part alone: which part, and where."""
    moved = record.moved
    if record.op not in ("all_gather", "all_reduce") or moved is None or moved.whole or not moved.kept:
        return ()
    asked = record.why.split(" (")[0] == "with_sharding"
    if not (asked or _cause(record) or _SUMMED.match(record.why)):
        return ()
    return tuple(moved.kept) if all(set(record.axes) <= set(kept.axes) for kept in moved.kept) else ()


def _cause(record: Any) -> re.Match[str] | None:
    """Which op caused a move that nobody asked for, and what it needs."""
    if record.op not in ("all_gather", "all_to_all"):
        return None
    return _CAUSED.fullmatch(record.why.removesuffix(" (backward)"))


def _move(values: Sequence[Sequence[Any]]) -> Move | None:
    """The entry for alike moves of several values, each of which moved once or several times; None if all was asked for."""
    first, n = values[0], sum(map(len, values))
    if _kept_apart(first[0]):
        return _then_kept(first[0], values)
    needed = [record for record in first if _cause(record)]
    if not needed:
        return None
    asked = next((record for record in first if not _cause(record)), None)
    shown, cause = needed[0], _cause(needed[0])
    assert cause is not None
    by, no_rule, dims, target, value = cause.groups()
    spec = _spec(target) if target else _without(_spec(value), [int(d) for d in re.findall(r"\d+", dims)])
    why = f"gathered because aten.{by} has no rule" if no_rule else _needs(shown)
    instead = _no_rule(by, spec) if no_rule else _advice(by, spec, shown.backward)
    if asked is not None:
        why += f"; {asked.why} gathers the same value at {_place(asked, shown)}"
        instead = f"what {asked.why} gives there, for this use as well"
    elif len(needed) > 1:
        others = {
            f"{_needs(r)} at {_place(r, shown)}": None for r in needed if (r.why, r.line) != (shown.why, shown.line)
        }
        why += "; the same value again" + (f": {', '.join(others)}" if others else "")
        instead = (
            f"x = vfn.with_sharding(x, {spec!r}) before it, once for all {len(needed)} uses; vfn.jit does so by itself"
        )
    times = n - sum(not _cause(record) for records in values for record in records)
    size = sum(r.bytes for records in values for r in records if _cause(r))
    return Move(shown.op, shown.axis, times, size, value, by, shown.line, shown.backward, why, instead)


def _then_kept(record: Any, values: Sequence[Sequence[Any]]) -> Move:
    """The entry for values that were made whole, and of which each rank then kept its own part alone."""
    moved, parts = record.moved, _kept_apart(record)
    specs = {part.spec for part in parts}
    spec = specs.pop() if len(specs) == 1 else None
    lines = dict.fromkeys(f"{f'{part.spec!r} ' if part.spec else ''}at {_place(part, record)}" for part in parts)
    cause = _cause(record) or _SUMMED.match(record.why)
    op = cause[1] if cause else ""
    use = f"{_needs(record)}, and" if op else f"{record.why} makes it whole, but"
    better = "a reduce-scatter" if record.op == "all_reduce" else "an all-to-all"
    if spec is not None and all(_dims_over(axis, spec) == _dims_over(axis, moved.source) for axis in record.axes):
        better = f"nothing moves over {record.axis}"
    when = f"before {op}" if op else "to begin with"
    if spec is None:
        instead = f"x = vfn.with_sharding(x, ...) {when}, split over {record.axis} as its parts are used: {better}"
    elif spec == moved.source:
        instead = f"x as it is, which is {spec!r}: nothing moves"
    else:
        instead = f"x = vfn.with_sharding(x, {spec!r}) {when}: {better}"
    why = f"{use} each rank then keeps its own part alone: {', '.join(lines)}"
    n, size = sum(map(len, values)), sum(r.bytes for records in values for r in records)
    return Move(record.op, record.axis, n, size, moved.value, op, record.line, record.backward, why, instead)


def _dims_over(axis: str, spec: P) -> list[int]:
    return [dim for dim, names in enumerate(split_axes(spec, len(spec))) if axis in names]


def _needs(record: Any) -> str:
    return record.why.split(": ")[0]


def _place(there: Any, here: Any) -> str:
    """Where something is, for a reader who knows where something else is."""
    file, _, number = there.line.rpartition(":")
    line = f"line {number}" if file == here.line.rpartition(":")[0] else readable(there.line)
    return f"{line} (backward)" if there.backward else line


def _no_rule(by: str, spec: P) -> str:
    return (
        f"shard_map, if {by} of each rank's block is enough; or the value laid out as {spec!r} for all its uses: "
        f"x = vfn.with_sharding(x, {spec!r})"
    )


_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot", "grouped_mm"}
_MERGING = {"view", "unsafe_view", "reshape"}


def _advice(by: str, spec: P, backward: bool) -> str:
    if by in _PRODUCTS:
        return f"both sides of the product split alike along the dim that is summed over, or this one as {spec!r}"
    if by in _MERGING:
        return (
            f"a size that the axis divides, or the split dim first among those that are merged; of several matrices in "
            f"one, P.merged((n, None), (size, axis)); or the value as {spec!r}"
        )
    if by == "index" and not backward:
        return f"x.gather(1, i[:, None]) for x[arange(n), i], which keeps a split first dim; or the value as {spec!r}"
    if by == "copy" and not backward:
        return (
            f"a target that is split as what is written into it: x.new_zeros(...), of an array x; torch.zeros(...) is whole "
            f"on every rank; or the value as {spec!r}"
        )
    if backward:
        return f"with_sharding of what this line takes or gives, so that its gradient is laid out as {spec!r}"
    return f"x = vfn.with_sharding(x, {spec!r}) before {by}"


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
