"""Tensors that have shapes and no values."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor as _fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .modes import unrecorded


def preload() -> None:
    """Import what torch imports at the first op on shapes alone: a second, spent once before a fork, not by each rank."""
    with shapes_only():
        torch.ops.aten.add.Tensor(torch.empty(1), 1)


def _no_values(x: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a tensor without values has no memory to read")


FakeTensor.__dlpack__ = FakeTensor.apply_ = _no_values  # torch's read from address 0: garbage, or a crash


class _Shapes(threading.local):
    """A thread's own mode, since a mode counts in itself how deep it is entered; and how deep `shapes_only` is entered."""

    depth = 0

    @functools.cached_property
    def mode(self) -> Any:
        return fake_mode(allow_non_fake_inputs=True)


_shapes = _Shapes()
logging.getLogger(FakeTensorMode.__module__).addFilter(lambda record: _shapes.depth == 0)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Inside, tensors have shapes and strides but no values; what cannot be run so raises, and is not logged."""
    _shapes.depth += 1
    try:
        with unrecorded(), _shapes.mode:
            yield
    finally:
        _shapes.depth -= 1


# --- recording plans --------------------------------------------------------------------------------------------------


def fake_mode(**options: Any) -> Any:
    """A mode of its own in which tensors have no values, and raise where code in C asks for their address."""
    mode = FakeTensorMode(**options)
    mode._allow_unsafe_data_ptr_access = False
    return mode


def without_values(mode: Any, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of such a mode, made by the short way."""
    return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


NO_VALUE_ERRORS: tuple[type[Exception], ...] = tuple(  # what says that an op cannot be run without values
    error
    for name in (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "UnsupportedOperatorException",
        "UnsupportedFakeTensorException",
    )
    if (error := getattr(_fake_tensor, name, None))
)
