"""What a saved plan was made for, as text that is the same in every process: the software, the function, its arguments.

A plan is used where all of it is equal, and the function is recorded anew where anything differs.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from ..._core.base import source_lines
from ..._core.base.messages import mesh_text
from ..._core.distributed.communicator import coordinates
from ..._core.distributed.mesh import communicator_of, root
from ..._core.sharding.index_map import axes_of
from ..._core.sharding.layout import as_written, type_text
from ..._core.sharding.spec import P
from ..tracing.guards import Captured

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PACKAGE = Path(__file__).resolve().parents[2]


@functools.lru_cache(maxsize=1)
def software() -> str:
    """torch's version, and a digest of the sources of this package: its rules and passes decide what a plan is."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(_PACKAGE)}\0".encode() + path.read_bytes())
    return f"torch {torch.__version__}, vescale_fn {digest.hexdigest()[:16]}"


def files(f: Any, lines: Iterable[str]) -> list[str]:
    """The user's files from which the calls of a plan come, as paths from the folder of the function's own file.

    Args:
        f: the function.
        lines: of the calls, ``file:line``.
    """
    own = _file(f)
    found = {own, *(line.rpartition(":")[0] for line in lines)}
    users = (file for file in found if file and source_lines.is_users(file))
    return sorted(os.path.relpath(file, os.path.dirname(own)) for file in users)


def function(f: Any, captured: Captured, files: Iterable[str]) -> str:
    """A digest of a function: the contents of its files, the numbers that it closes over, the functions that it finds.

    Args:
        f: the function.
        captured: what it found besides its arguments.
        files: as `files` gives them.
    """
    folder = os.path.dirname(_file(f))
    told = [f"{file} {_content(os.path.normpath(os.path.join(folder, file)))}" for file in files]
    told += [f"{name} {_Token().of(value)}" for name, value in captured.found()]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _file(f: Any) -> str:
    while not isinstance(f, FunctionType):
        f = (
            getattr(f, "func", None)
            or getattr(f, "__func__", None)
            or getattr(f, "__wrapped__", None)
            or type(f).__call__
        )
        if not isinstance(f, (FunctionType, MethodType, functools.partial)) and not hasattr(f, "__wrapped__"):
            return ""
    return f.__code__.co_filename


def _content(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:  # typed at a prompt
        return "".join(linecache.getlines(file))


class _Token:
    """What a name meant, as text: numbers as they are, the code of functions with all that they close over, objects by their
    class and attributes, whoever wrote them."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # kept, so that no id is used twice

    def of(self, value: Any) -> str:
        if isinstance(value, CodeType):
            return _code(value)
        if isinstance(value, (ModuleType, type)) or _is_known_by_name(value):
            return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}.{value.__name__}"
        if id(value) in self._seen:
            return "again"
        parts = _parts(value)
        if parts is None:
            return argument(value)
        self._seen[id(value)] = value
        return f"{type(value).__qualname__}({', '.join(map(self.of, parts))})"


def _is_known_by_name(value: Any) -> bool:
    """Whether something is a function of a library, which has a version, and closes over nothing."""
    library = isinstance(value, FunctionType) and not source_lines.is_users(value.__code__.co_filename)
    return library and "<locals>" not in value.__qualname__


def _parts(value: Any) -> Iterable[Any] | None:
    """What something consists of; None of what is a number, a tensor, a layout."""
    match value:
        case FunctionType():
            cells = [_content_of(cell) for cell in value.__closure__ or ()]
            return value.__code__, cells, value.__defaults__, value.__kwdefaults__
        case functools.partial():
            return value.func, value.args, value.keywords
        case MethodType():
            return value.__func__, value.__self__
        case Mapping():
            return [x for item in value.items() for x in item]
        case set() | frozenset():
            return sorted(value, key=repr)
        case torch.Tensor() | DeviceMesh() | P():
            return None
        case list() | tuple():
            return value
        case _ if hasattr(value, "__dict__") and not hasattr(value, "tensor_meta"):
            return [x for item in vars(value).items() for x in item]
        case _:
            return None


def _content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _code(code: CodeType) -> str:
    constants = [_code(x) if isinstance(x, CodeType) else repr(x) for x in code.co_consts]
    told = repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants))
    return hashlib.sha256(told.encode()).hexdigest()


def argument(x: Any) -> str:
    """A part of a plan's key, as text."""
    if isinstance(x, (tuple, list)) and type(x) is not P:
        return f"({', '.join(map(argument, x))})"
    if hasattr(x, "tensor_meta"):
        meta = x.tensor_meta
        return f"{type_text(meta.shape, meta.dtype, as_written(x))} {tuple(meta.stride)} on {mesh(x.mesh)}"
    if isinstance(x, DeviceMesh):
        return mesh(x)
    if isinstance(x, torch.Tensor):
        return f"{tuple(x.shape)} {x.dtype} {x.device}"
    if isinstance(x, type):
        return f"{x.__module__}.{x.__qualname__}"
    if isinstance(x, np.ndarray) and x.dtype != object:  # whose text would leave digits out
        return f"{x.shape} {x.dtype} {hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()}"
    if x is None or isinstance(x, (bool, int, float, complex, str, bytes, P, torch.dtype, torch.device, torch.layout)):
        return f"{type(x).__name__} {x!r}"
    return _ADDRESS.sub("", repr(x)) if type(x).__repr__ is not object.__repr__ else argument(type(x))


def mesh(x: Any) -> str:
    """A mesh: its axes; the same text on all of its ranks."""
    return f"{dict(axes_of(x))}{'' if communicator_of(x).ranks else ' elsewhere'}"


def whole(meshes: Iterable[Any]) -> str:
    """The meshes that those of a call are, or are parts of."""
    return " and ".join(sorted({f"the {mesh_text(axes_of(x))}" for x in map(root, meshes)}))


def places(meshes: Iterable[Any]) -> list[str]:
    """The places in the meshes of a call of the ranks that this process plays."""
    whole = list(dict.fromkeys(map(root, meshes)))
    ranks = [communicator_of(x).ranks or [None] for x in whole]
    n = max(map(len, ranks), default=1)
    return ["; ".join(sorted({_place(x, own[i % len(own)]) for x, own in zip(whole, ranks)})) for i in range(n)]


def _place(x: Any, rank: int | None) -> str:
    at = "no place" if rank is None else ", ".join(f"{name}={i}" for name, i in coordinates(x, rank).items())
    return f"at {at} of the {mesh_text(axes_of(x))}"
