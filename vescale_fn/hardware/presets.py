"""Hardware that many have. Figures are what programs reach, not what data sheets promise.

Products: about 70 % of the dense peak, what large ones reach with cuBLAS. Memory: about 75 to 80 % of the peak.

Links inside a node: an H100 sends 450 GB/s by NVLink, of which rings of NCCL reach 370 (NVIDIA/nccl-tests#212; the 480 that
all-reduce shows with NVLink SHARP count as sent what switches add); A100s 230 to 240 (NVIDIA/nccl#1712); of B200s NCCL's model
takes 720 (NVIDIA/nccl#1807). Between nodes: a NIC of 400 Gb/s for each device gives 46 to 48 GB/s (NVIDIA/nccl-tests#290), one
of 200 Gb/s 24 GB/s (NVIDIA/nccl-tests#252). Latencies are round numbers near those of NCCL's own model
(`src/graph/tuning.cc`): of the quick protocol that sends at most about 40 % of the bandwidth (LL128 there), and of the one for
many bytes (Simple).

Those kinds of collectives of which nccl-tests' tables are published have ways of their own, fitted to these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .._core.base.errors import HardwareError
from .._core.base.messages import report, short
from .hardware import Hardware
from .links import Link, Protocol

GiB = 2**30
_NODE = 8  # devices


def h100(nodes: int = 1) -> Hardware:
    """Nodes of 8 H100 SXM of 80 GB with NVLink 4, and a NIC of 400 Gb/s for each.

    >>> import vescale_fn as vfn
    >>> vfn.hardware.h100(nodes=4).ranks
    32
    """
    flops = {"bfloat16": 7e14, "float16": 7e14, "float32": 5e13, "float64": 5e13, "float8_e4m3fn": 1.4e15}
    links = _links("h100", nodes, 3.7e11, 4.7e10, _H100)
    name = _name(nodes, "H100")
    return Hardware(name, flops, bytes=2.5e12, launch=5e-6, memory=79 * GiB, links=links, units=132)


def a100(nodes: int = 1) -> Hardware:
    """Nodes of 8 A100 SXM of 80 GB with NVLink 3, and a NIC of 200 Gb/s for each.

    >>> import vescale_fn as vfn
    >>> vfn.hardware.a100().rate("bfloat16") < vfn.hardware.h100().rate("bfloat16")
    True
    """
    flops = {"bfloat16": 2.3e14, "float16": 2.3e14, "float32": 1.7e13, "float64": 1.6e13}
    links = _links("a100", nodes, 2.3e11, 2.4e10, _A100)
    name = _name(nodes, "A100")
    return Hardware(
        name, flops, bytes=1.6e12, launch=5e-6, memory=79 * GiB, links=links, host=2.2e10, draws=3e11, units=108
    )


def b200(nodes: int = 1) -> Hardware:
    """Nodes of 8 B200 with NVLink 5, and a NIC of 400 Gb/s for each.

    >>> import vescale_fn as vfn
    >>> vfn.hardware.b200().memory > 2 * vfn.hardware.h100().memory
    True
    """
    flops = {"bfloat16": 1.6e15, "float16": 1.6e15, "float32": 6e13, "float64": 3e13, "float8_e4m3fn": 3.2e15}
    links = _links("b200", nodes, 7e11, 4.7e10, _B200)
    name = _name(nodes, "B200")
    return Hardware(
        name, flops, bytes=6e12, launch=5e-6, memory=178 * GiB, links=links, host=5e10, draws=1e12, units=148
    )


def cpu(processes: int = 1) -> Hardware:
    """Processes on one machine, each with one core of a server's processor, that talk by gloo.

    Machines differ more than GPUs do: `measure` finds what this one does.

    >>> import torch, vescale_fn as vfn
    >>> vfn.hardware.cpu(4).compute(1e9, torch.float32, 0)
    0.020002
    """
    _checked("cpu", "processes", processes)
    flops = {"float32": 5e10, "float64": 2.5e10, "bfloat16": 2.5e10, "float16": 2.5e10}
    links = (Link(processes, (Protocol(1e-4, 0.0, 1e9),)),)
    name = f"{processes} process{'es' * (processes != 1)} on CPUs"
    one = Hardware(name, flops, 1e10, 2e-6, 4 * GiB, links, host=1e10, draws=1.5e9, functions=1e9)
    return replace(one, tile=1, view=1e-6, device="cpu")


_Ways = tuple[tuple[float, float, float], ...]  # us to start, us a step, GB a second
# Within such nodes, and between them, as fitted to what nccl-tests printed: tests/nccl_times.py.
_H100: dict[str, tuple[_Ways, _Ways]] = {
    "all_reduce": (
        ((13, 0.5, 220), (36, 0.5, 350), (80, 0.5, 446), (206, 0.5, 485)),
        ((57, 3.4, 15.8), (101, 3.4, 28.3), (239, 3.4, 46)),
    )
}
_A100: dict[str, tuple[_Ways, _Ways]] = {
    "all_reduce": (((10, 0.7, 92), (16, 1.7, 230)), ((57.7, 5.6, 12.1), (1400, 5.6, 40)))
}
_B200: dict[str, tuple[_Ways, _Ways]] = {
    "all_reduce": (
        ((13, 0.5, 224), (39, 0.5, 475), (123, 0.5, 811)),
        ((71, 5.8, 23.2), (111, 5.8, 39.9), (214, 5.8, 51.8)),
    ),
    "all_gather": (
        ((14.2, 0.3, 268), (26.7, 0.3, 593), (36.9, 0.3, 661)),
        ((20.2, 7.7, 2.7), (93.7, 7.7, 23.3), (232, 7.7, 39.6)),
    ),
    "reduce_scatter": (
        ((12.8, 0.3, 189), (37.6, 0.3, 697)),
        ((20.2, 7.7, 2.7), (93.7, 7.7, 23.3), (232, 7.7, 39.6)),
    ),
    "all_to_all": (((10.6, 0.3, 169), (25.9, 0.3, 628), (270, 0.3, 685)), ((40, 6, 19.8), (66, 6, 22.6))),
}


def _links(
    what: str, nodes: int, inside: float, nic: float, kinds: Mapping[str, tuple[_Ways, _Ways]]
) -> tuple[Link, ...]:
    """Of nodes with NVLink, whose devices have a NIC each: a quick protocol, and one for many bytes; and what was measured."""
    _checked(what, "nodes", nodes)
    within, between = ({kind: _ways(both[i]) for kind, both in kinds.items()} for i in (0, 1))
    node = Link(_NODE, (Protocol(8e-6, 0.7e-6, 0.4 * inside), Protocol(14e-6, 1.7e-6, inside)), within)
    quick, many = Protocol(14e-6, 4e-6, 0.9 * nic), Protocol(20e-6, 14e-6, nic)
    return (node, Link(_NODE * nodes, (quick, many), between)) if nodes > 1 else (node,)


def _ways(found: _Ways) -> tuple[Protocol, ...]:
    return tuple(Protocol(start * 1e-6, step * 1e-6, rate * 1e9) for start, step, rate in found)


def _checked(what: str, name: str, count: int) -> None:
    if type(count) is not int or count < 1:
        raise HardwareError(report(f"hardware.{what}", f"{name}={short(count)} is no number from 1 on"))


def _name(nodes: int, device: str) -> str:
    return f"{nodes} node{'s' * (nodes != 1)} of {_NODE} {device}"
