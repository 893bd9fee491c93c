"""What a plan is made of: a `torch.fx.Graph` of plain ops on one process's blocks, and of collectives.

Nodes are placeholders (the leaves of the arguments, then the constants), calls, and the output, a tuple. What a call calls is
one of

- an aten ``OpOverload``, on plain tensors;
- a `collectives.Collective`: of one tensor, or on a simulated mesh of the list of the ranks' blocks, giving a list;
- ``operator.getitem``, which takes a part out of what gives several;
- a `Step`: what a pass has put in the place of several calls, or what must happen besides (a print).

Each node's ``meta`` has ``val`` (its result as tensors without values, or a list of such), ``line`` (of the user's, as
``file:line``), ``again`` where it repeats, on purpose, what has been computed before (`remat`), and ``kept`` where a
collective stays because another rank needs it.

A pass is a pure function from graph to graph: it works on a `copied` one.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.distributed.collectives import Collective

KEPT = "kept"
SUMS = "sums"  # in the meta of a node: the dtype of sums over ranks, of what is narrower, when it was recorded
DONATED = "donated"  # a placeholder with this in its meta may be written into
ELSEWHERE = "elsewhere"  # what has this in its meta is at another place than this rank; of a call, these of its results
AT_ONCE = "at once"  # in the meta of a call on lists, of that program: it is one for all ranks
HANDED_ON = ("broadcast", "permute")  # the collectives that hand a block on as it is, where the ranks are simulated
HOLDERS = "holders"  # in the meta of a node of one rank's program for all: which ranks hold the same of its value
PLAYED = "played"  # in the meta of a collective of that program: a block may be handed on as it is
ARRIVED = (
    "arrived"  # in the meta of a part of what several collectives were made into: the holders of what that one gave
)
REPEATS = "repeats"  # in the meta of a collective that a pass repeats: which one, of those that there were

Pass = Callable[[fx.Graph], fx.Graph]


@dataclass(frozen=True)
class Step:
    """A function of plain tensors as one node.

    Args:
        name: as the plan prints it.
        run: the function.
        effect: whether it does something besides giving its result: then it stays, and stays where it is.
        writes: the places of the arguments that it writes in place.
        views: the places of the arguments that its result may share memory with.
        apart: whether each of its results lies in memory of its own.
        into: the place of a list with an argument for each result, in whose memory that lies, or None.
        at: of each of its results the mesh of the place (`distributed/places`) where it is; () where all ranks have them.
        holds: gives the most bytes that it holds besides its arguments, its results among them; None: it has these alone.
    """

    name: str
    run: Callable[..., Any]
    effect: bool = False
    writes: tuple[int, ...] = ()
    views: tuple[int, ...] = ()
    apart: bool = False
    into: int | None = None
    at: tuple[Any, ...] = ()
    holds: Callable[[], int] | None = field(default=None, compare=False)

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    @property
    def lends(self) -> bool:
        """Whether one of its results may lie in memory that it was given."""
        return self.into is not None or type(self).lender is not Step.lender

    def lender(self, node: fx.Node, part: int) -> fx.Node | None:
        """The argument of a call in whose memory one of its results lies; None where that has memory of its own."""
        return None if self.into is None else node.args[self.into][part]  # type: ignore[index, return-value]


def copied(graph: fx.Graph) -> fx.Graph:
    """The same graph once more, to be changed; the graph itself, where nobody else has it (`given_up`)."""
    return graph if graph.__dict__.pop("_given_up", False) else _once_more(graph.nodes)[0]


def reordered(graph: fx.Graph, order: Sequence[fx.Node]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """The graph with all its nodes in this order, and for each node that of the new graph; where nobody else has the graph
    (`given_up`), these are its own."""
    if not graph.__dict__.pop("_given_up", False):
        return _once_more(order)
    if (first := next(iter(graph.nodes))) is not order[0]:
        first.prepend(order[0])
    for one, other in itertools.pairwise(order):
        if one.next is not other:
            one.append(other)
    return graph, {node: node for node in order}


def _once_more(nodes: Iterable[fx.Node]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    new = torch_internals.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        args, kwargs = node.args, node.kwargs
        copy = new.create_node(
            node.op,
            node.target,
            fx.map_arg(args, values.__getitem__) if args else (),
            fx.map_arg(kwargs, values.__getitem__) if kwargs else None,
            node.name,
            node.type,
        )
        copy.meta.update(node.meta)
        values[node] = copy
    return new, values


def given_up(graph: fx.Graph) -> fx.Graph:
    """The graph, of which its owner says that the next pass may have it."""
    graph.__dict__["_given_up"] = True
    return graph


def calls(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that compute, in order."""
    return (node for node in graph.nodes if node.op == "call_function")


