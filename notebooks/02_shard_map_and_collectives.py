# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # `shard_map` and collectives
#
# In the global view a value is a whole array. In a `shard_map` *body* it is what one rank holds, and ranks talk to each
# other by collectives that are written out. This notebook shows each of them, who holds what before and after, the types
# that keep gradients right, and programs made of them. This process plays the four ranks.

# %%
import torch
from IPython.display import display

import vescale_fn as vfn
from vescale_fn import P

torch.set_num_threads(1)
vfn.simulate(4)
mesh = vfn.make_mesh((4,), ("i",))
vfn.set_mesh(mesh)

# %% [markdown]
# ## A body
#
# `in_specs` says how each argument is cut: here 16 numbers over the four ranks of axis `i`. In the body `x` has the
# shape of one block. `out_specs` says how the blocks are put together again. `show`, called in a body, gives each value
# with its type, and a picture of the ranks, those in one colour that hold the same.


# %%
@vfn.shard_map(in_specs=(P("i"), P()), out_specs=P("i"))
def scaled(x, w):
    y = x * w
    display(vfn.show({"w": w, "x": x, "y": y}))
    return y


x = torch.arange(16.0)
vfn.unshard(scaled(x, torch.tensor(10.0)))

# %% [markdown]
# `{V:i}` is *varying* over `i`: each rank has its own. `w` is *invariant*: the same on all of them. The type of `y`
# follows from those of its operands, as a dtype does.
#
# ## The collectives
#
# Names and meanings are those of `jax.lax`. Each rank begins with four numbers of its own.


# %%
def in_and_out(body, out_specs=P("i")):
    def run(x):
        y = body(x)
        display(vfn.show({"in": x, "out": y}))
        return y

    return vfn.shard_map(run, in_specs=P("i"), out_specs=out_specs)(x)


# %% [markdown]
# **`psum`** adds over the ranks; every rank gets the sum, so the result is invariant. `pmean`, `pmax` and `pmin` are its
# kin.

# %%
total = in_and_out(lambda x: vfn.psum(x, "i"), out_specs=P())

# %% [markdown]
# **`all_gather`**: every rank gets the values of all. The result is equal everywhere, but typed varying, because its
# gradient is (each rank may use it for something else); `to="invarying"` says otherwise.

# %%
gathered = in_and_out(lambda x: vfn.all_gather(x[:2], "i", tiled=True))

# %% [markdown]
# **`psum_scatter`** adds, and each rank keeps its piece of the sum. `psum` is `psum_scatter` and then `all_gather`.

# %%
scattered = in_and_out(lambda x: vfn.psum_scatter(x, "i", tiled=True))

# %% [markdown]
# **`all_to_all`** cuts each value into one piece a rank, and sends each rank its piece: a transpose of the table of who
# holds what. Experts, and attention over a split sequence, are made of it.

# %%
exchanged = in_and_out(lambda x: vfn.all_to_all(x, "i", 0, 0, tiled=True))

# %% [markdown]
# **`ppermute`** sends along (source, destination) pairs. A rank that nobody sends to gets zeros.

# %%
shifted = in_and_out(lambda x: vfn.ppermute(x, "i", [(0, 1), (1, 2), (2, 3)]))

# %% [markdown]
# **`pbroadcast`** sends one rank's value to all, and **`axis_index`** tells a rank where it is. It is a tensor, not an int:
# one program runs on all ranks, so Python must not branch on it. `torch.where` may.

# %%
from_two = in_and_out(lambda x: vfn.pbroadcast(x, "i", 2))
one_at_a_time = in_and_out(lambda x: torch.where(vfn.axis_index("i") == 1, x, torch.zeros_like(x)))

# %% [markdown]
# ## Two axes, and their order
#
# A collective takes one axis, or several, major first. The order counts, in specs and in collectives, and they need not
# agree: here the blocks are cut in the order `(x, y)` and gathered in the order `(y, x)`.

# %%
grid = vfn.make_mesh((2, 2), ("x", "y"))


@vfn.shard_map(mesh=grid, in_specs=P(("x", "y")), out_specs=P())
def in_both_orders(v):
    return [vfn.all_gather(v, order, tiled=True, to="invarying") for order in (("x", "y"), ("y", "x"))]


for gathered in in_both_orders(torch.arange(8)):
    print(vfn.unshard(gathered).tolist())

# %% [markdown]
# ## The types say what was forgotten
#
# A promise of `out_specs` is checked: an axis that it does not mention must be one along which the value is the same.


