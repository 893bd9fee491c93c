"""Arrays as values: made, moved, taken apart, copied, stored, printed, changed in place; as good citizens of torch."""

import copy
import gc
import io
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_reshard import split
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import rnn

import vescale_fn as vfn
from vescale_fn import P, random
from vescale_fn._core import torch_internals
from vescale_fn._core.distributed import communicator, mesh
from vescale_fn._core.distributed.blocks import Blocks
from vescale_fn._core.sharding import index_map
from vescale_fn.errors import InPlaceError, MeshError, RankError, SpecError, VaryingTypeError

DTYPES = [
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
LAYOUTS = [P(), P("dp"), P("tp"), P(("dp", "tp")), P(("tp", "dp")), P("dp", "tp"), P("tp", "dp"), P(None, "dp")]


@pytest.fixture
def m():
    """A simulated mesh (dp=2, tp=3)."""
    with vfn.simulate(6):
        yield vfn.make_mesh((2, 3), ("dp", "tp"))


@pytest.fixture
def x():
    return torch.arange(35.0).view(7, 5)  # neither dim divides


@pytest.fixture
def a(x, m):
    return vfn.shard(x, m, P("dp", "tp"))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# --- in and out -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("s", LAYOUTS, ids=repr)
def test_shard_and_unshard(x, m, s: P) -> None:
    a = vfn.shard(x, m, s)
    assert isinstance(a, DTensor)
    assert vfn.spec_of(a) == s
    assert a.shape == x.shape
    assert a.stride() == x.stride()
    for rank, block in enumerate(a.to_local().blocks):
        assert torch.equal(block, split(x, {"dp": 2, "tp": 3}, s, communicator.coordinates(m, rank)))
    whole = vfn.unshard(a)
    assert type(whole) is torch.Tensor
    assert torch.equal(whole, x)
    assert torch.equal(a.full_tensor(), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype(m, dtype: torch.dtype) -> None:
    x = (torch.arange(14) % 2).view(7, 2).to(dtype)
    for s, t in [(P(), P("dp")), (P(("tp", "dp")), P("dp", "tp")), (P("dp"), P(None, "tp")), (P("tp"), P())]:
        a = vfn.with_sharding(vfn.shard(x, m, s), t)
        assert a.dtype == dtype
        assert same_bits(vfn.unshard(a), x)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        assert same_bits(vfn.unshard(a.to(wide).to(dtype)), x)
        assert repr(a).startswith("Array ")


def test_a_tree_with_everything_in_it(m) -> None:
    key = random.key(3)
    tree = {
        "w": torch.ones(4, 2),
        "none": None,
        "n": 3,
        "flag": True,
        "name": "adam",
        "key": key,
        "t": (torch.arange(3), []),
    }
    out = vfn.shard(tree, m, P())
    assert {k: v for k, v in out.items() if k in ("none", "n", "flag", "name")} == {
        "none": None,
        "n": 3,
        "flag": True,
        "name": "adam",
    }
    assert isinstance(out["w"], vfn.Array)
    assert isinstance(out["key"].data, vfn.Array)
    back = vfn.unshard(out)
    assert back["key"] == key
    assert torch.equal(back["t"][0], torch.arange(3))
    assert back["t"][1] == []
    assert torch.equal(random.bits(out["key"], (3,)), random.bits(key, (3,)))


def test_prefix_specs(m) -> None:
    tree = {"w": [torch.ones(4, 2), torch.ones(4)], "b": torch.ones(6), "n": 1}
    out = vfn.shard(tree, m, {"w": P("dp"), "b": P(("tp", "dp")), "n": P()})
    assert vfn.spec_of(out["w"][0]) == vfn.spec_of(out["w"][1]) == P("dp")
    assert vfn.spec_of(out["b"]) == P(("tp", "dp"))


def test_no_dims_and_no_elements(m) -> None:
    zero = vfn.shard(torch.tensor(3), m, P())
    assert (zero.item(), int(zero), bool(zero), zero.shape) == (3, 3, True, ())
    assert [0, 1, 2, 3][zero] == 3
    for shape in [(0,), (0, 3), (3, 0)]:
        empty = vfn.shard(torch.zeros(shape), m, P("dp"))
        assert empty.shape == shape
        assert vfn.unshard(empty + 1).shape == shape
        assert vfn.unshard(vfn.with_sharding(empty, P(("tp", "dp")))).shape == shape
        assert empty.sum().item() == 0


def test_shard_moves_nothing(m, x) -> None:
    with vfn.comm_log() as log:
        a = vfn.shard({"x": x}, m, P("tp", "dp"))["x"]
        vfn.shard(a, m, P("tp", "dp"))
        vfn.with_sharding(a, P("tp", "dp"))
        vfn.shard(x, m, P(unreduced={"dp"}))
    assert len(log) == 0
    assert vfn.with_sharding(a, P("tp", "dp")) is a


def test_strided_and_shared_input(m, x) -> None:
    for value in (x.t(), x[:, ::2], x.expand(2, 7, 5)[1], torch.ones(1).expand(6, 4)):
        a = vfn.shard(value, m, P("dp"))
        assert torch.equal(vfn.unshard(a), value)
        assert torch.equal(vfn.unshard(a * 2 + a.t().t()), value * 3)


def test_from_another_mesh(a, x) -> None:
    line = vfn.make_mesh((6,), ("all",))
    b = vfn.shard(a, line, P(None, "all"))
    assert (vfn.spec_of(b), torch.equal(vfn.unshard(b), x)) == (P(None, "all"), True)
    assert vfn.spec_of(vfn.with_sharding(a, P("all"), mesh=line)) == P("all")
    with pytest.raises(MeshError) as error:
        a + b
    assert str(error.value) == (
        "add: arrays on different meshes do not mix\n"
        "  * f32[7@dp,5@tp] on the mesh (dp=2, tp=3)\n  * f32[7,5@all] on the mesh (all=6)\n"
        "  Instead: vfn.shard(x, mesh, P('dp', 'tp')) brings one to the other's mesh"
    )


def test_an_explicit_mesh_wins(m, x) -> None:
    line = vfn.make_mesh((6,), ("all",))
    with vfn.use_mesh(m):
        assert vfn.spec_of(vfn.with_sharding(x, P("dp"))) == P("dp")
        assert vfn.spec_of(vfn.with_sharding(x, P("all"), mesh=line)) == P("all")
        inner = vfn.shard(x, line, P("all"))
        assert vfn.spec_of(vfn.with_sharding(inner, P(None, "all"))) == P(None, "all"), "an array's own mesh, then"
    assert vfn.with_sharding(x, P("dp")) is x, "no mesh: one device"


def test_torch_words(a, m, x) -> None:
    b = a.redistribute(placements=[Replicate(), Shard(-1)])
    assert (type(b), vfn.spec_of(b)) == (vfn.Array, P(None, "tp"))
    assert torch.equal(b.full_tensor(), x)
    assert vfn.spec_of(a.redistribute(m, [Partial(), Replicate()])) == P(unreduced={"dp"})
    assert vfn.spec_of(vfn.shard(x, m, P(("tp", "dp"))).redistribute(placements=a.placements)) == P("dp", "tp")
    assert a.device_mesh is m
    assert a.to_local().blocks[5].tolist() == [[24.0], [29.0], [34.0]]
    assert np.asarray(a).tolist() == a.tolist() == a.numpy().tolist() == x.tolist()


# --- from_local -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("s", [*LAYOUTS, P("dp", unreduced={"tp"}), P(unreduced={"dp", "tp"})], ids=repr)
def test_from_local(m, x, s: P) -> None:
    axes = {"dp": 2, "tp": 3}

    def block(coord: dict[str, int]) -> torch.Tensor:
        share = math.prod(axes[a] for a in s.unreduced)
        return split(x, axes, s, coord) / share

    a = vfn.from_local({"x": block, "n": 3, "none": None}, m, s)["x"]
    assert vfn.spec_of(a) == s
    assert torch.allclose(vfn.unshard(a), x)


def test_from_local_messages(m, a) -> None:
    batch = {
        "x": lambda c: torch.ones(3 + c["dp"]),
        "y": lambda c: torch.ones(2, dtype=torch.float32 if c["tp"] else torch.int64),
    }
    with pytest.raises(SpecError) as error:
        vfn.from_local(batch, m, P("dp"))
    assert str(error.value) == (
        "from_local: the ranks' blocks do not make up arrays on the mesh (dp=2, tp=3)\n"
        "  * batch['x'] with P('dp') would be [7], split as torch.chunk does, but the blocks are rank 0: f32[3], "
        "rank 1: f32[3], rank 2: f32[3], rank 3: f32[4], rank 4: f32[4], rank 5: f32[4]\n"
        "  * batch['y'] differs in dtype or number of dims: rank 0: i64[2], rank 1: f32[2], rank 2: f32[2], "
        "rank 3: i64[2], rank 4: f32[2], rank 5: f32[2]\n"
        "  Instead: give each rank the block that vfn.shard_shape and torch.chunk give it"
    )
    w = torch.ones(2, requires_grad=True)
    pair = [a, w]
    with pytest.raises(VaryingTypeError) as error:
        vfn.from_local(pair, m, P("dp"))
    assert str(error.value) == (
        "from_local: a block must be data: a plain tensor that nothing transforms\n"
        "  * pair[0] is an array already, f32[7@dp,5@tp]: vfn.shard moves it\n"
        "  * pair[1] is differentiated or mapped over, which ends here: x.detach(), or vfn.shard_map"
    )


# --- copies -----------------------------------------------------------------------------------------------------------


def stored(x, **how):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, **how)


WAYS = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "torch.save": lambda x: stored(x, weights_only=False),
    "weights_only": lambda x: stored(x, weights_only=True),
    "clone": torch.clone,
}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("s", [P(), P("dp", "tp"), P(("tp", "dp")), P(unreduced={"dp"})], ids=repr)
def test_copies(m, x, s: P, way: str) -> None:
    a = vfn.shard(x, m, s)
    b = WAYS[way](a)
    assert type(b) is vfn.Array
    assert vfn.spec_of(b) == s
    assert torch.equal(vfn.unshard(b), x)
    assert b.device_mesh == m
    assert torch.equal(vfn.unshard(a + b), 2 * x), "on the same mesh"
    if way != "copy":
        b.add_(1)
        assert torch.equal(vfn.unshard(a), x)
    assert WAYS[way](a.clone().requires_grad_()).requires_grad


