"""Every optimiser keeps the same laws, and steps as its reference does: torch.optim, or the paper's formula."""

import math
import re
from typing import NamedTuple

import optree
import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P, optim
from vescale_fn._core.arrays import array
from vescale_fn._core.base import context
from vescale_fn.optim import per_leaf

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


class Muon(torch.optim.Optimizer):
    """Jordan's formulas, line by line, for matrices; for what is none, plain gradient descent."""

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                if p.ndim != 2:
                    p -= lr * p.grad
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.copy_(momentum * m + (1 - momentum) * p.grad)
                x = (1 - momentum) * p.grad + momentum * m
                x = x.T if p.shape[0] > p.shape[1] else x
                x = x / x.norm()
                for _ in range(5):
                    g = x @ x.T
                    x = 3.4445 * x + (-4.7750 * g + 2.0315 * g @ g) @ x
                x = x.T if p.shape[0] > p.shape[1] else x
                p *= 1 - lr * group["weight_decay"]
                p -= lr * math.sqrt(max(1, p.shape[0] / p.shape[1])) * x


class EverySecond(torch.optim.SGD):
    """A step with the mean of two gradients."""

    @torch.no_grad()
    def step(self):
        self.grads = [*getattr(self, "grads", []), [p.grad.clone() for p in self.param_groups[0]["params"]]]
        if len(self.grads) == 2:
            for p, first, second in zip(self.param_groups[0]["params"], *self.grads):
                p.grad = (first + second) / 2
            super().step()
            self.grads = []


class Case(NamedTuple):
    name: str
    ours: optim.Optimizer
    reference: type
    options: dict
    clip: float = math.inf
    value: float = math.inf  # to which each number is clipped
    moves: int = 0  # the collectives of an update on a mesh of two axes
    exact: bool = True  # elementwise: the same bits on every mesh


