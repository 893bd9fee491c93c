"""permutation, choice, categorical, orthogonal: JAX's numbers, on every mesh, with the least communication."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P, random
from vescale_fn.errors import RandomError, SpecError

GOLDENS = {
    case["name"]: case
    for case in json.loads((Path(__file__).parent / "goldens" / "random.json").read_text())["cases"]
    if case["fn"] in ("permutation", "choice", "categorical", "orthogonal")
}
KEY = random.key(42)
ROWS = torch.arange(60, dtype=torch.int32).reshape(5, 12)
LOGITS = (torch.arange(40) % 7 * 0.5).reshape(8, 5)
WEIGHTS = torch.arange(1, 11, dtype=torch.float32) / 55


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str) -> None:
    case = GOLDENS[name]
    tensors = {
        "arange(60).reshape(5,12)": ROWS,
        "arange(1,11)/55 float32": WEIGHTS,
        "(arange(40).reshape(8,5)%7)*0.5": LOGITS,
    }
    args = {k: tensors[v] if isinstance(v, str) else v for k, v in case["args"].items()}
    out, expected = getattr(random, case["fn"])(random.wrap_key_data(case["key_data"]), **args), case["out"]
    assert list(out.shape) == expected["shape"]
    assert str(out.dtype) == f"torch.{expected['dtype']}"
    if case["fn"] == "orthogonal":
        torch.testing.assert_close(
            out.flatten()[: len(expected["first"])].tolist(), expected["first"], rtol=0, atol=5e-6
        )
    else:
        assert hashlib.sha256(out.contiguous().numpy().tobytes()).hexdigest() == expected["sha256"]


DRAWS = {
    "permutation of 0": lambda r, a: r.permutation(a.key, 0),
    "permutation of 1": lambda r, a: r.permutation(a.key, 1),
    "permutation of slices": lambda r, a: r.permutation(a.key, a.rows, -1),
    "permutation of rows": lambda r, a: r.permutation(a.key, a.rows, 0, True),
    "choice": lambda r, a: r.choice(a.key, 100),
    "choice of slices": lambda r, a: r.choice(a.key, a.rows, (2, 3), True, axis=1),
    "choice of slices, once": lambda r, a: r.choice(a.key, a.rows, (2, 2), False, axis=0),
    "choice of slices with p": lambda r, a: r.choice(a.key, a.rows, (4,), True, a.five, 0),
    "choice with p, once, high": lambda r, a: r.choice(a.key, 10, (5,), False, a.weights, mode="high"),
    "no choice": lambda r, a: r.choice(a.key, 10, (0,)),
    "categorical": lambda r, a: r.categorical(a.key, a.logits, 0),
    "categorical, high": lambda r, a: r.categorical(a.key, a.logits, mode="high"),
    "categorical, many": lambda r, a: r.categorical(a.key, a.logits, 0, (2, 3, 5)),
    "categorical, once": lambda r, a: r.categorical(a.key, a.logits, 0, (2, 5), False),
    "categorical of one row": lambda r, a: r.categorical(a.key, a.logits[0], shape=(9,)),
    "orthogonal, wide": lambda r, a: r.orthogonal(a.key, 3, (2,), m=5),
    "orthogonal, tall": lambda r, a: r.orthogonal(a.key, 5, m=3),
}


class Arguments:
    def __init__(self, key, own) -> None:
        self.key, self.rows, self.logits, self.weights = key, own(ROWS), own(LOGITS), own(WEIGHTS)
        self.five = own(WEIGHTS[:5])


@pytest.mark.parametrize("name", DRAWS)
def test_like_jax(name: str) -> None:
    jax = pytest.importorskip("jax", reason="jax is an extra, the goldens stand in for it")
    for seed in (0, 7):
        ours = DRAWS[name](random, Arguments(random.key(seed), lambda x: x)).numpy()
        theirs = np.asarray(
            DRAWS[name](jax.random, Arguments(jax.random.key(seed), lambda x: jax.numpy.asarray(x.numpy())))
        )
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-6 if name.startswith("orthogonal") else 0)


@pytest.mark.parametrize(
    "draw",
    [
        lambda key: random.permutation(key, 10),
        lambda key: random.permutation(key, ROWS, 1, True),
        lambda key: random.choice(key, 10, (4,), False),
        lambda key: random.choice(key, 10, (4,), True, WEIGHTS),
        lambda key: random.categorical(key, LOGITS),
        lambda key: random.orthogonal(key, 3),
    ],
    ids=["permutation", "rows", "choice", "choice, p", "categorical", "orthogonal"],
)
def test_vmap_over_keys(draw) -> None:
    keys = random.split(KEY, 3)
    assert torch.equal(vfn.vmap(draw)(keys), torch.stack([draw(key) for key in keys]))


def test_permutations_permute() -> None:
    for n in (2, 3, 100, 70_000):
        assert torch.equal(random.permutation(KEY, n).sort().values, torch.arange(n, dtype=torch.int32))
    assert torch.equal(random.permutation(KEY, ROWS, 1, True).sort(1).values, ROWS)
    first = torch.tensor([random.permutation(key, 4)[0].item() for key in random.split(KEY, 4000)]).bincount()
    assert ((first - 1000) ** 2 / 1000).sum() < 16.3  # chi-square of 3 degrees of freedom, p = 0.001


def test_gradients_go_through_what_is_permuted() -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    weights = torch.arange(20.0).reshape(5, 4)
    f = lambda x: (random.permutation(KEY, x) * weights).sum()
    want = torch.empty(5, 4)
    want[random.permutation(KEY, 5).long()] = weights
    assert torch.equal(vfn.grad(f)(x), want)
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("a",))
        assert torch.equal(vfn.unshard(vfn.grad(f)(vfn.shard(x, mesh, P("a")))), want)


LAID = {  # what to do with a mesh, the same on one device, the layout of the result, the collectives
    "permutation": (
        lambda m, s: random.permutation(KEY, 10, spec=P(s), mesh=m),
        lambda: random.permutation(KEY, 10),
        "s",
        [],
    ),
    "slices": (
        lambda m, s: random.permutation(KEY, vfn.shard(ROWS, m, P(s))),
        lambda: random.permutation(KEY, ROWS),
        "s",
        ["all_to_all"] * 2,
    ),
    "whole slices": (
        lambda m, s: random.permutation(KEY, vfn.shard(ROWS, m, P(s)), 1),
        lambda: random.permutation(KEY, ROWS, 1),
        "s",
        [],
    ),
    "rows": (
        lambda m, s: random.permutation(KEY, vfn.shard(ROWS, m, P(s)), 1, True),
        lambda: random.permutation(KEY, ROWS, 1, True),
        "s",
        [],
    ),
    "split rows": (
        lambda m, s: random.permutation(KEY, vfn.shard(ROWS, m, P(None, s)), 1, True),
        lambda: random.permutation(KEY, ROWS, 1, True),
        "-s",
        ["all_to_all"] * 2,
    ),
    "choice": (
        lambda m, s: random.choice(KEY, 100, (7,), spec=P(s), mesh=m),
        lambda: random.choice(KEY, 100, (7,)),
        "s",
        [],
    ),
    "choice with p": (
        lambda m, s: random.choice(KEY, 10, (7,), True, WEIGHTS, spec=P(s), mesh=m),
        lambda: random.choice(KEY, 10, (7,), True, WEIGHTS),
        "s",
        [],
    ),
    "choice of slices": (
        lambda m, s: random.choice(KEY, vfn.shard(ROWS, m, P(None, s)), (4,), False),
        lambda: random.choice(KEY, ROWS, (4,), False),
        "-s",
        [],
    ),
    "categorical": (
        lambda m, s: random.categorical(KEY, vfn.shard(LOGITS, m, P(s))),
        lambda: random.categorical(KEY, LOGITS),
        "s",
        [],
    ),
    "classes": (
        lambda m, s: random.categorical(KEY, vfn.shard(LOGITS.T.contiguous(), m, P(None, s))),
        lambda: random.categorical(KEY, LOGITS.T.contiguous()),
        "",
        ["all_reduce"] * 2,
    ),
    "uneven classes": (
        lambda m, s: random.categorical(KEY, vfn.shard(LOGITS, m, P(None, s))),
        lambda: random.categorical(KEY, LOGITS),
        "",
        None,
    ),
    "repeated": (
        lambda m, s: random.categorical(KEY, vfn.shard(LOGITS, m, P(s)), shape=(6, 8), spec=P(None, s)),
        lambda: random.categorical(KEY, LOGITS, shape=(6, 8)),
        "-s",
        [],
    ),
    "plain logits": (
        lambda m, s: random.categorical(KEY, LOGITS, shape=(6, 8), spec=P(None, s), mesh=m),
        lambda: random.categorical(KEY, LOGITS, shape=(6, 8)),
        "-s",
        [],
    ),
    "orthogonal": (
        lambda m, s: random.orthogonal(KEY, 3, (8,), m=5, spec=P(s), mesh=m),
        lambda: random.orthogonal(KEY, 3, (8,), m=5),
        "s",
        [],
    ),
    "split matrices": (
        lambda m, s: random.orthogonal(KEY, 4, spec=P(s), mesh=m),
        lambda: random.orthogonal(KEY, 4),
        "s",
        [],
    ),
}


@pytest.mark.parametrize("axes", [("a",), ("a", "b"), ("b", "a")], ids="-".join)
@pytest.mark.parametrize("name", LAID)
def test_on_meshes(name: str, axes: tuple[str, ...]) -> None:
    on_mesh, alone, layout, collectives = LAID[name]
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("a",)) if len(axes) == 1 else vfn.make_mesh((2, 2), ("a", "b"))
        with vfn.comm_log() as log:
            out = on_mesh(mesh, axes)
        assert torch.equal(vfn.unshard(out), alone())
        assert vfn.spec_of(out) == {"s": P(axes), "-s": P(None, axes), "": P()}[layout]
        if collectives is not None and axes != ("b", "a"):  # uneven dims in that order are moved by a gather
            assert [record.op for record in log] == collectives


def test_in_bodies() -> None:
    def body(logits):
        return (
            random.permutation(KEY, 8, spec=P("a")),
            random.orthogonal(KEY, 4, (8,), spec=P(("b", "a"))),
            random.orthogonal(KEY, 4, spec=P(None, ("a", "b"))),
            random.categorical(KEY, logits, spec=P("a")),
            random.choice(KEY, 100, (8,), False, spec=P("b")),
            random.permutation(KEY, 8),
        )

    specs = P("a"), P(("b", "a")), P(None, ("a", "b")), P("a"), P("b"), P()
    alone = (
        random.permutation(KEY, 8),
        random.orthogonal(KEY, 4, (8,)),
        random.orthogonal(KEY, 4),
        random.categorical(KEY, LOGITS),
        random.choice(KEY, 100, (8,), False),
        random.permutation(KEY, 8),
    )
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("a", "b"))
        outs = vfn.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=specs)(LOGITS)
        for out, want in zip(outs, alone, strict=True):
            assert torch.equal(vfn.unshard(out), want)


def _on_ranks() -> list:
    mesh = vfn.make_mesh((4,), ("a",))
    return [vfn.unshard(LAID[name][0](mesh, ("a",))) for name in LAID]


@pytest.mark.gloo
def test_on_real_ranks(gloo) -> None:
    alone = [entry[1]() for entry in LAID.values()]
    for outs in gloo(4, _on_ranks):
        assert all(map(torch.equal, outs, alone))


REFUSED = {
    "a float": (
        lambda: random.permutation(KEY, 2.5),
        "random.permutation: x must be an integer or a tensor with dims, but it is the float 2.5",
    ),
    "no such dim": (
        lambda: random.permutation(KEY, ROWS, 2),
        "random.permutation: axis=2 is not a dim of a tensor with 2 dims",
    ),
    "too many": (
        lambda: random.choice(KEY, 3, (4,), False),
        "random.choice: 4 things cannot be drawn out of 3 without replacement\n  Instead: replace=True",
    ),
    "nothing to draw from": (
        lambda: random.choice(KEY, 0, (1,)),
        "random.choice: 1 things cannot be drawn out of none",
    ),
    "p of another size": (
        lambda: random.choice(KEY, 3, (4,), p=WEIGHTS),
        "random.choice: p must be of shape (3,), one number for each thing, but it is the tensor f32[10]",
    ),
    "integer logits": (
        lambda: random.categorical(KEY, ROWS),
        "random.categorical: logits must be a float tensor with a dim of classes, but it is the tensor i32[5,12]",
    ),
    "a shape that does not fit": (
        lambda: random.categorical(KEY, LOGITS, shape=(3,)),
        "random.categorical: the batch (8,) of the logits does not broadcast to shape=(3,)",
    ),
    "more than classes": (
        lambda: random.categorical(KEY, LOGITS, shape=(6, 8), replace=False),
        "random.categorical: 6 draws without replacement need as many classes, but there are 5\n  Instead: replace=True",
    ),
    "a mode": (
        lambda: random.categorical(KEY, LOGITS, mode="fast"),
        "random.categorical: mode must be None or 'low' or 'high', but it is 'fast'",
    ),
    "integer matrices": (
        lambda: random.orthogonal(KEY, 3, dtype=torch.int32),
        "random.orthogonal: dtype must be one of float32, float64, complex64, complex128, but it is torch.int32",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(RandomError) as raised:
        call()
    assert str(raised.value) == message


def test_a_spec_that_does_not_fit() -> None:
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("a",))
        for draw in (
            lambda: random.permutation(KEY, 4, spec=P("x"), mesh=mesh),
            lambda: random.orthogonal(KEY, 4, spec=P("x"), mesh=mesh),
            lambda: random.categorical(KEY, LOGITS, spec=P("a", "a"), mesh=mesh),
        ):
            with pytest.raises(SpecError):
                draw()
