"""How sums of products shard: an einsum each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from .rule import Call, Rule, broadcast

aten = torch.ops.aten


def contraction(equation: str, joins: bool = False) -> Callable[[Call], Rule]:
    """An einsum; with `joins`, of all arguments but the first, which is added to it."""
    ins, out = equation.split("->")
    rows = tuple(map(tuple, ins.split(",")))

    def rule(call: Call) -> Rule:
        sums = {label for row in rows for label in row} - set(out)
        first = (broadcast(call.tensors[0].shape, call.outs[0] or (), tuple(out)),) if joins else ()
        return Rule((*first, *rows), (tuple(out),), frozenset(sums), joins=(0,) if joins else ())

    return rule


def batched_product(call: Call) -> Rule:
    """bmm. Its result is left a partial sum as its larger operand is one, if it is half as large or less: rows that are weighed
    and added up, say, and the gradient of the weights."""
    rule = contraction("bmk,bkn->bmn")(call)
    sizes = [math.prod(t.shape) for t in call.tensors]
    if max(sizes) < 2 * math.prod(call.outs[0] or ()):
        return rule
    larger = sizes.index(max(sizes))
    return replace(rule, linear=(larger,), unmoved=(1 - larger,))


def trilinear(call: Call) -> Rule:
    """The products of three tensors, each of which lacks some dims, summed over some."""
    n = call.tensors[0].ndim + len(call["expand1"])
    rows = tuple(tuple(d for d in range(n) if d not in call[f"expand{k}"]) for k in (1, 2, 3))
    return Rule(rows, (tuple(d for d in range(n) if d not in call["sumdim"]),), frozenset(call["sumdim"]))


def grouped(call: Call) -> Rule | None:
    """grouped_mm, a matrix for each group of rows: rows may be split, and groups, of which a rank then multiplies its own;
    and each matrix, by its rows or columns."""
    a, b = call["self"], call["mat2"]
    offs, bias = call["offs"], call["bias"]
    if bias is not None:
        return None
    if a.ndim == 3 and b.ndim == 3 and offs is None:
        return Rule((("b", "m", "k"), ("b", "k", "n")), (("b", "m", "n"),), sums=frozenset("k"), op=_aligned)
    if offs is None or a.ndim == 3:
        return None
    if b.ndim == 3:
        rows, out, sums, op = (("s", "k"), ("e", "k", "n"), (None,)), ("s", "n"), "ke", _own_groups(b.shape[0])
    else:  # the gradient of the matrices: the rows of each group are summed over
        rows, out, sums, op = (("m", "s"), ("s", "n"), (None,)), ("e", "m", "n"), "s", _own_groups(offs.shape[0])
    return Rule(rows, (out,), sums=frozenset(sums), op=op, blocks=("s", "e"))


def grouped_shape(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> torch.Tensor:
    """What grouped_mm gives: torch's own account of it (its kernel for tensors without values) is for bfloat16 alone."""
    lead = (b.shape[0],) if b.ndim == 3 and a.ndim == 3 else (offs.shape[0],) if b.ndim == a.ndim else ()
    return a.new_empty((*lead, a.shape[-2], b.shape[-1]), dtype=out_dtype or a.dtype)


def _own_groups(count: int) -> Callable[..., Any]:
    """grouped_mm of a rank's own rows and its own groups."""

    def run(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, bias: None, dtype: Any, *mine: Any) -> Any:
        rows, groups = mine[0] if mine else (range(a.shape[1 if b.ndim == 2 else 0]), range(count))
        ends = (offs - rows.start).clamp(0, len(rows)).to(offs.dtype)
        if b.ndim == 2:
            return _aligned(a, b, ends, None, dtype)
        if len(groups) == count:
            return _aligned(a, b, ends, None, dtype)
        if not groups:
            return a.new_zeros((len(rows), b.shape[2]), dtype=dtype or a.dtype)
        place = torch.arange(len(rows), device=a.device)
        start = ends[groups.start - 1] if groups.start else ends.new_zeros(())
        ends = ends[groups.start : groups.stop] - start
        first = a.index_select(0, (place + start) % max(len(rows), 1))  # its own rows come first
        out = _aligned(first, b, ends, None, dtype)
        out = torch.where((place < ends[-1]).unsqueeze(1), out, 0.0)
        return out.index_select(0, (place - start) % max(len(rows), 1))

    return run


def _aligned(a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: None = None, dtype: Any = None) -> torch.Tensor:
    """grouped_mm of blocks, which may be of sizes that its kernels do not take: rows of multiples of 16 bytes, some of them."""
    unit = 16 // a.element_size()
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    out = (b.shape[0], m, n) if b.ndim == 3 and a.ndim == 3 else (m, n) if b.ndim == 3 else (offs.shape[0], m, n)
    if 0 in (m, k, n):
        return a.new_zeros(out, dtype=dtype or a.dtype)
    if b.ndim == 2:  # the rows of the groups are no dim of a result: they may be of any number
        a, b = pad(a.mT, (0, -m % unit)).contiguous().mT, pad(b, (0, -n % unit)).contiguous()
    else:
        a, b = pad(a, (0, -k % unit)), pad(b, (0, -n % unit, 0, -k % unit))
    done = aten._grouped_mm.default(a, b, offs, None, dtype)
    return done[..., :m, :n]
