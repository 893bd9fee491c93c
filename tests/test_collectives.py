"""The collectives: trees, numbers, casts, messages. What each computes and its derivatives: test_collective_laws.py."""

import itertools
import warnings

import optree
import pytest
import torch
from collectives import MESH, mapped, names_of, stacked

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import CollectiveError, MeshError, VaryingTypeError

AXES = ["x", "y", ("x", "y"), ("y", "x")]


@pytest.fixture
def mesh():
    with vfn.simulate(6):
        yield vfn.make_mesh((2, 3), ("x", "y"))


def test_maxima(mesh):
    x = stacked((4,))
    for call, fold in ((vfn.pmax, torch.amax), (vfn.pmin, torch.amin)):
        for axis in AXES:
            f = mapped(call, axis, True, mesh)
            dims = [list(MESH).index(name) for name in names_of(axis)]
            assert torch.equal(vfn.unshard(f(x)), fold(x, dims))
            with pytest.raises(CollectiveError, match=f"{call.__name__}: it was differentiated"):
                vfn.grad(lambda x: vfn.unshard(f(x)).sum())(x)
            with pytest.raises(CollectiveError, match=f"{call.__name__}: it was differentiated"):
                torch.func.jvp(lambda x: vfn.unshard(f(x)), (x,), (x,))


# --- trees ------------------------------------------------------------------------------------------------------------


def some_tree():
    return {
        "f": torch.arange(6 * 5.0).view(6, 5),
        "d": [torch.arange(6 * 6.0, dtype=torch.float64).view(6, 2, 3), torch.ones(6, dtype=torch.float64)],
        "i": torch.arange(6 * 7, dtype=torch.int32).view(6, 7),
        "b": torch.arange(12).view(6, 2) % 3 == 0,
        "none": None,
        "h": torch.arange(6.0),
    }


@pytest.mark.parametrize("name", ["psum", "all_gather", "psum_scatter", "all_to_all", "ppermute", "pbroadcast"])
def test_trees_travel_in_one_bucket_for_each_dtype(name, mesh):
    scattering = name in ("psum_scatter", "all_to_all")
    tree = some_tree()
    if scattering:
        del tree["b"]
        tree = optree.tree_map(lambda x: x.reshape(6, -1).repeat(6, 2), tree)
    calls = {
        "psum": lambda t: vfn.psum(t, ("x", "y")),
        "all_gather": lambda t: vfn.all_gather(t, ("y", "x")),
        "psum_scatter": lambda t: vfn.psum_scatter(t, ("y", "x")),
        "all_to_all": lambda t: vfn.all_to_all(t, ("x", "y"), 0, 0),
        "ppermute": lambda t: vfn.ppermute(t, ("x", "y"), [(0, 5), (3, 2)]),
        "pbroadcast": lambda t: vfn.pbroadcast(t, "y", 2),
    }
    out_specs = P() if name == "psum" else P(("x", "y"))
    whole = vfn.shard_map(calls[name], mesh=mesh, in_specs=P(("x", "y")), out_specs=out_specs)
    with vfn.comm_log() as log:
        out = whole(tree)
    dtypes = 3 if name in ("psum", "psum_scatter", "all_to_all") else 4  # a sum of bools travels with the int32
    assert len([r for r in log if r.why == name]) == dtypes
    for key in ("f", "i", "h", *([] if scattering else ["b"])):
        alone = whole(tree[key])
        assert out[key].dtype == alone.dtype
        assert torch.equal(vfn.unshard(out[key]), vfn.unshard(alone))
    assert torch.equal(vfn.unshard(out["d"][0]), vfn.unshard(whole(tree["d"][0])))
    assert out["none"] is None
    if name == "psum":
        assert torch.equal(vfn.unshard(out["b"]), tree["b"].view(6, 2).sum(0, dtype=torch.int32)[None])


def test_gradients_of_a_tree_travel_together(mesh):
    params = {"a": torch.randn(3), "b": torch.randn(2, 2), "c": torch.randn(())}
    x = torch.arange(6.0)

    def f(params, x):
        params = vfn.pvary(params, ("x", "y"))
        return vfn.psum((params["a"].sum() + params["b"].sum() * params["c"]) * x.sum(), ("x", "y"))

    g = vfn.shard_map(f, mesh=mesh, in_specs=(P(), P(("x", "y"))), out_specs=P())
    with vfn.comm_log() as log:
        found = vfn.grad(g)(params, x)
    assert log.count("all_reduce") == 2  # the loss, and all gradients
    wanted = vfn.grad(lambda p: ((p["a"].sum() + p["b"].sum() * p["c"]) * x).sum())(params)
    for key in params:
        torch.testing.assert_close(found[key], wanted[key])


