"""Plans as files: `save_plan`, `load_plan`."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .._core import torch_internals
from .._core.base.errors import TransformError
from .._core.base.messages import report, short
from .._core.base.tables import numbers
from .._core.distributed.mesh import communicator_of, mesh_name, root
from .._core.sharding.index_map import axes_of
from .every_rank_plans import OfRanks, abstract_mesh_of, every_rank
from .ir import graph as plan
from .ir.per_rank import per_rank
from .lowered import Lowered, Origin
from .plan import Plan
from .saved import made_for, results, tables, trees
from .saved.graph_data import GraphReader, GraphWriter, unsaveable
from .simulated_plans import OfRank, for_all, is_simulated, of_one, simulated_mesh_of
from .tracing.every_rank import EveryRank
from .tracing.rank_consensus import shared_mesh
from .tracing.trace import Recorded

_FORMAT = 2


def save_plan(lowered: Lowered, path: str | os.PathLike[str], *, most: int = 64) -> None:
    """Save the plan that ``vfn.jit(f).lower(...)`` gives, so that a later job need not record it again.

    The file holds data alone: names of operators, shapes, layouts, numbers; nothing in it runs when it is read. On a real mesh
    every rank calls this, and the file holds the plan of each; the first rank writes it.

    A plan on an `abstract_mesh`, made in one process before any rank is started, is saved for every rank of such a mesh: ranks
    that do the same share a plan, with the numbers that each has of its own (where its part begins, what it draws); ranks whose
    blocks have other sizes have another one. For this the function is recorded again, twice for each plan.

    Args:
        lowered: the plan. It may close over numbers and functions, but over no tensor.
        path: of the file, which appears complete or not at all. What was there is replaced.
        most: how many plans the ranks of an abstract mesh may need.

    Raises:
        TransformError: the plan holds something that is no data: a tensor that the function closes over, a print, a plan of
            simulated ranks, the inductor's code. The plan of an abstract mesh: a rank does something that its place alone does
            not explain, Python asks which rank it is, or the ranks need more plans than `most`.

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
    origin = lowered.origin
    if origin.plan.places:
        what = f"a plan with values at one place, the {mesh_name(origin.plan.places[0])}, cannot be saved"
        raise TransformError(report("save_plan", what, fix="no plans=: it is recorded anew in each job"))
    found: list[Any]
    mesh = shared_mesh([], origin.plan.graph, origin.plan.recorded)
    try:
        abstract, simulated = abstract_mesh_of(origin), simulated_mesh_of(origin)
        places = made_for.places(origin.meshes)
        if simulated is not None:
            _check_known(origin, simulated, lowered.name)
            one = of_one(origin)
            found = [_data(origin, one.plan, lowered.name, places, list(map(_known, one.constants)), anywhere=True)]
        elif abstract is None:
            known = [_known([x]) for x in origin.plan.recorded.constants]
            found = [_data(origin, origin.plan, lowered.name, places, known)]
        else:
            found = [_of_ranks(origin, made, lowered.name) for made in every_rank(origin, abstract, lowered.name, most)]
    except TransformError as error:
        found = [error]
    if mesh is not None:
        found = [row[0] for row in communicator_of(mesh).everyone([[found[0]]], "save_plan")]
    for each in found:
        if isinstance(each, TransformError):
            raise each
    if mesh is None or communicator_of(mesh).ranks[0] == 0:
        _write(found, Path(path))


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
        count = sum(len(entry["places"]) for entry in self._data["plans"])
        return f"<SavedPlan of {self.name} for {count} rank{'s' * (count != 1)}, by {self.software}>"

    def misfit(self, function: Any, captured: Any, key: str, meshes: Sequence[Any]) -> str | None:
        """Why it does not serve a call on this rank; None where it does."""
        if self.software != made_for.software():
            return f"it was made by {self.software}, and here is {made_for.software()}"
        on, here = self._data["on"], made_for.whole(meshes)
        if on != here:
            return f"it was made on {on or 'one device'}, and here is {here or 'no mesh'}"
        played = made_for.places(meshes)
        if len(played) > 1 and not all(map(is_simulated, map(root, meshes))):
            return f"each of its plans is one rank's, and here one process plays {len(played)} of them"
        entries = [entry for entry in self._data["plans"] if entry["key"] == key]
        if not entries:
            return "it was made for arguments of other types or layouts, or under other settings"
        missing = [place for place in played if not any(place in entry["places"] for entry in entries)]
        if missing:
            return f"it has no plan for this rank, {missing[0]}"
        if any(entry["function"] != made_for.function(function, captured, entry["files"]) for entry in entries):
            return "the function, or what it closes over, has changed since"
        return None

    def recorded(self, key: str, meshes: Sequence[Any], treedef: Any, leaves: Sequence[Any]) -> Recorded:
        """The plan for a call that it serves, as a recording that no pass has to improve. Raises anything if it is damaged."""
        played, own = made_for.places(meshes), [entry for entry in self._data["plans"] if entry["key"] == key]
        entries = [next(entry for entry in own if place in entry["places"]) for place in played]
        one = all(entry is entries[0] for entry in entries)
        parts = [(entries[0], played)] if one else [(entry, [place]) for entry, place in zip(entries, played)]
        found = [self._read(entry, places, meshes, treedef) for entry, places in parts]
        return found[0].recorded if len(played) == 1 else for_all(found, leaves, len(played))

    def _read(self, entry: Mapping[str, Any], played: Sequence[str], meshes: Sequence[Any], treedef: Any) -> OfRank:
        """The plan of some ranks."""
        at = list(map(entry["places"].index, played))
        here: dict[str, Any] = {}
        for mesh in _parts_of_all(meshes):
            if here.setdefault(made_for.mesh(mesh), mesh) != mesh and made_for.mesh(mesh) in entry["meshes"]:
                raise ValueError(f"there are two meshes {made_for.mesh(mesh)}")
        reader = GraphReader(
            [here[text] for text in entry["meshes"]],
            [per_rank([of_each[i] for i in at]) for of_each in entry["numbers"]],
            [tables.read(row, at) for row in entry["tables"]],
            _empty(),
            self._namespaces,
        )
        graph = reader.graph(entry["graph"])
        given = [results.read(row, reader) for row in entry["results"]]
        out = trees.read(entry["out"], treedef)
        constants = [tables.read(row, at) for row in entry["constants"]]
        closed = [x[0] for x in constants]
        return OfRank(Recorded(graph, closed, [], given, out, None, [], lambda: None), constants)  # type: ignore[arg-type]


