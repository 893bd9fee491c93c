"""Debug mode: each rank posts its calls in the process group's store, where the others read them.

Nothing here waits for another rank: a read of what has not been posted gives None. So it cannot hang, and it works
beside any backend. A rank posts its *calls*, numbered within each group of ranks, and keeps a *card*: what it did last.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterable
from typing import Any

from ..base.source_lines import quoted, user_line

Group = tuple[int, ...]  # ranks of the world, ascending
PULSE = 0.25  # seconds between two looks at where this rank is, while it calls nothing


class Board:
    """One rank's view of the board of one debug block. By `block`, its number, all ranks that enter it mean the same."""

    def __init__(self, store: Any, rank: int, block: tuple[int, ...], entered: str) -> None:
        self.store, self.rank, self._prefix = store, rank, f"vescale_fn debug {block}"
        self._numbers: dict[Group, int] = {}
        self._card: dict[str, Any] = {
            "place": _place(),
            "pid": os.getpid(),
            "entered": entered,
            "count": 0,
            "group": None,
            "number": 0,
            "call": "",
            "left": None,
            "error": None,
        }
        self._set(f"card {rank}", self._card)
        self._ended = threading.Event()
        threading.Thread(target=self._tell_where, args=(threading.get_ident(),), name="debug", daemon=True).start()

    # What this rank posts

    def post(self, group: Group, call: Any, text: str) -> int:
        """Post this rank's next call within `group`; its number."""
        number = self._numbers[group] = self._numbers.get(group, 0) + 1
        self._set(_entry(group, number, self.rank), call)
        self._card.update(count=self._card["count"] + 1, group=group, number=number, call=text)
        self._set(f"card {self.rank}", self._card)
        return number

    def leave(self, how: str, error: str | None, used: Any = ()) -> None:
        """Post that this rank has left the block; `error` is what it was told of the others, where that is why, and `used`
        what it has used since its last call."""
        self._ended.set()
        self._card.update(left=how, error=error, used=used)
        with contextlib.suppress(RuntimeError):  # a store that is gone has no readers
            self._set(f"card {self.rank}", self._card)

    def settle(self, group: Group, number: int, problem: Any) -> Any:
        """What is wrong with a call (None: nothing), as the first of its ranks to say so has it: one word for all."""
        key = f"{self._prefix} {_entry(group, number, 'verdict')}"
        return json.loads(self.store.compare_set(key, "", json.dumps(problem)))

    def forget(self, group: Group, number: int) -> None:
        """Take away a call that all its ranks have done with."""
        self.store.delete_key(f"{self._prefix} {_entry(group, number, self.rank)}")
        if self.rank == group[0]:
            self.store.delete_key(f"{self._prefix} {_entry(group, number, 'verdict')}")

    def _tell_where(self, thread: int) -> None:
        """While this rank calls nothing, post the line where its thread is (not often, and only if it is another)."""
        count, posted = -1, ""
        while not self._ended.wait(PULSE):
            frame = sys._current_frames().get(thread)
            line = user_line(frame) if frame is not None else "?"
            if self._card["count"] == count and line != posted:
                try:
                    self._set(f"where {self.rank}", quoted(line))
                except RuntimeError:
                    return
                posted = line
            count = self._card["count"]

    # What it reads

    def calls(self, group: Group, number: int, ranks: Iterable[int]) -> dict[int, Any]:
        """The calls of this number that `ranks` have posted by now."""
        found = {rank: self._get(_entry(group, number, rank)) for rank in ranks}
        return {rank: call for rank, call in found.items() if call is not None}

    def verdict(self, group: Group, number: int) -> Any:
        """What a rank has found wrong with this call, if one has."""
        return self._get(_entry(group, number, "verdict"))

    def card(self, rank: int) -> dict[str, Any] | None:
        """What a rank did last; None before it has entered the block."""
        return self._get(f"card {rank}")

    def where(self, rank: int) -> str | None:
        """The line at which a rank was last seen calling nothing."""
        return self._get(f"where {rank}")

    def is_gone(self, card: dict[str, Any]) -> bool:
        """Whether the process behind a card has ended, as far as can be seen from here: on the same machine."""
        if card["place"] != self._card["place"]:
            return False
        try:
            os.kill(card["pid"], 0)
            with open(f"/proc/{card['pid']}/stat") as stat:
                return stat.read().rpartition(")")[2].split()[0] in "ZX"  # ended, and not yet buried
        except ProcessLookupError:
            return True
        except OSError:  # another user's process, or no /proc
            return False

    def _set(self, key: str, value: Any) -> None:
        self.store.set(f"{self._prefix} {key}", json.dumps(value))

    def _get(self, key: str) -> Any:
        key = f"{self._prefix} {key}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None


def _entry(group: Group, number: int, of: Any) -> str:
    return f"call {number} of {group}: {of}"


def _place() -> str:
    """What two processes have in common that see each other's process numbers."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
