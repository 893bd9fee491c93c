"""Public functions by the names that they had before: the same function, with a docstring that says so."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def earlier_name(name: str, f: F) -> F:
    """`f` under an earlier name of it; a copy and not a wrapper, so that no call has a frame more."""
    of = cast("FunctionType", f)
    copy = FunctionType(of.__code__, of.__globals__, name, of.__defaults__, of.__closure__)
    copy.__kwdefaults__, copy.__annotations__, copy.__module__ = of.__kwdefaults__, of.__annotations__, of.__module__
    copy.__dict__.update(of.__dict__)
    copy.__doc__ = f"`{of.__name__}`, by its earlier name, which stays: see there."
    return cast("F", copy)
