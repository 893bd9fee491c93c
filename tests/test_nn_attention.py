"""Attention over a split sequence: the numbers of one device, what travels, what is kept, what does not fit."""

import math

import pytest
import torch
import torch.nn.functional as F

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import CollectiveError
from vescale_fn.nn import attention, blockwise, ring, zigzag_order
from vescale_fn.nn.heads import own_heads

F64 = torch.float64
WAYS = [
    ("ring", False, 0),
    ("ring", True, 0),
    ("ring", True, 1),
    ("all_gather", True, 0),
    ("all_gather", True, 1),
    ("all_to_all", True, 1),
]
MESHES = {
    "1": ((1,), ("cp",), P(None, None, "cp")),
    "4": ((4,), ("cp",), P(None, None, "cp")),
    "1x4": ((1, 4), ("dp", "cp"), P("dp", None, "cp")),
    "2x2": ((2, 2), ("dp", "cp"), P("dp", None, "cp")),
    "2x2x2": ((2, 2, 2), ("dp", "tp", "cp"), P("dp", "tp", "cp")),
    "two axes, minor first": ((2, 1, 2), ("a", "b", "c"), P("b", None, ("c", "a"))),
}


def made(batch=2, heads=4, shared=2, length=16, width=5, value_width=5, dtype=F64):
    q = torch.randn(batch, heads, length, width, dtype=dtype)
    k = torch.randn(batch, shared, length, width, dtype=dtype)
    return q, k, torch.randn(batch, shared, length, value_width, dtype=dtype)


def reference(q, k, v, causal, order=None):
    """torch's own, of the tokens in their usual order."""
    if order is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    back = order.argsort()
    return reference(*(x[:, :, back] for x in (q, k, v)), causal)[:, :, order]


def loss(f, weights):
    return lambda *leaves: (f(*leaves) * weights).sum()


def ranks_of(shape, names, spec):
    of_sequence = spec[2] if isinstance(spec[2], tuple) else (spec[2],)
    return math.prod(dict(zip(names, shape, strict=True))[axis] for axis in of_sequence)


def close(found, want):
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(vfn.unshard(one), other, rtol=1e-12, atol=1e-13)


ALL = [(case, *way) for case in MESHES for way in WAYS if way[0] == "ring" or case not in ("1", "1x4")]


@pytest.mark.parametrize(("case", "method", "causal", "zigzag"), ALL)
def test_values_and_gradients_are_those_of_one_device(case, method, causal, zigzag):
    shape, names, spec = MESHES[case]
    n = ranks_of(shape, names, spec)
    leaves, weights = made(), torch.randn(2, 4, 16, 5, dtype=F64)
    order = zigzag_order(16, n) if zigzag else None
    f = lambda q, k, v: attention(q, k, v, causal=causal, method=method, zigzag=n * zigzag)
    want = reference(*leaves, causal, order)
    grads = vfn.grad(loss(lambda *x: reference(*x, causal, order), weights), (0, 1, 2))(*leaves)
    close([f(*leaves)], [want])
    with vfn.simulate(math.prod(shape)):
        parts = vfn.shard(leaves, vfn.make_mesh(shape, names), spec)
        with vfn.strict():
            out, found = f(*parts), vfn.grad(loss(f, weights), (0, 1, 2))(*parts)
    close([out, *found], [want, *grads])
    assert [vfn.spec_of(x) for x in (out, *found)] == [spec] * 4


UNEVEN = [("4", 10), ("4", 5), ("4", 12), ("2x2", 7), ("2x2x2", 1), ("two axes, minor first", 9)]
UNEVEN_WAYS = [
    ("ring", False, 0),
    ("ring", True, 0),
    ("ring", True, 1),
    ("all_gather", True, 1),
    ("all_to_all", False, 0),
    ("all_to_all", True, 0),
    ("all_to_all", True, 1),
]