# %%
def mistake(body, **specs):
    try:
        vfn.shard_map(body, **{"in_specs": P("i"), "out_specs": P("i"), **specs})(x)
    except vfn.errors.VfnError as error:
        print(error)


mistake(lambda x: x.sum(), out_specs=P())

# %% [markdown]
# Ranks must not part ways in Python:

# %%
mistake(lambda x: x if x.sum() > 20 else -x)

# %% [markdown]
# All that is wrong is said at once, with the arithmetic, before anything moves:

# %%
mistake(lambda x: vfn.all_to_all({"a": x[:3], "b": x.view(2, 2)}, "i", 0, 0, tiled=True))

# %% [markdown]
# ## Gradients
#
# A weight is the same on all ranks, the data is not. Where they meet, the weight is promoted to varying, by a step that
# moves nothing forward and *adds over the ranks* backward. So gradients are right with no call by the user. The loss is
# $w \cdot d$ with $d = 1, 2, 3, 4$, one number a rank: its gradient by $w$ is 10.

# %%
w, d = torch.tensor(2.0), torch.arange(1.0, 5.0)


def local_loss(w, d):
    return (w * d).sum()


def gradient(body, out_specs, check_vma=True):
    f = vfn.shard_map(body, in_specs=(P(), P("i")), out_specs=out_specs, check_vma=check_vma)
    return vfn.unshard(f(w, d)).tolist()


rows = {
    "of the local loss": lambda w, d: vfn.grad(local_loss)(w, d),
    "of the summed loss": lambda w, d: vfn.grad(lambda w: vfn.psum(local_loss(w, d), "i"))(w),
    "each rank's own, by pvary": lambda w, d: vfn.grad(local_loss)(vfn.pvary(w, "i"), d)[None],
    "the same, summed by hand": lambda w, d: vfn.psum(vfn.grad(local_loss)(vfn.pvary(w, "i"), d), "i"),
}
for name, body in rows.items():
    print(f"{name:28}", gradient(body, P("i") if "own" in name else P()))

# %% [markdown]
# The commonest mistake is to add once more what is added already. It gives 40, and a warning:

# %%
import warnings

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(gradient(lambda w, d: vfn.psum(vfn.grad(local_loss)(w, d), "i"), P()))
print(caught[0].message)

# %% [markdown]
# With `check_vma=False` nothing watches the body. Inside it, a gradient is then each rank's own, and of a summed loss it is
# n times that: JAX's unchecked rule. Gradients that are taken *outside* of the map are the same, always.


# %%
def summed_loss(w, d):
    return vfn.psum(local_loss(w, d), "i")


for loss in (local_loss, summed_loss):
    print("inside ", gradient(lambda w, d, loss=loss: vfn.grad(loss)(w, d)[None], P("i"), check_vma=False))
for check in (True, False):
    f = vfn.shard_map(summed_loss, in_specs=(P(), P("i")), out_specs=P(), check_vma=check)
    print("outside", vfn.grad(f)(w, d).item())

# %% [markdown]
# ## A product of matrices, four ways
#
# `a` is split by rows and `b` by columns or rows. Each way gives the same numbers; what moves differs, and the log says so.

# %%
a, b = torch.linspace(-1, 1, 64).view(8, 8), torch.linspace(0, 2, 64).view(8, 8).sin()


def gathered_first(a, b):
    """Gather the rows of a, then multiply."""
    return vfn.all_gather(a, "i", tiled=True) @ b


def in_a_ring(a, b):
    """Multiply the rows that are here while those of the neighbour arrive."""
    n, me = vfn.axis_size("i"), vfn.axis_index("i")
    rows = a.shape[0]
    out = torch.zeros(n * rows, b.shape[1])
    for step in range(n):
        source = (me - step) % n  # whose rows are here now
        at = source * rows + torch.arange(rows)
        out = out.index_copy(0, at, a @ b)
        if step < n - 1:
            a = vfn.ppermute(a, "i", [(k, (k + 1) % n) for k in range(n)])
    return out


def summed(a, b):
    """Columns of a and rows of b: every rank has a part of the sum."""
    return vfn.psum(a @ b, "i")


def summed_and_scattered(a, b):
    """The same, but each rank keeps its rows of the sum."""
    return vfn.psum_scatter(a @ b, "i", tiled=True)


