"""The messages of the global view: as text, on every rank, before anything has moved."""

import math
import re
from collections import namedtuple

import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.distributed import mesh as mesh_
from vescale_fn.errors import MeshError, RandomError, SpecError

Point = namedtuple("Point", ["x", "y"])


@pytest.fixture
def mesh():
    with vfn.simulate(8):
        yield vfn.make_mesh((2, 4), ("dp", "tp"))


def message(kind, call) -> str:
    with vfn.comm_log() as log, pytest.raises(kind) as error:
        call()
    assert len(log) == 0, "nothing has moved"
    return str(error.value)


# --- specs ------------------------------------------------------------------------------------------------------------

w = torch.zeros(4, 2)


def params_tree():
    return {"w": torch.zeros(4, 2), "layers": [torch.zeros(3), {"b": torch.zeros(2, 2)}], "at": Point(w, w)}


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (P("xp"), "axis 'xp' (dim 0) is not an axis of the mesh (dp=2, tp=4)"),
        (P("dp", "dp"), "axis 'dp' is used twice: for dim 0 and for dim 1"),
        (P("dp", unreduced={"dp"}), "axis 'dp' is used twice: for dim 0 and for unreduced"),
        (P("dp", None, "tp"), "it has 3 entries, but the value has 2 dims"),
        (P(None, reduced={"q"}), "axis 'q' (reduced) is not an axis of the mesh (dp=2, tp=4)"),
    ],
    ids=repr,
)
def test_a_spec_that_does_not_fit(mesh, spec: P, problem: str) -> None:
    for where, call in (
        ("shard", lambda: vfn.shard(w, mesh, spec)),
        ("with_sharding", lambda: vfn.with_sharding(w, spec, mesh=mesh)),
        ("with_sharding", lambda: vfn.with_sharding(vfn.shard(w, mesh, P()), spec)),
    ):
        text = message(SpecError, call)
        assert text.startswith(f"{where}: 1 spec does not fit on the mesh (dp=2, tp=4)\n")
        assert f"is f32[4,2], its spec {spec!r}: {problem}\n" in text
        assert text.endswith("Instead: each axis of the mesh at most once, and at most one entry a dim")


def test_every_failure_at_once(mesh) -> None:
    params = params_tree()
    specs = {"w": P(None, "tp", "dp"), "layers": P("dp", "dp"), "at": P()}
    lines = message(SpecError, lambda: vfn.shard(params, mesh, specs)).splitlines()
    assert lines[0] == "shard: 3 specs do not fit on the mesh (dp=2, tp=4)"
    assert sorted(lines[1:-1]) == [
        "  * params['layers'][0] is f32[3], its spec P('dp', 'dp'): axis 'dp' is used twice: for dim 0 and for dim 1",
        "  * params['layers'][0] is f32[3], its spec P('dp', 'dp'): it has 2 entries, but the value has 1 dim",
        "  * params['layers'][1]['b'] is f32[2,2], its spec P('dp', 'dp'): axis 'dp' is used twice: for dim 0 and for dim 1",
        "  * params['w'] is f32[4,2], its spec P(None, 'tp', 'dp'): it has 3 entries, but the value has 2 dims",
    ]
    assert lines[-1] == "  Instead: each axis of the mesh at most once, and at most one entry a dim"


def test_too_many_entries_without_a_mesh() -> None:
    """On one device with_sharding is the identity, and still says what a mesh would."""
    x = torch.zeros(3)
    assert message(SpecError, lambda: vfn.with_sharding({"x": x}, P("dp", None))) == (
        "with_sharding: 1 spec does not fit\n"
        "  * tree['x'] is f32[3], its spec P('dp', None): it has 2 entries, but the value has 1 dim\n"
        "  Instead: each axis of the mesh at most once, and at most one entry a dim"
    )


