"""Messages between pairs of ranks along one axis of a mesh, in the order in which they are sent.

Each direction of a pair has a process group of its own, made when the pipeline is planned, on all ranks in one order: none is
made lazily by its first message. Every rank knows what will be sent in which order, and receives in that order, one ahead.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import torch_internals
from .mesh import communicator_of
from .parcels import Parcel


@functools.lru_cache(maxsize=256)
def edge_group(mesh: Any, axis: str, source: int, target: int, default: Any) -> Any:
    """The process group of a directed edge between two of the processes that meet along an axis, by their places among them,
    where this one is at one of these; asked for by all of the mesh. `default` is the default process group: a new one makes new
    groups."""
    communicator, mine = communicator_of(mesh), None
    all_ = len(communicator.processes()) == dist.get_world_size()
    most = timedelta(seconds=torch_internals.group_timeout(None if communicator.by_tree else mesh.get_group(0)))
    for line in communicator.lines((axis,)):
        pair = [line[source], line[target]]
        if all_:
            made = dist.new_group(sorted(pair), timeout=most)
            mine = made if dist.get_rank() in pair else mine
        elif dist.get_rank() in pair:
            mine = torch_internals.group_of_members(pair, most)
    return mine


class End(NamedTuple):
    """This rank's end of an edge.

    Attributes:
        group: of the edge.
        other: the other rank's number in it.
        tells: whether the backend says when something is away; gloo says so only to who waits for it.
    """

    group: Any
    other: int
    tells: bool

    @classmethod
    def of(cls, group: Any, rank: int) -> End:
        """Of the group of an edge to, or from, a rank of the world."""
        return cls(group, dist.get_group_rank(group, rank), dist.get_backend(group) != "gloo")


class Inbox:
    """The messages that come from one rank, received in the order in which they are sent.

    Args:
        end: of the edge.
        expected: of each message its name, and how it travels.
    """

    def __init__(self, end: End, expected: Iterable[tuple[Hashable, Parcel]]) -> None:
        self.end, self.expected = end, iter(expected)
        self.arriving: dict[Hashable, tuple[Parcel, list[tuple[Any, torch.Tensor]]]] = {}

    def begin(self) -> None:
        """Begin to receive the next message, if there is one."""
        for name, parcel in self.expected:
            group, source, _ = self.end
            self.arriving[name] = parcel, [(torch_internals.received(group, x, source), x) for x in parcel.room()]
            return

    def take(self, name: Hashable) -> list[torch.Tensor]:
        """The values of a message, which is waited for."""
        while name not in self.arriving:
            self.begin()
        if len(self.arriving) == 1:
            self.begin()
        parcel, begun = self.arriving.pop(name)
        for work, _ in begun:
            work.wait()
        return parcel.unpacked([x for _, x in begun])


class Outbox:
    """The messages to one rank. What is being sent is held until it is away: with gloo, until the other rank has told that
    it has it: then one waits for nothing."""

    def __init__(self, end: End) -> None:
        self.end, self.sent = end, 0
        self.leaving: deque[list[tuple[Any, torch.Tensor]]] = deque()

    def send(self, values: Sequence[torch.Tensor], parcel: Parcel) -> None:
        """Begin to send."""
        group, target, tells = self.end
        while tells and self.leaving and all(work.is_completed() for work, _ in self.leaving[0]):
            self._let_go()
        self.leaving.append([(torch_internals.sent(group, x, target), x) for x in parcel.packed(values)])
        self.sent += 1

    def arrived(self, count: int) -> None:
        """The other rank has taken the first so many messages."""
        while self.sent - len(self.leaving) < count:
            self._let_go()

    def finish(self) -> None:
        """Wait until all is away."""
        while self.leaving:
            self._let_go()

    def _let_go(self) -> None:
        for work, _ in self.leaving.popleft():
            work.wait()
