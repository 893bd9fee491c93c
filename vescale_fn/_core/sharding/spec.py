"""Partition specs: what they mean, as pure data. No process group, no tensor of any rank.

A spec `P` gives each tensor dim the mesh axes that split it (major first). Everything here is arithmetic over a mapping
``{"dp": 2, "tp": 4}`` from axis names to sizes, in mesh order: validation, shard shapes, index maps, and the
translation to and from the placements of torch's DTensor.

Sizes that do not divide follow `torch.chunk`: the last shards are smaller, or empty. Where several axes split one dim,
they are applied as DTensor applies placements: in mesh order, an axis that comes earlier in the mesh but later in the
spec taking its piece out of each of the segments that the axes after it will make (`_StridedShard`).
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from .. import torch_internals
from ..base.errors import SpecError
from ..base.messages import count_text, described, meant, mesh_text, report, short
from ..base.saved_names import also_saved_as, saved_as
from .merged_dim import Merged

Axes = Mapping[str, int]
Entry = None | str | tuple[str, ...]
At = tuple[tuple[str, tuple[int, ...]], ...]  # axes by name, of each the coordinates at which the value exists


class P(tuple[Any, ...]):
    """How an array lies on a mesh: one entry a dim, None or an axis name or a tuple of names (major first).

    Args:
        entries: for each dim, the mesh axes that split it. Dims beyond the last entry are not split.
        unreduced: axes over which the ranks hold partial sums that are still to be added.
        reduced: axes over which the value is replicated and its gradient stays unreduced.
        at: of axes that neither split nor sum it, the coordinate at which the value exists: ``at={"pp": 2}``; a tuple of
            coordinates where several have a copy. Ranks at other coordinates hold nothing of it.

    Source: `jax.sharding.PartitionSpec`.

    >>> from vescale_fn import P
    >>> P("dp", None, ("dp2", "tp"))
    P('dp', None, ('dp2', 'tp'))
    >>> P(("x",)) == P("x"), P("x") == P("x", None)
    (True, False)
    >>> P("dp", unreduced={"tp"})
    P('dp', unreduced={'tp'})
    >>> P("tp", at={"pp": 2})
    P('tp', at={'pp': 2})
    """

    unreduced: frozenset[str]
    reduced: frozenset[str]
    at: At
    _hash: int  # once it was asked for: a spec is looked up again and again

    @torch_internals.not_compiled  # which would make a tuple of other entries
    def __new__(
        cls,
        *entries: Entry,
        unreduced: Iterable[str] = (),
        reduced: Iterable[str] = (),
        at: Mapping[str, int | Sequence[int]] | At = (),
    ) -> P:
        self: P = super().__new__(cls, map(_entry, entries))
        self.unreduced = _names(unreduced, "unreduced")
        self.reduced = _names(reduced, "reduced")
        self.at = _places(at) if at != () else ()
        return self

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, P)
            and super().__eq__(other)
            and self.unreduced == other.unreduced
            and self.reduced == other.reduced
            and self.at == other.at
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            self._hash = hash((tuple(self), self.unreduced, self.reduced, self.at))
            return self._hash

    def __repr__(self) -> str:
        parts = [repr(entry) for entry in self]
        for word, names in (("unreduced", self.unreduced), ("reduced", self.reduced)):
            if names:
                parts.append(f"{word}={{{', '.join(map(repr, sorted(names)))}}}")
        if self.at:
            parts.append(f"at={place_entry(self.at)}")
        return f"P({', '.join(parts)})"

    def __reduce__(self) -> Any:
        parts = tuple(self), sorted(self.unreduced), sorted(self.reduced)
        return rebuild_spec, (*parts, self.at) if self.at else parts  # files of before know of three

    @staticmethod
    def merged(*parts: tuple[int, Entry]) -> Any:
        """The entry of a dim that merges several, each split by itself: their sizes and entries, major first.

        It is what `reshape` makes of dims that are both split; nobody else needs to write it.

        >>> import vescale_fn as vfn
        >>> spec = vfn.P(vfn.P.merged((4, "dp"), (6, "tp")))  # of x.reshape(24), where x is [4@dp, 6@tp]
        >>> vfn.shard_shape((24,), {"dp": 2, "tp": 3}, spec)
        (4,)
        """
        rows = [(size, split_axes(P(entry), 1)[0]) for size, entry in parts]
        alone = tuple(name for size, names in rows if size == 1 for name in names)  # whose place does not matter
        rows = [(1, alone)] * bool(alone) + [row for row in rows if row[0] != 1]
        return Merged(rows) if len(rows) > 1 else (rows[0][1] if rows else None)


@saved_as("vescale_fn.spec")
def rebuild_spec(entries: tuple[Entry, ...], unreduced: Iterable[str], reduced: Iterable[str], at: At = ()) -> P:
    """The spec with these parts: what pickles hold."""
    return P(*entries, unreduced=unreduced, reduced=reduced, at=at)


def _entry(entry: Any) -> Entry:
    if entry is None or isinstance(entry, (str, Merged)):
        return entry
    nested = isinstance(entry, P)  # a whole spec, which would be taken for one dim's axes
    several = isinstance(entry, (tuple, list)) and not nested
    names = tuple(cast("Sequence[Any]", entry)) if several else ()
    if several and all(isinstance(name, str) for name in names):
        return None if not names else names[0] if len(names) == 1 else names
    raise SpecError(
        report(
            "P",
            f"an entry must be None, an axis name or a tuple of axis names, but one is {short(entry)}",
            fix=f"P(*spec, ...) takes over the entries of spec = {entry!r}"
            if nested
            else 'for instance P("dp", None, ("dp", "tp"))',
        )
    )


def _names(names: Any, word: str) -> frozenset[str]:
    if isinstance(names, str):
        return frozenset((names,))
    found: list[Any] = list(cast("Iterable[Any]", names)) if isinstance(names, Iterable) else [None]
    if not all(isinstance(name, str) for name in found):
        raise SpecError(
            report(
                "P",
                f"{word} must be a set of axis names, but it is {described(names)}",
                fix=f'for instance P({word}={{"dp"}})',
            )
        )
    return frozenset(found)


def _places(at: Any) -> At:
    """The coordinates of each axis, ascending; axes by name."""
    pairs = list(cast("Any", at.items() if isinstance(at, Mapping) else at if isinstance(at, tuple) else [None]))
    found: dict[Any, tuple[Any, ...]] = {}
    for pair in pairs:
        axis, row = (
            cast("tuple[Any, Any]", pair) if isinstance(pair, tuple) and len(cast("Any", pair)) == 2 else (None, ())
        )
        found[axis] = tuple(cast("Any", row)) if isinstance(row, (tuple, list)) else (row,)
    if not all(isinstance(axis, str) and row and all(map(_is_coordinate, row)) for axis, row in found.items()):
        shown = reprlib.repr(cast("Any", at)) if isinstance(at, Mapping) else described(at)
        raise SpecError(
            report(
                "P",
                f"at must give axes and coordinates on them, ints from 0, but it is {shown}",
                fix='for instance P("tp", at={"pp": 2}), or at={"pp": (0, 3)} for a value that exists at both',
            )
        )
    return tuple((axis, tuple(sorted(set(found[axis])))) for axis in sorted(found))


def _is_coordinate(i: Any) -> bool:
    return type(i) is int and i >= 0


def without_place(spec: P) -> P:
    """How the value lies among the ranks that hold it."""
    return P(*spec, unreduced=spec.unreduced, reduced=spec.reduced) if spec.at else spec


def with_place(spec: P, at: At) -> P:
    """The same layout, at a place."""
    return P(*spec, unreduced=spec.unreduced, reduced=spec.reduced, at=at) if at or spec.at else spec


def place_entry(at: At) -> dict[str, Any]:
    """A place as users write it: ``{"pp": 2}``."""
    return {axis: row[0] if len(row) == 1 else row for axis, row in at}


def place_text(at: At) -> str:
    """A place in words: ``pp=2``, ``pp=0,3``."""
    return ", ".join(f"{axis}={','.join(map(str, row))}" for axis, row in at)


def is_spec(spec: Any, where: str, name: str = "spec") -> P:
    """`spec` if it is a `P`, else a SpecError that shows how to write it as one."""
    if not isinstance(spec, P):
        raise SpecError(report(where, f"{name} must be a vfn.P, but it is {described(spec)}", fix=as_spec(spec)))
    return spec


def as_spec(value: Any) -> str:
    """How to write as a `P` what was given in its place."""
    if isinstance(getattr(value, "spec", None), P):
        return f"vfn.{value.spec!r}, which is its .spec"
    entries = cast("Sequence[Any]", value) if isinstance(value, (tuple, list)) else (value,)
    try:
        return "vfn.P() for a value that every rank holds whole" if value is None else f"vfn.{P(*entries)!r}"
    except SpecError:
        return "one entry a dim: vfn.P(\"dp\") for a first dim that is split over axis 'dp', vfn.P() for a whole value"


def split_axes(spec: P, ndim: int) -> tuple[tuple[str, ...], ...]:
    """For each of `ndim` dims, the axes that split it, major first."""
    rows: list[tuple[str, ...]] = [
        () if entry is None else (entry,) if isinstance(entry, str) else entry for entry in spec
    ]
    return (*rows, *((),) * (ndim - len(rows)))


def axes_named(spec: P) -> frozenset[str]:
    """All axes that a spec speaks of."""
    return spec.unreduced.union(spec.reduced, (axis for axis, _ in spec.at), *split_axes(spec, len(spec)))


def from_split_axes(rows: Sequence[Sequence[str]], unreduced: Iterable[str] = (), reduced: Iterable[str] = ()) -> P:
    """The spec of `split_axes`, written shortly: trailing Nones are dropped."""
    rows = list(rows)
    while rows and not rows[-1]:
        rows.pop()
    return P(*(row if isinstance(row, Merged) else tuple(row) for row in rows), unreduced=unreduced, reduced=reduced)


def problems(spec: P, axes: Axes, ndim: int | None, at: bool = False) -> list[str]:
    """Everything that is wrong with `spec` on a mesh with these axes, for a value of `ndim` dims (None: not known).

    `at`: whether it may say where on an axis the value exists.
    """
    found: list[str] = [] if at or not spec.at else [_NO_PLACE]
    used: dict[str, str] = {}
    places = [(name, f"dim {dim}") for dim, names in enumerate(split_axes(spec, len(spec))) for name in names]
    places += [(name, word) for word in ("unreduced", "reduced") for name in sorted(getattr(spec, word))]
    places += [(name, "at") for name, _ in spec.at]
    for name, place in places:
        if name not in axes:
            found.append(f"axis {name!r} ({place}) is not an axis of the {mesh_text(axes)}{meant(name, axes)}")
        if name in used:
            found.append(f"axis {name!r} is used twice: for {used[name]} and for {place}")
        used.setdefault(name, place)
    found += [
        f"coordinate {i} (at) is none of axis {name!r}, which has {axes[name]}"
        for name, row in spec.at
        if name in axes and math.prod(axes.values()) > 1  # a program on one device has the axes, and no places on them
        for i in row
        if i >= axes[name]
    ]
    return found + (too_long(spec, ndim) if ndim is not None else [])


_NO_PLACE = (
    "at is not known here: vfn.with_sharding(x, P(..., at=...)) of what comes out, or a mesh of those ranks, mesh.at"
)
KEYS = "P() for a key that all ranks share; vfn.random.split(key, n) with P('dp'), say, for a key on each rank"


def keys_taken_apart(spec: P, ndim: int) -> list[str]:
    """What is wrong with a spec for the data of keys: the last dim, of `ndim`, may not be split."""
    if len(spec) < ndim or not split_axes(spec, ndim)[-1]:
        return []
    return [
        f"these are the numbers of {'keys' if ndim > 1 else 'one key'}, and dim {ndim - 1}, those of a single key, must "
        "stay together"
    ]


def too_long(spec: P, ndim: int) -> list[str]:
    """What is wrong when `spec` has more entries than a value of `ndim` dims."""
    return (
        [f"it has {count_text(len(spec), 'entry')}, but the value has {count_text(ndim, 'dim')}"]
        if len(spec) > ndim
        else []
    )


def validate(spec: P, axes: Axes, ndim: int | None, where: str, name: str = "", at: bool = False) -> None:
    """Raise a SpecError unless `spec` fits; `name` is the value's path, `at` as of `problems`."""
    found = problems(spec, axes, ndim, at)
    if found:
        of = f" of {name}" if name else ""
        raise SpecError(
            report(
                where,
                f"the spec {spec!r}{of} does not fit",
                found,
                f"use the axes of the {mesh_text(axes)}, each at most once, at most one entry a dim",
            )
        )


also_saved_as("vescale_fn.spec", P)
