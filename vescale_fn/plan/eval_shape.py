"""`init`: initial values of which each rank makes its own shards alone; `eval_shape`: shapes without values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from .._core import torch_internals
from .._core.arrays.placement import shard, with_sharding
from .._core.arrays.shapes import without_values
from .._core.base import context, source_lines, tracebacks, tree
from .._core.base.containers import checked, opened
from .._core.base.errors import SpecError, TransformError
from .._core.base.messages import described, mesh_text, report
from .._core.base.user_calls import called, checked_function, owner
from .._core.distributed.abstract_mesh import AbstractMesh
from .._core.local_types import tensor_types
from .._core.shard_map import body, interrupts
from .._core.sharding.index_map import axes_of
from .._core.sharding.layout import WHOLE, type_text
from .._core.sharding.named_sharding import without_mesh
from .._core.sharding.spec import P, problems, too_long
from .._core.sharding.spec_trees import are_rules, spec_from_rules
from .jit import jit
from .tracing.frame import Unrollable
from .tracing.leaves import with_tensors
from .tracing.recorder import Recorder, Unrecordable

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here


@torch_internals.not_compiled
def eval_shape(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `f` returns, without its values: shapes and dtypes, for no memory and next to no time. In a `shard_map` body
    they are those of one rank's blocks.

    Args:
        f: a function of trees to a tree; it is run once, on tensors without values. No mesh is needed.
        args, kwargs: its arguments: tensors (of which only shape and dtype count, so that a `ShapeDtype` and tensors on the
            meta device will do), arrays, keys, and what else it takes.

    Returns:
        The tree that `f` returns, with a `ShapeDtype` for each tensor, and for each array one of its shape and layout.

    Raises:
        TransformError: `f` reads a value (``if x > 0``, ``.item()``).

    Source: `jax.eval_shape`.

    >>> import vescale_fn as vfn
    >>> vfn.eval_shape(lambda key: {"w": vfn.random.normal(key, (1 << 20, 1 << 20))}, vfn.random.key(0))["w"].shape
    torch.Size([1048576, 1048576])
    """
    checked_function(f, "eval_shape")
    try:
        return _shapes(f, args, kwargs, "eval_shape")
    except Unrecordable as why:
        raise TransformError(
            report("eval_shape", _reason(why), fix="the function itself, as its shapes may depend on values")
        ) from None


def _shapes(f: Callable[..., Any], args: Any, kwargs: Any, where: str) -> Any:
    try:
        return _found(f, args, kwargs, where, True)
    except Unrollable:
        return _found(f, args, kwargs, where, False)


def _found(f: Callable[..., Any], args: Any, kwargs: Any, where: str, rolls: bool) -> Any:
    recorder = Recorder(rolls=rolls)
    leaves, treedef = opened(
        (args, kwargs), where, "(args, kwargs)", numpy=True, modules=True, passing=functools.partial(owner, f, args)
    )
    with interrupts.undone():
        with torch_internals.no_torch_function():  # of a body, which is not to see what is made here
            given = [_without_value(x, recorder) for x in leaves]
        args, kwargs = tree.unflatten(treedef, given)
        # a body anew, which is to keep no value of this run
        with body.capture()(), recorder, context.unlogged():
            out = checked(called(f, args, kwargs, where), where, "out")
        with torch_internals.no_torch_function():
            return tree.map_(without_values, out)


def _without_value(x: Any, recorder: Recorder) -> Any:
    """What stands for an argument; in a body it has the argument's type."""
    if not isinstance(x, torch.Tensor):
        return x
    out = with_tensors(body.local(x), recorder.abstract)
    if context.body() is not None and (type_ := tensor_types.read(x)) is not None:
        tensor_types.mark(out, type_)
    return out


def _reason(why: Unrecordable) -> str:
    return why.reason if why.line == "?" else f"{why.reason}, at {source_lines.quoted(why.line)}"


R = TypeVar("R")


