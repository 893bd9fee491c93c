"""What code for one process a rank asks of torch, and what to write instead where one process plays all the ranks."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any, NoReturn

from .. import torch_internals
from ..base import context
from ..base.errors import MeshError
from ..base.messages import mesh_text, report
from ..base.source_lines import inner
from ..sharding.index_map import axes_of

_SUM = "vfn.psum(x, axis) in a shard_map body, or pmax, pmin, pmean; in the global view torch.sum is the whole sum"
_GATHER = "vfn.all_gather(x, axis) in a shard_map body; vfn.unshard(x) for a whole array"
_SCATTER = "vfn.psum_scatter(x, axis) in a shard_map body"
_SEND = "vfn.ppermute(x, axis, pairs) in a shard_map body: all the sends of a step at once"
_INDEX = "vfn.axis_index(axis) in a shard_map body: a tensor, of another value on each rank"
_SIZE = "mesh.size(), or vfn.axis_size(axis) in a shard_map body"
_MODULE = "f, params = vfn.module_function(module), and vfn.shard(params, mesh, rules): {}; the module stays as it is"
_TP = _MODULE.format('rules split weights, (r"up\\.weight", P("tp"))')
_FSDP = _MODULE.format("vfn.fsdp_specs splits every parameter, f.gathering(specs) gathers each where it is read")
_DDP = _MODULE.format("params are replicated by P(), and the batch is split by P('dp')")
_SHARD = "vfn.shard(x, mesh, spec): P('dp') for [Shard(0), Replicate()] on a mesh of 'dp' and 'tp'"
_BLOCKS = "vfn.from_local(lambda coord: ..., mesh, spec), which is asked for each rank's block"
_MAKE = "mesh = vfn.make_mesh((2, 4), ('dp', 'tp'))"
# By the name of a function, a method or a class of torch's; what is looked for first, from the user's line inwards.
INSTEAD = {
    **dict.fromkeys(("get_rank", "get_local_rank", "get_group_rank", "get_node_local_rank"), _INDEX),
    "get_world_size": _SIZE,
    **dict.fromkeys(("all_reduce", "reduce", "all_reduce_coalesced", "all_reduce_inplace"), _SUM),
    **dict.fromkeys(
        (
            "all_gather",
            "all_gather_into_tensor",
            "all_gather_object",
            "gather",
            "gather_object",
            "all_gather_tensor",
            "all_gather_tensor_autograd",
        ),
        _GATHER,
    ),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_autograd"), _SCATTER),
    **dict.fromkeys(
        ("all_to_all", "all_to_all_single", "all_to_all_single_autograd"),
        "vfn.all_to_all(x, axis, ...) in a shard_map body",
    ),
    **dict.fromkeys(
        ("broadcast", "broadcast_object_list", "scatter"), "vfn.pbroadcast(x, axis, source) in a shard_map body"
    ),
    **dict.fromkeys(("send", "recv", "isend", "irecv", "batch_isend_irecv", "P2POp"), _SEND),
    "permute_tensor": _SEND,
    **dict.fromkeys(("barrier", "monitored_barrier"), "nothing: simulated ranks take each step together"),
    "new_group": "the axes of a mesh, by name; a tuple of names is one group",
    "distribute_tensor": _SHARD,
    "distribute_module": _TP,
    "parallelize_module": _TP,
    "fully_shard": _FSDP,
    "FullyShardedDataParallel": _FSDP,
    "DistributedDataParallel": _DDP,
    "init_device_mesh": _MAKE,
    "DeviceMesh": _MAKE,
    "from_local": _BLOCKS,
    "get_group": "the name of the axis: vfn.psum(x, 'tp') in a shard_map body",
    **dict.fromkeys(("zeros", "ones", "empty", "full"), _SHARD),
    **dict.fromkeys(("rand", "randn"), "vfn.random.uniform or normal with a key, then " + _SHARD),
}
_OTHER = "collectives by the names of axes in a shard_map body; ordinary functions in the global view"


def _called() -> str:
    """What of torch's the user's line has called, by its name in `INSTEAD`; "" where that is none of them."""
    codes: list[CodeType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    names: list[str] = []  # the innermost call's first
    for code, hidden in zip(codes, reversed(inner(code.co_filename for code in reversed(codes))), strict=True):
        if not hidden:
            break
        names += reversed(code.co_qualname.split("."))
    return next((name for name in reversed(names) if name in INSTEAD), "")


def refuse(mesh: Any = None, name: str = "") -> NoReturn:
    """Say that simulated ranks have no process group, and what to write in place of what was called."""
    name = name or _called()
    ranks = f"the ranks of the {mesh_text(axes_of(mesh))} are" if mesh is not None else "the ranks are"
    what = f"{ranks} simulated: this process plays all of them, and torch has no process group"
    raise MeshError(report(name or "torch.distributed", what, fix=INSTEAD.get(name, _OTHER)))


def _without_a_group() -> None:
    if context.simulated() is not None:
        refuse()


def _named(group: str) -> None:
    body, mesh = context.body(), context.current_mesh()
    axes = axes_of(mesh if body is None else body.mesh) if body is not None or mesh is not None else {}
    if group in axes:
        if isinstance(said := sys.exc_info()[1], MeshError):  # torch logs the call that failed, and so asks again
            raise said
        name = _called()
        what = f"group={group!r} is an axis of the {mesh_text(axes)}, but torch takes a process group"
        own = f"group=mesh.get_group({group!r})"
        fix = own if name.endswith("barrier") else f"{INSTEAD.get(name, _OTHER)}; or {own}"
        raise MeshError(report(name or "torch.distributed", what, fix=fix))


def _one_ranks_values(mesh: Any, name: str) -> None:
    if hasattr(mesh, "communicator"):
        refuse(mesh, name if name in INSTEAD else "")


torch_internals.ask_before_groups(_without_a_group, _named, _one_ranks_values)
