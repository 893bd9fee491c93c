"""`vfn.check` finds the classical mistakes of distributed programs, names them, and lets their right twins pass."""

import torch

import vescale_fn as vfn
from vescale_fn import P, context
from vescale_fn.mesh import unit

# --- a program for a mesh on one device -------------------------------------------------------------------------------


def test_on_one_device_every_mesh_has_one_rank() -> None:
    x, key = torch.randn(8, 6), vfn.random.key(0)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))

        @vfn.shard_map(mesh=mesh, in_specs=(P("dp", "tp"),), out_specs=P("dp"))
        def rows(x):
            assert vfn.axis_size(("dp", "tp")) == 1
            noise = vfn.random.normal(key, (8, 6), spec=P("dp", "tp"), mesh=mesh)
            gathered = vfn.all_gather(x + noise, "tp", axis=1, tiled=True, to="invarying")
            return gathered.sum(1) + vfn.axis_index("dp") + vfn.psum(x.sum(1), "tp")

        with vfn.use_mesh(mesh), context.one_device(unit):
            seen = vfn.current_mesh()
            assert seen.size() == 1 and seen.mesh_dim_names == ("dp", "tp")
            assert vfn.make_mesh((2, 2), ("dp", "tp")) is seen
            values = [
                rows(x),
                vfn.shard(x, mesh, P("dp")),
                vfn.with_sharding(x, P("tp")),
                vfn.random.normal(key, (8, 6), spec=P("dp", "tp")),
                vfn.from_local(lambda coord: torch.full((2,), coord["dp"]), mesh, P("dp")),
            ]
        assert vfn.current_mesh() is None
    noise = vfn.random.normal(key, (8, 6))
    wanted = [(x + noise).sum(1) + x.sum(1), x, x, noise, torch.tensor([0, 0, 1, 1])]
    for value, want in zip(values, wanted, strict=True):
        assert type(value) is torch.Tensor and torch.equal(value, want)


def test_what_is_computed_again_in_a_backward_pass_stays_on_one_device() -> None:
    x = torch.randn(8)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("dp",))
        total = vfn.shard_map(lambda x: vfn.psum((x**2).sum(), "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P())
        with vfn.use_mesh(mesh), context.one_device(unit):
            found = vfn.grad(vfn.remat(total))(x)
    assert type(found) is torch.Tensor and torch.equal(found, 2 * x)
