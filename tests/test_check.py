"""`vfn.check_parity` finds the classical mistakes of distributed programs, names them, and lets their right twins pass."""

import contextlib
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.base import context
from vescale_fn._core.distributed.mesh import unit
from vescale_fn.errors import ParityError
from vescale_fn.random import dropout, key, normal

MESH = (2, 4), ("dp", "tp")
X = torch.arange(96.0).reshape(8, 12) / 8 - 5
W = torch.arange(36.0).reshape(12, 3) % 7 - 3
B = torch.tensor([1.0, 2.0, 3.0])


def on_ranks(f: Callable[..., Any], *in_specs: P, out: Any = P(), check_vma: bool = True) -> Callable[..., Any]:
    return vfn.shard_map(f, in_specs=in_specs, out_specs=out, check_vma=check_vma)


def message(f: Callable[..., Any], *args: Any, mesh: Any = None, **options: Any) -> str:
    """What `check` says of a wrong function, with the lines of this file as <the line itself>."""
    with pytest.raises(ParityError) as caught:
        vfn.check_parity(f, *args, mesh=mesh, **options)
    return re.sub(
        re.escape(__file__) + r":\d+(: `(.*)`)?", lambda m: f"<{m[2]}>" if m[1] else "here", str(caught.value)
    )


# --- a program for a mesh on one device -------------------------------------------------------------------------------


def test_on_one_device_every_mesh_has_one_rank() -> None:
    x, key = torch.randn(8, 6), vfn.random.key(0)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))

        @vfn.shard_map(mesh=mesh, in_specs=(P("dp", "tp"),), out_specs=P("dp"))
        def rows(x):
            assert vfn.axis_size(("dp", "tp")) == 1
            noise = vfn.random.normal(key, (8, 6), spec=P("dp", "tp"), mesh=mesh)
            gathered = vfn.all_gather(x + noise, "tp", axis=1, tiled=True, to="invarying")
            return gathered.sum(1) + vfn.axis_index("dp") + vfn.psum(x.sum(1), "tp")

        with vfn.use_mesh(mesh), context.one_device(unit):
            seen = vfn.current_mesh()
            assert seen.size() == 1
            assert seen.mesh_dim_names == ("dp", "tp")
            assert vfn.make_mesh((2, 2), ("dp", "tp")) is seen
            values = [
                rows(x),
                vfn.shard(x, mesh, P("dp")),
                vfn.with_sharding(x, P("tp")),
                vfn.random.normal(key, (8, 6), spec=P("dp", "tp")),
                vfn.from_local(lambda coord: torch.full((2,), coord["dp"]), mesh, P("dp")),
            ]
        assert vfn.current_mesh() is None
    noise = vfn.random.normal(key, (8, 6))
    wanted = [(x + noise).sum(1) + x.sum(1), x, x, noise, torch.tensor([0, 0, 1, 1])]
    for value, want in zip(values, wanted, strict=True):
        assert type(value) is torch.Tensor
        assert torch.equal(value, want)


