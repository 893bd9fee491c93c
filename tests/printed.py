"""Comparing what is printed with what is stored, where a processor, a BLAS or a release of torch decides the last digits."""

import math
import re

NUMBER = re.compile(r"(?<![\w.])-?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf|nan)(?![\w])")


def alike(shown: str, stored: str) -> bool:
    """Whether two texts are equal but for white space, and for the rounding of numbers that are no integers."""
    texts = [" ".join(NUMBER.sub("#", text).split()) for text in (shown, stored)]
    numbers = [NUMBER.findall(text) for text in (shown, stored)]
    return texts[0] == texts[1] and all(map(_close, *numbers))


def _close(a: str, b: str) -> bool:
    if a == b:
        return True
    integers = all(re.fullmatch(r"-?\d+", x) for x in (a, b))
    return not integers and math.isclose(float(a), float(b), rel_tol=1e-3, abs_tol=1e-4)
