"""Types of local values: for each manual axis, how one rank's value relates to the other ranks', and how ops combine
them.

Over a mesh axis a value is

- ``I`` invariant: the same on every rank; its cotangent is the same on every rank, and complete;
- ``V`` varying: each rank's own; so is its cotangent;
- ``U`` unreduced: the ranks' values are still to be added; its cotangent is reduced;
- ``R`` reduced: the same on every rank, and its cotangent is unreduced.

Where an invariant value meets a varying one it is promoted, by a cast whose transpose is the sum over the axis: the sum
that a user would otherwise have to write by hand, or forget. This file is the rules; `tensor_types.py` keeps types on tensors,
and the modes of `untyped_mode.py` and `typed_mode.py` apply them while a body runs.

Source: JAX's varying manual axes (`jax.typeof(x).vma`) and sharding in types; all four states also in Meta's
    spmd_types.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from ..sharding.spec import P, split_axes
from .function_kinds import LINEARITY


class Type:
    """The axes over which a value varies, is unreduced, is reduced; over all others it is invariant. Made by `of`."""

    __slots__ = ("plain", "reduced", "unreduced", "varying")

    def __init__(self, varying: frozenset[str], unreduced: frozenset[str], reduced: frozenset[str]) -> None:
        self.varying, self.unreduced, self.reduced = varying, unreduced, reduced
        self.plain = not unreduced and not reduced

    def letter(self, axis: str) -> str:
        """I, V, U or R."""
        return "V" if axis in self.varying else "U" if axis in self.unreduced else "R" if axis in self.reduced else "I"

    def __repr__(self) -> str:
        parts = [
            f"{letter}:{','.join(sorted(names))}"
            for letter, names in (("V", self.varying), ("U", self.unreduced), ("R", self.reduced))
            if names
        ]
        return f"{{{' '.join(parts)}}}" if parts else ""


@functools.lru_cache(maxsize=4096)
def _interned(varying: frozenset[str], unreduced: frozenset[str], reduced: frozenset[str]) -> Type:
    return Type(varying, unreduced, reduced)


def of(varying: Iterable[str] = (), unreduced: Iterable[str] = (), reduced: Iterable[str] = ()) -> Type:
    """The type with these axes; equal types are one object."""
    return _interned(frozenset(varying), frozenset(unreduced), frozenset(reduced))


INVARIANT = of()
WORDS = {
    "varying": "V",
    "invarying": "I",
    "unreduced": "U",
    "reduced": "R",
}  # as users name what a value is over an axis


@functools.lru_cache(maxsize=4096)
def with_letter(type_: Type, axes: tuple[str, ...], letter: str) -> Type:
    """`type_`, but with `letter` over `axes`."""
    kept = [names.difference(axes) for names in (type_.varying, type_.unreduced, type_.reduced)]
    return of(*(names.union(axes) if letter == word else names for word, names in zip("VUR", kept)))


@functools.lru_cache(maxsize=4096)
def dual(type_: Type) -> Type:
    """The type of a cotangent: unreduced and reduced change places."""
    return of(type_.varying, type_.reduced, type_.unreduced)


@functools.lru_cache(maxsize=4096)
def both(inner: Type, outer: Type | None) -> Type:
    """The type of what is `inner` over some axes, and `outer` over others."""
    if outer is None:
        return inner
    return of(inner.varying | outer.varying, inner.unreduced | outer.unreduced, inner.reduced | outer.reduced)


@functools.lru_cache(maxsize=4096)
def over(type_: Type, axes: tuple[str, ...]) -> Type:
    """What a type says of these axes."""
    return of(*(names.intersection(axes) for names in (type_.varying, type_.unreduced, type_.reduced)))


@functools.lru_cache(maxsize=4096)
def differing(type_: Type, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the axes over which a value is not invariant."""
    return tuple(axis for axis in axes if type_.letter(axis) != "I")


@functools.lru_cache(maxsize=4096)
def of_spec(spec: P) -> Type:
    """The type of the local value of an array that lies as `spec`."""
    return of((axis for row in split_axes(spec, len(spec)) for axis in row), spec.unreduced, spec.reduced)


