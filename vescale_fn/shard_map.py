"""`shard_map`: a function of one rank's blocks, mapped over the ranks of a mesh.

Inside, values are local: each rank's block, a plain tensor, and communication is written out (`vfn.psum`, ...). What
must be known about the arguments (are the shards even, does anything move, how is each block typed) is a function of
their specs and shapes, so it is worked out once and remembered; likewise for the results.

Source: `jax.shard_map`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from . import _torch, context, linear, replicas, reshard, tracebacks, tracking, tree, types
from .array import Array, bring_in, entered, is_array, mesh_of, only_along, packed, spec_of, take_out, whole
from .blocks import Blocks, shared
from .calls import called, checked_function, parameter
from .errors import (
    MeshError,
    ReshardError,
    SpecError,
    TypingError,
    VfnError,
    count_text,
    described,
    meant,
    mesh_text,
    report,
)
from .layout import axes_items, contiguous_stride, layout, spec_for
from .lines import user_line
from .mesh import axes_of, is_part, is_simulated, part, played_ranks, same
from .ops.maps import Collective, enter, promote
from .spec import P, as_spec, axes_named, from_split_axes, problems, split_axes

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here

# --- what is remembered about arguments and results -------------------------------------------------------------------


class _In:
    """One tensor argument: its spec, how the whole array must lie, its block's type, and whether the block can be read off
    as it lies."""

    __slots__ = ("direct", "lies", "shared_by", "spec", "type")

    def __init__(self, spec: P, lies: P, direct: bool, shared_by: tuple[str, ...]) -> None:
        self.spec, self.lies, self.direct, self.shared_by = spec, lies, direct, shared_by
        self.type = types.of_spec(spec)


class _Out:
    """One tensor result: its spec, how the array lies, also as a DTensorSpec, and the type that its block must have."""

    __slots__ = ("dspec", "lies", "shared_by", "spec", "type")

    def __init__(self, spec: P, lies: P, dspec: Any, shared_by: tuple[str, ...]) -> None:
        self.spec, self.lies, self.dspec, self.shared_by = spec, lies, dspec, shared_by
        self.type = types.of_spec(spec)


class _Site:
    """Where a function is mapped: over which axes of which mesh, and what its body is.

    Called in the body of another map, the mesh is the part of it that the other left alone.
    """

    def __init__(self, name: str, mesh: Any, manual: tuple[str, ...], outer: context.Body | None, check: bool) -> None:
        sizes = axes_of(mesh)
        rest = tuple(axis for axis in sizes if axis not in manual)
        around = outer.sizes if outer is not None else {}
        self.mesh, self.manual, self.outer = mesh, manual, outer
        self.sizes = {axis: sizes[axis] for axis in sizes if axis in manual}
        self.simulated = is_simulated(mesh)
        self.auto = part(mesh, rest) if rest else None
        now = {**around, **self.sizes}
        self.body = context.Body(outer.mesh if outer else mesh, tuple(now), now, check, self.auto)
        self.adopt = functools.partial(_adopt, self, name)

    def unmentioned(self, spec: P) -> tuple[str, ...]:
        """The manual axes that a spec does not name."""
        return tuple(axis for axis in self.sizes if axis not in axes_named(spec))

    def lies(self, spec: P, x: Any) -> P:
        """How the whole array lies of which `spec` speaks of the manual axes, and the others are as `x` has them."""
        if self.auto is None or not is_array(x):
            return spec
        own = only_along(_bare(spec_of(x)), axes_of(self.auto))
        rows = [(*a, *b) for a, b in zip(split_axes(spec, x.ndim), split_axes(own, x.ndim))]
        return from_split_axes(rows, spec.unreduced | own.unreduced, spec.reduced)


def _bare(spec: P) -> P:
    return P(*spec, unreduced=spec.unreduced)


_LIMIT = 1024  # plans that one mapped function remembers


class _Mapped:
    """A function with its specs. Called, it validates, brings the blocks in, runs it, and takes the results out."""

    def __init__(self, f: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any, axis_names: Any,
                 check: bool) -> None:  # fmt: skip
        self.f, self.mesh, self.check = f, mesh, check
        self.in_specs = tuple(in_specs) if isinstance(in_specs, list) else in_specs
        self.out_specs, self.axis_names = out_specs, _names(axis_names)
        self.name, self.line = getattr(f, "__name__", type(f).__name__), user_line()
        self.where = f"shard_map({self.name})"
        self.notes = f"the arguments of {self.where}", f"the results of {self.where}"
        self.sites: dict[Any, _Site] = {}
        self.ins: dict[Any, list[_In | None]] = {}
        self.outs: dict[Any, list[_Out | None]] = {}

    def __call__(self, args: tuple[Any, ...]) -> Any:
        leaves, treedef = tree.flatten(args)
        leaves = [torch.as_tensor(x) if x.__class__ is np.ndarray else x for x in leaves]
        outer = context.body()
        mesh = context.seen(self.mesh) if self.mesh is not None else _found_mesh(leaves, outer, self.name)
        site = self.sites.get((id(mesh), outer))
        if site is None:
            site = self.sites[id(mesh), outer] = _site(self, mesh, outer)
        if context.watch() is not None:
            replicas.same_call(self, site.mesh, args, leaves)
        key = (treedef, id(site), *[_key(x) for x in leaves])
        plan = self.ins.get(key)
        if plan is None:
            plan = _remember(self.ins, key, _plan_ins(self, site, args, leaves))
        if context.is_strict():
            _refuse_moves(self, args, leaves, plan)
        fast, given = _nothing_differentiates(leaves), tuple(leaves)
        with _unwatched(outer):
            for i, entry in enumerate(plan):
                if entry is not None:
                    leaves[i] = _brought_in(leaves[i], site, entry, fast)
        context.note(self.notes[0], given, leaves)
        intercepted = self.check or site.simulated or not fast or context.grad_depth() > 0
        body = site.body
        with tracking.running(body, site.adopt, intercepted) as run:
            try:
                result = called(self.f, tree.unflatten(treedef, leaves), {}, self.where)
            except RuntimeError as error:
                _note_blocks(error, self, args, leaves)
                raise
            locals_, out_def = tree.flatten(result)
            locals_ = [run.taken_in(x) if isinstance(x, torch.Tensor) else x for x in locals_]
            if self.check:  # still inside: only there is known what the body wrote
                have = [types.typeof(x, body.axes) if isinstance(x, torch.Tensor) else types.INVARIANT for x in locals_]
            else:
                have = [types.INVARIANT] * len(locals_)
        if context.watch() is not None:
            replicas.same_shapes(self, site.mesh, result, locals_)
        key = (out_def, id(site), *[(*_key(x), t) if isinstance(x, torch.Tensor) else type(x)
                                    for x, t in zip(locals_, have)])  # fmt: skip
        outs = self.outs.get(key)
        if outs is None:
            outs = _remember(self.outs, key, _plan_outs(self, site, result, locals_, have))
        if intercepted:
            fast = _nothing_differentiates(locals_)
        elif not _nothing_differentiates(locals_):
            raise _closure_with_gradient(self, locals_)
        made = tuple(locals_)
        with _unwatched(outer):
            for i, entry in enumerate(outs):
                if entry is not None:
                    locals_[i] = _taken_out(locals_[i], have[i], site, entry, fast)
                    if context.on_one_device() and outer is None:
                        locals_[i] = whole(locals_[i])
        context.note(self.notes[1], made, locals_, line=self.line)
        return tree.unflatten(out_def, locals_)


def _note_blocks(error: RuntimeError, mapped: _Mapped, args: Any, leaves: Sequence[Any]) -> None:
    """Tell a reader of torch's own message, about shapes mostly, what the arguments are inside (from Python 3.11 on)."""
    if isinstance(error, VfnError) or not hasattr(error, "add_note"):
        return
    shown = [f"{path} is {types.text(x)}{types.read(x) or ''}" for path, x in zip(tree.paths(args, "args"), leaves)
             if isinstance(x, torch.Tensor)]  # fmt: skip
    more = [f"and {len(shown) - 6} more"] * (len(shown) > 6)
    error.add_note(
        f"In the body of shard_map({mapped.name}) values are one rank's blocks: {', '.join(shown[:6] + more)}"
    )


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
        return (x._spec,)
    if x.__class__ is torch.Tensor and not _torch.transforming():
        return x.shape, x.dtype
    return (x.shape, x.dtype, is_array(x) and (mesh_of(x), spec_of(x))) if isinstance(x, torch.Tensor) else type(x)


