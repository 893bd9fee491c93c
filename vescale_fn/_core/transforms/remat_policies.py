"""What `vfn.remat(f, policy=...)` keeps of a function's values, by JAX's names.

A policy is a function ``(op, shapes, name)`` of an op's name (``"mm"``, ``"tanh"``; of a collective ``"psum"``,
``"all_gather"``, ``"with_sharding"``), the shapes of its operands, and the name that `vfn.name` gave the value, else None. It
says whether the op's result is kept: True, False, or ``"offload"``, in the memory of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..base.errors import TransformError
from ..base.messages import report

Policy = Callable[[str, Sequence[Any], "str | None"], Any]

_PRODUCTS = frozenset("mm addmm mv addmv dot vdot convolution _scaled_mm".split())
_BATCHED = frozenset("bmm baddbmm addbmm".split())


def everything_saveable(op: str, shapes: Sequence[Any], name: str | None) -> bool:
    """Nothing is computed again."""
    return True


def nothing_saveable(op: str, shapes: Sequence[Any], name: str | None) -> bool:
    """Everything is: what `vfn.remat` does without a policy."""
    return False


def dots_saveable(op: str, shapes: Sequence[Any], name: str | None) -> bool:
    """Products of matrices, convolutions and fused attention are kept."""
    return op in _PRODUCTS or op in _BATCHED or op.startswith("_scaled_dot_product")


def dots_with_no_batch_dims_saveable(op: str, shapes: Sequence[Any], name: str | None) -> bool:
    """Products of matrices are kept, such as those with weights; those of batches, as in attention, are not."""
    return (op in _PRODUCTS and op != "convolution") or (op in _BATCHED and shapes[-1][0] == 1)


checkpoint_dots = dots_saveable
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable


def offload_dot_with_no_batch_dims(offload_src: str = "device", offload_dst: str = "pinned_host") -> Policy:
    """`dots_with_no_batch_dims_saveable`, whose values wait in the memory of the host."""
    return lambda op, shapes, name: dots_with_no_batch_dims_saveable(op, shapes, name) and "offload"


def save_only_these_names(*names_which_can_be_saved: str) -> Policy:
    """Values that `vfn.name` gave one of these names are kept."""
    return lambda op, shapes, name: name in names_which_can_be_saved


def save_any_names_but_these(*names_not_to_save: str) -> Policy:
    """Values that `vfn.name` gave another name than these are kept."""
    return lambda op, shapes, name: name is not None and name not in names_not_to_save


def save_anything_except_these_names(*names_not_to_save: str) -> Policy:
    """Everything is kept but the values that `vfn.name` gave one of these names."""
    return lambda op, shapes, name: name not in names_not_to_save


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Sequence[str],
    names_which_can_be_offloaded: Sequence[str],
    offload_src: str = "device",
    offload_dst: str = "pinned_host",
) -> Policy:
    """Values of the first names are kept, those of the second in the memory of the host."""
    both = sorted({*names_which_can_be_saved} & {*names_which_can_be_offloaded})
    if both:
        what = "a name is to be kept on the device and on the host"
        raise TransformError(
            report("remat_policies", what, [repr(name) for name in both], "each name in one of the two")
        )
    kinds: dict[str | None, Any] = dict.fromkeys(names_which_can_be_saved, True)
    kinds |= dict.fromkeys(names_which_can_be_offloaded, "offload")
    return lambda op, shapes, name: kinds.get(name, False)


def save_from_both_policies(policy_1: Policy, policy_2: Policy) -> Policy:
    """What either policy keeps is kept."""
    return lambda op, shapes, name: policy_1(op, shapes, name) or policy_2(op, shapes, name)


class remat_policies:
    """The policies of `vfn.remat`, by JAX's names; a policy is a function ``(op, shapes, name)``.

    `everything_saveable`, `nothing_saveable` (as without one), `dots_saveable` (`checkpoint_dots`),
    `dots_with_no_batch_dims_saveable`, `offload_dot_with_no_batch_dims(src, dst)`; and by the names that `vfn.name` gives,
    `save_only_these_names`, `save_any_names_but_these`, `save_anything_except_these_names`,
    `save_and_offload_only_these_names`; `save_from_both_policies(a, b)`.

    Source: `jax.checkpoint_policies`.

    >>> import torch, vescale_fn as vfn
    >>> f = vfn.remat(lambda w, x: torch.tanh(x @ w).sum(), policy=vfn.remat_policies.dots_saveable)
    >>> vfn.saved_residuals(f, torch.ones(4, 2), torch.ones(3, 4))[-1][0]
    'f32[3,2]'
    """

    everything_saveable = staticmethod(everything_saveable)
    nothing_saveable = staticmethod(nothing_saveable)
    dots_saveable = staticmethod(dots_saveable)
    checkpoint_dots = staticmethod(checkpoint_dots)
    dots_with_no_batch_dims_saveable = staticmethod(dots_with_no_batch_dims_saveable)
    checkpoint_dots_with_no_batch_dims = staticmethod(checkpoint_dots_with_no_batch_dims)
    offload_dot_with_no_batch_dims = staticmethod(offload_dot_with_no_batch_dims)
    save_only_these_names = staticmethod(save_only_these_names)
    save_any_names_but_these = staticmethod(save_any_names_but_these)
    save_anything_except_these_names = staticmethod(save_anything_except_these_names)
    save_and_offload_only_these_names = staticmethod(save_and_offload_only_these_names)
    save_from_both_policies = staticmethod(save_from_both_policies)
