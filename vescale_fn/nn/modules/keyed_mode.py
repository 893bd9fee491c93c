"""Running a module with a key: its draws, made from torch's generator as it is written, come from the key instead.

A mode sees each torch function that the module calls. The first draw has ``fold_in(key, 0)``, the second ``fold_in(key,
1)``, and so on: the order in which a program draws is the same on every mesh, and so is each number. Functions of torch's
that are written in Python and draw inside are run with the mode on. What a backward pass computes again draws again what
it drew the first time.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..._core import torch_internals
from ..._core.base import op_arguments, source_lines, state
from ..._core.base.errors import InPlaceError, RandomError
from ..._core.base.messages import report
from ..._core.local_types import function_kinds
from ..._core.shard_map import body
from ...random.keys import Key
from ...random.streams import fold_in
from .keyed_draws import DRAWS, DrawCall


class Keyed(TorchFunctionMode):
    """The mode in which a module runs.

    Args:
        where: the name that messages begin with.
        key: what draws come from; None where there is none: a draw raises.
        kept: by the number of its memory, the name of each tensor that must not be written.
        names: by the id of a module, its name.
        fix: what to write where one of the `kept` is written.
        count: how many draws have been made.
    """

    def __init__(
        self, where: str, key: Key | None, kept: Mapping[int, str], names: Mapping[int, str], fix: str, count: int = 0
    ) -> None:
        super().__init__()
        self._where, self._key, self._kept, self._names, self._fix = where, key, kept, names, fix
        self._count = count
        self._before: list[Keyed | None] = []  # it can be entered inside of itself

    def __enter__(self) -> Any:
        self._before.append(state.now().keyed)
        state.put(keyed=self)
        body.watch_checkpoints()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        state.put(keyed=self._before.pop())

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        way, name = _way(func)
        kwargs = kwargs or {}
        if way == "inside":
            with self:
                return _unchecked(func)(*args, **kwargs)
        if way == "draw":
            draw = DRAWS[name](DrawCall(func, name, args, kwargs))
            if draw is not None:
                return draw(self._next_key(name))
        elif way is not None or "out" in kwargs:
            self._check_writes(func, way or "out", name, args, kwargs)
        return func(*args, **kwargs)

    def again(self) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        """A function that makes the mode as it is now, for what is computed anew."""
        return functools.partial(Keyed, self._where, self._key, self._kept, self._names, self._fix, self._count)

    def _next_key(self, name: str) -> Key:
        if self._key is None:
            line = source_lines.quoted(source_lines.user_line())
            fix = "f(params, ..., key=key); or module.eval() before module_function, train=False, where only training draws"
            raise RandomError(
                report(
                    self._where,
                    f"the module draws random numbers, and there is no key{self._at()}",
                    [f"torch's {name}, at {line}"],
                    fix,
                )
            )
        self._count += 1
        return fold_in(self._key, self._count - 1)

    def _check_writes(self, func: Any, way: str, name: str, args: Any, kwargs: Any) -> None:
        if way == "out":
            targets = op_arguments.tensors_in(kwargs["out"])
        else:
            targets = (
                op_arguments.tensors_in(args[:1])
                if way == "write"
                else function_kinds.written(func, name, args, kwargs)
            )
        for x in targets:
            held = self._kept.get(memory_of(x))
            if held is not None:
                raise InPlaceError(
                    report(
                        self._where,
                        f"a call changes {held}, which is a constant of the function{self._at()}",
                        [f"torch's {name}, at {source_lines.quoted(source_lines.user_line())}"],
                        self._fix,
                    )
                )

    def _at(self) -> str:
        """In which of its modules the call is, in words."""
        frame = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self") if frame.f_code.co_argcount else None
            if isinstance(owner, nn.Module) and id(owner) in self._names:
                name = self._names[id(owner)]
                return f": in {type(owner).__name__}" + (f" {name!r}" if name else "")
            frame = frame.f_back
        return ""


def truncated_normals() -> contextlib.AbstractContextManager[None]:
    """Have `torch.nn.init.trunc_normal_` draw from the key of the mode around it as well."""
    return torch_internals.truncated_normals_by(_truncated_normal)


def _truncated_normal(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    mode = state.now().keyed
    draw = None if mode is None else DRAWS["trunc_normal_"](DrawCall(own, "trunc_normal_", args, kwargs))
    if mode is None or draw is None:
        return own(*args, **kwargs)
    with torch.no_grad():
        return draw(mode._next_key("trunc_normal_"))


def _captured() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    mode = state.now().keyed
    return contextlib.nullcontext if mode is None else mode.again()


body.captures.append(_captured)


def memory_of(x: torch.Tensor) -> int:
    """What two tensors have in common that share memory, as far as that can be told: of an array it is the object."""
    inner = torch_internals.peel(x)
    return (
        torch_internals.memory_number(inner)
        if torch_internals.is_bare(inner) and inner.layout is torch.strided
        else id(inner)
    )


@functools.lru_cache(maxsize=4096)
def _way(func: Any) -> tuple[str | None, str]:
    """How a function is run, and its name: ``"inside"`` by its own code with the mode on; ``"draw"``; ``"write"`` or
    ``"aside"`` by what it writes; None, as it is."""
    kind, name = function_kinds.kind_of(func)
    if type(func) is types.FunctionType and (name in _INITS or func.__module__ in _IN_PYTHON):
        return "inside", name
    if name in DRAWS:
        return "draw", name
    return (kind if kind in ("write", "aside") or kind == "operator" else None), name


_IN_PYTHON = ("torch.nn.functional", "torch.functional")
_INITS = {f.__name__: f for f in (nn.init.uniform_, nn.init.normal_, nn.init.constant_, nn.init.kaiming_uniform_)}
_NO = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), lambda *_: False)


class _Overrides:
    """`torch`, where nothing overrides a function."""

    overrides = types.SimpleNamespace(**_NO)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@functools.lru_cache(maxsize=512)
def _unchecked(func: Any) -> Any:
    """A function of torch's that does not ask first whether a mode wants to have it: one does, and has asked for its code.

    Nor do the private ones that do its work, which would ask in its name.
    """
    func = _INITS.get(func.__name__, func)  # transformers has others of these names in their place
    own = {**func.__globals__, **_NO, "torch": _Overrides()}
    helpers = (name for name in func.__code__.co_names if name.startswith("_") and own.get(name) is not func)
    own |= {name: _unchecked(own[name]) for name in helpers if _does_its_work(own.get(name))}
    held = [cell.cell_contents for cell in func.__closure__ or ()]
    cells = tuple(types.CellType(_unchecked(x) if _does_its_work(x) else x) for x in held)
    out = types.FunctionType(func.__code__, own, func.__name__, func.__defaults__, cells)
    out.__kwdefaults__ = func.__kwdefaults__
    return out


def _does_its_work(x: Any) -> bool:
    """Whether something is a function that torch has written in Python, as those whose work it does."""
    return type(x) is types.FunctionType and x.__module__ in _IN_PYTHON
