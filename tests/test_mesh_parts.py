"""A part of a mesh is a mesh: some of its axes, or the ranks at one place of an axis; on simulated ranks as on real ones."""

import copy
import pickle

import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import MeshError

W, X = torch.arange(24.0).view(4, 6) / 24, torch.arange(32.0).view(8, 4) / 32
PARTS = {
    "dp": lambda m: m["dp"],
    "dp, tp": lambda m: m["dp", "tp"],
    "a stage": lambda m: m.at(pp=1),
    "an axis of a stage": lambda m: m.at(pp=1)["dp"],
    "two places": lambda m: m.at(pp=1).at(tp=0),
    "the outer axes": lambda m: m["pp", "dp"],
}


def loss(w, x):
    return torch.relu(x @ w).square().mean()


def values(mesh):
    """What programs give on a mesh, uneven blocks among them; beside it what they give on one device."""
    a, b = mesh.axis_names[0], mesh.axis_names[-1]
    w = vfn.shard(W, mesh, P(None, b))
    x = vfn.shard(X, mesh, P(a) if a != b else P())
    uneven = vfn.shard(X[:7, :3], mesh, P((a, b) if a != b else a))
    in_body = lambda body, spec: vfn.shard_map(body, mesh=mesh, in_specs=P(a), out_specs=spec)
    return [
        (vfn.grad(loss)(w, x), vfn.grad(loss)(W, X)),
        (vfn.jit(vfn.grad(loss))(w, x), vfn.grad(loss)(W, X)),
        (uneven.cumsum(0), X[:7, :3].cumsum(0)),
        (uneven.sum(), X[:7, :3].sum()),
        (in_body(lambda v: vfn.psum(v.sum(0), a), P())(X), X.sum(0)),
        (
            vfn.grad(lambda v: in_body(lambda u: (u * vfn.psum(u, a)).sin(), P(a))(v).sum())(X),
            _by_hand(X, mesh.shape[a]),
        ),
        (
            vfn.random.normal(vfn.random.key(1), (5, 3), spec=P(a), mesh=mesh),
            vfn.random.normal(vfn.random.key(1), (5, 3)),
        ),
        (vfn.from_local(lambda at: torch.tensor([at[a]]), mesh, P(a)), torch.arange(mesh.shape[a])),
    ]


def _by_hand(x, n):
    x = x.clone().requires_grad_()
    blocks = x.chunk(n)
    return torch.autograd.grad(sum((b * sum(blocks)).sin().sum() for b in blocks), x)[0]


def check(mesh):
    for found, expected in values(mesh):
        torch.testing.assert_close(vfn.unshard(found), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PARTS)
def test_on_simulated_ranks(name) -> None:
    with vfn.simulate(8):
        check(PARTS[name](vfn.make_mesh((2, 2, 2), ("pp", "dp", "tp"))))


def _on_real_ranks():
    m = vfn.make_mesh((2, 2), ("pp", "dp"))
    check(m["dp"])
    stage = m.at(pp=1)
    if member := stage.get_coordinate() is not None:
        check(stage)
        assert stage == m["dp"]
    wide = vfn.make_mesh((2, 2, 1), ("pp", "dp", "tp")).at(pp=0)  # a group along two axes, which the others do not make
    if wide.get_coordinate() is not None:
        over = vfn.shard_map(lambda v: vfn.psum(v.sum(0), ("dp", "tp")), mesh=wide, in_specs=P("dp"), out_specs=P())
        torch.testing.assert_close(vfn.unshard(over(X)), X.sum(0))
    errors = []
    for use in (
        lambda: vfn.shard(X, stage, P()),
        lambda: vfn.shard_map(torch.sin, mesh=stage, in_specs=P(), out_specs=P())(X),
    ):
        try:
            use()
        except MeshError as error:
            errors.append(str(error))
    return member, errors


def test_on_real_ranks(gloo) -> None:
    for rank, (member, errors) in enumerate(gloo(4, _on_real_ranks)):
        assert member == (rank >= 2)
        what = f"mesh: this process, rank {rank}, is not in the mesh (dp=2), which has the ranks [2, 3]\n"
        fix = "  Instead: `if mesh.get_coordinate() is not None:` around what is done on it"
        assert errors == [] if member else errors == [what + fix] * 2


