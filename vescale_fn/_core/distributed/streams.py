"""What ranks print, carried to where their caller prints."""

from __future__ import annotations

import codecs
import os
import sys
from multiprocessing import connection
from typing import Any, Self


class Streams:
    """Carries what the ranks print to `sys.stdout` and `sys.stderr` where those are not the process's own.

    A notebook and a test's capture put objects there that no other process can write to. Elsewhere the ranks write
    to the same terminal or file as the caller, and nothing is carried. `stdin`: whether a rank is to read what this
    process would.
    """

    def __init__(self, stdin: bool = False) -> None:
        self.ends: dict[int, int] = {0: os.dup(0)} if stdin else {}
        self._from: dict[int, tuple[Any, Any]] = {}
        for number, name in (1, "stdout"), (2, "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream is not getattr(sys, f"__{name}__"):
                source, self.ends[number] = os.pipe()
                os.set_blocking(source, False)
                self._from[source] = stream, codecs.getincrementaldecoder("utf-8")("replace")

    def __enter__(self) -> Self:
        return self

    def wait(self, others: list[Any], seconds: float) -> None:
        """Wait for one of `others`, or for something to carry; carry all that there is."""
        connection.wait([*others, *self._from], seconds)
        for source, (stream, decoder) in self._from.items():
            try:
                while chunk := os.read(source, 1 << 16):
                    stream.write(decoder.decode(chunk))
            except BlockingIOError:
                stream.flush()

    def __exit__(self, *_: object) -> None:
        self.wait([], 0)
        for end in (*self._from, *self.ends.values()):
            os.close(end)
