"""A decoder-only transformer over bytes, the shortest of the models: without names of dims, for one parallelism.

Lines that exist only for distribution end in ``# mesh``: rules from paths to specs, with axes of the mesh in them, and two
`with_sharding`s. Take them away and the same program is left, for one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import vescale_fn as vfn
from vescale_fn import P

from .layers import dropout, keys_of, matrix, rotate, rotation

VOCAB = 256
Params = dict[str, Any]

# Tensor parallelism as in Megatron-LM (arXiv 1909.08053): heads and hidden units are split over "tp", the matrices back
# into the residual stream by their rows. Everything else lies whole on every rank.
SPECS = [(r"\.(qkv|up)$", P(None, "tp")), (r"\.(out|down)$", P("tp")), (r".*", P())]  # mesh


@dataclass(frozen=True)
class Config:
    """The sizes of the model: width, attention heads, blocks, hidden width of each block, and the dropout rate."""

    dim: int = 128
    heads: int = 4
    layers: int = 2
    hidden: int = 512
    dropout: float = 0.05


def init(key: vfn.random.Key, config: Config, dtype: torch.dtype = torch.float32) -> Params:
    """Random parameters, the same for the same key."""
    keys = iter(vfn.random.split(key, 2 + 4 * config.layers))

    def linear(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return matrix(next(keys), rows, columns, dtype, scale)

    def block() -> Params:
        ones, back = torch.ones(config.dim, dtype=dtype), (2 * config.layers) ** -0.5
        return {
            "attention": {
                "norm": ones,
                "qkv": linear(config.dim, 3 * config.dim),
                "out": linear(config.dim, config.dim, back),
            },
            "mlp": {
                "norm": ones.clone(),
                "up": linear(config.dim, config.hidden),
                "down": linear(config.hidden, config.dim, back),
            },
        }

    return {
        "embed": vfn.random.normal(next(keys), (VOCAB, config.dim), dtype) * 0.4,
        "blocks": [block() for _ in range(config.layers)],
        "norm": torch.ones(config.dim, dtype=dtype),
        "head": linear(config.dim, VOCAB),
    }


def logits(params: Params, tokens: torch.Tensor, config: Config, key: vfn.random.Key | None = None) -> torch.Tensor:
    """Scores [B, T, 256] of the byte after each position of `tokens` [B, T]; with a key, dropout is on."""
    x = F.embedding(tokens, params["embed"])
    angles = rotation(tokens.shape[1], config.dim // config.heads, 10000.0, x)
    keys = keys_of(key, 2 * config.layers)
    for p in params["blocks"]:
        x = block(p, x, angles, config, next(keys), next(keys))
    return norm(x, params["norm"]) @ params["head"]


def loss(params: Params, batch: torch.Tensor, config: Config, key: vfn.random.Key | None = None) -> torch.Tensor:
    """Mean cross entropy in nats of each window's next bytes; `batch` is [B, T + 1]."""
    scores = logits(params, batch[:, :-1], config, key)
    return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())


@vfn.plan.shared
def block(p: Params, x: torch.Tensor, angles: Any, config: Config, *keys: vfn.random.Key | None) -> torch.Tensor:
    """Attention and a layer of hidden units, each added to what it works on."""
    x = x + dropout(keys[0], attention(p["attention"], x, angles, config.heads), config.dropout)
    return x + dropout(keys[1], mlp(p["mlp"], x), config.dropout)


def attention(p: Params, x: torch.Tensor, angles: Any, heads: int) -> torch.Tensor:
    """Causal self-attention. The columns of `qkv` are grouped by head, so that a split of them is a split of heads."""
    qkv = (norm(x, p["norm"]) @ p["qkv"]).unflatten(-1, (heads, -1)).transpose(1, 2)
    q, k, v = qkv.chunk(3, dim=-1)  # [B, heads, T, dim / heads] each
    y = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)
    y = y.transpose(1, 2).flatten(2) @ p["out"]
    y = vfn.with_sharding(y, P("dp"))  # mesh
    return y


def mlp(p: Params, x: torch.Tensor) -> torch.Tensor:
    """Two matrices with a GELU between them."""
    y = F.gelu(norm(x, p["norm"]) @ p["up"]) @ p["down"]
    y = vfn.with_sharding(y, P("dp"))  # mesh
    return y


def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Layer normalisation without a bias."""
    return F.layer_norm(x, scale.shape, scale)
