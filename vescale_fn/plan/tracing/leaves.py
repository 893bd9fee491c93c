"""The leaves of a recorded function's arguments and results: what of them a plan depends on, and the plain tensors in them.

A plan works on plain tensors: an array is taken apart into this rank's block (on a simulated mesh, into the block of one rank
of those that hold the same) and put together again around a result.

What a plan depends on of an array is its type, and the strides of the whole, which all ranks know: blocks come in the order of
those strides, dense, and one that is not is copied. Whether a rank's own block happens to be contiguous decides nothing, since
a block of width 1 is where its neighbour's is not.
"""

from __future__ import annotations

import functools
import math
import numbers
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..._core import torch_internals
from ..._core.arrays.array import Array, made
from ..._core.arrays.shapes import ShapeDtype
from ..._core.base import no_values
from ..._core.base.array_notes import notes_of
from ..._core.base.messages import short
from ..._core.distributed.blocks import Blocks, of_each, parts
from ..._core.distributed.communicator import coordinates
from ..._core.distributed.mesh import communicator_of, root
from ..._core.distributed.places import is_elsewhere, is_stand_in
from ..._core.distributed.rows import row_of
from ..._core.sharding.index_map import axes_of
from ..._core.sharding.layout import WHOLE, contiguous_stride, layout, spec_for, text, type_text
from ..._core.sharding.merged_dim import parts_of
from ..._core.sharding.spec import P, split_axes
from ..execution.stride_checks import as_recorded
from .traced_float import Number

_MOST = sys.float_info.max
_STATIC = frozenset((int, bool, str, bytes, type(None), complex, torch.dtype, torch.device, torch.Size))


def signature(leaf: Any) -> Any:
    """What a plan depends on of a leaf; equal for leaves that one plan serves."""
    kind = leaf.__class__
    if kind is Array:
        notes, spec = leaf.vfn_notes, torch_internals.spec(leaf)
        return spec, None if notes is None else notes.reduced or None, spec.__dict__.get("written")
    if kind is torch.Tensor:
        if leaf.layout is not torch.strided:
            return leaf.shape, leaf.layout, leaf.dtype, leaf.device
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if kind is Number:
        return leaf.node
    if isinstance(leaf, float):
        return float if 0.0 < leaf <= _MOST else _unusual(leaf)
    if isinstance(leaf, DTensor):
        return kind, torch_internals.spec(leaf), leaf.requires_grad
    if isinstance(leaf, torch.Tensor):
        return kind, leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, numbers.Number) and kind not in _STATIC or kind is complex:
        return kind, repr(leaf)  # nan is not equal to itself, and zeros of either sign are
    return kind, leaf


def _unusual(leaf: float) -> Any:
    """Of a float that is not just another positive one: code in C sees its sign, and what is not finite, without asking."""
    if leaf == 0 and math.copysign(1.0, leaf) > 0:
        return float
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


@functools.lru_cache(maxsize=4096)
def first_holders(spec: Any) -> tuple[int, ...]:
    """For each block of an array that this process holds, the place of the first one that is the same."""
    mesh, ndim, lies = spec.mesh, len(spec.tensor_meta.shape), layout(spec)
    sizes = zip(spec.tensor_meta.shape, split_axes(lies, ndim), strict=True)
    apart = {name for size, row in sizes for _, names in parts_of(row, size) for name in names} | lies.unreduced
    whole = root(mesh)  # along axes that are not the array's own, a part of a mesh has blocks of other arrays
    apart |= set(axes_of(whole)) - set(axes_of(mesh))
    first: dict[Any, int] = {}
    return tuple(
        first.setdefault(tuple(coordinates(whole, rank)[name] for name in sorted(apart)), at)
        for at, rank in enumerate(communicator_of(mesh).ranks)
    )


