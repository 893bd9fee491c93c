"""What a function has kept of an earlier recording of the same call: a table that it makes when it first runs, say.

Where a recording begins anew, the function runs again, and does not make again what it has kept. The calls that made it are
recorded once more, where it is first used.
"""

from __future__ import annotations

import cmath
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.base import source_lines
from ..._core.base.errors import RecordError
from ..._core.base.messages import report
from ..ir.graph import memories, writers, written
from ..ir.ranks_as_one import ROW
from .fake_tensors import Valueless


def kept_from_it() -> RecordError:
    """The error for a value of a recording that is over."""
    line = source_lines.user_line()
    return RecordError(
        report(
            "jit",
            "this is a value of an earlier recording, which was kept from it; it has none of its own",
            [f"at {source_lines.quoted(line)}"] if line else [],
            "return what is needed from the function",
        )
    )


class Earlier:
    """The recordings that came before.

    Attributes:
        values: what tensors without values are made by, so that those of all recordings can meet.
        is_used: whether one needed what another has made.
        graph: of the last one, perhaps in part.
    """

    graph: fx.Graph | None = None

    def __init__(self) -> None:
        self.values, self.is_used = Valueless(), False
        self._recorders: list[Any] = []
        self._kept: dict[tuple[Any, fx.Graph], _Kept] = {}

    def add(self, recorder: Any) -> None:
        """Note one that is over."""
        self._recorders.append(recorder)
        self.graph = recorder.graph

    def end(self) -> None:
        """Mark what the function may have kept of any of them, where nothing is computed of it any more."""
        self._kept.clear()
        while self._recorders:
            self._recorders.pop().end()

    def gives(self, recorder: Any, x: torch.Tensor) -> bool:
        """Whether a tensor was made in an earlier recording; in the one at work it then has a node, too."""
        other = getattr(x, "_plan_recorder", None)
        if other is None or other is recorder or all(one is not other for one in self._recorders):
            return False
        self.is_used = True
        node: Any = x._plan_node  # type: ignore[attr-defined]
        if not isinstance(node, fx.Node):  # of what one rank has
            raise kept_from_it()
        kept = self._kept.get((recorder, node.graph))
        if kept is None:
            kept = self._kept[recorder, node.graph] = _Kept(recorder, other, node.graph)
        recorder.take(x, kept.again(node))
        return True


class _Kept:
    """What one recording uses of another, or of the body of a call in it."""

    def __init__(self, recorder: Any, other: Any, graph: fx.Graph) -> None:
        self._recorder, self._graph, self._lie = recorder, graph, memories(graph)
        self._writers: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # by the memory that they write
        for node in writers(graph):
            for memory in (memory for x in written(node) for memory in self._lie[x]):
                self._writers[memory].append(node)
        here, there = _inputs(recorder), _inputs(other)
        is_whole = graph is other.graph
        pairs = zip(there, here) if is_whole and len(here) == len(there) else ()
        # nor of a number among the inputs: a gradient goes through it where it was made, and not where it is found
        self._nodes = {x: y for x, y in pairs if not _has_gradients(x.meta["val"])}
        # where floats are inputs, others stand for them: what may have been computed of these is not to be taken
        self._careful = any(isinstance(x.meta["val"], float) for x in there)
        self._written_down = {id(x) for x in other.literals.values()}
        self._constants = dict(zip(other.frame.places, other.constants, strict=True)) if is_whole else {}

    def again(self, last: fx.Node) -> fx.Node:
        """Record the calls that give a node of the other one, and those that write it; each once."""
        found, needed, todo = self._nodes, set[fx.Node](), [last]
        while todo:
            if (node := todo.pop()) not in needed and node not in found:
                needed.add(node)
                todo += node.all_input_nodes
                todo += (x for memory in self._lie[node] for x in self._writers[memory])
        read = set[fx.Node]()  # the memory that other calls have had
        for node in self._graph.nodes if needed else ():
            if node not in needed:
                read.update(*(self._lie[x] for x in node.all_input_nodes))
                continue
            unknown = (node.op == "placeholder" and node not in self._constants) or ROW in node.meta
            # written after it was used: the first run had it as it was before, and later ones do not
            unknown = unknown or any(node in self._writers[memory] for memory in read)
            if unknown or (self._careful and self._may_hold_a_float(node)):
                raise kept_from_it()
            if node in self._constants:
                found[node] = self._recorder.outer(self._constants[node])
            else:
                found[node] = self._recorder.graph.node_copy(node, found.__getitem__)
        return found[last]

    def _may_hold_a_float(self, node: fx.Node) -> bool:
        """Whether a number in a call, or a tensor that was written down, may come of what stands for a float."""
        if (x := self._constants.get(node)) is not None:
            with torch_internals.unrecorded(), torch_internals.no_torch_function():
                return id(x) in self._written_down and not bool(((x == x.real.round()) | ~torch.isfinite(x)).all())
        numbers: list[Any] = []
        _collect((node.args, node.kwargs), numbers)
        return not all(map(_is_short, numbers))


def _collect(given: Any, into: list[Any]) -> None:
    """Put what stands in the arguments of a call into a list."""
    for x in given.values() if isinstance(given, dict) else given:
        if isinstance(x, (tuple, list, dict)):
            _collect(x, into)
        else:
            into.append(x)


def _is_short(x: Any) -> bool:
    """Whether a program may have written a number down: one that is computed of another has up to 17 digits."""
    return not isinstance(x, (float, complex)) or not cmath.isfinite(x) or x == complex(f"{x:.6g}")


def _has_gradients(x: Any) -> bool:
    """Whether an input is a float, or a tensor of such."""
    return not isinstance(x, torch.Tensor) or x.is_floating_point() or x.is_complex()


def _inputs(recorder: Any) -> list[fx.Node]:
    """The placeholders of what a function is given."""
    constants = set(recorder.frame.places)
    return [x for x in recorder.graph.nodes if x.op == "placeholder" and x not in constants]
