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

import contextlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ..._core import torch_internals
from ..._core.arrays.array import Array
from ..._core.base import context, put_off, source_lines, state, tree
from ..._core.base.op_arguments import tensors_in
from . import leaves as leaves_
from .ambient import around, only_recorded
from .frame import WAITS, RecordAgain
from .iterations import CallPlace, Differs, IterationReader, IterationTemplate, SeenCall, SeenIteration, grad_fns, parts
from .shared_calls import recorded_once

put_off.settled_by(torch_internals.settle)

MANY = 2  # iterations, before one is looked for that others may be like
SMALLEST = 10  # calls in an iteration: fewer are not worth it
_DIFFERING = 6  # long iterations that differ, before it is left
_FORCED = 3  # iterations that were begun and could not be one call, before they are begun no more
Frames = list[tuple[FrameType, int]]  # with the instruction at which each is, outermost first


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
        self._loops = _Loops(recorder)
        self._templates: dict[Any, IterationTemplate | None] = {}  # by their first calls; None: not any more
        self._forced: dict[IterationTemplate, int] = {}  # how many more were made one by one than at once
        self._started: _PutOff | None = None  # the iteration that has begun
        self._ended: list[_PutOff] = []  # and those before, of which somebody may still hold something

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
        if func in _ASKING or self._inside or self._is_elsewhere():
            return func(*args, **kwargs)
        place = _place()
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
        args, kwargs = _as_they_are((args, kwargs))
        self._inside += 1
        try:
            out = func(*args, **kwargs)
        finally:
            self._inside -= 1
        fits = self._loops.progress() == before and _can_wait(func) and bool(parts(out)) and not _begins_a_graph(out)
        if fits and len(self.recorder.writes) > written:  # perhaps only memory of its own
            fits = _memories(args, kwargs).isdisjoint(self.recorder.writes[written:])
        self._loops.see(SeenCall(func, args, kwargs, place, out, grad_fns(out)) if fits else None, _settings())
        return out

    def _followed(self, func: Any, args: Any, kwargs: Any, place: CallPlace) -> tuple[Any] | None:
        """The answer to a call that is the next of an iteration; None where it is not."""
        started = self._started
        if started is None:
            template = self._templates.get((func, place.code, place.instruction))
            if template is None or not _can_wait(func) or around() != template.ambient:
                return None
            started = _PutOff(template, IterationReader(self.recorder.float_of), self._now())
        elif started.begun != self._now() or not _can_wait(func):
            return None
        before = len(started.given)
        try:
            if started.read(func, args, kwargs, place) != started.template.forms[len(started.outs)]:
                return None
        except Differs:
            return None
        last = self._ended[-1].last if self._ended else None
        if any(x is not last and _waits(x) for x in started.given[before:]):
            return None
        if self._started is None and self._ended:  # all that the one before has made on its way has been left
            self._look_back()
            if len(self._ended) > 1:
                self._record(self._ended.pop(0))
                started.begun = self._now()
        self._started = started
        answer = started.answered(self.recorder)
        if len(started.outs) == len(started.template.forms):
            self._started = None
            self._ended.append(started)
            started.end()
        self._loops.left()
        return (answer,)

    def _now(self) -> Any:
        recorder = self.recorder
        return self._loops.progress(), len(recorder.writes), _settings()

    def _look_back(self) -> None:
        """The last iteration that has ended stays as it is where what it uses twice, and autograd follows, is used elsewhere
        behind it: gradients would be added up in another order."""
        last = self._ended[-1]
        used = last.used_again()
        last.stays = any(count > self._ours(x) for x, count in zip(used, _references(used), strict=True))

    def _ours(self, x: torch.Tensor) -> int:
        """How often we hold a tensor that an iteration was given."""
        ours = sum((one.last is x) + any(y is x for y in one.given) for one in self._ended)
        return (
            ours if type(x) is Array or _waits(x) else ours + 2
        )  # the recorder and the node, which hold what is plain

    def _record(self, iteration: _PutOff) -> None:
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
                with _as_it_was(iteration):
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

    def _make(self, iteration: _PutOff) -> None:
        """Make the calls of an iteration, one by one."""
        template = iteration.template
        self._forced[template] = self._forced.get(template, 0) + 1
        if self._forced[template] == _FORCED:
            self._templates[template.first] = None
        self._inside += 1
        try:
            with _as_it_was(iteration):
                iteration.made(self.recorder)
        finally:
            self.recorder.said = ""
            self._inside -= 1


