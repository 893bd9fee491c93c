"""A permutation that is computed one index at a time: nothing as long as the data set is made or kept.

The numbers below n are pairs (i // b, i % b) in a grid of a x b cells, a * b >= n, and each of some rounds shifts one of the
two by a hash of the other, which can be undone: a Feistel network. What comes out as n or more is shuffled again until it is
less.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch

from .._core.base.errors import DataError
from .._core.base.front_door import public
from .._core.base.messages import described, report
from ..random import key_reuse
from ..random.generators.threefry import MASK, hash_ints, hash_words
from ..random.keys import Key, checked

ROUNDS = 8
MOST = 2**62
X = TypeVar("X", int, torch.Tensor)


@public("data.index_shuffle")
def index_shuffle(key: Key, index: X, n: int) -> X:
    """Say where a permutation of the numbers below n has each index, without making the permutation.

    Args:
        key: one key.
        index: an integer in [0, n), or an integer tensor of any shape of such.
        n: how many numbers are permuted, up to 2**62.

    Returns:
        As `index`: an int, or int64 on the CPU. Every key has its own permutation, the same on every machine.

    Raises:
        DataError: an index that is not in [0, n), or no such n.
        RandomError: not one key.

    Source: a Feistel network over residues (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), whose rounds are
    threefry2x32; as `tf.random_index_shuffle`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.data.index_shuffle(vfn.random.key(0), torch.arange(8), 8).sort().values.tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    >>> 0 <= vfn.data.index_shuffle(vfn.random.key(0), 3, 10**12) < 10**12
    True
    """
    key = checked(key, "data.index_shuffle", use=key_reuse.FOLD)
    if type(n) is not int or not 1 <= n <= MOST:
        what = f"n must be an integer from 1 to 2**62, but it is {described(n)}"
        raise DataError(report("data.index_shuffle", what, fix="len(dataset)"))
    if not isinstance(index, int) and (not isinstance(index, torch.Tensor) or dtype_is_wrong(index)):
        what = f"index must be an integer or a tensor of integers, but it is {described(index)}"
        raise DataError(report("data.index_shuffle", what, fix="torch.arange(n)"))
    x = torch.as_tensor(index, dtype=torch.int64, device="cpu")
    if x.numel() and not 0 <= int(x.min()) <= int(x.max()) < n:
        what = f"index has numbers from {int(x.min())} to {int(x.max())}, which are not all in [0, {n})"
        raise DataError(report("data.index_shuffle", what, fix="index % n"))
    found = shuffled(words(key), x.reshape(-1), n).reshape(x.shape)
    return int(found) if isinstance(index, int) else found  # pyright: ignore[reportReturnType]


def dtype_is_wrong(index: torch.Tensor) -> bool:
    """Whether a tensor does not hold integers."""
    return index.dtype.is_floating_point or index.dtype.is_complex or index.dtype is torch.bool


def of_epoch(key: tuple[int, int], epoch: int) -> tuple[int, int]:
    """The bits of `vfn.random.fold_in(key, epoch)`."""
    return hash_ints(*key, 0, epoch)


def words(key: Key) -> tuple[int, int]:
    """The bits of a key."""
    first, second = key.data.tolist()
    return first & MASK, second & MASK


def shuffled(key: tuple[int, int], x: torch.Tensor, n: int) -> torch.Tensor:
    """Where the permutation has these indices: int64 [m], of int64 [m]."""
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    found = _once(key, x, rows, columns)
    while (outside := found >= n).any():  # at most one in sqrt(n) is
        found[outside] = _once(key, found[outside], rows, columns)
    return found


def _once(key: tuple[int, int], x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    pair, sizes = [x // columns, x % columns], (rows, columns)
    for i in range(ROUNDS):
        moved, other = i % 2, 1 - i % 2
        pair[moved] = (pair[moved] + _hash(key, i, pair[other]) % sizes[moved]) % sizes[moved]
    return pair[0] * columns + pair[1]


def _hash(key: tuple[int, int], i: int, x: torch.Tensor) -> torch.Tensor:
    """62 bits of numbers below 2**32, in the i-th round."""
    high, low = hash_words(*key, i, x.to(torch.int32))  # which wraps
    return ((high.to(torch.int64) & 0x3FFFFFFF) << 32) | (low.to(torch.int64) & MASK)


def seed(key: tuple[int, int], index: int) -> int:
    """64 bits for what is drawn while a sample is read: hashes that no permutation takes."""
    high, low = hash_ints(*key, ROUNDS + (index >> 32), index & MASK)
    return high << 32 | low
