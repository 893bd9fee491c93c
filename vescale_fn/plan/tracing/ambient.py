"""The settings around a function that decide what its ops give: those that a plan is made for, and those that it writes down.

A function may change a setting itself, for a part of what it does. What torch asks for above the level that is recorded (the
default device, autocast, which attention it takes) has then been answered. Torch's default dtype is asked for below it, and is
written into the recorded call. What a kernel looks up each time it runs cannot be recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..._core import torch_internals
from ..._core.base import context
from ..._core.base.op_arguments import bind, tensors_in
from ..._core.base.state import now as current
from ..._core.base.state import process
from ..ir.graph import Step

SIMULATED = "the number of simulated ranks"
NAMES = (
    "the mesh",
    SIMULATED,
    "the dtype of sums",
    "whether gradients are enabled",
    "inference mode",
    "torch's default dtype",
    "torch's default device",
    "autocast",
    "a setting of torch's kernels",
    "which attention torch may take",
)


def around() -> tuple[Any, ...]:
    """What is ambient and decides what a function does, in the order of `NAMES`."""
    return (
        context.current_mesh(),
        process.simulated,
        process.sums_in,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch_internals.default_device(),
        torch_internals.autocasting(),
        torch_internals.kernel_settings(),
        torch_internals.choices(),
    )


def resolved(op: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> tuple[Any, dict[str, Any]]:
    """A call that gives what ``op(*args, **kwargs)`` gives now, whatever torch's default dtype will be: the function to call,
    and arguments by name to add."""
    given = list(tensors_in(args, kwargs))
    if bind(op, args, kwargs).get("dtype") is not None or any(x.is_floating_point() or x.is_complex() for x in given):
        return op, {}
    if not given:
        return op, {"dtype": out.dtype} if isinstance(out, torch.Tensor) else {}
    if not (any(map(_is_real, (*args, *kwargs.values()))) or any(map(_is_real, _flat(out)))):
        return op, {}
    return _under(op, torch.get_default_dtype()), {}


def _flat(a: Any) -> Iterator[Any]:
    if isinstance(a, (list, tuple)):
        for x in a:
            yield from _flat(x)
    else:
        yield a


def _is_real(a: Any) -> bool:
    """Whether something is, or holds, a float or a complex number."""
    return any(
        x.is_floating_point() or x.is_complex() if isinstance(x, torch.Tensor) else isinstance(x, (float, complex))
        for x in _flat(a)
    )


@functools.lru_cache(maxsize=256)
def _under(op: Any, dtype: torch.dtype) -> Step:
    """An operator on whole numbers that makes floats of torch's default dtype, where that is `dtype`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        set_back = context.Restored(torch.set_default_dtype, torch.get_default_dtype())
        with set_back, set_back:
            torch.set_default_dtype(dtype)
            return op(*args, **kwargs)

    places = [(i, a.alias_info) for i, a in enumerate(torch_internals.schema(op).arguments) if a.alias_info is not None]
    return Step(
        f"{torch_internals.operator_name(op).split('::')[-1]}_in_{str(dtype).removeprefix('torch.')}",
        run,
        writes=tuple(i for i, alias in places if alias.is_write),
        views=tuple(i for i, _ in places),
    )


def only_recorded() -> bool:
    """Whether nothing else than the recorder looks at what is done here."""
    now = current()
    return not (
        torch_internals.dispatch_modes() > 1
        or torch_internals.transforming()
        or torch_internals.forward_ad_active()
        or now.as_written
        or now.key_uses is not None
        or now.recorder is not None
        or now.unit is not None
        or now.keeper is not None
        or now.kept is not None
        or now.ruled
        or now.keyed is not None
        or now.entries
        or now.apart
        or process.watch is not None
    )
