"""Pipelines as choices: layouts of a step on meshes that have the axis along which its pipeline's stages run.

How the arguments lie on the other axes is what the search finds for the step without stages; then each parameter goes to the
ranks whose stages use it, and what is updated with it goes along. What comes of that is priced as the step that it is.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from .._core import torch_internals
from .._core.arrays.shapes import ShapeDtype
from .._core.base import context, tree
from .._core.base.errors import SpecError, TransformError, VfnError
from .._core.base.messages import mesh_text, report
from .._core.distributed.abstract_mesh import AbstractMesh, abstract_mesh
from .._core.sharding.index_map import axes_of, local_shape
from .._core.sharding.spec import P, with_place
from ..hardware import Hardware
from ..plan.cut_choice import TooFewCuts
from ..plan.ir.costs import Rates
from ..plan.ir.graph import name_of
from ..plan.ir.inplace import is_pointwise
from ..schedules import Schedule
from .auto_arguments import given_specs
from .price_arguments import laid_out
from .recording import Recording, record
from .scheduled import Scheduled, known, scheduled, worth_pricing
from .search.best import NothingFits
from .search.layouts import Layouts
from .search.replaced import replaced
from .search.search import search
from .search.shapes import searched
from .verified import specs_of

_BASES = 2  # layouts on the other axes, of each mesh


class PipelineCall(NamedTuple):
    """A call of a pipelined function in a step: what it is, its arguments as shapes, and of which inputs of the step its
    parameters are, by their names in the graph."""

    pipeline: Any
    params: Any
    batch: Any
    kwargs: Any
    sources: list[str | None]


@dataclass
class PipelineNotes:
    """What is noted of the pipelines that are called while a step is recorded as for one device (`context.pipelines`).

    Attributes:
        parts: in how many parts they compute the batch there; None: as they say.
        calls: of pipelines.
    """

    parts: int | None = None
    calls: list[PipelineCall] = field(default_factory=list[PipelineCall])

    def note(self, pipeline: Any, params: Any, batch: Any, kwargs: Any) -> None:
        """Note a call."""
        of = (tree.map_(_shape, one) for one in (params, batch, kwargs))
        self.calls.append(PipelineCall(pipeline, next(of), next(of), next(of), list(map(_source, tree.leaves(params)))))


def _shape(x: Any) -> Any:
    return ShapeDtype(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x


def _source(x: Any) -> str | None:
    """The input of the step that a value is, or is a copy of."""
    recorder: Any = torch_internals.recorder()
    if recorder is None or not isinstance(x, torch.Tensor):
        return None
    node: fx.Node = recorder.node(torch_internals.peel(x))
    while node.op != "placeholder":
        inputs = node.all_input_nodes
        if len(inputs) != 1 or inputs[0].meta["val"].shape != node.meta["val"].shape:
            return None
        node = inputs[0]
    return node.name


@dataclass
class PipedStep:
    """A step with a pipeline, and the meshes that have its axis.

    Attributes:
        step: itself.
        call: of the pipeline in it.
        meshes: that have the axis.
        alone: whether there are no others.
        args: of the step.
    """

    step: Callable[..., Any]
    call: PipelineCall
    meshes: Sequence[AbstractMesh]
    alone: bool
    args: tuple[Any, ...]

    @functools.cached_property
    def once(self) -> Recording:
        """The step as for one device, its batch in one part: the parts are no layouts of their own."""
        with context.setting(pipelines=PipelineNotes(1)):
            return record(self.step, *self.args)

    def again(
        self,
        mesh: Mapping[str, int],
        fixed: Any,
        given: Mapping[int, P],
        hardware: Hardware,
        memory: float,
        seconds: float,
    ) -> Any:
        """What a search finds for the step without stages, on a mesh's other axes, where leaves of its arguments lie so.

        Raises:
            NothingFits: in the memory of all stages.
        """
        axes = dict(mesh)
        stages = axes.pop(self.call.pipeline.axis)
        number = {leaf: i for i, leaf in enumerate(self.once.leaves) if leaf is not None}
        stays, _ = given_specs(self.once, fixed, abstract_mesh(tuple(axes.values()), tuple(axes)))
        lies = {**stays, **{number[leaf]: spec for leaf, spec in given.items() if leaf in number}}
        return search(self.once, axes, hardware, memory * stages, lies, 1, seconds=seconds)[0]

    def rows(
        self, fixed: Any, hardware: Hardware, memory: float, seconds: float
    ) -> dict[str, tuple[Callable[..., Any], Any, AbstractMesh]]:
        """Layouts to price, by name: the step, specs of its arguments, a mesh.

        Args:
            fixed, seconds: as of `auto`.
            memory: that a rank may need; each has the values of some of the stages.

        Raises:
            SpecError, TransformError: there is no mesh on which what is fixed fits, and on which it has the stages.
        """
        once, found, failures = self.once, dict[str, Any](), list[VfnError]()
        axis, too_many = self.call.pipeline.axis, math.inf
        for mesh in sorted(self.meshes, key=lambda mesh: axes_of(mesh)[axis]):
            if axes_of(mesh)[axis] >= too_many:
                continue
            try:
                bases = self._bases(once, mesh, fixed, hardware, memory, seconds)
                on_mesh = self._on_mesh(once, list(dict.fromkeys(bases)), mesh, hardware, memory)
            except (SpecError, TransformError) as error:
                failures.append(error)
                if isinstance(error, TooFewCuts):
                    too_many = axes_of(mesh)[axis]
            else:
                found.update(on_mesh)
        if not found and self.alone:
            raise failures[0]
        return found

    def _on_mesh(
        self,
        once: Recording,
        bases: Sequence[tuple[P | None, ...]],
        mesh: AbstractMesh,
        hardware: Hardware,
        memory: float,
    ) -> dict[str, tuple[Callable[..., Any], Any, AbstractMesh]]:
        """The layouts to price on a mesh, of inputs that lie so on its other axes: by the schedules that are worth it."""
        call, axes, found, failure = self.call, dict(axes_of(mesh)), dict[str, Any](), None
        for i, inputs in enumerate(bases):
            options: Mapping[str, Any] = {"": None}
            if call.pipeline.is_open:
                options = self._schedules(once, inputs, mesh, hardware, memory)
            for name, schedule in options.items():
                step = scheduled(self.step, None if schedule is None else Scheduled(call.pipeline.axis, schedule))
                try:
                    placed = self._placed(once, inputs, mesh, hardware, schedule)
                except TransformError as error:  # no stages for this schedule within the pipeline's own memory, say
                    failure = failure or error
                    continue
                specs = specs_of(once, Layouts(axes, placed))
                said = f"{call.pipeline.said(axes, name)} on the {mesh_text(axes)}, layout {i + 1}"
                found[said] = step, specs, mesh
        if not found and failure is not None:
            raise failure
        return found

    def _schedules(
        self,
        once: Recording,
        inputs: tuple[P | None, ...],
        mesh: AbstractMesh,
        hardware: Hardware,
        memory: float,
    ) -> dict[str, Schedule]:
        """The schedules that are worth pricing with inputs that lie so on the other axes."""
        call, axes = self.call, dict(axes_of(mesh))
        ranks, parts = axes.pop(call.pipeline.axis), call.pipeline.parts
        first = next((one for one in known(ranks, parts).values() if one.stages == call.pipeline.stages_asked), None)
        with self._looking(mesh, hardware, first):
            plays = call.pipeline.plays(call.params, *call.batch, base=self._base(once, inputs), **call.kwargs)
        sizes = [_bytes_of(x, spec, axes) for x, spec in zip(once.placeholders, inputs)]
        params = {x.name for x in once.placeholders} & {*call.sources}
        besides = sum(n for x, n in zip(once.placeholders, sizes) if x.name not in params) / ranks
        return worth_pricing(ranks, parts, plays, memory, besides)

    def given(
        self, others: Mapping[str, Any], args: tuple[Any, ...]
    ) -> dict[str, tuple[Callable[..., Any], Any, AbstractMesh]]:
        """The layouts that were given of the arguments alone, on these meshes as far as they fit."""
        found = dict[str, Any]()
        for name, specs in others.items():
            for mesh in self.meshes if not (isinstance(specs, tuple) and specs and callable(specs[0])) else ():
                try:
                    laid_out(args, specs, mesh, "auto")
                except SpecError:
                    continue
                for schedule, step in self._given_schedules(mesh).items():
                    found[f"{name}{schedule} on the {mesh_text(axes_of(mesh))}"] = step, specs, mesh
        return found

    def _given_schedules(self, mesh: AbstractMesh) -> dict[str, Callable[..., Any]]:
        """By what is said of it, the step with a schedule for layouts that are given, whose places may be those of one stage a
        rank, where it leaves open which."""
        pipeline = self.call.pipeline
        ranks = axes_of(mesh)[pipeline.axis]
        if not pipeline.is_open or pipeline.stages_asked not in (None, ranks):
            return {"": self.step}
        options = known(ranks, pipeline.parts)
        chosen = {name: Scheduled(pipeline.axis, options[name]) for name in ("1f1b", "zb-h1")}
        return {f", {name},": scheduled(self.step, one) for name, one in chosen.items()}

    def _bases(
        self, once: Recording, mesh: AbstractMesh, fixed: Any, hardware: Hardware, memory: float, seconds: float
    ) -> list[tuple[P | None, ...]]:
        """How the inputs may lie on the other axes."""
        axes = dict(axes_of(mesh))
        stages = axes.pop(self.call.pipeline.axis)
        whole = tuple(P() if isinstance(x.meta.get("val"), torch.Tensor) else None for x in once.placeholders)
        if not axes:
            return [whole]
        given, wrong = given_specs(once, fixed, abstract_mesh(tuple(axes.values()), tuple(axes)))
        if wrong:
            what = f"fixed= does not fit beside stages on the {mesh_text(axes_of(mesh))}"
            raise SpecError(
                report("auto", what, wrong, "the axes of the mesh but that of the stages, each at most once")
            )
        how = {"fixed": given, "candidates": _BASES, "seconds": seconds}
        try:
            found = searched(once, [axes], hardware, memory * stages, **how)
        except NothingFits:
            found = searched(once, [axes], hardware, None, **how)
        bases = [one.layouts.inputs for one in found]
        return [*bases, *(split for base in bases for split in self._batch_split(once, base, next(iter(axes)), given))]

    def _batch_split(
        self, once: Recording, base: tuple[P | None, ...], axis: str, given: Mapping[int, P]
    ) -> list[tuple[P | None, ...]]:
        """The same with the batch split over an axis, where it is whole: the search splits what is computed of it."""
        stays = {*replaced(once).values(), *given} | {
            i for i, x in enumerate(once.placeholders) if x.name in self.call.sources
        }
        split = list(base)
        for i, (x, spec) in enumerate(zip(once.placeholders, base)):
            val = x.meta.get("val")
            batch = isinstance(val, torch.Tensor) and val.ndim and once.leaves[i] is not None and i not in stays
            if batch and spec is not None and not any(spec):
                split[i] = P(axis)
        return [tuple(split)]

    @contextlib.contextmanager
    def _looking(self, mesh: AbstractMesh, hardware: Hardware, schedule: Schedule | None) -> Iterator[None]:
        """A block in which the pipeline is looked at on a mesh of this hardware; `schedule`: that it has, where it is open."""
        rates = Rates.of(hardware, "float32" if hardware.device == "cpu" else "bfloat16")
        axis = self.call.pipeline.axis
        chosen = {} if schedule is None else {(axis, schedule.ranks, schedule.microbatches): schedule}
        with context.use_mesh(mesh), context.setting(devices=hardware.device, rates=rates, scheduled=chosen):
            yield

    def _places(self, once: Recording) -> list[int | None]:
        """Of each of the pipeline's parameters the input of the step that it is."""
        number = {x.name: i for i, x in enumerate(once.placeholders)}
        return [None if name is None else number.get(name) for name in self.call.sources]

    def _base(self, once: Recording, inputs: tuple[P | None, ...]) -> Any:
        """How the pipeline's parameters lie where inputs of the step lie so."""
        leaves, structure = tree.flatten(self.call.params)
        base = [P() if i is None else inputs[i] or P() for i in self._places(once)]
        return tree.unflatten(structure, base[: len(leaves)])

    def _placed(
        self,
        once: Recording,
        inputs: tuple[P | None, ...],
        mesh: AbstractMesh,
        hardware: Hardware,
        schedule: Schedule | None,
    ) -> tuple[P | None, ...]:
        """The same specs with the places at which parameters, and what is updated with them, are."""
        call, places = self.call, self._places(once)
        with self._looking(mesh, hardware, schedule):
            found = call.pipeline.specs(call.params, *call.batch, base=self._base(once, inputs), **call.kwargs)
        at = {i: spec.at for i, spec in zip(places, tree.leaves(found)) if i is not None and spec.at}
        for i, to in _updated_with(once).items():
            if to in at:
                at.setdefault(i, at[to])
        return tuple(spec if spec is None or i not in at else with_place(spec, at[i]) for i, spec in enumerate(inputs))


