"""The one door to private torch names: DTensor's internals, functorch's wrappers, process groups, by feature test."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._C._functorch as _functorch
import torch.distributed as dist
import torch.utils._pytree as _pytree
from torch._functorch import eager_transforms as _eager_transforms
from torch._functorch import pyfunctorch as _pyfunctorch
from torch._library import simple_registry as _simple_registry
from torch._subclasses import fake_tensor as _fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad as _forward_ad
from torch.autograd import graph as _autograd_graph
from torch.distributed import _functional_collectives
from torch.distributed import distributed_c10d as _c10d
from torch.distributed.checkpoint import filesystem as _filesystem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _api as _dtensor_api
from torch.distributed.tensor import placement_types as _placement_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.fx.experimental import proxy_tensor as _proxy_tensor
from torch.utils import _python_dispatch
from torch.utils import checkpoint as _checkpoint
from torch.utils._device import DeviceContext

from .errors import TransformError, report

try:
    from torch.distributed.tensor._op_schema import OpSchema
except ImportError:
    OpSchema: Any = None  # then DTensor is never asked how it would run an op

__all__ = ["DTensorSpec", "FakeTensor", "TensorMeta"]

TESTED = (2, 11), (2, 15)  # the first and the last release of torch that the tests have been run with


def warn_of_untested(version: str) -> None:
    """Warn where no test has seen this release of torch."""
    if not TESTED[0] <= tuple(map(int, version.split(".")[:2])) <= TESTED[1]:
        first, last = (".".join(map(str, release)) for release in TESTED)
        warnings.warn(f"vescale_fn is tested with torch {first} to {last}, not with {version}: what it cannot rely on there "
                      "raises, but run its fast tests before you trust it (CONTRIBUTING.md)", stacklevel=2)  # fmt: skip


warn_of_untested(torch.__version__)

strided_shard_type = _placement_types._StridedShard
OpOverload = torch._ops.OpOverload
disabled_torch_function = torch._C._disabled_torch_function_impl
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass


all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name changed in 2.13
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


TorchDispatchMode = _python_dispatch.TorchDispatchMode
standard_gamma_grad = torch._standard_gamma_grad  # (concentration, sample)
local = operator.attrgetter("_local_tensor")  # this rank's block of a DTensor


def forget_local(x: Any) -> None:
    """Make `x` a DTensor without a block; it may have none already."""
    with contextlib.suppress(AttributeError):
        del x._local_tensor


def strided_shard(dim: int, split_factor: int) -> Any:
    """The placement of an axis that takes its piece out of each of `split_factor` segments."""
    return strided_shard_type(dim, split_factor=split_factor)


def dispatch_to_own(cls: Any) -> Any:
    """Have ops on `cls`, a subclass of DTensor, come to its own ``__torch_dispatch__``.

    In some releases torch takes subclasses of DTensor down DTensor's C++ path without asking them (2.11 does, 2.13 asks).
    There a rule registered for the class comes first; torch keeps such rules by op, so this one answers for every op.
    """

    class Probe(DTensor):
        asked = False

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Probe.asked = True
            return args[0]

    mesh = unattached_mesh("cpu", torch.arange(1), ("x",))
    meta = TensorMeta(torch.Size(()), (), torch.float32)
    spec = DTensorSpec(mesh, (_placement_types.Replicate(),), tensor_meta=meta)
    torch.neg(new_dtensor(Probe, torch.zeros(()), spec, requires_grad=False))
    if not Probe.asked:
        holder = _simple_registry.GenericTorchDispatchRuleHolder
        find = holder.find
        rule = lambda _, func, types, args=(), kwargs=None: cls.__torch_dispatch__(func, types, args, kwargs)
        holder.find = lambda self, asked: rule if asked is cls else find(self, asked)
    return cls


_make_dtensor: Any = getattr(torch.Tensor, "_dtensor__new__", DTensor.__new__)


def new_dtensor(cls: Any, local: Any, spec: Any, *, requires_grad: bool) -> Any:
    """A DTensor of class `cls` around `local`. It has no memory of its own, and code in C that asks for its address fails."""
    out = _make_dtensor(cls, local, spec, requires_grad=requires_grad)
    torch._C._set_throw_on_mutable_data_ptr(out)
    return out


def forbid_data_ptr(x: torch.Tensor) -> None:
    """Make taking the data pointer of `x`, a wrapper without storage, raise."""
    torch._C._set_throw_on_mutable_data_ptr(x)


def unattached_mesh(device: str, ranks: torch.Tensor, names: tuple[str, ...], cls: type = DeviceMesh) -> Any:
    """A mesh of class `cls` that belongs to no process group, seen from rank 0."""
    made = cls(device, ranks, mesh_dim_names=names, _init_backend=False, _rank=0)
    if not hasattr(made, "_dim_group_names"):  # `torch.compile` reads it of each mesh that it meets
        made._dim_group_names = []
    return made


def ask_before_groups(ask: Callable[[], None], ask_of_mesh: Callable[[Any, str], None]) -> None:
    """Have `ask` called where torch needs the default process group and there is none, nor anything to make one from; and
    `ask_of_mesh`, with the mesh and the function's name, where it makes a DTensor of one rank's values. Both may raise."""
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers  # behind a function of this name
    default, from_environment = _c10d._get_default_group, handlers["env"]

    @functools.wraps(default)
    def default_group() -> Any:
        if not dist.is_initialized():
            ask()
        return default()

    @functools.wraps(from_environment)
    def meet(*args: Any, **kwargs: Any) -> Any:
        if "RANK" not in os.environ:
            ask()
        return from_environment(*args, **kwargs)

    def asking(made: Any) -> Any:
        @functools.wraps(made)
        def asked(local: Any, *args: Any, **kwargs: Any) -> Any:
            for x in (*args, *kwargs.values()):
                if isinstance(x, DeviceMesh) and not hasattr(local, "blocks"):  # those are all ranks' values
                    ask_of_mesh(x, made.__name__)
            return made(local, *args, **kwargs)

        return asked

    def asking_first(found: Any) -> Any:
        @functools.wraps(found)
        def group_of(*args: Any, **kwargs: Any) -> Any:
            if not dist.is_initialized():
                ask()
            return found(*args, **kwargs)

        return group_of

    for module, names in (
        (_functional_collectives, ("_resolve_group", "_resolve_group_name", "_expand_group")),
        (_c10d, ("_rank_not_in_group",)),  # which has a group of any kind, a name too, before it is used
    ):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, asking_first(getattr(module, name)))
    handlers["env"] = meet
    for name, module in tuple(sys.modules.items()):
        if name.startswith("torch.") and vars(module).get("_get_default_group") is default:
            module._get_default_group = default_group  # type: ignore[attr-defined]
    DTensor.from_local = staticmethod(asking(DTensor.from_local))  # type: ignore[method-assign]
    if hasattr(_dtensor_api, "_dtensor_init_helper"):
        _dtensor_api._dtensor_init_helper = asking(_dtensor_api._dtensor_init_helper)


def root_mesh(mesh: Any) -> Any:
    """The mesh that `mesh` was cut out of by ``mesh[names]``, or itself."""
    find = getattr(mesh, "_get_root_mesh", None)
    return mesh if find is None else find()


flattened = torch._C._nn.flatten_dense_tensors  # of one dtype, one after the other in one dim
unflattened = torch._C._nn.unflatten_dense_tensors  # parts of such a tensor, with the shapes of these


def peel(x: torch.Tensor) -> torch.Tensor:
    """The tensor below all functorch wrappers (which hide a subclass and its attributes)."""
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def base(x: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `x` is a view of."""
    return x._base


