"""`strict`: what raises, what is said, and that the line to paste is the remedy; draws from torch's generators."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import RandomError, ReshardError, VfnError


@pytest.fixture
def grid():
    with vfn.simulate(4):
        yield vfn.make_mesh((2, 2), ("dp", "tp"))


def said(call) -> str:
    """The text of the error, with file names and line numbers left out."""
    with pytest.raises(VfnError) as error, vfn.strict():
        call()
    return re.sub(r"\S*\.py:\d+", "FILE", str(error.value))


# --- moves ------------------------------------------------------------------------------------------------------------


def test_the_message(grid) -> None:
    """The op, its arguments by their names and by the user's, the bytes, the line, and what to paste."""

    def cumsum(x):
        return x.cumsum(0)

    x = vfn.shard(torch.ones(4, 6), grid, P("dp"))
    params = {"blocks": [{"w": x + 1}]}
    assert said(lambda: cumsum(x)) == (
        "cumsum: strict: this op needs a move of data that the program did not ask for\n"
        "  * x, its argument self, is f32[4@dp,6] and would have to be f32[4,6] (all-gather over axis 'dp': 96 bytes on each "
        "rank)\n"
        "  * at FILE: `return x.cumsum(0)`\n"
        "  Instead: x = vfn.with_sharding(x, P()) before it"
    )
    # a variable of another function, a place in a tree: not to be assigned to; an intermediate value has no name
    assert said(lambda: x.cumsum(0)).endswith("\n  Instead: vfn.with_sharding(x, P()) in place of x")
    text = said(lambda: params["blocks"][0]["w"].sort(0))
    assert text.endswith("vfn.with_sharding(params['blocks'][0]['w'], P()) in place of params['blocks'][0]['w']")
    text = said(lambda: (x * 2).cumsum(0))
    assert "  * its argument self is f32[4@dp,6] and would have to be f32[4,6] (" in text
    assert text.endswith("\n  Instead: vfn.with_sharding(self, P()) in place of self")
    z = vfn.shard(torch.ones(5, 6), grid, P("tp", "dp"))
    text = said(lambda: torch.cat([x, z]))  # all that is wrong at once
    assert "  * x, its argument tensors[0], is f32[4@dp,6]" in text
    assert "  * z, its argument tensors[1], is f32[5@tp,6@dp]" in text
    assert re.search(
        r"Instead: vfn.with_sharding\(x, .*\) in place of x; vfn.with_sharding\(z, .*\) in place of z$", text
    )


PASTED = {
    "z = x.cumsum(0)": 1,
    "z = x + y": 1,
    "z = x @ y": 1,
    "z = torch.cat([x, y])": 1,
    "z = x[1:3] * 1": 1,
    "z = y.index_select(0, i)": 1,
    "z = x.sort(0)[0]": 1,
    "z = torch.where(x > 0, y, x)": 1,
}


@pytest.mark.parametrize("line", PASTED)
def test_the_line_to_paste_is_the_remedy(grid, line: str) -> None:
    """Pasted before the op, as often as something is said, the op runs under `strict`, and its result is right."""
    wholes = {"x": torch.arange(24.0).view(4, 6), "y": torch.arange(36.0).view(6, 6)}
    if "@" not in line and "index" not in line:
        wholes["y"] = torch.arange(24.0).view(4, 6) + 7
    names = {"F": F, "torch": torch, "vfn": vfn, "P": P, "i": torch.tensor([1, 0, 3, 2])}
    values = {"x": vfn.shard(wholes["x"], grid, P("dp")), "y": vfn.shard(wholes["y"], grid, P("tp", "dp"))}
    program, pasted = [line], 0
    for _ in range(4):
        code = compile(
            "def run(x, y):\n" + "".join(f"    {row}\n" for row in program) + "    return z\n", "<user>", "exec"
        )
        scope = dict(names)
        exec(code, scope)
        try:
            with vfn.strict():
                out = scope["run"](**values)
            break
        except ReshardError as error:
            for fix in str(error).split("  Instead: ")[1].split("; "):
                assert fix.endswith(" before it"), fix
                program.insert(len(program) - 1, fix.removesuffix(" before it"))
                pasted += 1
    assert pasted == PASTED[line]
    scope = dict(names)
    exec(f"def run(x, y):\n    {line}\n    return z\n", scope)
    torch.testing.assert_close(vfn.unshard(out), scope["run"](**wholes))


def test_what_is_asked_for(grid) -> None:
    """Moves by name and their gradients; sums, wherever they are needed; what moves nothing."""
    x, w = vfn.shard(torch.ones(4, 6), grid, P("dp")), vfn.shard(torch.ones(6, 6), grid, P("tp"))

    def loss(w):
        y = vfn.with_sharding(x, P("dp", "tp")) @ w
        y = (y + 1).relu()  # a sum that is needed whole
        return (vfn.with_sharding(y, P()).softmax(0) * vfn.unshard(y)).mean()

    with vfn.strict(), vfn.comm_log() as log:
        vfn.value_and_grad(loss)(w)
        vfn.shard_map(lambda x: vfn.psum(x, "dp"), mesh=grid, in_specs=P("dp"), out_specs=P())(x)
    assert log.count("all_reduce")
    assert log.count("all_gather")


