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
# # Any size, before the first byte
#
# What will a training step need on 1,024 GPUs? This process has none, and no other rank to talk to. It plans the step of a
# Llama of 70 billion parameters all the same: every collective with its bytes, and the memory of one rank over time. A small
# one of the same program then runs.

# %%
import dataclasses
import functools
import math

import matplotlib.pyplot as plt
import torch

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.recipes import llama, models
from vescale_fn.recipes.parallel import parallel

torch.set_num_threads(1)
KEY = vfn.random.key(0)

# %% [markdown]
# ## Shapes are leaves
#
# A `vfn.ShapeDtype` is a tensor without its values. `vfn.eval_shape` returns such leaves, and what needs no values takes them.
# The model has the sizes of the one with 70 billion parameters.

# %%
BIG = llama.Config(vocab=32000, dim=8192, heads=64, groups=8, layers=80, hidden=28672, dropout=0.0)
shapes = vfn.eval_shape(functools.partial(llama.init, config=BIG, dtype=torch.bfloat16), KEY)
count = lambda tree: sum(x.numel() for x in vfn.tree.leaves(tree))
print(shapes["embed"], shapes["blocks"][0]["attention"]["k"])
print(f"{count(shapes) / 1e9:.1f} billion parameters in {BIG.layers} layers")

# %% [markdown]
# ## A mesh without ranks
#
# `vfn.abstract_mesh` is a mesh of any size, here 128 x 8. With a spec on it, a shape stands for an array of that layout. Ops,
# gradients and `shard_map` bodies work on it, and cost no memory; what needs a value says so.

