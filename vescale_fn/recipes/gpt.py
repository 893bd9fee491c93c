"""GPT: learned positions, LayerNorm, GELU, biases (Radford et al., "Language models are unsupervised multitask learners").

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

from .layers import attention, dropout, keys_of, matrix, next_token_loss, split_heads
from .parallel import ONE_DEVICE, Layout  # mesh

Params = dict[str, Any]

NAMES = [  # mesh
    (r"\bqkv\.w$", P(None, "heads")),  # mesh
    (r"\bup\.w$", P(None, "hidden")),  # mesh
    (r"\b(qkv\.b|out\.w)$", P("heads")),  # mesh
    (r"\b(up\.b|down\.w)$", P("hidden")),  # mesh
    (r"^(embed|head)$", P("vocab")),  # mesh
    (r".*", P()),  # mesh
]  # mesh


@dataclass(frozen=True)
class Config:
    """The sizes of the model. `context` is the longest sequence; with `tied`, the scores are products with the embedding.

    A share of `smoothing` of each target is spread over all tokens; a target that is the token `ignored` does not count.
    """

    vocab: int = 256
    context: int = 128
    dim: int = 128
    heads: int = 4
    layers: int = 2
    hidden: int = 512
    dropout: float = 0.05
    smoothing: float = 0.0
    ignored: int | None = None
    tied: bool = True
    layout: Layout = ONE_DEVICE  # mesh


def init(key: vfn.random.Key, config: Config, dtype: torch.dtype = torch.float32) -> Params:
    """Random parameters, the same for the same key."""
    keys, dim, hidden = iter(vfn.random.split(key, 3 + 4 * config.layers)), config.dim, config.hidden
    back = (2 * config.layers) ** -0.5

    def norm() -> Params:
        return {"scale": torch.ones(dim, dtype=dtype), "shift": torch.zeros(dim, dtype=dtype)}

    def linear(rows: int, columns: int, scale: float = 1.0) -> Params:
        return {"w": matrix(next(keys), rows, columns, dtype, scale), "b": torch.zeros(columns, dtype=dtype)}

    def table(rows: int, scale: float) -> torch.Tensor:
        return vfn.random.normal(next(keys), (rows, dim), dtype) * scale

    def block() -> Params:
        return {
            "attention": {"norm": norm(), "qkv": linear(dim, 3 * dim), "out": linear(dim, dim, back)},
            "mlp": {"norm": norm(), "up": linear(dim, hidden), "down": linear(hidden, dim, back)},
        }

    params = {
        "embed": table(config.vocab, dim**-0.5),
        "places": table(config.context, dim**-0.5),
        "blocks": [block() for _ in range(config.layers)],
        "norm": norm(),
    }
    return params if config.tied else {**params, "head": table(config.vocab, dim**-0.5)}


def logits(params: Params, tokens: torch.Tensor, config: Config, key: vfn.random.Key | None = None) -> torch.Tensor:
    """Scores [B, T, vocab] of the token after each position of `tokens` [B, T], which are in the order of the layout; with a
    key, dropout is on."""
    blocks, run, keys = params["blocks"], block, keys_of(key, 1 + 2 * config.layers)
    params = {name: p for name, p in params.items() if name != "blocks"}
    at = config.layout  # mesh
    params, run = at.gather(params, NAMES), at.block(block, NAMES)  # mesh
    tokens = at(tokens, "batch", "norm_length", without="vocab")  # mesh
    x = vfn.nn.embedding(tokens, params["embed"])
    x = at(x, "batch", "norm_length")  # mesh
    places = params["places"][: x.shape[1]]
    places = at.ordered(places, 0)  # mesh
    x = dropout(next(keys), x + places, config.dropout)
    for p in blocks:
        x = vfn.cut(run(p, x, config, next(keys), next(keys)))
    x = norm(x, params["norm"])
    x = at(x, "batch", "norm_length", without="vocab")  # mesh
    return x @ params.get("head", params["embed"]).T


def loss(params: Params, batch: torch.Tensor, config: Config, key: vfn.random.Key | None = None) -> torch.Tensor:
    """Mean cross entropy in nats of each window's next tokens; `batch` is [B, T + 1]."""
    tokens, targets = batch[:, :-1], batch[:, 1:]
    tokens, targets = config.layout.ordered(tokens, 1), config.layout.ordered(targets, 1)  # mesh
    scores = logits(params, tokens, config, key)
    return next_token_loss(scores, targets, config.smoothing, config.ignored)


def block(p: Params, x: torch.Tensor, config: Config, *keys: vfn.random.Key | None) -> torch.Tensor:
    """Attention and two matrices with a GELU between them, each added to what it works on."""
    look = attention
    at, look = config.layout, config.layout.attention(attention)  # mesh
    h = norm(x, p["attention"]["norm"])
    h = at(h, "batch", "length")  # mesh
    q, k, v = split_heads(linear(h, p["attention"]["qkv"]), config.heads).chunk(3, dim=-1)  # columns grouped by head
    y = look(q, k, v, causal=True) @ p["attention"]["out"]["w"]
    y = at(y, "batch", "norm_length")  # mesh
    x = x + dropout(keys[0], y + p["attention"]["out"]["b"], config.dropout)
    h = norm(x, p["mlp"]["norm"])
    h = at(h, "batch", "length")  # mesh
    y = F.gelu(linear(h, p["mlp"]["up"])) @ p["mlp"]["down"]["w"]
    y = at(y, "batch", "norm_length")  # mesh
    return x + dropout(keys[1], y + p["mlp"]["down"]["b"], config.dropout)


def norm(x: torch.Tensor, p: Params) -> torch.Tensor:
    """Layer normalisation."""
    return F.layer_norm(x, p["scale"].shape, p["scale"], p["shift"])


def linear(x: torch.Tensor, p: Params) -> torch.Tensor:
    """A matrix and a bias."""
    return x @ p["w"] + p["b"]
