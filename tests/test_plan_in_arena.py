"""`jit(arena=True)`: the same bits as without, results that last, one block for each call that runs at the same time."""

import threading

import pytest
import torch
from programs import PROGRAMS

import vescale_fn as vfn
from vescale_fn import P, errors, tree
from vescale_fn.plan.execution import in_arena, in_pool

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def small_values_too(monkeypatch):
    monkeypatch.setattr(in_arena, "_LEAST", 1)


def equal(a, b):
    return all(torch.equal(vfn.unshard(x), vfn.unshard(y)) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


NAMES = "tensor_parallel_mlp fully_sharded attention mixture_of_experts elementwise shapes in_place a_training_step moving_about"


@pytest.mark.parametrize("name", NAMES.split())
def test_a_step_has_the_same_bits_in_an_arena_and_its_results_last(name):
    one = PROGRAMS[name]
    params, data = one.inputs()
    with vfn.simulate(3):
        mesh = vfn.make_mesh((3,), ("d",))
        of_params, of_data = one.specs("d", None)
        params, data = vfn.shard(params, mesh, of_params), vfn.shard(data, mesh, of_data)

        def step(params, data):
            def loss(params):
                outs = [
                    x for x in tree.leaves(one.f(params, data, "d", None)) if getattr(x, "dtype", None) is torch.float64
                ]
                return sum((x.abs().sum() for x in outs), start=torch.zeros((), dtype=torch.float64))

            value, grads = vfn.value_and_grad(loss)(params)
            return value, tree.map(lambda x, g: x - 0.1 * g, params, grads)

        usual, placed = vfn.jit(step), vfn.jit(step, arena=True)
        want = usual(params, data)
        first = placed(params, data)
        later = placed(first[1], data)
        assert equal(first, want)
        assert equal(later, usual(want[1], data))


def layers(ws, x):
    for w in ws:
        x = torch.tanh(x @ w)
    return x, x.sum()


def inputs(seed=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 8, generator=draw).to(dtype) for _ in range(3)], torch.randn(5, 8, generator=draw).to(dtype)


def places(monkeypatch):
    """What has been laid out so far: of each block how many values, and its bytes."""
    made = []
    usual = in_arena._Blocks.take

    def take(self):
        if not self.free:
            made.append((len(self.views), self.bytes))
        return usual(self)

    monkeypatch.setattr(in_arena._Blocks, "take", take)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_products_write_into_the_block(monkeypatch, dtype):
    made = places(monkeypatch)
    f = vfn.jit(layers, arena=True)
    for seed in range(3):
        assert equal(f(*inputs(seed, dtype)), layers(*inputs(seed, dtype)))
    assert made == [(2, 1024)]  # the last is a result; `tanh` writes over what it is given; one block for all calls


def test_calls_at_the_same_time_have_blocks_of_their_own(monkeypatch):
    made, meet, found = places(monkeypatch), threading.Barrier(2, timeout=60), {}
    usual = in_arena._Blocks.take

    def take(self):
        block = usual(self)
        meet.wait()
        return block

    monkeypatch.setattr(in_arena._Blocks, "take", take)
    f = vfn.jit(layers, arena=True)
    f.lower(*inputs())

    def call(seed):
        found[seed] = f(*inputs(seed))

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(equal(found[seed], layers(*inputs(seed))) for seed in range(2))
    assert len(made) == 2


def test_a_call_that_fails_takes_its_block_with_it(monkeypatch):
    made = places(monkeypatch)
    f = vfn.jit(lambda ws, x, i: layers(ws, torch.tanh(x)[i].clone()), arena=True)
    (ws, x), good, bad = inputs(), torch.arange(5), torch.arange(5) + 3
    want = f(ws, x, good)
    with pytest.raises(IndexError):
        f(ws, x, bad)
    assert equal(f(ws, x, good), want)
    assert equal(f(ws, x, good), want)
    assert len(made) == 2


