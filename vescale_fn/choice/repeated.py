"""What a plan computes again instead of keeping it, and what waits for it in the memory of the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from ..hardware import Hardware
from ..plan.ir import graph as plan
from ..plan.ir import host_copies
from ..plan.ir.memory_use import bytes_text, place
from ..plan.ir.nested import Nested
from .price_streams import seconds

_LINES = 2  # that are named


@dataclass(frozen=True)
class ComputedAgain:
    """What a plan makes a second time, as a pass or `vfn.remat` says, and what it copies to the host and back.

    Attributes:
        seconds: of the calls that are made again, by the user's lines, the longest first.
        bytes: that they give, so much less has to be kept; by the same lines.
        sent: bytes that wait on the host.
    """

    seconds: dict[str, float]
    bytes: dict[str, int]
    sent: int

    def text(self) -> str:
        """In a few words; "" where there is nothing to say."""
        told = []
        if whole := sum(self.seconds.values()):
            named = ", ".join(place(line) for line in list(self.seconds)[:_LINES])
            more = f" and {len(self.seconds) - _LINES} other lines" if len(self.seconds) > _LINES else ""
            made = bytes_text(sum(self.bytes.values()))
            told.append(f"{made} computed again in {whole * 1e3:.3g} ms, of {named}{more}")
        if self.sent:
            told.append(f"{bytes_text(self.sent)} wait on the host")
        return "; ".join(told)


def repeated(graphs: Mapping[fx.Graph, int], hardware: Hardware) -> ComputedAgain:
    """What plans make again, each of which runs so often."""
    took, made, sent = dict[str, float](), dict[str, int](), 0
    for node, times in (pair for graph, count in graphs.items() for pair in _calls(graph, count)):
        line = node.meta.get("line") or "?"
        if host_copies.runs(node) is host_copies.offload:
            sent += times * plan.nbytes(plan.value(node.all_input_nodes[0]))
        elif node.meta.get("again") and host_copies.runs(node) is None and not plan.viewed(node):
            took[line] = took.get(line, 0.0) + times * seconds(node, hardware)
            made[line] = made.get(line, 0) + times * plan.nbytes(plan.value(node))
    return ComputedAgain(dict(sorted(took.items(), key=lambda one: -one[1])), made, sent)


def _calls(graph: fx.Graph, times: int) -> Iterator[tuple[fx.Node, int]]:
    """The calls that compute, in bodies too, and how often each runs."""
    for node in plan.calls(graph):
        if isinstance(node.target, Nested):
            for i, body in enumerate(node.target.bodies):
                yield from _calls(body, times * node.target.often(i)[0])
        else:
            yield node, times
