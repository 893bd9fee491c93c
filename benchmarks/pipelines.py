"""Schedules of pipelines: exactly, and on real processes over gloo whose tasks sleep, beside torch's under the same sleeps.

Ranks send and receive as a schedule says, and a task sleeps for what it costs; what that takes is compared with the simulation.
``--ranks 8`` is with twice as many processes, and has a table of its own. ``--exact`` runs no process: the formulas of the
literature for all sizes up to 16 ranks and 64 microbatches, the check against 10,000 schedules run by rendezvous, `auto`
against the optimum, and against all named schedules; some minutes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import vescale_fn as vfn
from benchmarks import schedule_oracles
from benchmarks.side_by_side import publish
from vescale_fn import schedules
from vescale_fn.schedules import Action, Schedule
from vescale_fn.schedules.actions import actions_of

UNIT = 0.03  # seconds of F, of B and of W of a rank's whole share
WIDTH, ROUNDS, WARM = 4096, 4, 1  # entries of what is sent
THEIRS = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved, 2 chunks": pipelining.ScheduleInterleaved1F1B,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}


def named(p: int, m: int) -> dict[str, Schedule]:
    found = {
        "gpipe": schedules.gpipe(p, m),
        "1f1b": schedules.one_f_one_b(p, m),
        "interleaved, 2 chunks": schedules.interleaved(p, m, 2),
        "zb-h1": schedules.zb_h1(p, m),
        "zb-h2": schedules.zb_h2(p, m),
        "zbv": schedules.zbv(p, m),
        "dualpipev": schedules.dualpipev(p, m),
    }
    return {**found, "auto, memory of 1f1b": schedules.auto(schedules.Costs(), p, m, memory=p)}


def seconds_of(schedule: Schedule) -> float:
    """The seconds of F, of B and of W of one stage."""
    return UNIT * schedule.ranks / schedule.stages


# --- ranks whose tasks sleep ------------------------------------------------------------------------------------------


def slept(schedule: Schedule, lasts: float, width: int = WIDTH) -> Callable[[], None]:
    """One step of this rank: for each task it receives, sleeps and sends; from each stage one receive is posted ahead.

    What is sent is the number of the transfer, in so many entries; another one that arrives is an error.
    """
    me = dist.get_rank()
    incoming = {t.used: (t.source, tag) for tag, t in enumerate(schedule.transfers) if t.target == me}
    ways: dict[tuple[int, bool], list[Action]] = {}  # what uses the values of each, in order
    for action in (a for task in schedule.order[me] for a in actions_of(task) if a in incoming):
        ways.setdefault((action.stage, action.kind == "F"), []).append(action)
    following = {a: b for way in ways.values() for a, b in zip(way, way[1:])}
    outgoing = {t.made: (t.target, tag) for tag, t in enumerate(schedule.transfers) if t.source == me}

    def step() -> None:
        sends: list[Any] = []
        receives: dict[Action, tuple[torch.Tensor, Any]] = {}

        def post(action: Action) -> None:
            source, tag = incoming[action]
            value = torch.empty(width)
            receives[action] = value, dist.irecv(value, source, tag=tag)

        for first, *_ in ways.values():
            post(first)
        for task in schedule.order[me]:
            actions = actions_of(task)
            for action in actions:
                if action in incoming:
                    value, receive = receives.pop(action)
                    receive.wait()
                    if value[0] != incoming[action][1]:
                        raise RuntimeError(f"{action} has got the value {value[0]}, not {incoming[action][1]}")
                    if action in following:
                        post(following[action])
            time.sleep(lasts * sum(len(action.kind) for action in actions))
            for action in actions:
                if action in outgoing:
                    target, tag = outgoing[action]
                    sends.append(dist.isend(torch.full((width,), float(tag)), target, tag=tag))
        for send in sends:
            send.wait()

    return step


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, before: float, after: float) -> torch.Tensor:
        ctx.after = after
        time.sleep(before)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        time.sleep(ctx.after)
        return g.contiguous(), None, None


class _Stage(nn.Module):
    """F sleeps, B sleeps on the way to the input, W on the way to the parameter.

    torch leaves out B of a first stage that has no input to differentiate: there it sleeps on the way to a parameter.
    """

    def __init__(self, lasts: float, first: bool) -> None:
        super().__init__()
        self.lasts, self.w = lasts, nn.Parameter(torch.zeros(WIDTH))
        self.embedding = nn.Parameter(torch.zeros(WIDTH)) if first else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x + self.embedding, self.lasts, self.lasts) + _Sleep.apply(self.w, 0.0, self.lasts)


def torchs(name: str, schedule: Schedule) -> Callable[[], None]:
    """One step of torch's schedule of this name, with stages where they are in ours."""
    me, n, lasts = dist.get_rank(), schedule.stages, seconds_of(schedule)
    own = [stage for stage, rank in enumerate(schedule.placement) if rank == me]
    stages = [pipelining.PipelineStage(_Stage(lasts, s == 0), s, n, torch.device("cpu")) for s in own]
    given: Any = stages if n > schedule.ranks else stages[0]
    theirs = THEIRS[name](given, schedule.microbatches, loss_fn=lambda y, target: (y - target).square().sum())
    x = torch.zeros(schedule.microbatches, WIDTH)

    def step() -> None:
        theirs.step(*[x] * (0 in own), **({"target": x} if n - 1 in own else {}))

    return step


