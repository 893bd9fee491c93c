"""Rows of `parallel.py` as layouts to choose from: what `others` of `vfn.auto` takes, for a model of named dims.

    make = lambda layout, specs: training(model, models.laid_out(config, layout), optimizer, specs)
    step, args = make(ONE_DEVICE, None), (params, state, batch)  # shapes
    given = rows(make, args, model.NAMES, optimizer, meshes(64, nodes=8), texts("llama"))
    choice = vfn.auto(step, *args, mesh=vfn.mesh_shapes(64, nodes=8), others=given, donate_argnums=(0, 1))

Each row is a step of its own, which states its layout as it runs (`with_sharding`), with the specs of its arguments and its
mesh. So the answer is never worse than the best of these that fits, by the same prices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

import vescale_fn as vfn
from vescale_fn import P

from .command_line import AXES
from .models import suits
from .parallel import METHODS, REMAT, RESHARD, Layout, ParallelError, Rules, Specs, parallel

Step = Callable[..., Any]
Row = tuple[Step, tuple[Any, ...], dict[str, int]]
KEPT = ("dp", "zero1", "zero2", "fsdp", "hsdp")  # where parameters, gradients and state are kept
WITH_TP = ("tp", "tp+sp", "tp+vp", "tp+sp+vp")


def training(
    model: ModuleType, config: Any, optimizer: vfn.optim.Optimizer, specs: Specs | None = None, precision: Any = None
) -> Step:
    """A step ``(params, state, batch, *keys) -> (params, state, loss)`` of a model of the recipes, in its config's layout."""

    def loss_of(params: Any, batch: Any, *keys: Any) -> torch.Tensor:
        return model.loss(params, batch, config, *keys)

    loss_of = loss_of if precision is None else precision.apply(loss_of)
    if specs is None:
        return vfn.optim.train_step(loss_of, optimizer)

    def step(params: Any, state: Any, batch: Any, *keys: Any) -> Any:
        loss, grads = vfn.value_and_grad(loss_of)(params, batch, *keys)
        return *specs.update(optimizer, grads, state, params), loss

    return step


def meshes(ranks: int, nodes: int = 1) -> list[dict[str, int]]:
    """Meshes that experts would try: data parallel alone, and beside replicas, tensor, context or expert parallelism, these
    within a node.

    >>> meshes(16, nodes=2)[:4]
    [{'dp': 16}, {'replica': 2, 'dp': 8}, {'dp': 8, 'tp': 2}, {'dp': 4, 'tp': 4}]
    >>> meshes(4)
    [{'dp': 4}, {'dp': 2, 'tp': 2}, {'dp': 2, 'cp': 2}, {'dp': 2, 'ep': 2}]
    """
    node = ranks // nodes
    inner = [n for n in (2, 4, 8) if node % n == 0]
    found = [{"dp": ranks}, *[{"replica": nodes, "dp": node}] * (nodes > 1)]
    found += [{"dp": ranks // n, "tp": n} for n in inner]
    found += [{"dp": ranks // n, axis: n} for axis in ("cp", "ep") for n in [n for n in inner if n < ranks][-1:]]
    return [mesh for mesh in found if min(mesh.values()) > 1]


def texts(name: str) -> list[str]:
    """The rows, and rows joined, that a model has dims for.

    >>> texts("resnet")[:6]
    ['dp', 'dp+remat', 'dp+tp', 'dp+tp+remat', 'zero1', 'zero1+remat']
    """
    beside = ("", *WITH_TP, *METHODS, "ep")
    found = ["+".join(filter(None, parts)) for parts in itertools.product(KEPT, beside, ("", REMAT, RESHARD))]
    return [text for text in found if suits(name, text) and (RESHARD not in text or "fsdp" in text or "hsdp" in text)]


def rows(
    make: Callable[[Layout, Specs], Step],
    args: tuple[Any, ...],
    names: Rules,
    optimizer: vfn.optim.Optimizer,
    meshes: Iterable[Mapping[str, int]],
    texts: Sequence[str],
) -> dict[str, Row]:
    """By name the step, the specs and the mesh of each row on each mesh that has its axes.

    Args:
        make: the step in a layout, which is to lie as the specs say.
        args: its arguments as shapes: parameters, the optimiser's state, a batch, and what else it takes, which is whole.
        names: of the parameters' dims.
        optimizer: whose state it is.
        meshes: axes with their sizes.
        texts: as for `parallel`.
    """
    found: dict[str, Row] = {}
    for sizes in meshes:
        axes = {axis: sizes[axis] for axis in AXES if axis in sizes}
        mesh = vfn.abstract_mesh(tuple(axes.values()), tuple(axes))
        for text in texts:
            try:
                layout = parallel(text, mesh)
            except ParallelError:  # of other axes
                continue
            specs = layout.specs(args[0], names, mesh)
            with vfn.use_mesh(mesh):
                state = specs.init(optimizer, vfn.shard(args[0], mesh, specs.params))
            lie = vfn.tree.map(lambda x: vfn.spec_of(x) if isinstance(x, vfn.Array) else P(), state)
            where = ", ".join(f"{axis}={size}" for axis, size in axes.items())
            of_args = (specs.params, lie, layout.spec("batch"), *[P()] * (len(args) - 3))
            found[f"{text} on {where}"] = make(layout, specs), of_args, axes
    return found
