"""psum, all_gather and their family: communication between the ranks of a `shard_map` body, written out.

Each public function chooses a row of the table in `maps.py` and says how the type of its operand changes. `_send` does
the rest, for trees: it checks every leaf before anything moves, promotes, and sends the leaves of one dtype in one
bucket.

Source: `jax.lax`'s parallel operators.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import _torch, context, linear, lines, tree, types, wire
from ..blocks import Blocks
from ..errors import CollectiveError, TypingError, described, meant, mesh_text, report, short
from ..mesh import axes_of, axis_names, is_simulated
from .maps import Collective, enter, index, promote
from .operands import dim_problem, operands, refuse_unreduced, refuse_what_cannot_be_reduced, size_problem

Axis = str | Sequence[str]
Problem = Callable[[torch.Tensor, int, str], str | None]

# --- from a call to the table -----------------------------------------------------------------------------------------


def _axes(where: str, axis_name: Any) -> tuple[context.Body, tuple[str, ...], int]:
    """The running body, the axes as a tuple, and the number of ranks along them."""
    body = context.body()
    if body is None and _torch.in_backward_pass():
        raise CollectiveError(report(
            where, f"axis_name={short(axis_name)}, but no axis is manual here: this is the backward pass of an "
            "autograd.Function, which does not run inside the shard_map body",
            fix="for what is to be computed again, vfn.remat(f) or torch.utils.checkpoint(f, ..., use_reentrant=False); "
            "else call it in the forward pass, and keep the result with ctx.save_for_backward"))  # fmt: skip
    if body is None:
        raise CollectiveError(report(
            where, f"axis_name={short(axis_name)}, but no axis is manual here: this is not inside a shard_map body",
            fix="call it in the function that vfn.shard_map(f, mesh=mesh, in_specs=..., out_specs=...) maps"
            + _ON_ARRAYS.get(where, "")))  # fmt: skip
    whole = set(_names(axis_name)) & (set(axes_of(body.mesh)) - set(body.axes))
    if whole:
        raise CollectiveError(report(
            where, f"axis_name={short(axis_name)}, but only {tuple(body.axes)} are manual in this shard_map body",
            [f"along {name!r} of the {mesh_text(axes_of(body.mesh))} its values are whole" for name in sorted(whole)],
            f"x.sum(...) and its like, as on one device; or axis_names={{{', '.join(map(repr, (*body.axes, *sorted(whole))))}}}"
        ))  # fmt: skip
    names = axis_names(axis_name, body.sizes, where)
    return body, names, wire.group_size(body.mesh, names)


# What takes the place of a collective in the global view.
_ON_ARRAYS = {name: f"; a whole array needs no collective: x.{method}" for name, method in
              (("psum", "sum(0)"), ("pmean", "mean(0)"), ("pmax", "amax(0)"), ("pmin", "amin(0)"))}  # fmt: skip


def _names(axis_name: Any) -> tuple[str, ...]:
    several = isinstance(axis_name, (tuple, list, set, frozenset))
    return tuple(name for name in (axis_name if several else (axis_name,)) if isinstance(name, str))


def _span(names: tuple[str, ...], n: int) -> str:
    return f"{n} (ax{'is' if len(names) == 1 else 'es'} {', '.join(map(repr, names))})"


def _local(leaf: Any, body: context.Body, where: str) -> torch.Tensor:
    """A leaf as a local value of this body."""
    if leaf.__class__ is torch.Tensor and hasattr(leaf, "vfn_type") and not is_simulated(body.mesh):
        return leaf  # one already
    if not isinstance(leaf, torch.Tensor):
        with _torch.no_torch_function():
            leaf = torch.as_tensor(leaf)
    below = _torch.peel(leaf)
    if types.outside(leaf, body.auto):
        raise TypingError(report(
            where, "a whole array was used inside a shard_map body, whose values are local", [f"it is {described(leaf)}"],
            fix="pass it as an argument of the body, with its spec in in_specs"))  # fmt: skip
    with _torch.no_torch_function():  # the body's mode would take it in a second time
        known = types.read(leaf)
        types.refuse_unseen(leaf)
        if is_simulated(body.mesh) and not isinstance(below, (Blocks, DTensor)):
            leaf = enter(leaf, body.mesh)
        if known is None and not body.check and _torch.needs_gradient(leaf):  # closed over: sums the ranks' gradients
            (leaf,) = linear.apply(Collective("copy", body.mesh, body.axes, where), leaf)
    if type(_torch.peel(leaf)) is not type(below):
        types.mark(leaf, known or types.INVARIANT)
    return leaf


def _send(where: str, x: Any, axis_name: Any, row: str, *, takes: str = "V", gives: str = "V",
          problem: Problem | None = None, fix: str = "", **parameters: Any) -> Any:  # fmt: skip
    """Send every leaf of `x` through `row`.

    Args:
        takes: the types that the row accepts as they are; invariant and reduced operands are promoted to varying first.
        gives: the type of the result over the axes.
        problem: what is wrong with a leaf, given the number of ranks and its text; all of them are reported at once.
    """
    body, names, n = _axes(where, axis_name)
    leaves, treedef = operands(where, x, body)
    leaves = [_local(leaf, body, where) for leaf in leaves]
    if problem is not None:
        found = [problem(leaf, n, _span(names, n)) for leaf in leaves]
        if any(found):
            raise CollectiveError(report(
                where, f"the operand does not fit the {mesh_text(axes_of(body.mesh))}",
                [f"{path} of shape {types.text(leaf)}: {why}"
                 for path, leaf, why in zip(tree.paths(x, "x"), leaves, found) if why],
                fix if any("size" in why for why in found if why) else ""))  # fmt: skip
    op = Collective(row, body.mesh, names, where, body.check, **parameters)
    have = [types.typeof(leaf, body.axes) if body.check else types.INVARIANT for leaf in leaves]
    if "U" not in takes:
        refuse_unreduced(where, x, leaves, have, names)
    outs = _sent(op, leaves, have, gives)
    context.note(where, x, outs, names)
    return tree.unflatten(treedef, outs)


def _sent(op: Collective, leaves: list[torch.Tensor], have: Sequence[types.Type], gives: str) -> list[Any]:
    """Leaves of these types through `op`; the results are `gives` over its axes."""
    with _torch.no_torch_function():
        if op.checked:
            want = types.of(varying=op.axes)
            leaves = [leaf if t is want else promote(leaf, t, want, op.mesh) for leaf, t in zip(leaves, have)]
        outs = _bucketed(op, leaves)
        for out, t in zip(outs, have):
            types.mark(out, types.with_letter(t, op.axes, gives))
    return outs


def _bucketed(op: Collective, leaves: list[torch.Tensor]) -> list[Any]:
    """One application, so one collective, for each dtype."""
    buckets: dict[torch.dtype, list[int]] = {}
    outs: list[Any] = [None] * len(leaves)
    with _torch.no_torch_function():
        for i, leaf in enumerate(leaves):
            buckets.setdefault(leaf.dtype, []).append(i)
        for members in buckets.values():
            for i, out in zip(members, linear.apply(op, *[leaves[i] for i in members])):
                outs[i] = out
    return outs


# --- reductions -------------------------------------------------------------------------------------------------------


def _reduce(where: str, x: Any, axis_name: Any, row: str) -> Any:
    """A reduction over the ranks. Over an axis along which a value is the same it is arithmetic: nothing is sent."""
    body, names, n = _axes(where, axis_name)
    leaves, treedef = operands(where, x, body)
    with _torch.no_torch_function():
        refuse_what_cannot_be_reduced(where, x, leaves, body, names)
        outs: list[Any] = [None] * len(leaves)
        types_of: dict[int, types.Type] = {}
        todo: dict[tuple[str, ...], list[int]] = {}
        multiplied: dict[tuple[str, ...], list[tuple[int, str]]] = {}
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                outs[i] = leaf * n if where == "psum" else leaf / 1 if where == "pmean" else leaf
                continue
            leaf = _local(leaf, body, where)
            have = types_of[i] = types.typeof(leaf, body.axes) if body.check else types.INVARIANT
            rest = types.differing(have, names) if body.check else names
            if row == "psum" and leaf.dtype is torch.bool:
                leaf = _computed(leaf.to, torch.int32, have)
            if where == "psum" and len(rest) < len(names):
                same = tuple(axis for axis in names if axis not in rest)
                multiplied.setdefault(same, []).append((i, types.text(leaf, have)))
                leaf = _computed(leaf.mul, wire.group_size(body.mesh, same), have)
            if where == "pmean" and not rest:  # its own mean, but not an integer
                leaf = _computed(leaf.div, 1, have) if not (leaf.is_floating_point() or leaf.is_complex()) else leaf
            outs[i] = leaf
            if rest:
                todo.setdefault(rest, []).append(i)
        for same, found in multiplied.items():
            _warn_of_factor(x, same, wire.group_size(body.mesh, same), found)
        for rest, members in todo.items():
            op = Collective(row, body.mesh, rest, where, body.check)
            done = _sent(op, [outs[i] for i in members], [types_of[i] for i in members], "I")
            for i, out in zip(members, done, strict=True):
                if where == "pmean":
                    out = _computed(out.div, wire.group_size(body.mesh, rest), types.typeof(out, body.axes))
                outs[i] = out
    context.note(where, x, outs, names)
    return tree.unflatten(treedef, outs)


def _computed(method: Callable[[Any], torch.Tensor], argument: Any, type_: types.Type) -> torch.Tensor:
    x = method(argument)
    types.mark(x, type_)
    return x


def _warn_of_factor(x: Any, axes: tuple[str, ...], factor: int, found: Sequence[tuple[int, str]]) -> None:
    if factor > 1:
        paths = tree.paths(x, "x")
        shown = [f"{paths[i]} is {text}" for i, text in found[:4]]
        shown += [f"{len(found) - 4} more"] * (len(found) > 4)
        where = f"vfn.psum over {', '.join(map(repr, axes))}"
        fix = f"x as it is: a gradient with respect to such a value is already summed; or {factor} * x, which says so"
        lines.warn(report(where, f"a value that is the same on all ranks is multiplied by {factor}", shown, fix))


def psum(x: Any, axis_name: Axis) -> Any:
    """The sum of the ranks' values along an axis, on every one of them: an all-reduce.

    Args:
        x: a tree; leaves of one dtype travel together. A bool counts as int32. A Python number is multiplied by the
            number of ranks, so ``psum(1, "i")`` is the axis size; so is a value that is the same on all ranks, with a
            warning.
        axis_name: a mesh axis, or a tuple of them (one sum over all).

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


