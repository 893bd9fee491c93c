"""Whether the rule `fwd` of a `custom_vjp` returns what the function itself does, found without computing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import context, tree
from ..base.containers import opened
from ..base.errors import TransformError
from ..base.messages import report
from ..distributed.blocks import Blocks
from ..local_types import tensor_types
from .ruled_calls import Arguments

Tensor = torch.Tensor
_KEPT = 64  # of a function's kinds of arguments


class FwdCheck:
    """Compares trees, shapes and dtypes, once for each kind of arguments; of plain tensors, outside of bodies and plans.

    Where the function cannot be run on tensors without values (it reads one), nothing is said.
    """

    def __init__(self, f: Callable[..., Any], where: str) -> None:
        self._f, self._where, self._seen = f, where, set[Any]()

    def __call__(self, given: Arguments, out: Any) -> None:
        """Raise where `out` is not what the function of these arguments looks like."""
        kinds = [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else type(x) for x in given.leaves]
        kind = given.treedef, tuple(kinds)
        if kind in self._seen or context.body() is not None or torch_internals.dispatch_modes():
            return
        if any(isinstance(torch_internals.peel(x), (DTensor, Blocks)) for x in given.tensors):
            return
        self._seen.add(kind)
        if len(self._seen) > _KEPT:
            self._seen.clear()
        wanted = self._without_values(given)
        if wanted is not None and (failures := _differences(out, wanted, f"{self._where.split()[-1]}(...)")):
            self._seen.discard(kind)
            what = "fwd must return a pair, of what the function itself returns, and of residuals for bwd"
            raise TransformError(report(self._where, what, failures, "return f(*args), residuals"))

    def _without_values(self, given: Arguments) -> Any:
        looks = [(x.shape, x.dtype, x.device) for x in given.tensors]
        mode = torch_internals.fake_mode(allow_non_fake_inputs=True)
        try:
            with torch.no_grad(), torch_internals.no_transforms(), mode:
                fakes = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in looks]
                return self._f(*given.whole(fakes))
        except Exception:  # of a function that needs values; if it is wrong, its call says so
            return None


def _differences(out: Any, wanted: Any, name: str) -> list[str]:
    """What parts a result from the one that is wanted, in words."""
    if found := [*tree.partings(out, wanted, "out", name)] or [*tree.partings(wanted, out, name, "out")]:
        return found
    (mine, _), (theirs, _) = (opened(x, "custom_vjp", "out", numpy=True, modules=True) for x in (out, wanted))
    return [
        f"{path} is {tensor_types.text(x)}, but {name}{path.removeprefix('out')} is {tensor_types.text(y)}"
        for path, x, y in zip(tree.paths(out, "out"), mine, theirs, strict=True)
        if isinstance(x, Tensor) and isinstance(y, Tensor) and (x.shape, x.dtype) != (y.shape, y.dtype)
    ]
