"""`NoValues`: a tensor that has a shape, a dtype, a device and a place in autograd, and no values: it takes no memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import torch_internals
from .errors import NoValueError
from .messages import dtype_text, op_text, report


def refusal(where: str) -> NoValueError:
    """What is raised where a value is asked for."""
    what = "this needs a value, and there is none: only shape, dtype and layout are known"
    fix = "the same on ranks: vfn.make_mesh under vfn.simulate(n), vfn.launch or torchrun, and tensors with values"
    return NoValueError(report(where, what, fix=fix))


class NoValues(torch_internals.FakeTensor):
    """A tensor without values: ops on it give others, and what needs a value raises."""

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return True

    @classmethod
    @torch_internals.not_compiled
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs or {})
        except torch_internals.NO_VALUE_ERRORS:
            raise refusal(_READS.get(op_text(func), op_text(func))) from None
        return out if out is NotImplemented else of(out)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{dtype_text(self.dtype)}[{','.join(map(str, self.shape))}] without values"

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if self.ndim == 0 and form else repr(self)

    def data_ptr(self) -> int:
        raise refusal("data_ptr")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise refusal("__dlpack__")

    def numpy(self, **kwargs: Any) -> Any:  # type: ignore[override]
        raise refusal("numpy")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:  # type: ignore[override]
        raise refusal("numpy")

    def tolist(self) -> Any:
        raise refusal("tolist")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return like, (torch.empty(self.shape, dtype=self.dtype, device="meta"), self.device)


_READS = {"local_scalar_dense": "item", "is_nonzero": "bool"}


@functools.cache
def _mode() -> Any:
    """The one mode in which they are made; among others it takes tensors with values for their shapes."""
    return torch_internals.fake_mode(allow_non_fake_inputs=True)


def empty(shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> NoValues:
    """Such a tensor."""
    with torch_internals.unrecorded(), torch_internals.no_torch_function():
        return of(torch_internals.without_values(_mode(), shape, stride, dtype, device))


def alone(fn: Callable[..., Any], *args: Any) -> Any:
    """What a function gives, in which no tensor is made with values, whatever it is made of."""
    with torch_internals.no_torch_function(), _mode():
        out = fn(*args)
    return of(out)


def like(x: torch.Tensor, device: torch.device | None = None) -> NoValues:
    """Such a tensor in the place of one with values."""
    return x if type(x) is NoValues else empty(x.shape, x.stride(), x.dtype, device or x.device)


def of(out: Any) -> Any:
    """What an op gives, in which tensors have no values."""
    if type(out) is torch_internals.FakeTensor:
        out.__class__ = NoValues
    elif type(out) in (list, tuple):
        for x in out:
            of(x)
    return out


torch_internals.BARE.add(NoValues)
