"""Text that a model writes, drawn byte by byte from a key."""

from __future__ import annotations

from collections.abc import Callable

import torch

import vescale_fn as vfn


def generate(
    scores: Callable[[torch.Tensor], torch.Tensor],
    prompt: bytes,
    length: int,
    context: int,
    key: vfn.random.Key,
    temperature: float = 0.6,
) -> bytes:
    """`length` bytes after `prompt`; each looks back at most `context` bytes.

    Args:
        scores: of the bytes after tokens [1, T], as [1, T, 256].
        temperature: below 1, likely bytes become likelier still.
    """
    text = list(prompt)
    for draw in vfn.random.uniform(key, (length,)):
        last = scores(torch.tensor([text[-context:]]))[0, -1].float().cpu()
        reached = torch.softmax(last / temperature, dim=-1).cumsum(-1)
        text.append(min(int(torch.searchsorted(reached, draw)), len(last) - 1))
    return bytes(text[len(prompt) :])
