"""What a call takes that is carried out in one of its ways: as `price` counts the calls of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...plan.ir import graph as plan
from ...plan.ir.work import FUNCTIONS, GATHERS, Work, work
from .described import Described, value_of
from .moves import ways
from .options import Dims, Layout, Option

_ARGUMENT = 1e-3  # of what reading an argument takes: of equals the one that holds less


class CallPrices:
    """The seconds of the options of a call.

    Args:
        it: the call, or an input.
        ins, outs: the dims of its operands and results.
        axes: of the mesh, with their sizes.
        hardware: that it runs on.
    """

    def __init__(
        self, it: Described, ins: list[Dims], outs: list[Dims | None], axes: Mapping[str, int], hardware: Any
    ) -> None:
        self.it, self.ins, self.outs, self.axes, self.hardware = it, ins, outs, dict(axes), hardware
        self.given = [value_of(*x).element_size() for x in it.operands]
        self.made = [x.element_size() if x is not None else 0 for x in it.outs]
        self.work: Work | None = None if it.is_input else work(it.node)
        self.composition = it.composition

    def __call__(self, option: Option) -> float:
        """The seconds of the call itself, and of the sums that are made with it."""
        sizes = zip(self.outs, self.made, option.outs, strict=True)
        made = sum(self._bytes(d, n, lies) for d, n, lies in sizes if d is not None)
        if self.it.is_input:
            return made / self.hardware.bytes * _ARGUMENT
        if self.it.is_view:
            return self.hardware.view
        read = (
            0.0 if self.it.is_made else sum(self._bytes(*x) for x in zip(self.ins, self.given, option.ins, strict=True))
        )
        return self._computing(option, made, read) + self._sums(option)

    def _bytes(self, dims: Dims, itemsize: int, lies: Layout | None) -> float:
        """The bytes of a rank's block; of what is read in any way, of the whole."""
        return math.prod(dims.sizes) * itemsize / (ways(lies, self.axes) if lies is not None else 1)

    def _computing(self, option: Option, made: float, read: float) -> float:
        if option.apart and self.composition is not None:
            lies = option.ins[self.composition.argument]
            block = self._bytes(self.ins[self.composition.argument], 1, lies)
            return sum(self.hardware.compute(0, None, n * block) for n in self.composition.passes)
        todo, split = self.work, math.prod(self.axes[a] for a in option.split)
        assert todo is not None
        if todo.product is not None:
            n, m, batch = self._product(option)
            return self.hardware.matmul(n, m, round(todo.flops / split / max(2 * n * m * batch, 1)), batch, todo.dtype)
        name = plan.name_of(self.it.node)
        moved = 2 * made if name in GATHERS else made + read
        busy = self.hardware.compute(todo.flops / split, todo.dtype, moved)
        drawn = made / self.hardware.draws if todo.drawn else 0.0
        count = made / max(self.made[0], 1) if name in FUNCTIONS else 0.0
        return max(busy, drawn, count / self.hardware.functions)

    def _product(self, option: Option) -> tuple[int, int, int]:
        """Rows, columns and number of the products that a rank computes."""
        first = self.outs[0]
        assert first is not None
        part = lambda k: math.prod(n for n, x in zip(self.axes.values(), option.outs[0]) if x == k)
        *batch, n, m = [math.prod(first.sizes[k] // part(k) for k in dim) for dim in first.dims]
        return n, m, math.prod(batch)

    def _sums(self, option: Option) -> float:
        """The collectives in it."""
        found = 0.0
        for i, over in option.folds:
            if (d := self.outs[i]) is not None:
                nbytes = self._bytes(d, self.made[i], option.outs[i])
                found += self.hardware.collective("all_reduce", nbytes, self.axes, over)
        if option.apart and self.composition is not None:
            at = self.composition.argument
            rows = self._bytes(self.ins[at], self.composition.width, option.ins[at]) * math.prod(
                self.axes[a] for a in option.apart
            )
            once = self.hardware.collective("all_reduce", rows / self.composition.size, self.axes, option.apart)
            found += self.composition.sums * once
        return found
