"""The arguments of an aten op: the tensors among them, others in their place, all of them by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import torch_internals


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of an op, in order; also those in lists."""
    found: list[torch.Tensor] = []
    for a in (*args, *kwargs.values()):
        if isinstance(a, torch.Tensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found.extend(x for x in a if isinstance(x, torch.Tensor))
    return found


def replace(a: Any, values: Any) -> Any:
    """`a` with each tensor in it replaced by the next of the iterator `values`."""
    if isinstance(a, torch.Tensor):
        return next(values)
    if isinstance(a, (list, tuple)):
        return type(a)(next(values) if isinstance(x, torch.Tensor) else x for x in a)
    return a


def bind(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, defaults filled in."""
    bound = {}
    for i, argument in enumerate(torch_internals.schema(func).arguments):
        bound[argument.name] = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
    return bound
