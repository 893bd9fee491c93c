"""`fsdp_specs`: each leaf split once more along its largest dim, so that every rank has the same share of it."""

import itertools
import math

import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import SpecError

MESH = {"dp": 2, "tp": 3}
SHAPES = [(), (1,), (2,), (5,), (6,), (4, 6), (6, 4), (6, 6), (3, 5, 7), (2, 9), (0, 4), (12, 1, 6)]


def spec(shape, axes="dp", specs=P()):
    return vfn.fsdp_specs({"w": torch.empty(shape)}, MESH, axes, specs)["w"]


@pytest.mark.parametrize(
    ("shape", "axes", "before", "wanted"),
    [
        ((4, 6), "dp", P(), P(None, "dp")),  # the largest
        ((6, 6), "dp", P(), P("dp")),  # the first of two as large
        ((4, 9), "dp", P(), P("dp")),  # 9 is no multiple of 2
        ((5, 9), "dp", P(), P()),  # nothing is
        ((), "dp", P(), P()),
        ((4, 12), "dp", P(None, "tp"), P("dp", "tp")),  # on a rank 4 and 4: the first
        ((4, 18), "dp", P(None, "tp"), P(None, ("tp", "dp"))),  # on a rank 4 and 6
        ((6,), "dp", P("tp"), P(("tp", "dp"))),
        ((9,), "dp", P("tp"), P("tp")),  # 3 on a rank
        ((6, 4), ("dp", "tp"), P(), P(("dp", "tp"))),
        ((6, 4), ("tp", "dp"), P(), P(("tp", "dp"))),
        ((6, 4), (), P("tp"), P("tp")),
        ((0, 5), "dp", P(), P()),  # nothing is to be had by splitting no elements
    ],
)
def test_the_dim_that_is_split(shape, axes, before, wanted):
    assert spec(shape, axes, before) == wanted


def divisor(row, sizes):
    return math.prod(sizes[name] for name in ((row,) if isinstance(row, str) else row or ()))


@pytest.mark.parametrize("axes", ["dp", "tp", ("dp", "tp"), ("tp", "dp")])
def test_every_rank_has_the_same_share_wherever_some_dim_allows_it(axes):
    ways = divisor(axes, MESH)
    for shape in SHAPES:
        found = spec(shape, axes)
        split = [dim for dim, row in enumerate(found) if row]
        possible = [dim for dim, size in enumerate(shape) if size and size % ways == 0]
        assert bool(split) == bool(possible)
        if split:
            assert shape[split[0]] == max(shape[dim] for dim in possible)
            assert math.prod(vfn.shard_shape(shape, MESH, found)) * ways == math.prod(shape)


def test_specs_are_a_prefix_and_other_leaves_are_whole():
    key = vfn.random.key(0)
    tree = {"a": [torch.empty(4, 3), torch.empty(3)], "n": 3, "none": None, "key": key, "b": torch.empty(2)}
    found = vfn.fsdp_specs(
        tree,
        MESH,
        "dp",
        {"a": P(None, "tp"), "n": P(), "none": P(), "key": P(), "b": P()} | {"a": [P(None, "tp"), P("tp")]},
    )
    assert found["a"] == [P("dp", "tp"), P("tp")]
    assert (found["n"], found["none"], found["b"]) == (P(), None, P("dp"))
    assert vfn.fsdp_specs({}, MESH, "dp") == {}


def test_a_key_stays_together():
    with vfn.simulate(2):
        mesh, tree = vfn.make_mesh((2,), ("dp",)), {"key": vfn.random.key(3), "w": torch.arange(6.0)}
        laid = vfn.shard(tree, mesh, vfn.fsdp_specs(tree, mesh, "dp"))
        assert torch.equal(vfn.random.normal(vfn.unshard(laid["key"]), (3,)), vfn.random.normal(tree["key"], (3,)))


def test_a_tree_laid_out_by_it_comes_back():
    tree = {str(i): torch.arange(math.prod(s), dtype=torch.float32).view(s) for i, s in enumerate(SHAPES)}
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("dp", "tp"))
        for axes in ("dp", "tp", ("dp", "tp")):
            laid = vfn.shard(tree, mesh, vfn.fsdp_specs(tree, mesh, axes))
            again = vfn.fsdp_specs(laid, mesh, axes)  # of arrays, by their whole shapes
            assert all(vfn.spec_of(laid[name]) == again[name] for name in tree)
            assert all(torch.equal(x, tree[name]) for name, x in vfn.unshard(laid).items())


@pytest.mark.parametrize(
    ("axes", "specs", "message"),
    [
        (
            "pd",
            P(),
            "fsdp_specs: the leaves cannot be split over these axes\n"
            "  * axis 'pd' is not an axis of the mesh (dp=2, tp=3); did you mean 'dp'?\n"
            "  Instead: axes of the mesh that no spec names yet",
        ),
        (
            "tp",
            {"b": P("dp"), "w": P(None, "tp")},
            "fsdp_specs: the leaves cannot be split over these axes\n"
            "  * params['w'] is split over axis 'tp' already: P(None, 'tp')\n"
            "  Instead: axes of the mesh that no spec names yet",
        ),
        (
            "dp",
            [P()],
            "fsdp_specs: specs is not a prefix of params\n  * specs is a list, but params is a dict\n"
            "  Instead: give specs the structure of params, or one entry for a whole subtree",
        ),
    ],
    ids=["unknown", "taken", "structure"],
)
def test_messages(axes, specs, message):
    with pytest.raises(SpecError) as error:
        vfn.fsdp_specs({"w": torch.empty(4, 6), "b": torch.empty(6)}, MESH, axes, specs)
    assert str(error.value) == message


def test_all_dims_of_small_shapes_against_trying_all():
    """The oracle: of all dims that split evenly, the one that leaves the largest block dim, tried one by one."""
    for shape in itertools.product((1, 2, 3, 4, 6, 12), repeat=2):
        for before in (P(), P("tp"), P(None, "tp")):
            here = [size / divisor(row, MESH) for size, row in zip(shape, (*before, None, None))]
            found = spec(shape, "dp", before)
            tried = [dim for dim, size in enumerate(here) if size % 2 == 0]
            wanted = [dim for dim in tried if here[dim] == max(here[d] for d in tried)][:1]
            assert [dim for dim, row in enumerate(found) if row and "dp" in row] == wanted
