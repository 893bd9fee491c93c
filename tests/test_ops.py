"""Small programs of torch ops, on arrays in sampled layouts against plain tensors on one device: values and gradients.

A program is a line of `PROGRAMS`; it runs on every mesh of `MESHES` with its inputs laid out in seeded random ways: whole,
split along any dim by one axis or several in either order (uneven and empty blocks among them), or as partial sums.
Adding a program is adding a line. The longer run, over torch's own database of ops, is `sweep.py`.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
import zlib

import optree
import pytest
import sweep
import torch
import torch.nn.functional as F
from whole import WHOLE

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core import torch_internals
from vescale_fn._core.distributed import mesh as mesh_
from vescale_fn._core.sharding.index_map import local_indices
from vescale_fn._core.sharding.spec import from_split_axes
from vescale_fn.errors import InPlaceError, RandomError, VfnError

MESHES = [(1,), (1, 1), (4,), (2, 3), (2, 2, 2)]
NAMES = ("a", "b", "c")
TOLERANCE = 1e-12  # relative: float64, sums in another order


def f(*shape):
    """Distinct values of both signs, none near another or near zero."""
    n = math.prod(shape)
    values = torch.arange(1, n + 1, dtype=torch.float64) * torch.tensor([1.0, -1.0]).repeat(n)[:n]
    return (values[torch.randperm(n, generator=torch.Generator().manual_seed(n))] / (n + 1) * 2).reshape(shape)


def i(high, *shape):
    """Integers below `high`, in no order."""
    return (torch.arange(math.prod(shape)) * 7 % high).reshape(shape)


def c(*shape):
    return torch.complex(f(*shape), f(*shape).flip(0) if shape else f() + 1)


def kept_by_batch_norm(x, mean, var, w):
    out = F.batch_norm(x, mean, var, w, training=True)
    return out, mean, var


def positive(*shape):
    return f(*shape).abs() + 0.1


# --- programs ---------------------------------------------------------------------------------------------------------

PROGRAMS = [
    # numbers
    ("add", lambda x, y: x + y, f(4, 6), f(4, 6)),
    ("add to a row", lambda x, y: x + y, f(5, 6), f(6)),
    ("add to a column", lambda x, y: x - y, f(5, 6), f(5, 1)),
    ("outer sum", lambda x, y: x + y, f(5, 1), f(1, 7)),
    ("add no dims", lambda x, y: x + y * x, f(5, 3), f()),
    ("add one", lambda x: (x + 1, x + 1.0, 1 - x, x * 2, 2 / (x + 3), x**2), f(3, 4)),
    ("numbers of each type", lambda x: (x + 1, x + 1.0, x + True, x * 2, x * 2.0, x / 2, x // 2, x % 3), i(9, 5, 3)),
    (
        "a bool and numbers",
        lambda x: (x + 1, x + 1.0, x + True, x & True, x * 2, ~x, x.sum(), x.sum(0)),
        i(3, 5, 3) > 0,
    ),
    ("plain tensors join in", lambda x: x * torch.arange(6.0, dtype=torch.float64) + torch.tensor(2), f(5, 6)),
    ("add with alpha", lambda x, y: torch.add(x, y, alpha=2) - torch.sub(x, y, alpha=0.5), f(4, 6), f(6)),
    ("scaling a sum", lambda x: (x * 3) / 4 - x, f(4, 6)),
    ("by a 0-d", lambda x, s: (x * s, s * x, x / s, x + s), f(4, 6), f()),
    ("where", lambda x, y: torch.where(x > 0, x, y), f(5, 4), f(4)),
    ("masked_fill", lambda x, m: x.masked_fill(m > 1, 0.0), f(5, 4), i(3, 5, 4)),
    ("clamp", lambda x, y: (x.clamp(-0.5, 0.5), x.clamp(min=y)), f(5, 4), f(4)),
    ("lerp, addcmul", lambda x, y, z: (torch.lerp(x, y, 0.3), torch.addcmul(x, y, z, value=2)), f(4, 3), f(4, 3), f(3)),
    ("gelu, silu", lambda x: (F.gelu(x), F.silu(x), torch.tanh(x), F.softplus(x), F.leaky_relu(x)), f(4, 6)),
    ("pow, exp, log", lambda x: (x**1.5, x.log(), x.sqrt(), x.exp(), x.rsqrt()), positive(4, 5)),
    ("complex", lambda x, y: (x * y.conj(), (x + y).abs(), x.real * y.imag, torch.view_as_real(x)), c(4, 3), c(4, 3)),
    (
        "complex product",
        lambda x, y: (x.conj() @ y, x.mH @ x, torch.view_as_complex(torch.view_as_real(y))),
        c(4, 3),
        c(3, 4),
    ),
    # types
    ("to float32 and back", lambda x: x.to(torch.float32).double(), f(5, 3)),
    ("to bfloat16", lambda x: (x.to(torch.bfloat16) * 2).sum(1, dtype=torch.float32), i(9, 5, 4).double()),
    ("to int", lambda x: (x * 10).to(torch.int64) + (x * 10).int(), f(5, 3)),
    ("a sum of integers", lambda x: (x.sum(0).to(torch.float64), x.sum(0, dtype=torch.int32) // 2), i(9, 5, 3)),
    (
        "a sum of bytes",
        lambda x: (x.sum(0, dtype=torch.uint8).long(), x.sum(0, dtype=torch.uint8) / 2),
        i(200, 5, 3).to(torch.uint8),
    ),
    ("whole numbers of a sum", lambda x: whole_numbers(x.detach()), f(5, 3) * 9),
    ("a sum of bools", lambda x: (x.sum(0, dtype=torch.bool), x.sum(0, dtype=torch.bool).long()), i(3, 6, 3) > 1),
    ("float32 of a product", lambda x, w: (x @ w).to(torch.float32).double(), i(5, 6, 8).double(), i(7, 8, 4).double()),
    # contractions
    ("mm", lambda x, w: x @ w, f(6, 4), f(4, 8)),
    ("mm uneven", lambda x, w: x @ w, f(5, 7), f(7, 3)),
    ("bmm", lambda x, y: x @ y, f(4, 3, 5), f(4, 5, 2)),
    ("mv, dot", lambda x, v: (x @ v, v @ v, (x @ v) @ (x @ v)), f(5, 6), f(6)),
    ("linear", lambda x, w, b: F.linear(x, w, b), f(2, 5, 4), f(6, 4), f(6)),
    ("linear without bias", lambda x, w: F.linear(x, w), f(2, 5, 4), f(6, 4)),
    ("two products", lambda x, w, v: (x @ w) @ v, f(5, 4), f(4, 6), f(6, 3)),
    (
        "a product, then all",
        lambda x, w: (torch.relu(x @ w), (x @ w).exp(), (x @ w) + 1, (x @ w) * (x @ w)),
        f(5, 4),
        f(4, 6),
    ),
    ("a product and a residual", lambda x, w: (x + x @ w) * 2 + (x @ w).detach(), f(5, 4), f(4, 4)),
    (
        "a square product, transposed",
        lambda x, w: (lambda p: (p * p, p.t() * p.t(), p.t() @ p))(x @ w),
        f(4, 6),
        f(6, 4),
    ),
    (
        "addmm",
        lambda b, x, w: (torch.addmm(b, x, w), torch.addmm(b[:1], x, w, beta=0.5, alpha=2)),
        f(5, 3),
        f(5, 4),
        f(4, 3),
    ),
    ("baddbmm", lambda b, x, y: torch.baddbmm(b, x, y, beta=0.5), f(1, 3, 2), f(4, 3, 5), f(4, 5, 2)),
    ("addmv", lambda b, x, v: torch.addmv(b, x, v), f(5), f(5, 4), f(4)),
    (
        "einsum",
        lambda x, y: (torch.einsum("bhi,bhj->bij", x, y), torch.einsum("bhi,chi->bc", x, y)),
        f(3, 4, 5),
        f(3, 4, 5),
    ),
    ("outer, kron", lambda x, y: (torch.outer(x, y), torch.kron(x, y)), f(5), f(4)),
    # reductions
    ("sum", lambda x: (x.sum(), x.sum(0), x.sum(-1), x.sum((0, 2)), x.sum(1, keepdim=True)), f(5, 4, 3)),
    ("mean", lambda x: (x.mean(), x.mean(0), x.mean(-1, keepdim=True), x.mean((0, 1))), f(5, 4, 3)),
    ("extremes", lambda x: (x.max(), x.min(), x.amax(0), x.amin(-1), x.amax((0, 1), keepdim=True)), f(5, 4, 3)),
    ("extremes along", lambda x: (*x.max(0), *x.min(-1), x.argmax(), x.argmin(1), x.argmax(0, keepdim=True)), f(5, 4)),
    ("extremes with nan", lambda x: (x.sqrt().amax(0), x.sqrt().max(), x.sqrt().amin()), f(8, 4)),
    ("any, all", lambda x: ((x > 3).any(), (x > 3).all(0), (x >= 0).all(), (x > 7).any(-1)), i(9, 6, 4)),
    ("var, std", lambda x: (x.var(0), x.std(), x.var((0, 1), correction=0), *torch.var_mean(x, -1)), f(5, 4)),
    (
        "norms",
        lambda x: (x.norm(), x.norm(dim=0), torch.linalg.vector_norm(x, 2.0, (0, 1)), x.norm(3, dim=1), x.norm(p=1)),
        f(5, 4),
    ),
    ("normalize", lambda x: (F.normalize(x, dim=0), F.normalize(x, dim=-1), F.cosine_similarity(x, x + 1)), f(5, 4)),
    ("prod, logsumexp", lambda x: (x.prod(), x.prod(0), x.logsumexp(0), x.logsumexp((0, 1)), x.logsumexp(-1)), f(5, 4)),
    ("median, mode", lambda x: (x.median(), *x.median(0), x.count_nonzero(0), x.amin(0), x.amax(0)), f(5, 3)),
    # shapes
    ("view", lambda x: (x.view(-1), x.view(2, 12), x.view(4, 3, 2), x.view(8, 3), x.reshape(6, 4)), f(4, 6)),
    ("view uneven", lambda x: (x.reshape(-1), x.reshape(3, 10), x.reshape(5, 2, 3), x.reshape(1, 5, 6, 1)), f(5, 6)),
    ("heads", lambda x: x.view(2, 6, 4, 3).transpose(1, 2).reshape(8, 18), f(2, 6, 12)),
    ("flatten, unflatten", lambda x: (x.flatten(1), x.flatten(), x.unflatten(1, (2, 2)), x.flatten(0, 1)), f(3, 4, 5)),
    ("transposes", lambda x: (x.t(), x.T @ x, x.mT, x.transpose(-1, 0), x[None].permute(2, 0, 1)), f(5, 4)),
    ("moving dims", lambda x: (x.movedim(0, -1), x.swapaxes(0, 2), x.permute(2, 0, 1).contiguous()), f(3, 4, 5)),
    (
        "expand",
        lambda x, y: (x.expand(4, 5), y.expand(2, 4, 5), y.expand(-1, 5), y.broadcast_to(3, 4, 5)),
        f(1, 5),
        f(4, 1),
    ),
    ("repeat, tile", lambda x: (x.repeat(2, 1), x.repeat(3, 1, 2), x.tile(2), x.repeat_interleave(2, 0)), f(3, 4)),
    (
        "squeeze",
        lambda x: (x.squeeze(), x.squeeze(0), x.squeeze(1), x.squeeze((1, 2)), x[:, 0].squeeze(0)),
        f(4, 1, 1, 3),
    ),
    ("squeeze what is one a rank", lambda x: (x.squeeze(), x.squeeze(0), x.squeeze(-1), x.unsqueeze(0)), f(4, 3)),
    ("unsqueeze", lambda x: (x.unsqueeze(0), x[:, None], x.unsqueeze(-1), x[..., None, :]), f(4, 3)),
    ("slices", lambda x: (x[0:3], x[:, 1:3], x[::2], x[-2:], x[1], x[:, -1], x[1:, :2], x[:0]), f(5, 4)),
    ("narrow, select", lambda x: (x.narrow(0, 1, 3), x.select(1, 2), x[..., 0], x[2, 3]), f(5, 4)),
    (
        "chunk, split",
        lambda x: (*x.chunk(2), *x.split([1, 3, 1]), *x.split(2, 1), *x.tensor_split(3), *x.chunk(3, -1)),
        f(5, 4),
    ),
    ("unbind", lambda x: (*x.unbind(), *x.unbind(1), *list(x)), f(5, 3)),
    ("unpack", lambda x: (lambda a, b, c: a * b + c)(*x), f(3, 4)),
    ("cat", lambda x, y: (torch.cat([x, y]), torch.cat([x, x], 1), torch.cat([y, x, y], 0)), f(5, 4), f(3, 4)),
    ("cat with none", lambda x: torch.cat([x, torch.zeros(0, dtype=torch.float64)]), f(5)),
    ("stack", lambda x, y: (torch.stack([x, y]), torch.stack([x, y], 1), torch.stack([x, y], -1)), f(5, 4), f(5, 4)),
    (
        "hstack, vstack",
        lambda x, y: (torch.hstack([x, y]), torch.vstack([x, y]), torch.column_stack([x, y])),
        f(5, 4),
        f(5, 4),
    ),
    ("flip, roll", lambda x: (x.flip(0), x.flip(0, 1), x.roll(2, 0), x.roll(1), x.rot90()), f(5, 4)),
    ("triangles", lambda x: (x.tril(), x.triu(1), x[0].tril(-1), torch.tril(x @ x.mT)), f(2, 4, 5)),
    (
        "diagonals",
        lambda x: (x.diagonal(), x.diagonal(1), x.diag(), x[:, 0].diag(), x.trace(), torch.diag_embed(x)),
        f(4, 4),
    ),
    ("unfold", lambda x: (x.unfold(0, 2, 1), x.unfold(1, 3, 2)), f(5, 6)),
    ("pad", lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, 0, 1, 1), value=2.0), F.pad(x, (-1, 0))), f(4, 5)),
    ("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), f(5), f(4)),
    (
        "no dims",
        lambda x: (x.view(1), x.expand(3), x.sum(), x.mean(), x.reshape(()), x.unsqueeze(0), x.t(), x * x),
        f(),
    ),
    ("no elements", lambda x: (x.sum(0), x.view(3, 0), x + 1, torch.cat([x, x]), x.mean(1), x @ f(3, 2)), f(0, 3)),
    ("one element", lambda x: (x.squeeze(), x.view(()), x.sum(), x.expand(4, 3), x + f(4, 3)), f(1, 1)),
    # along a dim
    ("softmax", lambda x: (x.softmax(0), x.softmax(-1), F.log_softmax(x, 1), F.softmin(x, 0)), f(5, 4)),
    ("cumsum", lambda x: (x.cumsum(0), x.cumsum(-1), x.cumprod(1), *x.cummax(0), torch.logcumsumexp(x, 1)), f(5, 4)),
    (
        "sort, topk",
        lambda x: (*x.sort(0), *x.sort(-1, True), *x.topk(2, 0), *x.topk(3), x.argsort(1), *x.kthvalue(2, 0)),
        f(5, 4),
    ),
    ("glu, cross", lambda x: (F.glu(x, 0), F.glu(x), torch.linalg.cross(x[:, :3], x[:, 3:])), f(4, 6)),
    ("diff, trapezoid", lambda x: (x.diff(), x.diff(dim=0), torch.trapezoid(x)), f(5, 4)),
    # indices
    ("index", lambda x, k: (x[k], x[:, k], x[k, k], x[k][:, k], x[k[:, None], k]), f(5, 5), i(5, 4)),
    ("negative indices", lambda x, k: (x[k], x[[0, -1]], x[-k]), f(5, 4), i(5, 6) - 3),
    ("masks", lambda x: (x[x > 0], x[(x > 0).any(1)], torch.masked_select(x, x < 0)), f(5, 4)),
    ("index_select", lambda x, k: (x.index_select(0, k), x.index_select(-1, k % 3)), f(5, 3), i(5, 4)),
    (
        "take_along",
        lambda x, k: (x.gather(0, k), x.gather(1, k % 3), torch.take_along_dim(x, k, 0), x.take(k)),
        f(5, 3),
        i(5, 5, 3),
    ),
    ("gather some", lambda x, k: (x.gather(0, k), x.gather(1, k[:1] % 3)), f(5, 4), i(5, 3, 2)),
    (
        "scatter",
        lambda x, k, v: (x.scatter(0, k, v), x.scatter(1, k % 3, 2.0), x.scatter_add(0, k, v)),
        f(5, 3),
        i(5, 4, 3),
        f(4, 3),
    ),
    ("scatter_reduce", lambda x, k, v: x.scatter_reduce(0, k, v, "amax"), f(5, 3), i(5, 4, 3), f(4, 3)),
    (
        "index_add",
        lambda x, k, v: (x.index_add(0, k, v), x.index_copy(0, k[:2], v[:2]), x.index_fill(0, k, 2)),
        f(5, 3),
        i(5, 4),
        f(4, 3),
    ),
    (
        "index_put",
        lambda x, k, v: (
            x.index_put((k,), v),
            x.index_put((k,), v, accumulate=True),
            x.index_put((k % 3, k % 3), v[0, 0]),
            x.index_put((k - 5, k % 3), v[:, 0], accumulate=True),
            x.put(k, v[:, 0], accumulate=True),
        ),
        f(5, 3),
        i(5, 5),
        f(5, 3),
    ),
    ("embedding", lambda k, w: (F.embedding(k, w), F.embedding(k, w, padding_idx=2)), i(7, 4, 3), f(7, 5)),
    ("embedding by frequency", lambda k, w: F.embedding(k, w, scale_grad_by_freq=True), i(5, 4, 3), f(5, 3)),
    ("one_hot, bincount", lambda k: (F.one_hot(k, 5), k.bincount(minlength=5), k.unique()), i(5, 8)),
    (
        "a few of many rows",
        lambda x, k: (
            x.gather(0, k),
            x.index_select(0, k[0]),
            x[k[:, 0]],
            x[:, k[0] % 3],
            x[-1 - k[0]],
            x[k[:, 0], k[:, 1] % 4 - 2],
            x[k[:2, :1], k[:1, :2] % 4],
            x.take(k[0]),
            x.gather(1, k[:, :2] % 3),
        ),
        f(13, 4),
        i(13, 3, 4),
    ),
    (
        "many into few rows",
        lambda x, k, v: (
            x.index_add(0, k[:, 0], v, alpha=2),
            x.scatter_add(0, k, v),
            x.scatter_reduce(0, k, v, "sum"),
            x.scatter_reduce(0, k, v, "mean"),
            x.index_put((k[:, 0] - 5,), v, accumulate=True),
            x.scatter_reduce(0, k, v, "sum", include_self=False),
        ),
        f(5, 4),
        i(5, 40, 4),
        f(40, 4),
    ),
    (
        "dims merged by cat",
        lambda x, y: torch.cat([x, y], 1).view(3, 2, 8).exp().chunk(2, 1)[0] + torch.cat([x, y], 1)[:, 8:].unsqueeze(1),
        f(3, 8),
        f(3, 8),
    ),
    (
        "three parts",
        lambda x: torch.cat([p * k for k, p in enumerate(x.view(12, 4).split([4, 4, 4]))], 0)[4:],
        f(3, 4, 4),
    ),
    ("select_scatter", lambda x, y: (x.select_scatter(y, 0, 1), x.slice_scatter(y[None], 0, 2, 3)), f(5, 4), f(4)),
    (
        "searchsorted, isin",
        lambda x, k: (torch.searchsorted(k.sort().values, x), torch.isin(x, k)),
        i(9, 5, 2),
        i(7, 4),
    ),
    # layers and losses
    ("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), f(3, 5, 4), f(4), f(4)),
    ("layer_norm of all", lambda x, w: F.layer_norm(x, (5, 4), w), f(5, 4), f(5, 4)),
    ("rms_norm", lambda x, w: F.rms_norm(x, (4,), w), f(3, 5, 4), f(4)),
    ("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), f(5, 4, 3), f(4), f(4)),
    (
        "group_norm of planes",
        lambda x, w, b: (F.group_norm(x, 4, w, b), F.group_norm(x, 8, w), F.group_norm(x[..., 0, 0], 2)),
        f(4, 8, 3, 2),
        f(8),
        f(8),
    ),
    ("batch_norm, training", lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), f(5, 4, 3), f(4), f(4)),
    (
        "batch_norm, evaluation",
        lambda x, m, w: F.batch_norm(x, m.detach(), m.detach().abs() + 1, w),
        f(5, 4),
        f(4),
        f(4),
    ),
    (
        "batch_norm that keeps",
        lambda x, m, v, w: kept_by_batch_norm(x, m.detach().clone(), v.detach().clone(), w),
        f(6, 4, 2),
        f(4),
        positive(4),
        f(4),
    ),
    (
        "batch_norm, batch by batch",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        f(5, 4, 3, 2),
        f(4),
        f(4),
    ),
    ("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), f(4, 2, 3, 4), f(4, 2, 5, 4), f(4, 2, 5, 4)),
    (
        "causal attention",
        lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
        f(2, 4, 3, 4),
        f(2, 4, 3, 4),
    ),
    ("masked attention", lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m), f(3, 3, 3, 4), f(3, 3)),
    ("attention masked by head", lambda q, m: F.scaled_dot_product_attention(q, q, q, m), f(3, 3, 3, 4), f(3, 1, 3, 3)),
    ("attention of three dims", lambda q, m: F.scaled_dot_product_attention(q, q, q, m), f(4, 3, 4), f(4, 3, 3)),
    (
        "grouped attention",
        lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True),
        f(2, 4, 3, 4),
        f(2, 2, 3, 4),
    ),
    ("conv1d", lambda x, w, b: F.conv1d(x, w, b, padding=1), f(5, 2, 6), f(3, 2, 3), f(3)),
    ("conv2d", lambda x, w: F.conv2d(x, w, stride=2), f(4, 2, 5, 5), f(3, 2, 3, 3)),
    ("grouped conv2d", lambda x, w: F.conv2d(x, w, groups=2), f(3, 4, 4, 4), f(4, 2, 3, 3)),
    (
        "depthwise, in groups",
        lambda x, w, v, b: (
            F.conv1d(x, w, b, padding=1, groups=4),
            F.conv1d(x, v, groups=4),
            F.conv_transpose1d(x, v, groups=4),
        ),
        f(4, 8, 4),
        f(8, 2, 3),
        f(8, 2, 1),
        f(8),
    ),
    ("conv_transpose1d", lambda x, w: F.conv_transpose1d(x, w), f(3, 2, 4), f(2, 3, 3)),
    ("conv2d of many channels", lambda x, w, b: F.conv2d(x, w, b, padding=1), f(2, 4, 3, 3), f(8, 4, 3, 3), f(8)),
    (
        "conv_transpose2d, conv3d",
        lambda x, w, y: (F.conv_transpose2d(x, w, stride=2), F.conv3d(y, y[:, :, :2, :2, :2])),
        f(2, 4, 3, 3),
        f(4, 4, 2, 2),
        f(2, 4, 3, 3, 3),
    ),
    ("convolved alone", lambda x, w, b: F.conv1d(x, w, b), f(4, 6), f(2, 4, 3), f(2)),
    (
        "pooling of lines and volumes",
        lambda x, y: (
            F.max_pool1d(x, 2),
            F.adaptive_max_pool1d(x, 3),
            F.avg_pool3d(y, 2),
            F.max_pool3d(y, 2),
            F.adaptive_avg_pool3d(y, 1),
            F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2),
        ),
        f(4, 2, 6),
        f(2, 4, 2, 2, 4),
    ),
    (
        "padding by reflection",
        lambda x, y: (F.pad(x, (1, 2), "reflect"), F.pad(y, (1, 0, 0, 1), "replicate")),
        f(4, 2, 5),
        f(2, 4, 3, 3),
    ),
    (
        "resampling",
        lambda x, y: (
            F.interpolate(x, size=7),
            F.interpolate(x, scale_factor=0.6, mode="linear"),
            F.interpolate(y, size=(3, 5), mode="bicubic"),
            F.grid_sample(y, y[:, :2].permute(0, 2, 3, 1), align_corners=True),
        ),
        f(4, 2, 5),
        f(2, 4, 3, 3),
    ),
    (
        "columns",
        lambda x: (F.unfold(x, 2), F.fold(F.unfold(x, 2), (4, 4), 2), F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2)),
        f(2, 4, 4, 4),
    ),
    ("pooling", lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 2)), f(3, 2, 4, 4)),
    (
        "upsampling",
        lambda x: (F.interpolate(x, scale_factor=2), F.interpolate(x, size=3, mode="bilinear")),
        f(3, 2, 2, 2),
    ),
    (
        "losses",
        lambda x, y: (F.mse_loss(x, y), F.l1_loss(x, y), F.smooth_l1_loss(x, y), F.huber_loss(x, y)),
        f(5, 3),
        f(5, 3),
    ),
    (
        "summed losses",
        lambda x, y: (F.mse_loss(x, y, reduction="sum"), F.mse_loss(x, y, reduction="none")),
        f(5, 3),
        f(5, 3),
    ),
    (
        "binary losses",
        lambda x, y: (F.binary_cross_entropy(x.sigmoid(), y), F.binary_cross_entropy_with_logits(x, y)),
        f(5, 3),
        i(2, 5, 3).double(),
    ),
    (
        "weighted binary loss",
        lambda x, w: F.binary_cross_entropy(x.sigmoid(), (w > 0.5).double(), w.detach()),
        f(5, 3),
        positive(5, 3),
    ),
    (
        "soft margin, kl",
        lambda x, y: (F.soft_margin_loss(x, y.detach().sign()), F.kl_div(x, y.softmax(1), reduction="batchmean")),
        f(5, 3),
        f(5, 3),
    ),
    ("cross_entropy", lambda x, y: F.cross_entropy(x, y), f(5, 4), i(4, 5)),
    (
        "cross_entropy, classes weighted",
        lambda x, y, w: F.cross_entropy(x, y, w.detach()),
        f(5, 4),
        i(4, 5),
        positive(4),
    ),
    (
        "cross_entropy, some ignored",
        lambda x, y: (F.cross_entropy(x, y, ignore_index=1), F.cross_entropy(x, y * 0 - 100)),
        f(6, 4),
        i(4, 6),
    ),
    (
        "cross_entropy, smoothed",
        lambda x, y, w: F.cross_entropy(x, y, w.detach(), label_smoothing=0.1),
        f(5, 4),
        i(4, 5),
        positive(4),
    ),
    (
        "cross_entropy, summed",
        lambda x, y: (F.cross_entropy(x, y, reduction="sum"), F.cross_entropy(x, y, reduction="none")),
        f(5, 4),
        i(4, 5),
    ),
    (
        "cross_entropy of images",
        lambda x, y, w: F.cross_entropy(x, y, w.detach()),
        f(3, 4, 5, 2),
        i(4, 3, 5, 2),
        positive(4),
    ),
    ("cross_entropy of sequences", lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()), f(3, 5, 4), i(4, 3, 5)),
    ("cross_entropy of one", lambda x, y: F.cross_entropy(x, y), f(4), i(4)),
    ("cross_entropy of chances", lambda x, y: F.cross_entropy(x, y.softmax(-1)), f(5, 4), f(5, 4)),
    ("nll of a product", lambda x, w, y: F.nll_loss((x @ w).log_softmax(1), y), f(5, 6), f(6, 4), i(4, 5)),
    (
        "multi_margin, hinge",
        lambda x, y: (F.multi_margin_loss(x, y), F.hinge_embedding_loss(x, x.sign())),
        f(5, 4),
        i(4, 5),
    ),
    (
        "linear algebra",
        lambda x: (torch.linalg.inv(x), torch.linalg.det(x), torch.linalg.qr(x).R.abs(), x.logdet().isnan()),
        f(4, 4) + 3 * torch.eye(4, dtype=torch.float64),
    ),
    (
        "matrices in batches",
        lambda x, y: (
            torch.linalg.solve(x, y),
            torch.linalg.slogdet(x),
            torch.linalg.inv(x) @ y,
            torch.linalg.solve_triangular(x, y, upper=True),
            torch.linalg.matrix_exp(x / 9),
            torch.linalg.lu_factor(x).LU,
            torch.cholesky_solve(y, torch.linalg.cholesky(x @ x.mT)),
            torch.linalg.solve(x, y[..., 0]),
            torch.linalg.pinv(x),
        ),
        f(4, 3, 3) + 3 * torch.eye(3, dtype=torch.float64),
        f(4, 3, 4),
    ),
    (
        "distances, forms",
        lambda x, y, w: (
            torch.cdist(x, y),
            F.bilinear(x, y[:, :3], w),
            F.pairwise_distance(x, y[:, :3]),
            torch.diag_embed(x, dim1=0),
            torch.addr(x[0], x[0, :, 0], x[0, 0]),
            torch.addbmm(x[0], x.mT[:, :3], x),
        ),
        f(4, 3, 3),
        f(4, 6, 3),
        f(2, 3, 3),
    ),
    (
        "more activations",
        lambda x, w: (
            F.elu(x),
            F.hardswish(x),
            F.mish(x),
            F.logsigmoid(x),
            F.prelu(x, w),
            F.hardtanh(x),
            F.softshrink(x, 0.1),
        ),
        f(5, 4, 2),
        f(4),
    ),
    (
        "along what may be split",
        lambda x, w: (
            x.softmax(-1),
            x.log_softmax(0),
            x.logsumexp((0, 1)),
            x.var(1),
            x.std((0, 1)),
            *torch.var_mean(x, 0),
            F.layer_norm(x, (4, 6), w, w),
            F.rms_norm(x, (6,), w[0]),
        ),
        f(4, 4, 6),
        f(4, 6),
    ),
    (
        "windows of a sound",
        lambda x: torch.stft(x, 4, 2, window=torch.ones(4, dtype=x.dtype), return_complex=True).abs(),
        f(3, 16),
    ),
    (
        "fft",
        lambda x: (torch.fft.fft(x).abs(), torch.fft.rfft(x, dim=0).abs(), torch.fft.ifft(torch.fft.fft(x)).real),
        f(5, 4),
    ),
    # writes
    ("in place", lambda x, y: (x * 1).add_(y).mul_(2).sub_(1).clamp_(min=-1), f(5, 4), f(5, 4)),
    ("in place, broadcast", lambda x, y: (x * 1).add_(y).div_(y), f(5, 4), f(4)),
    ("in place from a number", lambda x: (x.clone().zero_(), x.clone().fill_(2), x.clone().copy_(x[0] * 2)), f(5, 4)),
    ("operators in place", lambda x, y: inplace_operators(x * 1, y), f(5, 4), f(5, 4)),
    (
        "in place on a product",
        lambda x, w: ((x @ w).add_(1), (x @ w).mul_(2), (x @ w).add_(x @ w), (x @ w).relu_()),
        f(5, 4),
        f(4, 6),
    ),
    ("a sum, used, then written", lambda x, w: used_then_written(x @ w), f(5, 4), f(4, 6)),
    ("in place with itself", lambda x: (lambda y: y.add_(y).mul_(y).copy_(y))(x.detach() * 1), f(5, 4)),
    ("masked in place", lambda x, m: (x * 1).masked_fill_(m > 1, 0.0), f(5, 4), i(3, 5, 4)),
    (
        "in place on integers",
        lambda x: (x.clone().add_(3), x.clone().bitwise_and_(6), x.clone().floor_divide_(2)),
        i(9, 5, 3),
    ),
    ("through the transpose", lambda x: through(x * 1, lambda y: y.t().mul_(2)), f(5, 4)),
    ("through a detached name", lambda x: through(x.detach() * 1, lambda y: y.detach().mul_(2)), f(5, 4)),
    (
        "another shape in place",
        lambda x: ((x * 1).t_(), (x * 1).unsqueeze_(0).mul_(2), (x[:, :1] * 1).squeeze_(1)),
        f(5, 4),
    ),
    ("scatter in place", lambda x, k, v: (x * 1).scatter_(0, k, v), f(5, 3), i(5, 4, 3), f(4, 3)),
    (
        "rows in place",
        lambda x, k, v: (
            (x * 1).index_add_(0, k[:, 0], v),
            (x * 1).scatter_add_(0, k, v),
            (x * 1).index_copy_(0, k[:3, 0] * 0 + torch.arange(3), v[:3]),
            (x * 1).index_put_((k[:, 0],), v, accumulate=True),
        ),
        f(5, 4),
        i(5, 40, 4),
        f(40, 4),
    ),
    ("index_add in place", lambda x, k, v: (x * 1).index_add_(0, k, v), f(5, 3), i(5, 4), f(4, 3)),
    ("boolean setitem", lambda x: setitem(x * 1, lambda y: y > 0, 0.0), f(5, 4)),
    ("indexed setitem", lambda x, k, v: setitem(x * 1, lambda y: k, v), f(5, 4), i(5, 3), f(4)),
    (
        "foreach",
        lambda x, y, v: (torch._foreach_add([x, v], [y, v]), torch._foreach_mul([x, v], 3), torch._foreach_exp([x, v])),
        f(5, 4),
        f(5, 4),
        f(3),
    ),
    ("foreach in place", lambda x, y, v: foreach_in_place([x * 1, v * 1], [y, v]), f(5, 4), f(5, 4), f(3)),
    (
        "foreach norms",
        lambda x, v: (torch._foreach_norm([x, v]), torch._foreach_norm([x, v], 1), torch._foreach_max([x, v])),
        f(5, 4),
        f(3),
    ),
    ("clipping", lambda x, v: clipped([x * 9, v]), f(5, 4), f(3)),
    # derivatives
    ("grad of grad", lambda x, w: second_order(x, w), f(5, 4), f(4, 3)),
    ("func.grad", lambda x, w: torch.func.grad(lambda w: ((x @ w).tanh() ** 2).sum())(w), f(5, 4), f(4, 3)),
    ("jvp", lambda x, w: torch.func.jvp(lambda w: (x @ w).tanh(), (w,), (w * 2,)), f(5, 4), f(4, 3)),
    ("hessian", lambda x: torch.func.hessian(lambda x: (x.sin() * x.sum()).sum())(x), f(4)),
    (
        "jacobians",
        lambda x, w: (torch.func.jacrev(torch.mv, 1)(w.t(), x), torch.func.jacfwd(lambda x: x.exp())(x)),
        f(5),
        f(5, 3),
    ),
    ("vmap", lambda x, w: torch.func.vmap(lambda x: (x @ w).softmax(-1))(x), f(5, 4), f(4, 3)),
    (
        "vmap of grad",
        lambda x, w: torch.func.vmap(torch.func.grad(lambda w, x: (w * x).sum() ** 2), (None, 0))(w, x),
        f(5, 4),
        f(4),
    ),
    ("backward()", lambda x, w: backward_twice(x, w), f(5, 4), f(4, 3)),
    # reading
    ("numbers", lambda x: read_as_numbers(x.detach()), f(5, 4)),
    (
        "comparisons",
        lambda x, y: (torch.equal(x, y), torch.equal(x, x * 1), torch.allclose(x, x + 1e-9), (x == y).all().item()),
        f(5, 4),
        f(5, 4) * 2,
    ),
    ("text", lambda x: (f"{x.sum():.3f}", len(x), x.shape, x.numel(), x.dim(), x.is_floating_point()), f(5, 4)),
    (
        "like this",
        lambda x: (torch.zeros_like(x), x.new_ones(3), torch.full_like(x, 2.0), x.new_zeros(x.shape)),
        f(5, 4),
    ),
]


def whole_numbers(x):
    return x.sum(0).to(torch.int64), x.sum(0, dtype=torch.int64), x.floor().sum()


def read_as_numbers(x):
    return x.sum().item(), float(x.mean()), int((x > 0).sum()), bool((x > -9).all()), x.tolist()


def inplace_operators(x, y):
    x += y
    x *= 2
    x -= 0.5
    x /= y
    return x


def used_then_written(p):
    q = p.detach()
    a = (q * q).clone()
    q.mul_(3)
    b = q * q
    q += 1
    return a, b, q, q * q


def written_view(p):
    q = p.detach()
    v = q.view(-1)
    w = v * v
    v.mul_(2)
    return w, v * v, q, q * q


def through(x, write):
    write(x)
    return x * 2


def setitem(x, key, value):
    x[key(x)] = value
    return x


def foreach_in_place(xs, ys):
    torch._foreach_mul_(xs, 0.5)
    torch._foreach_add_(xs, ys, alpha=2)
    torch._foreach_addcmul_(xs, ys, ys, value=0.1)
    torch._foreach_lerp_(xs, ys, 0.25)
    return xs


def clipped(grads):
    leaves = [torch.zeros_like(g).requires_grad_() for g in grads]
    for leaf, g in zip(leaves, grads):
        leaf.grad = g.detach() * 1
    norm = torch.nn.utils.clip_grad_norm_(leaves, 1.0)
    return norm, [leaf.grad for leaf in leaves]


def second_order(x, w):
    w = w.detach().requires_grad_()
    (g,) = torch.autograd.grad(((x.detach() @ w).tanh() ** 2).sum(), w, create_graph=True)
    (h,) = torch.autograd.grad((g * g).sum(), w)
    return g.detach(), h


def backward_twice(x, w):
    w = w.detach().requires_grad_()
    for _ in range(2):
        F.mse_loss(x.detach() @ w, x.detach()[:, :3]).backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
        w.sub_(w.grad, alpha=0.5)
    return w.detach(), w.grad


# --- the run ----------------------------------------------------------------------------------------------------------


def sampled_spec(rng, ndim, axes, partial):
    """Each axis splits a dim, or nothing, or leaves partial sums; axes that share a dim come in any order."""
    rows, unreduced = [[] for _ in range(ndim)], set()
    for axis in rng.sample(list(axes), len(axes)):
        choice = rng.randrange(-1 - partial, ndim)
        if choice >= 0:
            rows[choice].append(axis)
        elif choice == -2:
            unreduced.add(axis)
    return from_split_axes(rows, unreduced)


def laid_out(x, mesh, spec):
    """`x` in a layout; its parts along unreduced axes differ."""
    axes = mesh_.axes_of(mesh)

    def block(coord):
        where = local_indices(x.shape, axes, spec, coord)
        part = x
        for dim, held in enumerate(where):
            part = part.index_select(dim, torch.tensor(list(held), dtype=torch.int64))
        for axis in spec.unreduced:
            part = (
                part * (axes[axis] + 1 if coord[axis] == 0 else -axes[axis] / (axes[axis] - 1))
                if axes[axis] > 1
                else part
            )
        return part.contiguous()

    return vfn.from_local(block, mesh, spec)


def outcome(program, inputs):
    """The results of a program, and the gradients of all its floating inputs."""
    leaves = [x.requires_grad_() for x in inputs if x.dtype.is_floating_point or x.dtype.is_complex]
    out = program(*inputs)
    tensors = [o for o in optree.tree_leaves(out) if isinstance(o, torch.Tensor) and o.requires_grad]
    if not tensors:
        return out, None
    loss = sum(
        ((o * o.conj()).real * torch.arange(1, o.numel() + 1, dtype=torch.float64).reshape(o.shape).cos()).sum()
        for o in tensors
    )
    return out, torch.autograd.grad(loss, leaves, allow_unused=True)


def assert_same(want, got, where):
    a, b = optree.tree_leaves(want), optree.tree_leaves(got)
    assert len(a) == len(b), where
    for k, (x, y) in enumerate(zip(a, b)):
        if not isinstance(x, torch.Tensor):
            assert x == pytest.approx(y) if isinstance(x, float) else x == y, f"{where}: leaf {k}"
            continue
        shape = y.shape
        y = vfn.unshard(y.detach())
        assert x.dtype == y.dtype, f"{where}: leaf {k}"
        assert x.shape == y.shape == shape, f"{where}: leaf {k}"
        tolerance = TOLERANCE if x.dtype in (torch.float64, torch.complex128) else 0
        scale = x.detach().abs().max().item() if x.numel() and x.dtype is not torch.bool else 1
        assert torch.allclose(
            x, y, rtol=tolerance, atol=tolerance * max(scale, 1) if math.isfinite(scale) else tolerance, equal_nan=True
        ), f"{where}: leaf {k}\n{x}\n{y}"


def runs(name, inputs, layouts=None):
    """(where, laid out inputs) for each mesh and sampled layout: two where axes differ in size, else one, and one of the meshes
    of a single rank in turn; on the whole two on each mesh."""
    for mesh_shape in MESHES:
        if not (WHOLE or layouts) and mesh_shape == MESHES[zlib.crc32(name.encode()) % 2]:
            continue
        count = layouts or (2 if WHOLE or mesh_shape == (2, 3) else 1)
        with vfn.simulate(math.prod(mesh_shape)):
            mesh = vfn.make_mesh(mesh_shape, NAMES[: len(mesh_shape)])
            for seed in range(count if max(mesh_shape) > 1 else 1):
                rng = random.Random(zlib.crc32(f"{name} {mesh_shape} {seed}".encode()))
                specs = [sampled_spec(rng, x.ndim, mesh_.axes_of(mesh), x.dtype.is_floating_point) for x in inputs]
                where = f"{name} on {mesh_shape}, inputs {', '.join(map(repr, specs))}"
                yield where, [laid_out(x, mesh, spec) for x, spec in zip(inputs, specs)]


@pytest.mark.parametrize(
    ("name", "program", "inputs"), [(n, p, x) for n, p, *x in PROGRAMS], ids=[n for n, *_ in PROGRAMS]
)
def test_program(name, program, inputs):
    want = outcome(program, [x.clone() for x in inputs])
    for where, arrays in runs(name, inputs):
        assert_same(want, outcome(program, arrays), where)


@pytest.mark.parametrize(
    ("name", "program", "inputs"), [(n, p, x) for n, p, *x in PROGRAMS[::4]], ids=[n for n, *_ in PROGRAMS[::4]]
)
def test_program_on_one_real_rank(name, program, inputs):
    """The short ways of the interpreter, which a simulated mesh does not take."""
    mesh = vfn.make_mesh((1,), ("a",))
    want = outcome(program, [x.clone() for x in inputs])
    for dim in range(-1, max(x.ndim for x in inputs)):
        specs = [P(*[None] * dim, "a") if 0 <= dim < x.ndim else P() for x in inputs]
        arrays = [vfn.shard(x.clone(), mesh, spec) for x, spec in zip(inputs, specs)]  # a program may write them
        assert_same(want, outcome(program, arrays), f"{name}, dim {dim}")


# --- what must raise, and what may ------------------------------------------------------------------------------------


def written(x, write):
    write(x)
    return x, x * 2


WRITES = [  # right, or an InPlaceError that leaves the array as it was
    ("a slice", lambda x: written(x, lambda y: y[0:3].mul_(2)), f(5, 4)),
    ("a row", lambda x: written(x, lambda y: y[1].zero_()), f(5, 4)),
    ("a flat view", lambda x: written(x, lambda y: y.view(-1).add_(1)), f(5, 4)),
    ("another shape", lambda x: written(x, lambda y: y.view(2, 2, 6).mul_(3)), f(4, 6)),
    ("a diagonal", lambda x: written(x, lambda y: y.diagonal().fill_(1)), f(4, 4)),
    ("setitem of a slice", lambda x: setitem(x, lambda y: slice(0, 3), 0.0), f(5, 4)),
    ("setitem of a column", lambda x: setitem(x, lambda y: (slice(None), 0), 7.0), f(5, 4)),
    ("setitem of an array", lambda x, v: setitem(x, lambda y: 2, v), f(5, 4), f(4)),
    ("a chunk", lambda x: written(x, lambda y: y.chunk(2)[0].mul_(2)), f(5, 4)),
    ("unbound", lambda x: written(x, lambda y: y.unbind(1)[0].mul_(2)), f(5, 4)),
    ("a view of a view", lambda x: written(x, lambda y: y.t()[0].mul_(2)), f(5, 4)),
    ("a view of a product", lambda x, w: written_view(x @ w), f(5, 4), f(4, 6)),
    ("an array that has a view", lambda x: written_under(x, lambda y: y[1:3]), f(5, 4)),
    ("an array that has a flat view", lambda x: written_under(x, lambda y: y.view(-1)), f(5, 4)),
    ("an array that has a transpose", lambda x: written_under(x, lambda y: y.t()), f(5, 4)),
    ("the real part", lambda x: written(x, lambda y: y.real.mul_(2)), c(4, 3)),
    ("a conjugate", lambda x: written(x, lambda y: y.conj().mul_(2j)), c(4, 3)),
    ("rows of a conjugate", lambda x: written(x, lambda y: y.conj()[1:3].mul_(2j)), c(4, 3)),
    ("a conjugate of rows", lambda x: written(x, lambda y: y[1:3].conj().mul_(2j)), c(4, 3)),
    ("the imaginary part of rows", lambda x: written(x, lambda y: y.imag[1:3].mul_(2)), c(4, 3)),
    ("strides", lambda x: written(x, lambda y: y.as_strided((2, 2), (1, 2)).mul_(2)), f(5, 4)),
    ("strides of a view", lambda x: x[2:].as_strided((2,), (1,), 0), f(5, 4)),
    ("out=", lambda x, y: torch.add(x, y, out=x), f(5, 4), f(4)),
    ("out= of a matmul", lambda x, y: torch.mm(x, y, out=x), f(4, 4), f(4, 4)),
    (
        "out= of kron",
        lambda x, y: (lambda o: (torch.kron(x, y, out=o), o))(torch.zeros_like(torch.kron(x, y))),
        f(2, 3),
        f(4, 2),
    ),
    (
        "into a plain tensor",
        lambda x: (lambda z: (z.copy_(x), z.add_(x)))(torch.zeros(5, 4, dtype=torch.float64)),
        f(5, 4),
    ),
    ("from a copy of a view", lambda x: written(x, lambda y: y.add_(y.t().clone())), f(4, 4)),
]


def written_under(x, view):
    v = view(x)
    x.mul_(3)
    return v * 2, x


@pytest.mark.parametrize(("name", "program", "inputs"), [(n, p, x) for n, p, *x in WRITES], ids=[n for n, *_ in WRITES])
def test_write_is_right_or_refused(name, program, inputs):
    with torch.no_grad():
        want = program(*[x.clone() for x in inputs])
        right = 0
        for where, arrays in runs(name, inputs, layouts=4):
            try:
                got = program(*arrays)
            except InPlaceError:
                continue
            right += 1
            assert_same(want, got, where)
    assert right or name == "strides of a view" or "a conjugate" in name, "refused in every layout"


REFUSED = [
    ("dropout", lambda x: F.dropout(x, 0.5), RandomError, "vfn.random.dropout(key, x, rate)"),
    ("rand_like", torch.rand_like, RandomError, "vfn.random.uniform(key, x.shape, spec=vfn.spec_of(x))"),
    ("randn_like", torch.randn_like, RandomError, "vfn.random.normal(key, x.shape, spec=vfn.spec_of(x))"),
    ("uniform_", lambda x: x.uniform_(), RandomError, "vfn.random.uniform"),
    ("bernoulli", torch.bernoulli, RandomError, "vfn.random.bernoulli"),
    ("multinomial", lambda x: torch.multinomial(x, 1), RandomError, "vfn.random.categorical"),
    (
        "attention with dropout",
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.1),
        RandomError,
        "dropout",
    ),
    ("resize_", lambda x: x.resize_(2, 2), InPlaceError, "new array"),
    ("out= of another shape", lambda x: torch.add(x, x, out=x.new_zeros(3, 3)), InPlaceError, "without out="),
]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")  # torch's own, just before
@pytest.mark.parametrize(("name", "program", "error", "text"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused(name, program, error, text):
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("a",))
        for spec in (P("a"), P(None, "a"), P()):
            x = vfn.shard(positive(4, 4), mesh, spec)
            with pytest.raises(error) as raised:
                program(x)
            assert text in str(raised.value)
            assert torch.equal(vfn.unshard(x), positive(4, 4))


def test_what_one_device_refuses_is_refused_alike():
    x, y = f(4, 3), f(4, 2)
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("a",))
        a, b = (vfn.shard(v, mesh, P("a")) for v in (x, y))
        for program in (
            torch.add,
            torch.mm,
            lambda x, y: x.view(5),
            lambda x, y: x.sum(4),
            lambda x, y: x[7],
            lambda x, y: x.long().add_(0.5),
            lambda x, y: torch.cat([x, y]),
        ):
            with pytest.raises(Exception) as plain:
                program(x, y)
            with pytest.raises(type(plain.value)) as sharded:
                program(a, b)
            assert not isinstance(sharded.value, VfnError)


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.huber_loss, F.binary_cross_entropy])
def test_the_mean_of_nothing_is_nan(loss):
    with vfn.simulate(2):
        x = vfn.shard(torch.ones(0, 4), vfn.make_mesh((2,), ("a",)), P(None, "a"))
        assert vfn.unshard(loss(x, x)).isnan()


def test_a_chance_is_asked_each_time():
    """A float is not part of a decision's key: no chance of dropping must not allow a later one."""
    with vfn.simulate(2):
        x = vfn.shard(f(4, 3), vfn.make_mesh((2,), ("a",)), P("a"))
        assert torch.equal(vfn.unshard(F.dropout(x, 0.0)), f(4, 3))
        assert torch.equal(vfn.unshard(torch.native_dropout(x, 0.0, True)[0]), f(4, 3))
        with pytest.raises(RandomError):
            torch.native_dropout(x, 0.5, True)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