def no_view(x: torch.Tensor) -> torch.Tensor:
    """`x`, not as a view of a tensor that nobody else has: autograd refuses writes into a Function's result that is a view."""
    return x.data if x._is_view() else x


def memory_number(x: torch.Tensor) -> int:
    """The storage of `x`, as a number."""
    return x.untyped_storage()._cdata


def memory(x: torch.Tensor) -> tuple[Any, ...]:
    """Where the elements of `x` are; equal for two tensors that are names of the same elements."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()


def users(storage: torch.UntypedStorage) -> int:
    """How many tensors have this memory."""
    return torch._C._storage_Use_Count(storage._cdata) - 1  # one is `storage` itself


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


def propagate(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]] | None:
    """DTensor's own way to run an op: the placements of each DTensorSpec among `args`, and of each result.

    None where it has none, or would call the op with other arguments on the blocks than on the whole.
    """
    try:
        own: Any = DTensor._op_dispatcher.sharding_propagator
        info = own.op_to_schema_info.get(func)
        info = info or getattr(own, "op_to_schema_info_for_single_dim_strategy", {}).get(func)
        schema = OpSchema(func, tuple(args), kwargs, info)
        answer: Any = own.propagate_op_sharding_non_cached(schema)
        if getattr(answer, "use_val_from_redistribute_schema", True):
            return None
        wanted: Any = answer.redistribute_schema if answer.needs_redistribute else schema
        ins = [a.placements for a in _pytree.tree_leaves(wanted.args_schema) if isinstance(a, DTensorSpec)]
        outs = answer.output_spec if isinstance(answer.output_spec, (list, tuple)) else [answer.output_spec]
        return ins, [None if out is None else out.placements for out in outs]
    except Exception:
        return None  # its interface is private: in a release where it is another, there is no answer


def storage(x: torch.Tensor) -> Any:
    """The memory of `x`, one object as long as the memory lives, which takes attributes; None for one without (sparse)."""
    try:
        with no_torch_function():
            return x.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def count_write(x: torch.Tensor) -> None:
    """Note that `x` has been written in place."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def settled(x: torch.Tensor) -> torch.Tensor:
    """`x` with its lazy conjugate, minus sign and zeros carried out: dispatch below autograd does not always heed them."""
    if x._is_zerotensor():  # a tangent that forward mode made up: it has no memory, so that a kernel would crash
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if x.is_conj():
        x = torch.conj_physical(x.conj())
    return torch.neg(torch._neg_view(x)) if x.is_neg() else x


