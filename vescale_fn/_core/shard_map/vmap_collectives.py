"""Collectives over the entries of a `vmap`, by the axis name that it was given.

Each is a linear map that every other transform passes through, batched, transposed or as it is, until the `vmap` of that
name is reached. There the entries are a dim of one tensor, and the collective is arithmetic along that dim. Nothing is
known of how values differ between entries, as in a body without types: `psum` is its own transpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import torch_internals
from ..base import context, tree
from ..base.errors import CollectiveError, MeshError
from ..base.messages import mesh_text, report, short
from ..local_types import tensor_types
from ..sharding.index_map import axes_of
from .collective_calls import Problem, local, refuse_misfits
from .collective_maps import no_derivative
from .collective_operands import operands, refuse_what_cannot_be_reduced

Run = context.Entries | tuple[str, ...]  # neighbouring names of one kind: one vmap, or axes of the mesh


@dataclass(frozen=True)
class _Map:
    """A collective over the entries of one `vmap`, and its parameters, as those of `maps.Collective`."""

    row: str
    over: context.Entries
    dim: int = 0
    other: int = 0
    tiled: bool = False
    perm: tuple[tuple[int, int], ...] = ()
    source: int = 0

    def transpose(self) -> _Map:
        """The map of cotangents."""
        if self.row in ("pmax", "pmin"):
            no_derivative(self)
        if self.row == "all_to_all":
            return replace(self, dim=self.other, other=self.dim)
        return replace(
            self, row=_TRANSPOSED.get(self.row, self.row), perm=tuple((to, source) for source, to in self.perm)
        )

    def batched(self) -> _Map:
        """The same map with one more dim in front, which is another's entries."""
        return replace(self, dim=self.dim + (self.dim >= 0), other=self.other + (self.other >= 0))


class _OverEntries(torch.autograd.Function):
    """The map of one tensor. `index` differs between the entries, so that the `vmap` of that name is asked in any case."""

    @staticmethod
    def forward(op: _Map, x: torch.Tensor, index: torch.Tensor) -> Any:
        raise CollectiveError(
            report(
                op.row,
                f"axis_name={op.over.name!r} is the axis of a vmap that has ended",
                fix="the whole of the computation, a pullback too, in the function that vfn.vmap maps",
            )
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, ct: Any) -> Any:
        return None, None if ct is None else _over(ctx.op.transpose(), ct), None

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Any, __: Any) -> Any:
        return no_derivative(ctx.op) if ctx.op.row in ("pmax", "pmin") else _over(ctx.op, tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, op: _Map, x: torch.Tensor, index: torch.Tensor) -> Any:
        dim = in_dims[1]
        x = x if dim is None else x.movedim(dim, 0)
        if torch_internals.level() + 1 != op.over.level:  # this runs one level below that of the vmap
            return _over(op.batched(), x), 0
        with torch_internals.no_torch_function():
            if dim is None and op.row in _ALIKE:
                return _ALIKE[op.row](x, info.batch_size), None
            rule, differs = _ROWS[op.row]
            return rule(op, x.expand(info.batch_size, *x.shape) if dim is None else x), 0 if differs else None


def _over(op: _Map, x: torch.Tensor) -> torch.Tensor:
    return torch_internals.apply(_OverEntries, op, x, op.over.index)


# --- the rows: what happens to a tensor [entries, ...] ------------------------------------------------------------------


def _owned(x: torch.Tensor) -> torch.Tensor:
    """What is a view of the operand, in memory of its own, as what arrives from other ranks is."""
    return x.clone(memory_format=torch.contiguous_format)


def _sum(op: _Map, x: torch.Tensor) -> torch.Tensor:
    return x.sum(0, dtype=x.dtype)


def _gather(op: _Map, x: torch.Tensor) -> torch.Tensor:
    at = op.dim % (x.ndim - op.tiled)
    x = x.movedim(0, at)
    return _owned(x.flatten(at, at + 1) if op.tiled else x)


