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
# # One program, many devices
#
# You write one function, as for one device. Where its arrays lie is said beside it. Then the same function
# runs on one device, on ranks that this notebook plays by itself, and on real processes, and gives the same
# numbers. This tour does all three. It needs no GPU and takes under a minute.

# %%
import torch

import vescale_fn as vfn
from vescale_fn import P

torch.set_num_threads(1)

# %% [markdown]
# ## A function
#
# A two-layer network, its parameters in a dictionary, a loss. Nothing in it knows of devices. Numbers come
# from a *key*: the same key always gives the same numbers, and a key is split where several are needed.


# %%
def init(key):
    up, down = vfn.random.split(key)
    return {"up": vfn.random.normal(up, (6, 8)) / 6**0.5, "down": vfn.random.normal(down, (8, 6)) / 8**0.5}


def predict(params, x):
    return torch.relu(x @ params["up"]) @ params["down"]


def loss(params, x, y):
    return (predict(params, x) - y).square().mean()


keys = vfn.random.split(vfn.random.key(0), 3)
params = init(keys[0])
x, y = vfn.random.normal(keys[1], (4, 6)), vfn.random.normal(keys[2], (4, 6))

# %% [markdown]
# On one device. We keep the results: everything that follows has to give the same.

# %%
one_value, one_grads = vfn.value_and_grad(loss)(params, x, y)
print(f"loss {one_value.item():.4f}")
vfn.show(one_grads)

# %% [markdown]
# ## Eight ranks in one process
#
# `simulate(8)` makes this process play eight ranks. As a bare call it stays on, which suits a notebook. A
# *mesh* lays the ranks out in a grid with named axes: here two rows, `dp` (data parallel), of four, `tp`
# (tensor parallel).

# %%
vfn.simulate(8)
mesh = vfn.make_mesh((2, 4), ("dp", "tp"))
vfn.set_mesh(mesh)
mesh

# %% [markdown]
# A *spec* says which axes split each dim. The batch is split over `dp`. The first weight is split by columns
# and the second by rows over `tp`, so that each rank keeps a quarter of the hidden units. What a spec does
# not mention is replicated.

# %%
specs = {"up": P(None, "tp"), "down": P("tp", None)}
on_mesh = vfn.shard(params, mesh, specs)
x_mesh, y_mesh = vfn.shard((x, y), mesh, P("dp"))
vfn.show({"params": on_mesh, "x": x_mesh})

# %% [markdown]
# The same function, not one character changed. Each value is still a whole array; each rank holds its part.

# %%
with vfn.comm_log() as log:
    value, grads = vfn.value_and_grad(loss)(on_mesh, x_mesh, y_mesh)
print(f"loss {vfn.unshard(value).item():.4f}")
print("gradients lie as their parameters do:", {name: vfn.spec_of(grad) for name, grad in grads.items()})

# %% [markdown]
# Communication is never silent. The log has one line for each collective: what, over which axis, how many
# bytes, why, and the line of this notebook that asked for it. Types are short: `f32[4@dp,6]{U:tp}` is a 4 x 6
# array of float32 whose first dim is split over `dp`, and which is *unreduced* over `tp`: each rank holds a
# part of a sum. The product with `down` is one, and the subtraction needs it whole.

# %%
print(log)

# %% [markdown]
# Sums are taken in another order, so the last bits may differ. Nothing else does.

# %%
torch.testing.assert_close(vfn.unshard(value), one_value)
torch.testing.assert_close(vfn.unshard(grads), one_grads)

# %% [markdown]
# ## Saying where a value lies
#
# Placement follows from the inputs. `with_sharding` states it where you care. Here the hidden layer is asked
# to lie whole on every `tp` rank. That is worse, and the log shows the price: but the numbers stay the same,
# because *where* a value lies is no part of *what* it is.


# %%
def loss_gathered(params, x, y):
    hidden = torch.relu(x @ params["up"])
    hidden = vfn.with_sharding(hidden, P("dp", None))
    return (hidden @ params["down"] - y).square().mean()


with vfn.comm_log() as log:
    value = loss_gathered(on_mesh, x_mesh, y_mesh)
