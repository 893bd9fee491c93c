"""From a call of a collective to its row of the table in `collective_maps.py`: the axes, every operand checked before anything
moves, promoted, and sent with the others of its dtype in one bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import context, linear_map, tree
from ..base.errors import CollectiveError, MeshError, VaryingTypeError
from ..base.messages import described, meant, mesh_text, report, short
from ..distributed import collectives
from ..distributed.blocks import Blocks
from ..distributed.mesh import axis_names, communicator_of
from ..local_types import tensor_types, types
from ..sharding.index_map import axes_of
from .collective_maps import CollectiveMap, enter, promote
from .collective_operands import operands, refuse_unreduced

Axis = str | Sequence[str]
Problem = Callable[[torch.Tensor, int, str], str | None]


def taking_part(where: str, axis_name: Any, called: str = "axis_name") -> tuple[context.Body, tuple[str, ...], int]:
    """The running body, the axes as a tuple, and the number of ranks along them. `called`: the parameter's name."""
    body = context.body()
    if entries := context.entry_names():
        _refuse_entries(where, axis_name, called, body, entries)
    if body is None and torch_internals.in_backward_pass():
        raise CollectiveError(
            report(
                where,
                f"{called}={short(axis_name)}, but no axis is manual here: this is the backward pass of an "
                "autograd.Function, which does not run inside the shard_map body",
                fix="for what is to be computed again, vfn.remat(f) or torch.utils.checkpoint(f, ..., use_reentrant=False); "
                "else call it in the forward pass, and keep the result with ctx.save_for_backward",
            )
        )
    if body is None:
        raise CollectiveError(
            report(
                where,
                f"{called}={short(axis_name)}, but no axis is manual here: this is not inside a shard_map body",
                fix="call it in the function that vfn.shard_map(f, mesh=mesh, in_specs=..., out_specs=...) maps"
                + _ON_ARRAYS.get(where, ""),
            )
        )
    manual = axis_name.__class__ is str and axis_name in body.sizes
    names = (axis_name,) if manual else _checked_names(where, axis_name, called, body)
    if body.unchecked and (unchecked := [x for x in names if x in body.unchecked and where not in _POSITIONS]):
        raise CollectiveError(
            report(
                where,
                f"{called}={short(axis_name)}, but {unchecked[0]!r} is of a shard_map around this one without types, so it is "
                "not known how values differ along it",
                fix="the collective in the body of that one, before or after this one; or check_vma=True for both",
            )
        )
    if context.apart() and where not in _ALONE:
        _refuse_apart(where, names, f"{called}={short(axis_name)}")
    return body, names, collectives.group_size(body.mesh, names)


def _checked_names(where: str, axis_name: Any, called: str, body: context.Body) -> tuple[str, ...]:
    """The axes as a tuple, all of them manual in the body."""
    whole = set(_names(axis_name)) & (set(axes_of(body.mesh)) - set(body.axes))
    if not whole.isdisjoint(body.free):
        raise context.NotFree(frozenset(whole.intersection(body.free)))
    if whole:
        raise CollectiveError(
            report(
                where,
                f"{called}={short(axis_name)}, but only {tuple(body.axes)} are manual in this shard_map body",
                [
                    f"along {name!r} of the {mesh_text(axes_of(body.mesh))} its values are whole"
                    for name in sorted(whole)
                ],
                "x.sum(...) and its like, as on one device; or "
                f"axis_names={{{', '.join(map(repr, (*body.axes, *sorted(whole))))}}}",
            )
        )
    return axis_names(axis_name, body.sizes, where, called)


def _refuse_apart(where: str, names: tuple[str, ...], given: str) -> None:
    """Raise where the condition of a `cond` or a `while_loop` around differs along one of these axes."""
    for axis, condition in context.apart():
        if axis in names:
            what = (
                f"{given}, but the condition of the {condition} around varies over {axis!r}, so ranks go different ways"
            )
            fix = f"the collective before or after the {condition}; or one condition for all ranks, of vfn.pmax(..., {axis!r})"
            raise VaryingTypeError(report(where, what, fix=fix))


def _refuse_entries(
    where: str, axis_name: Any, called: str, body: context.Body | None, entries: tuple[str, ...]
) -> None:
    """Raise for the axis of a `vmap`, where only ranks can take part, and for what is no axis of any kind."""
    manual = body.axes if body is not None else ()
    mesh_axes = axes_of(body.mesh) if body is not None else ()
    names = [name for name in _names(axis_name) if name not in manual]
    if over := [name for name in names if name in entries]:
        raise CollectiveError(
            report(
                where,
                f"{called}={short(axis_name)}: {over[0]!r} is the axis of a vmap, but this is over axes of a mesh only",
                fix="an axis that is manual in the shard_map body" + f", of {manual}" * bool(manual),
            )
        )
    if unknown := [name for name in names if name not in mesh_axes]:
        here = f"the axes that are manual here are {manual}" if manual else "no axis of a mesh is manual here"
        raise MeshError(
            report(
                where,
                f"{called}={short(axis_name)} does not name axes",
                [
                    f"{name!r} is none{meant(name, (*manual, *entries))}: {here}, and the vmaps around have the axes {entries}"
                    for name in unknown
                ],
                f"{called}={entries[-1]!r}, for example",
            )
        )


_POSITIONS = ("axis_index", "axis_size")  # which need no types
_ALONE = (*_POSITIONS, "pvary", "pcast")  # which each rank does for itself

