"""The usual paths of models: which collectives run, counted exactly, against what a careful person would write by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import vescale_fn as vfn
from benchmarks import collectives
from vescale_fn import P
from vescale_fn._core.base import tree


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def told(log: vfn.debug.CommLog) -> list[tuple[str, str, int]]:
    """What a log holds, in order: op, axis, bytes."""
    return [(r.op, r.axis, r.bytes) for r in log]


@pytest.fixture
def tp():
    with vfn.simulate(4):
        yield vfn.make_mesh((4,), ("tp",))


# --- sums that wait ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["h @ w + b", "b + h @ w", "linear", "add_", "sub", "twice"])
def test_a_bias_is_added_to_one_part_of_a_sum(tp, form: str) -> None:
    """A row-parallel matrix leaves a partial sum; adding the bias does not bring it together, so a reduce-scatter can."""
    h, w, b = rand(6, 8), rand(8, 12), rand(12)
    forms = {
        "h @ w + b": lambda h, w, b: h @ w + b,
        "b + h @ w": lambda h, w, b: b + h @ w,
        "linear": lambda h, w, b: torch.nn.functional.linear(h, w.T, b),
        "add_": lambda h, w, b: (h @ w).add_(b),
        "sub": lambda h, w, b: b - h @ w,
        "twice": lambda h, w, b: (h @ w + b) + b,
    }
    f = forms[form]
    args = vfn.shard((h, w, b), tp, (P(None, "tp"), P("tp"), P()))
    with vfn.comm_log() as log:
        y = f(*args)
        assert vfn.spec_of(y) == P(unreduced={"tp"})
        y = vfn.with_sharding(y, P(None, "tp"))
    assert told(log) == [("reduce_scatter", "tp", 6 * 12 * 4)]
    torch.testing.assert_close(vfn.unshard(y), f(h, w, b))


def test_a_sum_in_a_body_of_which_each_rank_uses_its_own_part(tp) -> None:
    """In a plan it is a reduce-scatter, also behind a bias."""
    h, w, b = rand(6, 8), rand(8, 12), rand(12)
    body = lambda h, w, b: vfn.psum(h @ w, "tp") + b
    whole = vfn.shard_map(body, mesh=tp, in_specs=(P(None, "tp"), P("tp"), P()), out_specs=P())
    step = vfn.jit(lambda *args: vfn.with_sharding(whole(*args), P(None, "tp")))
    args = vfn.shard((h, w, b), tp, (P(None, "tp"), P("tp"), P()))
    step(*args)
    with vfn.comm_log() as log:
        y = step(*args)
    assert told(log) == [("reduce_scatter", "tp", 6 * 12 * 4)]
    torch.testing.assert_close(vfn.unshard(y), h @ w + b)


@pytest.mark.parametrize(
    ("add", "spec"),
    [
        (lambda y, x: y + x.bfloat16(), P(unreduced={"tp"})),  # bf16 is promoted: the narrower value loses nothing
        (lambda y, x: y[:, :1] + x, P()),  # the sum would grow before it is sent
        (lambda y, x: torch.cat([y, x]), P()),
        (lambda y, x: y + vfn.with_sharding(x, P(None, "tp")), P(None, "tp")),  # sent where the other is: half the way
        (lambda y, x: x.clone().add_(y), P()),  # what is written stays where it is
        (lambda y, x: y.long() + x.long(), P()),
    ],
    ids=["mixed floats", "broadcast", "cat", "split", "written", "int"],
)
def test_when_a_sum_with_whole_values_stays_partial(tp, add, spec: P) -> None:
    """It does where that sends no more than at once, and is the same to rounding."""
    h, w, x = rand(6, 8), rand(8, 12), rand(6, 12)
    y = vfn.shard(h, tp, P(None, "tp")) @ vfn.shard(w, tp, P("tp"))
    out = add(y, vfn.shard(x, tp, P()))
    assert vfn.spec_of(out) == spec
    torch.testing.assert_close(vfn.unshard(out), add(h @ w, x))


READ = {
    "gather": lambda y, i, j, base: y.gather(0, i),
    "index_select": lambda y, i, j, base: y.index_select(0, j),
    "index": lambda y, i, j, base: y[j],
    "two indices": lambda y, i, j, base: y[j, j],
    "scatter_add": lambda y, i, j, base: base[:4].scatter_add(0, i % 4, y[:4]),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_read_of_a_partial_sum_is_one(tp, name: str) -> None:
    """Less is added up then; but no index is gathered for it."""
    h, w, base = rand(6, 8).double(), rand(8, 12).double(), rand(6, 12).double()
    i, j = (torch.arange(48) * 5 % 6).view(4, 12), torch.arange(4)
    f = lambda h, w, i, j, base: READ[name](h @ w, i, j, base)
    lay = lambda spec: vfn.shard((h, w, i, j, base), tp, (P(None, "tp"), P("tp"), spec, spec, P()))
    want = vfn.vjp(lambda h, w: f(h, w, i, j, base), h, w)
    for spec in (P(), P("tp")):
        args = lay(spec)
        with vfn.comm_log() as log:
            y, back = vfn.vjp(lambda h, w: f(h, w, *args[2:]), *args[:2])
        if spec == P():
            assert vfn.spec_of(y) == P(unreduced={"tp"})
            assert not log.count()
        elif name != "two indices":
            assert not log.count("all_gather")
        torch.testing.assert_close(vfn.unshard(y), want[0])
        for got, one in zip(back(torch.ones_like(y)), want[1](torch.ones_like(want[0])), strict=True):
            torch.testing.assert_close(vfn.unshard(got), one)


# --- a transformer ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone():
    return collectives.on_one_device(SIZES)


SIZES = collectives.Sizes(layers=2)


@pytest.mark.parametrize("spelling", ["sdpa", "q @ k.mT", "einsum"])
@pytest.mark.parametrize("name", collectives.REGIMES)
def test_a_gpt_step_sends_what_the_best_program_by_hand_sends(alone, name: str, spelling: str) -> None:
    """Count and bytes of every kind of collective; and the right gradients."""
    value, grads, log = collectives.step(name, SIZES, spelling)
    torch.testing.assert_close(value, alone[0])
    for got, want in zip(tree.leaves(grads), tree.leaves(alone[1]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)  # sums of float32 in another order
    assert Counter(told(log)) == collectives.REGIMES[name].hand(SIZES, collectives.REGIMES[name])


def test_what_a_mean_over_tokens_costs(tp) -> None:
    """`cross_entropy` leaves out ignored tokens, so a mean needs their number before the gradient: 8 bytes, once."""
    x, w, t = rand(8, 6), rand(6, 5), torch.arange(8) % 5
    args = vfn.shard((x, t), tp, P("tp"))
    for reduction, expected in (
        ("mean", [("all_reduce", "tp", 8), ("all_reduce", "tp", 120)]),
        ("sum", [("all_reduce", "tp", 124)]),
    ):
        f = lambda w, x, t, r=reduction: F.cross_entropy(x @ w, t, reduction=r)
        with vfn.comm_log() as log:
            got = vfn.value_and_grad(f)(vfn.shard(w, tp, P()), *args)
        torch.testing.assert_close(vfn.unshard(got), vfn.value_and_grad(f)(w, x, t))
        assert told(log) == expected


def test_tokens_of_two_split_dims_stay_where_they_are() -> None:
    """Batch over dp and sequence over sp, flattened for a loss or a router: nothing moves."""
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "sp"))
        x, t = rand(4, 6, 5), torch.arange(24).view(4, 6) % 5
        f = lambda x, t: F.cross_entropy(x.flatten(0, 1), t.reshape(-1), reduction="sum")
        with vfn.comm_log() as log:
            got = vfn.value_and_grad(f)(*vfn.shard((x, t), mesh, P("dp", "sp")))
        assert told(log) == [("all_reduce", "dp,sp", 4)]
        torch.testing.assert_close(vfn.unshard(got), vfn.value_and_grad(f)(x, t))


# --- convnets, recurrent nets, experts --------------------------------------------------------------------------------


def conv_params():
    return {
        "c1": rand(6, 3, 3, 3) / 4,
        "b1": rand(6),
        "c2": rand(8, 6, 3, 3) / 6,
        "g1": rand(6) + 2,
        "g2": rand(8) + 2,
        "h1": rand(6),
        "h2": rand(8),
        "w": rand(32, 5),
        "b": rand(5),
    }


def convnet(p, x, t, norm):
    x = F.relu(norm(F.conv2d(x, p["c1"], p["b1"], padding=1), p["g1"], p["h1"]))
    x = F.relu(norm(F.conv2d(F.max_pool2d(x, 2), p["c2"], padding=1), p["g2"], p["h2"]))
    return F.cross_entropy(F.adaptive_avg_pool2d(x, 2).flatten(1) @ p["w"] + p["b"], t, reduction="sum") / len(t)


def grouped(x, scale, shift):
    return F.group_norm(x, 2, scale, shift)


def batched(x, scale, shift):
    return F.batch_norm(x, None, None, scale, shift, training=True)


CELLS = {"gru": (3, torch._VF.gru_cell), "lstm": (4, torch._VF.lstm_cell), "rnn": (1, torch._VF.rnn_tanh_cell)}


def cell_params(gates: int):
    return {
        "in": rand(gates * 6, 5) / 3,
        "hh": rand(gates * 6, 6) / 3,
        "b": rand(gates * 6),
        "c": rand(gates * 6, seed=1),
        "out": rand(6, 4),
    }


def recurrent(p, x, h, name):
    """A cell in a loop over time."""
    state, outs = (h, h) if name == "lstm" else h, []
    for t in range(x.shape[1]):
        state = CELLS[name][1](x[:, t], state, p["in"], p["hh"], p["b"], p["c"])
        outs.append(state[0] if name == "lstm" else state)
    return (torch.stack(outs, 1) @ p["out"]).square().sum()


def gru_by_hand(p, x, h):
    outs = []
    for t in range(x.shape[1]):
        r, z, n = (x[:, t] @ p["in"].T + p["b"]).chunk(3, -1)
        hr, hz, hn = (h @ p["hh"].T + p["c"]).chunk(3, -1)
        z = torch.sigmoid(z + hz)
        h = (1 - z) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + z * h
        outs.append(h)
    return (torch.stack(outs, 1) @ p["out"]).square().sum()


def bytes_of(params) -> int:
    return sum(4 * x.numel() for x in tree.leaves(params))


def data_parallel(f, params, *data) -> vfn.debug.CommLog:
    """The log of a data-parallel step over 2 ranks, whose values are those of one device."""
    want = vfn.value_and_grad(f)(params, *data)
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("dp",))
        with vfn.comm_log() as log:
            got = vfn.value_and_grad(f)(vfn.shard(params, mesh, P()), *vfn.shard(data, mesh, P("dp")))
        for a, b in zip(tree.leaves(vfn.unshard(got)), tree.leaves(want), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # sums of float32 in another order
    return log


ONE_BUCKET = {
    "convnet, group norm": (
        lambda p, x, t: convnet(p, x, t, grouped),
        conv_params(),
        rand(8, 3, 8, 8),
        torch.arange(8) % 5,
    ),
    "gru by hand": (gru_by_hand, cell_params(3), rand(8, 3, 5), rand(8, 6)),
    **{
        name: (lambda p, x, h, name=name: recurrent(p, x, h, name), cell_params(gates), rand(8, 3, 5), rand(8, 6))
        for name, (gates, _) in CELLS.items()
    },
}


@pytest.mark.parametrize("name", ONE_BUCKET)
def test_a_data_parallel_step_is_one_all_reduce(name: str) -> None:
    """Of all gradients and the loss, as DDP with one bucket."""
    f, params, *data = ONE_BUCKET[name]
    assert told(data_parallel(f, params, *data)) == [("all_reduce", "dp", bytes_of(params) + 4)]


def test_batch_norm_sends_statistics_and_no_batch() -> None:
    """Over a split batch it is torch's SyncBatchNorm: three numbers a channel forward (in double precision), two backward."""
    params, x, t = conv_params(), rand(8, 3, 8, 8), torch.arange(8) % 5
    log = data_parallel(lambda p, x, t: convnet(p, x, t, batched), params, x, t)
    stats = [("all_reduce", "dp", 3 * 8 * c) for c in (6, 8)] + [("all_reduce", "dp", 2 * 4 * c) for c in (8, 6)]
    scales = sum(4 * params[name].numel() for name in ("g1", "h1", "g2", "h2"))  # whole already: those two numbers
    assert [r for r in told(log) if r[2]] == [*stats, ("all_reduce", "dp", bytes_of(params) - scales + 4)]