def measured(of: dict[str, Schedule]) -> dict[tuple[str, str], list[float]]:
    """The seconds of each step for all ranks, ours and torch's in turns."""
    torch.set_num_threads(1)
    vfn.make_mesh((dist.get_world_size(),), ("pp",), device="cpu")
    steps = {}
    for name, schedule in of.items():
        steps["ours", name] = slept(schedule, seconds_of(schedule))
        if name in THEIRS:
            steps["torch's", name] = torchs(name, schedule)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for _ in range(ROUNDS + WARM):
        for key, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            times[key].append(time.perf_counter() - start)
    return {key: took[WARM:] for key, took in times.items()}


def on_processes(p: int) -> None:
    """The table for p ranks and twice as many microbatches, some 1.5 minutes for 4 and 2.5 for 8."""
    of, rows = named(p, 2 * p), []
    found, *_ = vfn.launch(measured, p, of, device="cpu")
    for name, schedule in of.items():
        predicted, took = schedule.simulate().makespan * seconds_of(schedule), found["ours", name]
        low, theirs = min(took), found.get(("torch's", name))
        beside = [1e3 * min(theirs), min(theirs) / low] if theirs else ["-", "-"]
        rows.append(
            [name, p, 2 * p, 1e3 * predicted, 1e3 * low, 1e3 * statistics.median(took), low / predicted, *beside]
        )
    columns = ["schedule", "ranks", "microbatches", "ms, predicted", "ms, least", "ms, median", "least / predicted"]
    publish("pipelines" if p == 4 else f"pipelines_{p}", [*columns, "torch's, ms, least", "torch's / ours"], rows)


# --- exactly ----------------------------------------------------------------------------------------------------------


def exactly() -> None:
    """What has no time in it, counted: how many cases there are, and how many are not as they should be."""
    rows = []
    costs = [(6, 6, 6), (12, 30, 6), (24, 6, 18)]
    sizes = [(p, m) for p in range(1, 17) for m in range(1, 65)]
    for name in schedule_oracles.FORMULAS:
        faults = [
            x for k, (p, m) in enumerate(sizes) for x in schedule_oracles.formula_faults(name, p, m, [costs[k % 3]])
        ]
        rows.append([f"{name}: bubble and memory as in the literature", len(sizes), len(faults)])
    verdicts = [schedule_oracles.verdicts(seed) for seed in range(10_000)]
    wrong = sum(said != ran for each in verdicts for said, ran in each)
    rows.append(["check agrees with ranks run by rendezvous, and with sends that never wait", 2 * len(verdicts), wrong])
    ratios = [schedule_oracles.auto_over_optimum(seed) for seed in range(300)]
    rows.append(["auto within 2 % of the optimum", len(ratios), sum(ratio > 1.02 for ratio in ratios)])
    rows.append(["auto is the optimum", len(ratios), sum(ratio > 1 for ratio in ratios)])
    slower = [fault for seed in range(1000) for fault in schedule_oracles.slower_than_named(seed)]
    rows.append(["auto no slower than any named schedule in its memory", 1000, len(slower)])
    publish("exact_pipelines", ["claim", "cases", "that fail"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--exact", action="store_true", help="run no process, and count")
    parser.add_argument("--ranks", type=int, default=4, choices=(4, 8), help="processes")
    options = parser.parse_args()
    exactly() if options.exact else on_processes(options.ranks)
