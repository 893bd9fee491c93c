"""How elementwise ops shard: every dim alike, up to broadcasting; on one tensor and on lists of them."""

from __future__ import annotations

import torch

from .rule import Call, Row, Rule, T, broadcast, none, same

_SAME_VALUE = {"clone", "detach", "alias", "lift_fresh", "positive"}
_LINEAR = {"add", "sub", "rsub", "neg", "_to_copy", "copy"}  # in all tensor arguments together
_SCALING = {"mul", "div"}  # linear in one argument when the other is one number


def elementwise(call: Call) -> Rule:
    """Every dim is split alike, up to broadcasting."""
    out, tensors = call.outs[0], call.tensors
    assert out is not None
    linear: tuple[int, ...] = ()
    zeroed = call.name == "masked_fill" and isinstance(call["value"], (int, float)) and not call["value"]
    if call.name in _SAME_VALUE or zeroed:
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


def alike(call: Call) -> Rule:
    """Elementwise, with buffers of other shapes on some devices."""
    out = call.outs[0]
    row = lambda shape: same(shape) if shape == out else none(shape)
    return Rule(tuple(row(t.shape) for t in call.tensors), tuple(map(row, call.outs)))


def exact(call: Call) -> bool:
    """Whether the op may be done to parts of a sum: no part is rounded to integers, wraps around, or is narrowed."""
    out = call.dtypes[0]
    assert out is not None
    if out.is_floating_point or out.is_complex:
        return all(_as_wide(t.dtype, out) for t in call.tensors)
    return out is not torch.bool and all(t.dtype is out for t in call.tensors)


def _as_wide(dtype: torch.dtype, out: torch.dtype) -> bool:
    """Whether sums of numbers of a dtype lose nothing in another one: torch promotes none of 8 bits, and adds none up."""
    if min(dtype.itemsize, out.itemsize) == 1:
        return False
    return torch.promote_types(dtype, out) is out and (dtype.is_floating_point or dtype.is_complex)


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
        per_result=True,
    )


def lazy(call: Call) -> Rule:
    """Views that only note a conjugate or a minus sign: below autograd nothing reads the note, so it is carried out."""
    op = torch.conj_physical if call.name == "_conj" else torch.neg
    row = same(call.tensors[0].shape)
    return Rule((row,), (row,), linear=(0,), op=lambda block: op(block), copies=True)