def _unwatched(outer: context.Body | None) -> contextlib.AbstractContextManager[Any]:
    """The mode of a body around this one watches what that body does, not what we do."""
    return _NOTHING if outer is None else _torch.no_torch_function()


_NOTHING = contextlib.nullcontext()


def _found_mesh(leaves: Sequence[Any], outer: context.Body | None, name: str) -> Any:
    mesh = outer.mesh if outer is not None else context.current_mesh()
    if mesh is None:
        mesh = next((mesh_of(x) for x in leaves if isinstance(x, torch.Tensor) and is_array(x)), None)
    if mesh is None:
        raise MeshError(report(
            f"shard_map({name})", "there is no mesh: none was given, none is current, and no argument is an array on one",
            fix="shard_map(f, mesh=mesh, ...) or `with vfn.use_mesh(mesh):`"))  # fmt: skip
    return mesh


def _names(axis_names: Any) -> tuple[Any, ...]:
    if isinstance(axis_names, str):
        return (axis_names,)
    if axis_names is not None and not isinstance(axis_names, Iterable):
        raise MeshError(report("shard_map", f"axis_names must be a set of axis names, but it is {described(axis_names)}",
                               fix='for instance axis_names={"dp"}; without it all axes are mapped'))  # fmt: skip
    return tuple(sorted(axis_names, key=str)) if axis_names is not None else ()