print(log)
torch.testing.assert_close(vfn.unshard(value), one_value)

# %% [markdown]
# On one device the annotation is the identity: `loss_gathered` still runs on plain tensors.

# %%
vfn.set_mesh(None)
torch.testing.assert_close(loss_gathered(params, x, y), one_value)
vfn.set_mesh(mesh)

# %% [markdown]
# ## The local view
#
# Sometimes you want to write what *one rank* does, with communication spelled out: `shard_map`. Inside, a
# value is the rank's own block, a plain tensor. `psum` adds over the ranks of an axis; `pmean` takes the
# mean.


# %%
@vfn.shard_map(in_specs=(specs, P("dp"), P("dp")), out_specs=P())
def local_loss(params, x, y):
    hidden = torch.relu(x @ params["up"])  # my columns
    out = vfn.psum(hidden @ params["down"], "tp")  # my rows: a part of the sum
    return vfn.pmean((out - y).square().mean(), "dp")


value, grads = vfn.value_and_grad(local_loss)(on_mesh, x_mesh, y_mesh)
torch.testing.assert_close(vfn.unshard(value), one_value)
torch.testing.assert_close(vfn.unshard(grads), one_grads)

# %% [markdown]
# No reduction of the gradients is written anywhere, and yet they are whole. Inside the body each value has a
# type for each axis: `params` do not vary over `dp`, `x` does; where they meet, the weight's gradient is
# summed over `dp`. Forget the `psum`, and the types say so before anything runs wrong:


# %%
@vfn.shard_map(in_specs=(specs, P("dp")), out_specs=P("dp"))
def forgotten(params, x):
    return torch.relu(x @ params["up"]) @ params["down"]


try:
    forgotten(on_mesh, x_mesh)
except vfn.errors.VfnError as error:
    print(error)

# %% [markdown]
# ## Random numbers
#
# Element *i* of a draw depends on the key and on *i*, and on nothing else. So each rank draws just its own
# block, without communication, and the whole is bit for bit what one device draws.

# %%
key = vfn.random.key(7)
whole = vfn.random.normal(key, (6, 8))
with vfn.comm_log() as log:
    parts = vfn.random.normal(key, (6, 8), spec=P("dp", "tp"), mesh=mesh)
assert torch.equal(vfn.unshard(parts), whole)
assert len(log) == 0

# %% [markdown]
# Dropout takes a key, too. The mask follows the value's own layout and is the one that a single device would
# have used.

# %%
dropped = vfn.random.dropout(key, x, 0.5)
assert torch.equal(vfn.unshard(vfn.random.dropout(key, x_mesh, 0.5)), dropped)
vfn.unshard(vfn.random.dropout(key, x_mesh, 0.5))

# %% [markdown]
# ## Training, and then real processes
#
# A training step is a pure function as well: parameters in, parameters out. `train` takes its mesh from its
# arguments and is run three times: on one device, on the eight simulated ranks, and by `launch` on four real
# processes that exchange their data over gloo (a function defined in a cell may be launched).


# %%
def train(shape=None, steps=5):
    tree, batch = init(keys[0]), (x, y)
    if shape is not None:
        mesh = vfn.make_mesh(shape, ("dp", "tp"))
        tree, batch = vfn.shard(tree, mesh, specs), vfn.shard(batch, mesh, P("dp"))
    losses = []
    for _ in range(steps):
        value, grads = vfn.value_and_grad(loss)(tree, *batch)
        tree = {name: tree[name] - 0.1 * grads[name] for name in tree}
        losses.append(vfn.unshard(value).item())
    return losses, vfn.unshard(tree)


vfn.set_mesh(None)
one = train()
simulated = train((2, 4))
real = vfn.launch(train, 4, (2, 2))

print("step  one device  8 simulated  4 processes")
for step, row in enumerate(zip(one[0], simulated[0], real[0][0])):
    print(f"{step:4}  " + "  ".join(f"{value:>10.4f}" for value in row))

# %%
for losses, tree in [simulated, *real]:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(one[0]))
    torch.testing.assert_close(tree, one[1])
