"""The models of the recipes on one device, beside torch's own modules and their papers' formulas in plain loops."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import vescale_fn as vfn
from benchmarks.parity import CONFIGS
from vescale_fn import P
from vescale_fn._core.base import tree
from vescale_fn.recipes import dit, gpt, llama, mixtral, models, resnet
from vescale_fn.recipes.layers import group_norm
from vescale_fn.recipes.parallel import parallel

KEY = vfn.random.key(3)
CLOSE = {"rtol": 1e-10, "atol": 1e-10}  # float64, the same sums in another order
LANGUAGE = ["gpt", "llama", "mixtral"]


def made(name, **changes):
    """A model, its sizes and its parameters, none of which is zero."""
    config = CONFIGS[name].__class__(**{**vars(CONFIGS[name]), **changes})
    params = models.MODELS[name].init(KEY, config, torch.float64)
    leaves, structure = tree.flatten(params)
    keys = vfn.random.split(KEY, len(leaves))
    noisy = [x + vfn.random.normal(key, x.shape, x.dtype) * 0.1 for key, x in zip(keys, leaves)]
    return models.MODELS[name], config, tree.unflatten(structure, noisy)


def tokens_of(config, length=7):
    return models.random_batch(KEY, config, 3, length - 1)


def test_gpt_is_torchs_transformer():
    _, config, params = made("gpt")
    tokens = tokens_of(config)
    x = params["embed"][tokens] + params["places"][:7]
    for p in params["blocks"]:
        layer = torch.nn.TransformerEncoderLayer(
            config.dim, config.heads, config.hidden, 0.0, F.gelu, batch_first=True, norm_first=True, dtype=torch.float64
        )
        ours, mlp = p["attention"], p["mlp"]
        by_part = lambda x: x.unflatten(0, (config.heads, 3, -1)).transpose(0, 1).flatten(0, 2)  # columns are by head
        layer.load_state_dict(
            {
                "self_attn.in_proj_weight": by_part(ours["qkv"]["w"].T),
                "self_attn.in_proj_bias": by_part(ours["qkv"]["b"]),
                "self_attn.out_proj.weight": ours["out"]["w"].T,
                "self_attn.out_proj.bias": ours["out"]["b"],
                "norm1.weight": ours["norm"]["scale"],
                "norm1.bias": ours["norm"]["shift"],
                "linear1.weight": mlp["up"]["w"].T,
                "linear1.bias": mlp["up"]["b"],
                "linear2.weight": mlp["down"]["w"].T,
                "linear2.bias": mlp["down"]["b"],
                "norm2.weight": mlp["norm"]["scale"],
                "norm2.bias": mlp["norm"]["shift"],
            }
        )
        mask = torch.nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
        x = layer(x, src_mask=mask, is_causal=True)
    x = F.layer_norm(x, (config.dim,), params["norm"]["scale"], params["norm"]["shift"])
    torch.testing.assert_close(gpt.logits(params, tokens, config), x @ params["embed"].T, **CLOSE)


def rms(x, scale):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale


def turned(x, base):
    """Positions by complex numbers: dims i and i + d / 2 are a pair, turned by position / base^(2 i / d)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], -1)


def attended(p, x, config):
    """Head by head, position by position."""
    h, size = rms(x, p["norm"]), config.dim // config.heads
    found = torch.zeros(*x.shape[:2], config.dim, dtype=torch.float64)
    for head in range(config.heads):
        group = head * config.groups // config.heads
        q, k, v = (h @ p[name][:, i * size : (i + 1) * size] for name, i in (("q", head), ("k", group), ("v", group)))
        q, k = turned(q, config.base), turned(k, config.base)
        for t in range(x.shape[1]):
            weights = (torch.einsum("bd,bsd->bs", q[:, t], k[:, : t + 1]) / math.sqrt(size)).softmax(-1)
            found[:, t, head * size : (head + 1) * size] = torch.einsum("bs,bsd->bd", weights, v[:, : t + 1])
    return x + found @ p["out"]


def test_llama_is_its_formulas():
    _, config, params = made("llama")
    tokens = tokens_of(config)
    x = params["embed"][tokens]
    for p in params["blocks"]:
        x, mlp = attended(p["attention"], x, config), p["mlp"]
        h = rms(x, mlp["norm"])
        gate = h @ mlp["gate"]
        x = x + (gate * torch.sigmoid(gate) * (h @ mlp["up"])) @ mlp["down"]
    wanted = rms(x, params["norm"]) @ params["head"].T
    torch.testing.assert_close(llama.logits(params, tokens, config), wanted, **CLOSE)