class Misuse(Exception):
    """Types that do not go together over `axis`, and why; `typed_mode.py` adds which function and which values."""

    def __init__(self, axis: str, why: str, instead: str) -> None:
        super().__init__(why)
        self.axis, self.why, self.instead = axis, why, instead


@functools.lru_cache(maxsize=8192)
def combine(function: str, types: tuple[Type, ...], numbers: bool) -> tuple[Type, Type]:
    """The type that the operands of a function are brought to where they are invariant or reduced, and its result's
    type.

    Args:
        types: of the tensor operands, in order.
        numbers: whether a number is an operand as well.
    """
    varying: frozenset[str] = frozenset().union(*(t.varying for t in types))
    if all(t.plain for t in types):
        return of(varying), of(varying)
    result: dict[str, list[str]] = {"V": [], "U": [], "R": [], "I": []}
    marked = frozenset().union(*(t.unreduced | t.reduced for t in types))
    for axis in sorted(marked | varying):
        letters = [t.letter(axis) for t in types]
        result[_over_one_axis(function, axis, letters, numbers)].append(axis)
    return of(varying), of(result["V"], result["U"], result["R"])


@functools.lru_cache(maxsize=8192)
def union(types: tuple[Type, ...]) -> Type | None:
    """The type of what is made of plain values, by any function; None where one is not plain."""
    return combine("", types, False)[1] if all(t.plain for t in types) else None


def _over_one_axis(function: str, axis: str, letters: list[str], numbers: bool) -> str:
    if "U" in letters:
        how, others = LINEARITY.get(function), [letter for letter in letters if letter != "U"]
        sum_first = f"vfn.psum(x, {axis!r}) first, or vfn.psum_scatter"
        if how is None:
            raise Misuse(axis, f"{function} is not linear, so the sum over {axis!r} must come before it", sum_first)
        if how == "linear" and (letters[0] != "U" or ("U" in letters[1:] and not function.endswith("_as"))):
            raise Misuse(axis, f"{function} is not linear in its other operands, such as an index", sum_first)
        if "V" in others:
            raise Misuse(axis, "a value still to be added over the ranks meets one that differs by rank", sum_first)
        if how == "sum of" and numbers:
            raise Misuse(
                axis, f"the number would be added once a rank of {axis!r}", f"{sum_first}, then add the number"
            )
        if how in ("sum of", "row of") and others:
            raise Misuse(
                axis, f"the invariant value would be added once a rank of {axis!r}", f"{sum_first}, then {function}"
            )
        if how == "product of" and (letters.count("U") > 1 or len(letters) > 2):
            raise Misuse(
                axis, f"{function} is not linear in two unreduced values together, nor with a third", sum_first
            )
        if how == "quotient of" and letters[0] != "U":
            raise Misuse(axis, "dividing by an unreduced value is not linear", sum_first)
        if how in ("product of", "quotient of") and others not in ([], ["R"]):
            raise Misuse(
                axis,
                "an unreduced value may only be scaled by a reduced one, whose gradient is unreduced too",
                f"vfn.pcast(w, {axis!r}, to='reduced') for the other operand",
            )
        return "U"
    if "V" in letters:
        return "V"
    if "R" in letters and "I" in letters:
        raise Misuse(
            axis,
            "a reduced value meets an invariant one: their cotangents differ",
            f"vfn.pcast(x, {axis!r}, to='reduced') for the invariant one",
        )
    return "R" if "R" in letters else "I"


@functools.lru_cache(maxsize=4096)
def promotion(have: Type, varying: Type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes over which a value must be cast from invariant, and from reduced, to varying."""
    return tuple(sorted(varying.varying - have.varying - have.unreduced - have.reduced)), tuple(
        sorted(varying.varying & have.reduced)
    )


@functools.lru_cache(maxsize=4096)
def promoted(have: Type, want: Type) -> Type:
    """The type of a value that was `have` once it varies where `want` does."""
    return with_letter(have, tuple(sorted(want.varying)), "V")
