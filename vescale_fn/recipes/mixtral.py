"""A mixture of experts like Mixtral: Llama's attention, and in the place of its gated layer several, of which each token
chooses a few (Jiang et al., arXiv 2401.04088).

The tokens of one sequence, or of one part of it, share the places that an expert has; those that find none left pass by,
as in GShard (Lepikhin et al., arXiv 2006.16668). So what a token meets does not depend on how many ranks there are. Written
as for one device; lines that exist only for distribution end in ``# mesh``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import vescale_fn as vfn
from vescale_fn import P

from .layers import dropout, keys_of, matrix, next_token_loss, rms_norm, rotation
from .llama import attend
from .parallel import ONE_DEVICE, Layout  # mesh

Params = dict[str, Any]

NAMES = [  # mesh
    (r"\b(q|k|v)$", P(None, "heads")),  # mesh
    (r"\bout$", P("heads")),  # mesh
    (r"\b(gate|up)$", P("experts", None, "hidden")),  # mesh
    (r"\bdown$", P("experts", "hidden")),  # mesh
    (r"^(embed|head)$", P("vocab")),  # mesh
    (r".*", P()),  # mesh
]  # mesh


@dataclass(frozen=True)
class Config:
    """The sizes of the model. Each token chooses `chosen` of `experts`. In each of the `parts` of a sequence an expert has
    `capacity` times the places that it would need if all were chosen alike; with None it has a place for every token, and
    none is dropped. `balance` weighs the loss that makes experts be chosen alike.

    A share of `smoothing` of each target is spread over all tokens; a target that is the token `ignored` does not count.
    """

    vocab: int = 256
    dim: int = 128
    heads: int = 4
    groups: int = 2
    layers: int = 2
    hidden: int = 172
    experts: int = 8
    chosen: int = 2
    capacity: float | None = 1.25
    parts: int = 1
    balance: float = 0.01
    dropout: float = 0.05
    smoothing: float = 0.0
    ignored: int | None = None
    base: float = 10000.0
    layout: Layout = ONE_DEVICE  # mesh


def init(key: vfn.random.Key, config: Config, dtype: torch.dtype = torch.float32) -> Params:
    """Random parameters, the same for the same key."""
    keys, dim = iter(vfn.random.split(key, 2 + 8 * config.layers)), config.dim
    few, back = dim * config.groups // config.heads, (2 * config.layers) ** -0.5

    def linear(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return matrix(next(keys), rows, columns, dtype, scale)

    def several(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return vfn.random.normal(next(keys), (config.experts, rows, columns), dtype) * (scale * rows**-0.5)

    def block() -> Params:
        return {
            "attention": {
                "norm": torch.ones(dim, dtype=dtype),
                "q": linear(dim, dim),
                "k": linear(dim, few),
                "v": linear(dim, few),
                "out": linear(dim, dim, back),
            },
            "moe": {
                "norm": torch.ones(dim, dtype=dtype),
                "router": linear(dim, config.experts),
                "gate": several(dim, config.hidden),
                "up": several(dim, config.hidden),
                "down": several(config.hidden, dim, back),
            },
        }

    return {
        "embed": vfn.random.normal(next(keys), (config.vocab, dim), dtype) * 0.4,
        "head": vfn.random.normal(next(keys), (config.vocab, dim), dtype) * dim**-0.5,
        "blocks": [block() for _ in range(config.layers)],
        "norm": torch.ones(dim, dtype=dtype),
    }


def apply(params: Params, tokens: torch.Tensor, config: Config, key: vfn.random.Key | None = None) -> Any:
    """Scores [B, T, vocab] of the token after each position of `tokens` [B, T], and how unevenly the experts were chosen:
    1 where each was by as many, in the mean over the layers. With a key, dropout is on."""
    blocks, run, keys, uneven = params["blocks"], block, keys_of(key, 2 * config.layers), 0.0
    params = {name: p for name, p in params.items() if name != "blocks"}
    angles = rotation(tokens.shape[1], config.dim // config.heads, config.base, params["norm"])
    at = config.layout  # mesh
    params, run = at.gather(params, NAMES), at.block(block, NAMES)  # mesh
    tokens = at(tokens, "batch", "norm_length", without="vocab")  # mesh
    x = vfn.nn.embedding(tokens, params["embed"])
    x = at(x, "batch", "norm_length")  # mesh
    for p in blocks:
        x, more = run(p, x, angles, config, next(keys), next(keys))
        x = vfn.cut(x)
        uneven = uneven + more / config.layers
    x = rms_norm(x, params["norm"])
    x = at(x, "batch", "norm_length", without="vocab")  # mesh
    return x @ params["head"].T, uneven


def logits(params: Params, tokens: torch.Tensor, config: Config, key: vfn.random.Key | None = None) -> torch.Tensor:
    """The scores alone."""
    return apply(params, tokens, config, key)[0]


def loss(params: Params, batch: torch.Tensor, config: Config, key: vfn.random.Key | None = None) -> torch.Tensor:
    """Mean cross entropy in nats of each window's next tokens, and the weighed loss of balance; `batch` is [B, T + 1]."""
    scores, uneven = apply(params, batch[:, :-1], config, key)
    loss = next_token_loss(scores, batch[:, 1:], config.smoothing, config.ignored)
    return loss + config.balance * uneven


def block(p: Params, x: torch.Tensor, angles: Any, config: Config, *keys: vfn.random.Key | None) -> Any:
    """Attention and experts, each added to what it works on; how unevenly these were chosen."""
    x = x + dropout(keys[0], attend(p["attention"], x, angles, config), config.dropout)
    y, uneven = mixture(p["moe"], x, config)
    return x + dropout(keys[1], y, config.dropout), uneven


def mixture(p: Params, x: torch.Tensor, config: Config) -> Any:
    """Each token's experts, weighed as the router scores them; how unevenly they were chosen."""
    at = config.layout  # mesh
    h, parts, places = rms_norm(x, p["norm"]), config.parts, 1
    if config.capacity is None:
        parts = x.shape[1]  # where none is dropped, tokens need not know of each other
    else:
        places = math.ceil(config.capacity * config.chosen * x.shape[1] / parts / config.experts)
    h = at(h, "batch", "length" if parts > 1 else None)  # mesh
    h = h.unflatten(1, (parts, -1))
    scores = h @ p["router"]
    routes = vfn.nn.route(scores, config.chosen, softmax="after")
    each = {name: p[name] for name in ("gate", "up", "down")}
    y = vfn.nn.experts(gated, each, h, routes, capacity=places).flatten(1, 2)
    y = at(y, "batch", "norm_length")  # mesh
    return y, vfn.nn.load_balance_loss(scores, routes)


def gated(p: Params, rows: torch.Tensor) -> torch.Tensor:
    """Each expert's rows [E, M, D] through its gated layer: SwiGLU (arXiv 2002.05202)."""
    return (F.silu(rows @ p["gate"]) * (rows @ p["up"])) @ p["down"]
