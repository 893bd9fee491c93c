"""What some ops have beside a rule: facts that the interpreter acts on without knowing which ops they are of."""

from __future__ import annotations

import torch

_aten = torch.ops.aten

# Kernels that give wrong numbers, or refuse, where an argument's elements do not lie in order: autograd's formulas see to it
# by what an array says of itself, which is that they do; its blocks lie as the last kernel left them.
NEEDS_CONTIGUOUS = {
    _aten.native_group_norm.default,
    _aten.native_group_norm_backward.default,
    _aten.native_layer_norm_backward.default,
    _aten.adaptive_max_pool3d_backward.default,
    _aten.fractional_max_pool2d_backward.default,
    _aten.fractional_max_pool3d_backward.default,
    _aten._ctc_loss.default,
    _aten._ctc_loss.Tensor,
    _aten._pdist_forward.default,
    _aten._pdist_backward.default,
    _aten.nll_loss2d_backward.default,
}

# What makes an array a view of itself (torch's own `matmul` of vectors does so to its result): the view that it becomes.
RETURNS_VIEW_OF_ITSELF = {
    _aten.squeeze_.default: _aten.squeeze.default,
    _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims,
    _aten.unsqueeze_.default: _aten.unsqueeze.default,
    _aten.transpose_.default: _aten.transpose.int,
    _aten.t_.default: _aten.t.default,
}
SETS_STRIDES = {_aten.as_strided_.default}

SAME_VALUE = {_aten.detach.default, _aten.alias.default}  # another name for the same value
UNSHARED_VIEW = {_aten._unsafe_view.default}  # a view of a value that nothing else should know
STATES_OFFSET = {_aten.as_strided.default: 3}  # the argument that says where a view begins in memory, where it is given
DROPS_DIM = {_aten.slice.Tensor: False, _aten.select.int: True}  # views of a part of one dim: whether it is gone
ADDITION = _aten.add.Tensor  # by which autograd adds up cotangents

READS_TABLE = {_aten.embedding.default}  # (table, indices)
TABLE_GRADIENT = _aten.embedding_dense_backward.default  # (gradient, indices, number of rows)

STAYS_PLAIN = {_aten._pack_padded_sequence.default: 1}  # the result that torch reads in C++

COPY = _aten.copy_.default
# An op in place that gives each element of its target a value that no other element has a part in; beside all pointwise ones.
BY_ELEMENT = {"copy_", "fill_", "zero_", "masked_fill_"}
READS_A_NUMBER = {"fill_", "masked_fill_", "index_fill_"}  # and nothing else, before it writes

# Ops that give new arrays, whose layout nobody has stated.
NEW = set(
    "mm addmm bmm baddbmm _unsafe_view unsafe_split unsafe_split_with_sizes new_empty new_zeros new_ones new_full "
    "new_empty_strided zeros_like ones_like full_like empty_like".split()
)
