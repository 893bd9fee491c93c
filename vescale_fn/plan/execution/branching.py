"""A choice between branches and a loop of unknown length as Python functions, of the generated code of their bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..._core.distributed.blocks import Blocks
from ..ir.branches import shared
from ..ir.graph import value
from ..ir.nested import bodies_of, ends

Body = Callable[[list[Any]], Sequence[Any]]


class Branching:
    """The function of a choice.

    Args:
        node: its call.
        bodies: the functions of its branches, each of which empties the list that it is given.
    """

    def __init__(self, node: fx.Node, *bodies: Body) -> None:
        self.bodies = [(body, _finish(value(node), graph)) for body, graph in zip(bodies, bodies_of(node), strict=True)]

        self.read: int = node.target.read  # type: ignore[union-attr]

    def __call__(self, *args: Any) -> list[Any]:
        body, finish = self.bodies[int(_agreed(args[: self.read]))]
        values = list(args[self.read :])
        del args
        outs = list(body(values))
        for i, finished in finish:
            outs[i] = finished(outs[i])
        return outs


def _agreed(values: Sequence[torch.Tensor]) -> Any:
    """The number that simulated ranks have; an error where it is not one."""
    return values[0] if len(values) == 1 else Blocks(values).item()


def _anywhere(values: Sequence[torch.Tensor]) -> bool:
    return any(map(bool, values))


def _finish(vals: Sequence[Any], body: fx.Graph) -> list[tuple[int, Callable[[Any], Any]]]:
    """What is to be done with the results of a branch: those that share memory are copied, and in the place of those that other
    branches give stand zeros, which take no memory."""
    nothing = [(i, _zeros(vals[i])) for i, out in enumerate(ends(body)[1]) if out is None]
    return [*nothing, *((i, torch.clone) for i in shared(body))]


def _zeros(val: Any) -> Callable[[Any], Any]:
    if not isinstance(val, torch.Tensor):
        return lambda _: val
    shape, dtype, device = val.shape, val.dtype, val.device
    return lambda _: torch.zeros((), dtype=dtype, device=device).expand(shape)


class Repeating:
    """The function of a loop of unknown length.

    Args:
        node: its call.
        test, body: the functions of its condition and of an iteration, each of which empties the list that it is given.
    """

    def __init__(self, node: fx.Node, test: Body, body: Body) -> None:
        self.carry: int = node.target.carry  # type: ignore[union-attr]
        self.holds = _anywhere if node.target.apart else _agreed  # type: ignore[union-attr]
        self.test, self.body, self.shared = test, body, shared(bodies_of(node)[1])

    def __call__(self, *args: Any) -> list[Any]:
        test, body, values = self.test, self.body, list(args[: self.carry])
        same, copied = list(args[self.carry :]), range(self.carry)  # what comes out as it went in is the caller's
        del args
        while self.holds(test([*values, *same])):
            values += same
            values, copied = list(body(values)), self.shared
        for i in copied:
            values[i] = values[i].clone()
        return values
