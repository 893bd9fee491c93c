"""What is known of an array besides its value and its layout: one object, where there is anything to note."""

from __future__ import annotations

from typing import Any


class ArrayNotes:
    """What is known of an array. Nobody changes the attributes of the class, which are those of an array without notes."""

    # the axes over which its cotangent is a partial sum, as its spec says
    reduced: frozenset[str] = frozenset()
    # of a partial value: what it adds up to, once that is known; its aliases share the list
    sums: list[Any] | None = None
    # of a view of all of a partial value: that, its layout then, and the op
    seen: tuple[Any, ...] | None = None
    # the sum over a dim: the version of which it is, the dim, the sum
    total: tuple[Any, ...] = (None, None, None)
    # of a cast to a narrower dtype: the version that it is of, and its source
    narrowed: tuple[Any, Any] = (None, None)
    # the array that it is a view of
    root: Any = None
    # of a view with elements that were elsewhere: how they come (`MovedView`), or True: they were copied
    moved: Any = None
    # weak references to what was copied out of it, and misses what is written into it
    copies: list[Any] | tuple[()] = ()
    # weak references to the arrays of whose memory it would be a part on one device
    beside: tuple[Any, ...] = ()
    # of a new array that nobody has laid out: weak references to its views, what they cut
    views: list[Any] | None = None
    # of such a view: its source, the op, its other arguments, which dims it shows
    part: tuple[Any, ...] | None = None


NONE = ArrayNotes()


def notes_of(x: Any) -> ArrayNotes:
    """What is known of an array, or of any tensor: to read."""
    return getattr(x, "vfn_notes", None) or NONE


def noted(x: Any) -> ArrayNotes:
    """What is known of an array: to write."""
    notes = getattr(x, "vfn_notes", None)
    if notes is None:
        notes = x.vfn_notes = ArrayNotes()
    return notes


def root_of(x: Any) -> Any:
    """The array that `x` is a view of, or itself."""
    root = notes_of(x).root
    return x if root is None else root


def note_root(x: Any, root: Any) -> None:
    """Note of a new array that it is a view of another one."""
    x.vfn_notes = notes = ArrayNotes()
    notes.root = root
