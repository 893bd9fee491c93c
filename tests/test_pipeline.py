"""`vfn.cut` and `vfn.pipeline`: for every schedule the bits of microbatches on one device."""

import copy
import re
import warnings

import pytest
import torch
import torch.distributed as dist

import vescale_fn as vfn
from vescale_fn import P, pipelined
from vescale_fn._core import torch_internals
from vescale_fn._core.distributed.parcels import Lies, Parcel
from vescale_fn.plan import cut_choice
from vescale_fn.plan.ir.graph import collectives
from vescale_fn.plan.staged import Staged
from vescale_fn.recipes import gpt, models
from vescale_fn.recipes.parallel import parallel
from vescale_fn.schedules import Action, Schedule

PARTS, ROWS, WIDTH = 3, 12, 4


def rows(*texts: str) -> tuple[tuple[Action, ...], ...]:
    """Rows of a schedule, written as ``0F0 0F1 0BW0``."""
    return tuple(tuple(Action(x[1:-1], int(x[0]), int(x[-1])) for x in text.split()) for text in texts)


# W comes late, and not in order; and stages 0 and 3 are one rank's, which has messages of several kinds on each edge.
LATE = Schedule((0, 1), rows(*("sF0 sF1 sB0 sF2 sB1 sW1 sB2 sW0 sW2".replace("s", s) for s in "01")))
IN_V = Schedule(
    (0, 1, 1, 0),
    rows(
        "0F0 0F1 0F2 3F0 3B0 3W0 3F1 3BW1 3F2 3BW2 0BW0 0B1 0B2 0W2 0W1",
        "1F0 2F0 1F1 2F1 1F2 2F2 2BW0 1BW0 2BW1 1BW1 2BW2 1BW2",
    ),
)
SCHEDULES = {
    "gpipe": (2, "gpipe"),
    "1f1b": (4, "1f1b"),
    "interleaved": (2, "interleaved"),
    "zb-h1": (2, "zb-h1"),
    "zb-h2": (4, "zb-h2"),
    "zbv": (2, "zbv"),
    "dualpipev": (2, "dualpipev"),
    "late": (2, LATE),
    "v": (2, IN_V),
}


def numbers(*shapes):
    keys = vfn.random.split(vfn.random.key(len(shapes)), len(shapes))
    return [0.5 * vfn.random.normal(key, shape) for key, shape in zip(keys, shapes)]


def matrices(n):
    return numbers(*[(WIDTH, WIDTH)] * n)


X, Y = numbers((ROWS, WIDTH), (ROWS, WIDTH))


def chain(params, x, y):
    for w in params:
        x = vfn.cut(torch.tanh(x @ w))
    return (x - y).square().mean()


def drawn(params, x, y, key):
    """A block that is computed again, with a mask of its own key; and a value that all stages use."""
    scale = torch.relu(y @ params[0])
    block = vfn.remat(lambda w, x, k: torch.tanh(x @ w) * vfn.random.bernoulli(k, 0.8, x.shape) * scale)
    for w, k in zip(params[1:], vfn.random.split(key, len(params) - 1)):
        x = vfn.cut(block(w, x, k))
    return (x - y).square().mean()


def skips(params, x, y):
    """Whose second half takes what the first half made; one leaf of the last cut is of integers, another one unused."""
    kept, half = [], len(params) // 2
    for w in params[:half]:
        kept.append(x := vfn.cut(torch.tanh(x @ w)))
    count = (x > 0).long()
    for w in params[half:]:
        x, count, _ = vfn.cut((torch.tanh(x @ w) + kept.pop() @ w, count + 1, y))
    return (x * count - y).square().mean()


def two_chains(params, x, y):
    """An encoder, and a decoder that begins beside it."""
    for w in params[:2]:
        x = vfn.cut(torch.tanh(x @ w))
    y = y @ params[2]
    for w in params[2:]:
        y = vfn.cut(torch.tanh(y @ w + x))
    return y.square().mean()


def regularised(params, x, y):
    """With terms of each layer beside the loss, one of them of the parameters alone; in bfloat16, and written in place."""
    x, terms = x.bfloat16(), 0.0
    for w in params:
        x = x @ w.bfloat16()
        x = torch.tanh(x.add_(0.5))
        terms = terms + x.float().square().mean() + 0.1 * (w * w).sum()
        x = vfn.cut(x)
    return (x.float() - y).square().mean() * terms, {"terms": terms, "first": params[0]}


