"""One iteration of a Python loop as the calls of torch's functions that it makes, to be compared with others and made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..._core import torch_internals
from ..._core.arrays.array import Array
from ..._core.sharding.spec import P
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
    number: int

    @property
    def line(self) -> str:
        """The line, as ``file:line``."""
        return "?" if self.code is None else f"{self.code.co_filename}:{self.number}"


class SeenCall(NamedTuple):
    """A call of a function of torch's, with `OutOf` and `GivenTo` in the place of tensors; `out`: its result; `history`: what
    autograd knew of that then."""

    function: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    place: CallPlace
    out: Any
    history: Sequence[Any]


class IterationReader:
    """Reads the calls of an iteration, in order.

    Attributes:
        given: the tensors from outside, in the order in which they come.

    Args:
        float_of: what is equal for numbers that stand for the same of the plan's inputs, None for others.
    """

    def __init__(self, float_of: Callable[[Any], Any]) -> None:
        self.given: list[torch.Tensor] = []
        self._float_of = float_of
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
        self.answered(parts(out), isinstance(out, torch.Tensor))
        return type(out) if type(out) in (list, tuple) else None, lies

    def answered(self, tensors: Sequence[torch.Tensor], alone: bool) -> None:
        """Note the tensors that have been given for the result of a call; whether that is one, or a sequence of them."""
        for i, x in enumerate(tensors):
            self._known.setdefault(id(x), OutOf(self._calls, None if alone else i))
        self._calls += 1

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
        live = self._float_of(x) if isinstance(x, float) else None
        if live is None and kind not in _STATIC:
            raise Differs
        form += kind, repr(x) if live is None and kind is float else x if live is None else live
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
            if any(a is not b for a, b in zip(grad_fns(call.out), call.history, strict=True)):
                raise Differs  # an `autograd.Function` gave it, too
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
        uses: how often each tensor from outside is given to a call.

    Args:
        iteration: one that was seen.
        like: gives what makes others like a tensor.
    """

    def __init__(self, iteration: SeenIteration, like: Callable[[torch.Tensor], Callable[[], torch.Tensor]]) -> None:
        self.forms, self.ambient = [form for form, *_ in iteration.calls], around()
        self._calls = [call._replace(out=None, history=()) for _, call, _ in iteration.calls]
        self._results: list[tuple[Any, list[Any]]] = [
            (
                kind,
                [
                    lie if isinstance(lie, (OutOf, GivenTo)) else like(x)
                    for lie, x in zip(lies, parts(call.out), strict=True)
                ],
            )
            for _, call, (kind, lies) in iteration.calls
        ]
        self.line = self._calls[0].place.line
        places = [place for call in self._calls for place in _given((*call.args, *call.kwargs.values()))]
        self.uses = [places.count(place) for place in range(len(iteration.given))]

    @property
    def first(self) -> Any:
        """The first call, by which an iteration is known."""
        one = self._calls[0]
        return one.function, one.place.code, one.place.instruction

    def answer(self, number: int, outs: Sequence[Any], given: Sequence[Any]) -> tuple[Any, list[Any], list[bool]]:
        """What is given for the result of a call that is put off, the tensors in it, and for each whether it is new."""
        kind, results = self._results[number]
        is_new = [type(x) is not OutOf and type(x) is not GivenTo for x in results]
        found = [x() if new else _filled(x, outs, given) for x, new in zip(results, is_new)]
        return (found[0] if kind is None else kind(found)), found, is_new

    def call(self, recorder: Any, number: int, outs: Sequence[Any], given: Sequence[Any]) -> Any:
        """Make a call, for its line."""
        call = self._calls[number]
        recorder.said = call.place.line
        return call.function(*_filled(call.args, outs, given), **_filled(call.kwargs, outs, given))

    def run(self, recorder: Any, given: Sequence[Any]) -> Any:
        """Make all calls; what comes then is for the line of the first."""
        outs: list[Any] = []
        for number in range(len(self._calls)):
            outs.append(self.call(recorder, number, outs, given))
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


def _given(args: Any) -> Iterator[int]:
    """The tensors from outside among arguments, by their places."""
    for x in args:
        if type(x) is GivenTo:
            yield x.place
        elif type(x) in (list, tuple, dict, slice):
            yield from _given((x.start, x.stop, x.step) if type(x) is slice else x.values() if type(x) is dict else x)


def parts(out: Any) -> Sequence[torch.Tensor]:
    """The tensors that a call gives; none where it gives something else, too."""
    out = out if type(out) in (list, tuple) else (out,)
    return out if all(map(_can_wait, out)) else ()


def _can_wait(x: Any) -> bool:
    """Whether something is a tensor, or an array of one rank's block."""
    return type(x) in torch_internals.BARE or (
        type(x) is Array and type(torch_internals.held_local(x)) in torch_internals.BARE
    )


def grad_fns(out: Any) -> list[Any]:
    """What autograd knows of each tensor that a call gives."""
    return [x.grad_fn for x in parts(out)]


_STATIC = {int, float, bool, str, type(None), type(...), torch.dtype, torch.device, torch.Size, torch.memory_format, P}
