"""A diffusion transformer: images from noise, given a class and how much noise there is (Peebles and Xie, arXiv 2212.09748).

Class and noise scale and shift each norm and gate what each block adds; the gates begin at zero (adaLN-zero). It learns the
way from noise to image along a straight line (Liu et al., arXiv 2209.03003). Written as for one device; lines that exist
only for distribution end in ``# mesh``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange

import vescale_fn as vfn
from vescale_fn import P

from .layers import attention, dropout, keys_of, matrix, split_heads
from .parallel import ONE_DEVICE, Layout  # mesh

Params = dict[str, Any]

NAMES = [  # mesh
    (r"\bqkv$", P(None, "heads")),  # mesh
    (r"\bout$", P("heads")),  # mesh
    (r"\bup$", P(None, "hidden")),  # mesh
    (r"\bdown$", P("hidden")),  # mesh
    (r".*", P()),  # mesh
]  # mesh


@dataclass(frozen=True)
class Config:
    """The sizes of the model: images [channels, size, size] in patches of `patch` x `patch`, of `classes` classes, of which
    `unlabelled` of the time none is said."""

    size: int = 32
    patch: int = 4
    channels: int = 3
    classes: int = 10
    dim: int = 128
    heads: int = 4
    layers: int = 4
    hidden: int = 512
    frequencies: int = 64
    dropout: float = 0.0
    unlabelled: float = 0.1
    layout: Layout = ONE_DEVICE  # mesh


def init(key: vfn.random.Key, config: Config, dtype: torch.dtype = torch.float32) -> Params:
    """Random parameters, the same for the same key."""
    keys, dim, hidden = iter(vfn.random.split(key, 6 + 4 * config.layers)), config.dim, config.hidden
    pixels, patches = config.channels * config.patch**2, (config.size // config.patch) ** 2

    def linear(rows: int, columns: int) -> torch.Tensor:
        return matrix(next(keys), rows, columns, dtype)

    def modulation(parts: int) -> Params:
        return {"w": torch.zeros(dim, parts * dim, dtype=dtype), "b": torch.zeros(parts * dim, dtype=dtype)}

    def block() -> Params:
        return {
            "ada": modulation(6),
            "qkv": linear(dim, 3 * dim),
            "out": linear(dim, dim),
            "up": linear(dim, hidden),
            "down": linear(hidden, dim),
        }

    return {
        "patch": linear(pixels, dim),
        "places": vfn.random.normal(next(keys), (patches, dim), dtype) * 0.02,
        "time": [linear(config.frequencies, dim), linear(dim, dim)],
        "label": vfn.random.normal(next(keys), (config.classes + 1, dim), dtype) * 0.02,
        "blocks": [block() for _ in range(config.layers)],
        "final": {"ada": modulation(2), "head": torch.zeros(dim, pixels, dtype=dtype)},
    }


def apply(
    params: Params,
    images: torch.Tensor,
    noise: torch.Tensor,
    labels: torch.Tensor,
    config: Config,
    key: vfn.random.Key | None = None,
) -> torch.Tensor:
    """Directions from image to noise [B, C, H, W], at images of which a part `noise` [B], of 0 to 1, is noise.

    The label `classes` says nothing. With a key, dropout is on.
    """
    blocks, run, keys = params["blocks"], block, keys_of(key, 2 * config.layers)
    params = {name: p for name, p in params.items() if name != "blocks"}
    at = config.layout  # mesh
    params, run = at.gather(params, NAMES), at.block(block, NAMES)  # mesh
    given = F.silu(waves(noise, config.frequencies) @ params["time"][0]) @ params["time"][1]
    given = F.silu(given + F.embedding(labels, params["label"]))
    x = rearrange(images, "b c (h p) (w q) -> b (h w) (c p q)", p=config.patch, q=config.patch)
    x = at(x, "batch", "norm_length")  # mesh
    x = x @ params["patch"] + params["places"]
    for p in blocks:
        x, given = vfn.cut((run(p, x, given, config, next(keys), next(keys)), given))
    shift, scale = modulated(given, params["final"]["ada"], 2)
    x = (norm(x) * (1 + scale) + shift) @ params["final"]["head"]
    x = at(x, "batch")  # mesh
    sizes = {"h": config.size // config.patch, "p": config.patch, "q": config.patch}
    return rearrange(x, "b (h w) (c p q) -> b c (h p) (w q)", **sizes)


def loss(params: Params, batch: Params, config: Config, key: vfn.random.Key | None = None) -> torch.Tensor:
    """Mean squared error of the direction at one random point of the way of each image to noise of its own.

    `batch` is {"image": [B, C, H, W], "label": [B]}. Without a key, noise and points are the same each time.
    """
    images, labels = batch["image"], batch["label"]
    keys = vfn.random.split(vfn.random.key(0) if key is None else key, 4)
    noise = vfn.random.normal(keys[0], images.shape, images.dtype)
    part = vfn.random.uniform(keys[1], labels.shape, images.dtype)
    if key is not None:
        silent = vfn.random.bernoulli(keys[2], config.unlabelled, labels.shape)
        labels = torch.where(silent, config.classes, labels)
    mixed = images + part[:, None, None, None] * (noise - images)
    found = apply(params, mixed, part, labels, config, None if key is None else keys[3])
    return (found - (noise - images)).square().mean()


def block(
    p: Params, x: torch.Tensor, given: torch.Tensor, config: Config, *keys: vfn.random.Key | None
) -> torch.Tensor:
    """Attention and two matrices with a GELU between them, each scaled, shifted and gated by what is given."""
    look = attention
    at, look = config.layout, config.layout.attention(attention)  # mesh
    shift, scale, gate, shift2, scale2, gate2 = modulated(given, p["ada"], 6)
    h = norm(x) * (1 + scale) + shift
    h = at(h, "batch", "length")  # mesh
    q, k, v = split_heads(h @ p["qkv"], config.heads).chunk(3, dim=-1)  # columns grouped by head
    y = look(q, k, v, causal=False) @ p["out"]
    y = at(y, "batch", "norm_length")  # mesh
    x = x + gate * dropout(keys[0], y, config.dropout)
    h = norm(x) * (1 + scale2) + shift2
    h = at(h, "batch", "length")  # mesh
    y = F.gelu(h @ p["up"], approximate="tanh") @ p["down"]
    y = at(y, "batch", "norm_length")  # mesh
    return x + gate2 * dropout(keys[1], y, config.dropout)


def modulated(given: torch.Tensor, p: Params, parts: int) -> tuple[torch.Tensor, ...]:
    """Shifts, scales and gates [B, 1, D], from what is given [B, D]."""
    return (given @ p["w"] + p["b"])[:, None].chunk(parts, dim=-1)


def norm(x: torch.Tensor) -> torch.Tensor:
    """Layer normalisation without parameters."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def waves(noise: torch.Tensor, count: int) -> torch.Tensor:
    """Cosines and sines [B, count] of numbers of 0 to 1, of periods from 1/1000 to 10."""
    speeds = torch.exp(torch.arange(count // 2, dtype=torch.float64) * (-2 * math.log(10000.0) / count))
    angles = 1000 * noise[:, None] * speeds.to(noise.device, noise.dtype)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
