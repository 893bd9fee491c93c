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
# # Train and resume
#
# A whole training run, small enough to look at: parameters that are whole nowhere, an optimiser, a compiled step, metrics,
# checkpoints in the background. It starts on a mesh of four ranks and crashes; its last checkpoint turns out to be damaged;
# it goes on from the one before, on two real processes, in another parallelism. In the end its losses are those of a run
# that nothing has happened to, and the model knows a text by heart.

# %%
import codecs
import contextlib
import io
import json
import pathlib
import tempfile
from functools import partial
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import vescale_fn as vfn
from vescale_fn.recipes import data, llama, sampling
from vescale_fn.recipes.metrics import Metrics
from vescale_fn.recipes.models import laid_out
from vescale_fn.recipes.parallel import parallel

torch.set_num_threads(1)
plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 90}

with contextlib.redirect_stdout(io.StringIO()):
    import this  # the Zen of Python: 856 bytes, and a joke about how they are kept

TEXT = torch.tensor(list(codecs.decode(this.s, "rot13").encode()), dtype=torch.uint8)
print(*bytes(TEXT.tolist()).decode().splitlines()[2:6], "...", sep="\n")

# %% [markdown]
# ## A step
#
# A Llama over bytes; AdamW with a warm-up and a cosine, clipped gradients, and weight decay for all but the scales of
# norms. The step is a pure function of all that it depends on: parameters, state, a batch and a key. The batch of step `i`
# and its dropout come from keys, too, so that a run which goes on elsewhere sees the same. All is in float64, where a
# difference of 1e-15 is rounding, and any mistake shows.

# %%
CONFIG = llama.Config(vocab=128, dim=64, heads=8, groups=8, layers=1, hidden=128, dropout=0.01)
STEPS, SAVE_EVERY, BATCH, CONTEXT = 100, 15, 24, 32
INIT, BATCHES, DROPOUT, SAMPLE = vfn.random.split(vfn.random.key(0), 4)

rate = vfn.optim.warmup_cosine(1e-2, warmup=10, steps=STEPS, end=1e-3)
adam = vfn.optim.adamw(rate, b2=0.99, mask=vfn.optim.by_path([("norm", False)], otherwise=True))
optimizer = vfn.optim.chain(vfn.optim.clip_by_global_norm(1.0), adam)


class Run(NamedTuple):
    """What a run has come to: all that the next step depends on, and so what a checkpoint holds."""

    done: int
    params: Any
    state: Any


def batch_of(step):
    return data.random_batch(vfn.random.fold_in(BATCHES, step), TEXT, BATCH, CONTEXT)


# %% [markdown]
# On one device, without interruption: the yardstick, a plain loop on plain tensors.

# %%
params = llama.init(INIT, CONFIG, torch.float64)
state, yardstick = optimizer.init(params), []
for step in range(STEPS):
    loss, grads = vfn.value_and_grad(llama.loss)(params, batch_of(step), CONFIG, vfn.random.fold_in(DROPOUT, step))
    updates, state = optimizer.update(grads, state, params)
    params = vfn.optim.apply_updates(params, updates)
    yardstick.append(loss.item())
print("loss", [f"{loss:.2f}" for loss in yardstick[::15]], "...", f"{yardstick[-1]:.2f}")

# %% [markdown]
# ## Parameters that are whole nowhere
#
# `vfn.eval_shape` runs the initialiser on tensors without values; from the shapes follows where everything will lie; and
# `vfn.init` lets each rank draw its own shards alone. An element of a draw depends on the key and on its place, so that
# these are the bits of one device. Nothing travels, and no rank has more memory than its shards need.

# %%
with vfn.simulate(4):
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    shapes = vfn.eval_shape(llama.init, INIT, CONFIG, torch.float64)
    specs = parallel("fsdp+tp", mesh).specs(shapes, llama.NAMES, mesh)
    with vfn.comm_log() as log:
        sharded = vfn.init(llama.init, INIT, CONFIG, torch.float64, spec=specs.params, mesh=mesh)
    assert len(log) == 0
    for path in ("embed", "head"):
        assert torch.equal(vfn.unshard(sharded[path]), llama.init(INIT, CONFIG, torch.float64)[path])
vfn.show(sharded["blocks"][0]["mlp"])

# %% [markdown]
# ## The run
#
# All of it: a parallelism by name, the step as one compiled plan that updates parameters and state in their own memory
# (`donate_argnums`), a line of metrics a step, a checkpoint every 15 steps, written while the next ones run. It is one
# function, for simulated ranks and for real ones; `crash` makes it fail before a step, as a machine might.


