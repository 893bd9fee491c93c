"""Helpers of passes that replace a call by another: new nodes, and whether a replacement could be observed."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.distributed.collectives import Collective
from .graph import KEPT, calls, changed, copied, output, value, viewed


class Rewriting:
    """A copy of a graph, to be rewritten.

    Attributes:
        graph: the copy.
        outputs: the nodes that are results of the plan.
        fixed: nodes whose memory is written after they were made: nothing about them may change.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = copied(graph)
        self.fixed = changed(self.graph)
        self.outputs = set(output(self.graph).all_input_nodes)
        self._known: dict[Any, Any] = {}

    def calls(self) -> Iterable[fx.Node]:
        """The calls as they are now, in order: those that are added meanwhile are not among them."""
        return list(calls(self.graph))

    def add(
        self, before: fx.Node, target: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None, val: Any = None
    ) -> fx.Node:
        """A new call in front of a node, for the same line of the user's.

        Args:
            val: what it gives, as a tensor without values; by default that is found out.
        """
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, tuple(args), kwargs or {})
        node.meta.update((k, before.meta[k]) for k in ("line", "again", KEPT) if k in before.meta)
        node.meta["val"] = self._computed(node) if val is None else val
        return node

    def _computed(self, node: fx.Node) -> Any:
        """What a call gives; the layers of a model ask for the same again and again, and so do passes."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), _Lies.of)
        what = node.target, key(args), key(kwargs), torch.get_default_dtype()
        known = self._known_of([value(x) for x in node.all_input_nodes])
        if what not in known:
            known[what] = computed(node.target, node.args, node.kwargs)
        return known[what]

    def _known_of(self, given: list[Any]) -> dict[Any, Any]:
        """What is known of calls on these: what gives several results is known by its node, which a pass behind may change."""
        if given and all(isinstance(x, torch.Tensor) for x in given):
            found = torch_internals.known_without_values(given[0])
            return self._known if found is None else found
        return self._known

    def replace(self, node: fx.Node, new: fx.Node) -> bool:
        """Have everybody use `new`, which has the same value, for `node`; False, and nothing done, where that would show:

        results of the plan that lay apart would share memory, or be one tensor, or be an input.
        """
        if node is new or node in self.fixed or new in self.fixed or not self._unnoticed(node, new):
            return False
        shown = set(self._shown(node)) if self.roots(node) != self.roots(new) else set()
        self.leaving.subtract(root for x in shown for root in self.roots(x))
        if node in self.outputs:
            self.outputs.remove(node)
            self.outputs.add(new)
        node.replace_all_uses_with(new)
        self.leaving.update(root for x in shown for root in self.roots(new if x is node else x))
        self.graph.erase_node(node)
        return True

    def _shown(self, node: fx.Node) -> Iterator[fx.Node]:
        """The results of the plan that are views of what a call gives, itself among them."""
        if node in self.outputs:
            yield node
        for user in node.users:
            for x in (user, *(part for part in user.users if part.target is operator.getitem)):
                if x.op == "call_function" and node in viewed(x):
                    yield from self._shown(x)

    def _unnoticed(self, node: fx.Node, new: fx.Node) -> bool:
        if node in self.outputs and (new in self.outputs or new.op == "placeholder"):
            return False
        before, now = self.roots(node), self.roots(new)
        if before == now or not any(self.leaving[root] for root in before):
            return True
        if any(self.leaving[root] or root.op == "placeholder" for root in now):
            return False
        if not isinstance(value(node), torch.Tensor):
            return False
        return value(node).stride() == value(new).stride() and all(_size(root) <= _size(new) for root in now)

    @functools.cached_property
    def leaving(self) -> Counter[fx.Node]:
        """How many results of the plan lie in each memory, known by the node that made it."""
        return Counter(root for node in self.outputs for root in self.roots(node))

    def roots(self, node: fx.Node) -> frozenset[fx.Node]:
        """The nodes that made the memory in which a result may lie."""
        sources = viewed(node) if node.op == "call_function" else []
        return frozenset().union(*map(self.roots, sources)) if sources else frozenset((node,))


def computed(target: Any, args: Any, kwargs: Any) -> Any:
    """What a call would give, as tensors without values."""
    args, kwargs = fx.map_arg((args, kwargs), value)
    return target.like(args[0]) if isinstance(target, Collective) else target(*args, **kwargs)


class _Lies(tuple):
    """All of a tensor but its values, and of the memory in which it lies."""

    @staticmethod
    def of(node: fx.Node) -> Any:
        x = value(node)
        if not isinstance(x, torch.Tensor):
            return node
        memory = x.untyped_storage().nbytes(), x.storage_offset()  # of which a view is a part
        return _Lies((x.shape, x.stride(), x.dtype, x.device, x.is_conj(), x.is_neg(), x.requires_grad, memory))


def _size(node: fx.Node) -> int:
    v = value(node)
    return v.untyped_storage().nbytes() if isinstance(v, torch.Tensor) else 1 << 62


def key(x: Any) -> Any:
    """An argument as something that can be compared: equal for what no operator can tell apart."""
    if isinstance(x, (list, tuple)):
        return (list, *map(key, x))
    if isinstance(x, dict):
        return (dict, *((k, key(v)) for k, v in sorted(x.items())))
    if isinstance(x, (bool, int, float, complex)):
        return type(x), repr(x)
    if isinstance(x, slice):
        return slice, key((x.start, x.stop, x.step))
    return x
