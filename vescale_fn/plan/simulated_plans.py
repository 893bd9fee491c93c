"""Plans of simulated ranks as files: saved as the plan of one of them, for each; loaded, of the plans of ranks, for all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from .._core import torch_internals
from .._core.base import no_values
from .._core.base.errors import TransformError
from .._core.distributed.blocks import Blocks
from .._core.distributed.mesh import communicator_of, root
from .._core.distributed.rows import numbered
from .ir.graph import DONATED, HOLDERS, calls, collectives, copied, output, viewed, written
from .ir.memory_aliases import memories
from .ir.nested import all_collectives, bodies_of, ends, nested
from .ir.per_rank import RanksDiffer, Tables
from .ir.rank_runs import note_holders, numbers_in
from .ir.ranks_as_one import RanksAsOne
from .ir.shared_bodies import inlined
from .ir.side_by_side import all_have_same, side_by_side
from .lowered import Origin
from .plan import Plan
from .saved.graph_data import unsaveable
from .tracing import leaves as leaves_
from .tracing.leaves import Result
from .tracing.rank_consensus import meshes as meshes_of
from .tracing.trace import Recorded


def simulated_mesh_of(origin: Origin) -> Any:
    """The simulated mesh that a plan was made for; None where there is none."""
    recorded: Recorded = origin.plan.recorded
    known = map(root, (*origin.meshes, *meshes_of(origin.call.leaves, recorded.graph, recorded)))
    return next((mesh for mesh in known if is_simulated(mesh)), None)


def is_simulated(mesh: Any) -> bool:
    """Whether this process plays all ranks of a mesh, and holds their blocks."""
    communicator = communicator_of(mesh)
    return communicator.holds_blocks and communicator.all_here and not communicator.by_tree


class OfOne(NamedTuple):
    """The plan of one rank, for all; and of each tensor that it closes over, that of each rank."""

    plan: Plan
    constants: Sequence[Sequence[torch.Tensor]]


def of_one(origin: Origin) -> OfOne:
    """The plan that each of some simulated ranks would have as a process of its own.

    Raises:
        TransformError: they do not do the same.
    """
    recorded, all_ = origin.traced(origin.call)
    try:
        return _of_one(origin, recorded, all_)
    except RanksDiffer:
        what = "a plan of simulated ranks that do not all do the same"
        raise unsaveable(what, "real ranks, or vfn.abstract_mesh") from None
    finally:
        recorded.end()


def _of_one(origin: Origin, recorded: Recorded, all_: Plan) -> OfOne:
    ranks = all_.as_one(True)
    before = len(ranks.inputs) - len(recorded.constants)
    closed = [[recorded.constants[i - before] for i in at] for at in ranks.places if at[0] >= before]
    constants, results = [row[0] for row in closed], _results(recorded, ranks)
    one = replace(recorded, graph=copied(ranks.graph), constants=constants, results=results, ranks=None)
    leaves = [_of_one_rank(leaf) for leaf in origin.call.leaves]
    made = Plan(one, leaves, all_.captured, all_.names, origin.call.donated(), all_.how, all_.function)
    made.improve(origin.passes, lambda graph: None)
    return OfOne(made, closed)


def _of_one_rank(leaf: Any) -> Any:
    local = torch_internals.local(leaf) if isinstance(leaf, DTensor) else leaf
    if type(local) is not Blocks:
        return leaf
    if local is leaf:
        raise RanksDiffer
    return leaves_.array_of_local(leaf, no_values.like(leaves_.plain_of(leaf)[0]))


def _results(recorded: Recorded, ranks: RanksAsOne) -> list[Any]:
    """How one rank puts its results together."""
    nodes: Any = output(note_holders(copied(ranks.graph), ranks.places, ranks.count)).args[0]
    found = list[Any]()
    for made in recorded.results:
        if not isinstance(made, Result):
            found.append(made)
            continue
        own = range(ranks.count) if made.spec is None else dict.fromkeys(leaves_.first_holders(made.spec))
        (one, *others) = {ranks.results[place][0] for place in made.places}
        holders = nodes[one].meta[HOLDERS]
        at = [ranks.results[place][1] for place in made.places]
        if others or (made.simulated and [holders[i] for i in at] != [holders[i] for i in own]):
            raise RanksDiffer
        found.append(Result([one], made.spec, made.lies))
    return found


# --- and back ---------------------------------------------------------------------------------------------------------


class OfRank(NamedTuple):
    """A plan from a file, of one rank, or of several with numbers of each; and of each tensor that it closes over, that of each
    of these."""

    recorded: Recorded
    constants: Sequence[Tables]


def for_all(found: Sequence[OfRank], leaves: Sequence[Any], n: int) -> Recorded:
    """The recording of `n` simulated ranks, of the plan of each, or of one for all.

    Args:
        found: the plans.
        leaves: of the call.

    Raises:
        TransformError: ranks communicate in a loop, or in a choice; or a result is a plain tensor, of which ranks with several
            plans may have other ones.
    """
    graphs = [inlined(one.recorded.graph) for one in found]
    if any(_has_ranks(body) for graph in graphs for node in nested(graph) for body in bodies_of(node)):
        raise TransformError("simulated ranks record a loop, or a choice, in which ranks communicate or differ")
    places = _places(leaves, n)
    if len(graphs) > 1:
        return _side_by_side(found, graphs, places)
    return _as_one(found[0], graphs[0], places, n)


def _closed(places: list[list[int]], rows: Iterable[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The different ones of some tensors of all ranks, whose places come after those of the leaves."""
    found = list[torch.Tensor]()
    for row in rows:
        different = {id(x): x for x in row}
        own = dict(zip(different, itertools.count(1 + max((i for at in places for i in at), default=-1))))
        places.append([own[id(x)] for x in row])
        found += different.values()
    return found


