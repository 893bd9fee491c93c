"""One rank of a job of eight whose collectives exchange nothing: dispatch cost without communication."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import vescale_fn as vfn

MESHES = {"(8,)": ((8,), ("dp",)), "(2, 4)": ((2, 4), ("dp", "tp"))}


def start(ranks: int = 8) -> None:
    """Make this process rank 0 of a fake process group."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


def mesh(name: str) -> DeviceMesh:
    shape, names = MESHES[name]
    return vfn.make_mesh(shape, names, device="cpu")
