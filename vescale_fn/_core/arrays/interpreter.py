"""The eager interpreter: one aten op on sharded values, with every decision cached.

For one op it looks up, or has made, a `Decision` (`decision.py`): how each argument must lie, what runs on the blocks,
how the results lie. Then it moves what must move, runs, and wraps.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import context, op_lines, traced_steps
from ..base.errors import InPlaceError, ReshardError
from ..base.messages import op_text, report
from ..base.op_arguments import bind, replace, tensors_in
from ..distributed import blocks, collectives
from ..distributed.blocks import Blocks
from ..distributed.mesh import is_part, played_ranks
from ..local_types import replica_check
from ..sharding.layout import WHOLE, axes_items, layout, spec_for, text
from ..sharding.spec import P, split_axes
from . import reshard
from .aliasing import (
    MovedView,
    after_write,
    check_reads,
    check_writable,
    entries,
    memories,
    missed,
    moved_view,
    note_copy,
    note_views,
    remember_sums,
    remember_table,
    table_rows,
)
from .decision import NEW, PLAIN, STEP_BY_STEP, WRITE, Decision, decide, reason, refuse
from .lazy_layout import note_new, note_stated, note_view, settle
from .refusals import MOVE, OTHER_SHAPE, OVERLAP
from .strict import refuse_moves
from .view_writes import by_element, check_fit, is_same_view, write_pieces

_CACHE_SIZE = 16384
_cache: OrderedDict[Any, tuple[Decision, int]] = OrderedDict()


def cache_info() -> dict[str, int]:
    """How many decisions are remembered, and how many can be."""
    return {"decisions": len(_cache), "limit": _CACHE_SIZE}


def clear_cache() -> None:
    """Forget all decisions."""
    _cache.clear()


def _key(a: Any) -> Any:
    kind = a.__class__
    if kind is int or kind is bool:
        return kind, a  # 1, True and 1.0 are equal, and not the same
    if kind is float:
        # no decision depends on a float, but for the Euclidean norm's order, and on whether zeros are filled in
        return a if a == 2.0 or a == 0.0 else float
    if kind is list or kind is tuple:
        return tuple([_key(x) for x in a])
    if isinstance(a, torch.Tensor):
        if isinstance(a, DTensor):
            return torch_internals.spec(a)
        return a.shape, a.stride() if a.layout is torch.strided else a.layout, a.dtype, a.device.type
    return kind, a


def dispatch(cls: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    """Carry out one aten op on arrays of class `cls`."""
    modes = _modes()
    if modes and torch_internals.is_traced():
        return traced_steps.as_one_step(func, args, kwargs or {}, lambda: dispatch(cls, func, args, kwargs))
    if op_lines.listening:
        op_lines.note()
    key = [func, _default_dtype()]
    for a in args:
        key.append(_spec(a) if a.__class__ is cls else _key(a))
    if kwargs:
        for name, a in kwargs.items():
            key.append((name, _key(a)))
    key = tuple(key)
    lies = ()
    if func is _TABLE_GRADIENT:
        lies = table_rows(args)
        key = (*key, lies)
    found = _cache.get(key)
    if found is None:
        if func in _OTHER_SHAPE:
            return _in_another_shape(cls, func, args)
        if func is _aten.as_strided_.default and _only_strides(*args):
            return _with_strides(func, args)
        with torch_internals.unrecorded():
            decision = decide(func, args, kwargs or {}, lies)
        found = _cache[key] = (decision, decision.way)
        if len(_cache) > _CACHE_SIZE:
            _cache.popitem(last=False)
    decision, way = found
    if modes or context.watch() is not None:
        name = torch_internals.operator_name(func).split("::")[-1].strip("_")
        replica_check.same_plain(
            f"torch's {name}",
            decision.mesh,
            ((f"argument {i}", x) for i, x in enumerate(tensors_in(args, kwargs or {}))),
        )
        replica_check.numbers_alike(name, func, decision.mesh, args, kwargs or {})
    if way == STEP_BY_STEP or (way != PLAIN and "_moved" in args[0].__dict__):
        return _carry_out(cls, func, args, kwargs or {}, decision)
    local = [_local(a) if a.__class__ is cls else a for a in args]
    if way == PLAIN:
        out = func(*local, **kwargs) if kwargs else func(*local)
        wrapped = _bare_dtensor(cls, out, decision.outs[0], requires_grad=False)
        _forbid_data_ptr(wrapped)
        return wrapped
    if way == NEW:
        out = func(*local, **kwargs) if kwargs else func(*local)
        wrapped = torch_internals.new_dtensor(cls, out, decision.outs[0])
        note_new((wrapped,))
        return wrapped
    source = args[0]
    notes = source.__dict__
    if way == WRITE:
        for a in args:  # what shares memory with another array knows it
            if notes or kwargs or a.__class__ in _LISTS or (a.__class__ is cls and a.__dict__):
                check_reads(func, args, kwargs or {}, source)
                break
        if notes:
            check_writable(func, source)
        func(*local, **kwargs) if kwargs else func(*local)
        if notes:
            after_write(source)
        return source
    sizes = decision.sizes
    if sizes is not None:
        local[sizes[0]] = sizes[1][0]
    try:
        out = func(*local, **kwargs) if kwargs else func(*local)
    except (RuntimeError, ValueError):  # the latter on tensors without values
        return _carry_out(cls, func, args, kwargs or {}, decision)
    wrapped = _bare_dtensor(cls, out, decision.outs[0], requires_grad=False)
    _forbid_data_ptr(wrapped)
    if notes or decision.offsets[0]:  # what is no view of another array begins where its memory does
        if wrapped.storage_offset() != (offset := source.storage_offset() + decision.offsets[0]):
            torch_internals.set_storage_offset(wrapped, offset)
    if notes:
        note_views(source, (wrapped,), False)
        note_view(source, func, args, wrapped)
    else:
        wrapped._view_root = source
    return wrapped


_modes, _local, _spec = torch_internals.dispatch_modes, torch_internals.local, torch_internals.spec
_bare_dtensor, _forbid_data_ptr = torch_internals.bare_dtensor, torch_internals.forbid_data_ptr
_default_dtype = torch.get_default_dtype
_LISTS = frozenset((list, tuple))
_aten = torch.ops.aten
_TABLE_GRADIENT = _aten.embedding_dense_backward.default
_OTHER_SHAPE: dict[Any, Any] = {  # what gives the array that was asked for another shape: the view that is that shape
    _aten.squeeze_.default: _aten.squeeze.default,
    _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims,
    _aten.unsqueeze_.default: _aten.unsqueeze.default,
    _aten.transpose_.default: _aten.transpose.int,
    _aten.t_.default: _aten.t.default,
}


def _in_another_shape(cls: Any, func: Any, args: Sequence[Any]) -> Any:
    """An array made to be a view of itself: torch's own `matmul` of vectors does so to its result."""
    x, view = args[0], dispatch(cls, _OTHER_SHAPE[func], args, None)
    if hasattr(view, "_moved"):
        name = torch_internals.operator_name(func).removeprefix("aten::")
        raise InPlaceError(
            report(
                f"torch's {name}",
                MOVE,
                [f"the array is {text(x)}"],
                f"a new array: x = x.{name.removesuffix('_')}(...)",
            )
        )
    torch_internals.set_local(x, torch_internals.local(view))
    torch_internals.set_spec(x, torch_internals.spec(view))
    if hasattr(view, "_sum"):
        x._sum = view._sum
    torch_internals.own_shape(func, args)
    return x


