"""Which operators a saved plan may call: functions of tensors, told by namespace and by what their schemas take.

Anybody may have written a file, and torch has operators that open files. So an operator of torch's is one of those whose text
arguments are known to be options; others are taken where the user trusts their namespace.
"""

from __future__ import annotations

from collections.abc import Collection

from ..._core import torch_internals

_OWN = ("vescale_fn",)
_TORCH = ("aten", "prims")
_OPTIONS = frozenset(
    """
    UPLO activation algorithm api_name approximate assert_msg driver equation indexing interpolation mode norm ord p pad_mode
    padding padding_mode padding_side reduce rounding_mode side""".split()
)


def refusal(name: str, namespaces: Collection[str] = ()) -> str | None:
    """Why no plan from a file calls the operator of this name (``"aten::add.Tensor"``); None where it may.

    Args:
        name: of an operator in one overload.
        namespaces: those that the user trusts.
    """
    space = name.partition("::")[0]
    if space not in (*_OWN, *_TORCH, *namespaces):
        return f"it calls {name}, which is not torch's; where you trust it: load_plan(path, namespaces=[{space!r}])"
    op = torch_internals.overload_named(name)
    if op is None:
        return f"torch has no operator {name} here"
    schema = torch_internals.schema(op)
    texts = {a.name for a in schema.arguments if "str" in str(a.type)}
    of_tensors = any("Tensor" in str(a.type) for a in (*schema.arguments, *schema.returns))
    if space in _TORCH and not (of_tensors and texts <= _OPTIONS):
        return f"it calls {name}, which is no function of tensors and numbers alone"
    return None
