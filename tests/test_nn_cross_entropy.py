"""Cross entropy of a linear layer: torch's numbers, without the scores; what travels, what is kept, what does not fit."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.distributed.blocks import Blocks
from vescale_fn.errors import CollectiveError
from vescale_fn.nn import linear_cross_entropy

F64 = torch.float64
TOKENS, WIDTH, CLASSES = (4, 6), 5, 12
OPTIONS = [
    {},
    {"label_smoothing": 0.2, "ignore_index": 2},
    {"reduction": "sum", "ignore_index": 2},
    {"reduction": "none", "label_smoothing": 0.1},
    {"class_weights": True, "ignore_index": 2, "label_smoothing": 0.3},
    {"class_weights": True, "reduction": "none"},
]
MESHES = {
    "classes": ((4,), ("tp",), P(), P("tp"), None),
    "tokens and classes": ((2, 2), ("dp", "tp"), P("dp"), P("tp"), None),
    "a weight split as the tokens are": ((2, 2), ("dp", "tp"), P("dp"), P(("tp", "dp")), None),
    "the same of its width": ((2, 2), ("dp", "tp"), P("dp"), P("tp", "dp"), None),
    "a sequence split as the classes are": ((2, 2), ("dp", "tp"), P("dp", "tp"), P("tp"), "tp"),
    "three axes, one of size 1": ((2, 1, 2), ("dp", "tp", "cp"), P("cp", "dp"), P("tp"), None),
    "classes over two axes, minor first": ((2, 2), ("a", "b"), P(), P(("b", "a")), None),
}


UNEVEN = ["classes", "a weight split as the tokens are", "the same of its width", "classes over two axes, minor first"]


def made(dtype=F64, classes=CLASSES):
    target = torch.randint(classes, TOKENS)
    target[1, 2] = target[3, 3] = 2
    return torch.randn(*TOKENS, WIDTH, dtype=dtype), torch.randn(classes, WIDTH, dtype=dtype), target


def reference(x, weight, target, reduction="mean", class_weights=None, **options):
    scores = (x @ weight.mT).flatten(0, 1)
    out = F.cross_entropy(scores, target.flatten(), class_weights, reduction=reduction, **options)
    return out.view(TOKENS) if reduction == "none" else out


def gradients(f, x, weight, target, weights, **options):
    return vfn.value_and_grad(lambda x, w: (f(x, w, target, **options) * weights).sum(), (0, 1))(x, weight)


def close(found, want):
    for one, other in zip((found[0], *found[1]), (want[0], *want[1]), strict=True):
        torch.testing.assert_close(vfn.unshard(one), other, rtol=1e-12, atol=1e-14)


SIZES = [(options, CLASSES) for options in OPTIONS]
SIZES += [
    (options, classes) for options in (OPTIONS[3], OPTIONS[4]) for classes in (13, 3)
]  # uneven; ranks without classes


@pytest.mark.parametrize(("options", "classes"), SIZES, ids=[f"{' '.join(o) or 'plain'}-{n}" for o, n in SIZES])
def test_values_and_gradients_are_those_of_all_scores(options, classes):
    x, weight, target = made(classes=classes)
    if "class_weights" in options:
        options = options | {"class_weights": torch.arange(1, classes + 1, dtype=F64) / 4}
    if "ignore_index" not in options:
        target[0, 1] = -100
    weights = torch.randn(TOKENS, dtype=F64) if options.get("reduction") == "none" else torch.tensor(0.7, dtype=F64)
    want = gradients(reference, x, weight, target, weights, **options)
    for chunk in (None, 1, 5, 1000) if classes == CLASSES else (7,):
        close(gradients(linear_cross_entropy, x, weight, target, weights, chunk=chunk, **options), want)
    meshes = MESHES if classes == CLASSES else UNEVEN
    for shape, names, of_tokens, of_weight, axis in map(MESHES.__getitem__, meshes):
        with vfn.simulate(math.prod(shape)):
            mesh = vfn.make_mesh(shape, names)
            there = vfn.shard((x, weight, target), mesh, (of_tokens, of_weight, of_tokens))
            with vfn.strict():
                found = gradients(linear_cross_entropy, *there, weights, chunk=5, axis=axis, **options)
            close(found, want)
            assert [vfn.spec_of(g) for g in found[1]] == [of_tokens, of_weight]


UNEVEN_TOKENS = {
    "a rank without tokens": ((3, 2), ("dp", "tp"), P("dp"), P("tp"), {}),  # 2, 2, 0
    "two uneven dims": ((3, 4), ("dp", "cp"), P("dp", "cp"), P(), {"ignore_index": 0, "reduction": "sum"}),
    "uneven classes, too": ((3, 2, 2), ("dp", "a", "b"), P("dp", ("b", "a")), P("b"), {"class_weights": True}),
    "each token": ((5, 2), ("dp", "tp"), P("dp"), P("tp", "dp"), {"reduction": "none", "label_smoothing": 0.1}),
}


@pytest.mark.parametrize("case", UNEVEN_TOKENS)
def test_tokens_that_the_ranks_do_not_divide(case):
    shape, names, of_tokens, of_weight, options = UNEVEN_TOKENS[case]
    classes = 13 if "class_weights" in options else CLASSES
    x, weight, target = made(classes=classes)
    target[0, 1] = -100 if "ignore_index" not in options else 0
    if "class_weights" in options:
        options = options | {"class_weights": torch.arange(1, classes + 1, dtype=F64) / 4}
    weights = torch.randn(TOKENS, dtype=F64) if options.get("reduction") == "none" else torch.tensor(0.7, dtype=F64)
    want = gradients(reference, x, weight, target, weights, **options)
    with vfn.simulate(math.prod(shape)):
        there = vfn.shard((x, weight, target), vfn.make_mesh(shape, names), (of_tokens, of_weight, of_tokens))
        step = lambda x, w, t: gradients(linear_cross_entropy, x, w, t, weights, chunk=2, **options)
        with vfn.strict():
            found = step(*there)
        close(found, want)
        assert [vfn.spec_of(g) for g in found[1]] == [of_tokens, of_weight]
        close(vfn.jit(step)(*there), want)


def test_as_a_plan_under_transforms_and_in_a_body():
    x, weight, target = made(classes=11)
    f = lambda x, w, t=target: linear_cross_entropy(x, w, t, chunk=5, label_smoothing=0.1)
    whole = lambda x, w, t=target: reference(x, w, t, label_smoothing=0.1)
    want = vfn.value_and_grad(whole, (0, 1))(x, weight)
    twice = lambda f, x=x, w=weight: vfn.grad(lambda x, w: vfn.grad(f)(x, w).square().sum(), (0, 1))(x, w)
    along = lambda f, x=x, w=weight: vfn.jvp(f, (x, w), (x.cos(), w.sin()))
    more = twice(whole), along(whole)
    close((want[0], twice(f)), (want[0], more[0]))
    each = vfn.vmap(lambda x, t: f(x, weight, t))(x, target)
    torch.testing.assert_close(
        each,
        torch.stack([F.cross_entropy(a @ weight.mT, t, label_smoothing=0.1) for a, t in zip(x, target, strict=True)]),
    )
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        there = vfn.shard((x, weight, target), mesh, (P("dp"), P("tp"), P("dp")))  # 6 classes, and 5
        f = lambda x, w, t=there[2]: linear_cross_entropy(x, w, t, chunk=5, label_smoothing=0.1)
        close(vfn.jit(vfn.value_and_grad(f, (0, 1)))(*there), want)
        close(vfn.value_and_grad(vfn.remat(f), (0, 1))(*there), want)
        close((want[0], torch.func.grad(f, (0, 1))(*there)), want)
        close((want[0], twice(f, *there[:2])), (want[0], more[0]))
        close((want[0], along(f, *there[:2])), (want[0], more[1]))
        body = lambda x, w, t: vfn.pmean(linear_cross_entropy(x, w, t, label_smoothing=0.1, axis="tp"), "dp")
        local = vfn.shard_map(body, mesh=mesh, in_specs=(P("dp"), P("tp"), P("dp")), out_specs=P())
        given = x, weight[:10], target.clamp(max=9)
        close(vfn.value_and_grad(local, (0, 1))(*given), vfn.value_and_grad(whole, (0, 1))(*given))


def test_what_travels():
    x, weight, target = made()
    tokens = 24 // 2 * 8  # bytes of one number for each token of a rank
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        for chunk in (3, 100):
            there = vfn.shard((x, weight, target), mesh, (P("dp"), P("tp"), P("dp")))
            with vfn.comm_log() as log:
                loss, back = vfn.vjp(lambda x, w: linear_cross_entropy(x, w, there[2], chunk=chunk), *there[:2])
            assert [(c.op, c.axes, c.bytes) for c in log] == [
                ("all_reduce", ("tp",), tokens),
                ("all_reduce", ("tp",), 2 * tokens),
                ("all_reduce", ("dp",), 16),
            ]
            with vfn.comm_log() as log:
                back(torch.ones_like(loss))
            assert sorted((c.op, c.axes, c.bytes) for c in log) == [
                ("all_reduce", ("dp",), CLASSES // 2 * WIDTH * 8),
                ("all_reduce", ("tp",), WIDTH * tokens),
            ]
        there = vfn.shard((x, weight), mesh, (P("dp", "tp"), P("tp", "dp")))
        with vfn.comm_log() as log:
            vfn.grad(lambda x, w: linear_cross_entropy(x, w, target, axis="tp"), (0, 1))(*there)
        assert [log.count("all_gather"), log.count("reduce_scatter")] == [2, 2]


class Largest(TorchDispatchMode):
    """The most elements in memory that any op on plain tensors made."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, (vfn.Array, Blocks)) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if type(one) is torch.Tensor:  # not what has a shape alone
                self.size = max(self.size, one.untyped_storage().size() // one.element_size())
        return out


def test_the_scores_of_a_few_tokens_are_the_most_that_is_there():
    x, weight, target = torch.randn(16, 8, 2), torch.randn(64, 2), torch.randint(64, (16, 8))
    step = vfn.grad(lambda x, w, t, f: f(x, w, t), (0, 1))
    with Largest() as seen:
        step(x, weight, target, lambda x, w, t: F.cross_entropy((x @ w.mT).flatten(0, 1), t.flatten()))
    assert seen.size == 128 * 64
    with Largest() as seen:
        step(x, weight, target, linear_cross_entropy)
    assert seen.size == 128 * 2  # of x
    with vfn.simulate(4):
        there = vfn.shard((x, weight, target), vfn.make_mesh((2, 2), ("dp", "tp")), (P("dp"), P("tp"), P("dp")))
        with Largest() as seen:
            step(*there, lambda x, w, t: linear_cross_entropy(x, w, t, chunk=4))
    assert seen.size == 64 * 2  # of a rank's part of x, as large as the scores of four of its tokens
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda a: kept.append(a.numel()) or a, lambda a: a):
        linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), target)
    assert max(kept) == x.numel()


