"""Tensors that have shapes and no values."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor as _fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _python_dispatch

from .modes import unrecorded


def preload() -> None:
    """Import what torch imports at the first op on shapes alone: a second, spent once before a fork, not by each rank."""
    with shapes_only():
        torch.ops.aten.add.Tensor(torch.empty(1), 1)


def _no_values(x: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a tensor without values has no memory to read")


FakeTensor.__dlpack__ = FakeTensor.apply_ = _no_values  # torch's read from address 0: garbage, or a crash


_idle: list[Any] = []  # modes that nobody has entered: each counts in itself how deep it is entered


def _entered() -> Any:
    """The mode of the `shapes_only` around; None where there is none."""
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return next((mode for mode in modes if hasattr(mode, "only_shapes")), None)


logging.getLogger(FakeTensorMode.__module__).addFilter(lambda record: _entered() is None)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Inside, tensors have shapes and strides but no values; what cannot be run so raises, and is not logged."""
    around = mode = _entered()
    if around is None:
        try:
            mode = _idle.pop()
        except IndexError:
            mode = fake_mode(allow_non_fake_inputs=True)
            mode.only_shapes = True
    try:
        with unrecorded(), mode:
            yield
    finally:
        if around is None:
            _idle.append(mode)


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
