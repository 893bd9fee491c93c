"""Equal layers: inputs and calls of a step that share a choice.

Inputs whose names differ by the number of a layer share one (``blocks[0].up``, ``blocks[1].up``), and so do the calls that come
after each of them is read, up to where the next input is. What is shared restricts the choices and prices none of them
wrongly: each move between two classes is counted as often as it is made.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from torch import fx

from .described import Described

_NUMBER = re.compile(r"(?<=[\[._/])\d+(?=[\]._/])")
_LAYERS, _LEAVES = 2, 3  # the fewest layers that share a choice, and leaves of each


def tied_names(inputs: Sequence[tuple[str, Any]]) -> list[str]:
    """The names of inputs, without the number of a layer where several have equal leaves.

    Args:
        inputs: name and type of each.

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
    """What stands for the numbers of layers with equal leaves."""
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
    """The class of each input and call, by number.

    Args:
        sites: in order.
        names: of the inputs among them.
    """
    inputs = [x for x in sites if x.is_input]
    kinds = [tuple((tuple(o.shape), o.dtype) if o is not None else None for o in x.outs) for x in sites]
    name = dict(zip((x.node for x in inputs), tied_names([*zip(names, kinds)])))
    numbers: dict[Any, int] = {}
    if len(set(name.values())) == len(name):
        return list(range(len(sites)))
    found, anchor, since = list[int](), None, Counter[Any]()
    for x, kind in zip(sites, kinds):
        if x.is_input:
            found.append(numbers.setdefault((name[x.node], kind), len(numbers)))
            continue
        own = _own(x, kind)
        read = tuple(name[node] for node, _ in x.operands if node in name)
        if read:
            anchor, since = (read, own), Counter()
        since[own] += 1
        found.append(numbers.setdefault((anchor, own, since[own]), len(numbers)))
    return found


def _own(x: Described, kind: Any) -> Any:
    """What a call computes, but for its operands: these by their shapes, as `scale * x` and `grad * scale` are not alike."""
    args = fx.map_arg((x.node.args, dict(x.node.kwargs)), lambda _: "%")
    return str(x.node.target), repr(args), kind, tuple(x.shapes)
