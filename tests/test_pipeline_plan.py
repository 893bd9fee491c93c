"""What `piped.plan(...)` says beforehand of a step: the memory of each rank, in numbers and drawn."""

import html
import itertools
import json
import random
import re
import weakref
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
from torch import fx
from whole import WHOLE

import vescale_fn as vfn
from benchmarks.peak_memory import accounting
from vescale_fn import P
from vescale_fn._core import torch_internals
from vescale_fn._core.distributed.collectives import Collective
from vescale_fn.plan import cut_choice
from vescale_fn.plan.cut_choice import CutPieces, balanced, partitions
from vescale_fn.plan.execution.codegen import generate
from vescale_fn.plan.ir import memory_use
from vescale_fn.plan.ir.collective_nodes import noted

PARTS, WIDTH = 8, 16
MESHES = {  # by schedules; under zb-h1 the parameters are split over "dp" as well
    **({"1f1b": ((4,), ("pp",))} if WHOLE else {}),
    "zbv": ((4,), ("pp",)),
    "auto": ((2, 2), ("pp", "dp")),
    "zb-h1": ((2, 2), ("pp", "dp")),
}
COLLECTIVES = [(kind, (dim,)) for kind in ("all_gather", "reduce_scatter") for dim in (0, 1)]
COLLECTIVES += [("all_to_all", (0, 0)), ("all_to_all", (0, 1)), ("all_to_all", (1, 0)), ("all_to_all", (1, 1))]


def layered(params, x):
    for first, second in params:
        x = vfn.cut(torch.tanh(torch.tanh(x @ first) @ second))
    return x.square().mean()


def skipping(params, x):
    """Of which two values go from stage to stage, one of them views of memory that is needed longer than the other."""
    first, *others = params
    h = torch.tanh(x @ first[0])
    x = h @ first[1]
    for one, two in others:
        x, h = vfn.cut((torch.tanh(torch.tanh(x @ one + h) @ two), h))
    return (x.square().mean() + h.square().mean()) / 2


def arguments():
    """Each in memory of its own."""
    of_params, of_batch = vfn.random.split(vfn.random.key(0), 2)
    shapes = [(WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)] * 8
    flat = [vfn.random.normal(key, shape) / WIDTH for key, shape in zip(vfn.random.split(of_params, 16), shapes)]
    return list(zip(flat[::2], flat[1::2])), vfn.random.normal(of_batch, (32 * PARTS, WIDTH))


def laid_out(schedule: str):
    """The pipelined function, and its arguments on a mesh."""
    mesh = vfn.make_mesh(*MESHES[schedule])
    gather, base = ("microbatch", P(None, "dp")) if schedule == "zb-h1" else ("step", None)
    piped = vfn.pipeline(skipping if base else layered, "pp", microbatches=PARTS, schedule=schedule, gather=gather)
    params, x = arguments()
    x = vfn.shard(x, mesh, P("dp") if "dp" in MESHES[schedule][1] else P())
    with vfn.use_mesh(mesh):
        return piped, vfn.shard(params, mesh, piped.specs(params, x, base=base)), x


def counted(schedule: str):
    """What a rank holds at most in a step, counted; and the memory that is predicted of all."""
    piped, *args = laid_out(schedule)
    plan, step = piped.plan(*args), vfn.value_and_grad(piped)
    memory = plan.memory()
    with vfn.comm_log() as log:
        step(*args)
    around = 1
    if schedule == "zb-h1":  # of a plan of which the step is a call
        around = vfn.jit(lambda *args: step(*args)).lower(*args).memory().peak / max(memory.peaks)
    place, sent = args[1].device_mesh.get_coordinate()[0], lambda rows: [r for r in rows if r.op in ("send", "receive")]
    assert sent(log) == sent(plan.comms(place))
    assert log.count("receive", "pp") >= PARTS
    with accounting([torch_internals.local(x) for x in vfn.tree.leaves(args)]) as account:
        step(*args)
    return account.peak, memory.peaks, around


def one_collective(mesh, kind, params):
    """The counted and the predicted peak of a plan that is one collective."""
    collective, graph, x = Collective(kind, mesh, ("dp",), params), fx.Graph(), torch.ones(64, 64)
    given = graph.placeholder("x")
    given.meta["val"] = x
    graph.output((noted(graph.call_function(collective, (given,)), collective.like(x), given),))
    with accounting(x) as account:
        generate(graph).run([x])
    return account.peak, memory_use.memory(graph).peak


