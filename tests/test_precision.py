"""Mixed precision: which dtype travels and is added up; numbers that are not finite; scaled losses."""

import math
from functools import partial

import optree
import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P, optim, precision
from vescale_fn._core.base import context

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MIXED = precision.policy("params=f32,compute=bf16,reduce=f32,output=f32")


def drawn(*shape, seed=0, dtype=F32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(found, expected, part):
    """Equal up to this part of their size."""
    assert (vfn.unshard(found) - expected).norm() <= part * expected.norm()


def dtypes(log):
    return [(r.op, r.dtype) for r in log]


# Policies


def mlp(params, x):
    return torch.tanh(x @ params["up"]) @ params["down"]


def test_a_policy_casts_what_is_floating_point():
    seen = {}

    def f(params, x, n, key, *, mask):
        seen.update(
            w=params["w"].dtype, router=params["router"].dtype, i=params["i"].dtype, x=x.dtype, n=n, mask=mask.dtype
        )
        return {"y": params["w"] * x, "n": n, "i": params["i"]}

    policy = precision.policy("params=f32,compute=bf16,output=f64", rules=[("router", "f32")])
    params = {"w": torch.ones(2), "router": torch.ones(2), "i": torch.arange(2), "k": vfn.random.key(0), "none": None}
    out = policy.apply(f)(params, torch.ones(2), 3, vfn.random.key(1), mask=torch.ones(2, dtype=torch.bool))
    assert seen == {"w": BF16, "router": F32, "i": torch.int64, "x": BF16, "n": 3, "mask": torch.bool}
    assert (out["y"].dtype, out["n"], out["i"].dtype) == (torch.float64, 3, torch.int64)
    kept = policy.cast_to_param({"w": torch.ones(2, dtype=F16), "i": torch.arange(2)})
    assert (kept["w"].dtype, kept["i"].dtype) == (F32, torch.int64)


def test_on_one_device_a_policy_is_a_few_casts():
    params, x = {"up": drawn(6, 8), "down": drawn(8, 3, seed=1)}, drawn(4, 6, seed=2)
    value, grads = vfn.value_and_grad(MIXED.apply(lambda p, x: mlp(p, x).square().mean()))(params, x)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    expected = mlp({name: p.bfloat16() for name, p in leaves.items()}, x.bfloat16()).square().mean().float()
    expected.backward()
    assert value.equal(expected.detach())
    assert all(grads[name].equal(leaves[name].grad) for name in grads)


def gathered(params, x):
    """FSDP: whole weights, the batch split."""
    return mlp(vfn.with_sharding(params, P()), x).square().sum()


def by_hand(params, x, ranks):
    """The gradients of each rank's part of the batch in bf16, added up in f32."""
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    for part in x.chunk(ranks):
        leaves = {name: p.bfloat16().requires_grad_() for name, p in params.items()}
        mlp(leaves, part.bfloat16()).square().sum().backward()
        for name in total:
            total[name] += leaves[name].grad.float()
    return total


def test_fsdp_gathers_bf16_and_adds_up_f32():
    params, x = {"up": drawn(8, 16), "down": drawn(16, 8, seed=1)}, drawn(8, 8, seed=2)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("dp",))
        arrays, batch = vfn.shard((params, x), mesh, P("dp"))
        with vfn.comm_log() as log:
            grads = vfn.grad(MIXED.apply(gathered))(arrays, batch)
        assert set(dtypes(log)) == {("all_gather", "bf16"), ("reduce_scatter", "f32")}, str(log)
        assert str(log).splitlines()[0].split() == ["op", "axis", "bytes", "dtype", "why", "line"]
        assert log.bytes("all_gather") == 2 * 2 * 8 * 16
        for name, expected in by_hand(params, x, 4).items():
            assert grads[name].dtype == F32
            # to the last bit but for the order of four numbers: rounded to bf16 once, it would be off by 4e-3
            torch.testing.assert_close(vfn.unshard(grads[name]), expected, rtol=1e-6, atol=1e-6)
        with vfn.comm_log() as log:  # and what a policy is not asked for stays as it is
            vfn.grad(lambda p, x: gathered(optree.tree_map(torch.Tensor.bfloat16, p), x))(arrays, batch.bfloat16())
        assert ("reduce_scatter", "bf16") in dtypes(log)


