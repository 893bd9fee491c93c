"""A Python loop whose iterations call the same functions of torch: each iteration is recorded as one call of a shared body.

All of the loop's Python runs in each iteration. What is left out is what torch would do: as long as the calls of an iteration
are those of an earlier one, on each other's results and on other tensors of the same types, each is answered by a tensor
without values of the type that it gave before; with the last one the iteration is recorded as one call, as equal calls of a
jitted function are (`shared_calls`). Such an answer has no node: whoever uses it in another way ends the attempt, and the
function is recorded again without it.

A recording comes to that in steps, each of which begins it anew: `Counted` finds that many lines come again, `Learning` looks
for equal iterations, `Following` takes them for calls.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ..._core import torch_internals
from ..._core.base import context, source_lines, state, tree
from ..._core.base.op_arguments import tensors_in
from . import leaves as leaves_
from .ambient import around, only_recorded
from .iterations import CallPlace, Differs, IterationReader, IterationTemplate, SeenCall, SeenIteration, parts
from .shared_calls import recorded_once

MANY = 10  # iterations, before equal ones are looked for
SMALLEST = 10  # calls in an iteration: fewer are not worth it
_DIFFERING = 3  # long iterations that differ, before it is left
Frames = list[tuple[FrameType, int]]  # with the instruction at which each is, outermost first


class RecordAgain(BaseException):
    """The function is to be recorded again; no `Exception`, lest a user's ``except`` takes it for an error.

    Attributes:
        by: what looks at it then; None for nothing.
    """

    def __init__(self, by: Callable[[Any], Any] | None = None) -> None:
        self.by = by


class Counted(contextlib.nullcontext[None]):
    """Counts how often operators are recorded for the same line."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        recorder.counted = self
        self._counts: dict[Any, int] = {}
        self._many = 0

    def see(self, op: Any, line: str) -> None:
        """Note an operator. Raises `RecordAgain` where there are many that come again and again."""
        key = id(op), line
        count = self._counts[key] = self._counts.get(key, 0) + 1
        if count == MANY:
            self._many += 1
            if self._many >= SMALLEST and 2 * self._many > len(self._counts):  # not just what a small loop inside calls
                raise RecordAgain(Learning)


