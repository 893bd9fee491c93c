"""Hugging Face's models, unchanged, on a mesh: forward, gradients and some steps are those of the module on one device."""

import functools
from typing import NamedTuple

import optree
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
import whole

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.recipes import hugging_face

KEY = vfn.random.key(5)
STEPS, VOCAB = whole.some(5, 10), 40
OPTIONS = {"lr": 0.01, "eps": 1e-6, "weight_decay": 0.1}
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 32}
TEXT = SIZES | {"vocab_size": VOCAB, "max_position_embeddings": 16}
GROUPED = TEXT | {"num_key_value_heads": 2}
IDS = (torch.arange(32).reshape(4, 8) * 7 + torch.arange(4)[:, None] * 3) % VOCAB
IMAGES = torch.sin(torch.arange(4 * 3 * 64, dtype=torch.float64) * 0.7).reshape(4, 3, 8, 8)


class Model(NamedTuple):
    make: type
    config: hf.PretrainedConfig
    inputs: dict
    labels: torch.Tensor
    options: dict = {}  # noqa: RUF012

    @property
    def name(self):
        return self.config.model_type


CAUSAL = {"inputs": {"input_ids": IDS}, "labels": IDS.roll(-1, 1), "options": {"use_cache": False}}
MODELS = [
    Model(
        hf.GPT2LMHeadModel,
        hf.GPT2Config(n_layer=1, n_head=4, n_embd=16, vocab_size=VOCAB, n_positions=16, bos_token_id=0, eos_token_id=1),
        **CAUSAL,
    ),
    Model(hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED), **CAUSAL),
    Model(
        hf.MixtralForCausalLM,
        hf.MixtralConfig(**GROUPED, num_local_experts=4, experts_implementation="eager"),
        **CAUSAL,
    ),
    Model(hf.BertForMaskedLM, hf.BertConfig(**TEXT), {"input_ids": IDS, "attention_mask": (IDS > 3).long()}, IDS),
    Model(
        hf.ViTForImageClassification,
        hf.ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=6),
        {"pixel_values": IMAGES},
        torch.arange(4),
    ),
    Model(
        hf.T5ForConditionalGeneration,
        hf.T5Config(num_layers=1, num_heads=4, d_model=16, d_ff=32, d_kv=4, vocab_size=VOCAB),
        {"input_ids": IDS, "decoder_input_ids": IDS.flip(1)},
        IDS,
        {"use_cache": False},
    ),
]
BY_NAME = {model.name: model for model in MODELS}
# Of Mixtral tokens and masks, as its code goes from expert to expert; of BERT a mask, which it reads by an index.
WITH_GATHERS = {"mixtral", "bert"}
each_model = pytest.mark.parametrize("name", BY_NAME)


def made(name):
    """The module in fp64, the same each time; and its inputs."""
    model = BY_NAME[name]
    torch.manual_seed(0)
    return model.make(model.config).double(), model.inputs, model.labels, model.options


def cross_entropy(out, labels):
    """In fp64: the models' own losses are in fp32."""
    return F.cross_entropy(out.logits.flatten(0, -2), labels.flatten())


def train(f, params, inputs, labels, options, key=None, steps=STEPS, jit=False):
    """The losses of some steps of AdamW, the gradients of the first one, the parameters after the last."""
    opt = vfn.optim.adamw(**OPTIONS)

    def step(params, state, inputs, labels):
        run = lambda params: cross_entropy(f(params, **inputs, **options, key=key), labels)
        loss, grads = vfn.value_and_grad(run)(params)
        updates, state = opt.update(grads, state, params)
        return vfn.optim.apply_updates(params, updates), state, loss, grads

    run, state, losses, first = vfn.jit(step) if jit else step, opt.init(params), [], None
    for _ in range(steps):
        params, state, loss, grads = run(params, state, inputs, labels)
        losses.append(loss)
        first = grads if first is None else first
    return torch.stack([vfn.unshard(x) for x in losses]), vfn.unshard(first), vfn.unshard(params)


def same_bits(f, params, inputs, labels, options, want):
    """On one device the function is the module to the last bit: its scores, and every gradient."""

    def loss(params):
        out = f(params, **inputs, **options)
        return cross_entropy(out, labels), out.logits

    (_, logits), grads = vfn.value_and_grad(loss, has_aux=True)(params)
    assert torch.equal(logits, want[3])
    assert all(map(torch.equal, optree.tree_leaves(grads), optree.tree_leaves(want[1])))


