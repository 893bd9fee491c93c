"""What a function uses without being given it: its closure, its globals, its object; looked at again before each replay.

A plan holds the tensors that its function closed over, by reference, and the numbers and functions that it found, as they
were. Where a name has come to mean something else since, the function must be recorded again.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ..._core.base import source_lines, tree

_DEPTH = 6  # of functions that call functions
_LEAVES = 4096  # of one container: larger ones are known by their identity alone
_MISSING = object()
_NUMBERS = (int, float, bool, str, bytes, complex, type(None))
Look = Callable[[], Any]


class Captured:
    """What a function found, with where it found it.

    Args:
        f: the function.
        objects: what it is given that is no tensor and no number: their attributes count.
    """

    def __init__(self, f: Callable[..., Any], objects: Iterable[Any] = ()) -> None:
        self._names: list[tuple[str, Look, Any]] = []
        self._trees: list[tuple[str, Callable[[], list[Any]], list[Any]]] = []
        self._seen: set[int] = set()
        self._attributes: set[tuple[int, str]] = set()  # (of what, which)
        self._add_function(f, 0)
        for x in objects:
            self._add_attributes(x, 0)

    def changed(self) -> str | None:
        """The name of something that is not what it was; None where all is."""
        for name, look, value in self._names:
            if (now := look()) is not value and not _same_number(now, value):
                return name
        for name, look, leaves in self._trees:
            now = look()
            if len(now) != len(leaves) or not all(a is b or _same_number(a, b) for a, b in zip(now, leaves)):
                return name
        return None

    def found(self) -> Iterator[tuple[str, Any]]:
        """What was found, with its name; of containers their leaves as well."""
        yield from ((name, value) for name, _, value in self._names)
        yield from ((f"{name}[{i}]", leaf) for name, _, leaves in self._trees for i, leaf in enumerate(leaves))

    def _add_function(self, f: Any, depth: int) -> None:
        while isinstance(f, functools.partial):
            self._add("an argument of a partial", lambda f=f: (f.args, f.keywords), depth, watch=False)
            f = f.func
        if isinstance(f, MethodType):
            self._add_attributes(f.__self__, depth)
            f = f.__func__
        if not isinstance(f, FunctionType):
            if hasattr(f, "__wrapped__"):
                self._add_function(f.__wrapped__, depth)
            elif source_lines.is_users(getattr(getattr(type(f).__call__, "__code__", None), "co_filename", "<frozen")):
                self._add_function(MethodType(type(f).__call__, f), depth)
            elif isinstance(f, torch.nn.Module):
                self._add_attributes(f, depth)
            return
        if id(f) in self._seen or depth > _DEPTH or not source_lines.is_users(f.__code__.co_filename):
            # a wrapper of ours around a function of the user's
            if hasattr(f, "__wrapped__") and id(f) not in self._seen:
                self._seen.add(id(f))
                self._add_function(f.__wrapped__, depth)
            return
        self._seen.add(id(f))
        words = dict.fromkeys(_words_in(f.__code__))
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ()):
            self._add(name, functools.partial(_content, cell), depth, words=words)
        for name in dict.fromkeys(_names_in(f.__code__)):
            if name in f.__globals__:
                self._add(name, functools.partial(f.__globals__.get, name, _MISSING), depth, words=words)
        for value in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
            self._add("a default", lambda value=value: value, depth, watch=False)

    def _add_attributes(self, owner: Any, depth: int) -> None:
        if id(owner) in self._seen:
            return
        self._seen.add(id(owner))
        if isinstance(owner, torch.nn.Module):
            look = lambda: [*owner.parameters(), *owner.buffers(), owner.training]
            self._trees.append((f"a parameter of {type(owner).__name__}", look, look()))
            return
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            self._add(f"self.{name}", functools.partial(getattr, owner, name, _MISSING), depth)
            if depth < _DEPTH and len(self._names) < _LEAVES:
                for x in filter(_is_users_object, tree.leaves(value)):  # whose methods may look at any attribute
                    self._add_attributes(x, depth + 1)

    def _add(self, name: str, look: Look, depth: int, watch: bool = True, words: Iterable[str] = ()) -> None:
        """Add what a name means.

        Args:
            words: those of the code that uses it, among which are the attributes that it looks at.
        """
        value = look()
        if not isinstance(value, (torch.Tensor, FunctionType, torch.nn.Module)) and _is_users(value):
            for word in (word for word in words if word in vars(value)):
                if (id(value), word) not in self._attributes:
                    self._attributes.add((id(value), word))
                    find = functools.partial(getattr, value, word, _MISSING)
                    self._add(f"{name}.{word}", find, depth, words=words)
        if isinstance(value, ModuleType) or inspect.isclass(value) or value is sys.modules:  # which any import changes
            return
        if watch:
            self._names.append((name, look, value))
        if callable(value) and not isinstance(value, torch.Tensor):
            self._add_function(value, depth + 1)
        elif isinstance(value, (list, tuple, dict, Mapping)):
            leaves = tree.leaves(value)
            if len(leaves) <= _LEAVES:
                self._trees.append((name, functools.partial(tree.leaves, value), leaves))
                for leaf in leaves:
                    if callable(leaf) and not isinstance(leaf, torch.Tensor):
                        self._add_function(leaf, depth + 1)


def _is_users(value: Any) -> bool:
    """Whether something with attributes is a module or a class of the user's, or an object."""
    if not hasattr(value, "__dict__"):
        return False
    if isinstance(value, ModuleType):
        return source_lines.is_users(getattr(value, "__file__", None) or "<user>")
    if inspect.isclass(value):
        module = sys.modules.get(value.__module__)
        return source_lines.is_users(getattr(module, "__file__", None) or "<user>")
    return True


def _is_users_object(value: Any) -> bool:
    """Whether something is an instance, with attributes, of a class of the user's."""
    plain = isinstance(value, (torch.Tensor, ModuleType, FunctionType, type))
    return not plain and _is_users(value) and _is_users(type(value))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return _MISSING


def _names_in(code: CodeType) -> Iterator[str]:
    """The globals that code reads: not what it calls attributes, which stand among `co_names` too."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _words_in(code: CodeType) -> Iterator[str]:
    """The globals and the attributes that code speaks of."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _words_in(constant)


def _same_number(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, _NUMBERS) and (a == b or a != a and b != b)
