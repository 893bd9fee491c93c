"""Processes of which each plays as many consecutive ranks of a mesh: which of them meet, and what they send each other."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import torch_internals
from ..base import context, dtypes
from ..base.errors import MeshError
from ..base.messages import mesh_text, report
from ..sharding.index_map import axes_of
from . import trees
from .communicator import groups_of
from .divergence import RankCall


class SharedGroup(NamedTuple):
    """A group some of whose ranks this process plays.

    Attributes:
        ranks: its ranks, in the order of the axes.
        of: for each process the places of its ranks among them.
        member: for each place, which member of the tree it is.
        runs: for each process the parts of the tree that it can add up.
    """

    ranks: tuple[int, ...]
    of: Mapping[int, tuple[int, ...]]
    member: tuple[int, ...]
    runs: Mapping[int, tuple[trees.Run, ...]]


class Team(NamedTuple):
    """The processes that share groups along some axes.

    Attributes:
        processes: their numbers.
        others: those but this one's.
        shared: the groups of this one.
        uniform: whether each of them has ranks in each of the groups.
        teams: all teams that there are.
        world: of a part of a mesh, the processes of the world that play it, by these numbers.
    """

    processes: tuple[int, ...]
    others: tuple[int, ...]
    shared: tuple[SharedGroup, ...]
    uniform: bool
    teams: tuple[tuple[int, ...], ...]
    world: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def team_of(
    axes_items: tuple[tuple[str, int], ...], names: tuple[str, ...], me: int, played: int, world: tuple[int, ...] = ()
) -> Team:
    found = groups_of(axes_items, names)
    teams: list[set[int]] = []
    for group in found:
        met = {rank // played for rank in group}
        for other in [team for team in teams if team & met]:
            met |= other
            teams.remove(other)
        teams.append(met)
    mine = next(team for team in teams if me in team)
    shared = tuple(_shared(group, played) for group in found if any(rank // played == me for rank in group))
    return Team(
        tuple(sorted(mine)),
        tuple(sorted(mine - {me})),
        shared,
        all(one.of.keys() == mine for one in shared),
        tuple(sorted(tuple(sorted(team)) for team in teams)),
        world,
    )


def _shared(group: tuple[int, ...], played: int) -> SharedGroup:
    member = tuple(map(sorted(group).index, group))
    of: dict[int, tuple[int, ...]] = {}
    for place, rank in enumerate(group):
        of[rank // played] = (*of.get(rank // played, ()), place)
    runs = {
        process: trees.subtrees(len(group), frozenset(member[place] for place in places))
        for process, places in of.items()
    }
    return SharedGroup(group, of, member, runs)


@functools.lru_cache(maxsize=256)
def playing(
    axes_items: tuple[tuple[str, int], ...], names: tuple[str, ...], places: tuple[tuple[str, int], ...], count: int
) -> tuple[tuple[int, ...], ...] | None:
    """For each of so many processes, which of them play the part of a mesh that its first rank there is in: of the ranks at
    its place on the axes that are not named. () for a process that has no rank at these places; None where processes would
    have to play parts of several.
    """
    total = math.prod(size for _, size in axes_items)
    played, ranks = total // count, torch.arange(total, device="cpu").view([size for _, size in axes_items])
    here = ranks[tuple(dict(places).get(name, slice(None)) for name, _ in axes_items)].flatten().tolist()
    copy_of = {rank: group for group in groups_of(axes_items, names) if group[0] in here for rank in group}
    firsts = [next((r for r in range(q * played, (q + 1) * played) if r in copy_of), None) for q in range(count)]
    copies = [() if first is None else copy_of[first] for first in firsts]
    found = [tuple(dict.fromkeys(rank // played for rank in copy)) for copy in copies]
    for copy, team in zip(copies, found):
        runs = [copy[i * len(copy) // len(team) : (i + 1) * len(copy) // len(team)] for i in range(len(team))]
        if any(copies[q] != copy or any(r // played != q for r in run) for q, run in zip(team, runs)):
            return None
    return tuple(found)


class PlayedPart(NamedTuple):
    """What a process plays of a mesh of which ranks along some axes do different things.

    Attributes:
        places: which places along these axes, row-major.
        run: at each of them, which ranks along the other axes.
    """

    places: tuple[int, ...]
    run: trees.Run


@functools.lru_cache(maxsize=256)
def shares(
    axes_items: tuple[tuple[str, int], ...], names: tuple[str, ...], count: int
) -> tuple[PlayedPart, ...] | None:
    """The share of each of so many processes. None where one would play other ranks at one place than at the next."""
    lines, total = groups_of(axes_items, names), math.prod(size for _, size in axes_items)
    at = {rank: (inner, place) for inner, line in enumerate(lines) for place, rank in enumerate(line)}
    played, found = total // count, list[PlayedPart]()
    for q in range(count):
        mine = [at[rank] for rank in range(q * played, (q + 1) * played)]
        places, run = sorted({place for _, place in mine}), sorted({inner for inner, _ in mine})
        low, high = run[0], run[-1] + 1
        if len(places) * len(run) != played or high - low != len(run) or low % len(run):
            return None
        found.append(PlayedPart(tuple(places), (low, high)))
    return tuple(found) if len({high - low for _, (low, high) in found}) == 1 else None


def shares_along(mesh: Any, names: tuple[str, ...]) -> tuple[PlayedPart, ...]:
    """The same of a mesh whose ranks these processes play; or raise."""
    axes, (_, count) = tuple(axes_of(mesh).items()), mesh.process
    found = shares(axes, names, count)
    if found is None:
        total = math.prod(size for _, size in axes)
        fit = [n for n in range(1, total + 1) if total % n == 0 and shares(axes, names, n) is not None]
        what = f"{count} processes that play the {mesh_text(dict(axes))} do not play the same ranks at each place of "
        raise MeshError(
            report(
                "mesh",
                what + ", ".join(map(repr, names)),
                fix=f"{', '.join(map(str, fit[:-1]))} or {fit[-1]} processes",
            )
        )
    return found


@functools.lru_cache(maxsize=256)
def group_of_part(world: tuple[int, ...], default: Any) -> Any:
    """The process group of some processes, made by these alone."""
    if len(world) == dist.get_world_size(default):
        return default
    most = timedelta(seconds=torch_internals.group_timeout())
    return torch_internals.group_of_members(world, most)


@functools.lru_cache(maxsize=256)
def _process_group(teams: tuple[tuple[int, ...], ...], me: int, default: Any) -> Any:
    """The process group of this process's team, made on all processes together; `default` is that of all: a new one makes new
    groups."""
    if len(teams) == 1:
        return default
    if (watch := context.watch()) is not None:
        watch.compare(range(dist.get_world_size()), RankCall("the first collective", f"among the processes {teams}"))
    most, mine = timedelta(seconds=torch_internals.group_timeout()), None
    for team in teams:
        made = dist.new_group(list(team), timeout=most) if len(team) > 1 else None
        mine = made if me in team else mine
    return mine


# --- one message for each pair ----------------------------------------------------------------------------------------

Row = list[torch.Tensor]


def exchanged(team: Team, me: int, sent: Mapping[int, Row], like: Mapping[int, Row]) -> dict[int, Row]:
    """What each of the others has sent to this process, which lies as `like`, for what this one has sent to them."""
    packed, arrived = dict[int, Row](), dict[int, Row]()
    for q in team.others:
        flat = [x.reshape(-1) for x in sent[q]]
        packed[q] = [torch.cat(flat)] if len(flat) > 1 else flat
        size = sum(x.numel() for x in like[q])
        arrived[q] = [torch.empty(size, dtype=like[q][0].dtype, device=like[q][0].device)] if like[q] else []
    receive(team, me, packed, arrived)
    return {q: _parts(arrived[q][0], like[q]) if like[q] else [] for q in team.others}


def receive(team: Team, me: int, sent: Mapping[int, Row], into: Mapping[int, Row]) -> None:
    """Send flat tensors to the others, and write what they send, each by itself, into such tensors."""
    if not team.others:
        return
    if team.world:
        group = group_of_part(tuple(team.world[q] for q in team.processes), dist.group.WORLD)
    else:
        group = _process_group(team.teams, me, dist.group.WORLD)
    begun = [
        dist.P2POp(what, dtypes.as_bytes(x), group=group, group_peer=team.processes.index(q))
        for what, rows in ((dist.irecv, into), (dist.isend, sent))
        for q in team.others
        for x in rows[q]
        if x.numel()
    ]
    for work in dist.batch_isend_irecv(begun) if begun else ():
        work.wait()


def _parts(flat: torch.Tensor, like: Row) -> Row:
    pieces = flat.split([x.numel() for x in like]) if len(like) > 1 else (flat,)
    return [piece.view(x.shape) for piece, x in zip(pieces, like, strict=True)]
