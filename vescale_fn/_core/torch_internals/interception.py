"""Autograd Functions, gradients of `torch.func` and checkpoints, with a handler asked before them.

A handler is at work from the first time that it is needed on, and concerns only those threads that are in a body: outside of
one, and where `torch.compile` traces, torch goes on as if nothing were there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch._C._functorch as _functorch
import torch.utils._pytree as _pytree
from torch._functorch import eager_transforms as _eager_transforms
from torch._functorch import pyfunctorch as _pyfunctorch
from torch.utils import checkpoint as _checkpoint

from .functorch import _functorch_active
from .modes import compiled_runs_unseen, is_compiling, is_traced, never_recorded, settle

_functions: Any = torch.autograd.function
_Level: Any = getattr(_functions, "_SingleLevelFunction", None) or torch.autograd.Function.__mro__[1]
_apply_under_functorch: Any = _functions.custom_function_call
_at_work: dict[str, tuple[Any, Any]] = {}  # the handlers, and whom they concern
_ours: set[type] = set()  # Functions that `apply` below has applied: nobody needs to be asked about them


def intercept_function_apply(handler: Any, concerned: Any = None) -> None:
    """Send each application of an `autograd.Function`, where ``concerned()`` holds, to ``handler(cls, apply, args, kwargs)``;
    None ends that.

    `Function.apply` is left alone, since programs keep it under names of their own (``relu = Relu.apply``). It ends in one
    of these two: without a functorch transform, and with one.
    """
    _at_work["apply"] = handler, concerned
    if handler is None:
        _functions.custom_function_call = _apply_under_functorch
    else:
        applied, _functions.custom_function_call = _appliers(handler, concerned)
    if isinstance(vars(torch.autograd.Function)["apply"], classmethod):  # written in Python
        if handler is not None:
            _Level.apply = applied
        elif "apply" in vars(_Level):
            del _Level.apply
    elif handler is None:
        _end_detour()  # begun where an interrupt came
        _functions._bind_default_args, _functions._call_custom_function_call = _bind, _call_under_functorch
        if "setup_context" in vars(_functions.FunctionMeta):
            del _functions.FunctionMeta.setup_context
    else:
        asked, _functions._bind_default_args, _functions._call_custom_function_call = _detour(handler, concerned)
        _functions.FunctionMeta.setup_context = asked


def settle_before_autograd() -> None:
    """From here on have what a recording has put off done before an `autograd.Function` is applied, `torch.func` takes a
    gradient, or a checkpoint begins, of which no mode learns."""
    for name, intercept in _BEFORE_AUTOGRAD.items():
        if _at_work.get(name, (None,))[0] is None:
            intercept(_nobody_asks, bool)


def _nobody_asks(*given: Any) -> Any:
    raise AssertionError("a handler that concerns nobody is asked")


def _settled(concerned: Any) -> Any:
    """The same question, before which what a recording has put off is done."""

    def asked() -> Any:
        settle()
        return concerned()

    return asked


@functools.lru_cache(maxsize=1)
def _appliers(handler: Any, concerned: Any) -> tuple[Any, Any]:
    concerned = _settled(concerned)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        plain = super(_Level, cls).apply
        if is_compiling() or not concerned() or not issubclass(cls, torch.autograd.Function):
            return plain(*args, **kwargs)
        return handler(cls, plain, args, kwargs)

    def under_functorch(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not concerned():
            return _apply_under_functorch(cls, *args, **kwargs)
        return handler(cls, functools.partial(_apply_under_functorch, cls), args, kwargs)

    return classmethod(apply), under_functorch


def all_is_seen() -> bool:
    """Whether `unseen` is empty: asked at each body."""
    return _functions_are_seen() and _gradients_are_seen() and _checkpoints_are_seen() and not compiled_runs_unseen()


def unseen() -> list[str]:
    """What this torch does in a way that nothing below intercepts: a gradient could be silently wrong."""
    missing = {
        "autograd.Functions are applied": not _functions_are_seen(),
        "torch.func takes gradients": not _gradients_are_seen(),
        "torch.utils.checkpoint computes again": not _checkpoints_are_seen(),
        "torch.compile runs what it has made": compiled_runs_unseen(),
    }
    return [what for what, is_missing in missing.items() if is_missing]


@contextlib.contextmanager
def _instead(intercept: Any, name: str, handler: Any) -> Iterator[None]:
    """Within the block, this handler is at work in place of another."""
    before = _at_work.get(name, (None, None))
    intercept(handler, lambda: True)
    try:
        yield
    finally:
        intercept(*before)


@functools.cache
@never_recorded
def _functions_are_seen() -> bool:
    """Whether this torch can be intercepted so: tried once, on an `apply` that was kept under a name."""

    class FunctionProbe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x + 1

    seen: list[Any] = []

    def handler(cls: Any, apply: Any, args: Any, kwargs: Any) -> Any:
        seen.append(cls)
        return apply(*args, **kwargs)

    apply = FunctionProbe.apply
    with (
        _instead(intercept_function_apply, "apply", handler),
        _pyfunctorch.temporarily_clear_interpreter_stack(),  # the first body may be under a transform
    ):
        answer = apply(torch.zeros((), device="cpu"))
        alone = not _functorch_active()
    return seen == [FunctionProbe] and answer.item() == 1 and alone


def _in_a_thread_of_its_own(fn: Any, *args: Any, **kwargs: Any) -> None:
    """Call `fn` where no mode, transform, hook or inference mode is on; what it raises is no matter."""

    def run() -> None:
        with contextlib.suppress(Exception):
            fn(*args, **kwargs)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@functools.cache
@never_recorded
def _gradients_are_seen() -> bool:
    """Whether `torch.func` asks `intercept_reverse_mode`'s handler where it begins: tried once, with each of its functions."""
    seen: list[Any] = []

    def handler(x: Any) -> Any:
        seen.append(x)
        return x

    x = torch.zeros((), device="cpu")
    with _instead(intercept_reverse_mode, "gradient", handler):
        for differentiate in (torch.func.grad, torch.func.jacrev, lambda f: lambda x: torch.func.vjp(f, x)):
            _in_a_thread_of_its_own(differentiate(torch.clone), x)
    return sum(one is x for one in seen) == 3


