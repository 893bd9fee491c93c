"""`vfn.plan.shared`: a part of a recorded function, such as a layer, that is recorded once for equal calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .._core import torch_internals
from .._core.base.user_calls import checked_function
from .jit import jit

Q = ParamSpec("Q")
R = TypeVar("R")


def shared(f: Callable[Q, R]) -> Callable[Q, R]:
    """`f`, of which a plan that is being recorded records equal calls once, as it does of a jitted function; elsewhere `f`.

    For the layers of a Python loop: recording 64 layers then takes little longer than recording one. The plan sends and
    computes the same: few equal calls are inlined, 16 or more stay calls of it (on GPUs, unless values travel inside of them).

    Args:
        f: a pure function of trees. Calls are equal where trees, shapes, dtypes, layouts, Python values, what it closes over
            and the settings around are.

    >>> import torch, vescale_fn as vfn
    >>> layer = vfn.plan.shared(lambda w, x: torch.tanh(x @ w))
    >>> @vfn.jit
    ... def f(ws, x):
    ...     for w in ws:
    ...         x = layer(w, x)
    ...     return x
    >>> f([torch.eye(2)] * 8, torch.zeros(2))
    tensor([0., 0.])
    """
    checked_function(f, "shared")
    jitted: Any = jit(f)

    @torch_internals.not_compiled
    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (f if torch_internals.recorder() is None else jitted)(*args, **kwargs)

    return run
