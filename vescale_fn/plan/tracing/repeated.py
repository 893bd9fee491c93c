"""A Python loop whose iterations call the same functions of torch: each iteration is recorded as one call of a shared body.

All of the loop's Python runs in each iteration. What is put off is what torch would do: as long as the calls of an iteration
are those of an earlier one, on each other's results and on other tensors of the same types, each is answered by a tensor
without values of the type that it gave before. When the iteration has ended, and nobody holds what it made on its way, it is
recorded as one call, as equal calls of a jitted function are (`shared_calls`). Where anything else comes, the calls that were
put off are made first, one by one, and the answers become their results. Nothing is begun anew, but where something comes of
which no mode learns, and nobody else (`torch.func.vmap` of an answer): `RecordAgain`.

A recording comes to that by itself: the recorder counts how often operators come for the same line, and turns `LoopWatch` on
where many do, which looks for equal iterations, and then takes them for calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..._core import torch_internals
from ..._core.arrays.array import Array
from ..._core.base import put_off, tree
from .ambient import around
from .answered_iterations import AnsweredIteration, as_it_was, references, waits
from .frame import RecordAgain
from .iterations import CallPlace, Differs, IterationReader, IterationTemplate, SeenCall, grad_fns, parts
from .loop_search import SMALLEST, LoopSearch
from .shared_calls import recorded_once
from .watched_calls import ASKING, as_they_are, begins_a_graph, call_place, can_wait, memories, settings

put_off.settled_by(torch_internals.settle)

MANY = 2  # iterations, before one is looked for that others may be like
_FORCED = 3  # iterations that were begun and could not be one call, before they are begun no more


def counted(recorder: Any, passes_on: Any = None) -> Counted | None:
    """What counts the operators of a recording; None where nothing could be a call, and where a mode is on that outlives the
    recording: while that mode has a function called it is off, and would come back above `LoopWatch`. `passes_on`: a mode of
    the recording that will be on, and hands on what it sees."""
    return Counted(recorder, passes_on) if recorder.shares and not torch_internals.function_modes() else None


class Counted:
    """Counts how often operators are recorded for the same line; where many come again and again, the recording is watched."""

    def __init__(self, recorder: Any, passes_on: Any) -> None:
        self._recorder, self._passes_on = recorder, passes_on
        self._counts: dict[Any, int] = {}
        self._many = 0

    def see(self, op: Any, line: str) -> None:
        """Note an operator."""
        key = id(op), line
        count = self._counts[key] = self._counts.get(key, 0) + 1
        if count < MANY:
            return
        self._many += count == MANY
        # not just what a small loop inside calls; and at the bottom of the modes, of which the last to come is the first to go
        if self._many >= SMALLEST and 2 * self._many > len(self._counts) and self._is_at_the_bottom():
            self._recorder.counted, self._recorder.watching = None, LoopWatch(self._recorder)
            torch_internals.settle_before_autograd()
            if self._passes_on is None:
                self._recorder.watching.__enter__()

    def _is_at_the_bottom(self) -> bool:
        """Whether no other mode is on."""
        modes = torch_internals.function_modes()
        return modes == 0 or (modes == 1 and torch_internals.top_function_mode() is self._passes_on)


class LoopWatch(torch_internals.TorchFunctionMode):
    """Sees the functions of torch that are called, and those of ours that stand beside them (`seen_whole`)."""

    records_plan = of_recording = True

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder
        self._inside = 0  # calls that are being made
        self._loops = LoopSearch(recorder)
        self._templates: dict[Any, IterationTemplate | None] = {}  # by their first calls; None: not any more
        self._forced: dict[IterationTemplate, int] = {}  # how many more were made one by one than at once
        self._started: AnsweredIteration | None = None  # the iteration that has begun
        self._ended: list[AnsweredIteration] = []  # and those before, of which somebody may still hold something

    @property
    def waits(self) -> bool:
        """Whether calls are put off."""
        return self._started is not None or bool(self._ended)

    def passed_by(self) -> None:
        """An operator comes of a call that the mode has not seen. Raises `RecordAgain` where others wait: autograd has gone on
        already, so that they cannot be made first."""
        if self.waits and not self._inside:
            raise RecordAgain

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.seen(func, args, kwargs or {})

    def seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a call gives."""
        if func in ASKING or self._inside or self._is_elsewhere():
            return func(*args, **kwargs)
        place = call_place()
        answer = self._followed(func, args, kwargs, place)
        if answer is None and (self.waits or self._begins()):
            self.settle()
            answer = self._followed(func, args, kwargs, place)
        return answer[0] if answer is not None else self._made(func, args, kwargs, place)

    def settle(self) -> None:
        """Make the calls that are put off: what comes is no part of an iteration."""
        if self._inside:
            return
        if self._ended:
            self._look_back()
            while self._ended:
                self._record(self._ended.pop(0))
        started, self._started = self._started, None
        if started is not None:
            self._make(started)

    def asked(self, for_good: bool) -> None:
        """A function of ours is called that the mode does not see as one call: what is put off comes before it, and no
        iteration with it can be one call."""
        if not self._inside and not self._is_elsewhere():
            self.settle()
            self._loops.see(None, None)
            if for_good and not self.waits:
                self.recorder.watching = None
                self.leave()

    def leave(self) -> None:
        """See nothing more; an interrupt may have ended that already."""
        if torch_internals.function_modes() and torch_internals.top_function_mode() is self:
            self.__exit__(None, None, None)

    def _is_elsewhere(self) -> bool:
        """Whether what is called is no part of the function itself."""
        recorder = self.recorder
        return (
            torch_internals.in_backward_pass()
            or recorder.frame.outer is not None
            or torch_internals.recorder() is not recorder
        )

    def _begins(self) -> bool:
        """Whether it is found now that iterations of a loop are equal, of which another one begins."""
        found = self._loops.begins()
        return found is not None and self._templates.setdefault(found.first, found) is found

    def _made(self, func: Any, args: Any, kwargs: Any, place: CallPlace) -> Any:
        """What a call gives that is made now."""
        before, written = self._loops.progress(), len(self.recorder.writes)
        args, kwargs = as_they_are((args, kwargs))
        self._inside += 1
        try:
            out = func(*args, **kwargs)
        finally:
            self._inside -= 1
        fits = self._loops.progress() == before and can_wait(func) and bool(parts(out)) and not begins_a_graph(out)
        if fits and len(self.recorder.writes) > written:  # perhaps only memory of its own
            fits = memories(args, kwargs).isdisjoint(self.recorder.writes[written:])
        self._loops.see(SeenCall(func, args, kwargs, place, out, grad_fns(out)) if fits else None, settings())
        return out

    def _followed(self, func: Any, args: Any, kwargs: Any, place: CallPlace) -> tuple[Any] | None:
        """The answer to a call that is the next of an iteration; None where it is not."""
        started = self._started
        if started is None:
            template = self._templates.get((func, place.code, place.instruction))
            if template is None or not can_wait(func) or around() != template.ambient:
                return None
            started = AnsweredIteration(template, IterationReader(self.recorder.float_of), self._now())
        elif started.begun != self._now() or not can_wait(func):
            return None
        before = len(started.given)
        try:
            if started.read(func, args, kwargs, place) != started.template.forms[len(started.outs)]:
                return None
        except Differs:
            return None
        last = self._ended[-1].last if self._ended else None
        if len(started.given) > before and any(x is not last and waits(x) for x in started.given[before:]):
            return None
        if self._started is None and self._ended:  # all that the one before has made on its way has been left
            self._look_back()
            if len(self._ended) > 1:
                self._record(self._ended.pop(0))
                started.begun = self._now()
        self._started = started
        answer = started.answered()
        if len(started.outs) == len(started.template.forms):
            self._started = None
            self._ended.append(started)
            started.end()
        self._loops.left()
        return (answer,)

    def _now(self) -> Any:
        recorder = self.recorder
        return self._loops.progress(), len(recorder.writes), settings()

    def _look_back(self) -> None:
        """The last iteration that has ended stays as it is where what it uses twice, and autograd follows, is used elsewhere
        behind it: gradients would be added up in another order."""
        last = self._ended[-1]
        used = last.used_again()
        last.stays = any(count > self._ours(x) for x, count in zip(used, references(used), strict=True))

    def _ours(self, x: torch.Tensor) -> int:
        """How often we hold a tensor that an iteration was given."""
        ours = sum((one.last is x) + any(y is x for y in one.given) for one in self._ended)
        return ours if type(x) is Array or waits(x) else ours + 2  # the recorder and the node, which hold what is plain

    def _record(self, iteration: AnsweredIteration) -> None:
        """Record an iteration that has ended: as one call, where nobody holds what it made on its way."""
        recorder, template = self.recorder, iteration.template
        if iteration.is_held() or iteration.stays:
            self._make(iteration)
            return
        leaves, treedef = tree.flatten((tuple(iteration.given),))
        found = None
        self._inside += 1
        recorder.said = template.line
        try:
            if len(leaves) == len(iteration.given):
                with as_it_was(iteration):
                    run = lambda *given: template.run(recorder, given)
                    found = recorded_once(recorder, _SharedCall(leaves, treedef), run, template, _NOTHING)
        finally:
            recorder.said = ""
            self._inside -= 1
        if found is None:
            self._make(iteration)
        else:
            self._forced[template] = max(self._forced.get(template, 0) - 1, 0)
            iteration.became(recorder, len(template.forms) - 1, found[0])

    def _make(self, iteration: AnsweredIteration) -> None:
        """Make the calls of an iteration, one by one."""
        template = iteration.template
        self._forced[template] = self._forced.get(template, 0) + 1
        if self._forced[template] == _FORCED:
            self._templates[template.first] = None
        self._inside += 1
        try:
            with as_it_was(iteration):
                iteration.made(self.recorder)
        finally:
            self.recorder.said = ""
            self._inside -= 1


class _SharedCall(NamedTuple):
    leaves: Sequence[Any]
    treedef: Any
    key: Any = ()
    found: bool = True


class _Nothing:
    """What an iteration closes over: all that it uses it is given."""

    def changed(self) -> None: ...


_NOTHING: Any = _Nothing
