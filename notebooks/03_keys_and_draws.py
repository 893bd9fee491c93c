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
# # Keys and draws
#
# `torch.rand` takes its numbers from a hidden generator. What it gives depends on what was drawn before, on which
# device, on how many of them. Here a draw takes a *key*, and element `i` of it is a function of the key and of `i`.
# Nothing else counts: not the order of the draws, not the mesh, not the machine.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

import vescale_fn as vfn
from vescale_fn import P

torch.set_num_threads(1)

# %% [markdown]
# ## One key, one draw
#
# A key is two words of 32 bits. The same key gives the same numbers each time; for other numbers it is split.

# %%
key = vfn.random.key(42)
print(key)
print(vfn.random.normal(key, (3,)))
print(vfn.random.normal(key, (3,)))
weights_key, data_key = vfn.random.split(key)
print(vfn.random.normal(weights_key, (3,)))

# %% [markdown]
# A shorter draw is the beginning of a longer one, and another shape is the same numbers in another shape: the
# counter of an element is its place in row-major order.

# %%
long = vfn.random.uniform(data_key, (12,))
print(torch.equal(vfn.random.uniform(data_key, (5,)), long[:5]))
print(torch.equal(vfn.random.uniform(data_key, (3, 4)), long.view(3, 4)))

# %% [markdown]
# ## The numbers of `jax.random`
#
# The streams are JAX's, and so are the recipes. These lists were printed by JAX 0.10 for the key of seed 42.

# %%
jax_bits = [2098992034, 2919706841, 2646866425, 2409546199, 1935504149, 2516274904]
jax_split = [[1832780943, 270669613], [64467757, 2916123636]]
jax_integers = [644, 914, 71, 369, 709, 419]
jax_permutation = [7, 4, 2, 5, 3, 6, 0, 1]

print(vfn.random.bits(key, (6,)).tolist() == jax_bits)
print(vfn.random.key_data(vfn.random.split(key)).tolist() == jax_split)
print(vfn.random.randint(key, (6,), 0, 1000).tolist() == jax_integers)
print(vfn.random.permutation(key, 8).tolist() == jax_permutation)

# %% [markdown]
# ## The same draw on every mesh
#
# With a `spec` the draw is laid out on the mesh, and each rank makes its own block, from the global numbers of its
# elements. Nothing travels, and the blocks together are the draw of one device, bit for bit.

# %%
one_device = vfn.random.normal(key, (13, 10))
for shape, spec in [((1,), P("x")), ((4,), P("x")), ((8,), P(None, "x")), ((2, 4), P("x", "y")),
                    ((2, 4), P(("x", "y"))), ((2, 4), P(("y", "x")))]:  # fmt: skip
    with vfn.simulate(8 if len(shape) > 1 else shape[0]), vfn.comm_log() as log:
        mesh = vfn.make_mesh(shape, ("x", "y")[: len(shape)])
        draw = vfn.random.normal(key, (13, 10), spec=spec, mesh=mesh)
        same = torch.equal(vfn.unshard(draw), one_device)
        blocks = [tuple(block.shape) for block in draw.to_local().blocks]
    print(f"mesh {shape!s:6} {spec!r:14} the same: {same}, blocks {blocks[0]} ... {blocks[-1]}")

# %% [markdown]
# ## Which rank draws what
#
# Each picture is the whole draw of 13 x 10 numbers; the colour is the rank that makes an element. 13 rows do not
# divide, so some ranks have less, and one may have nothing; over 8 ranks, 10 columns give three of them nothing.
# `("x", "y")` and `("y", "x")` on one dim are two layouts.


# %%
def owners(shape, spec, size):
    """For each element of the draw, the number of the rank that makes it."""
    with vfn.simulate(8):
        mesh = vfn.make_mesh(shape, ("x", "y")[: len(shape)])
        places = vfn.shard(torch.arange(size[0] * size[1]).view(size), mesh, spec).to_local().blocks
    owner = np.full(size[0] * size[1], -1)
    for rank, block in reversed(list(enumerate(places))):  # of several ranks with one block, the first
        owner[block.flatten().numpy()] = rank
    return owner.reshape(size)


layouts = [((8,), P("x")), ((8,), P(None, "x")), ((2, 4), P("x", "y")), ((2, 4), P("y")),
           ((2, 4), P(("x", "y"))), ((2, 4), P(("y", "x")))]  # fmt: skip
