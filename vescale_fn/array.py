"""Arrays: whole values that lie on a mesh, run by the interpreter; and how they are made, moved and taken apart.

An `Array` is a DTensor whose `__torch_dispatch__` is the eager interpreter, so it sees the program below autograd and
below `torch.func`, forward and backward alike, and it is still a DTensor to checkpoints, optimisers and other
libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from . import _torch, blocks, context, interpreter, linear, reshard, tree, wire
from .blocks import Blocks
from .errors import InPlaceError, MeshError, SpecError, TypingError, mesh_text, report
from .layout import WHOLE, axes_items, contiguous_stride, layout, spec_for, type_text
from .mesh import SimulatedMesh, axes_of, coordinates, is_simulated, played_ranks, rebuild_mesh, same
from .spec import (
    P,
    from_placements,
    from_split_axes,
    local_indices,
    problems,
    rebuild_spec,
    split_axes,
    too_long,
    validate,
)


@_torch.dispatch_to_own
class Array(DTensor):
    """A whole value that lies on a mesh: any torch op on it gives the single-device answer.

    Made by `shard`, `from_local`, `with_sharding`, by draws with a ``spec``, and by every op on arrays; not directly.

    >>> import torch, vescale_fn as vfn
    >>> with vfn.simulate(2):
    ...     x = vfn.shard(torch.arange(6.0), vfn.make_mesh((2,), ("dp",)), vfn.P("dp"))
    ...     print(x + 1)
    Array f32[6@dp] on mesh (dp=2)
    tensor([1., 2., 3., 4., 5., 6.])
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            args, kwargs = _take_in(args), _take_in(kwargs)
        return interpreter.dispatch(Array, func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        spec = spec_of(self)
        head = f"Array {type_text(self.shape, self.dtype, spec)} on {mesh_text(axes_of(self._spec.mesh))}"
        if is_simulated(self._spec.mesh) or _is_here(self._spec.mesh, spec):
            return f"{head}\n{_plain(self, 'print')}"  # not through autograd: a transform may be printing
        return f"{head}\n{_own_block(self, spec)}"

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if self.ndim == 0 else object.__format__(self, form)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (_torch.local(self), self._spec.mesh, spec_of(self), tuple(self.shape), tuple(self.stride()),
                          self.requires_grad, isinstance(self, torch.nn.Parameter))  # fmt: skip

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

    @staticmethod
    def __tensor_unflatten__(inner: Any, flat: Any, outer_size: Any, outer_stride: Any) -> Array:
        raw = DTensor.__tensor_unflatten__(inner, flat, outer_size, outer_stride)
        return _torch.new_dtensor(Array, _torch.local(raw), raw._spec, requires_grad=raw.requires_grad)

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> Array:  # type: ignore[override]
        """This value with other DTensor placements; `with_sharding` in torch's words."""
        mesh = device_mesh or self._spec.mesh
        return shard(self, mesh, from_placements(placements or self.placements, axes_of(mesh), self.ndim))

    def full_tensor(self, **kwargs: Any) -> torch.Tensor:
        """The whole value as a plain tensor; `unshard` in torch's words."""
        return unshard(self)

    def to_local(self, **kwargs: Any) -> torch.Tensor:
        """This rank's block, as a plain tensor (on a simulated mesh: a `Blocks`)."""
        return bring_in(self, self._spec.mesh, spec_of(self), "to_local")

    def numpy(self, **kwargs: Any) -> Any:
        """The whole value as a numpy array."""
        return unshard(self).numpy(**kwargs)

    def __array__(self, dtype: Any = None) -> Any:
        return unshard(self.detach()).__array__(dtype) if dtype is not None else unshard(self.detach()).__array__()

    def tolist(self) -> Any:
        """The whole value as nested lists."""
        return unshard(self.detach()).tolist()

    def __create_write_items__(self, *args: Any) -> Any:
        _refuse_simulated_checkpoint(self)
        return super().__create_write_items__(*args)  # type: ignore[misc]

    def __create_chunk_list__(self) -> Any:
        _refuse_simulated_checkpoint(self)
        return super().__create_chunk_list__()  # type: ignore[misc]

    def __get_tensor_shard__(self, index: Any) -> Any:
        _refuse_simulated_checkpoint(self)
        return super().__get_tensor_shard__(index)  # type: ignore[misc]


def _refuse_simulated_checkpoint(x: Array) -> None:
    if is_simulated(x._spec.mesh):
        raise MeshError(report("torch.distributed.checkpoint", "a simulated mesh has one process for all ranks",
                               [repr(x).splitlines()[0]], "save vfn.unshard(tree)"))  # fmt: skip


def _is_here(mesh: Any, spec: P) -> bool:
    """Whether each rank holds the whole value."""
    axes = axes_of(mesh)
    return all(axes[axis] == 1 for row in (*split_axes(spec, len(spec)), spec.unreduced) for axis in row)


def _own_block(x: Array, spec: P) -> str:
    """This rank's block, said to be one: printing on one rank alone must not wait for the others."""
    mesh = x._spec.mesh
    rank = played_ranks(mesh)[0]
    where = local_indices(tuple(x.shape), axes_of(mesh), spec, coordinates(mesh, rank))
    spans = ", ".join(
        f"{i.start}:{i.stop}" if isinstance(i, range) else f"{len(i)} of {n}" for i, n in zip(where, x.shape)
    )
    what = (
        f"this rank's partial sum over {','.join(sorted(spec.unreduced))} of" if spec.unreduced else "this rank's block"
    )
    return f"{what} [{spans}]: {_torch.local(x)}"


def _rebuild(local: Any, mesh: Any, spec: P, shape: Any, stride: Any, requires_grad: bool, parameter: bool) -> Array:
    out = _wrap(local, mesh, spec, torch.Size(shape), stride)
    return _marked(out.requires_grad_(requires_grad), spec.reduced, parameter)


def _marked(x: Array, reduced: frozenset[str], parameter: bool) -> Array:
    """With what is known of an array besides its value."""
    if reduced:
        x._reduced = reduced
    if parameter:
        x._is_param = True  # what makes a subclass of Tensor an nn.Parameter
    return x


torch.serialization.add_safe_globals([Array, Blocks, SimulatedMesh, P, _rebuild, rebuild_mesh, rebuild_spec])


def _wrap(local: Any, mesh: Any, spec: P, shape: torch.Size, stride: tuple[int, ...] | None = None) -> Array:
    bare = P(*spec, unreduced=spec.unreduced) if spec.reduced else spec
    if type(local) is not Blocks and (local.is_conj() or local.is_neg()):
        local = _torch.settled(local)
    dspec = spec_for(mesh, bare, shape, stride or contiguous_stride(shape), local.dtype)
    if local.requires_grad:  # inside a Function's forward: the array is the variable, not what it holds
        local = local.detach()
    out = _torch.new_dtensor(Array, local, dspec, requires_grad=False)
    if spec.unreduced:
        out._sum = []
    if spec.reduced:
        out._reduced = spec.reduced
    return out


def _take_in(value: Any) -> Any:
    """Raw DTensors as arrays."""
    if isinstance(value, dict):
        return {k: _take_in(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_take_in, value))
    if isinstance(value, DTensor) and not isinstance(value, Array):
        if any(p.is_partial() and p.reduce_op != "sum" for p in value._spec.placements):
            replicate = [torch.distributed.tensor.Replicate() if p.is_partial() else p for p in value._spec.placements]
            value = DTensor.redistribute(value.detach(), placements=replicate)  # type: ignore[arg-type]
        return _torch.new_dtensor(Array, _torch.local(value), value._spec, requires_grad=False)
    return value


# --- reading ----------------------------------------------------------------------------------------------------------


def is_array(x: Any) -> bool:
    """Whether `x` is an array or a raw DTensor, also inside a transform."""
    return isinstance(x, torch.Tensor) and isinstance(_torch.peel(x), DTensor)


def mesh_of(x: torch.Tensor) -> Any:
    """The mesh of an array, also inside a transform; None for a plain tensor."""
    inner = _torch.peel(x)
    return inner._spec.mesh if isinstance(inner, DTensor) else None


def spec_of(x: torch.Tensor) -> P:
    """How a value lies.

    Args:
        x: an array or raw DTensor, also inside a transform (under `vmap` the spec is of the unbatched dims), or a plain
            tensor, which is whole.

    Source: ``jax.typeof(x).sharding.spec``.

    >>> import torch, vescale_fn as vfn
    >>> with vfn.simulate(2):
    ...     vfn.spec_of(vfn.shard(torch.zeros(4, 2), vfn.make_mesh((2,), ("dp",)), vfn.P("dp")))
    P('dp')
    """
    inner = _torch.peel(x)
    if not isinstance(inner, DTensor):
        return WHOLE
    spec, gone = layout(inner._spec), _torch.batch_dims(x)
    reduced = getattr(inner, "_reduced", frozenset())
    if not gone and not reduced:
        return spec
    rows = list(split_axes(spec, inner.ndim))
    for dim in gone:
        del rows[dim]
    return from_split_axes(rows, spec.unreduced, reduced)


# --- moving, differentiably -------------------------------------------------------------------------------------------


def _cotangent_spec(spec: P) -> P:
    """How the cotangent of a value with this spec lies: as the value, unreduced and reduced swapped."""
    return P(*spec, unreduced=spec.reduced)


@dataclass(frozen=True)
class _Move:
    """An array, or a plain whole tensor, brought to `target` (None: to a plain whole tensor)."""

    mesh: Any
    source: P | None
    target: P | None
    why: str
    lead: int = 0  # leading dims, of a vmap, that stay as they are

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        (x,) = xs
        x = _take_in(x)
        spec = layout(x._spec) if isinstance(x, Array) else WHOLE
        if self.target is None:
            return (_plain(x, self.why),)
        target = self._target(spec, x.ndim)
        if isinstance(x, Array) and P(*target, unreduced=target.unreduced) == spec and not target.reduced:
            return (x.detach(),)
        bare = P(*target, unreduced=target.unreduced)
        if isinstance(x, Array):
            local = interpreter.brought(x, bare, self.why)
            return (_wrap(_apart(local, _torch.local(x)), self.mesh, target, x.shape),)
        steps = reshard.plan(tuple(x.shape), axes_items(self.mesh), WHOLE, bare)
        before = _local(x, self.mesh)
        local = reshard.run(before, tuple(x.shape), self.mesh, steps, self.why)
        return (_wrap(_apart(local, before) if steps else _packed(local), self.mesh, target, x.shape),)

    def _target(self, spec: P, ndim: int) -> P:
        assert self.target is not None
        if not self.lead:
            return self.target
        goal = split_axes(self.target, ndim - self.lead)
        taken = {axis for row in goal for axis in row} | self.target.unreduced
        lead = [_before(row, taken) for row in split_axes(spec, ndim)[: self.lead]]
        return from_split_axes([*lead, *goal], self.target.unreduced, self.target.reduced)

    def transpose(self) -> _Move:
        source, target = (None if s is None else _cotangent_spec(s) for s in (self.source, self.target))
        return _Move(self.mesh, target, source, f"{self.why} (backward)", self.lead)

    def batched(self) -> _Move:
        return _Move(self.mesh, self.source, self.target, self.why, self.lead + 1)


def _before(row: tuple[str, ...], taken: set[str]) -> tuple[str, ...]:
    n = 0
    while n < len(row) and row[n] not in taken:
        n += 1
    return row[:n]


def _local(x: Any, mesh: Any) -> Any:
    """The local value of an array, or of a plain tensor, which every rank holds."""
    local = _torch.local(x) if isinstance(x, Array) else x
    if is_simulated(mesh) and type(local) is not Blocks:
        return blocks.shared(local, len(played_ranks(mesh)))
    return local


def _packed(local: Any) -> Any:
    """A local value that is contiguous: arrays are, unless an op made them otherwise."""
    if type(local) is not Blocks:
        return local.contiguous()
    if all(block.is_contiguous() for block in local.blocks):
        return local
    return blocks.run_ranks(torch.Tensor.contiguous, len(local.blocks), (local,), {}, share=True)


def _apart(local: Any, source: Any) -> Any:
    """`local` in memory of its own: a write into a piece of a whole that all ranks hold would change it on one alone."""

    def own(rank: int, block: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return block.clone() if _torch.memory(block)[0] == _torch.memory(old)[0] else block

    ranks = range(len(local.blocks)) if type(local) is Blocks else (0,)
    return blocks.each(own, ranks, local, source, key=lambda rank: None)


def _plain(x: Any, why: str) -> torch.Tensor:
    if not isinstance(x, Array):
        return x
    local = interpreter.brought(x, WHOLE, why)
    return local.blocks[0] if type(local) is Blocks else local


@dataclass(frozen=True)
class _Enter:
    """From an array to each rank's block of it: into a `shard_map` body."""

    mesh: Any
    spec: P

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        (x,) = xs
        bare = P(*self.spec, unreduced=self.spec.unreduced)
        if not isinstance(x, Array) or layout(x._spec) != bare:
            (x,) = _Move(self.mesh, None, bare, "shard_map")((x,))
        local = _torch.local(x)
        return (Blocks(local.blocks, in_body=True) if type(local) is Blocks else local.detach(),)  # type: ignore[call-arg]

    def transpose(self) -> _Leave:
        return _Leave(self.mesh, _cotangent_spec(self.spec))

    def batched(self) -> _Enter:
        return _Enter(self.mesh, P(None, *self.spec, unreduced=self.spec.unreduced, reduced=self.spec.reduced))


@dataclass(frozen=True)
class _Leave:
    """From each rank's block to the array that they make up: out of a `shard_map` body. Blocks are of one size."""

    mesh: Any
    spec: P

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        local = _local(xs[0].detach(), self.mesh)
        axes = axes_of(self.mesh)
        shape = [size * _product(axes, names) for size, names in zip(local.shape, split_axes(self.spec, local.ndim))]
        return (_wrap(_packed(local), self.mesh, self.spec, torch.Size(shape)),)

    def transpose(self) -> _Enter:
        return _Enter(self.mesh, _cotangent_spec(self.spec))

    def batched(self) -> _Leave:
        return _Leave(self.mesh, P(None, *self.spec, unreduced=self.spec.unreduced, reduced=self.spec.reduced))


def _product(axes: dict[str, int], names: Sequence[str]) -> int:
    n = 1
    for name in names:
        n *= axes[name]
    return n


def _on_device(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    return x if x.device.type == mesh.device_type or type(x) is Blocks else x.to(mesh.device_type)


def bring_in(x: Any, mesh: Any, spec: P, why: str) -> Any:
    """Each rank's block of a plain tensor or an array that is to lie as `spec`; differentiable."""
    source = spec_of(x) if is_array(x) else None
    if source != spec:  # else its cotangent comes back right from _Enter alone
        (x,) = linear.apply(_Move(mesh, source, spec, why), x if source is not None else _on_device(x, mesh))
    return linear.apply(_Enter(mesh, spec), x)[0]


def take_out(local: Any, mesh: Any, spec: P) -> Any:
    """The array that the ranks' blocks, all of one size, make up under `spec`; differentiable."""
    return linear.apply(_Leave(mesh, spec), local)[0]


# --- the public functions ---------------------------------------------------------------------------------------------


def _place(x: Any, mesh: Any, spec: P, where: str) -> Any:
    """One leaf brought to `spec` on `mesh`, from wherever it is."""
    own = mesh_of(x)
    if own is not None and not same(own, mesh):
        (x,) = linear.apply(_Move(own, spec_of(x), None, where), x)
        own = None
    source = None if own is None else spec_of(x)
    if source == spec and type(_torch.peel(x)) is Array:
        return x
    if own is None:
        x = _on_device(x, mesh)
    return linear.apply(_Move(mesh, source, spec, where), x)[0]


def _specs(value: Any, spec: Any, where: str) -> tuple[list[Any], Any, list[P]]:
    """The leaves of a tree, its structure, and the spec of each leaf."""
    if isinstance(value, torch.Tensor) and isinstance(spec, P):
        return [value], None, [spec]
    leaves, treedef = tree.flatten(value)
    specs = tree.broadcast(spec, value, where, "spec", "tree")
    if not all(isinstance(s, P) for s in specs):
        names = tree.paths(value, tree.spelling(value, "tree"))
        wrong = [f"the spec of {n} is {s!r}" for n, s in zip(names, specs, strict=True) if not isinstance(s, P)]
        raise SpecError(report(where, "every spec must be a vfn.P", wrong, 'for instance P("dp") or P()'))
    return leaves, treedef, specs


def _rebuilt(treedef: Any, leaves: list[Any]) -> Any:
    return leaves[0] if treedef is None else tree.unflatten(treedef, leaves)


def _check(value: Any, leaves: Sequence[Any], specs: Sequence[P], meshes: Sequence[Any], where: str) -> None:
    """Raise one SpecError for all leaves whose specs do not fit (without a mesh: that have too many entries)."""
    wrong = {}
    for i, (x, spec, mesh) in enumerate(zip(leaves, specs, meshes, strict=True)):
        if isinstance(x, torch.Tensor):
            found = problems(spec, axes_of(mesh), x.ndim) if mesh is not None else too_long(spec, x.ndim)
            if found:
                wrong[i] = found
    if not wrong:
        return
    names = tree.paths(value, tree.spelling(value, "tree"))
    mesh = meshes[next(iter(wrong))]
    rows = [f"{names[i]} is {type_text(leaves[i].shape, leaves[i].dtype, WHOLE)}, its spec {specs[i]!r}: {problem}"
            for i, found in wrong.items() for problem in found]  # fmt: skip
    of = f" on the {mesh_text(axes_of(mesh))}" if mesh is not None else ""
    raise SpecError(report(where, f"{len(wrong)} spec{'s do' if len(wrong) > 1 else ' does'} not fit{of}", rows,
                           "each axis of the mesh at most once, and at most one entry a dim"))  # fmt: skip


def _keep_out_of_bodies(specs: Sequence[P], where: str) -> None:
    body = context.body()
    if body is not None:
        named = {a: spec for spec in specs for row in split_axes(spec, len(spec)) for a in row if a in body.axes}
        raise SpecError(
            report(
                where,
                "this is the body of a shard_map: its values are one rank's blocks, and its axes are manual",
                [f"axis {axis!r} of {spec!r} is manual here" for axis, spec in named.items()],
                "a collective (vfn.all_gather, vfn.psum_scatter, ...) in the body, or the spec in in_specs or out_specs",
            )
        )


def shard(tree_: Any, mesh: Any, spec: Any) -> Any:
    """Lay the tensors of a tree out on a mesh.

    Args:
        tree_: a tree of plain tensors, which are taken to be the same whole value on every rank, of arrays or of raw
            DTensors (which are resharded, from another mesh too); other leaves pass through. Any dtype, 0-d too.
        mesh: a DeviceMesh, all of whose ranks make this call.
        spec: a `P`, or a prefix tree of them.

    Returns:
        The tree with arrays in it. Nothing moves for plain tensors: each rank keeps its block. Differentiable: the
        cotangent goes back to where the value came from.

    Raises:
        SpecError: a spec that does not fit its value, the mesh or the tree; before anything moves.

    Source: `jax.device_put` with a `NamedSharding`; `torch.distributed.tensor.distribute_tensor`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((4,), ("dp",))
    ...     tree = vfn.shard({"x": torch.arange(5), "n": 3}, mesh, P("dp"))
    ...     [block.tolist() for block in tree["x"].to_local().blocks], tree["n"]
    ([[0, 1], [2, 3], [4], []], 3)
    """
    leaves, treedef, specs = _specs(tree_, spec, "shard")
    _check(tree_, leaves, specs, [mesh] * len(leaves), "shard")
    _keep_out_of_bodies(specs, "shard")
    out = [
        _place(x, mesh, s, "shard") if isinstance(x, torch.Tensor) else x for x, s in zip(leaves, specs, strict=True)
    ]
    return _rebuilt(treedef, out)


def with_sharding(tree_: Any, spec: Any, *, mesh: Any = None) -> Any:
    """State how the tensors of a tree lie, moving them if they lie otherwise.

    The gradient goes back to the layout that the input had: ``with_sharding(w, P())`` of a sharded weight is FSDP, a
    gather forward and a reduce-scatter backward. Without a mesh, on plain tensors, the program is running on one device
    and this is the identity.

    Args:
        tree_: a tree of tensors; other leaves pass through.
        spec: a `P`, or a prefix tree of them; under `vmap` of the unbatched dims.
        mesh: the mesh to use; by default an array's own, and for plain tensors the current one.

    Raises:
        SpecError: a spec that does not fit.

    Source: `jax.lax.with_sharding_constraint`, with the transpose of `jax.sharding.reshard`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> def f(x):
    ...     return vfn.with_sharding(x * 2, P("dp"))
    >>> f(torch.ones(4))
    tensor([2., 2., 2., 2.])
    >>> with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh((2,), ("dp",))):
    ...     vfn.spec_of(f(torch.ones(4)))
    P('dp')
    """
    leaves, treedef, specs = _specs(tree_, spec, "with_sharding")
    meshes = [mesh or mesh_of(x) or context.current_mesh() if isinstance(x, torch.Tensor) else None for x in leaves]
    _check(tree_, leaves, specs, meshes, "with_sharding")
    _keep_out_of_bodies(specs, "with_sharding")
    out = [x if m is None else _place(x, m, s, "with_sharding") for x, s, m in zip(leaves, specs, meshes, strict=True)]
    return _rebuilt(treedef, out)


def unshard(tree_: Any) -> Any:
    """The tree with plain, whole tensors: every rank gets the whole value.

    Plain tensors and other leaves pass through. Differentiable. All ranks of the mesh must make this call.

    Source: `torch.distributed.tensor.DTensor.full_tensor`.

    >>> import torch, vescale_fn as vfn
    >>> with vfn.simulate(2):
    ...     x = vfn.shard(torch.arange(3), vfn.make_mesh((2,), ("dp",)), vfn.P("dp"))
    ...     vfn.unshard({"x": x, "n": 1})
    {'x': tensor([0, 1, 2]), 'n': 1}
    """
    return tree.map_(lambda x: linear.apply(_Move(mesh_of(x), spec_of(x), None, "unshard"), x)[0] if is_array(x) else x,
                     tree_)  # fmt: skip


def from_local(tree_: Any, mesh: Any, spec: Any) -> Any:
    """Make arrays of the blocks that each rank has for itself: loaded data.

    Args:
        tree_: a tree of this rank's own blocks. A leaf may also be a function of this rank's coordinate
            (``{"dp": 1, "tp": 0}``) that gives its block, which is how a simulated mesh gets different blocks.
        mesh: a DeviceMesh, all of whose ranks make this call.
        spec: how the arrays lie, a `P` or a prefix tree. Along axes that it does not name, ranks must bring equal
            blocks.

    Raises:
        SpecError: blocks whose shapes or dtypes do not make one array, on every rank, with all of them listed.
        TypingError: a leaf that is an array already, or that is being differentiated: data is not.

    Source: `torch.distributed.tensor.DTensor.from_local`, `jax.make_array_from_process_local_data`.

    >>> import torch, vescale_fn as vfn
    >>> with vfn.simulate(2):
    ...     mesh = vfn.make_mesh((2,), ("dp",))
    ...     print(vfn.from_local(lambda coord: torch.full((2,), coord["dp"]), mesh, vfn.P("dp")))
    Array i64[4@dp] on mesh (dp=2)
    tensor([0, 0, 1, 1])
    """
    leaves, treedef, specs = _specs(tree_, spec, "from_local")
    names = tree.paths(tree_, tree.spelling(tree_, "tree"))
    _check_data(leaves, names)
    ranks = played_ranks(mesh)
    mine: list[list[Any]] = []
    for leaf in leaves:
        if callable(leaf) and not isinstance(leaf, torch.Tensor):
            row = [leaf(dict(coordinates(mesh, rank))) for rank in ranks]
        else:
            row = [leaf.blocks[rank] if type(leaf) is Blocks else leaf for rank in ranks]
        mine.append([_on_device(x, mesh) if isinstance(x, torch.Tensor) else x for x in row])
    seen = [[(tuple(b.shape), b.dtype) if isinstance(b, torch.Tensor) else None for b in row] for row in mine]
    by_rank = wire.everyone(seen, mesh)  # [rank][leaf] -> (shape, dtype)
    out, failures = [], []
    for i, (name, s) in enumerate(zip(names, specs, strict=True)):
        metas = [row[i] for row in by_rank]
        if metas[0] is None:
            out.append(mine[i][0])
            continue
        shape = _joined_shape(metas, mesh, s, name, failures)
        if shape is not None:
            local = Blocks(mine[i]) if is_simulated(mesh) else mine[i][0]
            out.append(_wrap(_packed(local), mesh, s, torch.Size(shape)))
    if failures:
        raise SpecError(report("from_local", f"the ranks' blocks do not make up arrays on the {mesh_text(axes_of(mesh))}",
                               failures, "give each rank the block that vfn.shard_shape and torch.chunk give it"))  # fmt: skip
    return _rebuilt(treedef, out)


def _check_data(leaves: Sequence[Any], names: Sequence[str]) -> None:
    failures = []
    for x, name in zip(leaves, names, strict=True):
        if is_array(x):
            failures.append(
                f"{name} is an array already, {type_text(x.shape, x.dtype, spec_of(x))}: vfn.shard moves it"
            )
        elif isinstance(x, torch.Tensor) and (x.requires_grad or _torch.peel(x) is not x):
            failures.append(f"{name} is differentiated or mapped over, which ends here: x.detach(), or vfn.shard_map")
    if failures:
        raise TypingError(
            report("from_local", "a block must be data: a plain tensor that nothing transforms", failures)
        )


def _joined_shape(metas: Sequence[Any], mesh: Any, spec: P, name: str, failures: list[str]) -> Any:
    axes = axes_of(mesh)
    listed = ", ".join(f"rank {r}: {m and type_text(m[0], m[1], WHOLE)}" for r, m in enumerate(metas))
    if any(m is None or m[1] != metas[0][1] or len(m[0]) != len(metas[0][0]) for m in metas):
        failures.append(f"{name} differs in dtype or number of dims: {listed}")
        return None
    validate(spec, axes, len(metas[0][0]), "from_local", name)
    coords = [coordinates(mesh, rank) for rank in range(len(metas))]
    shape = []
    for dim, names in enumerate(split_axes(spec, len(metas[0][0]))):
        places = {tuple(c[a] for a in names): m[0][dim] for c, m in zip(coords, metas, strict=True)}
        shape.append(sum(places.values()))
    for coord, meta in zip(coords, metas, strict=True):
        if tuple(map(len, local_indices(shape, axes, spec, coord))) != meta[0]:
            failures.append(f"{name} with {spec!r} would be {list(shape)}, split as torch.chunk does, but the blocks are "
                            f"{listed}")  # fmt: skip
            return None
    return shape


def from_blocks(make_block: Callable[[dict[str, int]], torch.Tensor], shape: Sequence[int], dtype: torch.dtype, mesh: Any,
                spec: P) -> Array:  # fmt: skip
    """The array of `shape` of which each rank makes its own block: ``make_block(coordinate)``, once a distinct block."""
    names = [axis for row in split_axes(spec, len(shape)) for axis in row]
    made: dict[Any, torch.Tensor] = {}

    def block(rank: int) -> torch.Tensor:
        coord = coordinates(mesh, rank)
        place = tuple(coord[name] for name in names)
        if place not in made:
            made[place] = make_block(dict(coord))
        return made[place]

    row = [block(rank) for rank in played_ranks(mesh)]
    return _wrap(Blocks(row) if is_simulated(mesh) else row[0], mesh, spec, torch.Size(shape))
