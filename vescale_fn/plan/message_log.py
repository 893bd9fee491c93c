"""The messages of a pipeline in communication logs: what goes from stage to stage, as rows beside those of collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .._core.base.messages import dtype_text
from .._core.distributed.collectives import Record
from .ir.graph import nbytes, value
from .ir.ranks_as_one import of_first_rank
from .stage_runs import TERM, Name, Post, nodes_of
from .stages import Stages


class Messages:
    """The rows of a pipeline's messages; where this process plays several ranks, of the first one on the other axes.

    Args:
        stages: the cut step.
        placement: for each stage the place of its rank.
        axis: of the mesh.
    """

    def __init__(self, stages: Stages, placement: Sequence[int], axis: str) -> None:
        self.stages, self.placement, self.axis = stages, placement, axis

    def row(self, op: str, name: Name) -> Record | None:
        """The row of a message, "send" or "receive"; None where it goes to where it is, or is of other ranks."""
        source, target = (self.placement[stage] for stage in (name.source, name.target))
        nodes = of_first_rank(nodes_of(self.stages, name))
        if source == target or not nodes:
            return None
        what = (
            "gradients" if name.made == TERM else f"{name.made} of stage {name.source} to {name.used} of {name.target}"
        )
        why = f"pipeline: {what}, {self.axis}={source} to {self.axis}={target}"
        size = sum(nbytes(value(node)) for node in nodes)
        line, dtype = nodes[0].meta.get("line", ""), dtype_text(value(nodes[0]).dtype)
        return Record(op, (self.axis,), size, why, line, name.made != "F", dtype)


class Logged:
    """How values come from stage to stage, noted in logs; where one process plays all ranks, each message once.

    Args:
        post: how they come.
        messages: their rows.
        logs: as `comm_log` gives them.
        receives: whether what this rank takes is another row than what it sends.
    """

    def __init__(self, post: Post, messages: Messages, logs: Iterable[Any], receives: bool) -> None:
        self.post, self.messages, self.logs, self.receives = post, messages, tuple(logs), receives

    def send(self, name: Name, values: list[Any]) -> None:
        """Hand values over."""
        self._note("send", name)
        self.post.send(name, values)

    def take(self, name: Name) -> list[Any]:
        """Values that have been handed over."""
        if self.receives:
            self._note("receive", name)
        return self.post.take(name)

    def finish(self) -> None:
        """Wait until all is away."""
        self.post.finish()

    def _note(self, op: str, name: Name) -> None:
        if (row := self.messages.row(op, name)) is not None:
            for log in self.logs:
                log.append(row)
