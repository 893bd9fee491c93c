"""No hang: whatever one rank does alone, the others hear of it soon, in words that name both.

In debug mode ranks that part ways raise on all ranks in the same words, and stay usable. Without it, the rank that failed
comes first in what `launch` says, with its own traceback, within the timeout.
"""

import faulthandler
import inspect
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.base import context
from vescale_fn._core.distributed.call_board import Board
from vescale_fn._core.distributed.divergence import RankCall, Value, different
from vescale_fn._core.shard_map import collective_maps
from vescale_fn.errors import CollectiveError, DivergenceError, RankError, SpecError

ROOT = Path(__file__).resolve().parents[1]
SAME_TYPES = "\n  Instead: the same shapes, dtypes and numbers on every rank; blocks that differ in size can be padded"
SAME_VALUES = (
    "\n  Instead: make it from the same data and the same seed on every rank; vfn.from_local for what each process has for "
    "itself"
)
USED = "debug: the ranks use different values where one value counts as the same on all of them"
SAME_USES = (
    "\n  Instead: make it from the same data and the same seed on every rank; vfn.axis_index or a key folded with it for what "
    "is to differ in a body, vfn.from_local for what each process has for itself"
)
SAME = "\n  Instead: the same calls on every rank, in the same order; a Python `if` may not depend on the rank"


def plain(text: str) -> str:
    """A message without what differs from run to run: a line of this file as its function and how far it is below."""

    def place(found: re.Match) -> str:
        starts = {
            f.__code__.co_firstlineno: name
            for name, f in globals().items()
            if inspect.isfunction(f) and f.__code__.co_filename == __file__
        }
        start = max(line for line in starts if line <= int(found[1]))
        return f"{starts[start]}+{int(found[1]) - start}"

    text = re.sub(rf"{re.escape(__file__)}:(\d+): `[^`]*`", place, text)
    return re.sub(r"process \d+", "process N", text)


def body(mesh, f, x, in_specs=None, out_specs=P()):
    """``f`` of the blocks of `x`, which is cut along dim 0 by the mesh's first axis, or as said."""
    in_specs = P(mesh.mesh_dim_names[0]) if in_specs is None else in_specs
    return vfn.unshard(vfn.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(x))


class Breaks(torch.autograd.Function):
    """The identity, with a backward that calls `then`."""

    @staticmethod
    def forward(ctx, x, then):
        ctx.then = then
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.then(gradient), None


# --- debug mode: ranks that part ways -------------------------------------------------------------------------------
# Each is a program of (mesh (a=2, b=1), rank, x = arange(8.0)), and what is raised on both ranks.


def another_collective(mesh, rank, x):
    def f(x):
        if rank == 0:
            return vfn.psum(x, "a")
        return vfn.all_gather(x, "a", tiled=True, to="invarying")

    body(mesh, f, x)


def a_call_left_out(mesh, rank, x):
    def f(x):
        if rank == 1:
            x = vfn.pvary(vfn.psum(x, "a"), "a")
        return vfn.psum(x, "a")

    body(mesh, f, x)


def another_shape(mesh, rank, x):
    body(mesh, lambda x: vfn.psum(x[: 2 + rank], "a"), x)


def another_shape_of_the_same_size(mesh, rank, x):
    body(mesh, lambda x: vfn.psum({"u": x, "v": x.view(2, 2) if rank else x.view(4, 1)}, "a")["u"], x)


def another_dtype(mesh, rank, x):
    body(mesh, lambda x: vfn.pmax(x.to(torch.float64 if rank else torch.float32), "a"), x)


def another_dim(mesh, rank, x):
    body(mesh, lambda x: vfn.all_gather(x.view(2, 2), "a", axis=rank, tiled=True, to="invarying").sum(), x)


def another_permutation(mesh, rank, x):
    body(mesh, lambda x: vfn.psum(vfn.ppermute(x, "a", [(0, 1), (1, 0)][: 1 + rank]), "a"), x)


def another_order_of_axes(mesh, rank, x):
    body(mesh, lambda x: vfn.psum(x, ("a", "b") if rank else ("b", "a")), x, in_specs=P(("a", "b")))


def another_source(mesh, rank, x):
    body(mesh, lambda x: vfn.psum(vfn.pbroadcast(x, "a", rank), "a"), x)


def other_specs(mesh, rank, x):
    body(mesh, lambda x: x * 2, x, in_specs=P("a") if rank else P(), out_specs=P("a"))


def another_function(mesh, rank, x):
    def double(x):
        return x * 2

    def triple(x):
        return x * 3

    body(mesh, triple if rank else double, x, out_specs=P("a"))