by_rows, by_columns = P("i"), P(None, "i")
ways = {
    gathered_first: ((by_rows, by_columns), by_columns),
    in_a_ring: ((by_rows, by_columns), by_columns),
    summed: ((by_columns, by_rows), P()),
    summed_and_scattered: ((by_columns, by_rows), by_rows),
}
cotangent = (a @ b).cos()  # of the sum of sines, say
want = vfn.vjp(torch.matmul, a, b)[1](cotangent)
for way, (ins, outs) in ways.items():
    f = vfn.shard_map(way, in_specs=ins, out_specs=outs)
    with vfn.comm_log() as log:
        torch.testing.assert_close(vfn.unshard(f(*vfn.shard((a, b), mesh, ins))), a @ b)
    moved = ", ".join(f"{r.op} of {r.bytes} bytes" for r in log if "unshard" not in r.why)
    got = vfn.vjp(f, a, b)[1](cotangent)
    torch.testing.assert_close(got, want)
    print(f"{way.__name__:22} {moved}")

# %% [markdown]
# ## Some axes only, and maps inside maps
#
# With `axis_names` the map is over some axes. Along the others values stay whole arrays inside the body, and everything
# that holds outside holds there: ordinary ops, `with_sharding`, another `shard_map`. Here the batch is handled by hand
# over `dp`, and the layer over `tp` by annotation, or by a second map.

# %%
mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
vfn.set_mesh(mesh)
up, down = vfn.random.normal(vfn.random.key(1), (6, 8)), vfn.random.normal(vfn.random.key(2), (8, 6))
batch = vfn.random.normal(vfn.random.key(3), (8, 6))


def loss(up, down, batch):
    return (torch.relu(batch @ up) @ down).square().mean()


def by_annotation(up, down, batch):
    hidden = vfn.with_sharding(torch.relu(batch @ up), P(None, "tp"))
    display(vfn.show({"batch": batch, "hidden": hidden}))
    return vfn.pmean((hidden @ down).square().mean(), "dp")


def by_a_second_map(up, down, batch):
    @vfn.shard_map(axis_names={"tp"}, in_specs=(P(None, "tp"), P("tp"), P()), out_specs=P())
    def layer(up, down, batch):
        return vfn.psum(torch.relu(batch @ up) @ down, "tp")

    return vfn.pmean(layer(up, down, batch).square().mean(), "dp")


want = vfn.value_and_grad(loss, argnums=(0, 1))(up, down, batch)
specs = (P(None, "tp"), P("tp"), P("dp"))
for body in (by_annotation, by_a_second_map):
    f = vfn.shard_map(body, axis_names={"dp"}, in_specs=(P(), P(), P("dp")), out_specs=P())
    with vfn.comm_log() as log:
        got = vfn.value_and_grad(f, argnums=(0, 1))(*vfn.shard((up, down, batch), mesh, specs))
    print(body.__name__, "moved:", ", ".join(f"{r.op} over {r.axis}" for r in log))
    torch.testing.assert_close(vfn.unshard(got), want)

# %% [markdown]
# ## Weights that are gathered when they are needed, gradients that are added once
#
# `all_gather(..., to="reduced")` gives a whole weight whose gradient stays *unreduced*: over any number of microbatches
# it is only added up on each rank, and one reduce-scatter at the end sends each rank its piece.


# %%
def microbatches(w, batch):
    whole = vfn.all_gather(w, "dp", tiled=True, to="reduced")
    return sum((x @ whole).square().sum() for x in batch.chunk(4))


f = vfn.shard_map(
    lambda w, batch: vfn.grad(microbatches)(w, batch), axis_names={"dp"}, in_specs=(P("dp"), P("dp")), out_specs=P("dp")
)
with vfn.comm_log() as log:
    got = f(up, batch)
torch.testing.assert_close(vfn.unshard(got), vfn.grad(lambda w: (batch @ w).square().sum())(up))
print(log)

# %% [markdown]
# ## The same on real processes
#
# Four processes, each with its own blocks, exchanging them over gloo. Nothing in the bodies changes.


# %%
def on_processes():
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    with vfn.use_mesh(mesh):
        f = vfn.shard_map(by_a_second_map, axis_names={"dp"}, in_specs=(P(), P(), P("dp")), out_specs=P())
        return vfn.unshard(vfn.value_and_grad(f, argnums=(0, 1))(*vfn.shard((up, down, batch), mesh, specs)))


for got in vfn.launch(on_processes, 4):
    torch.testing.assert_close(got, want)
assert len(want) == 2
print("four processes, and one device: the same")
