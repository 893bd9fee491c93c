"""How much of a product, or of a sample, a run takes: a part that covers it, or all of it with ``VESCALE_FN_TESTS=whole``."""

import os
from collections.abc import Iterable
from typing import Any

WHOLE = os.environ.get("VESCALE_FN_TESTS") == "whole"


def part(rows: Iterable[Any], of: int, first: int = 0) -> list[Any]:
    """One row of each `of`, from the `first` on."""
    return list(rows) if WHOLE else list(rows)[first::of]


def some(few: int, many: int) -> int:
    """How many samples."""
    return many if WHOLE else few