def test_what_is_computed_again_in_a_backward_pass_stays_on_one_device() -> None:
    x = torch.randn(8)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("dp",))
        total = vfn.shard_map(lambda x: vfn.psum((x**2).sum(), "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P())
        with vfn.use_mesh(mesh), context.one_device(unit):
            found = vfn.grad(vfn.remat(total))(x)
    assert type(found) is torch.Tensor
    assert torch.equal(found, 2 * x)


# --- the classical mistakes, each beside its right twin ---------------------------------------------------------------

TENSOR_PARALLEL = P("dp", "tp"), P("tp"), P()


def matmul_without_psum(x, w, b):
    return x @ w


def matmul_with_psum(x, w, b):
    return vfn.psum(x @ w, "tp")


def summed_twice(x, w, b):
    y = vfn.psum(x @ w, "tp")
    return vfn.psum(y, "tp") + b


def bias_before_the_sum(x, w, b):
    y = x @ w + b
    return vfn.psum(y, "tp")


def bias_after_the_sum(x, w, b):
    return vfn.psum(x @ w, "tp") + b


def linear_with_bias(x, w, b):
    return vfn.psum(torch.nn.functional.linear(x, w.T, b), "tp")


def one_added_before_the_sum(x, w, b):
    return vfn.psum(x @ w + 1, "tp")


def relu_before_the_sum(x, w, b):
    return vfn.psum(torch.relu(x @ w), "tp")


def relu_after_the_sum(x, w, b):
    return torch.relu(vfn.psum(x @ w, "tp"))


def mean_then_psum(w, x):
    loss = (x @ w).square().mean()
    return vfn.psum(loss, "dp")


def mean_then_pmean(w, x):
    return vfn.pmean((x @ w).square().mean(), "dp")


def sum_then_pmean(w, x):
    return vfn.pmean((x @ w).square().sum(), "dp")


def sum_then_psum(w, x):
    return vfn.psum((x @ w).square().sum(), "dp")


def pmean_of_a_summed_gradient(w, x):
    gradient = vfn.grad(lambda w: (x @ w).square().mean())(w)
    return vfn.pmean(gradient, "dp")


def psum_of_a_summed_gradient(w, x):
    gradient = vfn.grad(mean_then_pmean)(w, x)
    return vfn.psum(gradient, "dp")


def gradient_of_the_mean(w, x):
    return vfn.grad(mean_then_pmean)(w, x)


def same_mask_on_each_rank(k, x):
    return dropout(k, x, 0.5)


def own_part_of_the_mask(k, x):
    return dropout(k, x, 0.5, spec=P("dp"))


def same_noise_on_each_rank(k, x):
    return x + normal(k, x.shape)


def own_part_of_the_noise(k, x):
    return x + normal(k, (8, 12), spec=P("dp"))


def clipped_by_the_local_norm(g):
    norm = g.norm()
    return g / norm


def clipped_by_the_norm(g):
    return g / vfn.psum(g.square().sum(), "tp").sqrt()


def local_rms(x):
    scale = x.square().mean(-1, keepdim=True)
    return x * torch.rsqrt(scale)


def global_rms(x):
    return x * torch.rsqrt(vfn.pmean(x.square().mean(-1, keepdim=True), "tp"))


def local_softmax(x):
    return torch.softmax(x, -1)


def global_softmax(x):
    top = vfn.pmax(x.detach().amax(-1, keepdim=True), "tp")
    weights = (x - top).exp()
    return weights / vfn.psum(weights.sum(-1, keepdim=True), "tp")


def product(x, w):
    return vfn.psum(x @ w, ("dp", "tp"))


def gathered_in_another_order(x):
    return vfn.all_gather(x, ("tp", "dp"), tiled=True, to="invarying")


def gathered(x):
    return vfn.all_gather(x, ("dp", "tp"), tiled=True, to="invarying")


def own_loss(w, x):
    return (x @ w).square().mean()[None]


K = key(0)
SQUARE = torch.arange(48.0).reshape(3, 16) / 4, torch.arange(80.0).reshape(16, 5) % 9 - 4
BOTH = P(("dp", "tp"))

MISTAKES: dict[str, tuple[Any, Any, Any, str]] = {  # what is wrong, what is right, their arguments, what is said
    "a forgotten psum": (
        on_ranks(matmul_without_psum, *TENSOR_PARALLEL, out=P("dp"), check_vma=False),
        on_ranks(matmul_with_psum, *TENSOR_PARALLEL, out=P("dp")),
        (X, W, B),
        """
  * out is on each rank of 'tp' only a part of the sum
  * gradient of w is 1/4 times the one-device value (4 = size of axis 'tp')
  * the runs part at the results of shard_map(matmul_without_psum)
      operand 0 (matmul, <return x @ w>): f32[8@dp,3], on each rank of 'tp' a part of the sum
      out_specs says that all ranks of 'tp' hold the same, but each holds its part of a sum
  Instead: vfn.psum(x, 'tp') of what the body returns""",
    ),
    "a forgotten pmean": (
        on_ranks(gradient_of_the_mean, P(), P("dp"), check_vma=False),
        on_ranks(gradient_of_the_mean, P(), P("dp")),
        (W, X),
        """
  * out is on each rank of 'dp' only the mean of a part
  * the runs part at the results of shard_map(gradient_of_the_mean)
      operand 0 (grad, <return vfn.grad(mean_then_pmean)(w, x)>): f32[12,3], on each rank of 'dp' the mean of its block
      out_specs says that all ranks of 'dp' hold the same, but each holds the mean of its own block
  Instead: vfn.pmean(x, 'dp') of what the body returns""",
    ),
    "a doubled psum": (
        on_ranks(summed_twice, *TENSOR_PARALLEL, out=P("dp")),
        on_ranks(bias_after_the_sum, *TENSOR_PARALLEL, out=P("dp")),
        (X, W, B),
        """
  * gradient of w is 4 times the one-device value (4 = size of axis 'tp')
  * the runs part at psum, <return vfn.psum(y, "tp") + b>
      operand 0 (psum, here): f32[8@dp,3], each rank its block
      the ranks hold the whole value already, so that the sum counts it once for each of them
  Instead: leave it out (a gradient by a value that is the same on all ranks is summed already), or in_specs that split \
over 'tp' what is summed""",
    ),
    "in_specs that leave a contraction whole": (
        on_ranks(matmul_with_psum, P("dp"), P(), P(), out=P("dp"), check_vma=False),
        on_ranks(matmul_with_psum, *TENSOR_PARALLEL, out=P("dp")),
        (X, W, B),
        """
  * out is 4 times the one-device value (4 = size of axis 'tp')
  * the runs part at psum, <return vfn.psum(x @ w, "tp")>
      operand 0 (matmul, here): f32[8@dp,3], each rank its block
      the ranks hold the whole value already, so that the sum counts it once for each of them
  Instead: leave it out (a gradient by a value that is the same on all ranks is summed already), or in_specs that split \
over 'tp' what is summed""",
    ),
    "a psum of a gradient that is summed": (
        on_ranks(psum_of_a_summed_gradient, P(), P("dp")),
        on_ranks(gradient_of_the_mean, P(), P("dp")),
        (W, X),
        """
  * out is 2 times the one-device value (2 = size of axis 'dp')
  * the runs part at psum, <return vfn.psum(gradient, "dp")>
      operand 0 (grad, here): f32[12,3], the same on all ranks
      the ranks hold the whole value already, so that the sum counts it once for each of them""",
    ),
    "a pmean of a gradient that is summed": (
        on_ranks(pmean_of_a_summed_gradient, P(), P("dp")),
        on_ranks(gradient_of_the_mean, P(), P("dp")),
        (W, X),
        """
  * out is 2 times the one-device value (2 = size of axis 'dp')
  * the runs part at grad, <gradient = vfn.grad(lambda w: (x @ w).square().mean())(w)>
      operand 0 (mean, here): f32[], on each rank of 'dp' the mean of its block
      operand 1: f32[12,3], the same on all ranks
      what is differentiated is, on each rank of 'dp', the mean of its own block; by a value that is the same on all \
ranks, the gradients of all of them are added up
  Instead: vfn.pmean(loss, 'dp') in the function that is differentiated""",
    ),
    "a mean over local batches, summed": (
        on_ranks(mean_then_psum, P(), P("dp")),
        on_ranks(mean_then_pmean, P(), P("dp")),
        (W, X),
        """
  * out is 2 times the one-device value (2 = size of axis 'dp')
  * gradient of w is 2 times the one-device value (2 = size of axis 'dp')
  * the runs part at psum, <return vfn.psum(loss, "dp")>
      operand 0 (mean, here): f32[], on each rank of 'dp' the mean of its block
      these are means over the ranks' blocks, and their sum is 2 times the mean
  Instead: vfn.pmean(x, 'dp')""",
    ),
    "the mean of partial sums": (
        on_ranks(sum_then_pmean, P(), P("dp")),
        on_ranks(sum_then_psum, P(), P("dp")),
        (W, X),
        """
  * out is 1/2 times the one-device value (2 = size of axis 'dp')
  * the runs part at pmean, <return vfn.pmean((x @ w).square().sum(), "dp")>
      operand 0 (sum, here): f32[], on each rank of 'dp' a part of the sum
      these are parts of a sum, and their mean is 1/2 of it
  Instead: vfn.psum(x, 'dp')""",
    ),
    "a bias that is added on every rank": (
        on_ranks(bias_before_the_sum, *TENSOR_PARALLEL, out=P("dp")),
        on_ranks(bias_after_the_sum, *TENSOR_PARALLEL, out=P("dp")),
        (X, W, B),
        """
  * gradient of b is 4 times the one-device value (4 = size of axis 'tp')
  * the runs part at add, <y = x @ w + b>
      operand 0 (matmul, here): f32[8@dp,3], on each rank of 'tp' a part of the sum
      operand 1: f32[3], the same on all ranks
      operand 1 is added on every rank of 'tp', so that the sum counts it 4 times
  Instead: add it after vfn.psum(x, 'tp')""",
    ),
    "a bias in linear": (
        on_ranks(linear_with_bias, *TENSOR_PARALLEL, out=P("dp")),
        on_ranks(bias_after_the_sum, *TENSOR_PARALLEL, out=P("dp")),
        (X, W, B),
        """
  * gradient of b is 4 times the one-device value (4 = size of axis 'tp')
  * the runs part at linear, <return vfn.psum(torch.nn.functional.linear(x, w.T, b), "tp")>
      operand 2 is added on every rank of 'tp', so that the sum counts it 4 times""",
    ),
    "a number that is added on every rank": (
        on_ranks(one_added_before_the_sum, *TENSOR_PARALLEL, out=P("dp")),
        on_ranks(matmul_with_psum, *TENSOR_PARALLEL, out=P("dp")),
        (X, W, B),
        """
  * out differs by 3 (relative 0.16)
  * the runs part at add, <return vfn.psum(x @ w + 1, "tp")>
      the number is added on every rank of 'tp', so that the sum counts it 4 times""",
    ),
    "a nonlinear function of partial sums": (
        on_ranks(relu_before_the_sum, *TENSOR_PARALLEL, out=P("dp")),
        on_ranks(relu_after_the_sum, *TENSOR_PARALLEL, out=P("dp")),
        (X, W, B),
        """
  * the runs part at relu, <return vfn.psum(torch.relu(x @ w), "tp")>
      on each rank of 'tp' it is applied to a part of the sum, not to the whole
  Instead: vfn.psum(x, 'tp') before it""",
    ),
    "blocks of a contraction that do not belong together": (
        on_ranks(product, P(None, ("tp", "dp")), BOTH),
        on_ranks(product, P(None, ("dp", "tp")), BOTH),
        SQUARE,
        """
  * out differs by 13 (relative 0.35)
  * gradient of x holds the same numbers in another order
  * the runs part at matmul, <return vfn.psum(x @ w, ("dp", "tp"))>
      operand 0: f32[3,16@tp+dp], each rank its block
      operand 1: f32[16@dp+tp,5], each rank its block
      blocks meet that do not belong together: operand 0 over 'tp' x 'dp' and operand 1 over 'dp' x 'tp'
  Instead: in_specs that split the dims which meet over the same axes, in the same order""",
    ),
    "blocks gathered in another order": (
        on_ranks(gathered_in_another_order, BOTH),
        on_ranks(gathered, BOTH),
        (SQUARE[1],),
        """
  * out holds the same numbers in another order
  * the runs part at all_gather, <return vfn.all_gather(x, ("tp", "dp"), tiled=True, to="invarying")>
      operand 0: f32[16@dp+tp,5], each rank its block
      the numbers are the same, in another order
  Instead: the axes of a tuple in one order, in the spec and in the collective: major first""",
    ),
    "the same mask on each rank": (
        on_ranks(same_mask_on_each_rank, P(), P("dp"), out=P("dp")),
        on_ranks(own_part_of_the_mask, P(), P("dp"), out=P("dp")),
        (K, X),
        """
  * the runs part at random.dropout, <return dropout(k, x, 0.5)>
      operand 0: i32[2], the same on all ranks
      operand 1: f32[8@dp,12], each rank its block
      with one key on all ranks each draws the same numbers for its own block; one device draws for the whole
  Instead: spec=P('dp') in the draw, by which each rank draws its block of the one whole draw""",
    ),
    "the same noise on each rank": (
        on_ranks(same_noise_on_each_rank, P(), P("dp"), out=P("dp")),
        on_ranks(own_part_of_the_noise, P(), P("dp"), out=P("dp")),
        (K, X),
        """
  * the runs part at random draw, <return x + normal(k, x.shape)>
  Instead: spec=P(...) in the draw, by which each rank draws its block of the one whole draw""",
    ),
    "clipping by local norms": (
        on_ranks(clipped_by_the_local_norm, P("tp"), out=P("tp")),
        on_ranks(clipped_by_the_norm, P("tp"), out=P("tp")),
        (W,),
        """
  * out is the one-device value times another factor on each rank: 1.906, 2.267, 2.125, 1.8; \
its norm is sqrt(4) = 2 times the one-device value (4 = size of axis 'tp')
  * the runs part at norm, <norm = g.norm()>
      operand 0: f32[12@tp,3], each rank its block
      each rank of 'tp' applies it to its own block, where one device has the whole
  Instead: vfn.psum(x.square().sum(), 'tp').sqrt()""",
    ),
    "a local RMS": (
        on_ranks(local_rms, P(None, "tp"), out=P(None, "tp")),
        on_ranks(global_rms, P(None, "tp"), out=P(None, "tp")),
        (X,),
        """
  * the runs part at rsqrt, <return x * torch.rsqrt(scale)>
      operand 0 (mean, here): f32[8,1], on each rank of 'tp' the mean of its block
      on each rank of 'tp' it is applied to the mean of its own block, not to the whole
  Instead: vfn.pmean(x, 'tp') before it""",
    ),
    "a local softmax": (
        on_ranks(local_softmax, P(None, "tp"), out=P(None, "tp")),
        on_ranks(global_softmax, P(None, "tp"), out=P(None, "tp")),
        (X,),
        """
  * the runs part at softmax, <return torch.softmax(x, -1)>
      each rank of 'tp' applies it to its own block, where one device has the whole
  Instead: m = vfn.pmax(x.detach().amax(dim), 'tp'), and vfn.psum((x - m).exp().sum(dim), 'tp')""",
    ),
    "one value a rank": (
        on_ranks(own_loss, P(), P("dp"), out=P("dp")),
        on_ranks(mean_then_pmean, P(), P("dp")),
        (W, X),
        """
  * out has shape [2] on the mesh, [1] on one device: along dim 0 out_specs puts one block of each rank of 'dp'
  * the runs part at the results of shard_map(own_loss)
      operand 0 (__getitem__, <return (x @ w).square().mean()[None]>): f32[1], on each rank of 'dp' the mean of its block
      out_specs puts side by side what the ranks of 'dp' hold, and each holds the mean of its own block
  Instead: vfn.pmean(x, 'dp') of what the body returns, and out_specs=P()""",
    ),
}


def assert_says(text: str, lines: str) -> None:
    """That these lines stand in a message, in this order; a line of it may go on."""
    found = iter(text.splitlines())
    for line in lines.strip("\n").splitlines():
        assert any(other.startswith(line) for other in found), f"{line!r} is not in\n{text}"


@pytest.mark.filterwarnings("ignore:vfn.psum over:UserWarning", "ignore:random.dropout. the same numbers:UserWarning")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_its_right_twin_passes(name: str) -> None:
    wrong, right, args, says = MISTAKES[name]
    with vfn.simulate(8), vfn.use_mesh(vfn.make_mesh(*MESH)):
        assert_says(message(wrong, *args), says)
        found = vfn.check_parity(right, *args)
    assert found.equal
    assert len(found.rows) >= 2


def test_a_whole_message() -> None:
    wrong, _, args, _ = MISTAKES["a bias that is added on every rank"]
    with vfn.simulate(8):
        said = message(wrong, *args, mesh=vfn.make_mesh(*MESH))
    assert (
        said
        == """\
check_parity(bias_before_the_sum): 2 of 4 values differ between one device and the mesh (dp=2, tp=4)
  * out differs by 9 (relative 0.54)
      one device, the block of ranks 0, 1, 2, 3: f32[4,3] [-0.875, 8.75, 14.875, 0.625, ...]
      mesh: f32[4,3] [2.125, 14.75, 23.875, 3.625, ...]
  * gradient of b is 4 times the one-device value (4 = size of axis 'tp')
  * the runs part at add, <y = x @ w + b>
      operand 0 (matmul, here): f32[8@dp,3], on each rank of 'tp' a part of the sum
      operand 1: f32[3], the same on all ranks
      one device, the block of ranks 0, 1, 2, 3: f32[4,3] [-0.875, 8.75, 14.875, 0.625, ...]
      mesh, rank 0: f32[4,3] [1.75, 21.375, 7.75, 1.75, ...]
      mesh, rank 1: f32[4,3] [5.375, -7.125, 11.875, 3.875, ...]
      mesh, rank 2: f32[4,3] [9.125, -2.25, -13.625, 6.125, ...]
      ...
      operand 1 is added on every rank of 'tp', so that the sum counts it 4 times
  Instead: add it after vfn.psum(x, 'tp')"""
    )


def test_the_report_of_equal_runs() -> None:
    right = MISTAKES["a bias that is added on every rank"][1]
    specs = P("dp", "tp"), P("tp"), P()
    with vfn.simulate(8):
        found = vfn.check_parity(right, X.round(), W, B, mesh=vfn.make_mesh(*MESH), spec=specs, gradients=False)
        assert str(found) == (
            "check_parity(bias_after_the_sum): 1 of 1 value is equal on one device and on the mesh (dp=2, tp=4)\n"
            "value  type         max difference  relative\n"
            "out    f32[8@dp,3]  0               0         equal"
        )
        found = vfn.check_parity(right, X, W, B, mesh=vfn.make_mesh(*MESH), spec=specs)
    assert [(row.path, row.type) for row in found.rows] == [
        ("out", "f32[8@dp,3]"),
        ("gradient of x", "f32[8@dp,12@tp]"),
        ("gradient of w", "f32[12@tp,3]"),
        ("gradient of b", "f32[3]"),
    ]
    assert all(row.relative < 1e-6 for row in found.rows)
    assert "<td style='text-align:left'><code>gradient of b</code></td>" in found._repr_html_()


# --- real ranks -------------------------------------------------------------------------------------------------------

ON_REAL_RANKS = [
    "a forgotten psum",
    "a doubled psum",
    "a pmean of a gradient that is summed",
    "the same mask on each rank",
    "a bias that is added on every rank",
    "clipping by local norms",
]


def audits(debug: bool) -> list[str]:
    """What is said on a mesh of 2 x 2, of wrong functions and of right ones."""
    said = []
    with (
        vfn.use_mesh(vfn.make_mesh((2, 2), ("dp", "tp"))),
        vfn.debug() if debug else contextlib.nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "vfn.psum over")
        for name in ON_REAL_RANKS:
            wrong, right, args, _ = MISTAKES[name]
            said += [message(wrong, *args), str(vfn.check_parity(right, *args))]
    return said


@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
def test_real_ranks_say_what_simulated_ones_say(gloo: Any, debug: bool) -> None:
    with vfn.simulate(4):
        wanted = audits(debug)
    for said in gloo(4, audits, debug):
        assert said == wanted


def arguments_that_differ() -> str:
    x = torch.arange(4.0) + dist.get_rank() // 2
    return message(lambda p: p["x"] * p["n"], {"x": x, "n": torch.tensor(2)}, mesh=vfn.make_mesh((4,), ("dp",)))


def test_plain_arguments_must_be_the_same_on_every_rank(gloo: Any) -> None:
    assert set(gloo(4, arguments_that_differ)) == {
        "check_parity(<lambda>): the arguments must be the same whole values on every rank\n"
        "  * p['x'] is another value on rank 2, 3 than on rank 0\n"
        "  Instead: make them from a key (vfn.random), or send rank 0's; vfn.from_local for each rank's own data"
    }


# --- faults that hide, and programs that only look wrong --------------------------------------------------------------


def test_a_fault_that_shows_only_in_the_gradient_of_a_tiny_leaf() -> None:
    def f(x: Any, w: Any, p: Any) -> Any:
        return x @ w + p["big"] + p["tiny"] * vfn.axis_size("dp")

    p = {"big": B, "none": None, "n": torch.tensor(3), "tiny": torch.tensor([1e-5])}
    with vfn.simulate(8):
        said = message(on_ranks(f, P("dp"), P(), P(), out=P("dp")), X, W, p, mesh=vfn.make_mesh(*MESH))
    assert_says(
        said,
        """\
check_parity(f): 1 of 5 values differs between one device and the mesh (dp=2, tp=4)
  * gradient of p['tiny'] is 2 times the one-device value (2 = size of axis 'dp')
  * the runs part in the backward pass of mul, <return x @ w + p["big"] + p["tiny"] * vfn.axis_size("dp")>""",
    )


def test_the_gradient_of_what_a_function_closes_over_is_compared() -> None:
    model = torch.nn.Linear(12, 3)
    scale = torch.ones(3, requires_grad=True)

    def scaled(x: Any) -> Any:
        times = vfn.axis_size("tp") if context.body() is not None else 1
        return model(x) + (scale - scale.detach()) * times

    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        found = vfn.check_parity(scaled, X, mesh=mesh, spec=P("dp"))
        assert [row.path for row in found.rows] == [
            "out",
            "gradient of x",
            "gradient of model.weight (closed over)",
            "gradient of model.bias (closed over)",
            "gradient of scale (closed over)",
        ]
        assert [row.path for row in vfn.check_parity(model, X, mesh=mesh).rows][1:] == [
            "gradient of input",
            "gradient of weight (closed over)",
            "gradient of bias (closed over)",
        ]
        assert len(vfn.check_parity(scaled, X.long().float(), mesh=mesh, gradients=False).rows) == 1
        said = message(on_ranks(scaled, P("dp"), out=P("dp")), X, mesh=mesh)
    assert "1 of 5 values differs" in said
    assert "gradient of scale (closed over) is 2 times the one-device value (2 = size of axis 'dp' or size of" in said
    assert not scale._backward_hooks
    assert "the runs part in the backward pass of mul, <return model(x) + (scale - scale.detach()) * times>" in said


def test_a_gradient_function_closes_over_nothing_of_its_own() -> None:
    """What `vfn.grad` makes for its backward pass is a leaf of that run alone."""

    box = type("Box", (), {})()
    box.scale = torch.tensor([2.0, 3.0, 4.0], requires_grad=True)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ w).square().sum()

    with vfn.simulate(8), vfn.use_mesh(vfn.make_mesh(*MESH)):
        x, w = vfn.shard(X, vfn.current_mesh(), P("dp")), vfn.shard(W, vfn.current_mesh(), P("tp"))
        for f, closed in (
            (vfn.grad(loss), []),
            (vfn.value_and_grad(loss), []),
            (lambda w, x: vfn.grad(loss)(w, x) * box.scale, ["gradient of a tensor (closed over)"]),
        ):
            said = str(vfn.check_parity(f, w, x))
            assert re.findall("gradient of a tensor .closed over.", said) == closed


def test_a_fault_on_one_rank_only() -> None:
    def f(x: Any) -> Any:
        y = x * 2
        return torch.where(vfn.axis_index("dp") == 2, -y, y)

    with vfn.simulate(4):
        said = message(on_ranks(f, P("dp"), out=P("dp")), X, mesh=vfn.make_mesh((4,), ("dp",)))
    assert_says(
        said,
        """
  * out is the one-device value times another factor on each rank: 1, -1
      one device, the block of rank 2: f32[2,12] [2, 2.25, 2.5, 2.75, ...]
      mesh: f32[2,12] [-2, -2.25, -2.5, -2.75, ...]
  * the runs part at where, <return torch.where(vfn.axis_index("dp") == 2, -y, y)>
      operand 0 (__eq__, here): depends on the rank
      operand 0 depends on the rank (axis_index, which is 0 on one device), and so does what comes of it""",
    )


def test_a_fault_in_the_small_elements_of_a_value() -> None:
    x = torch.linspace(-1, 1, 32).reshape(8, 4) * torch.tensor([1e7] + [1.0] * 7)[:, None]

    def f(x: Any) -> Any:
        return x * torch.where(x.abs() < 1e3, 1 + 0.01 * (vfn.axis_size("dp") - 1), 1.0)

    with vfn.simulate(4):
        said = message(on_ranks(f, P("dp"), out=P("dp")), x, mesh=vfn.make_mesh((2, 2), ("dp", "tp")))
    assert_says(
        said,
        """
  * out differs by 0.01 (relative 0.0021)
      one device, the block of ranks 0, 1: f32[4,4] [..., -0.74194, -0.67742, -0.6129, -0.54839, ...]
      mesh: f32[4,4] [..., -0.74935, -0.68419, -0.61903, -0.55387, ...]
  * the runs part at where, <return x * torch.where(x.abs() < 1e3, 1 + 0.01 * (vfn.axis_size("dp") - 1), 1.0)>
      its operands are in order: a number in it is another on the mesh, as vfn.axis_size or the size of a block is""",
    )


def test_a_write_into_a_part_of_a_value() -> None:
    def f(x: Any) -> Any:
        x = x.clone()
        x[0] = 0.0
        return x

    with vfn.simulate(2):
        said = message(on_ranks(f, P("dp"), out=P("dp")), X, mesh=vfn.make_mesh((2,), ("dp",)))
    assert_says(
        said,
        """
  * the runs part at __setitem__, <x[0] = 0.0>
      operand 0 (clone, here): f32[8@dp,12], each rank its block
      each rank of 'dp' applies it to its own block, where one device has the whole""",
    )


def test_positions_made_of_the_rank_are_no_fault() -> None:
    def f(x: Any) -> Any:
        rows = vfn.axis_index("dp") * x.shape[0] + torch.arange(x.shape[0])
        return x * rows[:, None] + torch.nonzero(x).sum() * 0

    with vfn.simulate(4):
        assert vfn.check_parity(on_ranks(f, P("dp"), out=P("dp")), X, mesh=vfn.make_mesh((4,), ("dp",))).equal


def test_another_dtype_on_the_mesh() -> None:
    def f(x: Any) -> Any:
        y = x * 2
        y = y.double() if vfn.axis_size("dp") > 1 else y
        return y + 1

    with vfn.simulate(4):
        said = message(on_ranks(f, P("dp"), out=P("dp")), X, mesh=vfn.make_mesh((4,), ("dp",)))
    assert_says(
        said,
        """
  * out is float64 on the mesh, float32 on one device
  * the runs part at add, <return y + 1>
      the mesh has f64, where one device has f32""",
    )


def test_a_function_that_keeps_something_from_call_to_call() -> None:
    last: dict[str, torch.Tensor] = {}

    def f(x: Any) -> Any:
        y = last.setdefault("x", torch.zeros(()))
        last["x"] = x.detach().sum()
        return x.sum() - y

    with vfn.simulate(2):
        said = message(f, X, mesh=vfn.make_mesh((2,), ("dp",)))
    assert said == (
        "check_parity(f): it gives other values when it is called again with the same arguments, on one device\n"
        "  * out: f32[] 90, then f32[] 0\n"
        "  Instead: a function without state: nothing kept from call to call, no change in place of what it closes over, "
        "draws from keys"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_fault_however_much_a_program_enlarges_it(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(1024, generator=generator) + 10).to(dtype)
    a, w = (torch.randn(shape, generator=generator).to(dtype) for shape in ((16, 64), (64, 128)))

    def layers(a: Any, w: Any) -> Any:
        for _ in range(12):
            a = torch.tanh(a @ w @ w.T * 0.05)
        return a.sum()

    with vfn.simulate(8), vfn.use_mesh(vfn.make_mesh((8,), ("dp",))):
        found = vfn.check_parity(lambda x: (x - x.mean()).sum(), x, spec=P("dp"))
        assert found.rows[0].remark in ("equal up to rounding", "not judged: rounding alone changes it as much")
        if found.rows[0].remark.startswith("not"):
            assert found.title.endswith(
                "1 of 2 values are equal on one device and on the mesh (dp=8); 1 cannot be judged"
            )
        assert vfn.check_parity(layers, a, w, spec=(P(), P(None, "dp"))).equal
        wrong = lambda a, w: layers(a, w) * (2 if vfn.axis_size("dp") > 1 else 1)  # a fault is found all the same
        assert "is 2 times the one-device value" in message(on_ranks(wrong, P(), P()), a, w)


def test_nan_and_infinity() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf"), -1.0])
    with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh((2,), ("dp",))):
        assert vfn.check_parity(lambda x: x.log(), x, spec=P("dp")).equal
        said = message(on_ranks(lambda x: x / vfn.axis_index("dp"), P("dp"), out=P("dp")), x.nan_to_num(0.0, 1.0))
    assert "out has NaN or infinity in other places" in said


def test_leaves_that_are_no_floats() -> None:
    def f(p: Any) -> Any:
        return {"none": None, "int": 3, "sum": p["x"].sum(), "first": p["x"].argmax(), "flag": p["n"] > 1}

    with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh((2,), ("dp",))):
        found = vfn.check_parity(f, {"x": X[:7], "n": torch.arange(3), "no": None, "name": "a"}, spec=P())
        assert [row.path for row in found.rows] == [
            "out['first']",
            "out['flag']",
            "out['int']",
            "out['sum']",
            "gradient of p['x']",
        ]
        said = message(on_ranks(lambda x: {"n": vfn.axis_size("dp")} if vfn.axis_size("dp") > 1 else {"m": 1}, P()), X)
    assert said == (
        "check_parity(<lambda>): the results have another structure on the mesh (dp=2) than on one device\n"
        "  * out['m'] only on one device, out['n'] only on the mesh"
    )