class _PutOff:
    """An iteration whose calls have been answered, and not been made.

    Attributes:
        template: what it is like.
        begun: what was then.
        given: the tensors from outside.
        outs: the answers to its calls so far, while it has not ended.
        last: the last of them, when it has.
        stays: whether its calls are to be made one by one.
    """

    stays = False

    def __init__(self, template: IterationTemplate, reader: IterationReader, begun: Any) -> None:
        self.template, self.begun, self.outs, self.last = template, begun, list[Any](), None
        self._reader: Any = reader
        self.given = reader.given
        self._answers: list[list[Any]] = []  # references to what was given for each call's results, where that is new

    def read(self, func: Any, args: Any, kwargs: Any, place: CallPlace) -> Any:
        """What has to be equal to that of the template's call."""
        return self._reader.read(func, args, kwargs, place)[0]

    def answered(self, recorder: Any) -> Any:
        """The answer to the next call."""

        answer, is_new = self.template.answer(len(self.outs), self.outs, self.given, lambda x: _waiting(recorder, x))
        self.outs.append(answer)
        self._reader.answered(answer)
        self._answers.append([weakref.ref(x) if new else None for x, new in zip(parts(answer), is_new)])
        return answer

    def end(self) -> None:
        """Hold no longer what was made on the way."""
        self.last = self.outs[-1]
        self.outs, self._reader = [], None

    def is_held(self) -> bool:
        """Whether something that was made on the way still lives."""
        return any(ref is not None and ref() is not None for refs in self._answers[:-1] for ref in refs)

    def used_again(self) -> list[torch.Tensor]:
        """What came from outside, is used more than once, or was put off itself, and is followed by autograd."""
        again = zip(self.given, self.template.uses, strict=True)
        return [x for x, uses in again if x.requires_grad and (uses > 1 or _waits(x))]

    def made(self, recorder: Any) -> None:
        """Make the calls, one by one; each answer becomes what its call gives."""
        outs: list[Any] = []
        for number in range(len(self._answers)):
            outs.append(self.became(recorder, number, self.template.call(recorder, number, outs, self.given)))

    def became(self, recorder: Any, number: int, out: Any) -> Any:
        """The answer to a call has become its result. The result, with those of the answers that somebody holds."""
        found = []
        for ref, x in zip(self._answers[number], parts(out), strict=True):
            answer = None if ref is None else ref()
            if answer is not None and answer is not x:
                if not torch_internals.became(answer, x):
                    raise RecordAgain
                recorder.keep(answer)
                if id(x) in recorder.literals:
                    recorder.literals[id(answer)] = recorder.literals[id(x)]
                x = answer
            found.append(x)
        return found[0] if isinstance(out, torch.Tensor) else type(out)(found)


@contextlib.contextmanager
def _as_it_was(iteration: _PutOff) -> Iterator[None]:
    """Within the block, what is set is what was set when the calls of an iteration were answered. Raises `RecordAgain` where
    that cannot be brought back."""
    settings, now = iteration.begun[-1], torch.is_grad_enabled()
    with (
        torch_internals.keeping_tensors(),
        context.Restored(torch.set_grad_enabled, now),
        contextlib.ExitStack() as around_then,
    ):
        torch.set_grad_enabled(settings[0])
        around_then.enter_context(torch_internals.autocasting_so(settings[2]))
        if not only_recorded() or _settings() != settings or around() != iteration.template.ambient:
            raise RecordAgain
        yield


