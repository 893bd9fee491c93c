"""Models in stages beside the same models without: whether the numbers are the same. No clock is read.

The recipes' models by every schedule, on 2 and 4 simulated ranks, with 4 and 8 microbatches, with dropout: in float64, with
bfloat16 by a policy, and with blocks that are computed again. And Hugging Face's models, as they are, beside what torch's own
``torch.distributed.pipelining.pipeline`` makes of them. Some minutes; ``--of recipes``, ``--of hugging_face``: one of both.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch.distributed import pipelining

import vescale_fn as vfn
from benchmarks.parity import CONFIGS, KEY
from benchmarks.side_by_side import publish
from vescale_fn.pipelined import NAMED
from vescale_fn.recipes import models
from vescale_fn.recipes.parallel import parallel

LAYERS, ROWS, VOCABULARY = 8, 8, 40
POLICY = vfn.precision.policy("params=f32,compute=bf16,reduce=f32,output=f32")
VARIANTS = {"float64": ("", torch.float64), "bfloat16": ("", torch.float32), "computed again": ("remat", torch.float64)}


class Compared:
    """How results in stages differ from those without."""

    def __init__(self) -> None:
        self.cases, self.equal, self.leaves, self.most = 0, 0, 0, 0.0

    def add(self, f: Callable[..., Any], ranks: int, parts: int, schedule: str, params: Any, *batch: Any) -> None:
        """Compare the value of `f` and its gradients, each rank holding the parameters of its own stages."""
        wanted = vfn.optim.microbatches(vfn.value_and_grad(f), parts)(params, *batch)
        chunks = 2 if schedule == "interleaved" else None
        piped = vfn.pipeline(f, "pp", microbatches=parts, schedule=schedule, chunks=chunks)
        with vfn.simulate(ranks), vfn.use_mesh(mesh := vfn.make_mesh((ranks,), ("pp",))):
            placed = vfn.shard(params, mesh, piped.specs(params, *batch))
            found = vfn.unshard(vfn.value_and_grad(piped)(placed, *batch))
        pairs = list(zip(vfn.tree.leaves(found), vfn.tree.leaves(wanted), strict=True))
        self.cases += 1
        self.equal += sum(map(torch.equal, *zip(*pairs)))
        self.leaves += len(pairs)
        self.most = max(self.most, *(float((a - b).abs().max()) for a, b in pairs))


def of_recipes() -> None:
    """The recipes' models."""
    rows = []
    for name in ("gpt", "llama", "mixtral", "dit"):
        for variant, (text, dtype) in VARIANTS.items():
            compared = Compared()
            layout = dataclasses.replace(parallel("+".join(filter(None, ("dp", text)))), dims=())
            config, model = dataclasses.replace(CONFIGS[name], layers=LAYERS, layout=layout), models.MODELS[name]
            params = model.init(KEY, config, dtype)
            batch = models.random_batch(KEY, config, ROWS, ROWS, dtype)

            def loss(params: Any, batch: Any, key: Any, model: Any = model, config: Any = config) -> Any:
                return model.loss(params, batch, config, key)

            f = POLICY.apply(loss) if variant == "bfloat16" else loss
            for schedule in NAMED:
                for ranks, parts in ((2, 4), (2, 8), (4, 4), (4, 8)):
                    if schedule != "dualpipev" or parts >= 2 * ranks:
                        compared.add(f, ranks, parts, schedule, params, batch, KEY)
            rows.append([name, variant, compared.cases, f"{compared.equal} of {compared.leaves}", compared.most])
            print(*rows[-1], flush=True)
    publish(
        "piped_recipes", ["model", "how", "cases", "values and gradients of equal bits", "largest difference"], rows
    )


# --- Hugging Face -----------------------------------------------------------------------------------------------------

