"""Tables of numbers in a plan as data for JSON, and back: each different one once, and which of them each rank has."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..._core.base import dtypes
from ..._core.base.tables import table
from ..ir.per_rank import Tables


def written(device: torch.device, of_each: Sequence[torch.Tensor]) -> dict[str, Any]:
    """A table of which each rank has its own, all of one shape and dtype."""
    texts = [base64.b64encode(bytes(dtypes.as_bytes(x).tolist())).decode() for x in of_each]
    different = list(dict.fromkeys(texts))
    places = {text: i for i, text in enumerate(different)}
    return {
        "shape": list(of_each[0].shape),
        "dtype": str(of_each[0].dtype).removeprefix("torch."),
        "device": device.type,
        "numbers": different,
        "of": [places[text] for text in texts] if len(different) > 1 else [],
    }


def read(data: Mapping[str, Any], at: Sequence[int]) -> Tables:
    """Those of some of the ranks; what is equal is one tensor."""
    made = [_read(data, text) for text in data["numbers"]]
    return Tables(made[data["of"][i] if data["of"] else 0] for i in at)


def _read(data: Mapping[str, Any], text: str) -> torch.Tensor:
    made = torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8).view(getattr(torch, data["dtype"]))
    return table(made.view(data["shape"]), data["device"])