def another_number(mesh, rank, x):
    f = vfn.shard_map(lambda x, k: x * k, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
    f(x, 2 + rank)


def shapes_that_depend_on_the_data(mesh, rank, x):
    body(mesh, lambda x: x[x > 2.5], x, out_specs=P("a"))


def a_gradient_stopped(mesh, rank, x):
    def f(w, x):
        return vfn.psum(((w.detach() if rank else w) * x).sum(), "a")

    f = vfn.shard_map(f, mesh=mesh, in_specs=(P(), P("a")), out_specs=P())
    vfn.grad(lambda w: f(w, x))(torch.ones(4))
    vfn.unshard(vfn.shard(x, mesh, P("a")))


def another_move(mesh, rank, x):
    x = vfn.shard(x, mesh, P("a"))
    return x.cumsum(0) if rank else x.sum().item()


def plain_tensors_to_shard(mesh, rank, x):
    x[7] += rank
    vfn.shard({"x": x, "y": torch.ones(3), "n": 3}, mesh, {"x": P("a"), "y": P(), "n": P()})


def plain_tensors_to_with_sharding(mesh, rank, x):
    vfn.with_sharding(torch.full((2,), rank, dtype=torch.bool), P("a"), mesh=mesh)


def plain_tensors_in_an_op(mesh, rank, x):
    return vfn.shard(x, mesh, P("a")) * torch.tensor(1.0 + rank)


def plain_tensors_to_shard_map(mesh, rank, x):
    body(mesh, lambda x: x, torch.full((2, 1), rank), out_specs=P("a"))


def another_rate(mesh, rank, x):
    w = vfn.shard(x, mesh, P("a"))
    vfn.unshard(w - (0.1 + rank) * w)


def another_key(mesh, rank, x):
    vfn.unshard(vfn.random.normal(vfn.random.key(rank), (8,), spec=P("a"), mesh=mesh))


def another_key_in_a_body(mesh, rank, x):
    key = vfn.random.key(2 + rank)
    body(mesh, lambda x: x + vfn.random.normal(key, (4,)), x, out_specs=P("a"))


def another_key_of_a_dropout(mesh, rank, x):
    vfn.unshard(vfn.random.dropout(vfn.random.key(4 + rank), vfn.shard(x, mesh, P("a")), 0.5))


def another_float_in_a_body(mesh, rank, x):
    body(mesh, lambda x: x * (0.5 + rank), x, out_specs=P("a"))


def another_slice_in_a_body(mesh, rank, x):
    body(mesh, lambda x: x[rank : rank + 2].exp(), x, P(), P())


def a_tensor_made_in_a_body(mesh, rank, x):
    body(mesh, lambda x: x + torch.tensor(1.0 + rank), x, out_specs=P("a"))


def a_tensor_that_a_body_closes_over(mesh, rank, x):
    c = torch.full((4,), rank)
    torch.func.grad(lambda x: body(mesh, lambda x: x + c, x, out_specs=P("a")).sum())(x)


def a_promise_of_an_unchecked_body(mesh, rank, x):
    vfn.shard_map(lambda x: x, mesh=mesh, in_specs=P("a"), out_specs=P(), check_vma=False)(x)
    vfn.shard(x, mesh, P("a"))


PARTINGS = {
    another_collective: """\
debug: the ranks make different calls
  * rank 0: psum over 'a' of f32[4] at another_collective+3
  * rank 1: all_gather over 'a' of f32[4] (dim 0, tiled) at another_collective+4"""
    + SAME,
    a_call_left_out: """\
debug: the ranks are at different lines in psum, so one of them has left out a call
  * rank 0: psum over 'a' of f32[4] at a_call_left_out+4
  * rank 1: psum over 'a' of f32[4] at a_call_left_out+3"""
    + SAME,
    another_shape: """\
debug: the ranks differ in the shapes of psum
  * its value: f32[2] on rank 0, f32[3] on rank 1
  * psum over 'a' of f32[2] at another_shape+1"""
    + SAME_TYPES,
    another_shape_of_the_same_size: """\
debug: the ranks differ in the shapes of psum
  * leaf 1: f32[4,1] on rank 0, f32[2,2] on rank 1
  * psum over 'a' of leaf 0: f32[4], leaf 1: f32[4,1] at another_shape_of_the_same_size+1"""
    + SAME_TYPES,
    another_dtype: """\
debug: the ranks differ in the dtypes of pmax
  * its value: f32[4] on rank 0, f64[4] on rank 1
  * pmax over 'a' of f32[4] at another_dtype+1"""
    + SAME_TYPES,
    another_dim: """\
debug: the ranks differ in the arguments of all_gather
  * rank 0: all_gather over 'a' of f32[2,2] (dim 0, tiled) at another_dim+1
  * rank 1: all_gather over 'a' of f32[2,2] (dim 1, tiled) at another_dim+1"""
    + SAME,
    another_permutation: """\
debug: the ranks differ in the arguments of ppermute
  * rank 0: ppermute over 'a' of f32[4] (perm [(0, 1)]) at another_permutation+1
  * rank 1: ppermute over 'a' of f32[4] (perm [(0, 1), (1, 0)]) at another_permutation+1"""
    + SAME,
    another_order_of_axes: """\
debug: the ranks make different calls
  * rank 0: psum over ('b', 'a') of f32[4] at another_order_of_axes+1
  * rank 1: psum over ('a', 'b') of f32[4] at another_order_of_axes+1"""
    + SAME,
    another_source: """\
debug: the ranks differ in the arguments of pbroadcast
  * rank 0: pbroadcast over 'a' of f32[4] (from 0) at another_source+1
  * rank 1: pbroadcast over 'a' of f32[4] (from 1) at another_source+1"""
    + SAME,
    other_specs: """\
debug: the ranks differ in the arguments of shard_map(<lambda>)
  * rank 0: shard_map(<lambda>) on mesh (a=2, b=1) of args[0]: f32[8] (in_specs=P(), out_specs=P('a')) at body+3
  * rank 1: shard_map(<lambda>) on mesh (a=2, b=1) of args[0]: f32[8] (in_specs=P('a'), out_specs=P('a')) at body+3"""
    + SAME,
    another_function: """\
debug: the ranks make different calls
  * rank 0: shard_map(double) on mesh (a=2, b=1) of args[0]: f32[8] (in_specs=P('a'), out_specs=P('a')) at body+3
  * rank 1: shard_map(triple) on mesh (a=2, b=1) of args[0]: f32[8] (in_specs=P('a'), out_specs=P('a')) at body+3"""
    + SAME,
    another_number: """\
debug: the ranks differ in the arguments of shard_map(<lambda>)
  * args[1]: 2 on rank 0, 3 on rank 1
  * shard_map(<lambda>) on mesh (a=2, b=1) of args[0]: f32[8], args[1]: 2 (in_specs=(P('a'), P()), out_specs=P('a')) at another_number+2"""
    + SAME_TYPES,
    shapes_that_depend_on_the_data: """\
debug: the ranks differ in the shapes of the results of shard_map(<lambda>)
  * out: f32[1] on rank 0, f32[4] on rank 1
  * the results of shard_map(<lambda>) on mesh (a=2, b=1) of out: f32[1] at body+3"""
    + SAME_TYPES,
    a_gradient_stopped: """\
debug: the ranks make different calls
  * rank 0: gradient of pvary (all_reduce) over 'a' of f32[4] at a_gradient_stopped+5
  * rank 1: shard on mesh (a=2, b=1) of x: f32[8] at a_gradient_stopped+6"""
    + SAME,
    another_move: """\
debug: the ranks make different calls
  * rank 0: all_reduce over 'a' of f32[] (local_scalar_dense needs the sum: f32[]{U:a}) at another_move+2
  * rank 1: all_gather over 'a' of f32[4] (dim 0, cumsum needs dim 0 whole: f32[8@a]) at another_move+2"""
    + SAME,
    plain_tensors_to_shard: """\
debug: the ranks differ in a plain tensor, which counts as the same everywhere, in shard
  * tree['x']: f32[8] is [0, 1, 2, ...] (sum 28) on rank 0, but [0, 1, 2, ...] (sum 29) on rank 1
  * shard on mesh (a=2, b=1) of tree['x']: f32[8], tree['y']: f32[3] at plain_tensors_to_shard+2"""
    + SAME_VALUES,
    plain_tensors_to_with_sharding: """\
debug: the ranks differ in a plain tensor, which counts as the same everywhere, in with_sharding
  * the value: bool[2] is [False, False] on rank 0, but [True, True] on rank 1
  * with_sharding on mesh (a=2, b=1) of the value: bool[2] at plain_tensors_to_with_sharding+1"""
    + SAME_VALUES,
    plain_tensors_in_an_op: """\
debug: the ranks differ in a plain tensor, which counts as the same everywhere, in torch's mul
  * argument 1: f32[] is [1] on rank 0, but [2] on rank 1
  * torch's mul on mesh (a=2, b=1) of argument 1: f32[] at plain_tensors_in_an_op+1"""
    + SAME_VALUES,
    another_rate: USED
    + """
  * 'other' of mul is 0.1 on rank 0, but 1.1 on rank 1, at another_rate+2
  * seen in unshard (all_gather) over 'a' of f32[4] (dim 0) at another_rate+2"""
    + SAME_USES,
    another_key: USED
    + """
  * the key of random.normal is [0, 0] on rank 0, but [0, 1] on rank 1, at another_key+1
  * seen in unshard (all_gather) over 'a' of f32[4] (dim 0) at another_key+1"""
    + SAME_USES,
    another_key_in_a_body: USED
    + """
  * tensor 0 of draw, i32[2] from outside of the body, is [0, 2] on rank 0, but [0, 3] on rank 1, at another_key_in_a_body+2
  * seen in the results of shard_map(<lambda>) on mesh (a=2, b=1) of out: f32[4] at body+3"""
    + SAME_USES,
    another_key_of_a_dropout: USED
    + """
  * the key of random.dropout is [0, 4] on rank 0, but [0, 5] on rank 1, at another_key_of_a_dropout+1
  * seen in unshard (all_gather) over 'a' of f32[4] (dim 0) at another_key_of_a_dropout+1"""
    + SAME_USES,
    another_float_in_a_body: USED
    + """
  * argument 1 of mul is 0.5 on rank 0, but 1.5 on rank 1, at another_float_in_a_body+1
  * seen in the results of shard_map(<lambda>) on mesh (a=2, b=1) of out: f32[4] at body+3"""
    + SAME_USES,
    another_slice_in_a_body: USED
    + """
  * argument 1 of __getitem__ is slice(0, 2, None) on rank 0, but slice(1, 3, None) on rank 1, at another_slice_in_a_body+1
  * out of shard_map(<lambda>), f32[2]{the same along a, b}, is [1, 2.71828] on rank 0, but [2.71828, 7.38906] on rank 1, at body+3
  * seen in the results of shard_map(<lambda>) on mesh (a=2, b=1) of out: f32[2] at body+3"""
    + SAME_USES,
    a_tensor_made_in_a_body: USED
    + """
  * the tensor f32[] that tensor makes is [1] on rank 0, but [2] on rank 1, at a_tensor_made_in_a_body+1
  * seen in the results of shard_map(<lambda>) on mesh (a=2, b=1) of out: f32[4] at body+3"""
    + SAME_USES,
    a_tensor_that_a_body_closes_over: USED
    + """
  * tensor 1 of add, i64[4] from outside of the body, is [0, 0, 0, ...] (sum 0) on rank 0, but [1, 1, 1, ...] (sum 4) on rank 1, at a_tensor_that_a_body_closes_over+2
  * seen in the results of shard_map(<lambda>) on mesh (a=2, b=1) of out: f32[4] at body+3"""
    + SAME_USES,
    a_promise_of_an_unchecked_body: USED
    + """
  * out of shard_map(<lambda>), f32[4]{the same along a, b}, is [0, 1, 2, ...] (sum 6) on rank 0, but [4, 5, 6, ...] (sum 22) on rank 1, at a_promise_of_an_unchecked_body+1
  * seen in shard on mesh (a=2, b=1) of x: f32[8] at a_promise_of_an_unchecked_body+2"""
    + SAME_USES,
    plain_tensors_to_shard_map: """\
debug: the ranks differ in a plain tensor, which counts as the same everywhere, in shard_map(<lambda>)
  * args[0]: i64[2,1] is [0, 0] on rank 0, but [1, 1] on rank 1
  * shard_map(<lambda>) on mesh (a=2, b=1) of args[0]: i64[2,1] (in_specs=P('a'), out_specs=P('a')) at body+3"""
    + SAME_VALUES,
}


def parting(programs):
    """On each rank: what each program raises, and whether the ranks work on afterwards."""
    mesh, rank, said = vfn.make_mesh((2, 1), ("a", "b")), dist.get_rank(), {}
    with vfn.debug(timeout=20):
        for program in programs:
            try:
                program(mesh, rank, torch.arange(8.0))
                said[program.__name__] = "nothing"
            except DivergenceError as error:
                said[program.__name__] = plain(str(error))
            total = body(mesh, lambda x: vfn.psum(x.sum(), "a"), torch.arange(8.0))
            assert total == 28, program
    return said


def test_ranks_that_part_ways(gloo):
    first, second = gloo(2, parting, list(PARTINGS))
    assert first == second, "on every rank the same text"
    assert first == {program.__name__: text for program, text in PARTINGS.items()}


def a_rate_at_the_end_of_a_block(mesh, rank, x):
    w = vfn.shard(x, mesh, P("a"))
    if rank == 1:
        time.sleep(0.3)  # the rank that leaves last sees it
    return w * (0.1 + rank)


def sizes_that_depend_on_data(mesh, rank, x):
    """Each rank has as many as it has: their number is no value that is to be the same."""

    def f(x):
        y = x[x > 2.5]
        return (torch.zeros(len(y)).sum() + y.view(len(y), 1).sum() + x.narrow(0, 0, len(y)).sum())[None]

    assert vfn.unshard(body(mesh, f, x, out_specs=P("a"))).tolist() == [3, 44]


def uses_of_blocks():
    mesh, rank, x = vfn.make_mesh((2,), ("a",)), dist.get_rank(), torch.arange(8.0)
    with vfn.debug(timeout=20):
        sizes_that_depend_on_data(mesh, rank, x)
    try:
        with vfn.debug(timeout=20):
            a_rate_at_the_end_of_a_block(mesh, rank, x)
    except DivergenceError as error:
        return plain(str(error)).splitlines()[1:3]
    return []


def test_uses_after_the_last_call_of_a_block_and_sizes_that_depend_on_data(gloo):
    assert gloo(2, uses_of_blocks) == [
        [],
        [
            "  * 'other' of mul is 0.1 on rank 0, but 1.1 on rank 1, at a_rate_at_the_end_of_a_block+4",
            "  * seen in the block of vfn.debug() that ends here",
        ],
    ]


def recorded_with_other_values():
    mesh, rank, x, said = vfn.make_mesh((2,), ("a",)), dist.get_rank(), torch.arange(8.0), []
    w, c, one, two = vfn.shard(x, mesh, P("a")), torch.tensor(float(rank)), torch.tensor(1.0), torch.tensor(2.0)
    mapped = lambda w, k: vfn.shard_map(lambda x: x * k, mesh=mesh, in_specs=P("a"), out_specs=P("a"))(w)
    draw = lambda w, k: w + vfn.random.normal(k, (8,), spec=P("a"), mesh=mesh)
    for f, value in [
        (lambda w, lr: w - lr * w, 0.1 + rank),
        (lambda w, n: w * n, 2 + rank),
        (draw, vfn.random.key(rank)),
        (lambda w, k: w + k * 2, c),
        (lambda w, _: w * c, None),
        (lambda w, _: w * (2.0 + rank), None),
        (lambda w, _: mapped(w, 2.0 + rank), None),
        (lambda w, _: mapped(w, c), None),
        (lambda w, _: w * one + two, None),  # alike on all ranks
        (lambda w, k: mapped(w, 3.0) + k.sum().detach().numel() * 2, c),  # of its value nothing is made
    ]:
        try:
            vfn.jit(f)(w, value)
            said.append("nothing")
        except DivergenceError as error:
            said.append([row.partition(", at ")[0] for row in str(error).splitlines()[:-1]])
    try:
        vfn.init(lambda key: vfn.random.normal(key, (8,)), vfn.random.key(rank), spec=P("a"), mesh=mesh)
    except DivergenceError as error:
        said.append(plain(str(error)))
    return said


def test_ranks_that_bring_other_values_to_a_recording(gloo):
    """Outside of debug mode too: when ranks agree on a recording anyway."""
    first, second = gloo(2, recorded_with_other_values)
    assert first == second
    head = "jit: ranks bring different values to <lambda>, where one counts as the same on all of them"
    assert first == [
        [head, "  * lr is 0.1 on rank 0, but 1.1 on rank 1"],
        [head, "  * n is 2 on rank 0, but 3 on rank 1", "  * 'other' of mul is 2 on rank 0, but 3 on rank 1"],
        [head, "  * k.data is [0, 0] on rank 0, but [0, 1] on rank 1"],
        [head, "  * k is [0] on rank 0, but [1] on rank 1"],
        [head, "  * tensor 0 that it closes over, f32[], is [0] on rank 0, but [1] on rank 1"],
        [head, "  * 'other' of mul is 2.0 on rank 0, but 3.0 on rank 1"],
        [head, "  * argument 1 of mul is 2.0 on rank 0, but 3.0 on rank 1"],
        [head, "  * tensor 0 that it closes over, f32[], is [0] on rank 0, but [1] on rank 1"],
        "nothing",
        "nothing",
        f"{head}\n  * key.data is [0, 0] on rank 0, but [0, 1] on rank 1, at recorded_with_other_values+23{SAME_USES}",
    ]


def test_debug_mode_that_is_not_entered_says_so():
    with pytest.warns(UserWarning, match=r"test_no_hang.py:\d+: `vfn.debug\(\)` was never entered, so it did nothing"):
        vfn.debug()


def test_the_message_as_the_user_sees_it(gloo):
    def f():
        with vfn.debug(), pytest.raises(DivergenceError) as error:
            another_collective(vfn.make_mesh((2,), ("a",)), dist.get_rank(), torch.arange(8.0))
        return str(error.value)

    line = another_collective.__code__.co_firstlineno
    assert gloo(2, f)[0].splitlines()[1:3] == [
        f"  * rank 0: psum over 'a' of f32[4] at {__file__}:{line + 3}: `return vfn.psum(x, \"a\")`",
        f"  * rank 1: all_gather over 'a' of f32[4] (dim 0, tiled) at {__file__}:{line + 4}: "
        '`return vfn.all_gather(x, "a", tiled=True, to="invarying")`',
    ]


def unequal_blocks(spec):
    mesh = vfn.make_mesh((2, 2), ("a", "b"))
    with vfn.debug(), pytest.raises(SpecError) as error:
        vfn.from_local({"x": torch.ones(2), "y": torch.full((2,), dist.get_rank() // 2)}, mesh, spec)
    return str(error.value)


def test_from_local_with_unequal_blocks_of_one_piece(gloo):
    """Ranks 0 and 1, then 2 and 3, hold one block each over `b`; over `a` the blocks of y differ."""
    texts = gloo(4, unequal_blocks, P("b"))
    assert set(texts) == {
        "from_local: the ranks' blocks do not make up arrays on the mesh (a=2, b=2)\n"
        "  * tree['y'] with P('b'): ranks 0 and 2 bring the same piece, but their blocks differ\n"
        "  Instead: give each rank the block that vfn.shard_shape and torch.chunk give it"
    }


def test_from_local_with_unequal_blocks_on_a_simulated_mesh():
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("a",))
        make = lambda coord: torch.full((2,), coord["a"])
        vfn.from_local(make, mesh, P())  # outside debug mode it is taken on trust
        with vfn.debug():
            vfn.from_local(make, mesh, P("a"))
            vfn.from_local(make, mesh, P(unreduced={"a"}))
            with pytest.raises(SpecError, match="ranks 0 and 1 bring the same piece, but their blocks differ"):
                vfn.from_local(make, mesh, P())


# --- debug mode: ranks that leave -----------------------------------------------------------------------------------
# Each is a program of (mesh (a=3), rank, x = arange(6.0)); rank 1 leaves the others alone.


def returns_early(mesh, rank, x):
    if rank != 1:
        body(mesh, lambda x: vfn.psum(x, "a"), x)


def raises_before(mesh, rank, x):
    if rank == 1:
        raise ValueError("mine\nand more")
    body(mesh, lambda x: vfn.psum(x, "a"), x)


def raises_inside(mesh, rank, x):
    def f(x):
        y = vfn.psum(x, "a")
        if rank == 1:
            y.view(7)
        return vfn.psum(vfn.pvary(y, "a"), "a")

    body(mesh, f, x)


def raises_in_the_backward_pass(mesh, rank, x):
    def then(gradient):
        if rank == 1:
            raise ValueError("in the backward pass")
        return gradient

    f = vfn.shard_map(
        lambda w, x: vfn.psum((Breaks.apply(vfn.pvary(w, "a"), then) * x).sum(), "a"),
        mesh=mesh,
        in_specs=(P(), P("a")),
        out_specs=P(),
    )
    vfn.grad(lambda w: f(w, x))(torch.ones(len(x) // mesh.size()))


def raises_in_a_hook(mesh, rank, x):
    w = vfn.shard(x, mesh, P("a")).requires_grad_()
    y = vfn.with_sharding(w, P())
    y.register_hook(lambda gradient: {}["hook"] if rank == 1 else gradient)
    (y**2).sum().backward()
    vfn.unshard(w.grad)


def leaves_python(mesh, rank, x):
    if rank == 1:
        sys.exit(3)
    vfn.unshard(vfn.shard(x, mesh, P("a")))


def sleeps(mesh, rank, x):
    body(mesh, lambda x: vfn.psum(x, "a"), x)
    if rank == 1:
        time.sleep(1.5)
    body(mesh, lambda x: vfn.psum(x, "a"), x)


LEAVINGS = {  # what rank 1 raises, and what the others do
    returns_early: (
        "",
        """\
debug: rank 1 has left while others wait for it
  * rank 1 left the block of leaving+6, before its first call
  * ranks 0, 2 wait in shard_map(<lambda>) on mesh (a=3) of args[0]: f32[6] (in_specs=P('a'), out_specs=P()) at body+3"""
        + SAME,
    ),
    raises_before: (
        "ValueError",
        """\
debug: rank 1 has left while others wait for it
  * rank 1 left the block of leaving+6 by ValueError: mine, before its first call
  * ranks 0, 2 wait in shard_map(<lambda>) on mesh (a=3) of args[0]: f32[6] (in_specs=P('a'), out_specs=P()) at body+3""",
    ),
    raises_inside: (
        "RuntimeError",
        """\
debug: rank 1 has left while others wait for it
  * rank 1 left the block of leaving+6 by RuntimeError: shape '[7]' is invalid for input of size 2, after 2 calls; the last was psum over 'a' of f32[2] at raises_inside+2
  * ranks 0, 2 wait in psum over 'a' of f32[2] at raises_inside+5""",
    ),
    raises_in_the_backward_pass: (
        "ValueError",
        """\
debug: rank 1 has left while others wait for it
  * rank 1 left the block of leaving+6 by ValueError: in the backward pass, after 3 calls; the last was the results of shard_map(<lambda>) on mesh (a=3) of out: f32[] at raises_in_the_backward_pass+12
  * ranks 0, 2 wait in gradient of pvary (all_reduce) over 'a' of f32[2] at raises_in_the_backward_pass+12""",
    ),
    raises_in_a_hook: (
        "KeyError",
        """\
debug: rank 1 has left while others wait for it
  * rank 1 left the block of leaving+6 by KeyError: 'hook', after 2 calls; the last was with_sharding (all_gather) over 'a' of f32[2] (dim 0) at raises_in_a_hook+2
  * ranks 0, 2 wait in unshard (all_gather) over 'a' of f32[2] (dim 0) at raises_in_a_hook+5""",
    ),
    leaves_python: (
        "SystemExit",
        """\
debug: rank 1 has left while others wait for it
  * rank 1 left the block of leaving+6 by SystemExit: 3, before its first call
  * ranks 0, 2 wait in shard on mesh (a=3) of x: f32[6] at leaves_python+3""",
    ),
    sleeps: (
        "DivergenceError",
        """\
debug: after 1 s not all ranks have come
  * ranks 0, 2 wait in shard_map(<lambda>) on mesh (a=3) of args[0]: f32[6] (in_specs=P('a'), out_specs=P()) at body+3
  * rank 1 is at sleeps+3, after 3 calls; the last was the results of shard_map(<lambda>) on mesh (a=3) of out: f32[2] at body+3""",
    ),
}


def leaving(programs):
    """On each rank: what each program raises, in a debug block of its own."""
    mesh, said = vfn.make_mesh((3,), ("a",)), {}
    for program in programs:
        said[program.__name__] = ("", "")
        try:
            with vfn.debug(timeout=1.0 if program is sleeps else 20):
                program(mesh, dist.get_rank(), torch.arange(6.0))
        except BaseException as error:
            said[program.__name__] = (type(error).__name__, plain(str(error)))
    return said


def test_ranks_that_leave(gloo):
    first, other, third = gloo(3, leaving, list(LEAVINGS))
    assert first == third, "on every rank that waits the same text"
    for program, (own, text) in LEAVINGS.items():
        assert first[program.__name__] == ("DivergenceError", text)
        assert other[program.__name__][0] == own
    assert other["sleeps"] == first["sleeps"], "it hears of it when it comes"


# --- debug mode: more than one group ----------------------------------------------------------------------------------


def groups_on_their_own(mesh, rank, x):
    """Within a group all do the same; the groups do not: rows of the mesh sum over b once and twice."""

    def f(x):
        y = vfn.psum(x, "b")
        if rank < 2:
            y = vfn.psum(vfn.pvary(y, "b"), "b")
        return vfn.psum(vfn.pvary(y, "b"), ("a", "b"))

    return body(mesh, f, x, in_specs=P(("a", "b"))).tolist()


def one_group_parts_ways(mesh, rank, x):
    """Ranks 1 and 3 differ over a; ranks 0 and 2 agree, and hear of it where all four meet."""

    def f(x):
        y = vfn.psum(x[: 1 + (rank == 3)], "a")
        return vfn.psum(vfn.pvary(y, "a"), ("a", "b"))

    body(mesh, f, x, in_specs=P(("a", "b")))


def a_ring(mesh, rank, x):
    """0 waits for 2 over a, 2 for 3 over b, 3 for 1 over a, 1 for 0 over b."""

    def f(x):
        first, second = ("a", "b") if rank in (0, 3) else ("b", "a")
        return vfn.psum(vfn.psum(x, first), second)

    body(mesh, f, x, in_specs=P(("a", "b")))


def in_groups(programs):
    mesh, said = vfn.make_mesh((2, 2), ("a", "b")), []
    for program in programs:
        try:
            with vfn.debug(timeout=20):
                said.append(program(mesh, dist.get_rank(), torch.arange(8.0)))
        except DivergenceError as error:
            said.append(plain(str(error)))
    return said


def test_groups_are_compared_each_for_itself(gloo):
    said = gloo(4, in_groups, [groups_on_their_own, one_group_parts_ways, a_ring])
    alone, parted, ring = zip(*said, strict=True)
    # x = arange(8) in four blocks; over b: [2, 4] and [10, 12]; the first row once more: [4, 8]; then all of them
    assert alone == ([28.0, 40.0],) * 4
    problem = (
        """\
debug: the ranks differ in the shapes of psum
  * its value: f32[1] on rank 1, f32[2] on rank 3
  * psum over 'a' of f32[1] at one_group_parts_ways+4"""
        + SAME_TYPES
    )
    assert parted == (problem,) * 4
    text = (
        """\
debug: the ranks wait for each other, and none can go on
  * rank 0 waits for rank 2 in psum over 'a' of f32[2] at a_ring+5
  * rank 2 waits for rank 3 in psum over 'b' of f32[2] at a_ring+5
  * rank 3 waits for rank 1 in psum over 'a' of f32[2] at a_ring+5
  * rank 1 waits for rank 0 in psum over 'b' of f32[2] at a_ring+5"""
        + SAME
    )
    assert ring == (text,) * 4


# --- debug mode in a launch -------------------------------------------------------------------------------------------


def launched(program, n=2, timeout=90.0, debug=None):
    """What `launch` says of ``program(mesh, rank, x)``, and after how many seconds."""

    def run():
        mesh = vfn.make_mesh((n, 1), ("a", "b"))
        if debug is None:
            return program(mesh, dist.get_rank(), torch.arange(2.0 * n))
        with vfn.debug(timeout=debug):
            return program(mesh, dist.get_rank(), torch.arange(2.0 * n))

    start = time.monotonic()
    with pytest.raises(RankError) as error:
        vfn.launch(run, n, device="cpu", timeout=timeout)
    return plain(str(error.value)).splitlines(), time.monotonic() - start


def is_killed(mesh, rank, x):
    body(mesh, lambda x: vfn.psum(x, "a"), x)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    body(mesh, lambda x: vfn.psum(x, "a"), x)


def test_in_debug_mode_the_rank_that_failed_still_comes_first():
    lines, seconds = launched(raises_inside, debug=90)
    assert lines[0] == "launch: rank 1 of 2 raised RuntimeError; the other ranks were ended"
    assert "RuntimeError: shape '[7]' is invalid for input of size 2" in lines
    assert lines[-1] == "After it, rank 0 raised DivergenceError: debug: rank 1 has left while others wait for it"
    assert seconds < 45  # long before the timeout


def test_in_debug_mode_a_killed_rank_is_noticed():
    lines, seconds = launched(is_killed, debug=90)
    assert lines == [
        "launch: rank 1 of 2 was killed by SIGKILL (out of memory?); the other ranks were ended",
        "After it, rank 0 raised DivergenceError: debug: rank 1 has died while others wait for it",
    ]
    assert seconds < 45  # long before the timeout


def entered_on_rank_0_alone(mesh, rank, x):
    if rank == 0:
        with vfn.debug(timeout=0.5):
            vfn.unshard(vfn.shard(x, mesh, P("a")))
    else:
        vfn.unshard(vfn.shard(x, mesh, P("a")))


def test_debug_mode_on_some_ranks_only():
    lines, _ = launched(entered_on_rank_0_alone)
    at = lines.index("vescale_fn.errors.DivergenceError: debug: after 0.5 s not all ranks have come")
    assert lines[at + 1 : at + 4] == [
        "  * rank 0 waits in shard on mesh (a=2, b=1) of x: f32[4] at entered_on_rank_0_alone+3",
        "  * rank 1 has not entered this block of vfn.debug()",
        "  Instead: `with vfn.debug():` on every rank, or on none",
    ]


# --- without debug mode -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "first", "own"),
    [
        (raises_before, "raised ValueError", "ValueError: mine"),
        (raises_inside, "raised RuntimeError", "RuntimeError: shape '[7]' is invalid for input of size 2"),
        (raises_in_the_backward_pass, "raised ValueError", "ValueError: in the backward pass"),
        (raises_in_a_hook, "raised KeyError", "KeyError: 'hook'"),
        (leaves_python, "called sys.exit(3)", "SystemExit: 3"),
        (is_killed, "was killed by SIGKILL (out of memory?)", ""),
    ],
)
def test_a_rank_that_fails_ends_the_job_with_its_own_traceback_first(program, first, own):
    lines, seconds = launched(program)
    assert lines[0] == f"launch: rank 1 of 2 {first}; the other ranks were ended"
    if own:
        trace = lines[: lines.index(own)]
        assert trace[1:3] == ["", "Traceback (most recent call last):"]
        assert not any("After it" in line or "Connection" in line for line in trace)
        assert any(program.__name__ in line or " in then" in line or "<lambda>" in line for line in trace)
    assert seconds < 45  # long before the timeout


def sleeps_long(mesh, rank, x):
    if rank == 1:
        time.sleep(60)
    body(mesh, lambda x: vfn.psum(x, "a"), x)


def other_sizes(mesh, rank, x):
    faulthandler.disable()  # gloo ends the process, and Python would say at length where it was
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    other_specs(mesh, rank, x)


@pytest.mark.parametrize(
    ("program", "firsts", "lasts"),
    [
        (
            sleeps_long,
            ["launch: rank 0 of 2 raised RuntimeError; the other ranks were ended"],
            ["Meanwhile rank 1 was at sleeps_long+2."],
        ),
        (
            another_collective,
            [f"launch: rank {i} of 2 raised RuntimeError; the other ranks were ended" for i in range(2)],
            [
                "After it, rank 0 raised RuntimeError at another_collective+3: ",
                "After it, rank 1 raised RuntimeError at another_collective+4: ",
            ],
        ),
        (
            a_call_left_out,
            [
                "launch: rank 1 of 2 waited in a collective that others had left out: rank 0 had returned by "
                "then. It raised RuntimeError; the other ranks were ended"
            ],
            [""],
        ),
        (other_sizes, ["launch: rank 1 of 2 was killed by SIGABRT; the other ranks were ended"], [""]),
    ],
)
def test_ranks_that_wait_in_vain_end_with_the_timeout(program, firsts, lasts):
    lines, seconds = launched(program, timeout=0.5)
    assert lines[0] in firsts
    *_, last, hint = lines
    assert any(last.startswith(words) for words in lasts)
    assert hint == "Under `with vfn.debug():` ranks whose calls differ say so, and which."
    assert seconds < 45


def runs_into_a_timeout_of_its_own(mesh, rank, x):
    if rank == 1:
        time.sleep(0.2)
        raise TimeoutError("the server timed out")


def test_a_timeout_of_the_users_is_not_taken_for_that_of_a_collective():
    lines, _ = launched(runs_into_a_timeout_of_its_own)
    assert lines[0] == "launch: rank 1 of 2 raised TimeoutError; the other ranks were ended"
    assert lines[-1] == "By then rank 0 had returned."


def caught_alike():
    """Errors that all ranks raise alike, before anything moves, in the forward and the backward pass."""
    mesh, x = vfn.make_mesh((2,), ("a",)), torch.arange(8.0)

    def refuse(gradient):
        raise ValueError("on every rank")

    for debug in (False, True):
        for _ in range(2):
            with vfn.debug() if debug else vfn.use_mesh(mesh):
                with pytest.raises(CollectiveError):
                    body(mesh, lambda x: vfn.psum_scatter(x[:3], "a", tiled=True), x, out_specs=P("a"))
                with pytest.raises(SpecError):
                    body(mesh, lambda x: vfn.psum(x, "a"), x[:3])
                f = vfn.shard_map(
                    lambda w, x: vfn.psum((Breaks.apply(w, refuse) * x).sum(), "a"),
                    mesh=mesh,
                    in_specs=(P(), P("a")),
                    out_specs=P(),
                )
                with pytest.raises(ValueError, match="on every rank"):
                    vfn.grad(lambda w, f=f: f(w, x))(torch.ones(4))
                assert body(mesh, lambda x: vfn.psum(x.sum(), "a"), x) == 28
    return True


def test_an_error_that_all_ranks_catch_leaves_them_usable(gloo):
    assert gloo(2, caught_alike) == [True, True]


def digest():
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    w = vfn.random.normal(vfn.random.key(0), (16, 12), spec=P(None, "tp"), mesh=mesh)
    x = vfn.random.normal(vfn.random.key(1), (32, 16), spec=P("dp"), mesh=mesh)
    return vfn.digest(vfn.grad(lambda w: torch.tanh(x @ w).square().mean())(w))


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    """The ranks' places; the bits of one process under deterministic; a divergence that is caught, through torchrun's own
    store; a rank that fails while the other waits."""
    script = """
        import os, torch, torch.distributed as dist, vescale_fn as vfn
        from vescale_fn import P
        from vescale_fn._core.distributed import ranks
        DIGEST
        place = ranks.ensure_process_group()
        one = torch.ones(1); dist.all_reduce(one)
        os.write(1, f"{place} {one.item()} {ranks.device_type()}\\n".encode())  # at once: two ranks share the pipe
        mode = vfn.deterministic(virtual=4)
        os.write(1, f"digest {digest()}\\n".encode())
        with mode:
            pass  # it ends
        mesh, x = vfn.make_mesh((2,), ("a",)), torch.arange(4.0)
        rank = dist.get_rank()
        with vfn.debug():
            try:
                vfn.shard_map(lambda x: vfn.psum(x[:1 + rank], "a"), mesh=mesh, in_specs=P("a"), out_specs=P())(x)
            except vfn.errors.DivergenceError as error:
                os.write(1, (str(error).splitlines()[1] + "\\n").encode())
            total = vfn.unshard(vfn.shard(x, mesh, P("a")).sum())
        os.write(1, f"{total.item()}\\n".encode())
        if rank == 1:
            raise ValueError("of rank 1 alone")
        dist.all_reduce(x)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script).replace("DIGEST", inspect.getsource(digest)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env["PYTHONPATH"]])
    done = subprocess.run([*command, str(tmp_path / "script.py")], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    places = ["(0, 2) 2.0 cpu", "(1, 2) 2.0 cpu"]
    twice = ["  * its value: f32[1] on rank 0, f32[2] on rank 1", "6.0"] * 2
    with vfn.deterministic(virtual=4):
        twice += [f"digest {digest()}"] * 2
    assert sorted(done.stdout.splitlines()) == sorted(places + twice)
    assert done.stderr.index("ValueError: of rank 1 alone") < (done.stderr + "Connection").index("Connection")


# --- the parts --------------------------------------------------------------------------------------------------------


def test_outside_debug_mode_nothing_is_posted_and_inside_a_simulation_neither(monkeypatch):
    def refuse(*_):
        raise AssertionError("nothing should be compared here")

    monkeypatch.setattr("vescale_fn._core.distributed.divergence.Watch.compare", refuse)
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("a",))
        for _ in range(2):
            assert context.watch() is None
            with vfn.debug():
                watch = context.watch()
                with vfn.debug():  # an inner block is part of the outer one
                    assert context.watch() is watch
                assert context.watch() is watch
                assert body(mesh, lambda x: vfn.psum(x.sum(), "a"), torch.arange(4.0)) == 6
                vfn.shard(torch.arange(4.0), mesh, P("a")) + torch.ones(4)
                vfn.grad(lambda x: vfn.with_sharding(x, P("a"), mesh=mesh).sum())(torch.ones(4))
    assert context.watch() is None


def test_a_group_without_other_processes_is_not_waited_for():
    dist.init_process_group("fake", rank=0, world_size=4, store=dist.HashStore())
    try:
        mesh = vfn.make_mesh((4,), ("a",))
        with vfn.debug(timeout=0.1):
            assert body(mesh, lambda x: vfn.psum(x, "a"), torch.arange(4.0)).shape == (1,)
    finally:
        dist.destroy_process_group()


def test_the_board():
    store = dist.HashStore()
    one, two = (Board(store, rank, (1,), f"line {rank}") for rank in (3, 5))
    group = (3, 5)
    assert one.card(5)["entered"] == "line 5"
    assert one.card(4) is None
    assert one.post(group, {"what": "a"}, "a") == 1
    assert two.calls(group, 1, group) == {3: {"what": "a"}}
    assert two.post(group, {"what": "b"}, "b") == 1
    assert one.calls(group, 1, [5]) == {5: {"what": "b"}}
    assert one.card(5) | {"call": "b", "count": 1, "number": 1, "group": [3, 5], "left": None} == one.card(5)
    assert one.verdict(group, 1) is None
    assert one.settle(group, 1, ["first", False]) == ["first", False]
    assert two.settle(group, 1, None) == two.verdict(group, 1) == ["first", False], "the first word holds for all"
    assert two.settle(group, 2, None) is None
    assert one.settle(group, 2, ["late", False]) is None
    one.forget(group, 1)
    assert one.calls(group, 1, group) == {5: {"what": "b"}}
    assert one.verdict(group, 1) is None
    two.leave(" by KeyError: 3", "text")
    assert (one.card(5)["left"], one.card(5)["error"]) == (" by KeyError: 3", "text")
    one.leave("", None)


def test_the_board_sees_that_a_process_has_ended():
    board = Board(dist.HashStore(), 0, (1,), "here")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    card = {**board.card(0), "pid": child.pid}
    assert not board.is_gone(card)
    assert not board.is_gone(board.card(0))
    child.kill()
    end = time.monotonic() + 10
    while not board.is_gone(card):  # a zombie, until it is waited for
        assert time.monotonic() < end
        time.sleep(0.01)
    child.communicate()
    assert board.is_gone(card)
    assert not board.is_gone({**card, "place": "another machine"})
    board.leave("", None)


def test_of_many_ranks_and_values_some_are_listed():
    values = [tuple(Value(f"x[{i}]", f"f32[{i + rank % 2}]") for i in range(20)) for rank in range(30)]
    text = different({rank: RankCall("psum", "over 'a'", v, line="a.py:1") for rank, v in enumerate(values)})
    lines = text.splitlines()
    assert lines[1] == (
        "  * x[0]: f32[0] on ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (15 in all), "
        "f32[1] on ranks 1, 3, 5, 7, 9, 11, 13, 15, ... (15 in all)"
    )
    assert (
        lines[11]
        == "  * psum over 'a' of x[0]: f32[0], x[1]: f32[1], x[2]: f32[2], x[3]: f32[3], ... 20 in all at a.py:1"
    )
    assert len(lines) == 13


@pytest.mark.parametrize(
    ("row", "one", "other"),
    [
        ("all_gather", {"dim": 0}, {"dim": 1}),
        ("all_gather", {"tiled": False}, {"tiled": True}),
        ("all_gather_invariant", {"dim": 0}, {"dim": 1}),
        ("psum_scatter", {"dim": 0}, {"dim": 1}),
        ("psum_scatter", {"tiled": False}, {"tiled": True}),
        ("all_to_all", {"dim": 0, "other": 1}, {"dim": 1, "other": 1}),
        ("all_to_all", {"dim": 0, "other": 1}, {"dim": 0, "other": 0}),
        ("ppermute", {"perm": ((0, 1),)}, {"perm": ((1, 0),)}),
        ("pbroadcast", {"source": 0}, {"source": 1}),
    ],
)
def test_what_a_collective_tells_of_its_parameters(row, one, other):
    """A parameter that were left out could not be seen to differ."""
    mine, theirs = (
        collective_maps.CollectiveMap(row, None, ("a",), row, **parameters).told() for parameters in (one, other)
    )
    assert mine != theirs
