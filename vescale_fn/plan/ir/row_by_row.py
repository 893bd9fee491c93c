"""An operator that torch has for one tensor, on lists of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import fx

from .graph import Step


def goes_through(node: fx.Node) -> bool:
    """Whether a call is one for each row of lists."""
    return isinstance(node.target, Step) and getattr(node.target.run, "func", None) is through


def through(*given: Any, op: Any, at: Sequence[int], names: Sequence[str], kwargs: Any) -> list[Any]:
    """What an operator gives for each row of lists.

    Args:
        given: its arguments, those with `names` last.
        at: the places of the lists among them.
        kwargs: the rest, by pairs.
    """
    columns = [x if i in at else itertools.repeat(x) for i, x in enumerate(given)]
    count = len(given) - len(names)
    return [op(*row[:count], **dict(zip(names, row[count:])), **dict(kwargs)) for row in zip(*columns)]