def test_python_numbers(mesh):
    def body(x):
        assert vfn.psum(1, "x") == 2
        assert vfn.psum({"a": 1, "b": 2.5}, ("x", "y")) == {"a": 6, "b": 15.0}
        assert vfn.psum(True, "y") == 3
        assert vfn.pmean(4, "y") == 4
        assert vfn.axis_size(("x", "y")) == 6
        return x

    vfn.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(torch.ones(2))


def test_psum_of_an_invarying_value_warns_once_a_line_with_the_factor(mesh):
    def body(x):
        return vfn.psum(x, ("x", "y"))

    f = vfn.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P())
    said = (
        "vfn.psum over {0}: a value that is the same on all ranks is multiplied by {1}\n  * x is f32[2]\n"
        "  Instead: x as it is: a gradient with respect to such a value is already summed; or {1} * x, which says so"
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            assert torch.equal(vfn.unshard(f(torch.ones(2))), torch.full((2,), 6.0))
    line = body.__code__.co_firstlineno + 1
    assert [(w.filename, w.lineno, str(w.message)) for w in seen] == [(__file__, line, said.format("'x', 'y'", 6))]
    with vfn.comm_log() as log:
        mean = vfn.shard_map(lambda x: vfn.pmean(x, "x"), mesh=mesh, in_specs=P(), out_specs=P())
        assert torch.equal(vfn.unshard(mean(torch.tensor([1 / 3]))), torch.tensor([1 / 3]))
        vfn.shard_map(
            lambda x: vfn.psum(x, "one"), mesh=vfn.make_mesh((1, 6), ("one", "x")), in_specs=P(), out_specs=P()
        )(torch.ones(2))  # times one: nothing to warn of
    assert not len(log)
    with warnings.catch_warnings(record=True) as seen:  # another factor is another warning
        warnings.simplefilter("default")
        for other in (mesh, vfn.make_mesh((3, 2), ("x", "y"))):
            vfn.shard_map(lambda x: vfn.psum(x, "y"), mesh=other, in_specs=P(), out_specs=P())(torch.ones(2))
    assert [str(w.message) for w in seen] == [said.format("'y'", n) for n in (3, 2)]


def test_messages_of_names_and_pairs(mesh):
    def said(body, error):
        with pytest.raises(error) as caught:
            vfn.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(torch.ones(2))
        return str(caught.value)

    for name, why in (
        (0, "is no name: axes of a mesh have names, dims of a tensor have numbers"),
        ("z", "is not one of the axes ('x', 'y')"),
    ):
        assert said(lambda x, name=name: vfn.psum(x, name), MeshError) == (
            f"psum: axis_name={name!r} does not name axes of the mesh (x=2, y=3)\n"
            f"  * {name!r} {why}\n"
            "  Instead: axis_name='x', or a tuple of different axes out of ('x', 'y')"
        )
    assert said(lambda x: vfn.ppermute(x, "x", [0, 1]), CollectiveError) == (
        "ppermute: perm=[0, 1] is not a sequence of (source, destination) pairs\n"
        "  Instead: a shift by one is [(i, (i + 1) % 2) for i in range(2)]"
    )


def test_axis_index_in_both_orders(mesh):
    f = vfn.shard_map(
        lambda: tuple(vfn.axis_index(a).reshape(1, 1) for a in AXES), mesh=mesh, in_specs=(), out_specs=P("x", "y")
    )
    x, y, xy, yx = (vfn.unshard(out) for out in f())
    assert x.dtype == torch.int32
    assert x.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert y.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert xy.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert yx.tolist() == [[0, 2, 4], [1, 3, 5]]


def test_dynamic_slice(mesh):
    whole = torch.arange(48.0).view(12, 4)
    # starts are clamped as by jax.lax.dynamic_slice; negative ones count from the end
    assert torch.equal(vfn.dynamic_slice(whole, [10, 1], [4, 2]), whole[8:12, 1:3])
    assert torch.equal(vfn.dynamic_slice(whole, torch.tensor([-3, 0]), [2, 4]), whole[9:11])
    assert torch.equal(vfn.dynamic_slice(whole, [torch.tensor(99), torch.tensor(-99)], [5, 3]), whole[7:, :3])

    def body(w):
        return vfn.dynamic_slice(w, [vfn.axis_index(("x", "y")) * 2, 0], [2, 4])

    f = vfn.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(("x", "y")))
    assert torch.equal(vfn.unshard(f(whole)), whole)
    scale = torch.arange(48.0).view(12, 4)
    assert torch.equal(vfn.grad(lambda w: (vfn.unshard(f(w)) * scale).sum())(whole), scale)
    with pytest.raises(CollectiveError) as error:
        vfn.dynamic_slice(whole, [0], [13, 4])
    assert str(error.value) == (
        "dynamic_slice: the block does not fit x of shape f32[12,4]\n"
        "  * x has 2 dims, but there are 1 start and 2 sizes\n"
        "  * dim 0 has size 12, but sizes[0] is 13\n"
        "  Instead: dynamic_slice(x, [start, ...], [size, ...]), an entry for each dim of x"
    )


