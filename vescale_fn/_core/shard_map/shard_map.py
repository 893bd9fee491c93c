"""`shard_map`: a function of one rank's blocks, mapped over the ranks of a mesh.

Inside, values are local: each rank's block, a plain tensor, and communication is written out (`vfn.psum`, ...). What
must be known about the arguments (are the shards even, does anything move, how is each block typed) is a function of
their specs and shapes, so it is worked out once and remembered; likewise for the results.

Source: `jax.shard_map`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch.distributed.device_mesh import DeviceMesh

from .. import torch_internals
from ..arrays.array import Array, entries_asked, entries_over, is_array, mesh_of, spec_of, whole
from ..base import context, state, tracebacks, tree
from ..base.containers import opened
from ..base.errors import MeshError, SpecError, VaryingTypeError, VfnError
from ..base.front_door import public
from ..base.messages import report
from ..base.user_calls import called, checked_function, refuse_keywords
from ..distributed.places import whole_mesh
from ..local_types import replica_check, tensor_types, types
from ..sharding.index_map import axes_of
from ..sharding.spec import P
from . import body as body_
from . import interrupts
from .crossing import Crossing, brought_in, taken_out
from .in_specs import plan_ins, refuse_moves
from .out_specs import plan_outs, refuse_other_shapes
from .scope import Map, Site, found_site

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here

_LIMIT = 1024  # plans, and sites, that one mapped function remembers


class _Mapped(Map):
    """A function with its specs. Called, it validates, brings the blocks in, runs it, and takes the results out."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.notes = f"the arguments of {self.where}", f"the results of {self.where}"
        self.sites: dict[Any, Site] = {}
        self.ins: dict[Any, list[Crossing | None]] = {}
        self.outs: dict[Any, list[Crossing | None]] = {}
        # axes that no spec names, but over which the body was seen to communicate
        self.used: frozenset[str] = frozenset()
        self.watched = False  # whether a body with types was seen in the body of this one without

    def __call__(self, args: tuple[Any, ...]) -> Any:
        leaves, treedef = opened(args, self.where, "args", numpy=torch.as_tensor)
        here, outer = state.now(), None
        if here.run is not None:
            outer = here.run.body
            if here.run.mode is None:
                raise context.Unwatched
        site, compared = self.site(leaves, outer), replica_check.looked_for()
        if compared:
            self.compare_arguments(site, args, leaves)
        key = (treedef, site, *map(_key, leaves))
        ways = self.ins.get(key)
        first = ways is None
        if ways is None:
            ways = _remember(self.ins, key, plan_ins(self, site, args, leaves))
        if here.strict:
            refuse_moves(self, site, args, leaves, ways)
        fast = _nothing_differentiates(leaves)
        given = brought_in(leaves, ways, site, fast)
        if here.recorder is not None:
            context.record(self.notes[0], tuple(leaves), given)
        intercepted = self.check or site.communicator.holds_blocks or not fast or here.grad_depth > 0 or self.watched
        result, locals_, out_def, have, by_values = self.run(site, args, treedef, given, intercepted)
        by_values = by_values or (first and not self.check and outer is None)
        if compared or by_values:
            self.compare_results(site, result, locals_, have, by_values)
        key = (out_def, site, *map(_key, locals_), *have)
        ways = self.outs.get(key)
        if ways is None:
            ways = _remember(self.outs, key, plan_outs(self, site, result, locals_, have))
        if compared and context.watch() is not None and not self.check:
            replica_check.results_alike(self, site.body, result, locals_, [way and way.shared_by for way in ways])
        fast = _nothing_differentiates(locals_)
        if not (fast or intercepted):
            raise _closure_with_gradient(self, locals_)
        made = taken_out(locals_, have, ways, site, fast)
        if here.unit is not None and outer is None:
            made = [x if way is None else whole(x) for x, way in zip(made, ways)]
        if here.recorder is not None:
            context.record(self.notes[1], tuple(locals_), made, line=self.line)
        return tree.unflatten(out_def, made)

    def run(self, site: Site, args: Any, treedef: Any, leaves: list[Any], intercepted: bool) -> tuple[Any, ...]:
        """Run the body: its result, that result's leaves and tree, their types, and whether shapes hang on values."""
        with body_.running(site.body, site.adopt, intercepted) as run:
            try:
                result = called(self.f, tree.unflatten(treedef, leaves), {}, self.where)
            except (RuntimeError, IndexError) as error:
                _note_blocks(error, self, args, leaves)
                raise
            locals_, out_def = opened(result, self.where, "out", numpy=torch.as_tensor)
            locals_ = run.taken_in(locals_)
            have = self.types(locals_, site.body)  # still inside: only there is known what the body wrote
        return result, locals_, out_def, have, self.check and run.sized_by_values()

    def site(self, leaves: Sequence[Any], outer: context.Body | None) -> Site:
        """Where a call with these arguments runs: mesh, body around it, axes that nothing in it uses."""
        mesh = context.seen(self.mesh) if self.mesh is not None else _found_mesh(leaves, outer, self.name)
        free = self.free_of_entries(leaves, mesh) if torch_internals.transforming() else ()
        key = (id(mesh), outer, free)
        found = self.sites.get(key)
        return _remember(self.sites, key, found_site(self, mesh, outer, free)) if found is None else found

    def types(self, leaves: Sequence[Any], body: context.Body) -> list[types.Type]:
        """The types of the body's results, inside of it."""
        if not self.check:
            return [types.INVARIANT] * len(leaves)
        axes = body.axes
        return [tensor_types.typeof(x, axes) if isinstance(x, torch.Tensor) else types.INVARIANT for x in leaves]

    def compare_arguments(self, site: Site, args: tuple[Any, ...], leaves: Sequence[Any]) -> None:
        """In debug mode, and while a plan is recorded: what all ranks give alike."""
        if context.watch() is not None:
            replica_check.same_call(self, site.mesh, args, leaves)
        elif torch_internals.is_recorded():
            replica_check.same_plain(self.where, site.mesh, (("", x) for x in leaves))

    def compare_results(
        self, site: Site, result: Any, leaves: Sequence[Any], have: Sequence[types.Type], by_values: bool
    ) -> None:
        """In debug mode what all ranks return alike. Else, where shapes may hang on values (`by_values`: a body without
        types is not watched, and asked once for each form of its arguments), these shapes."""
        body = site.body
        if context.watch() is not None:
            if self.check:
                alike = [[axis for axis in body.axes if type_.letter(axis) == "I"] for type_ in have]
                replica_check.results_alike(self, body, result, leaves, alike)
            replica_check.same_shapes(self, site.mesh, result, leaves)
        elif by_values and not torch_internals.is_recorded():
            refuse_other_shapes(self.where, site.mesh, result, leaves)

    def free_of_entries(self, leaves: Sequence[Any], mesh: Any) -> tuple[str, ...]:
        """The axes over which entries of a `vmap` are split, and that nothing in this map uses: there values may stay whole."""
        used, outer = self.named | self.used, context.body()
        batched = [x for x in leaves if isinstance(x, torch.Tensor) and torch_internals.is_batched(x)]
        over = frozenset().union(*map(entries_over, batched))
        if batched and context.entries_over():
            over = over.union(entries_asked(self.where, used, mesh if outer is None else outer.auto or outer.mesh))
        return tuple(axis for axis in axes_of(mesh) if axis in over and axis not in used)


