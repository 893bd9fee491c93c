"""How linear algebra shards: batches of matrices, each for itself; the columns of a right-hand side too."""

from __future__ import annotations

from collections.abc import Callable

from .rule import Call, Row, Rule, but


def last_two(call: Call) -> Rule:
    """Ops on matrices (triu, tril): batches may be split."""
    n = call.tensors[0].ndim
    row = but(n, (n - 2, n - 1))
    return Rule((row,), (row,), linear=(0,))


def batched(signature: str, right: str = "", vector: str = "") -> Callable[[Call], Rule | None]:
    """An op on batches of what the signature says: ``"mm,mN->mN"`` solves; a capital letter is a dim that may be split.

    `right` is the signature where ``left=False``, `vector` the one where the second argument has one dim less.
    """

    def rule(call: Call) -> Rule | None:
        chosen = signature if call.args.get("left", True) else right
        if vector and call.tensors[1].shape == call.tensors[0].shape[:-1]:
            chosen = vector
        if not chosen:
            return None
        ins, outs = ([*side.split(",")] for side in chosen.split("->"))
        shapes = (*(t.shape for t in call.tensors), *(s or () for s in call.outs))
        cores = [*ins[: len(call.tensors)], *outs]
        if len(cores) != len(shapes) or any(len(s) < len(core) for s, core in zip(shapes, cores, strict=True)):
            return None  # another overload
        leads = [s[: len(s) - len(core)] for s, core in zip(shapes, cores, strict=True)]
        batch = max(leads, key=len)
        if len(batch) > 0 and any(len(lead) != len(batch) or lead != batch for lead in leads):
            return None  # batches that are broadcast
        lead = tuple(range(len(batch)))
        rows: list[Row] = [(*lead, *(c if c.isupper() else None for c in core)) for core in cores]
        return Rule(tuple(rows[: len(call.tensors)]), tuple(rows[len(call.tensors) :]))

    return rule


def outer(call: Call) -> Rule | None:
    """diag_embed: the last dim becomes the diagonal of two dims, which are whole."""
    x, n = call.tensors[0], call.tensors[0].ndim + 1
    pair = {call["dim1"] % n, call["dim2"] % n}
    rest = iter(range(x.ndim - 1))
    return Rule(
        ((*range(x.ndim - 1), None),), (tuple(None if d in pair else next(rest) for d in range(n)),), linear=(0,)
    )


def distances(call: Call) -> Rule | None:
    """cdist: batches and the rows of both sides; the gradient for the first side sums over the rows of the second."""
    a, b = call["x1"], call["x2"]
    if a.shape[:-2] != b.shape[:-2]:
        return None
    batch = tuple(range(a.ndim - 2))
    table, first, second = (*batch, "rows", "others"), (*batch, "rows", None), (*batch, "others", None)
    if call.name == "_cdist_forward":
        return Rule((first, second), (table,))
    return Rule((table, first, second, table), (first,), sums=frozenset({"others"}))
