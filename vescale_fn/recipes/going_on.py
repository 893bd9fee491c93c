"""The main job where processes are lost, come back, or are others in number: its steps, taken by `vfn.elastic`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import vescale_fn as vfn

from . import report

SPARE = {"losses": [], "agrees": True, "digest": None, "interrupted": False}


def run(make: Callable[..., Any], checkpoints: Callable[..., Any], opt: argparse.Namespace) -> dict[str, Any]:
    """The whole job, on each process that there is; begun again on each where some are lost.

    Args:
        make: makes the job, once it is known how many processes play its ranks: a `train.TrainingJob`.
        checkpoints: makes what saves it, or None.
        opt: its options.
    """
    jobs: list[Any] = []
    journals: list[report.Journal] = []

    def begin() -> Any:
        jobs.append(make(opt))
        return jobs[0].begin()

    def step(at: Any, i: int) -> tuple[Any, Any]:
        if not journals:
            journals.append(jobs[0].journal(i))
            if i:
                jobs[0].say(f"resumed   after step {i}")
        journals[0].ready()
        at, value = jobs[0].step(at)
        return at, (at, value)

    at = vfn.elastic(
        step,
        begin,
        lambda i: i,
        steps=opt.steps,
        virtual=opt.deterministic,
        manager=checkpoints(opt),
        save_every=opt.save_every if opt.checkpoints else None,
        on_step=lambda i, done: jobs[0].after(journals[0], *done),
        exact=opt.exact or None,
    )
    if at is None:
        return SPARE
    journal = journals[0] if journals else jobs[0].journal(at.done)
    with journal:
        if not journals:  # nothing was left to do
            jobs[0].evaluated(journal, at)
    return jobs[0].ended(journal, at)
