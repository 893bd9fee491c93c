"""Python loops whose iterations are recorded once: the plan is that of all iterations, whatever the loop does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.plan.ir.nested import nested
from vescale_fn.plan.passes.equal_parts import equal_parts
from vescale_fn.plan.tracing import repeated

LAYERS, DIM = 18, 4
PASSES = tuple(p for p in vfn.plan.PASSES if p is not equal_parts)


def layers(count: int = LAYERS) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"norm": (DIM,), "up": (DIM, 2 * DIM), "gate": (DIM, 2 * DIM), "down": (2 * DIM, DIM)}
    return [{k: torch.randn(s, generator=generator) / 2 for k, s in shapes.items()} for _ in range(count)]


X = torch.arange(3.0 * DIM).view(3, DIM) / 10


def block(p: Any, x: Any) -> Any:
    h = F.rms_norm(x, (DIM,), p["norm"], 1e-5)
    h = F.silu(h @ p["gate"]) * (h @ p["up"])
    first, second = h.chunk(2, -1)
    h = torch.cat([second, first * 0.5], -1)
    return x + (h - h.mean(-1, keepdim=True)) @ p["down"] / 4.0


def calls_of(f: Callable[..., Any], *args: Any) -> int:
    """How many iterations are calls in the plan for a function, whose results are those of the function itself."""
    torch.testing.assert_close(vfn.jit(f)(*args), f(*args))
    lowered = vfn.jit(f, passes=()).lower(*args)
    return sum(node.target.name == "shared" for node in nested(lowered.graph))


def grads(f: Callable[..., Any]) -> Callable[..., Any]:
    return vfn.value_and_grad(lambda params, x: f(params, x).square().mean(), argnums=(0, 1))


def chain(params: Any, x: Any) -> Any:
    for p in params:
        x = block(p, x)
    return x


def test_each_iteration_is_a_call() -> None:
    assert calls_of(chain, layers(), X) == LAYERS - 6
    assert calls_of(grads(chain), layers(), X) == 2 * (LAYERS - 6)


def test_few_iterations_are_recorded_as_they_are() -> None:
    assert calls_of(grads(chain), layers(8), X) == 0


def test_all_of_the_loops_python_runs() -> None:
    seen: list[Any] = []

    def f(params: Any, x: Any) -> Any:
        seen.clear()
        for i, p in enumerate(params):
            x = block(p, x)
            seen.append((i, tuple(x.shape)))
        return x

    vfn.jit(f)(layers(), X)
    assert seen == [(i, (3, DIM)) for i in range(LAYERS)]


def one_is_another(params: Any, x: Any) -> Any:
    for i, p in enumerate(params):
        x = block(p, x)
        if i == 14:
            x = torch.tanh(x)
    return x


def one_ends_otherwise(params: Any, x: Any) -> Any:
    for i, p in enumerate(params):
        h = F.silu(F.rms_norm(x, (DIM,), p["norm"], 1e-5) @ p["gate"]) * (x @ p["up"])
        h = (h.sin() + h.cos()).neg().exp().clamp(max=2.0)
        x = x + (h if i == 13 else h * 2) @ p["down"] / 4.0
    return x


def an_inner_value_is_kept(params: Any, x: Any) -> Any:
    kept = []
    for p in params:
        h = F.rms_norm(x, (DIM,), p["norm"], 1e-5)
        kept.append(h)
        h = F.silu(h @ p["gate"]) * (h @ p["up"])
        h = (h.sin() + h.cos()).neg().exp().clamp(max=2.0)
        x = x + h @ p["down"] / 4.0
    return x + sum(kept)


def an_inner_value_of_the_one_before(params: Any, x: Any) -> Any:
    before = x
    for i, p in enumerate(params):
        h = F.rms_norm(x, (DIM,), p["norm"], 1e-5)
        taken, before = (before if i == 15 else h), h
        h = F.silu(taken @ p["gate"]) * (taken @ p["up"])
        h = (h.sin() + h.cos()).neg().exp().clamp(max=2.0)
        x = x + h @ p["down"] / 4.0
    return x


def all_results_are_kept(params: Any, x: Any) -> Any:
    kept = []
    for p in params:
        x = block(p, x)
        kept.append(x)
    return torch.stack(kept).sum(0)


def a_number_differs(params: Any, x: Any) -> Any:
    for i, p in enumerate(params):
        x = block(p, x * (1.0 if i != 16 else 1.5))
    return x


def a_weight_is_taken_twice(params: Any, x: Any) -> Any:
    for i, p in enumerate(params):
        x = block({**p, "gate": p["up"]} if i == 15 else p, x)
    return x


def one_is_not_followed(params: Any, x: Any) -> Any:
    for i, p in enumerate(params):
        with torch.set_grad_enabled(i != 15):
            x = block(p, x)
    return x


def part_of_each_is_not_followed(params: Any, x: Any) -> Any:
    for p in params:
        with torch.no_grad():
            scale = x.abs().mean().exp()
        x = block(p, x) / scale
    return x


def some_are_of_another_shape(params: Any, x: Any) -> Any:
    for i, p in enumerate(params):
        x = block(p, torch.cat([x, x]) if i == 14 else x)
    return x


def by_a_custom_function(params: Any, x: Any) -> Any:
    for p in params:
        x = _Doubled.apply(block(p, x)) / 2
    return x


def checkpointed(params: Any, x: Any) -> Any:
    for p in params:
        x = vfn.remat(block)(p, x)
    return x


def by_writes(params: Any, x: Any) -> Any:
    for p in params:
        h = block(p, x) * 2
        h += x
        h.mul_(0.5)
        x = h - x / 2
    return x


def by_drawing(params: Any, x: Any) -> Any:
    for i, p in enumerate(params):
        key = vfn.random.fold_in(vfn.random.key(1), i)
        x = block(p, x) + vfn.random.normal(key, x.shape)
    return x


def by_attributes(params: Any, x: Any) -> Any:
    for p in params:
        x = block(p, x)
        x = x if x.grad_fn is None else x * 1.0
    return x


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return grad * 3


@pytest.mark.parametrize(
    "f",
    [
        one_is_another,
        one_ends_otherwise,
        an_inner_value_is_kept,
        an_inner_value_of_the_one_before,
        all_results_are_kept,
        a_number_differs,
        a_weight_is_taken_twice,
        one_is_not_followed,
        part_of_each_is_not_followed,
        some_are_of_another_shape,
        by_a_custom_function,
        checkpointed,
        by_writes,
        by_drawing,
        by_attributes,
    ],
    ids=lambda f: f.__name__,
)
def test_whatever_a_loop_does_its_results_are_those_of_the_function(f: Callable[..., Any]) -> None:
    f = grads(f)
    torch.testing.assert_close(vfn.jit(f)(layers(), X), f(layers(), X))


def test_a_value_that_was_left_out_ends_it() -> None:
    assert calls_of(grads(an_inner_value_is_kept), layers(), X) == 0
    assert calls_of(grads(all_results_are_kept), layers(), X) == 2 * (LAYERS - 6)


def test_an_inner_value_as_the_loss() -> None:
    def loss(params: Any, x: Any) -> Any:
        for p in params:
            total = (x @ p["gate"]).sin().sum()
            x = block(p, x)
        return total

    torch.testing.assert_close(vfn.jit(vfn.grad(loss))(layers(), X), vfn.grad(loss)(layers(), X))


def test_a_float_that_is_given() -> None:
    def f(params: Any, x: Any, rate: float) -> Any:
        for p in params:
            x = block(p, x * rate)
        return x

    jitted = vfn.jit(f)
    for rate in (0.5, 0.75):
        torch.testing.assert_close(jitted(layers(), X, rate), f(layers(), X, rate))
    assert jitted.cache_info()[1] == 1
    g = vfn.jit(lambda params, x, rate: grads(chain)(params, x)[1][0][0]["up"] * rate)
    torch.testing.assert_close(g(layers(), X, 0.5) * 2, g(layers(), X, 1.0))


def test_a_write_into_an_argument_is_refused_as_elsewhere() -> None:
    def f(params: Any, x: Any) -> Any:
        for p in params:
            x = block(p, x)
            p["norm"].mul_(2)
        return x

    with pytest.raises(vfn.errors.InPlaceError, match="this changes an argument in place"):
        vfn.jit(f)(layers(), X)


def test_on_a_mesh_collectives_and_memory_are_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def split(params: Any, x: Any) -> Any:
        for p in params:
            x = vfn.with_sharding(block({**p, "up": vfn.with_sharding(p["up"], P(None, "tp"))}, x), P("dp"))
        return x

    mesh = vfn.abstract_mesh((2, 2), ("dp", "tp"))
    specs = [{"norm": P(), "up": P("dp", "tp"), "gate": P(None, "tp"), "down": P("tp")}] * LAYERS
    args = vfn.shard(layers(), mesh, specs), vfn.shard(X[:2], mesh, P("dp"))
    plans = []
    for many in (repeated.MANY, 1000):
        monkeypatch.setattr(repeated, "MANY", many)
        plans.append(vfn.jit(grads(split)).lower(*args))
    once, each = plans
    assert once.memory().peak == each.memory().peak
    assert str(once.comms()) == str(each.comms())
    assert once.text() != each.text()  # calls of what is shared, as of layers that are marked


def test_without_writes_of_torchs_own() -> None:
    def f(params: Any, x: Any) -> Any:
        for p in params:
            h = torch.sigmoid(x @ p["gate"]) * (x @ p["up"])
            h = (h.sin() + h.cos()).neg().exp() * 0.5
            x = x + torch.tanh(h @ p["down"])
        return x

    assert calls_of(f, layers(), X) == LAYERS - 6
