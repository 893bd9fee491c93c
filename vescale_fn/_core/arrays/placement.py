"""`shard`, `with_sharding`, `unshard`, `from_local`: trees of tensors to a mesh, to another layout, and back.

`shard`, `with_sharding`, `unshard` and `from_local` check all leaves first, and say all that is wrong before anything moves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import context, tree
from ..base.containers import SPLIT_NUMBERS, checked, opened, split_numbers
from ..base.errors import MeshError, SpecError, VaryingTypeError, VfnError
from ..base.front_door import public
from ..base.messages import described, mesh_text, report, short
from ..distributed.abstract_mesh import AbstractMesh
from ..distributed.communicator import coordinates
from ..distributed.mesh import communicator_of, same
from ..distributed.places import at_of, nothing, place_of, resolved, there, whole_mesh
from ..local_types import replica_check
from ..sharding.index_map import axes_of, local_indices, local_shape
from ..sharding.layout import WHOLE, layout, type_text
from ..sharding.named_sharding import without_mesh
from ..sharding.spec import (
    KEYS,
    P,
    as_spec,
    axes_named,
    is_spec,
    keys_taken_apart,
    problems,
    split_axes,
    too_long,
    validate,
    with_place,
)
from ..sharding.spec_trees import are_rules, spec_from_rules
from .aliasing import note_elsewhere
from .array import (
    Array,
    entries_asked,
    is_array,
    mesh_of,
    moved_as_one,
    moved_together,
    on_device,
    place,
    whole,
    wrap,
)
from .array import spec_of as spec_among_ranks
from .strides import packed


def _specs(value: Any, spec: Any, where: str) -> tuple[list[Any], Any, list[P]]:
    """The leaves of a tree, its structure, and the spec of each leaf."""
    if are_rules(spec):
        spec = spec_from_rules(value, spec)
    if isinstance(value, torch.Tensor) and isinstance(spec, P):
        return [value], None, [spec]
    leaves, treedef = opened(value, where, functools.partial(_names, value), numpy=torch.as_tensor)
    if treedef.num_nodes == 1 and not isinstance(spec, P):
        is_spec(spec, where)
    specs = tree.broadcast(spec, value, where, "spec", _generic(value))
    if not all(isinstance(s, P) for s in specs):
        wrong = {n: s for n, s in zip(_names(value), specs, strict=True) if not isinstance(s, P)}
        raise SpecError(
            report(
                where,
                "every spec must be a vfn.P",
                [f"the spec of {n} is {short(s)}" for n, s in wrong.items()],
                as_spec(next(iter(wrong.values()))),
            )
        )
    if alone := split_numbers(spec, value, leaves, axes_named):
        names = _names(value)
        raise SpecError(
            report(
                where,
                "a spec splits a number, which has no dims",
                [f"{names[i]} is {described(leaves[i])}, its spec {specs[i]!r}" for i in alone],
                SPLIT_NUMBERS,
            )
        )
    return leaves, treedef, specs


def _names(value: Any) -> list[str]:
    """The path of each leaf, in the user's words."""
    return tree.paths(value, tree.spelling(value, _generic(value)))


def _generic(value: Any) -> str:
    """What to call a value that the user's code has no name for."""
    return "tree" if isinstance(value, (dict, list, tuple)) else "the value"


def _rebuilt(treedef: Any, leaves: list[Any]) -> Any:
    return leaves[0] if treedef is None else tree.unflatten(treedef, leaves)


_FITTING = "each axis of the mesh at most once, and at most one entry a dim"