# %%
def train(text, sizes, folder, resume=None, crash=None, trace=None):
    mesh = vfn.make_mesh(tuple(sizes.values()), tuple(sizes))
    layout = parallel(text, mesh)
    config = laid_out(CONFIG, layout)
    specs = layout.specs(vfn.eval_shape(llama.init, INIT, config, torch.float64), llama.NAMES, mesh)

    def step(params, state, batch, key):
        loss, grads = vfn.value_and_grad(llama.loss)(params, batch, config, key)
        return *specs.update(optimizer, grads, state, params), loss

    step = vfn.jit(step, donate_argnums=(0, 1))
    with vfn.use_mesh(mesh):
        params = vfn.init(llama.init, INIT, config, torch.float64, spec=specs.params)
        at = Run(0, params, specs.init(optimizer, params))
        saved = vfn.checkpoint.Manager(folder / "checkpoints", background=True)
        if resume is not None:
            at = saved.restore(at, step=resume)
            saved.rewind(resume)  # what is later goes
        first = not dist.is_initialized() or dist.get_rank() == 0
        with Metrics(folder / "metrics.jsonl" if first else None, done=at.done) as metrics:
            for i in range(at.done, STEPS):
                if i == crash:
                    raise RuntimeError(f"the power went out before step {i + 1}")
                batch = vfn.shard(batch_of(i), mesh, layout.spec("batch"))
                with vfn.profile(folder / "trace.json") if i == trace else contextlib.nullcontext():
                    params, state, loss = step(at.params, at.state, batch, vfn.random.fold_in(DROPOUT, i))
                at = Run(i + 1, params, state)
                metrics.write(at.done, loss=loss.item())
                if at.done % SAVE_EVERY == 0 or at.done == STEPS:
                    saved.save(at.done, at)
        saved.wait()