def by_ndim(params):
    return optree.tree_map(lambda x: "matrix" if getattr(x, "ndim", 0) == 2 else "other", params)


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
falling = lambda count: 0.1 / (1 + count)
CASES = [
    Case("sgd", optim.sgd(0.1), SGD, {"lr": 0.1}),
    Case("decay", optim.sgd(0.1, weight_decay=0.3), SGD, {"lr": 0.1, "weight_decay": 0.3}),
    Case("momentum", optim.sgd(0.1, 0.9, weight_decay=0.1), SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    Case("nesterov", optim.sgd(0.1, 0.8, nesterov=True), SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
    Case("adam", optim.adam(0.05), torch.optim.Adam, {"lr": 0.05}),
    Case("adam_decay", optim.adam(0.05, weight_decay=0.3), torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.3}),
    Case("adamw", optim.adamw(0.05), ADAMW, {"lr": 0.05}),
    Case(
        "adamw_options",
        optim.adamw(0.05, 0.8, 0.95, 1e-3, 0.5),
        ADAMW,
        {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.5},
    ),
    Case("lion", optim.lion(0.02, 0.7, 0.9, 0.2), Lion, {"lr": 0.02, "b1": 0.7, "b2": 0.9, "weight_decay": 0.2}),
    Case("adafactor", optim.adafactor(0.05), torch.optim.Adafactor, {"lr": 0.05}, moves=6, exact=False),
    Case(
        "adafactor_options",
        optim.adafactor(0.3, -0.6, (1e-4, 0.02), 1.2, 0.2),
        torch.optim.Adafactor,
        {"lr": 0.3, "beta2_decay": -0.6, "eps": (1e-4, 0.02), "d": 1.2, "weight_decay": 0.2},
        moves=6,
        exact=False,
    ),
    Case(
        "muon",
        optim.partition({"matrix": optim.muon(0.05, dtype=torch.float64), "other": optim.sgd(0.05)}, by_ndim),
        Muon,
        {"lr": 0.05},
        moves=3,
        exact=False,
    ),
    Case(
        "clipped",
        optim.chain(optim.clip_by_global_norm(0.7), optim.adamw(0.05)),
        ADAMW,
        {"lr": 0.05},
        clip=0.7,
        moves=1,
        exact=False,
    ),
    Case("clipped_values", optim.chain(optim.clip_by_value(0.3), optim.sgd(0.1)), SGD, {"lr": 0.1}, value=0.3),
    Case("schedule", optim.sgd(falling), SGD, {"lr": falling}),
    Case(
        "parts",
        optim.chain(optim.add_decayed_weights(0.3), optim.scale(-1.0), optim.scale(falling)),
        SGD,
        {"lr": falling, "weight_decay": 0.3},
    ),
    Case("averaged", optim.chain(optim.sgd(0.1), optim.params_ema(0.9)), SGD, {"lr": 0.1}),
    Case("accumulated", optim.accumulate(optim.sgd(0.1), 2), EverySecond, {"lr": 0.1}),
    Case(
        "from_torch",
        optim.from_torch(torch.optim.RMSprop, 0.01, momentum=0.5),
        torch.optim.RMSprop,
        {"lr": 0.01, "momentum": 0.5},
    ),
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
        torch.nn.utils.clip_grad_value_(leaves, case.value)
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
    state = case.ours.init(params)
    for _ in range(2):
        updates, state = case.ours.update({"w": torch.ones(2), "frozen": None}, state, params)
        params = optim.apply_updates(params, updates)
    assert params["frozen"].equal(torch.ones(2))
    assert params["w"].lt(1).all()


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
def test_complains_of_other_shapes(case):
    """A gradient that would fit after broadcasting, and a state of other parameters."""
    params = {"w": torch.ones(2, 3), "b": torch.ones(4)}
    with pytest.raises(vfn.errors.VfnError) as error:
        case.ours.update({"w": torch.ones(3), "b": torch.ones(4)}, case.ours.init(params), params)
    assert "must have the same shapes\n  * params['w'] is the tensor f32[2,3], its gradient is " in str(error.value)
    assert "Instead: gradients by these parameters, and opt.init(params) for the state" in str(error.value)
    if case.name != "from_torch" and any(x.ndim for x in optree.tree_leaves(case.ours.init(params))):
        other = {"w": torch.ones(2, 5), "b": torch.ones(4)}
        with pytest.raises(vfn.errors.VfnError, match=r"params\['w'\] is the tensor f32\[2,3\], state has the tensor"):
            case.ours.update(params, case.ours.init(other), params)


def test_parameters_on_two_meshes_and_on_none():
    params = {"a": torch.linspace(-1, 1, 30).view(5, 6), "b": torch.linspace(1, 2, 7).bfloat16(), "c": torch.ones(3)}
    grads, opt = optree.tree_map(torch.sin, params), optim.adamw(0.1)
    expected = opt.update(grads, opt.init(params), params)
    with vfn.simulate(4):
        row, grid = vfn.make_mesh((4,), ("dp",)), vfn.make_mesh((2, 2), ("x", "y"))
        place = lambda tree: {
            "a": vfn.shard(tree["a"], row, P("dp")),
            "b": vfn.shard(tree["b"], grid, P(("y", "x"))),
            "c": tree["c"],
        }
        params, grads = place(params), place(grads)
        close(vfn.unshard(opt.update(grads, opt.init(params), params)), expected, rtol=0, atol=0)


@each_case
def test_the_same_on_a_mesh(case):
    """Also where an axis has one rank, beside another one or alone."""
    expected = train(case.ours, make_params(), 4)
    specs = {"layer": [P(("one", "dp"), "tp"), P("one", "tp")], "scale": P("tp"), "shift": P()}
    with vfn.simulate(6):
        params = vfn.shard(make_params(), vfn.make_mesh((1, 2, 3), ("one", "dp", "tp")), specs)
        # sums of squares and of gradients in another order
        close(vfn.unshard(train(case.ours, params, 4)), expected, rtol=1e-12, atol=1e-13)


def updates_of(opt, params, draws=2):
    """The updates, and the last state, for gradients that are drawn."""
    draw, state, found = torch.Generator().manual_seed(5), opt.init(params), []
    for _ in range(draws):
        whole = [torch.randn(x.shape, dtype=x.dtype, generator=draw) for x in optree.tree_leaves(params)]
        grads = optree.tree_unflatten(optree.tree_structure(params), whole)
        if array.is_array(optree.tree_leaves(params)[0]):
            grads = vfn.shard(grads, optree.tree_leaves(params)[0].device_mesh, SPECS)
        updates, state = opt.update(grads, state, params)
        found.append(updates)
    return found, state


@each_case
def test_updates_on_a_mesh(case):
    """The bits of one device where nothing is summed (recorded: below); and no more collectives than there must be."""
    expected = updates_of(case.ours, make_params(torch.float32))
    close_enough = {"rtol": 0, "atol": 0} if case.exact else {"rtol": 2e-4, "atol": 1e-6}
    with vfn.simulate(4):
        params = vfn.shard(make_params(torch.float32), vfn.make_mesh((2, 2), ("dp", "tp")), SPECS)
        with vfn.comm_log() as log:
            found = updates_of(case.ours, params)
        close(vfn.unshard(found), expected, **close_enough)
        assert len(log) <= 2 * case.moves, str(log)
        for x, like in zip(optree.tree_leaves(found[0][0]), optree.tree_leaves(params), strict=True):
            assert vfn.spec_of(x) == vfn.spec_of(like)
        if case.name in ("adafactor_options", "muon"):  # the norm of "clipped" is recorded below
            replayed = case.ours._replace(update=vfn.jit(case.ours.update))
            close(vfn.unshard(updates_of(replayed, params)), expected, **close_enough)


def test_global_norm():
    tree = {"a": torch.tensor([3.0, 4.0]), "b": [torch.tensor(12.0), None, 5, torch.tensor([7])]}
    assert optim.global_norm(tree).item() == 13.0
    assert optim.global_norm({}).item() == 0.0


MIXED = {"a": P("dp", "tp"), "b": P(None, "tp"), "c": P("tp", "dp"), "d": P("dp"), "e": P(), "f": P(("tp", "dp"))}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_recorded_norm_has_the_bits_of_an_eager_one(ranks):
    draw = torch.Generator().manual_seed(0)
    replayed = vfn.jit(optim.global_norm)
    for dtype in (torch.float32, torch.bfloat16) * 4:
        grads = {i: torch.randn(s, generator=draw).to(dtype) for i, s in enumerate([(64, 65), (63,), (129, 64)])}
        if ranks == 1:
            assert replayed(grads).equal(optim.global_norm(grads))
            continue
        with vfn.simulate(ranks):
            mesh = vfn.make_mesh((ranks,), ("dp",))
            held = vfn.shard(grads, mesh, {0: P("dp"), 1: P(), 2: P(None, "dp")})
            assert vfn.unshard(replayed(held)).equal(vfn.unshard(optim.global_norm(held)))


def test_the_norm_of_all_layouts_costs_one_collective():
    shapes = {"a": (4, 6), "b": (3, 6), "c": (6, 4), "d": (5,), "e": (2, 3), "f": (13,)}
    draw = torch.Generator().manual_seed(0)
    grads = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    expected = torch.cat([x.flatten() for x in grads.values()]).norm()
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("dp", "tp"))
        arrays = vfn.shard(grads, mesh, MIXED)
        for norm in (optim.global_norm, vfn.jit(optim.global_norm)):
            with vfn.strict(), vfn.comm_log() as log:
                found = norm(arrays)
            assert [(r.op, r.axes, r.bytes) for r in log] == [("all_reduce", ("dp", "tp"), 4)], str(log)
            torch.testing.assert_close(vfn.unshard(found), expected)
        with vfn.comm_log() as log:  # partial sums are put together first, as nothing else gives their squares
            partial = vfn.with_sharding(arrays["e"], P(unreduced={"dp"}))
            torch.testing.assert_close(vfn.unshard(optim.global_norm([partial])), grads["e"].norm())
        assert log.count("all_reduce", "dp") == 1


def test_the_norm_of_narrow_numbers_does_not_overflow():
    grads = [torch.full((3,), 300.0, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16)]
    assert optim.global_norm(grads).item() == pytest.approx(math.sqrt(3 * 90000 + 2))
    clipped, _ = optim.clip_by_global_norm(1.0).update(grads, None, None)
    assert [x.dtype for x in clipped] == [torch.float16, torch.bfloat16]
    assert clipped[0][0].item() == pytest.approx(300 / math.sqrt(270002), rel=1e-3)


def test_a_gradient_goes_through_the_norm():
    x = torch.tensor([3.0, 4.0])
    assert vfn.grad(lambda x: optim.global_norm({"x": x}))(x).tolist() == pytest.approx([0.6, 0.8])


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


def test_matrices_for_muon_come_together_as_a_deck_is_dealt():
    draw = torch.Generator().manual_seed(0)
    tensor = lambda *shape: torch.randn(shape, generator=draw)
    whole = {f"w{i}": tensor(8, 6) for i in range(9)} | {"alone": tensor(4, 10), "experts": tensor(4, 5, 3)}
    specs = {f"w{i}": P("dp") for i in range(9)} | {"alone": P(None, "dp"), "experts": P("dp")}
    opt = optim.muon(0.1)
    expected, _ = opt.update(whole, opt.init(whole), whole)
    with vfn.simulate(4):
        params = vfn.shard(whole, vfn.make_mesh((4,), ("dp",)), specs)
        state = opt.init(params)
        with vfn.strict(), vfn.comm_log() as log:
            found, _ = opt.update(params, state, params)
        # nine matrices of bf16, padded to three a rank, there and back; one alone is gathered, padded too; each rank has its experts
        assert [(r.op, r.bytes) for r in log] == [
            ("all_gather", 4 * 12 * 2),
            ("all_to_all", 12 * 2 * 6 * 2),
            ("all_to_all", 12 * 2 * 6 * 2),
        ], str(log)
        close(vfn.unshard(found), expected, rtol=0.02, atol=2e-3)  # bf16 holds three digits


def test_muon_is_that_of_torch():
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(6, 4, generator=draw), torch.randn(3, 7, generator=draw)]
    for ours, options in (
        (optim.muon(0.1), {}),
        (optim.muon(0.1, 0.8, False, 0.3), {"momentum": 0.8, "nesterov": False, "weight_decay": 0.3}),
        (optim.muon(0.1, adjust="match_rms_adamw"), {"adjust_lr_fn": "match_rms_adamw"}),
    ):
        leaves = [x.clone().requires_grad_() for x in start]
        reference = torch.optim.Muon(leaves, lr=0.1, **options)
        params, state = start, ours.init(start)
        for _ in range(3):
            for leaf in leaves:
                leaf.grad = leaf.detach().sin()
            reference.step()
            updates, state = ours.update([x.sin() for x in params], state, params)
            params = optim.apply_updates(params, updates)
        # both iterate in bf16, torch on one matrix and ours on a stack: a sum in another order
        close(params, [x.detach() for x in leaves], rtol=0.02, atol=0.02)


