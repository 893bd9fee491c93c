"""How ops shard that take parts of tensors and put tensors together: slices, windows, diagonals, cat, pad, repeat."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from .rule import Call, Parts, Row, Rule, but, dim_of, none, same

aten = torch.ops.aten


def slicing(call: Call) -> Rule:
    """Part of one dim: whole there, unless all of it is taken, or it is several dims seen as one and the part is some of
    the outer one: ``[2, n@tp]`` seen as ``[2 * n]``, of which each half is ``[n@tp]``."""
    x = call.tensors[0]
    if call.name == "slice" and call.outs[0] == x.shape and call["step"] == 1:
        return Rule((same(x.shape),), (same(x.shape),), linear=(0,))
    dim = dim_of(call, x.ndim)
    row = but(x.ndim, (dim,))
    if call.name in ("select", "unbind"):
        out = tuple(d for d in row if d is not None)
        return Rule((row,), (out,) * len(call.outs), linear=(0,))
    sizes = [(out or ())[dim] for out in call.outs]
    if call.name == "slice":
        starts = [_start(call["start"], x.shape[dim])] if call["step"] == 1 else [1]
    else:
        starts = [0, *itertools.accumulate(sizes)][:-1]
    inner = math.gcd(*starts, *sizes, x.shape[dim])
    labels = [_of(row, dim, size, inner) for size in (x.shape[dim], *sizes)]

    def local(block: torch.Tensor, *_: Any) -> Any:
        held = block.shape[dim]  # of each part the same share
        at = [
            (start * held // x.shape[dim], (start + size) * held // x.shape[dim]) for start, size in zip(starts, sizes)
        ]
        found = [aten.slice.Tensor(block, dim, *ends) for ends in at]
        return found[0] if call.name == "slice" else found

    return Rule((labels[0],), tuple(labels[1:]), linear=(0,), even=_inner(dim), op=local, only="parts")


def strided(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Any:
    """The slices and selects of `x` that an as_strided of it is, as autograd writes them for a view: None if it is not."""
    offset, left, steps = offset or 0, list(zip(size, stride, strict=True)), []
    if any(n > m for n, m in itertools.pairwise(reversed(x.stride()))) or 0 in x.stride() or x.storage_offset():
        return None
    for dim, (held, step) in enumerate(zip(x.shape, x.stride(), strict=True)):
        start, offset = divmod(offset, step)
        if left and left[0][1] == step and start + left[0][0] <= held:
            length, _ = left.pop(0)
            steps.append((dim, start, length))
        elif start < held:
            steps.append((dim, start, None))
        else:
            return None
    if left or offset:
        return None

    def run(args: Any, kwargs: Any) -> Any:
        out = args[0]
        for dim, start, length in reversed(steps):
            if length is None:
                out = aten.select.int(out, dim, start)
            elif length != out.shape[dim]:
                out = aten.slice.Tensor(out, dim, start, start + length)
        return aten.alias.default(out) if out is args[0] else out

    return run


def _start(start: int | None, size: int) -> int:
    start = start or 0
    return min(max(start + size if start < 0 else start, 0), size)


def _of(row: Row, dim: int, size: int, inner: int) -> Row:
    """The row with a dim that is so many times `inner`: the outer one is whole."""
    if inner < 2 or not size:
        return row
    (label,) = _inner(dim)
    return (*row[:dim], label if size == inner else Parts([(size // inner, None), (inner, label)]), *row[dim + 1 :])


def _inner(dim: int) -> frozenset[Any]:
    return frozenset({("inner", dim)})


def windows(call: Call) -> Rule:
    """unfold: whole along its dim, and one more dim at the end."""
    row = but(call.tensors[0].ndim, (dim_of(call, call.tensors[0].ndim),))
    return Rule((row,), ((*row, None),), linear=(0,))


def diagonal(call: Call) -> Rule:
    """A diagonal of two dims, which are whole, becomes the last dim."""
    x = call.tensors[0]
    pair = (call["dim1"] % x.ndim, call["dim2"] % x.ndim)
    return Rule((but(x.ndim, pair),), ((*(d for d in range(x.ndim) if d not in pair), None),), linear=(0,))


def part_backward(call: Call) -> Rule:
    """The transposes of select, slice, unfold, diagonal: the part placed in zeros."""
    n = max(len(call["input_sizes"]), 1)
    if call.name == "diagonal_backward":
        gone = [call["dim1"] % n, call["dim2"] % n]
    else:
        gone = [call["dim"] % n]
    grad = call.tensors[0]
    if call.name == "slice_backward":
        return _slice_backward(call, gone[0])
    if call.name == "unfold_backward":
        row = (*but(n, gone), None)
    else:
        row = tuple(d for d in range(n) if d not in gone) + (None,) * (call.name == "diagonal_backward")
    out = but(len(call["input_sizes"]), gone)
    return Rule((row if len(row) == grad.ndim else none(grad.shape),), (out,), linear=(0,), sizes="input_sizes")


def _slice_backward(call: Call, dim: int) -> Rule:
    whole, grad = call["input_sizes"], call.tensors[0]
    if grad.ndim != len(whole):
        return Rule((none(grad.shape),), (but(len(whole), (dim,)),), linear=(0,), sizes="input_sizes")
    size, length = whole[dim], grad.shape[dim]
    if size == length and call["step"] == 1:  # of all of it

        def copied(block: torch.Tensor, *_: Any) -> torch.Tensor:
            return block.clone(memory_format=torch.contiguous_format)

        return Rule((same(grad.shape),), (same(grad.shape),), linear=(0,), op=copied)
    start = _start(call["start"], size)
    inner = math.gcd(start, length, size) if call["step"] == 1 else 1
    row = but(len(whole), (dim,))

    def local(block: torch.Tensor, sizes: Any, *_: Any) -> torch.Tensor:
        ends = (at * sizes[dim] // size for at in (start, start + length))
        return aten.slice_backward(block, sizes, dim, *ends, 1)

    return Rule(
        (_of(row, dim, length, inner),),
        (_of(row, dim, size, inner),),
        linear=(0,),
        sizes="input_sizes",
        even=_inner(dim),
        op=local,
        only="parts",
    )


def part_scatter(call: Call) -> Rule:
    """select_scatter, slice_scatter: a part put in place of another."""
    x = call.tensors[0]
    row = but(x.ndim, (dim_of(call, x.ndim),))
    part = row if call.name == "slice_scatter" else tuple(d for d in row if d is not None)
    return Rule((row, part), (row,), linear=(0, 1) if call.tensors[1].dtype is x.dtype else ())


def pad(call: Call) -> Rule:
    """constant_pad_nd: whole where it pads."""
    x, widths = call.tensors[0], call["pad"]
    row = but(x.ndim, [x.ndim - 1 - i // 2 for i, width in enumerate(widths) if width])
    return Rule((row,), (row,))


def cat(call: Call) -> Rule:
    """Tensors joined along one dim, or along a new one."""
    out = tuple(call.outs[0] or ())
    row = but(len(out), (call["dim"] % len(out),))
    linear = tuple(range(len(call.tensors))) if len({t.dtype for t in call.tensors}) == 1 else ()
    if call.name == "stack":
        dim = call["dim"] % len(out)
        return Rule((row[:dim] + row[dim + 1 :],) * len(call.tensors), (row,), linear=linear)
    dim = call["dim"] % len(out)
    inner = math.gcd(*(t.shape[dim] for t in call.tensors if t.ndim == len(out)))
    ins = tuple(_of(row, dim, t.shape[dim], inner) if t.ndim == len(out) else none(t.shape) for t in call.tensors)
    return Rule(ins, (_of(row, dim, out[dim], inner),), linear=linear, even=_inner(dim))


def repeat(call: Call) -> Rule:
    """New dims, and dims repeated."""
    x, times = call.tensors[0], call["repeats"]
    shift = len(times) - x.ndim
    row = tuple(d if times[d + shift] == 1 else None for d in range(x.ndim))
    return Rule((row,), ((*(None,) * shift, *row),), linear=(0,))