def _site(mapped: _Mapped, mesh: Any, outer: context.Body | None) -> _Site:
    """Where `mapped` runs when it is called on `mesh`, in the body `outer` or in none; or an error."""
    where, asked = f"shard_map({mapped.name})", mapped.axis_names
    axes = axes_of(mesh)
    unknown = [f"{name!r} is not one of the axes {tuple(axes)}{meant(name, axes)}"
               for name in asked if name not in axes]  # fmt: skip
    if unknown:
        raise MeshError(report(where, f"axis_names={set(asked)!r} does not fit the {mesh_text(axes)}", unknown,
                               "the axes along which the body sees one rank's blocks; none: all of them"))  # fmt: skip
    if outer is None:
        return _Site(mapped.name, mesh, asked or tuple(axes), None, mapped.check)
    taken = [name for name in asked if name in outer.axes]
    if outer.auto is None or taken:
        raise MeshError(report(
            where, "it was called inside the body of another shard_map, where "
            + (f"{', '.join(map(repr, taken))} is manual already" if outer.auto else "all axes are manual already"),
            fix=f"axis_names among the others, {tuple(axes_of(outer.auto))}" if outer.auto is not None
            else "call the function itself: its values are local too"))  # fmt: skip
    if not (same(mesh, outer.mesh) or same(mesh, outer.auto)):
        raise MeshError(report(where, "a map inside the body of another is on the same mesh",
                               [f"it was given the {mesh_text(axes)}, the other is on the "
                                f"{mesh_text(axes_of(outer.mesh))}"], "no mesh= for the inner one"))  # fmt: skip
    if not (outer.check and mapped.check):
        raise TypingError(report(
            where, "of a map inside the body of another, gradients are right only where both are checked",
            [f"check_vma={outer.check} for the outer one, check_vma={mapped.check} for this one"],
            "check_vma=True, which is the default, for both; or one shard_map over all axes"))  # fmt: skip
    return _Site(mapped.name, outer.auto, asked or tuple(axes_of(outer.auto)), outer, mapped.check)


