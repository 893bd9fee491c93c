"""Cross entropy of a linear layer, whose scores are never all there: neither on one rank, nor for all classes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from .._core import torch_internals
from .._core.arrays.array import is_array, mesh_of, spec_of
from .._core.arrays.placement import with_sharding
from .._core.base import context
from .._core.base.errors import CollectiveError
from .._core.base.messages import described, meant, report, short
from .._core.distributed.mesh import axis_names
from .._core.local_types import tensor_types
from .._core.shard_map.collective_calls import taking_part
from .._core.shard_map.collective_maps import index
from .._core.shard_map.shard_map import shard_map
from .._core.sharding.index_map import axes_of
from .._core.sharding.spec import P, from_split_axes, split_axes
from ..ops import pmax, psum
from .blockwise import wide
from .bodies import brought
from .padding import cut, padded, spans
from .scores import summed_up

Axes = tuple[str, ...]
_REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    class_weights: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk: int | None = None,
    axis: str | Sequence[str] | None = None,
) -> torch.Tensor:
    """``F.cross_entropy(F.linear(x, weight), target)``, without the scores of all tokens at once.

    The scores of `chunk` tokens at a time are made, and made again in the backward pass: one more multiplication, and no
    memory but for what is given, its gradients, and some numbers a token. Where the classes are split over ranks, each
    rank makes the scores of its own classes, and two all-reduces of a few numbers a token put them together, whatever
    `chunk` is; the backward pass adds up the gradient of x, as after any linear layer that is split so.

    Args:
        x: [..., D]; its tokens may be split, evenly or not.
        weight: [V, D], as in ``F.linear``: a tied embedding table, say, or the transpose of a matrix [D, V]. V may be
            split, ``P("tp")``, evenly or not.
        target: i64[...], classes from 0 to V - 1; what is neither one nor `ignore_index` makes the loss nan.
        class_weights: [V], what a token of each class counts for, as ``F.cross_entropy(weight=...)``: each for 1 if there
            are none. Every rank has all of them; they get no gradient.
        ignore_index: tokens with this target count for nothing.
        label_smoothing: the share of each target that is spread evenly over all classes.
        reduction: "mean" over the tokens that count, by their weights, "sum", or "none": one number a token.
        chunk: how many of a rank's tokens at a time; by default so many that their scores are as large as x.
        axis: the axes that V is split over; by default those of the weight that do not split x. A weight that is split
            over the axes of the tokens, too, is gathered (that is FSDP), and so are tokens over these axes (that is
            sequence parallelism, which must be said here). In a `shard_map` body it must be said if V is split at all.

    Returns:
        A number, or [...] without a reduction; in float32 of halves.

    Raises:
        CollectiveError: arguments that do not fit each other.

    Source: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3, for split classes; Wijmans et al., "Cut Your
        Losses" (arXiv 2411.09009).

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> x, weight, target = torch.randn(6, 4), torch.randn(10, 4), torch.tensor([1, 9, 0, -100, 5, 2])
    >>> one = torch.nn.functional.cross_entropy(x @ weight.T, target)
    >>> with vfn.simulate(2):
    ...     weight = vfn.shard(weight, vfn.make_mesh((2,), ("tp",)), P("tp"))
    ...     torch.allclose(vfn.unshard(vfn.nn.linear_cross_entropy(x, weight, target)), one)
    True
    """
    _check(x, weight, target, class_weights, label_smoothing, reduction, chunk)
    losses, counts = _each(x, weight, target, class_weights, axis, (ignore_index, float(label_smoothing), chunk))
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    both = torch.stack([losses, counts]).unsqueeze(-1)
    both = both.sum(tuple(range(1, both.ndim)))
    if is_array(both):
        both = with_sharding(both, P(), mesh=mesh_of(both))  # one sum over the ranks
    return both[0] / both[1]


def _each(x: Any, weight: Any, target: Any, shares: Any, axis: Any, options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each token, and what it counts for: 0 if it is to be ignored, else 1 or by the weight of its class."""
    shares = None if shares is None else shares.detach()
    arrays = [a for a in (x, weight, target) if is_array(a)]
    if not arrays:
        if context.body() is None or axis is None:
            return _local(x, weight, target, shares, None, None, *options)
        names = taking_part("nn.linear_cross_entropy", axis, "axis")[1]
        return _local(x, weight, target, shares, names, None, *options)
    mesh = mesh_of(arrays[0])
    sizes, rows = axes_of(mesh), split_axes(spec_of(x), x.ndim)[:-1]
    of_tokens = {a for row in rows for a in row}
    if axis is None:
        names = tuple(a for a in split_axes(spec_of(weight), 2)[0] if a not in of_tokens)
    else:
        names = axis_names(axis, sizes, "nn.linear_cross_entropy", "axis")
    if weight.shape[0] % math.prod(sizes[a] for a in names):  # in another order a part need not be contiguous
        names = tuple(a for a in sizes if a in names)
    specs = _specs(rows, of_tokens, spec_of(weight), names)
    x, weight, target = with_sharding((x, weight, target), specs, mesh=mesh)
    count, tokens = weight.shape[0], target.shape
    weight = padded(weight, mesh, specs[1], 0, "nn.linear_cross_entropy")
    for dim in range(len(tokens)):  # tokens added here get a loss like any other; it is cut off, so its gradient is 0
        x, target = (padded(one, mesh, specs[i], dim, "nn.linear_cross_entropy") for one, i in ((x, 0), (target, 2)))
    parts = None if weight.shape[0] == count else spans(count, names, mesh)
    specs = (*specs, None if shares is None else P(), None if parts is None else from_split_axes([names]))
    found = _mapped(mesh, specs, names, count, *options)(x, weight, target, shares, parts)
    for dim, size in enumerate(tokens):
        found = tuple(cut(one, mesh, specs[2], dim, size, "nn.linear_cross_entropy") for one in found)
    return found


