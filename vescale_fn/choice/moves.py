"""Which lines a step needs to come to a chosen layout by itself: found by running it, looking where its calls vote otherwise.

The step runs with its arguments laid out as chosen. Whenever one of its calls gives something that lies neither as in the
chosen layout nor as those who read it want it, what the call is given is moved, one tensor or all, and where that does not help
what it gives. The backward pass follows: gradients come back to where values were.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .._core.arrays.layout_solver import solved
from .._core.arrays.reshard_plan import LOCAL_KINDS, plan
from .._core.base import op_arguments, tree
from .._core.sharding.placements import normal
from .._core.sharding.spec import P
from ..plan.ir.graph import calls, value
from .apply_calls import operands
from .recording import Recording
from .search.described import described
from .search.layouts import Layouts
from .user_calls import CALL, GIVEN, GIVES, UserCalls, called, shown
from .written import RETURNS, MoveToWrite, is_laid_out, lying, moved_in, returned


class LinesToWrite(UserCalls):
    """A mode in which a step runs in a layout, as far as lines can say so, and that notes these lines.

    Args:
        recorded: the step.
        layouts: that it is to come to.
        all_moves: whether every move of the forward pass is written, those too that the calls' votes come to: so values come
            back in the backward pass, and in the dtype in which they went.

    Attributes:
        found: the lines, by their places, with how each moves what is meant.
    """

    def __init__(self, recorded: Recording, layouts: Layouts, all_moves: bool = False) -> None:
        super().__init__()
        self._all = all_moves
        self._recorded, self._chosen, self._axes = recorded, _ChosenValues(recorded, layouts), dict(layouts.mesh)
        self._outputs, self._next = layouts.outputs, 0
        self.found: dict[tuple[Any, ...], dict[P, MoveToWrite]] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        self.found, self._next = {}, 0
        with self:
            out = self._recorded.f(*args, **kwargs)
        return self._returned(out)

    def lines(self) -> list[MoveToWrite]:
        """What to write: but for places where different things would have to be written for the same."""
        return [line for ways in self.found.values() if len(ways) == 1 for line in ways.values()]

    def called(self, line: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        given, gives = op_arguments.tensors_in((args, kwargs)), op_arguments.tensors_in(out)
        number = self._number(call := called(line, func, gives)) if gives else None
        if number is None or any(x is y for x in gives for y in given):  # which writes, or has nothing to do
            return out
        wrong, moving = self._wrong(number, gives), self._moving(number, given)
        ways = [{i: spec} for i, spec in moving.items()] if wrong else []
        for specs in [moving] if self._all else [*ways, moving]:
            if not specs or not (self._all or wrong):
                break
            more_args, more_kwargs = moved_in((args, kwargs), specs)
            other = func(*more_args, **more_kwargs)
            if len(left := self._wrong(number, op_arguments.tensors_in(other))) < len(wrong) or (
                self._all and not left
            ):
                for i, spec in specs.items():
                    self._note(call.line, call.name, False, i, given[i], spec, self._chosen.given.get((number, i)))
                out, wrong = other, left
                break
        gives = op_arguments.tensors_in(out)
        for i, spec in wrong.items():
            self._note(call.line, call.name, True, i, gives[i], spec)
        return moved_in(out, wrong)

    def _number(self, call: Any) -> int | None:
        """Which of the calls of the recording it is: the next that is alike. Some may be left out: of equal bodies one alone
        runs."""
        noted = self._recorded.user_calls
        found = next((n for n in range(self._next, len(noted)) if noted[n] == call), None)
        if found is not None:
            self._next = found + 1
        return found

    def _moving(self, number: int, given: Sequence[torch.Tensor]) -> dict[int, P]:
        """What of that which a call is given is to move, and travels."""
        found = dict[int, P]()
        for i, x in enumerate(given):
            node = self._chosen.given.get((number, i))
            if node is None or not is_laid_out(x):
                continue
            ways, lies = self._chosen.wanted(node, number), lying(x, self._axes)
            if len(ways) == 1 and ways[0] != lies and self._travels(x, lies, ways[0]):
                found[i] = ways[0]
        return found

    def _travels(self, x: torch.Tensor, lies: P, spec: P) -> bool:
        """Whether a move is more than that each rank takes its part, where that would do."""
        steps = plan(tuple(x.shape), tuple(self._axes.items()), lies, spec)
        return not self._all or any(step.kind not in LOCAL_KINDS for step in steps)

    def _wrong(self, number: int, gives: Sequence[torch.Tensor]) -> dict[int, P]:
        """What of that which a call gives lies otherwise than chosen, and how it is to lie."""
        found = dict[int, P]()
        for i, x in enumerate(gives):
            node = self._chosen.gives.get((number, i))
            if node is None or not (is_laid_out(x) and x.is_floating_point() and x.ndim):
                continue
            made, ways = self._chosen.made(node), self._chosen.wanted(node)
            if made is None or lying(x, self._axes) in (made, *ways):
                continue
            goal = ways[0] if len(ways) == 1 else made
            if not goal.unreduced:
                found[i] = goal
        return found

    def _returned(self, out: Any) -> Any:
        """The result, where it is to lie."""
        leaves = tree.leaves(out)
        code = getattr(getattr(self._recorded.f, "func", self._recorded.f), "__code__", None)
        line = "?" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
        for x, spec in zip(leaves, self._outputs) if len(leaves) == len(self._outputs) else ():
            if spec is None or not is_laid_out(x):
                continue
            goal = normal(spec, self._axes, x.shape)
            if P(*lying(x, self._axes)) != P(*goal):  # a sum that is returned is added up
                self._note(line, RETURNS, True, 0, x, goal)
        return returned(out, self._outputs)

    def _note(
        self, line: str, op: str, gives: bool, i: int, x: torch.Tensor, spec: P, node: fx.Node | None = None
    ) -> None:
        paths = dict(zip(self._recorded.placeholders, self._recorded.paths))
        value = paths.get(node, "") if node is not None else ""
        one = MoveToWrite(line, op, gives, i, tuple(x.shape), x.dtype, lying(x, self._axes), spec, value)
        ways = self.found.setdefault(one.place, {})
        same = ways.get(spec)
        ways[spec] = one if same is None else replace(same, value=same.value and value, count=same.count + 1)


class _ChosenValues:
    """How the values that a step's code sees lie in a chosen layout.

    Attributes:
        given, gives: the nodes of what calls are given and give, by the number of the call, and which tensor it is.
    """

    def __init__(self, recorded: Recording, layouts: Layouts) -> None:
        graph, self._layouts, self._axes = recorded.graph, layouts, dict(layouts.mesh)
        self.given, self.gives = shown(graph, GIVEN), shown(graph, GIVES)
        self._described = {x.node: x for x in described(graph)}
        self._made: dict[fx.Node, P | None] = dict(zip(recorded.placeholders, layouts.inputs, strict=True))
        for node in calls(graph):
            self._made[node] = self._made_by(node)
        self._wanted: dict[Any, list[P]] = {}

    def _made_by(self, node: fx.Node) -> P | None:
        whole, part = node.args if node.target is operator.getitem else (node, None)
        stated = self._layouts.calls.get(whole.name)  # type: ignore[union-attr]
        if stated is None or (part is None and len(stated.outs) != 1):
            return None
        tensors = [i for i, x in enumerate(value(whole)) if isinstance(x, torch.Tensor)] if part is not None else [None]  # type: ignore[arg-type]
        return stated.outs[tensors.index(part)] if part in tensors else None  # type: ignore[arg-type]

    def made(self, node: fx.Node) -> P | None:
        """How a value lies as it is made."""
        spec = self._made.get(node)
        return None if spec is None else self._normal(spec, node)

    def wanted(self, node: fx.Node, call: int | None = None) -> list[P]:
        """The ways in which those who read a value in the forward pass want it; of one call, or of all."""
        key = node, call
        if key not in self._wanted:
            found = dict[P, None]()
            for user in node.users:
                stated = self._layouts.calls.get(user.name)
                if "backward" in user.meta or stated is None or call not in (None, user.meta.get(CALL)):
                    continue
                ins = [spec for x, spec in zip(operands(user), stated.ins, strict=True) if x is node]
                found.update(dict.fromkeys(self._before_view(user, node, self._normal(spec, node)) for spec in ins))
            self._wanted[key] = list(found)
        return self._wanted[key]

    def _normal(self, spec: P, node: fx.Node) -> P:
        return normal(spec, self._axes, value(node).shape)

    def _before_view(self, view: fx.Node, node: fx.Node, spec: P) -> P:
        """How a value is to lie that a view in the same call shows to one that wants it otherwise: so that the view lies as
        that one wants it."""
        one, made = self._described.get(view), self.made(view)
        if one is None or one.rule is None or not one.is_view or made is None or spec != self.made(node):
            return spec
        ways = self.wanted(view, view.meta.get(CALL)) if CALL in view.meta else []
        if len(ways) != 1 or ways[0] == made:
            return spec
        shapes = tuple(value(node).shape), tuple(value(view).shape)
        for way in _all_ways(self._axes, len(shapes[0]), spec.unreduced):
            found = solved(one.rule, [(way, shapes[0])], [shapes[1]], self._axes, ())
            moves_nothing = self._normal(found.targets[0], node) == self._normal(way, node)
            if moves_nothing and self._normal(found.outs[0], view) == ways[0]:
                return self._normal(way, node)
        return spec


def _all_ways(axes: Mapping[str, int], dims: int, unreduced: Any) -> list[P]:
    """All ways in which a value may lie; sums over these axes alone."""
    found = list[P]()
    for chosen in itertools.product([None, *range(dims), -1], repeat=len(axes)):
        sums = {axis for axis, dim in zip(axes, chosen) if dim == -1}
        if sums <= set(unreduced):
            names = (tuple(axis for axis, at in zip(axes, chosen) if at == dim) for dim in range(dims))
            found.append(P(*names, unreduced=sums))
    return found