def test_one_leaf_alone_and_what_is_written_since():
    """The cast and the gather are one step, but not where the value in between has changed."""
    w, x = drawn(8, 4), drawn(8, 8, seed=1)

    def f(w, x, changed):
        w = w.mul_(2) if changed else w
        return (x @ vfn.with_sharding(w, P())).square().sum()

    with vfn.simulate(4):
        array, batch = vfn.shard((w, x), vfn.make_mesh((4,), ("dp",)), P("dp"))
        for changed in (False, True):
            near(vfn.grad(MIXED.apply(f))(array, batch, changed), vfn.grad(MIXED.apply(f))(w, x, changed), 0.01)


def test_the_interpreters_own_moves_add_up_in_f32():
    params, x = {"up": drawn(8, 16), "down": drawn(16, 8, seed=1)}, drawn(8, 8, seed=2)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("dp",))
        arrays, batch = vfn.shard(params, mesh, P()), vfn.shard(x, mesh, P("dp"))
        with vfn.comm_log() as log:
            grads = vfn.grad(MIXED.apply(lambda p, x: mlp(p, x).square().sum()))(arrays, batch)
        assert {r.dtype for r in log} == {"f32"}, str(log)
        for name, expected in by_hand(params, x, 4).items():
            torch.testing.assert_close(vfn.unshard(grads[name]), expected, rtol=1e-6, atol=1e-6)


def sums_of(f, *args):
    with vfn.comm_log() as log:
        f(*args)
    return [r.dtype for r in log if r.op in ("all_reduce", "reduce_scatter")]


def test_activations_are_added_up_in_f32_forward_and_backward():
    specs = {"up": P(None, "tp"), "down": P("tp")}
    params, x = {"up": drawn(6, 8), "down": drawn(8, 6, seed=1)}, drawn(4, 6, seed=2)

    def f(p, x):
        y = vfn.with_sharding(mlp(p, x), P())
        return vfn.with_sharding(mlp(p, torch.sin(y)), P()).square().sum()

    with vfn.simulate(4):
        arrays = vfn.shard(params, vfn.make_mesh((4,), ("tp",)), specs)
        batch = vfn.shard(x, arrays["up"].device_mesh, P())
        step = vfn.value_and_grad(MIXED.apply(f))
        eager = sums_of(step, arrays, batch)
        assert len(eager) >= 3  # two forward, one backward, where the second layer's cotangent is put together
        assert set(eager) == {"f32"}
        replayed = vfn.jit(step)
        replayed(arrays, batch)
        again = sums_of(replayed, arrays, batch)
        assert set(again) == {"f32"}
        assert len(again) <= len(eager)
        narrow = precision.policy("params=f32,compute=bf16,reduce=bf16,output=f32")
        assert "bf16" in sums_of(vfn.value_and_grad(narrow.apply(f)), arrays, batch)
        assert context.sums_in() is None
        with pytest.raises(ZeroDivisionError):
            vfn.grad(MIXED.apply(lambda p: p * (1 / 0)))(x)
        assert context.sums_in() is None


def test_a_sum_in_f32_is_rounded_once():
    """256 + 1 + 1 + 1: in bf16, whose numbers are there two apart, adding ones one by one never gets further than 256."""
    x = torch.tensor([256.0, 1.0, 1.0, 1.0])
    total = lambda _, x: vfn.shard_map(lambda x: vfn.psum(x, "dp"), in_specs=P("dp"), out_specs=P())(x)
    with vfn.simulate(4), vfn.use_mesh(vfn.make_mesh((4,), ("dp",))):
        assert total(None, x.bfloat16()).item() == 256
        assert MIXED.apply(total)({}, x).item() == 260  # 259, in bf16
        recorded = vfn.jit(total)
        assert recorded(None, x.bfloat16()).item() == 256
        with context.setting_sums_back():
            context.sum_in(F32)
            assert recorded(None, x.bfloat16()).item() == 260  # another plan
        assert recorded(None, x.bfloat16()).item() == 256
        assert recorded.cache_info().records == 2


