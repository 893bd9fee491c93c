"""Seeing: where everything lies, and what travelled."""

from __future__ import annotations

import contextlib
import html
import math
from collections.abc import Iterator
from typing import Any

import torch

from . import _torch, agreement, array, context, interrupts, marks, places, tree
from .blocks import Blocks
from .errors import VfnError, meant, mesh_text, report, short
from .layout import type_text
from .lines import quoted, readable, user_line, warn
from .merged import Merged
from .mesh import axes_of, coordinates
from .spec import P, local_indices, shard_shape, split_axes
from .wire import OPS, Record


class CommLog:
    """The collectives that ran while it was recording, in order: a list of records with ``op``, ``axes``, ``axis``,
    ``bytes``, ``dtype``, ``why`` and ``line``; printing it shows them as a table."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def append(self, record: Record) -> None:
        """Add a record."""
        self.records.append(record)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        return self.records[index]

    def count(self, op: str | None = None, axis: str | tuple[str, ...] | None = None) -> int:
        """How many there were, of one op (one of `wire.OPS`: "all_reduce", ...) and over one axis."""
        return len(self._chosen(op, axis))

    def bytes(self, op: str | None = None, axis: str | tuple[str, ...] | None = None) -> int:
        """How many bytes they held on one rank (the larger of input and output), in all."""
        return sum(r.bytes for r in self._chosen(op, axis))

    def _chosen(self, op: str | None, axis: Any) -> list[Record]:
        if op is not None and op not in OPS:
            raise VfnError(report("comm_log", f"op={short(op)} is not an op of the log{meant(op, OPS)}",
                                  fix=f"{', '.join(OPS)}: psum is an all_reduce, psum_scatter a reduce_scatter"))  # fmt: skip
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
    with context.logging_to(log), places.noted():
        yield log


class Shown:
    """What `show` returns: text in a terminal, a table in a notebook."""

    def __init__(self, rows: list[tuple[str, str, str, str]], title: str, pictures: list[str]) -> None:
        self.rows, self.title, self._pictures = rows, title, pictures

    def __repr__(self) -> str:
        rows = [("path", "type", "on each rank", "bytes on each rank"), *self.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([self.title, *lines])

    def _repr_html_(self) -> str:
        head = "".join(
            f"<th style='text-align:left'>{h}</th>"
            for h in ("path", "type", "on each rank", "bytes on each rank", "who holds what")
        )
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'><code>{html.escape(cell)}</code></td>" for cell in row)
            + f"<td>{picture}</td></tr>" for row, picture in zip(self.rows, self._pictures)
        )  # fmt: skip
        return f"<p>{html.escape(self.title)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def show(value: Any) -> Shown:
    """Show where everything in a tree lies: a table of text in a terminal, HTML with a picture a leaf in a notebook.

    Args:
        value: any tree. In a `shard_map` body its values are shown with their types over the axes, and on a simulated
            mesh with a picture of the ranks, those in one colour that hold the same.

    Returns:
        An object to print, or to leave as a notebook cell's last value. Nothing travels.

    >>> import torch, vescale_fn as vfn
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    ...     print(vfn.show({"w": vfn.shard(torch.zeros(4, 6), mesh, vfn.P(None, "tp")), "step": 3}))
    1 array on mesh (dp=2, tp=2), 1 other leaf
    path      type        on each rank  bytes on each rank
    ['step']  int 3
    ['w']     f32[4,6@tp]  [4, 3]        48
    """
    leaves, _ = tree.flatten(value)
    rows, pictures, meshes, arrays, plain, mine = [], [], [], 0, 0, 0
    body = context.body()
    for path, x in zip(tree.paths(value), leaves, strict=True):
        path = path or "(value)"
        with _torch.no_torch_function():  # a body refuses to read values
            pictures.append(_picture(x, body))
        if not isinstance(x, torch.Tensor):
            rows.append((path, f"{type(x).__name__} {x!r}", "", ""))
            continue
        mesh, spec = array.mesh_of(x), array.spec_of(x)
        if body is not None and not marks.outside(x, body.auto):
            mine += 1
            rows.append((path, marks.text(x, marks.typeof(x, body.axes)), *_block(x, mesh, spec)))
            continue
        text = type_text(x.shape, x.dtype, spec)
        if mesh is None:
            plain += 1
            text += " (plain)"
        else:
            arrays += 1
            if mesh not in meshes:
                meshes.append(mesh)
        rows.append((path, text, *_block(x, mesh, spec)))
    where = " and ".join(map(_mesh_line, meshes))
    counts = [
        (arrays, "array", f" on {where}"),
        (plain, "plain tensor", ""),
        (mine, "local value", f" in a body over {', '.join(body.axes)} of {_mesh_line(body.mesh)}" if body else ""),
        (len(leaves) - arrays - plain - mine, "other lea", ""),
    ]
    parts = [f"{n} {word}{_plural(n, word)}{tail}" for n, word, tail in counts if n]
    return Shown(rows, ", ".join(parts) or "nothing", pictures)


def _mesh_line(mesh: Any) -> str:
    return mesh_text(axes_of(mesh))


def _block(x: torch.Tensor, mesh: Any, spec: Any) -> tuple[str, str]:
    """The shape of what a rank holds of `x`, and its bytes."""
    shape = list(x.shape) if mesh is None else list(shard_shape(tuple(x.shape), mesh, P(*spec)))
    even = "" if mesh is None or _even(x, mesh, spec) else " at most"
    return f"{shape}{even}", f"{math.prod(shape) * x.element_size():,}"


def _plural(n: int, word: str) -> str:
    if word.endswith("lea"):
        return "f" if n == 1 else "ves"
    return "" if n == 1 else "s"


def _even(x: Any, mesh: Any, spec: P) -> bool:
    shapes = {tuple(map(len, local_indices(tuple(x.shape), axes_of(mesh), spec, coordinates(mesh, rank))))
              for rank in range(mesh.size())}  # fmt: skip
    return len(shapes) == 1


_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#76b7b2", "#edc948")


def _picture(x: Any, body: Any) -> str:
    """A small drawing: two dims of the value (or its one), each block in a colour, with the ranks that hold it."""
    if body is not None and type(x) is Blocks:
        return _ranks(x, body.mesh)
    mesh = array.mesh_of(x) if isinstance(x, torch.Tensor) else None
    if mesh is None or not 1 <= x.ndim or x.numel() == 0:
        return ""
    axes, spec = axes_of(mesh), array.spec_of(x)
    if any(isinstance(entry, Merged) for entry in spec):  # blocks of many pieces
        return ""
    dims = [d for d, row in enumerate(split_axes(spec, x.ndim)) if row][:2] or [x.ndim - 1]
    if len(dims) == 1 and x.ndim > 1:  # beside the one split dim, the neighbour that shows which way it runs
        dims = [dims[0] - 1, dims[0]] if dims[0] == x.ndim - 1 else [dims[0], dims[0] + 1]
    rows_dim, cols_dim = (dims[0], dims[1]) if len(dims) == 2 else (dims[0], None)
    width, height, blocks = 180.0, 72.0, {}
    for rank in range(mesh.size()):
        spans = local_indices(tuple(x.shape), axes, spec, coordinates(mesh, rank))
        key = tuple((i[0], len(i)) if len(i) else None for i in (spans[d] for d in dims))
        blocks.setdefault(key, []).append(rank)
    drawn = []
    for number, (key, ranks) in enumerate(blocks.items()):
        if None in key:
            continue
        (r0, rn) = key[0]
        (c0, cn) = key[1] if cols_dim is not None else (0, 1)
        n_rows, n_cols = x.shape[rows_dim], x.shape[cols_dim] if cols_dim is not None else 1
        left, top, w, h = c0 / n_cols * width, r0 / n_rows * height, cn / n_cols * width, rn / n_rows * height
        label = ",".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}..{ranks[-1]}"
        drawn.append(_box(left, top, w, h, number, label))
    return _drawing(width, height, drawn)


def _ranks(x: Blocks, mesh: Any) -> str:
    """A small drawing of a value of a body: the ranks of the mesh, in one colour those that have the same."""
    sizes = list(axes_of(mesh).values())
    columns = sizes[-1]
    width, height = min(360.0, 80.0 * columns), 24.0 * (mesh.size() // columns)
    w, h = width / columns, 24.0
    seen: list[torch.Tensor] = []
    drawn = []
    for rank, block in enumerate(x.blocks):
        number = next((i for i, other in enumerate(seen) if other is block or torch.equal(other, block)), len(seen))
        if number == len(seen):
            seen.append(block)
        row, column = divmod(rank, columns)
        drawn.append(_box(column * w, row * h, w, h, number, _values(block) or f"rank {rank}"))
    return _drawing(width, height, drawn)


def _values(x: torch.Tensor) -> str:
    """The numbers in a tensor, if they are few and short."""
    if x.numel() > 8 or x.is_complex():
        return ""
    text = " ".join(f"{value:.4g}" for value in x.flatten().tolist())
    return text if len(text) <= 16 else ""


def _box(left: float, top: float, w: float, h: float, number: int, label: str) -> str:
    return (f"<rect x='{left:.1f}' y='{top:.1f}' width='{w:.1f}' height='{h:.1f}' fill='{_COLORS[number % 8]}' "
            f"stroke='white'/><text x='{left + w / 2:.1f}' y='{top + h / 2 + 3:.1f}' font-size='9' fill='white' "
            f"text-anchor='middle'>{label}</text>")  # fmt: skip


def _drawing(width: float, height: float, drawn: list[str]) -> str:
    return f"<svg width='{width:.0f}' height='{height:.0f}' role='img'>{''.join(drawn)}</svg>"


def debug(*, timeout: float | None = None) -> contextlib.AbstractContextManager[None]:
    """Inside this ``with`` block, mistakes that cost time to find are looked for; it must be entered on every rank.

    - A random key that is used twice: a draw and a `split` use a key up. `fold_in` may be called on one key again and
      again, but not beside a draw or a split of it, whose numbers it would repeat. A key that is made twice counts as
      one. Tracers are not looked into.
    - Ranks that part ways: each collective and each `shard_map` call, forward and backward, is compared across its ranks
      (function, line, shapes, dtypes, specs, parameters) before it runs. Ranks that differ, and ranks that wait for one
      that left, died or never comes, get an error that names what each of them does, instead of a hang.
    - Plain tensors that count as the same on every rank and are not: in `shard`, `with_sharding`, `shard_map`, ops that
      they share with arrays, and the blocks that `from_local` is given along axes that its spec does not name.
    - Numbers and keys that differ by rank where one counts as the same on all of them: of ops on arrays, draws on a mesh and
      optimisers; in a `shard_map` body, with the tensors that it closes over or makes; results that a body gives as the same
      along an axis. They are noted where they are used and compared when ranks next meet, or at the end of the block.

    Ranks tell each other through the process group's store, so this works with any backend, and it is slow: every
    collective becomes a meeting of its ranks, and plain tensors are read. Collectives that `torch.distributed` is
    called for directly are not seen. On a simulated mesh there is one process, and nothing to compare.

    Args:
        timeout: how many seconds a rank waits for the others; by default a little less than a collective of the
            process group may take.

    Raises:
        RandomError: where a key is used again; it names the lines of both uses.
        DivergenceError: where ranks part ways, on every one of them, in the same words.

    Source: the ideas of `jax.experimental.key_reuse`, and of torch's ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.

    >>> import vescale_fn as vfn
    >>> key = vfn.random.key(0)
    >>> with vfn.debug():
    ...     x = vfn.random.normal(key, (2,))
    ...     try:
    ...         y = vfn.random.uniform(key, (2,))
    ...     except vfn.errors.RandomError as error:
    ...         print(str(error).splitlines()[0])
    random.uniform: the key [0, 0] was used before, so the numbers are not new ones
    """
    return _Debug(timeout)


class _Debug(contextlib.ExitStack):  # which goes on leaving, where an interrupt comes while one of its contexts is left
    _entered = True

    def __init__(self, timeout: float | None) -> None:
        super().__init__()
        self._timeout, self._line = timeout, user_line()
        self._entered = False

    def __enter__(self) -> None:  # type: ignore[override]
        self._entered, saved = True, interrupts.before()
        try:
            self.callback(interrupts.undo, saved)
            self.enter_context(context.debugging())
            self.enter_context(agreement.Watch(self._timeout))
        except BaseException:
            interrupts.undo(saved)
            raise

    def __del__(self) -> None:
        if not self._entered:
            warn(report("debug", f"the debug mode made at {quoted(self._line)} was never entered, so it did nothing",
                        fix="with vfn.debug(): around what is to be looked at"))  # fmt: skip
