"""pcast, pvary: the same values with another type over an axis.

Source: `jax.lax`'s parallel operators.
"""

from __future__ import annotations

from typing import Any

from .._core.base import context, tree
from .._core.base.errors import VaryingTypeError
from .._core.base.messages import meant, report, short
from .._core.local_types import tensor_types, types
from .._core.shard_map.collective_calls import Axis, bucketed, local, taking_part
from .._core.shard_map.collective_maps import CollectiveMap
from .._core.shard_map.collective_operands import operands

# (from, to) -> the row; each is the identity on the values.
_CASTS = {("I", "V"): "copy", ("R", "V"): "relabel", ("I", "R"): "copy", ("V", "U"): "relabel"}
_WORDS = {word: types.WORDS[word] for word in ("varying", "reduced", "unreduced")}
_NAMES = {letter: word for word, letter in types.WORDS.items()}


def pcast(x: Any, axis_name: Axis, *, to: str) -> Any:
    """The same values with another type over an axis, which changes what their gradient means.

    Args:
        x: a tree.
        axis_name: a mesh axis, or a tuple of them.
        to: "varying" (from invariant: the gradient is summed over the ranks; from reduced), "reduced" (from invariant:
            the gradient stays unreduced), "unreduced" (from varying: the ranks' values are parts of a sum from now on).

    Raises:
        VaryingTypeError: a cast that does not exist, such as varying to varying.
        CollectiveError: outside a `shard_map` body.
        MeshError: an unknown axis.

    Source: `jax.lax.pcast`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((4,), ("i",))
    ...     def gradient_of_each_rank(w, x):
    ...         return vfn.grad(lambda w: (w * x).sum())(vfn.pcast(w, "i", to="varying"))[None]
    ...     f = vfn.shard_map(gradient_of_each_rank, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))
    ...     print(vfn.unshard(f(torch.tensor(2.0), torch.arange(4.0))))
    tensor([0., 1., 2., 3.])
    """
    return _cast("pcast", x, axis_name, to)


def pvary(x: Any, axis_name: Axis) -> Any:
    """The same values, typed varying over an axis: ``pcast(x, axis_name, to="varying")``.

    It is seldom needed: where an invariant value meets a varying one this happens by itself. Its gradient is the sum
    over the ranks, so a whole tree of weights cast at once has its gradients summed in one collective.

    Args:
        x: a tree.
        axis_name: a mesh axis, or a tuple of them.

    Raises:
        VaryingTypeError: a leaf that is varying already.
        CollectiveError: outside a `shard_map` body.
        MeshError: an unknown axis.

    Source: `jax.lax.pvary`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(2):
    ...     mesh = vfn.make_mesh((2,), ("i",))
    ...     f = vfn.shard_map(lambda x: vfn.pvary(x, "i"), mesh=mesh, in_specs=P(), out_specs=P("i"))
    ...     print(vfn.unshard(f(torch.arange(2.0))))
    tensor([0., 1., 0., 1.])
    """
    return _cast("pvary", x, axis_name, "varying")


def _cast(where: str, x: Any, axis_name: Any, to: str) -> Any:
    body, names, _ = taking_part(where, axis_name)
    if to not in _WORDS:
        same = isinstance(to, str) and to.startswith("inv")
        raise VaryingTypeError(
            report(
                where,
                f"to={short(to)} is not one of {tuple(_WORDS)}{'' if same else meant(to, _WORDS)}",
                fix="vfn.psum(x, axis) or vfn.pmean, which make the ranks' values one; vfn.pbroadcast takes one rank's"
                if same
                else 'to="varying", where each rank is to go on with a value of its own',
            )
        )
    leaves, treedef = operands(where, x, body)
    leaves = [local(leaf, body, where) for leaf in leaves]
    if not body.check:
        return tree.unflatten(treedef, leaves)
    groups: dict[tuple[tuple[str, tuple[str, ...]], ...], list[int]] = {}
    failures = []
    for i, leaf in enumerate(leaves):
        have, steps = tensor_types.typeof(leaf, body.axes), {}
        for name in names:
            row = _CASTS.get((have.letter(name), _WORDS[to]))
            if row is None:
                which = _NAMES[have.letter(name)]
                failures.append(
                    f"{tree.paths(x, 'x')[i]} is {tensor_types.text(leaf, have)}: "
                    + (
                        f"it is {to} over {name!r} already"
                        if which == to
                        else f"no cast from {which} to {to} over {name!r}"
                    )
                )
            else:
                steps[row] = (*steps.get(row, ()), name)
        groups.setdefault(tuple(steps.items()), []).append(i)
    if failures:
        raise VaryingTypeError(
            report(
                where,
                f"there is no such cast, to={to!r}",
                failures,
                "no cast where none is needed; the casts are invarying -> varying or reduced, reduced "
                "-> varying, varying -> unreduced; vfn.psum makes a varying or unreduced value "
                "invarying",
            )
        )
    for steps, members in groups.items():
        known = [tensor_types.typeof(leaves[i], body.axes) for i in members]
        values = [leaves[i] for i in members]
        for row, axes in steps:
            values = bucketed(CollectiveMap(row, body.mesh, axes, where), values)
        for i, value, have in zip(members, values, known, strict=True):
            tensor_types.mark(value, types.with_letter(have, names, _WORDS[to]))
            tensor_types.borrow(value)
            leaves[i] = value
    context.record(where, x, leaves, names)
    return tree.unflatten(treedef, leaves)
