"""Programs to copy: the worked examples of JAX's documentation on `shard_map`, as bodies for one rank.

`EXAMPLES`, below them, says for each how its arguments lie, what it is on whole tensors, and how often its ranks talk. Values
and gradients are those of one device; what is sent is counted, forward and backward, on simulated and on real ranks.

Source: the programs are those of "SPMD multi-device parallelism with shard_map" (docs.jax.dev); GPipe is arXiv 1811.06965,
the tensor-parallel block arXiv 1909.08053, the sharding of weights arXiv 1910.02054.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from optree import tree_map
from torch.utils._python_dispatch import TorchDispatchMode

import vescale_fn as vfn
from vescale_fn import P

# --- products of matrices ---------------------------------------------------------------------------------------------


def gathered(x, w):
    """The rows of x and of w are split. Every rank gathers w, and has the rows of the product that it has of x."""
    return x @ vfn.all_gather(w, "i", tiled=True)


def gathered_by_ring(x, w):
    """The same, but no rank ever holds all of w: the blocks go round, and each is used while it is here."""
    n, here = vfn.axis_size("i"), vfn.axis_index("i")
    onward = [(k, (k + 1) % n) for k in range(n)]
    size = w.shape[0]

    def columns(k):  # those of x that meet block k of w
        return vfn.dynamic_slice(x, (0, k % n * size), (x.shape[0], size))

    out = columns(here) @ w
    for step in range(1, n):
        w = vfn.ppermute(w, "i", onward)
        out = out + columns(here - step) @ w
    return out


def gathered_both_ways(x, w):
    """The same, with both directions of each link in use: the upper half of a block goes one way, the lower the other."""
    n, here = vfn.axis_size("i"), vfn.axis_index("i")
    onward, back = [(k, (k + 1) % n) for k in range(n)], [(k, (k - 1) % n) for k in range(n)]
    upper, lower = w.chunk(2)
    size = upper.shape[0]

    def columns(k, half):
        return vfn.dynamic_slice(x, (0, (2 * (k % n) + half) * size), (x.shape[0], size))

    out = columns(here, 0) @ upper + columns(here, 1) @ lower
    for step in range(1, n):
        upper, lower = vfn.ppermute(upper, "i", onward), vfn.ppermute(lower, "i", back)
        out = out + columns(here - step, 0) @ upper + columns(here + step, 1) @ lower
    return out


def scattered(x, w):
    """The columns of x and the rows of w are split. Every rank has a part of each sum, and is given its rows' sums."""
    return vfn.psum_scatter(x @ w, "i", tiled=True)


def scattered_by_ring(x, w):
    """The same, but no rank ever holds all of the product: sums go round, and each rank adds its part to what is here."""
    n, here = vfn.axis_size("i"), vfn.axis_index("i")
    onward = [(k, (k + 1) % n) for k in range(n)]
    size = x.shape[0] // n

    def rows(k):  # those of x that make block k of the product
        return vfn.dynamic_slice(x, (k % n * size, 0), (size, x.shape[1]))

    total = rows(here - 1) @ w
    for step in range(2, n + 1):
        total = vfn.ppermute(total, "i", onward) + rows(here - step) @ w
    return total


def scattered_both_ways(x, w):
    """The same, with both directions of each link in use."""
    n, here = vfn.axis_size("i"), vfn.axis_index("i")
    onward, back = [(k, (k + 1) % n) for k in range(n)], [(k, (k - 1) % n) for k in range(n)]
    size = x.shape[0] // (2 * n)

    def rows(k, half):
        return vfn.dynamic_slice(x, ((2 * (k % n) + half) * size, 0), (size, x.shape[1]))

    upper, lower = rows(here - 1, 0) @ w, rows(here + 1, 1) @ w
    for step in range(2, n + 1):
        upper = vfn.ppermute(upper, "i", onward) + rows(here - step, 0) @ w
        lower = vfn.ppermute(lower, "i", back) + rows(here + step, 1) @ w
    return torch.cat([upper, lower])


# --- a network --------------------------------------------------------------------------------------------------------


def network(layers, x):
    for layer in layers:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return x


def loss(layers, x, y):
    return (network(layers, x) - y).square().sum(1).mean()


def data_parallel(layers, x, y):
    """Rows of x and y are split. `pvary` is where the gradients of all weights are summed, together."""
    return vfn.pmean(loss(vfn.pvary(layers, "data"), x, y), "data")


