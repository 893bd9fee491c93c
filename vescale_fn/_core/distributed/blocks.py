"""Blocks: one tensor that stands for every rank's block, on a mesh whose ranks this process plays.

A `Blocks` holds one plain tensor a rank and runs each aten op once a rank, so autograd and every `torch.func` transform
work through it as through any tensor. Two ranks may hold the same tensor object: a replicated value is held once.

What a real rank could not do either raises: Python's ``if`` on a value that differs by rank, a write into a plain
tensor (which belongs to all ranks), a shape where the ranks' shapes differ.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .. import torch_internals
from ..base import context, traced_steps
from ..base.errors import InPlaceError, VaryingTypeError
from ..base.messages import dtype_text, op_text, report
from ..base.saved_names import saved_as
from ..base.stateful_draws import refuse_seeded
from .rows import RankRow, row_of
from .without_memory import WithoutMemory


@saved_as("vescale_fn.blocks")
class Blocks(WithoutMemory):
    """One tensor that stands for every simulated rank's block: ``x.blocks[rank]``."""

    elsewhere = "it is one block for each simulated rank", "x.blocks[rank], or vfn.unshard of what the body returns"
    instead_of_data = "x = value; or make x in the body, where it is each rank's own"
    blocks: Sequence[torch.Tensor]

    @staticmethod
    def __new__(cls, blocks: Iterable[torch.Tensor], in_body: bool = False) -> Blocks:
        if type(blocks) is RankRow:
            first, ragged = blocks.one, False
        else:
            blocks = tuple(blocks)
            first = blocks[0]
            if torch_internals.is_lazy(first):
                blocks = tuple(map(torch_internals.materialized, blocks))
                first = blocks[0]
            # an array knows its blocks' shapes, a body not
            ragged = in_body and any(b.shape != first.shape for b in blocks)
        self = torch_internals.make_wrapper_subclass(
            cls,
            first.shape,
            strides=first.stride(),
            storage_offset=first.storage_offset(),
            dtype=first.dtype,
            device=first.device,
            dispatch_sizes_strides_policy="sizes" if ragged else None,
        )
        torch_internals.forbid_data_ptr(self)
        self.blocks = blocks
        return self

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # seen by a body's mode
        with torch_internals.no_torch_function():
            self.blocks = value.blocks if type(value) is Blocks else (value.detach(),) * len(self.blocks)

    __init__ = object.__init__  # type: ignore[assignment]
    __torch_function__ = torch_internals.disabled_torch_function  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        rows = "\n".join(f"  rank {rank}: {block}" for rank, block in enumerate(self.blocks))
        return f"Blocks of {len(self.blocks)} ranks, each {_type(self.blocks[0])}:\n{rows}"

    def __format__(self, format_spec: str) -> str:
        if self.ndim or not format_spec:
            return super().__format__(format_spec)
        numbers = [format(block.item(), format_spec) for block in self.blocks]
        return numbers[0] if len(set(map(id, self.blocks))) == 1 else f"({', '.join(numbers)})"

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if torch_internals.watched_by_other_modes():  # a body's, which knows the value's type
            return super().__dlpack__(*args, **kwargs)
        raise self._refusal("__dlpack__")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Blocks, (self.blocks,)

    def __deepcopy__(self, memo: Any) -> Blocks:
        return self.detach().clone().requires_grad_(self.requires_grad)  # type: ignore[return-value]

    @classmethod
    @torch_internals.not_compiled
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(types) > 1 and not all(map(_HERE.__contains__, types)):
            return NotImplemented  # an array knows what to do with blocks, not they with it
        # where torch's own C++ calls an op, as at the end of a vmap, a body's mode is on
        with torch_internals.no_torch_function():
            return run(func, args, kwargs or {})


_HERE = frozenset((*torch_internals.BARE, torch.nn.Parameter, Blocks))


def _type(x: torch.Tensor) -> str:
    return f"{dtype_text(x.dtype)}[{','.join(map(str, x.shape))}]"


