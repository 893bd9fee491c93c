"""Hugging Face's models get a layout by `auto`, without a table written by hand, and train in it as on one device."""

from dataclasses import replace

import pytest
import torch
import transformers as hf
import whole
from test_hugging_face import BY_NAME, DECODERS, FUSED, GROUPED, IDS, IMAGES, IN_STAGES, KEY, SIZES, TEXT, cross_entropy

import vescale_fn as vfn

# so slow that it pays to split what tests can afford
SLOW = replace(vfn.hardware.h100(), flops={"float32": 1e6}, bytes=1e6, launch=1e-9)
ROWS = 8
TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
BATCHED = {
    "experts_implementation": "batched_mm"
}  # the other ways go from expert to expert, or have no kernel for fp64
CHOSEN = {
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**GROUPED, **TOKENS)),  # fused, with fewer heads of keys
    "gpt2": lambda: BY_NAME["gpt2"].make(BY_NAME["gpt2"].config),  # fused, with dropout
    "vit": lambda: BY_NAME["vit"].make(BY_NAME["vit"].config),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED | {"num_hidden_layers": 2})),
    "mistral": lambda: hf.MistralForCausalLM(DECODERS["mistral"]),
    "qwen2": lambda: hf.Qwen2ForCausalLM(DECODERS["qwen2"]),
    "qwen3": lambda: hf.Qwen3ForCausalLM(IN_STAGES["qwen3"][1]),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**GROUPED, **TOKENS, head_dim=4, sliding_window=4)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=4, **BATCHED)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**TEXT, **TOKENS)),
    "falcon": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(
            num_hidden_layers=1, num_attention_heads=4, num_kv_heads=2, hidden_size=16, ffn_hidden_size=32,
            vocab_size=40, new_decoder_architecture=True, **TOKENS,
        )
    ),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(n_layer=1, n_head=4, hidden_size=16, vocab_size=40, **TOKENS)),
    "bert": lambda: BY_NAME["bert"].make(BY_NAME["bert"].config),
    "modernbert": FUSED["modernbert"][0],
    "t5": lambda: BY_NAME["t5"].make(BY_NAME["t5"].config),
    "clip": lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**SIZES, image_size=8, patch_size=4)),
    "sam": FUSED["sam"][0],
    # their own code is in fp32 in places
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **TEXT | dict.fromkeys(("num_key_value_heads", "n_routed_experts"), 4),
            **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 4),
            **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size"), 8),
            **dict.fromkeys(("n_group", "num_experts_per_tok"), 2), topk_group=1, first_k_dense_replace=0, **BATCHED,
        )
    ),
    "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(num_hidden_layers=1, hidden_size=16, vocab_size=40, state_size=4)),
}  # fmt: skip


def batch_of(name):
    if name in ("vit", "clip", "sam"):
        return {"pixel_values": torch.cat([IMAGES, IMAGES.cos()])}
    ids = torch.cat([IDS, IDS.flip(0)])
    masked = {"attention_mask": (ids > 3).long()} if name == "bert" else {}
    return {"input_ids": ids, **masked, **({"decoder_input_ids": ids.flip(1)} if name == "t5" else {})}


def stepping(name, f):
    """A step of AdamW, and its optimiser."""
    cached = {} if name in ("vit", "clip", "sam", "bert", "modernbert") else {"use_cache": False}

    def loss(params, batch, key):
        out = f(params, **batch, **cached, key=key)
        if "input_ids" in batch:
            return cross_entropy(out, batch["input_ids"].roll(-1, 1))
        return out[0].square().mean() + out[0].sin().mean()

    opt = vfn.optim.adamw(0.01, eps=1e-3)
    return vfn.optim.train_step(loss, opt), opt


@pytest.mark.parametrize("name", list(CHOSEN) if whole.WHOLE else ["phi3"])
def test_a_layout_is_chosen_from_shapes_and_three_steps_are_those_of_one_device(name):
    make = CHOSEN[name]
    f, initial = vfn.deferred(lambda: make().double().train(name == "gpt2"))
    step, opt = stepping(name, f)
    params, batch = initial(KEY), (batch_of(name), KEY)
    shapes = vfn.eval_shape(lambda key: (p := initial(key), opt.init(p)), KEY)
    choice = vfn.auto(step, *shapes, *batch, mesh={"dp": 2, "tp": 4}, hardware=SLOW, candidates=1)
    assert {axis for _, spec in choice.rules() for axis in ("dp", "tp") if axis in repr(spec)} == {"dp", "tp"}
    state, want = opt.init(params), []
    for _ in range(3):
        params, state, loss = step(params, state, *batch)
        want.append(loss)
    with vfn.simulate(8):
        fast, held = choice.jit(), vfn.init(initial, KEY, spec=choice.specs[0], mesh=choice.mesh())
        held, state = choice.shard(held, opt.init(held))
        for k in range(3):
            held, state, loss = fast(held, state, *batch)
            want[k] = want[k], vfn.unshard(loss)
        assert fast.cache_info().as_written == 0
        held = vfn.unshard(held)
    # transformers' own code casts to fp32: DeepSeek-V3's router its tokens and weight; Mamba A, D, the state and its inputs, and
    # all scores of the vocabulary, so that a sum between ranks is one of fp32
    tolerance = {"deepseek_v3": 1e-8, "mamba": 1e-5}.get(name, 1e-12)
    for one in zip(vfn.tree.leaves(held), vfn.tree.leaves(params), strict=True):
        torch.testing.assert_close(*one, rtol=tolerance, atol=tolerance)
    for one in want:
        torch.testing.assert_close(*one, rtol=tolerance, atol=tolerance)
    assert want[2][0] < want[0][0]
