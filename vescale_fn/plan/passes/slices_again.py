"""Slices that stopped where the body of an equal call began move on when it has been inlined."""

from __future__ import annotations

import torch
from torch import fx

from ..._core import torch_internals
from ..ir.graph import given_up
from .cse import common
from .dce import dead
from .reduce_scatter import scatter
from .slice_draws import draws
from .views import views


def sliced(graph: fx.Graph) -> fx.Graph:
    """The graph that makes only what is used, also of what calls were inlined for; sums of which less is made are scattered."""
    if not any(x.args[0].op == "call_function" for x in torch_internals.calls_of(graph, _is_slice)):  # type: ignore
        return graph
    graph = draws(graph)
    for improve in (scatter, views, common, dead):
        graph = improve(given_up(graph))
    return graph


def _is_slice(target: object) -> bool:
    return target in (torch.ops.aten.narrow.default, torch.ops.aten.slice.Tensor)
