"""What draws cost beside `torch.rand`, `torch.randn` and `jax.random`: nanoseconds an element, and small calls in us.

`jax` is an extra (``pip install -e ".[oracle]"``); without it its columns say n/a.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

import vescale_fn as vfn
from benchmarks.side_by_side import medians, publish
from vescale_fn._core.sharding.index_map import local_indices
from vescale_fn._core.sharding.spec import P
from vescale_fn.random.backends import c_library, draw_op
from vescale_fn.random.generators import counters
from vescale_fn.random.sharded import Draw

try:
    import jax
except ImportError:
    jax = None

N = 1 << 24
KEY = vfn.random.key(0)
CPU = torch.device("cpu")


def wall(candidates: Mapping[str, Callable[[], Any]], rounds: int = 7) -> dict[str, float]:
    """The least wall time of one call of each, in ns an element of N: in turns, so that what else runs is everyone's."""
    for candidate in candidates.values():
        candidate()
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, candidate in candidates.items():
            start = time.perf_counter()
            candidate()
            best[name] = min(best[name], (time.perf_counter() - start) / N * 1e9)
    return best


def with_backend(name: str, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        before = vfn.random.backend()
        vfn.random.backend(name)
        try:
            return call()
        finally:
            vfn.random.backend(before)

    return run


def of_jax(name: str) -> dict[str, Callable[[], Any]]:
    if jax is None:
        return {}
    draw = jax.jit(lambda key: getattr(jax.random, name)(key, (N,), "float32"))
    key = jax.random.key(0)
    return {"jax": lambda: draw(key).block_until_ready()}


def into(kind: str, given: torch.Tensor) -> Callable[[], Any]:
    """A draw into memory that is there, which is no part of the library's face."""
    if not c_library.available():
        return lambda: None
    variant = c_library.VARIANTS.index(c_library.available()[-1])
    keys, code = KEY.data.view(1, 1, 2), c_library.CODES[kind, torch.float32]
    params = (0.0, 1.0) if kind == "uniform" else ()
    return lambda: c_library.draw(variant, code, keys, counters.whole((N,)), params, given)


def large() -> None:
    rows = []
    best = vfn.random.backend("auto")
    given = torch.empty(N)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for name, theirs, fill in (("uniform", torch.rand, given.uniform_), ("normal", torch.randn, given.normal_)):
            draw = getattr(vfn.random, name)
            took = wall(
                {
                    "torch": lambda theirs=theirs: theirs(N),
                    "torch, given": fill,
                    "ours": with_backend(best, lambda draw=draw: draw(KEY, (N,))),
                    "ours, given": into(name, given),
                    "ours on torch": with_backend("torch", lambda draw=draw: draw(KEY, (N,))),
                    **of_jax(name),
                }
            )
            jax_ = took.get("jax")
            rows.append(
                [
                    name,
                    threads,
                    took["torch"],
                    took["torch, given"],
                    jax_ or "n/a",
                    took["ours"],
                    took["ours, given"],
                    took["ours on torch"],
                    took["ours"] / took["torch"],
                    took["ours, given"] / took["torch, given"],
                    took["ours"] / jax_ if jax_ else "n/a",
                    took["ours on torch"] / jax_ if jax_ else "n/a",
                ]
            )
    torch.set_num_threads(1)
    publish(
        "random_draws",
        [
            "2^24 float32, ns an element",
            "threads",
            "torch",
            "torch, into given memory",
            "jax",
            f"ours, {best}",
            "ours, into given memory",
            "ours, torch backend",
            "ours / torch",
            "given / given",
            "ours / jax",
            "torch backend / jax",
        ],
        rows,
    )


def small() -> None:
    calls: dict[str, Callable[[], Any]] = {
        "`torch.rand(64)`": lambda: torch.rand(64),
        "`uniform(key, (64,))`": lambda: vfn.random.uniform(KEY, (64,)),
        "`normal(key, (64,))`": lambda: vfn.random.normal(KEY, (64,)),
        "`split(key)`": lambda: vfn.random.split(KEY),
        "`fold_in(key, 7)`": lambda: vfn.random.fold_in(KEY, 7),
    }
    if jax is not None:
        key = jax.random.key(0)
        calls["`jax.random.uniform(key, (64,))`"] = lambda: jax.random.uniform(key, (64,)).block_until_ready()
        calls["`jax.random.split(key)`"] = lambda: jax.random.key_data(jax.random.split(key)).block_until_ready()
    publish("random_small", ["call", "us"], [[name, took] for name, took in medians(calls).items()])


def blocks() -> None:
    """One rank's block of a draw, beside an eighth of the whole."""
    cases = {
        "dim 0": ((4096, 4096), P("r")),
        "last dim, runs of 512": ((4096, 4096), P(None, "r")),
        "last dim, runs of 64": ((N // 512, 512), P(None, "r")),
        "last dim, runs of 8": ((N // 64, 64), P(None, "r")),
    }
    rows = []
    for name, (shape, spec) in cases.items():
        block = counters.Rectangle(shape, local_indices(shape, {"r": 8}, spec, {"r": 3}))
        whole = counters.whole(shape)
        for kind, params in (("uniform", (0.0, 1.0)), ("normal", ())):
            draw = Draw(kind, shape, torch.float32, params)
            took = wall(
                {
                    "whole": lambda draw=draw, whole=whole: draw_op.draw(KEY.data, draw, whole, CPU),
                    "block": lambda draw=draw, block=block: draw_op.draw(KEY.data, draw, block, CPU),
                }
            )
            rows.append([kind, name, took["whole"], took["block"] * 8, took["block"] * 8 / took["whole"]])
    publish("random_blocks", ["draw", "an eighth by", "whole, ns an element", "block, ns an element", "ratio"], rows)


def dropouts() -> None:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(N, dtype=dtype)
        y = x.clone().requires_grad_()
        ones = torch.ones_like(x)
        took = wall(
            {
                "theirs": lambda x=x: F.dropout(x, 0.1),
                "ours": lambda x=x: vfn.random.dropout(KEY, x, 0.1),
                "theirs, both": lambda y=y, g=ones: torch.autograd.grad(F.dropout(y, 0.1), y, g),
                "ours, both": lambda y=y, g=ones: torch.autograd.grad(vfn.random.dropout(KEY, y, 0.1), y, g),
            }
        )
        for what, end in (("forward", ""), ("forward and backward", ", both")):
            a, b = took["theirs" + end], took["ours" + end]
            rows.append([str(dtype).removeprefix("torch."), what, a, b, b / a])
    publish("random_dropout", ["dtype", "2^24 elements", "`F.dropout`, ns", "`dropout`, ns", "ratio"], rows)


def main() -> None:
    torch.set_num_threads(1)
    large()
    small()
    blocks()
    dropouts()


if __name__ == "__main__":
    main()
