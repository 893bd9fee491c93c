"""A layout that a search chose, as somebody would write it: the step itself, with its arguments laid out so, and few lines.

That is simpler to read, and to keep without a search. As often it is faster, too: gradients come back to where values were.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from .._core.base import context
from .._core.base.errors import TransformError, VfnError
from .._core.base.messages import report
from .._core.distributed.abstract_mesh import abstract_mesh
from ..hardware import Hardware
from ..plan.eval_shape import eval_shape
from .moves import LinesToWrite
from .price_arguments import laid_out
from .recording import Recording
from .search.layouts import Layouts
from .verified import Verified, priced_as, specs_of
from .written import MoveToWrite, WrittenStep

_NEAR = 1.005  # times the seconds of the fastest way: so much counts as as fast
_CALLS = 4000  # of a recorded step: of more, recording and pricing each way anew takes longer than it is worth
_HERE = os.path.dirname(__file__)


def as_written(
    recorded: Recording, one: Verified, hardware: Hardware, memory: float | None, donate: Sequence[int] = ()
) -> Verified:
    """A layout as its step would be written, with the fewest lines with which it is as fast as the fastest way; itself, where
    no way is as fast, or none fits in the memory, or none was tried.

    Whether it is tried is decided by the step alone, not by a clock: all ranks try the same.

    Args:
        recorded: the step.
        one: the layout.
        hardware: that it is priced for.
        memory: the most bytes that a rank may need; None: any.
        donate: the arguments by position whose memory a call may use up.
    """
    if one.step is not None:
        return one
    asked = "choice.moves looks for the lines when it is asked for"
    if one.memory is not None:
        return replace(one, unwritten=f"its plan is held to the memory; {asked}")
    if (count := len(recorded.about.calls)) > _CALLS:
        return replace(one, unwritten=f"{recorded.name} has {count:,} calls, more than {_CALLS:,}; {asked}")
    try:
        found = priced_ways(recorded, one, hardware, memory, donate, enough=True)
    except DoesNotRun as error:
        return replace(one, unwritten=in_words(error.__cause__))
    best = fewest_lines([*(way for way in found if way.fits), one])
    return replace(best, written=fewest_lines(found)) if best is one else best


class DoesNotRun(TransformError):
    """A step does not run as it would be written: it was recorded once, and need not run on arrays, nor a second time."""


def does_not_run(where: str, name: str, how: str, error: Exception) -> DoesNotRun:
    """What is said of a step that raises where it runs as it is, and not as it was recorded."""
    fix = "choice.jit(), which carries out what was recorded"
    return DoesNotRun(report(where, f"{name} does not run {how}", [in_words(error)], fix))


def priced_ways(
    recorded: Recording,
    one: Verified,
    hardware: Hardware,
    memory: float | None,
    donate: Sequence[int] = (),
    enough: bool = False,
) -> list[Verified]:
    """The ways in which the step of a layout may be written, priced, those with fewer lines first.

    Args:
        recorded, one, hardware, memory, donate: as of `as_written`.
        enough: whether no more is tried once a way fits and takes no longer than the layout.

    Raises:
        DoesNotRun: the step runs in none of them.
    """
    found, failures = list[Verified](), list[Exception]()
    for step in ways(recorded, one, failures):
        with _noted(failures):
            cost = priced_as(recorded, one.layouts, hardware, donate, step=step)
            found.append(replace(one, price=cost, fits=memory is None or cost.peak <= memory, step=step))
            if enough and found[-1].fits and cost.seconds <= one.price.seconds:
                break
    if not found:
        raise does_not_run("choice", recorded.name, "as it would be written", failures[0]) from failures[0]
    return found


def fewest_lines(found: Sequence[Verified]) -> Verified:
    """The first of those that are as fast as the fastest."""
    least = min(way.price.seconds for way in found)
    return next(way for way in found if way.price.seconds <= _NEAR * least)


def again_ranked(best: Verified, rest: Sequence[Verified]) -> list[Verified]:
    """Layouts of which the best is as it would be written: what was given stays before it, where that is faster."""
    faster = [one for one in rest if one.name and one.fits and one.price.seconds < best.price.seconds]
    return [*faster, best, *(one for one in rest if one not in faster)]


def ways(recorded: Recording, one: Verified, failures: list[Exception] | None = None) -> Iterator[WrittenStep]:
    """The step with no lines written in it, with those that it needs, and with one for each move; fewer lines first.

    Args:
        recorded: the step.
        one: the layout.
        failures: gets what the step raises, of the ways in which it does not run.
    """
    layouts, done = one.layouts, set[Any]()
    failures = [] if failures is None else failures
    for calls, all_moves in (({}, False), (layouts.calls, False), (layouts.calls, True)):
        lines = None
        with _noted(failures):
            lines = found(recorded, replace(layouts, calls=calls), all_moves)
        if lines is not None and (key := frozenset((line.place, line.spec) for line in lines)) not in done:
            done.add(key)
            yield WrittenStep(recorded, lines, layouts)


@contextmanager
def _noted(failures: list[Exception]) -> Iterator[None]:
    """Within the block, what the step raises is noted, and what this library refuses; not what is wrong in here."""
    try:
        yield
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        if not isinstance(error, VfnError) and os.path.dirname(last) == _HERE:
            raise
        failures.append(error)


def in_words(error: BaseException | None) -> str:
    """An error in a line."""
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, VfnError) else f"{type(error).__name__}: {first}"


def found(recorded: Recording, layouts: Layouts, all_moves: bool = False) -> list[MoveToWrite]:
    """The lines with which a step comes to a layout."""
    finder, axes = LinesToWrite(recorded, layouts, all_moves), layouts.mesh
    mesh = abstract_mesh(tuple(axes.values()), tuple(axes))
    given = laid_out(recorded.call.args, specs_of(recorded, layouts), mesh, "auto")
    with context.use_mesh(mesh):
        eval_shape(functools.partial(finder.run, **recorded.call.kwargs), *given)
    return finder.lines()
