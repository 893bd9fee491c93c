"""vfn.data: batches that are a function of the key and the step, on any mesh, any number of processes, from any step on."""

import functools
import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.data import feistel
from vescale_fn.errors import DataError, RandomError, SpecError

KEY = vfn.random.key(7)


# --- the permutation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [*range(1, 20), 97, 1000, 4096])
def test_it_is_a_permutation(n) -> None:
    assert vfn.data.index_shuffle(KEY, torch.arange(n), n).sort().values.equal(torch.arange(n))


def test_one_index_at_a_time_gives_the_same() -> None:
    whole = vfn.data.index_shuffle(KEY, torch.arange(50).view(5, 10), 50)
    assert whole.flatten().tolist() == [vfn.data.index_shuffle(KEY, i, 50) for i in range(50)]


def test_its_values_stay_what_they_are() -> None:
    assert vfn.data.index_shuffle(KEY, torch.arange(8), 8).tolist() == [1, 2, 6, 4, 0, 5, 3, 7]
    assert vfn.data.index_shuffle(KEY, 5, 10**15) == 412776443927022


def test_of_very_many_numbers_nothing_as_long_is_made() -> None:
    for n in (10**12 + 7, 2**62):
        x = torch.randint(0, n, (2000,), generator=torch.Generator().manual_seed(0))
        found = vfn.data.index_shuffle(KEY, x, n)
        assert len(set(found.tolist())) == len(set(x.tolist()))
        assert found.min() >= 0
        assert found.max() < n
        assert abs(found.double().mean() / n - 0.5) < 5 * math.sqrt(1 / 12 / 2000)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_all_permutations_come_as_often(n) -> None:
    each = 40
    draws = each * math.factorial(n)
    counts = Counter(tuple(feistel.shuffled((i, 99), torch.arange(n), n).tolist()) for i in range(draws))
    chi2 = sum((counts[p] - each) ** 2 / each for p in itertools.permutations(range(n)))
    degrees = math.factorial(n) - 1
    assert chi2 < degrees + 5 * math.sqrt(2 * degrees)


def test_neighbours_part() -> None:
    n = 5000
    found = vfn.data.index_shuffle(KEY, torch.arange(n), n).double()
    for lag in (1, 2, 70, 71, 72):  # the grid has 71 rows
        pairs = torch.stack([found[lag:], found[:-lag]])
        assert abs(torch.corrcoef(pairs)[0, 1]) < 5 / math.sqrt(n)


def test_an_epochs_key_is_folded_in() -> None:
    for epoch in (0, 1, 2**20):
        assert feistel.of_epoch(feistel.words(KEY), epoch) == feistel.words(vfn.random.fold_in(KEY, epoch))


# --- which samples a step has -----------------------------------------------------------------------------------------


def epochs(batches, steps):
    return torch.cat([batches.indices(step) for step in range(steps)]).tolist()


def test_batches_that_roll_over_have_each_sample_once_an_epoch() -> None:
    batches = vfn.data.batches(range(10), 4, KEY)
    seen = epochs(batches, 5)
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert batches.steps_per_epoch == 2.5
    assert all(len(batches(step)) == 4 for step in range(5))


def test_batches_larger_than_the_data_set_roll_over_too() -> None:
    seen = epochs(vfn.data.batches(range(3), 7, KEY), 3)
    assert all(sorted(seen[i : i + 3]) == [0, 1, 2] for i in range(0, 21, 3))


def test_the_end_of_an_epoch_may_be_left_out() -> None:
    batches = vfn.data.batches(range(10), 4, KEY, last_batch="discard")
    first, second = epochs(batches, 2), epochs(batches, 4)[8:]
    assert batches.steps_per_epoch == 2
    assert len(set(first)) == len(set(second)) == 8
    assert set(first) != set(second)


def test_the_last_batch_may_be_smaller() -> None:
    batches = vfn.data.batches(range(10), 4, KEY, last_batch="keep")
    assert [len(batches(step)) for step in range(6)] == [4, 4, 2, 4, 4, 2]
    assert sorted(epochs(batches, 3)) == list(range(10))
    assert batches.steps_per_epoch == 3


def test_without_shuffling_they_stay_in_order() -> None:
    batches = vfn.data.batches(range(10), 4, KEY, shuffle=False)
    assert epochs(batches, 5) == [*range(10), *range(10)]
    assert batches.indices(10**12).tolist() == [(4 * 10**12 + i) % 10 for i in range(4)]


# --- reading ----------------------------------------------------------------------------------------------------------


class Augmented(Dataset):
    """Samples with noise from three generators, as in augmentation; which were read."""

    def __init__(self, n=23):
        self.n, self.read = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.read.append(i)
        noise = torch.rand(()) + np.random.rand() + random.random()
        return {"x": torch.arange(6.0) + 10 * i + noise, "y": i}


class Columns:
    """What batches use of `datasets.Dataset`, with the format "torch": a list of rows at once, one tensor a column."""

    def __init__(self, n=23):
        self.x = torch.arange(6.0 * n).view(n, 6)
        self.calls = []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": torch.as_tensor(i)}

    def __getitems__(self, indices):
        self.calls.append(indices)
        batch = self[indices]
        return [{name: column[i] for name, column in batch.items()} for i in range(len(indices))]


