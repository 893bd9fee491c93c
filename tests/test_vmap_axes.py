"""Collectives over the entries of a `vmap`, by its axis name: against plain loops over the entries, as in live JAX."""

import pytest
import torch
from torch.testing import assert_close

import vescale_fn as vfn
from vescale_fn import P

N = 3
X = torch.arange(1.0, 1 + N * 6 * 2, dtype=torch.float64).view(N, 6, 2).sin()
PERM = [(0, 1), (2, 0)]

# What one entry computes, and what all of them give together: from a list of the entries to a list of the results.
PROGRAMS = {
    "psum": (lambda x: vfn.psum(x, "i"), lambda xs: [sum(xs)] * N),
    "pmean": (lambda x: vfn.pmean(x, "i"), lambda xs: [sum(xs) / N] * N),
    "all_gather": (lambda x: vfn.all_gather(x, "i", axis=1), lambda xs: [torch.stack(xs, 1)] * N),
    "all_gather, last": (lambda x: vfn.all_gather(x, "i", axis=-1), lambda xs: [torch.stack(xs, -1)] * N),
    "all_gather, tiled": (lambda x: vfn.all_gather(x, "i", axis=1, tiled=True), lambda xs: [torch.cat(xs, 1)] * N),
    "psum_scatter": (lambda x: vfn.psum_scatter(x[:N], "i"), lambda xs: list(sum(xs)[:N])),
    "psum_scatter, tiled": (lambda x: vfn.psum_scatter(x, "i", tiled=True), lambda xs: list(sum(xs).chunk(N))),
    "all_to_all": (
        lambda x: vfn.all_to_all(x[:N], "i", 0, 1),
        lambda xs: [torch.stack([x[i] for x in xs], 1) for i in range(N)],
    ),
    "all_to_all, tiled": (
        lambda x: vfn.all_to_all(x, "i", 0, 1, tiled=True),
        lambda xs: [torch.cat([x.chunk(N)[i] for x in xs], 1) for i in range(N)],
    ),
    "ppermute": (lambda x: vfn.ppermute(x, "i", PERM), lambda xs: [xs[2], xs[0], 0 * xs[0]]),
    "pbroadcast": (lambda x: vfn.pbroadcast(x, "i", 1), lambda xs: [xs[1]] * N),
    "axis_index": (lambda x: x * vfn.axis_index("i"), lambda xs: [x * i for i, x in enumerate(xs)]),
    "axis_size": (lambda x: x / vfn.axis_size("i"), lambda xs: [x / N for x in xs]),
    "a number": (lambda x: x * vfn.psum(2, "i"), lambda xs: [x * 2 * N for x in xs]),
    "products": (lambda x: vfn.psum(x * x, "i") * x, lambda xs: [sum(x * x for x in xs) * x for x in xs]),
    "a tree": (lambda x: vfn.psum({"a": x, "b": 1}, "i")["a"], lambda xs: [sum(xs)] * N),
    "psum of what is alike": (lambda x: x + vfn.psum(ONES, "i"), lambda xs: [x + N for x in xs]),
    "all_gather of what is alike": (lambda x: x + vfn.all_gather(ONES, "i")[1], lambda xs: [x + 1 for x in xs]),
    "ppermute of what is alike": (
        lambda x: x + vfn.ppermute(ONES, "i", PERM),
        lambda xs: [xs[0] + 1, xs[1] + 1, xs[2]],
    ),
    "inside another vmap": (
        lambda x: vfn.vmap(lambda row: vfn.all_gather(row, "i"))(x),
        lambda xs: [torch.stack(xs, 1)] * N,
    ),
    "the inner of two equal names": (
        lambda x: vfn.vmap(lambda row: vfn.psum(row, "i"), axis_name="i")(x),
        lambda xs: [x.sum(0).expand(6, 2) for x in xs],
    ),
    "two names": (
        lambda x: vfn.vmap(lambda row: vfn.psum(row, ("i", "j")) + vfn.axis_index(("j", "i")), axis_name="j")(x),
        lambda xs: [sum(xs).sum(0) + (N * torch.arange(6) + i)[:, None] for i in range(N)],
    ),
}
ONES = torch.ones(6, 2, dtype=torch.float64)


