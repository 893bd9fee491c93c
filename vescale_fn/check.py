"""`check`, the parity audit: a function on one device against the same function on a mesh, every result and gradient.

Both runs are of the user's own function. On one device every mesh counts as one rank: `shard` and `with_sharding` leave
values plain, the body of a `shard_map` runs on whole values, and a draw with a spec is the whole draw.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from . import _torch, context, relation, tree, wire
from .array import Array, is_array, mesh_of, on_device
from .calls import checked_function
from .causes import USUAL
from .compare import Compared, Report, compared
from .errors import MeshError, ParityError, mesh_text, report
from .gradient import vjp
from .mesh import axes_of, played_ranks, unit
from .parting import Parting, Runs
from .placement import shard, unshard
from .recording import Recorder
from .spec import P

_SHOWN = 8  # so many differing values are named in a message


def check(f: Callable[..., Any], *args: Any, mesh: Any = None, spec: Any = None, gradients: bool = True,
          rtol: float | None = None, atol: float = 0.0) -> Report:  # fmt: skip
    """Run `f` on one device and on a mesh, and compare every result and every gradient.

    Both runs are of `f` as it stands. On one device every mesh counts as one rank: `shard_map` runs its body on whole
    values, collectives over one rank do nothing, `with_sharding` leaves values plain, draws are whole. Gradients are of
    all results together, weighted by fixed random numbers (of the result itself, where that is one number), by every
    floating-point leaf of the arguments. Where something differs both runs are made once more and recorded, to find
    the line. Small inputs will do.

    Args:
        f: a pure function of trees to a tree: plain torch, `with_sharding`, `shard_map`, draws, all of them mixed.
        args: its arguments, trees of plain tensors that are the same whole values on every rank, or of arrays.
        mesh: a DeviceMesh, simulated or real, all of whose ranks make this call. By default that of the arguments, or
            the current mesh. It is the current mesh while `f` runs.
        spec: how the arguments lie on the mesh: a `P`, or a tuple with a `P` or a prefix tree for each argument (for
            one argument its own prefix tree will do). By default arrays lie as they do, and every rank holds what is
            plain.
        gradients: False to compare results alone, for a function that cannot be differentiated.
        rtol: by how much floats may differ, relative to the largest element of their value; by default 1e-9 for
            float64, 2e-5 for float32, 4e-3 for float16, 3e-2 for bfloat16. Integers and bools must be equal.
        atol: by how much they may differ besides.

    Returns:
        A `Report`: a table of all values with their differences, to print.

    Raises:
        ParityError: something differs: the message names each value with its path and its ratio (a factor such as the
            size of an axis is named), the line where the runs part, and the usual cause. ``error.report`` is the table.
            Also if `f` fails in one run only. On all ranks alike.
        MeshError: no mesh.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> def layer(x, w, b):
    ...     return vfn.psum(x @ w + b, "tp")  # b is added on each rank: once would be right
    >>> x, w, b = torch.ones(2, 4), torch.arange(12.0).view(4, 3), torch.ones(3)
    >>> with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh((2,), ("tp",))):
    ...     on_ranks = vfn.shard_map(layer, in_specs=(P(None, "tp"), P("tp"), P()), out_specs=P())
    ...     try:
    ...         vfn.check(on_ranks, x, w, b)
    ...     except vfn.errors.ParityError as error:
    ...         print("\\n".join(line for line in str(error).splitlines() if "  * gradient" in line or "Instead" in line))
      * gradient of b is 2 times the one-device value (2 = size of axis 'tp')
      Instead: add it after vfn.psum(x, 'tp')
    """
    name = getattr(f, "__name__", type(f).__name__)
    where = f"check({name})"
    checked_function(f, "check")
    args = tree.map_(lambda x: torch.as_tensor(x) if isinstance(x, np.ndarray) else x, args)
    mesh = _found_mesh(where, mesh, args)
    laid = args if spec is None else shard(args, mesh, _per_argument(spec, args))
    paths = _argument_paths(f, args)
    _same_everywhere(where, args, paths, mesh)
    audit = _Audit(where, f, unshard(args), laid, mesh, gradients, rtol, atol)
    one, many = audit.run(None), audit.run(mesh)
    if isinstance(one, Exception) or isinstance(many, Exception):
        raise _failed(where, mesh, one, many)
    rows = audit.compared(one, many, paths)
    found = Report(name, mesh, rows)
    if not found.equal:
        raise _differing(audit, found, one, many)
    return found


# --- what is compared -------------------------------------------------------------------------------------------------


class _Outcome(NamedTuple):
    """Results and gradients of one run, leaf by leaf."""

    results: list[Any]
    paths: list[str]
    gradients: list[Any]


class _Audit:
    """A function and its arguments, ready to be run on one device and on a mesh any number of times."""

    def __init__(self, where: str, f: Any, whole: Any, laid: Any, mesh: Any, gradients: bool, rtol: Any, atol: float):
        self.where, self.f, self.whole, self.laid, self.mesh = where, f, whole, laid, mesh
        self.rtol, self.atol = rtol, atol
        self.moving = [gradients and isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
                       for x in tree.leaves(whole)]  # fmt: skip
        self.generators = torch.get_rng_state()

    def run(self, mesh: Any, recorder: Recorder | None = None) -> _Outcome | Exception:
        """One run: on one device (None) or on the mesh; the error, if it fails."""
        args = tree.map_(_copied, self.laid if mesh is not None else self.whole)
        with contextlib.ExitStack() as stack:
            stack.enter_context(context.use_mesh(self.mesh))
            if context.key_uses() is not None:  # a key is used once in each run
                stack.enter_context(context.debugging())
            if mesh is None:
                stack.enter_context(context.one_device(unit))
                if self.mesh.device_type != "cpu":
                    args = tree.map_(lambda x: on_device(x, self.mesh) if isinstance(x, torch.Tensor) else x, args)
                    stack.enter_context(torch.device(self.mesh.device_type))
            torch.set_rng_state(self.generators)
            try:
                return self._outcome(args, recorder)
            except Exception as error:
                return error

    def _outcome(self, args: Any, recorder: Recorder | None) -> _Outcome:
        kept: dict[str, Any] = {}

        def called(*args: Any) -> Any:
            if recorder is None:
                out = self.f(*args)
            else:
                with context.recording(recorder.note):
                    recorder.note("the arguments", (), args)
                    with recorder:
                        out = self.f(*args)
                kept["nodes"] = [recorder.find(x) if isinstance(x, torch.Tensor) else None for x in tree.leaves(out)]
            kept["paths"] = tree.paths(out, "out")
            kept["results"] = [x.detach() if isinstance(x, torch.Tensor) else x for x in tree.leaves(out)]
            return unshard(out)

        if not any(self.moving):
            called(*args)
            gradients: list[Any] = []
        else:
            out, pullback = vjp(called, *args)
            found = tree.leaves(pullback(_cotangents(out)))
            gradients = [g for g, moves in zip(found, self.moving, strict=True) if moves]
        if recorder is not None:
            recorder.results = kept["nodes"]
        return _Outcome(kept["results"], kept["paths"], gradients)

    def compared(self, one: _Outcome, many: _Outcome, paths: Sequence[str]) -> list[Compared]:
        """Every value of the two runs; the same on every rank."""
        if one.paths != many.paths:
            both = sorted({*one.paths} ^ {*many.paths}) or ["the order of the values"]
            rows = [f"{path}: only {'on one device' if path in one.paths else 'on the mesh'}" for path in both]
            raise ParityError(report(self.where, "the results have another structure on the mesh", rows))
        moving = [f"gradient of {path}" for path, moves in zip(paths, self.moving, strict=True) if moves]
        compare = functools.partial(compared, mesh=self.mesh, rtol=self.rtol, atol=self.atol)
        return [*compare(one.paths, one.results, many.results), *compare(moving, one.gradients, many.gradients)]


def _copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) and not isinstance(x, Array) else x


def _cotangents(out: Any) -> Any:
    """Fixed random weights, so that every result counts; one for a single number."""
    leaves, treedef = tree.flatten(out)
    moving = [x for x in leaves if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())]
    alone = len(moving) == 1 and moving[0].ndim == 0
    weights = []
    for i, x in enumerate(leaves):
        if not isinstance(x, torch.Tensor):
            weights.append(x)
        elif not (x.is_floating_point() or x.is_complex()):
            weights.append(torch.zeros_like(x))
        elif alone:
            weights.append(torch.ones_like(x))
        else:
            generator = torch.Generator().manual_seed(i)
            weights.append(torch.randn(x.shape, generator=generator, device="cpu", dtype=torch.float64).to(x))
    return tree.unflatten(treedef, weights)


# --- the message ------------------------------------------------------------------------------------------------------


def _differing(audit: _Audit, found: Report, one: _Outcome, many: _Outcome) -> ParityError:
    wrong = [(i, row) for i, row in enumerate(found.rows) if row.problem]
    failures = [f"{row.path} {row.problem}" for _, row in wrong[:_SHOWN]]
    failures[0] = "\n      ".join([failures[0], *wrong[0][1].detail])
    if len(wrong) > _SHOWN:
        failures.append(f"... and {len(wrong) - _SHOWN} more: error.report")
    parting = _parting(audit, wrong[0][0], len(one.results)) or Parting((), "")
    if parting.lines:
        failures.append("\n      ".join(parting.lines))
    powers = [relation.power(row.ratio, axes_of(audit.mesh)) for _, row in wrong if row.ratio]
    usual = next((USUAL[p] for p in powers if p is not None), None)
    if usual and not parting.fix:
        failures.append(f"the usual cause of such a factor: {usual}")
    what = (
        f"{len(wrong)} of {len(found.rows)} values differ between one device and the {mesh_text(axes_of(audit.mesh))}"
    )
    text = report(audit.where, what, failures, parting.fix)
    said = wire.everyone([[text] * len(played_ranks(audit.mesh))], audit.mesh, "check")
    error = ParityError(said[0][0])  # the first rank's words, on every rank
    error.report = found
    return error


def _parting(audit: _Audit, first: int, results: int) -> Parting | None:
    """Where the runs part, of the first value that differs."""
    one, many = Recorder(), Recorder()
    for mesh, recorder in ((None, one), (audit.mesh, many)):
        if isinstance(audit.run(mesh, recorder), Exception):
            return None
    runs = Runs(one.nodes, many.nodes, audit.mesh)
    if first < results:
        return runs.find(many.results[first])
    moving = [i for i, moves in enumerate(audit.moving) if moves]
    tensors = [isinstance(x, torch.Tensor) for x in tree.leaves(audit.whole)]
    return runs.find_back(sum(tensors[: moving[first - results]]))


def _failed(where: str, mesh: Any, one: Any, many: Any) -> Exception:
    if isinstance(one, Exception) and isinstance(many, Exception):
        return many
    error, place, other = (one, "on one device", "on the mesh") if isinstance(one, Exception) else \
        (many, f"on the {mesh_text(axes_of(mesh))}", "on one device")  # fmt: skip
    fix = ""
    if error is one:
        fix = "vfn.axis_size(axis) for a number of ranks, also in permutations and shapes: on one device it is 1"
    said = f"{type(error).__name__}: {error}".replace("\n", "\n    ")
    text = report(where, f"it fails {place}, and runs {other}", [said], fix)
    found = ParityError(text)
    found.__cause__ = error
    return found


# --- arguments --------------------------------------------------------------------------------------------------------


def _found_mesh(where: str, mesh: Any, args: Any) -> Any:
    if mesh is None:
        mesh = next((mesh_of(x) for x in tree.leaves(args) if isinstance(x, torch.Tensor) and is_array(x)), None)
    mesh = mesh if mesh is not None else context.current_mesh()
    if mesh is None:
        raise MeshError(report(where, "there is no mesh: none was given, none is current, and no argument is an array",
                               fix='vfn.check(f, *args, mesh=vfn.make_mesh((2, 4), ("dp", "tp")), spec=...); '
                               "vfn.simulate(8) plays the ranks"))  # fmt: skip
    return context.checked_mesh(mesh, where)


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
        parameters = inspect.signature(f).parameters.values()
        for i, parameter in enumerate(p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)):
            if i < len(names):
                names[i] = parameter.name
    return [path for name, value in zip(names, args, strict=True) for path in tree.paths(value, name)]


def _same_everywhere(where: str, args: Any, paths: Sequence[str], mesh: Any) -> None:
    """Plain arguments must be the same on every rank: else the runs would differ for that."""
    leaves = tree.leaves(args)
    prints = [None if is_array(x) or not isinstance(x, torch.Tensor) else _fingerprint(x) for x in leaves]
    ranks = len(played_ranks(mesh))
    by_rank = [row[0] for row in wire.everyone([[prints] * ranks], mesh, "check")]
    rows = []
    for i, path in enumerate(paths):
        others = [rank for rank, row in enumerate(by_rank) if len(row) != len(prints) or row[i] != by_rank[0][i]]
        if others:
            rows.append(f"{path} is another value on rank {', '.join(map(str, others[:8]))} than on rank 0")
    if rows:
        raise ParityError(report(where, "the arguments must be the same whole values on every rank", rows,
                                 "make them from a key (vfn.random), or send rank 0's; vfn.from_local for each rank's own "
                                 "data"))  # fmt: skip


def _fingerprint(x: torch.Tensor) -> Any:
    one = _torch.peel(x.detach()).contiguous().cpu().reshape(-1).view(torch.uint8)
    return tuple(x.shape), str(x.dtype), hashlib.sha256(one.numpy().tobytes()).hexdigest()