@functools.cache
def reference(name):
    """The same by the module itself, with torch's own AdamW; and its scores before the first step."""
    module, inputs, labels, options = made(name)
    f, _ = vfn.module_function(module)
    opt = torch.optim.AdamW(module.eval().parameters(), **OPTIONS)
    losses, first = [], None
    for _ in range(STEPS):
        opt.zero_grad()
        out = module(**inputs, **options)
        loss = cross_entropy(out, labels)
        loss.backward()
        if first is None:
            logits = out.logits.detach()
            named = dict(module.named_parameters(remove_duplicate=False))
            first = f.params.tree(
                torch.zeros_like(named[name]) if named[name].grad is None else named[name].grad.clone()
                for name in f.params.names
            )
        opt.step()
        losses.append(loss.detach())
    return torch.stack(losses), first, f.from_state_dict(module.state_dict()), logits


def close(got, want):
    want = want[:3]
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)  # Adam's quotients, where a gradient is almost zero
    torch.testing.assert_close(got[:2], want[:2], rtol=1e-10, atol=1e-12)


@each_model
def test_steps_on_a_mesh_are_those_of_the_module(name):
    module, inputs, labels, options = made(name)
    assert type(module).__module__.startswith("transformers.models.")  # the code is theirs
    f, params = vfn.module_function(module.eval())
    want = reference(name)
    same_bits(f, params, inputs, labels, options, want)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        held = vfn.shard(params, mesh, hugging_face.specs(params, name))
        assert any("tp" in (entry or ()) for x in optree.tree_leaves(held) for entry in vfn.spec_of(x))
        with vfn.comm_log() as log:
            got = train(f, held, *vfn.shard((inputs, labels), mesh, P("dp")), options)
        close(got, want)
    moved = [call.why for call in log if call.op in ("all_gather", "all_to_all") and call.why != "unshard"]
    assert not moved or name in WITH_GATHERS
    assert not [
        why for why in moved if why.startswith(("embedding", "nll", "log_softmax"))
    ]  # nothing of the vocabulary's size
    assert want[0][-1] < want[0][0] - 0.1


# besides GPT-2: what is several matrices in one, and how many bytes are gathered of a batch: of masks and routes
FUSED = {
    "phi3": (
        lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**TEXT, num_key_value_heads=4, pad_token_id=0, eos_token_id=1)),
        IDS,
        0,
    ),
    "modernbert": (
        lambda: hf.ModernBertForMaskedLM(
            hf.ModernBertConfig(
                **TEXT,
                **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
                local_attention=4,
            )
        ),
        IDS,
        0,
    ),
    "sam": (
        lambda: hf.models.sam.modeling_sam.SamVisionModel(
            hf.SamVisionConfig(
                **{k: v for k, v in SIZES.items() if k != "intermediate_size"},
                mlp_dim=32,
                image_size=8,
                patch_size=4,
                output_channels=4,
                window_size=2,
                global_attn_indexes=[],
            )
        ),
        IMAGES,
        0,
    ),
    "mixtral": (
        lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(**GROUPED, num_local_experts=4, experts_implementation="grouped_mm")
        ),
        IDS,
        6912,
    ),
    "deepseek_v3": (
        lambda: hf.DeepseekV3ForCausalLM(
            hf.DeepseekV3Config(
                **TEXT | dict.fromkeys(("num_key_value_heads", "n_routed_experts"), 4),
                **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 4),
                **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size"), 8),
                **dict.fromkeys(("n_group", "num_experts_per_tok"), 2),
                topk_group=1,
                first_k_dense_replace=0,
                experts_implementation="grouped_mm",
            )
        ),
        IDS,
        6912,
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_matrices_in_one_are_split_each(name):
    """Forward and gradients; no parameter travels, no expert, and no token (nor its gradient) but to the rank that sorts them by
    expert."""
    make, data, gathered = FUSED[name]
    torch.manual_seed(0)
    dtype = torch.float32 if name in ("mixtral", "deepseek_v3") else torch.float64  # of which grouped_mm has no kernel
    f, params = vfn.module_function(make().to(dtype).eval())
    inputs = {"pixel_values": data} if data is IMAGES else {"input_ids": data}

    def loss(params, inputs):
        out = f(params, **inputs, **({"use_cache": False} if name in ("phi3", "mixtral", "deepseek_v3") else {}))
        return out[0].square().mean() + out[0].sin().mean()

    want = vfn.value_and_grad(loss)(params, inputs)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        held = vfn.shard(params, mesh, hugging_face.specs(params, name))
        with vfn.comm_log() as log:
            got = vfn.value_and_grad(loss)(held, vfn.shard(inputs, mesh, P("dp")))
        assert log.bytes("all_gather") + log.bytes("all_to_all") == gathered, log
        tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-11}
        torch.testing.assert_close(vfn.unshard(got), want, **tolerance)