# --- messages ---------------------------------------------------------------------------------------------------------


def message(body, x, mesh, error=CollectiveError):
    with vfn.comm_log() as log, pytest.raises(error) as caught:
        vfn.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P("x"))(x)
    assert not len(log)  # nothing moved
    return str(caught.value)


def test_messages(mesh):
    x = {"w": torch.ones(5, 3), "b": torch.ones(4), "c": torch.ones(6)}
    assert message(lambda x: vfn.psum_scatter(x, ("x", "y"), tiled=True), x, mesh) == (
        "psum_scatter: the operand does not fit the mesh (x=2, y=3)\n"
        "  * x['b'] of shape f32[4]: tiled, scatter_dimension=0 has size 4, which is not divisible by 6 "
        "(axes 'x', 'y')\n"
        "  * x['w'] of shape f32[5,3]: tiled, scatter_dimension=0 has size 5, which is not divisible by 6 "
        "(axes 'x', 'y')\n"
        "  Instead: pad the dim, scatter along another, or vfn.psum and slice"
    )
    assert message(lambda x: vfn.psum_scatter(x, "y", scatter_dimension=1), x["w"][None], mesh) == (
        "psum_scatter: the operand does not fit the mesh (x=2, y=3)\n"
        "  * x of shape f32[1,5,3]: scatter_dimension=1 has size 5, but untiled it must be 3 (axis 'y')\n"
        "  Instead: pad the dim, scatter along another, or vfn.psum and slice"
    )
    assert message(lambda x: vfn.all_to_all(x, "y", 0, 1), x["w"], mesh) == (
        "all_to_all: the operand does not fit the mesh (x=2, y=3)\n"
        "  * x of shape f32[5,3]: split_axis=0 has size 5, but untiled it must be 3 (axis 'y')\n"
        "  Instead: another split_axis, or pad the dim"
    )
    assert "concat_axis=2 is not one of the 2 dims of the result" in message(
        lambda x: vfn.all_to_all(x, "y", 1, 2), x["w"], mesh
    )
    assert "axis=3 is not one of the 3 dims of the result" in message(
        lambda x: vfn.all_gather(x, "y", axis=3), x["w"], mesh
    )
    assert message(lambda x: vfn.ppermute(x, "y", [(0, 1), (0, 2), (1, 3)]), x, mesh) == (
        "ppermute: perm=[(0, 1), (0, 2), (1, 3)] is not a permutation of some of the ranks\n"
        "  * pair (1, 3): positions go from 0 to 2, there are 3 (axis 'y')\n"
        "  * source 0 is in [(0, 1), (0, 2)]\n"
        "  Instead: each rank at most once as source and at most once as destination"
    )
    assert "destination 1 is in [(0, 1), (2, 1)]" in message(lambda x: vfn.ppermute(x, "y", [(0, 1), (2, 1)]), x, mesh)
    assert message(lambda x: vfn.pbroadcast(x, "x", 2), x, mesh) == (
        "pbroadcast: source=2, but positions go from 0 to 1: there are 2 (axis 'x')"
    )
    assert "'tp' is not one of the axes ('x', 'y')" in message(lambda x: vfn.psum(x, "tp"), x, mesh, MeshError)
    assert "axis 'x' is named twice" in message(lambda x: vfn.psum(x, ("x", "x")), x, mesh, MeshError)
    assert "to='whole' is not one of" in message(lambda x: vfn.all_gather(x, "x", to="whole"), x, mesh)