TORCHS = {
    "plain": {},
    "some ignored": {"ignore_index": 3},
    "smoothed": {"label_smoothing": 0.1, "ignore_index": 3},
    "weighted": {"weight": torch.arange(1.0, 13.0, dtype=F64)},
    "summed": {"reduction": "sum", "label_smoothing": 0.1},
    "each": {"reduction": "none"},
}


@pytest.mark.parametrize("options", TORCHS.values(), ids=TORCHS)
def test_torchs_own_over_split_classes_moves_numbers_a_token(options):
    """The unchanged function: no score moves, and no rank has more than its part of them."""
    x, weight, target = made()
    scores, target = (x @ weight.mT).flatten(0, 1), target.flatten()
    f = lambda scores: F.cross_entropy(scores, goal, **options).sum()
    goal = target
    want = vfn.value_and_grad(f)(scores)
    with vfn.simulate(4):
        there, goal = vfn.shard((scores, target), vfn.make_mesh((2, 2), ("dp", "tp")), (P("dp", "tp"), P("dp")))
        with vfn.comm_log() as log:
            loss, back = vfn.vjp(f, there)
        assert {c.op for c in log} == {"all_reduce"}
        tokens = 24 // 2 * 8
        assert sum(c.bytes == tokens for c in log) == 2  # the maxima, the sums of exponentials
        assert sum(c.bytes for c in log if c.bytes != tokens) <= 3 * 8
        with vfn.comm_log() as log, Largest() as seen:
            (grad,) = back(torch.ones_like(loss))
        sums = [("all_reduce", tokens)] * bool(
            {"weight", "label_smoothing"} & options.keys()
        )  # else known by the target
        assert [(c.op, c.bytes) for c in log if c.bytes > 8] == sums
        assert seen.size <= 24 * CLASSES // 4
        goal = torch.where(torch.arange(24) == 7, CLASSES, target)  # one that is no class
        assert f(there).isnan()
    torch.testing.assert_close((vfn.unshard(loss), vfn.unshard(grad)), want, rtol=1e-12, atol=1e-14)


