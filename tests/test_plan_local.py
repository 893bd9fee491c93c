"""The passes on local ops, and the code that a plan becomes: the same values, in fewer and cheaper calls."""

from __future__ import annotations

import operator
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.base import tree
from vescale_fn._core.distributed.collectives import Collective
from vescale_fn.plan.execution import codegen
from vescale_fn.plan.ir import graph as plans
from vescale_fn.plan.passes.canonicalize import composites
from vescale_fn.plan.passes.cse import common
from vescale_fn.plan.passes.cse_collectives import once
from vescale_fn.plan.passes.dce import dead
from vescale_fn.plan.passes.foreach import foreach
from vescale_fn.plan.passes.functionalize_writes import writes
from vescale_fn.plan.passes.pointwise_before_views import flat
from vescale_fn.plan.passes.reuse_memory import reuse
from vescale_fn.plan.passes.views import views
from vescale_fn.plan.tracing import trace
from vescale_fn.plan.tracing.earlier import Earlier


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
    for node in plans.calls(new):  # what is written goes on under its own name
        if plans.is_aten(node) and plans.written(node):
            node.replace_all_uses_with(plans.written(node)[0])
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


@pytest.mark.parametrize("name", ["a\nraise SystemExit(7)  #.py", "a\r    raise SystemExit(7)  #.py", "a\udc80.py"])
def test_a_file_of_any_name_is_a_comment_in_a_plan(name):
    x, scope = torch.ones(2), {"torch": torch}
    # `compile` refuses no name, as a file system would
    exec("def f(x):\n    y = x * 2\n    return y.exp() + 1", scope)
    scope["f"].__code__ = scope["f"].__code__.replace(co_filename=f"/tmp/{name}")
    f = vfn.jit(scope["f"])
    assert torch.equal(f(x), (x * 2).exp() + 1)
    assert f.cache_info().records == 1


def test_names_and_numbers_that_print_themselves_as_something_else() -> None:
    class Odd(int):
        def __repr__(self):
            return "1 / 0"

    writer = codegen.Writer({})
    assert eval(writer.text(Odd(3)), writer.globals) == 3
    first, second = writer.globally([], "\N{LATIN SMALL LIGATURE FI}"), writer.globally((), "fi")  # one name to Python
    assert eval(first, writer.globals) == []
    assert eval(second, writer.globals) == ()


def names(graph: fx.Graph) -> list[str]:
    """What a graph calls, in order."""
    return [plans.name_of(node) or node.target.__name__ for node in plans.calls(graph)]