def is_lazy(x: torch.Tensor) -> bool:
    """Whether `x` has a conjugate, a minus sign or zeros that are yet to be carried out: see `settled`."""
    return x.is_conj() or x.is_neg() or x._is_zerotensor()


no_torch_function = torch._C.DisableTorchFunction
no_transforms = torch._C._DisableFuncTorch  # inside, transforms do not see what is done to plain tensors

_functions: Any = torch.autograd.function
_Level: Any = _functions._SingleLevelFunction
_apply_under_functorch: Any = _functions.custom_function_call
_ours: set[type] = set()  # Functions that `apply` below has applied: nobody needs to be asked about them


def intercept_function_apply(handler: Any, concerned: Any = None) -> None:
    """Send every application of an `autograd.Function` to ``handler(cls, apply, args, kwargs)``; None ends that.

    `Function.apply` is left alone, since programs keep it under names of their own (``relu = Relu.apply``). It ends in one
    of these two: without a functorch transform, and with one. Where `apply` is written in C (from torch 2.14 on), only
    those threads are asked for which ``concerned()`` holds when a Function is applied.
    """
    if handler is None:
        _functions.custom_function_call = _apply_under_functorch
    else:
        applied, _functions.custom_function_call = _appliers(handler)
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


@functools.lru_cache(maxsize=1)
def _appliers(handler: Any) -> tuple[Any, Any]:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        plain = super(_Level, cls).apply
        return handler(cls, plain, args, kwargs) if issubclass(cls, torch.autograd.Function) else plain(*args, **kwargs)

    def under_functorch(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return handler(cls, functools.partial(_apply_under_functorch, cls), args, kwargs)

    return classmethod(apply), under_functorch


def unseen() -> list[str]:
    """What this torch does in a way that nothing below intercepts: a gradient could be silently wrong."""
    missing = {"autograd.Functions are applied": not _functions_are_seen(),
               "torch.func takes gradients": len(_reverse) < 2,
               "torch.utils.checkpoint computes again": _checkpoint_name is None}  # fmt: skip
    return [what for what, is_missing in missing.items() if is_missing]


_probed: list[type] = []


def _seen_by_probe(cls: Any, apply: Any, args: Any, kwargs: Any) -> Any:
    _probed.append(cls)
    return apply(*args, **kwargs)


@functools.cache
def _functions_are_seen() -> bool:
    """Whether this torch can be intercepted so: tried once, on an `apply` that was kept under a name."""

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x + 1

    apply = Probe.apply
    intercept_function_apply(_seen_by_probe, lambda: True)
    try:
        with (
            unrecorded(),
            _pyfunctorch.temporarily_clear_interpreter_stack(),
        ):  # the first body may be under a transform
            answer = apply(torch.zeros(()))
            alone = not _functorch_active()
    finally:
        intercept_function_apply(None)
    return _probed[-1:] == [Probe] and answer.item() == 1 and alone


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

    def for_the_stand_in() -> None: ...

    def asked(cls: Any) -> Any:
        if (not _functorch_active() and cls not in _ours and "_applied_for" not in vars(cls)
                and issubclass(cls, torch.autograd.Function) and concerned()):  # fmt: skip
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


_reverse: dict[str, Any] = {name: made for name in ("grad_and_value_impl", "_vjp_with_argnums")
                            if (made := getattr(_eager_transforms, name, None)) is not None}  # fmt: skip


def intercept_reverse_mode(handler: Any) -> None:
    """Replace each tensor that `torch.func.grad`, `vjp` and their family are given by ``handler(x)``; None ends that.

    It is called where the transform's own level has not begun yet: what is done to `x` is not a part of the function.
    """
    if handler is None:
        for name, plain in _reverse.items():
            setattr(_eager_transforms, name, plain)
        return

    def given(values: Any) -> Any:
        return _pytree.tree_map_only(torch.Tensor, handler, values)

    def gradient(func: Any, argnums: Any, has_aux: Any, args: Any, kwargs: Any) -> Any:
        return _reverse["grad_and_value_impl"](func, argnums, has_aux, given(args), kwargs)

    def pullback(func: Any, *primals: Any, **options: Any) -> Any:
        return _reverse["_vjp_with_argnums"](func, *given(primals), **options)

    for name, ours in (("grad_and_value_impl", gradient), ("_vjp_with_argnums", pullback)):
        if name in _reverse:
            setattr(_eager_transforms, name, ours)


_stances: list[Any] = []


@functools.lru_cache(maxsize=1)
def _as_written(stance: Any) -> Any:
    return stance("force_eager")


def break_graph(error: Exception) -> None:
    """Where `torch.compile` is tracing, have it run as written what comes now; under ``fullgraph=True`` the error is raised."""
    if torch._guards.TracingContext.try_get() is not None:
        unsupported: Any = sys.modules["torch._dynamo.exc"].Unsupported  # type: ignore[attr-defined]
        kind = type(type(error).__name__, (unsupported, type(error)), {"__module__": type(error).__module__})
        raise kind(str(error))


_frames: Any = torch._C._dynamo.eval_frame
_as_it_is = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)  # and all that it calls
_compiled_marks = ("_torchdynamo_inline", "_torchdynamo_orig_callable")


