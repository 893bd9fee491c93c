"""What a call of a plan has to do: operations, bytes that it reads and writes, numbers that it draws."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx

from ..._core import torch_internals
from . import graph as plan


class Work(NamedTuple):
    """What a call has to do.

    Attributes:
        flops: of a product of matrices, a convolution or attention; of other calls 0.
        moved: bytes of what it is given and makes.
        drawn: of these the bytes of keyed random numbers.
        dtype: of what it computes with; None where it makes no tensor.
        product: [n, k] @ [k, m], how often: n, m, k and that number; None for other calls.
    """

    flops: float
    moved: int
    drawn: int
    dtype: torch.dtype | None
    product: tuple[int, int, int, int] | None


def work(node: fx.Node) -> Work:
    """What a call of an operator, or a step of a plan's own, has to do."""
    outs = tensors(plan.value(node))
    made = sum(map(plan.nbytes, outs))
    given = sum(plan.nbytes(x) for one in node.all_input_nodes for x in tensors(plan.value(one)))
    count = flops(node)
    dtype = outs[0].dtype if outs else None
    drawn = made if plan.is_aten(node) and _is_a_draw(node) else 0
    return Work(count, made + given, drawn, dtype, _product(node, outs, count))


def _product(node: fx.Node, outs: list[torch.Tensor], count: float) -> tuple[int, int, int, int] | None:
    if plan.name_of(node) not in _PRODUCTS or not outs or outs[0].ndim < 2:
        return None
    *batch, n, m = outs[0].shape
    many = math.prod(batch)
    return n, m, round(count / max(2 * n * m * many, 1)), many


def flops(node: fx.Node) -> float:
    """The floating-point operations of a product of matrices, a convolution or attention; of other calls 0."""
    name = plan.name_of(node)
    if name not in _PRODUCTS and not name.startswith(_OTHERS) and "scaled_dot_product" not in name:
        return 0.0
    shapes = [
        tuple(x.shape) for one in node.args for x in tensors(one.meta.get("val") if isinstance(one, fx.Node) else 0)
    ]
    outs = [tuple(x.shape) for x in tensors(plan.value(node))]
    if name in _PRODUCTS and len(shapes) >= 2:
        one, other = shapes[1:3] if "add" in name else shapes[:2]
        batch = outs[0][0] if name in ("bmm", "baddbmm") else 1
        # [n, k] and [k, m] to [n, m], in whatever order the dims stand: the product of all sizes is that of n, k, m squared
        return 2 * math.sqrt(math.prod(one) * math.prod(other) * math.prod(outs[0]) / max(batch, 1))
    if name == "convolution":
        return 2 * math.prod(outs[0]) * math.prod(shapes[1][1:])
    if name == "convolution_backward":  # of what comes in, the gradient, the input and the weight
        wanted = sum(map(bool, node.args[-1])) if isinstance(node.args[-1], (list, tuple)) else 2
        return 2 * min(wanted, 2) * math.prod(shapes[0]) * math.prod(shapes[2][1:])
    if "scaled_dot_product" in name or name.startswith("_flash_attention"):
        backward = "backward" in name
        *batch, queries, width = shapes[1 if backward else 0]
        keys = shapes[2 if backward else 1][-2]
        return (10 if backward else 4) * math.prod(batch) * queries * keys * width
    return 0.0


_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linear", "_scaled_mm", "mv", "dot", "vdot"}


_OTHERS = "convolution", "_flash_attention"


def _is_a_draw(node: fx.Node) -> bool:
    return torch_internals.operator_name(node.target).startswith("vescale_fn::")  # type: ignore[arg-type]


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a result."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for one in value for x in tensors(one)] if isinstance(value, (list, tuple)) else []


GATHERS = {"embedding", "index", "index_select", "gather", "narrow_copy", "slice_copy"}  # read what they give alone
FUNCTIONS = {
    *("exp", "exp2", "log", "log1p", "tanh", "sigmoid", "erf", "sin", "cos", "pow", "gelu", "gelu_backward", "silu"),
    *("silu_backward", "_softmax", "_log_softmax", "logsumexp", "softplus", "mish"),
}
