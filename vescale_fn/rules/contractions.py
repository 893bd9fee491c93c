"""How sums of products shard: an einsum each."""

from __future__ import annotations

from collections.abc import Callable

from .rule import Call, Rule, broadcast


def contraction(equation: str, joins: bool = False) -> Callable[[Call], Rule]:
    """An einsum; with `joins`, of all arguments but the first, which is added to it."""
    ins, out = equation.split("->")
    rows = tuple(map(tuple, ins.split(",")))

    def rule(call: Call) -> Rule:
        sums = {label for row in rows for label in row} - set(out)
        first = (broadcast(call.tensors[0].shape, call.outs[0] or (), tuple(out)),) if joins else ()
        return Rule((*first, *rows), (tuple(out),), frozenset(sums), joins=(0,) if joins else ())

    return rule


def trilinear(call: Call) -> Rule:
    """The products of three tensors, each of which lacks some dims, summed over some."""
    n = call.tensors[0].ndim + len(call["expand1"])
    rows = tuple(tuple(d for d in range(n) if d not in call[f"expand{k}"]) for k in (1, 2, 3))
    return Rule(rows, (tuple(d for d in range(n) if d not in call["sumdim"]),), frozenset(call["sumdim"]))
