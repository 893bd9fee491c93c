"""The collectives one by one, each beside the plain loop over the ranks that says what it computes. A new one is a new line."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

import vescale_fn as vfn
from vescale_fn import P

# --- what the ranks of one group get, from the list of their blocks in the order of the axes: plain tensors, no mesh ----


def gathered(dim, tiled):
    def local(blocks):
        return [torch.cat(blocks, dim) if tiled else torch.stack(blocks, dim)] * len(blocks)

    return local


def scattered(dim, tiled):
    return lambda blocks: list(sum(blocks).chunk(len(blocks), dim) if tiled else sum(blocks).unbind(dim))


def exchanged(split, concat, tiled):
    def local(blocks):
        pieces = [b.chunk(len(blocks), split) if tiled else b.unbind(split) for b in blocks]
        join = torch.cat if tiled else torch.stack
        return [join([p[i] for p in pieces], concat) for i in range(len(blocks))]

    return local


def permuted(pairs):
    def local(blocks):
        source = {to: start for start, to in pairs(len(blocks))}
        return [blocks[source[i]] if i in source else torch.zeros_like(blocks[i]) for i in range(len(blocks))]

    return local


def summed(blocks):
    return [sum(blocks)] * len(blocks)


def meant(blocks):
    return [sum(blocks) / len(blocks)] * len(blocks)


def extreme(fold):
    return lambda blocks: [fold(torch.stack(blocks), 0)] * len(blocks)


def shift(n):
    return [(i, (i + 1) % n) for i in range(n)]


def one_pair(n):
    return [(1, 0)]


def my_rows(x, a):
    """Of a sum its rows from this rank's on."""
    return vfn.dynamic_slice(vfn.psum(x, a), [vfn.axis_index(a), 0], [1, 2])


# --- the list ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A collective: its call, the shape of a block for n ranks, what it computes, and whether all ranks get the same."""

    call: Callable
    shape: Callable
    local: Callable
    same: bool = False
    linear: bool = True


COLLECTIVES = {
    "psum": Line(lambda x, a: vfn.psum(x, a), lambda n: (3, 2), summed, same=True),
    "pmean": Line(lambda x, a: vfn.pmean(x, a), lambda n: (3, 2), meant, same=True),
    "pmax": Line(lambda x, a: vfn.pmax(x, a), lambda n: (3, 2), extreme(torch.amax), same=True, linear=False),
    "pmin": Line(lambda x, a: vfn.pmin(x, a), lambda n: (3, 2), extreme(torch.amin), same=True, linear=False),
    "psum of unreduced": Line(
        lambda x, a: vfn.psum(vfn.pcast(x, a, to="unreduced"), a), lambda n: (3, 2), summed, True
    ),
    "psum as reduced": Line(
        lambda x, a: vfn.pcast(vfn.pcast(vfn.psum(x, a), a, to="reduced"), a, to="varying"), lambda n: (3,), summed
    ),
    "pvary": Line(lambda x, a: vfn.pvary(vfn.psum(x, a), a), lambda n: (3,), summed),
    "pcast": Line(lambda x, a: vfn.pcast(vfn.psum(x, a), a, to="varying"), lambda n: (3,), summed),
    "all_gather": Line(lambda x, a: vfn.all_gather(x, a), lambda n: (3, 2), gathered(0, False)),
    "all_gather -1": Line(lambda x, a: vfn.all_gather(x, a, axis=-1), lambda n: (3, 2), gathered(-1, False)),
    "all_gather tiled 1": Line(
        lambda x, a: vfn.all_gather(x, a, axis=1, tiled=True), lambda n: (3, 2), gathered(1, True)
    ),
    "all_gather invarying": Line(
        lambda x, a: vfn.all_gather(x, a, axis=1, to="invarying"), lambda n: (3, 2), gathered(1, False), same=True
    ),
    "all_gather invarying tiled -2": Line(
        lambda x, a: vfn.all_gather(x, a, axis=-2, tiled=True, to="invarying"),
        lambda n: (3, 2),
        gathered(-2, True),
        same=True,
    ),
    "all_gather reduced tiled": Line(
        lambda x, a: vfn.pcast(vfn.all_gather(x, a, tiled=True, to="reduced"), a, to="varying"),
        lambda n: (3, 2),
        gathered(0, True),
    ),
    "psum_scatter": Line(lambda x, a: vfn.psum_scatter(x, a), lambda n: (n, 2), scattered(0, False)),
    "psum_scatter -1": Line(
        lambda x, a: vfn.psum_scatter(x, a, scatter_dimension=-1), lambda n: (3, n), scattered(-1, False)
    ),
    "psum_scatter tiled 1": Line(
        lambda x, a: vfn.psum_scatter(x, a, scatter_dimension=1, tiled=True), lambda n: (3, 2 * n), scattered(1, True)
    ),
    "all_to_all 0 0": Line(lambda x, a: vfn.all_to_all(x, a, 0, 0), lambda n: (n, 3, 2), exchanged(0, 0, False)),
    "all_to_all 0 2": Line(lambda x, a: vfn.all_to_all(x, a, 0, 2), lambda n: (n, 3, 2), exchanged(0, 2, False)),
    "all_to_all 1 0": Line(lambda x, a: vfn.all_to_all(x, a, 1, 0), lambda n: (3, n, 2), exchanged(1, 0, False)),
    "all_to_all -1 0": Line(lambda x, a: vfn.all_to_all(x, a, -1, 0), lambda n: (2, n), exchanged(-1, 0, False)),
    "all_to_all tiled 0 1": Line(
        lambda x, a: vfn.all_to_all(x, a, 0, 1, tiled=True), lambda n: (2 * n, 3), exchanged(0, 1, True)
    ),
    "all_to_all tiled -1 -1": Line(
        lambda x, a: vfn.all_to_all(x, a, -1, -1, tiled=True), lambda n: (2, 2 * n), exchanged(-1, -1, True)
    ),
    "ppermute": Line(lambda x, a: vfn.ppermute(x, a, shift(vfn.axis_size(a))), lambda n: (3, 2), permuted(shift)),
    "ppermute partial": Line(lambda x, a: vfn.ppermute(x, a, [(1, 0)]), lambda n: (3, 2), permuted(one_pair)),
    "pbroadcast": Line(lambda x, a: vfn.pbroadcast(x, a, 1), lambda n: (3, 2), lambda b: [b[1]] * len(b)),
    "axis_index": Line(lambda x, a: x * vfn.axis_index(a), lambda n: (3,), lambda b: [x * i for i, x in enumerate(b)]),
    "dynamic_slice": Line(my_rows, lambda n: (n, 2), lambda b: list(sum(b).split(1))),
}
LINEAR = [name for name, line in COLLECTIVES.items() if line.linear]

