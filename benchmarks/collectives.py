"""The collectives of a GPT step under the usual layouts, counted, beside the best program written by hand.

No clock is read: counts and bytes are exact, on any machine. `hand` derives what a program written per rank sends, as
Megatron-LM (arXiv 1909.08053, with sequence parallelism arXiv 2205.05198), DDP and FSDP2 do; the vocabulary is whole on
each rank. Bytes are those that a collective holds on one rank, the larger of input and output.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import vescale_fn as vfn
from benchmarks.side_by_side import publish
from vescale_fn import P
from vescale_fn._core.base import tree

Params = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batch."""

    batch: int = 8
    length: int = 16
    dim: int = 32
    heads: int = 4
    layers: int = 3
    vocab: int = 48

    @property
    def activations(self) -> int:
        """Bytes of the values between two layers."""
        return 4 * self.batch * self.length * self.dim


def init(s: Sizes) -> Params:
    draw = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=draw) * 0.2
    norm = lambda: {"scale": torch.ones(s.dim), "shift": new(s.dim)}
    block = lambda: {
        "norm1": norm(),
        "q": new(s.dim, s.dim),
        "k": new(s.dim, s.dim),
        "v": new(s.dim, s.dim),
        "qb": new(s.dim),
        "kb": new(s.dim),
        "vb": new(s.dim),
        "out": new(s.dim, s.dim),
        "outb": new(s.dim),
        "norm2": norm(),
        "up": new(s.dim, 4 * s.dim),
        "upb": new(4 * s.dim),
        "down": new(4 * s.dim, s.dim),
        "downb": new(s.dim),
    }
    return {
        "embed": new(s.vocab, s.dim),
        "places": new(s.length, s.dim),
        "blocks": [block() for _ in range(s.layers)],
        "norm": norm(),
        "head": new(s.dim, s.vocab),
    }


@dataclass(frozen=True)
class Regime:
    """A way to lay the step out: what a user writes, and what a program written by hand would send."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    rules: list[tuple[str, P]]  # of the parameters
    batch: P  # of tokens and targets
    hand: Callable[[Sizes, Regime], Counter[tuple[str, str, int]]]  # (op, axis, bytes of one): how many
    between: P | None = None  # with_sharding of what a layer gives
    inside: P | None = None  # with_sharding of what a layer works on
    gathered: list[tuple[str, P]] | None = None  # with_sharding of a block's parameters, where it uses them
    remat: bool = False


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spelling: str) -> torch.Tensor:
    """Causal attention of [B, H, T, d], spelled as people do."""
    if spelling == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    if spelling == "einsum":
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("bhqk,bhkd->bhqd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v


def stated(x: Any, spec: Any) -> Any:
    return x if spec is None else vfn.with_sharding(x, spec)


def layer_norm(x: torch.Tensor, p: Params) -> torch.Tensor:
    return F.layer_norm(x, p["scale"].shape, p["scale"], p["shift"])


def loss(
    params: Params, tokens: torch.Tensor, targets: torch.Tensor, s: Sizes, r: Regime, spelling: str
) -> torch.Tensor:
    """Mean cross entropy, the sum over all tokens by their number."""

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (s.heads, -1)).transpose(1, 2)

    def block(p: Params, x: torch.Tensor) -> torch.Tensor:
        if r.gathered is not None:
            p = vfn.with_sharding(p, vfn.spec_from_rules(p, r.gathered))
        h = stated(layer_norm(x, p["norm1"]), r.inside)
        q, k, v = (heads(h @ p[name] + p[name + "b"]) for name in "qkv")
        y = attention(q, k, v, spelling).transpose(1, 2).flatten(2)
        x = x + stated(y @ p["out"] + p["outb"], r.between)
        h = stated(layer_norm(x, p["norm2"]), r.inside)
        return x + stated(F.gelu(h @ p["up"] + p["upb"]) @ p["down"] + p["downb"], r.between)

    top = {name: p for name, p in params.items() if name != "blocks"}
    if r.gathered is not None:
        top = vfn.with_sharding(top, P())
    x = F.embedding(tokens, top["embed"]) + top["places"]
    for p in params["blocks"]:
        x = (vfn.remat(block) if r.remat else block)(p, x)
    scores = layer_norm(x, top["norm"]) @ top["head"]
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum") / targets.numel()


# --- by hand ----------------------------------------------------------------------------------------------------------


def _bytes(s: Sizes, which: Callable[[str], bool]) -> int:
    """Of the parameters whose paths are chosen."""
    params = init(s)
    leaves, _ = tree.flatten(params)
    return sum(4 * x.numel() for path, x in zip(tree.paths(params), leaves, strict=True) if which(path))


def _is_split(path: str) -> bool:
    return any(path.endswith(f"['{name}']") for name in ("q", "k", "v", "qb", "kb", "vb", "up", "upb", "out", "down"))


def _block(s: Sizes, ways: int = 1) -> int:
    """Bytes of a block's parameters on one rank, those that are split `ways` ways."""
    in_block = lambda path: path.startswith("['blocks'][0]")
    split = _bytes(s, lambda path: in_block(path) and _is_split(path))
    return split // ways + _bytes(s, lambda path: in_block(path) and not _is_split(path))


