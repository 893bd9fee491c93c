"""How ops shard that work along a dim: scans, sorts, softmax, search; whole there, split anywhere else."""

from __future__ import annotations

from collections.abc import Sequence

from .rule import Call, Row, Rule, T, dims, none, same


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
    """Places in one row of numbers (searchsorted, bucketize), or whether they are there (isin): the values may be split."""
    row = next(
        (call.args[name] for name in ("sorted_sequence", "boundaries", "test_elements") if name in call.args), None
    )
    if not isinstance(row, T) or row.ndim > 1 or len(call.tensors) > 2:
        return None
    return Rule(tuple(none(t.shape) if t is row else same(t.shape) for t in call.tensors), (same(call.outs[0]),))