def _only_strides(x: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> bool:
    """Whether as_strided_ changes nothing but the strides of dims of size 1, which move no element."""
    same = all(n == 1 or a == b for n, a, b in zip(size, stride, x.stride()))
    return tuple(size) == tuple(x.shape) and same and offset in (None, x.storage_offset())


def _with_strides(func: Any, args: Sequence[Any]) -> Any:
    """An array that says other strides of itself: torch's own pooling does so to its result, to call it channels-last."""
    x, _, stride, *_ = args
    spec = layout(torch_internals.spec(x))
    torch_internals.set_spec(x, spec_for(torch_internals.mesh(x), spec, x.shape, tuple(stride), x.dtype))
    torch_internals.own_shape(func, args)
    return x


def _carry_out(
    cls: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any], decision: Decision, now: bool = False
) -> Any:
    """Carry out a decision. With `now` a view whose elements must move is not left for later."""
    if decision.seeded:
        refuse(func, args, kwargs)
    if decision.answer:
        return list(decision.outs) if decision.many else decision.outs[0]
    if decision.steps is not None:
        return decision.steps(args, kwargs)
    targets = [args[i] if i < len(args) else kwargs.get(name) for i, name in blocks.written(func)]
    for target in targets:
        check_writable(func, target)
        check_reads(func, args, kwargs, target)
    shown = any(moved_view(x) is not None for x in tensors_in(args, kwargs))
    if shown or decision.moves or decision.targets is None:  # else each rank goes through the lists as one device does
        for call in (calls := entries(func, args, kwargs, targets)):
            dispatch(cls, func, *call)
        if calls:
            return args[0] if torch_internals.schema(func).returns else None
    if any(moved_view(x) is not None for x in tensors_in(targets, {})):
        return _write_where_shown(cls, func, args, kwargs, decision)
    if decision.view and not now and _elements_move(args[0], decision):
        note_stated(args[0])  # what shows elements that lie elsewhere knows where they do
        return _deferred(cls, func, args, kwargs, decision)
    if (decision.moves or decision.targets is None) and settle(lambda *call: dispatch(cls, *call), func, args):
        return dispatch(cls, func, args, kwargs)
    if decision.targets is None:
        return _whole(cls, func, args, kwargs, decision)
    tensors = tensors_in(args, kwargs)
    local: list[Any] = [torch_internals.local(x) if isinstance(x, DTensor) else x for x in tensors]
    if decision.moves and context.is_strict():
        refuse_moves(func, args, kwargs, [(i, steps, decision.targets[i]) for i, steps, _ in decision.moves])
    for i, steps, why in decision.moves:
        local[i] = _moved(func, tensors[i], steps, decision, i, why)
    values = iter(local)
    op, local_args, local_kwargs = (
        func,
        [replace(a, values) for a in args],
        {k: replace(a, values) for k, a in kwargs.items()},
    )
    if decision.op is not None:
        bound = bind(func, local_args, local_kwargs)
        only = {a.name for a in torch_internals.schema(func).arguments if a.kwarg_only}
        op = decision.op
        local_args = [v for k, v in bound.items() if k not in only]
        local_kwargs = {k: v for k, v in bound.items() if k in only}
    if func in _IN_ORDER:
        op = _in_order(op)
    sizes = decision.sizes
    if decision.covered is not None:
        sizes = len(local_args), decision.covered
        local_args.append(None)
    if decision.written:
        lists = [local_args[i] for i, _ in blocks.written(func)]
        target = list(zip(*lists)) if isinstance(lists[0], (list, tuple)) else lists[0]
        _run(op, local_args, local_kwargs, decision, target, sizes)
        for x in tensors_in([args[i] for i, _ in blocks.written(func)], {}):
            _written(func, x)
        return args[0] if torch_internals.schema(func).returns else None
    copied: list[bool] = []
    reshape = decision.sizes is not None and (decision.view or func is _UNSAFE_VIEW)
    out = _run(_reshape_if_needed(op, copied) if reshape else op, local_args, local_kwargs, decision, None, sizes)
    results = list(out) if decision.many else [out]
    if decision.fold:
        results = _folded(func, results, decision)
    if decision.finish is not None:
        results = _run(decision.finish, [*results, *local_args] if decision.again else results, {}, decision, None)
        results = list(results) if decision.many else [results]
    wrapped: list[Any] = [
        r if spec is None or r is None else torch_internals.new_dtensor(cls, r, spec)
        for r, spec in zip(results, decision.outs, strict=True)
    ]
    if decision.view:
        _begin(func, args, wrapped, decision)
        note_views(args[0], wrapped, bool(decision.moves or copied or decision.copies))
        for view in wrapped:
            note_view(args[0], func, args, view)
    elif func is _UNSAFE_VIEW and (decision.moves or copied):
        note_copy(args[0], wrapped[0])
    if decision.covered is not None and func is _aten.embedding.default:
        remember_table(args[1], args[0], split_axes(decision.targets[0], 2)[0])  # after what was gathered before
    if decision.new:
        note_new(wrapped)
    if decision.partial:
        remember_sums(args[0], wrapped, func in _SAME)
        if decision.view and not decision.many and not decision.moves and args[0].numel() == wrapped[0].numel():
            wrapped[0]._seen = (args[0], torch_internals.spec(args[0]), func, args[1:], kwargs)
    return type(out)(wrapped) if decision.many else wrapped[0]


