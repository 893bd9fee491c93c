"""The eager interpreter: one aten op on sharded values, with every decision cached.

For one op it looks up, or makes, a `Decision`: how each argument must lie, what runs on the blocks, how the results lie.
Then it moves what must move, runs, and wraps. A decision depends on the op, on global shapes and specs, and on static
arguments alone, never on a rank's own block: all ranks decide alike and issue the same collectives.

A decision is asked of, in this order: the table (`ops/rules.py`); DTensor's own propagator, where a sweep has proved it
(`ops/proved.py`); and last the op is computed whole on gathered arguments, which is right for every op, and logged.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from . import _torch, blocks, context, reshard
from .blocks import Blocks
from .errors import InPlaceError, MeshError, RandomError, ReshardError, TypingError, mesh_text, report
from .mesh import axes_of, coordinates, is_simulated, played_ranks, same
from .ops.rule import Call, Rule, T
from .ops.rules import find
from .spec import P, from_placements, from_split_axes, local_indices, split_axes, to_placements

WHOLE = P()


# --- specs of arrays, interned ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=65536)
def spec_for(mesh: Any, spec: P, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The DTensorSpec of an array; equal ones are one object, so that looking up decisions compares identities."""
    placements = to_placements(spec, axes_of(mesh), len(shape))
    return _torch.DTensorSpec(mesh, placements, tensor_meta=_torch.TensorMeta(torch.Size(shape), stride, dtype))


@functools.lru_cache(maxsize=65536)
def layout(spec: Any) -> P:
    """The `P` of a DTensorSpec."""
    return from_placements(spec.placements, axes_of(spec.mesh), len(spec.tensor_meta.shape))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of `shape`."""
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def axes_items(mesh: Any) -> tuple[tuple[str, int], ...]:
    """The axes of a mesh as (name, size) pairs: hashable."""
    return tuple(axes_of(mesh).items())


def type_text(shape: Sequence[int], dtype: torch.dtype, spec: P) -> str:
    """A value's type on one short line: ``f32[8@dp,4]{U:tp}``."""
    rows = split_axes(spec, len(shape))
    dims = [f"{size}@{'+'.join(names)}" if names else str(size) for size, names in zip(shape, rows, strict=True)]
    return f"{_SHORT.get(dtype, str(dtype).removeprefix('torch.'))}[{','.join(dims)}]" + "".join(
        f"{{{letter}:{','.join(sorted(names))}}}" for letter, names in (("U", spec.unreduced), ("R", spec.reduced)) if names
    )


_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


# --- decisions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decision:
    """How one op is carried out. `targets` is None where the op is computed whole."""

    mesh: Any
    targets: tuple[P, ...] | None  # how each tensor argument must lie, in order
    moves: tuple[tuple[int, tuple[reshard.Step, ...], str], ...]  # (which tensor argument, the steps to its target, why)
    outs: tuple[Any, ...]  # a DTensorSpec, or None for no tensor, for each result
    many: bool  # whether the op gives a tuple or list of results
    op: Any = None  # what runs on the blocks, with all arguments bound, where it is not the op itself
    finish: Any = None  # what makes the results of the folded parts
    sizes: tuple[int, tuple[Any, ...]] | None = None  # (argument position, its value on each played rank)
    fold: tuple[str, tuple[tuple[str, ...], ...]] | None = None  # (max, min or total, the axes to fold over, for each result)
    view: bool = False  # results alias the first argument
    written: bool = False  # the first argument is written in place, and lies right for it
    partial: bool = False  # some result is a partial sum: it will remember what it adds up to
    lists: bool = False  # some tensors come in lists
    seeded: bool = False  # whether it draws is a float's doing: asked each time
    simulated: bool = False

    @property
    def way(self) -> int:
        """How it is carried out: by one call on the local tensors and one wrap, or step by step."""
        if (self.targets is None or self.moves or self.many or self.op or self.fold or self.finish or self.partial
                or self.lists or self.seeded or self.simulated or (self.sizes and self.written)):  # fmt: skip
            return _STEP_BY_STEP
        return _WRITE if self.written else _VIEW if self.view else _STEP_BY_STEP if self.sizes else _PLAIN


_STEP_BY_STEP, _PLAIN, _VIEW, _WRITE = range(4)
_CACHE_SIZE = 16384
_cache: OrderedDict[Any, tuple[Decision, int]] = OrderedDict()


