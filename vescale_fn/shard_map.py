"""`shard_map`: a function of one rank's blocks, mapped over the ranks of a mesh.

Inside, values are local: each rank's block, a plain tensor, and communication is written out (`vfn.psum`, ...). What
must be known about the arguments (are the shards even, does anything move, how is each block typed) is a function of
their specs and shapes, so it is worked out once and remembered; likewise for the results.

Source: `jax.shard_map`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from . import _torch, context, linear, reshard, tracebacks, tracking, tree, types
from .array import Array, bring_in, is_array, mesh_of, spec_of, take_out, whole
from .blocks import Blocks, shared
from .errors import MeshError, ReshardError, SpecError, TypingError, mesh_text, report
from .layout import axes_items, contiguous_stride, layout, spec_for
from .mesh import axes_of, is_simulated, same
from .ops.maps import Collective, promote
from .spec import P, problems, split_axes

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here

# --- what is remembered about arguments and results -------------------------------------------------------------------


class _In:
    """One tensor argument: its spec, its block's type, and whether its block can be read off as it lies."""

    __slots__ = ("direct", "shared_by", "spec", "type")

    def __init__(self, spec: P, direct: bool, shared_by: tuple[str, ...]) -> None:
        self.spec, self.type, self.direct, self.shared_by = spec, types.of_spec(spec), direct, shared_by


class _Out:
    """One tensor result: its spec, and the DTensorSpec of the array."""

    __slots__ = ("dspec", "shared_by", "spec", "type")

    def __init__(self, spec: P, dspec: Any, shared_by: tuple[str, ...]) -> None:
        self.spec, self.type, self.dspec, self.shared_by = spec, types.of_spec(spec), dspec, shared_by


def _unmentioned(spec: P, mesh: Any) -> tuple[str, ...]:
    mentioned = {axis for row in split_axes(spec, len(spec)) for axis in row} | spec.unreduced | spec.reduced
    return tuple(axis for axis in axes_of(mesh) if axis not in mentioned)


def _bare(spec: P) -> P:
    return P(*spec, unreduced=spec.unreduced)


_LIMIT = 1024  # plans that one mapped function remembers


class _Mapped:
    """A function with its specs. Called, it validates, brings the blocks in, runs it, and takes the results out."""

    def __init__(self, f: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any, check: bool) -> None:
        self.f, self.mesh, self.check = f, mesh, check
        self.in_specs = tuple(in_specs) if isinstance(in_specs, list) else in_specs
        self.out_specs = out_specs
        self.name = getattr(f, "__name__", type(f).__name__)
        self.bodies: dict[int, context.Body] = {}
        self.ins: dict[Any, list[_In | None]] = {}
        self.outs: dict[Any, list[_Out | None]] = {}

    def __call__(self, args: tuple[Any, ...]) -> Any:
        leaves, treedef = tree.flatten(args)
        leaves = [torch.as_tensor(x) if x.__class__ is np.ndarray else x for x in leaves]
        mesh = context.seen(self.mesh) if self.mesh is not None else _found_mesh(leaves, self.name)
        body = self.bodies.get(id(mesh))
        if body is None:
            body = self.bodies[id(mesh)] = context.Body(mesh, tuple(axes_of(mesh)), self.check)
        if context.body() is not None:
            raise MeshError(report(
                f"shard_map({self.name})", "it was called inside the body of another shard_map, where all axes are manual "
                "already", fix="call the function itself: its values are local too"))  # fmt: skip
        key = (treedef, id(mesh), *[_key(x) for x in leaves])
        plan = self.ins.get(key)
        if plan is None:
            plan = _remember(self.ins, key, _plan_ins(self, mesh, args, leaves))
        if context.is_strict():
            _refuse_moves(self, args, leaves, plan)
        fast, given = _nothing_differentiates(leaves), tuple(leaves)
        for i, entry in enumerate(plan):
            if entry is not None:
                leaves[i] = _brought_in(leaves[i], mesh, entry, fast, self.check)
        context.note(f"the arguments of shard_map({self.name})", given, leaves)
        intercepted = self.check or is_simulated(mesh) or not fast or context.grad_depth() > 0
        with tracking.running(body, functools.partial(_adopt, mesh, self.name), intercepted):
            result = self.f(*tree.unflatten(treedef, leaves))
            locals_, out_def = tree.flatten(result)
            if self.check:  # still inside: only there is known what the body wrote
                have = [types.typeof(x, body.axes) if isinstance(x, torch.Tensor) else types.INVARIANT for x in locals_]
            else:
                have = [types.INVARIANT] * len(locals_)
        key = (out_def, id(mesh), *[(x.shape, x.dtype, t) if isinstance(x, torch.Tensor) else type(x)
                                    for x, t in zip(locals_, have)])  # fmt: skip
        outs = self.outs.get(key)
        if outs is None:
            outs = _remember(self.outs, key, _plan_outs(self, mesh, result, locals_, have))
        if intercepted:
            fast = _nothing_differentiates(locals_)
        elif not _nothing_differentiates(locals_):
            raise _closure_with_gradient(self, locals_)
        made = tuple(locals_)
        for i, entry in enumerate(outs):
            if entry is not None:
                locals_[i] = _taken_out(locals_[i], have[i], mesh, entry, fast, self.check)  # type: ignore[arg-type]
                locals_[i] = whole(locals_[i]) if context.on_one_device() else locals_[i]
        context.note(f"the results of shard_map({self.name})", made, locals_)
        return tree.unflatten(out_def, locals_)


