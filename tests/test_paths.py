"""The usual paths of models: which collectives run, counted exactly, against what a careful person would write by hand."""

from __future__ import annotations

import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def told(log: vfn.debug.CommLog) -> list[tuple[str, str, int]]:
    """What a log holds, in order: op, axis, bytes."""
    return [(r.op, r.axis, r.bytes) for r in log]


@pytest.fixture
def tp():
    with vfn.simulate(4):
        yield vfn.make_mesh((4,), ("tp",))


# --- sums that wait ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["h @ w + b", "b + h @ w", "linear", "add_", "sub", "twice"])
def test_a_bias_is_added_to_one_part_of_a_sum(tp, form: str) -> None:
    """A row-parallel matrix leaves a partial sum; adding the bias does not bring it together, so a reduce-scatter can."""
    h, w, b = rand(6, 8), rand(8, 12), rand(12)
    forms = {
        "h @ w + b": lambda h, w, b: h @ w + b,
        "b + h @ w": lambda h, w, b: b + h @ w,
        "linear": lambda h, w, b: torch.nn.functional.linear(h, w.T, b),
        "add_": lambda h, w, b: (h @ w).add_(b),
        "sub": lambda h, w, b: b - h @ w,
        "twice": lambda h, w, b: (h @ w + b) + b,
    }
    f = forms[form]
    args = vfn.shard((h, w, b), tp, (P(None, "tp"), P("tp"), P()))
    with vfn.comm_log() as log:
        y = f(*args)
        assert vfn.spec_of(y) == P(unreduced={"tp"})
        y = vfn.with_sharding(y, P(None, "tp"))
    assert told(log) == [("reduce_scatter", "tp", 6 * 12 * 4)]
    torch.testing.assert_close(vfn.unshard(y), f(h, w, b))


@pytest.mark.parametrize(
    ("add", "spec"),
    [
        (lambda y, x: y + x.bfloat16(), P(unreduced={"tp"})),  # bf16 is promoted: the narrower value loses nothing
        (lambda y, x: y[:, :1] + x, P()),  # the sum would grow before it is sent
        (lambda y, x: torch.cat([y, x]), P()),
        (lambda y, x: y + vfn.with_sharding(x, P(None, "tp")), P(None, "tp")),  # sent where the other is: half the way
        (lambda y, x: x.clone().add_(y), P()),  # what is written stays where it is
        (lambda y, x: y.long() + x.long(), P()),
    ],
    ids=["mixed floats", "broadcast", "cat", "split", "written", "int"],
)
def test_when_a_sum_with_whole_values_stays_partial(tp, add, spec: P) -> None:
    """It does where that sends no more than at once, and is the same to rounding."""
    h, w, x = rand(6, 8), rand(8, 12), rand(6, 12)
    y = vfn.shard(h, tp, P(None, "tp")) @ vfn.shard(w, tp, P("tp"))
    out = add(y, vfn.shard(x, tp, P()))
    assert vfn.spec_of(out) == spec
    torch.testing.assert_close(vfn.unshard(out), add(h @ w, x))