def together(loop, x):
    return torch.stack(loop(list(x)))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_collective_over_entries(name):
    """Values, gradients and tangents: on a plain tensor, under jit, on arrays that are split evenly, unevenly and over two axes."""
    f, loop = PROGRAMS[name]
    mapped = vfn.vmap(f, axis_name="i")
    want = together(loop, X)
    weights = torch.arange(1.0, 1 + want.numel(), dtype=torch.float64).view(want.shape).cos()
    slopes = torch.func.grad(lambda x: (together(loop, x) * weights).sum())(X)
    loss = lambda x: (mapped(x) * weights).sum()
    assert_close(mapped(X), want)
    assert_close(vfn.grad(loss)(X), slopes)
    if name in ("products", "ppermute", "two names"):
        assert_close(vfn.jit(vfn.grad(loss))(X), slopes)
    assert_close(vfn.jvp(mapped, (X,), (X.cos(),))[1], torch.func.jvp(lambda x: together(loop, x), (X,), (X.cos(),))[1])
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("a", "b"))
        for spec in (P("a"), P(None, ("b", "a")), P("b", "a")):
            x = vfn.shard(X, mesh, spec)
            assert_close(vfn.unshard(mapped(x)), want)
            assert_close(vfn.unshard(vfn.grad(loss)(x)), slopes)


def test_a_gradient_inside_is_that_of_the_sum_of_all_results():
    """As in live JAX, whose `psum` over entries is its own transpose: [6, 12, 18] for x = 1, 2, 3."""
    x = torch.arange(1.0, 4.0)
    at = lambda f: vfn.vmap(f, axis_name="i")(x)
    assert_close(at(vfn.grad(lambda a: vfn.psum(a**2, "i"))), 6 * x)
    assert_close(at(lambda b: vfn.grad(lambda a: vfn.psum(a * b, "i"))(torch.tensor(2.0))), 3 * x)
    assert_close(at(lambda b: vfn.grad(lambda a: vfn.psum(a**2, "i"))(torch.tensor(2.0))), torch.full((3,), 12.0))
    assert_close(at(vfn.grad(lambda a: vfn.pmean(a**2, "i"))), 2 * x)
    assert_close(at(vfn.grad(lambda a: (vfn.all_gather(a, "i") * x).sum())), 3 * x)
    assert_close(at(vfn.grad(lambda a: vfn.pbroadcast(a, "i", 1) * x[1])), torch.tensor([0.0, 6.0, 0.0]))
    assert_close(at(torch.func.hessian(lambda b: vfn.psum(b**3, "i"))), 18 * x)
    value, slope = at(lambda a: vfn.jvp(lambda b: vfn.psum(b * b, "i"), (a,), (torch.tensor(1.0),)))
    assert_close((value, slope), (torch.full((3,), 14.0), torch.full((3,), 12.0)))


def test_dtypes_and_results_that_are_alike():
    at = lambda f, x, **how: vfn.vmap(f, axis_name="i", **how)(x)
    x = torch.arange(3)
    assert_close(at(lambda a: vfn.psum(a > 0, "i"), x, out_axes=None), torch.tensor(2, dtype=torch.int32))
    assert_close(at(lambda a: vfn.psum(a.int(), "i"), x, out_axes=None), torch.tensor(3, dtype=torch.int32))
    assert_close(at(lambda a: vfn.pmax(a > 0, "i"), x, out_axes=None), torch.tensor(True))
    assert_close(at(lambda a: vfn.pmin(a, "i"), x, out_axes=None), torch.tensor(0))
    assert_close(at(lambda a: vfn.pmean(a, "i"), x), torch.ones(3))
    assert_close(at(lambda a: vfn.psum(a, "i"), x.bfloat16(), out_axes=None), torch.tensor(3, dtype=torch.bfloat16))
    assert_close(at(lambda a: vfn.axis_index("i"), x), x.int())
    assert_close(vfn.vmap(lambda a: a + vfn.axis_index("i"), None, axis_name="i", axis_size=3)(2), 2 + x.int())
    assert_close(vfn.vmap(lambda a: a * 2, None, axis_size=2)(x), torch.stack([2 * x] * 2))
    assert_close(at(lambda a: vfn.psum(a, "i"), torch.zeros(0, 2), out_axes=None), torch.zeros(2))
    written = x[:, None].clone()
    at(lambda a: vfn.all_gather(a, "i").add_(1), written)
    assert_close(written, x[:, None])