def test_copies_of_parameters(m, x) -> None:
    for way in ("pickle", "deepcopy", "torch.save", "weights_only"):
        p = WAYS[way](torch.nn.Parameter(vfn.shard(x, m, P("dp"))))
        assert isinstance(p, torch.nn.Parameter)
        assert p.requires_grad
    q = copy.deepcopy(vfn.shard(x, m, P("tp", reduced={"dp"})))
    assert vfn.spec_of(q) == vfn.spec_of(pickle.loads(pickle.dumps(q))) == P("tp", reduced={"dp"})
    tied = [p, p]
    first, second = copy.deepcopy(tied)
    assert first is second


# --- printing ---------------------------------------------------------------------------------------------------------


def test_text(m, x) -> None:
    assert repr(vfn.shard(torch.arange(3), m, P("dp"))) == "Array i64[3@dp] on mesh (dp=2, tp=3)\ntensor([0, 1, 2])"
    assert repr(vfn.shard(torch.tensor(2.0), m, P())) == "Array f32[] on mesh (dp=2, tp=3)\n2.0"
    partial = vfn.with_sharding(vfn.shard(torch.ones(2), m, P()), P(unreduced={"dp", "tp"}))
    assert repr(partial) == "Array f32[2]{U:dp,tp} on mesh (dp=2, tp=3)\ntensor([1., 1.])", "added up to be read"
    assert f"{vfn.shard(torch.tensor(3.14159), m, P()):.2f}" == "3.14"
    assert f"{partial.sum():.1f}" == "2.0"
    assert str(vfn.shard(torch.zeros(100, 100), m, P("dp"))).count("...") == 7, "an excerpt"


