"""The leaves of a recorded function's arguments and results: what of them a plan depends on, and the plain tensors in them.

A plan works on plain tensors: an array is taken apart into this rank's block (on a simulated mesh, into each different block
once) and put together again around a result.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import _torch
from ..array import Array
from ..blocks import Blocks
from ..errors import short
from ..layout import WHOLE, layout, text, type_text

_MOST = sys.float_info.max
_STATIC = frozenset((int, bool, str, bytes, type(None), complex, torch.dtype, torch.device, torch.Size))


def signature(leaf: Any) -> Any:
    """What a plan depends on of a leaf; equal for leaves that one plan serves."""
    kind = leaf.__class__
    if kind is Array:
        local = leaf._local_tensor
        inside = _pattern(local) if local.__class__ is Blocks else local.stride()
        return leaf._spec, inside, leaf.__dict__.get("_reduced")
    if kind is torch.Tensor:
        if leaf.layout is not torch.strided:
            return leaf.shape, leaf.layout, leaf.dtype, leaf.device
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if isinstance(leaf, float):
        return float if 0.0 <= leaf <= _MOST else _unusual(leaf)
    if isinstance(leaf, torch.Tensor):
        return kind, leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return kind, leaf


def _unusual(leaf: float) -> Any:
    """Of a float that is not just another positive one: code in C sees its sign, and what is not finite, without asking."""
    return float, "a negative one" if math.isfinite(leaf) else repr(leaf)


def described(leaf: Any) -> str:
    """A leaf's type, or value, as messages name it."""
    if isinstance(leaf, torch.Tensor):
        return text(leaf)
    return "float" if isinstance(leaf, float) else short(leaf)


def is_object(leaf: Any) -> bool:
    """Whether a leaf is something with attributes, which a function may use as well."""
    return not isinstance(leaf, (torch.Tensor, float)) and type(leaf) not in _STATIC and hasattr(leaf, "__dict__")


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python float, which a plan takes as an input; an infinite one, or nan, is a part of the plan."""
    return isinstance(leaf, float) and math.isfinite(leaf)


def _pattern(local: Blocks) -> tuple[Any, ...]:
    """Which ranks hold the same block, and how the blocks lie in memory."""
    first: dict[int, int] = {}
    return tuple((first.setdefault(id(b), rank), b.shape, b.stride()) for rank, b in enumerate(local.blocks))


def plain_of(leaf: Any) -> list[torch.Tensor]:
    """The plain tensors in a leaf: a block that several ranks hold counts once."""
    if isinstance(leaf, DTensor):
        leaf = leaf._local_tensor
    if type(leaf) is Blocks:
        return list({id(block): block for block in leaf.blocks}.values())
    return [leaf] if isinstance(leaf, torch.Tensor) else []


def taking(leaf: Any) -> Callable[[Any], list[torch.Tensor]] | None:
    """The quickest function that takes the plain tensors out of leaves with this one's signature; None: there are none."""
    if not isinstance(leaf, torch.Tensor):
        return None
    if isinstance(leaf, DTensor):
        return plain_of if type(leaf._local_tensor) is Blocks else lambda x: [x._local_tensor]
    return plain_of if type(leaf) is Blocks else lambda x: [x]


def with_tensors(leaf: Any, replaced: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The leaf with each plain tensor in it replaced."""
    if isinstance(leaf, DTensor):
        local = with_tensors(leaf._local_tensor, replaced)
        out = _torch.new_dtensor(Array, local, leaf._spec, requires_grad=False)
        return marked(out, leaf)
    if type(leaf) is Blocks:
        made = {id(block): replaced(block) for block in {id(b): b for b in leaf.blocks}.values()}
        return Blocks(made[id(block)] for block in leaf.blocks)
    return replaced(leaf)


def marked(x: Array, like: DTensor) -> Array:
    """An array with what another one, of its layout, has noted besides its value."""
    if layout(like._spec).unreduced:
        x._sum = []
    if (reduced := getattr(like, "_reduced", None)) is not None:
        x._reduced = reduced
    return x


class Result:
    """How a result of the function is put together from results of the plan.

    Args:
        leaf: the result as the recording had it.
        places: where its plain tensors are among the plan's results.
    """

    def __init__(self, leaf: Any, places: Sequence[int]) -> None:
        self.places = tuple(places)
        if isinstance(leaf, DTensor):
            self.spec, self.notes = leaf._spec, {"_reduced": leaf._reduced} if hasattr(leaf, "_reduced") else {}
            self.partial = bool(layout(leaf._spec).unreduced)
            leaf = leaf._local_tensor
        else:
            self.spec = None
        self.ranks = len(places) if type(leaf) is Blocks else None

    def text(self, nodes: Sequence[Any]) -> str:
        """Its type, where `nodes` are the plan's results."""
        if self.spec is not None:
            meta: Any = self.spec.tensor_meta
            return type_text(meta.shape, meta.dtype, layout(self.spec))
        value = nodes[self.places[0]].meta["val"]
        return type_text(value.shape, value.dtype, WHOLE) if isinstance(value, torch.Tensor) else "float"

    def __call__(self, outs: Sequence[torch.Tensor]) -> torch.Tensor:
        local: Any = outs[self.places[0]] if self.ranks is None else Blocks([outs[place] for place in self.places])
        if self.spec is None:
            return local
        out = _torch.new_dtensor(Array, local, self.spec, requires_grad=False)
        if self.partial:
            out._sum = []
        if self.notes:
            out.__dict__.update(self.notes)
        return out