@pytest.mark.parametrize(("case", "length"), UNEVEN)
def test_sequences_that_the_ranks_do_not_divide(case, length):
    """Uneven parts, ranks without tokens, halves of which one is longer; with each way to share them."""
    shape, names, spec = MESHES[case]
    n = ranks_of(shape, names, spec)
    leaves, weights = made(length=length), torch.randn(2, 4, length, 5, dtype=F64)
    with vfn.simulate(math.prod(shape)):
        mesh = vfn.make_mesh(shape, names)
        parts = vfn.shard(leaves, mesh, spec)
        for method, causal, zigzag in UNEVEN_WAYS:
            if (method, zigzag, "," in case) == ("ring", 1, True):
                continue  # test_messages
            order = zigzag_order(length, n) if zigzag else None
            whole = lambda *x, c=causal, o=order: reference(*x, c, o)
            for scale in (None, 0.0, -0.3) if length == 10 and not zigzag else (None,):
                given = (leaves[0] * math.sqrt(5) * scale, *leaves[1:]) if scale is not None else leaves
                f = lambda q, k, v, m=method, c=causal, z=n * zigzag, s=scale: attention(
                    q, k, v, causal=c, method=m, zigzag=z, scale=s
                )
                want = whole(*given)
                with vfn.strict():
                    out, found = f(*parts), vfn.grad(loss(f, weights), (0, 1, 2))(*parts)
                close([out], [want])
                if scale is None:
                    close(found, vfn.grad(loss(whole, weights), (0, 1, 2))(*leaves))
                assert [vfn.spec_of(x) for x in (out, *found)] == [spec] * 4


UNEVEN_HEADS = [  # batch, heads, those of keys, tokens, mesh, how the parts lie
    (3, 4, 2, 8, (2, 2), P("a", None, "b")),
    (2, 6, 2, 8, (4, 1), P(None, "a", "b")),  # heads 0 and 1, 2 and 3, 4 and 5, none
    (3, 3, 1, 7, (2, 2, 2), P("a", ("c", "b"), None)),
    (2, 4, 2, 12, (3, 1), P(None, None, "a")),
]


@pytest.mark.parametrize(("batch", "heads", "shared", "length", "shape", "spec"), UNEVEN_HEADS)
def test_batches_and_heads_that_the_ranks_do_not_divide(batch, heads, shared, length, shape, spec):
    """Ranks without an entry or without a head, key heads that two ranks share, in each method."""
    leaves, weights = made(batch, heads, shared, length), torch.randn(batch, heads, length, 5, dtype=F64)
    spec = spec if spec[2] else P(spec[0], "b", "c")
    with vfn.simulate(math.prod(shape)):
        parts = vfn.shard(leaves, vfn.make_mesh(shape, ("a", "b", "c")[: len(shape)]), spec)
        for method, zigzag in (("ring", 1), ("ring", 0), ("all_gather", 0), ("all_to_all", 0)):
            n = zigzag and ranks_of(shape, "abc"[: len(shape)], spec)
            f = loss(lambda *x, m=method, z=n: attention(*x, causal=True, method=m, zigzag=z), weights)
            order = zigzag_order(length, n) if n else None
            whole = loss(lambda *x, o=order: reference(*x, True, o), weights)
            out, found = vfn.value_and_grad(f, (0, 1, 2))(*parts)
            want = vfn.value_and_grad(whole, (0, 1, 2))(*leaves)
            close([out, *found], [want[0], *want[1]])
            assert [vfn.spec_of(x) for x in found] == [spec] * 3
        if shape == (2, 2):
            close([vfn.jit(vfn.grad(f))(*parts)], want[1][:1])


def test_a_body_with_heads_that_its_ranks_do_not_divide():
    leaves = made(heads=4, shared=2, length=6)
    with vfn.simulate(3):
        mesh, spec = vfn.make_mesh((3,), ("cp",)), P(None, None, "cp")
        own = lambda *x: attention(*x, causal=True, axis="cp", method="all_to_all")
        f = vfn.shard_map(own, mesh=mesh, in_specs=spec, out_specs=spec)
        close([f(*leaves)], [reference(*leaves, True)])


SHARED_KEYS = [(6, 3, 5, (2, 2)), (8, 2, 4, (4, 1))]  # heads, those of keys, tokens, tp and cp