@functools.cache
@never_recorded
def _checkpoints_are_seen() -> bool:
    """Whether `torch.utils.checkpoint` asks `intercept_checkpoint`'s handler: tried once."""
    seen: list[Any] = []

    def handler(fn: Any, args: Any, kwargs: Any) -> Any:
        seen.append(fn)
        return fn, contextlib.nullcontext()

    with _instead(intercept_checkpoint, "checkpoint", handler):
        _in_a_thread_of_its_own(
            _checkpoint.checkpoint,
            torch.clone,
            torch.zeros((), device="cpu"),
            use_reentrant=False,
            preserve_rng_state=False,
        )
    return seen == [torch.clone]


_bind: Any = getattr(_functions, "_bind_default_args", None)
_call_under_functorch: Any = getattr(_functions, "_call_custom_function_call", None)
_detouring = threading.local()  # .level: whether a functorch level is open that only leads to the handler


@functools.lru_cache(maxsize=1)
def _detour(handler: Any, concerned: Any) -> tuple[Any, Any, Any]:
    """What an `apply` written in C calls: it can neither be replaced nor does it tell a mode.

    It asks the class for its `setup_context`, has a function of Python bind the arguments to it, and then, if a functorch
    transform is active, hands everything over to another. So that question opens a level of functorch, nothing is bound
    yet, and the last function closes the level again. The handler applies a subclass in the place of the class, for which
    the question opens nothing.
    """

    concerned = _settled(concerned)

    def for_the_stand_in() -> None: ...

    def asked(cls: Any) -> Any:
        if (
            not _functorch_active()
            and cls not in _ours
            and "_applied_for" not in vars(cls)
            and issubclass(cls, torch.autograd.Function)
            and not is_compiling()
            and concerned()
        ):
            _detouring.level = True
            _functorch._grad_increment_nesting()
            return for_the_stand_in
        owner = next(c for c in cls.__mro__ if "setup_context" in vars(c))
        return vars(owner)["setup_context"].__get__(None, cls)

    def bound(forward: Any, args: Any, kwargs: Any = None) -> tuple[Any, Any]:
        return (args, kwargs or {}) if getattr(_detouring, "level", False) else _bind(forward, args, kwargs)

    def called(cls: Any, args: Any, kwargs: Any) -> Any:
        if not _end_detour():
            return _call_under_functorch(cls, args, kwargs)
        return handler(cls, _stand_in(cls).apply, args, kwargs or {})

    return property(asked), bound, called


def _end_detour() -> bool:
    """Close the level of functorch that leads to the handler; whether there was one."""
    if not getattr(_detouring, "level", False):
        return False
    _detouring.level = False
    _functorch._grad_decrement_nesting()
    return True


