"""What an elementwise call of one leaf is among those of others: a call of one of torch's ``_foreach_`` functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ir.graph import HOLDERS, calls, is_aten, memories, name_of, nbytes, value
from ..ir.mapped import LIMIT

OWN = "foreach: nothing else looks at what this writes over"
_aten = torch.ops.aten
_BINARY, _UNARY = ("add", "sub", "mul", "div"), ("sqrt", "neg", "reciprocal", "abs", "exp", "sign")
_TERNARY = {"addcmul": 3, "addcdiv": 3, "lerp": 2}  # and how many of their arguments are lists


@dataclass(frozen=True)
class ListCall:
    """What a call would be among others.

    Args:
        kind: equal for calls that can be one: the operator on lists, numbers and tensors that all share, dtype and device.
        lists: the arguments of which each leaf has its own.
        shared: what comes after the lists.
        in_place: whether the first is written.
        cast: the dtype in which the lists' kernels take the one tensor or number that all share, as a tensor; None: as it is.
    """

    kind: Any
    target: Any
    lists: tuple[fx.Node, ...]
    shared: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    in_place: bool
    cast: torch.dtype | None = None


def mark_own(graph: fx.Graph) -> None:
    """Mark the calls that write over what nothing else will look at: their results may as well be new."""
    if not any(isinstance(node.kwargs.get("out"), fx.Node) for node in calls(graph) if node.kwargs):
        return
    lie = memories(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    last: dict[fx.Node, int] = {}  # the last place where a value is used by this name
    names: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        last[node] = max((place[user] for user in node.users), default=0)
        for root in lie[node]:
            names.setdefault(root, []).append(node)
    for node in calls(graph):
        out = node.kwargs.get("out")
        if isinstance(out, fx.Node) and not any(root.op == "placeholder" for root in lie[out]):
            before = (x for root in lie[out] for x in names[root] if place[x] < place[node])
            if all(last[x] <= place[node] for x in before):
                node.meta[OWN] = True


def call_of(node: fx.Node) -> ListCall | None:
    """A call as one of many; None where it is none of those."""
    v = node.meta.get("val")
    if not is_aten(node) or not isinstance(v, torch.Tensor) or nbytes(v) > LIMIT:
        return None
    name, args, kwargs = name_of(node), list(node.args), dict(node.kwargs)
    out = kwargs.pop("out", None)
    in_place = name.endswith("_")
    if out is not None and name in ("add", "mul") and not kwargs and out is args[1]:  # x + y over y is y + x
        args.reverse()
        in_place = True
    elif out is not None and OWN not in node.meta:
        return None
    name = name.removesuffix("_")
    own = _own(args, v)
    form = None if own is None else _form(name, args, own, set(kwargs))
    if own is None or form is None:
        return None
    shared: tuple[Any, ...] = tuple(args[len(own) :])
    numbers = all(isinstance(x, (int, float)) for x in (*shared, *kwargs.values()))
    to: torch.dtype | None = None
    if form == "shared":
        # torch rounds a number that halves are multiplied by in place to a half, of lists, but not a tensor of one element
        form = "Scalar" if numbers and not (in_place and name == "mul" and v.dtype.itemsize < 4) else "Tensor"
        if not (_as_float(shared[0]) if numbers else _fits(name, shared[0], v)):
            return None
        to = _cast(shared[0], v) if form == "Tensor" else None
    elif form == "Scalar" and not numbers:
        return None
    target = getattr(getattr(_aten, f"_foreach_{name}{'_' if in_place else ''}", None), form, None)
    if target is None:
        return None
    kind = (target, *map(repr, shared), repr(sorted(kwargs.items())), v.dtype, v.device)
    return ListCall(kind, target, tuple(own), shared, tuple(kwargs.items()), in_place, to)


def _own(args: Sequence[Any], v: torch.Tensor) -> list[fx.Node] | None:
    """The arguments of which each leaf has its own: those of its shape. None where they are of other dtypes, or no tensors."""
    tensors = [x for x in args if isinstance(x, fx.Node)]
    if not all(isinstance(value(x), torch.Tensor) for x in tensors):
        return None
    own = [x for x in tensors if (value(x).shape, value(x).device) == (v.shape, v.device)]
    return own if all(value(x).dtype == v.dtype for x in own) else None


def _form(name: str, args: Sequence[Any], own: Sequence[fx.Node], keywords: set[str]) -> str | None:
    """The overload for lists, by which arguments each leaf has of its own; "shared" where all have one second argument."""
    count = len(args)
    if name in _UNARY and count == len(own) == 1 and not keywords:
        return "default"
    if name in _BINARY and count == 2 and own == args and keywords <= {"alpha"}:
        return "List"
    if name in _BINARY and count == 2 and own == args[:1] and not keywords and value(own[0]).ndim:
        return "shared"
    if name in _TERNARY and count == 3 and own == args[: _TERNARY[name]] and keywords <= {"value"}:
        return "Scalar"
    return None


def _fits(name: str, number: Any, v: torch.Tensor) -> bool:
    """Whether a list's kernel takes a second argument that all leaves share: a tensor of one element."""
    n = value(number) if isinstance(number, fx.Node) else None
    if n is None or n.ndim or name not in ("mul", "add", "div") or not n.dtype.is_floating_point:
        return False
    return n.dtype == v.dtype or n.device == v.device


def _as_float(number: Any) -> bool:
    """Whether a float is the same number."""
    return isinstance(number, float) or abs(number) <= 2**53


def _cast(number: Any, v: torch.Tensor) -> torch.dtype | None:
    """The dtype of that argument which gives each leaf the bits that it has by itself."""
    if not isinstance(number, fx.Node):
        return torch.float64
    if value(number).dtype == v.dtype or (v.dtype.itemsize < 4 and v.device.type == "cpu"):
        return None  # a CPU computes halves in float32, with a number that it has not rounded to a half
    return v.dtype  # as torch does with each of the leaves


def shared(graph: fx.Graph, one: ListCall, like: fx.Node) -> tuple[Any, ...]:
    """What all leaves share, as the kernels want it; `like`: a call whose ranks have it alike."""
    if one.cast is None:
        return one.shared
    (number,) = one.shared
    if isinstance(number, fx.Node):
        cast = graph.call_function(_aten._to_copy.default, (number,), {"dtype": one.cast})
        cast.meta.update(number.meta, val=value(number).to(one.cast))
        return (cast,)
    how = {"dtype": one.cast, "device": torch.device("cpu")}
    made = graph.call_function(_aten.scalar_tensor.default, (number,), how)
    made.meta.update(like.meta, val=value(like).new_empty((), **how))
    if HOLDERS in made.meta:
        made.meta[HOLDERS] = (0,) * len(made.meta[HOLDERS])
    return (made,)
