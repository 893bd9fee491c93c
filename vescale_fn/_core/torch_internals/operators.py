"""Operators: their schemas, overloads and kernels; and the releases of torch that are tested."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch._library.custom_ops import CustomOpDef as _CustomOpDef
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _python_dispatch

from .functorch import transforming

__all__ = ["DTensorSpec", "FakeTensor", "TensorMeta"]

TESTED = (2, 11), (2, 15)  # the first and the last release of torch that the tests have been run with


def warn_of_untested(version: str) -> None:
    """Warn where no test has seen this release of torch."""
    if not TESTED[0] <= tuple(map(int, version.split(".")[:2])) <= TESTED[1]:
        first, last = (".".join(map(str, release)) for release in TESTED)
        warnings.warn(
            f"vescale_fn is tested with torch {first} to {last}, not with {version}: what it cannot rely on there "
            "raises, but run its fast tests before you trust it (CONTRIBUTING.md)",
            stacklevel=2,
        )


warn_of_untested(torch.__version__)
OpOverload = torch._ops.OpOverload
schema = operator.attrgetter("_schema")  # of an operator in one overload: its arguments and returns, which it writes
operator_name = operator.attrgetter("_schema.name")  # "aten::add_", whatever the overload
standard_gamma_grad = torch._standard_gamma_grad  # (concentration, sample)


def overload_name(op: Any) -> str:
    """ "aten::add_.Tensor": of an operator in one overload."""
    return f"{op._schema.name}.{op._overloadname}"


def custom_op_name(op: Any) -> str | None:
    """The name of what `torch.library.custom_op` has made, ``"mylib::rope"``; None of anything else."""
    return op._qualname if isinstance(op, _CustomOpDef) else None


def overload_named(name: str) -> Any:
    """The operator in one overload that has this name (`overload_name`); None where there is none."""
    space, _, rest = name.partition("::")
    packet = getattr(getattr(torch.ops, space), rest.rpartition(".")[0], None)
    found = getattr(packet, rest.rpartition(".")[2], None)
    return found if isinstance(found, OpOverload) else None


def direct(op: Any) -> Any:
    """What an operator in one overload calls, spared its own frame of Python's; anything else as it is."""
    return getattr(op, "_cpp_dispatch_handle", op._op) if type(op) is OpOverload else op


def in_place(op: Any) -> Any:
    """The operator of the same name with an underscore behind it, in the same overload; None where there is none."""
    space, _, name = op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, space), name + "_", None)
    return getattr(packet, op._overloadname, None) if packet is not None else None


def out_of_place(op: Any) -> Any:
    """The operator of the same name without the underscore that takes the same arguments and writes none of them; or None.

    Not that of the same overload's name: ``pow.Scalar`` takes its arguments the other way round than ``pow_.Scalar``.
    """
    space, _, name = op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, space), name.removesuffix("_"), None) if name.endswith("_") else None
    for overload in packet.overloads() if packet is not None else ():
        found = getattr(packet, overload)
        if not found._schema.is_mutable and _arguments(found) == _arguments(op):
            return found
    return None


def _arguments(op: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in op._schema.arguments]


def on_lists(name: str) -> Any:
    """The function on lists of tensors that does what ``torch.NAME`` does on one; None where there is none."""
    return getattr(torch, f"_foreach_{name}", None)


