"""Cross entropy of a linear layer, whose scores are never all there: neither on one rank, nor for all classes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import _torch, context, marks
from ..array import is_array, mesh_of, spec_of
from ..errors import CollectiveError, described, meant, report, short
from ..mesh import axes_of, axis_names
from ..ops import pmax, psum
from ..ops.maps import index
from ..ops.sending import taking_part
from ..placement import with_sharding
from ..shard_map import shard_map
from ..spec import P, from_split_axes, split_axes
from .bodies import brought
from .scores import summed_up

Axes = tuple[str, ...]
_REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100,
                         label_smoothing: float = 0.0, reduction: str = "mean", chunk: int | None = None,
                         axis: str | Sequence[str] | None = None) -> torch.Tensor:  # fmt: skip
    """``F.cross_entropy(F.linear(x, weight), target)``, without the scores of all tokens at once.

    The scores of `chunk` tokens at a time are made, and made again in the backward pass: one more multiplication, and no
    memory but for what is given, its gradients, and some numbers a token. Where the classes are split over ranks, each
    rank makes the scores of its own classes, and two all-reduces of a few numbers a token put them together, whatever
    `chunk` is; the backward pass adds up the gradient of x, as after any linear layer that is split so.

    Args:
        x: [..., D]; its tokens may be split.
        weight: [V, D], as in ``F.linear``: a tied embedding table, say, or the transpose of a matrix [D, V]. V may be
            split: ``P("tp")``.
        target: i64[...], classes from 0 to V - 1; what is neither one nor `ignore_index` makes the loss nan.
        ignore_index: tokens with this target count for nothing.
        label_smoothing: the share of each target that is spread evenly over all classes.
        reduction: "mean" over the tokens that count, "sum", or "none": one number a token.
        chunk: how many of a rank's tokens at a time; by default so many that their scores are as large as x.
        axis: the axes that V is split over; by default those of the weight that do not split x. A weight that is split
            over the axes of the tokens, too, is gathered (that is FSDP), and so are tokens over these axes (that is
            sequence parallelism, which must be said here). In a `shard_map` body it must be said if V is split at all.

    Returns:
        A number, or [...] without a reduction; in float32 of halves.

    Raises:
        CollectiveError: arguments that do not fit each other, or V or tokens that do not divide by their ranks.

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
    _check(x, weight, target, label_smoothing, reduction, chunk)
    losses, counts = _each(x, weight, target, axis, (ignore_index, float(label_smoothing), chunk))
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    both = torch.stack([losses, counts]).unsqueeze(-1)
    both = both.sum(tuple(range(1, both.ndim)))
    if is_array(both):
        both = with_sharding(both, P(), mesh=mesh_of(both))  # one sum over the ranks
    return both[0] / both[1]


