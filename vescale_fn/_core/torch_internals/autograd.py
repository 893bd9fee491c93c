"""Autograd's graph: whether it follows a value, which of its nodes runs."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._C._functorch as _functorch
from torch.autograd import forward_ad as _forward_ad
from torch.autograd import graph as _autograd_graph

from .dtensor import dispatch_to_own

disabled_torch_function = torch._C._disabled_torch_function_impl


_graph_task = torch._C._current_graph_task_id


def in_backward_pass() -> bool:
    """Whether the autograd engine is at work in this thread."""
    return _graph_task() != -1


@functools.cache
def load_forward_rules() -> None:
    """Import what torch imports at its first dual number, without the warning that it uses its own deprecated `torch.jit`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.script. is")
        _forward_ad._maybe_load_decompositions()


def forward_ad_active() -> bool:
    """Whether dual numbers (`torch.autograd.forward_ad`) are in use."""
    return _forward_ad._current_level >= 0


def following_tangents() -> AbstractContextManager[None]:
    """In a Function's `jvp`, in which torch follows no tangent: those of outer transforms are followed all the same."""
    return _forward_ad._set_fwd_grad_enabled(True)


backward_code = _autograd_graph._engine_run_backward.__code__  # of the function in whose call a backward pass runs


def current_autograd_number() -> int:
    """The number of the autograd node that is at work, -1 without one."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def needs_gradient(x: torch.Tensor) -> bool:
    """Whether autograd follows `x`, at any level of transforms."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
        if x.requires_grad:
            return True
    return False


autograd_count = torch.autograd._get_sequence_nr  # how many nodes this thread has made; each knows its number


engine_code = getattr(
    torch.autograd.graph, "_engine_run_backward", dispatch_to_own
).__code__  # the frame of a backward pass
_running = torch._C._current_autograd_node


def running_node() -> int | None:
    """The number of the node whose backward is running in this thread, or None."""
    node = _running()
    return None if node is None else node._sequence_nr()


def made_after(x: torch.Tensor, count: int) -> bool:
    """Whether autograd made `x` when it had already made `count` nodes."""
    return x.grad_fn is not None and x.grad_fn._sequence_nr() >= count


def edges_from_before(outs: Iterable[torch.Tensor], count: int) -> list[tuple[Any, torch.Tensor | None]]:
    """Where the graph of `outs`, of which autograd has made nodes since it had made `count`, leads out of these nodes.

    Returns:
        Pairs of an edge, ``(node, number of its output)``, and the leaf that it belongs to, None for no leaf.
    """
    outs = list(outs)
    todo: list[tuple[Any, int]] = [(x.grad_fn, x.output_nr) for x in outs if x.grad_fn is not None]
    seen: set[Any] = set()
    found: dict[Any, torch.Tensor | None] = {id(x): x for x in outs if x.grad_fn is None}
    while todo:
        node, number = todo.pop()
        leaf = node.variable if node.name().endswith("AccumulateGrad") else None
        if leaf is not None or node._sequence_nr() < count:
            found[node, number] = leaf
        elif node not in seen:
            seen.add(node)
            todo += [edge for edge in node.next_functions if edge[0] is not None]
    return list(found.items())


@contextlib.contextmanager
def ending_at(xs: Iterable[torch.Tensor]) -> Iterator[None]:
    """A block whose backward passes go as far as these tensors: what they were computed of gets no gradient by way of them."""
    nodes = {x.grad_fn for x in xs if x.grad_fn is not None}
    handles = [node.register_prehook(lambda grads: (None,) * len(grads)) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def keeping_tensors() -> contextlib.AbstractContextManager[Any]:
    """A block in which autograd keeps tensors themselves, and not what hooks from outside make of them (`checkpoint`)."""
    if saved_tensor_hooks() is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: (x, x._version), _unchanged)


def _unchanged(kept: tuple[torch.Tensor, int]) -> torch.Tensor:
    x, version = kept
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation"
        )
    return x


def saved_tensor_hooks() -> Any:
    """The functions that pack and unpack what autograd keeps, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