def not_compiled(fn: Any) -> Any:
    """Have `torch.compile` break its graph where `fn` is called, and run it, with all that it calls, as it is written.

    As `torch.compiler.disable(fn)`, but without the import of the compiler, and at no cost in a call.
    """
    for name in _compiled_marks:  # what `functools.wraps` has copied from a compiled function
        vars(fn).pop(name, None)
    fn._torchdynamo_disable = True
    fn._torchdynamo_disable_msg = (
        f"vescale_fn's {fn.__qualname__.removesuffix('.__new__')} runs as it is written: leave out fullgraph=True, or compile "
        "the whole step by vfn.jit(step, backend='inductor')"
    )
    _frames.set_code_exec_strategy(fn.__code__, _as_it_is)
    return fn


def run_compiled_as_written(on: bool) -> None:
    """Have what `torch.compile` made run as it was written, for as long as this is on: what it traces, no mode sees.

    As `torch.compiler.set_stance("force_eager")`, which takes a hundred times as long.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")  # not there: nothing was compiled yet
    if on and hasattr(frames, "_stance") and not _stances:
        _stances.append(frames._stance)
        frames._stance = _as_written(frames.DynamoStance)
    elif not on and _stances:
        frames._stance = _stances.pop()


_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def in_backward_pass() -> bool:
    """Whether the autograd engine is at work in this thread."""
    return _graph_task() != -1


_CHECKPOINTS = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)  # from 2.14; before
_checkpoint_name = next((name for name in _CHECKPOINTS if hasattr(_checkpoint, name)), None)
_plain_checkpoint: Any = _checkpoint_name and getattr(_checkpoint, _checkpoint_name)
_checkpoint_settings = 0 if _plain_checkpoint is None else sum(
    p.kind is p.POSITIONAL_OR_KEYWORD for p in inspect.signature(_plain_checkpoint).parameters.values())  # fmt: skip
checkpoint_function = _checkpoint.CheckpointFunction  # what ``use_reentrant=True`` applies
checkpoint_saver = getattr(_checkpoint, "_NoopSaveInputs", None)  # the other kind keeps its arguments by this (2.11)


def intercept_checkpoint(handler: Any) -> None:
    """Have `torch.utils.checkpoint` compute again by the function, and in the context, of ``handler(fn, args, kwargs)``,
    which is asked at the call; None ends that."""
    if _checkpoint_name is not None:
        setattr(_checkpoint, _checkpoint_name, _plain_checkpoint if handler is None else _checkpointer(handler))


@functools.lru_cache(maxsize=1)
def _checkpointer(handler: Any) -> Any:
    def again(fn: Any, context_fn: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if is_traced() or getattr(context_fn, "enters_body", False):
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


def own_shape(func: Any, args: Any) -> None:
    """Apply an op on shapes to what a wrapper subclass says of its own shape, leaving out the subclass's dispatch."""
    with torch._C._DisableTorchDispatch():
        func(*args)


def set_storage_offset(x: torch.Tensor, offset: int) -> None:
    """Make a wrapper subclass, which has no storage, say that it begins there in the memory of what it is a view of."""
    before = torch._C._meta_in_tls_dispatch_include()
    torch._C._set_meta_in_tls_dispatch_include(True)  # nothing is allocated
    try:
        with torch._C._DisableTorchDispatch():
            torch.ops.aten.set_.source_Storage_storage_offset(
                x, torch._C.TensorBase.untyped_storage(x), offset, x.shape, x.stride()
            )
    finally:
        torch._C._set_meta_in_tls_dispatch_include(before)


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
dispatch_modes = torch._C._len_torch_dispatch_stack  # how many dispatch modes are active


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