def _begin(func: Any, args: Sequence[Any], views: Sequence[Any], decision: Decision) -> None:
    """Make views say where they begin in memory on one device: autograd under functorch shows a gradient by that."""
    absolute = func is _aten.as_strided.default and len(args) > 3 and args[3] is not None
    first = 0 if absolute else args[0].storage_offset()
    for view, offset in zip(views, decision.offsets):
        if isinstance(view, DTensor) and view is not args[0] and view.storage_offset() != first + offset:
            torch_internals.set_storage_offset(view, first + offset)


_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}  # another name for the same value


_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default  # a view of a value that nothing else should know


# Kernels that give wrong numbers, or refuse, where an argument's elements do not lie in order: autograd's formulas see to it
# by what an array says of itself, which is that they do; its blocks lie as the last kernel left them.
_IN_ORDER = {
    _aten.native_group_norm.default,
    _aten.native_group_norm_backward.default,
    _aten.native_layer_norm_backward.default,
    _aten.adaptive_max_pool3d_backward.default,
    _aten.fractional_max_pool2d_backward.default,
    _aten.fractional_max_pool3d_backward.default,
    _aten._ctc_loss.default,
    _aten._ctc_loss.Tensor,
    _aten._pdist_forward.default,
    _aten._pdist_backward.default,
    _aten.nll_loss2d_backward.default,
}


