"""Every optimiser keeps the same laws, and steps as its reference does: torch.optim, or the paper's formula."""

import math
from typing import NamedTuple

import optree
import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P, optim

STEPS = 6
SPECS = {"layer": [P("dp", "tp"), P(None, "tp")], "scale": P("tp"), "shift": P()}


class Lion(torch.optim.Optimizer):
    """The paper's algorithm 2, line by line."""

    def __init__(self, params, lr, b1=0.9, b2=0.99, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "b1": b1, "b2": b2, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                c = group["b1"] * m + (1 - group["b1"]) * p.grad
                m.copy_(group["b2"] * m + (1 - group["b2"]) * p.grad)
                p -= group["lr"] * (c.sign() + group["weight_decay"] * p)


class Case(NamedTuple):
    name: str
    ours: optim.Optimizer
    reference: type
    options: dict
    clip: float = math.inf


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
falling = lambda count: 0.1 / (1 + count)
CASES = [
    Case("sgd", optim.sgd(0.1), SGD, {"lr": 0.1}),
    Case("decay", optim.sgd(0.1, weight_decay=0.3), SGD, {"lr": 0.1, "weight_decay": 0.3}),
    Case("momentum", optim.sgd(0.1, 0.9, weight_decay=0.1), SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    Case("nesterov", optim.sgd(0.1, 0.8, nesterov=True), SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
    Case("adamw", optim.adamw(0.05), ADAMW, {"lr": 0.05}),
    Case(
        "adamw_options",
        optim.adamw(0.05, 0.8, 0.95, 1e-3, 0.5),
        ADAMW,
        {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.5},
    ),
    Case("adam", optim.adamw(0.05, weight_decay=0.0), torch.optim.Adam, {"lr": 0.05}),
    Case("lion", optim.lion(0.02, 0.7, 0.9, 0.2), Lion, {"lr": 0.02, "b1": 0.7, "b2": 0.9, "weight_decay": 0.2}),
    Case("clipped", optim.chain(optim.clip_by_global_norm(0.7), optim.adamw(0.05)), ADAMW, {"lr": 0.05}, 0.7),
    Case("schedule", optim.sgd(falling), SGD, {"lr": falling}),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def make_params(dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    tensor = lambda *shape: torch.randn(shape, dtype=dtype, generator=draw)
    return {"layer": [tensor(4, 6), tensor(3, 4)], "scale": tensor(6), "shift": tensor()}


def loss(params):
    first, second = params["layer"]
    return torch.tanh(first * params["scale"]).square().sum() + (second - params["shift"]).exp().sum() / 5


def train(opt, params, steps=STEPS):
    """Parameters after each step."""
    state, after = opt.init(params), []
    for _ in range(steps):
        updates, state = opt.update(vfn.grad(loss)(params), state, params)
        params = optim.apply_updates(params, updates)
        after.append(params)
    return after


def close(a, b, **tolerances):
    optree.tree_map(lambda x, y: torch.testing.assert_close(x, y, **tolerances), a, b)


@each_case
def test_steps_as_the_reference(case):
    after = train(case.ours, make_params())
    leaves, structure = optree.tree_flatten(optree.tree_map(lambda p: p.requires_grad_(), make_params()))
    rate = case.options["lr"]
    reference = case.reference(leaves, **{**case.options, "lr": rate(0) if callable(rate) else rate})
    for count, params in enumerate(after):
        reference.zero_grad()
        loss(optree.tree_unflatten(structure, leaves)).backward()
        torch.nn.utils.clip_grad_norm_(leaves, case.clip)
        if callable(rate):
            reference.param_groups[0]["lr"] = rate(count)
        reference.step()
        close(optree.tree_leaves(params), [leaf.detach() for leaf in leaves], rtol=1e-12, atol=1e-13)


@each_case
def test_changes_nothing_in_place(case):
    params = make_params()
    grads, state = vfn.grad(loss)(params), case.ours.init(params)
    trees = (grads, state, params)
    before = optree.tree_map(torch.clone, trees)
    case.ours.update(*trees)
    close(before, trees, rtol=0, atol=0)


@each_case
def test_keeps_structures_shapes_and_dtypes(case):
    for dtype in (torch.float32, torch.bfloat16):
        params = make_params(dtype)
        state = case.ours.init(params)
        updates, new_state = case.ours.update(params, state, params)
        describe = lambda tree: optree.tree_map(lambda x: (x.dtype, x.shape), tree)
        assert describe(updates) == describe(params) == describe(optim.apply_updates(params, updates))
        assert describe(new_state) == describe(state)


@each_case
def test_passes_by_what_is_not_trained(case):
    table, key = torch.arange(3), vfn.random.key(7)
    params = {"w": torch.ones(2), "depth": 3, "none": None, "name": "a", "table": table, "key": key}
    state = case.ours.init(params)
    for _ in range(2):
        grads = {**params, "w": torch.ones(2), "table": torch.zeros_like(table)}
        updates, state = case.ours.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    assert params["w"].lt(1).all()
    assert (params["depth"], params["none"], params["name"]) == (3, None, "a")
    assert params["table"].equal(table)
    assert vfn.random.key_data(params["key"]).tolist() == vfn.random.key_data(key).tolist()


@each_case
def test_a_leaf_without_gradient_stays(case):
    params = {"w": torch.ones(2), "frozen": torch.ones(2)}
    updates, _ = case.ours.update({"w": torch.ones(2), "frozen": None}, case.ours.init(params), params)
    after = optim.apply_updates(params, updates)
    assert after["frozen"].equal(torch.ones(2))
    assert after["w"].lt(1).all()


@each_case
def test_no_parameters(case):
    updates, _ = case.ours.update({}, case.ours.init({}), {})
    assert optim.apply_updates({}, updates) == {}


@each_case
def test_counts_steps_in_a_plain_integer_too(case):
    params = make_params()
    state = optree.tree_map(lambda x: 0 if x.dtype == torch.int64 else x, case.ours.init(params))
    close(case.ours.update(params, state, params)[0], case.ours.update(params, case.ours.init(params), params)[0])


@each_case
def test_complains_of_another_structure(case):
    params = make_params()
    grads = {**params, "more": torch.ones(2)}
    with pytest.raises(vfn.errors.VfnError, match="lacks the structure of params") as error:
        case.ours.update(grads, case.ours.init(params), params)
    assert "Instead: give gradients and state" in str(error.value)


@each_case
@pytest.mark.parametrize(("shape", "names"), [((1, 1), ("dp", "tp")), ((2, 3), ("dp", "tp")), ((4, 2), ("dp", "tp"))])
def test_the_same_on_a_mesh(case, shape, names):
    expected = train(case.ours, make_params())
    with vfn.simulate(math.prod(shape)):
        mesh = vfn.make_mesh(shape, names)
        params = vfn.shard(make_params(), mesh, SPECS)
        state = case.ours.init(params)
        _, after = case.ours.update(vfn.grad(loss)(params), state, params)
        kept = [vfn.spec_of(x) for x in optree.tree_leaves(after) if x.dtype == torch.float64]
        assert kept == [vfn.spec_of(x) for x in optree.tree_leaves(params)] * (len(kept) // 4)
        # sums of squares and of gradients in another order
        close(vfn.unshard(train(case.ours, params)), expected, rtol=1e-12, atol=1e-13)


@each_case
def test_a_step_on_a_mesh_moves_nothing(case):
    with vfn.simulate(4):
        params = vfn.shard(make_params(), vfn.make_mesh((2, 2), ("dp", "tp")), SPECS)
        grads, state = vfn.grad(loss)(params), case.ours.init(params)
        with vfn.comm_log() as log:
            updates, _ = case.ours.update(grads, state, params)
            optim.apply_updates(params, updates)
        # the norm of all gradients is one reduction of 8 bytes over each axis, or over both
        assert len(log) <= (0 if math.isinf(case.clip) else 2), str(log)


def test_global_norm():
    tree = {"a": torch.tensor([3.0, 4.0]), "b": [torch.tensor(12.0), None, 5, torch.tensor([7])]}
    assert optim.global_norm(tree).item() == 13.0
    assert optim.global_norm({}).item() == 0.0


def test_clipping_leaves_small_gradients_alone():
    grads = {"a": torch.tensor([3.0, 4.0]), "n": 2}
    clipped, _ = optim.clip_by_global_norm(5.1).update(grads, None, None)
    assert clipped["a"].equal(grads["a"])
    assert clipped["n"] == 2


def test_mask_of_weight_decay():
    params = {"w": torch.ones(2), "b": [torch.ones(2), torch.ones(2)]}
    zeros = optree.tree_map(torch.zeros_like, params)
    for mask in ({"w": True, "b": False}, lambda params: {"w": True, "b": [False, False]}):
        for opt in (optim.adamw(0.1, weight_decay=0.5, mask=mask), optim.lion(0.1, weight_decay=0.5, mask=mask)):
            after = optim.apply_updates(params, opt.update(zeros, opt.init(params), params)[0])
            assert [x[0].item() for x in optree.tree_leaves(after)] == pytest.approx([1.0, 1.0, 0.95])


def test_mask_must_fit():
    params = {"w": torch.ones(2)}
    opt = optim.adamw(0.1, mask={"v": True})
    with pytest.raises(vfn.errors.SpecError) as error:
        opt.update(params, opt.init(params), params)
    assert "adamw: mask is not a prefix of params" in str(error.value)


def test_complex_parameters_are_refused():
    with pytest.raises(vfn.errors.VfnError) as error:
        optim.adamw(0.1).init({"w": torch.ones(2, dtype=torch.complex64)})
    assert "torch.complex64 of shape [2]" in str(error.value)
    assert "torch.view_as_real" in str(error.value)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("sgd", "a SgdState"), ("adamw", "an AdamState"), ("lion", "a LionState"), ("chain", "the tuple of the states")],
)
def test_a_state_that_is_none_is_refused(name, wanted):
    params = {"w": torch.ones(2)}
    opt = optim.chain(optim.sgd(0.1), optim.sgd(0.1)) if name == "chain" else getattr(optim, name)(0.1)
    for state, found in ((None, "not None"), ((), "not a tuple of length 0"), (params, "not a dict")):
        with pytest.raises(vfn.errors.VfnError) as error:
            opt.update(params, state, params)
        text = str(error.value)
        assert text.startswith(f"{name}: update takes (grads, state, params), and its state must be {wanted}")
        assert text.splitlines()[0].endswith(found)
        assert "Instead: state = opt.init(params)" in text


def test_nesterov_needs_momentum():
    with pytest.raises(vfn.errors.VfnError, match="nesterov=True needs a momentum"):
        optim.sgd(0.1, nesterov=True)


SCHEDULES = {
    "constant": (optim.constant(0.3), lambda t: 0.3),
    "cosine": (optim.cosine(2.0, 10, 0.5), lambda t: 0.5 + 1.5 * (1 + math.cos(math.pi * min(t / 10, 1))) / 2),
    "warmup_cosine": (
        optim.warmup_cosine(2.0, 4, 12, 0.5),
        lambda t: 2 * (t + 1) / 4 if t < 4 else 0.5 + 1.5 * (1 + math.cos(math.pi * min((t - 4) / 8, 1))) / 2,
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name):
    ours, formula = SCHEDULES[name]
    for t in range(15):
        assert float(ours(t)) == pytest.approx(formula(t), rel=1e-12)
        assert float(ours(torch.tensor(t))) == pytest.approx(formula(t), rel=1e-12)


def test_warm_up_must_leave_steps():
    with pytest.raises(vfn.errors.VfnError, match="warmup=5 and steps=5"):
        optim.warmup_cosine(1.0, 5, 5)
