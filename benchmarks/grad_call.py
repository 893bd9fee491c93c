"""What `vfn.grad` costs on one device beside `torch.autograd.grad` and `torch.func.grad`: time of a call, peak of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import vescale_fn as vfn
from benchmarks.side_by_side import medians, publish

MODELS = {"1 layer of 8": (1, 8), "16 layers of 8": (16, 8), "8 layers of 512": (8, 512)}  # layers, width


def loss(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for w in weights:
        x = torch.tanh(x @ w)
    return x.sum()


def by_autograd(weights: list[torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As one would write it by hand, with weights that do not require grad."""
    weights = [w.detach().requires_grad_() for w in weights]
    return torch.autograd.grad(loss(weights, x), weights)


def peak(call: Callable[[], Any]) -> int:
    """How many bytes are alive at most during a call, beyond those that were before, as the allocator says."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        out = call()
    del out
    alive = most = 0
    for event in found.profiler.kineto_results.events():  # in the order of time
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for name, (layers, width) in MODELS.items():
        weights = [torch.randn(width, width) for _ in range(layers)]
        x = torch.randn(8, width)
        ours, theirs = vfn.grad(loss), torch.func.grad(loss)
        calls = {
            "autograd": lambda weights=weights, x=x: by_autograd(weights, x),
            "vfn": lambda weights=weights, x=x, ours=ours: ours(weights, x),
            "func": lambda weights=weights, x=x, theirs=theirs: theirs(weights, x),
        }
        took = medians(calls, rounds=81)
        kib = {side: peak(call) / 1024 for side, call in calls.items()}
        rows.append(
            [
                name,
                took["autograd"],
                took["vfn"] - took["autograd"],
                took["vfn"] / took["func"],
                kib["autograd"],
                kib["vfn"] / kib["autograd"],
                kib["vfn"] / kib["func"],
            ]
        )
    publish(
        "grad_call",
        [
            "model",
            "`torch.autograd.grad`, us",
            "`vfn.grad`, us more",
            "time / `torch.func.grad`",
            "peak of `torch.autograd.grad`, KiB",
            "peak / it",
            "peak / `torch.func.grad`",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