def fully_sharded(layers, x, y):
    """The weights are split, too. A layer is gathered when it is used, and its gradient is scattered."""
    for layer in layers:
        layer = vfn.all_gather(layer, "data", tiled=True)
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return vfn.pmean((x - y).square().sum(1).mean(), "data")


def fully_sharded_remat(layers, x, y):
    """The same, but no gathered layer is kept for the backward pass. What `remat` wraps is its policy: the gather is made
    again, and the product is not, as its gradient needs its operands alone."""

    def product(layer, x):
        layer = vfn.all_gather(layer, "data", tiled=True)
        return x @ layer["w"] + layer["b"]

    for layer in layers:
        x = torch.tanh(vfn.remat(product)(layer, x))
    return vfn.pmean((x - y).square().sum(1).mean(), "data")


def tensor_parallel(layers, x, y):
    """Features are split, those of x and y and the inputs of each layer."""
    for layer in layers:
        x = torch.tanh(vfn.psum_scatter(x @ layer["w"], "model", scatter_dimension=1, tiled=True) + layer["b"])
    return vfn.psum((x - y).square().sum(1).mean(), "model")


def columns_then_rows(block, x):
    """Two layers with one sum: the columns of the first and the rows of the second are split."""
    hidden = torch.nn.functional.gelu(x @ block["up"] + block["up_bias"])
    return vfn.psum(hidden @ block["down"], "model") + block["down_bias"]


def columns_then_rows_on_one(block, x):
    return torch.nn.functional.gelu(x @ block["up"] + block["up_bias"]) @ block["down"] + block["down_bias"]


def fully_sharded_and_tensor_parallel(layers, x, y):
    """Rows over "data", features over "model"; each rank of a row of the mesh holds a part of that row's weights."""

    def product(layer, x):
        layer = vfn.all_gather(layer, "data", tiled=True)
        return vfn.psum_scatter(x @ layer["w"], "model", scatter_dimension=1, tiled=True) + layer["b"]

    for layer in layers:
        x = torch.tanh(vfn.remat(product)(layer, x))
    return vfn.pmean(vfn.psum((x - y).square().sum(1).mean(), "model"), "data")


# --- a pipeline -------------------------------------------------------------------------------------------------------


def pipelined(layers, x, y):
    """GPipe: a stage holds some of the layers, and microbatches x[0], x[1], ... follow one another through the stages.

    The backward pass is the pipeline run backward: autograd sends each cotangent the other way.
    """
    stage, last = vfn.axis_index("stage"), vfn.axis_size("stage") - 1
    onward = [(k, k + 1) for k in range(last)]
    my_layers = [{"w": w, "b": b} for w, b in zip(layers["w"], layers["b"])]
    out, leaving = torch.zeros_like(x[0]), []
    for tick in range(len(x) + last):
        arriving = vfn.ppermute(out, "stage", onward) if tick else out
        entering = x[min(tick, len(x) - 1)]  # after the last one its copies, which arrive nowhere in time
        out = vfn.remat(network)(my_layers, torch.where(stage == 0, entering, arriving))
        if tick >= last:
            leaving.append(out)
    wrong = (torch.stack(leaving) - y).square().sum(-1).mean()
    return vfn.psum(torch.where(stage == last, wrong, 0.0), "stage")


def pipelined_on_one(layers, x, y):
    layers = [{"w": w, "b": b} for w, b in zip(layers["w"], layers["b"])]
    return loss(layers, x.flatten(0, 1), y.flatten(0, 1))


# --- microbatches -----------------------------------------------------------------------------------------------------


def accumulated(layers, x, y):
    """The gradient over microbatches x[0], x[1], ...: those of `reduced` weights are each rank's own parts of a sum, which
    is taken once, at the end."""
    layers = vfn.pcast(layers, "data", to="reduced")
    total = None
    for rows, wanted in zip(x, y):
        part = vfn.grad(loss)(layers, rows, wanted)
        total = part if total is None else tree_map(torch.add, total, part)
    return vfn.pmean(tree_map(lambda g: g / len(x), total), "data")


def accumulated_on_one(layers, x, y):
    return torch.func.grad(loss)(layers, x.flatten(0, 1), y.flatten(0, 1))


# --- how they lie, what they are, what they send ----------------------------------------------------------------------


def draw(*shape):
    generator = torch.Generator().manual_seed(math.prod(shape) + len(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])


def drawn_layers(*sizes):
    return [{"w": draw(m, n), "b": draw(n)} for m, n in zip(sizes, sizes[1:])]


