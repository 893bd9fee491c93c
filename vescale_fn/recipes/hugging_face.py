"""Hugging Face's models on a mesh, unchanged: tables of specs for the parameters of each architecture.

    f, params = vfn.module_function(transformers.LlamaForCausalLM(config))
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

transformers' caches of keys and values are trees after `caches`: they go into a jitted function and come out of it.

Matrices in one are split each (`fused`) where they are of one size. Phi-3's queries, keys and values with fewer heads of keys
are not, and no spec says how they would be split: the parts of `P.merged` are factors of a dim's size, as dims seen as one are,
and matrices of 4, 2 and 2 heads one after the other are a sum; of 4 parts as large as the keys, a rank's queries would be heads
that read other ranks' keys. So every rank has that matrix whole, and the rest of a layer is split.

No table is needed where `vfn.auto` chooses: ``choice.specs[0]`` says where the parameters lie, of any architecture, from shapes
alone, and ``choice.rules()`` is such a table, for one mesh, batch and device. It is predicted to be faster than those below in
ten of the eleven architectures that `benchmarks/chosen_models.py` prices with both (not in ViT), most where matrices in one
are not of one size. The tables are what is known beforehand: for any mesh and batch, for a forward pass, without a solver.

The tables are for transformers 5 and later. For another architecture, take one from `vfn.auto`, or print the paths
(``f.params.names``) and write one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import optree
import torch

from vescale_fn import P
from vescale_fn._core.sharding.merged_dim import Merged

Spec = P | Callable[[tuple[int, ...]], P]
Rules = list[tuple[str, Spec]]


def fused(count: int, dim: int = 0) -> Callable[[tuple[int, ...]], P]:
    """The spec of a parameter that is `count` of one size, one after the other along a dim: each of them is split.

    >>> from vescale_fn.recipes import hugging_face
    >>> hugging_face.fused(3)((24, 8))  # queries, keys and values in one matrix
    P(P.merged((3, None), (8, 'tp')))
    """

    def spec(shape: tuple[int, ...]) -> P:
        return P(*[None] * dim, P.merged((count, None), (shape[dim] // count, "tp")))

    return spec


def _heads_alike(shape: tuple[int, ...]) -> P:
    """Of queries, keys and values in one matrix, where there are as many heads of each.

    With fewer heads of keys each rank has the whole matrix, and computes its attention for all heads.
    """
    return fused(3)(shape) if shape[0] == 3 * shape[1] else P()


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
    # Each expert is split as an MLP is: no expert and no token travels, whichever way transformers computes them
    # (``experts_implementation="grouped_mm"`` runs as a plan, too). Over dp tokens do travel: transformers sorts all of the
    # batch by their experts, and so each rank gathers routes and, with grouped_mm, the rows of the ranks beside it. Where that
    # costs too much, `vfn.nn.experts` groups tokens by sequence, and two all-to-alls bring them to their experts and back.
    "mixtral": [
        (r"\.experts\.gate_up_proj$", fused(2, 1)),
        (r"\.experts\.down_proj$", P(None, None, "tp")),
        (r"\.(q|k|v)_proj\.", P("tp")),
        (r"\.o_proj\.weight$", P(None, "tp")),
        (r"(lm_head|embed_tokens)\.weight$", P("tp")),
        (r"", P()),
    ],
    # Heads are made of what queries, and keys and values, are compressed to, which every rank has whole; experts as Mixtral's.
    "deepseek_v3": [
        (r"\.experts\.gate_up_proj$", fused(2, 1)),
        (r"\.experts\.down_proj$", P(None, None, "tp")),
        (r"\.(q|q_b|kv_b|gate|up)_proj\.", P("tp")),
        (r"\.(o|down)_proj\.weight$", P(None, "tp")),
        (r"(lm_head|embed_tokens)\.weight$", P("tp")),
        (r"", P()),
    ],
    # Its Conv1D keeps [inputs, outputs].
    "gpt2": [
        (r"\.c_attn\.weight$", fused(3, 1)),
        (r"\.c_attn\.bias$", fused(3)),
        (r"\.c_fc\.weight$", P(None, "tp")),
        (r"\.c_fc\.bias$", P("tp")),
        (r"\.c_proj\.weight$", P("tp")),
        (r"\.wte\.weight$", P("tp")),
        (r"", P()),
    ],
    "phi3": [
        (r"\.gate_up_proj\.weight$", fused(2)),
        (r"\.qkv_proj\.weight$", _heads_alike),
        (r"\.(o|down)_proj\.weight$", P(None, "tp")),
        (r"(lm_head|embed_tokens)\.weight$", P("tp")),
        (r"", P()),
    ],
    "bert": [
        (r"\.self\.(query|key|value)\.|\.intermediate\.dense\.", P("tp")),
        (r"\.layer\.\d+\.(attention\.)?output\.dense\.weight$", P(None, "tp")),
        (r"\.word_embeddings\.weight$|predictions\.bias$", P("tp")),
        (r"", P()),
    ],
    "modernbert": [
        (r"\.attn\.Wqkv\.", fused(3)),
        (r"\.mlp\.Wi\.", fused(2)),
        (r"\.Wo\.weight$", P(None, "tp")),
        (r"\.tok_embeddings\.weight$|^decoder\.", P("tp")),
        (r"", P()),
    ],
    "sam": [
        (r"\.attn\.qkv\.", fused(3)),
        (r"\.(q_proj|k_proj|v_proj|lin1)\.", P("tp")),
        (r"\.(proj|out_proj|lin2)\.weight$", P(None, "tp")),
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
        found.append(_split(spec(tuple(x.shape)) if callable(spec) else spec, x.ndim, tp, fsdp))
    return optree.tree_unflatten(treedef, found)


def _split(spec: P, ndim: int, tp: str | None, fsdp: str | None) -> P:
    """A spec of the tables with other axes: `tp` by its name, `fsdp` on the first dim, within what is there."""
    entries = [_renamed(entry, tp) for entry in spec]
    if fsdp is not None and ndim:
        first = entries[0] if entries else None
        if isinstance(first, Merged):
            *outer, (size, names) = first.parts
            entries[0] = P.merged(*outer, (size, (*names, fsdp)))
        else:
            entries[:1] = [fsdp if first is None else (first, fsdp)]
    return P(*entries)


def _renamed(entry: Any, tp: str | None) -> Any:
    if isinstance(entry, Merged):
        return P.merged(*((size, tp if names else None) for size, names in entry.parts)) if tp else None
    return tp if entry == "tp" else entry


@functools.cache
def caches() -> None:
    """Make transformers' caches, `DynamicCache`, `StaticCache` and their kind, nodes of trees.

    A function under `vfn.jit` gets a new cache, and the caller's stays as it was. A `DynamicCache` grows: each length has its
    own plan; a `StaticCache` has one for all. Layers write into their tensors, which a recorded function must own: it begins
    with ``cache = optree.tree_map(torch.clone, cache)``; with `donate_argnums` it gets the memory.

    >>> import optree, torch, transformers
    >>> from vescale_fn.recipes import hugging_face
    >>> hugging_face.caches()
    >>> cache = transformers.DynamicCache()
    >>> keys, values = cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    >>> [x.shape for x in optree.tree_leaves(cache)]
    [torch.Size([1, 2, 3, 4]), torch.Size([1, 2, 3, 4])]
    """
    module = importlib.import_module("transformers.cache_utils")
    classes = {x for x in vars(module).values() if inspect.isclass(x) and x.__module__ == module.__name__}
    _nodes.update(cls for cls in classes if cls.__name__.endswith(("Cache", "Layer")))
    for cls in _nodes:
        together: Any = functools.partial(_together, cls)
        optree.register_pytree_node(cls, _apart, together, namespace=optree.registry.__GLOBAL_NAMESPACE)


_nodes: set[type] = set()


def _apart(node: Any) -> tuple[list[Any], Any, list[str]]:
    """The attributes of a cache, or of a layer of one, that hold tensors; the others; the names of the former."""
    held = {name: x for name, x in vars(node).items() if _holds_tensors(x)}
    return list(held.values()), _Others({k: x for k, x in vars(node).items() if k not in held}, list(held)), list(held)


def _holds_tensors(x: Any) -> bool:
    return any(isinstance(y, torch.Tensor) or type(y) in _nodes for y in (x if isinstance(x, list) else [x]))


def _together(cls: Any, others: _Others, children: Any) -> Any:
    node = cls.__new__(cls)
    vars(node).update(others.values, **dict(zip(others.names, children)))
    return node


class _Others:
    """What a cache holds besides tensors, which its structure is made of: with a hash."""

    def __init__(self, values: dict[str, Any], names: list[str]) -> None:
        self.values, self.names = values, names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Others) and (self.values, self.names) == (other.values, other.names)

    def __hash__(self) -> int:
        return hash((*self.values, *self.names))
