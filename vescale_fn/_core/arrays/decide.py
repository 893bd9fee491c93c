"""Deciding how one op on arrays is carried out: how each argument must lie, what runs, how the results lie.

A decision depends on the op, on global shapes and specs, and on static arguments alone, never on a rank's own block:
all ranks decide alike and issue the same collectives. It is asked of, in this order: the table (`rules/table.py`);
DTensor's own propagator, where a sweep has proved it (`rules/proved.py`); and last the op is computed whole on gathered
arguments, which is right for every op, and logged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base.errors import MeshError, VaryingTypeError
from ..base.messages import described, op_text, report
from ..base.op_arguments import bind, tensors_in, with_tensors
from ..base.stateful_draws import is_seeded
from ..distributed import blocks
from ..distributed.blocks import Blocks
from ..distributed.communicator import coordinates
from ..distributed.mesh import communicator_of, is_part, mesh_name, same
from ..distributed.places import is_elsewhere, place_of
from ..sharding.index_map import axes_of, dim_indices, local_shape
from ..sharding.layout import WHOLE, axes_items, layout, spec_for, text
from ..sharding.placements import normal
from ..sharding.spec import P, split_axes
from . import reshard_plan
from .array_values import reason
from .decision import Composed, Decision, MayDraw, ShapeOnly, StridesOfItself, ViewOfItself, refuse
from .dtensor_rules import propagated
from .gathered import Gathered
from .layout_solver import Solution, solved
from .lazy_layout import is_new
from .on_blocks import Local, LocalNew, LocalView, LocalWrite, OnBlocks, ViewOnBlocks, WriteOnBlocks, in_order
from .places import Copied, Meets, NotHere, added, check_writes, meeting
from .result_metas import metas
from .rules.compositions import COMPOSED, READING, composed
from .rules.parts import strided
from .rules.rule import Call, Parts, Rule, T, without_blocks
from .rules.table import find
from .rules.traits import ADDITION, NEEDS_CONTIGUOUS, RETURNS_VIEW_OF_ITSELF, SETS_STRIDES, UNSHARED_VIEW
from .stated_layout import NotAllowed, stated
from .strides import overlaps


def _mesh_of(func: Any, tensors: Sequence[torch.Tensor]) -> tuple[Any, bool]:
    """The mesh that an op runs on, and whether arguments must be brought to it: it is a place of theirs."""
    meshes: list[Any] = []
    for x in tensors:
        if isinstance(x, DTensor) and not any(same(torch_internals.mesh(x), mesh) for mesh in meshes):
            meshes.append(torch_internals.mesh(x))
    for x in tensors:
        if type(x) is Blocks and not is_part(meshes[0]):
            raise VaryingTypeError(
                report(
                    op_text(func),
                    "a value of one rank (inside shard_map) meets a whole array",
                    [text(y) if isinstance(y, DTensor) else f"{described(y)} of one rank" for y in tensors],
                    "the array as an argument of shard_map, with its own in_spec",
                )
            )
    if len(meshes) > 1 and (place := meeting(func, tensors, meshes)) is not None:
        return place, True
    if len(meshes) > 1:
        texts = [f"{text(x)} on the {mesh_name(torch_internals.mesh(x))}" for x in tensors if isinstance(x, DTensor)]
        raise MeshError(
            report(
                op_text(func),
                "arrays on different meshes do not mix",
                texts,
                f"vfn.shard(x, mesh, {layout(torch_internals.spec(tensors[0]))!r}) brings one to the other's mesh",  # type: ignore[attr-defined]
            )
        )
    return meshes[0], False


@dataclass(frozen=True, eq=False)
class _OpCall:
    """One call of an op, and what it gives on one device."""

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    mesh: Any
    tensors: Sequence[Any]
    outs: Any  # the results without values; None where these cannot be told without the arguments' values
    many: Any  # tuple or list, where there are several

    @property
    def specs(self) -> list[P]:
        """How the tensor arguments lie."""
        return [layout(torch_internals.spec(x)) if isinstance(x, DTensor) else WHOLE for x in self.tensors]

    @property
    def is_view(self) -> bool:
        """Whether results alias the first argument."""
        returns = torch_internals.schema(self.func).returns
        return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)

    @property
    def takes_lists(self) -> bool:
        """Whether an argument is a list of tensors."""
        return any(isinstance(a, (list, tuple)) and tensors_in(a) for a in (*self.args, *self.kwargs.values()))


def decide(func: Any, args: Sequence[Any], kwargs: dict[str, Any], lies: tuple[str, ...] = ()) -> Decision:
    """Decide on one call. `lies`: what is remembered of the layout of a tensor that the call does not name."""
    tensors = tensors_in(args, kwargs)
    if func is ADDITION and len(tensors) == 2 and (sum_ := added(func, tensors)) is not None:
        return sum_
    return _decided(func, args, kwargs, tensors, lies)


def _decided(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Any], lies: tuple[str, ...]
) -> Decision:
    mesh, meets = _mesh_of(func, tensors)
    if place_of(mesh) is not None:
        check_writes(func, args, kwargs, mesh)
    if meets:
        return Meets(func, mesh)
    if func in RETURNS_VIEW_OF_ITSELF:
        return ViewOfItself(func, mesh)
    if func in SETS_STRIDES:
        return StridesOfItself(func, mesh)
    refuse(func, args, kwargs)
    call = _OpCall(func, args, kwargs, mesh, tensors, *metas(func, args, kwargs, tensors))
    if call.outs is not None and not any(isinstance(o, torch.Tensor) for o in call.outs):
        return ShapeOnly(func, mesh, call.many(call.outs) if call.many else call.outs[0])
    if (steps := _steps(call)) is not None:
        decision: Decision = Composed(func, mesh, steps)
    elif place_of(mesh) is not None and call.outs is None:
        decision = Copied(func, mesh)
    else:
        decision = _on_tensors(call, lies)
        if is_elsewhere(mesh) and isinstance(decision, Gathered) and not (call.is_view or blocks.written(func)):
            outs = tuple(_dspec(mesh, WHOLE, o) if isinstance(o, torch.Tensor) else o for o in call.outs or ())
            decision = NotHere(func, mesh, decision, outs, call.many)
    return MayDraw(func, mesh, decision) if is_seeded(func) else decision


def decide_as(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], targets: Sequence[P], outs: Sequence[P]
) -> Decision | None:
    """The decision by which a call's tensor arguments lie as `targets` say, in order, and its tensor results as `outs`. None
    where no rule says how the call is split.

    Raises:
        NotAllowed: its rule does not allow it.
    """
    tensors = tensors_in(args, kwargs)
    call = _OpCall(func, args, kwargs, _mesh_of(func, tensors)[0], tensors, *metas(func, args, kwargs, tensors))
    if call.outs is None or not any(isinstance(o, torch.Tensor) for o in call.outs):
        return None
    rule, pinned = _rule(call, ())
    if rule is None or pinned:
        return None
    shapes = [tuple(o.shape) if isinstance(o, torch.Tensor) else None for o in call.outs]
    axes, each = axes_of(call.mesh), iter(outs)
    lying = [(normal(spec, axes, x.shape), tuple(x.shape)) for spec, x in zip(targets, tensors, strict=True)]
    wanted = [None if shape is None else normal(next(each), axes, shape) for shape in shapes]
    solution = stated(rule, lying, shapes, axes, wanted)
    covered = _covered(rule, [*solution.targets, *solution.outs], [*tensors, *call.outs], call.mesh)
    if covered == _SCATTERED:
        raise NotAllowed("uneven blocks in this order of axes are no ranges, which it needs")
    offsets: Any = tuple(o.storage_offset() if isinstance(o, torch.Tensor) else 0 for o in call.outs)
    return _on_blocks(call, rule, solution, covered, False, offsets if call.is_view else ())


def as_others(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Decision | None:
    """The decision by which a call is carried out as a few others (`compositions`), if its arguments lie so that it is; its
    results lie as those vote."""
    tensors = tensors_in(args, kwargs)
    call = _OpCall(func, args, kwargs, _mesh_of(func, tensors)[0], tensors, *metas(func, args, kwargs, tensors))
    steps = _steps(call) if str(func).removeprefix("aten.") in COMPOSED else None
    return Composed(func, call.mesh, steps) if steps is not None else None


def _on_tensors(call: _OpCall, lies: tuple[str, ...]) -> Decision:
    """The decision for an op that is carried out as one: on the blocks where a rule says how, else on gathered arguments."""
    func, mesh, outs = call.func, call.mesh, call.outs
    offsets: Any = ()
    if call.is_view:
        offsets = tuple(o.storage_offset() if isinstance(o, torch.Tensor) else 0 for o in outs or ())
    reads = torch.Tag.data_dependent_output in func.tags  # a number: no rule could say more than that it needs all
    ruled = reads or find(func) is not None
    gathered = Gathered(func, mesh, many=call.many, ruled=ruled, view=call.is_view, offsets=offsets)
    if outs is None:
        return gathered
    rule, pinned = _rule(call, lies)
    if rule is not None:
        rule, solution, covered = _solution(rule, call, pinned)
    else:
        rule, covered = Rule((), ()), None
        solution = propagated(func, call.args, call.kwargs, call.tensors, outs, mesh)
    if solution is None:
        return gathered
    specs, (targets, out_specs, _) = call.specs, solution
    if any(targets[i] != specs[i] for i in pinned) or any(out != specs[i] for i, out in zip(pinned, out_specs)):
        return gathered  # what is written does not lie as the target does
    return _on_blocks(call, rule, solution, covered, bool(pinned), offsets)


def _on_blocks(
    call: _OpCall, rule: Rule, solution: Solution, covered: Any, writes: bool, offsets: tuple[int, ...]
) -> Decision:
    """The decision that carries a solution out."""
    func, mesh = call.func, call.mesh
    out_dspecs = tuple(_dspec(mesh, spec, o) for o, spec in zip(call.outs, solution.outs, strict=True))
    op, finish = _replacements(rule, solution, covered, writes)
    sizes = _local_sizes(rule, func, call.outs, solution.outs, mesh)
    how: dict[str, Any] = {
        "targets": tuple(solution.targets),
        "moves": tuple(_moves(call, solution.targets)),
        "outs": out_dspecs,
        "many": call.many,
        "op": in_order(op or func) if func in NEEDS_CONTIGUOUS else op or func,
        "binds": op is not None,
        "copies": rule.copies,
        "finish": finish,
        "again": rule.again,
        "sizes": sizes,
        "reshapes": sizes is not None and (call.is_view or func in UNSHARED_VIEW),
        "fold": (rule.fold, tuple(solution.folds)) if any(solution.folds) else None,
        "covered": covered,
        "new": is_new(func, solution.outs),
        "partial": any(spec.unreduced for spec in solution.outs),
        "numbers": tuple(o if isinstance(o, int) else None for o in call.outs),
    }
    return _least(call, how, writes, offsets)


def _least(call: _OpCall, how: dict[str, Any], writes: bool, offsets: tuple[int, ...]) -> Decision:
    """The decision that does the least for what `how` says: one call of the op itself, where that is all."""
    func, mesh, sizes = call.func, call.mesh, how["sizes"]
    more = call.takes_lists or any(how[name] for name in ("moves", "many", "finish", "fold", "partial"))
    one_call = how["op"] is func and not (more or communicator_of(mesh).holds_blocks or is_elsewhere(mesh))
    if not call.takes_lists:  # the blocks of lists are written by an op's name
        how["op"] = torch_internals.direct(how["op"])
    if one_call and how["new"]:
        return LocalNew(func, mesh, how["op"], how["outs"][0])
    if writes:
        local = one_call and not sizes and not overlaps(call.args[0].shape, call.args[0].stride())
        return (LocalWrite if local else WriteOnBlocks)(func, mesh, **how)
    if call.is_view:
        return (LocalView if one_call else ViewOnBlocks)(func, mesh, offsets=offsets, **how)
    return Local(func, mesh, how["op"], how["outs"][0]) if one_call and not sizes else OnBlocks(func, mesh, **how)


def _solution(rule: Rule, call: _OpCall, pinned: Sequence[int]) -> tuple[Rule, Solution, Any]:
    """The rule, what solves it, and what each rank's block covers; where that is no range, its dims stay whole."""
    args = [(spec, tuple(x.shape)) for spec, x in zip(call.specs, call.tensors, strict=True)]
    shapes = [tuple(o.shape) if isinstance(o, torch.Tensor) else None for o in call.outs]
    solution = solved(rule, args, shapes, axes_of(call.mesh), pinned)
    covered = _covered(rule, [*solution.targets, *solution.outs], [*call.tensors, *call.outs], call.mesh)
    if covered != _SCATTERED:
        return rule, solution, covered
    rule = without_blocks(rule)
    return rule, solved(rule, args, shapes, axes_of(call.mesh), pinned), None


