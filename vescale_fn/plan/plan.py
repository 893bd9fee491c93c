"""A plan: a recorded function, improved, that runs on the leaves of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import _torch, lines, tree
from . import leaves as leaves_
from .captured import Captured
from .codegen import generate
from .pipeline import PASSES
from .trace import Recorded


class Plan:
    """A recorded function.

    Args:
        recorded: the recording.
        leaves: of the arguments that it was recorded with.
        captured: what the function found besides its arguments.
    """

    def __init__(self, recorded: Recorded, leaves: Sequence[Any], captured: Captured) -> None:
        graph = recorded.graph
        for improve in PASSES:
            graph = improve(graph)
        self.graph = graph
        self.recorded, self.captured = recorded, captured
        self.versions = [(x, _torch.version(x)) for x in recorded.read]
        self._take = [(i, take) for i, leaf in enumerate(leaves) if (take := _taking(leaf)) is not None]
        self.code = generate(graph)

    def changed(self) -> str | None:
        """What the function closes over and has changed since; None where nothing has."""
        for x, version in self.versions:
            if _torch.version(x) != version:
                return "a tensor whose value is read"
        return self.captured.changed()

    def __call__(self, leaves: Sequence[Any]) -> Any:
        given: list[Any] = []
        for i, take in self._take:
            given += take(leaves[i])
        given += self.recorded.constants
        try:
            outs = self.code.run(given)
        except Exception as error:
            self._tell_where(error)
            raise
        results = [
            made(outs) if made.__class__ is leaves_.Result else leaves[made[1]] if made[0] == "input" else made[1]
            for made in self.recorded.results
        ]
        return tree.unflatten(self.recorded.out_def, results)

    def _tell_where(self, error: Exception) -> None:
        """Add the user's line to an error of a replay."""
        node = self.code.node_of(error)
        if node is not None and node.meta.get("line") and hasattr(error, "add_note"):  # Python 3.10 has no notes
            error.add_note(f"in a replay of what was recorded at {lines.quoted(node.meta['line'])}")


def _taking(leaf: Any) -> Callable[[Any], list[Any]] | None:
    return (lambda x: [float(x)]) if leaves_.is_number(leaf) else leaves_.taking(leaf)
