"""How ops shard that take parts of tensors and put tensors together: slices, windows, diagonals, cat, pad, repeat."""

from __future__ import annotations

from .rule import Call, Rule, but, dim_of, none, same


def slicing(call: Call) -> Rule:
    """Part of one dim: whole there, unless all of it is taken."""
    x = call.tensors[0]
    if call.name == "slice" and call.outs[0] == x.shape and call["step"] == 1:
        return Rule((same(x.shape),), (same(x.shape),), linear=(0,))
    row = but(x.ndim, (dim_of(call, x.ndim),))
    out = tuple(d for d in row if d is not None) if call.name in ("select", "unbind") else row
    return Rule((row,), (out,) * len(call.outs), linear=(0,))


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
        row = but(n, gone)
    elif call.name == "unfold_backward":
        row = (*but(n, gone), None)
    else:
        row = tuple(d for d in range(n) if d not in gone) + (None,) * (call.name == "diagonal_backward")
    out = but(len(call["input_sizes"]), gone)
    return Rule((row if len(row) == grad.ndim else none(grad.shape),), (out,), linear=(0,), sizes="input_sizes")


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
    out = call.outs[0] or ()
    row = but(len(out), (call["dim"] % len(out),))
    linear = tuple(range(len(call.tensors))) if len({t.dtype for t in call.tensors}) == 1 else ()
    if call.name == "stack":
        dim = call["dim"] % len(out)
        return Rule((row[:dim] + row[dim + 1 :],) * len(call.tensors), (row,), linear=linear)
    return Rule(tuple(row if t.ndim == len(out) else none(t.shape) for t in call.tensors), (row,), linear=linear)


def repeat(call: Call) -> Rule:
    """New dims, and dims repeated."""
    x, times = call.tensors[0], call["repeats"]
    shift = len(times) - x.ndim
    row = tuple(d if times[d + shift] == 1 else None for d in range(x.ndim))
    return Rule((row,), ((*(None,) * shift, *row),), linear=(0,))
