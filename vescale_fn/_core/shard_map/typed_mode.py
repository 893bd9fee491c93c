"""A body with types, as a mode: it types every value and promotes where needed.

`Checked` sees each torch function that a body calls, before autograd and `torch.func` do. Functions fall into a few
classes, found by name once and remembered: an ordinary function combines the types of its operands; a write may change
the type of its target; a draw gives a varying result; of an op that nothing is known about, the result varies as its
operands do. Promoted values are remembered, so that the gradient of a weight that is used ten times is reduced once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import context, op_arguments, tracebacks
from ..base.errors import InPlaceError, VaryingTypeError
from ..base.messages import mesh_text, report
from ..distributed.blocks import Blocks
from ..local_types import function_kinds, replica_check, tensor_types, types
from ..local_types.tensor_types import mark
from ..local_types.types import Type
from ..sharding.index_map import axes_of
from . import concretization
from .collective_maps import promote
from .untyped_mode import LOCAL, Unchecked, at_first_sight, mark_result, refuse_to_be_traced

Tensor = torch.Tensor
__tracebackhide__ = tracebacks.between  # of an error about an op of the user's

_rules: dict[Any, tuple[Callable[..., Any], str]] = {}  # how `Checked` handles a function, and its name


class Checked(Unchecked):
    """For a body with types."""

    def __init__(self, body: context.Body, adopt: Callable[[Tensor], Tensor], writes: tensor_types.Writes) -> None:
        super().__init__(body, adopt, writes)
        self.sized_by_values = False  # whether the shape of a value that varies was decided by values
        self.compared = not self.ranks and replica_check.looked_for()

    @property
    def everywhere(self) -> Type:
        """The type of what varies over every axis."""
        return types.of(varying=self.body.axes)

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if context.mode() is not self:
            return func(*args, **kwargs or {})
        found = _rules.get(func)
        if found is None:
            kind, name = function_kinds.kind_of(func)
            found = _rules[func] = getattr(Checked, kind), name
        rule, name = found
        out = rule(self, func, name, args, kwargs or {})
        if self.compared and rule not in _GIVES_NO_VALUE and name not in function_kinds.DRAWS:
            replica_check.body_alike(self.body, name, args, kwargs or {}, out, rule in _OPAQUE)
        return out

    def taken_in(self, x: Tensor) -> Tensor:
        """A value from outside as a local one, the same on all ranks. A plain tensor without gradient will do as it is."""
        return (
            self.entered(x) if torch_internals.needs_gradient(x) or isinstance(torch_internals.peel(x), DTensor) else x
        )

    def typeof(self, x: Tensor) -> Type:
        """The type of a local value."""
        return tensor_types.typeof(x, self.body.axes)

    def promoted(self, x: Tensor, have: Type, want: Type) -> Tensor:
        """`x` as a value that varies where `want` does."""
        if have is want or types.promotion(have, want) == ((), ()) or not torch_internals.needs_gradient(x):
            return x
        type_ = types.promoted(have, want)
        return self.remember(x, want, lambda: promote(x, have, want, self.body.mesh), type_)

    def combined(
        self, name: str, args: Any, kwargs: Any, given: Sequence[Tensor], known: Sequence[Type]
    ) -> tuple[Type, Type]:
        """`types.combine`, with a message that names the function and its operands."""
        try:
            unreduced = next((axis for t in known for axis in t.unreduced), None)
            if unreduced is None:
                return types.combine(name, tuple(known), False)
            why = function_kinds.not_linear(name, args, kwargs)
            if why is not None:
                raise types.Misuse(
                    unreduced,
                    f"{name} is not linear here: {why}",
                    f"vfn.psum(x, {unreduced!r}) first, or vfn.psum_scatter",
                )
            return types.combine(name, tuple(known), function_kinds.has_number(args, kwargs))
        except types.Misuse as misuse:
            on = f"on the {mesh_text(axes_of(self.body.mesh))}"
            operands = [
                f"operand {i} is {tensor_types.text(x, t)} {on}"
                for i, (x, t) in enumerate(zip(given, known, strict=True))
            ]
            raise VaryingTypeError(report(name, misuse.why, operands, misuse.instead)) from None

    # One method for each class of functions.

    def function(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """An ordinary function: its operands are brought to one type, which is its result's.

        Here is the short way, for operands that are found at first sight and typed plainly.
        """
        if kwargs and ("out" in kwargs or kwargs.get("inplace")):
            return self.write(func, name, args, kwargs)
        seen = None if self.writes.any or torch_internals.transforming() else at_first_sight(args, kwargs)
        if seen is None:
            return self.combining(func, name, args, kwargs)
        operands, known = seen
        if operands:
            result = known[0]
            if result is None or known.count(result) < len(known):
                if self.ranks:
                    return self.combining(func, name, args, kwargs)
                return self.mixed(func, name, args, kwargs, operands, known)
        elif self.ranks:
            return self.combining(func, name, args, kwargs)
        else:
            result = types.INVARIANT  # a factory
        if not result.plain:
            return self.combining(func, name, args, kwargs)
        return mark_result(func(*args, **kwargs), result, operands)

    def mixed(
        self, func: Any, name: str, args: Any, kwargs: Any, operands: Sequence[Tensor], known: Sequence[Type | None]
    ) -> Any:
        """The short way for operands of several plain types, on a real mesh."""
        outside = None in known
        if outside:
            known = [self.typeof(x) if have is None else have for x, have in zip(operands, known)]
        result = types.union(tuple(known))  # type: ignore[arg-type]
        if result is None:
            return self.combining(func, name, args, kwargs)
        new = None
        for i, x in enumerate(operands):
            if known[i] is not result and x.requires_grad and torch.is_grad_enabled():
                new = new or list(operands)
                new[i] = self.promoted(x, known[i], result)  # type: ignore[arg-type]
        if new is not None:
            operands, its = new, iter(new)
            args, kwargs = _with(args, its), dict(zip(kwargs, _with(kwargs.values(), its))) if kwargs else kwargs
        out = func(*args, **kwargs)
        return tensor_types.mark_made(out, result, operands) if outside else mark_result(out, result, operands)

    def combining(self, func: Any, name: str, args: Any, kwargs: Any, to: Type | None = None) -> Any:
        """`function`, operands of any types; or with all of them brought to varying as `to`."""
        given = op_arguments.tensors_in(args, kwargs)
        if not given:
            out = self.made(func, args, kwargs, draws=to is not None)
            return tensor_types.mark_all(out, to or types.INVARIANT)
        operands = [self.taken_in(x) for x in given]
        known = [self.typeof(x) for x in operands]
        if to is not None:
            known_and_all = (*known, to)
            want, result = self.combined(name, args, kwargs, [*operands, operands[0]], known_and_all)
        else:
            want, result = self.combined(name, args, kwargs, operands, known)
        operands = [self.promoted(x, have, want) for x, have in zip(operands, known, strict=True)]
        if any(a is not b for a, b in zip(operands, given)):
            args, kwargs = op_arguments.with_tensors((args, kwargs), iter(operands))
        return tensor_types.mark_made(func(*args, **kwargs), result, operands)

    def index(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Reading by index, whose slices need numbers."""
        if read := function_kinds.bounds(args[1]):
            self.refuse_to_read("__index__", read)
        while (found := function_kinds.number_in_index(*args)) is not None:
            args = self.taken_at(args[0], *found)
        if function_kinds.has_mask(args[1]):
            return self.sized(func, name, args, kwargs)
        return self.function(func, name, args, kwargs)

    def sized(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A function whose operands' values decide the shape of what it gives, which real ranks compare once it leaves the
        body (of simulated ones the shapes are known)."""
        out = self.function(func, name, args, kwargs)
        if not self.ranks and (name != "where" or len(args) + len(kwargs) == 1):
            self.sized_by_values |= any(self.typeof(x).varying for x in op_arguments.tensors_in(out))
        return out

    def taken_at(self, x: Tensor, dim: int, at: Tensor, rest: tuple[Any, ...]) -> tuple[Any, ...]:
        """``x[at]``, where torch would read the number: the part, of length 1, and the index that is left."""
        position = at.to(torch.int64).reshape(1)
        position = torch.where(position < 0, position + x.shape[dim], position)
        mark(position, self.typeof(at))
        return self.function(torch.index_select, "index_select", (x, dim, position), {}), rest

    def unknown(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """An op that we know nothing about: what it gives varies as its operands do."""
        alike = op_arguments.tensors_in(args, kwargs) and not function_kinds.may_differ(func)
        return self.combining(func, name, args, kwargs, to=None if alike else self.everywhere)

    def draw(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A function that gives each rank something else: uninitialised memory, or from the rank's generator."""
        if name.endswith("dropout") and not kwargs.get("training", args[2] if len(args) > 2 else True):
            return self.combining(func, name, args, kwargs)
        return self.combining(func, name, args, kwargs, to=self.everywhere)

    def write(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A function that writes into an argument. What it writes may differ by rank where the target did not."""
        if name == "__setitem__" and (read := function_kinds.bounds(args[1])):
            self.refuse_to_read("__index__", read)
        if not kwargs and not self.writes.any and args[0].__class__ in LOCAL and not torch_internals.transforming():
            have = getattr(args[0], "vfn_type", None)
            seen = at_first_sight(args, kwargs)
            told = name in function_kinds.DRAWS or (name in _OVERWRITES and have is not types.INVARIANT)
            if seen is not None and have is not None and have.plain and not told:
                base = getattr(torch_internals.base(args[0]), "vfn_type", have)
                if base is have and all(its is have for its in seen[1]) and not tensor_types.is_borrowed(args[0]):
                    return func(*args)  # what is written has the target's type: nothing changes
        into = kwargs["out"] if "out" in kwargs else args[0] if args else kwargs.get("input")
        targets = op_arguments.tensors_in(into)
        if not targets:
            return self.combining(func, name, args, kwargs)
        return self.writing(func, name, args, kwargs, targets, draws=name in function_kinds.DRAWS)

    def refuse_set(self, target: Tensor) -> NoReturn:
        """Refuse `Tensor.set_`, after which the memory of one type is that of another."""
        raise InPlaceError(
            report(
                "set_",
                "this makes a tensor another name for memory of its own choice, which types cannot follow",
                [f"the target is {tensor_types.text(target)}"],
                "a view of the other tensor, such as x.view(...)",
            )
        )

    def writing(self, func: Any, name: str, args: Any, kwargs: Any, targets: list[Tensor], draws: bool = False) -> Any:
        """A function that writes `targets`, which are among its operands."""
        given = op_arguments.tensors_in(args, kwargs)
        mine = set(map(id, targets))
        # an array from outside that may be written has one value on all ranks
        known = [types.INVARIANT if id(x) in mine and self.outside(x) else self.typeof(x) for x in given]
        drawn = (self.everywhere,) if draws else ()
        plain_name = name.strip("_").removeprefix("i") if name.startswith("__i") else name.rstrip("_")
        gone = set(map(id, filter(_is_alone, targets))) if "out" in kwargs or name in _OVERWRITES else ()
        used = [(x, have) for x, have in zip(given, known) if id(x) not in gone]
        operands, types_ = [x for x, _ in used], [have for _, have in used]
        want, result = self.combined(plain_name, args, kwargs, [*operands, *targets[: len(drawn)]], (*types_, *drawn))
        for target, have in zip(given, known):
            if id(target) in mine:
                self.check_write(name, target, have, result)
        operands = [
            x if id(x) in mine else self.promoted(self.taken_in(x), have, want) for x, have in zip(given, known)
        ]
        args, kwargs = op_arguments.with_tensors((args, kwargs), iter(operands))
        out = func(*args, **kwargs)
        for target in targets:
            base = torch_internals.base(torch_internals.peel(target))
            if self.outside(target):
                continue
            if self.typeof(target) is not result or (base is not None and self.typeof(base) is not result):
                tensor_types.retype(target, result)
        return tensor_types.mark_made(out, result, given)

    def aside(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A function that may write arguments without saying so in its name, such as running statistics."""
        targets = function_kinds.written(func, name, args, kwargs)
        if not targets:
            return self.function(func, name, args, kwargs)
        for target in targets:
            if tensor_types.read(target) is None:
                raise InPlaceError(
                    report(
                        name,
                        "this writes into a tensor from outside the body",
                        [f"it is {tensor_types.text(target)}"],
                        "an argument of the body, cloned in it and returned; or a function that writes nothing (eval mode, "
                        "no max_norm)",
                    )
                )
        return self.writing(func, name, args, kwargs, targets)

    def operator(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """An op that we know nothing about, but what it writes."""
        targets = function_kinds.written(func, name, args, kwargs)
        return self.writing(func, name, args, kwargs, targets, draws=function_kinds.may_differ(func))

    def check_write(self, name: str, target: Tensor, have: Type, result: Type) -> None:
        """Raise where a write would reach memory of someone else, or where a gradient would be lost."""
        what = f"the target is {tensor_types.text(target, have)}"
        if tensor_types.is_borrowed(target):
            raise InPlaceError(
                report(
                    name,
                    "this writes into memory that belongs to the caller, or to another value",
                    [what],
                    "x = x.clone() first, or the function without the underscore",
                )
            )
        if have is result:
            return
        if tensor_types.is_lent(target) or torch_internals.needs_gradient(target):
            raise self.widened(name, target, have, result)

    def widened(self, name: str, target: Tensor, have: Type, result: Type) -> VaryingTypeError:
        """The error of a value, from outside the body or with a gradient, that would differ by rank from here on."""
        outside = tensor_types.is_lent(target)
        return VaryingTypeError(
            report(
                name,
                "this writes a value that differs by rank into one that is the same on all of them",
                [
                    f"the target is {tensor_types.text(target, have)}, "
                    f"{'a value from outside the body' if outside else 'which has a gradient'}",
                    f"what is written makes it {tensor_types.text(target, result)}",
                ],
                "the function without the underscore, which makes a new value",
            )
        )

    def gradient(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """`torch.autograd.grad`: its arguments must stay the tensors that they are; a gradient has its primal's type."""
        outputs, inputs = (
            op_arguments.tensors_in(args[i] if len(args) > i else kwargs.get(key))
            for i, key in enumerate(("outputs", "inputs"))
        )
        seeds = args[2] if len(args) > 2 else kwargs.get("grad_outputs")
        if seeds is None and context.is_strict():
            varying = [x for x in outputs if self.typeof(x).varying]
            if varying:
                raise VaryingTypeError(
                    report(
                        "grad",
                        "strict: this differentiates a value that differs by rank, and so the sum over the ranks",
                        [f"the value is {tensor_types.text(x, self.typeof(x))}" for x in varying],
                        f"vfn.psum(loss, {min(self.typeof(varying[0]).varying)!r}) in the function",
                    )
                )
        for seed, x in zip(op_arguments.tensors_in(seeds), outputs) if seeds is not None else ():
            differs = self.typeof(seed).varying - self.typeof(x).varying
            if differs:
                raise VaryingTypeError(
                    report(
                        "grad",
                        "the cotangent differs by rank, where the value is the same on all of them",
                        [
                            f"the value is {tensor_types.text(x, self.typeof(x))}, its cotangent "
                            f"{tensor_types.text(seed, self.typeof(seed))}"
                        ],
                        f"vfn.pvary(value, {min(differs)!r}) in the function, if each rank is to have a cotangent of its own",
                    )
                )
        found = func(*args, **kwargs)
        for gradient, x in zip(found, inputs):
            if gradient is not None and not self.outside(gradient):
                mark(gradient, types.dual(self.typeof(x)))
        return found

    def getter(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """An attribute of a tensor."""
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and not self.outside(out):
            have = self.typeof(args[0])
            tensor_types.mark_made(out, types.dual(have) if name == "grad" else have, args)
            if name == "data":
                tensor_types.note_owner(out, args[0])
        return out

    def dual(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A primal and a tangent become one value, for forward-mode differentiation."""
        refuse_to_be_traced()
        return self.function(func, name, args, kwargs)

    def alias(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """`detach`: another name for the same memory, which torch does not count as a view."""
        out = self.function(func, name, args, kwargs)
        tensor_types.note_owner(out, args[0] if args else kwargs["input"])
        return out

    def setter(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """An attribute of a tensor is set."""
        if name == "data" and isinstance(args[1], Tensor) and tensor_types.read(args[0]) is None:
            have, result = self.typeof(args[0]), self.typeof(args[1])
            if have is not result:
                raise self.widened(".data = ", args[0], have, result)
        func(*args, **kwargs)
        if name == "data":
            mark(args[0], self.typeof(args[1]))
            if tensor_types.is_borrowed(args[1]):
                tensor_types.borrow(args[0])

    def untouched(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A function whose result is no value."""
        return func(*args, **kwargs)

    def number(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A value is read into Python, where ranks must not part."""
        self.refuse_to_read(name, op_arguments.tensors_in(args, kwargs))
        if self.ranks and name in concretization.VALUES:
            below = torch_internals.peel(args[0])
            if type(below) is Blocks and not torch_internals.is_batched(args[0]):
                return func(below.blocks[0].clone(), *args[1:], **kwargs)  # of one rank, as all have the same
        return func(*args, **kwargs)

    def refuse_to_read(self, name: str, values: Sequence[Tensor]) -> None:
        """Raise where one of the values that a function reads into Python differs by rank."""
        found = [(x, self.typeof(x)) for x in values]
        parting = [(x, have) for x, have in found if have.varying or have.unreduced]
        if parting:
            raise concretization.refused(name, parting, self.body.mesh)


_OPAQUE = frozenset((Checked.unknown, Checked.operator))
_GIVES_NO_VALUE = frozenset((Checked.untouched, Checked.getter, Checked.setter, Checked.number, Checked.gradient))


_OVERWRITES = frozenset(("copy_", "fill_", "zero_"))  # of what the target was nothing is left


def _is_alone(x: Tensor) -> bool:
    """Whether no other tensor is known to have a part of this one's memory, and no gradient goes through it."""
    return torch_internals.base(torch_internals.peel(x)) is None and not torch_internals.needs_gradient(x)


def _with(args: Any, new: Iterator[Tensor]) -> tuple[Any, ...]:
    """Arguments that `at_first_sight` could tell, with other tensors."""
    return tuple(
        [
            next(new)
            if a.__class__ in LOCAL
            else a.__class__([next(new) if b.__class__ in LOCAL else b for b in a])
            if a.__class__ is list or a.__class__ is tuple
            else a
            for a in args
        ]
    )
