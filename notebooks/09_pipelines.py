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
# # Pipelines
#
# A model whose layers do not fit on one rank is spread over several: each has a *stage*, some layers one behind the other,
# and a batch goes through them in parts. No model is taken apart for this. Its function says where it *may* be cut, and
# `vfn.pipeline` cuts the recorded step. Which rank works on which part when is a *schedule*: data, to look at before
# anything runs.

# %%
import dataclasses
import functools

import matplotlib.pyplot as plt
import torch

import vescale_fn as vfn
from vescale_fn import P, schedules
from vescale_fn.recipes import llama, models
from vescale_fn.recipes.parallel import parallel
from vescale_fn.schedules import Costs
from vescale_fn.schedules.actions import actions_of

torch.set_num_threads(1)
KEY = vfn.random.key(0)
RANKS, PARTS = 4, 8

# %% [markdown]
# ## One word
#
# This is all that a model says of pipelines: behind each layer, the program may be cut. Anywhere else `vfn.cut` is the
# identity.


# %%
def loss(params, x, y):
    for w in params:
        x = vfn.cut(torch.tanh(x @ w))
    return (x - y).square().mean()


piped = vfn.pipeline(loss, "pp", microbatches=4, cuts=[1])  # behind layer 1; by default, balanced
print(piped)

# %% [markdown]
# On plain tensors `piped` is the mean over four parts of the batch. On a mesh with the axis `"pp"` its stages run on the
# ranks along that axis. `specs` says which parameter is whose: `at` a coordinate of the axis, and nowhere else. Gradients
# lie as their parameters do, and all of them have the bits of one device.

# %%
params = list(vfn.random.normal(KEY, (4, 8, 8)))
batch = vfn.random.normal(KEY, (2, 16, 8)).unbind()
value, grads = vfn.value_and_grad(piped)(params, *batch)

with vfn.simulate(2):
    mesh = vfn.make_mesh((2,), ("pp",))
    specs = piped.specs(params, *vfn.shard(batch, mesh, P()))
    value_there, grads_there = vfn.value_and_grad(piped)(vfn.shard(params, mesh, specs), *batch)
    print(*map(vfn.typeof, grads_there), sep="\n")
    for one, other in zip([value, *grads], vfn.unshard([value_there, *grads_there]), strict=True):
        assert torch.equal(one, other)

# %% [markdown]
# ## A language model on four ranks
#
# The recipes' Llama, with eight layers. The batch has eight parts. Nothing is computed yet: from the shapes alone follow the
# stages, how many calls each of their tasks has, how long these are predicted to take, and what they send for each part of
# the batch. F is the forward pass of a stage; B the gradient of what it was given, which the stage before waits for; W the
# gradient of its parameters, which nobody waits for; BW both in one.
#
# Drawn is when each rank works: a row for each, a rectangle for each task, with the number of the part in it. What is grey is
# the *bubble*: a rank waits, for the first part to come or the last one to come back. Below it is what each rank holds
# meanwhile: the first one most, as it has four parts on their way when the first comes back.

# %%
LLAMA = llama.Config(vocab=64, dim=32, heads=4, groups=4, layers=8, hidden=64, dropout=0.0)


def pipelined(schedule, config=LLAMA):
    return vfn.pipeline(
        lambda params, batch, key: llama.loss(params, batch, config, key),
        "pp",
        microbatches=PARTS,
        schedule=schedule,
        chunks=2 if schedule == "interleaved" else None,
    )


shapes = vfn.eval_shape(functools.partial(llama.init, config=LLAMA, dtype=torch.float64), KEY)
text = models.random_batch(KEY, LLAMA, 16, 16)
with vfn.simulate(RANKS), vfn.use_mesh(vfn.make_mesh((RANKS,), ("pp",))):
    run = pipelined("1f1b")
    placed = vfn.shard(shapes, vfn.current_mesh(), run.specs(shapes, text, KEY))
    plan = run.plan(placed, text, KEY)
plan

# %% [markdown]
# ## Seven schedules
#
# What can be done about the bubble? More parts of the batch; several stages on each rank (`interleaved`); or W, which can
# wait, where a rank would wait (`zb-h1`, `zb-h2`, `zbv`, `dualpipev`). The price is memory, or messages. All of them here
# for the same work, F = B = W = 1 of a rank's whole share, from the first task of a rank to its last.

