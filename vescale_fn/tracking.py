"""Running a `shard_map` body: a mode that types every value, promotes where needed, and makes factories each rank's
own.

`Checked` sees each torch function that a body calls, before autograd and `torch.func` do. Functions fall into a few
classes, found by name once and remembered: an ordinary function combines the types of its operands; a write may change
the type of its target; a draw, or an op that nothing is known about, gives a varying result (in doubt that costs a
reduction too many or an error at `out_specs`; calling it invariant could cost a gradient). Promoted values are
remembered, so that the gradient of a weight that is used ten times is reduced once.

On a simulated mesh what a factory makes becomes a `Blocks` with a tensor for each rank, so that a rank's writes are its
own. `Unchecked`, for a body with ``check_vma=False``, does that and sums the gradients of closed-over tensors; on a
real mesh, where nothing is differentiated, such a body has no mode at all.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from . import _torch, context, linear, readout, types
from .blocks import Blocks
from .errors import InPlaceError, TransformError, TypingError, report
from .mesh import is_simulated, played_ranks
from .ops.maps import Collective, enter, promote
from .types import Type, mark

Tensor = torch.Tensor

# --- operands ---------------------------------------------------------------------------------------------------------

_rules: dict[Any, tuple[Callable[..., Any], str]] = {}  # how `Checked` handles a function, and its name
_STATIC = frozenset((int, float, bool, type(None), str, slice, type(...), torch.dtype, torch.device, torch.Size,
                     torch.memory_format, torch.layout, complex))  # fmt: skip


_LOCAL = frozenset((Tensor, Blocks, torch.nn.Parameter))


def _seen(args: Any, kwargs: Any) -> tuple[list[Tensor], list[Type | None]] | None:
    """The tensors among arguments that are simple enough to tell at first sight, and their types; None where one is
    not.
    """
    found, known = [], []
    for a in (*args, *kwargs.values()) if kwargs else args:
        kind = a.__class__
        if kind in _LOCAL:
            found.append(a)
            known.append(getattr(a, "vfn_type", None))
        elif kind is list or kind is tuple:
            for b in a:
                if b.__class__ in _LOCAL:
                    found.append(b)
                    known.append(getattr(b, "vfn_type", None))
                elif b.__class__ not in _STATIC:
                    return None
        elif kind not in _STATIC:
            return None
    return found, known


def _with(args: Any, new: Iterator[Tensor]) -> tuple[Any, ...]:
    """Arguments that `_seen` could tell, with other tensors."""
    return tuple([
        next(new) if a.__class__ in _LOCAL else
        a.__class__([next(new) if b.__class__ in _LOCAL else b for b in a]) if a.__class__ is list or a.__class__ is tuple
        else a for a in args
    ])  # fmt: skip


def _mark_result(out: Any, type_: Type) -> Any:
    """`_mark_all` outside of transforms."""
    if out.__class__ is Tensor or out.__class__ is Blocks:
        out.vfn_type = type_
        if (base := _torch.base(out)) is not None:
            base.vfn_view_type = type_
        return out
    return out if out.__class__ in _STATIC else types.mark_all(out, type_)


class _Active(threading.local):
    run: running | None = None
    mode: Unchecked | None = None  # that of the innermost body


_active = _Active()


# --- the modes --------------------------------------------------------------------------------------------------------


class Unchecked(TorchFunctionMode):
    """For a body without types: on a simulated mesh, what a factory makes is each rank's own."""

    def __init__(self, body: context.Body, adopt: Callable[[Tensor], Tensor], writes: types.Writes) -> None:
        self.body, self.adopt, self.writes = body, adopt, writes
        self.ranks = len(played_ranks(body.mesh)) if is_simulated(body.mesh) else 0
        self.remembered: dict[Any, Any] = {}

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _active.mode is not self:  # of a body around the one that runs
            return func(*args, **kwargs or {})
        seen = None if _torch.transforming() or _torch.dispatch_modes() else _seen(args, kwargs)
        if seen is not None and seen[1] and None not in seen[1]:  # the short way: nothing comes from outside
            return _mark_result(func(*args, **kwargs or {}), types.INVARIANT)
        return self.call(func, getattr(func, "__name__", "?"), args, kwargs or {})

    def call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Any function: what it gives is a value of the body, which tells it from those that come from outside."""
        if name == "_make_dual":
            _refuse_to_be_traced()
        given = types.tensors(args, kwargs)
        if not given:
            return types.mark_all(self.made(func, args, kwargs, draws=name in types.DRAWS), types.INVARIANT)
        if func is not torch.autograd.grad and name not in types.NOT_TYPED:
            new = [self.taken_in(x) for x in given]
            if any(a is not b for a, b in zip(new, given)):
                args, kwargs = types.with_tensors((args, kwargs), iter(new))
                given = new
        return types.mark_made(func(*args, **kwargs), types.INVARIANT, given)

    def made(self, func: Any, args: Any, kwargs: Any, draws: bool) -> Any:
        """What a function without tensor operands makes."""
        out = func(*args, **kwargs)
        if not self.ranks or not isinstance(out, Tensor) or _torch.is_batched(out):
            return out
        one = _torch.peel(out)
        if type(one) is not Tensor:
            return out
        with _torch.no_torch_function():
            again = [func(*args, **kwargs) if draws else one.clone() for _ in range(1, self.ranks)]
            made = Blocks(_torch.peel(x.detach()) for x in (one, *again))
            if _torch.transforming():
                return made.clone()  # a value of the innermost transform, which may be written inside it
            return made.requires_grad_() if out.requires_grad else made

    def taken_in(self, x: Tensor) -> Tensor:
        """A value from outside as a local one, whose gradient is the sum of the ranks'."""
        if types.read(x) is not None:
            return x
        types.refuse_unseen(x)
        entered = self.entered(x)
        if not _torch.needs_gradient(entered):
            return entered
        copy = Collective("copy", self.body.mesh, self.body.axes, "closure")
        return self.remember(x, "copy", lambda: linear.apply(copy, entered)[0])

    def entered(self, x: Tensor) -> Tensor:
        """A whole array, or on a simulated mesh a plain tensor, as a local value."""
        below = _torch.peel(x)
        if isinstance(below, DTensor):
            known = types.read(x) or types.INVARIANT  # typed where it is of a body around this one
            return self.remember(x, "array", lambda: self.adopt(x), known) if self.outside(x) else x
        if self.body.auto is not None and types.read(x) is None and _torch.needs_gradient(x):  # that will be an array
            return self.remember(x, "array", lambda: self.adopt(x))
        if self.ranks and type(below) is not Blocks:
            return self.remember(x, "enter", lambda: enter(x, self.body.mesh))
        return x

    def outside(self, x: Tensor) -> bool:
        """Whether `x` is a whole array from outside of the body."""
        return types.outside(x, self.body.auto)

    def remember(self, x: Tensor, what: Any, make: Callable[[], Tensor], type_: Type = types.INVARIANT) -> Tensor:
        """``make()``, once for each `x` as long as it lives unchanged (and for each level of transforms, and grad mode)."""
        key = (id(x), what, torch.is_grad_enabled(), _torch.level() if _torch.transforming() else 0)
        version = _torch.version(x)
        found = self.remembered.get(key)
        if found is not None and found[0]() is x and found[1] == version:
            return found[2]
        made, remembered = make(), self.remembered
        mark(made, type_)
        remembered[key] = (weakref.ref(x, lambda _: remembered.pop(key, None)), version, made)
        return made


