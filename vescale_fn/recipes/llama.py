"""Llama: rotary positions, grouped-query attention, SwiGLU, RMSNorm, no biases (Touvron et al., arXiv 2302.13971, 2307.09288).

Written as for one device. Lines that exist only for distribution end in ``# mesh``: the names of dims, and where values
are stated to lie by them. Which axes split them, a table says (`parallel.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import vescale_fn as vfn
from vescale_fn import P

from .layers import attention, dropout, keys_of, matrix, next_token_loss, rms_norm, rotate, rotation, split_heads
from .parallel import ONE_DEVICE, Layout  # mesh

Params = dict[str, Any]

NAMES = [  # mesh
    (r"\b(q|k|v)$", P(None, "heads")),  # mesh
    (r"\bout$", P("heads")),  # mesh
    (r"\b(gate|up)$", P(None, "hidden")),  # mesh
    (r"\bdown$", P("hidden")),  # mesh
    (r"^(embed|head)$", P("vocab")),  # mesh
    (r".*", P()),  # mesh
]  # mesh


@dataclass(frozen=True)
class Config:
    """The sizes of the model; `groups` heads of keys and values serve `heads` heads of queries.

    A share of `smoothing` of each target is spread over all tokens; a target that is the token `ignored` does not count.
    """

    vocab: int = 256
    dim: int = 128
    heads: int = 4
    groups: int = 2
    layers: int = 2
    hidden: int = 344
    dropout: float = 0.05
    smoothing: float = 0.0
    ignored: int | None = None
    base: float = 10000.0
    layout: Layout = ONE_DEVICE  # mesh


def init(key: vfn.random.Key, config: Config, dtype: torch.dtype = torch.float32) -> Params:
    """Random parameters, the same for the same key."""
    keys, dim, hidden = iter(vfn.random.split(key, 2 + 7 * config.layers)), config.dim, config.hidden
    few, back = dim * config.groups // config.heads, (2 * config.layers) ** -0.5

    def linear(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return matrix(next(keys), rows, columns, dtype, scale)

    def block() -> Params:
        return {
            "attention": {
                "norm": torch.ones(dim, dtype=dtype),
                "q": linear(dim, dim),
                "k": linear(dim, few),
                "v": linear(dim, few),
                "out": linear(dim, dim, back),
            },
            "mlp": {
                "norm": torch.ones(dim, dtype=dtype),
                "gate": linear(dim, hidden),
                "up": linear(dim, hidden),
                "down": linear(hidden, dim, back),
            },
        }

    return {
        "embed": vfn.random.normal(next(keys), (config.vocab, dim), dtype) * 0.4,
        "head": vfn.random.normal(next(keys), (config.vocab, dim), dtype) * dim**-0.5,
        "blocks": [block() for _ in range(config.layers)],
        "norm": torch.ones(dim, dtype=dtype),
    }


def logits(params: Params, tokens: torch.Tensor, config: Config, key: vfn.random.Key | None = None) -> torch.Tensor:
    """Scores [B, T, vocab] of the token after each position of `tokens` [B, T], which are in the order of the layout; with a
    key, dropout is on."""
    blocks, run, keys = params["blocks"], block, keys_of(key, 2 * config.layers)
    params = {name: p for name, p in params.items() if name != "blocks"}
    angles = rotation(tokens.shape[1], config.dim // config.heads, config.base, params["norm"])
    at = config.layout  # mesh
    angles = at.ordered(angles[0], 0), at.ordered(angles[1], 0)  # mesh
    params, run = at.gather(params, NAMES), at.block(block, NAMES)  # mesh
    tokens = at(tokens, "batch", "norm_length", without="vocab")  # mesh
    x = vfn.nn.embedding(tokens, params["embed"])
    x = at(x, "batch", "norm_length")  # mesh
    for p in blocks:
        x = vfn.cut(run(p, x, angles, config, next(keys), next(keys)))
    x = rms_norm(x, params["norm"])
    x = at(x, "batch", "norm_length", without="vocab")  # mesh
    return x @ params["head"].T


def loss(params: Params, batch: torch.Tensor, config: Config, key: vfn.random.Key | None = None) -> torch.Tensor:
    """Mean cross entropy in nats of each window's next tokens; `batch` is [B, T + 1]."""
    tokens, targets = batch[:, :-1], batch[:, 1:]
    tokens, targets = config.layout.ordered(tokens, 1), config.layout.ordered(targets, 1)  # mesh
    scores = logits(params, tokens, config, key)
    return next_token_loss(scores, targets, config.smoothing, config.ignored)


def block(p: Params, x: torch.Tensor, angles: Any, config: Config, *keys: vfn.random.Key | None) -> torch.Tensor:
    """Attention and a gated layer, each added to what it works on."""
    x = x + dropout(keys[0], attend(p["attention"], x, angles, config), config.dropout)
    return x + dropout(keys[1], gated(p["mlp"], x, config), config.dropout)


def attend(p: Params, x: torch.Tensor, angles: Any, config: Any) -> torch.Tensor:
    """Causal self-attention; each head of keys and values serves several of queries (arXiv 2305.13245)."""
    look = attention
    at, look = config.layout, config.layout.attention(attention)  # mesh
    h = rms_norm(x, p["norm"])
    h = at(h, "batch", "length")  # mesh
    q, k, v = split_heads(h @ p["q"], config.heads), *(split_heads(h @ p[name], config.groups) for name in "kv")
    y = look(rotate(q, angles), rotate(k, angles), v, causal=True) @ p["out"]
    y = at(y, "batch", "norm_length")  # mesh
    return y


def gated(p: Params, x: torch.Tensor, config: Config) -> torch.Tensor:
    """SwiGLU (arXiv 2002.05202)."""
    at = config.layout  # mesh
    h = rms_norm(x, p["norm"])
    h = at(h, "batch", "length")  # mesh
    y = (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    y = at(y, "batch", "norm_length")  # mesh
    return y