def improved(f: Callable[..., Any], args: Sequence[torch.Tensor], *passes: plans.Pass) -> list[str]:
    """What is called after the passes. The values are compared with the function's own, and what shares memory: the results
    with each other, and with the arguments."""
    graph = recorded(f, *args)
    before = names(graph)
    new = graph
    for one in passes:
        new = one(new)
        new.lint()
    assert names(graph) == before, "a pass changes the graph that it is given"
    ours, theirs = [x.clone() for x in args], [x.clone() for x in args]
    got, wanted = codegen.generate(new).run(list(ours)), f(*theirs)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for a, b in zip((*got, *ours), (*wanted, *theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert a.stride() == b.stride()
    assert shared((*got, *ours)) == shared((*wanted, *theirs))
    return names(new)


def shared(values: Sequence[torch.Tensor]) -> list[tuple[int, bool]]:
    """Of each tensor, the first in whose memory it lies, and whether it is that very tensor."""
    places = [x.untyped_storage().data_ptr() for x in values]
    return [(first := places.index(place), values[first] is x) for place, x in zip(places, values, strict=True)]


x, y = torch.arange(6.0).view(2, 3) + 1, torch.arange(6.0).view(2, 3) / 7


# --- dead code --------------------------------------------------------------------------------------------------------


def test_dead_code_goes() -> None:
    def f(x, y):
        (x * y).exp()
        return x + y

    assert improved(f, (x, y), dead) == ["add"]


def test_writes_stay() -> None:
    def f(x, y):
        z = x * 1
        z[0].mul_(y[1])
        y.add_(1)
        return z

    assert improved(f, (x, y), dead).count("mul_") == 1


def test_a_print_stays() -> None:
    seen = []
    graph = recorded(lambda x: x + 1, x)
    end = plans.output(graph)
    with graph.inserting_before(end):
        node = graph.call_function(plans.Step("print", seen.append, effect=True), (end.args[0][0],))
    node.meta["val"] = None
    assert names(dead(graph)) == ["add", "print"]
    codegen.generate(dead(graph)).run([x])
    assert torch.equal(seen[0], x + 1)


# --- common subexpressions --------------------------------------------------------------------------------------------


def test_equal_calls_are_one() -> None:
    assert improved(lambda x, y: (x * y).exp() + (x * y).exp().sum(), (x, y), common, dead) == [
        "mul",
        "exp",
        "sum",
        "add",
    ]


def test_numbers_that_differ_differ() -> None:
    def f(x, y):
        return y / (x * 0.0), y / (x * -0.0), x.sum(0, keepdim=True) + x.sum(0, keepdim=False)

    assert improved(f, (x, y), common).count("mul") == 2


def test_results_that_lie_apart_stay_apart() -> None:
    def f(x, y):
        return x * y, x * y, (x * y).view(3, 2), (x * y + 1).sum()

    assert improved(f, (x, y), common, views, dead).count("mul") == 3


def test_what_is_changed_in_place_is_not_merged() -> None:
    def f(x, y):
        a, b = x * y, x * y
        before = a.exp()
        a.add_(y)
        return a.sum(), b.sum(), before - a.exp(), torch.zeros(3), torch.zeros(3).add_(1)

    found = improved(f, (x, y), common, dead)
    assert (found.count("mul"), found.count("exp"), found.count("zeros")) == (2, 2, 2)


def test_what_remat_repeats_stays_repeated() -> None:
    graph = recorded(lambda x, y: (x * y).exp() + (x * y).exp() + (x * y).exp(), x, y)
    for node, again in zip(plans.calls(graph), (None, None, 1, 1, None, 1, 1, None), strict=True):
        if again is not None:
            node.meta["again"] = again
    assert names(dead(common(graph))).count("exp") == 2


def collective(graph: fx.Graph, source: fx.Node, **different: Any) -> fx.Node:
    """A sum over the ranks, of a node, after all else."""
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("dp", "tp"))
    settings = {"kind": "all_reduce", "axes": ("tp",), "params": ("sum",), "why": "a"} | different
    with graph.inserting_before(plans.output(graph)):
        node = graph.call_function(Collective(mesh=mesh, **settings), (source,))
    node.meta["val"] = source.meta["val"]
    return node


def with_collectives(f: Callable[..., Any], settings: Sequence[dict[str, Any]]) -> fx.Graph:
    """A graph in which a collective follows each result of `f`, and they are stacked."""
    graph = recorded(f, x, y)
    made = [collective(graph, each, **one) for each, one in zip(plans.output(graph).args[0], settings, strict=True)]
    with graph.inserting_before(plans.output(graph)):
        total = graph.call_function(torch.ops.aten.stack.default, (made,))
    total.meta["val"] = torch.stack([x] * len(made))
    plans.output(graph).args = ((total,),)
    return graph


def test_equal_collectives_are_one() -> None:
    settings = [{}, {"why": "b"}, {"axes": ("dp",)}, {"params": ("max",)}, {}]
    graph = with_collectives(lambda x, y: (z := x * y, z.detach(), z, z, x * y), settings)
    assert names(dead(once(graph))).count("all_reduce") == 3


def test_collectives_of_values_that_may_differ_on_another_rank_stay() -> None:
    """Here the sizes and numbers are equal; a rank with another block, or at another place, may have others."""
    graph = with_collectives(lambda x, y: (x.view(2, 3), x.view(2, 3), y * 0, y * 0, x.clone(), x), [{}] * 6)
    assert names(dead(common(once(graph)))).count("all_reduce") == 6


def test_a_collective_that_remat_repeats_stays_repeated() -> None:
    graph = with_collectives(lambda x, y: (x, x, x), [{}] * 3)
    for again, node in enumerate(plans.collectives(graph)):
        node.meta["again"] = again
    assert names(once(graph)).count("all_reduce") == 3


def test_what_is_computed_again_at_two_times_is_told_apart() -> None:
    """By how many there were before: where a frame lies in memory differs from rank to rank, and is used again."""

    def f(w: torch.Tensor) -> torch.Tensor:
        x = torch.ones(3, 3)
        for _ in range(6):
            x = vfn.remat(lambda x: torch.tanh(x @ w))(x)
        return x.sum()

    leaves, treedef = tree.flatten(((torch.ones(3, 3),), {}))
    graph = trace.trace(vfn.grad(f), leaves, ["w"], treedef, None, Earlier()).graph
    times = [node.meta["again"] for node in plans.calls(graph) if "again" in node.meta]
    assert list(dict.fromkeys(times)) == [1, 2, 3, 4, 5, 6]


TRANSPOSED = {  # of what torch says that it lies otherwise than it does, on arguments out of order
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "the gradient of batch_norm": vfn.grad(lambda x: (F.batch_norm(x, None, None, training=True) * W).sum()),
    "the gradient of layer_norm": vfn.grad(lambda x: (F.layer_norm(x, (5,)) * W).sum()),
    "the gradient of log_softmax": vfn.grad(lambda x: (F.log_softmax(x, 1) * W).sum()),
    "the gradient of softmax": vfn.grad(lambda x: (F.softmax(x * 2, 1) * W).sum()),
    "logsigmoid": F.logsigmoid,
    "a power": lambda x: 2.0**x,
    "a floor": lambda x: torch.div(x, torch.tensor(0.3), rounding_mode="floor"),
}
W = torch.arange(120.0).reshape(4, 5, 6).sin().transpose(1, 2)


@pytest.mark.parametrize("name", TRANSPOSED)
def test_a_view_of_what_lies_otherwise_than_torch_says(name: str) -> None:
    x = torch.arange(120.0).reshape(4, 5, 6).cos()
    f = lambda x: TRANSPOSED[name](x.transpose(1, 2)).transpose(1, 2).reshape(20, 6)
    torch.testing.assert_close(vfn.jit(f)(x), f(x), rtol=0, atol=0)


def test_what_is_seen_conjugated_is_not_written_over() -> None:
    f = vfn.grad(lambda a, b: torch.polar(a, b).real.sum(), argnums=(0, 1))
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -3.0])
    for got, want in zip(vfn.jit(f)(a, b), (b.cos(), -a * b.sin()), strict=True):
        torch.testing.assert_close(got, want)


