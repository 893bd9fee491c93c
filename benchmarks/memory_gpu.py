"""What a limit on memory costs in time on a GPU: plans with `memory=`, with the host's memory and without, beside torch's ways.

The loss and gradients of blocks of a GPT in bfloat16. What torch offers: checkpoints of blocks; values that autograd keeps in
pinned memory of the host; `torch.compile`, which recomputes in the backward pass by `activation_memory_budget`. Peaks are
those of torch's allocator, times the best of some steps.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import vescale_fn as vfn
from benchmarks.side_by_side import publish
from vescale_fn.errors import TransformError
from vescale_fn.plan.ir import costs, host_copies

BUDGETS = (80, 70, 60, 50, 45)  # percent of what a plan without a limit needs
Params = list[dict[str, torch.Tensor]]


def block(p: dict[str, torch.Tensor], x: torch.Tensor, heads: int) -> torch.Tensor:
    """One block of a GPT."""
    h = F.layer_norm(x, x.shape[-1:])
    b, t, d = x.shape
    q, k, v = (h @ p["qkv"]).view(b, t, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
    x = x + a @ p["o"]
    h = F.layer_norm(x, x.shape[-1:])
    return x + F.gelu(h @ p["up"]) @ p["down"]


def loss(params: Params, x: torch.Tensor, heads: int, one: Callable[..., torch.Tensor] = block) -> torch.Tensor:
    """Of all blocks, by a function of one."""
    for p in params:
        x = one(p, x, heads)
    return x.float().square().mean()


def arguments(layers: int, dim: int, length: int, batch: int) -> tuple[Params, torch.Tensor]:
    """Parameters and a batch."""
    made = torch.Generator("cuda").manual_seed(0)
    sizes = {"qkv": (dim, 3 * dim), "o": (dim, dim), "up": (dim, 4 * dim), "down": (4 * dim, dim)}

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made, device="cuda", dtype=torch.bfloat16)

    params = [{name: 0.02 * draw(*size) for name, size in sizes.items()} for _ in range(layers)]
    return params, draw(batch, length, dim)


def measured(step: Callable[[], Any], times: int) -> tuple[float, float]:
    """The peak of a step in GiB, and its time in milliseconds, once what it needs at first is there."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    took = []
    for _ in range(times):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return torch.cuda.max_memory_allocated() / 2**30, 1e3 * min(took)


@contextlib.contextmanager
def without_host() -> Iterator[None]:
    """Plans that are made here send nothing to the host: as if a copy took less time than to begin it."""
    before = costs.RATES["cuda"]
    costs.RATES["cuda"] = dataclasses.replace(before, host=math.inf)
    try:
        yield
    finally:
        costs.RATES["cuda"] = before


def plans(params: Params, x: torch.Tensor, heads: int, times: int) -> Iterator[list[Any]]:
    """Rows of ours."""
    grad: Any = vfn.grad(lambda params, x: loss(params, x, heads))  # type: ignore[arg-type]
    for share in (None, *BUDGETS):
        for around, name in ((contextlib.nullcontext, "plan, host"), (without_host, "plan")):
            if share is None and around is without_host:
                continue
            step = vfn.jit(grad, memory=None if share is None else f"{share} %")
            with around():
                try:
                    start = time.perf_counter()
                    lowered = step.lower(params, x)
                    took = time.perf_counter() - start
                except TransformError as error:
                    yield [name, share or "", None, None, None, None, None, str(error).splitlines()[1][:60]]
                    continue
                predicted, seconds = lowered.memory().peak / 2**30, 1e3 * costs.total(lowered.graph)
                sent = sum(host_copies.runs(node) is host_copies.offload for node in lowered.graph.nodes)
            peak, ms = measured(functools.partial(step, params, x), times)
            yield [
                name,
                share or "",
                peak,
                ms,
                predicted / peak,
                seconds,
                sent,
                f"planned in {took:.1f} s",
            ]


def peers(params: Params, x: torch.Tensor, heads: int, times: int) -> Iterator[list[Any]]:
    """Rows of torch's, without its compiler."""
    leaves = [{name: w.detach().requires_grad_() for name, w in p.items()} for p in params]
    flat = [w for p in leaves for w in p.values()]
    again = lambda p, x, heads: checkpoint(block, p, x, heads, use_reentrant=False)
    on_host = lambda: torch.autograd.graph.save_on_cpu(pin_memory=True)
    ways = {
        "eager": (block, contextlib.nullcontext),
        "checkpoint of each block": (again, contextlib.nullcontext),
        "save_on_cpu": (block, on_host),
        "checkpoint, its inputs save_on_cpu": (again, on_host),
    }
    for name, (one, around) in ways.items():

        def step(one: Any = one, around: Any = around) -> Any:
            with around():
                out = loss(leaves, x, heads, one)
            return torch.autograd.grad(out, flat)

        yield [name, "", *measured(step, times), None, None, None, ""]


def compiled(params: Params, x: torch.Tensor, heads: int, times: int, budget: float) -> list[Any]:
    """A row of torch's compiler."""
    leaves = [{name: w.detach().requires_grad_() for name, w in p.items()} for p in params]
    flat = [w for p in leaves for w in p.values()]
    torch.compiler.reset()
    start = time.perf_counter()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        whole = torch.compile(lambda leaves, x: loss(leaves, x, heads))
        step = lambda: torch.autograd.grad(whole(leaves, x), flat)
        found = measured(step, times)
    return ["torch.compile", budget, *found, None, None, None, f"compiled in {time.perf_counter() - start:.0f} s"]


COLUMNS = ["way", "budget", "GiB", "ms", "predicted / allocated", "predicted, ms", "offloads", "note"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="plans,peers,compiled")
    parser.add_argument("--budgets", type=float, nargs="*", default=[1.0, 0.8, 0.5, 0.3, 0.1])
    parser.add_argument("--sizes", type=int, nargs=4, default=[4, 4096, 4096, 8], metavar="N")
    parser.add_argument("--times", type=int, default=5)
    given = parser.parse_args()
    params, x = arguments(*given.sizes)
    heads, rows = given.sizes[1] // 128, list[list[Any]]()

    def told(row: list[Any]) -> None:
        print(*(f"{one:.4g}" if isinstance(one, float) else one for one in row), sep=" | ", flush=True)
        rows.append(row)

    for kind, found in (("plans", plans), ("peers", peers)):
        for row in found(params, x, heads, given.times) if kind in given.only else ():
            told(row)
    for budget in given.budgets if "compiled" in given.only else ():
        told(compiled(params, x, heads, given.times, budget))
    publish("memory_gpu", COLUMNS, rows, gpu=torch.cuda.get_device_name(), sizes=given.sizes)


if __name__ == "__main__":
    main()
