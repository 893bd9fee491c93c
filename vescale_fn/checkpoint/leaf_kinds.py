"""What kinds of leaves a checkpoint holds, and what is stored of each: a tensor, or a plain Python value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .._core import torch_internals
from .._core.arrays.array import is_array, mesh_of, spec_of
from .._core.base.errors import CheckpointError
from .._core.base.messages import described, report
from .._core.distributed.blocks import Blocks
from .._core.sharding.layout import WHOLE, type_text
from ..random.keys import Key
from .names import Named

VALUES = (int, float, complex, bool, str, bytes, type(None))
KEY = "key"  # the word before the name of a key's generator


class Leaf(NamedTuple):
    """A leaf, and what is stored of it."""

    name: str
    keys: tuple[str, ...]
    path: str
    kind: str  # "tensor", "key threefry2x32", "numpy", "number of numpy", or the name of a Python type
    stored: Any  # a plain tensor, an array, or the value itself

    @property
    def is_tensor(self) -> bool:
        """Whether a tensor is stored, and no Python value."""
        return isinstance(self.stored, torch.Tensor)

    @property
    def type_text(self) -> str:
        """What it is, on one short line."""
        return kind_text(self.kind, self.stored.shape, self.stored.dtype) if self.is_tensor else self.kind


def kind_text(kind: str | None, shape: Sequence[int], dtype: torch.dtype) -> str:
    """A stored tensor's kind and type: ``f32[2,3]``, ``key[2]``."""
    if kind is not None and kind.startswith(KEY):
        return f"key[{','.join(map(str, shape[:-1]))}]" if len(shape) > 1 else "key"
    return type_text(tuple(shape), dtype, WHOLE)


def leaves_of(named: Sequence[Named], where: str) -> list[Leaf]:
    """What is stored of each leaf, or one CheckpointError for all leaves that cannot be stored."""
    out, failures, ways = [], [], {}
    for one in named:
        kind, stored = _stored(one.value)
        if kind is None:
            what, way = stored
            failures.append(f"{one.path} is {_described(one.value)}{what}")
            ways[way] = True
        else:
            out.append(Leaf(one.name, one.keys, one.path, kind, stored))
    if failures:
        raise CheckpointError(report(where, "some leaves cannot be stored", failures, "; ".join(ways)))
    return out


def _stored(x: Any) -> tuple[str | None, Any]:
    """The kind of a leaf and what is stored of it; or None, and what is wrong with what to do instead."""
    if isinstance(x, Key):
        kind, data = _stored(x.data)
        return (None, data) if kind is None else (f"{KEY} {x.impl}", data)
    if isinstance(x, torch.Tensor):
        problem = _unfit(x)
        return (None, problem) if problem else ("tensor", x.detach())
    if isinstance(x, np.ma.MaskedArray):
        return None, ("", "x.filled(), and x.mask beside it")
    if isinstance(x, (np.ndarray, np.generic)):
        try:
            as_tensor = torch.from_numpy(np.array(x, x.dtype.newbyteorder("=")))  # a copy: numpy's may be read-only
        except (TypeError, ValueError):
            return None, (f" of dtype {x.dtype}, which torch has not", "numbers that torch has")
        return ("numpy" if isinstance(x, np.ndarray) else "number of numpy"), as_tensor
    if type(x) in VALUES:
        return type(x).__name__, x
    if isinstance(x, torch.nn.Module):
        return None, ("", "dict(module.named_parameters()), or module.state_dict()")
    if isinstance(x, torch.Generator):
        return None, ("", "generator.get_state(), a tensor")
    return None, ("", "tensors, arrays, keys, numbers, strings and None; leave other things out, or write them as such")


def _described(x: Any) -> str:
    """In the same words on every rank: without addresses."""
    said = described(x)
    return f"a {type(x).__name__}" if " at 0x" in said else said


def _unfit(x: torch.Tensor) -> tuple[str, str] | None:
    """Why a tensor cannot be stored, and what to do instead; else None."""
    if torch_internals.is_recorded():
        return " without a value: vfn.jit is recording", "save what the function returns, outside of it"
    if torch_internals.peel(x) is not x:
        return ", which a transform follows", "save outside of vfn.grad, vfn.vmap and their like"
    if type(x) is Blocks:
        return ", a block of a shard_map body", "save outside of the body"
    if x.is_meta:
        return " on the meta device, without values", "a tensor with values"
    if x.layout is not torch.strided:
        return f" with the memory format {x.layout}", "x.to_dense()"
    if x.is_quantized:
        return ", quantised", "x.int_repr(), and its scales"
    if type(x) not in (torch.Tensor, torch.nn.Parameter) and not is_array(x):
        return ", a subclass that vescale_fn does not know", "the plain tensors that it is made of"
    return None


def fingerprint(leaf: Leaf) -> str:
    """What must be the same of a leaf on every rank, as text."""
    if not leaf.is_tensor:
        return f"{leaf.kind} {leaf.stored!r}"
    x = leaf.stored
    lies = f" {spec_of(x)!r} on {_mesh_text(mesh_of(x))}" if is_array(x) else ""
    return f"{leaf.type_text}{lies}{'' if leaf.kind == 'tensor' else f' ({leaf.kind})'}"


def _mesh_text(mesh: Any) -> str:
    """The axes of a mesh, on one line."""
    names = mesh.mesh_dim_names or ()
    return ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape))