def test_text_inside_transforms(a, m) -> None:
    seen = []

    def loss(p: torch.Tensor) -> torch.Tensor:
        seen.append(repr(p))
        return (p * p).sum()

    vfn.grad(loss)(a)
    torch.func.grad(loss)(a)
    torch.func.vmap(loss)(a)
    torch.func.jvp(loss, (a,), (a,))
    assert all("Array f32[7@dp,5@tp] on mesh (dp=2, tp=3)" in text for text in seen)


# --- where arrays meet the rest of torch ------------------------------------------------------------------------------


def raw(x: vfn.Array) -> DTensor:
    return torch_internals.new_dtensor(DTensor, x._local_tensor, x._spec, requires_grad=False)


def test_a_raw_dtensor_is_taken_in(a, x, m) -> None:
    r = raw(a)
    assert type(r) is DTensor
    for out in (r + a, a + r, torch.cat([a, r])[:7] * 2, torch.add(a, r)):
        assert type(out) is vfn.Array
        assert torch.equal(vfn.unshard(out), 2 * x)
    assert vfn.spec_of(r) == P("dp", "tp")
    assert torch.equal(vfn.unshard(r), x)
    moved = vfn.with_sharding(r, P("tp"))
    assert (type(moved), vfn.spec_of(moved)) == (vfn.Array, P("tp"))
    assert type(vfn.shard(r, m, P("dp", "tp"))) is vfn.Array


def test_plain_tensors_count_as_replicated(a, x) -> None:
    assert torch.equal(vfn.unshard(a + torch.ones(5)), x + 1)
    assert torch.equal(vfn.unshard(torch.ones(3, 7) @ a), torch.ones(3, 7) @ x)
    assert vfn.spec_of(torch.ones(7, 5) + a) == P("dp", "tp")


