"""digest: one hash of a tree's bits, on one device, on every mesh and under every spec; and what it costs."""

import hashlib
import re
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.checkpoint import block_sums
from vescale_fn.errors import CheckpointError, DivergenceError


def bits(shape, dtype):
    """Random bits of this dtype: NaNs and all."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, size), dtype=torch.uint8).view(dtype)[..., 0]


# --- what it is -------------------------------------------------------------------------------------------------------


def checksums(data):
    """The formula, in Python's integers."""
    words = hashlib.shake_256(b"vescale_fn.digest").digest(8 * (2**18 + 4))
    keys = [int.from_bytes(words[8 * i : 8 * i + 8], "little") for i in range(2**18 + 4)]
    blocks = [data[i : i + 2**20] for i in range(0, len(data), 2**20)]
    found = b""
    for block in blocks:
        row = [int.from_bytes(block[i : i + 4], "little") for i in range(0, len(block), 4)]
        for each in range(4):
            found += (sum(keys[i + each] * w for i, w in enumerate(row)) % 2**64).to_bytes(8, "little")
    return found


def sha256(*parts):
    data = [part.encode() if isinstance(part, str) else part for part in parts]
    return hashlib.sha256(b"".join(len(one).to_bytes(8, "little") + one for one in data)).hexdigest()


def test_it_is_a_sha256_of_the_formula():
    x = (
        bits((2**18 + 1001,), torch.int32)[:, None].expand(-1, 1).contiguous().view(torch.uint8)[:-1, :-1]
    )  # in rows of 3 bytes
    data = x.contiguous().numpy().tobytes()
    leaf = sha256("tensor", f"uint8[{x.shape[0]},3]".replace("uint8", "u8"), checksums(data))
    assert vfn.digest([x]) == sha256("vescale_fn tree 1", 'list["0"]', f"0 {leaf}")


def test_its_values_stay_what_they_are():
    tree = {
        "w": torch.arange(6.0).reshape(2, 3),
        "half": torch.arange(3.0).bfloat16(),
        "empty": torch.zeros(0, 4),
        "key": vfn.random.key(3),
        "rest": [3, 2.5, True, None, "text", b"bytes", 1j, np.arange(3), np.float32(2.0), torch.tensor(1.0)],
    }
    assert vfn.digest(tree) == "c133d80b11031deab83b0d1f80d15ba5c065bb836569384d4385f747e7a4e70c"
    assert vfn.digest({"w": torch.arange(6.0), "step": 3}).startswith("42e8da07978834f0")


def test_it_does_not_depend_on_strides():
    x = torch.arange(48.0).view(6, 8)
    for view in (x.T, x[::2, 1::3], x[:1, :1].squeeze(0), x[::4, 0][:1]):
        assert vfn.digest(view) == vfn.digest(torch.tensor(view.tolist()))


def test_each_bit_counts():
    x = bits((1000,), torch.float32)
    found = {vfn.digest(x)}
    for i in range(0, 1000, 37):
        for bit in (0, 7, 22, 30, 31):
            changed = x.clone()
            changed.view(torch.int32)[i] ^= -(2**31) if bit == 31 else 1 << bit
            found.add(vfn.digest(changed))
    assert len(found) == 1 + 28 * 5


def test_what_differs_has_another_digest():
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    key = vfn.random.key(0)
    different = [
        torch.tensor(0.0),
        torch.tensor(-0.0),
        torch.tensor([0.0]),
        torch.tensor([[0.0]]),
        torch.tensor([0.0, 0.0]),
        torch.tensor([0]),
        torch.tensor([0], dtype=torch.int32),
        nan[0],
        nan[1],
        0.0,
        -0.0,
        0,
        False,
        None,
        "",
        b"",
        0j,
        np.zeros(1, dtype=np.float32),
        np.float32(0.0),
        key,
        key.data,
        vfn.random.split(key),
        [],
        (),
        {},
        [torch.tensor(0.0)],
        (torch.tensor(0.0),),
        {"a": torch.tensor(0.0)},
        {"b": torch.tensor(0.0)},
        {"a": {"a": torch.tensor(0.0)}},
        {"a": 1, "b": 2},
        {"a": 2, "b": 1},
        torch.zeros(0),
        torch.zeros(0, 1),
        10**5000,
    ]
    assert len({vfn.digest(tree) for tree in different}) == len(different)


