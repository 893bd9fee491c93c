"""An operator that torch has for one tensor, on lists of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


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
