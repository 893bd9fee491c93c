"""`scan`, `fori_loop` of known length, `map`: a loop whose body is a function of the carry and one slice.

Source: `jax.lax`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from .. import torch_internals
from ..arrays.array import is_array, spec_of
from ..arrays.entries import entry
from ..base import context, tracebacks, tree
from ..base.errors import ReshardError, TransformError
from ..base.messages import described, report, short
from ..base.user_calls import called, checked_function
from ..sharding.spec import split_axes
from ..transforms.vmap import vmap
from . import leaves as leaves_
from .leaves import Opened

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here

_KEEPS = "the carry must keep its structure, shapes, dtypes, layouts and types, and f returns another one"
_PAIR = "return carry, y; or carry, None where nothing is collected"


@torch_internals.not_compiled
def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """A loop: ``carry, y = f(carry, x)`` for each slice `x` of `xs` along its leading dim.

    Args:
        f: a function of the carry and one slice that returns the new carry and what is collected.
        init: the first carry, any tree of tensors and numbers. A carry keeps its structure, shapes, dtypes, layouts, and in a
            `shard_map` body its types. A number takes the dtype that `f` gives it, a plain tensor becomes a replicated array
            where `f` makes it one, and a sum over ranks that is still to be made is made as the carry's layout says.
        xs: a tree of tensors whose leading dims have one size, in any layout; keys too. Of a split leading dim each slice is
            broadcast by its owner when it is its turn, under `jit` once more where the derivative needs it, so that no rank has
            all of them, and their gradient stays split. None: no slices, `length` says how often.
        length: the number of iterations; to be given where `xs` has no tensors.
        reverse: whether to begin at the last slice. What is collected stays in the order of `xs`.
        unroll: as JAX takes it, an int or a bool; without effect. An iteration of a recorded loop costs less than one op beside
            its body (`benchmarks/loops.py`), so that there is next to nothing to gain.

    Under `jit` on GPUs the gathers that a slice alone decides (of a layer's parameters) travel during the iteration before, and
    sums that only `ys` or a carried total need (of its gradients) during the one behind: 64 MiB each way at most, or one
    collective. The plan's text shows them "an iteration ahead" and "an iteration late"; a limit on memory does without.

    Returns:
        ``(carry, ys)``: the last carry, and the tree of what `f` collected with a new leading dim.

    Raises:
        TransformError: the carry changes its type, the leading dims differ, `f` does not return a pair.
        ReshardError: under `strict`, the leading dim of `xs` is split.

    Source: `jax.lax.scan`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.scan(lambda total, x: (total + x, total * x), 0, torch.tensor([1, 2, 3]))
    (tensor(6), tensor([0, 2, 9]))
    """
    checked_function(f, "scan")
    return scanned(f, init, xs, length, reverse, unroll, "scan")


def scanned(
    f: Any,
    init: Any,
    xs: Any,
    length: Any,
    reverse: bool,
    unroll: Any,
    where: str,
    name: str = "init",
    leading: Mapping[int, Any] = MappingProxyType({}),
) -> tuple[Any, Any]:
    """`scan`, as another function calls it; `name` is its parameter for the first carry, `leading` as `Repeated` has it."""
    _check_unroll(unroll, where)
    slices = Slices(xs, where)
    count = slices.length(length)
    body = Repeated(f, init, slices, where, name, leading)
    if count and (recorder := leaves_.recorder()) is not None:
        if (found := recorder.scan(body, slices.leaves, count, reverse)) is not None:
            return body.carry(found[0]), body.collected(found[1])
    if count == 0:
        with leaves_.for_types():
            _, y = body.begun(slices.nothing())
        return body.carry(body.init), body.collected([leaf.detach().unsqueeze(0)[:0] for leaf in y])
    places = range(count - 1, -1, -1) if reverse else range(count)
    carry, y = body.begun(slices[places[0]])
    rows = [y]
    for i in places[1:]:
        carry, y = body(carry, slices[i])
        rows.append(y)
    return body.carry(carry), body.collected(leaves_.stacked(rows[::-1] if reverse else rows))


class Repeated:
    """What a loop repeats, as a function of leaves.

    Args:
        f: the user's function, of a carry and a slice.
        init: the first carry.
        slices: what is looped over.
        where: the public function.
        name: its parameter for the first carry.
        leading: by the places of leaves that `f` collects, how the dim along which a plan collects them is to be split.
    """

    runs_anywhere = True  # not only while a transform is active

    def __init__(
        self,
        f: Callable[[Any, Any], Any],
        init: Any,
        slices: Slices,
        where: str,
        name: str,
        leading: Mapping[int, Any] = MappingProxyType({}),
    ) -> None:
        self._f, self._where, self._slices, self.leading = f, where, slices, leading
        self._carry = Opened(init, where, name, leaves_.device_of((init, slices.xs)))

    def begun(self, x: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The first iteration, before which the first carry takes the types that it is to have."""
        now, y = self.step(self.init, x)
        if self.adapt(now):
            now, y = self.step(self.init, x)
        return self.checked(now), y.leaves

    def __call__(
        self, carry: Sequence[torch.Tensor], x: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """One iteration."""
        now, y = self.step(carry, x)
        return self.checked(now), y.leaves

    @property
    def init(self) -> list[torch.Tensor]:
        """The leaves of the first carry."""
        return self._carry.leaves

    def step(self, carry: Sequence[torch.Tensor], x: Sequence[torch.Tensor]) -> tuple[Opened, Opened]:
        """One iteration, unchecked."""
        out = called(self._f, (self.carry(carry), self._slices.one(x)), {}, self._where)
        if not (isinstance(out, (tuple, list)) and len(out) == 2):
            what = "f must return a pair, the new carry and what is collected"
            raise TransformError(report(self._where, what, [f"it returned {described(out)}"], _PAIR))
        now, y = (Opened(part, self._where, name, self._carry.device) for part, name in zip(out, ("carry", "y")))
        self._collected = y.treedef
        now.make_sums(self._carry)
        return now, y

    def checked(self, now: Opened) -> list[torch.Tensor]:
        """The leaves of a new carry, whose types must be those of the first one."""
        self._carry.refuse_change(now, _KEEPS, "f returns", f"the same types from f as in {self._carry.name}")
        return now.leaves

    def adapt(self, now: Opened) -> bool:
        """Give the first carry the types that it is to have, and say whether it had others."""
        return self._carry.adapt(now)

    def carry(self, leaves: Sequence[torch.Tensor]) -> Any:
        """The carry of these leaves."""
        return tree.unflatten(self._carry.treedef, leaves)

    def collected(self, leaves: Sequence[torch.Tensor]) -> Any:
        """The tree of what `f` collects, of these leaves."""
        return tree.unflatten(self._collected, leaves)


class Slices:
    """What a loop goes over: the slices of a tree along the leading dims of its leaves.

    Args:
        xs: the tree.
        where: the public function.
    """

    def __init__(self, xs: Any, where: str) -> None:
        self.xs, self._where = xs, where
        opened = Opened(xs, where, "xs")
        self.leaves, self._def, self._paths = opened.leaves, opened.treedef, opened.paths()
        if flat := [
            f"{path} is {leaves_.text(x)}" for path, x in zip(self._paths, self.leaves, strict=True) if x.ndim == 0
        ]:
            fix = "close over what is the same in all iterations, or make it a part of the carry"
            raise TransformError(report(where, "xs has leaves without a leading dim to go over", flat, fix))
        for path, x in zip(self._paths, self.leaves, strict=True):
            if context.is_strict() and is_split(x):
                raise ReshardError(
                    report(
                        where,
                        "strict: each slice would have to be brought to all ranks, for the leading dim is split",
                        [f"{path} is {leaves_.text(x)}"],
                        "vfn.with_sharding(xs, P(None, ...)) before the loop, which splits another dim or none",
                    )
                )
        self._rows: list[Any] | None = None

    def length(self, asked: Any) -> int:
        """How many iterations there are."""
        sizes = [x.shape[0] for x in self.leaves]
        shown = [f"{path} is {leaves_.text(x)}" for path, x in zip(self._paths, self.leaves, strict=True)]
        if asked is not None and (isinstance(asked, (bool, torch.Tensor)) or not hasattr(asked, "__index__")):
            what = f"length must be an int, but it is {described(asked)}"
            raise TransformError(
                report(self._where, what, fix="a Python int: the number of iterations is a part of the plan")
            )
        if asked is None and not sizes:
            raise TransformError(
                report(
                    self._where, "there are no xs to go over, and no length", fix="length=n, the number of iterations"
                )
            )
        if len(set(sizes)) > 1:
            fix = "leaves with one leading size: x.unsqueeze(0).expand(n, ...) for what is the same in all iterations"
            raise TransformError(
                report(self._where, "the leaves of xs have leading dims of different sizes", shown, fix)
            )
        count = sizes[0] if asked is None else operator.index(asked)
        if count < 0 or (sizes and sizes[0] != count):
            what = f"length={count} is not the number of slices" if sizes else f"length={count} is negative"
            raise TransformError(
                report(self._where, what, shown, "leave length out, where xs has leaves" if sizes else "")
            )
        return count

    def __getitem__(self, i: int) -> list[torch.Tensor]:
        if self._rows is None:
            self._rows = [None if is_split(x) else x.unbind(0) for x in self.leaves]
        return [
            entry(x, i, f"{self._where}: a slice of a split dim") if rows is None else rows[i]
            for x, rows in zip(self.leaves, self._rows, strict=True)
        ]

    def nothing(self) -> list[torch.Tensor]:
        """Leaves like those of a slice, of zeros: what a body that never runs is asked with for the types of its results."""
        return [x.any(0) if x.dtype == torch.bool else x.sum(0, dtype=x.dtype) for x in self.leaves]

    def one(self, leaves: Sequence[torch.Tensor]) -> Any:
        """The tree of a slice."""
        return tree.unflatten(self._def, leaves)


def is_split(x: torch.Tensor) -> bool:
    """Whether the leading dim of an array is split."""
    return is_array(x) and bool(split_axes(spec_of(x), x.ndim)[0])


def _check_unroll(unroll: Any, where: str) -> None:
    if not isinstance(unroll, int) or unroll < 0:
        what = f"unroll must be an int that is not negative, or a bool, but it is {short(unroll)}"
        raise TransformError(report(where, what, fix="leave unroll out: results do not depend on it"))


@torch_internals.not_compiled
def map(f: Callable[[Any], Any], xs: Any, *, batch_size: int | None = None) -> Any:
    """``f(x)`` for each slice `x` of `xs` along its leading dim, one after the other, stacked.

    Args:
        f: a function of one slice.
        xs: as for `scan`.
        batch_size: how many slices are computed together, by `vmap`; the last ones, if fewer are left, together as well.

    Raises:
        TransformError: as `scan`.

    Source: `jax.lax.map`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.lax.map(lambda x: x.sum(), torch.eye(3) * 2)
    tensor([2., 2., 2.])
    """
    checked_function(f, "map")
    if batch_size is None:
        return scanned(lambda carry, x: (carry, called(f, (x,), {}, "map")), None, xs, None, False, 1, "map")[1]
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        what = f"batch_size must be an int of at least 1, but it is {short(batch_size)}"
        raise TransformError(report("map", what, fix="batch_size=None for one slice at a time"))
    count = Slices(xs, "map").length(None)
    whole = count // batch_size
    parts = []
    if whole:
        batched = tree.map_(lambda x: x[: whole * batch_size].unflatten(0, (whole, batch_size)), xs)
        parts.append(tree.map_(lambda y: y.flatten(0, 1), map(vmap(f), batched)))
    if count > whole * batch_size or not whole:
        parts.append(vmap(f)(tree.map_(lambda x: x[whole * batch_size :], xs)))
    return parts[0] if len(parts) == 1 else tree.map_(lambda *ys: torch.cat(ys), *parts)