def load_plan(path: str | os.PathLike[str], *, namespaces: Collection[str] = ()) -> SavedPlan:
    """A plan that `save_plan` has written, for ``vfn.jit(f, plans=[...])``.

    It serves calls with arguments of the same types and layouts, of the same function, with the same torch and vescale_fn, on a
    mesh of the same axes, on each rank whose plan it holds; for others the function is recorded anew, and a warning says why.
    Reading it runs nothing, and what it calls are operators of torch's on tensors: none that opens a file.

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


def _of_ranks(origin: Origin, made: OfRanks, name: str) -> dict[str, Any]:
    """A plan of many ranks as data."""
    places = []
    for rank in made.every.together:
        with EveryRank(made.every.mesh, [rank]).recording():
            places += made_for.places(origin.meshes)
    _check_known(origin, made.every.mesh, name)
    return _data(origin, made.plan, name, places, made.every.tables(made.plan.recorded.constants), anywhere=True)


def _check_known(origin: Origin, mesh: Any, name: str) -> None:
    """Raise where a call that the plan serves would not know the mesh that it is for."""
    if mesh not in map(root, origin.meshes):
        what = f"{name} makes arrays on a mesh that is neither its arguments', nor the current one, nor closed over by name"
        raise unsaveable(what, "with vfn.use_mesh(mesh): around lower and the calls")


def _data(
    origin: Origin,
    mine: Plan,
    name: str,
    places: Sequence[str],
    numbers: Sequence[Sequence[torch.Tensor] | None],
    anywhere: bool = False,
) -> dict[str, Any]:
    """A plan as data.

    Args:
        places: of the ranks that it is for.
        numbers: of each tensor that it closes over those of each of these ranks; None where it is no table.
        anywhere: whether each rank has devices of its own.
    """
    constants, others = list[Any](), list[torch.Tensor]()
    for x, of_each in zip(mine.recorded.constants, numbers, strict=True):
        if of_each is None:
            others.append(x)
        else:
            constants.append(tables.written(x.device, of_each))
    if others:
        what = f"a plan whose function closes over {len(others)} tensors, one of {tuple(others[0].shape)},"
        raise unsaveable(what, "tensors as arguments")
    if mine.recorded.guards:
        raise unsaveable("a plan that a truth value among its arguments has chosen", "torch.where")
    writer = GraphWriter(anywhere)
    given = [results.written(made, writer) for made in mine.recorded.results]
    graph = writer.graph(mine.graph)
    files = made_for.files(mine.function, (node.meta.get("line", "") for node in plan.calls(mine.graph)))
    return {
        "name": name,
        "key": origin.key,
        "on": made_for.whole(origin.meshes),
        "places": list(places),
        "graph": graph,
        "numbers": list(map(list, writer.numbers)),
        "tables": [tables.written(x[0].device, x) for x in writer.tables],
        "constants": constants,
        "results": given,
        "out": trees.written(mine.recorded.out_def, origin.call.treedef),
        "meshes": [made_for.mesh(mesh) for mesh in writer.meshes],
        "files": files,
        "function": made_for.function(mine.function, mine.captured, files),
    }


def _known(of_each: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """A tensor of each rank as data; None where it is no table."""
    return None if any(numbers(x) is None for x in of_each) else [x.detach().cpu() for x in of_each]


def _write(everyone: Sequence[dict[str, Any]], path: Path) -> None:
    plans: dict[str, dict[str, Any]] = {}
    for each in everyone:  # ranks whose plans are the same share one
        same = json.dumps({**each, "places": []}, sort_keys=True)
        if same in plans and len(each["places"]) == 1:
            plans[same]["places"] += each["places"]
        else:
            plans[same] = each
    whole = {
        "format": _FORMAT,
        "name": everyone[0]["name"],
        "software": made_for.software(),
        "on": everyone[0]["on"],
        "plans": list(plans.values()),
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
