"""The usual causes: why a step gives on a mesh what it does not give on one device, and what to write instead.

Each rule looks at one step whose operands were in order: its name, how the ranks hold its operands, and the axes along
which it communicates. The first rule that has something to say is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..._core.local_types import function_kinds
from ..._core.sharding.spec import P, split_axes
from .relation import Relation


class ProgramStep(NamedTuple):
    """A step as the rules see it."""

    name: str
    over: tuple[str, ...]  # the axes of a collective
    operands: tuple[Relation | None, ...]  # how the ranks hold them, where that is known
    axes: dict[str, int]
    reordered: bool  # whether its result has the right numbers, in another order
    misfit: bool  # whether the ranks' results have another shape than blocks of the right one would have
    own: tuple[int, ...] = ()  # the operands that depend on the rank alone
    spec: P | None = None  # by which its result lies, where that is known


_ADDS = ("add", "sub", "rsub", "radd", "iadd", "isub", "add_", "sub_", "__add__", "__radd__", "__sub__", "__rsub__")
_WITH_BIAS = ("linear", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "bilinear")


def cause(step: ProgramStep) -> tuple[str, str]:
    """Why a step usually goes wrong whose operands are in order, and what to write instead."""
    for rule in (
        _result,
        _summed,
        _moved,
        _by_rank,
        _drawn,
        _bias,
        _unfinished,
        _order,
        _mismatched,
        _number,
        _own_block,
    ):
        found = rule(step)
        if found is not None:
            return found
    return "", ""


USUAL = {  # where a factor comes from that is this power of the size of an axis
    1.0: "a sum over the ranks of what each has whole, of what is summed already, or where the mean is meant",
    -1.0: "a mean over the ranks where the sum is meant, or one rank's part of a sum taken for the whole",
    0.5: "a root of what each rank has of a sum of squares: a norm, a deviation",
    -0.5: "a root of what each rank has of a sum of squares: a norm, a deviation",
}


def _names(axes: Iterable[str]) -> str:
    return " x ".join(map(repr, axes))


def _argument(axes: Sequence[str]) -> str:
    return repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))


def _size(step: ProgramStep, axes: Iterable[str]) -> int:
    return math.prod(step.axes[name] for name in axes)


def _splitting(relation: Relation) -> tuple[str, ...]:
    return tuple(name for names in split_axes(relation.spec, len(relation.spec)) for name in names)


def _result(step: ProgramStep) -> tuple[str, str] | None:
    """What a body returns."""
    if not step.name.startswith("the results of shard_map") or step.operands[:1] in ((), (None,)):
        return None
    (held,) = step.operands
    assert held is not None
    over, axes = _names(held.axes), _argument(held.axes or ("",))
    if held.how == "equal":
        if step.spec is not None and P(*step.spec) == P(*held.spec):
            return None
        return "out_specs puts the ranks' blocks together otherwise than they belong", f"out_specs={held.spec!r}"
    part, fix = (
        ("its part of a sum", f"vfn.psum(x, {axes})")
        if held.how == "sum"
        else ("the mean of its own block", f"vfn.pmean(x, {axes})")
    )
    if step.misfit:
        return (
            f"out_specs puts side by side what the ranks of {over} hold, and each holds {part}",
            f"{fix} of what the body returns, and out_specs={held.spec!r}",
        )
    return (
        f"out_specs says that all ranks of {over} hold the same, but each holds {part}",
        f"{fix} of what the body returns",
    )


def _summed(step: ProgramStep) -> tuple[str, str] | None:
    """psum and pmean of what is no partial sum."""
    if step.name not in ("psum", "pmean", "psum_scatter") or not step.operands or step.operands[0] is None:
        return None
    held = step.operands[0]
    if held.how == "mean" and step.name == "psum":
        n = _size(step, held.axes)
        return (
            f"these are means over the ranks' blocks, and their sum is {n} times the mean",
            f"vfn.pmean(x, {_argument(held.axes)})",
        )
    if held.how == "sum" and step.name == "pmean":
        n = _size(step, held.axes)
        return f"these are parts of a sum, and their mean is 1/{n} of it", f"vfn.psum(x, {_argument(held.axes)})"
    split = [name for name in _splitting(held) if name in step.over]
    if held.how == "equal" and split:
        over = _argument(split)
        return (
            "the ranks hold different blocks of one value, and blocks are not added up",
            f"vfn.all_gather(x, {over}, tiled=True), which puts them together; or no collective",
        )
    if held.how == "equal" and step.name != "pmean":
        fix = (
            "leave it out (a gradient by a value that is the same on all ranks is summed already), or in_specs that "
            f"split over {_names(step.over)} what is summed"
        )
        return "the ranks hold the whole value already, so that the sum counts it once for each of them", fix
    return None


def _moved(step: ProgramStep) -> tuple[str, str] | None:
    if step.name != "ppermute":
        return None
    return (
        "it sends whole blocks from rank to rank, so that what comes of it depends on how many ranks there are",
        "a function to check whose result does not: one that uses all of the blocks, or brings them back",
    )


def _by_rank(step: ProgramStep) -> tuple[str, str] | None:
    if not step.own:
        return None
    which = " and ".join(f"operand {i}" for i in step.own)
    return f"{which} depends on the rank (axis_index, which is 0 on one device), and so does what comes of it", ""


def _drawn(step: ProgramStep) -> tuple[str, str] | None:
    if step.name in function_kinds.DRAWS:
        return (
            "torch draws other numbers for the ranks' blocks than for the whole",
            "the draws of vfn.random, with a key and with the spec of what is drawn",
        )
    if "random" not in step.name:
        return None
    lying = [r.spec for r in step.operands[1:] if r is not None and _splitting(r)]
    spec = repr(lying[-1]) if lying else "P(...)"
    return (
        "with one key on all ranks each draws the same numbers for its own block; one device draws for the whole",
        f"spec={spec} in the draw, by which each rank draws its block of the one whole draw",
    )


def _bias(step: ProgramStep) -> tuple[str, str] | None:
    """What is the same on all ranks, added to partial sums."""
    held = [r for r in step.operands if r is not None]
    over: tuple[str, ...] = ()
    if step.name in _ADDS:
        over = next((r.axes for r in held if r.how == "sum"), ())
    elif step.name in _WITH_BIAS and len(held) == 3:
        over = tuple(name for name in _splitting(held[0]) if name in _splitting(held[1]))
    whole = [
        i for i, r in enumerate(step.operands) if r is not None and r.how == "equal" and not {*_splitting(r)} & {*over}
    ]
    alone = len(step.operands) == 1  # the other operand is a number
    if not over or not (whole or alone):
        return None
    added = "the number" if alone else f"operand {whole[-1]}"
    return (
        f"{added} is added on every rank of {_names(over)}, so that the sum counts it {_size(step, over)} times",
        f"add it after vfn.psum(x, {_argument(over)})",
    )


def _unfinished(step: ProgramStep) -> tuple[str, str] | None:
    """An op that is not linear, of parts of a sum or of a mean."""
    for held in step.operands:
        if held is not None and held.how != "equal":
            collective = "psum" if held.how == "sum" else "pmean"
            part = "a part of the sum" if held.how == "sum" else "the mean of its own block"
            over, axes = _names(held.axes), _argument(held.axes)
            if step.name == "grad":
                return (
                    f"what is differentiated is, on each rank of {over}, {part}; by a value that is the same on all "
                    "ranks, the gradients of all of them are added up",
                    f"vfn.{collective}(loss, {axes}) in the function that is differentiated",
                )
            return (
                f"on each rank of {over} it is applied to {part}, not to the whole",
                f"vfn.{collective}(x, {axes}) before it",
            )
    return None


def _order(step: ProgramStep) -> tuple[str, str] | None:
    if not step.reordered:
        return None
    return (
        "the numbers are the same, in another order",
        "the axes of a tuple in one order, in the spec and in the collective: major first",
    )


def _mismatched(step: ProgramStep) -> tuple[str, str] | None:
    split = {i: _splitting(r) for i, r in enumerate(step.operands) if r is not None and _splitting(r)}
    if len(split) < 2 or len(set(split.values())) == 1:
        return None
    said = " and ".join(f"operand {i} over {_names(names)}" for i, names in split.items())
    return (
        f"blocks meet that do not belong together: {said}",
        "in_specs that split the dims which meet over the same axes, in the same order",
    )


_ELEMENTWISE = frozenset(
    "add sub mul div true_divide pow where neg abs exp log sqrt rsqrt square tanh sigmoid relu gelu silu maximum minimum "
    "clamp lerp addcmul addcdiv sin cos eq ne lt le gt ge".split()
)


def _number(step: ProgramStep) -> tuple[str, str] | None:
    """An op on elements, whose operands are in order: what is left is a Python number."""
    name = step.name.strip("_")
    if not {name, name[1:]} & _ELEMENTWISE:  # also radd, itruediv, ...
        return None
    return (
        "its operands are in order: a number in it is another on the mesh, as vfn.axis_size or the size of a block is",
        "",
    )


_ON_BLOCKS = (  # how the ranks' results of functions of a block make up that of the whole
    (("norm", "vector_norm", "linalg_norm", "linalg_vector_norm"), "vfn.psum(x.square().sum(), {}).sqrt()"),
    (
        ("var", "std", "layer_norm", "rms_norm", "batch_norm", "group_norm", "normalize"),
        "the mean by vfn.pmean(x.mean(dim), {0}), then vfn.pmean((x - mean).square().mean(dim), {0})",
    ),
    (
        ("softmax", "log_softmax", "logsumexp"),
        "m = vfn.pmax(x.detach().amax(dim), {0}), and vfn.psum((x - m).exp().sum(dim), {0})",
    ),
    (("max", "amax"), "vfn.pmax of it, over {}"),
    (("min", "amin"), "vfn.pmin of it, over {}"),
)


def _own_block(step: ProgramStep) -> tuple[str, str] | None:
    over = next((names for r in step.operands if r is not None and (names := _splitting(r))), ())
    if not over:
        return None
    way = next((way for names, way in _ON_BLOCKS if step.name in names), "vfn.all_gather(x, {}, ...) before it")
    return f"each rank of {_names(over)} applies it to its own block, where one device has the whole", way.format(
        _argument(over)
    )
