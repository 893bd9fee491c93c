"""The zigzag order of a sequence: each of n ranks holds an early and a late part, so that causal work is even."""

from __future__ import annotations

import itertools

import torch

from .._core.base.errors import CollectiveError
from .._core.base.messages import described, report


def zigzag_order(length: int, n: int) -> torch.Tensor:
    """Which position of a sequence lies at each place of its zigzag order.

    The sequence is cut into 2n parts, and rank i of n holds parts i and 2n - 1 - i. Under a causal mask, where a token
    looks at all tokens before it, each rank then has as much to do as any other; with consecutive parts the last rank
    has all of the work of a step, and the first none. Where 2n does not divide the length, each rank has as many tokens
    as any split of the sequence gives it, and the last ranks' late parts are shorter, or empty.

    Args:
        length: of the sequence.
        n: the number of ranks that the sequence is split over.

    Returns:
        i64[length], a permutation: ``tokens[:, order]`` is the tokens in zigzag order, `order` itself the position of
        each (for rotary angles, say), and ``y[:, order.argsort()]`` the original order again.

    Raises:
        CollectiveError: a length or a number of ranks that is none.

    Source: Brandon et al., "Striped Attention" (arXiv 2311.09431) for the idea; this order is that of Llama 3's context
        parallelism (arXiv 2407.21783, section 3.3.2).

    >>> import vescale_fn as vfn
    >>> vfn.nn.zigzag_order(8, 2)
    tensor([0, 1, 6, 7, 2, 3, 4, 5])
    """
    for name, value in (("length", length), ("n", n)):
        if isinstance(value, bool) or not isinstance(value, int) or value < (name == "n"):
            raise CollectiveError(
                report("nn.zigzag_order", f"{name} must be a positive int, but it is {described(value)}")
            )
    tokens = torch.arange(length)
    return torch.cat([tokens[start:stop] for start, stop in runs(length, n)])


def runs(length: int, n: int) -> list[tuple[int, int]]:
    """Where the neighbouring positions begin and end that the zigzag order is made of: two for each rank."""
    held = chunks(length, n)
    early = [min(one, -(-held[0] // 2)) for one in held]
    sizes = [*early, *(one - its for one, its in zip(held[::-1], early[::-1], strict=True))]
    ends = list(itertools.accumulate(sizes))
    parts = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return [one for i in range(n) for one in (parts[i], parts[2 * n - 1 - i])]


def chunks(length: int, n: int) -> tuple[int, ...]:
    """How many tokens each of n ranks has."""
    part = -(-length // n)
    return tuple(max(0, min(part, length - i * part)) for i in range(n))