def _stand_in(cls: Any) -> Any:
    """A subclass that is applied in the place of `cls`, made once."""
    if "_stand_in" not in vars(cls):
        names = {"_applied_for": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        cls._stand_in = type(cls)(cls.__name__, (cls,), names)
    return cls._stand_in


_reverse: dict[str, Any] = {
    name: made
    for name in ("grad_and_value_impl", "_vjp_with_argnums")
    if (made := getattr(_eager_transforms, name, None)) is not None
}


def intercept_reverse_mode(handler: Any, concerned: Any = None) -> None:
    """Replace each tensor that `torch.func.grad`, `vjp` and their family are given, where ``concerned()`` holds, by
    ``handler(x)``; None ends that.

    It is called where the transform's own level has not begun yet: what is done to `x` is not a part of the function.
    """
    _at_work["gradient"] = handler, concerned
    for name, exchanged in (_reverse if handler is None else _reverse_through(handler, concerned)).items():
        setattr(_eager_transforms, name, exchanged)


@functools.lru_cache(maxsize=1)
def _reverse_through(handler: Any, concerned: Any) -> dict[str, Any]:
    concerned = _settled(concerned)

    def given(values: Any) -> Any:
        if is_compiling() or not concerned():
            return values
        return _pytree.tree_map_only(torch.Tensor, handler, values)

    def gradient(func: Any, argnums: Any, has_aux: Any, args: Any, kwargs: Any) -> Any:
        return _reverse["grad_and_value_impl"](func, argnums, has_aux, given(args), kwargs)

    def pullback(func: Any, *primals: Any, **options: Any) -> Any:
        return _reverse["_vjp_with_argnums"](func, *given(primals), **options)

    ours = {"grad_and_value_impl": gradient, "_vjp_with_argnums": pullback}
    return {name: ours[name] for name in _reverse}


# from 2.14, and before
_CHECKPOINTS = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)
_checkpoint_name = next((name for name in _CHECKPOINTS if hasattr(_checkpoint, name)), None)
_plain_checkpoint: Any = _checkpoint_name and getattr(_checkpoint, _checkpoint_name)
_checkpoint_settings = (
    0
    if _plain_checkpoint is None
    else sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in inspect.signature(_plain_checkpoint).parameters.values())
)
checkpoint_function = _checkpoint.CheckpointFunction  # what ``use_reentrant=True`` applies
checkpoint_saver = getattr(_checkpoint, "_NoopSaveInputs", None)  # the other kind keeps its arguments by this (2.11)


_new_parameter: Any = torch.nn.Parameter.__new__


def intercept_parameters(handler: Any, concerned: Any = None) -> None:
    """Have ``handler(parameter, data)`` asked about each parameter that is made, which modes do not see, where ``concerned()``
    holds; None ends that."""
    _at_work["parameter"] = handler, concerned
    torch.nn.Parameter.__new__ = _new_parameter if handler is None else _parameter_maker(handler, concerned)


@functools.lru_cache(maxsize=1)
def _parameter_maker(handler: Any, concerned: Any) -> Any:
    @functools.wraps(_new_parameter)
    def new(cls: Any, data: Any = None, requires_grad: Any = True) -> Any:
        parameter = _new_parameter(cls, data, requires_grad)
        if data is not None and concerned():
            handler(parameter, data)
        return parameter

    return new


def intercept_checkpoint(handler: Any, concerned: Any = None) -> None:
    """Have `torch.utils.checkpoint`, where ``concerned()`` holds, compute again by the function, and in the context, of
    ``handler(fn, args, kwargs)``, which is asked at the call; None ends that."""
    _at_work["checkpoint"] = handler, concerned
    if _checkpoint_name is not None:
        ours = _plain_checkpoint if handler is None else _checkpointer(handler, concerned)
        setattr(_checkpoint, _checkpoint_name, ours)


@functools.lru_cache(maxsize=1)
def _checkpointer(handler: Any, concerned: Any) -> Any:
    concerned = _settled(concerned)

    def again(fn: Any, context_fn: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if is_compiling() or not concerned() or is_traced() or getattr(context_fn, "enters_body", False):
            return fn, context_fn
        fn, ours = handler(fn, args, kwargs)

        def contexts() -> tuple[Any, Any]:
            first, second = context_fn()
            return first, _Both(ours, second)

        return fn, contexts

    def generator(fn: Any, args: Any, kwargs: Any, *, context_fn: Any, **settings: Any) -> Any:
        fn, context_fn = again(fn, context_fn, args, kwargs)
        return _plain_checkpoint(fn, args, kwargs, context_fn=context_fn, **settings)

    def generator_of_positions(fn: Any, preserve: Any, context_fn: Any, *rest: Any, **kwargs: Any) -> Any:
        fn, context_fn = again(fn, context_fn, rest[_checkpoint_settings - 3 :], kwargs)
        return _plain_checkpoint(fn, preserve, context_fn, *rest, **kwargs)

    return generator if _checkpoint_name == _CHECKPOINTS[0] else generator_of_positions


_BEFORE_AUTOGRAD = {
    "apply": intercept_function_apply,
    "gradient": intercept_reverse_mode,
    "checkpoint": intercept_checkpoint,
}


def is_about_hooks(error: RuntimeError) -> bool:
    """Whether torch.func says that it cannot run where saved tensors have hooks, as in a checkpoint they do."""
    return "saved tensor hooks" in str(error)


class _Both:
    """Two contexts, each entered as often as this one."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        try:
            return self.inner.__exit__(*error)
        finally:
            self.outer.__exit__(*error)


def apply(function: Any, *args: Any) -> Any:
    """`function.apply(*args)`, by the short way (a sixth of the time) when no functorch transform is active."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    _ours.add(function)
    return super(_Level, function).apply(*args)
