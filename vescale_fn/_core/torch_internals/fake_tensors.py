"""Tensors that have shapes and no values."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor as _fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _python_dispatch

from .modes import AsWritten, unrecorded

# Each fake mode asks whether there is a GPU. Of CUDA's driver, unless NVML may answer; and a process that has asked the driver
# cannot fork ranks that use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def preload() -> None:
    """Import what torch imports at the first op on shapes alone: a second, spent once before a fork, not by each rank."""
    with shapes_only():
        torch.ops.aten.add.Tensor(torch.empty(1, device="cpu"), 1)


def _no_values(x: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a tensor without values has no memory to read")


FakeTensor.__dlpack__ = FakeTensor.apply_ = _no_values  # torch's read from address 0: garbage, or a crash


_idle: list[Any] = []  # modes that nobody has entered: each counts in itself how deep it is entered


def _entered() -> Any:
    """The mode of the `shapes_only` around; None where there is none."""
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return next((mode for mode in modes if hasattr(mode, "only_shapes")), None)


def _is_wanted(record: logging.LogRecord) -> bool:
    """Whether what torch logs is not of a mode of `shapes_only`, whose method raised: while it runs, it is on no stack."""
    raised = record.exc_info[2] if record.exc_info else None
    return raised is None or not hasattr(raised.tb_frame.f_locals.get("self"), "only_shapes")


logging.getLogger(FakeTensorMode.__module__).addFilter(_is_wanted)


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


class _Mode(AsWritten, FakeTensorMode):
    """Torch's mode, which takes 150 us a view, where the view itself takes 5: here it is asked for at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # by device, those of a new tensor there, which torch takes 7 us to set
        self._attributes: dict[torch.device, tuple[torch.device, dict[str, Any]]] = {}
        self.known: dict[Any, Any] = {}  # see `known_without_values`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.views(func, args, kwargs):
            return super().__torch_dispatch__(func, types, args, kwargs)
        return self.viewed(func, args)

    def views(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an op gives views, as `viewed` makes them: of a tensor of this mode."""
        x = args[0] if args and not kwargs and _is_view(func) else None
        ours = isinstance(x, FakeTensor) and x.fake_mode is self
        return ours and x.layout is torch.strided and not x.is_complex()  # type: ignore[union-attr]

    def viewed(self, func: Any, args: Any) -> Any:
        """What such an op gives, whether the mode is entered or not."""
        x = args[0]
        with _fake_tensor.in_kernel_invocation_manager(self):
            out = func(*args)
        if isinstance(out, torch.Tensor):
            return out if out is x else self.new(out, x.fake_device)
        return type(out)(self.new(one, x.fake_device) for one in out)

    def new(self, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor of this mode that lies as one of the meta device."""
        found = self._attributes.get(device)
        if found is None:
            first = FakeTensor(self, meta, device)
            self._attributes[device] = first.fake_device, {**vars(first)}
            return first
        device, attributes = found
        made = torch.Tensor._make_subclass(
            FakeTensor, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(attributes)
        return made


@functools.lru_cache(maxsize=4096)
def _is_view(func: Any) -> bool:
    """Whether an operator's results are views of its first argument, and it takes but numbers besides."""
    schema = func._schema
    if not schema.arguments:
        return False
    first, *others = schema.arguments
    return (
        first.alias_info is not None
        and not first.alias_info.is_write
        and all(str(a.type).removeprefix("Optional[").rstrip("]") in _NUMBERS and a.name != "dtype" for a in others)
        and len(schema.returns) == 1
        and torch.Tag.inplace_view not in func.tags
        and isinstance(func, torch._ops.OpOverload)
    )


_NUMBERS = {"int", "List[int", "bool"}


def fake_mode(**options: Any) -> Any:
    """A mode of its own in which tensors have no values, and raise where code in C asks for their address."""
    mode = _Mode(**options)
    mode._allow_unsafe_data_ptr_access = False
    return mode


def without_values(mode: Any, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of such a mode, made by the short way."""
    return mode.new(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


def known_without_values(x: Any) -> dict[Any, Any] | None:
    """What calls on tensors without values that can meet this one have given, for whoever asks again; None for others."""
    return x.fake_mode.known if type(x) is FakeTensor and isinstance(x.fake_mode, _Mode) else None


def another(x: Any) -> Any:
    """Another tensor without values that lies as this one."""
    return without_values(x.fake_mode, x.shape, x.stride(), x.dtype, x.fake_device)


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