def _nothing_differentiates(leaves: Sequence[Any]) -> bool:
    if _torch.transforming() or _torch.forward_ad_active():
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in leaves if isinstance(x, torch.Tensor)))


def _closure_with_gradient(mapped: _Mapped, locals_: Sequence[Any]) -> Exception:
    """For a body that nothing watched, because none of its arguments has a gradient, but whose result has."""
    found = [types.text(x) for x in locals_ if isinstance(x, torch.Tensor) and x.requires_grad]
    return TypingError(report(
        f"shard_map({mapped.name})", "with check_vma=False, a gradient of a tensor that the body closes over would "
        "stay each rank's own", [f"the result {text} has a gradient, but no argument has" for text in found],
        "pass the parameters as arguments, with in_specs=P(); or torch.no_grad(); or .detach() in the body"
    ))  # fmt: skip


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> Any:
    if len(cache) >= _LIMIT:
        cache.clear()
    cache[key] = value
    return value


def _key(x: Any) -> Any:
    """What a plan depends on, of one leaf. The DTensorSpecs of equal arrays are one object, so comparing is quick."""
    if x.__class__ is Array:
        return x._spec
    return (x.shape, x.dtype, is_array(x) and (mesh_of(x), spec_of(x))) if isinstance(x, torch.Tensor) else type(x)


def _found_mesh(leaves: Sequence[Any], name: str) -> Any:
    mesh = context.current_mesh()
    if mesh is None:
        mesh = next((mesh_of(x) for x in leaves if isinstance(x, torch.Tensor) and is_array(x)), None)
    if mesh is None:
        raise MeshError(report(
            f"shard_map({name})", "there is no mesh: none was given, none is current, and no argument is an array on one",
            fix="shard_map(f, mesh=mesh, ...) or `with vfn.use_mesh(mesh):`"))  # fmt: skip
    return mesh


# --- in ---------------------------------------------------------------------------------------------------------------