# --- in ---------------------------------------------------------------------------------------------------------------


def _plan_ins(mapped: _Mapped, site: _Site, args: Any, leaves: Sequence[Any]) -> list[_In | None]:
    """What happens to each argument; or an error that names all of them that do not fit."""
    where = f"shard_map({mapped.name})"
    specs = tree.broadcast(mapped.in_specs, args, where, "in_specs", "args")
    failures: list[str] = []
    ways: list[str] = []
    plan: list[_In | None] = []
    for i, (x, spec) in enumerate(zip(leaves, specs, strict=True)):
        if not isinstance(x, torch.Tensor):
            plan.append(None)
            continue
        found = _wrong_argument(x, spec, site)
        if found:
            failures.append(f"{_argument(mapped, args, i)} = {spec!r}: {'; '.join(problem for problem, _ in found)}")
            ways += [way for _, way in found]
        else:
            lies = site.lies(spec, x)
            direct = type(x) is Array and layout(x._spec) == _bare(lies)
            plan.append(_In(spec, lies, direct, () if mapped.check else site.unmentioned(spec)))
    if failures:
        raise SpecError(report(where, f"the arguments do not fit in_specs on the {mesh_text(axes_of(site.mesh))}", failures,
                               "; ".join(dict.fromkeys(ways))))  # fmt: skip
    return plan


def _wrong_argument(x: torch.Tensor, spec: Any, site: _Site) -> list[tuple[str, str]]:
    """What is wrong with an argument and its spec, and what to write instead."""
    if not isinstance(spec, P):
        return [(f"it is {described(spec)}, not a vfn.P", as_spec(spec))]
    other = mesh_of(x) if is_array(x) else None
    if other is not None and not same(other, site.mesh):
        there = f"it lies on another mesh, {mesh_text(axes_of(other))}"
        return [(there, f"vfn.shard(x, mesh, {spec!r}), which brings it over")]
    found = _misfits(spec, site, x.ndim)
    return found or [(problem, _EVEN) for problem in _uneven(tuple(x.shape), spec, site.sizes)]


_EVEN = "a spec of axes that divide the dims, None for a dim that every rank needs whole, or pad the argument"


def _misfits(spec: P, site: _Site, ndim: int) -> list[tuple[str, str]]:
    """What is wrong with a spec, which may speak of the manual axes only, and what to write instead."""
    axes = axes_of(site.mesh)
    wrong = problems(spec, axes, ndim)
    if wrong:
        at_most = f"at most {count_text(ndim, 'entry')}" if ndim else "no entry"
        return [(problem, f"axes of the {mesh_text(axes)}, each at most once, and {at_most} for {count_text(ndim, 'dim')}")
                for problem in wrong]  # fmt: skip
    return [(f"axis {axis!r} is not in axis_names={set(site.manual)!r}: along it a value lies in the body as it does "
             "outside", f"a spec without {axis!r}, or axis_names with it")
            for axis in axes if axis in axes_named(spec) and axis not in site.manual]  # fmt: skip


def _argument(mapped: _Mapped, args: Any, i: int) -> str:
    """The i-th leaf in the user's words: path, shape, parameter, and where its spec stands."""
    path = tree.paths(args, "args")[i]
    x = tree.leaves(args)[i]
    position = int(path[len("args[") :].split("]", 1)[0])
    tail = path[len(f"args[{position}]") :]
    name = parameter(mapped.f, args, position)
    said = f", where args[{position}] is bound to {mapped.name}'s parameter {name!r}," if name else ""
    where = (
        f"in_specs[{position}]{tail}"
        if isinstance(mapped.in_specs, tuple) and not isinstance(mapped.in_specs, P)
        else "in_specs"
    )
    return f"{path} of shape {types.text(x)}{said} corresponds to {where}"


