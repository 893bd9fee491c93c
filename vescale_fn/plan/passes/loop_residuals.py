"""What a loop keeps of its iterations for the loop of its derivative: each value is kept, computed again there, or waits in the
memory of the host.

With a price in seconds on each byte, the best choice is a cheapest cut through the body, in which a value that the derivative
needs is bought, for its bytes in each iteration by keeping it, for its copies by sending it to the host, or for its seconds by
computing it again from others, and from what costs nothing: what the loop goes over, what is the same in all iterations, and
what the derivative computes, or brings from other ranks, in the same way. A slice that another rank has can be brought again,
too. The call is the same, on the same values: no bit changes.

What goes to the host is copied until the end of its iteration, and comes back from the beginning of the other one.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..._core.base import no_values
from ..._core.distributed.collectives import Collective
from ..ir import costs, host_copies, inplace
from ..ir import graph as plan
from ..ir.alike_calls import made_before, numbered
from ..ir.loop import EACH, LAST, STACKED, loop_of, loops
from ..ir.min_cut import MinCut
from ..ir.nested import Nested, ends, extracted, reached

_FIRST, _FACTOR, _STEPS = 1e-14, 3.0, 20  # prices: seconds for a byte; each several times the one before
_INFINITE = float("inf")


def fewer(graph: fx.Graph, copies: float | None = None, collectives: bool = False) -> Iterator[fx.Graph]:
    """The plan with fewer and fewer bytes that loops keep for the loops of their derivatives, at the least time for each.

    Args:
        graph: the plan.
        copies: seconds that a second of a copy to the host costs; None where nothing goes there.
        collectives: whether slices may be brought again.
    """
    before = [({*Residuals(*pair).places.values()}, set[fx.Node]()) for pair in _pairs(graph)]
    for step in range(_STEPS if before else 0):
        price = _FIRST * _FACTOR**step
        chosen = [Residuals(*pair, collectives).cheapest(price, copies) for pair in _pairs(graph)]
        if chosen != before:
            new = plan.copied(graph)
            for pair, (kept, sent) in zip(list(_pairs(new)), chosen, strict=True):
                Residuals(*pair, collectives).keep(kept, sent)
            yield new
        before = chosen


def _pairs(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Loops, each with the one other that takes something of each of its iterations; no loop is in two pairs."""
    found, done = loops(graph), set[fx.Node]()
    for node in found:
        takers = {user for part in node.users if _is_each(part) for user in part.users}
        other = takers.pop() if len(takers) == 1 else node
        alike = other in found and loop_of(other).length == loop_of(node).length
        if alike and node is not other and done.isdisjoint((node, other)):
            done |= {node, other}
            yield node, other


def _is_each(part: fx.Node) -> bool:
    loop: Any = part.args[0]
    at: Any = part.args[1]
    return at >= loop_of(loop).carry and loop_of(loop).keeps[at - loop_of(loop).carry] == EACH


