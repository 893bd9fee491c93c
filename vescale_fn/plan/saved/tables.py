"""Tables of numbers in a plan as data for JSON, and back: each different one once, and which of them each rank has."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..._core.base import dtypes
from ..._core.base.tables import table


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


def read(data: Mapping[str, Any], at: int) -> torch.Tensor:
    """That of one of the ranks."""
    text = data["numbers"][data["of"][at] if data["of"] else 0]
    dtype = getattr(torch, data["dtype"])
    made = torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8).view(dtype).view(data["shape"])
    return table(made, data["device"])
