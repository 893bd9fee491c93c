"""Tasks that are run with sizes in the place of values: what is held while they run, and what they leave."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .ir import memory_aliases
from .ir.graph import nbytes, output, value
from .ir.memory_use import memory
from .stages import PRE
from .tasks import Task

KINDS: Sequence[str] = ("arguments", "once", "kept", "gradients", "messages", "in a task")
ARGUMENTS, ONCE, KEPT, GRADIENTS, MESSAGES, WITHIN = KINDS


class Holds:
    """The bytes that a rank holds: now, at most since `begin`, and where they are most by what they are."""

    def __init__(self) -> None:
        self.now = dict.fromkeys(KINDS, 0)
        self.most = dict(self.now)
        self.total = self.top = self._peak = 0

    def begin(self) -> None:
        self.top = self.total

    def add(self, kind: str, size: int) -> None:
        """More bytes, or fewer."""
        self.now[kind] += size
        self.total += size
        if self.total > self.top:
            self.top = self.total
            if self.top > self._peak:
                self._peak, self.most = self.top, dict(self.now)


class HeldPiece:
    """A piece of memory, which is held as long as something refers to it."""

    __slots__ = ("__weakref__", "bytes", "holds", "kind")

    def __init__(self, holds: Holds, size: int, kind: str) -> None:
        self.holds, self.bytes, self.kind = holds, size, kind
        holds.add(kind, size)

    def become(self, kind: str) -> None:
        self.holds.add(self.kind, -self.bytes)
        self.kind = kind
        self.holds.add(kind, self.bytes)

    def __del__(self) -> None:
        self.holds.add(self.kind, -self.bytes)


class SizedValue:
    """A value of which the size is known, and in which pieces of memory it lies; gradients are added as tensors are."""

    __slots__ = ("dtype", "holds", "pieces", "size")

    def __init__(self, holds: Holds, dtype: Any, size: int, pieces: Sequence[HeldPiece]) -> None:
        self.holds, self.dtype, self.size, self.pieces = holds, dtype, size, pieces

    @classmethod
    def of(cls, holds: Holds, val: Any, pieces: Sequence[HeldPiece]) -> SizedValue:
        """For the value of a node."""
        return cls(holds, getattr(val, "dtype", None), nbytes(val), pieces)

    def to(self, dtype: torch.dtype) -> SizedValue:
        return self if dtype == self.dtype else self._new(dtype)

    def __add__(self, other: SizedValue) -> SizedValue:
        return self._new(torch.promote_types(self.dtype, other.dtype))

    def add_(self, other: SizedValue) -> SizedValue:
        return self

    def _new(self, dtype: torch.dtype) -> SizedValue:
        size = self.size // self.dtype.itemsize * dtype.itemsize
        return SizedValue(self.holds, dtype, size, [HeldPiece(self.holds, size, GRADIENTS)])


class TaskMemory:
    """What a task makes, and what it needs while it runs.

    Args:
        graph: of its calls.

    Attributes:
        sizes: of the memory that it makes and gives.
        outputs: of each output its value, the places of the inputs in whose memory it may lie, and those among `sizes`.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph, self._inputs = graph, [x for x in graph.nodes if x.op == "placeholder"]
        given, lie = {x: i for i, x in enumerate(self._inputs)}, memory_aliases.memories(graph)
        pieces: dict[Any, int] = {}
        self.sizes: list[int] = []
        self.outputs: list[tuple[Any, list[int], list[int]]] = []
        for x in output(graph).args[0]:  # type: ignore[union-attr]
            old = [given[piece.maker] for piece in lie[x] if piece.maker in given]  # type: ignore[index]
            new = [piece for piece in lie[x] if piece.maker not in given]  # type: ignore[index]
            for piece in new:
                if piece not in pieces:
                    pieces[piece] = len(self.sizes)
                    self.sizes.append(piece.bytes)
            self.outputs.append((value(x), old, [pieces[piece] for piece in new]))  # type: ignore[arg-type]
        self._within: dict[Any, int] = {}

    def within(self, gone: tuple[tuple[int, tuple[int, ...]], ...]) -> int:
        """The bytes that it holds at most besides its inputs.

        Args:
            gone: the memory that is let go while it runs: how much, and the places of the inputs that lie there.
        """
        if gone not in self._within:
            together: dict[fx.Node, tuple[fx.Node, int]] = {}
            for size, places in gone:
                for i in places:
                    together.setdefault(self._inputs[i], (self._inputs[places[0]], size))
            use = memory(self._graph, frozenset(first for first, _ in together.values()), together)
            self._within[gone] = use.peak - use.arguments
        return self._within[gone]


class SizedTask:
    """A task that is run with sizes.

    Args:
        task: to be run.
        kind: of it.
        holds: what its rank holds.
        made: what is known of tasks by their graphs.
        gradients: the nodes that are added up.
    """

    def __init__(
        self, task: Task, kind: str, holds: Holds, made: dict[fx.Graph, TaskMemory], gradients: set[fx.Node]
    ) -> None:
        self.inputs, self.outputs, self.last, self.dies = task.inputs, task.outputs, task.last, task.dies
        self.run = None
        if (graph := task.graph) is not None:
            if graph not in made:
                made[graph] = TaskMemory(graph)
            self._memory, self._holds = made[graph], holds
            self._kinds = [ONCE if kind == PRE else GRADIENTS if x in gradients else KEPT for x in task.outputs]
            self._mortal = [i for i, x in enumerate(task.inputs) if x in task.dies]
            self.run = self._run

    def _run(self, given: list[SizedValue]) -> list[SizedValue]:
        holds, memory = self._holds, self._memory
        lent = {i: given[i].pieces for _, old, _ in memory.outputs for i in old}
        gone = self._let_go(given)
        for size, kind, _ in gone:  # which it is in the course of the task
            holds.add(kind, size)
        within = memory.within(tuple((size, places) for size, _, places in gone))
        holds.add(WITHIN, within)
        holds.add(WITHIN, -within)
        for size, kind, _ in gone:
            holds.add(kind, -size)
        pieces: list[HeldPiece | None] = [None] * len(memory.sizes)
        found = []
        for kind, (val, old, new) in zip(self._kinds, memory.outputs, strict=True):
            for i in new:
                pieces[i] = pieces[i] or HeldPiece(holds, memory.sizes[i], kind)
            lies = [piece for i in old for piece in lent[i]] + [pieces[i] for i in new]
            found.append(SizedValue.of(holds, val, lies))  # type: ignore[arg-type]
        return found

    def _let_go(self, given: list[SizedValue]) -> list[tuple[int, str, tuple[int, ...]]]:
        """The memory that nothing but a task needs: how much, of which kind, and the places of the inputs that lie there."""
        lying = self._lying(given)
        given.clear()
        return [(size, kind, tuple(places)) for ref, size, kind, places in lying if ref() is None]

    def _lying(self, given: list[SizedValue]) -> list[tuple[weakref.ref[HeldPiece], int, str, list[int]]]:
        """The pieces in which inputs lie that are needed no more."""
        found: dict[int, tuple[weakref.ref[HeldPiece], int, str, list[int]]] = {}
        for i in self._mortal:
            for piece in given[i].pieces:
                found.setdefault(id(piece), (weakref.ref(piece), piece.bytes, piece.kind, []))[3].append(i)
        return [*found.values()]
