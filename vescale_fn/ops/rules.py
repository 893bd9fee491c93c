"""The table: which dims of an op's tensors may be split together, and what must be added up afterwards.

A rule gives every dim of every tensor argument and result a label. Dims with one label are split alike; a dim without a
label (None) must be whole. That is all that an op's mathematics says; which axes then split which label is the
interpreter's business. A label that is summed over (`sums`) and missing from a result leaves that result a partial sum.

One function serves a class of ops. To add an op, add its name to a class; to add a class, write the function and list it
in `RULES` at the end. What has no rule here is asked of DTensor's own propagator where that is proved, and else computed
whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

aten = torch.ops.aten
Label = Any
Row = tuple[Label, ...]


class T(NamedTuple):
    """A tensor argument: its place among the op's tensors, and its global shape."""

    index: int
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)


@dataclass(frozen=True)
class Call:
    """One call of an op: its arguments by name, tensors as `T`, and the shapes of its results."""

    name: str
    args: dict[str, Any]
    tensors: tuple[T, ...]
    outs: tuple[tuple[int, ...] | None, ...]

    def __getitem__(self, name: str) -> Any:
        return self.args[name]


@dataclass(frozen=True)
class Rule:
    """What may be split together."""

    ins: tuple[Row, ...]
    outs: tuple[Row, ...]
    sums: frozenset[Label] = frozenset()  # split and missing from a result: that result is a partial sum
    even: frozenset[Label] = frozenset()  # may be split only where every size under it divides
    linear: tuple[int, ...] = ()  # the arguments in which, together, the op is linear: all partial in, partial out
    shape_only: tuple[int, ...] = ()  # arguments of which only the shape is read
    joins: tuple[int, ...] = ()  # arguments that are added once to a sum
    fold: str = "sum"  # how the parts of a missing label are put together: sum, max, min
    op: Callable[..., Any] | None = None  # what runs on the blocks, where it is not the op itself
    sizes: str = ""  # the argument that holds the first result's global shape


def _whole(shape: Sequence[int], dims: Sequence[int], tag: Any = 0) -> Row:
    dims = {d % len(shape) for d in dims} if len(shape) else set()
    return tuple(None if d in dims else (tag, d) for d in range(len(shape)))


def _dims(dim: Any, ndim: int) -> list[int]:
    """A dim argument (None or empty: all) as a list."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(ndim))
    return [d % ndim if ndim else 0 for d in (dim if isinstance(dim, (list, tuple)) else (dim,))]


# --- elementwise ------------------------------------------------------------------------------------------------------

_LINEAR = {"add", "sub", "neg", "clone", "_to_copy", "copy", "detach", "alias", "positive"}  # in all arguments together
_SCALING = {"mul", "div"}  # linear in one argument when the other is a number


def _broadcast(shape: tuple[int, ...], out: tuple[int, ...]) -> Row:
    shift = len(out) - len(shape)
    return tuple(d + shift if size == out[d + shift] else None for d, size in enumerate(shape))


def elementwise(call: Call) -> Rule:
    """Every dim is split alike, up to broadcasting."""
    out = call.outs[0]
    linear: tuple[int, ...] = ()
    tensors = call.tensors
    if call.name in _LINEAR and not isinstance(call.args.get("other"), (int, float, complex)):
        linear = tuple(t.index for t in tensors)
    elif call.name in _SCALING and call.args.get("rounding_mode") is None:
        if len(tensors) == 1 or not tensors[1].shape:
            linear = (0,)
        elif call.name == "mul" and not tensors[0].shape:
            linear = (1,)
    return Rule(tuple(_broadcast(t.shape, out) for t in tensors), tuple(map(_same, call.outs)), linear=linear)


def _same(shape: tuple[int, ...]) -> Row:
    return tuple(range(len(shape)))


def like(call: Call) -> Rule:
    """A new tensor of the argument's shape, whatever is in it."""
    return Rule((_same(call.tensors[0].shape),), (_same(call.outs[0]),), shape_only=(0,))


def fill(call: Call) -> Rule:
    """The argument's layout, whatever is in it; the value is one number."""
    return Rule((_same(call.tensors[0].shape), *((),) * (len(call.tensors) - 1)), (_same(call.tensors[0].shape),))