def test_outside_of_a_body(mesh):
    with pytest.raises(CollectiveError) as error:
        vfn.psum(torch.ones(2), "x")
    assert str(error.value) == (
        "psum: axis_name='x', but no axis is manual here: this is not inside a shard_map body\n"
        "  Instead: call it in the function that vfn.shard_map(f, mesh=mesh, in_specs=..., out_specs=...) maps; "
        "a whole array needs no collective: x.sum(0)"
    )
    for call in (vfn.axis_index, vfn.axis_size):
        with pytest.raises(CollectiveError, match="no axis is manual here"):
            call("x")


def test_casts(mesh):
    def run(body):
        return vfn.shard_map(body, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))(torch.ones(2), torch.ones(4))

    with pytest.raises(VaryingTypeError) as error:
        run(lambda i, v: vfn.pcast({"i": i, "v": v}, ("x",), to="varying")["v"])
    assert str(error.value) == (
        "pcast: there is no such cast, to='varying'\n"
        "  * x['v'] is f32[2]{V:x}: it is varying over 'x' already\n"
        "  Instead: no cast where none is needed; the casts are invarying -> varying or reduced, reduced -> varying, varying -> unreduced; "
        "vfn.psum makes a varying or unreduced value invarying"
    )
    with pytest.raises(VaryingTypeError, match="no cast from invarying to unreduced over 'x'"):
        run(lambda i, v: vfn.pcast(i, "x", to="unreduced"))
    with pytest.raises(VaryingTypeError, match="no cast from unreduced to varying over 'x'"):
        run(lambda i, v: vfn.pcast(vfn.pcast(v, "x", to="unreduced"), "x", to="varying"))
    with pytest.raises(VaryingTypeError) as error:
        run(lambda i, v: vfn.all_gather(vfn.pcast(v, "x", to="unreduced"), "x"))
    assert str(error.value) == (
        "all_gather: an unreduced value, still to be added over the ranks, may only be summed\n"
        "  * x is f32[2]{U:x}: unreduced over 'x'\n"
        "  Instead: vfn.psum(x, 'x') first"
    )


# --- real ranks -------------------------------------------------------------------------------------------------------


def refused_together():
    mesh = vfn.make_mesh((2, 2), ("x", "y"))
    for body in (lambda x: vfn.psum_scatter(x, "x", tiled=True), lambda x: vfn.ppermute(x, "x", [(0, 1), (0, 0)])):
        try:
            vfn.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P("x"))(torch.ones(3))
        except CollectiveError:
            continue
        return False
    return True


def test_a_wrong_call_raises_on_every_real_rank(gloo):
    assert gloo(4, refused_together) == [True] * 4


FOLDS = {
    "psum": lambda values: values.sum(0),
    "pmean": lambda values: values.mean(0),
    "pmax": lambda values: values.amax(0),
}


def operands_of(k, x, same, mixed):
    """Leaves that are all alike but for their dtypes and shapes; and one that is not."""
    other = {"": x * x, "bool": x > 9, "same": same * 2}[mixed]
    return [x + k, (x * k).reshape(3, 2), (x - k).double(), x.to(torch.int32) * k, other]


def reduced(name, axes, mixed, check):
    f = lambda x, same: [
        (y + 0 * vfn.axis_index(("dp", "tp")))[None]  # each rank's own
        for y in getattr(vfn, name)(operands_of(vfn.axis_index(("dp", "tp")), x, same, mixed), axes)
    ]
    mesh, whole = vfn.make_mesh((2, 2), ("dp", "tp")), P(("dp", "tp"))
    f = vfn.shard_map(f, mesh=mesh, in_specs=(whole, P()), out_specs=whole, check_vma=check)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a value that is the same on all ranks, summed
        return [vfn.unshard(y) for y in f(torch.arange(24.0), torch.ones(2))]


def every_tree():
    cases = itertools.product(FOLDS, ("tp", ("dp", "tp")), ("", "bool", "same"), (True, False))
    return {case: reduced(*case) for case in cases if case[0] != "pmean" or case[2] != "bool"}


def test_trees_on_real_ranks(gloo):
    blocks = torch.arange(24.0).split(6)
    for found in gloo(4, every_tree):
        assert len(found) == 32
        for (name, axes, mixed, _), got in found.items():
            leaves = zip(*(operands_of(k, x, torch.ones(2), mixed) for k, x in enumerate(blocks)), strict=True)
            for out, values in zip(got, leaves, strict=True):
                values = torch.stack(values).double()
                groups = values.split(2) if axes == "tp" else [values, values]
                want = torch.stack([FOLDS[name](group) for group in groups]).repeat_interleave(2, 0)
                assert torch.equal(out.double(), want), (name, axes, mixed)
