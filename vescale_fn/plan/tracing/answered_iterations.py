"""An iteration of a Python loop whose calls have been answered, and not been made."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..._core import torch_internals
from ..._core.arrays.array import Array, made
from ..._core.base import context
from . import leaves as leaves_
from .ambient import around, only_recorded
from .fake_tensors import lies_of
from .frame import WAITS, RecordAgain
from .iterations import CallPlace, IterationReader, IterationTemplate, parts
from .watched_calls import settings as settings_now


class AnsweredIteration:
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

    def answered(self) -> Any:
        """The answer to the next call."""
        answer, found, is_new = self.template.answer(len(self.outs), self.outs, self.given)
        self.outs.append(answer)
        self._reader.answered(found, found[0] is answer)
        self._answers.append([weakref.ref(x) if new else None for x, new in zip(found, is_new)])
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
        return [x for x, uses in again if x.requires_grad and (uses > 1 or waits(x))]

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
def as_it_was(iteration: AnsweredIteration) -> Iterator[None]:
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
        if not only_recorded() or settings_now() != settings or around() != iteration.template.ambient:
            raise RecordAgain
        yield


def waiting_like(recorder: Any, x: Any) -> Callable[[], torch.Tensor]:
    """What makes tensors like this one, each as the answer to a call that is put off."""
    is_array, follows = type(x) is Array, x.requires_grad
    lies = lies_of(torch_internals.local(x) if is_array else x)
    around_it = (torch_internals.spec(x), leaves_.lies_of(x)) if is_array else None

    def make() -> torch.Tensor:
        found = recorder.waiting(lies)
        if around_it is not None:
            found = made(found, *around_it)
        return found.requires_grad_() if follows else found

    return make


def references(xs: list[Any]) -> list[int]:
    """How often each of some values is held, besides by this list."""
    return [sys.getrefcount(x) - _ALONE for x in xs]


_ALONE = 0
_ALONE = references([object()])[0]


def waits(x: torch.Tensor) -> bool:
    """Whether a tensor is an answer to a call that has not been made."""
    held = torch_internals.held_local(x) if isinstance(x, DTensor) else x
    return getattr(held, "_plan_node", None) is WAITS