# --- functions that fail ----------------------------------------------------------------------------------------------


def few_rows(x: Any) -> Any:
    if x.shape[0] < 3:
        raise ValueError("too few rows")
    return x * 2


def test_a_function_that_fails_in_one_run() -> None:
    def swapped(x: Any) -> Any:
        return vfn.ppermute(x, "dp", [(0, 1), (1, 0)])

    with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh((2,), ("dp",))):
        said = message(on_ranks(few_rows, P("dp"), out=P("dp")), X[:4])
        assert said == (
            "check_parity(few_rows): it fails on the mesh (dp=2), and runs on one device\n"
            "  * ValueError: too few rows\n"
            '    at <raise ValueError("too few rows")>'
        )
        said = message(on_ranks(swapped, P("dp"), out=P("dp")), X)
    assert said.startswith(
        "check_parity(swapped): it fails on one device, and runs on the mesh (dp=2)\n  * CollectiveError: ppermute"
    )
    assert said.endswith(
        'at <return vfn.ppermute(x, "dp", [(0, 1), (1, 0)])>\n  Instead: vfn.axis_size(axis) for a number of ranks, '
        "also in permutations and shapes: on one device it is 1"
    )


def test_a_function_that_fails_in_both_runs_raises_as_it_does() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise RuntimeError("no gradient")

    with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh((2,), ("dp",))):
        with pytest.raises(ValueError, match="too few rows") as caught:
            vfn.check_parity(few_rows, X[:2])
        assert (
            getattr(caught.value, "__notes__", notes := ["vfn.check_parity: the function fails on one device too"])
            == notes
        )
        with pytest.raises(RuntimeError, match="no gradient") as caught:
            vfn.check_parity(Once.apply, X)
        notes = [
            "vfn.check_parity: the gradient of the function fails on one device too; vfn.check_parity(f, ..., gradients=False) compares "
            "the results alone"
        ]
        assert getattr(caught.value, "__notes__", notes) == notes
        assert vfn.check_parity(Once.apply, X, gradients=False).equal


