"""Every transform in every context: the answer of one device, or one clear error. The table in docs/transforms.md says which.

A row is a transform, a column a context: the ways to run one and the same function on a mesh. Each cell is compared with
the transform of that function on plain tensors.
"""

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import func
from torch.utils.checkpoint import checkpoint
from whole import WHOLE

import vescale_fn as vfn
from vescale_fn import P, random
from vescale_fn.errors import VfnError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "transforms.md"
KEY = random.key(7)


def draw(*shape):
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).sin().view(shape)


def sines(w):
    return {name: x.sin() for name, x in w.items()}


# --- the rows: a transform of f(w, x), a function of a tree and a tensor to a vector of two losses -----------------------


def total(f):
    return lambda w, x: f(w, x).sum()


def stacked(w):
    return {name: torch.stack([x, x.cos(), x.exp()]) for name, x in w.items()}


class Model(torch.nn.Module):
    """A module whose parameters are `w`, and whose forward is `f`."""

    def __init__(self, f):
        super().__init__()
        self.f, self.up, self.down = f, torch.nn.Parameter(torch.empty(())), torch.nn.Parameter(torch.empty(()))

    def forward(self, x):
        return self.f({"up": self.up, "down": self.down}, x)


def through_a_module(f):
    model = Model(f)
    return lambda w, x: func.functional_call(model, w, (x,))


def cotangent():
    return torch.tensor([1.0, -2.0], dtype=torch.float64)


def by(derive):  # of the form of jvp
    return lambda f: lambda w, x: derive(lambda w: f(w, x), (w,), (sines(w),))[1]


def linear(linearize):
    return lambda f: lambda w, x: [move(sines(w)) for _, move in [linearize(lambda w: f(w, x), w)]]


def torch_linearize(f, w):
    with warnings.catch_warnings():  # its constant folding warns of its own doing
        warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node")
        return func.linearize(f, w)


TRANSFORMS = {
    "vfn.grad": lambda f: vfn.grad(total(f)),
    "vfn.vjp": lambda f: lambda w, x: vfn.vjp(f, w, x)[1](cotangent())[0],
    "vfn.jvp": by(vfn.jvp),
    "vfn.linearize": linear(vfn.linearize),
    "vfn.vmap": lambda f: lambda w, x: vfn.vmap(f, (0, None))(stacked(w), x),
    "torch.func.grad": lambda f: func.grad(total(f)),
    "torch.func.vjp": lambda f: lambda w, x: func.vjp(lambda w: f(w, x), w)[1](cotangent())[0],
    "torch.func.jvp": by(func.jvp),
    "torch.func.linearize": linear(torch_linearize),
    "torch.func.jacrev": func.jacrev,
    "torch.func.jacfwd": func.jacfwd,
    "torch.func.hessian": lambda f: func.hessian(total(f)),
    "torch.func.vmap": lambda f: lambda w, x: func.vmap(f, (0, None))(stacked(w), x),
    "torch.func.functional_call": lambda f: func.grad(total(through_a_module(f))),
    "vmap(grad)": lambda f: func.vmap(func.grad(total(f)), (None, 1)),
    "grad(grad)": lambda f: func.grad(lambda w, x: (func.grad(total(f))(w, x)["up"] ** 2).sum()),
    "vfn.grad(vfn.grad)": lambda f: vfn.grad(lambda w, x: (vfn.grad(total(f))(w, x)["up"] ** 2).sum()),
    "vfn.remat": lambda f: vfn.grad(total(vfn.remat(f))),
    "torch.utils.checkpoint": lambda f: vfn.grad(total(lambda w, x: checkpoint(f, w, x, use_reentrant=False))),
}

# --- the columns: a function on one device, its sizes (samples are the second dim of x), and how a transform of it runs ---


def net(w, x):
    return (torch.tanh(x @ w["up"]) @ w["down"]).square().flatten(0, -2).sum(0)


def with_noise(w, x, spec=None):
    h = torch.tanh(x @ w["up"])
    return ((h * random.normal(KEY, h.shape[-1:], h.dtype, spec=spec)) @ w["down"]).square().flatten(0, -2).sum(0)


def with_dropout(w, x):
    return net({"up": random.dropout(KEY, w["up"], 0.4), "down": w["down"]}, x)