def norms(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """The norm of each tensor, added up in this dtype."""
    return torch._foreach_norm(list(tensors), 2, dtype)


def overloads(op: Any) -> list[Any]:
    """All overloads of an operator's name."""
    return [getattr(op._overloadpacket, name) for name in op._overloadpacket.overloads()]


def compiled_by_inductor(module: torch.fx.GraphModule, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """What inductor makes of a graph of aten operators, for arguments like `examples`."""
    with torch.no_grad():
        return torch._inductor.compile(module, list(examples))  # type: ignore[return-value]


def has_kernel(op: Any, backend: str) -> bool:
    """Whether an operator has a kernel of its own on a backend, ``"CPU"``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), backend)


def break_graph(error: Exception) -> None:
    """Where `torch.compile` is tracing, have it run as written what comes now; under ``fullgraph=True`` the error is raised."""
    if torch._guards.TracingContext.try_get() is not None:
        unsupported: Any = sys.modules["torch._dynamo.exc"].Unsupported  # type: ignore[attr-defined]
        kind = type(type(error).__name__, (unsupported, type(error)), {"__module__": type(error).__module__})
        raise kind(str(error))


_frames: Any = torch._C._dynamo.eval_frame
_as_it_is = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)  # and all that it calls
F = TypeVar("F")
_compiled_marks = ("_torchdynamo_inline", "_torchdynamo_orig_callable")


def not_compiled(fn: F) -> F:
    """Have `torch.compile` break its graph where `fn` is called, and run it, with all that it calls, as it is written.

    As `torch.compiler.disable(fn)`, but without the import of the compiler, and at no cost in a call.
    """
    marked: Any = fn
    for name in _compiled_marks:  # what `functools.wraps` has copied from a compiled function
        vars(marked).pop(name, None)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = (
        f"vescale_fn's {marked.__qualname__.removesuffix('.__new__')} runs as it is written: leave out fullgraph=True, or "
        "compile the whole step by vfn.jit(step, backend='inductor')"
    )
    _frames.set_code_exec_strategy(marked.__code__, _as_it_is)
    return fn


def in_parts(func: Any) -> Any:
    """What carries an op out as others, where torch made it of others; below autograd it may come as it is. Or None."""
    made = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return func.decompose if made else None


def is_operator(func: Any) -> bool:
    """Whether `func` is something under `torch.ops`."""
    return isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


function_tables = (torch._C._VariableFunctions, torch._C._nn, torch._C._linalg, torch._C._special, torch._C._fft)


class _Asked(Exception):
    """An operator has been asked for."""


class _Asking(_python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Asked(func, args, kwargs or {})


def asked_for(call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The first operator that a call asks for, with its arguments; None where it asks for none. Nothing is computed."""
    try:
        with on_plain_tensors(), _Asking():
            call(*args, **kwargs)
    except _Asked as asked:
        return asked.args
    except Exception:
        return None
    return None


_UNUSED = functools.reduce(
    operator.or_,
    (
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
        for name in (
            "AutogradCPU",
            "AutogradCUDA",
            "AutogradMeta",
            "AutogradOther",
            "ADInplaceOrView",
            "AutocastCPU",
            "AutocastCUDA",
        )
    ),
)


@contextlib.contextmanager
def on_plain_tensors() -> Iterator[None]:
    """Inside, torch's functions lead straight to the kernels: no autograd or autocast, no notes of views, no modes."""
    with torch._C._ExcludeDispatchKeyGuard(_UNUSED), torch._C.DisableTorchFunction():
        yield


def called_on_plain_tensors(f: Any, *args: Any) -> Any:
    """``f(*args)`` there; for what is called often. An interrupt that comes while this is left skips the inner context's end:
    of the two it is the guard that ends by itself, with its object."""
    with torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(_UNUSED):
        return f(*args)


class _AttentionOnCpu:
    """torch's own attention on CPUs, whose results know the logarithm of the sum of their scores' exponentials."""

    @staticmethod
    def forward(q: Any, k: Any, v: Any, scale: float, causal: bool) -> tuple[Any, Any]:
        return _on_cpu(q, k, v, 0.0, causal, scale=scale)

    @staticmethod
    def backward(
        grad: Any, q: Any, k: Any, v: Any, out: Any, log: Any, scale: float, causal: bool
    ) -> tuple[Any, Any, Any]:
        return _on_cpu_backward(grad, q, k, v, out, log, 0.0, causal, scale=scale)


_on_cpu: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_on_cpu_backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def attention_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """A kernel for attention of q to k and v and for its gradient, that keeps no scores; None where torch has none."""
    if transforming() or not q.shape[-1] == k.shape[-1] == v.shape[-1] or not q.numel() or not k.numel():
        return None
    if q.device.type == "cpu" and _on_cpu is not None and _on_cpu_backward is not None:
        return _AttentionOnCpu
    return None