def _check(value: Any, leaves: Sequence[Any], specs: Sequence[P], meshes: Sequence[Any], where: str) -> None:
    """Raise one SpecError for all leaves whose specs do not fit (without a mesh: that have too many entries)."""
    wrong = {}
    for i, (x, spec, mesh) in enumerate(zip(leaves, specs, meshes, strict=True)):
        if isinstance(x, torch.Tensor):
            found = (
                problems(spec, axes_of(whole_mesh(mesh)), x.ndim, at=True)
                if mesh is not None
                else too_long(spec, x.ndim)
            )
            found = [(problem, _FITTING) for problem in found]
            if not found and x.dtype is torch.int32 and tree.leaves_in_opaque(value)[i]:
                found = [(problem, KEYS) for problem in keys_taken_apart(spec, x.ndim)]
            if mesh is not None and x.layout is not torch.strided:
                found.append(
                    (f"its memory format is {x.layout}, and only strided tensors can be laid out", "x.to_dense()")
                )
            ours = type(x) not in (torch.Tensor, torch.nn.Parameter) or isinstance(mesh, AbstractMesh)
            if mesh is not None and x.is_meta and not ours:
                found.append(
                    (
                        "it is on the meta device, so it has no values to lay out",
                        "a tensor with values: made on a device, drawn with spec=, or loaded; for shapes alone vfn.ShapeDtype",
                    )
                )
            if found:
                wrong[i] = found
    if not wrong:
        return
    names = _names(value)
    mesh = meshes[next(iter(wrong))]
    rows = [
        f"{names[i]} is {type_text(leaves[i].shape, leaves[i].dtype, WHOLE)}, its spec {specs[i]!r}: {problem}"
        for i, found in wrong.items()
        for problem, _ in found
    ]
    of = f" on the {mesh_text(axes_of(mesh))}" if mesh is not None else ""
    ways = dict.fromkeys(way for found in wrong.values() for _, way in found)
    raise SpecError(
        report(where, f"{len(wrong)} spec{'s do' if len(wrong) > 1 else ' does'} not fit{of}", rows, "; ".join(ways))
    )


def _checked_mesh(mesh: Any, spec: Any, where: str) -> None:
    if isinstance(mesh, P) and hasattr(spec, "mesh_dim_names"):
        raise MeshError(
            report(
                where,
                "the mesh and the spec have changed places",
                [f"mesh is {mesh!r}", f"spec is the {mesh_text(axes_of(spec))}"],
                f"vfn.{where}(tree, mesh, spec)",
            )
        )
    communicator_of(context.checked_mesh(mesh, where)).check_takes_part()


def _mesh_here(specs: Sequence[P], mesh: Any, where: str) -> Any:
    """`mesh`; in the body of a `shard_map` the part of it along which values are whole there."""
    body = context.body()
    if body is None or (body.auto is not None and same(mesh, body.auto)):
        return mesh
    named = {a: spec for spec in specs for a in axes_named(spec) if a in body.axes}
    if body.auto is None or named:
        raise SpecError(
            report(
                where,
                "this is the body of a shard_map: its values are one rank's blocks"
                + (
                    f" along {', '.join(map(repr, body.axes))}"
                    if body.auto is not None
                    else ", and its axes are manual"
                ),
                [f"axis {axis!r} of {spec!r} is manual here" for axis, spec in named.items()],
                "a collective (vfn.all_gather, vfn.psum_scatter, ...) in the body, or the spec in in_specs or out_specs",
            )
        )
    if mesh is not None and not same(mesh, body.mesh):
        raise MeshError(
            report(
                where,
                "this is the body of a shard_map on another mesh",
                [f"it is on the {mesh_text(axes_of(body.mesh))}, not the {mesh_text(axes_of(mesh))}"],
                "no mesh=: the body's is used",
            )
        )
    return body.auto


T = TypeVar("T")  # a tree


