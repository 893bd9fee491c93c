"""A sharded draw is the whole draw, each rank having made its own block: every spec, mesh and size."""

import hashlib
import itertools
import json
from pathlib import Path

import pytest
import torch
from distributions import draw_local

from vescale_fn import random
from vescale_fn._core.sharding.index_map import local_indices
from vescale_fn._core.sharding.spec import P
from vescale_fn.random.backends import draw_op
from vescale_fn.random.generators import counters
from vescale_fn.random.sharded import Draw

KEY = random.key(42)
GOLDENS = json.loads((Path(__file__).parent / "goldens" / "random.json").read_text())["cases"]
MESHES = [{"a": 1}, {"a": 4}, {"a": 2, "b": 3}, {"a": 2, "b": 2, "c": 2}]
SHAPES = [(), (13,), (3,), (13, 10), (8, 12), (2, 1, 5), (6, 5, 4)]
UNIFORM = ("uniform", torch.float32, (0.0, 1.0))


def specs(axes: list[str], ndim: int) -> list[P]:
    """Every way to give each axis a dim, or none, with the axes of one dim in every order."""
    found = {}
    for order in itertools.permutations(axes):
        for dims in itertools.product([None, *range(ndim)], repeat=len(axes)):
            rows = [tuple(a for a, d in zip(order, dims, strict=True) if d == dim) for dim in range(ndim)]
            found[P(*rows)] = None
    return list(found)


def coords(axes: dict[str, int]) -> list[dict[str, int]]:
    return [dict(zip(axes, place, strict=True)) for place in itertools.product(*map(range, axes.values()))]


def cut(whole: torch.Tensor, indices) -> torch.Tensor:
    for dim, index in enumerate(indices):
        whole = whole.index_select(dim, torch.tensor(list(index), dtype=torch.int64))
    return whole


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_every_block_is_a_piece_of_the_whole(axes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    # The counters of all blocks, without the hash: cheap enough for every case.
    for size, shape in itertools.product((4, 1 << 15), SHAPES):
        for spec, coord in itertools.product(specs(list(axes), len(shape)), coords(axes)):
            indices = local_indices(shape, axes, spec, coord)
            rows = counters.Rectangle(shape, indices).encoded()
            expected = cut(torch.arange(torch.Size(shape).numel()).view(shape), indices).flatten().tolist()
            assert walked(counters.decoded(shape, rows), size) == expected, (shape, spec, coord)


def walked(rectangle: counters.Rectangle, size: int) -> list[int]:
    found, end = [], 0
    for start, stop, high, low in counters.blocks(rectangle, size, torch.device("cpu")):
        assert start == end
        assert stop - start == len(low)
        end = stop
        found += (
            ((torch.as_tensor(high).to(torch.int64) << 32) + (low.to(torch.int64) & 0xFFFFFFFF))
            .expand(len(low))
            .tolist()
        )
    return found


def test_counters_of_rectangles_beyond_32_bits() -> None:
    shape = (3, 1 << 20, 5000, 7)
    rows = [
        (range(1, 3), range(900_000, 900_003), range(4998, 5000), [0, 2, 3, 6]),
        (range(2), range(858_990, 858_995), range(100, 400), range(2, 5)),
        (range(1), range(122_713, 122_714), range(5000), range(7)),
        (range(1), range(122_713, 122_714), range(1757, 1759), range(7)),
        ([0, 2], range(122_712, 122_715), range(5000), range(7)),
    ]
    for indices in rows:
        expected = torch.zeros((), dtype=torch.int64)
        for index, size in zip(indices, shape, strict=True):
            expected = expected[..., None] * size + torch.tensor(list(index))
        for size in (4096, 1 << 15):
            assert walked(counters.Rectangle(shape, indices), size) == expected.flatten().tolist()


@pytest.mark.parametrize(
    "kind",
    [
        UNIFORM,
        ("normal", torch.bfloat16, ()),
        ("bernoulli", torch.float32, (0.3,)),
        ("randint", torch.int32, (-5, 1000, 296)),
        ("bits", torch.uint64, ()),
    ],
    ids=lambda kind: kind[0],
)
def test_blocks_of_every_kind(kind) -> None:
    for axes, shape in ((MESHES[2], (13, 10)), (MESHES[3], (6, 5, 4))):
        name, dtype, params = kind
        draw = Draw(name, shape, dtype, params)
        whole = draw_local(KEY, draw, tuple(map(range, shape)))
        for spec in specs(list(axes), len(shape))[::7]:
            for coord in coords(axes):
                indices = local_indices(shape, axes, spec, coord)
                block = draw_local(KEY, draw, indices)
                assert torch.equal(
                    block,
                    cut(whole.view(torch.int64), indices).view(dtype) if dtype == torch.uint64 else cut(whole, indices),
                )


def test_goldens_of_shards() -> None:
    cases = [case for case in GOLDENS if "mesh" in case["args"]]
    assert len(cases) == 12
    for case in cases:
        args, shape = case["args"], tuple(case["args"]["shape"])
        kind = UNIFORM if case["fn"] == "uniform" else ("normal", torch.float32, ())
        indices = [range(*args["rows"]), range(*args.get("cols", (0, shape[1])))]
        block = draw_local(KEY, Draw(kind[0], shape, *kind[1:]), indices)
        assert block.shape == torch.Size(case["out"]["shape"])
        assert hashlib.sha256(block.numpy().tobytes()).hexdigest() == case["out"]["sha256"]


def test_a_batch_of_keys_draws_a_batch_of_blocks() -> None:
    keys, draw = random.split(KEY, 5), Draw("normal", (9, 7), torch.float32)
    indices = (range(3, 6), [0, 2, 6])
    for size in (4, 40, 1 << 15):
        draw_op.BLOCK["cpu"], before = size, draw_op.BLOCK["cpu"]
        try:
            batch = draw_local(keys, draw, indices)
        finally:
            draw_op.BLOCK["cpu"] = before
        assert torch.equal(batch, torch.stack([draw_local(key, draw, indices) for key in keys]))


def test_a_block_of_a_huge_draw_costs_only_itself() -> None:
    """2**50 elements in all; the rank's block has 12."""
    block = draw_local(KEY, Draw("uniform", (1 << 30, 1 << 20), *UNIFORM[1:]), (range(5, 8), range(100, 104)))
    whole_row = draw_local(KEY, Draw("uniform", (8 << 20,), *UNIFORM[1:]), (range((6 << 20) + 100, (6 << 20) + 104),))
    assert torch.equal(block[1], whole_row)
