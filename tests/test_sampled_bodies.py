"""Sampled `shard_map` programs against a plain loop over ranks: see `sampled_bodies`. And what the long runs found."""

import warnings
from dataclasses import replace

import pytest
import torch
from sampled_bodies import REAL, WAYS, Wanted, checks, difference, examine, given_inputs, sampled
from torch.utils.checkpoint import checkpoint
from whole import part, some

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.shard_map import collective_maps

CASES, GROUPS = 120, 4
TURNS = [  # through which ways a case goes, with the check or without
    ("forward", "vfn.grad"),
    ("torch.func.grad",),
    ("vfn.jvp", "vfn.vmap"),
    ("vfn.grad", "vfn.grad of vfn.remat"),
    ("vfn.vmap of vfn.grad",),
    ("vfn.grad of vfn.grad",),
    ("forward", "vfn.grad"),
    ("vfn.jvp of vfn.grad",),
    ("torch.func.grad twice",),
]


@pytest.mark.filterwarnings("ignore:vfn.psum over")
@pytest.mark.parametrize("group", range(GROUPS))
def test_sampled_bodies(group):
    wrong = []
    for k in part(range(group, CASES, GROUPS), 2):
        case = sampled(f"0:{k}")
        wrong += [
            f"{case.show()}\n{line}" for line in examine(case, TURNS[k % len(TURNS)], checks(case)[-(k % 2) :][:1])
        ]
    assert not wrong, "\n\n".join(wrong)


def test_the_turns_leave_no_way_out():
    assert {way for turn in TURNS for way in turn} == set(WAYS)
    cases = [sampled(f"0:{k}") for k in range(CASES)]
    assert sum(case.refused for case in cases) >= 6
    lines = " ".join(line.text for case in cases for line in case.lines)
    for word in (
        "psum(",
        "pmean",
        "pmax",
        "pmin",
        "all_gather",
        "psum_scatter",
        "all_to_all",
        "ppermute",
        "pbroadcast",
        "axis_index",
        "pcast",
        "'unreduced'",
        "'reduced'",
        "'invarying'",
        "dynamic_slice",
        "vfn.grad",
        "vfn.remat",
        "vfn.vmap(vfn.remat(",
        "vfn.remat(vfn.vmap(",
        "vfn.grad(lambda t: (vfn.",
        "Scaled.apply",
        "tiled=True",
        "tiled=False",
    ):
        assert word in lines, word


REAL_WAYS = ("forward", "vfn.grad", "torch.func.grad", "vfn.jvp", "vfn.vmap", "vfn.grad of vfn.grad")


def answers_on_real_ranks(first, last):
    warnings.filterwarnings("ignore", message="vfn.psum over")
    found = {}
    for k in range(first, last):
        case = sampled(f"real:{k}", REAL)
        wanted, mesh = Wanted(case), vfn.make_mesh(case.shape, case.names)
        given = given_inputs(case, mesh)
        for check in checks(case)[-(k % 2) :][:1]:
            f = case.compiled(mesh, check)
            for name in REAL_WAYS[:2] if k % 4 < 2 else REAL_WAYS[2:]:
                found[k, check, name] = [vfn.unshard(x).detach() for x in WAYS[name][0](f, wanted, given)]
    return found


@pytest.mark.filterwarnings("ignore:vfn.psum over")
def test_sampled_bodies_on_real_ranks(gloo):
    ranks = gloo(4, answers_on_real_ranks, 0, some(8, 14))
    assert all(found.keys() == ranks[0].keys() for found in ranks)
    wrong = []
    for k, check, name in ranks[0]:
        case = sampled(f"real:{k}", REAL)
        want = WAYS[name][1](Wanted(case))
        for rank, found in enumerate(ranks):
            if line := difference(found[k, check, name], want):
                wrong.append(f"{case.show()}\nrank {rank}, {name}, check_vma={check}: {line}")
    assert not wrong, "\n\n".join(wrong)


def planted(row, **changes):
    return {row: replace(collective_maps.TABLE[row], **changes)}


def back(row, **changes):
    return lambda op: replace(op, row=row, **changes)