class Affine(torch.nn.Module):
    def __init__(self, w: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.w, self.b = torch.nn.Parameter(w), torch.nn.Parameter(b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.w + self.b)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad"])
def test_modules_and_optimizers(m, x, optimizer: str) -> None:
    """A module whose parameters are arrays trains as on one device: .grad, state, clipping, state_dict."""

    def train(module: torch.nn.Module, data: torch.Tensor) -> list[torch.Tensor]:
        opt = getattr(torch.optim, optimizer)(module.parameters(), lr=0.1, weight_decay=0.01)
        for _ in range(3):
            opt.zero_grad()
            (module(data) ** 2).sum().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            opt.step()
        return [p.detach() for p in module.parameters()]

    w, b, data = (x / 10).double(), torch.linspace(0, 1, 5).double(), torch.randn(3, 7).double()
    expected = train(Affine(w.clone(), b.clone()), data)
    sharded = Affine(vfn.shard(w.clone(), m, P("dp", "tp")), vfn.shard(b.clone(), m, P("tp")))
    assert isinstance(sharded.w, torch.nn.Parameter)
    assert isinstance(sharded.w, vfn.Array)
    for got, want in zip(train(sharded, data), expected):
        torch.testing.assert_close(vfn.unshard(got), want, rtol=1e-12, atol=1e-12)
    again = Affine(vfn.shard(w, m, P("tp")), vfn.shard(b, m, P()))
    again.load_state_dict(sharded.state_dict())
    assert torch.equal(vfn.unshard(again.w), vfn.unshard(sharded.w))
    assert vfn.spec_of(again.w) == P("tp"), "a state_dict brings values, the layout stays"
    assert [p.dtype for p in copy.deepcopy(sharded).half().parameters()] == [torch.float16] * 2


def test_backward_into_grad(a, x) -> None:
    p = a.clone().requires_grad_()
    seen = []
    p.register_hook(lambda g: seen.append(type(g)))
    (p * p).sum().backward()
    (p * 2).sum().backward()
    assert torch.equal(vfn.unshard(p.grad), 2 * x + 2)
    assert seen == [vfn.Array] * 2
    with torch.no_grad():
        assert not vfn.with_sharding(p, P()).requires_grad


def test_what_one_device_would_say(a, x) -> None:
    assert len(a) == 7
    assert [row.sum().item() for row in a] == [row.sum().item() for row in x]
    assert torch.equal(a, a.clone())
    assert not torch.equal(a, a + 1)
    assert torch.allclose(a, a + 1e-9)
    assert (a.numel(), a.ndim, a.dtype, a.device, a.size(0), a.nbytes) == (35, 2, x.dtype, x.device, 7, 140)
    assert {a: 1}[a] == 1
    assert 5.0 in a
    with pytest.raises(RuntimeError, match="more than one value is ambiguous"):
        bool(a)
    with pytest.raises(IndexError):
        a[7]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied|size mismatch"):
        a @ a


def test_arrays_can_be_collected(m) -> None:
    import weakref

    a = vfn.shard(torch.ones(6, 6), m, P("dp"))
    views = [weakref.ref(y) for y in (a, a[0:2], a.t(), a.sum(), a * 2)]
    del a
    gc.collect()
    assert all(view() is None for view in views)


# --- in place ---------------------------------------------------------------------------------------------------------


WRITES = {
    "add_": lambda y: y.add_(1),
    "mul_ tensor": lambda y: y.mul_(torch.arange(5.0)),
    "copy_": lambda y: y.copy_(torch.ones(7, 5)),
    "mask": lambda y: y.__setitem__(y > 30, 0.0),
    "zero_": lambda y: y.zero_(),
    "clamp_": lambda y: y.clamp_(2, 9),
    "t().mul_": lambda y: y.t().mul_(2),
    "addmm_": lambda y: y.addmm_(torch.ones(7, 2), torch.ones(2, 5)),
    "masked_fill_": lambda y: y.masked_fill_(y < 3, -1.0),
    "index_add_": lambda y: y.index_add_(0, torch.tensor([0, 2]), torch.ones(2, 5)),
    "whole slice": lambda y: y[:].mul_(3),
    "unsqueeze": lambda y: y.unsqueeze(0).add_(1),
    "out=": lambda y: torch.add(y, 2, out=y),
    "cumsum_": lambda y: y.cumsum_(0),
    "sub_ itself": lambda y: y.sub_(y),
    "row": lambda y: y[1].add_(1),
    "rows": lambda y: y[2:5].mul_(0),
    "view(-1)": lambda y: y.view(-1).mul_(2),
    "element": lambda y: y.__setitem__((0, 1), 9.0),
}


@pytest.mark.parametrize(
    "s", [P(), P("dp"), P(None, "tp"), P("dp", "tp"), P(("tp", "dp")), P(unreduced={"dp"})], ids=repr
)
@pytest.mark.parametrize("write", WRITES, ids=str)
def test_writes_are_right_or_raise(m, x, s: P, write: str) -> None:
    """Whatever writes in place either changes the array as on one device, on every rank, or raises InPlaceError."""
    expected = x.clone()
    WRITES[write](expected)
    a = vfn.shard(x, m, s).clone()
    before = vfn.unshard(a).clone()
    try:
        WRITES[write](a)
    except InPlaceError:
        assert torch.equal(vfn.unshard(a), before), "and it changed nothing"
        return
    assert vfn.spec_of(a) == s
    torch.testing.assert_close(vfn.unshard(a), expected)
    if not s.unreduced:
        for rank, block in enumerate(a.to_local().blocks):
            torch.testing.assert_close(block, split(expected, {"dp": 2, "tp": 3}, s, communicator.coordinates(m, rank)))


def test_a_view_of_its_own_memory_is_a_view(m, x) -> None:
    a = vfn.shard(x, m, P(None, "tp")).clone()
    rows = a[0:2]
    rows.zero_()
    assert vfn.unshard(a)[:3, 1].tolist() == [0, 0, 11]
    a.add_(1)
    assert vfn.unshard(rows)[0, 0] == 1


def test_a_view_whose_elements_are_elsewhere(m, x) -> None:
    a = vfn.shard(x, m, P("dp")).clone()
    with vfn.comm_log() as log:
        rows, first = a[0:2], a[0:2][0]
        rows.zero_()
        assert len(log) == 0, "each rank writes what it has"
    assert vfn.unshard(a)[:3, 1].tolist() == [0, 0, 11]
    with vfn.comm_log() as log:
        assert torch.equal(vfn.unshard(rows), torch.zeros(2, 5))
        assert rows.sum().item() == 0
        assert log.count("all_gather") == 1, "once read it is there"
    a.add_(1)
    assert (vfn.unshard(rows)[0, 0], vfn.unshard(first)[0]) == (1, 1), "it sees writes into the array"
    assert torch.equal(vfn.unshard(a[2:]), x[2:] + 1)


@pytest.mark.parametrize("s", [P("dp"), P(None, "tp"), P(None, None, "dp"), P()], ids=str)
def test_pooling_what_is_transposed_or_channels_last(m, s: P) -> None:
    """To call its result channels-last, torch changes what it says of its strides, in place."""
    rows = torch.arange(120.0, dtype=torch.float64).view(4, 6, 5).sin()
    planes = torch.arange(240.0, dtype=torch.float64).view(4, 6, 5, 2).sin()
    for x, pool in (
        (rows, lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 1)),
        (planes, lambda x: F.adaptive_avg_pool2d(x.contiguous(memory_format=torch.channels_last), 1)),
    ):
        a = vfn.shard(x, m, s)
        found, want = pool(a), pool(x)
        torch.testing.assert_close(vfn.unshard(found), want, rtol=1e-12, atol=1e-12)
        assert found.stride() == want.stride()
        slope = vfn.grad(lambda x, pool=pool: (pool(x) ** 2).sum())
        torch.testing.assert_close(vfn.unshard(slope(a)), slope(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("s", [P("dp"), P(None, None, "tp")], ids=str)
def test_packed_sequences(m, s: P) -> None:
    """Their numbers of sequences at each step stay plain: torch reads them in C++."""
    x, lengths = torch.arange(72.0).view(4, 6, 3).sin(), torch.tensor([6, 3, 2, 2])
    lstm = torch.nn.LSTM(3, 5, batch_first=True)

    def through(x, lengths=lengths, ordered=True):
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=ordered)
        return rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)[0]

    with torch.no_grad():
        torch.testing.assert_close(vfn.unshard(through(vfn.shard(x, m, s))), through(x))
        split = vfn.shard(lengths, m, P("dp"))
        torch.testing.assert_close(vfn.unshard(through(vfn.shard(x, m, s), split, False)), through(x, lengths, False))
    slope = vfn.grad(lambda x: (through(x) ** 2).sum())
    torch.testing.assert_close(vfn.unshard(slope(vfn.shard(x, m, s))), slope(x))


