"""The leaves of loops and branches: numbers become tensors, and two trees of one place must have the same types."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from .. import torch_internals
from ..arrays.array import is_array, lies_as, mesh_of, moved, spec_of
from ..base import context, tree
from ..base.containers import opened
from ..base.errors import TransformError
from ..base.messages import described, report
from ..local_types import tensor_types, types
from ..local_types.types import INVARIANT
from ..shard_map import body
from ..shard_map.collective_maps import promote
from ..sharding.layout import WHOLE, type_text
from ..sharding.spec import P

_LAYOUT = "a carry keeps its layout"
_NUMBERS = (bool, int, float, complex, np.generic, np.ndarray)


def recorder() -> Any:
    """The recording of a plan, which notes a loop or a choice as one call; None where there is none."""
    return torch_internals.recorder() if torch_internals.dispatch_modes() else None


def for_types() -> contextlib.AbstractContextManager[None]:
    """A block in which what a loop of no iterations repeats is run for the types of its results: loops of unknown length do not
    begin in it, and no derivative has a rule."""
    return context.setting(for_types=True)


class Opened:
    """A tree that goes into a loop or a branch, or comes out of it, all of whose leaves are tensors.

    Args:
        value: the tree.
        where: the public function.
        name: of the tree, by which paths begin.
        device: where numbers become tensors.

    Attributes:
        leaves, treedef: of the tree.
    """

    def __init__(self, value: Any, where: str, name: str, device: torch.device | None = None) -> None:
        found, self.treedef = opened(value, where, name, numpy=True)
        self.value, self.where, self.name, self.device = value, where, name, device
        self.weak = [isinstance(x, (bool, int, float, complex)) for x in found]
        wrong = [
            f"{path} is {described(x)}"
            for path, x in zip(tree.paths(value, name), found, strict=True)
            if not isinstance(x, (torch.Tensor, *_NUMBERS))
        ]
        if wrong:
            fix = "close over what is no number, or leave it out of the tree"
            raise TransformError(report(where, f"the leaves of {name} must be tensors or numbers", wrong, fix))
        self.leaves: list[torch.Tensor] = [_tensor(body.local(x), device) for x in found]

    def paths(self) -> list[str]:
        """The leaves as the user's code would name them."""
        return tree.paths(self.value, self.name)

    def tree(self) -> Any:
        """The tree of the leaves as they are now."""
        return tree.unflatten(self.treedef, self.leaves)

    def adapt(self, now: Opened, why: str = _LAYOUT) -> bool:
        """Give leaves without a type of their own that of what came out in their place, and say whether some changed."""
        if self.treedef != now.treedef:
            return False
        pairs = zip(self.leaves, now.leaves, self.weak, strict=True)
        found = [x if new is None else new for x, new in ((pair[0], _adapted(*pair, why)) for pair in pairs)]
        changed = any(x is not old for x, old in zip(found, self.leaves, strict=True))
        self.leaves = found
        return changed

    def like(self, other: Opened) -> bool:
        """Whether the two have one structure, and leaves of the same shapes and dtypes."""
        return self.treedef == other.treedef and all(
            (x.shape, x.dtype) == (y.shape, y.dtype) for x, y in zip(self.leaves, other.leaves, strict=True)
        )

    def make_sums(self, before: Opened, why: str = _LAYOUT) -> None:
        """Make the sums that are still to be made in what came out in the place of `before`, into the layout there, written as
        there."""
        if self.treedef == before.treedef:
            self.leaves = [_summed(x, now, why) for x, now in zip(before.leaves, self.leaves, strict=True)]

    def refuse_change(self, now: Opened, what: str, gives: str, fix: str) -> None:
        """Raise unless what came out has the structure and the types of what went in.

        Args:
            now: what came out.
            what: is violated.
            gives: who gave it.
            fix: what to write instead, where nothing better is known.
        """
        if self.treedef != now.treedef:
            failures = list(tree.partings(now.value, self.value, f"the {now.name} that {gives}", self.name))
            structures = f"{self.name} is {_shape(self)}, the {now.name} that {gives} is {_shape(now)}"
            raise TransformError(report(self.where, what, failures or [structures], fix))
        pairs = list(zip(self.paths(), self.leaves, now.leaves, strict=True))
        wrong = [(path, x, y) for path, x, y in pairs if facts(x) != facts(y)]
        if wrong:
            failures = [f"{path} is {text(x)} and comes back as {text(y)}{_but(x, y)}" for path, x, y in wrong]
            ways = dict.fromkeys(way for path, x, y in wrong if (way := _way(x, y, path)))
            raise TransformError(report(self.where, what, failures, "; ".join(ways) or fix))