def test_a_move_of_the_backward_pass(grid) -> None:
    x = vfn.shard(torch.ones(4, 4), grid, P("dp"))
    y = vfn.with_sharding(x, P(None, "dp"))

    def loss(w):
        return torch.autograd.grad((w * w).sum(), w, create_graph=True)[0].sum()

    class Crossed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w * 2

        @staticmethod
        def backward(ctx, g):
            return (torch.ones_like(y) + y).cumsum(1)

    text = said(lambda: vfn.grad(lambda w: Crossed.apply(w).sum())(x))
    assert text.startswith("cumsum: strict: ")
    with vfn.strict():
        vfn.grad(loss)(x)


# --- draws ------------------------------------------------------------------------------------------------------------


def lay(mesh, *shape: int):
    return vfn.shard(torch.rand(*shape, generator=torch.Generator().manual_seed(0)) + 0.1, mesh, P("dp"))


DRAWS = {  # what draws, of an array of shape [4, 6] and one of [4, 2, 6, 8]: the keyed call that is named
    "F.dropout": (lambda x, q: F.dropout(x, 0.5), "vfn.random.dropout(key, x, rate)"),
    "F.dropout, in place": (lambda x, q: F.dropout(x.clone(), 0.5, inplace=True), "vfn.random.dropout(key, x, rate)"),
    "nn.Dropout": (lambda x, q: torch.nn.Dropout(0.5)(x), "vfn.random.dropout(key, x, rate)"),
    "nn.Dropout2d": (lambda x, q: torch.nn.Dropout2d(0.5)(q), "vfn.random.dropout(key, x, rate)"),
    "F.alpha_dropout": (lambda x, q: F.alpha_dropout(x, 0.5, training=True), "vfn.random.dropout(key, x, rate)"),
    "F.feature_alpha_dropout": (lambda x, q: F.feature_alpha_dropout(q, 0.5, training=True), "vfn.random.dropout"),
    "attention": (
        lambda x, q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5),
        "vfn.random.dropout(key, x, rate)",
    ),
    "nn.MultiheadAttention": (lambda x, q: torch.nn.MultiheadAttention(6, 2, 0.5)(x, x, x), "vfn.random.dropout"),
    "nn.LSTM": (lambda x, q: torch.nn.LSTM(6, 5, 2, dropout=0.5)(x), "vfn.random.dropout(key, x, rate)"),
    "nn.GRU": (lambda x, q: torch.nn.GRU(6, 5, 2, dropout=0.5)(x), "vfn.random.dropout(key, x, rate)"),
    "F.rrelu": (lambda x, q: F.rrelu(x, training=True), "minval=lower, maxval=upper, spec=vfn.spec_of(x))"),
    "F.gumbel_softmax": (
        lambda x, q: F.gumbel_softmax(x),
        "vfn.random.exponential(key, x.shape, spec=vfn.spec_of(x)) / rate",
    ),
    "rand_like": (lambda x, q: torch.rand_like(x), "vfn.random.uniform(key, x.shape, spec=vfn.spec_of(x))"),
    "randint_like": (
        lambda x, q: torch.randint_like(x, 2, 5),
        "vfn.random.randint(key, x.shape, 2, 5, spec=vfn.spec_of(x))",
    ),
    "random_": (
        lambda x, q: x.clone().random_(0, 5),
        "vfn.random.randint(key, x.shape, low, high, spec=vfn.spec_of(x))",
    ),
    "bernoulli": (lambda x, q: torch.bernoulli(x.clamp(0, 1)), "vfn.random.bernoulli(key, p, x.shape); for dropout"),
    "multinomial": (lambda x, q: torch.multinomial(x, 2), "vfn.random.categorical(key, logits)"),
    "normal": (lambda x, q: torch.normal(x, x), "mean + std * vfn.random.normal(key, x.shape, spec=vfn.spec_of(x))"),
    "exponential_": (
        lambda x, q: x.clone().exponential_(),
        "vfn.random.exponential(key, x.shape, spec=vfn.spec_of(x)) / rate",
    ),
    "cauchy_": (lambda x, q: x.clone().cauchy_(), "vfn.random.cauchy(key, x.shape, spec=vfn.spec_of(x))"),
    "geometric_": (
        lambda x, q: x.clone().geometric_(0.5),
        "vfn.random.geometric(key, p, x.shape, spec=vfn.spec_of(x))",
    ),
    "log_normal_": (
        lambda x, q: x.clone().log_normal_(),
        "vfn.random.lognormal(key, std, x.shape, spec=vfn.spec_of(x))",
    ),
    "poisson": (lambda x, q: torch.poisson(x), "vfn.random.poisson(key, rate)"),
    "binomial": (lambda x, q: torch.binomial(x.round(), x.clamp(0, 1)), "vfn.random.binomial(key, count, prob)"),
    "Gamma": (lambda x, q: torch.distributions.Gamma(x, x).rsample(), "vfn.random.gamma(key, concentration)"),
    "Beta": (lambda x, q: torch.distributions.Beta(x, x).rsample(), "vfn.random.dirichlet(key, concentration)"),
    "a generator": (
        lambda x, q: x.clone().normal_(generator=torch.Generator()),
        "vfn.random.normal(key, x.shape, spec=",
    ),
    **{
        f"init.{name}": (lambda x, q, name=name: getattr(torch.nn.init, name)(x.clone()), "vfn.random.")
        for name in (
            "uniform_",
            "normal_",
            "trunc_normal_",
            "xavier_uniform_",
            "xavier_normal_",
            "kaiming_uniform_",
            "kaiming_normal_",
            "orthogonal_",
        )
    },
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_on_an_array_names_the_keyed_call(grid, name: str) -> None:
    draw, keyed = DRAWS[name]
    with pytest.raises(RandomError) as error:
        draw(lay(grid, 4, 6), lay(grid, 4, 2, 6, 8))
    first, second = str(error.value).splitlines()
    assert first.endswith(": a stateful draw on an array: every rank would draw from a generator of its own")
    assert second.startswith("  Instead: a keyed draw, the same on every mesh: ")
    assert keyed in second


