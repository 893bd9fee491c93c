"""Muon: the momentum of a matrix, brought near the orthogonal matrix that is closest to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .._core.arrays.array import is_array, mesh_of, spec_of
from .._core.arrays.placement import with_sharding
from .._core.base import tree
from .._core.base.errors import VfnError
from .._core.base.messages import described, report
from .._core.sharding.index_map import axes_of
from .._core.sharding.spec import from_split_axes, split_axes
from .masks import flags
from .optimizer import Optimizer, Rate, check_numbers, check_state, is_trained, rate_at, zero_count
from .per_leaf import by_leaf, zeros_like
from .tensor_list import over

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class MuonState(NamedTuple):
    """Steps done, and the running means of the gradients."""

    count: Any
    mean: Any


def muon(
    lr: Rate,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    *,
    mask: Any = True,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
    adjust: str = "original",
    dtype: torch.dtype = torch.bfloat16,
) -> Optimizer:
    """Momentum of which each matrix is made nearly orthogonal by Newton-Schulz iterations; for hidden layers.

    Every floating-point leaf must be a matrix, or a stack of matrices ``[n, rows, columns]``: `partition` gives embeddings,
    heads, biases and norms to another optimiser.

    On a mesh a matrix that is split has to come together. Matrices of one shape and layout are stacked, and an all-to-all
    turns the stack of all ranks' pieces into whole matrices, some on each rank; a second one takes the results back. So each
    is computed once, and as many bytes travel as a rank holds of them, in `dtype`. Where there are too few for that, they are
    gathered, and each rank computes all. Matrices that are not split move nothing.

    Args:
        lr: the learning rate, or a schedule.
        momentum: how much of the running mean of the gradients is kept each step.
        nesterov: look ahead along the momentum.
        weight_decay: times the learning rate, the part of a parameter that is taken away each step.
        mask: which parameters decay, as in `adamw`.
        coefficients: of the iteration ``x -> a x + (b x x^T + c (x x^T)^2) x``.
        steps: how many iterations.
        eps: the least norm by which a matrix is divided.
        adjust: what the learning rate is multiplied by: ``"original"``, sqrt(max(1, rows / columns)), or
            ``"match_rms_adamw"``, 0.2 sqrt(max(rows, columns)), with which rates that were found for AdamW will do.
        dtype: in which the iterations run, and matrices travel.

    Raises:
        VfnError: a leaf that is no matrix, with its path.

    Source: Jordan et al., https://kellerjordan.github.io/posts/muon; Liu et al., arXiv 2502.16982; `torch.optim.Muon`.

    >>> import torch, vescale_fn as vfn
    >>> opt, w = vfn.optim.muon(0.1, dtype=torch.float32), torch.zeros(2, 3)
    >>> update, _ = opt.update(torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]]), opt.init(w), w)
    >>> bool((update.diagonal() < -0.06).all())
    True
    """
    check_numbers("muon", lr=lr, momentum=momentum, weight_decay=weight_decay, eps=eps, steps=steps)
    if adjust not in _ADJUST:
        names = " or ".join(map(repr, _ADJUST))
        raise VfnError(report("muon", f"adjust must be {names}, but it is {described(adjust)}"))

    def init(params: Any) -> MuonState:
        _check_matrices(params)
        return MuonState(zero_count(), zeros_like(params))

    def update(grads: Any, state: MuonState, params: Any) -> tuple[Any, MuonState]:
        check_state("muon", state, MuonState)
        _check_matrices(params)
        rate = rate_at(lr, state.count)

        def directed(grad: Any, param: Any, mean: Any) -> tuple[Any, ...]:
            mean = torch.lerp(mean, grad, 1 - momentum)
            return torch.lerp(grad, mean, momentum) if nesterov else mean, mean

        def rule(direction: Any, param: Any, decays: Any, factor: Any) -> tuple[Any, ...]:
            step = direction * (-rate * factor)
            decayed = decays and weight_decay
            return over(torch.sub, step, param * (rate * weight_decay)) if decayed else step, decays, factor

        directions, mean = by_leaf("muon", directed, grads, params, state.mean)
        leaves, structure = tree.flatten(params)
        found = structure.flatten_up_to(directions)
        moving = [i for i, leaf in enumerate(leaves) if is_trained(leaf) and found[i] is not None]
        for i, x in zip(moving, _orthogonal([found[i] for i in moving], coefficients, steps, eps, dtype)):
            found[i] = x
        factors = [_ADJUST[adjust](*leaf.shape[-2:]) if is_trained(leaf) else 1.0 for leaf in leaves]
        updates, *_ = by_leaf(
            "muon",
            rule,
            tree.unflatten(structure, found),
            params,
            flags("muon", mask, params),
            tree.unflatten(structure, factors),
        )
        return updates, MuonState(state.count + 1, mean)

    return Optimizer(init, update)


_ADJUST = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def _check_matrices(params: Any) -> None:
    wrong = [
        f"{path} is {described(leaf)}"
        for path, leaf in zip(tree.paths(params, "params"), tree.leaves(params))
        if is_trained(leaf) and leaf.ndim not in (2, 3)
    ]
    if wrong:
        fix = 'partition({"matrix": muon(0.02), "other": adamw(3e-4)}, by_path([(r"norm|bias", "other"), (r".*", "matrix")]))'
        raise VfnError(report("muon", "each leaf must be a matrix, or a stack of matrices", wrong, fix))


def _orthogonal(
    xs: Sequence[Any], coefficients: tuple[float, float, float], steps: int, eps: float, dtype: torch.dtype
) -> list[Any]:
    """Matrices, and stacks of them, made nearly orthogonal: those that lie alike as one stack."""
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(xs):
        alike = i if x.ndim == 3 else (x.shape, x.dtype, x.device, mesh_of(x), spec_of(x))
        groups.setdefault(alike, []).append(i)
    found = list(xs)
    for members in groups.values():
        stacked = xs[members[0]] if xs[members[0]].ndim == 3 else torch.stack([xs[i] for i in members])
        narrow = stacked.to(dtype)
        made = _newton_schulz(_whole(narrow), coefficients, steps, eps)
        if is_array(made):
            made = with_sharding(made, spec_of(narrow))
        for i, x in zip(members, [made] if stacked is xs[members[0]] else made.unbind()):
            found[i] = x
    return found


def _newton_schulz(x: Any, coefficients: tuple[float, float, float], steps: int, eps: float) -> Any:
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.clamp(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True), min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _whole(stack: Any) -> Any:
    """A stack laid out so that each matrix is whole on some rank, or, where that moves more, on all of them."""
    if not is_array(stack):
        return stack
    first, *rest = split_axes(spec_of(stack), stack.ndim)
    sizes = axes_of(mesh_of(stack))
    axes = [axis for axis in sizes if any(axis in names for names in rest)]
    if not axes:
        return stack
    count = -(-stack.shape[0] // math.prod(sizes[axis] for axis in first))
    each = -(-count // math.prod(sizes[axis] for axis in axes))
    # A rank sends its pieces, or as many bytes of padding, over each axis and back; or it gathers all matrices once.
    dealt = 2 * each * len(axes) <= count
    return with_sharding(stack, from_split_axes([(*first, *axes) if dealt else first]))
