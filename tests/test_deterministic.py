"""`vfn.deterministic`: the bits of a program are the same on 1, 2, 4 and 8 processes, and with all layouts of data."""

import functools
import itertools
import math
import pickle
import warnings

import pytest
import torch
from sampled_bits import BODY, found_in
from test_communicator import programs
from test_mesh_parts import PARTS
from test_mesh_parts import values as values_on
from whole import some

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.distributed import trees
from vescale_fn._core.distributed.collectives import Collective
from vescale_fn.errors import MeshError, RandomError, TransformError
from vescale_fn.plan.passes import merge_axes


def bits(x):
    """The bits of a whole value, which pickle as they are."""
    x = vfn.unshard(x)
    return str(x.dtype), tuple(x.shape), x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def played(virtual, run, *args):
    """What a function gives where processes play so many ranks."""
    with vfn.deterministic(virtual):
        return run(*args)


def same_on(gloo, counts, virtual, run, *args):
    """Hold a function, which gives bits by name, to the same on each of these numbers of processes; returns them."""
    expected = played(virtual, run, *args)
    for count in counts:
        for found in gloo(count, played, virtual, run, *args):
            assert found.keys() == expected.keys()
            assert [name for name, one in expected.items() if found[name] != one] == []
    return expected


# The tree


def test_a_tree_splits_at_the_largest_power_of_two_below() -> None:
    total = functools.partial(trees.total, op=lambda a, b: f"({a}{b})")
    leaves = {(i, i + 1): str(i) for i in range(8)}
    assert total((0, 8), leaves) == "(((01)(23))((45)(67)))"
    assert total((0, 7), leaves) == "(((01)(23))((45)6))"
    assert total((0, 6), leaves) == "(((01)(23))(45))"
    assert total((0, 3), leaves) == "((01)2)"


@pytest.mark.parametrize("n", range(1, 14))
def test_parts_of_a_tree_come_to_the_whole(n) -> None:
    leaves = {(i, i + 1): f"{i}." for i in range(n)}
    op = lambda a, b: f"({a}{b})"
    for cut in range(n + 1):
        low, high = trees.subtrees(n, frozenset(range(cut))), trees.subtrees(n, frozenset(range(cut, n)))
        assert sorted(i for run in (*low, *high) for i in range(*run)) == list(range(n))
        known = {run: trees.total(run, leaves, op) for run in (*low, *high)}
        assert trees.total((0, n), known, op) == trees.total((0, n), leaves, op)


# Programs


def _programs():
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    return {name: bits(out) for name, out in programs(mesh)}


def test_programs_have_the_same_bits_on_any_number_of_processes(gloo) -> None:
    same_on(gloo, (2, 4), 4, _programs)


