"""Calls in the form in which they cost least, with the same bits.

- ``x.t()`` in a product is part of it: ``mm(x, t(w))`` is ``linear(x, w)``, ``addmm(b, x, t(w))`` is ``linear(x, w, b)``.
- A number beside a tensor is one operand: ``mul.Scalar`` is ``mul.Tensor``, as torch itself carries it out.
- ``x ** 1`` is ``x``.
- The gradient of a norm needs no shift, which its kernel is only given for its size: it need not be gathered again.
- What is the same along a dim is computed once along it: ``f(expand(x))`` is ``expand(f(x))``, and what is broadcast anyway is
  not expanded before.

Left as they are, since other forms round otherwise or gain nothing on a CPU: ``x + s * y`` (``add`` with ``alpha`` and
``addcmul`` round once), ``x + a @ b`` (``addmm`` copies `x`), and the steps of ``rms_norm`` (torch's own function does the
same steps, and then some; its backward pass has no function there).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..ir.graph import is_aten, name_of, value
from ..ir.rewriting import Rewriting, computed

_aten = torch.ops.aten
_NUMBERS = {
    _aten.add.Scalar: _aten.add.Tensor,
    _aten.sub.Scalar: _aten.sub.Tensor,
    _aten.mul.Scalar: _aten.mul.Tensor,
    _aten.div.Scalar: _aten.div.Tensor,
}


def composites(graph: fx.Graph) -> fx.Graph:
    """The graph with cheaper calls for the same values."""
    work = Rewriting(graph)
    for node in work.calls():
        if is_aten(node) and work.fixed.isdisjoint((node, *node.all_input_nodes)):
            _number(node)
            _linear(work, node)
            _shift(node)
            if _is_power_of_one(node):
                work.replace(node, node.args[0])  # type: ignore[arg-type]
            elif _is_pointwise(node):
                _unexpanded(work, node)
    return work.graph


def _number(node: fx.Node) -> None:
    if node.target in _NUMBERS and len(node.args) == 2 and not node.kwargs:
        node.target = _NUMBERS[node.target]  # type: ignore[index]


def _linear(work: Rewriting, node: fx.Node) -> None:
    """A product with a transposed matrix of float32 or float64: of other dtypes, `linear` may use another library."""
    if node.target not in (_aten.mm.default, _aten.addmm.default) or node.kwargs:
        return
    *bias, x, factor = node.args
    if not isinstance(factor, fx.Node) or factor.target is not _aten.t.default or factor in work.fixed:
        return
    w: Any = factor.args[0]
    one_dim = not bias or value(bias[0]).shape == value(w).shape[:1]  # type: ignore[arg-type]
    if one_dim and value(w).is_contiguous() and value(node).dtype in (torch.float32, torch.float64):
        work.replace(node, work.add(node, _aten.linear.default, (x, w, *bias), val=value(node)))


def _shift(node: fx.Node) -> None:
    if node.target is _aten.native_layer_norm_backward.default and not node.kwargs:
        *rest, weight, shift, mask = node.args
        if isinstance(weight, fx.Node) and isinstance(shift, fx.Node) and value(weight).dtype == value(shift).dtype:
            node.args = *rest, weight, weight, mask


def _is_power_of_one(node: fx.Node) -> bool:
    if node.target is not _aten.pow.Tensor_Scalar or node.args[1] != 1:
        return False
    made, x = value(node), value(node.args[0])  # type: ignore[arg-type]
    return made.dtype == x.dtype and made.dtype.is_floating_point and made.stride() == x.stride()


def _is_pointwise(node: fx.Node) -> bool:
    operator: Any = node.target
    return (
        torch.Tag.pointwise in operator.tags
        and not torch_internals.schema(operator).is_mutable
        and isinstance(value(node), torch.Tensor)
        and name_of(node) != "clone"  # which is there for how its result lies
    )


def _unexpanded(work: Rewriting, node: fx.Node) -> None:
    """Take `expand`s out of the arguments of an elementwise call, to after it where they are needed at all."""
    shape = value(node).shape
    expands = (x for x in node.all_input_nodes if name_of(x) == "expand" and x.args[0] not in work.fixed)
    bare: dict[fx.Node, Any] = {x: x.args[0] for x in expands}
    tensors = [x for x in node.all_input_nodes if isinstance(value(x), torch.Tensor)]
    if not bare or len(tensors) != len(node.all_input_nodes):
        return
    small = torch.broadcast_shapes(*(value(bare.get(x, x)).shape for x in tensors))
    if any(value(bare[x]).ndim == 0 for x in bare):  # a number counts less than a tensor for the dtype of a result
        return
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: bare.get(x, x))
    if small == shape:
        node.args, node.kwargs = args, kwargs  # type: ignore[assignment]
    elif all(is_aten(user) and _is_pointwise(user) for user in node.users):
        new = work.add(node, node.target, args, kwargs)  # type: ignore[arg-type]
        wide = work.add(node, _aten.expand.default, (new, list(shape)))
        if not all(_is_as_before(user, node, wide) for user in node.users) or not work.replace(node, wide):
            work.graph.erase_node(wide)
            work.graph.erase_node(new)


def _is_as_before(user: fx.Node, node: fx.Node, wide: fx.Node) -> bool:
    """Whether a call's result keeps the strides that views of it rely on, if an argument of it is expanded instead."""
    args, kwargs = fx.map_arg((user.args, user.kwargs), lambda x: wide if x is node else x)
    before, now = value(user), computed(user.target, args, kwargs)
    return not isinstance(before, torch.Tensor) or before.stride() == now.stride()