@pytest.mark.parametrize("foreach", [True, False])
def test_torch_optimizers(optimizer, foreach):
    """Three steps on arrays of different layouts."""

    def steps(w, b, x):
        step = optimizer([w, b], lr=0.1, weight_decay=0.01, foreach=foreach)
        for _ in range(3):
            step.zero_grad()
            F.mse_loss(x @ w + b, x[:, :3]).backward()
            step.step()
        return w.detach(), b.detach()

    want = steps(f(6, 3).requires_grad_(), f(3).requires_grad_(), f(8, 6))
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("a", "b"))
        w, b, x = (vfn.shard(v, mesh, s) for v, s in ((f(6, 3), P("a")), (f(3), P("b")), (f(8, 6), P("a"))))
        assert_same(want, steps(w.requires_grad_(), b.requires_grad_(), x), optimizer.__name__)


def test_under_inference_mode():
    with vfn.simulate(2), torch.inference_mode():
        x, w = (
            vfn.shard(v, vfn.make_mesh((2,), ("a",)), P(None, "a")) for v in (f(4, 6), f(6, 4).t().contiguous().t())
        )
        w = vfn.with_sharding(w, P("a"))
        p = x @ w
        q = p * p
        p.add_(1)
        want = f(4, 6) @ f(6, 4).t().contiguous().t()
        assert_same((want * want, (want + 1) ** 2), (q, p * p), "inference")


