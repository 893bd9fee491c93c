"""Schedules: functions of the number of steps done (optimisers give a 0-d tensor); the first step is number 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .._core.base.errors import VfnError
from .._core.base.messages import described, report
from .optimizer import Schedule, check_numbers, steps_done


def constant(value: float) -> Schedule:
    """The same rate at every step.

    >>> import vescale_fn as vfn
    >>> vfn.optim.constant(0.1)(7)
    0.1
    """
    check_numbers("constant", value=value)
    return lambda count: value


def linear(start: float, end: float, steps: int) -> Schedule:
    """A straight line from `start` at the first step to `end` after `steps` steps, and `end` from then on.

    Source: `optax.linear_schedule`.

    >>> import vescale_fn as vfn
    >>> [round(float(vfn.optim.linear(1.0, 0.2, 4)(step)), 3) for step in (0, 1, 4, 9)]
    [1.0, 0.8, 0.2, 0.2]
    """
    check_numbers("linear", start=start, end=end, steps=steps)
    _check_lengths("linear", warmup=None, steps=steps)
    return lambda count: start + (end - start) * _part(steps_done(count), 0, steps)


def cosine(peak: float, steps: int, end: float = 0.0) -> Schedule:
    """Half a cosine from `peak` at the first step down to `end` after `steps` steps, and `end` from then on.

    Source: Loshchilov and Hutter, arXiv 1608.03983; `optax.cosine_decay_schedule`.

    >>> import vescale_fn as vfn
    >>> [round(float(vfn.optim.cosine(1.0, 4)(step)), 3) for step in (0, 2, 4, 9)]
    [1.0, 0.5, 0.0, 0.0]
    """
    check_numbers("cosine", peak=peak, steps=steps, end=end)
    _check_lengths("cosine", warmup=None, steps=steps)
    return warmup_cosine(peak, 0, steps, end)


def warmup_cosine(peak: float, warmup: int, steps: int, end: float = 0.0) -> Schedule:
    """A straight line up to `peak` over `warmup` steps, then half a cosine down to `end` after `steps` steps in all.

    The first step already moves: its rate is ``peak / warmup``.

    >>> import vescale_fn as vfn
    >>> rate = vfn.optim.warmup_cosine(1.0, 4, 12)
    >>> [round(float(rate(step)), 3) for step in (0, 1, 3, 4, 8, 12, 20)]
    [0.25, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    check_numbers("warmup_cosine", peak=peak, warmup=warmup, steps=steps, end=end)
    _check_lengths("warmup_cosine", warmup=warmup, steps=steps)

    def rate(count: Any) -> Any:
        done = steps_done(count)
        decayed = end + (peak - end) * (1 + torch.cos(math.pi * _part(done, warmup, steps))) / 2
        return decayed * _warmed(done, warmup) if warmup else decayed

    return rate


def warmup_linear(peak: float, warmup: int, steps: int, end: float = 0.0) -> Schedule:
    """A straight line up to `peak` over `warmup` steps, then one down to `end` after `steps` steps in all.

    >>> import vescale_fn as vfn
    >>> rate = vfn.optim.warmup_linear(1.0, 4, 12)
    >>> [round(float(rate(step)), 3) for step in (0, 3, 4, 8, 12, 20)]
    [0.25, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    check_numbers("warmup_linear", peak=peak, warmup=warmup, steps=steps, end=end)
    _check_lengths("warmup_linear", warmup=warmup, steps=steps)

    def rate(count: Any) -> Any:
        done = steps_done(count)
        decayed = peak + (end - peak) * _part(done, warmup, steps)
        return decayed * _warmed(done, warmup) if warmup else decayed

    return rate


def warmup_stable_decay(peak: float, warmup: int, decay: int, steps: int, end: float = 0.0) -> Schedule:
    """A straight line up to `peak` over `warmup` steps, `peak` until the last `decay` steps of `steps`, then a line to `end`.

    Source: Hu et al. (MiniCPM), arXiv 2404.06395.

    >>> import vescale_fn as vfn
    >>> rate = vfn.optim.warmup_stable_decay(1.0, 2, 4, 12)
    >>> [round(float(rate(step)), 3) for step in (0, 1, 2, 8, 10, 12, 20)]
    [0.5, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    check_numbers("warmup_stable_decay", peak=peak, warmup=warmup, decay=decay, steps=steps, end=end)
    _check_lengths("warmup_stable_decay", warmup=warmup, steps=steps, decay=decay)

    def rate(count: Any) -> Any:
        done = steps_done(count)
        decayed = peak + (end - peak) * _part(done, steps - decay, steps)
        return decayed * _warmed(done, warmup) if warmup else decayed

    return rate


def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after the other.

    Args:
        schedules: each counts its own steps from 0.
        boundaries: the steps at which the second begins, the third, and so on.

    Source: `optax.join_schedules`.

    >>> import vescale_fn as vfn
    >>> rate = vfn.optim.join([vfn.optim.linear(0.0, 1.0, 2), vfn.optim.constant(0.5)], [3])
    >>> [float(rate(step)) for step in (0, 1, 2, 3, 9)]
    [0.0, 0.5, 1.0, 0.5, 0.5]
    """
    schedules, boundaries = list(schedules), list(boundaries)
    wrong = [f"schedules[{i}] is {described(one)}" for i, one in enumerate(schedules) if not callable(one)]
    if len(boundaries) != len(schedules) - 1 or sorted(set(boundaries)) != boundaries:
        wrong.append(
            f"{len(schedules)} schedules need {len(schedules) - 1} boundaries, each larger than the one before, "
            f"but boundaries is {boundaries!r}"
        )
    if wrong:
        fix = "join([linear(0.0, 1e-3, 100), cosine(1e-3, 900)], [100])"
        raise VfnError(report("join", "these schedules cannot be joined", wrong, fix))

    def rate(count: Any) -> Any:
        done = steps_done(count)
        found = torch.as_tensor(schedules[0](done), dtype=torch.float64)
        for begins, schedule in zip(boundaries, schedules[1:]):
            found = torch.where(done < begins, found, schedule(torch.clamp(done - begins, min=0.0)))
        return found

    return rate


def _part(done: Any, begins: int, ends: int) -> Any:
    """How far a count is from one step to another: 0 before, 1 after."""
    return torch.clamp((done - begins) / (ends - begins), 0.0, 1.0)


def _warmed(done: Any, warmup: int) -> Any:
    return torch.clamp((done + 1) / warmup, max=1.0)


def _check_lengths(where: str, warmup: int | None, steps: int, decay: int | None = None) -> None:
    if warmup is None:
        if steps <= 0:
            raise VfnError(report(where, f"needed is steps > 0, but steps={steps}"))
        return
    if not 0 <= warmup < steps:
        raise VfnError(report(where, f"needed is 0 <= warmup < steps, but warmup={warmup} and steps={steps}"))
    if decay is not None and not 0 < decay <= steps - warmup:
        raise VfnError(
            report(
                where, f"needed is 0 < decay <= steps - warmup, but decay={decay}, warmup={warmup} and steps={steps}"
            )
        )