_FLAGS = [name for name in ("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode",
          "_is_in_any_mode_without_ignore_compile_internals") if hasattr(_python_dispatch, name)]  # fmt: skip
_functorch_depth = getattr(_functorch, "get_dynamic_layer_stack_depth", lambda: 0)
_enabling = torch._C.DisableTorchFunction()  # whose end brings back what is now: torch functions are seen
_enabling.__enter__()
_enabling.__exit__(None, None, None)
_only_lift = getattr(torch._C, "_only_lift_cpu_tensors", lambda: False)


def ambient() -> tuple[Any, ...]:
    """What torch has in this thread of modes and transforms, for `set_ambient`."""
    dispatch = _python_dispatch._get_current_dispatch_mode_stack() if dispatch_modes() else ()
    functions = torch.overrides._get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()
    settings = torch.is_grad_enabled(), _only_lift(), torch.get_default_dtype(), torch.is_autocast_cache_enabled()
    exchanges = _recordings.get(threading.get_ident(), 0)
    return dispatch, functions, _functorch_depth(), settings, torch._C._is_torch_function_enabled(), exchanges


def set_ambient(saved: tuple[Any, ...]) -> None:
    """Put back what `ambient` has found."""
    dispatch, functions, depth, settings, seen, exchanges = saved
    if _recordings.get(threading.get_ident(), 0) != exchanges:
        _see_exchanges(exchanges)
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


def is_recorded() -> bool:
    """Whether a plan is being recorded."""
    return dispatch_modes() > 0 and recorder() is not None


def is_traced() -> bool:
    """Whether `make_fx` (and so `torch.func.linearize`) is tracing."""
    return _tracer() is not None


def in_trace(args: Any) -> bool:
    """Whether a tensor among arguments is one that `make_fx`, which is tracing, follows."""
    tracer = _tracer()
    return any(isinstance(x, torch.Tensor) and _proxy_tensor.has_proxy_slot(x, tracer)
               for x in _pytree.tree_leaves(args))  # fmt: skip


def as_one_step(function: Any, args: Sequence[Any], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
    """``run()``, which a trace has as one call of `function`; and as a value, where it follows no argument."""
    tracer, followed = _tracer(), in_trace((args, kwargs))
    with _proxy_tensor.disable_proxy_modes_tracing():
        out = run()
    if followed and torch.Tag.data_dependent_output in getattr(function, "tags", ()):
        raise TransformError(report(str(function), "a number is read out of a value that torch.func.linearize, or make_fx, "
                                    "follows, and would be frozen", fix="vfn.linearize, which traces nothing"))  # fmt: skip
    if not followed or not any(isinstance(x, torch.Tensor) for x in _pytree.tree_leaves(out)):
        return out

    def proxy(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and _proxy_tensor.has_proxy_slot(x, tracer):
            return _proxy_tensor.get_proxy_slot(x, tracer).proxy  # type: ignore[call-overload]
        return x

    step = tracer.create_proxy("call_function", function, *_pytree.tree_map(proxy, (tuple(args), kwargs)))
    return _proxy_tensor.track_tensor_tree(out, step, constant=None, tracer=tracer)


@functools.cache
def load_forward_rules() -> None:
    """Import what torch imports at its first dual number, without the warning that it uses its own deprecated `torch.jit`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.script. is")
        _forward_ad._maybe_load_decompositions()


def forward_ad_active() -> bool:
    """Whether dual numbers (`torch.autograd.forward_ad`) are in use."""
    return _forward_ad._current_level >= 0


def apply(function: Any, *args: Any) -> Any:
    """`function.apply(*args)`, by the short way (a sixth of the time) when no functorch transform is active."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    _ours.add(function)
    return super(_Level, function).apply(*args)


_functorch_active = torch._C._are_functorch_transforms_active
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_is_compiling = torch.compiler.is_compiling


def watched() -> bool:
    """Whether a transform, a mode or a compiler sees the functions of torch that are called here."""
    return bool(_is_compiling() or _functorch_active() or _dispatch_modes() or _function_modes())


is_compiling = _is_compiling


def autocasting() -> tuple[Any, ...]:
    """Which autocast is on."""
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return ()
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))


def watched_by_other_modes() -> bool:
    """Whether a mode sees the functions of torch that are called here; not `torch.set_default_device`'s, which is a setting."""
    if torch._C._len_torch_function_stack() == 0:
        return False
    return any(type(mode) is not DeviceContext for mode in torch.overrides._get_current_function_mode_stack())


