"""Partition specs: what they mean, as pure data. No process group, no tensor of any rank.

A spec `P` gives each tensor dim the mesh axes that split it (major first). Everything here is arithmetic over a mapping
``{"dp": 2, "tp": 4}`` from axis names to sizes, in mesh order: validation, shard shapes, index maps, and the
translation to and from the placements of torch's DTensor.

Sizes that do not divide follow `torch.chunk`: the last shards are smaller, or empty. Where several axes split one dim,
they are applied as DTensor applies placements: in mesh order, an axis that comes earlier in the mesh but later in the
spec taking its piece out of each of the segments that the axes after it will make (`_StridedShard`).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import optree
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from . import _torch, context
from .containers import checked
from .errors import SpecError, count_text, described, meant, mesh_text, report, short
from .merged import Merged, UnevenParts, merge
from .tree import dotted

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

    @_torch.not_compiled  # which would make a tuple of other entries
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
        raise SpecError(report("P", f"{word} must be a set of axis names, but it is {described(names)}",
                               fix=f'for instance P({word}={{"dp"}})'))  # fmt: skip
    return frozenset(found)


def is_spec(spec: Any, where: str, name: str = "spec") -> P:
    """`spec` if it is a `P`, else a SpecError that shows how to write it as one."""
    if not isinstance(spec, P):
        raise SpecError(report(where, f"{name} must be a vfn.P, but it is {described(spec)}", fix=as_spec(spec)))
    return spec


def as_spec(value: Any) -> str:
    """How to write as a `P` what was given in its place."""
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
    return [f"these are the numbers of {'keys' if ndim > 1 else 'one key'}, and dim {ndim - 1}, those of a single key, must "
            "stay together"]  # fmt: skip


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


def _chunk(indices: Any, n: int, i: int) -> Any:
    size = -(-len(indices) // n)
    return indices[i * size : (i + 1) * size]


def _split_factor(names: tuple[str, ...], axis: str, axes: Axes) -> int:
    """How many segments the axes that are major to `axis` in the spec, but come later in the mesh, will make."""
    order = list(axes)
    major = names[: names.index(axis)]
    return math.prod(axes[name] for name in major if order.index(name) > order.index(axis))


def dim_indices(size: int, names: tuple[str, ...], axes: Axes, coord: Mapping[str, int]) -> range | list[int]:
    """The indices of a dim of `size`, split by `names`, that the rank at `coord` holds (a range when contiguous)."""
    if isinstance(names, Merged):
        return _as_range(_merged_indices(size, names, axes, coord))
    indices: Any = range(size)
    for axis in axes:
        if axis not in names:
            continue
        segments = _split_factor(names, axis, axes)
        if segments == 1:
            indices = _chunk(indices, axes[axis], coord[axis])
        else:
            pieces = [_chunk(_chunk(indices, segments, s), axes[axis], coord[axis]) for s in range(segments)]
            indices = [i for piece in pieces for i in piece]
    return _as_range(indices)


def all_hold_some(size: int, names: tuple[str, ...], axes: Axes) -> bool:
    """Whether each rank holds an index of a dim of `size`, split by `names`."""
    if isinstance(names, Merged):
        return all(all_hold_some(part, row, axes) for part, row in names.parts)
    if size % math.prod(axes[name] for name in names) == 0:
        return size > 0
    places = itertools.product(*(range(axes[name]) for name in names))
    return all(len(dim_indices(size, names, axes, dict(zip(names, place)))) for place in places)


def _merged_indices(size: int, row: Merged, axes: Axes, coord: Mapping[str, int]) -> range | list[int]:
    if row.size != size:
        raise SpecError(report("P", f"{row!r} is the layout of a dim of {row.size}, but the dim has {size}"))
    indices: range | list[int] = range(1)
    for part, names in row.parts:
        inner = dim_indices(part, names, axes, coord)
        indices = [i * part + j for i in indices for j in inner]
    return indices


def _as_range(indices: range | list[int]) -> range | list[int]:
    """The same indices, as a range when they are contiguous."""
    if isinstance(indices, range):
        return indices
    if not indices:
        return range(0)
    contiguous = indices[-1] - indices[0] == len(indices) - 1  # they ascend and differ
    return range(indices[0], indices[-1] + 1) if contiguous else indices


def index_runs(indices: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The runs of neighbours among ascending indices: the first index, its place among them, how many."""
    if isinstance(indices, range):
        if len(indices):
            yield indices.start, 0, len(indices)
        return
    begin = 0
    for i in range(1, len(indices) + 1):
        if i == len(indices) or indices[i] != indices[i - 1] + 1:
            yield indices[begin], begin, i - begin
            begin = i


