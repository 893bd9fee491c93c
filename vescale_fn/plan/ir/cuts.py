"""How the calls of `vfn.cut` stand in a graph: as steps that give what they are given."""

from __future__ import annotations

from typing import Any

from .graph import Step

CROSSES = "crosses"  # in the meta of such a step: the number of the call, in the program's order


def _itself(x: Any) -> Any:
    return x


CUT = Step("cut", _itself, views=(0,))
UNCUT = Step("uncut", _itself, views=(0,))  # of a cotangent, on its way back
