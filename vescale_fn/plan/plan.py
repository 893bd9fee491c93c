"""A plan: a recorded function, improved, that runs on the leaves of its arguments."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._core import torch_internals
from .._core.arrays.array import mesh_of
from .._core.base import context, no_values, source_lines, tree
from .._core.distributed.abstract_mesh import AbstractMesh
from .._core.distributed.mesh import communicator_of, root
from .._core.distributed.places import PlacedMesh, PlacedPlayedMesh, is_elsewhere, is_stand_in, place_of, ranks_at
from .execution import donation
from .execution.backends import Backend
from .execution.codegen import Code, generate
from .execution.rank_loops import RankLoops
from .ir.elsewhere import SeenRank, ThisRank, left_out
from .ir.graph import DONATED, ELSEWHERE, Pass, Step, calls, changed, copied, given_up, memories, output, written
from .ir.leaf_lists import leaf_lists
from .ir.mapped import unmapped
from .ir.nested import all_meshes, ends, everywhere, nested, taken_back
from .ir.per_rank import RanksDiffer
from .ir.rank_runs import note_holders, runs
from .ir.ranks_as_one import ROW, RanksAsOne, folded
from .ir.shared_bodies import inlined
from .lowered import Lowered
from .passes import dce
from .passes.buckets import buckets
from .passes.budget import Budget
from .passes.equal_parts import equal_parts, without_found
from .passes.kept_calls import kept
from .pipeline import OF_ONE_RANK, OF_RANKS
from .tracing import leaves as leaves_
from .tracing.guards import Captured
from .tracing.rank_consensus import Verdict, meshes
from .tracing.trace import Recorded


class Plan:
    """A recorded function.

    Args:
        recorded: the recording.
        leaves: of the arguments that it was recorded with.
        captured: what the function found besides its arguments.
        names: of the leaves: ``params['w']``.
        donated: the places of the leaves whose memory it may use.
        how: what runs it.
        function: the function itself.
        loaded: whether it comes from a file.

    It can be called once `improve` has been.

    Attributes:
        places: the meshes of places (``P(..., at=...)``) where values are.
        at_places: on a mesh without ranks, where it is asked for (`context.devices`), what the ranks at each of the
            coordinates run that have one: the coordinates and a graph.
        is_of_one_rank: whether passes were shown what one rank does, for all that this process plays.
    """

    is_of_one_rank = False
    at_places: Sequence[tuple[Mapping[str, int], fx.Graph]] = ()

    def __init__(
        self,
        recorded: Recorded,
        leaves: Sequence[Any],
        captured: Captured,
        names: Sequence[str],
        donated: Sequence[int],
        how: Backend,
        function: Callable[..., Any],
        loaded: bool = False,
    ) -> None:
        self.function, self.loaded = function, loaded
        if how.op_by_op:
            recorded.graph = unmapped(given_up(recorded.graph))
        self.recorded, self.captured, self.names = recorded, captured, names
        self.types = [leaves_.described(x) for x in leaves]
        self._said = [f"{name} ({kind})" for name, kind in zip(names, self.types, strict=True)]
        returned = {made[1] for made in recorded.results if type(made) is tuple and made[0] == "input"}
        self.donated = [i for i in donated if isinstance(leaves[i], torch.Tensor) and i not in returned]
        self.versions = [(x, torch_internals.version(x)) for x in recorded.read]
        self.constants = [(x, x.shape, x.dtype) for x in recorded.constants]
        keeps = set(self.donated)
        self._take = [(i, take, i in keeps) for i, leaf in enumerate(leaves) if (take := _taking(leaf)) is not None]
        self._gifts = [self._said[i] for i in self.donated]
        self._make = list(map(leaves_.making, recorded.results))
        known = [communicator_of(mesh) for mesh in meshes(leaves, recorded.graph, recorded)]
        self._abstract = any(isinstance(root(one.mesh), AbstractMesh) for one in known)
        self._in_part = any(one.holds_blocks and not one.all_here for one in known)
        self._apart = False
        self.places = _placed_meshes(leaves, recorded)
        self._placed = any(isinstance(mesh, (PlacedMesh, PlacedPlayedMesh)) for mesh in self.places)
        self._later: list[Pass] = []  # what comes after what is elsewhere is taken out
        self.how = how
        self._mark_inputs(leaves)

    def _mark_inputs(self, leaves: Sequence[Any]) -> None:
        """Note what may be written into, and what is elsewhere."""
        inputs = iter(self.recorded.inputs)
        self._lie_on: list[Any] = []  # the mesh of each, None for what is no array
        for i, take, keep in self._take:
            for _ in take(leaves[i]):
                node = next(inputs)
                self._lie_on.append(mesh_of(leaves[i]) if isinstance(leaves[i], torch.Tensor) else None)
                if _is_elsewhere(leaves[i]):
                    node.meta[ELSEWHERE] = True
                elif keep:
                    node.meta[DONATED] = True
        for node, x in zip(inputs, self.recorded.constants):
            node.meta.update({ELSEWHERE: True} if is_stand_in(x) else {})

    def improve(self, passes: Sequence[Pass], seen: Callable[[fx.Graph], None]) -> None:
        """Make the plan of the recording by passes, in their order; each graph is shown to `seen`, that of the recording
        first."""
        seen(self.recorded.graph)
        self.__dict__.pop("graph", None)
        budget = any(isinstance(one, Budget) for one in passes)
        passes = self._until_settled(passes)
        self._lists = leaf_lists(self.recorded.graph) if self._takes_lists(budget) else None
        self._ranks, graph, rest = self._of_one_rank(passes)
        self.is_of_one_rank = self._ranks is not None
        whole = self.how.arena or self.how.name != "torch" or budget
        if self._ranks is not None and (whole or not all(map(OF_RANKS.__contains__, rest)) or any(nested(graph))):
            self._ranks, graph = None, self._ranks.written_out(graph)
        ours = set[fx.Graph]()
        for i, improve in enumerate(rest):
            if whole:  # which look into every call
                improve = _without_calls(improve)
            if self._ranks is not None:
                note_holders(graph, self._ranks.places, self._ranks.count)
            if isinstance(improve, Budget):
                graph, ours = improve(graph, rest[i + 1 :]), set()
            else:
                graph = everywhere(improve, graph, ours)
            seen(graph)
        taken_back(graph)
        self._improved = graph if self._ranks is None else note_holders(graph, self._ranks.places, self._ranks.count)

    def _until_settled(self, passes: Sequence[Pass]) -> Sequence[Pass]:
        """The passes that ranks agree on; what comes after what is elsewhere is taken out waits for `settle`."""
        later = self._placed or (self._abstract and self.places)
        self._later = [one for one in passes if one in OF_RANKS] if later else []
        return [one for one in passes if one not in self._later]

    def _takes_lists(self, budget: bool) -> bool:
        """Whether leaves that are treated alike can stay together."""
        apart = budget or self._abstract or self._placed or self.recorded.ranks is not None
        return self.how == Backend() and not apart

    def _of_one_rank(self, passes: Sequence[Pass]) -> tuple[RanksAsOne | None, fx.Graph, Sequence[Pass]]:
        """What the first passes have made of the recording, of one rank's part where simulated ranks do the same; and the other
        passes."""
        if self._lists is not None:
            return None, self._lists.graph, passes
        first = list(itertools.takewhile(OF_ONE_RANK.__contains__, passes))
        try:
            ranks = self.as_one(bool(first))
            graph = inlined(ranks.graph)
            for improve in first:
                if improve is buckets:  # behind which it is not to be seen
                    note_holders(graph, ranks.places, ranks.count)
                graph = everywhere(_without_calls(improve), graph)
            graph = graph if kept in first else inlined(graph)
            if changed(graph):  # whether ranks can write there
                note_holders(graph, ranks.places, ranks.count)
            return ranks, graph, passes[len(first) :]
        except RanksDiffer:
            return None, copied(self.recorded.of_all_ranks), passes

    def settle(self) -> None:
        """What is left to do when all ranks agree: each takes out what is at another place than it."""
        if self._placed:
            self._improved = self._of_rank(self._improved, ThisRank())
        elif self._later:
            if context.devices():
                seen = ((SeenRank(rank), at) for rank, at in ranks_at(self.places))
                self.at_places = [(at, self._of_rank(self._marked(rank), rank)) for rank, at in seen]
            self._improved = self._settled(self._improved)

    def _settled(self, graph: fx.Graph) -> fx.Graph:
        for improve in self._later:
            graph = everywhere(improve, graph)
        return taken_back(graph)

    def _of_rank(self, graph: fx.Graph, rank: ThisRank) -> fx.Graph:
        """Of a graph of all ranks what one does."""
        made = (one for one in self.recorded.results if isinstance(one, leaves_.Result) and one.spec is not None)
        elsewhere = {place for one in made if rank.lacks(one.spec.mesh) for place in one.places}
        return self._settled(left_out(graph, elsewhere, rank))

    def _marked(self, rank: SeenRank) -> fx.Graph:
        """The graph in which inputs are marked that a rank has not got."""
        graph = copied(self._improved)
        for node, mesh in zip(ends(graph)[0], self._lie_on):
            if mesh is not None and rank.lacks(mesh):
                node.meta.pop(DONATED, None)
                node.meta[ELSEWHERE] = True
        return graph

    def follows(self, verdict: Verdict) -> bool:
        """Whether it is to be improved again, as other ranks need it."""
        if verdict.apart:
            self._apart = True
        elif verdict.needed is not None:  # what one rank needs stays on all
            dce.keep(self.recorded.graph, verdict.needed)
            self.recorded.__dict__.pop("of_all_ranks", None)  # in which it stands once more
        return verdict.apart or verdict.needed is not None

    @functools.cached_property
    def graph(self) -> fx.Graph:
        """What runs; of ranks that do the same, the calls of each."""
        if self._lists is not None:
            return self._lists.written_out(self._improved)
        return self._improved if self._ranks is None else self._ranks.written_out(self._improved)

    def as_one(self, folds: bool) -> RanksAsOne:
        """What was recorded, of one rank; `folds`: also where it was recorded of each."""
        if self.recorded.ranks is not None and not self._apart:
            return self.recorded.ranks
        if self._in_part or not folds or not any(ROW in node.meta for node in self.recorded.graph.nodes):
            raise RanksDiffer
        return folded(inlined(self.recorded.graph))

    @functools.cached_property  # a plan that is only looked at needs none
    def code(self) -> Code:
        """What runs, as Python."""
        if self._ranks is not None:
            return generate(self._improved, writer=RankLoops(self._ranks))
        if self._lists is not None:
            return generate(self._improved)
        return generate(self.graph if self._abstract else self.how.placed(self.graph))

    @functools.cached_property
    def run(self) -> Callable[[list[Any]], Any]:
        """What runs it."""
        of_one = self._abstract or self._ranks is not None or self._lists is not None
        return self.code.run if of_one else self.how.running(self.code.run, self.graph)

    def changed(self) -> str | None:
        """What the function closes over and has changed since; None where nothing has."""
        for x, version in self.versions:
            if torch_internals.version(x) != version:
                return "a tensor whose value is read"
        for x, shape, dtype in self.constants:
            if x.shape != shape or x.dtype is not dtype:
                return "a tensor's shape or dtype"
        return self.captured.changed()

    def __call__(self, leaves: Sequence[Any]) -> Any:
        given: list[Any] = []
        for i, take, _ in self._take:
            given += take(leaves[i])
        return self._finished(leaves, given)

    def taking(self, leaves: list[Any], where: str, line: str) -> Any:
        """The same for a call whose donated leaves it may keep."""
        donation.check(where, leaves, self.donated, self._said, self.recorded.constants)
        given: list[Any] = []
        for i, take, keep in self._take:
            shared = keep and not donation.is_alone(leaves[i])
            blocks = take(leaves[i])
            shared = shared or (keep and len(blocks) > len(set(map(id, blocks))))
            given += map(donation.copied, blocks) if shared else blocks
        gift = donation.Gift(where, line, self._gifts)
        try:
            out = self._finished(leaves, given)
        except BaseException as error:
            if self._may_have_written(error):  # some of the old values are no more
                donation.give_away([leaves[i] for i in self.donated], gift)
            raise
        donation.give_away([leaves[i] for i in self.donated], gift)
        return out

    def _may_have_written(self, error: BaseException) -> bool:
        """Whether donated memory may hold something else already where a replay has failed."""
        failed, graph = self.code.node_of(error), self.code.graph
        lie = memories(graph)
        for run in [list(calls(graph))] if self._ranks is None else runs(graph):
            for node in run:
                if any(DONATED in root.meta for x in written(node) for root in lie[x]):
                    return True
                if node is failed and self._ranks is None:
                    return False
            if failed in run:  # what comes after it there another rank may have done
                return False
        return False

    def _finished(self, leaves: Sequence[Any], given: list[Any]) -> Any:
        given += self.recorded.constants
        if self._abstract:
            given = [no_values.like(x) if isinstance(x, torch.Tensor) else x for x in given]
        try:
            outs = self.run(given if self._lists is None else self._lists.given(given))
        except Exception as error:
            self._tell_where(error)
            raise
        if self._lists is not None:
            outs = self._lists.gives(outs)
        return tree.unflatten(self.recorded.out_def, [make(outs, leaves) for make in self._make])

    def lowered(self, name: str) -> Lowered:
        """What `lower` shows."""
        nodes = output(self.graph).args[0]
        outs = [made for made in self.recorded.results if isinstance(made, leaves_.Result)]
        outputs = [("", made.text(nodes)) for made in outs]  # type: ignore[arg-type]
        places = [i for i, *_ in self._take]
        inputs = [(self.names[i], self.types[i]) for i in places]
        return Lowered(
            self.graph,
            name,
            inputs,
            outputs,
            [places.index(i) for i in self.donated],
            Lowered(self.recorded.of_all_ranks, name),
        )

    def _tell_where(self, error: Exception) -> None:
        """Add the user's line to an error of a replay."""
        node = self.code.node_of(error)
        if node is not None and node.meta.get("line"):
            error.add_note(f"in a replay of what was recorded at {source_lines.quoted(node.meta['line'])}")


def _without_calls(improve: Pass) -> Pass:
    """The pass, or what stands in its place where no calls of parts are to stay."""
    return inlined if improve is kept else without_found if improve is equal_parts else improve


def _placed_meshes(leaves: Sequence[Any], recorded: Recorded) -> list[Any]:
    """The meshes of places where values of a recording are."""
    given = [mesh_of(x) for x in leaves if isinstance(x, torch.Tensor)]
    made = [x.spec.mesh for x in recorded.results if isinstance(x, leaves_.Result) and x.spec]
    steps = torch_internals.calls_of(recorded.graph, lambda target: isinstance(target, Step) and target.at)
    own: Any = itertools.chain(*(node.target.at for node in steps))  # type: ignore[union-attr]
    found = {id(mesh): mesh for mesh in (*given, *made, *all_meshes(recorded.graph), *own)}
    return [mesh for mesh in found.values() if place_of(mesh) is not None]


def _is_elsewhere(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and is_elsewhere(mesh_of(leaf))


def _taking(leaf: Any) -> Callable[[Any], list[Any]] | None:
    return (lambda x: [float(x)]) if leaves_.is_number(leaf) else leaves_.taking(leaf)
