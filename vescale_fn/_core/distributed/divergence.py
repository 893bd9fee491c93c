"""Debug mode: each call that several ranks make together is compared across them before it can block.

A rank posts its call on the `Board` and waits there for those of the others, with an eye on ranks that left, died, wait
for each other in a ring, or are late. What is wrong is raised on every rank of the call, in the same words.
"""

from __future__ import annotations

import operator
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from .. import torch_internals
from ..base import context
from ..base.errors import DivergenceError
from ..base.messages import report
from ..base.source_lines import quoted, user_line, warn
from .call_board import Board, Group
from .ranks import talks_to_nobody
from .replicated_uses import Ledger, Row, differing

QUICK, SLOW, LOOK, WARN = 0.0002, 0.02, 0.1, 10.0  # seconds: between polls, between looks at the others, to a warning
LISTED = 10  # of the values that differ
SAME_TYPES = "the same shapes, dtypes and numbers on every rank; blocks that differ in size can be padded"
SAME_VALUES = (
    "make it from the same data and the same seed on every rank; vfn.axis_index or a key folded with it for what is to differ "
    "in a body, vfn.from_local for what each process has for itself"
)
SAME = "the same calls on every rank, in the same order; a Python `if` may not depend on the rank"


@dataclass(frozen=True)
class Value:
    """What a call was given: its path if there are several, its type, and, where all must bring the same, its bits."""

    path: str
    type: str
    digest: str = ""
    shown: str = ""


@dataclass(frozen=True)
class RankCall:
    """What a rank is about to do together with others; and what it has used that they must have alike."""

    what: str
    over: str
    values: tuple[Value, ...] = ()
    details: str = ""
    line: str = ""
    used: Sequence[Row] = field(default=(), compare=False)

    def __str__(self) -> str:
        shown = [f"{v.path}: {v.type}" if v.path else v.type for v in self.values[:4]]
        more = [f"... {len(self.values)} in all"] if len(self.values) > 4 else []
        of = f" of {', '.join(shown + more)}" if shown else ""
        return f"{self.what} {self.over}{of}{self.details and f' ({self.details})'} at {self.line}"


_entered: dict[Group, int] = {}  # how many blocks this process has entered with each set of ranks


class Watch:
    """Debug mode as one rank sees it; entered, it is `context.watch()`.

    Args:
        timeout: seconds for which a call of the others is waited for; by default as long as the collective would.
        ranks: those that enter the block; by default all of the world.
        results: whether what bodies give is compared where it is to be the same; not by those who look at it themselves.
    """

    def __init__(self, timeout: float | None, ranks: Iterable[int] = (), results: bool = True) -> None:
        self._timeout, self._ranks, self.results = timeout, tuple(sorted(ranks)), results
        self._board: Board | None = None
        self.ledger = Ledger()
        self._outermost = False
        self._sent: tuple[tuple[Value, ...], str] | None = None

    def __enter__(self) -> None:
        self._outermost = context.watch() is None
        if self._outermost:
            _entered[self._ranks] = _entered.get(self._ranks, 0) + 1
            self._entered, self._thread = quoted(user_line()), threading.get_ident()
            context.set_watch(self)
            self._find_board()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._outermost:
            context.set_watch(None)
            if self._board is not None:
                said = "" if error is None else str(error).strip().partition("\n")[0]
                how = "" if error is None else f" by {type(error).__name__}{said and f': {said}'}"
                world = range(dist.get_world_size())
                used = self.ledger.told(world) if error is None else []
                self._board.leave(how, str(error) if isinstance(error, DivergenceError) else None, used)
                cards = {rank: self._board.card(rank) for rank in world} if used else {}
                if found := differing({rank: card.get("used", ()) for rank, card in cards.items() if card}):
                    raise DivergenceError(not_alike(found, "the block of vfn.debug() that ends here"))

    def _find_board(self) -> Board | None:
        """The board of the process group; None where no other process could read it."""
        if talks_to_nobody():
            return None
        store = torch_internals.default_store()
        if self._board is None or self._board.store is not store:
            block = _entered[self._ranks], *self._ranks
            self._board = Board(store, dist.get_rank(), block, self._entered)
        return self._board

    def about_to_send(self, values: Iterable[tuple[str, str]], details: str) -> None:
        """The next collective is one of the user's, with these (path, type) perhaps in one bucket, and these arguments."""
        self._sent = tuple(Value(path, type_) for path, type_ in values), details

    def sent(self) -> tuple[tuple[Value, ...], str] | None:
        """What was said of the collective that begins here."""
        sent, self._sent = self._sent, None
        return sent

    def compare(self, ranks: Iterable[int], call: RankCall) -> None:
        """Wait until all `ranks` (of the world, this one among them) make this call.

        Raises:
            DivergenceError: another call on another rank, or one that will not come; the same on each rank that waits.
        """
        group, board = tuple(sorted(ranks)), self._find_board()
        if len(group) == 1 or board is None:
            return
        used = self.ledger.told(group)
        call = RankCall(call.what, call.over, call.values, call.details, call.line or self._line(), used)
        number = board.post(group, asdict(call), str(call))
        seen = {board.rank: call}
        start, pause, looked, warned = time.monotonic(), QUICK, 0.0, False
        timeout = self._timeout or 0.9 * torch_internals.group_timeout()  # before the collective itself would
        problem: tuple[str, bool] | None = None
        while problem is None:
            found = board.calls(group, number, [rank for rank in group if rank not in seen])
            seen |= {rank: _read(entry) for rank, entry in found.items()}
            if any(other != call for other in seen.values()):
                problem = different(seen), False
            elif len(seen) == len(group):
                found = differing({rank: other.used for rank, other in seen.items()})
                problem = (not_alike(found, call), False) if found else None
                break
            elif (problem := board.verdict(group, number)) is None:
                waited = time.monotonic() - start
                if waited > looked + LOOK:
                    looked, problem = waited, _trouble(board, group, number, call)
                if problem is None and waited > timeout:
                    problem = _late(board, group, seen, f"after {timeout:g} s not all ranks have come"), False
                elif problem is None and not warned and waited > WARN:
                    warned = True
                    warn(_late(board, group, seen, f"after {waited:.0f} s not all ranks have come yet"))
                time.sleep(pause)
                pause = min(2 * pause, SLOW)
        problem = board.settle(group, number, problem)
        if problem is not None:
            self.ledger.clear()
            text, follows = problem
            raise DivergenceError(text, follows)
        self.ledger.drop(group)
        board.forget(group, number - 1)

    def _line(self) -> str:
        """The user's line; in a thread that has none (the backward pass on GPUs), that of the thread in the block."""
        line = user_line()
        return quoted(user_line(sys._current_frames().get(self._thread)) if line == "?" else line)