QUIET = {  # what could draw, and does not
    "dropout of nothing": lambda x, q: F.dropout(x, 0.0),
    "dropout in inference": lambda x, q: torch.nn.Dropout(0.5).eval()(x),
    "attention": lambda x, q: F.scaled_dot_product_attention(q, q, q),
    "a mask": lambda x, q: vfn.random.dropout(vfn.random.key(0), x, 0.5),
    "a keyed draw": lambda x, q: vfn.random.normal(vfn.random.key(0), (4, 6)),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_does_not_draw(grid, name: str) -> None:
    x, q = lay(grid, 4, 6), lay(grid, 4, 2, 6, 8)
    with vfn.strict():
        got = QUIET[name](x, q)
        want = QUIET[name](vfn.unshard(x), vfn.unshard(q))
    torch.testing.assert_close(vfn.unshard(got), want)


PLAIN = {  # on plain tensors, under strict
    "rand": (lambda: torch.rand(3, 2), "vfn.random.uniform(key, (3, 2))"),
    "randn": (lambda: torch.randn(3), "vfn.random.normal(key, (3,))"),
    "randint": (lambda: torch.randint(2, 9, (3,)), "vfn.random.randint(key, (3,), 2, 9)"),
    "randperm": (lambda: torch.randperm(5), "vfn.random.permutation(key, 5)"),
    "normal": (lambda: torch.normal(0.0, 1.0, (2,)), "mean + std * vfn.random.normal(key, (2,))"),
    "dropout": (lambda: F.dropout(torch.ones(3), 0.5), "vfn.random.dropout(key, x, rate)"),
    "a layer": (lambda: torch.nn.Linear(3, 3), "vfn.random.uniform(key, x.shape, minval=..., maxval=...)"),
    "in a gradient": (
        lambda: vfn.grad(lambda w: (w * torch.rand(3)).sum())(torch.ones(3)),
        "vfn.random.uniform(key, (3,))",
    ),
    "under vmap": (
        lambda: torch.func.vmap(lambda w: w * torch.rand(3), randomness="same")(torch.ones(2, 3)),
        "(key, (3,))",
    ),
    "in a body": (
        lambda: vfn.shard_map(
            lambda x: x + torch.rand(()), mesh=vfn.make_mesh((4,), ("i",)), in_specs=P("i"), out_specs=P("i")
        )(torch.ones(4)),
        "vfn.random.uniform(key, ())",
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_draw_on_plain_tensors(grid, name: str) -> None:
    draw, keyed = PLAIN[name]
    with pytest.raises(RandomError) as error, vfn.strict():
        draw()
    first, second = str(error.value).splitlines()
    assert first.endswith(": a draw from torch's global generator, whose numbers depend on all that was drawn before")
    assert second.startswith("  Instead: a keyed draw, the same on every mesh: ")
    assert second.endswith(keyed)


def test_draws_that_are_the_programs_own(grid) -> None:
    """A generator that is passed, and what is outside of the block."""
    with vfn.strict():
        torch.rand(3, generator=torch.Generator().manual_seed(1))
    torch.rand(3)
    key = vfn.random.key(0)
    with vfn.debug(), vfn.strict():  # a key that is used twice is still found
        vfn.random.normal(key, (2,))
        with pytest.raises(RandomError, match="was used before"):
            vfn.random.uniform(key, (2,))
