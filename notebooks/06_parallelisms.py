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
# # Parallelisms
#
# Data parallel, ZeRO, FSDP, tensor, sequence, context and expert parallel: each is a statement about *where values lie*. So
# the model is written once, as for one device, and each of these is one line of text beside it. Here one Llama is trained
# under all of them, on ranks that this process plays: where a parameter, its gradient and the optimiser's state lie; what
# travels; what memory a rank needs; and that the losses are those of one device.

# %%
import inspect
import io
import math
import tokenize
from collections import OrderedDict
from itertools import repeat

import matplotlib.pyplot as plt
import optree
import torch

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.recipes import llama, mixtral
from vescale_fn.recipes.models import laid_out, random_batch
from vescale_fn.recipes.parallel import TABLE, parallel

torch.set_num_threads(1)
plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 90}

KEY, STEPS, BATCH, LENGTH = vfn.random.key(0), 5, 8, 16
LLAMA = llama.Config(vocab=32, dim=16, heads=4, groups=4, layers=1, hidden=32, dropout=0.1)
MIXTRAL = mixtral.Config(vocab=32, dim=16, heads=4, groups=4, layers=1, hidden=16, experts=4, dropout=0.1)

# %% [markdown]
# ## The model
#
# This is the gated layer of its blocks. `at` is told the *names* of the dims of a value, at the places where it matters how
# the value lies: on one device it does nothing. Lines that end in `# mesh` are all there is about distribution.

# %%
print(inspect.getsource(llama.gated))


def words(module):
    """All names in the code of a module, without comments and strings."""
    lines = io.StringIO(inspect.getsource(module)).readline
    return {token.string for token in tokenize.generate_tokens(lines) if token.type == tokenize.NAME}


of_ranks = set("rank world_size process_group DeviceMesh psum all_gather all_reduce all_to_all shard_map dp tp".split())
assert not of_ranks & (words(llama) | words(mixtral))

# %% [markdown]
# ## The table
#
# A parallelism says which axes of the mesh split which of the named dims. `params`, `grads` and `state` stand for the
# largest dim of each parameter, of its gradient, and of the optimiser's state for it: they are split over those of `dp`,
# `cp` and `ep` that are in use, whose ranks see other tokens. The three ways to share a sequence split the same: they are
# three ways in which attention meets other ranks' keys.

# %%
for name, dims in TABLE.items():
    print(f"{name:10} ", ",  ".join(f"{dim} over {' and '.join(axes)}" for dim, axes in dims.items()))

# %% [markdown]
# Rows are joined by `+`. What comes of it is a spec for each value whose dims have names:

# %%
layout = parallel("fsdp+tp+sp")
print("batch of tokens         ", layout.spec("batch", "length"))
print("activations in a norm   ", layout.spec("batch", "norm_length", None))
print("matrix into hidden units", layout.spec(None, "hidden"))

# %% [markdown]
# ## A step, and one device
#
# The yardstick is a plain loop on plain tensors, in float64: there, sums in another order differ by 1e-15 or so, and a
# mistake always shows. Dropout is on; its masks come from a key, so that they are the same everywhere.

# %%
optimizer = vfn.optim.chain(vfn.optim.clip_by_global_norm(1.0), vfn.optim.adamw(1e-2))


def numbers(config, step):
    """The batch, the same in each step, and the key of the step's dropout."""
    return random_batch(KEY, config, BATCH, LENGTH), vfn.random.fold_in(KEY, step)


def alone(model, config):
    params = model.init(KEY, config, torch.float64)
    state, losses = optimizer.init(params), []
    for step in range(STEPS):
        batch, key = numbers(config, step)
        value, grads = vfn.value_and_grad(model.loss)(params, batch, config, key)
        updates, state = optimizer.update(grads, state, params)
        params = vfn.optim.apply_updates(params, updates)
        losses.append(value.item())
    return losses


one = {llama: alone(llama, LLAMA), mixtral: alone(mixtral, MIXTRAL)}
print("llama  ", [f"{loss:.3f}" for loss in one[llama]])
print("mixtral", [f"{loss:.3f}" for loss in one[mixtral]])

# %% [markdown]
# The same on a mesh. `layout.specs` says where parameters, gradients and state lie; `specs.update` is the optimiser, which
# does not know of it, between statements of where its arguments lie. Nothing else differs.


