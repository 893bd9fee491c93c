"""A mixture of experts: routes, room, the numbers of one device, what travels, what does not fit."""

import math

import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import CollectiveError
from vescale_fn.nn import experts, load_balance_loss, route, router_z_loss

F64 = torch.float64
GROUPS, TOKENS, WIDTH, COUNT, HIDDEN, K = 8, 5, 4, 8, 6, 2
HIDDEN_SPLIT = {"up": P("ep", None, "tp"), "down": P("ep", "tp")}
MESHES = {
    "4": ((4,), ("ep",), P("ep"), P("ep")),
    "1x4": ((1, 4), ("dp", "ep"), P("ep"), P(("dp", "ep"))),
    "2x2": ((2, 2), ("dp", "ep"), P("ep"), P(("dp", "ep"))),
    "2x2x2": ((2, 2, 2), ("dp", "ep", "tp"), HIDDEN_SPLIT, P(("dp", "ep"))),
    "tokens alike along ep": ((2, 2), ("dp", "ep"), P("ep"), P("dp")),
    "experts over two axes": ((2, 2), ("a", "b"), P(("a", "b")), P(("a", "b"))),
    "nothing divides": ((3,), ("ep",), P("ep"), P("ep")),
    "experts whole": ((2,), ("dp",), P(), P("dp")),
}


def network(p, rows):
    return torch.tanh(rows @ p["up"]) @ p["down"]


def made():
    up, down = torch.randn(COUNT, WIDTH, HIDDEN, dtype=F64), torch.randn(COUNT, HIDDEN, WIDTH, dtype=F64)
    x = torch.randn(GROUPS, TOKENS, WIDTH, dtype=F64)
    return {"up": up, "down": down}, torch.randn(WIDTH, COUNT, dtype=F64), x, torch.randn(x.shape, dtype=F64)


def layer(p, gate, x, capacity):
    return experts(network, p, x, route(x @ gate, K), capacity=capacity)


def token_by_token(p, gate, x, capacity):
    """What the layer is, one token after the other; first choices first."""
    probabilities = torch.softmax(x @ gate, -1)
    chosen = probabilities.argsort(-1, descending=True)
    groups = []
    for scores, best, group in zip(probabilities, chosen, x, strict=True):
        used, out = [0] * COUNT, [torch.zeros(WIDTH, dtype=F64) for _ in group]
        for choice in range(K):
            for t, token in enumerate(group):
                e = int(best[t, choice])
                if capacity is None or used[e] < capacity:
                    out[t] = out[t] + scores[t, e] * network({name: w[e] for name, w in p.items()}, token)
                used[e] += 1
        groups.append(torch.stack(out))
    return torch.stack(groups)


def gradients(f, p, gate, x, weights, capacity):
    return vfn.value_and_grad(lambda *a: (f(*a, capacity) * weights).sum(), (0, 1, 2))(p, gate, x)


def close(found, want):
    one, other = (vfn.unshard((v, g["up"], g["down"], *more)) for v, (g, *more) in (found, want))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("capacity", "meshes"), [(None, ["2x2", "nothing divides"]), (2, list(MESHES))], ids=str)
def test_values_and_gradients_are_those_of_each_token_for_itself(capacity, meshes):
    p, gate, x, weights = made()
    want = gradients(token_by_token, p, gate, x, weights, capacity)
    close(gradients(layer, p, gate, x, weights, capacity), want)
    assert capacity is None or not torch.equal(layer(p, gate, x, 2), layer(p, gate, x, None))  # some had no room
    for shape, names, of_experts, of_tokens in map(MESHES.__getitem__, meshes):
        with vfn.simulate(math.prod(shape)):
            mesh = vfn.make_mesh(shape, names)
            there = vfn.shard((p, gate, x), mesh, (of_experts, P(), of_tokens))
            found = gradients(layer, *there, weights, capacity)
            close(found, want)
            assert vfn.spec_of(found[1][0]["up"]) == vfn.spec_of(there[0]["up"])
            assert vfn.spec_of(found[1][2]) == of_tokens