def views(params, x, y):
    """What crosses lies oddly in memory, or is conjugated as it is read."""
    for w in params:
        x, turned = vfn.cut((torch.tanh(x @ w).T[None].expand(2, WIDTH, len(x)), torch.complex(x, x).conj()))
        x = x[1].T + turned.imag
    return (x - y).square().mean()


def looped(params, x, y):
    x, _ = vfn.scan(lambda x, w: (vfn.cut(torch.tanh(x @ w)), None), x, params)
    return (x - y).square().mean()


def chosen(params, x, y):
    """With choices, loops of unknown length, and writes into one of several results of an operator."""
    for w in params:
        x = vfn.cut(vfn.cond(x.sum() > 0, lambda x, w: torch.tanh(x @ w), lambda x, w: torch.sin(x @ w), x, w))
        top, _ = x.detach().sort(1)
        x = x + top.clamp_(max=0.1)
    halved = vfn.while_loop(lambda x: x > 0.5, lambda x: x / 2, x.detach().square().sum())
    return (x - y).square().mean() * halved


CASES = {
    "chain": (chain, matrices(4), ["gpipe", "zbv"]),
    "drawn": (drawn, matrices(5), ["1f1b", "dualpipev"]),
    "skips": (skips, matrices(4), ["v", "interleaved"]),
    "two chains": (two_chains, matrices(4), ["late", "zb-h2"]),
    "regularised": (regularised, matrices(4), ["v", "zb-h1"]),
    "views": (views, matrices(4), ["late"]),
    "looped": (looped, torch.stack(matrices(4)), ["gpipe"]),
    "chosen": (chosen, matrices(4), ["zbv"]),
}


