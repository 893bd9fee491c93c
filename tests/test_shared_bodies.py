"""Calls of a plan that share a body: improved once, one function of the plan's code, the values of the inlined nodes."""

import functools
import json
import operator

import pytest
import torch
from torch import fx
from torch.testing import assert_close

from vescale_fn.plan.execution.codegen import generate
from vescale_fn.plan.ir.graph import copied
from vescale_fn.plan.ir.nested import everywhere, nested
from vescale_fn.plan.ir.shared_bodies import Shared, inlined
from vescale_fn.plan.lowered import Lowered
from vescale_fn.plan.passes.kept_calls import kept
from vescale_fn.plan.pipeline import PASSES
from vescale_fn.plan.saved.graph_data import GraphReader, GraphWriter
from vescale_fn.plan.saved_plans import _empty

aten, SQUARE = torch.ops.aten, torch.empty(3, 3, device="meta")


def _given(graph, *names):
    found = [graph.placeholder(name) for name in names]
    for x in found:
        x.meta.update(val=SQUARE, line="")
    return found


def _called(graph, target, *args, val=SQUARE):
    node = graph.call_function(target, args)
    node.meta.update(val=val, line="model.py:1")
    return node


def _ended(graph, *outs):
    graph.output(outs).meta.update(val=None, line="")
    return graph


def layers(count):
    """``x = tanh(x @ w)`` for each w, by calls of one body that gives its argument and something unused besides; all x."""
    body = fx.Graph()
    x, w = _given(body, "x", "w")
    y = _called(body, aten.mm.default, x, w)
    shared = Shared(bodies=(_ended(body, _called(body, aten.tanh.default, y), x, _called(body, aten.sin.default, y)),))
    graph, given = fx.Graph(), []
    x, *ws = _given(graph, "x", *(f"w{i}" for i in range(count)))
    for w in ws:
        call = _called(graph, shared, x, w, val=[SQUARE] * 3)
        x, before = (_called(graph, operator.getitem, call, i) for i in range(2))
        given.append(before)
    return _ended(graph, x, *given)


def improved(graph):
    graph = copied(graph)
    for one in PASSES:
        graph = everywhere(functools.partial(kept, many=2) if one is kept else one, graph)
    graph.__dict__.pop("_given_up", None)
    return graph


def read_again(graph):
    data = json.loads(json.dumps(GraphWriter().graph(graph)))
    return GraphReader([], [], [], lambda shape, stride, dtype, device: _empty()(shape, stride, dtype, device)).graph(
        data
    )


@pytest.mark.parametrize("made", [lambda graph: graph, improved, inlined, read_again])
def test_values(made) -> None:
    values = list(torch.linspace(-1, 1, 5 * 9).view(5, 3, 3).unbind())
    x, before = values[0], []
    for w in values[1:]:
        before.append(x)
        x = torch.tanh(x @ w)
    code = generate(made(layers(4)))
    assert_close(code.run(values), (x, *before), rtol=0, atol=0)


def test_what_is_shared_stays_shared_and_is_written_once() -> None:
    graph = improved(layers(4))
    assert len({node.target for node in nested(graph)}) == 1
    assert generate(graph).source.count(".tanh") == 1
    assert json.dumps(GraphWriter().graph(graph)).count('"nested": "shared"') == 1
    assert len({node.target for node in nested(read_again(graph))}) == 1
    assert Lowered(graph, "f").arena().least <= Lowered(layers(5), "f").arena().least


def test_a_result_is_memory_of_its_own() -> None:
    x, w = torch.ones(3, 3), torch.ones(3, 3)
    _, before = generate(layers(1)).run([x, w])
    before.zero_()
    assert_close(x, torch.ones(3, 3))


def test_inlined_is_the_graph_without_calls() -> None:
    plain = inlined(improved(layers(4)))
    plain.lint()
    assert not nested(plain)
    assert Lowered(plain, "f").text().startswith("f: 8 calls, no collective")
