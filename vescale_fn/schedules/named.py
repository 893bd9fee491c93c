"""Schedules by their names in the literature, for p ranks and m microbatches.

Formulas are for stages that cost the same, F, B and W each, and for transfers that cost nothing.
"""

from __future__ import annotations

from .._core.base.errors import ScheduleError
from .._core.base.messages import report, short
from .actions import Action, Task
from .letters import row
from .schedule import Schedule


def gpipe(p: int, m: int) -> Schedule:
    """All forward passes, then all backward passes.

    Rank 0 is idle for (p - 1)(F + B + W), whatever m is, and every rank holds m microbatches.

    Args:
        p: ranks, each with one stage.
        m: microbatches.

    Source: GPipe, arXiv 1811.06965.

    >>> import vescale_fn as vfn
    >>> timeline = vfn.schedules.gpipe(4, 8).simulate()
    >>> timeline.idle[0], timeline.in_flight
    (9, (8, 8, 8, 8))
    """
    check_sizes("gpipe", p=p, m=m)
    return Schedule(tuple(range(p)), [row("f" * m + "d" * m, r) for r in range(p)])


def one_f_one_b(p: int, m: int) -> Schedule:
    """As many forward passes as there are ranks from here on, then backward and forward in turns.

    The idle time is that of `gpipe`, (p - 1)(F + B + W), but rank r holds min(m, p - r) microbatches.

    Args:
        p: ranks, each with one stage.
        m: microbatches.

    Source: PipeDream-flush, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473.

    >>> import vescale_fn as vfn
    >>> timeline = vfn.schedules.one_f_one_b(4, 8).simulate()
    >>> timeline.idle[0], timeline.in_flight
    (9, (4, 3, 2, 1))
    """
    check_sizes("one_f_one_b", p=p, m=m)
    rows = []
    for r in range(p):
        ahead = min(m, p - 1 - r)
        rows.append(row("f" * ahead + "fd" * (m - ahead) + "d" * ahead, r))
    return Schedule(tuple(range(p)), rows)