def _in_order(op: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        return op(*(a.contiguous() if isinstance(a, torch.Tensor) else a for a in args), **kwargs)

    return run


def _folded(func: Any, parts: list[Any], decision: Decision) -> list[Any]:
    """The results that the ranks' parts make up."""
    assert decision.fold is not None
    how, axes_of_parts = decision.fold
    why = f"{torch_internals.operator_name(func).split('::')[-1].strip('_')} puts its parts together"
    if how != "total":
        return [
            collectives.all_reduce(part, decision.mesh, axes, why, how) if axes else part
            for part, axes in zip(parts, axes_of_parts, strict=True)
        ]
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
        if decision.covered is None and blocks.ranks_in((*args, *kwargs.values())) is None:
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
        except (RuntimeError, ValueError):  # the latter on tensors without values
            copied.append(True)
            return x.reshape(size)

    return run


# --- views whose elements must move -----------------------------------------------------------------------------------


def _elements_move(x: Any, decision: Decision) -> bool:
    """Whether a view of `x` shows elements that are to come from other ranks, or is a view of such a view.

    Not where it is a copy by nature (a conjugate), or `x` is one: what is written there is refused.
    """
    if decision.copies or (hasattr(x, "_moved") and moved_view(x) is None):
        return False
    return bool(moved_view(x) or decision.moves) or (
        decision.targets is None and layout(torch_internals.spec(x)) != WHOLE
    )


def _deferred(cls: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any], decision: Decision) -> Any:
    """A view without elements: they are moved when it is first read, and what is written into it is written where they are."""
    source, link = args[0], moved_view(args[0])
    with torch_internals.unrecorded():
        shown: Any = (
            link.shown
            if link is not None
            else torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
        )
        metas = func(shown, *args[1:], **kwargs)
    metas = list(metas) if decision.many else [metas]
    base = link.base if link is not None else source
    recorded = torch_internals.is_recorded()
    refusal = _refusal(func, args, kwargs, decision) if context.is_strict() else None
    outs, siblings = [], []
    for i, meta in enumerate(metas):
        spec = (
            decision.outs[i]
            if decision.targets is not None
            else spec_for(decision.mesh, WHOLE, meta.shape, tuple(meta.stride()), meta.dtype)
        )
        local = torch_internals.local(base)
        if meta.dtype != base.dtype:  # of what is made here only the kind counts
            local = (
                local.view(meta.dtype)
                if type(local) is not Blocks
                else Blocks(b.view(meta.dtype) for b in local.blocks)
            )
        out = torch_internals.new_dtensor(cls, local, spec)
        torch_internals.forget_local(out)
        outs.append(out)
    _begin(func, args, outs, decision)
    remember_sums(source, outs, False)
    note_views(source, outs, True)
    for i, (out, meta) in enumerate(zip(outs, metas, strict=True)):
        out._moved = MovedView(
            source,
            torch_internals.spec(source),
            func,
            tuple(args[1:]),
            kwargs,
            decision,
            i if decision.many else None,
            meta,
            base,
            recorded,
            siblings,
            refusal,
        )
        siblings.append(weakref.ref(out))
    return outs if decision.many else outs[0]


