"""What intercepts ops: dispatch modes, tracers, recordings, compilers; and running an op past all of them."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch._C._functorch as _functorch
import torch.utils._pytree as _pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor as _proxy_tensor
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext

from .functorch import _functorch_active, _functorch_depth
from .operators import not_compiled

F = TypeVar("F", bound=Callable[..., Any])


class AsWritten:
    """Of a dispatch mode: its ``__torch_dispatch__`` is called as it is. Torch would put a call of the compiler around it,
    which costs as much as what a mode does for an op."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__torch_dispatch__" in vars(cls):
            not_compiled(vars(cls)["__torch_dispatch__"])


class TorchDispatchMode(AsWritten, _python_dispatch.TorchDispatchMode):
    """Torch's, as it is written."""


TorchFunctionMode = torch.overrides.TorchFunctionMode
no_torch_function = torch._C.DisableTorchFunction
torch_function = torch._C._EnableTorchFunction  # in a block of the other
# a block whose ops come to no mode and no subclass, which costs a tenth of what `unrecorded` does
undispatched = torch._C._DisableTorchDispatch


def seen_whole(f: F) -> F:
    """A function of ours that a mode which records a plan sees as one call, like a function of torch's."""

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _function_modes():
            return f(*args, **kwargs)
        mode = torch.overrides._get_current_function_mode()
        if not getattr(mode, "records_plan", False) or not torch._C._is_torch_function_enabled():
            return f(*args, **kwargs)
        with torch.overrides._pop_mode_temporarily():
            return mode.__torch_function__(f, (), args, kwargs)  # type: ignore[union-attr]

    return cast("F", run)


def dispatch_seen() -> Any:
    """Within the block, ops come to the ``__torch_dispatch__`` of subclasses and modes, also where torch has begun to read the
    numbers of a list, as `torch.tensor` does."""
    hidden = torch._C._dispatch_tls_local_exclude_set()
    if not hidden.has(torch._C.DispatchKey.Python):
        return contextlib.nullcontext()
    seen = hidden.remove(torch._C.DispatchKey.Python).remove(torch._C.DispatchKey.PythonTLSSnapshot)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), seen)


_by_stance = "_callback_from_stance"


def run_compiled_as_written(concerned: Callable[[], bool]) -> bool:
    """Have what `torch.compile` made run as it was written, from now on, where ``concerned()`` holds: what it traces, no mode
    sees. As under `torch.compiler.set_stance("force_eager")`, but in one thread.

    Returns:
        Whether that reaches all that may have been compiled.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:  # nothing was compiled yet
        return True
    own = getattr(frames, _by_stance, None)

    def as_written(callback: Any) -> Any:
        return None if concerned() else own(callback)  # type: ignore[misc]

    if own is not None and own.__name__ == _by_stance:
        setattr(frames, _by_stance, as_written)
    return own is not None


def compiled_runs_unseen() -> bool:
    """Whether something may have been compiled that `run_compiled_as_written` does not reach."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and not hasattr(frames, _by_stance)


dispatch_modes = torch._C._len_torch_dispatch_stack  # how many dispatch modes are active
function_modes = torch._C._len_torch_function_stack  # how many modes see the functions of torch that are called
all_function_modes = torch.overrides._get_current_function_mode_stack  # they, the one that sees them first last
top_function_mode = torch.overrides._get_current_function_mode  # the one that sees them first


