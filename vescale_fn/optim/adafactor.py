"""Adafactor: Adam's mean squares of a matrix, kept as one number for each row and one for each column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .._core.arrays.array import is_array, mesh_of, spec_of
from .._core.arrays.placement import shard, with_sharding
from .._core.base import dtypes, tree
from .._core.base.messages import described
from .._core.sharding.spec import P, from_split_axes, split_axes
from . import exact_sums
from .masks import flags
from .optimizer import Optimizer, Rate, check_numbers, check_state, is_trained, rate_at, steps_done, zero_count
from .per_leaf import beside, check_shapes, mapped, other_shapes


class AdafactorState(NamedTuple):
    """Steps done, and the running mean squares of the gradients: of each row and each column of a matrix, else of each
    number. In float32 at least."""

    count: Any
    squares: Any


class Factors(NamedTuple):
    """The mean squares of the rows, ``[..., n, 1]``, and of the columns, ``[..., 1, m]``."""

    rows: Any
    columns: Any


def adafactor(
    lr: Rate = 1e-2,
    decay_exponent: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    clip: float = 1.0,
    weight_decay: float = 0.0,
    mask: Any = True,
) -> Optimizer:
    """Adam without momentum whose mean squares are factored, relative to the size of each parameter.

    The state of a matrix of n rows and m columns is n + m numbers. On a mesh a step takes two rounds of collectives: one
    for the sums of squares, of which a rank holds parts, and one for the size of each update; all leaves together, one
    collective for all that is summed over the same axes. Under `deterministic` the sums are exact, for which the largest of
    their numbers come before them.

    Args:
        lr: the largest relative step, or a schedule.
        decay_exponent: after t steps, ``t ** decay_exponent`` is the part of the new squares in their running mean.
        eps: the least mean square of a row (None: the precision of the parameter's dtype), and the least size of a
            parameter that a step is relative to.
        clip: the root mean square that an update may have.
        weight_decay: times the learning rate, the part of a parameter that is taken away each step.
        mask: which parameters decay, as in `adamw`.

    Source: Shazeer and Stern, arXiv 1804.04235; `torch.optim.Adafactor`.

    >>> import torch, vescale_fn as vfn
    >>> opt, w = vfn.optim.adafactor(0.1), torch.ones(3, 2)
    >>> update, state = opt.update(torch.ones(3, 2), opt.init(w), w)
    >>> update[0], state.squares.rows.shape, state.squares.columns.shape
    (tensor([-0.1000, -0.1000]), torch.Size([3, 1]), torch.Size([1, 2]))
    """
    check_numbers("adafactor", lr=lr, decay_exponent=decay_exponent, clip=clip, weight_decay=weight_decay)

    def init(params: Any) -> AdafactorState:
        return AdafactorState(zero_count(), mapped(_no_squares, params))

    def update(grads: Any, state: AdafactorState, params: Any) -> tuple[Any, AdafactorState]:
        check_state("adafactor", state, AdafactorState)
        leaves, structure, (found, kept) = beside("adafactor", params, grads, state.squares)
        decaying = tree.leaves(flags("adafactor", mask, params))
        todo = [i for i, leaf in enumerate(leaves) if found[i] is not None and is_trained(leaf)]
        if not todo:
            return grads, AdafactorState(state.count + 1, state.squares)
        check_shapes("adafactor", params, todo, [leaves[i] for i in todo], [[found[i] for i in todo]])
        _check_kept(params, leaves, kept, todo)
        count = state.count + 1
        done = steps_done(count)
        rate = rate_at(lr, state.count)
        part = done**decay_exponent
        parts = {torch.float32: part.to(torch.float32), torch.float64: part}
        relative = torch.minimum(torch.as_tensor(rate, dtype=torch.float64), done**-0.5)

        wide = [found[i].to(dtypes.wide(leaves[i].dtype)) for i in todo]
        exact = exact_sums.wanted([*wide, *(leaves[i] for i in todo)])
        sums = [_sums(grad, leaves[i].to(grad.dtype), kept[i], exact) for grad, i in zip(wide, todo)]
        sums = _together(sums, wide)
        steps = []
        for i, grad, (_, *rest) in zip(todo, wide, sums):
            least = torch.finfo(leaves[i].dtype).eps if eps[0] is None else eps[0]
            kept[i], square = _squares(grad, kept[i], rest, parts[grad.dtype], least)
            steps.append(grad * torch.rsqrt(torch.clamp(square, min=least * least)))
        sizes = _together([(_sum(step * step, exact),) for step in steps], steps)

        def factor(of_params: Any, of_steps: Any) -> Any:
            large = torch.clamp(torch.sqrt(of_params), min=eps[1]) * -relative
            return large / torch.clamp(torch.sqrt(of_steps) / clip, min=1.0)

        factors = _of_all(factor, steps, [of_param for of_param, *_ in sums], [of_step for (of_step,) in sizes])
        for i, step, factor_here in zip(todo, steps, factors):
            step = step * factor_here
            if weight_decay and decaying[i]:
                step = step - leaves[i] * (rate * weight_decay)
            found[i] = step.to(leaves[i].dtype)
        return tree.unflatten(structure, found), AdafactorState(count, tree.unflatten(structure, kept))

    return Optimizer(init, update)


def _check_kept(params: Any, leaves: Sequence[Any], kept: Sequence[Any], todo: Sequence[int]) -> None:
    """Whether what is kept of each leaf has its shapes."""
    held = {i: tree.leaves(kept[i]) for i in todo}
    if wrong := [i for i, found in held.items() if [x.shape for x in found] != _shapes(leaves[i])]:
        paths = tree.paths(params, "params")
        of = lambda i: " and ".join(map(described, held[i]))
        raise other_shapes("adafactor", [f"{paths[i]} is {described(leaves[i])}, state has {of(i)}" for i in wrong])


def _no_squares(leaf: Any) -> Any:
    if not is_trained(leaf):
        return leaf
    if leaf.ndim < 2:
        return torch.zeros_like(leaf, dtype=dtypes.wide(leaf.dtype))
    return Factors(*(_zeros_without(leaf, dim) for dim in (-1, -2)))


def _shapes(leaf: Any) -> list[torch.Size]:
    """Those of what is kept of a leaf."""
    *before, n, m = leaf.shape if leaf.ndim > 1 else (0, 0)
    return [torch.Size((*before, n, 1)), torch.Size((*before, 1, m))] if leaf.ndim > 1 else [leaf.shape]


def _zeros_without(leaf: Any, dim: int) -> Any:
    """Zeros that lie as a leaf does, with one element along `dim`."""
    shape = list(leaf.shape)
    shape[dim] = 1
    zeros = torch.zeros(shape, dtype=dtypes.wide(leaf.dtype), device=leaf.device)
    return shard(zeros, mesh_of(leaf), _without(leaf, dim)) if is_array(leaf) else zeros


def _without(x: Any, *dims: int) -> P:
    """The layout of `x`, with these dims whole."""
    rows = list(split_axes(spec_of(x), x.ndim))
    for dim in dims:
        rows[dim] = ()
    return from_split_axes(rows)


def _of_all(function: Any, leaves: Sequence[Any], *sums: Sequence[Any]) -> list[Any]:
    """A function of mean squares, of all leaves at once: a number for each leaf from the sums of its squares."""
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault((mesh_of(leaf), leaf.dtype, leaf.device), []).append(i)
    found: list[Any] = [None] * len(leaves)
    for (_, dtype, device), members in groups.items():
        counts = torch.tensor([max(1, leaves[i].numel()) for i in members], dtype=dtype, device=device)
        given = (torch.stack([column[i] for i in members]) / counts for column in sums)
        for i, x in zip(members, function(*given).unbind()):
            found[i] = x
    return found


def _sum(x: Any, exact: bool) -> Any:
    return exact_sums.parts(x, ()) if exact else torch.sum(x)


def _sums(grad: Any, param: Any, kept: Any, exact: bool) -> tuple[Any, ...]:
    """What is summed over the whole of a leaf, or over its rows and columns; exactly, so that no layout has other bits."""
    size = _sum(param * param, exact)
    if grad.ndim < 2:
        return (size,)
    square = grad * grad
    n, m = grad.shape[-2:]
    if exact:
        wanted = (square, (-1,), m), (square, (-2,), n), (square, (-2, -1), m), (kept.rows, (-2,), 1)
        return size, *(exact_sums.parts(x, dims, over) for x, dims, over in wanted)
    rows = torch.sum(square, -1, keepdim=True) / m
    columns = torch.sum(square, -2, keepdim=True) / n
    return size, rows, columns, torch.sum(rows, -2, keepdim=True), torch.sum(kept.rows, -2, keepdim=True)


def _together(sums: Sequence[tuple[Any, ...]], like: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The ranks' parts of sums added up: all that are summed over the same axes in one collective."""
    if any(type(x) is exact_sums.ExactParts for row in sums for x in row):
        found = _together([tuple(x.sums for x in row) for row in sums], like)
        return [tuple(map(exact_sums.whole, row, parts)) for row, parts in zip(found, sums, strict=True)]
    if not any(map(is_array, like)):
        return list(sums)
    specs = [
        tuple(
            P() if x.ndim == 0 else _without(leaf, *(d for d in (-2, -1) if x.shape[d] != leaf.shape[d])) for x in row
        )
        for row, leaf in zip(sums, like)
    ]
    here = [i for i, leaf in enumerate(like) if is_array(leaf)]
    moved = with_sharding([sums[i] for i in here], [specs[i] for i in here])
    found = list(sums)
    for i, row in zip(here, moved):
        found[i] = row
    return found


def _squares(grad: Any, kept: Any, sums: Sequence[Any], part: Any, least: float) -> tuple[Any, Any]:
    """The running mean squares after a gradient; and from them the mean square of each number."""
    if grad.ndim < 2:
        square = torch.lerp(kept, grad * grad, part)
        return square, square
    rows, columns, total, total_before = sums
    # The mean of the rows' new squares, of which a rank has some, is told by sums that have come with the others.
    mean = torch.clamp(torch.lerp(total_before, total, part) / grad.shape[-2], min=least)
    after = Factors(torch.lerp(kept.rows, rows, part), torch.lerp(kept.columns, columns, part))
    return after, after.rows * (after.columns / mean)