def test_a_sum_that_was_remembered_is_forgotten_by_a_write(m, x) -> None:
    for write in (lambda y: y.mul_(2), lambda y: y.view(-1).mul_(2), lambda y: y.t().mul_(2)):
        a = vfn.shard(x, m, P(unreduced={"dp"})).clone()
        assert torch.equal(vfn.unshard(a), x)
        write(a)
        assert torch.equal(vfn.unshard(a), 2 * x)


def test_a_resharded_value_is_not_written_while_its_source_is_known(m, x) -> None:
    """On one device with_sharding is the identity, and a write to its result would show in its argument."""
    for s in (P("dp"), P(None, "tp"), P(unreduced={"dp"}), P(("tp", "dp")), P("dp", unreduced={"tp"})):
        whole = vfn.shard(x.clone(), m, P())
        piece = vfn.with_sharding(whole, s)
        for write in (lambda: piece.mul_(3), lambda: piece.view(-1).mul_(3), lambda: piece[0:2].zero_()):
            with pytest.raises(InPlaceError, match="or a resharded value"):
                write()
        assert torch.equal(vfn.unshard(whole), x), s
        assert torch.equal(vfn.unshard(piece), x), s
        del whole
        piece.mul_(3)  # nobody can see the difference any more
        assert torch.equal(vfn.unshard(piece), 3 * x), s
        plain = x.clone()
        vfn.shard(plain, m, s).mul_(3)
        assert torch.equal(plain, x), s
    whole = vfn.shard(x.clone(), m, P("dp"))
    moved = vfn.with_sharding(whole, P())
    again = vfn.with_sharding(moved, P("tp"))
    rows = moved[0:2]
    whole.mul_(2)
    for value in (moved, again, rows):
        with pytest.raises(InPlaceError, match="changed in place afterwards"):
            vfn.unshard(value)


def test_storage_is_not_exchanged(a) -> None:
    for change in (lambda y: setattr(y, "data", y * 2), lambda y: y.resize_(3), lambda y: y.set_(torch.ones(2))):
        with pytest.raises(InPlaceError):
            change(a.clone())


# --- inside transforms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [vfn.grad, torch.func.grad], ids=["vfn.grad", "torch.func.grad"])
@pytest.mark.parametrize("s", [P(), P("dp"), P("tp", "dp"), P(("tp", "dp"))], ids=repr)
def test_placing_inside_a_gradient(m, x, grad, s: P) -> None:
    """with_sharding, shard and unshard move the value, and send the cotangent back to where the input lay."""
    for move in (
        lambda p: vfn.with_sharding(p, P(None, "tp"), mesh=m),
        lambda p: vfn.shard(p, m, P("dp", "tp")),
        vfn.unshard,
        lambda p: vfn.with_sharding(vfn.with_sharding(p, P("tp"), mesh=m) * 1, P(), mesh=m),
    ):
        a = vfn.shard(x, m, s)
        g = grad(lambda p: (move(p) ** 2).sum())(a)
        assert vfn.spec_of(g) == s
        assert torch.equal(vfn.unshard(g), 2 * x)
        plain = grad(lambda p: vfn.unshard((move(p) ** 2).sum()))(x)
        assert type(plain) is torch.Tensor
        assert torch.equal(plain, 2 * x)


