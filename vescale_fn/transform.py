"""The other transforms over any pytree: `jvp`, `linearize`, `vmap`, `remat`."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from . import _torch, context, interrupts, tracebacks, tracking, tree
from .calls import called, checked_function, owner, parameter
from .containers import opened
from .differentiable import Split, settled
from .errors import TransformError, count_text, described, report, short
from .pullback import Flat, partner_problem, pullback_of

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here


@_torch.not_compiled
def jvp(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """``f(*primals)`` and its derivative along `tangents`, by forward-mode differentiation.

    Args:
        f: a function of trees of tensors to a tree of tensors.
        primals: a tuple of its arguments.
        tangents: a tuple like it; at leaves that are not floating-point tensors the tangent is not read (None will do).

    Returns:
        ``(out, tangent_out)``.

    Source: `jax.jvp`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.jvp(torch.sin, (torch.tensor(0.0),), (torch.tensor(2.0),))
    (tensor(0.), tensor(2.))
    """
    checked_function(f, "jvp")
    wrong = [f"{name} is {described(given)}" for name, given in (("primals", primals), ("tangents", tangents))
             if not isinstance(given, (tuple, list))]  # fmt: skip
    if wrong:
        fix = "jvp(f, (x,), (dx,)): one of each for each argument of f"
        raise TransformError(report("jvp", "primals and tangents must be tuples", wrong, fix))
    if len(primals) != len(tangents):
        what = f"primals has length {len(primals)}, but tangents has length {len(tangents)}"
        raise TransformError(report("jvp", what, fix="give tuples, one tangent for each argument of the function"))
    split = Split("jvp", f, tuple(primals), range(len(primals)))
    flat = Flat(f, split)
    _torch.load_forward_rules()
    with interrupts.undone():
        outs, slopes = torch.func.jvp(flat, tuple(split.primals), _directions(split, tangents))[:2]
    return flat.rebuilt(outs), flat.rebuilt(slopes)


def _directions(split: Split, tangents: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """The tangent of each leaf that is differentiated."""
    where, primals = split.where, split.args
    given = [
        tangent
        for p, t in zip(primals, tangents, strict=True)
        for leaf, tangent in zip(
            tree.leaves(p, is_leaf=tree.none_or_opaque),
            tree.broadcast(t, p, where, "tangents", "primals", is_leaf=tree.none_or_opaque),
            strict=True,
        )
        if leaf is not None
    ]
    directions = tuple(tracking.local(given[i]) for i in split.moving)
    names = [name for n, p in enumerate(primals) for name in tree.paths_opaque(p, f"primals[{n}]")]
    failures = []
    for i, tangent in zip(split.moving, directions, strict=True):
        x = split.leaves[i]
        if problem := partner_problem(x, tangent, "tangent"):
            failures.append(f"{names[i]} {problem}")
    if failures:
        raise TransformError(report(where, "the tangents do not fit the primals", failures,
                                    "a tensor of the same shape and dtype for each, torch.ones_like(x) say"))  # fmt: skip
    return directions


@_torch.not_compiled
def linearize(f: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[..., Any]]:
    """``f(*primals)``, and its derivative there: a function of tangents, which does not run `f` again.

    For many tangents at one point (conjugate gradients, Lanczos, a Jacobian's columns). `f` runs once, and what its
    derivative needs is kept; each call then costs about a backward pass. Its derivative is the transpose of the
    transpose: whatever `vjp` of `vjp` goes through, on plain tensors, on arrays and in a `shard_map` body. For one
    tangent `jvp` does it in one run.

    Args:
        f: a function of trees of tensors to a tree of tensors.
        primals: its arguments.

    Returns:
        ``(out, f_jvp)``; ``f_jvp(*tangents)`` takes one tree for each primal (read as `jvp` reads its tangents) and
        returns a tree like `out`, in its layout, with zeros at integer and bool tensors.

    Raises:
        TransformError: nothing to differentiate; from `f_jvp`, tangents that do not fit the primals.

    Source: `jax.linearize`; the transposition trick is Jamie Townsend's, "A new trick for calculating
        Jacobian vector products" (2017).

    >>> import torch, vescale_fn as vfn
    >>> out, f_jvp = vfn.linearize(lambda x: x**2, torch.tensor(3.0))
    >>> out, f_jvp(torch.tensor(1.0)), f_jvp(torch.tensor(10.0))
    (tensor(9.), tensor(6.), tensor(60.))
    """
    checked_function(f, "linearize")
    split = Split("linearize", f, primals, range(len(primals)))
    flat = Flat(f, split)
    outs, back = pullback_of(flat, split.primals, follow=True)
    out = flat.rebuilt(outs)
    smooth = [i for i, x in enumerate(outs) if x.is_floating_point() or x.is_complex()]

    def transposed(*seeds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cotangents = [torch.zeros_like(x) for x in outs]
        for i, seed in zip(smooth, seeds, strict=True):
            cotangents[i] = seed
        return tuple(back(tuple(cotangents)))

    _, forth = pullback_of(transposed, [torch.zeros_like(outs[i]) for i in smooth],
                           follow=any(x.requires_grad for x in outs))  # fmt: skip

    @_torch.not_compiled
    def f_jvp(*tangents: Any) -> Any:
        if len(tangents) != len(primals):
            given = count_text(len(tangents), "tangent")
            what = f"it was made with {count_text(len(primals), 'primal')}, and called with {given}"
            raise TransformError(report("linearize: f_jvp", what, fix="one tangent for each argument of the function"))
        slopes = [torch.zeros_like(x) for x in outs]
        found = settled(forth(_directions(split, tangents)), [slopes[i] for i in smooth])
        for i, slope in zip(smooth, found, strict=True):
            slopes[i] = slope
        return flat.rebuilt(slopes)

    return out, f_jvp


@_torch.not_compiled
def vmap(f: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0, axis_name: Any = None, axis_size: Any = None,
         spmd_axis_name: Any = None) -> Callable[..., Any]:  # fmt: skip
    """The function that applies `f` to each entry along a dim of its arguments.

    Args:
        f: a function of trees of tensors; inside it, tensors, specs and keys speak of one entry.
        in_axes: for each argument the dim to map over, an int, None for none, or a prefix tree of them; or one for all.
        out_axes: where the dim goes in the results: an int, None for a result that is the same for all entries, or a
            prefix tree of them.
        axis_name: refused: a collective is over axes of a mesh, never over the entries.
        axis_size: refused: it is the size of the dims that are mapped over.
        spmd_axis_name: an axis of the mesh, or a tuple of them: `with_sharding` and `shard_map` in `f` lay the entries out over
            it. Their specs, which speak of one entry, and collectives in `f` must not name it.

    Raises:
        TransformError: no argument is mapped over; `out_axes` is None for a result that differs between entries; an axis of
            `spmd_axis_name` is used in `f`, or is not on the mesh.

    Source: `jax.vmap`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.vmap(lambda x, y: x @ y, in_axes=(0, None))(torch.eye(2), torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    checked_function(f, "vmap")
    _refuse_names(axis_name, axis_size)
    _axes(spmd_axis_name)

    @_torch.not_compiled
    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise TransformError(report("vmap", f"it takes positional arguments, but {sorted(kwargs)} came by keyword",
                                        fix="in_axes is matched by position"))  # fmt: skip
        axes = in_axes if isinstance(in_axes, (tuple, list)) else (in_axes,) * len(args)
        shared = tree.leaves([x for x, axis in zip(args, axes) if axis is None])
        leaves, treedef = opened(args, "vmap", "args", is_leaf=tree.none, passing=shared)
        dims = tree.broadcast(tuple(axes), args, "vmap", "in_axes", "args", is_leaf=tree.none)
        nodes = tree.leaves(args, is_leaf=tree.none_or_opaque)
        _check_in_axes(f, args, nodes, dims)
        dims = _dims_of_data(nodes, dims)
        mapped = [
            i
            for i, (x, d) in enumerate(zip(leaves, dims, strict=True))
            if isinstance(x, torch.Tensor) and d is not None
        ]
        if not mapped:
            raise TransformError(report("vmap", "no tensor argument is mapped over", [f"in_axes={in_axes!r}"],
                                        "in_axes=0 for one that has an entry for each call"))  # fmt: skip
        rest: dict[str, Any] = {}

        def flat(*moving: torch.Tensor) -> tuple[torch.Tensor, ...]:
            full = list(leaves)
            for i, x in zip(mapped, moving, strict=True):
                full[i] = x
            with context.laying_entries(_torch.level(), _axes(spmd_axis_name)):
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
            outs = torch.func.vmap(flat, in_dims=tuple(dims[i] for i in mapped))(*(leaves[i] for i in mapped))
        found = iter(outs)
        placed = [next(found).movedim(0, d) if _is_mapped(x, d) else x
                  for x, d in zip(rest["leaves"], rest["dims"], strict=True)]  # fmt: skip
        return tree.unflatten(rest["def"], placed)

    return run


def _refuse_names(axis_name: Any, axis_size: Any) -> None:
    if axis_name is not None:
        raise TransformError(report("vmap", f"axis_name={axis_name!r}: collectives are over axes of a mesh, not over entries",
                                    fix="a reduction over the entries after vmap, x.sum(0) say; or vfn.shard_map, with an "
                                    "axis of a mesh for the entries"))  # fmt: skip
    if axis_size is not None:
        raise TransformError(report("vmap", f"axis_size={axis_size!r}: the arguments say how many entries there are",
                                    fix="in_axes for an argument that has an entry for each call"))  # fmt: skip


def _axes(names: Any) -> tuple[str, ...]:
    axes = () if names is None else tuple(names) if isinstance(names, (tuple, list)) else (names,)
    if not all(isinstance(axis, str) for axis in axes) or len(set(axes)) < len(axes):
        raise TransformError(report("vmap", "spmd_axis_name must be an axis of the mesh, or a tuple of them",
                                    [f"it is {short(names)}"], 'spmd_axis_name="dp"'))  # fmt: skip
    if twice := [axis for axis in axes if axis in context.entries_over()]:
        raise TransformError(report("vmap", f"spmd_axis_name={names!r}: {twice[0]!r} is that of a vmap around this one",
                                    fix="another axis for one of them"))  # fmt: skip
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


def _check_in_axes(f: Callable[..., Any], args: Any, nodes: Sequence[Any], dims: Sequence[Any]) -> None:
    """Each tensor, or array of keys, has the dim that it is mapped over, and all of them as many entries."""
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
    if not failures and len({size for _, size in sizes.values()}) > 1:
        failures = [f"{name} has {size} along dim {d}" for name, (d, size) in sizes.items()]
    if failures:
        raise TransformError(report("vmap", "the arguments do not fit in_axes", failures,
                                    "for each argument the dim that all are mapped over together, None for those that are "
                                    "the same in all calls"))  # fmt: skip


def _check_out_axes(result: Any, nodes: Sequence[Any], leaves: Sequence[Any], dims: Sequence[Any]) -> None:
    """Inside the map: a place is a dim of the result to come, None only where all entries have the same."""
    names = tree.paths_opaque(result, "out")
    failures = [f"{name} is {described(x)} in each call, so out_axes may be from {-x.ndim - 1} to {x.ndim}, not {short(d)}"
                for name, x, d in zip(names, nodes, dims, strict=True)
                if (isinstance(x, torch.Tensor) or tree.opaque(x)) and d is not None
                and (isinstance(d, bool) or not isinstance(d, int) or not -x.ndim - 1 <= d <= x.ndim)]  # fmt: skip
    if failures:
        raise TransformError(report("vmap", "the results do not fit out_axes", failures,
                                    "out_axes=0, the place where vmap puts the entries by default"))  # fmt: skip
    failures = [f"{name} differs between entries, but out_axes is None for it"
                for name, x, d in zip(names, leaves, dims, strict=True)
                if d is None and isinstance(x, torch.Tensor) and _torch.is_mapped(x)]  # fmt: skip
    if failures:
        raise TransformError(report("vmap", "out_axes=None is for results that are the same for all entries", failures,
                                    "out_axes=0 there, or reduce the result over the entries after vmap"))  # fmt: skip


@_torch.not_compiled
def remat(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f`, whose intermediate values are computed again in the backward pass instead of being kept.

    A gather made in `f` is made again too: with parameters sharded and gathered inside, this is FSDP's memory. Keyed
    draws are the same the second time. Under a `torch.func` transform, which keeps every value by construction, and in
    forward mode, which keeps none, it is `f`.

    Raises:
        TransformError: `f` itself takes a gradient by `torch.func`.

    Source: `jax.checkpoint`, `torch.utils.checkpoint`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.grad(vfn.remat(lambda x: x.sin().exp()))(torch.tensor(0.0))
    tensor(1.)
    """

    checked_function(f, "remat")

    @_torch.not_compiled
    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _torch.transforming() or _torch.forward_ad_active() or not torch.is_grad_enabled():
            return f(*args, **kwargs)
        leaves, treedef = opened(
            (args, kwargs), "remat", "(args, kwargs)", numpy=True, modules=True, passing=owner(f, args)
        )

        def flat(*flat_args: Any) -> Any:
            a, k = tree.unflatten(treedef, flat_args)
            outs, flat_def = opened(called(f, a, k, "remat"), "remat", "out", numpy=True)
            return (flat_def, *outs)

        again, setting = tracking.computed_again(flat, leaves, {})

        def contexts() -> tuple[Any, Any]:
            return contextlib.nullcontext(), setting

        contexts.enters_body = True
        try:
            out_def, *outs = torch.utils.checkpoint.checkpoint(
                again, *leaves, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
            )
        except Exception as error:
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
                    frame.clear()  # with which, on torch 2.11, a checkpoint that raised is left: else its hooks stay on
            if not (isinstance(error, RuntimeError) and _torch.is_about_hooks(error)):
                raise
            raise TransformError(report(
                "remat", "the function takes a gradient by torch.func (so does vfn.grad under vmap or jvp), which keeps values "
                "where the backward pass of a remat cannot find them",
                fix="vfn.grad in it, outside of vmap and jvp; or the remat inside of the transform: "
                "torch.func.grad(vfn.remat(f)), vfn.vmap(vfn.remat(f))")) from None  # fmt: skip
        return tree.unflatten(out_def, outs)

    return run