_SHAPE_QUERIES = {
    torch.ops.aten.sym_size.default,
    torch.ops.aten.sym_stride.default,
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.sym_storage_offset.default,
    torch.ops.aten.size.default,
    torch.ops.aten.numel.default,
}


LIST_OPS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")  # go through their lists entry by entry


def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an aten op of a body once a rank; without `Blocks` among its arguments, once."""
    if torch_internals.dispatch_modes() and torch_internals.is_traced():
        return traced_steps.as_one_step(func, args, kwargs, lambda: run(func, args, kwargs))
    n = ranks_in((*args, *kwargs.values()))
    if n is None:
        return func(*args, **kwargs)
    if context.virtual() is not None:
        refuse_seeded(func, args, kwargs, own=True)
    if func in _SHAPE_QUERIES:
        shapes = sorted({tuple(b.shape) for b in args[0].blocks})
        raise VaryingTypeError(
            report(
                "shape",
                "this value's shape differs by rank",
                [f"the shapes are {shapes}"],
                "one shape on all ranks: torch.where(mask, x, 0) for x[mask], or pad it",
            )
        )
    targets = written_arguments(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags and type(args[0]) is Blocks and ranks_in(args[1:]) is None:
        return _in_another_shape(func, args, kwargs)
    _check_writes(func, args, kwargs, targets)
    return run_ranks(func, n, args, kwargs, targets[0] if targets else None, in_body=True)


def _in_another_shape(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Blocks:
    """`squeeze_` and its like, which change a tensor's shape in place: torch's own `matmul` of a vector does so."""
    x, made = args[0], {}
    for block in x.blocks:
        if id(block) not in made:  # other values may hold the same block: they keep their shape
            made[id(block)] = func(block.detach(), *args[1:], **kwargs)
    x.blocks = tuple(made[id(block)] for block in x.blocks)
    torch_internals.own_shape(func, args)
    return x


def run_ranks(
    op: Callable[..., Any],
    n: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    target: Any = None,
    share: bool = False,
    vary: tuple[int, Sequence[Any]] | None = None,
    in_body: bool = False,
) -> Any:
    """Run `op` once a rank and put the results together.

    Args:
        target: what is written in place, a tensor or a list: a tensor that several ranks share is written once.
        share: ranks whose arguments are the same tensors share one result; for values that nothing changes in place.
        vary: (position, one value a rank) of an argument that differs by rank without being a tensor.
    """
    if isinstance(target, (list, tuple)) and torch_internals.operator_name(op).startswith(LIST_OPS):
        return _write_lists(op, n, args, kwargs, target)
    op = torch_internals.direct(op)
    count, names = len(args), tuple(kwargs)
    recorder = _recorder()
    if recorder is not None and recorder.takes_rows():
        values, at = [*args, *kwargs.values()], None if vary is None else vary[0]

        def as_one(rank: int, *local: Any) -> Any:
            given = [vary[1][rank] if i == at else x for i, x in enumerate(local)] if vary is not None else local
            return op(*given[:count], **dict(zip(names, given[count:])))

        out = recorder.for_all_ranks(as_one, n, values, None if vary is None else vary[1], share)
        return _wrapped(values, out, in_body)
    columns = [_column(a, n) for a in (*args, *kwargs.values())]
    if vary is not None:
        columns[vary[0]] = vary[1]
    if target is not None:
        same: Iterable[Any] = map(_memory, _column(target, n))
    elif share:  # what every rank has alike need not be compared
        differ = [map(_identity, column) for column in columns if type(column) is not itertools.repeat]
        same = zip(*differ, vary[1] if vary is not None else itertools.repeat(None))
    else:
        same = range(n)
    calls = zip(same, zip(*columns))
    if recorder is not None:
        outs = recorder.row(lambda *local: op(*local[:count], **dict(zip(names, local[count:]))), calls)
        return _stitch((*args, *kwargs.values()), outs, in_body)
    seen: dict[Any, Any] = {}
    outs = []
    for key, local in calls:
        if key not in seen:
            seen[key] = op(*local[:count], **dict(zip(names, local[count:]))) if names else op(*local)
        outs.append(seen[key])
    return _stitch((*args, *kwargs.values()), outs, in_body)


def _write_lists(op: Any, n: int, args: Sequence[Any], kwargs: dict[str, Any], target: Sequence[Any]) -> None:
    """Run a ``torch._foreach_`` op that writes the tensors of a list, each of them once."""
    done: set[Any] = set()
    for rank in range(n):
        places = [_memory(_pick(x, rank)) for x in target]
        todo = [k for k, place in enumerate(places) if place not in done]
        done.update(places)
        local = [
            [a[k] for k in todo] if isinstance(a, (list, tuple)) and len(a) == len(target) else a
            for a in (_pick(a, rank) for a in (*args, *kwargs.values()))
        ]
        if todo:
            op(*local[: len(args)], **dict(zip(kwargs, local[len(args) :])))


@functools.lru_cache(maxsize=4096)
def written(func: Any) -> tuple[tuple[int, str], ...]:
    """The (position, name) of each argument that an op writes in place."""
    return tuple(
        (i, a.name)
        for i, a in enumerate(torch_internals.schema(func).arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an op writes in place."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in written(func)]


def _identity(a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return id(a)
    return tuple(map(_identity, a)) if isinstance(a, (list, tuple)) else None  # every rank has the same static argument


def _memory(a: Any) -> Any:
    """Where a value lies: two tensors may be names of one memory, which is written once."""
    if isinstance(a, torch.Tensor):
        return torch_internals.memory(a) if a.numel() else id(a)
    return tuple(map(_memory, a)) if isinstance(a, (list, tuple)) else None


def ranks_in(args: Iterable[Any]) -> int | None:
    """How many ranks the first `Blocks` among the arguments stands for, or None without any."""
    for a in args:
        if type(a) is Blocks:
            return len(a.blocks)
        if isinstance(a, (list, tuple)):
            n = ranks_in(a)
            if n is not None:
                return n
    return None


def _pick(a: Any, rank: int) -> Any:
    if type(a) is Blocks:
        return a.blocks[rank]
    if isinstance(a, (list, tuple)):
        return type(a)(_pick(x, rank) for x in a)
    return a


def _column(a: Any, n: int) -> Iterable[Any]:
    """What each of `n` ranks has of an argument."""
    if type(a) is Blocks:
        return a.blocks
    if isinstance(a, (list, tuple)) and ranks_in(a) is not None:
        return [_pick(a, rank) for rank in range(n)]
    return itertools.repeat(a, n)


def _check_writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any], targets: Sequence[Any]) -> None:
    for value in targets:
        for target in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(target, torch.Tensor) and type(target) is not Blocks:
                raise InPlaceError(
                    report(
                        op_text(func),
                        "this writes a value that differs by rank into a plain tensor, which all ranks share",
                        [f"the target is a plain {_type(target)}"],
                        "make the buffer inside the body (torch.zeros there is each rank's own), or use the result of the "
                        "op without the underscore",
                    )
                )
            if type(target) is Blocks and _writers_differ(target, (*args, *kwargs.values())):
                raise InPlaceError(
                    report(
                        op_text(func),
                        "this writes a value that differs by rank into one that several ranks share",
                        [f"the target is a replicated {_type(target.blocks[0])}"],
                        "clone it first: buffer = x.clone()",
                    )
                )


def _writers_differ(target: Blocks, args: Sequence[Any]) -> bool:
    writers: dict[int, Any] = {}
    for rank, block in enumerate(target.blocks):
        local = tuple(_memory(_pick(a, rank)) for a in args)
        if writers.setdefault(_memory(block), local) != local:
            return True
    return False


def _stitch(args: Sequence[Any], outs: list[Any], in_body: bool) -> Any:
    first = outs[0]
    if isinstance(first, torch.Tensor):
        for a in args:  # an in-place op gives back the tensor that it was given
            if type(a) is Blocks and a.blocks[0] is first:
                return a
        return Blocks(outs, in_body)
    if isinstance(first, (list, tuple)):
        return type(first)(_stitch(args, list(row), in_body) for row in zip(*outs, strict=True))
    if any(out != first for out in outs[1:]) and not all(out != out for out in outs):  # NaN on all ranks is agreement
        raise VaryingTypeError(
            report(
                "item",
                "this needs the number in a value that differs by rank, so ranks would go different ways",
                [f"rank {rank} has {out!r}" for rank, out in list(enumerate(outs))[:8]],
                "vfn.dynamic_slice(x, [i], [size]) for x[i] or x[i : i + size], torch.where for `if`; or make it the same on "
                "all ranks: vfn.psum(x, axis). Shapes are Python ints, the same on all ranks",
            )
        )
    return first


def _wrapped(args: Sequence[Any], out: Any, in_body: bool) -> Any:
    """What a call that was recorded for all ranks gives."""
    if isinstance(out, (list, tuple)):
        return type(out)(_wrapped(args, one, in_body) for one in out)
    if type(out) is not RankRow:
        return out
    for a in args:  # an in-place op gives back the tensor that it was given
        if type(a) is Blocks and (a.blocks.one if type(a.blocks) is RankRow else a.blocks[0]) is out.one:
            return a
    return Blocks(out, in_body)


def each(fn: Callable[..., Any], ranks: Sequence[int], *values: Any, key: Callable[[int], Any] | None = None) -> Blocks:
    """``fn(rank, *locals)`` for each block: see `Communicator.each`."""
    recorder = _recorder()
    if recorder is not None and recorder.takes_rows():
        keys = ranks if key is None else list(map(key, ranks))
        return _wrapped(
            (),
            recorder.for_all_ranks(lambda at, *local: fn(ranks[at], *local), len(ranks), values, keys, key is not None),
            False,
        )
    rows = [(rank, *(_pick(v, at) for v in values)) for at, rank in enumerate(ranks)]
    same = ranks if key is None else [(key(rank), *map(_identity, local)) for rank, *local in rows]
    if recorder is not None:
        return Blocks(recorder.row(fn, zip(same, rows)))
    seen: dict[Any, torch.Tensor] = {}
    for one, local in zip(same, rows):
        if one not in seen:
            seen[one] = fn(*local)
    return Blocks(map(seen.__getitem__, same))


def parts(local: Any) -> Sequence[torch.Tensor]:
    """The blocks of a local value; a plain tensor is the only one."""
    return local.blocks if type(local) is Blocks else (local,)


def held(local: Any) -> Sequence[torch.Tensor]:
    """The tensors that a local value is made of: its blocks, or the one that stands for those of ranks recorded as one."""
    row = row_of(local)
    return parts(local) if row is None else (row.one,)


def of_each(fn: Callable[[torch.Tensor], torch.Tensor], local: Any) -> Any:
    """``fn(block)`` for each block of a local value, once for one that several ranks share."""
    if type(local) is not Blocks:
        return fn(local)
    return each(lambda _, block: fn(block), range(len(local.blocks)), local, key=lambda rank: None)


def renamed(local: Any, in_body: bool = False) -> Any:
    """A local value under a name of its own."""
    return Blocks(local.blocks, in_body) if type(local) is Blocks else local.detach()


def own_of_each(block: torch.Tensor, n: int) -> Blocks:
    """A tensor, of which each of `n` ranks has one of its own."""
    if (recorder := _recorder()) is not None and recorder.takes_rows():
        return _wrapped((), recorder.for_all_ranks(lambda rank: block, n, (), None, False), False)
    return Blocks(torch_internals.peel(x.detach()) for x in (block, *(block.clone() for _ in range(1, n))))


def _recorder() -> Any:
    return torch_internals.recorder() if torch_internals.dispatch_modes() else None


def shared(block: torch.Tensor, n: int) -> Blocks:
    """One tensor that all `n` ranks hold."""
    return Blocks((block,) * n)
