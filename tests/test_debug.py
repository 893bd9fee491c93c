"""Seeing: the log of collectives, and where everything lies."""

import asyncio
import html.parser
import inspect
import linecache
import math
import pickle
import re
import threading
import weakref

import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P, random
from vescale_fn._core.base import context, op_lines
from vescale_fn._core.distributed import mesh


@pytest.fixture
def grid():
    """A simulated mesh (dp=2, tp=3)."""
    with vfn.simulate(6):
        yield vfn.make_mesh((2, 3), ("dp", "tp"))


def line() -> int:
    return inspect.currentframe().f_back.f_lineno


# --- comm_log ---------------------------------------------------------------------------------------------------------


def test_a_record(grid) -> None:
    x = vfn.shard(torch.ones(6, 4), grid, P("dp", None))
    with vfn.comm_log() as log:
        x.cumsum(0)
        here = line() - 1
    (record,) = log
    assert (record.op, record.axes, record.axis) == ("all_gather", ("dp",), "dp")
    assert record.bytes == 6 * 4 * 4, "the larger of what goes in and what comes out, on one rank"
    assert record.why == "cumsum needs dim 0 whole: f32[6@dp,4]"
    assert record.line == f"{__file__}:{here}"


def test_counts_and_bytes(grid) -> None:
    x = vfn.shard(torch.ones(6, 6, dtype=torch.float64), grid, P("dp", "tp"))
    with vfn.comm_log() as log:
        vfn.with_sharding(x, P("tp", "dp"))
        vfn.unshard(x.sum())
        vfn.unshard(x)
    assert log.count() == len(log) == len(log.records)
    assert log.count("all_reduce") == log.count("all_reduce", ("dp", "tp")) == 1
    assert log.count("all_reduce", "dp") == 0
    assert log.bytes("all_reduce") == 8
    assert log.count("reduce_scatter") == 0
    assert log[-1].op == "all_gather"
    assert log.bytes() == sum(record.bytes for record in log)


def test_forward_and_backward_lines(grid) -> None:
    """What runs in the backward pass, on autograd's own thread or in a checkpoint, is logged at the user's line as well."""
    w = vfn.shard(torch.ones(6, 6), grid, P("dp")).requires_grad_()
    with vfn.comm_log() as log:
        y = (vfn.with_sharding(w, P()) ** 2).sum()
        y.backward()
        backward = line() - 1
    ops = {record.op: record for record in log}
    assert ops["all_gather"].line == f"{__file__}:{backward - 1}"
    assert ops["all_gather"].why == "with_sharding"
    if "reduce_scatter" in ops:
        assert ops["reduce_scatter"].line == f"{__file__}:{backward}"
    with vfn.comm_log() as log:
        vfn.grad(vfn.remat(lambda w: (vfn.with_sharding(w, P()) ** 2).sum()))(w.detach())
        here = line() - 1
    assert {record.line for record in log} == {f"{__file__}:{here}"}
    assert log.count("all_gather") == 2


def test_logs_nest_and_end(grid) -> None:
    x = vfn.shard(torch.ones(6), grid, P("dp"))
    with vfn.comm_log() as outer:
        vfn.unshard(x)
        with vfn.comm_log() as inner:
            vfn.unshard(x)
        vfn.unshard(x)
    vfn.unshard(x)
    assert (len(outer), len(inner)) == (3, 1)
    with pytest.raises(RuntimeError), vfn.comm_log() as log:
        raise RuntimeError
    vfn.unshard(x)
    assert len(log) == 0


def test_a_log_as_text(grid) -> None:
    x = vfn.shard(torch.ones(6), grid, P("dp"))
    with vfn.comm_log() as log:
        assert repr(log) == "no collective"
        vfn.unshard(x)
        here = line() - 1
    head, row = repr(log).splitlines()
    assert head.split() == ["op", "axis", "bytes", "why", "line"]
    assert row.split() == ["all_gather", "dp", "24", "unshard", f"{__file__}:{here}"]


def test_nothing_over_size_one_axes() -> None:
    with vfn.simulate(2):
        m = vfn.make_mesh((1, 2), ("a", "b"))
        x = vfn.shard(torch.ones(4), m, P("a"))
        with vfn.comm_log() as log:
            vfn.unshard(x.sum())
            vfn.unshard(x)
    assert len(log) == 0


