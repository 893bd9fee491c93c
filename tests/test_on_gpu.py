"""On a GPU: simulated ranks, replays, CUDA graphs and one NCCL rank give what plain tensors there give."""

import threading

import pytest
import torch
import torch.nn.functional as F
from programs import PROGRAMS
from torch.nn.attention import SDPBackend, sdpa_kernel

import vescale_fn as vfn
from vescale_fn import P, errors, tree

pytestmark = pytest.mark.gpu


def on_gpu(x):
    return tree.map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, x)


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def close(got, want, **tolerance):
    torch.testing.assert_close(vfn.unshard(got), vfn.unshard(want), **tolerance)


NAMES = (
    "tensor_parallel_mlp fully_sharded_remat sequence_parallel fused_attention norms a_training_step shapes in_place"
)


@pytest.mark.parametrize("name", NAMES.split())
def test_programs_on_simulated_ranks(name):
    one = PROGRAMS[name]
    params, data = on_gpu(one.inputs())
    with torch.device("cuda"):
        want = one.f(params, data, None, None)
        with vfn.simulate(6):
            mesh = vfn.make_mesh((2, 3), ("a", "b"))
            of_params, of_data = one.specs("a", "b")
            params, data = vfn.shard(params, mesh, of_params), vfn.shard(data, mesh, of_data)
            with vfn.use_mesh(mesh):
                for f in (
                    one.f,
                    vfn.jit(one.f, static_argnums=(2, 3)),
                    vfn.jit(one.f, static_argnums=(2, 3), arena=True),
                ):
                    for _ in range(2):
                        got = f(params, data, "a", "b")
                    tensors = [[x for x in tree.leaves(y) if isinstance(x, torch.Tensor)] for y in (got, want)]
                    close(*tensors, rtol=1e-10, atol=1e-12)  # fp64, sums in another order


@pytest.mark.parametrize("spec", [P("a", "b"), P("a", None, "b"), P(None, None, None, "b")], ids=str)
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_attention_of_each_kernel_on_split_arrays(kernel, spec):
    q, k, v = (drawn(4, 8, 128, 64, seed=i, dtype=torch.bfloat16) for i in range(3))

    def both(q, k, v):
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            out, pull = vfn.vjp(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
            return out, pull(torch.ones_like(out))

    want = both(q, k, v)
    with vfn.simulate(4):
        arrays = vfn.shard((q, k, v), vfn.make_mesh((2, 2), ("a", "b"), device="cuda"), spec)
        for f in both, vfn.jit(both):
            close(f(*arrays), want, rtol=2e-2, atol=2e-2)


def test_draws_on_split_arrays_have_the_bits_of_the_cpu():
    key, x = vfn.random.key(5), drawn(37, 9)
    want = vfn.random.normal(key, (37, 9)), vfn.random.dropout(key, x.cpu(), 0.3)
    with vfn.simulate(4), torch.device("cuda"):
        mesh = vfn.make_mesh((2, 2), ("a", "b"))

        def draw(key, x):
            return vfn.with_sharding(vfn.random.normal(key, (37, 9)), P("a", "b")), vfn.random.dropout(key, x, 0.3)

        with vfn.use_mesh(mesh):
            for f in draw, vfn.jit(draw):
                got = f(key, vfn.shard(x, mesh, P("b")))
                assert all(torch.equal(vfn.unshard(a).cpu(), b) for a, b in zip(got, want))


def test_checkpoints_come_back_to_the_gpu(tmp_path):
    with vfn.simulate(4):
        one, other = (vfn.make_mesh(shape, ("a", "b"), device="cuda") for shape in ((4, 1), (2, 2)))
        saved = {"w": vfn.shard(drawn(9, 6), one, P("a")), "plain": drawn(3, dtype=torch.bfloat16)}
        vfn.save(tmp_path / "x", saved)
        found = vfn.load(tmp_path / "x", {**saved, "w": vfn.shard(torch.zeros(9, 6).cuda(), other, P("b", "a"))})
    assert vfn.spec_of(found["w"]) == P("b", "a")
    for name in saved:
        assert found[name].device.type == "cuda"
        assert torch.equal(vfn.unshard(found[name]), vfn.unshard(saved[name]))


def test_what_a_body_draws_is_where_torchs_default_device_is():
    with torch.device("cuda"), vfn.simulate(3):
        mesh = vfn.make_mesh((3,), ("a",))
        for check in True, False:
            body = lambda x: x + torch.rand(1) + torch.empty(1).zero_() + torch.randint(3, (1,))
            got = vfn.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=check)(torch.zeros(3))
            assert got.device.type == "cuda"
            assert vfn.unshard(got).sub(1.5).abs().max() <= 1.5


# A plan in a segment of its own


def test_a_plan_in_an_arena_takes_one_segment_and_gives_results_that_last():
    ws, x = [drawn(1024, 1024, seed=i) / 32 for i in range(6)], drawn(2048, 1024, seed=9)

    def step(ws, x):
        value, grads = vfn.value_and_grad(lambda ws: layers(ws, x)[1])(ws)
        return value, [w - g for w, g in zip(ws, grads)]

    f, g = vfn.jit(step), vfn.jit(step, arena=True)
    want, kept = [f(ws, x * i) for i in range(6)], []
    for i in range(6):
        kept.append(g(ws, x * i))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(kept), tree.leaves(want), strict=True))
    (plan,) = g._plans.values()
    ((pool,),) = plan.run._free.values()
    assert len(pool.segments()) == 1


