"""`Array`: a whole value sharded over a mesh, a DTensor that the interpreter runs; how arrays are made and moved.

An `Array` is a DTensor whose `__torch_dispatch__` is the eager interpreter, so it sees the program below autograd and
below `torch.func`, forward and backward alike, and it is still a DTensor to checkpoints, optimisers and other
libraries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import context, linear_map, no_values, op_arguments, op_lines
from ..base.array_notes import ArrayNotes, noted, notes_of
from ..base.errors import InPlaceError, MeshError, SpecError, TransformError
from ..base.front_door import no_attribute
from ..base.messages import described, mesh_text, op_text, report, short
from ..base.no_values import NoValues
from ..base.saved_names import also_saved_as, saved_as
from ..base.state import unwatched
from ..distributed import blocks, value_flow
from ..distributed.abstract_mesh import AbstractMesh
from ..distributed.blocks import Blocks
from ..distributed.communicator import coordinates
from ..distributed.mesh import Mesh, SimulatedMesh, check_reaches, communicator_of, rebuild_mesh, same
from ..distributed.places import at_of, cut_to, is_elsewhere, is_stand_in, place_of, spread_from, whole_mesh
from ..distributed.without_memory import WithoutMemory
from ..local_types import tensor_types
from ..sharding.index_map import axes_of, local_indices
from ..sharding.layout import WHOLE, as_written, axes_items, contiguous_stride, layout, spec_for, type_text
from ..sharding.merged_dim import Merged, UnevenParts
from ..sharding.named_sharding import Sharding
from ..sharding.placements import from_placements
from ..sharding.spec import P, from_split_axes, rebuild_spec, split_axes, with_place
from . import deferred_views, interpreter, reshard, reshard_buckets, reshard_plan
from .array_values import brought, the_one
from .lazy_layout import note_stated
from .places import relocated
from .strides import in_order, packed, strided_as


@torch_internals.dispatch_to_own
class Array(WithoutMemory, DTensor):
    """A whole value that lies on a mesh: any torch op on it gives the single-device answer.

    Made by `shard`, `from_local`, `with_sharding`, by draws with a ``spec``, and by every op on arrays; not directly.

    >>> import torch, vescale_fn as vfn
    >>> with vfn.simulate(2):
    ...     x = vfn.shard(torch.arange(6.0), vfn.make_mesh((2,), ("dp",)), vfn.P("dp"))
    ...     print(x + 1)
    Array f32[6@dp] on mesh (dp=2)
    tensor([1., 2., 3., 4., 5., 6.])
    """

    elsewhere = (
        "its blocks are on the ranks of a mesh",
        "vfn.unshard(x) for the whole value, x.to_local() for this rank's block",
    )
    instead_of_data = "module.weight = torch.nn.Parameter(value), an array as well; or x.data = vfn.unshard(value)"

    @classmethod
    @torch_internals.not_compiled
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            args, kwargs = _take_in(args), _take_in(kwargs)
        if unwatched and (run := context.run()) in unwatched and torch_internals.torch_function_on():
            local = _as_locals(run, func, args, kwargs or {})
            if local is not None:
                return func(*local[0], **local[1])
        return interpreter.dispatch(Array, func, args, kwargs)

    vfn_notes: ArrayNotes | None = None
    redispatch = classmethod(interpreter.dispatch)  # for what carries an op out as others

    if not TYPE_CHECKING:  # or type checkers would believe that every name is there

        def __getattr__(self, name: str) -> Any:
            if name != torch_internals.LOCAL:
                raise no_attribute("Array", self, name)
            deferred_views.read(self)
            return torch_internals.local(self)

    @property
    def type_text(self) -> str:
        """The type on one short line: ``f32[8@dp,4]``."""
        return type_text(self.shape, self.dtype, self.spec)

    @property
    def spec(self) -> P:
        """How the value lies on its mesh; `spec_of` says it of any tensor, under any transform."""
        return with_place(spec_of(self), at_of(torch_internals.mesh(self)))

    @property
    def sharding(self) -> Sharding:
        """The mesh and the spec, which may stand where a spec is asked for."""
        return Sharding(self.mesh, self.spec)

    @property
    def mesh(self) -> Any:
        """The mesh that the value lies on."""
        return whole_mesh(torch_internals.mesh(self))

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Whether the value has a shape and a layout, and no elements: that of a ShapeDtype, or on an abstract mesh."""
        local = torch_internals.held_local(self)
        if local is None:  # of a view that is read later
            return isinstance(torch_internals.mesh(self), AbstractMesh)
        return isinstance(local.blocks[0] if type(local) is Blocks else local, NoValues)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        spec = spec_of(self)
        head = f"Array {self.type_text} on {mesh_text(axes_of(self.mesh))}"
        if self.is_meta:
            return f"{head}, without values"
        if is_elsewhere(torch_internals.mesh(self)):
            return f"{head}\nthis rank holds nothing of it"
        if place_of(torch_internals.mesh(self)) is not None and not communicator_of(self.mesh).all_here:
            return f"{head}\n{_own_block(self, spec)}"
        if communicator_of(torch_internals.mesh(self)).all_here or _is_here(torch_internals.mesh(self), spec):
            return f"{head}\n{_plain(self, 'print')}"  # not through autograd: a transform may be printing
        return f"{head}\n{_own_block(self, spec)}"

    def __format__(self, form: str) -> str:
        return (
            format(self.item(), form)
            if self.ndim == 0 and (form or not self.is_meta)
            else object.__format__(self, form)
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (
            torch_internals.local(self),
            torch_internals.mesh(self),
            spec_of(self),
            tuple(self.shape),
            tuple(self.stride()),
            self.requires_grad,
            isinstance(self, torch.nn.Parameter),
        )

    def __deepcopy__(self, memo: Any) -> Array:
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        return _marked(copy, spec_of(self).reduced, isinstance(self, torch.nn.Parameter))

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The same value, not seen by autograd."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        raise InPlaceError(
            report(
                "array",
                "`.data = ` cannot exchange what an array holds",
                fix="with torch.no_grad(): x.copy_(value); or torch.utils.swap_tensors(x, value)",
            )
        )

    def __tensor_flatten__(self) -> Any:
        torch_internals.break_graph(
            TransformError(
                report(
                    "torch.compile",
                    "it cannot compile what is done with an array",
                    [f"it is {self.type_text}"],
                    "vfn.jit(step, backend='inductor') of the whole step, or a shard_map whose body calls it on blocks",
                )
            )
        )
        return super().__tensor_flatten__()

    @staticmethod
    def __tensor_unflatten__(inner: Any, flat: Any, outer_size: Any, outer_stride: Any) -> Array:
        raw = DTensor.__tensor_unflatten__(inner, flat, outer_size, outer_stride)
        return torch_internals.new_dtensor(
            Array, torch_internals.local(raw), torch_internals.spec(raw), requires_grad=raw.requires_grad
        )

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> Array:  # type: ignore[override]
        """This value with other DTensor placements; `with_sharding` in torch's words."""
        mesh = torch_internals.mesh(self) if device_mesh is None else context.checked_mesh(device_mesh, "redistribute")
        wrong = [p for p in placements or () if not isinstance(p, torch.distributed.tensor.placement_types.Placement)]
        if wrong or isinstance(placements, P):
            said = repr(placements) if isinstance(placements, P) else ", ".join(map(short, wrong))
            raise SpecError(
                report(
                    "redistribute",
                    f"placements must be torch's Shard(dim), Replicate() or Partial(), but there is {said}",
                    fix="vfn.with_sharding(x, spec), which takes a P",
                )
            )
        given, wanted = len(placements or self.placements), len(axes_of(mesh))
        if given != wanted:
            raise SpecError(
                report(
                    "redistribute",
                    f"{given} placements for {wanted} axes, those of the {mesh_text(axes_of(mesh))}",
                    fix="one placement for each axis",
                )
            )
        return place(
            self, mesh, from_placements(placements or self.placements, axes_of(mesh), self.ndim), "redistribute"
        )

    def full_tensor(self, **kwargs: Any) -> torch.Tensor:
        """The whole value as a plain tensor; `unshard` in torch's words."""
        return whole(self)

    def to_local(self, **kwargs: Any) -> torch.Tensor:
        """This rank's block, as a plain tensor (on a simulated mesh: a `Blocks`)."""
        return bring_in(self, Boundary(torch_internals.mesh(self), spec_of(self)), "to_local")

    def numpy(self, **kwargs: Any) -> Any:
        """The whole value as a numpy array."""
        return whole(self).numpy(**kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        value = whole(self.detach()).numpy()
        return value.astype(dtype or value.dtype, copy=bool(copy))

    def tolist(self) -> Any:
        """The whole value as nested lists."""
        return whole(self.detach()).tolist()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """The whole value, for another library's `from_dlpack`."""
        return whole(self).__dlpack__(*args, **kwargs)

    def __create_write_items__(self, *args: Any) -> Any:
        _refuse_for_checkpoint(self)
        return [] if is_elsewhere(torch_internals.mesh(self)) else super().__create_write_items__(*args)  # type: ignore[misc]

    def __create_chunk_list__(self) -> Any:
        _refuse_for_checkpoint(self)
        return [] if is_elsewhere(torch_internals.mesh(self)) else super().__create_chunk_list__()  # type: ignore[misc]

    def __get_tensor_shard__(self, index: Any) -> Any:
        _refuse_for_checkpoint(self)
        return super().__get_tensor_shard__(index)  # type: ignore[misc]


def _refuse_for_checkpoint(x: Array) -> None:
    """Raise where torch's checkpoints, which know of one contiguous part of a value a process, would store another one."""
    mesh, spec = torch_internals.mesh(x), spec_of(x)
    ranks = communicator_of(mesh).ranks if mesh.get_coordinate() is not None else ()
    here = [coordinates(mesh, rank) for rank in ranks]
    blocks_here = [local_indices(tuple(x.shape), axes_of(mesh), spec, coord) for coord in here]
    if any(isinstance(indices, list) for block in blocks_here for indices in block):
        raise SpecError(
            report(
                "torch.distributed.checkpoint",
                "this array's blocks are no contiguous parts of it",
                [x.type_text],
                "vfn.save(path, tree), or vfn.with_sharding(x, P(...)) first",
            )
        )
    if communicator_of(mesh).holds_blocks:
        raise MeshError(
            report(
                "torch.distributed.checkpoint",
                "a simulated mesh has one process for all ranks",
                [repr(x).splitlines()[0]],
                "vfn.save(path, tree)",
            )
        )


def _is_here(mesh: Any, spec: P) -> bool:
    """Whether each rank holds the whole value."""
    axes = axes_of(mesh)
    return all(axes[axis] == 1 for row in (*split_axes(spec, len(spec)), spec.unreduced) for axis in row)


def _own_block(x: Array, spec: P) -> str:
    """This rank's block, said to be one: printing on one rank alone must not wait for the others."""
    mesh = torch_internals.mesh(x)
    rank = communicator_of(mesh).ranks[0]
    where = local_indices(tuple(x.shape), axes_of(mesh), spec, coordinates(mesh, rank))
    spans = ", ".join(
        f"{i.start}:{i.stop}" if isinstance(i, range) else f"{len(i)} of {n}" for i, n in zip(where, x.shape)
    )
    what = (
        f"this rank's partial sum over {','.join(sorted(spec.unreduced))} of" if spec.unreduced else "this rank's block"
    )
    return f"{what} [{spans}]: {torch_internals.local(x)}"


@saved_as("vescale_fn.array")
def _rebuild(local: Any, mesh: Any, spec: P, shape: Any, stride: Any, requires_grad: bool, parameter: bool) -> Array:
    out = wrap(local, mesh, spec, torch.Size(shape), stride)
    return _marked(out.requires_grad_(requires_grad), spec.reduced, parameter)


def _marked(x: Any, reduced: frozenset[str], parameter: bool) -> Array:
    """With what is known of an array besides its value."""
    if reduced:
        noted(x).reduced = reduced
    if parameter:
        torch_internals.mark_as_parameter(x)
    return x


torch.serialization.add_safe_globals(
    [Array, Blocks, Merged, UnevenParts, Mesh, SimulatedMesh, P, _rebuild, rebuild_mesh, rebuild_spec]
)


def wrap(local: Any, mesh: Any, spec: P, shape: torch.Size, stride: tuple[int, ...] | None = None) -> Array:
    """The array of `shape` of which `local` is what this rank holds under `spec`."""
    bare, local = P(*spec, unreduced=spec.unreduced) if spec.reduced else spec, communicator_of(mesh).held(local)
    return _wrapped(local, spec_for(mesh, bare, shape, stride or contiguous_stride(shape), local.dtype), spec)


def relabelled(x: Any, spec: P) -> Array:
    """The array in the same memory with a spec in which it lies alike."""
    return wrap(torch_internals.local(x), mesh_of(x), spec, x.shape, tuple(x.stride()))


def _wrapped(local: Any, dspec: Any, spec: P) -> Array:
    if type(local) is not Blocks and torch_internals.is_lazy(local):
        local = torch_internals.materialized(local)
    if local.requires_grad:  # inside a Function's forward: the array is the variable, not what it holds
        local = local.detach()
    return made(local, dspec, spec)


def made(local: Any, dspec: Any, lies: P) -> Array:
    """The array around what this rank holds, of a layout in torch's terms that is `lies` in ours."""
    out = torch_internals.bare_dtensor(Array, local, dspec, requires_grad=False)
    torch_internals.forbid_data_ptr(out)
    if lies.unreduced:
        noted(out).sums = []
    if lies.reduced:
        noted(out).reduced = lies.reduced
    return out


def _as_locals(run: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments of an op, with the arrays from outside of the running body as local values; None where there are none,
    and where such an array is written by what is the same on all ranks: a number, or other arrays.

    Raises:
        InPlaceError: a plain tensor would be written into such an array; that one of the body differs by rank nothing shows.
    """
    auto = run.body.auto
    tensors = op_arguments.tensors_in(args, kwargs)
    outside = {id(x) for x in tensors if tensor_types.outside(x, auto)}
    targets = blocks.written_arguments(func, args, kwargs)
    if not outside:
        return None
    if any(id(x) in outside for x in op_arguments.tensors_in(targets)):
        if given := [x for x in tensors if not isinstance(x, DTensor)]:
            raise InPlaceError(
                report(
                    op_text(func),
                    "this writes a plain tensor, which may differ by rank, into an array from outside the body",
                    [
                        f"the array is {described(next(x for x in tensors if id(x) in outside))}",
                        f"{described(given[0])} is written",
                    ],
                    "return it from the body, and write outside; or x.clone() of the array as an argument",
                )
            )
        for x in op_arguments.tensors_in(targets):
            run.met.pop(id(x), None)  # it may be written so
        return None
    with torch_internals.no_torch_function():
        values = iter([run.adopt(x) if id(x) in outside else x for x in tensors])
        return op_arguments.with_tensors((args, kwargs), values)


def _take_in(value: Any) -> Any:
    """Raw DTensors as arrays."""
    return op_arguments.mapped(_taken_in, value)


def _taken_in(x: Any) -> Any:
    if not isinstance(x, DTensor) or isinstance(x, Array):
        return x
    x = _only_sums(x)
    return torch_internals.new_dtensor(Array, torch_internals.local(x), torch_internals.spec(x))


def _only_sums(x: Any) -> Any:
    """A raw DTensor with maxima and the like put together: of partial values a spec can say only sums."""
    if isinstance(x, Array) or not any(
        p.is_partial() and p.reduce_op != "sum" for p in torch_internals.spec(x).placements
    ):
        return x
    whole = [torch.distributed.tensor.Replicate() if p.is_partial() else p for p in torch_internals.spec(x).placements]
    return DTensor.redistribute(x.detach(), placements=whole)  # type: ignore[arg-type]


# --- reading ----------------------------------------------------------------------------------------------------------


def is_array(x: Any) -> bool:
    """Whether `x` is an array or a raw DTensor, also inside a transform."""
    return isinstance(x, torch.Tensor) and isinstance(torch_internals.peel(x), DTensor)


def mesh_of(x: torch.Tensor) -> Any:
    """The mesh of an array, also inside a transform; None for a plain tensor. Of one at a place that of its ranks."""
    inner = torch_internals.peel(x)
    return torch_internals.mesh(inner) if isinstance(inner, DTensor) else None


def spec_of(x: torch.Tensor) -> P:
    """How a value lies on `mesh_of` it, also inside a transform; the `spec_of` that users call says also at which place."""
    if not isinstance(x, torch.Tensor):
        raise SpecError(
            report("spec_of", f"x must be one tensor, but it is {described(x)}", fix="vfn.show(tree) for a whole tree")
        )
    inner = torch_internals.peel(x)
    if not isinstance(inner, DTensor):
        return WHOLE
    return _unbatched(as_written(torch_internals.spec(inner)), x, inner)


def lies_as(x: torch.Tensor) -> P:
    """`spec_of` an array, the same for all ways to write one layout: the order of axes of size 1 is no other one."""
    inner = torch_internals.peel(x)
    return _unbatched(layout(torch_internals.spec(inner)), x, inner)


def _unbatched(spec: P, x: torch.Tensor, inner: torch.Tensor) -> P:
    """The spec of `x`, of which `inner` is what all transforms wrap."""
    gone, reduced = torch_internals.batch_dims(x), notes_of(inner).reduced
    if not gone and not reduced:
        return spec
    rows = list(split_axes(spec, inner.ndim))
    for dim in gone:
        del rows[dim]
    return from_split_axes(rows, spec.unreduced, reduced)


def entries_over(x: torch.Tensor) -> frozenset[str]:
    """The axes over which the entries of an array under `vmap` are split."""
    inner, gone = torch_internals.peel(x), torch_internals.batch_dims(x)
    if not gone or not isinstance(inner, DTensor):
        return frozenset()
    rows = list(split_axes(layout(torch_internals.spec(inner)), inner.ndim))
    return frozenset(axis for dim in gone for axis in rows.pop(dim))


def entries_asked(where: str, named: frozenset[str], mesh: Any) -> tuple[str, ...]:
    """The axes that the `vmap`s around lay their entries out over; or an error, where they are used otherwise here."""
    asked = context.entries_over()
    sizes = axes_of(mesh)
    wrong = [f"axis {axis!r} is used here already" for axis in asked if axis in named]
    wrong += [f"there is no axis {axis!r} on the {mesh_text(sizes)}" for axis in asked if axis not in sizes]
    if wrong:
        raise TransformError(
            report(
                where,
                "it cannot lay out the entries of a vmap as its spmd_axis_name says",
                wrong,
                "for spmd_axis_name an axis of the mesh that nothing in the function names",
            )
        )
    return asked


# --- moving, differentiably -------------------------------------------------------------------------------------------


def _cotangent_spec(spec: P) -> P:
    """How the cotangent of a value with this spec lies: as the value, unreduced and reduced swapped."""
    return P(*spec, unreduced=spec.reduced, reduced=spec.unreduced)


Lead = tuple[tuple[str, ...], ...]  # of each leading dim, of a vmap: the axes to split it over; none: it stays as it is


@dataclass(frozen=True)
class _Move:
    """An array, or a plain whole tensor, brought to `target` (None: to a plain whole tensor)."""

    row: ClassVar[str] = "with_sharding"

    mesh: Any
    source: P | None
    target: P | None
    why: str
    lead: Lead = ()
    # from and to: before it moves. Back, too, it is the first thing
    cast: tuple[torch.dtype, torch.dtype] | None = None
    # whether a partial sum stays one, there and back: no more is asked for than where parts lie
    keeps_sums: bool = False

    def begun(self, x: Any) -> Any:
        """The value before it moves."""
        x = _taken_in(x)
        return x if self.cast is None else x.to(self.cast[1])

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.carried_out(self.begun(*xs)),)

    def carried_out(self, x: Any) -> Any:
        """The move, of what has begun."""
        spec = layout(torch_internals.spec(x)) if isinstance(x, Array) else WHOLE
        if self.target is None:
            return _plain(x, self.why)
        target = led(self.lead, spec, self.target, x.ndim)
        if self.keeps_sums:
            target = _with_sums(target, spec.unreduced)
        if isinstance(x, Array) and P(*target, unreduced=target.unreduced) == spec and not target.reduced:
            return x.detach()
        bare = P(*target, unreduced=target.unreduced)
        if isinstance(x, Array):
            local = _unshared(brought(x, bare, self.why, owned=True), torch_internals.local(x))
            return wrap(in_order(local, x), self.mesh, target, x.shape, tuple(x.stride()))
        steps = reshard_plan.plan(tuple(x.shape), axes_items(self.mesh), WHOLE, bare)
        before = _local(x, self.mesh)
        local = reshard.run(before, tuple(x.shape), self.mesh, steps, self.why)
        local = in_order(_unshared(local, before), x) if steps else local
        return wrap(local, self.mesh, target, x.shape, tuple(x.stride()))

    def transpose(self) -> _Move:
        source, target = (None if s is None else _cotangent_spec(s) for s in (self.source, self.target))
        back = None if self.cast is None else (self.cast[1], self.cast[0])
        return _Move(self.mesh, target, source, f"{self.why} (backward)", self.lead, back, self.keeps_sums)

    def batched(self, over: tuple[str, ...]) -> _Move:
        return replace(self, lead=(over, *self.lead))


@dataclass(frozen=True)
class _Relocate:
    """An array of one place, or of a whole mesh, brought to another place of it, or to the whole."""

    row: ClassVar[str] = "with_sharding"

    meshes: tuple[Any, Any]  # from and to
    specs: tuple[P, P]
    why: str
    lead: Lead = ()

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = _taken_in(*xs)
        if not isinstance(x, Array):  # a cotangent that every rank holds
            x = wrap(_local(x, self.meshes[0]), self.meshes[0], WHOLE, x.shape, tuple(x.stride()))
        spec = led(self.lead, layout(torch_internals.spec(x)), self.specs[1], x.ndim)
        out = relocated(x, self.meshes[1], spec, self.why)
        local = torch_internals.local(out)
        if not is_elsewhere(self.meshes[1]) or torch_internals.is_recorded():
            local = _unshared(local, self._beside(torch_internals.local(x)))
        return (wrap(in_order(local, x), self.meshes[1], spec, x.shape, tuple(x.stride())),)

    def _beside(self, local: Any) -> Any:
        """Of what an array holds where it comes from, for each rank where it goes what that may share memory with."""
        source, target = map(place_of, self.meshes)
        local = local if source is None else spread_from(source, local)
        return local if target is None else cut_to(target, local)

    def transpose(self) -> _Relocate:
        specs = _cotangent_spec(self.specs[1]), _cotangent_spec(self.specs[0])
        return _Relocate(self.meshes[::-1], specs, f"{self.why} (backward)", self.lead)

    def batched(self, over: tuple[str, ...]) -> _Relocate:
        return replace(self, lead=(over, *self.lead))


def _with_sums(target: P, unreduced: frozenset[str]) -> P:
    """The target of a move with the sums that it leaves to be made, over axes that it says nothing of."""
    left = unreduced.difference(target.reduced, *split_axes(target, len(target)))
    return P(*target, unreduced=target.unreduced | left, reduced=target.reduced)


@dataclass(frozen=True)
class _Moves:
    """Several moves on one mesh; what is the same collective travels as one, there and, when all cotangents are known, back."""

    row: ClassVar[str] = "with_sharding"

    parts: tuple[_Move, ...]

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        out: list[Any] = [part.begun(x) for part, x in zip(self.parts, xs, strict=True)]
        together: list[tuple[int, P]] = []
        for i, (part, x) in enumerate(zip(self.parts, out, strict=True)):
            if isinstance(x, Array) and part.target is not None and not notes_of(x).sums:
                target = led(part.lead, layout(torch_internals.spec(x)), part.target, x.ndim)
                if P(*target, unreduced=target.unreduced) != layout(torch_internals.spec(x)):
                    together.append((i, target))
                    continue
            out[i] = part.carried_out(x)
        moved = moved_together([out[i] for i, _ in together], [target for _, target in together], self.parts[0].why)
        for (i, _), y in zip(together, moved, strict=True):
            out[i] = y
        return tuple(out)

    def transpose(self) -> _Moves:
        return _Moves(tuple(part.transpose() for part in self.parts))

    def only(self, which: Sequence[int]) -> _Moves:
        return _Moves(tuple(self.parts[i] for i in which))

    def batched(self, over: tuple[str, ...]) -> _Moves:
        return _Moves(tuple(part.batched(over) for part in self.parts))


def led(lead: Lead, lies: P, goal: P, ndim: int, among: Container[str] | None = None) -> P:
    """`goal`, which speaks of the dims behind those of `lead`: these are split as `lead` says, or stay as `lies` has them, over
    axes that `goal` leaves free (and that are `among` these)."""
    if not lead:
        return goal
    rows = split_axes(goal, ndim - len(lead))
    taken = {axis for row in rows for axis in row} | goal.unreduced
    said = taken.union(*lead)
    front = [
        _before(over, taken, among) if over else _before(row, said, among)
        for over, row in zip(lead, split_axes(lies, ndim))
    ]
    return from_split_axes([*front, *rows], goal.unreduced, goal.reduced)


def _before(row: tuple[str, ...], taken: set[str], among: Container[str] | None) -> tuple[str, ...]:
    n = 0
    while n < len(row) and row[n] not in taken and (among is None or row[n] in among):
        n += 1
    return row if n == len(row) else row[:n]


def _local(x: Any, mesh: Any) -> Any:
    """The local value of an array, or of a plain tensor, which every rank holds."""
    return communicator_of(mesh).held(torch_internals.local(x) if isinstance(x, Array) else x)


def _unshared(local: Any, source: Any) -> Any:
    """`local` in memory of its own: a write into a piece of a whole that all ranks hold would change it on one alone. What
    stands for a value at another place is written by nobody."""

    def own(rank: int, block: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        shared = torch_internals.memory(block)[0] == torch_internals.memory(old)[0]
        return block.clone() if shared and not is_stand_in(block) else block

    if type(local) is not Blocks:
        return own(0, local, source)
    return blocks.each(own, range(len(local.blocks)), local, source, key=lambda rank: None)


def _plain(x: Any, why: str) -> torch.Tensor:
    if not isinstance(x, Array):
        return x
    if (place := place_of(torch_internals.mesh(x))) is not None:
        x = relocated(x, place.whole, WHOLE, why)
    return strided_as(the_one(_read(brought(x, WHOLE, why, owned=True)), torch_internals.mesh(x)), x)


class Boundary:
    """What lies between an array that lies as `spec` and each rank's block of it, which a `shard_map` body computes on.

    Along the axes of `auto` a block stays whole: it is an array on that part of the mesh. Blocks, or these arrays, are of one
    size. Of the dims of `lead`, too, what is split over the axes of `auto` stays so.
    """

    def __init__(self, mesh: Any, spec: P, auto: Any = None, lead: Lead = ()) -> None:
        self.mesh, self.spec, self.auto, self.lead = mesh, spec, auto, lead
        self._fits = None  # the DTensorSpec of an array whose block can be read off
        self._made: tuple[Any, ...] = (None, None, None)  # a block's shape and dtype, and the DTensorSpec of its array
        self._holds_blocks = communicator_of(mesh).holds_blocks

    @functools.cached_property
    def dual(self) -> Boundary:
        """That of the cotangents."""
        return Boundary(self.mesh, _cotangent_spec(self.spec), self.auto, self.lead)

    def batched(self, over: tuple[str, ...]) -> Boundary:
        """That of values with one more dim in front."""
        return Boundary(self.mesh, self.spec, self.auto, (over, *self.lead))

    def block(self, x: Any) -> Any:
        """The block of an array, under a name of its own."""
        dspec, spec = torch_internals.spec(x) if isinstance(x, Array) else None, self.spec
        if dspec is None or dspec is not self._fits:
            lies = WHOLE if dspec is None else layout(dspec)
            spec = led(self.lead, lies, spec, x.ndim, () if self.auto is None else axes_of(self.auto))
            bare = P(*spec, unreduced=spec.unreduced)
            if dspec is None or lies != bare:
                (x,) = _Move(self.mesh, None, bare, "shard_map")((x,))
            elif not self.lead:
                self._fits = dspec
        local = _read(torch_internals.local(x))
        if self.auto is None:
            return blocks.renamed(local, in_body=True) if type(local) is Blocks else local.detach()
        others = only_along(spec, axes_of(self.mesh).keys() - axes_of(self.auto).keys())
        shape = [size // n for size, n in zip(x.shape, self._counts(others, x.ndim))]
        inner = only_along(P(*spec, unreduced=spec.unreduced), axes_of(self.auto))
        return wrap(blocks.renamed(local), self.auto, inner, torch.Size(shape))

    def whole(self, x: Any) -> Array:
        """The array that the ranks' blocks make up."""
        shape, dtype, dspec = self._made
        known = shape == x.shape and dtype is x.dtype and not self.lead
        if known and self.auto is None:
            alone = x.__class__ is torch.Tensor and not self._holds_blocks
            return _wrapped(x.contiguous() if alone else packed(_local(x, self.mesh)), dspec, self.spec)
        spec = led(self.lead, layout(torch_internals.spec(x)) if isinstance(x, Array) else WHOLE, self.spec, x.ndim)
        if self.auto is not None:
            inner = only_along(P(*spec, unreduced=spec.unreduced), axes_of(self.auto))
            (x,) = _Move(self.auto, None, inner, "shard_map")((x,))
        local = packed(_local(x, self.mesh))
        if known:
            return _wrapped(local, dspec, spec)
        others = spec if self.auto is None else only_along(spec, axes_of(self.mesh).keys() - axes_of(self.auto).keys())
        size = torch.Size([size * n for size, n in zip(x.shape, self._counts(others, x.ndim))])
        out = wrap(local, self.mesh, spec, size)
        self._made = x.shape, x.dtype, torch_internals.spec(out)
        return out

    def _counts(self, spec: P, ndim: int) -> list[int]:
        """Into how many parts each dim is cut."""
        axes = axes_of(self.mesh)
        return [math.prod(axes[name] for name in names) for names in split_axes(spec, ndim)]


@dataclass(frozen=True)
class _Enter:
    boundary: Boundary

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.boundary.block(*xs),)

    def transpose(self) -> _Leave:
        return _Leave(self.boundary.dual)

    def batched(self, over: tuple[str, ...]) -> _Enter:
        return _Enter(self.boundary.batched(over))


@dataclass(frozen=True)
class _Leave:
    boundary: Boundary

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        (x,) = xs
        return (self.boundary.whole(x if isinstance(x, Array) else x.detach()),)

    def transpose(self) -> _Enter:
        return _Enter(self.boundary.dual)

    def batched(self, over: tuple[str, ...]) -> _Leave:
        return _Leave(self.boundary.batched(over))


def only_along(spec: P, axes: Iterable[str]) -> P:
    """The part of a spec that speaks of these axes."""
    axes = frozenset(axes)
    rows = [row if axes.issuperset(row) else tuple(a for a in row if a in axes) for row in split_axes(spec, len(spec))]
    if any(isinstance(row, Merged) and kept and kept != row for row, kept in zip(spec, rows)):
        raise SpecError(
            report(
                "shard_map",
                f"some axes of {spec!r} are manual and some are not, and they split one dim",
                fix="a layout that a list of axes says: vfn.with_sharding(x, P(...)) before",
            )
        )
    return from_split_axes(rows, spec.unreduced & axes, spec.reduced & axes)


def _read(local: Any) -> Any:
    """A local value that leaves the arrays: a log counts all of it as used."""
    if op_lines.listeners:
        value_flow.read(local)
    return local


def on_device(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """A plain tensor where the ranks of a mesh compute; one on the meta device becomes one without values there."""
    if x.device.type == mesh.device_type or type(x) is Blocks:
        return x
    return no_values.like(x, torch.device(mesh.device_type)) if x.is_meta else x.to(mesh.device_type)


def bring_in(x: Any, boundary: Boundary, why: str) -> Any:
    """Each rank's block of a plain tensor or an array, moved if need be; differentiable."""
    if not is_array(x):
        x = on_device(x, boundary.mesh)
    if not is_array(x) or spec_of(x) != boundary.spec:  # else its cotangent comes back right from _Enter alone
        x = moved(x, boundary.mesh, boundary.spec, why)
    return linear_map.apply(_Enter(boundary), x)[0]


def moved(x: Any, mesh: Any, target: P | None, why: str, keeps_sums: bool = False) -> Any:
    """An array, or a plain whole tensor, brought to `target`, or (None) to a plain whole tensor; differentiable."""
    own = mesh_of(x)
    if (
        own is not None
        and own is not mesh
        and target is not None
        and whole_mesh(own) == whole_mesh(mesh)
        and own != mesh
    ):
        op = _Relocate((own, mesh), (spec_of(x), target), why)
        return tensor_types.kept(linear_map.apply(op, x)[0], x)
    source, cast = before_narrowing(x)
    move = _Move(mesh, spec_of(x) if is_array(x) else None, target, why, cast=cast, keeps_sums=keeps_sums)
    return tensor_types.kept(linear_map.apply(move, source)[0], x)


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in a narrower dtype, for a move that follows: its gradient comes back in the dtype of `x`, and so is added up.

    A cast and then a gather have as their transpose a sum over ranks and then a cast, which so would add up, and round, in the
    narrow dtype. A move of what this gives is one step with the cast, whose transpose casts first.
    """
    out = x.to(dtype)
    if isinstance(x, Array) and x.requires_grad and torch.is_grad_enabled() and out is not x:
        noted(out).narrowed = torch_internals.version(out), x
    return out


def before_narrowing(x: Any) -> tuple[Any, Any]:
    """What `narrowed` was given, and the cast to `x`; `x` itself, and none, where it is no such thing."""
    version, source = notes_of(x).narrowed
    if source is None or version != torch_internals.version(x) or not torch.is_grad_enabled():
        return x, None
    return source, (source.dtype, x.dtype)


_BUCKET = 64 << 20  # bytes of whole values that travel as one


def moved_as_one(xs: Sequence[Any], mesh: Any, targets: Sequence[P], why: str) -> list[Any]:
    """`moved`, for several arrays: neighbours, of so many bytes together, travel as one; differentiable."""
    out: list[Any] = []
    todo = list(zip(xs, targets, strict=True))
    while todo:
        size, n = 0, 0
        while n < len(todo) and (n == 0 or size + todo[n][0].nbytes <= _BUCKET):
            size, n = size + todo[n][0].nbytes, n + 1
        here, todo = todo[:n], todo[n:]
        sources, casts = zip(*(before_narrowing(x) for x, _ in here))
        op = _Moves(tuple(_Move(mesh, spec_of(x), target, why, cast=cast) for (x, target), cast in zip(here, casts)))
        found = linear_map.apply(op, *sources)
        out += [tensor_types.kept(y, x) for y, (x, _) in zip(found, here, strict=True)]
    return out


def moved_together(xs: Sequence[Array], targets: Sequence[P], why: str) -> list[Array]:
    """`moved`, for several finished arrays: what is the same collective over the same axes is one, a dtype."""
    out: list[Any] = list(xs)
    meshes: dict[Any, list[int]] = {}
    for i, x in enumerate(xs):
        meshes.setdefault(torch_internals.mesh(x), []).append(i)
    for mesh, members in meshes.items():
        shapes = [tuple(xs[i].shape) for i in members]
        plans = [
            reshard_plan.plan(
                shape,
                axes_items(mesh),
                layout(torch_internals.spec(xs[i])),
                P(*targets[i], unreduced=targets[i].unreduced),
            )
            for i, shape in zip(members, shapes, strict=True)
        ]
        with torch_internals.no_torch_function():  # a body's mode watches what the body does, not what is done here
            moved = reshard_buckets.run_together(
                [torch_internals.local(xs[i]) for i in members], shapes, mesh, plans, why
            )
            moved = [_unshared(local, torch_internals.local(xs[i])) for i, local in zip(members, moved, strict=True)]
        for i, own in zip(members, moved, strict=True):
            own = in_order(own, xs[i])
            out[i] = tensor_types.kept(wrap(own, mesh, targets[i], xs[i].shape, tuple(xs[i].stride())), xs[i])
    return out


def whole(x: Any, why: str = "unshard") -> torch.Tensor:
    """An array as a plain whole tensor, on every rank; differentiable."""
    return moved(_only_sums(x) if isinstance(x, DTensor) else x, mesh_of(x), None, why)


def take_out(local: Any, boundary: Boundary) -> Any:
    """The array that the ranks' blocks make up; differentiable."""
    return linear_map.apply(_Leave(boundary), local)[0]


def place(x: Any, mesh: Any, spec: P, where: str) -> Any:
    """One leaf brought to `spec` on `mesh`, from wherever it is."""
    own = mesh_of(x)
    x = _only_sums(x) if isinstance(x, DTensor) else x
    if own is not None and not same(own, mesh) and same(whole_mesh(own), whole_mesh(mesh)):
        return moved(x, mesh, spec, where)
    if own is not None and not same(own, mesh):
        check_reaches(own, mesh, where)
        x, own = moved(x, own, None, where), None
    source = None if own is None else spec_of(x)
    if (
        source == spec
        and type(torch_internals.peel(x)) is Array
        and not (context.entries_over() and torch_internals.is_batched(x))
    ):
        note_stated(torch_internals.peel(x))
        return x
    return moved(x if own is not None else on_device(x, mesh), mesh, spec, where)


also_saved_as("vescale_fn.array", Array)
