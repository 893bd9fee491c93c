"""The same float functions on tensors that carry gradients, for distributions with tensor parameters.

Here gradients, tangents, `vmap`, tracers and arrays pass through; the bits are those of `elementary`. Each function is
one elementwise operator, `vescale_fn::exact`, and one row of `SLOPES`: its derivative, in functions that have
derivatives themselves.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..._core import torch_internals
from . import more_floats

_library = torch.library.Library("vescale_fn", "FRAGMENT")
for _schema in ("exact(Tensor x, str name) -> Tensor", "gamma_slope(Tensor x, Tensor a, bool logarithm) -> Tensor"):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.pointwise))


def _gamma_slope(x: torch.Tensor, a: torch.Tensor, logarithm: bool) -> torch.Tensor:
    """The derivative of a gamma draw (or of its logarithm) in a, where the uniform number behind it stays: implicit.

    Source: Figurnov, Mohamed and Mnih, "Implicit reparameterization gradients" (2018).
    """
    wide, a = torch.broadcast_tensors(x.double(), a.double())
    sample = wide.exp().clamp(min=torch.finfo(torch.float64).smallest_normal) if logarithm else wide
    slope = torch_internals.standard_gamma_grad(a.contiguous(), sample.contiguous())
    return (slope / sample if logarithm else slope).to(x.dtype)


def _gamma_slope_vmap(info: Any, in_dims: Any, x: torch.Tensor, a: torch.Tensor, logarithm: bool) -> Any:
    ndim = max(t.ndim - (dim is not None) for t, dim in zip((x, a), in_dims[:2], strict=True))
    front = [t if dim is None else t.movedim(dim, 0) for t, dim in zip((x, a), in_dims[:2], strict=True)]
    front = [
        t if dim is None else t.reshape(t.shape[0], *(1,) * (ndim + 1 - t.ndim), *t.shape[1:])
        for t, dim in zip(front, in_dims[:2], strict=True)
    ]
    return torch.ops.vescale_fn.gamma_slope.default(*front, logarithm), 0


_library.impl("exact", more_floats.extended, "CompositeExplicitAutograd")
torch.library.register_fake("vescale_fn::exact", lambda x, name: torch.empty_like(x), lib=_library)
torch.library.register_vmap(
    "vescale_fn::exact",
    lambda info, in_dims, x, name: (torch.ops.vescale_fn.exact.default(x, name), in_dims[0]),
    lib=_library,
)
_library.impl("gamma_slope", _gamma_slope, "CompositeExplicitAutograd")
torch.library.register_fake(
    "vescale_fn::gamma_slope",
    lambda x, a, logarithm: x.new_empty(torch.broadcast_shapes(x.shape, a.shape)),
    lib=_library,
)
torch.library.register_vmap("vescale_fn::gamma_slope", _gamma_slope_vmap, lib=_library)


SLOPES = {  # of x and of the function's value there
    "exp": lambda x, y: y,
    "log": lambda x, y: 1 / x,
    "log1p": lambda x, y: 1 / (1 + x),
    "sqrt": lambda x, y: 0.5 / y,
    "erf": lambda x, y: 2 / math.sqrt(math.pi) * exp(-x * x),
    "erfinv": lambda x, y: math.sqrt(math.pi) / 2 * exp(y * y),
}


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(x: Any, name: str) -> Any:
        return torch.ops.vescale_fn.exact.default(x, name)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.name = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * SLOPES[ctx.name](*ctx.saved_tensors), None

    @staticmethod
    def jvp(ctx: Any, tangent: Any, _: Any) -> Any:  # type: ignore[override]
        return tangent * SLOPES[ctx.name](*ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Any, name: str) -> Any:
        return torch_internals.apply(_Exact, x, name), in_dims[0]


def exp(x: torch.Tensor) -> torch.Tensor:
    """e to the power of x."""
    return torch_internals.apply(_Exact, x, "exp")


def log(x: torch.Tensor) -> torch.Tensor:
    """The natural logarithm."""
    return torch_internals.apply(_Exact, x, "log")


def log1p(x: torch.Tensor) -> torch.Tensor:
    """log(1 + x)."""
    return torch_internals.apply(_Exact, x, "log1p")


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """The root, correctly rounded."""
    return torch_internals.apply(_Exact, x, "sqrt")


def erf(x: torch.Tensor) -> torch.Tensor:
    """The error function."""
    return torch_internals.apply(_Exact, x, "erf")


def erfinv(x: torch.Tensor) -> torch.Tensor:
    """The inverse of the error function."""
    return torch_internals.apply(_Exact, x, "erfinv")


def above(x: torch.Tensor) -> torch.Tensor:
    """The next number of x's dtype. It has no derivative here."""
    return torch.ops.vescale_fn.exact.default(x.detach(), "above")


def below(x: torch.Tensor) -> torch.Tensor:
    """The number of x's dtype before it. It has no derivative here."""
    return torch.ops.vescale_fn.exact.default(x.detach(), "below")


def power(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x to the power of y, for x >= 0 and y > 0; through float64, so that float32 results are rounded once."""
    wide = x.double()
    safe = torch.where(wide > 0, wide, torch.ones_like(wide))
    raised = exp(y.double() * log(safe))
    return torch.where(wide > 0, raised, wide * 0).to(x.dtype)


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dim, in an order that nothing but its size decides."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        pairs = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([pairs, x[..., 2 * half :]], dim=-1) if x.shape[-1] % 2 else pairs
    return x.sum(-1)  # of one element, or of none


class _Implicit(torch.autograd.Function):
    """A draw of the gamma distribution as a function of its concentration."""

    @staticmethod
    def forward(x: Any, a: Any, logarithm: bool) -> Any:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, a, ctx.logarithm = inputs
        ctx.save_for_backward(x, a)
        ctx.save_for_forward(x, a)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, a = ctx.saved_tensors
        slope = torch.ops.vescale_fn.gamma_slope.default(x.detach(), a.detach(), ctx.logarithm)
        return None, grads[0] * slope, None

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Any, __: Any) -> Any:  # type: ignore[override]
        x, a = ctx.saved_tensors
        return tangent * torch.ops.vescale_fn.gamma_slope.default(x.detach(), a.detach(), ctx.logarithm)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Any, a: Any, logarithm: bool) -> Any:
        x, a = (
            t.unsqueeze(0).expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((x, a), in_dims[:2], strict=True)
        )
        return torch_internals.apply(_Implicit, x, a, logarithm), 0


def implicit(x: torch.Tensor, a: torch.Tensor, logarithm: bool) -> torch.Tensor:
    """`x`, drawn with concentration `a` (of the same shape): with the gradient in a."""
    return torch_internals.apply(_Implicit, x, a, logarithm)
