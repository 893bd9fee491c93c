"""show: which rank holds which part of a value."""

from __future__ import annotations

import functools
import html
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._core import torch_internals
from .._core.arrays import array, placement
from .._core.base import context, tree
from .._core.base.messages import mesh_text
from .._core.distributed.blocks import Blocks
from .._core.distributed.places import place_of, whole_mesh
from .._core.local_types import tensor_types
from .._core.sharding.index_map import axes_of, dim_indices, is_even, shard_shape
from .._core.sharding.layout import type_text
from .._core.sharding.merged_dim import Merged
from .._core.sharding.spec import P, place_text, split_axes


class Shown:
    """What `show` returns: text in a terminal, a table in a notebook."""

    def __init__(self, rows: list[tuple[str, str, str, str]], title: str, pictures: list[Callable[[], str]]) -> None:
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
            "<tr>"
            + "".join(f"<td style='text-align:left'><code>{html.escape(cell)}</code></td>" for cell in row)
            + f"<td>{picture()}</td></tr>"
            for row, picture in zip(self.rows, self._pictures)
        )
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
        with torch_internals.no_torch_function():  # a body refuses to read values
            pictures.append(_picture(x, body))
        if not isinstance(x, torch.Tensor):
            rows.append((path, f"{type(x).__name__} {x!r}", "", ""))
            continue
        mesh, spec = whole_mesh(array.mesh_of(x)), placement.spec_of(x)
        if body is not None and not tensor_types.outside(x, body.auto):
            mine += 1
            rows.append((path, tensor_types.text(x, tensor_types.typeof(x, body.axes)), *_block(x, mesh, spec)))
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
    even = "" if mesh is None or is_even(tuple(x.shape), axes_of(mesh), spec) else " at most"
    where = f" at {place_text(spec.at)}" if spec.at else ""
    return f"{shape}{even}{where}", f"{math.prod(shape) * x.element_size():,}"


def _plural(n: int, word: str) -> str:
    if word.endswith("lea"):
        return "f" if n == 1 else "ves"
    return "" if n == 1 else "s"


_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#76b7b2", "#edc948")


def _picture(x: Any, body: Any) -> Callable[[], str]:
    """A small drawing: two dims of the value (or its one), each block in a colour, with the ranks that hold it."""
    if body is not None and type(x) is Blocks:
        drawn = _ranks(x, body.mesh)  # of its values now
        return lambda: drawn
    mesh = array.mesh_of(x) if isinstance(x, torch.Tensor) else None
    if place_of(mesh) is not None:  # the picture's ranks are those of the whole mesh
        return lambda: ""
    if mesh is None or not 1 <= x.ndim or x.numel() == 0:
        return lambda: ""
    return functools.partial(_parts, tuple(x.shape), axes_of(mesh), array.spec_of(x))


def _parts(shape: tuple[int, ...], axes: dict[str, int], spec: P) -> str:
    if any(isinstance(entry, Merged) for entry in spec):  # blocks of many pieces
        return ""
    rows = split_axes(spec, len(shape))
    dims = _shown_dims(rows)
    n_rows, n_cols = [*(shape[d] for d in dims), 1][:2]
    width, height, drawn, seen = 180.0, 72.0, [], set[Any]()
    along = [name for name in axes if any(name in rows[d] for d in dims)]
    steps = {name: math.prod(list(axes.values())[i + 1 :]) for i, name in enumerate(axes)}
    others = [name for name in axes if name not in along]
    span = functools.cache(lambda d, *place: dim_indices(shape[d], rows[d], axes, dict(zip(rows[d], place))))
    for place in itertools.product(*(range(axes[name]) for name in along)):  # in the order of the first ranks there
        at = dict(zip(along, place))
        spans = (span(d, *(at[name] for name in rows[d])) for d in dims)
        key = tuple((i[0], len(i)) if len(i) else None for i in spans)
        if key in seen:
            continue
        seen.add(key)
        if None not in key:
            (r0, rn), (c0, cn) = [*key, (0, 1)][:2]
            left, top, w, h = c0 / n_cols * width, r0 / n_rows * height, cn / n_cols * width, rn / n_rows * height
            label = _holders(sum(at[name] * steps[name] for name in along), [(axes[x], steps[x]) for x in others])
            drawn.append(_box(left, top, w, h, len(seen) - 1, label))
    return _drawing(width, height, drawn)


def _holders(first: int, others: Sequence[tuple[int, int]]) -> str:
    """The ranks that hold a block: `first`, and those along the axes, (size, step between ranks), that do not split it."""
    if math.prod(size for size, _ in others) > 4:
        return f"{first}..{first + sum((size - 1) * step for size, step in others)}"
    return ",".join(
        str(first + sum(places))
        for places in itertools.product(*(range(0, size * step, step) for size, step in others))
    )


def _shown_dims(rows: Sequence[Sequence[str]]) -> list[int]:
    """The first two split dims; beside a single one the neighbour that shows which way it runs."""
    last = len(rows) - 1
    dims = [d for d, row in enumerate(rows) if row][:2] or [last]
    if len(dims) == 2 or last == 0:
        return dims
    return [last - 1, last] if dims[0] == last else [dims[0], dims[0] + 1]


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
    return (
        f"<rect x='{left:.1f}' y='{top:.1f}' width='{w:.1f}' height='{h:.1f}' fill='{_COLORS[number % 8]}' "
        f"stroke='white'/><text x='{left + w / 2:.1f}' y='{top + h / 2 + 3:.1f}' font-size='9' fill='white' "
        f"text-anchor='middle'>{label}</text>"
    )


def _drawing(width: float, height: float, drawn: list[str]) -> str:
    return f"<svg width='{width:.0f}' height='{height:.0f}' role='img'>{''.join(drawn)}</svg>"