def by_rule(tanh):
    """`net` and `body` with another tanh."""

    def net(w, x):
        return (tanh(x @ w["up"]) @ w["down"]).square().flatten(0, -2).sum(0)

    def body(w, x):
        w = my_part(w)
        return vfn.psum(vfn.psum(tanh(x @ w["up"]) @ w["down"], "tp").square().flatten(0, -2).sum(0), "dp")

    ways = ("global", UNEVEN, on_arrays(net)), ("around", EVEN, around(body)), ("in a body", EVEN, inside(body))
    return [(way, net, sizes, run) for way, sizes, run in ways]


@vfn.custom_vjp
def tanh_by_vjp(x):
    return torch.tanh(x)


def kept_tanh(x):
    y = torch.tanh(x)
    return y, y


tanh_by_vjp.defvjp(kept_tanh, lambda y, g: ((1 - y * y) * g,))


@vfn.custom_jvp
def tanh_by_jvp(x):
    return torch.tanh(x)


@tanh_by_jvp.defjvp
def rule_of_tanh(primals, tangents):
    y = tanh_by_jvp(*primals)
    return y, (1 - y * y) * tangents[0]


def placed(w, x):
    return net({"up": vfn.with_sharding(w["up"], P(None, "tp")), "down": w["down"]}, vfn.with_sharding(x, P("dp")))


def my_part(w):
    """Of replicated weights the part that this rank of `tp` works with."""
    n = w["down"].shape[0] // vfn.axis_size("tp")
    first = vfn.axis_index("tp") * n
    return {
        "up": vfn.dynamic_slice(w["up"], [0, first], [w["up"].shape[0], n]),
        "down": vfn.dynamic_slice(w["down"], [first, 0], [n, 2]),
    }


def body(w, x):
    w = my_part(w)
    return vfn.psum(vfn.psum(torch.tanh(x @ w["up"]) @ w["down"], "tp").square().flatten(0, -2).sum(0), "dp")


def body_with_noise(w, x):
    w = my_part(w)
    noise = random.normal(KEY, (vfn.axis_size("tp") * w["up"].shape[1],), x.dtype, spec=P("tp"))
    y = vfn.psum((torch.tanh(x @ w["up"]) * noise) @ w["down"], "tp")
    return vfn.psum(y.square().flatten(0, -2).sum(0), "dp")


def body_with_dropout(w, x):
    return body({"up": random.dropout(KEY, w["up"], 0.4), "down": w["down"]}, x)


SPECS = {"up": P("dp", "tp"), "down": P("tp")}


def on_arrays(f):
    return lambda transform, mesh, w, x: transform(f)(vfn.shard(w, mesh, SPECS), vfn.shard(x, mesh, P("dp")))


def around(body):
    def run(transform, mesh, w, x):
        return transform(vfn.shard_map(body, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P()))(w, x)

    return run


def inside(body):
    def run(transform, mesh, w, x):
        return vfn.shard_map(transform(body), mesh=mesh, in_specs=(P(), P("dp")), out_specs=P())(w, x)

    return run


UNEVEN, EVEN = (5, 7), (4, 12)  # rows of x, width of the hidden layer
CONTEXTS = {  # for each way: its name, the function on one device, sizes, and what runs
    "arrays": [("global", net, UNEVEN, on_arrays(net))],
    "`with_sharding`": [("global", net, UNEVEN, on_arrays(placed))],
    "around `shard_map`": [("around", net, EVEN, around(body))],
    "in a body": [("in a body", net, EVEN, inside(body))],
    "draws": [
        ("global", with_noise, UNEVEN, on_arrays(lambda w, x: with_noise(w, x, P("tp")))),
        ("around", with_noise, EVEN, around(body_with_noise)),
        ("in a body", with_noise, EVEN, inside(body_with_noise)),
    ],
    "dropout": [
        ("global", with_dropout, UNEVEN, on_arrays(with_dropout)),
        ("around", with_dropout, EVEN, around(body_with_dropout)),
        ("in a body", with_dropout, EVEN, inside(body_with_dropout)),
    ],
    "`custom_jvp`": by_rule(tanh_by_jvp),
    "`custom_vjp`": by_rule(tanh_by_vjp),
}
TRACED = (
    "torch.func.linearize: inside a shard_map body it would lose the types of local values, and so gradients\n"
    "  Instead: vfn.linearize(f, *primals), which gives the same pair; or torch.func.linearize outside of the shard_map"
)
FORWARD = (
    "custom_vjp of tanh_by_vjp: it has a rule for cotangents alone, and cannot be differentiated in forward mode (jvp, jacfwd, "
    "hessian)\n  Instead: vfn.custom_jvp, whose rule is for tangents and gives gradients as well; or reverse mode: "
    "vfn.linearize, torch.func.jacrev"
)
ERRORS = {
    (row, column, way): FORWARD
    for row in ("vfn.jvp", "torch.func.jvp", "torch.func.linearize", "torch.func.jacfwd")
    for column, ways in CONTEXTS.items()
    if column == "`custom_vjp`"
    for way, *_ in ways
}
ERRORS |= {
    ("torch.func.linearize", column, way): TRACED
    for column, ways in CONTEXTS.items()
    for way, *_ in ways
    if way == "in a body"
}
NOTES = [TRACED, FORWARD]
CELLS = [(row, column) for row in TRANSFORMS for column in CONTEXTS]


