"""Processes of which each plays as many consecutive ranks of a mesh: what travels between them, and who adds up what.

Every sum follows one tree over the ranks of its group, in the mesh's order (`trees`): its bits depend on the mesh alone, not on
how many processes there are. What a process holds of a tree it adds up first. Then, of large values, each process gets all
parts of a share, adds those up, and gives every other process the result: a ring's bytes. Small values go to every process,
which adds up all. Between two processes there is one message each way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import torch_internals
from ..base import context
from . import trees
from .blocks import Blocks
from .communicator import Communicator, Kind, rank_axes
from .divergence import RankCall
from .ranks import talks_to_nobody
from .teams import Row, SharedGroup, Team, exchanged, group_of_part, receive, team_of

SMALL = 2**17  # bytes, up to which a value that is summed goes to every process

Op = Callable[..., torch.Tensor]
Parts = dict[trees.Run, torch.Tensor]  # of one group, what this process has added up


class SeveralRanks(Communicator):
    """One process of several that play as many ranks of a mesh each, or one that plays them all."""

    holds_blocks = by_tree = True

    def __init__(self, mesh: Any) -> None:
        super().__init__(mesh)
        whole = getattr(mesh, "whole", mesh)
        (self.me, self.count), self.world = whole.process, whole.world
        total = math.prod(rank_axes(mesh).values())
        self.played = total // self.count
        self.ranks = range(self.me * self.played, (self.me + 1) * self.played) if self.me >= 0 else range(0)
        self.all_here = self.count == 1

    def processes(self, axes: tuple[str, ...] | None = None) -> Sequence[int]:
        found = tuple(range(self.count)) if axes is None else self._team(axes).processes
        found = tuple(self.world[q] for q in found) if self.world else found
        return found if len(found) > 1 else ()

    def lines(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        teams = self._team(axes).teams
        return [tuple(self.world[q] for q in team) for team in teams] if self.world else list(teams)

    def everyone(self, mine: Sequence[Sequence[Any]], why: str) -> list[list[Any]]:
        rows = [list(leaves) for leaves in zip(*mine, strict=True)]
        if self.all_here:
            return rows
        if talks_to_nobody():
            return rows * self.count
        if (watch := context.watch()) is not None:
            watch.compare(self.processes(), RankCall(f"{why} (all_gather_object)", "over all ranks"))
        found: list[Any] = [None] * self.count
        with torch_internals.no_transforms(), torch_internals.unrecorded():  # the tensors that it makes are its own
            group = group_of_part(self.world, dist.group.WORLD) if self.world else None
            dist.all_gather_object(found, rows, group=group)
        return [row for rows in found for row in rows]

    def carry_out(
        self, kind: Kind, x: Any, axes: tuple[str, ...], params: Sequence[Any], later: bool = False, **how: Any
    ) -> Blocks:
        """Its results are contiguous, each in memory of its own."""
        team = self._team(axes)
        block = dict(zip(self.ranks, x.blocks, strict=True))
        if kind.sums is None:
            got = _moved(kind, team, self.me, block, params)
        else:
            sums = _Sums(team, self.me, block, kind.sums(*params))
            got = sums.of_all() if kind.shared else sums.of_pieces(kind, params)
        alone: dict[int, torch.Tensor] = {}
        for x in got.values():
            if id(x) not in alone:
                alone[id(x)] = (
                    x if x.is_contiguous() and _has_storage_alone(x) else x.clone(memory_format=torch.contiguous_format)
                )
        return Blocks(alone[id(got[rank])] for rank in self.ranks)

    def _team(self, axes: tuple[str, ...]) -> Team:
        return team_of(tuple(rank_axes(self.mesh).items()), axes, self.me, self.played, self.world)


def _has_storage_alone(x: torch.Tensor) -> bool:
    return x.untyped_storage().nbytes() == x.numel() * x.element_size()


# --- what only moves --------------------------------------------------------------------------------------------------


def _moved(
    kind: Kind, team: Team, me: int, block: Mapping[int, torch.Tensor], params: Sequence[Any]
) -> dict[int, torch.Tensor]:
    """What each rank played here gets, of pieces that go from rank to rank; what several get goes once to a process."""
    pieces = [_pieces(kind, group, me, block, params) for group in team.shared]

    def between(q: int, r: int) -> dict[Any, torch.Tensor]:
        """What one process gives another, each tensor once: by the group, the place of who gives it, and its id."""
        return {
            (at, i, id(x)): x
            for at, group in enumerate(team.shared)
            for i in group.of.get(q, ())
            for j in group.of.get(r, ())
            if (x := pieces[at][i][j]) is not None
        }

    like = {q: between(q, me) for q in team.others}
    sent = {q: list(between(me, q).values()) for q in team.others}
    came = exchanged(team, me, sent, {q: list(row.values()) for q, row in like.items()})
    known = {key: x for q in team.others for key, x in zip(like[q], came[q], strict=True)}
    got: dict[int, torch.Tensor] = {}
    for at, group in enumerate(team.shared):
        for j in group.of[me]:
            if kind.shared and j != group.of[me][0]:
                got[group.ranks[j]] = got[group.ranks[group.of[me][0]]]
                continue
            given = [known.get((at, i, id(row[j])), row[j]) for i, row in enumerate(pieces[at])]
            got[group.ranks[j]] = kind.put(given, block[group.ranks[j]], *params)  # type: ignore[misc]
    return got


def _pieces(
    kind: Kind, group: SharedGroup, me: int, block: Mapping[int, torch.Tensor], params: Sequence[Any]
) -> list[Sequence[torch.Tensor | None]]:
    """What each rank of a group gives to each: of a rank that is played elsewhere, what lies as that."""
    any_of_mine = block[group.ranks[group.of[me][0]]]
    rows = ((i, block.get(rank, any_of_mine)) for i, rank in enumerate(group.ranks))
    return [kind.pieces(x, i, len(group.ranks), *params) for i, x in rows]  # type: ignore[misc]


# --- what is added up -------------------------------------------------------------------------------------------------


class _Sums:
    """The sums of the groups of a team.

    Args:
        team: it.
        me: this process.
        block: of each rank played here.
        op: the sum of two.
    """

    def __init__(self, team: Team, me: int, block: Mapping[int, torch.Tensor], op: Op) -> None:
        self.team, self.me, self.block, self.op = team, me, block, op
        self.own: dict[int, torch.Tensor] = {}  # what may be written over: it was made here, or has arrived
        self.parts: list[Parts] = []
        for group in team.shared:
            known = {(group.member[i], group.member[i] + 1): block[group.ranks[i]] for i in group.of[me]}
            self.parts.append({run: trees.total(run, known, self._sum) for run in group.runs[me]})

    def _sum(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        into = self.own.get(id(a), self.own.get(id(b)))
        out = self.op(a, b) if into is None else self.op(a, b, out=into)
        self.own[id(out)] = out
        return out

    def of_all(self) -> dict[int, torch.Tensor]:
        """The whole sum, for each rank played here."""
        values = [next(iter(parts.values())) for parts in self.parts]
        most = max(x.numel() * x.element_size() for x in values)
        if not self.team.uniform or most <= SMALL * (8 if len(self.team.processes) == 2 else 1):
            sums = [row[0] for row in self._added_up(lambda x, group, q: [x])]
        else:
            sums = [x.view(value.shape) for x, value in zip(self._in_shares(), values, strict=True)]
        return {group.ranks[i]: x for group, x in zip(self.team.shared, sums) for i in group.of[self.me]}

    def of_pieces(self, kind: Kind, params: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Of the sum, for each rank played here its piece."""

        def cut(x: torch.Tensor, group: SharedGroup, q: int) -> Row:
            pieces = kind.pieces(x, 0, len(group.ranks), *params)  # type: ignore[misc]
            return [pieces[i] for i in group.of[q]]  # type: ignore[misc]

        rows = self._added_up(cut)
        found = {
            group.ranks[i]: x
            for group, row in zip(self.team.shared, rows)
            for i, x in zip(group.of[self.me], row, strict=True)
        }
        return found if kind.put is None else {i: kind.put([x], self.block[i], *params) for i, x in found.items()}

    def _in_shares(self) -> Row:
        """The sums, flat: each process adds up its share, and gives it to the others."""
        team, n = self.team, len(self.team.processes)

        def share(x: torch.Tensor, q: int) -> torch.Tensor:
            i = team.processes.index(q)
            return x.reshape(-1)[x.numel() * i // n : x.numel() * (i + 1) // n]

        mine = [row[0] for row in self._added_up(lambda x, group, q: [share(x, q)])]
        sums = [x.new_empty(x.numel()) for parts in self.parts for x in list(parts.values())[:1]]
        for x, one in zip(sums, mine, strict=True):
            share(x, self.me).copy_(one)
        into = {q: [share(x, q) for x in sums] for q in team.others}
        receive(team, self.me, dict.fromkeys(team.others, mine), into)
        return sums

    def _added_up(self, cut: Callable[[torch.Tensor, SharedGroup, int], Row]) -> list[Row]:
        """For each group the sums of what ``cut(value, group, process)`` gives this process."""
        team, me = self.team, self.me
        pairs = list(zip(team.shared, self.parts, strict=True))
        sent = {
            q: [y for g, parts in pairs if q in g.of for x in parts.values() for y in cut(x, g, q)] for q in team.others
        }
        one = [cut(next(iter(parts.values())), g, me) for g, parts in pairs]
        like = {
            q: [y for (g, _), row in zip(pairs, one) if q in g.of for _ in g.runs[q] for y in row] for q in team.others
        }
        arrived = exchanged(team, me, sent, like)
        self.own.update((id(x), x) for row in arrived.values() for x in row if _has_storage_alone(x))
        came = {q: iter(row) for q, row in arrived.items()}
        sums = []
        for (group, parts), row in zip(pairs, one, strict=True):
            known = {run: cut(x, group, me) for run, x in parts.items()}
            for q in team.others:
                if q in group.of:
                    known.update((run, [next(came[q]) for _ in row]) for run in group.runs[q])
            sums.append(trees.total((0, len(group.ranks)), known, lambda a, b: list(map(self._sum, a, b))))
        return sums