@pytest.mark.parametrize("fsdp", [None, "dp"])
def test_a_whole_step_as_a_plan(fsdp):
    module, inputs, labels, options = made("llama")
    f, params = vfn.module_function(module.eval())
    want = reference("llama")
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2, 1) if fsdp else (1, 2), ("dp", "tp"))
        held = vfn.shard(params, mesh, hugging_face.specs(params, "llama", fsdp=fsdp))
        f = f.gathering(hugging_face.specs(params, "llama"))
        got = train(f, held, *vfn.shard((inputs, labels), mesh, P("dp")), options, jit=True)
    close(got, want)


DECODERS = {
    "gpt2": BY_NAME["gpt2"].config,
    "llama": BY_NAME["llama"].config,
    "qwen2": hf.Qwen2Config(**GROUPED),
    "mistral": hf.MistralConfig(**GROUPED, sliding_window=4),
}
START, END = torch.tensor([[0], [2], [3], [1]]), torch.tensor([[8], [6], [5], [7]])
PADDING = {
    "none": torch.ones(4, 8, dtype=torch.long),
    "left": (torch.arange(8) >= START).long(),
    "right": (torch.arange(8) < END).long(),
}


def decoder(name):
    torch.manual_seed(0)
    f, params = vfn.module_function(hf.AutoModelForCausalLM.from_config(DECODERS[name]).double().eval())
    return f, params


@pytest.mark.parametrize("name", DECODERS)
def test_padded_batches_are_plans(name):
    f, params = decoder(name)
    run = lambda params, ids, mask: f(params, input_ids=ids, attention_mask=mask, use_cache=False).logits
    plain = vfn.jit(run)
    wanted = {padding: run(params, IDS, mask) for padding, mask in PADDING.items()}
    for padding, mask in PADDING.items():
        torch.testing.assert_close(plain(params, IDS, mask), wanted[padding], rtol=1e-10, atol=1e-12)
    assert plain.cache_info()[1:3] == (1, 0)
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("dp",))
        on_mesh, held = vfn.jit(run), vfn.shard(params, mesh, P())
        for _ in range(2):
            for padding, mask in PADDING.items():
                found = on_mesh(held, *vfn.shard((IDS, mask), mesh, P("dp")))
                torch.testing.assert_close(vfn.unshard(found), wanted[padding], rtol=1e-10, atol=1e-12)
        assert on_mesh.cache_info()[2] == 0
        assert on_mesh.cache_info().records == (1 if name == "mistral" else 2)  # with and without padding


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_caches_are_trees(name, kind):
    hugging_face.caches()
    f, params = decoder(name)
    config = DECODERS[name]
    empty = lambda: (
        hf.DynamicCache(config=config) if kind == "dynamic" else hf.StaticCache(config=config, max_cache_len=12)
    )

    def step(params, ids, cache):
        cache = optree.tree_map(torch.clone, cache)
        out = f(params, input_ids=ids, cache=cache, use_cache=True)
        return out.logits, out.cache

    def decoded(run, params, ids):
        cache, found = empty(), []
        for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:7], ids[:, 7:]):
            logits, cache = run(params, part, cache)
            found.append(logits)
        return found, optree.tree_leaves(cache)

    wanted = decoded(step, params, IDS)
    torch.testing.assert_close(torch.cat(wanted[0], 1), f(params, IDS, use_cache=False).logits, rtol=1e-10, atol=1e-12)
    run = vfn.jit(step, donate_argnums=2)
    torch.testing.assert_close(decoded(run, params, IDS), wanted, rtol=1e-10, atol=1e-12)
    assert run.cache_info()[1:3] == ((2, 0) if kind == "static" and name != "mistral" else (4, 0))
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("dp",))
        run = vfn.jit(step)
        found = decoded(run, vfn.shard(params, mesh, P()), vfn.shard(IDS, mesh, P("dp")))
        torch.testing.assert_close(vfn.unshard(found), wanted, rtol=1e-10, atol=1e-12)
        assert run.cache_info().as_written == 0