def test_moves_say_why():
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        x = vfn.shard(f(8, 4).float(), mesh, P("dp", "tp"))
        with vfn.comm_log() as log:
            x.sort(1)
            ((x @ x.t()).relu(), x.cumsum(0), torch.linalg.qr(x))
        assert [(entry.op, entry.axis, entry.why) for entry in log] == [
            ("all_gather", "tp", "sort needs dim 1 whole: f32[8@dp,4@tp]"),
            ("all_gather", "dp", "mm needs dim 1 whole: f32[4@tp,8@dp]"),
            ("all_reduce", "tp", "relu needs the sum: f32[8@dp,8]{U:tp}"),
            ("all_gather", "dp", "cumsum needs dim 0 whole: f32[8@dp,4@tp]"),
            ("all_gather", "tp", "linalg_qr needs dims 0 and 1 whole: f32[8@dp,4@tp]"),
            ("all_gather", "dp", "linalg_qr needs dims 0 and 1 whole: f32[8@dp,4@tp]"),
        ]


def moves_of(program, mesh_shape, *laid):
    """What a program moves: (collective, bytes) of each; inputs are (tensor, spec)."""
    with vfn.simulate(math.prod(mesh_shape)):
        mesh = vfn.make_mesh(mesh_shape, NAMES[: len(mesh_shape)])
        arrays = [vfn.shard(x.detach(), mesh, spec).requires_grad_(x.is_floating_point()) for x, spec in laid]
        with vfn.comm_log() as log:
            out = program(*arrays)
            torch.autograd.grad((out * out.detach()).sum(), [x for x in arrays if x.requires_grad])
        return [(entry.op, entry.bytes) for entry in log if entry.bytes > 8]  # not the loss itself


