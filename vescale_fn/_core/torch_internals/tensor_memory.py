"""The memory of tensors: bases, storages, versions, values that are computed lazily."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards as _TensorGuards

from .functorch import peel
from .modes import no_torch_function

_storage: Any = torch._C.TensorBase.untyped_storage  # also of a tensor whose class answers that it has none

flattened = torch._C._nn.flatten_dense_tensors  # of one dtype, one after the other in one dim
unflattened = torch._C._nn.unflatten_dense_tensors  # parts of such a tensor, with the shapes of these


def base(x: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `x` is a view of."""
    return x._base


def no_view(x: torch.Tensor) -> torch.Tensor:
    """`x`, not as a view of a tensor that nobody else has: autograd refuses writes into a Function's result that is a view."""
    return x.data if x._is_view() else x


def memory_number(x: torch.Tensor) -> int:
    """The storage of `x`, as a number."""
    return _storage(x)._cdata


def memory(x: torch.Tensor) -> tuple[Any, ...]:
    """Where the elements of `x` are; equal for two tensors that are names of the same elements."""
    return _storage(x)._cdata, x.storage_offset(), x.shape, x.stride()


_use_count = torch._C._storage_Use_Count


def has_own_memory(x: torch.Tensor) -> bool:
    """Whether a plain tensor is the only one that has its memory, which torch has made."""
    storage = _storage(x)
    alone = _use_count(storage._cdata) == 2  # the tensor, and `storage`
    return alone and (storage.resizable() or storage.nbytes() == 0)


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Whether tensors that it is called with are of these ones' classes, shapes, strides, dtypes and devices, and require
    gradients where they do; told in C++. (Of sparse tensors, which have no strides, there is none.)"""
    shapes: Any = [list(x.shape) for x in tensors]
    strides: Any = [list(x.stride()) for x in tensors]
    return _TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check


def storage(x: torch.Tensor) -> Any:
    """The memory of `x`, one object as long as the memory lives, which takes attributes; None for one without (sparse)."""
    try:
        with no_torch_function():
            return _storage(x)
    except (NotImplementedError, RuntimeError):
        return None


def stands_for_memory(storage: Any) -> bool:
    """Whether a storage is none, but stands for that of a wrapper subclass: a kernel would read at address 0."""
    storage = getattr(storage, "_untyped_storage", storage)
    if not isinstance(storage, torch.UntypedStorage) or storage.device.type == "meta":
        return False
    try:
        storage.data_ptr()
    except RuntimeError:
        return True
    return False


def count_write(x: torch.Tensor) -> None:
    """Note that `x` has been written in place."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def materialized(x: torch.Tensor) -> torch.Tensor:
    """`x` with its lazy conjugate, minus sign and zeros carried out: dispatch below autograd does not always heed them."""
    if x._is_zerotensor():  # a tangent that forward mode made up: it has no memory, so that a kernel would crash
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if x.is_conj():
        x = torch.conj_physical(x.conj())
    return torch.neg(torch._neg_view(x)) if x.is_neg() else x


def is_lazy(x: torch.Tensor) -> bool:
    """Whether `x` has a conjugate, a minus sign or zeros that are yet to be carried out: see `materialized`."""
    return x.is_conj() or x.is_neg() or x._is_zerotensor()


def own_shape(func: Any, args: Any) -> None:
    """Apply an op on shapes to what a wrapper subclass says of its own shape, leaving out the subclass's dispatch."""
    with torch._C._DisableTorchDispatch():
        func(*args)


def set_storage_offset(x: torch.Tensor, offset: int) -> None:
    """Make a wrapper subclass, which has no storage, say that it begins there in the memory of what it is a view of."""
    before = torch._C._meta_in_tls_dispatch_include()
    torch._C._set_meta_in_tls_dispatch_include(True)  # nothing is allocated
    try:
        with torch._C._DisableTorchDispatch():
            torch.ops.aten.set_.source_Storage_storage_offset(x, _storage(x), offset, x.shape, x.stride())
    finally:
        torch._C._set_meta_in_tls_dispatch_include(before)


def version(x: torch.Tensor) -> int:
    """How often `x` has been written in place."""
    return 0 if x.is_inference() else peel(x)._version
