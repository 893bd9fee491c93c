"""Hugging Face's models on a mesh, as they are: tables that say how the parameters of an architecture lie.

    f, params = vfn.functionalize(transformers.LlamaForCausalLM(config))
    params = vfn.shard(params, mesh, hugging_face.specs(params, "llama"))
    loss = lambda params, ids, key: f(params, ids, labels=ids, use_cache=False, key=key).loss

That is all that there is to say: the model's code is transformers' own, and what must travel between ranks follows from
where its parameters and its data lie. A model that is too large to be made on one rank first:

    f, initial = vfn.deferred(lambda: transformers.LlamaForCausalLM(config))
    params = vfn.init(initial, key, spec=lambda shapes: hugging_face.specs(shapes, "llama", fsdp="dp"), mesh=mesh)

Its parameters are split over `dp` besides, and gathered where a module reads them. With transformers' own checkpoints
(``module.activation_checkpointing_enable({"use_reentrant": False})``) the backward pass gathers them again, and no more than
one layer is ever there:

    f = f.gathering(hugging_face.specs(params, "llama"))

The tables are for transformers 5 and later. For another architecture, print the paths (``f.params.names``) and write one.
"""

from __future__ import annotations

import re
from typing import Any

import optree

from vescale_fn import P

Rules = list[tuple[str, P]]

# Tensor parallelism as in Megatron-LM (arXiv 1909.08053). torch.nn.Linear keeps its weight as [outputs, inputs]: what makes
# heads, or hidden units, is split by its first dim, what leads back into the residual stream by its second. Scores are split
# by the vocabulary, and so is the embedding: each rank looks up its own rows, and no rank ever has the whole table.
LLAMA: Rules = [
    (r"\.(q|k|v|gate|up)_proj\.", P("tp")),
    (r"\.(o|down)_proj\.weight$", P(None, "tp")),
    (r"(lm_head|embed_tokens)\.weight$", P("tp")),
    (r"", P()),
]

TENSOR_PARALLEL: dict[str, Rules] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    # Experts are split by their number. The module takes them one by one, and gathers each that gets tokens.
    "mixtral": [
        (r"\.experts\.", P("tp")),
        (r"\.(q|k|v)_proj\.", P("tp")),
        (r"\.o_proj\.weight$", P(None, "tp")),
        (r"(lm_head|embed_tokens)\.weight$", P("tp")),
        (r"", P()),
    ],
    # Its Conv1D keeps [inputs, outputs]. Queries, keys and values are one matrix, which a split would cut across heads.
    "gpt2": [
        (r"\.c_fc\.weight$", P(None, "tp")),
        (r"\.c_fc\.bias$", P("tp")),
        (r"\.c_proj\.weight$", P("tp")),
        (r"\.wte\.weight$", P("tp")),
        (r"", P()),
    ],
    "bert": [
        (r"\.self\.(query|key|value)\.|\.intermediate\.dense\.", P("tp")),
        (r"\.layer\.\d+\.(attention\.)?output\.dense\.weight$", P(None, "tp")),
        (r"\.word_embeddings\.weight$|predictions\.bias$", P("tp")),
        (r"", P()),
    ],
    "vit": [
        (r"\.(q_proj|k_proj|v_proj|fc1)\.", P("tp")),
        (r"\.(o_proj|fc2)\.weight$", P(None, "tp")),
        (r"", P()),
    ],
    "t5": [
        (r"Attention\.(q|k|v)\.weight$|\.wi(_\d)?\.weight$", P("tp")),
        (r"Attention\.o\.weight$|\.wo\.weight$|relative_attention_bias\.weight$", P(None, "tp")),
        (r"^(shared|lm_head)\.weight$", P("tp")),
        (r"", P()),
    ],
}


def specs(params: Any, model_type: str, *, tp: str | None = "tp", fsdp: str | None = None) -> Any:
    """How the parameters of a model lie.

    Args:
        params: its parameters, or their shapes.
        model_type: ``config.model_type``, one of `TENSOR_PARALLEL`.
        tp: the axis that heads, hidden units and the vocabulary are split over; None for none.
        fsdp: the axis that what a rank would hold is split over besides, by its first dim. Before their use parameters are
            gathered over it: ``f.gathering(specs(params, model_type, tp=tp))``, whose gradients are scattered.

    Raises:
        KeyError: an architecture without a table.

    >>> import torch
    >>> from vescale_fn.recipes import hugging_face
    >>> params = {"lm_head": {"weight": torch.ones(8, 4)}, "model": {"norm": {"weight": torch.ones(4)}}}
    >>> hugging_face.specs(params, "llama", fsdp="dp")
    {'lm_head': {'weight': P(('tp', 'dp'))}, 'model': {'norm': {'weight': P('dp')}}}
    """
    if model_type not in TENSOR_PARALLEL:
        raise KeyError(f"no table for {model_type!r}, but for {', '.join(TENSOR_PARALLEL)}")
    paths, shapes, treedef = optree.tree_flatten_with_path(params)
    found = []
    for path, x in zip(paths, shapes):
        name = ".".join(map(str, path))
        spec = next(spec for pattern, spec in TENSOR_PARALLEL[model_type] if re.search(pattern, name))
        found.append(_split(spec, x.ndim, tp, fsdp))
    return optree.tree_unflatten(treedef, found)


def _split(spec: P, ndim: int, tp: str | None, fsdp: str | None) -> P:
    """A spec of the tables with other axes: `tp` by its name, `fsdp` on the first dim, within what is there."""
    entries = [tp if entry == "tp" else entry for entry in spec]
    if fsdp is not None and ndim:
        first = entries[0] if entries else None
        entries[:1] = [fsdp if first is None else (first, fsdp)]
    return P(*entries)
