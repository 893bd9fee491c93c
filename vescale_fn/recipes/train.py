"""The main job: a language model learns real text, on a mesh of processes.

    python -m vescale_fn.recipes.train --help

A step is one pure function, and with the same seed every mesh gives the same losses, up to the order of sums. Each rank
makes its own shards of parameters and optimiser state, and no whole ones. A run that is interrupted and resumed, on any
other mesh, goes on as if nothing had been. Lines that exist only for distribution end in ``# mesh``, in the model and the
training, or in ``# mesh: start``, where ranks are started and the command line is read; `vescale_fn.recipes.count_lines`
counts them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses  # mesh
import functools
import itertools
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist  # mesh

import vescale_fn as vfn
from vescale_fn._core.distributed import environment  # mesh: start

from . import (
    choosing,  # mesh: start
    data,
    going_on,  # mesh: start
    metrics,
    optimizers,
    options,
    report,
    sampling,
)
from .command_line import CHECKED, TRACED
from .stopping import Stopping

ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
HELD_OUT_WINDOWS = 256
INTERRUPTED = 128 + signal.SIGINT  # the exit status of what ^C has ended
PROMPT = b"\nclass "
Loss = Callable[..., torch.Tensor]


class Run(NamedTuple):
    """What a run has come to, and what a checkpoint holds: all that the next step depends on, and with which options."""

    done: int
    params: Any
    state: Any
    setup: Any = None


def make_step(loss: Loss, optimizer: vfn.optim.Optimizer, specs: Any = None, parts: int = 1) -> tuple[Any, Any]:
    """Training as two pure functions: `add`, the loss and gradients of a part of a batch, added to those of earlier parts
    if there are any; and `step`, which does that with the last part, and takes the step. With a scale, which the state of
    an optimiser for float16 has, loss and gradients are multiplied by it."""

    def add(params: Any, batch: torch.Tensor, key: vfn.random.Key, earlier: Any = None, scale: Any = None) -> Any:
        found: Any = vfn.value_and_grad(loss)(params, batch, key, *([] if scale is None else [scale]))
        if specs and parts > 1:  # mesh
            found = found[0], vfn.with_sharding(found[1], specs.grads)  # mesh
        return found if earlier is None else optree.tree_map(torch.add, earlier, found)

    def step(params: Any, state: Any, batch: torch.Tensor, key: vfn.random.Key, earlier: Any = None) -> Any:
        scale = scale_of(state)
        value, grads = add(params, batch, key, earlier, scale)
        value = value if scale is None else value / scale
        if parts > 1:
            value, grads = value / parts, optree.tree_map(lambda grad: grad / parts, grads)
        if specs:  # mesh
            return *specs.update(optimizer, grads, state, params), value  # mesh
        updates, state = optimizer.update(grads, state, params)
        return vfn.optim.apply_updates(params, updates), state, value

    return add, step


def part_by_part(add: Callable[..., Any], last: Callable[..., Any]) -> Callable[..., Any]:
    """A step of a whole batch: of parameters, state, the parts of the batch, and a key for each; what `make_step` gives."""

    def step(params: Any, state: Any, parts: Sequence[torch.Tensor], keys: Sequence[vfn.random.Key]) -> Any:
        earlier = None
        for part, key in zip(parts[:-1], keys):
            earlier = add(params, part, key, earlier, scale_of(state))
        return last(params, state, parts[-1], keys[-1], earlier)

    return step


def scaled(loss: Loss) -> Loss:
    """A loss, multiplied by a scale if it is given one: within, so that the gradients of each part of a batch are."""

    def times(params: Any, batch: torch.Tensor, key: vfn.random.Key | None = None, scale: Any = None) -> torch.Tensor:
        value = loss(params, batch, key)
        return value if scale is None else value * scale

    return times


def scale_of(state: Any) -> Any:
    """What the loss is multiplied by: None where it is not."""
    return state.scale if isinstance(state, vfn.precision.ScaledState) else None


def stepping(
    opt: argparse.Namespace,
    loss: Loss,
    text: torch.Tensor,
    place: Callable[[torch.Tensor], Any],
    keys: list[vfn.random.Key],
    specs: Any = None,
) -> Callable[[Run], tuple[Run, float]]:
    """One step of training: from a run, where its parameters lie and `place` puts batches, to the next, and the loss."""
    add, last = make_step(loss, optimizers.of(opt), specs, opt.accumulate)
    step = part_by_part(vfn.jit(add, donate_argnums=3), vfn.jit(last, donate_argnums=(0, 1, 4)))
    step = choosing.carried_out(step, opt.layout) if specs else step  # mesh: start
    batch_key, dropout_key = keys

    def taken(at: Run) -> tuple[Run, float]:
        windows = data.random_batch(vfn.random.fold_in(batch_key, at.done), text, opt.batch, opt.context)
        parts = tuple(map(place, windows.chunk(opt.accumulate)))
        part_keys = tuple(vfn.random.split(vfn.random.fold_in(dropout_key, at.done), opt.accumulate))
        with torch.profiler.record_function(f"step {at.done + 1}"):
            params, state, value = step(at.params, at.state, parts, part_keys)
        return at._replace(done=at.done + 1, params=params, state=state), value.item()

    return taken


def training(opt: argparse.Namespace, at: Run, step: Callable[[Run], tuple[Run, float]]) -> Iterator[tuple[Run, float]]:
    """Train from `at` on; after each step, the run and the loss."""
    while at.done < opt.steps:
        at, value = step(at)
        yield at, value


def traced(steps: Iterator[tuple[Run, float]], path: str | None) -> Iterator[tuple[Run, float]]:
    """The same steps, a few of which leave a trace in the file `path`."""
    with contextlib.ExitStack() as recording:
        for count, step in enumerate(steps, 1):
            if path and count == TRACED[1]:
                recording.close()
            yield step
            if path and count == TRACED[0]:
                recording.enter_context(vfn.profile(path))


def evaluate(loss: Loss, params: Any, batches: Sequence[torch.Tensor]) -> float:
    """Mean loss on batches of equal size, without dropout."""
    with torch.no_grad():
        return sum(loss(params, batch).item() for batch in batches) / len(batches)


class TrainingJob:
    """A run on this rank, of which the first rank tells.

    Attributes:
        begin: makes the run as it begins.
        step: takes a step, as `stepping` says.
    """

    def __init__(self, opt: argparse.Namespace) -> None:
        self.began, self.first, ranks, specs = time.perf_counter(), True, 1, None
        opt = choosing.settled(opt, lambda *of: part_by_part(*make_step(scaled(of[0]), *of[1:])))  # mesh: start
        self.opt = opt
        mesh = vfn.make_mesh(tuple(opt.mesh.values()), tuple(opt.mesh), device=opt.device)  # mesh
        self.first = not dist.is_initialized() or dist.get_rank() == 0  # mesh
        ranks = mesh.size() // len(mesh.played_ranks)  # mesh
        model, config, self.precision = options.MODELS[opt.model], opt.config, opt.precision
        loss = self.precision.apply(lambda params, batch, key=None: model.loss(params, batch, config, key))
        loss = scaled(loss)
        loss = opt.layout.pipelined(loss, **opt.pipeline)  # mesh
        place: Callable[[Any], Any] = lambda batch: batch.to(opt.device)

        def initial(key: vfn.random.Key) -> Any:
            with torch.device(opt.device):
                return model.init(key, config, self.precision.params)

        init_key, *train_keys, self.sample_key = vfn.random.split(vfn.random.key(opt.seed), 4)
        files = data.find_files(opt.data)
        text, held_out = data.read_text(files, smallest=opt.context + 1)
        tests = data.even_batches(held_out, max(1, HELD_OUT_WINDOWS // opt.batch), opt.batch, opt.context)
        self.bigram = data.bigram_loss(text, tests)
        shapes = vfn.eval_shape(initial, init_key)
        self.work = metrics.flops(loss, shapes, tests[0]) / ranks
        self.say(*headline(opt, files, text, held_out, shapes, self.bigram))

        optimizer = optimizers.of(opt)
        begin, self.expected = lambda params: Run(0, params, optimizer.init(params), opt.setup), []
        if opt.check and self.first:
            alone = training(opt, begin(initial(init_key)), stepping(opt, loss, text, place, train_keys))
            self.expected = [value for _, value in itertools.islice(alone, CHECKED)]
            del alone  # its parameters are whole

        make = functools.partial(vfn.init, initial)
        config = dataclasses.replace(config, layout=opt.layout)  # mesh
        place = lambda batch: vfn.shard(batch.to(opt.device), mesh, opt.layout.spec("batch"))  # mesh
        specs = opt.layout.specs(shapes, model.NAMES, mesh).staged(loss, shapes, place(tests[0]))  # mesh
        make = functools.partial(make, spec=specs.params, mesh=mesh)  # mesh
        begin = lambda params: Run(0, params, specs.init(optimizer, params), opt.setup)  # mesh
        self.begin: Callable[[], Run] = lambda: begin(make(init_key))
        self.tests, self.agrees = [place(batch) for batch in tests], True
        self.step = stepping(opt, loss, text, place, train_keys, specs)
        self.score = vfn.jit(loss)

    def say(self, *lines: str) -> None:
        if self.first:
            print(*lines, sep="\n", flush=True)

    def journal(self, done: int) -> report.Journal:
        """What is written of the steps from here on."""
        return report.Journal(self.opt, done, self.work, self.first)

    def after(self, journal: report.Journal, at: Run, value: float) -> None:
        """Tell of a step."""
        journal.step(at.done, value)
        if at.done == len(self.expected):
            self.agrees, table = report.side_by_side(self.expected, journal.losses, ALLOWED[self.precision.compute])
            self.say("\n" * journal.progress.redraws + table)
        if at.done % self.opt.evaluate_every == 0 or at.done == self.opt.steps:
            self.evaluated(journal, at)

    def evaluated(self, journal: report.Journal, at: Run) -> None:
        """Tell how good the parameters are."""
        journal.held_out(at.done, evaluate(self.score, at.params, self.tests))

    def ended(self, journal: report.Journal, at: Run, complete: bool = True) -> dict[str, Any]:
        """Tell what has come of it all."""
        opt, digest = self.opt, None
        asked = opt.digest
        asked = asked or opt.deterministic  # mesh: start
        if asked:
            digest = vfn.digest({"params": at.params, "state": at.state})
            self.say(f"digest    {digest}")
        if complete:
            sample = write_sample(opt, at.params, self.precision, self.sample_key, self.first) if opt.sample else None
            self.say(*report.ending(journal.evaluated, self.bigram, sample, time.perf_counter() - self.began))
            if opt.save_plot and self.first:
                report.save_plot(opt.save_plot, journal.losses, journal.evaluated, self.bigram)
                self.say(f"plot      {opt.save_plot}")
        return {
            "losses": journal.losses,
            "held_out": journal.evaluated,
            "agrees": self.agrees,
            "done": at.done,
            "digest": digest,
            "interrupted": False,
        }


def checkpoints(opt: argparse.Namespace) -> vfn.checkpoint.Manager | None:
    """Those that are asked for."""
    return vfn.checkpoint.Manager(opt.checkpoints, keep=opt.keep, background=True) if opt.checkpoints else None


def run(opt: argparse.Namespace) -> dict[str, Any]:
    """The whole job, the same on every rank."""
    job, saved, stop = TrainingJob(opt), checkpoints(opt), False
    at = job.begin()
    if saved:
        at = restored(opt, saved, at, job.say)
    steps = () if opt.evaluate else traced(training(opt, at, job.step), opt.profile)
    with Stopping() as stopping, job.journal(at.done) as journal:
        for at, value in steps:
            job.after(journal, at, value)
            stop = at.done < opt.steps and stopping.now(opt.device)
            if saved and (at.done % opt.save_every == 0 or at.done == opt.steps or stop):
                saved.save(at.done, at)
            if stop:
                break
            journal.ready()
        if not journal.losses:  # nothing was left to do, or to be done
            job.evaluated(journal, at)
    if saved:
        saved.wait()
    found = job.ended(journal, at, not stop)
    if stop:
        where = f", saved in {saved.folder}: --resume" if saved else ""
        job.say(f"stopped   after step {at.done}{where}")
    return found | {"interrupted": stopping.told == signal.SIGINT}


def restored(opt: argparse.Namespace, saved: vfn.checkpoint.Manager, at: Run, say: Callable[..., None]) -> Run:
    """Where the run goes on: with what was saved, if it is to be evaluated, or resumed."""
    if opt.evaluate:
        at = at._replace(state=None, **saved.restore({"done": 0, "params": at.params}, partial=True, exact=False))
        say(f"loaded    after step {at.done}, from {saved.folder}")
    elif opt.resume and saved.latest() is not None:
        at = saved.restore(at, exact=True if opt.exact else None)
        say(f"resumed   after step {at.done}, from {saved.folder}")
    return at


def write_sample(opt: argparse.Namespace, params: Any, precision: Any, key: vfn.random.Key, writes: bool) -> bytes:
    """Text that the model goes on with after `PROMPT`, written by the one rank that `writes`."""
    params = vfn.unshard(params)  # mesh
    if not writes:
        return b""
    logits = precision.apply(options.MODELS[opt.model].logits)
    with torch.no_grad():
        scores = lambda tokens: logits(params, tokens.to(opt.device), opt.config)
        return PROMPT + sampling.generate(scores, PROMPT, opt.sample, opt.context, key)


def on_ranks(opt: argparse.Namespace, **how: Any) -> dict[str, Any]:  # mesh: start
    """Run on every rank: simulated ones, those that somebody else has started, or those started here, `how`."""  # mesh: start
    ranks = math.prod(opt.mesh.values())  # mesh: start
    same = vfn.deterministic(virtual=ranks) if opt.deterministic else contextlib.nullcontext()  # mesh: start
    simulated = vfn.simulate(ranks) if opt.simulate else contextlib.nullcontext()  # mesh: start
    with same, simulated:  # mesh: start
        job = run if opt.elastic is None else functools.partial(going_on.run, TrainingJob, checkpoints)  # mesh: start
        alone = opt.simulate or (ranks == 1 and opt.elastic is None)  # mesh: start
        if alone or environment.world():  # mesh: start
            return job(opt)  # mesh: start
        how.update({} if opt.elastic is None else {"restarts": opt.elastic})  # mesh: start
        return vfn.launch(job, opt.processes or ranks, opt, device=opt.device, **how)[0]  # mesh: start


def headline(
    opt: argparse.Namespace, files: list[Any], text: torch.Tensor, held_out: torch.Tensor, params: Any, bigram: float
) -> list[str]:
    """What will be done, on what and where."""
    config, where = opt.config, f"one process, on {opt.device}"
    where = mesh_text(opt)  # mesh: start
    count = sum(leaf.numel() for leaf in optree.tree_leaves(params))
    source = opt.data or "Python's standard library"
    parts = f", in {opt.accumulate} parts" * (opt.accumulate > 1)
    windows = f"{several(opt.batch, 'window')} of {several(opt.context, 'byte')}{parts}"
    steps = f"steps     {opt.steps} of {opt.optimizer}, each of {windows}"
    return [
        f"where     {where}",
        f"text      {source}: {several(len(files), 'file')}, {len(text):,} bytes to learn from, {len(held_out):,} held out",
        f"model     {opt.model}, {count:,} parameters: {several(config.layers, 'block')} of width {config.dim}, "
        f"{several(config.heads, 'head')}, dropout {config.dropout}",
        *[f"numbers   {options.policy_text(opt.precision)}"] * (opt.precision != vfn.precision.policy()),
        *[steps] * (not opt.evaluate),
        f"bigram    {bigram:.3f} nats a byte on the held-out text: what counting pairs of bytes gives",
    ]


def several(count: int, thing: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count} {thing}{'s' * (count != 1)}"


def mesh_text(opt: argparse.Namespace) -> str:  # mesh: start
    """The mesh, how it is used, and what plays its ranks."""  # mesh: start
    axes = ", ".join(f"{name}={size}" for name, size in opt.mesh.items())  # mesh: start
    count = dist.get_world_size() if dist.is_initialized() and not opt.simulate else 1  # mesh: start
    processes = f"{count} processes" if count > 1 else "one process"  # mesh: start
    how = ", deterministic" * bool(opt.deterministic) + ", simulated" * opt.simulate  # mesh: start
    return f"{opt.parallel} on mesh ({axes}): {processes}{how}, on {opt.device}"  # mesh: start


def main(argv: list[str] | None = None) -> int:
    """Run the job from the command line; the exit status is 1 where `--check` found a difference, 130 after ^C."""
    job = run
    job = on_ranks  # mesh: start
    try:
        done = job(options.parse(argv))
    except KeyboardInterrupt:
        done = {"interrupted": True}
    return INTERRUPTED if done["interrupted"] else 0 if done["agrees"] else 1


if __name__ == "__main__":
    sys.exit(main())
