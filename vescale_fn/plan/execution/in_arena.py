"""A plan whose values lie in a static arena: operators write into one block of memory, which is kept from call to call.

That takes an operator with a variant that writes where it is told, and a value that nobody has after the call. What has none
(attention, normalization, draws, what a collective brings, what the iterations of a loop make) takes its memory as ever. On
CUDA it is the allocator that gives all of them their places (`in_pool`).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from ..ir import graph as plan
from ..ir import inplace, memory_aliases
from ..ir.arena import Life, offsets
from .stride_checks import uncertain

_ALIGNMENT = 512  # bytes
_LEAST = 1 << 12  # bytes that are worth a place
_OURS = ("aten", "vescale_fn")  # the namespaces of operators that keep nothing of what they are given


class _Blocks:
    """The blocks of memory of one plan: one for each of its calls that run at the same time.

    Args:
        views: of each value its offset in bytes, and what it is like.
        bytes: of a block.
    """

    def __init__(self, views: list[tuple[int, torch.Tensor]], bytes: int, device: torch.device) -> None:
        self.views, self.bytes, self.device = views, bytes, device
        self.free: list[list[torch.Tensor]] = []

    def take(self) -> list[torch.Tensor]:
        """The values' places in a block that nobody uses. It has to be given back; if a call fails, it is let go."""
        try:
            return self.free.pop()
        except IndexError:
            block = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
            return [
                block[offset : offset + like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())
                for offset, like in self.views
            ]

    def give_back(self, places: list[torch.Tensor]) -> None:
        """Say that nobody uses them any more."""
        self.free.append(places)


def in_arena(graph: fx.Graph) -> fx.Graph:
    """The graph whose values lie in a static arena, as far as they can."""
    graph = plan.copied(graph)
    for device, lives in placeable(graph).items():
        if device.type != "cpu":  # calls on several streams do not follow each other
            continue
        found = offsets(lives, _ALIGNMENT)
        likes = [plan.value(life.maker) for life in lives]
        blocks = _Blocks([*zip(map(int, found.offsets), likes, strict=True)], found.height, device)
        first = next(plan.calls(graph))
        with graph.inserting_before(first):
            block = graph.call_function(plan.Step("arena", blocks.take))
            block.meta = {"val": likes, "line": ""}
            places = [graph.call_function(operator.getitem, (block, i)) for i in range(len(likes))]
        for life, place, like in zip(lives, places, likes, strict=True):
            place.meta = {"val": like, "line": ""}
            call: Any = inplace.written_into(life.maker, place)
            life.maker.target, life.maker.args, life.maker.kwargs = call
        with graph.inserting_before(plan.output(graph)):
            end = graph.call_function(plan.Step("give_back", blocks.give_back, effect=True), (block,))
        end.meta = {"val": None, "line": ""}
    return graph


def placeable(graph: fx.Graph) -> dict[torch.device, list[Life]]:
    """What can have a place, by device."""
    index = {node: i for i, node in enumerate(plan.calls(graph))}
    lie = memory_aliases.memories(graph)
    told = {memory for node in graph.nodes if _may_keep(node) for x in node.all_input_nodes for memory in lie[x]}
    found = defaultdict[torch.device, list[Life]](list)
    for memory, last in memory_aliases.last_uses(graph, lie).items():
        node = memory.maker
        if memory in told or node not in index or last not in index or memory.bytes < _LEAST:
            continue
        if _has_variant(node):
            found[plan.value(node).device].append(Life(node, memory.bytes, index[node], index[last]))
    return found


def _may_keep(node: fx.Node) -> bool:
    """Whether somebody may have what a call is given when it is over."""
    if plan.is_aten(node):
        return node.target.namespace not in _OURS  # type: ignore[union-attr]
    return node.op == "output" or (isinstance(node.target, plan.Step) and node.target.effect)


def _has_variant(node: fx.Node) -> bool:
    """Whether a call can write its result where it is told, and that will lie as was recorded."""
    if not plan.is_aten(node) or plan.viewed(node) or uncertain(node) is not None:
        return False
    return inplace.kind(plan.value(node)) is not None and inplace.written_into(node, node) is not None