@pytest.mark.parametrize(
    ("program", "laid", "moves"),
    [
        # A maximum and a sum; in the backward pass nothing, and no rank makes the whole of a value of all classes.
        (
            lambda x, y: F.cross_entropy(x, y, reduction="sum"),
            [(f(10, 8), P(None, "a")), (i(8, 10), P())],
            [("all_reduce", 80)] * 2,
        ),
        (lambda x: x.softmax(1), [(f(10, 8), P(None, "a"))], [("all_reduce", 80)] * 3),
        # One sum each way, of three numbers a channel and of two: SyncBatchNorm's.
        (
            lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
            [(f(8, 4, 5), P("a")), (f(4), P()), (f(4), P())],
            [("all_reduce", 96), ("all_reduce", 64)],
        ),
        (lambda x: F.layer_norm(x, (8,)), [(f(10, 8), P(None, "a"))], [("all_reduce", 80)] * 4),
        # The channels of a convolution as the columns and rows of Megatron's two products.
        (
            lambda x, w, v: F.conv1d(F.conv1d(x, w, padding=1).relu(), v),
            [(f(2, 3, 6), P()), (f(4, 3, 3), P("a")), (f(3, 4, 1), P(None, "a"))],
            [("all_reduce", 288)],
        ),
        # What is each example's, or each channel's own, moves nothing.
        (lambda x: F.max_pool3d(F.interpolate(x, scale_factor=2), 2), [(f(4, 2, 3, 2, 2), P("a"))], []),
        (lambda x: F.adaptive_avg_pool2d(F.pad(x, (1, 1, 1, 1), "reflect"), 2), [(f(2, 4, 3, 3), P(None, "a"))], []),
        (
            lambda x, y: torch.linalg.solve(x, y),
            [(f(4, 3, 3), P("a")), (f(4, 3, 2), P("a"))],
            [("all_gather", 16)],
        ),  # whether each could be solved: where one could not, all ranks raise
        (lambda x: torch.fft.fft(x).abs(), [(f(4, 6), P("a"))], []),
        # Rows by number, of split rows: what was read is added up, what is written stays; many that are added, as a sum.
        (lambda x, k: x.gather(1, k), [(f(4, 12), P(None, "a")), (i(12, 4, 1), P())], [("all_reduce", 32)]),
        (lambda x, k: x[k[0]], [(f(12, 4), P("a")), (i(12, 1, 3), P())], [("all_reduce", 96)]),
        (lambda x, k: x[k[0], k[1]], [(f(12, 6), P("a")), (i(6, 2, 3), P())], [("all_reduce", 24)]),
        (lambda x, k: x.take(k), [(f(12, 6), P("a")), (i(6, 3), P())], [("all_reduce", 24)]),
        (lambda x, k, v: x.index_add(0, k, v), [(f(8, 4), P("a")), (i(8, 3), P()), (f(3, 4), P())], []),
        (
            lambda x, k, v: x.scatter_add(0, k, v),
            [(f(2, 4), P()), (i(2, 40, 4), P("a")), (f(40, 4), P("a"))],
            [("all_reduce", 64)],
        ),
        # Groups of channels are for themselves; where a group is cut, one number a channel is gathered, four times in all.
        (lambda x, w, b: F.group_norm(x, 2, w, b), [(f(3, 8, 9), P(None, "a")), (f(8), P("a")), (f(8), P("a"))], []),
        (lambda x: F.group_norm(x, 1), [(f(3, 8, 9), P(None, "a"))], [("all_reduce", 24)] * 4),
        (
            lambda x, w, b: F.conv1d(x, w, b, groups=4),
            [(f(3, 4, 9), P(None, "a")), (f(4, 1, 3), P("a")), (f(4), P("a"))],
            [],
        ),
        # What is split in two, and put together again, stays where it is.
        (
            lambda x, w: sum(p.exp() for p in (x @ w).chunk(2, 1)),
            [(f(3, 4), P()), (f(4, 8), P(None, P.merged((2, None), (4, "a"))))],
            [],
        ),
        (lambda x: torch.cat([x, x.exp()], 1).view(3, 2, 4).sum(1), [(f(3, 4), P(None, "a"))], []),
    ],
    ids=[
        "cross_entropy",
        "softmax",
        "batch_norm",
        "layer_norm",
        "convolutions",
        "volumes",
        "channels",
        "solve",
        "fft",
        "gather",
        "index",
        "index two dims",
        "take",
        "index_add",
        "scatter_add",
        "group_norm",
        "groups cut",
        "depthwise",
        "chunks of merged dims",
        "cat",
    ],
)
def test_nothing_moves_that_need_not(program, laid, moves):
    assert moves_of(program, (2,), *laid) == moves


