"""A residual network for images, with group norm before each convolution (He et al., arXiv 1603.05027; Wu and He, arXiv
1803.08494), and dropout between the two of a block (Zagoruyko and Komodakis, arXiv 1605.07146).

Written as for one device. Lines that exist only for distribution end in ``# mesh``. What a block has between its two
convolutions are its hidden channels, as a transformer has hidden units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import vescale_fn as vfn
from vescale_fn import P

from .layers import dropout, group_norm, keys_of, matrix
from .parallel import ONE_DEVICE, Layout  # mesh

Params = dict[str, Any]

NAMES = [  # mesh
    (r"\b(into|inside\..*)$", P("hidden")),  # mesh
    (r"\bback$", P(None, "hidden")),  # mesh
    (r".*", P()),  # mesh
]  # mesh


@dataclass(frozen=True)
class Config:
    """The sizes of the model: `blocks` blocks of each width; images are halved before each width but the first."""

    channels: int = 3
    classes: int = 10
    widths: tuple[int, ...] = (32, 64, 128)
    blocks: int = 2
    groups: int = 8
    dropout: float = 0.1
    layout: Layout = ONE_DEVICE  # mesh


def init(key: vfn.random.Key, config: Config, dtype: torch.dtype = torch.float32) -> Params:
    """Random parameters, the same for the same key."""
    keys = iter(vfn.random.split(key, 2 + len(config.widths) * config.blocks * 3))

    def convolution(out: int, width: int, size: int = 3, scale: float = 1.0) -> torch.Tensor:
        scale *= (2 / (width * size**2)) ** 0.5
        return vfn.random.normal(next(keys), (out, width, size, size), dtype) * scale

    def norm(width: int) -> Params:
        return {"scale": torch.ones(width, dtype=dtype), "shift": torch.zeros(width, dtype=dtype)}

    def block(width: int, out: int) -> Params:
        shortcut = {} if width == out else {"shortcut": convolution(out, width, 1)}
        return {
            "before": norm(width),
            "into": convolution(out, width),
            "inside": norm(out),
            "back": convolution(out, out, scale=0.5),
            **shortcut,
        }

    widths = [width for width in config.widths for _ in range(config.blocks)]
    return {
        "stem": convolution(widths[0], config.channels),
        "blocks": [block(width, out) for width, out in zip([widths[0], *widths], widths)],
        "norm": norm(widths[-1]),
        "head": matrix(next(keys), widths[-1], config.classes, dtype),
    }


def logits(params: Params, images: torch.Tensor, config: Config, key: vfn.random.Key | None = None) -> torch.Tensor:
    """Scores [B, classes] of images [B, C, H, W]; with a key, dropout is on."""
    blocks, run, keys = params["blocks"], block, keys_of(key, len(params["blocks"]))
    params = {name: p for name, p in params.items() if name != "blocks"}
    at = config.layout  # mesh
    params, run = at.gather(params, NAMES), at.block(block, NAMES)  # mesh
    x = F.conv2d(images, params["stem"], padding=1)
    for i, p in enumerate(blocks):
        x = vfn.cut(run(p, x, 2 if i and i % config.blocks == 0 else 1, config, next(keys)))
    x = F.relu(group_norm(x, config.groups, **params["norm"])).mean((2, 3))
    return x @ params["head"]


def loss(params: Params, batch: Params, config: Config, key: vfn.random.Key | None = None) -> torch.Tensor:
    """Mean cross entropy in nats; `batch` is {"image": [B, C, H, W], "label": [B]}."""
    labels = batch["label"]
    return F.cross_entropy(logits(params, batch["image"], config, key), labels, reduction="sum") / labels.numel()


def block(p: Params, x: torch.Tensor, stride: int, config: Config, key: vfn.random.Key | None) -> torch.Tensor:
    """Two convolutions, added to what they work on, or to a convolution of it of size 1 where shapes change."""
    at = config.layout  # mesh
    h = F.relu(group_norm(x, config.groups, **p["before"]))
    y = F.relu(group_norm(F.conv2d(h, p["into"], stride=stride, padding=1), config.groups, **p["inside"]))
    y = F.conv2d(dropout(key, y, config.dropout), p["back"], padding=1)
    y = at(y, "batch")  # mesh
    return y + (F.conv2d(h, p["shortcut"], stride=stride) if "shortcut" in p else x)
