"""How one op on arrays is carried out: the layout that each argument needs, what runs, the layouts of the results.

A decision depends on the op, on global shapes and specs, and on static arguments alone, never on a rank's own block:
all ranks decide alike and issue the same collectives. It is asked of, in this order: the table (`rules/table.py`);
DTensor's own propagator, where a sweep has proved it (`rules/proved.py`); and last the op is computed whole on gathered
arguments, which is right for every op, and logged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base.errors import InPlaceError, MeshError, VaryingTypeError
from ..base.messages import described, mesh_text, op_text, report
from ..base.op_arguments import bind, replace, tensors_in
from ..distributed import blocks
from ..distributed.blocks import Blocks
from ..distributed.mesh import coordinates, is_part, is_simulated, played_ranks, same
from ..sharding.index_map import all_hold_some, axes_of, dim_indices, local_shape
from ..sharding.layout import WHOLE, axes_items, layout, spec_for, text, type_text
from ..sharding.spec import P, axes_named, from_split_axes, split_axes
from . import reshard
from .dtensor_rules import propagated
from .lazy_layout import is_new
from .merged_operands import apart, has_merged
from .refusals import MEMORY, STORAGE
from .rules.compositions import COMPOSED, READING, composed
from .rules.parts import strided
from .rules.rule import Call, Parts, Rule, T, without_blocks
from .rules.table import SHAPES, find
from .stateful_draws import is_seeded, refuse_seeded

STEP_BY_STEP, PLAIN, VIEW, WRITE, NEW = range(5)  # the ways to carry a decision out


@dataclass(frozen=True, slots=True)
class Decision:
    """How one op is carried out. `targets` is None where the op is computed whole."""

    mesh: Any
    targets: tuple[P, ...] | None  # how each tensor argument must lie, in order
    # (which tensor argument, the steps to its target, why)
    moves: tuple[tuple[int, tuple[reshard.Step, ...], str], ...]
    outs: tuple[Any, ...]  # a DTensorSpec, or None for no tensor, for each result
    many: bool  # whether the op gives a tuple or list of results
    op: Any = None  # what runs on the blocks, with all arguments bound, where it is not the op itself
    copies: bool = False  # the results are copies where the op gives views
    finish: Any = None  # what makes the results of the folded parts
    again: bool = False  # `finish` takes the arguments, too
    sizes: tuple[int, tuple[Any, ...]] | None = None  # (argument position, its value on each played rank)
    covered: tuple[Any, ...] | None = None  # of each played rank, what its block covers: the last argument of `op`
    # (max, min or total, the axes to fold over, for each result)
    fold: tuple[str, tuple[tuple[str, ...], ...]] | None = None
    view: bool = False  # results alias the first argument
    offsets: tuple[
        int, ...
    ] = ()  # of a view: where on one device each result begins in the memory of the first argument
    written: bool = False  # the first argument is written in place, and lies right for it
    partial: bool = False  # some result is a partial sum: it will remember what it adds up to
    new: bool = False  # the results are new arrays whose layout nobody has stated
    answer: bool = False  # the op asks about shapes alone, and `outs` is what it gives
    lists: bool = False  # some tensors come in lists
    seeded: bool = False  # whether it draws is a float's doing: asked each time
    steps: Any = None  # other ops on arrays, each decided on for itself, that it is carried out as
    simulated: bool = False

    @property
    def way(self) -> int:
        """How it is carried out: by one call on the local tensors and one wrap, or step by step."""
        if (
            self.targets is None
            or self.moves
            or self.many
            or self.op
            or self.fold
            or self.finish
            or self.partial
            or self.answer
            or self.steps
            or self.lists
            or self.seeded
            or self.simulated
            or (self.sizes and self.written)
        ):
            return STEP_BY_STEP
        if self.new:
            return NEW
        return WRITE if self.written else VIEW if self.view else STEP_BY_STEP if self.sizes else PLAIN


def _mesh_of(func: Any, tensors: Sequence[torch.Tensor]) -> Any:
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
    if len(meshes) > 1:
        texts = [
            f"{text(x)} on the {mesh_text(axes_of(torch_internals.mesh(x)))}" for x in tensors if isinstance(x, DTensor)
        ]
        raise MeshError(
            report(
                op_text(func),
                "arrays on different meshes do not mix",
                texts,
                f"vfn.shard(x, mesh, {layout(torch_internals.spec(tensors[0]))!r}) brings one to the other's mesh",  # type: ignore[attr-defined]
            )
        )
    return meshes[0]


def decide(func: Any, args: Sequence[Any], kwargs: dict[str, Any], lies: tuple[str, ...] = ()) -> Decision:
    """Decide on one call. `lies`: what is remembered of the layout of a tensor that the call does not name."""
    tensors = tensors_in(args, kwargs)
    mesh = _mesh_of(func, tensors)
    refuse(func, args, kwargs)
    specs = [layout(torch_internals.spec(x)) if isinstance(x, DTensor) else WHOLE for x in tensors]
    outs, many = _metas(func, args, kwargs, tensors)
    common: dict[str, Any] = {
        "view": _is_view(func),
        "simulated": is_simulated(mesh),
        "seeded": is_seeded(func),
        "lists": any(isinstance(a, (list, tuple)) and tensors_in(a, {}) for a in (*args, *kwargs.values())),
    }
    if common["view"] and outs is not None:
        common["offsets"] = tuple(o.storage_offset() if isinstance(o, torch.Tensor) else 0 for o in outs)
    if outs is not None and not any(isinstance(o, torch.Tensor) for o in outs):
        return Decision(mesh, (), (), outs, many, answer=True)
    if (steps := _steps(func, args, kwargs, outs, axes_of(mesh))) is not None:
        return Decision(mesh, (), (), (), many, steps=steps, **common)
    rule, pinned = _rule(func, args, kwargs, tensors, outs, lies)
    if rule is not None and outs is not None:
        shapes = [tuple(o.shape) if isinstance(o, torch.Tensor) else None for o in outs]
        lying = [(spec, tuple(x.shape)) for spec, x in zip(specs, tensors, strict=True)]
        solved = _solved(rule, lying, shapes, axes_of(mesh), pinned)
        covered = _covered(rule, [*solved[0], *solved[1]], [*tensors, *outs], mesh)
        if covered == _SCATTERED:
            rule, covered = without_blocks(rule), None
            solved = _solved(rule, lying, shapes, axes_of(mesh), pinned)
    else:
        solved, rule, covered = propagated(func, args, kwargs, tensors, outs, mesh), Rule((), ()), None
    if solved is None or outs is None:
        return Decision(mesh, None, (), (), many, **common)
    targets, out_specs, *folds = solved
    fold_axes = folds[0] if folds else ()
    if any(targets[i] != specs[i] for i in pinned) or any(out != specs[i] for i, out in zip(pinned, out_specs)):
        return Decision(mesh, None, (), (), many, **common)  # what is written does not lie as the target does
    moves = []
    for i, (x, spec, target) in enumerate(zip(tensors, specs, targets, strict=True)):
        steps = reshard.plan(tuple(x.shape), axes_items(mesh), spec, target)
        if steps:
            moves.append((i, steps, reason(func, tuple(x.shape), x.dtype, spec, target)))
    out_dspecs = tuple(
        spec_for(mesh, spec, o.shape, tuple(o.stride()), o.dtype) if isinstance(o, torch.Tensor) else None
        for o, spec in zip(outs, out_specs, strict=True)
    )
    folded = any(fold_axes)
    # where nothing is split the op itself gives the results
    split = {"blocks": covered is not None, "parts": _splits_parts(rule, (*targets, *out_specs)), "": True}
    alone = not split[rule.only] or (rule.finish is not None and not folded)
    op = None if alone else _written_by(rule.op) if pinned and rule.op else rule.op
    return Decision(
        mesh,
        tuple(targets),
        tuple(moves),
        out_dspecs,
        many,
        op=op,
        copies=rule.copies,
        finish=None if alone else rule.finish,
        again=rule.again,
        sizes=_local_sizes(rule, func, outs, out_specs, mesh),
        fold=(rule.fold, tuple(fold_axes)) if folded else None,
        covered=covered,
        written=bool(pinned),
        new=is_new(func, out_specs),
        partial=any(spec.unreduced for spec in out_specs),
        **common,
    )


def _steps(func: Any, args: Any, kwargs: Any, outs: Any, axes: dict[str, int]) -> Any:
    """What carries the op out as others, on arrays: by our own composition, or by torch's where there is no rule."""
    name = str(func).removeprefix("aten.")
    if name in COMPOSED and outs is not None:
        bound = bind(func, args, kwargs)
        rows: dict[str, Any] = {
            at: split_axes(layout(torch_internals.spec(x)), x.ndim) if isinstance(x, DTensor) else ((),) * x.ndim
            for at, x in bound.items()
            if isinstance(x, torch.Tensor)
        }
        steps = composed(name, bound, rows, axes)
        dtypes = tuple(o.dtype if isinstance(o, torch.Tensor) else None for o in outs)
        return steps and (lambda args, kwargs: steps(dtypes, *bind(func, args, kwargs).values()))
    if name == "as_strided.default" and (parts := strided(*list(bind(func, args, kwargs).values())[:4])) is not None:
        return parts
    if find(func) is not None or blocks.written(func) or name in READING:
        return None
    parts = torch_internals.in_parts(func)
    return parts and (lambda args, kwargs: parts(*args, **kwargs))


