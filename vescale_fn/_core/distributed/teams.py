"""Processes of which each plays as many consecutive ranks of a mesh: which of them meet, and what they send each other."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import torch_internals
from ..base import context, dtypes
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
    """

    processes: tuple[int, ...]
    others: tuple[int, ...]
    shared: tuple[SharedGroup, ...]
    uniform: bool
    teams: tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=1024)
def team_of(axes_items: tuple[tuple[str, int], ...], names: tuple[str, ...], me: int, played: int) -> Team:
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
