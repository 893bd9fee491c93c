"""Python loops whose iterations are recorded once: the plan is that of all iterations, whatever the loop does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.nn import functional as F

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core import torch_internals
from vescale_fn.plan.ir.nested import nested
from vescale_fn.plan.tracing import repeated

LAYERS, DIM, SEEN = 9, 4, 3  # of the iterations three are seen before one is a call


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
    assert calls_of(chain, layers(), X) == LAYERS - SEEN
    assert calls_of(grads(chain), layers(), X) == 2 * (LAYERS - SEEN)


def test_few_iterations_are_recorded_as_they_are() -> None:
    assert calls_of(grads(chain), layers(SEEN), X) == 0


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
        if i == 6:
            x = torch.tanh(x)
    return x


def one_ends_otherwise(params: Any, x: Any) -> Any:
    for i, p in enumerate(params):
        h = F.silu(F.rms_norm(x, (DIM,), p["norm"], 1e-5) @ p["gate"]) * (x @ p["up"])
        h = (h.sin() + h.cos()).neg().exp().clamp(max=2.0)
        x = x + (h if i == 6 else h * 2) @ p["down"] / 4.0
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
        taken, before = (before if i == 6 else h), h
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
        x = block(p, x * (1.0 if i != 7 else 1.5))
    return x


def a_weight_is_taken_twice(params: Any, x: Any) -> Any:
    for i, p in enumerate(params):
        x = block({**p, "gate": p["up"]} if i == 6 else p, x)
    return x


def one_is_not_followed(params: Any, x: Any) -> Any:
    for i, p in enumerate(params):
        with torch.set_grad_enabled(i != 6):
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
        x = block(p, torch.cat([x, x]) if i == 6 else x)
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
    # of a result that is used elsewhere, too, gradients would be added up in another order
    assert calls_of(grads(all_results_are_kept), layers(), X) == 0
    assert calls_of(all_results_are_kept, layers(), X) == LAYERS - SEEN


def test_an_inner_value_as_the_loss() -> None:
    def loss(params: Any, x: Any) -> Any:
        for p in params:
            total = (x @ p["gate"]).sin().sum()
            x = block(p, x)
        return total

    torch.testing.assert_close(vfn.jit(vfn.grad(loss))(layers(), X), vfn.grad(loss)(layers(), X))


FLOATS = {  # what an iteration does with a float among the function's arguments, and with constants that it makes
    "computed": lambda x, i, rate: x * (1 - 0.1 * rate) + torch.tensor([rate, 2.0, 0.0, 1.0]),
    "another float later": lambda x, i, rate: x * (rate if i < 6 else rate * 0.5),
    "a constant that is read later": lambda x, i, rate: [x * (c := torch.tensor(0.5)), c.item() if i == 6 else 1][0],
    "another constant later": lambda x, i, rate: x * torch.tensor([0.5, 1.0, 2.0, float(i > 6)]),
}


def test_floats_that_are_given_and_constants_of_an_iteration() -> None:
    calls = {}
    for name, what in FLOATS.items():

        def step(params: Any, x: Any, rate: float, what: Any = what) -> Any:
            def f(params: Any, x: Any) -> Any:
                for i, p in enumerate(params):
                    x = what(block(p, what(x, 0, rate)), i, rate)
                return x

            loss, (by_params, _) = grads(f)(params, x)
            return loss, [p["up"] - rate * g["up"] for p, g in zip(params, by_params)]

        jitted = vfn.jit(step)
        for rate in (0.5, 0.75):
            torch.testing.assert_close(jitted(layers(), X, rate), step(layers(), X, rate))
        assert jitted.cache_info()[1] == 1
        assert torch_internals.function_modes() == 0
        lowered = vfn.jit(step, passes=()).lower(layers(), X, 0.5)
        calls[name] = sum(node.target.name == "shared" for node in nested(lowered.graph))
    assert calls == dict(zip(FLOATS, [12, 6, 10, 8]))


def test_a_write_into_an_argument_is_refused_as_elsewhere() -> None:
    def f(params: Any, x: Any) -> Any:
        for p in params:
            x = block(p, x)
            p["norm"].mul_(2)
        return x

    with pytest.raises(vfn.errors.InPlaceError, match="this changes an argument in place"):
        vfn.jit(f)(layers(), X)


SPECS = {
    "tp": {"norm": P(), "up": P(None, "tp"), "gate": P(None, "tp"), "down": P("tp")},
    "fsdp": {"norm": P(), "up": P("tp"), "gate": P("tp"), "down": P("tp")},  # of two, gathers are put together
}


def on_mesh(at: Any) -> Callable[..., Any]:
    def f(params: Any, x: Any) -> Any:
        for p in params:
            h = F.rms_norm(x, (DIM,))
            h = F.silu(h @ p["gate"]) * (h @ p["up"])
            y = ((h.sin() + h.cos()).neg() * 0.5) @ p["down"] / 4.0
            x = x + (y if at is None else vfn.with_sharding(y, at))
        return x

    return grads(f)


@pytest.mark.parametrize("name", SPECS)
def test_on_a_mesh_collectives_and_memory_are_those_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = vfn.abstract_mesh((2,), ("tp",))
    at = P() if name == "tp" else P("tp")
    args = vfn.shard(layers(), mesh, [SPECS[name]] * LAYERS), vfn.shard(X[:2], mesh, at)
    plans = []
    for many in (repeated.MANY, 1000):
        monkeypatch.setattr(repeated, "MANY", many)
        plans.append(vfn.jit(on_mesh(at)).lower(*args))
    once, each = plans
    assert once.memory().peak <= each.memory().peak
    assert str(once.comms()) == str(each.comms())
    assert bool(nested(once.graph)) == (name == "tp")


def _on_ranks(size: int) -> None:
    mesh = vfn.make_mesh((size,), ("tp",))
    many = repeated.MANY
    wanted = on_mesh(None)(layers(), X)
    for name, at in (("tp", P()), ("fsdp", P("tp"))):  # 8 columns, and 4 rows, for three ranks
        args = [vfn.shard(p, mesh, SPECS[name]) for p in layers()], vfn.shard(X, mesh, at)
        for last in (many, 1000):  # the second: the last rank finds none
            repeated.MANY = last if dist.get_rank() == size - 1 else many
            try:
                found = vfn.unshard(vfn.jit(on_mesh(at))(*args))
            finally:
                repeated.MANY = many
            torch.testing.assert_close(found, wanted)


def test_on_ranks(gloo: Any) -> None:
    gloo(3, _on_ranks, 3)


def test_without_writes_of_torchs_own() -> None:
    def f(params: Any, x: Any) -> Any:
        for p in params:
            h = torch.sigmoid(x @ p["gate"]) * (x @ p["up"])
            h = (h.sin() + h.cos()).neg().exp() * 0.5
            x = x + torch.tanh(h @ p["down"])
        return x

    assert calls_of(f, layers(), X) == LAYERS - SEEN


def test_a_mode_around_a_call_or_in_the_function_is_off_behind_it() -> None:
    def f(params: Any, x: Any) -> Any:
        with torch.device("cpu"):
            return chain(params, x)

    assert calls_of(grads(f), layers(), X) == 2 * (LAYERS - SEEN)
    with torch.device("cpu"):
        assert calls_of(grads(chain), layers(), X) == 0
        assert torch_internals.function_modes() == 1
    assert torch_internals.function_modes() == 0


AFTERWARDS = {
    "a custom function": lambda x: _Doubled.apply(x),
    "a checkpoint": lambda x: torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False),
    "a gradient": torch.func.grad(lambda x: x.sin().sum()),
    "an autocast": lambda x: _cast(x),
    "a loop": lambda x: vfn.scan(lambda c, y: (torch.tanh(c + y), None), x, x[None].expand(2, -1, -1))[0],
}


def _cast(x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x.T).float()


@pytest.mark.parametrize("name", AFTERWARDS)
def test_the_function_runs_once(name: str) -> None:
    runs: list[Any] = []

    def f(params: Any, x: Any) -> Any:
        runs.append(x)
        return AFTERWARDS[name](chain(params, x))

    found = vfn.jit(grads(f))(layers(), X)
    assert len(runs) == 1
    torch.testing.assert_close(found, grads(f)(layers(), X))
