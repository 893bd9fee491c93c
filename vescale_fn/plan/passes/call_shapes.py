"""What one call gives to another is given in the shape in which it was made, so that views at both ends meet and cancel."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from ..ir.graph import calls, changed, copied, output, value
from ..ir.nested import ends, nested
from ..ir.shared_bodies import Shared
from .cse import common
from .dce import dead
from .pointwise_before_views import flat
from .views import views

_VIEW = torch.ops.aten.view.default

End = tuple[bool, Any, int]  # whether it is a result, of which body, and in which place


def shapes(graph: fx.Graph) -> fx.Graph:
    """The graph in which what is given by calls to calls is no view, where all those that share a body agree."""
    graph = copied(graph)
    same = [node for node in nested(graph) if isinstance(node.target, Shared)]
    chosen = _chosen(same, changed(graph))
    if not chosen:
        return graph
    bodies = {target: _reshaped(target, chosen) for target in {node.target for node in same}}
    for call in same:
        target: Any = call.target
        for j, x in enumerate(call.args):
            end = _end(x)
            if (False, target, j) in chosen and end not in chosen:
                with graph.inserting_before(call):
                    call.update_arg(j, _viewed(x, chosen[False, target, j]))
        for part in list(call.users):
            if (made := chosen.get((True, target, part.args[1]))) is not None:  # type: ignore[arg-type]
                _give(part, made)
    for call in same:
        call.target = bodies[call.target]
    return graph


def _end(x: Any) -> End | None:
    """Of which calls a value is a result; None where it is of none."""
    if x.target is operator.getitem and isinstance(x.args[0].target, Shared):
        return True, x.args[0].target, x.args[1]
    return None


def _chosen(same: list[fx.Node], hot: frozenset[fx.Node]) -> dict[End, Any]:
    """For ends of values that are given in another shape, what is given there."""
    together: dict[End, set[End]] = defaultdict(set)
    for call in same:
        for j, x in enumerate(call.args):
            if (end := _end(x)) is not None:
                together[end].add((False, call.target, j))
                together[False, call.target, j].add(end)
    found: dict[End, Any] = {}
    seen: set[End] = set()
    fixed = {(True, x.target, part.args[1]) for x in same for part in x.users if part in hot}
    for end in together:
        todo, group = [end], list[End]()
        while todo:
            if (one := todo.pop()) not in seen:
                seen.add(one)
                group.append(one)
                todo += together[one]
        made: list[Any] = [None if one in fixed else _made(one) for one in group if one[0]]
        if made and None not in made and len({tuple(x.shape) for x in made}) == 1:
            found.update(dict.fromkeys(group, made[0]))
    return found


def _made(end: End) -> Any:
    """What a result is a view of, without values; None where it is of nothing that lies in the same order."""
    body = end[1].bodies[0]
    outs = ends(body)[1]
    x = outs[end[2]]
    if x.target is not _VIEW or x.args[0].op != "call_function" or x.args[0] in outs or x in changed(body):
        return None
    alike = value(x).is_contiguous() and value(x.args[0]).is_contiguous() and outs.count(x) == 1
    return value(x.args[0]) if alike else None


def _reshaped(target: Any, chosen: dict[End, Any]) -> Shared:
    """The call of a body that is given, and gives, values in other shapes."""
    body = copied(target.bodies[0])
    first = next(calls(body))
    for j, x in enumerate(ends(body)[0]):
        if (made := chosen.get((False, target, j))) is not None:
            with body.inserting_before(first):
                view = body.call_function(_VIEW, (x, list(value(x).shape)))
            view.meta = {**x.meta, "line": first.meta["line"]}
            x.replace_all_uses_with(view, delete_user_cb=lambda user, view=view: user is not view)
            x.meta["val"] = made
    end = output(body)
    end.args = (tuple(x.args[0] if (True, target, i) in chosen else x for i, x in enumerate(ends(body)[1])),)
    for improve in (flat, views, common, dead):
        body = improve(body)
    return Shared(bodies=(body,))


def _viewed(x: Any, like: Any) -> fx.Node:
    """A value in another shape, at the insertion point."""
    view = x.graph.call_function(_VIEW, (x, list(like.shape)))
    view.meta = {"val": like, "line": x.meta.get("line", "")}
    return view


def _give(part: fx.Node, made: Any) -> None:
    """Let a result be given in the shape in which it is made."""
    before, whole = value(part), part.args[0]
    users = [x for x in part.users if not isinstance(x.target, Shared)]
    if users:
        with part.graph.inserting_after(part):
            view = _viewed(part, before)
        for user in users:
            user.replace_input_with(part, view)
    part.meta["val"] = made
    whole.meta["val"] = [made if i == part.args[1] else x for i, x in enumerate(whole.meta["val"])]  # type: ignore[union-attr]