def same(a, b) -> list[bool]:
    return [
        torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(vfn.tree.leaves(a), vfn.tree.leaves(b), strict=True)
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_has_the_bits_of_microbatches(name: str) -> None:
    f, params, schedules = CASES[name]
    has_aux = f is regularised
    batch = (X, Y, vfn.random.key(7)) if f is drawn else (X, Y)
    for ranks, schedule in map(SCHEDULES.__getitem__, schedules):
        count, chunks = 4 if schedule == "dualpipev" else PARTS, 2 if schedule == "interleaved" else None
        wanted = vfn.optim.microbatches(vfn.value_and_grad(f, has_aux=has_aux), count)(params, *batch)
        piped = vfn.pipeline(f, "pp", microbatches=count, schedule=schedule, chunks=chunks, has_aux=has_aux)
        step = vfn.value_and_grad(piped, has_aux=has_aux)
        assert all(same(step(params, *batch), wanted))
        with vfn.simulate(ranks):
            placed = vfn.shard(params, vfn.make_mesh((ranks,), ("pp",)), P())
            value, grads = step(placed, *batch)
            assert vfn.tree.map(vfn.spec_of, grads) == vfn.tree.map(vfn.spec_of, placed)
            assert all(same(vfn.unshard((value, grads)), wanted))
            assert all(same(vfn.unshard(piped(placed, *batch)), wanted[0]))


def tied(params, x, y):
    """An embedding that is the head, too."""
    x = first = params["table"][x]
    for w in params["layers"]:
        x = vfn.cut(torch.tanh(x @ w))
    return torch.nn.functional.cross_entropy((x + first) @ params["table"].mT, y)


TABLE, *REST = (x.double() for x in numbers((9, WIDTH), *[(WIDTH, WIDTH)] * 4))
TIED = {"table": TABLE, "layers": REST}
WORDS = torch.arange(ROWS) % 9, torch.arange(ROWS) % 5


def tied_step():
    """The pipelined function on four ranks, and what it gives: each rank holds the parameters of its stage, two the table."""
    mesh = vfn.make_mesh((4,), ("pp",))
    piped = vfn.pipeline(tied, "pp", microbatches=PARTS, cuts=[0, 1, 2])
    with vfn.use_mesh(mesh):
        specs = piped.specs(TIED, *WORDS)
    assert specs == {"table": P(at={"pp": (0, 3)}), "layers": [P(at={"pp": i}) for i in range(4)]}
    found = vfn.value_and_grad(piped)(vfn.shard(TIED, mesh, specs), *WORDS)
    assert vfn.tree.map(vfn.spec_of, found[1]) == specs
    return piped, vfn.unshard(found)


def check_tied(found) -> None:
    value, grads = vfn.optim.microbatches(vfn.value_and_grad(tied), PARTS)(TIED, *WORDS)
    assert all(same((found[0], found[1]["layers"]), (value, grads["layers"])))
    torch.testing.assert_close(found[1]["table"], grads["table"], rtol=0, atol=1e-12)


def test_a_tied_parameter_is_added_up_once_a_step() -> None:
    """And no call stands in two tasks; of a boundary one activation crosses each way, what skips the stages goes there at once."""
    with vfn.simulate(4):
        piped, found = tied_step()
    check_tied(found)
    with vfn.simulate(4):
        plan = piped.plan(vfn.shard(TIED, vfn.make_mesh((4,), ("pp",)), P()), *WORDS)
    activation = ROWS // PARTS * WIDTH * 8
    sends = [{("F", 1), ("F", 3)}, {("F", 2), ("B", 0)}, {("F", 3), ("B", 1)}, {("B", 2), ("B", 0)}]
    assert [stage.sends for stage in plan.stages] == [dict.fromkeys(to, activation) for to in sends]
    assert plan.timeline().bubble > 0
    assert len(plan.text().splitlines()) == 12
    stages = next(iter(piped._plans.values())).stages
    made = [node for (kind, _), nodes in stages.tasks.items() if kind != "PRE" for node in nodes]
    assert len(made) == len(set(made))
    assert [stages.counts()[f"F{i}"] for i in range(3)] == [3, 3, 3]  # of rows, a product, tanh, and what marks the cut
    assert [[part.stage for part in parts] for parts in stages.parts] == [[0], [1], [2], [3], [0, 3]]


@pytest.mark.parametrize("how", ["hooks", "paths"])
def test_cuts_of_a_module_of_torch(how: str) -> None:
    """By its own hooks, or by the paths of its parts: also around what is computed again, and of a copy alone."""
    module = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    if how == "hooks":
        for layer in module:
            layer.register_forward_hook(lambda layer, args, out: vfn.cut(out))
    f, params = vfn.module_function(module)
    if how == "paths":
        f, uncut = f.cutting(r"^\d$").remat(dict.fromkeys("0123")), f
        assert (f.cuts, uncut.cuts) == (set("0123"), set())
    loss = lambda params, x: f(params, x).square().mean()
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("pp",))
        piped = vfn.pipeline(loss, "pp", microbatches=PARTS, cuts=["1"] if how == "paths" else [1])
        with vfn.use_mesh(mesh):
            placed = vfn.shard(params, mesh, piped.specs(params, X))
        found = vfn.unshard(vfn.value_and_grad(piped)(placed, X))
    assert [vfn.spec_of(layer["weight"]) for layer in placed] == [P(at={"pp": i}) for i in (0, 0, 1, 1)]
    assert all(same(found, vfn.optim.microbatches(vfn.value_and_grad(loss), PARTS)(params, X)))


def test_an_axis_of_one_rank() -> None:
    """In a process of its own, without a process group."""
    params = matrices(2)
    placed = vfn.shard(params, vfn.make_mesh((1,), ("pp",)), P())
    step = vfn.value_and_grad(vfn.pipeline(chain, "pp", microbatches=PARTS))
    assert all(same(vfn.unshard(step(placed, X, Y)), step(params, X, Y)))


def test_arrays_on_the_whole_mesh_come_as_arguments() -> None:
    """Each rank along the axis would compute with its own part of them."""
    with vfn.simulate(2):
        params = vfn.shard(matrices(2), mesh := vfn.make_mesh((2,), ("pp",)), P())
        other = vfn.shard(X, mesh, P("pp"))
        for f in (
            lambda params, x, y: chain(params, x, y) + other.sum(),
            lambda params, x, y: chain(params, x, y) * other,
        ):
            with pytest.raises(vfn.errors.VfnError):
                vfn.pipeline(f, "pp", microbatches=PARTS)(params, X, Y)