FAULTS = {
    "a sum's gradient is summed again": planted("psum", transpose=back("psum")),
    "a shared value's gradient is not summed": planted("copy", transpose=back("relabel")),
    "a permutation's gradient goes the same way": planted("ppermute", transpose=back("ppermute")),
    "a gathered value's gradient is not summed": planted("all_gather", transpose=back("my_piece")),
    "an exchange's gradient keeps its dims": planted("all_to_all", transpose=back("all_to_all")),
    "a broadcast's gradient goes to every rank": planted("pbroadcast", transpose=back("psum")),
    "a gather puts the pieces elsewhere": planted(
        "all_gather", after=lambda op, x: collective_maps.TABLE["my_piece"].before(op, x)
    ),
    "a scatter sends the wrong piece": planted(
        "psum_scatter", before=lambda op, x: collective_maps._cut(op, x).flip(0)
    ),
    "a second derivative is not averaged": planted("divide", transpose=back("divide")),
}


@pytest.mark.filterwarnings("ignore:vfn.psum over")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    for row, wrong in FAULTS[fault].items():
        monkeypatch.setitem(collective_maps.TABLE, row, wrong)
    ways = ("vfn.grad of vfn.grad",) if "second" in fault else ("vfn.grad",)
    assert any(examine(case, ways) for case in (sampled(f"0:{k}") for k in range(CASES)) if not case.refused)


# --- what the long runs found -----------------------------------------------------------------------------------------


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def mapped(body, mesh, *args, ins=P("i"), outs=P("i"), **options):
    return vfn.unshard(vfn.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs, **options)(*args))


@pytest.fixture
def mesh():
    with vfn.simulate(2):
        yield vfn.make_mesh((2,), ("i",))


def test_a_vector_times_a_matrix_is_a_vector(mesh):
    """`torch.matmul` changes the shape of its result in place, by `squeeze_`."""
    x, w = draw(6), draw(3, 4)
    found = mapped(lambda x: (x @ w)[..., None] * torch.ones(1, 1), mesh, x)
    assert torch.equal(found, torch.cat([half @ w for half in x.chunk(2)])[:, None])
    for change in (lambda x: x.t_(), lambda x: x.unsqueeze_(1), lambda x: x.transpose_(0, 1)):
        found = mapped(lambda x, change=change: change(x * 1) + 1, mesh, w[:2], ins=P(), outs=P())
        assert torch.equal(found, change(w[:2] * 1) + 1)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("grad", [vfn.grad, torch.func.grad])
def test_second_derivatives_through_results_that_all_ranks_share(grad, check, mesh):
    """Where the first derivative of a result hands each rank its part, that of the part is a sum over the ranks."""
    a, w = draw(4), draw(4)
    f = lambda a: mapped(
        lambda a, w: vfn.psum((a * w).sin().sum(), "i"), mesh, a, w, ins=(P(), P("i")), outs=P(), check_vma=check
    )
    g = lambda a: mapped(lambda a, w: a * 3, mesh, a, w, ins=(P(), P("i")), outs=P(), check_vma=check).sin().sum()
    for program, plain in ((f, lambda a: (a[:2] * w.view(2, 2)).sin().sum()), (g, lambda a: (3 * a).sin().sum())):
        x = a[:2] if program is f else a
        found = grad(lambda x, program=program: grad(program)(x).cos().sum())(x)
        want = grad(lambda x, plain=plain: grad(plain)(x).cos().sum())(x)
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("grad", [vfn.grad, torch.func.grad])
def test_second_derivatives_through_results_that_are_still_to_be_added(grad, mesh):
    a = draw(4)
    f = lambda a: mapped(lambda a: vfn.pcast(a.sin(), "i", to="unreduced"), mesh, a, outs=P(unreduced={"i"}))
    found = grad(lambda a: grad(lambda a: f(a).square().sum())(a).cos().sum())(a)
    plain = lambda a: a.sin().view(2, 2).sum(0)
    want = grad(lambda a: grad(lambda a: plain(a).square().sum())(a).cos().sum())(a)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def test_a_remat_in_a_remat_knows_its_types(mesh):
    a, b = draw(6), draw(2)
    total = vfn.remat(lambda x: vfn.psum(x.clone(), "i"))
    inner = lambda a, b: vfn.remat(torch.tanh)(vfn.grad(lambda t: (torch.sin(t) * a.sum()).sum())(b))
    f = vfn.remat(lambda a, b: mapped(lambda a, b: total(inner(a, b)), mesh, a, b, outs=P()).sum())
    plain = lambda a, b: sum((half.sum() * part.cos()).tanh().sum() for half, part in zip(a.chunk(2), b.chunk(2)))
    torch.testing.assert_close(vfn.grad(f, (0, 1))(a, b), vfn.grad(plain, (0, 1))(a, b))


