"""The table: aten op -> how it shards.

One function serves a class of ops. To add an op, add its name to a class; to add a class, write its function in
`arithmetic.py`, `shapes.py` or `layers.py` and list it here. What has no rule is asked of DTensor's own propagator
where that is proved, and else computed whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import arithmetic, layers, shapes
from .arithmetic import contraction, elementwise, extreme, reduction
from .layers import examples
from .rule import Call, Rule, T

__all__ = ["RULES", "Call", "Rule", "T", "find"]

_CLASSES: dict[Callable[[Call], Rule | None], str] = {
    # Arithmetic; besides these, all that torch itself tags as pointwise, and every _foreach_ op.
    elementwise: "clone _to_copy copy detach alias masked_fill lift_fresh polar complex positive",
    arithmetic.lazy: "_conj _neg_view",
    arithmetic.like: "zeros_like ones_like full_like empty_like",
    arithmetic.fill: "fill zero",
    arithmetic.new: "new_zeros new_ones new_full new_empty new_empty_strided",
    contraction("mk,kn->mn"): "mm",
    contraction("bmk,bkn->bmn"): "bmm",
    contraction("mk,k->m"): "mv",
    contraction("k,k->"): "dot vdot",
    contraction("mk,kn->mn", joins=True): "addmm",
    contraction("bmk,bkn->bmn", joins=True): "baddbmm",
    contraction("mk,k->m", joins=True): "addmv",
    arithmetic.total: "sum",
    arithmetic.mean: "mean",
    extreme("max"): "amax any",
    extreme("min"): "amin all",
    arithmetic.max_or_min: "max min",
    arithmetic.spread: "var std var_mean std_mean",
    arithmetic.norm: "linalg_vector_norm _foreach_norm",
    reduction: "argmax argmin prod logsumexp median nanmedian count_nonzero mode kthvalue aminmax "
    "nansum",
    # Shapes.
    shapes.view: "view _unsafe_view reshape",
    shapes.expand: "expand",
    shapes.repeat: "repeat",
    shapes.permute: "t transpose permute",
    shapes.squeeze: "squeeze unsqueeze",
    shapes.pairs: "view_as_real view_as_complex",
    shapes.slicing: "slice select split split_with_sizes unbind narrow",
    shapes.windows: "unfold",
    shapes.diagonal: "diagonal",
    shapes.part_backward: "slice_backward select_backward unfold_backward diagonal_backward",
    shapes.part_scatter: "slice_scatter select_scatter",
    shapes.pad: "constant_pad_nd",
    shapes.cat: "cat stack",
    shapes.along: "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod logcumsumexp "
    "cummax cummin sort topk flip roll glu glu_backward linalg_cross",
    shapes.last_two: "triu tril",
    shapes.matrices: "linalg_qr linalg_cholesky_ex linalg_eigh _linalg_eigh _linalg_svd linalg_inv_ex",
    shapes.searched: "searchsorted",
    shapes.embedding: "embedding",
    shapes.embedding_backward: "embedding_dense_backward",
    shapes.gather: "gather scatter scatter_add scatter_reduce",
    shapes.index_select: "index_select",
    shapes.index_add: "index_add index_copy index_fill",
    shapes.index: "index _unsafe_index",
    shapes.index_put: "index_put _unsafe_index_put _index_put_impl",
    # Layers.
    layers.norm: "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward",
    layers.attention: " ".join(
        f"_scaled_dot_product_{kind}_attention{end}"
        for kind, ends in {"flash": ("", "_backward", "_for_cpu", "_for_cpu_backward"), "efficient": ("", "_backward"),
                           "cudnn": ("", "_backward"), "fused": ("_overrideable", "_overrideable_backward")}.items()
        for end in ends
    ),
    layers.convolution: "convolution convolution_backward",
    layers.group_norm: "native_group_norm native_group_norm_backward",
    examples(4): "max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward "
    "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward upsample_nearest2d upsample_bilinear2d upsample_bicubic2d "
    "reflection_pad2d replication_pad2d pixel_shuffle",
    layers.loss: "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy",
    layers.loss_backward: "mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward "
    "binary_cross_entropy_backward",
    layers.nll: "nll_loss_forward nll_loss2d_forward",
    layers.nll_backward: "nll_loss_backward nll_loss2d_backward",
}  # fmt: skip
RULES: dict[str, Callable[[Call], Rule | None]] = {
    name: rule for rule, names in _CLASSES.items() for name in names.split()
}


@functools.lru_cache(maxsize=4096)
def find(func: Any) -> Callable[[Call], Rule | None] | None:
    """The rule of an overload, or None; an in-place op has the rule of its out-of-place twin."""
    name = func._schema.name.removeprefix("aten::")
    if not func._schema.name.startswith("aten::"):
        return elementwise if torch.Tag.pointwise in func.tags else None
    if name.endswith("_") and not name.endswith("__") and name not in RULES:
        return _of_twin(func, name[:-1])
    rule = RULES.get(name)
    if rule is None and torch.Tag.pointwise in func.tags:
        return elementwise
    return arithmetic.elementwise_lists if rule is None and name.startswith("_foreach_") else rule


def _of_twin(func: Any, name: str) -> Callable[[Call], Rule | None] | None:
    twin = getattr(torch.ops.aten, name, None)
    overload = str(func).split(".")[-1]
    rule = find(getattr(twin, overload)) if twin and overload in twin.overloads() else RULES.get(name)
    return elementwise if rule is None and torch.Tag.pointwise in func.tags else rule
