"""comm_log: every collective that a program carries out, with its size and the line it comes from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..base import context, op_lines
from ..base.errors import VfnError
from ..base.messages import meant, report, short
from ..base.source_lines import readable
from .collectives import OPS, Record
from .value_flow import ValueFlow


class CommLog:
    """The collectives that ran while it was recording, in order: a list of records with ``op``, ``axes``, ``axis``,
    ``bytes``, ``dtype``, ``why`` and ``line``; printing it shows them as a table."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.flow = ValueFlow()

    def append(self, record: Record) -> None:
        """Add a record."""
        self.records.append(replace(record, moved=self.flow.moving) if self.flow.moving else record)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        return self.records[index]

    def count(self, op: str | None = None, axis: str | tuple[str, ...] | None = None) -> int:
        """How many there were, of one op (one of `collectives.OPS`: "all_reduce", ...) and over one axis."""
        return len(self._chosen(op, axis))

    def bytes(self, op: str | None = None, axis: str | tuple[str, ...] | None = None) -> int:
        """How many bytes they held on one rank (the larger of input and output), in all."""
        return sum(r.bytes for r in self._chosen(op, axis))

    def _chosen(self, op: str | None, axis: Any) -> list[Record]:
        if op is not None and op not in OPS:
            raise VfnError(
                report(
                    "comm_log",
                    f"op={short(op)} is not an op of the log{meant(op, OPS)}",
                    fix=f"{', '.join(OPS)}: psum is an all_reduce, psum_scatter a reduce_scatter",
                )
            )
        axes = None if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
        return [r for r in self.records if op in (None, r.op) and axes in (None, r.axes)]

    def __repr__(self) -> str:
        if not self.records:
            return "no collective"
        rows = [("op", "axis", "bytes", "dtype", "why", "line")]
        rows += [(r.op, r.axis, str(r.bytes), r.dtype, r.why, _place(r)) for r in self.records]
        if not {r.dtype for r in self.records} & {"bf16", "f16"}:  # else it matters what is summed in which
            rows = [(*row[:3], *row[4:]) for row in rows]
        widths = [max(map(len, column)) for column in list(zip(*rows))[:-1]]
        return "\n".join("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[-1]]) for row in rows)


def _place(record: Record) -> str:
    said = not record.backward or record.why.endswith("(backward)")
    return readable(record.line) + ("" if said else " (backward)")


@contextlib.contextmanager
def comm_log() -> Iterator[CommLog]:
    """Record every collective that this thread runs inside a ``with`` block, forward and backward.

    Each has the op, the mesh axes, the bytes it held on one rank, the dtype (shown where there are 16-bit numbers), why it
    ran, and the user's source line; in a backward pass ``backward=True`` and the line of the forward op, if that ran in the
    block too. On a simulated mesh a collective counts once, as it does on each rank of a real one; over an axis of size 1
    nothing travels.

    >>> import torch, vescale_fn as vfn
    >>> with vfn.simulate(2):
    ...     x = vfn.shard(torch.ones(4, 2), vfn.make_mesh((2,), ("dp",)), vfn.P("dp"))
    ...     with vfn.comm_log() as log:
    ...         print(x.sum().item())
    8.0
    >>> log.count("all_reduce"), log[0].axis, log[0].bytes
    (1, 'dp', 4)
    """
    log = CommLog()
    try:
        with context.logging_to(log), op_lines.noted():
            yield log
    finally:
        log.flow = ValueFlow()