def local_indices(shape: Sequence[int], axes: Axes, spec: P, coord: Mapping[str, int]) -> tuple[range | list[int], ...]:
    """For each dim, the global indices that the rank at `coord` holds."""
    return tuple(
        dim_indices(size, names, axes, coord) for size, names in zip(shape, split_axes(spec, len(shape)), strict=True)
    )


def local_shape(shape: Sequence[int], axes: Axes, spec: P, coord: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of the block that the rank at `coord` holds."""
    return tuple(
        math.prod(len(dim_indices(part, row, axes, coord)) for part, row in names.parts)
        if isinstance(names, Merged)
        else len(dim_indices(size, names, axes, coord))
        for size, names in zip(shape, split_axes(spec, len(shape)), strict=True)
    )


def shard_shape(shape: Sequence[int], mesh: Any, spec: P) -> tuple[int, ...]:
    """The shape of one rank's block of an array of `shape`: of the first rank's, the largest, where sizes do not divide.

    Args:
        shape: the shape of the whole array.
        mesh: a DeviceMesh, or a mapping from axis names to sizes: no ranks are needed.
        spec: how the array lies.

    Raises:
        SpecError: the spec does not fit the mesh or the shape.

    Source: `jax.sharding.NamedSharding.shard_shape`.

    >>> import vescale_fn as vfn
    >>> vfn.shard_shape((8, 6), {"dp": 2, "tp": 3}, vfn.P("dp", "tp"))
    (4, 2)
    >>> vfn.shard_shape((5, 6), {"dp": 4}, vfn.P("dp"))
    (2, 6)
    """
    given: Any = shape
    if not isinstance(given, Sequence) or not all(isinstance(size, int) for size in cast("Sequence[Any]", given)):
        raise SpecError(report("shard_shape", f"shape must be a tuple of ints, but it is {described(given)}",
                               fix='for instance vfn.shard_shape((8, 6), mesh, P("dp")), or of a tensor x.shape'))  # fmt: skip
    if any(size < 0 for size in shape):
        raise SpecError(report("shard_shape", f"a size must not be negative, but shape is {described(given)}"))
    if not isinstance(mesh, Mapping):
        context.checked_mesh(mesh, "shard_shape")
    axes: dict[str, int] = dict(mesh) if isinstance(mesh, Mapping) else axes_of(mesh)  # type: ignore[arg-type]
    validate(is_spec(spec, "shard_shape"), axes, len(shape), "shard_shape")
    return local_shape(shape, axes, spec, dict.fromkeys(axes, 0))


def is_even(shape: Sequence[int], axes: Axes, spec: P) -> bool:
    """Whether every rank's block of `shape` has the same size."""
    rows = split_axes(spec, len(shape))
    return all(names.is_even(axes) if isinstance(names, Merged) else size % math.prod(axes[a] for a in names) == 0
               for size, names in zip(shape, rows))  # fmt: skip


def axes_of(mesh: Any) -> dict[str, int]:
    """The axes of a DeviceMesh, in mesh order, with their sizes."""
    return _axes_of(mesh)


@functools.lru_cache(maxsize=256)
def _axes_of(mesh: Any) -> dict[str, int]:
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    return dict(zip(names, mesh.shape, strict=True))


def to_placements(spec: P, axes: Axes, ndim: int) -> tuple[Placement, ...]:
    """The DTensor placements of `spec`: one for each mesh axis."""
    where = {axis: (dim, names) for dim, names in enumerate(split_axes(spec, ndim)) for axis in names}
    placements: list[Placement] = []
    for axis in axes:
        if axis in where:
            dim, names = where[axis]
            if isinstance(names, Merged) and not names.is_even(axes):
                placements.append(UnevenParts(dim, names.parts))
                continue
            factor = (
                _merged_factor(names, axis, axes) if isinstance(names, Merged) else _split_factor(names, axis, axes)
            )
            placements.append(Shard(dim) if factor == 1 else _torch.strided_shard(dim, factor))
        else:
            placements.append(Partial("sum") if axis in spec.unreduced else Replicate())
    return tuple(placements)


def _merged_factor(row: Merged, axis: str, axes: Axes) -> int:
    """The same for an axis of a merged dim: the entries of the parts before its own are segments, too."""
    order, outer = list(axes), 1
    for size, names in row.parts:
        if axis in names:
            return outer * _split_factor(names, axis, axes)
        outer *= size // math.prod(axes[name] for name in names if order.index(name) < order.index(axis))
    raise AssertionError(axis)


def from_placements(placements: Sequence[Any], axes: Axes, ndim: int, shape: Sequence[int] | None = None) -> P:
    """The spec of DTensor placements: the inverse of `to_placements`. Merged dims need the shape.

    Raises:
        SpecError: placements that no spec can say (a partial maximum, a strided shard of no order of axes).
    """
    rows: list[Any] = [[] for _ in range(ndim)]
    unreduced: set[str] = set()
    merged: set[int] = set()
    # later axes first: they are the segments
    pairs: list[tuple[str, Any]] = list(zip(axes, placements, strict=True))
    for axis, placement in reversed(pairs):
        if placement.is_partial():
            if placement.reduce_op not in ("sum", "avg"):
                raise SpecError(f"a partial {placement.reduce_op!r} over {axis!r} has no spec; only partial sums have")
            unreduced.add(axis)
        elif type(placement) is UnevenParts:
            rows[placement.dim] = Merged(placement.parts)
        elif not placement.is_replicate():
            dim: int = placement.dim % ndim
            row: list[str] = rows[dim]
            at = 0
            factor: int = getattr(placement, "split_factor", 1)
            while factor > 1 and at < len(row) and factor % axes[row[at]] == 0:
                factor //= axes[row[at]]
                at += 1
            if factor != 1 and shape is not None:
                merged.add(dim)
            elif factor != 1:
                raise SpecError(f"{placement} over {axis!r} is not the layout of any order of the {mesh_text(axes)}")
            row.insert(at, axis)
    for dim in merged:
        rows[dim] = _merged_row(dim, (shape or ())[dim], placements, axes)
    return from_split_axes(rows, unreduced)


def _merged_row(dim: int, size: int, placements: Sequence[Any], axes: Axes) -> tuple[str, ...]:
    """How a dim lies that strided shards split: each axis cuts segments, and lies within those of the axes before it."""
    cuts: list[tuple[int, str]] = []  # (how many segments of the whole dim an axis cuts, axis), outermost first
    for axis, placement in zip(axes, placements, strict=True):
        if placement.is_partial() or placement.is_replicate() or placement.dim != dim:
            continue
        factor: int = getattr(placement, "split_factor", 1)
        for at in range(len(cuts) + 1):
            segments = factor * math.prod(axes[name] for _, name in cuts[:at])
            if all(n * axes[a] <= segments for n, a in cuts[:at]) and all(
                n >= segments * axes[axis] for n, _ in cuts[at:]
            ):
                cuts.insert(at, (segments, axis))
                break
    ends = [n for n, _ in cuts] + [size]
    if any(after % (before * axes[axis]) for (before, axis), after in zip(cuts, ends[1:], strict=True)) or not cuts:
        raise SpecError(f"{placements[0]} and those after it split a dim of {size} as no reshape of split dims does")
    parts = [(cuts[0][0], ())] + [(after // n, (axis,)) for (n, axis), after in zip(cuts, ends[1:], strict=True)]
    return merge(parts, axes)


def spec_from_rules(tree: Any, rules: Sequence[tuple[str, P]]) -> Any:
    """A tree of specs for `tree`: for each leaf, the spec of the first pattern found in its path.

    Args:
        tree: any tree; a leaf's path is written with dots, like ``blocks.0.attn.wq``.
        rules: (regular expression, spec) pairs, tried in order with `re.search`.

    Raises:
        SpecError: a leaf that no rule matches, a rule that matches no leaf, or a spec with more entries than its leaf
            has dims; all of them at once.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> params = {"w": torch.zeros(4, 2), "b": torch.zeros(2)}
    >>> vfn.spec_from_rules(params, [(r"w$", P("tp", None)), (r"b$", P())])
    {'w': P('tp', None), 'b': P()}
    """
    _check_rules(rules)
    checked(tree, "spec_from_rules", "tree", numpy=True)
    accessors, leaves, treedef = optree.tree_flatten_with_accessor(tree)
    found: list[P] = []
    failures: list[str] = []
    hits: set[int] = set()
    for accessor, leaf in zip(accessors, leaves, strict=True):
        path, code = dotted(accessor), accessor.codify("tree")
        matching = [i for i, (pattern, _) in enumerate(rules) if re.search(pattern, path)]
        hits.update(matching)
        if not matching:
            failures.append(f"no rule matches {path!r} ({code})")
            continue
        spec = rules[matching[0]][1]
        ndim = getattr(leaf, "ndim", None)
        if ndim is not None and len(spec) > ndim:
            failures.append(
                f"rule {rules[matching[0]]!r} gives {count_text(len(spec), 'entry')} to {path!r}, which has "
                f"{count_text(ndim, 'dim')}"
            )
        found.append(spec)
    failures += [f"rule {rule!r} matches no leaf" for i, rule in enumerate(rules) if i not in hits]
    if failures:
        raise SpecError(report("spec_from_rules", "the rules and the tree do not fit", failures,
                               'add a rule, for instance (r".*", P()) at the end, or take the unused one away'))  # fmt: skip
    return optree.tree_unflatten(treedef, found)


def are_rules(spec: Any) -> bool:
    """Whether a list of (regular expression, spec) pairs stands where specs are asked for; a `P` is a tuple, too."""
    found = cast("list[Any]", spec) if isinstance(spec, list) else []
    pairs = [cast("tuple[Any, ...]", x) for x in found if isinstance(x, tuple) and not isinstance(x, P)]
    return any(len(pair) > 0 and isinstance(pair[0], str) for pair in pairs)


def _check_rules(rules: Any) -> None:
    """Rules are (regular expression, spec) pairs."""
    if isinstance(rules, (str, Mapping)) or not isinstance(rules, Iterable):
        raise SpecError(report("spec_from_rules", f"rules must be a list of pairs, but it is {described(rules)}",
                               fix='spec_from_rules(tree, [(r"w$", P("tp")), (r".*", P())])'))  # fmt: skip
    failures: list[str] = []
    for i, rule in enumerate(cast("Iterable[Any]", rules)):
        pair = cast("tuple[Any, ...]", rule) if isinstance(rule, tuple) else ()
        if len(pair) != 2:
            failures.append(f"rules[{i}] is {described(rule)}, not a (pattern, spec) pair")
            continue
        pattern, spec = pair
        if not isinstance(spec, P):
            failures.append(f"rules[{i}]: the spec of {pattern!r} is {described(spec)}, not a vfn.P")
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            failures.append(f"rules[{i}]: {described(pattern)} is not a regular expression ({error})")
    if failures:
        raise SpecError(report("spec_from_rules", "the rules are not (regular expression, spec) pairs", failures,
                               '[(r"w$", P("tp")), (r".*", P())]'))  # fmt: skip
