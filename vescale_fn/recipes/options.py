"""What the options of the main job come to: a policy, sizes, a layout, a device; checked with what is there."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from typing import Any

import torch

import vescale_fn as vfn
from vescale_fn._core.distributed import environment  # mesh: start

from . import (
    choosing,  # mesh: start
    data,
    gpt,
    llama,
    metrics,
    mixtral,
    report,
)
from .command_line import GIVEN, POLICY, PRECISIONS, make_parser, read
from .models import suits  # mesh: start
from .parallel import ParallelError, parallel  # mesh: start

MODELS: dict[str, Any] = {"gpt": gpt, "llama": llama, "mixtral": mixtral}
OF_A_CHECKPOINT = ("model", "dim", "heads", "layers", "context", "precision", "optimizer")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options on a command line, by default this program's, as the program takes them."""
    parser = make_parser()
    options = GIVEN if argv is None and GIVEN else read(sys.argv[1:] if argv is None else argv)
    try:
        options.precision = precision_of(options.precision)
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument --precision: {error}")
    options.config = _sizes(options)
    options.setup = _setup(options)
    if options.checkpoints:
        _compare(options, parser)
    _lay_out(options, parser)  # mesh: start
    started = environment.world()  # mesh: start
    if options.processes and started and started.size != options.processes:  # mesh: start
        parser.error(f"--processes {options.processes}: there are {started.size}, started already")  # mesh: start
    try:
        data.read_text(data.find_files(options.data), smallest=options.context + 1)
        if options.save_plot:
            report.plotting()
        if options.tensorboard:
            metrics.writer()
    except (data.DataError, ImportError) as error:
        parser.error(str(error))
    wanted, there = 1, torch.cuda.device_count()
    ranks = environment.ranks_here() or math.prod(options.mesh.values())  # mesh: start
    wanted = 1 if options.simulate else ranks  # mesh: start
    if options.device == "cuda" and there < wanted:
        parser.error(
            f"--device cuda: {wanted} GPU{'s' * (wanted != 1)} needed, one for each rank here, but there "
            f"{'is 1' if there == 1 else f'are {there}'}"
        )
    usual = "cuda" if there >= wanted else "cpu"
    usual = "cpu" if options.simulate else usual  # mesh: start
    options.device = options.device or usual
    return options


def precision_of(text: str) -> Any:
    """A policy by its name in `PRECISIONS`, or by what `vfn.precision.policy` takes.

    >>> precision_of("bf16")
    Policy(params=f32,compute=bf16,reduce=f32,output=f32)
    """
    try:
        policy = vfn.precision.policy(PRECISIONS.get(text, text))
    except vfn.errors.VfnError:
        raise argparse.ArgumentTypeError(f"{text!r}: write {', '.join(PRECISIONS)}, or {POLICY}") from None
    if torch.float16 in (policy.params, policy.output):
        raise argparse.ArgumentTypeError(f"{text!r}: float16 is for computing alone; write fp16, or {POLICY}")
    return policy


def policy_text(policy: Any) -> str:
    """The same policy as text.

    >>> policy_text(precision_of("bf16"))
    'params=f32,compute=bf16,reduce=f32,output=f32'
    """
    return str(policy).removeprefix("Policy(").removesuffix(")")


def _sizes(options: argparse.Namespace) -> Any:
    """The model's configuration: its own, with the sizes that were asked for."""
    config = MODELS[options.model].Config()
    asked = {
        "dim": options.dim,
        "heads": options.heads,
        "layers": options.layers,
        "dropout": options.dropout,
        "context": options.context,
        "hidden": -(-config.hidden * options.dim // config.dim // 8) * 8,
        "groups": math.gcd(getattr(config, "groups", 1), options.heads),
    }
    return dataclasses.replace(config, **{f.name: asked[f.name] for f in dataclasses.fields(config) if f.name in asked})


def _compare(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Check that the last checkpoint, if there is one, is to be used, and is of the same model and optimiser."""
    saved, asked = vfn.checkpoint.Manager(options.checkpoints), "evaluate" if options.evaluate else "resume"
    last = saved.latest()
    if last is None and options.evaluate:
        parser.error(f"--evaluate: there is no checkpoint in {options.checkpoints}")
    if last is None:
        return
    if not (options.resume or options.evaluate):
        parser.error(
            f"--checkpoints {options.checkpoints} has those of a run that has come to step {last}: --resume, "
            "or another folder"
        )
    try:
        there = saved.restore({"setup": options.setup}, partial=True, exact=False)["setup"]
    except vfn.errors.CheckpointError as error:
        parser.error(f"--{asked}: {error}")
    passed_over = "optimizer" if options.evaluate else None
    given = [
        f"--{name} {value}" for name, value in there.items() if value != options.setup[name] and name != passed_over
    ]
    if given:
        parser.error(f"--{asked}: {options.checkpoints} has checkpoints of a run with {' '.join(given)}")


def _setup(options: argparse.Namespace) -> dict[str, str]:
    """The options that decide what a checkpoint holds, as text."""
    found = {name: str(getattr(options, name)) for name in OF_A_CHECKPOINT}
    found["precision"] = policy_text(options.precision)
    if not hasattr(options.config, "context"):  # sequences may have any length
        found["context"] = "any"
    return found


def _lay_out(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:  # mesh: start
    """Check that parallelisms, mesh and model fit each other."""  # mesh: start
    if options.parallel == "auto":  # mesh: start
        return choosing.check(options, parser)  # mesh: start
    try:  # mesh: start
        options.layout = parallel(options.parallel, options.mesh)  # mesh: start
    except ParallelError as error:  # mesh: start
        parser.error(f"--parallel {error}")  # mesh: start
    if not suits(options.model, options.parallel):  # mesh: start
        parser.error(f"--parallel {options.parallel}: {options.model} has no dims for all of these")  # mesh: start
    n, name = options.layout.zigzag, "--parallel cp-zigzag"  # mesh: start
    if n and options.dropout:  # mesh: start
        parser.error(f"{name}: a token's dropout goes by its place, which is another: --dropout 0")  # mesh: start
    for axis, size in options.mesh.items():  # mesh: start
        if axis == "tp" and options.heads % size:  # mesh: start
            parser.error(f"tp={size} must divide --heads {options.heads}")  # mesh: start