def test_gradients_go_through_the_loss_alone() -> None:
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("pp",))
        params = vfn.shard(matrices(4), mesh, P())
        piped = vfn.pipeline(regularised, "pp", microbatches=PARTS, has_aux=True)
        twice = vfn.value_and_grad(lambda params: 2 * piped(params, X, Y)[0] + params[0].sum())(params)
        once = vfn.value_and_grad(piped, has_aux=True)(params, X, Y)
        assert all(same(vfn.unshard(twice[1][1:]), [2 * g for g in vfn.unshard(once[1][1:])]))
        with pytest.raises(vfn.errors.TransformError, match="gradients go through the loss of a pipelined function"):
            vfn.grad(lambda params: piped(params, X, Y)[1]["terms"])(params)


def test_what_a_function_keeps_of_its_first_run_makes_no_new_plan() -> None:
    kept = {}

    def f(params, x, y):
        table = kept.setdefault("table", x.new_ones(WIDTH))
        kept["runs"] = kept.get("runs", 0) + 1
        return chain(params, x * table, y)

    with vfn.simulate(2):
        params = vfn.shard(matrices(2), vfn.make_mesh((2,), ("pp",)), P())
        step = vfn.value_and_grad(piped := vfn.pipeline(f, "pp", microbatches=PARTS, cuts=iter([0])))
        assert all(same(vfn.unshard(step(params, X, Y)), vfn.unshard(step(params, X, Y))))
    assert kept["runs"] == 1
    assert repr(copy.deepcopy(piped)) == repr(piped)


def scaled_step(params, x, y, rate):
    """An update whose loss uses a value of the plan around it, and of which another one follows."""
    scale = x.abs().mean()
    piped = vfn.pipeline(lambda params, x, y: chain(params, x, y) * scale, "pp", microbatches=PARTS)
    for _ in range(2):
        value, grads = vfn.value_and_grad(piped)(params, x, y)
        params = vfn.tree.map(lambda p, g: p - rate * g, params, grads)
    return value, params, piped(params, x, y)


def test_a_piped_step_is_one_call_of_a_plan() -> None:
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("pp",))
        jitted = vfn.jit(scaled_step, donate_argnums=0)
        for rate in (0.5, 0.25):
            params = vfn.shard(matrices(2), mesh, P())
            wanted = vfn.unshard(scaled_step(params, X, Y, rate))
            assert all(same(vfn.unshard(jitted(params, X, Y, rate)), wanted))
        assert (jitted.cache_info().records, jitted.cache_info().hits) == (1, 1)


def test_what_a_piped_step_uses_is_known_to_the_plan_around_it() -> None:
    """A table that the first run makes, a tensor and a number of the function's own."""
    scale, weight, kept = [1.0], torch.tensor(2.0), {}

    def f(params, x, y):
        kept["runs"] = kept.get("runs", 0) + 1
        return chain(params, x * kept.setdefault("table", x.new_ones(WIDTH)), y) * scale[0] * weight

    with vfn.simulate(2):
        params = vfn.shard(matrices(2), vfn.make_mesh((2,), ("pp",)), P())
        step = vfn.value_and_grad(vfn.pipeline(f, "pp", microbatches=PARTS))
        jitted = vfn.jit(lambda params, x, y, rate: vfn.tree.map(lambda g: rate * g, step(params, x, y)))
        first = vfn.unshard(jitted(params, X, Y, 1.0))
        assert kept["runs"] == 1  # though a plan with a float is recorded twice, and compared
        weight.fill_(4.0)
        assert all(same(vfn.unshard(jitted(params, X, Y, 0.5)), first))
        scale[0] = 0.5
        kept.clear()
        assert all(same(vfn.unshard(jitted(params, X, Y, 1.0)), first))
        assert (jitted.cache_info().records, jitted.cache_info().hits) == (2, 1)


# --- with other axes, and on real ranks -------------------------------------------------------------------------------


def layered(params, x, y):
    for w, b in params:
        x = vfn.cut(torch.tanh(x @ w + b))
    return (x - y).square().mean()


LAYERS = list(zip(matrices(4), numbers(*[(WIDTH,)] * 4)))


def test_the_value_alone_is_of_stages_whose_ranks_have_the_parameters() -> None:
    """Without gradients, or for other rows, other stages would be as long as each other."""

    def f(params, x, y):
        x = first = x @ params[0][0]
        for w, b in params:
            x = vfn.cut(torch.tanh(x @ w + b))
        return ((x + first) @ params[0][0].mT - y).square().mean()

    with vfn.simulate(4):
        params = vfn.shard(LAYERS, vfn.make_mesh((4,), ("pp",)), P())
        piped = vfn.pipeline(f, "pp", microbatches=PARTS)
        value = piped(vfn.with_sharding(params, piped.specs(params, X, Y)), X, Y)
    assert all(same(vfn.unshard(value), vfn.optim.microbatches(f, PARTS)(LAYERS, X, Y)))