def test_muon_refuses_what_is_no_matrix():
    with pytest.raises(vfn.errors.VfnError) as error:
        optim.muon(0.1).init({"w": torch.ones(2, 3), "norm": torch.ones(3), "b": torch.ones(())})
    assert str(error.value).splitlines()[:3] == [
        "muon: each leaf must be a matrix, or a stack of matrices",
        "  * params['b'] is the tensor f32[]",
        "  * params['norm'] is the tensor f32[3]",
    ]
    assert "Instead: partition(" in str(error.value)


def test_an_average_follows_the_parameters():
    opt, params = (
        optim.chain(optim.sgd(0.1), optim.params_ema(0.9, dtype=torch.float64)),
        {"w": torch.tensor([1.0, 2.0])},
    )
    state, average = opt.init(params), params["w"].double()
    assert state[1].average["w"].data_ptr() != params["w"].data_ptr()  # both may be donated
    for _ in range(5):
        updates, state = opt.update(params, state, params)
        params = optim.apply_updates(params, updates)
        average = 0.9 * average + 0.1 * params["w"].double()
        torch.testing.assert_close(state[1].average["w"], average, rtol=1e-7, atol=0)  # the parameters are f32


def test_microbatches_are_one_big_batch():
    """Eagerly the norm is asked for once, and gradients that stay unreduced are reduced once."""
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(16, 3)
    f = lambda w, x: torch.tanh(x @ w).square().mean()
    start = torch.linspace(0.5, 2, 6, dtype=torch.float64).view(3, 2)
    inner = optim.chain(optim.clip_by_global_norm(0.01), optim.adamw(0.1))
    grads = vfn.grad(f)(start, x)
    whole = optim.apply_updates(start, inner.update(grads, inner.init(start), start)[0])
    opt = optim.accumulate(inner, 4)
    for update in (opt.update, vfn.jit(opt.update)):
        w, state = start, opt.init(start)
        for part in x.chunk(4):
            assert w.equal(start)
            updates, state = update(vfn.grad(f)(w, part), state, w)
            w = optim.apply_updates(w, updates)
        torch.testing.assert_close(w, whole, rtol=1e-12, atol=0)
        assert state.count == 0
        assert not state.total.any()
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("dp",))
        w = vfn.shard(start, mesh, P(reduced={"dp"}))
        state, counts = opt.init(w), []
        for part in x.chunk(4):
            grads = vfn.grad(f)(w, vfn.shard(part, mesh, P("dp")))
            with vfn.comm_log() as log:
                updates, state = opt.update(grads, state, w)
                after = optim.apply_updates(w, updates)
            counts.append([(r.op, r.bytes) for r in log])
        assert counts == [[], [], [], [("all_reduce", 48)]]
        torch.testing.assert_close(vfn.unshard(after), whole, rtol=1e-12, atol=0)


