"""Attention under masks, windows and dropout: the numbers of one device with each method, and what does not fit."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_nn_attention import MESHES, close, lines_of, loss, made, ranks_of

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import RandomError
from vescale_fn.nn import attention, masked_ring, zigzag_order

F64 = torch.float64
METHODS = ("ring", "all_gather", "all_to_all")


def weights_of(q, k, mask=None, causal=False, left=None, right=None):
    """The formula: softmax of the scores, and zeros in rows where nothing may be attended."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    ahead = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
    for limit, unseen in (
        (causal, ahead > 0),
        (left is not None, ahead < -(left or 0)),
        (right is not None, ahead > (right or 0)),
    ):
        scores = scores.masked_fill(unseen, -math.inf) if limit else scores
    if mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -math.inf)
    none = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(none, 0.0).softmax(-1).masked_fill(none, 0.0)


def by_hand(q, k, v, mask=None, causal=False, window=None, dropout=0.0, key=None, order=None):
    """Of tokens in their usual order; `order` is undone before, and done after."""
    if order is not None:
        back = order.argsort()
        if mask is not None:
            mask = mask[..., back] if mask.shape[-1] > 1 else mask
            mask = mask[..., back, :] if mask.ndim > 1 and mask.shape[-2] > 1 else mask
        return by_hand(*(x[:, :, back] for x in (q, k, v)), mask, causal, window, dropout, key)[:, :, order]
    weights = weights_of(q, k, mask, causal, *(window or (None, None)))
    if dropout:
        weights = vfn.random.dropout(key, weights, dropout)
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def a_row_of_nothing(t):
    allowed = torch.rand(2, 1, t, t) > 0.4
    allowed[:, :, t // 2] = False
    return allowed


KEY = vfn.random.key(3)
TERMS = {
    "bool, a row of nothing": lambda t: {"mask": a_row_of_nothing(t), "causal": True},
    "a bias for each head, a window": lambda t: {"mask": torch.randn(1, 4, t, t, dtype=F64), "window": (2, 1)},
    "padding, dropout": lambda t: {"mask": torch.rand(2, 1, 1, t) > 0.3, "dropout": 0.3, "key": KEY},
    "all": lambda t: {
        "mask": torch.randn(t, t, dtype=F64),
        "causal": True,
        "window": (3, None),
        "dropout": 0.4,
        "key": KEY,
    },
}


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize(("case", "length"), [("4", 10), ("4", 3), ("2x2x2", 8), ("two axes, minor first", 9)])
def test_values_and_gradients_are_those_of_one_device(case, length, terms):
    """Even and uneven parts, ranks without tokens; each method, in both orders."""
    shape, names, spec = MESHES[case]
    n = ranks_of(shape, names, spec)
    options, leaves, weights = TERMS[terms](length), made(length=length), torch.randn(2, 4, length, 5, dtype=F64)
    mask = options.pop("mask")
    leaves, wanted = (*leaves, mask), (0, 1, 2, 3) if mask.is_floating_point() else (0, 1, 2)
    with vfn.simulate(math.prod(shape)):
        parts = (*vfn.shard(leaves[:3], vfn.make_mesh(shape, names), spec), mask)
        for i, method in enumerate(METHODS):
            zigzag = n * ((length + i) % 2)
            order = zigzag_order(length, n) if zigzag else None
            f = loss(
                lambda q, k, v, m, w=method, z=zigzag: attention(q, k, v, mask=m, method=w, zigzag=z, **options),
                weights,
            )
            whole = loss(lambda q, k, v, m, o=order: by_hand(q, k, v, m, order=o, **options), weights)
            want = vfn.value_and_grad(whole, wanted)(*leaves)
            if method == "ring":
                found = vfn.value_and_grad(f, wanted)(*leaves)  # on one device
                close([found[0], *found[1]], [want[0], *want[1]])
            with vfn.strict():
                found = vfn.value_and_grad(f, wanted)(*parts)
            close([found[0], *found[1]], [want[0], *want[1]])
            assert [vfn.spec_of(x) for x in found[1][:3]] == [spec] * 3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("batch", "heads", "shape"), [(3, 4, (2, 3, 1)), (3, 3, (2, 1, 2))])