GIVES_BACK = {
    "contiguous": lambda w: w.contiguous(),
    "to": lambda w: w.to(torch.float64),
    "reshape": lambda w: w.reshape(-1),
    "a view": lambda w: w.view(-1)[:],
    "data": lambda w: w * w.data.cos(),
    "under vmap": lambda w: torch.func.vmap(lambda t: t.contiguous())(w),
}


def gradients_after_use(mesh):
    """A weight that a body closed over once, by a function that gives back its operand, and its gradient afterwards."""
    found = []
    for give in GIVES_BACK.values():
        for first in (True, False):
            w, x = draw(3), draw(2, 3)
            mapped(lambda x: x * give(w), mesh, x, check_vma=first)
            rows = {"the weight": lambda w: w, "a piece of it": lambda w: w[:3]}
            for piece in rows.values():
                for check in (True, False):
                    f = lambda w: mapped(lambda x: x * give(piece(w)), mesh, x, check_vma=check).sum()
                    found += [vfn.grad(f)(w), torch.func.grad(f)(w)]
    return found


def gradients_after_use_on_real_ranks():
    return gradients_after_use(vfn.make_mesh((2,), ("i",)))


def test_a_use_in_one_body_leaves_nothing_on_the_weight(gloo, mesh):
    w, x = draw(3), draw(2, 3)
    want = [vfn.grad(lambda w: (x * give(w)).sum())(w) for give in GIVES_BACK.values() for _ in range(16)]
    torch.testing.assert_close(gradients_after_use(mesh), want)
    for found in gloo(2, gradients_after_use_on_real_ranks):
        torch.testing.assert_close(found, want)


def gradients_of_what_is_given_back(mesh):
    found, x = [], draw(4)
    for check in (True, False):
        for give in (lambda w: w, lambda w: w[:2], lambda w: w.detach() + w):
            f = lambda w: mapped(lambda x: (give(w), x), mesh, x, outs=(P(), P("i")), check_vma=check)[0].sin().sum()
            second = lambda grad: grad(lambda w: grad(f)(w).square().sum())
            found += [vfn.grad(f)(draw(4)), torch.func.grad(f)(draw(4))]
            found += [second(vfn.grad)(draw(4)), vfn.jvp(vfn.grad(f), (draw(4),), (x,))[1]]
    return found


def gradients_of_what_is_given_back_on_real_ranks():
    return gradients_of_what_is_given_back(vfn.make_mesh((2,), ("i",)))


def test_a_body_that_gives_back_a_weight_which_it_closes_over(gloo, mesh):
    want = []
    for give in (lambda w: w, lambda w: w[:2], lambda w: w.detach() + w):
        f = lambda w: give(w).sin().sum()
        want += [torch.func.grad(f)(draw(4))] * 2
        want += [torch.func.grad(lambda w: torch.func.grad(f)(w).square().sum())(draw(4))]
        want += [torch.func.jvp(torch.func.grad(f), (draw(4),), (draw(4),))[1]]
    for found in (gradients_of_what_is_given_back(mesh), *gloo(2, gradients_of_what_is_given_back_on_real_ranks)):
        assert all(type(x) is torch.Tensor for x in found)
        torch.testing.assert_close(found, want * 2)


GRADIENTS = {
    "vfn.grad": vfn.grad,
    "vfn.vjp": lambda f: lambda w: vfn.vjp(f, w)[1](torch.ones((), dtype=torch.float64))[0],
    "torch.func.grad": torch.func.grad,
    "torch.func.vjp": lambda f: lambda w: torch.func.vjp(f, w)[1](torch.ones((), dtype=torch.float64))[0],
    "torch.func.jacrev": torch.func.jacrev,
    "torch.func.jacfwd": torch.func.jacfwd,
}
AROUND = {
    "nothing": lambda f, w: f(w),
    "vfn.jvp": lambda f, w: vfn.jvp(f, (w,), (w.cos(),))[1],
    "vfn.vmap": lambda f, w: vfn.vmap(f)(torch.stack([w, w.cos()])),
    "vfn.grad": lambda f, w: vfn.grad(lambda w: f(w).sin().sum())(w),
    "torch.func.grad": lambda f, w: torch.func.grad(lambda w: f(w).sin().sum())(w),
}