def test_placing_under_vmap(m, x) -> None:
    """A spec speaks of the unbatched dims; an axis that it needs is taken from the batched dim."""
    a = vfn.shard(x, m, P("dp", "tp"))
    for s, after in [
        (P(), P("dp")),
        (P("tp"), P("dp", "tp")),
        (P("dp"), P(None, "dp")),
        (P(("tp", "dp")), P(None, ("tp", "dp"))),
    ]:
        y = torch.func.vmap(lambda row: vfn.with_sharding(row * 2, s))(a)
        assert vfn.spec_of(y) == after
        assert torch.equal(vfn.unshard(y), 2 * x)
        y = torch.func.vmap(lambda row: vfn.with_sharding(row * 2, s, mesh=m))(x)
        assert torch.equal(vfn.unshard(y), 2 * x)
    seen = []
    torch.func.vmap(lambda column: seen.append(vfn.spec_of(column)) or column, in_dims=1)(a)
    assert seen == [P("dp")]
    with pytest.raises(SpecError, match="it has 2 entries, but the value has 1 dim"):
        torch.func.vmap(lambda row: vfn.with_sharding(row, P("tp", None)))(a)
    g = torch.func.vmap(torch.func.grad(lambda row: (vfn.with_sharding(row, P("tp")) ** 2).sum()))(a)
    assert torch.equal(vfn.unshard(g), 2 * x)


# --- simulations come and go ------------------------------------------------------------------------------------------


def test_arrays_outlive_their_simulation() -> None:
    with vfn.simulate(2):
        a = vfn.shard(torch.arange(5.0), vfn.make_mesh((2,), ("x",)), P("x"))
    assert (a * 2).sum().item() == 20
    with vfn.simulate(3):
        b = vfn.shard(torch.arange(5.0), vfn.make_mesh((3,), ("x",)), P("x"))
        assert (a + 1).sum().item() == (b + 1).sum().item() == 15
        with pytest.raises(MeshError, match=r"f32\[5@x\] on the mesh \(x=2\)"):
            a + b
        moved = vfn.shard(a, vfn.make_mesh((3,), ("x",)), P("x"))
        assert (moved + b).tolist() == [0, 2, 4, 6, 8]
    with vfn.simulate(2):
        again = vfn.shard(torch.arange(5.0), vfn.make_mesh((2,), ("x",)), P("x"))
        assert (a + again).tolist() == [0, 2, 4, 6, 8], "the same mesh, made anew"


def test_a_bare_process() -> None:
    """Size-1 meshes need neither a simulation nor a process group."""
    x = torch.arange(35.0).view(7, 5)
    m = vfn.make_mesh((1, 1), ("a", "b"))
    for s in (P(), P("a"), P(("b", "a")), P("b", "a"), P("a", unreduced={"b"})):
        a = vfn.shard(x, m, s)
        with vfn.comm_log() as log:
            assert torch.equal(vfn.unshard(a @ a.t()), x @ x.t())
            g = vfn.grad(lambda a: (vfn.with_sharding(a, P("a")) ** 2).sum())(a)
            assert torch.equal(vfn.unshard(g), 2 * x)
            assert torch.equal(vfn.unshard(WAYS["weights_only"](a)), x)
        assert len(log) == 0
        assert repr(a).endswith(repr(x)), "the one rank holds it whole"
    with pytest.raises(MeshError, match="there is 1 rank"):
        vfn.make_mesh((2,), ("a",))


def test_the_fake_process_group() -> None:
    """One rank's view of 8: shapes and placements, nothing exchanged."""
    dist.init_process_group("fake", rank=5, world_size=8)
    try:
        m = vfn.make_mesh((2, 4), ("dp", "tp"))
        w = vfn.shard(torch.arange(70.0).view(10, 7), m, P("dp", "tp"))
        assert w.to_local().tolist() == [[37.0, 38.0], [44.0, 45.0], [51.0, 52.0], [58.0, 59.0], [65.0, 66.0]]
        x = vfn.shard(torch.ones(4, 10), m, P(None, "dp"))
        y = x @ w
        assert vfn.spec_of(y) == P(None, "tp", unreduced={"dp"})
        assert (y.shape, y.to_local().shape) == ((4, 7), (4, 2))
        z = vfn.with_sharding(y, P("dp", "tp"))
        assert (vfn.spec_of(z), z.to_local().shape) == (P("dp", "tp"), (2, 2))
        g = vfn.grad(lambda w: ((x @ w) ** 2).sum())(w)
        assert (vfn.spec_of(g), g.to_local().shape) == (P("dp", "tp"), (5, 2))
        assert vfn.unshard(w).shape == (10, 7)
    finally:
        dist.destroy_process_group()


# --- real ranks -------------------------------------------------------------------------------------------------------