@overload
def shard(tree_: torch.Tensor, mesh: DeviceMesh, spec: Any) -> Array: ...
@overload
def shard(tree_: T, mesh: DeviceMesh, spec: Any) -> T: ...
@torch_internals.not_compiled
@public("shard")
def shard(tree_: Any, mesh: Any, spec: Any) -> Any:
    """Lay the tensors of a tree out on a mesh.

    Args:
        tree_: a tree of plain tensors or numpy arrays, which are taken to be the same whole value on every rank, of
            arrays or of raw DTensors (which are resharded, from another mesh too); other leaves pass through. Any
            dtype, 0-d too. A tensor that every rank is to hold whole is shared, not copied.
        mesh: a DeviceMesh, all of whose ranks make this call.
        spec: a `P`, a prefix tree of them, or a list of rules for `spec_from_rules`; or another array's ``sharding``.

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
    _checked_mesh(mesh, spec, "shard")
    spec, mesh = without_mesh(spec, mesh, "shard")
    leaves, treedef, specs = _specs(tree_, spec, "shard")
    mesh = _mesh_here(specs, mesh, "shard")
    _check(tree_, leaves, specs, [mesh] * len(leaves), "shard")
    if context.on_one_device() and context.body() is None:
        out = unshard(_rebuilt(treedef, leaves))
        context.record("shard", leaves, out)
        return out
    if replica_check.looked_for():
        replica_check.same_plain("shard", mesh, zip(_names(tree_), leaves, strict=True))
    out = [
        place(x, *resolved(mesh, s), "shard") if isinstance(x, torch.Tensor) else x
        for x, s in zip(leaves, specs, strict=True)
    ]
    context.record("shard", leaves, out)
    return _rebuilt(treedef, out)


@torch_internals.not_compiled
@torch_internals.seen_whole
@public("with_sharding")
def with_sharding(tree_: Any, spec: Any, *, mesh: Any = None) -> Any:
    """State how the tensors of a tree lie, moving them if they lie otherwise.

    The gradient goes back to the layout that the input had: ``with_sharding(w, P())`` of a sharded weight is FSDP, a
    gather forward and a reduce-scatter backward; the leaves of a tree travel as one (up to 64 MiB at a time), and so do their
    gradients, when all are known. Without a mesh, on plain tensors, the program is running on one device
    and this is the identity.

    Args:
        tree_: a tree of tensors; other leaves pass through.
        spec: a `P`, or a prefix tree of them; under `vmap` of the unbatched dims; or another array's ``sharding``.
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
    if mesh is not None:
        context.checked_mesh(mesh, "with_sharding")
    spec, mesh = without_mesh(spec, mesh, "with_sharding")
    leaves, treedef, specs = _specs(tree_, spec, "with_sharding")
    here = _mesh_here(specs, mesh, "with_sharding") if context.body() is not None else mesh
    meshes = [
        here or whole_mesh(mesh_of(x)) or context.current_mesh() if isinstance(x, torch.Tensor) else None
        for x in leaves
    ]
    _check(tree_, leaves, specs, meshes, "with_sharding")
    if context.on_one_device() and context.body() is None:
        whole = unshard(tree_)
        context.record("with_sharding", leaves, whole)
        return whole
    if context.entries_over():
        for x, m, s in zip(leaves, meshes, specs, strict=True):
            if m is not None and torch_internals.is_batched(x):
                entries_asked("with_sharding", axes_named(s), m)
    plain = (isinstance(x, torch.Tensor) and not isinstance(torch_internals.peel(x), DTensor) for x in leaves)
    if replica_check.looked_for() and any(plain):  # names hold what the user's variables hold
        for one in dict.fromkeys(meshes):
            named = zip(_names(tree_), leaves, meshes, strict=True)
            replica_check.same_plain("with_sharding", one, ((name, x) for name, x, m in named if m is one))
    meshes, specs = map(list, zip(*map(resolved, meshes, specs))) if leaves else ([], [])
    out = list(leaves)
    sums = [i for i, x in enumerate(leaves) if _is_finished_sum(x, meshes[i], specs[i])]
    found = dict(zip(sums, moved_together([leaves[i] for i in sums], [specs[i] for i in sums], "with_sharding")))
    found |= _moved_as_one(leaves, meshes, specs, found)
    for i, (x, m, s) in enumerate(zip(leaves, meshes, specs, strict=True)):
        if m is not None:
            out[i] = found[i] if i in found else place(x, m, s, "with_sharding")
    for x, y in zip(leaves, out, strict=True):
        if y is not x and is_array(x):  # on one device the two are one: a write to either is to be seen in both
            note_elsewhere(torch_internals.peel(x), torch_internals.peel(y))
    context.record("with_sharding", leaves, out)
    return _rebuilt(treedef, out)


