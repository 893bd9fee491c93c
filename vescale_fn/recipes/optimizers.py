"""Optimisers by name, as language models are trained with them: each with a rate that suits it, warm-up and a cosine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch

import vescale_fn as vfn

Rate = Callable[[Any], Any]


def make(name: str, lr: float, steps: int) -> vfn.optim.Optimizer:
    """The optimiser `name` of `OPTIMIZERS`, for a run of so many steps.

    The rate goes up to `lr`, then down to a twentieth of it; gradients are clipped by their norm. Matrices decay, biases
    and the scales of norms do not.

    >>> import torch
    >>> params = {"embed": torch.ones(5, 4), "blocks": [{"w": torch.ones(4, 4), "b": torch.ones(4)}]}
    >>> clipping, state = make("muon", 1e-3, 100).init(params)
    >>> state["muon"].mean["blocks"][0]["w"].shape, state["muon"].mean["embed"], state["adamw"].mean["embed"].shape
    (torch.Size([4, 4]), None, torch.Size([5, 4]))
    """
    rate = vfn.optim.warmup_cosine(lr, warmup=min(20, steps // 2), steps=steps, end=0.05 * lr)
    return vfn.optim.chain(vfn.optim.clip_by_global_norm(1.0), OPTIMIZERS[name](rate))


def of(opt: Any) -> vfn.optim.Optimizer:
    """The optimiser of a run by its options; where it computes in float16, of the gradients of a scaled loss."""
    made = make(opt.optimizer, opt.lr, opt.steps)
    return vfn.precision.loss_scaled(made) if opt.precision.compute == torch.float16 else made


def _adamw(rate: Rate) -> vfn.optim.Optimizer:
    return vfn.optim.adamw(rate, b1=0.9, b2=0.99, weight_decay=0.1, mask=_matrices)


def _lion(rate: Rate) -> vfn.optim.Optimizer:
    return vfn.optim.lion(rate, weight_decay=1.0, mask=_matrices)  # with a rate so much lower it comes to as much


def _muon(rate: Rate) -> vfn.optim.Optimizer:
    """Muon for the matrices of blocks, at the rates of AdamW, which has the rest (Liu et al., arXiv 2502.16982)."""
    parts = {"muon": vfn.optim.muon(rate, adjust="match_rms_adamw"), "adamw": _adamw(rate)}
    return vfn.optim.partition(parts, _of_blocks)


def _adafactor(rate: Rate) -> vfn.optim.Optimizer:
    return vfn.optim.adafactor(rate, mask=_matrices)


def _sgd(rate: Rate) -> vfn.optim.Optimizer:
    return vfn.optim.sgd(rate, momentum=0.9, nesterov=True)


# The names of `command_line.RATES`: the optimiser for a schedule
OPTIMIZERS: dict[str, Callable[[Rate], vfn.optim.Optimizer]] = {
    "adamw": _adamw,
    "lion": _lion,
    "muon": _muon,
    "adafactor": _adafactor,
    "sgd": _sgd,
}


def _matrices(params: Any) -> Any:
    return optree.tree_map(lambda p: p.ndim > 1, params)


def _of_blocks(params: Any) -> Any:
    label = lambda name, p: "muon" if name == "blocks" and p.ndim > 1 else "adamw"
    return {name: optree.tree_map(lambda p, name=name: label(name, p), part) for name, part in params.items()}
