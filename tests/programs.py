"""Programs: pure functions over trees, each written once, as for one device. A new program is one more function here.

``@program(params, data, specs)`` takes what makes the inputs and how they lie. A spec is written with two roles, ``d``
(data) and ``t`` (tensor): a mesh gives each an axis, several axes, or None. A program is called as ``f(params, data, d, t)``
and returns any tree; it is differentiated by `params`. Sizes are such that few dims divide.
"""

import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import vescale_fn as vfn
from vescale_fn import P, random


@dataclass(frozen=True)
class Program:
    """A program, its inputs and how they lie."""

    name: str
    f: Callable[..., Any]
    inputs: Callable[[], tuple[Any, Any]]
    specs: Callable[[Any, Any], tuple[Any, Any]]
    exact: bool  # nothing is summed across ranks: outputs are equal bit for bit


PROGRAMS: dict[str, Program] = {}


def program(params: Callable[[], Any], data: Callable[[], Any], specs: Callable[[Any, Any], Any], exact: bool = False):
    """Make a program of a function."""

    def register(f: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[f.__name__] = Program(f.__name__, f, lambda: (params(), data()), specs, exact)
        return f

    return register


def randn(*shape: int) -> torch.Tensor:
    """Distinct fp64 values that depend on the shape alone."""
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(math.prod(shape) + len(shape))
    )


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def linear(n: int, m: int) -> dict[str, torch.Tensor]:
    return {"w": randn(n, m) / n**0.5, "b": randn(m)}


def two_layers() -> dict[str, torch.Tensor]:
    return {"w1": randn(5, 14) / 3, "b1": randn(14), "w2": randn(14, 5) / 4, "b2": randn(5)}


# --- layers and how they are parallelised -----------------------------------------------------------------------------


