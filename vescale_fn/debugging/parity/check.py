"""`check_parity`, the parity audit: a function on one device against the same function on a mesh, every result and gradient."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..._core.arrays.array import is_array, mesh_of, spec_of
from ..._core.arrays.placement import shard, unshard
from ..._core.base import context, tree
from ..._core.base.containers import checked
from ..._core.base.earlier_names import earlier_name
from ..._core.base.errors import MeshError, ParityError, SpecError
from ..._core.base.messages import count_text, mesh_text, report
from ..._core.base.user_calls import checked_function
from ..._core.distributed.mesh import communicator_of
from ..._core.distributed.places import whole_mesh
from ..._core.local_types import replica_check
from ..._core.sharding.index_map import axes_of
from ..._core.sharding.spec import P
from . import relation
from .audit import Audit, Failure, Outcome, is_floating
from .causes import USUAL
from .compare import Report, changed, compared, remarked
from .first_difference import Parting, Runs
from .rank_status import said_by_all
from .recording import ValueRecorder
from .rounding import Rounded

_SHOWN = 8  # so many differing values are named in a message
_ROUNDED = 3  # runs that show what rounding does


def check_parity(
    f: Callable[..., Any],
    *args: Any,
    mesh: Any = None,
    spec: Any = None,
    gradients: bool = True,
    rtol: float | None = None,
    atol: float = 0.0,
) -> Report:
    """Run `f` on one device and on a mesh, and compare every result and every gradient.

    Both runs are of `f` as it stands. On one device every mesh counts as one rank: `shard_map` runs its body on whole
    values, collectives over one rank do nothing, `with_sharding` leaves values plain, draws are whole. Gradients are of
    all results together, weighted by fixed random numbers (of the result itself, where that is one number), by every
    floating-point leaf of the arguments and by every variable that `f` closes over. Where something differs, `f` is run
    again: with numbers that are off by their rounding, and what that explains is no difference; then recorded, to find
    the line where the runs part. Small inputs will do. A function whose result depends on how many ranks there are (a
    `ppermute` to the next) differs by its nature: check one that uses it, as a ring that sees every block.

    On real ranks collectives are compared before they run, as under `debug`, so that no rank waits for one that failed.

    Args:
        f: a pure function of trees to a tree: plain torch, `with_sharding`, `shard_map`, draws, all of them mixed.
        args: its arguments, trees of plain tensors that are the same whole values on every rank, or of arrays.
        mesh: a DeviceMesh, simulated or real, all of whose ranks make this call. By default that of the arguments, or
            the current mesh. It is the current mesh while `f` runs.
        spec: how the arguments lie on the mesh: a `P`, or a tuple with a `P` or a prefix tree for each argument (for
            one argument its own prefix tree will do). By default arrays lie as they do, and every rank holds what is
            plain. Plain arguments that it replicates are checked as arrays and once more as the plain tensors they are.
        gradients: False to compare results alone, for a function that cannot be differentiated.
        rtol: by how much floats may differ, relative to the size of their value (its largest element; of few that are
            much larger than all others, their own). By default 1e-9 for float64, 2e-5 for float32, 4e-3 for float16,
            3e-2 for bfloat16, and as much as rounding makes of the program. Integers and bools must be equal.
        atol: by how much they may differ besides.

    Returns:
        A `Report`: a table of all values with their differences, to print.

    Raises:
        ParityError: something differs: the message names each value with its path and its ratio (a factor such as the
            size of an axis is named), the line where the runs part, and the usual cause. ``error.report`` is the table.
            Also if `f` fails in one run only, or on some ranks only, or is not the same when it is called again. On all
            ranks in the same words.
        What `f` raises, if it fails in both runs.
        MeshError: no mesh.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> def layer(x, w, b):
    ...     return vfn.psum(x @ w + b, "tp")  # b is added on each rank: once would be right
    >>> x, w, b = torch.ones(2, 4), torch.arange(12.0).view(4, 3), torch.ones(3)
    >>> with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh((2,), ("tp",))):
    ...     on_ranks = vfn.shard_map(layer, in_specs=(P(None, "tp"), P("tp"), P()), out_specs=P())
    ...     try:
    ...         vfn.check_parity(on_ranks, x, w, b)
    ...     except vfn.errors.ParityError as error:
    ...         print("\\n".join(line for line in str(error).splitlines() if "  * gradient" in line or "Instead" in line))
      * gradient of b is 2 times the one-device value (2 = size of axis 'tp')
      Instead: add it after vfn.psum(x, 'tp')
    """
    name = getattr(f, "__name__", type(f).__name__)
    where = f"check_parity({name})"
    checked_function(f, "check_parity")
    checked(args, where, functools.partial(_argument_paths, f, args), numpy=True)
    args = tree.map_(lambda x: torch.as_tensor(x) if isinstance(x, np.ndarray) else x, args)
    mesh = _found_mesh(where, mesh, args)
    laid = args if spec is None else _laid(where, args, mesh, _per_argument(spec, args))
    paths = _argument_paths(f, args)
    _same_everywhere(where, args, paths, mesh)
    whole, laid = (tree.map_(lambda x: x.detach() if is_floating(x) else x, value) for value in (unshard(args), laid))
    found = _audited(where, name, Audit(f, whole, laid, mesh, paths, gradients), rtol, atol)
    plain = tree.map_(lambda x, y, one: one if _is_replica(x, y) else y, args, laid, whole)
    if found.equal and any(x is not y for x, y in zip(tree.leaves(plain), tree.leaves(laid), strict=True)):
        again = f"{where}, its replicated arguments plain tensors"  # ops on these take other ways than on arrays
        _audited(again, name, Audit(f, whole, plain, mesh, paths, gradients), rtol, atol)
    return found


def _audited(where: str, name: str, audit: Audit, rtol: float | None, atol: float) -> Report:
    """Both runs of a function, compared; raises where they differ."""
    mesh = audit.mesh
    one, many = _both(where, audit.run(None), audit.run(mesh), mesh)
    paths = [*one.paths, *audit.by]
    compare = functools.partial(compared, paths, one.values, many.values, mesh, rtol, atol)
    found = Report(name, mesh, compare())
    if found.equal:
        return found

    recorders = [ValueRecorder() for _ in range(2 + _ROUNDED)]  # something differs: all runs once more, recorded
    again = audit.run(None, recorders[0])
    _pure(where, "one device", paths, one, again, mesh)
    rounded = [audit.run(None, recorder, Rounded(seed)) for seed, recorder in enumerate(recorders[2:])]
    alike = [run.values for run in rounded if isinstance(run, Outcome) and run.paths == one.paths]
    found = Report(name, mesh, remarked(found.rows, compare(alike if rtol is None else ())))
    if found.equal:
        return found
    again = audit.run(mesh, recorders[1])
    _pure(where, f"the {mesh_text(axes_of(mesh))}", paths, many, again, mesh)
    raise _differing(where, found, recorders, len(one.results))


def _is_replica(given: Any, laid: Any) -> bool:
    """Whether an argument that was given as a plain tensor became an array of which every rank holds all."""
    return isinstance(given, torch.Tensor) and not is_array(given) and is_array(laid) and spec_of(laid) == P()


# --- runs that fail ---------------------------------------------------------------------------------------------------


def _both(where: str, one: Outcome | Failure, many: Outcome | Failure, mesh: Any) -> tuple[Outcome, Outcome]:
    """The outcomes of both runs, if on every rank both have one, of the same structure."""
    kind, text = "", ""
    if isinstance(one, Failure):
        kind, text = ("both" if isinstance(many, Failure) else "one"), one.text
    elif isinstance(many, Failure):
        kind, text = ("follows" if getattr(many.error, "follows", False) else "mesh"), many.text
    elif one.paths != many.paths:
        kind, text = "structure", _structures(one.paths, many.paths)
    told = said_by_all(json.dumps([kind, text]) if kind else "", mesh)
    if isinstance(one, Outcome) and isinstance(many, Outcome) and not any(said != "" for said in told):
        return one, many
    if isinstance(many, Failure) and all(said is not None and json.loads(said or '[""]')[0] == "both" for said in told):
        raise _noted(many, "on one device too")
    raise _failed(where, told, mesh) from next((run.error for run in (one, many) if isinstance(run, Failure)), None)


def _structures(one: Sequence[str], many: Sequence[str]) -> str:
    both = [path for path in dict.fromkeys([*one, *many]) if (path in one) != (path in many)]
    rows = [f"{path} only {'on one device' if path in one else 'on the mesh'}" for path in both[:_SHOWN]]
    return ", ".join(rows + ["..."] * (len(both) > _SHOWN)) or "the same values in another order"


def _noted(failure: Failure, where: str) -> Exception:
    """The error of the user's function, which has nothing to do with the mesh; with a note (from Python 3.11 on)."""
    if hasattr(failure.error, "add_note"):
        way = "; vfn.check_parity(f, ..., gradients=False) compares the results alone" if failure.backward else ""
        of = "the gradient of the function" if failure.backward else "the function"
        failure.error.add_note(f"vfn.check_parity: {of} fails {where}{way}")
    return failure.error