def _read(entry: Mapping[str, Any]) -> RankCall:
    return RankCall(**{**entry, "values": tuple(Value(**value) for value in entry["values"])})


# --- what can be wrong ------------------------------------------------------------------------------------------------


def different(seen: Mapping[int, RankCall]) -> str:
    """In which way the calls of the ranks differ."""
    rows: dict[RankCall, list[int]] = {}
    for rank in sorted(seen):
        rows.setdefault(seen[rank], []).append(rank)
    calls = list(rows)
    one = calls[0]
    listed = [f"{_ranks(ranks)}: {call}" for call, ranks in rows.items()]
    alike = lambda *names: len({operator.attrgetter(*names)(call) for call in calls}) == 1
    if not alike("what", "over") or not (alike("line") or alike("values", "details")):
        return report("debug", "the ranks make different calls", listed, SAME)
    if not alike("line"):
        what = f"the ranks are at different lines in {one.what}, so one of them has left out a call"
        return report("debug", what, listed, SAME)
    if not alike("details") or len({tuple(v.path for v in call.values) for call in calls}) > 1:
        of = "" if one.what.startswith("the results of") else "the arguments of "
        return report("debug", f"the ranks differ in {of}{one.what}", listed, SAME)
    values = list(zip(*(call.values for call in calls), strict=True))
    on = [_ranks(rows[call]) for call in calls]
    if any(len({v.type for v in row}) > 1 for row in values):
        kinds, found = _unlike_types(values, on)
        what = f"the ranks differ in the {' and '.join(kinds)} of {one.what}"
        return report("debug", what, [*found[:LISTED], str(one)], SAME_TYPES)
    found = _unlike_values(values, [rows[call][0] for call in calls])
    return report(
        "debug",
        f"the ranks differ in a plain tensor, which counts as the same everywhere, in {one.what}",
        [*found[:LISTED], str(one)],
        "make it from the same data and the same seed on every rank; vfn.from_local for what each process has for itself",
    )


def _unlike_types(values: Iterable[Sequence[Value]], on: Sequence[str]) -> tuple[list[str], list[str]]:
    """In what the types of values differ, in a word or two, and how each of them does."""
    kinds, found = set(), []
    for row in values:
        if len({v.type for v in row}) > 1:
            listed = ", ".join(f"{v.type} on {ranks}" for v, ranks in zip(row, on, strict=True))
            found.append(f"{row[0].path or 'its value'}: {listed}")
            heads, brackets, _ = zip(*(v.type.partition("[") for v in row))
            kinds.add("arguments" if not all(brackets) else "dtypes" if len(set(heads)) > 1 else "shapes")
    return sorted(kinds), found


