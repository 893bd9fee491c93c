"""A plan that needs no more than a number of bytes at once, at the least predicted time for what it computes again or moves."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import fx

from ..._core.base.errors import TransformError
from ..._core.base.messages import report
from ..ir import costs
from ..ir import graph as plan
from ..ir.memory_limit import MemoryLimit
from ..ir.memory_use import MemoryUse, bytes_text, memory, place
from ..ir.nested import everywhere, taken_back
from .boundary import KeptAcross, gathered
from .hoist import hoist
from .keep_or_repeat import COPIES, are_few, exact, searched
from .loop_residuals import fewer
from .memory_order import updated
from .prefetch import without_prefetch
from .rematerialize import recompute
from .under_way import under_way

_ROUNDS = 3  # calls across which values are chosen, one after the other
_NEAR = 64  # what may be left of a limit: a part of it that is no more than one of so many
_TRIES = 5  # of the count of bytes in a choice against that of the plan that is made of it
_SMALL = 64  # calls, of a plan for which all choices may be tried


@dataclass(frozen=True)
class Budget:
    """The pass that keeps a plan within a number of bytes: it stands where `recompute` stands else.

    Args:
        limit: what was asked for.
        usual: the passes that a plan without a limit has in its place.
        collectives: whether collectives may be repeated. Where ranks hold blocks of different sizes they would choose
            differently, and are to meet in the same collectives all the same.
    """

    limit: MemoryLimit
    usual: tuple[plan.Pass, ...] = (recompute,)
    collectives: bool = True

    @property
    def __name__(self) -> str:  # in messages, and in what a saved plan is made for
        return f"memory={self.limit!r}"

    def without_collectives(self) -> Budget:
        """The same, in which each rank chooses for itself and all meet in the collectives that were recorded."""
        return replace(self, collectives=False)

    def __call__(self, graph: fx.Graph, rest: Sequence[plan.Pass] = ()) -> fx.Graph:
        """The graph within the limit.

        Args:
            graph: the whole plan, loops and all.
            rest: the passes behind this one, whose work counts.

        Raises:
            TransformError: no plan was found that is.
        """
        return _Fitting(self, rest).found(gathered(graph))


class _Tried(NamedTuple):
    """The fastest plan that was found, None if none was; what the smallest one needs; and across how many calls it took."""

    found: fx.Graph | None
    least: MemoryUse
    turns: int


class _Fitting:
    """The work of the pass on one plan."""

    def __init__(self, budget: Budget, rest: Sequence[plan.Pass]) -> None:
        self.limit, self.usual, self.collectives, self.rest = budget.limit, budget.usual, budget.collectives, rest

    def found(self, graph: fx.Graph) -> fx.Graph:
        for improve in self.usual:  # of the bodies: what is alive in them is not chosen here
            everywhere(lambda one, improve=improve: one if one is graph else improve(one), graph)
        taken_back(graph)
        apart = without_prefetch(graph)
        if not self.collectives:
            graph = apart
        usual = graph
        for improve in self.usual:
            usual = improve(usual)
        free = self._use(usual).peak
        limit = self.limit.of(free)
        for one in dict.fromkeys((graph, apart)):
            if self._use(one).peak <= limit:
                return one
        graph = apart
        lines, fits = [updated(plan.copied(graph)), graph], [usual] if free <= limit else []
        for copies in (None, *COPIES) if costs.sends(graph) else (None,):
            some = [*self._fewer(graph, copies, limit)]
            fits += [one for one, fit in some if fit]
            lines += [one for one, fit in some[-1:] if not fit]
        tried = [found for one in lines for found in self._tried(one, limit)]
        fits += [one.found for one in tried if one.found is not None]
        if not fits:
            uses = [self._use(usual), *(least for _, least, _ in tried)]
            raise TransformError(self._too_little(limit, min(uses, key=lambda use: use.peak)))
        return min(fits, key=lambda one: costs.total(self._finished(one)))

    def _finished(self, graph: fx.Graph) -> fx.Graph:
        """What the passes behind make of a graph."""
        graph = plan.copied(graph)
        for improve in self.rest:
            graph = everywhere(improve, graph)
        return graph

    def _use(self, graph: fx.Graph) -> MemoryUse:
        """What a graph needs when the passes behind have been there."""
        return memory(self._finished(graph))

    def _fewer(self, graph: fx.Graph, copies: float | None, limit: int) -> Iterator[tuple[fx.Graph, bool]]:
        """The plan with less and less that loops keep, up to one within the limit; and whether each is."""
        for one in fewer(graph, copies, self.collectives):
            yield one, (fit := self._use(one).peak <= limit)
            if fit:
                return

    def _tried(self, graph: fx.Graph, limit: int) -> Iterator[_Tried]:
        """What was found. Where it took several calls, values may do better not to wait on the host across the first one."""
        yield (found := self._within(graph, limit, True))
        if found.turns > 1 and costs.sends(graph):
            yield self._within(graph, limit, False)

    def _within(self, graph: fx.Graph, limit: int, sending: bool) -> _Tried:
        """The fastest plan that was found within the limit.

        Args:
            graph: the plan.
            limit: of the bytes.
            sending: whether values may wait on the host across the first call already.
        """
        least = self._use(graph)
        for turn in range(_ROUNDS):
            boundary = KeptAcross(graph, _top(graph), self.collectives, sending or turn > 0)
            found, smallest, use = self._chosen(boundary, limit)
            least = min(least, use, key=lambda use: use.peak)
            if found is not None or smallest is graph:
                return _Tried(found, least, turn + 1)
            graph = smallest
        return _Tried(None, least, _ROUNDS)

    def _chosen(self, boundary: KeptAcross, limit: int) -> tuple[fx.Graph | None, fx.Graph, MemoryUse]:
        """A plan within the limit, if one was found; the smallest; and what that needs."""
        small = len(boundary.nodes) <= _SMALL and are_few(boundary)
        tries = self._each(boundary, limit) if small else self._searches(boundary, limit)
        least, use, best = boundary.graph, self._use(boundary.graph), None
        for graph, here, seconds in tries:
            if here.peak < use.peak:
                least, use = graph, here
            if here.peak <= limit and (best is None or seconds < best[1]):
                best = graph, seconds
        return None if best is None else best[0], least, use

    def _each(self, boundary: KeptAcross, limit: int) -> Iterator[tuple[fx.Graph, MemoryUse, float]]:
        """Plans, the fastest first, up to one within the limit."""
        for one in exact(boundary, self._besides(boundary, limit)):
            graph = boundary.rewritten(one.choice, self._besides(boundary, limit))
            use = self._use(graph)
            yield graph, use, one.seconds
            if use.peak <= limit:
                return

    def _besides(self, boundary: KeptAcross, limit: int) -> int:
        """What is left of a limit besides the arguments."""
        return limit - sum(boundary.bytes[m] for m in boundary.given)

    def _searches(self, boundary: KeptAcross, limit: int) -> Iterator[tuple[fx.Graph, MemoryUse, float]]:
        """Plans whose choice was counted to need some bytes, which is brought to what the plan then needs beside the limit."""
        low, high, aim = 0, None, self._besides(boundary, limit)
        for _ in range(_TRIES):
            found, least = searched(boundary, aim)
            choice = least if found is None else found
            graph = boundary.rewritten(choice.choice, aim)
            use = self._use(graph)
            yield graph, use, choice.seconds
            left = limit - use.peak
            if 0 <= left < limit // _NEAR or (found is None and left < 0):
                return
            low, high = (max(low, aim), high) if left >= 0 else (low, aim)
            aim += left or -1
            if high is not None and not low < aim < high:
                aim = (low + high) // 2
            if aim <= low or aim == high:
                return

    def _too_little(self, limit: int, use: MemoryUse) -> str:
        share = f"{100 * use.arguments / max(use.peak, 1):.0f} %"
        made = [h for h in use.held if h.line != "arguments"][:3]
        held = [f"{bytes_text(h.bytes)} at its peak from {place(h.line)}" for h in made]
        return report(
            "jit",
            f"no plan was found that needs at most {bytes_text(limit)} at once (memory={self.limit.asked})",
            [
                f"the least is {bytes_text(use.peak)}, of which arguments and constants alone are {share}: "
                f"{bytes_text(use.arguments)}",
                *held,
            ],
            f'memory="{_least_text(use.peak)}"; or donate_argnums, a smaller batch, a mesh that splits what is large',
        )


def _least_text(count: int) -> str:
    """A number of bytes that is no less, as `memory` takes it."""
    return f"{-(-count // 2**20)} MiB" if count >= 2**24 else f"{count} B"


def _top(graph: fx.Graph) -> int:
    """The place of the call at which the most is alive."""
    use = memory(graph)
    calls = [i for i, node in enumerate(graph.nodes) if node.op == "call_function"]
    places = [i for i, node in enumerate(graph.nodes) if node.op != "output"]
    return calls[use.timeline.index(use.at)] if use.at is not None and calls else places[-1] if places else 0


def within(passes: Sequence[plan.Pass], limit: MemoryLimit) -> tuple[plan.Pass, ...]:
    """The passes of a plan with a limit: `Budget` in the place of `recompute`, or before what writes into memory; no `hoist`,
    which takes memory that iterations let go; and nothing under way for which there must be more memory."""
    passes = [one for one in passes if one is not hoist]
    with_limit: Any = functools.partial
    passes = [with_limit(one, ahead=0) if getattr(one, "func", one) is under_way else one for one in passes]
    names = [getattr(one, "__name__", "") for one in passes]
    if recompute in passes:
        at, skip = passes.index(recompute), 1
    else:
        at, skip = next((i for i, name in enumerate(names) if name in ("donate", "reuse", "foreach")), len(passes)), 0
    return (*passes[:at], Budget(limit, tuple(passes[at : at + skip])), *passes[at + skip :])
