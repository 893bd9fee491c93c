"""Tables: tensors of numbers that follow from layouts alone, as where a rank finds an index. A plan may hold them as data."""

from __future__ import annotations

from typing import Any

import torch

from . import no_values

_ITSELF = object()


def table(x: torch.Tensor, device: Any = "cpu") -> torch.Tensor:
    """A table of the numbers in `x`, a tensor on the CPU; without values where the device is not here."""
    device = torch.device(device)
    if device.type == "cpu":
        x.vfn_table = _ITSELF  # type: ignore[attr-defined]
        return x
    backend = getattr(torch, device.type, None)
    here = backend is None or backend.is_available()  # "meta" has no module, and is anywhere
    made = x.to(device) if here else no_values.empty(x.shape, x.stride(), x.dtype, device)
    made.vfn_table = x  # type: ignore[attr-defined]
    return made


def numbers(x: Any) -> torch.Tensor | None:
    """The numbers in a table, on the CPU; None of what is none."""
    found = getattr(x, "vfn_table", None)
    return x if found is _ITSELF else found
