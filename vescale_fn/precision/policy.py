"""Policies: in which dtype parameters are kept, computed with, added up over ranks, and results are given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._core.arrays.array import narrowed
from .._core.base import context, dtypes, tree
from .._core.base.containers import opened
from .._core.base.errors import VfnError
from .._core.base.front_door import public
from .._core.base.messages import described, dtype_text, meant, report
from .._core.base.user_calls import checked_function
from ..optim.masks import by_path

_DTYPES = {name: dtype for dtype, row in dtypes.FLOATS.items() for name in row.names}
_FIELDS = ("params", "compute", "reduce", "output")


@dataclass(frozen=True)
class Policy:
    """Which dtype is for what; made by `policy`.

    Args:
        params: of parameters as they are kept, and so of their gradients and of an optimiser's state: master weights.
        compute: of parameters and inputs in a computation.
        reduce: the narrowest in which sums over ranks are made.
        output: of results.
        rules: (pattern, dtype) pairs: parameters for which another dtype than `compute` is for computing.
    """

    params: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    output: torch.dtype
    rules: tuple[tuple[str, torch.dtype], ...] = ()

    def __repr__(self) -> str:
        said = ",".join(f"{name}={dtype_text(getattr(self, name))}" for name in _FIELDS)
        more = "".join(f", {pattern!r}: {dtype_text(dtype)}" for pattern, dtype in self.rules)
        return f"Policy({said}{more})"

    def cast_to_param(self, values: Any) -> Any:
        """The floating-point tensors of a tree in the dtype in which parameters are kept.

        >>> import torch, vescale_fn as vfn
        >>> vfn.precision.policy("params=f32,compute=bf16").cast_to_param({"w": torch.ones(1, dtype=torch.bfloat16)})
        {'w': tensor([1.])}
        """
        return _cast(values, self.params)

    def cast_to_output(self, values: Any) -> Any:
        """The floating-point tensors of a tree in the dtype of results."""
        return _cast(values, self.output)

    def cast_to_compute(self, params: Any) -> Any:
        """Parameters in the dtypes in which they are computed with, each by the first rule whose pattern is in its path.

        What `with_sharding` gathers of them travels in that dtype, and the gradient is added up in that of the parameters.
        """
        dtypes = tree.leaves(by_path(self.rules, otherwise=self.compute)(params))
        leaves, structure = opened(params, "policy", "params")
        return tree.unflatten(structure, [self._computed(x, dtype) for x, dtype in zip(leaves, dtypes)])

    def _computed(self, x: Any, dtype: torch.dtype) -> Any:
        if not _has_floats(x) or x.dtype == dtype:
            return x
        wide = _holds(x.dtype, self.reduce) and not _holds(dtype, self.reduce)
        return narrowed(x, dtype) if wide else x.to(dtype)

    def apply(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """`f` by this policy.

        Its first argument, the parameters, is cast by `cast_to_compute`; the floating-point tensors of its other arguments
        are cast to ``compute``, and those of its result to ``output``. Sums over ranks are made in ``reduce``, or in the
        value's own dtype where that holds more; where a `vfn.grad` is taken of it, those of the backward pass as well.

        Weights that `with_sharding` gathers travel in the dtype of computing, and their gradients are added up, and stay, in
        that of the parameters, also where blocks of `f` are computed again (`remat`). Where a transform of torch.func comes
        between, the sum is made in the dtype of computing.

        Args:
            f: a function of parameters and of anything else.

        Returns:
            A function of the same arguments. A gradient by the parameters has their own dtype.

        Source: `jmp.Policy`; FSDP2's `MixedPrecisionPolicy`.

        >>> import torch, vescale_fn as vfn
        >>> def loss(w, x):
        ...     print(w.dtype, x.dtype)
        ...     return (x @ w).square().mean()
        >>> policy = vfn.precision.policy("params=f32,compute=bf16,reduce=f32,output=f32")
        >>> value, grad = vfn.value_and_grad(policy.apply(loss))(torch.ones(3), torch.ones(2, 3))
        torch.bfloat16 torch.bfloat16
        >>> value.dtype, grad.dtype
        (torch.float32, torch.float32)
        """
        checked_function(f, "apply")

        @functools.wraps(f)
        def run(params: Any, *args: Any, **kwargs: Any) -> Any:
            set_back = context.setting_sums_back()
            with set_back, set_back:
                context.sum_in(self.reduce)
                args, kwargs = _cast((args, kwargs), self.compute)
                return self.cast_to_output(f(self.cast_to_compute(params), *args, **kwargs))

        return run


@public("precision.policy")
def policy(
    text: str = "",
    *,
    params: Any = None,
    compute: Any = None,
    reduce: Any = None,
    output: Any = None,
    rules: Sequence[tuple[str, Any]] = (),
) -> Policy:
    """Which dtype is for what.

    Args:
        text: the dtypes in one line, as below; or each by its own argument, a `torch.dtype` or its name.
        params: of parameters as they are kept (float32).
        compute: of parameters and inputs in a computation (that of the parameters).
        reduce: the narrowest in which sums over ranks are made (float32, or what is computed in, if that is wider).
        output: of results (that of the parameters).
        rules: (pattern, dtype) pairs, for parameters that are computed with in another dtype: a router's, a norm's. The
            pattern is looked for in paths like ``blocks.0.attn.wq``.

    Raises:
        VfnError: what is no floating-point dtype, or has another name than these.

    Source: `jmp.get_policy`.

    >>> import vescale_fn as vfn
    >>> vfn.precision.policy("params=f32,compute=bf16,reduce=f32,output=f32", rules=[("router", "f32")])
    Policy(params=f32,compute=bf16,reduce=f32,output=f32, 'router': f32)
    """
    given: dict[str, Any] = {}
    wrong: list[str] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in _FIELDS:
            wrong.append(f"{part!r} is for none of {', '.join(_FIELDS)}{meant(name, _FIELDS)}")
        given[name] = value
    named = {"params": params, "compute": compute, "reduce": reduce, "output": output}
    wrong += [f"{name} is given twice" for name, x in named.items() if x is not None and name in given]
    given |= {name: x for name, x in named.items() if x is not None}
    found = {name: _dtype(given[name], name, wrong) for name in _FIELDS if name in given}
    others = tuple((pattern, _dtype(x, f"the rule {pattern!r}", wrong)) for pattern, x in rules)
    if wrong:
        fix = 'policy("params=f32,compute=bf16,reduce=f32,output=f32", rules=[("router", "f32")])'
        raise VfnError(report("policy", "it does not say dtypes", wrong, fix))
    kept = found.get("params", torch.float32)
    compute = found.get("compute", kept)
    return Policy(
        kept,
        compute,
        found.get("reduce", torch.promote_types(compute, torch.float32)),
        found.get("output", kept),
        others,
    )


def _dtype(x: Any, name: str, wrong: list[str]) -> Any:
    found = _DTYPES.get(x) if isinstance(x, str) else x
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        wrong.append(f"{name} is {described(x)}{meant(x, _DTYPES)}")
    return found


def _has_floats(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype.is_floating_point


def _holds(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether a dtype holds all numbers of another."""
    return torch.promote_types(one, other) == one


def _cast(values: Any, dtype: torch.dtype) -> Any:
    leaves, structure = opened(values, "policy", "values")
    return tree.unflatten(structure, [x.to(dtype) if _has_floats(x) else x for x in leaves])
