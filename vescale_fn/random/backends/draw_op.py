"""The draw as one torch operator, `vescale_fn::draw`, and its two companions for keys.

An operator is what every transform understands: `vmap` over keys is a rule, a tracer sees one node, a tensor that
stands for many ranks runs it once a rank. What is inside is plain loops over blocks of counters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..._core import torch_internals
from ..generators import counters, elementwise_draws
from ..generators.elementwise_draws import Draw
from ..generators.threefry import MASK, Word, hash_ints, hash_words, signed
from . import c_library, choice, triton_launch

BLOCK = {"cpu": 1 << 17}  # so many that the calls cost little, so few that they stay in a cache
BLOCK_ELSEWHERE = 1 << 22
SMALL = 1 << 16  # elements that one thread draws
FEW = 32  # so many hashes are cheaper on Python's ints than on tensors

_library = torch.library.Library("vescale_fn", "FRAGMENT")
for _schema in (
    "draw(Tensor key, Tensor? where, SymInt[] shape, SymInt[] local, str kind, Scalar[] params, ScalarType dtype, "
    "Device device) -> Tensor",
    "split(Tensor key, SymInt n) -> Tensor",
    "fold_in(Tensor key, Tensor data) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def draw(key: torch.Tensor, draw: Draw, rectangle: counters.Rectangle, device: torch.device) -> torch.Tensor:
    """The elements of a draw that a rectangle holds.

    Args:
        key: int32 [..., 2]; a batch of keys gives a batch of draws, in front.
        device: where the result lies.
    """
    if torch_internals.is_plain(key):
        return _draw(key, draw, rectangle, device)
    return draw_encoded(key, draw, rectangle.where(), rectangle.local, device)


def draw_encoded(key: torch.Tensor, draw: Draw, where: Any, local: Sequence[int], device: torch.device) -> torch.Tensor:
    """The same of a rectangle in a tensor, which may be of many ranks: `Rectangle.where`, and its shape on each of them."""
    kind, shape, dtype, params = draw
    if torch_internals.is_plain(key) and (where is None or torch_internals.is_plain(where)):
        return _draw(key, draw, counters.decoded(shape, where), device)
    return torch.ops.vescale_fn.draw.default(key, where, shape, local, kind, params, dtype, device)


def draw_small(key: torch.Tensor, draw: Draw, first: int, local: tuple[int, ...]) -> torch.Tensor | None:
    """The elements from `first` on, under one plain key on the CPU, by the shortest way; None where that is not one."""
    kind, _, dtype, params = draw
    code, variant = c_library.SMALL.get((kind, dtype)), choice.chosen().variant
    if code is None or variant is None or key.ndim != 1 or not key.is_cpu:
        return None
    n = math.prod(local)
    if n >= SMALL:
        return None
    if kind == "bernoulli":
        dtype = torch.bool
    return c_library.small(variant, code, key, first, n, params, local, dtype)


def split(key: torch.Tensor, n: int) -> torch.Tensor:
    """int32 [..., 2] -> [..., n, 2]: the hashes of the counters 0, ..., n - 1."""
    return _split(key, n) if torch_internals.is_plain(key) else torch.ops.vescale_fn.split.default(key, n)


def fold_in(key: torch.Tensor, data: torch.Tensor | int) -> torch.Tensor:
    """int32 [..., 2] and integers [...], broadcast -> [..., 2]: the hash of the counter `data`."""
    if isinstance(data, int):
        if (
            (variant := choice.chosen().variant) is not None
            and torch_internals.is_plain(key)
            and key.ndim == 1
            and key.device.type == "cpu"
        ):
            return c_library.small(variant, c_library.WORDS, key, data, 1, (), (2,), torch.int32)
        # by numpy: `torch.tensor` makes, in a `shard_map` body, one copy a simulated rank
        data = torch.from_numpy(np.asarray(data, dtype=np.int64))
    if torch_internals.is_plain(key) and torch_internals.is_plain(data):
        return _fold_in(key, data)
    return torch.ops.vescale_fn.fold_in.default(key, data)


def _draw(key: torch.Tensor, draw: Draw, rectangle: counters.Rectangle, device: torch.device) -> torch.Tensor:
    kind, _, dtype, params = draw
    on_cpu = device.type == key.device.type == "cpu"
    if on_cpu and rectangle.first is not None:
        small = draw_small(key, draw, rectangle.first, rectangle.local)
        if small is not None:
            return small
    batch, n = key.shape[:-1], math.prod(rectangle.local)
    streams, values = elementwise_draws.KINDS[kind]
    keys = key.reshape(-1, 1, 2) if streams == 1 else _split(key.reshape(-1, 2), streams)  # [keys, streams, 2]
    out = torch.empty((len(keys), n), dtype=elementwise_draws.result_dtype(kind, dtype), device=device)
    code, variant = c_library.CODES.get((kind, dtype)), choice.chosen().variant
    if variant is not None and code is not None and on_cpu:
        c_library.draw(variant, code, keys, rectangle, params, out)
    elif not (device.type == "cuda" and choice.chosen().on_cuda and triton_launch.draw(draw, keys, rectangle, out)):
        size = BLOCK.get(device.type, BLOCK_ELSEWHERE)
        for here, some, high, low in blocks(keys, rectangle, size, device):
            out[here] = values(*[hash_words(k0, k1, high, low) for k0, k1 in some], dtype, params)
    return out.view((*batch, *rectangle.local))


def blocks(
    keys: torch.Tensor, rectangle: counters.Rectangle, size: int, device: torch.device
) -> Iterator[tuple[tuple[slice, slice], list[tuple[Word, Word]], int | torch.Tensor, torch.Tensor]]:
    """The counters of a rectangle under each of `keys`, int32 [keys, streams, 2], in blocks of about `size`.

    Yields:
        The place of a block in a result [keys, elements]; for each stream the words of the keys; the high and the low
        words of the counters, the low ones in the block's shape.
    """
    together = max(1, size // max(math.prod(rectangle.local), 1))  # keys of small draws are hashed side by side
    for first in range(0, len(keys), together):
        group = keys[first : first + together]
        some = key_words(group, device)
        for start, stop, high, low in counters.blocks(rectangle, size, device):
            yield (slice(first, first + together), slice(start, stop)), some, high, low.expand(len(group), stop - start)


def key_words(keys: torch.Tensor, device: torch.device) -> list[tuple[Word, Word]]:
    """For each stream, the key's two words: ints if they are at hand, else tensors with a dim for the counters."""
    if len(keys) == 1 and keys.device.type == "cpu":
        return [(k0 & MASK, k1 & MASK) for k0, k1 in keys[0].tolist()]
    keys = keys.to(device)
    return [(keys[:, s, 0:1], keys[:, s, 1:2]) for s in range(keys.shape[1])]


