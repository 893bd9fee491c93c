"""Rows of a split table: the numbers of one device, what travels, what is made, what does not fit."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_nn_cross_entropy import Largest

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import CollectiveError
from vescale_fn.nn import embedding

F64 = torch.float64
MESHES = {
    "rows": ((4,), ("tp",), P(), P("tp"), None),
    "rows, and ids": ((2, 2), ("dp", "tp"), P("dp"), P("tp"), None),
    "rows and width, and ids": ((2, 2, 2), ("dp", "tp", "x"), P("dp"), P("tp", "x"), None),
    "rows as the ids too": ((2, 2), ("dp", "tp"), P("dp"), P(("tp", "dp")), None),
    "rows as the ids alone": ((2, 1), ("dp", "tp"), P("dp"), P("dp"), None),
    "width as the ids": ((2, 2), ("dp", "tp"), P(None, "dp"), P("tp", "dp"), None),
    "ids as the rows": ((2, 2), ("dp", "tp"), P("dp", "tp"), P("tp"), "tp"),
    "rows over two axes, minor first": ((2, 2), ("a", "b"), P(), P(("b", "a")), None),
}


def made():
    return torch.randint(12, (4, 6)), torch.randn(12, 8, dtype=F64), torch.randn(4, 6, 8, dtype=F64)


def gradients(f, ids, table, weights):
    return vfn.value_and_grad(lambda table: ((f(ids, table) * weights).sum(), f(ids, table)), has_aux=True)(table)


@pytest.mark.parametrize("case", MESHES)
def test_values_and_gradients_are_those_of_one_device(case):
    shape, names, of_ids, of_table, axis = MESHES[case]
    ids, table, weights = made()
    (_, rows), want = gradients(F.embedding, ids, table, weights)
    with vfn.simulate(math.prod(shape)):
        there = vfn.shard((ids, table), vfn.make_mesh(shape, names), (of_ids, of_table))
        with vfn.strict():
            (_, out), found = gradients(lambda i, t: embedding(i, t, axis=axis), *there, weights)
        assert torch.equal(vfn.unshard(out), rows)  # a row and zeros: exact
        torch.testing.assert_close(vfn.unshard(found), want, rtol=1e-12, atol=1e-15)
        assert vfn.spec_of(found) == of_table


def test_as_a_plan_under_transforms_and_in_a_body():
    ids, table, weights = made()
    f = lambda table, ids: (embedding(ids, table) ** 2 * weights).sum()
    want = vfn.grad(lambda table: (table[ids] ** 2 * weights).sum())(table)
    close = lambda found: torch.testing.assert_close(vfn.unshard(found), want, rtol=1e-12, atol=1e-15)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        there = vfn.shard((table, ids), mesh, (P("tp"), P("dp")))
        close(vfn.jit(vfn.grad(f))(*there))
        close(vfn.grad(vfn.remat(f))(*there))
        close(torch.func.grad(f)(*there))
        each = vfn.vmap(lambda ids: embedding(ids, there[0]))(vfn.shard(ids, mesh, P(None, "dp")))
        assert torch.equal(vfn.unshard(each), table[ids])
        local = vfn.shard_map(lambda i, t: vfn.psum(embedding(i, t, axis="tp"), "tp"), mesh=mesh,
                              in_specs=(P("dp"), P("tp")), out_specs=P("dp"))  # fmt: skip
        close(vfn.grad(lambda table: (local(ids, table) ** 2 * weights).sum())(table))


def test_what_travels_and_what_is_made():
    ids, table, weights = torch.randint(64, (4, 2)), torch.randn(64, 8), torch.randn(4, 2, 8)
    block = 2 * 2 * 8 * 4  # bytes of a rank's part of the result
    with vfn.simulate(8):
        mesh = vfn.make_mesh((2, 4), ("dp", "tp"))
        ids, table = vfn.shard((ids, table), mesh, (P("dp"), P("tp")))
        with vfn.comm_log() as log, Largest() as seen:
            out, back = vfn.vjp(lambda table: embedding(ids, table), table)
            assert log.count() == 0
            assert vfn.spec_of(out) == P("dp", unreduced={"tp"})
            torch.relu(out)
            vfn.with_sharding(out * 2, P("dp", None, "tp"))
            back(vfn.shard(weights, mesh, P("dp", reduced={"tp"})))
        assert seen.size == 64 * 8 // 4  # a rank's rows, and their gradient
        assert [(c.op, c.axes, c.bytes) for c in log] == [
            ("all_reduce", ("tp",), block), ("reduce_scatter", ("tp",), block), ("all_reduce", ("dp",), 64 * 8 * 4 // 4)]  # fmt: skip


def test_ids_that_are_no_rows():
    ids, table, _ = made()
    ids[1, 2], ids[3, 4] = 12, -1
    with vfn.simulate(4):
        out = vfn.unshard(embedding(ids, vfn.shard(table, vfn.make_mesh((4,), ("tp",)), P("tp"))))
    assert out.isnan().all(-1).nonzero().tolist() == [[1, 2], [3, 4]]
    assert out.isnan().sum() == 2 * 8


def lines_of(call):
    with pytest.raises(CollectiveError) as error:
        call()
    return str(error.value).splitlines()


def test_messages():
    ids, table, _ = made()
    assert lines_of(lambda: embedding(table, ids)) == [
        "nn.embedding: the arguments do not fit",
        "  * ids must be an int64 or int32 tensor, but it is the tensor f64[12,8]",
        "  * table must be a float tensor [rows, width], but it is the tensor i64[4,6]",
    ]
    with vfn.simulate(5):
        table = vfn.shard(table, vfn.make_mesh((5,), ("tp",)), P("tp"))
        assert lines_of(lambda: embedding(ids, table)) == [
            "nn.embedding: the ranks' parts would differ in size",
            "  * the number of the table's rows does not divide by the 5 ranks along 'tp': 12 % 5 = 2",
            "  Instead: pad the table with rows that no id names; or F.embedding, which takes any sizes and gathers",
        ]


def on_ranks(ids, table, weights):
    there = vfn.shard((ids, table), vfn.make_mesh((2,), ("tp",)), (P(), P("tp")))
    step = lambda ids, table: gradients(embedding, ids, table, weights)
    return vfn.unshard((step(*there), vfn.jit(step)(*there)))


def test_on_real_ranks(gloo):
    ids, table, weights = made()
    (_, rows), want = gradients(F.embedding, ids, table, weights)
    for found in gloo(2, on_ranks, ids, table, weights):
        for (_, out), grad in found:
            assert torch.equal(out, rows)
            torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-15)
