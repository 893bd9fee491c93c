"""What recording and replaying a loop costs: `vfn.scan` beside the Python loop that it stands for, and `jax.lax.scan`.

A step of SGD on a residual network under `jit`. The first call records, makes the plan and runs it once; what that one run
takes is subtracted. `jax` is an extra (``pip install -e ".[oracle]"``); without it its column says n/a.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import vescale_fn as vfn
from benchmarks.side_by_side import medians, publish

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    jax = jnp = None

LAYERS = (8, 64)
WIDTH, ROWS = 128, 64

Params = dict[str, torch.Tensor]


def layer(h: torch.Tensor, p: Params) -> torch.Tensor:
    y = torch.nn.functional.layer_norm(h, (WIDTH,))
    return h + torch.nn.functional.gelu(y @ p["up"]) @ p["down"]


def scanned(p: Params, x: torch.Tensor) -> torch.Tensor:
    return vfn.scan(lambda h, p: (layer(h, p), None), x, p)[0]


def unrolled(p: Params, x: torch.Tensor) -> torch.Tensor:
    for up, down in zip(p["up"].unbind(), p["down"].unbind(), strict=True):
        x = layer(x, {"up": up, "down": down})
    return x


def step(model: Callable[[Params, torch.Tensor], torch.Tensor]) -> Any:
    """One step, to be jitted."""

    def sgd(p: Params, x: torch.Tensor) -> Params:
        g = vfn.grad(lambda p: (model(p, x) ** 2).mean())(p)
        return {name: p[name] - 0.1 * g[name] for name in p}

    return sgd


def params(layers: int) -> Params:
    return {"up": torch.randn(layers, WIDTH, 4 * WIDTH) * 0.02, "down": torch.randn(layers, 4 * WIDTH, WIDTH) * 0.02}


def first_call(make: Callable[[], Callable[[], Any]]) -> float:
    """The seconds of this process on the CPU that a first call takes more than the quickest of the next, the median of five."""
    found = []
    for _ in range(5):
        call, took = make(), []
        for _ in range(4):
            start = time.process_time()
            call()
            took.append(time.process_time() - start)
        found.append(took[0] - min(took[1:]))
    return statistics.median(found)


def jitted(model: Any, layers: int) -> Callable[[], Any]:
    f, p, x = vfn.jit(step(model)), params(layers), torch.randn(ROWS, WIDTH)
    return lambda: f(p, x)


def of_jax(layers: int) -> Any:
    """The same step, new for each call of this."""
    if jax is None:
        return None

    def one(h: Any, p: Any) -> Any:
        y = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)
        return h + jax.nn.gelu(y @ p["up"], approximate=False) @ p["down"], None

    def sgd(p: Any, x: Any) -> Any:
        g = jax.grad(lambda p: (jax.lax.scan(one, x, p)[0] ** 2).mean())(p)
        return {name: p[name] - 0.1 * g[name] for name in p}

    f, p = jax.jit(sgd), {name: jnp.asarray(x.numpy()) for name, x in params(layers).items()}
    x = jnp.asarray(torch.randn(ROWS, WIDTH).numpy())
    return lambda: jax.block_until_ready(f(p, x))


def main() -> None:
    torch.set_num_threads(1)
    first_call(lambda: jitted(scanned, 2))  # what is loaded once
    rows = []
    for layers in LAYERS:
        firsts = [first_call(lambda model=model, n=layers: jitted(model, n)) for model in (scanned, unrolled)]
        theirs: Any = "n/a" if jax is None else first_call(lambda n=layers: of_jax(n))
        took = medians({"scan": jitted(scanned, layers), "loop": jitted(unrolled, layers)}, rounds=11)
        rows.append([layers, *firsts, theirs, took["scan"] / layers, took["scan"] / took["loop"]])
    publish(
        "loops",
        ["layers", "scan: first call, s", "loop: first call, s", "jax: first call, s", "replay, us a layer", "/ loop"],
        rows,
    )


if __name__ == "__main__":
    main()
