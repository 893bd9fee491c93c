"""On a GPU: a training step of a Llama beside torch's own, a step on simulated ranks, draws beside torch's, memory of a step.

``python -m benchmarks.gpu_times step`` runs one of them. Not a part of `python -m benchmarks`, which needs no GPU.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

import vescale_fn as vfn
from benchmarks.side_by_side import publish
from vescale_fn import P, tree
from vescale_fn.recipes import llama
from vescale_fn.recipes.parallel import parallel

# windows in a batch, and their length
SIZES = {
    "small": (llama.Config(vocab=1024, dim=256, heads=4, groups=4, layers=2, hidden=768, dropout=0.0), 4, 128),
    "medium": (llama.Config(vocab=8192, dim=1024, heads=16, groups=16, layers=6, hidden=2816, dropout=0.0), 8, 512),
    "large": (llama.Config(vocab=32768, dim=2048, heads=16, groups=16, layers=2, hidden=5632, dropout=0.0), 8, 1024),
}
RATE = 1e-4
KEY = vfn.random.key(0)


def times(candidates: Mapping[str, Callable[[], Any]], rounds: int = 21, seconds: float = 0.03) -> dict[str, float]:
    """The median time of one call of each, in ms between CUDA events; in turns, in an order that rotates."""

    def timed(call: Callable[[], Any], count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / count

    counts = {}
    for name, call in candidates.items():
        timed(call, 4)
        counts[name] = max(1, round(seconds * 1000 / timed(call, 2)))
    took: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            took[name].append(timed(candidates[name], counts[name]))
    return {name: statistics.median(all_) for name, all_ in took.items()}


# --- a training step --------------------------------------------------------------------------------------------------


def inputs(size: str) -> tuple[Any, torch.Tensor]:
    """Parameters in bfloat16, and a batch."""
    config, rows, length = SIZES[size]
    with torch.device("cuda"):  # as a default device it would cost each call of torch in Python some time
        params = llama.init(KEY, config, torch.bfloat16)
        batch = vfn.random.randint(vfn.random.key(1), (rows, length + 1), 0, config.vocab, dtype=torch.int64)
    return params, batch


def by_torch(size: str, compiled: str | None) -> Callable[[], Any]:
    """The step as one writes it in torch: autograd on plain tensors, and the fused AdamW; the loss compiled in a mode."""
    params, batch = inputs(size)
    leaves = [leaf.requires_grad_() for leaf in tree.leaves(params)]
    optimizer = torch.optim.AdamW(leaves, lr=RATE, fused=True)

    def loss() -> torch.Tensor:
        return plain_loss(params, batch, SIZES[size][0])

    run = loss if compiled is None else torch.compile(loss, mode=compiled)

    def step() -> torch.Tensor:
        value = run()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def plain_loss(params: Any, batch: torch.Tensor, config: llama.Config) -> torch.Tensor:
    """What `llama.loss` computes, in torch alone."""
    x = F.embedding(batch[:, :-1], params["embed"])
    cos, sin = llama.rotation(x.shape[1], config.dim // config.heads, config.base, params["norm"])

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x * cos + x.roll(x.shape[-1] // 2, -1) * sin

    def normed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, scale.shape, scale, eps=1e-5)

    for block in params["blocks"]:
        p = block["attention"]
        h = normed(x, p["norm"])
        q, k, v = ((h @ p[name]).unflatten(-1, (config.heads, -1)).transpose(1, 2) for name in "qkv")
        y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + y.transpose(1, 2).flatten(2) @ p["out"]
        p = block["mlp"]
        h = normed(x, p["norm"])
        x = x + (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    scores = normed(x, params["norm"]) @ params["head"].T
    return F.cross_entropy(scores.float().flatten(0, 1), batch[:, 1:].flatten())


def update(params: Any, state: Any, batch: torch.Tensor, config: llama.Config) -> Any:
    """The step as a pure function."""
    opt = vfn.optim.adamw(RATE)
    value, grads = vfn.value_and_grad(llama.loss)(params, batch, config)
    updates, state = opt.update(grads, state, params)
    return value, vfn.optim.apply_updates(params, updates), state


def by_vescale_fn(size: str, **options: Any) -> Callable[[], Any]:
    """That step; replayed where there are options."""
    params, batch = inputs(size)
    run: Any = vfn.jit(update, donate_argnums=(0, 1), static_argnums=3, **options) if options else update
    with torch.device("cuda"):
        now = [params, vfn.optim.adamw(RATE).init(params)]

    def call() -> torch.Tensor:
        value, *now[:] = run(*now, batch, SIZES[size][0])
        return value

    return call


WAYS: dict[str, Callable[[str], Callable[[], Any]]] = {
    "torch": lambda size: by_torch(size, None),
    "torch.compile": lambda size: by_torch(size, "default"),
    "torch.compile, reduce-overhead": lambda size: by_torch(size, "reduce-overhead"),
    "vescale_fn, eager": lambda size: by_vescale_fn(size),
    "jit": lambda size: by_vescale_fn(size, backend="torch"),
    "jit, arena": lambda size: by_vescale_fn(size, arena=True),
    "jit, inductor": lambda size: by_vescale_fn(size, backend="inductor"),
    "jit, cuda_graph": lambda size: by_vescale_fn(size, cuda_graph=True),
    "jit, inductor, cuda_graph": lambda size: by_vescale_fn(size, backend="inductor", cuda_graph=True),
}


def step(size: str) -> None:
    made = {name: make(size) for name, make in WAYS.items()}
    first = {name: float(call()) for name, call in made.items()}
    assert max(first.values()) - min(first.values()) < 0.05, first
    took = times(made)
    show(
        f"gpu_step_{size}",
        ["step", "ms", "of torch", "of torch.compile"],
        [[name, ms, ms / took["torch"], ms / took["torch.compile"]] for name, ms in took.items()],
    )


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_of(way: str) -> list[float]:
    """Of a step, in MiB and without parameters, state and batch: the peak that its plan predicts, the most that tensors took,
    what torch's allocator took of the GPU; then in how many segments all lies, and how many came in the last four calls."""
    call = WAYS[way]("medium")
    for _ in range(6):
        call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["segment.all.allocated"]
    for _ in range(4):
        call()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    params, batch = inputs("medium")
    args: Any = params, vfn.optim.adamw(RATE).init(params), batch
    predicted = vfn.jit(update, donate_argnums=(0, 1), static_argnums=3).lower(*args, SIZES["medium"][0]).memory().peak
    given = sum(x.nbytes for x in tree.leaves(args))
    sizes = predicted, after["allocated_bytes.all.peak"], after["reserved_bytes.all.peak"]
    taken = [(size - given) / 2**20 for size in sizes]
    return [*taken, after["segment.all.current"], after["segment.all.allocated"] - before]


