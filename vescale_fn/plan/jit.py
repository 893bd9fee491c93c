"""`vfn.jit`: record a function once, replay it on plain tensors."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import _torch, context, lines, tracebacks, tree
from ..calls import called, checked_function, parameter
from ..errors import TransformError, VfnError, described, report, short
from ..layout import WHOLE, layout, type_text
from . import leaves as leaves_
from .backends import Backend
from .captured import Captured
from .consent import agree
from .graph import Pass
from .lowered import Lowered
from .pipeline import PASSES
from .plan import Plan
from .record import Unrecordable
from .trace import laid_out, trace

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here

CACHE_SIZE = 64
_NEW = object()
_INSTEAD = "torch.where for `if`, tensors for numbers; or leave the jit out"
OFTEN = 8  # recordings of one function, after which it says why it records again


class CacheInfo(NamedTuple):
    """What a jitted function remembers.

    Attributes:
        hits: calls that replayed a plan.
        records: calls that recorded one.
        as_written: calls that ran the function itself.
        size, limit: how many plans there are, and how many there can be.
        last: why the last recording was needed.
    """

    hits: int
    records: int
    as_written: int
    size: int
    limit: int
    last: str


def jit(
    f: Callable[..., Any],
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    out_specs: Any = None,
    backend: str = "torch",
    cuda_graph: bool = False,
    passes: Sequence[Pass] = PASSES,
) -> Jitted:
    """`f`, recorded once into a plan of plain local ops and collectives, which later calls replay.

    A replay has none of the cost of arrays, autograd and modes, and its plan is improved as a whole: equal values are
    computed once, small collectives travel together, memory is freed early. Whole training steps profit most: loss,
    gradient, update in one function. Under another transform, in a `shard_map` body, in another `jit` and in debug mode
    `f` runs as written, as a part of what is around it.

    Args:
        f: a pure function of trees. It is run once on tensors without values for each new combination of trees, shapes,
            dtypes, layouts, and Python values: ints, bools and strings are a part of the plan, a float is an input of it. A
            function that reads a tensor's value in Python (``if loss > 0``) runs as written, and says so once.
        donate_argnums: which arguments the call may use up: their memory takes results of the same shape and layout.
            They cannot be used afterwards.
        static_argnums: which arguments are Python values that the plan is made for, of any hashable type.
        out_specs: where the results are to lie: a `P`, or a prefix tree of them. By default they lie as they come; partial
            sums are added up.
        backend: what computes: torch's own kernels, or with ``"inductor"`` what torch's compiler makes of the local calls
            between collectives; then values are the same up to rounding.
        cuda_graph: whether calls are one CUDA graph each, collectives included. Arguments must be tensors on the GPU.
        passes: the functions from graph to graph that improve a plan, in their order; by default `vfn.plan.PASSES`. With
            ``functools.partial(buckets, limit=1 << 20)`` for ``buckets`` small collectives travel in smaller groups.

    Returns:
        A function of the same arguments, with ``lower(*args)``, which shows the plan, and ``cache_info()``. Tensors that `f`
        closes over are constants, used as they are at the time of a call; when a name that it uses has come to mean another
        tensor, number or function, it records anew.

    Raises:
        InPlaceError: `f` changes an argument, or what it closes over, in place.
        RandomError: `f` draws from torch's global generator.

    Source: `jax.jit`; "static eager" of veScale (arXiv 2509.07003).

    >>> import torch, vescale_fn as vfn
    >>> @vfn.jit
    ... def step(w, x, lr):
    ...     return w - lr * vfn.grad(lambda w: ((x @ w) ** 2).sum())(w)
    >>> w = step(torch.ones(2), torch.eye(2), 0.25)
    >>> step(w, torch.eye(2), 0.5), step.cache_info().records
    (tensor([0., 0.]), 1)
    """
    checked_function(f, "jit")
    donated, static = _places(donate_argnums, "donate_argnums"), _places(static_argnums, "static_argnums")
    return Jitted(f, donated, static, out_specs, Backend(backend, cuda_graph), tuple(passes))


def disable_jit() -> contextlib.AbstractContextManager[None]:
    """Inside this ``with`` block functions under `jit` run as written: to step through them, or on simulated ranks for speed.

    Source: `jax.disable_jit`.

    >>> import torch, vescale_fn as vfn
    >>> f = vfn.jit(lambda x: x + 1)
    >>> with vfn.disable_jit():
    ...     f(torch.zeros(2)), f.cache_info().records
    (tensor([1., 1.]), 0)
    """
    return context.as_written()


def _places(argnums: Any, name: str) -> tuple[int, ...]:
    found = tuple(argnums) if isinstance(argnums, (tuple, list)) else (argnums,)
    wrong = [n for n in found if type(n) is not int]
    if wrong:
        raise TransformError(report("jit", f"{name} must be an int or a tuple of ints, the places of arguments, but it is "
                                    f"{short(argnums)}", fix=f"{name}=0 for the first argument"))  # fmt: skip
    return found


class Jitted:
    """A function that records itself once and then replays its plan; made by `jit`."""

    def __init__(self, f: Callable[..., Any], donated: tuple[int, ...], static: tuple[int, ...], out_specs: Any,
                 how: Backend, passes: tuple[Pass, ...]) -> None:  # fmt: skip
        functools.update_wrapper(self, f)
        self._f, self._donated, self._static, self._out_specs = f, donated, static, out_specs
        self._passes = (*passes, *how.passes)
        self._how = how
        self._f, self._donated, self._static, self._out_specs = f, donated, static, out_specs
        self._plans: OrderedDict[Any, Plan | None] = OrderedDict()  # None: the function runs as written
        self._hits = self._records = self._as_written = 0
        self._last: tuple[Any, str] = (None, "")
        self._said: set[str] = set()
        self._name = getattr(f, "__name__", type(f).__name__)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _belongs_to_another():
            out = self._f(*args, **kwargs)
            return out if self._out_specs is None else laid_out(out, self._out_specs)
        leaves, treedef, key = self._key(args, kwargs)
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves):
            self._say("an argument requires gradients, which a replay would not follow",
                      "vfn.grad around the jit, or in it; or x.detach()")  # fmt: skip
            return self._run_as_written(args, kwargs)
        plan = self._known(key, args, kwargs)
        if plan is not _NEW:
            self._hits += plan is not None
            return self._run_as_written(args, kwargs) if plan is None else self._replayed(plan, leaves)
        plan, reason = self._recorded(leaves, treedef, args, kwargs)
        out = self._run_as_written(args, kwargs) if plan is None else self._replayed(plan, leaves)
        self._remember(key, plan, args, kwargs)
        if plan is None:  # now that the function itself has shown no error
            self._say(reason, _INSTEAD)
        return out

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The plan for arguments like these, to look at: its text, its collectives, its memory. Nothing is run.

        Raises:
            TransformError: the function cannot be recorded.
        """
        leaves, treedef, key = self._key(args, kwargs)
        plan, reason = self._known(key, args, kwargs), ""
        if plan is _NEW or plan is None:
            plan, reason = self._recorded(leaves, treedef, args, kwargs)
            if plan is None:
                raise TransformError(report("jit", f"{self._name} cannot be recorded", [reason], _INSTEAD))
            self._remember(key, plan, args, kwargs)
        return plan.lowered(self._name)

    def cache_info(self) -> CacheInfo:
        """How many plans there are, how often they were used, and why the last one was made."""
        return CacheInfo(self._hits, self._records, self._as_written, len(self._plans), CACHE_SIZE, self._last[1])

    def clear_cache(self) -> None:
        """Forget all plans."""
        self._plans.clear()

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any, Any]:
        fixed: tuple[Any, ...] = ()
        if self._static:
            places = [n % len(args) for n in self._static if -len(args) <= n < len(args)]
            fixed = tuple((type(args[n]), args[n]) for n in places)
            args = tuple(None if n in places else x for n, x in enumerate(args))
        leaves, treedef = tree.flatten((args, kwargs))
        return leaves, treedef, (treedef, tuple(map(leaves_.signature, leaves)), fixed, _around())

    def _run_as_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._as_written += 1
        return laid_out(called(self._f, args, kwargs, "jit"), self._out_specs)

    def _replayed(self, plan: Plan, leaves: list[Any]) -> Any:
        return plan.taking(leaves, f"jit({self._name})", lines.user_line()) if plan.donated else plan(leaves)

    def _known(self, key: Any, args: Any, kwargs: Any) -> Any:
        """The plan for a key, None where the function runs as written, `_NEW` where that is to be found out."""
        try:
            plan = self._plans.get(key, _NEW)
        except TypeError:
            raise self._unhashable(args, kwargs) from None
        if plan.__class__ is Plan and (changed := plan.changed()) is not None:  # type: ignore[union-attr]
            self._last = (key, f"{changed}, which it closes over, has changed")
            return _NEW
        if plan is not _NEW:
            self._plans.move_to_end(key)
        return plan

    def _remember(self, key: Any, plan: Plan | None, args: Any, kwargs: Any) -> None:
        self._tell_if_often(key, args, kwargs)
        self._records += plan is not None
        self._plans[key] = plan
        if len(self._plans) > CACHE_SIZE:
            self._plans.popitem(last=False)

    def _recorded(self, leaves: list[Any], treedef: Any, args: Any, kwargs: Any) -> tuple[Plan | None, str]:
        """A plan; or None, and why there is none."""
        names, recorded, graph, reason, failure = self._names(args, kwargs), None, None, "", None
        try:
            recorded = trace(self._with_static(args), leaves, names, treedef, self._out_specs)
            graph = recorded.graph
        except Unrecordable as why:
            reason = why.reason if why.line == "?" else f"{why.reason}, at {lines.quoted(why.line)}"
            graph = why.graph
        except VfnError as error:
            failure = error
        except Exception as error:  # perhaps of the function itself: it is to show it
            reason = f"recording it raised {type(error).__name__}: {str(error).splitlines()[0]}"
        reason = agree(self._name, leaves, graph, reason, failure)
        if failure is not None:
            raise failure
        if recorded is None or reason:
            return None, reason
        names = [f"{name} ({leaves_.described(x)})" for name, x in zip(names, leaves, strict=True)]
        captured = Captured(self._f, filter(leaves_.is_object, leaves))
        return Plan(recorded, leaves, captured, names, self._donated_leaves(args), self._how, self._passes), ""

    def _names(self, args: Any, kwargs: Any) -> list[str]:
        """The leaves of the arguments, as the function's own code would name them."""
        static = {n % len(args) for n in self._static if -len(args) <= n < len(args)}
        found = []
        for n, arg in enumerate(args):
            if n not in static:
                found += tree.paths(arg, parameter(self._f, args, n) or f"args[{n}]")
        for name in sorted(kwargs):
            found += tree.paths(kwargs[name], name)
        return found

    def _donated_leaves(self, args: tuple[Any, ...]) -> list[int]:
        """The places of the leaves of donated arguments, among those of all that are not static."""
        static = {n % len(args) for n in self._static if -len(args) <= n < len(args)}
        donated = {n % len(args) for n in self._donated if -len(args) <= n < len(args)} - static
        found, place = [], 0
        for n, arg in enumerate(args):
            count = 0 if n in static else len(tree.leaves(arg))
            found += range(place, place + count) if n in donated else ()
            place += count
        return found

    def _with_static(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        places = {n % len(args) for n in self._static if -len(args) <= n < len(args)}

        def run(*given: Any, **kwargs: Any) -> Any:
            return called(self._f, [args[n] if n in places else x for n, x in enumerate(given)], kwargs, "jit")

        return run

    def _unhashable(self, args: Any, kwargs: Any) -> TransformError:
        named = zip(self._names(args, kwargs), self._key(args, kwargs)[0], strict=True)
        failures = [f"{name} is {described(x)}" for name, x in named if not _is_hashable(x)]
        return TransformError(report("jit", "arguments are trees of tensors and of hashable Python values", failures,
                                     "torch.as_tensor(x) for numbers; a tuple for a list of settings; what never changes, "
                                     "closed over"))  # fmt: skip

    def _tell_if_often(self, key: Any, args: Any, kwargs: Any) -> None:
        before, reason = self._last
        if before is not None and before is not key:
            reason = _difference(before, key, self._names(args, kwargs))
        self._last = (key, reason)
        if self._records == OFTEN:
            lines.warn(report("jit", f"{self._name} has been recorded {OFTEN} times, which costs more than it saves",
                              [f"the last time because {reason}"],
                              "arguments of the same shapes and layouts (pad the last batch); a float or a tensor for an int "
                              "that changes"))  # fmt: skip

    def _say(self, reason: str, fix: str) -> None:
        if reason in self._said:
            return
        self._said.add(reason)
        lines.warn(report("jit", f"{self._name} runs as written, not as a plan", [reason], fix), UserWarning)


def _belongs_to_another() -> bool:
    """Whether the function is a part of something else that is being transformed, recorded or examined."""
    return bool(
        _torch.dispatch_modes()
        or _torch.transforming()
        or _torch.forward_ad_active()
        or context.examined()
        or _torch.is_compiling()
    )


def _around() -> tuple[Any, ...]:
    """What is ambient and decides what a function does."""
    return (
        context.current_mesh(),
        context.simulated(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        _torch.autocasting(),
        _torch.default_device(),
    )


def _is_hashable(x: Any) -> bool:
    try:
        hash(leaves_.signature(x))
    except TypeError:
        return False
    return True


def _difference(before: Any, now: Any, names: Sequence[str]) -> str:
    """In what two keys of plans differ."""
    if before[0] != now[0]:
        return "the arguments' trees differ"
    for name, one, other in zip(names, before[1], now[1]):
        if one != other:
            return f"{name} was {_shown(one)} and is {_shown(other)}"
    return "a static argument differs" if before[2] != now[2] else "the mesh, or another setting around it, differs"


def _shown(signature: Any) -> str:
    if isinstance(signature, tuple) and len(signature) > 1:
        spec = signature[0]
        if hasattr(spec, "tensor_meta"):
            return type_text(spec.tensor_meta.shape, spec.tensor_meta.dtype, layout(spec))
        if isinstance(spec, torch.Size):
            return type_text(spec, signature[2], WHOLE) + ("" if len(signature) == 4 else " of another class")
        return short(signature[1])
    return short(signature)