def test_what_somebody_may_keep_lies_elsewhere():
    seen = []

    @torch.library.custom_op("vfn_test::keeps", mutates_args=())
    def keeps(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x + 1

    keeps.register_fake(lambda x: torch.empty_like(x))

    def f(w, x):
        return keeps(x @ w) @ w

    (w, *_), x = inputs()
    jitted = vfn.jit(f, arena=True)
    jitted(w, x)
    kept = [y.clone() for y in seen]
    jitted(w, 2 * x)
    assert all(map(torch.equal, seen, kept))


def test_donated_loops_and_remat_in_an_arena():
    def step(ws, x):
        def loss(ws):
            h, _ = vfn.scan(lambda h, w: (torch.tanh(vfn.remat(torch.matmul)(h, w)), None), x, ws)
            return (h @ h.mT).square().mean()

        return tree.map(lambda w, g: w - g, ws, vfn.grad(loss)(ws))

    ws, x = torch.stack(inputs()[0]), inputs()[1]
    want = step(step(ws, x), x)
    f = vfn.jit(step, arena=True, donate_argnums=0)
    torch.testing.assert_close(f(f(ws.clone(), x), x), want)


def test_an_arena_and_a_cuda_graph_are_one_too_many():
    with pytest.raises(errors.TransformError) as caught:
        vfn.jit(layers, arena=True, cuda_graph=True)
    assert str(caught.value) == (
        "jit: a CUDA graph has a block of memory of its own\n  Instead: cuda_graph=True without arena=True"
    )


# On CUDA: a pool of torch's allocator, here one that notes what is asked of it


class Noting:
    """Stands for `in_pool._Pool`: of the first one torch's allocator had to ask for a second segment."""

    def __init__(self, bytes, made):
        self.bytes, self.log, self.first = bytes, [], not made
        made.append(self)

    def enter(self):
        assert self.log[-1:] != ["in"]
        self.log.append("in")

    def leave(self):
        if self.log[-1] == "in":
            self.log.append("out")

    def segments(self):
        return [self.bytes, 512] if self.first else [self.bytes]


@pytest.fixture
def pools(monkeypatch):
    made = []
    monkeypatch.setattr(in_pool, "_Pool", lambda bytes: Noting(bytes, made))
    monkeypatch.setattr(in_pool, "is_for", lambda graph: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "one")
    return made


def gradient(ws, x):
    return layers(ws, x)[1], vfn.grad(lambda ws: layers(ws, x)[1])(ws), layers(ws, x)[1]


def test_a_plan_in_a_pool_makes_results_outside_and_comes_to_have_one_segment(pools):
    f = vfn.jit(gradient, arena=True)
    for seed in range(4):  # the first one without a pool
        assert equal(f(*inputs(seed)), gradient(*inputs(seed)))
    first, second = pools
    assert (first.bytes, second.bytes) == (f.lower(*inputs()).arena(512).bytes, first.bytes + 512)
    assert second.log == first.log * 2
    assert set(first.log[::2]) == {"in"}
    assert set(first.log[1::2]) == {"out"}


def test_a_call_that_fails_leaves_its_pool_and_no_other_call_has_it(pools):
    f = vfn.jit(lambda ws, x, i: layers(ws, torch.tanh(x)[i].clone()), arena=True)
    (ws, x), good, bad = inputs(), torch.arange(5), torch.arange(5) + 3
    want = f(ws, x, good)
    f(ws, x, good)
    f(ws, x, good)
    with pytest.raises(IndexError):
        f(ws, x, bad)
    assert equal(f(ws, x, good), want)
    assert [pool.log[-1] for pool in pools] == ["out"] * 3


def on_ranks():
    mesh = vfn.make_mesh((3,), ("dp",))
    (ws, x), rows = inputs(), P("dp")
    params, batch = vfn.shard(ws, mesh, rows), vfn.shard(x, mesh, rows)

    def step(ws, x):
        grads = vfn.grad(lambda ws: layers(ws, x)[1])(ws)
        return [vfn.with_sharding(w - 0.1 * g, rows) for w, g in zip(ws, grads)]

    usual, placed = vfn.jit(step), vfn.jit(step, arena=True)
    want, got = usual(usual(params, batch), batch), placed(placed(params, batch), batch)
    return equal(got, want) and [vfn.spec_of(x) for x in got] == [vfn.spec_of(x) for x in want]


def test_on_real_ranks(gloo):
    assert gloo(3, on_ranks) == [True] * 3
