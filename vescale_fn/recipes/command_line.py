"""The command line of the main job. Nothing here imports torch: a mistake is answered at once, before anything is loaded."""

from __future__ import annotations

import argparse
import math
import sys
import tomllib
from pathlib import Path

from vescale_fn._core.base.messages import meant

from . import choosing_options, pipeline_options, process_options  # mesh: start

PROGRAM = "vescale_fn.recipes.train"
EXAMPLES = """\
    python -m vescale_fn.recipes.train                                  4 processes, tensor parallel by data parallel
    python -m vescale_fn.recipes.train --mesh dp=1,tp=1                 one device
    python -m vescale_fn.recipes.train --simulate                       the same mesh, played by this process
    python -m vescale_fn.recipes.train --model mixtral --parallel fsdp+ep --mesh dp=2,ep=2
    python -m vescale_fn.recipes.train --parallel pp+fsdp --mesh pp=2,dp=2 --schedule zb-h1
    python -m vescale_fn.recipes.train --optimizer muon --precision bf16 --accumulate 4
    python -m vescale_fn.recipes.train --config run.toml --checkpoints run --resume
    python -m vescale_fn.recipes.train --config run.toml --checkpoints run --evaluate
    python -m vescale_fn.recipes.train --parallel auto --mesh 4 --memory 2GiB
    torchrun --nproc-per-node 4 -m vescale_fn.recipes.train
"""
MODELS = ("gpt", "llama", "mixtral")
AXES = ("pp", "replica", "dp", "cp", "ep", "tp")  # those of a mesh: major first  # mesh: start
RATES = {
    "adamw": 4e-3,
    "lion": 1e-3,
    "muon": 1e-2,
    "adafactor": 5e-2,
    "sgd": 3e-1,
}  # optimisers: the peak that suits them
CHECKED = 5  # --check: so many steps, whose losses may differ by a bit more than sums in another order explain
TRACED = (3, 6)  # --profile: the steps between these

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
POLICY = "a policy like params=f32,compute=bf16,reduce=f32"


def read(argv: list[str]) -> argparse.Namespace:
    """The command line, with what a ``--config`` file adds to it; checked as far as its own numbers go."""
    parser = make_parser()
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
    _check_going_on(options, parser)
    choosing_options.check(options, parser)  # mesh: start
    virtual, ranks = options.deterministic, math.prod(options.mesh.values())  # mesh: start
    if virtual not in (None, ranks):  # mesh: start
        parser.error(f"--deterministic {virtual}: the mesh has {ranks} ranks, and must have as many")  # mesh: start
    process_options.check(options, parser)  # mesh: start
    pipeline_options.check(options, parser)  # mesh: start
    options.lr = RATES[options.optimizer] if options.lr is None else options.lr
    return options


def _check_going_on(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Check what is asked of a run that has checkpoints."""
    for name in ("resume", "evaluate"):
        if getattr(options, name) and not options.checkpoints:
            parser.error(f"--{name} needs --checkpoints FOLDER, where they are")
        if getattr(options, name) and options.check:
            parser.error(f"--check compares the first steps of a run: not with --{name}")
    if options.exact and not options.resume:
        parser.error("--exact is about a run that goes on: it needs --resume")


def make_parser() -> argparse.ArgumentParser:
    """What reads the command line, and says what is wrong with it."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        usage="%(prog)s [options]; --help lists them",
        description="A language model learns real text.",
        epilog=f"examples:\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="options in TOML (steps = 500); the command line wins")
    parser.add_argument("--model", choices=MODELS, default="llama", help="which model (llama)")
    parser.add_argument("--parallel", default="dp+tp", metavar="NAMES", help="names, or auto (dp+tp)")  # mesh: start
    parser.add_argument("--mesh", type=mesh_of, help="axes and sizes (dp=2,tp=2)")  # mesh: start
    parser.add_argument("--simulate", action="store_true", help="play all ranks in this process")  # mesh: start
    same = "the same bits, whatever number of processes plays the N ranks; with their digest"  # mesh: start
    parser.add_argument("--deterministic", type=int, metavar="N", help=same)  # mesh: start
    choosing_options.add(parser)  # mesh: start
    process_options.add(parser)  # mesh: start
    pipeline_options.add(parser)  # mesh: start
    parser.add_argument("--optimizer", choices=RATES, default="adamw", help="which optimiser (adamw)")
    rates = ", ".join(f"{name} {rate:g}" for name, rate in RATES.items())
    parser.add_argument("--lr", type=float, metavar="N", help=f"peak learning rate ({rates})")
    parser.add_argument(
        "--precision",
        type=_precision,
        default="fp32",
        metavar="NAME",
        help=f"{', '.join(PRECISIONS)}, or {POLICY} (fp32)",
    )
    parser.add_argument(
        "--check", action="store_true", help=f"run the first {CHECKED} steps on one device too, and compare the losses"
    )
    parser.add_argument(
        "--data", metavar="PATH", help="text to learn: a file or a folder (the .py files of Python's standard library)"
    )
    for name, (value, text) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, metavar="N", help=f"{text} ({value})")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where to compute (on GPUs, if there are enough)")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="save there now and then, at the end, and on SIGTERM")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint, if there is one")
    parser.add_argument("--exact", action="store_true", help="resume only where the run may go on with the same bits")
    parser.add_argument(
        "--digest", action="store_true", help="print a hash of parameters and optimiser state at the end"
    )
    parser.add_argument("--evaluate", action="store_true", help="only judge the last checkpoint: no training")
    parser.add_argument("--metrics", metavar="FILE", help="write each step's numbers, a line of JSON each")
    parser.add_argument("--tensorboard", metavar="FOLDER", help="write them for TensorBoard")
    parser.add_argument(
        "--profile", metavar="FILE", help=f"trace steps {TRACED[0] + 1} to {TRACED[1]}, for chrome://tracing"
    )
    parser.add_argument("--save-plot", metavar="FILE", help="draw the losses, with matplotlib")
    return parser


def _precision(text: str) -> str:
    """A name of `PRECISIONS`, or what may be a policy: what it says is read where torch is there."""
    if text not in PRECISIONS and "=" not in text:
        raise argparse.ArgumentTypeError(f"{text!r}: write {', '.join(PRECISIONS)}, or {POLICY}")
    return text


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


def mesh_of(text: str) -> dict[str, int]:  # mesh: start
    """``dp=2,tp=2`` as axes and sizes, in the order in which they nest."""  # mesh: start
    if text.isdigit() and int(text):  # mesh: start
        return {choosing_options.RANKS: int(text)}  # mesh: start
    sizes: dict[str, int] = {}  # mesh: start
    for part in text.split(","):  # mesh: start
        name, _, size = part.partition("=")  # mesh: start
        if name not in AXES or name in sizes or not size.isdigit() or int(size) < 1:  # mesh: start
            known = f"write it like dp=2,tp=2, with axes of {', '.join(AXES)}"  # mesh: start
            raise argparse.ArgumentTypeError(f"{part!r} in {text!r}: {known}")  # mesh: start
        sizes[name] = int(size)  # mesh: start
    return {name: sizes[name] for name in AXES if name in sizes}  # mesh: start


# Under `python -m` a package is imported before its program runs, and "-m" stands for the path: read at this first moment.
_UNDER_M = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m") == PROGRAM
GIVEN = read(sys.argv[1:]) if _UNDER_M else None