def test_fsdp_gathers_where_a_module_reads_and_again_in_the_backward_pass():
    module, inputs, labels, options = made("llama")
    module.activation_checkpointing_enable({"use_reentrant": False})
    f, params = vfn.module_function(module.train())
    want = vfn.grad(lambda params: cross_entropy(f(params, **inputs, **options), labels))(params)
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("dp",))
        held = vfn.shard(params, mesh, hugging_face.specs(params, "llama", tp=None, fsdp="dp"))
        inputs, labels = vfn.shard((inputs, labels), mesh, P("dp"))
        run = lambda params: cross_entropy(f.gathering(P())(params, **inputs, **options), labels)
        with vfn.comm_log() as log, vfn.strict():
            loss, back = vfn.vjp(run, held)
        layer, rest = len(optree.tree_leaves(params["model"]["layers"])), 3  # besides: embedding, last norm, scores
        assert log.count("all_gather") == layer + rest
        with vfn.comm_log() as log, vfn.strict():
            (grads,) = back(torch.ones_like(loss))
        assert log.count("all_gather") == layer
        assert log.count("reduce_scatter") == layer + rest
        assert optree.tree_map(vfn.spec_of, grads) == optree.tree_map(vfn.spec_of, held)
        torch.testing.assert_close(vfn.unshard(grads), want, rtol=1e-10, atol=1e-12)


def test_dropout_on_a_mesh_is_that_of_one_device():
    module, inputs, labels, options = made("gpt2")
    f, params = vfn.module_function(module)
    want = train(f, params, inputs, labels, options, KEY, steps=2)
    evaluated = train(f, params, inputs, labels, options | {"train": False}, steps=1)
    assert (want[0][0] - evaluated[0][0]).abs() > 1e-4
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        held = vfn.shard(params, mesh, hugging_face.specs(params, "gpt2"))
        close(train(f, held, *vfn.shard((inputs, labels), mesh, P("dp")), options, KEY, steps=2), want)


def test_gradient_checkpointing_is_transformers_own():
    module, inputs, labels, options = made("gpt2")
    f, params = vfn.module_function(module)
    want = train(f, params, inputs, labels, options, KEY, steps=1)
    module.activation_checkpointing_enable({"use_reentrant": False})
    f, params = vfn.module_function(module)
    close(train(f, params, inputs, labels, options, KEY, steps=1), want)


def test_a_model_that_is_never_whole():
    model = BY_NAME["llama"]
    f, initial = vfn.deferred(lambda: model.make(model.config))
    whole = initial(KEY)
    assert f.state_dict(whole).keys() == model.make(model.config).state_dict().keys()
    embedding = whole["model"]["layers"][0]["mlp"]["up_proj"]["weight"]
    assert 0.015 < embedding.std() < 0.025  # config.initializer_range
    module = model.make(model.config).eval()
    module.load_state_dict(f.state_dict(whole))
    out = f(whole, **model.inputs, use_cache=False, train=False).logits
    assert torch.equal(out, module(**model.inputs, use_cache=False).logits)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        rules = lambda shapes: hugging_face.specs(shapes, "llama", fsdp="dp")
        held = vfn.init(initial, KEY, spec=rules, mesh=mesh)
        assert vfn.spec_of(held["lm_head"]["weight"]) == P(("tp", "dp"))
        torch.testing.assert_close(vfn.unshard(held), whole, rtol=0, atol=0)