@pytest.mark.parametrize(
    ("mean", "dtype"), [(0.0, torch.float32), (1e4, torch.float32), (3.0, torch.bfloat16)], ids=str
)
def test_batch_norm_of_values_far_from_zero(mean: float, dtype: torch.dtype) -> None:
    """Statistics of parts, put together, lose nothing; the ranks hold 3, 3 and 1 examples."""
    x = (rand(7, 4, 3) + mean).to(dtype)
    want = F.batch_norm(x.double(), None, None, training=True)
    alone = F.batch_norm(x, None, None, training=True).double() - want
    with vfn.simulate(3):
        got = vfn.unshard(F.batch_norm(vfn.shard(x, vfn.make_mesh((3,), ("dp",)), P("dp")), None, None, training=True))
    assert (got.double() - want).abs().max() <= 2 * alone.abs().max() + 1e-6


def experts(p, x, to_experts=None, to_tokens=None):
    """Each token to one expert of limited room, by one-hot dispatch in groups (GShard, arXiv 2006.16668)."""
    scores = (x @ p["gate"]).softmax(-1)
    weight, choice = scores.max(-1)
    chosen = F.one_hot(choice, 4)
    place = ((chosen.cumsum(1) - 1) * chosen).sum(-1)
    dispatch = F.one_hot(place.clamp(max=2), 3)[:, :, None, :] * chosen[..., None] * (place < 3)[..., None, None]
    dispatch = dispatch.to(x.dtype)
    inputs = torch.einsum("gtec,gtd->egcd", dispatch, x)
    inputs = inputs if to_experts is None else vfn.with_sharding(inputs, to_experts)
    outputs = torch.relu(torch.einsum("egcd,edh->egch", inputs, p["up"]))
    outputs = torch.einsum("egch,ehd->egcd", outputs, p["down"])
    outputs = outputs if to_tokens is None else vfn.with_sharding(outputs, to_tokens)
    return torch.einsum("gtec,egcd->gtd", dispatch * weight[..., None, None], outputs)