def on_a_rank():
    """And whether gloo holds what a collective was given, or gave, when that is over: its memory is free at once."""
    mesh, held = vfn.make_mesh((4,), ("dp",)), 0
    alone = [one_collective(mesh, *of) for of in COLLECTIVES]
    for _ in range(20):
        for kind, params in [("all_reduce", ("sum",)), ("broadcast", (0,)), *COLLECTIVES]:
            if kind == "all_gather":  # gloo makes names of the parts of its result, which its thread holds
                continue
            given = weakref.ref((x := torch.ones(8, 8)).untyped_storage())
            gave = weakref.ref((y := Collective(kind, mesh, ("dp",), params)(x)).untyped_storage())
            del x, y
            held += given() is not None or gave() is not None
    return [counted(schedule) for schedule in MESHES], alone, held


def test_predicted_memory_is_what_ranks_are_counted_to_hold(gloo) -> None:
    """Within 2 %: what is kept, messages (which gloo holds on to until it is waited for), sums, and the means of them; and
    exactly what a collective puts in order of the ranks."""
    found, alone, held = zip(*gloo(4, on_a_rank))
    for i, (name, (shape, _)) in enumerate(MESHES.items()):
        pairs = [(of_rank[i][0], of_rank[i][1][rank * shape[0] // 4]) for rank, of_rank in enumerate(found)]
        assert all(abs(predicted / peak - 1) < 0.02 for peak, predicted in pairs), (name, pairs)
        around = [of_rank[i][2] for of_rank in found]
        assert all(1 <= ratio < 1.3 for ratio in around), (name, around)
    assert all(peak == predicted for of_rank in alone for peak, predicted in of_rank), alone
    assert held == (0,) * 4


def test_memory_in_flight_is_that_of_the_schedule(tmp_path: Path) -> None:
    """A chunk is two hidden values, two outputs, and what arrived; the first stage has the batch instead of that.
    It is drawn below the timeline, and goes to traces."""
    value = 32 * WIDTH * 4
    chunk, first = 7 * value, 6 * value
    wanted = {"1f1b": (4 * first, 3 * chunk, 2 * chunk, chunk), "gpipe": (8 * first, *[8 * chunk] * 3)}
    with vfn.simulate(4):
        mesh, args = vfn.make_mesh((4,), ("pp",)), arguments()
        for schedule, kept in wanted.items():
            with vfn.use_mesh(mesh):
                plan = vfn.pipeline(layered, "pp", microbatches=PARTS, schedule=schedule, cuts=[1, 3, 5]).plan(*args)
            memory = plan.memory()
            most = [max(t.after["kept"] for t in row if "F" in t.task) for row in memory.rows]
            assert all(abs(a - b) <= value for a, b in zip(most, kept, strict=True))
        with vfn.comm_log() as log:
            vfn.pipeline(layered, "pp", microbatches=PARTS)(vfn.shard(args[0], mesh, P()), args[1])
    assert (log.count("send"), log.count("receive"), log.bytes("send")) == (3 * PARTS, 0, 3 * PARTS * value)
    assert log[0].why == "pipeline: F of stage 0 to F of 1, pp=0 to pp=1"
    assert [row[-1].task for row in memory.rows] == ["results"] * 4
    drawings, text = plan.html().split("<pre>")
    timeline, of_memory = (ElementTree.fromstring(one) for one in drawings.split("<br>"))
    assert len(timeline.findall(".//{*}title")) == 4 * 2 * PARTS
    assert len(of_memory.findall(".//{*}polygon")) == 4 * 6
    assert html.unescape(text) == f"{plan}</pre>"
    plan.trace(path := tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    held = [sum(e["args"].values()) for e in events if e["ph"] == "C" and e["pid"] == 3]
    assert held == [sum(moment.after.values()) for moment in memory.rows[3]]


def test_a_plan_on_an_abstract_mesh_is_that_of_ranks() -> None:
    """And of hundreds: the parameters at the places that it says, each rank's shares on the other axes."""
    (params, x), found = arguments(), []
    shapes = lambda mesh, spec: vfn.tree.map(lambda w: vfn.ShapeDtype(w.shape, w.dtype, spec, mesh), (params, x))
    piped = vfn.pipeline(layered, "pp", microbatches=PARTS, cuts=[1, 3, 5])
    with vfn.simulate(4):
        for make in (vfn.make_mesh, vfn.abstract_mesh):
            found.append(piped.plan(*shapes(make((4,), ("pp",)), P())))
    assert found[0] == found[1]
    assert found[0].memory() == found[1].memory()
    assert found[0].comms(2).records == found[1].comms(2).records
    mesh = vfn.abstract_mesh((4, 128), ("pp", "tp"))
    with vfn.use_mesh(mesh):
        specs = piped.specs(vfn.eval_shape(lambda: params), x)
        memory = piped.plan(vfn.eval_shape(lambda: params), x).memory()
    assert [spec[0].at for spec in specs[::2]] == [(("pp", (i,)),) for i in range(4)]
    every = found[0].memory().before[1]["arguments"]  # of parameters that all ranks along pp hold
    assert every - memory.before[1]["arguments"] == 3 * sum(w.nbytes for w in params[0] + params[1])


def test_auto_finds_a_schedule_for_the_stages_that_there_are() -> None:
    """Of what they are predicted to take, or of costs; it has the gradients of any other, and 1F1B's memory in flight."""
    params, x = arguments()
    wanted = vfn.optim.microbatches(vfn.value_and_grad(layered), 4)(params, x)
    measured = vfn.schedules.Costs(F=[1, 1, 1, 3], B=[1, 1, 1, 3], W=[1, 1, 1, 3])
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("pp",))
        placed = vfn.shard(params, mesh, P())
        for costs, stages in ((None, 2), (measured, 4)):
            piped = vfn.pipeline(
                layered, "pp", microbatches=4, schedule="auto", cuts=[1, 3, 5][: stages - 1], costs=costs
            )
            piped.specs(placed, x)  # finds it, too: for a plan
            assert costs is not None or piped._found[2] not in (None, vfn.schedules.one_f_one_b(2, 4))
            assert vfn.tree.leaves(vfn.unshard(vfn.value_and_grad(piped)(placed, x)))[0] == wanted[0]
            plan = piped.plan(placed, x)
            times = plan.costs() if costs is None else costs
            assert (plan.schedule.stages, max(plan.timeline(times).in_flight)) == (stages, stages)
            other = vfn.schedules.zb_h1(2, 4) if costs is None else vfn.schedules.zbv(2, 4)
            assert plan.timeline(times).makespan <= other.simulate(times).makespan


def test_cuts_are_those_with_which_the_schedule_takes_least() -> None:
    """As all partitions compared say: messages count, and what a rank has of several stages; the shortest longest stage is often
    another one, and a descent through many partitions comes near."""
    draw, beaten, near = random.Random(0), 0, []
    cases = [(vfn.schedules.one_f_one_b(3, 4), 7), (vfn.schedules.zb_h1(2, 4), 6), (vfn.schedules.zbv(2, 4), 6)]
    for schedule, n in cases * 6:
        rows = [[draw.choice((1.0, 2.0, 5.0)) for _ in range(n)] for _ in range(3)]
        pieces = CutPieces(*rows, [draw.choice((0.0, 4.0)) for _ in range(n)], [0.0] * n, [0.0] * n)
        makespan = lambda begins, pieces=pieces, schedule=schedule: schedule.simulate(pieces.costs(begins)).makespan
        fits = [set(range(schedule.stages))] * n
        least = min(map(makespan, itertools.combinations(range(1, n), schedule.stages - 1)))
        assert makespan(partitions(pieces, schedule, fits)[0]) <= 1.011 * least
        longest = balanced(list(map(sum, zip(*rows))), schedule.stages)
        beaten += makespan(tuple(sorted(longest))) > 1.011 * least
        with mock.patch.object(cut_choice, "_COMPARED", 0):
            near.append(makespan(partitions(pieces, schedule, fits)[0]) / least)
    assert beaten > 6
    assert sum(near) / len(near) < 1.05
    pieces = CutPieces([1.0] * 4, [1.0] * 4, [1.0] * 4, [0.0, 20.0, 0.0, 0.0], [0.0] * 4, [0.0] * 4)
    assert partitions(pieces, vfn.schedules.one_f_one_b(2, 2), [{0, 1}] * 4)[0] in ((1,), (3,))


def test_cuts_are_within_the_memory_that_there_is() -> None:
    """1F1B's first rank holds more parts than the others: with less memory it has fewer layers. What does not fit says how much
    is missing."""
    args = arguments()
    with vfn.simulate(2), vfn.use_mesh(mesh := vfn.make_mesh((2,), ("pp",))):
        piped = lambda **how: vfn.pipeline(layered, "pp", microbatches=PARTS, **how)
        free = piped().plan(*args)
        most = max(free.memory().peaks)
        for schedule in ("1f1b", "auto"):
            bound = piped(schedule=schedule, memory=most - 1).plan(*args)
            assert max(bound.memory().peaks) < most
            assert bound.stages[0].calls["F"] < free.stages[0].calls["F"]
        specs = piped(memory=f"{most - 1} B").specs(*args)
        lowered = vfn.jit(piped(memory=most)).lower(*vfn.shard(args, mesh, P()))
        evaluated = lowered.memory()  # without gradients less is held
        assert 0 < evaluated.peak - evaluated.arguments < most
        assert [pair[0].at for pair in specs].count((("pp", (0,)),)) < 4
        with pytest.raises(vfn.errors.TransformError, match=r"within memory=50000 on each rank") as error:
            piped(memory=50000).specs(*args)
        assert re.search(r"cuts \[\d\] rank \d needs .*KiB, .*KiB more: the least that was found", str(error.value))
        fitting = int(re.search(r"memory=(\d+); ", str(error.value))[1])
        assert max(piped(memory=fitting).plan(*args).memory().peaks) == fitting
