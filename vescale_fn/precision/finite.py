"""Numbers that are not finite: whether a tree has any, and which leaf has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._core import torch_internals
from .._core.arrays.array import is_array
from .._core.arrays.placement import unshard
from .._core.base import context, tree
from .._core.base.containers import opened
from .._core.base.errors import TransformError, VfnError
from .._core.base.messages import count_text, described, report
from .._core.distributed.blocks import Blocks
from .._core.local_types import tensor_types
from ..ops.reductions import psum
from ..optim.global_sums import added_up, parts_of_numbers
from ..plan.ir.graph import Step


def all_finite(values: Any) -> Any:
    """Whether all floating-point numbers of a tree are finite: a 0-d bool tensor, the same on all ranks.

    On a mesh, and in a `shard_map` body, whose values are one rank's, that takes one collective, of one number for each leaf.

    Source: `jmp.all_finite`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.precision.all_finite({"a": torch.ones(2), "b": torch.tensor([0.0, float("inf")])})
    tensor(False)
    """
    leaves = [x for x in opened(values, "all_finite", "values")[0] if _has_floats(x)]
    totals = [(vector == 0).all() for _, vector in _counts(leaves, "all_finite")]
    if not totals:
        return torch.ones((), dtype=torch.bool)
    found = totals[0]
    for total in totals[1:]:
        found = torch.logical_and(found, total)
    return found


def nan_guard(values: Any, name: str = "values") -> Any:
    """The tree as it is, or an error that names its first leaf with a number that is not finite, on all ranks.

    On a mesh, and in a `shard_map` body, that takes one collective, of one number for each leaf. Under `jit` it looks in each
    replay.

    Args:
        values: a tree; leaves that are not floating point pass by.
        name: what the tree is called in the error: ``"grads"`` for ``grads['w']``.

    Raises:
        VfnError: a leaf has numbers that are nan or infinite.

    >>> import torch, vescale_fn as vfn
    >>> vfn.precision.nan_guard({"w": torch.tensor([1.0, float("nan")])}, "grads")
    Traceback (most recent call last):
    vescale_fn.errors.VfnError: nan_guard: a value is not finite
      * grads['w'] is the tensor f32[2]: 1 number is nan or infinite
    """
    leaves, _ = opened(values, "nan_guard", name)
    paths = tree.paths(values, name)
    floats = [i for i, x in enumerate(leaves) if _has_floats(x)]
    if not floats:
        return values
    with torch.no_grad():
        parts = _counts([leaves[i].detach() for i in floats], "nan_guard")
        vectors = [_read(vector) for _, vector in parts]
    said = [f"{paths[i]} is {described(leaves[i])}" for i in floats]
    raise_ = _Raise(said, [members for members, _ in parts])
    recorder = torch_internals.recorder() if torch_internals.dispatch_modes() else None
    if recorder is None:
        raise_(*vectors)
    else:
        recorder.effect(Step("nan_guard", raise_, effect=True), *vectors)
    return values


def _read(vector: Any) -> Any:
    """Counts that are the same on all ranks, as a plain tensor, or as the list of the simulated ranks' tensors."""
    whole = unshard(vector) if is_array(vector) and context.body() is None else vector
    with torch_internals.no_torch_function():
        inner = torch_internals.peel(whole)
        inner = unshard(inner) if is_array(inner) else inner
        return list(inner.blocks) if type(inner) is Blocks else inner


def _has_floats(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.dtype.is_floating_point or x.dtype.is_complex)


def _counts(leaves: Sequence[Any], where: str) -> list[tuple[list[int], Any]]:
    """How many numbers of each leaf are not finite: for each mesh, the places of its leaves and the vector of their counts."""
    one = lambda x: torch.sum(torch.logical_not(torch.isfinite(x)), dtype=torch.float32)
    many = lambda *xs: torch.stack([one(x) for x in xs])
    if context.body() is not None:
        return [(list(range(len(leaves))), _added_up_in_body(leaves, one, where))] if leaves else []
    found = []
    for mesh, parts in parts_of_numbers(leaves, one, many).items():
        members = [i for places, _ in parts for i in places]
        found.append((members, added_up([vector for _, vector in parts], mesh, torch.cat)))
    return found


def _added_up_in_body(leaves: Sequence[Any], one: Callable[[Any], Any], where: str) -> Any:
    """The vector of the leaves' numbers, added up over the ranks that hold different blocks of any of them."""
    body = context.body()
    assert body is not None
    if not body.check:
        raise TransformError(
            report(
                where,
                "in a shard_map body whose types are not checked nothing tells which ranks hold "
                "blocks of one value, and which the same",
                fix=f"check_vma=True; or {where} of the arrays, outside of the body",
            )
        )
    numbers = [one(x) for x in leaves]
    varying = [tensor_types.typeof(x, body.axes).varying for x in numbers]
    axes = frozenset[str]().union(*varying)
    # What all ranks of an axis hold alike each of them adds.
    times = [math.prod(body.sizes[axis] for axis in axes - own) for own in varying]
    vector = torch.stack([x / n for x, n in zip(numbers, times)])
    return psum(vector, tuple(axis for axis in body.axes if axis in axes)) if axes else vector


class _Raise:
    """Raises when it is called with counts of which one is not 0."""

    def __init__(self, said: Sequence[str], members: Sequence[Sequence[int]]) -> None:
        self.said, self.members = said, members

    def __call__(self, *counts: Any) -> None:
        found: dict[int, int] = {}
        for members, vector in zip(self.members, counts):
            vector = vector[0] if isinstance(vector, (list, tuple)) else vector
            found.update((i, round(count)) for i, count in zip(members, vector.tolist()) if count)
        if found:
            first = min(found)
            count = found[first]
            failures = [
                f"{self.said[first]}: {count_text(count, 'number')} {'is' if count == 1 else 'are'} nan or infinite"
            ]
            if len(found) > 1:
                failures.append(f"of the other leaves, {len(found) - 1} more")
            raise VfnError(report("nan_guard", "a value is not finite", failures))