def cache_info() -> dict[str, int]:
    """How many decisions are remembered, and how many can be."""
    return {"decisions": len(_cache), "limit": _CACHE_SIZE}


def _key(a: Any) -> Any:
    kind = a.__class__
    if kind is int or kind is bool:
        return kind, a  # 1, True and 1.0 are equal, and not the same
    if kind is float:
        return a if a == 2.0 else float  # no decision depends on a float, but for the Euclidean norm's order
    if kind is list or kind is tuple:
        return tuple([_key(x) for x in a])
    if isinstance(a, torch.Tensor):
        return a._spec if isinstance(a, DTensor) else (a.shape, a.stride(), a.dtype, a.device.type)
    return kind, a


def dispatch(cls: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    """Carry out one aten op on arrays of class `cls`."""
    key = [func]
    for a in args:
        key.append(a._spec if a.__class__ is cls else _key(a))
    if kwargs:
        for name, a in kwargs.items():
            key.append((name, _key(a)))
    key = tuple(key)
    found = _cache.get(key)
    if found is None:
        decision = _decide(cls, func, args, kwargs or {})
        found = _cache[key] = (decision, decision.way)
        if len(_cache) > _CACHE_SIZE:
            _cache.popitem(last=False)
    decision, way = found
    if way == _STEP_BY_STEP:
        return _carry_out(cls, func, args, kwargs or {}, decision)
    local = [a._local_tensor if a.__class__ is cls else a for a in args]
    if way == _PLAIN:
        out = func(*local, **kwargs) if kwargs else func(*local)
        return _torch.new_dtensor(cls, out, decision.outs[0], requires_grad=False)
    source = args[0]
    notes = source.__dict__
    if way == _WRITE:
        if notes:
            _check_writable(func, source)
        func(*local, **kwargs) if kwargs else func(*local)
        if notes:
            _after_write(source)
        return source
    sizes = decision.sizes
    if sizes is not None:
        local[sizes[0]] = sizes[1][0]
    try:
        out = func(*local, **kwargs) if kwargs else func(*local)
    except RuntimeError:
        return _carry_out(cls, func, args, kwargs or {}, decision)
    wrapped = _torch.new_dtensor(cls, out, decision.outs[0], requires_grad=False)
    if notes:
        _note_views(source, (wrapped,), False)
    else:
        wrapped._root = source
    return wrapped


# --- deciding ---------------------------------------------------------------------------------------------------------


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for a in (*args, *kwargs.values()):
        if isinstance(a, torch.Tensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found.extend(x for x in a if isinstance(x, torch.Tensor))
    return found


def _replace(a: Any, values: Any) -> Any:
    """`a` with each tensor in it replaced by the next of the iterator `values`."""
    if isinstance(a, torch.Tensor):
        return next(values)
    if isinstance(a, (list, tuple)):
        return type(a)(next(values) if isinstance(x, torch.Tensor) else x for x in a)
    return a


def _mesh_of(func: Any, tensors: Sequence[torch.Tensor]) -> Any:
    meshes: list[Any] = []
    for x in tensors:
        if isinstance(x, DTensor) and not any(same(x._spec.mesh, mesh) for mesh in meshes):
            meshes.append(x._spec.mesh)
        if type(x) is Blocks:
            raise TypingError(report(str(func), "a value of one rank (inside shard_map) meets a whole array",
                                     fix="pass the array to shard_map as an argument, with its own in_spec"))  # fmt: skip
    if len(meshes) > 1:
        texts = [f"{_text(x)} on the {mesh_text(axes_of(x._spec.mesh))}" for x in tensors if isinstance(x, DTensor)]
        raise MeshError(report(str(func), "arrays on different meshes do not mix", texts,
                               f"vfn.shard(x, mesh, {layout(tensors[0]._spec)!r}) brings one to the other's mesh"  # type: ignore[attr-defined]
                               ))  # fmt: skip
    return meshes[0]


def _text(x: Any) -> str:
    return type_text(x.shape, x.dtype, layout(x._spec) if isinstance(x, DTensor) else WHOLE)


def _bind(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, defaults filled in."""
    bound = {}
    for i, argument in enumerate(func._schema.arguments):
        bound[argument.name] = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
    return bound


def _decide(cls: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Decision:
    tensors = _tensors(args, kwargs)
    mesh = _mesh_of(func, tensors)
    _refuse(func, args, kwargs)
    specs = [layout(x._spec) if isinstance(x, DTensor) else WHOLE for x in tensors]
    outs, many = _metas(func, args, kwargs, tensors)
    common = {"view": _is_view(func), "simulated": is_simulated(mesh), "seeded": _is_seeded(func),
              "lists": any(isinstance(a, (list, tuple)) and _tensors(a, {}) for a in (*args, *kwargs.values()))}  # fmt: skip
    rule, pinned = _rule(func, args, kwargs, tensors, outs)
    if rule is None:
        return Decision(mesh, None, (), (), many, **common)
    solved = _solve(rule, [(spec, tuple(x.shape)) for spec, x in zip(specs, tensors, strict=True)],
                    [tuple(o.shape) if isinstance(o, torch.Tensor) else None for o in outs], axes_of(mesh), pinned)  # fmt: skip
    targets, out_specs, fold_axes = solved
    if any(targets[i] != specs[i] for i in pinned) or any(out != specs[i] for i, out in zip(pinned, out_specs)):
        return Decision(mesh, None, (), (), many, **common)  # what is written does not lie as the target does
    moves = []
    for i, (x, spec, target) in enumerate(zip(tensors, specs, targets, strict=True)):
        steps = reshard.plan(tuple(x.shape), axes_items(mesh), spec, target)
        if steps:
            moves.append((i, steps, _why(func, tuple(x.shape), x.dtype, spec, target)))
    out_dspecs = tuple(
        spec_for(mesh, spec, o.shape, tuple(o.stride()), o.dtype) if isinstance(o, torch.Tensor) else None
        for o, spec in zip(outs, out_specs, strict=True)
    )
    folded = any(fold_axes)
    alone = rule.finish is not None and not folded  # nothing is split: the op itself gives the results
    return Decision(
        mesh, tuple(targets), tuple(moves), out_dspecs, many, None if alone else rule.op, None if alone else rule.finish,
        _local_sizes(rule, func, outs, out_specs, mesh), (rule.fold, tuple(fold_axes)) if folded else None,
        written=bool(pinned), partial=any(spec.unreduced for spec in out_specs), **common,
    )  # fmt: skip


def _rule(func: Any, args: Any, kwargs: Any, tensors: Any, outs: Any) -> tuple[Rule | None, list[int]]:
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
    by_name = {name: _replace(a, numbered) for name, a in _bind(func, args, kwargs).items()}
    name = func._schema.name.removeprefix("aten::")
    call = Call(name.removesuffix("_") if places else name, by_name, ts,
                tuple(tuple(o.shape) if isinstance(o, torch.Tensor) else None for o in outs),
                tuple(o.dtype if isinstance(o, torch.Tensor) else None for o in outs))  # fmt: skip
    return make_rule(call), pinned


def _why(func: Any, shape: tuple[int, ...], dtype: torch.dtype, spec: P, target: P) -> str:
    """Why an argument moves, for the log: ``softmax needs dim 1 whole: f32[8,4@tp]``."""
    name, value = func._schema.name.split("::")[-1].strip("_"), type_text(shape, dtype, spec)
    before, after = split_axes(spec, len(shape)), split_axes(target, len(shape))
    gathered = [str(d) for d, (a, b) in enumerate(zip(before, after, strict=True)) if a and not b]
    if spec.unreduced - target.unreduced and before == after:
        return f"{name} needs the sum: {value}"
    if gathered and all(a == b for a, b in zip(before, after, strict=True) if b):
        return f"{name} needs dim{'s' * (len(gathered) > 1)} {' and '.join(gathered)} whole: {value}"
    return f"{name} needs {type_text(shape, dtype, target)}: {value}"


def _refuse(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise for what has no answer on a mesh: a stateful draw, a change of storage."""
    name = func._schema.name.removeprefix("aten::")
    if _is_seeded(func):
        bound = _bind(func, args, kwargs)
        chance = bound.get("dropout_p", bound.get("p"))
        if "attention" in name and not chance or name == "native_dropout" and (not chance or bound.get("train") is False):
            return
        raise RandomError(report(
            f"torch's {name}", "a stateful draw on an array: every rank would draw from a generator of its own",
            fix="a keyed draw, the same on every mesh: " + _KEYED.get(name.removesuffix("_").removesuffix("_like"),
                                                                       "vfn.random.bits(key, x.shape, ...)")))  # fmt: skip
    if torch.Tag.inplace_view in func.tags and name != "detach_" or name == "resize_as_":
        raise InPlaceError(report(f"torch's {name}", "an array's shape and storage cannot be changed in place",
                                  fix=f"a new array: x = x.{name.removesuffix('_')}(...), or x = x.clone()"))  # fmt: skip
    if name == "as_strided" and hasattr(args[0], "_root"):
        raise InPlaceError(report("torch's as_strided", "a view of an array does not show the memory around it",
                                  [f"the view is {_text(args[0])}"], "index the array itself, or x.clone()"))  # fmt: skip


_KEYED = {
    "native_dropout": "vfn.random.dropout(key, x, rate)",
    "bernoulli": "vfn.random.bernoulli(key, p, x.shape); for dropout vfn.random.dropout(key, x, rate)",
    "rand": "vfn.random.uniform(key, x.shape, spec=vfn.spec_of(x))",
    "uniform": "vfn.random.uniform(key, x.shape, minval=..., maxval=..., spec=vfn.spec_of(x))",
    "randn": "vfn.random.normal(key, x.shape, spec=vfn.spec_of(x))",
    "normal": "mean + std * vfn.random.normal(key, x.shape, spec=vfn.spec_of(x))",
    "randint": "vfn.random.randint(key, x.shape, low, high, spec=vfn.spec_of(x))",
    "random": "vfn.random.randint(key, x.shape, low, high, spec=vfn.spec_of(x))",
}


def _is_seeded(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _metas(func: Any, args: Any, kwargs: Any, tensors: Any) -> tuple[tuple[Any, ...] | None, bool]:
    """What the results look like on one device: (None, many) where that cannot be told without the values."""
    with _torch.fake_mode():
        made = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in tensors]
        fakes = iter(made)
        fake_args = [_replace(a, fakes) for a in args]
        try:
            out = func(*fake_args, **{k: _replace(a, fakes) for k, a in kwargs.items()})
        except Exception:  # noqa: BLE001  whatever it is, computing whole shows it, or does without
            return None, False
    if out is None and func._schema.name.endswith("_"):  # a list changed in place
        out = fake_args[0]
    many = isinstance(out, (list, tuple))
    outs = tuple(out) if many else (out,)
    if not any(isinstance(o, torch.Tensor) for o in outs) or not all(o is None or isinstance(o, (int, torch.Tensor)) for o in outs):
        return None, many
    return outs, many


def _solve(rule: Rule, args: Sequence[tuple[P, tuple[int, ...]]], outs: Sequence[Any], axes: dict[str, int],
           pinned: Sequence[int]) -> tuple[list[P], list[P], list[tuple[str, ...]]]:  # fmt: skip
    """Which axes split which label: the larger tensor stays where it is, the smaller one moves."""
    kept = {axis for axis in axes if rule.linear and all(axis in args[i][0].unreduced for i in rule.linear)}
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
    even = rule.even | (rule.sums if rule.fold in ("max", "min") else frozenset())
    chosen: dict[Any, tuple[str, ...]] = {}
    used = set(kept)
    for label in sorted(votes, key=lambda label: -max(votes[label].values())):
        names = max(votes[label], key=votes[label].__getitem__)
        n = 0
        while n < len(names) and names[n] not in used and (
            label not in even or all(s % math.prod(axes[a] for a in names[: n + 1]) == 0 for s in sizes[label])
        ):
            n += 1
        chosen[label] = names[:n]
        used.update(chosen[label])

    def rows(labels: Sequence[Any]) -> list[tuple[str, ...]]:
        return [chosen.get(label, ()) if label is not None else () for label in labels]

    def missing(labels: Sequence[Any]) -> set[str]:
        return {axis for label in rule.sums if label not in labels for axis in chosen.get(label, ())}

    targets = []
    for i, (spec, _) in enumerate(args):
        unreduced = kept if i in rule.linear else missing(rule.outs[0]) if i in rule.joins else ()
        targets.append(spec if i in rule.shape_only else from_split_axes(rows(rule.ins[i]), unreduced))
    if rule.shape_only and not rule.linear:  # a new tensor that lies as one whose shape it has
        for i in rule.shape_only:
            for names, label in zip(split_axes(args[i][0], len(args[i][1])), rule.ins[i], strict=True):
                if label is not None:
                    chosen[label] = names
    add = rule.fold == "sum"
    out_specs = [from_split_axes(rows(row), kept | missing(row) if add else kept) for row in rule.outs]
    folds = [() if add else tuple(a for a in axes if a in missing(row)) for row in rule.outs]
    return targets, out_specs, folds


def _local_sizes(rule: Rule, func: Any, outs: Any, out_specs: Sequence[P], mesh: Any) -> Any:
    """The size argument on each rank that this process plays."""
    if not rule.sizes:
        return None
    position = next(i for i, argument in enumerate(func._schema.arguments) if argument.name == rule.sizes)
    axes = axes_of(mesh)
    return position, tuple(
        tuple(map(len, local_indices(tuple(outs[0].shape), axes, out_specs[0], coordinates(mesh, rank))))
        for rank in played_ranks(mesh)
    )


# --- carrying out -----------------------------------------------------------------------------------------------------


def _carry_out(cls: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any], decision: Decision) -> Any:
    if decision.seeded:
        _refuse(func, args, kwargs)
    for position, name in blocks.written(func):
        _check_writable(func, args[position] if position < len(args) else kwargs.get(name))
    if decision.targets is None:
        return _whole(cls, func, args, kwargs, decision)
    tensors = _tensors(args, kwargs)
    local: list[Any] = [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]
    for i, steps, why in decision.moves:
        local[i] = _moved(func, tensors[i], steps, decision, i, why)
    values = iter(local)
    op, local_args, local_kwargs = func, [_replace(a, values) for a in args], {k: _replace(a, values) for k, a in kwargs.items()}
    if decision.op is not None:
        bound = _bind(func, local_args, local_kwargs)
        only = {a.name for a in func._schema.arguments if a.kwarg_only}
        op = decision.op
        local_args = [v for k, v in bound.items() if k not in only]
        local_kwargs = {k: v for k, v in bound.items() if k in only}
    if decision.written:
        target = tuple(local_args[i] for i, _ in blocks.written(func))
        _run(op, local_args, local_kwargs, decision, target, decision.sizes)
        for x in _tensors([args[i] for i, _ in blocks.written(func)], {}):
            _after_write(x)
        return args[0] if func._schema.returns else None
    copied: list[bool] = []
    reshape = decision.view and decision.sizes is not None
    out = _run(_reshape_if_needed(op, copied) if reshape else op, local_args, local_kwargs, decision, None, decision.sizes)
    results = list(out) if decision.many else [out]
    if decision.fold:
        results = _folded(func, results, decision)
    if decision.finish is not None:
        results = _run(decision.finish, results, {}, decision, None)
        results = list(results) if decision.many else [results]
    wrapped = [r if spec is None else _torch.new_dtensor(cls, r, spec, requires_grad=False)
               for r, spec in zip(results, decision.outs, strict=True)]  # fmt: skip
    if decision.view:
        _note_views(args[0], wrapped, bool(decision.moves or copied))
    if decision.partial:
        _remember_sums(args[0], wrapped, func in _SAME)
    return type(out)(wrapped) if decision.many else wrapped[0]


_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}  # another name for the same value


def _folded(func: Any, parts: list[Any], decision: Decision) -> list[Any]:
    """The results that the ranks' parts make up."""
    assert decision.fold is not None
    how, axes_of_parts = decision.fold
    why = f"{func._schema.name.split('::')[-1].strip('_')} puts its parts together"
    if how != "total":
        return [reshard.wire.all_reduce(part, decision.mesh, axes, why, how) if axes else part
                for part, axes in zip(parts, axes_of_parts, strict=True)]  # fmt: skip
    together: dict[Any, list[int]] = {}
    for i, (part, axes) in enumerate(zip(parts, axes_of_parts, strict=True)):
        if axes:
            together.setdefault((axes, part.dtype), []).append(i)
    for (axes, _), members in together.items():
        summed = reshard.all_reduce_bucket([parts[i] for i in members], decision.mesh, axes, why)
        for i, value in zip(members, summed, strict=True):
            parts[i] = value
    return parts


def _run(op: Any, args: list[Any], kwargs: dict[str, Any], decision: Decision, target: Any, sizes: Any = None) -> Any:
    if decision.simulated:
        n = len(played_ranks(decision.mesh))
        if blocks.ranks_in((*args, *kwargs.values())) is None:
            out = op(*args, **kwargs)
            many = isinstance(out, (list, tuple))
            return type(out)(_shared(o, n) for o in out) if many else _shared(out, n)
        return blocks.run_ranks(op, n, args, kwargs, target, share=True, vary=sizes)
    if sizes is not None:
        args[sizes[0]] = sizes[1][0]
    return op(*args, **kwargs)


def _shared(value: Any, n: int) -> Any:
    return blocks.shared(value, n) if isinstance(value, torch.Tensor) else value


def _reshape_if_needed(op: Any, copied: list[bool]) -> Any:
    """A block may lie in memory so that what is a view of the whole is a copy of the block: that is noted in `copied`."""

    def run(x: torch.Tensor, size: Any, **kwargs: Any) -> torch.Tensor:
        try:
            return op(x, size, **kwargs)
        except RuntimeError:
            copied.append(True)
            return x.reshape(size)

    return run


def _moved(func: Any, x: Any, steps: Sequence[reshard.Step], decision: Decision, i: int, why: str) -> Any:
    """The local value of argument `i`, brought to where the op needs it."""
    if not isinstance(x, DTensor):
        return reshard.run(x, tuple(x.shape), decision.mesh, steps, "")
    assert decision.targets is not None
    if context.is_strict() and any(step.kind in ("all_gather", "all_to_all") for step in steps):
        raise ReshardError(report(
            f"strict: {func}", "this op needs a move of data that the program did not ask for",
            [f"argument {i} is {_text(x)} and would have to be {type_text(x.shape, x.dtype, decision.targets[i])}"],
            f"vfn.with_sharding(x, {decision.targets[i]!r}) before it"))  # fmt: skip
    return brought(x, decision.targets[i], why)


def brought(x: Any, target: P, why: str) -> Any:
    """The local value of an array, brought to `target`. What a partial value adds up to is remembered until it is written."""
    mesh, shape = x._spec.mesh, tuple(x.shape)
    steps = reshard.plan(shape, axes_items(mesh), layout(x._spec), target)
    cell = getattr(x, "_sum", None)
    if cell and cell[0] == (_torch.version(x), steps):
        return cell[1]
    out = reshard.run(x._local_tensor, shape, mesh, steps, why)
    if cell is not None and steps and steps[0].kind == "all_reduce" and not x.is_inference():
        cell[:] = [(x._version, steps), out]
    return out


def _whole(cls: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any], decision: Decision) -> Any:
    """The op on gathered arguments, as on one device; what it wrote goes back to where it lies."""
    mesh, n = decision.mesh, len(played_ranks(decision.mesh))
    tensors = _tensors(args, kwargs)
    targets = [args[i] if i < len(args) else kwargs.get(name) for i, name in blocks.written(func)]
    written = {id(t) for target in targets for t in (target if isinstance(target, (list, tuple)) else (target,))}
    brought_whole: dict[int, torch.Tensor] = {}  # an array that is two arguments is one value: what is written is read
    moved = False
    for i, x in enumerate(tensors):
        if id(x) in brought_whole:
            continue
        one = x
        if isinstance(x, DTensor):
            one, copied = _one_whole(func, x, i, decision, id(x) in written)
            moved = moved or copied
        brought_whole[id(x)] = one
    whole = [brought_whole[id(x)] for x in tensors]
    values = iter(whole)
    out = func(*[_replace(a, values) for a in args], **{k: _replace(a, values) for k, a in kwargs.items()})
    for x in {id(x): x for x in tensors if id(x) in written and isinstance(x, DTensor)}.values():
        _write_back(func, x, brought_whole[id(x)], mesh)
        _after_write(x)
    by_value = {id(one): x for x, one in zip(tensors, whole, strict=True)}

    def wrap(o: Any) -> Any:
        if isinstance(o, (list, tuple)):
            return type(o)(map(wrap, o))
        if not isinstance(o, torch.Tensor):
            return o
        if id(o) in by_value and id(by_value[id(o)]) in written:
            return by_value[id(o)]
        spec = spec_for(mesh, WHOLE, o.shape, tuple(o.stride()), o.dtype)
        return _torch.new_dtensor(cls, blocks.shared(o, n) if decision.simulated else o, spec, requires_grad=False)

    result = wrap(out)
    if decision.view:
        _note_views(args[0], list(result) if isinstance(result, (list, tuple)) else [result], moved)
    return result