def test_batches_and_heads_that_the_ranks_do_not_divide(batch, heads, shape, method):
    leaves = (*made(batch, heads, 1, 6), torch.randn(batch, heads, 1, 6, dtype=F64))
    weights, spec = torch.randn(batch, heads, 6, 5, dtype=F64), P("dp", "tp" if shape[2] > 1 else None, "cp")
    options = {"causal": True, "dropout": 0.4, "key": KEY}
    want = vfn.grad(loss(lambda *x: by_hand(*x, **options), weights), (0, 1, 2, 3))(*leaves)
    with vfn.simulate(math.prod(shape)):
        mesh = vfn.make_mesh(shape, ("dp", "cp" if shape[1] > 1 else "tp", "tp" if shape[1] > 1 else "cp"))
        f = loss(lambda q, k, v, m: attention(q, k, v, mask=m, method=method, **options), weights)
        for mask in (leaves[3], vfn.shard(leaves[3], mesh, P("dp"))):
            parts = (*vfn.shard(leaves[:3], mesh, spec), mask)
            close(vfn.grad(f, (0, 1, 2, 3))(*parts), want)
        if heads == 3:
            close(vfn.jit(vfn.grad(f, (0, 1, 2, 3)))(*parts), want)


def test_the_ring_gives_a_wide_bias_a_wide_gradient():
    """What it keeps of bfloat16 queries is not rounded to them: that was an error of 0.004."""
    *halves, bias = *made(length=16, width=16, value_width=16, dtype=torch.bfloat16), torch.randn(1, 4, 16, 16)
    weights = torch.randn(2, 4, 16, 16).bfloat16()
    f = lambda bias, *x, f=attention: (f(*x, mask=bias) * weights).sum(dtype=F64)
    want = vfn.grad(f)(bias.double(), *(x.double() for x in halves), f=by_hand)
    with vfn.simulate(4):
        parts = vfn.shard(halves, vfn.make_mesh((4,), ("cp",)), P(None, None, "cp"))
        found = vfn.unshard(vfn.grad(f)(bias, *parts))
    torch.testing.assert_close(found.double(), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("method", METHODS)
def test_as_a_plan_and_in_a_body(method):
    *leaves, mask = *made(length=8), torch.randn(1, 4, 8, 8, dtype=F64)
    weights, spec = torch.randn(2, 4, 8, 5, dtype=F64), P("dp", None, "cp")
    options = {"causal": True, "window": (5, 0), "dropout": 0.25}
    want = vfn.grad(loss(lambda *x: by_hand(*x, order=zigzag_order(8, 2), key=KEY, **options), weights), (0, 1, 2, 3))(
        *leaves, mask
    )
    own = lambda q, k, v, m, key, **place: attention(
        q, k, v, mask=m, key=key, method=method, zigzag=2, **options, **place
    )
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "cp"))
        parts = vfn.shard(leaves, mesh, spec)
        f = vfn.jit(vfn.grad(loss(own, weights), (0, 1, 2, 3)))
        close(f(*parts, mask, KEY), want)
        f(*parts, mask, vfn.random.key(4))
        assert (f.cache_info().records, f.cache_info().as_written) == (1, 0)
        body = vfn.shard_map(
            lambda *x: own(*x, spec=spec), mesh=mesh, in_specs=(spec,) * 3 + (P(None, None, "cp"), P()), out_specs=spec
        )
        close(vfn.grad(loss(body, weights), (0, 1, 2, 3))(*leaves, mask, KEY), want)


