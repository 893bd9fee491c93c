"""Functions that a recording keeps as a single call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import torch_internals
from .errors import TransformError
from .messages import report


def as_one_step(function: Any, args: Sequence[Any], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
    """``run()``, which a trace has as one call of `function`; and as a value, where it follows no argument."""
    try:
        return torch_internals.as_one_step(function, args, kwargs, run)
    except torch_internals.FrozenNumber as error:
        raise TransformError(
            report(
                str(error.args[0]),
                "a number is read out of a value that torch.func.linearize, or make_fx, follows, and would be frozen",
                fix="vfn.linearize, which traces nothing",
            )
        ) from None
