"""What the ranks of a mesh do in a second, measured: all of them compute and send at the same time, as in a step."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._core.base import context
from .._core.base.errors import HardwareError, MeshError
from .._core.base.messages import report, short
from .._core.distributed import collectives
from .._core.distributed.abstract_mesh import AbstractMesh
from .._core.distributed.collectives import Collective
from .._core.distributed.mesh import communicator_of
from .._core.sharding.index_map import axes_of
from .hardware import Hardware
from .links import Link, Protocol, steps_and_bytes

_SIZES = 1 << 12, 1 << 17, 1 << 21  # bytes that a rank gives to a collective
_PARAMS = {"all_reduce": ("sum",), "all_gather": (0,), "reduce_scatter": (0,), "all_to_all": (0, 0)}
_WIDE, _LONG = 256, 1 << 18  # of a product, and of a value that is read and written
_ROUNDS = 5  # in which everything is timed once: of these the median counts
_MEMORY = 4 << 30


class _Timed(NamedTuple):
    """A collective that was timed: how many ranks, bytes that each gives, seconds."""

    count: int
    nbytes: int
    seconds: float


def measure(mesh: Any, seconds: float = 5.0) -> Hardware:
    """What the ranks of this mesh do in a second. All of them take part; all of them get the same.

    Args:
        mesh: of processes, or of simulated ranks. Its collectives are timed over each axis, and over all.
        seconds: about how long it may take.

    Returns:
        A `Hardware`: products, reading and writing, the least that a call takes, and by kind of collective the least that it
        takes, what each step adds, and bytes a second.

    Raises:
        MeshError: a mesh without ranks. HardwareError: no time.

    >>> import vescale_fn as vfn
    >>> with vfn.simulate(2):
    ...     mine = vfn.hardware.measure(vfn.make_mesh((2,), ("dp",)), seconds=0.05)
    >>> mine.ranks, sorted(mine.links[0].kinds)
    (2, ['all_gather', 'all_reduce', 'all_to_all', 'reduce_scatter'])
    """
    context.checked_mesh(mesh, "hardware.measure")
    if isinstance(mesh, AbstractMesh):
        raise MeshError(
            report("hardware.measure", "no rank of an abstract mesh is there", fix="vfn.make_mesh, or a preset")
        )
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise HardwareError(report("hardware.measure", f"seconds={short(seconds)} is no time"))
    sizes, device = axes_of(mesh), torch.device(mesh.device_type)
    groups = [(axis,) for axis, size in sizes.items() if size > 1]
    groups += [tuple(axis for axis, size in sizes.items() if size > 1)] * (len(groups) > 1)
    local = _local(device)
    sent = {
        (kind, axes, size): _sending(kind, mesh, axes, size, device, None if _simulated(mesh) else local["product"])
        for kind, axes, size in itertools.product(_PARAMS, groups, _SIZES)
    }
    with context.unlogged():
        found = _medians({**local, **sent}, mesh, seconds)
    before = 0.0 if _simulated(mesh) else found["product"]
    waited = {name: max(x - before, 1e-6) if name in sent else x for name, x in found.items()}
    return _described(waited, mesh, groups, device)


def _local(device: torch.device) -> dict[Any, Callable[[], Any]]:
    """What a rank does by itself: products, a call that reads and writes, a function, the smallest call, a view. Memory is
    written in place, as a plan mostly does: new memory comes from the system page by page."""
    a, b = (torch.ones(_WIDE, _WIDE, device=device) for _ in range(2))
    wide = a.double(), b.double()
    long, other, small = (torch.ones(size, device=device) for size in (_LONG, _LONG, 8))
    return {
        "product": lambda: torch.mm(a, b),
        "float64": lambda: torch.mm(*wide),
        "moved": lambda: long.mul_(other),
        "function": lambda: torch.nn.functional.gelu(long),
        "call": lambda: torch.add(small, small),
        "view": lambda: small.view(2, 4),
    }


def _sending(
    kind: str, mesh: Any, axes: tuple[str, ...], nbytes: int, device: torch.device, first: Callable[[], Any] | None
) -> Callable[[], Any]:
    """A collective of blocks of so many bytes, as a plan carries it out: after something that ranks compute, some earlier than
    others, for which they wait, the more so where processes share a core."""
    one = Collective(kind, mesh, axes, _PARAMS[kind], "measure")
    count = collectives.group_size(mesh, axes)
    block = torch.ones(math.ceil(nbytes / 4 / count) * count, device=device)
    played = communicator_of(mesh).ranks
    given = block if len(played) == 1 and not _simulated(mesh) else [block] * len(played)

    def call() -> Any:
        if first is not None:
            first()
        return one(given)

    return call


def _simulated(mesh: Any) -> bool:
    return communicator_of(mesh).holds_blocks


def _medians(calls: Mapping[Any, Callable[[], Any]], mesh: Any, seconds: float) -> dict[Any, float]:
    """The seconds of one call of each, on the average of ranks: the median of some rounds, in each of which all take turns. How
    often each is called in a round follows from its first calls, of which all ranks take the same."""
    names = list(calls)
    for name in names:  # what is made at a first call
        calls[name]()
    first = _of_all_ranks([_timed(calls[name], 2) for name in names], mesh)
    share = seconds / _ROUNDS / len(names)
    often = [min(1000, max(1, int(share / max(once, 1e-7)))) for once in first]
    rounds = [[_timed(calls[name], n) for name, n in zip(names, often)] for _ in range(_ROUNDS)]
    middle = [sorted(times)[_ROUNDS // 2] for times in zip(*rounds)]
    return dict(zip(names, _of_all_ranks(middle, mesh)))


def _timed(call: Callable[[], Any], often: int) -> float:
    begin = time.perf_counter()
    for _ in range(often):
        out = call()
    if torch.cuda.is_available() and any(x.is_cuda for x in _tensors(out)):
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / often


def _tensors(out: Any) -> Sequence[torch.Tensor]:
    return out if isinstance(out, (list, tuple)) else [out]


def _of_all_ranks(times: Sequence[float], mesh: Any) -> list[float]:
    """The means over all ranks, the same everywhere: in whole nanoseconds, which no order of summing changes."""
    if _simulated(mesh):
        return list(times)
    row = torch.tensor([round(x * 1e9) for x in times], device=mesh.device_type)
    communicator = communicator_of(mesh)
    row = communicator.carry_out(collectives.TABLE["all_reduce"], row, tuple(axes_of(mesh)), ("sum",))
    count = math.prod(axes_of(mesh).values())
    return [x / count * 1e-9 for x in row.tolist()]


def _described(
    found: Mapping[Any, float], mesh: Any, groups: Sequence[tuple[str, ...]], device: torch.device
) -> Hardware:
    work = lambda name: max(found[name] - found["call"], 0.2 * found[name])
    rate, double = (2 * _WIDE**3 / work(name) for name in ("product", "float64"))
    function = _LONG / work("function")
    moved, ranks, gpu = 12 * _LONG / work("moved"), math.prod(axes_of(mesh).values()), device.type == "cuda"
    sizes = {axes: collectives.group_size(mesh, axes) for axes in groups}
    timed = {
        kind: [_Timed(sizes[axes], nbytes, found[kind, axes, nbytes]) for axes in groups for nbytes in _SIZES]
        for kind in _PARAMS
        if groups
    }
    kinds = {kind: (_fitted(kind, rows),) for kind, rows in timed.items()}
    return Hardware(
        f"{ranks} ranks on {device.type}, measured",
        {"float32": rate, "float64": double},
        bytes=moved,
        launch=found["call"],
        memory=torch.cuda.get_device_properties(device).total_memory if gpu else _MEMORY,
        links=(Link(ranks, kinds.get("all_gather", (Protocol(found["call"], 0.0, moved),)), kinds),),
        host=moved,
        draws=4 * function,
        functions=function,
        tile=128 if gpu else 1,
        view=0.0 if gpu else found["view"],
        device=device.type,
    )


def _fitted(kind: str, timed: Sequence[_Timed]) -> Protocol:
    """The protocol whose times are nearest, in proportion, by least squares; nothing in it is below 0."""
    rows: list[Any] = [(1.0, *steps_and_bytes(kind, one.nbytes, one.count)) for one in timed]
    rows = [[x / one.seconds for x in row] for row, one in zip(rows, timed)]
    best: tuple[float, list[float]] | None = None
    for used in ((0, 1, 2), (1, 2), (0, 2), (2,)):
        found = _least_squares([[row[i] for i in used] for row in rows])
        if found is None or min(found) < 0 or found[-1] <= 0:
            continue
        factors = [dict(zip(used, found)).get(i, 0.0) for i in range(3)]
        off = sum((sum(x * y for x, y in zip(row, factors)) - 1) ** 2 for row in rows)
        if best is None or off < best[0]:
            best = off, factors
    assert best is not None, "times above 0 have a rate above 0"
    start, step, each = best[1]
    return Protocol(start, step, 1 / each)


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Of which factors the rows' sums are nearest to 1; None where they do not say."""
    n = len(rows[0])
    scale = [max(max(row[i] for row in rows), 1e-30) for i in range(n)]
    rows = [[x / s for x, s in zip(row, scale)] for row in rows]
    m = [[sum(row[i] * row[j] for row in rows) for j in range(n)] + [sum(row[i] for row in rows)] for i in range(n)]
    for i in range(n):
        best = max(range(i, n), key=lambda r: abs(m[r][i]))
        m[i], m[best] = m[best], m[i]
        if abs(m[i][i]) < 1e-9:
            return None
        for r in range(n):
            if r != i:
                factor = m[r][i] / m[i][i]
                m[r] = [x - factor * y for x, y in zip(m[r], m[i])]
    return [m[i][n] / m[i][i] / scale[i] for i in range(n)]
