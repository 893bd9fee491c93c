"""A body without types, as a mode: what a factory makes is each simulated rank's own, closed-over tensors get the sum of the
ranks' gradients.

On a simulated mesh what a factory makes becomes a `Blocks` with a tensor for each rank, so that a rank's writes are its
own. On a real mesh, where nothing is differentiated, such a body has no mode at all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from .. import torch_internals
from ..base import context, linear_map, op_arguments
from ..base.errors import TransformError
from ..base.messages import report
from ..base.stateful_draws import refuse_factory
from ..distributed.blocks import Blocks, own_of_each
from ..distributed.mesh import communicator_of
from ..local_types import function_kinds, tensor_types
from ..local_types.tensor_types import mark
from ..local_types.types import Type
from .collective_maps import CollectiveMap, enter

Tensor = torch.Tensor

# --- operands that can be told at first sight -------------------------------------------------------------------------

_STATIC = frozenset(
    (
        int,
        float,
        bool,
        type(None),
        str,
        slice,
        type(...),
        torch.dtype,
        torch.device,
        torch.Size,
        torch.memory_format,
        torch.layout,
        complex,
    )
)
LOCAL = frozenset((Tensor, Blocks, torch.nn.Parameter))


def at_first_sight(args: Any, kwargs: Any) -> tuple[list[Tensor], list[Type | None]] | None:
    """The tensors among arguments that are simple enough to tell at first sight, and their types; None where one is
    not.
    """
    found, known = [], []
    for a in (*args, *kwargs.values()) if kwargs else args:
        kind = a.__class__
        if kind in LOCAL:
            found.append(a)
            known.append(getattr(a, "vfn_type", None))
        elif kind is list or kind is tuple:
            for b in a:
                if b.__class__ in LOCAL:
                    found.append(b)
                    known.append(getattr(b, "vfn_type", None))
                elif b.__class__ not in _STATIC:
                    return None
        elif kind not in _STATIC:
            return None
    return found, known


def mark_result(out: Any, type_: Type, operands: Sequence[Tensor]) -> Any:
    """`tensor_types.mark_made` outside of transforms, of operands that are all the body's."""
    if out.__class__ is Tensor or out.__class__ is Blocks:
        out.vfn_type = type_
        base = torch_internals.base(out)
        if base is not None and all(torch_internals.base(x) is not base for x in operands):
            base.vfn_view_type = type_
        return out
    return out if out.__class__ in _STATIC else tensor_types.mark_made(out, type_, operands)


# --- the mode ---------------------------------------------------------------------------------------------------------