def _uneven(shape: tuple[int, ...], spec: P, axes: Mapping[str, int]) -> list[str]:
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
        steps = reshard.plan(tuple(x.shape), axes_items(mesh_of(x)), source, _bare(entry.lies))
        if any(step.kind not in reshard.LOCAL_KINDS for step in steps):
            wanted = f"{entry.spec!r}, but it lies as {source!r}: vfn.with_sharding(x, {entry.lies!r})"
            failures.append(f"{_argument(mapped, args, i)} = {wanted}")
    if failures:
        raise ReshardError(report(f"shard_map({mapped.name})", "strict: arguments lie otherwise than in_specs says",
                                  failures, "write the vfn.with_sharding, so that the program asks for the move"))  # fmt: skip


def _brought_in(x: Any, site: _Site, entry: _In, fast: bool) -> Any:
    check, outer = site.body.check, site.outer
    type_ = entry.type if outer is None else types.both(entry.type, types.read(x))
    if fast and entry.direct and site.auto is None:
        local = _torch.local(x)
        local = Blocks(local.blocks) if local.__class__ is Blocks else local.detach()  # a name of its own, to be typed
    elif fast and entry.direct:
        local = entered(x, entry.lies, site.auto)
    else:
        local = bring_in(x, site.mesh, entry.lies, "shard_map argument", site.auto)
    if fast:
        if not entry.direct:
            local = Blocks(local.blocks) if local.__class__ is Blocks else local.detach()
        local.vfn_type = type_
        if check:
            local.vfn_borrowed = True
        return local
    if entry.shared_by:
        (local,) = linear.apply(Collective("copy", site.body.mesh, entry.shared_by, "shard_map argument"), local)
    types.mark(local, type_)
    if check:
        types.borrow(local)
    return local


def _adopt(site: _Site, name: str, x: torch.Tensor) -> torch.Tensor:
    """A value that a body closes over, as by ``in_specs=P()``: a plain tensor, or an array of which along the manual axes
    every rank holds the whole. A value of a body around this one lies as its op left it, so it may have to be gathered."""
    mesh = site.mesh
    if not is_array(x):
        return bring_in(enter(x, site.body.mesh) if is_part(mesh) else x, mesh, P(), "closure", site.auto)
    spec, here = spec_of(x), same(mesh_of(x), mesh)
    mine = only_along(spec, site.sizes)
    parted = any(mine) or bool(mine.unreduced)
    if not here or (parted and (site.outer is None or context.is_strict())):
        raise TypingError(report(
            f"shard_map({name})", "the body uses an array from outside, of which each rank holds a part",
            [f"it is {types.text(_torch.peel(x))} on the {mesh_text(axes_of(mesh_of(x)))}"],
            f"pass it as an argument, with in_specs={mine!r} for its block or P() for the whole"))  # fmt: skip
    return bring_in(x, mesh, site.lies(P(), x), "closure", site.auto)


# --- out --------------------------------------------------------------------------------------------------------------