def test_with_remat_and_with_torch_func():
    """By `torch.func`, which comes between the cast and the gather, gradients are added up in bf16."""
    params, x = {"up": drawn(8, 16), "down": drawn(16, 8, seed=1)}, drawn(8, 8, seed=2)
    expected = by_hand(params, x, 4)
    with vfn.simulate(4):
        arrays, batch = vfn.shard((params, x), vfn.make_mesh((4,), ("dp",)), P("dp"))
        inside = vfn.grad(vfn.remat(MIXED.apply(gathered)))
        outside = vfn.grad(MIXED.apply(vfn.remat(gathered)))
        for grad, part in (
            (inside, 1e-6),
            (outside, 1e-6),
            (vfn.jit(outside), 1e-6),
            (vfn.grad(MIXED.apply(lambda p, x: vfn.remat(vfn.remat(gathered))(p, x))), 1e-6),
            (torch.func.grad(MIXED.apply(gathered)), 0.01),
        ):
            with vfn.comm_log() as log:
                grads = grad(arrays, batch)
            assert ("all_gather", "bf16") in dtypes(log)
            for name in params:
                near(grads[name], expected[name], part)


def test_a_policy_that_cannot_be():
    with pytest.raises(vfn.errors.VfnError) as error:
        precision.policy("parms=f32,compute=bf17", output=torch.int32, compute="f32")
    assert str(error.value) == (
        "policy: it does not say dtypes\n"
        "  * 'parms=f32' is for none of params, compute, reduce, output; did you mean 'params'?\n"
        "  * compute is given twice\n"
        "  * output is the dtype torch.int32\n"
        '  Instead: policy("params=f32,compute=bf16,reduce=f32,output=f32", rules=[("router", "f32")])'
    )
    with pytest.raises(vfn.errors.VfnError, match="compute is the str 'bf17'; did you mean 'bf16'?"):
        precision.policy("compute=bf17")
    with pytest.raises(vfn.errors.SpecError, match="rule .* matches no leaf"):
        precision.policy(rules=[("nowhere", "f64")]).apply(lambda p: p)({"w": torch.ones(1)})


# Numbers that are not finite


def bad_tree(**bad):
    values = {
        "a": torch.ones(4, 6),
        "b": torch.ones(3, 6),
        "c": torch.ones(5),
        "d": torch.ones(()),
        "i": torch.arange(3),
        "empty": torch.ones(0, 6),
    }
    for name, number in bad.items():
        values[name].view(-1)[-1] = number
    return values


SPECS = {"a": P("dp", "tp"), "b": P(None, "tp"), "c": P("dp"), "d": P(), "i": P(), "empty": P("dp")}


def test_all_finite_costs_one_collective():
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        for bad, expected in (
            ({}, True),
            ({"c": math.nan}, False),
            ({"a": -math.inf}, False),
            ({"d": math.inf}, False),
        ):
            arrays = vfn.shard(bad_tree(**bad), mesh, SPECS)
            for find in (precision.all_finite, vfn.jit(precision.all_finite)):
                with vfn.strict(), vfn.comm_log() as log:
                    found = find(arrays)
                assert [(r.op, r.axis, r.bytes) for r in log] == [("all_reduce", "dp,tp", 20)], str(log)
                assert vfn.unshard(found).item() is expected
    assert precision.all_finite({"n": 3, "i": torch.arange(2)}).item()
    assert precision.all_finite({"x": torch.tensor(1e30)}).item()  # its square is not finite


def test_a_guard_names_the_first_leaf():
    values = bad_tree(b=math.nan, c=math.inf)
    message = (
        "nan_guard: a value is not finite\n"
        "  * grads['b'] is the {kind}: 1 number is nan or infinite\n"
        "  * of the other leaves, 1 more"
    )
    with pytest.raises(vfn.errors.VfnError) as error:
        precision.nan_guard(values, "grads")
    assert str(error.value) == message.format(kind="tensor f32[3,6]")
    good = bad_tree()
    assert precision.nan_guard(good) is good
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        arrays = vfn.shard(values, mesh, SPECS)
        with pytest.raises(vfn.errors.VfnError) as error, vfn.comm_log() as log:
            precision.nan_guard(arrays, "grads")
        assert str(error.value) == message.format(kind="array f32[3,6@tp]")
        assert len(log) == 1
        step = vfn.jit(lambda x: optree.tree_map(torch.neg, precision.nan_guard(x, "grads")))
        step(vfn.shard(good, mesh, SPECS))
        for _ in range(2):
            with pytest.raises(vfn.errors.VfnError, match="grads\\['b'\\] is the array f32\\[3,6@tp\\]: 1 number"):
                step(arrays)
        step(vfn.shard(good, mesh, SPECS))
        assert step.cache_info().records == 1


