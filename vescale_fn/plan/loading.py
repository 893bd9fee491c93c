"""A plan from a file in the place of a recording, where all ranks have one that fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from .._core.arrays.array import mesh_of
from .._core.base import context
from .._core.base.errors import TransformError
from .._core.base.messages import report, short
from .._core.base.source_lines import warn
from .._core.distributed.mesh import communicator_of
from .._core.distributed.places import place_of
from .execution.backends import Backend
from .ir import graph as plan
from .ir.graph import Pass
from .plan import Plan
from .saved import made_for
from .saved_plans import SavedPlan
from .signature import JitCall
from .tracing import ambient
from .tracing import leaves as leaves_
from .tracing.guards import Captured
from .tracing.rank_consensus import meshes as meshes_of_leaves
from .tracing.rank_consensus import shared_mesh


def key_of(call: JitCall, how: Backend, passes: Sequence[Pass]) -> str:
    """What a plan for a call is made for, but for the function, as text."""
    names = [getattr(one, "__name__", None) or repr(one) for one in passes]
    *before, around = call.key
    own = [x for name, x in zip(ambient.NAMES, around, strict=True) if name != ambient.SIMULATED]  # its meshes say so
    return f"{made_for.argument((*before, own))} {how.name} {how.cuda_graph} {' '.join(names)}"


def meshes_of(call: JitCall, captured: Captured) -> list[Any]:
    """The meshes that a call knows: of its arguments, the current one, those that the function closes over."""
    captured_ = (value for _, value in captured.found() if isinstance(value, DeviceMesh))
    found = (*meshes_of_leaves(call.leaves, None, None), context.current_mesh(), *captured_)
    return list(dict.fromkeys(mesh for mesh in found if mesh is not None))


def checked(plans: Any) -> tuple[SavedPlan, ...]:
    """The plans that `jit` is given."""
    for each in plans:
        if not isinstance(each, SavedPlan):
            raise TransformError(report("jit", f"plans holds {short(each)}", fix="plans=[vfn.load_plan(path)]"))
    return tuple(plans)


def loaded(
    saved: Sequence[SavedPlan],
    f: Any,
    call: JitCall,
    captured: Captured,
    how: Backend,
    passes: Sequence[Pass],
    name: str,
) -> Plan | None:
    """The plan for a call; None, with a warning that says why, where some rank has none that fits. All ranks come here."""
    key, meshes = key_of(call, how, passes), meshes_of(call, captured)
    found, why = None, ""
    at_place = any(isinstance(x, torch.Tensor) and place_of(mesh_of(x)) is not None for x in call.leaves)
    for each in saved:
        why = "arguments are at one place" if at_place else each.misfit(f, captured, key, meshes) or ""
        if not why:
            try:
                found = _plan(each, key, meshes, call, captured, how, f)
            except TransformError as error:
                why = str(error)
            except Exception as error:  # of what a file may hold that somebody has changed
                why = f"{each.path} is damaged ({f'{type(error).__name__}: {error}'.splitlines()[0]})"
            break
    mesh = shared_mesh(call.leaves, None, None)
    if mesh is not None:
        everyone = [row[0] for row in communicator_of(mesh).everyone([[why]], "jit")]
        rank = next((rank for rank, theirs in enumerate(everyone) if theirs), None)
        why = why or ("" if rank is None else f"on rank {rank} {everyone[rank]}")
    if why:
        warn(report("jit", f"no saved plan serves {name}, which is recorded anew: {why}"))
        return None
    return found


def _plan(
    saved: SavedPlan, key: str, meshes: Sequence[Any], call: JitCall, captured: Captured, how: Backend, f: Any
) -> Plan:
    recorded = saved.recorded(key, meshes, call.treedef, call.leaves)
    inputs = [*(x for leaf in call.leaves for x in leaves_.plain_of(leaf)), *recorded.constants]
    wanted = [plan.value(node) for node in recorded.inputs]
    tensors = [x for x in wanted if isinstance(x, torch.Tensor)]
    if [_lies(x) for x in inputs] != [_lies(x) for x in tensors]:
        raise ValueError("its inputs are of other shapes or devices than the blocks here")
    made = Plan(recorded, call.leaves, captured, call.names(), call.donated(), how, f, loaded=True)
    made.improve((), lambda graph: None)
    return made


def _lies(x: torch.Tensor) -> Any:
    return x.shape, x.stride(), x.dtype, x.device.type