LAYOUTS = {  # mesh, axes, specs of parameters and of the batch
    "fsdp": ((2, 2), ("pp", "dp"), (P("dp"), P()), P("dp")),
    "tp": ((2, 2), ("tp", "pp"), (P(None, "tp"), P("tp")), P()),
    "dp, tp": ((2, 2, 2), ("dp", "pp", "tp"), (P("tp"), P()), P("dp")),
    "four stages": ((4,), ("pp",), (P(), P()), P()),
}


def step(f, name: str, whole: bool):
    """A step, and the value alone, on a mesh, or on the mesh without the axis of the pipeline."""
    shape, axes, specs, of_batch = LAYOUTS[name]
    if not whole:
        shape, axes = zip(*((n, a) for n, a in zip(shape, axes) if a != "pp")) if len(axes) > 1 else ((1,), ("one",))
    mesh = vfn.make_mesh(shape, axes)
    specs, batch = [specs] * 4, vfn.shard((X[:4], Y[:4]), mesh, of_batch)
    if whole and name != "tp":  # each rank holds the parameters of its own stages alone
        with vfn.use_mesh(mesh):
            specs = f(lambda loss: loss).specs(vfn.eval_shape(lambda: LAYERS), *batch, base=specs)
        assert all(dict(spec.at).keys() == {"pp"} for spec in vfn.tree.leaves(specs))
    params = vfn.shard(LAYERS, mesh, specs)
    value, grads = f(vfn.value_and_grad)(params, *batch)
    assert vfn.tree.map(vfn.spec_of, grads) == vfn.tree.map(vfn.spec_of, params)
    return vfn.unshard((value, grads, f(lambda loss: loss)(params, *batch)))


def piped_step(name: str, schedule="1f1b"):
    return step(lambda g: g(vfn.pipeline(layered, "pp", microbatches=2, schedule=schedule)), name, True)