def _tensor(x: Any, device: torch.device | None) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    if isinstance(x, (np.ndarray, np.generic)):
        return torch.tensor(x, device=device)
    default = torch.get_default_dtype()
    dtype = {bool: torch.bool, int: torch.int64, complex: default.to_complex()}.get(type(x), default)
    return torch.full((), x, dtype=dtype, device=device)


def device_of(trees: Iterable[Any]) -> torch.device | None:
    """The device of the first tensor in some trees."""
    return next((x.device for value in trees for x in tree.leaves(value) if isinstance(x, torch.Tensor)), None)


def facts(x: torch.Tensor) -> tuple[Any, ...]:
    """What must not change from one iteration to the next: shape, dtype, layout, and in a body the type."""
    running = context.body()
    typed = running is not None and running.check
    type_ = tensor_types.typeof(x, running.axes) if typed else INVARIANT  # type: ignore[union-attr]
    return x.shape, x.dtype, lies_as(x) if is_array(x) else None, type_


def text(x: torch.Tensor) -> str:
    """The type of a leaf on one short line: ``f32[8@dp,4]{V:tp}``."""
    shape, dtype, lies, type_ = facts(x)
    return f"{type_text(shape, dtype, WHOLE if lies is None else lies)}{type_ or ''}"


def varied(x: torch.Tensor, axes: Iterable[str]) -> torch.Tensor:
    """`x` as a value of the body that runs which varies over these axes, too."""
    running: Any = context.body()
    have = tensor_types.typeof(x, running.axes)
    want = types.of(have.varying.union(axes), have.unreduced, have.reduced)
    if want is not have:
        x = promote(x, have, want, running.mesh)
        tensor_types.mark(x, want)
    return x


def _summed(before: torch.Tensor, now: torch.Tensor, why: str) -> torch.Tensor:
    """`now`, with the sums that are still to be made, and are not in `before`, made; one layout is written as `before` is."""
    if not is_array(now) or not is_array(before):
        return now
    have, goal = spec_of(now), spec_of(before)
    if have.unreduced <= goal.unreduced and (have == goal or lies_as(now) != lies_as(before)):
        return now
    return moved(now, mesh_of(now), goal, why)


def _adapted(before: torch.Tensor, now: torch.Tensor, weak: bool, why: str) -> torch.Tensor | None:
    """`before` with the type of `now`, where it had none of its own: a number takes a wider dtype and varies by rank, a plain
    tensor counts as an array that is replicated. None where it cannot be had so."""
    (shape, dtype, lies, type_), (new_shape, new_dtype, new_lies, new_type) = facts(before), facts(now)
    if shape != new_shape or (type_ != new_type and not weak):
        return None
    found = before if type_ == new_type else varied(before, new_type.varying)
    if dtype != new_dtype:
        if not weak or torch.promote_types(dtype, new_dtype) != new_dtype:
            return None
        found = found.to(new_dtype)
    if lies is None and new_lies == P():
        found = moved(found, mesh_of(now), P(), why)
    return found if facts(found) == facts(now) else None


def _shape(x: Opened) -> str:
    return str(x.treedef).removeprefix("PyTreeSpec(").removesuffix(")")


def _but(x: torch.Tensor, y: torch.Tensor) -> str:
    """In what two types differ, where the text does not say so."""
    return "" if text(x) != text(y) else ", which is an array" if is_array(y) else ", which is a plain tensor"


def _way(x: torch.Tensor, y: torch.Tensor, name: str) -> str:
    """What makes a carry of type `x` one of type `y`."""
    (shape, dtype, lies, type_), (new_shape, new_dtype, new_lies, new_type) = facts(x), facts(y)
    if shape != new_shape:
        return ""
    if dtype != new_dtype:
        return f"{name}.to({new_dtype}), or .to({dtype}) for what comes back"
    if lies != new_lies:
        if new_lies is None:
            return f"vfn.unshard({name})"
        if lies is None:
            return f"vfn.shard({name}, mesh, {new_lies})"
        return f"vfn.with_sharding({name}, {new_lies}), or vfn.with_sharding(..., {lies}) for what comes back"
    more = sorted(new_type.varying - type_.varying)
    return f"vfn.pvary({name}, {more[0] if len(more) == 1 else tuple(more)!r})" if more else ""


def stacked(rows: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """What each iteration gave, along a new leading dim."""
    return [torch.stack(list(column)) for column in zip(*rows, strict=True)]
