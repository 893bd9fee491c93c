"""Hugging Face's models on eight H100: what layouts of the recipes' tables are predicted to take, and what those of a search.

Each model has four layers of 4,096 in bf16 and trains with AdamW on four sequences of 2,048 tokens (images of 224 x 224), fewer
than ranks, so that the batch alone cannot be split. Nothing is allocated or run. The search is given no table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import vescale_fn as vfn
from benchmarks.side_by_side import publish
from vescale_fn import P
from vescale_fn.recipes import hugging_face

MESH, BATCH, LENGTH, VOCAB = {"tp": 8}, 4, 2048, 32000
OPT = vfn.optim.adamw(1e-3)
IMAGES = ("vit", "clip")


def configs() -> dict[str, Callable[[], Any]]:
    """What makes each model."""
    import transformers as hf

    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 32, "hidden_size": 4096, "intermediate_size": 11008}
    text = sizes | {"vocab_size": VOCAB, "max_position_embeddings": LENGTH}
    grouped = text | {"num_key_value_heads": 8}
    short = {"n_layer": 4, "n_head": 32, "vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1}
    image = sizes | {"image_size": 224, "patch_size": 14}
    of_t5 = {"num_layers": 4, "num_heads": 32, "d_model": 4096, "d_ff": 11008, "d_kv": 128, "vocab_size": VOCAB}
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    falcon = {k: v for k, v in grouped.items() if k in ("num_hidden_layers", "num_attention_heads", "hidden_size")}
    heads = {"num_kv_heads": 8, "ffn_hidden_size": 11008, "vocab_size": VOCAB, "new_decoder_architecture": True}
    experts = {"num_local_experts": 8, "experts_implementation": "grouped_mm"}
    return {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**grouped)),
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**grouped, sliding_window=LENGTH // 4)),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**grouped)),
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**grouped, head_dim=128)),
        "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**grouped, **experts)),
        "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**grouped, **tokens)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**short, n_embd=4096, n_positions=LENGTH)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**text)),
        "modernbert": lambda: hf.ModernBertForMaskedLM(
            hf.ModernBertConfig(**text, **ends, local_attention=LENGTH // 4)
        ),
        "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**of_t5)),
        "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**image, num_labels=1000)),
        "clip": lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**image)),
        "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**text, **tokens)),
        "falcon": lambda: hf.FalconForCausalLM(hf.FalconConfig(**falcon, **heads, **tokens)),
        "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(**short, hidden_size=4096)),
    }


def stepping(name: str, make: Callable[[], Any]) -> tuple[Any, tuple[Any, ...]]:
    """A step of a model, and the shapes of its arguments."""
    f, initial = vfn.deferred(lambda: make().to(torch.bfloat16).eval())
    params = vfn.eval_shape(initial, vfn.random.key(0))
    cached = {} if name in (*IMAGES, "bert", "modernbert") else {"use_cache": False}

    def loss(params: Any, batch: Any) -> torch.Tensor:
        out = f(params, **batch, **cached)[0]
        if name in IMAGES:
            return out.float().square().mean()
        return F.cross_entropy(out.flatten(0, -2), batch["input_ids"].flatten())

    ids = vfn.ShapeDtype((BATCH, LENGTH), torch.int64)
    batch = {"input_ids": ids, **({"decoder_input_ids": ids} if name == "t5" else {})}
    if name in IMAGES:
        batch = {"pixel_values": vfn.ShapeDtype((BATCH, 3, 224, 224), torch.bfloat16)}
    return vfn.optim.train_step(loss, OPT), (params, vfn.eval_shape(OPT.init, params), batch)


def row(name: str, make: Callable[[], Any]) -> list[Any]:
    """What a model's layouts take."""
    step, args = stepping(name, make)
    how: dict[str, Any] = {"mesh": MESH, "hardware": "h100", "donate_argnums": (0, 1)}
    found = vfn.auto(step, *args, candidates=2, **how).predicted
    if name not in hugging_face.TENSOR_PARALLEL:
        return [name, "", "", found.seconds * 1e3, found.peak / 2**30, ""]
    specs = hugging_face.specs(args[0], name)
    state = args[1]._replace(**dict.fromkeys(("mean", "square"), specs), count=P())
    table = vfn.price(step, *args, specs=(specs, state, P()), **how)
    return [
        name,
        *(x for one in (table, found) for x in (one.seconds * 1e3, one.peak / 2**30)),
        found.seconds / table.seconds,
    ]


def main() -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    rows = [row(name, make) for name, make in configs().items() if name in sys.argv[1:] or len(sys.argv) == 1]
    columns = ["model", "table, ms", "table, GiB", "search, ms", "search, GiB", "search / table"]
    publish("chosen_models", columns, rows)


if __name__ == "__main__":
    main()