def _split(key: torch.Tensor, n: int) -> torch.Tensor:
    if (variant := choice.chosen().variant) is not None and key.device.type == "cpu":
        if key.ndim == 1 and n < SMALL:
            return c_library.small(variant, c_library.WORDS, key, 0, n, (), (n, 2), torch.int32)
        out = torch.empty((*key.shape[:-1], n, 2), dtype=torch.int32, device="cpu")
        c_library.draw(variant, c_library.WORDS, key.reshape(-1, 1, 2), counters.whole((n,)), (), out)
        return out
    if key.ndim == 1 and n <= FEW and key.device.type == "cpu":
        k0, k1 = (k & MASK for k in key.tolist())
        hashed = [[*map(signed, hash_ints(k0, k1, 0, i))] for i in range(n)]
        return torch.tensor(hashed, dtype=torch.int32, device="cpu").view(n, 2)
    low = torch.arange(n, dtype=torch.int32, device=key.device).expand(*key.shape[:-1], n)
    return torch.stack(hash_words(key[..., 0:1], key[..., 1:2], 0, low), dim=-1)


def _fold_in(key: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    if key.ndim == 1 and data.ndim == 0 and key.device.type == data.device.type == "cpu":
        k0, k1 = (k & MASK for k in key.tolist())
        return torch.tensor([*map(signed, hash_ints(k0, k1, 0, int(data) & MASK))], dtype=torch.int32, device="cpu")
    low = data.to(key.device, torch.int64).bitwise_and(MASK).to(torch.int32)
    low = low.expand(torch.broadcast_shapes(key.shape[:-1], low.shape))
    return torch.stack(hash_words(key[..., 0], key[..., 1], 0, low), dim=-1)


def _draw_encoded(
    key: Any, where: Any, shape: Any, local: Any, kind: str, params: Any, dtype: torch.dtype, device: Any
) -> torch.Tensor:
    return _draw(key, Draw(kind, shape, dtype, params), counters.decoded(shape, where), device)


def _draw_fake(key: Any, where: Any, shape: Any, local: Any, kind: str, params: Any, dtype: Any, device: Any) -> Any:
    return torch.empty((*key.shape[:-1], *local), dtype=elementwise_draws.result_dtype(kind, dtype), device=device)


def _split_fake(key: Any, n: Any) -> Any:
    return key.new_empty((*key.shape[:-1], n, 2))


def _fold_in_fake(key: Any, data: Any) -> Any:
    return key.new_empty((*torch.broadcast_shapes(key.shape[:-1], data.shape), 2))


def _draw_vmap(info: Any, in_dims: Any, key: torch.Tensor, where: Any, *rest: Any) -> Any:
    if in_dims[1] is not None:
        raise NotImplementedError("vescale_fn::draw: the rectangle of a draw cannot differ along a vmapped dim")
    return torch.ops.vescale_fn.draw.default(key.movedim(in_dims[0], 0), where, *rest), 0


def _split_vmap(info: Any, in_dims: Any, key: torch.Tensor, n: int) -> Any:
    return torch.ops.vescale_fn.split.default(key.movedim(in_dims[0], 0), n), 0


def _fold_in_vmap(info: Any, in_dims: Any, key: torch.Tensor, data: torch.Tensor) -> Any:
    key_dim, data_dim = in_dims
    ndim = max(key.ndim - 1 - (key_dim is not None), data.ndim - (data_dim is not None))
    key = key if key_dim is None else batch_in_front(key, key_dim, ndim + 1)
    data = data if data_dim is None else batch_in_front(data, data_dim, ndim)
    return torch.ops.vescale_fn.fold_in.default(key, data), 0


def batch_in_front(x: torch.Tensor, dim: int, ndim: int) -> torch.Tensor:
    """The batch dim first, then `ndim` dims, padded with ones, so that the others still broadcast."""
    x = x.movedim(dim, 0)
    return x.reshape(x.shape[0], *(1,) * (ndim + 1 - x.ndim), *x.shape[1:])


for _name, _impl, _fake, _vmap in (
    ("draw", _draw_encoded, _draw_fake, _draw_vmap),
    ("split", _split, _split_fake, _split_vmap),
    ("fold_in", _fold_in, _fold_in_fake, _fold_in_vmap),
):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"vescale_fn::{_name}", _fake, lib=_library)
    torch.library.register_vmap(f"vescale_fn::{_name}", _vmap, lib=_library)
