"""The command line of the main job, and configuration files that say the same in TOML."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import torch

import vescale_fn as vfn
from vescale_fn._core.base.messages import meant

from . import data, gpt, llama, metrics, mixtral, report
from .models import suits  # mesh: start
from .optimizers import OPTIMIZERS
from .parallel import AXES, ParallelError, parallel  # mesh: start

MODELS: dict[str, Any] = {"gpt": gpt, "llama": llama, "mixtral": mixtral}
NUMBERS = {
    "steps": (240, "steps of training"),
    "batch": (16, "windows of text in a step"),
    "context": (128, "bytes in a window"),
    "accumulate": (1, "parts of a batch that are computed one after the other"),
    "dim": (128, "width of the model"),
    "heads": (4, "attention heads"),
    "layers": (2, "blocks"),
    "dropout": (0.05, "dropout rate"),
    "seed": (0, "seed of parameters, batches, dropout and the sample"),
    "sample": (240, "bytes to write at the end"),
    "evaluate-every": (60, "steps between two losses on held-out text"),
    "save-every": (60, "steps between two checkpoints"),
    "keep": (3, "checkpoints to keep"),
}
AT_LEAST_ONE = "steps batch accumulate context dim heads layers evaluate-every save-every keep".split()
PRECISIONS = {
    "fp32": "params=f32",
    "bf16": "params=f32,compute=bf16",
    "fp16": "params=f32,compute=f16",
    "fp64": "params=f64",
}
OF_A_CHECKPOINT = ("model", "dim", "heads", "layers", "context", "precision", "optimizer")
TRACED = (3, 6)  # --profile: the steps between these


def parse(argv: list[str] | None, doc: str, checked: int) -> argparse.Namespace:
    """The command line, and what a ``--config`` file adds to it, checked. `doc` describes the program."""
    parser = _parser(doc, checked)
    argv = sys.argv[1:] if argv is None else argv
    first, _ = parser.parse_known_args(argv)
    options, unknown = parser.parse_known_args([*_from_file(first.config, parser), *argv])
    for text in unknown:
        known = [f"--{name.replace('_', '-')}" for name in vars(options)]
        parser.error(f"{text} is no option{meant(text.partition('=')[0], known)}")
    for name in AT_LEAST_ONE:
        if getattr(options, name.replace("-", "_")) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.dim % (2 * options.heads):
        parser.error(f"--dim {options.dim} must be an even number for each of --heads {options.heads}")
    if options.profile and (options.evaluate or options.steps <= TRACED[0]):
        parser.error(
            f"--profile traces steps {TRACED[0] + 1} to {TRACED[1]}: it needs more --steps, and not --evaluate"
        )
    if options.lr is not None and not 0 < options.lr < math.inf:
        parser.error(f"--lr {options.lr} must be above 0")
    if not 0 <= options.dropout < 1:
        parser.error(f"--dropout {options.dropout} must be at least 0 and below 1")
    if options.batch % options.accumulate:
        parser.error(f"--accumulate {options.accumulate} must divide --batch {options.batch}")
    for name in ("resume", "evaluate"):
        if getattr(options, name) and not options.checkpoints:
            parser.error(f"--{name} needs --checkpoints FOLDER, where they are")
        if getattr(options, name) and options.check:
            parser.error(f"--check compares the first steps of a run: not with --{name}")
    options.lr = OPTIMIZERS[options.optimizer][1] if options.lr is None else options.lr
    options.config = _sizes(options)
    options.setup = _setup(options)
    if options.checkpoints:
        _compare(options, parser)
    _lay_out(options, parser)  # mesh: start
    try:
        data.read_text(data.find_files(options.data), smallest=options.context + 1)
        if options.save_plot:
            report.plotting()
        if options.tensorboard:
            metrics.writer()
    except (data.DataError, ImportError) as error:
        parser.error(str(error))
    wanted, there = 1, torch.cuda.device_count()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", math.prod(options.mesh.values())))  # mesh: start
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


def _parser(doc: str, checked: int) -> argparse.ArgumentParser:
    description, examples, *_ = f"{doc}\n\n".split("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m vescale_fn.recipes.train",
        usage="%(prog)s [options]; --help lists them",
        description=description.split(": ")[-1].capitalize(),
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="options in TOML (steps = 500); the command line wins")
    parser.add_argument("--model", choices=MODELS, default="llama", help="which model (llama)")
    parser.add_argument("--parallel", default="dp+tp", metavar="NAMES", help="parallelisms (dp+tp)")  # mesh: start
    parser.add_argument("--mesh", type=mesh_of, default="dp=2,tp=2", help="axes and sizes (dp=2,tp=2)")  # mesh: start
    parser.add_argument("--simulate", action="store_true", help="play all ranks in this process")  # mesh: start
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="which optimiser (adamw)")
    rates = ", ".join(f"{name} {rate:g}" for name, (_, rate) in OPTIMIZERS.items())
    parser.add_argument("--lr", type=float, metavar="N", help=f"peak learning rate ({rates})")
    parser.add_argument(
        "--precision",
        type=precision_of,
        default="fp32",
        metavar="NAME",
        help=f"{', '.join(PRECISIONS)}, or {_POLICY} (fp32)",
    )
    parser.add_argument(
        "--check", action="store_true", help=f"run the first {checked} steps on one device too, and compare the losses"
    )
    parser.add_argument(
        "--data", metavar="PATH", help="text to learn: a file or a folder (the .py files of Python's standard library)"
    )
    for name, (value, text) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, metavar="N", help=f"{text} ({value})")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where to compute (on GPUs, if there are enough)")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="save there now and then, at the end, and on SIGTERM")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint, if there is one")
    parser.add_argument("--evaluate", action="store_true", help="only judge the last checkpoint: no training")
    parser.add_argument("--metrics", metavar="FILE", help="write each step's numbers, a line of JSON each")
    parser.add_argument("--tensorboard", metavar="FOLDER", help="write them for TensorBoard")
    parser.add_argument(
        "--profile", metavar="FILE", help=f"trace steps {TRACED[0] + 1} to {TRACED[1]}, for chrome://tracing"
    )
    parser.add_argument("--save-plot", metavar="FILE", help="draw the losses, with matplotlib")
    return parser


_POLICY = "a policy like params=f32,compute=bf16,reduce=f32"


def precision_of(text: str) -> Any:
    """A policy by its name in `PRECISIONS`, or by what `vfn.precision.policy` takes.

    >>> precision_of("bf16")
    Policy(params=f32,compute=bf16,reduce=f32,output=f32)
    """
    try:
        policy = vfn.precision.policy(PRECISIONS.get(text, text))
    except vfn.errors.VfnError:
        raise argparse.ArgumentTypeError(f"{text!r}: write {', '.join(PRECISIONS)}, or {_POLICY}") from None
    if torch.float16 in (policy.params, policy.output):
        raise argparse.ArgumentTypeError(f"{text!r}: float16 is for computing alone; write fp16, or {_POLICY}")
    return policy


def policy_text(policy: Any) -> str:
    """The same policy as text.

    >>> policy_text(precision_of("bf16"))
    'params=f32,compute=bf16,reduce=f32,output=f32'
    """
    return str(policy).removeprefix("Policy(").removesuffix(")")


def _from_file(path: str | None, parser: argparse.ArgumentParser) -> list[str]:
    """The options in a TOML file, as a command line has them."""
    if path is None:
        return []
    try:
        given = tomllib.loads(Path(path).read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        parser.error(f"--config {path}: {error}")
    known = vars(parser.parse_args([]))
    argv: list[str] = []
    for key, value in given.items():
        name = key.replace("-", "_")
        if name in known and isinstance(value, (dict, list)):
            parser.error(f"--config {path}: {key} should be one value, written as on the command line")
        if name not in known:
            names = sorted(set(known) - {"config"})
            parser.error(
                f"--config {path}: {key} is no option{meant(name, names) or '; write one of ' + ', '.join(names)}"
            )
        flag, wanted = isinstance(value, bool), isinstance(known[name], bool)
        if flag != wanted:
            said = "true or false" if wanted else "a value"
            parser.error(f"--config {path}: {key} = {str(value).lower()} should be {said}")
        option = f"--{name.replace('_', '-')}"
        argv += [option] * value if flag else [option, str(value)]
    return argv


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
        there = saved.restore({"setup": options.setup}, partial=True)["setup"]
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
    try:  # mesh: start
        options.layout = parallel(options.parallel, options.mesh)  # mesh: start
    except ParallelError as error:  # mesh: start
        parser.error(f"--parallel {error}")  # mesh: start
    if not suits(options.model, options.parallel):  # mesh: start
        parser.error(f"--parallel {options.parallel}: {options.model} has no dims for all of these")  # mesh: start
    n, name = options.layout.zigzag, "--parallel cp-zigzag"  # mesh: start
    if n and options.dropout:  # mesh: start
        parser.error(f"{name}: a token's dropout goes by its place, which is another: --dropout 0")  # mesh: start
    if n and options.context % (2 * n):  # mesh: start
        parser.error(f"{name}: twice cp={n} must divide --context {options.context}")  # mesh: start
    for axis, size in options.mesh.items():  # mesh: start
        if axis == "tp" and options.heads % size:  # mesh: start
            parser.error(f"tp={size} must divide --heads {options.heads}")  # mesh: start


def mesh_of(text: str) -> dict[str, int]:  # mesh: start
    """``dp=2,tp=2`` as axes and sizes, in the order in which they nest."""  # mesh: start
    sizes: dict[str, int] = {}  # mesh: start
    for part in text.split(","):  # mesh: start
        name, _, size = part.partition("=")  # mesh: start
        if name not in AXES or name in sizes or not size.isdigit() or int(size) < 1:  # mesh: start
            known = f"write it like dp=2,tp=2, with axes of {', '.join(AXES)}"  # mesh: start
            raise argparse.ArgumentTypeError(f"{part!r} in {text!r}: {known}")  # mesh: start
        sizes[name] = int(size)  # mesh: start
    return {name: sizes[name] for name in AXES if name in sizes}  # mesh: start
