"""Settings of torch: autocast, kernels, default dtype and device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def autocasting() -> tuple[Any, ...]:
    """Which autocast is on."""
    if not _any_autocast():
        return ()
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))


@contextlib.contextmanager
def autocasting_so(settings: tuple[Any, ...]) -> Iterator[None]:
    """Within the block, this autocast is on, as `autocasting` tells it."""
    wanted = dict(settings)
    with contextlib.ExitStack() as stack:
        if settings != autocasting():
            for kind, dtype in (*autocasting(), *settings):
                stack.enter_context(torch.autocast(kind, wanted.get(kind, dtype), enabled=kind in wanted))
        yield


def _getters(*names: str) -> list[Callable[[], Any]]:
    """Torch's functions that tell these settings: one that is missing would let a plan be used under another setting."""
    return [getattr(torch._C, f"_get_{name}") for name in names]


# What kernels look up each time they run; and what decides, besides, of which kernels torch makes up an operator.
_KERNEL_SETTINGS = {
    "torch.use_deterministic_algorithms": _getters("deterministic_algorithms", "deterministic_algorithms_warn_only"),
    "torch.utils.deterministic.fill_uninitialized_memory": _getters("deterministic_fill_uninitialized_memory"),
    "torch.set_float32_matmul_precision": _getters("float32_matmul_precision"),
    "torch.backends.cuda.matmul": _getters(
        "cublas_allow_tf32",
        "cublas_allow_fp16_reduced_precision_reduction",
        "cublas_allow_bf16_reduced_precision_reduction",
        "cublas_allow_fp16_accumulation",
    ),
    "torch.backends.cudnn": _getters("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cudnn_allow_tf32"),
    "torch.backends.mkldnn": _getters("mkldnn_enabled", "mkldnn_deterministic", "onednn_allow_tf32"),
}


def _together(getters: Sequence[Callable[[], Any]]) -> Callable[[], tuple[Any, ...]]:
    """One function that calls all of these: written out, it takes a third of the time of a loop over them."""
    names = {f"get_{i}": get for i, get in enumerate(getters)}
    return eval(f"lambda: ({', '.join(f'{name}()' for name in names)},)", names)


# The settings that kernels look up each time they run.
kernel_settings = _together([get for getters in _KERNEL_SETTINGS.values() for get in getters])
# The settings that decide of which kernels torch makes up an operator: which attention is allowed, in which order.
choices = _together(
    [
        *_getters("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled"),
        *_getters("overrideable_sdp_enabled", "math_sdp_allow_fp16_bf16_reduction"),
        *[lambda get=get: tuple(get()) for get in _getters("sdp_priority_order")],
    ]
)


def changed_setting(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """What sets the first of the `kernel_settings` that differs."""
    names = [name for name, getters in _KERNEL_SETTINGS.items() for _ in getters]
    return next(name for name, one, other in zip(names, before, now) if one != other)


def named_kernel_settings() -> dict[str, str]:
    """The same, by what sets them."""
    return {name: ", ".join(str(get()) for get in getters) for name, getters in _KERNEL_SETTINGS.items()}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, `dtype` is torch's default for floats."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def casts_not_kept() -> Iterator[None]:
    """Inside, autocast keeps no weight that it has cast for the next use, and looks for none."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


_CPU = torch.device("cpu")


def default_device() -> torch.device:
    """`torch.get_default_device()`, at once where nothing can have changed it."""
    return _CPU if torch._C._len_torch_function_stack() == 0 else torch.get_default_device()