def test_a_model_in_another_dtype_that_is_never_whole():
    config = BY_NAME["llama"].config
    make = lambda: hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    types = lambda named: {name: x.dtype for name, x in named.items()}
    module = make()
    want = types(dict(module.named_parameters()))
    f, initial = vfn.deferred(make)
    buffers = lambda m: dict(m.named_buffers())
    assert types(buffers(f._template.root)) == types(buffers(module))
    assert all(torch.equal(x, buffers(module)[name]) for name, x in buffers(f._template.root).items())
    shapes = vfn.eval_shape(initial, KEY)
    assert types(f.state_dict(shapes)) == types(f.state_dict(initial(KEY))) == want
    assert types(f.state_dict(vfn.jit(initial)(KEY))) == want
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        held = vfn.init(initial, KEY, spec=lambda shapes: hugging_face.specs(shapes, "llama", fsdp="dp"), mesh=mesh)
        assert types(f.state_dict(held)) == want
        torch.testing.assert_close(vfn.unshard(held), initial(KEY), rtol=0, atol=0)


def llama_on_ranks():
    module, inputs, labels, options = made("llama")
    f, params = vfn.module_function(module.eval())
    mesh = vfn.make_mesh((1, 2), ("dp", "tp"))
    held = vfn.shard(params, mesh, hugging_face.specs(params, "llama"))
    with vfn.comm_log() as log:
        f(held, **vfn.shard(inputs, mesh, P("dp")), **options)
    return train(f, held, *vfn.shard((inputs, labels), mesh, P("dp")), options, steps=2), [r.op for r in log]


def test_on_processes(gloo):
    f, params = vfn.module_function(made("llama")[0].eval())
    want = train(f, params, *made("llama")[1:], steps=2)
    for got, forward in gloo(2, llama_on_ranks):
        close(got, want)
        assert forward == ["all_reduce"] * 3  # of the embedding, after attention, after the MLP, as in Megatron-LM


def test_an_architecture_without_a_table():
    with pytest.raises(KeyError, match="no table for 'mamba', but for llama, mistral"):
        hugging_face.specs({}, "mamba")
    assert BY_NAME.keys() <= hugging_face.TENSOR_PARALLEL.keys()


# --- stages of a pipeline ---------------------------------------------------------------------------------------------

EVEN = TEXT | {"num_hidden_layers": 2, "num_key_value_heads": 4, "tie_word_embeddings": False}
SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 16, "vocab_size": VOCAB, "n_positions": 16, "bos_token_id": 0}
OF_T5 = {"num_layers": 2, "num_heads": 4, "d_model": 16, "d_ff": 32, "d_kv": 4, "vocab_size": VOCAB}
IN_STAGES = {
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config(**SMALL, eos_token_id=1), r"\.h\.\d+$"),
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**EVEN), r"layers\.\d+$"),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**EVEN, head_dim=4), r"layers\.\d+$"),
    "t5": (hf.T5ForConditionalGeneration, hf.T5Config(**OF_T5), r"block\.\d+$"),
}


def in_stages(name, again=False):
    """In training: a pipelined loss of the model, whose layers are computed again, its parameters, and a batch."""
    make, config, pattern = IN_STAGES[name]
    torch.manual_seed(0)
    module = make(config).double().train()
    if again:
        module.activation_checkpointing_enable({"use_reentrant": False})
    f, params = vfn.module_function(module)
    f = f.cutting(pattern)

    def loss(params, ids, key):
        inputs = {"decoder_input_ids": ids.flip(1)} if name == "t5" else {}
        return cross_entropy(f(params, input_ids=ids, use_cache=False, key=key, **inputs), ids.roll(-1, 1))

    return vfn.pipeline(loss, "pp", microbatches=2), params, (IDS, KEY)


@pytest.mark.parametrize(
    "name", IN_STAGES if whole.WHOLE else [name for name in IN_STAGES if name != "qwen3"]
)  # as Llama
def test_in_stages_of_a_pipeline(name):
    """The gradients of microbatches: of a parameter that one stage uses to the last bit."""
    piped, params, batch = in_stages(name, again=name == "llama")
    want = vfn.value_and_grad(piped)(params, *batch)
    with vfn.simulate(2):
        with vfn.use_mesh(mesh := vfn.make_mesh((2,), ("pp",))):
            specs = piped.specs(params, *batch)
        got = vfn.unshard(vfn.value_and_grad(piped)(vfn.shard(params, mesh, specs), *batch))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    grads = zip(*map(vfn.tree.leaves, (got[1], want[1], specs)), strict=True)
    assert all(torch.equal(a, b) for a, b, spec in grads if spec != P())
    assert {P(at={"pp": 0}), P(at={"pp": 1})} <= set(vfn.tree.leaves(specs))
