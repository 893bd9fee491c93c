"""Arguments by name: each gets a place among those by position, so that a tuple of specs can say how it lies."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .._core import torch_internals
from .._core.base.errors import TransformError
from .._core.base.messages import meant, report

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Placed(NamedTuple):
    """A step and its arguments, all of them by position; `words`: the names that the last ones were given by."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    words: tuple[str, ...] = ()

    def alike(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Another step, to be given the same arguments."""
        return by_name(step, len(self.args) - len(self.words), self.words) if self.words else step


def placed(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], where: str, options: Sequence[str] = ()
) -> Placed:
    """Those by name in the order of the step's signature, behind those by position. It is the step itself where it takes them
    so, else a function that passes them on by their names.

    Args:
        where: the public function that was given them.
        options: its own, of which a name that the step does not take may be a misspelling.

    Raises:
        TransformError: the step takes no argument of such a name, or has it by position already.
    """
    if not kwargs:
        return Placed(step, tuple(args))
    parameters = _parameters(step)
    words = [word for word in parameters if word in kwargs]
    words += sorted(kwargs.keys() - parameters.keys())  # those of **kwargs
    found = (*args, *(kwargs[word] for word in words))
    if parameters:
        signature = inspect.signature(step)
        try:
            bound = signature.bind_partial(*args, **kwargs)
        except TypeError as error:
            name = getattr(step, "__name__", type(step).__name__)
            near = "".join(meant(word, options) for word in words if word not in parameters)
            raise TransformError(report(where, f"arguments for {name}{signature}: {error}{near}")) from None
        first = list(parameters)[: len(found)]
        if not bound.kwargs and list(bound.arguments) == first and [*first[len(args) :]] == words:
            return Placed(step, found, tuple(words))
    return Placed(by_name(step, len(args), words), found, tuple(words))


def by_name(step: Callable[..., Any], count: int, words: Sequence[str]) -> Callable[..., Any]:
    """A step that takes so many arguments by position, and behind them others, which it passes on by their names."""

    @functools.wraps(step)
    @torch_internals.not_compiled
    def called(*args: Any, **kwargs: Any) -> Any:
        return step(*args[:count], **dict(zip(words, args[count:], strict=True)), **kwargs)

    called.__signature__ = _signature(step, count, words)  # type: ignore[attr-defined]
    return called


def _signature(step: Callable[..., Any], count: int, words: Sequence[str]) -> inspect.Signature:
    """Its parameters: those by position, then those by these names, then by name alone what else the step takes."""
    known = _parameters(step)
    names = [p.name for p in known.values() if p.kind in _POSITIONAL and p.name not in words]
    names = [*names, *(f"args_{i}" for i in range(len(names), count))][:count]
    by_position = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in (*names, *words)]
    rest = [p for p in known.values() if p.name not in (*names, *words) and p.kind is not p.VAR_POSITIONAL]
    by_name = [p if p.kind is p.VAR_KEYWORD else p.replace(kind=p.KEYWORD_ONLY) for p in rest]
    return inspect.Signature([*by_position, *by_name])


def _parameters(step: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """What a step takes; nothing where it does not say."""
    try:
        return inspect.signature(step).parameters
    except (TypeError, ValueError):
        return {}
