"""`pipeline`: a function whose stages run on the ranks along an axis of the mesh, a part of the batch after the other."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from . import schedules
from ._core import torch_internals
from ._core.arrays.along_axis import AlongAxis
from ._core.arrays.array import is_array, mesh_of, spec_of
from ._core.arrays.shapes import ShapeDtype
from ._core.base import context, tree
from ._core.base.containers import opened
from ._core.base.errors import RecordError, TransformError
from ._core.base.front_door import public
from ._core.base.messages import described, report, short
from ._core.base.user_calls import checked_function
from ._core.distributed import collectives
from ._core.distributed.divergence import RankCall
from ._core.distributed.mesh import communicator_of
from ._core.distributed.places import whole_mesh
from ._core.sharding.index_map import axes_of
from ._core.sharding.spec import P, with_place
from ._core.transforms.grad import keep_mark, value_and_grad
from .optim.microbatches import check_results, means, microbatches, parts, reduced_later
from .optim.optimizer import check_steps
from .plan.cut_choice import Played
from .plan.ir.memory_limit import MemoryLimit, limit
from .plan.pipeline_plan import PipelinePlan, planned
from .plan.signature import JitCall
from .plan.stage_results import at_places, recorded
from .plan.staged import Staged, check_alike, check_runs
from .plan.tracing import leaves as leaves_
from .plan.tracing.recorder import Unrecordable
from .plan.tracing.traced_float import Number

NAMED = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
    "interleaved": schedules.interleaved,
    "zb-h1": schedules.zb_h1,
    "zb-h2": schedules.zb_h2,
    "zbv": schedules.zbv,
    "dualpipev": schedules.dualpipev,
}
_KEPT = 16  # plans of one function
_WHOLE = "pipeline: a result of one stage, on all ranks"
_INSTEAD = "vfn.optim.microbatches(f, m), which any transform takes"


@public("pipeline")
def pipeline(
    f: Callable[..., Any],
    axis_name: str,
    *,
    microbatches: int,
    schedule: Any = "1f1b",
    chunks: int | None = None,
    cuts: Any = "balanced",
    gather: str = "step",
    costs: schedules.Costs | None = None,
    has_aux: bool = False,
    memory: int | str | None = None,
) -> Pipelined:
    """`f`, whose stages run on the ranks along an axis of the mesh, each a part of the batch after the other.

    The function is cut where it says `vfn.cut`; nothing of it is split by hand. Under `vfn.value_and_grad` the step is recorded
    once for the shapes of one part, cut into forward and backward tasks of each stage by what depends on what, and these run in
    the order of the schedule. A value that a later stage needs goes there from where it is made; a parameter that several
    stages use (tied embeddings) has its gradients added up. On plain tensors, and on a mesh without the axis, it is
    ``vfn.optim.microbatches(f, m)``: the same parts, the same keys.

    Under `vfn.jit` a step is one call of the plan; the sums over the data axes and the update behind it are planned as usual.

    The value and gradients have the bits of ``microbatches(value_and_grad(f), m)`` on the mesh without the axis; gradients of a
    parameter that several stages use are the same up to rounding.

    Args:
        f: a function ``f(params, *batch, **kwargs)`` that gives a loss, a mean over its batch; with `has_aux` a pair of it and
            of a tree of other means. Like a function under `vfn.jit` it is pure, and reads no values in Python.
        axis_name: the axis of the mesh.
        microbatches: how many parts the batch is divided into: `vfn.optim.microbatches` says how.
        schedule: the name of a schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zb-h1"``, ``"zb-h2"``, ``"zbv"``,
            ``"dualpipev"``, see `vfn.schedules`; ``"auto"``, the fastest that is found for what the stages take and that
            holds no more activations than ``"1f1b"`` on its first rank, and in `vfn.auto` the best of all; a
            `vfn.schedules.Schedule`; or a function of the number of ranks and of microbatches that makes one.
        chunks: how many stages a rank has, where the schedule is ``"interleaved"``.
        cuts: which cuts are used: ``"balanced"``, those with which the schedule is predicted to take least time, within
            `memory`; or a list of their numbers, in the program's order, or of their names. Others mean nothing.
        gather: how often a stage's parameters are gathered that are split over other axes (FSDP), and are computed with whole:
            once a ``"step"``, and kept for it; or for each ``"microbatch"``, by its forward and by its backward task.
        costs: for ``"auto"``: what each stage takes, as measured, of one or several stages a rank; by default as predicted, of
            one. Ranks look for a schedule together, and so not in a `vfn.jit`, where it is the one that ``specs``, ``plan`` or
            a call before it has found.
        has_aux: whether `f` gives a pair.
        memory: the most that a rank may hold in a step, as ``plan(...).memory().peaks`` predicts it with each parameter where
            it is used: bytes, or ``"8 GiB"``. Cuts, and the schedule ``"auto"``, are chosen within it.

    Returns:
        A function of the same arguments. Parameters are whole along the axis, or at the coordinates whose stages use them, as
        ``specs(params, *batch)`` of the function says; gradients lie as they do.

    Raises:
        TransformError: too few cuts; a schedule that does not fit the mesh; no stages within `memory`; or it is called
            under another transform than `vfn.grad` or `vfn.value_and_grad`, or in a `shard_map` body.

    Source: GPipe, arXiv 1811.06965; PipeDream-flush, arXiv 2006.09503; tasks from one recorded step: JaxPP, arXiv 2412.14374.

    >>> import torch, vescale_fn as vfn
    >>> def loss(params, x):
    ...     for w in params:
    ...         x = vfn.cut(torch.tanh(x @ w))
    ...     return x.square().mean()
    >>> params, x = [torch.eye(2), torch.eye(2)], torch.ones(4, 2)
    >>> step = vfn.value_and_grad(vfn.pipeline(loss, "pp", microbatches=2))
    >>> with vfn.simulate(2):
    ...     mesh = vfn.make_mesh((2,), ("pp",))
    ...     value, grads = step(vfn.shard(params, mesh, vfn.P()), x)
    >>> alone, _ = step(params, x)
    >>> bool(vfn.unshard(value) == alone)
    True
    """
    checked_function(f, "pipeline")
    check_steps("pipeline", microbatches=microbatches)
    if not isinstance(axis_name, str):
        raise TransformError(report("pipeline", f"axis_name must be the name of an axis, but it is {short(axis_name)}"))
    schedule = _found(schedule, chunks, costs)
    given = None if isinstance(cuts, str) or not isinstance(cuts, Iterable) else list(cuts)
    if cuts != "balanced" and (given is None or not all(type(x) in (int, str) for x in given)):
        what = f'cuts must be "balanced", or a list of numbers or names of cuts, but it is {short(cuts)}'
        raise TransformError(report("pipeline", what))
    if gather not in ("step", "microbatch"):
        what = f'gather must be "step" or "microbatch", but it is {short(gather)}'
        raise TransformError(report("pipeline", what))
    most = None if memory is None else limit(memory, caller="pipeline")
    return Pipelined(f, axis_name, microbatches, schedule, cuts if given is None else given, gather, has_aux, most)


def _found(schedule: Any, chunks: int | None, costs: Any) -> Any:
    """A schedule, or the function that makes it, from what `pipeline` is given; "auto" for what is found of predictions."""
    if costs is not None and (schedule != "auto" or not isinstance(costs, schedules.Costs)):
        what = f"costs={costs!r} does not go with schedule={short(schedule)}"
        fix = 'schedule="auto", costs=vfn.schedules.Costs(F=..., B=..., W=...), as measured'
        raise TransformError(report("pipeline", what, fix=fix))
    if (chunks is not None) != (schedule == "interleaved"):
        what = f"chunks={short(chunks)} does not go with schedule={short(schedule)}"
        fix = 'schedule="interleaved", chunks=2, for two stages a rank; other schedules say it themselves'
        raise TransformError(report("pipeline", what, fix=fix))
    if chunks is not None:
        return functools.partial(schedules.interleaved, v=chunks)
    if callable(schedule) or isinstance(schedule, schedules.Schedule):
        return schedule
    if schedule == "auto":
        return schedule if costs is None else functools.partial(_of_costs, costs)
    if not isinstance(schedule, str) or schedule not in NAMED:
        what = f"there is no schedule {short(schedule)}"
        names = ", ".join(map(repr, [*NAMED, "auto"]))
        fix = f"one of {names}; a vfn.schedules.Schedule; or a function (ranks, microbatches) -> Schedule"
        raise TransformError(report("pipeline", what, fix=fix))
    return NAMED[schedule]


def _of_costs(costs: schedules.Costs, ranks: int, count: int) -> schedules.Schedule:
    """The fastest schedule that is found for stages that take so long, which holds no more than 1F1B on its first rank."""
    stages = max([len(x) for x in (costs.F, costs.B, costs.W) if isinstance(x, tuple)], default=ranks)
    return schedules.auto(costs, ranks, count, memory=-(-stages // ranks) * min(ranks, count))


class _Divided(NamedTuple):
    """A call, divided into parts.

    Attributes:
        leaves: of each part all leaves.
        key: of its plan.
        made: makes this; True: where it is a call of another plan.
    """

    leaves: list[list[Any]]
    key: Any
    made: Callable[..., Staged]


class Pipelined:
    """A pipelined function; made by `pipeline`."""

    def __init__(
        self,
        f: Callable[..., Any],
        axis: str,
        count: int,
        schedule: Any,
        cuts: Any,
        gather: str,
        has_aux: bool,
        memory: MemoryLimit | None,
    ) -> None:
        functools.update_wrapper(self, f)
        self._f, self._axis, self._count, self._schedule, self._cuts = f, axis, count, schedule, cuts
        self._gather, self._has_aux, self._memory = gather, has_aux, memory
        self._plans: OrderedDict[Any, Staged] = OrderedDict()
        self._within: WeakKeyDictionary[Any, dict[Any, Staged]] = WeakKeyDictionary()  # those made in a recording
        self._schedules: dict[int, schedules.Schedule] = {}  # by the number of ranks
        self._found: dict[int, schedules.Schedule] = {}  # for "auto", outside of recordings

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes plans of its own."""
        return {**self.__dict__, "_plans": OrderedDict(), "_within": WeakKeyDictionary(), "_found": {}}

    def __repr__(self) -> str:
        f = getattr(self._f, "__qualname__", None) or short(self._f)
        return f"<vfn.pipeline of {f} along {self._axis!r}, {self._count} microbatches>"

    @property
    def axis(self) -> str:
        """The axis of the mesh along which its stages run."""
        return self._axis

    @property
    def parts(self) -> int:
        """How many microbatches there are."""
        return self._count

    @property
    def stages_asked(self) -> int | None:
        """How many stages the cuts make that are asked for, if these are behind each other; None: any number."""
        return None if self._cuts == "balanced" else len(set(self._cuts)) + 1

    @property
    def is_open(self) -> bool:
        """Whether it leaves open which schedule it has."""
        return self._schedule == "auto"

    def said(self, sizes: Mapping[str, int], schedule: str = "") -> str:
        """In a few words what it is on a mesh of these sizes: ``4 ranks of stages, 8 microbatches, zb-h1``.

        Args:
            schedule: that was chosen.
        """
        own = self._schedule
        names = [name for name, made in NAMED.items() if made is own or made is getattr(own, "func", None)]
        chunks = [f"{key}={value}" for key, value in getattr(own, "keywords", {}).items() if key == "v"]
        named = ", ".join([*names, *chunks]).replace("v=", "chunks=")
        own_name = own if isinstance(own, str) else named or getattr(own, "__name__", "a schedule of its own")
        return f"{sizes[self._axis]} ranks of stages, {self._count} microbatches, {schedule or own_name}"

    @torch_internals.not_compiled
    def __call__(self, params: Any, *batch: Any, **kwargs: Any) -> Any:
        self._check_around()
        leaves, structure = opened(params, "pipeline", "params", modules=True)
        if (notes := context.pipelines()) is not None:
            notes.note(self, params, batch, kwargs)
        others = [x for x in tree.leaves((batch, kwargs)) if isinstance(x, torch.Tensor)]
        if not torch.is_grad_enabled():
            return self._run(_made_anew(self._f), None, params, batch, kwargs)
        if any(x.requires_grad for x in others):
            what = "gradients are taken by its first argument alone, the parameters"
            raise TransformError(report("pipeline", what, fix=_INSTEAD))
        followed = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not followed:
            return self._run(_made_anew(self._f), None, params, batch, kwargs)
        if context.grad_depth() > 1:
            raise _no_second_derivative()
        rest = [x for i, x in enumerate(leaves) if i not in followed]
        f = self._with_gradients(structure, followed)
        shape: Any = None

        def step(primals: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any]]:
            """The results, as leaves, and the gradients of the primals."""
            nonlocal shape
            given = [keep_mark(x.detach(), x) if is_array(x) else x.detach() for x in primals]
            out, grads = self._run(f, (structure, *followed), (given, rest), batch, kwargs)
            found, shape = tree.flatten(out)
            return found, grads

        outs = _Followed.apply(step, *(leaves[i] for i in followed))
        return tree.unflatten(shape, outs)

    def _with_gradients(self, structure: Any, followed: Sequence[int]) -> Callable[..., Any]:
        """The function of a pair, the leaves that gradients are taken by and the others, with the gradients."""

        @functools.wraps(self._f)
        def f(params: Any, *batch: Any, **kwargs: Any) -> Any:
            primals, rest = params

            def of_primals(primals: Sequence[Any]) -> Any:
                leaves = list(rest)
                for i, x in zip(followed, primals, strict=True):  # in ascending order
                    leaves.insert(i, x)
                return self._f(tree.unflatten(structure, leaves), *batch, **kwargs)

            return value_and_grad(of_primals, has_aux=self._has_aux)(primals)

        return f

    def _check_around(self) -> None:
        """Raise where another transform is at work."""
        if getattr(torch_internals.recorder(), "cuts", None) is not None and not torch_internals.in_backward_pass():
            what = "a pipelined function runs by a schedule of its own, and is no part of another one's stages"
            raise TransformError(report("pipeline", what, fix=f"one pipeline, along one axis; or {_INSTEAD}"))
        if context.body() is not None:
            what = "a pipelined function runs on all ranks, and cannot be called in a shard_map body"
            raise TransformError(report("pipeline", what, fix="the shard_map in the function; or " + _INSTEAD))
        if torch_internals.transforming() or torch_internals.forward_ad_active():
            what = "a pipelined function has a value and a gradient, and no other derivative; nor can it be mapped"
            raise TransformError(report("pipeline", what, fix=_INSTEAD))

    def _run(self, f: Callable[..., Any], how: Any, params: Any, batch: Any, kwargs: Any) -> Any:
        """What the function, or with its gradients `f`, gives; `how`: which gradients these are, None for none."""
        mesh = self._mesh([params, batch, kwargs])
        if mesh is None:
            notes = context.pipelines()
            count = self._count if notes is None else notes.parts or self._count
            return microbatches(f, count)(params, *batch, **kwargs)
        recorder, along = self._recorder(), _along(mesh, self._axis, _world())
        if recorder is None:  # a plan may be looked at anywhere
            check_runs(mesh)
        primals = [] if how is None else params[0]
        homes = tuple(map(along.coordinates, tree.leaves(params)))
        with self._on_rest(along):
            divided = lambda: self._divided(f, how, params, batch, kwargs, along, homes, recorder)
            if recorder is None:
                staged, leaves = self._agreed(divided, along)
                sums: Sequence[Any] = staged(staged.taken(leaves), self._count)
            else:
                staged, leaves = self._recorded(divided(), recorder)
                sums = recorded(recorder, staged, staged.taken(leaves, every=True), self._count)
        outs = means(at_places(staged, sums), staged.like, self._count)
        first = len(outs) - len(primals)
        values = [along.moved(x, None, _WHOLE) for x in outs[:first]]
        plain = [along.rest is not None and made.spec is None for made in staged.results]
        values = [along.plain(x) if one else x for x, one in zip(values, plain)]
        grads = [along.moved(x, home, _WHOLE) for x, home in zip(outs[first:], homes)]
        grads = [x if is_array(primal) else along.plain(x) for x, primal in zip(grads, primals, strict=True)]
        return tree.unflatten(staged.out_def, values + grads)

    @staticmethod
    def _recorder() -> Any:
        """What records a plan in which the step will be one call; None where it runs now."""
        recorder = torch_internals.recorder()
        if recorder is None:
            return None
        if recorder.cuts is not None:
            if torch_internals.in_backward_pass():
                what = "vfn.remat does not go around a pipelined function"
                raise TransformError(report("pipeline", what, fix="vfn.remat around the layers in it"))
            raise Unrecordable("a pipelined function runs by a schedule of its own", "?")
        recorder.call_on_ranks()
        return recorder

    @staticmethod
    def _on_rest(along: AlongAxis) -> Any:
        """A block in which the current mesh is that of the other axes."""
        return context.use_mesh(context.current_mesh() if along.rest is None else along.rest)

    def _divided(
        self,
        f: Callable[..., Any],
        how: Any,
        params: Any,
        batch: Any,
        kwargs: Any,
        along: AlongAxis,
        homes: Sequence[Any],
        recorder: Any = None,
        ready: bool = False,
        runs: bool = True,
    ) -> _Divided:
        """A call, divided into parts; `ready`: the parameters are on the mesh without the axis; `runs`: its plan has tasks."""
        schedule, names = self._schedule_of(along.size), _paths(how, params)
        chosen, is_open = self._chosen(along.size), self._is_open(along.size)
        count = 0 if how is None else len(params[0])
        params = params if ready else _without(params, along, names, True)
        batch, kwargs = (_without(x, along, tree.paths(x, n), False) for x, n in ((batch, "batch"), (kwargs, "kwargs")))
        part_of = parts(batch, self._count, "pipeline")
        params = reduced_later(params, batch, "pipeline", shared=True)
        args = [(params, *part_of(i)) for i in range(self._count)]
        leaves = [tree.leaves((x, kwargs) if kwargs else (x,)) for x in args]
        varying = _varying(params, batch, leaves)
        for i in varying:
            check_alike([values[i] for values in leaves])
        if recorder is not None:
            rows = enumerate(leaves)
            leaves = [[x if k and i not in varying else _in_order(x) for i, x in enumerate(row)] for k, row in rows]
            args[0], kwargs = tree.unflatten(tree.flatten((args[0], kwargs))[1], leaves[0])
        given, named = tree.map_(_meant, (args[0], kwargs))
        call = JitCall(f, given, named, None, None)
        name = getattr(self._f, "__name__", type(self._f).__name__)

        def made(within: bool = False) -> Staged:
            known = self._found.get(along.size) if within and is_open else None
            how_cut = self._cuts, name, self._gather, within, is_open and known is None
            how_run = runs, self._memory
            found = Staged(call, varying, count, names, homes, along, known or schedule, *how_cut, *how_run)
            check_results(tree.paths(tree.unflatten(found.out_def, found.like), "result"), found.like, "pipeline")
            return found

        return _Divided(leaves, (how, homes, along.mesh, _world(), call.key, runs, chosen), made)

    def _agreed(self, divided: Callable[[], _Divided], along: AlongAxis) -> tuple[Staged, list[list[Any]]]:
        """The plan of a call, the same on all ranks, and for each part of the batch all leaves."""
        along.check_idle()
        call = found = failure = None
        try:  # the others hear of what is wrong with the arguments here, and do not wait
            call = divided()
            found = self._plans.get(call.key)
            if found is not None and found.changed():
                found = None
        except Exception as error:
            failure = error
        everywhere = _on_all(found, along, getattr(self._f, "__name__", type(self._f).__name__), failure)
        assert call is not None
        if not everywhere or found is None:
            found = self._plans[call.key] = call.made()
            if self._is_open(along.size):
                self._found[along.size] = found.schedule
            if len(self._plans) > _KEPT:
                self._plans.popitem(last=False)
        return found, call.leaves

    def _recorded(self, call: _Divided, recorder: Any) -> tuple[Staged, list[list[Any]]]:
        """The same for a step in the plan that is being recorded, whose ranks compare it with that."""
        known = self._within.setdefault(recorder.earlier or recorder, {})
        if call.key not in known or not known[call.key].stands_alone:
            with torch_internals.unrecorded():
                known[call.key] = call.made(True)
        return known[call.key], call.leaves

    def specs(self, params: Any, *batch: Any, base: Any = None, **kwargs: Any) -> Any:
        """How the parameters may lie so that each rank holds those of its own stages alone: for each leaf the `P` that it has
        otherwise, ``at`` the coordinates on the axis whose stages use it; without ``at`` where all do.

        Args:
            params: the parameters, or their shapes (`vfn.eval_shape`): nothing is computed.
            batch, kwargs: the other arguments, or their shapes, as they will be given.
            base: how the parameters lie on the other axes of the mesh, a `P` or a prefix tree of them. By default: as now.

        Raises:
            TransformError: neither the arguments nor the current mesh have the axis; or as a call.

        >>> import torch, vescale_fn as vfn
        >>> def loss(params, x):
        ...     return (vfn.cut(x @ params["first"]) @ params["second"]).square().mean()
        >>> params, x = {"first": torch.eye(2), "second": torch.eye(2)}, torch.ones(4, 2)
        >>> with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh((2,), ("pp",))):
        ...     vfn.pipeline(loss, "pp", microbatches=2).specs(params, x)
        {'first': P(at={'pp': 0}), 'second': P(at={'pp': 1})}
        """
        leaves, structure = opened(params, "pipeline.specs", "params", modules=True)
        specs = _now(params) if base is None else tree.broadcast(base, params, "pipeline.specs", "base", "params")
        along, staged, order = self._looked_at(params, batch, kwargs, specs)
        everywhere = set(range(along.size))
        for i, uses in zip(order, staged.uses(), strict=True):
            if isinstance(leaves[i], torch.Tensor) and uses != everywhere:
                specs[i] = with_place(specs[i], ((self._axis, tuple(sorted(uses)) or (0,)),))
        return tree.unflatten(structure, specs)

    def plan(self, params: Any, *batch: Any, **kwargs: Any) -> PipelinePlan:
        """The plan of a step with gradients, to look at: the stages, what each sends, and when its tasks are predicted to run.
        Nothing is computed. On a real mesh every rank has to come here, as to a call. On an abstract mesh of any size
        (`vfn.abstract_mesh`) nobody has to: arguments are shapes on it, and the memory is that of the rank that is seen.

        Raises:
            TransformError: as `specs`.

        >>> import torch, vescale_fn as vfn
        >>> def loss(params, x):
        ...     return (vfn.cut(x @ params["first"]) @ params["second"]).square().mean()
        >>> params, x = {"first": torch.eye(2), "second": torch.eye(2)}, torch.ones(4, 2)
        >>> with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh((2,), ("pp",))):
        ...     plan = vfn.pipeline(loss, "pp", microbatches=2).plan(params, x)
        >>> plan.schedule, plan.stages[0].calls["F"], plan.stages[0].sends
        (Schedule(2 stages on 2 ranks, 2 microbatches), 1, {('F', 1): 16})
        """
        along, staged, order = self._looked_at(params, batch, kwargs, _now(params), placed=True)
        leaves = tree.leaves(params)
        return planned(staged, [along.homes(leaves[i]) for i in order])

    def plays(
        self, params: Any, *batch: Any, base: Any = None, **kwargs: Any
    ) -> Callable[[schedules.Schedule], Played | None]:
        """What plays schedules with the stages that are best for each, as predicted; the arguments are those of `specs`."""
        opened(params, "pipeline.plays", "params", modules=True)
        specs = _now(params) if base is None else tree.broadcast(base, params, "pipeline.plays", "base", "params")
        _, staged, _ = self._looked_at(params, batch, kwargs, specs)
        pieces, asked = staged.pieces(self.stages_asked is None), self.stages_asked
        return lambda schedule: pieces.played(schedule) if asked in (None, schedule.stages) else None

    def _looked_at(
        self, params: Any, batch: Any, kwargs: Any, specs: Sequence[P], placed: bool = False
    ) -> tuple[AlongAxis, Staged, list[int]]:
        """The plan for parameters that lie so on the other axes, of which only the shapes count (and the places on this one,
        where they are `placed`; else it has no tasks), with the gradients of all; and in which order it has their leaves."""
        self._check_around()
        mesh = self._mesh([params, batch, kwargs]) or context.current_mesh()
        if mesh is None or self._axis not in axes_of(mesh):
            what = f"there is no mesh with the axis {self._axis!r}"
            raise TransformError(report("pipeline", what, fix="vfn.set_mesh(mesh), or arguments on the mesh"))
        leaves, structure = opened(params, "pipeline", "params", modules=True)
        along = _along(mesh, self._axis, _world())
        shapes = [_shape(x, spec, along.rest) for x, spec in zip(leaves, specs, strict=True)]
        tensors = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        followed = [i for i in tensors if leaves[i].is_floating_point() or leaves[i].is_complex()]
        rest = [i for i in range(len(leaves)) if i not in followed]
        given = [shapes[i] for i in followed], [shapes[i] for i in rest]
        f, how = self._with_gradients(structure, followed), (structure, *followed)
        homes = tuple(along.homes(leaves[i]) if placed else None for i in followed + rest)
        homes = tuple(None if home == tuple(range(along.size)) else home for home in homes)
        with self._on_rest(along):
            divided = lambda: self._divided(f, how, given, batch, kwargs, along, homes, ready=True, runs=placed)
            return along, self._agreed(divided, along)[0], followed + rest

    def _mesh(self, trees: Iterable[Any]) -> Any:
        """The mesh with the axis among those of the arguments; None where there is none."""
        arrays = [x for x in tree.leaves(list(trees)) if isinstance(x, torch.Tensor) and is_array(x)]
        found = [mesh for x in arrays if self._axis in axes_of(mesh := whole_mesh(mesh_of(x)))]
        return found[0] if found else None

    def _chosen(self, ranks: int) -> schedules.Schedule | None:
        """The schedule that was chosen around, where this one is open."""
        return context.scheduled().get((self._axis, ranks, self._count)) if self._schedule == "auto" else None

    def _is_open(self, ranks: int) -> bool:
        """Whether the schedule is still to be found."""
        return self._schedule == "auto" and self._chosen(ranks) is None

    def _schedule_of(self, ranks: int) -> schedules.Schedule:
        """The schedule for so many ranks."""
        if (chosen := self._chosen(ranks)) is not None:
            return chosen
        if ranks in self._schedules:
            return self._schedules[ranks]
        made = schedules.one_f_one_b if self._schedule == "auto" else self._schedule  # until the stages are known
        if not isinstance(made, schedules.Schedule):
            made = made(ranks, self._count)
        if not isinstance(made, schedules.Schedule):
            raise TransformError(
                report("pipeline", f"the schedule must be a vfn.schedules.Schedule, but it is {described(made)}")
            )
        wrong = []
        if made.ranks != ranks:
            wrong.append(f"it is for {made.ranks} ranks, and the axis {self._axis!r} has {ranks}")
        if made.microbatches != self._count:
            wrong.append(f"it has {made.microbatches} microbatches, and the function {self._count}")
        if wrong:
            raise TransformError(report("pipeline", "the schedule does not fit", wrong))
        self._schedules[ranks] = made
        return made