def _moved_as_one(
    leaves: Sequence[Any], meshes: Sequence[Any], specs: Sequence[P], done: dict[int, Any]
) -> dict[int, Any]:
    """Those leaves of a tree, by their places, that are arrays of one mesh and move: their collectives are one."""
    moving: dict[Any, list[int]] = {}
    for i, (x, mesh, spec) in enumerate(zip(leaves, meshes, specs, strict=True)):
        if i not in done and mesh is not None and isinstance(torch_internals.peel(x), Array) and same(mesh_of(x), mesh):
            if spec_among_ranks(x) != spec:
                moving.setdefault(mesh, []).append(i)
    out: dict[int, Any] = {}
    for mesh, members in moving.items():
        if len(members) > 1 and not torch_internals.is_recorded():  # of what is recorded a pass makes buckets, by size
            found = moved_as_one([leaves[i] for i in members], mesh, [specs[i] for i in members], "with_sharding")
            out |= dict(zip(members, found, strict=True))
    return out


def _is_finished_sum(x: Any, mesh: Any, spec: P) -> bool:
    """Whether `x`, which no transform follows any more, is an array on `mesh` that is to be added over ranks for `spec`."""
    if not isinstance(x, Array) or not same(torch_internals.mesh(x), mesh):
        return False
    over = layout(torch_internals.spec(x)).unreduced - spec.unreduced
    if all(axes_of(mesh)[axis] == 1 for axis in over):
        return False
    return not (
        torch_internals.transforming()
        or torch_internals.forward_ad_active()
        or (torch.is_grad_enabled() and x.requires_grad)
    )


@overload
def unshard(tree_: torch.Tensor) -> torch.Tensor: ...
@overload
def unshard(tree_: T) -> T: ...
@torch_internals.not_compiled
@public("unshard")
def unshard(tree_: Any) -> Any:
    """The tree with plain, whole tensors: every rank gets the whole value.

    Plain tensors and other leaves pass through. Differentiable. All ranks of the mesh must make this call. The result of
    an array that every rank holds whole shares its memory, as `torch.Tensor.detach` does; clone it before writing to it.

    Source: `torch.distributed.tensor.DTensor.full_tensor`.

    >>> import torch, vescale_fn as vfn
    >>> with vfn.simulate(2):
    ...     x = vfn.shard(torch.arange(3), vfn.make_mesh((2,), ("dp",)), vfn.P("dp"))
    ...     vfn.unshard({"x": x, "n": 1})
    {'x': tensor([0, 1, 2]), 'n': 1}
    """
    checked(tree_, "unshard", functools.partial(_names, tree_), numpy=True)
    return tree.map_(lambda x: whole(x) if is_array(x) else x, tree_)