def _plan_outs(
    mapped: _Mapped, site: _Site, result: Any, locals_: Sequence[Any], have: Sequence[Any]
) -> list[_Out | None]:
    """What each result becomes; or an error that names all of them that do not fit."""
    where, mesh = f"shard_map({mapped.name})", site.mesh
    specs = tree.broadcast(mapped.out_specs, result, where, "out_specs", "the result")
    paths = tree.paths(result, "out")
    failures, ways = [], []
    plan: list[_Out | None] = []
    for path, x, type_, spec in zip(paths, locals_, have, specs, strict=True):
        if not isinstance(spec, P):
            failures.append(f"{path}: its spec is {described(spec)}, not a vfn.P")
            ways.append(as_spec(spec))
            continue
        if not isinstance(x, torch.Tensor):
            plan.append(None)
            if spec != P():
                failures.append(f"{path} is {described(x)}, not a tensor, for out_specs {spec!r}")
                ways.append("P() for what is no tensor: it passes through")
            continue
        said = f"{path} is {types.text(x, type_)}, for out_specs {spec!r}"
        outside = types.outside(x, site.auto)
        wrong = [(f"it is {types.text(x)}, a whole array", "")] if outside else _misfits(spec, site, x.ndim)
        found = [problem for problem, _ in wrong]
        if len(spec) > x.ndim:
            ways.append("x[None], which adds a dim to concatenate along: "
                        f"out_specs={spec!r} needs {count_text(len(spec), 'dim')}")  # fmt: skip
        else:
            ways += [way for _, way in wrong if way]
        if not found and mapped.check:
            for axis in site.sizes:
                found += _type_problem(axis, type_.letter(axis), types.of_spec(spec).letter(axis), spec, ways)
        failures += [f"{said}: {problem}" for problem in found]
        if not found:
            rows, lies = split_axes(spec, x.ndim), site.lies(spec, x)
            shape = torch.Size(size * math.prod(site.sizes[a] for a in names) for size, names in zip(x.shape, rows))
            dspec = spec_for(mesh, _bare(lies), shape, contiguous_stride(shape), x.dtype)
            plan.append(_Out(spec, lies, dspec, () if mapped.check else site.unmentioned(spec)))
    if failures:
        raise SpecError(report(where, f"the results do not fit out_specs on the {mesh_text(axes_of(mesh))}", failures,
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


def _taken_out(local: Any, have: types.Type, site: _Site, entry: _Out, fast: bool) -> Any:
    if fast:
        local = _torch.local(local) if local.__class__ is Array else local
        if local.__class__ is not Blocks and site.simulated:
            local = shared(local.detach(), len(played_ranks(site.mesh)))
        out = _torch.new_dtensor(Array, packed(local), entry.dspec, requires_grad=False)
        if entry.lies.unreduced:
            out._sum = []
        if entry.lies.reduced:
            out._reduced = entry.lies.reduced
    else:
        if site.body.check:
            local = promote(local, have, entry.type, site.body.mesh)
        elif entry.shared_by:
            (local,) = linear.apply(Collective("share", site.body.mesh, entry.shared_by, "shard_map result"), local)
        out = take_out(local, site.mesh, entry.lies, site.auto)
    if site.outer is not None:
        types.mark(out, types.over(have, site.outer.axes))
    return out


# --- the public function ----------------------------------------------------------------------------------------------


def shard_map(f: Callable[..., Any] | None = None, *, mesh: Any = None, in_specs: Any, out_specs: Any,
              axis_names: Any = None, check_vma: bool = True) -> Any:  # fmt: skip
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
        axis_names: the axes to map over, a set; by default all. Along the others the values of the body stay whole:
            they are arrays on that part of the mesh, which ops and `with_sharding` treat as they do outside, and on
            which another `shard_map` may be called, over more axes. Specs name the mapped axes only.
        check_vma: track how values vary over the axes, and check. Without, nothing intercepts the body: a promise is
            believed, and inside, `psum` is its own transpose; gradients taken outside are the same.

    Returns:
        A function of whole values, plain tensors or arrays, that gives arrays.

    Raises:
        SpecError: specs that do not fit the arguments or the results; on all ranks, before anything moves.
        TypingError: a local value was used against its type.
        MeshError: no mesh, arguments on another one, or an axis that is manual already.

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
        return functools.partial(shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axis_names,
                                 check_vma=check_vma)  # fmt: skip
    checked_function(f, "shard_map")
    if mesh is not None:
        context.checked_mesh(mesh, "shard_map")
    mapped = _Mapped(f, mesh, in_specs, out_specs, axis_names, check_vma)

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise TypingError(report(
                f"shard_map({mapped.name})", f"it takes positional arguments, but {sorted(kwargs)} came by keyword",
                fix="in_specs is matched by position"))  # fmt: skip
        return mapped(args)

    return run
