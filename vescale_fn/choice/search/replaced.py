"""Which results of a step replace which arguments, as new parameters do the old ones: these are laid out as those are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

Kind = tuple[torch.Size, torch.dtype] | None  # of a leaf; None of one that is no tensor


def replaced(recording: Any) -> dict[int, int]:
    """Of results, by number, the inputs that they replace.

    A part of the result replaces the first argument that is the same tree of equal shapes and dtypes and that nothing else
    replaces, else the first part of one: the result as a whole, else its entries, and so on down to its leaves.
    """
    inputs = {place: n for n, place in enumerate(recording.leaves) if place is not None}
    placeholders = recording.placeholders
    given = [_kind(placeholders[inputs[i]]) if i in inputs else None for i in range(len(recording.call.leaves))]
    made = [_kind(node) for node in recording.results]
    there = defaultdict[Any, list[int]](list)
    parts = [(recording.call.treedef, 0)]
    while parts:  # whole arguments first, then their entries
        for part, start in parts:
            there[part, *given[start : start + part.num_leaves]].append(start)
        parts = [child for part in parts for child in _children(*part)]
    found, taken = dict[int, int](), set[int]()
    todo = [(recording.recorded.out_def, 0)]
    while todo:
        part, start = todo.pop()
        count, kinds = part.num_leaves, made[start : start + part.num_leaves]
        places = there.get((part, *kinds), ()) if any(kinds) else ()
        free = next((place for place in places if not taken.intersection(range(place, place + count))), None)
        if free is None:
            todo += [*_children(part, start)][::-1]
        else:
            taken.update(range(free, free + count))
            pairs = zip(range(start, start + count), range(free, free + count), kinds)
            found.update((r, inputs[place]) for r, place, kind in pairs if _is_laid_out(kind))
    return found


def _is_laid_out(kind: Kind) -> bool:
    return kind is not None and len(kind[0]) > 0 and kind[1].is_floating_point


def _kind(node: fx.Node | None) -> Kind:
    x = None if node is None else node.meta.get("val")
    return (x.shape, x.dtype) if isinstance(x, torch.Tensor) else None


def _children(tree: Any, start: int) -> Sequence[tuple[Any, int]]:
    found = list[tuple[Any, int]]()
    for child in tree.children():
        found.append((child, start))
        start += child.num_leaves
    return found
