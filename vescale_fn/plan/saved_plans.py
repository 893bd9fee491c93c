"""Plans as files: `save_plan`, `load_plan`."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .._core import torch_internals
from .._core.base import context
from .._core.base.errors import TransformError
from .._core.base.messages import report, short
from .._core.distributed.mesh import communicator_of
from .._core.sharding.index_map import axes_of
from .._core.sharding.layout import spec_for
from .ir import graph as plan
from .lowered import Lowered
from .plan import Plan
from .saved import made_for, trees
from .saved.graph_data import GraphReader, GraphWriter, unsaveable
from .tracing.leaves import Result
from .tracing.rank_consensus import meshes as meshes_of
from .tracing.rank_consensus import shared_mesh
from .tracing.trace import Recorded

_FORMAT = 1


def save_plan(lowered: Lowered, path: str | os.PathLike[str]) -> None:
    """Save the plan that ``vfn.jit(f).lower(...)`` gives, so that a later job need not record it again.

    The file holds data alone: names of operators, shapes, layouts, numbers; nothing in it runs when it is read. On a real mesh
    every rank calls this, and the file holds the plan of each; the first rank writes it.

    Args:
        lowered: the plan. It may close over numbers and functions, but over no tensor.
        path: of the file, which appears complete or not at all. What was there is replaced.

    Raises:
        TransformError: the plan holds something that is no data: a tensor that the function closes over, a print, a plan of
            simulated ranks, the inductor's code.

    >>> import torch, vescale_fn as vfn, tempfile, os
    >>> def step(w, x):
    ...     return w - 0.1 * vfn.grad(lambda w: ((x @ w) ** 2).sum())(w)
    >>> path = os.path.join(tempfile.mkdtemp(), "step.plan")
    >>> vfn.save_plan(vfn.jit(step).lower(torch.ones(2), torch.eye(2)), path)
    >>> again = vfn.jit(step, plans=[vfn.load_plan(path)])
    >>> again(torch.ones(2), torch.eye(2)), again.cache_info().records
    (tensor([0.8000, 0.8000]), 0)
    """
    if not isinstance(lowered, Lowered) or lowered.origin is None:
        what = f"{short(lowered)} is no plan: it comes from vfn.jit(f).lower(...)"
        raise TransformError(report("save_plan", what, fix="save_plan(vfn.jit(f).lower(*args), path)"))
    mine, key, treedef = lowered.origin
    mesh = shared_mesh([], mine.graph, mine.recorded)
    found: Any
    try:
        found = _data(mine, key, treedef, lowered.name)
    except TransformError as error:
        found = error
    everyone = [found] if mesh is None else [row[0] for row in communicator_of(mesh).everyone([[found]], "save_plan")]
    for each in everyone:
        if isinstance(each, TransformError):
            raise each
    if mesh is None or communicator_of(mesh).ranks[0] == 0:
        _write(everyone, Path(path))


class SavedPlan:
    """A plan from a file: what `load_plan` returns, and ``vfn.jit(f, plans=[...])`` takes.

    Attributes:
        name: of the function that was recorded.
        software: what recorded it: torch's version, and a digest of this package's sources.
    """

    def __init__(self, path: str, data: Mapping[str, Any], namespaces: Collection[str] = ()) -> None:
        self.path, self._data, self._namespaces = path, data, namespaces
        self.name: str = data["name"]
        self.software: str = data["software"]

    def __repr__(self) -> str:
        count = len(self._data["ranks"])
        return f"<SavedPlan of {self.name} for {count} rank{'s' * (count != 1)}, by {self.software}>"

    def misfit(self, function: Any, captured: Any, key: str) -> str | None:
        """Why it does not serve a call on this rank; None where it does."""
        if self.software != made_for.software():
            return f"it was made by {self.software}, and here is {made_for.software()}"
        entry = self._entry(key)
        if entry is None:
            return "it was made for arguments of other types, layouts or ranks, or under other settings"
        if entry["function"] != made_for.function(function, captured, entry["files"]):
            return "the function, or what it closes over, has changed since"
        return None

    def _entry(self, key: str) -> Mapping[str, Any] | None:
        for digest in self._data["ranks"]:
            entry = self._data["plans"][digest]
            if entry["key"] == key:
                return entry
        return None

    def recorded(self, key: str, leaves: Sequence[Any], treedef: Any) -> Recorded:
        """The plan for a call that it serves, as a recording that no pass has to improve. Raises anything if it is damaged."""
        entry: Any = self._entry(key)
        here = {
            made_for.mesh(mesh): mesh
            for mesh in _parts_of_all(filter(None, (*meshes_of(leaves, None, None), context.current_mesh())))
        }
        reader = GraphReader([here[text] for text in entry["meshes"]], _empty(), self._namespaces)
        graph = reader.graph(entry["graph"])
        results = [_result(row, reader) for row in entry["results"]]
        out = trees.read(entry["out"], treedef)
        return Recorded(graph, [], [], results, out, None, [], _nothing)  # type: ignore[arg-type]


def load_plan(path: str | os.PathLike[str], *, namespaces: Collection[str] = ()) -> SavedPlan:
    """A plan that `save_plan` has written, for ``vfn.jit(f, plans=[...])``.

    It serves calls with arguments of the same types and layouts, of the same function, with the same torch and vescale_fn, on a
    mesh of the same axes; for others the function is recorded anew, and a warning says why. Reading it runs nothing, and what
    it calls are operators of torch's on tensors: none that opens a file.

    Args:
        path: of the file.
        namespaces: of operators of your own (`torch.library`) that the plan may call besides: ``["mylib"]``.

    Raises:
        TransformError: no file, or none of `save_plan`'s; namespaces that are no list of names.

    >>> import torch, vescale_fn as vfn, tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "sine.plan")
    >>> vfn.save_plan(vfn.jit(torch.sin).lower(torch.zeros(2)), path)
    >>> vfn.jit(torch.sin, plans=[vfn.load_plan(path)])(torch.zeros(2))
    tensor([0., 0.])
    """
    where = os.fspath(path)
    if isinstance(namespaces, str):
        what = f"namespaces is {short(namespaces)}, not a list of names"
        raise TransformError(report("load_plan", what, fix=f"namespaces=[{namespaces!r}]"))
    try:
        data = json.loads(Path(where).read_text())
        known = isinstance(data, dict) and data.get("format") == _FORMAT
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TransformError(report("load_plan", f"{where} cannot be read: {error}")) from None
    if not known:
        raise TransformError(report("load_plan", f"{where} is no plan that this version of vescale_fn can read"))
    return SavedPlan(where, data, tuple(namespaces))


def _data(mine: Plan, key: str, treedef: Any, name: str) -> dict[str, Any]:
    """A rank's plan as data."""
    if mine.recorded.constants:
        first = mine.recorded.constants[0]
        what = f"a plan whose function closes over {len(mine.recorded.constants)} tensors, one of {tuple(first.shape)},"
        raise unsaveable(what, "tensors as arguments")
    if mine.recorded.guards:
        raise unsaveable("a plan that a truth value among its arguments has chosen", "torch.where")
    writer = GraphWriter()
    results = [_described(made, writer) for made in mine.recorded.results]
    graph = writer.graph(mine.graph)
    files = made_for.files(mine.function, (node.meta.get("line", "") for node in plan.calls(mine.graph)))
    return {
        "name": name,
        "key": key,
        "graph": graph,
        "results": results,
        "out": trees.written(mine.recorded.out_def, treedef),
        "meshes": [made_for.mesh(mesh) for mesh in writer.meshes],
        "files": files,
        "function": made_for.function(mine.function, mine.captured, files),
    }


