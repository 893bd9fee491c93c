"""The models by name. What they share: `Config`, `init(key, config, dtype)`, `loss(params, batch, config, key)`, `NAMES`."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import torch

import vescale_fn as vfn

from . import dit, gpt, llama, mixtral, resnet
from .parallel import METHODS, Layout

# The parallelisms that a model has named dims for; those of the batch and of the parameters as such suit all of them.
DIMS = {
    "gpt": {"tp", "sp", "vp", *METHODS},
    "llama": {"tp", "sp", "vp", *METHODS},
    # not in zigzag order: which tokens find a place at an expert depends on the order; and DiT looks both ways
    "mixtral": {"tp", "sp", "vp", *METHODS, "ep"} - {"cp-zigzag"},
    "dit": {"tp", "sp", *METHODS} - {"cp-zigzag"},
    "resnet": {"tp"},
}
ANY = {"pp", "dp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "remat", "reshard"}
MODELS: dict[str, ModuleType] = {"gpt": gpt, "llama": llama, "mixtral": mixtral, "dit": dit, "resnet": resnet}


def suits(name: str, text: str) -> bool:
    """Whether a model has dims for all parallelisms of a text like ``"fsdp+tp"``.

    >>> suits("llama", "fsdp+tp+sp"), suits("resnet", "cp")
    (True, False)
    """
    return set(text.split("+")) <= DIMS[name] | ANY


def laid_out(config: Any, layout: Layout) -> Any:
    """The same sizes, lying so."""
    return dataclasses.replace(config, layout=layout)


def random_batch(key: vfn.random.Key, config: Any, size: int, length: int, dtype: torch.dtype = torch.float32) -> Any:
    """A batch of noise for the model of this `Config`: `size` windows of `length` tokens and one, or images and labels."""
    if hasattr(config, "vocab"):
        return vfn.random.randint(key, (size, length + 1), 0, config.vocab, dtype=torch.int64)
    keys = vfn.random.split(key)
    pixels = config.size if hasattr(config, "size") else length
    return {
        "image": vfn.random.normal(keys[0], (size, config.channels, pixels, pixels), dtype),
        "label": vfn.random.randint(keys[1], (size,), 0, config.classes, dtype=torch.int64),
    }