def in_order(block: torch.Tensor, stride: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense block whose dims are ordered as those of the whole array; a dim that is expanded there is here."""
    strides, inner = [0] * block.ndim, 1
    for dim in sorted(range(block.ndim), key=lambda d: (stride[d], -d)):
        if stride[dim]:
            strides[dim] = inner
            inner *= max(block.shape[dim], 1)
    return tuple(strides)


def taking(leaf: Any) -> Callable[[Any], list[torch.Tensor]] | None:
    """The quickest function that takes the plain tensors out of leaves with this one's signature; None: there are none."""
    if not isinstance(leaf, torch.Tensor):
        return None
    if type(leaf) is Blocks:
        if row_of(leaf) is not None:
            return lambda x: [x.blocks.one]
        return lambda x: list({id(block): block for block in x.blocks}.values())
    if type(leaf) is ShapeDtype:
        return lambda x: [no_values.like(x, torch_internals.default_device())]
    if not isinstance(leaf, DTensor):
        return lambda x: [x]
    meta: Any = torch_internals.spec(leaf).tensor_meta
    local, stride = torch_internals.local(leaf), meta.stride
    if _is_stand_in(leaf):
        places = list(dict.fromkeys(first_holders(torch_internals.spec(leaf)))) if type(local) is Blocks else [0]
        return lambda x: [parts(torch_internals.local(x))[i] for i in places]
    if type(local) is not Blocks:
        strides, local_of = in_order(local, stride), torch_internals.local

        def block(x: Any) -> list[torch.Tensor]:
            found = local_of(x)
            return [found if found.stride() == strides else as_recorded(found, strides)]

        return block
    if (row := row_of(local)) is not None:
        return lambda x: [as_recorded(torch_internals.local(x).blocks.one, in_order(row.one, stride))]
    holders = dict.fromkeys(first_holders(torch_internals.spec(leaf)))
    wanted = [(rank, in_order(local.blocks[rank], stride)) for rank in holders]
    return lambda x: [as_recorded(torch_internals.local(x).blocks[rank], strides) for rank, strides in wanted]


def _is_stand_in(leaf: Any) -> bool:
    """Whether this rank holds nothing of an array: it is at another place."""
    elsewhere = isinstance(leaf, DTensor) and is_elsewhere(torch_internals.mesh(leaf))
    return elsewhere and all(map(is_stand_in, parts(torch_internals.local(leaf))))


def plain_of(leaf: Any) -> list[torch.Tensor]:
    """The plain tensors in a leaf."""
    if _is_stand_in(leaf):  # recorded as where it is
        stride = torch_internals.spec(leaf).tensor_meta.stride  # type: ignore[union-attr]
        return [x.new_empty_strided(x.shape, in_order(x, stride)) for x in taking(leaf)(leaf)]  # type: ignore[misc]
    take = taking(leaf)
    return [] if take is None else take(leaf)


def with_tensors(leaf: Any, replaced: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The leaf with each plain tensor in it replaced."""
    if isinstance(leaf, DTensor):
        plain = plain_of(leaf)
        if len(plain) == 1 and type(torch_internals.local(leaf)) is not Blocks:
            return array_of_local(leaf, replaced(plain[0]))
        return of_plain(leaf, map(replaced, plain))
    return of_each(replaced, *plain_of(leaf)) if type(leaf) is ShapeDtype else of_each(replaced, leaf)


def array_of_local(leaf: torch.Tensor, local: Any) -> Array:
    """The array like this one around what ranks hold."""
    return made(local, torch_internals.spec(leaf), lies_of(leaf))  # type: ignore[arg-type]


def count_of(leaf: torch.Tensor) -> int:
    """How many plain tensors there are in a leaf."""
    local = torch_internals.local(leaf) if isinstance(leaf, DTensor) else leaf
    if type(local) is not Blocks or row_of(local) is not None:
        return 1
    return len(set(first_holders(torch_internals.spec(leaf)) if isinstance(leaf, DTensor) else map(id, local.blocks)))


def of_plain(leaf: torch.Tensor, blocks: Iterator[torch.Tensor]) -> Any:
    """The like of a leaf of which the next of these are the plain tensors."""
    if not isinstance(leaf, DTensor):
        return of_each(lambda _: next(blocks), leaf)
    new, spec = [next(blocks) for _ in range(count_of(leaf))], torch_internals.spec(leaf)
    local: Any = torch_internals.local(leaf)
    if type(local) is not Blocks:
        return made(new[0], spec, lies_of(leaf))
    row = row_of(local)
    return made(of_ranks(new, spec) if row is None else Blocks(row.like(new[0])), spec, lies_of(leaf))


def of_ranks(blocks: Sequence[torch.Tensor], spec: Any) -> Blocks:
    """The block of each rank, of one for all ranks that hold the same (`first_holders`)."""
    holders = first_holders(spec)
    place = {rank: i for i, rank in enumerate(dict.fromkeys(holders))}
    return Blocks(blocks[place[rank]] for rank in holders)


def array_of(blocks: Sequence[torch.Tensor], mesh: Any, lies: P, shape: torch.Size, simulated: bool) -> Array:
    """The array of this shape and layout whose plain tensors (`plain_of`) these are."""
    spec = _spec(mesh, lies, shape, blocks[0].dtype)
    return made(of_ranks(blocks, spec) if simulated else blocks[0], spec, lies)


def array_around(local: Blocks, mesh: Any, lies: P, shape: torch.Size) -> Array:
    """The array of this shape and layout around what ranks hold."""
    return made(local, _spec(mesh, lies, shape, local.dtype), lies)


def _spec(mesh: Any, lies: P, shape: torch.Size, dtype: torch.dtype) -> Any:
    return spec_for(mesh, P(*lies, unreduced=lies.unreduced), shape, contiguous_stride(shape), dtype)


def lies_of(x: DTensor) -> P:
    """The layout of an array, with what its spec says of its cotangent."""
    lies, reduced = layout(torch_internals.spec(x)), notes_of(x).reduced
    if not (reduced or lies.reduced or lies.at):
        return lies
    return P(*lies, unreduced=lies.unreduced, reduced=reduced)


class Result:
    """How a result of the function is put together from results of the plan.

    Args:
        places: where its plain tensors are among the plan's results.
        spec, lies: of an array; None of a plain tensor.
        simulated: whether it is the blocks of simulated ranks.
    """

    def __init__(self, places: Sequence[int], spec: Any = None, lies: P = WHOLE, simulated: bool = False) -> None:
        self.places, self.spec, self.lies, self.simulated = tuple(places), spec, lies, simulated

    @classmethod
    def like(cls, leaf: Any, places: Sequence[int]) -> Result:
        """Of a result as the recording had it."""
        if not isinstance(leaf, DTensor):
            return cls(places, simulated=type(leaf) is Blocks)
        simulated = type(torch_internals.local(leaf)) is Blocks
        return cls(places, torch_internals.spec(leaf), lies_of(leaf), simulated)

    def text(self, nodes: Sequence[Any]) -> str:
        """Its type, where `nodes` are the plan's results."""
        if self.spec is not None:
            meta: Any = self.spec.tensor_meta
            return type_text(meta.shape, meta.dtype, layout(self.spec))
        value = nodes[self.places[0]].meta["val"]
        return type_text(value.shape, value.dtype, WHOLE) if isinstance(value, torch.Tensor) else "float"

    def __call__(self, outs: Sequence[torch.Tensor]) -> torch.Tensor:
        local: Any = outs[self.places[0]]
        if self.simulated:
            blocks = [outs[place] for place in self.places]
            local = Blocks(blocks) if self.spec is None else of_ranks(blocks, self.spec)
        return local if self.spec is None else made(local, self.spec, self.lies)


def making(made_of: Any) -> Callable[[Sequence[torch.Tensor], Sequence[Any]], Any]:
    """The quickest function that makes a leaf of the result of the plan's results and the arguments' leaves.

    Args:
        made_of: a `Result`, ``("input", i)`` for an argument's leaf, or ``("value", x)``.
    """
    if not isinstance(made_of, Result):
        kind, what = made_of
        return (lambda outs, leaves: leaves[what]) if kind == "input" else lambda outs, leaves: what
    place, spec = made_of.places[0], made_of.spec
    if not made_of.simulated and spec is None:
        return lambda outs, leaves: outs[place]
    if made_of.simulated or made_of.lies.unreduced or made_of.lies.reduced:
        return lambda outs, leaves: made_of(outs)
    bare_dtensor, forbid_data_ptr = torch_internals.bare_dtensor, torch_internals.forbid_data_ptr

    def array(outs: Sequence[torch.Tensor], leaves: Sequence[Any]) -> Any:
        out = bare_dtensor(Array, outs[place], spec, requires_grad=False)
        forbid_data_ptr(out)
        return out

    return array
