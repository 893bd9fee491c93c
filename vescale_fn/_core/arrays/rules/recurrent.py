"""How oneDNN's recurrent layers shard: each sequence of a batch for itself.

Their kernel keeps a workspace for the gradient, whose size and contents are the kernel's own and those of one rank's batch:
no layout says it. It is not kept; the backward pass of a block computes it again.
"""

from __future__ import annotations

from typing import Any

import torch

from .rule import Call, Row, Rule, T, none

aten = torch.ops.aten
_SEQUENCES = {"input", "output", "grad_output"}  # [time, batch, width]
_STATES = {"hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy"}  # [batch, width]


def lstm(call: Call) -> Rule | None:
    """A layer of an LSTM, in one direction, and its gradient: that of the weights is summed over the batch."""
    if call["batch_sizes"]:
        return None
    ins = tuple(_row(name, x) for name, x in call.args.items() if isinstance(x, T))
    states: tuple[Row, ...] = (("n", None), ("n", None))
    if call.name == "mkldnn_rnn_layer":
        return Rule(ins, ((None, "n", None), *states, none(call.outs[3])), op=_forward)
    weights = tuple(none(shape) for shape in call.outs[1:5])
    return Rule(ins, ((None, "n", None), *weights, *states), sums=frozenset("n"), op=_backward)


def _row(name: str, x: T) -> Row:
    return (None, "n", None) if name in _SEQUENCES else ("n", None) if name in _STATES else none(x.shape)


def _forward(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    return (*_with_workspace(x, *args)[:3], x.new_empty(0, dtype=torch.uint8))


def _with_workspace(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    if not x.shape[1]:  # the kernel takes no empty batch
        h, c = args[4:6]
        return x.new_empty((x.shape[0], 0, h.shape[1])), h.clone(), c.clone(), x.new_empty(0, dtype=torch.uint8)
    return aten.mkldnn_rnn_layer.default(x, *args)


def _backward(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    weights, (h, c) = args[:4], args[4:6]
    if not x.shape[1]:
        return tuple(torch.zeros_like(one) for one in (x, *weights, h, c))
    reverse, mode, hidden, layers, biases, train, both, sizes, first, _ = args[12:]
    with torch.enable_grad():  # the kernel looks at this, too
        out, h_last, c_last, workspace = _with_workspace(
            x, *weights, h, c, reverse, sizes, mode, hidden, layers, biases, both, first, train
        )
    return aten.mkldnn_rnn_layer_backward.default(
        x, *weights, h, c, out, h_last, c_last, *args[9:12], *args[12:-1], workspace
    )