def values(n, shape, dtype):
    x = torch.randn(n, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    return x.to(dtype)


def _collectives(sizes, shape, dtype):
    names = ("a", "b", "c")[: len(sizes)]
    mesh = vfn.make_mesh(sizes, names)
    x = vfn.shard(values(math.prod(sizes), shape, dtype), mesh, P(names))
    found = {}

    def run(what, body):
        found[what] = bits(
            vfn.shard_map(lambda v: body(v[0])[None], mesh=mesh, in_specs=P(names), out_specs=P(names))(x)
        )

    for over in (axes for k in range(1, len(names) + 1) for axes in itertools.permutations(names, k)):
        n = math.prod(dict(zip(names, sizes))[name] for name in over)
        run(f"psum {over}", lambda v, over=over: vfn.psum(v, over))
        run(f"psum of a view {over}", lambda v, over=over: vfn.psum(v.t() if v.ndim == 2 else v, over))
        run(f"pmax {over}", lambda v, over=over: vfn.pmax(v, over))
        run(f"all_gather {over}", lambda v, over=over: vfn.all_gather(v, over).sin().sum(0))
        if shape and shape[0] % n == 0:
            run(f"psum_scatter {over}", lambda v, over=over: vfn.psum_scatter(v, over, tiled=True))
            run(f"all_to_all {over}", lambda v, over=over: vfn.all_to_all(v, over, 0, 0, tiled=True))
        run(
            f"ppermute {over}",
            lambda v, over=over, n=n: vfn.ppermute(v, over, [(i, (i + 1) % n) for i in range(n - 1)]),
        )
        run(f"pbroadcast {over}", lambda v, over=over, n=n: vfn.pbroadcast(v, over, n - 1))
    return found


SMALL, LARGE = (12, 5), (24, 4001)  # in one message to everyone, and in shares


@pytest.mark.parametrize(
    ("counts", "sizes", "shape", "dtype"),
    [
        ((2, 4), (2, 2), SMALL, torch.float32),
        ((2, 4), (4,), LARGE, torch.float32),
        ((2, 4), (2, 1, 2), SMALL, torch.bfloat16),
        ((3, 2), (6,), SMALL, torch.float32),
        ((3, 2), (2, 3), SMALL, torch.float64),
        ((3, 2), (3, 2), LARGE, torch.float32),
        ((4, 2), (2, 6), SMALL, torch.bfloat16),
        ((2, 4), (2, 2), SMALL, torch.int32),
        ((2, 4), (4,), (), torch.float32),
        ((4,), (4, 2), (0, 3), torch.float32),
    ],
)
def test_collectives_have_the_same_bits(gloo, counts, sizes, shape, dtype) -> None:
    same_on(gloo, counts, math.prod(sizes), _collectives, sizes, shape, dtype)


def test_eight_processes_play_eight_ranks(gloo) -> None:
    same_on(gloo, (8,), 8, _collectives, (2, 2, 2), SMALL, torch.float32)


def test_a_sum_is_that_of_the_tree() -> None:
    x = values(6, (40,), torch.float32)
    with vfn.deterministic(6):
        mesh = vfn.make_mesh((3, 2), ("a", "b"))
        for over in (("a", "b"), ("b", "a")):  # the tree follows the mesh
            body = lambda v, over=over: vfn.psum(v, over)
            found = vfn.shard_map(body, mesh=mesh, in_specs=P(("a", "b")), out_specs=P())(
                vfn.shard(x, mesh, P(("a", "b")))
            )
            expected = ((x[0] + x[1]) + (x[2] + x[3])) + (x[4] + x[5])
            assert torch.equal(vfn.unshard(found)[0], expected)


def test_a_maximum_keeps_nan_and_the_sign_of_zero(gloo) -> None:
    same_on(gloo, (2, 4), 4, _signs)


def _signs():
    mesh = vfn.make_mesh(4, "a")
    rows = torch.tensor(
        [[0.0, -0.0, 1.0, math.nan], [-0.0, 0.0, math.nan, 2.0], [0.0, -0.0, -math.inf, 1.0], [-0.0] * 4]
    )
    mapped = lambda op: vfn.shard_map(lambda v: op(v, "a"), mesh=mesh, in_specs=P("a"), out_specs=P())
    return {op.__name__: bits(mapped(op)(vfn.shard(rows, mesh, P("a")))) for op in (vfn.pmax, vfn.pmin)}


# Training


def _loss(params, x):
    for w in params["hidden"]:
        x = torch.tanh(x @ w)
    return (x @ params["out"]).square().mean()


LAYOUTS = {  # of the batch, and of the parameters
    "dp": (P(("dp", "fsdp")), P()),
    "fsdp": (P(("dp", "fsdp")), P(("dp", "fsdp"))),
    "hsdp": (P(("dp", "fsdp")), P("fsdp")),
    "uneven": (P(("dp", "fsdp")), P(None, ("dp", "fsdp"))),
}


def _trained(layout, jit, dtype=torch.float32, opt=None):
    mesh = vfn.make_mesh((2, 4), ("dp", "fsdp"))
    batch, spec = LAYOUTS[layout]
    key = vfn.random.key(0)
    normal = lambda i, shape: (vfn.random.normal(vfn.random.fold_in(key, i), shape) / math.sqrt(shape[0])).to(dtype)
    params = {"hidden": [normal(0, (16, 24)), normal(1, (24, 24))], "out": normal(2, (24, 3))}
    params = vfn.shard(params, mesh, spec)
    opt = opt or vfn.optim.adamw(1e-2)
    state = opt.init(params)

    def step(params, state, x):
        grads = vfn.grad(_loss)(params, x)
        updates, state = opt.update(grads, state, params)
        return vfn.optim.apply_updates(params, updates), state

    step = vfn.jit(step) if jit else step
    for i in range(3):
        x = vfn.random.normal(vfn.random.fold_in(key, 100 + i), (32, 16)).to(dtype)
        params, state = step(params, state, vfn.shard(x, mesh, batch))
    leaves = vfn.tree.leaves((params, state))
    return {str(i): bits(x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_have_the_same_bits(gloo, layout, jit) -> None:
    same_on(gloo, (2, 4), 8, _trained, layout, jit)


def test_steps_in_bfloat16_have_the_same_bits(gloo) -> None:
    same_on(gloo, (2, 8), 8, _trained, "hsdp", True, torch.bfloat16)


def test_all_layouts_of_data_have_the_same_bits() -> None:
    found = [played(8, _trained, layout, jit) for layout in ("dp", "fsdp", "hsdp") for jit in (False, True)]
    assert all(one == found[0] for one in found)


def test_adafactor_has_the_same_bits_in_all_layouts_of_data() -> None:
    run = lambda layout, jit: played(8, _trained, layout, jit, torch.float32, vfn.optim.adafactor(1e-2))
    found = [run(layout, jit) for layout, jit in (*zip(LAYOUTS, itertools.repeat(False)), ("fsdp", True))]
    assert all(one == found[0] for one in found)


def _recorded(length):
    """What a function gives that is recorded, its plan's collectives, and what that is of; how often it is run for that."""
    mesh, runs, key = vfn.make_mesh((2, 2), ("dp", "tp")), 0, vfn.random.key(0)
    plain = torch.ones(2)

    @vfn.jit
    def f(x, w):
        nonlocal runs
        runs += 1
        x = vfn.random.dropout(vfn.random.fold_in(key, 1), x, 0.5)  # by a table of each rank's own
        return torch.tanh(x).square().sum(), (x * w * plain).sum(), vfn.with_sharding(x * 2, P())

    x, w = (vfn.shard(values(length, (2,), torch.float32), mesh, P(("dp", "tp"))) for _ in range(2))
    with warnings.catch_warnings(action="error"):
        found, again = f(x, w), f(x, w)
    assert vfn.digest(found) == vfn.digest(again)
    plan = f.lower(x, w)
    calls = [(one.op, one.axes) for one in plan.comms()]
    return {"values": list(map(bits, found)), "calls": calls, "as one": plan.origin.plan.is_of_one_rank, "runs": runs}


def test_what_ranks_do_alike_is_recorded_once(gloo) -> None:
    found = same_on(gloo, (2, 4), 4, _recorded, 8)
    assert (found["as one"], found["runs"]) == (True, 1)
    # of 7 the last rank has less: the process that plays it sees that, and tells the other one
    assert not same_on(gloo, (2,), 4, _recorded, 7)["as one"]


def _looped(jit):
    """Loops and choices over layers that are sharded in some way, which a plan has of each rank by itself."""
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    x = vfn.shard(values(6, (5,), torch.float32), mesh, P("dp"))
    w = vfn.shard(values(3, (5, 5), torch.float32) * 0.3, mesh, P(None, "dp", "tp"))
    layer = lambda h, w: vfn.with_sharding(torch.tanh(h @ w) + h / 8, P("dp"))
    again = lambda c, w: (layer(c[0], w), c[1] + 1)

    def loss(w):
        h, sums = vfn.scan(lambda h, w: (layer(h, w), h.sum()), x, w)
        h = vfn.cond(x.sum() > 0, lambda h: layer(h, w[0]), lambda h: layer(h, torch.softmax(w[1], 1)), h)
        return h.square().mean() + sums.mean()

    run = lambda w: (
        vfn.grad(loss)(w),
        vfn.while_loop(lambda c: c[1] < 3, lambda c: again(c, w[2]), (x, torch.tensor(0)))[0],
    )
    return dict(zip(("scan and cond", "while_loop"), map(bits, jit(run)(w))))


def test_loops_have_the_same_bits(gloo) -> None:
    assert same_on(gloo, (2, 4), 4, _looped, vfn.jit) == played(4, _looped, lambda run: run)


def _one_element():
    """Sums of blocks of one element whose stride is not 1."""
    mesh = vfn.make_mesh(4, "dp")
    strided = lambda v: v[:1].as_strided((1,), (2,))
    run = lambda body, out: bits(
        vfn.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=out)(
            vfn.shard(values(8, (), torch.float32), mesh, P("dp"))
        )
    )
    return {
        "sum": run(lambda v: vfn.psum(strided(v), "dp"), P()),
        "gathered": run(lambda v: vfn.all_gather(strided(v), "dp", tiled=True), P("dp")),
    }


def test_blocks_of_one_element_have_the_same_bits(gloo) -> None:
    same_on(gloo, (2, 4), 4, _one_element)


def _second_order():
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    w = vfn.shard(values(6, (5,), torch.float32), mesh, P(None, "tp"))
    x = vfn.shard(values(7, (6,), torch.float32), mesh, P("dp"))
    loss = lambda w, x: torch.tanh(x @ w).square().sum()
    size = lambda w, x: vfn.grad(loss)(w, x).square().sum()
    on_part = vfn.shard(values(4, (5,), torch.float32), mesh["tp"], P("tp"))  # of which a process plays fewer ranks
    both = vfn.jit(lambda w, v: (vfn.with_sharding((w * 2).sum(), P()), vfn.with_sharding((v * 3).sum(), P())))
    return {
        "gradient": bits(vfn.grad(size)(w, x)),
        "plan": bits(vfn.jit(vfn.grad(size))(w, x)),
        "plan of a mesh and a part of it": list(map(bits, both(w, on_part))),
    }


def test_second_derivatives_have_the_same_bits(gloo) -> None:
    same_on(gloo, (2, 4), 4, _second_order)


UNLIKE = ("1:27", "1:37", "1:71")  # processes play ranks with blocks of other sizes: plans of these fell apart


@pytest.mark.filterwarnings("ignore")
def test_sampled_programs_have_the_same_bits(gloo) -> None:
    names = [*UNLIKE, *(f"10:{i}" for i in range(some(5, 9))), *(BODY + x for x in ("1:3", "1:17", "4711:106"))]
    expected = same_on(gloo, (2, 4), 4, found_in, names)
    assert sum(len(lines) > 1 for lines in expected.values()) > some(9, 12)


# Parts of a mesh


def _on_parts():
    mesh, found = vfn.make_mesh((2, 2, 2), ("pp", "dp", "tp")), {}
    for name in ("dp, tp", "an axis of a stage", "the outer axes"):
        part = PARTS[name](mesh)
        if part.get_coordinate() is not None:
            assert pickle.loads(pickle.dumps(part)) is part
            for i, (value, expected) in enumerate(values_on(part)):
                torch.testing.assert_close(vfn.unshard(value), expected, rtol=1e-5, atol=1e-6)
                found[f"{name} {i}"] = bits(value)
    return found


@pytest.mark.parametrize("count", [2, 4])
def test_parts_of_a_mesh_have_the_same_bits(gloo, count) -> None:
    alone, found = played(8, _on_parts), gloo(count, played, 8, _on_parts)
    assert all(one.items() <= alone.items() for one in found)
    assert set().union(*found) == alone.keys()


def _on_a_stage():
    mesh = vfn.make_mesh((2, 2), ("pp", "dp"))
    x = torch.arange(32.0).view(8, 4)
    back = [
        vfn.unshard(vfn.shard(vfn.shard(x, mesh["dp"], P("dp")), to, P("dp"))).equal(x) for to in (mesh, mesh["dp"])
    ]
    stage = mesh.at(pp=1)
    if stage.get_coordinate() is None:
        with pytest.raises(MeshError, match=r"this process, rank 0, is not in the mesh \(dp=2\)"):
            vfn.shard(x, stage, P("dp"))
    return back, repr(stage), stage.played_ranks


def test_a_process_that_plays_none_of_a_part_is_told_so(gloo) -> None:
    told = [True, True], "Mesh(dp=2) at pp=1 of (pp=2, dp=2)"
    assert gloo(2, played, 4, _on_a_stage) == [(*told, range(0)), (*told, range(2))]


def _half_rows():
    with pytest.raises(MeshError) as error:
        vfn.make_mesh((3, 4), ("a", "b"))["b"]
    return str(error.value)


def test_a_part_of_which_processes_play_unequal_shares_is_refused(gloo) -> None:
    what = "mesh: 2 processes that play the mesh (a=3, b=4) do not play as many ranks each of (b)\n"
    assert (
        gloo(2, played, 12, _half_rows)
        == [what + "  Instead: a number of processes whose ranks are whole rows of it"] * 2
    )


# Where the bits of two runs part


def _noted(folder, fault=1.0, last=vfn.psum):
    """What a run that is compared with an earlier one raises."""
    try:
        with vfn.deterministic(4, check=folder):
            mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
            x = vfn.shard(values(4, (6,), torch.float32), mesh, P(("dp", "tp")))
            y = vfn.shard_map(lambda v: vfn.psum(v, "tp"), mesh=mesh, in_specs=P(("dp", "tp")), out_specs=P("dp"))(x)
            body = lambda v: last(v * fault, "dp")
            step = vfn.jit(vfn.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P()))
            return [bits(step(y)) for _ in range(2)]
    except vfn.errors.DivergenceError as error:
        return str(error)


def test_the_first_collective_that_is_given_other_bits_is_named(gloo, tmp_path) -> None:
    alone = _noted(tmp_path)
    notes = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert [len(text.splitlines()) for text in notes.values()] == [3] * 4
    assert gloo(2, _noted, tmp_path) == [alone] * 2
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == notes
    for found, rank in zip(gloo(2, _noted, tmp_path, 1 + 2**-23), (0, 2)):
        of = f"deterministic: collective 2 of rank {rank} is given other bits than in the run noted in {tmp_path}\n"
        assert found.startswith(of + "  * psum over 'dp' of f32[")
        assert "the one before is the same: psum over 'tp' of f32[" in found
        assert 'body = lambda v: last(v * fault, "dp")' in found
    assert "is another than in the run noted in" in _noted(tmp_path, last=vfn.pmax)
    with vfn.deterministic(4, check=tmp_path), pytest.raises(vfn.errors.CheckpointError, match="may begin at any"):
        vfn.elastic(lambda state, x: (state, None), lambda: 0, lambda i: i, steps=1, virtual=4)


# What differs without it


def _usual_sum(count):
    """Eight terms, of which each process has as many, added up as usual: its own, then over the ranks."""
    x = values(8, (999,), torch.float32)
    mesh = vfn.make_mesh(count, "dp")
    added = vfn.shard_map(
        lambda v: vfn.psum(functools.reduce(torch.add, v), "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P()
    )
    return bits(added(vfn.shard(x, mesh, P("dp"))))


def test_without_it_the_bits_depend_on_the_number_of_processes(gloo) -> None:
    assert len({gloo(count, _usual_sum, count)[0] for count in (1, 2, 4, 8)}) >= 3


# The mode


def test_it_ends_with_its_block() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    with vfn.deterministic(4) as outer:
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_float32_matmul_precision() == "highest"
        with vfn.deterministic(2):
            assert vfn.make_mesh(2, "dp").played_ranks == range(2)
        assert vfn.make_mesh(4, "dp").played_ranks == range(4)
        assert repr(outer) == "deterministic(virtual=4)"
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision(before[1])
    with outer, vfn.simulate(4):
        assert repr(vfn.make_mesh(4, "dp")) == "Mesh(dp=4)"
    with vfn.simulate(2):
        assert vfn.make_mesh(2, "dp").played_ranks == range(2)


def _where():
    mesh = vfn.make_mesh((2, 4), ("dp", "tp"))
    return mesh.played_ranks, tuple(mesh.shape), tuple(mesh.get_coordinate())


def test_processes_play_consecutive_ranks() -> None:
    with vfn.deterministic(virtual=8):
        assert vfn.launch(_where, 4, device="cpu") == [
            (range(2 * i, 2 * i + 2), (2, 4), ((0, 0), (0, 2), (1, 0), (1, 2))[i]) for i in range(4)
        ]


MISUSES = {
    "virtual=0": (
        lambda: vfn.deterministic(0),
        "deterministic: virtual=0 is not a number of ranks; it must be an integer",
    ),
    "kernels": (
        lambda: vfn.deterministic(8, kernels="batch_invariant"),
        "deterministic: kernels must be 'torch', but it is",
    ),
    "check": (
        lambda: vfn.deterministic(8, check=3),
        "deterministic: check must be a folder, but it is the int 3",
    ),
    "launch": (
        lambda: vfn.launch(_where, 3),
        "launch: 3 processes cannot play 8 ranks, as many each, of deterministic(virtual=8)\n  Instead: 1, 2, 4 or 8 processes",
    ),
    "simulate": (lambda: vfn.simulate(4), "simulate: n=4, but there are 8 ranks under deterministic(virtual=8)"),
    "make_mesh": (lambda: vfn.make_mesh(4, "dp"), "make_mesh: dp=4 has 4 ranks, but there are 8 ranks"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_what_does_not_go_is_refused_by_name(name) -> None:
    call, text = MISUSES[name]
    with vfn.deterministic(8), pytest.raises(MeshError) as caught:
        call()
    assert str(caught.value).startswith(text)


def _three():
    with pytest.raises(MeshError, match="make_mesh: 3 processes cannot play 8 ranks"):
        vfn.make_mesh(8, "dp")
    return True


def test_processes_that_do_not_divide_the_ranks_are_refused(gloo) -> None:
    assert gloo(3, played, 8, _three) == [True] * 3


def test_a_compiler_is_refused() -> None:
    with vfn.deterministic(2), pytest.raises(TransformError, match="under vfn.deterministic, what inductor makes"):
        vfn.jit(torch.sin, backend="inductor")(torch.ones(2))


DRAWS = {
    "rand": lambda v: v + torch.rand(4),
    "of a generator": lambda v: v + torch.rand(4, generator=torch.Generator().manual_seed(1)),
    "rand_like": lambda v: v + torch.rand_like(v),
    "dropout": lambda v: torch.nn.functional.dropout(v, 0.5),
    "normal_": lambda v: v.clone().normal_(),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_from_a_generator_in_a_body_is_refused(name, check) -> None:
    with vfn.deterministic(2):
        mesh = vfn.make_mesh(2, "dp")
        f = vfn.shard_map(DRAWS[name], mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check_vma=check)
        with pytest.raises(RandomError, match="a keyed draw"):
            f(vfn.shard(torch.ones(4, 4), mesh, P("dp")))


@pytest.mark.parametrize(
    ("sizes", "first", "second", "merged"),
    [((2, 4), "b", "a", True), ((2, 4), "a", "b", False), ((2, 3), "b", "a", False)],
)
def test_sums_are_merged_only_where_their_trees_are_one(sizes, first, second, merged) -> None:
    with vfn.deterministic(math.prod(sizes)):
        mesh = vfn.make_mesh(sizes, ("a", "b"))
        inner, outer = (Collective("all_reduce", mesh, (axis,), ("sum",)) for axis in (first, second))
        assert bool(merge_axes._instead(inner, outer)) is merged
        assert not merge_axes._instead(inner, Collective("reduce_scatter", mesh, (second,), (0,)))