@dataclass
class Example:
    body: Callable
    on_one: Callable
    args: tuple
    in_specs: tuple
    out_specs: P
    axes: tuple  # of the mesh
    sent: Callable  # from the sizes of the mesh's axes: what is sent forward, and backward
    moving: tuple = (0,)  # the arguments that are differentiated


X, W = draw(48, 48), draw(48, 5)
LAYERS, ROWS, WANTED = drawn_layers(24, 48, 24, 48), draw(24, 24), draw(24, 48)
DEEP, CHUNKS = {"w": draw(8, 6, 6), "b": draw(8, 6)}, draw(5, 4, 6)
BLOCK = {"up": draw(6, 24), "up_bias": draw(24), "down": draw(24, 6), "down_bias": draw(6)}
BLOCK_SPECS = {"up": P(None, "model"), "up_bias": P("model"), "down": P("model"), "down_bias": P()}
L = len(LAYERS)

product = partial(Example, on_one=torch.matmul, args=(X, W), out_specs=P("i"), axes=("i",), moving=(0, 1))
of_network = partial(Example, on_one=loss, args=(LAYERS, ROWS, WANTED), out_specs=P())
by_rows, by_columns = (P("i"), P("i")), (P(None, "i"), P("i"))

EXAMPLES = {
    "all-gather product": product(
        gathered, in_specs=by_rows, sent=lambda n: ({"all_gather": 1}, {"reduce_scatter": 1})
    ),
    "all-gather product, ring": product(
        gathered_by_ring, in_specs=by_rows, sent=lambda n: ({"permute": n - 1}, {"permute": n - 1})
    ),
    "all-gather product, both ways": product(
        gathered_both_ways, in_specs=by_rows, sent=lambda n: ({"permute": 2 * (n - 1)}, {"permute": 2 * (n - 1)})
    ),
    "psum-scatter product": product(
        scattered, in_specs=by_columns, sent=lambda n: ({"reduce_scatter": 1}, {"all_gather": 1})
    ),
    "psum-scatter product, ring": product(
        scattered_by_ring, in_specs=by_columns, sent=lambda n: ({"permute": n - 1}, {"permute": n - 1})
    ),
    "psum-scatter product, both ways": product(
        scattered_both_ways, in_specs=by_columns, sent=lambda n: ({"permute": 2 * (n - 1)}, {"permute": 2 * (n - 1)})
    ),
    "data parallel": of_network(
        data_parallel,
        in_specs=(P(), P("data"), P("data")),
        axes=("data",),
        sent=lambda n: ({"all_reduce": 1}, {"all_reduce": 1}),
    ),
    "FSDP": of_network(
        fully_sharded,
        in_specs=(P("data"), P("data"), P("data")),
        axes=("data",),
        sent=lambda n: ({"all_gather": L, "all_reduce": 1}, {"reduce_scatter": L}),
    ),
    "FSDP, gathered again": of_network(
        fully_sharded_remat,
        in_specs=(P("data"), P("data"), P("data")),
        axes=("data",),
        sent=lambda n: ({"all_gather": L, "all_reduce": 1}, {"all_gather": L, "reduce_scatter": L}),
    ),
    "tensor parallel": of_network(
        tensor_parallel,
        in_specs=(P("model"), P(None, "model"), P(None, "model")),
        axes=("model",),
        sent=lambda n: ({"reduce_scatter": L, "all_reduce": 1}, {"all_gather": L}),
    ),
    "tensor parallel, columns then rows": Example(
        columns_then_rows,
        columns_then_rows_on_one,
        (BLOCK, draw(10, 6)),
        (BLOCK_SPECS, P()),
        P(),
        ("model",),
        sent=lambda n: ({"all_reduce": 1}, {"all_reduce": 1}),
        moving=(0, 1),
    ),
    "FSDP x tensor parallel": of_network(
        fully_sharded_and_tensor_parallel,
        axes=("data", "model"),
        in_specs=(P(("model", "data")), P("data", "model"), P("data", "model")),
        sent=lambda n, m: (
            {"all_gather": L, "reduce_scatter": L, "all_reduce": 2},
            {"all_gather": 2 * L, "reduce_scatter": L},
        ),
    ),
    "GPipe": Example(
        pipelined,
        pipelined_on_one,
        (DEEP, CHUNKS, CHUNKS.cos()),
        (P("stage"), P(), P()),
        P(),
        ("stage",),
        sent=lambda n: ({"permute": len(CHUNKS) + n - 2, "all_reduce": 1}, {"permute": len(CHUNKS) + n - 2}),
    ),
    "microbatches": Example(
        accumulated,
        accumulated_on_one,
        (drawn_layers(6, 8, 3), draw(5, 8, 6), draw(5, 8, 3)),
        (P(), P(None, "data"), P(None, "data")),
        P(),
        ("data",),
        sent=lambda n: ({"all_reduce": 1}, None),
    ),
}