def new(call: Call) -> Rule:
    """A new tensor of a shape of its own: whole on every rank."""
    return Rule(tuple((None,) * t.ndim for t in call.tensors), ((None,) * len(call.outs[0]),), shape_only=(0,))


# --- contractions -----------------------------------------------------------------------------------------------------


def contraction(equation: str, joins: bool = False) -> Callable[[Call], Rule]:
    """An einsum; with `joins`, of all arguments but the first, which is added to it."""
    ins, out = equation.split("->")
    rows = tuple(map(tuple, ins.split(",")))

    def rule(call: Call) -> Rule:
        sums = {label for row in rows for label in row} - set(out)
        first = (_pick_broadcast(call.tensors[0].shape, tuple(out), call.outs[0]),) if joins else ()
        return Rule((*first, *rows), (tuple(out),), frozenset(sums), joins=(0,) if joins else ())

    return rule


def _pick_broadcast(shape: tuple[int, ...], labels: Row, out: tuple[int, ...]) -> Row:
    shift = len(out) - len(shape)
    return tuple(labels[d + shift] if size == out[d + shift] else None for d, size in enumerate(shape))


# --- reductions -------------------------------------------------------------------------------------------------------


def reduction(call: Call, fold: str = "") -> Rule:
    """Some dims are folded into one number: whole, unless `fold` says how their parts are put together."""
    x = call.tensors[0]
    dims = set(_dims(call.args.get("dim"), x.ndim))
    keep = call.args.get("keepdim", False)
    row = tuple(None if d in dims and not fold else d for d in range(x.ndim))
    out: Row = tuple(None if d in dims else d for d in range(x.ndim) if keep or d not in dims)
    return Rule((row,), (out,) * len(call.outs), frozenset(dims) if fold else frozenset(), fold=fold or "sum")


def total(call: Call) -> Rule:
    """sum: the parts add up."""
    return replace(reduction(call, "sum"), linear=(0,))


def mean(call: Call) -> Rule:
    """mean: the parts of the sum add up, each divided by the global count."""
    x = call.tensors[0]
    dims = _dims(call.args.get("dim"), x.ndim)
    count = math.prod(x.shape[d] for d in set(dims))

    def scaled_sum(block: torch.Tensor, *_: Any, dtype: Any = None, **__: Any) -> torch.Tensor:
        dtype = dtype or block.dtype
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        return (block.sum(dims, keepdim=call.args.get("keepdim", False), dtype=wide) / count).to(dtype)

    return replace(total(call), op=scaled_sum)


def extreme(fold: str) -> Callable[[Call], Rule]:
    """amax, amin, any, all: the parts are put together by a maximum or a minimum."""
    return functools.partial(reduction, fold=fold)


def max_or_min(call: Call) -> Rule:
    """max and min: of two tensors, along a dim with indices, or of everything."""
    if "other" in call.args:
        return elementwise(call)
    return reduction(call, "" if "dim" in call.args else call.name)


# --- views and shapes -------------------------------------------------------------------------------------------------


def view(call: Call) -> Rule:
    """A new shape for the same elements in the same order: leading dims of each group of dims correspond."""
    x, out = call.tensors[0].shape, call.outs[0]
    row, new_row = [None] * len(x), [None] * len(out)
    even = set()
    if math.prod(x):
        for label, (ins, outs) in enumerate(_groups(x, out)):
            if ins and outs:
                row[ins[0]] = new_row[outs[0]] = label
                if [x[d] for d in ins] != [out[d] for d in outs]:
                    even.add(label)
    return Rule((tuple(row),), (tuple(new_row),), even=frozenset(even), linear=(0,),
                sizes="size" if "size" in call.args else "shape")  # fmt: skip


