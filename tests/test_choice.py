"""A chosen layout of a step, carried out: values, dtypes and layouts as on one device, whatever the layout."""

import functools
import itertools
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sampled_layouts import fault, faults_on_ranks
from whole import some

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.arrays import decide, interpreter
from vescale_fn._core.arrays.layout_solver import solved
from vescale_fn.choice.agreed import digest
from vescale_fn.choice.apply import applied
from vescale_fn.choice.apply_calls import operands
from vescale_fn.choice.choice import ChosenLayout
from vescale_fn.choice.moves import LinesToWrite
from vescale_fn.choice.recording import record
from vescale_fn.choice.rules_text import given, rules_of
from vescale_fn.choice.search.best import NothingFits
from vescale_fn.choice.search.described import described
from vescale_fn.choice.search.highs import Deadline
from vescale_fn.choice.search.layouts import CallLayout, Layouts
from vescale_fn.choice.search.moves import Moves
from vescale_fn.choice.search.options import NONE, PARTIAL
from vescale_fn.choice.search.search import search
from vescale_fn.choice.search.structure import structure
from vescale_fn.choice.verified import Verified, priced_as, verified
from vescale_fn.choice.written import MoveToWrite, WrittenStep

AXES = {"dp": 2, "tp": 2}


def test_sampled_layouts():
    """Arguments, calls and results lie anyhow, over axes in any order, uneven and empty blocks among them. (Of 2:36 two equal
    gathers become one, of which each rank takes its part.)"""
    for name in ("2:36", *(f"1:{i}" for i in range(some(4, 40)))):
        with vfn.simulate(8):
            assert not fault(name), name


def step(w, x, lr):
    loss, gradient = vfn.value_and_grad(lambda w: torch.tanh(x @ w).square().mean())(w)
    return loss, w - lr * gradient


W, X = torch.randn(6, 4, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)


@functools.cache
def recorded():  # not while tests are collected: on CUDA builds of torch no process is forked after a backward pass
    return record(step, W, X, 0.5)


LAYOUTS = Layouts(
    AXES,
    (P(None, "tp"), P("dp"), None),
    {
        "mm_default": CallLayout((P("dp"), P(None, "tp")), (P("dp", "tp"),)),
        "mul_tensor_1": CallLayout(
            (P(None, "tp", unreduced={"dp"}),), (P(None, "tp", unreduced={"dp"}),)
        ),  # by a float
    },
    (P(), P(None, "tp")),
)


def test_a_layout_that_keeps_what_it_gathers_is_another_one():
    kept = replace(LAYOUTS, keeps=not LAYOUTS.keeps)
    assert digest([LAYOUTS]) != digest([kept])  # of which ranks would gather at other times


def test_equal_calls_are_decided_once(monkeypatch):
    decided = []
    ask = lambda func, args, *rest: (decided.append(func), decide.decide_as(func, args, *rest))[1]
    monkeypatch.setattr(interpreter, "decide_as", ask)

    def deep(ws, x):
        return functools.reduce(lambda x, w: torch.tanh(x @ w), ws, x)

    for layers, new in ((2, 2), (5, 0)):
        shapes = [vfn.ShapeDtype((24, 24), torch.float32)] * layers, vfn.ShapeDtype((48, 24), torch.float32)
        recorded = record(deep, *shapes)
        split = {"mm": CallLayout((P("dp"), P()), (P("dp"),)), "tanh": CallLayout((P("dp"),), (P("dp"),))}
        stated = {node.name: split[node.name.partition("_")[0]] for node in recorded.about.calls}
        layouts = Layouts(AXES, (*[P()] * layers, P("dp")), stated, (P("dp"),))
        priced_as(recorded, layouts, vfn.hardware.cpu(4))
        assert len(decided) == new, decided
        decided.clear()


def shard(x, spec):
    return vfn.shard(x, vfn.current_mesh(), spec)


