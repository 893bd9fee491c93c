"""Calling a function of the user's: what goes wrong there, in our words, with their line as the last frame."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from . import tracebacks
from .errors import InPlaceError, TransformError, VfnError, described, report

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here

_KEYS = "keys = vfn.random.split(key, n), mapped over as well, and vfn.random's draws from each of them"
# What torch says, and what it means to someone who called a transform of ours: class, function, fact, way out.
_MEANINGS: tuple[tuple[str, type[VfnError], str, str, str], ...] = (
    (
        "leaf Variable that requires grad is being used in an in-place operation",
        InPlaceError,
        "grad",
        "the function writes into what it is differentiated by, whose value before is needed",
        "x = x.clone() first, or the function without the underscore",
    ),
    (
        r"modified by an inplace operation.*which is output \d+ of (?:\w+::)?(\w+?)(?:Backward\d*)?,",
        InPlaceError,
        "grad",
        "an in-place op changed a value which the gradient needs as it was",
        "the function without the underscore, or a clone() first",
    ),
    (
        "vmap: It looks like you're attempting to use a Tensor in some data-dependent control flow",
        TransformError,
        "vmap",
        "this asks for the truth of a value that differs between entries, so they could go different ways",
        "torch.where(condition, a, b)",
    ),
    (
        r"vmap: It looks like you're calling \.item\(\) on a Tensor",
        TransformError,
        "vmap",
        "this reads a Python number out of a value that differs between entries",
        "the 0-d tensor as it is: arithmetic takes it, x.index_select(0, i[None]) and torch.where as well",
    ),
    (
        "vmap: called random operation while in randomness error mode",
        TransformError,
        "vmap",
        "this draws from torch's generator: the same numbers for all entries, or others for each?",
        _KEYS,
    ),
    (
        r"vmap: inplace arithmetic\(self, \*extra_args\) is not possible",
        InPlaceError,
        "vmap",
        "this writes what differs between entries into a value that is the same for all of them",
        "the function without the underscore, which makes a new value",
    ),
)


def checked_function(f: Any, where: str) -> None:
    """Raise unless `f` can be called: of its result, as in ``grad(loss(w))``, say what was meant."""
    if not callable(f):
        fix = f"vfn.{where}(f, ...), with the function itself and not with what it returns"
        raise TransformError(report(where, f"f must be a function, but it is {described(f)}", fix=fix))


def parameter(f: Callable[..., Any], args: Sequence[Any], position: int) -> str:
    """The name of the parameter that takes the argument at a position; "" where it has none."""
    try:
        bound = inspect.signature(f).bind(*args)
    except (TypeError, ValueError):
        return ""
    kinds, taken = bound.signature.parameters, 0
    for name in bound.arguments:
        if kinds[name].kind is inspect.Parameter.VAR_POSITIONAL:
            return ""
        if taken == position:
            return name
        taken += 1
    return ""


def _signature(f: Callable[..., Any]) -> str:
    try:
        return f"arguments for {getattr(f, '__name__', type(f).__name__)}{inspect.signature(f)}"
    except (TypeError, ValueError):
        return ""


def called(f: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any], where: str) -> Any:
    """``f(*args, **kwargs)``; an error of ours where it takes other arguments, or where torch's would speak of torch."""
    try:
        return f(*args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise
        given = [*map(described, args), *(f"{name}={described(x)}" for name, x in kwargs.items())]
        what = "the function does not take these arguments"
        failures = [str(error), f"it was called with ({', '.join(given)})"]
        raise TransformError(report(where, what, failures, _signature(f))) from None
    except RuntimeError as error:
        if (ours := explained(error)) is None:
            raise
        raise ours from None


def explained(error: RuntimeError) -> VfnError | None:
    """An error of torch's in our words, with its traceback; None where it speaks for itself."""
    if isinstance(error, VfnError) or error.__traceback__ is None:
        return None
    for words, kind, of, fact, fix in _MEANINGS:
        if found := re.search(words, str(error)):
            shown = [f"it is what {found[1].lower()} gave"] if found.groups() else []
            return kind(report(of, fact, shown, fix)).with_traceback(error.__traceback__.tb_next)
    return None