class NoisyColumns(Columns):
    def __getitems__(self, indices):
        noise = np.random.rand(len(indices))
        return [{**row, "x": row["x"] + x} for row, x in zip(super().__getitems__(indices), noise)]


SPEC = {"x": P("dp", "cp"), "y": P("dp")}
MESHES = [((4, 1), "dp cp"), ((2, 2), "dp cp"), ((2, 3), "dp cp"), ((1, 2), "dp cp"), ((3, 1), "dp cp")]


OWN = np.random.default_rng(3)


class OwnGenerators(Augmented):
    """Noise from generators that the data set has: its own, its transform's, and one of this file."""

    def __init__(self, n=23):
        super().__init__(n)
        self.generator, other, legacy = torch.Generator(), random.Random(1), np.random.RandomState(2)
        self.noise = [lambda x: x + other.random(), functools.partial(lambda r, x: x + r.rand(), legacy)]

    def __getitem__(self, i):
        sample = super().__getitem__(i)
        x = sample["x"] + torch.rand((), generator=self.generator) + torch.tensor(OWN.random(), dtype=torch.float32)
        for f in self.noise:
            x = f(x)
        return {**sample, "x": x}


@pytest.mark.parametrize("make", [Augmented, Columns, NoisyColumns, OwnGenerators])
@pytest.mark.parametrize(("sizes", "names"), MESHES)
@pytest.mark.parametrize("last", ["rollover", "keep"])
def test_a_mesh_has_the_batches_of_one_device(make, sizes, names, last) -> None:
    alone = vfn.data.batches(make(), 8, KEY, last_batch=last)
    with vfn.simulate(math.prod(sizes)):
        mesh = vfn.make_mesh(sizes, tuple(names.split()))
        batches = vfn.data.batches(make(), 8, KEY, mesh=mesh, spec=SPEC, last_batch=last)
        for step in (0, 1, 2, 3, 2):
            found = batches(step)
            assert [vfn.spec_of(found[name]) for name in "xy"] == [SPEC["x"], SPEC["y"]]
            assert all(vfn.unshard(found[name]).equal(alone(step)[name]) for name in "xy")


def test_they_go_on_from_any_step_with_workers_or_without() -> None:
    batches = [vfn.data.batches(Augmented(), 5, KEY, num_workers=workers) for workers in (0, 2)]
    expected = [batches[0](step) for step in range(3, 7)]
    before = torch.get_rng_state()
    for one in batches:
        found = list(itertools.islice(one.starting_at(3), 4))
        assert all(a["x"].equal(b["x"]) and a["y"].equal(b["y"]) for a, b in zip(found, expected))
    assert torch.get_rng_state().equal(before)


def test_what_a_collate_fn_draws_of_all_samples_is_the_same_on_a_mesh() -> None:
    alone = vfn.data.batches([*range(8)], 4, KEY, collate_fn=mixed)(1)
    batch = on_mesh(lambda: vfn.data.batches([*range(8)], 4, KEY, spec=P(), collate_fn=mixed)(1))
    assert vfn.unshard(batch).equal(alone)


