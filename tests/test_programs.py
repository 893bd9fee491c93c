"""The same programs on plain tensors, on simulated meshes and on real processes: equal outputs and equal gradients."""

import math
from dataclasses import replace

import pytest
import torch
from programs import PROGRAMS, Program, mean_square, mlp, tensor_parallel

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.arrays import interpreter, reshard
from vescale_fn._core.arrays.rules import table as rules
from vescale_fn._core.base import tree
from vescale_fn._core.distributed import collectives
from vescale_fn._core.distributed.blocks import Blocks
from vescale_fn._core.sharding import index_map
from vescale_fn._core.transforms import grad
from vescale_fn.random import sharded

# mesh sizes, and the axes that play the roles of data and tensor
MESHES = {
    "1": ((1,), "a", None),
    "1x1": ((1, 1), "a", "b"),
    "4 data": ((4,), "a", None),
    "4 tensor": ((4,), None, "a"),
    "2x3": ((2, 3), "a", "b"),
    "2x2x2": ((2, 2, 2), ("c", "a"), "b"),
}
TOLERANCE = {
    "rtol": 1e-10,
    "atol": 1e-12,
}  # fp64, sums in another order; some outputs are differences of larger numbers


def weights(x: torch.Tensor, i: int) -> torch.Tensor:
    return torch.cos(torch.arange(x.numel(), dtype=x.dtype) + i).view(x.shape)


def run(program: Program, mesh, d, t):
    """The outputs of a program, and the gradient of a weighted sum of them, as plain tensors."""
    params, data = program.inputs()
    if mesh is not None:
        param_specs, data_specs = program.specs(d, t)
        params, data = vfn.shard(params, mesh, param_specs), vfn.shard(data, mesh, data_specs)

    def loss(params):
        out = program.f(params, data, d, t)
        terms = [
            (x * weights(x, i)).sum()
            for i, x in enumerate(tree.leaves(out))
            if isinstance(x, torch.Tensor) and x.dtype in (torch.float64, torch.float32) and x.requires_grad
        ]
        return sum(terms, torch.zeros((), dtype=torch.float64)), out

    with vfn.use_mesh(mesh):
        (_, out), grads = vfn.value_and_grad(loss, has_aux=True)(params)
    if mesh is not None:
        for g, p in zip(tree.leaves(grads), tree.leaves(params)):
            if isinstance(p, torch.Tensor):
                assert vfn.spec_of(g) == vfn.spec_of(p), "a gradient lies as its parameter"
                assert g.dtype == p.dtype
    return vfn.unshard(out), vfn.unshard(grads)


_reference: dict[str, tuple] = {}


def reference(program: Program):
    if program.name not in _reference:
        _reference[program.name] = run(program, None, None, None)
    return _reference[program.name]


def differences(program: Program, got) -> list[str]:
    """Where outputs or gradients differ from those of one device."""
    found = []
    for what, mine, theirs in zip(("output", "gradient"), got, reference(program)):
        paths = tree.paths(theirs, what)
        if tree.paths(mine, what) != paths:
            return [f"{what}: the structures differ"]
        for path, a, b in zip(paths, tree.leaves(mine), tree.leaves(theirs)):
            if not isinstance(b, torch.Tensor):
                if a != b:
                    found.append(f"{path}: {a!r} for {b!r}")
                continue
            exact = program.exact and what == "output"
            how = {"rtol": 0, "atol": 0} if exact or not b.dtype.is_floating_point else tolerance(b.dtype)
            try:
                torch.testing.assert_close(a, b, equal_nan=True, **how)
            except AssertionError as error:
                found.append(f"{path}: {error}")
    return found


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return TOLERANCE if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_simulated(name: str, mesh: str) -> None:
    sizes, d, t = MESHES[mesh]
    with vfn.simulate(math.prod(sizes)):
        got = run(PROGRAMS[name], vfn.make_mesh(sizes, tuple("abc"[: len(sizes)])), d, t)
        assert not differences(PROGRAMS[name], got)


