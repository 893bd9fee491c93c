"""torch's flex_attention on arrays and in bodies: the numbers of one device, and what travels."""

import functools
import math

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import ReshardError, TransformError

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:Dynamo")
F64 = torch.float64
B, H, T, D = 3, 4, 7, 5  # a batch that no axis divides


def made(batch=B, heads=H, shared=2, length=T, dtype=F64):
    q, bias = torch.randn(batch, heads, length, D, dtype=dtype), torch.randn(batch, heads, length, dtype=dtype)
    return q, *torch.randn(2, batch, shared, length, D, dtype=dtype), bias


def scores_with(bias):
    return lambda score, b, h, i, j: torch.tanh(score * (b + 1)) + bias[b, h, i] * (i - j) + h * 0.1


def causal(b, h, i, j):
    return i >= j


def by_hand(q, k, v, score_mod, mask_mod=lambda b, h, i, j: i > -1):
    """All scores at once: indices that broadcast in the place of numbers."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    at = torch.meshgrid(*(torch.arange(n) for n in (*q.shape[:3], k.shape[2])), indexing="ij")
    scores = torch.where(mask_mod(*at), score_mod(q @ k.mT / math.sqrt(D), *at), -math.inf)
    return scores.softmax(-1) @ v


def step(q, k, v, bias, attention=flex_attention, **kwargs):
    return attention(q, k, v, scores_with(bias), enable_gqa=True, **kwargs)


def whole_step(q, k, v, bias):
    return by_hand(q, k, v, scores_with(bias))


def loss(f):
    return lambda *args: (f(*args) * torch.arange(1.0, 1 + D, dtype=F64)).sum()


def close(found, want):
    torch.testing.assert_close(vfn.unshard(found), want, rtol=1e-11, atol=1e-12)


SEQUENCE = "flex_attention needs the whole sequence of keys and values"
LAYOUTS = {  # of q, keys and values, bias; and what is gathered
    "batch and heads": (P("dp", "tp"), P("dp", "tp"), P("dp", "tp"), {"index needs dims 0 and 1 whole"}),
    "batch over all": (P(("dp", "tp")), P(("dp", "tp")), P(("dp", "tp")), {"index needs dim 0 whole"}),
    "queries": (P("dp", None, "tp"), P("dp"), P(), set()),
    "a whole bias": (P("dp", "tp"), P("dp", "tp"), P(), set()),
    "sequence": (P("dp", None, "tp"), P("dp", None, "tp"), P(), {SEQUENCE}),
}


@pytest.mark.parametrize(("case", "batch"), [*((case, B) for case in LAYOUTS), ("batch and heads", 1)])
def test_values_and_gradients_are_those_of_one_device(case, batch):
    args = made(batch)
    want, grads = whole_step(*args), vfn.grad(loss(whole_step), (0, 1, 2, 3))(*args)
    *specs, gathered = LAYOUTS[case]
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        parts = [vfn.shard(x, mesh, specs[i]) for x, i in zip(args, (0, 1, 1, 2), strict=True)]
        with vfn.comm_log() as log:
            out = step(*parts)
        close(out, want)
        close(vfn.grad(loss(step), (0, 1, 2, 3))(*parts), grads)
    assert {one.why.split(":")[0] for one in log} == gathered
    assert vfn.spec_of(out) == specs[0]


def test_as_a_plan_and_under_transforms():
    args = made()
    f, whole = loss(step), loss(whole_step)
    want = vfn.value_and_grad(whole, (0, 1, 2, 3))(*args)
    close(vfn.value_and_grad(f, (0, 1, 2, 3))(*args), want)
    close(vfn.jit(step)(*args), whole_step(*args))
    with vfn.simulate(4):
        parts = vfn.shard(args, vfn.make_mesh((2, 2), ("dp", "tp")), P("dp", "tp"))
        close(vfn.jit(vfn.value_and_grad(f, (0, 1, 2, 3)))(*parts), want)
        close(torch.func.grad(f, (0, 1, 2, 3))(*parts), want[1])
        t = parts[0] * 2 + 1
        close(vfn.jvp(f, parts, (t, *map(torch.zeros_like, parts[1:])))[1], ((args[0] * 2 + 1) * want[1][0]).sum())


@pytest.mark.parametrize("check", [True, False])
def test_in_bodies(check):
    """There, batch and heads are those of the block."""
    args = made(batch=4, length=4)
    each = lambda f: lambda *args: torch.cat([f(*(x[i : i + 2] for x in args)) for i in (0, 2)])
    want, grads = each(whole_step)(*args), vfn.grad(loss(each(whole_step)), (0, 1, 2, 3))(*args)
    with vfn.simulate(2):
        parts = vfn.shard(args, vfn.make_mesh((2,), ("dp",)), P("dp"))
        f = vfn.shard_map(step, in_specs=P("dp"), out_specs=P("dp"), check_vma=check)
        close(f(*parts), want)
        close(vfn.jit(f)(*parts), want)
        close(vfn.grad(loss(f), (0, 1, 2, 3))(*parts), grads)
        close(vfn.jit(vfn.grad(loss(f), (0, 1, 2, 3)))(*parts), grads)


def test_a_weight_that_a_body_closes_over_has_the_sum_of_its_gradients():
    q, k, v, _ = made(batch=2)
    slopes = torch.randn(H, dtype=F64)
    of = lambda attention: lambda slopes: attention(q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j))
    gqa = functools.partial(flex_attention, enable_gqa=True)
    want = vfn.grad(loss(of(by_hand)))(slopes)
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("dp",))

        def f(slopes):
            body = lambda q, k, v: gqa(q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j))
            return vfn.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(q, k, v)

        close(vfn.grad(loss(f))(slopes), want)
        close(vfn.grad(loss(of(gqa)))(vfn.shard(slopes, mesh, P("dp"))), want)  # an array among plain tensors


def test_masks_and_what_else_it_gives():
    q, k, v, bias = made(batch=4, shared=H, length=8)
    documents = torch.arange(8).expand(4, 8) // torch.tensor([[2], [3], [5], [8]])
    mask_of = lambda documents: lambda b, h, i, j: (documents[b, i] == documents[b, j]) & (i >= j) & (j != 0)
    masks = lambda documents: create_block_mask(mask_of(documents), 4, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    f = lambda *args, mask: step(*args, block_mask=mask, return_aux=AuxRequest(lse=True))
    with torch.no_grad():
        want, aux = f(q, k, v, bias, mask=masks(documents))
    assert (aux.lse == -math.inf).any()  # of queries that see nothing
    both = lambda f: lambda *args, **kw: (lambda out, aux: out.sum() + torch.exp(aux.lse).sum())(*f(*args, **kw))
    grads = vfn.grad(both(f), (0, 1, 2, 3))(q, k, v, bias, mask=masks(documents))
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        parts = vfn.shard((q, k, v, bias), mesh, P("dp", "tp"))
        given = vfn.shard(documents, mesh, P("dp"))
        for mask in (masks(documents), masks(given)):
            out, its = f(*parts, mask=mask)
            close((out, its.lse), (want, aux.lse))
            close(vfn.grad(both(f), (0, 1, 2, 3))(*parts, mask=mask), grads)
        largest = step(*parts, return_aux=AuxRequest(max_scores=True))[1].max_scores
        assert torch.isfinite(vfn.unshard(largest)).all()


def test_what_a_score_is_made_into_where_it_is_masked_has_no_gradient():
    q, k, v, _ = made(shared=H)
    slope = lambda s, b, h, i, j: s * torch.sqrt((i - j).to(F64))  # NaN above the diagonal
    mask = create_block_mask(causal, None, None, T, T, device="cpu", BLOCK_SIZE=8)
    f = lambda *args: flex_attention(*args, slope, mask)
    safe = lambda *args: by_hand(*args, lambda s, b, h, i, j: s * torch.sqrt((i - j).clamp(min=0).to(F64)), causal)
    with vfn.simulate(2):
        parts = vfn.shard((q, k, v), vfn.make_mesh((2,), ("dp",)), P("dp"))
        close(f(*parts), safe(q, k, v))
        close(vfn.grad(loss(f), (0, 1, 2))(*parts), vfn.grad(loss(safe), (0, 1, 2))(q, k, v))


def test_the_result_lies_in_memory_as_the_queries_do():
    q, k, v, bias = made(batch=2, shared=H)
    turned = lambda q, k, v: step(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)), bias)
    with torch.no_grad():
        want = turned(q, k, v)
    with vfn.simulate(2):
        out = turned(*vfn.shard((q, k, v), vfn.make_mesh((2,), ("dp",)), P("dp")))
    assert out.stride() == want.stride() != want.contiguous().stride()


def test_halves_have_the_numbers_of_one_device():
    args = made(batch=2, dtype=torch.bfloat16)
    with torch.no_grad():
        want = step(*args)
    with vfn.simulate(2):
        out = step(*vfn.shard(args, vfn.make_mesh((2,), ("tp",)), P(None, "tp")))
    torch.testing.assert_close(vfn.unshard(out), want, rtol=0, atol=0)


def test_compiled():
    args = made(batch=2)
    want, compiled = whole_step(*args), torch.compile(flex_attention, backend="eager")
    close(step(*args, attention=compiled), want)
    with vfn.simulate(2):
        parts = vfn.shard(args, vfn.make_mesh((2,), ("dp",)), P("dp"))
        close(step(*parts, attention=compiled), want)
        close(vfn.jit(functools.partial(step, attention=compiled))(*parts), want)


def test_strict_says_which_parts_it_would_gather():
    with vfn.simulate(2):
        q, k, v = vfn.shard(made(shared=H)[:3], vfn.make_mesh((2,), ("cp",)), P(None, None, "cp"))
        with vfn.strict(), pytest.raises(ReshardError) as error:
            flex_attention(q, k, v)
    assert str(error.value).splitlines() == [
        "flex_attention: strict: it needs the whole sequence of keys and values, of which ranks have parts",
        "  * key is the array f64[3,4,7@cp,5]",
        "  * value is the array f64[3,4,7@cp,5]",
        "  Instead: key, value = vfn.with_sharding((key, value), (P(), P())) before it, or vfn.nn.attention, by which ranks "
        "pass their parts on",
    ]


def on_ranks(args):
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    parts = vfn.shard(args, mesh, P("dp", "tp"))
    body = vfn.shard_map(lambda *args: step(*args), mesh=mesh, in_specs=P(None, "tp"), out_specs=P(None, "tp"))
    whole = vfn.shard(args, mesh, P(None, "tp"))
    found = [
        vfn.value_and_grad(loss(step), (0, 1, 2, 3))(*parts),
        vfn.jit(vfn.value_and_grad(loss(step), (0, 1, 2, 3)))(*parts),
    ]
    return vfn.unshard((found, body(*whole), vfn.grad(loss(body), (0, 1, 2, 3))(*whole)))


def test_on_real_ranks(gloo):
    args = made()
    halves = lambda *args: torch.cat([whole_step(*(x.chunk(2, 1)[i] for x in args)) for i in (0, 1)], 1)
    want = vfn.value_and_grad(loss(whole_step), (0, 1, 2, 3))(*args)
    for found, out, grads in gloo(4, on_ranks, args):
        close(found, [want, want])
        close(out, halves(*args))
        close(grads, vfn.grad(loss(halves), (0, 1, 2, 3))(*args))


def test_a_torch_without_what_it_needs_is_named(monkeypatch):
    monkeypatch.delattr("torch.nn.attention.flex_attention.flex_attention_hop")
    q = torch.zeros(1, 2, 4, 8)
    with vfn.simulate(2):
        q = vfn.shard(q, vfn.make_mesh((2,), ("tp",)), P(None, "tp"))
        with pytest.raises(TransformError, match="flex_attention: torch .* has no flex_attention_hop, by which"):
            flex_attention(q, q, q)
