"""The table: aten op -> how it shards.

One function serves a class of ops. To add an op, add its name to a class; to add a class, write its function in the file
of its kind (the headings below are the files) and list it here. What has no rule is asked of DTensor's own propagator
where that is proved (`proved.py`), and else computed whole; what is refused is in `refusals.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ... import torch_internals
from . import factories, indexing, losses, matrices, normalisation, parts, recurrent, reductions, scans, spatial, views
from .attention import attention
from .contractions import batched_product, contraction, grouped, grouped_shape, trilinear
from .elementwise import alike, elementwise, elementwise_lists, lazy
from .matrices import batched
from .reductions import extreme, reduction
from .rule import Call, Rule, T
from .spatial import columns, planes

__all__ = ["RULES", "SHAPES", "Call", "Rule", "T", "find"]

_CLASSES: dict[Callable[[Call], Rule | None], str] = {
    # elementwise.py: besides these, all that torch itself tags as pointwise, and every _foreach_ op
    elementwise: "clone _to_copy copy detach alias masked_fill lift_fresh polar complex positive rsub floor_divide "
    "elu_backward hardshrink_backward hardsigmoid_backward hardswish hardswish_backward hardtanh_backward "
    "leaky_relu_backward mish_backward softplus_backward softshrink_backward _prelu_kernel _prelu_kernel_backward",
    alike: "log_sigmoid_forward log_sigmoid_backward",
    lazy: "_conj _neg_view",
    # factories.py
    factories.like: "zeros_like ones_like full_like empty_like",
    factories.like_primal: "_new_zeros_with_same_feature_meta",
    factories.fill: "fill zero",
    factories.new: "new_zeros new_ones new_full new_empty new_empty_strided",
    # contractions.py
    contraction("mk,kn->mn"): "mm",
    batched_product: "bmm",
    contraction("mk,k->m"): "mv",
    contraction("k,k->"): "dot vdot",
    contraction("mk,kn->mn", joins=True): "addmm",
    contraction("bmk,bkn->bmn", joins=True): "baddbmm",
    contraction("mk,k->m", joins=True): "addmv",
    contraction("m,n->mn", joins=True): "addr",
    contraction("bmk,bkn->mn", joins=True): "addbmm",
    trilinear: "_trilinear",
    grouped: "_grouped_mm",
    # reductions.py
    reductions.total: "sum",
    reductions.mean: "mean",
    extreme("max"): "amax any",
    extreme("min"): "amin all",
    reductions.max_or_min: "max min",
    reductions.spread: "var std var_mean std_mean",
    reductions.norm: "linalg_vector_norm _foreach_norm norm",
    reductions.renorm: "renorm",
    reduction: "argmax argmin prod logsumexp median nanmedian count_nonzero mode kthvalue aminmax nansum",
    # views.py
    views.view: "view _unsafe_view reshape",
    views.expand: "expand",
    views.permute: "t transpose permute",
    views.squeeze: "squeeze unsqueeze",
    views.pairs: "view_as_real view_as_complex",
    # parts.py
    parts.slicing: "slice select split split_with_sizes unsafe_split unsafe_split_with_sizes unbind narrow",
    parts.windows: "unfold",
    parts.diagonal: "diagonal",
    parts.part_backward: "slice_backward select_backward unfold_backward diagonal_backward",
    parts.part_scatter: "slice_scatter select_scatter",
    parts.pad: "constant_pad_nd",
    parts.cat: "cat stack",
    parts.repeat: "repeat",
    # scans.py
    scans.along: "_softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod "
    "logcumsumexp cummax cummin sort topk flip roll rot90 glu glu_backward linalg_cross",
    scans.searched: "searchsorted bucketize isin",
    # indexing.py
    indexing.embedding: "embedding",
    indexing.embedding_backward: "embedding_dense_backward",
    indexing.gather: "gather scatter scatter_add scatter_reduce",
    indexing.index_select: "index_select",
    indexing.index_add: "index_add index_copy index_fill index_reduce",
    indexing.index: "index _unsafe_index",
    indexing.index_put: "index_put _unsafe_index_put _index_put_impl",
    # recurrent.py
    recurrent.lstm: "mkldnn_rnn_layer mkldnn_rnn_layer_backward",
    # matrices.py
    matrices.last_two: "triu tril",
    matrices.outer: "diag_embed",
    matrices.distances: "_cdist_forward _cdist_backward",
    batched("mm->mm"): "cholesky cholesky_inverse linalg_matrix_exp",
    batched("mm->mm,"): "linalg_cholesky_ex linalg_inv_ex",
    batched("mm->m,mm"): "_linalg_eigh linalg_eig",
    batched("mm->m"): "_linalg_eigvals",
    batched("mm->,mm,m"): "_linalg_det",
    batched("mm->,,mm,m"): "_linalg_slogdet",
    batched("mm->mm,m,"): "linalg_ldl_factor_ex",
    batched("mn->mk,kn"): "linalg_qr",
    batched("mn->mk,k,kn"): "_linalg_svd",
    batched("mn->mn,k"): "geqrf",
    batched("mn->mn,k,"): "linalg_lu_factor_ex",
    batched("mn->mm,mk,kn"): "linalg_lu",
    batched("mn,k->mm,mk,kn"): "lu_unpack",
    batched("mn,k->mn"): "linalg_householder_product",
    batched("mn,,->nm"): "linalg_pinv",
    batched("mm,mN->mN", right="mm,Nm->Nm"): "linalg_solve_triangular",
    batched("mN,mm->mN"): "cholesky_solve",
    batched("mN,mm->mN,mm"): "triangular_solve",
    batched("mm,m,mN->mN"): "linalg_ldl_solve",
    batched("mm,m,mN->mN", right="mm,m,Nm->Nm"): "linalg_lu_solve",
    batched("mk,k,mN->mN", right="mk,k,Nm->Nm"): "ormqr",
    batched("mm,mN->mN,mm,m,", right="mm,Nm->Nm,mm,m,", vector="mm,m->m,mm,m,"): "_linalg_solve_ex",
    # normalisation.py
    normalisation.layer_norm: "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward",
    normalisation.group_norm: "native_group_norm native_group_norm_backward",
    normalisation.batch_norm: "native_batch_norm",
    normalisation.batch_norm_backward: "native_batch_norm_backward",
    # attention.py
    attention: " ".join(
        f"_scaled_dot_product_{kind}_attention{end}"
        for kind, ends in {
            "flash": ("", "_backward", "_for_cpu", "_for_cpu_backward"),
            "efficient": ("", "_backward"),
            "cudnn": ("", "_backward"),
            "fused": ("_overrideable", "_overrideable_backward"),
        }.items()
        for end in ends
    ),
    # spatial.py
    spatial.convolution: "convolution convolution_backward",
    planes(1): "reflection_pad1d reflection_pad1d_backward replication_pad1d replication_pad1d_backward "
    "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d",
    planes(2): "max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward max_unpool2d "
    "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d adaptive_max_pool2d_backward "
    "fractional_max_pool2d fractional_max_pool2d_backward "
    "reflection_pad2d reflection_pad2d_backward replication_pad2d replication_pad2d_backward "
    "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    planes(3): "max_pool3d_with_indices max_pool3d_with_indices_backward avg_pool3d avg_pool3d_backward max_unpool3d "
    "_adaptive_avg_pool3d _adaptive_avg_pool3d_backward adaptive_max_pool3d adaptive_max_pool3d_backward "
    "fractional_max_pool3d fractional_max_pool3d_backward "
    "reflection_pad3d reflection_pad3d_backward replication_pad3d replication_pad3d_backward "
    "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d",
    planes(
        1, "input_size"
    ): "upsample_nearest1d_backward _upsample_nearest_exact1d_backward upsample_linear1d_backward",
    planes(2, "input_size"): "upsample_nearest2d_backward _upsample_nearest_exact2d_backward "
    "upsample_bilinear2d_backward upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward "
    "_upsample_bicubic2d_aa_backward",
    planes(3, "input_size"): "upsample_nearest3d_backward _upsample_nearest_exact3d_backward "
    "upsample_trilinear3d_backward",
    columns(3): "im2col col2im pixel_shuffle pixel_unshuffle",
    spatial.groups: "channel_shuffle native_channel_shuffle",
    spatial.grid_sample: "grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward",
    spatial.fourier: "_fft_c2c _fft_r2c _fft_c2r",
    # losses.py
    losses.loss: "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits",
    losses.loss_backward: "mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward "
    "binary_cross_entropy_backward",
    losses.nll: "nll_loss_forward nll_loss2d_forward",
    losses.nll_backward: "nll_loss_backward nll_loss2d_backward",
}
RULES: dict[str, Callable[[Call], Rule | None]] = {
    name: rule for rule, names in _CLASSES.items() for name in names.split()
}


# what gives results of an op's shapes, where the op itself does not
SHAPES = {torch.ops.aten._grouped_mm.default: grouped_shape}


# Classes whose results look alike on every device: a meta tensor says how, in a quarter of the time of a fake one.
_ALIKE_EVERYWHERE = {"elementwise", "contractions", "reductions", "views", "parts", "scans", "indexing"}


@functools.lru_cache(maxsize=4096)
def on_meta(func: Any) -> bool:
    """Whether tensors of the meta device tell what an op's results look like: it is of such a class, and names no device."""
    rule = find(func)
    names = {argument.name for argument in torch_internals.schema(func).arguments}
    return rule is not None and rule.__module__.rpartition(".")[2] in _ALIKE_EVERYWHERE and "device" not in names


@functools.lru_cache(maxsize=4096)
def find(func: Any) -> Callable[[Call], Rule | None] | None:
    """The rule of an overload, or None; an in-place op has the rule of its out-of-place twin."""
    name = torch_internals.operator_name(func).removeprefix("aten::")
    if str(func).endswith(".vec"):  # resampling by floats that say what shape comes out: taken apart
        return None
    if not torch_internals.operator_name(func).startswith("aten::"):
        return elementwise if torch.Tag.pointwise in func.tags else None
    if name.endswith("_") and not name.endswith("__") and name not in RULES:
        return _of_twin(func, name[:-1])
    rule = RULES.get(name)
    if rule is None and torch.Tag.pointwise in func.tags:
        return elementwise
    return elementwise_lists if rule is None and name.startswith("_foreach_") else rule


def _of_twin(func: Any, name: str) -> Callable[[Call], Rule | None] | None:
    twin = getattr(torch.ops.aten, name, None)
    overload = str(func).split(".")[-1]
    rule = find(getattr(twin, overload)) if twin and overload in twin.overloads() else RULES.get(name)
    return elementwise if rule is None and torch.Tag.pointwise in func.tags else rule
