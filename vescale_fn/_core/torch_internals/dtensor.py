"""DTensor: subclasses of it, its specs and meshes, how it would run an op."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.utils._pytree as _pytree
from torch._library import simple_registry as _simple_registry
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import placement_types as _placement_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

try:
    from torch.distributed.tensor._op_schema import OpSchema
except ImportError:
    OpSchema: Any = None  # then DTensor is never asked how it would run an op

strided_shard_type = _placement_types._StridedShard
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
LOCAL = "_local_tensor"  # the name by which a DTensor asks for a block that it has not got
# Each costs a few nanoseconds more than the attribute itself: no frame of Python's.
local = operator.attrgetter(LOCAL)  # this rank's block of a DTensor
spec = operator.attrgetter("_spec")  # the DTensorSpec of a DTensor: mesh, placements, shape and dtype
mesh = operator.attrgetter("_spec.mesh")


def set_local(x: Any, block: torch.Tensor) -> None:
    """Give the DTensor `x` another block."""
    x._local_tensor = block


def set_spec(x: Any, spec: Any) -> None:
    """Give the DTensor `x` another DTensorSpec, or what stands in its place and raises."""
    x._spec = spec


def held_local(x: Any) -> torch.Tensor | None:
    """This rank's block of the DTensor `x`, which is not asked for one where it has none."""
    try:
        return DTensor._local_tensor.__get__(x)
    except AttributeError:
        return None


def forget_local(x: Any) -> None:
    """Make `x` a DTensor without a block; it may have none already."""
    with contextlib.suppress(AttributeError):
        del x._local_tensor


def strided_shard(dim: int, split_factor: int) -> Any:
    """The placement of an axis that takes its piece out of each of `split_factor` segments."""
    return strided_shard_type(dim, split_factor=split_factor)


C = TypeVar("C", bound=type)


def dispatch_to_own(cls: C) -> C:
    """Have ops on `cls`, a subclass of DTensor, come to its own ``__torch_dispatch__``.

    In some releases torch takes subclasses of DTensor down DTensor's C++ path without asking them (2.11 does, 2.13 asks).
    There a rule registered for the class comes first; torch keeps such rules by op, so this one answers for every op.
    """

    class DispatchProbe(DTensor):
        asked = False

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            DispatchProbe.asked = True
            return args[0]

    mesh = unattached_mesh("cpu", torch.arange(1, device="cpu"), ("x",))
    meta = TensorMeta(torch.Size(()), (), torch.float32)
    spec = DTensorSpec(mesh, (_placement_types.Replicate(),), tensor_meta=meta)
    torch.neg(new_dtensor(DispatchProbe, torch.zeros((), device="cpu"), spec))
    if not DispatchProbe.asked:
        holder = _simple_registry.GenericTorchDispatchRuleHolder
        find = holder.find
        rule = lambda _, func, types, args=(), kwargs=None: cls.__torch_dispatch__(func, types, args, kwargs)
        holder.find = lambda self, asked: rule if asked is cls else find(self, asked)
    return cls


# The two steps of `new_dtensor`, for where a call of it is a part of what an op costs: ``bare_dtensor(cls, local, spec,
# requires_grad=False)``; and what makes taking the data pointer of a wrapper without storage raise.
bare_dtensor: Any = getattr(torch.Tensor, "_dtensor__new__", DTensor.__new__)
forbid_data_ptr = torch._C._set_throw_on_mutable_data_ptr


def new_dtensor(cls: Any, local: Any, spec: Any, requires_grad: bool = False) -> Any:
    """A DTensor of class `cls` around `local`. It has no memory of its own, and code in C that asks for its address fails."""
    out = bare_dtensor(cls, local, spec, requires_grad=requires_grad)
    forbid_data_ptr(out)
    return out


def unattached_mesh(
    device: str, ranks: torch.Tensor, names: tuple[str, ...], cls: type = DeviceMesh, seen_from: int = 0
) -> Any:
    """A mesh of class `cls` that belongs to no process group, seen from a rank."""
    made = cls(device, ranks, mesh_dim_names=names, _init_backend=False, _rank=seen_from)
    if not hasattr(made, "_dim_group_names"):  # `torch.compile` reads it of each mesh that it meets
        made._dim_group_names = []
    return made


def has_groups(mesh: Any) -> bool:
    """Whether a mesh has process groups, here."""
    return bool(getattr(mesh, "_dim_group_names", None))


def root_mesh(mesh: Any) -> Any:
    """The mesh that `mesh` was cut out of by ``mesh[names]``, or itself."""
    find = getattr(mesh, "_get_root_mesh", None)
    return mesh if find is None else find()


def propagate(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]] | None:
    """DTensor's own way to run an op: the placements of each DTensorSpec among `args`, and of each result.

    None where it has none, or would call the op with other arguments on the blocks than on the whole.
    """
    try:
        own: Any = DTensor._op_dispatcher.sharding_propagator
        info = own.op_to_schema_info.get(func)
        info = info or getattr(own, "op_to_schema_info_for_single_dim_strategy", {}).get(func)
        schema = OpSchema(func, tuple(args), kwargs, info)
        answer: Any = own.propagate_op_sharding_non_cached(schema)
        if getattr(answer, "use_val_from_redistribute_schema", True):
            return None
        wanted: Any = answer.redistribute_schema if answer.needs_redistribute else schema
        ins = [a.placements for a in _pytree.tree_leaves(wanted.args_schema) if isinstance(a, DTensorSpec)]
        outs = answer.output_spec if isinstance(answer.output_spec, (list, tuple)) else [answer.output_spec]
        return ins, [None if out is None else out.placements for out in outs]
    except Exception:
        return None  # its interface is private: in a release where it is another, there is no answer