def test_a_copy_of_what_is_seen_conjugated_is_not() -> None:
    x = torch.polar(torch.tensor([1.0, 2.0]), torch.tensor([0.5, -3.0]))
    f = lambda x: torch.view_as_real((x * 2).conj().resolve_conj())
    assert torch.equal(vfn.jit(f)(x), f(x))


# --- views ------------------------------------------------------------------------------------------------------------


def test_views_of_views_are_one() -> None:
    def f(x, y):
        return (x * y).view(3, 2).detach().unsqueeze(0).view(6) + 1

    assert improved(f, (x, y), views, dead) == ["mul", "view", "add"]


def test_what_changes_nothing_goes() -> None:
    def f(x, y):
        z = (x * y).t().t().permute(1, 0).transpose(0, 1).expand(2, 3).view(2, 3).unsqueeze(0).squeeze(0)
        return z.clone().contiguous().to(torch.float32) + 1

    assert improved(f, (x, y), views, dead) == ["mul", "add"]


def test_dims_of_size_one_move_by_a_view() -> None:
    assert improved(lambda x, y: (x * y).view(2, 1, 3).permute(1, 0, 2).reshape(6) + 1, (x, y), views, dead) == [
        "mul",
        "view",
        "add",
    ]


def test_permutations_are_one() -> None:
    def f(x, y):
        z = torch.stack([x * y, x, y])
        return (
            z.permute(2, 0, 1).transpose(0, 1) + 1,
            z.permute(1, 2, 0).permute(2, 0, 1) + 1,
            (x * y).transpose(0, 1) + 1,
        )

    found = improved(f, (x, y), views, dead)
    assert (found.count("permute"), found.count("transpose"), found.count("t")) == (1, 0, 1)