@pytest.mark.parametrize(("heads", "shared", "length", "shape"), SHARED_KEYS)
def test_ranks_that_share_a_head_of_keys_add_up_its_gradient(heads, shared, length, shape):
    leaves, weights = made(1, heads, shared, length), torch.randn(1, heads, length, 5, dtype=F64)
    f = loss(lambda *x: attention(*x, causal=True), weights)
    want = vfn.value_and_grad(loss(lambda *x: reference(*x, True), weights), (0, 1, 2))(*leaves)
    with vfn.simulate(math.prod(shape)):
        mesh = vfn.make_mesh(shape, ("tp", "cp"))
        cp = "cp" if shape[1] > 1 else None
        parts = vfn.shard(leaves, mesh, (P(None, "tp", cp), P(None, None, cp), P(None, None, cp)))
        with vfn.comm_log() as log:
            out, found = vfn.value_and_grad(f, (0, 1, 2))(*parts)
        close([out, *found], [want[0], *want[1]])
        part = -(-length // shape[1])
        sums = [one.bytes for one in log if "tp" in one.axes and one.bytes > 8]
        assert sums == [2 * shared * part * 5 * 8]  # of keys and values together
        if cp:  # keys that lie as the queries do
            parts = vfn.shard(leaves, mesh, P(None, "tp", "cp"))
            close([vfn.jit(vfn.grad(f, 1))(*parts)], want[1][1:2])


def test_own_heads_under_transforms():
    k = torch.randn(3, 1, 2, 2, 2, dtype=F64)
    own = lambda x: (x.repeat_interleave(2, 1) ** 3).sum()
    twice = lambda f: lambda x: vfn.grad(lambda x: vfn.grad(f)(x).square().sum())(x)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("tp",))
        ours = lambda x: (own_heads((x,), mesh, ((), ("tp",), ()), 2)[0] ** 3).sum()
        parts, whole = vfn.shard(k, mesh, P()), vfn.shard(k[0], mesh, P())
        close([vfn.vmap(vfn.grad(ours))(parts)], [torch.stack(list(map(vfn.grad(own), k)))])
        close([twice(ours)(whole)], [twice(own)(k[0])])
        close(vfn.jvp(ours, (whole,), (parts[1],)), vfn.jvp(own, (k[0],), (k[1],)))


@pytest.mark.parametrize(("method", "zigzag"), [("ring", 2), ("all_gather", 0), ("all_to_all", 2)])
def test_as_a_plan_and_under_transforms(method, zigzag):
    q, k, v = made(length=8)
    weights = torch.randn(2, 4, 8, 5, dtype=F64)
    order = zigzag_order(8, zigzag) if zigzag else None
    f = loss(lambda *x: attention(*x, causal=True, method=method, zigzag=zigzag), weights)
    whole = loss(lambda *x: reference(*x, True, order), weights)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "cp"))
        parts = vfn.shard((q, k, v), mesh, P("dp", None, "cp"))
        want = vfn.grad(whole, (0, 1, 2))(q, k, v)
        close(vfn.jit(vfn.grad(f, (0, 1, 2)))(*parts), want)
        close(vfn.grad(vfn.remat(f), (0, 1, 2))(*parts), want)
        close(torch.func.grad(f, (0, 1, 2))(*parts), want)
        several = [torch.stack([x, x.flip(0), x * 2]) for x in (q, k, v)]
        want = [torch.stack(x) for x in zip(*(vfn.grad(whole, (0, 1, 2))(*(x[i] for x in several)) for i in range(3)))]
        if method == "ring":  # torch's own kernel has no rule for vmap, and warns
            parts = vfn.shard(several, mesh, P(None, "dp", None, "cp"))
            close(vfn.vmap(vfn.grad(f, (0, 1, 2)))(*parts), want)


@pytest.mark.parametrize("zigzag", [0, 2])
def test_the_ring_has_second_derivatives_in_both_modes(zigzag):
    leaves = made(length=4, width=3, value_width=3)
    place = zigzag_order(4, 2) if zigzag else torch.arange(4)

    def by_hand(q, k, v):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = (q @ k.mT / math.sqrt(3)).masked_fill(place[:, None] < place, -math.inf)
        return scores.softmax(-1) @ v

    def twice(f):
        once = vfn.grad(lambda *x: (f(*x) ** 3).sum(), (0, 1, 2))
        return vfn.grad(lambda *x: sum((g**2).sum() for g in once(*x)), (0, 1, 2))

    def forwards(f, leaves, tangents):
        """The tangent; the gradient of its square, for the keys; the tangent of the gradient for the queries."""
        q, k, v = leaves
        along = lambda k: vfn.jvp(lambda *x: f(*x), (q, k, v), tangents)[1]
        gradient = vfn.grad(lambda *x: (f(*x) ** 3).sum())
        squared = vfn.grad(lambda k: along(k).square().sum())
        return along(k), squared(k), vfn.jvp(gradient, leaves, tangents)[1]

    want = twice(by_hand)(*leaves)
    tangents = tuple(map(torch.randn_like, leaves))
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("cp",))
        parts, there = vfn.shard((leaves, tangents), mesh, P(None, None, "cp"))
        ours = lambda *x: attention(*x, causal=True, zigzag=zigzag)
        close(twice(ours)(*parts), want)
        close(forwards(ours, parts, there), forwards(by_hand, leaves, tangents))
        close([vfn.linearize(ours, *parts)[1](*there)], [vfn.jvp(by_hand, leaves, tangents)[1]])


