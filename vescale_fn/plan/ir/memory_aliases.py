"""Which memory each value of a plan lies in, and how long each memory is needed.

Finer than `graph.memories`: the results of a call that gives several are memories of their own, so that one of them can be
free while another lives.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from ..._core.distributed.collectives import Collective
from . import graph as plan
from .loop import Loop


class Memory(NamedTuple):
    """What one call made anew.

    Attributes:
        maker: the call, or the placeholder.
        part: which of its results, where it gives several; -1: all of them, which may share memory.
    """

    maker: fx.Node
    part: int = 0

    @property
    def value(self) -> Any:
        """What lies there, as a tensor without values (or, where a call's results share memory, as a list of them)."""
        value = plan.value(self.maker)
        several = isinstance(value, (list, tuple)) and self.part >= 0
        return value[self.part] if several else value

    @property
    def bytes(self) -> int:
        """How many bytes it has."""
        value, gone = self.value, self.maker.meta.get(plan.ELSEWHERE, ())
        if gone is True or self.part in gone:
            return 0
        if isinstance(self.maker.target, Loop) and self.other is not None:
            return extent(value) // self.maker.target.length
        if isinstance(value, (list, tuple)):  # on a simulated mesh: what all ranks of a group get is there once
            return sum(extent(x) for x in {id(x): x for x in value}.values())
        return extent(value)

    @property
    def other(self) -> Memory | None:
        """The memory in which all lies that does not lie here: of a list of a loop, but for its first entry."""
        loop = self.maker.target
        place = loop.shifted.get(self.part) if isinstance(loop, Loop) else None
        return None if place is None else Memory(self.maker, place)


def extent(x: Any) -> int:
    """The bytes between the first element of a tensor and its last."""
    if not isinstance(x, torch.Tensor):
        return 0
    if x.is_contiguous():
        return x.nbytes
    if x.numel() == 0:
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))) * x.element_size()


def memories(graph: fx.Graph) -> dict[fx.Node, frozenset[Memory]]:
    """For each node, the memories in which its result may lie."""
    found: dict[fx.Node, frozenset[Memory]] = {}
    parts: dict[
        fx.Node, dict[int, frozenset[Memory]]
    ] = {}  # of what gives several, those that are memories of their own
    for node in graph.nodes:
        if node.op == "output":
            found[node] = frozenset().union(*(found[x] for x in node.all_input_nodes))
            continue
        if node.target is operator.getitem:
            whole, part = node.args
            if whole not in parts:
                parts[whole] = {one.part: frozenset((one,)) for one in found[whole] if one.maker is whole}  # type: ignore[index]
            own = parts[whole].get(part)  # type: ignore[arg-type, index]
            if own is not None:
                found[node] = own
                continue
        sources = plan.viewed(node) if node.op == "call_function" else []
        if not sources:
            found[node] = made(node)
        else:
            found[node] = found[sources[0]] if len(sources) == 1 else frozenset().union(*(found[x] for x in sources))
    return found


def made(node: fx.Node) -> frozenset[Memory]:
    """The memories that a node makes, if its result is no view."""
    value = plan.value(node)
    if not isinstance(value, (list, tuple)):
        return frozenset([Memory(node)] if isinstance(value, torch.Tensor) else [])
    if isinstance(node.target, Collective) or node.op == "placeholder":  # of a collective that another part has begun
        return frozenset([Memory(node, -1)])
    target, lent = node.target, set[int]()
    if isinstance(target, plan.Step) and target.lends:
        lent.update(i for i in range(len(value)) if target.lender(node, i))
    return frozenset(Memory(node, i) for i, x in enumerate(value) if isinstance(x, torch.Tensor) and i not in lent)


def last_uses(graph: fx.Graph, lie: dict[fx.Node, frozenset[Memory]] | None = None) -> dict[Memory, fx.Node]:
    """For each memory, the last node that needs something in it: the output for what is given back."""
    lie = memories(graph) if lie is None else lie
    last: dict[Memory, fx.Node] = {}
    for node in graph.nodes:
        for memory in lie[node] if node.op != "output" else ():
            last[memory] = node
        for x in touched(node):
            for memory in lie[x]:
                last[memory] = node
                if (other := memory.other) is not None:
                    last[other] = node
    return last


def touched(node: fx.Node) -> list[fx.Node]:
    """What lies in the memory that a call needs: its arguments, or of what takes one of several results, that result."""
    return [node] if node.target is operator.getitem else node.all_input_nodes


def dies(x: fx.Node, node: fx.Node, last: dict[Memory, fx.Node], lie: dict[fx.Node, frozenset[Memory]]) -> bool:
    """Whether `x` is all that lies in one memory, and nothing needs it after `node`."""
    if len(lie[x]) != 1:
        return False
    (one,) = lie[x]
    return one.part >= 0 and last[one] is node and one.bytes == plan.nbytes(plan.value(x))