def _refusal(func: Any, args: Sequence[Any], kwargs: dict[str, Any], decision: Decision) -> ReshardError | None:
    """What `strict` says of the move, should the view be read: with the line that takes it."""
    moves = [(0, _steps_to_whole(args[0]), WHOLE)]
    if decision.targets is not None:
        moves = [(i, steps, decision.targets[i]) for i, steps, _ in decision.moves]
    try:
        refuse_moves(func, args, kwargs, moves)
    except ReshardError as error:
        return error
    return None


def read(x: Any) -> None:
    """Bring the elements of a view that was made without them."""
    link = moved_view(x)
    if link is None or torch_internals.spec(link.source) is not link.spec:
        raise AttributeError(torch_internals.LOCAL) if link is None else missed()
    if link.refusal is not None and context.is_strict():
        raise link.refusal
    outside = torch_internals.is_recorded() and not link.recorded  # a recording that began later sees a finished value
    with torch_internals.unrecorded() if outside else contextlib.nullcontext():
        out = _carry_out(type(x), link.func, (link.source, *link.args), link.kwargs, link.decision, now=True)
    if link.number is None:
        torch_internals.set_local(x, torch_internals.local(out))
        return
    torch_internals.set_local(x, torch_internals.local(out[link.number]))
    for i, sibling in enumerate(link.siblings):  # which came with it
        if (other := sibling()) is not None and other is not x:
            torch_internals.set_local(other, torch_internals.local(out[i]))