def test_values_of_another_width_and_keys_of_another_length():
    q, k, v = made(value_width=3)
    weights = torch.randn(2, 4, 16, 3, dtype=F64)
    whole = loss(lambda *x: reference(*x, False), weights)
    for length in (12, 7):
        k, v = k[:, :, :length], v[:, :, :length]
        with vfn.simulate(4):
            parts = vfn.shard((q, k, v), vfn.make_mesh((4,), ("cp",)), P(None, None, "cp"))
            close(vfn.grad(loss(attention, weights), (0, 1, 2))(*parts), vfn.grad(whole, (0, 1, 2))(q, k, v))


@pytest.mark.parametrize("zigzag", [0, 4])
def test_halves_are_added_up_in_float32(zigzag):
    leaves = made(width=8, value_width=8, dtype=torch.bfloat16)
    order = zigzag_order(16, 4) if zigzag else None
    exact = reference(*(x.double() for x in leaves), True, order)
    with vfn.simulate(4):
        parts = vfn.shard(leaves, vfn.make_mesh((4,), ("cp",)), P(None, None, "cp"))
        with vfn.comm_log() as log:
            out, back = vfn.vjp(lambda *x: attention(*x, causal=True, zigzag=zigzag), *parts)
            back(torch.ones_like(out))
    assert out.dtype == torch.bfloat16
    one_device = (reference(*leaves, True, order) - exact).abs().max()
    assert (vfn.unshard(out) - exact).abs().max() <= 2 * one_device  # four roundings to bf16, not one
    block = 2 * 2 * 2 * 4 * 8  # elements of a rank's keys and values
    assert sum(call.bytes for call in log if call.op == "permute") == block * (3 * 2 + 3 * 2 + 4 * 4)


def test_in_a_body_beside_values_that_are_the_same_along_another_axis():
    q, k, v = made()
    k, v = k[:1], v[:1]
    whole = lambda q, k, v: (reference(q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1), True) ** 2).sum()
    with vfn.simulate(4):
        f = vfn.shard_map(
            lambda *x: attention(*x, causal=True, axis="cp"),
            mesh=vfn.make_mesh((2, 2), ("dp", "cp")),
            in_specs=(P("dp", None, "cp"), P(None, None, "cp"), P(None, None, "cp")),
            out_specs=P("dp", None, "cp"),
        )
        close(vfn.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2))(q, k, v), vfn.grad(whole, (0, 1, 2))(q, k, v))


@pytest.mark.parametrize(
    ("method", "there", "back", "elements"),
    [
        ("ring", {"permute": 3}, {"permute": 4}, {"permute": 2 * 3 + (2 + 2) * 3 + 2}),
        ("all_gather", {"all_gather": 1}, {"reduce_scatter": 1}, {"all_gather": 2, "reduce_scatter": 2}),
        ("all_to_all", {"all_to_all": 2}, {"all_to_all": 2}, {"all_to_all": 2 * (4 + 2 * 2)}),
    ],
)
def test_what_travels(method, there, back, elements):
    """Of a rank's part of the keys or values, which have half of the queries' heads here: so many times their size."""
    leaves = made(heads=8, shared=4, width=6, value_width=6)
    f = lambda *x: attention(*x, causal=True, method=method)
    with vfn.simulate(4):
        parts = vfn.shard(leaves, vfn.make_mesh((4,), ("cp",)), P(None, None, "cp"))
        with vfn.comm_log() as log:
            out, pull = vfn.vjp(f, *parts)
        assert {call.op: log.count(call.op) for call in log} == there
        with vfn.comm_log() as also:
            pull(torch.ones_like(out))
        assert {call.op: also.count(call.op) for call in also} == back
    size = parts[1].numel() // 4 * 8
    moved = {op: sum(call.bytes for call in (*log, *also) if call.op == op) for op in elements}
    if method == "ring":
        assert moved == {op: size * times for op, times in elements.items()}
    else:
        assert set(moved) == set(elements)