def regression(params, x, y, key=None, scale=1.0):
    hidden = torch.tanh(x @ params["up"] + params["bias"])
    hidden = hidden if key is None else vfn.random.dropout(key, hidden, 0.3)
    return (hidden @ params["down"] - y).square().mean() * scale


def regression_data():
    draw = torch.Generator().manual_seed(0)
    tensor = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=draw)
    return {"up": tensor(6, 8), "bias": tensor(8), "down": tensor(8, 2)}, tensor(24, 6), tensor(24, 2)


TENSOR = {"up": P(None, "tp"), "bias": P("tp"), "down": P("tp")}
SHARDED = {"up": P("dp"), "bias": P(), "down": P(None, "dp")}


def in_parts(specs, wrap=lambda f: f):
    """On a mesh, with dropout: the loss and the gradients, and what was moved to sum them."""
    params, x, y = regression_data()
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    params, (x, y) = vfn.shard(params, mesh, specs), vfn.shard((x, y), mesh, P("dp"))
    step = wrap(optim.microbatches(vfn.value_and_grad(regression), 3))
    with vfn.comm_log() as log:
        value, grads = step(params, x, y, vfn.random.key(3))
    assert [vfn.spec_of(grads[name]) for name in specs] == list(specs.values())
    return vfn.unshard((value, grads)), [(r.op, r.axis, r.bytes) for r in log if "reduce" in r.op]


