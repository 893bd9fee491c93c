"""Parallelisms as a table: which named dims are split over which axes of the mesh.

A model names the dims of its parameters and of a few of its values ("batch", "heads", "hidden", ...). A parallelism is a
row of `TABLE`, and says which mesh axes split which of these dims; ``parallel("fsdp+tp")`` joins rows. No row knows a
model, and no model a row. README.md, beside this file, has a section for each.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch

import vescale_fn as vfn
from vescale_fn import P

from .command_line import AXES as AXES

DATA = ("dp", "cp", "ep")  # ranks along these see other tokens: what is kept in parts is split over all that are in use
METHODS = {  # how attention meets other ranks' keys
    "cp": "ring",
    "cp-zigzag": "ring",
    "cp-gather": "all_gather",
    "cp-ulysses": "all_to_all",
}
# Dims of values: "batch"; "length", the positions that attention sees; "norm_length", those where norms, dropout and
# sums work; "heads", "hidden", "vocab", "experts". "params", "grads" and "state" stand for the largest dim of each leaf
# of the parameters, of their gradients and of the optimiser's state.
TABLE: dict[str, dict[str, tuple[str, ...]]] = {
    "dp": {"batch": ("dp",)},
    "zero1": {"batch": ("dp",), "state": DATA},
    "zero2": {"batch": ("dp",), "state": DATA, "grads": DATA},
    "fsdp": {"batch": ("dp",), "state": DATA, "grads": DATA, "params": DATA},
    "hsdp": {"batch": ("replica", "dp"), "state": DATA, "grads": DATA, "params": DATA},
    "tp": {"heads": ("tp",), "hidden": ("tp",)},
    "sp": {"norm_length": ("tp",)},
    "vp": {"vocab": ("tp",)},
    **{name: {"length": ("cp",), "norm_length": ("cp",)} for name in METHODS},
    "ep": {"batch": ("ep",), "experts": ("ep",)},
}
TABLE["zero3"] = TABLE["fsdp"]
# No rows: in the backward pass each block is computed and gathered again, or its parameters alone are gathered again; or the
# ranks along an axis run stages of the program, which splits no dim.
WORDS = REMAT, RESHARD, STAGES = "remat", "reshard", "pp"
Rules = Sequence[tuple[str, P]]


class ParallelError(ValueError):
    """A text that names no parallelism, or one that does not fit the mesh."""


class Specs(NamedTuple):
    """Where the parameters of a model, their gradients, and the optimiser's state for them lie: trees of specs."""

    params: Any
    grads: Any
    state: Any

    def staged(self, loss: Callable[..., Any], params: Any, *batch: Any) -> Specs:
        """The same for a loss that may be a pipeline: then each leaf is at the coordinates whose stages use the parameter."""
        if not hasattr(loss, "specs"):
            return self
        stages = loss.specs(params, *batch, base=self.params)  # type: ignore[attr-defined]
        placed = lambda spec, stage: P(*spec, reduced=spec.reduced, at=stage.at)
        return Specs(*(optree.tree_map(placed, tree, stages) for tree in self))

    def init(self, optimizer: vfn.optim.Optimizer, params: Any) -> Any:
        """The state of an optimiser, each rank having its part of it."""
        return optimizer.init(vfn.with_sharding(params, self.state))

    def update(self, optimizer: vfn.optim.Optimizer, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """The next parameters and state. Each rank updates that part of the parameters whose state it has."""
        mine = vfn.with_sharding(params, self.state)
        updates, state = optimizer.update(vfn.with_sharding(grads, self.state), state, mine)
        return vfn.with_sharding(vfn.optim.apply_updates(mine, updates), self.params), state


@dataclass(frozen=True)
class Layout:
    """Which mesh axes split which named dims; what `parallel` returns. The empty one states nothing: one device.

    `remat`: whether blocks are computed again in the backward pass. `reshard`: whether their parameters are gathered again
    there, instead of kept. `stages`: whether the ranks along "pp" run stages. `method`: how attention meets other ranks' keys.
    `zigzag`: n, if positions are in the order ``vfn.nn.zigzag_order(length, n)``; -1, if the mesh has yet to say what n is.
    """

    dims: tuple[tuple[str, tuple[str, ...]], ...] = ()
    remat: bool = False
    reshard: bool = False
    stages: bool = False
    method: str = "ring"
    zigzag: int = 0

    def axes(self, name: str | None) -> tuple[str, ...]:
        """The axes that split a dim, major first."""
        return dict(self.dims).get(name or "", ())

    def spec(self, *names: str | None, without: str | None = None) -> P:
        """The spec of a value whose dims have these names. An axis splits the first of the dims that it could split.

        >>> layout = parallel("dp+ep")
        >>> layout.spec("batch", "length"), layout.spec("experts", "batch")
        (P(('dp', 'ep'), None), P('ep', 'dp'))
        """
        used, rows = set(self.axes(without)), []
        for name in names:
            rows.append(tuple(axis for axis in self.axes(name) if axis not in used))
            used.update(rows[-1])
        return P(*rows)

    def __call__(self, x: Any, *names: str | None, without: str | None = None) -> Any:
        """`x`, whose dims have these names, stated to lie accordingly; not split over the axes of the dim `without`."""
        return vfn.with_sharding(x, self.spec(*names, without=without)) if self.dims else x

    def gather(self, params: Any, rules: Rules) -> Any:
        """Parameters as a rank computes with them: split as `rules` name their dims, and not as they are merely kept."""
        if not self.axes("params"):
            return params
        paths = [".".join(map(str, path)) for path in optree.tree_paths(params)]
        of_these = [
            rule for rule in rules if any(re.search(rule[0], path) for path in paths)
        ]  # it may be a block's part
        return vfn.with_sharding(params, self._named(params, of_these))

    def block(self, f: Callable[..., Any], rules: Rules) -> Callable[..., Any]:
        """A block of a model, whose parameters, its first argument, are gathered where it is run, and given up after it. A plan
        records equal ones once."""
        run = lambda params, *args: f(vfn.name(self.gather(params, rules), "gathered"), *args)
        policy = None if self.remat else vfn.remat_policies.save_anything_except_these_names("gathered")
        return vfn.plan.shared(vfn.remat(run, policy=policy) if self.remat or self.reshard else run)

    def pipelined(self, loss: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        """`loss`, a function of parameters and batch, as a pipeline along "pp", if the layout has one; `how`: as for
        `vfn.pipeline`; "interleaved" has by default two stages a rank."""
        if how.get("schedule") == "interleaved" and how.get("chunks") is None:
            how["chunks"] = 2
        return vfn.pipeline(loss, "pp", **how) if self.stages else loss

    def attention(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """`f`, `vfn.nn.attention` or what hands its options on to it, in the way in which ranks share a sequence."""
        return functools.partial(f, method=self.method, zigzag=self.zigzag) if self.axes("length") else f

    def ordered(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """`x`, whose dim `dim` goes through the positions, in the order in which ranks share these."""
        if self.zigzag < 0:
            raise ParallelError("the order of cp-zigzag depends on the number of ranks: write parallel(text, mesh)")
        order = vfn.nn.zigzag_order(x.shape[dim], self.zigzag) if self.zigzag else None
        return x if order is None else x.index_select(dim, order.to(x.device))

    def specs(self, params: Any, rules: Rules, mesh: Any) -> Specs:
        """Where everything lies: `rules` are as for `vfn.spec_from_rules`, with names of dims in the place of axes.

        `mesh` is a DeviceMesh, or a mapping from axis names to sizes.
        """
        base = self._named(params, rules)

        def kept(kind: str) -> Any:
            """Leaf by leaf over the axes that do not split it yet: experts lie along "ep" as it is."""
            free = lambda spec: [axis for axis in self.axes(kind) if axis not in _axes_in(spec)]
            return optree.tree_map(lambda x, spec: vfn.fsdp_specs(x, mesh, free(spec), spec), params, base)

        specs = Specs(*map(kept, Specs._fields))
        left = lambda spec, state: P(*spec, reduced=_axes_in(state) - _axes_in(spec))
        return specs._replace(params=optree.tree_map(left, specs.params, specs.state))

    def _named(self, params: Any, rules: Rules) -> Any:
        return vfn.spec_from_rules(params, [(pattern, self.spec(*names)) for pattern, names in rules])


ONE_DEVICE = Layout()


def _axes_in(spec: P) -> set[str]:
    return {axis for row in spec for axis in ((row,) if isinstance(row, str) else row or ())}


def parallel(text: str, mesh: Any = None) -> Layout:
    """The layout that a text like ``"fsdp+tp+remat"`` names: rows of `TABLE`, in the order of their axes' nesting.

    Args:
        text: names of rows joined by ``+``, and ``pp``, ``remat`` or ``reshard``.
        mesh: if given, it must have the axes of these rows, and no others but of size 1.

    Raises:
        ParallelError: an unknown name, a row named twice, two rows that keep the same in two ways, or another mesh.

    >>> parallel("zero2+tp").spec("batch", None, "heads")
    P('dp', None, 'tp')
    """
    names = text.split("+")
    unknown = [name for name in names if name not in (*TABLE, *WORDS)]
    methods = [name for name in names if name in METHODS]
    if unknown or len(set(names)) < len(names):
        wrong = f"{', '.join(map(repr, unknown))} is none of them" if unknown else "a name stands there twice"
        known = ", ".join([*TABLE, *WORDS])
        raise ParallelError(f"{text!r}: {wrong}; write names from {known}, joined by +: fsdp+tp+remat")
    if len(methods) > 1:
        raise ParallelError(f"{text!r}: {' and '.join(methods)} share one sequence in two ways; leave one of them")
    dims: dict[str, tuple[str, ...]] = {}
    for name in names:
        for dim, axes in TABLE.get(name, {}).items():
            dims[dim] = (*dims.get(dim, ()), *(axis for axis in axes if axis not in dims.get(dim, ())))
    idle = {*DATA}.difference(dims.get("batch", ()), dims.get("length", ()))
    dims = {dim: tuple(axis for axis in axes if axis not in idle) for dim, axes in dims.items()}
    if RESHARD in names and not dims.get("params"):
        raise ParallelError(f"{text!r}: reshard gathers parameters again, but none is kept in parts: add fsdp or hsdp")
    if mesh is not None:
        _check(text, {axis for axes in dims.values() for axis in axes} | {STAGES}.intersection(names), _sizes(mesh))
    zigzag = 0 if "cp-zigzag" not in names else -1 if mesh is None else _sizes(mesh)["cp"]
    method = METHODS[methods[0]] if methods else "ring"
    return Layout(tuple(dims.items()), REMAT in names, RESHARD in names, STAGES in names, method, zigzag)


def _sizes(mesh: Any) -> dict[str, int]:
    return dict(mesh) if isinstance(mesh, Mapping) else dict(zip(mesh.mesh_dim_names, mesh.shape))


def _check(text: str, used: set[str], sizes: dict[str, int]) -> None:
    there = ", ".join(f"{name}={size}" for name, size in sizes.items())
    missing = sorted(used - set(sizes))
    idle = [name for name, size in sizes.items() if size > 1 and name not in used]
    if missing:
        needs = ", ".join(sorted(used))
        raise ParallelError(f"{text!r} needs the axes {needs}, but the mesh is {there}: add {missing[0]}=2, say")
    if idle:
        left = ", ".join(idle)
        raise ParallelError(f"the mesh is {there}, but {text!r} leaves {left} idle: set it to 1, or name what uses it")
