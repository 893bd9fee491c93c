"""The main job: a small transformer learns real text, on a mesh of processes.

    python -m vescale_fn.recipes.train                      4 processes, dp=2 x tp=2
    python -m vescale_fn.recipes.train --mesh dp=1,tp=1     one device
    python -m vescale_fn.recipes.train --simulate           the same mesh, played by this process
    torchrun --nproc-per-node 4 -m vescale_fn.recipes.train

A step is one pure function, and with the same seed every mesh gives the same losses, up to the order of sums. Lines
that exist only for distribution end in ``# mesh``, in the model and the training, or in ``# mesh: start``, where ranks
are started and the command line is read; `vescale_fn.recipes.count_lines` counts them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import optree
import torch
import torch.distributed as dist  # mesh

import vescale_fn as vfn
from vescale_fn import P  # mesh

from . import data, report, transformer

CHECKED, ALLOWED = 5, 1e-5  # --check: so many steps in fp32, where sums in another order differ by about 1e-6
EVALUATIONS, HELD_OUT_WINDOWS = 4, 256
PROMPT = b"\nclass "


def make_optimizer(lr: float, steps: int) -> vfn.optim.Optimizer:
    """AdamW with warm-up, a cosine and clipped gradients; matrices decay, the scales of norms do not."""
    rate = vfn.optim.warmup_cosine(lr, warmup=min(20, steps // 2), steps=steps, end=0.05 * lr)
    matrices = lambda params: optree.tree_map(lambda p: p.ndim > 1, params)
    adam = vfn.optim.adamw(rate, b1=0.9, b2=0.99, weight_decay=0.1, mask=matrices)
    return vfn.optim.chain(vfn.optim.clip_by_global_norm(1.0), adam)


def make_step(config: transformer.Config, optimizer: vfn.optim.Optimizer) -> Callable[..., tuple[Any, Any, Any]]:
    """One step of training: a pure function of the parameters, the optimiser's state, a batch and a key."""

    def step(params: Any, state: Any, batch: torch.Tensor, key: vfn.random.Key) -> tuple[Any, Any, torch.Tensor]:
        loss, grads = vfn.value_and_grad(transformer.loss)(params, batch, config, key)
        updates, state = optimizer.update(grads, state, params)
        return vfn.optim.apply_updates(params, updates), state, loss

    return step


def training(options: argparse.Namespace, params: Any, text: torch.Tensor, place: Callable[[torch.Tensor], Any],
             batch_key: vfn.random.Key, dropout_key: vfn.random.Key) -> Iterator[tuple[Any, float]]:  # fmt: skip
    """Train where `params` lie and `place` puts the batches; after each step, the parameters and the loss."""
    optimizer = make_optimizer(options.lr, options.steps)
    step = vfn.jit(make_step(options.config, optimizer), donate_argnums=1)
    state = optimizer.init(params)
    for i in range(options.steps):
        batch = place(data.random_batch(vfn.random.fold_in(batch_key, i), text, options.batch, options.context))
        params, state, loss = step(params, state, batch, vfn.random.fold_in(dropout_key, i))
        yield params, loss.item()


