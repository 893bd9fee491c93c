"""A tensor that gets another memory, by `x.data = value`, `set_` or `swap_tensors`: right, or refused before it is read; and
parameters made in a body, each another name for the memory of its data.
"""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import InPlaceError, SpecError, VaryingTypeError

X = torch.arange(8.0)


@pytest.fixture
def a():
    with vfn.simulate(2):
        yield vfn.shard(X, vfn.make_mesh((2,), ("i",)), P("i"))


def assigned(p, value):
    p.data = value
    return p + 1


def by_vector(a):
    nn.utils.vector_to_parameters(a, nn.Linear(8, 1, bias=False).parameters())


def of_a_gradient(a):
    p = nn.Parameter(torch.zeros(8))
    p.grad = torch.ones(8)
    p.grad.data = a


# Where a plain tensor would take an array's memory, which is not there: each of them ended the process, or was lost.
PLAIN_TAKES_ARRAY = {
    "parameter": lambda a: assigned(nn.Parameter(torch.zeros(8)), a),
    "tensor": lambda a: assigned(torch.zeros(8), a),
    "weight": lambda a: setattr(nn.Linear(8, 1).weight, "data", a.view(1, 8)),
    "gradient": of_a_gradient,
    "vector": by_vector,
    "in vfn.grad": lambda a: vfn.grad(lambda a: assigned(torch.zeros(8), a).sum())(a),
    "in jit": lambda a: vfn.jit(lambda a: assigned(torch.zeros(8), a))(a),
    "in jit, a parameter": lambda a: vfn.jit(lambda a: assigned(nn.Parameter(torch.zeros(8)), a))(a),
}


@pytest.mark.parametrize("name", PLAIN_TAKES_ARRAY)
def test_a_plain_tensor_does_not_take_the_memory_of_an_array(a, name):
    with pytest.raises(InPlaceError) as raised:
        PLAIN_TAKES_ARRAY[name](a)
    first, _, fix = str(raised.value).splitlines()
    assert first == (
        "x.data = value: the value has no memory of its own, which x could have: its blocks are on the ranks of a mesh"
    )
    assert fix == (
        "  Instead: module.weight = torch.nn.Parameter(value), an array as well; or x.data = vfn.unshard(value)"
    )


def test_nor_its_storage(a):
    blank = torch.zeros(0)
    for take in (
        lambda: blank.set_(a.untyped_storage()),
        lambda: blank.set_(a.untyped_storage(), 0, (8,), (1,)),
        lambda: blank.set_(source=a.untyped_storage()),
    ):
        with pytest.raises(
            InPlaceError, match="set_: this storage only stands for one: that of an array has no elements"
        ):
            take()
    with torch.device("meta"):
        fine = torch.zeros(0).set_(torch.zeros(8).untyped_storage(), 0, (8,), (1,))
    assert fine.shape == (8,)
    assert torch.zeros(0).set_(X.untyped_storage(), 0, (8,), (1,)).tolist() == X.tolist()


# What took the memory that is not there by another way: some of these ended the process.
BY_STORAGE = {
    "Tensor": torch.Tensor,
    "FloatTensor": torch.FloatTensor,
    "new": torch.zeros(8).new,
    "tensor": torch.tensor,
    "tolist": lambda s: s.tolist(),
    "an entry": lambda s: s[0],
    "copy_": lambda s: s.copy_(torch.zeros(8).untyped_storage()),
    "clone": lambda s: s.clone(),
    "cpu": lambda s: s.cpu(),
    "data_ptr": lambda s: s.data_ptr(),
    "resize_": lambda s: s.resize_(0),
    "share_memory_": lambda s: s.share_memory_(),
    "pickle": pickle.dumps,
    "copy": copy.copy,
    "numpy": np.asarray,
}


def wrongly_taken(x):
    """The ways by which the memory of `x`, which has none, was not refused."""
    wrong = []
    for name, take in BY_STORAGE.items():
        try:
            wrong.append((name, take(x.untyped_storage())))
        except InPlaceError as error:
            if "untyped_storage" not in str(error):
                wrong.append((name, error))
    return wrong


def test_a_storage_is_none_to_torch(a):
    assert wrongly_taken(a) == []
    for check in (True, False):
        assert in_body(lambda x: x * (wrongly_taken(x) == []), a, check_vma=check).equal(X)
    with pytest.raises(InPlaceError, match="^storage: this value has no memory of its own"):
        a.storage()
    held = a.untyped_storage()
    assert (held.nbytes(), held.is_cuda, held == a[:4].detach().untyped_storage()) == (32, False, False)
    assert repr(held) == "<the memory of the array f32[8@i], which has none of its own>"
    assert held == a.untyped_storage()