def _each(x: Any, weight: Any, target: Any, axis: Any, options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each token, and 1 or 0: whether it counts."""
    arrays = [a for a in (x, weight, target) if is_array(a)]
    if not arrays:
        if context.body() is None or axis is None:
            return _local(x, weight, target, None, *options)
        return _local(x, weight, target, taking_part("nn.linear_cross_entropy", axis)[1], *options)
    mesh = mesh_of(arrays[0])
    sizes, rows = axes_of(mesh), split_axes(spec_of(x), x.ndim)[:-1]
    of_tokens = {a for row in rows for a in row}
    if axis is None:
        names = tuple(a for a in split_axes(spec_of(weight), 2)[0] if a not in of_tokens)
    else:
        names = axis_names(axis, sizes, "nn.linear_cross_entropy")
    rows = [tuple(a for a in row if a not in names) for row in rows]
    _check_even(x, weight, rows, names, sizes)
    # What is gathered here has a gradient that is added up and split again in one step: it is left to be added up.
    of_weight = {a for row in split_axes(spec_of(weight), 2) for a in row}
    specs = (
        from_split_axes([*rows, ()], reduced=of_tokens.intersection(names)),
        from_split_axes([names], reduced=of_weight.intersection(of_tokens).difference(names)),
        from_split_axes(rows),
    )
    given = with_sharding((x, weight, target), specs, mesh=mesh)
    return _mapped(mesh, specs, names, *options)(*given)


@functools.lru_cache(maxsize=256)
def _mapped(mesh: Any, specs: tuple[P, P, P], names: Axes, *options: Any) -> Any:
    def linear_cross_entropy(x: Any, weight: Any, target: Any) -> Any:
        return _local(x, weight, target, names, *options)

    return shard_map(linear_cross_entropy, mesh=mesh, in_specs=specs, out_specs=specs[2])


def _local(
    x: Any, weight: Any, target: Any, names: Axes | None, ignore: int, smoothing: float, chunk: int | None
) -> Any:
    """`_each` of a rank's tokens, where the classes are split along `names`, or whole."""
    shape, classes = target.shape, weight.shape[0]
    x, goal = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    chunk = chunk or max(1, x.numel() // max(classes, 1))
    body = context.body()
    if body is None:
        log, picked, total = summed_up(x, weight, goal, torch.zeros_like(goal[:0].sum()), chunk)
    else:
        (x, weight, goal), have = brought("nn.linear_cross_entropy", (x, weight, goal), names or (), body)
        with _torch.no_torch_function():
            first = index(body.mesh, names) * classes if names else torch.zeros_like(goal[:0].sum())
            found = summed_up(x, weight, goal, first, chunk)
            for one in found:
                marks.mark(one, have)
        log, picked, total = found
    if names:
        most = pmax(log.detach(), names)
        share, picked, *rest = psum((torch.exp(log - most), picked, *[total] * bool(smoothing)), names)
        log, total = most + torch.log(share), rest[0] if rest else total
        classes *= math.prod(body.sizes[a] for a in names)  # type: ignore[union-attr]
    losses = log - (1 - smoothing) * picked - (smoothing / classes) * total if smoothing else log - picked
    losses, counts = losses.reshape(shape), target != ignore
    known = (target >= 0) & (target < classes)
    return torch.where(counts, torch.where(known, losses, math.nan), 0.0), counts.to(losses.dtype)


def _check(x: Any, weight: Any, target: Any, smoothing: Any, reduction: Any, chunk: Any) -> None:
    failures = []
    floats = lambda a: isinstance(a, torch.Tensor) and a.is_floating_point()
    if not floats(x) or not x.ndim:
        failures.append(f"x must be a float tensor [..., D], but it is {described(x)}")
    if not floats(weight) or weight.ndim != 2 or not weight.shape[0]:
        failures.append(f"weight must be a float tensor [V, D], but it is {described(weight)}")
    if not isinstance(target, torch.Tensor) or target.dtype != torch.int64:
        failures.append(f"target must be classes, an int64 tensor, but it is {described(target)}")
    if not failures:
        if x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
            transposed = "; weight.mT?" if x.shape[-1] == weight.shape[0] else ""
            failures.append(f"x is {described(x)} and weight {described(weight)}: one width, one dtype{transposed}")
        if tuple(target.shape) != tuple(x.shape[:-1]):
            failures.append(f"x has {list(x.shape[:-1])} tokens, but target is {described(target)}")
    if isinstance(smoothing, bool) or not isinstance(smoothing, (int, float)) or not 0 <= smoothing <= 1:
        failures.append(f"label_smoothing must be a number from 0 to 1, but it is {described(smoothing)}")
    if reduction not in _REDUCTIONS:
        failures.append(f"reduction={short(reduction)} is not one of {_REDUCTIONS}{meant(reduction, _REDUCTIONS)}")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        failures.append(f"chunk must be a positive int, or None, but it is {described(chunk)}")
    if failures:
        raise CollectiveError(report("nn.linear_cross_entropy", "the arguments do not fit", failures))


def _check_even(x: Any, weight: Any, rows: Sequence[Axes], names: Axes, sizes: Any) -> None:
    failures = []
    for what, size, axes in (("classes", weight.shape[0], names), *(
            (f"dim {dim} of x", x.shape[dim], row) for dim, row in enumerate(rows))):  # fmt: skip
        n = math.prod(sizes[a] for a in axes)
        if size % n:
            along = ", ".join(map(repr, axes))
            failures.append(f"{what} {'do' if what == 'classes' else 'does'} not divide by the {n} ranks along {along}: "
                            f"{size} % {n} = {size % n}")  # fmt: skip
    if failures:
        raise CollectiveError(report("nn.linear_cross_entropy", "the ranks' parts would differ in size", failures,
                                     "pad the classes with rows whose scores are low, tokens with ignore_index; or "
                                     "F.cross_entropy, which takes any sizes"))  # fmt: skip
