"""What a training step of the recipes' models sends, from first principles: bytes by op and axes. Their README says it in words
("What travels").
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optree

import vescale_fn as vfn
from vescale_fn.recipes.parallel import parallel

Sent = Counter[tuple[str, str]]
# Parameters, by their paths, of a model:
NOT_AGAIN = {  # that the backward pass of a block does not need a second time
    ("gpt", "remat"): r"mlp\.down\.b$",
    ("gpt", "reshard"): r"\.(b|shift)$",
    ("dit", "reshard"): r"ada\.b$",
    ("resnet", "reshard"): r"\.shift$",
}
WHOLE_LENGTH = {  # that meet all positions on each rank of "cp"
    "mixtral": r"moe\.(router|gate|up|down)$",
    "dit": r"^(time|label)\b|\bada\.w$",
}
PART_OF_LENGTH = {  # that meet a part of the positions on each rank of "tp" under "sp"
    "gpt": r"\.(scale|shift)$|\b(out|down)\.b$",
    "llama": r"\bnorm$",
    "mixtral": r"\bnorm$",
}


class Step:
    """A step, and what is asked of it again and again.

    Args:
        text: the parallelisms.
        sizes: of the mesh's axes.
        model, config: a module of the recipes, and its sizes.
        length: positions of a sequence, or pixels along a side. There are as many sequences as ranks.
    """

    def __init__(self, text: str, sizes: Mapping[str, int], model: Any, config: Any, length: int) -> None:
        self.words, self.sizes, self.model, self.config = text.split("+"), sizes, model, config
        self.name, self.text, self.pixels = model.__name__.rpartition(".")[2], text, length
        self.used = [axis for axis, n in sizes.items() if n > 1]
        self.data = [axis for axis in self.used if axis != "tp"]
        self.tp, self.cp, self.ep = (sizes.get(axis, 1) for axis in ("tp", "cp", "ep"))
        self.sequences = math.prod(sizes.values()) // math.prod(sizes[axis] for axis in self.data if axis != "cp")
        self.length = (config.size // config.patch) ** 2 if self.name == "dit" else length
        self.part = -(-self.length // self.cp)
        self.method = next((word for word in self.words if word.startswith("cp")), "")

    def values(self, positions: int, width: int) -> int:
        """The bytes of so many numbers at so many positions of a rank's sequences."""
        return self.sequences * positions * width * 4


def formulas(
    text: str, sizes: Mapping[str, int], model: Any, config: Any, params: Any, specs: Any, length: int
) -> dict[tuple[str, str], int]:
    """What a step sends: bytes by op and axes.

    Args:
        params, specs: the parameters on the mesh, and where they, their gradients and the state lie.
        text, sizes, model, config, length: as for `Step`.
    """
    step, found = Step(text, sizes, model, config, length), Sent()
    rows = [_parameters(step, params, specs), _loss(step)]
    if step.name == "resnet":
        rows.append(_resnet(step))
    else:
        rows += [_tensor_parallel(step), _uneven_heads(step), _context_parallel(step)]
    if step.name == "mixtral":
        rows.append(_experts(step))
    for op, axes, size in (one for row in rows for one in row):
        if axes and size:
            found[op, ",".join(axes)] += size
    return dict(found)


One = tuple[str, Sequence[str], int]


def _parameters(step: Step, params: Any, specs: Any) -> Iterator[One]:
    """Gathered, as many bytes as a rank computes with, and their gradients scattered or added up."""
    mesh, names = vfn.tree.leaves(params)[0].mesh, step.model.NAMES
    alone = step.text.replace("+reshard", "").replace("fsdp", "dp").replace("hsdp", "dp")
    whole = specs.params if "zero" in step.text else parallel(alone, None).specs(params, names, mesh).params
    again = next((word for word in ("remat", "reshard") if word in step.words), "")
    paths = [".".join(map(str, path)) for path in optree.tree_paths(params)]
    for path, x, mine, all_ in zip(paths, *map(vfn.tree.leaves, (params, specs.state, whole)), strict=True):
        matches = lambda table, key, path=path: key in table and re.search(table[key], path)
        parts = [axis for axis in step.used if axis in _axes(mine) and axis not in _axes(all_)]
        summed = [axis for axis in step.data if axis not in _axes(all_)]
        part = math.prod(vfn.shard_shape(tuple(x.shape), mesh, mine)) * x.element_size()
        gathered = part * math.prod(step.sizes[axis] for axis in parts)
        twice = again and path.startswith("blocks") and not matches(NOT_AGAIN, (step.name, again))
        yield "all_gather", parts, gathered * (2 if twice else 1)
        if path == "places" and ("cp" in step.used or "sp" in step.words):
            yield from _places(step, parts, summed, gathered, x.shape[1] * 4)
            continue
        same = {"cp"} if matches(WHOLE_LENGTH, step.name) else set[str]()  # along which the gradient is
        to = [axis for axis in parts if axis not in same]
        yield "reduce_scatter", to, gathered // math.prod(step.sizes[axis] for axis in parts if axis in same)
        apart = ["tp"] if "sp" in step.words and step.tp > 1 and matches(PART_OF_LENGTH, step.name) else []
        yield "all_reduce", [axis for axis in summed if axis not in parts and axis not in same] + apart, part


