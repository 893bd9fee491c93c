"""How ops on matrices shard: the batches may be split."""

from __future__ import annotations

from .rule import Call, Rule, but


def last_two(call: Call) -> Rule:
    """Ops on matrices (triu, tril): batches may be split."""
    n = call.tensors[0].ndim
    row = but(n, (n - 2, n - 1))
    return Rule((row,), (row,), linear=(0,))


def matrices(call: Call) -> Rule:
    """Decompositions of matrices (qr, cholesky, svd, ...): batches may be split."""
    batch = call.tensors[0].ndim - 2
    row = lambda shape: tuple(range(batch)) + (None,) * (len(shape or ()) - batch)
    return Rule((row(call.tensors[0].shape),), tuple(map(row, call.outs)))
