"""A recorded step, carried out call by call on the arrays of a mesh, each call as a layout says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from .._core import torch_internals
from .._core.arrays.array import is_array, mesh_of, place, spec_of
from .._core.base import context, state, tree
from .._core.base.containers import opened
from .._core.base.errors import MeshError, SpecError, TransformError
from .._core.base.messages import described, mesh_text, report
from .._core.distributed.mesh import same
from .._core.distributed.places import whole_mesh
from .._core.sharding.index_map import axes_of
from .._core.sharding.layout import type_text
from .._core.sharding.placements import normal
from .._core.sharding.spec import P, problems
from ..plan.ir.graph import output, value
from ..plan.tracing import ambient
from ..plan.tracing import leaves as leaves_
from ..plan.tracing.traced_float import Number
from .apply_calls import Calls, early_moves, results
from .by_name import placed
from .recording import Recording, last_uses
from .search.layouts import Layouts
from .search.sums import Widened, sums_in, widened

_RECORD = "a choice for these arguments"
_SETTINGS = [ambient.NAMES.index(name) for name in ("the dtype of sums", "torch's default dtype", "autocast")]


def applied(recorded: Recording, layouts: Layouts, mesh: Any = None) -> Callable[..., Any]:
    """A function of the step's arguments that carries it out as a layout says.

    Args:
        recorded: the step.
        layouts: how its arguments, its calls and its results lie.
        mesh: with the axes of the layout; by default that of the arguments, or the current one.

    Returns:
        A function that runs eagerly, on simulated ranks, on a mesh without ranks, and under `jit`. Plain arguments are laid out
        as they come in; arrays must lie as the layout says.

    Raises:
        SpecError: the layout does not fit the recording. Of the function: an argument that is of another shape, or lies
            otherwise; a call that its rule does not allow to be split so.
    """
    check(recorded, layouts)
    return Applied(recorded, layouts, mesh)


def check(recorded: Recording, layouts: Layouts) -> None:
    """Raise where a layout does not fit a recording: its names, the number of its specs, and their axes and dims."""
    nodes, about = recorded.placeholders, recorded.about.calls
    known = {node.name: node for node in about}
    wrong: list[str] = []
    _count(wrong, "inputs", layouts.inputs, len(nodes))
    if layouts.outputs:
        _count(wrong, "outputs", layouts.outputs, len(recorded.results))
    for name, call in layouts.calls.items():
        if name not in known:
            wrong.append(f"calls[{name!r}]: the recording has no such call")
            continue
        _count(wrong, f"calls[{name!r}].ins", call.ins, len(about[known[name]].operands))
        _count(wrong, f"calls[{name!r}].outs", call.outs, len(results(known[name])))
    if not wrong:
        wrong += _misfits(recorded, layouts)
    if wrong:
        raise SpecError(report("choice", f"the layout does not fit the recording of {recorded.name}", wrong))


def _count(wrong: list[str], where: str, specs: Sequence[Any], count: int) -> None:
    if len(specs) != count:
        wrong.append(f"{where}: {len(specs)} specs for {count}")


def _misfits(recorded: Recording, layouts: Layouts) -> Iterator[str]:
    """The specs that do not fit what they are of."""
    of: list[tuple[str, P | None, Any]] = [
        (path, spec, value(node)) for path, spec, node in zip(recorded.paths, layouts.inputs, recorded.placeholders)
    ]
    for node, about in recorded.about.calls.items():
        if (call := layouts.calls.get(node.name)) is not None:
            of += [(f"{node.name} of {x.name}", spec, value(x)) for x, spec in zip(about.operands, call.ins)]
            of += [(node.name, spec, x) for x, spec in zip(results(node), call.outs)]
    for i, (spec, node) in enumerate(zip(layouts.outputs, recorded.results)):
        if spec is not None:
            of.append((f"output {i}", spec, None if node is None else value(node)))
    fits = set[Any]()  # most lie as others do
    for what, spec, x in of:
        if isinstance(x, torch.Tensor) and not isinstance(spec, P):
            yield f"{what}: {described(spec)}, not a vfn.P"
        elif isinstance(spec, P) and not isinstance(x, torch.Tensor):
            yield f"{what}: {spec!r}, of what is no tensor"
        elif isinstance(spec, P) and (spec, x.ndim) not in fits:
            wrong = [f"{what}: {spec!r}: {problem}" for problem in problems(spec, layouts.mesh, x.ndim)]
            if spec.reduced or spec.at:
                wrong.append(f"{what}: {spec!r}: a layout here has dims and what is unreduced, nothing else")
            yield from wrong
            if not wrong:
                fits.add((spec, x.ndim))


class Applied:
    """A recorded step in a layout; made by `applied`."""

    def __init__(self, recorded: Recording, layouts: Layouts, mesh: Any) -> None:
        functools.update_wrapper(self, recorded.f)
        self.recorded, self.layouts, self._mesh = recorded, layouts, mesh
        self.__name__ = recorded.name
        about, kept = recorded.about, output(recorded.graph).all_input_nodes
        self._early = early_moves(about.calls, layouts.calls, {*about.hot, *kept})
        self._calls, self._ends, self._stated = list(about.calls), about.ends, dict(layouts.calls)
        if behind := widened([*about.calls], layouts.calls, about.hot):
            self._widen(behind, kept)

    def _widen(self, behind: Mapping[fx.Node, Widened], kept: Sequence[fx.Node]) -> None:
        """Have partial sums cast as soon as they are made, and added up then."""
        moved = {x for one in behind.values() for x in one.calls}
        each = ((node, *behind[node].calls) if node in behind else (node,) for node in self._calls if node not in moved)
        self._calls = [x for some in each for x in some]
        self._ends = last_uses(self._calls, kept)
        for made, one in behind.items():
            for x in (made, *one.calls[:-1]):
                self._early.pop(x, None)
            if not one.spec.unreduced:
                self._early[one.calls[-1]] = one.spec, one.calls[-1]
            for x in one.calls:  # which the rules do to partial sums as they are
                del self._stated[x.name]

    @torch_internals.not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = (placed(self.recorded.f, args, kwargs, "choice").args,)
        leaves, treedef = opened(given, "choice", lambda: tree.paths(given, "args"), numpy=True, modules=True)
        mesh = self._checked(leaves, treedef)
        with torch.no_grad(), _lines() as at:
            made = self._run(self._inputs(leaves, mesh), mesh, at)
            found = self._outputs(made, leaves, mesh, at)
        return tree.unflatten(self.recorded.recorded.out_def, found)

    # --- what it is given ---------------------------------------------------------------------------------------------

    def _checked(self, leaves: Sequence[Any], treedef: Any) -> Any:
        """The mesh of a call; or raise where the recording is not right for it."""
        recorded = self.recorded
        if torch_internals.transforming() or torch_internals.forward_ad_active() or context.body() is not None:
            what = "a chosen layout is of a whole step: it runs under no transform and in no shard_map"
            raise TransformError(report("choice", what, fix="the transform in the step"))
        wrong = differing(recorded, leaves, treedef)
        if wrong and treedef != recorded.call.treedef:
            raise other(recorded, wrong)
        names = recorded.call.names()
        around = ambient.around()
        wrong += [f"{ambient.NAMES[i]} differs" for i in _SETTINGS if around[i] != recorded.call.key[3][i]]
        if (changed := recorded.captured.changed()) is not None:
            wrong.append(f"{changed}, which it closes over, has changed")
        if wrong:
            raise other(recorded, wrong)
        if torch.is_grad_enabled() and (
            asking := [name for name, x in zip(names, leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
        ):
            what = "arguments require gradients, which a recorded step does not follow"
            raise TransformError(report("choice", what, asking, "vfn.grad in the step; or x.detach()"))
        return mesh_for(self.layouts.mesh, self._mesh, leaves)

    def _inputs(self, leaves: Sequence[Any], mesh: Any) -> list[Any]:
        """What each placeholder stands for, laid out."""
        recorded, found, wrong = self.recorded, list[Any](), list[str]()
        constants = iter(recorded.recorded.constants)
        for path, at, spec in zip(recorded.paths, recorded.leaves, self.layouts.inputs, strict=True):
            x = next(constants) if at is None else leaves[at]
            if spec is None:
                found.append(x)
                continue
            goal = normal(spec, self.layouts.mesh, x.shape)
            if is_array(x) and not (same(mesh_of(x), mesh) and normal(spec_of(x), self.layouts.mesh, x.shape) == goal):
                is_ = f"{type_text(x.shape, x.dtype, spec_of(x))} on the {mesh_text(axes_of(mesh_of(x)))}"
                wrong.append(f"{path} is {is_}, the layout says {spec!r}")
            else:
                found.append(x if is_array(x) else place(_plain(x), mesh, goal, "choice"))
        if wrong:
            fix = "vfn.with_sharding(x, spec), with the specs of the choice"
            raise SpecError(report("choice", f"arguments of {recorded.name} lie otherwise", wrong, fix))
        return found

    # --- running it ---------------------------------------------------------------------------------------------------

    def _run(self, given: Sequence[Any], mesh: Any, at: Callable[[fx.Node], None]) -> list[Any]:
        """What the graph gives."""
        about = self.recorded.about
        run = Calls(mesh, about.hot, about.calls, self.layouts.keeps)
        for node, x in zip(self.recorded.placeholders, given, strict=True):
            run.hold(node, x)
        for node in self._calls:
            at(node)
            run.hold(node, run.run(node, self._stated.get(node.name)))
            if node in self._early:
                run.move(node, *self._early[node])
            for x in self._ends.get(node, ()):
                run.forget(x)
        gives: Any = output(self.recorded.graph).args[0]
        return [run.given(x) for x in gives]

    def _outputs(
        self, made: Sequence[Any], leaves: Sequence[Any], mesh: Any, at: Callable[[fx.Node], None]
    ) -> list[Any]:
        """The leaves of the result."""
        recorded, found = self.recorded.recorded, list[Any]()
        specs = self.layouts.outputs or (None,) * len(recorded.results)
        for how, spec, node in zip(recorded.results, specs, self.recorded.results, strict=True):
            if isinstance(how, leaves_.Result):
                x = made[how.places[0]]
            else:
                x = leaves[how[1]] if how[0] == "input" else how[1]
            if spec is not None and isinstance(x, torch.Tensor):
                if node is not None and node.op == "call_function":
                    at(node)
                x = place(x, mesh, normal(spec, self.layouts.mesh, x.shape), "a result of the step")
            found.append(x)
        return found


def differing(recorded: Recording, leaves: Sequence[Any], treedef: Any) -> list[str]:
    """In what arguments differ from those that a step was recorded for."""
    if treedef != recorded.call.treedef:
        return ["the arguments' trees differ"]
    return [
        f"{name} was {leaves_.described(was)} and is {leaves_.described(is_)}"
        for name, was, is_ in zip(recorded.call.names(), recorded.call.leaves, leaves, strict=True)
        if not _alike(was, is_)
    ]


def other(recorded: Recording, wrong: Sequence[str]) -> SpecError:
    """What is said of arguments that a layout was not chosen for."""
    what = f"the layout was chosen for {recorded.name} of other arguments"
    return SpecError(report("choice", what, wrong, _RECORD))


def mesh_for(axes: Mapping[str, int], mesh: Any, leaves: Sequence[Any]) -> Any:
    """The mesh that a call runs on: the one that is given, that of its arguments, or the current one; of these axes."""
    own = next((whole_mesh(mesh_of(x)) for x in leaves if isinstance(x, torch.Tensor) and is_array(x)), None)
    mesh = mesh or own or context.current_mesh()
    wanted = mesh_text(axes)
    if mesh is None:
        raise MeshError(report("choice", f"there is no mesh to run on: the layout is of a {wanted}"))
    if list(axes_of(mesh).items()) != list(axes.items()):
        what = f"the layout is of a {wanted}, the mesh is a {mesh_text(axes_of(mesh))}"
        raise MeshError(report("choice", what, fix="a choice for this mesh"))
    return mesh


def _plain(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.as_tensor(x)


def _alike(was: Any, is_: Any) -> bool:
    """Whether a recording for one leaf is right for another."""
    if isinstance(was, torch.Tensor):
        x = _plain(is_) if hasattr(is_, "__array__") else is_
        return isinstance(x, torch.Tensor) and was.shape == x.shape and was.dtype is x.dtype
    if leaves_.is_number(was) and isinstance(is_, Number):
        is_ = is_.meant
    return not isinstance(is_, torch.Tensor) and leaves_.signature(was) == leaves_.signature(is_)


@contextmanager
def _lines() -> Iterator[Callable[[fx.Node], None]]:
    """Within the block, what is logged and recorded is of the line, and of the repetition, that a node was recorded with, and
    added up in the dtype that was said there; and nobody looks for a Python loop of the user's."""
    recorder: Any = torch_internals.recorder()
    before = (recorder.said, recorder.said_again, recorder.counted) if recorder is not None else None
    if recorder is not None:
        recorder.counted = None

    def at(node: fx.Node) -> None:
        line, again = node.meta.get("line") or "", node.meta.get("again")
        state.put(line=line)
        context.sum_in(sums_in(node))
        if recorder is not None:
            recorder.said, recorder.said_again = line, again

    sums = context.sums_in()
    with context.setting(line=state.now().line):
        try:
            yield at
        finally:
            context.sum_in(sums)
            if recorder is not None and before is not None:
                recorder.said, recorder.said_again, recorder.counted = before
