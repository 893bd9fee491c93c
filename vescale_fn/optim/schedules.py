"""Schedules: functions of the number of steps done (optimisers give a 0-d tensor); the first step is number 0.

Those of optax are here under optax's names, with its arguments and values; the others have shorter ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .._core.base import front_door
from .._core.base.errors import VfnError
from .._core.base.messages import described, report
from .optimizer import Schedule, check_numbers, steps_done

__all__ = [
    "constant",
    "constant_schedule",
    "cosine",
    "cosine_decay_schedule",
    "join",
    "join_schedules",
    "linear",
    "linear_schedule",
    "warmup_cosine",
    "warmup_cosine_decay_schedule",
    "warmup_linear",
    "warmup_stable_decay",
]

__dir__ = front_door.listing(__name__)
__getattr__ = front_door.hints(__name__)


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


constant_schedule = constant
join_schedules = join


def linear_schedule(init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """A straight line between two values over `transition_steps` steps, after `transition_begin` steps of the first.

    Source: `optax.linear_schedule`.

    >>> import vescale_fn as vfn
    >>> rate = vfn.optim.schedules.linear_schedule(1.0, 0.0, 4, 2)
    >>> [round(float(rate(step)), 3) for step in (0, 2, 3, 6, 9)]
    [1.0, 1.0, 0.75, 0.0, 0.0]
    """
    check_numbers("linear_schedule", init_value=init_value, end_value=end_value, transition_begin=transition_begin)
    _check_lengths("linear_schedule", None, transition_steps, called="transition_steps")
    line = linear(init_value, end_value, transition_steps)
    return lambda count: line(torch.clamp(steps_done(count) - transition_begin, min=0.0))


def cosine_decay_schedule(init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0) -> Schedule:
    """Half a cosine, to the power `exponent`, from `init_value` down to ``alpha * init_value``.

    Source: `optax.cosine_decay_schedule`; Loshchilov and Hutter, arXiv 1608.03983.

    >>> import vescale_fn as vfn
    >>> rate = vfn.optim.schedules.cosine_decay_schedule(1.0, 4, alpha=0.5)
    >>> [round(float(rate(step)), 3) for step in (0, 2, 4, 9)]
    [1.0, 0.75, 0.5, 0.5]
    """
    check_numbers("cosine_decay_schedule", init_value=init_value, alpha=alpha, exponent=exponent)
    _check_lengths("cosine_decay_schedule", None, decay_steps, called="decay_steps")

    def rate(count: Any) -> Any:
        decayed = (1 + torch.cos(math.pi * _part(steps_done(count), 0, decay_steps))) / 2
        return init_value * ((1 - alpha) * decayed**exponent + alpha)

    return rate


def warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> Schedule:
    """A straight line up, then half a cosine down to `end_value` after `decay_steps` steps in all, those of the line included.

    Beside `warmup_cosine` the first step has the rate `init_value`, as in optax, and not a part of the peak.

    Source: `optax.warmup_cosine_decay_schedule`.

    >>> import vescale_fn as vfn
    >>> rate = vfn.optim.schedules.warmup_cosine_decay_schedule(0.0, 1.0, 4, 12)
    >>> [round(float(rate(step)), 3) for step in (0, 1, 4, 8, 12, 20)]
    [0.0, 0.25, 1.0, 0.5, 0.0, 0.0]
    """
    where = "warmup_cosine_decay_schedule"
    check_numbers(where, init_value=init_value, peak_value=peak_value, end_value=end_value, exponent=exponent)
    _check_lengths(where, warmup_steps, decay_steps, called="decay_steps")
    alpha = 0.0 if peak_value == 0 else end_value / peak_value
    fall = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha, exponent)
    return join([linear(init_value, peak_value, warmup_steps), fall], [warmup_steps]) if warmup_steps else fall


def _part(done: Any, begins: int, ends: int) -> Any:
    """How far a count is from one step to another: 0 before, 1 after."""
    return torch.clamp((done - begins) / (ends - begins), 0.0, 1.0)


def _warmed(done: Any, warmup: int) -> Any:
    return torch.clamp((done + 1) / warmup, max=1.0)


def _check_lengths(where: str, warmup: int | None, steps: int, decay: int | None = None, called: str = "steps") -> None:
    if warmup is None:
        if steps <= 0:
            raise VfnError(report(where, f"needed is {called} > 0, but {called}={steps}"))
        return
    if not 0 <= warmup < steps:
        of = called.replace("decay", "warmup") if called != "steps" else "warmup"
        raise VfnError(report(where, f"needed is 0 <= {of} < {called}, but {of}={warmup} and {called}={steps}"))
    if decay is not None and not 0 < decay <= steps - warmup:
        raise VfnError(
            report(
                where, f"needed is 0 < decay <= steps - warmup, but decay={decay}, warmup={warmup} and steps={steps}"
            )
        )
