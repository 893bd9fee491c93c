"""A training step of a tensor-parallel transformer, replayed, beside the same step written by hand for one rank's tensors.

The candidates are one program, `loss` below, on parameters that are

- plain tensors, a rank's blocks, with autograd and collectives in place, as Megatron-LM writes them;
- DTensors, with torch's own autograd;
- arrays, run op by op (eager), and recorded once and replayed (`vfn.jit`).

All run on torch's `fake` process group of 8 ranks, which exchanges nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn import functional as F

import vescale_fn as vfn
from benchmarks import fake_ranks
from benchmarks.side_by_side import medians, publish
from vescale_fn import P
from vescale_fn._core.base import tree

RANKS, DIM, HEADS, LENGTH, BATCH, VOCAB, RATE = 8, 64, 8, 16, 4, 256, 1e-3
HIDDEN = 4 * DIM
Params = dict[str, Any]
Reduce = Callable[[Any], Any]
OPTIMISER = vfn.optim.sgd(RATE)

# As in Megatron-LM: what leads into the heads and the hidden units is split by columns, what leads back by rows.
SPECS = [(r"\.(q|k|v|gate|up)$", P(None, "tp")), (r"\.(out|down)$", P("tp")), (r".*", P())]


def init(layers: int) -> Params:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * rows**-0.5

    def block() -> Params:
        return {
            "norm1": torch.ones(DIM),
            "q": matrix(DIM, DIM),
            "k": matrix(DIM, DIM),
            "v": matrix(DIM, DIM),
            "out": matrix(DIM, DIM),
            "norm2": torch.ones(DIM),
            "gate": matrix(DIM, HIDDEN),
            "up": matrix(DIM, HIDDEN),
            "down": matrix(HIDDEN, DIM),
        }

    return {
        "embed": matrix(VOCAB, DIM),
        "blocks": [block() for _ in range(layers)],
        "norm": torch.ones(DIM),
        "head": matrix(DIM, VOCAB),
    }


def loss(
    params: Params, batch: Any, mask: Any, split: Reduce, joined: Reduce, written_out: bool = True, shares: bool = False
) -> Any:
    """Mean cross entropy of each next token.

    Args:
        params: as `init` makes them, or a rank's blocks of them.
        batch: tokens [B, T + 1].
        mask: [T, T], 0 where a position sees another, else -inf.
        split: applied to what every rank holds alike, before each rank takes part of the work.
        joined: applied to the ranks' parts of a sum.
        written_out: attention in single steps; else torch's own function for it.
        shares: whether equal layers are recorded once.
    """
    x = F.embedding(batch[:, :-1], params["embed"])
    for p in params["blocks"]:
        x = (shared if shares else layer)(p, x, mask, split, joined, written_out)
    return head(x, params["norm"], params["head"], batch)


def layer(p: Params, x: Any, mask: Any, split: Reduce, joined: Reduce, written_out: bool = True) -> Any:
    rows, length = x.shape[:2]
    h = split(F.rms_norm(x, (DIM,), p["norm1"], 1e-5))
    q, k, v = ((h @ p[name]).view(rows, length, -1, DIM // HEADS).permute(2, 0, 1, 3) for name in "qkv")
    if written_out:
        seen = (q @ k.transpose(-1, -2) * (DIM // HEADS) ** -0.5 + mask).softmax(-1) @ v
    else:
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + joined(seen.permute(1, 2, 0, 3).flatten(2) @ p["out"])
    h = split(F.rms_norm(x, (DIM,), p["norm2"], 1e-5))
    return x + joined((F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"])


shared = vfn.plan.shared(layer)


def head(x: Any, norm: Any, weight: Any, batch: Any) -> Any:
    scores = F.rms_norm(x, (DIM,), norm, 1e-5) @ weight
    return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())


# --- by hand, on a rank's tensors -------------------------------------------------------------------------------------


class _Split(torch.autograd.Function):
    """Each rank computes with part of the weights: the gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Joined(torch.autograd.Function):
    """The sum of the ranks' parts, in the memory of this rank's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


def by_hand(params: Params, batch: torch.Tensor, mask: torch.Tensor, written_out: bool, foreach: bool) -> Any:
    """A step on the blocks of rank 0."""
    leaves = [leaf.requires_grad_() for leaf in tree.leaves(params)]

    def step() -> Any:
        value = loss(params, batch, mask, _Split.apply, _Joined.apply, written_out)
        grads = torch.autograd.grad(value, leaves)
        with torch.no_grad():
            if foreach:
                return value.detach(), torch._foreach_add(leaves, grads, alpha=-RATE)
            return value.detach(), [leaf - RATE * grad for leaf, grad in zip(leaves, grads)]

    return step


# --- on DTensors, by torch alone --------------------------------------------------------------------------------------


def on_dtensors(params: Params, batch: torch.Tensor, mask: torch.Tensor, mesh: Any) -> Any:
    leaves = [leaf.requires_grad_() for leaf in tree.leaves(params)]
    batch, mask = (distribute_tensor(x, mesh, [Replicate()]) for x in (batch, mask))

    def joined(x: DTensor) -> DTensor:
        return x.redistribute(placements=[Replicate()])

    def step() -> Any:
        value = loss(params, batch, mask, lambda x: x, joined)
        grads = torch.autograd.grad(value, leaves)
        with torch.no_grad():
            return value.detach(), [leaf - RATE * grad for leaf, grad in zip(leaves, grads)]

    return step


# --- on arrays --------------------------------------------------------------------------------------------------------


def on_arrays(params: Params, batch: Any, mask: Any, written_out: bool = True, shares: bool = False) -> Any:
    """A step as a pure function: the program as it would be written for one device."""
    value, grads = vfn.value_and_grad(loss)(
        params, batch, mask, lambda x: x, lambda x: vfn.with_sharding(x, P()), written_out, shares
    )
    updates, _ = OPTIMISER.update(grads, OPTIMISER.init(params), params)
    return value, vfn.optim.apply_updates(params, updates)


# --- side by side -----------------------------------------------------------------------------------------------------


def candidates(layers: int, written_out: bool) -> dict[str, Callable[[], Any]]:
    """The same step, in several ways, on parameters with the same values."""
    mesh = vfn.make_mesh((RANKS,), ("tp",), device="cpu")
    params, tokens = init(layers), torch.arange(BATCH * (LENGTH + 1)).view(BATCH, -1) * 7 % VOCAB
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
    arrays = vfn.shard(params, mesh, vfn.spec_from_rules(params, SPECS))
    batch, seen = vfn.shard((tokens, mask), mesh, P())

    def blocks() -> Params:
        return tree.map_(lambda x: x.to_local().clone(), arrays)

    made = {
        "by hand": by_hand(blocks(), tokens, mask, written_out, False),
        "by hand, foreach": by_hand(blocks(), tokens, mask, written_out, True),
        "eager": lambda: on_arrays(arrays, batch, seen, written_out),
        "replayed": lambda step=vfn.jit(on_arrays): step(arrays, batch, seen, written_out),
        "shared": lambda step=vfn.jit(on_arrays): step(arrays, batch, seen, written_out, True),
    }
    if written_out:  # DTensor has no rule for torch's own attention on CPUs
        dtensors = tree.map_(lambda x, block: DTensor.from_local(block, mesh, x.placements), arrays, blocks())
        made["DTensor"] = on_dtensors(dtensors, tokens, mask, mesh)
    return made


def first_calls(layers: int, which: str = "replayed") -> float:
    """Seconds of the first call, which records the step, improves the plan and makes code of it."""
    replayed = candidates(layers, True)[which]
    gc.collect()  # what the calls before have left is not counted
    start = time.process_time()
    replayed()
    return time.process_time() - start


SHAPES = [(16, 4), (16, 16), (4, 16), (16,), (8, 8), (32, 4), (2, 16)]  # of a layer's leaves, say
KINDS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "": lambda i: (16, 4),
    " of 7 shapes": lambda i: SHAPES[i % 7],
    " all different": lambda i: (1 + i % 64, 1 + i // 64),
}


def first_update(leaves: int, kind: str = "") -> float:
    """The same of AdamW on so many small leaves, whose memory takes the new ones."""
    optimiser = vfn.optim.adamw(RATE)

    def step(params: Params, state: Any, grads: Params) -> Any:
        updates, state = optimiser.update(grads, state, params)
        return vfn.optim.apply_updates(params, updates), state

    params, grads = ({str(i): torch.ones(KINDS[kind](i)) for i in range(leaves)} for _ in range(2))
    args = params, optimiser.init(params), grads
    gc.collect()
    start = time.process_time()
    vfn.jit(step, donate_argnums=(0, 1))(*args)
    return time.process_time() - start


def tell_first_calls() -> None:
    first_calls(1)  # what is loaded once
    took = {f"{layers} layers": (layers, first_calls(layers)) for layers in (4, 8, 16, 64)}
    took |= {f"{layers} layers, equal ones shared": (layers, first_calls(layers, "shared")) for layers in (8, 64)}
    took |= {f"an update of {n} leaves": (n, first_update(n)) for n in (100, 250, 1000, 4000)}
    took |= {f"an update of 1000 leaves{kind}": (1000, first_update(1000, kind)) for kind in KINDS if kind}
    rows = [[name, seconds, seconds / count * 1000] for name, (count, seconds) in took.items()]
    publish("first_call", ["first call of", "seconds", "ms for each"], rows)


def main() -> None:
    fake_ranks.start()
    rows = []
    for layers, written_out in ((4, True), (8, True), (16, True), (8, False)):
        calls = candidates(layers, written_out)
        took = medians(calls, rounds=11, seconds=0.03)
        rows.append(
            [
                layers,
                "written out" if written_out else "torch's",
                took["by hand"] / 1000,
                took["replayed"] / 1000,
                took["replayed"] / took["by hand"],
                took["replayed"] / took["by hand, foreach"],
                took["replayed"] / took["eager"],
                took["replayed"] / took["DTensor"] if "DTensor" in took else "-",
            ]
        )
    publish(
        "replayed_step",
        [
            "layers",
            "attention",
            "by hand, ms",
            "replayed, ms",
            "replayed / by hand",
            "replayed / by hand with foreach",
            "replayed / eager",
            "replayed / DTensor",
        ],
        rows,
    )
    tell_first_calls()


if __name__ == "__main__":
    main()
