"""Writes into arrays: what may be refused is, then each goes to where the elements are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import torch_internals
from ..base.op_arguments import tensors_in
from ..distributed import blocks
from .aliasing import after_write, check_reads, check_writable, entries, moved_view
from .lazy_layout import settle
from .view_writes import write_where_shown


def write(decision: Any, cls: Any, args: Sequence[Any], kwargs: dict[str, Any], moving: bool) -> Any:
    """Carry out an op that writes some of its arguments.

    Args:
        decision: how, where they have their elements.
        moving: whether arguments move for it.
    """
    func = decision.func
    targets = blocks.written_arguments(func, args, kwargs)
    for target in targets:
        check_writable(func, target)
        check_reads(func, args, kwargs, target)
    # else each rank goes through the lists as one device does
    if moving or any(moved_view(x) is not None for x in tensors_in(args, kwargs)):
        for call in (calls := entries(func, args, kwargs, targets)):
            cls.redispatch(func, *call)
        if calls:
            return args[0] if torch_internals.schema(func).returns else None
    if any(moved_view(x) is not None for x in tensors_in(targets)):
        return write_where_shown(cls, func, args, kwargs, note_written)
    if moving and settle(cls.redispatch, func, args):
        return cls.redispatch(func, args, kwargs)
    return decision.run_now(cls, args, kwargs)


def note_written(func: Any, x: Any) -> None:
    """Note that an op has written an array."""
    after_write(x)
    if not torch_internals.schema(func).returns:  # of the arrays of a list, torch counts no writes
        torch_internals.count_write(x)