def _write_where_shown(cls: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any], decision: Decision) -> Any:
    """A write into a view whose elements are elsewhere: each rank writes those that it has."""
    out = args[0]
    link = moved_view(out) if isinstance(out, DTensor) else None
    if link is not None and len(blocks.written(func)) == 1 and by_element(func):
        check_fit(func, args, kwargs)
        if func is _aten.copy_.default and is_same_view(link, moved_view(args[1])):
            return out  # what Python makes of x[1:] += y ends with x[1:] = x[1:]
        if out.numel() and not write_pieces(func, args, kwargs, link, brought):
            _write_whole(func, args, kwargs, link)
        _written(func, link.base)
        return out
    copies: dict[int, Any] = {}  # what is written, as values of its own, which are then put where they belong

    def copied(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(map(copied, x))
        return copies.get(id(x), x) if isinstance(x, torch.Tensor) else x

    targets = [args[i] if i < len(args) else kwargs.get(name) for i, name in blocks.written(func)]
    moved = {m for x in tensors_in(targets, {}) if moved_view(x) is not None for m in memories(x)}
    originals = list({id(x): x for x in tensors_in(targets, {}) if moved & memories(x)}.values())
    for x in originals:
        local = brought(x, layout(torch_internals.spec(x)), "", apart=True)
        local = local if moved_view(x) is not None else _copied(local)
        copies[id(x)] = torch_internals.new_dtensor(cls, local, torch_internals.spec(x))
    result = dispatch(cls, func, [copied(a) for a in args], {k: copied(a) for k, a in kwargs.items()})
    for x in originals:
        dispatch(cls, _aten.copy_.default, (x, copies[id(x)]), None)
    back = {id(copy): x for x, copy in zip(originals, copies.values(), strict=True)}
    return back.get(id(result), result)


def _write_whole(func: Any, args: Sequence[Any], kwargs: dict[str, Any], link: MovedView) -> None:
    """Write into the whole of what a view shows a part of, and put that back where it lies."""
    base, mesh = link.base, torch_internals.mesh(link.base)
    if context.is_strict():
        refuse_moves(func, (base,), {}, [(0, _steps_to_whole(base), WHOLE)])
    decision = Decision(mesh, None, (), (), False)
    whole, _ = _one_whole(func, base, 0, decision, True)
    others = iter(
        [
            _one_whole(func, x, 0, decision, False)[0] if isinstance(x, DTensor) else x
            for x in tensors_in(args[1:], kwargs)
        ]
    )
    rest = [replace(a, others) for a in args[1:]]
    func(_seen_in(whole, args[0]), *rest, **{k: replace(a, others) for k, a in kwargs.items()})
    _write_back(func, base, whole, mesh)


def _seen_in(whole: torch.Tensor, view: Any) -> torch.Tensor:
    """The same view of a plain tensor in the place of its base."""
    link = moved_view(view)
    if link is None:
        return whole
    out = link.func(_seen_in(whole, link.source), *link.args, **link.kwargs)
    return out if link.number is None else out[link.number]


# --- moving -----------------------------------------------------------------------------------------------------------


def _moved(func: Any, x: Any, steps: Sequence[reshard.Step], decision: Decision, i: int, why: str) -> Any:
    """The local value of argument `i`, brought to where the op needs it."""
    if not isinstance(x, DTensor):
        return reshard.run(x, tuple(x.shape), decision.mesh, steps, "")
    assert decision.targets is not None
    return brought(x, decision.targets[i], why)


def brought(x: Any, target: P, why: str, apart: bool = False) -> Any:
    """The local value of an array, brought to `target`. What a partial value adds up to is remembered until it is written.

    With `apart` the result is nobody else's: it is given away, and may be written.
    """
    mesh, shape = torch_internals.mesh(x), tuple(x.shape)
    steps = reshard.plan(shape, axes_items(mesh), layout(torch_internals.spec(x)), target)
    cell = getattr(x, "_sum", None)
    if cell and cell[0] == (torch_internals.version(x), steps):
        return _copied(cell[1]) if apart else cell[1]
    if cell is not None and steps and steps[0].kind == "all_reduce" and not target.unreduced and _sees(x):
        local = brought(_view_of_sum(x), target, why)
        return _copied(local) if apart else local
    out = reshard.run(torch_internals.local(x), shape, mesh, steps, why)
    if cell is not None and steps and steps[0].kind == "all_reduce" and not x.is_inference():
        cell[:] = [(torch_internals.version(x), steps), out]
        return _copied(out) if apart else out
    return out


def _sees(x: Any) -> bool:
    """Whether `x` is a view of all of a partial value, which still lies as it did then."""
    seen = x.__dict__.get("_seen")
    return seen is not None and torch_internals.spec(seen[0]) is seen[1]


def _view_of_sum(x: Any) -> Any:
    """A view of a partial value as the same view of what that adds up to, which is known, or is from now on."""
    source, _, func, args, kwargs = x._seen
    spec = layout(torch_internals.spec(source))
    goal = P(*spec)
    local = brought(source, goal, f"{op_text(func)} of a sum")
    whole = spec_for(torch_internals.mesh(source), goal, source.shape, tuple(source.stride()), source.dtype)
    return dispatch(
        type(source),
        func,
        (torch_internals.new_dtensor(type(source), local, whole), *args),
        kwargs,
    )


def _copied(local: Any) -> Any:
    if type(local) is not Blocks:
        return local.clone()
    return blocks.run_ranks(torch.clone, len(local.blocks), (local,), {}, share=True)


def _whole(cls: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any], decision: Decision) -> Any:
    """The op on gathered arguments, as on one device; what it wrote goes back to where it lies."""
    mesh, n = decision.mesh, len(played_ranks(decision.mesh))
    tensors = tensors_in(args, kwargs)
    targets = [args[i] if i < len(args) else kwargs.get(name) for i, name in blocks.written(func)]
    written = {id(t) for target in targets for t in (target if isinstance(target, (list, tuple)) else (target,))}
    _refuse_overlap(func, {id(x): x for x in tensors if id(x) in written and isinstance(x, DTensor)}.values())
    brought_whole: dict[int, torch.Tensor] = {}  # an array that is two arguments is one value: what is written is read
    moved = False
    if context.is_strict():
        refuse_moves(
            func,
            args,
            kwargs,
            [(i, _steps_to_whole(x), WHOLE) for i, x in enumerate(tensors) if isinstance(x, DTensor)],
        )
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
    all_args, all_kwargs = [replace(a, values) for a in args], {k: replace(a, values) for k, a in kwargs.items()}
    if decision.view:  # of each rank's own memory: ranks may hold the same value in blocks of their own
        out = _run(func, all_args, all_kwargs, decision, None)
    else:
        out = func(*all_args, **all_kwargs)
    for x in {id(x): x for x in tensors if id(x) in written and isinstance(x, DTensor)}.values():
        _write_back(func, x, brought_whole[id(x)], mesh)
        _written(func, x)
    by_value = {id(one): x for x, one in zip(tensors, whole, strict=True)}

    def wrap(o: Any) -> Any:
        if isinstance(o, (list, tuple)):
            return type(o)(map(wrap, o))
        if not isinstance(o, torch.Tensor) or o.layout is not torch.strided:
            return o  # a sparse result is a plain tensor, the same on every rank
        if torch_internals.is_lazy(o):
            o = torch_internals.settled(o)
        if id(o) in by_value and id(by_value[id(o)]) in written:
            return by_value[id(o)]
        spec = spec_for(mesh, WHOLE, o.shape, tuple(o.stride()), o.dtype)
        local = blocks.shared(o, n) if decision.simulated and type(o) is not Blocks else o
        return torch_internals.new_dtensor(cls, local, spec)

    result = wrap(out)
    if func is _aten._pack_padded_sequence.default:
        result = (result[0], out[1])  # how many sequences go on at each step: torch reads that in C++
    if decision.view:
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        _begin(func, args, results, decision)
        note_views(args[0], results, moved)
        note_view(args[0], func, args, result)
    return result


