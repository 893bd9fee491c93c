"""Specs: what they are as values, what they mean as index maps, as DTensor placements, and on JAX's own examples."""

import ast
import copy
import itertools
import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core import torch_internals
from vescale_fn._core.distributed import communicator
from vescale_fn._core.distributed import mesh as mesh_
from vescale_fn._core.sharding import index_map, spec
from vescale_fn._core.sharding import placements as placements_
from vescale_fn.errors import SpecError

ORDER = json.loads((Path(__file__).parent / "goldens" / "order.json").read_text())
MESHES = [{"a": 4}, {"a": 1}, {"a": 2, "b": 3}, {"a": 3, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 2, "b": 1, "c": 3}]


def coords(axes: dict[str, int]) -> list[dict[str, int]]:
    return [dict(zip(axes, place)) for place in itertools.product(*map(range, axes.values()))]


def all_specs(axes: dict[str, int], ndim: int, unreduced: bool = False) -> list[P]:
    """Every way to give each axis a dim, nothing, or (on request) a partial sum; the axes of one dim in every order."""
    found = {}
    for order in itertools.permutations(axes):
        for dims in itertools.product([None, *range(ndim), *["U"] * unreduced], repeat=len(order)):
            rows = [tuple(a for a, d in zip(order, dims) if d == dim) for dim in range(ndim)]
            found[spec.from_split_axes(rows, {a for a, d in zip(order, dims) if d == "U"})] = None
    return list(found)


# --- P as a value -----------------------------------------------------------------------------------------------------


def test_equality() -> None:
    assert P(("x",)) == P("x")
    assert P(["x", "y"]) == P(("x", "y"))
    assert P(()) == P(None)
    assert P("x") != P("x", None)
    assert P(("x", "y")) != P(("y", "x"))
    assert P("x") != P("x", unreduced={"y"}) != P("x", reduced={"y"})
    assert P() != ()
    assert P("x") != ("x",)
    assert P(unreduced="x") == P(unreduced=["x"])


def test_a_dictionary_finds_equal_specs() -> None:
    table = {P("x"): 1, P("x", None): 2, P("x", unreduced={"y"}): 3, P("x", reduced={"y"}): 4}
    assert [table[s] for s in (P(("x",)), P("x", None), P("x", unreduced=["y"]), P("x", reduced="y"))] == [1, 2, 3, 4]


SOME = [P(), P("x"), P(None, "x"), P(("x", "y"), None), P("x", unreduced={"z", "y"}), P(None, reduced={"x"})]


@pytest.mark.parametrize("value", SOME, ids=repr)
def test_copies_and_text_say_everything(value: P) -> None:
    assert eval(repr(value)) == value
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(value, protocol))
        assert type(again) is P
        assert again == value
        assert hash(again) == hash(value)
    assert copy.deepcopy(value) == copy.copy(value) == value


def test_text_has_one_order() -> None:
    assert repr(P("dp", None, ("a", "b"), unreduced={"z", "y"})) == "P('dp', None, ('a', 'b'), unreduced={'y', 'z'})"


def test_a_spec_is_a_leaf() -> None:
    import optree

    assert optree.tree_leaves({"w": P("x"), "b": P()}) == [P(), P("x")]
    assert torch.utils._pytree.tree_leaves([P("x")]) == [P("x")]


def test_wrong_entries() -> None:
    with pytest.raises(SpecError) as error:
        P("dp", 3)
    assert str(error.value) == (
        "P: an entry must be None, an axis name or a tuple of axis names, but one is 3\n"
        '  Instead: for instance P("dp", None, ("dp", "tp"))'
    )
    with pytest.raises(SpecError) as error:
        P(unreduced={1})
    assert str(error.value) == (
        'P: unreduced must be a set of axis names, but it is the set {1}\n  Instead: for instance P(unreduced={"dp"})'
    )


# --- index maps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ORDER, ids=lambda c: f"{c['spec']}-{dict(c['mesh'])}")
def test_jax_places_the_same_slices(case) -> None:
    axes = dict(case["mesh"])
    entries = ast.literal_eval(case["spec"].removeprefix("P"))
    for coord, slices in zip(coords(axes), case["slices_by_flat_device"]):
        assert index_map.local_indices(case["shape"], axes, P(*entries), coord) == tuple(range(*s) for s in slices)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_blocks_partition_every_dim(axes: dict[str, int]) -> None:
    n = math.prod(axes.values())
    for names in {names for s in all_specs(axes, 1) for names in spec.split_axes(s, 1)}:
        for size in sorted({0, 1, 2, n - 1, n, n + 1, 2 * n - 1, 2 * n, 3 * n + 1}):
            held = {}
            for coord in coords(axes):
                held.setdefault(tuple(coord[a] for a in names), set()).add(
                    tuple(index_map.dim_indices(size, names, axes, coord))
                )
            assert all(len(versions) == 1 for versions in held.values()), "ranks that differ elsewhere hold the same"
            everything = [i for (version,) in held.values() for i in version]
            assert sorted(everything) == list(range(size)), (names, size)
            if size % n == 0:  # major first: the blocks in the order of the spec's axes are the dim in order
                in_order = [i for place in sorted(held) for (v,) in [held[place]] for i in v]
                assert in_order == list(range(size)), (names, size)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), size=st.integers(0, 40), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_blocks_partition_any_dim(data, size: int, sizes: list[int]) -> None:
    axes = dict(zip("abc", sizes))
    names = tuple(data.draw(st.permutations(list(axes))))[: data.draw(st.integers(0, len(axes)))]
    distinct = {}
    for coord in coords(axes):
        indices = index_map.dim_indices(size, names, axes, coord)
        assert list(indices) == sorted(set(indices))
        if isinstance(indices, list):
            assert indices != list(range(indices[0], indices[0] + len(indices))), "a contiguous block is a range"
        distinct[tuple(coord[a] for a in names)] = list(indices)
    assert sorted(i for block in distinct.values() for i in block) == list(range(size))