@pytest.mark.parametrize(("capacity", "parts"), [(0.5, 1), (1.0, 2), (None, 1)])
def test_mixtral_is_its_formulas(capacity, parts):
    """Each token for itself, its experts one by one; those that have no place left do nothing."""
    _, config, params = made("mixtral", capacity=capacity, parts=parts)
    tokens, dropped, idle = tokens_of(config, 6), 0, 0
    x = params["embed"][tokens]
    places = math.inf if capacity is None else math.ceil(capacity * config.chosen * 6 / parts / config.experts)
    for p in params["blocks"]:
        x, moe = attended(p["attention"], x, config), p["moe"]
        h, out = rms(x, moe["norm"]), x.clone()
        for b in range(3):
            scores = h[b] @ moe["router"]
            best = scores.argsort(-1, descending=True)[:, : config.chosen]
            for first in range(0, 6, 6 // parts):
                taken = [0] * config.experts
                for choice, t in itertools.product(range(config.chosen), range(first, first + 6 // parts)):
                    expert = int(best[t, choice])
                    taken[expert] += 1
                    if taken[expert] > places:
                        dropped += 1
                        continue
                    w = {name: moe[name][expert] for name in ("gate", "up", "down")}
                    weight = scores[t, best[t]].softmax(-1)[choice]
                    gate = h[b, t] @ w["gate"]
                    out[b, t] += weight * ((gate * torch.sigmoid(gate) * (h[b, t] @ w["up"])) @ w["down"])
                idle += taken.count(0)
        x = out
    assert idle > 0
    assert (dropped > 0) == (capacity is not None)
    wanted = rms(x, params["norm"]) @ params["head"].T
    torch.testing.assert_close(mixtral.logits(params, tokens, config), wanted, **CLOSE)


def test_dit_is_its_formulas():
    _, config, params = made("dit")
    batch = models.random_batch(KEY, config, 3, 0, torch.float64)
    noise, images = torch.tensor([0.1, 0.6, 0.9], dtype=torch.float64), batch["image"]
    dim, patch = config.dim, config.patch
    speeds = 10000.0 ** (-2 * torch.arange(config.frequencies // 2) / config.frequencies).double()
    angles = 1000 * noise[:, None] * speeds
    given = F.silu(torch.cat([angles.cos(), angles.sin()], 1) @ params["time"][0]) @ params["time"][1]
    given = F.silu(given + params["label"][batch["label"]])
    kernel = params["patch"].T.reshape(dim, config.channels, patch, patch)
    x = F.conv2d(images, kernel, stride=patch).flatten(2).transpose(1, 2) + params["places"]
    norm = torch.nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
    for p in params["blocks"]:
        parts = (given @ p["ada"]["w"] + p["ada"]["b"])[:, None].split(dim, -1)
        layer = torch.nn.MultiheadAttention(dim, config.heads, bias=False, batch_first=True, dtype=torch.float64)
        by_part = p["qkv"].T.unflatten(0, (config.heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        layer.load_state_dict({"in_proj_weight": by_part, "out_proj.weight": p["out"].T})
        h = norm(x) * (1 + parts[1]) + parts[0]
        x = x + parts[2] * layer(h, h, h)[0]
        h = norm(x) * (1 + parts[4]) + parts[3]
        x = x + parts[5] * (F.gelu(h @ p["up"], approximate="tanh") @ p["down"])
    shift, scale = (given @ params["final"]["ada"]["w"] + params["final"]["ada"]["b"])[:, None].split(dim, -1)
    x = (norm(x) * (1 + scale) + shift) @ params["final"]["head"]
    wanted = F.fold(x.transpose(1, 2), (config.size, config.size), patch, stride=patch)
    torch.testing.assert_close(dit.apply(params, images, noise, batch["label"], config), wanted, **CLOSE)


def test_dit_begins_with_nothing_from_its_blocks():
    config = CONFIGS["dit"]
    params, batch = dit.init(KEY, config), models.random_batch(KEY, config, 3, 0)
    assert not dit.apply(params, batch["image"], torch.rand(3), batch["label"], config).any()


def test_dit_leaves_labels_out_in_training():
    _, config, params = made("dit", unlabelled=1.0, dropout=0.0)
    batch = models.random_batch(KEY, config, 3, 0, torch.float64)
    other = {**batch, "label": (batch["label"] + 1) % config.classes}
    assert torch.equal(dit.loss(params, batch, config, KEY), dit.loss(params, other, config, KEY))
    assert dit.loss(params, batch, config) != dit.loss(params, other, config)


def test_resnet_is_torchs_ops():
    _, config, params = made("resnet", blocks=2)
    images = models.random_batch(KEY, config, 3, 8, torch.float64)["image"]
    norm = lambda x, p: F.group_norm(x, config.groups, p["scale"], p["shift"])
    x = F.conv2d(images, params["stem"], padding=1)
    for i, p in enumerate(params["blocks"]):
        stride = 2 if i == 2 else 1
        h = norm(x, p["before"]).relu()
        y = norm(F.conv2d(h, p["into"], stride=stride, padding=1), p["inside"]).relu()
        y = F.conv2d(y, p["back"], padding=1)
        x = y + (F.conv2d(h, p["shortcut"], stride=stride) if i == 2 else x)
    wanted = F.adaptive_avg_pool2d(norm(x, params["norm"]).relu(), 1).flatten(1) @ params["head"]
    torch.testing.assert_close(resnet.logits(params, images, config), wanted, **CLOSE)


def test_group_norm_is_torchs_and_stays_where_channels_are():
    x = vfn.random.normal(KEY, (2, 8, 3, 3), torch.float64)
    scale, shift = x[0, :, 0, 0], x[1, :, 0, 0]
    wanted = F.group_norm(x, 4, scale, shift)
    torch.testing.assert_close(group_norm(x, 4, scale, shift), wanted, **CLOSE)
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("tp",))
        laid = vfn.shard((x, scale, shift), mesh, (P(None, "tp"), P("tp"), P("tp")))
        with vfn.strict(), vfn.comm_log() as log:
            found = group_norm(laid[0], 4, *laid[1:])
        assert log.count() == 0
        torch.testing.assert_close(vfn.unshard(found), wanted, **CLOSE)


@pytest.mark.parametrize("name", LANGUAGE)
def test_smoothed_targets_of_which_some_do_not_count(name):
    """On a mesh, too, whose ranks have different shares of them, and each a part of the vocabulary, of 12 or 11 tokens."""
    model, config, params = made(name, vocab=23, smoothing=0.2, ignored=3, dropout=0.0)
    batch = tokens_of(config)
    batch[0, 1:6], batch[1, 4] = 3, 3
    scores, targets, found = model.logits(params, batch[:, :-1], config), batch[:, 1:], []
    for b, t in itertools.product(range(3), range(6)):
        if targets[b, t] != 3:
            each = -scores[b, t].log_softmax(-1)
            found.append(0.8 * each[targets[b, t]] + 0.2 * each.mean())
    balance = config.balance * mixtral.apply(params, batch[:, :-1], config)[1] if name == "mixtral" else 0.0
    torch.testing.assert_close(model.loss(params, batch, config), sum(found) / len(found) + balance, **CLOSE)
    with vfn.simulate(6):
        mesh = vfn.make_mesh((3, 2), ("dp", "tp"))
        layout = parallel("dp+vp", mesh)
        laid = vfn.shard(params, mesh, layout.specs(params, model.NAMES, mesh).params)
        loss = lambda params: model.loss(params, vfn.shard(batch, mesh, P("dp")), models.laid_out(config, layout))
        with vfn.use_mesh(mesh), vfn.comm_log() as log:
            value, grads = vfn.value_and_grad(loss)(laid)
        assert {x.op for x in log} == {"all_reduce"}
        value, grads = vfn.unshard((value, grads))
    one = vfn.value_and_grad(model.loss)(params, batch, config)
    for x, y in zip(tree.leaves((value, grads)), tree.leaves(one), strict=True):
        torch.testing.assert_close(x, y, **CLOSE)


@pytest.mark.parametrize("name", LANGUAGE)
def test_looks_only_back(name):
    """Experts with room for all: where one is full, a later token's first choice goes before an earlier one's second."""
    model, config, params = made(name, **({"capacity": None} if name == "mixtral" else {}))
    tokens = tokens_of(config)
    other = tokens.clone()
    other[:, 5] = (other[:, 5] + 1) % config.vocab
    before, after = (model.logits(params, x, config, KEY) for x in (tokens, other))
    torch.testing.assert_close(before[:, :5], after[:, :5], **CLOSE)
    assert (before != after).any(-1)[:, 5:].all()


@pytest.mark.parametrize("name", models.MODELS)
def test_learns_a_batch_with_dropout_that_a_key_turns_on(name):
    model, config = models.MODELS[name], CONFIGS[name]
    params, batch = model.init(KEY, config), models.random_batch(KEY, config, 4, 8)
    score = lambda key: model.loss(params, batch, config, key).item()
    before, optimizer = score(None), vfn.optim.adamw(1e-2)
    state = optimizer.init(params)
    for i in range(15):
        grads = vfn.grad(model.loss)(params, batch, config, vfn.random.fold_in(KEY, i))
        updates, state = optimizer.update(grads, state, params)
        params = vfn.optim.apply_updates(params, updates)
    assert score(None) < 0.95 * before
    assert score(KEY) == score(KEY) != score(None) == score(None)


def test_models_by_parallelism():
    assert models.suits("mixtral", "fsdp+tp+sp+vp+cp+ep+remat")
    assert not models.suits("llama", "dp+ep")
    assert set(models.DIMS) == set(models.MODELS)
    for name, words in models.DIMS.items():  # a row that a model has no dim for would leave its axis idle
        of_model = {dim for _, names in models.MODELS[name].NAMES for dim in names if dim}
        assert ("tp" in words, "vp" in words, "ep" in words) == (
            "hidden" in of_model,
            "vocab" in of_model,
            "experts" in of_model,
        )