def test_halves_and_targets_that_are_no_class():
    x, weight, target = made(torch.bfloat16)
    loss = linear_cross_entropy(x, weight, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy((x @ weight.mT).float().flatten(0, 1), target.flatten()))
    target[2, 2] = CLASSES
    found = linear_cross_entropy(x, weight, target, reduction="none")
    assert found.isnan().nonzero().tolist() == [[2, 2]]
    assert linear_cross_entropy(x[:0], weight, target[:0], reduction="sum") == 0
    assert linear_cross_entropy(x[:1], weight, target[:1] * 0 - 100).isnan()  # as torch's: the mean of nothing
    one = linear_cross_entropy(x[0, 0].double(), weight.double(), target[0, 0])
    torch.testing.assert_close(one, F.cross_entropy(weight.double() @ x[0, 0].double(), target[0, 0]))


def lines_of(call):
    with pytest.raises(CollectiveError) as error:
        call()
    return str(error.value).splitlines()


def test_messages():
    x, weight, target = made()
    assert lines_of(lambda: linear_cross_entropy(x, weight.mT, target[1:], reduction="avg", chunk=0)) == [
        "nn.linear_cross_entropy: the arguments do not fit",
        "  * x is the tensor f64[4,6,5] and weight the tensor f64[5,12]: one width, one dtype; weight.mT?",
        "  * x has [4, 6] tokens, but target is the tensor i64[3,6]",
        "  * reduction='avg' is not one of ('mean', 'sum', 'none')",
        "  * chunk must be a positive int, or None, but it is the int 0",
    ]
    assert lines_of(lambda: linear_cross_entropy(x, weight, target, class_weights=torch.ones(4))) == [
        "nn.linear_cross_entropy: the arguments do not fit",
        "  * class_weights must be a float tensor [12], one for each class, but it is the tensor f32[4]",
    ]


