"""How ops over space shard: convolution, pooling, resampling, padding. Examples may be split, and mostly channels.

Some of these kernels crash on no elements: each rank has some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .rule import Call, Parts, Row, Rule, T, dims, none

aten = torch.ops.aten
_FILLED = frozenset({"n", "c"})
_CHANNELS = frozenset({"i", "o", "g"})  # of a convolution, which takes no examples


def convolution(call: Call) -> Rule:
    """A sum of products over the input channels; channels in groups may be split by groups, each of which is for itself."""
    groups = call["groups"]
    shapes = {name: a.shape for name, a in call.args.items() if isinstance(a, T)}
    if groups == 1:
        x, w, o = ("n", "i"), ("o", "i"), "o"
        w = w[::-1] if call["transposed"] else w
    else:
        across = shapes["weight"][0] // groups  # of the first dim of the weight, a group's share
        first, other = _grouped(groups, across), _grouped(groups, shapes["input"][1] // groups)
        if call["transposed"]:  # [inputs, outputs of a group]
            x, w, o = ("n", first), (first, None), _grouped(groups, shapes["weight"][1])
        else:  # [outputs, inputs of a group]
            x, w, o = ("n", other), (first, None), first
    out = ("n", o)

    def row(lead: Row, shape: Any) -> Row:
        return (*lead, *none(shape[len(lead) :])) if shape else ()

    def held(weight: torch.Tensor) -> int:  # how many groups a rank has
        return 1 if groups == 1 else weight.shape[0] * groups // shapes["weight"][0]

    if call.name == "convolution":
        ins = (row(x, shapes["input"]), row(w, shapes["weight"]), *(((o,),) if "bias" in shapes else ()))

        def one(*args: Any) -> Any:
            return aten.convolution.default(*args[:-1], held(args[1]))

        return Rule(
            ins,
            (row(out, call.outs[0]),),
            sums=frozenset("i"),
            filled=_CHANNELS,
            joins=(2,) if len(ins) > 2 else (),
            op=one if groups > 1 else None,
        )
    at, count = list(call.args).index("bias_sizes"), list(call.args).index("groups")

    def local(*args: Any) -> Any:  # the sizes of the bias are those of the block
        sizes = None if args[at] is None else [args[0].shape[1]]
        return aten.convolution_backward.default(
            *args[:at], sizes, *args[at + 1 : count], held(args[2]), *args[count + 1 :]
        )

    ins = (row(out, shapes["grad_output"]), row(x, shapes["input"]), row(w, shapes["weight"]))
    outs = tuple(row(lead, shape) for lead, shape in zip((x, w, (o,)), call.outs, strict=True))
    return Rule(ins, outs, sums=frozenset("no"), filled=_CHANNELS, op=local)


def _grouped(groups: int, each: int) -> Any:
    """The label of channels in groups."""
    return "g" if each == 1 else Parts([(groups, "g"), (each, None)])


def planes(ndim: int, sizes: str = "") -> Callable[[Call], Rule | None]:
    """Pooling, resampling and padding over the last `ndim` dims: each example and each channel for itself."""

    def rule(call: Call) -> Rule | None:
        lead = call.tensors[0].shape[:-ndim]
        shapes = [*(t.shape for t in call.tensors), *(s or () for s in call.outs)]
        if len(lead) not in (1, 2) or any(len(s) <= len(lead) or s[: len(lead)] != lead for s in shapes):
            return None
        rows = [(*("n", "c")[2 - len(lead) :], *none(s[len(lead) :])) for s in shapes]
        return Rule(tuple(rows[: len(call.tensors)]), tuple(rows[len(call.tensors) :]), filled=_FILLED, sizes=sizes)

    return rule


def columns(ndim: int) -> Callable[[Call], Rule | None]:
    """im2col, col2im, pixel_shuffle: channels become more channels or fewer, each for itself. Trailing dims are whole."""

    def rule(call: Call) -> Rule | None:
        x, out = call.tensors[0].shape, call.outs[0] or ()
        back = call.name == "col2im"
        lead = len(x) - (2 if back else ndim)
        if lead < 0:
            return None
        labels = (*range(lead), "c")
        ins, outs = ((*labels, *none(s[lead + 1 :])) for s in (x, out))
        return Rule((ins,), (outs,), filled=frozenset(labels))

    return rule


def groups(call: Call) -> Rule:
    """channel_shuffle: the channels are whole."""
    row = ("n", *none(call.tensors[0].shape[1:]))
    return Rule((row,), (row,), filled=_FILLED)


def grid_sample(call: Call) -> Rule:
    """Values read at the places of a grid: examples, and channels, over which the gradient of the grid sums."""
    by_name = {"grid": ("n", None)}
    row = lambda name, shape: (*by_name.get(name, ("n", "c")), *none(shape[2:])) if shape else ()
    ins = tuple(row(name, a.shape) for name, a in call.args.items() if isinstance(a, T))
    outs = tuple(row("grid" if k else "input", shape) for k, shape in enumerate(call.outs))
    return Rule(ins, outs, sums=frozenset("c"), filled=_FILLED)


def fourier(call: Call) -> Rule:
    """Fourier transforms: the dims that are transformed are whole."""
    x, out = call.tensors[0], call.outs[0] or ()
    whole = dims(call["dim"], x.ndim)
    row = tuple(None if d in whole else d for d in range(len(out)))
    return Rule((row,), (row,), filled=frozenset(row) - {None})
