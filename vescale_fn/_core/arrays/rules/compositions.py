"""Ops that are carried out as a few others where the dims that they sum over are split, rather than on whole dims.

So a softmax over split classes moves a maximum and a sum, a batch norm over split examples two sums a channel. Each
step (`steps.py`) is an op on arrays with a decision of its own. A line of `COMPOSED` says when, and how.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...sharding.index_map import all_hold_some
from . import attention, element_positions, steps
from .rule import dims

Rows = dict[str, Sequence[tuple[str, ...]]]  # of each tensor argument: which axes split which dim


class Composition(NamedTuple):
    """An op as others, for arrays of which one of these dims is split."""

    argument: str  # which argument, by name
    dims: Callable[[dict[str, Any], int], Sequence[int]]  # from all arguments by name, and its number of dims
    steps: Callable[..., Any]  # of the results' dtypes, and of all arguments
    some: bool = False  # whether each rank must hold some of those dims: there is a maximum of parts among the steps
    writes: tuple[str, ...] = ()  # arguments that the op changes, which its schema does not say
    # of all arguments, the axes that split each dim, and their sizes: whether there is a rule for that
    unless: Callable[[dict[str, Any], Sequence[tuple[str, ...]], dict[str, int]], bool] = lambda *_: False


def composed(name: str, args: dict[str, Any], rows: Rows, axes: dict[str, int]) -> Callable[..., Any] | None:
    """The steps that an op is carried out as, if its arguments lie so that this moves less."""
    found = COMPOSED.get(name)
    if found is None or found.argument not in rows:
        return None
    row, shape = rows[found.argument], args[found.argument].shape
    over = [d for d in found.dims(args, len(shape)) if d < len(row) and row[d]]
    if found.some and not all(all_hold_some(shape[d], row[d], axes) for d in over):
        return None
    if found.unless(args, row, axes):
        return None
    trains = bool(found.writes) and len(found.dims(args, len(shape))) > 0
    return found.steps if over or (trains and any(any(rows.get(w, ())) for w in found.writes)) else None


def _dim(args: dict[str, Any], ndim: int) -> Sequence[int]:
    return dims(args["dim"], ndim)


def _long(args: dict[str, Any], ndim: int) -> Sequence[int]:
    """The dim along which a place is looked for, where it holds more than the extremes and places that ranks compare."""
    dim = args["dim"]
    return dims(dim, ndim) if dim is not None and ndim and args["self"].shape[dim] >= 8 else ()


def _normalized(args: dict[str, Any], ndim: int) -> Sequence[int]:
    return range(ndim - len(args["normalized_shape"]), ndim)


def _examples(args: dict[str, Any], ndim: int) -> Sequence[int]:
    """What batch norm sums over while it trains and keeps statistics, which no kernel may write in part, or is cudnn's; for
    the rest there is a rule in `normalisation.py`."""
    kept = args["running_mean"] is not None
    if not args.get("training", args.get("train", True)) or not (kept or "epsilon" in args):
        return ()
    return [d for d in range(ndim) if d != 1 or kept]


def _all(args: dict[str, Any], ndim: int) -> Sequence[int]:
    return range(ndim)


def _by_groups(args: dict[str, Any], row: Sequence[tuple[str, ...]], axes: dict[str, int]) -> bool:
    """Whether examples and groups of channels are split evenly, and nothing else is."""
    ways = [math.prod(axes[axis] for axis in names) for names in row]
    return args["N"] % ways[0] == 0 and args["group"] % ways[1] == 0 and not any(row[2:]) and type(row[1]) is tuple


def _classes(args: dict[str, Any], ndim: int) -> Sequence[int]:
    return [min(ndim - 1, 1)]


def _heads(args: dict[str, Any], ndim: int) -> Sequence[int]:
    return [1]


_KEPT = ("running_mean", "running_var")
COMPOSED: dict[str, Composition] = {
    "_softmax.default": Composition("self", _dim, steps.softmax, some=True),
    "_log_softmax.default": Composition("self", _dim, steps.log_softmax, some=True),
    "_softmax_backward_data.default": Composition("output", _dim, steps.softmax_backward),
    "_log_softmax_backward_data.default": Composition("output", _dim, steps.log_softmax_backward),
    "logsumexp.default": Composition("self", _dim, steps.logsumexp, some=True),
    "argmax.default": Composition("self", _long, functools.partial(element_positions.place, False), some=True),
    "argmin.default": Composition("self", _long, functools.partial(element_positions.place, True), some=True),
    "max.dim": Composition("self", _long, functools.partial(element_positions.extreme, False), some=True),
    "min.dim": Composition("self", _long, functools.partial(element_positions.extreme, True), some=True),
    "var.correction": Composition("self", _dim, steps.variance),
    "std.correction": Composition("self", _dim, functools.partial(steps.variance, root=True)),
    "var_mean.correction": Composition("self", _dim, functools.partial(steps.variance, mean=True)),
    "std_mean.correction": Composition("self", _dim, functools.partial(steps.variance, mean=True, root=True)),
    "native_layer_norm.default": Composition("input", _normalized, steps.layer_norm),
    "native_layer_norm_backward.default": Composition("input", _normalized, steps.layer_norm_backward),
    "_fused_rms_norm.default": Composition("input", _normalized, steps.rms_norm),
    "_fused_rms_norm_backward.default": Composition("input", _normalized, steps.rms_norm_backward),
    "native_group_norm.default": Composition("input", _all, steps.group_norm, unless=_by_groups),
    "native_group_norm_backward.default": Composition("input", _all, steps.group_norm_backward, unless=_by_groups),
    "native_batch_norm.default": Composition("input", _examples, steps.batch_norm, writes=_KEPT),
    "native_batch_norm_backward.default": Composition("input", _examples, steps.batch_norm_backward, writes=_KEPT),
    "cudnn_batch_norm.default": Composition("input", _examples, steps.batch_norm, writes=_KEPT),
    "cudnn_batch_norm_backward.default": Composition("input", _examples, steps.cudnn_batch_norm_backward, writes=_KEPT),
    "_scaled_dot_product_flash_attention_for_cpu.default": Composition(
        "query", _heads, attention.with_own_keys, unless=attention.shares_keys_evenly
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": Composition(
        "query", _heads, attention.with_own_keys_backward, unless=attention.shares_keys_evenly
    ),
    "take.default": Composition("self", _all, element_positions.take),
    "put.default": Composition("self", _all, element_positions.put),
    "nll_loss_forward.default": Composition("self", _classes, steps.nll),
    "nll_loss2d_forward.default": Composition("self", _classes, steps.nll),
    "nll_loss_backward.default": Composition("self", _classes, steps.nll_backward),
    "nll_loss2d_backward.default": Composition("self", _classes, steps.nll_backward),
}

# What torch makes of other ops by reading an argument's memory: it is computed whole.
READING = frozenset(("tensor_split.tensor_indices_or_sections",))