# %%
mesh = vfn.abstract_mesh((128, 8), ("dp", "tp"))
x = vfn.ShapeDtype((4096, 8192), torch.bfloat16, P("dp"), mesh)
w = vfn.ShapeDtype((8192, 28672), torch.bfloat16, P(None, "tp"), mesh)
print(x @ w)
print(vfn.grad(lambda w: (x @ w).float().square().mean())(w))
print(vfn.shard_map(lambda v: vfn.psum(v, "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P())(x))
try:
    x.sum().item()
except vfn.errors.NoValueError as error:
    print(error)

# %% [markdown]
# ## The plan of a step
#
# The recipes' Llama, its parameters sharded over "dp" and its matrices over "tp", with AdamW. `lower` records the step as one
# of the 1,024 ranks would, the first one (`abstract_mesh(..., rank=...)` is for another), and passes improve it as they would
# there: the plan is the same, call by call.


# %%
def planned(text, mesh, config, windows, length, dtype):
    layout, opt = parallel(text, mesh), vfn.optim.adamw(1e-4)
    config = dataclasses.replace(config, layout=layout)
    shapes = vfn.eval_shape(functools.partial(llama.init, config=config, dtype=dtype), KEY)
    specs = layout.specs(shapes, llama.NAMES, mesh)

    def step(params, state, batch):
        loss, grads = vfn.value_and_grad(llama.loss)(params, batch, config)
        return *specs.update(opt, grads, state, params), loss

    params = vfn.shard(shapes, mesh, specs.params)
    batch = vfn.ShapeDtype((windows, length + 1), torch.int64, layout.spec("batch"), mesh)
    with vfn.use_mesh(mesh):
        run = vfn.jit(step, donate_argnums=(0, 1))
        return run.lower(params, specs.init(opt, params), batch), run, specs, opt


plan, _, specs, opt = planned("fsdp+tp+sp", mesh, BIG, 128, 4096, torch.bfloat16)
comms = plan.comms()
for axis, what in ("dp", "parameters and their gradients"), ("tp", "activations"):
    ops = sorted({record.op for record in comms if record.axis == axis})
    said = ", ".join(f"{comms.count(op, axis)} {op} of {comms.bytes(op, axis) / 1e9:.2f} GB" for op in ops)
    print(f"over {axis}, {what}: {said}")
print(f"peak {plan.memory().peak / 1e9:.2f} GB on a rank")

# %% [markdown]
# ## Its memory, by layer and over time
#
# Left: what a rank holds of each layer between steps: the block of its parameters, and of AdamW's two means. Right: what is
# alive while a plan runs, call by call, here of eight layers. Forward, each layer's parameters are gathered and its
# activations stay; backward, they go again, a layer at a time; at the end the update runs in donated memory. With "remat" a
# layer keeps what it was given, and computes the rest again.


# %%
def held(tree, specs):
    leaves = zip(vfn.tree.leaves(tree), vfn.tree.leaves(specs), strict=True)
    return sum(math.prod(vfn.shard_shape(tuple(x.shape), mesh, spec)) * x.element_size() for x, spec in leaves) / 1e6


def by_layer(tree, specs):
    tables = (
        [part for name, part in tree.items() if name != "blocks"],
        [specs[name] for name in tree if name != "blocks"],
    )
    return [held(*tables), *map(held, tree["blocks"], specs["blocks"])]


params = by_layer(shapes, specs.params)
state = [2 * x for x in by_layer(shapes, specs.state)]

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3), layout="constrained")
left.bar(range(len(params)), params, label="parameters")
left.bar(range(len(params)), state, bottom=params, label="state of AdamW")
left.set(xlabel="layer (0: the tables)", ylabel="MB on a rank")
left.legend(frameon=False, fontsize=9)
EIGHT = dataclasses.replace(BIG, layers=8)
plans = {text: planned(text, mesh, EIGHT, 128, 4096, torch.bfloat16)[0] for text in ("fsdp+tp+sp", "fsdp+tp+sp+remat")}
for label, each in zip(("all activations stay", "remat"), plans.values()):
    right.plot([moment.bytes / 1e9 for moment in each.memory().timeline], linewidth=1, label=label)
right.set(xlabel="call of the plan", ylabel="GB alive on a rank", ylim=(0, None))
right.legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# ## Other layouts, before any is tried
#
# One more word in a text is another plan. What does each need, and send? Here of 8 layers.

# %%
plans = {"fsdp+tp": planned("fsdp+tp", mesh, EIGHT, 128, 4096, torch.bfloat16)[0], **plans}
for text, other in plans.items():
    sent = [other.comms().bytes(axis=axis) / 1e9 for axis in ("dp", "tp")]
    print(
        f"{text:17} peak {other.memory().peak / 1e9:5.2f} GB, sends {sent[0]:.2f} GB over dp and {sent[1]:.2f} over tp"
    )

# %% [markdown]
# ## One loop for all layers
#
# Stacked, layers of equal shapes are the slices of a `vfn.scan`. Its body is recorded once, forward and backward, however long
# it is, gathers a layer at a time, and with `vfn.remat` keeps what a policy says. A plan of 80 layers has as many lines as one
# of eight. `vfn.cond` brings both branches into the plan, and a `vfn.custom_vjp` its own way back: here, a gradient that is
# clipped where it enters a layer.


# %%
@vfn.custom_vjp
def clipped(h):
    return h


clipped.defvjp(lambda h: (h, None), lambda _, g: (g.clamp(-1, 1),))


@functools.partial(vfn.remat, policy=vfn.remat_policies.save_only_these_names("up"))
def layer(h, w):
    whole = vfn.with_sharding(w, P())  # gathered, for this layer
    up = vfn.name(clipped(h) @ whole["up"], "up")
    quiet = vfn.cond(h.float().square().mean() < 1, lambda u: u, lambda u: u / 2, up)
    return h + torch.tanh(quiet) @ whole["down"], None


def looped(weights, x):
    return vfn.scan(layer, x, weights)[0].float().square().mean()


step = vfn.jit(vfn.grad(looped))
flat = vfn.abstract_mesh((512,), ("dp",))
x = vfn.ShapeDtype((4096, 8192), torch.bfloat16, P("dp"), flat)
for layers in 8, 80:
    weights = {
        name: vfn.ShapeDtype((layers, *shape), torch.bfloat16, P(None, "dp"), flat)
        for name, shape in (("up", (8192, 28672)), ("down", (28672, 8192)))
    }
    loop = step.lower(weights, x)
    sent = ", ".join(f"{loop.comms().count(op)} {op}" for op in sorted({record.op for record in loop.comms()}))
    print(
        f"{layers} layers: {len(loop.text().splitlines())} lines, peak {loop.memory().peak / 1e9:.2f} GB on a rank; {sent}"
    )

# %% [markdown]
# ## A small one runs
#
# The same functions, on eight ranks that this process plays, with values. What they send was known before: collective by
# collective, byte by byte. And the losses are those of one device.

# %%
SMALL = llama.Config(vocab=64, dim=32, heads=4, groups=4, layers=2, hidden=64, dropout=0.0)
before = planned("fsdp+tp+sp", vfn.abstract_mesh((2, 4), ("dp", "tp")), SMALL, 4, 16, torch.float64)[0]
whole = llama.init(KEY, SMALL, torch.float64)
batches = [models.random_batch(vfn.random.fold_in(KEY, i), SMALL, 4, 16) for i in range(3)]
with vfn.simulate(8):
    ranks = vfn.make_mesh((2, 4), ("dp", "tp"))
    _, run, specs, opt = planned("fsdp+tp+sp", ranks, SMALL, 4, 16, torch.float64)
    params = vfn.shard(whole, ranks, specs.params)
    losses, logs = [], []
    with vfn.use_mesh(ranks):
        state = specs.init(opt, params)
        for batch in batches:
            with vfn.comm_log() as log:
                params, state, loss = run(params, state, vfn.shard(batch, ranks, P("dp")))
            losses.append(loss.item())
            logs.append([(record.op, record.axis, record.bytes) for record in log])
assert logs == 3 * [[(record.op, record.axis, record.bytes) for record in before.comms()]]
print(f"{len(logs[0])} collectives in each step, as planned")

generator = torch.Generator().manual_seed(0)
draw = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator) / 3
weights, x = {"up": draw(3, 8, 16), "down": draw(3, 16, 8)}, draw(16, 8)
with vfn.simulate(8):
    ranks = vfn.make_mesh((8,), ("dp",))
    found = vfn.unshard(step(vfn.shard(weights, ranks, P(None, "dp")), vfn.shard(x, ranks, P("dp"))))
for name, slope in vfn.grad(looped)(weights, x).items():
    assert (found[name] - slope).abs().max() < 1e-12

params, state = whole, opt.init(whole)
for batch, loss in zip(batches, losses, strict=True):
    expected, grads = vfn.value_and_grad(llama.loss)(params, batch, SMALL)
    assert abs(expected.item() - loss) < 1e-12
    updates, state = opt.update(grads, state, params)
    params = vfn.optim.apply_updates(params, updates)