_WAYS = {
    "one": "it fails on one device, and runs on the {mesh}",
    "mesh": "it fails on the {mesh}, and runs on one device",
    "follows": "it fails on the {mesh}, and runs on one device",
    "both": "it fails on one device and on the {mesh}",
    "structure": "the results have another structure on the {mesh} than on one device",
}


def _failed(where: str, told: Sequence[str | None], mesh: Any) -> ParityError:
    """What the ranks told of failed runs, in the same words on all of them."""
    rows: dict[tuple[str, str], list[int]] = {}
    for rank, said in enumerate(told):
        kind, text = (
            ("", "says nothing: it may wait in a collective") if said is None else json.loads(said or '["", ""]')
        )
        rows.setdefault((kind, text), []).append(rank)
    if any(kind not in ("", "follows") for kind, _ in rows):
        rows = {key: ranks for key, ranks in rows.items() if key[0] != "follows"}  # those waited for one that failed
    kinds = {kind for kind, _ in rows if kind}
    what = _WAYS[kinds.pop()] if len(kinds) == 1 else "it fails on the {mesh} or on one device"
    alone = [*rows.values()] == [[*range(len(told))]]
    failures = [text if alone else f"{relation.listed(ranks)}: {text}" for (_, text), ranks in rows.items() if text]
    fix = ""
    if alone and next(iter(rows))[0] == "one":
        fix = "vfn.axis_size(axis) for a number of ranks, also in permutations and shapes: on one device it is 1"
    on = "" if alone else ", not on all ranks alike"
    return ParityError(report(where, what.format(mesh=mesh_text(axes_of(mesh))) + on, failures, fix))


