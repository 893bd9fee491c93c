"""The steps of plans that are data: a function of ours by its name, and what it is given besides."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ..execution import looping, stride_checks
from ..ir import host_copies, rank_choices, row_by_row
from ..ir.graph import Step
from ..passes import buckets, donate, on_lists, overlap

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (*buckets.FUNCTIONS, *host_copies.FUNCTIONS)},
    "as_recorded": stride_checks.as_recorded,
    "own_row": looping.own_row,
    "as_it_is": rank_choices.as_it_is,
    "wait": overlap.waited,
    "through": row_by_row.through,
}
_ALONE = {"handed_over": donate.HAND_OVER, "handed_over_all": on_lists.HAND_OVER_ALL}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}


def described(step: Step) -> tuple[str, dict[str, Any]] | None:
    """The function of a step, and what else makes it; None where it is no function of ours."""
    alone = next((name for name, one in _ALONE.items() if one is step), None)
    if alone is not None:
        return alone, {}
    run = step.run
    given, run = (dict(run.keywords), run.func) if isinstance(run, functools.partial) and not run.args else ({}, run)
    name, own = _NAMES.get(run), {name: getattr(step, name) for name in ("name", "views", "writes", "into")}
    return None if name is None else (name, {**own, "given": list(given.items())})


def made(name: str, data: Mapping[str, Any]) -> Step:
    """The step."""
    if name in _ALONE:
        return _ALONE[name]
    given = dict(data["given"])
    run = functools.partial(_FUNCTIONS[name], **given) if given else _FUNCTIONS[name]
    return Step(data["name"], run, views=data["views"], writes=data["writes"], into=data["into"])
