"""A step whose batch may be cut into parts, one after the other: a layout for each number of them, and the best of all."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from .._core.base.errors import TransformError, VfnError
from .._core.base.messages import report, short
from .search.best import NothingFits
from .search.highs import OutOfTime

_NAME = "microbatches"


def best_in_parts(step: Callable[..., Any], counts: Any, choose: Callable[[Callable[..., Any]], Any]) -> Any:
    """The best of the layouts that are chosen for a step in so many parts; that of others is with it.

    Args:
        step: it takes their number as ``microbatches=``.
        counts: to choose from; None: the step is as it is.
        choose: a `ChosenLayout` of a step.

    Raises:
        NothingFits: in any number of parts. OutOfTime: nothing was found in any in the time that there was.
        TransformError: counts that are none, or a step that does not take them.
    """
    if counts is None:
        return choose(step)
    found, failures = list[Any](), list[VfnError]()
    for count in _checked(step, counts):
        cut = functools.update_wrapper(functools.partial(step, **{_NAME: count}), step)
        try:
            found.append(choose(cut))
        except (NothingFits, OutOfTime) as error:
            failures.append(error)
        else:
            found[-1].microbatches = count
    if not found:
        raise failures[-1]
    best, *rest = sorted(found, key=lambda one: one.predicted.seconds)
    best.in_other_parts = tuple(rest)
    return best


def _checked(step: Callable[..., Any], counts: Any) -> Sequence[int]:
    """The numbers of parts, the smallest first."""
    given = (counts,) if type(counts) is int else tuple(counts)
    wrong = [f"{short(n)} is no number of parts" for n in given if type(n) is not int or n < 1]
    if wrong or not given:
        raise TransformError(report("auto", f"microbatches={short(counts)}", wrong, "microbatches=(1, 2, 4)"))
    try:
        known = inspect.signature(step).parameters
    except (TypeError, ValueError):  # it does not say what it takes
        known = {_NAME: None}
    if _NAME not in known and not any(x is not None and x.kind is x.VAR_KEYWORD for x in known.values()):
        what = f"{getattr(step, '__name__', 'the step')} does not take {_NAME}="
        fix = "def step(params, batch, microbatches): ... vfn.optim.microbatches(vfn.grad(loss), microbatches)(params, batch)"
        raise TransformError(report("auto", what, ["it is called with each number of parts that is to be tried"], fix))
    return sorted(set(given))
