"""The arguments of a `shard_map`: checked against in_specs, all that do not fit named at once; then brought into the body."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import torch_internals
from ..arrays import reshard_plan
from ..arrays.array import Array, entries_over, is_array, mesh_of, spec_of
from ..base import tree
from ..base.containers import SPLIT_NUMBERS, split_numbers
from ..base.errors import ReshardError, SpecError
from ..base.messages import axes_text, described, mesh_text, report
from ..base.user_calls import parameter
from ..distributed.mesh import same
from ..distributed.places import place_of
from ..local_types import tensor_types
from ..sharding.index_map import axes_of
from ..sharding.layout import axes_items, layout
from ..sharding.spec import KEYS, P, as_spec, axes_named, keys_taken_apart, place_text, split_axes
from .crossing import Crossing
from .scope import Map, Site, bare, misfits


def plan_ins(mapped: Map, site: Site, args: Any, leaves: Sequence[Any]) -> list[Crossing | None]:
    """What happens to each argument; or an error that names all of them that do not fit."""
    where = mapped.where
    specs = tree.broadcast(mapped.in_specs, args, where, "in_specs", "args")
    failures: list[str] = []
    ways: list[str] = []
    plan: list[Crossing | None] = []
    of_keys = tree.leaves_in_opaque(args)
    alone = split_numbers(mapped.in_specs, args, leaves, _names_axes)
    for i, (x, spec) in enumerate(zip(leaves, specs, strict=True)):
        if not isinstance(x, torch.Tensor):
            plan.append(None)
            if i in alone:
                failures.append(f"{tree.paths(args, 'args')[i]} = {spec!r}: it is {described(x)}, which has no dims")
                ways.append(SPLIT_NUMBERS)
            continue
        found = _wrong_argument(x, spec, site, of_keys[i])
        if found:
            failures.append(f"{_argument(mapped, args, i)} = {spec!r}: {'; '.join(problem for problem, _ in found)}")
            ways += [way for _, way in found]
        else:
            lies = site.lies(spec, x)
            direct = type(x) is Array and layout(torch_internals.spec(x)) == bare(lies)
            plan.append(Crossing(site, spec, lies, direct))
    if failures:
        raise SpecError(
            report(
                where,
                f"the arguments do not fit in_specs on the {mesh_text(axes_of(site.mesh))}",
                failures,
                "; ".join(dict.fromkeys(ways)),
            )
        )
    return plan


def _wrong_argument(x: torch.Tensor, spec: Any, site: Site, of_keys: bool) -> list[tuple[str, str]]:
    """What is wrong with an argument and its spec, and what to write instead."""
    if not isinstance(spec, P):
        return [(f"it is {described(spec)}, not a vfn.P", as_spec(spec))]
    other = mesh_of(x) if is_array(x) else None
    if other is not None and (place := place_of(other)) is not None:
        there = f"it is at {place_text(place.at)}, and the body runs on all ranks"
        return [(there, "vfn.with_sharding(x, P()), which copies it to all of them")]
    if other is not None and not same(other, site.mesh):
        there = f"it lies on another mesh, {mesh_text(axes_of(other))}"
        return [(there, f"vfn.shard(x, mesh, {spec!r}), which brings it over")]
    found = misfits(spec, site, x.ndim)
    if of_keys and not found:
        found = [(problem, KEYS) for problem in keys_taken_apart(spec, x.ndim)]
    return found or [(problem, _EVEN) for problem in _uneven(tuple(x.shape), spec, site.sizes)]


def _names_axes(spec: Any) -> bool:
    return isinstance(spec, P) and bool(axes_named(spec))


_EVEN = "a spec of axes that divide the dims, None for a dim that every rank needs whole, or pad the argument"


def _argument(mapped: Map, args: Any, i: int) -> str:
    """The i-th leaf in the user's words: path, shape, parameter, and where its spec stands."""
    path = tree.paths(args, "args")[i]
    x = tree.leaves(args)[i]
    position = int(path[len("args[") :].split("]", 1)[0])
    tail = path[len(f"args[{position}]") :]
    name = parameter(mapped.f, args, position)
    said = f", where args[{position}] is bound to {mapped.name}'s parameter {name!r}," if name else ""
    where = (
        f"in_specs[{position}]{tail}"
        if isinstance(mapped.in_specs, tuple) and not isinstance(mapped.in_specs, P)
        else "in_specs"
    )
    return f"{path} of shape {tensor_types.text(x)}{said} corresponds to {where}"


def _uneven(shape: tuple[int, ...], spec: P, axes: Mapping[str, int]) -> list[str]:
    found = []
    for dim, (size, names) in enumerate(zip(shape, split_axes(spec, len(shape)))):
        n = math.prod(axes[name] for name in names)
        if size % n:
            product = "*".join(str(axes[name]) for name in names)
            found.append(
                f"dim {dim}: {size} is not divisible by {product}{f' = {n}' if len(names) > 1 else ''} "
                f"(ax{'e' if len(names) > 1 else 'i'}s {', '.join(map(repr, names))})"
            )
    return found


def refuse_moves(mapped: Map, site: Site, args: Any, leaves: Sequence[Any], plan: Sequence[Crossing | None]) -> None:
    """Under `strict`: raise where an argument would have to travel to lie as its spec says."""
    failures = []
    for i, (x, entry) in enumerate(zip(leaves, plan)):
        if entry is None or entry.direct or not is_array(x):
            continue
        entries = entries_over(x) & (axes_named(entry.boundary.spec) | site.sizes.keys())
        if entries:
            over = axes_text(sorted(entries))
            failures.append(
                f"{_argument(mapped, args, i)}: its entries, under vmap, are split over {over}, which the map uses"
            )
            continue
        source = bare(spec_of(x))
        steps = reshard_plan.plan(tuple(x.shape), axes_items(mesh_of(x)), source, bare(entry.boundary.spec))
        if any(step.kind not in reshard_plan.LOCAL_KINDS for step in steps):
            wanted = f"{entry.spec!r}, but it lies as {source!r}: vfn.with_sharding(x, {entry.boundary.spec!r})"
            failures.append(f"{_argument(mapped, args, i)} = {wanted}")
    if failures:
        raise ReshardError(
            report(
                mapped.where,
                "strict: arguments lie otherwise than in_specs says",
                failures,
                "write the vfn.with_sharding, so that the program asks for the move",
            )
        )
