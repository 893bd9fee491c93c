"""A plan's graph as data for JSON, and back: names of operators, numbers, shapes, layouts; nothing that runs when it is read.

A value is a JSON number, string, bool or null where it is one; otherwise an object with one entry, whose name says what it is.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.base.errors import TransformError
from ..._core.base.messages import report, short
from ..._core.distributed.collectives import Collective
from ..._core.sharding.spec import P, rebuild_spec
from ..ir import graph as plan
from ..ir.branches import Branches, While
from ..ir.loop import Loop
from ..ir.mapped import Mapped
from ..ir.nested import Nested
from ..ir.per_rank import PerRank, Tables
from ..ir.rotated_loop import Rotated
from ..ir.shared_bodies import Shared
from ..passes.overlap import Start
from . import operators, steps

Mesh = Any
_TORCH = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_NAMED = {**_TORCH, "op": torch_internals.OpOverload}
# taking parts out of results, and what is computed of floats among the arguments
_NUMBERS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs")
_NESTED: dict[str, type[Nested]] = {
    "loop": Loop,
    "rotated": Rotated,
    "branches": Branches,
    "while": While,
    "shared": Shared,
    "mapped": Mapped,
}
_PYTHON = {getattr(operator, name): name for name in ("getitem", *_NUMBERS)}


def _own(kind: type[Nested]) -> list[dataclasses.Field[Any]]:
    """What a kind of calls with bodies says of itself besides these."""
    return [x for x in dataclasses.fields(kind) if x.name not in {y.name for y in dataclasses.fields(Nested)}]


def unsaveable(what: str, fix: str) -> TransformError:
    """Why a plan cannot be saved."""
    return TransformError(report("save_plan", f"{what} cannot be saved", fix=fix))


class GraphWriter:
    """Turns graphs, layouts and trees into data; collects the meshes that they name.

    Args:
        anywhere: whether devices are told by their types alone, as for ranks of which each has its own.

    Attributes:
        meshes: by the place under which the data names each.
        numbers: those of which each rank has its own, for each of the ranks that the data is for, with their places.
        tables: these as well.
    """

    def __init__(self, anywhere: bool = False) -> None:
        self._anywhere = anywhere
        self.meshes: list[Mesh] = []
        self.numbers: dict[tuple[int, ...], int] = {}
        self.tables: list[Tables] = []
        self._written: dict[Nested, int] = {}  # the calls with bodies, by their places

    def graph(self, graph: fx.Graph) -> list[dict[str, Any]]:
        """A graph's nodes in order; a node names others by their places."""
        places = {node: i for i, node in enumerate(graph.nodes)}
        return [self._node(node, places) for node in graph.nodes]

    def _node(self, node: fx.Node, places: Mapping[fx.Node, int]) -> dict[str, Any]:
        row = {
            "op": node.op,
            "name": node.name,
            "args": self.value(tuple(node.args), places),
            "line": node.meta.get("line", ""),
            "meta": {key: True for key, x in node.meta.items() if x is True or key == "again"},
        }
        if node.kwargs:
            row["kwargs"] = {name: self.value(x, places) for name, x in node.kwargs.items()}
        if node.op != "output":
            row["val"] = self._described(plan.value(node))
        if node.op == "call_function":
            row["target"] = self._target(node.target)
        return row

    def _target(self, target: Any) -> Any:
        if target in _PYTHON:
            return _PYTHON[target]
        if isinstance(target, torch_internals.OpOverload):
            return {"op": torch_internals.overload_name(target)}
        if isinstance(target, Nested):
            if target in self._written:
                return {"same": self._written[target]}
            kind = next(name for name, kind in _NESTED.items() if type(target) is kind)
            fields = {x.name: self.value(getattr(target, x.name)) for x in _own(type(target))}
            data = {"nested": kind, "fields": fields, "bodies": list(map(self.graph, target.bodies))}
            self._written[target] = len(self._written)
            return data
        if isinstance(target, plan.Step):
            found = steps.described(target)
            if found is None:
                raise unsaveable(f"the plan's step {target.name}", "leave it out of what is saved")
            name, given = found
            return {"step": name, "given": {key: self.value(x) for key, x in given.items()}}
        if not isinstance(target, Collective):
            raise unsaveable(f"the plan's call of {short(target)}", "leave it out of what is saved")
        fields = {**vars(target), "mesh": self.mesh(target.mesh)}
        return {"collective": {key: self.value(x) for key, x in fields.items()}, "starts": isinstance(target, Start)}

    def _described(self, value: Any) -> Any:
        """A value without values: a tensor's shape, strides, dtype and device; or of several."""
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            return {"tensor": [list(value.shape), list(value.stride()), dtype, self._device(value.device)]}
        if isinstance(value, (list, tuple)):
            return {type(value).__name__: [self._described(x) for x in value]}
        return self.value(value)

    def _of_ranks(self, x: PerRank | Tables) -> dict[str, int]:
        if isinstance(x, PerRank):
            return {"ranks": self.numbers.setdefault(x.values, len(self.numbers))}
        self.tables.append(x)
        return {"tables": len(self.tables) - 1}

    def _device(self, device: torch.device) -> str:
        return device.type if self._anywhere else str(device)

    def mesh(self, mesh: Mesh) -> int:
        """The place of a mesh among `meshes`."""
        for i, known in enumerate(self.meshes):
            if known is mesh or known == mesh:
                return i
        self.meshes.append(mesh)
        return len(self.meshes) - 1

    def spec(self, spec: P) -> dict[str, Any]:
        """A layout."""
        if any(type(entry) not in (type(None), str, tuple) for entry in spec):
            raise unsaveable(f"the layout {spec}", "results whose dims are not merged ones")
        return {
            "entries": [list(entry) if isinstance(entry, tuple) else entry for entry in spec],
            "unreduced": sorted(spec.unreduced),
            "reduced": sorted(spec.reduced),
        }

    def value(self, x: Any, places: Mapping[fx.Node, int] = {}) -> Any:
        """An argument."""
        if x is None or type(x) in (bool, int, str):
            return x
        if isinstance(x, fx.Node):
            return {"node": places[x]}
        if isinstance(x, (PerRank, Tables)):
            return self._of_ranks(x)
        if type(x) is float:
            return x if math.isfinite(x) else {"float": repr(x)}
        if type(x) is complex:
            return {"complex": [x.real, x.imag]}
        if isinstance(x, slice):
            return {"slice": [self.value(part, places) for part in (x.start, x.stop, x.step)]}
        if isinstance(x, (tuple, list)):
            return {"tuple" if isinstance(x, tuple) else "list": [self.value(one, places) for one in x]}
        if isinstance(x, torch.device):
            return {"device": self._device(x)}
        for name, kind in _NAMED.items():
            if isinstance(x, kind):
                is_op = isinstance(x, torch_internals.OpOverload)
                return {name: torch_internals.overload_name(x) if is_op else str(x).removeprefix("torch.")}
        if isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.dtype is torch.int64:
            return {"integers": [list(x.shape), x.flatten().tolist()]}
        raise unsaveable(f"an argument of the plan, {short(x)},", "a plan of tensors and plain numbers")


