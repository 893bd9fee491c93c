"""The zigzag order of a sequence: each of n ranks holds an early and a late part, so that causal work is even."""

from __future__ import annotations

import torch

from ..errors import CollectiveError, described, report


def zigzag_order(length: int, n: int) -> torch.Tensor:
    """Which position of a sequence lies at each place of its zigzag order.

    The sequence is cut into 2n parts, and rank i of n holds parts i and 2n - 1 - i. Under a causal mask, where a token
    looks at all tokens before it, each rank then has as much to do as any other; with consecutive parts the last rank
    has all of the work of a step, and the first none.

    Args:
        length: of the sequence; 2n must divide it.
        n: the number of ranks that the sequence is split over.

    Returns:
        i64[length], a permutation: ``tokens[:, order]`` is the tokens in zigzag order, `order` itself the position of
        each (for rotary angles, say), and ``y[:, order.argsort()]`` the original order again.

    Raises:
        CollectiveError: a length that does not divide.

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
    if length % (2 * n):
        raise CollectiveError(report("nn.zigzag_order", uneven(length, n), fix=PAD))
    parts = torch.arange(length).view(2 * n, -1)
    return torch.stack([parts[:n], parts[n:].flip(0)], 1).flatten()


def uneven(length: int, n: int) -> str:
    """What is wrong with a length that does not divide."""
    return f"zigzag order cuts the sequence into 2 * {n} = {2 * n} parts, but {length} % {2 * n} = {length % (2 * n)}"


PAD = "pad the tokens at the end: under a causal mask no token looks at what comes after it"