def test_experts_take_an_all_to_all_each_way(tp) -> None:
    """Tokens to the experts' ranks and back, forward and backward; and one bucket of the gate's gradient with the loss."""
    p = {"gate": rand(6, 4), "up": rand(4, 6, 8) / 3, "down": rand(4, 8, 6) / 3}
    x, w = rand(8, 5, 6), rand(6, 6)
    loss = lambda both, x, *specs: experts(both[0], x @ both[1], *specs).square().sum()
    want = vfn.value_and_grad(loss)((p, w), x)
    there = vfn.shard((p, w), tp, ({"gate": P(), "up": P("tp"), "down": P("tp")}, P()))
    with vfn.comm_log() as log:
        got = vfn.value_and_grad(loss)(there, vfn.shard(x, tp, P("tp")), P("tp"), P(None, "tp"))
    for a, b in zip(tree.leaves(vfn.unshard(got)), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # sums of float32 in another order
    slots = 4 * 4 * 8 * 3 * 6 // 4  # experts x groups x room x width, of which a rank holds a quarter
    assert told(log) == [("all_to_all", "tp", slots)] * 4 + [("all_reduce", "tp", 4 * (24 + 36 + 1))]


# --- trees that move --------------------------------------------------------------------------------------------------


def test_a_tree_moves_as_one_and_its_gradients_as_one(tp) -> None:
    """Several dims, dtypes, an uneven leaf, one that no result depends on; values and gradients are those leaf by leaf."""
    params = {"a": rand(8, 3), "b": rand(3, 4), "c": rand(4).double(), "d": rand(6, 2), "e": rand(4, 4), "f": rand(8)}
    specs = {"a": P("tp"), "b": P(None, "tp"), "c": P("tp"), "d": P("tp"), "e": P(None, "tp"), "f": P()}
    there = vfn.shard(params, tp, specs)

    def loss(p, gather):
        p = gather(p)
        return sum((p[n].float() ** 2).sum() * i for i, n in enumerate("abcdf", 1))

    together = lambda p: vfn.with_sharding(p, P())
    with vfn.comm_log() as log:
        got = vfn.value_and_grad(loss)(there, together)
    f32 = 4 * (24 + 12 + 16)
    assert Counter(told(log)) == Counter(
        [("all_gather", "tp", f32), ("all_gather", "tp", 32), ("all_gather", "tp", 64)]
    )
    assert vfn.spec_of(got[1]["b"]) == P(None, "tp")
    torch.testing.assert_close(vfn.unshard(got), vfn.value_and_grad(loss)(params, lambda p: p))

    x = vfn.shard(rand(8, 4), tp, P("tp"))
    work = lambda p: (x @ vfn.with_sharding(p, P())["e"] * vfn.with_sharding(p, P())["b"][0]).sum()
    with vfn.comm_log() as log:
        g = vfn.grad(lambda p: work({"b": p["b"], "e": p["e"]}))(there)
    assert log.count("reduce_scatter") == 2  # of each with_sharding the one leaf that was used
    with vfn.comm_log() as log:
        g = vfn.grad(lambda p: (lambda q: (x @ q["e"] * q["b"][0]).sum())(vfn.with_sharding(p, P())))(there)
    assert [r for r in told(log) if r[0] == "reduce_scatter"] == [("reduce_scatter", "tp", 4 * (12 + 16))]
    want = vfn.grad(lambda p: (vfn.unshard(x) @ p["e"] * p["b"][0]).sum())(params)
    torch.testing.assert_close(vfn.unshard(g), want)


def test_a_tree_that_moves_under_transforms(tp) -> None:
    a, b = rand(8, 4), rand(4, 8)
    tree_ = vfn.shard((a, b), tp, (P("tp"), P(None, "tp")))
    f = lambda ab: (vfn.with_sharding(ab, P())[0] @ vfn.with_sharding(ab, P())[1]).tanh()
    torch.testing.assert_close(vfn.unshard(vfn.jvp(f, (tree_,), (tree_,))), vfn.jvp(f, ((a, b),), ((a, b),)))
    rows = vfn.vmap(lambda ab: vfn.with_sharding(ab, P())[0] * 2 + vfn.with_sharding(ab, P())[1])
    torch.testing.assert_close(vfn.unshard(rows(vfn.shard((a, a + 1), tp, P(None, "tp")))), a * 2 + a + 1)
    twice = vfn.grad(lambda ab: vfn.grad(lambda ab: f(ab).sum())(ab)[0].square().sum())
    torch.testing.assert_close(vfn.unshard(twice(tree_)), twice((a, b)))


# --- reduced once -----------------------------------------------------------------------------------------------------


ONCE = {  # ways of needing x @ w, of which the ranks hold partial sums, whole in the forward and in the backward
    "saved for the backward": lambda y: y.tanh() * y.exp(),
    "two uses": lambda y: (y.relu() * 2).sum() + y.sigmoid().sum(),
    "detach": lambda y: y.exp() * y.detach().sin(),
    "a view": lambda y: y.view(6, 4).exp().sum() + y.view(6, 4).sin().sum(),
    "an alias": lambda y: y.view_as(y).exp() + y.sin(),
    "square": lambda y: y * y,
    "softmax": lambda y: y.softmax(-1) * y,
    "norm": lambda y: F.layer_norm(y, (4,)) + F.gelu(y),
    "stop and go": lambda y: torch.where(y > 0, y.exp(), y.sin()),
    "an own function": lambda y: Cube.apply(y),
}


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(y):
        return y**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * 3 * y**2


@pytest.mark.parametrize("name", ONCE)
@pytest.mark.parametrize("way", ["grad", "backward", "func", "remat", "vjp"])
def test_a_sum_that_is_needed_whole_costs_one_all_reduce(tp, name: str, way: str) -> None:
    """Forward and backward together; DTensor adds it up for each use. Computed again (remat), it is added up again."""
    x, w = rand(6, 8), rand(8, 4)
    there = vfn.shard((w, x), tp, (P("tp"), P(None, "tp")))
    loss = lambda w, x: ONCE[name](x @ w).sum()
    ways = {
        "grad": lambda w, x: vfn.grad(loss)(w, x),
        "backward": lambda w, x: torch.autograd.grad(loss(w.requires_grad_(), x), w)[0],
        "func": lambda w, x: torch.func.grad(loss)(w, x),
        "remat": lambda w, x: vfn.grad(vfn.remat(loss))(w, x),
        "vjp": lambda w, x: vfn.vjp(loss, w, x)[1](torch.ones(()))[0],
    }
    with vfn.comm_log() as log:
        got = ways[way](*there)
    assert told(log) == [("all_reduce", "tp", 6 * 4 * 4)] * (2 if way == "remat" else 1), log
    torch.testing.assert_close(vfn.unshard(got.detach()), vfn.grad(loss)(w.detach(), x))


@pytest.mark.parametrize("grad", [True, False])
def test_a_view_of_a_sum_sees_what_is_written(tp, grad: bool) -> None:
    y = vfn.shard(rand(6, 8), tp, P(None, "tp")) @ vfn.shard(rand(8, 4), tp, P("tp"))
    want = rand(6, 8) @ rand(8, 4)
    with torch.set_grad_enabled(grad):
        view, turned = y.view(4, 6), y.mT.unsqueeze(0)
        for x in (y, view, turned):
            x.exp()  # the sum is known
        view.mul_(2)
        for x, one in ((y, want), (view, want.view(4, 6)), (turned, want.mT[None])):
            torch.testing.assert_close(vfn.unshard(x.exp()), (one * 2).exp())
        y.add_(1)
        for x, one in ((turned, want.mT[None]), (view, want.view(4, 6)), (y, want)):
            torch.testing.assert_close(vfn.unshard(x.exp()), (one * 2 + 1).exp())


def test_a_sum_that_was_written_is_added_up_anew(tp) -> None:
    y = vfn.shard(rand(6, 8), tp, P(None, "tp")) @ vfn.shard(rand(8, 4), tp, P("tp"))
    want = rand(6, 8) @ rand(8, 4)
    torch.testing.assert_close(vfn.unshard(y.exp()), want.exp())
    y.mul_(2)
    with vfn.comm_log() as log:
        torch.testing.assert_close(vfn.unshard(y.exp()), (want * 2).exp())
    assert len(log) == 1


def _steps_on_this_rank(s):
    """As `collectives.step`, on real ranks: what it sends, and the gradients."""
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    r = collectives.REGIMES["FSDP x TP"]
    params = vfn.shard(collectives.init(s), mesh, vfn.spec_from_rules(collectives.init(s), r.rules))
    draw = torch.Generator().manual_seed(1)
    data = [vfn.shard(torch.randint(s.vocab, (s.batch, s.length), generator=draw), mesh, P("dp")) for _ in range(2)]
    with vfn.use_mesh(mesh), vfn.comm_log() as log:
        _, grads = vfn.value_and_grad(collectives.loss)(params, *data, s, r, "q @ k.mT")
    x = vfn.shard(rand(8, 4, 3) + 5, mesh, P("dp"))
    return told(log), vfn.unshard(grads), vfn.unshard(F.batch_norm(x, None, None, training=True))


def test_on_real_ranks(gloo, alone) -> None:
    want = F.batch_norm(rand(8, 4, 3) + 5, None, None, training=True)
    for found, grads, normed in gloo(4, _steps_on_this_rank, SIZES):
        assert Counter(found) == collectives.fully_sharded_tensor_parallel(SIZES, collectives.REGIMES["FSDP x TP"])
        for got, one in zip(tree.leaves(grads), tree.leaves(alone[1]), strict=True):
            torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-5)  # sums of float32 in another order
        torch.testing.assert_close(normed, want, rtol=1e-4, atol=1e-5)