@torch_internals.not_compiled
def from_local(tree_: Any, mesh: Any, spec: Any) -> Any:
    """Make arrays of the blocks that each rank has for itself: loaded data.

    Args:
        tree_: a tree of this rank's own blocks. A leaf may also be a function of this rank's coordinate
            (``{"dp": 1, "tp": 0}``) that gives its block, which is how a simulated mesh gets different blocks. Where a spec
            says ``at``, only the ranks there are asked, and the tensors that others bring in its place are not looked at.
        mesh: a DeviceMesh, all of whose ranks make this call.
        spec: how the arrays lie, a `P` or a prefix tree. Along axes that it does not name, ranks must bring equal
            blocks.

    Raises:
        SpecError: blocks whose shapes or dtypes do not make one array, on every rank, with all of them listed.
        VaryingTypeError: a leaf that is an array already, or that is being differentiated: data is not.

    Source: `torch.distributed.tensor.DTensor.from_local`, `jax.make_array_from_process_local_data`.

    >>> import torch, vescale_fn as vfn
    >>> with vfn.simulate(2):
    ...     mesh = vfn.make_mesh((2,), ("dp",))
    ...     print(vfn.from_local(lambda coord: torch.full((2,), coord["dp"]), mesh, vfn.P("dp")))
    Array i64[4@dp] on mesh (dp=2)
    tensor([0, 0, 1, 1])
    """
    _checked_mesh(mesh, spec, "from_local")
    spec, mesh = without_mesh(spec, mesh, "from_local")
    if context.on_one_device():  # what the ranks have loaded, put together
        with context.one_device(None):
            return unshard(from_local(tree_, mesh, spec))
    ranks = communicator_of(mesh).ranks
    names: list[str] = []
    mine: list[list[Any]] = []
    error = None
    try:
        leaves, treedef, specs = _specs(tree_, spec, "from_local")
        names = _names(tree_)
        mine = _own_blocks(leaves, names, specs, mesh, ranks)
    except VfnError as raised:
        error = raised  # on all ranks together: see below
    head = (names, error and str(error).splitlines()[0])
    bits = replica_check.digest if context.watch() is not None else lambda block: ""
    seen = [[(tuple(b.shape), b.dtype, bits(b)) if isinstance(b, torch.Tensor) else None for b in row] for row in mine]
    by_rank = communicator_of(mesh).everyone(
        [[head] * len(ranks), *seen], "from_local"
    )  # [rank][1 + leaf] -> (shape, dtype, bits)
    if error is not None:
        raise error
    heads, by_rank = [row[0] for row in by_rank], [row[1:] for row in by_rank]
    if any(other != head for other in heads):
        rows = [
            f"rank {rank} {f'fails: {problem}' if problem else f'brings {found}'}"
            for rank, (found, problem) in enumerate(heads)
        ]
        raise SpecError(report("from_local", "the ranks must bring trees of one structure", rows))
    out, failures = [], []
    for i, (name, s) in enumerate(zip(names, specs, strict=True)):
        metas = {rank: row[i] for rank, row in enumerate(by_rank) if holds(s, coordinates(mesh, rank))}
        if not any(metas.values()):
            out.append(mine[i][0])
            continue
        shape = _joined_shape(metas, mesh, s, name, failures)
        if shape is not None:
            out.append(of_blocks(mine[i], torch.Size(shape), next(iter(metas.values()))[1], *resolved(mesh, s)))
    if failures:
        raise SpecError(
            report(
                "from_local",
                f"the ranks' blocks do not make up arrays on the {mesh_text(axes_of(mesh))}",
                failures,
                "give each rank the block that vfn.shard_shape and torch.chunk give it",
            )
        )
    return _rebuilt(treedef, out)


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
    found = spec_among_ranks(x)
    return found if (mesh := mesh_of(x)) is None else with_place(found, at_of(mesh))


def holds(spec: P, coord: Mapping[str, int]) -> bool:
    """Whether the rank at `coord` has a block of what lies as `spec`."""
    return all(coord[axis] in row for axis, row in spec.at)


def of_blocks(mine: Sequence[Any], shape: torch.Size, dtype: torch.dtype, mesh: Any, spec: P) -> Array:
    """The array of the blocks of the ranks played here, of which those elsewhere have none."""
    communicator = communicator_of(mesh)
    if communicator.is_elsewhere:
        return _stand_in(shape, dtype, mesh, spec)
    place = place_of(mesh)
    blocks = mine if place is None or not communicator.holds_blocks else there(place, mine)
    return wrap(packed(communicator.joined(blocks)), mesh, spec, shape)


def _own_blocks(
    leaves: Sequence[Any], names: Sequence[str], specs: Sequence[P], mesh: Any, ranks: Sequence[int]
) -> list[list[Any]]:
    """For each leaf, the block of each rank that this process plays."""
    _check_data(leaves, names)
    mine = []
    for leaf, name, spec in zip(leaves, names, specs, strict=True):
        validate(spec, axes_of(mesh), None, "from_local", name, at=True)
        if callable(leaf) and not isinstance(leaf, torch.Tensor):
            asked = {rank: coord for rank in ranks if holds(spec, coord := coordinates(mesh, rank))}
            made = {rank: leaf(dict(coord)) for rank, coord in asked.items()}
            row = [made.get(rank) for rank in ranks]
            if not all(isinstance(x, (torch.Tensor, np.ndarray)) for x in made.values()):
                raise VaryingTypeError(
                    report(
                        "from_local",
                        "the function of the coordinate must give this rank's block, a tensor",
                        [f"{name} gave {described(x)}" for x in [*made.values()][:1]],
                    )
                )
        else:
            row = communicator_of(mesh).parts(leaf)
        row = [torch.as_tensor(x) if isinstance(x, np.ndarray) else x for x in row]
        mine.append([on_device(x, mesh) if isinstance(x, torch.Tensor) else x for x in row])
    return mine