FIRST, SECOND, W = P("a"), P(None, "a"), P()


@pytest.mark.parametrize(
    ("program", "laid"),
    [
        (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(f(5, 2, 3, 4), FIRST), (f(3, 2, 3, 3), W), (f(3), W)]),
        (
            lambda x, w, b: F.conv1d(x, w, b),
            [(f(4, 2, 5), FIRST), (f(3, 2, 3), W), (f(3), W)],
        ),  # the third rank has none
        (lambda x, w, b: F.conv1d(x, w, b, groups=5), [(f(2, 5, 4), SECOND), (f(5, 1, 3), FIRST), (f(5), FIRST)]),
        (lambda x, w, b: F.conv1d(x, w, b), [(f(2, 3, 5), W), (f(5, 3, 3), FIRST), (f(5), FIRST)]),
        (lambda x: F.max_pool2d(F.interpolate(x, scale_factor=2), 2), [(f(2, 5, 2, 2), SECOND)]),
        (lambda x: F.adaptive_avg_pool2d(F.pad(x, (1, 1, 1, 1), "reflect"), 2), [(f(5, 2, 3, 3), FIRST)]),
        (lambda x, w, b: F.group_norm(x, 5, w, b), [(f(3, 5, 4), SECOND), (f(5), FIRST), (f(5), FIRST)]),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k), [(f(4, 2, 3, 4), FIRST), (f(4, 2, 5, 4), FIRST)]),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k), [(f(2, 5, 3, 4), SECOND), (f(2, 5, 5, 4), SECOND)]),
        (lambda x: torch.fft.fft(x).abs(), [(f(5, 4), FIRST)]),
        (lambda x: x.var(1) + x.std(1), [(f(5, 4), FIRST)]),
    ],
)
def test_what_is_split_unevenly_is_not_gathered(program, laid):
    tensors = tuple(x for x, _ in laid)
    grad = vfn.grad(lambda *args: program(*args).square().sum(), tuple(range(len(laid))))
    with vfn.simulate(3):
        mesh = vfn.make_mesh((3,), ("a",))
        held = [vfn.shard(x, mesh, spec) for x, spec in laid]
        with vfn.comm_log() as log:
            got = program(*held), grad(*held)
        assert {entry.op for entry in log} <= {"all_reduce"}, log
        torch.testing.assert_close(vfn.unshard(got), (program(*tensors), grad(*tensors)))


