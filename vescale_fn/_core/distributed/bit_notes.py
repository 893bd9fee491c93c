"""Where the bits of two runs part: what each collective is given, noted in one run and compared in the next."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch

from .. import torch_internals
from ..base import dtypes
from ..base.errors import DivergenceError
from ..base.messages import report
from ..base.source_lines import quoted


class BitNotes:
    """The notes of a run, which begins with this.

    Args:
        folder: of a file for each rank. What an earlier run has noted there is compared; what comes beyond it is noted.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._ranks: dict[int, _RankNotes] = {}

    def compare(self, call: str, given: Iterable[tuple[int, torch.Tensor]], line: str) -> None:
        """Note a collective, or hold it to the notes.

        Args:
            call: what it is, as a text.
            given: the ranks that are played here, and their blocks.
            line: the user's.

        Raises:
            DivergenceError: the earlier run has made another collective here, or has given it other bits.
        """
        known: dict[int, str] = {}
        for rank, block in given:
            if rank not in self._ranks:
                self._ranks[rank] = _RankNotes(rank, Path(self.folder))
            if id(block) not in known:
                known[id(block)] = _digest(block)
            self._ranks[rank].compare(call, known[id(block)], quoted(line))


class _RankNotes:
    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._path, self._count, self._last = rank, folder / f"rank-{rank}", 0, ""
        self._earlier = iter(self._path.read_text().splitlines() if self._path.exists() else ())

    def compare(self, call: str, digest: str, line: str) -> None:
        now, earlier = f"{call} at {line}", next(self._earlier, None)
        self._count += 1
        if earlier is None:
            with self._path.open("a") as file:
                file.write(f"{digest}\t{call}\t{line}\n")
        else:
            digest_then, call_then, line_then = earlier.split("\t")
            if call_then != call:
                raise self._parted("is another", now, f"in that run: {call_then} at {line_then}")
            if digest_then != digest:
                raise self._parted("is given other bits", now)
        self._last = now

    def _parted(self, how: str, *rows: str) -> DivergenceError:
        what = f"collective {self._count} of rank {self._rank} {how} than in the run noted in {self._path.parent}"
        same = [f"the one before is the same: {self._last}"] if self._last else []
        return DivergenceError(report("deterministic", what, [*rows, *same]))


def _digest(x: torch.Tensor) -> str:
    with torch_internals.no_transforms(), torch_internals.unrecorded():
        x = x.detach().resolve_conj().resolve_neg().cpu()
        return hashlib.sha256(dtypes.as_bytes(x).numpy().data).hexdigest()
