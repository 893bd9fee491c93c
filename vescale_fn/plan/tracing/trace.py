"""From a function and its arguments to a graph: the arguments' leaves become inputs, its results the output."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import fx
from torch.distributed.tensor import DTensor

from ..._core import torch_internals
from ..._core.arrays.array import Array, mesh_of
from ..._core.arrays.placement import with_sharding
from ..._core.base import tree
from ..._core.base.containers import checked
from ..._core.distributed.blocks import Blocks, parts
from ..._core.distributed.places import place_of
from ..._core.distributed.replicated_uses import Ledger
from ..._core.distributed.rows import row_of
from ..ir.handed_on import part_memory
from ..ir.nested import all_meshes
from ..ir.per_rank import RanksDiffer
from ..ir.rank_runs import note_holders
from ..ir.ranks_as_one import RanksAsOne
from ..ir.shared_bodies import inlined
from . import leaves as leaves_
from .earlier import Earlier
from .frame import RanksApart, RecordAgain, Unrollable
from .leaves import Result
from .recorder import Recorder, Unrecordable
from .repeated import counted
from .tensors_of_floats import FillsByOperators
from .traced_float import Number, beyond, difference, near, same_values, within
from .value_guards import Guard, plain


@dataclass
class Recorded:
    """A function as recorded.

    Attributes:
        graph: its inputs are the plain tensors and the floats of the arguments' leaves, in order, then the constants.
        constants: tensors that it used without being given them.
        read: those whose value it read.
        results: for each leaf of the result: a `Result`, ``("input", i)`` for an argument's leaf, or ``("value", x)``.
        out_def: the result's tree.
        ledger: the numbers in it that are to be the same on all ranks.
        guards: the truth values of the inputs that it is made for.
        end: to be called when the graph has been worked on.
        ranks: what the graph is of simulated ranks that were recorded as one: the program of each. None elsewhere.
        cuts: the calls of `vfn.cut`, where these were asked for.
    """

    graph: fx.Graph
    constants: list[torch.Tensor]
    read: list[torch.Tensor]
    results: list[Any]
    out_def: Any
    ledger: Ledger
    guards: list[Guard]
    end: Callable[[], None]
    ranks: RanksAsOne | None = None
    cuts: Sequence[Any] = ()

    @property
    def inputs(self) -> Sequence[fx.Node]:
        """For each input a placeholder that lies as it."""
        if self.ranks is not None:
            return self.ranks.inputs
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @functools.cached_property
    def of_all_ranks(self) -> fx.Graph:
        """The graph, of all ranks that this process plays."""
        return self.graph if self.ranks is None else self.ranks.written_out(inlined(self.graph))


class How(NamedTuple):
    """How a function is recorded; the attributes are arguments of `Recorder`, but for one.

    Attributes:
        watches: whether iterations of a loop that are equal are looked for.
    """

    rolls: bool = True
    shares: bool = True
    as_one: bool = True
    cuts: bool = False
    watches: bool = True


def trace(
    f: Callable[..., Any],
    leaves: Sequence[Any],
    names: Sequence[str],
    treedef: Any,
    out_specs: Any,
    earlier: Earlier,
) -> Recorded:
    """Record ``f(*args, **kwargs)``, where `leaves` and `treedef` are of ``(args, kwargs)``, or without these of ``(args,)``;
    inputs are named as its leaves. `earlier` knows the recordings of this call."""
    how = How()
    while True:
        try:
            return _recorded(f, leaves, names, treedef, out_specs, how, earlier)
        except RecordAgain:
            how = how._replace(watches=False)
        except Unrollable as why:
            how = how._replace(rolls=why.shared and how.shares, shares=False)
        except RanksApart:
            how = how._replace(as_one=False)
        except BaseException:
            earlier.end()
            raise


def trace_with_cuts(f: Callable[..., Any], leaves: Sequence[Any], names: Sequence[str], treedef: Any) -> Recorded:
    """The same with the calls of `vfn.cut` as nodes. Every call is a node of its own (`trace_flat`), as a stage may begin
    anywhere."""
    return trace_flat(f, leaves, names, treedef, cuts=True)


def trace_flat(
    f: Callable[..., Any], leaves: Sequence[Any], names: Sequence[str], treedef: Any, cuts: bool = False
) -> Recorded:
    """The same with a node for every call: those of each rank and of each iteration of a loop.

    Args:
        cuts: whether the calls of `vfn.cut` are nodes, too.
    """
    earlier = Earlier()
    try:
        return _recorded(f, leaves, names, treedef, None, How(False, False, False, cuts), earlier)
    except Unrollable:
        earlier.end()
        raise Unrecordable("a value of a loop, or of another recording, is used outside of it", "?") from None
    except BaseException:
        earlier.end()
        raise


def _recorded(
    f: Callable[..., Any],
    leaves: Sequence[Any],
    names: Sequence[str],
    treedef: Any,
    out_specs: Any,
    how: How,
    earlier: Earlier,
) -> Recorded:
    run = functools.partial(_trace, f, leaves, names, treedef, out_specs, how, earlier)
    recorded = run(near)
    if any(map(leaves_.is_number, leaves)):
        earlier.is_used = False
        try:
            other = run(beyond)
        except (Unrecordable, Unrollable, RanksApart):
            raise
        except Exception:  # a value that the function, or C, does not take: a probability above one
            other = run(within)
        if earlier.is_used:  # what the first one kept: it is compared with one that found that
            recorded = run(near)
        node = difference(recorded.graph, other.graph)
        if node is not None:
            raise Unrecordable(
                "the value of a float among the arguments is computed with: by `math.sqrt`, or by torch in C++",
                node.meta.get("line") or "?",
            )
        if not all(map(same_values, recorded.constants, other.constants)):
            raise Unrecordable("a tensor is made in Python of the value of a float among the arguments", "?")
    return recorded


def _trace(
    f: Callable[..., Any],
    leaves: Sequence[Any],
    names: Sequence[str],
    treedef: Any,
    out_specs: Any,
    how: How,
    earlier: Earlier,
    disguise: Callable[[float, int], float],
) -> Recorded:
    recorder, fills = _recorder(disguise, leaves, how, earlier)
    given = [
        _stand_in(recorder, leaf, _NO_WORD.sub("_", name).strip("_")) for leaf, name in zip(leaves, names, strict=True)
    ]
    args, kwargs = (*tree.unflatten(treedef, given), {})[:2]
    try:
        with fills, recorder:
            out = checked(f(*args, **kwargs), "jit", "out", numpy=True, modules=True)
            out_leaves, out_def = tree.flatten(laid_out(out, out_specs))
            for leaf in out_leaves:
                if isinstance(leaf, Array):
                    torch_internals.local(leaf)  # a view whose elements move brings them when it is first read: here
    except Unrecordable as why:
        why.graph, why.guards = recorder.graph, recorder.guards
        raise
    except Unrollable as why:
        why.shared = recorder.has_shared
        raise
    except (
        torch.utils.checkpoint.CheckpointError
    ):  # a derivative that has recorded a call anew, where it counts what is kept
        if not recorder.loops:
            raise
        raise Unrollable from None
    finally:
        recorder.forget_inputs()
        earlier.add(recorder)
    places: list[tuple[fx.Node, int, Any]] = []
    inputs = {id(x): i for i, x in reversed(list(enumerate(given)))}
    results = [_result(recorder, leaf, inputs, places) for leaf in out_leaves]
    ranks = _finished(recorder, places)
    if ranks is not None and _at_places(leaves, recorder, results):
        raise RanksApart  # what is elsewhere is left out of each rank's program
    if recorder.writes:
        part_memory(recorder.graph)
        _check_writes(ranks)
    return Recorded(
        recorder.graph,
        recorder.constants,
        recorder.read,
        results,
        out_def,
        recorder.ledger,
        recorder.guards,
        earlier.end,
        ranks,
        tuple(recorder.cuts or ()),
    )


def _recorder(disguise: Any, leaves: Sequence[Any], how: How, earlier: Earlier) -> tuple[Recorder, Any]:
    """The recorder, and what is to be on around it."""
    recorder = Recorder(disguise, plain(leaves), how.rolls, how.shares, how.as_one, earlier, how.cuts)
    fills = FillsByOperators(recorder) if any(map(leaves_.is_number, leaves)) else None
    if how.watches:
        recorder.counted = counted(recorder, fills)
    return recorder, fills or nullcontext()


def _check_writes(ranks: RanksAsOne | None) -> None:
    """Raise where ranks write different things into memory that they share."""
    if ranks is not None:
        try:
            note_holders(inlined(ranks.graph), ranks.places, ranks.count)
        except RanksDiffer:
            raise RanksApart from None


def _finished(recorder: Recorder, places: Sequence[tuple[fx.Node, int, Any]]) -> RanksAsOne | None:
    """The program of one rank, where ranks were recorded as one; else the graph has its results."""
    ranks = None if recorder.rows is None else recorder.rows.finished(places)
    if ranks is None:
        end = recorder.graph.output(tuple(node for node, *_ in places))
        end.meta["val"], end.meta["line"] = None, ""
    return ranks


def _at_places(leaves: Sequence[Any], recorder: Recorder, results: Sequence[Any]) -> bool:
    """Whether a value exists at some coordinates of an axis only."""
    given = (mesh_of(x) for x in leaves if isinstance(x, torch.Tensor))
    made = (x.spec.mesh for x in results if isinstance(x, Result) and x.spec)
    return any(place_of(mesh) is not None for mesh in itertools.chain(given, made, all_meshes(recorder.graph)))


_NO_WORD = re.compile(r"\W+")


def _stand_in(recorder: Recorder, leaf: Any, name: str) -> Any:
    if isinstance(leaf, torch.Tensor):
        if isinstance(leaf, DTensor) and recorder.rows is not None and type(torch_internals.local(leaf)) is Blocks:
            spec = torch_internals.spec(leaf)
            row = recorder.rows.input(leaves_.plain_of(leaf), leaves_.first_holders(spec), name)
            return leaves_.array_of_local(leaf, Blocks(row))
        given = leaves_.with_tensors(leaf, lambda x: recorder.input(x, name))
        if isinstance(leaf, DTensor) and type(blocks := torch_internals.local(given)) is Blocks:
            recorder.row_of_inputs(blocks.blocks)
        if recorder.rows is not None:
            recorder.rows.plain(given)
        return given
    if not leaves_.is_number(leaf):
        return leaf
    number = recorder.number(float(leaf), name)
    if recorder.rows is not None:
        recorder.rows.plain(number.node)
    return number


def laid_out(out: Any, out_specs: Any) -> Any:
    """The results where they are to lie: without `out_specs`, as the function has them."""
    return out if out_specs is None else with_sharding(out, out_specs)


def _result(recorder: Recorder, leaf: Any, inputs: dict[int, int], places: list[tuple[fx.Node, int, Any]]) -> Any:
    """How a leaf of the results is given. `inputs`: where the arguments' leaves are among them, by identity."""
    if id(leaf) in inputs:
        return "input", inputs[id(leaf)]
    if isinstance(leaf, Number):
        places.append((leaf.node, 0, None))
        return Result.like(leaf, [len(places) - 1])
    if not isinstance(leaf, torch.Tensor):
        return "value", leaf
    if leaf.requires_grad:
        raise Unrecordable("a result requires gradients, through tensors that the function closes over", "?")
    local = torch_internals.local(leaf) if isinstance(leaf, DTensor) else leaf
    ranks = list(range(len(parts(local))))
    if type(local) is Blocks and isinstance(leaf, DTensor):  # ranks that hold the same get it from one of them
        ranks = list(dict.fromkeys(leaves_.first_holders(torch_internals.spec(leaf))))
    row = row_of(local)
    plain = [parts(local)[rank] if row is None else row.one for rank in ranks]
    if not any(map(recorder.is_ours, plain)):
        return "value", leaf
    first = len(places)
    places += [(recorder.node(x), rank, None if row is None else row.holders[rank]) for rank, x in zip(ranks, plain)]
    return Result.like(leaf, range(first, len(places)))