def data_parallel(s: Sizes, r: Regime) -> Counter[tuple[str, str, int]]:
    """One bucket: all gradients, and the loss with them."""
    return Counter({("all_reduce", "dp", _bytes(s, lambda path: True) + 4): 1})


def tensor_parallel(s: Sizes, r: Regime) -> Counter[tuple[str, str, int]]:
    """In each layer the partial sums behind `out` and behind `down`, and, backward, those of the gradients of what goes into
    `q, k, v` and into `up`."""
    return Counter({("all_reduce", "tp", s.activations): 4 * s.layers})


def sequence_parallel(s: Sizes, r: Regime) -> Counter[tuple[str, str, int]]:
    """Each all-reduce becomes a reduce-scatter and an all-gather. Of the whole parameters, those that work between the two
    saw a part of the tokens each: one bucket of their gradients, and the loss. The gradients of `outb` and `downb` come
    from what was gathered."""
    outside = lambda path: not path.endswith(("['outb']", "['downb']", "['places']"))
    whole = _bytes(s, lambda path: not _is_split(path) and outside(path))
    return Counter(
        {
            ("all_gather", "tp", s.activations): 4 * s.layers,
            ("reduce_scatter", "tp", s.activations): 4 * s.layers,
            ("all_reduce", "tp", whole + 4): 1,
        }
    )


def fully_sharded(s: Sizes, r: Regime) -> Counter[tuple[str, str, int]]:
    """Each block is gathered forward and again backward, and its gradients are scattered; so is what is in no block, once
    each way (FSDP2 keeps its root group). The loss is a number to be added."""
    top = _bytes(s, lambda path: "blocks" not in path)
    found = Counter(
        {
            ("all_gather", "dp", _block(s)): (1 + r.remat) * s.layers,
            ("reduce_scatter", "dp", _block(s)): s.layers,
            ("all_reduce", "dp", 4): 1,
        }
    )
    return found + Counter([("all_gather", "dp", top), ("reduce_scatter", "dp", top)])