class Unchecked(TorchFunctionMode):
    """For a body without types: on a simulated mesh, what a factory makes is each rank's own."""

    def __init__(self, body: context.Body, adopt: Callable[[Tensor], Tensor], writes: tensor_types.Writes) -> None:
        self.body, self.adopt, self.writes = body, adopt, writes
        communicator = communicator_of(body.mesh)
        self.ranks = len(communicator.ranks) if communicator.holds_blocks else 0
        self.remembered: dict[Any, Any] = {}
        self.own = tensor_types.made_in(
            body
        )  # the type of what comes from outside, and without types of all it computes

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if context.mode() is not self:  # of a body around the one that runs
            return func(*args, **kwargs or {})
        seen = (
            None if torch_internals.transforming() or torch_internals.dispatch_modes() else at_first_sight(args, kwargs)
        )
        if seen is not None and seen[1] and None not in seen[1]:  # the short way: nothing comes from outside
            return mark_result(func(*args, **kwargs or {}), self.own, seen[0])
        return self.call(func, getattr(func, "__name__", "?"), args, kwargs or {})

    def call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Any function: what it gives is a value of the body, which tells it from those that come from outside."""
        if name == "_make_dual":
            refuse_to_be_traced()
        given = op_arguments.tensors_in(args, kwargs)
        if not given:
            return tensor_types.mark_all(self.made(func, args, kwargs, draws=name in function_kinds.DRAWS), self.own)
        if func is not torch.autograd.grad and name not in function_kinds.NOT_TYPED:
            new = [self.taken_in(x) for x in given]
            if any(a is not b for a, b in zip(new, given)):
                args, kwargs = op_arguments.with_tensors((args, kwargs), iter(new))
                given = new
        return tensor_types.mark_made(func(*args, **kwargs), self.own, given)

    def made(self, func: Any, args: Any, kwargs: Any, draws: bool) -> Any:
        """What a function without tensor operands makes."""
        if draws and context.virtual() is not None:
            refuse_factory(func, args, kwargs)
        out = func(*args, **kwargs)
        if not self.ranks or not isinstance(out, Tensor) or torch_internals.is_batched(out):
            return out
        one = torch_internals.peel(out)
        if not torch_internals.is_bare(one):
            return out
        with torch_internals.no_torch_function():  # in which torch's default device is the CPU
            if draws:
                if getattr(func, "__name__", "") in function_kinds.DRAWS:
                    kwargs = {**kwargs, "device": one.device}
                again = [func(*args, **kwargs) for _ in range(1, self.ranks)]
                made = Blocks(torch_internals.peel(x.detach()) for x in (one, *again))
            else:
                made = own_of_each(one, self.ranks)
            if torch_internals.transforming():
                return made.clone()  # a value of the innermost transform, which may be written inside it
            return made.requires_grad_() if out.requires_grad else made

    def taken_in(self, x: Tensor) -> Tensor:
        """A value from outside as a local one, whose gradient is the sum of the ranks'."""
        with torch_internals.no_torch_function():  # or each look at it would take it in
            if tensor_types.read(x) is not None:
                return x
            tensor_types.refuse_unseen(x)
            entered = self.entered(x)
            if not torch_internals.needs_gradient(entered):
                return entered
            copy = CollectiveMap("copy", self.body.mesh, self.body.axes, "closure")
            return self.remember(x, "copy", lambda: linear_map.apply(copy, entered)[0])

    def entered(self, x: Tensor) -> Tensor:
        """A whole array, or on a simulated mesh a plain tensor, as a local value."""
        below = torch_internals.peel(x)
        if isinstance(below, DTensor):
            known = tensor_types.read(x) or self.own  # typed where it is of a body around this one
            return self.remember(x, "array", lambda: tensor_types.lend(self.adopt(x)), known) if self.outside(x) else x
        # that will be an array
        if self.body.auto is not None and tensor_types.read(x) is None and torch_internals.needs_gradient(x):
            return self.remember(x, "array", lambda: self.adopt(x))
        if self.ranks and type(below) is not Blocks:
            return self.remember(x, "enter", lambda: enter(x, self.body.mesh))
        return x

    def outside(self, x: Tensor) -> bool:
        """Whether `x` is a whole array from outside of the body."""
        return tensor_types.outside(x, self.body.auto)

    def remember(self, x: Tensor, what: Any, make: Callable[[], Tensor], type_: Type | None = None) -> Tensor:
        """``make()``, once for each `x` as long as it lives unchanged (and for each level of transforms, and grad mode)."""
        key = (id(x), what, torch.is_grad_enabled(), torch_internals.level() if torch_internals.transforming() else 0)
        version = torch_internals.version(x)
        found = self.remembered.get(key)
        if found is not None and found[0]() is x and found[1] == version:
            return found[2]
        made, remembered = make(), self.remembered
        mark(made, type_ or self.own)
        remembered[key] = (weakref.ref(x, lambda _: remembered.pop(key, None)), version, made)
        return made


def refuse_to_be_traced() -> None:
    """What `torch.func.linearize` plays back later has no types: its results would all count as invariant."""
    if torch_internals.dispatch_modes() and torch_internals.is_traced():
        raise TransformError(
            report(
                "torch.func.linearize",
                "inside a shard_map body it would lose the types of local values, and so gradients",
                fix="vfn.linearize(f, *primals), which gives the same pair; or torch.func.linearize outside of the shard_map",
            )
        )