def _cut(op: _Map, x: torch.Tensor, dim: int) -> torch.Tensor:
    """The pieces of `x` along a dim, in front."""
    if op.tiled:
        x = x.unflatten(dim, (op.over.size, x.shape[dim] // op.over.size))
    return x.movedim(dim, 0)


def _scatter(op: _Map, x: torch.Tensor) -> torch.Tensor:
    return _cut(op, _sum(op, x), op.dim % (x.ndim - 1))


def _exchange(op: _Map, x: torch.Tensor) -> torch.Tensor:
    ndim = x.ndim - 1
    x, at = _cut(op, x, 1 + op.dim % ndim), 1 + op.other % ndim  # [destination, source, ...]
    x = x.movedim(1, at)
    return _owned(x.flatten(at, at + 1) if op.tiled else x)


def _permute(op: _Map, x: torch.Tensor) -> torch.Tensor:
    sources = [-1] * op.over.size
    for source, to in op.perm:
        sources[to] = source
    found = torch.tensor(sources, dtype=torch.int64, device=x.device)
    out = x.index_select(0, found.clamp(min=0))
    if -1 not in sources:
        return out
    return torch.where((found >= 0).view(-1, *[1] * (x.ndim - 1)), out, torch.zeros_like(out))


def _at_source(op: _Map, x: torch.Tensor) -> torch.Tensor:
    mine = torch.arange(op.over.size, device=x.device) == op.source
    total = _sum(op, x)
    return torch.where(mine.view(-1, *[1] * total.ndim), total, torch.zeros_like(total))


# Of each row the rule, and whether its result differs between entries.
_ROWS: dict[str, tuple[Callable[[_Map, torch.Tensor], torch.Tensor], bool]] = {
    "psum": (_sum, False),
    "pmax": (lambda op, x: x.amax(0), False),
    "pmin": (lambda op, x: x.amin(0), False),
    "all_gather": (_gather, False),
    "psum_scatter": (_scatter, True),
    "all_to_all": (_exchange, True),
    "ppermute": (_permute, True),
    "pbroadcast": (lambda op, x: _owned(x.select(0, op.source)), False),
    "sum_at_source": (_at_source, True),
}
_TRANSPOSED = {
    "all_gather": "psum_scatter",
    "psum_scatter": "all_gather",
    "pbroadcast": "sum_at_source",
    "sum_at_source": "pbroadcast",
}
# Of what is the same for all entries there are as many as entries.
_ALIKE: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "psum": lambda x, n: x * n,
    "pmax": lambda x, n: x.clone(),
    "pmin": lambda x, n: x.clone(),
    "pbroadcast": lambda x, n: x.clone(),
}


# --- names --------------------------------------------------------------------------------------------------------------


def runs(where: str, axis_name: Any) -> list[Run]:
    """The names in `axis_name`, neighbours of one kind together; empty where no `vmap` has one of them.

    Raises:
        CollectiveError: a name that is both of a `vmap` around the body and of an axis that is manual in the body.
        MeshError: a name that is neither, or that is given twice.
    """
    if not context.entry_names():
        return []
    several = isinstance(axis_name, Iterable) and not isinstance(axis_name, str) and not hasattr(axis_name, "dtype")
    names: tuple[Any, ...] = tuple(axis_name) if several else (axis_name,)
    found = [context.entries_named(name) if isinstance(name, str) else None for name in names]
    if not any(found):
        return []
    body = context.body()
    failures = [f"axis {name!r} is named twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    if body is None:
        failures += [
            f"{short(name)} is not one of {context.entry_names()}, and this is not inside a shard_map body"
            for name, one in zip(names, found)
            if one is None
        ]
    if failures:
        raise MeshError(
            report(
                where,
                f"axis_name={short(axis_name)} does not name axes",
                failures,
                "axes of the vmaps around, each once, and in a body axes that are manual there",
            )
        )
    for name, one in zip(names, found):
        if one is not None and body is not None and name in body.axes and not (one.body and name in one.body.axes):
            raise CollectiveError(
                report(
                    where,
                    f"axis_name={name!r} has two meanings here",
                    [
                        f"a vmap around the shard_map body has axis_name={name!r}",
                        f"{name!r} is manual in the body, on the {mesh_text(axes_of(body.mesh))}",
                    ],
                    "another axis_name for the vmap",
                )
            )
    out: list[Run] = []
    for name, one in zip(names, found):
        if one is not None:
            out.append(one)
        elif out and isinstance(out[-1], tuple):
            out[-1] = (*out[-1], str(name))
        else:
            out.append((str(name),))
    return out


# --- calls --------------------------------------------------------------------------------------------------------------


def index(over: context.Entries) -> torch.Tensor:
    """The number of the entry, a 0-d int32 tensor (a new one on each call)."""
    with torch_internals.no_torch_function():
        return over.index.clone()


def sent(
    where: str,
    x: Any,
    over: Any,
    row: str,
    *,
    problem: Problem | None = None,
    fix: str = "",
    **parameters: Any,
) -> Any:
    """Every leaf of `x` through a row, over the entries of one `vmap`. `problem`: as of `sending.send`."""
    body, op, n = context.body(), _Map(row, over, **parameters), over.size
    leaves, treedef = operands(where, x, body)
    reduces = where in ("psum", "pmean", "pmax", "pmin")
    with torch_internals.no_torch_function():
        if reduces:
            refuse_what_cannot_be_reduced(where, x, leaves, body, body.axes if body is not None else ())
        if row in ("pmax", "pmin") and not n:
            raise CollectiveError(report(where, f"the vmap of axis {over.name!r} has no entries"))
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) and not (reduces and not hasattr(leaf, "dtype")):
                leaves[i] = torch.as_tensor(leaf)
    leaves = [
        local(leaf, body, where) if body is not None and isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    ]
    refuse_misfits(
        where, x, leaves, problem, fix, f"the entries of the vmap of axis {over.name!r}", (str(over.name),), n
    )
    outs = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            outs.append(leaf * n if where == "psum" else leaf / 1 if where == "pmean" else leaf)
            continue
        have = tensor_types.type_in(leaf, body) if body is not None else None
        with torch_internals.no_torch_function():
            out = _over(op, leaf.to(torch.int32) if row == "psum" and leaf.dtype is torch.bool else leaf)
            out = out / n if where == "pmean" else out
            if have is not None:
                tensor_types.mark(out, have)
        outs.append(out)
    context.record(where, x, outs)
    return tree.unflatten(treedef, outs)