def memory() -> None:
    """Each way in a process of its own."""
    ways = "torch", "jit", "jit, arena", "jit, cuda_graph"
    command = [sys.executable, "-m", "benchmarks.gpu_times", "memory_of"]
    running = {way: subprocess.Popen([*command, way], stdout=subprocess.PIPE, text=True) for way in ways}
    rows = []
    for way, process in running.items():
        predicted, tensors, reserved, pieces, anew = json.loads(process.communicate()[0].splitlines()[-1])
        rows.append([way, predicted, tensors, reserved, reserved / predicted, pieces, anew])
    columns = ["step", "predicted peak, MiB", "tensors, MiB", "reserved, MiB", "reserved / predicted"]
    show("gpu_memory", [*columns, "segments", "cudaMalloc in 4 calls"], rows)


# --- simulated ranks --------------------------------------------------------------------------------------------------


def simulated() -> None:
    """A step's loss and gradient on 4 ranks of this GPU, beside the same on plain tensors."""
    config, (params, batch) = SIZES["small"][0], inputs("small")
    made: dict[str, Callable[[], Any]] = {
        "plain tensors": lambda: vfn.value_and_grad(llama.loss)(params, batch, config),
        "plain tensors, jit": lambda run=vfn.jit(vfn.value_and_grad(llama.loss), static_argnums=2): run(
            params, batch, config
        ),
    }
    with vfn.simulate(4):
        for text, sizes in (("dp", {"dp": 4}), ("dp+tp", {"dp": 2, "tp": 2}), ("fsdp", {"dp": 4})):
            mesh = vfn.make_mesh(tuple(sizes.values()), tuple(sizes), device="cuda")
            layout = parallel(text, mesh)
            laid_out = llama.Config(**{**vars(config), "layout": layout})
            there = vfn.shard(params, mesh, layout.specs(params, llama.NAMES, mesh).params)
            parts = vfn.shard(batch, mesh, P("dp"))
            loss = lambda params, batch, config=laid_out: llama.loss(params, batch, config)
            for name, run in ((text, vfn.value_and_grad(loss)), (f"{text}, jit", vfn.jit(vfn.value_and_grad(loss)))):

                def call(run: Any = run, mesh: Any = mesh, there: Any = there, parts: Any = parts) -> Any:
                    with vfn.use_mesh(mesh):
                        return run(there, parts)

                made[name] = call
        took = times(made, rounds=11)
    show(
        "gpu_simulated",
        ["loss and gradient", "ms", "of plain tensors"],
        [[name, ms, ms / took["plain tensors"]] for name, ms in took.items()],
    )


# --- draws ------------------------------------------------------------------------------------------------------------


def draws() -> None:
    """Draws of 2^26 numbers, and of 2^10."""
    rows = []
    with torch.device("cuda"):
        for n in 1 << 26, 1 << 10:
            x = torch.ones(n, dtype=torch.bfloat16, device="cuda")
            pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
                "uniform": (lambda n=n: torch.rand(n), lambda n=n: vfn.random.uniform(KEY, (n,))),
                "normal": (lambda n=n: torch.randn(n), lambda n=n: vfn.random.normal(KEY, (n,))),
                "dropout, bfloat16": (lambda x=x: F.dropout(x, 0.1), lambda x=x: vfn.random.dropout(KEY, x, 0.1)),
            }
            for name, (theirs, ours) in pairs.items():
                took = times({"torch": theirs, "ours": ours}, rounds=11)
                rows.append([name, n, took["torch"] * 1000, took["ours"] * 1000, took["ours"] / took["torch"]])
    show("gpu_draws", ["draw", "numbers", "torch, us", "ours, us", "ratio"], rows)


def show(name: str, columns: list[str], rows: list[list[Any]]) -> None:
    publish(name, columns, rows, machine=torch.cuda.get_device_name().removeprefix("NVIDIA "))


def main() -> None:
    runs = {
        "step": lambda: [step(size) for size in ("small", "large")],
        **{f"step_{size}": lambda size=size: step(size) for size in SIZES},
        "memory": memory,
        "simulated": simulated,
        "draws": draws,
    }
    if sys.argv[1:2] == ["memory_of"]:
        print(json.dumps(memory_of(sys.argv[2])))
        return
    for name in sys.argv[1:] or ("step", "memory", "simulated", "draws"):
        runs[name]()


if __name__ == "__main__":
    main()