def test_what_is_like_it_is_right_or_raises(a):
    p, layer = nn.Parameter(torch.zeros(8)), nn.Linear(8, 1, bias=False)
    with pytest.raises(InPlaceError, match="cannot exchange what an array holds"):
        a.clone().data = a
    with pytest.raises(InPlaceError, match="x.copy_"):
        a.clone().set_(torch.ones(8))
    with pytest.raises(RuntimeError, match="Cannot swap t1 and t2"):
        torch.utils.swap_tensors(p, a)
    p.grad = a
    torch.optim.SGD([p], 1.0).step()
    assert p.tolist() == (-X).tolist()
    p.data.copy_(a)
    assert p.tolist() == X.tolist()
    layer.load_state_dict({"weight": a.view(1, 8)})
    assert (type(layer.weight.data), layer.weight.tolist()) == (torch.Tensor, [X.tolist()])
    layer.load_state_dict({"weight": a.view(1, 8) * 2}, assign=True)
    assert (vfn.spec_of(layer.weight), vfn.unshard(layer(X)).tolist()) == (P(None, "i"), [280])


def in_body(body, a, **options):
    return vfn.unshard(vfn.shard_map(body, mesh=a.device_mesh, in_specs=P("i"), out_specs=P("i"), **options)(a))


@pytest.mark.parametrize("typed", [True, False])
def test_blocks_take_blocks(a, typed):
    """Their shape was taken, and their elements were not."""

    def longer(x):
        p = torch.zeros(1)
        p.data = torch.cat([x, x])
        p.data.mul_(2)
        return p

    def one_memory(x):
        p, mine = torch.zeros(4), x * 1
        p.data = mine
        p += 1
        return mine

    def everywhere(x):
        p = x * 1
        p.data = X[:4]
        return p

    assert in_body(lambda x: assigned(nn.Parameter(torch.zeros(4)), x), a, check_vma=typed).tolist() == (X + 1).tolist()
    assert in_body(longer, a, check_vma=typed).tolist() == [*range(0, 8, 2)] * 2 + [*range(8, 16, 2)] * 2
    assert in_body(one_memory, a, check_vma=typed).tolist() == (X + 1).tolist()
    assert in_body(lambda x: x + assigned(torch.zeros(4), X[:4]), a, check_vma=typed).tolist() == [
        1,
        3,
        5,
        7,
        5,
        7,
        9,
        11,
    ]
    if not typed:
        assert in_body(everywhere, a, check_vma=typed).tolist() == [0, 1, 2, 3] * 2


def test_what_lives_outside_of_a_body_takes_nothing_that_differs_by_rank(a):
    outside = torch.zeros(4)
    for typed in (True, False):
        with pytest.raises(InPlaceError, match="it is one block for each simulated rank"):
            in_body(lambda x: assigned(outside, x), a, check_vma=typed)
    assert outside.tolist() == [0] * 4
    in_body(lambda x: x + assigned(outside, X[:4]), a)
    assert outside.tolist() == [0, 1, 2, 3]


def layer(x):
    made = nn.Linear(4, 1)
    with torch.no_grad():
        made.weight.fill_(2)
        made.bias.copy_(x[:1])
    return made(x).square().sum()


def trained(x):
    made = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        made.weight.copy_(x)  # so that it varies
    made(x).sum().backward()
    torch.optim.SGD(made.parameters(), 0.5).step()
    return made.weight.detach()[0]


PARAMETERS = {
    "a layer in torch.func.grad": torch.func.grad(layer),
    "a layer in vfn.grad": vfn.grad(layer),
    "a layer that is trained": trained,
    "its data": lambda x: assigned(nn.Parameter(torch.zeros(4)), x),
    "what it is made of": lambda x: nn.Parameter(x * 2),
    "one of one": lambda x: nn.Parameter(nn.Parameter(x * 2)),
}