def _check_data(leaves: Sequence[Any], names: Sequence[str]) -> None:
    failures = []
    for x, name in zip(leaves, names, strict=True):
        if is_array(x):
            failures.append(
                f"{name} is an array already, {type_text(x.shape, x.dtype, spec_among_ranks(x))}: vfn.shard moves it"
            )
        elif isinstance(x, torch.Tensor) and (x.requires_grad or torch_internals.peel(x) is not x):
            failures.append(f"{name} is differentiated or mapped over, which ends here: x.detach(), or vfn.shard_map")
    if failures:
        raise VaryingTypeError(
            report("from_local", "a block must be data: a plain tensor that nothing transforms", failures)
        )


def _joined_shape(by_rank: Mapping[int, Any], mesh: Any, spec: P, name: str, failures: list[str]) -> Any:
    axes, metas = axes_of(mesh), list[Any](by_rank.values())

    def listed() -> str:
        return ", ".join(f"rank {r}: {m and type_text(m[0], m[1], WHOLE)}" for r, m in by_rank.items())

    if any(m is None or not metas[0] or m[1] != metas[0][1] or len(m[0]) != len(metas[0][0]) for m in metas):
        failures.append(f"{name} differs in dtype or number of dims: {listed()}")
        return None
    validate(spec, axes, len(metas[0][0]), "from_local", name, at=True)
    alike = all(m == metas[0] for m in metas)
    ranks = [*by_rank][: 1 if alike else None]
    coords = [coordinates(mesh, rank) for rank in ranks]
    rows = split_axes(spec, len(metas[0][0]))
    shape = [_joined_size([m[0][dim] for m in metas], names, coords, axes) for dim, names in enumerate(rows)]
    for coord, meta in zip(coords, metas):
        if tuple(map(len, local_indices(shape, axes, spec, coord))) != meta[0]:
            failures.append(
                f"{name} with {spec!r} would be {list(shape)}, split as torch.chunk does, but the blocks are {listed()}"
            )
            return None
    own = [a for row in split_axes(spec, len(shape)) for a in row] + sorted(spec.unreduced)
    first: dict[Any, int] = {}  # of each piece, the rank that brings it; in debug mode others must bring the same
    for rank, coord in zip(ranks, coords):
        at = first.setdefault(tuple(coord[a] for a in own), rank)
        if by_rank[at][2] != by_rank[rank][2]:
            failures.append(
                f"{name} with {spec!r}: ranks {at} and {rank} bring the same piece, but their blocks differ"
            )
            return None
    return shape


def _joined_size(
    sizes: Sequence[int], names: Sequence[str], coords: Sequence[Mapping[str, int]], axes: Mapping[str, int]
) -> int:
    """The size of a dim split by `names`, of the ranks' sizes; with a single coordinate, of which all are alike."""
    if len(coords) == 1:
        return sizes[0] * math.prod(axes[a] for a in names)
    return sum({tuple(coord[a] for a in names): size for coord, size in zip(coords, sizes, strict=True)}.values())


def _stand_in(shape: torch.Size, dtype: torch.dtype, mesh: Any, spec: P) -> Array:
    """An array at another place than this rank."""
    communicator, device = communicator_of(mesh), torch.device(mesh.device_type)
    sizes = [local_shape(shape, axes_of(mesh), spec, coordinates(mesh, rank)) for rank in communicator.ranks]
    return wrap(communicator.joined([nothing(size, dtype, device) for size in sizes]), mesh, spec, shape)


def from_blocks(
    make_block: Callable[[dict[str, int]], torch.Tensor], shape: Sequence[int], dtype: torch.dtype, mesh: Any, spec: P
) -> Array:
    """The array of `shape` of which each rank makes its own block: ``make_block(coordinate)``, once a distinct block."""
    communicator = communicator_of(mesh)
    if communicator.is_elsewhere and not torch_internals.is_recorded():
        return _stand_in(torch.Size(shape), dtype, mesh, spec)
    names = [axis for row in split_axes(spec, len(shape)) for axis in row]
    made: dict[Any, torch.Tensor] = {}

    def block(rank: int) -> torch.Tensor:
        coord = coordinates(mesh, rank)
        place = tuple(coord[name] for name in names)
        if place not in made:
            made[place] = make_block(dict(coord))
        return made[place]

    return wrap(communicator.each(block), mesh, spec, torch.Size(shape))