def _as_one(one: OfRank, graph: fx.Graph, places: list[list[int]], n: int) -> Recorded:
    """Of ranks that all do the same. What a rank writes over is its own; where others hold the same, it gets a copy first."""
    closed = _closed(places, [*one.constants, *_as_inputs(graph)])
    _give_own(graph, places, n)
    inputs = {i: node for node, at in zip(ends(graph)[0], places, strict=True) for i in at}
    outs, made, results = ends(graph)[1], list[Any](), list[tuple[int, int, Any]]()
    for each in one.recorded.results:
        if isinstance(each, Result):
            (place,) = each.places
            holders = outs[place].meta[HOLDERS]
            whose = _whose(each, n if any(holders) else 1)
            at = range(len(results), len(results) + len(whose))
            results += [(place, rank, (outs[place], holders[rank])) for rank in whose]
            each = Result(at, each.spec, each.lies, each.spec is not None or any(holders))
        made.append(each)
    ranks = RanksAsOne(graph, n, [inputs[i] for i in range(len(inputs))], places, results)
    return replace(one.recorded, graph=graph, constants=closed, results=made, ranks=ranks)


def _side_by_side(found: Sequence[OfRank], graphs: Sequence[fx.Graph], places: list[list[int]]) -> Recorded:
    """Of ranks of which each has a program."""
    of_each = [[at[rank] for at in places] for rank in range(len(graphs))]
    count, closed = 1 + max((i for at in of_each for i in at), default=-1), list[torch.Tensor]()
    for one, own in zip(found, of_each, strict=True):
        own += range(count + len(closed), count + len(closed) + len(one.constants))
        closed += (x for (x,) in one.constants)
    graph, values = side_by_side(graphs, of_each)
    outs, made, results = [ends(one)[1] for one in graphs], list[Any](), list[fx.Node]()
    for i, each in enumerate(found[0].recorded.results):
        if isinstance(each, Result):
            row = [out[one.recorded.results[i].places[0]] for one, out in zip(found, outs)]
            if each.spec is None and not all_have_same(row, of_each):
                raise TransformError("a result is a plain tensor, and the ranks' plans may give other ones")
            start = len(results)
            results += [values[rank][row[rank]] for rank in _whose(each, 1)]
            each = Result(range(start, len(results)), each.spec, each.lies, each.spec is not None)
        made.append(each)
    graph.output(tuple(results)).meta.update(val=None, line="")
    return replace(found[0].recorded, graph=graph, constants=closed, results=made)


def _whose(made: Result, n: int) -> list[int]:
    """The ranks whose blocks a result is made of, of `n` where it is a plain tensor."""
    return list(range(n) if made.spec is None else dict.fromkeys(leaves_.first_holders(made.spec)))


def _has_ranks(body: fx.Graph) -> bool:
    """Whether ranks communicate in a body, or have numbers of their own there."""
    own = any(_table(node) is not None or any(numbers_in((node.args, node.kwargs))) for node in body.nodes)
    return own or any(True for _ in all_collectives(body))


def _places(leaves: Sequence[Any], n: int) -> list[list[int]]:
    """For each input of one rank's plan, for each rank the place of its own among those of all."""
    places, count = list[list[int]](), 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) or leaves_.is_number(leaf):
            blocks = isinstance(leaf, DTensor) and type(torch_internals.local(leaf)) is Blocks
            holders = leaves_.first_holders(torch_internals.spec(leaf)) if blocks else (0,) * n
            places.append([count + i for i in numbered(holders)])
            count = 1 + max(places[-1])
    return places


def _table(node: fx.Node) -> Tables | None:
    given = getattr(getattr(node.target, "run", None), "keywords", {})
    return next((x for x in given.values() if isinstance(x, Tables)), None)


def _as_inputs(graph: fx.Graph) -> list[Sequence[torch.Tensor]]:
    """Make inputs of the tables in a plan of which each rank has its own; gives these."""
    found = list[Sequence[torch.Tensor]]()
    for node in list(calls(graph)):
        table = _table(node)
        if table is not None:
            last = [x for x in graph.nodes if x.op == "placeholder"][-1:]
            with graph.inserting_after(last[0]) if last else graph.inserting_before():
                new = graph.placeholder(node.name)
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            found.append(table)
    return found


def _give_own(graph: fx.Graph, places: Sequence[Sequence[int]], count: int) -> None:
    """Copy what a plan writes over, where it is memory that other ranks hold, too."""
    while True:
        try:
            note_holders(graph, places, count)
            break
        except RanksDiffer as why:
            for node in why.args:
                _copy(graph, node)
    lie = memories(graph)
    hot = {memory for node in calls(graph) for x in written(node) for memory in lie[x]}
    for node in collectives(graph):
        if viewed(node) and not hot.isdisjoint(lie[node]):  # on one rank it has arrived, here it is the sender's
            _copy(graph, node)
    note_holders(graph, places, count)


def _copy(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_after(node):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = {key: x for key, x in node.meta.items() if key != DONATED}
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
