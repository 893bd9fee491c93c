"""What a plain op costs inside a `shard_map` body, beside the same op on the same tensors outside of it."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import vescale_fn as vfn
from benchmarks import fake_ranks
from benchmarks.side_by_side import publish
from vescale_fn import P

ROUNDS, TIMES = 41, 1000
Op = Callable[[Any, Any], Any]

# the op on a batch x, which differs by rank, and a weight w, which does not
OPS: dict[str, Op] = {
    "`x + w`": lambda x, w: x + w,
    "`x @ w`": lambda x, w: x @ w,
    "`linear(x, w)`": lambda x, w: torch.nn.functional.linear(x, w),
    "`relu`": lambda x, w: torch.relu(x),
    "`x * 2.0`": lambda x, w: x * 2.0,
    "`view`": lambda x, w: x.view(2, -1),
    "`sum(1)`": lambda x, w: x.sum(1),
    "`softmax`": lambda x, w: torch.softmax(x, 1),
    "`cat`": lambda x, w: torch.cat([x, w]),
}
WITH_A_WEIGHT = ("`x + w`", "`x @ w`", "`linear(x, w)`", "`cat`")
GRADIENTS = {"none": (False, False), "of x": (True, False), "of x and w": (True, True)}


def timed(op: Op, times: int, into: list[float], x: Any, w: Any) -> Any:
    """Run the op many times, and note what one run took, in microseconds: so what the call of the body costs is not seen."""
    start = time.process_time()
    for _ in range(times):
        op(x, w)
    into.append((time.process_time() - start) / times * 1e6)
    return x


def medians(mesh: Any, op: Op, of_x: bool = False, of_w: bool = False, ranks: int = 1) -> dict[str, float]:
    """The median time of the op, outside of a body as often as `ranks`, and in bodies with and without the check."""
    x, w = torch.randn(8, 8, requires_grad=of_x), torch.randn(8, 8, requires_grad=of_w)
    batch = vfn.shard(torch.randn(64, 8), mesh, P("dp")).requires_grad_(of_x)
    took: dict[str, list[float]] = {"plain": [], "unchecked": [], "checked": []}
    times = TIMES // ranks
    calls = {"plain": lambda: timed(op, TIMES, took["plain"], x, w)}
    for side in ("unchecked", "checked"):
        body = functools.partial(timed, op, times, took[side])
        specs = {"mesh": mesh, "in_specs": (P("dp"), P()), "out_specs": P("dp"), "check_vma": side == "checked"}
        calls[side] = functools.partial(vfn.shard_map(body, **specs), batch, w)
    sides = list(calls)
    for turn in range(ROUNDS):
        for side in sides[turn % 3 :] + sides[: turn % 3]:
            calls[side]()
    return {side: statistics.median(values[1:]) for side, values in took.items()}


def main() -> None:
    fake_ranks.start()
    mesh, rows = fake_ranks.mesh("(8,)"), []
    for gradient, needs in GRADIENTS.items():
        for name in WITH_A_WEIGHT if needs[1] else OPS:
            took = medians(mesh, OPS[name], *needs)
            plain = took["plain"]
            rows.append([gradient, name, plain, took["unchecked"] - plain, took["checked"] - plain])
    publish("ops_in_bodies", ["gradients", "op", "plain, us", "`check_vma=False`, us more", "checked, us more"], rows)

    with vfn.simulate(8):
        mesh, rows = vfn.make_mesh((8,), ("dp",)), []
        for name in ("`x @ w`", "`relu`", "`softmax`"):
            took = medians(mesh, OPS[name], ranks=8)
            plain = 8 * took["plain"]
            rows.append([name, plain, took["unchecked"] / plain, took["checked"] / plain])
    publish("ops_in_simulated_bodies", ["op", "8 plain ops, us", "ratio, `check_vma=False`", "ratio, checked"], rows)


if __name__ == "__main__":
    main()
