"""How arithmetic shards: elementwise ops, on one tensor and on lists of them, contractions, reductions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .rule import Call, Row, Rule, T, broadcast, but, dims, none, same

aten = torch.ops.aten

# --- elementwise ------------------------------------------------------------------------------------------------------

_SAME_VALUE = {"clone", "detach", "alias", "lift_fresh", "positive"}
_LINEAR = {"add", "sub", "neg", "_to_copy", "copy"}  # in all tensor arguments together
_SCALING = {"mul", "div"}  # linear in one argument when the other is one number


def elementwise(call: Call) -> Rule:
    """Every dim is split alike, up to broadcasting."""
    out, tensors = call.outs[0], call.tensors
    assert out is not None
    linear: tuple[int, ...] = ()
    if call.name in _SAME_VALUE:
        linear = (0,)
    elif not exact(call):
        pass
    elif call.name in _LINEAR and not isinstance(call.args.get("other"), (int, float, complex)):
        linear = tuple(t.index for t in tensors)
    elif call.name in _SCALING and call.args.get("rounding_mode") is None:
        if len(tensors) == 1 or not tensors[1].shape:
            linear = (0,)
        elif call.name == "mul" and not tensors[0].shape:
            linear = (1,)
    return Rule(tuple(broadcast(t.shape, out) for t in tensors), tuple(map(same, call.outs)), linear=linear)


def exact(call: Call) -> bool:
    """Whether the op may be done to parts of a sum: no part is rounded to integers, wraps around, or is narrowed."""
    out = call.dtypes[0]
    assert out is not None
    if out.is_floating_point or out.is_complex:
        return all(torch.promote_types(t.dtype, out) is out and (t.dtype.is_floating_point or t.dtype.is_complex)
                   for t in call.tensors)  # fmt: skip
    return out is not torch.bool and all(t.dtype is out for t in call.tensors)


def elementwise_lists(call: Call) -> Rule | None:
    """torch._foreach_*: the k-th tensors of all lists are split alike."""
    lists = [a for a in call.args.values() if isinstance(a, (list, tuple)) and a and isinstance(a[0], T)]
    outs = call.outs
    if any(len(a) != len(outs) for a in lists) or any(out is None for out in outs):
        return None
    rows: dict[int, Row] = {t.index: none(t.shape) for t in call.tensors}
    for ts in lists:
        for k, (t, out) in enumerate(zip(ts, outs, strict=True)):
            if len(t.shape) <= len(out or ()):
                rows[t.index] = broadcast(t.shape, out or (), tuple((k, d) for d in same(out)))
    return Rule(
        tuple(rows[t.index] for t in call.tensors),
        tuple(tuple((k, d) for d in same(o)) for k, o in enumerate(outs)),
        apart=True,
    )


def lazy(call: Call) -> Rule:
    """Views that only note a conjugate or a minus sign: below autograd nothing reads the note, so it is carried out."""
    op = torch.conj_physical if call.name == "_conj" else torch.neg
    row = same(call.tensors[0].shape)
    return Rule((row,), (row,), linear=(0,), op=lambda block: op(block), copies=True)


def like(call: Call) -> Rule:
    """A new tensor of the argument's shape, whatever is in it."""
    return Rule((same(call.tensors[0].shape),), (same(call.outs[0]),), shape_only=(0,))


def fill(call: Call) -> Rule:
    """The argument's layout, whatever is in it; the value is one number."""
    return Rule((same(call.tensors[0].shape), *((),) * (len(call.tensors) - 1)), (same(call.tensors[0].shape),))


def new(call: Call) -> Rule:
    """A new tensor of a shape of its own: whole on every rank."""
    return Rule(tuple(none(t.shape) for t in call.tensors), (none(call.outs[0]),), shape_only=(0,))


# --- contractions -----------------------------------------------------------------------------------------------------


def contraction(equation: str, joins: bool = False) -> Callable[[Call], Rule]:
    """An einsum; with `joins`, of all arguments but the first, which is added to it."""
    ins, out = equation.split("->")
    rows = tuple(map(tuple, ins.split(",")))

    def rule(call: Call) -> Rule:
        sums = {label for row in rows for label in row} - set(out)
        first = (broadcast(call.tensors[0].shape, call.outs[0] or (), tuple(out)),) if joins else ()
        return Rule((*first, *rows), (tuple(out),), frozenset(sums), joins=(0,) if joins else ())

    return rule


# --- reductions -------------------------------------------------------------------------------------------------------


def reduction(call: Call, fold: str = "") -> Rule:
    """Some dims are folded into one number: whole, unless `fold` says how their parts are put together."""
    x = call.tensors[0]
    gone = set(dims(call.args.get("dim"), x.ndim))
    keep = call.args.get("keepdim", False)
    row = but(x.ndim, () if fold else tuple(gone))
    out: Row = tuple(None if d in gone else d for d in range(x.ndim) if keep or d not in gone)
    return Rule((row,), (out,) * len(call.outs), frozenset(gone) if fold else frozenset(), fold=fold or "sum")


def total(call: Call) -> Rule:
    """sum: the parts add up."""
    return replace(reduction(call, "sum"), linear=(0,) if exact(call) else ())


def mean(call: Call) -> Rule:
    """mean: the parts of the sum add up, each divided by the global count."""
    x = call.tensors[0]
    over = dims(call.args.get("dim"), x.ndim)
    count = math.prod(x.shape[d] for d in set(over)) if x.ndim else 1

    def scaled_sum(block: torch.Tensor, *_: Any, dtype: Any = None, **__: Any) -> torch.Tensor:
        dtype = dtype or block.dtype
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        return (block.sum(over, keepdim=call.args.get("keepdim", False), dtype=wide) / count).to(dtype)

    return replace(total(call), op=scaled_sum)


def extreme(fold: str) -> Callable[[Call], Rule]:
    """amax, amin, any, all: the parts are put together by a maximum or a minimum."""
    return functools.partial(reduction, fold=fold)


def max_or_min(call: Call) -> Rule:
    """max and min: of two tensors, along a dim with indices, or of everything."""
    if "other" in call.args:
        return elementwise(call)
    return reduction(call, "" if "dim" in call.args else call.name)


def spread(call: Call) -> Rule:
    """var and std: as a reduction; split evenly, for of no elements they warn."""
    rule = reduction(call)
    return replace(rule, even=frozenset(rule.ins[0]) - {None})


def norm(call: Call) -> Rule:
    """Norms of vectors: the Euclidean one by its parts' squares, added at once; the others of whole dims."""
    if call["ord"] != 2 or any(dtype is None or dtype.itemsize < 4 for dtype in call.dtypes):
        return reduction(call) if "dim" in call.args else elementwise_lists(call) or reduction(call)
    if "dim" not in call.args:  # _foreach_norm: of each tensor of a list
        rows = tuple(tuple((t.index, d) for d in same(t.shape)) for t in call.tensors)
        squares = lambda blocks, *_: [b.square() for b in aten._foreach_norm(blocks, 2)]
        return Rule(rows, ((),) * len(rows), frozenset(label for row in rows for label in row), fold="total",
                    apart=True, op=squares, finish=lambda *parts: [part.sqrt() for part in parts])  # fmt: skip
    over, keep = dims(call["dim"], call.tensors[0].ndim), call["keepdim"]

    def square(block: torch.Tensor, *_: Any, dtype: Any = None) -> torch.Tensor:
        return torch.linalg.vector_norm(block, 2, over, keep, dtype=dtype).square()

    return replace(reduction(call, "total"), op=square, finish=torch.sqrt)