def _unlike_values(values: Iterable[Sequence[Value]], ranks: Sequence[int]) -> list[str]:
    """How the first of each row differs from the next that does."""
    found = []
    for first, *others in values:
        for v, rank in zip(others, ranks[1:]):
            if v.digest != first.digest:
                of = f"{first.path or 'its value'}: {v.type}"
                found.append(f"{of} is {first.shown} on rank {ranks[0]}, but {v.shown} on rank {rank}")
                break
    return found


def not_alike(found: Sequence[str], call: object) -> str:
    """What is said of values that ranks have used and that are not the same."""
    what = "the ranks use different values where one value counts as the same on all of them"
    more = [f"... {len(found)} in all"] if len(found) > LISTED else []
    return report("debug", what, [*found[:LISTED], *more, f"seen in {call}"], SAME_VALUES)


def _trouble(board: Board, group: Group, number: int, call: RankCall) -> tuple[str, bool] | None:
    """Why the others may never come: one has left or died, or all wait for each other."""
    for rank in group:
        card = board.card(rank)
        if card is None or rank == board.rank:
            continue
        left = card["left"] is not None
        if not (left or board.is_gone(card)) or board.calls(group, number, [rank]):
            continue  # a call that was posted before leaving counts
        if card["error"] is not None:
            return card["error"], True
        rows = [f"rank {rank} {_left(card) if left else _died(card)}", f"{_others(group, rank)} {call}"]
        return report(
            "debug",
            f"rank {rank} has {'left' if left else 'died'} while others wait for it",
            rows,
            SAME if left and not card["left"] else "",
        ), True
    ring = _ring(board)
    if ring is None or ring != _ring(board):  # that nothing has moved in between shows that all stood still at one time
        return None
    start = ring.index(min(ring, key=lambda row: row[0]))
    ring = ring[start:] + ring[:start]
    rows = [
        f"rank {rank} waits for rank {ring[(i + 1) % len(ring)][0]} in {text}"
        for i, (rank, _, _, _, text) in enumerate(ring)
    ]
    problem = report("debug", "the ranks wait for each other, and none can go on", rows, SAME), False
    for _, _, at, its_number, _ in ring:
        board.settle(at, its_number, problem)
    return problem


def _ring(board: Board) -> list[tuple[int, int, Group, int, str]] | None:
    """Ranks of which each waits for the next, and the last for the first: (rank, calls so far, group, number, call)."""
    path: list[Any] = []
    rank = board.rank
    while rank not in (row[0] for row in path):
        card = board.card(rank)
        if card is None or card["left"] is not None or card["group"] is None:
            return None
        group, number = tuple(card["group"]), card["number"]
        path.append((rank, card["count"], group, number, card["call"]))
        here = board.calls(group, number, group)
        rank = next((member for member in group if member not in here), None)
        if rank is None:
            return None
    return path[[row[0] for row in path].index(rank) :]


def _late(board: Board, group: Group, seen: Mapping[int, RankCall], what: str) -> str:
    """Who has come, who has not, and where those are."""
    rows = [f"{_ranks([rank for rank in group if rank in seen])} wait{'s' * (len(seen) == 1)} in {seen[board.rank]}"]
    fix = ""
    for rank in group:
        if rank in seen:
            continue
        card, where = board.card(rank), board.where(rank)
        if card is None:
            rows.append(f"rank {rank} has not entered this block of vfn.debug()")
            fix = "`with vfn.debug():` on every rank, or on none"
        elif card["group"] is not None and len(board.calls(tuple(card["group"]), card["number"], card["group"])) < len(
            card["group"]
        ):
            rows.append(f"rank {rank} waits in {card['call']}")
        else:
            rows.append(f"rank {rank} is {f'at {where}' if where else 'elsewhere'}, {_so_far(card)}")
    return report("debug", what, rows, fix)


def _left(card: Mapping[str, Any]) -> str:
    return f"left the block of {card['entered']}{card['left']}, {_so_far(card)}"


def _died(card: Mapping[str, Any]) -> str:
    return f"was process {card['pid']}, which has ended (killed?), {_so_far(card)}"


def _so_far(card: Mapping[str, Any]) -> str:
    n = card["count"]
    return f"after {n} call{'s' * (n != 1)}; the last was {card['call']}" if n else "before its first call"


def _others(group: Group, rank: int) -> str:
    others = [member for member in group if member != rank]
    return f"{_ranks(others)} wait{'s' * (len(others) == 1)} in"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} in all)" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