def gradients_by_what_is_closed_over(mesh):
    """Without types a gradient in a body is the rank's own, also by a tensor that the body closes over."""
    found, x = {}, draw(2)
    for inside, grad in GRADIENTS.items():
        for around, transform in AROUND.items():
            body = lambda w, x: grad(lambda t: (t.sin() * x).sum())(w)[None]
            f = lambda w: mapped(lambda x: body(w, x), mesh, x, check_vma=False)
            found[inside, around] = transform(f, draw(3))
    return found


def gradients_by_what_is_closed_over_on_real_ranks():
    return gradients_by_what_is_closed_over(vfn.make_mesh((2,), ("i",)))


def test_a_gradient_in_a_body_without_types_by_what_it_closes_over(gloo, mesh):
    rows = [gradients_by_what_is_closed_over(mesh), *gloo(2, gradients_by_what_is_closed_over_on_real_ranks)]
    x = draw(2)
    for found in rows:
        for (inside, around), got in found.items():
            want = AROUND[around](lambda w: torch.outer(x, w.cos()), draw(3))
            torch.testing.assert_close(got, want, msg=lambda text: f"{inside} in a body, {around} around it: {text}")


@pytest.mark.filterwarnings("ignore:vfn.psum over")
@pytest.mark.parametrize("grad", [vfn.grad, torch.func.grad])
def test_a_weight_that_goes_straight_into_a_collective(grad, mesh):
    w, x = draw(3), draw(4)
    for check in (True, False):
        for collective, factor in ((lambda w: vfn.pcast(w, "i", to="varying"), 1), (lambda w: vfn.psum(w, "i"), 2)):
            f = lambda w: mapped(lambda x: collective(w), mesh, x, check_vma=check).sum()
            assert torch.equal(grad(f)(w), torch.full_like(w, 2 * factor))


