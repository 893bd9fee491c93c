"""Calls that move values of a plan to the memory of the host, and back: each copy is begun by one and waited for by another.

``offload`` begins to copy a value, and after ``offloaded`` its memory on the device is free; ``fetch`` makes new memory and
begins to copy it back, and ``fetched`` gives the value. In between the device computes other things.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..._core.base.host_memory import Arriving, HostMemory, OnHost
from .graph import Step


def offload(x: torch.Tensor) -> OnHost:
    """Begin to copy a value to the host; the code of a plan has memory for it that is kept from call to call."""
    return HostMemory().offload(x)


def offloaded(sent: OnHost, x: torch.Tensor) -> OnHost:
    """Wait until it is copied. It stays until then."""
    return sent.left()


def fetch(sent: OnHost) -> Arriving:
    """Begin to copy it back."""
    return sent.fetch()


def fetched(coming: Arriving) -> torch.Tensor:
    """Wait until it is there."""
    return coming.fetched()


FUNCTIONS = (offload, offloaded, fetch, fetched)
_STEPS = {run: Step(run.__name__, run, views=(0,) if run is fetched else ()) for run in FUNCTIONS}


def runs(node: fx.Node) -> Any:
    """Which of `FUNCTIONS` a node calls; None where it calls none."""
    target = node.target
    return target.run if isinstance(target, Step) and target.run in _STEPS else None


def inserted(before: fx.Node, run: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    """A call of one of `FUNCTIONS` before a node, for the value `like`."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(_STEPS[run], args)
    there = run in (fetch, fetched)
    node.meta = {"val": like.meta["val"] if there else None, "line": like.meta.get("line", "")}
    return node