def wanted_step(name: str):
    shape, axes, *_ = LAYOUTS[name]
    with vfn.simulate(max(1, torch.Size(shape).numel() // dict(zip(axes, shape))["pp"])):
        return step(lambda g: vfn.optim.microbatches(g(layered), 2), name, False)


@pytest.mark.parametrize("name", ["fsdp", "tp", "dp, tp"])
def test_stages_on_meshes_of_other_axes(name: str) -> None:
    with vfn.simulate(torch.Size(LAYOUTS[name][0]).numel()):
        found = piped_step(name)
    assert all(same(found, wanted_step(name)))


def test_a_message_is_logged_as_the_first_rank_sends_it() -> None:
    """Of a value that is split unevenly its block, of one that all ranks along another axis hold the whole."""
    for lies, rows in ((P("tp"), 3), (P(), 7)):

        def f(params, x, y, lies=lies):
            for w in params:
                x = vfn.cut(vfn.with_sharding(torch.tanh(x @ w), lies))
            return x.square().mean()

        with vfn.simulate(6):
            mesh, piped = vfn.make_mesh((2, 3), ("pp", "tp")), vfn.pipeline(f, "pp", microbatches=1)
            args = vfn.shard((matrices(2), X[:7], Y[:7]), mesh, P())
            with vfn.comm_log() as log:
                vfn.value_and_grad(piped)(*args)
            sent = [row for row in log if row.op == "send"]
            assert [row.bytes for row in sent] == [rows * WIDTH * 4] * 2
            plan = piped.plan(*args)
            assert plan.comms(0)[0] == sent[0]
            assert plan.stages[0].sends == {("F", 1): rows * WIDTH * 4}


def gathered(params, x, y):
    """FSDP: each layer's parameters are split, and brought together where they are used."""
    for w, b in params:
        w, b = vfn.with_sharding((w, b), P())
        x = vfn.cut(torch.tanh(x @ w + b))
    return (x - y).square().mean()


def test_parameters_are_gathered_once_a_step_or_by_each_task() -> None:
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("dp",))
        given = vfn.shard((LAYERS, X, Y), mesh, P("dp"))
        wanted = vfn.unshard(vfn.optim.microbatches(vfn.value_and_grad(gathered), 2)(*given))
    # each layer has two; and backward goes through the weights of all but the first
    for gather, often in (("step", [{"PRE": 4}, {"PRE": 4}]), ("microbatch", [{"F": 4, "W": 1}, {"F": 4, "B": 2}])):
        with vfn.simulate(4):
            mesh = vfn.make_mesh((2, 2), ("pp", "dp"))
            piped = vfn.pipeline(gathered, "pp", microbatches=2, cuts=[1], gather=gather)
            found = vfn.value_and_grad(piped)(*vfn.shard((LAYERS, X, Y), mesh, P("dp")))
            assert all(same(vfn.unshard(found), wanted))
        (staged,) = piped._plans.values()
        for (kind, stage), nodes in staged.stages.tasks.items():
            gathers = [node for node in nodes if getattr(node.target, "kind", "") == "all_gather"]
            assert len(gathers) == often[stage].get(kind, 0)
        for stage, of in enumerate(staged.all_tasks):  # in which they travel together, as gradients do
            kinds = [*({"W": "BW", "B": "BW"}.get(kind, kind) for kind in often[stage]), "BW"]
            sent = [[node.target.kind for node in collectives(of[kind].graph)] for kind in kinds]
            assert all(found.count("all_gather") == 1 for found in sent[:-1])
            assert sent[-1].count("reduce_scatter") == 1


def test_equal_stages_have_one_body() -> None:
    with vfn.simulate(4):
        params = vfn.shard(matrices(4), vfn.make_mesh((4,), ("pp",)), P())
        piped = vfn.pipeline(chain, "pp", microbatches=PARTS, cuts=[0, 1, 2])
        assert all(
            same(
                vfn.unshard(vfn.value_and_grad(piped)(params, X, Y)),
                vfn.optim.microbatches(vfn.value_and_grad(chain), PARTS)(matrices(4), X, Y),
            )
        )
        first, second, third, last = next(iter(piped._plans.values())).all_tasks
    assert all(second[kind].body is third[kind].body for kind in second)
    assert first.keys() == {"PRE", "F", "BW"}  # what the schedule has
    assert first["BW"].body is not second["BW"].body  # nothing waits for what the first one's input has as its gradient
    assert last["F"].body is not second["F"].body


V = Schedule((0, 1, 1, 0), rows("0F0 0F1 3F0 3B0 3F1 3BW1 3W0 0B0 0BW1 0W0", "1F0 2F0 1F1 2F1 2BW0 1BW0 2B1 1BW1 2W1"))


def parted(pp: int) -> list[str]:
    """What ranks hear where one has another plan than the others, or records alone; and a step after it."""
    scale, heard = [1.0], []
    f = vfn.grad(vfn.pipeline(lambda ws, x, y: chain(ws, x * scale[0], y), "pp", microbatches=PARTS, cuts=[0, 1, 2]))
    params = vfn.shard(matrices(4), vfn.make_mesh((4,), ("pp",)), P())
    alone = pp == 1
    for rows, k in (
        (12, 1),
        (6, 1),
        (12 if pp else 6, 1),
        (9 if pp else 6, 1),
        (12, 2 if alone else 1),
        (10 + 2 * alone, 1),
    ):
        scale[0] = float(k)
        try:
            f(params, X[:rows], Y[:rows])
        except vfn.errors.VfnError as error:
            heard.append(str(error))
    scale[0] = 1.0
    f(params, X, Y)
    return heard


def planned_step():
    """Updates in a plan, and as written; and what each kind of collective of the plan carries."""
    mesh = vfn.make_mesh((2, 2), ("pp", "dp"))
    batch = vfn.shard((X, Y), mesh, P("dp"))
    piped = vfn.pipeline(layered, "pp", microbatches=2, cuts=[1], schedule="auto")  # which `specs` finds
    with vfn.use_mesh(mesh):
        params = vfn.shard(LAYERS, mesh, piped.specs(vfn.eval_shape(lambda: LAYERS), *batch))
    opt = vfn.optim.adamw(1e-2)

    def step(params, state, batch):
        value, grads = vfn.value_and_grad(piped)(params, *batch)
        updates, state = opt.update(grads, state, params)
        return value, vfn.optim.apply_updates(params, updates), state

    found, jitted = [], vfn.jit(step, donate_argnums=(0, 1))
    for run in (step, jitted):
        given, state = (
            vfn.with_sharding(vfn.tree.map(torch.clone, params), vfn.tree.map(vfn.spec_of, params)),
            opt.init(params),
        )
        for _ in range(2):
            value, given, state = run(given, state, batch)
        found.append(vfn.unshard((value, given, state)))
    sent = [(node.target.kind, node.target.axes) for node in collectives(jitted.lower(params, state, batch).graph)]
    return found, jitted.cache_info().hits, sent


def parted_plan(rank: int) -> list[str]:
    """What ranks hear in each call where one of them has recorded another step into its plan."""
    params, heard = vfn.shard(matrices(2), vfn.make_mesh((2, 2), ("pp", "dp")), P()), []
    piped = vfn.pipeline(lambda ws, x, y: chain(ws, x * (1 + rank // 3), y), "pp", microbatches=PARTS)
    step = vfn.jit(vfn.grad(lambda ws, x, y: piped(ws, x, y)))
    for _ in range(2):
        with pytest.raises(vfn.errors.DivergenceError) as error:
            step(params, X, Y)
        heard.append(str(error.value))
    return heard


def cut_by_times_of_its_own(rank: int):
    """The cuts that ranks choose together, each of which predicts other times, or memory, as of blocks of another size; and
    gradients."""
    mesh = vfn.make_mesh((2, 2), ("pp", "dp"))
    piped = vfn.pipeline(chain, "pp", microbatches=PARTS)
    params, batch = vfn.shard(matrices(4), mesh, P()), vfn.shard((X, Y), mesh, P("dp"))
    predicted, mine = cut_choice._numbers_of, [9.0 if i == 3 * (rank % 2) else 1.0 for i in range(5)] + [0.0] * 25
    cut_choice._numbers_of = lambda step, stages: mine
    grads = vfn.unshard(vfn.grad(piped)(params, *batch))
    # the mesh of the other axis is made in the recording
    mesh = vfn.make_mesh((2, 2), ("pp", "data"))
    params, batch = vfn.shard(matrices(4), mesh, P()), vfn.shard((X, Y), mesh, P("data"))
    said = r"ranks do not cut or run chain alike\n  \* rank 0: the cuts \[0"
    with warnings.catch_warnings(action="ignore"):  # what is around the step differs, too
        with pytest.raises(vfn.errors.DivergenceError, match=said):
            vfn.jit(vfn.grad(vfn.pipeline(chain, "pp", microbatches=PARTS)))(params, *batch)
    cut_choice._numbers_of, peaks = predicted, Staged._peaks
    more = lambda stages: 1 << 20 if rank % 2 and 2 not in stages.behind else 0
    Staged._peaks = lambda self, how, stages: [x + more(stages) for x in peaks(self, how, stages)]
    bound = vfn.pipeline(chain, "pp", microbatches=PARTS, memory="1 MiB")
    of_bound = vfn.unshard(vfn.grad(bound)(params, *batch))
    Staged._peaks = peaks
    return [[*next(iter(one._plans.values())).stages.behind] for one in (piped, bound)], grads, of_bound


def skipping(sends: list):
    """Values of several dtypes in one message; whose sends are noted."""
    sent, torch_internals.sent = torch_internals.sent, lambda *of: sends.append(of) or sent(*of)
    piped = vfn.pipeline(skips, "pp", microbatches=PARTS, cuts=[0, 1, 2])
    params = vfn.shard(matrices(4), mesh := vfn.make_mesh((4,), ("pp",)), P())
    found = vfn.unshard(vfn.value_and_grad(piped)(params, X, Y))
    torch_internals.sent = sent
    messages = next(iter(piped._plans.values())).stages.messages
    assert len(sends) == PARTS * sum(source == mesh.get_coordinate()[0] for _, source, *_ in messages)
    return found


def test_values_that_travel_together_lie_as_they_lay() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    turned = torch.complex(x, x + 1).conj()
    every = [
        *(x, x.mT, x[:, :, 1:3], x[:1].expand(5, 3, 4), x[:0], turned, turned.imag, turned.mT, x.bool(), x[0, 0, 1]),
        *(x.to(dtype) for dtype in (torch.int16, torch.uint32, torch.bfloat16, torch.float8_e5m2)),
    ]
    for values in ([*every], *([one] for one in every)):
        sender, receiver = (Parcel([Lies.of(one) for one in values]) for _ in range(2))
        sent, arrived = sender.packed(values), receiver.room()
        assert len(sent) == len(arrived) == (values[0].numel() > 0)
        for given, room in zip(sent, arrived):
            assert given.is_contiguous()
            room.copy_(given.reshape(room.shape))
        found = receiver.unpacked(arrived)
        assert [Lies.of(one) for one in found] == [Lies.of(one) for one in values]
        assert all(torch.equal(one.float(), other.float()) for one, other in zip(found, values) if not one.is_complex())
        assert all(torch.equal(one, other) for one, other in zip(found, values) if one.is_complex())


def on_a_rank():
    return (
        skipping([]),
        [piped_step("fsdp"), piped_step("tp", V), piped_step("four stages", "gpipe")],
        tied_step()[1],
        parted(dist.get_rank()),
        planned_step(),
        parted_plan(dist.get_rank()),
        cut_by_times_of_its_own(dist.get_rank()),
    )


def test_stages_on_real_ranks(gloo) -> None:
    wanted = [wanted_step(name) for name in ("fsdp", "tp", "four stages")]
    with vfn.simulate(4):
        of_plan, *_ = planned_step()[0]
    for skipped, found, of_tied, heard, (in_plan, hits, sent), apart, (cuts, *found_grads) in gloo(4, on_a_rank):
        assert all(same(skipped, vfn.optim.microbatches(vfn.value_and_grad(skips), PARTS)(matrices(4), X, Y)))
        assert all(same(in_plan, [of_plan, of_plan]))
        assert hits == 1
        # of a stage's gradients one reduction, with the loss in it, and a loss for all
        assert sent == [("all_reduce", ("dp",)), ("broadcast", ("pp",))]
        assert all("ranks along 'pp' recorded different calls" in error for error in apart)
        assert len(heard) == 4
        assert re.search(
            "not here\n  . pipeline: the batch has no 3 equal parts$|10 rows are no multiple of 3", heard[-1]
        )
        for error, shown in zip(heard, ("(4, 4)", "(3, 4)", "2.0")):
            assert "ranks along 'pp' recorded different calls for <lambda>; the first that differs" in error
            assert error.splitlines()[2].startswith("  * rank 1: ")
            assert shown in error.splitlines()[2]
        assert all(same(found, wanted))
        check_tied(of_tied)
        assert cuts == [[1], [2]]
        for grads in found_grads:
            torch.testing.assert_close(grads, vfn.grad(chain)(matrices(4), X, Y))


def test_a_step_behind_one_that_failed_says_so_before_ranks_compare(monkeypatch) -> None:
    """They cannot: the others wait in the step that failed."""
    runs = []
    with vfn.simulate(2):
        params = vfn.shard(matrices(2), mesh := vfn.make_mesh((2,), ("pp",)), P())
        step = vfn.grad(vfn.pipeline(lambda *args: runs.append(args) or chain(*args), "pp", microbatches=PARTS))
        monkeypatch.setattr(pipelined._along(mesh, "pp", pipelined._world()), "_is_running", True)
        with pytest.raises(vfn.errors.VfnError, match="an earlier step failed on this rank"):
            step(params, X, Y)
    assert not runs


def test_a_model_of_the_recipes_in_stages() -> None:
    """With embeddings that are the head, dropout and layouts of its own on the other axes."""
    config = gpt.Config(vocab=32, context=8, dim=16, heads=2, layers=4, hidden=32, dropout=0.1)
    on_mesh, key = models.laid_out(config, parallel("fsdp+tp")), vfn.random.key(3)
    params, batch = gpt.init(key, config, torch.float64), models.random_batch(key, config, 8, 8)
    wanted = vfn.optim.microbatches(vfn.value_and_grad(lambda p, b, k: gpt.loss(p, b, config, k)), 2)(
        params, batch, key
    )
    with vfn.simulate(8):
        mesh = vfn.make_mesh((2, 2, 2), ("dp", "pp", "tp"))
        base = on_mesh.layout.specs(params, gpt.NAMES, mesh["dp", "tp"]).params
        piped = vfn.pipeline(lambda p, b, k: gpt.loss(p, b, on_mesh, k), "pp", microbatches=2, schedule="zbv")
        batch = vfn.shard(batch, mesh, P("dp"))
        placed = vfn.shard(params, mesh, piped.specs(params, batch, key, base=base))
        found = vfn.unshard(vfn.value_and_grad(piped)(placed, batch, key))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