def test_a_factor_is_not_copied() -> None:
    def f(x, y):
        z = torch.stack([x, y]).transpose(1, 2).unsqueeze(0)
        copied = z.clone(memory_format=torch.contiguous_format).view(2, 3, 2)
        return torch.bmm(copied, torch.stack([x, y]))

    assert "clone" not in improved(f, (x, y), views, dead)


def test_a_copy_that_reorders_stays() -> None:
    assert "clone" in improved(lambda x, y: (x * y).t().contiguous().view(6) + 1, (x, y), views, dead)


def test_a_result_is_no_other_result_and_no_argument() -> None:
    def f(x, y):
        z = x * y
        return z, z.clone(), z.detach(), x.clone(), x.detach(), x.view(6).view(2, 3), x[0].clone()

    improved(f, (x, y), views, dead)


def test_what_is_changed_in_place_keeps_its_copies() -> None:
    def f(x, y):
        z = x * y
        kept, seen = z.clone(), z.view(6)
        z.t().mul_(2)
        return kept.sum(), seen.view(3, 2).sum(), z

    assert "clone" in improved(f, (x, y), views, dead)


# --- writes -----------------------------------------------------------------------------------------------------------


def test_writes_into_what_nobody_shares_are_new_values() -> None:
    def f(x, y):
        z = x * y
        before = z.exp()
        z.add_(1).mul_(y)
        z.clamp_(min=0.5).pow_(3)
        return before, z.sum(), z

    assert improved(f, (x, y), writes) == ["mul", "exp", "add", "mul", "clamp", "pow", "sum"]


def test_other_writes_stay() -> None:
    def f(x, y):
        a, b, c, d = x * y, x + y, x - y, x * 2
        a.view(6).add_(1)  # a view of it
        row = b[0]
        row.mul_(2)
        b.neg_()  # there is a view of it, which is to see that
        c.add_(y.to(torch.float64))  # would be of another dtype
        d[0:1].copy_(y[0:1])
        x.add_(1)  # an argument
        return a, b, c, d, row + 1

    found = improved(f, (x, y), writes)
    assert [name for name in found if name.endswith("_")] == ["add_", "mul_", "neg_", "add_", "copy_", "add_"]


# --- elementwise calls before views -----------------------------------------------------------------------------------


def test_views_cancel_around_what_works_by_elements() -> None:
    a, b, scale = torch.arange(24.0).view(6, 4) / 9, torch.arange(16.0).view(4, 4), torch.arange(4.0) + 1

    def f(a, b, scale):
        h = (a @ b).view(2, 3, 4)
        h = torch.nn.functional.silu(h) * (h.softmax(-1) + scale) / h.mean(-1, keepdim=True)
        total = h.sum((0, 1))
        return h.reshape(6, 4) @ b, total

    found = improved(f, (a, b, scale), views, flat, views, common, dead)
    assert found.count("view") == 0


def test_a_sum_over_the_ranks_comes_before_a_view() -> None:
    graph = recorded(lambda x, y: (x * y).view(3, 2), x, y)
    made = collective(graph, list(plans.calls(graph))[-1])
    made.meta["val"] = plans.output(graph).args[0][0].meta["val"]
    plans.output(graph).args = ((made,),)
    assert names(dead(views(flat(graph)))) == ["mul", "all_reduce", "view"]


