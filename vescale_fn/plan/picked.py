"""Arguments of a jitted function that are static, or donated: picked by place, by name, or by one that gives the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .._core.base.errors import TransformError
from .._core.base.messages import meant, report, short
from .._core.base.user_calls import positional

Names = str | Sequence[str]
Places = int | Sequence[int]


class Picked(NamedTuple):
    """The arguments at these places, given by position, and of these names, given by name."""

    places: tuple[int, ...]
    names: tuple[str, ...]

    def of(self, count: int) -> tuple[int, ...]:
        """The places, of so many arguments by position, without those that are not there."""
        return tuple(n % count for n in self.places if -count <= n < count)


def picked(f: Callable[..., Any], argnums: Any, argnames: Any, word: str) -> Picked | None:
    """The arguments that ``{word}_argnums`` and ``{word}_argnames`` pick, or None; a TransformError where they do not fit.

    Of one that is picked by its place alone the name counts too, and the other way about, as `f` itself has them.
    """
    places, names = _places(f, argnums, f"{word}_argnums"), _names(f, argnames, f"{word}_argnames")
    params = [p for p in _parameters(f).values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if places and not names:
        taken = [params[n] for n in places if -len(params) <= n < len(params)]
        names = tuple(p.name for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD)
    elif names and not places:
        places = tuple(i for i, p in enumerate(params) if p.name in names)
    return Picked(places, names) if places or names else None


def check_apart(f: Callable[..., Any], static: Picked | None, donated: Picked | None) -> None:
    """Raise where an argument is static and donated."""
    if static is None or donated is None:
        return
    count = positional(f) or 0
    places = [n % count if count else n for n in static.places]
    twice = [n for n in donated.places if (n % count if count else n) in places]
    named = [name for name in donated.names if name in static.names]
    if twice or named:
        what = f"{', '.join(named) or f'the argument at {twice[0]}'} cannot be static and donated"
        fix = "one of the two: a static argument is a Python value, and has no memory to use up"
        raise TransformError(report("jit", what, fix=fix))


def _parameters(f: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(f).parameters)
    except (TypeError, ValueError):
        return {}


def _names(f: Callable[..., Any], argnames: Any, name: str) -> tuple[str, ...]:
    found = (
        (argnames,) if isinstance(argnames, str) else tuple(argnames) if isinstance(argnames, (tuple, list)) else None
    )
    if found is None or not all(isinstance(n, str) for n in found):
        what = f"{name} must be a name or a tuple of names of arguments, but it is {short(argnames)}"
        raise TransformError(report("jit", what, fix=f'{name}="n" for the argument n'))
    taken = _parameters(f)
    kinds = {p.kind for p in taken.values()}
    by_name = [n for n, p in taken.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    wrong = [n for n in found if n not in by_name]
    if not taken or inspect.Parameter.VAR_KEYWORD in kinds:
        wrong = []
    if wrong:
        called, first = getattr(f, "__name__", short(f)), wrong[0]
        what = f"{name} names {first!r}, but {called} takes no argument of this name{meant(first, by_name)}"
        fix = f"one of {', '.join(by_name)}" if by_name else f"no {name}"
        if first in taken:
            what = f"{name} names {first!r}, which {called} takes by position alone"
            fix = name.replace("names", "nums") + "=" + str(list(taken).index(first))
        raise TransformError(report("jit", what, fix=fix))
    return found


def _places(f: Callable[..., Any], argnums: Any, name: str) -> tuple[int, ...]:
    found = tuple(argnums) if isinstance(argnums, (tuple, list)) else (argnums,)
    wrong = [n for n in found if type(n) is not int]
    if wrong:
        raise TransformError(
            report(
                "jit",
                f"{name} must be an int or a tuple of ints, the places of arguments, but it is {short(argnums)}",
                fix=f"{name}=0 for the first argument",
            )
        )
    count = positional(f)
    if count is not None and (wrong := [n for n in found if not -count <= n < count]):
        takes = "one argument" if count == 1 else f"{count} arguments"
        raise TransformError(
            report(
                "jit",
                f"{name} names the place {wrong[0]}, but {getattr(f, '__name__', short(f))} takes {takes} by position",
                fix=f"places from {-count} to {count - 1}" if count else f"no {name}",
            )
        )
    return found
