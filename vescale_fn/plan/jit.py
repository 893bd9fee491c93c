"""`vfn.jit`: record a function once, replay it on plain tensors."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

from torch import fx

from .._core import torch_internals
from .._core.base import context, source_lines, tracebacks
from .._core.base.errors import TransformError, VfnError
from .._core.base.front_door import public
from .._core.base.messages import report, short
from .._core.base.user_calls import checked_function, either
from .._core.distributed.divergence import RankCall, Watch
from .._core.shard_map import interrupts
from .execution.backends import Backend
from .ir.graph import Pass
from .ir.memory_limit import limit
from .loading import checked, key_of, loaded, meshes_of
from .lowered import Lowered, Origin
from .passes.budget import Budget, within
from .passes.dce import needed_collectives
from .picked import Names, Picked, Places, check_apart, picked
from .pipeline import PASSES
from .plan import Plan
from .saved_plans import SavedPlan
from .signature import JitCall, PlanKey, difference
from .tracing import leaves as leaves_
from .tracing import value_guards
from .tracing.earlier import Earlier
from .tracing.guards import Captured
from .tracing.rank_consensus import Stage, agree, shared_mesh, stage, tell_left_out
from .tracing.rank_inputs import brought
from .tracing.rank_notes import RecordingNotes
from .tracing.recorder import Unrecordable
from .tracing.shared_calls import recorded_once
from .tracing.trace import Recorded, laid_out, trace
from .uncollected import uncollected

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


Q = ParamSpec("Q")
R = TypeVar("R")


@overload
def jit(
    f: Callable[Q, R],
    *,
    donate_argnums: Places = (),
    static_argnums: Places = (),
    donate_argnames: Names = (),
    static_argnames: Names = (),
    in_specs: Any = None,
    out_specs: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    backend: str = "torch",
    cuda_graph: bool = False,
    arena: bool = False,
    memory: int | str | None = None,
    passes: Sequence[Pass] | None = None,
    plans: Sequence[SavedPlan] = (),
) -> Jitted[Q, R]: ...
@overload
def jit(
    *,
    donate_argnums: Places = (),
    static_argnums: Places = (),
    donate_argnames: Names = (),
    static_argnames: Names = (),
    in_specs: Any = None,
    out_specs: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    backend: str = "torch",
    cuda_graph: bool = False,
    arena: bool = False,
    memory: int | str | None = None,
    passes: Sequence[Pass] | None = None,
    plans: Sequence[SavedPlan] = (),
) -> Callable[[Callable[Q, R]], Jitted[Q, R]]: ...
@torch_internals.not_compiled
@public("jit")
def jit(
    f: Any = ...,
    *,
    donate_argnums: Places = (),
    static_argnums: Places = (),
    donate_argnames: Names = (),
    static_argnames: Names = (),
    in_specs: Any = None,
    out_specs: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    backend: str = "torch",
    cuda_graph: bool = False,
    arena: bool = False,
    memory: int | str | None = None,
    passes: Sequence[Pass] | None = None,
    plans: Sequence[SavedPlan] = (),
) -> Any:
    """`f`, recorded once into a plan of plain local ops and collectives, which later calls replay.

    A replay has none of the cost of arrays, autograd and modes, and its plan is improved as a whole: equal values are
    computed once, small collectives travel together, memory is freed early. Whole training steps profit most: loss,
    gradient, update in one function. Under another transform, in a `shard_map` body and in debug mode `f` runs as written,
    as a part of what is around it; in another `jit` too, where equal calls are recorded once.

    Args:
        f: a pure function of trees. It is run once on tensors without values for each new combination of trees, shapes,
            dtypes, layouts, and Python values: ints, bools and strings are a part of the plan, a float is an input of it. A
            function that reads a tensor's value in Python (``if loss > 0``) runs as written, and says so once; a truth value of
            whole numbers (``if mask.all()``) chooses between plans. Without `f`, a decorator: ``@vfn.jit(static_argnums=0)``.
        donate_argnums: which arguments the call may use up: their memory takes results of the same shape and layout.
            They cannot be used afterwards.
        static_argnums: which arguments are Python values that the plan is made for, of any hashable type.
        donate_argnames, static_argnames: these, by the arguments' names. Of an argument that is picked by its place alone the
            name counts too, and the other way about; where both are given, each counts as it stands.
        in_specs: how the arguments are to lie: a `P` or an array's ``sharding`` for all, or a tuple with one, or a prefix tree,
            for each argument that is not static; None for what stays as it is. Plain tensors are laid out as they come in, on
            the current mesh (or that of another argument); an array that lies otherwise is an error. All arguments
            are then given by position.
        out_specs: the layout of the results: a `P`, or a prefix tree of them. By default they have the layout that the
            function gives them: what is unreduced stays unreduced.
        in_shardings, out_shardings: `in_specs` and `out_specs`, by JAX's names.
        backend: what computes: torch's own kernels, or with ``"inductor"`` what torch's compiler makes of the local calls
            between collectives; then values are the same up to rounding.
        cuda_graph: whether calls are one CUDA graph each, collectives included. Arguments must be tensors on the GPU.
        arena: whether what calls make lies in one block of memory, which the plan keeps (one for each of its calls that run at
            the same time); results lie elsewhere. On a CPU each value lies where it lay in the call before, and values of
            operators that cannot write where they are told (attention, normalization, draws, what collectives bring) are left
            out. On CUDA it is one segment of torch's allocator, from the second call on, in which that finds the places.
        memory: the most bytes that a process may need at once, arguments included, as ``lower(...).memory().peak`` predicts:
            an int, ``"8 GiB"``, or a share of what this plan needs without it, ``"60 %"``. Values that wait for the backward
            pass are computed again where that is predicted to take the least time, collectives and keyed draws too; or, on a
            GPU, wait in the memory of the host, copied there and back while other things are computed. No bit depends on it.
        passes: the functions from graph to graph that improve a plan, in their order; None for `vfn.plan.PASSES`. With
            ``functools.partial(buckets, limit=1 << 20)`` for ``buckets`` small collectives travel in smaller groups.
        plans: from files (`load_plan`): calls that one of them serves are not recorded. Where none does, a warning says why.

    Returns:
        A function of the same arguments, with ``lower(*args)``, which shows the plan, and ``cache_info()``. Tensors that `f`
        closes over are constants, used as they are at the time of a call; when a name that it uses has come to mean another
        tensor, number or function, it records anew.

    Raises:
        InPlaceError: `f` changes an argument, or what it closes over, in place.
        RandomError: `f` draws from torch's global generator.
        SpecError: an argument that does not fit `in_specs`, or lies otherwise.
        TransformError: places or names that `f` does not take, an argument static and donated; no plan within `memory`.

    Source: `jax.jit`; "static eager" of veScale (arXiv 2509.07003).

    >>> import torch, vescale_fn as vfn
    >>> @vfn.jit
    ... def step(w, x, lr):
    ...     return w - lr * vfn.grad(lambda w: ((x @ w) ** 2).sum())(w)
    >>> w = step(torch.ones(2), torch.eye(2), 0.25)
    >>> step(w, torch.eye(2), 0.5), step.cache_info().records
    (tensor([0., 0.]), 1)
    """
    if f is ...:
        return functools.partial(
            jit,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
            donate_argnames=donate_argnames,
            static_argnames=static_argnames,
            in_specs=in_specs,
            out_specs=out_specs,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            backend=backend,
            cuda_graph=cuda_graph,
            arena=arena,
            memory=memory,
            passes=passes,
            plans=plans,
        )
    checked_function(f, "jit")
    donated = picked(f, donate_argnums, donate_argnames, "donate")
    static = picked(f, static_argnums, static_argnames, "static")
    check_apart(f, static, donated)
    ins = either("jit", "in_specs", in_specs, "in_shardings", in_shardings)
    outs = either("jit", "out_specs", out_specs, "out_shardings", out_shardings)
    how, chosen = Backend(backend, cuda_graph, arena), tuple(PASSES if passes is None else passes)
    if memory is not None:
        chosen = within(chosen, limit(memory, how.name))
    return Jitted(f, donated, static, ins, outs, how, chosen, checked(plans))


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


class _Tried(NamedTuple):
    """What comes of recording a function.

    Attributes:
        recorded: the recording.
        plan: one that no pass has improved yet.
        graph: what was recorded, perhaps in part.
        reason: why it cannot be.
        raised: what recording it raised, where that is why.
        failure: what it raised that is for the caller.
    """

    recorded: Recorded | None = None
    plan: Plan | None = None
    graph: fx.Graph | None = None
    reason: str = ""
    raised: str = ""
    failure: Exception | None = None


class Jitted(Generic[Q, R]):
    """A function that records itself once and then replays its plan; made by `jit`."""

    def __init__(
        self,
        f: Callable[..., Any],
        donated: Picked | None,
        static: Picked | None,
        in_specs: Any,
        out_specs: Any,
        how: Backend,
        passes: tuple[Pass, ...],
        saved: tuple[SavedPlan, ...],
    ) -> None:
        functools.update_wrapper(self, f)
        self._f, self._in_specs, self._out_specs = f, in_specs, out_specs
        self._donated, self._static = donated, static
        self._how, self._passes, self._saved = how, (*passes, *how.passes), saved
        self._name = getattr(f, "__name__", type(f).__name__)
        # None: the function runs as written
        self._plans: OrderedDict[Any, Plan | value_guards.Fork | None] = OrderedDict()
        self._hits = self._records = self._as_written = 0
        self._last: tuple[Any, str] = (None, "")
        self._before: PlanKey | None = None  # the key of the last replay
        self._said: set[str] = set()

    def __repr__(self) -> str:
        f, plans = getattr(self._f, "__qualname__", None) or short(self._f), len(self._plans)
        return f"<vfn.jit of {f}: {plans} plan{'s' * (plans != 1)}>"

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else functools.partial(self, owner)

    @torch_internals.not_compiled
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R:
        if _belongs_to_another():
            found = self._shared(args, kwargs)
            if found is not None:
                return found[0]
            call = None if self._in_specs is None else self._call(args, kwargs)
            out = self._f(*args, **kwargs) if call is None else call.run()
            return laid_out(out, self._out_specs)
        call = JitCall(self._f, args, kwargs, self._static, self._donated, self._in_specs, self._before)
        if call.follows_gradients():
            self._say(
                "an argument requires gradients, which a replay would not follow",
                "vfn.grad around the jit, or in it; or x.detach()",
            )
            return self._run(None, call)
        plan = self._known(call)
        if plan is not _NEW:  # a replay sets nothing ambient that an interrupt could leave behind
            self._hits += plan is not None
            return self._run(plan, call)
        with interrupts.undone(), uncollected():
            plan, reason = self._made(call)
        call.raised = None
        if plan is not None:
            # whatever its first replay raises, on this rank alone perhaps: the others do not record again
            self._remember(call, plan)
            return self._run(plan, call)
        out = self._watched(call) if call.watched else self._run(plan, call)
        self._remember(call, plan)
        self._say(reason, _INSTEAD)  # now that the function itself has shown no error
        return out

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The plan for arguments like these, to look at: its text, its collectives, its memory. Nothing is run. On a real mesh
        every rank has to come here, as to a call.

        Raises:
            TransformError: the function cannot be recorded.
        """
        return self.lowered(self._call(args, kwargs))

    def lowered(self, call: JitCall, where: str = "jit", instead: str = _INSTEAD) -> Lowered:
        """The plan for a call, to look at; errors are those of the function `where`, and say what to write instead."""
        plan, reason = self._known(call), ""
        if plan is _NEW or plan is None:
            with interrupts.undone(), uncollected():
                plan, reason = self._made(call)
            if plan is None:
                cause, call.raised = call.raised, None
                raise TransformError(report(where, f"{self._name} cannot be recorded", [reason], instead)) from cause
            self._remember(call, plan)
        lowered = plan.lowered(self._name)
        key, captured = key_of(call, self._how, self._passes), self._captured(call)
        lowered.origin = Origin(plan, key, meshes_of(call, captured), call, self._traced, self._passes)
        return lowered

    def call_of(self, args: tuple[Any, ...]) -> JitCall:
        """A call, as a plan is recorded for it."""
        return self._call(args, {})

    def improved_by(self, improved: Callable[[Sequence[Pass]], Sequence[Pass]]) -> Jitted[Q, R]:
        """The same function with other passes, of those that it has."""
        passes = self._passes[: len(self._passes) - len(self._how.passes)]
        given = self._f, self._donated, self._static, None, self._out_specs, self._how
        return Jitted(*given, tuple(improved(passes)), ())

    @property
    def in_specs(self) -> Any:
        """How its arguments are to lie, if anybody has said so."""
        return self._in_specs

    def cache_info(self) -> CacheInfo:
        """How many plans there are, how often they were used, and why the last one was made."""
        return CacheInfo(self._hits, self._records, self._as_written, len(self._plans), CACHE_SIZE, self._last[1])

    def clear_cache(self) -> None:
        """Forget all plans."""
        self._plans.clear()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JitCall:
        return JitCall(self._f, args, kwargs, self._static, self._donated, self._in_specs)

    def _shared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """The result of a call in another recording, where that notes it as one node; else None."""
        recorder = torch_internals.recorder()
        if recorder is None or not recorder.shares:
            return None
        try:
            call = self._call(args, kwargs)
        except VfnError:  # which the function itself does not have to mind
            return None
        function = lambda *args, **kwargs: laid_out(call.function(*args, **kwargs), self._out_specs)
        return recorded_once(recorder, call, function, self, lambda: self._captured(call))

    def _run(self, plan: Plan | None, call: JitCall) -> Any:
        if plan is None:
            self._as_written += 1
            return laid_out(call.run(), self._out_specs)
        if plan.donated:
            return plan.taking(call.leaves, f"jit({self._name})", source_lines.user_line())
        return plan(call.leaves)

    def _watched(self, call: JitCall) -> Any:
        """The function as written, as in debug mode: on ranks where recording it raised it may raise again, and the others are
        not to wait for these."""
        with Watch(None, call.watched):
            out = self._run(None, call)
            if (watch := context.watch()) is not None:
                watch.compare(call.watched, RankCall(f"the end of {self._name}", "over all ranks"))
        return out

    def _known(self, call: JitCall) -> Any:
        """The plan for a call, None where the function runs as written, `_NEW` where that is to be found out."""
        try:
            plan = value_guards.chosen(self._plans.get(call.key, _NEW), call.leaves, _NEW)
        except TypeError:
            raise call.unhashable() from None
        if plan.__class__ is Plan and (changed := plan.changed()) is not None:  # type: ignore[union-attr]
            self._last = (call.key, f"{changed}, which it closes over, has changed")
            return _NEW
        if plan is not _NEW and len(self._plans) > 1:
            self._plans.move_to_end(call.key)
        if plan is not _NEW and call.key is not self._before:
            call.key.expect(call.leaves, self._before)
            self._before = call.key
        return plan

    def _made(self, call: JitCall) -> tuple[Plan | None, str]:
        """A plan, from a file if there is one; or None, and why there is none."""
        if context.virtual() is not None and self._how.name != "torch":
            what = f"under vfn.deterministic, what {self._how.name} makes of several ranks' calls would round as it fuses them"
            raise TransformError(report("jit", what, fix='no backend, which is backend="torch"'))
        if self._saved:
            captured = self._captured(call)
            plan = loaded(self._saved, self._f, call, captured, self._how, self._passes, self._name)
            if plan is not None:
                return plan, ""
        return self._recorded(call)

    def _recorded(self, call: JitCall) -> tuple[Plan | None, str]:
        """A plan; or None, and why there is none."""
        notes = RecordingNotes(self._f)
        recorded, plan, graph, reason, raised, failure = self._tried(call)
        mesh, passes = shared_mesh(call.leaves, graph, recorded), list(self._passes)
        used: list[Any] = []
        while True:
            stages: list[Stage] = []
            needed = [] if mesh is None or graph is None or plan is None else needed_collectives(graph)
            try:  # what raises here, on one rank perhaps, the others are told
                if mesh is not None and recorded is not None and not used:
                    used = brought(recorded, call.leaves, call.names(), mesh)
                if plan is not None:
                    plan.improve(passes, _nothing if mesh is None else lambda graph, to=stages: to.append(stage(graph)))
            except Exception as error:
                failure = error
            as_one = getattr(plan, "is_of_one_rank", False)
            verdict = agree(self._name, mesh, graph, stages, needed, used, as_one, reason, raised, failure, notes)
            if failure is not None:
                raise failure
            if plan is None or verdict.reason:
                call.watched = verdict.watched
                return None, verdict.reason
            if verdict.parted is None and not verdict.apart:
                plan.settle()
                recorded.end()  # type: ignore[union-attr]
                return plan, ""
            if not plan.follows(verdict):
                self._leave_out(passes, verdict.parted, mesh, stages)

    def _tried(self, call: JitCall) -> _Tried:
        """What comes of recording."""
        earlier = Earlier()
        try:
            recorded, plan = self._traced(call, earlier)
        except Unrecordable as why:
            call.guards = why.guards
            reason = why.reason if why.line == "?" else f"{why.reason}, at {source_lines.quoted(why.line)}"
            return _Tried(graph=why.graph, reason=reason)
        except VfnError as error:
            return _Tried(graph=earlier.graph, failure=error)
        except Exception as error:  # perhaps of the function itself: it is to show it
            call.raised, raised = error, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return _Tried(graph=earlier.graph, reason=f"recording it raised {raised}", raised=raised)
        call.guards = recorded.guards
        return _Tried(recorded, plan, recorded.graph)

    def _traced(self, call: JitCall, earlier: Earlier | None = None) -> tuple[Recorded, Plan]:
        """A recording, and a plan that no pass has improved yet."""
        names = call.names()
        recorded = trace(call.function, call.leaves, names, call.treedef, self._out_specs, earlier or Earlier())
        return recorded, Plan(recorded, call.leaves, self._captured(call), names, call.donated(), self._how, self._f)

    def _leave_out(self, passes: list[Pass], place: int | None, mesh: Any, stages: Sequence[Stage]) -> None:
        """Do without a pass after which ranks would not meet; or, of a limit on memory, without repeated collectives."""
        assert place is not None
        budget = passes[place]
        if isinstance(budget, Budget) and budget.collectives:
            passes[place] = budget.without_collectives()
        else:
            tell_left_out(self._name, mesh, passes.pop(place), stages[place + 1])

    def _captured(self, call: JitCall) -> Captured:
        return Captured(self._f, filter(leaves_.is_object, (*call.leaves, *call.static())))

    def _remember(self, call: JitCall, plan: Plan | None) -> None:
        before, reason = self._last
        if before is not None and before is not call.key:
            reason = difference(before, call.key, call.names())
        self._last = (call.key, reason)
        self._records += plan is not None and not plan.loaded
        if plan is not None and self._records == OFTEN:
            source_lines.warn(
                report(
                    "jit",
                    f"{self._name} has been recorded {OFTEN} times, which costs more than it saves",
                    [f"the last time because {reason}"],
                    "arguments of the same shapes and layouts (pad the last batch); a float or a tensor for an int "
                    "that changes",
                )
            )
        self._plans[call.key] = value_guards.grown(self._plans.get(call.key), call.guards, plan)
        if len(self._plans) > CACHE_SIZE:
            self._plans.popitem(last=False)

    def _say(self, reason: str, fix: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            source_lines.warn(report("jit", f"{self._name} runs as written, not as a plan", [reason], fix), UserWarning)


def _nothing(graph: Any) -> None:
    """What looks at the graphs between passes where there is nobody to compare them with."""


def _belongs_to_another() -> bool:
    """Whether the function is a part of something else that is being transformed, recorded or examined."""
    return bool(
        torch_internals.dispatch_modes()
        or torch_internals.watched_by_other_modes()
        or torch_internals.transforming()
        or torch_internals.forward_ad_active()
        or context.examined()
        or torch_internals.is_compiling()
    )
