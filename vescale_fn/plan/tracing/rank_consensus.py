"""Ranks compare their recordings, and what each pass made of them, before the first replay."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import fx

from ..._core.arrays.array import mesh_of
from ..._core.base.errors import DivergenceError, RecordError
from ..._core.base.messages import dtype_text, report
from ..._core.base.source_lines import quoted, warn
from ..._core.distributed.divergence import LISTED, SAME_VALUES
from ..._core.distributed.mesh import communicator_of
from ..._core.distributed.places import whole_mesh
from ..._core.distributed.ranks import talks_to_nobody
from ..._core.distributed.replicated_uses import Row as Noted
from ..._core.distributed.replicated_uses import differing as differences
from ..._core.sharding.layout import WHOLE, type_text
from ..ir.collective_nodes import is_listed
from ..ir.graph import REPEATS, Pass, value
from ..ir.nested import all_collectives, all_meshes
from .leaves import Result
from .rank_notes import RecordingNotes
from .trace import Recorded


class ComparedCollective(NamedTuple):
    """A collective, as ranks compare it.

    Attributes:
        what: alike on all ranks.
        groups: the groups in which this rank takes part, each with what all of its ranks must have alike: the size of what each
            of them gives. Groups may hold blocks of different sizes.
        shown: the value, why it travels, and the user's line.
    """

    what: str
    groups: tuple[tuple[tuple[int, ...], Any], ...]
    shown: str


@dataclass(frozen=True)
class Stage:
    """The collectives of a graph, in order, and digests of them, by which ranks compare them."""

    rows: list[ComparedCollective]
    order: str
    groups: dict[str, str]  # for each group of ranks that communicate, what they must have alike


def stage(graph: fx.Graph) -> Stage:
    """The collectives of a graph as ranks compare them."""
    rows = [_row(*found) for found in all_collectives(graph)]
    by_group: dict[tuple[int, ...], list[Any]] = {}
    for i, row in enumerate(rows):
        for members, size in row.groups:
            by_group.setdefault(members, []).append((i, size))
    groups = {_digest(members): _digest(sizes) for members, sizes in by_group.items()}
    return Stage(rows, _digest([row.what for row in rows]), groups)


def meshes(leaves: Iterable[Any], graph: fx.Graph | None, recorded: Recorded | None) -> Iterator[Any]:
    """The meshes of arguments, of what was recorded, and of results, each once; as for `shared_mesh`. Of a place the whole
    mesh: all of its ranks record what happens there."""
    given = [mesh for x in leaves if isinstance(x, torch.Tensor) and (mesh := mesh_of(x)) is not None]
    sent = all_meshes(graph) if graph is not None else ()
    made = [x.spec.mesh for x in recorded.results if isinstance(x, Result) and x.spec] if recorded else []
    yield from map(whole_mesh, {id(mesh): mesh for mesh in (*given, *sent, *made)}.values())


def shared_mesh(leaves: Iterable[Any], graph: fx.Graph | None, recorded: Recorded | None) -> Any:
    """The mesh whose ranks make a plan together; None where there are no other processes.

    Args:
        leaves: of the arguments.
        graph: what was recorded, perhaps in part.
        recorded: all of it; None where that failed.
    """
    mesh = next(meshes(leaves, graph, recorded), None)
    return None if mesh is None or communicator_of(mesh).all_here or talks_to_nobody() else mesh


class Verdict(NamedTuple):
    """What ranks agree on.

    Attributes:
        reason: why the function cannot be recorded, on this rank or on another one; "" where it is recorded on all.
        parted: the place of the pass after which the ranks' collectives do not meet; None where they always do.
        needed: the places of the recorded collectives that some rank needs, where ranks differ in that.
        apart: some processes have a plan of one rank for all that they play, and others of each: all are to have these.
        watched: the processes that are to run the function as written with an eye on each other, as recording it raised on
            some ranks alone.
    """

    reason: str
    parted: int | None = None
    needed: frozenset[int] | None = None
    apart: bool = False
    watched: tuple[int, ...] = ()


def agree(
    name: str,
    mesh: Any,
    graph: fx.Graph | None,
    stages: Sequence[Stage],
    needed: Sequence[int],
    used: Sequence[Noted],
    as_one: bool,
    reason: str,
    raised_here: str,
    error: Exception | None,
    notes: RecordingNotes,
) -> Verdict:
    """Tell the other ranks what came of recording a function here, and hear what came of it there.

    Args:
        name: the function's.
        mesh: of the ranks that record it (`shared_mesh`); None where there are no others.
        graph: what was recorded, perhaps in part.
        stages: of the recording, and of what it was after each pass.
        needed: the places of the collectives whose results this rank needs.
        used: what all ranks are to have alike of what they bring, and of the numbers in the function.
        as_one: whether the plan is of one rank, for all that this process plays.
        reason: why the function cannot be recorded on this rank; "" where it can be.
        raised_here: what recording it raised, where that is why: perhaps an error of the function itself.
        error: what was raised on this rank, and is for the caller.
        notes: where ranks that have no mesh to meet on say what came of it.

    Raises:
        RecordError: recording raised on another rank, and not here.
        DivergenceError: the ranks recorded different collectives, or bring different values where one counts as the same on
            all of them.
    """
    raised = "" if error is None else str(error) or type(error).__name__
    if mesh is None:
        if reason or raised:
            notes.leave(reason, raised or raised_here)
        return Verdict(reason)
    if (note := notes.found(communicator_of(mesh).processes())) is not None:
        if note.raised and error is None:
            raise _raised_elsewhere(name, note.process, note.raised)
        return Verdict(reason or f"on rank {note.process} {note.reason}")
    calls = [] if graph is None else [_said(*found) for found in all_collectives(graph)]
    digests = [_digest([what for what, _ in calls]), _digest(used), _digest(needed)]
    told = reason, raised, as_one, digests, [(s.order, s.groups) for s in stages], bool(raised_here)
    by_rank = _told(mesh, told)
    if error is not None:
        return Verdict(reason)
    for rank, (_, raised, *_) in enumerate(by_rank):
        if raised:
            raise _raised_elsewhere(name, rank, raised)
    apart = len({raised for *_, raised in by_rank}) > 1  # the function itself perhaps, and then on some ranks alone
    for rank, (why, *_) in enumerate(by_rank):
        if why:
            watched = tuple(communicator_of(mesh).processes()) if apart else ()
            return Verdict(reason or f"on rank {rank} {why}", watched=watched)
    # what a digest stands for is told where one differs, which all ranks see
    differs = [len(set(column)) > 1 for column in zip(*(row[3] for row in by_rank))]
    if differs[0]:
        _same_collectives(name, _told(mesh, calls))
    ranks = communicator_of(mesh).processes()
    if differs[1] and (differing := differences(dict(zip(ranks, _told(mesh, used), strict=True)))):
        raise DivergenceError(
            report(
                "jit",
                f"ranks bring different values to {name}, where one counts as the same on all of them",
                differing[:LISTED],
                SAME_VALUES,
            )
        )
    if len({one for _, _, one, *_ in by_rank}) > 1:  # which no pass is to decide by
        return Verdict("", apart=True)
    counts = [len(stages_) for *_, stages_, _ in by_rank]
    if len(set(counts)) > 1:
        rank = next(rank for rank, count in enumerate(counts) if count != counts[0])
        failures = [f"rank {at}: {counts[at] - 1} passes" for at in (0, rank)]
        what = f"ranks improve {name} by different passes"
        raise DivergenceError(report("jit", what, failures, "the same passes= on every rank"))
    place = parted([stages_ for *_, stages_, _ in by_rank])
    if place == 0:
        raise DivergenceError(
            report(
                "jit",
                f"ranks recorded collectives of different sizes for {name}",
                _difference(mesh, stages[0]),
                "blocks of the same shapes on every rank of a group",
            )
        )
    either = frozenset().union(*_told(mesh, list(needed))) if differs[2] else None
    return Verdict("", None if place is None else place - 1, either)


def _raised_elsewhere(name: str, rank: int, raised: str) -> RecordError:
    what = f"recording {name} raised on rank {rank}, and not here"
    return RecordError(report("jit", what, [raised.splitlines()[0]]), follows=True)


def _told(mesh: Any, what: Any) -> list[Any]:
    """What each rank has to say; asked by all ranks."""
    return [row[0] for row in communicator_of(mesh).everyone([[what]], "jit")]


def _same_collectives(name: str, by_rank: Sequence[Sequence[tuple[str, str]]]) -> None:
    """Raise where ranks recorded different collectives: (what, line)."""
    for rank, theirs in enumerate(by_rank):
        for i, (one, other) in enumerate(zip_longest(by_rank[0], theirs, fillvalue=("none", ""))):
            if one[0] != other[0]:
                said = ((0, one), (rank, other))
                raise DivergenceError(
                    report(
                        "jit",
                        f"ranks recorded different collectives for {name}; the first that differs is number {i + 1}",
                        [f"rank {at}: {', at '.join(filter(None, call))}" for at, call in said],
                        "the same program on every rank; `if rank == 0` only around what moves nothing",
                    )
                )


def tell_left_out(name: str, mesh: Any, left_out: Pass, stage: Stage) -> None:
    """Warn that a pass is left out of a plan, since after it the ranks' collectives would not meet; on all ranks.

    Args:
        stage: what this rank's collectives were after it.
    """
    called = getattr(left_out, "__name__", "") or getattr(
        getattr(left_out, "func", left_out), "__name__", repr(left_out)
    )
    warn(
        report(
            "jit",
            f"after the pass `{called}` the collectives of {name} would differ between ranks, so the plan is made "
            "without this pass: its values are right, it may be slower",
            _difference(mesh, stage),
        )
    )


def parted(by_rank: Sequence[Sequence[tuple[str, dict[str, str]]]]) -> int | None:
    """The first stage in which ranks differ."""
    for i, stages in enumerate(zip(*by_rank, strict=True)):
        found: dict[str, str] = {}
        if len({order for order, _ in stages}) > 1:
            return i
        if any(found.setdefault(group, digest) != digest for _, groups in stages for group, digest in groups.items()):
            return i
    return None


def _difference(mesh: Any, stage: Stage) -> list[str]:
    """The first collectives that differ, of two ranks; asked by all ranks."""
    by_rank: list[list[ComparedCollective]] = _told(mesh, stage.rows)
    none = ComparedCollective("none", (), "none")
    for i, rows in enumerate(zip_longest(*by_rank, fillvalue=none)):
        first: dict[Any, tuple[int, ComparedCollective, Any]] = {}
        for rank, row in enumerate(rows):
            for key, theirs in (("all", row.what), *row.groups):
                other, before, its = first.setdefault(key, (rank, row, theirs))
                if theirs != its:
                    return [f"number {i + 1} on rank {r}: {one.shown}" for r, one in ((other, before), (rank, row))]
    return []


def _row(node: fx.Node, times: int, within: str) -> ComparedCollective:
    collective: Any = node.target
    communicator, blocks = communicator_of(collective.mesh), _given(node)
    one, line = blocks[0], node.meta.get("line", "")
    if communicator.holds_blocks:
        blocks = blocks if is_listed(node) else blocks * len(communicator.ranks)  # of ranks that do the same
        met = tuple(communicator.processes(collective.axes))  # others may play another copy of a part of a mesh
        of = [(*met, -1, *communicator.group_of(at, collective.axes)) for at in range(len(blocks))] if met else []
    else:
        of = [tuple(communicator.processes(collective.axes))]
    # who neither sends nor receives may hold less
    sizes = {group: None if collective.kind == "permute" else x.numel() for group, x in zip(of, blocks)}
    often = (f", {times} times" if times > 1 else "") + (f", {within}" if within else "")
    if REPEATS in node.meta:  # ranks that repeat others of the same size would take them for each other
        often += f", number {node.meta[REPEATS] + 1} again"
    what = f"{collective.kind} over {','.join(collective.axes)} of {dtype_text(one.dtype)}{often}"
    value_ = type_text(one.shape, one.dtype, WHOLE)
    shown = f"{collective.kind} over {','.join(collective.axes)} of {value_}, {collective.why}{often}"
    return ComparedCollective(
        what,
        tuple((group, (collective.params, size)) for group, size in sizes.items()),
        f"{shown}, at {quoted(line)}" if line else shown,
    )


def _said(node: fx.Node, times: int, within: str) -> tuple[str, str]:
    """What the ranks must have alike of a collective that was recorded; and its line."""
    line = node.meta.get("line", "")
    return _row(node, times, within).what, quoted(line) if line else ""


def _given(node: fx.Node) -> list[torch.Tensor]:
    """The blocks of the ranks that this process plays, or of one that stands for all."""
    given: Any = node.args[0]
    return list(map(value, given if isinstance(given, (list, tuple)) else [given]))


def _digest(x: Any) -> str:
    return hashlib.blake2b(repr(x).encode(), digest_size=8).hexdigest()