def _getters(*names: str) -> list[Callable[[], Any]]:
    """Those of torch's functions that tell a setting which this release has."""
    return [getattr(torch._C, f"_get_{name}") for name in names if hasattr(torch._C, f"_get_{name}")]


# What kernels look up each time they run; and what decides, besides, of which kernels torch makes up an operator.
_KERNEL_SETTINGS = {
    "torch.use_deterministic_algorithms": _getters("deterministic_algorithms", "deterministic_algorithms_warn_only"),
    "torch.utils.deterministic.fill_uninitialized_memory": _getters("deterministic_fill_uninitialized_memory"),
    "torch.set_float32_matmul_precision": _getters("float32_matmul_precision"),
    "torch.backends.cuda.matmul": _getters("cublas_allow_tf32", "cublas_allow_fp16_reduced_precision_reduction",
                                           "cublas_allow_bf16_reduced_precision_reduction", "cublas_allow_fp16_accumulation"),
    "torch.backends.cudnn": _getters("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cudnn_allow_tf32"),
    "torch.backends.mkldnn": _getters("mkldnn_enabled", "mkldnn_deterministic", "onednn_allow_tf32"),
}  # fmt: skip
_OF_KERNELS = [get for getters in _KERNEL_SETTINGS.values() for get in getters]
_OF_CHOICES = _getters("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled",
                       "overrideable_sdp_enabled", "math_sdp_allow_fp16_bf16_reduction")  # fmt: skip
_SDP_ORDER = _getters("sdp_priority_order")


def kernel_settings() -> tuple[Any, ...]:
    """The settings that kernels look up each time they run."""
    return tuple([get() for get in _OF_KERNELS])


