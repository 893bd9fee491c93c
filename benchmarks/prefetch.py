"""A `scan` over FSDP layers on four real processes over gloo, whose link and whose computing take the time that is stated.

Four processes on few cores have neither a link nor a device of their own. So both are slept: each collective occupies its link
for `LINK` seconds, one after the other on a rank, besides what gloo takes, and a layer computes for `FORWARD` or `BACKWARD`.
What a schedule makes of that is what is measured, beside the same layers under `fully_shard`, and the least that is possible:
what is computed, or what travels, whichever takes longer, with the first gather and the last sum.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import vescale_fn as vfn
from benchmarks.side_by_side import publish
from vescale_fn import P
from vescale_fn._core import torch_internals
from vescale_fn.plan.passes.overlap import overlap
from vescale_fn.plan.passes.prefetch import prefetch

RANKS, LAYERS, WIDTH, ROUNDS, WARM = 4, 8, 64, 9, 2
FORWARD, BACKWARD, LINK = 0.02, 0.04, 0.015


# --- what takes its time ----------------------------------------------------------------------------------------------


@torch.library.custom_op("benchmarks::computing", mutates_args=())
def computing(x: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return x.clone()


computing.register_fake(lambda x, seconds: torch.empty_like(x))
computing.register_autograd(lambda ctx, g: (computing(g, BACKWARD), None))


class _Link:
    """What this rank's collectives travel over, one after the other."""

    free = 0.0

    def taken(self) -> float:
        """When what is sent now has arrived."""
        self.free = max(self.free, time.perf_counter()) + LINK
        return self.free

    def slow(self, send: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(send)
        def sent(*args: Any, **kwargs: Any) -> Any:
            arrives, work = self.taken(), send(*args, **kwargs)
            if work is None:
                _sleep_until(arrives)
            return None if work is None else _Arriving(work, arrives)

        return sent


class _Arriving:
    def __init__(self, work: Any, at: float) -> None:
        self.work, self.at = work, at

    def wait(self) -> None:
        self.work.wait()
        _sleep_until(self.at)


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.perf_counter()))


def _slowed() -> None:
    link = _Link()
    of_plans = ("all_gather_single", "reduce_scatter_single")
    of_torch = ("all_gather_into_tensor", "reduce_scatter_tensor")
    for module, names in ((torch_internals, of_plans), (dist, of_torch)):
        for name in names:
            setattr(module, name, link.slow(getattr(module, name)))


# --- the steps --------------------------------------------------------------------------------------------------------


def layer(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return computing(torch.tanh(h @ w), FORWARD)


def scanned(mesh: Any) -> Callable[[Any, Any], Any]:
    """The gradient of the layers' weights; they are gathered forward and backward."""

    def body(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        gather = functools.partial(vfn.all_gather, axis_name="dp", axis=0, tiled=True)
        policy = vfn.remat_policies.save_anything_except_these_names("weight")
        step = vfn.remat(lambda h, w: layer(h, vfn.name(gather(w), "weight")), policy=policy)
        return vfn.psum(vfn.scan(lambda h, w: (step(h, w), None), x, w)[0].sum(), "dp")

    return vfn.grad(vfn.shard_map(body, mesh=mesh, in_specs=(P(None, "dp"), P("dp")), out_specs=P()))


class _Layer(nn.Module):
    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w.clone())

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return layer(h, self.w)


def _wrapped(w: torch.Tensor, x: torch.Tensor, mesh: Any) -> Callable[[], Any]:
    model = nn.Sequential(*map(_Layer, w.unbind()))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    mine = x.chunk(RANKS)[dist.get_rank()]

    def step() -> None:
        model.zero_grad()
        model(mine).sum().backward()

    return step


def measured() -> dict[str, tuple[float, float]]:
    torch.set_num_threads(1)
    mesh = vfn.make_mesh((RANKS,), ("dp",))
    torch.manual_seed(0)
    w, x = 0.1 * torch.randn(LAYERS, WIDTH, WIDTH), torch.randn(4 * RANKS, WIDTH)
    given = vfn.shard((w, x), mesh, (P(None, "dp"), P("dp")))
    ours: dict[Any, Any] = {one: functools.partial(one, on_cpu=True) for one in (overlap, prefetch)}
    passes: dict[str, Any] = {
        "each waits": vfn.plan.PASSES,
        "overlap in an iteration": [ours[one] if one is overlap else one for one in vfn.plan.PASSES],
        "and across its edges": [ours.get(one, one) for one in vfn.plan.PASSES],
    }
    steps = {}
    for name, chosen in passes.items():
        jitted = vfn.jit(scanned(mesh), passes=chosen)
        steps[name] = lambda jitted=jitted: jitted(*given)
    steps["fully_shard"] = _wrapped(w, x, mesh)
    _slowed()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS + WARM):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: (min(took[WARM:]), statistics.median(took[WARM:])) for name, took in times.items()}


def least() -> float:
    """The seconds of a schedule that loses none: a gather ahead, what takes longest of each pass, a sum behind."""
    forward, backward = LAYERS * max(FORWARD, LINK), LAYERS * max(BACKWARD, 2 * LINK)
    return LINK + forward + backward + LINK


def main() -> None:
    found, *_ = vfn.launch(measured, RANKS, device="cpu")
    rows = [[name, 1e3 * low, 1e3 * middle, low / least()] for name, (low, middle) in found.items()]
    rows.append(["the least", 1e3 * least(), 1e3 * least(), 1.0])
    publish("prefetch", ["step", "ms, least", "ms, median", "of the least possible"], rows)


if __name__ == "__main__":
    main()