# --- real ranks that part ---------------------------------------------------------------------------------------------


def one_rank_fails() -> str:
    def f(x: Any) -> Any:
        if vfn.axis_size("dp") > 1 and dist.get_rank() == 2:
            raise ValueError("not here")
        return x * 2

    return message(on_ranks(f, P("dp"), out=P("dp")), X, mesh=vfn.make_mesh((4,), ("dp",)))


def one_rank_fails_when_called_again() -> str:
    calls = []

    def f(x: Any) -> Any:
        calls.append(x)
        if len(calls) > 2 and dist.get_rank() == 2:
            raise ValueError("enough")
        return x * 2 * vfn.axis_size("dp")

    return message(on_ranks(f, P("dp"), out=P("dp")), X, mesh=vfn.make_mesh((4,), ("dp",)))


def one_rank_is_wrong() -> str:
    def f(x: Any) -> Any:
        y = x * 2
        return y * 3 if vfn.axis_size("dp") > 1 and dist.get_rank() == 2 else y

    return message(on_ranks(f, P("dp"), out=P("dp")), X, mesh=vfn.make_mesh((4,), ("dp",)))


def one_rank_returns_something_else() -> str:
    def f(x: Any) -> Any:
        return (x,) if dist.get_rank() == 2 and vfn.axis_size("dp") > 1 else x

    return message(on_ranks(f, P("dp"), out=P("dp")), X, mesh=vfn.make_mesh((4,), ("dp",)))