def test_what_is_saved_equal_has_one_digest(tmp_path):
    state = namedtuple("state", ["mean", "count"])
    x = torch.arange(12.0).reshape(3, 4)
    tree = {"b": state(x, 3), "a": [None, vfn.random.key(1), (np.arange(2), 1.5)], 3: torch.nn.Parameter(x)}
    vfn.save(tmp_path / "tree", tree)
    again = OrderedDict(reversed(tree.items()))
    assert vfn.digest(tree) == vfn.digest(vfn.load(tmp_path / "tree")) == vfn.digest(again)
    assert vfn.digest(x) == vfn.digest(x.T.contiguous().T) == vfn.digest(torch.cat([x, x])[:3])
    z = torch.complex(x, x + 1)
    assert vfn.digest(z.conj()) == vfn.digest(z.conj().resolve_conj()) != vfn.digest(z)


# --- the same however it lies -----------------------------------------------------------------------------------------

SPECS = [
    P(),
    P("a"),
    P(None, "a"),
    P("a", "b"),
    P("b", ("a", "c")),
    P(("c", "a")),
    P(None, ("b", "a")),
    P("c", None, "a"),
]


KINDS = [
    ((5, 0, 3), torch.float32),
    ((7, 9), torch.complex64),
    ((5, 3, 7, 2), torch.bfloat16),
    ((1030, 257, 2), torch.float32),
    ((1030, 257, 2), torch.float8_e4m3fn),
    ((2, 700001), torch.bfloat16),
    ((400003, 2), torch.int64),
    ((400003, 2), torch.bool),
    ((400003, 3), torch.float8_e4m3fn),
]


@pytest.mark.parametrize(("shape", "dtype"), KINDS, ids=str)
def test_every_layout_has_the_digest_of_one_device(shape, dtype):
    x = bits(shape, dtype)
    expected = vfn.digest({"x": x})
    with vfn.simulate(8):
        mesh = vfn.make_mesh((2, 2, 2), ("a", "b", "c"))
        for spec in SPECS:
            if len(spec) <= len(shape):
                assert vfn.digest({"x": vfn.shard(x, mesh, spec)}) == expected, spec


def test_rows_that_are_shares_of_many_blocks():
    x = bits((3, 300, 1001), torch.bfloat16)
    expected = vfn.digest(x)
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("a", "b"))
        for spec in (P("a", "b"), P(None, "a", "b"), P("b", None, "a"), P(None, None, ("b", "a"))):
            assert vfn.digest(vfn.shard(x, mesh, spec)) == expected, spec


def test_merged_dims_keys_and_sums():
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("a", "b"))
        x = torch.arange(48.0).reshape(4, 6, 2)
        merged = vfn.shard(x, mesh, P("a", "b")).reshape(24, 2)
        assert vfn.digest(merged) == vfn.digest(x.reshape(24, 2))
        keys = vfn.random.split(vfn.random.key(0), 5)
        placed = vfn.shard(keys, mesh, P("a"))
        assert vfn.digest(placed) == vfn.digest(keys) != vfn.digest(vfn.random.split(vfn.random.key(1), 5))
        parts = vfn.shard_map(lambda x: x, mesh=mesh, in_specs=P("a"), out_specs=P("a"))(vfn.shard(x, mesh, P("a")))
        assert vfn.digest(parts) == vfn.digest(x)
        unreduced = vfn.with_sharding(vfn.shard(x, mesh, P()), P(unreduced="a"))
        assert vfn.spec_of(unreduced).unreduced
        assert vfn.digest(unreduced) == vfn.digest(x)


def test_it_sends_32_bytes_a_block():
    x = bits((1100, 1024), torch.float32)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("a", "b"))
        tree = {"x": vfn.shard(x, mesh, P(None, "a")), "y": vfn.shard(x, mesh, P("a")), "z": vfn.shard(x, mesh, P())}
        with vfn.comm_log() as log:
            vfn.digest(tree)
    assert [(one.op, one.axis, one.bytes, one.why) for one in log] == [("all_reduce", "a", 2 * 5 * 32, "digest")]
    assert block_sums.count(x) == 5


# --- real ranks -------------------------------------------------------------------------------------------------------


def of_ranks():
    torch.manual_seed(1)
    xs = [bits(shape, dtype) for shape, dtype in SAMPLE]
    alone = vfn.digest([*xs, 3])
    mesh = vfn.make_mesh((2, 2), ("a", "b"))
    found = []
    for spec in (P(), P("a"), P(None, "b"), P(("b", "a")), P("b", "a")):
        found.append(vfn.digest([*vfn.shard(xs, mesh, spec), 3]) == alone)
    part = vfn.digest([vfn.shard(xs[0], mesh, P("a")), xs[1], *xs[2:], 3]) == alone
    return alone, found, part


SAMPLE = [((7, 5), torch.float32), ((1, 3), torch.bfloat16), ((0, 2), torch.int64), ((3, 400003), torch.float32)]