def _described(made: Any, writer: GraphWriter) -> dict[str, Any]:
    if not isinstance(made, Result):
        kind, what = made
        return {kind: writer.value(what)}
    if made.simulated:
        raise unsaveable("a plan of simulated ranks", "real ranks, or vfn.abstract_mesh")
    if made.spec is None:
        return {"tensor": list(made.places)}
    meta = made.spec.tensor_meta
    return {
        "array": list(made.places),
        "mesh": writer.mesh(made.spec.mesh),
        "spec": writer.spec(made.lies),
        "shape": [list(meta.shape), list(meta.stride), str(meta.dtype).removeprefix("torch.")],
    }


def _result(row: Mapping[str, Any], reader: GraphReader) -> Any:
    if "input" in row:
        return "input", row["input"]
    if "value" in row:
        return "value", reader.value(row["value"])
    if "tensor" in row:
        return Result(row["tensor"])
    shape, stride, dtype = row["shape"]
    lies = reader.spec(row["spec"])
    meta = torch.Size(shape), tuple(stride), reader.value({"dtype": dtype})
    return Result(row["array"], spec_for(reader.meshes[row["mesh"]], lies, *meta), lies)


def _write(everyone: Sequence[Mapping[str, Any]], path: Path) -> None:
    plans, ranks = {}, []
    for each in everyone:
        digest = hashlib.sha256(json.dumps(each, sort_keys=True).encode()).hexdigest()
        plans[digest] = each
        ranks.append(digest)
    whole = {
        "format": _FORMAT,
        "name": everyone[0]["name"],
        "software": made_for.software(),
        "ranks": ranks,
        "plans": plans,
    }
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        json.dump(whole, file)
    os.replace(file.name, path)


def _empty() -> Any:
    """What makes tensors without values."""
    mode = torch_internals.fake_mode()
    return lambda *lies: torch_internals.without_values(mode, *lies)


def _parts_of_all(found: Any) -> list[Any]:
    """Meshes, and their parts along some of their axes."""
    whole = list(dict.fromkeys(found))
    names: list[tuple[str, ...]] = [tuple(axes_of(mesh)) for mesh in whole]
    return whole + [
        mesh[some]
        for mesh, axes in zip(whole, names, strict=True)
        for n in range(1, len(axes))
        for some in itertools.combinations(axes, n)
    ]


def _nothing() -> None:
    pass
