"""Messages between pairs of ranks along one axis of a mesh, in the order in which they are sent.

Each direction of a pair has a process group of its own, made when the pipeline is planned, on all ranks in one order: none is
made lazily by its first message. Every rank knows what will be sent in which order, and receives in that order, one ahead.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import torch_internals
from ..base import dtypes
from .communicator import groups


class Lies(NamedTuple):
    """How a value that is sent lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: torch.Tensor) -> Lies:
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype, x.device)


@functools.lru_cache(maxsize=256)
def edge_group(mesh: Any, axis: str, source: int, target: int, default: Any) -> Any:
    """The process group of a directed edge between two places of an axis, where this rank is at one; asked for by all ranks of
    the mesh. `default` is the default process group: a new one makes new groups."""
    flat = mesh.mesh.flatten().tolist()
    most = timedelta(seconds=torch_internals.group_timeout(mesh.get_group(0)))
    mine = None
    for line in groups(mesh, [axis]):
        pair = [flat[line[source]], flat[line[target]]]
        made = dist.new_group(sorted(pair), timeout=most, use_local_synchronization=len(flat) < dist.get_world_size())
        if dist.get_rank() in pair:
            mine = made
    return mine


class Inbox:
    """The messages that come from one rank, received in the order in which they are sent.

    Args:
        group: of the edge.
        source: the rank of the world that sends.
        expected: of each message its name, and how its values lie.
    """

    def __init__(self, group: Any, source: int, expected: Sequence[tuple[Hashable, Sequence[Lies]]]) -> None:
        self.group, self.source, self.expected = group, source, deque(expected)
        self.arriving: dict[Hashable, tuple[Sequence[Lies], list[tuple[Any, torch.Tensor]]]] = {}

    def begin(self) -> None:
        """Begin to receive the next message, if there is one."""
        if self.expected:
            name, lies = self.expected.popleft()
            self.arriving[name] = lies, [self._begun([lies[i] for i in row]) for row in bundles(tuple(lies))]

    def _begun(self, lies: Sequence[Lies]) -> tuple[Any, torch.Tensor]:
        bits = room_for(lies)
        return dist.irecv(bits, src=self.source, group=self.group), bits

    def take(self, name: Hashable) -> list[torch.Tensor]:
        """The values of a message, which is waited for."""
        while name not in self.arriving:
            self.begin()
        if len(self.arriving) == 1:
            self.begin()
        lies, begun = self.arriving.pop(name)
        found: dict[int, torch.Tensor] = {}
        for row, (work, bits) in zip(bundles(tuple(lies)), begun, strict=True):
            work.wait()
            found.update(zip(row, apart(bits, [lies[i] for i in row]), strict=True))
        return [found[i] if i in found else unpacked(None, one) for i, one in enumerate(lies)]


class Outbox:
    """The messages to one rank. What is being sent is held until it is away: gloo says so only to who waits for it, which is
    for nothing where the other rank has told that it has it."""

    def __init__(self, group: Any, target: int) -> None:
        self.group, self.target, self.sent = group, target, 0
        self.leaving: deque[list[tuple[Any, torch.Tensor]]] = deque()

    def send(self, values: Sequence[torch.Tensor], lies: Sequence[Lies]) -> None:
        """Begin to send."""
        while self.leaving and all(work.is_completed() for work, _ in self.leaving[0]):
            self._let_go()
        rows = bundles(tuple(lies))
        every = [together([values[i] for i in row], [lies[i] for i in row]) for row in rows]
        self.leaving.append([(dist.isend(x, dst=self.target, group=self.group), x) for x in every])
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


# --- values as messages -----------------------------------------------------------------------------------------------


_ALIGNED = 16  # bytes, at a multiple of which each of several values begins


@functools.lru_cache(maxsize=1024)
def bundles(lies: tuple[Lies, ...]) -> list[list[int]]:
    """Which of the values of a message travel as one: those on a device. What has no elements does not."""
    rows: dict[torch.device, list[int]] = {}
    for i, one in enumerate(lies):
        if _size(one):
            rows.setdefault(one.device, []).append(i)
    return list(rows.values())


