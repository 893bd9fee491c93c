"""`cut`: a place where a pipeline may cut a program into stages."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..arrays.array import made, spec_of
from ..base import context, linear_map, source_lines, state, tree
from ..base.containers import opened
from ..base.errors import TransformError
from ..base.messages import report, short
from ..distributed import blocks

T = TypeVar("T")


class CutPlace(NamedTuple):
    """A call of `cut`, as a pipeline has recorded it: its name, and the user's line."""

    name: str | None
    line: str


def cut(x: T, name: str | None = None) -> T:
    """`x`, at a place where `vfn.pipeline` may cut the program: what comes before is one stage, what follows from `x` the next.

    Outside of a pipeline, and at a cut that a pipeline does not use, it is `x` itself and costs nothing.

    Args:
        x: a tree: what a layer gives.
        name: of the place, for ``vfn.pipeline(..., cuts=[name, ...])``.

    Raises:
        TransformError: while a pipeline records, in a `shard_map` body, in a branch of `vfn.cond`, or in what `vfn.remat`
            computes again.

    >>> import torch, vescale_fn as vfn
    >>> x = torch.ones(2)
    >>> vfn.cut(x) is x
    True
    """
    if name is not None and not isinstance(name, str):
        raise TransformError(report("cut", f"the name of a cut is a string, but it is {short(name)}"))
    recorder: Any = torch_internals.recorder() if torch_internals.dispatch_modes() else None
    places: list[CutPlace] | None = getattr(recorder, "cuts", None)
    if places is None:
        return x
    if context.body() is not None:
        what = "a pipeline cuts the whole program, not what each rank does in a shard_map body"
        raise TransformError(report("cut", what, fix="vfn.cut around the shard_map, of its result"))
    if recorder.is_in_body:
        what = "a pipeline cuts the whole program, not a branch of a choice or the body of a while_loop"
        raise TransformError(report("cut", what, fix="vfn.cut around it, of its result"))
    if state.now().computed_again or torch_internals.in_backward_pass():
        what = "a pipeline cannot cut what is computed again for the backward pass"
        raise TransformError(report("cut", what, fix="vfn.cut(vfn.remat(f)(x)): the cut around the remat"))
    number = len(places)
    places.append(CutPlace(name, source_lines.user_line()))
    leaves, treedef = opened(x, "cut", "x", numpy=True, modules=True)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    # Marked together, all would need a gradient: a mask, too, for which attention takes another kernel.
    followed = [i for i in tensors if torch_internals.needs_gradient(leaves[i])]
    for places_of in (followed, [i for i in tensors if i not in followed]):
        if places_of:
            marked = linear_map.apply(_Cut(recorder, number, False), *(leaves[i] for i in places_of))
            for i, leaf in zip(places_of, marked, strict=True):
                leaves[i] = leaf
    return tree.unflatten(treedef, leaves)


class _Cut:
    """Marks values, and on their way back their cotangents."""

    def __init__(self, recorder: Any, number: int, back: bool | None) -> None:
        self.recorder, self.number, self.back = recorder, number, back  # None: neither, of a gradient's gradient

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        return xs if self.back is None else tuple(map(self._marked, xs))

    def transpose(self) -> _Cut:
        return _Cut(self.recorder, self.number, True if self.back is False else None)

    def batched(self, over: tuple[str, ...]) -> _Cut:
        return self

    def _marked(self, x: torch.Tensor) -> torch.Tensor:
        # what stands behind a mark is a value like any other, not a view that conjugates or negates as it is read
        mark = lambda block: self.recorder.mark(block.resolve_conj().resolve_neg(), self.number, self.back)
        if not isinstance(x, DTensor):
            return blocks.of_each(mark, x)
        return made(blocks.of_each(mark, torch_internals.local(x)), torch_internals.spec(x), spec_of(x))