def _dspec(mesh: Any, spec: P, out: Any) -> Any:
    """The DTensorSpec of a result; None where it is no tensor."""
    return spec_for(mesh, spec, out.shape, tuple(out.stride()), out.dtype) if isinstance(out, torch.Tensor) else None


def _moves(call: _OpCall, targets: Sequence[P]) -> Iterator[Any]:
    """Which tensors move, by which steps, and why."""
    for i, (x, spec, target) in enumerate(zip(call.tensors, call.specs, targets, strict=True)):
        if steps := reshard_plan.plan(tuple(x.shape), axes_items(call.mesh), spec, target):
            yield i, steps, reason(call.func, tuple(x.shape), x.dtype, spec, target)


def _replacements(rule: Rule, solution: Solution, covered: Any, writes: bool) -> tuple[Any, Any]:
    """What runs on the blocks instead of the op, and what makes the results of its parts; None where the op itself gives
    them, as it does where nothing is split."""
    specs = (*solution.targets, *solution.outs)
    needed = {"blocks": covered is not None, "parts": _splits_parts(rule, specs), "": True}
    if not needed[rule.only] or (rule.finish is not None and not any(solution.folds)):
        return None, None
    return _written_by(rule.op) if writes and rule.op else rule.op, rule.finish


def _steps(call: _OpCall) -> Any:
    """What carries the op out as others, on arrays: by our own composition, or by torch's where there is no rule."""
    func = call.func
    name = str(func).removeprefix("aten.")
    if name in COMPOSED and call.outs is not None:
        bound = bind(func, call.args, call.kwargs)
        rows: dict[str, Any] = {
            at: split_axes(layout(torch_internals.spec(x)), x.ndim) if isinstance(x, DTensor) else ((),) * x.ndim
            for at, x in bound.items()
            if isinstance(x, torch.Tensor)
        }
        steps = composed(name, bound, rows, axes_of(call.mesh))
        dtypes = tuple(o.dtype if isinstance(o, torch.Tensor) else None for o in call.outs)
        return steps and (lambda args, kwargs: steps(dtypes, *bind(func, args, kwargs).values()))
    if name == "as_strided.default" and (parts := strided(*list(bind(func, call.args, call.kwargs).values())[:4])):
        return parts
    if find(func) is not None or blocks.written(func) or name in READING:
        return None
    parts = torch_internals.in_parts(func)
    return parts and (lambda args, kwargs: parts(*args, **kwargs))


