"""Debug mode: what must be the same on every rank, compared: plain tensors that meet arrays, calls of `shard_map`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from . import _torch, context, tree
from .agreement import Call, Value
from .errors import mesh_text
from .layout import text
from .mesh import axes_of, is_simulated


def digest(x: torch.Tensor) -> str:
    """A hash of the bits of a plain tensor; "" of one without memory that can be read."""
    x = _torch.peel(x)
    if (
        type(x) not in (torch.Tensor, torch.nn.Parameter)
        or x.layout is not torch.strided
        or x.is_meta
        or _torch.tracing()
    ):
        return ""
    with _torch.no_torch_function(), torch.no_grad():
        flat = _torch.settled(x.detach()).cpu().contiguous().reshape(-1)
        return hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=8).hexdigest() if flat.numel() else ""


def _shown(x: torch.Tensor) -> str:
    """A plain tensor's first values, and its sum, for those that differ further on."""
    with _torch.no_torch_function(), torch.no_grad():
        flat = _torch.settled(_torch.peel(x).detach()).cpu().reshape(-1)
        first = ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in flat[:3].tolist())
        wide = flat if flat.is_complex() else flat.to(torch.float64 if flat.is_floating_point() else torch.int64)
        return f"[{first}{', ...' if flat.numel() > 3 else ''}]" + (
            f" (sum {wide.sum().item():.9g})" if flat.numel() > 3 else ""
        )


def _value(path: str, x: Any) -> Value:
    if not isinstance(x, torch.Tensor):
        return Value(path, repr(x)[:60] if isinstance(x, (int, float, complex, str, type(None))) else type(x).__name__)
    below = _torch.peel(x)
    bits = "" if isinstance(below, DTensor) else digest(below)
    return Value(path, text(below), bits, _shown(below) if bits else "")


def _on(mesh: Any) -> str:
    return f"on {mesh_text(axes_of(mesh))}"


def _ranks(mesh: Any) -> list[int]:
    return mesh.mesh.flatten().tolist()


def same_plain(where: str, mesh: Any, values: Iterable[tuple[str, Any]]) -> None:
    """In debug mode: plain tensors among (path, value) pairs, which `where` takes to be the same on all ranks, are so."""
    watch = context.watch()
    if watch is None or mesh is None or is_simulated(mesh):
        return
    plain = [(path, x) for path, x in values if isinstance(x, torch.Tensor) and not isinstance(_torch.peel(x), DTensor)]
    if plain:
        watch.compare(_ranks(mesh), Call(where, _on(mesh), tuple(_value(path, x) for path, x in plain)))


def same_call(mapped: Any, mesh: Any, args: Any, leaves: Sequence[Any]) -> None:
    """In debug mode: all ranks of `mesh` call the same `shard_map` with the same arguments."""
    watch = context.watch()
    if watch is not None and not is_simulated(mesh):
        values = tuple(_value(path, x) for path, x in zip(tree.paths(args, "args"), leaves, strict=True))
        details = f"in_specs={mapped.in_specs!r}, out_specs={mapped.out_specs!r}" + (
            "" if mapped.check else ", unchecked"
        )
        watch.compare(_ranks(mesh), Call(f"shard_map({mapped.name})", _on(mesh), values, details))


def same_shapes(mapped: Any, mesh: Any, result: Any, leaves: Sequence[Any]) -> None:
    """In debug mode: the blocks that the ranks of `mesh` return from a `shard_map` body are of the same shapes."""
    watch = context.watch()
    if watch is not None and not is_simulated(mesh):
        values = tuple(Value(path, text(_torch.peel(x)) if isinstance(x, torch.Tensor) else type(x).__name__)
                       for path, x in zip(tree.paths(result, "out"), leaves, strict=True))  # fmt: skip
        watch.compare(_ranks(mesh), Call(f"the results of shard_map({mapped.name})", _on(mesh), values))
