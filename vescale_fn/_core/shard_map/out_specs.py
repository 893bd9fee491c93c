"""The results of a `shard_map`: checked against out_specs, all that do not fit named at once; then taken out of the body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..base import tree
from ..base.errors import SpecError, VaryingTypeError
from ..base.messages import count_text, described, mesh_text, report
from ..distributed.mesh import communicator_of
from ..local_types import tensor_types, types
from ..sharding.index_map import axes_of
from ..sharding.layout import type_text
from ..sharding.spec import P, as_spec
from .crossing import Crossing
from .scope import Map, Site, misfits


def plan_outs(
    mapped: Map, site: Site, result: Any, locals_: Sequence[Any], have: Sequence[Any]
) -> list[Crossing | None]:
    """What each result becomes; or an error that names all of them that do not fit."""
    where, mesh = mapped.where, site.mesh
    specs = tree.broadcast(mapped.out_specs, result, where, "out_specs", "the result")
    paths = tree.paths(result, "out")
    failures, ways = [], []
    plan: list[Crossing | None] = []
    for path, x, type_, spec in zip(paths, locals_, have, specs, strict=True):
        if not isinstance(spec, P):
            failures.append(f"{path}: its spec is {described(spec)}, not a vfn.P")
            ways.append(as_spec(spec))
            continue
        if not isinstance(x, torch.Tensor):
            plan.append(None)
            if spec != P():
                failures.append(f"{path} is {described(x)}, not a tensor, for out_specs {spec!r}")
                ways.append("P() for what is no tensor: it passes through")
            continue
        said = f"{path} is {tensor_types.text(x, type_)}, for out_specs {spec!r}"
        outside = tensor_types.outside(x, site.auto)
        wrong = [(f"it is {tensor_types.text(x)}, a whole array", "")] if outside else misfits(spec, site, x.ndim)
        found = [problem for problem, _ in wrong]
        if len(spec) > x.ndim:
            ways.append(
                "x[None], which adds a dim to concatenate along: "
                f"out_specs={spec!r} needs {count_text(len(spec), 'dim')}"
            )
        else:
            ways += [way for _, way in wrong if way]
        if not found and mapped.check:
            for axis in site.sizes:
                found += _type_problem(axis, type_.letter(axis), types.of_spec(spec).letter(axis), spec, ways)
        failures += [f"{said}: {problem}" for problem in found]
        if not found:
            plan.append(Crossing(site, spec, site.lies(spec, x)))
    if failures:
        raise SpecError(
            report(
                where,
                f"the results do not fit out_specs on the {mesh_text(axes_of(mesh))}",
                failures,
                "; or ".join(dict.fromkeys(ways)),
            )
        )
    return plan


def refuse_other_shapes(where: str, mesh: Any, result: Any, locals_: Sequence[Any]) -> None:
    """Raise, on all ranks, where ranks give results of different shapes. They tell each other."""
    tensors = [(path, x) for path, x in zip(tree.paths(result, "out"), locals_) if isinstance(x, torch.Tensor)]
    ranks = communicator_of(mesh).everyone([[tuple(x.shape)] for _, x in tensors], f"shapes of the results of {where}")
    failures = []
    for (path, x), shapes in zip(tensors, zip(*ranks)):
        if len(set(shapes)) > 1:
            first = {shape: rank for rank, shape in reversed(list(enumerate(shapes)))}
            said = [f"{type_text(torch.Size(s), x.dtype, P())} on rank {first[s]}" for s in dict.fromkeys(shapes)]
            failures.append(f"{path} is {', '.join(said[:8])}{', ...' * (len(said) > 8)}")
    if failures:
        raise VaryingTypeError(
            report(
                where,
                f"the results are blocks of one shape, but here values decide their shapes, which differ by rank on the "
                f"{mesh_text(axes_of(mesh))}",
                failures,
                "one shape on all ranks: torch.where(mask, x, 0) for x[mask], or pad it",
            )
        )


def _type_problem(axis: str, have: str, want: str, spec: P, ways: list[str]) -> list[str]:
    if have == want or (want == "V" and have in "IR"):
        return []
    if want == "I" and have == "V":
        ways += [
            f"vfn.psum(x, {axis!r}) or vfn.pmean(x, {axis!r}), where the ranks' values are to be combined",
            f"vfn.all_gather(x, {axis!r}, to='invarying'), where all ranks are to have all of them",
            f"out_specs with {axis!r} for the dim along which they are to be concatenated",
        ]
        return [
            f"it varies over {axis!r}, which out_specs does not mention, so it would have to be the same on all ranks"
        ]
    word = {"V": "varying", "U": "unreduced", "R": "reduced", "I": "the same on all ranks"}
    if have == "U":
        ways.append(f"vfn.psum(x, {axis!r}), or out_specs with unreduced={{{axis!r}}}")
    elif have == "R":
        ways.append(f"out_specs with reduced={{{axis!r}}}")
    else:
        ways.append(f"vfn.pcast(x, {axis!r}, to={word[want]!r})")
    return [f"it is {word[have]} over {axis!r}, but out_specs says {word[want]}"]