def _one_whole(func: Any, x: Any, i: int, decision: Decision, written: bool) -> tuple[torch.Tensor, bool]:
    """An array as one whole tensor with the array's strides, and whether that is a copy."""
    spec, shape = layout(x._spec), tuple(x.shape)
    steps = reshard.plan(shape, axes_items(decision.mesh), spec, WHOLE)
    local = x._local_tensor
    if steps:
        whole = Decision(decision.mesh, (WHOLE,) * (i + 1), (), (), False)
        local = _moved(func, x, steps, whole, i, _why(func, shape, x.dtype, spec, WHOLE))
    one = local.blocks[0] if type(local) is Blocks else local
    strided = one.stride() == tuple(x.stride()) or x.numel() == 0
    if strided and not (written and spec != WHOLE):
        return one, bool(steps)  # where it is not a copy, what is written lands in the array's own storage
    return torch.empty_strided(shape, x.stride(), dtype=x.dtype, device=one.device).copy_(one), True


def _write_back(func: Any, x: Any, whole: torch.Tensor, mesh: Any) -> None:
    """Put a whole value into the storage of an array, as it lies."""
    if whole.shape != x.shape:
        raise InPlaceError(report(str(func), "the array to write into has another shape than what is to be written",
                                  [f"it is {_text(x)}, the result has shape {list(whole.shape)}"],
                                  "an array of the result's shape, or the op without out="))  # fmt: skip
    steps = reshard.plan(tuple(x.shape), axes_items(mesh), WHOLE, layout(x._spec))
    value = reshard.run(whole, tuple(x.shape), mesh, steps, "")
    local = x._local_tensor
    if type(local) is Blocks:
        parts = value.blocks if type(value) is Blocks else (value,) * len(local.blocks)
        for target, part in zip(local.blocks, parts, strict=True):
            if target is not part:
                target.copy_(part)
    elif local is not value:
        local.copy_(value)