def test_one_real_rank_that_parts_from_the_others_is_named_on_all(gloo: Any) -> None:
    assert set(gloo(4, one_rank_fails)) == {
        "check_parity(f): it fails on the mesh (dp=4), and runs on one device, not on all ranks alike\n"
        "  * rank 2: ValueError: not here\n"
        '    at <raise ValueError("not here")>'
    }
    assert set(gloo(4, one_rank_fails_when_called_again)) == {
        "check_parity(f): it gives other values when it is called again with the same arguments, on one device\n"
        "  * it fails then: ValueError: enough\n"
        '    at <raise ValueError("enough")>\n'
        "  Instead: a function without state: nothing kept from call to call, no change in place of what it closes over, "
        "draws from keys"
    }
    (said,) = set(gloo(4, one_rank_is_wrong))
    assert_says(
        said,
        """
  * out is the one-device value times another factor on each rank: 1, 3
      one device, the block of rank 2: f32[2,12] [2, 2.25, 2.5, 2.75, ...]
      mesh: f32[2,12] [6, 6.75, 7.5, 8.25, ...]
  * the ranks part: they take different steps
      ranks 0, 1, 3: the results of shard_map(f), <return vfn.shard_map(f,
      rank 2: mul, <return y * 3 if vfn.axis_size("dp") > 1 and dist.get_rank() == 2 else y>""",
    )
    (said,) = set(gloo(4, one_rank_returns_something_else))
    assert said.startswith(
        "check_parity(f): it fails on the mesh (dp=4), and runs on one device\n"
        "  * DivergenceError: debug: the ranks differ in the results of shard_map(f)"
    ), said