def _log_of_a_step():
    m = vfn.make_mesh((2, 2), ("dp", "tp"))
    w = vfn.shard(torch.ones(6, 4), m, P(None, "tp"))
    x = vfn.shard(torch.ones(2, 6), m, P("dp"))
    with vfn.comm_log() as log:
        vfn.grad(lambda w: ((x @ w).relu() ** 2).sum())(w)
        vfn.with_sharding(w, P("tp"))
        vfn.unshard(x)
    return [(r.op, r.axes, r.bytes, r.why, r.line) for r in log]


def test_real_ranks_log_what_simulated_ranks_log(gloo) -> None:
    with vfn.simulate(4):
        expected = _log_of_a_step()
    assert len(expected) >= 3
    assert gloo(4, _log_of_a_step) == [expected] * 4


# --- needless ---------------------------------------------------------------------------------------------------------


def test_moves_that_another_layout_would_avoid_are_named() -> None:
    """What an op caused, by line and value; no sum, no move that was asked for, forward or backward."""

    def f(x, w):
        h = vfn.with_sharding(x, P("dp", "tp")) @ w
        return sum(x.cumsum(0).sum() for _ in range(2)) + h.view(2, 3, 4).flip(0).sum()

    x, w = torch.ones(6, 4), torch.ones(4, 4)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        with vfn.comm_log() as log:
            vfn.unshard(vfn.grad(f, (0, 1))(vfn.shard(x, mesh, P("dp")), vfn.shard(w, mesh, P(None, "tp"))))
        found = vfn.needless(log)
        assert len(log) > found.moves[0].times
        text = re.sub(r"\S*test_debug.py:\d+", "LINE", repr(found))
        assert text == NEEDLESS, text
        with vfn.comm_log() as log:
            vfn.unshard(vfn.shard(x, mesh, P("dp")).sum(1))
        assert repr(vfn.needless(log)) == "no move that another layout would avoid"


def test_a_plain_target_that_is_filled_by_slices_is_named() -> None:
    def f(x, made):
        made[:, 1:] = x[:, 1:]
        return made.sin()

    x = torch.ones(8, 4)
    with vfn.simulate(4):
        there = vfn.shard(x, vfn.make_mesh((4,), ("dp",)), P("dp"))
        for made, moves in ((torch.zeros(8, 4), 1), (there.new_zeros(8, 4), 0)):
            with vfn.comm_log() as log:
                y = f(there, made)
            torch.testing.assert_close(vfn.unshard(y), f(x, torch.zeros(8, 4)))
            found = vfn.needless(log)
            assert len(log) == len(found) == moves
            assert all("x.new_zeros(...)" in move.instead for move in found)


NEEDLESS = """\
moves that another layout or a rule would avoid: 320 bytes on each rank
LINE: `return sum(x.cumsum(0).sum() for _ in range(2)) + h.view(2, 3, 4).flip(0).sum()`
  all_gather over dp of f32[6@dp,4], 2 times, 192 bytes: cumsum needs dim 0 whole; the same value again
  Instead: x = vfn.with_sharding(x, P()) before it, once for all 2 uses; vfn.jit does so by itself
LINE: `return sum(x.cumsum(0).sum() for _ in range(2)) + h.view(2, 3, 4).flip(0).sum()`
  all_gather over dp of f32[2@dp,3,4]{U:tp}, 96 bytes: flip needs dim 0 whole
  Instead: x = vfn.with_sharding(x, P(unreduced={'tp'})) before flip
LINE: `h = vfn.with_sharding(x, P("dp", "tp")) @ w`
  all_to_all over tp of f32[4,4@tp], 32 bytes: mm needs f32[4@tp,4]
  Instead: both sides of the product split alike along the dim that is summed over, or this one as P('tp')"""


def moves_that_another_layout_would_avoid():
    """The log of a few moves, as text: gathered twice, without a rule, kept apart afterwards."""
    mesh = vfn.make_mesh((2,), ("dp",))
    x, w = (vfn.shard(torch.arange(32.0).view(s), mesh, P("dp")) for s in ((8, 4), (4, 8)))

    def f(x, w):
        z = vfn.with_sharding(vfn.with_sharding(x, P()).sin().view(8, 4), P(None, "dp"))
        h = (vfn.with_sharding(x, P(None, "dp")) @ w).relu()
        a, b = w.cumsum(0), w.sort(0).values
        for row in (x + 1, x + 2):
            a = a + row.flip(0).sum()
        torch.histc(x)
        v = w * 2
        again = vfn.with_sharding(v, P())
        c = v.cumsum(0)
        return z.sum() + vfn.with_sharding(h, P("dp")).sum() + a.sum() + b.sum() + again.sum() + c.sum()

    with vfn.comm_log() as log:
        vfn.grad(f, (0, 1))(x, w)
    return re.sub(r"\S*test_debug.py:\d+|line \d+", "LINE", repr(vfn.needless(pickle.loads(pickle.dumps(log)))))