def test_the_ring_has_second_derivatives_in_both_modes():
    leaves = (*made(batch=1, length=4, width=3, value_width=3), torch.randn(4, 4, dtype=F64))
    leaves[3][1, 1] = -math.inf
    leaves[3][2] = -math.inf
    options = {"window": (2, 0), "dropout": 0.25, "key": KEY}

    def twice(f):
        once = vfn.grad(lambda *x: (f(*x) ** 3).sum(), (0, 1, 2, 3))
        return vfn.grad(lambda *x: sum((g**2).sum() for g in once(*x)), (0, 1, 2, 3))

    ours, whole = (lambda *x: attention(*x[:3], mask=x[3], **options)), (lambda *x: by_hand(*x, **options))
    tangents = tuple(map(torch.randn_like, leaves))
    gradient = lambda f: vfn.grad(lambda *x: (f(*x) ** 3).sum())
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("cp",))
        parts, there = ((*vfn.shard(x[:3], mesh, P(None, None, "cp")), x[3]) for x in (leaves, tangents))
        close(twice(ours)(*parts), twice(whole)(*leaves))
        close([vfn.jvp(ours, parts, there)[1]], [vfn.jvp(whole, leaves, tangents)[1]])
        close([vfn.jvp(gradient(ours), parts, there)[1]], [vfn.jvp(gradient(whole), leaves, tangents)[1]])
        close([vfn.linearize(ours, *parts)[1](*there)], [vfn.jvp(whole, leaves, tangents)[1]])


@pytest.mark.parametrize(
    ("window", "causal", "zigzag", "visits"),
    [
        (None, True, 0, 4),
        ((None, None), False, 0, 4),
        ((4, 0), False, 0, 2),
        ((5, 0), False, 0, 3),
        (4, True, 0, 2),
        (4, False, 0, 3),
        ((0, 5), False, 0, 3),
        (0, False, 0, 1),
        ((2, 0), False, 4, 3),
        (99, False, 0, 4),
    ],
)
def test_a_ring_passes_over_keys_that_no_query_sees(monkeypatch, window, causal, zigzag, visits):
    """Of four ranks with four tokens each: the blocks that a rank computes, what it sends there and back."""
    blocks, scores = [], masked_ring.Given.scores
    monkeypatch.setattr(masked_ring.Given, "scores", lambda *x: blocks.append(x[2]) or scores(*x))
    with vfn.simulate(4):
        parts = vfn.shard(made(batch=1), vfn.make_mesh((4,), ("cp",)), P(None, None, "cp"))
        f = lambda *x: attention(*x, mask=torch.ones(16, 1).bool(), window=window, causal=causal, zigzag=zigzag)
        with vfn.comm_log() as log:
            out, back = vfn.vjp(f, *parts)
        assert (len(blocks), log.count("permute")) == (visits, visits - 1)
        with vfn.comm_log() as log:
            back(torch.ones_like(out))
        assert (len(blocks), log.count("permute")) == (2 * visits, visits if visits > 1 else 0)


def test_dropout_is_that_of_the_weights_and_of_its_rate():
    q, k, v = made(length=6)
    assert attention(q, k, v, dropout=0.0).equal(attention(q, k, v))
    with vfn.simulate(4):
        parts = vfn.shard((q, k, v), vfn.make_mesh((4,), ("cp",)), P(None, None, "cp"))
        for method in METHODS:
            nothing = vfn.value_and_grad(
                lambda *x, m=method: attention(*x, dropout=1.0, key=KEY, method=m).sum(), (0, 1, 2)
            )
            value, grads = nothing(*parts)
            assert not any(vfn.unshard(x).any() for x in (value, *grads))
            v = torch.eye(6, dtype=F64).expand(2, 2, 6, 6)  # so the result is the weights
            kept = attention(
                *parts[:2], vfn.shard(v, vfn.make_mesh((4,), ("cp",)), P()), dropout=0.5, key=KEY, method=method
            )
            want = vfn.random.dropout(KEY, torch.ones(2, 4, 6, 6, dtype=F64), 0.5) != 0
            assert (vfn.unshard(kept) != 0).equal(want)


