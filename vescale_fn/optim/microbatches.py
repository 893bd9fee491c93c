"""A batch in parts, one after the other, within one step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from .._core.arrays.array import is_array, relabelled
from .._core.arrays.placement import spec_of, with_sharding
from .._core.base import tree
from .._core.base.containers import opened
from .._core.base.errors import VfnError
from .._core.base.messages import described, report
from .._core.base.user_calls import checked_function
from .._core.sharding.spec import P, axes_named, split_axes
from ..random.keys import Key
from ..random.streams import split
from .accumulate import reduced
from .optimizer import check_steps, is_trained
from .per_leaf import each, in_dtype_of


def microbatches(f: Callable[..., Any], count: int) -> Callable[..., Any]:
    """`f` on `count` parts of its batch, one after the other, and the mean of what it gives: the memory of a part at a time.

    Where `f` gives means over a batch, a loss and its gradients, that is what it gives for the whole batch, up to rounding.
    A part has every `count`-th row: the same rows on every mesh, and nothing moves where each rank has a multiple of `count`
    of them. What is summed over the axes that split the batch, the gradients of parameters that each of its ranks holds, is
    added up over the ranks once, after the last part; gradients of parameters that are themselves split over such an axis
    (FSDP) are reduced, and so split, in each part. Means are made in float32 at least.

    Args:
        f: a function of parameters and of anything else, which gives a tree of floating-point tensors:
            ``vfn.value_and_grad(loss)``.
        count: how many parts.

    Returns:
        A function of the same arguments. Of those after the first, tensors are divided by their rows (dim 0), and keys are
        split; numbers, 0-d tensors and what is given by keyword stay as they are.

    Raises:
        VfnError: a tensor whose rows are no multiple of `count`; a result that has no mean.

    Source: `MultiSteps` of optax, within one step; Huang et al. (GPipe), arXiv 1811.06965, for the word.

    >>> import torch, vescale_fn as vfn
    >>> gradient = vfn.grad(lambda w, x: (w * x).square().mean())
    >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> gradient(torch.tensor(1.0), x), vfn.optim.microbatches(gradient, 2)(torch.tensor(1.0), x)
    (tensor(15.), tensor(15.))
    """
    checked_function(f, "microbatches")
    check_steps("microbatches", count=count)

    @functools.wraps(f)
    def run(params: Any, *batch: Any, **kwargs: Any) -> Any:
        part_of = parts(batch, count, "microbatches")
        params = reduced_later(params, batch, "microbatches")
        outs: list[Any] = []
        shape: Any = None
        totals: list[Any] = []
        for part in range(count):
            out = f(params, *part_of(part), **kwargs)
            outs, shape = opened(out, "microbatches", "result")
            if not totals:
                check_results(tree.paths(out, "result"), outs, "microbatches")
                totals = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in outs]
            elif outs:
                (totals,) = each(lambda total, x: (total + x,), totals, outs)
        return tree.unflatten(shape, means(totals, outs, count))

    return run


def parts(batch: Any, count: int, where: str) -> Callable[[int], Any]:
    """What makes each of so many parts of a batch, by its number: every `count`-th row, and a key of its own."""
    leaves, structure = opened(batch, where, "batch", is_leaf=_is_key)
    _check_rows(batch, leaves, count, where)
    keys = {i: split(x, count) for i, x in enumerate(leaves) if _is_key(x)}

    def part_of(part: int) -> Any:
        own = [keys[i][part] if i in keys else _part(x, part, count) for i, x in enumerate(leaves)]
        return optree.tree_unflatten(structure, own)

    return part_of


def means(totals: Sequence[Any], like: Sequence[Any], count: int) -> list[Any]:
    """The means of so many values, of their sums, each in the dtype of another; what is a sum over ranks as well is reduced."""
    if not totals:
        return []
    (found,) = each(lambda total: (total / count,), totals)
    return tree.leaves(reduced(list(map(in_dtype_of, like, found))))


def _is_key(x: Any) -> bool:
    return isinstance(x, Key)


def _part(x: Any, part: int, count: int) -> Any:
    return x.unflatten(0, (-1, count)).select(1, part) if _has_rows(x) else x


def _has_rows(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 0


def reduced_later(params: Any, batch: Any, where: str, shared: bool = False) -> Any:
    """The parameters, of which gradients stay partial sums over the axes that split the batch; `shared`: in the same memory,
    for what only reads them."""
    axes = {
        axis
        for x in optree.tree_leaves(batch, is_leaf=_is_key)  # type: ignore[arg-type]
        if _has_rows(x) and is_array(x)
        for names in split_axes(spec_of(x), x.ndim)
        for axis in names
    }
    leaves, structure = opened(params, where, "params")
    later: dict[int, P] = {}
    for i, x in enumerate(leaves):
        if is_trained(x) and is_array(x):
            spec = spec_of(x)
            free = axes - axes_named(spec)
            if free and not spec.unreduced:
                later[i] = P(*spec, reduced=spec.reduced | free, at=spec.at)
    if later:
        xs, specs = [leaves[i] for i in later], list(later.values())
        for i, x in zip(later, map(relabelled, xs, specs) if shared else with_sharding(xs, specs)):
            leaves[i] = x
    return tree.unflatten(structure, leaves)


def _check_rows(batch: Any, leaves: Sequence[Any], count: int, where: str) -> None:
    paths = [accessor.codify("batch") for accessor in optree.tree_accessors(batch, is_leaf=_is_key)]  # type: ignore[arg-type]
    wrong = [
        f"{path} is {described(x)}: {x.shape[0]} rows are no multiple of {count}"
        for path, x in zip(paths, leaves)
        if _has_rows(x) and x.shape[0] % count
    ]
    if wrong:
        raise VfnError(
            report(
                where,
                f"the batch has no {count} equal parts",
                wrong,
                "a count that divides the rows; what is no batch by keyword",
            )
        )


def check_results(paths: Sequence[str], leaves: Sequence[Any], where: str) -> None:
    """Raise for results of the parts that have no mean."""
    wrong = [
        f"{path} is {described(x)}"
        for path, x in zip(paths, leaves)
        if not (isinstance(x, torch.Tensor) and (x.dtype.is_floating_point or x.dtype.is_complex))
    ]
    if wrong:
        raise VfnError(
            report(
                where,
                "the results of the parts have no mean",
                wrong,
                "floating-point tensors: count.float(), say",
            )
        )
