"""Rows of a split table: the numbers of one device, what travels, what is made, what does not fit."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from test_nn_cross_entropy import Largest

import vescale_fn as vfn
from vescale_fn import P, nn
from vescale_fn._core.arrays import aliasing
from vescale_fn.errors import CollectiveError, MeshError
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


def made(count=12):
    return torch.randint(count, (4, 6)), torch.randn(count, 8, dtype=F64), torch.randn(4, 6, 8, dtype=F64)


def gradients(f, ids, table, weights):
    return vfn.value_and_grad(lambda table: ((f(ids, table) * weights).sum(), f(ids, table)), has_aux=True)(table)


@pytest.mark.parametrize("case", MESHES)
@pytest.mark.parametrize(("count", "padding"), [(12, None), (13, -2), (3, 1)])  # even; uneven; ranks without rows
def test_values_and_gradients_are_those_of_one_device(case, count, padding):
    shape, names, of_ids, of_table, axis = MESHES[case]
    ids, table, weights = made(count)
    (_, rows), want = gradients(lambda i, t: F.embedding(i, t, padding), ids, table, weights)
    assert padding is None or not want[padding].any()
    with vfn.simulate(math.prod(shape)):
        there = vfn.shard((ids, table), vfn.make_mesh(shape, names), (of_ids, of_table))
        ours, own = (
            lambda i, t: embedding(i, t, padding_idx=padding, axis=axis),
            lambda i, t: F.embedding(i, t, padding),
        )
        for f in (ours,) if axis else (ours, own):
            with vfn.strict() if f is ours or not shared(of_ids, of_table) else contextlib.nullcontext():
                (_, out), found = gradients(f, *there, weights)
            assert torch.equal(vfn.unshard(out), rows)  # a row and zeros: exact
            torch.testing.assert_close(vfn.unshard(found), want, rtol=1e-12, atol=1e-15)
            assert vfn.spec_of(found) == of_table


def shared(of_ids, of_table):
    axes = lambda spec: {a for entry in spec if entry for a in (entry if isinstance(entry, tuple) else (entry,))}
    return axes(of_ids) & axes(of_table)


def test_rows_that_are_no_contiguous_part_are_gathered():
    """Uneven rows over two axes in an order that is not the mesh's: a rank's rows are here and there."""
    ids, table, weights = made(13)
    (_, rows), want = gradients(F.embedding, ids, table, weights)
    with vfn.simulate(6):
        there = vfn.shard(table, vfn.make_mesh((3, 2), ("a", "b")), P(("b", "a")))
        (_, out), found = gradients(embedding, ids, there, weights)
        assert vfn.spec_of(out) == P()
        assert torch.equal(vfn.unshard(out), rows)
        torch.testing.assert_close(vfn.unshard(found), want, rtol=1e-12, atol=1e-15)
        loss = lambda x, w: nn.linear_cross_entropy(x, w, ids)
        want = vfn.grad(lambda x, w: F.cross_entropy((x @ w.mT).flatten(0, 1), ids.flatten()), (0, 1))(weights, table)
        torch.testing.assert_close(vfn.unshard(vfn.grad(loss, (0, 1))(weights, there)), want, rtol=1e-12, atol=1e-15)


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
        local = vfn.shard_map(
            lambda i, t: vfn.psum(embedding(i, t, axis="tp"), "tp"),
            mesh=mesh,
            in_specs=(P("dp"), P("tp")),
            out_specs=P("dp"),
        )
        close(vfn.grad(lambda table: (local(ids, table) ** 2 * weights).sum())(table))
        local = vfn.shard_map(
            lambda i, t: vfn.psum(embedding(i, t, padding_idx=-3, axis="tp"), "tp"),
            mesh=mesh,
            in_specs=(P("dp"), P("tp")),
            out_specs=P("dp"),
        )
        want[-3] = 0
        close(vfn.grad(lambda table: (local(ids, table) ** 2 * weights).sum())(table))


@pytest.mark.parametrize("f", [embedding, F.embedding], ids=["ours", "torch's own"])
def test_what_travels_and_what_is_made(f):
    ids, table, weights = torch.randint(64, (4, 2)), torch.randn(64, 8), torch.randn(4, 2, 8)
    block = 2 * 2 * 8 * 4  # bytes of a rank's part of the result
    with vfn.simulate(8):
        mesh = vfn.make_mesh((2, 4), ("dp", "tp"))
        ids, table = vfn.shard((ids, table), mesh, (P("dp"), P("tp")))
        with vfn.comm_log() as log, Largest() as seen:
            out, back = vfn.vjp(lambda table: f(ids, table), table)
            assert log.count() == 0
            assert vfn.spec_of(out) == P("dp", unreduced={"tp"})
            torch.relu(out)
            vfn.with_sharding(out * 2, P("dp", None, "tp"))
            back(vfn.shard(weights, mesh, P("dp", reduced={"tp"})))
        assert seen.size == 64 * 8 // 4  # a rank's rows, and their gradient
        assert [(c.op, c.axes, c.bytes) for c in log] == [
            ("all_reduce", ("tp",), block),
            ("reduce_scatter", ("tp",), block),
            ("all_reduce", ("dp",), 64 * 8 * 4 // 4),
        ]


def test_ids_that_are_no_rows():
    ids, table, _ = made()
    ids[1, 2], ids[3, 4] = 12, -1
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("tp",))
        for f in (embedding, F.embedding):
            for wrong in (ids.clamp(min=0), ids.clamp(max=11)):
                with pytest.raises(IndexError, match="index out of range"):  # torch's own error, as on one device
                    f(wrong, vfn.shard(table, mesh, P("tp")))
        local = vfn.shard_map(
            lambda i, t: vfn.psum(embedding(i, t, axis="tp"), "tp"), mesh=mesh, in_specs=(P(), P("tp")), out_specs=P()
        )
        out = vfn.unshard(local(ids, table))
    assert out.isnan().all(-1).nonzero().tolist() == [[1, 2], [3, 4]]
    assert out.isnan().sum() == 2 * 8


def test_how_a_table_lay_is_forgotten_with_its_indices_and_no_other_table_is_taken_for_it():
    """Two tables of one shape are read at the same indices, and only one is split; the gradients are right all the same."""
    ids, table, weights = made()
    f = lambda a, b, ids=ids: ((F.embedding(ids, a) + 2 * F.embedding(ids, b)) * weights).sum()
    before = len(aliasing._tables)
    want = vfn.grad(f, (0, 1))(table, table)
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("tp",))
        there = vfn.shard(table, mesh, P("tp")), vfn.shard(table, mesh, P(None, "tp"))
        found = vfn.grad(f, (0, 1))(*there)
        assert [vfn.spec_of(g) for g in found] == [P("tp"), P(None, "tp")]
        torch.testing.assert_close(vfn.unshard(found), want, rtol=1e-12, atol=1e-15)
    assert len(aliasing._tables) == before + 1
    del ids, f
    assert len(aliasing._tables) == before


def lines_of(call):
    with pytest.raises(CollectiveError) as error:
        call()
    return str(error.value).splitlines()


def test_messages():
    ids, table, _ = made()
    assert lines_of(lambda: embedding(table, ids, padding_idx=True)) == [
        "nn.embedding: the arguments do not fit",
        "  * ids must be an int64 or int32 tensor, but it is the tensor f64[12,8]",
        "  * table must be a float tensor [rows, width], but it is the tensor i64[4,6]",
        "  * padding_idx must be the number of a row, or None, but it is the bool True",
    ]
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("tp",))
        there = vfn.shard(table, mesh, P("tp"))
        body = vfn.shard_map(
            lambda i, t: embedding(i, t, axis="tq"), mesh=mesh, in_specs=(P(), P("tp")), out_specs=P("tp")
        )
        for call in (lambda: embedding(ids, there, axis="tq"), lambda: body(ids, table)):
            with pytest.raises(MeshError) as error:
                call()
            assert str(error.value).splitlines() == [
                "nn.embedding: axis='tq' does not name axes of the mesh (tp=2)",
                "  * 'tq' is not one of the axes ('tp',)",
                "  Instead: axis='tp'",
            ]


def on_ranks(ids, table, weights):
    there = vfn.shard((ids, table), vfn.make_mesh((2,), ("tp",)), (P(), P("tp")))
    ours = lambda ids, table: gradients(embedding, ids, table, weights)
    own = lambda ids, table: gradients(F.embedding, ids, table, weights)
    return vfn.unshard((ours(*there), vfn.jit(own)(*there)))


def test_on_real_ranks(gloo):
    ids, table, weights = made(13)
    (_, rows), want = gradients(F.embedding, ids, table, weights)
    for found in gloo(2, on_ranks, ids, table, weights):
        for (_, out), grad in found:
            assert torch.equal(out, rows)
            torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-15)
