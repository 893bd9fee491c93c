"""`torch.nn.attention.flex_attention` as differentiable ops of torch: what it computes without a kernel."""

from __future__ import annotations

import contextlib
import inspect
import math
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.flex_attention as _flex
from torch.overrides import TorchFunctionMode


class _Indexing(TorchFunctionMode):
    """An index that `vmap` maps is no number, which is what ``x[i]`` asks a 0-dim tensor for."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            at = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(i, torch.Tensor) for i in at):
                return func(args[0], tuple(i.unsqueeze(0) if i.ndim == 0 else i for i in at)).squeeze(0)
        return func(*args, **kwargs or {})


def _in_ops(q: Any, k: Any, v: Any, score_mod: Any, block_mask: Any, scale: float, _: Any) -> tuple[Any, Any, Any]:
    """In the place of the kernel, with the numbers of `math_attention`, by which torch computes without one."""
    batch, heads = q.shape[:2]
    k, v = (x.repeat_interleave(heads // k.shape[1], 1).expand(batch, *[-1] * 3) for x in (k, v))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = q.to(wide) @ k.to(wide).mT * scale
    at = [torch.arange(n, device=q.device) for n in scores.shape]
    with _Indexing():
        seen = _each(block_mask[-1], 0)(*at)
        # torch's gradient of a score that is masked is zero, whatever `score_mod` makes of it
        scores = torch.where(seen, _each(score_mod, 1)(torch.where(seen, scores, 0.0), *at), -math.inf)
    nothing = ~(scores > -math.inf).any(-1)
    lse = torch.where(nothing, -math.inf, scores.logsumexp(-1))
    out = torch.where(nothing.unsqueeze(-1), 0.0, scores.softmax(-1)).to(q.dtype) @ v.to(q.dtype)
    if not q.is_contiguous():  # the result has its dims in memory in the order of the queries'
        order = [*sorted(range(3), key=q.stride, reverse=True), 3]
        out = out.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])
    return out, lse / math.log(2), scores.amax(-1).detach() / math.log(2)


def _each(f: Any, before: int) -> Any:
    """A function of numbers (so many, then the four indices) as one of tensors."""
    for mapped in (3, 2, 1, 0):
        f = torch.vmap(f, (*[0] * before, *(0 if i == mapped else None for i in range(4))))
    return f


def _with(**names: Any) -> Any:
    """The function with other values for some of the names that it reads."""
    fn: Any = _flex.flex_attention
    made = types.FunctionType(fn.__code__, {**vars(_flex), **names}, fn.__name__, fn.__defaults__, fn.__closure__)
    made.__kwdefaults__ = fn.__kwdefaults__
    return made


_by_kernel = _with()
_EXCHANGED: dict[str, Any] = {
    "flex_attention_hop": _in_ops,
    "_validate_device": lambda *_: None,  # which refuses gradients on CPU
    "_apply_kernel_options": lambda *_, **__: {"BACKEND": "AUTO"},
    "setup_compilation_env": contextlib.nullcontext,
    "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
}
flex_attention_in_ops = _with(**_EXCHANGED)


def missing_of_flex_attention() -> list[str]:
    """The names by which `flex_attention_in_ops` keeps torch's function from its kernel, and which this torch has not got."""
    return [name for name in _EXCHANGED if not hasattr(_flex, name)]


def intercept_flex_attention(handler: Callable[..., Any]) -> None:
    """From now on calls, unless they are compiled, are answered by ``handler(by_kernel, *args, **kwargs)``.

    The code of the function is exchanged, not the function: programs keep it under names of their own.
    """
    fn: Any = _flex.flex_attention
    fn.__signature__ = inspect.signature(_by_kernel)
    fn.__code__, fn.__defaults__ = _asking.__code__, None
    fn.__kwdefaults__ = {"_handler": handler, "_by_kernel": _by_kernel}


def _asking(*args: Any, _handler: Any, _by_kernel: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return _by_kernel(*args, **kwargs)
    return _handler(_by_kernel, *args, **kwargs)