def _rule(
    func: Any, args: Any, kwargs: Any, tensors: Any, outs: Any, lies: tuple[str, ...]
) -> tuple[Rule | None, list[int]]:
    """The rule of a call, and which of its tensors are written and so must stay where they are."""
    places = blocks.written(func)
    make_rule = find(func)
    if outs is None or make_rule is None or any(i >= len(args) for i, _ in places):  # the last: out=, a new value
        return None, []
    written = {id(x) for i, _ in places for x in (args[i] if isinstance(args[i], (list, tuple)) else (args[i],))}
    pinned = [i for i, x in enumerate(tensors) if id(x) in written]
    if any(not isinstance(tensors[i], DTensor) for i in pinned) or len(pinned) < len(written):
        return None, []
    ts = tuple(T(i, tuple(x.shape), x.dtype) for i, x in enumerate(tensors))
    numbered = iter(ts)
    by_name = {name: replace(a, numbered) for name, a in bind(func, args, kwargs).items()}
    name = torch_internals.operator_name(func).removeprefix("aten::")
    call = Call(
        name.removesuffix("_") if places else name,
        by_name,
        ts,
        tuple(tuple(o.shape) if isinstance(o, torch.Tensor) else None for o in outs),
        tuple(o.dtype if isinstance(o, torch.Tensor) else None for o in outs),
        lies,
    )
    return make_rule(call), pinned


