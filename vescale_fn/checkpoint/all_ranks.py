"""Steps that all ranks take together: each does its part, the first one decides, and where one fails all raise the same.

They have groups of their own, over gloo, as what travels are small Python values: one for the calls of the program, one
for a save in the background, which must not meet them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from .._core import torch_internals
from .._core.base import context, errors
from .._core.base.errors import CheckpointError
from .._core.base.messages import report
from .._core.distributed import ranks
from .._core.distributed.divergence import RankCall

T = TypeVar("T")
R = TypeVar("R")


class Crew(NamedTuple):
    """The ranks that take a step together, and this one's place."""

    group: Any  # None: there is only one
    rank: int
    size: int


class _Failure(NamedTuple):
    kind: str
    text: str


def all_ranks(where: str, background: bool = False) -> Crew:
    """All real ranks that there are, of which each has called `where`; this process alone where it simulates them."""
    if context.simulated() is not None or not ranks.has_process_group() or dist.get_world_size() == 1:
        return Crew(None, 0, 1)
    if (watch := context.watch()) is not None:
        watch.compare(list(range(dist.get_world_size())), RankCall(f"vfn.{where}", "over all ranks"))
    return Crew(_group(dist.group.WORLD, background), dist.get_rank(), dist.get_world_size())


@functools.lru_cache(maxsize=8)
def _group(default: Any, background: bool) -> Any:
    """`default` is the process group of now: a new one makes new groups."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=torch_internals.group_timeout()))


def step(crew: Crew, where: str, mine: Callable[[], T], decide: Callable[[list[T]], list[R]]) -> R:
    """``decide([what each rank's `mine()` gave])[this rank]``; `decide` runs on the first rank alone.

    Where anything raises on any rank, every rank raises, in the same words.
    """
    interrupted: BaseException | None = None
    said: Any
    try:
        said = mine()
    except BaseException as error:
        said, interrupted = _failure(where, error), error
    everyone = _gathered(crew, said)
    answers: Any = None
    if everyone is not None:
        try:
            failed = {i: x for i, x in enumerate(everyone) if isinstance(x, _Failure)}
            answers = [_joined(failed, crew.size)] * crew.size if failed else decide(everyone)
        except BaseException as error:
            answers, interrupted = [_failure(where, error)] * crew.size, error
    answer = _scattered(crew, answers)
    if isinstance(answer, _Failure):
        if interrupted is not None and not isinstance(interrupted, Exception):
            raise interrupted  # a keyboard's, an exit: the others have been told
        cause = None if isinstance(interrupted, errors.VfnError) else interrupted
        raise getattr(errors, answer.kind)(answer.text) from cause
    return answer


def _gathered(crew: Crew, mine: Any) -> list[Any] | None:
    if crew.group is None:
        return [mine]
    everyone: list[Any] | None = [None] * crew.size if crew.rank == 0 else None
    dist.gather_object(mine, everyone, dst=0, group=crew.group)
    return everyone


def _scattered(crew: Crew, answers: Any) -> Any:
    if crew.group is None:
        return answers[0]
    answer = [None]
    dist.scatter_object_list(answer, answers, src=0, group=crew.group)
    return answer[0]


def _failure(where: str, error: BaseException) -> _Failure:
    if isinstance(error, errors.VfnError):
        known = next(each for each in type(error).__mro__ if hasattr(errors, each.__name__))
        return _Failure(known.__name__, str(error))
    what = f"it stopped with {type(error).__name__}"
    return _Failure(CheckpointError.__name__, report(where, what, [line] if (line := str(error)) else []))


def _joined(failed: dict[int, _Failure], size: int) -> _Failure:
    """One failure for all ranks: what all say, or who says what."""
    first = next(iter(failed.values()))
    if len(failed) == size and len(set(failed.values())) == 1:
        return first
    said: dict[_Failure, list[int]] = {}
    for rank, failure in failed.items():
        said.setdefault(failure, []).append(rank)
    texts = [
        f"on rank{'s' * (len(who) > 1)} {', '.join(map(str, who))} of {size}: {failure.text}"
        for failure, who in said.items()
    ]
    return _Failure(first.kind, "\n".join(texts))


def each(crew: Crew, where: str, mine: Callable[[], T]) -> T:
    """What `mine` gives on this rank, once it has given something on every rank."""
    found: list[T] = []
    step(crew, where, lambda: found.append(mine()), lambda _: [None] * crew.size)
    return found[0]


def same_for_all(where: str, find: Callable[[], R]) -> R:
    """What the first rank finds, on every rank."""
    crew = all_ranks(where)
    return step(crew, where, lambda: None, lambda _: [find()] * crew.size)
