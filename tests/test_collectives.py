"""The collectives: against a loop over the ranks, the adjoint identity, trees, transforms, messages, and real ranks."""

import math
import warnings

import optree
import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import CollectiveError, MeshError, TypingError

MESH = {"x": 2, "y": 3}
AXES = ["x", "y", ("x", "y"), ("y", "x")]


def names_of(axis):
    return (axis,) if isinstance(axis, str) else axis


def size_of(axis, mesh=MESH):
    return math.prod(mesh[name] for name in names_of(axis))


# Each collective: its call; the shape of a block for n ranks; what the ranks of one group get, from the list of their
# blocks in the order of the axes (the oracle: plain tensors, no mesh); and whether the result is the same on all of them.
def gathered(blocks, dim, tiled):
    whole = torch.cat(blocks, dim) if tiled else torch.stack(blocks, dim)
    return [whole] * len(blocks)


def scattered(blocks, dim, tiled):
    pieces = sum(blocks).chunk(len(blocks), dim) if tiled else sum(blocks).unbind(dim)
    return list(pieces)


def exchanged(blocks, split, concat, tiled):
    pieces = [b.chunk(len(blocks), split) if tiled else b.unbind(split) for b in blocks]
    join = torch.cat if tiled else torch.stack
    return [join([p[i] for p in pieces], concat) for i in range(len(blocks))]


def permuted(blocks, perm):
    source = {to: start for start, to in perm}
    return [blocks[source[i]] if i in source else torch.zeros_like(blocks[i]) for i in range(len(blocks))]


def shift(n):
    return [(i, (i + 1) % n) for i in range(n)]


COLLECTIVES = {
    "psum": (lambda x, a: vfn.psum(x, a), lambda n: (3, 5), lambda b: [sum(b)] * len(b), True),
    "pmean": (lambda x, a: vfn.pmean(x, a), lambda n: (3, 5), lambda b: [sum(b) / len(b)] * len(b), True),
    "all_gather": (lambda x, a: vfn.all_gather(x, a), lambda n: (3, 5), lambda b: gathered(b, 0, False), False),
    "all_gather -1": (lambda x, a: vfn.all_gather(x, a, axis=-1),
                      lambda n: (3, 5), lambda b: gathered(b, -1, False), False),
    "all_gather tiled 1": (lambda x, a: vfn.all_gather(x, a, axis=1, tiled=True), lambda n: (3, 5),
                           lambda b: gathered(b, 1, True), False),
    "all_gather invarying": (lambda x, a: vfn.all_gather(x, a, axis=1, to="invarying"), lambda n: (3, 5),
                             lambda b: gathered(b, 1, False), True),
    "all_gather invarying tiled -2": (lambda x, a: vfn.all_gather(x, a, axis=-2, tiled=True, to="invarying"),
                                      lambda n: (3, 5), lambda b: gathered(b, -2, True), True),
    "psum_scatter": (lambda x, a: vfn.psum_scatter(x, a), lambda n: (n, 5), lambda b: scattered(b, 0, False), False),
    "psum_scatter -1": (lambda x, a: vfn.psum_scatter(x, a, scatter_dimension=-1), lambda n: (3, n),
                        lambda b: scattered(b, -1, False), False),
    "psum_scatter tiled 1": (lambda x, a: vfn.psum_scatter(x, a, scatter_dimension=1, tiled=True),
                             lambda n: (3, 2 * n), lambda b: scattered(b, 1, True), False),
    "all_to_all 0 0": (lambda x, a: vfn.all_to_all(x, a, 0, 0),
                       lambda n: (n, 3, 2), lambda b: exchanged(b, 0, 0, False), False),
    "all_to_all 0 2": (lambda x, a: vfn.all_to_all(x, a, 0, 2),
                       lambda n: (n, 3, 2), lambda b: exchanged(b, 0, 2, False), False),
    "all_to_all 1 0": (lambda x, a: vfn.all_to_all(x, a, 1, 0),
                       lambda n: (3, n, 2), lambda b: exchanged(b, 1, 0, False), False),
    "all_to_all -1 0": (lambda x, a: vfn.all_to_all(x, a, -1, 0),
                        lambda n: (3, 2, n), lambda b: exchanged(b, -1, 0, False), False),
    "all_to_all tiled 0 1": (lambda x, a: vfn.all_to_all(x, a, 0, 1, tiled=True), lambda n: (2 * n, 3),
                             lambda b: exchanged(b, 0, 1, True), False),
    "all_to_all tiled -1 -1": (lambda x, a: vfn.all_to_all(x, a, -1, -1, tiled=True), lambda n: (3, 2 * n),
                               lambda b: exchanged(b, -1, -1, True), False),
    "ppermute": (lambda x, a: vfn.ppermute(x, a, shift(vfn.axis_size(a))), lambda n: (3, 5),
                 lambda b: permuted(b, shift(len(b))), False),
    "ppermute partial": (lambda x, a: vfn.ppermute(x, a, [(1, 0)]),
                         lambda n: (3, 5), lambda b: permuted(b, [(1, 0)]), False),
    "pbroadcast": (lambda x, a: vfn.pbroadcast(x, a, 1), lambda n: (3, 5), lambda b: [b[1]] * len(b), False),
    "pvary": (lambda x, a: vfn.pvary(vfn.psum(x, a), a), lambda n: (3,), lambda b: [sum(b)] * len(b), False),
}  # fmt: skip


