"""Collectives over several axes of which some are entries of a `vmap`: one kind of axis after the other.

Each takes the collective itself, for the runs of names of one kind, major first (`entries.runs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base import context, tree
from ..base.errors import CollectiveError
from ..base.messages import report, short
from .collective_calls import Problem, refuse_misfits, taking_part
from .collective_operands import operands
from .vmap_collectives import Run

Collective = Callable[..., Any]


def size(run: Run) -> int:
    """How many entries or ranks a run is over."""
    return run.size if isinstance(run, context.Entries) else taking_part("axis_size", run)[2]


def name(run: Run) -> Any:
    """A run as an `axis_name`."""
    return run.name if isinstance(run, context.Entries) else run


def names_and_size(where: str, axis_name: Any, parts: Sequence[Run]) -> tuple[tuple[str, ...], int]:
    """The names as a tuple, and how many take part; `parts` are their runs, none where all are axes of the mesh."""
    if not parts:
        return taking_part(where, axis_name)[1:]
    names = [axis for run in parts for axis in (run if isinstance(run, tuple) else (run.name,))]
    return tuple(names), math.prod(map(size, parts))  # type: ignore[arg-type]


def one_by_one(collective: Collective, x: Any, parts: Sequence[Run]) -> Any:
    """A reduction: over each in turn."""
    for run in parts:
        x = collective(x, name(run))
    return x


def gathered(collective: Collective, x: Any, parts: Sequence[Run], axis: int, tiled: bool) -> Any:
    """`all_gather`: minor axes first, each new dim before the one that is there."""
    made = collective(x, name(parts[-1]), axis=axis, tiled=tiled)
    for run in reversed(parts[:-1]):
        made = collective(made, name(run), axis=axis if tiled or axis >= 0 else axis - 1, tiled=tiled)
        if not tiled:
            made = _each(lambda x: x.flatten(axis % (x.ndim - 1), axis % (x.ndim - 1) + 1), made)
    return made


def scattered(
    collective: Collective, x: Any, parts: Sequence[Run], *, dim: int, tiled: bool, problem: Problem, fix: str
) -> Any:
    """`psum_scatter`: major axes first."""
    names, n = names_and_size("psum_scatter", None, parts)
    leaves = operands("psum_scatter", x, context.body())[0]
    refuse_misfits("psum_scatter", x, leaves, problem, fix, "what it is over", names, n)
    for i, run in enumerate(parts):
        rest = math.prod(map(size, parts[i + 1 :]))
        if not tiled and i + 1 < len(parts):
            x = _each(lambda x, n=size(run), rest=rest: x.unflatten(dim, (n, rest)), x)
            at = dim if dim >= 0 else dim - 1
            x = collective(x, name(run), scatter_dimension=at, tiled=False)
        else:
            x = collective(x, name(run), scatter_dimension=dim, tiled=tiled)
    return x


def broadcast(collective: Collective, x: Any, parts: Sequence[Run], source: int) -> Any:
    """`pbroadcast`: of the place that `source` is along each."""
    for run in reversed(parts):
        source, place = divmod(source, size(run))
        x = collective(x, name(run), place)
    return x


def refuse(where: str, axis_name: Any, parts: Sequence[Run]) -> None:
    """Raise where a collective that knows one kind of axis at a time is given several."""
    if len(parts) > 1:
        raise CollectiveError(
            report(
                where,
                f"axis_name={short(axis_name)} has the axis of a vmap beside others",
                fix=f"vfn.{where} over one of them after the other; or vfn.all_gather over all, and an index",
            )
        )


def _each(f: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    leaves, treedef = tree.flatten(x)
    return tree.unflatten(treedef, [f(leaf) for leaf in leaves])