# What takes the place of a collective in the global view.
_ON_ARRAYS = {
    name: f"; a whole array needs no collective: x.{method}"
    for name, method in (("psum", "sum(0)"), ("pmean", "mean(0)"), ("pmax", "amax(0)"), ("pmin", "amin(0)"))
}


def _names(axis_name: Any) -> tuple[str, ...]:
    several = isinstance(axis_name, (tuple, list, set, frozenset))
    return tuple(name for name in (axis_name if several else (axis_name,)) if isinstance(name, str))


def span(names: tuple[str, ...], n: int) -> str:
    """A number of ranks and the axes that they are along, in words."""
    return f"{n} (ax{'is' if len(names) == 1 else 'es'} {', '.join(map(repr, names))})"


def local(leaf: Any, body: context.Body, where: str) -> torch.Tensor:
    """A leaf as a local value of this body."""
    if leaf.__class__ is torch.Tensor and hasattr(leaf, "vfn_type") and not communicator_of(body.mesh).holds_blocks:
        return leaf  # one already
    if not isinstance(leaf, torch.Tensor):
        with torch_internals.no_torch_function():
            leaf = torch.as_tensor(leaf)
    below = torch_internals.peel(leaf)
    if tensor_types.outside(leaf, body.auto):
        raise VaryingTypeError(
            report(
                where,
                "a whole array was used inside a shard_map body, whose values are local",
                [f"it is {described(leaf)}"],
                fix="pass it as an argument of the body, with its spec in in_specs",
            )
        )
    with torch_internals.no_torch_function():  # the body's mode would take it in a second time
        known = tensor_types.read(leaf)
        tensor_types.refuse_unseen(leaf)
        if communicator_of(body.mesh).holds_blocks and not isinstance(below, (Blocks, DTensor)):
            leaf = enter(leaf, body.mesh)
        # closed over: sums the ranks' gradients
        if known is None and not body.check and torch_internals.needs_gradient(leaf):
            (leaf,) = linear_map.apply(CollectiveMap("copy", body.mesh, body.axes, where), leaf)
    if type(torch_internals.peel(leaf)) is not type(below):
        tensor_types.mark(leaf, known or tensor_types.made_in(body))
    return leaf


def send(
    where: str,
    x: Any,
    axis_name: Any,
    row: str,
    *,
    takes: str = "V",
    gives: str = "V",
    problem: Problem | None = None,
    fix: str = "",
    **parameters: Any,
) -> Any:
    """Send every leaf of `x` through `row`.

    Args:
        takes: the types that the row accepts as they are; invariant and reduced operands are promoted to varying first.
        gives: the type of the result over the axes.
        problem: what is wrong with a leaf, given the number of ranks and its text; all of them are reported at once.
    """
    body, names, n = taking_part(where, axis_name)
    leaves, treedef = operands(where, x, body)
    leaves = [local(leaf, body, where) for leaf in leaves]
    refuse_misfits(where, x, leaves, problem, fix, f"the {mesh_text(axes_of(body.mesh))}", names, n)
    op = CollectiveMap(row, body.mesh, names, where, body.check, **parameters)
    have = [tensor_types.type_in(leaf, body) for leaf in leaves]
    if "U" not in takes:
        refuse_unreduced(where, x, leaves, have, names)
    outs = sent(op, leaves, have, gives)
    context.record(where, x, outs, names)
    return tree.unflatten(treedef, outs)


def refuse_misfits(
    where: str,
    x: Any,
    leaves: Sequence[torch.Tensor],
    problem: Problem | None,
    fix: str,
    what: str,
    names: tuple[str, ...],
    n: int,
) -> None:
    """Raise where a leaf has a problem with the `n` that take part, along the axes `names`."""
    found = [problem(leaf, n, span(names, n)) for leaf in leaves] if problem is not None else []
    if any(found):
        raise CollectiveError(
            report(
                where,
                f"the operand does not fit {what}",
                [
                    f"{path} of shape {tensor_types.text(leaf)}: {why}"
                    for path, leaf, why in zip(tree.paths(x, "x"), leaves, found)
                    if why
                ],
                fix if any("size" in why for why in found if why) else "",
            )
        )


def sent(op: CollectiveMap, leaves: list[torch.Tensor], have: Sequence[types.Type], gives: str) -> list[Any]:
    """Leaves of these types through `op`; the results are `gives` over its axes."""
    with torch_internals.no_torch_function():
        if op.checked:
            want = types.of(varying=op.axes)
            leaves = [leaf if t is want else promote(leaf, t, want, op.mesh) for leaf, t in zip(leaves, have)]
        outs = bucketed(op, leaves)
        for out, t in zip(outs, have):
            tensor_types.mark(out, types.with_letter(t, op.axes, gives if op.checked else "V"))
    return outs


def bucketed(op: CollectiveMap, leaves: list[torch.Tensor]) -> list[Any]:
    """One application, so one collective, for each dtype."""
    buckets: dict[torch.dtype, list[int]] = {}
    outs: list[Any] = [None] * len(leaves)
    with torch_internals.no_torch_function():
        for i, leaf in enumerate(leaves):
            buckets.setdefault(leaf.dtype, []).append(i)
        for members in buckets.values():
            for i, out in zip(members, linear_map.apply(op, *[leaves[i] for i in members])):
                outs[i] = out
    return outs