def test_real_ranks_agree(gloo):
    torch.manual_seed(1)
    expected = vfn.digest([*[bits(shape, dtype) for shape, dtype in SAMPLE], 3])
    assert gloo(4, of_ranks) == [(expected, [True] * 5, True)] * 4


def different(what):
    mesh = vfn.make_mesh((2, 2), ("a", "b"))
    rank = torch.distributed.get_rank()
    x = vfn.shard(torch.arange(8.0), mesh, P("a"))
    if what == "copies":
        x = vfn.from_local(torch.full((2,), float(rank == 3)), mesh, P("a"))
        tree = {"x": x, "y": x + 1}
    elif what == "plain":
        tree = {"x": x, "plain": torch.tensor(float(rank == 1))}
    elif what == "number":
        tree = {"x": x, "step": 3 + (rank == 2)}
    else:
        tree = {"x": x} if rank else {"z": x}
    try:
        vfn.digest(tree)
    except DivergenceError as error:
        return re.sub("[0-9a-f]{16}", "HASH", str(error))


FIX = "  Instead: vfn.debug() to see where they part; what is to differ by rank as one array: vfn.from_local(...)"
COPIES, TREE = "digest: ranks hold different copies of a value", "digest: the ranks must bring the same tree"
DIFFERENT = {
    "copies": [COPIES, *(f"  * tree['{name}']: rank 0 has HASH, rank {i} has HASH" for i in (1, 3) for name in "xy")],
    "plain": [COPIES, "  * tree['plain']: rank 0 has HASH, rank 1 has HASH"],
    "number": [TREE, "  * tree['step']: rank 0 has int 3, rank 2 has int 4"],
    "name": [
        TREE,
        *(
            line
            for i in (1, 2, 3)
            for line in (
                f"  * tree['z']: rank 0 has f32[8] P('a') on a=2, b=2, rank {i} has nothing",
                f"  * tree['x']: rank 0 has nothing, rank {i} has f32[8] P('a') on a=2, b=2",
            )
        ),
    ],
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_told_so(gloo, what):
    assert gloo(4, different, what) == ["\n".join([*DIFFERENT[what], FIX])] * 4


def one_cannot():
    x = vfn.shard(torch.arange(8.0), vfn.make_mesh(2, "a"), P("a"))
    try:
        vfn.digest({"x": x, "y": object() if torch.distributed.get_rank() else 3})
    except (CheckpointError, DivergenceError) as error:
        return str(error).splitlines()[:2]


def test_ranks_are_told_of_one_that_has_what_has_no_bits(gloo):
    first, second = gloo(2, one_cannot)
    assert first == [
        TREE,
        "  * all in all: rank 0 has leaves that have bits, rank 1 has digest: some leaves cannot be stored",
    ]
    assert second[0] == "digest: some leaves cannot be stored"


def test_in_inference_mode(tmp_path):
    with vfn.simulate(2):
        x = {"x": vfn.shard(torch.arange(8.0), vfn.make_mesh(2, "a"), P("a"))}
        expected = vfn.digest(x)
        with torch.inference_mode():
            vfn.save(tmp_path / "c", x)
            assert vfn.digest(x) == vfn.digest(vfn.load(tmp_path / "c", x)) == expected


# --- what it refuses --------------------------------------------------------------------------------------------------


def test_where_there_are_no_values():
    with pytest.raises(CheckpointError) as caught:
        vfn.jit(lambda x: (vfn.digest(x), x)[1])(torch.ones(2))
    assert str(caught.value) == (
        "digest: vfn.jit is recording\n  Instead: the digest of what the function returns, outside of it"
    )
    with vfn.simulate(2), pytest.raises(CheckpointError, match="this is the body of a shard_map"):
        mesh = vfn.make_mesh((2,), ("a",))
        vfn.shard_map(lambda x: (vfn.digest(x), x)[1], mesh=mesh, in_specs=P("a"), out_specs=P("a"))(torch.ones(2))
    with pytest.raises(CheckpointError) as caught:
        vfn.digest({"a": torch.ones(2, device="meta"), "b": object()})
    assert str(caught.value) == (
        "digest: some leaves cannot be stored\n"
        "  * tree['a'] is the tensor f32[2] on the meta device, without values\n"
        "  * tree['b'] is a object\n"
        "  Instead: a tensor with values; tensors, arrays, keys, numbers, strings and None; leave other things out, or write "
        "them as such"
    )
    with pytest.raises(CheckpointError, match="which a transform follows"):
        torch.func.grad(lambda x: (vfn.digest(x), x.sum())[1])(torch.ones(2))
