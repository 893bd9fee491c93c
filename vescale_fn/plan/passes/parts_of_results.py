"""Equal calls of whose result all that is used are parts, the same of each call, give these parts alone.

What a layer keeps for its derivative is given whole, because its body was recorded before anybody used it: a matrix, say, of
which a rank needs its own rows and columns. Slices go up into the body and there through what makes the value (`draws`), so
that the rest is not kept, and perhaps not made; a sum that is scattered is scattered in the body, where it joins the others.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx

from ..._core.distributed.collectives import Collective
from ..ir.collective_nodes import is_light
from ..ir.graph import copied, nbytes, value, viewed
from ..ir.nested import ends, extracted
from ..ir.shared_bodies import Shared
from ..ir.slice_motion import part_of
from .slice_draws import draws


class _Part(NamedTuple):
    """What is made of a result.

    Attributes:
        how: in calls, the same of all that do the same.
        nodes: these.
    """

    how: tuple[Any, ...]
    nodes: tuple[fx.Node, ...]


_Given = tuple[
    int, tuple[Any, ...]
]  # of what is given, the place of the result that it was, and how it is made of this


def parts(graph: fx.Graph, same: Sequence[fx.Node], hot: frozenset[fx.Node]) -> None:
    """Let equal calls of a shared body give parts of their results where nothing else is used of these.

    Args:
        graph: that they are in.
        hot: the values whose memory is written.
    """
    used = [_used(call, hot) for call in same]
    outs: Any = ends(same[0].target.bodies[0])[1]  # type: ignore[union-attr]
    chosen = {i: list({part.how: part for part in some}.values()) for i, some in used[0].items()}
    chosen = {i: some for i, some in chosen.items() if _is_less(outs[i], some) and _is_alike(i, used)}
    while chosen:
        body, gives = _with_parts(same[0], chosen)
        whole = {i for (i, how), x in zip(gives, ends(body)[1], strict=True) if how and _is_slice(x)}
        if not whole:
            break
        chosen = {i: some for i, some in chosen.items() if i not in whole}
    else:
        return
    target, vals = Shared(bodies=(body,)), [value(x) for x in ends(body)[1]]
    for call, theirs in zip(same, used, strict=True):
        _replace(graph, call, target, vals, gives, {i: theirs[i] for i in chosen})


def _used(call: fx.Node, hot: frozenset[fx.Node]) -> dict[int, list[_Part]]:
    """By the place of a result of a call, its parts that are used; without results that are used as a whole."""
    found: dict[int, list[_Part]] = {}
    whole = set[int]()
    waiting: list[tuple[Any, _Part]] = [(part.args[1], _Part((), (part,))) for part in call.users]
    while waiting:
        i, (how, nodes) = waiting.pop()
        for user in nodes[-1].users:
            step = None if user in hot or nodes[-1] in hot or not user.users else _step(user)
            if step is None:
                whole.add(i)
                break
            part = _Part((*how, step), (*nodes, user))
            if _is_part(user):
                found.setdefault(i, []).append(part)
            else:
                waiting.append((i, part))
    return {i: some for i, some in found.items() if i not in whole}


def _step(x: fx.Node) -> Any:
    """What a call does that takes a part of a value, or looks at all of it in another way."""
    if len(x.all_input_nodes) != 1 or not isinstance(x.args[0], fx.Node) or "again" in x.meta:
        return None
    if not _is_part(x) and (not is_light(x) or x.target is operator.getitem or not viewed(x)):
        return None
    return x.target, repr(x.args[1:]), repr(x.kwargs)


def _is_part(x: fx.Node) -> bool:
    scattered = isinstance(x.target, Collective) and x.target.kind == "reduce_scatter" and not x.target.padded
    return scattered or part_of(x) is not None


def _is_alike(i: int, used: Sequence[dict[int, list[_Part]]]) -> bool:
    """Whether the same parts of a result are used of each call."""
    return len({frozenset(part.how for part in some.get(i, ())) for some in used}) == 1


def _is_less(whole: fx.Node, some: Sequence[_Part]) -> bool:
    """Whether parts are better than the whole: slices that are no more, which only this rank may have; or, on all ranks, a sum
    that the body brings too. Other sums stay outside, where they are put together."""
    last = [part.nodes[-1] for part in some]
    if any(isinstance(x.target, Collective) for x in last):
        return len(last) == 1 and _is_sent(whole)
    return sum(nbytes(value(x)) for x in last) <= nbytes(value(whole))


def _is_sent(x: fx.Node) -> bool:
    return any(isinstance(user.target, Collective) or (is_light(user) and _is_sent(user)) for user in x.users)


def _with_parts(call: fx.Node, chosen: dict[int, list[_Part]]) -> tuple[fx.Graph, list[_Given]]:
    """The body that gives parts, and of each of its results the place of the one that it was, and how it is made of this."""
    body = copied(call.target.bodies[0])  # type: ignore[union-attr]
    (places, outs), gives, made = ends(body), list[_Given](), list[fx.Node]()
    for i, out in enumerate(outs):
        for part in chosen.get(i, [_Part((), ())]):
            x = out
            for node in part.nodes[1:]:
                with body.inserting_before(body.output_node()):
                    x = body.node_copy(node, lambda _, x=x: x)
            made.append(x)
            gives.append((i, part.how))
    kept = [x for x in body.nodes if x.op == "call_function"]
    return draws(extracted(kept, places, made)), gives


def _is_slice(x: fx.Node) -> bool:
    """Whether a part of a result is a slice yet, behind which the whole lies in memory as long."""
    while x.op == "call_function" and viewed(x):
        if part_of(x) is not None:
            return True
        (x,) = x.all_input_nodes
    return False


def _replace(
    graph: fx.Graph,
    call: fx.Node,
    target: Shared,
    vals: list[Any],
    gives: list[_Given],
    theirs: dict[int, list[_Part]],
) -> None:
    """Let a call be one of the body that gives parts."""
    old: dict[fx.Node, Any] = {part: part.args[1] for part in call.users}
    call.target, call.meta = target, {**call.meta, "val": vals}
    new = dict[_Given, fx.Node]()
    with graph.inserting_before(call.next):
        for place, key in enumerate(gives):
            new[key] = graph.call_function(operator.getitem, (call, place))
            new[key].meta = {**call.meta, "val": vals[place]}
    depth = dict[fx.Node, int]()
    for i, some in theirs.items():
        for part in some:
            part.nodes[-1].replace_all_uses_with(new[i, part.how])
            depth.update({node: at for at, node in enumerate(part.nodes) if at})
    for node in sorted(depth, key=depth.__getitem__, reverse=True):
        graph.erase_node(node)
    for part, i in old.items():
        if i not in theirs:
            part.replace_all_uses_with(new[i, ()])
        graph.erase_node(part)