def reason(func: Any, shape: tuple[int, ...], dtype: torch.dtype, spec: P, target: P) -> str:
    """Why an argument moves, for the log: ``softmax needs dim 1 whole: f32[8,4@tp]``."""
    name, value = torch_internals.operator_name(func).split("::")[-1].strip("_"), type_text(shape, dtype, spec)
    before, after = split_axes(spec, len(shape)), split_axes(target, len(shape))
    gathered = [str(d) for d, (a, b) in enumerate(zip(before, after, strict=True)) if a and not b]
    if spec.unreduced - target.unreduced and before == after:
        return f"{name} needs the sum: {value}"
    if gathered and all(a == b for a, b in zip(before, after, strict=True) if b):
        return f"{name} needs dim{'s' * (len(gathered) > 1)} {' and '.join(gathered)} whole: {value}"
    return f"{name} needs {type_text(shape, dtype, target)}: {value}"


def refuse(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise for what has no answer on a mesh: a stateful draw, a change of storage."""
    name = torch_internals.operator_name(func).removeprefix("aten::")
    refuse_seeded(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags and name != "detach_" or name == "resize_as_":
        raise InPlaceError(
            report(
                f"torch's {name}", STORAGE, fix=f"a new array: x = x.{name.removesuffix('_')}(...), or x = x.clone()"
            )
        )
    if name == "as_strided" and hasattr(args[0], "_view_root") and not _within(*args):
        raise InPlaceError(
            report(
                "torch's as_strided", MEMORY, [f"the view is {text(args[0])}"], "index the array itself, or x.clone()"
            )
        )


def _within(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> bool:
    """Whether as_strided shows nothing but the elements of a view: stft cuts its windows so."""
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return offset is None and x.is_contiguous() and last < x.numel()


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in torch_internals.schema(func).returns)


def _metas(func: Any, args: Any, kwargs: Any, tensors: Any) -> tuple[tuple[Any, ...] | None, bool]:
    """What the results look like on one device: (None, many) where that cannot be told without the values."""
    with torch_internals.shapes_only():
        try:
            fakes = iter([torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in tensors])
            fake_args = [replace(a, fakes) for a in args]
            shaped: Any = SHAPES.get(func) or func
            out = shaped(*fake_args, **{k: replace(a, fakes) for k, a in kwargs.items()})
        except Exception:
            return None, False
    if out is None and torch_internals.operator_name(func).endswith("_"):  # a list changed in place
        out = fake_args[0]
    many = isinstance(out, (list, tuple))
    outs = tuple(out) if many else (out,)
    if all(o is None for o in outs) or not all(o is None or isinstance(o, (int, torch.Tensor)) for o in outs):
        return None, many
    return outs, many


def _stays_partial(
    axis: str, rule: Rule, args: Sequence[tuple[P, tuple[int, ...]]], outs: Sequence[Any], pinned: Sequence[int]
) -> bool:
    """Whether results are left as partial sums over an axis: where all that they are linear in is partial; or where some
    is, no smaller than a result, and the rest lies whole along the axis, so that one rank alone can add it: a bias."""
    if any(axis in axes_named(args[i][0]) for i in rule.unmoved):
        return False
    lying = [args[i] for i in rule.linear]
    partial = [axis in spec.unreduced for spec, _ in lying]
    if all(partial) or not any(partial):
        return bool(lying) and all(partial)
    largest = max(math.prod(out or ()) for out in outs)
    return all(
        math.prod(shape) >= largest if is_partial else i not in pinned and axis not in axes_named(spec)
        for i, (spec, shape), is_partial in zip(rule.linear, lying, partial, strict=True)
    )


def _solved(
    rule: Rule, args: list[tuple[P, tuple[int, ...]]], outs: Sequence[Any], axes: dict[str, int], pinned: Sequence[int]
) -> tuple[list[P], list[P], list[tuple[str, ...]]]:
    """How arguments must lie and results do, and the axes over which each result is folded."""
    if not has_merged(rule, args):
        return _solve(rule, args, outs, axes, pinned)
    fine, lying, sizes, together = apart(rule, args, outs, axes)
    if any(all(label not in row for row in (*fine.ins, *fine.outs)) for label in rule.blocks):
        return _solved(without_blocks(rule), args, outs, axes, pinned)  # no range covers such a block
    targets, out_specs, folds = _solve(fine, lying, sizes, axes, pinned)
    targets = [
        args[i][0] if i in rule.shape_only else together(spec, labels, args[i][1])
        for i, (spec, labels) in enumerate(zip(targets, rule.ins, strict=True))
    ]
    out_specs = [together(spec, labels, shape or ()) for spec, labels, shape in zip(out_specs, rule.outs, outs)]
    return targets, out_specs, folds


def _solve(
    rule: Rule,
    args: Sequence[tuple[P, tuple[int, ...]]],
    outs: Sequence[Any],
    axes: dict[str, int],
    pinned: Sequence[int],
) -> tuple[list[P], list[P], list[tuple[str, ...]]]:
    """Which axes split which label: the larger tensor stays where it is, the smaller one moves."""
    kept = {axis for axis in axes if _stays_partial(axis, rule, args, outs, pinned)}
    votes: dict[Any, dict[tuple[str, ...], float]] = {}
    sizes: dict[Any, set[int]] = {}
    for i, (spec, shape) in enumerate(args):
        for names, label, size in zip(split_axes(spec, len(shape)), rule.ins[i], shape, strict=True):
            sizes.setdefault(label, set()).add(size)
            if label is not None and (names or i in pinned) and i not in rule.shape_only:
                votes.setdefault(label, {}).setdefault(names, 0)
                votes[label][names] += math.inf if i in pinned else 1 + math.prod(shape)
    for row, shape in zip(rule.outs, outs, strict=True):
        for label, size in zip(row, shape or (), strict=True):
            sizes.setdefault(label, set()).add(size)
    for label, names in rule.wish:
        votes.setdefault(label, {}).setdefault(names, 0)
    for label in rule.sums if pinned else ():  # what is written is no partial sum
        votes.pop(label, None)
    extremes = rule.sums if rule.fold in ("max", "min") else frozenset()  # of nothing there is none
    chosen: dict[Any, tuple[str, ...]] = {}
    used: dict[Any, set[str]] = {}  # an axis splits one label of a call
    for label in sorted(votes, key=lambda label: (label in rule.yields, -max(votes[label].values()))):
        names = max(votes[label], key=votes[label].__getitem__)
        taken = used.setdefault(label[0] if rule.apart else None, set(kept))
        n = 0
        while (
            n < len(names)
            and names[n] not in taken
            and (
                (label not in rule.even and len(sizes[label]) == 1)
                or all(s % math.prod(axes[a] for a in names[: n + 1]) == 0 for s in sizes[label])
            )
            and (label not in extremes or all(all_hold_some(s, names[: n + 1], axes) for s in sizes[label]))
        ):
            n += 1
        chosen[label] = names[:n]
        taken.update(chosen[label])

    def rows(labels: Sequence[Any]) -> list[tuple[str, ...]]:
        return [chosen.get(label, ()) if label is not None else () for label in labels]

    def missing(labels: Sequence[Any], result: int = 0) -> set[str]:
        sums = {label for label in rule.sums if not rule.apart or label[0] == result}
        return {axis for label in sums if label not in labels for axis in chosen.get(label, ())}

    targets = []
    for i, (spec, _) in enumerate(args):
        unreduced = (kept if i in rule.linear else set()) | (missing(rule.outs[0]) if i in rule.joins else set())
        targets.append(spec if i in rule.shape_only else from_split_axes(rows(rule.ins[i]), unreduced))
    if rule.shape_only and not rule.linear:  # a new tensor that lies as one whose shape it has
        for i in rule.shape_only:
            for names, label in zip(split_axes(args[i][0], len(args[i][1])), rule.ins[i], strict=True):
                if label is not None:
                    chosen[label] = names
    add = rule.fold == "sum"
    gone = [missing(row, result) for result, row in enumerate(rule.outs)]
    out_specs = [from_split_axes(rows(row), kept | m if add else kept) for row, m in zip(rule.outs, gone, strict=True)]
    folds = [() if add else tuple(a for a in axes if a in m) for m in gone]
    return targets, out_specs, folds


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
        mine = [dim_indices(size, names, axes, coordinates(mesh, rank)) for rank in played_ranks(mesh)]
        found.append([one or range(size, size) for one in mine])
        split = split or bool(names)
    if not split:
        return None
    return tuple(found[0]) if len(found) == 1 else tuple(zip(*found))


def _local_sizes(rule: Rule, func: Any, outs: Any, out_specs: Sequence[P], mesh: Any) -> Any:
    """The size argument on each rank that this process plays."""
    if not rule.sizes:
        return None
    position = next(
        i for i, argument in enumerate(torch_internals.schema(func).arguments) if argument.name == rule.sizes
    )
    axes = axes_of(mesh)
    return position, tuple(
        local_shape(tuple(outs[0].shape), axes, out_specs[0], coordinates(mesh, rank)) for rank in played_ranks(mesh)
    )
