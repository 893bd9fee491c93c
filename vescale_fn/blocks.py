"""Blocks: one tensor that stands for every rank's block, on a mesh whose ranks this process plays.

A `Blocks` holds one plain tensor a rank and runs each aten op once a rank, so autograd and every `torch.func` transform
work through it as through any tensor. Two ranks may hold the same tensor object: a replicated value is held once.

What a real rank could not do either raises: Python's ``if`` on a value that differs by rank, a write into a plain tensor
(which belongs to all ranks), a shape where the ranks' shapes differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from . import _torch
from .errors import InPlaceError, TypingError, report


class Blocks(torch.Tensor):
    """One tensor that stands for every simulated rank's block: ``x.blocks[rank]``."""

    blocks: tuple[torch.Tensor, ...]

    @staticmethod
    def __new__(cls, blocks: Iterable[torch.Tensor]) -> Blocks:
        blocks = tuple(blocks)
        first = blocks[0]
        ragged = any(b.shape != first.shape for b in blocks)
        self = _torch.make_wrapper_subclass(
            cls,
            first.shape,
            strides=first.stride(),
            storage_offset=first.storage_offset(),
            dtype=first.dtype,
            device=first.device,
            dispatch_sizes_strides_policy="sizes" if ragged else None,
        )
        _torch.forbid_data_ptr(self)
        self.blocks = blocks
        return self

    __init__ = object.__init__  # type: ignore[assignment]
    __torch_function__ = _torch.disabled_torch_function

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        rows = "\n".join(f"  rank {rank}: {block}" for rank, block in enumerate(self.blocks))
        return f"Blocks of {len(self.blocks)} ranks, each {_type(self.blocks[0])}:\n{rows}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Blocks, (self.blocks,)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def _type(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


_SHAPE_QUERIES = {
    torch.ops.aten.sym_size.default,
    torch.ops.aten.sym_stride.default,
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.sym_storage_offset.default,
    torch.ops.aten.size.default,
    torch.ops.aten.numel.default,
}


def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any], share: bool = False) -> Any:
    """Run an aten op once a rank on `Blocks` among its arguments; without any, once.

    Args:
        share: ranks whose arguments are the same tensors share one result. For values that are never changed in place
            behind the back of the caller; a body gives each rank its own.
    """
    n = _ranks((*args, *kwargs.values()))
    if n is None:
        return func(*args, **kwargs)
    if func in _SHAPE_QUERIES:
        shapes = {tuple(b.shape) for b in args[0].blocks}
        raise TypingError(report("shape", "this value's shape differs by rank", [f"the shapes are {sorted(shapes)}"],
                                 "pad it to one shape, or select with a mask"))  # fmt: skip
    if func._schema.is_mutable:  # noqa: SLF001
        _check_writes(func, args, kwargs)
    seen: dict[Any, Any] = {}
    outs = []
    for rank in range(n):
        local_args = [_pick(a, rank) for a in args]
        local_kwargs = {k: _pick(a, rank) for k, a in kwargs.items()} if kwargs else kwargs
        if share:
            ids = tuple(_identity(a) for a in (*local_args, *local_kwargs.values()))
            if ids not in seen:
                seen[ids] = func(*local_args, **local_kwargs)
            outs.append(seen[ids])
        else:
            outs.append(func(*local_args, **local_kwargs))
    return _stitch(func, args, kwargs, outs)


def _identity(a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return id(a)
    return tuple(map(_identity, a)) if isinstance(a, (list, tuple)) else None  # every rank has the same static argument


def _ranks(args: Iterable[Any]) -> int | None:
    for a in args:
        if type(a) is Blocks:
            return len(a.blocks)
        if isinstance(a, (list, tuple)):
            n = _ranks(a)
            if n is not None:
                return n
    return None


def _pick(a: Any, rank: int) -> Any:
    if type(a) is Blocks:
        return a.blocks[rank]
    if isinstance(a, (list, tuple)):
        return type(a)(_pick(x, rank) for x in a)
    return a


def _check_writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for i, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        for target in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(target, torch.Tensor) and type(target) is not Blocks:
                raise InPlaceError(report(
                    str(func), "this writes a value that differs by rank into a plain tensor, which all ranks share",
                    [f"the target is a plain {_type(target)}"],
                    "make the buffer inside the body (torch.zeros there is each rank's own), or use the result of the "
                    "op without the underscore"))  # fmt: skip
            if type(target) is Blocks and len(set(map(id, target.blocks))) < len(target.blocks):
                others = [a for a in (*args, *kwargs.values()) if type(a) is Blocks and a is not target]
                if any(len(set(map(id, a.blocks))) > 1 for a in others):
                    raise InPlaceError(report(
                        str(func), "this writes a value that differs by rank into one that several ranks share",
                        [f"the target is a replicated {_type(target.blocks[0])}"],
                        "clone it first: buffer = x.clone()"))  # fmt: skip


def _stitch(func: Any, args: Sequence[Any], kwargs: dict[str, Any], outs: list[Any]) -> Any:
    first = outs[0]
    if isinstance(first, torch.Tensor):
        for a in (*args, *kwargs.values()):  # an in-place op gives back the tensor that it was given
            if type(a) is Blocks and a.blocks[0] is first:
                return a
        return Blocks(outs)
    if isinstance(first, (list, tuple)):
        return type(first)(_stitch(func, args, kwargs, list(row)) for row in zip(*outs, strict=True))
    if any(out != first for out in outs[1:]) and not all(out != out for out in outs):  # NaN on all ranks is agreement
        raise TypingError(report(
            "Python", "this reads a number out of a value that differs by rank, so ranks would go different ways",
            [f"rank {rank} has {out!r}" for rank, out in enumerate(outs)],
            "torch.where instead of `if`, or make it the same first: vfn.psum, vfn.pmax, ..."))  # fmt: skip
    return first


def each(fn: Callable[..., Any], ranks: Iterable[int], *values: Any, key: Callable[[int], Any] | None = None) -> Any:
    """``fn(rank, *locals)`` on each rank that this process plays: a Blocks when it plays several, else the one result.

    Args:
        ranks: the row-major places that this process plays.
        values: Blocks, or plain tensors that are every rank's.
        key: what of a rank `fn` depends on; ranks with equal keys and the same tensors share one result.
    """
    ranks = tuple(ranks)
    if len(ranks) == 1 and not any(type(v) is Blocks for v in values):
        return fn(ranks[0], *values)
    seen: dict[Any, torch.Tensor] = {}
    outs = []
    for rank in ranks:
        local = [_pick(v, rank) for v in values]
        if key is None:
            outs.append(fn(rank, *local))
        else:
            same = (key(rank), *map(_identity, local))
            if same not in seen:
                seen[same] = fn(rank, *local)
            outs.append(seen[same])
    return Blocks(outs)


def shared(block: torch.Tensor, n: int) -> Blocks:
    """One tensor that all `n` ranks hold."""
    return Blocks((block,) * n)