def check_cell(row, column, mesh):
    """Each way of a cell gives the answer of one device, or its error."""
    for way, f, (rows, width), run in CONTEXTS[column]:
        w, x = {"up": draw(3, width), "down": draw(width, 2)}, draw(rows, 2, 3)
        with vfn.use_mesh(mesh):
            if (row, column, way) in ERRORS:
                with pytest.raises(VfnError) as caught:
                    run(TRANSFORMS[row], mesh, w, x)
                assert str(caught.value) == ERRORS[row, column, way]
                continue
            found = vfn.unshard(run(TRANSFORMS[row], mesh, w, x))
        torch.testing.assert_close(
            found, TRANSFORMS[row](f)(w, x), rtol=1e-11, atol=1e-12, msg=lambda text, way=way: f"{way}: {text}"
        )


@pytest.mark.parametrize(("row", "column"), CELLS)
def test_cell(row, column):
    shape = of_cell(row, column, [(1, 4), (2, 3)])
    with vfn.simulate(math.prod(shape)):
        check_cell(row, column, vfn.make_mesh(shape, ("dp", "tp")))


def of_cell(row, column, meshes):
    """One of two meshes, in turn: so each row and each column is run on both."""
    return meshes[place(row, column) % 2]


def place(row, column):
    """Of the diagonal that a cell lies on."""
    return list(TRANSFORMS).index(row) + list(CONTEXTS).index(column)


def cells_on_real_ranks():
    meshes = [vfn.make_mesh(shape, ("dp", "tp")) for shape in ((1, 2), (2, 1))]
    cells = [cell for cell in CELLS if WHOLE or place(*cell) % 3 == 0]  # of each row and column some, on both meshes
    for row, column in cells:
        check_cell(row, column, of_cell(row, column, meshes))
    return {row for row, _ in cells}, {column for _, column in cells}


def test_cells_of_every_row_and_column_on_real_ranks(gloo):
    assert gloo(2, cells_on_real_ranks) == [(set(TRANSFORMS), set(CONTEXTS))] * 2


def table():
    """The table of docs/transforms.md, as it should be."""
    lines = ["| | " + " | ".join(CONTEXTS) + " |", "|---" * (len(CONTEXTS) + 1) + "|"]
    for row in TRANSFORMS:
        cells = []
        for column, ways in CONTEXTS.items():
            raising = {way: ERRORS[row, column, way] for way, *_ in ways if (row, column, way) in ERRORS}
            notes = "".join(sorted({f"[{NOTES.index(text) + 1}]" for text in raising.values()}))
            whole = len(raising) == len(ways)
            cells.append(
                "✓" if not raising else f"error {notes}" if whole else f"✓; {', '.join(raising)} error {notes}"
            )
        lines.append(f"| `{row}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_page_has_this_table():
    text = PAGE.read_text()
    start = text.index("<!-- matrix -->\n") + len("<!-- matrix -->\n")
    assert text[start : text.index("\n\n", start)] == table()
    for i, error in enumerate(NOTES):
        assert f"[{i + 1}] `{error.splitlines()[0]}`" in " ".join(text.split())
