"""Which classes are nodes of trees, and the refusal of a leaf that is none: one that holds tensors, or another library's array.

A class is a node if it is registered: with optree, with torch's pytree (then it is registered with optree when it is first
met), or by `register_dataclass`, with both. An instance of any other class is a leaf. A leaf of numbers, strings and the like
passes through every function, so a leaf with tensors in it would pass through unsharded, untrained and undifferentiated.
"""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import enum
import functools
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import optree
import optree.registry
import torch

from .. import torch_internals
from . import source_lines, tree
from .errors import TreeError
from .messages import described, report

_MOST = 1000  # values inside one leaf that are looked at
_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    enum.Enum,
    np.generic,
    np.dtype,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    slice,
    range,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    torch.Generator,
    torch.distributed.device_mesh.DeviceMesh,
)
_settled: set[type] = {
    torch.Tensor,
    torch.nn.Parameter,
    int,
    float,
    bool,
    str,
    type(None),
}  # leaves by their class alone


def opened(
    value: Any,
    where: str,
    name: str | Callable[[], Sequence[str]],
    *,
    is_leaf: Any = None,
    numpy: bool | Callable[[Any], Any] = False,
    modules: bool = False,
    passing: Callable[[], Sequence[Any]] = tuple,
) -> tuple[list[Any], Any]:
    """The leaves of a tree that a public function was given, and its structure; or a TreeError that names all wrong leaves.

    Args:
        where: the public function, for the message.
        name: of the tree, by which paths begin; or a function that gives the paths of all leaves.
        is_leaf: as for `optree.tree_flatten`.
        numpy, modules: whether numpy arrays, and whether modules, are leaves that the function knows what to do with; `numpy`
            may be what it makes of each.
        passing: gives the leaves that may hold tensors: the function uses them as it does what it closes over.
    """
    leaves, treedef = optree.tree_flatten(value, is_leaf)
    if _settled.issuperset(map(type, leaves)):
        return leaves, treedef
    if adopted(leaves):
        return opened(value, where, name, is_leaf=is_leaf, numpy=numpy, modules=modules, passing=passing)
    passed = passing()
    wrong = {
        i: held
        for i, x in enumerate(leaves)
        if (held := _held(x, bool(numpy), modules)) is not None and not any(x is other for other in passed)
    }
    if wrong:
        paths = tree.paths(value, name, is_leaf) if isinstance(name, str) else name()
        failures = [f"{paths[i]} is {_what(leaves[i])}{held}" for i, held in wrong.items()]
        ways = dict.fromkeys(_way(leaves[i]) for i in wrong)
        what = "a leaf is a container that trees do not go into, or another library's array"
        raise TreeError(report(where, what, failures, "; ".join(ways)))
    if callable(numpy):
        leaves = [numpy(x) if isinstance(x, np.ndarray) else x for x in leaves]
    return leaves, treedef


def checked(value: Any, where: str, name: str | Callable[[], Sequence[str]], **options: Any) -> Any:
    """`value`, where `opened` raises nothing."""
    opened(value, where, name, **options)
    return value


_NUMBERS = (int, float, complex, np.generic)
SPLIT_NUMBERS = "torch.tensor(x) for a list of numbers; P() for a number that all ranks have"


def split_numbers(prefix: Any, value: Any, leaves: Sequence[Any], names_axes: Callable[[Any], Any]) -> list[int]:
    """The places of Python numbers under a spec that names axes and has no tensor under it: it would have no effect.

    Beside a tensor (or, for `from_local`, a function that makes one), under one spec for both, a number is a setting that
    passes through.
    """
    if not any(isinstance(x, _NUMBERS) for x in leaves):
        return []
    entries, structure = optree.tree_flatten(prefix)
    found, start = [], 0
    for entry, part in zip(entries, structure.flatten_up_to(value)):
        own = range(start, start + len(tree.leaves(part)))
        start = own.stop
        if names_axes(entry) and not any(
            isinstance(x, torch.Tensor) or callable(x) for x in leaves[own.start : own.stop]
        ):
            found += [i for i in own if isinstance(leaves[i], _NUMBERS)]
    return found


# --- registered classes -----------------------------------------------------------------------------------------------

_lock = threading.Lock()


def adopted(leaves: Sequence[Any]) -> bool:
    """Whether classes of leaves are nodes for torch's own pytree, and now for optree too: then the tree has other leaves."""
    return any(list(map(_adopt, leaves)))


def _adopt(value: Any) -> bool:
    """Whether the class of a leaf is a node for torch's own pytree; then it is registered with optree, too."""
    cls = type(value)
    if (
        cls in _settled
        or isinstance(value, (torch.Tensor, torch.Size))
        or tree.opaque(value)
        or (known := torch_internals.tree_node(cls)) is None
    ):
        return False
    take_apart, put_together, keys_of = known

    def flatten(node: Any) -> tuple[Any, Any, Any]:
        children, kept = take_apart(node)
        if keys_of is not None:
            keys = tuple(keys_of(node))
        else:
            keys = tuple(node.keys()) if isinstance(node, abc.Mapping) else tuple(range(len(children)))
        return tuple(children), _Kept(kept), keys

    def together(kept: Any, children: Any) -> Any:
        return put_together(list(children), kept.value)

    by_attribute = keys_of is not None and all(isinstance(key, str) for key in keys_of(value))
    entries: Any = optree.GetAttrEntry if by_attribute and not isinstance(value, abc.Mapping) else optree.AutoEntry
    with _lock:
        if optree.tree_is_leaf(cast(Any, value), none_is_leaf=True):
            optree.register_pytree_node(
                cls, flatten, together, path_entry_type=entries, namespace=optree.registry.__GLOBAL_NAMESPACE
            )
    return True


