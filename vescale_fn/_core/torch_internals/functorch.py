"""Wrappers and levels of `torch.func`'s transforms."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch._C._functorch as _functorch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter as _retrieve
from torch.autograd import forward_ad as _forward_ad
from torch.autograd.function import _SingleLevelFunction


def peel(x: torch.Tensor) -> torch.Tensor:
    """The tensor below all functorch wrappers (which hide a subclass and its attributes)."""
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


no_transforms = torch._C._DisableFuncTorch  # inside, transforms do not see what is done to plain tensors


def batch_dims(x: torch.Tensor) -> list[int]:
    """The dims that `vmap`s have taken out of view, to be removed from the innermost tensor's dims in this order."""
    found = []
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            found.append(_functorch.maybe_get_bdim(x))
        x = _functorch.get_unwrapped(x)
    return found[::-1]


def is_batched(x: torch.Tensor) -> bool:
    """Whether some wrapper around `x` is of a `vmap`."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


def is_mapped(x: torch.Tensor) -> bool:
    """Whether the innermost active transform is a `vmap`, and `x` differs between its entries."""
    return _functorch.is_batchedtensor(x) and _functorch.maybe_get_level(x) == _functorch.maybe_current_level()


transforming = torch._C._are_functorch_transforms_active  # whether `torch.func.grad`, `vmap`, ... is active


def only_mapping() -> bool:
    """Whether the transforms that are active are `vmap` alone."""
    return all(one.key().name == "Vmap" for one in _functorch.get_interpreter_stack() or ())


_functorch_depth = _functorch.get_dynamic_layer_stack_depth


_functorch_active = torch._C._are_functorch_transforms_active


def level() -> int:
    """How deep functorch's transforms are nested at this point."""
    return _functorch.maybe_current_level() or 0


def follower(xs: Iterable[torch.Tensor], hidden: Collection[int] = (), forward: bool = True) -> int | None:
    """The level of the innermost transform that differentiates by one of these tensors, but for those `hidden`: 0 for
    autograd itself; None where nothing does.

    Without `forward` those in forward mode are left out; with it, all that a `jvp` has wrapped counts as followed by it."""
    reverse, found = torch.is_grad_enabled(), -1
    jvps = [one.level() for one in _functorch.get_interpreter_stack() or () if "Jvp" in str(one.key())]
    for x in xs:
        while _functorch.is_functorch_wrapped_tensor(x):
            if _functorch.is_gradtrackingtensor(x):
                at = _functorch.maybe_get_level(x)
                reached = at > found and at not in hidden
                if reached and ((reverse and x.requires_grad) or (forward and at in jvps)):
                    found = at
            x = _functorch.get_unwrapped(x)
        if found < 0 and 0 not in hidden and ((reverse and x.requires_grad) or (forward and is_dual(x))):
            found = 0
    return None if found < 0 else found


def is_about_levels(error: RuntimeError) -> bool:
    """Whether functorch says that a tensor belongs to a transform that does not run at this point."""
    said = str(error)
    return "INTERNAL ASSERT FAILED" in said and ("level <= current_level" in said or "batched == nullptr" in said)


def is_dual(x: torch.Tensor) -> bool:
    """Whether `x`, which no transform wraps, has a tangent of `torch.autograd.forward_ad`."""
    if _forward_ad._current_level < 0:
        return False
    with no_transforms():
        return _forward_ad.unpack_dual(x).tangent is not None


def raw_duals() -> bool:
    """Whether dual numbers are in use outside of `jvp`."""
    stack = _functorch.get_interpreter_stack() or ()
    return _forward_ad._current_level >= 0 and not any("Jvp" in str(one.key()) for one in stack)


def active_layers() -> list[Any]:
    """The transforms that are active, outermost first, for `layers_above`."""
    found = [_functorch.pop_dynamic_layer_stack() for _ in range(_functorch_depth())][::-1]
    for layer in found:
        _functorch.push_dynamic_layer_stack(layer)
    return found