def test_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    kept = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    vfn.data.batches(Augmented(), 5, KEY)(0)
    assert torch.get_rng_state().equal(kept[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == kept[1:]


def test_a_sample_is_augmented_otherwise_each_epoch() -> None:
    batches = vfn.data.batches(Augmented(4), 4, KEY, shuffle=False)
    first, again, second = batches(0)["x"], batches(0)["x"], batches(1)["x"]
    assert first.equal(again)
    assert not (first == second).any()
    assert len({round(float(x), 6) for x in (first[:, 0] - 10 * torch.arange(4.0))}) == 4


def test_rows_are_read_once_and_by_one_call_where_that_is_possible() -> None:
    data = Columns()
    with vfn.simulate(8):
        mesh = vfn.make_mesh((2, 4), ("dp", "cp"))
        batches = vfn.data.batches(data, 4, KEY, mesh=mesh, spec=P("dp"))
        batches(0)
    assert data.calls == [part.tolist() for part in batches.indices(0).chunk(2)]


def test_it_takes_the_current_mesh_and_gives_plain_batches_on_one_device() -> None:
    def first(x):
        return vfn.data.batches(Augmented(), 4, KEY, spec=P("dp"))(0)["x"] + x

    with vfn.simulate(2), vfn.use_mesh(mesh := vfn.make_mesh(2, "dp")):
        vfn.check_parity(first, torch.zeros(6), mesh=mesh)


def _on_processes():
    mesh = vfn.make_mesh((2, 2), ("dp", "cp"))
    data = Augmented()
    batches = vfn.data.batches(data, 6, KEY, mesh=mesh, spec=SPEC)
    found = [{name: vfn.unshard(x).tolist() for name, x in batches(step).items()} for step in (0, 1, 5, 1)]
    return found, data.read


def _virtual():
    with vfn.deterministic(virtual=4):
        return _on_processes()


@pytest.mark.parametrize(("run", "count"), [(_on_processes, 4), (_virtual, 2), (_virtual, 4)])
def test_processes_read_their_rows_alone(gloo, run, count) -> None:
    alone = vfn.data.batches(Augmented(), 6, KEY)
    expected = [{name: x.tolist() for name, x in alone(step).items()} for step in (0, 1, 5, 1)]
    for process, (found, read) in enumerate(gloo(count, run)):
        assert found == expected
        half = slice(0, 3) if process < count // 2 else slice(3, 6)
        assert read == [i for step in (0, 1, 5, 1) for i in alone.indices(step)[half].tolist()]


# --- what is refused --------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def on_mesh(make):
    with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh(2, "dp")):
        return make()


def ragged():
    lengths = [5, 5, 6, 6]
    collate = lambda rows: torch.zeros(len(rows), rows[0])
    batches = vfn.data.batches(lengths, 2, KEY, spec=P("dp"), shuffle=False, collate_fn=collate)
    return [batches(step) for step in range(2)]


def mixed(rows):
    """Samples, each with a share of another one."""
    x = torch.stack([torch.as_tensor(row) for row in rows]).float()
    return x + torch.rand(()) * x[torch.randperm(len(rows))]


MISUSES = {
    "a collate_fn that draws": (
        lambda: on_mesh(lambda: vfn.data.batches([*range(8)], 4, KEY, spec=P("dp"), collate_fn=mixed)(0)),
        "data.batches: collate_fn draws random numbers, but it has a rank's samples alone, whose number depends on the mesh",
    ),
    "a generator of the system": (
        lambda: vfn.data.batches([random.SystemRandom()], 1, KEY)(0),
        "data.batches: the data set draws from the SystemRandom ",
    ),
    "a stream": (
        lambda: vfn.data.batches(Stream(), 4, KEY),
        "data.batches: the data set must be map-style, with dataset[i] and len(dataset), but it is the Stream",
    ),
    "a generator": (
        lambda: vfn.data.batches(iter([1, 2]), 1, KEY),
        "data.batches: the data set must be map-style, with dataset[i] and len(dataset), but it is the list_iterator",
    ),
    "no size": (
        lambda: vfn.data.batches([1], 0, KEY),
        "data.batches: size must be a positive integer, but it is the int 0",
    ),
    "nothing": (
        lambda: vfn.data.batches([], 2, KEY),
        "data.batches: the data set has 0 samples, of which no batch of 2",
    ),
    "too few": (
        lambda: vfn.data.batches([1], 2, KEY, last_batch="discard"),
        "data.batches: the data set has 1 samples, of which no batch of 2 can be made with last_batch='discard'",
    ),
    "another end": (
        lambda: vfn.data.batches([1], 1, KEY, last_batch="drop"),
        "data.batches: last_batch must be 'rollover', 'discard' or 'keep', but it is 'drop'",
    ),
    "no step": (
        lambda: vfn.data.batches([1], 1, KEY)(-1),
        "data.batches: the step must be an integer from 0, but it is the int -1",
    ),
    "other axes": (
        lambda: on_mesh(lambda: vfn.data.batches([1] * 8, 4, KEY, spec={"x": P("dp"), "y": P()})),
        "data.batches: the spec must be a vfn.P, or a tree of some, that split dim 0, the samples, by the same axes",
    ),
    "ranks without samples": (
        lambda: on_mesh(lambda: vfn.data.batches([1] * 8, 1, KEY, spec=P("dp"))),
        "data.batches: of a batch of 1 samples, split by dp on the mesh (dp=2), some ranks get none",
    ),
    "text": (
        lambda: on_mesh(lambda: vfn.data.batches(["a"] * 8, 4, KEY)(0)),
        "data.batches: a batch must consist of tensors, but it has the str 'a'",
    ),
    "other shapes": (
        lambda: on_mesh(ragged),
        "data.batches: the batch of step 1 has other leaves, shapes or dtypes than those before it\n  * batch",
    ),
    "an index": (
        lambda: vfn.data.index_shuffle(KEY, torch.tensor([3, 8]), 8),
        "data.index_shuffle: index has numbers from 3 to 8, which are not all in [0, 8)\n  Instead: index % n",
    ),
    "floats": (
        lambda: vfn.data.index_shuffle(KEY, torch.ones(2), 8),
        "data.index_shuffle: index must be an integer or a tensor of integers, but it is",
    ),
    "no n": (
        lambda: vfn.data.index_shuffle(KEY, 0, 0),
        "data.index_shuffle: n must be an integer from 1 to 2**62, but",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_what_does_not_go_is_refused_by_name(name) -> None:
    call, text = MISUSES[name]
    with pytest.raises(DataError) as caught:
        call()
    assert str(caught.value).startswith(text)


def test_keys_and_specs_are_checked_as_everywhere() -> None:
    with pytest.raises(RandomError, match="the first argument must be a key, but it is the int 3"):
        vfn.data.batches([1], 1, 3)
    with pytest.raises(SpecError, match="'pp'"):
        on_mesh(lambda: vfn.data.batches([1] * 8, 4, KEY, spec=P("pp")))
