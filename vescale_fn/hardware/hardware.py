"""What a device does in a second, and the links between devices."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._core.base.errors import HardwareError
from .._core.base.messages import count_text, meant, mesh_text, report, short
from . import links as links_
from .links import KINDS, Link, Protocol


@dataclass(frozen=True)
class Hardware:
    """What a device does in a second, and how its ranks reach each other: what `price` computes time from.

    All of it is data: take a preset, or what `measure` finds, change it with `dataclasses.replace`, keep it as JSON.

    Args:
        name: as tables show it.
        flops: operations a second of large products, by the name of the dtype; a dtype that is missing has those of "float32".
        bytes: of memory that are read and written in a second.
        launch: seconds, the least that a call takes.
        memory: bytes of a device.
        links: from the innermost; the last one joins all ranks.
        host: bytes a second between a device and the memory of its host.
        draws: bytes of keyed random numbers in a second.
        functions: results a second of functions like exp: activations, softmax.
        tile: rows and columns of a product that one unit of a device computes at a time.
        units: that compute at the same time.
        view: seconds of a call that only looks at a value in another way; 0 where that costs the device nothing.
        device: "cuda", or "cpu": whether ranks compute while values travel, as plans on GPUs do.

    Raises:
        HardwareError: figures that are not above 0, links that do not contain each other, no rate for "float32".

    >>> import torch, vescale_fn as vfn
    >>> h100 = vfn.hardware.h100(nodes=8)
    >>> f"{h100.matmul(4096, 8192, 8192, 1, torch.bfloat16) * 1e3:.2f} ms"
    '0.81 ms'
    >>> mesh = {"dp": 8, "tp": 8}
    >>> [round(h100.collective("all_gather", 32 << 20, mesh, [axis]) * 1e6) for axis in mesh]
    [5115, 661]
    """

    name: str
    flops: Mapping[str, float]
    bytes: float
    launch: float
    memory: float
    links: tuple[Link, ...]
    host: float = 4.5e10
    draws: float = 5e11
    functions: float = 1e12
    tile: int = 128
    units: int = 1
    view: float = 0.0
    device: str = "cuda"

    def __post_init__(self) -> None:
        failures = [f"{what} is {short(x)}, and has to be above 0" for what, x in self._figures() if not _above_0(x)]
        if "float32" not in self.flops:
            failures.append(f"flops has no float32, only {', '.join(self.flops) or 'nothing'}")
        failures += [
            f"links[{i}] has {kind!r}{meant(kind, KINDS)}; kinds are {', '.join(KINDS)}"
            for i, link in enumerate(self.links)
            for kind in link.kinds
            if kind not in KINDS
        ]
        if self.device not in ("cpu", "cuda"):
            failures.append(f'device is {short(self.device)}, and is "cpu" or "cuda"')
        if not self.links:
            failures.append("there is no link: a device alone has one of 1 rank")
        for i, (inner, outer) in enumerate(zip(self.links, self.links[1:])):
            if inner.ranks >= outer.ranks or outer.ranks % inner.ranks:
                what = f"links[{i + 1}] joins {outer.ranks}, which is no multiple of the {inner.ranks} of links[{i}]"
                failures.append(what)
        if failures:
            raise HardwareError(report("Hardware", f"{self.name!r} cannot be", failures))

    def _figures(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = [(f"flops[{dtype!r}]", x) for dtype, x in self.flops.items()]
        found += [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if f.name not in _NO_FIGURES]
        for i, link in enumerate(self.links):
            found.append((f"links[{i}].ranks", link.ranks))
            for kind, ways in (("protocols", link.protocols), *link.kinds.items()):
                found += [(f"links[{i}].{kind}[{j}].bytes", way.bytes) for j, way in enumerate(ways)]
        return found

    def __hash__(self) -> int:
        return hash(self.to_json())

    @property
    def ranks(self) -> int:
        """How many ranks it has."""
        return self.links[-1].ranks

    def rate(self, dtype: Any = None) -> float:
        """Operations a second of large products of a dtype, a `torch.dtype` or its name."""
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])

    def compute(self, flops: float, dtype: Any, moved: float) -> float:
        """The seconds of a call: the longest of what its operations, its memory and its launch take. On a CPU, where nothing is
        launched ahead, what a call takes comes on top.

        Args:
            flops: operations.
            dtype: of what it computes with; None for float32.
            moved: bytes that it reads and writes.
        """
        busy = max(moved / self.bytes, flops / self.rate(dtype))
        return self.launch + busy if self.device == "cpu" else max(self.launch, busy)

    def matmul(self, n: int, m: int, k: int, batch: int = 1, dtype: Any = None) -> float:
        """The seconds of `batch` products [n, k] @ [k, m]: tiles, of which the last ones may be in part empty, and so may the
        last wave of them, computed at the rate of large products; or what reading and writing takes."""
        if not n * m * batch:
            return self.launch
        tiles = math.ceil(n / self.tile) * math.ceil(m / self.tile) * batch
        waves = math.ceil(tiles / self.units)
        computed = waves * self.units * self.tile**2 * k * 2
        moved = batch * (n * k + k * m + n * m) * _width(dtype)
        return self.compute(computed, dtype, moved)

    def collective(self, kind: str, nbytes: float, mesh: Mapping[str, int], axes: Sequence[str]) -> float:
        """The seconds of a collective.

        Args:
            kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "permute", "send".
            nbytes: that each rank gives to it.
            mesh: sizes by axis. Ranks lie row-major in it, so that those of the last axis are neighbours: a group that stays in
                a node takes its link, one that does not the slower one, by as many ranks of a node as there are in the group.
            axes: over which it goes.

        Raises:
            HardwareError: a mesh of more ranks than there are; a kind, or an axis, that is none.
        """
        if kind not in KINDS:
            what = f"{short(kind)} is no kind of collective{meant(kind, KINDS)}"
            raise HardwareError(report("Hardware.collective", what, [f"there are {', '.join(KINDS)}"]))
        unknown = [axis for axis in axes if axis not in mesh]
        if unknown:
            what = f"{short(unknown[0])} is no axis of the {mesh_text(mesh)}{meant(unknown[0], mesh)}"
            raise HardwareError(report("Hardware.collective", what))
        self.check(mesh, "Hardware.collective")
        return links_.seconds(kind, nbytes, mesh, axes, self.links)

    def link(self, mesh: Mapping[str, int], axes: Sequence[str]) -> int:
        """The outermost of the links that a group along `axes` uses, counted from the innermost."""
        sizes = tuple(mesh.items())
        return next(
            (i for i, link in enumerate(self.links) if links_.units(sizes, tuple(axes), link.ranks) == 1),
            len(self.links) - 1,
        )

    def check(self, mesh: Mapping[str, int], where: str) -> None:
        """Whether a mesh fits on it.

        Raises:
            HardwareError: it has more ranks.
        """
        need = math.prod(mesh.values())
        if need > self.ranks:
            what = f"{self.name} has {count_text(self.ranks, 'rank')}, and the {mesh_text(mesh)} {need}"
            raise HardwareError(report(where, what, fix="a preset of more nodes, as in vfn.hardware.h100(nodes=...)"))

    def to_json(self) -> str:
        """All figures, as `from_json` reads them."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Hardware:
        """What `to_json` has written, perhaps changed.

        Raises:
            HardwareError: text that is no JSON, or has other fields; figures that cannot be.

        >>> import vescale_fn as vfn
        >>> mine = vfn.hardware.Hardware.from_json(vfn.hardware.a100(nodes=2).to_json())
        >>> mine.name, mine.ranks
        ('2 nodes of 8 A100', 16)
        """
        try:
            found = json.loads(text)
            links = tuple(_link(**one) for one in found.pop("links"))
            return Hardware(links=links, **found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, HardwareError):
                raise
            what = f"this is not what Hardware.to_json writes: {type(error).__name__}: {error}"
            raise HardwareError(report("Hardware.from_json", what)) from None


_NO_FIGURES = ("name", "flops", "links", "view", "device")


def _above_0(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) and x > 0


def _width(dtype: Any) -> int:
    """The bytes of an element."""
    digits = "".join(x for x in str(dtype or "float32").split("_")[0] if x.isdigit())
    return max(int(digits or 32) // 8, 1)


def _link(ranks: int, protocols: Sequence[dict[str, float]], kinds: Mapping[str, Any] | None = None) -> Link:
    of = {kind: tuple(Protocol(**one) for one in ways) for kind, ways in (kinds or {}).items()}
    return Link(ranks, tuple(Protocol(**one) for one in protocols), of)


# dataclasses write it as text, which tracebacks would show as the user's
Hardware.__init__.__code__ = Hardware.__init__.__code__.replace(co_filename=__file__)