def blocks_of(x, mesh):
    """The block of each rank, by its coordinates, of a value whose first dims are the mesh axes."""
    sizes = tuple(mesh.values())
    return {at: x[at] for at in torch.cartesian_prod(*(torch.arange(n) for n in sizes)).reshape(-1, len(sizes)).unbind()
            for at in [tuple(at.tolist())]}  # fmt: skip


def oracle(x, axis, local, mesh=MESH):
    """The results of all ranks, stacked along one dim for each mesh axis: a loop over groups."""
    blocks, order = blocks_of(x, mesh), list(mesh)
    places = [order.index(name) for name in names_of(axis)]
    groups = {}
    for at in sorted(blocks, key=lambda at: [at[i] for i in places]):  # within a group: major first
        groups.setdefault(tuple(n for i, n in enumerate(at) if i not in places), []).append(at)
    outs = {}
    for members in groups.values():
        outs.update(zip(members, local([blocks[at] for at in members]), strict=True))
    return torch.stack([outs[at] for at in sorted(outs)]).view(*mesh.values(), *next(iter(outs.values())).shape)


def mapped(call, axis, same, mesh, **options):
    """The collective as a function of the stacked blocks; the dim of an axis along which the result is the same is gone."""
    gone = names_of(axis) if same else ()

    def body(x):
        out = call(x.reshape(x.shape[2:]), axis)
        return out.reshape(*(1 for name in MESH if name not in gone), *out.shape)

    out_specs = P(*(name for name in MESH if name not in gone))
    return vfn.shard_map(body, mesh=mesh, in_specs=P("x", "y"), out_specs=out_specs, **options)


def stacked(shape, seed=0):
    return torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dropped(x, axis):
    """The oracle's result where it is the same along the axis: once."""
    for dim, name in reversed(list(enumerate(MESH))):
        if name in names_of(axis):
            x = x.select(dim, 0)
    return x


@pytest.fixture
def mesh():
    with vfn.simulate(6):
        yield vfn.make_mesh((2, 3), ("x", "y"))


