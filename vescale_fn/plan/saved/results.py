"""How the results of a function are put together of its plan's, as data for JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..._core.sharding.layout import spec_for
from ..tracing.leaves import Result
from .graph_data import GraphReader, GraphWriter, unsaveable


def written(made: Any, writer: GraphWriter) -> dict[str, Any]:
    """A `Result`, an argument that is handed back, or a value."""
    if not isinstance(made, Result):
        kind, what = made
        return {kind: writer.value(what)}
    if made.simulated:
        raise unsaveable("a plan of several ranks that one process plays", "real ranks, or vfn.abstract_mesh")
    if made.spec is None:
        return {"tensor": list(made.places)}
    meta = made.spec.tensor_meta
    return {
        "array": list(made.places),
        "mesh": writer.mesh(made.spec.mesh),
        "spec": writer.spec(made.lies),
        "shape": [list(meta.shape), list(meta.stride), str(meta.dtype).removeprefix("torch.")],
    }


def read(row: Mapping[str, Any], reader: GraphReader) -> Any:
    """What `written` has told of."""
    if "input" in row:
        return "input", row["input"]
    if "value" in row:
        return "value", reader.value(row["value"])
    if "tensor" in row:
        return Result(row["tensor"])
    shape, stride, dtype = row["shape"]
    lies = reader.spec(row["spec"])
    meta = torch.Size(shape), tuple(stride), reader.value({"dtype": dtype})
    return Result(row["array"], spec_for(reader.meshes[row["mesh"]], lies, *meta), lies)