# --- a collective as a function of the blocks of all ranks, stacked along one dim for each mesh axis --------------------

MESH = {"x": 2, "y": 3}


def names_of(axis):
    return (axis,) if isinstance(axis, str) else axis


def size_of(axis, mesh=MESH):
    return math.prod(mesh[name] for name in names_of(axis))


def stacked(shape, seed=0, mesh=MESH, dtype=torch.float64):
    """Small integers, so that sums and products are exact; no two alike by chance alone."""
    values = torch.randint(-4, 5, (*mesh.values(), *shape), generator=torch.Generator().manual_seed(seed))
    return (values % 2 == 0) if dtype is torch.bool else values.to(dtype)


def oracle(x, axis, line, mesh=MESH):
    """What a line computes, by a loop over the groups; the dims of axes along which the result is the same are gone."""
    order = list(mesh)
    blocks = {at: x[at] for at in itertools.product(*map(range, mesh.values()))}
    places = [order.index(name) for name in names_of(axis)]
    groups = {}
    for at in sorted(blocks, key=lambda at: [at[i] for i in places]):  # within a group: major first
        groups.setdefault(tuple(n for i, n in enumerate(at) if i not in places), []).append(at)
    outs = {}
    for members in groups.values():
        outs.update(zip(members, line.local([blocks[at] for at in members]), strict=True))
    whole = torch.stack([outs[at] for at in sorted(outs)]).view(*mesh.values(), *next(iter(outs.values())).shape)
    for place in sorted(places, reverse=True) if line.same else ():
        whole = whole.select(place, 0)
    return whole


def mapped(call, axis, same, mesh, **options):
    """The same on a mesh."""
    gone = names_of(axis) if same else ()

    def body(x):
        out = call(x.reshape(x.shape[2:]), axis)
        return out.reshape(*(1 for name in MESH if name not in gone), *out.shape)

    out_specs = P(*(name for name in MESH if name not in gone))
    return vfn.shard_map(body, mesh=mesh, in_specs=P("x", "y"), out_specs=out_specs, **options)
