"""`nn.Module` and torch's own trees."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as _pytree
from torch._subclasses.fake_tensor import FakeTensor


def register_tree_node(cls: type, flatten: Any, unflatten: Any, names: tuple[str, ...]) -> None:
    """Make `cls` a node of torch's own pytree; `names` are the attributes that hold its children."""
    entries = [_pytree.GetAttrKey(name) for name in names]

    def flatten_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = flatten(node)
        return list(zip(entries, children, strict=True)), context

    _pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


def mark_as_parameter(x: Any) -> None:
    """Make `x`, of a subclass of Tensor, an `nn.Parameter`."""
    x._is_param = True


_HOOKS = (  # where a module keeps what `register_forward_hook` and its like are given
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
HELD = ("_parameters", "_buffers", "_modules")  # the attributes of a module that hold what `held_by` gives


def held_by(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A module's own parameters, its own buffers, its children."""
    return module._parameters, module._buffers, module._modules


def hold(module: torch.nn.Module, *held: dict[str, Any]) -> None:
    """Give a module other parameters, buffers and children of its own, without the registration of each; and tables of its own
    for the hooks that it has, so that one registered with it is not there for the module whose attributes it shares."""
    own = vars(module)
    own.update(zip(HELD, held, strict=True))
    for name in _HOOKS:
        if (hooks := own.get(name)) is not None:
            own[name] = hooks.copy() if hooks else OrderedDict()


def as_written(module: torch.nn.Module) -> torch.nn.Module:
    """The module that `torch.compile` was given, which adds nothing that is kept; any other is itself."""
    return getattr(module, "_orig_mod", module)


def tree_node(
    cls: type,
) -> tuple[Callable[[Any], Any], Callable[[list[Any], Any], Any], Callable[[Any], Any] | None] | None:
    """How torch's own pytree takes a node of this class apart, puts it together, and calls its children (None where it has no
    names for them); None where the class is a leaf to it."""
    found = _pytree.SUPPORTED_NODES.get(cls)
    if found is None:
        return None
    with_keys: Any = getattr(found, "flatten_with_keys_fn", None)
    names = lambda node: [getattr(key, "name", getattr(key, "key", None)) for key, _ in with_keys(node)[0]]
    return found.flatten_fn, found.unflatten_fn, None if with_keys is None else names


@contextlib.contextmanager
def truncated_normals_by(handler: Callable[..., Any]) -> Iterator[None]:
    """Have `torch.nn.init.trunc_normal_`, which no mode sees, call ``handler(own, tensor, mean, std, a, b, generator)``; `own`
    is torch's way to do it."""
    own: Any = torch.nn.init._no_grad_trunc_normal_  # type: ignore[attr-defined]
    torch.nn.init._no_grad_trunc_normal_ = functools.partial(handler, own)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = own  # type: ignore[attr-defined]


@contextlib.contextmanager
def conversions_by_new_parameters() -> Iterator[None]:
    """Have `nn.Module.to`, `half` and their family put new parameters in the place of those that have no values.

    Torch swaps the two tensors, which fails where something refers to them, as a recording does, and which it would not see.
    """
    own: Any = torch.nn.Module._apply
    later: dict[int, tuple[Any, Any]] = {}  # by its id a parameter, and what has come in its place: it may be tied

    def apply(module: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
        parameters, buffers, children = held_by(module)
        if not any(isinstance(p, FakeTensor) for p in parameters.values()):
            return own(module, fn, recurse)
        for child in children.values() if recurse else ():
            if child is not None:
                child._apply(fn)
        for name, p in parameters.items():
            if p is None:
                continue
            while id(p) in later:
                p = later[id(p)][1]
            with torch.no_grad():
                made = fn(p)
            if made is not p:
                later[id(p)] = p, (made := torch.nn.Parameter(made, requires_grad=p.requires_grad))
            parameters[name] = made
        buffers.update({name: fn(x) for name, x in buffers.items() if x is not None})
        return module

    torch.nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply = own  # type: ignore[method-assign]
