"""The main job: a language model learns real text, on a mesh of processes.

    python -m vescale_fn.recipes.train                                  4 processes, tensor parallel by data parallel
    python -m vescale_fn.recipes.train --mesh dp=1,tp=1                 one device
    python -m vescale_fn.recipes.train --simulate                       the same mesh, played by this process
    python -m vescale_fn.recipes.train --model mixtral --parallel fsdp+ep --mesh dp=2,ep=2
    python -m vescale_fn.recipes.train --config run.toml --checkpoints run --resume
    torchrun --nproc-per-node 4 -m vescale_fn.recipes.train

A step is one pure function, and with the same seed every mesh gives the same losses, up to the order of sums. A run
that is interrupted and resumed, on any other mesh, goes on as if nothing had been. Lines that exist only for distribution
end in ``# mesh``, in the model and the training, or in ``# mesh: start``, where ranks are started and the command line is
read; `vescale_fn.recipes.count_lines` counts them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses  # mesh
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist  # mesh

import vescale_fn as vfn

from . import data, metrics, options, report, sampling
from .stopping import Stopping

CHECKED, ALLOWED = 5, 1e-5  # --check: so many steps in fp32, where sums in another order differ by about 1e-6
HELD_OUT_WINDOWS = 256
PROMPT = b"\nclass "
Loss = Callable[..., torch.Tensor]


class Run(NamedTuple):
    """What a run has come to, and what a checkpoint holds: all that the next step depends on."""

    done: int
    params: Any
    state: Any


def make_optimizer(lr: float, steps: int) -> vfn.optim.Optimizer:
    """AdamW with warm-up, a cosine and clipped gradients; matrices decay, the scales of norms do not."""
    rate = vfn.optim.warmup_cosine(lr, warmup=min(20, steps // 2), steps=steps, end=0.05 * lr)
    matrices = lambda params: optree.tree_map(lambda p: p.ndim > 1, params)
    adam = vfn.optim.adamw(rate, b1=0.9, b2=0.99, weight_decay=0.1, mask=matrices)
    return vfn.optim.chain(vfn.optim.clip_by_global_norm(1.0), adam)


def make_step(loss: Loss, optimizer: vfn.optim.Optimizer, specs: Any = None) -> Callable[..., Any]:
    """One step of training: a pure function of the parameters, the optimiser's state, a batch and a key."""

    def step(params: Any, state: Any, batch: torch.Tensor, key: vfn.random.Key) -> tuple[Any, Any, torch.Tensor]:
        value, grads = vfn.value_and_grad(loss)(params, batch, key)
        if specs:  # mesh
            return *specs.update(optimizer, grads, state, params), value  # mesh
        updates, state = optimizer.update(grads, state, params)
        return vfn.optim.apply_updates(params, updates), state, value

    return step


def training(opt: argparse.Namespace, at: Run, loss: Loss, text: torch.Tensor, place: Callable[[torch.Tensor], Any],
             keys: list[vfn.random.Key], specs: Any = None) -> Iterator[tuple[Run, float]]:  # fmt: skip
    """Train from `at` on, where its parameters lie and `place` puts batches; after each step, the run and the loss."""
    step = vfn.jit(make_step(loss, make_optimizer(opt.lr, opt.steps), specs), donate_argnums=1)
    batch_key, dropout_key = keys
    for i in range(at.done, opt.steps):
        batch = place(data.random_batch(vfn.random.fold_in(batch_key, i), text, opt.batch, opt.context))
        with torch.profiler.record_function(f"step {i + 1}"):
            params, state, value = step(at.params, at.state, batch, vfn.random.fold_in(dropout_key, i))
        at = Run(i + 1, params, state)
        yield at, value.item()


def traced(steps: Iterator[tuple[Run, float]], path: str | None) -> Iterator[tuple[Run, float]]:
    """The same steps, a few of which leave a trace in the file `path`."""
    with contextlib.ExitStack() as recording:
        for count, step in enumerate(steps, 1):
            if path and count == options.TRACED[1]:
                recording.close()
            yield step
            if path and count == options.TRACED[0]:
                recording.enter_context(vfn.profile(path))


def evaluate(loss: Loss, params: Any, batches: list[torch.Tensor]) -> float:
    """Mean loss on batches of equal size, without dropout."""
    with torch.no_grad():
        return sum(loss(params, batch).item() for batch in batches) / len(batches)


