"""psum, pmean, pmax, pmin: one value made of the ranks' values.

Source: `jax.lax`'s parallel operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from .._core import torch_internals
from .._core.base import context, source_lines, tree
from .._core.base.messages import report
from .._core.distributed import collectives
from .._core.distributed.mesh import communicator_of
from .._core.local_types import tensor_types, types
from .._core.shard_map import mixed_axes, vmap_collectives
from .._core.shard_map.collective_calls import Axis, local, sent, taking_part
from .._core.shard_map.collective_maps import CollectiveMap
from .._core.shard_map.collective_operands import operands, refuse_what_cannot_be_reduced


def _reduce(where: str, x: Any, axis_name: Any, row: str) -> Any:
    """A reduction over the ranks. Over an axis along which a value is the same it is arithmetic: nothing is sent."""
    if parts := vmap_collectives.runs(where, axis_name):
        each = lambda x, over: _reduce(where, x, over, row)
        several = len(parts) > 1
        return mixed_axes.one_by_one(each, x, parts) if several else vmap_collectives.sent(where, x, parts[0], row)
    body, names, n = taking_part(where, axis_name)
    leaves, treedef = operands(where, x, body)
    with torch_internals.no_torch_function():
        refuse_what_cannot_be_reduced(where, x, leaves, body, names)
        if (have := _alike(leaves, body, names)) is not None:
            outs: list[Any] = list(leaves)
            todo = {names: [*range(len(leaves))]}
        else:
            outs, have, todo = _prepared(where, x, leaves, row, body, names, n)
        for rest, members in todo.items():
            op = CollectiveMap(row, body.mesh, rest, where, body.check)
            done = sent(op, [outs[i] for i in members], [have[i] for i in members], "I")
            size = n if rest == names else collectives.group_size(body.mesh, rest)
            for i, out in zip(members, done, strict=True):
                mean = where == "pmean"
                outs[i] = _computed(out.div, size, tensor_types.typeof(out, body.axes)) if mean else out
    context.record(where, x, outs, names)
    return tree.unflatten(treedef, outs)


def _prepared(
    where: str, x: Any, leaves: Sequence[Any], row: str, body: context.Body, names: tuple[str, ...], n: int
) -> tuple[list[Any], list[Any], dict[tuple[str, ...], list[int]]]:
    """What is reduced of each leaf, its type, and which leaves are still to be reduced over which axes."""
    outs: list[Any] = []
    types_of: list[Any] = []
    todo: dict[tuple[str, ...], list[int]] = {}
    multiplied: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    for i, leaf in enumerate(leaves):
        have, rest = None, ()
        if not isinstance(leaf, torch.Tensor):
            leaf = leaf * n if where == "psum" else leaf / 1 if where == "pmean" else leaf
        else:
            leaf = local(leaf, body, where)
            have = tensor_types.type_in(leaf, body)
            rest = types.differing(have, names) if body.check else names
            if row == "psum" and leaf.dtype is torch.bool:
                leaf = _computed(leaf.to, torch.int32, have)
            if where == "psum" and len(rest) < len(names):
                same = tuple(axis for axis in names if axis not in rest)
                multiplied.setdefault(same, []).append((i, tensor_types.text(leaf, have)))
                leaf = _computed(leaf.mul, collectives.group_size(body.mesh, same), have)
            elif where == "pmean" and not (rest or leaf.is_floating_point() or leaf.is_complex()):
                leaf = _computed(leaf.div, 1, have)  # its own mean, but not an integer
        outs.append(leaf)
        types_of.append(have)
        if rest:
            todo.setdefault(rest, []).append(i)
    for same, found in multiplied.items():
        _warn_of_factor(x, same, collectives.group_size(body.mesh, same), found)
    return outs, types_of, todo


def _alike(leaves: list[Any], body: context.Body, names: tuple[str, ...]) -> list[types.Type] | None:
    """The types of the leaves, where all of them are local values of this rank, no bools, of one type, that is of each
    rank's own over all the axes: a large tree of gradients, say, of which each leaf is to cost little. Else None.
    """
    if communicator_of(body.mesh).holds_blocks or not all(
        leaf.__class__ is torch.Tensor and hasattr(leaf, "vfn_type") and leaf.dtype is not torch.bool for leaf in leaves
    ):
        return None
    if not body.check:
        return [tensor_types.made_in(body)] * len(leaves)
    have = [tensor_types.typeof(leaf, body.axes) for leaf in leaves]
    return have if len(set(have)) == 1 and types.differing(have[0], names) == names else None


def _computed(method: Callable[[Any], torch.Tensor], argument: Any, type_: types.Type) -> torch.Tensor:
    x = method(argument)
    tensor_types.mark(x, type_)
    return x


def _warn_of_factor(x: Any, axes: tuple[str, ...], factor: int, found: Sequence[tuple[int, str]]) -> None:
    if factor > 1:
        paths = tree.paths(x, "x")
        shown = [f"{paths[i]} is {text}" for i, text in found[:4]]
        shown += [f"{len(found) - 4} more"] * (len(found) > 4)
        where = f"vfn.psum over {', '.join(map(repr, axes))}"
        fix = f"x as it is: a gradient with respect to such a value is already summed; or {factor} * x, which says so"
        source_lines.warn(report(where, f"a value that is the same on all ranks is multiplied by {factor}", shown, fix))


T = TypeVar("T")  # a tree


def psum(x: T, axis_name: Axis) -> T:
    """The sum of the ranks' values along an axis, on every one of them: an all-reduce.

    Args:
        x: a tree; leaves of one dtype travel together. A bool counts as int32. A Python number is multiplied by the
            number of ranks, so ``psum(1, "i")`` is the axis size; so is a value that is the same on all ranks, with a
            warning.
        axis_name: a mesh axis or the `axis_name` of a `vmap` around, or a tuple of them (one sum over all).

    Returns:
        The same tree, invariant over the axis.

    Raises:
        CollectiveError: outside a `shard_map` body.
        MeshError: an unknown axis.

    Source: `jax.lax.psum`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((4,), ("i",))
    ...     f = vfn.shard_map(lambda x: vfn.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    ...     print(vfn.unshard(f(torch.arange(8.0))))
    tensor([12., 16.])
    """
    return _reduce("psum", x, axis_name, "psum")


def pmean(x: T, axis_name: Axis) -> T:
    """The mean of the ranks' values along an axis, on every one of them.

    Args:
        x: a tree; integers give floating-point means. A value that is the same on all ranks is its own mean: the mean
            of a gradient that is already summed is still the sum.
        axis_name: a mesh axis or the `axis_name` of a `vmap` around, or a tuple of them.

    Returns:
        The same tree, invariant over the axis.

    Raises:
        CollectiveError: outside a `shard_map` body.
        MeshError: an unknown axis.

    Source: `jax.lax.pmean`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((4,), ("i",))
    ...     f = vfn.shard_map(lambda x: vfn.pmean(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    ...     print(vfn.unshard(f(torch.arange(8.0))))
    tensor([3., 4.])
    """
    return _reduce("pmean", x, axis_name, "psum")


def pmax(x: T, axis_name: Axis) -> T:
    """The elementwise maximum of the ranks' values along an axis, on every one of them. It has no derivative.

    Args:
        x: a tree.
        axis_name: a mesh axis or the `axis_name` of a `vmap` around, or a tuple of them.

    Returns:
        The same tree, invariant over the axis.

    Raises:
        CollectiveError: outside a `shard_map` body, or when it is differentiated.
        MeshError: an unknown axis.

    Source: `jax.lax.pmax`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((4,), ("i",))
    ...     f = vfn.shard_map(lambda x: vfn.pmax(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    ...     print(vfn.unshard(f(torch.arange(8.0))))
    tensor([6., 7.])
    """
    return _reduce("pmax", x, axis_name, "pmax")


def pmin(x: T, axis_name: Axis) -> T:
    """The elementwise minimum of the ranks' values along an axis, on every one of them. It has no derivative.

    Args:
        x: a tree.
        axis_name: a mesh axis or the `axis_name` of a `vmap` around, or a tuple of them.

    Returns:
        The same tree, invariant over the axis.

    Raises:
        CollectiveError: outside a `shard_map` body, or when it is differentiated.
        MeshError: an unknown axis.

    Source: `jax.lax.pmin`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((4,), ("i",))
    ...     f = vfn.shard_map(lambda x: vfn.pmin(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    ...     print(vfn.unshard(f(torch.arange(8.0))))
    tensor([0., 1.])
    """
    return _reduce("pmin", x, axis_name, "pmin")