def pmean(x: Any, axis_name: Axis) -> Any:
    """The mean of the ranks' values along an axis, on every one of them.

    Args:
        x: a tree; integers give floating-point means. A value that is the same on all ranks is its own mean: the mean
            of a gradient that is already summed is still the sum.
        axis_name: a mesh axis, or a tuple of them.

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


def pmax(x: Any, axis_name: Axis) -> Any:
    """The elementwise maximum of the ranks' values along an axis, on every one of them. It has no derivative.

    Args:
        x: a tree.
        axis_name: a mesh axis, or a tuple of them.

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


def pmin(x: Any, axis_name: Axis) -> Any:
    """The elementwise minimum of the ranks' values along an axis, on every one of them. It has no derivative.

    Args:
        x: a tree.
        axis_name: a mesh axis, or a tuple of them.

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


# --- gathers, scatters, exchanges -------------------------------------------------------------------------------------

_GATHERS = {"varying": ("all_gather", "V"), "invarying": ("all_gather_invariant", "I"), "reduced": ("all_gather", "R")}


def all_gather(x: Any, axis_name: Axis, *, axis: int = 0, tiled: bool = False, to: str = "varying") -> Any:
    """The values of all ranks along an axis, on every one of them.

    Args:
        x: a tree.
        axis_name: a mesh axis, or a tuple of them, major first.
        axis: the dim where the ranks' values go: a new one, or with `tiled` the one along which they are concatenated.
        tiled: concatenate instead of stacking.
        to: how the result is typed, which decides what the backward pass does: "varying" (a reduce-scatter),
            "invarying" (a slice, nothing moves; may be returned with ``out_specs=P()``), "reduced" (a reduce-scatter of
            a gradient that stayed unreduced: weights sharded over data-parallel ranks).

    Raises:
        CollectiveError: outside a `shard_map` body, or an `axis` that a leaf does not have.
        MeshError: an unknown axis name.

    Source: `jax.lax.all_gather`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((4,), ("i",))
    ...     body = lambda x: vfn.all_gather(x, "i", tiled=True, to="invarying") * 2
    ...     f = vfn.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P())
    ...     print(vfn.unshard(f(torch.arange(4.0))))
    tensor([0., 2., 4., 6.])
    """
    body, _, _ = _axes("all_gather", axis_name)
    if to not in _GATHERS:
        raise CollectiveError(report("all_gather", f"to={short(to)} is not one of {tuple(_GATHERS)}{meant(to, _GATHERS)}",
                                     fix='to="varying", the default; "invarying" for a result that may be returned with '
                                         "out_specs=P()"))  # fmt: skip
    row, gives = _GATHERS[to] if body.check else _GATHERS["varying"]

    def problem(leaf: torch.Tensor, n: int, span: str) -> str | None:
        found = dim_problem(axis, leaf.ndim + (not tiled), "axis", "x" if tiled else "the result")
        return f"{found}; tiled=False gathers scalars" if found and tiled and not leaf.ndim else found

    return _send("all_gather", x, axis_name, row, dim=axis, gives=gives, tiled=tiled, problem=problem)


def psum_scatter(x: Any, axis_name: Axis, *, scatter_dimension: int = 0, tiled: bool = False) -> Any:
    """The sum of the ranks' values along an axis, of which each rank keeps its own piece: a reduce-scatter.

    Args:
        x: a tree.
        axis_name: a mesh axis, or a tuple of them, major first.
        scatter_dimension: the dim that is cut into one piece a rank.
        tiled: the dim stays, and a piece is a slice of it (its size must divide); else its size must be the number of
            ranks and it goes away.

    Raises:
        CollectiveError: outside a `shard_map` body, or a size that does not fit.
        MeshError: an unknown axis.

    Source: `jax.lax.psum_scatter`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((4,), ("i",))
    ...     body = lambda x: vfn.psum_scatter(x, "i", tiled=True)
    ...     f = vfn.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    ...     print(vfn.unshard(f(torch.arange(16.0))))
    tensor([24., 28., 32., 36.])
    """

    def problem(leaf: torch.Tensor, n: int, span: str) -> str | None:
        return dim_problem(scatter_dimension, leaf.ndim, "scatter_dimension") or size_problem(
            leaf, scatter_dimension, "scatter_dimension", tiled, n, span
        )

    return _send("psum_scatter", x, axis_name, "psum_scatter", dim=scatter_dimension, takes="VU", tiled=tiled,
                 problem=problem, fix="pad the dim, scatter along another, or vfn.psum and slice")  # fmt: skip


def all_to_all(x: Any, axis_name: Axis, split_axis: int, concat_axis: int, *, tiled: bool = False) -> Any:
    """Cut the value into one piece for each rank, send each its piece, and put together what arrives.

    Args:
        x: a tree.
        axis_name: a mesh axis, or a tuple of them, major first.
        split_axis: the dim that is cut.
        concat_axis: the dim where the arriving pieces go, in rank order. Without `tiled`, counted after `split_axis`
            has gone.
        tiled: slices of `split_axis` are concatenated along `concat_axis`; else `split_axis`, whose size must be the
            number of ranks, goes away and `concat_axis` is a new dim.

    Raises:
        CollectiveError: outside a `shard_map` body, or sizes that do not fit.
        MeshError: an unknown axis.

    Source: `jax.lax.all_to_all`; its gradient is also right where the untiled axes differ.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(2):
    ...     mesh = vfn.make_mesh((2,), ("i",))
    ...     body = lambda x: vfn.all_to_all(x, "i", 1, 0, tiled=True)
    ...     f = vfn.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P(None, "i"))
    ...     print(vfn.unshard(f(torch.arange(4).view(2, 2))))
    tensor([[0, 1],
            [2, 3]])
    """

    def problem(leaf: torch.Tensor, n: int, span: str) -> str | None:
        return (
            dim_problem(split_axis, leaf.ndim, "split_axis")
            or dim_problem(concat_axis, leaf.ndim, "concat_axis", "x" if tiled else "the result")
            or size_problem(leaf, split_axis, "split_axis", tiled, n, span)
        )

    return _send("all_to_all", x, axis_name, "all_to_all", dim=split_axis, other=concat_axis, tiled=tiled,
                 problem=problem, fix="another split_axis, or pad the dim")  # fmt: skip


def ppermute(x: Any, axis_name: Axis, perm: Sequence[tuple[int, int]]) -> Any:
    """Send each rank's value to another rank.

    Args:
        x: a tree.
        axis_name: a mesh axis, or a tuple of them, major first.
        perm: (source, destination) pairs of positions along the axis. A rank that is no destination gets zeros.

    Raises:
        CollectiveError: outside a `shard_map` body; a source or a destination named twice, or out of range.
        MeshError: an unknown axis.

    Source: `jax.lax.ppermute`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((4,), ("i",))
    ...     body = lambda x: vfn.ppermute(x, "i", [(0, 1), (1, 2)])
    ...     f = vfn.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    ...     print(vfn.unshard(f(torch.arange(1.0, 5.0))))
    tensor([0., 1., 2., 0.])
    """
    _, names, n = _axes("ppermute", axis_name)
    try:
        pairs = tuple((operator.index(source), operator.index(destination)) for source, destination in perm)
    except (TypeError, ValueError):
        raise CollectiveError(report("ppermute", f"perm={_perm_text(perm)} is not a sequence of (source, destination) pairs",
                                     fix=f"a shift by one is [(i, (i + 1) % {n}) for i in range({n})]")) from None  # fmt: skip
    failures = [f"pair {pair}: positions go from 0 to {n - 1}, there are {_span(names, n)}"
                for pair in pairs if not all(0 <= i < n for i in pair)]  # fmt: skip
    for word, places in (("source", [s for s, _ in pairs]), ("destination", [d for _, d in pairs])):
        failures += [f"{word} {i} is in {[pair for pair in pairs if pair[word == 'destination'] == i]}"
                     for i in sorted(set(places)) if places.count(i) > 1]  # fmt: skip
    if failures:
        raise CollectiveError(report("ppermute", f"perm={list(pairs)} is not a permutation of some of the ranks",
                                     failures, "each rank at most once as source and at most once as destination"))  # fmt: skip
    return _send("ppermute", x, axis_name, "ppermute", perm=pairs)


def _perm_text(perm: Any) -> str:
    held = (
        [b for a in perm for b in (a if isinstance(a, (tuple, list)) else (a,))]
        if isinstance(perm, (tuple, list))
        else ()
    )
    return "[...] with tensors in it" if any(isinstance(a, torch.Tensor) for a in held) else repr(perm)


def pbroadcast(x: Any, axis_name: Axis, source: int) -> Any:
    """The value of one rank, on every rank along an axis.

    Args:
        x: a tree.
        axis_name: a mesh axis, or a tuple of them, major first.
        source: the position along the axis whose value is taken.

    Returns:
        The same tree, typed varying although it is equal everywhere.

    Raises:
        CollectiveError: outside a `shard_map` body, or a `source` out of range.
        MeshError: an unknown axis.

    Source: `jax.lax.pbroadcast`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((4,), ("i",))
    ...     f = vfn.shard_map(lambda x: vfn.pbroadcast(x, "i", 2), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    ...     print(vfn.unshard(f(torch.arange(4.0))))
    tensor([2., 2., 2., 2.])
    """
    _, names, n = _axes("pbroadcast", axis_name)
    if isinstance(source, (bool, torch.Tensor)) or not hasattr(source, "__index__"):
        raise CollectiveError(report(
            "pbroadcast", f"source must be an int, one position for all ranks, but it is {described(source)}",
            fix="torch.where(vfn.axis_index(axis) == i, x, 0) and vfn.psum, where the source is computed"))  # fmt: skip
    if not 0 <= operator.index(source) < n:
        raise CollectiveError(report("pbroadcast", f"source={source}, but positions go from 0 to {n - 1}: there are "
                                     f"{_span(names, n)}"))  # fmt: skip
    return _send("pbroadcast", x, axis_name, "pbroadcast", source=operator.index(source))


# --- types, positions -------------------------------------------------------------------------------------------------

# (from, to) -> the row; each is the identity on the values.
_CASTS = {("I", "V"): "copy", ("R", "V"): "relabel", ("I", "R"): "copy", ("V", "U"): "relabel"}
_WORDS = {"varying": "V", "reduced": "R", "unreduced": "U"}
_NAMES = {"V": "varying", "R": "reduced", "U": "unreduced", "I": "invarying"}


def pcast(x: Any, axis_name: Axis, *, to: str) -> Any:
    """The same values with another type over an axis, which changes what their gradient means.

    Args:
        x: a tree.
        axis_name: a mesh axis, or a tuple of them.
        to: "varying" (from invariant: the gradient is summed over the ranks; from reduced), "reduced" (from invariant:
            the gradient stays unreduced), "unreduced" (from varying: the ranks' values are parts of a sum from now on).

    Raises:
        TypingError: a cast that does not exist, such as varying to varying.
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
        TypingError: a leaf that is varying already.
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
    body, names, _ = _axes(where, axis_name)
    if to not in _WORDS:
        same = isinstance(to, str) and to.startswith("inv")
        raise TypingError(report(
            where, f"to={short(to)} is not one of {tuple(_WORDS)}{'' if same else meant(to, _WORDS)}",
            fix="vfn.psum(x, axis) or vfn.pmean, which make the ranks' values one; vfn.pbroadcast takes one rank's"
            if same else 'to="varying", where each rank is to go on with a value of its own'))  # fmt: skip
    leaves, treedef = operands(where, x, body)
    leaves = [_local(leaf, body, where) for leaf in leaves]
    if not body.check:
        return tree.unflatten(treedef, leaves)
    groups: dict[tuple[tuple[str, tuple[str, ...]], ...], list[int]] = {}
    failures = []
    for i, leaf in enumerate(leaves):
        have, steps = types.typeof(leaf, body.axes), {}
        for name in names:
            row = _CASTS.get((have.letter(name), _WORDS[to]))
            if row is None:
                which = _NAMES[have.letter(name)]
                failures.append(f"{tree.paths(x, 'x')[i]} is {types.text(leaf, have)}: " + (
                    f"it is {to} over {name!r} already" if which == to else f"no cast from {which} to {to} over {name!r}"
                ))  # fmt: skip
            else:
                steps[row] = (*steps.get(row, ()), name)
        groups.setdefault(tuple(steps.items()), []).append(i)
    if failures:
        raise TypingError(report(where, f"there is no such cast, to={to!r}", failures,
                                 "no cast where none is needed; the casts are invarying -> varying or reduced, reduced "
                                 "-> varying, varying -> unreduced; vfn.psum makes a varying or unreduced value "
                                 "invarying"))  # fmt: skip
    for steps, members in groups.items():
        known = [types.typeof(leaves[i], body.axes) for i in members]
        values = [leaves[i] for i in members]
        for row, axes in steps:
            values = _bucketed(Collective(row, body.mesh, axes, where), values)
        for i, value, have in zip(members, values, known, strict=True):
            types.mark(value, types.with_letter(have, names, _WORDS[to]))
            types.borrow(value)
            leaves[i] = value
    context.note(where, x, leaves, names)
    return tree.unflatten(treedef, leaves)


def axis_index(axis_name: Axis) -> torch.Tensor:
    """This rank's position along an axis, as a 0-d int32 tensor.

    Args:
        axis_name: a mesh axis, or a tuple of them, major first.

    Raises:
        CollectiveError: outside a `shard_map` body.
        MeshError: an unknown axis.

    Source: `jax.lax.axis_index`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((4,), ("i",))
    ...     f = vfn.shard_map(lambda x: x + vfn.axis_index("i"), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    ...     print(vfn.unshard(f(torch.zeros(4))))
    tensor([0., 1., 2., 3.])
    """
    body, names, _ = _axes("axis_index", axis_name)
    position = index(body.mesh, names)
    types.mark(position, types.of(varying=names))
    context.note("axis_index", (), position, names)
    return position


def axis_size(axis_name: Axis) -> int:
    """The number of ranks along an axis.

    Args:
        axis_name: a mesh axis, or a tuple of them.

    Raises:
        CollectiveError: outside a `shard_map` body.
        MeshError: an unknown axis.

    Source: `jax.lax.axis_size`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((4,), ("i",))
    ...     f = vfn.shard_map(lambda x: x / vfn.axis_size("i"), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    ...     print(vfn.unshard(f(torch.ones(4))))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    return _axes("axis_size", axis_name)[2]