def _citizen():
    m = vfn.make_mesh((2, 2), ("dp", "tp"))
    me = mesh.communicator_of(m).ranks[0]
    x = torch.arange(35.0).view(7, 5)
    a = vfn.shard(x, m, P("dp", "tp"))
    if me == 1:  # on one rank alone: neither printing nor copying waits for the others
        assert repr(a) == (
            "Array f32[7@dp,5@tp] on mesh (dp=2, tp=2)\nthis rank's block [0:4, 3:5]: tensor([[ 3.,  4.],\n        "
            "[ 8.,  9.],\n        [13., 14.],\n        [18., 19.]])"
        )
        assert "this rank's partial sum over dp of [0:7, 0:5]" in repr(vfn.shard(x, m, P(unreduced={"dp"})))
        assert repr(vfn.shard(torch.ones(2), m, P())) == "Array f32[2] on mesh (dp=2, tp=2)\ntensor([1., 1.])"
        vfn.show({"a": a})
    for way in ("deepcopy", "copy", "clone", "torch.save", "weights_only", "pickle"):
        b = WAYS[way](a)
        assert (type(b), vfn.spec_of(b)) == (vfn.Array, P("dp", "tp")), way
        assert torch.equal(b.to_local(), a.to_local()), way
        if b.device_mesh == m:  # a mesh that was stored may have process groups of its own
            assert torch.equal(vfn.unshard(a + b), 2 * x), way
    c = vfn.from_local(torch.full(({0: 4, 1: 3}[me // 2],), me // 2), m, P("dp"))
    assert c.tolist() == [0, 0, 0, 0, 1, 1, 1]
    total = vfn.from_local(torch.tensor(10.0**me), m, P(unreduced={"dp", "tp"}))
    assert total.item() == 1111
    assert f"{total:.1f}" == "1111.0"
    order = vfn.with_sharding(vfn.shard(x, m, P(("tp", "dp"))), P(("dp", "tp")))
    assert torch.equal(vfn.unshard(order), x)
    p = torch.nn.Parameter(a.clone())
    (p * p).sum().backward()
    assert torch.equal(vfn.unshard(p.grad), 2 * x)
    return "fine"


def test_real_ranks(gloo) -> None:
    assert gloo(4, _citizen) == ["fine"] * 4


def _dtensors():
    """What torch's own DTensors and meshes look like from here."""
    m = vfn.make_mesh((2, 2), ("dp", "tp"))
    me = mesh.communicator_of(m).ranks[0]
    x = torch.arange(35.0).view(7, 5)
    a = vfn.shard(x, m, P("dp", "tp"))
    r = distribute_tensor(x.clone(), m, [Shard(0), Replicate()])
    assert type(r + a) is type(a + r) is vfn.Array
    assert torch.equal(vfn.unshard(r + a), 2 * x)
    leaf = distribute_tensor(x.clone(), m, [Replicate(), Shard(1)]).requires_grad_()
    (a * leaf).sum().backward()
    assert torch.equal(vfn.unshard(leaf.grad), x)
    for kind in ("sum", "max", "min", "avg"):
        part = DTensor.from_local(torch.full((3,), float(me // 2)), m, [Partial(kind), Replicate()])
        wanted = part.full_tensor()
        assert torch.equal(vfn.unshard(part), wanted), kind
        assert torch.equal(vfn.unshard(part + vfn.shard(torch.zeros(3), m, P())), wanted), kind
        assert torch.equal(vfn.unshard(vfn.with_sharding(part, P("tp"))), wanted), kind
    rows = vfn.shard(x, m["dp"], P("dp"))
    assert torch.equal(vfn.unshard(vfn.grad(lambda w: (w**2).sum())(rows)), 2 * x), "on a mesh within a mesh"
    unnamed = distribute_tensor(x, init_device_mesh("cpu", (4,)), [Shard(1)])
    assert torch.equal(vfn.unshard(vfn.shard(unnamed, m, P("tp", "dp"))), x)
    again = vfn.make_mesh((2, 2), ("dp", "tp"))
    assert torch.equal(vfn.unshard(a + vfn.shard(x, again, P())), 2 * x), "the same mesh, made anew"
    return "fine"


def test_torchs_own_dtensors(gloo) -> None:
    assert gloo(4, _dtensors) == ["fine"] * 4


def _unsigned():
    return [torch.tensor([1, 2], dtype=dtype) for dtype in (torch.uint16, torch.uint32, torch.uint64)]


def test_unsigned_results_come_back(gloo) -> None:
    """torch itself writes these so that it cannot read them; a key's data is of such a type."""
    for results in gloo(2, _unsigned):
        assert [r.dtype for r in results] == [torch.uint16, torch.uint32, torch.uint64]
        assert [r.tolist() for r in results] == [[1, 2]] * 3


def _wrong_block():
    m = vfn.make_mesh((4,), ("dp",))
    try:
        vfn.from_local({"x": torch.ones(3 if mesh.communicator_of(m).ranks[0] == 2 else 2)}, m, P("dp"))
    except SpecError as error:
        return str(error)


def test_from_local_raises_on_all_ranks(gloo) -> None:
    messages = gloo(4, _wrong_block)
    assert set(messages) == {
        "from_local: the ranks' blocks do not make up arrays on the mesh (dp=4)\n"
        "  * tree['x'] with P('dp') would be [9], split as torch.chunk does, but the blocks are rank 0: f32[2], "
        "rank 1: f32[2], rank 2: f32[3], rank 3: f32[2]\n"
        "  Instead: give each rank the block that vfn.shard_shape and torch.chunk give it"
    }


def test_the_blocks_type(a) -> None:
    assert type(a._local_tensor) is Blocks
    assert index_map.axes_of(a.device_mesh) == {"dp": 2, "tp": 3}
    assert issubclass(RankError, vfn.errors.VfnError)


def test_torch_cannot_store_what_is_no_contiguous_part():
    with vfn.simulate(6):
        x = vfn.shard(torch.arange(13.0), vfn.make_mesh((3, 2), ("a", "b")), P(("b", "a")))
        with pytest.raises(SpecError) as caught:
            x.__create_write_items__("x", x)
        assert str(caught.value) == (
            "torch.distributed.checkpoint: this array's blocks are no contiguous parts of it\n"
            "  * f32[13@b+a]\n"
            "  Instead: vfn.save(path, tree), or vfn.with_sharding(x, P(...)) first"
        )
        with pytest.raises(MeshError, match=r"a simulated mesh has one process for all ranks\n.*\n  Instead: vfn.save"):
            vfn.with_sharding(x, P()).__create_write_items__("x", x)


OF_NUMBERS = {
    "tensor": lambda x: torch.tensor([[x[0], x[4]], [x[1], 2]]),
    "as_tensor": lambda x: torch.as_tensor((x[0], x[4])),
    "asarray": lambda x: torch.asarray([x[0], x.sum()]),
    "new_tensor": lambda x: torch.zeros(1).new_tensor([x[0], x[1]]),
    "Tensor": lambda x: torch.Tensor([x[0], x[1]]),
    "under jit": lambda x: vfn.jit(lambda x: torch.tensor([x[0], x[1]]))(x),
    "under grad": lambda x: vfn.grad(lambda y: (y * torch.tensor([y[0], y[1]])[1]).sum().real)(x * 1.0),
}


def _not_as_numbers():
    """The tensors that are not made of the numbers in arrays as of those in plain tensors."""
    mesh, wrong = vfn.make_mesh((2,), ("dp",)), []
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        plain = torch.arange(5).to(dtype)
        for name, make in OF_NUMBERS.items():
            if dtype.is_complex and name == "Tensor":
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a plan cannot read numbers
                want, found = make(plain), vfn.unshard(make(vfn.shard(plain, mesh, P("dp"))))
            if not torch.equal(want, found) or want.dtype != found.dtype:
                wrong.append((name, dtype, want, found))
    return wrong


def test_tensors_of_the_numbers_in_arrays(gloo) -> None:
    """Torch read address 0 for them, and said that the data is not allocated yet."""
    with vfn.simulate(2):
        assert _not_as_numbers() == []
    assert gloo(2, _not_as_numbers) == [[], []]


WITHOUT_MEMORY = {
    "data_ptr": lambda x: x.data_ptr(),
    "the bytes of untyped_storage": lambda x: bytes(x.untyped_storage()),
    "share_memory_": lambda x: x.share_memory_(),
    "apply_": lambda x: x.apply_(lambda v: v + 1),
    "to_dlpack": torch.utils.dlpack.to_dlpack,
}


def _taken_out(real: bool = True) -> list[tuple[str, str]]:
    """The whole value comes out by each protocol, and what would reach for memory that is not there is refused."""
    x = vfn.shard(torch.arange(5.0), vfn.make_mesh((2,), ("dp",)), P("dp"))
    for found in (
        np.from_dlpack(x),
        torch.from_dlpack(x),
        np.asarray(x),
        x.numpy(),
        torch.from_dlpack(vfn.with_sharding(x, P())),
    ):
        assert found.tolist() == x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert not x.is_shared()
    assert not hasattr(x, "__cuda_array_interface__")
    refused = []
    for name, take in WITHOUT_MEMORY.items():
        for value in (x,) if real else (x, x.to_local()):
            with pytest.raises(RuntimeError) as error:
                take(value)
            refused.append((name, str(error.value)))
    return refused


def test_no_protocol_reads_memory_that_an_array_does_not_have(gloo) -> None:
    """np.from_dlpack read garbage; torch.from_dlpack, share_memory_ and apply_ crashed the process."""
    with vfn.simulate(2):
        refused = _taken_out(real=False)
        with pytest.raises(InPlaceError, match="one block for each simulated rank"):
            np.from_dlpack(vfn.shard(torch.ones(2), vfn.make_mesh((2,), ("dp",)), P("dp")).to_local())
    assert [
        text
        for name, text in refused
        if name in ("data_ptr", "share_memory_", "apply_") and "no memory of its own" not in text
    ] == []
    assert refused[0][1] == (
        "data_ptr: this value has no memory of its own: its blocks are on the ranks of a mesh\n"
        "  Instead: vfn.unshard(x) for the whole value, x.to_local() for this rank's block"
    )
    gloo(2, _taken_out)


def test_a_recording_has_no_memory_either() -> None:
    """A plain tensor without values was read as if it had them; the function runs as written."""
    f = vfn.jit(
        lambda x: (
            x.clone().apply_(lambda v: v) + torch.from_dlpack(x * 1) + torch.from_numpy(np.from_dlpack(x * 1).copy())
        )
    )
    with pytest.warns(UserWarning, match="runs as written"):
        assert torch.equal(f(torch.arange(3.0)), torch.arange(3.0) * 3)
    by_capsule = vfn.jit(lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x * 2)) + 1)  # in C, past all hooks
    with pytest.warns(UserWarning, match="runs as written"):
        assert torch.equal(by_capsule(torch.arange(3.0)), torch.arange(3.0) * 2 + 1)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        vfn.eval_shape(lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)), torch.arange(3.0))