def _rule(call: _OpCall, lies: tuple[str, ...]) -> tuple[Rule | None, list[int]]:
    """The rule of a call, and which of its tensors are written and so must stay where they are."""
    func, args, tensors = call.func, call.args, call.tensors
    places = blocks.written(func)
    make_rule = find(func)
    if make_rule is None or any(i >= len(args) for i, _ in places):  # the last: out=, a new value
        return None, []
    written = {id(x) for i, _ in places for x in (args[i] if isinstance(args[i], (list, tuple)) else (args[i],))}
    pinned = [i for i, x in enumerate(tensors) if id(x) in written]
    if any(not isinstance(tensors[i], DTensor) for i in pinned) or len(pinned) < len(written):
        return None, []
    ts = tuple(T(i, tuple(x.shape), x.dtype) for i, x in enumerate(tensors))
    by_name = with_tensors(bind(func, args, call.kwargs), iter(ts))
    name = torch_internals.operator_name(func).removeprefix("aten::")
    shapes = tuple(tuple(o.shape) if isinstance(o, torch.Tensor) else None for o in call.outs)
    dtypes = tuple(o.dtype if isinstance(o, torch.Tensor) else None for o in call.outs)
    return make_rule(Call(name.removesuffix("_") if places else name, by_name, ts, shapes, dtypes, lies)), pinned