@pytest.mark.parametrize("low", [-math.inf, -1e9, torch.finfo(torch.float32).min])
def test_rows_of_very_negative_masks_are_as_torchs(low):
    """Also where such a row has equal parts on all ranks, and in bfloat16."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        leaves = made(length=8, dtype=dtype)
        mask = torch.zeros(8, 8).masked_fill(torch.rand(8, 8) > 0.6, low)
        mask[3] = low
        want = F.scaled_dot_product_attention(
            *leaves,
            mask.clamp(min=max(low, torch.finfo(dtype).min) if low > -math.inf else low).to(dtype),
            enable_gqa=True,
        )
        with vfn.simulate(4):
            parts = vfn.shard(leaves, vfn.make_mesh((4,), ("cp",)), P(None, None, "cp"))
            for method in METHODS:
                out, grads = vfn.value_and_grad(
                    lambda *x, m=method: attention(*x, mask=mask, method=m).sum(), (0, 1, 2)
                )(*parts)
                out = attention(*parts, mask=mask, method=method)
                assert out.dtype == dtype
                assert all(vfn.unshard(g).isfinite().all() for g in grads)
                torch.testing.assert_close(vfn.unshard(out), want, rtol=tolerance, atol=tolerance)


def test_what_does_not_fit():
    q, k, v = made(length=6)
    assert lines_of(lambda: attention(q, k[:, :, :5], v[:, :, :5], mask=torch.ones(6, 6).long(), window=(1, -2))) == [
        "nn.attention: the arguments do not fit",
        "  * window: query i sees keys near i, but there are 6 queries and 5 keys",
        "  * window must be the number of keys to the left and to the right, (left, right), where None is no limit, or one "
        "number for both, but it is the tuple (1, -2)",
        "  * mask must be a tensor, bool (True: may be attended) or of the dtype of q or float32 (added to the scores), but "
        "it is the tensor i64[6,6]",
    ]
    assert lines_of(lambda: attention(q, k, v, mask=torch.ones(2, 6, dtype=torch.bool))) == [
        "nn.attention: the mask does not broadcast to [batch, heads, query, key] = [2, 4, 6, 6]",
        "  * it is bool[2,6]",
        "  Instead: mask[:, None, None, :] of a mask [batch, key]",
    ]
    assert lines_of(lambda: attention(q, k, v, spec=P())) == [
        "nn.attention: spec=P() outside of a shard_map body",
        "  Instead: no spec: arrays have theirs",
    ]
    with vfn.simulate(2):
        body = vfn.shard_map(
            lambda q, k, v: attention(q, k, v, axis="cp", mask=torch.ones(6, 6).bool()),
            mesh=vfn.make_mesh((2,), ("cp",)),
            in_specs=P(None, None, "cp"),
            out_specs=P(None, None, "cp"),
        )
        assert lines_of(lambda: body(q, k, v))[0] == (
            "nn.attention: the mask does not broadcast to [batch, heads, query, key] = [2, 4, 3, 6], of this rank's queries "
            "and all keys"
        )
    with pytest.raises(RandomError, match="dropout must be in"):
        attention(q, k, v, dropout=1.5, key=KEY)
    with pytest.raises(RandomError, match="dropout=0.5 needs a key, but key is None"):
        attention(q, k, v, dropout=0.5)


def on_ranks(leaves, mask, weights):
    mesh = vfn.make_mesh((2, 2), ("dp", "cp"))
    parts = (*vfn.shard(leaves, mesh, P("dp", None, "cp")), vfn.shard(mask, mesh, P("dp", None, "cp")), KEY)
    found = []
    for method in METHODS:
        f = loss(
            lambda q, k, v, m, key, w=method: attention(q, k, v, mask=m, window=3, dropout=0.25, key=key, method=w),
            weights,
        )
        found.append(vfn.jit(vfn.grad(f, (0, 1, 2)))(*parts))
    found.append(vfn.grad(f, (0, 1, 2))(*parts))
    return vfn.unshard(found)


def test_on_real_ranks(gloo):
    leaves, mask, weights = made(length=7), torch.rand(2, 4, 7, 7) > 0.4, torch.randn(2, 4, 7, 5, dtype=F64)
    whole = loss(lambda *x: by_hand(*x, mask=mask, window=(3, 3), dropout=0.25, key=KEY), weights)
    want = vfn.grad(whole, (0, 1, 2))(*leaves)
    for found in gloo(4, on_ranks, leaves, mask, weights):
        for one in found:
            close(one, want)