MIXED = {
    "psum": (lambda x, n: vfn.psum(x, n), lambda b: b.sum((0, 1)).expand(3, 2, 6, 2)),
    "pmean": (lambda x, n: vfn.pmean(x, n), lambda b: b.mean((0, 1)).expand(3, 2, 6, 2)),
    "all_gather": (
        lambda x, n: vfn.all_gather(x, n, axis=-1).sum(1),
        lambda b: b.sum(3).flatten(0, 1).t().expand(3, 2, 6, 6),
    ),
    "all_gather, tiled": (
        lambda x, n: vfn.all_gather(x, n, tiled=True),
        lambda b: b.reshape(36, 2).expand(3, 2, 36, 2),
    ),
    "psum_scatter": (lambda x, n: vfn.psum_scatter(x, n)[None], lambda b: b.sum((0, 1)).view(3, 2, 1, 2)),
    "psum_scatter, tiled": (lambda x, n: vfn.psum_scatter(x, n, tiled=True), lambda b: b.sum((0, 1)).view(3, 2, 1, 2)),
    "pbroadcast": (lambda x, n: vfn.pbroadcast(x, n, 3), lambda b: b[1, 1].expand(3, 2, 6, 2)),
    "axis_index": (lambda x, n: x * vfn.axis_index(n), lambda b: b * torch.arange(6).view(3, 2, 1, 1)),
    "axis_size": (lambda x, n: x * vfn.axis_size(n), lambda b: b * 6),
    "entries alone": (lambda x, n: vfn.psum(x, "i"), lambda b: b.sum(0).expand(3, 2, 6, 2)),
}
BLOCKS = torch.arange(3 * 2 * 6 * 2, dtype=torch.float64).view(3, 2, 6, 2).sin()  # of 3 entries and 2 ranks


def mixed(name, names, check, inside):
    """The program over entries and an axis of the mesh: in a body around the vmap, or in one that it maps."""
    f = MIXED[name][0]
    if inside:
        body = vfn.vmap(lambda x: f(x, names), axis_name="i")
        return vfn.shard_map(body, in_specs=P(None, "a"), out_specs=P(None, "a"), check_vma=check)
    return vfn.vmap(
        vfn.shard_map(lambda x: f(x, names), in_specs=P("a"), out_specs=P("a"), check_vma=check), axis_name="i"
    )


@pytest.mark.parametrize("name", MIXED)
def test_entries_and_axes_of_the_mesh_together(name):
    loop = MIXED[name][1]
    weights = (want := loop(BLOCKS).flatten(1, 2)).cos()
    slopes = torch.func.grad(lambda b: (loop(b).flatten(1, 2) * weights).sum())(BLOCKS).flatten(1, 2)
    x = BLOCKS.flatten(1, 2)
    with vfn.simulate(4), vfn.use_mesh(vfn.make_mesh((2, 2), ("a", "b"))):
        for check in (True, False):
            for inside in (True, False):
                f = mixed(name, ("i", "a"), check, inside)
                assert_close(vfn.unshard(f(x)), want)
                assert_close(vfn.grad(lambda x, f=f: (f(x) * weights).sum())(x), slopes)
        if name == "psum":
            assert_close(vfn.jit(vfn.grad(lambda x: (f(x) * weights).sum()))(x), slopes)
        turned = lambda b: loop(b.transpose(0, 1).reshape(3, 2, 6, 2))  # the blocks in the other order
        if name in ("all_gather", "all_gather, tiled"):
            assert_close(vfn.unshard(mixed(name, ("a", "i"), True, True)(x)), turned(BLOCKS).flatten(1, 2))


def test_jit_of_a_result_alike_in_a_body_without_types():
    """torch ends a vmap by an op that no function mode sees: on simulated ranks its result was blocks of blocks."""
    with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh((2,), ("a",))):
        f = vfn.shard_map(
            vfn.vmap(lambda x: vfn.psum(x, "i"), axis_name="i"), in_specs=P("a"), out_specs=P("a"), check_vma=False
        )
        assert_close(vfn.jit(vfn.grad(lambda x: f(x).sum()))(X[:2]), torch.ones_like(X[:2]))


def on_real_ranks():
    mesh = vfn.make_mesh((2,), ("a",))
    with vfn.use_mesh(mesh):
        for name, (_, loop) in MIXED.items():
            for check in (True, False):
                f = mixed(name, ("i", "a"), check, inside=True)
                assert_close(vfn.unshard(f(BLOCKS.flatten(1, 2))), loop(BLOCKS).flatten(1, 2))


def test_on_real_ranks(gloo):
    gloo(2, on_real_ranks)


def message(call) -> str:
    with pytest.raises(vfn.errors.VfnError) as caught:
        call()
    return f"{type(caught.value).__name__}\n{caught.value}"