def collectives(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that communicate, in order."""
    return torch_internals.calls_of(graph, lambda target: isinstance(target, Collective))


def is_aten(node: fx.Node) -> bool:
    """Whether a node calls an operator of torch's (or one that somebody registered)."""
    return id(node.target) in _operators or isinstance(node.target, torch_internals.OpOverload)


def name_of(node: fx.Node) -> str:
    """What a node calls, without namespace and overload: ``add``; "" for what is no operator."""
    op = operator_of(node)
    return "" if op is None else op.name


def output(graph: fx.Graph) -> fx.Node:
    """The output node."""
    return next(iter(reversed(graph.nodes)))


def value(node: fx.Node) -> Any:
    """What a node gives, as tensors without values."""
    return node.meta["val"]


def writers(graph: fx.Graph) -> list[fx.Node]:
    """The calls that write some argument in place, in order."""
    return torch_internals.calls_of(graph, _writes)


def _writes(target: Any) -> Any:
    op = operator_of_target(target)
    return op.writes if op is not None else isinstance(target, Step) and target.writes


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call writes in place."""
    if node.target is operator.getitem:
        return []
    op = operator_of(node)
    if op is not None:
        return _at(node, op.writes) if op.writes else []
    return _flat([node.args[i] for i in node.target.writes]) if isinstance(node.target, Step) else []


def viewed(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory the result of a call may be."""
    if node.target is operator.getitem:
        whole, part = cast("tuple[fx.Node, int]", node.args)
        lender = whole.target.lender(whole, part) if isinstance(whole.target, Step) else None
        return [lender or whole]
    op = operator_of(node)
    if op is not None:
        return _at(node, op.views) if op.views else []
    if isinstance(node.target, Step):
        return [node.args[i] for i in node.target.views]  # type: ignore[misc]
    played = HOLDERS in node.meta or PLAYED in node.meta
    if isinstance(node.target, Collective) and (played or isinstance(node.args[0], (list, tuple))):
        # On a simulated mesh a block that is only sent is handed on as it is.
        return _flat(node.args[:1]) if node.target.kind in HANDED_ON else []
    return []


def _at(node: fx.Node, places: Sequence[tuple[int, str]]) -> list[fx.Node]:
    """The arguments in these places, those in lists too."""
    args, kwargs = node.args, node.kwargs
    return _flat([args[i] if i < len(args) else kwargs.get(name) for i, name in places])


def _flat(given: Sequence[Any]) -> list[fx.Node]:
    flat = [x for one in given for x in (one if isinstance(one, (list, tuple)) else (one,))]
    return [x for x in flat if isinstance(x, fx.Node)]


class Operator(NamedTuple):
    """What passes ask of an operator again and again.

    Attributes:
        op: itself.
        name: without namespace and overload.
        views: the places and names of the arguments that its result may share memory with.
        writes: of those that it writes.
        pointwise: whether each element of its result is new, and depends on the same element of its arguments alone.
    """

    op: Any
    name: str
    views: list[tuple[int, str]]
    writes: list[tuple[int, str]]
    pointwise: bool


# Operators that give views, but do not say so in their schemas.
_SILENT_VIEWS = {"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes"}
_operators: dict[int, Operator] = {}  # by their identity, as torch computes their hash in Python


def operator_of(node: fx.Node) -> Operator | None:
    """The operator that a node calls; None where it calls none."""
    target = node.target
    return _operators.get(id(target)) or operator_of_target(target)


def operator_of_target(target: Any) -> Operator | None:
    """An operator; None for what is none."""
    found = _operators.get(id(target))
    if found is None and isinstance(target, torch_internals.OpOverload):
        name = torch_internals.operator_name(target).split("::")[-1]
        arguments = [(i, a.name, a.alias_info) for i, a in enumerate(torch_internals.schema(target).arguments)]
        views = [(i, argument) for i, argument, alias in arguments if alias is not None]
        if name in _SILENT_VIEWS:
            views = [(0, arguments[0][1])]
        writes = [(i, argument) for i, argument, alias in arguments if alias is not None and alias.is_write]
        pointwise = not views and torch.Tag.pointwise in target.tags  # type: ignore[attr-defined]
        found = _operators[id(target)] = Operator(target, name, views, writes, pointwise)
    return found


def has_effect(node: fx.Node) -> bool:
    """Whether a call does something besides giving its result."""
    return (isinstance(node.target, Step) and node.target.effect) or bool(written(node))


def memories(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each node, the nodes that made the memory in which its result may lie (for most: itself)."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        sources = viewed(node) if node.op == "call_function" and not _is_apart(node) else ()
        if not sources:
            found[node] = frozenset((node,))
        else:
            found[node] = (
                found[sources[0]] if len(sources) == 1 else frozenset().union(*map(found.__getitem__, sources))
            )
    return found


def _is_apart(node: fx.Node) -> bool:
    """Whether a value is one of several results, none of which lies in the memory of another."""
    return node.target is operator.getitem and getattr(node.args[0].target, "apart", False)  # type: ignore[union-attr]


def changed(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes whose memory is written by some call after it was made: their order with that call matters.

    A pass leaves them, and what shares their memory, where they are.
    """
    targets = [x for node in writers(graph) for x in written(node)]
    if not targets:
        return frozenset()
    lie = memories(graph)
    hot = frozenset().union(*(lie[x] for x in targets))
    return frozenset(node for node, roots in lie.items() if not roots.isdisjoint(hot))


def held_alike(x: fx.Node, y: fx.Node) -> bool:
    """Whether ranks that hold the same of one value do of the other; a program of one rank alone has none that do."""
    return x.meta.get(HOLDERS) == y.meta.get(HOLDERS)


def nbytes(value: Any) -> int:
    """The bytes of a result."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(nbytes, value)) if isinstance(value, (list, tuple)) else 0
