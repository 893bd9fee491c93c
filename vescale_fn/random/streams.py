"""New keys from seeds, and from keys: split and folded, never used twice.

Each is one hash, of Python integers where the key is a plain one on the CPU; on a key that stands for many (under
`vmap`, or one a rank) it is the same hash as a torch op.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .._core.base.errors import RandomError
from .._core.base.front_door import public
from .._core.base.messages import described, report
from . import key_reuse
from .backends import draw_op
from .generators.threefry import signed
from .keys import IMPLS, Key, checked, shape_of

from_numpy = torch.from_numpy  # not `torch.tensor`, which in a `shard_map` body makes one copy a simulated rank


def _check_impl(impl: Any, where: str) -> None:
    if impl not in IMPLS:
        raise RandomError(report(where, f"impl={impl!r} is not a generator", fix=f"one of {IMPLS}"))


_INTEGERS = {
    "seed": "any int: vfn.random.key(0)",
    "data": "a number for each use, 0, 1, ...; vfn.axis_index(axis) for one for each rank; or keys of vfn.random.split",
}


def _integer(value: Any, where: str, name: str, low: int, high: int) -> int | torch.Tensor:
    """An int in [low, high), or a 0-d integer tensor."""
    if isinstance(value, torch.Tensor):
        if value.ndim or value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
            raise RandomError(
                report(
                    where,
                    f"{name} must be an integer, but it is {described(value)}",
                    fix=f"vfn.vmap over {name}" if value.ndim else "an integer dtype",
                )
            )
        return value
    try:
        value = operator.index(value)
    except TypeError:
        raise RandomError(
            report(where, f"{name} must be an integer, but it is {described(value)}", fix=_INTEGERS.get(name, ""))
        ) from None
    if not low <= value < high:
        raise RandomError(report(where, f"{name} must be in [{low}, {high}), but it is {value}"))
    return value


@public("random.key")
def key(seed: Any, impl: str = "threefry2x32") -> Key:
    """Make a key from a seed.

    Args:
        seed: an integer of up to 64 bits (all of them count), or a 0-d integer tensor.
        impl: the generator: "threefry2x32".

    Returns:
        One `Key`, on the CPU. The same as `jax.random.key` for 0 <= seed < 2**32, and as JAX with x64 beyond.

    Raises:
        RandomError: a seed that is not an integer or too large, an unknown impl.

    Source: `jax.random.key`.

    >>> import vescale_fn as vfn
    >>> vfn.random.key(42)
    Key([0, 42], threefry2x32)
    """
    _check_impl(impl, "random.key")
    seed = _integer(seed, "random.key", "seed", -(1 << 63), 1 << 64)
    if isinstance(seed, torch.Tensor):
        wide = seed.to(torch.int64)
        return Key(torch.stack([(wide >> 32).to(torch.int32), (wide & 0xFFFFFFFF).to(torch.int32)], dim=-1), impl)
    return Key(from_numpy(np.asarray([signed(seed >> 32), signed(seed)], dtype=np.int32)), impl)


def wrap_key_data(data: Any, impl: str = "threefry2x32") -> Key:
    """Make keys from raw bits: the inverse of `key_data`.

    Args:
        data: [..., 2] words of 32 bits: a tensor or array of uint32, int32 or int64, or nested lists of integers.
        impl: the generator that the bits are for.

    Raises:
        RandomError: another dtype, or a last dim that is not 2.

    Source: `jax.random.wrap_key_data`.

    >>> import vescale_fn as vfn
    >>> vfn.random.wrap_key_data([0, 42]) == vfn.random.key(42)
    tensor(True)
    """
    _check_impl(impl, "random.wrap_key_data")
    if isinstance(data, np.ndarray) and data.dtype == np.uint32:
        data = data.view(np.int32)
    if isinstance(data, np.ndarray):
        data = torch.from_numpy(data.copy())
    if not isinstance(data, torch.Tensor):
        data = torch.tensor(data, device="cpu")
    if data.dtype not in (torch.uint32, torch.int32, torch.int64) or not data.ndim or data.shape[-1] != 2:
        raise RandomError(report("random.wrap_key_data", f"data must be uint32 [..., 2], but it is {described(data)}"))
    if data.dtype == torch.int64:
        return Key((data & 0xFFFFFFFF).to(torch.int32), impl)
    return Key(data.view(torch.int32).clone(), impl)


def key_data(keys: Key) -> torch.Tensor:
    """The raw bits of keys, as uint32 [..., 2].

    Args:
        keys: one key, or an array of keys.

    Raises:
        RandomError: not a key.

    Source: `jax.random.key_data`.

    >>> import vescale_fn as vfn
    >>> vfn.random.key_data(vfn.random.key(42)).tolist()
    [0, 42]
    """
    return checked(keys, "random.key_data", scalar=False, use=None).data.to(torch.uint32)


def key_impl(keys: Key) -> str:
    """The name of the generator that keys are for.

    Args:
        keys: one key, or an array of keys.

    Raises:
        RandomError: not a key.

    Source: `jax.random.key_impl`.

    >>> import vescale_fn as vfn
    >>> vfn.random.key_impl(vfn.random.key(0))
    'threefry2x32'
    """
    return checked(keys, "random.key_impl", scalar=False, use=None).impl


@public("random.split")
def split(key: Key, num: int | Sequence[int] = 2) -> Key:
    """Split one key into `num` new ones, whose streams have nothing to do with each other's or with the old one's.

    Do not use the old key again: neither in a draw, nor in `fold_in` (``fold_in(key, i)`` is ``split(key, n)[i]``).

    Args:
        key: one key.
        num: how many keys, or the shape of an array of keys.

    Returns:
        An array of keys of shape (num,), or num. The first m of n keys do not depend on n.

    Raises:
        RandomError: not one key, or not a shape.

    Source: `jax.random.split`, with its streams.

    >>> import vescale_fn as vfn
    >>> dropout_key, init_key = vfn.random.split(vfn.random.key(42))
    >>> dropout_key
    Key([1832780943, 270669613], threefry2x32)
    """
    key = checked(key, "random.split")
    shape = shape_of(num, "random.split", "num")
    data = draw_op.split(key.data, math.prod(shape))
    return Key(data if len(shape) == 1 else data.reshape((*shape, 2)), key.impl)


def pieces(key: Key, n: int = 2) -> Key:
    """`split` inside a draw: without checks, and without a trace in what debugging records."""
    return Key(draw_op.split(key.data, n), key.impl)


@public("random.fold_in")
def fold_in(key: Key, data: Any) -> Key:
    """Make a new key out of a key and a number: of a step, a layer, a rank.

    Args:
        key: one key.
        data: an integer in [0, 2**32), or a 0-d integer tensor, such as `axis_index` in a `shard_map` body.

    Raises:
        RandomError: not one key, or not such an integer.

    Source: `jax.random.fold_in`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.fold_in(vfn.random.key(42), 7)
    Key([2547012911, 1371500959], threefry2x32)
    """
    key = checked(key, "random.fold_in", use=key_reuse.FOLD)
    data = _integer(data, "random.fold_in", "data", 0, 1 << 32)
    return Key(draw_op.fold_in(key.data, data), key.impl)


def clone(key: Key) -> Key:
    """The same key once more, for a draw that shall repeat another's numbers and says so.

    Args:
        key: one key, or an array of keys.

    Raises:
        RandomError: not a key.

    Source: `jax.random.clone`.

    >>> import vescale_fn as vfn
    >>> key = vfn.random.key(0)
    >>> vfn.random.clone(key) == key
    tensor(True)
    """
    key = checked(key, "random.clone", scalar=False, use=None)
    key_reuse.allow(key.data)
    return Key(key.data.clone(), key.impl)
