"""A plan as one CUDA graph: recorded in its first call, replayed by later ones."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ..._core.base.errors import TransformError
from ..._core.base.messages import report
from ..._core.sharding.layout import text
from ..ir import graph as plan
from ..ir.branches import Branches, While
from ..ir.memory_use import call_text, place
from ..ir.nested import Nested, bodies_of
from .stride_checks import each_once

Run = Callable[[list[Any]], tuple[Any, ...]]

_OF_A_KEY = "vfn.random.wrap_key_data(vfn.random.key_data(key).cuda()) for a key"
_COPIES = ("_to_copy", "copy_", "copy", "_foreach_copy_")


def check(graph: fx.Graph) -> None:
    """Raise if a replay, in which the CPU has no part, would leave something of a plan out.

    Raises:
        TransformError: naming all such calls.
    """
    wrong = list(_on_the_cpu(graph))
    if wrong:
        raise TransformError(
            report(
                "jit",
                "with cuda_graph=True the CPU has no part in a call, but it would have in this one",
                wrong,
                f"leave cuda_graph out; torch.where for a choice; device='cuda' where tensors are made; {_OF_A_KEY}",
            )
        )


def _on_the_cpu(graph: fx.Graph) -> Iterator[str]:
    """What a plan does besides launching kernels."""
    for node in plan.calls(graph):
        fact = None
        if isinstance(node.target, (Branches, While)):
            fact = "what runs depends on a value"
        elif isinstance(node.target, plan.Step) and node.target.effect and not isinstance(node.target, Nested):
            fact = "it would happen in the first call alone"
        elif plan.is_aten(node) and _crosses(node):
            fact = "it has tensors on the CPU and on the GPU"
        if fact is not None:
            line = node.meta.get("line", "")
            yield f"{call_text(node)}{f', at {place(line)}' if line else ''}: {fact}"
        for body in bodies_of(node):
            yield from _on_the_cpu(body)


def _crosses(node: fx.Node) -> bool:
    """Whether a call has tensors on several devices; a number beside a tensor is handed over with the launch."""
    given = list(_tensors([plan.value(x) for x in node.all_input_nodes]))
    if plan.name_of(node) not in _COPIES:
        given = [x for x in given if x.ndim or x.device.type != "cpu"] or given
    return len({x.device.type for x in (*given, *_tensors(plan.value(node)))}) > 1


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for x in value:
            yield from _tensors(x)


class Capture(NamedTuple):
    """A graph, where it reads and writes, and what happens when a call of it is over."""

    graph: Any
    inputs: list[torch.Tensor]
    outputs: tuple[Any, ...]
    done: Any


class CudaGraph:
    """A function of tensors on CUDA as a CUDA graph.

    The inputs are copied to where the graph reads them, the results are copied out: the graph's own memory is written again
    by the next replay. Collectives are captured with the rest, where their backend can (NCCL). Calls follow each other, on
    whatever streams and threads they are made.

    Args:
        run: takes the list of its inputs, which it may empty, and gives a tuple.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._lock = run, threading.Lock()
        self._capture: Capture | None = None

    def __call__(self, values: list[Any]) -> tuple[Any, ...]:
        with self._lock:
            if self._capture is None:
                self._capture = self._record(values)
            graph, inputs, outputs, done = self._capture
            torch.cuda.current_stream().wait_event(done)
            _copy(inputs, values)
            values.clear()
            graph.replay()
            outs = [torch.empty_like(x) if isinstance(x, torch.Tensor) else x for x in outputs]
            _copy(outs, outputs)
            done.record()
        return tuple(outs)

    def _record(self, values: Sequence[Any]) -> Capture:
        """The graph of a call.

        Raises:
            TransformError: an input is no tensor on a GPU: a number would stay what it was in the first call.
        """
        wrong = [x for x in values if not (isinstance(x, torch.Tensor) and x.is_cuda)]
        if wrong:
            raise TransformError(
                report(
                    "jit",
                    "with cuda_graph=True all arguments must be tensors on a CUDA device",
                    [text(x) + f" on {x.device}" if isinstance(x, torch.Tensor) else f"the number {x}" for x in wrong],
                    f"x.cuda() for a tensor; torch.tensor(x, device='cuda') for a number; {_OF_A_KEY}",
                )
            )
        inputs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in values]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # libraries set themselves up, communicators are made: what a capture may not do
                _copy(inputs, values)
                self._run(list(inputs))
        torch.cuda.current_stream().wait_stream(side)
        _copy(inputs, values)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self._run(list(inputs))
        return Capture(graph, inputs, outputs, torch.cuda.Event())


def _copy(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    """Copy tensors, those of a dtype in one launch."""
    by_dtype = defaultdict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]](lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        if isinstance(target, torch.Tensor):
            theirs = by_dtype[target.dtype]
            theirs[0].append(each_once(target))
            theirs[1].append(each_once(source))
    for group in by_dtype.values():
        torch.ops.aten._foreach_copy_.default(*group)