def test_what_is_gathered_twice_or_then_kept_apart_is_named(gloo) -> None:
    with vfn.simulate(2):
        text = moves_that_another_layout_would_avoid()
    assert text == AVOIDED, text
    assert gloo(2, moves_that_another_layout_would_avoid) == [text] * 2


@pytest.mark.parametrize(
    ("program", "instead"),
    [
        (lambda x, y, v: vfn.with_sharding(y * v, P("dp")), ["P('dp')) to begin with: nothing moves over dp"]),
        (lambda x, y, v: vfn.with_sharding(y, P("tp", "dp")), ["P('tp', 'dp')", "P('tp', 'dp')"]),
        (lambda x, y, v: vfn.with_sharding(y.t(), P("tp", "dp")), ["x, ...", "x, ..."]),  # its dims are others
        (lambda x, y, v: vfn.shard_map(torch.sin, in_specs=P("dp"), out_specs=P("dp"))(y), ["nothing moves over dp"]),
        (lambda x, y, v: vfn.with_sharding((y + 1).mul_(v), P("tp")), ["P('tp')"]),
        # used, or read, whole besides
        (lambda x, y, v: (vfn.with_sharding(y, P("dp")), y.sum()), []),
        (lambda x, y, v: (vfn.with_sharding(y, P("dp")), vfn.unshard(y)), []),
        (lambda x, y, v: (vfn.with_sharding(y, P("dp")), y[:2] * 2), []),
        (lambda x, y, v: (vfn.with_sharding(y, P("dp")), vfn.shard_map(torch.sin, in_specs=P(), out_specs=P())(y)), []),
        (lambda x, y, v: vfn.with_sharding(y[:4], P("dp")), []),
        (lambda x, y, v: v * (y[:, :1] + vfn.shard(torch.zeros(8, 1), v.device_mesh, P("dp"))), []),
        (lambda x, y, v: vfn.with_sharding(y.softmax(0), P("dp")), []),
    ],
)
def test_what_each_rank_keeps_a_part_of_and_nothing_uses_whole(program, instead) -> None:
    """`y` is `x` gathered over both axes; the parts that are kept say what would have done."""
    with vfn.simulate(4), vfn.use_mesh(vfn.make_mesh((2, 2), ("dp", "tp"))):
        x, v = (vfn.shard(torch.ones(8, 4), vfn.current_mesh(), spec) for spec in (P("dp", "tp"), P()))
        with vfn.comm_log() as log:
            program(x, vfn.with_sharding(x, P()), v)
        found = [move.instead for move in vfn.needless(log)]
    assert len(found) == len(instead), found
    assert all(part in text for part, text in zip(instead, found)), found


def test_of_rows_that_are_picked_by_a_split_index_it_says_how_nothing_is_gathered() -> None:
    with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh((2,), ("dp",))):
        x, i = vfn.shard((torch.randn(5, 6, 4), torch.arange(5)), vfn.current_mesh(), P("dp"))
        with vfn.comm_log() as log:
            picked = x[torch.arange(5), i]
        assert [move.instead.split(",")[0] for move in vfn.needless(log)] == ["x.gather(1"]
        with vfn.comm_log() as log:
            again = x.gather(1, i[:, None, None].expand(-1, 1, 4)).squeeze(1)
        assert len(log) == 0
        assert torch.equal(vfn.unshard(again), vfn.unshard(picked))


def test_a_log_keeps_nothing_alive() -> None:
    with vfn.simulate(2), vfn.comm_log() as log:
        x = vfn.shard(torch.ones(8, 4), vfn.make_mesh((2,), ("dp",)), P("dp"))
        seen = weakref.ref(vfn.with_sharding(x, P()).relu().to_local().blocks[0].untyped_storage())
        assert seen() is None
        for _ in range(600):
            (x + 1).cumsum(0)
        assert len(log.flow._numbers) < 600