def _pure(where: str, on: str, paths: Sequence[str], first: Outcome, again: Outcome | Failure, mesh: Any) -> None:
    """Raise, on all ranks, if a function gives something else when it is called again."""
    if isinstance(again, Failure):
        text = f"it fails then: {again.text}"
    else:
        text = (
            changed(paths, first.values, again.values)
            if again.paths == first.paths
            else "it has another structure then"
        )
    told = said_by_all(text, mesh)
    text = next((said for said in told if said), "")
    if text or None in told:
        what = f"it gives other values when it is called again with the same arguments, on {on}"
        raise ParityError(
            report(
                where,
                what,
                [text] if text else [],
                "a function without state: nothing kept from call to call, no change in place of what "
                "it closes over, draws from keys",
            )
        )


# --- values that differ -----------------------------------------------------------------------------------------------


def _differing(where: str, found: Report, recorders: Sequence[ValueRecorder], results: int) -> ParityError:
    wrong = [(i, row) for i, row in enumerate(found.rows) if row.problem]
    failures = [f"{row.path} {row.problem}" for _, row in wrong[:_SHOWN]]
    failures[0] = "\n      ".join([failures[0], *wrong[0][1].detail])
    if len(wrong) > _SHOWN:
        failures.append(f"... and {len(wrong) - _SHOWN} more: error.report")
    parting = _parting(found.mesh, recorders, wrong[0][0], results) or Parting((), "")
    if parting.lines:
        failures.append("\n      ".join(parting.lines))
    powers = [relation.power(row.ratio, axes_of(found.mesh)) for _, row in wrong if row.ratio]
    usual = next((USUAL[p] for p in powers if p is not None), None)
    if usual and not parting.explained:
        failures.append(f"the usual cause of such a factor: {usual}")
    n = len(wrong)
    what = (
        f"{n} of {count_text(len(found.rows), 'value')} {'differs' if n == 1 else 'differ'} between one device and "
        f"the {mesh_text(axes_of(found.mesh))}"
    )
    text = report(where, what, failures, parting.fix)
    said = communicator_of(found.mesh).everyone([[text] * len(communicator_of(found.mesh).ranks)], "check_parity")
    error = ParityError(said[0][0])  # the first rank's words, on every rank
    error.report = found
    return error