def _places(step: Step, parts: list[str], summed: list[str], gathered: int, row: int) -> Iterator[One]:
    """The table of positions, of whose gradient each rank has the rows of its own positions."""
    axis = "cp" if "cp" in step.used else "tp"
    held = -(-step.length // step.sizes[axis])
    if axis in parts:
        others = [name for name in parts if name != axis]
        yield "reduce_scatter", others, held * row
        yield "all_to_all", [axis], held * row // math.prod(step.sizes[name] for name in others)
        return
    yield "all_gather", [axis], held * step.sizes[axis] * row
    if parts:
        yield "reduce_scatter", parts, gathered
    else:
        yield "all_reduce", [name for name in summed if name != axis], held * row


def _loss(step: Step) -> Iterator[One]:
    axes = [axis for axis in step.data if (step.name, axis) != ("dit", "cp")]  # its predictions are whole along that
    yield "all_reduce", axes + (["tp"] if "vp" in step.words and step.tp > 1 else []), 4


def _tensor_parallel(step: Step) -> Iterator[One]:
    """Megatron's sums, or under "sp" the scatters and gathers in their place; of the scores a maximum and a sum."""
    if step.tp == 1:
        return
    layers, width, padded = step.config.layers, step.config.dim, -(-step.length // step.tp) * step.tp
    if "sp" in step.words:
        for op in ("all_gather", "reduce_scatter"):
            yield op, ["tp"], (4 * layers + 2 * ("vp" in step.words)) * step.values(padded, width)
    else:
        yield "all_reduce", ["tp"], 4 * layers * step.values(step.part, width)
    if "vp" in step.words:
        yield "all_reduce", ["tp"], 2 * step.values(step.length, 1)
    if step.name == "mixtral":  # the weight of each expert that a token chooses
        yield "all_reduce", ["tp"], layers * step.values(step.length, step.config.chosen)
    if step.name == "dit" and step.cp > 1:
        yield "all_reduce", ["tp"], 2 * layers * step.values(1, width)


def _uneven_heads(step: Step) -> Iterator[One]:
    """Columns of queries, keys and values where "tp" does not divide the heads, and of the gradient of what comes of them."""
    config, tp = step.config, step.tp
    groups = getattr(config, "groups", config.heads)
    positions = step.part if step.cp > 1 else step.length
    whole = lambda columns: step.values(positions, -(-columns // tp) * tp)
    few = config.dim * groups // config.heads
    columns = [3 * config.dim] if step.name in ("gpt", "dit") else [config.dim, few, few]
    if tp > 1 and config.heads % tp:
        yield "all_gather", ["tp"], config.layers * (sum(map(whole, columns)) + whole(config.dim))
    elif tp > 1 and groups % tp:  # keys and values, and their gradients, which ranks that share a head add up
        yield "all_gather", ["tp"], config.layers * 2 * whole(few)
        yield "all_reduce", ["tp"], config.layers * 2 * step.values(positions, few)


def _context_parallel(step: Step) -> Iterator[One]:
    """How attention meets other ranks' keys, and what sees a whole sequence."""
    config, n = step.config, step.cp
    if n == 1:
        return
    share = lambda heads: heads // step.tp if config.heads % step.tp == 0 else heads
    groups = getattr(config, "groups", config.heads)
    each = config.dim // config.heads
    marked = each + (1 if step.length % n else 0)  # and whether a key is there at all
    if step.method == "cp":
        yield "permute", ["cp"], (6 * n - 4) * config.layers * step.values(step.part, share(groups) * marked)
    if step.method == "cp-gather":
        for op in ("all_gather", "reduce_scatter"):
            yield op, ["cp"], 2 * config.layers * n * step.values(step.part, share(groups) * each)
    if step.method == "cp-ulysses":
        heads = -(-share(config.heads) // n) * n
        yield "all_to_all", ["cp"], 8 * config.layers * step.values(step.part, heads * marked)
    if step.name == "mixtral":  # a sequence is gathered before it is routed, and its gradient
        yield "all_gather", ["cp"], 2 * config.layers * step.values(step.part * n, config.dim)
    if step.name == "dit":  # gradients of shifts, scales and gates; the prediction
        yield "all_reduce", ["cp"], step.values(1, (6 * config.layers + 2) * config.dim)
        yield "all_gather", ["cp"], step.values(step.part * n, config.channels * config.patch**2)


def _experts(step: Step) -> Iterator[One]:
    config = step.config
    data = [axis for axis in step.data if axis != "cp"]
    yield "all_reduce", data, 8 * config.layers * config.experts * (1 + ("remat" in step.words))
    if step.ep > 1:
        places = math.ceil(config.capacity * config.chosen * step.length / config.experts)
        experts = -(-config.experts // step.ep) * step.ep
        yield "all_to_all", ["ep"], 4 * config.layers * step.values(experts * places, config.dim)


def _resnet(step: Step) -> Iterator[One]:
    """Of each block what comes out, and the gradient of what goes in."""
    if step.tp == 1:
        return
    before, side = step.config.widths[0], step.pixels
    for i, width in enumerate(width for width in step.config.widths for _ in range(step.config.blocks)):
        after = -(-side // 2) if i and i % step.config.blocks == 0 else side
        yield "all_reduce", ["tp"], step.values(after * after, width) + step.values(side * side, before)
        before, side = width, after


def _axes(spec: Any) -> set[str]:
    return {axis for row in spec for axis in ((row,) if isinstance(row, str) else row or ())}