AVOIDED = """\
moves that another layout or a rule would avoid: 1,152 bytes on each rank
LINE: `h = (vfn.with_sharding(x, P(None, "dp")) @ w).relu()`
  all_reduce over dp of f32[8,8]{U:dp}, 256 bytes: relu needs the sum, and each rank then keeps its own part alone: P('dp') at LINE
  Instead: x = vfn.with_sharding(x, P('dp')) before relu: a reduce-scatter
LINE: `a, b = w.cumsum(0), w.sort(0).values`
  all_gather over dp of f32[4@dp,8], 2 times, 256 bytes: cumsum needs dim 0 whole; the same value again: sort needs dim 0 whole at LINE
  Instead: x = vfn.with_sharding(x, P()) before it, once for all 2 uses; vfn.jit does so by itself
LINE: `a = a + row.flip(0).sum()`
  all_gather over dp of f32[8@dp,4], 2 times, 256 bytes: flip needs dim 0 whole
  Instead: x = vfn.with_sharding(x, P()) before flip
LINE: `z = vfn.with_sharding(vfn.with_sharding(x, P()).sin().view(8, 4), P(None, "dp"))`
  all_gather over dp of f32[8@dp,4], 128 bytes: with_sharding makes it whole, but each rank then keeps its own part alone: P(None, 'dp') at LINE
  Instead: x = vfn.with_sharding(x, P(None, 'dp')) to begin with: an all-to-all
LINE: `torch.histc(x)`
  all_gather over dp of f32[8@dp,4], 128 bytes: gathered because aten.histc has no rule
  Instead: shard_map, if histc of each rank's block is enough; or the value laid out as P() for all its uses: x = vfn.with_sharding(x, P())
LINE: `c = v.cumsum(0)`
  all_gather over dp of f32[4@dp,8], 128 bytes: cumsum needs dim 0 whole; with_sharding gathers the same value at LINE
  Instead: what with_sharding gives there, for this use as well"""


# --- show -------------------------------------------------------------------------------------------------------------


def tree(grid):
    return {
        "w": vfn.shard(torch.zeros(6, 9), grid, P("dp", "tp")),
        "b": [vfn.shard(torch.zeros(7, dtype=torch.bfloat16), grid, P("tp")), torch.zeros(3)],
        "s": vfn.shard(torch.zeros(2), grid, P(unreduced={"dp"})),
        "z": vfn.shard(torch.tensor(1), grid, P()),
        "key": random.key(0),
        "n": 3,
        "none": None,
    }


def test_show_as_text(grid) -> None:
    with vfn.comm_log() as log:
        shown = vfn.show(tree(grid))
        text, page = repr(shown), shown._repr_html_()
    assert len(log) == 0, "nothing travels"
    rows = [row.split() for row in text.splitlines()]
    assert text.splitlines()[0] == "4 arrays on mesh (dp=2, tp=3), 2 plain tensors, 1 other leaf"
    assert ["['w']", "f32[6@dp,9@tp]", "[3,", "3]", "36"] in rows
    assert ["['b'][0]", "bf16[7@tp]", "[3]", "at", "most", "6"] in rows
    assert ["['b'][1]", "f32[3]", "(plain)", "[3]", "12"] in rows
    assert ["['s']", "f32[2]{U:dp}", "[2]", "8"] in rows
    assert ["['z']", "i64[]", "[]", "8"] in rows
    assert ["['n']", "int", "3"] in rows
    check_html(page, svgs=3)


