"""Classes: the inputs and calls of equal layers, which share a choice.

Inputs whose names differ only by the number of a layer share one (``blocks[0].up``, ``blocks[1].up``). Equal calls with one
operand, such as casts of parameters, share one where their operands do. Other equal calls share one where they come equally
late after the last read of such an input, or of a value made from it alone. Sharing restricts the choices, but prices none of
them wrongly: each move between two classes is counted as often as it is made.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from torch import fx

from .described import Described

_NUMBER = re.compile(r"(?<=[\[._/])\d+(?=[\]._/])")
_LAYERS, _LEAVES = 2, 3  # the fewest layers that share a choice, and the fewest leaves of each


def tied_names(inputs: Sequence[tuple[str, Any]]) -> list[str]:
    """The names of inputs, with a wildcard for the number of a layer where several layers have equal leaves.

    Args:
        inputs: the name and the type of each.

    >>> tied_names([(f"blocks[{i}].{name}", 0) for i in range(3) for name in ("q", "k", "v")])[:4]
    ['blocks[*].q', 'blocks[*].k', 'blocks[*].v', 'blocks[*].q']
    """
    layers: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for name, kind in inputs:
        for number in _NUMBER.finditer(name):
            layers[name[: number.start()]][number[0]][name[number.end() :]] = kind
    words = {before: _words(of) for before, of in layers.items()}
    found = []
    for name, _ in inputs:
        new = name
        for number in _NUMBER.finditer(name):
            if (word := words[name[: number.start()]].get(number[0])) is not None:
                new = name[: number.start()] + word + name[number.end() :]
                break
        found.append(new)
    return found


def _words(of: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The wildcards for the numbers of layers that have equal leaves."""
    alike: dict[Any, list[str]] = defaultdict(list)
    for number, leaves in of.items():
        alike[frozenset(leaves.items())].append(number)
    found: dict[str, str] = {}
    for leaves, numbers in alike.items():
        if len(leaves) >= _LEAVES and len(numbers) >= _LAYERS:
            word = "*" if len(alike) == 1 else f"*{min(map(int, numbers))}"
            found.update(dict.fromkeys(numbers, word))
    return found


def classes(sites: Sequence[Described], names: Sequence[str]) -> list[int]:
    """The number of the class of each input and call.

    Args:
        sites: the inputs and calls, in order.
        names: the names of the inputs among them.
    """
    inputs = [x for x in sites if x.is_input]
    kinds = [tuple((tuple(o.shape), o.dtype) if o is not None else None for o in x.outs) for x in sites]
    tied = tied_names([*zip(names, kinds)])
    if len(set(tied)) == len(tied):
        return list(range(len(sites)))
    numbers, found = dict[Any, int](), dict[Any, int]()  # by key; by node
    named = {x.node for x in inputs if any(o is not None and o.numel() > 1 for o in x.outs)}
    since, made = Counter[Any](), Counter[Any]()
    names_ = iter(tied)
    anchor: Any = None
    for x, kind in zip(sites, kinds):
        own = None if x.is_input else _own(x, kind)
        if x.is_input:
            key = next(names_), kind
        elif len(x.operands) == 1:
            ((node, part),) = x.operands
            made[node, part, own] += 1
            key = found[node], part, own, made[node, part, own]
            if node in named:
                named.add(x.node)
        else:
            if read := tuple(found[node] for node, _ in x.operands if node in named):
                anchor, since = (read, own), Counter()
            since[own] += 1
            key = anchor, own, since[own]
        found[x.node] = numbers.setdefault(key, len(numbers))
    return [found[x.node] for x in sites]


def _own(x: Described, kind: Any) -> Any:
    """What a call computes, with its operands known by shape alone: `scale * x` and `grad * scale` are not alike."""
    args = fx.map_arg((x.node.args, dict(x.node.kwargs)), lambda _: "%")
    return str(x.node.target), repr(args), kind, tuple(x.shapes)
