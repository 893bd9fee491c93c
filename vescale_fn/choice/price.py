"""`price`: predicts the time, traffic and memory of a step in a layout, before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._core import torch_internals
from .._core.base import context
from .._core.base.errors import TransformError
from .._core.base.front_door import public
from .._core.base.messages import report
from .._core.base.user_calls import checked_function
from .._core.sharding.index_map import axes_of
from ..debugging.needless_moves import needless
from ..hardware import Hardware
from ..plan.jit import Jitted, jit
from ..plan.lowered import Lowered
from ..plan.pipeline import beside_computing
from .by_name import Placed, placed
from .price_arguments import equipped, laid_out, meshed
from .price_places import priced_by_place
from .price_report import Price, lines_of, traffic_of
from .price_stages import costed
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
    **kwargs: Any,
) -> Price:
    """The predicted cost of a step in a layout: compute time, exposed communication, bytes by axis, peak memory, all by line.

    The step is traced once, for shapes on an abstract mesh (`abstract_mesh`), and optimised by all passes, as `jit` does it
    on each rank; nothing is allocated, and no other process is needed, for any number of ranks. The plan's collectives, their
    bytes and its peak memory are those of a run. Seconds are predicted: calls run in order, and collectives overlap with them
    from where the plan starts them to where it waits for them.

    Args:
        step: the function, or what `jit` has made of it.
        args: its arguments: arrays, tensors, or their shapes (`eval_shape`, `init` with ``abstract=True``), and whatever else
            it takes. Of tensors, only shape and dtype count.
        kwargs: arguments by name, ``batch=batch``. In `specs` and `donate_argnums` each has its position in the step's
            signature, or comes after all others where the step takes it by name alone.
        specs: the layout of the arguments: a `P` for all; or a tuple with a `P`, a prefix tree, or rules as for
            `spec_from_rules`, for each argument, None for one that keeps its layout: an array its own, a tensor replicated.
        mesh: the sizes of the axes, ``{"dp": 8, "tp": 8}``, or a mesh of any kind. By default, the mesh of the arguments, or
            the current one.
        hardware: from `vfn.hardware`; or "h100", "a100", "b200", "cpu", with nodes of 8 for all ranks. By default H100s, or
            "cpu" for a mesh of processes on CPUs.
        donate_argnums: as for `jit`, where `step` is not jitted yet.

    Returns:
        A `Price`. Printing it shows a table; ``price.compare(other_specs)`` shows the same step in other layouts beside it.

    Raises:
        SpecError: specs that do not fit. MeshError: no mesh. HardwareError: a mesh of more ranks than the hardware has.
        TransformError: the step cannot be traced.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> def step(w, x):
    ...     return w - 0.1 * vfn.grad(lambda w: (x @ w).relu().square().mean())(w)
    >>> w, x = vfn.ShapeDtype((8192, 8192), torch.bfloat16), vfn.ShapeDtype((65536, 8192), torch.bfloat16)
    >>> price = vfn.price(step, w, x, specs=(P(), P("dp")), mesh={"dp": 64})
    >>> price.bytes, price.calls, price.peak
    ({'dp': 134217728}, {'dp': 1}, 301989888)
    """
    checked_function(step, "price")
    step, args, _ = _placed(step, args, kwargs)
    on, device = meshed(mesh, args)
    found = equipped(hardware, on, device)
    jitted = step if isinstance(step, Jitted) else jit(step, donate_argnums=donate_argnums)
    given = laid_out(args, jitted.in_specs if specs is None else specs, on)
    planned = jitted.improved_by(beside_computing) if found.device == "cuda" else jitted.improved_by(list)
    with context.use_mesh(on), context.setting(devices=found.device):
        lowered = planned.lowered(planned.call_of(given), "price", _INSTEAD)

    def again(specs: Any, mesh: Any, hardware: Any) -> Price:
        same = hardware is None and mesh is None
        how = {"mesh": on if mesh is None else mesh, "hardware": found if same else hardware}
        return price(step, *args, specs=specs, donate_argnums=donate_argnums, **how)

    with context.setting(devices=found.device):
        return priced(lowered, found, axes_of(on), again)


_OPTIONS = tuple(name for name, p in inspect.signature(price).parameters.items() if p.kind is p.KEYWORD_ONLY)


def _placed(step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Placed:
    """The step and its arguments, all of them by position."""
    at = placed(step, args, kwargs, "price", _OPTIONS)
    if isinstance(step, Jitted) and at.step is not step:
        what = f"{', '.join(at.words)}: what jit has made takes these by name alone, so that no spec has their place"
        raise TransformError(report("price", what, fix="the function itself, and donate_argnums="))
    return at


def priced(
    lowered: Lowered, hardware: Hardware, mesh: Mapping[str, int], again: Callable[..., Price] | None = None
) -> Price:
    """The price of a plan.

    Args:
        lowered: the plan of one rank, as on an abstract mesh.
        hardware: that it runs on.
        mesh: the sizes of all axes.
        again: prices the same step in another layout.
    """
    plan = None if lowered.origin is None else lowered.origin.plan
    if plan is not None and plan.at_places:
        return priced_by_place(lowered, plan, hardware, mesh, again)
    streams = PassingTime(hardware, mesh)
    streams.run(lowered.graph)
    comms, memory = lowered.comms(), lowered.memory()
    return Price(
        lowered.name,
        dict(mesh),
        hardware,
        sum(times.compute for times in streams.lines.values()),
        sum(times.exposed for times in streams.lines.values()),
        0.0,
        lines_of(streams.lines, memory),
        traffic_of(costed(lowered, hardware, mesh)),
        comms,
        memory,
        memory.peak,
        needless(comms),
        again,
        repeated({lowered.graph: 1}, hardware),
        exposed_by_axis=dict(streams.waits),
        events=tuple(streams.events),
    )