def run(opt: argparse.Namespace) -> dict[str, Any]:
    """The whole job, the same on every rank; the first rank talks."""
    began, first, ranks, specs = time.perf_counter(), True, 1, None
    mesh = vfn.make_mesh(tuple(opt.mesh.values()), tuple(opt.mesh), device=opt.device)  # mesh
    first = not dist.is_initialized() or dist.get_rank() == 0  # mesh
    ranks = 1 if opt.simulate else mesh.size()  # mesh
    say = lambda *lines: print(*lines, sep="\n", flush=True) if first else None
    model, config = options.MODELS[opt.model], opt.config
    loss = lambda params, batch, key=None: model.loss(params, batch, config, key)

    init_key, *train_keys, sample_key = vfn.random.split(vfn.random.key(opt.seed), 4)
    files = data.find_files(opt.data)
    text, held_out = data.read_text(files, smallest=opt.context + 1)
    tests = data.even_batches(held_out, max(1, HELD_OUT_WINDOWS // opt.batch), opt.batch, opt.context)
    bigram = data.bigram_loss(text, tests)
    place: Callable[[Any], Any] = lambda batch: batch.to(opt.device)
    optimizer, params = make_optimizer(opt.lr, opt.steps), optree.tree_map(place, model.init(init_key, config))
    work = metrics.flops(loss, params, tests[0]) / ranks
    say(*headline(opt, files, text, held_out, params, bigram))

    alone = training(opt, Run(0, params, optimizer.init(params)), loss, text, place, train_keys)  # nothing has run yet
    expected = [value for _, value in itertools.islice(alone, CHECKED if opt.check and first else 0)]

    config = dataclasses.replace(config, layout=opt.layout)  # mesh
    specs = opt.layout.specs(params, model.NAMES, mesh)  # mesh
    params = vfn.shard(params, mesh, specs.params)  # mesh
    place = lambda batch: vfn.shard(batch.to(opt.device), mesh, opt.layout.spec("batch"))  # mesh
    tests = [place(batch) for batch in tests]
    state = optimizer.init(params)
    state = specs.init(optimizer, params)  # mesh

    begin, stop = Run(0, params, state), False
    saved = vfn.checkpoint.Manager(opt.checkpoints, keep=opt.keep, background=True) if opt.checkpoints else None
    if saved and opt.resume and saved.latest() is not None:
        begin = saved.restore(begin)
        say(f"resumed   after step {begin.done}, from {saved.folder}")
    journal, agrees, at = report.Journal(opt, begin.done, work, first), True, begin
    with Stopping() as stopping, journal:
        for at, value in traced(training(opt, begin, loss, text, place, train_keys, specs), opt.profile):
            journal.step(at.done, value)
            if at.done == len(expected):
                agrees, table = report.side_by_side(expected, journal.losses, ALLOWED)
                say("\n" * journal.progress.redraws + table)
            if at.done % opt.evaluate_every == 0 or at.done == opt.steps:
                journal.held_out(at.done, evaluate(loss, at.params, tests))
            stop = at.done < opt.steps and stopping.now(opt.device)
            if saved and (at.done % opt.save_every == 0 or at.done == opt.steps or stop):
                saved.save(at.done, at)
            if stop:
                break
            journal.ready()
    if saved:
        saved.wait()
    params = at.params
    params = vfn.unshard(params)  # mesh
    if first and stop:
        say(f"stopped   by SIGTERM after step {at.done}" + (f", saved in {saved.folder}: --resume" if saved else ""))
    elif first:
        with torch.no_grad():
            scores = lambda tokens: model.logits(params, tokens.to(opt.device), opt.config)
            sample = sampling.generate(scores, PROMPT, opt.sample, opt.context, sample_key)
        say(*report.ending(journal.evaluated, bigram, PROMPT + sample, time.perf_counter() - began))
        if opt.save_plot:
            report.save_plot(opt.save_plot, journal.losses, journal.evaluated, bigram)
            say(f"plot      {opt.save_plot}")
    return {"losses": journal.losses, "held_out": journal.evaluated, "agrees": agrees, "done": at.done}


def on_ranks(opt: argparse.Namespace) -> dict[str, Any]:  # mesh: start
    """Run on every rank: simulated ones, those that torchrun has started, or processes started here."""  # mesh: start
    ranks = math.prod(opt.mesh.values())  # mesh: start
    if opt.simulate:  # mesh: start
        with vfn.simulate(ranks):  # mesh: start
            return run(opt)  # mesh: start
    if ranks == 1 or "TORCHELASTIC_RUN_ID" in os.environ:  # mesh: start
        return run(opt)  # mesh: start
    return vfn.launch(run, ranks, opt, device=opt.device)[0]  # mesh: start


def headline(opt: argparse.Namespace, files: list[Any], text: torch.Tensor, held_out: torch.Tensor, params: Any,
             bigram: float) -> list[str]:  # fmt: skip
    """What will be done, on what and where."""
    config, where = opt.config, f"one process, on {opt.device}"
    where = mesh_text(opt)  # mesh: start
    count = sum(leaf.numel() for leaf in optree.tree_leaves(params))
    source = opt.data or "Python's standard library"
    return [
        f"where     {where}",
        f"text      {source}: {several(len(files), 'file')}, {len(text):,} bytes to learn from, {len(held_out):,} held out",
        f"model     {opt.model}, {count:,} parameters: {several(config.layers, 'block')} of width {config.dim}, "
        f"{several(config.heads, 'head')}, dropout {config.dropout}",
        f"steps     {opt.steps}, each of {several(opt.batch, 'window')} of {several(opt.context, 'byte')}",
        f"bigram    {bigram:.3f} nats a byte on the held-out text: what counting pairs of bytes gives",
    ]


def several(count: int, thing: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count} {thing}{'s' * (count != 1)}"


def mesh_text(opt: argparse.Namespace) -> str:  # mesh: start
    """The mesh, how it is used, and what plays its ranks."""  # mesh: start
    axes = ", ".join(f"{name}={size}" for name, size in opt.mesh.items())  # mesh: start
    ranks = math.prod(opt.mesh.values())  # mesh: start
    processes = "one process" if opt.simulate or ranks == 1 else f"{ranks} processes"  # mesh: start
    return f"{opt.parallel} on mesh ({axes}): {processes}{', simulated' * opt.simulate}, on {opt.device}"  # mesh: start


def main(argv: list[str] | None = None) -> int:
    """Run the job from the command line; the exit status is 1 where `--check` found a difference."""
    job, opt = run, options.parse(argv, __doc__ or "", CHECKED)
    job = on_ranks  # mesh: start
    return 0 if job(opt)["agrees"] else 1


if __name__ == "__main__":
    sys.exit(main())
