"""Looks for an iteration of a Python loop, among the calls of torch's functions, that others may be like."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from ..._core.base.op_arguments import tensors_in
from .answered_iterations import waiting_like
from .iterations import Differs, IterationReader, IterationTemplate, SeenCall, SeenIteration

SMALLEST = 10  # calls in an iteration: fewer are not worth it
_DIFFERING = 6  # long iterations that differ, before it is left
Frames = list[tuple[FrameType, int]]  # with the instruction at which each is, outermost first


class LoopSearch:
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
            return IterationTemplate(self._iteration(*starts[-2:]), lambda x: waiting_like(self.recorder, x))
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


def _loop(before: Frames, now: Frames) -> FrameType | None:
    """The frame in which a loop has come round between two calls."""
    for i, ((frame, was), (other, at)) in enumerate(zip(before, now)):
        if other is not frame:  # called again by the same instruction
            return now[i - 1][0] if i else None
        if at != was:
            return frame if at < was else None
    return now[min(len(before), len(now)) - 1][0] if before else None
