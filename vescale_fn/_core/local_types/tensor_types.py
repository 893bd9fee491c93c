"""The type of a local value, kept on the tensor below any functorch wrapper: set, read, updated by writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import context
from ..base.errors import VaryingTypeError
from ..base.messages import report
from ..base.op_arguments import tensors_in
from ..base.state import here
from ..distributed.blocks import Blocks
from ..distributed.mesh import same
from ..sharding.layout import type_text, whole_layout
from ..sharding.spec import P
from .types import INVARIANT, Type, of


def mark(x: torch.Tensor, type_: Type) -> None:
    """Give a local value its type. What it is a view of notes it too: so a view that `vmap` makes unseen has one."""
    x = torch_internals.peel(x)
    x.vfn_type = type_  # type: ignore[attr-defined]
    if (base := torch_internals.base(x)) is not None:
        base.vfn_view_type = type_  # type: ignore[attr-defined]


def mark_fresh(x: torch.Tensor, type_: Type, borrowed: bool) -> None:
    """`mark`, and perhaps `borrow`, a tensor that was just made where no transform is active."""
    x.vfn_type = type_  # type: ignore[attr-defined]
    if borrowed:
        x.vfn_borrowed = True  # type: ignore[attr-defined]


class Writes:
    """The writes of one running body: whether one made an invariant value varying. It signs the memory they went to. And
    since when the body runs, by the count of autograd's nodes.

    Types sit on tensors, but several tensors can be names of one memory (views, `detach`, ``.data``): once something
    that differs by rank is written, all of them vary, also those that were made before.
    """

    __slots__ = ("any", "since")

    def __init__(self) -> None:
        self.any, self.since = False, torch_internals.autograd_count()


def _writes() -> Writes | None:
    """Those of the body that runs; None where nothing watches it."""
    run = here.slot.now.run
    return None if run is None or run.mode is None else run.writes


def _memory(x: torch.Tensor) -> Any:
    x = torch_internals.peel(x)
    x = torch_internals.local(x) if isinstance(x, DTensor) else x
    return torch_internals.storage(x.blocks[0] if type(x) is Blocks else x)


def retype(x: torch.Tensor, type_: Type) -> None:
    """Note that a write made a value, and so all that shares its memory, vary as `type_`."""
    mark(x, type_)
    if (base := torch_internals.base(torch_internals.peel(x))) is not None:
        mark(base, type_)
    writes = _writes()
    if writes is not None and (memory := _memory(x)) is not None:
        before = getattr(memory, "vfn_written", None)
        varying = type_.varying | (before[1].varying if before is not None and before[0] is writes else frozenset())
        memory.vfn_written = (writes, of(varying=varying))
        writes.any = True


def _as_written(x: torch.Tensor, found: Type) -> Type:
    """`found`, and what was written into the memory of `x` since."""
    writes = _writes()
    if writes is not None and writes.any and found.plain:
        written = getattr(_memory(x), "vfn_written", None)
        if written is not None and written[0] is writes:
            return of(varying=found.varying | written[1].varying)
    return found


def borrow(x: torch.Tensor) -> None:
    """Note that a local value is another name for memory that belongs to someone else, so it must not be written."""
    torch_internals.peel(x).vfn_borrowed = True  # type: ignore[attr-defined]


def is_borrowed(x: torch.Tensor) -> bool:
    """Whether a local value, or what it is a view of, belongs to someone else."""
    x = torch_internals.peel(x)
    return hasattr(x, "vfn_borrowed") or hasattr(torch_internals.base(x), "vfn_borrowed")


def lend(x: torch.Tensor) -> torch.Tensor:
    """Note that a local value is another name for memory from outside the body, which stays the same on all ranks."""
    torch_internals.peel(x).vfn_lent = True  # type: ignore[attr-defined]
    return x


def is_lent(x: torch.Tensor) -> bool:
    """Whether a value, or what it is a view of, is from outside the body."""
    if read(x) is None:
        return True
    x = torch_internals.peel(x)
    base = torch_internals.base(x)
    return any(hasattr(y, "vfn_lent") for y in (x, base)) or (
        base is not None and not hasattr(base, "vfn_type") and not hasattr(base, "vfn_view_type")
    )


def note_owner(out: torch.Tensor, source: torch.Tensor) -> None:
    """Note whose memory another name for `source` is, which torch does not count as a view."""
    if is_borrowed(source):
        borrow(out)
    if is_lent(source):
        lend(out)


def own(x: torch.Tensor) -> Type | None:
    """The type that this very tensor was given."""
    return getattr(torch_internals.peel(x), "vfn_type", None)


def read(x: torch.Tensor) -> Type | None:
    """The type that a local value, or the value that it is a view of, was given; None for one from outside."""
    found = vars(x).get("vfn_type")  # `getattr` has an array make the error for what it lacks
    if found is not None:
        return found
    x = torch_internals.peel(x)
    found = vars(x).get("vfn_type")
    if found is None and (base := torch_internals.base(x)) is not None:
        found = getattr(base, "vfn_type", None) or getattr(base, "vfn_view_type", None)
    return found


def kept(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`out`, which is `x` lying otherwise: in a body it has the type of `x`."""
    if (found := read(x)) is not None:
        mark(out, found)
    return out


