"""What a pipeline's step gives, as arrays at the places that have it; and a step as one call in another plan."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .._core.distributed.blocks import Blocks
from .._core.distributed.places import at_place, nothing
from .._core.sharding.layout import WHOLE
from .ir.graph import Step, calls
from .pipeline_memory import memory_of
from .staged import Staged, check_runs
from .tracing import leaves as leaves_


def at_places(staged: Staged, sums: Sequence[torch.Tensor | None]) -> list[Any]:
    """The sums over the parts of the batch as arrays, each at the place on the axis that has it."""
    along, found, first = staged.along, [], 0
    for made in staged.results:
        places = range(first, first := first + len(made.places))
        blocks = [_held(sums[i], staged.totals[i]) for i in places]
        shape = blocks[0].shape if made.spec is None else made.spec.tensor_meta.shape
        local: Any = blocks[0]
        if along.simulated:
            local = Blocks([local] * len(along.played)) if made.spec is None else leaves_.of_ranks(blocks, made.spec)
        found.append(along.at(staged.owners[places[0]], local, WHOLE if made.spec is None else made.lies, shape))
    return found


def _held(x: torch.Tensor | None, lies: Any) -> torch.Tensor:
    return nothing(lies.shape, lies.dtype, lies.device) if x is None else x


def piped_calls(graph: fx.Graph) -> list[fx.Node]:
    """The steps of pipelines that a plan has, in order."""
    return [node for node in calls(graph) if piped_call(node) is not None]


def piped_call(node: fx.Node) -> PipedCall | None:
    """The step of a pipeline that a call is."""
    run = node.target.run if isinstance(node.target, Step) else None
    return run if isinstance(run, PipedCall) else None


def recorded(recorder: Any, staged: Staged, given: Sequence[tuple[int | None, Any, Any]], count: int) -> list[Any]:
    """A step as a call in the plan that is being recorded: what stands for the sums."""
    along = staged.along
    meshes = tuple(at_place(along.mesh, ((along.axis, (owner,)),)) for owner in staged.owners)
    run = PipedCall(staged, [(part, node) for part, node, _ in given], count)
    recorder.read += staged.read
    step = Step("pipeline", run, effect=True, apart=True, at=meshes, holds=lambda: run.holds)
    return recorder.gives(step, [x for *_, x in given], staged.totals)


class PipedCall:
    """A step, of the values of its inputs; two are equal where they were recorded alike."""

    def __init__(self, staged: Staged, inputs: Sequence[tuple[int | None, Any]], count: int) -> None:
        self.staged, self.inputs, self.count = staged, inputs, count

    @functools.cached_property
    def holds(self) -> int:
        """The most bytes that a process along the axis is predicted to hold besides the inputs: of all of them that which holds
        most, as plans are to come out alike on all."""
        players = self.staged.along.players
        return max(sum(n for n, at in zip(self.held, players) if at == player) for player in players)

    @functools.cached_property
    def held(self) -> list[int]:
        """The same of each rank along the axis."""
        memory = memory_of(self.staged, self.staged.uses(), self.staged.schedule.simulate(), means=False)
        return [peak - held["arguments"] for peak, held in zip(memory.peaks, memory.before, strict=True)]

    def __call__(self, values: Sequence[Any]) -> list[torch.Tensor]:
        check_runs(self.staged.along.mesh)
        self.staged.connect()
        given = ((part, node, x) for (part, node), x in zip(self.inputs, values, strict=True))
        return list(map(_held, self.staged(given, self.count), self.staged.totals))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PipedCall) and self.staged.said == other.staged.said

    def __hash__(self) -> int:
        return hash(self.staged.said)