def test_the_same_tokens_find_no_room_on_every_mesh():
    p, gate, x, _ = made()
    scaled = lambda w, rows: rows * w  # nothing is summed across ranks: exact
    own = lambda p, gate, x: experts(scaled, p["up"][:, :1, :WIDTH], x, route(x @ gate, K), capacity=1)
    want = own(p, gate, x)
    for shape, names, _, of_tokens in MESHES.values():
        with vfn.simulate(math.prod(shape)):
            mesh = vfn.make_mesh(shape, names)
            where = P(names[-1]) if names != ("a", "b") else P(names)
            assert torch.equal(vfn.unshard(own(*vfn.shard((p, gate, x), mesh, (where, P(), of_tokens)))), want)


def test_experts_without_tokens():
    p, gate, x, weights = made()
    gate, x = gate.abs().cumsum(1), x.abs()  # the last experts are always the best
    assert set(route(x @ gate, K).experts.flatten().tolist()) == {COUNT - 2, COUNT - 1}
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("ep",))
        there = vfn.shard((p, gate, x), mesh, (P("ep"), P(), P("ep")))
        found = gradients(layer, *there, weights, None)
    close(found, gradients(token_by_token, p, gate, x, weights, None))
    assert not vfn.unshard(found[1][0]["up"])[: COUNT - 2].any()
    given = []
    experts(lambda p, rows: given.append(rows) or rows, p, x, route(x @ gate, K), capacity=3)
    assert given[0].any(-1).sum(1).tolist() == [0] * (COUNT - 2) + [3 * GROUPS] * 2  # the rest of the rows are zeros


def test_all_tokens_to_one_expert():
    """Each rank's tokens go to one rank, which takes all of them in; with less room, the first ones of each group."""
    p, _, x, weights = made()
    gate = torch.zeros(WIDTH, COUNT, dtype=F64)
    gate[:, 5] = 9
    x = x.abs() + 0.1
    to_one = lambda p, gate, x, capacity: experts(network, p, x, route(x @ gate, 1), capacity=capacity)
    for capacity in (None, 2):
        kept = (torch.arange(TOKENS) < (capacity or TOKENS)).double()[:, None]
        alone = lambda p, gate, x, _, kept=kept: (
            kept * torch.softmax(x @ gate, -1)[..., 5:6] * network({name: w[5] for name, w in p.items()}, x)
        )
        want = gradients(alone, p, gate, x, weights, None)
        with vfn.simulate(4):
            there = vfn.shard((p, gate, x), vfn.make_mesh((4,), ("ep",)), (P("ep"), P(), P("ep")))
            close(gradients(to_one, *there, weights, capacity), want)


@pytest.mark.parametrize("tokens", [0, 1])
def test_hardly_any_tokens(tokens):
    p, gate, x, weights = made()
    x, weights = x[:, :tokens], weights[:, :tokens]
    with vfn.simulate(2):
        there = vfn.shard((p, gate, x), vfn.make_mesh((2,), ("ep",)), (P("ep"), P(), P("ep")))
        found = gradients(layer, *there, weights, None)
        close(found, gradients(layer, p, gate, x, weights, None))
        assert found[1][2].shape == x.shape
        there = vfn.shard((p, gate, x[:1]), vfn.make_mesh((2,), ("ep",)), (P("ep"), P(), P()))  # one group in all
        found = gradients(layer, *there, weights[:1], None)
    close(found, gradients(layer, p, gate, x[:1], weights[:1], None))


def test_as_a_plan_and_under_transforms():
    p, gate, x, weights = made()
    f = lambda p, gate, x: (layer(p, gate, x, 2) * weights).sum()
    want = gradients(layer, p, gate, x, weights, 2)
    with vfn.simulate(2):
        there = vfn.shard((p, gate, x), vfn.make_mesh((2,), ("ep",)), (P("ep"), P(), P("ep")))
        close(vfn.jit(vfn.value_and_grad(f, (0, 1, 2)))(*there), want)
        close(vfn.value_and_grad(vfn.remat(f), (0, 1, 2))(*there), want)
        raw = torch.func.grad(lambda up, down, gate, x: f({"up": up, "down": down}, gate, x), (0, 1, 2, 3))
        up, down, *rest = raw(there[0]["up"], there[0]["down"], *there[1:])
        close((want[0], ({"up": up, "down": down}, *rest)), want)
        twice = vfn.shard(torch.stack([x, 2 * x]), vfn.make_mesh((2,), ("ep",)), P(None, "ep"))
        both = vfn.vmap(lambda x: layer(there[0], there[1], x, 2))(twice)
        for i in range(2):
            torch.testing.assert_close(vfn.unshard(both)[i], layer(p, gate, (i + 1) * x, 2), rtol=1e-12, atol=1e-12)


