"""The options of the main job about ``--parallel auto``: what the layout is chosen for. This imports no torch."""

from __future__ import annotations

import argparse

AUTO = "auto"
USUAL = {"dp": 2, "tp": 2}
RANKS = "ranks"  # a mesh of so many, whose axes are chosen


def add(parser: argparse.ArgumentParser) -> None:
    """Let a parser know them."""
    memory = "what a rank may need with --parallel auto: 70GiB, or 90%% of what a device has (all that it has)"
    parser.add_argument("--memory", metavar="SIZE", help=memory)
    what = "what --parallel auto chooses for: h100, a100, b200, cpu, a JSON file, or measured here (what there is)"
    parser.add_argument("--hardware", metavar="NAME", help=what)


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Check that they fit the rest, and fill in the mesh: with ``--parallel auto`` its axes may be left to the choice."""
    options.chosen_axes = False
    if options.parallel != AUTO:
        options.mesh = options.mesh or dict(USUAL)
        for name in ("memory", "hardware"):
            if getattr(options, name) is not None:
                parser.error(f"--{name} is about --parallel auto")
        if RANKS in options.mesh:
            parser.error(f"--mesh {options.mesh[RANKS]} names no axes: dp={options.mesh[RANKS]}, or --parallel auto")
        return
    if options.elastic is not None and options.hardware == "measured":
        what = "--elastic begins again with the same bits, and so in the same layout"
        parser.error(f"{what}: not with --hardware measured, which differs each time")
    if options.mesh is None or RANKS in options.mesh:
        count = (options.mesh or {}).get(RANKS) or options.deterministic or 4
        options.mesh, options.chosen_axes = {"dp": count}, True