def _on_all(plan: Staged | None, along: AlongAxis, name: str, failure: Exception | None) -> bool:
    """Whether all ranks have this plan for their call; else all record, and compare: none runs while another one records.

    Raises:
        Exception: `failure`, what is wrong with the call here; or RecordError where something is wrong with it elsewhere.
    """
    if along.all_here:
        if failure is not None:
            raise failure
        return plan is not None
    digest, communicator = 0 if plan is None else plan.digest, communicator_of(along.mesh)
    if (watch := context.watch()) is not None:
        watch.compare(communicator.processes(), RankCall("pipeline: whether all ranks have the plan", "over all ranks"))
    row = communicator.held(torch.tensor([digest, -digest, failure is not None], device=along.mesh.device_type))
    found = communicator.carry_out(collectives.TABLE["all_reduce"], row, tuple(axes_of(along.mesh)), ("max",))
    most, least, failed = communicator.parts(found)[0].tolist()
    if failed:
        said = "" if failure is None else str(failure) or type(failure).__name__
        by_rank = [text for (text,) in communicator.everyone([[said] * len(communicator.ranks)], "pipeline")]
        if failure is not None:
            raise failure
        rank = next(rank for rank, text in enumerate(by_rank) if text)
        what = f"the call of {name} raised on rank {rank}, and not here"
        raise RecordError(report("pipeline", what, [by_rank[rank].splitlines()[0]]), follows=True)
    return digest > 0 and most == -least


