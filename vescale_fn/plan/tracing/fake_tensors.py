"""Shapes and strides of ops on tensors without values, remembered: the layers of a model ask for the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._core import torch_internals
from ..._core.sharding.layout import contiguous_stride

Lies = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]  # shape, strides, ...


class Valueless:
    """Runs ops on tensors that have shapes, strides, dtypes and devices, and no values.

    Args:
        other: one whose tensors are to meet those of this one.
    """

    def __init__(self, other: Valueless | None = None) -> None:
        self._mode = torch_internals.fake_mode() if other is None else other._mode
        self._known: dict[Any, Any] = {}

    def like(self, x: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """A tensor without values that lies as `x`, there or on another device."""
        return self._made(lies_of(x) if device is None else (x.shape, x.stride(), x.dtype, device))

    def contiguous(self, shape: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        """A tensor of this shape without values and without gaps, of the dtype and on the device of `x`."""
        return self._made((torch.Size(shape), contiguous_stride(shape), x.dtype, _device(x)))

    def lying(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor without values that lies so."""
        return self._made((torch.Size(shape), tuple(stride), dtype, device))

    def __call__(self, op: Any, args: Any, kwargs: Any) -> Any:
        """What an op gives."""
        if not _is_new(op):
            if self._mode.views(op, args, kwargs):
                return self._mode.viewed(op, args)
            with self._mode:
                return op(*args, **kwargs)
        # of an operator its identity, which is no other's as long as `_new` holds it: torch computes its hash in Python
        key = id(op), torch.get_default_dtype(), _key(args), _key(kwargs)
        found = self._known.get(key)
        if found is None:
            with self._mode:
                out = op(*args, **kwargs)
            found = _lies(out)
            if found is not None:
                self._known[key] = found
            return out
        return self._made(found) if type(found[0]) is torch.Size else type(found[0])(map(self._made, found[1]))

    def _made(self, lies: Any) -> torch.Tensor:
        with torch_internals.no_torch_function(), torch_internals.undispatched():  # a body's modes are not to see it
            return torch_internals.without_values(self._mode, *lies)

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._mode.__exit__(*error)


_new: dict[int, tuple[bool, Any]] = {}


def _is_new(op: Any) -> bool:
    """Whether what an op gives is its own, and is decided by how its arguments lie."""
    found = _new.get(id(op))
    if found is None:
        schema = torch_internals.schema(op)
        is_new = (
            not any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))
            and torch.Tag.dynamic_output_shape not in op.tags
            and torch.Tag.data_dependent_output not in op.tags
        )
        found = _new[id(op)] = is_new, op
    return found[0]


def _device(x: torch.Tensor) -> torch.device:
    """The device of a tensor, of one without values without asking its mode."""
    return x.fake_device if type(x) is torch_internals.FakeTensor else x.device  # type: ignore[attr-defined]


def _key(a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return a.shape, a.stride(), a.dtype, _device(a), a.is_conj(), a.is_neg()
    if isinstance(a, (list, tuple)):
        return tuple(map(_key, a))
    if isinstance(a, dict):
        return tuple((name, _key(x)) for name, x in a.items())
    return type(a), a


def lies_of(x: torch.Tensor) -> Lies:
    """How a tensor lies."""
    return x.shape, x.stride(), x.dtype, _device(x)


def _lies(out: Any) -> Any:
    """How results lie: one tensor's, or the kind of sequence with those of its tensors; None for anything else."""
    if isinstance(out, torch.Tensor):
        return lies_of(out)
    if type(out) in (list, tuple) and all(isinstance(x, torch.Tensor) for x in out):
        return type(out)(), list(map(lies_of, out))
    return None
