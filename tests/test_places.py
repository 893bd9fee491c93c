"""Values at one coordinate of an axis, ``P(..., at={"pp": 2})``: ops, moves, gradients, training, checkpoints; what is elsewhere."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributions import DISTRIBUTIONS

import vescale_fn as vfn
from vescale_fn import P

NAMES = ("pp", "dp", "tp")


def values() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(15.0, dtype=torch.float64).reshape(5, 3) / 7, torch.arange(9.0, dtype=torch.float64).reshape(
        3, 3
    ) - 4


LAYOUTS = [
    P(),
    P("tp", at={"pp": 0}),
    P(None, ("dp", "tp"), at={"pp": 1}),
    P("dp", at={"pp": (0, 1)}),
    P("pp", "dp"),
    P("tp", at={"pp": 1, "dp": 0}),
    P("tp", unreduced={"pp"}),
    P(at={"pp": 1, "dp": 0, "tp": 1}),
]


def moved(mesh: vfn.Array, layouts: list[P]) -> list[str]:
    """Each layout to each other, and its gradient back; what is wrong."""
    a, _ = values()
    wrong = []
    for source in layouts:
        x = vfn.shard(a, mesh, source)
        for target in layouts:
            y = vfn.with_sharding(x, target)
            assert vfn.spec_of(y) == target
            assert vfn.typeof(y).mesh == mesh
            grad = vfn.grad(lambda x: (vfn.with_sharding(vfn.with_sharding(x, target) ** 2, P()) * a.flip(0)).sum())(x)
            right = [torch.equal(vfn.unshard(y), a), torch.allclose(vfn.unshard(grad), 2 * a * a.flip(0), rtol=1e-14)]
            if not all(right) or vfn.spec_of(grad).at != source.at:
                wrong.append(f"{source} -> {target}: {right}, {vfn.spec_of(grad)}")
    return wrong


def test_moves_and_their_gradients() -> None:
    with vfn.simulate(8):
        assert not moved(vfn.make_mesh((2, 2, 2), NAMES), LAYOUTS)


def program(mesh: vfn.Array | None) -> dict:
    """Two stages, written out, with ops of all kinds at a place: views, writes, gathers, indices. On plain tensors without a mesh."""
    a, b = values()

    def shard(x, spec):
        return x.contiguous().clone() if mesh is None else vfn.shard(x.contiguous(), mesh, spec)

    w0, w1 = shard(b, P("tp", at={"pp": 0})), shard(b.T, P(None, "tp", at={"pp": 1}))
    ids = shard(torch.tensor([2, 0, 1, 1]), P(at={"pp": 1}))

    def loss(w0, w1, x):
        h = vfn.with_sharding(torch.tanh(x @ w0), P(at={"pp": 1}))
        return vfn.with_sharding((h @ w1)[:, ids].softmax(1).square().sum(), P())

    def twice(w, x):
        """Uses a value of all ranks at one place after the other."""
        h = vfn.with_sharding(torch.tanh(x @ w), P("tp", at={"pp": 1}))
        h = vfn.with_sharding(torch.tanh(h @ w), P(at={"pp": 0}))
        return vfn.with_sharding((h @ w).square().sum(), P()) + w.square().sum()

    at_0 = shard(a, P(at={"pp": 0}))
    value, grads = vfn.value_and_grad(loss, argnums=(0, 1, 2))(w0, w1, shard(a, P()))
    c = w1.clone()
    c[0] = 5.0
    c.view(9)[4:].mul_(2)
    c += shard(b, P("tp"))
    d = shard(a, P("tp", at={"pp": 1}))
    d[1:4] = 7.0  # of a split dim: elements of several ranks
    d.view(-1)[2:9].mul_(2)
    fresh = c.new_zeros(3, 3)  # takes the layout of what is first written
    fresh.add_(c)
    sums = torch.stack([fresh.sum(), c.sum(), c.max(), torch.linalg.vector_norm(c)])
    found = {
        "value": value,
        "grads": grads,
        "twice": [vfn.grad(twice)(shard(b, P("tp")), at_0), vfn.jit(vfn.grad(twice))(shard(b, P()), at_0)],
        "c": c,
        "d": d.sort(0)[0],
        "sums": sums,
        "rows": c[c[:, 0] > 0],
        "number": float(c.sum()),
    }
    return vfn.unshard(found)


def same(found: dict) -> None:
    torch.testing.assert_close(found, program(None), rtol=1e-13, atol=1e-13)


def initial(key) -> dict:
    a, b, c = vfn.random.split(key, 3)
    normal = lambda key, *shape: vfn.random.normal(key, shape, dtype=torch.float64)
    return {
        "table": normal(a, 6, 4),
        "w0": normal(b, 4, 4),
        "w1": normal(c, 4, 6),
        "scale": torch.ones((), dtype=torch.float64),
    }


STAGES = {
    "table": P("tp", at={"pp": 0}),
    "w0": P(None, "tp", at={"pp": 0}),
    "w1": P("tp", at={"pp": 1}),
    "scale": P(at={"pp": (0, 1)}),
}
OPTIMISER = vfn.optim.chain(vfn.optim.clip_by_global_norm(0.1), vfn.optim.adamw(0.01, weight_decay=0.1))


def training(mesh: vfn.Array | None, jit: bool) -> tuple:
    """Three steps of two stages: losses, parameters, the optimiser's state."""
    params = (
        initial(vfn.random.key(0)) if mesh is None else vfn.init(initial, vfn.random.key(0), spec=STAGES, mesh=mesh)
    )
    ids = torch.tensor([1, 5, 2, 2, 0, 3])
    ids = ids if mesh is None else vfn.shard(ids, mesh, P(at={"pp": 0}))

    def loss(params, ids):
        h = torch.tanh(torch.nn.functional.embedding(ids, params["table"]) @ params["w0"])
        first, last = (vfn.with_sharding(params["scale"], P(at={"pp": i})) for i in (0, 1))
        h = vfn.with_sharding(h * first, P(at={"pp": 1}))
        return vfn.with_sharding(-(h @ params["w1"] * last).log_softmax(-1)[:, 0].mean(), P())

    def step(params, state, ids):
        value, grads = vfn.value_and_grad(loss)(params, ids)
        updates, state = OPTIMISER.update(grads, state, params)
        return vfn.optim.apply_updates(params, updates), state, value

    step = vfn.jit(step, donate_argnums=(0, 1)) if jit else step
    state, losses = OPTIMISER.init(params), []
    for _ in range(3):
        params, state, value = step(params, state, ids)
        losses.append(float(value))
    return losses, params, state