# %%
def train(text, sizes, model=llama, config=LLAMA):
    """A few steps: the losses, the collectives of the first step, and at last (params, grads, state)."""
    with vfn.simulate(math.prod(sizes.values())):
        mesh = vfn.make_mesh(tuple(sizes.values()), tuple(sizes))
        layout = parallel(text, mesh)
        config = laid_out(config, layout)
        params = model.init(KEY, config, torch.float64)
        specs = layout.specs(params, model.NAMES, mesh)
        params = vfn.shard(params, mesh, specs.params)
        state, losses, logs = specs.init(optimizer, params), [], []
        for step in range(STEPS):
            batch, key = numbers(config, step)
            batch = vfn.shard(batch, mesh, layout.spec("batch"))
            with vfn.use_mesh(mesh), vfn.comm_log() as log:
                value, grads = vfn.value_and_grad(model.loss)(params, batch, config, key)
                params, state = specs.update(optimizer, grads, state, params)
            losses.append(value.item())
            logs.append(log)
        return losses, logs[0], (params, vfn.with_sharding(grads, specs.grads), state)


runs = {
    "dp": train("dp", {"dp": 4}),
    "zero1": train("zero1", {"dp": 4}),
    "zero2": train("zero2", {"dp": 4}),
    "fsdp": train("fsdp", {"dp": 4}),
    "hsdp": train("hsdp", {"replica": 2, "dp": 2}),
    "tp": train("tp", {"tp": 4}),
    "tp+sp": train("tp+sp", {"tp": 4}),
    "tp+vp": train("tp+vp", {"tp": 4}),
    "cp": train("cp", {"cp": 4}),
    "fsdp+tp+sp+vp+remat": train("fsdp+tp+sp+vp+remat", {"dp": 2, "tp": 2}),
    "zero1+cp": train("zero1+cp", {"dp": 2, "cp": 2}),
    "ep, mixtral": train("ep", {"ep": 4}, mixtral, MIXTRAL),
    "fsdp+ep, mixtral": train("fsdp+ep", {"dp": 2, "ep": 2}, mixtral, MIXTRAL),
}

# %% [markdown]
# ## The same losses
#
# Left, the losses of one device, and on them those of every parallelism, a point each. Right, how far each point is from
# the line: sums in another order, and no more.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
steps, equal = range(1, STEPS + 1), 1e-17  # where what is equal to the last bit is drawn
left.plot(steps, one[llama], "k", label="Llama, one device")
left.plot(steps, one[mixtral], "k--", label="Mixtral, one device")
apart = {}
for name, (losses, _, _) in runs.items():
    apart[name] = [abs(x - y) for x, y in zip(losses, one[mixtral if "mixtral" in name else llama])]
    left.plot(steps, losses, "o", alpha=0.4)
    right.plot([max(x, equal) for x in apart[name]], [name] * STEPS, "o", alpha=0.4)
left.set(title="Loss", xlabel="step", ylabel="nats a token", xticks=steps)
left.legend(frameon=False)
right.set(title="Difference to one device", xlabel="nats a token", xscale="log", xlim=(equal / 3, 1), ylim=(12.5, -0.5))
right.set_xticks([equal, 1e-15, 1e-12, 1e-9, 1e-6, 1e-3], ["equal", *(f"$10^{{{n}}}$" for n in (-15, -12, -9, -6, -3))])
right.grid(axis="x", linewidth=0.3)
plt.show()

assert max(max(row) for row in apart.values()) < 1e-13
print(f"{len(runs)} parallelisms, {STEPS} steps: every loss is within 1e-13 of that of one device")

# %% [markdown]
# ## Where things lie
#
# One matrix of the first block, its gradient, and AdamW's running mean of that gradient. In the pictures a colour is a
# block, and the numbers in it are the ranks that hold it. Data parallel: everything whole, on everyone. ZeRO-1 splits the
# state; ZeRO-2 the gradient, too; FSDP (ZeRO-3) all. Tensor parallel splits what is computed with, and the rest follows.
# (`R:dp` in a type: each rank's gradient stays to be added up, until it is known which part of the sum a rank needs.)


# %%
def lies(name):
    params, grads, state = (tree["blocks"][0]["mlp"]["up"] for tree in (*runs[name][2][:2], runs[name][2][2][1].mean))
    return OrderedDict(parameter=params, gradient=grads, mean=state)


names = "dp", "zero1", "zero2", "fsdp", "hsdp", "tp", "fsdp+tp+sp+vp+remat"
vfn.show(OrderedDict((name, lies(name)) for name in names))

# %% [markdown]
# ## What travels
#
# The collectives of one step, op by op, with the bytes that they held on a rank. Nobody has written one of them: they
# follow from where values lie.