def _made_anew(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function, where it gives back what it was given, a parameter say, with a value of its own in its place."""

    @functools.wraps(f)
    def anew(params: Any, *batch: Any, **kwargs: Any) -> Any:
        out, given = f(params, *batch, **kwargs), set(map(id, tree.leaves((params, batch, kwargs))))
        return tree.map_(lambda x: x.clone() if isinstance(x, torch.Tensor) and id(x) in given else x, out)

    return anew


def _paths(how: Any, params: Any) -> list[str]:
    """The parameters as the user's function names them."""
    if how is None:
        return tree.paths(params, "params")
    structure, *followed = how
    found = tree.paths(tree.unflatten(structure, range(structure.num_leaves)), "params")
    return [found[i] for i in followed] + [path for i, path in enumerate(found) if i not in followed]


def _without(value: Any, along: AlongAxis, names: Sequence[str], placed: bool) -> Any:
    """A tree on the mesh without the axis; `placed`: also of what is at coordinates of it."""
    leaves, structure = tree.flatten(value)
    for name, x in zip(names, leaves, strict=True):
        along.check(x, name, "pipeline", placed)
    return tree.unflatten(structure, map(along.without, leaves))


def _varying(params: Any, batch: Any, leaves: Sequence[Sequence[Any]]) -> list[int]:
    """The places of the leaves that differ from part to part."""
    first = len(tree.leaves(params))
    one, other = leaves[0], leaves[-1]
    return [
        i
        for i in range(first, first + len(tree.leaves(batch)))
        if isinstance(one[i], torch.Tensor) and (len(leaves) == 1 or one[i] is not other[i])
    ]


def _in_order(x: Any) -> Any:
    """A leaf whose blocks lie as a plan takes them."""
    return leaves_.with_tensors(x, lambda block: block) if isinstance(x, torch.Tensor) else x


def _meant(x: Any) -> Any:
    """A leaf; of a float that is an input of what is being recorded its value in this call."""
    return x.meant if isinstance(x, Number) else x


def _now(params: Any) -> list[P]:
    """How each leaf lies on other axes than the pipeline's."""
    return [spec_of(x) if isinstance(x, torch.Tensor) else P() for x in tree.leaves(params)]


def _shape(x: Any, spec: P, mesh: Any) -> Any:
    """A leaf without its values, lying so on a mesh, where there is one."""
    if not isinstance(x, torch.Tensor):
        return x
    return ShapeDtype(x.shape, x.dtype) if mesh is None else ShapeDtype(x.shape, x.dtype, spec, mesh)


def _world() -> Any:
    """The default process group: with another one there are other groups."""
    return dist.group.WORLD if dist.is_initialized() else None


@functools.lru_cache(maxsize=16)
def _along(mesh: Any, axis: str, world: Any) -> AlongAxis:
    return AlongAxis(mesh, axis)


def _no_second_derivative() -> TransformError:
    return TransformError(report("pipeline", "a pipelined function has a gradient, and that has none", fix=_INSTEAD))


class _Followed(torch.autograd.Function):
    """A step whose gradients are known with its value. `is_asked` of a context: whether they are asked for as they are."""

    @staticmethod
    def forward(ctx: Any, step: Callable[..., Any], *primals: torch.Tensor) -> Any:
        outs, grads = step(primals)
        ctx.is_asked = False
        ctx.save_for_backward(*grads)
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor | None, *others: Any) -> Any:
        if torch.is_grad_enabled():
            raise _no_second_derivative()
        if any(x is not None for x in others):
            what = "gradients go through the loss of a pipelined function, not through what it gives besides"
            raise TransformError(report("pipeline", what, fix="what is differentiated in the loss; or " + _INSTEAD))
        if ctx.is_asked:  # the cotangent is 1
            return None, *ctx.saved_tensors
        return None, *(None if cotangent is None else grad * cotangent for grad in ctx.saved_tensors)
