"""The way of a value into a body, and out of it: the block that it is there, with its type, and the array that it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import torch_internals
from ..arrays.array import Boundary, bring_in, take_out
from ..base import linear_map
from ..local_types import tensor_types, types
from ..sharding.spec import P
from .collective_maps import CollectiveMap, promote
from .scope import Site


class Crossing:
    """How one tensor crosses.

    Attributes:
        spec: what in_specs or out_specs says of it.
        boundary: between its array, as that lies, and the blocks.
        type: of the block, by the spec.
        inside: of the block, in the body; None where that hangs on the type that its argument has in a body around.
        shared_by: without types, the axes over which its gradient is the ranks' sum.
        direct: whether the block can be read off the array as it lies.
    """

    __slots__ = ("boundary", "direct", "inside", "shared_by", "spec", "type")

    def __init__(self, site: Site, spec: P, lies: P, direct: bool = False) -> None:
        self.spec, self.type, self.direct = spec, types.of_spec(spec), direct
        self.boundary = Boundary(site.mesh, lies, site.auto)
        self.inside = tensor_types.made_in(site.body)
        if site.body.check:
            self.inside = self.type if site.outer is None else None
        self.shared_by = () if site.body.check else site.unmentioned(spec)


def brought_in(leaves: Sequence[Any], ways: Sequence[Crossing | None], site: Site, fast: bool) -> list[Any]:
    """The arguments as values of the body, with their types; `fast` where nothing differentiates."""
    if site.outer is None:
        return [x if way is None else _brought_in(x, site, way, fast) for x, way in zip(leaves, ways)]
    with torch_internals.no_torch_function():  # the mode of a body around watches what that body does, not what we do
        return [x if way is None else _brought_in(x, site, way, fast) for x, way in zip(leaves, ways)]


def _brought_in(x: Any, site: Site, way: Crossing, fast: bool) -> Any:
    body, type_ = site.body, way.inside
    if type_ is None:
        type_ = types.both(way.type, tensor_types.read(x))
    local = way.boundary.block(x) if fast and way.direct else bring_in(x, way.boundary, "shard_map argument")
    if fast:
        tensor_types.mark_fresh(local, type_, body.check)
        return local
    if way.shared_by:
        (local,) = linear_map.apply(CollectiveMap("copy", body.mesh, way.shared_by, "shard_map argument"), local)
    tensor_types.mark(local, type_)
    if body.check:
        tensor_types.borrow(local)
    return local


def taken_out(
    values: Sequence[Any], have: Sequence[types.Type], ways: Sequence[Crossing | None], site: Site, fast: bool
) -> list[Any]:
    """Values of the body, which have these types, as whole arrays; `fast` where nothing differentiates."""
    if site.outer is None:
        return [x if way is None else _taken_out(x, t, site, way, fast) for x, t, way in zip(values, have, ways)]
    with torch_internals.no_torch_function():
        return [x if way is None else _taken_out(x, t, site, way, fast) for x, t, way in zip(values, have, ways)]


def _taken_out(local: Any, have: types.Type, site: Site, way: Crossing, fast: bool) -> Any:
    body, outer = site.body, site.outer
    if fast:
        out = way.boundary.whole(local)
    else:
        if body.check:
            want = types.both(way.type, types.of(body.unchecked))  # over those a cotangent is each rank's own
            local = promote(local, have, want, body.mesh)
        elif way.shared_by:
            (local,) = linear_map.apply(CollectiveMap("share", body.mesh, way.shared_by, "shard_map result"), local)
        out = take_out(local, way.boundary)
    if outer is not None:
        tensor_types.mark(out, types.over(have, outer.axes) if outer.check else tensor_types.made_in(outer))
    return out
