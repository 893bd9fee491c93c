"""How long a collective takes on the links that its ranks use: a time to start, one for each step, one for each byte.

Rings and trees as NCCL weighs them against each other (`src/graph/tuning.cc` of NVIDIA/nccl): a ring sends least, a tree takes
the fewest steps, and a protocol that starts quickly sends slowly.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

KINDS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "permute"),
    *("send", "receive"),
)
_TREE = 0.93  # of the bandwidth of its links


@dataclass(frozen=True)
class Protocol:
    """One way in which ranks send to each other over a link.

    Args:
        start: seconds, the least that a collective takes.
        step: seconds that a value needs from one rank to the next.
        bytes: that a rank sends in a second, and receives meanwhile.
    """

    start: float
    step: float
    bytes: float


@dataclass(frozen=True)
class Link:
    """What some consecutive ranks, those of a node, or all nodes, reach each other by.

    Args:
        ranks: how many consecutive ranks share it.
        protocols: the ways in which they send, of which each collective takes the fastest.
        kinds: those of some kinds of collectives (``"all_to_all"``), where they are others.
    """

    ranks: int
    protocols: tuple[Protocol, ...]
    kinds: Mapping[str, tuple[Protocol, ...]] = field(default_factory=dict[str, tuple[Protocol, ...]])

    def of(self, kind: str) -> tuple[Protocol, ...]:
        """The ways in which a kind of collective is sent."""
        return self.kinds.get(kind, self.protocols)


class Hop(NamedTuple):
    """A link that a group of ranks uses: what of it is on one side (ranks, or nodes), in how many units together, and how."""

    below: int
    above: int
    protocol: Protocol
    inside: bool  # a node


@functools.lru_cache(maxsize=4096)
def units(mesh: tuple[tuple[str, int], ...], axes: tuple[str, ...], ranks: int) -> int:
    """In how many units of so many consecutive ranks a group along `axes` lies; of all groups the one that lies in most."""
    strides, stride = dict[str, int](), 1
    for name, size in reversed(mesh):
        strides[name], stride = stride, stride * size
    if ranks >= stride:
        return 1
    inside = [range(0, size * strides[name], strides[name]) for name, size in mesh if name in axes]
    outside = [range(0, size * strides[name], strides[name]) for name, size in mesh if name not in axes]
    group = [*map(sum, itertools.product(*inside))]
    return max(len({(sum(base) + rank) // ranks for rank in group}) for base in itertools.product(*outside))


def seconds(kind: str, nbytes: float, mesh: Mapping[str, int], axes: Sequence[str], links: Sequence[Link]) -> float:
    """How long a collective takes to which each rank gives so many bytes.

    Args:
        kind: as `KINDS` lists them.
        mesh: its sizes; ranks lie row-major in it.
        axes: along which the group's ranks lie.
        links: from the innermost.
    """
    sizes = tuple(mesh.items())
    count = math.prod(mesh[axis] for axis in axes)
    if count == 1:
        return 0.0
    hops, below = list[Hop](), count
    ways: Sequence[Protocol] = ()
    for link in links:
        above = units(sizes, tuple(axes), link.ranks)
        if above < below:
            ways = link.of(kind)
            hops.append(Hop(below, above, _quickest(ways), link is links[0]))
        below = above
    return min(_over(kind, nbytes, count, [*hops[:-1], hops[-1]._replace(protocol=way)]) for way in ways)


def steps_and_bytes(kind: str, nbytes: float, count: int) -> tuple[float, float]:
    """Of a collective of so many neighbouring ranks, to which each gives so many bytes, how many steps it takes one after the
    other, and how many bytes a rank sends: of the rings in `seconds`."""
    part = (count - 1) / count
    match kind:
        case "all_reduce":
            return 2 * (count - 1), 2 * part * nbytes
        case "all_gather":
            return count - 1, (count - 1) * nbytes
        case "reduce_scatter" | "all_to_all":
            return count - 1, part * nbytes
        case "permute" | "send" | "receive":
            return 1, nbytes
        case _:  # along a chain
            return count - 1, nbytes


def _quickest(ways: Sequence[Protocol]) -> Protocol:
    """How values go within nodes while others go between them, by whichever of its ways: as soon, and as fast, as they can."""
    return Protocol(min(way.start for way in ways), min(way.step for way in ways), max(way.bytes for way in ways))


def _over(kind: str, nbytes: float, count: int, hops: Sequence[Hop]) -> float:
    start = max(hop.protocol.start for hop in hops)
    steps = sum((hop.below - hop.above) * hop.protocol.step for hop in hops)
    # those ranks of a node that are in the group send to other nodes at the same time
    bandwidth = min(hop.protocol.bytes * count / hop.below for hop in hops)
    part = (count - 1) / count
    match kind:
        case "all_reduce":
            ring = 2 * steps + 2 * part * nbytes / bandwidth
            tree = 2 * _depth(hops) + nbytes * max(_on_tree(hop, count) for hop in hops) / _TREE
            return start + min(ring, tree)
        case "all_gather":
            return start + steps + (count - 1) * nbytes / bandwidth
        case "reduce_scatter":
            return start + steps + part * nbytes / bandwidth
        case "all_to_all":
            sent = max((1 - 1 / hop.below) * nbytes / hop.protocol.bytes for hop in hops)
            return start + steps + sent
        case "permute" | "send" | "receive":
            return start + max(hop.protocol.step + nbytes / hop.protocol.bytes for hop in hops)
        case _:  # along a chain
            return start + steps + nbytes / bandwidth


def _on_tree(hop: Hop, count: int) -> float:
    """The seconds of each byte that a tree sums up over a link. Within a node each rank sums a part. Of two nodes each sends
    all, and of more, most send to two, each by as many NICs as it has ranks in the group."""
    if hop.inside:
        k = hop.below / hop.above
        return 2 * (k - 1) / k / hop.protocol.bytes
    return (1 if hop.below == 2 else 2) / (hop.protocol.bytes * count / hop.below)


def _depth(hops: Sequence[Hop]) -> float:
    """The time of the steps from the leaves of a tree to its root: chains in a node, a tree of nodes."""
    return sum(
        (math.ceil(hop.below / hop.above) - 1 if hop.inside else math.ceil(math.log2(hop.below / hop.above)))
        * hop.protocol.step
        for hop in hops
    )