def _bytes_of(node: fx.Node, spec: P | None, axes: Mapping[str, int]) -> int:
    """The bytes of an input that a rank holds on these axes."""
    x = node.meta.get("val")
    if spec is None or not isinstance(x, torch.Tensor):
        return 0
    return math.prod(local_shape(x.shape, dict(axes), spec, dict.fromkeys(axes, 0))) * x.element_size()


def parted(
    step: Callable[..., Any], args: tuple[Any, ...], notes: PipelineNotes, meshes: Sequence[AbstractMesh]
) -> tuple[list[AbstractMesh], PipedStep | None]:
    """The meshes on which a step has no stages; and its pipeline with those that have its axis."""
    for call in notes.calls:
        if own := [mesh for mesh in meshes if call.pipeline.axis in axes_of(mesh)]:
            rest = [mesh for mesh in meshes if mesh not in own]
            return rest, PipedStep(step, call, own, not rest, args)
    return list(meshes), None


def _updated_with(recorded: Recording) -> dict[int, int]:
    """Of inputs that a step replaces, the first one whose next value is made of them element by element: of an optimiser's
    state the parameter."""
    ends, number = replaced(recorded), {x: i for i, x in enumerate(recorded.placeholders)}
    kept, found = {*ends.values()}, dict[int, int]()
    for r, to in sorted(ends.items()):
        made = recorded.results[r]
        todo, seen = [made] if made is not None else [], set[fx.Node]()
        shape = recorded.placeholders[to].meta["val"].shape
        while todo:
            node = todo.pop()
            val = node.meta.get("val")
            if node in seen or not isinstance(val, torch.Tensor) or val.shape != shape:
                continue
            seen.add(node)
            if node.op == "placeholder" and number[node] in kept:
                found.setdefault(number[node], to)
            elif is_pointwise(node) or name_of(node) == "_to_copy":
                todo += node.all_input_nodes
    return found
