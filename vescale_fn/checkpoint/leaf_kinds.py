"""What kinds of leaves a checkpoint holds, and what is stored of each: a tensor, or a plain Python value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from .._core import torch_internals
from .._core.arrays.array import is_array, mesh_of, spec_of
from .._core.base.errors import CheckpointError
from .._core.base.messages import described, report
from .._core.distributed.blocks import Blocks
from .._core.sharding.layout import WHOLE, type_text
from ..random.keys import IMPLS, Key
from .names import Named

VALUES = (int, float, complex, bool, str, bytes, type(None))


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
        return kind_of(self.kind).text(self.stored.shape, self.stored.dtype) if self.is_tensor else self.kind


class Unfit(Exception):
    """A leaf cannot be stored: what is wrong with it, to follow its description, and what to do instead."""


@dataclass(frozen=True)
class LeafKind:
    """Leaves of which a tensor is stored: a new kind is a new row of `KINDS`.

    Args:
        word: begins the text of the kind in a manifest.
        fits: whether a leaf is of this kind.
        said: the whole text, for such a leaf.
        store: the tensor, or array, that is stored of it; or raises `Unfit`.
        restore: the leaf, of that tensor, the text, and the leaf that it is to be like.
        like: for such a leaf that another is to be like, a tensor of its shape, dtype and placement; or raises `Unfit`.
        text: its type, by the tensor's shape and dtype.
        on_mesh: whether it may lie on a mesh.
        opaque: whether the tensor is no leaf of another kind: its bits mean something else.
    """

    word: str
    fits: Callable[[Any], bool]
    said: Callable[[Any], str]
    store: Callable[[Any], torch.Tensor]
    restore: Callable[[torch.Tensor, str, Any], Any]
    like: Callable[[Any], torch.Tensor]
    text: Callable[[Sequence[int], torch.dtype], str]
    on_mesh: bool
    opaque: bool = False


def _key_of(data: torch.Tensor, said: str, like: Any) -> Key:
    impl = said.removeprefix("key ")
    if impl not in IMPLS:
        raise Unfit(f"a key of {impl}, which is no generator here")
    return Key(data, impl)


def _tensor_like(x: torch.Tensor, said: str, like: Any) -> torch.Tensor:
    if isinstance(like, torch.nn.Parameter) and not is_array(x):
        return torch.nn.Parameter(x, like.requires_grad)
    return x.requires_grad_() if isinstance(like, torch.Tensor) and like.requires_grad else x


def _of_numpy(x: Any) -> torch.Tensor:
    if isinstance(x, np.ma.MaskedArray):
        raise Unfit("", "x.filled(), and x.mask beside it")
    try:
        return torch.from_numpy(np.array(x, x.dtype.newbyteorder("=")))  # a copy: numpy's may be read-only
    except (TypeError, ValueError):
        raise Unfit(f" of dtype {x.dtype}, which torch has not", "numbers that torch has") from None


def _like_numpy(x: Any) -> torch.Tensor:
    try:
        dtype = torch.from_numpy(np.empty(0, x.dtype.newbyteorder("="))).dtype
    except (TypeError, ValueError):
        raise Unfit(", of a dtype that torch has not") from None
    return torch.empty(x.shape, dtype=dtype, device="meta")


def _of_tensor(x: torch.Tensor) -> torch.Tensor:
    if problem := _unfit(x):
        raise Unfit(*problem)
    with torch.inference_mode(False):  # in which an array made outside of it cannot be detached
        return x.detach()


def _type_text(shape: Sequence[int], dtype: torch.dtype) -> str:
    return type_text(tuple(shape), dtype, WHOLE)


KEYS = LeafKind(
    "key",
    lambda x: isinstance(x, Key),
    lambda x: f"key {x.impl}",
    lambda x: _stored(x.data)[1],
    _key_of,
    lambda x: x.data,
    lambda shape, dtype: f"key[{','.join(map(str, shape[:-1]))}]" if len(shape) > 1 else "key",
    True,
    opaque=True,
)
TENSORS = LeafKind(
    "tensor",
    lambda x: isinstance(x, torch.Tensor),
    lambda x: "tensor",
    _of_tensor,
    _tensor_like,
    lambda x: x,
    _type_text,
    True,
)
KINDS = (
    KEYS,
    TENSORS,
    LeafKind(
        "numpy",
        lambda x: isinstance(x, np.ndarray),
        lambda x: "numpy",
        _of_numpy,
        lambda x, said, like: x.numpy(),
        _like_numpy,
        _type_text,
        False,
    ),
    LeafKind(
        "number of numpy",
        lambda x: isinstance(x, np.generic),
        lambda x: "number of numpy",
        _of_numpy,
        lambda x, said, like: x.numpy()[()],
        _like_numpy,
        _type_text,
        False,
    ),
)


def kind_of(said: str | None) -> LeafKind:
    """The kind that a manifest calls so; where it says nothing, a tensor."""
    return next((kind for kind in KINDS if said is not None and said.startswith(kind.word)), TENSORS)


def leaves_of(named: Sequence[Named], where: str) -> list[Leaf]:
    """What is stored of each leaf, or one CheckpointError for all leaves that cannot be stored."""
    out, failures, ways = [], [], {}
    for one in named:
        try:
            out.append(Leaf(one.name, one.keys, one.path, *_stored(one.value)))
        except Unfit as error:
            what, way = error.args
            failures.append(f"{one.path} is {_described(one.value)}{what}")
            ways[way] = True
    if failures:
        raise CheckpointError(report(where, "some leaves cannot be stored", failures, "; ".join(ways)))
    return out


def _stored(x: Any) -> tuple[str, Any]:
    """The text of a leaf's kind, and what is stored of it."""
    for kind in KINDS:
        if kind.fits(x):
            return kind.said(x), kind.store(x)
    if type(x) in VALUES:
        return type(x).__name__, x
    if isinstance(x, torch.nn.Module):
        raise Unfit("", "dict(module.named_parameters()), or module.state_dict()")
    if isinstance(x, torch.Generator):
        raise Unfit("", "generator.get_state(), a tensor")
    raise Unfit("", "tensors, arrays, keys, numbers, strings and None; leave other things out, or write them as such")


def _described(x: Any) -> str:
    """In the same words on every rank: without addresses."""
    said = described(x)
    return f"a {type(x).__name__}" if " at 0x" in said else said


def _unfit(x: torch.Tensor) -> tuple[str, str] | None:
    """Why a tensor cannot be stored, and what to do instead; else None."""
    if torch_internals.is_recorded():
        return " without a value: vfn.jit is recording", "call this outside of it, with what the function returns"
    if torch_internals.peel(x) is not x:
        return ", which a transform follows", "call this outside of vfn.grad, vfn.vmap and their like"
    if type(x) is Blocks:
        return ", a block of a shard_map body", "call this outside of the body"
    if x.is_meta:
        return " on the meta device, without values", "a tensor with values"
    if x.layout is not torch.strided:
        return f" with the memory format {x.layout}", "x.to_dense()"
    if x.is_quantized:
        return ", quantised", "x.int_repr(), and its scales"
    if type(x) not in (torch.Tensor, torch.nn.Parameter) and not is_array(x):
        return ", a subclass that vescale_fn does not know", "the plain tensors that it is made of"
    return None


def same_on_all_ranks(leaf: Leaf) -> str:
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