def _plan_ins(mapped: _Mapped, mesh: Any, args: Any, leaves: Sequence[Any]) -> list[_In | None]:
    """What happens to each argument; or an error that names all of them that do not fit."""
    where, axes = f"shard_map({mapped.name})", axes_of(mesh)
    specs = tree.broadcast(mapped.in_specs, args, where, "in_specs", "args")
    failures: list[str] = []
    plan: list[_In | None] = []
    for i, (x, spec) in enumerate(zip(leaves, specs, strict=True)):
        if not isinstance(x, torch.Tensor):
            plan.append(None)
            continue
        found = (
            [f"in_specs must hold P, but here is {spec!r}"] if not isinstance(spec, P) else problems(spec, axes, x.ndim)
        )
        if not found:
            found = _uneven(tuple(x.shape), spec, axes)
        other = mesh_of(x) if is_array(x) else None
        if other is not None and not same(other, mesh):
            found = [
                f"it lies on another mesh, {mesh_text(axes_of(other))}; vfn.shard(x, mesh, {spec!r}) brings it over"
            ]
        failures += [f"{_argument(mapped, args, i)} = {spec!r}: {problem}" for problem in found]
        if not found:
            direct = type(x) is Array and layout(x._spec) == _bare(spec)
            plan.append(_In(spec, direct, () if mapped.check else _unmentioned(spec, mesh)))
    if failures:
        raise SpecError(report(
            where, f"the arguments do not fit in_specs on the {mesh_text(axes)}", failures,
            "a spec of axes that divide the dims, None for a dim that every rank needs whole, or pad the argument",
        ))  # fmt: skip
    return plan


def _argument(mapped: _Mapped, args: Any, i: int) -> str:
    """The i-th leaf in the user's words: path, shape, parameter, and where its spec stands."""
    path = tree.paths(args, "args")[i]
    x = tree.leaves(args)[i]
    position = int(path[len("args[") :].split("]", 1)[0])
    tail = path[len(f"args[{position}]") :]
    try:
        bound = inspect.signature(mapped.f).bind(*args).arguments
    except (TypeError, ValueError):
        bound = {}
    name = next((name for name, value in bound.items() if value is args[position]), None)
    said = f", where args[{position}] is bound to {mapped.name}'s parameter {name!r}," if name else ""
    where = (
        f"in_specs[{position}]{tail}"
        if isinstance(mapped.in_specs, tuple) and not isinstance(mapped.in_specs, P)
        else "in_specs"
    )
    return f"{path} of shape {types.text(x)}{said} corresponds to {where}"


def _uneven(shape: tuple[int, ...], spec: P, axes: dict[str, int]) -> list[str]:
    found = []
    for dim, (size, names) in enumerate(zip(shape, split_axes(spec, len(shape)))):
        n = math.prod(axes[name] for name in names)
        if size % n:
            product = "*".join(str(axes[name]) for name in names)
            found.append(f"dim {dim}: {size} is not divisible by {product}{f' = {n}' if len(names) > 1 else ''} "
                         f"(ax{'e' if len(names) > 1 else 'i'}s {', '.join(map(repr, names))})")  # fmt: skip
    return found


def _refuse_moves(mapped: _Mapped, args: Any, leaves: Sequence[Any], plan: Sequence[_In | None]) -> None:
    failures = []
    for i, (x, entry) in enumerate(zip(leaves, plan)):
        if entry is None or entry.direct or not is_array(x):
            continue
        source = _bare(spec_of(x))
        steps = reshard.plan(tuple(x.shape), axes_items(mesh_of(x)), source, _bare(entry.spec))
        if any(step.kind not in reshard.LOCAL_KINDS for step in steps):
            wanted = f"{entry.spec!r}, but it lies as {source!r}: vfn.with_sharding(x, {entry.spec!r})"
            failures.append(f"{_argument(mapped, args, i)} = {wanted}")
    if failures:
        raise ReshardError(report(f"shard_map({mapped.name})", "strict: arguments lie otherwise than in_specs says",
                                  failures, "write the vfn.with_sharding, so that the program asks for the move"))  # fmt: skip