def with_moving(f, example, args):
    """`f` as a function of the differentiated arguments alone, and those."""

    def of_moving(*moving):
        return f(*(dict(zip(example.moving, moving)).get(k, x) for k, x in enumerate(args)))

    return of_moving, [args[k] for k in example.moving]


def on_ranks(name, sizes):
    """The result, its pullback of a cotangent, and what was sent for each, on a mesh of these sizes."""
    example = EXAMPLES[name]
    mesh = vfn.make_mesh(sizes, example.axes)
    f = vfn.shard_map(example.body, mesh=mesh, in_specs=example.in_specs, out_specs=example.out_specs)
    f, moving = with_moving(f, example, vfn.shard(example.args, mesh, example.in_specs))
    with vfn.comm_log() as forward:
        out, pullback = vfn.vjp(f, *moving)
    cotangent = tree_map(torch.cos, out)
    with vfn.comm_log() as backward:
        gradients = pullback(cotangent)
    return vfn.unshard((out, gradients)), *(dict(Counter(record.op for record in log)) for log in (forward, backward))


def on_one_device(name):
    example = EXAMPLES[name]
    f, moving = with_moving(example.on_one, example, example.args)
    out, pullback = torch.func.vjp(f, *moving)
    return out, pullback(tree_map(torch.cos, out))


def agree(name, sizes, found):
    answers, forward, backward = found
    torch.testing.assert_close(answers, on_one_device(name), rtol=1e-12, atol=1e-12)  # fp64: sums in another order
    if sizes == (1,):
        assert forward == backward == {}
    elif 1 not in sizes:  # nothing is sent over an axis of one rank
        want_forward, want_backward = EXAMPLES[name].sent(*sizes)
        assert forward == want_forward
        assert want_backward in (None, backward)


ONE_AXIS, TWO_AXES = [(1,), (2,), (4,), (8,)], [(1, 2), (2, 1), (2, 4), (4, 2)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_examples(name):
    for sizes in ONE_AXIS if len(EXAMPLES[name].axes) == 1 else TWO_AXES:
        with vfn.simulate(math.prod(sizes)):
            agree(name, sizes, on_ranks(name, sizes))


def sizes_of_four(name):
    return (4,) if len(EXAMPLES[name].axes) == 1 else (2, 2)


def all_on_real_ranks():
    return {name: on_ranks(name, sizes_of_four(name)) for name in EXAMPLES}


def test_worked_examples_on_real_ranks(gloo):
    for found in gloo(4, all_on_real_ranks):
        for name in EXAMPLES:
            agree(name, sizes_of_four(name), found[name])


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_remat_of_a_gathered_product_gathers_again_and_multiplies_once():
    counts = []
    for name in ("FSDP", "FSDP, gathered again"):
        with vfn.simulate(4), Products() as products:
            _, _, backward = on_ranks(name, (4,))
            counts.append((products.count, backward["reduce_scatter"], backward.get("all_gather", 0)))
    assert counts == [(3 * L - 1, L, 0), (3 * L - 1, L, L)]  # nobody asked for the gradient of the network's input


def accumulated_around_the_map(mesh):
    """Microbatches as in `accumulated`, with the loop outside of the map: the sum is taken where the layout asks for it."""
    layers, x, y = EXAMPLES["microbatches"].args
    weights = P(reduced={"data"})
    local = vfn.shard_map(
        lambda layers, x, y: vfn.pmean(loss(layers, x, y), "data"),
        mesh=mesh,
        in_specs=(weights, P("data"), P("data")),
        out_specs=P(),
    )
    layers = vfn.shard(layers, mesh, weights)
    total = None
    for rows, wanted in zip(x, y):
        part = vfn.grad(local)(layers, rows, wanted)
        total = part if total is None else tree_map(torch.add, total, part)
    return vfn.with_sharding(tree_map(lambda g: g / len(x), total), P())


def test_gradients_of_reduced_weights_are_summed_once():
    args = EXAMPLES["microbatches"].args
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("data",))
        with vfn.comm_log() as log:
            found = accumulated_around_the_map(mesh)
    torch.testing.assert_close(vfn.unshard(found), accumulated_on_one(*args), rtol=1e-12, atol=1e-12)
    assert Counter(record.why for record in log) == {"pmean": len(args[1]), "with_sharding": 1}  # losses; weights
