"""A plan on CUDA whose values lie in one segment of memory: in a pool of torch's allocator that is the plan's own.

The segment has the size of the plan's arena (`ir.arena`). Where in it a value lies, torch's allocator says, whatever operator
makes it: in the best fit, which leaves gaps. Where it had to ask CUDA for more, the next call has a segment that is larger by
that. Results are made outside, so that between two calls nothing is left in the pool.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..ir import graph as plan
from ..ir import memory_aliases
from ..ir.arena import arena

Run = Callable[[list[Any]], tuple[Any, ...]]

_ALIGNMENT = 512  # bytes; that of CUDA's allocator


class _Pool:
    """A pool with a segment, for one call at a time."""

    def __init__(self, bytes: int) -> None:
        torch.cuda.empty_cache()  # what calls without it have left would stand beside it
        self._pool, self._inside = torch.cuda.MemPool(), contextlib.ExitStack()
        with torch.cuda.use_mem_pool(self._pool):
            torch.empty(bytes, dtype=torch.uint8, device="cuda")

    def enter(self) -> None:
        """From now on what this thread makes lies in it."""
        self._inside.enter_context(torch.cuda.use_mem_pool(self._pool))

    def leave(self) -> None:
        """From now on it lies elsewhere, if it does not yet."""
        self._inside.close()

    def segments(self) -> list[int]:
        """The bytes of each segment for values of a megabyte and more; for small ones torch has others, of two megabytes."""
        return [segment["total_size"] for segment in self._pool.snapshot() if segment["segment_type"] == "large"]


class InPool:
    """The function of a graph that is `apart`, in a pool.

    Args:
        run: takes the list of its inputs, and the pool besides.
        bytes: of the segment.
    """

    def __init__(self, run: Run, bytes: int) -> None:
        self._run, self._bytes = run, bytes
        self._free: dict[Any, list[_Pool]] = defaultdict(list)  # by stream: calls on one follow each other
        self._warm = False

    def __call__(self, values: list[Any]) -> tuple[Any, ...]:
        if not self._warm:  # in a first call libraries make what they keep
            values.append(None)
            outs = self._run(values)
            self._warm = True
            return outs
        free = self._free[torch.cuda.current_stream()]
        try:
            pool, new = free.pop(), False
        except IndexError:
            pool, new = _Pool(self._bytes), True
        values.append(pool)
        pool.enter()
        try:
            outs = self._run(values)
        finally:
            pool.leave()
        if new and len(found := pool.segments()) > 1:
            self._bytes = max(self._bytes, sum(found))
        else:
            free.append(pool)
        return outs


def is_for(graph: fx.Graph) -> bool:
    """Whether a plan computes on CUDA."""
    values = (plan.value(node) for node in plan.calls(graph))
    return any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in values)


def size(graph: fx.Graph) -> int:
    """The bytes that a plan needs at once for what it makes, results included."""
    return arena(graph, _ALIGNMENT).bytes


def apart(graph: fx.Graph) -> fx.Graph:
    """The graph that takes its pool as its last input, and leaves it to make what is given back."""
    graph = plan.copied(graph)
    given_back = {
        memory.maker for memory, last in memory_aliases.last_uses(graph).items() if last is plan.output(graph)
    }
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(next(iter(graph.nodes))):
        pool = graph.placeholder("pool")
    pool.meta = {"val": None, "line": ""}
    outside = False
    for node in list(plan.calls(graph)):
        if (node in given_back) == outside or (outside and plan.viewed(node)):
            continue
        outside = node in given_back
        with graph.inserting_before(node):
            step = graph.call_function(_LEAVE if outside else _ENTER, (pool,))
        step.meta = {"val": None, "line": ""}
    return graph


def _leave(pool: _Pool | None) -> None:
    if pool is not None:
        pool.leave()


def _enter(pool: _Pool | None) -> None:
    if pool is not None:
        pool.enter()


_LEAVE, _ENTER = plan.Step("leave", _leave, effect=True), plan.Step("enter", _enter, effect=True)