@pytest.mark.parametrize(
    ("specs", "problems"),
    [
        (
            {"w": P(), "layers": [P()], "at": P()},
            ["specs['layers'] has length 1, but params['layers'] has length 2"],
        ),
        (
            {"w": P(), "layer": P(), "at": P()},
            ["specs lacks 'layers' and has besides 'layer': params has 'at', 'layers', 'w'; did you mean 'layers'?"],
        ),
        (
            {"w": P(), "layers": {"b": P()}, "at": (P(), P())},
            [
                "specs['layers'] is a dict, but params['layers'] is a list",
                "specs['at'] is a tuple, but params['at'] is a Point",
            ],
        ),
        (
            {"w": [P()], "layers": [P(), {"c": P()}], "at": Point(P(), {"q": P()})},
            [
                "specs['w'] is a list, but params['w'] is a leaf (Tensor)",
                "specs['layers'][1] lacks 'b' and has besides 'c': params['layers'][1] has 'b'",
                "specs['at'].y is a dict, but params['at'].y is a leaf (Tensor)",
            ],
        ),
    ],
    ids=["length", "keys", "kind", "deep"],
)
def test_a_prefix_that_does_not_fit(mesh, specs, problems: list[str]) -> None:
    params = params_tree()
    for call in (lambda: vfn.shard(params, mesh, specs), lambda: vfn.with_sharding(params, specs, mesh=mesh)):
        text = message(SpecError, call)
        head, *rest, fix = text.splitlines()
        assert head.split(": ")[1] == "specs is not a prefix of params"
        assert sorted(rest) == sorted(f"  * {problem}" for problem in problems)
        assert fix == "  Instead: give specs the structure of params, or one entry for a whole subtree"


def test_a_spec_that_is_none(mesh) -> None:
    params = params_tree()
    assert message(SpecError, lambda: vfn.shard(params, mesh, {"w": "dp", "layers": P(), "at": P()})) == (
        "shard: every spec must be a vfn.P\n  * the spec of params['w'] is 'dp'\n  Instead: vfn.P('dp')"
    )


# --- meshes -----------------------------------------------------------------------------------------------------------


def test_a_mesh_that_is_none(mesh) -> None:
    fix = '\n  Instead: mesh = vfn.make_mesh((2, 4), ("dp", "tp"))'
    for call, head in [
        (lambda: vfn.shard(w, None, P("dp")), "shard: the mesh must be a DeviceMesh, but it is None"),
        (lambda: vfn.shard(w, (2, 4), P("dp")), "shard: the mesh must be a DeviceMesh, but it is (2, 4)"),
        (lambda: vfn.shard(mesh, w, P("dp")), "shard: the mesh must be a DeviceMesh, but it is the tensor f32[4,2]"),
        (lambda: vfn.from_local(w, None, P("dp")), "from_local: the mesh must be a DeviceMesh, but it is None"),
        (
            lambda: vfn.with_sharding(w, P("dp"), mesh="dp"),
            "with_sharding: the mesh must be a DeviceMesh, but it is 'dp'",
        ),
        (lambda: vfn.use_mesh((2, 4)), "use_mesh: the mesh must be a DeviceMesh, but it is (2, 4)"),
        (lambda: vfn.set_mesh((2, 4)), "set_mesh: the mesh must be a DeviceMesh, but it is (2, 4)"),
    ]:
        where = head.split(":")[0]
        order = f", then vfn.{where}(tree, mesh, spec)" if where in ("shard", "from_local") else ""
        assert message(MeshError, call) == head + fix + order


def test_not_enough_ranks(mesh) -> None:
    assert message(MeshError, lambda: vfn.make_mesh((2, 6), ("dp", "tp"))) == (
        "make_mesh: dp=2 x tp=6 = 12 ranks, but there are 8 ranks. Three ways to get them\n"
        "  * vfn.simulate(12)                  this process plays all ranks (notebooks, tests)\n"
        "  * vfn.launch(fn, 12)                12 processes started from here, each running fn\n"
        "  * torchrun --nproc-per-node 12 your.py 12 processes started from the shell"
    )


def test_too_many_ranks(mesh) -> None:
    assert message(MeshError, lambda: vfn.make_mesh((2, 2), ("dp", "tp"))) == (
        "make_mesh: dp=2 x tp=2 has 4 ranks, but there are 8 ranks; a mesh uses all of them\n"
        "  Instead: make_mesh((2, -1), ('dp', 'tp')), or start 4 ranks: vfn.simulate(4), vfn.launch(fn, 4) or "
        "torchrun --nproc-per-node 4"
    )
    assert "Instead: make_mesh((-1, 2), ('dp', 'tp')), or start 6 ranks" in message(
        MeshError, lambda: vfn.make_mesh((3, 2), ("dp", "tp"))
    )
    assert message(MeshError, lambda: vfn.make_mesh((3, -1), ("dp", "tp"))) == (
        "make_mesh: dp=3 x tp=-1: there are 8 ranks, which 3 does not divide\n"
        "  Instead: make_mesh((-1, 1), ('dp', 'tp')), or start a multiple of 3 ranks: vfn.simulate(3), "
        "vfn.launch(fn, 3) or torchrun --nproc-per-node 3"
    )
    assert "Instead: make_mesh((-1,), ('dp',)), or start 3 ranks" in message(
        MeshError, lambda: vfn.make_mesh((3,), ("dp",))
    )
    assert "Instead: make_mesh((1, -1), ('dp', 'tp')), or start 1 rank: vfn.simulate(1)" in message(
        MeshError, lambda: vfn.make_mesh((1, 1), ("dp", "tp"))
    )