def test_a_batch_in_parts():
    params, x, y = regression_data()
    gradient = vfn.value_and_grad(regression)
    close(
        optim.microbatches(gradient, 3)(params, x, y, scale=2.0), gradient(params, x, y, scale=2.0), rtol=1e-12, atol=0
    )
    keys, expected = vfn.random.split(vfn.random.key(3), 3), []
    for part in range(3):  # every third row, with a key of its own
        expected.append(gradient(params, x[part::3], y[part::3], keys[part]))
    expected = optree.tree_map(lambda *parts: sum(parts) / 3, *expected)
    close(optim.microbatches(gradient, 3)(params, x, y, vfn.random.key(3)), expected, rtol=1e-12, atol=1e-15)
    with vfn.simulate(4):
        for specs, wrap, sums in (
            (TENSOR, lambda f: f, [("all_reduce", 288)]),  # all gradients of a rank, once
            (TENSOR, vfn.jit, [("all_reduce", 312)]),  # and the three losses
            (SHARDED, lambda f: f, [("reduce_scatter", 512)] * 3 + [("all_reduce", 64)]),  # of the bias, once
        ):
            found, moved = in_parts(specs, wrap)
            close(found, expected, rtol=1e-12, atol=1e-15)
            assert [(op, size) for op, axis, size in moved if axis == "dp" and size > 8] == sums
    mean = optim.microbatches(lambda w, x: x.mean(), 300)(None, torch.tensor([1.0, 0.0] * 150).bfloat16())
    assert (mean.dtype, mean.item()) == (torch.bfloat16, 0.5)  # 256 ones are not the last that bf16 counts


def test_a_batch_that_has_no_parts():
    with pytest.raises(vfn.errors.VfnError) as error:
        optim.microbatches(lambda *_: {}, 4)({}, {"x": torch.ones(6, 2), "y": torch.ones(8)}, torch.ones(5))
    assert str(error.value) == (
        "microbatches: the batch has no 4 equal parts\n"
        "  * batch[0]['x'] is the tensor f32[6,2]: 6 rows are no multiple of 4\n"
        "  * batch[1] is the tensor f32[5]: 5 rows are no multiple of 4\n"
        "  Instead: a count that divides the rows; what is no batch by keyword"
    )
    with pytest.raises(vfn.errors.VfnError) as error:
        optim.microbatches(lambda w, x: (x.mean(), {"seen": x.gt(0).sum()}), 2)({}, torch.ones(4))
    assert str(error.value).splitlines()[1] == "  * result[1]['seen'] is the tensor i64[]"
    with pytest.raises(vfn.errors.VfnError, match="count is the int 0"):
        optim.microbatches(lambda w: w, 0)


def test_narrow_gradients_add_up_in_f32():
    opt, w = optim.accumulate(optim.sgd(1.0), 300), torch.zeros(1, dtype=torch.bfloat16)
    state = opt.init(w)
    for _ in range(299):
        _, state = opt.update(torch.ones_like(w), state, w)
    assert state.total.item() == 299  # in bf16 it would stay at 256