# %%
OPS = {"all_reduce": "C0", "reduce_scatter": "C1", "all_gather": "C2", "all_to_all": "C3", "permute": "C4"}
print(f"{'':20}" + "".join(f"{op:>15}" for op in OPS) + f"{'bytes':>10}")
for name, (_, log, _) in runs.items():
    print(f"{name:20}" + "".join(f"{log.count(op) or '':>15}" for op in OPS) + f"{log.bytes():>10,}")
    assert log.count() == sum(log.count(op) for op in OPS)

# %%
figure, panels = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
for panel, title, amount in (
    (panels[0], "Collectives of a step", lambda log, op: log.count(op)),
    (panels[1], "KiB that they hold on a rank", lambda log, op: log.bytes(op) / 1024),
):
    begin = [0.0] * len(runs)
    for op, color in OPS.items():
        sizes = [amount(log, op) for _, log, _ in runs.values()]
        panel.barh(list(runs), sizes, left=begin, color=color, label=op)
        begin = [a + b for a, b in zip(begin, sizes)]
    panel.set_title(title)
panels[0].invert_yaxis()
panels[0].legend(frameon=False)
plt.show()

# %% [markdown]
# What is moved can be read off the model. Four all-reduces a block for tensor parallelism, Megatron's; with sequence
# parallelism each becomes a reduce-scatter and an all-gather. FSDP gathers each block's parameters once, and what is in no
# block. A ring of four ranks sends keys and values on, never gathering them. Two all-to-alls a block bring tokens to their
# experts and back, and two their gradients. (An all-reduce is a reduce-scatter and an all-gather in one, and moves what it
# holds twice.)

# %%
logs = {name: log for name, (_, log, _) in runs.items()}
clipping = 1  # the norm of all gradients, a sum over the ranks that have parts of it
assert logs["tp"].count("all_reduce") == 4 * LLAMA.layers + clipping
assert logs["tp+sp"].count("reduce_scatter") == logs["tp+sp"].count("all_gather") == 4 * LLAMA.layers
assert logs["fsdp"].count("all_gather") == logs["fsdp"].count("reduce_scatter") == LLAMA.layers + 1
assert logs["cp"].count("all_gather") == 0 < logs["cp"].count("permute")
assert logs["ep, mixtral"].count("all_to_all") == 4 * MIXTRAL.layers

# %% [markdown]
# Each record says what it was for. ZeRO-1: gradients are added up and split; the norm that clips them is one more number,
# as each rank now works on a part of them; and the updated parameters are gathered.

# %%
for record in logs["zero1"]:
    print(f"{record.op} over {record.axis}: {record.bytes:,} bytes, for {record.why}")

# %% [markdown]
# ## What a rank holds
#
# With N parameters in float32, AdamW needs 4 N bytes of parameters, 4 N of gradients and 8 N of state. Which of these ZeRO
# splits over n ranks is the whole difference between its stages. Left: what a rank of the runs above holds, and the
# formulas (marks). Right: before anything is made. `vfn.eval_shape` gives the shapes of a Llama of 7 billion parameters
# without its values, and the table says how they will lie on 64 ranks; activations come on top.


# %%
def block_bytes(x, mesh, spec):
    return math.prod(vfn.shard_shape(tuple(x.shape), mesh, spec)) * x.element_size()


def held(tree):
    """The bytes of a tree of arrays on one rank."""
    return sum(block_bytes(x, x.device_mesh, vfn.spec_of(x)) for x in optree.tree_leaves(tree) if x.ndim)


def needed(text, sizes, shapes):
    """The bytes of parameters, gradients and state on one rank, from shapes and names alone."""
    specs = parallel(text, sizes).specs(shapes, llama.NAMES, sizes)
    return [
        times * sum(map(block_bytes, optree.tree_leaves(shapes), repeat(sizes), optree.tree_leaves(tree)))
        for times, tree in zip((1, 1, 2), specs)
    ]


# into how many parts each is split
STAGES = {"dp": (1, 1, 1), "zero1": (1, 1, 4), "zero2": (1, 4, 4), "fsdp": (4, 4, 4), "hsdp": (2, 2, 2)}
count = sum(x.numel() for x in optree.tree_leaves(llama.init(KEY, LLAMA)))
small = {name: [held(tree) for tree in runs[name][2]] for name in STAGES}
formula = {name: [8 * count / p, 8 * count / g, 16 * count / s] for name, (p, g, s) in STAGES.items()}
assert small == formula  # float64: 8 bytes a number

