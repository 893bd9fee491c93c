"""What a function has kept of a recording that was begun and given up: a table that it makes in its first call, say.

A recording that begins anew runs the function anew, and a table that is there already is not made again. Its value is known by
the calls that made it, which are recorded once more where it is used first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..ir.graph import changed
from ..ir.ranks_as_one import ROW
from .fake_tensors import Valueless
from .frame import Unrecordable


class Earlier:
    """The recordings that were given up.

    Attributes:
        values: runs ops on tensors without values, for all of them.
    """

    def __init__(self) -> None:
        self.values = Valueless()
        self._recorders: list[Any] = []
        self._nodes: dict[tuple[Any, fx.Node], fx.Node] = {}

    def add(self, recorder: Any) -> None:
        """Note one."""
        self._recorders.append(recorder)

    def node(self, recorder: Any, x: torch.Tensor) -> fx.Node | None:
        """The node that gives in this recording what an earlier one has made; None where it is nothing of these."""
        made_by = getattr(x, "_plan_recorder", None)
        if made_by is None or all(one is not made_by for one in self._recorders):
            return None
        node: Any = x._plan_node  # type: ignore[attr-defined]
        if getattr(node, "graph", None) is not made_by.graph:
            raise Unrecordable("a value of a part that was recorded in another way is used outside of it", "?")
        return self._again(recorder, made_by, node)

    def _again(self, recorder: Any, made_by: Any, last: fx.Node) -> fx.Node:
        """Record the calls again that give a node of another recording, and what they need."""
        written, given, constants = (
            changed(made_by.graph),
            _inputs(made_by),
            dict(zip(made_by.frame.places, made_by.constants)),
        )
        inputs = dict(zip(given, _inputs(recorder), strict=True))
        todo = [last]
        while todo:
            node = todo[-1]
            if (recorder, node) in self._nodes:
                todo.pop()
            elif node in inputs:
                self._nodes[recorder, node] = inputs[node]
            elif node in constants:
                self._nodes[recorder, node] = recorder.outer(constants[node])
            elif needed := [x for x in node.all_input_nodes if (recorder, x) not in self._nodes]:
                todo += needed
            elif node in written or ROW in node.meta:
                raise Unrecordable(
                    "a value is used that was kept from a recording that began anew", node.meta["line"] or "?"
                )
            else:
                self._nodes[recorder, node] = copy = recorder.graph.node_copy(node, lambda x: self._nodes[recorder, x])
                copy.meta.pop("again", None)
        return self._nodes[recorder, last]


def _inputs(recorder: Any) -> list[fx.Node]:
    """The placeholders of what a function is given."""
    constants = set(recorder.frame.places)
    return [x for x in recorder.graph.nodes if x.op == "placeholder" and x not in constants]