def _on_real_ranks(sizes, d, t, expected):
    _reference.update(expected)
    mesh = vfn.make_mesh(sizes, tuple("abc"[: len(sizes)]))
    wrong = {name: differences(PROGRAMS[name], run(PROGRAMS[name], mesh, d, t)) for name in expected}
    return {name: found for name, found in wrong.items() if found}


def test_real_ranks(gloo) -> None:
    expected = {name: reference(PROGRAMS[name]) for name in list(PROGRAMS)[::2]}  # of the others, `test_jit` takes some
    assert gloo(4, _on_real_ranks, (2, 2), "a", "b", expected) == [{}] * 4


# --- how much travels -------------------------------------------------------------------------------------------------


def even_layers(n: int = 8) -> dict[str, torch.Tensor]:
    shapes = {"w1": (n, 2 * n), "b1": (2 * n,), "w2": (2 * n, n), "b2": (n,)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def ops(log) -> dict[str, int]:
    return {op: log.count(op) for op in sorted({record.op for record in log})}


@pytest.fixture
def grid():
    with vfn.simulate(8):
        yield vfn.make_mesh((2, 4), ("dp", "tp"))


def test_tensor_parallel_mlp_takes_one_all_reduce_each_way(grid) -> None:
    params, x = even_layers(), torch.randn(8, 8, dtype=torch.float64)
    sharded = vfn.shard(params, grid, tensor_parallel("tp"))
    with vfn.comm_log() as forward:
        y, pullback = vfn.vjp(mlp, sharded, vfn.shard(x, grid, P("dp")))
        assert vfn.spec_of(y) == P("dp", unreduced={"tp"})
        vfn.with_sharding(y, P("dp"))
    assert [(r.op, r.axis, r.bytes) for r in forward] == [("all_reduce", "tp", 4 * 8 * 8)]
    with vfn.comm_log() as backward:
        grads, dx = pullback(torch.ones_like(y))
    assert backward.count(axis="tp") == backward.count("all_reduce", "tp") == 1
    assert (vfn.spec_of(grads["w1"]), vfn.spec_of(dx)) == (P(None, "tp"), P("dp"))
    with vfn.comm_log() as alone:  # of the parameters alone, nothing travels over tp
        vfn.grad(lambda p: mlp(p, vfn.shard(x, grid, P())).sum())(sharded)
    assert alone.count("all_reduce", "tp") <= 1


def test_a_data_parallel_step_takes_one_all_reduce(grid) -> None:
    """For the whole gradient tree, and the loss with it."""
    params = vfn.shard(even_layers(), grid, P())
    x, y = (vfn.shard(torch.randn(8, 8, dtype=torch.float64), grid, P(("dp", "tp"))) for _ in range(2))
    with vfn.comm_log() as log:
        loss, grads = vfn.value_and_grad(lambda p: mean_square(mlp(p, x), y))(params)
        {name: p - 0.1 * grads[name] for name, p in params.items()}
        loss.item()
    assert ops(log) == {"all_reduce": 1}
    assert log[0].axes == ("dp", "tp")
    assert log[0].bytes == 8 * (1 + sum(p.numel() for p in params.values()))


def test_fully_sharded_parameters_are_gathered_and_their_gradients_scattered(grid) -> None:
    params = vfn.shard(even_layers(), grid, P(("dp", "tp")))
    x, y = (vfn.shard(torch.randn(8, 8, dtype=torch.float64), grid, P(("dp", "tp"))) for _ in range(2))

    def loss(p):
        return mean_square(mlp(vfn.with_sharding(p, P()), x), y)

    with vfn.comm_log() as log:
        _, grads = vfn.value_and_grad(loss)(params)
    assert ops(log) == {"all_gather": 1, "all_reduce": 1, "reduce_scatter": 1}
    assert log.bytes("all_gather") == log.bytes("reduce_scatter") == 8 * sum(p.numel() for p in params.values())
    assert all(vfn.spec_of(g) == P(("dp", "tp")) for g in grads.values())
    with vfn.comm_log() as log:
        vfn.grad(vfn.remat(loss))(params)
    assert (log.count("all_gather"), log.count("reduce_scatter")) == (2, 1), "gathered again in the backward pass"


def test_sequence_parallel_gathers_and_scatters(grid) -> None:
    params = vfn.shard(even_layers(), grid, tensor_parallel("tp"))
    x = vfn.shard(torch.randn(8, 8, dtype=torch.float64), grid, P(("dp", "tp")))
    with vfn.comm_log() as log:
        h = torch.relu(vfn.with_sharding(x, P("dp")) @ params["w1"] + params["b1"]) @ params["w2"]
        y = vfn.with_sharding(h, P(("dp", "tp")))
    assert ops(log) == {"all_gather": 1, "reduce_scatter": 1}
    assert vfn.spec_of(y) == P(("dp", "tp"))


def test_a_partial_value_is_added_up_once(grid) -> None:
    x = vfn.shard(torch.randn(8, 8), grid, P("dp"))
    with vfn.comm_log() as log:
        s = x.sum(0)
        assert vfn.spec_of(s).unreduced == {"dp"}
        s.relu() + s.sin() + torch.ones(8)
        vfn.unshard(s)
        s.tolist(), repr(s)
    assert ops(log) == {"all_reduce": 1}
    s.add_(s)
    with vfn.comm_log() as log:
        s.relu()
    assert ops(log) == {"all_reduce": 1}, "it was written in place"


def test_linear_work_on_partial_values_moves_nothing(grid) -> None:
    x = vfn.shard(torch.randn(8, 8, dtype=torch.float64), grid, P("dp"))
    with vfn.comm_log() as log:
        y = (x.sum(0) + x.mean(0) * 2 - x.sum(0)).view(4, 2).t().sum(1)
    assert len(log) == 0
    torch.testing.assert_close(vfn.unshard(y), vfn.unshard(x).mean(0).view(4, 2).sum(0) * 2)


def test_rows_of_a_partial_sum_are_weighed_and_added_up_before_ranks_add_theirs(grid) -> None:
    """Where the result is half as large or less; not where a rank would need others' weights, or the result is no smaller."""
    rows, weights = torch.randn(4, 3, 6).double(), torch.randn(4, 1, 3).double()
    x, w = vfn.shard((rows, weights), grid, (P(unreduced={"tp"}), P()))
    with vfn.comm_log() as log:
        y = torch.bmm(w, x)
    assert len(log) == 0
    torch.testing.assert_close(vfn.unshard(y), weights @ rows)
    for other in (vfn.with_sharding(w, P("tp")), w.expand(4, 5, 3)):
        y = torch.bmm(other, x)
        assert not vfn.spec_of(y).unreduced
        torch.testing.assert_close(vfn.unshard(y)[:, :1], weights @ rows)


def test_attention_with_split_heads_moves_nothing_but_its_sum(grid) -> None:
    params = {"qkv": torch.randn(8, 48).double(), "out": torch.randn(16, 8).double()}
    x = vfn.shard(torch.randn(2, 6, 8).double(), grid, P("dp"))
    sharded = vfn.shard(params, grid, {"qkv": P(None, "tp"), "out": P("tp")})

    def attend(p, x):
        q, k, v = (x @ p["qkv"]).unflatten(-1, (4, 12)).transpose(1, 2).chunk(3, -1)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (mixed.transpose(1, 2).flatten(-2) @ p["out"]).relu()

    with vfn.comm_log() as log:
        y, pullback = vfn.vjp(attend, sharded, x)
        assert ops(log) == {"all_reduce": 1}
    with vfn.comm_log() as log:
        pullback(torch.ones_like(y))
    assert {(r.op, r.axis) for r in log} == {("all_reduce", "dp"), ("all_reduce", "tp")}
    assert log.count(axis="tp") == 1


# --- planted faults: the suite can fail -------------------------------------------------------------------------------


def _swapped(coordinates):
    """Ranks that take each other's place on two axes of a mesh."""

    def wrong(mesh, rank):
        right = coordinates(mesh, rank)
        return dict(zip(right, (right["b"] % 2, right["a"]))) if len(right) == 2 else right

    return wrong


def _rule(name, make):
    return lambda patch: patch.setitem(rules.RULES, name, make(rules.RULES[name]))


def _forgets_sums(rule):
    return lambda call: replace(rule(call), sums=frozenset())


def _local_count(rule):
    return lambda call: replace(rule(call), op=lambda block, *_, **__: block.mean([0]))


def _wire(name, fault):
    return lambda patch: patch.setattr(collectives, name, fault(getattr(collectives, name)))


FAULTS = {
    "all_reduce does nothing": _wire("all_reduce", lambda right: lambda x, *_: x),
    "all_reduce over the first axis only": _wire(
        "all_reduce", lambda right: lambda x, mesh, axes, *rest: right(x, mesh, axes[:1], *rest)
    ),
    "all_gather in the other order": _wire(
        "all_gather", lambda right: lambda x, *rest: Blocks(right(x, *rest).blocks[::-1])
    ),
    "reduce_scatter adds nothing": _wire(
        "reduce_scatter",
        lambda right: (
            lambda x, mesh, axes, dim, why: right(
                Blocks([b if r == 0 else b * 0 for r, b in enumerate(x.blocks)]), mesh, axes, dim, why
            )
        ),
    ),
    "all_to_all gives pieces to the wrong ranks": _wire(
        "all_to_all", lambda right: lambda x, *rest: Blocks(right(x, *rest).blocks[1:] + right(x, *rest).blocks[:1])
    ),
    "a slice takes the place of another rank": lambda patch: patch.setattr(
        reshard, "coordinates", _swapped(reshard.coordinates)
    ),
    "a sum forgets its parts": _rule("sum", _forgets_sums),
    "a contraction forgets its sum": _rule("mm", _forgets_sums),
    "a mean counts its own block": _rule("mean", _local_count),
    "a result's layout is forgotten": _rule(
        "t", lambda rule: lambda call: replace(rule(call), outs=tuple((None,) * len(row) for row in rule(call).outs))
    ),
    "softmax is taken in each block": _rule(
        "_softmax", lambda rule: lambda call: replace(rule(call), ins=((0, 1, 2),), outs=((0, 1, 2),))
    ),
    "a gradient is not brought to its parameter": lambda patch: patch.setattr(
        grad, "settle_together", lambda grads, primals: grads
    ),
    "a draw begins anew on each rank": lambda patch: patch.setattr(
        sharded,
        "local_indices",
        lambda shape, *rest: tuple(range(len(i)) for i in index_map.local_indices(shape, *rest)),
    ),
}
SENSITIVE = [
    "tensor_parallel_mlp",
    "data_parallel",
    "fully_sharded",
    "reductions",
    "moving_about",
    "draws",
    "containers",
    "contractions",
    "partial_values",
    "attention",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SENSITIVE:
        reference(PROGRAMS[name])
    sizes, d, t = MESHES["2x3"]
    try:
        with vfn.simulate(6), monkeypatch.context() as patch:
            forget_decisions()
            FAULTS[fault](patch)
            assert any(_notices(PROGRAMS[name], vfn.make_mesh(sizes, ("a", "b")), d, t) for name in SENSITIVE)
    finally:
        forget_decisions()


def forget_decisions() -> None:
    interpreter._cache.clear()
    rules.find.cache_clear()
    sharded._rectangles.cache_clear()


def _notices(program: Program, mesh, d, t) -> bool:
    try:
        return bool(differences(program, run(program, mesh, d, t)))
    except Exception:  # whatever it is, the fault shows
        return True


def test_without_a_fault_nothing_is_noticed() -> None:
    sizes, d, t = MESHES["2x3"]
    with vfn.simulate(6):
        for name in SENSITIVE:
            assert not differences(PROGRAMS[name], run(PROGRAMS[name], vfn.make_mesh(sizes, ("a", "b")), d, t))