def _parting(mesh: Any, recorders: Sequence[ValueRecorder], first: int, results: int) -> Parting | None:
    """Where the runs part, of the first value that differs."""
    one, many, *rounded = recorders
    runs = Runs(one.nodes, many.nodes, [recorder.nodes for recorder in rounded], mesh)
    return runs.find(many.results[first]) if first < results else runs.find_back(many.arguments[first - results])


# --- arguments --------------------------------------------------------------------------------------------------------


def _found_mesh(where: str, mesh: Any, args: Any) -> Any:
    if mesh is None:
        mesh = next(
            (whole_mesh(mesh_of(x)) for x in tree.leaves(args) if isinstance(x, torch.Tensor) and is_array(x)), None
        )
    mesh = mesh if mesh is not None else context.current_mesh()
    if mesh is None:
        raise MeshError(
            report(
                where,
                "there is no mesh: none was given, none is current, and no argument is an array",
                fix='vfn.check_parity(f, *args, mesh=vfn.make_mesh((2, 4), ("dp", "tp")), spec=...); '
                "vfn.simulate(8) plays the ranks",
            )
        )
    return context.checked_mesh(mesh, where)


def _laid(where: str, args: tuple[Any, ...], mesh: Any, spec: Any) -> Any:
    tree.broadcast(spec, args, where, "spec", "args")
    try:
        return shard(args, mesh, spec)
    except SpecError as error:
        raise SpecError(str(error).replace("shard:", f"{where}:", 1).replace("tree[", "args[")) from None


def _per_argument(spec: Any, args: tuple[Any, ...]) -> Any:
    if isinstance(spec, P):
        return spec
    listed = tuple(spec) if isinstance(spec, (list, tuple)) else None
    if listed is None or hasattr(spec, "_fields"):
        listed = (spec,)
    return listed


def _argument_paths(f: Any, args: tuple[Any, ...]) -> list[str]:
    """The path of each leaf, by the name of the parameter that it is given to."""
    names = [f"args[{i}]" for i in range(len(args))]
    with contextlib.suppress(TypeError, ValueError):
        called = f.forward if isinstance(f, torch.nn.Module) else f
        parameters = inspect.signature(called).parameters.values()
        for i, parameter in enumerate(p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)):
            if i < len(names):
                names[i] = parameter.name
    return [path for name, value in zip(names, args, strict=True) for path in tree.paths(value, name)]


def _same_everywhere(where: str, args: Any, paths: Sequence[str], mesh: Any) -> None:
    """Plain arguments must be the same on every rank: else the runs would differ for that."""
    leaves = tree.leaves(args)
    prints = [
        None
        if is_array(x) or not isinstance(x, torch.Tensor)
        else (tuple(x.shape), str(x.dtype), replica_check.digest(x))
        for x in leaves
    ]
    ranks = len(communicator_of(mesh).ranks)
    by_rank = [row[0] for row in communicator_of(mesh).everyone([[prints] * ranks], "check_parity")]
    rows = []
    for i, path in enumerate(paths):
        others = [rank for rank, row in enumerate(by_rank) if len(row) != len(prints) or row[i] != by_rank[0][i]]
        if others:
            rows.append(f"{path} is another value on rank {', '.join(map(str, others[:8]))} than on rank 0")
    if rows:
        raise ParityError(
            report(
                where,
                "the arguments must be the same whole values on every rank",
                rows,
                "make them from a key (vfn.random), or send rank 0's; vfn.from_local for each rank's own data",
            )
        )


check = earlier_name("check", check_parity)