def mesh_from(axes: dict[str, int], rank: int) -> DeviceMesh:
    ranks = torch.arange(math.prod(axes.values())).view(tuple(axes.values()))
    return DeviceMesh("cpu", ranks, mesh_dim_names=tuple(axes), _init_backend=False, _rank=rank)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_dtensor_computes_the_same_blocks(axes: dict[str, int]) -> None:
    """Shapes for every spec and size; offsets wherever a block is contiguous, which is all that DTensor can say."""
    n = math.prod(axes.values())
    for rank, coord in enumerate(coords(axes)):
        mesh = mesh_from(axes, rank)
        for shape in [(2 * n, n), (n + 1, 2 * n - 1), (n - 1, 1)]:
            for s in all_specs(axes, 2):
                mine = index_map.local_indices(shape, axes, s, coord)
                placements = placements_.to_placements(s, axes, 2)
                local, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
                assert tuple(map(len, mine)) == tuple(local), (shape, s, coord)
                if all(isinstance(i, range) and len(i) for i in mine):
                    assert tuple(i.start for i in mine) == tuple(offset), (shape, s, coord)


def _distributed(axes, cases):
    mesh = vfn.make_mesh(tuple(axes.values()), tuple(axes))
    coord = communicator.coordinates(mesh, mesh_.communicator_of(mesh).ranks[0])
    wrong = []
    for shape, s in cases:
        x = torch.arange(math.prod(shape)).view(shape)
        theirs = distribute_tensor(
            x, mesh, placements_.to_placements(s, axes, len(shape)), src_data_rank=None
        ).to_local()
        ours = x
        for dim, indices in enumerate(index_map.local_indices(shape, axes, s, coord)):
            ours = ours.index_select(dim, torch.tensor(list(indices), dtype=torch.int64))
        if not torch.equal(ours, theirs):
            wrong.append((shape, s, coord, ours.tolist(), theirs.tolist()))
    return wrong


def test_dtensor_distributes_the_same_blocks(gloo) -> None:
    axes = {"a": 2, "b": 3}
    cases = [(shape, s) for shape in [(12, 6), (7, 11), (5, 1)] for s in all_specs(axes, 2)]
    assert gloo(6, _distributed, axes, cases) == [[]] * 6


# --- placements -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_placements_in_both_directions(axes: dict[str, int]) -> None:
    for ndim in (0, 1, 2, 3) if len(axes) < 3 else (1, 2):
        for s in all_specs(axes, ndim, unreduced=True):
            placements = placements_.to_placements(s, axes, ndim)
            assert len(placements) == len(axes)
            back = placements_.from_placements(placements, axes, ndim)
            again = placements_.to_placements(back, axes, ndim)
            assert again == placements
            if 1 not in axes.values():  # an axis of size 1 splits alike in every order
                assert back == s


def test_placements_that_torch_names() -> None:
    axes = {"dp": 2, "tp": 4}
    assert placements_.to_placements(P("dp", "tp"), axes, 2) == (Shard(0), Shard(1))
    assert placements_.to_placements(P(("dp", "tp")), axes, 2) == (Shard(0), Shard(0))
    assert placements_.to_placements(P(None, unreduced={"tp"}), axes, 2) == (Replicate(), Partial("sum"))
    first, second = placements_.to_placements(P(("tp", "dp")), axes, 1)
    assert (type(first).__name__, first.dim, first.split_factor, second) == ("_StridedShard", 0, 4, Shard(0))
    assert placements_.from_placements([Shard(-1), Replicate()], axes, 2) == P(None, "dp")


def test_placements_that_no_spec_says() -> None:
    axes = {"dp": 2, "tp": 4}
    with pytest.raises(SpecError) as error:
        placements_.from_placements([Partial("max"), Replicate()], axes, 1)
    assert str(error.value) == "a partial 'max' over 'dp' has no spec; only partial sums have"
    with pytest.raises(SpecError) as error:
        placements_.from_placements([torch_internals.strided_shard(0, 3), Replicate()], axes, 1)
    assert str(error.value).endswith("over 'dp' is not the layout of any order of the mesh (dp=2, tp=4)")