def fully_sharded_tensor_parallel(s: Sizes, r: Regime) -> Counter[tuple[str, str, int]]:
    """The blocks of tensor parallelism, each gathered and scattered over dp; its sums are of a part of the batch."""
    dp, tp = r.shape
    top = _bytes(s, lambda path: "blocks" not in path)
    found = Counter(
        {
            ("all_gather", "dp", _block(s, tp)): s.layers,
            ("reduce_scatter", "dp", _block(s, tp)): s.layers,
            ("all_reduce", "tp", s.activations // dp): 4 * s.layers,
            ("all_reduce", "dp", 4): 1,
        }
    )
    return found + Counter([("all_gather", "dp", top), ("reduce_scatter", "dp", top)])


# --- by specs ---------------------------------------------------------------------------------------------------------

_COLUMNS, _VECTORS, _ROWS = r"\.(q|k|v|up)$", r"\.(qb|kb|vb|upb)$", r"\.(out|down)$"
TP = [(_COLUMNS, P(None, "tp")), (_VECTORS, P("tp")), (_ROWS, P("tp"))]
IN_BLOCK = [(r"^(q|k|v|up)$", P(None, "tp")), (r"^(qb|kb|vb|upb)$", P("tp")), (r"^(out|down)$", P("tp")), (".*", P())]
REGIMES = {
    "DP": Regime((4,), ("dp",), [(".*", P())], P("dp"), data_parallel),
    "TP": Regime((4,), ("tp",), [*TP, (".*", P())], P(), tensor_parallel, between=P()),
    "TP + SP": Regime(
        (4,),
        ("tp",),
        [*TP, ("^places$", P("tp")), (".*", P())],
        P(None, "tp"),
        sequence_parallel,
        between=P(None, "tp"),
        inside=P(),
    ),
    "FSDP": Regime((4,), ("dp",), [(".*", P("dp"))], P("dp"), fully_sharded, gathered=[(".*", P())], remat=True),
    "FSDP x TP": Regime(
        (2, 2),
        ("dp", "tp"),
        [(_COLUMNS, P("dp", "tp")), (_VECTORS, P(("tp", "dp"))), (_ROWS, P(("tp", "dp"))), (".*", P("dp"))],
        P("dp"),
        fully_sharded_tensor_parallel,
        between=P("dp"),
        gathered=IN_BLOCK,
    ),
}


def step(name: str, s: Sizes, spelling: str = "sdpa", replayed: bool = False) -> tuple[Any, Any, Any]:
    """The loss, its gradients and the log of collectives of one step, or of its replay, on simulated ranks."""
    r, params = REGIMES[name], init(s)
    draw = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(s.vocab, (s.batch, s.length), generator=draw) for _ in range(2))
    with vfn.simulate(math.prod(r.shape)):
        mesh = vfn.make_mesh(r.shape, r.axes)
        params = vfn.shard(params, mesh, vfn.spec_from_rules(params, r.rules))
        data = vfn.shard((tokens, targets), mesh, r.batch)

        def gradients(p: Params, x: Any, y: Any) -> Any:
            return vfn.value_and_grad(loss)(p, x, y, s, r, spelling)

        run = vfn.jit(gradients) if replayed else gradients
        with vfn.use_mesh(mesh):
            if replayed:
                run(params, *data)
            with vfn.comm_log() as log:
                value, grads = run(params, *data)
        return vfn.unshard(value), vfn.unshard(grads), log


def on_one_device(s: Sizes) -> tuple[Any, Any]:
    """The loss and its gradients, without any mesh."""
    draw = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(s.vocab, (s.batch, s.length), generator=draw) for _ in range(2))
    return vfn.value_and_grad(loss)(init(s), tokens, targets, s, Regime((), (), [], P(), data_parallel), "sdpa")


def main() -> None:
    s, rows = Sizes(), []
    for name, regime in REGIMES.items():
        ours, plan = (Counter((x.op, x.axis, x.bytes) for x in step(name, s, replayed=how)[2]) for how in (False, True))
        hand = regime.hand(s, regime)
        for op, axis in sorted({key[:2] for key in ours | hand | plan}):
            count, size = [], []
            for found in (hand, ours, plan):
                mine = {n: times for (o, a, n), times in found.items() if (o, a) == (op, axis)}
                count.append(sum(mine.values()))
                size.append(sum(n * times for n, times in mine.items()))
            rows.append([name, op, axis, *count, *size])
    columns = [
        "layout",
        "collective",
        "axis",
        "by hand",
        "vescale_fn",
        "replayed",
        "bytes by hand",
        "bytes, vescale_fn",
        "bytes, replayed",
    ]
    publish("collectives", columns, rows)


if __name__ == "__main__":
    main()
