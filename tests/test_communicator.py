"""A third kind of communicator: a process that plays several of a mesh's ranks beside other processes that play the rest.

It is here to hold the seam: what stands above asks a mesh's communicator, not whether the mesh is simulated.
"""

import functools
import math

import torch
import torch.distributed as dist

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core import torch_internals
from vescale_fn._core.distributed.blocks import Blocks
from vescale_fn._core.distributed.communicator import Simulated
from vescale_fn._core.distributed.mesh import SimulatedMesh, communicator_of


class Several(Simulated):
    """Each process plays as many ranks; every block goes to every process, which then does what a simulation does."""

    all_here = False

    def __init__(self, mesh):
        super().__init__(mesh)
        k = len(self.ranks) // dist.get_world_size()
        self.ranks = range(k * dist.get_rank(), k * dist.get_rank() + k)

    def processes(self, axes=None):
        return list(range(dist.get_world_size()))

    def carry_out(self, kind, x, axes, params, later=False, **how):
        out = super().carry_out(kind, Blocks(self._of_all(list(x.blocks))), axes, params)
        return Blocks(out.blocks[rank] for rank in self.ranks)

    def everyone(self, mine, why):
        return self._of_all([list(leaves) for leaves in zip(*mine, strict=True)])

    def _of_all(self, mine):
        found = [None] * dist.get_world_size()
        with torch_internals.no_transforms(), torch_internals.no_torch_function():
            dist.all_gather_object(found, [x.detach() if isinstance(x, torch.Tensor) else x for x in mine])
        return [x for row in found for x in row]


class SharedMesh(SimulatedMesh):
    communicator = Several

    @property
    def _key(self):
        return *super()._key, "shared"


def make(sizes, names):
    return torch_internals.unattached_mesh("cpu", torch.arange(math.prod(sizes)).view(sizes), names, SharedMesh)


X, Y = torch.arange(48.0).view(8, 6) / 48, torch.arange(24.0).view(6, 4).cos()


def programs(m):
    """Programs on arrays, and in bodies; the same on every process."""
    x, y, z = vfn.shard(X, m, P("dp", "tp")), vfn.shard(Y, m, P("tp")), vfn.shard(X[:7, :5], m, P(("dp", "tp")))
    mapped = lambda body, spec=P("dp", "tp"): vfn.shard_map(body, mesh=m, in_specs=P("dp", "tp"), out_specs=spec)
    yield "psum", mapped(lambda v: v * vfn.psum(v, "tp"))(x)
    yield "both axes", mapped(lambda v: vfn.psum(v.sum(), ("dp", "tp")), P())(x)
    yield "pmax", mapped(lambda v: vfn.pmax(v, "dp"), P(None, "tp"))(x)
    yield "all_gather", mapped(lambda v: vfn.all_gather(v, "dp", tiled=True).sin()[:4])(x)
    yield "psum_scatter", mapped(lambda v: vfn.psum_scatter(v, "dp", tiled=True))(x)
    yield "all_to_all", mapped(lambda v: vfn.all_to_all(v, "dp", 0, 0, tiled=True))(x)
    yield "ppermute", mapped(lambda v: vfn.ppermute(v, "dp", [(0, 1), (1, 0)]))(x)
    yield "axis_index", mapped(lambda v: v + vfn.axis_index("tp"))(x)
    yield "a buffer", mapped(lambda v: torch.zeros(4, 3).add_(v))(x)
    yield "gradient", vfn.grad(lambda v: mapped(lambda u: (u * vfn.psum(u, "dp")).sin())(v).square().sum())(x)
    yield "op", torch.relu(x @ y) + 1
    yield "gradient of an op", vfn.grad(lambda w: torch.relu(x @ w).square().mean())(y)
    yield "uneven", z.cumsum(0)
    yield "resharded", vfn.with_sharding(z, P(None, "dp"))
    yield "reduced", x.softmax(1).amax(0)
    yield "views", x.t().reshape(12, 4).contiguous()
    yield "written", vfn.shard(X, m, P("dp")).clone().mul_(2)
    yield "normal", vfn.random.normal(vfn.random.key(3), (5, 4), spec=P("tp"), mesh=m)
    yield "gamma", vfn.random.gamma(vfn.random.key(1), 2.0, (8,), spec=P("dp"), mesh=m)
    yield "dropout", vfn.random.dropout(vfn.random.key(1), x, 0.5)
    yield "permutation", vfn.random.permutation(vfn.random.key(1), 8, spec=P("dp"), mesh=m)
    yield "vmap", vfn.vmap(lambda v: (v * v).sum())(x)
    yield (
        "no types",
        vfn.shard_map(lambda v: vfn.psum(v, "tp"), mesh=m, in_specs=P("dp", "tp"), out_specs=P("dp"), check_vma=False)(
            x
        ),
    )
    yield (
        "one axis",
        vfn.shard_map(lambda v: vfn.psum(v @ Y, "dp"), mesh=m, in_specs=P("dp"), out_specs=P(), axis_names={"dp"})(x),
    )
    part = vfn.shard(X, m, P("dp")).clone()
    part[2:5].mul_(2)
    yield "written by a view", part
    step = vfn.jit(vfn.grad(lambda w, v: torch.relu(v @ w).square().mean()))
    yield "plan", [step(y, x), step(y, x)][1]
    with vfn.debug():
        yield "compared", mapped(lambda v: vfn.psum(v, "tp") + v)(x)
    yield "item", torch.tensor((x @ y).sum().item())
    yield "from_local", vfn.from_local(lambda at: torch.tensor([at["dp"] * 10 + at["tp"]]), m, P(("dp", "tp")))


def run(make_mesh):
    m = make_mesh((2, 2), ("dp", "tp"))
    return list(communicator_of(m).ranks), {name: vfn.unshard(out) for name, out in programs(m)}


def _two_ranks_a_process(path):
    m = make((2, 2), ("dp", "tp"))
    vfn.save(path, vfn.shard(X, m, P("dp", "tp")))
    assert torch.equal(vfn.unshard(vfn.load(path, vfn.shard(X * 0, m, P("tp")))), X)
    vfn.check_parity(lambda v: v.softmax(0), vfn.shard(X, m, P("dp", "tp")))
    return run(make)


def test_a_process_plays_two_of_four_ranks(gloo, tmp_path) -> None:
    with vfn.simulate(4):
        _, expected = run(vfn.make_mesh)
    for process, (ranks, found) in enumerate(gloo(2, functools.partial(_two_ranks_a_process, str(tmp_path / "x")))):
        assert ranks == [2 * process, 2 * process + 1]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
