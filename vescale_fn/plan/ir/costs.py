"""How long the calls of a plan take, by prediction: the longest of what arithmetic, memory and the call itself take.

Collectives take a time for each, and one for each byte.

What it is for is to weigh one plan against another, for which ratios count, not seconds.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..._core.base import context
from ..._core.distributed.collectives import Collective, group_size
from ..._core.sharding.index_map import axes_of
from ...hardware import Hardware, cpu, h100
from . import graph as plan
from . import host_copies
from .collective_nodes import given, size
from .nested import Nested
from .work import tensors, work


@dataclass(frozen=True)
class Rates:
    """What a device does in a second.

    Attributes:
        flops: floating-point operations of products of matrices, convolutions and attention.
        bytes: read and written by everything else, and the least that products take.
        draws: bytes of keyed random numbers.
        link: bytes that a rank sends, or receives, in a collective.
        host: bytes between the device and the memory of the host.
        call: seconds, the least that a call takes.
        collective: seconds, the least that a collective takes.
    """

    flops: float
    bytes: float
    draws: float
    link: float
    host: float
    call: float
    collective: float

    @staticmethod
    def of(one: Hardware, dtype: str) -> Rates:
        """Those of some hardware for products of a dtype; of its innermost link the protocol for many bytes."""
        way = one.links[0].protocols[-1]
        return Rates(one.rate(dtype), one.bytes, one.draws, way.bytes, one.host, one.launch, way.start)


RATES = {"cpu": Rates.of(cpu(), "float32"), "cuda": Rates.of(h100(), "bfloat16")}


def device_of(x: torch.Tensor) -> str:
    """The kind of device that a value is on; of a plan that is only looked at the one for which that is done."""
    return context.devices() or x.device.type


def rates(graph: fx.Graph) -> Rates:
    """The rates of the device on which a plan computes."""
    if (meant := context.rates()) is not None:
        return meant
    kinds = {device_of(x) for node in graph.nodes for x in tensors(node.meta.get("val"))}
    return next((RATES[kind] for kind in sorted(kinds - {"cpu"}) if kind in RATES), RATES["cpu"])


class Clock:
    """Time, as it passes while calls run, and beside them copies to the host and from it, one at a time each way.

    Args:
        call: seconds, that it takes to begin a copy.
    """

    def __init__(self, call: float) -> None:
        self.now, self._call = 0.0, call
        self._free, self._done = {True: 0.0, False: 0.0}, dict[Any, float]()

    def begin(self, value: Any, seconds: float, out: bool) -> None:
        """A copy of a value begins, out to the host or back from it."""
        self.now += self._call
        self._free[out] = self._done[value, out] = max(self._free[out], self.now) + seconds

    def wait(self, value: Any, out: bool) -> None:
        """What computes waits for it."""
        self.now = max(self.now, self._done[value, out])


def copy(size: int, of: Rates) -> float:
    """The seconds that it takes to copy some bytes to the host, or back."""
    return size / of.host


def sends(graph: fx.Graph) -> bool:
    """Whether values of a plan may wait on the host: what they take on a CPU is the host's memory already."""
    return rates(graph) is not RATES["cpu"]


def total(graph: fx.Graph) -> float:
    """The seconds that all calls of a plan take."""
    of = rates(graph)
    clock = Clock(of.call)
    for node in plan.calls(graph):
        match host_copies.runs(node):
            case None:
                clock.now += seconds(node, of)
            case host_copies.offload:
                clock.begin(node, copy(plan.nbytes(plan.value(node.all_input_nodes[0])), of), True)
            case host_copies.offloaded:
                clock.wait(node.args[0], True)
            case host_copies.fetch:
                clock.begin(node, copy(plan.nbytes(plan.value(node)), of), False)
            case _:
                clock.wait(node.args[0], False)
    return clock.now


def seconds(node: fx.Node, of: Rates) -> float:
    """The seconds that a call takes."""
    if isinstance(node.target, Nested):
        return max((node.target.often(i)[0] * total(body) for i, body in enumerate(node.target.bodies)), default=0.0)
    if isinstance(node.target, Collective):
        return of.collective + _sent(node, node.target) / of.link
    if plan.viewed(node) and not plan.written(node):
        return 0.0
    todo = work(node)
    return max(of.call, todo.moved / of.bytes, todo.flops / of.flops, todo.drawn / of.draws)


def travel(node: fx.Node) -> float:
    """The seconds that a collective of GPUs is under way, also between nodes."""
    one: Any = node.target
    sizes = axes_of(one.mesh)
    return _nodes(-(-math.prod(sizes.values()) // 8)).collective(one.kind, size(node), sizes, one.axes)


_nodes = functools.lru_cache(maxsize=64)(h100)


def _sent(node: fx.Node, collective: Collective) -> float:
    """The bytes that a rank sends, by a ring."""
    taken = max(map(plan.nbytes, map(plan.value, given(node))), default=0)
    ranks = group_size(collective.mesh, collective.axes)
    if collective.kind == "all_gather":
        return taken * (ranks - 1)
    share = (ranks - 1) / ranks
    return taken * (2 * share if collective.kind == "all_reduce" else share)
