"""Values at one coordinate of an axis, ``P(..., at={"pp": 2})``: ops, moves, gradients, what is elsewhere, on simulated and real ranks."""

import torch

import vescale_fn as vfn
from vescale_fn import P

NAMES = ("pp", "dp", "tp")


def values() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(15.0, dtype=torch.float64).reshape(5, 3) / 7, torch.arange(9.0, dtype=torch.float64).reshape(
        3, 3
    ) - 4


LAYOUTS = [
    P(),
    P("dp", "tp"),
    P("tp", at={"pp": 0}),
    P(None, ("dp", "tp"), at={"pp": 1}),
    P("dp", at={"pp": (0, 1)}),
    P("pp", "dp"),
    P(("tp", "pp")),
    P("tp", at={"dp": 1}),
    P("tp", at={"pp": 1, "dp": 0}),
    P("tp", unreduced={"pp"}),
    P(at={"pp": 1, "dp": 0, "tp": 1}),
]


def moved(mesh: vfn.Array, few: bool) -> list[str]:
    """Each layout to each other, and its gradient back; what is wrong."""
    a, _ = values()
    wrong = []
    for i, source in enumerate(LAYOUTS):
        x = vfn.shard(a, mesh, source)
        for j, target in enumerate(LAYOUTS):
            if few and (i + 2 * j) % 3:
                continue
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
        assert not moved(vfn.make_mesh((2, 2, 2), NAMES), False)


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

    value, grads = vfn.value_and_grad(loss, argnums=(0, 1, 2))(w0, w1, shard(a, P()))
    c = w1.clone()
    c[0] = 5.0
    c.view(9)[4:].mul_(2)
    c += shard(b, P("tp"))
    sums = torch.stack([c.sum(), c.max(), torch.linalg.vector_norm(c)])
    found = {"value": value, "grads": grads, "c": c, "sums": sums, "rows": c[c[:, 0] > 0], "number": float(c.sum())}
    return vfn.unshard(found)


def same(found: dict) -> None:
    torch.testing.assert_close(found, program(None), rtol=1e-13, atol=1e-13)


def on_a_rank() -> tuple:
    mesh = vfn.make_mesh((2, 2), ("pp", "tp"))
    a, _ = values()
    x = vfn.shard(a, mesh, P("tp", at={"pp": 1}))
    with vfn.comm_log() as log:
        y = (x @ x.T).sum()
    block = y.to_local()
    pp = mesh.get_coordinate()[0]
    held = x.to_local()
    wrong = moved4(mesh)
    return (
        pp,
        block.isnan().item(),
        held.untyped_storage().nbytes(),
        len(log),
        repr(x).splitlines()[1][:9],
        program(mesh),
        wrong,
    )


def moved4(mesh) -> list[str]:
    global LAYOUTS
    before = LAYOUTS
    LAYOUTS = [
        P("tp", at={"pp": 0}),
        P(None, "tp", at={"pp": 1}),
        P(at={"pp": (0, 1)}),
        P("pp"),
        P(),
        P("tp", unreduced={"pp"}),
    ]
    try:
        return moved(mesh, False)
    finally:
        LAYOUTS = before


def test_a_program_of_two_stages() -> None:
    with vfn.simulate(8):
        same(program(vfn.make_mesh((2, 2, 2), NAMES)))
    with vfn.simulate(2):
        same(program(vfn.make_mesh((2, 1), ("pp", "tp"))))


def test_on_real_ranks(gloo) -> None:
    for pp, nothing, held, sent, text, found, wrong in gloo(4, on_a_rank):
        assert not wrong
        same(found)
        assert (nothing, held, sent) == ((True, 8, 0) if pp == 0 else (False, held, sent))
        assert held > 8 and sent > 0 if pp else text == "this rank"