def _called(mapped: _Mapped, args: tuple[Any, ...]) -> Any:
    """Call it; again where what it met shows that it must run otherwise."""
    saved = interrupts.before()
    try:
        return mapped(args)
    except context.NotFree as found:
        interrupts.undo(saved)
        if found.axes <= mapped.used:  # free by a map around this one
            raise
        mapped.used |= found.axes
    except context.Unwatched:
        interrupts.undo(saved)
        if mapped.watched or mapped.check:
            raise
        mapped.watched = True
    except BaseException:
        interrupts.undo(saved)
        raise
    return _called(mapped, args)


def _note_blocks(error: Exception, mapped: _Mapped, args: Any, leaves: Sequence[Any]) -> None:
    """Tell a reader of torch's own message, about shapes mostly, what the arguments are inside (from Python 3.11 on)."""
    if isinstance(error, VfnError) or not hasattr(error, "add_note"):
        return
    shown = [
        f"{path} is {tensor_types.text(x)}{tensor_types.read(x) or ''}"
        for path, x in zip(tree.paths(args, "args"), leaves)
        if isinstance(x, torch.Tensor)
    ]
    more = [f"and {len(shown) - 6} more"] * (len(shown) > 6)
    error.add_note(
        f"In the body of shard_map({mapped.name}) values are one rank's blocks: {', '.join(shown[:6] + more)}"
    )


def _nothing_differentiates(leaves: Sequence[Any]) -> bool:
    if torch_internals.transforming() or torch_internals.forward_ad_active():
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in leaves if isinstance(x, torch.Tensor)))


def _closure_with_gradient(mapped: _Mapped, locals_: Sequence[Any]) -> Exception:
    """For a body that nothing watched, because none of its arguments has a gradient, but whose result has."""
    found = [tensor_types.text(x) for x in locals_ if isinstance(x, torch.Tensor) and x.requires_grad]
    return VaryingTypeError(
        report(
            f"shard_map({mapped.name})",
            "with check_vma=False, a gradient of a tensor that the body closes over would stay each rank's own",
            [f"the result {text} has a gradient, but no argument has" for text in found],
            "pass the parameters as arguments, with in_specs=P(); or torch.no_grad(); or .detach() in the body",
        )
    )


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> Any:
    if len(cache) >= _LIMIT:
        cache.clear()
    cache[key] = value
    return value