def _tracer() -> Any:
    """The tracer of `make_fx` (and so of `torch.func.linearize`) that is at work, or None."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return None if mode is None else mode.tracer


def recorder() -> Any:
    """The dispatch mode that records a plan, where one is at work; else None."""
    for mode in reversed(_python_dispatch._get_current_dispatch_mode_stack()):
        if getattr(mode, "records_plan", False):
            return mode
    return None


_FLAGS = [
    name
    for name in (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    )
    if hasattr(_python_dispatch, name)
]
_enabling = torch._C.DisableTorchFunction()  # whose end brings back what is now: torch functions are seen
_enabling.__enter__()
_enabling.__exit__(None, None, None)
_only_lift = torch._C._only_lift_cpu_tensors
_kept_by = torch._C._autograd._top_saved_tensors_default_hooks  # the innermost hooks that pack what autograd keeps


def ambient() -> tuple[Any, ...]:
    """What torch has in this thread of modes and transforms, for `set_ambient`."""
    dispatch = _python_dispatch._get_current_dispatch_mode_stack() if dispatch_modes() else ()
    functions = torch.overrides._get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()
    settings = torch.is_grad_enabled(), _only_lift(), torch.get_default_dtype(), torch.is_autocast_cache_enabled()
    return dispatch, functions, _functorch_depth(), settings, torch._C._is_torch_function_enabled(), _kept_by(True)


def set_ambient(saved: tuple[Any, ...]) -> None:
    """Put back what `ambient` has found."""
    dispatch, functions, depth, settings, seen, hooks = saved
    if seen and not torch._C._is_torch_function_enabled():
        _enabling.__exit__(None, None, None)
    now = ambient()
    if len(now[0]) != len(dispatch) or any(a is not b for a, b in zip(now[0], dispatch)):
        for mode in reversed(now[0]):
            _python_dispatch._pop_mode(getattr(mode, "_mode_key", None))
        for mode in dispatch:
            _python_dispatch._push_mode(mode)
        if not dispatch:
            for name in _FLAGS:
                setattr(_python_dispatch, name, False)
            if hasattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals"):
                _python_dispatch.set_is_in_mode_without_ignore_compile_internals(False)
    if len(now[1]) != len(functions) or any(a is not b for a, b in zip(now[1], functions)):
        while torch._C._len_torch_function_stack():
            torch.overrides._pop_mode()
        for mode in functions:
            torch.overrides._push_mode(mode)
    if now[2] > depth:
        _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
    if now[3] != settings:
        grad, lift, dtype, cache = settings
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        torch.set_autocast_cache_enabled(cache)
        if lift != now[3][1]:
            torch._C._set_only_lift_cpu_tensors(lift)
    _put_back_hooks(hooks)


def _put_back_hooks(hooks: tuple[Any, Any] | None) -> None:
    while (left := _kept_by(True)) is not None and left != hooks:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    if hooks is not None and left is None:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def settle(for_good: bool = False) -> None:
    """Where a plan is recorded, what has been put off is done: before a function of ours that nobody sees as one call.
    `for_good`: no more is put off, as the function that was looked at has come to its end."""
    if torch.compiler.is_compiling():
        return
    if dispatch_modes() and function_modes() and (at_work := recorder()) is not None and at_work.watching is not None:
        at_work.watching.asked(for_good)


def is_recorded() -> bool:
    """Whether a plan is being recorded."""
    return dispatch_modes() > 0 and recorder() is not None


def is_traced() -> bool:
    """Whether `make_fx` (and so `torch.func.linearize`) is tracing."""
    return _tracer() is not None


def in_trace(args: Any) -> bool:
    """Whether a tensor among arguments is one that `make_fx`, which is tracing, follows."""
    tracer = _tracer()
    return any(
        isinstance(x, torch.Tensor) and _proxy_tensor.has_proxy_slot(x, tracer) for x in _pytree.tree_leaves(args)
    )


class FrozenNumber(Exception):
    """An op reads a number out of a value that a trace follows."""


def as_one_step(function: Any, args: Sequence[Any], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
    """``run()``, which a trace has as one call of `function`; and as a value, where it follows no argument."""
    tracer, followed = _tracer(), in_trace((args, kwargs))
    with _proxy_tensor.disable_proxy_modes_tracing():
        out = run()
    if followed and torch.Tag.data_dependent_output in getattr(function, "tags", ()):
        raise FrozenNumber(function)
    if not followed or not any(isinstance(x, torch.Tensor) for x in _pytree.tree_leaves(out)):
        return out

    def proxy(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and _proxy_tensor.has_proxy_slot(x, tracer):
            return _proxy_tensor.get_proxy_slot(x, tracer).proxy  # type: ignore[call-overload]
        return x

    step = tracer.create_proxy("call_function", function, *_pytree.tree_map(proxy, (tuple(args), kwargs)))
    return _proxy_tensor.track_tensor_tree(out, step, constant=None, tracer=tracer)


_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_is_compiling = torch.compiler.is_compiling


def watched() -> bool:
    """Whether a transform, a mode or a compiler sees the functions of torch that are called here."""
    return bool(_is_compiling() or _functorch_active() or _dispatch_modes() or _function_modes())


is_compiling = _is_compiling


def watched_by_other_modes() -> bool:
    """Whether a mode sees the functions of torch that are called here; not `torch.set_default_device`'s, which is a setting,
    nor one of a recording's own (``of_recording``)."""
    if function_modes() == 0:
        return False
    modes = torch.overrides._get_current_function_mode_stack()
    return any(type(mode) is not DeviceContext and not getattr(mode, "of_recording", False) for mode in modes)


# What is a tensor and nothing else; one without values counts as what it stands for.
BARE: set[type] = {torch.Tensor, FakeTensor}


def is_bare(x: torch.Tensor) -> bool:
    """Whether `x` is a tensor and nothing else (`BARE`)."""
    return type(x) in BARE


def is_plain(x: torch.Tensor) -> bool:
    """Whether `x` is a tensor and nothing else, and nothing watches: no subclass, transform, mode or compiler."""
    return type(x) is torch.Tensor and not watched()


def tracing() -> bool:
    """Whether a mode watches every op, as tracers do; but for modes that only look."""
    return _dispatch_modes() > 0 and not all(
        getattr(mode, "only_looks", False) for mode in _python_dispatch._get_current_dispatch_mode_stack()
    )


def unrecorded() -> contextlib.AbstractContextManager[Any]:
    """Inside, no dispatch mode sees what is done."""
    return _python_dispatch._disable_current_modes() if dispatch_modes() else contextlib.nullcontext()


def never_recorded(fn: F) -> F:
    """A function of ours that works on tensors of its own: no dispatch mode sees them."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not dispatch_modes():
            return fn(*args, **kwargs)
        with unrecorded():
            return fn(*args, **kwargs)

    return cast("F", run)


def torch_function_on() -> bool:
    """Whether a mode would see the torch functions that are called here."""
    return not torch._C._is_torch_function_all_disabled()


def function_mode_on() -> bool:
    """Whether a mode sees the torch functions that are called here."""
    return torch._C._len_torch_function_stack() > 0 and torch_function_on()