def interleaved(p: int, m: int, v: int) -> Schedule:
    """1F1B where each rank has v chunks of the model: rank r the stages r, r + p, r + 2p, ...

    The idle time of rank 0 is (p - 1)(F + B + W) of one stage, a v-th of a rank's chunks together, where m >= p.
    If p divides m, rank r holds at most v p + p - 1 - 2r chunks, as many as v m at most; if not, the microbatches go round in
    m // p groups that are a little larger than p, with somewhat more in flight, and sends must not block. With one chunk
    this is `one_f_one_b`.

    Args:
        p: ranks.
        m: microbatches.
        v: chunks a rank.

    Source: Megatron-LM, arXiv 2104.04473.

    >>> import vescale_fn as vfn
    >>> timeline = vfn.schedules.interleaved(4, 8, 2).simulate()
    >>> timeline.idle[0], timeline.in_flight
    (9, (11, 9, 7, 5))
    """
    check_sizes("interleaved", p=p, m=m, v=v)
    if v == 1:
        return one_f_one_b(p, m)
    groups = max(1, m // p)
    sizes = [m // groups + (k < m % groups) for k in range(groups)]
    starts = [sum(sizes[:k]) for k in range(groups)]
    turns = [(c, i) for start, n in zip(starts, sizes) for c in range(v) for i in range(start, start + n)]
    rows: list[list[Task]] = []
    for r in range(p):
        forward: list[Task] = [Action("F", c * p + r, i) for c, i in turns]
        backward: list[Task] = [Action("BW", (v - 1 - c) * p + r, i) for c, i in turns]
        ahead = min(m * v, 2 * (p - 1 - r) + (v - 1) * sizes[0])
        both = [task for pair in zip(forward[ahead:], backward) for task in pair]
        rows.append(forward[:ahead] + both + backward[len(both) // 2 :])
    return Schedule([stage % p for stage in range(p * v)], rows)


def zb_h1(p: int, m: int) -> Schedule:
    """1F1B with the gradients of parameters apart: rank r runs W of a microbatch r microbatches later than B.

    Rank 0 is idle for (p - 1)(F + B - W), where W <= F and m >= p. Every rank holds min(m, p) microbatches, as many as
    `one_f_one_b` does on rank 0.

    Args:
        p: ranks, each with one stage.
        m: microbatches.

    Source: zero-bubble pipelines, arXiv 2401.10241.

    >>> import vescale_fn as vfn
    >>> timeline = vfn.schedules.zb_h1(4, 8).simulate()
    >>> timeline.idle[0], timeline.in_flight
    (3, (4, 4, 4, 4))
    """
    check_sizes("zb_h1", p=p, m=m)
    return Schedule(tuple(range(p)), [row(_split(m, p - r, r), r) for r in range(p)])


def zb_h2(p: int, m: int) -> Schedule:
    """`zb_h1` with nearly twice as many forward passes ahead, which fill the time until the first B.

    No rank is idle if F = B = W; rank 0 is for (p - 1)(F + B - 2W), or 0 where that is negative, if F is at least as long as
    B or W, and m >= 2p - 1. Every rank holds min(m, 2p - 1) microbatches.

    Args:
        p: ranks, each with one stage.
        m: microbatches.

    Source: zero-bubble pipelines, arXiv 2401.10241.

    >>> import vescale_fn as vfn
    >>> timeline = vfn.schedules.zb_h2(4, 8).simulate()
    >>> timeline.idle, timeline.in_flight
    ((0, 0, 0, 0), (7, 7, 7, 7))
    """
    check_sizes("zb_h2", p=p, m=m)
    return Schedule(tuple(range(p)), [row(_split(m, 2 * (p - r) - 1, 2 * r), r) for r in range(p)])


def _split(m: int, ahead: int, lag: int) -> str:
    """So many forward passes ahead, and W so many microbatches behind B, as long as there are forward passes."""
    a = min(m, ahead)
    lag = min(lag, m - a)
    return "f" * a + "bf" * lag + "bwf" * (m - a - lag) + "bw" * a + "w" * lag


def zbv(p: int, m: int) -> Schedule:
    """Two chunks a rank in a V, so that the last stage is on the first rank: no idle time with the memory of 1F1B.

    Rank r has the stages r and 2p - 1 - r. No rank is idle if F = B = W and m >= 2p - 1. Every rank then holds 2p chunks, as
    much as p microbatches.

    Args:
        p: ranks, each with two stages.
        m: microbatches.

    Source: ZB-V, arXiv 2401.10241; pipelines with controllable memory, arXiv 2405.15362.

    >>> import vescale_fn as vfn
    >>> timeline = vfn.schedules.zbv(4, 8).simulate()
    >>> timeline.idle, timeline.in_flight
    ((0, 0, 0, 0), (8, 8, 8, 8))
    """
    check_sizes("zbv", p=p, m=m)
    n = max(m, 2 * p - 1)  # of which the first m are there
    rows = []
    for r in range(p):
        begin = "f" * (2 * (p - r) - 1) + "Ff" * r + "FBw" * (p - r)
        middle = "fbwFBw" * (n - 2 * p + 1 + r) + "bwFBw" * (p - 1 - r)
        end = "bB" * r + "bw" * (p - r) + "w" * (2 * r)
        rows.append(row(begin + middle + end, r, 2 * p - 1 - r, m))
    return Schedule([*range(p), *reversed(range(p))], rows)


def dualpipev(p: int, m: int) -> Schedule:
    """`zbv` with whole backward passes, each at once with a forward pass of the other chunk (`Overlap`).

    Rank r has the stages r and 2p - 1 - r. Rank 0 is idle for (p - 1)(F&B + (B + W) - 3W), where F&B is the time of an
    `Overlap`, F = B >= W and nothing is hidden; for each of p - 2 overlaps what it hides is gained besides. Every rank holds
    2p + 1 chunks.

    Args:
        p: ranks, each with two stages.
        m: microbatches, at least 2p.

    Source: DualPipe, arXiv 2412.19437, and its V-shaped half, https://github.com/deepseek-ai/DualPipe.

    >>> import vescale_fn as vfn
    >>> timeline = vfn.schedules.dualpipev(4, 8).simulate()
    >>> timeline.idle[0], timeline.in_flight
    (6, (9, 9, 9, 9))
    """
    check_sizes("dualpipev", p=p, m=m)
    if m < 2 * p:
        fix = "more microbatches, or schedules.zbv, which takes any number of them"
        raise ScheduleError(report("schedules.dualpipev", f"{p} ranks need {2 * p} microbatches, not {m}", fix=fix))
    rows = []
    for r in range(p):
        rest = p - 1 - r
        begin = "f" * (2 * rest) + "fF" * (r + 1) + "BwF" * rest
        middle = "[fD][Fd]" * (m - 2 * p + r + 1) + "D[Fd]" * rest
        if rest == 0:
            middle = middle.replace("[fD]", "fD", 1)  # the very first: the last stage has nothing to wait for
        end = ("Dd" * (r + 1))[: r + 1] + ("Bb" * (r + 1))[r + 1 :] + "wb" * rest + "w" * (r + 1)
        rows.append(row(begin + middle + end, r, 2 * p - 1 - r))
    return Schedule([*range(p), *reversed(range(p))], rows)


def check_sizes(name: str, **sizes: int) -> None:
    """Raise unless all are whole numbers from 1 on."""
    wrong = [f"{key} is {short(value)}" for key, value in sizes.items() if type(value) is not int or value < 1]
    if wrong:
        raise ScheduleError(report(f"schedules.{name}", "sizes are whole numbers from 1 on", wrong))