@contextlib.contextmanager
def layers_above(layers: Sequence[Any]) -> Iterator[None]:
    """A block in which those of these layers are active again that have been taken off to run what is below them."""
    missing = layers[_functorch_depth() :]
    for layer in missing:
        _functorch.push_dynamic_layer_stack(layer)
    try:
        yield
    finally:
        for _ in missing:
            _functorch.pop_dynamic_layer_stack()


def below(x: torch.Tensor, level: int) -> torch.Tensor | None:
    """What is left of `x` below the transforms that are further in than this level; None where they map or follow it."""
    while _functorch.is_functorch_wrapped_tensor(x) and _functorch.maybe_get_level(x) > level:
        if x.requires_grad or not _functorch.is_gradtrackingtensor(x):
            return None
        x = _functorch.get_unwrapped(x)
    return x


def below_ended(x: torch.Tensor) -> torch.Tensor | None:
    """What is left of `x` below the transform that had wrapped it, where that is over; None elsewhere."""
    wrapped = _functorch.is_functorch_wrapped_tensor(x) and _functorch.is_dead_tensor_wrapper(x)
    return _functorch.get_unwrapped(x) if wrapped else None


class _Layer:
    """A transform of `torch.func`, the innermost that is active, which can be taken off and put on again."""

    def __init__(self, interpreter: Any) -> None:
        self.level: int = interpreter.level()

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """A block in which it is not active."""
        self._layer = _functorch.pop_dynamic_layer_stack()
        try:
            yield
        finally:
            _functorch.push_dynamic_layer_stack(self._layer)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """A block, in one of `off`, in which it is active."""
        _functorch.push_dynamic_layer_stack(self._layer)
        try:
            yield
        finally:
            _functorch.pop_dynamic_layer_stack()


class VmapLayer(_Layer):
    """A `vmap`. What it wraps has one more dim; a form says whether that is so."""

    lasts = True  # values are wrapped as well when it is over

    def __init__(self, interpreter: Any) -> None:
        super().__init__(interpreter)
        self.size: int = interpreter.batch_size()

    def form(self, x: torch.Tensor) -> bool:
        """Whether `x` differs between the entries."""
        return _functorch.is_batchedtensor(x) and _functorch.maybe_get_level(x) == self.level

    def parts(self, x: torch.Tensor, form: bool, dim: int) -> list[torch.Tensor]:
        """What it wraps, with the entries along `dim`."""
        if self.form(x):
            return [_functorch.get_unwrapped(x).movedim(_functorch.maybe_get_bdim(x), dim)]
        return [x.unsqueeze(dim).expand(*x.shape[:dim], self.size, *x.shape[dim:])] if form else [x]

    def whole(self, parts: Iterator[torch.Tensor], form: bool, dim: int) -> torch.Tensor:
        """The value of the next parts."""
        return _functorch._add_batch_dim(next(parts), dim, self.level) if form else next(parts)


class JvpLayer(_Layer):
    """A `jvp`. What it wraps has perhaps a tangent; a form says whether that is so."""

    lasts = False

    def form(self, x: torch.Tensor) -> bool:
        """Whether `x` has a tangent."""
        return _forward_ad.unpack_dual(x).tangent is not None

    def parts(self, x: torch.Tensor, form: bool, dim: int) -> list[torch.Tensor]:
        """The primal, and the tangent."""
        with self.on():
            primal, tangent = _forward_ad.unpack_dual(x)
            primal = _functorch._unwrap_for_grad(primal, self.level)
            if tangent is not None:
                tangent = _functorch._unwrap_for_grad(tangent, self.level)
        return [primal, torch.zeros_like(primal) if tangent is None else tangent] if form else [primal]

    def whole(self, parts: Iterator[torch.Tensor], form: bool, dim: int) -> torch.Tensor:
        """The value of the next parts."""
        primal = next(parts)
        return _forward_ad.make_dual(primal, next(parts)) if form else primal


