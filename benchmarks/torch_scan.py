"""A loop over layers as one call: `vfn.scan` under `jit`, and torch's own `scan` under `torch.compile`, both with a gradient.

The step of SGD of `loops`. A first call counts the seconds of all processors, those of the C++ compiler that torch starts among
them, less what one run takes; torch's caches of compiled code are off. A replay is that of a layer.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

CACHES = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
os.environ.update(CACHES)  # which torch reads when it is imported

import torch  # noqa: E402
from torch._higher_order_ops.scan import scan  # noqa: E402

from benchmarks.loops import LAYERS, ROWS, WIDTH, jitted, layer, params, scanned  # noqa: E402
from benchmarks.side_by_side import medians, publish  # noqa: E402


def compiled(layers: int) -> Callable[[], Any]:
    """The step of `jitted`, by torch's own means."""
    p, x = params(layers), torch.randn(ROWS, WIDTH)

    def loss(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        def one(h: torch.Tensor, ws: tuple[torch.Tensor, torch.Tensor]) -> Any:
            return layer(h, {"up": ws[0], "down": ws[1]}), h.new_zeros(())

        return (scan(one, x, (up, down))[0] ** 2).mean()

    fast = torch.compile(loss, fullgraph=True)

    def sgd() -> Any:
        leaves = [p[name].detach().requires_grad_() for name in ("up", "down")]
        grads = torch.autograd.grad(fast(*leaves), leaves)
        return [w.detach() - 0.1 * g for w, g in zip(leaves, grads, strict=True)]

    return sgd


def seconds() -> float:
    """Of this process and those that it has waited for, on the CPU."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


def first_call(call: Callable[[], Any]) -> float:
    """What a first call takes more than the quickest of the next."""
    took = []
    for _ in range(4):
        start = seconds()
        call()
        took.append(seconds() - start)
    return took[0] - min(took[1:])


def main() -> None:
    torch.set_num_threads(1)
    first_call(jitted(scanned, 2))  # what is loaded once
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        first_call(compiled(2))
        rows = []
        for layers in LAYERS[-1:]:
            torch.compiler.reset()
            ours, theirs = jitted(scanned, layers), compiled(layers)
            firsts = first_call(ours), first_call(theirs)
            took = medians({"ours": ours, "theirs": theirs}, rounds=11)
            rows.append(
                [layers, *firsts, took["ours"] / layers, took["theirs"] / layers, took["ours"] / took["theirs"]]
            )
    columns = [
        "`vfn.scan`: first call, s",
        "torch's, compiled: first call, s",
        "replay, us a layer",
        "torch's, us",
        "/ it",
    ]
    publish("torch_scan", ["layers", *columns], rows)


if __name__ == "__main__":
    main()