def check_html(page: str, svgs: int) -> None:
    """That every tag is closed in order, and each array of some dims has its picture."""
    open_tags = []

    class Parser(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in ("rect",):
                open_tags.append(tag)

        def handle_endtag(self, tag):
            if tag != "rect":
                assert open_tags.pop() == tag

    Parser().feed(page)
    assert not open_tags
    assert page.count("<svg") == svgs


def test_the_picture_covers_the_value(grid) -> None:
    """The drawn blocks tile the value, and each names the ranks that hold it."""
    for s, parts in [(P("dp", "tp"), 6), (P("dp"), 2), (P(None, "tp"), 3), (P(("tp", "dp")), 6), (P(), 1)]:
        page = vfn.show(vfn.shard(torch.zeros(12, 9), grid, s))._repr_html_()
        boxes = [tuple(map(float, b)) for b in re.findall(r"width='([\d.]+)' height='([\d.]+)' fill", page)]
        area = sum(w * h for w, h in boxes)
        assert len(boxes) == parts
        assert math.isclose(area, 180 * 72, rel_tol=0.01)
        labels = re.findall(r"text-anchor='middle'>([^<]*)<", page)
        named = [r for label in labels for r in (range(6) if ".." in label else map(int, label.split(",")))]
        assert sorted(named) == list(range(6))


def test_show_of_one_value_and_of_nothing(grid) -> None:
    x = vfn.shard(torch.zeros(6), grid, P(("tp", "dp")))
    assert "(value)  f32[6@tp+dp]" in repr(vfn.show(x))
    assert repr(vfn.show({})).splitlines()[0] == "nothing"
    assert repr(vfn.show(torch.zeros(2))).splitlines()[0] == "1 plain tensor"
    assert "<script>" not in vfn.show({"<script>": 1, "b": "<script>"})._repr_html_()
    seen = []
    vfn.grad(lambda p: seen.append(repr(vfn.show({"p": p}))) or p.sum())(x)
    torch.func.grad(lambda p: seen.append(repr(vfn.show({"p": p}))) or p.sum())(x)
    assert all("f32[6@tp+dp]" in text for text in seen)
    assert mesh.axes_of(x.device_mesh) == {"dp": 2, "tp": 3}


# --- the user's line ------------------------------------------------------------------------------------------------


def body_of(x, w):
    h = x @ w  # the product
    h = h.tanh()
    return h.cumsum(0)  # the scan


def loss_of(x, w):
    return body_of(x, w).square().sum()


def lines_of(log) -> list[tuple[str, str, bool]]:
    """What of each record's line stands behind its #, with its op."""
    return [(r.op, linecache.getline(*_file_and_line(r.line)).partition("#")[2].strip(), r.backward) for r in log]


def _file_and_line(place: str) -> tuple[str, int]:
    file, _, number = place.rpartition(":")
    return file, int(number)


WAYS = {
    "grad": lambda f, x, w: vfn.grad(f)(w),  # a way
    "backward": lambda f, x, w: f(w.clone().requires_grad_()).backward(),  # a way
    "func": lambda f, x, w: torch.func.grad(f)(w),  # a way
    "vjp": lambda f, x, w: vfn.vjp(f, w)[1](torch.ones(())),  # a way
    "nested": lambda f, x, w: vfn.grad(lambda w: vfn.grad(f)(w).sum())(w),  # a way
    "remat": lambda f, x, w: vfn.grad(vfn.remat(f))(w),  # a way
}


@pytest.mark.parametrize("way", WAYS)
def test_a_move_of_the_backward_pass_is_told_at_the_line_of_its_op(grid, way: str) -> None:
    """The gradient of a scan needs the whole dim, as the scan did; that of the product sums over the rows."""
    x, w = vfn.shard(torch.ones(6, 6), grid, P("dp")), vfn.shard(torch.ones(6, 6), grid, P())
    with vfn.comm_log() as log:
        WAYS[way](lambda w: loss_of(x, w), x, w)
    told = lines_of(log)
    assert ("all_gather", "the scan", False) in told
    assert {place for op, place, backward in told if op == "all_gather" and backward} <= {"the scan"}
    assert {place for _, place, _ in told} <= {"the scan", "the product", "a way"}, log
    if way in ("grad", "backward", "func"):
        assert sum(place == "a way" for *_, place, _ in told) <= 1, log  # the gradient brought to the layout of w


def test_the_line_of_a_collective_in_a_body(grid) -> None:
    def body(w, x):
        y = vfn.pvary(w, "dp") * x  # goes back as a sum
        return vfn.psum(y.sum(0), "dp")

    def loss(w, x):
        return vfn.shard_map(body, mesh=grid, in_specs=(P(), P("dp")), out_specs=P())(w, x).sum()

    w, x = vfn.shard(torch.ones(3), grid, P()), vfn.shard(torch.ones(6, 3), grid, P("dp"))
    with vfn.comm_log() as log:
        vfn.grad(loss)(w, x)
    assert ("all_reduce", "goes back as a sum", True) in lines_of(log), log


def test_a_line_that_was_not_logged(grid) -> None:
    """Of a forward pass outside of the block nothing is known: the line of the backward call."""
    w = vfn.shard(torch.ones(6, 6), grid, P("dp")).requires_grad_()
    y = vfn.with_sharding(w, P(None, "dp")).square().sum()
    with vfn.comm_log() as log:
        y.backward()  # here
    assert {place for *_, place, _ in lines_of(log)} == {"here"}
    assert all(r.backward for r in log)
    assert op_lines._lines == []  # nothing is kept


# --- strict -----------------------------------------------------------------------------------------------------------


def test_strict_refuses_moves_that_nobody_asked_for(grid) -> None:
    x = vfn.shard(torch.ones(6, 6), grid, P("dp"))
    with vfn.strict(), vfn.comm_log() as log:
        with pytest.raises(vfn.errors.ReshardError):
            x.cumsum(0)
        assert len(log) == 0
        vfn.with_sharding(x, P()).cumsum(0)
        vfn.unshard(x)
        (x * 2 + x).relu().sum().item()
    x.cumsum(0)


def test_show_in_a_body(grid) -> None:
    shown = []

    def body(w, x):
        y = vfn.psum(x * w, "dp")
        shown.append(vfn.show({"w": w, "x": x, "y": y, "at": vfn.axis_index("tp"), "n": 3}))
        return y

    vfn.shard_map(body, mesh=grid, in_specs=(P(), P("dp")), out_specs=P())(torch.ones(2), torch.arange(4.0))
    assert (
        repr(shown[0])
        == """\
4 local values in a body over dp, tp of mesh (dp=2, tp=3), 1 other leaf
path    type          on each rank  bytes on each rank
['at']  i32[]{V:tp}   []            4
['n']   int 3
['w']   f32[2]        [2]           8
['x']   f32[2]{V:dp}  [2]           8
['y']   f32[2]        [2]           8"""
    )
    pictures = shown[0]._repr_html_().split("<svg")[1:]
    assert [len(set(re.findall("fill='(#[^']+)'", picture))) for picture in pictures] == [3, 1, 2, 1]
    assert all(picture.count("<rect") == 6 for picture in pictures)


def test_show_of_a_value_that_is_an_array_along_another_axis(grid) -> None:
    shown = []
    f = vfn.shard_map(
        lambda x: shown.append(vfn.show(x)) or x, mesh=grid, axis_names={"dp"}, in_specs=P("dp"), out_specs=P("dp")
    )
    f(vfn.shard(torch.ones(4, 6), grid, P("dp", "tp")))
    assert repr(shown[0]).splitlines()[2].split() == ["(value)", "f32[2,6@tp]{V:dp}", "[2,", "2]", "16"]


def test_a_log_has_the_collectives_of_its_own_thread():
    """A thread that comes, records or goes in between neither adds to it nor ends it."""
    with vfn.simulate(2):
        x = vfn.shard(torch.ones(4, 2), vfn.make_mesh((2,), ("dp",)), P("dp"))
        inside, done, others = threading.Event(), threading.Event(), []

        def other():
            with vfn.comm_log() as log:
                inside.set()
                done.wait()
                vfn.unshard(x)
            others.append(log)
            vfn.eval_shape(lambda x: x.sum(), x)

        thread = threading.Thread(target=other)
        thread.start()
        inside.wait()
        with vfn.comm_log() as log:
            x.sum().item()
            done.set()
            thread.join()
            x.sum().item()
            with context.unlogged():
                x.sum().item()
        assert [record.op for record in log] == ["all_reduce", "all_reduce"]
        assert [record.op for record in others[0]] == ["all_gather"]
        assert context.logs() == ()


def test_each_asyncio_task_has_its_own_mesh():
    with vfn.simulate(4):
        meshes = {name: vfn.make_mesh((4,), (name,)) for name in "abc"}

        async def task(name, before, after):
            assert vfn.current_mesh() is meshes["c"]
            await before.wait()
            with vfn.use_mesh(meshes[name]):
                after.set()
                await asyncio.sleep(0)
                assert vfn.current_mesh() is meshes[name]
                vfn.set_mesh(None)
                await asyncio.sleep(0)
                assert vfn.current_mesh() is None
            assert vfn.current_mesh() is meshes["c"]

        async def both():
            vfn.set_mesh(meshes["c"])  # as in a cell of a notebook: it stays when the task has ended
            first, second, third = (asyncio.Event() for _ in range(3))
            first.set()
            await asyncio.gather(task("a", first, second), task("b", second, third))

        asyncio.run(both())
        assert vfn.current_mesh() is meshes["c"]