def test_which_are_the_same() -> None:
    with vfn.simulate(8):
        m = vfn.make_mesh((2, 2, 2), ("pp", "dp", "tp"))
        assert m["pp", "dp", "tp"] is m
        assert m["dp", "tp"]["dp"] == m["dp"] != m["tp"]
        assert m.at(pp=1)["dp"] == m["pp", "dp"].at(pp=1)
        assert m.at(pp=1).at(tp=0) == m.at(tp=0, pp=1)
        assert m.at(pp=0) != m.at(pp=1) != m["dp", "tp"]
        assert m["dp"] != vfn.make_mesh((2, 4), ("dp", "x"))["dp"]
    with vfn.simulate(2):
        assert vfn.make_mesh((2,), ("dp",)) != m["dp"]
    for part in (m["dp"], m.at(pp=1)):
        x = vfn.shard(X, part, P("dp"))
        assert pickle.loads(pickle.dumps(x)).device_mesh is copy.deepcopy(x).device_mesh is part


def test_with_one_rank() -> None:
    m = vfn.make_mesh((1, 1), ("pp", "dp"))
    check(m["dp"])
    check(m.at(pp=0))


def test_arrays_on_two_of_them_do_not_mix() -> None:
    with vfn.simulate(4):
        m = vfn.make_mesh((2, 2), ("pp", "dp"))
        first, second = (vfn.shard(X, m.at(pp=i), P("dp")) for i in range(2))
        with pytest.raises(MeshError) as error:
            first + second
        assert str(error.value) == (
            "add: arrays on different meshes do not mix\n"
            "  * f32[8@dp,4] on the mesh (dp=2) at pp=0 of (pp=2, dp=2)\n"
            "  * f32[8@dp,4] on the mesh (dp=2) at pp=1 of (pp=2, dp=2)\n"
            "  Instead: vfn.shard(x, mesh, P('dp')) brings one to the other's mesh"
        )
        with pytest.raises(MeshError) as error:
            vfn.shard(first, m, P("dp"))
        assert str(error.value) == (
            "shard: an array of some ranks does not reach others\n"
            "  * it is on the mesh (dp=2) at pp=0 of (pp=2, dp=2)\n"
            "  * it is to be on the mesh (pp=2, dp=2)\n"
            "  Instead: vfn.ppermute or vfn.pbroadcast in a shard_map over a mesh with all these ranks"
        )
        for target in (m, m["dp"], m.at(pp=0)):  # all ranks hold what is on their own part
            assert torch.equal(vfn.unshard(vfn.shard(vfn.shard(X, m["dp"], P("dp")), target, P("dp"))), X)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda m: m["ep"], "mesh[...]: 'ep' does not name axes of the mesh (pp=2, dp=2)\n  * 'ep' is no axis\n"),
        (
            lambda m: m["dp", "pp"],
            "mesh[...]: ('dp', 'pp') does not name axes of the mesh (pp=2, dp=2)\n  Instead: names",
        ),
        (
            lambda m: m.at(pp=2),
            "mesh.at: this does not choose a part of the mesh (pp=2, dp=2)\n  * pp=2: its places are 0 to 1",
        ),
        (
            lambda m: m.at(ep=0),
            "mesh.at: this does not choose a part of the mesh (pp=2, dp=2)\n  * ep=0: there is no such axis",
        ),
        (
            lambda m: m.at(pp=0, dp=0),
            "mesh.at: this does not choose a part of the mesh (pp=2, dp=2)\n  * it names every axis",
        ),
        (lambda m: m.at(), "mesh.at: this does not choose a part of the mesh (pp=2, dp=2)\n  * it names no axis"),
    ],
)
def test_what_is_no_part(use, message) -> None:
    with vfn.simulate(4), pytest.raises(MeshError) as error:
        use(vfn.make_mesh((2, 2), ("pp", "dp")))
    assert str(error.value).startswith(message)


def test_what_a_mesh_is_made_of_lies_on_the_cpu_whatever_torchs_default_device_is():
    def total(x):
        return (vfn.with_sharding(x * 2.0, P("not_cpu")) + 1.0).sum()

    with torch.device("meta"), vfn.simulate(6):
        mesh = vfn.make_mesh((3, 2), ("not_cpu", "other"), device="cpu")
        x = vfn.shard(torch.arange(6.0, device="cpu").view(3, 2), mesh["not_cpu", "other"], P("not_cpu", "other"))
        with vfn.use_mesh(mesh):
            assert (total(x).item(), vfn.jit(total)(x).item()) == (36.0, 36.0)
        assert vfn.make_mesh((6,), ("not_cpu",)).device_type == "meta"