def test_what_is_refused():
    x = torch.ones(3)
    at = lambda f, **how: lambda: vfn.vmap(f, **{"axis_name": "i"} | how)(x)
    assert message(at(lambda a: vfn.psum(a, "k"))) == (
        "MeshError\npsum: axis_name='k' does not name axes\n  * 'k' is none: no axis of a mesh is manual here, and the vmaps "
        "around have the axes ('i',)\n  Instead: axis_name='i', for example"
    )
    assert message(at(lambda a: vfn.psum(a, ("i", "i")))) == (
        "MeshError\npsum: axis_name=('i', 'i') does not name axes\n  * axis 'i' is named twice\n"
        "  Instead: axes of the vmaps around, each once, and in a body axes that are manual there"
    )
    assert message(at(lambda a: vfn.pvary(a, "i"))) == (
        "CollectiveError\npvary: axis_name='i': 'i' is the axis of a vmap, but this is over axes of a mesh only\n"
        "  Instead: an axis that is manual in the shard_map body"
    )
    assert message(at(lambda a: vfn.all_gather(a, "i", to="invarying"))) == (
        "CollectiveError\nall_gather: to='invarying', but entries of a vmap have no types\n"
        '  Instead: to="varying", the default'
    )
    assert message(at(lambda a: vfn.psum_scatter(torch.ones(2), "i"))) == (
        "CollectiveError\npsum_scatter: the operand does not fit the entries of the vmap of axis 'i'\n"
        "  * x of shape f32[2]: scatter_dimension=0 has size 2, but untiled it must be 3 (axis 'i')\n"
        "  Instead: pad the dim, scatter along another, or vfn.psum and slice"
    )
    assert message(at(lambda a: a, axis_size=4)) == (
        "TransformError\nvmap: the arguments do not fit in_axes\n  * args[0] (of 'a') has 3 along dim 0\n  * axis_size is 4\n"
        "  Instead: for each argument the dim that all are mapped over together, None for those that are the same in all calls"
    )
    assert message(at(lambda a: a, axis_size="4")).startswith(
        "TransformError\nvmap: axis_size must be an int, the number of"
    )
    assert message(at(lambda a: a, axis_name=0)) == (
        "TransformError\nvmap: axis_name must be a string, but it is the int 0\n"
        '  Instead: axis_name="batch", and in the function vfn.psum(x, "batch")'
    )
    assert message(at(vfn.grad(lambda a: vfn.pmax(a, "i")))).startswith(
        "CollectiveError\npmax: it was differentiated, but"
    )
    kept = []
    at(lambda a: kept.append(vfn.vjp(lambda b: vfn.psum(b * b, "i"), a)[1]) or a)()
    assert message(lambda: kept[0](torch.tensor(1.0))) == (
        "CollectiveError\npsum: axis_name='i' is the axis of a vmap that has ended\n"
        "  Instead: the whole of the computation, a pullback too, in the function that vfn.vmap maps"
    )


def test_names_that_a_mesh_has_too():
    """Of two that bind a name the inner one counts where that is the vmap, as in JAX; a body inside of it is ambiguous there."""
    x = torch.arange(12.0).view(3, 4)
    with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh((2,), ("a",))):
        inner = vfn.vmap(lambda x: vfn.psum(x, "a"), axis_name="a")
        assert_close(vfn.vmap(lambda x: vfn.psum(x, "a"), axis_name="a")(x), x.sum(0).expand(3, 4))
        f = vfn.shard_map(inner, in_specs=P(None, "a"), out_specs=P(None, "a"))
        assert_close(vfn.unshard(f(x)), x.sum(0).expand(3, 4))
        outer = lambda g: vfn.vmap(vfn.shard_map(g, in_specs=P("a"), out_specs=P("a")), axis_name="a")
        assert_close(vfn.unshard(outer(lambda x: x * 2)(x)), x * 2)
        assert message(lambda: outer(lambda x: vfn.psum(x, "a"))(x)) == (
            "CollectiveError\npsum: axis_name='a' has two meanings here\n"
            "  * a vmap around the shard_map body has axis_name='a'\n"
            "  * 'a' is manual in the body, on the mesh (a=2)\n  Instead: another axis_name for the vmap"
        )
        f = vfn.shard_map(
            vfn.vmap(lambda x: vfn.psum(x, "k"), axis_name="i"), in_specs=P(None, "a"), out_specs=P(None, "a")
        )
        assert "'k' is none: the axes that are manual here are ('a',), and the vmaps around have the axes ('i',)" in (
            message(lambda: f(x))
        )
