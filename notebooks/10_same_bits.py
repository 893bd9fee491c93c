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
# # The same bits on any number of processes
#
# Sums of floats depend on the order of their terms. A run on four processes adds up gradients in another order than one on
# two, so its parameters have other bits from the first step on. Under `vfn.deterministic` there are as many *ranks* as it says,
# one process or several play them, and every sum follows one tree over the ranks: the number of processes decides nothing.

# %%
import os
import signal
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

import vescale_fn as vfn
from vescale_fn import P

torch.set_num_threads(1)
STEPS = 40
KEY = vfn.random.key(0)
opt = vfn.optim.chain(vfn.optim.clip_by_global_norm(1.0), vfn.optim.adamw(1e-2))

# %% [markdown]
# ## A run
#
# A small network learns to give back what it is given, with dropout. All of it is one function of a mesh; `kept` says how the
# parameters lie between steps, `used` how a step computes with them. `vfn.digest` is a sha256 of the bits of a tree, the same
# however it lies, and without gathering anything.


# %%
def initial(key):
    keys = vfn.random.split(key)
    return {"up": vfn.random.normal(keys[0], (64, 256)) / 8, "down": vfn.random.normal(keys[1], (256, 64)) / 16}


def loss(params, x, key):
    hidden = vfn.random.dropout(key, torch.relu(x @ params["up"]), 0.1)
    return (hidden @ params["down"] - x).square().mean()


def train(shape, names, kept, used):
    @vfn.jit
    def step(params, state, x, key):
        value, grads = vfn.value_and_grad(lambda params: loss(vfn.with_sharding(params, used), x, key))(params)
        updates, state = opt.update(grads, state, params)
        return vfn.optim.apply_updates(params, updates), state, value

    mesh = vfn.make_mesh(shape, names)
    params = vfn.init(initial, KEY, spec=kept, mesh=mesh)
    state, weights = opt.init(params), []
    for i in range(STEPS):
        batch_key, dropout_key = vfn.random.split(vfn.random.fold_in(KEY, i))
        x = vfn.random.normal(batch_key, (64, 64), spec=P("dp"), mesh=mesh)
        params, state, _ = step(params, state, x, dropout_key)
        weights.append(vfn.unshard(params["up"]))
    return vfn.digest({"params": params, "state": state}), weights


TP = {"up": P(None, "tp"), "down": P("tp")}

# %% [markdown]
# ## The usual sums differ
#
# Data parallel on 1, 2, 4 and 8 ranks: the same program, the same parameters, batches and dropout masks. Each ends with other
# bits.

# %%
usual = {}
for ranks in 1, 2, 4, 8:
    with vfn.simulate(ranks):
        usual[ranks] = train((ranks,), ("dp",), P(), P())
print(f"{len({digest for digest, _ in usual.values()})} digests of {len(usual)} runs")

# %% [markdown]
# ## Eight ranks, played by one process, two or four
#
# `vfn.launch` starts real processes, which talk over gloo. Each plays as many of the eight ranks. Parameters are sharded over
# "tp", batches over "dp".

# %%
same = {}
with vfn.deterministic(virtual=8):
    same[1] = train((4, 2), ("dp", "tp"), TP, TP)
    for processes in 2, 4:
        same[processes] = vfn.launch(train, processes, (4, 2), ("dp", "tp"), TP, TP, device="cpu")[0]
print(f"{len({digest for digest, _ in same.values()})} digest of {len(same)} runs")


# %%
def apart(run, other):
    return [(a - b).abs().max().item() for a, b in zip(run[1], other[1], strict=True)]


figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for ranks in 2, 4, 8:
    axes.plot(apart(usual[ranks], usual[1]), label=f"usual sums, {ranks} ranks beside 1")
for processes in 2, 4:
    line = apart(same[processes], same[1])
    axes.plot(line, linewidth=5 - processes, label=f"deterministic, {processes} processes beside 1")
axes.set_yscale("symlog", linthresh=1e-8)
axes.set(xlabel="step", ylabel="largest difference of a weight", title="A run beside itself", ylim=(-2e-9, 1e-1))
axes.legend(frameon=False, ncols=2, loc="upper left")
plt.show()

# %% [markdown]
# ## Layouts of data
#
# Whether parameters are kept whole or sharded over "dp", and gathered in each step, does not decide either: a gradient's sum
# follows the same tree, and the norm by which gradients are clipped is added up in integers, which have no order.

# %%
with vfn.deterministic(virtual=8):
    layouts = {
        "dp": train((8,), ("dp",), P(), P()),
        "fsdp": train((8,), ("dp",), P("dp"), P()),
        "fsdp, other dims": train((8,), ("dp",), P(None, "dp"), P()),
    }
print(f"{len({digest for digest, _ in layouts.values()})} digest of {len(layouts)} layouts")

# %% [markdown]
# ## Through two crashes
#
# `vfn.elastic` takes the steps instead of a loop. After each one every process keeps its share of the state in memory, which
# outlives it. A process that is killed makes `launch` start all again; they go on from the last step of which copies are left,
# and end with the digest of the run that nobody has disturbed.


# %%
def begin():
    params = vfn.init(initial, KEY, spec=TP, mesh=vfn.make_mesh((4, 2), ("dp", "tp")))
    return {"params": params, "state": opt.init(params)}


def batch(i):
    batch_key, dropout_key = vfn.random.split(vfn.random.fold_in(KEY, i))
    return vfn.random.normal(batch_key, (64, 64), spec=P("dp"), mesh=vfn.current_mesh()), dropout_key


@vfn.jit
def update(tree, batch):
    value, grads = vfn.value_and_grad(loss)(tree["params"], *batch)
    updates, state = opt.update(grads, tree["state"], tree["params"])
    return {"params": vfn.optim.apply_updates(tree["params"], updates), "state": state}, value


def crashing(folder):
    taken = []

    def on_step(done, value):
        taken.append(done)
        crashed = folder / f"after step {done}"
        if done in (12, 25) and dist.get_rank() == 1 and not crashed.exists():
            crashed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return vfn.digest(vfn.elastic(update, begin, batch, steps=STEPS, virtual=8, on_step=on_step)), taken


with tempfile.TemporaryDirectory() as folder:
    disturbed, taken = vfn.launch(crashing, 4, Path(folder), device="cpu", restarts=2)[0]
print(f"the digest of the run without a crash: {disturbed == same[1][0]}")

# %% [markdown]
# ## What is promised, and to whom
#
# The bits are a function of the program, its keys and its meshes, for the same versions and kind of processor: what
# `vfn.fingerprint()` says. A checkpoint stores it, and `exact=True` asks for the same.

# %%
print(", ".join(name for name in vfn.fingerprint() if name.islower() and "." not in name))
assert len({digest for digest, _ in usual.values()}) == 4
assert len({digest for digest, _ in same.values()}) == 1
assert len({digest for digest, _ in layouts.values()}) == 1
assert disturbed == same[1][0]
assert STEPS - 25 <= len(taken) <= STEPS - 24
assert all(apart(same[processes], same[1]) == [0.0] * STEPS for processes in same)