def guarded_in_a_body(jit=False):
    """What a guard in a body says: four numbers of `a` that two ranks of `tp` hold alike are bad, and one of `b`."""
    body = lambda a, b, c: precision.nan_guard({"a": a, "b": b, "c": c}, "grads")["b"] * precision.all_finite((a, c))
    found = vfn.shard_map(body, in_specs=(P("dp"), P(("dp", "tp")), P()), out_specs=P(("dp", "tp")))
    found = vfn.jit(found) if jit else found
    a, b, c = torch.ones(8, 2), torch.arange(4.0), torch.ones(3)
    with vfn.comm_log() as log:
        passed = found(a, b, c)
    assert vfn.unshard(passed).equal(b)
    a[3:5], b[3] = math.nan, -math.inf
    try:
        return [(r.op, r.axis, r.bytes) for r in log], found(a, b, c)
    except vfn.errors.VfnError as error:
        return [(r.op, r.axis, r.bytes) for r in log], str(error)


IN_A_BODY = [("all_reduce", "dp,tp", 12), ("all_reduce", "dp", 8)]


def test_a_guard_in_a_body_sees_all_ranks():
    with vfn.simulate(4), vfn.use_mesh(vfn.make_mesh((2, 2), ("dp", "tp"))):
        for jit in (False, True):
            moved, said = guarded_in_a_body(jit)
            assert moved == IN_A_BODY
            assert said.splitlines()[0] == "nan_guard: a value is not finite"
            assert "grads['a'] is " in said
            assert ": 4 numbers are nan or infinite\n  * of the other leaves, 1 more" in said
        with pytest.raises(
            vfn.errors.TransformError, match="whose types are not checked nothing tells which ranks hold"
        ):
            vfn.shard_map(precision.nan_guard, in_specs=P("dp"), out_specs=P("dp"), check_vma=False)(torch.ones(2))


# Wide copies of narrow parameters


def narrow_steps(params, x, opt, steps=3):
    """The parameters, and the state, after each step: the plan writes over the old."""

    @partial(vfn.jit, donate_argnums=(0, 1))
    def step(params, state, x):
        updates, state = opt.update(vfn.grad(lambda p, x: mlp(p, x).float().square().mean())(params, x), state, params)
        return optim.apply_updates(params, updates), state

    params = optree.tree_map(torch.clone, params)
    state, found = opt.init(params), []
    for _ in range(steps):
        params, state = step(params, state, x)
        found.append(vfn.unshard((params, state)))
        found[-1] = optree.tree_map(torch.clone, found[-1])
    assert step.cache_info().records <= 2
    return found


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_wide_copies_take_the_steps(dtype):
    """As torch's AdamW on float32 leaves, of which each step's gradients are those at the rounded leaves."""
    params, x = {"up": drawn(7, 9), "down": drawn(9, 5, seed=1)}, drawn(4, 7, seed=2).to(dtype)
    params = optree.tree_map(lambda p: p.to(dtype), params)
    opt = precision.master_weights(optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.003, weight_decay=0.3)))
    found = narrow_steps(params, x, opt)
    leaves = {name: p.float().requires_grad_() for name, p in params.items()}
    reference = torch.optim.AdamW(leaves.values(), lr=0.003, weight_decay=0.3)
    for after, state in found:
        narrow = {name: p.detach().to(dtype).requires_grad_() for name, p in leaves.items()}
        mlp(narrow, x).float().square().mean().backward()
        for name, leaf in leaves.items():
            leaf.grad = narrow[name].grad.float()
        torch.nn.utils.clip_grad_norm_(leaves.values(), 0.1)
        reference.step()
        for name, p in leaves.items():
            torch.testing.assert_close(state.params[name], p.detach(), rtol=1e-6, atol=1e-7)
            assert after[name].equal(state.params[name].to(dtype))
            assert after[name].dtype == dtype
    assert not after["up"].equal(params["up"])
    opt, grads = precision.master_weights(optim.adamw(0.003)), optree.tree_map(torch.sin, params)
    updates, state = opt.update(grads, opt.init(params), params)
    expected = optim.apply_updates(params, updates), state
    with vfn.simulate(3):
        specs = {"up": P("dp"), "down": P(None, "dp")}  # uneven
        params, grads = vfn.shard((params, grads), vfn.make_mesh((3,), ("dp",)), (specs, specs))
        with vfn.strict(), vfn.comm_log() as log:
            updates, state = opt.update(grads, opt.init(params), params)
            found = optim.apply_updates(params, updates), state
        assert len(log) == 0
        assert vfn.spec_of(state.params["up"]) == P("dp")
        optree.tree_map(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0), vfn.unshard(found), expected)