def checked_on(mesh: dist.device_mesh.DeviceMesh) -> str:
    names = mesh.mesh_dim_names
    f = vfn.shard_map(lambda x: vfn.psum(x.sin().sum(), names), mesh=mesh, in_specs=P(names), out_specs=P())
    return str(vfn.check_parity(f, torch.arange(24.0), mesh=mesh))


def checked_on_a_part_and_on_all(shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[str, str]:
    ranks = torch.arange(1, 1 + math.prod(shape)).view(shape)
    mesh = dist.device_mesh.DeviceMesh("cpu", ranks, mesh_dim_names=names)
    of_the_part = checked_on(mesh) if dist.get_rank() in ranks else ""
    return of_the_part, checked_on(vfn.make_mesh((dist.get_world_size(),), ("all",)))


@pytest.mark.parametrize(("shape", "names"), [((2,), ("i",)), ((2, 2), ("i", "j"))])
def test_a_mesh_of_some_of_the_ranks_waits_for_no_others(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    n = math.prod(shape)
    on_a_part, on_all = zip(*vfn.launch(checked_on_a_part_and_on_all, n + 2, shape, names, device="cpu", timeout=60))
    left_out, *said, last = on_a_part
    assert left_out == last == ""
    assert len(set(said)) == 1
    assert "gradient" in said[0]
    assert len(set(on_all)) == 1
    assert "gradient" in on_all[0]