def test_calls_that_mean_another_thing_in_another_shape_stay() -> None:
    def f(x, y):
        z = (x * y).view(3, 2)
        by_dim = z.softmax(0) + z.sum(0) + z.cumsum(1)
        scaled = z * torch.arange(3.0).view(3, 1) * torch.arange(2.0)
        wide = (x * y).view(1, 6) * torch.ones(4, 1)
        rows = (x * y).sum(1, keepdim=True) * torch.ones(6, 2)[:2].view(2, 2)
        cube = (x.t() @ y).exp().view(1, 3, 3)
        return (
            rows.view(4, 1).sum(0),
            cube.sum(1),
            cube.expand(1, 3, 3).sum(0),
            z * torch.arange(2.0),
            by_dim,
            scaled,
            wide,
            z.sum((0, 1)),
            z.view(6, 1).sum(-1, keepdim=True) * 2,
            z + x.view(3, 2),
        )

    improved(f, (x, y), views, flat, views, common, dead)


def test_transposed_values_are_not_viewed_wrongly() -> None:
    def f(x, y):
        z = (x * y).t().unsqueeze(0)
        return z.exp() * 2, (z + 1).transpose(1, 2), z.sum(-1, keepdim=True) + z

    improved(f, (x, y), views, flat, views, common, dead)


# --- calls in the form that costs least -------------------------------------------------------------------------------


def test_products_with_a_transposed_matrix() -> None:
    w, b = torch.arange(12.0).view(4, 3) / 5, torch.arange(4.0)

    def f(x, w, b):
        return x @ w.t(), torch.addmm(b, x, w.t()), torch.addmm(x[:, :1], x, w.t()), w.t() @ b[:, None]

    found = improved(f, (x, w, b), composites, dead)
    assert (found.count("linear"), found.count("addmm"), found.count("mm"), found.count("t")) == (2, 1, 1, 2)


def test_products_of_other_dtypes_stay() -> None:
    assert "mm" in improved(lambda x, y: x @ y.t(), (x.to(torch.bfloat16), y.to(torch.bfloat16)), composites)


def test_powers_of_one() -> None:
    n = torch.arange(6).view(2, 3)

    def f(x, n):
        return x.pow(1.0) + 1, x.pow(2.0), n.pow(1.0), x.pow(1.0)

    found = improved(f, (x, n), composites, dead)
    assert found.count("pow") == 3, "an integer to the power of 1.0 is a float, and a result is no argument"


def test_what_is_the_same_along_a_dim_is_computed_once_along_it() -> None:
    def f(x, y):
        rows = x.sum(1, keepdim=True).expand(2, 3)
        kept = (rows * 2).view(-1)
        return (rows / 3).exp() * y, rows + x[0], kept, rows * 3

    improved(f, (x, y), composites, dead)
    graph = recorded(lambda x, y: (x.sum(1, keepdim=True).expand(2, 3) / 3).exp() * y, x, y)
    shapes = {plans.name_of(n): tuple(n.meta["val"].shape) for n in plans.calls(dead(composites(graph)))}
    assert (shapes["div"], shapes["exp"], shapes["mul"]) == ((2, 1), (2, 1), (2, 3))


def test_numbers_are_operands() -> None:
    graph = recorded(lambda x, y: (x * y).requires_grad_(False), x, y)
    (product,) = plans.calls(graph)
    with graph.inserting_after(product):
        scaled = graph.call_function(torch.ops.aten.mul.Scalar, (product, 0.1))
    scaled.meta["val"] = product.meta["val"]
    plans.output(graph).args = ((scaled,),)
    assert [node.target for node in plans.calls(composites(graph))] == [torch.ops.aten.mul.Tensor] * 2
    assert torch.equal(codegen.generate(composites(graph)).run([x, y])[0], x * y * 0.1)


# --- one call for many leaves -----------------------------------------------------------------------------------------

LEAVES = [torch.arange(n * 1.0) + n for n in (3, 5, 1, 4)] + [torch.arange(6.0).view(2, 3).to(torch.float64)]