# %%
NAMED = {
    "gpipe": (schedules.gpipe(RANKS, PARTS), (RANKS - 1) * 3, PARTS),
    "1f1b": (schedules.one_f_one_b(RANKS, PARTS), (RANKS - 1) * 3, RANKS),
    "interleaved": (schedules.interleaved(RANKS, PARTS, 2), (RANKS - 1) * 3 / 2, RANKS + (RANKS - 1) / 2),
    "zb-h1": (schedules.zb_h1(RANKS, PARTS), RANKS - 1, RANKS),
    "zb-h2": (schedules.zb_h2(RANKS, PARTS), 0, 2 * RANKS - 1),
    "zbv": (schedules.zbv(RANKS, PARTS), 0, RANKS),
    "dualpipev": (schedules.dualpipev(RANKS, PARTS), (RANKS - 1) * (5 - 3) / 2, RANKS + 1 / 2),
}
FORMULAS = {
    "gpipe": ("(p-1)(F+B+W)", "m"),
    "1f1b": ("(p-1)(F+B+W)", "p"),
    "interleaved": ("(p-1)(F+B+W)/v", "p + (p-1)/v"),
    "zb-h1": ("(p-1)(F+B-W)", "p"),
    "zb-h2": ("(p-1)(F+B-2W)", "2p - 1"),
    "zbv": ("0", "p"),
    "dualpipev": ("(p-1)(F+2B-W)/2", "p + 1/2"),
}
print(f"p = {RANKS} ranks, m = {PARTS} parts, v = 2 stages a rank\n")
print("schedule     idle, by the formula   simulated   parts in flight, by the formula   simulated")
timelines = {}
for name, (schedule, idle, held) in NAMED.items():
    schedule.check()  # no task is missing, and no two wait for each other
    each = schedule.ranks / schedule.stages  # of a rank's work is a stage's
    timelines[name] = timeline = schedule.simulate(Costs(F=each, B=each, W=each))
    most = max(timeline.in_flight) * each
    assert (timeline.idle[0], most) == (idle, held)
    said, kept = FORMULAS[name]
    print(f"{name:12} {said:>16} = {idle:<4g} {timeline.idle[0]:8g} {kept:>24} = {held:<4g} {most:12g}")

# %%
COLOURS = {"F": "#4e79a7", "B": "#f28e2b", "W": "#59a14f", "BW": "#e15759"}
figure, panels = plt.subplots(len(timelines), 1, figsize=(11, 10), sharex=True, layout="constrained")
for panel, (name, timeline) in zip(panels, timelines.items()):
    for rank, row in enumerate(timeline.rows):
        first = min(action.stage for task in row for action in actions_of(task.task))
        for task in row:
            actions = actions_of(task.task)
            for i, action in enumerate(actions):  # two at once share the height
                low = rank + 0.45 - 0.9 * (i + 1) / len(actions)
                paler = 1 if action.stage == first else 0.55  # a rank's second stage
                span, high = (task.start, task.end - task.start), 0.9 / len(actions)
                panel.broken_barh(
                    [span], (low, high), color=COLOURS[action.kind], alpha=paler, linewidth=0.3, edgecolor="w"
                )
    panel.set(title=f"{name}: bubble {timeline.bubble:.0%}", ylabel="rank", yticks=range(RANKS), xlim=(0, None))
    panel.invert_yaxis()
    panel.set_facecolor("#e4e4e4")
panels[0].legend(
    handles=[plt.Rectangle((0, 0), 1, 1, color=colour, label=kind) for kind, colour in COLOURS.items()],
    ncols=4, loc="lower right", fontsize=8,
)  # fmt: skip
panels[-1].set_xlabel("time, in F of a rank's whole share")
plt.show()
assert [name for name, timeline in timelines.items() if timeline.idle[0] == 0] == ["zb-h2", "zbv"]

# %% [markdown]
# The bubble counts the time before a rank's first task and behind its last one, too. With `zb-h2` and `zbv` that is all
# that is left of it: there no rank waits between its tasks, and where the next step follows, it begins there.
#
# ## Memory, by rank and over time
#
# The same plans say what each rank holds at each task: its parameters, what is kept for backward passes that are still to
# come, gradients, messages on their way. Here from the times that are predicted for this model. `gpipe` keeps all eight
# parts; with `1f1b` the first rank keeps four and the last one; `zb-h2` pays for its time; and with `zbv` all ranks need
# about the same.