def room_for(lies: Sequence[Lies]) -> torch.Tensor:
    """Memory for values that travel as one: a value alone as what carries it, several as bytes."""
    one = lies[0]
    if len(lies) == 1:
        return torch.empty(_size(one), dtype=_carrier(one.dtype), device=one.device)
    return torch.empty(_places(lies)[-1], dtype=torch.uint8, device=one.device)


def together(values: Sequence[torch.Tensor], lies: Sequence[Lies]) -> torch.Tensor:
    """Values as one."""
    if len(lies) == 1:
        return packed(values[0], lies[0])
    bits = room_for(lies)
    for x, one, at in zip(values, lies, _places(lies)):
        row = packed(x, one).view(torch.uint8)
        bits[at : at + len(row)] = row
    return bits


def apart(bits: torch.Tensor, lies: Sequence[Lies]) -> list[torch.Tensor]:
    """The values again."""
    if len(lies) == 1:
        return [unpacked(bits, lies[0])]
    return [
        unpacked(bits[at : at + _bytes(one)].view(_carrier(one.dtype)), one) for one, at in zip(lies, _places(lies))
    ]


def _places(lies: Sequence[Lies]) -> list[int]:
    """Where each of several values begins, in bytes, and where the last one ends."""
    found = [0]
    for one in lies:
        found.append(found[-1] + -(-_bytes(one) // _ALIGNED) * _ALIGNED)
    return found


def _bytes(lies: Lies) -> int:
    return _size(lies) * _carrier(lies.dtype).itemsize


def packed(x: torch.Tensor, lies: Lies) -> torch.Tensor:
    """The elements of a value, each once, in the order of memory, as what travels."""
    if _is_dense(lies):
        if tuple(x.stride()) != lies.stride:
            x = torch.empty_strided(lies.shape, lies.stride, dtype=x.dtype, device=x.device).copy_(x)
        flat = x.as_strided((x.numel(),), (1,))
    else:
        flat = _narrow(x, lies).contiguous().view(-1)
    flat = flat.clone() if flat.is_conj() or flat.is_neg() else flat
    return flat.view(_carrier(lies.dtype))


def unpacked(bits: torch.Tensor | None, lies: Lies) -> torch.Tensor:
    """The value again, lying as it lay."""
    if bits is None:
        return torch.empty_strided(lies.shape, lies.stride, dtype=lies.dtype, device=lies.device)
    flat = bits.view(lies.dtype)
    if _is_dense(lies):
        return flat.as_strided(lies.shape, lies.stride)
    shape = _narrowed(lies)
    out = torch.empty_strided(shape, lies.stride, dtype=lies.dtype, device=lies.device).copy_(flat.view(shape))
    return out.as_strided(lies.shape, lies.stride)


def _is_dense(lies: Lies) -> bool:
    """Whether the elements fill a piece of memory, each once."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(lies.stride, lies.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _narrowed(lies: Lies) -> tuple[int, ...]:
    """The shape without what is expanded."""
    return tuple(1 if s == 0 else n for s, n in zip(lies.stride, lies.shape, strict=True))


def _narrow(x: torch.Tensor, lies: Lies) -> torch.Tensor:
    for dim, size in enumerate(_narrowed(lies)):
        x = x.narrow(dim, 0, size)
    return x


def _size(lies: Lies) -> int:
    size = 1
    for n in lies.shape if _is_dense(lies) else _narrowed(lies):
        size *= n
    return 0 if 0 in lies.shape else size * (lies.dtype.itemsize // _carrier(lies.dtype).itemsize)


def _carrier(dtype: torch.dtype) -> torch.dtype:
    """What backends send in the place of a dtype that they do not know."""
    if dtype in dtypes.CARRIED:
        return dtypes.CARRIED[dtype]
    return torch.uint8 if dtype.itemsize == 1 else dtype