def trained(mesh: vfn.Array, jit: bool) -> None:
    losses, params, state = training(mesh, jit)
    torch.testing.assert_close(vfn.unshard((losses, params, state)), training(None, False), rtol=1e-12, atol=1e-13)
    assert {name: vfn.spec_of(x) for name, x in params.items()} == STAGES
    adam = state[1]
    assert {name: vfn.spec_of(x) for name, x in adam.mean.items()} == STAGES
    with vfn.comm_log() as log:
        vfn.optim.global_norm(params)
    assert [call.op for call in log] == ["all_reduce"]
    for x in (*params.values(), *adam.mean.values()):  # elsewhere it takes the memory of a number
        local, own = x.to_local(), mesh.get_coordinate()
        if not hasattr(local, "blocks") and own[0] not in dict(vfn.spec_of(x).at)["pp"]:
            assert local.untyped_storage().nbytes() == 8


OF_TWO = [P("tp", at={"pp": 0}), P(at={"pp": 1})]
RAN, INIT = vfn.random, vfn.random.init
KEY = RAN.key(3)
DRAWS = {
    "bernoulli, high": lambda **how: RAN.bernoulli(KEY, 0.1, (5, 3), "high", **how),
    "permutation": lambda **how: RAN.permutation(KEY, 5, **how),
    "choice": lambda **how: RAN.choice(KEY, torch.arange(30.0).view(10, 3), (5,), **how),
    "categorical": lambda **how: RAN.categorical(KEY, torch.arange(12.0).view(3, 4), shape=(5, 3), **how),
    "ones": lambda **how: INIT.ones(KEY, (5, 3), **how),
    "he_normal": lambda **how: INIT.he_normal()(KEY, (5, 3), **how),
    "orthogonal": lambda **how: INIT.orthogonal()(KEY, (1, 3), **how),
}
DRAWS |= {one.id: lambda one=one, **how: one(KEY, (5, 3), **how) for one in DISTRIBUTIONS}
OF_ARRAYS = [RAN.gamma, RAN.poisson, lambda key, x, **how: RAN.uniform(key, x.shape, minval=x, maxval=9.0, **how)]