def _brought_in(x: Any, mesh: Any, entry: _In, fast: bool, check: bool) -> Any:
    if fast:
        if entry.direct:
            local = _torch.local(x)
        else:
            local = bring_in(x, mesh, entry.spec, "shard_map argument")
        local = Blocks(local.blocks) if local.__class__ is Blocks else local.detach()  # a name of its own, to be typed
        local.vfn_type = entry.type
        if check:
            local.vfn_borrowed = True
        return local
    local = bring_in(x, mesh, entry.spec, "shard_map argument")
    if entry.shared_by:
        (local,) = linear.apply(Collective("copy", mesh, entry.shared_by, "shard_map argument"), local)
    types.mark(local, entry.type)
    if check:
        types.borrow(local)
    return local


def _adopt(mesh: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    """An array that a body closes over. One that every rank holds whole comes in as by ``in_specs=P()``."""
    spec = spec_of(x)
    if any(spec) or spec.unreduced or not same(mesh_of(x), mesh):
        raise TypingError(report(
            f"shard_map({name})", "the body uses an array from outside, of which each rank holds a part",
            [f"it is {types.text(x)} lying as {spec!r} on the {mesh_text(axes_of(mesh_of(x)))}"],
            f"pass it as an argument, with in_specs={spec!r} for its block or P() for the whole"))  # fmt: skip
    return bring_in(x, mesh, P(), "closure")


# --- out --------------------------------------------------------------------------------------------------------------


def _plan_outs(
    mapped: _Mapped, mesh: Any, result: Any, locals_: Sequence[Any], have: Sequence[Any]
) -> list[_Out | None]:
    """What each result becomes; or an error that names all of them that do not fit."""
    where, axes = f"shard_map({mapped.name})", axes_of(mesh)
    specs = tree.broadcast(mapped.out_specs, result, where, "out_specs", "the result")
    paths = tree.paths(result, "out")
    failures, ways = [], []
    plan: list[_Out | None] = []
    for path, x, type_, spec in zip(paths, locals_, have, specs, strict=True):
        if not isinstance(spec, P):
            failures.append(f"{path}: out_specs must hold P, but here is {spec!r}")
            continue
        if not isinstance(x, torch.Tensor):
            plan.append(None)
            failures += [f"{path} is {x!r}, which is not a tensor, for out_specs {spec!r}"] * (spec != P())
            continue
        said = f"{path} is {types.text(x, type_)}, for out_specs {spec!r}"
        found = [f"it is {types.text(x)}, a whole array"] if is_array(x) else problems(spec, axes, x.ndim)
        if found and len(spec) > x.ndim:
            ways.append(f"x[None] adds a dim to concatenate along: out_specs={spec!r} needs {len(spec)} dims")
        if not found and mapped.check:
            for axis in axes:
                found += _type_problem(axis, type_.letter(axis), types.of_spec(spec).letter(axis), spec, ways)
        failures += [f"{said}: {problem}" for problem in found]
        if not found:
            rows = split_axes(spec, x.ndim)
            shape = torch.Size(size * math.prod(axes[a] for a in names) for size, names in zip(x.shape, rows))
            dspec = spec_for(mesh, _bare(spec), shape, contiguous_stride(shape), x.dtype)
            plan.append(_Out(spec, dspec, () if mapped.check else _unmentioned(spec, mesh)))
    if failures:
        raise SpecError(report(where, f"the results do not fit out_specs on the {mesh_text(axes)}", failures,
                               "; or ".join(dict.fromkeys(ways))))  # fmt: skip
    return plan


def _type_problem(axis: str, have: str, want: str, spec: P, ways: list[str]) -> list[str]:
    if have == want or (want == "V" and have in "IR"):
        return []
    if want == "I" and have == "V":
        ways += [f"vfn.psum(x, {axis!r}) or vfn.pmean(x, {axis!r}), where the ranks' values are to be combined",
                 f"vfn.all_gather(x, {axis!r}, to='invarying'), where all ranks are to have all of them",
                 f"out_specs with {axis!r} for the dim along which they are to be concatenated"]  # fmt: skip
        return [
            f"it varies over {axis!r}, which out_specs does not mention, so it would have to be the same on all ranks"
        ]
    word = {"V": "varying", "U": "unreduced", "R": "reduced", "I": "the same on all ranks"}
    if have == "U":
        ways.append(f"vfn.psum(x, {axis!r}), or out_specs with unreduced={{{axis!r}}}")
    elif have == "R":
        ways.append(f"out_specs with reduced={{{axis!r}}}")
    else:
        ways.append(f"vfn.pcast(x, {axis!r}, to={word[want]!r})")
    return [f"it is {word[have]} over {axis!r}, but out_specs says {word[want]}"]


def _taken_out(local: Any, have: types.Type, mesh: Any, entry: _Out, fast: bool, check: bool) -> Any:
    if fast:
        if local.__class__ is not Blocks and is_simulated(mesh):
            local = shared(local.detach(), mesh.size())
        out = _torch.new_dtensor(
            Array, local if local.is_contiguous() else local.contiguous(), entry.dspec, requires_grad=False
        )
        if entry.spec.unreduced:
            out._sum = []
        if entry.spec.reduced:
            out._reduced = entry.spec.reduced
        return out
    if check:
        local = promote(local, have, entry.type, mesh)
    elif entry.shared_by:
        (local,) = linear.apply(Collective("share", mesh, entry.shared_by, "shard_map result"), local)
    return take_out(local, mesh, entry.spec)


# --- the public function ----------------------------------------------------------------------------------------------


def shard_map(f: Callable[..., Any] | None = None, *, mesh: Any = None, in_specs: Any, out_specs: Any,
              check_vma: bool = True) -> Any:  # fmt: skip
    """Map a function of one rank's blocks over the ranks of a mesh. Also a decorator.

    Inside `f` every tensor is local, any torch op or kernel runs on it as it is, and ranks communicate by `psum`,
    `all_gather` and their family. Gradients are right with no call by the user: where a value that is the same on all
    ranks meets one that differs, its gradient is summed.

    Args:
        f: takes and returns trees of tensors (numpy arrays become tensors; ints, strings, None and the like pass
            through). Called with positional arguments. It must not write into its arguments. A plain tensor that it
            closes over counts as the same on all ranks, and so does an array of which every rank holds the whole;
            another array must be an argument.
        mesh: a DeviceMesh; by default the current one, or that of the arguments.
        in_specs: a `P`, or a prefix of the tuple of arguments: how each argument is cut. Its dims must divide evenly.
            An argument that lies otherwise is moved there first (under `strict` that raises).
        out_specs: a `P`, or a prefix of the result: how the ranks' results are put together. An axis that it does not
            mention is a promise that the value is the same along it, which is checked.
        check_vma: track how values vary over the axes, and check. Without, nothing intercepts the body: a promise is
            believed, and inside, `psum` is its own transpose; gradients taken outside are the same.

    Returns:
        A function of whole values, plain tensors or arrays, that gives arrays.

    Raises:
        SpecError: specs that do not fit the arguments or the results; on all ranks, before anything moves.
        TypingError: a local value was used against its type.
        MeshError: no mesh, or arguments on another one.

    Source: `jax.shard_map`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     @vfn.shard_map(mesh=vfn.make_mesh((4,), ("i",)), in_specs=(P(None, "i"), P("i")), out_specs=P())
    ...     def matmul(x, w):
    ...         return vfn.psum(x @ w, "i")
    ...     x, w = torch.arange(8.0).view(1, 8), torch.arange(8.0)
    ...     print(vfn.unshard(matmul(x, w)), x @ w)
    tensor([140.]) tensor([140.])
    """
    if f is None:
        return functools.partial(shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    mapped = _Mapped(f, mesh, in_specs, out_specs, check_vma)

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise TypingError(report(
                f"shard_map({mapped.name})", f"it takes positional arguments, but {sorted(kwargs)} came by keyword",
                fix="in_specs is matched by position"))  # fmt: skip
        return mapped(args)

    return run
