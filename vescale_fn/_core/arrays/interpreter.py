"""The eager interpreter: one aten op on sharded values, with every decision cached.

For one op it looks up, or has made (`decide.py`), a `Decision`, which runs itself (`decision.py`, `on_blocks.py`,
`gathered.py`). It knows no op.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import context, op_lines, traced_steps
from ..base.op_arguments import tensors_in
from ..base.state import process
from ..local_types import replica_check
from ..sharding.spec import P
from .aliasing import table_rows
from .decide import as_others, decide, decide_as
from .decision import Decision
from .rules.traits import TABLE_GRADIENT
from .stated_layout import NotAllowed
from .value_uses import run_noted

_CACHE_SIZE = 16384
_cache: OrderedDict[Any, Decision] = OrderedDict()
_stated: OrderedDict[Any, tuple[Any, Decision | None, str]] = OrderedDict()  # with the op, whose id nobody else has
_listeners = op_lines.listeners
_modes, _spec, _default_dtype = torch_internals.dispatch_modes, torch_internals.spec, torch.get_default_dtype


def cache_info() -> dict[str, int]:
    """How many decisions are remembered, and how many can be."""
    return {"decisions": len(_cache), "limit": _CACHE_SIZE}


def clear_cache() -> None:
    """Forget all decisions."""
    _cache.clear()
    _stated.clear()


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


def stated_decision(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], ins: tuple[P, ...], outs: tuple[P, ...]
) -> tuple[Decision | None, str]:
    """The decision by which a call of arrays is carried out as stated, remembered as those that are voted: its tensor arguments
    lie as `ins` say, its results as `outs`. Where its rule does not allow that, the decision that carries it out as a few
    others, if it is one of these, and why; None where no rule says how it is split."""
    key = id(func), _default_dtype(), _key(args), _key(tuple(kwargs.items())), ins, outs
    found = _stated.get(key)
    if found is None:
        with torch_internals.unrecorded():
            found = _stated[key] = func, *_as_stated(func, args, kwargs, ins, outs)
        if len(_stated) > _CACHE_SIZE:
            _stated.popitem(last=False)
    return found[1:]


def _as_stated(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], ins: Sequence[P], outs: Sequence[P]
) -> tuple[Decision | None, str]:
    try:
        return decide_as(func, args, kwargs, ins, outs), ""
    except NotAllowed as why:
        return as_others(func, args, kwargs), str(why)


def dispatch(cls: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
    """Carry out one aten op on arrays of class `cls`."""
    kwargs = {} if kwargs is None else kwargs
    modes = _modes()
    if modes and torch_internals.is_traced():
        return traced_steps.as_one_step(func, args, kwargs, lambda: dispatch(cls, func, args, kwargs))
    key = [id(func), _default_dtype()]  # a decision holds its op, which has no other's id as long as it is remembered
    for a in args:
        key.append(_spec(a) if a.__class__ is cls else _key(a))
    if kwargs:
        for name, a in kwargs.items():
            key.append((name, _key(a)))
    key = tuple(key)
    lies = ()
    if func is TABLE_GRADIENT:
        lies = table_rows(args)
        key = (*key, lies)
    decision = _cache.get(key)
    if decision is None:
        with torch_internals.unrecorded():
            decision = _cache[key] = decide(func, args, kwargs, lies)
        if len(_cache) > _CACHE_SIZE:
            _cache.popitem(last=False)
    if modes or (process.watch is not None and context.watch() is not None):
        name = torch_internals.operator_name(func).split("::")[-1].strip("_")
        plain = ((f"argument {i}", x) for i, x in enumerate(tensors_in(args, kwargs)))
        replica_check.same_plain(f"torch's {name}", decision.mesh, plain)
        replica_check.numbers_alike(name, func, decision.mesh, args, kwargs)
    if _listeners:
        op_lines.note()
        return run_noted(decision, cls, args, kwargs)
    return decision.run(cls, args, kwargs)
