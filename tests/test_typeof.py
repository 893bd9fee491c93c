"""What a value, a mesh and a layout say of themselves: `typeof`, `mesh.shape["dp"]`, `array.sharding`, as JAX's do."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P


@pytest.fixture
def mesh():
    with vfn.simulate(8):
        yield vfn.make_mesh((2, 4), ("dp", "tp"))


def of(seen, x):
    """The function that notes the type of its argument, and gives it back."""
    seen.append(str(vfn.typeof(x)))
    return x


def test_types_outside_of_bodies(mesh) -> None:
    key = vfn.random.key(0)
    arrays = [
        vfn.shard(torch.zeros(8, 4), mesh, spec) for spec in (P(), P("dp"), P(("dp", "tp")), P("tp", reduced="dp"))
    ]
    said = [
        f"{vfn.typeof(x)}" for x in (torch.zeros(3), np.float32(3), np.zeros((2, 3)), key, 3, True, 2.5, "a", *arrays)
    ]
    assert said == [
        *("f32[3]", "f32[]", "f64[2,3]", "key<threefry2x32>[]", "int", "bool", "float", "str"),
        *("f32[8,4]", "f32[8@dp,4]", "f32[8@dp+tp,4]", "f32[8@tp,4]{R:dp}"),
    ]
    found = vfn.typeof(arrays[1])
    assert (found.shape, found.ndim, found.dtype, found.spec, found.mesh) == ((8, 4), 2, torch.float32, P("dp"), mesh)
    assert found.sharding == arrays[1].sharding
    assert found.varying == found.vma == frozenset()
    assert found == vfn.typeof(arrays[1] + 1)
    assert len({found, vfn.typeof(arrays[1] + 1)}) == 1
    assert (found != vfn.typeof(arrays[2]), vfn.typeof(vfn.random.split(key, 3)).shape) == (True, (3,))
    assert vfn.typeof(arrays[3]).reduced == {"dp"}
    assert vfn.typeof(torch.zeros(2)).sharding is None


def test_types_under_transforms(mesh) -> None:
    x, seen = vfn.shard(torch.ones(8, 4), mesh, P("dp", "tp")), []
    f = lambda x: of(seen, x).sum()
    vfn.grad(f)(x), torch.func.grad(f)(x), vfn.jit(f)(x), vfn.eval_shape(f, x), vfn.vmap(f)(x)
    vfn.jit(lambda x, lr: of(seen, lr) * x)(x, 0.5)
    vfn.vmap(lambda k: vfn.random.normal(of(seen, k), (2,)))(vfn.random.split(vfn.random.key(0), 3))
    assert seen == ["f32[8@dp,4@tp]"] * 4 + ["f32[4@tp]"] + ["float"] * 2 + ["key<threefry2x32>[]"]


def test_types_in_bodies(mesh) -> None:
    """As `jax.typeof` prints them, but for its ``float32``."""
    seen = []

    def body(x, w):
        v, outside = x @ w, torch.zeros(3)
        gathered = vfn.all_gather(x, "dp", to="reduced")
        for y in (
            x,
            w,
            v,
            vfn.psum(v, "dp"),
            vfn.pcast(w, "dp", to="reduced"),
            gathered,
            vfn.axis_index("dp"),
            outside,
        ):
            of(seen, y)
        assert vfn.typeof(v).varying == {"dp"}
        assert vfn.typeof(v).sharding is None
        assert vfn.typeof(gathered).reduced == {"dp"}
        return v

    vfn.shard_map(body, mesh, (P("dp"), P()), P("dp"))(torch.ones(8, 4), torch.ones(4, 4))
    assert seen == [
        *("f32[4,4]{V:dp}", "f32[4,4]", "f32[4,4]{V:dp}", "f32[4,4]", "f32[4,4]{R:dp}", "f32[2,4,4]{R:dp}"),
        *("i32[]{V:dp}", "f32[3]"),
    ]


def test_types_in_other_bodies(mesh) -> None:
    """One without types cannot tell; in one that is manual over one axis a value is an array over the other."""
    x, seen = vfn.shard(torch.ones(8, 4), mesh, P("dp", "tp")), []

    def part(y):
        assert vfn.typeof(y).sharding == vfn.typeof(y + 1).sharding
        assert vfn.typeof(y).spec == P(None, "tp")
        of(seen, x)
        return of(seen, of(seen, y) * 2)

    vfn.shard_map(part, mesh, P("dp"), P("dp"), axis_names={"dp"})(x)
    vfn.shard_map(lambda y: of(seen, y), mesh, P("dp"), P("dp"), check_vma=False)(torch.ones(8, 4))
    vfn.shard_map(lambda y: y * (vfn.typeof(y).varying is None), mesh, P("dp"), P("dp"), check_vma=False)(x)
    assert seen == ["f32[8@dp,4@tp]", "f32[4,4@tp]{V:dp}", "f32[4,4@tp]{V:dp}", "f32[4,4]"]


def test_a_mesh_is_asked_as_in_jax_and_as_in_torch(mesh) -> None:
    sizes = mesh.shape
    assert sizes == (2, 4)
    assert hash(sizes) == hash((2, 4))
    assert isinstance(sizes, tuple)
    assert repr(sizes) == "(2, 4)"
    assert (sizes["tp"], sizes[1], sizes[1:], *sizes, len(sizes)) == (4, 4, (4,), 2, 4, 2)
    assert dict(sizes) == {**sizes} == dict(sizes.items()) == {"dp": 2, "tp": 4}
    assert list(sizes.values()) == [2, 4]
    assert ("dp" in sizes, "pp" in sizes, 4 in sizes, 3 in sizes) == (True, False, True, False)
    assert (mesh.axis_names, mesh.size, mesh.size(), mesh.size(1), mesh.size(mesh_dim=0)) == (("dp", "tp"), 8, 8, 4, 2)
    assert torch.zeros(sizes).shape == torch.zeros(8).view(sizes).shape == torch.Size(sizes)
    assert vfn.make_mesh(axis_shapes=(2, -1), axis_names=("dp", "tp")) is mesh
    for there_and_back in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        assert there_and_back(sizes) == (2, 4)
        assert there_and_back(mesh.size) == 8
        assert there_and_back(mesh) is mesh


def _asked():
    mesh = vfn.make_mesh((2, -1), ("dp", "tp"))
    x = vfn.shard(torch.arange(8.0), mesh, P("dp"))
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    back = torch.load(file)  # weights only
    of_dp = mesh["dp"]
    return (
        (mesh.shape["tp"], dict(mesh.shape), mesh.axis_names, mesh.size, mesh.size(0)),
        (of_dp.shape["dp"], of_dp.axis_names, of_dp.size),
        (x.sharding == back.sharding, x.spec, x.sharding.mesh is mesh, back.device_mesh == mesh),
    )


def test_a_real_mesh_is_asked_so_too(gloo) -> None:
    assert (
        gloo(4, _asked)
        == [((2, {"dp": 2, "tp": 2}, ("dp", "tp"), 4, 2), (2, ("dp",), 2), (True, P("dp"), True, True))] * 4
    )


def test_a_mesh_of_one_rank_is_asked_so_too() -> None:
    mesh = vfn.make_mesh((1, -1), ("dp", "tp"))
    assert (mesh.shape["tp"], mesh.axis_names, mesh.size) == (1, ("dp", "tp"), 1)


def test_a_sharding_stands_for_a_spec(mesh) -> None:
    y = torch.arange(16.0).view(8, 2)
    x = vfn.shard(y, mesh, P(None, "dp"))
    there = vfn.shard(y, mesh, P("tp")).sharding
    assert repr(there) == "Sharding(mesh (dp=2, tp=4), P('tp'))"
    assert (there.mesh, there.spec) == (mesh, P("tp"))
    assert there != x.sharding
    assert there == vfn.with_sharding(x, P("tp")).sharding
    for placed in (
        vfn.with_sharding(x, there),
        vfn.with_sharding(y, there),  # without a current mesh
        vfn.with_sharding({"a": [y]}, {"a": there})["a"][0],
        vfn.with_sharding([x, y], [P("tp"), there])[0],
        vfn.shard(y, mesh, there),
        vfn.shard({"w": y}, mesh, [("w", there)])["w"],
        vfn.from_local(lambda at: y[2 * at["tp"] : 2 * at["tp"] + 2], mesh, there),
        vfn.jit(lambda x: x * 1, out_specs=there)(x),
        vfn.init(lambda: y * 1, spec=there),
    ):
        assert placed.sharding == there
        assert torch.equal(vfn.unshard(placed), y)