class Checked(Unchecked):
    """For a body with types."""

    def __init__(self, body: context.Body, adopt: Callable[[Tensor], Tensor], writes: types.Writes) -> None:
        super().__init__(body, adopt, writes)
        self.everywhere = types.of(varying=body.axes)

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _active.mode is not self:
            return func(*args, **kwargs or {})
        found = _rules.get(func)
        if found is None:
            kind, name = types.kind_of(func)
            found = _rules[func] = getattr(Checked, kind), name
        rule, name = found
        return rule(self, func, name, args, kwargs or {})

    def taken_in(self, x: Tensor) -> Tensor:
        """A value from outside as a local one, the same on all ranks. A plain tensor without gradient will do as it is."""
        return self.entered(x) if _torch.needs_gradient(x) or isinstance(_torch.peel(x), DTensor) else x

    def typeof(self, x: Tensor) -> Type:
        """The type of a local value."""
        return types.typeof(x, self.body.axes)

    def promoted(self, x: Tensor, have: Type, want: Type) -> Tensor:
        """`x` as a value that varies where `want` does."""
        if have is want or types.promotion(have, want) == ((), ()) or not _torch.needs_gradient(x):
            return x
        type_ = types.promoted(have, want)
        return self.remember(x, want, lambda: promote(x, have, want, self.body.mesh), type_)

    def combined(self, name: str, args: Any, kwargs: Any, given: Sequence[Tensor],
                 known: Sequence[Type]) -> tuple[Type, Type]:  # fmt: skip
        """`types.combine`, with a message that names the function and its operands."""
        try:
            unreduced = next((axis for t in known for axis in t.unreduced), None)
            if unreduced is None:
                return types.combine(name, tuple(known), False)
            why = types.not_linear(name, args, kwargs)
            if why is not None:
                raise types.Misuse(unreduced, f"{name} is not linear here: {why}",
                                   f"vfn.psum(x, {unreduced!r}) first, or vfn.psum_scatter")  # fmt: skip
            return types.combine(name, tuple(known), types.has_number(args, kwargs))
        except types.Misuse as misuse:
            operands = [f"operand {i} is {types.text(x, t)}" for i, (x, t) in enumerate(zip(given, known, strict=True))]
            raise TypingError(report(name, misuse.why, operands, misuse.instead)) from None

    # One method for each class of functions.

    def function(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """An ordinary function: its operands are brought to one type, which is its result's.

        Here is the short way, for operands that are found at first sight and typed plainly.
        """
        if kwargs and ("out" in kwargs or kwargs.get("inplace")):
            return self.write(func, name, args, kwargs)
        seen = None if self.writes.any or _torch.transforming() else _seen(args, kwargs)
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
        return _mark_result(func(*args, **kwargs), result)

    def mixed(self, func: Any, name: str, args: Any, kwargs: Any, operands: Sequence[Tensor],
              known: Sequence[Type | None]) -> Any:  # fmt: skip
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
        return types.mark_made(out, result, operands) if outside else _mark_result(out, result)

    def combining(self, func: Any, name: str, args: Any, kwargs: Any, to: Type | None = None) -> Any:
        """`function`, operands of any types; or with all of them brought to varying as `to`."""
        given = types.tensors(args, kwargs)
        if not given:
            out = self.made(func, args, kwargs, draws=to is not None)
            return types.mark_all(out, to or types.INVARIANT)
        operands = [self.taken_in(x) for x in given]
        known = [self.typeof(x) for x in operands]
        if to is not None:
            known_and_all = (*known, to)
            want, result = self.combined(name, args, kwargs, [*operands, operands[0]], known_and_all)
        else:
            want, result = self.combined(name, args, kwargs, operands, known)
        operands = [self.promoted(x, have, want) for x, have in zip(operands, known, strict=True)]
        if any(a is not b for a, b in zip(operands, given)):
            args, kwargs = types.with_tensors((args, kwargs), iter(operands))
        return types.mark_made(func(*args, **kwargs), result, operands)

    def unknown(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """An op that we know nothing about: it may talk to other ranks, or draw."""
        return self.combining(func, name, args, kwargs, to=self.everywhere)

    def draw(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A function that gives each rank something else: uninitialised memory, or from the rank's generator."""
        if name.endswith("dropout") and not kwargs.get("training", args[2] if len(args) > 2 else True):
            return self.combining(func, name, args, kwargs)
        return self.combining(func, name, args, kwargs, to=self.everywhere)

    def write(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A function that writes into an argument. What it writes may differ by rank where the target did not."""
        if not kwargs and not self.writes.any and args[0].__class__ in _LOCAL and not _torch.transforming():
            have = getattr(args[0], "vfn_type", None)
            seen = _seen(args, kwargs)
            if seen is not None and have is not None and have.plain and name not in types.DRAWS:
                base = getattr(_torch.base(args[0]), "vfn_type", have)
                if base is have and all(its is have for its in seen[1]) and not types.is_borrowed(args[0]):
                    return func(*args)  # what is written has the target's type: nothing changes
        if name == "set_":
            raise InPlaceError(report(
                name, "this makes a tensor another name for memory of its own choice, which types cannot follow",
                [f"the target is {types.text(args[0])}"], "a view of the other tensor, such as x.view(...)"))  # fmt: skip
        into = kwargs["out"] if "out" in kwargs else args[0] if args else kwargs.get("input")
        targets = types.tensors(into)
        if not targets:
            return self.combining(func, name, args, kwargs)
        return self.writing(func, name, args, kwargs, targets, draws=name in types.DRAWS)

    def writing(self, func: Any, name: str, args: Any, kwargs: Any, targets: list[Tensor], draws: bool = False) -> Any:
        """A function that writes `targets`, which are among its operands."""
        given = types.tensors(args, kwargs)
        known = [self.typeof(x) for x in given]
        drawn = (self.everywhere,) if draws else ()
        plain_name = name.strip("_").removeprefix("i") if name.startswith("__i") else name.rstrip("_")
        want, result = self.combined(plain_name, args, kwargs, [*given, *targets[: len(drawn)]], (*known, *drawn))
        for target in targets:
            self.check_write(name, target, self.typeof(target), result)
        mine = set(map(id, targets))
        operands = [
            x if id(x) in mine else self.promoted(self.taken_in(x), have, want) for x, have in zip(given, known)
        ]
        args, kwargs = types.with_tensors((args, kwargs), iter(operands))
        out = func(*args, **kwargs)
        for target in targets:
            base = _torch.base(_torch.peel(target))
            if self.typeof(target) is not result or (base is not None and self.typeof(base) is not result):
                types.retype(target, result)
        return types.mark_all(out, result)

    def aside(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A function that may write arguments without saying so in its name, such as running statistics."""
        targets = types.written(func, name, args, kwargs)
        if not targets:
            return self.function(func, name, args, kwargs)
        for target in targets:
            if types.read(target) is None:
                raise InPlaceError(report(
                    name, "this writes into a tensor from outside the body", [f"it is {types.text(target)}"],
                    "an argument of the body, cloned in it and returned; or a function that writes nothing (eval mode, "
                    "no max_norm)"))  # fmt: skip
        return self.writing(func, name, args, kwargs, targets)

    def operator(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """An op that we know nothing about, but what it writes."""
        return self.writing(func, name, args, kwargs, types.written(func, name, args, kwargs), draws=True)

    def check_write(self, name: str, target: Tensor, have: Type, result: Type) -> None:
        """Raise where a write would reach memory of someone else, or where a gradient would be lost."""
        what = f"the target is {types.text(target, have)}"
        if types.is_borrowed(target):
            raise InPlaceError(report(
                name, "this writes into memory that belongs to the caller, or to another value", [what],
                "x = x.clone() first, or the function without the underscore"))  # fmt: skip
        if have is result:
            return
        outside = types.read(target) is None
        if outside or _torch.needs_gradient(target):
            raise TypingError(report(
                name, "this writes a value that differs by rank into one that is the same on all of them",
                [f"{what}, {'a value from outside the body' if outside else 'which has a gradient'}",
                 f"what is written makes it {types.text(target, result)}"],
                "the function without the underscore, which makes a new value"))  # fmt: skip

    def gradient(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """`torch.autograd.grad`: its arguments must stay the tensors that they are; a gradient has its primal's type."""
        outputs, inputs = (
            types.tensors(args[i] if len(args) > i else kwargs.get(key)) for i, key in enumerate(("outputs", "inputs"))
        )
        seeds = args[2] if len(args) > 2 else kwargs.get("grad_outputs")
        if seeds is None and context.is_strict():
            varying = [x for x in outputs if self.typeof(x).varying]
            if varying:
                raise TypingError(report(
                    "grad", "strict: this differentiates a value that differs by rank, and so the sum over the ranks",
                    [f"the value is {types.text(x, self.typeof(x))}" for x in varying],
                    f"vfn.psum(loss, {min(self.typeof(varying[0]).varying)!r}) in the function"))  # fmt: skip
        for seed, x in zip(types.tensors(seeds), outputs) if seeds is not None else ():
            differs = self.typeof(seed).varying - self.typeof(x).varying
            if differs:
                raise TypingError(report(
                    "grad", "the cotangent differs by rank, where the value is the same on all of them",
                    [f"the value is {types.text(x, self.typeof(x))}, its cotangent {types.text(seed, self.typeof(seed))}"],
                    f"vfn.pvary(value, {min(differs)!r}) in the function, if each rank is to have a cotangent of its own"
                ))  # fmt: skip
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
            types.mark_made(out, types.dual(have) if name == "grad" else have, args)
            if name == "data" and types.is_borrowed(args[0]):
                types.borrow(out)
        return out

    def dual(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A primal and a tangent become one value, for forward-mode differentiation."""
        _refuse_to_be_traced()
        return self.function(func, name, args, kwargs)

    def alias(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """`detach`: another name for the same memory, which torch does not count as a view."""
        out = self.function(func, name, args, kwargs)
        if types.is_borrowed(args[0] if args else kwargs["input"]):
            types.borrow(out)
        return out

    def setter(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """An attribute of a tensor is set."""
        func(*args, **kwargs)
        if name == "data":
            mark(args[0], self.typeof(args[1]))
            if types.is_borrowed(args[1]):
                types.borrow(args[0])

    def untouched(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A function whose result is no value."""
        return func(*args, **kwargs)

    def number(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A value is read into Python, where ranks must not part."""
        found = [(x, self.typeof(x)) for x in types.tensors(args, kwargs)]
        parting = [(x, have) for x, have in found if have.varying or have.unreduced]
        if parting:
            raise readout.refused(name, parting, self.body.mesh)
        if self.ranks and name in readout.VALUES:
            below = _torch.peel(args[0])
            if type(below) is Blocks and not _torch.is_batched(args[0]):
                return func(below.blocks[0].clone(), *args[1:], **kwargs)  # of one rank, as all have the same
        return func(*args, **kwargs)


def _refuse_to_be_traced() -> None:
    """What `torch.func.linearize` plays back later has no types: its results would all count as invariant."""
    if _torch.dispatch_modes() and _torch.is_traced():
        raise TransformError(report(
            "torch.func.linearize", "inside a shard_map body it would lose the types of local values, and so gradients",
            fix="vfn.linearize(f, *primals), which gives the same pair; or torch.func.linearize outside of the shard_map"
        ))  # fmt: skip


# --- entering and leaving ---------------------------------------------------------------------------------------------


_intercepting = 0
_lock = threading.Lock()


class running:
    """A context in which a body runs: its axes are manual, its values typed.

    Args:
        body: mesh, axes, and whether types are checked.
        adopt: makes a local value of a whole array that the body closes over.
        intercepted: False where nothing needs watching: no types, a real mesh, no gradient.
        writes: those of a body that is entered again.
    """

    __slots__ = ("_before", "_body_before", "_mode", "_mode_before", "_writes_before", "adopt", "body", "intercepted",
                 "writes")  # fmt: skip

    def __init__(self, body: context.Body, adopt: Callable[[Tensor], Tensor], intercepted: bool = True,
                 writes: types.Writes | None = None) -> None:  # fmt: skip
        self.body, self.adopt, self.intercepted = body, adopt, intercepted
        self.writes = writes or types.Writes()

    def __enter__(self) -> running:
        global _intercepting
        body = self.body
        mode = Checked if body.check else Unchecked
        self._mode = mode(body, self.adopt, self.writes) if self.intercepted else None
        self._writes_before = types.swap_writes(self.writes if self._mode is not None else None)
        self._before, _active.run = _active.run, self
        self._mode_before, _active.mode = _active.mode, self._mode
        self._body_before = context.swap_body(body)
        if self._mode is not None:
            with _lock:
                _intercepting += 1
                if _intercepting == 1:
                    _torch.intercept_function_apply(_function_apply)
                    _torch.intercept_reverse_mode(_differentiated_by)
                    _torch.intercept_checkpoint(computed_again)
                    _torch.run_compiled_as_written(True)
            self._mode.__enter__()
        return self

    def taken_in(self, x: Tensor) -> Tensor:
        """A result as a local value, which it is not yet where the body gives back what it closes over."""
        with _torch.no_torch_function():
            if self._mode is None or types.read(x) is not None:
                return x
            types.refuse_unseen(x)
            return self._mode.taken_in(x)

    def __exit__(self, *exception: Any) -> None:
        global _intercepting
        if self._mode is not None:
            self._mode.__exit__(*exception)
            with _lock:
                _intercepting -= 1
                if _intercepting == 0:
                    _torch.intercept_function_apply(None)
                    _torch.intercept_reverse_mode(None)
                    _torch.intercept_checkpoint(None)
                    _torch.run_compiled_as_written(False)
        context.swap_body(self._body_before)
        types.swap_writes(self._writes_before)
        _active.run, _active.mode = self._before, self._mode_before


def _differentiated_by(x: Tensor) -> Tensor:
    """What a gradient inside a body without types is taken by: a tensor from outside becomes the rank's own first, or its
    gradient would be the ranks' sum."""
    mode = _active.mode
    if mode is None or isinstance(mode, Checked) or not _torch.function_mode_on():
        return x
    with _torch.no_torch_function():
        x = mode.taken_in(x)
        if types.read(x) is None:  # on a real rank one without gradient is good as it is, but for its name
            (x,) = linear.apply(Collective("copy", mode.body.mesh, mode.body.axes, "closure"), x)
            mark(x, types.INVARIANT)
        return x


def _function_apply(cls: Any, apply: Any, args: Any, kwargs: Any) -> Any:
    """A user's `autograd.Function` in a body: no mode sees it, and its backward may do anything."""
    run = _active.run
    mode = run._mode if run is not None else None
    ours = cls.__module__ == linear.__name__ or cls is _torch.checkpoint_saver
    if mode is None or ours or not _torch.function_mode_on():
        return apply(*args, **kwargs)
    if cls is _torch.checkpoint_function:
        function, _, *given = args
        if not any(_torch.needs_gradient(x) for x in types.tensors(given)):
            return function(*given)
        raise TransformError(report(
            "torch.utils.checkpoint", "with use_reentrant=True the backward pass computes the function again outside of the "
            "shard_map body", fix="vfn.remat(f)(...), or checkpoint(f, ..., use_reentrant=False)"))  # fmt: skip
    if not isinstance(mode, Checked):
        return mode.call(apply, cls.__name__, args, kwargs)
    return mode.combining(apply, f"{cls.__name__}.apply", args, kwargs, to=mode.everywhere)


def capture() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A function that enters the present body again, for what is computed anew during a backward pass.

    Modes are off there, and the thread may be another one.
    """
    run = _active.run
    if run is None:
        return contextlib.nullcontext
    return lambda: running(run.body, run.adopt, run.intercepted, run.writes)


def computed_again(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Callable[..., Any], context.Again]:
    """`fn` for a call with these arguments that a backward pass makes anew, and what it runs in.

    In a nest of checkpoints the arguments are other tensors then, which have lost their types.
    """
    known = [(types.read(x), types.is_borrowed(x)) for x in types.tensors(args, kwargs)]

    def again(*args: Any, **kwargs: Any) -> Any:
        with _torch.no_torch_function():
            for x, (type_, borrowed) in zip(types.tensors(args, kwargs), known, strict=True):
                if type_ is not None and types.own(x) is None:  # its base may have that of another view
                    mark(x, type_)
                    if borrowed:
                        types.borrow(x)
        return fn(*args, **kwargs)

    return again, context.Again(context.captured(), capture())
