"""Rows of a table that is split by its rows: no rank ever has the whole table, nor its whole gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .._core.arrays.array import is_array, mesh_of, spec_of
from .._core.arrays.placement import with_sharding
from .._core.base import context
from .._core.base.errors import CollectiveError
from .._core.base.messages import described, report
from .._core.distributed.mesh import axis_names
from .._core.shard_map.collective_calls import taking_part
from .._core.sharding.index_map import axes_of
from .._core.sharding.spec import from_split_axes, split_axes
from ..ops import axis_index, axis_size


def embedding(
    ids: torch.Tensor, table: torch.Tensor, *, padding_idx: int | None = None, axis: str | Sequence[str] | None = None
) -> torch.Tensor:
    """``F.embedding(ids, table)``, of a table that may be split by its rows.

    Each rank looks up what is in its own rows, and has zeros for the rest. The result is the ranks' sum, and it is left
    to be added up: one all-reduce where it is used, or a reduce-scatter if a ``with_sharding`` that splits it comes
    first. The gradient moves nothing, and each rank makes that of its own rows alone.

    ``F.embedding`` itself does the same where the rows are split over other axes than the ids. What this adds is what
    happens where both are split over one axis (`axis`), and that it can be called in a `shard_map` body.

    Args:
        ids: i64[...], rows of the table; what is none raises, and in a `shard_map` body gives nan. They may be split.
        table: [V, D]. V may be split, ``P("tp")``, evenly or not, and so may D.
        padding_idx: a row that gets no gradient; negative counts from the end.
        axis: the axes that V is split over; by default those of the table's rows that do not split the ids. Over the
            axes that both are split over, the table is gathered, and its gradient reduce-scattered: that is FSDP. In a
            `shard_map` body it must be said, if V is split; there the result varies over it: ``psum`` it.

    Returns:
        [..., D], lying as the ids, and in its last dim as the table; unreduced over the axes that split V.

    Raises:
        CollectiveError: arguments that are no such tensors.

    Source: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> ids, table = torch.tensor([[3, 0], [2, 3]]), torch.randn(5, 6)
    >>> with vfn.simulate(2):
    ...     split = vfn.shard(table, vfn.make_mesh((2,), ("tp",)), P("tp"))
    ...     y = vfn.nn.embedding(ids, split)
    ...     print(vfn.spec_of(y), torch.equal(vfn.unshard(y), table[ids]))
    P(unreduced={'tp'}) True
    """
    _check(ids, table, padding_idx)
    arrays = [a for a in (table, ids) if is_array(a)]
    if not arrays:
        split = context.body() is not None and axis is not None
        return _own_rows(ids, table, padding_idx, axis) if split else F.embedding(ids, table, padding_idx)
    mesh = mesh_of(arrays[0])
    sizes, rows = axes_of(mesh), split_axes(spec_of(ids), ids.ndim)
    lies = split_axes(spec_of(table), 2)
    of_ids = {a for row in rows for a in row}
    if axis is None:
        names = tuple(a for a in lies[0] if a not in of_ids)
    else:
        names = axis_names(axis, sizes, "nn.embedding", "axis")
        rows = [tuple(a for a in row if a not in names) for row in rows]
        of_ids.difference_update(names)
    width = tuple(a for a in lies[1] if a not in of_ids and a not in names)
    again = {a for row in (*lies, spec_of(table).reduced) for a in row if a in of_ids}
    specs = from_split_axes(rows), from_split_axes([names, width], reduced=again)
    ids, table = with_sharding((ids, table), specs, mesh=mesh)
    return F.embedding(ids, table, padding_idx)


def _own_rows(ids: Any, table: Any, padding_idx: int | None, axis: Any) -> Any:
    """Of a rank's rows those that the ids name, and zeros."""
    taking_part("nn.embedding", axis, "axis")
    rows = table.shape[0]
    at = ids - axis_index(axis) * rows
    found = F.embedding(at.clamp(0, rows - 1), table)
    if padding_idx is not None:
        found = torch.where((ids == padding_idx % (rows * axis_size(axis))).unsqueeze(-1), found.detach(), found)
    other = torch.where((ids >= 0) & (ids < rows * axis_size(axis)), 0.0, math.nan).to(table.dtype)
    return torch.where(((at >= 0) & (at < rows)).unsqueeze(-1), found, other.unsqueeze(-1))


def _check(ids: Any, table: Any, padding_idx: Any) -> None:
    failures = []
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
        failures.append(f"ids must be an int64 or int32 tensor, but it is {described(ids)}")
    if not isinstance(table, torch.Tensor) or table.ndim != 2 or not table.is_floating_point() or not table.shape[0]:
        failures.append(f"table must be a float tensor [rows, width], but it is {described(table)}")
    if padding_idx is not None and (isinstance(padding_idx, bool) or not isinstance(padding_idx, int)):
        failures.append(f"padding_idx must be the number of a row, or None, but it is {described(padding_idx)}")
    if failures:
        raise CollectiveError(report("nn.embedding", "the arguments do not fit", failures))