def test_a_plan_of_a_layout_replays_with_other_values_and_may_use_its_arguments_up():
    with vfn.simulate(4), vfn.use_mesh(vfn.make_mesh((2, 2), tuple(AXES))):
        chosen = applied(recorded(), LAYOUTS)
        fast = vfn.jit(chosen, donate_argnums=0)
        w, x = shard(W, P(None, "tp")), shard(X, P("dp"))
        with vfn.comm_log() as log:
            chosen(w, x, 0.5)
        assert [(one.op, one.axis, one.line.rpartition("/")[2][:14]) for one in log][:1] == [
            ("all_reduce", "dp,tp", "test_choice.py")
        ]
        for rate in (0.5, 0.25):
            wanted = step(W, X, rate)
            found = fast(shard(W, P(None, "tp")), x, rate)
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(vfn.unshard(a), b, rtol=1e-12, atol=1e-12)
        assert fast.cache_info().records == 1
        assert vfn.spec_of(found[1]) == P(None, "tp")
        with pytest.raises(vfn.errors.DonationError):
            given_up = shard(W, P(None, "tp"))
            fast(given_up, x, 0.5)
            given_up + 1


def other_layout(**changes):
    calls = {"mm_default": CallLayout((P("tp"), P(None, "tp")), (P("tp", "tp"),))}
    return Layouts(AXES, LAYOUTS.inputs, changes.get("calls", calls), LAYOUTS.outputs)


