"""One iteration of a Python loop as the calls of torch's functions that it makes, to be compared with others and made again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ..._core import torch_internals
from ..._core.arrays.array import Array
from ..._core.sharding.spec import P
from . import leaves as leaves_
from .ambient import around
from .shared_body import Unshareable, signatures


class Differs(Exception):
    """Iterations are not equal, or cannot be compared."""


class OutOf(NamedTuple):
    """Stands for a result of an earlier call of the iteration; `part`: of a sequence of them."""

    call: int
    part: int | None


class GivenTo(NamedTuple):
    """Stands for a tensor from outside of the iteration."""

    place: int


class CallPlace(NamedTuple):
    """Where the user calls something."""

    code: Any
    instruction: int
    line: str


class SeenCall(NamedTuple):
    """A call of a function of torch's, with `OutOf` and `GivenTo` in the place of tensors; `out`: its result."""

    function: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    place: CallPlace
    out: Any


class IterationReader:
    """Reads the calls of an iteration, in order.

    Attributes:
        given: the tensors from outside, in the order in which they come.

    Args:
        is_input: whether a float stands for an input of the plan.
    """

    def __init__(self, is_input: Callable[[Any], bool]) -> None:
        self.given: list[torch.Tensor] = []
        self._is_input = is_input
        self._known: dict[int, Any] = {}
        self._calls = 0

    def read(self, func: Any, args: Any, kwargs: Any, place: CallPlace) -> tuple[Any, Any]:
        """What is equal for equal calls, and the arguments with `OutOf` and `GivenTo` for tensors. Raises `Differs` where they
        cannot be compared."""
        known, form = len(self.given), [func, id(place.code), place.instruction]
        read = self._read((*args, kwargs), form)
        try:
            return (form, signatures(self.given[known:])), read
        except Unshareable:
            raise Differs from None

    def made(self, out: Any) -> Any:
        """Note what a call has given; for each tensor what it is, or how it lies where it is new."""
        lies: list[Any] = [self._known.get(id(x)) or signatures((x,)) for x in parts(out)]
        for i, x in enumerate(parts(out)):
            self._known.setdefault(id(x), OutOf(self._calls, None if out is x else i))
        self._calls += 1
        return type(out) if type(out) in (list, tuple) else None, lies

    def _read(self, x: Any, form: list[Any]) -> Any:
        kind = type(x)
        if isinstance(x, torch.Tensor):
            found = self._known.get(id(x))
            if found is None:
                found = self._known[id(x)] = GivenTo(len(self.given))
                self.given.append(x)
            form.append(found)
            return found
        if kind in (list, tuple, slice, dict):
            x = (x.start, x.stop, x.step) if kind is slice else x
            form += kind, tuple(x) if kind is dict else len(x)
            read = [self._read(one, form) for one in (x.values() if kind is dict else x)]
            return dict(zip(x, read)) if kind is dict else slice(*read) if kind is slice else kind(read)
        if kind not in _STATIC or self._is_input(x):
            raise Differs
        form += kind, repr(x) if kind is float else x
        return x


class SeenIteration:
    """An iteration that can be left out, of which only the last result is used later.

    Attributes:
        form: equal for equal iterations.
        calls: with `OutOf` and `GivenTo` for tensors, and each with how its results lie.
        given: the tensors from outside.
        last: the last result.

    Args:
        reader: a new one.
        calls: as they were made.
        later: what calls after it are given, by id.
    """

    def __init__(self, reader: IterationReader, calls: Sequence[SeenCall], later: set[int]) -> None:
        made = set[int]()
        self.form, self.calls = [], []
        for call in calls:
            form, read = reader.read(call.function, call.args, call.kwargs, call.place)
            lies = reader.made(call.out)
            self.form.append((form, lies))
            self.calls.append((form, call._replace(args=read[:-1], kwargs=read[-1]), lies))
            made |= set(map(id, parts(call.out)))
        self.given, self.last = reader.given, call.out
        if not isinstance(self.last, torch.Tensor) or made & later - {id(self.last)}:
            raise Differs


class IterationTemplate:
    """An iteration, to be followed.

    Attributes:
        forms: of its calls.
        ambient: what was around.
    """

    def __init__(self, iteration: SeenIteration) -> None:
        self.forms, self.ambient = [form for form, *_ in iteration.calls], around()
        self._calls = [call for _, call, _ in iteration.calls]
        self._results = [(lies, parts(call.out)) for _, call, lies in iteration.calls]
        self.line = self._calls[0].place.line

    def answer(
        self, number: int, outs: Sequence[Any], given: Sequence[Any], like_plain: Callable[[torch.Tensor], torch.Tensor]
    ) -> Any:
        """What is given for the result of a call that is left out; `like_plain` makes the like of a plain tensor."""
        (kind, lies), likes = self._results[number]
        found = []
        for lie, like in zip(lies, likes, strict=True):
            if isinstance(lie, (OutOf, GivenTo)):
                found.append(_filled(lie, outs, given))
                continue
            local = torch_internals.local(like) if isinstance(like, DTensor) else like
            x = like_plain(local)
            x = leaves_.array_of_local(like, x) if isinstance(like, DTensor) else x
            found.append(x.requires_grad_() if like.requires_grad else x)
        return found[0] if kind is None else kind(found)

    def run(self, recorder: Any, given: Sequence[Any]) -> Any:
        """Make the calls, each for its line; what comes then is for the first."""
        outs: list[Any] = []
        for call in self._calls:
            recorder.said = call.place.line
            outs.append(call.function(*_filled(call.args, outs, given), **_filled(call.kwargs, outs, given)))
        recorder.said = self.line
        return outs[-1]


def _filled(x: Any, outs: Sequence[Any], given: Sequence[Any]) -> Any:
    """Arguments with the tensors that they stand for."""
    kind = type(x)
    if kind is OutOf:
        return outs[x.call] if x.part is None else outs[x.call][x.part]
    if kind is GivenTo:
        return given[x.place]
    if kind is slice:
        return slice(*_filled((x.start, x.stop, x.step), outs, given))
    if kind is list or kind is tuple:
        return kind([_filled(one, outs, given) for one in x])
    return {name: _filled(one, outs, given) for name, one in x.items()} if kind is dict else x


def parts(out: Any) -> Sequence[torch.Tensor]:
    """The tensors that a call gives; none where it gives something else, too."""
    out = out if type(out) in (list, tuple) else (out,)
    return out if all(type(x) in _TENSORS for x in out) else ()


_TENSORS = {*torch_internals.BARE, Array}
_STATIC = {int, float, bool, str, type(None), type(...), torch.dtype, torch.device, torch.Size, torch.memory_format, P}