class GradLayer(_Layer):
    """A `grad` or `vjp` of `torch.func`; there is one form."""

    lasts = False

    def __init__(self, interpreter: Any) -> None:
        super().__init__(interpreter)
        self._follows_below: bool = interpreter.prev_grad_mode()
        self._mark: torch.Tensor | None = None  # one of its wrappers, which knows when it is over

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        with super().off(), torch.set_grad_enabled(self._follows_below):
            yield

    def form(self, x: torch.Tensor) -> bool:
        """The form."""
        return True

    def parts(self, x: torch.Tensor, form: bool, dim: int) -> list[torch.Tensor]:
        """What it wraps."""
        return [_functorch._unwrap_for_grad(x, self.level)]

    def whole(self, parts: Iterator[torch.Tensor], form: bool, dim: int) -> torch.Tensor:
        """The value of the next part."""
        found = self._mark = _functorch._wrap_for_grad(next(parts), self.level)
        return found

    @property
    def is_on(self) -> bool:
        """Whether it is the innermost transform, or (again) on."""
        return _functorch.maybe_current_level() == self.level and not self.is_over

    @property
    def is_over(self) -> bool:
        """Whether it has come to its end, so that its wrappers count for nothing."""
        return self._mark is not None and below_ended(self._mark) is not None

    def followed(self, x: torch.Tensor) -> torch.Tensor | None:
        """What of `x`, under transforms that are further in, this one follows; None where that is nothing."""
        while _functorch.is_functorch_wrapped_tensor(x) and _functorch.maybe_get_level(x) > self.level:
            x = _functorch.get_unwrapped(x)
        ours = _functorch.is_gradtrackingtensor(x) and _functorch.maybe_get_level(x) == self.level
        return x if ours and x.requires_grad else None

    def apply(self, results: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], back: Any, *xs: torch.Tensor) -> Any:
        """These results, whose cotangents ``back(kept, cotangents)`` turns into those of `xs`, as this transform sees it."""
        with _enable_single_level():
            return _OneLevel.apply(results, kept, back, *xs)


class _OneLevel(_SingleLevelFunction):
    """A Function for the innermost transform alone."""

    @staticmethod
    def forward(results: Any, kept: Any, back: Any, *xs: torch.Tensor) -> Any:
        return tuple(results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, kept, ctx.back, *_ = inputs
        places = {id(x): i for i, x in enumerate(inputs[0])}
        ctx.save_for_backward(*(output[places[id(x)]] if id(x) in places else x for x in kept))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return None, None, None, *ctx.back(ctx.saved_tensors, cotangents)


@contextlib.contextmanager
def _enable_single_level() -> Iterator[None]:
    before = _functorch.get_single_level_autograd_function_allowed()
    _functorch.set_single_level_autograd_function_allowed(True)
    try:
        yield
    finally:
        _functorch.set_single_level_autograd_function_allowed(before)


@contextlib.contextmanager
def new_gradient() -> Iterator[GradLayer]:
    """A block in a transform of its own, as `torch.func.grad` begins one."""
    before = torch.is_grad_enabled()
    _functorch._grad_increment_nesting()
    try:
        yield GradLayer(_retrieve())
    finally:
        _functorch._grad_decrement_nesting()
        torch.set_grad_enabled(before)


def begin_following(x: torch.Tensor) -> torch.Tensor:
    """`x`, which is new, as a variable that autograd follows, or the innermost transform."""
    before = _functorch.get_inplace_requires_grad_allowed()
    _functorch.set_inplace_requires_grad_allowed(True)
    try:
        return x.requires_grad_()
    finally:
        _functorch.set_inplace_requires_grad_allowed(before)


def innermost_layer() -> Any:
    """The innermost transform that is active, where a function can be run below it; False for another one, None for none."""
    interpreter = _retrieve() if transforming() else None
    if interpreter is None:
        return None
    kinds: dict[str, Any] = {"Vmap": VmapLayer, "Jvp": JvpLayer, "Grad": GradLayer}
    return kinds[interpreter.key().name](interpreter) if interpreter.key().name in kinds else False
