"""`vmap`: a function of one entry, for all entries along a dim of its arguments.

Its entries may have a name, over which collectives in the function communicate (`ops/entries.py`), and may be laid out over
axes of the mesh.

Source: `jax.vmap`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from .. import torch_internals
from ..base import context, tracebacks, tree
from ..base.containers import opened
from ..base.errors import TransformError
from ..base.front_door import public
from ..base.messages import described, report, short
from ..base.user_calls import called, checked_function, parameter, refuse_keywords
from ..shard_map import interrupts

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here


Q = ParamSpec("Q")
R = TypeVar("R")


@torch_internals.not_compiled
@public("vmap")
def vmap(
    f: Callable[Q, R],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: Any = None,
    spmd_axis_name: Any = None,
) -> Callable[Q, R]:
    """The function that applies `f` to each entry along a dim of its arguments.

    Args:
        f: a function of trees of tensors; inside it, tensors, specs and keys speak of one entry.
        in_axes: for each argument the dim to map over, an int, None for none, or a prefix tree of them; or one for all.
        out_axes: where the dim goes in the results: an int, None for a result that is the same for all entries, or a
            prefix tree of them.
        axis_name: a name for the entries, over which collectives in `f` communicate as over an axis of a mesh: `psum`,
            `all_gather`, `axis_index` and their family, alone or with axes of the mesh in a tuple. Of nested names that are
            equal the inner one counts. The entries have no types: a gradient inside `f` of a `psum` over them is that of the
            sum of all entries' results, as in a body with ``check_vma=False``.
        axis_size: how many entries there are; needed only where no argument is mapped over.
        spmd_axis_name: an axis of the mesh, or a tuple of them: `with_sharding` and `shard_map` in `f` lay the entries out over
            it. Their specs, which speak of one entry, and collectives in `f` must not name it.

    Raises:
        TransformError: no argument is mapped over and there is no `axis_size`; `out_axes` is None for a result that differs
            between entries; an axis of `spmd_axis_name` is used in `f`, or is not on the mesh.

    Source: `jax.vmap`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.vmap(lambda x, y: x @ y, in_axes=(0, None))(torch.eye(2), torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    >>> vfn.vmap(lambda x: x / vfn.psum(x, "i"), axis_name="i")(torch.tensor([1.0, 3.0]))
    tensor([0.2500, 0.7500])
    """

    checked_function(f, "vmap")
    size_asked = _checked_name_and_size(axis_name, axis_size)
    _axes(spmd_axis_name)

    @torch_internals.not_compiled
    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        refuse_keywords(kwargs, TransformError, "vmap", "in_axes")
        axes = in_axes if isinstance(in_axes, (tuple, list)) else (in_axes,) * len(args)
        shared = tree.leaves([x for x, axis in zip(args, axes) if axis is None])
        leaves, treedef = opened(args, "vmap", "args", is_leaf=tree.none, passing=lambda: shared)
        dims = tree.broadcast(tuple(axes), args, "vmap", "in_axes", "args", is_leaf=tree.none)
        nodes = tree.leaves(args, is_leaf=tree.none_or_opaque)
        _check_in_axes(f, args, nodes, dims, size_asked)
        dims = _dims_of_data(nodes, dims)
        mapped = _mapped(leaves, dims, in_axes, size_asked)
        size: Any = leaves[mapped[0]].shape[dims[mapped[0]]] if mapped else size_asked
        rest: dict[str, Any] = {}

        def flat(index: torch.Tensor | None, *moving: torch.Tensor) -> tuple[torch.Tensor, ...]:
            full = list(leaves)
            for i, x in zip(mapped, moving, strict=True):
                full[i] = x
            entries = context.Entries(
                torch_internals.level(), _axes(spmd_axis_name), axis_name, size, index, context.body()
            )
            with context.mapping_entries(entries):
                out = called(f, tree.unflatten(treedef, full), {}, "vmap")
            outs, rest["def"] = opened(out, "vmap", "out")
            rest["leaves"] = outs
            result = tree.unflatten(rest["def"], outs)
            goals = tree.broadcast(out_axes, result, "vmap", "out_axes", "the result", is_leaf=tree.none)
            rest["dims"] = [
                d for d, x in zip(goals, tree.leaves(result, is_leaf=tree.none), strict=True) if x is not None
            ]
            nodes = tree.leaves(result, is_leaf=tree.opaque)
            _check_out_axes(result, nodes, outs, rest["dims"])
            rest["dims"] = _dims_of_data(nodes, rest["dims"])
            return tuple(x for x, d in zip(outs, rest["dims"], strict=True) if _is_mapped(x, d))

        with interrupts.undone():
            index = _index(size, leaves) if axis_name is not None or not mapped else None
            outs = torch.func.vmap(flat, in_dims=(None if index is None else 0, *(dims[i] for i in mapped)))(
                index, *(leaves[i] for i in mapped)
            )
        found = iter(outs)
        placed = [
            next(found).movedim(0, d) if _is_mapped(x, d) else x
            for x, d in zip(rest["leaves"], rest["dims"], strict=True)
        ]
        return tree.unflatten(rest["def"], placed)

    return run


def _mapped(leaves: Sequence[Any], dims: Sequence[Any], in_axes: Any, size: int | None) -> list[int]:
    """Which leaves are mapped over."""
    found = [
        i for i, (x, d) in enumerate(zip(leaves, dims, strict=True)) if isinstance(x, torch.Tensor) and d is not None
    ]
    if not found and size is None:
        raise TransformError(
            report(
                "vmap",
                "no tensor argument is mapped over",
                [f"in_axes={in_axes!r}"],
                "in_axes=0 for one that has an entry for each call; or axis_size, the number of calls",
            )
        )
    return found


def _index(size: int, leaves: Sequence[Any]) -> torch.Tensor:
    """The numbers of the entries; on the device of the arguments."""
    device = next((x.device for x in leaves if isinstance(x, torch.Tensor)), None)
    with torch_internals.no_torch_function():  # the same on all ranks of a body
        return torch.arange(size, dtype=torch.int32, device=device)


def _checked_name_and_size(name: Any, size: Any) -> int | None:
    """`axis_size` as an int, where it and `axis_name` can be; or an error."""
    if name is not None and not isinstance(name, str):
        raise TransformError(
            report(
                "vmap",
                f"axis_name must be a string, but it is {described(name)}",
                fix='axis_name="batch", and in the function vfn.psum(x, "batch")',
            )
        )
    if size is None:
        return None
    if isinstance(size, (bool, torch.Tensor)) or not hasattr(size, "__index__") or operator.index(size) < 0:
        raise TransformError(
            report(
                "vmap",
                f"axis_size must be an int, the number of entries, but it is {described(size)}",
                fix="x.shape[0], for instance; without it the arguments say how many there are",
            )
        )
    return operator.index(size)


def _axes(names: Any) -> tuple[str, ...]:
    axes = () if names is None else tuple(names) if isinstance(names, (tuple, list)) else (names,)
    if not all(isinstance(axis, str) for axis in axes) or len(set(axes)) < len(axes):
        raise TransformError(
            report(
                "vmap",
                "spmd_axis_name must be an axis of the mesh, or a tuple of them",
                [f"it is {short(names)}"],
                'spmd_axis_name="dp"',
            )
        )
    if twice := [axis for axis in axes if axis in context.entries_over()]:
        raise TransformError(
            report(
                "vmap",
                f"spmd_axis_name={names!r}: {twice[0]!r} is that of a vmap around this one",
                fix="another axis for one of them",
            )
        )
    return axes


def _dims_of_data(nodes: Sequence[Any], dims: Sequence[Any]) -> list[Any]:
    """The same dims of the tensors in these nodes: keys have another one, last, along which their bits lie."""
    return [d - 1 if d is not None and d < 0 and tree.opaque(x) else d for x, d in zip(nodes, dims, strict=True)]


def _is_mapped(x: Any, dim: int | None) -> bool:
    return isinstance(x, torch.Tensor) and dim is not None


def _with_parameter(f: Callable[..., Any], args: Sequence[Any], path: str) -> str:
    """``args[0]['w']`` as ``args[0]['w'] (of 'params')``."""
    name = parameter(f, args, int(path[len("args[") :].split("]", 1)[0]))
    return f"{path} (of {name!r})" if name else path


def _check_in_axes(
    f: Callable[..., Any], args: Any, nodes: Sequence[Any], dims: Sequence[Any], asked: int | None
) -> None:
    """Each tensor, or array of keys, has the dim that it is mapped over, and all of them as many entries (and as `asked`)."""
    failures, sizes = [], {}
    names = [_with_parameter(f, args, path) for path in tree.paths(args, "args", is_leaf=tree.none_or_opaque)]
    for name, x, d in zip(names, nodes, dims, strict=True):
        if d is not None and (isinstance(d, bool) or not isinstance(d, int)):
            failures.append(f"in_axes is {short(d)} for {name}, not an int or None")
        elif (isinstance(x, torch.Tensor) or tree.opaque(x)) and d is not None:
            if not -x.ndim <= d < x.ndim:
                failures.append(
                    f"{name} is {described(x)}, which has no dim {d}"
                    + ("; vfn.random.split(key, n) makes an array of keys" if tree.opaque(x) else "; None for a scalar")
                    * (not x.ndim)
                )
            else:
                sizes[name] = d, x.shape[d]
    if not failures and len({size for _, size in sizes.values()} | ({asked} if asked is not None else set())) > 1:
        failures = [f"{name} has {size} along dim {d}" for name, (d, size) in sizes.items()]
        failures += [f"axis_size is {asked}"] * (asked is not None)
    if failures:
        raise TransformError(
            report(
                "vmap",
                "the arguments do not fit in_axes",
                failures,
                "for each argument the dim that all are mapped over together, None for those that are "
                "the same in all calls",
            )
        )


def _check_out_axes(result: Any, nodes: Sequence[Any], leaves: Sequence[Any], dims: Sequence[Any]) -> None:
    """Inside the map: a place is a dim of the result to come, None only where all entries have the same."""
    names = tree.paths_opaque(result, "out")
    failures = [
        f"{name} is {described(x)} in each call, so out_axes may be from {-x.ndim - 1} to {x.ndim}, not {short(d)}"
        for name, x, d in zip(names, nodes, dims, strict=True)
        if (isinstance(x, torch.Tensor) or tree.opaque(x))
        and d is not None
        and (isinstance(d, bool) or not isinstance(d, int) or not -x.ndim - 1 <= d <= x.ndim)
    ]
    if failures:
        raise TransformError(
            report(
                "vmap",
                "the results do not fit out_axes",
                failures,
                "out_axes=0, the place where vmap puts the entries by default",
            )
        )
    failures = [
        f"{name} differs between entries, but out_axes is None for it"
        for name, x, d in zip(names, leaves, dims, strict=True)
        if d is None and isinstance(x, torch.Tensor) and torch_internals.is_mapped(x)
    ]
    if failures:
        raise TransformError(
            report(
                "vmap",
                "out_axes=None is for results that are the same for all entries",
                failures,
                "out_axes=0 there, or reduce the result over the entries after vmap",
            )
        )