@pytest.mark.parametrize(("names", "batch"), [("a", 5), ("ab", 5), ("ba", 2)])  # 2 of 6 ranks have something
def test_a_product_of_an_uneven_batch_gathers_nothing(names, batch):
    """[batch, tokens, dim] seen as rows, which torch's products work on, stays split between sequences."""
    x, w, b = f(batch, 3, 4), f(6, 4), f(6)
    rnn = torch.nn.GRU(4, 3, batch_first=True).double()
    weights = [p.detach() for p in rnn.parameters()]
    labels = torch.arange(batch * 3).remainder(6)
    programs = {
        "@": lambda x, w, b: x @ w.t(),
        "linear": lambda x, w, b: F.linear(x, w, b).tanh(),
        "cross_entropy": lambda x, w, b: F.cross_entropy(F.linear(x, w, b).flatten(0, 1), labels, reduction="none"),
        "gru": lambda x, w, b: torch._VF.gru(x, x.new_zeros(1, batch, 3), weights, True, 1, 0.0, False, False, True)[0],
    }
    with vfn.simulate(6 if len(names) > 1 else 2):
        mesh = vfn.make_mesh((2, 3)[: len(names)], ("a", "b")[: len(names)])
        held = vfn.shard(x, mesh, P(tuple(names))), vfn.shard(w, mesh, P()), vfn.shard(b, mesh, P())
        for name, program in programs.items():
            grad = vfn.grad(lambda *args, program=program: program(*args).square().sum(), (0, 1, 2))
            with vfn.comm_log() as log:
                got = program(*held), (vfn.jit(grad) if name == "linear" else grad)(*held)
            assert {entry.op for entry in log} <= {"all_reduce"}, (name, log)
            torch.testing.assert_close(vfn.unshard(got), (program(x, w, b), grad(x, w, b)))


