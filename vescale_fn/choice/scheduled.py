"""The schedule of a pipeline that leaves it open, `schedule="auto"`: which of them are worth pricing, and a step with one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import schedules
from .._core import torch_internals
from .._core.base import context
from ..schedules import Costs, Schedule

_CHUNKS = (2, 3, 4)  # stages of a rank, where they are interleaved
_PRICED = 3  # schedules, of each layout of the arguments
_CLOSE = 0.01  # of the time: what is nearer is as fast, and the one that holds least is priced first
_TIGHT = 2  # times what is predicted to be held, of which W, apart from B, makes more: then the leanest is priced, too
_SEARCHED = 1_000  # tasks at most of a schedule that is looked for: the time goes with them


def known(ranks: int, parts: int) -> dict[str, Schedule]:
    """The named schedules for so many ranks and microbatches, as `vfn.pipeline` is asked for each."""
    found = {
        "1f1b": schedules.one_f_one_b(ranks, parts),
        "gpipe": schedules.gpipe(ranks, parts),
        "zb-h1": schedules.zb_h1(ranks, parts),
        "zb-h2": schedules.zb_h2(ranks, parts),
        "zbv": schedules.zbv(ranks, parts),
    }
    if parts >= 2 * ranks:
        found["dualpipev"] = schedules.dualpipev(ranks, parts)
    for chunks in _CHUNKS:
        found[f"interleaved, chunks={chunks}"] = schedules.interleaved(ranks, parts, chunks)
    return found


def worth_pricing(
    ranks: int, parts: int, played: Callable[[Schedule], Any], memory: float, besides: float
) -> dict[str, Schedule]:
    """The few schedules that are predicted to be the fastest of those that fit; or the leanest, where none does.

    Args:
        ranks, parts: of the mesh, and microbatches.
        played: what a schedule is predicted to take with the stages that are best for it: ``seconds``, the bytes ``held`` on
            the rank that holds most, the ``costs`` of its stages; None where it cannot have these.
        memory: that a rank may need.
        besides: the bytes of it that are there under any schedule, and not among those ``held``.
    """
    options = known(ranks, parts)
    times = {name: found for name, one in options.items() if (found := played(one)) is not None}
    one_each = times.get("1f1b")
    if one_each is not None and 3 * ranks * parts <= _SEARCHED:
        options["found"] = _found(one_each.costs, ranks, parts)
        times["found"] = played(options["found"])
    fitting = [name for name, one in times.items() if one.held + besides <= memory]
    if not fitting:
        return {name: options[name] for name in sorted(times, key=lambda name: times[name].held)[:1]}
    order = sorted(fitting, key=lambda name: times[name].seconds)
    close = [name for name in order if times[name].seconds <= times[order[0]].seconds * (1 + _CLOSE)]
    kept = dict[str, Schedule]()
    for name in (min(close, key=lambda name: times[name].held), *order):
        if len(kept) < _PRICED and options[name] not in kept.values():  # the one that is found may be a named one
            kept[name] = options[name]
    if _TIGHT * (max(times[name].held for name in kept) + besides) > memory:
        leanest = min(times, key=lambda name: times[name].held)
        kept.setdefault(leanest, options[leanest])
    return kept


@functools.lru_cache(maxsize=64)
def _found(costs: Costs, ranks: int, parts: int) -> Schedule:
    """What `vfn.pipeline` would find by itself, in no more memory than 1F1B has."""
    return schedules.auto(costs, ranks, parts, memory=min(ranks, parts))


class Scheduled(NamedTuple):
    """A schedule that was chosen, and the axis of the pipeline that it is for."""

    axis: str
    schedule: Schedule

    def __repr__(self) -> str:
        return f"{self.axis} {self.schedule.placement} {self.schedule.order}"  # of which ranks compare digests


def scheduled(step: Callable[..., Any], chosen: Scheduled | None) -> Callable[..., Any]:
    """The step, whose pipeline has this schedule, where it leaves open which; with None itself."""
    if chosen is None:
        return step
    axis, schedule = chosen
    key = axis, schedule.ranks, schedule.microbatches

    @torch_internals.not_compiled
    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context.setting(scheduled={**context.scheduled(), key: schedule}):
            return step(*args, **kwargs)

    run.chosen = chosen  # type: ignore[attr-defined]
    return run


def chosen_of(step: Callable[..., Any] | None) -> Scheduled | None:
    """The schedule that was chosen for a step; None where it is the step's own."""
    return getattr(step, "chosen", None)
