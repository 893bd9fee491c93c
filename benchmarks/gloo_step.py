"""A training step on two real processes over gloo: replayed, eager, on DTensors, and as torch's wrappers for modules do it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import vescale_fn as vfn
from benchmarks.replayed_step import (
    LENGTH,
    OPTIMISER,
    RATE,
    SPECS,
    VOCAB,
    Params,
    by_hand,
    head,
    init,
    layer,
    loss,
    on_arrays,
    on_dtensors,
)
from benchmarks.side_by_side import publish
from vescale_fn import P
from vescale_fn._core.base import tree

RANKS, LAYERS, BATCH, ROUNDS, WARM = 2, 8, 64, 21, 3
Step = Callable[[], Any]


def main() -> None:
    rows = []
    for measure in (data_parallel, sharded_parameters, tensor_parallel):
        found, *_ = vfn.launch(measure, RANKS, device="cpu")
        replayed = found["replayed"][0]
        for name, (took, count, size) in found.items():
            rows.append([measure.__name__.replace("_", " "), name, took / 1e3, replayed / took, count, size])
    columns = ["layout", "step", "ms", "ratio of the replay's time to this", "collectives", "KiB"]
    publish("gloo_step", columns, rows)


# --- the layouts ------------------------------------------------------------------------------------------------------


def data_parallel() -> dict[str, Any]:
    """Whole parameters on every rank, half of the batch."""
    mesh, params, batch, mask = _given("dp")
    whole = tree.map_(lambda x: distribute_tensor(x.clone(), mesh, [Replicate()]), params)
    arrays = vfn.shard(params, mesh, P())
    halves = distribute_tensor(batch, mesh, [Shard(0)])
    return _measured(
        {
            "DistributedDataParallel": _by_module(DistributedDataParallel(_Model(params)), _mine(batch), mask),
            "DTensor": _on_dtensors(whole, halves, distribute_tensor(mask, mesh, [Replicate()])),
            **_on_arrays(as_for_one_device, arrays, vfn.shard(batch, mesh, P("dp")), vfn.shard(mask, mesh, P())),
        }
    )


def sharded_parameters() -> dict[str, Any]:
    """A half of each parameter on every rank, gathered where it is used; half of the batch."""
    mesh, params, batch, mask = _given("dp")
    arrays = vfn.shard(params, mesh, P("dp"))
    model = _Model(params)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return _measured(
        {
            "fully_shard": _by_module(model, _mine(batch), mask),
            **_on_arrays(as_for_one_device, arrays, vfn.shard(batch, mesh, P("dp")), vfn.shard(mask, mesh, P())),
        }
    )


def tensor_parallel() -> dict[str, Any]:
    """As in Megatron-LM: weights split by columns, then by rows."""
    mesh, params, batch, mask = _given("tp")
    arrays = vfn.shard(params, mesh, vfn.spec_from_rules(params, SPECS))

    def blocks() -> Params:
        return tree.map_(lambda x: x.to_local().clone(), arrays)

    dtensors = tree.map_(lambda x, block: DTensor.from_local(block, mesh, x.placements), arrays, blocks())
    return _measured(
        {
            "by hand": by_hand(blocks(), batch, mask, True, True),
            "DTensor": on_dtensors(dtensors, batch, mask, mesh),
            **_on_arrays(on_arrays, arrays, *vfn.shard((batch, mask), mesh, P())),
        }
    )


# --- the steps --------------------------------------------------------------------------------------------------------


def _given(axis: str) -> tuple[Any, Params, torch.Tensor, torch.Tensor]:
    torch.set_num_threads(1)
    batch = torch.arange(BATCH * (LENGTH + 1)).view(BATCH, -1) * 7 % VOCAB
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
    return vfn.make_mesh((RANKS,), (axis,)), init(LAYERS), batch, mask


def _mine(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(RANKS)[dist.get_rank()]


def _as_it_is(x: Any) -> Any:
    return x


class _Block(nn.Module):
    """The weights of a layer."""

    def __init__(self, weights: Params) -> None:
        super().__init__()
        for name, value in weights.items():
            setattr(self, name, nn.Parameter(value.clone()))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return layer(dict(self.named_parameters()), x, mask, _as_it_is, _as_it_is)


class _Model(nn.Module):
    """The same program as a module."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(_Block, params["blocks"]))
        self.embed, self.norm, self.head = (nn.Parameter(params[name].clone()) for name in ("embed", "norm", "head"))

    def forward(self, batch: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = F.embedding(batch[:, :-1], self.embed)
        for block in self.blocks:
            x = block(x, mask)
        return head(x, self.norm, self.head, batch)


def _by_module(model: nn.Module, batch: torch.Tensor, mask: torch.Tensor) -> Step:
    optimiser = torch.optim.SGD(model.parameters(), RATE)

    def step() -> None:
        optimiser.zero_grad()
        model(batch, mask).backward()
        optimiser.step()

    return step


def _on_dtensors(params: Params, batch: DTensor, mask: DTensor) -> Step:
    """Of whole parameters: the gradients are the ranks' parts of sums."""
    leaves = [leaf.requires_grad_() for leaf in tree.leaves(params)]

    def step() -> Any:
        value = loss(params, batch, mask, _as_it_is, _as_it_is)
        grads = torch.autograd.grad(value, leaves)
        with torch.no_grad():
            return value.detach(), [
                leaf - RATE * grad.redistribute(placements=[Replicate()]) for leaf, grad in zip(leaves, grads)
            ]

    return step


def as_for_one_device(params: Params, batch: Any, mask: Any) -> Any:
    """A step as a pure function; what it says of devices is where its arguments lie."""
    value, grads = vfn.value_and_grad(loss)(params, batch, mask, _as_it_is, _as_it_is)
    updates, _ = OPTIMISER.update(grads, OPTIMISER.init(params), params)
    return value, vfn.optim.apply_updates(params, updates)


def _on_arrays(step: Any, *args: Any) -> dict[str, Step]:
    replayed = vfn.jit(step)
    return {"eager": lambda: step(*args), "replayed": lambda: replayed(*args)}


def _measured(steps: dict[str, Step]) -> dict[str, tuple[float, int, float]]:
    """Of each step the median wall time in microseconds, how many collectives it makes, and the KiB that a rank gives to them.

    The steps take turns, and the ranks begin each one together.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(ROUNDS + WARM):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: (statistics.median(times[name][WARM:]), *_sent(step)) for name, step in steps.items()}


def _sent(step: Step) -> tuple[int, float]:
    """How many collectives a step makes, and how many KiB a rank gives to them, by torch's own profiler."""
    with torch.profiler.profile(record_shapes=True) as profile:
        step()
    sent = [event for event in profile.events() or () if event.name.startswith("gloo:")]
    return len(sent), sum(math.prod(event.input_shapes[0] or [0]) * 4 for event in sent if event.input_shapes) / 1024


if __name__ == "__main__":
    main()