def changed_setting(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """What sets the first of the `kernel_settings` that differs."""
    names = [name for name, getters in _KERNEL_SETTINGS.items() for _ in getters]
    return next(name for name, one, other in zip(names, before, now) if one != other)


def choices() -> tuple[Any, ...]:
    """The settings that decide of which kernels torch makes up an operator: which attention is allowed, in which order."""
    return tuple([get() for get in _OF_CHOICES]) + tuple([tuple(get()) for get in _SDP_ORDER])


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, `dtype` is torch's default for floats."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def casts_not_kept() -> Iterator[None]:
    """Inside, autocast keeps no weight that it has cast for the next use, and looks for none."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def is_bare(x: torch.Tensor) -> bool:
    """Whether `x` is a tensor and nothing else; one without a value, of a recording, counts as what it stands for."""
    return type(x) is torch.Tensor or type(x) is FakeTensor


def is_plain(x: torch.Tensor) -> bool:
    """Whether `x` is a tensor and nothing else, and nothing watches: no subclass, transform, mode or compiler."""
    return type(x) is torch.Tensor and not watched()


def tracing() -> bool:
    """Whether a mode watches every op, as tracers do; but for modes that only look."""
    return _dispatch_modes() > 0 and not all(
        getattr(mode, "only_looks", False) for mode in _python_dispatch._get_current_dispatch_mode_stack()
    )


_CPU = torch.device("cpu")


def default_device() -> torch.device:
    """`torch.get_default_device()`, at once where nothing can have changed it."""
    return _CPU if torch._C._len_torch_function_stack() == 0 else torch.get_default_device()


def register_tree_node(cls: type, flatten: Any, unflatten: Any, names: tuple[str, ...]) -> None:
    """Make `cls` a node of torch's own pytree; `names` are the attributes that hold its children."""
    entries = [_pytree.GetAttrKey(name) for name in names]

    def flatten_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = flatten(node)
        return list(zip(entries, children, strict=True)), context

    _pytree.register_pytree_node(
        cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )  # fmt: skip


def held_by(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A module's own parameters, its own buffers, its children."""
    return module._parameters, module._buffers, module._modules


def tree_node(
    cls: type,
) -> tuple[Callable[[Any], Any], Callable[[list[Any], Any], Any], Callable[[Any], Any] | None] | None:
    """How torch's own pytree takes a node of this class apart, puts it together, and calls its children (None where it has no
    names for them); None where the class is a leaf to it."""
    found = _pytree.SUPPORTED_NODES.get(cls)
    if found is None:
        return None
    with_keys: Any = getattr(found, "flatten_with_keys_fn", None)
    names = lambda node: [getattr(key, "name", getattr(key, "key", None)) for key, _ in with_keys(node)[0]]
    return found.flatten_fn, found.unflatten_fn, None if with_keys is None else names


@contextlib.contextmanager
def truncated_normals_by(handler: Callable[..., Any]) -> Iterator[None]:
    """Have `torch.nn.init.trunc_normal_`, which no mode sees, call ``handler(own, tensor, mean, std, a, b, generator)``; `own`
    is torch's way to do it."""
    own = getattr(torch.nn.init, "_no_grad_trunc_normal_", None)
    if own is None:
        yield
        return
    torch.nn.init._no_grad_trunc_normal_ = functools.partial(handler, own)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = own  # type: ignore[attr-defined]


@contextlib.contextmanager
def conversions_by_new_parameters() -> Iterator[None]:
    """Have `nn.Module.to`, `half` and their family put new parameters in the place of those that have no values.

    Torch swaps the two tensors, which fails where something refers to them, as a recording does, and which it would not see.
    """
    own: Any = torch.nn.Module._apply
    later: dict[int, tuple[Any, Any]] = {}  # by its id a parameter, and what has come in its place: it may be tied

    def apply(module: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
        parameters, buffers, children = held_by(module)
        if not any(isinstance(p, FakeTensor) for p in parameters.values()):
            return own(module, fn, recurse)
        for child in children.values() if recurse else ():
            if child is not None:
                child._apply(fn)
        for name, p in parameters.items():
            if p is None:
                continue
            while id(p) in later:
                p = later[id(p)][1]
            with torch.no_grad():
                made = fn(p)
            if made is not p:
                later[id(p)] = p, (made := torch.nn.Parameter(made, requires_grad=p.requires_grad))
            parameters[name] = made
        buffers.update({name: fn(x) for name, x in buffers.items() if x is not None})
        return module

    torch.nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply = own  # type: ignore[method-assign]


def set_default_group_timeout(timeout: Any) -> None:
    """Let the groups of a mesh time out as the process group does (by default half an hour, whatever that was given)."""
    _c10d.default_pg_timeout = timeout
    if getattr(_c10d, "default_pg_nccl_timeout", None) is not None:
        _c10d.default_pg_nccl_timeout = timeout


def default_store() -> Any:
    """The store through which the ranks of the default process group met."""
    return _c10d._get_default_store()


stored_at = _filesystem._StorageInfo  # where in which file torch.distributed.checkpoint finds something
rebuild_tensor = torch._utils._rebuild_tensor_v2  # which torch.save names for a tensor


def group_timeout(group: Any = None) -> float:
    """How many seconds a collective of a process group may take; of the default one, if none is given."""
    device = torch.device("cuda" if "nccl" in dist.get_backend_config(group) else "cpu")
    try:
        found: Any = group or dist.group.WORLD
        return found._get_backend(device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # a backend without options
        return _c10d.default_pg_timeout.total_seconds()


def set_group_timeout(group: Any, timeout: Any) -> bool:
    """Let the collectives of a process group take so long; False where its backend does not take that."""
    try:
        for device in group._device_types:
            group._get_backend(device)._set_default_timeout(timeout)
    except (AttributeError, RuntimeError):
        return False
    return True


def preload() -> None:
    """Import what torch imports at the first op on shapes alone: a second, spent once before a fork, not by each rank."""
    with shapes_only():
        torch.ops.aten.add.Tensor(torch.empty(1), 1)


def _no_values(x: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a tensor without values has no memory to read")


FakeTensor.__dlpack__ = FakeTensor.apply_ = _no_values  # torch's read from address 0: garbage, or a crash


class _Shapes(threading.local):
    """A thread's own mode, since a mode counts in itself how deep it is entered; and how deep `shapes_only` is entered."""

    depth = 0

    @functools.cached_property
    def mode(self) -> Any:
        return fake_mode(allow_non_fake_inputs=True)


_shapes = _Shapes()
logging.getLogger(FakeTensorMode.__module__).addFilter(lambda record: _shapes.depth == 0)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Inside, tensors have shapes and strides but no values; what cannot be run so raises, and is not logged."""
    _shapes.depth += 1
    try:
        with unrecorded(), _shapes.mode:
            yield
    finally:
        _shapes.depth -= 1


def in_parts(func: Any) -> Any:
    """What carries an op out as others, where torch made it of others; below autograd it may come as it is. Or None."""
    made = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return func.decompose if made else None


# --- recording plans --------------------------------------------------------------------------------------------------


def fake_mode(**options: Any) -> Any:
    """A mode of its own in which tensors have no values, and raise where code in C asks for their address."""
    mode = FakeTensorMode(**options)
    mode._allow_unsafe_data_ptr_access = False
    return mode


def without_values(mode: Any, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of such a mode, made by the short way."""
    return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


_seeing = threading.Lock()
_recordings: dict[int, int] = {}  # by thread, how many see exchanges
_data: Any = torch._C.TensorBase.data
_uses: Any = torch._C.TensorBase._use_count


class _Data:
    """`torch.Tensor.data` while something is recorded. Torch passes its methods to modes, which ask for the name."""

    __name__ = "data"

    def __get__(self, x: Any, cls: Any = None) -> Any:
        return self if x is None else _data.__get__(x)

    def __set__(self, x: torch.Tensor, value: Any) -> None:
        at_work = recorder()
        _data.__set__(x, value) if at_work is None else at_work.assigned(x, value, _data.__set__)


def _counted(x: torch.Tensor) -> int:
    if (at_work := recorder()) is not None:
        at_work.swapped(x)
    return _uses(x)


@contextlib.contextmanager
def exchanges_seen() -> Iterator[None]:
    """Have the recorder at work asked before `x.data = value`, of which no mode learns: ``recorder().assigned(x, value, set)``;
    and before `torch.utils.swap_tensors`, which begins by counting the uses of both: ``recorder().swapped(x)``."""
    before = _recordings.get(threading.get_ident(), 0)
    _see_exchanges(before + 1)
    try:
        yield
    finally:
        _see_exchanges(before)


def _see_exchanges(recordings: int) -> None:
    """Say how many recordings of this thread see exchanges."""
    with _seeing:
        _recordings[threading.get_ident()] = recordings
        if not recordings:
            del _recordings[threading.get_ident()]
        if _recordings:
            torch.Tensor.data = _Data()  # type: ignore[assignment]
            torch.Tensor._use_count = _counted  # type: ignore[method-assign]
        elif "data" in vars(torch.Tensor):
            del torch.Tensor.data, torch.Tensor._use_count


NO_VALUE_ERRORS: tuple[type[Exception], ...] = tuple(  # what says that an op cannot be run without values
    error for name in ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException",
                       "UnsupportedFakeTensorException") if (error := getattr(_fake_tensor, name, None)))  # fmt: skip


def unrecorded() -> contextlib.AbstractContextManager[Any]:
    """Inside, no dispatch mode sees what is done."""
    return _python_dispatch._disable_current_modes() if dispatch_modes() else contextlib.nullcontext()


def never_recorded(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ours that works on tensors of its own: no dispatch mode sees them."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not dispatch_modes():
            return fn(*args, **kwargs)
        with unrecorded():
            return fn(*args, **kwargs)

    return run


backward_code = _autograd_graph._engine_run_backward.__code__  # of the function in whose call a backward pass runs


def current_autograd_number() -> int:
    """The number of the autograd node that is at work, -1 without one."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for x in tree.values():
            yield from tensors_of(x)
    elif isinstance(tree, (list, tuple)):
        for x in tree:
            yield from tensors_of(x)


def is_operator(func: Any) -> bool:
    """Whether `func` is something under `torch.ops`."""
    return isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def needs_gradient(x: torch.Tensor) -> bool:
    """Whether autograd follows `x`, at any level of transforms."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
        if x.requires_grad:
            return True
    return False


autograd_count = torch.autograd._get_sequence_nr  # how many nodes this thread has made; each knows its number


engine_code = getattr(
    torch.autograd.graph, "_engine_run_backward", dispatch_to_own
).__code__  # the frame of a backward pass
_running = getattr(torch._C, "_current_autograd_node", lambda: None)


def running_node() -> int | None:
    """The number of the node whose backward is running in this thread, or None."""
    node = _running()
    return None if node is None else node._sequence_nr()


def made_after(x: torch.Tensor, count: int) -> bool:
    """Whether autograd made `x` when it had already made `count` nodes."""
    return x.grad_fn is not None and x.grad_fn._sequence_nr() >= count


def level() -> int:
    """How deep functorch's transforms are nested at this point."""
    return _functorch.maybe_current_level() or 0


def version(x: torch.Tensor) -> int:
    """How often `x` has been written in place."""
    return 0 if x.is_inference() else peel(x)._version


def function_mode_on() -> bool:
    """Whether a mode sees the torch functions that are called here."""
    return torch._C._len_torch_function_stack() > 0 and torch._C._is_torch_function_all_disabled() is False


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


_UNUSED = functools.reduce(operator.or_, (
    torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    for name in ("AutogradCPU", "AutogradCUDA", "AutogradMeta", "AutogradOther", "ADInplaceOrView", "AutocastCPU",
                 "AutocastCUDA")))  # fmt: skip


@contextlib.contextmanager
def on_plain_tensors() -> Iterator[None]:
    """Inside, torch's functions lead straight to the kernels: no autograd or autocast, no notes of views, no modes."""
    with torch._C._ExcludeDispatchKeyGuard(_UNUSED), torch._C.DisableTorchFunction():
        yield


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