# %%
figure, panels = plt.subplots(1, 4, figsize=(12, 2.8), sharey=True, layout="constrained")
with vfn.simulate(RANKS), vfn.use_mesh(vfn.make_mesh((RANKS,), ("pp",))):
    for panel, name in zip(panels, ("gpipe", "1f1b", "zb-h2", "zbv")):
        run = pipelined(name)
        if name in ("gpipe", "zbv"):  # a stage for each rank, as in the next two; two stages for each
            placed = vfn.shard(shapes, vfn.current_mesh(), run.specs(shapes, text, KEY))
        memory = run.plan(placed, text, KEY).memory()
        print(f"{name:6} peak of each rank:", ", ".join(f"{peak / 1e3:.0f} kB" for peak in memory.peaks))
        for rank, row in enumerate(memory.rows):
            panel.plot([1e3 * x.end for x in row], [x.peak / 1e3 for x in row], linewidth=1, label=f"rank {rank}")
        panel.set(title=name, xlabel="ms, predicted")
panels[0].set(ylabel="kB alive on a rank", ylim=(0, None))
panels[0].legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# ## The same numbers from each
#
# A step of this Llama with a stage for each rank, with two, and with two that lie as a V, on four ranks that this process
# plays. Each gives the bits of one device that computes the same parts one after the other.

# %%
whole = llama.init(KEY, LLAMA, torch.float64)
value, grads = vfn.value_and_grad(pipelined("1f1b"))(whole, text, KEY)
with vfn.simulate(RANKS):
    mesh = vfn.make_mesh((RANKS,), ("pp",))
    params = vfn.shard(whole, mesh, P())  # without specs of the pipeline, each rank has all of them
    for name in ("gpipe", "interleaved", "zbv"):
        found = vfn.unshard(vfn.value_and_grad(pipelined(name))(params, text, KEY))
        for one, other in zip(vfn.tree.leaves((value, grads)), vfn.tree.leaves(found), strict=True):
            assert torch.equal(one, other)
        print(f"{name:12} loss {found[0].item():.12f}")

# %% [markdown]
# ## Training, on four processes
#
# Four layers in two stages, each on two ranks that share the batch and keep the parameters in parts (FSDP): two lines make a
# pipeline of the step that there was, the one with `vfn.pipeline` and the one with its specs. All of the step is one plan,
# `vfn.jit`: the schedule, the sums of gradients over `dp`, clipping, the update. `vfn.launch` runs it on processes, which talk
# over gloo.


# %%
FOUR = dataclasses.replace(LLAMA, layers=4)
init = functools.partial(llama.init, config=FOUR, dtype=torch.float64)
shapes = vfn.eval_shape(init, KEY)


def train(mesh=None, steps=8):
    layout = parallel("pp+fsdp", mesh) if mesh else None
    optimizer = vfn.optim.chain(vfn.optim.clip_by_global_norm(1.0), vfn.optim.adamw(1e-2))
    run = pipelined("zb-h1", models.laid_out(FOUR, layout) if mesh else FOUR)
    place, params, update = lambda x: x, init(KEY), None
    if mesh:
        place = lambda x: vfn.shard(x, mesh, layout.spec("batch"))
        specs = layout.specs(shapes, llama.NAMES, mesh).staged(run, shapes, place(text), KEY)
        params = vfn.init(init, KEY, spec=specs.params, mesh=mesh)
        state, update = specs.init(optimizer, params), functools.partial(specs.update, optimizer)
    else:
        state = optimizer.init(params)

    @vfn.jit
    def step(params, state, batch, key):
        value, grads = vfn.value_and_grad(run)(params, batch, key)
        if update:
            return *update(grads, state, params), value
        updates, state = optimizer.update(grads, state, params)
        return vfn.optim.apply_updates(params, updates), state, value

    losses = []
    for i in range(steps):
        params, state, value = step(params, state, place(text), vfn.random.fold_in(KEY, i))
        losses.append(value.item())
    held = sum(x.to_local().untyped_storage().nbytes() for x in vfn.tree.leaves(params)) if mesh else 0
    return losses, held


def on_processes():
    torch.set_num_threads(1)
    return train(vfn.make_mesh((2, 2), ("pp", "dp")))


alone, _ = train()
count = sum(x.numel() for x in vfn.tree.leaves(shapes))
for rank, (losses, held) in enumerate(vfn.launch(on_processes, 4, device="cpu")):
    assert max(abs(a - b) for a, b in zip(losses, alone)) < 1e-12
    print(f"rank {rank}: {held:,} of {8 * count:,} bytes of parameters, loss {losses[0]:.6f} -> {losses[-1]:.6f}")