def parameters_in_bodies():
    a = vfn.shard(X, vfn.make_mesh((2,), ("i",)), P("i"))
    wrong = []
    for name, body in PARAMETERS.items():
        want = torch.cat([body(x.clone()) for x in X.chunk(2)])
        found = in_body(body, a)
        wrong += [] if torch.allclose(found, want) else [f"{name}: {found} for {want}"]
    for made, error in (
        (lambda x: nn.Parameter(x * 2), SpecError),
        (lambda x: nn.Parameter(x).data.add_(1), InPlaceError),
    ):
        with pytest.raises(error):
            vfn.shard_map(made, mesh=a.device_mesh, in_specs=P("i"), out_specs=P())(a)
    return wrong


def test_a_parameter_that_a_body_makes_varies_as_its_data():
    """It had no type: on real ranks one of other numbers on each passed for the same on all of them."""
    with vfn.simulate(2):
        assert parameters_in_bodies() == []
        a = vfn.shard(X, vfn.make_mesh((2,), ("i",)), P("i"))
        want = torch.cat([torch.func.grad(layer)(x) for x in X.chunk(2)])
        assert torch.allclose(in_body(torch.func.grad(layer), a, check_vma=False), want)


def _on_real_ranks():
    a, outside = vfn.shard(X, vfn.make_mesh((2,), ("i",)), P("i")), torch.zeros(4)
    found = [
        in_body(lambda x: assigned(nn.Parameter(torch.zeros(4)), x), a),
        in_body(lambda x: assigned(torch.zeros(4), x), a, check_vma=False),
    ]
    with pytest.raises(VaryingTypeError) as raised:
        in_body(lambda x: assigned(outside, x), a)
    with pytest.raises(InPlaceError):
        assigned(nn.Parameter(torch.zeros(8)), a)
    assert parameters_in_bodies() == []
    return [x.tolist() for x in found], str(raised.value).splitlines()[0], outside.tolist()


def test_on_real_ranks(gloo):
    found, said, outside = gloo(2, _on_real_ranks)[1]
    assert found == [(X + 1).tolist()] * 2
    assert said == ".data = : this writes a value that differs by rank into one that is the same on all of them"
    assert outside == [0] * 4


def _written_from_a_body():
    mesh = vfn.make_mesh((2,), ("i",))
    whole, other, x = (vfn.shard(v, mesh, s) for v, s in ((X[:4] * 0, P()), (X[:4], P()), (X, P("i"))))
    said = []
    for write in (
        lambda b: whole.add_(b),
        lambda b: torch.add(b, 1, out=whole),
        lambda b: torch._foreach_add_([whole], [b]),
    ):
        with pytest.raises(InPlaceError) as raised:
            in_body(lambda b, write=write: (write(b), b)[1], x, check_vma=False)
        said.append("differ by rank, into an array from outside" in str(raised.value))
    in_body(lambda b: (whole.add_(1).add_(other), b)[1], x, check_vma=False)
    return said, vfn.unshard(whole).tolist()


def test_a_block_is_not_written_into_an_array_from_outside_of_a_body_that_nothing_watches(gloo):
    """On real ranks each rank wrote its own block into what counts as the same on all of them."""
    assert gloo(2, _written_from_a_body) == [([True] * 3, [1, 2, 3, 4])] * 2


def _written_through_a_view():
    mesh = vfn.make_mesh((2,), ("i",))
    whole, x = vfn.shard(X[:4] * 0, mesh, P()), vfn.shard(X, mesh, P("i"))
    said = []
    for write in (
        lambda b: whole.__setitem__(0, b.sum()),
        lambda b: whole[1:3].copy_(b[:2]),
        lambda b: whole.view(2, 2)[0].add_(b[:2]),
    ):
        f = vfn.shard_map(lambda b, write=write: (write(b), b)[1], in_specs=P("i"), out_specs=P("i"), check_vma=False)
        with vfn.use_mesh(mesh):
            for call in (f, vfn.grad(lambda x, f=f: f(x).sum())):
                with pytest.raises(InPlaceError) as raised:
                    call(x)
                said.append(str(raised.value))
            vfn.shard_map(lambda b: whole[:2].sum() + b, in_specs=P("i"), out_specs=P("i"), check_vma=False)(x)
    return said


def test_a_block_is_not_written_into_a_view_of_an_array_from_outside(gloo):
    """It tells nobody of the write, which is seen at the end of the body."""
    said = (
        "shard_map: the body has written into a view of an array from outside, by values that may differ by rank\n"
        "  * the array f32[4], of which ranks may now hold different values\n"
        "  Instead: return the value from the body, and write outside; or x.clone() of the array as an argument"
    )
    assert gloo(2, _written_through_a_view) == [[said] * 6] * 2
