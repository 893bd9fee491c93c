"""`price`: what a step would cost in a layout: its time by part, its traffic, its memory, before anything is started."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from .._core import torch_internals
from .._core.base import context
from .._core.base.front_door import public
from .._core.base.user_calls import checked_function
from .._core.distributed.collectives import Collective, Start
from .._core.sharding.index_map import axes_of
from ..debugging.needless_moves import needless
from ..hardware import Hardware
from ..plan.ir.collective_nodes import in_order_of_ranks, size
from ..plan.ir.graph import Pass
from ..plan.ir.memory_use import ARGUMENTS, alive_at
from ..plan.ir.nested import all_collectives, bodies_of
from ..plan.jit import Jitted, jit
from ..plan.lowered import Lowered
from ..plan.passes.overlap import overlap
from ..plan.passes.prefetch import prefetch
from ..plan.passes.under_way import under_way
from .price_arguments import equipped, laid_out, meshed
from .price_report import LinePrice, Price, Traffic
from .price_streams import PassingTime
from .repeated import repeated

_INSTEAD = "torch.where for `if`, tensors for numbers; what cannot be recorded, outside of the step"


@torch_internals.not_compiled
@public("price")
def price(
    step: Callable[..., Any],
    *args: Any,
    specs: Any = None,
    mesh: Any = None,
    hardware: Hardware | str | None = None,
    donate_argnums: int | Sequence[int] = (),
) -> Price:
    """What a step would cost in a layout: seconds of computing and of waiting, bytes by axis, the most memory, by line.

    The step is recorded once, for shapes on a mesh without ranks (`abstract_mesh`), and improved by all passes, as `jit` does
    on each rank; nothing is allocated, and no other process is needed, for any number of ranks. The plan's collectives, their
    bytes and its peak are what a run has; seconds are predicted: of its calls in order, beside which collectives travel as
    the plan begins them and waits for them.

    Args:
        step: the function, or what `jit` has made of it.
        args: its arguments: arrays, tensors, or their shapes (`eval_shape`, `init` with ``abstract=True``), and what else it
            takes. Of tensors only shape and dtype count.
        specs: how they lie: a `P` for all; or a tuple with one, or a prefix tree, or rules as of `spec_from_rules`, for each
            argument, None for what stays as it is: an array's own layout, a tensor whole on every rank.
        mesh: the sizes of the axes, ``{"dp": 8, "tp": 8}``, or a mesh of any kind. By default that of the arguments, or
            the current one.
        hardware: as of `vfn.hardware`; or "h100", "a100", "b200", "cpu", with nodes of 8 for all ranks. By default H100s, or
            for a mesh of processes on CPUs "cpu".
        donate_argnums: as for `jit`, where `step` is none of it.

    Returns:
        A `Price`. Printing it shows a table; ``price.compare(other_specs)`` shows the same step in other layouts beside it.

    Raises:
        SpecError: specs that do not fit. MeshError: no mesh. HardwareError: a mesh of more ranks than the hardware has.
        TransformError: the step cannot be recorded.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> def step(w, x):
    ...     return w - 0.1 * vfn.grad(lambda w: (x @ w).relu().square().mean())(w)
    >>> w, x = vfn.ShapeDtype((8192, 8192), torch.bfloat16), vfn.ShapeDtype((65536, 8192), torch.bfloat16)
    >>> price = vfn.price(step, w, x, specs=(P(), P("dp")), mesh={"dp": 64})
    >>> price.bytes, price.calls, price.peak
    ({'dp': 134217728}, {'dp': 1}, 419430400)
    """
    checked_function(step, "price")
    on, device = meshed(mesh, args)
    found = equipped(hardware, on, device)
    jitted = step if isinstance(step, Jitted) else jit(step, donate_argnums=donate_argnums)
    given = laid_out(args, jitted.in_specs if specs is None else specs, on)
    planned = jitted.improved_by(functools.partial(_as_on, found.device))
    with context.use_mesh(on), context.setting(devices=found.device):
        lowered = planned.lowered(planned.call_of(given), "price", _INSTEAD)

    def again(specs: Any, mesh: Any, hardware: Any) -> Price:
        same = hardware is None and mesh is None
        how = {"mesh": on if mesh is None else mesh, "hardware": found if same else hardware}
        return price(step, *args, specs=specs, donate_argnums=donate_argnums, **how)

    return priced(lowered, found, axes_of(on), again)


def _as_on(device: str, passes: Sequence[Pass]) -> list[Pass]:
    """The passes as on devices of this kind: they ask the mesh, which is of CPUs wherever there are no GPUs."""
    beside = lambda one: device != "cpu" and getattr(one, "func", one) in (overlap, prefetch, under_way)
    computing: Any = functools.partial
    return [computing(one, on_cpu=True) if beside(one) else one for one in passes]


def priced(
    lowered: Lowered, hardware: Hardware, mesh: Mapping[str, int], again: Callable[..., Price] | None = None
) -> Price:
    """What a plan costs.

    Args:
        lowered: the plan of one rank, as on a mesh without ranks.
        hardware: that it runs on.
        mesh: the sizes of all axes.
        again: prices the same step in another layout.
    """
    streams = PassingTime(hardware, mesh)
    streams.run(lowered.graph)
    comms, memory = lowered.comms(), lowered.memory()
    held = {one.line: one.bytes for one in memory.held}
    lines = [
        LinePrice(line, times.calls, times.compute, times.exposed, times.communication, held.pop(line, 0))
        for line, times in streams.lines.items()
    ]
    lines += [LinePrice(line, 0, 0.0, 0.0, 0.0, bytes_) for line, bytes_ in held.items() if line != ARGUMENTS]
    return Price(
        lowered.name,
        dict(mesh),
        hardware,
        sum(times.compute for times in streams.lines.values()),
        sum(times.exposed for times in streams.lines.values()),
        0.0,
        tuple(sorted(lines, key=lambda one: -one.seconds)),
        traffic(lowered, hardware, mesh),
        comms,
        memory,
        max(memory.peak, _by_gloo(lowered.graph) if hardware.device == "cpu" else 0),
        needless(comms),
        again,
        repeated(lowered.graph, hardware),
    )


def _by_gloo(graph: fx.Graph) -> int:
    """The most bytes that are alive where gloo carries out the collectives: see `in_order_of_ranks`."""
    most = 0
    for node, alive in alive_at(graph).items():
        for body in bodies_of(node):
            most = max(most, alive + _by_gloo(body) - max(alive_at(body).values(), default=0))
        if isinstance(node.target, Collective) and not isinstance(node.target, Start):
            most = max(most, alive + in_order_of_ranks(node, by_gloo=True) - in_order_of_ranks(node))
    return most


def traffic(lowered: Lowered, hardware: Hardware, mesh: Mapping[str, int]) -> tuple[Traffic, ...]:
    """What goes over each of the axes, by kind, the most bytes first."""
    found: dict[tuple[str, str], list[float]] = {}
    log = iter(lowered.comms())
    for node, times, _ in all_collectives(lowered.graph):
        target: Any = node.target
        sizes = mesh if set(target.axes) <= set(mesh) else axes_of(target.mesh)
        once = hardware.collective(target.kind, size(node), sizes, target.axes)
        row = found.setdefault((",".join(target.axes), target.kind), [0, 0, 0.0])
        for _ in range(times):
            record = next(log)
            row[0] += 1
            row[1] += record.bytes
            row[2] += once
    rows = [Traffic(axis, op, int(calls), int(bytes_), time) for (axis, op), (calls, bytes_, time) in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.axis, row.op)))