def mlp(p: Any, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def mean_square(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((y - target) ** 2).mean()


TENSOR_PARALLEL = {"w1": (None, "t"), "b1": ("t",), "w2": ("t",), "b2": ()}


def tensor_parallel(t: Any) -> dict[str, P]:
    return {name: P(*(t if entry == "t" else None for entry in row)) for name, row in TENSOR_PARALLEL.items()}


def regression() -> dict[str, torch.Tensor]:
    return {"x": randn(7, 5), "y": randn(7, 5) + 1}


@program(two_layers, regression, lambda d, t: (tensor_parallel(t), P(d)))
def tensor_parallel_mlp(p, data, d, t):
    return mlp(p, vfn.with_sharding(data["x"], P(d)))


@program(two_layers, regression, lambda d, t: (P(), P(d)))
def data_parallel(p, data, d, t):
    return mean_square(mlp(p, data["x"]), data["y"])


@program(two_layers, regression, lambda d, t: (P(d), P(d)))
def fully_sharded(p, data, d, t):
    return mean_square(mlp(vfn.with_sharding(p, P()), data["x"]), data["y"])


@program(two_layers, regression, lambda d, t: (P(d), P(d)))
def fully_sharded_remat(p, data, d, t):
    block = vfn.remat(lambda p, x: mlp(vfn.with_sharding(p, P()), x))
    return mean_square(block(p, block(p, data["x"])), data["y"])


@program(two_layers, regression, lambda d, t: (tensor_parallel(t), P(d)))
def sequence_parallel(p, data, d, t):
    """Between the layers the activations are split over both axes."""
    x = vfn.with_sharding(data["x"], P(d, t))
    for _ in range(2):
        h = F.layer_norm(x, (5,))
        h = vfn.with_sharding(h, P(d))
        x = x + vfn.with_sharding(mlp(p, h), P(d, t))
    return x.sum(0)


def attention_params() -> dict[str, torch.Tensor]:
    return {"qkv": randn(3, 10, 6, 4) / 3, "out": randn(6, 4, 10) / 4}


@program(attention_params, lambda: randn(5, 7, 10), lambda d, t: ({"qkv": P(None, None, t), "out": P(t)}, P(d)))
def attention(p, x, d, t):
    q, k, v = torch.einsum("btc,sche->sbhte", x, p["qkv"]).unbind(0)
    scores = (q @ k.mT) / 2.0
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("bhte,hec->btc", weights @ v, p["out"])


@program(attention_params, lambda: randn(5, 7, 10), lambda d, t: ({"qkv": P(None, None, t), "out": P(t)}, P(d)))
def fused_attention(p, x, d, t):
    q, k, v = torch.einsum("btc,sche->sbhte", x, p["qkv"]).unbind(0)
    return torch.einsum("bhte,hec->btc", F.scaled_dot_product_attention(q, k, v, is_causal=True), p["out"])


@program(lambda: {"w": randn(10), "b": randn(10)}, lambda: randn(7, 3, 10), lambda d, t: (P(t), P(d, None, t)))
def norms(p, x, d, t):
    return {
        "layer": F.layer_norm(x, (10,), p["w"], p["b"]),
        "layer2": F.layer_norm(x, (3, 10)),
        "rms": F.rms_norm(x, (10,), p["w"]),
        "rms by hand": x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * p["w"],
        "group": F.group_norm(x.mT, 5, p["w"], p["b"]),
        "batch": F.batch_norm(x.mT, None, None, p["w"], p["b"], training=True),
    }


@program(
    lambda: {"table": randn(13, 10), "head": linear(10, 13)},
    lambda: {"tokens": ints(13, 6, 7), "targets": ints(13, 6, 7)},
    lambda d, t: ({"table": P(t), "head": {"w": P(None, t), "b": P(t)}}, P(d)),
)
def language_model(p, data, d, t):
    x = F.embedding(data["tokens"], p["table"])
    logits = x @ p["head"]["w"] + p["head"]["b"]
    targets = torch.where(data["targets"] == 3, -100, data["targets"])
    return {
        "mean": F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        "each": F.cross_entropy(logits.mT, targets, reduction="none"),
        "sum": F.nll_loss(logits.log_softmax(-1).flatten(0, 1), data["targets"].flatten(), reduction="sum"),
        "accuracy": (logits.argmax(-1) == data["targets"]).sum(),
    }


@program(
    lambda: {"c1": randn(4, 3, 3, 3) / 5, "c2": randn(6, 4, 3, 3) / 6, "head": linear(6, 5)},
    lambda: randn(7, 3, 8, 8),
    lambda d, t: ({"c1": P(), "c2": P(t), "head": P()}, P(d)),
)
def convnet(p, x, d, t):
    x = F.relu(F.conv2d(x, p["c1"], padding=1))
    x = F.max_pool2d(x, 2)
    x = F.relu(F.conv2d(x, p["c2"], stride=2))
    return F.avg_pool2d(x, 1).mean((2, 3)) @ p["head"]["w"] + p["head"]["b"]


@program(lambda: {"w": randn(6, 6) / 3, "u": randn(5, 6) / 3}, lambda: randn(7, 4, 5), lambda d, t: (P(None, t), P(d)))
def recurrent(p, x, d, t):
    h, states = torch.zeros(7, 6, dtype=torch.float64), []
    for i in range(x.shape[1]):
        h = torch.tanh(h @ p["w"] + x[:, i] @ p["u"])
        states.append(h)
    return torch.stack(states, 1), h


@program(
    lambda: {"router": randn(10, 6), "w": randn(6, 10, 10) / 3},
    lambda: randn(14, 10),
    lambda d, t: ({"router": P(), "w": P(t)}, P(d)),
)
def mixture_of_experts(p, x, d, t):
    gates, chosen = (x @ p["router"]).softmax(-1).topk(2)
    dispatch = (F.one_hot(chosen, 6) * gates[..., None]).sum(1)
    y = torch.einsum("ne,nd,edf->nf", dispatch, x, p["w"])
    return y, F.one_hot(chosen, 6).sum((0, 1))


# --- kinds of ops -----------------------------------------------------------------------------------------------------


@program(lambda: {"x": randn(7, 10), "y": randn(10)}, lambda: 0.5, lambda d, t: ({"x": P(d, t), "y": P(t)}, P()))
def elementwise(p, c, d, t):
    x, y = p["x"], p["y"]
    return [
        x + y,
        c * x.sin(),
        (x * y).exp().clamp(max=3),
        x / (1 + y**2),
        torch.where(x > y, x, -y),
        F.silu(x),
        x.pow(3),
        -x.abs().sqrt(),
        torch.maximum(x, y),
        torch.lerp(x, y.expand(7, 10), 0.3),
        x.add(y, alpha=2),
        2 - x,
        x.detach() // 0.5,
        x.sign(),
        torch.addcmul(x, x, y),
        x.float().double(),
        x.isnan(),
        (x > 0) & (y > 0),
        F.leaky_relu(x),
        x % 2,
        F.softplus(x),
        x.nan_to_num(),
        x.round(),
        torch.atan2(x, y),
    ]


@program(lambda: randn(7, 10, 3), lambda: None, lambda d, t: (P(t, d), P()))
def reductions(x, _, d, t):
    return {
        "sum": [x.sum(), x.sum(0), x.sum((0, 1)), x.sum(1, keepdim=True), x.sum((), keepdim=True), x.sum(-1)],
        "mean": [x.mean(), x.mean(0), x.mean((0, 1), keepdim=True)],
        "spread": [x.var(0), x.std(), x.var((1, 2), correction=0), *torch.var_mean(x, 1)],
        "norms": [x.norm(), x.norm(dim=1), torch.linalg.vector_norm(x, ord=3, dim=(0, 1)), x.abs().norm(1)],
        "extremes": [
            x.amax(0),
            x.amin((0, 1)),
            x.max(),
            x.min(1).values,
            x.max(0).indices,
            x.argmin(),
            x.argmax(1),
            x.aminmax(dim=0),
        ],
        "other": [
            x.logsumexp(0),
            x.logsumexp((0, 1)),
            x.prod(1),
            (x > 0).any(0),
            (x > -9).all(),
            x.median(),
            x.count_nonzero(),
            x.nansum(0),
            x.softmax(0),
            x.log_softmax(1),
            x.trace() if x.ndim == 2 else x.select(2, 0).mT.matmul(x.select(2, 1)).trace(),
        ],
    }


@program(lambda: randn(7, 10), lambda: None, lambda d, t: (P(d, t), P()), exact=True)
def along_a_dim(x, _, d, t):
    return [
        x.cumsum(0),
        x.cumsum(1),
        x.cumprod(1),
        x.flip(0),
        x.flip(0, 1),
        x.roll(2, 0),
        x.roll((1, 3), (0, 1)),
        x.sort(0).values,
        x.sort(1, descending=True).indices,
        x.topk(3, 0).values,
        x.argsort(1),
        x.diff(dim=0),
        x.logcumsumexp(0),
        x.cummax(0).values,
        x.kthvalue(2, 0).values,
        x.unfold(0, 3, 2),
        x.tril(),
        x.triu(1),
        x.diagonal(),
        x.rot90(),
    ]


@program(lambda: randn(6, 10, 4), lambda: None, lambda d, t: (P(d, t), P()), exact=True)
def shapes(x, _, d, t):
    return [
        x.reshape(60, 4),
        x.reshape(6, 40),
        x.reshape(-1),
        x.view(2, 3, 10, 4),
        x.view(6, 5, 2, 4),
        x.flatten(1),
        x.unflatten(1, (2, 5)),
        x.transpose(0, 1),
        x.permute(2, 0, 1),
        x.movedim(0, -1),
        x.mT,
        x[:, None],
        x.unsqueeze(-1).squeeze(-1),
        x.expand(2, 6, 10, 4),
        x.repeat(2, 1, 3),
        x.repeat_interleave(2, 1),
        torch.cat([x, x * 2], 0),
        torch.cat([x, x[:1]], 0),
        torch.stack([x, -x], 1),
        *x.split(4, 1),
        *x.chunk(3, 0),
        *x.unbind(2),
        F.pad(x, (1, 2)),
        F.pad(x, (0, 0, 3, 1)),
        x.tile(2),
        torch.hstack([x, x]),
        x.narrow(0, 1, 3),
        x.swapaxes(0, 2).contiguous(),
        x.ravel(),
        x.reshape(3, 2, 10, 2, 2),
        *torch.tensor_split(x, 4),
        torch.block_diag(x[0], x[1]),
        x.view_as(x),
        torch.broadcast_to(x[:1], x.shape),
        x.reshape(10, 6, 4),
    ]


@program(lambda: randn(7, 10), lambda: ints(7, 4), lambda d, t: (P(d, t), P()), exact=True)
def indexing(x, index, d, t):
    y = x.clone()
    y[y > 1] = 0.5
    return [
        x[1:4],
        x[:, ::2],
        x[2],
        x[-1, 3],
        x[..., None],
        x[index],
        x[:, index],
        x[index, index],
        x[index][:, index],
        x[x[:, 0] > 0],
        x[[0, 5]],
        x[2:3, -4:],
        y,
        x.index_select(1, index),
        x.gather(0, index.expand(2, 4)),
        x.take(index),
        x.masked_select(x > 0),
        torch.take_along_dim(x, index[None], 1),
        x.index_fill(0, index, 3.0),
        x.index_copy(1, torch.tensor([8, 2]), x[:, :2]),
        x[None, :, 1],
        x[:, [True, False] * 5],
    ]


@program(
    lambda: {"x": randn(7, 5), "u": randn(4, 5)}, lambda: ints(7, 4), lambda d, t: ({"x": P(d, t), "u": P(t)}, P())
)
def scattering(p, index, d, t):
    x, u = p["x"], p["u"]
    where = index[:, None].expand(4, 5)
    return [
        x.scatter_add(0, where, u),
        x.index_add(0, index, u),
        x.scatter(1, ints(5, 7, 2), 3.0),
        x.index_put((index,), u, accumulate=True),
        torch.zeros(7, 5, dtype=x.dtype).scatter_add(0, where, u),
        x.scatter_reduce(0, where, u, "amax"),
        torch.bincount(index, minlength=7),
        x.gather(1, ints(5, 7, 3)),
        F.embedding(index, x),
        F.embedding_bag(index[None], x),
    ]


@program(
    lambda: {"a": randn(7, 10), "b": randn(10, 5), "c": randn(3, 7, 10), "v": randn(10)},
    lambda: None,
    lambda d, t: ({"a": P(d, t), "b": P(t), "c": P(None, d, t), "v": P(t)}, P()),
)
def contractions(p, _, d, t):
    a, b, c, v = p["a"], p["b"], p["c"], p["v"]
    return [
        a @ b,
        a @ v,
        v @ b,
        v @ v,
        c @ b,
        a @ c.mT,
        torch.einsum("ik,kj->ji", a, b),
        torch.einsum("bik,ik->b", c, a),
        torch.einsum("bik,kj,ik->bj", c, b, a),
        torch.addmm(b[:, :1].mT.expand(7, 10) @ b, a, b, beta=0.5, alpha=2),
        torch.outer(v, v),
        torch.bmm(c, c.mT),
        F.linear(c, b.mT, b[0]),
        torch.tensordot(c, a, 2),
        F.bilinear(a, a, c.new_ones(2, 10, 10)),
        torch.kron(v, v),
        torch.linalg.multi_dot([a, b, b.mT]),
        F.cosine_similarity(a, a + v),
        torch.cdist(a, a + 1),
        torch.inner(a, a),
    ]


@program(
    lambda: randn(7, 10), lambda: {"y": randn(7, 10), "k": ints(2, 7, 10).double()}, lambda d, t: (P(d, t), P(d, t))
)
def losses(x, data, d, t):
    y, k = data["y"], data["k"]
    out = []
    for reduction in ("mean", "sum", "none"):
        r, batch = {"reduction": reduction}, reduction.replace("mean", "batchmean")
        out += [
            F.mse_loss(x, y, **r),
            F.l1_loss(x, y, **r),
            F.smooth_l1_loss(x, y, **r),
            F.huber_loss(x, y, **r),
            F.soft_margin_loss(x, 2 * k - 1, **r),
            F.binary_cross_entropy(x.sigmoid(), k, **r),
            F.binary_cross_entropy_with_logits(x, k, **r),
            F.kl_div(x, y.softmax(-1), reduction=batch),
            F.cross_entropy(x, y.softmax(-1), **r),
            F.cross_entropy(x, y.argmax(1), label_smoothing=0.1, **r),
            F.poisson_nll_loss(x, k, **r),
            F.gaussian_nll_loss(x, y, k + 1, **r),
        ]
    return out


@program(lambda: randn(7, 10), lambda: None, lambda d, t: (P(d, t), P()))
def in_place(x, _, d, t):
    y = x * 1
    y += 1
    y.mul_(x.detach()).clamp_(min=-2)
    z = torch.zeros_like(y)
    z.add_(y).sub_(0.5)
    z.masked_fill_(z > 3, 0.0)
    n = torch.zeros(7, 10, dtype=x.dtype)
    n = n.add_(z)
    w = y.t()
    y.relu_()
    return y, z, n, w * 1


@program(lambda: randn(6, 6), lambda: None, lambda d, t: (P(d, t), P()))
def linear_algebra(x, _, d, t):
    a = x @ x.mT + 6 * torch.eye(6, dtype=x.dtype)
    return [
        torch.linalg.cholesky(a),
        torch.linalg.solve(a, x),
        torch.linalg.inv(a),
        torch.logdet(a),
        torch.linalg.eigvalsh(a),
        torch.matrix_exp(x / 9),
        torch.linalg.det(x),
        torch.linalg.matrix_norm(x),
        torch.trapezoid(x, dim=0),
        torch.fft.rfft(x, dim=0).abs(),
    ]


# --- what belongs to the programming model ----------------------------------------------------------------------------

Point = namedtuple("Point", ["x", "y"])


@program(
    lambda: Point({"w": randn(7), "none": None, "n": 3, "name": "adam"}, (randn(7, 2), [torch.tensor([1, 2]), True])),
    lambda: {"key": random.key(5), "scale": 2, "mask": ints(2, 7).bool(), "none": None},
    lambda d, t: (P(d), {"key": P(), "scale": P(), "mask": P(t), "none": P()}),
)
def containers(p, data, d, t):
    y = torch.where(data["mask"], p.x["w"], 0.0) * data["scale"] ** p.x["n"]
    noise = random.uniform(data["key"], (7,), torch.float64)
    return {"out": Point((y + noise) @ p.y[0], None), "count": p.y[1][0].sum(), "static": (p.x["name"], 4, None)}


@program(two_layers, lambda: {**regression(), "key": random.key(7)}, lambda d, t: (tensor_parallel(t), P()))
def dropout(p, data, d, t):
    k1, k2 = random.split(data["key"])
    x = random.dropout(k1, vfn.with_sharding(data["x"], P(d)), 0.3)
    h = random.dropout(k2, F.relu(x @ p["w1"] + p["b1"]), 0.5)
    return h @ p["w2"]


@program(lambda: randn(7), lambda: random.key(11), lambda d, t: (P(d), P()), exact=True)
def draws(x, key, d, t):
    keys = random.split(key, 5)
    spec = P(d, t)
    return [
        x * random.normal(keys[0], (7,), torch.float64, spec=P(d)),
        random.uniform(keys[1], (7, 10), spec=spec),
        random.bernoulli(keys[2], 0.3, (7, 10), spec=spec),
        random.randint(keys[3], (7, 10), 0, 1000, spec=spec),
        random.bits(keys[4], (13,)).to(torch.int64),
    ]


@program(two_layers, regression, lambda d, t: (tensor_parallel(t), P(d)))
def a_training_step(p, data, d, t):
    """Differentiated itself: a gradient inside a gradient."""
    loss, grads = vfn.value_and_grad(lambda p: mean_square(mlp(p, data["x"]), data["y"]))(p)
    return loss, {name: p[name] - 0.1 * grads[name] for name in p}


@program(two_layers, regression, lambda d, t: (P(), P(d)))
def gradients_of_examples(p, data, d, t):
    each = vfn.vmap(vfn.grad(lambda p, x, y: mean_square(mlp(p, x), y)), in_axes=(None, 0, 0))
    grads = each(p, data["x"], data["y"])
    return grads, sum((g**2).sum() for g in grads.values())


@program(two_layers, regression, lambda d, t: (tensor_parallel(t), P(d)))
def directional_derivatives(p, data, d, t):
    f = lambda p: mean_square(mlp(p, data["x"]), data["y"])
    out, slope = vfn.jvp(f, (p,), ({name: torch.cos(x) for name, x in p.items()},))
    _, pullback = vfn.vjp(lambda p: mlp(p, data["x"]), p)
    return out, slope, pullback(data["y"])


@program(lambda: randn(7, 10), lambda: None, lambda d, t: (P(d, t), P()))
def partial_values(x, _, d, t):
    """Values left unreduced, used linearly, and used as a whole."""
    s = vfn.with_sharding(x.sum(0), P(t))
    y = x.sum(0) + x.mean(0)
    z = (y * 2 - x[0]).relu()
    return s, y, z, y.sum() * z, (x.sum(), x.sum().exp(), x.sum() + 1, 1 / x.sum())


@program(lambda: randn(7, 10), lambda: None, lambda d, t: (P(d, t), P()))
def moving_about(x, _, d, t):
    y = vfn.with_sharding(x, P(t, d)).sin()
    z = vfn.with_sharding(y, P()) * x
    return vfn.with_sharding({"a": z, "b": (y, 3, None)}, {"a": P(None, d), "b": P(t)}), vfn.with_sharding(
        z.sum(0), P(d)
    )


@program(lambda: randn(7, 3), lambda: {"flag": True, "n": 2}, lambda d, t: (P(d), P()))
def control_flow(x, data, d, t):
    for _ in range(data["n"]):
        if (x.sum() > 0).item() == data["flag"]:
            x = x * 1.5
        else:
            x = x - x.mean()
    while x.abs().max() > 1:
        x = x / 2
    return x, float(x.detach().sum()) > 0, len(x), x.tolist()[0][0] > 5


@program(lambda: randn(7, 10), lambda: None, lambda d, t: (P(d, t), P()), exact=True)
def mixed_dtypes(x, _, d, t):
    n = (x * 4).to(torch.int32)
    return [
        n,
        n.sum(),
        n.sum(0),
        (n > 0).sum(1),
        n // 3,
        n.float() / 3,
        x.to(torch.bfloat16) + 1,
        x * n,
        (x > 0) * x,
        n.to(torch.uint8).max(0).values,
        torch.complex(x, -x).real * 2,
        (x > 0).to(torch.int8).sum(0),
        n & 3,
        ~(x > 0),
        n.bool().any(1),
        x.half().amax(1),
        n << 2,
        torch.arange(10) + n,
        torch.complex(x, x).abs(),
        n.float().cumsum(0),
    ]


@program(lambda: {"w": randn(10, 10) / 3}, lambda: randn(7, 10), lambda d, t: (P(t), P(d)))
def closed_over_values(p, x, d, t):
    """Constants that a function closes over: plain, and arrays."""
    scale, y = torch.arange(10, dtype=torch.float64), x.tanh()
    inner = lambda w: ((y @ w) * scale).sum()
    return vfn.grad(inner)(p["w"]), inner(p["w"])