def test_parts_by_label():
    params = {"blocks": [{"wq": torch.ones(2, 3), "bias": torch.ones(3)}], "embed": torch.ones(4, 2)}
    labels = optim.by_path([(r"bias|embed", "other"), (r"blocks", "matrix")])
    opt = optim.partition({"matrix": optim.sgd(0.5, 0.9), "other": optim.sgd(0.25), "none": optim.adamw(1.0)}, labels)
    state = opt.init(params)
    assert [x.shape for x in optree.tree_leaves(state["matrix"].momentum)] == [
        (2, 3)
    ]  # no state for what is not its own
    updates, state = opt.update(params, state, params)
    assert updates["blocks"][0]["wq"].eq(-0.5).all()
    assert updates["blocks"][0]["bias"].eq(-0.25).all()
    assert updates["embed"].eq(-0.25).all()


def test_labels_and_patterns_must_fit():
    params = {"w": torch.ones(2), "v": torch.ones(2)}
    opt = optim.partition({"slow": optim.sgd(0.1)}, {"w": "slow", "v": "slwo"})
    with pytest.raises(vfn.errors.SpecError) as error:
        opt.init(params)
    assert str(error.value) == (
        "partition: there is no part for some labels\n"
        "  * params['v'] has the label 'slwo'; did you mean 'slow'?\n"
        "  Instead: one of the labels 'slow', or another part"
    )
    with pytest.raises(vfn.errors.SpecError) as error:
        optim.by_path([("w", True), ("x", False)])(params)
    assert str(error.value).splitlines()[1:3] == [
        "  * no rule matches 'v' (params['v'])",
        "  * rule ('x', False) matches no leaf",
    ]
    with pytest.raises(vfn.errors.SpecError) as error:
        optim.by_path(["w"])
    assert "rules[0] is the str 'w'" in str(error.value)


def test_what_is_masked_passes_through():
    params = {"w": torch.ones(2), "b": torch.full((2,), 3.0), "n": 4}
    opt = optim.masked(
        optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1)), {"w": True, "b": False, "n": False}
    )
    updates, state = opt.update(params, opt.init(params), params)
    assert updates["b"] is params["b"]
    assert updates["n"] == 4
    assert updates["w"].lt(0).all()
    assert len(optree.tree_leaves(state)) == 3  # the count, and two for w


def test_torchs_own_on_a_mesh_by_a_schedule():
    params = {"w": torch.arange(6.0).view(2, 3) / 6, "b": torch.ones(3)}
    make = lambda: optim.from_torch(torch.optim.NAdam, lambda count: 0.1 / (1 + count), weight_decay=0.1)
    run = lambda params: [updates_of(make(), params, 3)[0]]
    expected = []
    leaves = [x.clone().requires_grad_() for x in (params["b"], params["w"])]
    reference, draw = torch.optim.NAdam(leaves, lr=0.1, weight_decay=0.1), torch.Generator().manual_seed(5)
    for count in range(3):
        before = [x.detach().clone() for x in leaves]
        for leaf in leaves:
            leaf.grad = torch.randn(leaf.shape, generator=draw)
        reference.param_groups[0]["lr"] = 0.1 / (1 + count)
        reference.step()
        expected.append(dict(zip("bw", (x.detach() - y for x, y in zip(leaves, before)))))
        with torch.no_grad():
            for leaf, x in zip(leaves, before):
                leaf.copy_(x)  # `updates_of` leaves the parameters where they are
    close(run(params)[0], expected, rtol=1e-6, atol=1e-7)
    with vfn.simulate(3):
        mesh = vfn.make_mesh((3,), ("tp",))
        arrays = vfn.shard(params, mesh, {"w": P(None, "tp"), "b": P("tp")})
        opt, draw = make(), torch.Generator().manual_seed(5)
        state = opt.init(arrays)
        for count in range(3):
            grads = {name: torch.randn(params[name].shape, generator=draw) for name in "bw"}
            updates, state = opt.update(vfn.shard(grads, mesh, {"w": P(None, "tp"), "b": P("tp")}), state, arrays)
            close(vfn.unshard(updates), expected[count], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Adamax, {}),
        (Lion, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
        (torch.optim.SGD, {}),
    ],
)
def test_the_state_of_torchs_own_begins_as_theirs_does(cls, options):
    """Before the first step it has the tree that it has after it, and the values from which torch's goes on."""
    start, grads = torch.arange(6.0).view(2, 3) - 2, torch.arange(6.0).view(2, 3).cos()
    leaf, opt, params = start.clone().requires_grad_(), optim.from_torch(cls, 0.1, **options), {"w": start, "n": 3}
    reference, state = cls([leaf], lr=0.1, **options), opt.init(params)
    first = optree.tree_structure(state)
    for _ in range(3):
        leaf.grad = grads.clone()
        reference.step()
        updates, state = opt.update({"w": grads, "n": 3}, state, params)
        params = optim.apply_updates(params, updates)
        torch.testing.assert_close(params["w"], leaf.detach(), rtol=1e-6, atol=1e-6)
    made_of_gradients = cls is torch.optim.SGD and bool(options)
    assert (first == optree.tree_structure(state)) is not made_of_gradients


