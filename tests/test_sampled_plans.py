"""Functions under `jit` against the functions themselves: a sample of `sampled_plans`, and what its long runs found."""

import math
import types

import pytest
import torch
from sampled_plans import Program, fault, fault_on_a_mesh, faults_on_ranks
from whole import some

import vescale_fn as vfn
from vescale_fn.errors import DonationError


@pytest.mark.parametrize("start", range(0, 36, 12))
@pytest.mark.filterwarnings("ignore")
def test_sampled_functions(start):
    for i in range(start, start + 12):
        program = Program(f"7:{i}")
        assert fault(program) is None, program.source


@pytest.mark.filterwarnings("ignore")
def test_sampled_functions_on_meshes():
    for i in range(some(8, 14)):
        program = Program(f"8:{i}")
        assert fault_on_a_mesh(program) is None, program.source


@pytest.mark.parametrize(("processes", "cases"), [(3, some(5, 8)), (6, some(2, 4))])
def test_sampled_functions_on_real_ranks(gloo, processes, cases):
    """Shards are uneven or empty: ranks must make one plan of blocks of several sizes."""
    assert gloo(processes, faults_on_ranks, processes, [f"9:{i}" for i in range(cases)]) == [{}] * processes


def test_a_call_that_stays_comes_behind_what_it_needs():
    def f(p, q, g):
        a, b = p * g, q * g  # one call for both, at the end
        return a, b, a + b

    for x, y in zip(vfn.jit(f)(*torch.rand(3, 5)), f(*torch.rand(3, 5)), strict=True):
        assert x.shape == y.shape
    values = torch.arange(15.0).view(3, 5)
    assert all(map(torch.equal, vfn.jit(f)(*values), f(*values)))


def test_results_in_donated_memory_can_be_used():
    def twice(a):
        v = a.exp()
        return v, v

    def with_part(a):
        v = a / 2
        return v, v[0]

    for f in (twice, with_part):
        x = torch.arange(6.0).view(2, 3)
        found, wanted = vfn.jit(f, donate_argnums=0)(x.clone()), f(x)
        assert all(map(torch.equal, found, wanted))
        assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()


def test_a_result_does_not_move_behind_a_write_into_what_it_reads():
    def f(a):
        scale = a * 2
        out = a + scale
        scale.diagonal().zero_()
        return out, a.sum(), scale

    x = torch.arange(9.0).view(3, 3)
    assert all(map(torch.equal, vfn.jit(f, donate_argnums=0)(x.clone()), f(x)))


def test_a_donated_argument_that_the_last_call_needs_again():
    def f(a):
        total = a.sum()
        return torch.addcdiv(a + a, total, a, value=0.5)

    x = torch.arange(1.0, 7.0)
    assert torch.equal(vfn.jit(f, donate_argnums=0)(x.clone()), f(x))


def test_two_results_in_the_memory_of_donated_arguments_of_which_one_is_copied():
    def f(a, b):
        v = a.flip(0)
        return v, v.tanh()

    x, y = torch.arange(6.0).view(2, 3)
    given = [z.clone() for z in (x, y)]
    assert all(map(torch.equal, vfn.jit(f, donate_argnums=(0, 1))(*given), f(x, y)))


def test_one_of_several_results_is_turned_in_place():
    def f(a):
        v = torch.nn.functional.layer_norm(a, (4,))
        v.transpose_(0, 1)
        return v

    x = torch.arange(48.0).view(2, 3, 8)[..., ::2]
    found = vfn.jit(f)(x)
    assert torch.equal(found, f(x))
    assert found.stride() == f(x).stride()


def test_a_write_that_reads_what_it_writes():
    """What torch gives depends on the order of the elements."""

    def f(a):
        v = a * 1.0
        v.mul_(v[:, :1])
        return v

    x = torch.arange(2.0, 14.0).view(2, 3, 2)
    assert torch.equal(vfn.jit(f)(x), f(x))


def test_an_expanded_tensor_can_be_donated():
    x = torch.arange(3.0).expand(2, 3)
    assert torch.equal(vfn.jit(lambda x: x + 1, donate_argnums=0)(x), torch.tensor([[1.0, 2, 3]] * 2))


def test_what_a_function_closes_over_cannot_be_donated_to_it():
    w = torch.ones(4)

    def f(p):
        q = p * 2
        return q, (q * w).sum()

    with pytest.raises(DonationError, match=r"p \(f32\[4\]\) is a tensor that the function closes over"):
        vfn.jit(f, donate_argnums=0)(w)
    assert torch.equal(w, torch.ones(4))


def test_a_donated_call_that_fails_half_way_leaves_no_wrong_values():
    def late(p, i):
        q = p + 1
        return q, torch.ones(3)[i] + q.sum()

    def early(p, i):
        return p + torch.ones(3)[i]

    for f, gone in ((late, True), (early, False)):
        p, i = torch.ones(4), torch.tensor([7])
        with pytest.raises(IndexError):
            vfn.jit(f, donate_argnums=0)(p, i)
        if gone:
            with pytest.raises(DonationError, match=r"p \(f32\[4\]\) was donated to an earlier call"):
                p + 1
        else:
            assert torch.equal(p, torch.ones(4))


@pytest.mark.filterwarnings("ignore:jit. <lambda> runs as written")
@pytest.mark.parametrize("read", [lambda s: math.copysign(1, s), math.isfinite, math.isnan, lambda s: s.is_integer()])
def test_a_float_that_code_in_c_looks_at(read):
    fast, x = vfn.jit(lambda x, s: x * read(s)), torch.ones(2)
    for s in (2.0, 0.5, -2.0, math.inf, -math.inf, math.nan, 3.0):
        assert torch.equal(fast(x, s), x * read(s)), s


class _Settings:
    scale = 2.0


_config, _module = types.SimpleNamespace(scale=torch.tensor(2.0)), types.ModuleType("settings")
_module.scale = 2.0


@pytest.mark.parametrize("owner", [_Settings, _config, _module])
def test_an_attribute_of_what_a_function_names_is_looked_at_again(owner, monkeypatch):
    fast, x = vfn.jit(lambda x: x * owner.scale), torch.ones(2)
    assert torch.equal(fast(x), x * 2)
    monkeypatch.setattr(owner, "scale", 3.0)
    assert torch.equal(fast(x), x * 3)
    assert fast.cache_info().last == "owner.scale, which it closes over, has changed"


def test_a_constant_with_other_data():
    w = torch.ones(4)
    fast = vfn.jit(lambda x: w.numel() + w.sum() * x)
    assert fast(torch.ones(())) == 8
    w.data = torch.ones(8, dtype=torch.float64)
    found = fast(torch.ones(()))
    assert found == 16
    assert found.dtype == torch.float64


def test_memory_that_is_exchanged_is_not_recorded():
    def exchanged(x):
        y = x * 2
        z = y.exp()
        y.set_(y.clone())
        y[:, 0] = 1
        return z, y

    def resized(x):
        return torch.add(x, 1, out=torch.empty(0)).reshape(-1)

    x = torch.arange(6.0).view(2, 3).t()
    for f in (exchanged, resized):
        with pytest.warns(UserWarning, match="runs as written"):
            found = vfn.jit(f)(x)
        wanted = f(x)
        found, wanted = [y if isinstance(y, tuple) else (y,) for y in (found, wanted)]
        assert all(map(torch.equal, found, wanted))
