"""The same bits on any number of processes, and in any layout of data: a few steps of a few rows of benchmarks/same_bits.py."""

import math

import pytest
import torch

import vescale_fn as vfn
from benchmarks import same_bits
from benchmarks.same_bits import OVER_ONE_AXIS, Cell, train
from vescale_fn import P

CELLS = [
    Cell("gpt", "fsdp+tp", "bf16", "lion", "eager"),
    Cell("mixtral", "dp+cp+ep", "f32", "muon", "eager"),
]


def on_ranks(cell, steps=2):
    with vfn.deterministic(virtual=same_bits.RANKS):
        return train(cell, steps)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell))
def test_two_processes_have_the_bits_of_one(cell, gloo):
    assert gloo(2, on_ranks, cell) == [on_ranks(cell)] * 2


def test_all_layouts_of_data_have_the_same_bits():
    found = {on_ranks(Cell("gpt", layout, "f32", "adamw", "eager")) for layout in OVER_ONE_AXIS}
    assert len(found) == 1


def test_in_bfloat16_too_eager_and_in_plans_whose_layers_are_recorded_once():
    cells = [Cell("gpt", layout, "bf16", "adafactor", how) for layout, how in (("dp", "eager"), ("hsdp", "jit"))]
    assert len({on_ranks(cell, 1) for cell in cells}) == 1


def test_without_the_mode_they_differ():
    cell, found = Cell("gpt", "dp", "f32", "adamw", "eager"), set()
    for n in 2, 4, 8:
        with vfn.simulate(n):
            found.add(train(cell, 2, {"dp": n}))
    assert len(found) == 3


def test_the_whole_list_has_every_model_and_layout():
    every = list(same_bits.cells(same_bits.parsed([])))
    assert {cell.layout for cell in every} == set(same_bits.LAYOUTS)
    assert all(math.prod(sizes.values()) == same_bits.RANKS for sizes in same_bits.LAYOUTS.values())
    assert len(every) == 64 * 2 * 4 * 2  # layouts of each model, precisions, optimisers, eager and jit


# --- the norm of all gradients, which sums over what a layout splits --------------------------------------------------

GRADS = {
    "a": (7, 1001),
    "b": (5,),
    "empty": (0, 2),
    "half": (64, 33),
}


def gradients():
    found = {name: torch.randn(shape) * 3 for name, shape in GRADS.items()}
    return {**found, "b": found["b"] * 1e-9, "half": found["half"].bfloat16(), "zero": torch.zeros(3)}


def test_a_norm_has_the_same_bits_however_its_leaves_lie():
    grads = gradients()
    expected = torch.cat([x.double().flatten() for x in grads.values()]).norm().float()
    with vfn.deterministic(virtual=8):
        alone = vfn.optim.global_norm(grads)
        torch.testing.assert_close(alone, expected, rtol=1.2e-7, atol=0)
        mesh = vfn.make_mesh((2, 4), ("x", "y"))
        for spec in (P(), P("x"), P("y"), P(("x", "y")), P(("y", "x"))):
            lying = vfn.shard(grads, mesh, spec)
            with vfn.comm_log() as log:
                found = vfn.optim.global_norm(lying)
            assert vfn.digest(found) == vfn.digest(vfn.jit(vfn.optim.global_norm)(lying)) == vfn.digest(alone), spec
            assert len(log) == (2 if spec else 0)
        unreduced = vfn.with_sharding(vfn.shard(grads["a"], mesh, P()), P(unreduced="x"))
        assert vfn.digest(vfn.optim.global_norm(unreduced)) == vfn.digest(vfn.optim.global_norm(grads["a"]))


def test_a_norm_of_what_is_not_finite_small_or_differentiated():
    with vfn.deterministic(virtual=2):
        mesh = vfn.make_mesh((2,), ("x",))
        for odd in math.inf, math.nan:
            found = vfn.optim.global_norm(vfn.shard(torch.tensor([1.0, odd, 0.0]), mesh, P("x"))).item()
            assert found == odd or math.isnan(found) and math.isnan(odd)
        assert vfn.optim.global_norm(torch.full((4,), 2.0**-140)).item() == 2.0**-139
        assert vfn.optim.global_norm(torch.full((4,), 2.0**100)).item() == 2.0**101
        assert vfn.optim.global_norm(torch.zeros(4)).item() == 0
        assert vfn.grad(vfn.optim.global_norm)(torch.ones(4)).tolist() == [0.5] * 4
        assert torch.func.grad(vfn.optim.global_norm)(torch.ones(4)).tolist() == [0.5] * 4
