"""The names by which pickles and `torch.save` files know classes and functions, wherever these are defined today."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])


def also_saved_as(module: str, made: Any) -> None:
    """Let files that name `made` as one of `module`, as earlier versions wrote them, be loaded."""
    holder = sys.modules.setdefault(module, ModuleType(module, "Names in files of earlier versions."))
    setattr(holder, made.__qualname__, made)


def saved_as(module: str) -> Callable[[T], T]:
    """A decorator: files name this class or function as one of `module`, which need not be a file; today's and earlier ones."""

    def named(made: T) -> T:
        also_saved_as(module, made)
        made.__module__ = module
        return made

    return named
