"""The options of the main job about processes: how many play the ranks, and what if they are lost. This imports no torch."""

from __future__ import annotations

import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Let a parser know them."""
    few = "so many processes play the ranks of --deterministic (one each)"
    parser.add_argument("--processes", type=int, metavar="N", help=few)
    lost = "go on with the same bits where processes are lost: all start again, N times at most (under torchrun as it says)"
    parser.add_argument("--elastic", type=int, metavar="N", help=lost)


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Check that they fit each other, and the rest; a run that goes on does so from its checkpoints, too."""
    for name in ("elastic", "processes"):
        asked = getattr(options, name)
        if asked is not None and options.deterministic is None:
            parser.error(f"--{name} needs --deterministic N, the number of ranks that processes play")
        if asked is not None and asked < 1:
            parser.error(f"--{name} must be at least 1")
    if options.processes is not None and options.simulate:
        parser.error("--processes are real ones: not with --simulate, where one plays all ranks")
    if options.elastic is not None:
        for name in ("simulate", "check", "profile", "evaluate"):
            if getattr(options, name):
                parser.error(f"--elastic is for training on processes: not with --{name}")
        options.resume = True
    elif options.processes is not None and options.deterministic % options.processes:
        parser.error(f"--processes {options.processes} must divide --deterministic {options.deterministic}")
