"""What recording and replaying a loop costs: `vfn.scan` beside the Python loop that it stands for, and `jax.lax.scan`.

Then the first call under transforms, and what an iteration costs beside its body: of 64 times ``tanh(c * x)`` of 8 elements, as
a loop, with the body four times in an iteration (``unroll=4``), and as straight code.

Then 64 layers stacked and split over 8 ranks: gathered at once before the loop, or a slice at a time.

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
from vescale_fn import P

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    jax = jnp = None

LAYERS = (8, 64)
WIDTH, ROWS = 128, 64
RANKS = 8

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


def first_call(make: Callable[[], Callable[[], Any]], times: int = 5) -> float:
    """The seconds of this process on the CPU that a first call takes more than the quickest of the next, the median of some."""
    found = []
    for _ in range(times):
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


def squares(model: Any, layers: int) -> tuple[Any, Params, torch.Tensor]:
    """A loss of the network, its parameters, its input."""
    return lambda p, x: (model(p, x) ** 2).mean(), params(layers), torch.randn(ROWS, WIDTH)


TRANSFORMS: dict[str, Any] = {
    "vmap": lambda f, p, x: (vfn.vmap(f, (None, 0)), p, x[:, None]),
    "vmap of grad": lambda f, p, x: (vfn.vmap(vfn.grad(f), (None, 0)), p, x[:4, None]),
    "jvp": lambda f, p, x: (lambda p, x: vfn.jvp(lambda p: f(p, x), (p,), (p,)), p, x),
    "grad of grad": lambda f, p, x: (
        vfn.grad(lambda p, x: sum((g**2).sum() for g in vfn.grad(f)(p, x).values())),
        p,
        x,
    ),
}


def transformed(name: str, model: Any, layers: int) -> Callable[[], Any]:
    f, p, x = TRANSFORMS[name](*squares(model, layers))
    f = vfn.jit(f)
    return lambda: f(p, x)


def iterations() -> dict[str, Callable[[], Any]]:
    c, xs = torch.randn(8), torch.randn(64, 8)

    def straight(c: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        for x in xs.unbind():
            c = torch.tanh(c * x)
        return c

    loop = vfn.jit(lambda c, xs: vfn.scan(lambda c, x: (torch.tanh(c * x), None), c, xs)[0])
    by_4 = vfn.jit(lambda c, xs: vfn.scan(lambda c, x: (straight(c, x), None), c, xs.unflatten(0, (-1, 4)))[0])
    code = vfn.jit(straight)
    return {"loop": lambda: loop(c, xs), "by 4": lambda: by_4(c, xs), "code": lambda: code(c, xs)}


def under_transforms() -> None:
    rows = []
    for name in TRANSFORMS:
        transformed(name, scanned, 2)()  # what is loaded once
        firsts = {
            (model, n): first_call(lambda name=name, model=model, n=n: transformed(name, model, n), 1)
            for model in (scanned, unrolled)
            for n in LAYERS
        }
        rows.append([name, *(firsts[model, n] for model in (scanned, unrolled) for n in LAYERS)])
    columns = [f"{how}: {n} layers, s" for how in ("scan", "loop") for n in LAYERS]
    publish("loops_under_transforms", ["first call", *columns], rows)
    took = medians(iterations(), rounds=31)
    rows = [[took["loop"] / 64, took["by 4"] / 64, took["code"] / 64, took["loop"] / took["code"]]]
    publish("loop_iteration", ["loop, us an iteration", "body 4 times, us", "straight code, us", "loop / code"], rows)


def gathered(p: Params) -> Params:
    return vfn.with_sharding(p, P())


def computed_again(p: Params, x: torch.Tensor, brought: Callable[[Params], Params] = lambda p: p) -> torch.Tensor:
    return vfn.scan(vfn.remat(lambda h, p: (layer(h, brought(p)), None)), x, p)[0]


STACKED: dict[str, tuple[Any, P]] = {
    "leading dim split, gathered at once": (lambda p, x: computed_again(gathered(p), x), P("dp")),
    "leading dim split, a slice at a time": (computed_again, P("dp")),
    "another dim split, gathered in the body": (lambda p, x: computed_again(p, x, gathered), P(None, None, "dp")),
}


def on_ranks(rounds: int = 7) -> dict[str, float]:
    """The least milliseconds of a step, of some that take turns."""
    torch.set_num_threads(1)
    mesh, calls = vfn.make_mesh((RANKS,), ("dp",)), {}
    x = vfn.shard(torch.randn(RANKS * ROWS, WIDTH), mesh, P("dp"))
    for name, (model, spec) in STACKED.items():
        calls[name] = vfn.jit(step(model)), vfn.shard(params(LAYERS[-1]), mesh, spec)
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (f, p) in calls.items():
            torch.distributed.barrier()
            start = time.perf_counter()
            f(p, x)
            torch.distributed.barrier()
            took[name].append(1e3 * (time.perf_counter() - start))
    return {name: min(times) for name, times in took.items()}


def split_layers() -> None:
    took, *_ = vfn.launch(on_ranks, RANKS, device="cpu")
    mesh, rows = vfn.abstract_mesh((RANKS,), ("dp",)), []
    x = vfn.shard(vfn.ShapeDtype((RANKS * ROWS, WIDTH), torch.float32), mesh, P("dp"))
    for name, (model, spec) in STACKED.items():
        like = {k: vfn.ShapeDtype(w.shape, w.dtype) for k, w in params(LAYERS[-1]).items()}
        lowered = vfn.jit(step(model)).lower(vfn.shard(like, mesh, spec), x)
        comms = lowered.comms()
        rows.append([name, lowered.memory().peak / 2**20, len(comms), sum(c.bytes for c in comms) / 2**20, took[name]])
    publish("split_layers", ["64 layers on 8 ranks", "peak, MiB", "collectives", "their MiB", "ms"], rows)


def main() -> None:
    torch.set_num_threads(1)
    first_call(lambda: jitted(scanned, 2))  # what is loaded once
    rows = []
    for layers in LAYERS:
        firsts = [first_call(lambda model=model, n=layers: jitted(model, n)) for model in (scanned, unrolled)]
        theirs: Any = "n/a" if jax is None else first_call(lambda n=layers: of_jax(n))
        took = medians({"scan": jitted(scanned, layers), "loop": jitted(unrolled, layers)}, rounds=11)
        rows.append([layers, *firsts, theirs, took["scan"] / layers, took["scan"] / took["loop"]])
    under_transforms()
    split_layers()
    publish(
        "loops",
        ["layers", "scan: first call, s", "loop: first call, s", "jax: first call, s", "replay, us a layer", "/ loop"],
        rows,
    )


if __name__ == "__main__":
    main()
