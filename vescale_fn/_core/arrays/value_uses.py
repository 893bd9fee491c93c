"""While collectives are logged: what each op uses of the values that moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base.op_arguments import tensors_in
from ..distributed import value_flow
from .decision import Composed, Decision, MayDraw
from .rules.elementwise import elementwise
from .rules.table import find


def run_noted(decision: Decision, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Carry a decision out, and note what it used, and what it made of that."""
    carried_out = decision.then if isinstance(decision, MayDraw) else decision
    with value_flow.of_one_op() as flows:
        if not flows or isinstance(carried_out, Composed):
            return decision.run(cls, args, kwargs)
        moves = {i for i, steps, _ in carried_out.moves_of(args, kwargs) if steps}
        inputs = [x for i, x in enumerate(tensors_in(args, kwargs)) if i not in moves]
        out = decision.run(cls, args, kwargs)
        outs = _held(out if isinstance(out, (list, tuple)) else (out,))
        name = torch_internals.operator_name(decision.func).split("::")[-1].strip("_")
        for flow in flows:
            flow.use(name, _held(inputs), outs, find(decision.func) is elementwise)
        return out


def _held(xs: Sequence[Any]) -> list[Any]:
    """The local values of those that are arrays, and have theirs."""
    found = (torch_internals.held_local(x) for x in xs if isinstance(x, DTensor))
    return [local for local in found if local is not None]
