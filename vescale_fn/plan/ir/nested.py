"""A call with graphs of its own, its bodies: a loop, a choice between branches.

A body's placeholders are, in order, what the call is given; each body is recorded once, and improved as the plan is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import fx

from ..._core import torch_internals
from ..._core.distributed.collectives import Collective
from .graph import Step, calls, collectives, copied, given_up, output


def _not_alone(*args: Any) -> Any:
    raise AssertionError("a call with bodies runs as its plan's code says")


@dataclass(frozen=True, eq=False)
class Nested(Step):
    """A call with bodies.

    Args:
        bodies: their graphs.
    """

    name: str = "nested"
    run: Callable[..., Any] = _not_alone
    bodies: tuple[fx.Graph, ...] = ()

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __post_init__(self) -> None:
        # also where its bodies only communicate: by that it keeps its turn among the collectives beside it (`liveness.Facts`)
        object.__setattr__(self, "effect", any(map(_does_more, self.bodies)))

    def often(self, i: int) -> tuple[int, str]:
        """How often a body runs, and what there is to say of that."""
        return 1, ""

    def needs(self, bodies: Sequence[int]) -> int:
        """The bytes that a call needs whose bodies need so many: here one runs at a time."""
        return max(bodies, default=0)

    def told(self, i: int) -> tuple[str, str, str]:
        """When a body runs, what it is given and what it gives, in words."""
        given, gives = ends(self.bodies[i])
        return self.name, ", ".join(x.name for x in given), ", ".join("nothing" if x is None else str(x) for x in gives)


def nested(graph: fx.Graph) -> list[fx.Node]:
    """The calls with bodies in a graph, without those in their bodies."""
    return torch_internals.calls_of(graph, lambda target: isinstance(target, Nested))


def bodies_of(node: fx.Node) -> tuple[fx.Graph, ...]:
    """The bodies of a call, none where it is none that has them."""
    return node.target.bodies if isinstance(node.target, Nested) else ()


def ends(body: fx.Graph) -> tuple[list[fx.Node], list[Any]]:
    """What a body is given, and what it gives."""
    return [x for x in body.nodes if x.op == "placeholder"], list(output(body).args[0])  # type: ignore[arg-type]


def _does_more(body: fx.Graph) -> bool:
    """Whether a body does something besides giving results: it communicates, prints."""
    inside = any(isinstance(node.target, Step) and node.target.effect for node in calls(body))
    return inside or bool(collectives(body))


def everywhere(improve: Callable[[fx.Graph], fx.Graph], graph: fx.Graph, ours: set[fx.Graph] | None = None) -> fx.Graph:
    """What a pass makes of a graph that it may have, and of the bodies in it; once of those that calls share.

    Args:
        ours: bodies that a pass before has made for the caller alone, which it may have, too; those that it makes are put in.
    """
    return _everywhere(improve, graph, set() if ours is None else ours, {}, {})


def _everywhere(
    improve: Callable[[fx.Graph], fx.Graph],
    graph: fx.Graph,
    ours: set[fx.Graph],
    targets: dict[Any, Any],
    done: dict[fx.Graph, fx.Graph],
) -> fx.Graph:
    graph = improve(given_up(graph))
    for node in nested(graph):
        if node.target not in targets:
            for body in bodies_of(node):
                if body not in done:
                    before = body if body in ours else copied(body)
                    done[body] = made = _everywhere(improve, before, ours, targets, done)
                    made.__dict__.pop("_given_up", None)
                    ours.discard(body)
                    ours.add(made)
            bodies = tuple(map(done.__getitem__, bodies_of(node)))
            targets[node.target] = replace(node.target, bodies=bodies)  # type: ignore[type-var]
        node.target = targets[node.target]
    return graph


def taken_back(graph: fx.Graph) -> fx.Graph:
    """A graph that others have from now on, with the bodies in it: what passes were given up is not to be changed any more."""
    graph.__dict__.pop("_given_up", None)
    for body in dict.fromkeys(body for node in nested(graph) for body in bodies_of(node)):
        taken_back(body)
    return graph


def all_meshes(graph: fx.Graph, seen: set[Any] | None = None) -> Iterator[Any]:
    """The meshes of the collectives of a graph and of the bodies in it, each once, in the order in which they come."""
    seen = set() if seen is None else seen  # bodies, and meshes by their identity
    for node in _with_collectives(graph):
        for body in bodies_of(node):
            if body not in seen:
                seen.add(body)
                yield from all_meshes(body, seen)
        if isinstance(node.target, Collective) and id(node.target.mesh) not in seen:
            seen.add(id(node.target.mesh))
            yield node.target.mesh


def _with_collectives(graph: fx.Graph) -> list[fx.Node]:
    """The collectives of a graph, and the calls that may have some in their bodies."""
    return torch_internals.calls_of(graph, lambda target: isinstance(target, (Nested, Collective)))


def all_collectives(graph: fx.Graph, times: int = 1, within: str = "") -> Iterator[tuple[fx.Node, int, str]]:
    """The collectives of a graph and of the bodies in it, in order, each with how often it runs, and what there is to say of
    that: ``in true_fun``."""
    for node in _with_collectives(graph):
        yield from collectives_in(node, times, within)


def collectives_in(node: fx.Node, times: int = 1, within: str = "") -> Iterator[tuple[fx.Node, int, str]]:
    """The same of one call: itself, or those in its bodies."""
    if isinstance(node.target, Nested):
        for i, body in enumerate(node.target.bodies):
            count, said = node.target.often(i)
            yield from all_collectives(body, times * count, ", ".join(filter(None, (within, said))))
    elif isinstance(node.target, Collective):
        yield node, times, within


def extracted(
    nodes: Iterable[fx.Node],
    given: Sequence[fx.Node],
    gives: Sequence[fx.Node | None],
    same: Mapping[fx.Node, fx.Node] = MappingProxyType({}),
) -> fx.Graph:
    """The graph of some calls.

    Args:
        nodes: the calls, in order.
        given: what becomes its placeholders, in order.
        gives: its results; None where another body gives one.
        same: what stands for some of those that the calls take.
    """
    graph, values = torch_internals.Graph(), dict[fx.Node, fx.Node]()
    for x in given:
        values[x] = graph.placeholder(x.name)
        values[x].meta = dict(x.meta)
    for node in nodes:
        if node not in values:
            values[node] = graph.node_copy(node, lambda x: values[same.get(x, x)])
    end = graph.output(tuple(None if x is None else values[x] for x in gives))
    end.meta["val"], end.meta["line"] = None, ""
    return graph


def reached(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that some nodes need, and these."""
    todo, found = list(nodes), set[fx.Node]()
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found
