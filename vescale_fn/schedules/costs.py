"""How long the tasks of a pipeline take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from .._core.base.errors import ScheduleError
from .._core.base.messages import report
from .actions import Action, Task, actions_of


@dataclass(frozen=True)
class Costs:
    """How long tasks and transfers take, in one unit of time for all: seconds, or what a profile counts.

    Args:
        F: the forward pass of one microbatch through a stage: a number for all stages, or one for each.
        B: the gradient of a stage's inputs, likewise.
        W: the gradient of its parameters, likewise. "BW" takes B + W.
        p2p: the time that a value takes from one rank to another: a number, or one for each boundary of two stages. Those
            from one stage to the next go one after the other. Nothing is sent between stages of one rank.
        blocking: whether a rank waits until what it has sent has arrived (as `Schedule.check` says); else it goes on at once.
        overlap: for an `Overlap`, which part of the shorter of both is hidden behind the longer: 1 is all of it, 0 nothing.

    >>> import vescale_fn as vfn
    >>> vfn.schedules.one_f_one_b(4, 8).simulate(vfn.schedules.Costs(F=1, B=1, W=1)).makespan
    33
    >>> vfn.schedules.one_f_one_b(4, 8).simulate(vfn.schedules.Costs(F=[1, 1, 1, 2], B=[1, 1, 1, 2])).makespan
    49
    """

    F: float | Sequence[float] = 1
    B: float | Sequence[float] = 1
    W: float | Sequence[float] = 1
    p2p: float | Sequence[float] = 0
    blocking: bool = False
    overlap: float = 0

    def __post_init__(self) -> None:
        for name in ("F", "B", "W", "p2p"):
            value = getattr(self, name)
            if not isinstance(value, Real):
                object.__setattr__(self, name, tuple(value))

    def of(self, stages: int) -> StageCosts:
        """The same costs with a number for each of so many stages, checked."""
        lengths = {"F": stages, "B": stages, "W": stages, "p2p": stages - 1}
        each, failures = {}, []
        for name, length in lengths.items():
            value = getattr(self, name)
            each[name] = value if isinstance(value, tuple) else (value,) * length
            if len(each[name]) != length:
                what = "stages" if name != "p2p" else "boundaries of stages"
                failures.append(f"{name} has {len(each[name])} entries for {length} {what}")
            elif not all(x >= 0 for x in each[name]):
                failures.append(f"{name} is {value}: no time is negative")
        if not 0 <= self.overlap <= 1:
            failures.append(f"overlap is {self.overlap}: it is a part, from 0 to 1")
        if failures:
            raise ScheduleError(report("Costs", f"they do not fit a schedule of {stages} stages", failures))
        both = tuple(b + w for b, w in zip(each["B"], each["W"]))
        return StageCosts({"F": each["F"], "B": each["B"], "W": each["W"], "BW": both}, each["p2p"], self.overlap)


@dataclass(frozen=True)
class StageCosts:
    """Costs with a number for each stage; `p2p[s]` is of the values between the stages s and s + 1."""

    kinds: dict[str, tuple[float, ...]]
    p2p: tuple[float, ...]
    overlap: float

    def task(self, task: Task) -> float:
        """How long a rank is busy with an entry of its row."""
        times = [self.kinds[action.kind][action.stage] for action in actions_of(task)]
        return sum(times) - self.overlap * min(times) if len(times) > 1 else times[0]

    def transfer(self, made: Action, used: Action) -> float:
        """How long a value takes from one rank to another."""
        return self.p2p[min(made.stage, used.stage)]
