"""`vfn.typed_op`: the types that an op's author states, their gradients, and what debug mode finds."""

import re

import pytest
import torch
import torch.distributed as dist

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.distributed.blocks import Blocks
from vescale_fn.errors import DivergenceError, SpecError, VaryingTypeError

X, W = torch.arange(24.0).view(4, 6) / 7, torch.arange(18.0).view(6, 3).sin()


@pytest.fixture
def mesh():
    with vfn.simulate(4):
        yield vfn.make_mesh((2, 2), ("dp", "tp"))


class Product(torch.autograd.Function):
    """A rank's part of the sum."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x @ w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


class ProductSummed(Product):
    """Megatron's row-parallel product in one kernel, which adds up the parts of the ranks along "tp", where they are ranks of
    the mesh (2, 2), or all the processes there are."""

    @staticmethod
    def forward(x, w):
        part = x @ w
        if isinstance(part, Blocks):
            a, b, c, d = part.blocks
            return Blocks((a + b, a + b, c + d, c + d))
        dist.all_reduce(part)
        return part


summed = vfn.typed_op(out={"tp": "invarying"})(ProductSummed.apply)
part = vfn.typed_op(out={"tp": "unreduced"})(Product.apply)

LAYOUTS = {  # of the rows of x over dp, and of what is added up over tp
    "both": (P("dp", "tp"), P("tp"), P("dp")),
    "tp": (P(None, "tp"), P("tp"), P()),
}
PRODUCTS = {
    "invarying": summed,
    "unreduced": lambda x, w: vfn.psum(part(x, w), "tp"),
    "scattered": lambda x, w: vfn.all_gather(
        vfn.psum_scatter(part(x, w), "tp", tiled=True), "tp", to="invarying", tiled=True
    ),
}


def check(f, mesh, specs):
    def whole(x, w):
        return ((x @ w).tanh() * torch.arange(3)).sum()

    def mapped(x, w):
        y = vfn.shard_map(f, mesh=mesh, in_specs=specs[:2], out_specs=specs[2])(x, w)
        return (y.tanh() * torch.arange(3)).sum()

    return [vfn.value_and_grad(g, (0, 1))(X, W) for g in (mapped, whole)]


@pytest.mark.parametrize("transform", [lambda f: f, vfn.jit, vfn.remat], ids=["plain", "jit", "remat"])
@pytest.mark.parametrize("specs", LAYOUTS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_values_and_gradients_are_those_of_one_device(mesh, name, specs, transform):
    f = transform(PRODUCTS[name])
    got, wanted = check(f, mesh, LAYOUTS[specs])
    torch.testing.assert_close(vfn.unshard(got), wanted)


def test_under_vmap_and_in_a_step_under_jit(mesh):
    x, w = X.view(2, 2, 6), W

    def body(x, w):
        return vfn.psum(vfn.vmap(part, (0, None))(x, w), "tp")

    def loss(x, w):
        return (
            vfn.shard_map(body, mesh=mesh, in_specs=(P("dp", None, "tp"), P("tp")), out_specs=P("dp"))(x, w).cos().sum()
        )

    wanted = vfn.value_and_grad(lambda x, w: (x @ w).cos().sum(), (0, 1))(x, w)
    for transform in (lambda f: f, vfn.jit):
        found = transform(vfn.value_and_grad(loss, (0, 1)))(x, w)
        torch.testing.assert_close(vfn.unshard(found), wanted)


def test_a_gradient_in_the_body_is_that_of_all_ranks(mesh):
    def body(x, w):
        return vfn.grad(lambda w: vfn.psum(summed(x, w).cos().sum(), "dp"))(w)

    found = vfn.shard_map(body, mesh=mesh, in_specs=(P("dp", "tp"), P("tp")), out_specs=P("tp"))(X, W)
    torch.testing.assert_close(vfn.unshard(found), vfn.grad(lambda w: (X @ w).cos().sum())(W))


@torch.library.custom_op("vfn_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


twice.register_autograd(lambda ctx, g: 2 * g)
twice.register_fake(torch.empty_like)
OVER_DP = {
    "V": lambda x: x,
    "I": lambda x: vfn.psum(x, "dp"),
    "U": lambda x: vfn.pcast(x, "dp", to="unreduced"),
    "R": lambda x: vfn.all_gather(x, "dp", to="reduced"),
}


@pytest.mark.parametrize("operand", OVER_DP)
@pytest.mark.parametrize(
    ("word", "letter"), {"varying": "V", "invarying": "I", "unreduced": "U", "reduced": "R"}.items()
)
def test_the_type_is_the_one_stated_whatever_the_operands_are(mesh, operand, word, letter):
    def body(x):
        y = vfn.typed_op(out={"dp": word})(twice)(OVER_DP[operand](x))
        types.append(vfn.typeof(y))
        return y[None] if letter == "V" else vfn.psum(y, "dp") if letter == "U" else torch.zeros(1)

    types = []
    vfn.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp") if letter == "V" else P())(torch.arange(4.0))
    over = {"V": types[0].varying, "U": types[0].unreduced, "R": types[0].reduced}
    assert {name for name, axes in over.items() if axes} == ({letter} - {"I"})


def test_what_differs_by_rank_of_what_does_not_has_the_sum_for_a_gradient(mesh):
    """A kernel that reads its rank."""

    class ByRank(torch.autograd.Function):
        @staticmethod
        def forward(w):
            return Blocks(w_ * rank for rank, w_ in enumerate(w.blocks if isinstance(w, Blocks) else [w] * 4))

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return Blocks(g_ * rank for rank, g_ in enumerate(g.blocks))

    op = vfn.typed_op(out={"dp": "varying", "tp": "varying"})(ByRank.apply)
    f = vfn.shard_map(lambda w: vfn.psum(op(w), ("dp", "tp")), mesh=mesh, in_specs=P(), out_specs=P())
    value, gradient = vfn.value_and_grad(lambda w: f(w).sum())(torch.tensor(3.0))
    assert (value.item(), gradient.item()) == (18, 6)


def test_what_the_op_closes_over_has_the_sum_of_the_gradients(mesh):
    def f(w):
        op = vfn.typed_op(out={"tp": "unreduced"})(lambda x: x * w)
        return vfn.shard_map(lambda x: vfn.psum(vfn.psum(op(x), "tp"), "dp"), in_specs=P(("dp", "tp")), out_specs=P())

    with vfn.use_mesh(mesh):
        gradient = vfn.grad(lambda w: f(w)(torch.arange(4.0)).sum())(torch.tensor(2.0))
    assert gradient.item() == 6


def test_several_results_and_arguments_that_say_which_axis(mesh):
    @vfn.typed_op(out=lambda x, axis: ({axis: "invarying"}, {"b": None}))
    def op(x, axis):
        return x.sum() * 0, {"b": x * 2}

    def body(x):
        total, rest = op(x, "tp")
        types.append((repr(vfn.typeof(total)), repr(vfn.typeof(rest["b"]))))
        return rest["b"]

    types = []
    vfn.shard_map(body, mesh=mesh, in_specs=P(("dp", "tp")), out_specs=P(("dp", "tp")))(torch.arange(8.0))
    assert types == [("f32[]{V:dp}", "f32[2]{V:dp,tp}")]


def test_elsewhere_the_op_is_as_it_was(mesh):
    op = vfn.typed_op(out={"dp": "invarying"})(twice)
    x = vfn.shard(torch.arange(4.0), mesh, P("dp"))
    assert op(torch.ones(2)).tolist() == [2, 2]
    assert vfn.unshard(op(x)).tolist() == [0, 2, 4, 6]
    unchecked = vfn.shard_map(op, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check_vma=False)
    assert vfn.unshard(unchecked(x)).tolist() == [0, 2, 4, 6]
    assert vfn.unshard(vfn.grad(lambda x: unchecked(x).sum())(x)).tolist() == [2, 2, 2, 2]


def mapped(op, mesh, x=X):
    return vfn.shard_map(op, mesh=mesh, in_specs=P("dp", "tp"), out_specs=P("dp", "tp"))(x)


MESSAGES = {
    "a word": (
        {"dp": "invariant"},
        VaryingTypeError,
        "typed_op of tanh: out states no type of this body\n"
        "  * 'invariant' is no type; did you mean 'invarying'?\n"
        "  Instead: one of ('varying', 'invarying', 'unreduced', 'reduced') for each axis that the body has",
    ),
    "an axis": (
        {"pp": "varying"},
        VaryingTypeError,
        "typed_op of tanh: out states no type of this body\n"
        "  * 'pp' is no axis of the body, which has ('dp', 'tp')\n"
        "  Instead: one of ('varying', 'invarying', 'unreduced', 'reduced') for each axis that the body has",
    ),
    "no type": (
        P("dp"),
        VaryingTypeError,
        "typed_op of tanh: out holds P('dp'), which states no type\n"
        "  Instead: out={'tp': 'invarying'}, or None for as the operands",
    ),
    "a tree": (
        (None, None),
        SpecError,
        "typed_op of tanh: out is not a prefix of result\n"
        "  * out is a tuple, but result is a leaf (Tensor)\n"
        "  Instead: give out the structure of result, or one entry for a whole subtree",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(mesh, name):
    out, error, said = MESSAGES[name]
    with pytest.raises(error) as caught:
        mapped(vfn.typed_op(out=out)(torch.tanh), mesh)
    assert str(caught.value) == said


def test_a_use_that_the_stated_type_does_not_allow_is_refused(mesh):
    with pytest.raises(VaryingTypeError, match="is not linear, so the sum over 'tp' must come before it"):
        vfn.shard_map(lambda x, w: part(x, w).tanh(), mesh=mesh, in_specs=LAYOUTS["both"][:2], out_specs=P("dp"))(X, W)


def test_debug_mode_compares_simulated_ranks(mesh):
    op = vfn.typed_op(out={"tp": "invarying"})(twice)
    with vfn.debug():
        torch.testing.assert_close(vfn.unshard(mapped(vfn.typed_op(out=None)(twice), mesh)), 2 * X)
        check(summed, mesh, LAYOUTS["both"])
        with pytest.raises(DivergenceError) as caught:
            mapped(lambda x: op(x) * x, mesh, torch.arange(24.0).view(4, 6))
    assert str(caught.value) == (
        "vfn_tests::twice: ranks have different values of result 0 of vfn_tests::twice, f32[2,3]{the same along tp}\n"
        "  * rank 0 has [0, 2, 4, ...] (sum 48)\n"
        "  * rank 1 has [6, 8, 10, ...] (sum 84)\n"
        "  Instead: another type in vfn.typed_op(out=...): 'varying', or 'unreduced' for parts of a sum"
    )


def _on_ranks():
    mesh = vfn.make_mesh((2,), ("tp",))
    found = check(summed, mesh, LAYOUTS["tp"])
    op, said = vfn.typed_op(out={"tp": "invarying"})(twice), ""
    try:
        with vfn.debug():
            check(summed, mesh, LAYOUTS["tp"])
            vfn.shard_map(lambda x: x * op(x), mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(X)
    except DivergenceError as error:
        said = str(error)
    return vfn.unshard(found), said


def test_on_real_ranks(gloo):
    for (got, wanted), said in gloo(2, _on_ranks):
        torch.testing.assert_close(got, wanted)
        assert re.search(r"result 0 of vfn_tests::twice, f32\[2,6\]\{the same along tp\}", said), said