def _specs(rows: Any, of_tokens: set[str], of_weight: P, names: Axes) -> tuple[P, P, P]:
    """How x, weight and target must lie, where the classes are split along `names`. What is gathered for that has a gradient
    that is added up and split again in one step: it is left to be added up."""
    rows = [tuple(a for a in row if a not in names) for row in rows]
    held = {a for row in (*split_axes(of_weight, 2), of_weight.reduced) for a in row}
    return (
        from_split_axes([*rows, ()], reduced=of_tokens.intersection(names)),
        from_split_axes([names], reduced=held.intersection(of_tokens).difference(names)),
        from_split_axes(rows),
    )


@functools.lru_cache(maxsize=256)
def _mapped(mesh: Any, specs: tuple[P | None, ...], names: Axes, count: int, *options: Any) -> Any:
    def linear_cross_entropy(x: Any, weight: Any, target: Any, shares: Any, parts: Any) -> Any:
        return _local(x, weight, target, shares, names, (count, parts), *options)

    return shard_map(linear_cross_entropy, mesh=mesh, in_specs=specs, out_specs=specs[2])


def _local(
    x: Any,
    weight: Any,
    target: Any,
    shares: Any,
    names: Axes | None,
    sizes: tuple[int, Any] | None,
    ignore: int,
    smoothing: float,
    chunk: int | None,
) -> Any:
    """`_each` of a rank's tokens, where the classes are split along `names`, or whole.

    `sizes`: how many classes there are, and where a rank's begin and end, i64[1, 2], where parts are not of one size.
    """
    shape, classes = target.shape, weight.shape[0]
    x, goal = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    chunk = chunk or max(1, x.numel() // max(classes, 1))
    body = context.body()
    ranks = math.prod(body.sizes[a] for a in names) if body is not None and names else 1
    count, parts = sizes or (classes * ranks, None)
    shares = None if shares is None else shares.to(wide(x[:0]).dtype)
    more = [] if shares is None else [shares]
    if body is None:
        log, picked, total = summed_up(x, weight, goal, torch.zeros_like(goal[:0].sum()), chunk, None, *more)
    else:
        more += [] if parts is None else [parts]
        (x, weight, goal, *more), have = brought("nn.linear_cross_entropy", (x, weight, goal, *more), names or (), body)
        with torch_internals.no_torch_function():
            first = index(body.mesh, names) * classes if names else torch.zeros_like(goal[:0].sum())
            known = None
            if parts is not None:
                first, end = more.pop()[0].unbind()
                known = end - first
            mine = [one[(first + torch.arange(classes, device=one.device)).clamp(max=count - 1)] for one in more]
            found = summed_up(x, weight, goal, first, chunk, known, *mine)
            for one in found:
                tensor_types.mark(one, have)
        log, picked, total = found
    if names:
        most = pmax(log.detach(), names)
        share, picked, *rest = psum((torch.exp(log - most), picked, *[total] * bool(smoothing)), names)
        log, total = most + torch.log(share), rest[0] if rest else total
    counts, known = target != ignore, (target >= 0) & (target < count)
    each, of_classes = torch.ones_like(log).reshape(shape), float(count)
    if shares is not None:
        each, of_classes = shares[target.clamp(0, count - 1)], shares.sum()
    losses = (log - picked).reshape(shape) * each
    if smoothing:
        even = (of_classes * log - total).reshape(shape) / count
        losses = (1 - smoothing) * losses + smoothing * even
    return torch.where(counts, torch.where(known, losses, math.nan), 0.0), torch.where(counts, each, 0.0)


def _check(x: Any, weight: Any, target: Any, shares: Any, smoothing: Any, reduction: Any, chunk: Any) -> None:
    failures = []
    if not _is_float(x) or not x.ndim:
        failures.append(f"x must be a float tensor [..., D], but it is {described(x)}")
    if not _is_float(weight) or weight.ndim != 2 or not weight.shape[0]:
        failures.append(f"weight must be a float tensor [V, D], but it is {described(weight)}")
    if not isinstance(target, torch.Tensor) or target.dtype != torch.int64:
        failures.append(f"target must be classes, an int64 tensor, but it is {described(target)}")
    failures = failures or _unlike(x, weight, target, shares)
    if isinstance(smoothing, bool) or not isinstance(smoothing, (int, float)) or not 0 <= smoothing <= 1:
        failures.append(f"label_smoothing must be a number from 0 to 1, but it is {described(smoothing)}")
    if reduction not in _REDUCTIONS:
        failures.append(f"reduction={short(reduction)} is not one of {_REDUCTIONS}{meant(reduction, _REDUCTIONS)}")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        failures.append(f"chunk must be a positive int, or None, but it is {described(chunk)}")
    if failures:
        raise CollectiveError(report("nn.linear_cross_entropy", "the arguments do not fit", failures))


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _unlike(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, shares: Any) -> list[str]:
    """In what the tensors do not fit each other."""
    failures = []
    if x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
        transposed = "; weight.mT?" if x.shape[-1] == weight.shape[0] else ""
        failures.append(f"x is {described(x)} and weight {described(weight)}: one width, one dtype{transposed}")
    if tuple(target.shape) != tuple(x.shape[:-1]):
        failures.append(f"x has {list(x.shape[:-1])} tokens, but target is {described(target)}")
    if shares is not None and (not _is_float(shares) or tuple(shares.shape) != (weight.shape[0],)):
        failures.append(
            f"class_weights must be a float tensor [{weight.shape[0]}], one for each class, but it is "
            f"{described(shares)}"
        )
    return failures