def _groups(x: Sequence[int], out: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of dims with equal products, dims of size 1 left out."""
    a = [d for d, size in enumerate(x) if size != 1]
    b = [d for d, size in enumerate(out) if size != 1]
    found = []
    while a and b:
        ins, outs = [a.pop(0)], [b.pop(0)]
        p, q = x[ins[0]], out[outs[0]]
        while p != q:
            if p < q:
                ins.append(a.pop(0))
                p *= x[ins[-1]]
            else:
                outs.append(b.pop(0))
                q *= out[outs[-1]]
        found.append((ins, outs))
    return found


def expand(call: Call) -> Rule:
    """New dims, and dims of size 1 repeated."""
    x, out = call.tensors[0].shape, call.outs[0]
    row = _broadcast(x, out)
    return Rule((row,), (tuple(d if d in row else None for d in range(len(out))),), linear=(0,), sizes="size")


def permute(call: Call) -> Rule:
    """The dims in another order."""
    n = call.tensors[0].ndim
    if call.name == "t":
        order = list(range(n))[::-1]
    elif call.name == "permute":
        order = [d % n for d in call["dims"]]
    else:
        order = list(range(n))
        if n:
            a, b = call["dim0"] % n, call["dim1"] % n
            order[a], order[b] = order[b], order[a]
    return Rule((tuple(range(n)),), (tuple(order),), linear=(0,))


def squeeze(call: Call) -> Rule:
    """Dims of size 1 taken away, or one put in."""
    x = call.tensors[0]
    if call.name == "unsqueeze":
        at = call["dim"] % (x.ndim + 1)
        return Rule((_same(x.shape),), ((*range(at), None, *range(at, x.ndim)),), linear=(0,))
    gone = {d for d in _dims(call.args.get("dim"), x.ndim) if x.ndim and x.shape[d] == 1}
    row = tuple(None if d in gone else d for d in range(x.ndim))
    return Rule((row,), (tuple(d for d in range(x.ndim) if d not in gone),), linear=(0,))


def slicing(call: Call) -> Rule:
    """Part of one dim: whole there, unless all of it is taken."""
    x = call.tensors[0]
    dim = call["dim"] % x.ndim
    if call.name == "slice" and call.outs[0] == x.shape and call["step"] == 1:
        return Rule((_same(x.shape),), (_same(x.shape),), linear=(0,))
    row = tuple(None if d == dim else d for d in range(x.ndim))
    out = tuple(d for d in row if d is not None) if call.name in ("select", "unbind") else row
    return Rule((row,), (out,) * len(call.outs), linear=(0,))


def cat(call: Call) -> Rule:
    """Tensors joined along one dim, or along a new one."""
    out = call.outs[0]
    dim = call["dim"] % len(out)
    row = tuple(None if d == dim else d for d in range(len(out)))
    if call.name == "stack":
        return Rule((row[:dim] + row[dim + 1 :],) * len(call.tensors), (row,), linear=tuple(range(len(call.tensors))))
    rows = tuple(row if t.ndim == len(out) else (None,) * t.ndim for t in call.tensors)
    return Rule(rows, (row,), linear=tuple(range(len(call.tensors))))


# --- along a dim, indices ---------------------------------------------------------------------------------------------


def along(call: Call, names: Sequence[str] = ("dim", "dims")) -> Rule:
    """Ops that work along some dims (softmax, cumsum, sort, flip, ...): whole there, split anywhere else."""
    ndim = max(t.ndim for t in call.tensors)
    dim = next((call.args[name] for name in names if name in call.args), None)
    whole = set(_dims(dim, ndim)) if dim is not None else set(range(ndim))
    rows = [tuple(None if d in whole else d for d in range(t.ndim)) if t.ndim == ndim else (None,) * t.ndim
            for t in call.tensors]  # fmt: skip
    outs = tuple(tuple(None if d in whole else d for d in range(len(shape))) for shape in call.outs)
    return Rule(tuple(rows), outs)


def last_two(call: Call) -> Rule:
    """Ops on matrices (triu, tril): batches may be split."""
    row = _whole(call.tensors[0].shape, (-2, -1))
    return Rule((row,), (row,), linear=(0,))


def embedding(call: Call) -> Rule:
    """Rows of a table: the indices and the width may be split."""
    indices = call["indices"]
    row = tuple(("i", d) for d in range(indices.ndim))
    return Rule(((None, "width"), row), ((*row, "width"),))


def embedding_backward(call: Call) -> Rule:
    """The transpose of `embedding`: sums over the indices."""
    row = tuple(("i", d) for d in range(call["indices"].ndim))
    return Rule(((*row, "width"), row), ((None, "width"),), sums=frozenset(row))


def gather(call: Call) -> Rule:
    """gather and scatter: whole along the dim; other dims may be split where all tensors have one size."""
    x = call["self"]
    dim = call["dim"] % max(x.ndim, 1)
    sizes = [t.shape for t in call.tensors if t.ndim == x.ndim]
    shared = [d for d in range(x.ndim) if d != dim and all(s[d] == x.shape[d] for s in sizes)]
    def row(shape: tuple[int, ...], is_index: bool) -> Row:
        return tuple(d if d in shared else ("i" if d == dim and is_index else None) for d in range(len(shape)))

    read = call.name == "gather"
    rows = tuple(row(t.shape, read and t.index == 1) if t.ndim == x.ndim else (None,) * t.ndim for t in call.tensors)
    return Rule(rows, (row(call.outs[0], read),))


def index_select(call: Call) -> Rule:
    """Rows by number: the index may be split, and every other dim."""
    x = call["self"]
    dim = call["dim"] % max(x.ndim, 1)
    row = tuple(None if d == dim else d for d in range(x.ndim))
    return Rule((row, ("i",) * call["index"].ndim), (tuple("i" if d == dim else d for d in range(len(call.outs[0]))),))


def index(call: Call) -> Rule | None:
    """x[i, j]: whole where it is indexed; the indices may be split, and every dim that is not indexed."""
    x, places = call["self"], call["indices"]
    where = [d for d, i in enumerate(places) if i is not None]
    if not where or where != list(range(where[0], where[-1] + 1)):
        return None
    tensors = [places[d] for d in where]
    broadcast = torch.broadcast_shapes(*(t.shape for t in tensors))
    labels = tuple(("i", d) for d in range(len(broadcast)))
    row = tuple(None if d in where else d for d in range(x.ndim))
    rows = tuple(_pick_broadcast(t.shape, labels, broadcast) for t in tensors)
    return Rule((row, *rows), ((*row[: where[0]], *labels, *row[where[-1] + 1 :]),))


# --- layers -----------------------------------------------------------------------------------------------------------


def norm(call: Call) -> Rule:
    """layer_norm and rms_norm: the leading dims may be split; gradients of the weights sum over them."""
    x = call["input"]
    lead = x.ndim - len(call["normalized_shape"])

    def row(shape: tuple[int, ...]) -> Row:
        leads = len(shape) == x.ndim and shape[:lead] == x.shape[:lead]
        return tuple(d if leads and d < lead else None for d in range(len(shape)))

    return Rule(tuple(row(t.shape) if t.ndim == x.ndim else (None,) * t.ndim for t in call.tensors),
                tuple(row(s or ()) for s in call.outs), sums=frozenset(range(lead)))  # fmt: skip


def attention(call: Call) -> Rule:
    """scaled_dot_product_attention: batch and heads may be split."""
    q = call["query"]
    same_heads = call["key"].shape[1] == q.shape[1]

    def row(shape: tuple[int, ...]) -> Row:
        if len(shape) < 3:
            return (None,) * len(shape)
        batch = "batch" if shape[0] == q.shape[0] else None
        head = "head" if shape[1] == q.shape[1] and same_heads else None
        return (batch, head, *(None,) * (len(shape) - 2))

    return Rule(tuple(row(t.shape) for t in call.tensors), tuple(row(s or ()) for s in call.outs))


def convolution(call: Call) -> Rule:
    """Convolutions: examples may be split."""
    def row(t: T) -> Row:
        return tuple("n" if d == 0 and t.index == 0 else None for d in range(t.ndim))

    return Rule(tuple(map(row, call.tensors)), (("n", *(None,) * (len(call.outs[0]) - 1)),))


_PLAIN, _MEAN, _SUM = 0, 1, 2


def loss(call: Call) -> Rule:
    """Losses of two tensors of one shape: a mean is the sum of the parts over the global count."""
    x = call["self"] if "self" in call.args else call["input"]
    if call["reduction"] == _PLAIN:
        return elementwise(call)
    rows = tuple(_broadcast(t.shape, x.shape) for t in call.tensors)
    count = math.prod(x.shape) if call["reduction"] == _MEAN else 1
    at = list(call.args).index("reduction")
    overload = getattr(aten, call.name)

    def scaled_sum(*args: Any, **kwargs: Any) -> torch.Tensor:
        return overload(*args[:at], _SUM, *args[at + 1 :], **kwargs) / count

    return Rule(rows, ((),), sums=frozenset(range(len(x.shape))), op=scaled_sum)


def loss_backward(call: Call) -> Rule:
    """The gradient of such a loss: of a mean, with the global count."""
    x = call["self"]
    out = call.outs[0]
    count = math.prod(x.shape) if call["reduction"] == _MEAN else 1
    at = list(call.args).index("reduction")
    overload = getattr(aten, call.name)

    def scaled(grad: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kind = call["reduction"] if call["reduction"] == _PLAIN else _SUM
        return overload(grad / count, *args[: at - 1], kind, *args[at:], **kwargs)

    return Rule(tuple(_broadcast(t.shape, out) for t in call.tensors), (_same(out),), op=scaled)


def nll_backward(call: Call) -> Rule | None:
    """The gradient of the negative log likelihood, example by example (the total weight is given)."""
    x = call["self"]
    if x.ndim != 2 or call["reduction"] == _PLAIN:
        return None
    rows = {"self": ("n", None), "target": ("n",), "weight": (None,)}
    named = {t.index: rows.get(name, ()) for name, t in call.args.items() if isinstance(t, T)}
    return Rule(tuple(named[t.index] for t in call.tensors), (("n", None),))


# --- the table --------------------------------------------------------------------------------------------------------

_CLASSES: dict[Callable[[Call], Rule | None], str] = {
    elementwise: "clone _to_copy copy detach alias masked_fill lift_fresh polar complex",
    like: "zeros_like ones_like full_like empty_like",
    fill: "fill zero",
    new: "new_zeros new_ones new_full new_empty new_empty_strided",
    contraction("mk,kn->mn"): "mm",
    contraction("bmk,bkn->bmn"): "bmm",
    contraction("mk,k->m"): "mv",
    contraction("k,k->"): "dot vdot",
    contraction("mk,kn->mn", joins=True): "addmm",
    contraction("bmk,bkn->bmn", joins=True): "baddbmm",
    total: "sum",
    mean: "mean",
    extreme("max"): "amax any",
    extreme("min"): "amin all",
    max_or_min: "max min",
    reduction: "argmax argmin prod var std logsumexp median nanmedian linalg_vector_norm var_mean std_mean count_nonzero",
    view: "view _unsafe_view reshape",
    expand: "expand",
    permute: "t transpose permute",
    squeeze: "squeeze unsqueeze",
    slicing: "slice select split split_with_sizes unbind narrow",
    cat: "cat stack",
    along: "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod logcumsumexp sort "
    "argsort topk flip roll",
    last_two: "triu tril",
    embedding: "embedding",
    embedding_backward: "embedding_dense_backward",
    gather: "gather scatter scatter_add",
    index_select: "index_select",
    index: "index",
    norm: "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward",
    attention: "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward",
    convolution: "convolution",
    loss: "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy",
    loss_backward: "mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward "
    "binary_cross_entropy_backward",
    nll_backward: "nll_loss_backward",
}
RULES: dict[str, Callable[[Call], Rule | None]] = {
    name: rule for rule, names in _CLASSES.items() for name in names.split()
}


def find(func: Any) -> Callable[[Call], Rule | None] | None:
    """The rule of an overload, or None; an in-place op has the rule of its out-of-place twin."""
    name = func._schema.name.removeprefix("aten::")  # noqa: SLF001
    if not func._schema.name.startswith("aten::"):  # noqa: SLF001
        return None
    rule = RULES.get(name) or RULES.get(name.removesuffix("_"))
    if rule is None and torch.Tag.pointwise in func.tags:
        rule = elementwise
    return rule
