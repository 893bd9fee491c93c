"""`while_loop`, and `fori_loop`, which is one where its bounds are tensors and a scan where they are numbers.

Source: `jax.lax`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import torch_internals
from ..arrays.array import is_array, mesh_of, moved
from ..base import linear_map, state, tracebacks, tree
from ..base.errors import TransformError
from ..base.messages import described, report
from ..base.user_calls import called, checked_function
from ..local_types import tensor_types
from ..sharding.spec import P
from . import leaves as leaves_
from . import select
from .leaves import Opened
from .scan import scanned

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here

_KEEPS = "the carry must keep its structure, shapes, dtypes, layouts and types, and body_fun returns another one"


@torch_internals.not_compiled
def while_loop(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any) -> Any:
    """``val = body_fun(val)`` as long as ``cond_fun(val)`` holds.

    Args:
        cond_fun: a function of the carry that gives a bool or a 0-d tensor. Where that differs between the entries of a `vmap`
            or, in a body, between ranks, each keeps its carry as soon as its own condition fails; then neither function may
            communicate over an axis along which it varies.
        body_fun: a function of the carry that returns the new one, of the same structure, shapes, dtypes, layouts and types.
        init_val: the first carry; numbers and plain tensors in it as in `scan`.

    Returns:
        The last carry. It has derivatives in forward mode alone: a backward pass would have to keep values of unknown number.

    Raises:
        TransformError: the carry changes its type, the condition is no truth value; in a backward pass.

    Source: `jax.lax.while_loop`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.while_loop(lambda x: x < 100, lambda x: 2 * x, torch.tensor(3))
    tensor(192)
    """
    for name, f in (("cond_fun", cond_fun), ("body_fun", body_fun)):
        if not callable(f):
            what = f"{name} must be a function, but it is {described(f)}"
            raise TransformError(report("while_loop", what, fix="while_loop(cond_fun, body_fun, init_val)"))
    return _looped(cond_fun, body_fun, init_val, "while_loop")


def _looped(cond_fun: Any, body_fun: Any, init_val: Any, where: str) -> Any:
    loop = Conditioned(cond_fun, body_fun, init_val, where)
    carry, recorder = loop.carry, leaves_.recorder()
    if recorder is not None and (found := recorder.while_loop(loop)) is not None:
        return tree.unflatten(carry.treedef, found)
    holds, count = loop.holds(carry.leaves), 0
    loop.vary(holds)
    while not state.now().for_types and select.anywhere(holds):
        now = loop.step(carry.leaves, holds)
        if count == 0 and carry.adapt(now):
            now = loop.step(carry.leaves, holds)
        carry.leaves, count = loop.checked(now), count + 1
        holds = loop.holds(carry.leaves)
    if count == 0 and any(carry.weak):
        with leaves_.for_types():
            carry.adapt(loop.step(carry.leaves, holds))
    carry.leaves = list(map(_only_forward, carry.leaves))
    return carry.tree()


class Conditioned:
    """What is repeated as long as a condition holds, as functions of the leaves of the carry.

    Args:
        cond_fun, body_fun: the user's functions.
        init: the first carry.
        where: the public function.

    Attributes:
        carry: the first carry.
    """

    def __init__(self, cond_fun: Any, body_fun: Any, init: Any, where: str) -> None:
        self._cond_fun, self._body_fun, self._where = cond_fun, body_fun, where
        self.carry = Opened(init, where, "init_val", leaves_.device_of([init]))

    @property
    def init(self) -> list[torch.Tensor]:
        """The leaves of the first carry."""
        return self.carry.leaves

    @init.setter
    def init(self, leaves: list[torch.Tensor]) -> None:
        self.carry.leaves = leaves

    def adapt(self, now: Opened) -> bool:
        """Give the first carry the types that it is to have, and say whether it had others."""
        return self.carry.adapt(now)

    def holds(self, leaves: Sequence[torch.Tensor]) -> Any:
        """The condition of a carry."""
        found = called(self._cond_fun, (tree.unflatten(self.carry.treedef, leaves),), {}, self._where)
        return select.scalar(found, self._where, "the result of cond_fun")

    def vary(self, holds: Any) -> bool:
        """Let each rank keep its own carry, after its own number of iterations, where the condition differs; and say whether
        the carry was another one before."""
        before = self.carry.leaves
        if axes := select.varying(holds):
            self.carry.leaves = [leaves_.varied(x, axes) for x in before]
        elif select.differs(holds) and is_array(holds):
            self.carry.leaves = [
                x if is_array(x) else moved(x, mesh_of(holds), P(), "each entry keeps its carry") for x in before
            ]
        return any(x is not old for x, old in zip(self.carry.leaves, before, strict=True))

    def step(self, leaves: Sequence[torch.Tensor], holds: Any) -> Opened:
        """One iteration; where the condition differs, only for those for whom it holds."""
        value = tree.unflatten(self.carry.treedef, leaves)
        with select.apart(holds, self._where):
            now = Opened(called(self._body_fun, (value,), {}, self._where), self._where, "val", self.carry.device)
        now.make_sums(self.carry)
        if select.differs(holds) and now.like(self.carry):
            now.leaves = select.chosen(holds != 0, now.leaves, leaves)
        return now

    def checked(self, now: Opened) -> list[torch.Tensor]:
        """The leaves of a new carry, whose types must be those of the first one."""
        self.carry.refuse_change(now, _KEEPS, "body_fun returns", "the same types from body_fun as in init_val")
        return now.leaves


def refused() -> TransformError:
    """Why there is no gradient."""
    return TransformError(
        report(
            "while_loop",
            "it has no gradient, for a backward pass would have to keep the values of an unknown number of iterations",
            fix="vfn.scan, or fori_loop between ints, which run for a known number of times; or vfn.jvp",
        )
    )


def _only_forward(x: torch.Tensor) -> torch.Tensor:
    """`x`, from which no gradient goes back."""
    if not x.is_floating_point() and not x.is_complex():
        return x
    return tensor_types.kept(linear_map.apply(_Forward(), x)[0], x)


@dataclass(frozen=True)
class _Forward:
    """The identity, which has no transpose."""

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        return xs

    def transpose(self) -> linear_map.LinearMap:
        raise refused()

    def batched(self, over: tuple[str, ...]) -> linear_map.LinearMap:
        return self


@torch_internals.not_compiled
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[torch.Tensor, Any], Any],
    init_val: Any,
    *,
    unroll: int | bool | None = None,
) -> Any:
    """``val = body_fun(i, val)`` for each `i` from `lower` up to, and without, `upper`.

    Args:
        lower, upper: ints, between which the loop is a `scan`, with all of its derivatives; or 0-d integer tensors, with
            which it is a `while_loop`.
        body_fun: a function of the number of the iteration, a 0-d tensor of the bounds' dtype, int32 of ints, and the carry,
            that returns the new carry.
        init_val: the first carry, as for `scan`.
        unroll: as for `scan`; only between ints.

    Raises:
        TransformError: a bound is no integer, the carry changes its type, `unroll` between tensors.

    Source: `jax.lax.fori_loop`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.fori_loop(0, 5, lambda i, total: total + i, 0)
    tensor(10)
    """
    checked_function(body_fun, "fori_loop")
    lower, upper = (select.scalar(x, "fori_loop", name, whole=True) for name, x in (("lower", lower), ("upper", upper)))
    if isinstance(lower, torch.Tensor) or isinstance(upper, torch.Tensor):
        if unroll not in (None, False, 1):
            what = "unroll is for loops between ints, whose length is known"
            raise TransformError(report("fori_loop", what, fix="leave unroll out, or give both bounds as ints"))
        lower = lower if isinstance(lower, torch.Tensor) else torch.full_like(upper, lower)
        start = lower, init_val

        def step(val: Any) -> Any:
            return val[0] + 1, called(body_fun, val, {}, "fori_loop")

        return _looped(lambda val: val[0] < upper, step, start, "fori_loop")[1]
    count = max(upper - lower, 0)
    small = -(1 << 31) <= lower <= upper < 1 << 31
    device = leaves_.device_of([init_val])
    places = torch.arange(lower, lower + count, dtype=torch.int32 if small else torch.int64, device=device)

    def body(carry: Any, i: torch.Tensor) -> Any:
        return called(body_fun, (i, carry), {}, "fori_loop"), None

    return scanned(body, init_val, places, None, False, 1 if unroll is None else unroll, "fori_loop", "init_val")[0]