def evaluate(params: Any, batches: list[torch.Tensor], config: transformer.Config) -> float:
    """Mean loss on batches of equal size, without dropout."""
    with torch.no_grad():
        return sum(transformer.loss(params, batch, config).item() for batch in batches) / len(batches)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole job, the same on every rank; the first rank talks."""
    began, first = time.perf_counter(), True
    mesh = vfn.make_mesh(tuple(options.mesh.values()), tuple(options.mesh), device=options.device)  # mesh
    first = not dist.is_initialized() or dist.get_rank() == 0  # mesh
    say = lambda *lines: print(*lines, sep="\n", flush=True) if first else None
    config, size, context = options.config, options.batch, options.context

    init_key, *train_keys, sample_key = vfn.random.split(vfn.random.key(options.seed), 4)
    files = data.find_files(options.data)
    text, held_out = data.read_text(files, smallest=context + 1)
    tests = data.even_batches(held_out, max(1, HELD_OUT_WINDOWS // size), size, context)
    bigram = data.bigram_loss(text, tests)
    place = lambda batch: batch.to(options.device)
    params: Any = transformer.init(init_key, config)
    params = optree.tree_map(place, params)
    say(*headline(options, files, text, held_out, params, bigram))

    alone = training(options, params, text, place, *train_keys)  # a generator: nothing has run yet
    expected = [loss for _, loss in itertools.islice(alone, CHECKED if options.check and first else 0)]

    params = vfn.shard(params, mesh, vfn.spec_from_rules(params, transformer.SPECS))  # mesh
    place = lambda batch: vfn.shard(batch.to(options.device), mesh, P("dp"))  # mesh
    tests = [place(batch) for batch in tests]

    result: dict[str, Any] = {"losses": [], "held_out": [], "bigram": bigram, "agrees": True}
    progress = report.Progress(options.steps)
    for done, (after, loss) in enumerate(training(options, params, text, place, *train_keys), 1):
        params = after
        result["losses"].append(loss)
        if first:
            progress.step(done, result["losses"], size * context)
        if expected and done == len(expected):
            result["agrees"], table = report.side_by_side(expected, result["losses"], ALLOWED)
            say("\n" * progress.redraws + table)
        if done % math.ceil(options.steps / EVALUATIONS) == 0 or done == options.steps:
            result["held_out"].append((done, evaluate(params, tests, config)))
            progress.skip()
    params = vfn.unshard(params)  # mesh
    if first:
        progress.end()
        with torch.no_grad():
            sample = transformer.generate(params, PROMPT, options.sample, context, config, sample_key)
        say(*report.ending(result, PROMPT + sample, time.perf_counter() - began))
        if options.save_plot:
            report.save_plot(options.save_plot, result["losses"], result["held_out"], bigram)
            say(f"plot      {options.save_plot}")
    return result


def on_ranks(options: argparse.Namespace) -> dict[str, Any]:  # mesh: start
    """Run on every rank: simulated ones, those that torchrun has started, or processes started here."""  # mesh: start
    ranks = math.prod(options.mesh.values())  # mesh: start
    if options.simulate:  # mesh: start
        with vfn.simulate(ranks):  # mesh: start
            return run(options)  # mesh: start
    if ranks == 1 or "TORCHELASTIC_RUN_ID" in os.environ:  # mesh: start
        return run(options)  # mesh: start
    return vfn.launch(run, ranks, options, device=options.device)[0]  # mesh: start


def headline(options: argparse.Namespace, files: list[Any], text: torch.Tensor, held_out: torch.Tensor, params: Any,
             bigram: float) -> list[str]:  # fmt: skip
    """What will be done, on what and where."""
    config, where = options.config, f"one process, on {options.device}"
    where = mesh_text(options)  # mesh: start
    count = sum(leaf.numel() for leaf in optree.tree_leaves(params))
    source = options.data or "Python's standard library"
    return [
        f"where     {where}",
        f"text      {source}: {several(len(files), 'file')}, {len(text):,} bytes to learn from, {len(held_out):,} held out",
        f"model     {count:,} parameters: {several(config.layers, 'block')} of width {config.dim}, "
        f"{several(config.heads, 'head')}, dropout {config.dropout}",
        f"steps     {options.steps}, each of {several(options.batch, 'window')} of {several(options.context, 'byte')}",
        f"bigram    {bigram:.3f} nats a byte on the held-out text: what counting pairs of bytes gives",
    ]


def several(count: int, thing: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count} {thing}{'s' * (count != 1)}"


def mesh_text(options: argparse.Namespace) -> str:  # mesh: start
    """The mesh, and what plays its ranks."""  # mesh: start
    axes = ", ".join(f"{name}={size}" for name, size in options.mesh.items())  # mesh: start
    ranks = math.prod(options.mesh.values())  # mesh: start
    processes = "one process" if options.simulate or ranks == 1 else f"{ranks} processes"  # mesh: start
    return f"mesh ({axes}): {processes}{', simulated' * options.simulate}, on {options.device}"  # mesh: start


def mesh_of(text: str) -> dict[str, int]:  # mesh: start
    """``dp=2,tp=2`` as axes and sizes; an axis that is not named has size 1."""  # mesh: start
    sizes = {"dp": 1, "tp": 1}  # mesh: start
    for part in text.split(","):  # mesh: start
        name, _, size = part.partition("=")  # mesh: start
        if name not in sizes or not size.isdigit() or int(size) < 1:  # mesh: start
            raise argparse.ArgumentTypeError(f"{part!r} in {text!r}: write it like dp=2,tp=2")  # mesh: start
        sizes[name] = int(size)  # mesh: start
    return sizes  # mesh: start


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    size = transformer.Config()
    numbers = {
        "steps": (240, "steps of training"),
        "batch": (16, "windows of text in a step"),
        "context": (128, "bytes in a window"),
        "lr": (4e-3, "peak learning rate"),
        "dim": (size.dim, "width of the model"),
        "heads": (size.heads, "attention heads"),
        "layers": (size.layers, "blocks"),
        "dropout": (size.dropout, "dropout rate"),
        "seed": (0, "seed of parameters, batches, dropout and the sample"),
        "sample": (240, "bytes to write at the end"),
    }
    description, examples, *_ = f"{__doc__}\n\n".split("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m vescale_fn.recipes.train", description=description.split(": ")[-1].capitalize(),
        epilog=f"examples:\n{examples}", formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--mesh", type=mesh_of, default="dp=2,tp=2", help="axes and sizes (dp=2,tp=2)")  # mesh: start
    parser.add_argument("--simulate", action="store_true", help="play all ranks in this process")  # mesh: start
    parser.add_argument(
        "--check", action="store_true", help=f"run the first {CHECKED} steps on one device too, and compare the losses"
    )
    parser.add_argument(
        "--data", metavar="PATH", help="text to learn: a file or a folder (the .py files of Python's standard library)"
    )
    for name, (value, text) in numbers.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, metavar="N", help=f"{text} ({value})")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where to compute (on GPUs, if there are enough)")
    parser.add_argument("--save-plot", metavar="FILE", help="draw the losses, with matplotlib")
    options = parser.parse_args(argv)
    for name in ("steps", "batch", "context", "dim", "heads", "layers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.dim % (2 * options.heads):
        parser.error(f"--dim {options.dim} must be an even number for each of --heads {options.heads}")
    if not 0 <= options.dropout < 1:
        parser.error(f"--dropout {options.dropout} must be at least 0 and below 1")
    if options.heads % options.mesh["tp"]:  # mesh: start
        parser.error(f"tp={options.mesh['tp']} must divide --heads {options.heads}")  # mesh: start
    try:
        data.read_text(data.find_files(options.data), smallest=options.context + 1)
        if options.save_plot:
            report.plotting()
    except (data.DataError, ImportError) as error:
        parser.error(str(error))
    options.config = transformer.Config(options.dim, options.heads, options.layers, 4 * options.dim, options.dropout)
    wanted = 1
    wanted = math.inf if options.simulate else math.prod(options.mesh.values())  # mesh: start
    options.device = options.device or ("cuda" if torch.cuda.device_count() >= wanted else "cpu")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the job from the command line; the exit status is 1 where `--check` found a difference."""
    job, options = run, parse(argv)
    job = on_ranks  # mesh: start
    return 0 if job(options)["agrees"] else 1


if __name__ == "__main__":
    sys.exit(main())