def losses(folder):
    """The loss of each step that the metrics tell of."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


# %% [markdown]
# ## A crash
#
# FSDP and tensor parallel on four simulated ranks, until step 50.

# %%
folder = pathlib.Path(tempfile.mkdtemp())
try:
    with vfn.simulate(4):
        train("fsdp+tp", {"dp": 2, "tp": 2}, folder, crash=50)
except RuntimeError as error:
    print(error)
before = losses(folder)

manager = vfn.checkpoint.Manager(folder / "checkpoints")
manager.wait()  # this process still lives, and finishes what it had begun to write
print(len(before), "steps done; checkpoints of steps", manager.steps())

# %% [markdown]
# ## Damage
#
# A bit of the last checkpoint flips. Each piece is stored with a checksum, so the damage is found when it is read, and the
# message names the leaf and what else there is. Nothing was loaded.

# %%
file = sorted((folder / "checkpoints" / "step-45").glob("*.distcp"))[0]
content = bytearray(file.read_bytes())
content[len(content) // 2] ^= 1
file.write_bytes(content)

like = Run(0, params, state)
try:
    manager.restore(like)
except vfn.errors.CheckpointError as error:
    print(str(error).replace(str(folder), "run"))
restored = manager.restore(like, step=30)
print("restored", restored.done)

# %% [markdown]
# ## On other ranks, in another way
#
# Two real processes, which exchange data over gloo, go on from step 30 in ZeRO-1. A checkpoint holds whole values in
# pieces; each rank reads those that it is to have now. The metrics of the steps that are done again are dropped, and
# written again.

# %%
vfn.launch(partial(train, resume=30, trace=60), 2, "zero1", {"dp": 2}, folder)
after = losses(folder)
assert list(after) == list(range(1, STEPS + 1))
print(len(after), "steps in the metrics; checkpoints of steps", manager.steps())

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
steps = range(1, STEPS + 1)
left.plot(steps, yardstick, "k", linewidth=1, label="one device, uninterrupted")
parts = {
    "fsdp+tp on 2 x 2 simulated ranks, until it crashed": {i: before[i] for i in before},
    "zero1 on 2 processes, from step 30": {i: after[i] for i in after if i > 30},
}
equal = 1e-17  # where what is equal to the last bit is drawn
for name, part in parts.items():
    left.plot(list(part), list(part.values()), ".", alpha=0.5, label=name)
    right.plot(list(part), [max(abs(loss - yardstick[i - 1]), equal) for i, loss in part.items()], ".", label=name)
left.set(title="Loss", xlabel="step", ylabel="nats a byte")
left.legend(frameon=False)
right.set(title="Difference to one device", xlabel="step", ylabel="nats a byte", yscale="log", ylim=(equal / 3, 1))
right.set_yticks([equal, 1e-15, 1e-12, 1e-9, 1e-6, 1e-3], ["equal", *(f"$10^{{{n}}}$" for n in (-15, -12, -9, -6, -3))])
right.grid(axis="y", linewidth=0.3)
plt.show()

apart = max(abs(loss - yardstick[i - 1]) for part in parts.values() for i, loss in part.items())
assert apart < 1e-12
print(
    f"{sum(map(len, parts.values()))} steps, {50 - 30} of them done twice: every loss is within 1e-12 of the yardstick's"
)

# %% [markdown]
# ## What the ranks did
#
# One of these steps has left a trace, with a row for each rank on one clock, to be opened in https://ui.perfetto.dev. Here
# are its operations and its collectives, which run in threads of their own: gradients are summed and each rank keeps its
# part, then the norm that clips them, and after the update all parameters are gathered.

# %%
events = json.loads((folder / "trace.json").read_text())["traceEvents"]
ranks = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
spans = [event for event in events if event["ph"] == "X"]
kinds = {"operations": "aten::", "collectives": "gloo:"}

figure, axes = plt.subplots(figsize=(11, 2), layout="constrained")
for row, (rank, kind) in enumerate((rank, kind) for rank in ranks for kind in kinds):
    mine = [e for e in spans if e["pid"] == rank and e["name"].startswith(kinds[kind])]
    bars = [(event["ts"] / 1000, event["dur"] / 1000) for event in mine]
    axes.broken_barh(bars, (row - 0.4, 0.8), color="C0" if kind == "operations" else "C1")
axes.set_yticks(range(4), [f"{name}: {kind}" for name in ranks.values() for kind in kinds])
axes.set(title="One step of two processes", xlabel="ms", ylim=(3.6, -0.6))
plt.show()
print(list(ranks.values()), sorted({event["name"] for event in spans if event["name"].startswith("gloo:")}))

# %% [markdown]
# ## Half the bytes
#
# In practice parameters are kept in float32 and computed with in bfloat16. A *policy* says so around the loss; what FSDP
# gathers then travels in bfloat16, while gradients are added up, and kept, in float32.

# %%
with vfn.simulate(4):
    mesh = vfn.make_mesh((4,), ("dp",))
    layout = parallel("fsdp", mesh)
    config = laid_out(CONFIG, layout)
    specs = layout.specs(vfn.eval_shape(llama.init, INIT, config), llama.NAMES, mesh)
    kept = vfn.init(llama.init, INIT, config, spec=specs.params, mesh=mesh)
    batch = vfn.shard(batch_of(0), mesh, layout.spec("batch"))
    for text in ("params=f32", "params=f32,compute=bf16"):
        policy = vfn.precision.policy(text)
        with vfn.use_mesh(mesh), vfn.comm_log() as log:
            loss, grads = vfn.value_and_grad(policy.apply(llama.loss))(kept, batch, config)
        print(f"{policy}: loss {loss.item():.1f}, gradients in {grads['head'].dtype}")
        for op in ("all_gather", "reduce_scatter"):
            dtypes = {record.dtype for record in log if record.op == op}
            print(f"    {op:14} {log.count(op)} of {log.bytes(op):,} bytes in all, in {', '.join(dtypes)}")

# %% [markdown]
# ## Home again
#
# Without a mesh, the last checkpoint is loaded as plain tensors; `vfn.export_weights` writes them as a file of safetensors that
# others read; and the model says what it has learned.

# %%
trained = manager.restore(like).params
torch.testing.assert_close(trained, params, rtol=0, atol=1e-10)  # what the uninterrupted run has come to

vfn.export_weights(folder / "model.safetensors", trained)
exported = load_file(folder / "model.safetensors")
print(*(f"{name:28} {list(x.shape)}" for name, x in exported.items()), sep="\n")

# %%
theirs = vfn.checkpoint.from_state_dict(exported, like=params)
scores = partial(llama.logits, theirs, config=CONFIG)
for key, begin in zip(vfn.random.split(SAMPLE, 4), (b"Beautiful", b"Errors", b"In the", b"If the")):
    with torch.no_grad():
        line = begin + sampling.generate(scores, begin, 60, CONTEXT, key, temperature=0.1)
    line = line.partition(b"\n")[0]
    print(line.decode())
    assert b"\n" + line + b"\n" in TEXT.numpy().tobytes()
