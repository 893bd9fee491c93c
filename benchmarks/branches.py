"""What a choice costs in a recorded step: `vfn.cond` beside the branch alone, as straight code, and beside `jax.lax.cond`.

A step of SGD on two layers under `jit`, of which a value in the batch chooses the second one; the value is read, and the branch
that it picks runs, forward and backward. `jax` is an extra (``pip install -e ".[oracle]"``); without it its columns say n/a.
"""

from __future__ import annotations

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

WIDTHS, ROWS = (8, 64, 512), 64


def stepped(
    grad: Callable[..., Any], tanh: Callable[[Any], Any], cond: Callable[..., Any] | None
) -> Callable[..., Any]:
    """A step, with a choice of its second layer or with the first of the two."""

    def loss(p: Any, x: Any) -> Any:
        h = tanh(x @ p["a"])
        one, other = (lambda h, name=name: tanh(h @ p[name]) + h for name in "bc")
        return ((one(h) if cond is None else cond(x[0, 0] > 0, one, other, h)) ** 2).mean()

    def step(p: Any, x: Any) -> Any:
        g = grad(loss)(p, x)
        return {name: p[name] - 0.1 * g[name] for name in p}

    return step


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for width in WIDTHS:
        p, x = {name: torch.randn(width, width) / width**0.5 for name in "abc"}, torch.rand(ROWS, width) + 0.1
        calls: dict[str, Callable[[], Any]] = {}
        for name, cond in (("straight", None), ("cond", vfn.cond)):
            f = vfn.jit(stepped(vfn.grad, torch.tanh, cond))
            calls[name] = lambda f=f, p=p, x=x: f(p, x)
        if jax is not None:
            q, y = {name: jnp.asarray(w.numpy()) for name, w in p.items()}, jnp.asarray(x.numpy())
            for name, cond in (("jax: straight", None), ("jax: cond", jax.lax.cond)):
                g = jax.jit(stepped(jax.grad, jnp.tanh, cond))
                calls[name] = lambda g=g, q=q, y=y: jax.block_until_ready(g(q, y))
        took = medians(calls)
        theirs: list[Any] = ["n/a", "n/a"]
        if jax is not None:
            theirs = [took["jax: cond"], took["jax: cond"] / took["jax: straight"]]
        rows.append([width, took["straight"], took["cond"], took["cond"] / took["straight"], *theirs])
    columns = ["width", "the branch alone, us", "`cond`, us", "/ it", "jax: `cond`, us", "/ its branch alone"]
    publish("branches", columns, rows)


if __name__ == "__main__":
    main()