def test_what_travels():
    p, gate, x, _ = made()
    with vfn.simulate(4):
        there = vfn.shard((p, gate, x), vfn.make_mesh((2, 2), ("dp", "ep")), (P("ep"), P(), P(("dp", "ep"))))
        with vfn.comm_log() as log:
            out, back = vfn.vjp(lambda p, x: layer(p, there[1], x, 3), there[0], there[2])
        rows = GROUPS // 4 * COUNT * 3 * WIDTH * 8  # bytes of a rank's rows
        assert [(call.op, call.axes, call.bytes) for call in log] == [("all_to_all", ("ep",), rows)] * 2
        with vfn.comm_log() as log, vfn.strict():
            back(torch.ones_like(out))
        assert [(call.op, call.axes) for call in log if call.op != "all_reduce"] == [("all_to_all", ("ep",))] * 2
        assert {call.axes for call in log if call.op == "all_reduce"} == {("dp",)}  # of the parameters


def test_hidden_dims_that_are_split_are_added_up_after_rows_are_combined():
    """Rows stay partial sums on their way back and as they are weighed, and those of the gradient on theirs."""
    p, gate, x, weights = made()
    with vfn.simulate(4):
        there = vfn.shard((p, gate, x), vfn.make_mesh((2, 2), ("ep", "tp")), (HIDDEN_SPLIT, P(), P("ep")))
        rows, tokens = GROUPS // 2 * COUNT * TOKENS * WIDTH * 8, GROUPS // 2 * TOKENS * WIDTH * 8
        there_and_back = [("all_to_all", "ep", rows)] * 2
        with vfn.comm_log() as log:
            out, back = vfn.vjp(lambda x: layer(there[0], there[1], x, None), there[2])
        assert [(r.op, r.axis, r.bytes) for r in log] == there_and_back
        assert vfn.spec_of(out) == P("ep", unreduced={"tp"})  # as any product along a split dim
        with vfn.comm_log() as log:
            vfn.unshard(out)
        assert [(r.op, r.axis, r.bytes) for r in log][:1] == [("all_reduce", "tp", tokens)]
        weighed = ("all_reduce", "tp", K * tokens // WIDTH)
        with vfn.comm_log() as log:
            back(torch.ones_like(out))
        assert [(r.op, r.axis, r.bytes) for r in log] == [weighed, *there_and_back, ("all_reduce", "tp", tokens)]
        close(gradients(layer, *there, weights, 2), gradients(token_by_token, p, gate, x, weights, 2))


def test_parts_of_sequences_as_groups():
    p, gate, x, weights = made()
    x, weights = (y.reshape(2, 4 * TOKENS, WIDTH) for y in (x, weights))  # two sequences, each of four parts
    f = lambda p, gate, x, capacity: layer(p, gate, x.unflatten(1, (4, -1)), capacity).flatten(1, 2)
    want = gradients(
        lambda p, gate, x, c: torch.stack(
            [token_by_token(p, gate, s.unflatten(0, (4, -1)), c).flatten(0, 1) for s in x]
        ),
        p,
        gate,
        x,
        weights,
        2,
    )
    with vfn.simulate(4):
        there = vfn.shard((p, gate, x), vfn.make_mesh((2, 2), ("dp", "cp")), (P("cp"), P(), P("dp", "cp")))
        with vfn.comm_log() as log:
            found = gradients(f, *there, weights, 2)
        close(found, want)
        assert [call.op for call in log if call.op != "all_reduce"] == ["all_to_all"] * 4


def test_in_a_body():
    p, gate, x, weights = made()
    with vfn.simulate(4):
        body = lambda p, gate, x: experts(network, p, x, route(x @ gate, K), capacity=2, axis="ep")
        f = vfn.shard_map(
            body,
            mesh=vfn.make_mesh((2, 2), ("dp", "ep")),
            in_specs=(P("ep"), P(), P(("dp", "ep"))),
            out_specs=P(("dp", "ep")),
        )
        found = gradients(lambda p, gate, x, _: f(p, gate, x), p, gate, x, weights, None)
    close(found, gradients(token_by_token, p, gate, x, weights, 2))


def test_a_route_goes_to_the_best_and_among_equals_to_the_first():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    before, after = route(logits, 2), route(logits, 2, softmax="after")
    assert before.experts.tolist() == after.experts.tolist() == [[1, 2], [0, 1]]
    assert before.count == 4
    torch.testing.assert_close(before.weights, torch.softmax(logits, -1).gather(1, before.experts))
    torch.testing.assert_close(after.weights, torch.full((2, 2), 0.5))
    torch.testing.assert_close(route(logits, 3, normalize=True).weights, route(logits, 3, softmax="after").weights)
    half = route(logits.bfloat16(), 2)
    assert half.weights.dtype == torch.bfloat16
    assert half.weights.equal(before.weights.bfloat16())


def test_losses_of_a_router():
    logits = torch.randn(6, 5, 3, dtype=F64)
    routes = route(logits, 2)
    probabilities = torch.softmax(logits, -1)
    balance = 3 * sum((routes.experts == e).double().sum() / 60 * probabilities[..., e].mean() for e in range(3))
    z = torch.log(torch.exp(logits).sum(-1)).pow(2).mean()
    torch.testing.assert_close(load_balance_loss(logits, routes), balance, rtol=1e-12, atol=0)
    torch.testing.assert_close(router_z_loss(logits), z, rtol=1e-12, atol=0)
    everywhere = torch.zeros(4, 3, dtype=F64)
    everywhere[:, 1] = 50
    assert load_balance_loss(everywhere, route(everywhere, 1)).item() == pytest.approx(3)
    want = vfn.grad(lambda x: load_balance_loss(x, route(x, 2)))(logits)
    with vfn.simulate(4):
        there = vfn.shard(logits, vfn.make_mesh((2, 2), ("a", "b")), P("a", "b"))
        with vfn.comm_log() as log:
            found = vfn.grad(lambda x: load_balance_loss(x, route(x, 2)))(there)
        assert [(call.op, call.bytes) for call in log] == [("all_reduce", 2 * 3 * 8)]
    torch.testing.assert_close(vfn.unshard(found), want, rtol=1e-12, atol=1e-15)


def lines_of(call):
    with pytest.raises(CollectiveError) as error:
        call()
    return str(error.value).splitlines()


def test_messages():
    p, gate, x, _ = made()
    routes = route(x @ gate, K)
    assert lines_of(lambda: experts(network, {"up": p["up"][:7], "down": p["down"]}, x[:, 1:], routes, capacity=0)) == [
        "nn.experts: the arguments do not fit",
        "  * routes are for [8, 5] tokens, but x is the tensor f64[8,4,4]",
        "  * params['up'] is the tensor f64[7,4,6], but the routes are to 8 experts, so its first dim must be 8",
        "  * capacity must be a positive int, rows of an expert for a group, but it is the int 0",
    ]
    assert lines_of(lambda: experts(network, {}, x[0, 0], (1, 2, 3))) == [
        "nn.experts: the arguments do not fit",
        "  * x must be a float tensor [..., tokens, width], but it is the tensor f64[4]",
        "  * params must hold tensors [experts, ...], but it is the dict {}",
    ]
    assert lines_of(lambda: experts(lambda p, rows: rows.sum(1), p, x, routes)) == [
        "nn.experts: f must give one row for each of the tensor f64[8,40,4], but it gave the tensor f64[8,4]"
    ]
    assert lines_of(lambda: route(x @ gate, 9, softmax="befor")) == [
        "nn.route: the arguments do not fit",
        "  * k must be from 1 to 8, the number of experts, but it is the int 9",
        "  * softmax='befor' is not one of ('before', 'after'); did you mean 'before'?",
    ]


def on_ranks(p, gate, x, weights):
    there = vfn.shard((p, gate, x), vfn.make_mesh((2,), ("ep",)), (P("ep"), P(), P("ep")))
    step = vfn.value_and_grad(lambda *a: (layer(*a, 2) * weights).sum(), (0, 1, 2))
    return vfn.unshard((step(*there), vfn.jit(step)(*there)))


def test_on_real_ranks(gloo):
    inputs = made()
    want = gradients(token_by_token, *inputs, 2)
    for found in gloo(2, on_ranks, *inputs):
        for one in found:
            close(one, want)