@pytest.mark.parametrize("sizes", [(3, 2), (3, -1), (-1, 3), (3, 5, -1), (3, 3, -1), (2, -1, 3), (2, 3, 1)])
def test_the_mesh_that_is_suggested_can_be_made(mesh, sizes) -> None:
    names = ("a", "b", "c")[: len(sizes)]
    text = message(MeshError, lambda: vfn.make_mesh(sizes, names))
    suggested = eval(re.search(r"Instead: make_mesh(\(.*?\)\)), or", text)[1])
    assert math.prod(vfn.make_mesh(*suggested).mesh.shape) == 8


def test_no_number_of_ranks() -> None:
    assert message(MeshError, lambda: vfn.simulate(0)) == (
        "simulate: n=0 is not a number of ranks; it must be an integer >= 1\n"
        '  Instead: as many as the mesh is to have, simulate(8) for make_mesh((2, 4), ("dp", "tp")) say'
    )


def test_none_for_a_spec_is_pointed_to_p(mesh) -> None:
    f = vfn.shard_map(lambda x, y: x, mesh=mesh, in_specs=(P("dp"), None), out_specs=P("dp"))
    assert message(SpecError, lambda: f(torch.ones(4), torch.ones(4))) == (
        "shard_map(<lambda>): in_specs is not a prefix of args\n"
        "  * in_specs[1] is None, but args[1] is a leaf (Tensor)\n"
        "  Instead: P() in place of None, where all ranks hold the whole value; or give in_specs the structure of args, "
        "or one entry for a whole subtree"
    )
    params = {"w": torch.ones(2), "b": torch.ones(2)}
    specs = {"w": P("dp"), "b": None}
    assert "Instead: P() in place of None" in message(SpecError, lambda: vfn.shard(params, mesh, specs))
    with pytest.raises(SpecError) as error:
        vfn.vmap(lambda x: x["a"], in_axes=({"a": {"b": 0}},))({"a": torch.ones(2)})
    assert "P()" not in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "names", "problem"),
    [
        ((2, 4), ("dp", "dp"), "axis 'dp' is named twice"),
        ((2, 4), ("dp",), "shape (2, 4) has 2 sizes, but names ('dp',) has 1"),
        ((0, 8), ("dp", "tp"), "size 0 is not a positive integer (or one -1)"),
        ((-1, -1), ("dp", "tp"), "shape (-1, -1) leaves more than one axis open with -1"),
        ((2, 4), ("dp", 3), "name 3 is not a string"),
        ((), (), "it has no axes"),
    ],
    ids=str,
)
def test_sizes_and_names_that_make_no_mesh(mesh, sizes, names, problem: str) -> None:
    assert message(MeshError, lambda: vfn.make_mesh(sizes, names)) == (
        f"make_mesh: the shape and the names do not make a mesh\n  * {problem}\n"
        '  Instead: for instance make_mesh((2, 4), ("dp", "tp"))'
    )


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "fix"),
    [
        (lambda a: torch.nn.functional.dropout(a, 0.5), "for dropout vfn.random.dropout(key, x, rate)"),
        (torch.rand_like, "vfn.random.uniform(key, x.shape, spec=vfn.spec_of(x))"),
        (torch.randn_like, "vfn.random.normal(key, x.shape, spec=vfn.spec_of(x))"),
        (lambda a: a.clone().normal_(), "mean + std * vfn.random.normal(key, x.shape, spec=vfn.spec_of(x))"),
        (
            lambda a: a.clone().uniform_(),
            "vfn.random.uniform(key, x.shape, minval=..., maxval=..., spec=vfn.spec_of(x))",
        ),
    ],
    ids=["dropout", "rand_like", "randn_like", "normal_", "uniform_"],
)
def test_stateful_draws(mesh, draw, fix: str) -> None:
    a = vfn.shard(w, mesh, P("dp"))
    text = message(RandomError, lambda: draw(a))
    assert ": a stateful draw on an array: every rank would draw from a generator of its own\n" in text
    assert text.endswith(fix)


def test_a_tensor_without_blocks(mesh) -> None:
    sparse = torch.eye(4).to_sparse()
    problem = "its memory format is torch.sparse_coo, and only strided tensors can be laid out"
    lines = message(SpecError, lambda: vfn.shard(sparse, mesh, P("dp"))).splitlines()
    assert lines[1] == f"  * sparse is f32[4,4], its spec P('dp'): {problem}"


