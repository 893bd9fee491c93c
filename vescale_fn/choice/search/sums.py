"""In which dtype values of a recorded step are added up over ranks, where a `vfn.precision.policy` says that.

A recording is one of a single device, which adds nothing up; it knows in which dtype sums were to be made when a call was
recorded. Partial sums that are only cast to a dtype that holds as much, as gradients are to that of their parameters, are added
up behind the cast: in front of it the sum would be rounded before it is cast.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ...plan.ir.graph import SUMS, name_of, value, viewed, written
from .layouts import CallLayout


def summed(node: fx.Node, x: torch.Tensor) -> torch.dtype:
    """The dtype in which what a node gives is added up."""
    wide = node.meta.get(SUMS)
    return torch.promote_types(x.dtype, wide) if wide is not None and x.is_floating_point() else x.dtype


def itemsizes(node: fx.Node, x: torch.Tensor) -> tuple[int, int]:
    """The bytes of an element, and those in which it is added up."""
    return x.element_size(), summed(node, x).itemsize


def sums_in(*nodes: fx.Node) -> torch.dtype | None:
    """In which dtype, of what is narrower, sums were to be made when one of these was recorded; None: each in its own."""
    said = [node.meta[SUMS] for node in nodes if SUMS in node.meta]
    return functools.reduce(torch.promote_types, said) if said else None


class Widened(NamedTuple):
    """What is done to partial sums before they are added up.

    Attributes:
        calls: a cast, and the views between it and what made the partial sums, in order.
        spec: how what the cast gives is to lie.
    """

    calls: tuple[fx.Node, ...]
    spec: Any


def widened(
    nodes: Sequence[fx.Node], stated: Mapping[str, CallLayout], hot: Container[fx.Node]
) -> dict[fx.Node, Widened]:
    """Of what makes partial sums that only a cast reads, to what holds as much as they are added up in, what is done first.

    Args:
        nodes: the calls of a recorded step, in order.
        stated: their layouts.
        hot: those whose memory is written after they were made.
    """
    found = dict[fx.Node, Widened]()
    for cast in nodes:
        if SUMS not in cast.meta or name_of(cast) != "_to_copy" or cast.name not in stated:
            continue
        chain = [cast]
        while (first := _only_operand(chain[0])) is not None and _only_renamed(first):
            chain.insert(0, first)
        if first is None or len(first.users) > 1 or any(x in hot or x.name not in stated for x in (first, *chain)):
            continue
        call, x = stated[first.name], value(first)
        if len(call.outs) == 1 and call.outs[0].unreduced and isinstance(x, torch.Tensor):
            sums = summed(first, x)
            if sums is not x.dtype and torch.promote_types(sums, value(cast).dtype) is value(cast).dtype:
                found[first] = Widened(tuple(chain), stated[cast.name].outs[0])
    return found


def _only_operand(node: fx.Node) -> fx.Node | None:
    """What makes the one operand of a call."""
    (x, *others) = node.all_input_nodes or (None,)
    return x if not others else None


def _only_renamed(node: fx.Node) -> bool:
    """Whether a value is a view that nothing but one call reads."""
    return node.op == "call_function" and len(node.users) == 1 and bool(viewed(node)) and not written(node)