# --- shard_shape ------------------------------------------------------------------------------------------------------


def test_shard_shape() -> None:
    mesh = {"dp": 2, "tp": 4}
    assert vfn.shard_shape((8, 6), mesh, P("dp", None)) == (4, 6)
    assert vfn.shard_shape((8, 6), mesh, P(("dp", "tp"))) == (1, 6)
    assert vfn.shard_shape((5, 6), mesh, P("tp")) == (2, 6)  # 2, 2, 1, 0: the largest
    assert vfn.shard_shape((), mesh, P()) == ()
    assert vfn.shard_shape((0, 3), mesh, P("tp")) == (0, 3)
    assert vfn.shard_shape((8,), mesh, P(unreduced={"dp"})) == (8,)
    assert vfn.shard_shape(torch.Size((8, 8)), mesh_from(mesh, 0), P("tp", "dp")) == (2, 4)


def test_shard_shape_is_the_largest_block() -> None:
    for axes in MESHES:
        for shape in [(7, 9), (2, 1)]:
            for s in all_specs(axes, 2):
                blocks = [tuple(map(len, index_map.local_indices(shape, axes, s, c))) for c in coords(axes)]
                assert vfn.shard_shape(shape, axes, s) == tuple(map(max, zip(*blocks))), (axes, shape, s)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (P("xp"), "axis 'xp' (dim 0) is not an axis of the mesh (dp=2, tp=4)"),
        (P("dp", "dp"), "axis 'dp' is used twice: for dim 0 and for dim 1"),
        (P(("dp", "tp", "dp")), "axis 'dp' is used twice: for dim 0 and for dim 0"),
        (P("dp", unreduced={"dp"}), "axis 'dp' is used twice: for dim 0 and for unreduced"),
        (P(unreduced={"dp"}, reduced={"dp"}), "axis 'dp' is used twice: for unreduced and for reduced"),
        (P(None, None, None), "it has 3 entries, but the value has 2 dims"),
        (P(reduced={"q"}), "axis 'q' (reduced) is not an axis of the mesh (dp=2, tp=4)"),
    ],
    ids=repr,
)
def test_a_spec_that_does_not_fit(wrong: P, problem: str) -> None:
    with pytest.raises(SpecError) as error:
        vfn.shard_shape((8, 6), {"dp": 2, "tp": 4}, wrong)
    assert str(error.value) == (
        f"shard_shape: the spec {wrong!r} does not fit\n  * {problem}\n"
        "  Instead: use the axes of the mesh (dp=2, tp=4), each at most once, at most one entry a dim"
    )


# --- rules ------------------------------------------------------------------------------------------------------------


def test_spec_from_rules() -> None:
    params = {
        "emb": torch.zeros(8, 4),
        "blocks": [{"attn": {"wq": torch.zeros(4, 4), "wo": torch.zeros(4, 4)}, "b": torch.zeros(4)} for _ in range(2)],
        "steps": 3,
        "none": None,
    }
    rules = [
        (r"blocks\.1\.attn\.wq", P()),
        (r"wq$", P(None, "tp")),
        (r"\.wo$", P("tp")),
        (r"emb", P("tp")),
        (".*", P()),
    ]
    assert vfn.spec_from_rules(params, rules) == {
        "blocks": [
            {"attn": {"wo": P("tp"), "wq": P(None, "tp")}, "b": P()},
            {"attn": {"wo": P("tp"), "wq": P()}, "b": P()},
        ],
        "emb": P("tp"),
        "none": None,
        "steps": P(),
    }


def test_rules_that_do_not_fit_are_all_named() -> None:
    params = {"w": torch.zeros(4, 2), "layers": [torch.zeros(2)], "b": torch.zeros(2)}
    with pytest.raises(SpecError) as error:
        vfn.spec_from_rules(params, [("w", P("tp")), ("layers", P("tp", None)), ("q$", P())])
    assert str(error.value) == (
        "spec_from_rules: the rules and the tree do not fit\n"
        "  * no rule matches 'b' (tree['b'])\n"
        "  * rule ('layers', P('tp', None)) gives 2 entries to 'layers.0', which has 1 dim\n"
        "  * rule ('q$', P()) matches no leaf\n"
        '  Instead: add a rule, for instance (r".*", P()) at the end, or take the unused one away'
    )


def test_dtensor_is_what_it_was() -> None:
    """A DTensor made by torch in both orders of axes is read back as those specs."""
    with vfn.simulate(8):
        mesh = vfn.make_mesh((2, 4), ("dp", "tp"))
        for s in (P(("dp", "tp")), P(("tp", "dp")), P("tp", "dp")):
            x = vfn.shard(torch.arange(64).view(8, 8), mesh, s)
            assert isinstance(x, DTensor)
            assert vfn.spec_of(x) == s
            assert x.placements == placements_.to_placements(s, {"dp": 2, "tp": 4}, 2)