# --- on every rank ----------------------------------------------------------------------------------------------------


def _wrong_in_every_way():
    m = vfn.make_mesh((2, 2), ("dp", "tp"))
    a = vfn.shard(torch.ones(4, 4), m, P("dp"))
    params = {"w": a, "b": torch.ones(3)}
    calls = [
        lambda: vfn.make_mesh((2, 4), ("dp", "tp")),
        lambda: vfn.shard(params, m, P("xp")),
        lambda: vfn.with_sharding(params, {"w": P("dp", "dp"), "b": P()}),
        lambda: vfn.with_sharding(params, P(None, "tp")),
        lambda: vfn.shard(params, m, {"w": P()}),
        lambda: vfn.from_local(params, m, P()),
        lambda: torch.rand_like(a),
        lambda: a @ torch.ones(3, 3),
        lambda: vfn.grad(lambda a: a * 2)(a),
        lambda: vfn.with_sharding(a, P()).zero_(),
        lambda: vfn.random.uniform(vfn.random.key(0), (4,), spec=P("xp"), mesh=m),
        lambda: vfn.grad(lambda a: vfn.with_sharding(a, P("xp")).sum())(a),
        lambda: torch.func.grad(lambda a: vfn.with_sharding(a, P("dp", "dp")).sum())(a),
    ]
    texts = []
    for number, call in enumerate(calls):
        with vfn.comm_log() as log:
            try:
                call()
                texts.append("no error")
            except (vfn.errors.VfnError, RuntimeError) as error:
                texts.append(f"{type(error).__name__}: {error}")
        if len(log) and number not in (7, 9):  # a wrong product gathers; with_sharding does, and the write raises
            texts[-1] = f"moved before it raised: {log}"
    texts.append(vfn.unshard(a * 2).sum().item())  # nobody waits for anybody: the ranks go on together
    return texts


def test_errors_are_raised_on_every_rank(gloo) -> None:
    first, *others = gloo(4, _wrong_in_every_way)
    assert len(first) == 14
    assert first[-1] == 32.0
    assert not [text for text in first[:-1] if text.startswith(("no error", "moved"))]
    assert others == [first] * 3


def _only_rank_2():
    m = vfn.make_mesh((4,), ("dp",))
    if mesh_.communicator_of(m).ranks[0] == 2:
        vfn.shard(torch.ones(4), m, P("xp"))
    return vfn.unshard(vfn.shard(torch.ones(4), m, P("dp"))).sum().item()


def test_an_error_on_one_rank_reaches_the_caller(gloo) -> None:
    with pytest.raises(vfn.errors.RankError, match="axis 'xp' \\(dim 0\\) is not an axis of the mesh \\(dp=4\\)"):
        gloo(4, _only_rank_2)
    assert gloo(4, _fine) == [4.0] * 4


def _fine():
    m = vfn.make_mesh((4,), ("dp",))
    return vfn.unshard(vfn.shard(torch.ones(4), m, P("dp"))).sum().item()


def _collectives_by_an_axis():
    mesh = vfn.make_mesh((2,), ("tp",))
    calls = {
        "all_reduce": lambda x: torch.distributed.all_reduce(x, group="tp"),
        "all_gather": lambda x: torch.distributed.all_gather([x, x], x, group="tp"),
        "get_rank": lambda x: torch.distributed.get_rank("tp"),
        "barrier": lambda x: torch.distributed.barrier("tp"),
        "functional": lambda x: torch.distributed._functional_collectives.all_reduce(x, "sum", "tp"),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(MeshError) as error:
            vfn.shard_map(call, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(torch.ones(2))
        found[name] = str(error.value)
    return found


def test_a_group_of_torchs_is_no_axis(gloo) -> None:
    what = "group='tp' is an axis of the mesh (tp=2), but torch takes a process group\n  Instead:"
    psum = "vfn.psum(x, axis) in a shard_map body, or pmax, pmin, pmean; in the global view torch.sum is the whole sum"
    rank = "vfn.axis_index(axis) in a shard_map body: a tensor, of another value on each rank"
    own = "group=mesh.get_group('tp')"
    gather = "vfn.all_gather(x, axis) in a shard_map body; vfn.unshard(x) for a whole array"
    assert (
        gloo(2, _collectives_by_an_axis)
        == [
            {
                "all_reduce": f"all_reduce: {what} {psum}; or {own}",
                "all_gather": f"all_gather: {what} {gather}; or {own}",
                "get_rank": f"get_rank: {what} {rank}; or {own}",
                "barrier": f"barrier: {what} {own}",
                "functional": f"all_reduce: {what} {psum}; or {own}",
            }
        ]
        * 2
    )