def _key(x: Any) -> Any:
    """What a plan depends on, of one leaf. The DTensorSpecs of equal arrays are one object, so comparing is quick."""
    if x.__class__ is Array:
        return (torch_internals.spec(x),)
    if x.__class__ is torch.Tensor and not torch_internals.transforming():
        return x.shape, x.dtype
    return (x.shape, x.dtype, is_array(x) and (mesh_of(x), spec_of(x))) if isinstance(x, torch.Tensor) else type(x)


def _as_they_lie(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """in_specs for arguments that are to stay as they lie."""
    return tree.map_(lambda x: spec_of(x) if isinstance(x, torch.Tensor) else P(), args)


def _found_mesh(leaves: Sequence[Any], outer: context.Body | None, name: str) -> Any:
    mesh = outer.mesh if outer is not None else context.current_mesh()
    if mesh is None:
        mesh = next((whole_mesh(mesh_of(x)) for x in leaves if isinstance(x, torch.Tensor) and is_array(x)), None)
    if mesh is None:
        raise MeshError(
            report(
                f"shard_map({name})",
                "there is no mesh: none was given, none is current, and no argument is an array on one",
                fix="shard_map(f, mesh=mesh, ...) or `with vfn.use_mesh(mesh):`",
            )
        )
    return mesh


Q = ParamSpec("Q")
R = TypeVar("R")


@overload
def shard_map(
    f: Callable[Q, R],
    mesh: DeviceMesh | None = None,
    in_specs: Any = None,
    *,
    out_specs: Any,
    axis_names: Any = None,
    check_vma: bool = True,
) -> Callable[Q, R]: ...
@overload
def shard_map(
    f: Callable[Q, R],
    mesh: DeviceMesh | None,
    in_specs: Any,
    out_specs: Any,
    *,
    axis_names: Any = None,
    check_vma: bool = True,
) -> Callable[Q, R]: ...
@overload
def shard_map(
    f: None = None,
    mesh: DeviceMesh | None = None,
    in_specs: Any = None,
    *,
    out_specs: Any,
    axis_names: Any = None,
    check_vma: bool = True,
) -> Callable[[Callable[Q, R]], Callable[Q, R]]: ...
@torch_internals.not_compiled
@public("shard_map")
def shard_map(
    f: Any = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = ...,
    *,
    axis_names: Any = None,
    check_vma: bool = True,
) -> Any:
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
            An argument that lies otherwise is moved there first (under `strict` that raises). Left out or None: as each
            argument lies.
        out_specs: a `P`, or a prefix of the result: how the ranks' results are put together. An axis that it does not
            mention is a promise that the value is the same along it, which is checked.
        axis_names: the axes to map over, a set; by default all. Along the others the values of the body stay whole:
            they are arrays on that part of the mesh, which ops and `with_sharding` treat as they do outside, and on
            which another `shard_map` may be called, over more axes. Specs name the mapped axes only.
        check_vma: track how values vary over the axes, and check. Without, nothing intercepts the body: a promise is
            believed, and inside, `psum` is its own transpose; gradients taken outside are the same. That the ranks' results
            have one shape is compared at the first call for each form of the arguments: a rank whose result keeps its
            shape learns of another's only by asking at every call, which `vfn.debug` does.

    Returns:
        A function of whole values, plain tensors or arrays, that gives arrays.

    Raises:
        SpecError: specs that do not fit the arguments or the results; on all ranks, before anything moves.
        VaryingTypeError: a local value was used against its type.
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
        return functools.partial(
            shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axis_names, check_vma=check_vma
        )
    checked_function(f, "shard_map")
    if out_specs is ...:
        raise SpecError(
            report("shard_map", "out_specs is missing", fix="out_specs=P(...): how the ranks' results are put together")
        )
    if mesh is not None:
        context.checked_mesh(mesh, "shard_map")
    mapped = _Mapped(f, mesh, in_specs, out_specs, axis_names, check_vma)
    inferred: dict[Any, _Mapped] = {}

    @torch_internals.not_compiled
    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        refuse_keywords(kwargs, VaryingTypeError, f"shard_map({mapped.name})", "in_specs")
        now = mapped
        if in_specs is None:
            specs = _as_they_lie(args)
            leaves, treedef = tree.flatten(specs)
            key = treedef, *leaves
            now = inferred.get(key) or _remember(
                inferred, key, _Mapped(f, mesh, specs, out_specs, axis_names, check_vma)
            )
        return _called(now, args)

    return run