def real_steps():
    """On a real rank: some optimisers that communicate, two steps each."""
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    found = {}
    for case in CASES:
        if case.name in ("adafactor", "muon", "clipped", "accumulated", "adamw"):
            params = vfn.shard(make_params(), mesh, SPECS)
            found[case.name] = vfn.unshard(train(case.ours, params, 2)[-1])
    return found, in_parts(TENSOR)


def test_on_real_ranks(gloo):
    expected = {case.name: case for case in CASES}
    gradients = optim.microbatches(vfn.value_and_grad(regression), 3)(*regression_data(), vfn.random.key(3))
    for found, (parts, moved) in gloo(4, real_steps):
        close(parts, gradients, rtol=1e-12, atol=1e-15)
        assert [size for _, axis, size in moved if axis == "dp" and size > 8] == [288]
        for name, params in found.items():
            close(params, train(expected[name].ours, make_params(), 2)[-1], rtol=1e-12, atol=1e-13)


def steps_of_all(params, grads, jit=None, **how):
    """The parameters, and the states, after two steps of every optimiser of ours that sums nothing."""
    opts = {case.name: case.ours for case in CASES if case.exact and case.name != "from_torch"}

    def step(params, states, grads):
        updates = {name: opt.update(grads, states[name], params[name]) for name, opt in opts.items()}
        after = {name: optim.apply_updates(params[name], update) for name, (update, _) in updates.items()}
        return after, {name: state for name, (_, state) in updates.items()}

    run = step if jit is None else jit(step, **how)
    params = {name: optree.tree_map(torch.clone, params) for name in opts}
    states = {name: opt.init(params[name]) for name, opt in opts.items()}
    for grad in grads:
        params, states = run(params, states, grad)
    return params, states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_the_same_bits_whatever_runs(dtype):
    """Eagerly on lists, on each leaf by itself, on ranks whose blocks end elsewhere, and in plans: one rounding for all."""
    draw = torch.Generator().manual_seed(2)
    make = lambda: {
        "a": torch.randn(13, 11, generator=draw).to(dtype),
        "b": torch.randn(57, generator=draw).to(dtype),
        "c": torch.randn((), generator=draw).to(dtype),
    }
    params, grads = make(), [make(), make()]
    expected = steps_of_all(params, grads)
    exactly = lambda found: close(found, expected, rtol=0, atol=0)
    with context.debugging():
        assert per_leaf.looked_on()
        exactly(steps_of_all(params, grads))
    exactly(steps_of_all(params, grads, vfn.jit, donate_argnums=(0, 1)))
    with vfn.simulate(3):
        specs = {"a": P("dp"), "b": P("dp"), "c": P()}
        arrays, theirs = vfn.shard((params, grads), vfn.make_mesh((3,), ("dp",)), (specs, [specs, specs]))
        exactly(vfn.unshard(steps_of_all(arrays, theirs)))
        if dtype == torch.float32:
            exactly(vfn.unshard(steps_of_all(arrays, theirs, vfn.jit)))


def test_an_update_makes_one_call_for_all_leaves():
    params = {str(i): torch.ones(2, 3) for i in range(50)}
    opt = optim.adamw(0.1)
    state = opt.init(params)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        opt.update(params, state, params)
    names = [event.name for event in profile.events() if event.name.startswith("aten::_foreach")]
    assert 5 <= len(names) <= 9, names


