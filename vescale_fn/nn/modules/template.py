"""A module without parameters, and the modules that it becomes with them: one for each call.

A call must not change anything that another one sees, also when it raises, is computed again in a backward pass, or runs
beside another thread's. So each call has modules of its own: new objects of the same classes with the same attributes,
which share everything but parameters, buffers, and references to one another. That costs a few microseconds a module.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..._core import torch_internals
from ..._core.base.errors import TransformError
from ..._core.base.messages import described, report
from ..._core.base.saved_names import saved_as

_DEPTH = 5  # of containers in containers, where modules may be kept
Swap = Callable[[Any], Any]
Read = Callable[[Any, Any], Any]


@saved_as("vescale_fn.modules.template")
class Template:
    """The structure of a module, which holds no parameter.

    Args:
        module: any module; it is neither changed nor kept.
        values: by the id of a tensor that it holds, another one to hold instead.

    Attributes:
        root: the structure, with parameters on the meta device; buffers and other tensors are the module's own.
        modules: all modules in it, `root` first.
    """

    def __init__(self, module: nn.Module, values: Mapping[int, torch.Tensor] = MappingProxyType({})) -> None:
        memo: dict[int, Any] = {id(x): values.get(id(x), x) for m in module.modules() for x in tensors_in(vars(m))}
        memo |= {id(p): _on_meta(p) for p in module.parameters()}
        try:
            self.root: nn.Module = copy.deepcopy(module, memo)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            raise TransformError(
                report(
                    "module_function",
                    f"{described(module)} cannot be copied",
                    [said],
                    "a module for which copy.deepcopy(module) works",
                )
            ) from error
        self.modules = list(self.root.modules())
        before = dict(zip(map(id, module.modules()), self.modules, strict=True))  # functions are not copied: hooks may
        before |= {id(p): memo[id(p)] for p in module.parameters()}  # close over the module
        for m in self.modules:
            vars(m).update(
                (name, _rebuilt(value, lambda x: before.get(id(x), x), 0))
                for name, value in _mentioning(m, before.keys())
            )
        members = {id(x) for x in (*self.modules, *self.root.parameters(), *self.root.buffers())}
        self._references = [_mentioning(m, members) for m in self.modules]

    def filled(self, tensors: Mapping[int, torch.Tensor], train: bool | None, read: Read | None = None) -> nn.Module:
        """New modules with these tensors, each by the id of what stands for it in the structure.

        `read`: what a module gets that reads a parameter, from what stands for it and what it holds.
        """
        made: dict[int, Any] = {id(m): m.__class__.__new__(m.__class__) for m in self.modules}
        put = lambda held: {name: tensors.get(id(x), x) for name, x in held.items()}

        def swap(x: Any) -> Any:
            return tensors.get(id(x), x) if isinstance(x, torch.Tensor) else made.get(id(x), x)

        for m, references in zip(self.modules, self._references):
            own = vars(made[id(m)])
            parameters, buffers, children = torch_internals.held_by(m)
            given = put(parameters) if read is None else _Read(put(parameters), parameters, read)
            own.update(vars(m))
            torch_internals.hold(
                made[id(m)], given, put(buffers), {name: made.get(id(x)) for name, x in children.items()}
            )
            if train is not None:
                own["training"] = train
            for name, value in references:
                own[name] = _rebuilt(value, swap, 0)
        return made[id(self.root)]


class _Read(dict[str, Any]):
    """The parameters of a module, of which something else is read than what is held."""

    def __init__(self, held: dict[str, Any], stand_ins: Mapping[str, Any], read: Read) -> None:
        super().__init__(held)
        self._stand_ins, self._read = stand_ins, read

    def __getitem__(self, name: str) -> Any:
        x = super().__getitem__(name)
        return x if x is None else self._read(self._stand_ins[name], x)


def _on_meta(p: torch.Tensor) -> torch.Tensor:
    like = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
    return nn.Parameter(like, requires_grad=p.requires_grad)


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """All tensors in containers: a copy of a module shares them, whatever they are to it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)) and depth < _DEPTH:
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item, depth + 1)


# --- references between the parts of a module -------------------------------------------------------------------------


def _parts(value: Any) -> Any:
    """What a value is made of, where it is of a kind that `_rebuilt` can make again; else nothing."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, types.FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if _is_bound(cell)]
    return ()


def _mentions(value: Any, members: Any, depth: int) -> bool:
    """Whether a value leads to one of the `members`, known by their ids."""
    if id(value) in members:
        return True
    return depth < _DEPTH and any(_mentions(part, members, depth + 1) for part in _parts(value))


def _mentioning(module: nn.Module, members: Any) -> list[tuple[str, Any]]:
    """The attributes that lead to one of the `members`, besides its own parameters, buffers and children."""
    return [
        (name, x) for name, x in vars(module).items() if name not in torch_internals.HELD and _mentions(x, members, 0)
    ]


def _rebuilt(value: Any, swap: Swap, depth: int) -> Any:
    """The value with what it leads to exchanged."""
    found = swap(value)
    if found is not value or depth == _DEPTH:
        return found
    again = functools.partial(_rebuilt, swap=swap, depth=depth + 1)
    if isinstance(value, dict):
        out = copy.copy(value)
        out.clear()
        out.update((again(key), again(x)) for key, x in value.items())
        return out
    if isinstance(value, (list, set, frozenset)) or type(value) is tuple:
        return type(value)(map(again, value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(again, value))
    if isinstance(value, functools.partial):
        return functools.partial(again(value.func), *map(again, value.args), **again(value.keywords))
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, again(value.__self__))
    if isinstance(value, types.FunctionType) and value.__closure__:
        cells = tuple(types.CellType(again(c.cell_contents)) if _is_bound(c) else c for c in value.__closure__)
        if all(a.cell_contents is b.cell_contents for a, b in zip(cells, value.__closure__) if _is_bound(b)):
            return value
        out = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        out.__kwdefaults__, out.__dict__ = value.__kwdefaults__, dict(value.__dict__)
        return out
    return value


def _is_bound(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # not assigned yet
        return False
    return True