@pytest.mark.parametrize("zigzag", [0, 4])
def test_the_ring_keeps_a_ranks_part_and_no_scores(zigzag):
    leaves = made(length=64, width=8, value_width=8)
    kept = []
    with vfn.simulate(4):
        parts = [x.requires_grad_() for x in vfn.shard(leaves, vfn.make_mesh((4,), ("cp",)), P(None, None, "cp"))]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            attention(*parts, causal=True, zigzag=zigzag)
    q, k = 2 * 4 * 16 * 8, 2 * 2 * 16 * 8  # of a rank
    assert sorted(x.numel() for x in kept) == sorted([q, k, k, q, q // 8])  # q, k, v, the result, its logarithm


@pytest.mark.parametrize(("causal", "zigzag", "terms"), [(True, 0, {}), (True, 2, {}), (False, 0, {"window": 8})])
def test_a_plan_of_the_ring_brings_keys_round_again(causal, zigzag, terms):
    """Were they kept from the forward pass on, each rank would have those of all."""
    f = loss(lambda *x: attention(*x, causal=causal, zigzag=zigzag, **terms), torch.ones(2, 4, 16, 5, dtype=F64))
    with vfn.simulate(2):
        simulated = vfn.make_mesh((2,), ("cp",))
        parts = vfn.shard(made(length=16), simulated, P(None, None, "cp"))
        with vfn.comm_log() as log:
            vfn.grad(f, (0, 1, 2))(*parts)
        for step, mesh in ((f, vfn.abstract_mesh((2,), ("cp",))), (vfn.plan.shared(f), simulated)):
            parts = vfn.shard(made(length=16), mesh, P(None, None, "cp"))
            plan = vfn.jit(vfn.grad(step, (0, 1, 2))).lower(*parts).comms()
            assert sum(call.bytes for call in plan) == log.bytes()


def test_zigzag_halves_the_work_of_the_ring(monkeypatch):
    pairs = []
    counted = lambda q, k, *rest: pairs.append(q.shape[0] * q.shape[2] * k.shape[2]) or blockwise.part(q, k, *rest)
    monkeypatch.setattr(ring, "part", counted)
    done = []
    with vfn.simulate(4):
        parts = vfn.shard(made(batch=1), vfn.make_mesh((4,), ("cp",)), P(None, None, "cp"))
        for zigzag in (0, 4):
            attention(*parts, causal=True, zigzag=zigzag)
            done.append(sum(pairs))
            pairs.clear()
    assert done == [4 * 4 * 4, 4 * 4 + 3 * 2 * (2 * 2)]


def test_the_zigzag_order():
    assert zigzag_order(12, 3).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    assert zigzag_order(2, 1).tolist() == [0, 1]
    order, tokens = zigzag_order(24, 4), torch.randn(2, 24)
    assert tokens[:, order][:, order.argsort()].equal(tokens)
    seen = [sum(int(i) + 1 for i in part) for part in order.chunk(4)]  # how many tokens the tokens of a rank look at
    assert len(set(seen)) == 1
    assert zigzag_order(10, 4).tolist() == [0, 1, 9, 2, 3, 8, 4, 5, 7, 6]  # 3, 3, 3, 1 of the ranks
    assert zigzag_order(5, 4).tolist() == [0, 4, 1, 3, 2]
    with pytest.raises(CollectiveError, match="n must be a positive int, but it is the int 0"):
        zigzag_order(10, 0)


OWN = {
    "causal": (10, 10, {"is_causal": True, "enable_gqa": True}),
    "some ranks have no queries": (3, 7, {"is_causal": True, "enable_gqa": True}),
    "a mask": (10, 7, {"attn_mask": torch.sin(torch.arange(70.0, dtype=F64)).reshape(10, 7), "enable_gqa": True}),
    "a mask for each example": (
        6,
        9,
        {"attn_mask": torch.sin(torch.arange(108.0)).reshape(2, 1, 6, 9) > -0.7, "enable_gqa": True},
    ),
}


@pytest.mark.parametrize(("t", "s", "options"), OWN.values(), ids=OWN)
def test_under_torchs_own_name_keys_and_values_are_gathered(t, s, options):
    """Queries stay where they are, in parts of any size, and look at keys by their place in the whole sequence."""
    (q, _, _), (_, k, v) = made(length=t), made(length=s)
    weights = torch.randn(2, 4, t, 5, dtype=F64)
    own = lambda *x: F.scaled_dot_product_attention(*x, **options)
    want = vfn.value_and_grad(loss(own, weights), (0, 1, 2))(q, k, v)
    with vfn.simulate(4):
        for shape, names, spec in (MESHES["4"], MESHES["2x2"], MESHES["two axes, minor first"]):
            mesh = vfn.make_mesh(shape, names)
            parts = vfn.shard((q, k, v), mesh, spec)
            with vfn.comm_log() as log:
                out, back = vfn.vjp(own, *parts)
            assert vfn.spec_of(out) == spec
            assert [call.op for call in log] == ["all_gather"] * 2
            with vfn.comm_log() as log:
                grads = back(vfn.shard(weights, mesh, spec))
            # keys and values once more; gradients are added up
            assert "all_gather" not in [call.op for call in log][2:]
            close([(out * weights).sum(), *grads], [want[0], *want[1]])
            if "attn_mask" not in options and t == s:  # so "all_gather" takes a sequence of any length
                with vfn.strict():
                    f = lambda *x: attention(*x, causal=True, method="all_gather")
                    close(vfn.grad(loss(f, weights), (0, 1, 2))(*parts), want[1])
        with vfn.strict(), pytest.raises(vfn.errors.ReshardError, match=r"its argument key,? .*@c\+a"):
            own(*parts)


def test_messages():
    q, k, v = made(length=6)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("cp",))
        parts = vfn.shard(made(), mesh, P(None, None, "cp"))
        assert lines_of(lambda: attention(*parts, causal=True, zigzag=2)) == [
            "nn.attention: the sequence cannot be split over 4 ranks along 'cp'",
            "  * tokens in the zigzag order of 2 ranks go round a ring of 4",
            "  Instead: zigzag=4, with the tokens in the order zigzag_order(16, 4); or method='all_gather'",
        ]
        mesh = vfn.make_mesh((2, 2), ("tp", "cp"))
        parts = vfn.shard(made(length=9), mesh, P(None, None, ("tp", "cp")))
        assert lines_of(lambda: attention(*parts, causal=True, zigzag=4)) == [
            "nn.attention: the sequence cannot be split over 4 ranks along 'tp', 'cp'",
            "  * zigzag_order gives the ranks [3, 3, 3, 0] tokens, but they have [3, 2, 2, 2]",
            "  Instead: split the sequence over one axis; or pad the tokens at the end; or method='all_gather'",
        ]
        odd = vfn.shard_map(
            lambda *x: attention(*x, causal=True, axis="cp", zigzag=2),
            mesh=mesh,
            in_specs=P(None, None, "cp"),
            out_specs=P(None, None, "cp"),
        )
        assert lines_of(lambda: odd(q, k, v)) == [
            "nn.attention: the sequence cannot be split over 2 ranks along 'cp'",
            "  * in zigzag order a rank has an early and a late half, but 3 tokens",
            "  Instead: pad the tokens at the end; or nn.attention on arrays, which does",
        ]
        body = vfn.shard_map(attention, mesh=mesh, in_specs=P(), out_specs=P())
        assert lines_of(lambda: body(q, k, v))[0] == (
            "nn.attention: in a shard_map body a value does not say over which axis its sequence is split"
        )
    assert lines_of(lambda: attention(q[:1], k[:, :, :3], v, causal=True, method="rings", zigzag=True)) == [
        "nn.attention: the arguments do not fit",
        "  * q and k have batch 1 and 2: f64[1,4,6,5], f64[2,2,3,5]",
        "  * k and v have length 3 and 6: f64[2,2,3,5], f64[2,2,6,5]",
        "  * causal: query i looks at keys up to i, but there are 6 queries and 3 keys",
        "  * method='rings' is not one of ('ring', 'all_gather', 'all_to_all'); did you mean 'ring'?",
        "  * zigzag must be a number of ranks, or 0 for the usual order, but it is the bool True",
    ]
    assert lines_of(lambda: attention(q[0], k.long(), v)) == [
        "nn.attention: the arguments do not fit",
        "  * q must be a floating-point tensor of 4 dims (batch, heads, sequence, width), but it is the tensor f64[4,6,5]",
        "  * k must be a floating-point tensor of 4 dims (batch, heads, sequence, width), but it is the tensor i64[2,2,6,5]",
    ]


def lines_of(call):
    with pytest.raises(CollectiveError) as error:
        call()
    return str(error.value).splitlines()


ON_RANKS = [("all_gather", 2), ("all_to_all", 0), ("ring", 0), ("ring", 2)]


@pytest.mark.parametrize(("heads", "shared"), [(4, 2), (8, 2), (4, 1)])
def test_under_torchs_own_name_ranks_that_share_a_head_of_keys_compute_their_own_heads(heads, shared):
    """Heads of queries over more ranks than there are heads of keys: nothing is gathered, forward or backward."""
    *leaves, mask = *made(heads=heads, shared=shared, length=6), torch.randn(2, heads, 6, 6, dtype=F64)
    weights = torch.randn(2, heads, 6, 5, dtype=F64)
    for terms in ({"is_causal": True}, {"attn_mask": mask}):
        f = loss(lambda *x, t=terms: F.scaled_dot_product_attention(*x, enable_gqa=True, **t), weights)
        want = vfn.value_and_grad(f, (0, 1, 2))(*leaves)
        with vfn.simulate(4):
            mesh = vfn.make_mesh((4,), ("tp",))
            q, k, v = vfn.shard(leaves, mesh, [P(None, "tp"), P(), P()])
            with vfn.comm_log() as log:
                out, grads = vfn.value_and_grad(f, (0, 1, 2))(q, k, v)
            close([out, *grads], [want[0], *want[1]])
            assert {call.op for call in log} == {"all_reduce"}
            if heads == 4:
                out, grads = vfn.jit(vfn.value_and_grad(f, (0, 1, 2)))(q, k, v)
                close([out, *grads], [want[0], *want[1]])


def on_uneven_ranks(leaves, weights):
    parts = vfn.shard(leaves, vfn.make_mesh((2, 2), ("tp", "cp")), P(None, "tp", "cp"))
    f = lambda method: loss(lambda *x: attention(*x, method=method, causal=True), weights)
    found = [vfn.value_and_grad(f(method), (0, 1, 2))(*parts) for method in ("ring", "all_to_all")]
    return vfn.unshard([*found, vfn.jit(vfn.value_and_grad(f("ring"), (0, 1, 2)))(*parts)])


@pytest.mark.parametrize(("heads", "length"), [(1, 1), (2, 3)])
def test_heads_and_parts_that_real_ranks_do_not_have(gloo, heads, length):
    leaves, weights = made(heads=heads, shared=1, length=length), torch.randn(2, heads, length, 5, dtype=F64)
    value, grads = vfn.value_and_grad(loss(lambda *x: reference(*x, True), weights), (0, 1, 2))(*leaves)
    for found in gloo(4, on_uneven_ranks, leaves, weights):
        for out, its in found:
            close([out, *its], [value, *grads])


def on_ranks(leaves, weights):
    parts = vfn.shard(leaves, vfn.make_mesh((2, 2), ("dp", "cp")), P("dp", None, "cp"))
    found = []
    for method, zigzag in ON_RANKS:
        f = loss(lambda *x, m=method, z=zigzag: attention(*x, causal=True, method=m, zigzag=z), weights)
        found.append(vfn.value_and_grad(f, (0, 1, 2))(*parts))
    found.append(vfn.jit(vfn.value_and_grad(f, (0, 1, 2)))(*parts))
    return vfn.unshard(found)


@pytest.mark.parametrize("length", [8, 7])
def test_on_real_ranks(gloo, length):
    leaves, weights = made(length=length), torch.randn(2, 4, length, 5, dtype=F64)
    want = []
    for _, zigzag in (*ON_RANKS, ON_RANKS[-1]):
        order = zigzag_order(length, 2) if zigzag else None
        whole = loss(lambda *x, o=order: reference(*x, True, o), weights)
        want.append(vfn.value_and_grad(whole, (0, 1, 2))(*leaves))
    for found in gloo(4, on_ranks, leaves, weights):
        for (one, its), (value, grads) in zip(found, want, strict=True):
            close([one, *its], [value, *grads])
