"""Partition specs: what they mean, as pure data. No process group, no tensor of any rank.

A spec `P` gives each tensor dim the mesh axes that split it (major first). Everything here is arithmetic over a mapping
``{"dp": 2, "tp": 4}`` from axis names to sizes, in mesh order: validation, shard shapes, index maps, and the
translation to and from the placements of torch's DTensor.

Sizes that do not divide follow `torch.chunk`: the last shards are smaller, or empty. Where several axes split one dim,
they are applied as DTensor applies placements: in mesh order, an axis that comes earlier in the mesh but later in the
spec taking its piece out of each of the segments that the axes after it will make (`_StridedShard`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from .. import torch_internals
from ..base.errors import SpecError
from ..base.messages import count_text, described, meant, mesh_text, report, short
from ..base.saved_names import also_saved_as, saved_as
from .merged_dim import Merged

Axes = Mapping[str, int]
Entry = None | str | tuple[str, ...]


class P(tuple[Any, ...]):
    """How an array lies on a mesh: one entry a dim, None or an axis name or a tuple of names (major first).

    Args:
        entries: for each dim, the mesh axes that split it. Dims beyond the last entry are not split.
        unreduced: axes over which the ranks hold partial sums that are still to be added.
        reduced: axes over which the value is replicated and its gradient stays unreduced.

    Source: `jax.sharding.PartitionSpec`.

    >>> from vescale_fn import P
    >>> P("dp", None, ("dp2", "tp"))
    P('dp', None, ('dp2', 'tp'))
    >>> P(("x",)) == P("x"), P("x") == P("x", None)
    (True, False)
    >>> P("dp", unreduced={"tp"})
    P('dp', unreduced={'tp'})
    """

    unreduced: frozenset[str]
    reduced: frozenset[str]

    @torch_internals.not_compiled  # which would make a tuple of other entries
    def __new__(cls, *entries: Entry, unreduced: Iterable[str] = (), reduced: Iterable[str] = ()) -> P:
        self: P = super().__new__(cls, map(_entry, entries))
        self.unreduced = _names(unreduced, "unreduced")
        self.reduced = _names(reduced, "reduced")
        return self

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, P)
            and super().__eq__(other)
            and self.unreduced == other.unreduced
            and self.reduced == other.reduced
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.unreduced, self.reduced))

    def __repr__(self) -> str:
        parts = [repr(entry) for entry in self]
        for word, names in (("unreduced", self.unreduced), ("reduced", self.reduced)):
            if names:
                parts.append(f"{word}={{{', '.join(map(repr, sorted(names)))}}}")
        return f"P({', '.join(parts)})"

    def __reduce__(self) -> Any:
        return rebuild_spec, (tuple(self), sorted(self.unreduced), sorted(self.reduced))

    @staticmethod
    def merged(*parts: tuple[int, Entry]) -> Any:
        """The entry of a dim that merges several, each split by itself: their sizes and entries, major first.

        It is what `reshape` makes of dims that are both split; nobody else needs to write it.

        >>> import vescale_fn as vfn
        >>> spec = vfn.P(vfn.P.merged((4, "dp"), (6, "tp")))  # of x.reshape(24), where x is [4@dp, 6@tp]
        >>> vfn.shard_shape((24,), {"dp": 2, "tp": 3}, spec)
        (4,)
        """
        return Merged([(size, split_axes(P(entry), 1)[0]) for size, entry in parts])


@saved_as("vescale_fn.spec")
def rebuild_spec(entries: tuple[Entry, ...], unreduced: Iterable[str], reduced: Iterable[str]) -> P:
    """The spec with these parts: what pickles hold."""
    return P(*entries, unreduced=unreduced, reduced=reduced)


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
    return spec.unreduced.union(spec.reduced, *split_axes(spec, len(spec)))


def from_split_axes(rows: Sequence[Sequence[str]], unreduced: Iterable[str] = (), reduced: Iterable[str] = ()) -> P:
    """The spec of `split_axes`, written shortly: trailing Nones are dropped."""
    rows = list(rows)
    while rows and not rows[-1]:
        rows.pop()
    return P(*(row if isinstance(row, Merged) else tuple(row) for row in rows), unreduced=unreduced, reduced=reduced)


def problems(spec: P, axes: Axes, ndim: int | None) -> list[str]:
    """Everything that is wrong with `spec` on a mesh with these axes, for a value of `ndim` dims (None: not known)."""
    found: list[str] = []
    used: dict[str, str] = {}
    places = [(name, f"dim {dim}") for dim, names in enumerate(split_axes(spec, len(spec))) for name in names]
    places += [(name, word) for word in ("unreduced", "reduced") for name in sorted(getattr(spec, word))]
    for name, place in places:
        if name not in axes:
            found.append(f"axis {name!r} ({place}) is not an axis of the {mesh_text(axes)}{meant(name, axes)}")
        if name in used:
            found.append(f"axis {name!r} is used twice: for {used[name]} and for {place}")
        used.setdefault(name, place)
    return found + (too_long(spec, ndim) if ndim is not None else [])


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


def validate(spec: P, axes: Axes, ndim: int | None, where: str, name: str = "") -> None:
    """Raise a SpecError unless `spec` fits; `name` is the value's path."""
    found = problems(spec, axes, ndim)
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