class _Loops:
    """Looks for an iteration of a loop whose calls can be put off."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self._calls: list[SeenCall | None] = []  # None for what cannot be put off
        self._settings: list[Any] = []
        self._before: Frames = []
        self._starts: dict[int, tuple[FrameType, list[int]]] = {}  # of the iterations of the loop in a frame
        self._differing = 0

    def progress(self) -> tuple[int, ...]:
        """What a call that can be put off does not add to."""
        recorder = self.recorder
        return len(recorder.read), len(recorder.guards)

    def see(self, call: SeenCall | None, settings: Any) -> None:
        """Note a call."""
        if self._differing < _DIFFERING:
            self._calls.append(call)
            self._settings.append(settings)

    def left(self) -> None:
        """What comes next is not to be compared with what came before."""
        if self._before:
            self._before, self._calls, self._settings = [], [], []
            self._starts.clear()

    def begins(self) -> IterationTemplate | None:
        """A call comes: what the iterations before are like, where it begins another one of a loop and they are equal."""
        if self._differing >= _DIFFERING:
            return None
        frames, frame = Frames(), sys._getframe(4)
        while frame is not None and frame.f_code is not self.recorder.bottom:
            frames.append((frame, frame.f_lasti))
            frame = frame.f_back
        frames.reverse()
        loop = _loop(self._before, frames)
        self._before = frames
        return None if loop is None else self._template(loop)

    def _template(self, frame: FrameType) -> IterationTemplate | None:
        """An iteration of the loop in a frame begins."""
        starts = self._starts.setdefault(id(frame), (frame, []))[1]
        starts.append(len(self._calls))
        if len(starts) < 2 or starts[-1] - starts[-2] < SMALLEST:
            return None
        try:
            return IterationTemplate(self._iteration(*starts[-2:]), lambda x: _waiting(self.recorder, x))
        except Differs:
            self._differing += 1
            return None

    def _iteration(self, start: int, stop: int) -> SeenIteration:
        """The calls of an iteration. Raises `Differs` where some cannot be put off."""
        found, settings = self._calls[start:stop], self._settings[start:stop]
        seen = [call for call in found if call is not None]
        if len(seen) < len(found) or any(x != settings[0] for x in settings):
            raise Differs
        later = [call for call in self._calls[stop:] if call is not None]
        reader = IterationReader(self.recorder.float_of)
        return SeenIteration(reader, seen, set(map(id, tensors_in(*(call[1:3] for call in later)))))


class _SharedCall(NamedTuple):
    leaves: Sequence[Any]
    treedef: Any
    key: Any = ()
    found: bool = True


class _Nothing:
    """What an iteration closes over: all that it uses it is given."""

    def changed(self) -> None: ...


_NOTHING: Any = _Nothing


def _as_they_are(given: Any) -> Any:
    """Arguments, whose lists somebody may change later."""
    kind = type(given)
    if kind is dict:
        return {name: _as_they_are(x) for name, x in given.items()}
    return kind(map(_as_they_are, given)) if kind is list or kind is tuple else given


def _waiting(recorder: Any, x: Any) -> torch.Tensor:
    """The like of a tensor, as the answer to a call that is put off."""
    if type(x) is Array:
        found = leaves_.array_of_local(x, recorder.waiting(torch_internals.local(x)))
    else:
        found = recorder.waiting(x)
    return found.requires_grad_() if x.requires_grad else found


def _references(xs: list[Any]) -> list[int]:
    """How often each of some values is held, besides by this list."""
    return [sys.getrefcount(x) - _ALONE for x in xs]


_ALONE = 0
_ALONE = _references([object()])[0]


def _waits(x: torch.Tensor) -> bool:
    """Whether a tensor is an answer to a call that has not been made."""
    held = torch_internals.held_local(x) if isinstance(x, DTensor) else x
    return getattr(held, "_plan_node", None) is WAITS


def _loop(before: Frames, now: Frames) -> FrameType | None:
    """The frame in which a loop has come round between two calls."""
    for i, ((frame, was), (other, at)) in enumerate(zip(before, now)):
        if other is not frame:  # called again by the same instruction
            return now[i - 1][0] if i else None
        if at != was:
            return frame if at < was else None
    return now[min(len(before), len(now)) - 1][0] if before else None


def _place() -> CallPlace:
    frame = source_lines.user_frame(sys._getframe(2))
    return (
        CallPlace(None, -1, "?")
        if frame is None
        else CallPlace(frame.f_code, frame.f_lasti, source_lines.user_line(frame))
    )


def _can_wait(func: Any) -> bool:
    """Whether a call does nothing besides giving its result, and nobody looks at it."""
    name = getattr(func, "__name__", "")
    return (
        not (name.endswith("_") and not name.endswith("__"))
        and only_recorded()
        and context.body() is None
        and torch_internals.saved_tensor_hooks() is None
        and context.grad_depth() < 2  # a call has no second derivative
    )


def _begins_a_graph(out: Any) -> bool:
    """Whether a call gives a tensor by which somebody may differentiate."""
    return any(x.requires_grad and x.is_leaf for x in parts(out))


def _memories(*given: Any) -> set[int]:
    """The memory of what a call is given."""
    return {torch_internals.memory_number(part) for x in tensors_in(*given) for part in leaves_.plain_of(x)}


def _settings() -> Any:
    """What is ambient and may change at any time; what else there is of it is looked at when an iteration begins and ends."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch_internals.autocasting(),
        torch.get_default_dtype(),
        state.used_mesh.get(),
        state.now(),
    )


_ASKING = {  # how a tensor lies, which an answer has as well
    *(
        getattr(torch.Tensor, name)
        for name in "size dim ndimension numel nelement stride is_contiguous is_floating_point is_complex __len__ "
        "element_size".split()
    ),
    *(
        getattr(torch.Tensor, name).__get__
        for name in "shape dtype device ndim layout requires_grad itemsize nbytes is_cuda".split()
    ),
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
    torch.is_tensor,
}