class _Kept:
    """What torch's pytrees keep of a node besides its children, which may be a list: with a hash."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept) and self.value == other.value

    def __hash__(self) -> int:
        return hash(repr(self.value))


def register_dataclass(
    cls: Any = None, data_fields: Sequence[str] | None = None, meta_fields: Sequence[str] | None = None
) -> Any:
    """Register a class as a node of trees, with optree and with torch's pytree; also a decorator.

    Without it, an instance is a leaf, and a leaf that holds tensors is refused.

    Args:
        cls: a dataclass; or any class whose constructor takes the fields by name, if both lists of fields are given.
        data_fields: the names of the attributes that are subtrees. By default, of a dataclass, all that its constructor takes
            and that are not meta fields.
        meta_fields: the names of those that belong to the structure, as the keys of a dictionary do: hashable, and compared
            by ``==``. A plan of `jit` serves one value of them. By default those declared ``field(metadata={"static": True})``.

    Returns:
        The class. A node is rebuilt by ``cls(**fields)``, so that ``__post_init__`` runs and must take any leaf.

    Raises:
        TreeError: fields that the class does not have, that its constructor needs besides, or that are named twice; or a class
            that is a node already.

    Source: `jax.tree_util.register_dataclass`.

    >>> import dataclasses, torch, vescale_fn as vfn
    >>> @vfn.register_dataclass
    ... @dataclasses.dataclass
    ... class Params:
    ...     w: torch.Tensor
    ...     name: str = dataclasses.field(default="linear", metadata={"static": True})
    >>> vfn.grad(lambda p: (p.w * p.w).sum())(Params(torch.tensor([1.0, 2.0])))
    Params(w=tensor([2., 4.]), name='linear')
    """
    if cls is None:
        return functools.partial(register_dataclass, data_fields=data_fields, meta_fields=meta_fields)
    data, meta = _fields(cls, data_fields, meta_fields)

    def flatten(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple([getattr(node, name) for name in data]), tuple([getattr(node, name) for name in meta])

    def together(kept: Any, children: Any) -> Any:
        return cls(**dict(zip(data, children, strict=True)), **dict(zip(meta, kept, strict=True)))

    try:
        optree.register_pytree_node(
            cls,
            lambda node: (*flatten(node), data),
            together,
            path_entry_type=optree.GetAttrEntry,
            namespace=optree.registry.__GLOBAL_NAMESPACE,
        )
    except ValueError:
        raise TreeError(
            report(
                "register_dataclass",
                f"{cls.__name__} is registered already",
                fix="one registration, here or with optree",
            )
        ) from None
    if torch_internals.tree_node(cls) is None:
        torch_internals.register_tree_node(cls, flatten, lambda children, kept: together(kept, children), data)
    return cls


def _fields(
    cls: Any, data: Sequence[str] | None, meta: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the fields that are data, and of those that are not; or an error that lists all that is wrong."""
    where = "register_dataclass"
    if not isinstance(cls, type):
        raise TreeError(
            report(
                where,
                f"it takes a class, but was given {described(cls)}",
                fix="vfn.register_dataclass(Params), or @vfn.register_dataclass above it",
            )
        )
    declared = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else None
    if declared is None and (data is None or meta is None):
        raise TreeError(
            report(
                where,
                f"{cls.__name__} is not a dataclass, so its fields are not known",
                fix=f"vfn.register_dataclass({cls.__name__}, data_fields=[...], meta_fields=[...]); or "
                "@dataclasses.dataclass below it",
            )
        )
    taken = [f.name for f in declared or () if f.init]
    if meta is None:
        static = [f.name for f in declared or () if f.init and f.metadata.get("static", False)]
        meta = static if data is None else [name for name in taken if name not in data]
    data = [name for name in taken if name not in meta] if data is None else data
    if failures := _wrong_fields([*data, *meta], None if declared is None else taken):
        raise TreeError(
            report(
                where,
                f"these are not the fields of {cls.__name__}",
                failures,
                f"each of {', '.join(taken)} once, in data_fields or in meta_fields",
            )
        )
    return tuple(data), tuple(meta)


def _wrong_fields(named: Sequence[str], taken: Sequence[str] | None) -> list[str]:
    """What is wrong with these names for the fields that a constructor takes, where those are known."""
    failures = [f"{name!r} is named twice" for name in dict.fromkeys(named) if named.count(name) > 1]
    if taken is not None:
        failures += [f"{name!r} is not a field that the constructor takes" for name in named if name not in taken]
        failures += [f"the field {name!r} is in neither list" for name in taken if name not in named]
    return failures


