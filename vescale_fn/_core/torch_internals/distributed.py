"""Process groups: collectives by their names of today, stores, timeouts."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.distributed import distributed_c10d as _c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _api as _dtensor_api

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name changed in 2.13
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


GLOO_THREAD = "pt_gloo_runloop"  # as Linux knows the threads of a process group of gloo's, in which collectives run


def ask_before_groups(
    ask: Callable[[], None], ask_of_name: Callable[[str], None], ask_of_mesh: Callable[[Any, str], None]
) -> None:
    """Have `ask` called where torch needs the default process group and there is none, nor anything to make one from;
    `ask_of_name` where a process group is given by a name; and `ask_of_mesh`, with the mesh and the function's name, where
    torch makes a DTensor of one rank's values. All may raise."""
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers  # behind a function of this name
    default, from_environment = _c10d._get_default_group, handlers["env"]

    @functools.wraps(default)
    def default_group() -> Any:
        if not dist.is_initialized():
            ask()
        return default()

    @functools.wraps(from_environment)
    def meet(*args: Any, **kwargs: Any) -> Any:
        if "RANK" not in os.environ:
            ask()
        return from_environment(*args, **kwargs)

    def asking(made: Any) -> Any:
        @functools.wraps(made)
        def asked(local: Any, *args: Any, **kwargs: Any) -> Any:
            for x in (*args, *kwargs.values()):
                if isinstance(x, DeviceMesh) and not hasattr(local, "blocks"):  # those are all ranks' values
                    ask_of_mesh(x, made.__name__)
            return made(local, *args, **kwargs)

        return asked

    def asking_first(found: Any) -> Any:
        @functools.wraps(found)
        def group_of(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], dist.ProcessGroup):
                return found(*args, **kwargs)
            if not dist.is_initialized():
                ask()
            elif args and isinstance(args[0], str):
                ask_of_name(args[0])
            return found(*args, **kwargs)

        return group_of

    resolving = ("_resolve_group",) * hasattr(_functional_collectives, "_resolve_group")  # not in 2.11
    for module, names in (
        (_functional_collectives, (*resolving, "_resolve_group_name", "_expand_group")),
        (_c10d, ("_rank_not_in_group",)),  # which has a group of any kind, a name too, before it is used
    ):
        for name in names:
            setattr(module, name, asking_first(getattr(module, name)))
    handlers["env"] = meet
    for name, module in tuple(sys.modules.items()):
        if name.startswith("torch.") and vars(module).get("_get_default_group") is default:
            module._get_default_group = default_group  # type: ignore[attr-defined]
    DTensor.from_local = staticmethod(asking(DTensor.from_local))  # type: ignore[method-assign]
    _dtensor_api._dtensor_init_helper = asking(_dtensor_api._dtensor_init_helper)


def set_default_group_timeout(timeout: Any) -> None:
    """Let the groups of a mesh time out as the process group does (by default half an hour, whatever that was given)."""
    _c10d.default_pg_timeout = timeout
    if getattr(_c10d, "default_pg_nccl_timeout", None) is not None:
        _c10d.default_pg_nccl_timeout = timeout


def default_store() -> Any:
    """The store through which the ranks of the default process group met."""
    return _c10d._get_default_store()


@functools.cache
def stored_at() -> Any:
    """The class that says where in which file torch.distributed.checkpoint finds something. That takes 0.1 s to import, which
    a program that saves and loads nothing does not spend."""
    return importlib.import_module("torch.distributed.checkpoint.filesystem")._StorageInfo


rebuild_tensor = torch._utils._rebuild_tensor_v2  # which torch.save names for a tensor


def group_timeout(group: Any = None) -> float:
    """How many seconds a collective of a process group may take; of the default one, if none is given."""
    device = torch.device("cuda" if "nccl" in dist.get_backend_config(group) else "cpu")
    try:
        found: Any = group or dist.group.WORLD
        return found._get_backend(device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # a backend without options
        return _c10d.default_pg_timeout.total_seconds()


def sent(group: Any, x: torch.Tensor, target: int) -> Any:
    """Begin to send a value to a rank of a group, by its number there: `dist.isend` without a look at what it is given."""
    return group.send([x], target, 0)


def received(group: Any, x: torch.Tensor, source: int) -> Any:
    """Begin to receive a value from a rank of a group, by its number there, as `sent` sends it."""
    return group.recv([x], source, 0)


def group_of_members(ranks: Sequence[int], timeout: Any) -> Any:
    """A process group that these ranks of the world make, each of them, and no others.

    By itself torch names it after its members and the number of groups that a process is in, by which they would not find each
    other where that differs (torch 2.13): here after the members and how many groups of the same ones there were.
    """
    members = tuple(sorted(ranks))
    known = dist.group.WORLD, members
    name = f"vescale_fn {members} {_groups_of_members.setdefault(known, 0)}"
    _groups_of_members[known] += 1
    by_torch, _c10d._hash_ranks_to_str = _c10d._hash_ranks_to_str, lambda _: name
    try:
        return dist.new_group(list(members), timeout=timeout, use_local_synchronization=True)
    finally:
        _c10d._hash_ranks_to_str = by_torch


_groups_of_members: dict[Any, int] = {}


def set_group_timeout(group: Any, timeout: Any) -> bool:
    """Let the collectives of a process group take so long; False where its backend does not take that."""
    try:
        for device in group._device_types:
            group._get_backend(device)._set_default_timeout(timeout)
    except (AttributeError, RuntimeError):
        return False
    return True