def _written(func: Any, x: Any) -> None:
    after_write(x)
    if not torch_internals.schema(func).returns:  # of the arrays of a list, torch counts no writes
        torch_internals.count_write(x)


def _refuse_overlap(func: Any, targets: Iterable[Any]) -> None:
    """Two views of one memory, each written whole, would undo each other's writes."""
    roots: dict[int, Any] = {}
    for x in targets:
        root = id(getattr(x, "_view_root", x))
        if root in roots:
            raise InPlaceError(
                report(
                    op_text(func), OVERLAP, [f"they are {text(roots[root])} and {text(x)}"], "one call for each of them"
                )
            )
        roots[root] = x


def _steps_to_whole(x: Any) -> tuple[reshard.Step, ...]:
    return reshard.plan(tuple(x.shape), axes_items(torch_internals.mesh(x)), layout(torch_internals.spec(x)), WHOLE)


def _one_whole(func: Any, x: Any, i: int, decision: Decision, written: bool) -> tuple[torch.Tensor, bool]:
    """An array as one whole tensor with the array's strides, and whether that is a copy."""
    spec, shape = layout(torch_internals.spec(x)), tuple(x.shape)
    steps = _steps_to_whole(x)
    local = torch_internals.local(x)
    if steps:
        whole = Decision(decision.mesh, (WHOLE,) * (i + 1), (), (), False)
        local = _moved(func, x, steps, whole, i, reason(func, shape, x.dtype, spec, WHOLE))
    one = local if decision.view else the_one(local, decision.mesh)
    strided = one.stride() == tuple(x.stride()) or x.numel() == 0 or (0 in x.stride() and not written)
    if strided and not (written and spec != WHOLE):
        return one, bool(steps)  # where it is not a copy, what is written lands in the array's own storage
    return _in_own_memory(one, shape, x.stride()), True


def the_one(local: Any, mesh: Any) -> Any:
    """What all ranks hold, once: of blocks the first. Where the mesh is only a part of one, they may differ: all of them."""
    return local.blocks[0] if type(local) is Blocks and not is_part(mesh) else local


def _in_own_memory(one: Any, shape: Sequence[int], stride: Sequence[int]) -> Any:
    if type(one) is Blocks:
        return Blocks([_in_own_memory(block, shape, stride) for block in one.blocks])
    return torch.empty_strided(shape, stride, dtype=one.dtype, device=one.device).copy_(one)


def _write_back(func: Any, x: Any, whole: torch.Tensor, mesh: Any) -> None:
    """Put a whole value into the storage of an array, as it lies."""
    if whole.shape != x.shape:
        raise InPlaceError(
            report(
                op_text(func),
                OTHER_SHAPE,
                [f"it is {text(x)}, the result has shape {list(whole.shape)}"],
                "an array of the result's shape, or the op without out=",
            )
        )
    steps = reshard.plan(tuple(x.shape), axes_items(mesh), WHOLE, layout(torch_internals.spec(x)))
    value = reshard.run(whole, tuple(x.shape), mesh, steps, "")
    local = torch_internals.local(x)
    if type(local) is Blocks:
        parts = value.blocks if type(value) is Blocks else (value,) * len(local.blocks)
        for target, part in zip(local.blocks, parts, strict=True):
            if target is not part:
                target.copy_(part)
    elif local is not value:
        local.copy_(value)