def outside(x: torch.Tensor, auto: Any) -> bool:
    """Whether `x` is an array, but not one of a body whose values are arrays on the mesh `auto`."""
    below = torch_internals.peel(x)
    return isinstance(below, DTensor) and (auto is None or not same(torch_internals.mesh(below), auto))


def refuse_unseen(x: torch.Tensor) -> None:
    """Raise where a value that has a gradient was made since the body began, and yet has no type."""
    writes = _writes()
    if writes is not None and torch_internals.made_after(x, writes.since) and read(x) is None:
        raise VaryingTypeError(
            report(
                "shard_map",
                "a value with a gradient was made in the body by something that the body cannot see, so nothing is "
                "known of how it differs by rank",
                [f"it is {text(x)}, made by {type(x.grad_fn).__name__}"],
                "wrap the extension that made it as a torch.library.custom_op or a torch.autograd.Function; a value from "
                "outside of the body should be its argument",
            )
        )


def typeof(x: torch.Tensor, axes: tuple[str, ...]) -> Type:
    """The type of a local value in a body with these manual axes; one from outside is invariant.

    A value that differs by rank and was made behind the back of the body (a `Blocks` with different blocks, an array
    on a part of the mesh) is taken to vary over every axis; but where autograd follows it a guess could cost a
    gradient.

    Raises:
        VaryingTypeError: a value that autograd follows, and that was made in the body by something that no mode sees.
    """
    found = getattr(x, "vfn_type", None) or read(x)
    if found is not None:
        return _as_written(x, found)
    below = torch_internals.peel(x)
    refuse_unseen(x)
    if not isinstance(below, DTensor) and (type(below) is not Blocks or len(set(map(id, below.blocks))) == 1):
        return _as_written(x, INVARIANT)
    if torch_internals.needs_gradient(x):
        raise VaryingTypeError(
            report(
                "shard_map",
                "a value that differs by rank, and has a gradient, was made where the body could not see it",
                [f"it is {text(x)}"],
                "take it out of its own body first, or detach it",
            )
        )
    return of(axes)


def made_in(body: context.Body) -> Type:
    """The type of what counts as the same on all ranks of a body. Without types anything may differ."""
    return INVARIANT if body.check else of(body.axes)


def type_in(x: torch.Tensor, body: context.Body) -> Type:
    """`typeof`, in a body with types or without."""
    return typeof(x, body.axes) if body.check else of(body.axes)


def mark_all(value: Any, type_: Type) -> Any:
    """Give every tensor in a result its type, and return the result."""
    for x in tensors_in(value):
        mark(x, type_)
    return value


def mark_made(value: Any, type_: Type, operands: Iterable[torch.Tensor]) -> Any:
    """`mark_all`, but what comes from outside the body stays unmarked: a function may give back its own operand, as
    `contiguous` does, and the base of a view may be the caller's. Marked, it would count as local in the next body too."""
    outside: set[int] = set()
    for x in operands:
        below = torch_internals.peel(x)
        outside.add(id(torch_internals.base(below)))  # of a view of the body's: it is marked, or the caller's
        if read(x) is None:
            outside.add(id(below))
    for x in map(torch_internals.peel, tensors_in(value)):
        if id(x) not in outside:
            x.vfn_type = type_  # type: ignore[attr-defined]
            if (base := torch_internals.base(x)) is not None and id(base) not in outside:
                base.vfn_view_type = type_  # type: ignore[attr-defined]
    return value


def text(x: torch.Tensor, type_: Type | None = None) -> str:
    """A value on one short line: ``f32[2,3]{V:i}``."""
    lies = whole_layout(x) if isinstance(x, DTensor) else P()
    return f"{type_text(x.shape, x.dtype, lies)}{type_ or ''}"
