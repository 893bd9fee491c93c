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
from .ops.rules import Call, Rule, T, find
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
    moves: tuple[tuple[int, tuple[reshard.Step, ...]], ...]  # (which tensor argument, the steps to its target)
    outs: tuple[Any, ...]  # a DTensorSpec, or None for no tensor, for each result
    many: bool  # whether the op gives a tuple or list of results
    op: Any = None  # what runs on the blocks, with all arguments bound, where it is not the op itself
    sizes: tuple[int, tuple[Any, ...]] | None = None  # (argument position, its value on each played rank)
    fold: tuple[str, tuple[tuple[str, ...], ...]] | None = None  # (max or min, the axes to fold over, for each result)
    view: bool = False  # results alias the first argument
    written: bool = False  # the first argument is written in place, and lies right for it
    partial: bool = False  # some result is a partial sum: it will remember what it adds up to
    simulated: bool = False

    @property
    def way(self) -> int:
        """How it is carried out: by one call on the local tensors and one wrap, or step by step."""
        if (self.targets is None or self.moves or self.many or self.op or self.fold or self.partial or self.simulated
                or (self.sizes and self.written)):  # fmt: skip
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
        return float  # no decision depends on a float
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
    axes = axes_of(mesh)
    specs = [layout(x._spec) if isinstance(x, DTensor) else WHOLE for x in tensors]
    outs, many = _metas(func, args, kwargs, tensors, mesh)
    written = blocks.written(func)
    whole = Decision(mesh, None, (), (), many, view=_is_view(func), simulated=is_simulated(mesh))
    if outs is None or (written and (len(written) > 1 or written[0][0] != 0 or not isinstance(args[0], DTensor))):
        return whole
    bound = _bind(func, args, kwargs)
    ts = tuple(T(i, tuple(x.shape)) for i, x in enumerate(tensors))
    numbered = iter(ts)
    by_name = {name: _replace(a, numbered) for name, a in bound.items()}
    name = func._schema.name.removeprefix("aten::")
    if written:
        name = name.removesuffix("_")
    make_rule = find(func)
    rule = make_rule(Call(name, by_name, ts, tuple(None if o is None else tuple(o.shape) for o in outs))) if make_rule else None
    if rule is None:
        return whole
    solved = _solve(rule, [(spec, t.shape) for spec, t in zip(specs, ts, strict=True)],
                    [None if o is None else tuple(o.shape) for o in outs], axes, 0 if written else None)  # fmt: skip
    targets, out_specs, fold_axes = solved
    if written and (targets[0] != specs[0] or out_specs[0] != specs[0]):
        return whole  # what is written does not lie as the target does
    moves = []
    for i, (x, spec, target) in enumerate(zip(tensors, specs, targets, strict=True)):
        steps = reshard.plan(tuple(x.shape), axes_items(mesh), spec, target)
        if steps:
            moves.append((i, steps))
    out_dspecs = tuple(
        None if o is None else spec_for(mesh, spec, o.shape, tuple(o.stride()), o.dtype)
        for o, spec in zip(outs, out_specs, strict=True)
    )
    return Decision(
        mesh, tuple(targets), tuple(moves), out_dspecs, many, rule.op,
        _local_sizes(rule, func, outs, out_specs, mesh),
        (rule.fold, tuple(fold_axes)) if any(fold_axes) else None,
        _is_view(func), bool(written), any(spec.unreduced for spec in out_specs), is_simulated(mesh),
    )  # fmt: skip