BIG = llama.Config(vocab=32000, dim=4096, heads=32, groups=32, layers=32, hidden=11008)
shapes = vfn.eval_shape(llama.init, KEY, BIG)
PLANS = {"dp": {"dp": 64}, "zero1": {"dp": 64}, "zero2": {"dp": 64}, "fsdp": {"dp": 64},
         "dp+tp+vp": {"dp": 8, "tp": 8}, "zero1+tp+vp": {"dp": 8, "tp": 8}, "fsdp+tp+vp": {"dp": 8, "tp": 8}}  # fmt: skip
big = {text: needed(text, sizes, shapes) for text, sizes in PLANS.items()}

# %%
figure, panels = plt.subplots(1, 2, figsize=(11, 3), layout="constrained")
for panel, rows, unit in (panels[0], small, 1024), (panels[1], big, 1e9):
    begin = [0.0] * len(rows)
    for i, what in enumerate(("parameters", "gradients", "state of AdamW")):
        sizes = [row[i] / unit for row in rows.values()]
        panel.barh(list(rows), sizes, left=begin, label=what)
        begin = [a + b for a, b in zip(begin, sizes)]
    panel.invert_yaxis()
panels[0].plot([sum(x) / 1024 for x in formula.values()], list(formula), "k|", markersize=18, label="formula")
panels[0].set(title=f"{count:,} parameters, 4 ranks", xlabel="KiB on a rank (float64)")
panels[0].legend(frameon=False, fontsize=9)
panels[1].axvline(80, color="gray", linestyle=":")
panels[1].text(81, 6.4, "80 GB: a GPU", color="gray")
numel = sum(x.numel() for x in optree.tree_leaves(shapes))
panels[1].set(title=f"{numel / 1e9:.1f} billion parameters, 64 ranks", xlabel="GB on a rank (float32)")
plt.show()
for text, (p, g, s) in big.items():
    each = f"{p / 1e9:6.2f} GB of parameters, {g / 1e9:6.2f} of gradients, {s / 1e9:6.2f} of state"
    print(f"{text:12} {each}: {(p + g + s) / 1e9:6.2f}")

# %% [markdown]
# ## A row of one's own
#
# The table is a dictionary. HSDP repeats everything on each replica, but for the optimiser's state, the largest part, there
# is no need to: that is used once a step. No row says so; here is one, and the model is not touched.

# %%
TABLE["hsdp1"] = TABLE["hsdp"] | {"state": ("dp", "replica")}

losses, log, trees = train("hsdp1", {"replica": 2, "dp": 2})
assert max(abs(loss - want) for loss, want in zip(losses, one[llama])) < 1e-13
assert [held(tree) for tree in trees] == [8 * count / 2, 8 * count / 2, 16 * count / 4]
print(f"{sum(map(held, trees)):,} bytes on a rank, where hsdp has {sum(small['hsdp']):,}")
params, grads, (_, adam) = trees
vfn.show(OrderedDict(parameter=params["norm"], gradient=grads["norm"], mean=adam.mean["norm"]))

# %% [markdown]
# ## Without a table
#
# Names of dims are a convenience. In a function of one's own the same is said with axes: where parameters lie by rules on
# their paths, or by size, as ZeRO does; and where values do by `with_sharding`, at the few places where it matters.


# %%
def loss(params, x):
    for layer in params["layers"]:
        y = torch.relu(x @ layer["up"]) @ layer["down"]
        x = x + vfn.with_sharding(y, P("dp"))  # the sum over "tp"
    return x.square().mean()


def normal(key, *shape):
    return vfn.random.normal(key, shape, torch.float64) / 4


keys = vfn.random.split(KEY, 5)
params = {"layers": [{"up": normal(keys[i], 12, 16), "down": normal(keys[i + 1], 16, 12)} for i in (0, 2)]}
x = normal(keys[4], 8, 12)
want = vfn.grad(loss)(params, x)

with vfn.simulate(4):
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    by_rules = vfn.spec_from_rules(params, [(r"up$", P(None, "tp")), (r"down$", P("tp"))])  # Megatron's
    by_size = vfn.fsdp_specs(params, mesh, "dp", by_rules)  # and over "dp" as well
    print(by_size["layers"][0])
    for specs in by_rules, by_size:
        got = vfn.grad(loss)(vfn.shard(params, mesh, specs), vfn.shard(x, mesh, P("dp")))
        torch.testing.assert_close(vfn.unshard(got), want)
        assert vfn.spec_of(got["layers"][1]["up"]) == specs["layers"][1]["up"]  # a gradient lies as its parameter