REFUSED = {
    "another shape": (lambda: applied(recorded(), LAYOUTS)(W, X[:4], 0.5), "x was f64[8,6] and is f64[4,6]"),
    "another dtype": (lambda: applied(recorded(), LAYOUTS)(W.float(), X, 0.5), "w was f64[6,4] and is f32[6,4]"),
    "another tree": (lambda: applied(recorded(), LAYOUTS)([W], X, 0.5), "the arguments' trees differ"),
    "a float of another kind": (lambda: applied(recorded(), LAYOUTS)(W, X, -0.5), "lr was float and is float"),
    "lies otherwise": (
        lambda: applied(recorded(), LAYOUTS)(shard(W, P("dp")), X, 0.5),
        "w is f64[6@dp,4] on the mesh (dp=2, tp=2), the layout says P(None, 'tp')",
    ),
    "a gradient through it": (
        lambda: vfn.grad(lambda w: applied(recorded(), LAYOUTS)(w, X, 0.5)[0])(shard(W, P(None, "tp"))),
        "arguments require gradients, which a recorded step does not follow",
    ),
    "a map over it": (
        lambda: vfn.vmap(lambda w: applied(recorded(), LAYOUTS)(w, X, 0.5)[0])(W[None]),
        "a chosen layout is of a whole step: it runs under no transform",
    ),
    "an axis twice": (lambda: applied(recorded(), other_layout())(W, X, 0.5), "mm_default: P('tp', 'tp')"),
    "dims that go together": (
        lambda: applied(
            recorded(), other_layout(calls={"mm_default": CallLayout((P(None, "dp"), P("tp")), (P(unreduced={"tp"}),))})
        )(W, X, 0.5),
        "mm_default: mm(f64[8,6@dp], f64[6@tp,4]) -> f64[8,4]{U:tp}: dims that it goes through together are split as",
    ),
    "not linear": (
        lambda: applied(
            recorded(),
            other_layout(calls={"tanh_default": CallLayout((P(unreduced={"tp"}),), (P(unreduced={"tp"}),))}),
        )(W, X, 0.5),
        "it is not linear in what is to lie as P(unreduced={'tp'})",
    ),
    "too few specs": (
        lambda: applied(recorded(), other_layout(calls={"mm_default": CallLayout((P(),), (P(),))})),
        "calls['mm_default'].ins: 1 specs for 2",
    ),
    "no such call": (
        lambda: applied(recorded(), other_layout(calls={"nn": CallLayout((P(),), (P(),))})),
        "calls['nn']: the recording has no such call",
    ),
    "a branch": (lambda: record(lambda x: x if (x.long() > 0).all() else -x, X), "a truth value in Python"),
    "a loop": (
        lambda: record(lambda x: vfn.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x), X),
        "a value is read in Python",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_out_is_refused_by_name(name):
    call, words = REFUSED[name]
    with vfn.simulate(4), vfn.use_mesh(vfn.make_mesh((2, 2), tuple(AXES))):
        with pytest.raises(vfn.errors.VfnError) as error:
            call()
    assert words in str(error.value)


def test_rules_give_exactly_the_specs():
    lie = {"attention.q": P(None, "tp"), "attention.out": P("tp"), "norm": P(), "mlp.up": P(None, "tp")}
    specs = {f"blocks.{i}.{name}": spec for i in range(12) for name, spec in lie.items()}
    specs |= {"embed": P("tp"), "blocks.0.mlp.up": P("dp"), "seq": P("dp", "tp")}
    rules = rules_of(specs)
    assert rules == [
        (r"^blocks\.0\.mlp\.up$", P("dp")),
        (r"\b(q|up)$", P(None, "tp")),
        (r"(out|embed)$", P("tp")),
        (r"seq$", P("dp", "tp")),
        (".*", P()),
    ]
    assert given(rules, specs) == specs


def voted(recorded, axes, inputs, stated, outputs):
    """The layouts that the rules' votes come to, with arguments of some calls stated."""
    lies, chosen = dict(zip(recorded.placeholders, inputs)), {}
    for one in described(recorded.graph):
        if not one.is_input:
            ins = stated.get(one.node.name) or [lies[x] for x in operands(one.node)]
            found = solved(one.rule, list(zip(ins, one.shapes)), [tuple(x.shape) for x in one.outs], axes, ())
            chosen[one.node.name] = CallLayout(tuple(found.targets), tuple(found.outs))
            lies[one.node] = found.outs[0]
    return Layouts(axes, inputs, chosen, outputs)


def two_products(p, x, y, down=lambda w: w, out=lambda y: y):
    h = torch.relu(x @ p["up"])
    return (out(h @ down(p["down"])) - y).square().mean()


def updated(**moved):
    def step(p, x, y):
        loss, gradient = vfn.value_and_grad(lambda p: two_products(p, x, y, **moved))(p)
        return loss, vfn.tree.map(lambda p, g: p - 0.1 * g, p, gradient)

    return step


D, COLUMNS = P("d"), P(None, "d")
WRITTEN = {
    "gathered weights": (
        None,
        {},
        (D, D, D, D),
        {name: [D, P()] for name in ("mm_default", "mm_default_1", "mm_default_3")}
        | {"mul_tensor_1": [D], "mul_tensor_2": [D]},
        (P(), D, D),
    ),
    "a split sequence": (
        ("sub", False, 0, P(unreduced={"d"}), D),
        {"out": lambda y: vfn.with_sharding(y, D)},
        (D, COLUMNS, P(), D),
        {"sub_tensor": [D, D], "mm_default_2": [D, P()], "mm_default_3": [P(), COLUMNS]},
        (P(), D, COLUMNS),
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_with_its_moves_written_a_step_communicates_as_in_the_layout(name):
    said, moved, inputs, stated, outputs = WRITTEN[name]
    randn = lambda *shape: torch.randn(shape, dtype=torch.float64)
    args = {"down": randn(32, 16), "up": randn(16, 32)}, randn(64, 16), randn(64, 16)
    recorded = record(updated(), *args)
    layouts = voted(recorded, {"d": 4}, inputs, stated, outputs)
    with vfn.simulate(4):
        mesh = vfn.make_mesh(4, "d")
        given = vfn.shard(args, mesh, ({"down": inputs[0], "up": inputs[1]}, *inputs[2:]))
        (finder := LinesToWrite(recorded, layouts, all_moves=bool(said))).run(*given)
        lines = finder.lines()
        assert [(one.op, one.gives, one.number, one.lies, one.spec) for one in lines] == ([said] if said else [])
        logs, pasted = [], WrittenStep(recorded, lines, layouts)
        for f in (applied(recorded, layouts), pasted, updated(**moved), updated()):  # the third is written by hand
            with vfn.comm_log() as log:
                f(*given)
            logs.append({op: log.bytes(op) for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")})
    assert logs[0] == logs[1] == logs[2]
    assert (logs[0] != logs[3]) == bool(said)


def by_policy(reduce="f32", **moved):
    policy = vfn.precision.policy(f"params=f32,compute=bf16,reduce={reduce},output=f32")

    def step(p, x, y):
        loss = lambda p, x, y: two_products(p, x, y, **moved)
        loss, gradient = vfn.value_and_grad(policy.apply(loss))(p, x, y)
        return loss, vfn.tree.map(lambda p, g: p - g, p, gradient)

    return step


CASTS = "_to_copy_default_6", "_to_copy_default_7"  # of gradients, which are partial sums
SUMMED = {  # the lines that say so, arguments, calls that read sums, results
    "gradients": ({}, (P(), P(), D, D), {name: [P()] for name in CASTS}, (P(), P(), P())),
    "parts of gradients": (
        {},
        (D, D, D, D),
        {f"mm_default{x}": [D, P()] for x in ("", "_1", "_3")} | {name: [D] for name in CASTS},
        (P(), D, D),
    ),
    "activations": (
        {"out": lambda y: vfn.with_sharding(y, P())},
        (D, COLUMNS, P(), P()),
        {"sub_tensor": [P(), P()]},
        (P(), D, COLUMNS),
    ),
}


def sums(log):
    """How many bytes are added up in each dtype, and how; several values may be one collective."""
    found = Counter[str]()
    for one in log:
        if one.op in ("all_reduce", "reduce_scatter"):
            found[f"{one.op} {one.dtype}"] += one.bytes
    return found


def wrong_sums():
    """The layouts whose sums are not made as in a step that says so itself, or come to something else."""
    torch.manual_seed(5)
    args, wrong = ({"down": torch.randn(32, 16), "up": torch.randn(16, 32)}, *torch.randn(2, 64, 16)), {}
    for (name, (moved, inputs, stated, outputs)), reduce in itertools.product(SUMMED.items(), ("f32", "bf16")):
        recorded = record(by_policy(reduce), *args)
        layouts, found = voted(recorded, {"d": 4}, inputs, stated, outputs), []
        mesh = vfn.make_mesh(4, "d")
        given = vfn.shard(args, mesh, ({"down": inputs[0], "up": inputs[1]}, *inputs[2:]))
        for f in (applied(recorded, layouts), by_policy(reduce, **moved)):
            with vfn.comm_log() as log:
                out = f(*given)
            found.append((sums(log), vfn.tree.leaves(vfn.unshard(out))))
        (chosen, a), (written, b) = found
        same = all(map(torch.equal, a, b)) and chosen == written
        if reduce == "f32" and not same or reduce == "bf16" and not any("bf16" in how for how in chosen):
            wrong[name, reduce] = chosen, written, [(x - y).abs().max().item() for x, y in zip(a, b)]
    return wrong


def test_sums_are_made_in_the_dtype_of_a_policy():
    with vfn.simulate(4):
        assert not wrong_sums()


def test_a_search_counts_sums_in_the_dtype_of_a_policy():
    S, moves = vfn.ShapeDtype, Moves({"d": 4}, vfn.hardware.h100())
    rows = S((64, 16), torch.float32)
    args = {"down": S((32, 16), rows.dtype), "up": S((16, 32), rows.dtype)}, rows, rows
    for reduce, nbytes in (("f32", 4), ("bf16", 2)):
        found = structure(record(by_policy(reduce), *args), {})
        products = {site for n, site in found.number.items() if found.reps[n].name == "mm"}
        sizes = {one.itemsizes for one in found.readers if one.site in products}
        assert sizes == {(2, nbytes)}
        sent = lambda lies, sizes=sizes: moves((64,), *min(sizes), *lies).steps[0][2]
        assert sent(((PARTIAL,), (0,))) == sent(((PARTIAL,), (NONE,))) == 64 * nbytes
        assert sent(((0,), (NONE,))) == 16 * 2  # a gather


def on_ranks(names):
    return faults_on_ranks(names), wrong_sums()


def test_sampled_layouts_and_sums_on_real_ranks(gloo):
    assert gloo(4, on_ranks, [f"3:{i}" for i in range(some(3, 12))]) == [({}, {})] * 4


def blocks(p, x, y):
    for layer in p["blocks"]:
        x = x + torch.relu(x @ layer["up"]) @ layer["down"]
    return (x - y).square().mean()


def trained(p, x, y, rate):
    loss, gradient = vfn.value_and_grad(blocks)(p, x, y)
    return loss, vfn.tree.map(lambda p, g: p - rate * g, p, gradient)


@pytest.fixture(scope="module")
def choice():
    shape = lambda *sizes: vfn.ShapeDtype(sizes, torch.float32)
    params = {"blocks": [{"up": shape(1024, 4096), "down": shape(4096, 1024)} for _ in range(2)]}
    recorded = record(trained, params, shape(4096, 1024), shape(4096, 1024), 0.1)
    hardware, mesh = vfn.hardware.h100(1), {"tp": 4}
    again = lambda on, given: search(recorded, on, hardware, fixed=given, candidates=1)[0]
    solve = functools.partial(search, recorded, mesh, hardware, candidates=2)
    return ChosenLayout(recorded, verified(recorded, hardware, None, solve), hardware, None, again)


def ways_of(choice, *seconds):
    """Ways to write the step, with no lines, one, two, ..., that take so long; a tensor of each line lies otherwise."""
    one = choice.ranked[0]
    said = lambda i: MoveToWrite("a.py:1", "matmul", False, i, (4, 4), torch.float32, P(), P("tp"))
    steps = [WrittenStep(choice.recorded, [said(i) for i in range(n)], one.layouts) for n in range(len(seconds))]
    return [replace(one, step=step, price=SimpleNamespace(seconds=x, peak=0)) for step, x in zip(steps, seconds)]


@pytest.mark.parametrize(
    ("seconds", "answer"), [((2.0, 1.001, 1.0), 1), ((1.004, 1.0, 1.0), 0), ((9.0, 2.001, 2.0), None)]
)
def test_the_answer_is_written_with_the_fewest_lines_that_are_as_fast(choice, monkeypatch, seconds, answer):
    ways, module = ways_of(choice, *seconds), sys.modules["vescale_fn.choice.as_written"]
    monkeypatch.setattr(module, "priced_ways", lambda *_, **__: ways)
    one = replace(choice.ranked[0], price=SimpleNamespace(seconds=1.0, peak=0))
    best = module.as_written(choice.recorded, one, choice.hardware, None)
    assert best.step is (None if answer is None else ways[answer].step)
    assert len(choice.of([best]).moves) == (1 if answer is None else answer)
    assert choice.of([best]).written is ways[1 if answer is None else answer].price


def test_where_a_step_is_not_written_the_choice_says_why(choice, monkeypatch):
    module, one = sys.modules["vescale_fn.choice.as_written"], choice.ranked[0]
    of = lambda recorded, one=one: module.as_written(recorded, one, choice.hardware, None)
    said = lambda best: repr(choice.of([best])).rpartition("\n  not as it would be written: ")[2]

    def raises(*_):
        raise KeyError("a table")

    once = of(replace(choice.recorded, f=raises))
    assert once.step is None
    assert said(once) == "KeyError: 'a table'"
    with pytest.raises(vfn.errors.TransformError, match="trained does not run as it would be written\n.*KeyError"):
        _ = ChosenLayout(replace(choice.recorded, f=raises), [one], choice.hardware).moves
    assert said(of(choice.recorded, replace(one, memory=9))).startswith("its plan is held to the memory; choice.moves")
    monkeypatch.setattr(module, "_CALLS", 10)
    assert re.match(
        r"trained has \d\d calls, more than 10; choice.moves looks for the lines", said(of(choice.recorded))
    )
    assert choice.of([one]).written.seconds <= choice.pasted.seconds
    monkeypatch.setattr(module, "laid_out", None)  # a fault of this library is none of the step's
    with pytest.raises(TypeError, match="NoneType"):
        _ = choice.of([one]).moves


def test_a_written_step_lays_its_results_out_and_takes_what_it_was_recorded_for_alone():
    def step(x):
        return 2 * x

    recorded = record(step, x := torch.randn(8, 4))
    layouts = Layouts({"d": 2}, (P("d"),), {}, (P(None, "d"),))
    with vfn.simulate(2):
        given = vfn.shard(x, vfn.make_mesh(2, "d"), P("d"))
        found = (finder := LinesToWrite(recorded, layouts)).run(given)
        (line,) = finder.lines()
        written = WrittenStep(recorded, [line], layouts)
        assert (line.op, line.lies, line.spec) == ("return", P("d"), P(None, "d"))
        for new in (found, written(given)):
            assert vfn.spec_of(new) == P(None, "d")
            assert torch.equal(vfn.unshard(new), 2 * x)
        with pytest.raises(vfn.errors.SpecError, match=r"x was f32\[8,4\] and is f32\[8@d,2\]"):
            written(given[:, :2])


def scanned(p, x):
    return vfn.scan(lambda x, w: (x @ w, None), x, p)[0].sum()


def test_a_step_that_does_not_run_by_the_rules_alone_says_so_and_is_written_with_the_line_that_it_needs():
    shapes = vfn.ShapeDtype((3, 512, 512), torch.float32), vfn.ShapeDtype((64, 512), torch.float32)
    chosen = vfn.auto(scanned, *shapes, mesh={"tp": 2}, fixed=(P(None, None, "tp"), P()), hardware="h100", candidates=1)
    with pytest.raises(vfn.errors.TransformError, match="scanned does not run with the rules alone\n.*scan: the carry"):
        _ = chosen.pasted
    (line,) = chosen.moves
    assert (line.op, line.number, line.shape, line.lies) == ("matmul", 1, (512, 512), P(None, "tp"))
    by_hand = lambda p, x: vfn.scan(lambda x, w: (x @ vfn.with_sharding(w, line.spec), None), x, p)[0].sum()
    own = vfn.price(by_hand, *shapes, specs=chosen.specs, mesh={"tp": 2}, hardware="h100")
    assert (chosen.written.seconds, chosen.written.bytes) == (own.seconds, own.bytes)


def test_ranks_tell_ways_with_as_many_lines_apart(choice, monkeypatch):
    module = sys.modules["vescale_fn.choice.agreed"]
    one, other = (ways_of(choice, 1.0, 1.0)[1] for _ in range(2))
    other.step.lines = tuple(replace(line, spec=P(None, "tp")) for line in one.step.lines)
    monkeypatch.setattr(module, "ways", lambda *_: [one.step, other.step])
    found = choice.of([one])
    said = module._as_written(found, other)
    assert module._like(found, other.name, other.layouts, None, said).step is other.step
    with pytest.raises(vfn.errors.DivergenceError, match="lines that this rank does not come to"):
        module._like(found, other.name, other.layouts, None, (None, "another"))


def test_a_choice_says_what_it_costs_and_runs(choice):
    specs = choice.specs
    assert vfn.spec_from_rules(choice.recorded.call.args[0], choice.rules()) == specs[0]
    assert choice.predicted.seconds <= choice.others[0].predicted.seconds
    both = choice.compare(replicated=(P(), P(), P(), None), chosen=choice.predicted)
    assert [one.name for one in both] == ["this", "replicated", "chosen"]
    assert both[0].seconds == both[2].seconds < both[1].seconds
    own = vfn.price(trained, *choice.recorded.call.args, specs=choice.specs, mesh={"tp": 4}, hardware=choice.hardware)
    assert (choice.pasted.seconds, choice.pasted.bytes, choice.pasted.peak) == (own.seconds, own.bytes, own.peak)
    assert "<table " in choice._repr_html_()
    assert choice.memory().peak == choice.predicted.peak
    with vfn.simulate(4):
        mesh = choice.mesh()
        small = choice.jit(donate_argnums=0)
        with pytest.raises(vfn.errors.SpecError, match="the layout was chosen for trained of other arguments"):
            small(*vfn.shard(({"blocks": []}, torch.ones(4, 4), torch.ones(4, 4)), mesh, P()), 0.1)


def test_explain_names_the_other_ways_and_their_costs(choice):
    blocks = choice.explain("blocks.0.up"), choice.explain(r"up$")
    assert [text.splitlines()[0].partition(":")[0] for text in blocks] == [
        "blocks.0.up",
        "blocks.0.up and 1 more like it",
    ]
    head, *rows = [
        re.split("  +", line.strip()) for line in blocks[1].splitlines() if not line.startswith(("  used", "b"))
    ]
    assert head == ["instead", "a step", "computing", "communication", "memory"]
    assert {row[0] for row in rows} | {repr(choice.specs[0]["blocks"][0]["up"])} == {"P()", "P('tp')", "P(None, 'tp')"}
    assert all(row[1].startswith("+") or row[1] == "0" for row in rows)
    assert choice.explain("x").startswith("x: f32[4096,1024]")
    assert choice.explain("p.blocks.0.up") == blocks[0]
    line = next(node.meta["line"] for node in choice.recorded.graph.nodes if node.name == "mm_default")
    assert "mm(f32[4096" in choice.explain(line.rpartition("/")[2])
    with pytest.raises(
        vfn.errors.SpecError, match=r"path matches 'blocks.0.upp'; did you mean 'blocks.0.up'\?\n  \* there are"
    ):
        choice.explain("blocks.0.upp")
    with pytest.raises(vfn.errors.SpecError, match="of test_choice.py it has lines "):
        choice.explain("test_choice.py:1")


TABLE = """\
trained on mesh (tp=4), 1 node of 8 H100
  predicted 3 ms (compute 2 ms, exposed communication 1 ms), peak 2.00 MiB of 4.00 MiB a rank

  p  '.*'  P(None, 'tp')
  x  P()
  y  P()

     mesh  time            compute  waits for tp        peak
  1  tp=4  3 ms               2 ms          1 ms    2.00 MiB
  2  tp=4  6 ms    +100 %     2 ms          4 ms  5.00 MiB !
     blocks.*.up: P() instead of P(None, 'tp')
     costs +3 ms waiting for tp, +3.00 MiB memory
     ! needs 1.00 MiB more than the 4.00 MiB that there are
  3  tp=4  3 ms  the same     2 ms          1 ms    2.00 MiB
     mine, as given
     y: P('tp') instead of P()"""


def test_the_table_says_in_what_layouts_differ_and_what_that_costs(choice):
    columns, free = P(None, "tp"), {"exposed": 1e-3, "exposed_by_axis": {"tp": 1e-3}, "compute": 2e-3, "lines": ()}
    lie = lambda up, y: replace(choice.layouts, calls={}, inputs=(columns, up, columns, up, P(), y, None))
    cost = lambda **more: replace(choice.predicted, **{**free, "peak": 2 << 20, **more})
    slow = cost(exposed=4e-3, exposed_by_axis={"tp": 4e-3}, peak=5 << 20)
    ranked = [
        Verified(lie(columns, P()), None, cost(), True),
        Verified(lie(P(), P()), None, slow, False),
        Verified(lie(columns, P("tp")), None, cost(), True, "mine"),
    ]
    table = ChosenLayout(choice.recorded, ranked, choice.hardware, 4 << 20)
    assert repr(table) == TABLE
    alone = repr(ChosenLayout(choice.recorded, ranked[:1], choice.hardware, 4 << 20))
    assert alone == TABLE.partition("     mesh")[0] + "  no other layout was priced"


def test_a_timeline_shows_what_computes_and_what_travels(choice, tmp_path):
    slow = choice.others[0]
    times = slow.timeline()
    assert sum(one.end - one.begin for one in times.streams["compute"]) == pytest.approx(slow.predicted.seconds)
    waits = [one for one in times.streams["compute"] if one.name == "waiting for tp"]
    assert sum(one.end - one.begin for one in waits) == pytest.approx(slow.predicted.exposed_by_axis["tp"])
    assert slow.predicted.exposed == pytest.approx(sum(slow.predicted.exposed_by_axis.values()))
    assert waits
    assert [row.partition("|")[0].strip() for row in repr(times).splitlines()[1:3]] == ["compute", "tp"]
    assert times.html().count("<title>") >= len(times.streams)
    times.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(one["ph"] == "X" for one in events) == len(times.events)


def test_a_plan_that_needs_too_much_is_searched_for_again_with_less(choice):
    recorded, hardware = choice.recorded, choice.hardware
    best = search(recorded, {"tp": 4}, hardware, memory=0.75 * choice.predicted.peak, candidates=1)[0].layouts
    whole = replace(
        best, inputs=tuple(x and P() for x in best.inputs), calls={}, outputs=tuple(x and P() for x in best.outputs)
    )
    split, bounds = SimpleNamespace(layouts=best, bytes=1 << 40), []
    budget = priced_as(recorded, best, hardware).peak

    def solve(memory):
        """What is too large without a bound, nothing within the budget by its own prediction, then that again, then what fits."""
        bounds.append(memory)
        if len(bounds) == 2:
            raise NothingFits("nothing fits")
        return [split if len(bounds) > 3 else SimpleNamespace(layouts=whole, bytes=1 << 40)]

    found = verified(recorded, hardware, budget, solve)
    assert [one.fits for one in found] == [True, False]
    assert found[0].layouts is best
    assert bounds[0] is None
    assert bounds[1] == budget < bounds[2]
    assert bounds[3] == pytest.approx(bounds[2] * budget / found[1].price.peak)
    with pytest.raises(NothingFits, match="no plan of trained that was found needs as little as 1.00 MiB"):
        verified(recorded, hardware, 1 << 20, lambda memory: [split])


def test_where_time_is_over_what_was_found_without_a_bound_may_fit(choice):
    recorded, hardware, found = choice.recorded, choice.hardware, choice.layouts
    bounds = []

    def solve(memory):
        bounds.append(memory)
        if memory is not None:
            raise Deadline(2).error()
        return [SimpleNamespace(layouts=found, bytes=1 << 40)]

    (one,) = verified(recorded, hardware, budget := choice.predicted.peak, solve)
    assert one.layouts is found
    assert bounds == [None, budget]
    with pytest.raises(NothingFits, match="the search for others within the memory ended with its time, seconds="):
        verified(recorded, hardware, 1 << 20, solve)
    assert bounds[2:] == [None, 1 << 20]  # nor is it asked again: time would be over again


def test_a_layout_that_cannot_be_carried_out_runs_as_the_rules_vote(choice):
    best = choice.layouts
    name = next(name for name, call in best.calls.items() if name.startswith("relu"))
    wrong = replace(best, calls={**best.calls, name: CallLayout((P("tp"),), (P(None, "tp"),))})
    (found,) = verified(choice.recorded, choice.hardware, None, lambda memory: [SimpleNamespace(layouts=wrong)])
    assert (found.layouts.inputs, found.layouts.calls) == (best.inputs, {})
