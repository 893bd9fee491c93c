"""The shortest way to call an operator from Python: ``x * y`` for ``aten.mul.Tensor(x, y)``.

To call an ``OpOverload`` takes half a microsecond longer than to call the function or the method of torch's that leads to
the same operator. Which leads where depends on the kinds of the arguments, so each way is tried, on tensors that hold
nothing, under a mode that notes which operator is asked for, with what, and goes no further. Only a way that asks for the
same operator with the same arguments as the `OpOverload` itself is taken.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..ir.graph import Step, is_aten, name_of, value
from ..ir.row_by_row import through

_INFIX = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "neg": operator.neg}
_SIGN = {"add": "+", "sub": "-", "mul": "*", "div": "/", "neg": "-"}
_SIZES = ("view", "permute", "expand")  # methods that take a list of sizes as so many arguments


@dataclass(frozen=True)
class Way:
    """How a call is written: as an infix sign, a method (its sizes as single arguments, perhaps), or a function."""

    kind: str
    name: str
    call: Callable[..., Any]


def way(node: fx.Node) -> Way | None:
    """How a node's call is written the short way; None where only the operator itself leads to the same."""
    if not is_aten(node) or node.target.namespace != "aten":  # type: ignore[union-attr]
        return None
    key = (node.target, _kinds(node.args), _kinds(tuple(node.kwargs.items())))
    if key not in _found:
        args, kwargs = fx.map_arg((node.args, node.kwargs), _stand_in)
        _found[key] = _shortest(node, args, kwargs)  # type: ignore[arg-type]
    return _found[key]


def of_each_row(node: fx.Node) -> Callable[..., list[Any]] | None:
    """What runs a call that goes `through` lists: a loop that calls its operator the short way; None for any other call."""
    run: Any = node.target.run if isinstance(node.target, Step) else None
    if getattr(run, "func", None) is not through:
        return None
    op, at, names, kwargs = (run.keywords[name] for name in ("op", "at", "names", "kwargs"))
    graph, inputs = fx.Graph(), [f"x{i}" for i in range(len(node.args))]
    row: list[Any] = list(node.args)
    for i, x in enumerate(row):
        if isinstance(x, fx.Node):
            row[i] = graph.placeholder(inputs[i])
            row[i].meta["val"] = value(x)[0] if i in at else value(x)
    count = len(row) - len(names)
    short = way(graph.call_function(op, tuple(row[:count]), dict(zip(names, row[count:])) | dict(kwargs)))
    call = torch_internals.direct(op) if short is None else short.call
    if short is not None and short.kind == "method":
        call = getattr(torch.Tensor, short.name)
    own = [f"y{i}" if i in at else x for i, x in enumerate(inputs)]
    given = [*own[:count], *(f"{name}={x}" for name, x in zip(names, own[count:])), *(f"{k}={k}" for k, _ in kwargs)]
    lists, rows = ([xs[i] for i in at] for xs in (inputs, own))
    columns = f"zip({', '.join(lists)})" if len(at) > 1 else lists[0]
    source = f"lambda {', '.join(inputs)}: [call({', '.join(given)}) for {', '.join(rows)} in {columns}]"
    return eval(source, {"call": call, **dict(kwargs)})


_found: dict[Any, Way | None] = {}  # as many as there are operators and kinds of arguments in plans


def _kinds(x: Any) -> Any:
    """What of arguments decides where a call leads: types, and of tensors whether they are numbers."""
    if isinstance(x, fx.Node):
        v = value(x)
        return ("tensor", v.dtype, v.ndim == 0) if isinstance(v, torch.Tensor) else ("value", type(v))
    if isinstance(x, (list, tuple)):
        return tuple(map(_kinds, x))
    return x if isinstance(x, str) else type(x)


def _stand_in(node: fx.Node) -> Any:
    v = value(node)
    return torch.empty((1,) * v.ndim, dtype=v.dtype, device="meta") if isinstance(v, torch.Tensor) else v


def _shortest(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Way | None:
    operator_: Any = node.target
    wanted = torch_internals.asked_for(operator_, args, kwargs)
    for candidate in _ways(node, args, kwargs):
        if wanted is not None and _same(torch_internals.asked_for(candidate.call, args, kwargs), wanted):
            return candidate
    return None


def _ways(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Way]:
    """From the shortest on."""
    name = name_of(node)
    if not args or not isinstance(args[0], torch.Tensor):
        methods = False
    else:
        methods = hasattr(torch.Tensor, name) and not name.startswith("__")
    if name in _INFIX and not kwargs:
        yield Way("infix", _SIGN[name], _INFIX[name])
    if methods and name in _SIZES and len(args) == 2 and not kwargs:
        yield Way("sizes", name, lambda x, sizes: getattr(x, name)(*sizes))
    if methods:
        yield Way("method", name, lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs))
    for table in torch_internals.function_tables:
        if hasattr(table, name):
            yield Way("function", name, getattr(table, name))


def _same(a: Any, b: Any) -> bool:
    """Whether two calls are the same: the same tensors, equal numbers of one type."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return type(a) is type(b) and (a == b or a != a and b != b)