@pytest.mark.parametrize("ranks", [2, 3])  # the third has no sequence
def test_a_float32_lstm_of_a_split_batch_gathers_nothing(ranks):
    """On CPU torch gives it to oneDNN, to train as well."""
    run, params = vfn.module_function(torch.nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True))
    x = f(4, 5, 3).float()
    grad = vfn.grad(lambda p, x: sum(y.square().sum() for y in (run(p, x)[0], *run(p, x)[1])), (0, 1))
    with vfn.simulate(ranks):
        mesh = vfn.make_mesh((ranks,), ("a",))
        held = vfn.shard(params, mesh, P()), vfn.shard(x, mesh, P("a"))
        with vfn.comm_log() as log, torch.no_grad():
            result = run(*held)
        assert not len(log), log
        with vfn.comm_log() as log:
            got = grad(*held)
        assert {entry.op for entry in log} == {"all_reduce"}, log
        torch.testing.assert_close(vfn.unshard(result), run(params, x))
        torch.testing.assert_close(vfn.unshard(got), grad(params, x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(vfn.unshard(vfn.jit(grad)(*held)), vfn.unshard(got), rtol=1e-4, atol=1e-5)


def test_a_matrix_for_each_group_of_rows():
    """grouped_mm, whatever is split, evenly or not: each rank its own rows and its own groups, and nothing is gathered."""
    w, v = f(4, 16, 24).float() / 9, f(16, 24).float()
    loss = lambda x, w, offs: (F.grouped_mm(x, w, offs=offs) * v).sum()
    layouts = [
        (P("a"), P()),
        (P(), P("b")),
        (P("a"), P("b")),
        (P(None, "b"), P(None, "b")),
        (P("a"), P(None, None, "b")),
        (P("a", "b"), P(None, "b")),
        (P(), P(("b", "a"))),
        (P(("a", "b")), P()),
    ]
    for ends in ([3, 3, 10, 16], [0, 0, 0, 16], [16, 16, 16, 16]):
        x, offs = f(16, 16).float(), torch.tensor(ends, dtype=torch.int32)
        want = F.grouped_mm(x, w, offs=offs), vfn.grad(loss, (0, 1))(x, w, offs)
        with vfn.simulate(6):
            mesh = vfn.make_mesh((2, 3), ("a", "b"))
            for rows, matrices in layouts:
                held = vfn.shard(x, mesh, rows), vfn.shard(w, mesh, matrices), offs
                with vfn.comm_log() as log:
                    got = F.grouped_mm(held[0], held[1], offs=offs), vfn.grad(loss, (0, 1))(*held)
                assert not log.count("all_gather"), (rows, matrices, log)
                torch.testing.assert_close(vfn.unshard(got), want, rtol=1e-5, atol=1e-4)


def test_a_shape_that_a_float_says():
    """In inference mode the op comes with its scale, and no decision of another scale serves."""
    with vfn.simulate(2), torch.inference_mode():
        mesh = vfn.make_mesh((2,), ("a",))
        x = f(4, 2, 3)
        for scale in (0.7, 1.7, 2.0):
            got = F.interpolate(vfn.shard(x, mesh, P("a")), scale_factor=scale)
            assert_same(F.interpolate(x, scale_factor=scale), got, scale)


def test_a_composite_op_moves_nothing_in_inference_mode():
    """There it comes as it is, and is taken apart."""
    with vfn.simulate(2), torch.inference_mode():
        mesh = vfn.make_mesh((2,), ("a",))
        x = vfn.shard(f(4, 6), mesh, P("a"))
        with vfn.comm_log() as log:
            y = F.linear(x.to(torch.float32).flatten(1).softmax(-1), torch.ones(3, 6))
        assert vfn.spec_of(y) == P("a")
        assert not list(log)


# --- real ranks -------------------------------------------------------------------------------------------------------


def on_real_ranks(names):
    """Run programs on this rank of a (2, 2) mesh; the failures' texts."""
    mesh, failures = vfn.make_mesh((2, 2), ("a", "b")), []
    for name, program, *inputs in PROGRAMS + WRITES:
        if name in names:
            rng = random.Random(zlib.crc32(name.encode()))
            specs = [sampled_spec(rng, x.ndim, ("a", "b"), x.dtype.is_floating_point) for x in inputs]
            try:
                want = outcome(program, [x.clone() for x in inputs])
                assert_same(
                    want, outcome(program, [laid_out(x, mesh, s) for x, s in zip(inputs, specs)]), f"{name} {specs}"
                )
            except Exception as error:
                failures.append(f"{name} {specs}: {type(error).__name__}: {error}")
    return failures


def test_on_real_ranks(gloo):
    """What a simulated mesh does otherwise: short ways, lists, numbers that differ by rank, maxima over a group."""
    names = [
        name
        for name, *_ in PROGRAMS
        if name.startswith(
            (
                "numbers",
                "extremes",
                "any",
                "view",
                "heads",
                "expand",
                "squeeze",
                "cat",
                "stack",
                "foreach",
                "cross_entropy",
                "in place",
                "norms",
                "attention",
                "group_norm",
                "a few of many rows",
                "rows in place",
                "depthwise, in groups",
                "index_put",
                "a sum, used",
                "complex",
                "clipping",
                "to bfloat16",
                "vmap",
                "backward",
            )
        )
    ]
    assert gloo(4, on_real_ranks, names) == [[]] * 4


# --- torch's own database ---------------------------------------------------------------------------------------------


def test_a_sample_of_the_database():
    """A seeded sample of the longer run, `sweep.py`: nothing wrong, and nothing raises but what refuses."""
    pytest.importorskip("expecttest", reason="torch's database of ops needs the expecttest package")
    drawn, table = random.Random(0), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's test code
        for k, op in enumerate(drawn.sample(sweep.database(), 30)):
            layouts = {name: sweep.LAYOUTS[name] for name in drawn.sample(list(sweep.LAYOUTS), 2)}
            if "linalg" not in op.name:
                table |= sweep.sweep([op], sweep.DTYPES[k % 3 :][:1], 1, layouts, sweep.KINDS)
    bad = {key: row for key, row in table.items() if sweep.worst(row) in (sweep.WRONG, sweep.RAISES)}
    assert len(table) > 40
    assert not bad


def test_zeros_are_filled_into_parts_of_a_sum_and_other_numbers_into_the_sum():
    x, mask = torch.randn(4, 6, dtype=torch.float64), torch.tensor([True, False, True, False, False, True])
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("i",))
        summed = lambda: vfn.shard(x, mesh, P("i")).sum(0)
        for value in (0.0, 1.5, 0, 2, -0.0):  # decided anew for each
            with vfn.comm_log() as log:
                filled = summed().masked_fill(mask, value)
            assert log.count() == (value != 0)
            assert vfn.spec_of(filled) == (P() if value else P(unreduced={"i"}))
            torch.testing.assert_close(vfn.unshard(filled), x.sum(0).masked_fill(mask, value), rtol=1e-15, atol=1e-15)
            written = summed()
            written.masked_fill_(mask, value)
            torch.testing.assert_close(vfn.unshard(written), x.sum(0).masked_fill(mask, value), rtol=1e-15, atol=1e-15)


def test_results_look_as_on_one_device() -> None:
    """Shapes, strides and dtypes of classes of ops that are asked of meta tensors, in several memory orders."""
    x, k = f(6, 4, 1, 5), torch.tensor([2, 0, 1])
    orders = [lambda x: x.permute(3, 0, 2, 1), lambda x: x[:, 1:].expand(6, 3, 3, 5).to(torch.bfloat16)]
    calls = [
        lambda x: [x * 2, x + x[:1], x > 0, x.int() / 2, torch.where(x > 0, x, 0), x.clone(), *torch._foreach_exp([x])],
        lambda x: [x.flatten(1, 2) @ x.flatten(1, 2).mT, torch.einsum("abcd,abcd->ad", x, x), x[0, 0] @ x[0, 0].mT],
        lambda x: [x.sum(1), x.mean(), x.amax((0, 3), True), *x.max(1), x.var(0), x.norm(dim=2), x.argmin(0)],
        lambda x: [x.reshape(-1), x.unflatten(1, (1, -1)), x.squeeze(), x.transpose(1, 2), x[:1].expand(7, -1, -1, -1)],
        lambda x: [x[1], *x.split(1, 0), torch.cat([x, x]), torch.stack([x, x], 1), x.unfold(0, 2, 1), x.diagonal()],
        lambda x: [x.sort(0)[0], x.cumsum(1), x.topk(1, 0)[0], x.flip(0)],
        lambda x: [x[k], x[:, k % 2, k % 1], x.index_select(0, k), x.gather(0, x.long() % 3), x.index_add(0, k, x[:3])],
    ]
    look = lambda x: (x.shape, x.stride(), x.dtype)
    with vfn.simulate(2):
        array = vfn.shard(x, vfn.make_mesh((2,), ("a",)), P("a"))
        for n, (order, call) in enumerate(itertools.product(orders, calls)):
            assert list(map(look, call(order(array)))) == list(map(look, call(order(x)))), n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_the_place_of_an_extreme_along_a_split_dim_is_the_first_one(dtype: torch.dtype) -> None:
    """Also among NaNs and infinities, and equal values on several ranks. Extremes and places are compared, no rows gathered."""
    x = torch.randint(-4, 4, (5, 13, 3), generator=torch.Generator().manual_seed(0)).to(dtype)
    if dtype.is_floating_point:
        x[1, 3:9:4, 0], x[4, 12, 2], x[2, :, 1], x[3, :, 1] = math.nan, math.nan, -math.inf, math.inf
    calls = [lambda x: (x.argmax(1), x.argmin(-2, True)), lambda x: x.max(1), lambda x: x.min(1, True)]
    with vfn.simulate(6):
        m = vfn.make_mesh((2, 3), ("a", "b"))
        for spec in (P("a", "b"), P(None, ("b", "a"))):
            array = vfn.shard(x, m, spec)
            for call in calls:
                with vfn.comm_log() as log:
                    found = call(array)
                assert {record.op for record in log} == {"all_reduce"}
                for one, want in zip(found, call(x), strict=True):
                    torch.testing.assert_close(vfn.unshard(one), want, rtol=0, atol=0, equal_nan=True)
                    assert one.stride() == want.stride()


def test_what_results_look_like_is_remembered_by_all_that_it_depends_on():
    """Also where the layout is another: numbers that are equal and of other types, strides, dtypes, the default dtype."""
    flags, ints = torch.tensor([True, False, True]), torch.arange(6).reshape(2, 3)
    cases = [(flags, lambda x, n=n: x + n) for n in (1, True, 1.0)]
    cases += [(x, lambda x, n=n: x * n) for n in (2, 2.0) for x in (ints, ints.int(), ints.T, ints.T.contiguous())]
    cases += [(ints, lambda x, d=d: x.sum(d)) for d in (0, 1, None)]
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("i",))
        for spec in (P(), P("i")):
            for dtype in (torch.float32, torch.float64):
                torch.set_default_dtype(dtype)
                for x, f in cases:
                    want, got = f(x), f(vfn.shard(x, mesh, spec))
                    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
                    assert (
                        torch_internals.spec(got).tensor_meta.dtype == want.dtype
                    )  # of which the next decision is made
                    assert torch.equal(vfn.unshard(got), want)
