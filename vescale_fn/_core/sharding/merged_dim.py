"""A dim made by merging several dims, each with a sharding of its own: ``[B@dp, H@tp]`` seen as ``[B * H]``.

Such a dim's piece on a rank is no contiguous run, so no list of axes says how it lies. It is kept as the list of its parts:
``((B, ("dp",)), (H, ("tp",)))``. A part may be split unevenly: ``[5@dp, 3]`` seen as ``[15]`` is cut between its rows alone.
In the smallest form of a list of parts no two neighbours could be one part; where that is a single part, the dim is an
ordinary one. A part of size 1 that is itself split, so that one rank has something, comes first: its place does not matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from .. import torch_internals
from ..base.saved_names import saved_as

Names = tuple[str, ...]
Part = tuple[int, Names]


@saved_as("vescale_fn.merged")
class Merged(tuple[str, ...]):
    """The axes that split a merged dim, as for any dim; and ``parts``, which say how."""

    parts: tuple[Part, ...]

    def __new__(cls, parts: Sequence[Part]) -> Merged:
        self = super().__new__(cls, itertools.chain.from_iterable(names for _, names in parts))
        self.parts = tuple((size, tuple(names)) for size, names in parts)
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Merged) and self.parts == other.parts

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.parts)

    def __reduce__(self) -> object:
        return Merged, (self.parts,)

    def __repr__(self) -> str:
        entries = [(size, names[0] if len(names) == 1 else names or None) for size, names in self.parts]
        return f"P.merged({', '.join(map(repr, entries))})"

    @property
    def size(self) -> int:
        """The size of the dim."""
        return math.prod(size for size, _ in self.parts)

    def is_even(self, axes: Mapping[str, int]) -> bool:
        """Whether every part is split evenly."""
        return all(size % _ways(names, axes) == 0 for size, names in self.parts)


class UnevenParts(torch_internals.strided_shard_type):
    """The placement of the axes of a merged dim some part of which is split unevenly, which no factor of torch's says."""

    parts: tuple[Part, ...]

    def __new__(cls, dim: int, parts: tuple[Part, ...]) -> UnevenParts:
        return super().__new__(cls, dim, split_factor=math.prod(size for size, _ in parts))

    def __init__(self, dim: int, parts: tuple[Part, ...]) -> None:
        super().__init__(dim, split_factor=math.prod(size for size, _ in parts))
        self.parts = parts

    def __eq__(self, other: object) -> bool:
        return type(other) is UnevenParts and (self.dim, self.parts) == (other.dim, other.parts)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.dim, self.parts))

    def __reduce__(self) -> object:
        return UnevenParts, (self.dim, self.parts)

    def __repr__(self) -> str:
        return f"UnevenParts(dim={self.dim}, parts={self.parts})"


def merge(parts: Sequence[Part], axes: Mapping[str, int]) -> Names:
    """How a dim lies that has these parts: as a plain row of axes, where that says it."""
    found: list[Part] = []
    alone: list[str] = []  # what splits dims of size 1: who is not the first along these axes has nothing
    for size, names in parts:
        if size == 1:
            alone += (name for name in names if axes[name] > 1)
            continue
        if found:
            before, held = found[-1]
            ways, both = _ways(held, axes), held + names
            exact = size % _ways(names, axes) == 0 or sorted(both, key=list(axes).index) == list(both)
            # split to single entries, or not split further
            if (before == ways and exact) or (not names and before % ways == 0):
                found[-1] = (before * size, both)
                continue
        found.append((size, names))
    if alone:
        found.insert(0, (1, tuple(alone)))
    if not found:
        return ()
    if len(found) == 1:
        return found[0][1]
    return Merged([(size, tuple(name for name in names if axes[name] > 1)) for size, names in found])


def _ways(names: Names, axes: Mapping[str, int]) -> int:
    return math.prod(axes[name] for name in names)


def parts_of(row: Names, size: int) -> tuple[Part, ...]:
    """The parts of a dim of `size` that lies as `row`."""
    return row.parts if isinstance(row, Merged) else ((size, row),)


def taken_apart(row: Names, size: int, sizes: Sequence[int], axes: Mapping[str, int]) -> tuple[list[Names], bool]:
    """How each of the dims of `sizes` lies, which a dim of `size` that lies as `row` is seen as; and whether that is all
    of `row`: axes that no such dim can have are left out."""
    if len(sizes) == 1 and not isinstance(row, Merged):
        return [row], True
    out: list[Names] = []
    left, all_said = list(sizes), True
    for part, names in parts_of(row, size):
        pieces: list[int] = []
        while left and math.prod(pieces) * left[0] <= part and (math.prod(pieces) < part or left[0] == 1):
            pieces.append(left.pop(0))
        if math.prod(pieces) != part:  # the part ends within one of the dims
            out += [()] * (len(sizes) - len(out))
            return out, False
        if part in pieces:  # the part as it is, however it is split
            out += [names if at == pieces.index(part) else () for at in range(len(pieces))]
            continue
        todo = names
        for piece in pieces:
            n = 0
            while n < len(todo) and piece % _ways(todo[: n + 1], axes) == 0:
                n += 1
            out.append(todo[:n])
            whole_piece = piece == _ways(todo[:n], axes)
            todo = todo[n:]
            if todo and not whole_piece:
                all_said, todo = False, ()
        all_said = all_said and not todo
    return out + [()] * len(left), all_said


def common(*sizes: Sequence[int]) -> tuple[int, ...] | None:
    """The sizes into which several lists of sizes, of one product, can all be cut; None where they do not nest."""
    ends = sorted({end for row in sizes for end in itertools.accumulate(row, lambda a, b: a * b)} - {1})
    if any(after % before for before, after in itertools.pairwise(ends)):
        return None
    return tuple(after // before for before, after in itertools.pairwise([1, *ends]))
