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
# # Which layout?
#
# A model can be split over 64 GPUs in thousands of ways. This notebook asks what a layout costs before anything is started,
# lets a search choose one, reads why it is the best, and then keeps what was chosen as two rules that anybody can read. No
# GPU is needed: shapes are enough, and one process.

# %%
import torch

import vescale_fn as vfn
from vescale_fn import P

torch.set_num_threads(1)


# %% [markdown]
# ## A step, as for one device
#
# Two matrices, a gradient, an update. `vfn.ShapeDtype` stands for an array that nobody allocates: these parameters would
# take 1 GiB.


# %%
def step(params, x):
    def loss(params):
        return ((x @ params["up"]).relu() @ params["down"]).float().square().mean()

    return vfn.tree.map(lambda p, g: p - 0.1 * g, params, vfn.grad(loss)(params))


S = vfn.ShapeDtype
params = {"up": S((8192, 32768), torch.bfloat16), "down": S((32768, 8192), torch.bfloat16)}
x = S((2048, 8192), torch.bfloat16)

# %% [markdown]
# ## What would my layout cost?
#
# Data parallel first: whole parameters on each of 8 GPUs, the batch split. `vfn.price` records the step on a mesh without
# ranks and plays its calls and collectives with the figures of an H100.

# %%
mine = vfn.price(step, params, x, specs=(P(), P("dp")), mesh={"dp": 8}, hardware="h100", donate_argnums=0)
mine

# %%
print(mine.timeline())

# %% [markdown]
# Nearly all of it is waiting for the sum of the gradients. Others' layouts, beside it:

# %%
prices = mine.compare(zero3=(P("dp"), P("dp")), columns=({"up": P(None, "dp"), "down": P("dp")}, P()))
print(prices)

# %% [markdown]
# ## Let it choose
#
# `vfn.auto` looks at all ways in which each call can be split, over one mesh or several, and answers with the fastest whose
# memory fits. My own layout takes part under its name.

# %%
meshes = vfn.mesh_shapes(8)
others = {"mine": (P(), P("dp"))}
choice = vfn.auto(step, params, x, mesh=meshes, hardware="h100", donate_argnums=0, candidates=3, others=others)
print(choice)

# %% [markdown]
# The first is the answer. Each other row says which arguments lie otherwise than in the first, what that costs (computing,
# waiting, memory), and at which line most of it goes. In a notebook the same is drawn, too:

# %%
choice

# %%
choice.timeline()

# %% [markdown]
# Why does `up` lie so? `explain` asks the search again with other specs for this one parameter, all else free.

# %%
print(choice.explain("up"))

# %% [markdown]
# ## Less memory, another answer
#
# With 266 MiB a rank that layout does not fit. Now the batch is split, too, and a part of what the backward pass needs is
# computed again: slower, and within the memory. Where nothing fits, the message says by how much.

# %%
how = {"mesh": {"dp": 8}, "hardware": "h100", "donate_argnums": 0, "candidates": 2}
tight = vfn.auto(step, params, x, memory="266 MiB", **how)
print(tight)
assert tight.predicted.peak <= 266 * 2**20 < choice.predicted.peak
try:
    vfn.auto(step, params, x, memory="100 MiB", **how)
except vfn.errors.VfnError as error:
    print(f"\n{error}")

# %% [markdown]
# ## Keep the rules, drop the search
#
# What was chosen is a table of specs. Paste it into the program; `choice.moves` lists the lines that need a `with_sharding`
# besides.

# %%
print(choice.rules())
print(choice.moves)

# %% [markdown]
# Run it: eight simulated ranks, small arrays, and the same values as one device.

# %%
keys = vfn.random.split(vfn.random.key(0), 3)
small = {"up": vfn.random.normal(keys[0], (16, 64)), "down": vfn.random.normal(keys[1], (64, 16))}
data = vfn.random.normal(keys[2], (8, 16))
with vfn.simulate(8):
    mesh = choice.mesh()
    lie = vfn.spec_from_rules(small, choice.rules())
    by_rules = vfn.jit(step)(vfn.shard(small, mesh, lie), vfn.shard(data, mesh, choice.specs[1]))

    again = vfn.auto(step, small, data, mesh=dict(choice.layouts.mesh), candidates=1)
    chosen = again.jit()(*vfn.shard((small, data), again.mesh(), again.specs))
for name, want in step(small, data).items():
    torch.testing.assert_close(vfn.unshard(by_rules[name]), want)
    torch.testing.assert_close(vfn.unshard(chosen[name]), want)