class _Watching(torch_internals.TorchFunctionMode):
    """Sees the functions of torch that are called, and those of ours that stand beside them (`seen_whole`)."""

    records_plan = True

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **kwargs) if func in _ASKING or self._is_elsewhere() else self.see(func, args, kwargs)

    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a call gives."""
        raise NotImplementedError

    def _is_elsewhere(self) -> bool:
        """Whether what is called is no part of the function itself."""
        recorder = self.recorder
        return (
            torch_internals.in_backward_pass()
            or recorder.frame.outer is not None
            or torch_internals.recorder() is not recorder
        )

    def _new_reader(self) -> IterationReader:
        return IterationReader(self.recorder.stands_for_a_float)

    def progress(self) -> tuple[int, ...]:
        """What a call that can be left out does not add to."""
        recorder = self.recorder
        return len(recorder.read), len(recorder.guards), len(recorder.literals)


class Learning(_Watching):
    """Looks for a loop with equal iterations, each of which takes the last result of the one before. Raises `RecordAgain`, with
    what follows such iterations or with nothing; at the latest at the end of the block."""

    def __init__(self, recorder: Any) -> None:
        super().__init__(recorder)
        self._calls: list[SeenCall | None] = []  # None for what cannot be left out
        self._settings: list[Any] = []
        self._before: Frames = []
        self._starts: dict[int, tuple[FrameType, list[int]]] = {}  # of the iterations of the loop in a frame
        self._differing = 0

    def __enter__(self) -> Any:
        self._bottom = sys._getframe(1)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None:
            raise RecordAgain

    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        frames, frame = Frames(), sys._getframe(1)
        while frame is not None and frame is not self._bottom:
            frames.append((frame, frame.f_lasti))
            frame = frame.f_back
        frames.reverse()
        loop = _loop(self._before, frames)
        self._before = frames
        if loop is not None:
            self._begins(loop)
        before, written = self.progress(), len(self.recorder.writes)
        out = func(*args, **kwargs)
        fits = self.progress() == before and _can_wait(func) and parts(out)
        if fits and len(self.recorder.writes) > written:  # perhaps only memory of its own
            fits = _memories(args, kwargs).isdisjoint(self.recorder.writes[written:])
        self._calls.append(SeenCall(func, args, kwargs, _place(), out) if fits else None)
        self._settings.append(_settings())
        return out

    def _begins(self, frame: FrameType) -> None:
        """An iteration of the loop in a frame begins."""
        starts = self._starts.setdefault(id(frame), (frame, []))[1]
        starts.append(len(self._calls))
        ends = starts[-3:]
        if len(ends) < 3 or min(ends[2] - ends[1], ends[1] - ends[0]) < SMALLEST:
            return
        try:
            first, second = (self._iteration(*ends[i : i + 2]) for i in (0, 1))
        except Differs:
            first = second = None
        if first is not None and second is not None and first.form == second.form:
            if any(x is first.last for x in second.given):
                template = IterationTemplate(first)
                raise RecordAgain(lambda recorder: Following(recorder, template))
        self._differing += 1
        if self._differing == _DIFFERING:
            raise RecordAgain

    def _iteration(self, start: int, stop: int) -> SeenIteration:
        """The calls of an iteration. Raises `Differs` where some cannot be left out."""
        found, settings = self._calls[start:stop], self._settings[start:stop]
        seen = [call for call in found if call is not None]
        if len(seen) < len(found) or any(x != settings[0] for x in settings):
            raise Differs
        later = [call for call in self._calls[stop:] if call is not None]
        return SeenIteration(self._new_reader(), seen, set(map(id, tensors_in(*(call[1:3] for call in later)))))


class Following(_Watching):
    """Takes iterations that are equal to one for calls of it. Raises `RecordAgain` where one turns out to be another."""

    def __init__(self, recorder: Any, template: IterationTemplate) -> None:
        super().__init__(recorder)
        self._template, self._reader, self._outs = template, self._new_reader(), list[Any]()

    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        template, outs = self._template, self._outs
        if not outs and template.forms[0][0][0] != func:
            return self._as_it_is(func, args, kwargs)
        try:
            equal = self._reader.read(func, args, kwargs, _place())[0] == template.forms[len(outs)]
        except Differs:
            equal = False
        if not outs:
            if not (equal and around() == template.ambient and _can_wait(func)):
                self._reader = self._new_reader()
                return self._as_it_is(func, args, kwargs)
            self._begun = self._now()
        if not (equal and self._begun == self._now() and _can_wait(func)):
            raise RecordAgain
        if len(outs) + 1 < len(template.forms):
            outs.append(template.answer(len(outs), outs, self._reader.given, self._waiting))
            self._reader.made(outs[-1])
            return outs[-1]
        return self._called()

    def _as_it_is(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a call gives that is no part of an iteration."""
        for x in tensors_in(args, kwargs):  # autograd would take one that was left out for a variable
            if getattr(torch_internals.held_local(x) if isinstance(x, DTensor) else x, "_plan_node", None) is _NO_NODE:
                raise RecordAgain
        return func(*args, **kwargs)

    def _waiting(self, x: torch.Tensor) -> torch.Tensor:
        return self.recorder.waiting(x, _NO_NODE)

    def _now(self) -> Any:
        return self.progress(), len(self.recorder.writes), len(self.recorder.graph.nodes), _settings()

    def _called(self) -> Any:
        """Record an iteration whose calls have all been seen."""
        given, self._reader, self._outs = self._reader.given, self._new_reader(), []
        leaves, treedef = tree.flatten((tuple(given),))
        recorder, template = self.recorder, self._template
        if around() != template.ambient or len(leaves) != len(given):
            raise RecordAgain
        recorder.said = template.line
        try:
            found = recorded_once(
                recorder, _SharedCall(leaves, treedef), lambda *given: template.run(recorder, given), self, _NOTHING
            )
        finally:
            recorder.said = ""
        if found is None:
            raise RecordAgain
        return found[0]


class _SharedCall(NamedTuple):
    leaves: Sequence[Any]
    treedef: Any
    key: Any = ()


class _Nothing:
    """What an iteration closes over: all that it uses it is given."""

    def changed(self) -> None: ...


_NOTHING: Any = _Nothing


class _NoNode:
    """Stands for the node of a result that has been left out: there is none."""

    def __getattr__(self, name: str) -> Any:
        raise RecordAgain


_NO_NODE = _NoNode()


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
    )


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