@torch_internals.not_compiled
def init(
    f: Callable[..., R], *args: Any, spec: Any = None, mesh: DeviceMesh | None = None, abstract: bool = False
) -> R:
    """What `f` returns, laid out on a mesh, of which each rank makes its own shards alone.

    `f` is recorded as by `jit`: draws from a key, and what is computed of them element by element, are made in pieces, bit
    for bit those of the whole. A function that cannot be recorded, because it reads values in Python, runs as written and
    says so: then each rank makes whole values first.

    Args:
        f: an initialiser: a pure function, of a key as a rule, to a tree of tensors. Or what `deferred` makes of a module.
        args: its arguments.
        spec: how the results are to lie: a `P`, a prefix tree of them, a list of rules for `spec_from_rules`, or a function
            from the tree of shapes (as `eval_shape` gives it) to one of these. By default whole on every rank.
        mesh: by default the current mesh. Without one, the program is running on one device, and this is ``f(*args)``.
        abstract: whether nothing is made: the results are shapes with these layouts (`ShapeDtype`), as they always are on
            a mesh of `abstract_mesh`.

    Raises:
        SpecError: a spec that does not fit; before anything is made, all at once.

    Source: `jax.jit` with ``out_shardings`` around an initialiser.

    >>> import vescale_fn as vfn
    >>> from vescale_fn import P
    >>> def initial(key):
    ...     return {"w": vfn.random.normal(key, (4, 6)) / 2}
    >>> whole = initial(vfn.random.key(0))
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    ...     params = vfn.init(initial, vfn.random.key(0), spec=[("w$", P("dp", "tp"))], mesh=mesh)
    ...     print(params["w"].to_local().blocks[0].shape, (vfn.unshard(params)["w"] == whole["w"]).all())
    torch.Size([2, 3]) tensor(True)
    """
    checked_function(f, "init")
    spec, mesh = without_mesh(spec, None if mesh is None else context.checked_mesh(mesh, "init"), "init")
    mesh = context.current_mesh() if mesh is None else mesh
    out = None
    try:
        shapes = _shapes(f, args, {}, "init")
    except Unrecordable as why:
        source_lines.warn(
            report(
                "init",
                "the function runs as written, so that each rank makes whole values first",
                [_reason(why)],
                "torch.where for `if`, tensors for numbers",
            )
        )
        out = checked(f(*args), "init", "out")
        shapes = tree.map_(without_values, out)
    specs = _fitting(spec, shapes, {} if mesh is None else axes_of(mesh), mesh is not None)
    if abstract or isinstance(mesh, AbstractMesh):
        return shapes if mesh is None else shard(shapes, mesh, specs)  # type: ignore[return-value]
    if mesh is None:
        return f(*args) if out is None else out
    with context.use_mesh(mesh):
        return jit(f, out_specs=specs)(*args) if out is None else with_sharding(out, specs)


def _fitting(spec: Any, shapes: Any, axes: Mapping[str, int], placed: bool) -> Any:
    """One spec for each leaf, all of which fit."""
    if callable(spec) and not isinstance(spec, P):
        spec = spec(shapes)
    if are_rules(spec):
        spec = spec_from_rules(shapes, spec)
    specs = tree.broadcast(P() if spec is None else spec, shapes, "init", "spec", "the result")
    leaves, treedef = tree.flatten(shapes)
    failures = []
    for x, one, path in zip(leaves, specs, tree.paths(shapes, "out"), strict=True):
        if not isinstance(one, P):
            failures.append(f"the spec of {path} is {described(one)}, not a vfn.P")
        elif isinstance(x, torch.Tensor):
            wrong = problems(one, axes, x.ndim, at=True) if placed else too_long(one, x.ndim)
            what = f"{path} is {type_text(x.shape, x.dtype, WHOLE)}, its spec {one!r}"
            failures += [f"{what}: {problem}" for problem in wrong]
    if failures:
        of = f" on the {mesh_text(axes)}" if placed else ""
        raise SpecError(
            report(
                "init",
                f"the specs do not fit the results{of}",
                failures,
                "the axes of the mesh, each at most once, at most one entry a dim",
            )
        )
    return tree.unflatten(treedef, specs)
