"""The command line of the main job, and configuration files that say the same in TOML."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import tomllib
from pathlib import Path
from typing import Any

import torch

from . import data, gpt, llama, metrics, mixtral, report
from .models import suits  # mesh: start
from .parallel import AXES, ParallelError, parallel  # mesh: start

MODELS: dict[str, Any] = {"gpt": gpt, "llama": llama, "mixtral": mixtral}
NUMBERS = {
    "steps": (240, "steps of training"),
    "batch": (16, "windows of text in a step"),
    "context": (128, "bytes in a window"),
    "lr": (4e-3, "peak learning rate"),
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
AT_LEAST_ONE = ("steps", "batch", "context", "dim", "heads", "layers", "evaluate-every", "save-every", "keep")
TRACED = (3, 6)  # --profile: the steps between these


def parse(argv: list[str] | None, doc: str, checked: int) -> argparse.Namespace:
    """The command line, and what a ``--config`` file adds to it, checked. `doc` describes the program."""
    parser = _parser(doc, checked)
    argv = sys.argv[1:] if argv is None else argv
    first, _ = parser.parse_known_args(argv)
    options = parser.parse_args([*_from_file(first.config, parser), *argv])
    for name in AT_LEAST_ONE:
        if getattr(options, name.replace("-", "_")) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.dim % (2 * options.heads):
        parser.error(f"--dim {options.dim} must be an even number for each of --heads {options.heads}")
    if not 0 <= options.dropout < 1:
        parser.error(f"--dropout {options.dropout} must be at least 0 and below 1")
    if options.resume and not options.checkpoints:
        parser.error("--resume needs --checkpoints FOLDER, where they are")
    options.config = _sizes(options)
    _lay_out(options, parser)  # mesh: start
    try:
        data.read_text(data.find_files(options.data), smallest=options.context + 1)
        if options.save_plot:
            report.plotting()
        if options.tensorboard:
            metrics.writer()
    except (data.DataError, ImportError) as error:
        parser.error(str(error))
    wanted = 1
    wanted = math.inf if options.simulate else math.prod(options.mesh.values())  # mesh: start
    options.device = options.device or ("cuda" if torch.cuda.device_count() >= wanted else "cpu")
    return options


def _parser(doc: str, checked: int) -> argparse.ArgumentParser:
    description, examples, *_ = f"{doc}\n\n".split("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m vescale_fn.recipes.train", description=description.split(": ")[-1].capitalize(),
        epilog=f"examples:\n{examples}", formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)  # fmt: skip
    parser.add_argument("--config", metavar="FILE", help="options in TOML (steps = 500); the command line wins")
    parser.add_argument("--model", choices=MODELS, default="llama", help="which model (llama)")
    parser.add_argument("--parallel", default="dp+tp", metavar="NAMES", help="parallelisms (dp+tp)")  # mesh: start
    parser.add_argument("--mesh", type=mesh_of, default="dp=2,tp=2", help="axes and sizes (dp=2,tp=2)")  # mesh: start
    parser.add_argument("--simulate", action="store_true", help="play all ranks in this process")  # mesh: start
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
    parser.add_argument("--metrics", metavar="FILE", help="write each step's numbers, a line of JSON each")
    parser.add_argument("--tensorboard", metavar="FOLDER", help="write them for TensorBoard")
    parser.add_argument(
        "--profile", metavar="FILE", help=f"trace steps {TRACED[0] + 1} to {TRACED[1]}, for chrome://tracing"
    )
    parser.add_argument("--save-plot", metavar="FILE", help="draw the losses, with matplotlib")
    return parser


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
        if name not in known or isinstance(value, (dict, list)):
            names = ", ".join(sorted(set(known) - {"config"}))
            parser.error(f"--config {path}: {key} is no option; write one of {names}")
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
    asked = {"dim": options.dim, "heads": options.heads, "layers": options.layers, "dropout": options.dropout,
             "context": options.context, "hidden": -(-config.hidden * options.dim // config.dim // 8) * 8,
             "groups": math.gcd(getattr(config, "groups", 1), options.heads)}  # fmt: skip
    return dataclasses.replace(config, **{f.name: asked[f.name] for f in dataclasses.fields(config) if f.name in asked})


def _lay_out(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:  # mesh: start
    """Check that parallelisms, mesh and model fit each other."""  # mesh: start
    try:  # mesh: start
        options.layout = parallel(options.parallel, options.mesh)  # mesh: start
    except ParallelError as error:  # mesh: start
        parser.error(f"--parallel {error}")  # mesh: start
    if not suits(options.model, options.parallel):  # mesh: start
        parser.error(f"--parallel {options.parallel}: {options.model} has no dims for all of these")  # mesh: start
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