def test_a_replayed_update_writes_over_all_leaves_at_once():
    params, opt = {str(i): torch.ones(2, 3) for i in range(20)}, optim.adamw(0.1)

    def step(params, state, grads):
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    plan = vfn.jit(step, donate_argnums=(0, 1)).lower(params, opt.init(params), params).text()
    calls = re.findall(r"(?<= )_foreach_\w+", plan)
    assert sorted(calls) == [
        "_foreach_add_",
        "_foreach_add_",
        "_foreach_addcdiv_",
        "_foreach_addcmul_",
        "_foreach_lerp_",
        "_foreach_mul",
        "_foreach_mul_",
        "_foreach_sqrt",
    ], plan
    assert "_foreach_mul_ x2" in plan  # the mean square, and the step


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("sgd", "a SgdState"),
        ("adamw", "an AdamState"),
        ("lion", "a LionState"),
        ("params_ema", "an EmaState"),
        ("adafactor", "an AdafactorState"),
        ("muon", "a MuonState"),
        ("chain", "the tuple of the states"),
    ],
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
    "linear": (optim.linear(2.0, 0.5, 10), lambda t: 2 - 1.5 * min(t / 10, 1)),
    "warmup_linear": (
        optim.warmup_linear(2.0, 4, 12, 0.5),
        lambda t: 2 * (t + 1) / 4 if t < 4 else 2 - 1.5 * min((t - 4) / 8, 1),
    ),
    "warmup_stable_decay": (
        optim.warmup_stable_decay(2.0, 3, 4, 12, 0.5),
        lambda t: 2 * (t + 1) / 3 if t < 3 else 2 if t < 8 else 2 - 1.5 * min((t - 8) / 4, 1),
    ),
    "all_decay": (optim.warmup_stable_decay(2.0, 0, 8, 8), lambda t: 2 - 2 * min(t / 8, 1)),
    "join": (
        optim.join([optim.linear(0.0, 1.0, 4), optim.constant(0.7), optim.cosine(1.0, 4)], [5, 9]),
        lambda t: min(t / 4, 1) if t < 5 else 0.7 if t < 9 else (1 + math.cos(math.pi * min((t - 9) / 4, 1))) / 2,
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name):
    ours, formula = SCHEDULES[name]
    for t in range(15):
        assert float(ours(t)) == pytest.approx(formula(t), rel=1e-12)
        assert float(ours(torch.tensor(t))) == pytest.approx(formula(t), rel=1e-12)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "scale"])
def test_a_schedule_is_an_input_of_a_plan(name):
    rate = optim.warmup_cosine(0.1, 2, 5)
    opt, params = getattr(optim, name)(rate), {"w": torch.ones(2, 3)}
    update, state, plain = vfn.jit(opt.update), opt.init(params), opt.init(params)
    for _ in range(4):
        updates, state = update(params, state, params)
        expected, plain = opt.update(params, plain, params)
        close(updates, expected)
    assert update.cache_info().records == 1


def test_schedules_that_cannot_be_joined():
    with pytest.raises(vfn.errors.VfnError) as error:
        optim.join([optim.constant(1.0), 3.0], [4, 2])
    assert str(error.value).splitlines()[1:3] == [
        "  * schedules[1] is the float 3.0",
        "  * 2 schedules need 1 boundaries, each larger than the one before, but boundaries is [4, 2]",
    ]
    with pytest.raises(vfn.errors.VfnError, match="decay=9, warmup=2 and steps=10"):
        optim.warmup_stable_decay(1.0, 2, 9, 10)


def test_warm_up_must_leave_steps():
    with pytest.raises(vfn.errors.VfnError, match="warmup=5 and steps=5"):
        optim.warmup_cosine(1.0, 5, 5)
    for schedule, where in ((optim.cosine, "cosine"), (lambda *given: optim.linear(0.0, *given), "linear")):
        with pytest.raises(vfn.errors.VfnError, match=f"^{where}: needed is steps > 0, but steps=0$"):
            schedule(1.0, 0)


def test_an_optimiser_reads_as_the_call_that_made_it():
    o = vfn.optim
    labels = o.by_path([("w", "a")], "b")
    for made, said in {
        o.adamw(1e-3): "adamw(0.001)",
        o.adam(o.warmup_cosine(1e-3, 10, 100), weight_decay=0.1): "adam(warmup_cosine(...), weight_decay=0.1)",
        o.chain(
            o.clip_by_global_norm(1.0), o.sgd(0.1, nesterov=True, momentum=0.9)
        ): "chain(clip_by_global_norm(1.0), sgd(0.1, momentum=0.9, nesterov=True))",
        o.adafactor(): "adafactor()",
        o.masked(o.lion(0.1), labels): "masked(lion(0.1), by_path(...))",
        o.partition(
            {"a": o.muon(0.02), "b": o.params_ema(0.9)}, labels
        ): "partition({'a': muon(0.02), 'b': params_ema(0.9)}, by_path(...))",
        o.from_torch(
            torch.optim.SGD, torch.tensor(0.1), momentum=0.9
        ): "from_torch(SGD, the tensor f32[], momentum=0.9)",
        vfn.precision.master_weights(o.accumulate(o.scale(-0.5), 4)): "master_weights(accumulate(scale(-0.5), 4))",
    }.items():
        assert repr(made) == said
    jitted = o.sgd(0.1)._replace(update=vfn.jit(lambda grads, state, params: (grads, state)))
    assert repr(jitted).startswith("Optimizer(init=<function sgd.<locals>.init at ")
