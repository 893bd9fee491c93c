"""What one rank does in Python does not grow with the number of ranks (fake ones, which exchange nothing), and what a plan takes
grows as it does: calls are counted."""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend

import vescale_fn as vfn
from vescale_fn import P


@contextlib.contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """This process is one of so many; not the first, which no piece that is cut short reaches."""
    dist.init_process_group("fake", rank=count // 2, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def calls(f: Callable[[], Any]) -> int:
    """How many functions are called when `f` runs again, in Python and in C."""
    f()
    f()
    count = 0

    def seen(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # what other tests have left may call something when it goes
    sys.setprofile(seen)
    try:
        f()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def move(shape: tuple[int, ...], source: P, target: P) -> Callable[[Any], Callable[[], Any]]:
    def made(mesh: Any) -> Callable[[], Any]:
        x = vfn.shard(torch.zeros(shape), mesh, source)
        return lambda: vfn.with_sharding(x, target)

    return made


def of_a_body(f: Callable[[Any], Any], in_specs: P, out_specs: P) -> Callable[[Any], Callable[[], Any]]:
    def made(mesh: Any) -> Callable[[], Any]:
        x = vfn.shard(torch.zeros(256, 256), mesh, in_specs)
        mapped = vfn.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        return lambda: mapped(x)

    return made


OPTIMISER = vfn.optim.adamw(1e-3)
FEW = 8  # a rank whose block is cut short, or that pads, takes another way
ROWS, COLUMNS, BOTH = P(("a", "b")), P(None, ("a", "b")), ("a", "b")
WORK = {
    "gather": move((256, 8), ROWS, P()),
    "gather columns": move((8, 256), COLUMNS, P()),
    "exchange": move((256, 256), ROWS, COLUMNS),
    "slice": move((8, 256), P(), COLUMNS),
    "gather, uneven": move((777, 8), ROWS, P()),
    "gather columns, uneven": move((8, 777), COLUMNS, P()),
    "gather one axis, uneven": move((777, 8), ROWS, P("a")),
    "exchange, uneven": move((777, 777), ROWS, COLUMNS),
    "slice, uneven": move((8, 777), P(), COLUMNS),
    "gather, in another order": move((777, 8), P(("b", "a")), P()),
    "draw": lambda mesh: lambda: vfn.random.normal(vfn.random.key(0), (777, 2), mesh=mesh, spec=ROWS),
    "all_gather": of_a_body(lambda x: vfn.all_gather(x, BOTH, axis=1, tiled=True), ROWS, ROWS),
    "all_to_all": of_a_body(lambda x: vfn.all_to_all(x, BOTH, 1, 0, tiled=True), ROWS, COLUMNS),
    "psum_scatter": of_a_body(lambda x: vfn.psum_scatter(x, BOTH, scatter_dimension=1, tiled=True), ROWS, ROWS),
}


@pytest.mark.parametrize("name", WORK)
def test_as_many_calls_on_each_number_of_ranks(name: str) -> None:
    counts = []
    for ranks in (8, 256):
        with fake_ranks(ranks):
            counts.append(calls(WORK[name](vfn.make_mesh((ranks // 4, 4), BOTH, device="cpu"))))
    assert counts[1] <= counts[0] + FEW


def test_sums_of_parts() -> None:
    counts = []
    for ranks in (8, 256):
        with fake_ranks(ranks):
            mesh = vfn.make_mesh((ranks,), "a", device="cpu")
            x = vfn.shard(torch.zeros(ranks, 777), mesh, P("a"))
            part = vfn.with_sharding(x, P("a")).mT @ vfn.shard(torch.zeros(ranks, 5), mesh, P("a"))
            counts.append(calls(lambda part=part * 1: vfn.with_sharding(part * 1, P("a"))))
    assert counts[1] <= counts[0] + FEW


def test_passes_take_as_many_calls_for_each_leaf_of_a_large_tree() -> None:
    """Donation once compared each result with every other, and took 7 s at 1,000 leaves."""

    def step(params: dict[str, Any], grads: dict[str, Any], state: Any) -> Any:
        updates, state = OPTIMISER.update(grads, state, params)
        return vfn.optim.apply_updates(params, updates), state

    counts = []
    for leaves in (20, 160):
        params = {f"{i}": torch.zeros(4, 2) for i in range(leaves)}
        f = vfn.jit(step, donate_argnums=(0, 2))
        counts.append(calls(lambda f=f, p=params: (f.clear_cache(), f.lower(p, p, OPTIMISER.init(p)).memory())))
    assert counts[1] < 8 * 1.1 * counts[0]
