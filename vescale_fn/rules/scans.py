"""How ops shard that work along a dim: scans, sorts, softmax, search; whole there, split anywhere else."""

from __future__ import annotations

from collections.abc import Sequence

from .rule import Call, Row, Rule, dims, none, same


def along(call: Call) -> Rule:
    """Ops that work along some dims (softmax, cumsum, sort, flip, ...): whole there, split anywhere else."""
    out = call.outs[0] or ()
    dim = next((call.args[name] for name in ("dim", "dims") if name in call.args), None)
    whole = set(dims(dim, len(out)))

    def row(shape: Sequence[int] | None) -> Row:
        shape = shape or ()
        if len(shape) != len(out):
            return none(shape)
        return tuple(None if d in whole or size != out[d] else d for d, size in enumerate(shape))

    return Rule(tuple(row(t.shape) for t in call.tensors), tuple(map(row, call.outs)))


def searched(call: Call) -> Rule | None:
    """Places in one sorted row: the values may be split."""
    if call["sorted_sequence"].ndim > 1 or len(call.tensors) > 2:
        return None
    return Rule(tuple(same(t.shape) if t.index else (None,) for t in call.tensors), (same(call.outs[0]),))