def test_the_gradient_of_a_reduced_weight_stays_to_be_added_up():
    x, weight, target = made()
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        there = vfn.shard((weight, x, target), mesh, (P("tp", reduced={"dp"}), P("dp"), P("dp")))
        with vfn.comm_log() as log:
            grad = vfn.grad(lambda w, x, t: linear_cross_entropy(x, w, t))(*there)
        assert [(one.op, one.axis) for one in log] == [("all_reduce", "tp"), ("all_reduce", "tp"), ("all_reduce", "dp")]
        assert vfn.spec_of(grad) == P("tp", unreduced={"dp"})
    want = vfn.grad(lambda w: reference(x, w, target))(weight)
    torch.testing.assert_close(vfn.unshard(grad), want, rtol=1e-12, atol=1e-14)


def on_ranks(x, weight, target, of_tokens, of_weight):
    there = vfn.shard((x, weight, target), vfn.make_mesh((2,), ("tp",)), (of_tokens, of_weight, of_tokens))
    step = vfn.value_and_grad(lambda x, w, t: linear_cross_entropy(x, w, t, chunk=7), (0, 1))
    return vfn.unshard((step(*there), vfn.jit(step)(*there)))


def test_on_real_ranks(gloo):
    x, weight, target = made(classes=11)
    for rows, *specs in ((4, P(), P("tp")), (3, P("tp"), P()), (1, P("tp"), P())):  # 3 rows: 2 and 1; 1 row: 1 and 0
        given = x[:rows], weight, target[:rows]
        whole = lambda x, w, t=given[2]: F.cross_entropy((x @ w.mT).flatten(0, 1), t.flatten())
        want = vfn.value_and_grad(whole, (0, 1))(*given[:2])
        for found in gloo(2, on_ranks, *given, *specs):
            for one in found:
                close(one, want)