@pytest.mark.parametrize("axis", ["y", ("x", "y"), ("y", "x")], ids=str)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_value_transpose_and_tangent(name, axis, mesh):
    call, shape, local, same = COLLECTIVES[name]
    f = mapped(call, axis, same, mesh)
    x, dx = stacked(shape(size_of(axis))), stacked(shape(size_of(axis)), 1)
    wanted = oracle(x, axis, local)
    wanted = dropped(wanted, axis) if same else wanted
    out, pullback = vfn.vjp(lambda x: vfn.unshard(f(x)), x)
    torch.testing.assert_close(out, wanted, rtol=1e-14, atol=1e-14)
    # <A* g, dx> = <g, A dx>, for the transpose of autograd, of torch.func, and for the tangent
    g = torch.randn_like(out)
    (back,) = pullback(g)
    product = (g * vfn.unshard(f(dx))).sum()
    torch.testing.assert_close((back * dx).sum(), product, rtol=1e-12, atol=1e-12)
    _, again = torch.func.vjp(lambda x: vfn.unshard(f(x)), x)
    torch.testing.assert_close(again(g)[0], back, rtol=0, atol=0)
    _, tangent = torch.func.jvp(lambda x: vfn.unshard(f(x)), (x,), (dx,))
    torch.testing.assert_close(tangent, vfn.unshard(f(dx)), rtol=0, atol=0)
    # the transpose of the transpose is the map
    _, forth = torch.func.vjp(lambda g: torch.func.vjp(lambda x: vfn.unshard(f(x)), x)[1](g)[0], g)
    torch.testing.assert_close(forth(dx)[0], vfn.unshard(f(dx)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("axis", [("y", "x")], ids=str)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_without_types_the_values_and_outer_gradients_are_the_same(name, axis, mesh):
    call, shape, _, same = COLLECTIVES[name]
    x = stacked(shape(size_of(axis)))
    checked, unchecked = (mapped(call, axis, same, mesh, check_vma=check) for check in (True, False))
    out, pullback = vfn.vjp(lambda x: vfn.unshard(checked(x)), x)
    out2, pullback2 = vfn.vjp(lambda x: vfn.unshard(unchecked(x)), x)
    torch.testing.assert_close(out2, out, rtol=0, atol=0)
    g = torch.randn_like(out)
    torch.testing.assert_close(pullback2(g), pullback(g), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("axis", [("y", "x")], ids=str)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_under_vmap(name, axis, mesh):
    call, shape, _, same = COLLECTIVES[name]
    f = mapped(call, axis, same, mesh)
    x = torch.stack([stacked(shape(size_of(axis)), seed) for seed in range(4)])
    wanted = torch.stack([vfn.unshard(f(row)) for row in x])
    torch.testing.assert_close(torch.func.vmap(lambda x: vfn.unshard(f(x)))(x), wanted, rtol=0, atol=0)
    inside = mapped(lambda x, a: torch.func.vmap(lambda x: call(x, a), in_dims=-1, out_dims=-1)(x), axis, same, mesh)
    back = vfn.unshard(inside(x.movedim(0, -1))).movedim(-1, 0)
    torch.testing.assert_close(back, wanted, rtol=0, atol=0)
    per_sample = torch.func.vmap(torch.func.grad(lambda x: (vfn.unshard(f(x)) ** 2).sum()))(x)
    one = torch.stack([torch.func.grad(lambda x: (vfn.unshard(f(x)) ** 2).sum())(row) for row in x])
    torch.testing.assert_close(per_sample, one, rtol=1e-13, atol=1e-13)


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
        "vfn.psum over {} of a value that is the same on all ranks multiplies it by {}. "
        "(A gradient with respect to such a value is already summed.)"
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

    for name in (0, "z"):
        assert said(lambda x, name=name: vfn.psum(x, name), MeshError) == (
            f"psum: axis_name={name!r} is not an axis, or a tuple of different axes, of the mesh (x=2, y=3)\n"
            f"  * {name!r} is not one of the axes ('x', 'y')\n"
            "  Instead: one of the axes ('x', 'y'), such as vfn.psum(..., 'x'), or a tuple of them"
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

    with pytest.raises(TypingError) as error:
        run(lambda i, v: vfn.pcast({"i": i, "v": v}, ("x",), to="varying")["v"])
    assert str(error.value) == (
        "pcast: there is no such cast, to='varying'\n"
        "  * x['v'] is f32[2]{V:x}: it is varying over 'x' already\n"
        "  Instead: no cast where none is needed; the casts are invarying -> varying or reduced, reduced -> varying, varying -> unreduced; "
        "vfn.psum makes a varying or unreduced value invarying"
    )
    with pytest.raises(TypingError, match="no cast from invarying to unreduced over 'x'"):
        run(lambda i, v: vfn.pcast(i, "x", to="unreduced"))
    with pytest.raises(TypingError, match="no cast from unreduced to varying over 'x'"):
        run(lambda i, v: vfn.pcast(vfn.pcast(v, "x", to="unreduced"), "x", to="varying"))
    with pytest.raises(TypingError) as error:
        run(lambda i, v: vfn.all_gather(vfn.pcast(v, "x", to="unreduced"), "x"))
    assert str(error.value) == (
        "all_gather: an unreduced value, still to be added over the ranks, may only be summed\n"
        "  * x is f32[2]{U:x}: unreduced over 'x'\n"
        "  Instead: vfn.psum(x, 'x') first"
    )


# --- real ranks -------------------------------------------------------------------------------------------------------


def everything():
    """Each collective and its transpose, over one axis and over both in either order, on a 2x2 mesh."""
    mesh = vfn.make_mesh((2, 2), ("x", "y"))
    found = {}
    for axis in ["x", "y", ("x", "y"), ("y", "x")]:
        for name, (call, shape, _, same) in COLLECTIVES.items():
            block = shape(math.prod(2 for _ in names_of(axis)))
            gone = names_of(axis) if same else ()

            def body(x, call=call, axis=axis, gone=gone):
                out = call(x.reshape(x.shape[2:]), axis)
                return out.reshape(*(1 for name in MESH if name not in gone), *out.shape)

            f = vfn.shard_map(body, mesh=mesh, in_specs=P("x", "y"), out_specs=P(*(n for n in MESH if n not in gone)))
            x = torch.arange(4.0 * math.prod(block), dtype=torch.float64).view(2, 2, *block).sin()
            out, pullback = vfn.vjp(lambda x, f=f: vfn.unshard(f(x)), x)
            found[name, str(axis)] = (
                out,
                pullback(1 + torch.arange(float(out.numel()), dtype=out.dtype).view(out.shape))[0],
            )
    f = vfn.shard_map(lambda t: vfn.psum(t, ("y", "x")), mesh=mesh, in_specs=P(("x", "y")), out_specs=P())
    tree = f({"b": torch.arange(8) % 3 == 0, "h": torch.arange(8.0, dtype=torch.bfloat16), "i": torch.arange(8)})
    found["tree", ""] = tuple(vfn.unshard(tree)[key] for key in "bhi")
    return found


def test_real_ranks_find_what_simulated_ones_do(gloo):
    with vfn.simulate(4):
        wanted = everything()
    for found in gloo(4, everything):
        assert found.keys() == wanted.keys()
        for key, values in wanted.items():
            for mine, simulated in zip(found[key], values, strict=True):
                torch.testing.assert_close(
                    mine, simulated, rtol=1e-13, atol=1e-13, msg=lambda text, key=key: f"{key}: {text}"
                )


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
