"""The values of two runs, compared on all ranks: the table of all of them, and in words how one differs.

What is looked for first says most: partial sums that nobody added up, a factor that is the size of an axis, another
factor on each rank, the same numbers in another order.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..._core.arrays.array import is_array, mesh_of, place, spec_of
from ..._core.base import dtypes
from ..._core.base.messages import mesh_text
from ..._core.distributed.communicator import coordinates
from ..._core.distributed.mesh import communicator_of
from ..._core.sharding.index_map import axes_of
from ..._core.sharding.layout import type_text
from ..._core.sharding.spec import P, split_axes
from . import relation
from .recording import Held, hold
from .statistics import Statistics, facts, head, wobble

EQUAL, ROUNDED, NOISE = "equal", "equal up to rounding", "not judged: rounding alone changes it as much"


class Compared(NamedTuple):
    """One value of both runs."""

    path: str
    type: str
    difference: float  # the largest absolute difference
    relative: float  # to what its element is compared to
    problem: str  # empty where they are equal
    detail: tuple[str, ...] = ()
    ratio: float | None = None  # of the two, where it is the same for all elements
    remark: str = EQUAL


class Report:
    """What `check_parity` found, value by value; printed as a table. ``equal`` says whether all are equal."""

    def __init__(self, name: str, mesh: Any, rows: Sequence[Compared]) -> None:
        self.name, self.mesh, self.rows = name, mesh, tuple(rows)

    @property
    def equal(self) -> bool:
        """Whether every value is the same on one device and on the mesh."""
        return not any(row.problem for row in self.rows)

    @property
    def title(self) -> str:
        """What was compared, and how many values are equal."""
        noise = sum(row.remark == NOISE for row in self.rows)
        count, n = sum(not row.problem for row in self.rows) - noise, len(self.rows)
        where = f"equal on one device and on the {mesh_text(axes_of(self.mesh))}"
        rest = f"; {noise} cannot be judged" if noise else ""
        return (
            f"check_parity({self.name}): {count} of {n} value{'s' * (n != 1)} {'is' if n == 1 else 'are'} {where}{rest}"
        )

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (row.path, row.type, f"{row.difference:.2g}", f"{row.relative:.2g}", row.problem or row.remark)
            for row in self.rows
        ]

    def __repr__(self) -> str:
        rows = [_HEADS, *self._cells()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADS) - 1)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[-1]]).rstrip() for row in rows]
        return "\n".join([self.title, *lines])

    def _repr_html_(self) -> str:
        rows = [
            "".join(f"<td style='text-align:left'><code>{html.escape(cell)}</code></td>" for cell in row)
            for row in self._cells()
        ]
        head = "".join(f"<th style='text-align:left'>{name}</th>" for name in _HEADS)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<p>{html.escape(self.title)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


_HEADS = ("value", "type", "max difference", "relative", "")


# --- all values -------------------------------------------------------------------------------------------------------


def compared(
    paths: Sequence[str],
    one: Sequence[Any],
    many: Sequence[Any],
    mesh: Any,
    rtol: float | None,
    atol: float,
    rounded: Sequence[Sequence[Any]] = (),
) -> list[Compared]:
    """Each value of a run on one device against that of the run on a mesh; the same list on every rank.

    Args:
        paths: what to call them.
        one, many: the values of either run; those of `many` may be arrays.
        mesh: all of whose ranks make this call.
        rtol, atol: by how much floats may differ, relative to the size of a value (None: by dtype), and besides.
        rounded: the values of further runs on one device, with arguments that differ by their rounding: an error as
            large as these make is none.
    """
    axes, ranks = axes_of(mesh), communicator_of(mesh).ranks
    held = [_held(x) if isinstance(x, torch.Tensor) else None for x in many]
    largest = _largest(one)
    mine: list[list[Statistics | None]] = []
    slack = [
        wobble(a, [values[i] for values in rounded]) if isinstance(a, torch.Tensor) else 0.0 for i, a in enumerate(one)
    ]
    for a, h, more in zip(one, held, slack, strict=True):
        if not isinstance(a, torch.Tensor) or h is None:
            mine.append([None] * len(ranks))
            continue
        tolerance = dtypes.tolerance(a.dtype) if rtol is None else rtol
        # zeros made of sums are not quite
        more = more + atol if bool(a.any()) else max(atol, largest * _epsilon(a.dtype))
        mine.append(
            [
                facts(a, h.of(at), [h.spec or P()], axes, coordinates(mesh, rank), tolerance, more)
                for at, rank in enumerate(ranks)
            ]
        )
    by_rank = communicator_of(mesh).everyone(mine, "check_parity")
    rows = []
    for i, (path, a, b, h) in enumerate(zip(paths, one, many, held, strict=True)):
        if isinstance(a, torch.Tensor) and h is not None:
            rows.append(_tensors(path, a, tuple(b.shape), h.spec or P(), [row[i] for row in by_rank], mesh))
        else:
            rows.append(_others(path, a, b))
    return rows


def remarked(before: Sequence[Compared], after: Sequence[Compared]) -> list[Compared]:
    """The rows of a second comparison that knows what rounding does, with a remark where that made the difference."""
    return [
        new._replace(remark=NOISE if new.relative > 0.1 else ROUNDED) if old.problem and not new.problem else new
        for old, new in zip(before, after, strict=True)
    ]


def changed(paths: Sequence[str], before: Sequence[Any], after: Sequence[Any]) -> str:
    """Of two runs of one kind, the first value that is not the same, in words; "" where all are."""
    for path, a, b in zip(paths, before, after, strict=True):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            if _others(path, a, b).problem:
                return f"{path}: {a!r}, then {b!r}"
            continue
        for x, y in zip(hold(a).blocks, hold(b).blocks):
            found = facts(x, y, [P()], {}, {}, dtypes.tolerance(x.dtype)).fits[0]
            if not found.equal:
                return f"{path}: {found.want or head(x)}, then {found.got or head(y)}"
    return ""


def _held(x: torch.Tensor) -> Held:
    """What the ranks hold of a result, with partial sums added up: that is how a reader sees them."""
    spec = spec_of(x)
    return hold(place(x, mesh_of(x), P(*spec), "check_parity") if is_array(x) and spec.unreduced else x)


def _largest(values: Sequence[Any]) -> float:
    """The largest element of all: where a gradient should be zero, rounding still makes it a little of that."""
    tensors = [x for x in values if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()]
    largest = [float(x.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) for x in tensors]
    return max(largest, default=0.0)


def _epsilon(dtype: torch.dtype) -> float:
    return 2 * torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


# --- one value --------------------------------------------------------------------------------------------------------


def _tensors(
    path: str, whole: torch.Tensor, shape: tuple[int, ...], spec: P, rows: Sequence[Statistics], mesh: Any
) -> Compared:
    type_ = type_text(tuple(whole.shape), whole.dtype, spec)
    fits = [row.fits[0] for row in rows]
    difference = max(fit.difference for fit in fits)
    relative = max(fit.relative for fit in fits)
    problem = ""
    if any(row.dtype != whole.dtype for row in rows):
        one, many = (str(dtype).removeprefix("torch.") for dtype in (whole.dtype, rows[0].dtype))
        problem = f"is {many} on the mesh, {one} on one device"
    elif shape != tuple(whole.shape):
        problem = (
            f"has shape {list(shape)} on the mesh, {list(whole.shape)} on one device{_stacked(whole, shape, spec)}"
        )
        return Compared(path, type_, math.inf, math.inf, problem)
    elif not all(fit.equal for fit in fits):
        problem = _in_words(whole, spec, rows, mesh, difference, relative)
    return Compared(
        path,
        type_,
        difference,
        relative,
        problem,
        tuple(relation.shown(whole, rows)),
        relation.factor(rows) if problem else None,
    )


def _stacked(whole: torch.Tensor, shape: tuple[int, ...], spec: P) -> str:
    """Why a shape is larger on the mesh, where the spec of a result makes it so."""
    rows = split_axes(spec, len(shape)) if len(shape) == whole.ndim else ()
    for dim, names in enumerate(rows):
        if names and shape[dim] != whole.shape[dim]:
            return f": along dim {dim} out_specs puts one block of each rank of {' x '.join(map(repr, names))}"
    return ""


def _in_words(
    whole: torch.Tensor, spec: P, rows: Sequence[Statistics], mesh: Any, difference: float, relative: float
) -> str:
    """How the mesh's value differs; the most telling thing that can be said."""
    axes, tolerance = axes_of(mesh), max(dtypes.tolerance(whole.dtype), 1e-9)
    if any(row.fits[0].nans for row in rows):
        return "has NaN or infinity in other places"
    ratio = relation.factor(rows)
    if ratio is not None and abs(ratio - 1) > 0.01:
        if ratio == 0:
            return "is zero on the mesh"
        return f"is {relation.named(ratio, axes) or f'{ratio:.4g} times the one-device value'}"
    found = relation.conclude(rows, [spec], mesh, axes, tolerance)
    if found is not None and found.how != "equal":
        over = " and ".join(map(repr, found.axes))
        return f"is on each rank of {over} only {'a part of the sum' if found.how == 'sum' else 'the mean of a part'}"
    size = _norm_in_words(spec, rows, axes)
    own = [row.fits[0].ratio for row in rows]
    known = [r for r in own if r is not None and not math.isnan(r)]
    if len(known) == len(own) and max(abs(r - 1) for r in known) > 0.01:
        listed = ", ".join(dict.fromkeys(f"{r:.4g}" for r in own[:8]))
        return f"is the one-device value times another factor on each rank: {listed}{', ...' * (len(own) > 8)}{size}"
    copies = max(1, sum(math.prod(row.shape) for row in rows) // max(1, whole.numel()))
    if relation.same_numbers(whole, rows, copies, tolerance):
        return "holds the same numbers in another order"
    return f"differs by {difference:.3g} (relative {relative:.2g}){size}"


def _norm_in_words(spec: P, rows: Sequence[Statistics], axes: dict[str, int]) -> str:
    """By which factor the norm differs, where it is one of the mesh's."""
    squares = sum(row.fits[0].square for row in rows)
    norm = math.sqrt(sum(row.square for row in rows) / squares) if squares else 1.0
    splitting = {name: axes[name] for names in split_axes(spec, len(spec)) for name in names}
    close = relation.named(norm, splitting or axes, 1e-5) if abs(norm - 1) > 0.01 else None
    return f"; its norm is {close}" if close else ""


def _others(path: str, one: Any, many: Any) -> Compared:
    same = type(one) is type(many) and (one is many or one == many or (one != one and many != many))
    problem = "" if same else f"is {many!r}, on one device {one!r}"
    return Compared(path, type(many).__name__, 0.0 if same else math.inf, 0.0 if same else math.inf, problem)