class Residuals:
    """The choices that there are between a loop and that of its derivative.

    Args:
        forward: the loop.
        backward: that of its derivative.
        collectives: whether slices may be brought again, or earlier.

    Attributes:
        places: lists of what is kept for the derivative alone, each with the node of the body that is kept.
        there: of the body, what the derivative is given anyway, with the part of the loop that gives it.
        alike: of the body, what the derivative makes of the same things, with its node there.
    """

    def __init__(self, forward: fx.Node, backward: fx.Node, collectives: bool = False) -> None:
        self.forward, self.backward, self.collectives = forward, backward, collectives
        self.loop, self.other = loop_of(forward), loop_of(backward)
        self.body = self.loop.body
        self.inputs, self.outs = ends(self.body)
        self.places: dict[fx.Node, fx.Node] = {}
        self.there: dict[fx.Node, fx.Node] = {}
        rows = backward.args[self.other.carry : self.other.given]
        for part in forward.users:
            out = self.outs[part.args[1]]  # type: ignore[index]
            own = list(part.users) == [backward] and list(backward.args).count(part) == 1
            kind = self.loop.keeps[i - self.loop.carry] if (i := part.args[1]) >= self.loop.carry else None  # type: ignore
            if own and part in rows and kind == EACH and isinstance(plan.value(out), torch.Tensor):
                self.places[part] = out
            elif (kind == EACH and part in rows) or (kind == LAST and part in backward.args[self.other.given :]):
                self.there[out] = part
        self._changed = plan.changed(self.body)
        carried = set(self.inputs[: self.loop.carry])
        lists = {x for x, kind in zip(self.inputs[self.loop.carry :], self.loop.slices) if kind != STACKED}
        numbers: dict[Any, int] = {}
        theirs = {number: x for x, number in numbered(backward, numbers, collectives).items()}
        mine = numbered(forward, numbers, collectives).items()
        self.alike = {x: theirs[i] for x, i in mine if i in theirs}
        self._free = {x for x in self.inputs if x not in carried | lists} | {*self.there, *self.alike}

    def _again(self, node: fx.Node) -> bool:
        """Whether a call can be computed in the other loop: it and what it reads are the same there."""
        brings = self.collectives and isinstance(node.target, Collective) and len(node.args) > 1
        return not (
            node.op != "call_function"
            or plan.has_effect(node)
            or (isinstance(node.target, (Nested, Collective)) and not brings)
            or not self._changed.isdisjoint((node, *node.all_input_nodes))
        )

    def _can_stay(self, node: fx.Node) -> bool:
        maker: Any = node.args[0] if node.target is operator.getitem else node
        plain = isinstance(plan.value(node), torch.Tensor) and not plan.viewed(maker) and node not in self._changed
        return plain or node in self.places.values()

    def _copy(self, node: fx.Node, of: costs.Rates) -> float:
        """The seconds that it takes to copy a value to the host and back; infinitely many where that is not done."""
        x, maker = plan.value(node), node.args[0] if node.target is operator.getitem else node
        if isinstance(maker.target, Nested):  # type: ignore[union-attr]  # perhaps a list
            return _INFINITE
        if costs.device_of(x) == "cpu" or not inplace.is_dense(x) or costs.copy(plan.nbytes(x), of) < of.call:
            return _INFINITE
        return 2 * costs.copy(plan.nbytes(x), of)

    def cheapest(self, price: float, copies: float | None = None) -> tuple[set[fx.Node], set[fx.Node]]:
        """What to keep of each iteration, where a byte has a price in seconds; and what of that is to wait on the host."""
        cut, of, length = MinCut(), costs.rates(self.body), self.loop.length
        live, sent = reached(self.places.values()) - self._free, set[fx.Node]()
        for node in (x for x in self.body.nodes if x in live):
            again = length * costs.seconds(node, of) if self._again(node) else _INFINITE
            cut.edge(MinCut.SOURCE, ("call", node), again)
            keep = send = _INFINITE
            if self._can_stay(node):
                keep = plan.nbytes(plan.value(node)) * length * price
                send = _INFINITE if copies is None else self._copy(node, of) * length * copies
            sent.update((node,) if send < keep else ())
            cut.edge(("call", node), node, min(keep, send))
            for x in node.all_input_nodes if again < _INFINITE else ():
                if x not in self._free:
                    cut.edge(x, ("call", node), _INFINITE)
        for node in {*self.places.values()} - self._free:
            cut.edge(node, MinCut.SINK, _INFINITE)
        there = cut.reached()
        kept = {node for node in live if node not in there and ("call", node) in there}
        return kept, kept & sent

    def keep(self, kept: set[fx.Node], sent: Collection[fx.Node] = ()) -> None:
        """Keep these alone, some of them on the host, and compute in the other loop what it needs besides."""
        lists = self._kept(kept, sent)
        self._computed(lists, sent)

    def _kept(self, kept: set[fx.Node], sent: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Have the loop keep these. For each the list of it."""
        node, loop = self.forward, self.loop
        gone = {part.args[1] for part in self.places}  # type: ignore[reportUnhashable]
        stay = [i for i in range(len(self.outs)) if i not in gone]
        new = [x for x in self.body.nodes if x in kept]
        vals = list(plan.value(node))
        outs = [*(self.outs[i] for i in stay), *new]
        live = reached([*(x for x in plan.calls(self.body) if plan.has_effect(x) or plan.KEPT in x.meta), *outs])
        live |= {x for x in plan.calls(self.body) if isinstance(x.target, Collective)}
        body = extracted([x for x in plan.calls(self.body) if x in live], self.inputs, outs)
        _send(body, [i for i, x in enumerate(new, len(stay)) if x in sent])
        node.target = replace(
            loop,
            bodies=(body,),
            keeps=(*(loop.keeps[i - loop.carry] for i in stay if i >= loop.carry), *(EACH for _ in new)),
        )
        node.meta["val"] = [
            *(vals[i] for i in stay),
            *(None if x in sent else _stack(plan.value(x), loop.length) for x in new),
        ]
        for part in list(node.users):
            if part.args[1] not in gone:
                part.args = node, stay.index(part.args[1])  # type: ignore[arg-type]
        lists = {}
        for i, x in enumerate(new, len(stay)):
            with node.graph.inserting_after(node):
                lists[x] = node.graph.call_function(operator.getitem, (node, i))
            lists[x].meta = {**node.meta, "val": node.meta["val"][i]}
        return lists

    def _computed(self, lists: dict[fx.Node, fx.Node], sent: Collection[fx.Node]) -> None:
        """Have the other loop take these lists, and compute the rest right before it is needed."""
        loop, gone = self.other, {*self.places}
        nodes, body = list(loop.body.nodes), plan.copied(loop.body)
        ours = dict(zip(nodes, body.nodes, strict=True))
        place = {x: i for i, x in enumerate(ours.values())}
        taking = _Taking(self.backward, body)
        values = {x: taking.place(outer, EACH, x) for x, outer in lists.items() if x not in sent}
        values |= {x: taking.place(outer, _kind(outer), x) for x, outer in self.there.items()}
        missing = {taking.place(part, EACH, x): x for part, x in self.places.items()}

        def again(x: fx.Node, before: fx.Node) -> fx.Node:
            if x not in values and x in self.alike:
                return made_before(before, ours[self.alike[x]], place)
            if x not in values and x in sent:
                waits = taking.place(lists[x], EACH, x)
                waits.meta["val"] = None
                coming = host_copies.inserted(next(plan.calls(body)), host_copies.fetch, (waits,), x)
                values[x] = host_copies.inserted(before, host_copies.fetched, (coming,), x)
            elif x not in values and x.op == "placeholder":
                i = self.inputs.index(x)
                kind = STACKED if i < self.loop.given else LAST
                values[x] = taking.place(self.forward.args[i], kind, x)
            elif x not in values:
                for y in x.all_input_nodes:
                    again(y, before)
                with body.inserting_before(before):
                    values[x] = body.node_copy(x, lambda y: again(y, before))
                values[x].meta["again"] = True
            return values[x]

        for user in list(body.nodes):
            for x in user.all_input_nodes:
                if x in missing:
                    user.replace_input_with(x, again(missing[x], user))
        taking.put(gone)
        for part in gone:
            part.graph.erase_node(part)


class _Taking:
    """What a loop is given, to be changed.

    Args:
        node: the loop.
        body: its body.
    """

    def __init__(self, node: fx.Node, body: fx.Graph) -> None:
        self.node, self.loop, self.body = node, loop_of(node), body
        places = ends(body)[0]
        kinds = [None] * self.loop.carry + [*self.loop.slices] + [LAST] * (len(places) - self.loop.given)
        self._taken = [*zip(node.args, kinds, places, strict=True)]

    def place(self, outer: Any, kind: str, like: fx.Node) -> fx.Node:
        """The placeholder for something of outside, which is one for each iteration or the same (`LAST`) in all."""
        for x, how, place in self._taken:
            if x is outer and how == kind:
                return place
        with self.body.inserting_before(next(iter(self.body.nodes))):
            place = self.body.placeholder(like.name)
        place.meta = dict(like.meta)
        self._taken.append((outer, kind, place))
        return place

    def put(self, gone: set[fx.Node]) -> None:
        """Change the loop, which no longer takes what is gone."""
        taken = [one for one in self._taken if one[0] not in gone]
        taken.sort(key=lambda one: (one[1] is not None, one[1] == LAST))
        given, kinds, places = zip(*taken, strict=True)
        body = extracted(plan.calls(self.body), places, ends(self.body)[1])
        slices = tuple(kind for kind in kinds if kind not in (None, LAST))
        self.node.target = replace(self.loop, bodies=(body,), slices=slices)
        self.node.args = given


def _send(body: fx.Graph, places: Sequence[int]) -> None:
    """Let some of a body's results wait on the host."""
    end, outs = plan.output(body), ends(body)[1]
    for i in places:
        x = outs[i]
        behind = next(plan.calls(body), end) if x.op == "placeholder" else x.next
        begun = host_copies.inserted(behind, host_copies.offload, (x,), x)
        outs[i] = host_copies.inserted(end, host_copies.offloaded, (begun, x), x)
    end.args = (tuple(outs),)


def _kind(part: fx.Node) -> str:
    return EACH if _is_each(part) else LAST


def _stack(value: torch.Tensor, count: int) -> torch.Tensor:
    """What stands for a list of so many values."""
    with_count = (count, *value.shape)
    strides = torch.empty(with_count, device="meta").stride()
    return no_values.empty(with_count, strides, value.dtype, value.device)