def test_plans_in_arenas_on_several_streams_and_after_a_failure():
    ws, x = weights(), drawn(512, 16, seed=9)
    f = vfn.jit(lambda ws, x: layers(ws, x)[0].cos(), arena=True)
    want = [layers(ws, x * i)[0].cos() for i in range(4)]
    f(ws, x)
    for _ in range(3):
        got = {}

        def call(i, got=got):
            with torch.cuda.stream(torch.cuda.Stream()):
                got[i] = f(ws, x * i)
                torch.cuda.current_stream().synchronize()

        torch.cuda.synchronize()
        threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(got[i], want[i]) for i in range(4))

    @torch.library.custom_op("vfn_test::fails_at_100", mutates_args=())
    def fails(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        if by.item() == 100:
            raise ArithmeticError("100")
        return x * by

    fails.register_fake(lambda x, by: torch.empty_like(x))
    h = vfn.jit(lambda x, by: fails(x @ x.mT, by).tanh() @ x, arena=True)
    for by in 1.0, 2.0, 100.0, 2.0, 3.0:
        by = torch.tensor(by)
        if by == 100:
            with pytest.raises(ArithmeticError):
                h(x, by)
        else:
            assert torch.equal(h(x, by), ((x @ x.mT) * by).tanh() @ x)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):  # raises where the thread is still in another
        y = torch.ones(1 << 20, device="cuda")
    assert sum(segment["total_size"] for segment in pool.snapshot()) >= y.nbytes


# CUDA graphs


def layers(ws, x):
    for w in ws:
        x = torch.tanh(x @ w)
    return x, x.square().mean()


def weights():
    return [drawn(16, 16, seed=i) / 4 for i in range(3)]


def test_a_cuda_graph_takes_any_layout_and_gives_any():
    def f(x, y):
        return x * 2 + y, x.expand(3, 4, 5), x.mT, y.long(), 7, None

    g = vfn.jit(f, cuda_graph=True)
    for seed in range(3):
        x, y = drawn(4, 1, seed=seed).expand(4, 5), drawn(5, 4, seed=seed + 9).mT
        for got, want in zip(g(x, y), f(x, y)):
            assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want


def test_a_cuda_graph_without_arguments():
    g = vfn.jit(lambda: torch.arange(3, device="cuda") * 2, cuda_graph=True)
    assert [g().tolist() for _ in range(2)] == [[0, 2, 4]] * 2


def test_calls_of_a_cuda_graph_on_several_streams_and_threads():
    ws, x = weights(), drawn(512, 16, seed=9)
    f = vfn.jit(layers, cuda_graph=True)
    want = [layers(ws, x * i) for i in range(8)]
    f(ws, x)
    torch.cuda.synchronize()
    for _ in range(5):
        got = {}

        def call(i, got=got):
            with torch.cuda.stream(torch.cuda.Stream()):
                got[i] = f(ws, x * i)
                torch.cuda.current_stream().synchronize()

        threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        close([got[i] for i in range(8)], want)


def test_random_numbers_in_a_cuda_graph_follow_the_key():
    key, x = vfn.random.key(3), drawn(64, 8)
    there = vfn.random.wrap_key_data(vfn.random.key_data(key).cuda())
    f = vfn.jit(lambda key, x: vfn.random.dropout(key, x, 0.5), cuda_graph=True)
    for i in range(3):
        got, want = (f(vfn.random.fold_in(there, i), x), vfn.random.dropout(vfn.random.fold_in(key, i), x.cpu(), 0.5))
        assert torch.equal(got.cpu(), want)
    with pytest.raises(errors.TransformError, match="for a key"):
        f(key, x)


def test_a_cuda_graph_that_could_not_be_recorded_is_tried_again():
    host = torch.ones(3)
    f = vfn.jit(lambda x: x + host.cuda(), cuda_graph=True)
    for _ in range(2):
        with pytest.raises(errors.TransformError, match="it has tensors on the CPU and on the GPU"):
            f(drawn(3))
    assert torch.equal(torch.ones(3).cuda() + 1, torch.full((3,), 2.0).cuda())  # and nothing is left behind


def test_a_cuda_graph_of_a_loop_on_simulated_ranks():
    ws, x = torch.stack(weights()), drawn(8, 16, seed=9)

    def step(ws, x):
        loss = lambda ws: vfn.scan(lambda h, w: (torch.tanh(h @ w), None), x, ws)[0].square().mean()
        return tree.map(lambda w, g: w - g, ws, vfn.grad(loss)(ws))

    want = step(step(ws, x), x)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("a",), device="cuda")
        f = vfn.jit(step, cuda_graph=True, donate_argnums=0)
        once = f(vfn.shard(ws, mesh, P()), vfn.shard(x, mesh, P("a")))
        close(f(once, vfn.shard(x, mesh, P("a"))), want, rtol=1e-4, atol=1e-5)


# One NCCL rank


def test_one_rank_over_nccl():
    def body(x):
        mesh = vfn.make_mesh((1,), ("a",))
        w, y = vfn.shard(x.cuda(), mesh, P("a")), vfn.shard(torch.ones(4, 8), mesh, P("a"))
        step = lambda w, y: vfn.value_and_grad(lambda w: vfn.with_sharding(torch.tanh(y @ w), P()).square().mean())(w)
        plans = [vfn.jit(step, **how) for how in ({}, {"cuda_graph": True}, {"arena": True})]
        summed = vfn.shard_map(lambda y: vfn.psum(y, "a"), mesh=mesh, in_specs=P("a"), out_specs=P())
        graph = vfn.jit(summed, cuda_graph=True)
        return mesh.device_type, vfn.unshard([step(w, y), *(f(w, y) for f in plans), graph(y), summed(y)])

    kind, (want, *got, one, other) = vfn.launch(body, 1, torch.arange(64.0).view(8, 8) / 64, device="cuda")[0]
    assert kind == "cuda"
    assert torch.equal(one, other)
    for found in got:
        torch.testing.assert_close(found, want)