# --- what is remembered on an array -----------------------------------------------------------------------------------


def _remember_sums(source: Any, outs: Sequence[Any], alias: bool) -> None:
    """Give each partial result a cell that keeps what it adds up to, shared by its aliases, until it is written."""
    shared = getattr(source, "_sum", None) if alias and len(outs) == 1 and source.shape == outs[0].shape else None
    for out in outs:
        if out is not None and layout(out._spec).unreduced:
            out._sum = shared if shared is not None else []


def _note_views(source: Any, outs: Sequence[Any], moved: bool) -> None:
    """Note what the results alias: a write through one that had to be moved would be lost, and it would miss writes."""
    root = getattr(source, "_root", source)
    moved = moved or hasattr(source, "_moved")
    for out in outs:
        if not isinstance(out, DTensor) or out is source:
            continue
        out._root = root
        if moved and isinstance(root, DTensor):
            out._moved = True
            root.__dict__.setdefault("_copies", []).append(weakref.ref(out))


def _check_writable(func: Any, target: Any) -> None:
    for x in target if isinstance(target, (list, tuple)) else (target,):
        if isinstance(x, DTensor) and hasattr(x, "_moved"):
            raise InPlaceError(report(
                str(func), "a write into a view whose elements had to be moved would be lost",
                [f"the view is {_text(x)}, of {_text(x._root)}"],
                "compute a new array: torch.where(mask, new, x), torch.cat, x.index_copy(...); or bring x to a layout in "
                "which the view is local: x = vfn.with_sharding(x, P())"))  # fmt: skip


class _Stale:
    """Stands for the spec of a view that missed a write: whatever asks for it raises."""

    def __getattr__(self, name: str) -> Any:
        raise InPlaceError(report("array", "this view was copied out of an array that was changed in place afterwards",
                                  fix="take the view again after the write"))  # fmt: skip

    def __hash__(self) -> int:
        return self.missing


def _after_write(x: Any) -> None:
    root = getattr(x, "_root", x)
    for copy in root.__dict__.pop("_copies", ()):
        view = copy()
        if view is not None:
            view._spec = _Stale()