class GraphReader:
    """Turns the data of a `GraphWriter` back.

    Args:
        meshes: for each place, the mesh of this process.
        numbers, tables: for each place, the number and the tables of the ranks that this process plays.
        empty: a tensor without values, of a shape, strides, a dtype and a device.
        namespaces: of operators that the user trusts besides torch's.
    """

    def __init__(
        self,
        meshes: Sequence[Mesh],
        numbers: Sequence[int],
        tables: Sequence[Tables],
        empty: Callable[..., torch.Tensor],
        namespaces: Collection[str] = (),
    ) -> None:
        self.meshes, self._numbers, self._tables = meshes, numbers, tables
        self._empty, self._namespaces = empty, namespaces
        self._read: list[Nested] = []  # the calls with bodies

    def graph(self, rows: Sequence[Mapping[str, Any]]) -> fx.Graph:
        """A graph of its nodes' data."""
        graph, nodes = fx.Graph(), []
        for row in rows:
            args = self.value(row["args"], nodes)
            kwargs = {name: self.value(x, nodes) for name, x in row.get("kwargs", {}).items()}
            if not all(map(str.isidentifier, kwargs)):  # they become words of the plan's code
                raise ValueError(f"{short([*kwargs])} are no names of arguments")
            target = self._target(row["target"]) if row["op"] == "call_function" else row["name"]
            node = graph.create_node(row["op"], target, args, kwargs, row["name"])
            node.meta = {**row["meta"], "line": row["line"], "val": self._empties(row.get("val"))}
            nodes.append(node)
        return graph

    def _target(self, data: Any) -> Any:
        if isinstance(data, str):
            return next(function for function, name in _PYTHON.items() if name == data)
        if "op" in data:
            return self._operator(data["op"])
        if "nested" in data:
            kind = _NESTED[data["nested"]]
            fields = {x.name: self.value(data["fields"][x.name]) for x in _own(kind)}
            found = kind(bodies=tuple(map(self.graph, data["bodies"])), **fields)
            self._read.append(found)
            return found
        if "same" in data:
            return self._read[data["same"]]
        if "step" in data:
            return steps.made(data["step"], {key: self.value(x) for key, x in data["given"].items()})
        fields = {key: self.value(x) for key, x in data["collective"].items()}
        return (Start if data["starts"] else Collective)(**{**fields, "mesh": self.meshes[fields["mesh"]]})

    def _operator(self, name: str) -> Any:
        why = operators.refusal(name, self._namespaces)
        if why is not None:
            raise TransformError(why)
        return torch_internals.overload_named(name)

    def _empties(self, data: Any) -> Any:
        if isinstance(data, dict) and "tensor" in data:
            shape, stride, dtype, device = data["tensor"]
            return self._empty(shape, stride, _of_torch("dtype", dtype), torch.device(device))
        if isinstance(data, dict) and ("list" in data or "tuple" in data):
            ((kind, parts),) = data.items()
            return (list if kind == "list" else tuple)(map(self._empties, parts))
        return self.value(data)

    def spec(self, data: Mapping[str, Any]) -> P:
        """A layout."""
        entries = tuple(tuple(x) if isinstance(x, list) else x for x in data["entries"])
        return rebuild_spec(entries, data["unreduced"], data["reduced"])

    def value(self, data: Any, nodes: Sequence[fx.Node] = ()) -> Any:
        """An argument."""
        if not isinstance(data, dict):
            return data
        ((kind, x),) = data.items()
        match kind:
            case "node":
                return nodes[x]
            case "ranks":
                return self._numbers[x]
            case "tables":
                of_each = self._tables[x]
                return of_each[0] if all(one is of_each[0] for one in of_each) else of_each
            case "float":
                return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[x]
            case "complex":
                return complex(*x)
            case "slice":
                return slice(*(self.value(part, nodes) for part in x))
            case "tuple":
                return tuple(self.value(one, nodes) for one in x)
            case "list":
                return [self.value(one, nodes) for one in x]
            case "device":
                return torch.device(x)
            case "op":
                return self._operator(x)
            case "integers":
                return torch.tensor(x[1], dtype=torch.int64, device="cpu").view(x[0])
            case _:
                return _of_torch(kind, x)


def _of_torch(kind: str, name: str) -> Any:
    """One of torch's constants, by its name."""
    found = getattr(torch, name, None)
    if not isinstance(found, _TORCH[kind]):
        raise TransformError(report("load_plan", f"torch has no {kind} {short(name)}"))
    return found
