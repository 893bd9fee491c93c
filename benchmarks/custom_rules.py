"""Rules of one's own beside `torch.autograd.Function`, and remat by policy beside torch's selective checkpoint."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import vescale_fn as vfn
from benchmarks.side_by_side import medians, publish


class TorchSine(torch.autograd.Function):
    """The same rule, by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.cos(x))
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * ctx.saved_tensors[0]


@vfn.custom_vjp
def by_vjp(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


@vfn.custom_jvp
def by_jvp(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


by_vjp.defvjp(lambda x: (torch.sin(x), torch.cos(x)), lambda cos, g: (g * cos,))
by_jvp.defjvp(lambda primals, tangents: (torch.sin(*primals), torch.cos(*primals) * tangents[0]))


def of(function: Any, calls: int = 8) -> Any:
    """The gradient through several calls of a function."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        for _ in range(calls):
            x = function(x)
        return x.sum()

    return vfn.grad(loss)


def layer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.sin(x @ w) * x)


def products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """torch's policy: products of matrices are kept."""
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def through(again: Any) -> Any:
    """The gradient through four layers that are computed again."""

    def loss(ws: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for w in ws:
            x = again(w, x)
        return x.sum()

    return vfn.grad(loss)


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for size in (8, 1 << 16):
        x = torch.randn(size)
        functions = {"Function": of(TorchSine.apply), "vjp": of(by_vjp), "jvp": of(by_jvp)}
        took = medians({name: partial(f, x) for name, f in functions.items()}, rounds=41)
        for name, mine in (("custom_vjp", "vjp"), ("custom_jvp", "jvp")):
            more = (took[mine] - took["Function"]) / 8
            rows.append(
                [f"8 calls of `{name}`, {size} elements", took["Function"], took[mine] / took["Function"], more]
            )
    selective = partial(create_selective_checkpoint_contexts, products)
    ours = vfn.remat(layer, policy=vfn.remat_policies.dots_saveable)
    for width in (16, 256):
        ws, x = [torch.randn(width, width) / width for _ in range(4)], torch.randn(width, width)
        theirs = partial(checkpoint, layer, use_reentrant=False, context_fn=selective)
        calls = {"theirs": partial(through(theirs), ws, x), "ours": partial(through(ours), ws, x)}
        took = medians(calls, rounds=41)
        more = (took["ours"] - took["theirs"]) / 4
        rows.append([f"4 layers of {width}, products kept", took["theirs"], took["ours"] / took["theirs"], more])
    publish("custom_rules", ["a gradient through", "torch's, us", "ours / it", "us more, a call"], rows)


if __name__ == "__main__":
    main()
