"""The passes on local ops, and the code that a plan becomes: the same values, in fewer and cheaper calls."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from vescale_fn.plan import codegen
from vescale_fn.plan import graph as plans


def recorded(f: Callable[..., Any], *args: torch.Tensor) -> fx.Graph:
    """The graph of a function of plain tensors, as a plan would have it."""
    graph = make_fx(f, tracing_mode="fake")(*args).graph
    new = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        values[node] = new.node_copy(node, values.__getitem__)
        values[node].meta["line"] = "program.py:7"
        if node.target is operator.getitem:
            values[node].meta.setdefault("val", node.args[0].meta["val"][node.args[1]])
    end = plans.output(new)
    if isinstance(end.args[0], fx.Node):
        end.args = ((end.args[0],),)
    return new


def test_generate() -> None:
    args = torch.randn(2, 4), torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)

    def step(x, w, b):
        y = F.layer_norm(F.linear(x, w, b) * 0.5 + 1, (4,))
        top, _ = y.topk(2)
        return torch.autograd.grad(
            (y.view(4, 2).softmax(-1).log() / 3.0).mean() + top.sum() + y.max(0)[0].sum(), (w, b)
        )

    graph = recorded(step, *args)
    code = codegen.generate(graph)
    for a, b in zip(code.run(list(args)), step(*args), strict=True):
        assert torch.equal(a, b)
