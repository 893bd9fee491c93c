"""The options of the main job about a pipeline: parts of a batch, and which stage works on which of them when. This imports no
torch."""

from __future__ import annotations

import argparse

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipev", "auto")
TWO_STAGES = ("zbv", "dualpipev")  # on each rank


def add(parser: argparse.ArgumentParser) -> None:
    """Let a parser know them."""
    parts = "parts of a batch that go through the stages of --parallel pp+... (two for each rank along pp)"
    parser.add_argument("--microbatches", type=int, metavar="N", help=parts)
    when = "which stage works on which of them when: " + ", ".join(SCHEDULES) + ", the fastest that is found (1f1b)"
    parser.add_argument("--schedule", choices=SCHEDULES, metavar="NAME", help=when)
    stages = "stages of each rank along pp under --schedule interleaved (2)"
    parser.add_argument("--chunks", type=int, metavar="N", help=stages)


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Check that they fit the rest, fill in what is not given, and note what `vfn.pipeline` takes of them."""
    options.pipeline = {}
    ranks, parallel = options.mesh.get("pp", 1), f"--parallel {options.parallel}"
    if "pp" not in options.parallel.split("+"):
        for name in ("microbatches", "schedule", "chunks"):
            if getattr(options, name) is not None:
                parser.error(f"--{name} is about a pipeline: it needs --parallel pp+... and --mesh pp=2,...")
        return
    if ranks < 2:
        parser.error(f"{parallel} needs ranks for at least two stages: --mesh pp=2,...")
    if options.accumulate > 1:
        parser.error(
            f"{parallel}: a pipeline has the parts of a batch already, --microbatches N: not with --accumulate"
        )
    options.schedule = options.schedule or "1f1b"
    options.microbatches = 2 * ranks if options.microbatches is None else options.microbatches
    least = 2 * ranks if options.schedule == "dualpipev" else 1
    if options.microbatches < least:
        parser.error(f"--microbatches {options.microbatches} must be at least {least}")
    if options.batch % options.microbatches:
        parser.error(f"--microbatches {options.microbatches} must divide --batch {options.batch}")
    if options.schedule == "interleaved":
        options.chunks = 2 if options.chunks is None else options.chunks
    elif options.chunks is not None:
        parser.error(f"--chunks is about --schedule interleaved, and here is {options.schedule}")
    if options.chunks is not None and options.chunks < 1:
        parser.error(f"--chunks {options.chunks} must be at least 1")
    stages = ranks * (options.chunks or (2 if options.schedule in TWO_STAGES else 1))
    if stages > options.layers + 1:
        most = f"--layers {options.layers} are cut into {options.layers + 1} at most"
        parser.error(f"--schedule {options.schedule} on pp={ranks} has {stages} stages, and {most}")
    options.pipeline = {name: getattr(options, name) for name in ("microbatches", "schedule", "chunks")}