def _refuse(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise for what has no answer on a mesh: a stateful draw, a change of storage."""
    name = func._schema.name.removeprefix("aten::")
    if torch.Tag.nondeterministic_seeded in func.tags:
        bound = _bind(func, args, kwargs)
        chance = bound.get("dropout_p", bound.get("p"))
        if "attention" in name and not chance or name == "native_dropout" and (not chance or bound.get("train") is False):
            return
        raise RandomError(report(
            f"torch's {name}", "a stateful draw on an array: every rank would draw from a generator of its own",
            fix="a keyed draw, the same on every mesh: " + _KEYED.get(name.removesuffix("_").removesuffix("_like"),
                                                                       "vfn.random.bits(key, x.shape, ...)")))  # fmt: skip
    if name in ("set_", "resize_", "resize_as_", "set_data"):
        raise InPlaceError(report(f"torch's {name}", "an array's storage cannot be exchanged or resized",
                                  fix="make a new array"))  # fmt: skip


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


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _metas(func: Any, args: Any, kwargs: Any, tensors: Any, mesh: Any) -> tuple[tuple[Any, ...] | None, bool]:
    """What the results look like on one device: (None, many) where that cannot be told without the values."""
    with _torch.fake_mode():
        fakes = iter([torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in tensors])
        try:
            out = func(*[_replace(a, fakes) for a in args], **{k: _replace(a, fakes) for k, a in kwargs.items()})
        except Exception:  # noqa: BLE001  whatever it is, computing whole shows it, or does without
            return None, False
    many = isinstance(out, (list, tuple))
    outs = tuple(out) if many else (out,)
    if not all(o is None or isinstance(o, torch.Tensor) for o in outs) or all(o is None for o in outs):
        return None, many
    return outs, many


def _solve(rule: Rule, args: Sequence[tuple[P, tuple[int, ...]]], outs: Sequence[Any], axes: dict[str, int],
           pinned: int | None) -> tuple[list[P], list[P], list[tuple[str, ...]]]:  # fmt: skip
    """Which axes split which label: the larger tensor stays where it is, the smaller one moves."""
    kept = {axis for axis in axes if rule.linear and all(axis in args[i][0].unreduced for i in rule.linear)}
    votes: dict[Any, dict[tuple[str, ...], float]] = {}
    sizes: dict[Any, set[int]] = {}
    for i, (spec, shape) in enumerate(args):
        for names, label, size in zip(split_axes(spec, len(shape)), rule.ins[i], shape, strict=True):
            sizes.setdefault(label, set()).add(size)
            if label is not None and names and i not in rule.shape_only:
                votes.setdefault(label, {}).setdefault(names, 0)
                votes[label][names] += math.inf if i == pinned else 1 + math.prod(shape)
    for row, shape in zip(rule.outs, outs, strict=True):
        for label, size in zip(row, shape or (), strict=True):
            sizes.setdefault(label, set()).add(size)
    even = rule.even | (rule.sums if rule.fold != "sum" else frozenset())
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
    for position, name in blocks.written(func):
        _check_writable(func, args[position] if position < len(args) else kwargs.get(name))
    if decision.targets is None:
        return _whole(cls, func, args, kwargs, decision)
    tensors = _tensors(args, kwargs)
    local: list[Any] = [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]
    for i, steps in decision.moves:
        local[i] = _moved(func, tensors[i], steps, decision, i)
    values = iter(local)
    op, local_args, local_kwargs = func, [_replace(a, values) for a in args], {k: _replace(a, values) for k, a in kwargs.items()}
    if decision.op is not None:
        bound = _bind(func, local_args, local_kwargs)
        only = {a.name for a in func._schema.arguments if a.kwarg_only}
        op = decision.op
        local_args = [v for k, v in bound.items() if k not in only]
        local_kwargs = {k: v for k, v in bound.items() if k in only}
    out = _run(op, local_args, local_kwargs, decision, reshape=decision.view and decision.sizes is not None)
    if decision.written:
        _after_write(args[0])
        return args[0]
    results = list(out) if decision.many else [out]
    if decision.fold:
        how, axes_of_outs = decision.fold
        results = [reshard.wire.all_reduce(r, decision.mesh, a, f"{func}: fold the parts", how) if a else r
                   for r, a in zip(results, axes_of_outs, strict=True)]  # fmt: skip
    wrapped = [None if spec is None else _torch.new_dtensor(cls, r, spec, requires_grad=False)
               for r, spec in zip(results, decision.outs, strict=True)]  # fmt: skip
    if decision.view:
        _note_views(args[0], wrapped, bool(decision.moves))
    if decision.partial:
        _remember_sums(args[0], wrapped, decision.view)
    return type(out)(wrapped) if decision.many else wrapped[0]


def _run(op: Any, args: list[Any], kwargs: dict[str, Any], decision: Decision, reshape: bool) -> Any:
    sizes = decision.sizes
    if decision.simulated:
        n = len(played_ranks(decision.mesh))
        if blocks.ranks_in((*args, *kwargs.values())) is None:
            out = op(*args, **kwargs)
            many = isinstance(out, (list, tuple))
            return type(out)(blocks.shared(o, n) for o in out) if many else blocks.shared(out, n)
        target = args[0] if decision.written else None
        safe = _reshape_if_needed(op) if reshape else op
        return blocks.run_ranks(safe, n, args, kwargs, target, share=True, vary=sizes)
    if sizes is not None:
        args[sizes[0]] = sizes[1][0]
    return (_reshape_if_needed(op) if reshape else op)(*args, **kwargs)


def _reshape_if_needed(op: Any) -> Any:
    """A block may lie in memory so that what is a view of the whole is a copy of the block."""

    def run(x: torch.Tensor, size: Any, **kwargs: Any) -> torch.Tensor:
        try:
            return op(x, size, **kwargs)
        except RuntimeError:
            return x.reshape(size)

    return run


def _moved(func: Any, x: Any, steps: Sequence[reshard.Step], decision: Decision, i: int) -> Any:
    """The local value of argument `i`, brought to where the op needs it."""
    if not isinstance(x, DTensor):
        return reshard.run(x, tuple(x.shape), decision.mesh, steps, "")
    why = f"{func}: argument {i} is {_text(x)}"
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
    if cell and cell[0] == (x._version, steps):
        return cell[1]
    out = reshard.run(x._local_tensor, shape, mesh, steps, why)
    if cell is not None and steps and steps[0].kind == "all_reduce":
        cell[:] = [(x._version, steps), out]
    return out


def _whole(cls: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any], decision: Decision) -> Any:
    """The op on gathered arguments, as on one device; what it wrote goes back to where it lies."""
    mesh, n = decision.mesh, len(played_ranks(decision.mesh))
    tensors = _tensors(args, kwargs)
    targets = [args[i] if i < len(args) else kwargs.get(name) for i, name in blocks.written(func)]
    written = {id(t) for target in targets for t in (target if isinstance(target, (list, tuple)) else (target,))}
    whole, moved = [], False
    for i, x in enumerate(tensors):
        if not isinstance(x, DTensor):
            whole.append(x)
            continue
        steps = reshard.plan(tuple(x.shape), axes_items(mesh), layout(x._spec), WHOLE)
        local = _moved(func, x, steps, Decision(mesh, (WHOLE,) * len(tensors), (), (), False), i) if steps else x._local_tensor
        one = local.blocks[0] if type(local) is Blocks else local
        strided = one.stride() == tuple(x.stride()) or x.numel() == 0
        if id(x) in written and layout(x._spec) == WHOLE and strided:
            pass  # its own storage is whole: the write lands there
        elif id(x) in written or not strided:
            one = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=one.device).copy_(one)
            moved = True
        moved = moved or bool(steps)
        whole.append(one)
    values = iter(whole)
    out = func(*[_replace(a, values) for a in args], **{k: _replace(a, values) for k, a in kwargs.items()})
    for x, one in zip(tensors, whole, strict=True):
        if id(x) in written and isinstance(x, DTensor):
            _write_back(x, one, mesh)
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


def _write_back(x: Any, whole: torch.Tensor, mesh: Any) -> None:
    """Put a whole value into the storage of an array, as it lies."""
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