def test_a_parameter_is_its_rounded_copy_wherever_it_was():
    """Also where the update is not small: the sum of a parameter and its update is not off by a rounding."""
    size = torch.logspace(-1.5, 1.5, 4000)
    start, copies = ((drawn(4000, seed=3).sign() + 0.5) * size).bfloat16(), (drawn(4000, seed=4).sign() + 0.3) / size
    start[0], copies[0] = (
        -3.0,
        1 + 2**-8 + 2**-23,
    )  # just above the middle of two numbers: 4 + 2**-8 + 2**-23 would be rounded
    opt = precision.master_weights(optim.sgd(1.0))
    params = {"w": start, "wide": copies[:3], "n": torch.arange(2), "frozen": start, "none": None}
    state = opt.init(params)
    assert state.params["wide"] is None
    grads = {**params, "w": -torch.ones_like(start), "frozen": None}
    updates, state = opt.update(grads, state._replace(params={**state.params, "w": copies}), params)
    after = optim.apply_updates(params, updates)
    assert state.params["w"].equal(copies + 1)
    assert after["w"].equal((copies + 1).bfloat16())
    updates, _ = opt.update({**grads, "w": 0 * start}, state._replace(params={**state.params, "w": copies}), params)
    assert optim.apply_updates(params, updates)["w"].equal(copies.bfloat16())
    assert after["wide"].eq(0).all()
    assert after["frozen"].equal(start)


def test_small_gradients_of_float16_reach_the_copies():
    """2 ** -25 is no number of float16; both ways round the scale is taken away in float32."""
    w, scaled = torch.full((1,), 2.0**-10, dtype=F16), partial(precision.loss_scaled, initial=2.0**15)
    for opt, parts in (
        (precision.master_weights(scaled(optim.sgd(1.0))), lambda state: (state.params, state.inner.scale)),
        (scaled(precision.master_weights(optim.sgd(1.0))), lambda state: (state.inner.params, state.scale)),
    ):
        for gradient, copy, scale in ((-(2.0**-10), 2.0**-10 + 2.0**-25, 2.0**15), (math.inf, 2.0**-10, 2.0**14)):
            _, state = opt.update(torch.full_like(w, gradient), opt.init(w), w)
            assert tuple(x.item() for x in parts(state)) == (copy, scale)


# Scaled losses


def test_the_scale_is_that_of_torch():
    """The scale, and the parameters, after each of some steps of which three overflow, and one is nan."""
    grads = [1.0, 2.0, math.inf, 1.0, -1.0, 3.0, math.nan, -math.inf, math.inf, 2.0, 1.0]
    leaf = torch.ones(2, requires_grad=True)
    reference = torch.optim.AdamW([leaf], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, growth_factor=3.0, backoff_factor=1 / 3)
    opt = precision.loss_scaled(optim.adamw(0.1), 4.0, period=2, factor=3.0, least=0.01)
    for update in (opt.update, vfn.jit(opt.update)):
        with torch.no_grad():
            leaf.fill_(1.0)
        reference = torch.optim.AdamW([leaf], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, growth_factor=3.0, backoff_factor=1 / 3)
        scaler.scale(torch.ones(()))  # it makes its state at the first call
        params, state = {"w": torch.ones(2)}, opt.init({"w": torch.ones(2)})
        for number in grads:
            grad = torch.tensor([1.0, number])
            leaf.grad = grad * scaler.get_scale()
            scaler.step(reference)
            scaler.update()
            updates, state = update({"w": grad * state.scale}, state, params)
            params = optim.apply_updates(params, updates)
            assert state.scale.item() == pytest.approx(scaler.get_scale(), rel=1e-6)
            torch.testing.assert_close(params["w"], leaf.detach(), rtol=1e-5, atol=1e-6)
        assert state.inner.count == 7  # the others made no step
    assert update.cache_info().records == 1