SIZES = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 32}
TEXT = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "num_key_value_heads": 2}
GPT2 = hf.GPT2Config(
    n_layer=4, n_head=4, n_embd=16, vocab_size=VOCABULARY, n_positions=16, bos_token_id=0, eos_token_id=1
)
T5 = hf.T5Config(num_layers=2, num_heads=4, d_model=16, d_ff=32, d_kv=4, vocab_size=VOCABULARY)
EXPERTS = TEXT | {"num_local_experts": 4}
LAYER = r"model\.layers\.\d+$", "model.layers.2"
MODULES: dict[str, tuple[Any, Any, str, str]] = {  # the class, its config, where we cut, and where torch does
    "GPT-2, tied": (hf.GPT2LMHeadModel, GPT2, r"transformer\.h\.\d+$", "transformer.h.2"),
    "Llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**TEXT), *LAYER),
    "Llama, tied": (hf.LlamaForCausalLM, hf.LlamaConfig(**TEXT, tie_word_embeddings=True), *LAYER),
    "Qwen 2": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**TEXT), *LAYER),
    "Qwen 3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**TEXT, head_dim=4), *LAYER),
    "Mixtral, batched_mm": (
        hf.MixtralForCausalLM,
        hf.MixtralConfig(**EXPERTS, experts_implementation="batched_mm"),
        *LAYER,
    ),
    "Mixtral, eager": (hf.MixtralForCausalLM, hf.MixtralConfig(**EXPERTS, experts_implementation="eager"), *LAYER),
    "T5": (hf.T5ForConditionalGeneration, T5, r"(en|de)coder\.block\.\d+$", "decoder.block.0"),
}
IDS = (torch.arange(64).reshape(8, 8) * 7 + torch.arange(8)[:, None] * 3) % VOCABULARY


def cross_entropy(out: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = out[0] if isinstance(out, tuple) else out.logits  # torch's pipeline gives a tuple
    return F.cross_entropy(logits.flatten(0, -2), ids.roll(-1, 1).flatten())


def inputs(name: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, **({"decoder_input_ids": ids.flip(1)} if name == "T5" else {})}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODULES[name][0](MODULES[name][1]).double().eval()


def in_our_stages(name: str) -> Iterator[Any]:
    """On how many ranks and by which schedule; and the largest difference of a gradient, or what is said."""
    module, params = vfn.module_function(made(name))
    f = module.cutting(MODULES[name][2])
    loss = lambda params, ids: cross_entropy(f(params, use_cache=False, **inputs(name, ids)), ids)
    compared = Compared()
    try:
        for ranks, schedule in ((2, "1f1b"), (4, "gpipe"), (2, "zbv")):
            compared.add(loss, ranks, 4, schedule, params, IDS)
    except vfn.errors.VfnError as error:
        yield from ("refused", " ".join(str(error).splitlines()[1].split(", at ")[0].split()[1:]))
    else:
        yield from (f"runs, {compared.cases} schedules", f"{compared.most:.1e}")


def in_torchs_stages(name: str) -> Iterator[Any]:
    """What torch's `pipeline` makes of it, in two stages that run one after the other in this process; and how far the
    gradients of parameters that keep their names are from the module's."""
    module, whole, ids = made(name), made(name), IDS[:2]
    given: Any = {**inputs(name, ids), "use_cache": False}
    try:
        split = {MODULES[name][3]: pipelining.SplitPoint.BEGINNING}
        pipe = pipelining.pipeline(module, (), mb_kwargs=given, split_spec=split)
    except Exception as error:
        yield from ("is not exported", str(error).splitlines()[0].split(". ")[0])
        return
    try:
        cross_entropy(pipe(**given), ids).backward()
    except Exception as error:
        yield from ("is split, and does not run", str(error).splitlines()[0])
        return
    cross_entropy(whole(**given), ids).backward()
    wanted = {path: x.grad for path, x in whole.named_parameters(remove_duplicate=False)}
    found = {path.split(".", 1)[1]: x.grad for path, x in pipe.split_gm.named_parameters(remove_duplicate=False)}
    apart = {
        path: float((wanted[path] - x).abs().max()) for path, x in found.items() if path in wanted and x is not None
    }
    far = [path for path, x in apart.items() if x > 1e-12]
    yield from ("runs", f"{max(apart.values()):.1e}" + (f": {', '.join(far[:2])}" if far else ""))


def of_hugging_face() -> None:
    """Hugging Face's models."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    rows = []
    for name in MODULES:
        rows.append([name, *in_our_stages(name), *in_torchs_stages(name)])
        print(*rows[-1], sep=" | ", flush=True)
    columns = ["model", "vfn.pipeline", "largest difference", "torch's pipeline()", "largest difference, or why not"]
    publish("piped_hugging_face", columns, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.piped_models")
    parser.add_argument("--of", choices=("recipes", "hugging_face"))
    of = parser.parse_args().of
    torch.set_num_threads(1)
    if of != "recipes":
        of_hugging_face()
    if of != "hugging_face":
        of_recipes()