# --- leaves that are containers ---------------------------------------------------------------------------------------


_FOREIGN = ("__dlpack__", "__array__", "__array_interface__", "__cuda_array_interface__")
_ONCE = (types.GeneratorType, map, filter, zip)


def _held(leaf: Any, numpy: bool, modules: bool) -> str | None:
    """What is wrong with a leaf, in words that follow "is a Params"; None where it is a proper leaf."""
    cls = type(leaf)
    if cls in _settled:
        return None
    if _is_proper(leaf):
        _settled.add(cls)
        return None
    if isinstance(leaf, np.ndarray) and not _is_foreign(leaf):
        return None if numpy else ""
    if isinstance(leaf, torch.nn.Module):
        return None if modules else ""
    if _is_foreign(leaf) or isinstance(leaf, _ONCE):
        return ""
    seen: set[int] = set()
    todo = list(_inside(leaf))
    for path, x in todo:  # which grows
        if (
            isinstance(x, (torch.Tensor, np.ndarray))
            or (isinstance(x, torch.nn.Module) and not modules)
            or _is_foreign(x)
        ):
            return f", which is not a registered node: its {path} is {described(x)}"
        if type(x) not in _settled and not _is_proper(x) and id(x) not in seen and len(todo) < _MOST:
            seen.add(id(x))
            todo += [(path + step, y) for step, y in _inside(x)]
    return None


def _is_proper(x: Any) -> bool:
    """Whether a value is a proper leaf whatever it holds: a tensor, a number, a function, an object of this package's."""
    ours = type(x).__module__.partition(".")[0] == "vescale_fn"
    return isinstance(x, (torch.Tensor, *_PLAIN)) or tree.opaque(x) or ours


def _is_foreign(x: Any) -> bool:
    """Whether a value is an array of another library than torch and numpy, which an array protocol shows."""
    if isinstance(x, (torch.Tensor, np.ndarray, np.generic, type)):
        return isinstance(x, np.ma.MaskedArray)
    return any(hasattr(type(x), name) for name in _FOREIGN)


def _inside(x: Any) -> list[tuple[str, Any]]:
    """The values in one that is no tensor, each with the step of a path that leads there."""
    found: list[tuple[str, Any]] = []
    if isinstance(x, abc.Mapping):
        found += [(f"[{key!r}]", y) for key, y in x.items()]
    elif isinstance(x, (list, tuple, set, frozenset, abc.ValuesView, abc.ItemsView)):
        found += [(f"[{i}]", y) for i, y in enumerate(x)]
    elif isinstance(x, functools.partial):
        found += [(f".args[{i}]", y) for i, y in enumerate(x.args)]
        found += [(f".keywords[{key!r}]", y) for key, y in x.keywords.items()]
    return found + [(f".{name}", y) for name, y in _attributes(x).items()]


def _attributes(x: Any) -> dict[str, Any]:
    """What is stored in an object, by the attributes' names; properties are not asked."""
    found = dict(getattr(x, "__dict__", {}))
    for cls in type(x).__mro__:
        for name, slot in vars(cls).items():
            if isinstance(slot, types.MemberDescriptorType) and hasattr(x, name):
                found[name] = getattr(x, name)
    return found


def _has_tensors(x: Any) -> bool:
    leaves = optree.tree_leaves(x)
    return any(isinstance(y, torch.Tensor) or _held(y, False, False) is not None for y in leaves)


def _what(leaf: Any) -> str:
    cls = type(leaf)
    return f"a {cls.__module__.partition('.')[0]}.{cls.__name__}" if _is_foreign(leaf) else f"a {cls.__name__}"


def _way(leaf: Any) -> str:
    """What to write in place of a leaf that is a container."""
    cls = type(leaf)
    if isinstance(leaf, torch.nn.Module):
        return "f, params = vfn.module_function(module), of which params is a tree"
    if isinstance(leaf, np.ma.MaskedArray):
        return "torch.from_numpy(x.filled()), and the mask beside it"
    if isinstance(leaf, np.ndarray):
        return "torch.from_numpy(x) for a numpy array"
    if _is_foreign(leaf):
        made = "torch.from_dlpack(x)" if hasattr(cls, "__dlpack__") else "torch.from_numpy(np.array(x))"
        return f"{made} for a {cls.__name__}"
    if isinstance(leaf, functools.partial):
        return "optree.functools.partial, whose arguments are a tree"
    if dataclasses.is_dataclass(leaf):
        return f"vfn.register_dataclass({cls.__name__})"
    if isinstance(leaf, abc.Iterable):
        return f"{'dict' if isinstance(leaf, abc.Mapping) else 'list'}(x) for a {cls.__name__}"
    if not source_lines.is_users(getattr(sys.modules.get(cls.__module__), "__file__", None) or "<user>"):
        return f"a dictionary of the tensors of a {cls.__name__}"
    held = _attributes(leaf)
    data = [name for name, x in held.items() if _has_tensors(x)]
    meta = [name for name in held if name not in data]
    return f"vfn.register_dataclass({cls.__name__}, data_fields={data}, meta_fields={meta})"