@pytest.mark.parametrize("check", [True, False])
def test_tangents_of_a_tree_of_which_only_a_part_moves(check, mesh):
    x, y = draw(4), draw(2)
    f = lambda x: mapped(lambda x, y: vfn.psum((y, x, y.cos()), "i"), mesh, x, y, outs=P(), check_vma=check)
    out, slope = vfn.jvp(f, (x,), (x.cos(),))
    torch.testing.assert_close(out, (y.sum()[None], x[:2] + x[2:], y.cos().sum()[None]))
    torch.testing.assert_close(slope, (torch.zeros(1).double(), x[:2].cos() + x[2:].cos(), torch.zeros(1).double()))


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_a_position_that_is_first_asked_for_inside_a_transform(transform):
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), (f"position_{transform}",))  # a mesh that nothing has used yet
        (axis,) = mesh.mesh_dim_names
        f = lambda x: mapped(lambda x: x * (vfn.axis_index(axis) + 1), mesh, x, ins=P(axis), outs=P(axis))
        x = draw(2)
        {
            "grad": lambda: torch.func.grad(lambda x: f(x).sum())(x),
            "jvp": lambda: torch.func.jvp(f, (x,), (x,)),
            "vmap": lambda: torch.func.vmap(f)(x[None]),
        }[transform]()
        assert torch.equal(f(x), x * torch.tensor([1.0, 2.0]))
        assert torch.equal(vfn.vmap(f)(x[None]), x[None] * torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("check", [True, False])
def test_the_mean_of_integers_is_no_integer_whoever_holds_them(check, mesh):
    i = torch.arange(4)
    body = lambda i: vfn.pmean((i, i > 1, 3, 0.5), "i")
    for ins, mean in ((P(), i / 1), (P("i"), torch.tensor([1.0, 2.0]))):
        found, _, number, half = mapped(body, mesh, i, ins=ins, outs=P(), check_vma=check)
        assert found.dtype is torch.float32
        assert torch.equal(found, mean)
        assert (number, half) == (3.0, 0.5)
        assert isinstance(number, float)


@pytest.mark.parametrize("of", [vfn.remat, lambda f: lambda *args: checkpoint(f, *args, use_reentrant=False)])
def test_remat_of_values_of_every_type(of, mesh):
    """Of a sum that is held back, of a value that all ranks have alike, of a reduced one: each is what it was, twice."""
    a, w = draw(4), draw(3)

    def body(a, w):
        held = vfn.pcast(a.sin(), "i", to="unreduced")
        kept = vfn.pcast(w, "i", to="reduced")
        total = of(lambda held, w: vfn.psum(held * 2.0, "i").cos().sum() + w.cos().sum())(held, w)
        return total + vfn.psum(of(lambda kept, a: (kept.sin() * a.sum()).sum())(kept, a), "i")

    f = lambda a, w: mapped(body, mesh, a, w, ins=(P("i"), P()), outs=P())
    plain = lambda a, w: (2 * (a[:2].sin() + a[2:].sin())).cos().sum() + w.cos().sum() + (w.sin() * a.sum()).sum()
    torch.testing.assert_close(f(a, w), plain(a, w))
    torch.testing.assert_close(vfn.grad(f, (0, 1))(a, w), torch.func.grad(plain, (0, 1))(a, w))


def gradients_of_a_gradient_by_what_is_closed_over(mesh):
    """A gradient that a body takes by a plain tensor from outside, differentiated from outside: there its own gradient meets
    that of an array."""
    body = lambda w, x: vfn.grad(lambda t: (t.sin() * vfn.psum(x.sum(), "i")).sum())(w)
    f = lambda w, x: mapped(lambda x: body(w, x), mesh, x, outs=P()).square().sum()
    first = torch.func.grad(f, (0, 1))
    second = torch.func.grad(lambda w, x: sum(g.sin().sum() for g in first(w, x)), (0, 1))
    given = [draw(4), vfn.shard(draw(4), mesh, P("i"))]
    return [grad(draw(3), x) for x in given for grad in (first, second)]


def gradients_of_a_gradient_by_what_is_closed_over_on_real_ranks():
    found = gradients_of_a_gradient_by_what_is_closed_over(vfn.make_mesh((2,), ("i",)))
    return [tuple(map(vfn.unshard, grads)) for grads in found]


def test_a_gradient_by_what_a_body_closes_over_is_plain_outside(gloo, mesh):
    first = torch.func.grad(lambda w, x: (w.cos() * x.sum()).square().sum(), (0, 1))
    second = torch.func.grad(lambda w, x: sum(g.sin().sum() for g in first(w, x)), (0, 1))
    want = [first(draw(3), draw(4)), second(draw(3), draw(4))] * 2
    found = gradients_of_a_gradient_by_what_is_closed_over(mesh)
    assert all(type(by_weight) is torch.Tensor for by_weight, _ in found)
    torch.testing.assert_close([tuple(map(vfn.unshard, grads)) for grads in found], want)
    for on_real in gloo(2, gradients_of_a_gradient_by_what_is_closed_over_on_real_ranks):
        torch.testing.assert_close(on_real, want)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_slice_is_typed_by_its_place_whatever_its_size(size, mesh):
    body = lambda x: vfn.pcast(vfn.dynamic_slice(x, (vfn.axis_index("i"),), (size,)), "i", to="unreduced")
    found = mapped(lambda x: vfn.psum(body(x), "i"), mesh, draw(3), ins=P(), outs=P())
    torch.testing.assert_close(found, sum(draw(3)[min(i, 3 - size) :][:size] for i in range(2)))


def tangents_sharded_in_a_plan():
    """Of a tangent that is sharded there a rank has a view, which begins at another place of the whole on each."""
    mesh = vfn.make_mesh((2,), ("i",))
    f = vfn.jit(lambda x: vfn.jvp(torch.sin, [x], [vfn.shard(draw(6) + 1, mesh, P("i"))])[1])
    x = vfn.shard(draw(6), mesh, P("i"))
    with vfn.comm_log() as log:
        slope = f(x)
    return vfn.unshard(slope), len(log)


def test_a_tangent_that_is_a_view_is_not_gathered(gloo):
    for slope, moved in gloo(2, tangents_sharded_in_a_plan):
        assert moved == 0
        torch.testing.assert_close(slope, draw(6).cos() * (draw(6) + 1))
