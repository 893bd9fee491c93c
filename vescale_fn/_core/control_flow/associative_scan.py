"""`associative_scan`: all prefixes of a sequence in a number of steps that grows with the logarithm of its length.

Source: `jax.lax.associative_scan`; G. Blelloch, "Prefix sums and their applications" (1990).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import torch_internals
from ..base import tracebacks, tree
from ..base.errors import TransformError
from ..base.messages import report, short
from ..base.user_calls import called, checked_function
from . import leaves as leaves_
from .leaves import Opened

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here

Leaves = list[torch.Tensor]


@torch_internals.not_compiled
def associative_scan(fn: Callable[[Any, Any], Any], elems: Any, reverse: bool = False, axis: int = 0) -> Any:
    """All prefixes ``elems[0]``, ``fn(elems[0], elems[1])``, ``fn(fn(elems[0], elems[1]), elems[2])``, and so on.

    Args:
        fn: an associative function of two trees like `elems`, whose leaves hold any number of pairs along `axis`, that gives
            a tree like them. In which order it is applied is not said: sums of floats differ from a loop's by rounding.
        elems: a tree of tensors with one size along `axis`.
        reverse: whether to begin at the end: all suffixes.
        axis: the dim of the leaves along which the elements lie.

    Returns:
        A tree like `elems`.

    Raises:
        TransformError: the leaves have different sizes along `axis`, or `fn` gives other types than it is given.

    Source: `jax.lax.associative_scan`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.associative_scan(torch.add, torch.tensor([1, 2, 3, 4]))
    tensor([ 1,  3,  6, 10])
    """
    checked_function(fn, "associative_scan")
    given = Opened(elems, "associative_scan", "elems", leaves_.device_of([elems]))
    shown = [f"{path} is {leaves_.text(x)}" for path, x in zip(given.paths(), given.leaves, strict=True)]
    if isinstance(axis, bool) or not isinstance(axis, int) or not all(-x.ndim <= axis < x.ndim for x in given.leaves):
        fix = "axis=0, or another dim that all leaves have"
        raise TransformError(
            report("associative_scan", f"axis={short(axis)} is no dim of all leaves of elems", shown, fix)
        )
    if not given.leaves:
        return elems
    dims = [axis % x.ndim for x in given.leaves]
    sizes = {x.shape[dim] for x, dim in zip(given.leaves, dims, strict=True)}
    if len(sizes) > 1:
        what = f"the leaves of elems have different sizes along axis={axis}"
        raise TransformError(report("associative_scan", what, shown, "leaves with one element for each place"))
    flipped = [x.flip(dim) for x, dim in zip(given.leaves, dims, strict=True)] if reverse else given.leaves

    def combined(one: Leaves, other: Leaves) -> Leaves:
        a, b = (tree.unflatten(given.treedef, leaves) for leaves in (one, other))
        out = Opened(called(fn, (a, b), {}, "associative_scan"), "associative_scan", "out", given.device)
        before = Opened(a, "associative_scan", "elems", given.device)
        what = "fn must give what it is given, a tree of the same structure, shapes and dtypes"
        out.make_sums(before)
        before.refuse_change(out, what, "fn returns", "the same types from fn")
        return out.leaves

    found = _prefixes(combined, flipped, dims)
    found = [x.flip(dim) for x, dim in zip(found, dims, strict=True)] if reverse else found
    return tree.unflatten(given.treedef, found)


def _prefixes(combined: Callable[[Leaves, Leaves], Leaves], xs: Leaves, dims: Sequence[int]) -> Leaves:
    """The prefixes: those of odd length of the prefixes of pairs, which are half as many."""
    count = xs[0].shape[dims[0]]
    if count < 2:
        return xs
    first, second = _each(xs, dims, 0, count - count % 2, 2), _each(xs, dims, 1, count, 2)
    odd = _prefixes(combined, combined(first, second), dims)
    more = (count - 1) // 2  # the places 2, 4, ... come from the place before and the element there
    even = _each(xs, dims, 0, 1, 1)
    if more:
        rest = combined(_each(odd, dims, 0, more, 1), _each(xs, dims, 2, count, 2))
        even = [torch.cat(pair, dim) for pair, dim in zip(zip(even, rest, strict=True), dims, strict=True)]
    return [_interleaved(a, b, dim) for a, b, dim in zip(even, odd, dims, strict=True)]


def _each(xs: Leaves, dims: Sequence[int], start: int, stop: int, step: int) -> Leaves:
    return [x[(slice(None),) * dim + (slice(start, stop, step),)] for x, dim in zip(xs, dims, strict=True)]


def _interleaved(even: torch.Tensor, odd: torch.Tensor, dim: int) -> torch.Tensor:
    count = odd.shape[dim]
    pairs = torch.stack([even.narrow(dim, 0, count), odd], dim + 1).flatten(dim, dim + 1)
    last = even.shape[dim] - count
    return torch.cat([pairs, even.narrow(dim, count, last)], dim) if last else pairs
