"""The functions of torch that a step's own code calls: the places where `with_sharding` can be written.

A step runs several times, on tensors of one device and on arrays, and makes the same calls each time. What a library calls
inside, torch's or this one, is no call of the step's own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import fx

from .._core import torch_internals
from .._core.base import op_arguments, source_lines

# What is noted of nodes: the number of a call, and places in it.
CALL, GIVEN, GIVES = "user_call", "user_given", "user_gives"
_TORCH = torch.__path__[0]


class UserCall(NamedTuple):
    """A function of torch that the step's own code calls.

    Attributes:
        line: as ``file:line``.
        name: of the function.
        shapes: of the tensors that it gives.
    """

    line: str
    name: str
    shapes: tuple[tuple[int, ...], ...]


class UserCalls(torch_internals.TorchFunctionMode):
    """A mode that sees the calls of the step's own code."""

    of_recording = True  # a plan that is recorded meanwhile is the same

    def __enter__(self) -> Any:
        recorder: Any = torch_internals.recorder()
        if recorder is not None:  # an iteration that it takes for another one's would not be seen
            recorder.counted = None
        return super().__enter__()

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        line = _own_line(sys._getframe(1))
        return func(*args, **kwargs) if line is None else self.called(line, func, args, kwargs)

    def called(self, line: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a call gives."""
        raise NotImplementedError


class NotedCalls(UserCalls):
    """Notes, while a step is recorded, its calls, and of the nodes which of them they belong to.

    Attributes:
        noted: the calls that give tensors, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.noted = list[UserCall]()

    def called(self, line: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        recorder: Any = torch_internals.recorder()
        before = _last(recorder.graph)
        out = func(*args, **kwargs)
        given, gives = op_arguments.tensors_in((args, kwargs)), op_arguments.tensors_in(out)
        if not gives:
            return out
        number = len(self.noted)
        for node in reversed(recorder.graph.nodes):
            if node is before or node.op == "placeholder":
                break
            node.meta.setdefault(CALL, number)
        for name, xs in ((GIVEN, given), (GIVES, gives)):
            for i, x in enumerate(xs):
                if (node := getattr(torch_internals.peel(x), "_plan_node", None)) is not None:
                    node.meta[name] = (*node.meta.get(name, ()), (number, i))
        self.noted.append(called(line, func, gives))
        return out

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step, seen while it runs."""

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.noted = []  # it may run more than once
            with self:
                return step(*args, **kwargs)

        return run


def called(line: str, func: Callable[..., Any], gives: Sequence[torch.Tensor]) -> UserCall:
    """A call, as it is known again."""
    return UserCall(line, _name(func), tuple(tuple(x.shape) for x in gives))


def shown(graph: fx.Graph, name: str) -> Mapping[tuple[int, int], fx.Node]:
    """The nodes of what calls are given (`GIVEN`), or give (`GIVES`): by the number of the call, and which tensor it is."""
    return {key: node for node in graph.nodes for key in node.meta.get(name, ())}


def _last(graph: fx.Graph) -> fx.Node | None:
    return next(iter(reversed(graph.nodes)), None)


def _own_line(frame: FrameType | None) -> str | None:
    """The line that calls a function of torch, where that is the step's own code. Another mode may have handed the call on; one
    that does so twice looks inside of a function of torch."""
    handed_on = 0
    while frame is not None:
        handed_on += (is_mode := frame.f_code.co_name == "__torch_function__")
        if not (is_mode or frame.f_code.co_filename.startswith(_TORCH)) or handed_on > 1:
            break
        frame = frame.f_back
    if frame is None or handed_on > 1 or not source_lines.is_users(frame.f_code.co_filename):
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name
