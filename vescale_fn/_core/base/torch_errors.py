"""torch's error messages, in terms of the function of ours that was called."""

from __future__ import annotations

import re
from typing import NamedTuple

from .errors import InPlaceError, TransformError, VfnError
from .messages import report


class _Meaning(NamedTuple):
    """Words of torch's, a regular expression; and the error that says them in terms of `where`, a transform. What a
    group of the expression finds is the op that made the value."""

    words: str
    error: type[VfnError]
    where: str
    what: str
    fix: str


_MEANINGS = (
    _Meaning(
        "leaf Variable that requires grad is being used in an in-place operation",
        InPlaceError,
        "grad",
        "the function writes into what it is differentiated by, whose value before is needed",
        "x = x.clone() first, or the function without the underscore",
    ),
    _Meaning(
        r"modified by an inplace operation.*which is output \d+ of (?:\w+::)?(\w+?)(?:Backward\d*)?,",
        InPlaceError,
        "grad",
        "an in-place op changed a value which the gradient needs as it was",
        "the function without the underscore, or a clone() first",
    ),
    _Meaning(
        "vmap: It looks like you're attempting to use a Tensor in some data-dependent control flow",
        TransformError,
        "vmap",
        "this asks for the truth of a value that differs between entries, so they could go different ways",
        "torch.where(condition, a, b)",
    ),
    _Meaning(
        r"vmap: It looks like you're calling \.item\(\) on a Tensor",
        TransformError,
        "vmap",
        "this reads a number out of a value that differs between entries",
        "the 0-d tensor as it is: arithmetic takes it, x.index_select(0, i[None]) and torch.where as well",
    ),
    _Meaning(
        "vmap: called random operation while in randomness error mode",
        TransformError,
        "vmap",
        "this draws from torch's generator: the same numbers for all entries, or others for each?",
        "keys = vfn.random.split(key, n), mapped over as well, and vfn.random's draws from each of them",
    ),
    _Meaning(
        r"vmap: inplace arithmetic\(self, \*extra_args\) is not possible",
        InPlaceError,
        "vmap",
        "this writes what differs between entries into a value that is the same for all of them",
        "the function without the underscore, which makes a new value",
    ),
)


def explained(error: RuntimeError) -> VfnError | None:
    """An error of torch's in our words, with its traceback; None where it speaks for itself."""
    if isinstance(error, VfnError) or error.__traceback__ is None:
        return None
    for meaning in _MEANINGS:
        if found := re.search(meaning.words, str(error)):
            shown = [f"it is what {found[1].lower()} gave"] if found.groups() else []
            said = meaning.error(report(meaning.where, meaning.what, shown, meaning.fix))
            return said.with_traceback(error.__traceback__.tb_next)
    return None
