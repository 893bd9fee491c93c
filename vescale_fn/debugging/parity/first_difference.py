"""Where two recorded runs of one program part, the one on one device and the one on a mesh.

A value of the mesh run is in order if the ranks hold blocks of the one-device value, partial sums of it, or means of its
blocks: so are the values of right programs on their way. What is wrong in the end is followed back, from a wrong result
through what it was made of and from a wrong gradient through the cotangents, to the first step that is not in order
while all that went into it was. A detour that is out of order for a while, and mended, does not disturb that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..._core.base import dtypes
from ..._core.base.messages import dtype_text
from ..._core.base.source_lines import quoted, readable
from ..._core.distributed.communicator import coordinates
from ..._core.distributed.mesh import communicator_of
from ..._core.sharding.index_map import axes_of
from ..._core.sharding.spec import P
from .causes import ProgramStep, cause
from .recording import Held, Node, aligned
from .relation import Relation, conclude, layouts, listed, same_numbers, shown
from .statistics import Statistics, facts, head, sizes, wobble

Before = Callable[[int], Iterable[int]]  # what a value was made of, or, backward, what was made of it


class Parting(NamedTuple):
    """The step where the runs part, in words; `fix` may be empty. `explained` says whether they give a cause."""

    lines: tuple[str, ...]
    fix: str
    explained: bool = False


UNKNOWN = object()  # of a value that has no like in the other run, or has it in another shape


class Runs:
    """Two recordings, side by side; made on all ranks together, which exchange what they know of each value.

    Values are numbered as in the mesh run. With a `clock` it is their cotangents that are spoken of: those of the
    backward pass that ran when there were so many values; None: the values themselves.
    """

    def __init__(self, one: Sequence[Node], many: Sequence[Node], rounded: Sequence[Sequence[Node]], mesh: Any) -> None:
        self.one, self.many, self.mesh, self.axes = one, many, mesh, axes_of(mesh)
        self.rounded = [nodes for nodes in rounded if [n.key for n in nodes] == [n.key for n in one]]
        self.pairs = dict(sorted(aligned(one, many).items()))
        self.own: set[int] = set()  # what depends on the rank alone
        for i, node in enumerate(many):
            if node.name == "axis_index" or (node.sources and self.own.issuperset(node.sources)):
                self.own.add(i)
        self.rows: dict[Any, list[Statistics]] = {}
        self.known: dict[Any, Any] = {}  # a Relation; None: no relation, so something is wrong; UNKNOWN
        self.common: int | None = None  # so many steps all ranks have in common, where that is not all of them
        self.ways: dict[tuple[str, str], list[int]] = {}  # the steps after these
        self._compare()
        clocks = {clock for node in many for clock in node.cotangents}
        for i, j in self.pairs.items():
            for clock in clocks:
                if clock not in many[i].cotangents and self._like(clock) in one[j].cotangents:
                    self.known[i, clock] = None  # nothing came back here

    def _like(self, clock: int) -> int:
        """The clock of the one-device run that belongs to one of the mesh run."""
        return len(self.one) if clock == len(self.many) else self.pairs.get(clock, -1)

    def _compare(self) -> None:
        jobs: dict[Any, tuple[Held, Held, Any]] = {}
        for i, j in self.pairs.items():
            alone, node = self.one[j], self.many[i]
            jobs[i, None] = alone.held, node.held, self._slack(alone.held, [nodes[j].held for nodes in self.rounded])
            for clock, held in node.cotangents.items():
                like = self._like(clock)
                if like in alone.cotangents:
                    others = [nodes[j].cotangents[like] for nodes in self.rounded if like in nodes[j].cotangents]
                    jobs[i, clock] = alone.cotangents[like], held, self._slack(alone.cotangents[like], others)
        specs = {key: _specs(a, b, self.axes) for key, (a, b, _) in jobs.items()}
        mine = [
            [
                facts(a.blocks[0], b.of(at), specs[key], self.axes, coordinates(self.mesh, rank), _tolerance(a), slack)
                for key, (a, b, slack) in jobs.items()
            ]
            for at, rank in enumerate(communicator_of(self.mesh).ranks)
        ]
        steps, keys = [node.key for node in self.many], list(jobs)
        by_rank = communicator_of(self.mesh).everyone([[(steps, keys, row) for row in mine]], "check_parity")
        everyones_steps = [row[0][0] for row in by_rank]
        self.common = next(
            (i for i, step in enumerate(itertools.zip_longest(*everyones_steps)) if len({*step}) > 1), None
        )
        if self.common is not None:
            for rank, theirs in enumerate(everyones_steps):
                step = theirs[self.common] if self.common < len(theirs) else ("the end", "")
                self.ways.setdefault(step, []).append(rank)
        for together in zip(*(zip(row[0][1], row[0][2]) for row in by_rank)):
            key, rows = together[0][0], [row for _, row in together]
            if any(other != key for other, _ in together) or (self.common is not None and key[0] >= self.common):
                break  # from here on the ranks went different ways
            self.rows[key] = rows
            self.known[key] = self._concluded(key, rows, specs[key], *jobs[key])

    def _slack(self, held: Held, others: Sequence[Held]) -> Any:
        """What rounding alone makes of a value."""
        return wobble(held.blocks[0], [other.blocks[0] for other in others])

    def _concluded(self, key: Any, rows: list[Statistics], specs: list[P], alone: Held, held: Held, slack: Any) -> Any:
        if any(not row.fits or len(row.fits) != len(rows[0].fits) for row in rows):
            return UNKNOWN
        number, clock = key
        node, whole = self.many[number], alone.blocks[0]
        size = sizes(whole)
        tolerance = max(_tolerance(alone), 1e-9, float((slack / size).nan_to_num(0.0).max()) if size.numel() else 0.0)
        unreduced = None if held.spec is None else held.spec.unreduced
        found = conclude(rows, specs, self.mesh, self.axes, tolerance, unreduced)
        if found is None and (not specs or number in self.own):
            return UNKNOWN
        if found is not None and clock is None:
            if any(row.dtype != whole.dtype for row in rows):
                return None
            if node.name in ("psum", "pmean") and found.how != "equal":  # parts are put together here, and none made
                before = self.known.get((node.sources[0], None)) if node.sources else None
                parts = {*before.axes} if isinstance(before, Relation) else {*self.axes}
                return found if {*found.axes} <= parts - {*node.axes} else None
        return found

    # --- the ways back ------------------------------------------------------------------------------------------------

    def find(self, start: int | None) -> Parting | None:
        """The step where the wrong value of this number comes from."""
        if start is None:
            return None
        sources: Before = lambda i: self.many[i].sources
        number = self._culprit(start, sources, None)
        if number is None:
            return self._last_equal(start, sources)
        node, clock = self.many[number], number
        while clock > 0 and self.many[clock - 1].key == node.key and self.many[clock - 1].sources == node.sources:
            clock -= 1  # several values of one step: the cotangents came before the first
        whole = all(r.how == "equal" for i in node.sources if isinstance(r := self.known.get((i, None)), Relation))
        if node.name == "grad" and whole:  # what is differentiated is in order: it is the backward pass that is not
            return self._find_back(node.sources, clock) or self._described(number)
        return self._described(number)

    def find_back(self, start: int | None) -> Parting | None:
        """The step where the wrong gradient by the value of this number comes from."""
        return None if start is None else self._find_back((start,), len(self.many))

    def _find_back(self, starts: Iterable[int], clock: int) -> Parting | None:
        users: Before = lambda i: [user for user in self.many[i].users if user < clock]
        for start in starts:
            if self._state(start, clock) is None:
                number = self._culprit(start, users, clock)
                if number is not None:
                    return self._described_back(number, list(users(number)), clock)
        return None

    def _state(self, i: int, clock: int | None) -> Any:
        return self.known.get((i, clock), UNKNOWN)

    def _culprit(self, start: int, before: Before, clock: int | None) -> int | None:
        """Of the wrong values behind `start`, reached through wrong and unknown ones, the first with no wrong one behind."""
        reached = self._behind([start], before, lambda i: not isinstance(self._state(i, clock), Relation))
        wrong = {i for i in reached if self._state(i, clock) is None}
        unknown = lambda i: self._state(i, clock) is UNKNOWN
        first = [i for i in wrong if not wrong & self._behind(before(i), before, unknown)]
        return (min if clock is None else max)(first, default=None)

    def _behind(self, starts: Iterable[int], before: Before, through: Callable[[int], bool]) -> set[int]:
        """All that is reached from these, going on where `through` says so."""
        seen: set[int] = set()
        todo = list(starts)
        while todo:
            i = todo.pop()
            if i not in seen:
                seen.add(i)
                todo += before(i) if through(i) else ()
        return seen

    def _last_equal(self, start: int, sources: Before) -> Parting | None:
        if self.ways:
            listed_ = [
                f"{listed(ranks)}: {name}{line and f', {quoted(line)}'}" for (name, line), ranks in self.ways.items()
            ]
            return Parting(("the ranks part: they take different steps", *listed_), "")
        reached = self._behind([start], sources, lambda i: not isinstance(self._state(i, None), Relation))
        known = [i for i in reached if isinstance(self._state(i, None), Relation)]
        if not known:
            return None
        node = self.many[max(known)]
        return Parting((f"the runs were last seen equal at {node.name}, {quoted(node.line)}",), "")

    # --- in words -----------------------------------------------------------------------------------------------------

    def _described(self, number: int) -> Parting:
        node, whole, rows = self.many[number], self._whole(number), self.rows[number, None]
        copies = max(1, sum(math.prod(row.shape) for row in rows) // max(1, whole.numel()))
        states = [self._state(i, None) for i in node.sources]
        operands = tuple(r if isinstance(r, Relation) else None for r in states)
        reordered, misfit = (
            same_numbers(whole, rows, copies, max(_tolerance(node.held), 1e-9)),
            any(not row.fits[0].want for row in rows),
        )
        own = tuple(i for i, source in enumerate(node.sources) if source in self.own)
        if any(row.dtype != whole.dtype for row in rows):
            why, fix = f"the mesh has {dtype_text(rows[0].dtype)}, where one device has {dtype_text(whole.dtype)}", ""
        else:
            why, fix = cause(
                ProgramStep(node.name, node.axes, operands, self.axes, reordered, misfit, own, node.held.spec)
            )
        place = f"the runs part at {node.name}, {quoted(node.line)}"
        said = [
            f"operand {i}{self._origin(source, node.name)}: {self._text(source)}"
            for i, source in enumerate(node.sources)
        ]
        return Parting((place, *said, *shown(whole, rows), *([why] if why else [])), fix, bool(why))

    def _described_back(self, number: int, users: Sequence[int], clock: int) -> Parting:
        node, alone = self.many[number], self.one[self.pairs[number]]
        steps = list(dict.fromkeys((self.many[user].name, self.many[user].line) for user in users))
        name, line = steps[0] if len(steps) == 1 else ("", node.line)
        place = "the runs part in the backward pass" + (f" of {name}" if name else f", at what {node.name} gave")
        said = [
            f"the cotangent of its result: {self._text(user, clock)}"
            for user in users[:3]
            if isinstance(self._state(user, clock), Relation)
        ]
        whole = alone.cotangents[self._like(clock)].blocks[0]
        rows = self.rows.get((number, clock))
        held = shown(whole, rows) if rows else [f"one device: {head(whole)}", "mesh: no gradient comes back"]
        return Parting((f"{place}, {quoted(line)}", *said, *held), "")

    def _whole(self, i: int) -> Any:
        return self.one[self.pairs[i]].held.blocks[0]

    def _origin(self, i: int, used_by: str) -> str:
        node = self.many[i]
        if node.name.startswith(("operand", "the arguments")):
            return ""
        line = quoted(node.line) if used_by.startswith("the results") else readable(node.line)
        return f" ({node.name}, {line})"

    def _text(self, i: int, clock: int | None = None) -> str:
        state = self._state(i, clock)
        if isinstance(state, Relation):
            whole = self._whole(i)
            return state.text(tuple(whole.shape), whole.dtype)
        if i in self.own:
            return "depends on the rank"
        return self.rows[i, clock][0].head if (i, clock) in self.rows else "made in this run only"


def _specs(alone: Held, held: Held, axes: dict[str, int]) -> list[P]:
    """How the mesh's value may lie."""
    return [P(*held.spec)] if held.spec is not None else layouts(alone.blocks[0].shape, held.blocks[0].shape, axes)


def _tolerance(held: Held) -> float:
    return dtypes.tolerance(held.blocks[0].dtype)