def drawn(mesh: vfn.Array) -> list:
    """Draws at a place, eager and in plans, and of parameters at the same place, or another: what is wrong."""
    wrong = []

    def check(name: str, spec: P, found: torch.Tensor, want: torch.Tensor) -> None:
        same = torch.allclose if name == "orthogonal" else torch.equal
        if vfn.spec_of(found) != spec or not same(vfn.unshard(found), want):
            wrong.append((name, spec, found))

    for name, draw in DRAWS.items():
        for spec in OF_TWO:
            check(name, spec, draw(spec=spec, mesh=mesh), draw())
    for name in ("ones", "he_normal", "orthogonal"):
        check(name, OF_TWO[0], vfn.jit(lambda: DRAWS[name](spec=OF_TWO[0], mesh=mesh))(), DRAWS[name]())
    a = torch.arange(1.0, 16.0).view(5, 3)
    for i, draw in enumerate(OF_ARRAYS):
        for source in (P(), P("pp"), OF_TWO[1]):
            x = vfn.shard(a, mesh, source)
            for target in (P(), *OF_TWO):
                check(f"{i} of {source}", target, draw(KEY, x, spec=target, mesh=mesh), draw(KEY, a))
        check(f"{i}", OF_TWO[1], draw(KEY, x), draw(KEY, a))
    return wrong


class Samples:
    """A data set that counts how often it is read."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 7

    def __getitem__(self, i: int) -> dict:
        self.read += 1
        return {"x": torch.arange(3.0) + i, "y": i}


def loaded(mesh: vfn.Array) -> tuple:
    """Blocks and batches at a place: what is wrong, and how many samples are read for batches of one place."""
    wrong, reads = [], []
    for spec, size in (
        (P("tp", at={"pp": 1}), (5, 3)),
        (P("tp", at={"pp": (0, 1)}), (1, 3)),
        (P(at={"pp": 0, "tp": 1}), ()),
    ):
        whole = torch.arange(float(torch.Size(size).numel())).reshape(size)
        asked = []

        def block(coord: dict[str, int]) -> torch.Tensor:
            asked.append(coord)
            return whole.tensor_split([-(-len(whole) // 2)])[coord["tp"]] if spec[:1] else whole

        found = vfn.from_local({"x": block}, mesh, spec)["x"]
        at = dict(spec.at)
        if vfn.spec_of(found) != spec or not torch.equal(vfn.unshard(found), whole):
            wrong.append((spec, found))
        if any(coord[axis] not in row for coord in asked for axis, row in at.items()):
            wrong.append((spec, asked))
    two = {"x": P("tp", None, at={"pp": 0}), "y": P("tp", at={"pp": 1})}
    for spec in (P("tp", at={"pp": 1}), two, {"x": P(None, "tp", at={"pp": 0}), "y": P()}):
        samples = Samples()
        batches = vfn.data.batches(samples, 4, KEY, spec=spec, mesh=mesh, last_batch="keep")
        plain = vfn.data.batches(Samples(), 4, KEY, last_batch="keep")
        for step, found in zip(range(6), batches.starting_at(0)):
            assert vfn.spec_of(found["x"]).at == (spec if isinstance(spec, P) else spec["x"]).at
            torch.testing.assert_close(vfn.unshard(found), plain(step), rtol=0, atol=0)
        reads.append(samples.read)
    return wrong, reads


def stored_by_torch(folder: str) -> None:
    """A tree saved by torch's checkpoints from places, and loaded to others, and by `vfn.load`; and what `vfn.save` writes."""
    tree = {"a": values()[0], "b": {"c": torch.arange(3), "d": torch.tensor(2.5).bfloat16()}}
    pairs = ((2, 2), ("pp", "tp")), ((4,), ("pp",))
    specs = [OF_TWO[0], P("tp", at={"pp": 1}), P(at={"pp": 1, "tp": 0})], [P(at={"pp": 3}), P(at={"pp": (0, 2)}), P()]
    laid = [
        vfn.shard(tree, vfn.make_mesh(*axes), {"a": a, "b": {"c": c, "d": d}}) for axes, (a, c, d) in zip(pairs, specs)
    ]
    dcp.save(laid[0], checkpoint_id=f"{folder}/theirs")
    vfn.save(f"{folder}/ours", laid[1])
    for name, like in (("theirs", laid[1]), ("ours", laid[0])):
        into = vfn.tree.map(torch.zeros_like, like)
        dcp.load(into, checkpoint_id=f"{folder}/{name}")
        for found in (into, vfn.load(f"{folder}/{name}", like=like)):
            assert vfn.digest(vfn.unshard(found)) == vfn.digest(tree)


