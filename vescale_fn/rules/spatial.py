"""How ops over space shard: convolution, pooling, resampling. The examples may be split.

Some of these kernels crash on no elements, so what they split is split evenly.
"""

from __future__ import annotations

from collections.abc import Callable

from .rule import Call, Rule, none


def convolution(call: Call) -> Rule:
    """Convolutions: examples may be split; gradients of the weights sum over them."""
    examples = [call["input"], call.args.get("grad_output")]
    rows = tuple(("n", *none(t.shape[1:])) if any(t is x for x in examples) else none(t.shape) for t in call.tensors)
    outs = tuple(("n", *none(s[1:])) if s and i == 0 else none(s) for i, s in enumerate(call.outs))
    return Rule(rows, outs, sums=frozenset({"n"}), even=frozenset({"n"}))


def examples(ndim: int) -> Callable[[Call], Rule | None]:
    """Pooling and the like, on values of `ndim` dims: each example for itself."""

    def rule(call: Call) -> Rule | None:
        if any(len(shape or ()) != ndim for shape in (*(t.shape for t in call.tensors), *call.outs)):
            return None
        row = ("n", *(None,) * (ndim - 1))
        return Rule((row,) * len(call.tensors), (row,) * len(call.outs), even=frozenset({"n"}))

    return rule
