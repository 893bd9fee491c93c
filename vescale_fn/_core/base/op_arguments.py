"""The arguments of an aten op: the tensors among them, others in their place, all of them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .. import torch_internals


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """The tensors in lists, tuples and dictionaries, in order."""
    found: list[torch.Tensor] = []
    _collect(values, found)
    return found


def _collect(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for x in values:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            _collect(x, found)
        elif isinstance(x, dict):
            _collect(x.values(), found)


_CONTAINERS = list, tuple, dict


def mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    """The same lists, tuples and dictionaries, with `fn` of each thing in them."""
    if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        items = [mapped(fn, x) if isinstance(x, _CONTAINERS) else fn(x) for x in value]
        return (
            type(value)(*items) if hasattr(value, "_fields") else items if type(value) is list else type(value)(items)
        )
    if isinstance(value, dict):
        return {key: mapped(fn, x) for key, x in value.items()}
    return fn(value)


def with_tensors(value: Any, new: Iterator[Any]) -> Any:
    """The same structure with the next of `new` in place of each tensor."""
    return mapped(lambda x: next(new) if isinstance(x, torch.Tensor) else x, value)


def bind(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, defaults filled in."""
    bound = {}
    for i, argument in enumerate(torch_internals.schema(func).arguments):
        bound[argument.name] = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
    return bound