def stored(folder: str) -> None:
    """A tree saved from two stages, four, and none, loaded on each, exported, and hashed: the same bits."""
    tree = {
        "a": values()[0],
        "b": torch.arange(5),
        "c": torch.tensor([1.5, -0.0, 3e4]).bfloat16(),
        "s": torch.tensor(3.5),
    }
    layouts = {
        "two": (
            ((2, 2), ("pp", "tp")),
            [P("tp", at={"pp": 0}), P("tp", at={"pp": 1}), P(at={"pp": (0, 1)}), P(at={"pp": 1})],
        ),
        "four": (((4,), ("pp",)), [P(at={"pp": 3}), P(at={"pp": 1}), P(at={"pp": (0, 2)}), P()]),
        "none": (((4,), ("dp",)), [P("dp"), P("dp"), P(), P()]),
    }
    for name, (axes, specs) in layouts.items():
        value = vfn.shard(tree, vfn.make_mesh(*axes), dict(zip(tree, specs)))
        assert vfn.digest(value) == vfn.digest(tree)
        vfn.save(f"{folder}/{name}", value)
        vfn.export_weights(f"{folder}/{name}.safetensors", value)
        for other, (axes, specs) in layouts.items():
            mesh, spec = vfn.make_mesh(*axes), dict(zip(tree, specs))
            like = {"like": vfn.shard(tree, mesh, spec)} if other == "two" else {"spec": spec, "mesh": mesh}
            loaded = vfn.load(f"{folder}/{name}", **like)
            assert {key: vfn.spec_of(x) for key, x in loaded.items()} == spec
            assert vfn.digest(vfn.unshard(loaded)) == vfn.digest(tree), (name, other)
        assert vfn.digest(vfn.load(f"{folder}/{name}.safetensors", like=tree)) == vfn.digest(tree)


def on_a_rank(folder: str) -> tuple:
    mesh = vfn.make_mesh((2, 2), ("pp", "tp"))
    x = vfn.shard(values()[0], mesh, P("tp", at={"pp": 1}))
    with vfn.comm_log() as log:
        nothing = (x @ x.T).sum().to_local().isnan().item()
    few = [P("tp", at={"pp": 0}), P(None, "tp", at={"pp": 1}), P(at={"pp": (0, 1)}), P("pp"), P("tp", unreduced={"pp"})]
    trained(mesh, False)
    trained(mesh, True)
    stored(folder)
    stored_by_torch(folder)
    assert not drawn(mesh)
    wrong, reads = loaded(mesh)
    assert not wrong
    assert (reads[0] < 6) == (mesh.get_coordinate()[0] == 0)  # the others read one batch of each size
    loops = vfn.jit(lambda w: vfn.cond(w.sum() > 0, lambda: torch.ones(2), lambda: torch.zeros(2)))(x)
    with vfn.strict(), pytest.raises(vfn.errors.ReshardError, match="strict: this op needs a move"):  # on all ranks
        x.flip(0)
    line = vfn.make_mesh((4,), ("pp",))
    four = [
        vfn.shard(values()[0], line, P(at={"pp": i})) for i in range(4)
    ]  # on each rank three numbers stand for others
    norm = vfn.jit(vfn.optim.global_norm)(four)
    torch.testing.assert_close(vfn.unshard(norm), vfn.optim.global_norm([values()[0]] * 4))
    shown = repr(x).splitlines()[1][:9]
    return mesh.get_coordinate()[0], nothing, len(log), shown, program(mesh), moved(mesh, few), loops.tolist()


def test_a_program_of_two_stages(tmp_path) -> None:
    with vfn.simulate(8):
        mesh = vfn.make_mesh((2, 2, 2), NAMES)
        same(program(mesh))
        trained(mesh, False)
        trained(mesh, True)
        vfn.check_parity(lambda w: vfn.with_sharding(w * 2, P()), vfn.shard(values()[0], mesh, P(at={"pp": 1})))
    with vfn.simulate(4):
        stored(str(tmp_path))
        mesh = vfn.make_mesh((2, 2), ("tp", "pp"))
        assert not drawn(mesh)
        assert not loaded(mesh)[0]


def test_on_real_ranks(gloo, tmp_path) -> None:
    for pp, nothing, sent, shown, found, wrong, loops in gloo(4, on_a_rank, str(tmp_path)):
        assert not wrong
        same(found)
        assert loops == [1.0, 1.0]
        assert (nothing, bool(sent), shown) == ((False, True, "this rank") if pp else (True, False, "this rank"))
