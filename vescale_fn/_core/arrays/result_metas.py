"""What the results of an op look like on one device: found by running it on tensors without values, and remembered."""

from __future__ import annotations

from typing import Any

import torch

from .. import torch_internals
from ..base.op_arguments import with_tensors
from .rules.table import SHAPES, on_meta

_LIMIT = 4096
_known: dict[Any, tuple[tuple[Any, ...] | None, Any]] = {}


def metas(func: Any, args: Any, kwargs: Any, tensors: Any) -> tuple[tuple[Any, ...] | None, Any]:
    """What the results look like on one device, and whether they are a tuple or a list (None: one result). The first is None
    where that cannot be told without the values.

    However the arguments lie, results of the same shapes look alike: torch's shape functions, most of them in Python, take
    much of a decision's time, and a program that is decided in another layout asks them the same.
    """
    if not on_meta(func):
        return _found(func, args, kwargs, tensors, (None,))
    try:
        key = func, torch.get_default_dtype(), _described(args), _described(kwargs)
        known = _known.get(key)
    except (RuntimeError, TypeError):  # no strides, or a number without a hash
        return _found(func, args, kwargs, tensors, ("meta", None))
    if known is None:
        known = _found(func, args, kwargs, tensors, ("meta", None))
        if all(x.device.type == "meta" for x in known[0] or () if isinstance(x, torch.Tensor)):  # no mode holds it
            if len(_known) >= _LIMIT:
                _known.clear()
            _known[key] = known
    return known


def _described(a: Any) -> Any:
    """A key of what the results can depend on; 1, True and 1.0 are equal, and not the same."""
    if isinstance(a, torch.Tensor):
        return a.shape, a.stride(), a.dtype, a.device
    if isinstance(a, (list, tuple)):
        return type(a), *map(_described, a)
    if isinstance(a, dict):
        return tuple((name, _described(x)) for name, x in a.items())
    return type(a), a


def _found(func: Any, args: Any, kwargs: Any, tensors: Any, devices: tuple[str | None, ...]) -> tuple[Any, Any]:
    """What the op gives on tensors of the first of `devices` that has a kernel for it; None: fake ones of its own device."""
    shaped: Any = SHAPES.get(func) or func
    for device in devices:
        with torch_internals.shapes_only() if device is None else torch_internals.unrecorded():
            try:
                fakes = [
                    torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device or x.device) for x in tensors
                ]
                fake_args, fake_kwargs = with_tensors((args, kwargs), iter(fakes))
                out = shaped(*fake_args, **fake_kwargs)
                break
            except Exception:  # told by no kernel for tensors without values
                continue
    else:
        return None, None
    if out is None and torch_internals.operator_name(func).endswith("_"):  # a list changed in place
        out = fake_args[0]
    many = next((kind for kind in (list, tuple) if isinstance(out, kind)), None)
    outs: Any = tuple(out) if many else (out,)  # type: ignore[arg-type]
    if all(o is None for o in outs) or not all(o is None or isinstance(o, (int, torch.Tensor)) for o in outs):
        return None, many
    return outs, many