figure, axes = plt.subplots(1, len(layouts), figsize=(12, 2.6))
for axis, (shape, spec) in zip(axes, layouts, strict=True):
    picture = owners(shape, spec, (13, 10))
    axis.imshow(picture, cmap="tab10", vmin=0, vmax=9)
    for rank in np.unique(picture):
        rows, columns = np.nonzero(picture == rank)
        axis.text(columns.mean(), rows.mean(), str(rank), ha="center", va="center", color="white")
    axis.set_title(f"{'x'.join(map(str, shape))}\n{spec!r}", fontsize=9)
    axis.set_xticks([])
    axis.set_yticks([])
figure.tight_layout()

# %% [markdown]
# ## The same dropout on every mesh
#
# The mask follows the layout of the value, and it is never kept: the backward pass makes it again from the key.

# %%
x = vfn.random.normal(data_key, (8, 6))
step = lambda x: vfn.random.dropout(key, x, 0.5).square().sum()
want = vfn.grad(step)(x)
for spec in (P("x"), P(None, "y"), P("x", "y"), P(("y", "x"))):
    with vfn.simulate(8), vfn.comm_log() as log:
        placed = vfn.shard(x, vfn.make_mesh((4, 2), ("x", "y")), spec)
        gradient = vfn.grad(step)(placed)
        print(f"{spec!r:14} the same gradient: {torch.equal(vfn.unshard(gradient), want)}")
print(want[0])

# %% [markdown]
# ## Keys in a program
#
# Keys are values. A training loop folds the number of the step in; layers split; `vmap` maps over an array of keys;
# a tree of parameters may hold one. They have no arithmetic, because that would make streams which overlap.

# %%
step_keys = [vfn.random.fold_in(data_key, step) for step in range(3)]
print([vfn.random.uniform(k).item() for k in step_keys])

layers = vfn.random.split(weights_key, 4)
stacked = vfn.vmap(lambda k: vfn.random.init.he_normal()(k, (6, 6)))(layers)
print(layers.shape, stacked.shape, torch.equal(stacked[2], vfn.random.init.he_normal()(layers[2], (6, 6))))

try:
    key + 1
except vfn.errors.RandomError as error:
    print(error)

# %% [markdown]
# The mistake that costs most time is a key that is used twice. In debug mode it raises, with both lines.

# %%
with vfn.debug():
    try:
        for _ in range(2):
            noise = vfn.random.normal(key, (3,))
    except vfn.errors.RandomError as error:
        print(error)

# %% [markdown]
# ## Distributions
#
# All of `jax.random` is there, with its names. Parameters may be tensors, or arrays on a mesh, and gradients go
# through them; for `gamma` by implicit differentiation.

# %%
drawn = {
    "normal": vfn.random.normal(key, (20_000,)),
    "exponential": vfn.random.exponential(key, (20_000,)),
    "gumbel": vfn.random.gumbel(key, (20_000,)),
    "gamma(3)": vfn.random.gamma(key, 3.0, (20_000,)),
    "beta(2, 5)": vfn.random.beta(key, 2.0, 5.0, (20_000,)),
    "poisson(4)": vfn.random.poisson(key, 4.0, (20_000,)),
}
figure, axes = plt.subplots(1, len(drawn), figsize=(12, 1.8))
for axis, (name, values) in zip(axes, drawn.items(), strict=True):
    axis.hist(values.numpy(), bins=np.arange(14) - 0.5 if name.startswith("poisson") else 50, color="tab:blue")
    axis.set_title(name, fontsize=9)
    axis.set_yticks([])
figure.tight_layout()

concentration = torch.tensor(3.0)
mean = lambda a: vfn.random.gamma(key, a, (20_000,)).mean()
print(f"d mean / d concentration = {vfn.grad(mean)(concentration).item():.3f}, and 1 in the limit")

# %% [markdown]
# ## Against one device

# %%
with vfn.simulate(8):
    mesh = vfn.make_mesh((4, 2), ("x", "y"))
    for draw in (vfn.random.uniform, vfn.random.normal, vfn.random.exponential, vfn.random.gumbel):
        for spec in (P("x"), P("x", "y"), P(("y", "x"))):
            assert torch.equal(vfn.unshard(draw(key, (13, 10), spec=spec, mesh=mesh)), draw(key, (13, 10)))
    assert torch.equal(
        vfn.unshard(vfn.random.permutation(key, 50, spec=P("x"), mesh=mesh)), vfn.random.permutation(key, 50)
    )
assert torch.equal(vfn.random.fold_in(key, 1).data, vfn.random.split(key)[1].data)
