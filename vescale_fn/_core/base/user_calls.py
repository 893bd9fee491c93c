"""Calling a function of the user's: that it can be called, with which arguments, and what goes wrong there in our words."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from . import put_off, tracebacks
from .errors import TransformError, VfnError
from .messages import described, report, short
from .torch_errors import explained

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here


def checked_function(f: Any, where: str) -> None:
    """Raise unless `f` can be called: of its result, as in ``grad(loss(w))``, say what was meant."""
    if not callable(f):
        fix = f"vfn.{where}(f, ...), with the function itself and not with what it returns"
        raise TransformError(report(where, f"f must be a function, but it is {described(f)}", fix=fix))


def refuse_keywords(kwargs: Mapping[str, Any], error: type[VfnError], where: str, matched: str) -> None:
    """Raise for keyword arguments of a function that takes what `matched` speaks of by position."""
    if kwargs:
        what = f"it takes positional arguments, but {sorted(kwargs)} came by keyword"
        raise error(report(where, what, fix=f"{matched} is matched by position"))


def either(where: str, name: str, value: Any, alias: str, other: Any, error: type[VfnError] = TransformError) -> Any:
    """What was given for a parameter by its name or by another library's name for it; None for neither, an error for both."""
    if value is not None and other is not None:
        given = [f"{name}={short(value)}", f"{alias}={short(other)}"]
        raise error(report(where, f"{name} and {alias} are one parameter, and both are given", given, f"{name} alone"))
    return other if value is None else value


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


def positional(f: Callable[..., Any]) -> int | None:
    """How many arguments a function takes by position; None for any number, or where that cannot be told."""
    try:
        kinds = [p.kind for p in inspect.signature(f).parameters.values()]
    except (TypeError, ValueError):
        return None
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    return sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)


def owner(f: Callable[..., Any], args: Sequence[Any]) -> Sequence[Any]:
    """The object of which `f` is called as a method, in a list; an empty one where `f` is none."""
    found = getattr(type(args[0]), getattr(f, "__name__", ""), None) if args else None
    while found is not None and found is not f:
        found = getattr(found, "__wrapped__", None)
    return args[:1] if found is f else ()


def _signature(f: Callable[..., Any]) -> str:
    try:
        return f"arguments for {getattr(f, '__name__', type(f).__name__)}{inspect.signature(f)}"
    except (TypeError, ValueError):
        return ""


def called(f: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any], where: str) -> Any:
    """``f(*args, **kwargs)``; an error of ours where it takes other arguments, or where torch's would speak of torch."""
    put_off.settle()
    try:
        out = f(*args, **kwargs)
        put_off.settle(for_good=True)
        return out
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            tracebacks.hide_inner_from_pytest(error)
            raise
        given = [*map(described, args), *(f"{name}={described(x)}" for name, x in kwargs.items())]
        what = "the function does not take these arguments"
        failures = [str(error), f"it was called with ({', '.join(given)})"]
        raise TransformError(report(where, what, failures, _signature(f))) from None
    except RuntimeError as error:
        if (ours := explained(error)) is None:
            tracebacks.hide_inner_from_pytest(error)
            raise
        raise ours from None
    except Exception as error:
        tracebacks.hide_inner_from_pytest(error)
        raise
