"""What the public names show of themselves: what `dir` lists, and what a name or a keyword is told that is not there."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from . import put_off
from .messages import meant, report
from .other_attributes import OTHER_ATTRIBUTES
from .other_names import OTHER_NAMES
from .other_words import OTHER_WORDS

Q = ParamSpec("Q")
R = TypeVar("R")


def listing(module: str) -> Callable[[], list[str]]:
    """The ``__dir__`` of a public module: its public names and what Python itself puts there, no files behind them."""

    def __dir__() -> list[str]:
        names = vars(sys.modules[module])
        return sorted({*names["__all__"], *(name for name in names if re.fullmatch("__.*__", name))})

    return __dir__


def hints(module: str) -> Any:
    """The ``__getattr__`` of a public module. The type is Any, or type checkers would believe that every name is there."""
    called = re.sub(r"^vescale_fn\b", "vfn", module)
    if (name := called.partition(".")[2]) in OTHER_ATTRIBUTES:
        no_attributes(name, sys.modules[module])

    def __getattr__(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        full = f"{called}.{name}"
        instead = OTHER_NAMES.get(full.removeprefix("vfn."))
        if instead is not None:
            text = report(full, "there is no such name", fix=instead)
            if sys._getframe(1).f_code.co_name == "_handle_fromlist":
                raise ImportError(text)  # `from vescale_fn import ...`, which says nothing of an AttributeError
        else:
            public = {name: getattr(sys.modules[module], name) for name in sys.modules[module].__all__}
            inside = [f"{called}.{part}.{name}" for part, x in public.items() if name in getattr(x, "__all__", ())]
            text = report(
                full, f"there is no such name{'' if inside else meant(name, public)}", fix=" or ".join(inside)
            )
        raise AttributeError(text, name=name, obj=None)  # with the module, Python would add a question of its own

    return __getattr__


def public(name: str) -> Callable[[Callable[Q, R]], Callable[Q, R]]:
    """For a public function: a call that does not fit its parameters says what to write."""

    def decorate(f: Callable[Q, R]) -> Callable[Q, R]:
        @functools.wraps(f)
        def call(*args: Q.args, **kwargs: Q.kwargs) -> R:
            put_off.settle()
            try:
                return f(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # it was called
                problem = str(error).partition("() ")[2] or str(error)
            raise TypeError(_in_words(name, f, problem, kwargs))

        return call

    return decorate


def _in_words(name: str, f: Callable[..., Any], problem: str, kwargs: Mapping[str, Any]) -> str:
    """Why a call does not fit, and what to write."""
    parameters = inspect.signature(f).parameters
    words = {word for word, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    wrong = next((word for word in kwargs if word not in words), None)
    instead = OTHER_WORDS.get(name, {}).get(wrong or "")
    if wrong is not None and instead is None:
        problem += meant(wrong, words)
    bare = inspect.Signature([p.replace(annotation=p.empty) for p in parameters.values() if p.name != "self"])
    return report(f"vfn.{name}", problem, fix=instead or f"vfn.{name}{bare}".replace("tree_", "tree"))


def no_attribute(name: str, x: object, attribute: str) -> AttributeError:
    """The error for an attribute that a public class has not; raised by its ``__getattr__``."""
    instead = OTHER_ATTRIBUTES[name].get(attribute)
    if instead is None:
        return AttributeError(f"{type(x).__name__!r} object has no attribute {attribute!r}")
    return AttributeError(report(f"vfn.{name.rpartition('.')[2]}.{attribute}", "there is no such name", fix=instead))


def no_attributes(name: str, x: Any) -> None:
    """Have a public function, or a module, say what to write where it is taken for one that has these attributes."""

    def refusing(word: str) -> Callable[..., None]:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise no_attribute(name, x, word)

        return refuse

    words = {word: refusing(word) for word in OTHER_ATTRIBUTES[name]}
    if inspect.ismodule(x):
        by_name = lambda self: (
            importlib.import_module,
            (self.__name__,),
        )  # as a function of __main__ is sent that uses it
        x.__class__ = type("module", (type(x),), {**words, "__reduce__": by_name})
    else:
        vars(x).update(words)
