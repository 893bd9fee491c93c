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
# # What a step does
#
# `vfn.jit` records a function once, as a *plan*: the operations that one rank carries out on its own blocks, and the
# collectives between them. Passes improve the plan as a whole; from then on it is replayed, without arrays, autograd and
# modes. A plan can be read before anything runs. Here is that of a training step of a small transformer, on a mesh of
# 2 x 2 ranks that this process plays.

# %%
import torch
from IPython.display import display

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.recipes import transformer

torch.set_num_threads(1)
vfn.simulate(4)
mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
vfn.set_mesh(mesh)

config = transformer.Config(dim=64, heads=4, layers=1, hidden=256, dropout=0.0)
params = transformer.init(vfn.random.key(0), config, torch.float64)
batch = vfn.random.randint(vfn.random.key(1), (8, 65), 0, 256).long()
opt = vfn.optim.adamw(1e-3)

# %% [markdown]
# ## One function, the whole step
#
# Loss, gradient, update: one pure function. Parameters and the optimiser's state are *donated*: the call may write its results
# over them, and whoever uses the old ones afterwards is told.


# %%
def step(params, state, batch):
    loss, grads = vfn.value_and_grad(transformer.loss)(params, batch, config)
    updates, state = opt.update(grads, state, params)
    return loss, vfn.optim.apply_updates(params, updates), state


train = vfn.jit(step, donate_argnums=(0, 1))

specs = vfn.spec_from_rules(params, transformer.SPECS)  # heads and hidden units over "tp"


def start():
    there = vfn.shard(params, mesh, specs)
    return there, opt.init(there), vfn.shard(batch, mesh, P("dp"))


plan = train.lower(*start())

# %% [markdown]
# ## Read aloud
#
# `text()` names what goes in and out, and then, from one collective (marked with a star) to the next, the lines that take part,
# forward and backward, and below each what it calls how often: here for all four ranks together. `text(lines=None)` has every
# single call.

# %%
print(plan.text(lines=100))

# %% [markdown]
# ## What travels
#
# Over `tp` the output of each attention and each MLP is a sum over the ranks (two all-reduces a block), and so is the gradient
# at the input of each: Megatron's four a block. Over `dp` there are the loss, and all gradients, put together into as few
# all-reduces as fit.

# %%
comms = plan.comms()
for record in comms:
    print(f"{record.op} over {record.axis}  {record.bytes:>7,} bytes  {record.why}")

# %%
for axis in ("tp", "dp"):
    print(f"{axis}: {comms.count('all_reduce', axis)} all-reduces of {comms.bytes('all_reduce', axis):,} bytes")
assert comms.count("all_reduce", "tp") == 4 * config.layers == 4
assert len(comms) == comms.count("all_reduce"), "nothing else travels"

# %% [markdown]
# ## What it keeps
#
# Each value is alive from the call that makes it to the last one that needs it, so the memory of a plan can be added up before
# it runs, here for all four ranks together. First the plan as it was recorded: what the backward pass needs piles up, then
# gradients, then new parameters and moments beside the old ones (blue: arguments, which are there all the time).

# %%
display(plan.recorded.memory())

# %% [markdown]
# Then after the passes: what can be written over something dead is; the new values lie where the donated old ones were; and
# cheap values, such as those of GELU, are computed again in the backward pass instead of being kept over the peak.

# %%
display(plan.memory())
before, after = plan.recorded.memory(), plan.memory()
print(f"peak {after.peak / before.peak:.2f} of what was recorded")
assert after.peak < 0.9 * before.peak

# %% [markdown]
# ## Replayed
#
# Ten steps, no second copy of parameters and moments. What was donated is gone:

# %%
there, state, data = start()
first = there
losses = []
for _ in range(10):
    loss, there, state = train(there, state, data)
    losses.append(loss.item())
print("losses", [f"{loss:.3f}" for loss in losses])
try:
    first["head"] + 1
except vfn.errors.DonationError as error:
    print(error)

# %% [markdown]
# ## Against one device
#
# The same function, not jitted, on plain tensors: equal, up to the order of the sums.

# %%
plain, plain_state = params, opt.init(params)
plain_losses = []
with vfn.use_mesh(None):
    for _ in range(10):
        loss, plain, plain_state = step(plain, plain_state, batch)
        plain_losses.append(loss.item())

torch.testing.assert_close(losses, plain_losses)
torch.testing.assert_close(vfn.unshard(there), plain, rtol=1e-6, atol=1e-9)
assert losses[-1] < losses[0]
assert train.cache_info().records == 1