def test_the_scale_has_a_least():
    opt = precision.loss_scaled(optim.sgd(0.1), 4.0)
    state = opt.init(torch.ones(1))
    for _ in range(5):
        _, state = opt.update(torch.tensor([math.nan]), state, torch.ones(1))
    assert state.scale.item() == 1.0
    with pytest.raises(vfn.errors.VfnError, match="initial=1, least=2.0 and factor=2.0"):
        precision.loss_scaled(optim.sgd(0.1), 1, least=2.0)


def fp16_steps(params, x, steps=4):
    """Steps of a loss whose gradients are too small for float16, by a scale that begins too large: one plan."""
    policy = precision.policy("params=f32,compute=f16,output=f32")
    opt = precision.loss_scaled(optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(1e7)), 2.0**48, period=3)

    @vfn.jit
    def step(params, state, x):
        loss = lambda p, x: policy.apply(lambda p, x: mlp(p, x).float().square().mean() * 1e-8)(p, x) * state.scale
        grads = vfn.grad(loss)(params, x)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state, grads

    state, finite = opt.init(params), []
    for _ in range(steps):
        params, state, grads = step(params, state, x)
        finite.append(bool(vfn.unshard(precision.all_finite(grads))))
    return params, state, finite, step.cache_info().records


def test_float16_trains_on_a_mesh_as_on_one_device():
    params, x = {"up": drawn(6, 8), "down": drawn(8, 4, seed=1)}, drawn(4, 6, seed=2)
    whole, state, finite, _ = fp16_steps(params, x, 20)
    assert finite[0] is False  # it finds the scale
    assert finite[-1] is True
    assert not whole["up"].equal(params["up"])
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        arrays = vfn.shard(params, mesh, {"up": P(None, "tp"), "down": P("tp")})
        found, its, also, records = fp16_steps(arrays, vfn.shard(x, mesh, P("dp")), 20)
        assert also == finite
        assert vfn.unshard(its.scale).item() == state.scale.item()
        assert records <= 2  # the state's numbers are plain at first, arrays then
        for name in params:  # float16 holds three digits
            torch.testing.assert_close(vfn.unshard(found[name]), whole[name], rtol=0.02, atol=2e-3)


# Real ranks


def on_a_real_rank():
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    params, x = {"up": drawn(8, 16), "down": drawn(16, 8, seed=1)}, drawn(8, 8, seed=2)
    arrays, batch = vfn.shard((params, x), mesh, P("dp"))
    with vfn.comm_log() as log:
        grads = vfn.grad(MIXED.apply(gathered))(arrays, batch)
    with vfn.use_mesh(mesh):
        assert guarded_in_a_body()[0] == IN_A_BODY
        assert ": 4 numbers are nan or infinite" in guarded_in_a_body()[1]
    try:
        precision.nan_guard(vfn.shard(bad_tree(b=math.nan), mesh, SPECS), "grads")
    except vfn.errors.VfnError as error:
        return sorted(set(dtypes(log))), vfn.unshard(grads), str(error)


def test_on_real_ranks(gloo):
    params, x = {"up": drawn(8, 16), "down": drawn(16, 8, seed=1)}, drawn(8, 8, seed=2)
    expected = by_hand(params, x, 2)
    for moved, grads, said in gloo(4, on_a_real_rank):
        assert moved == [("all_gather", "bf16"), ("reduce_scatter", "f32")]
        assert said.splitlines()[1] == "  * grads['b'] is the array f32[3,6@tp]: 1 number is nan or infinite"
        for name in params:
            torch.testing.assert_close(grads[name], expected[name], rtol=1e-6, atol=1e-6)