def _written_by(op: Any) -> Any:
    """What writes the result of `op` into its first argument."""
    return lambda block, *args, **kwargs: block.copy_(op(block, *args, **kwargs))


def _splits_parts(rule: Rule, specs: Sequence[P]) -> bool:
    """Whether a dim that is several dims seen as one is split."""
    rows = zip((*rule.ins, *rule.outs), specs, strict=True)
    return any(
        names and type(label) is Parts
        for row, spec in rows
        for names, label in zip(split_axes(spec, len(row)), row, strict=True)
    )


_SCATTERED = ()  # some block is no contiguous part: uneven, in an order not the mesh's


def _covered(rule: Rule, specs: Sequence[Any], tensors: Sequence[Any], mesh: Any) -> Any:
    """What the block of each rank that this process plays covers along the rule's `blocks`: a range, or a tuple of them.
    None where these dims are whole."""
    axes, found, split = axes_of(mesh), [], False
    for label in rule.blocks:
        at = next(
            (
                (spec, x, row.index(label))
                for row, spec, x in zip((*rule.ins, *rule.outs), specs, tensors, strict=True)
                if label in row
            ),
            None,
        )
        if at is None:
            return None
        spec, x, dim = at
        size, names = x.shape[dim], split_axes(spec, x.ndim)[dim]
        everyone = itertools.product(*(range(axes[a]) for a in names))  # all ranks decide alike
        if not all(type(dim_indices(size, names, axes, dict(zip(names, place)))) is range for place in everyone):
            return _SCATTERED
        found.append((size, names))
        split = split or bool(names)
    if not split:
        return None

    def covers(rank: int) -> Any:
        place = coordinates(mesh, rank)
        mine = [dim_indices(size, names, axes, place) or range(size, size) for size, names in found]
        return mine[0] if len(mine) == 1 else tuple(mine)

    return communicator_of(mesh).by_rank(covers)


def _local_sizes(rule: Rule, func: Any, outs: Any, out_specs: Sequence[P], mesh: Any) -> Any:
    """The size argument on each rank that this process plays."""
    if not rule.sizes:
        return None
    position = next(
        i for i, argument in enumerate(torch_internals.schema(func).arguments) if argument.name == rule.sizes
    )
    shape, axes = tuple(outs[0].shape), axes_of(mesh)
    return position, communicator_of(mesh).by_rank(
        lambda rank: local_shape(shape, axes, out_specs[0], coordinates(mesh, rank))
    )