def momentum(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A step for the first four values, of which the rest are gradients; that of the fifth is in another dtype."""
    out = []
    for param in values:
        grad = param.exp() * 0.1
        mean = grad * 0.9 + param
        out += [mean, param - mean / (mean.sqrt() + 1e-3) * 0.5]
    return tuple(out)


def test_the_same_call_for_many_leaves_is_one() -> None:
    found = improved(momentum, LEAVES, common, dead, foreach)
    assert found.count("_foreach_sqrt") == found.count("_foreach_div") == found.count("_foreach_sub") == 1
    assert found.count("sqrt") == found.count("div") == found.count("sub") == 1, "the leaf of another dtype"


def test_leaves_updated_in_their_memory() -> None:
    found = improved(momentum, LEAVES, common, dead, reuse, foreach)
    assert found.count("_foreach_mul_") >= 2
    assert found.count("sqrt") + found.count("sqrt_") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_meet_lists_of_halves_as_each_of_them(dtype: torch.dtype) -> None:
    """A number that lists of halves are multiplied by in place is not rounded to a half."""
    halves, share = [torch.linspace(-3, 2, n).to(dtype) for n in (99, 70, 80)], torch.tensor(1 / 3, dtype=torch.float64)

    def f(share, *values):
        ops = "mul_", "add_", "sub_", "div_", "mul", "add", "sub", "div"
        for op in ops:
            for by in (0.1, 3, share, share.float()):
                if op[:3] != "sub" or not isinstance(by, torch.Tensor):
                    values = [getattr(x, op)(by) for x in values]
        return tuple(values)

    found = improved(f, [share, *halves], foreach)
    lists = [name for name in found if name.startswith("_foreach")]
    assert len(lists) == 28
    assert set(found) - set(lists) == {"_to_copy", "scalar_tensor", "getitem"}


def test_what_is_seen_by_another_name_is_written() -> None:
    def f(*values):
        out = []
        for value in values:
            divisor = value.exp()
            seen = divisor.view(-1)
            torch.div(value, divisor, out=divisor)
            out += [divisor, seen]
        return tuple(out)

    improved(f, [x, y], foreach)


def test_large_leaves_stay_where_they_are() -> None:
    large = [torch.arange(1.0 + (1 << 16)), torch.arange(2.0 + (1 << 16))]
    found = improved(lambda a, b: (a * 2 + 1, b * 2 + 1), large, foreach)
    assert found == ["mul", "add", "mul", "add"]


def test_calls_that_must_not_wait_do_not() -> None:
    def f(a, b, c):
        a2, b2 = a * 2, b * 2
        total = (a2.sum() + b2.sum()) * c  # needs them before the end
        a3, b3 = a2 + a, b2 + b
        a.mul_(3)  # what was read of `a` was read before
        c2, c3 = c * a[0], c * a[0] * b[0]
        b3.view(-1)[0:2].mul_(2)
        return total, a3, b3, c2, c3

    three = [torch.arange(3.0) + n for n in (1, 2, 3)]
    assert not any("foreach" in name for name in improved(f, three, foreach))


def test_calls_over_each_other_keep_their_order() -> None:
    def f(a, b):
        c, d = a.exp(), b.exp()
        c.mul_(2), d.mul_(2)
        c.add_(d), d.add_(c)
        d.mul_(3), c.mul_(3)
        return c, d

    found = improved(f, [x, y], foreach)
    assert (
        found == ["exp", "exp", "_foreach_mul_", "add_", "add_", "_foreach_mul_"] or found.count("_foreach_mul_") == 2
    )


# --- the code ---------------------------------------------------------------------------------------------------------

NUMBERS = (0.1, 3, -0.0, 1e-30, float("inf"), float("nan"), 2**25 + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_numbers_beside_tensors_keep_their_bits(dtype: torch.dtype) -> None:
    values = (torch.arange(7) - 3).to(dtype)

    def f(values):
        out = [g(v, n) for n in NUMBERS for v in (values, values[2]) for g in (torch.mul, torch.add, torch.div)]
        return tuple(out)

    for a, b in zip(codegen.generate(recorded(f, values)).run([values]), f(values), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(a), torch.signbit(b))


def test_each_value_goes_after_its_last_use() -> None:
    """What is alive at each call, seen from a step that notes it."""
    alive: list[int] = []
    kept: list[Any] = []

    def look(value: torch.Tensor) -> torch.Tensor:
        alive.append(sum(ref() is not None for ref in kept))
        out = value.clone()
        kept.append(weakref.ref(out))
        return out

    graph = recorded(lambda x: x * 1, x)
    (node,) = plans.calls(graph)
    for _ in range(4):
        with graph.inserting_after(node):
            after = graph.call_function(plans.Step("look", look), (node,))
        after.meta["val"], node = node.meta["val"], after
    plans.output(graph).args = ((node,),)
    codegen.generate(graph).run([x])
    assert alive == [0, 1, 1, 1]


def test_the_node_of_an_error() -> None:
    def fails(value: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    graph = recorded(lambda x: (x * 2).exp(), x)
    exp = list(plans.calls(graph))[-1]
    with graph.inserting_after(exp):
        step = graph.call_function(plans.Step("fails", fails), (exp,))
    step.meta["val"], step.meta["line"] = exp.meta["val"], "train.py:3"
    plans.output(graph).args = ((step,),)
    code = codegen.generate(graph)
    with pytest.raises(ValueError, match="no") as caught:
        code.run([x])
    assert code.node_of(caught.value) is step
    text = "".join(traceback.format_exception(caught.value))
    assert "(exp)" in text, "the traceback shows the plan's line"
    assert code.node_of(ValueError()) is None


def test_values_that_are_no_literals() -> None:
    def f(x, y):
        made = torch.full((2,), float("inf"), dtype=torch.float64), torch.arange(3, device="cpu")
        return x.to(torch.float64), *made, x.clamp(max=float("inf")), torch.topk(x, 2)[1], x.max(1)[0]

    found = codegen.generate(recorded(f, x, y))
    for a, b in zip(found.run([x, y]), f(x, y), strict=True):
        assert torch.equal(a, b)


def test_replays_under_modes_and_with_parameters() -> None:
    """A replay is the ops alone: no default device of the user's, no gradient."""
    code = codegen.generate(recorded(lambda x, y: (x * y, torch.zeros(2)), x, y))
    given = torch.nn.Parameter(x)
    with torch.device("meta"):
        out, zeros = code.run([given, y])
    assert (out.device.type, zeros.device.type, out.requires_grad, out.is_inference()) == ("cpu", "cpu", False, False)
    out.requires_grad_().add(1).sum().backward()
    assert torch.equal(out.grad, torch.ones_like(x))


def _sums() -> None:
    mesh = vfn.make_mesh((2, 2), ("a", "b"))
    rank = torch.distributed.get_rank()
    w = vfn.shard(torch.arange(12.0).view(4, 3), mesh, P("a"))

    def f(w, x):
        part = x @ w  # x is split along the dim that is summed over
        return (
            vfn.with_sharding(part, P()),
            vfn.with_sharding(part * 2, P()),
            vfn.with_sharding((x * 2) @ w, P()) + 1,
            w.sum(),
        )

    x = vfn.shard(torch.arange(20.0).view(5, 4), mesh, P(None, "a"))
    g = vfn.jit(f)
    for _ in range(3):
        for ours, eager in zip(g(w, x), f(w, x), strict=True):
            assert torch.equal(vfn.unshard(ours), vfn.unshard(eager)), rank
    with vfn.comm_log() as log:
        g(w, x)
    assert log.count("all_reduce") == len([r for r in g.lower(w, x).comms() if r.op == "all_reduce"]) > 0


def test_sums_on_real_ranks(gloo) -> None:
    gloo(4, _sums)


def test_no_view_where_torchs_kernel_makes_another_layout_than_is_said_of_it():
    def loss(x):
        return F.softplus(x).unsqueeze(-1).movedim(0, -1).mul(1).sum() + x.flatten()[2:].sum()

    x = torch.randn(6, 8, dtype=torch.float64)[:, ::2]
    assert torch.equal(vfn.jit(vfn.grad(loss))(x), vfn.grad(loss)(x))


def test_an_empty_slice_of_a_dim_of_size_one():
    f = vfn.jit(lambda a, b: ((a + b * 0.5)[1:], (a.exp() - 1).narrow(0, 0, 1)))
    a, b = torch.randn(1, 3), torch.randn(3)
    assert torch.equal(f(a, b)[0], torch.empty(0, 3))
    assert torch.equal(f(a, b)[1], a.exp() - 1)
