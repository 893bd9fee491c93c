"""Pure optimisers: pairs of functions, ``init(params) -> state``, ``update(grads, state, params) -> updates, state``.

Elementwise torch ops alone: they run as they stand on plain tensors and on sharded arrays, where parameters, gradients
and state lie alike, so that a step moves nothing. Every op on an array costs interpreter time: the formulas are built
for few ops, with all that is the same for every leaf folded into scalars first.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from . import tree
from .array import spec_of
from .errors import VfnError, described, report
from .spec import split_axes

Schedule = Callable[[Any], Any]
Rate = float | Schedule


class Optimizer(NamedTuple):
    """A pair of pure functions; what `sgd`, `adamw`, `clip_by_global_norm` and `chain` return.

    `init(params)` gives the state, laid out as the parameters; `update(grads, state, params)` gives the updates that
    `apply_updates` adds, and the next state. Leaves that are not floating point (integers, keys) pass through.

    Source: `optax.GradientTransformation`.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


class SgdState(NamedTuple):
    """Steps done, and the running sums of gradients (None without momentum)."""

    count: Any
    momentum: Any


class AdamState(NamedTuple):
    """Steps done, and the running means of the gradients and of their squares."""

    count: Any
    mean: Any
    square: Any


class LionState(NamedTuple):
    """Steps done, and the running mean of the gradients."""

    count: Any
    mean: Any


# Optimisers


def sgd(lr: Rate, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Optimizer:
    """Stochastic gradient descent, with momentum as torch has it.

    Args:
        lr: the learning rate, or a schedule: a function of the number of steps done.
        momentum: how much of the running sum of gradients is kept each step.
        nesterov: look ahead along the momentum.
        weight_decay: added to the gradient, times the parameter (not decoupled).

    Source: `torch.optim.SGD`.

    >>> import torch, vescale_fn as vfn
    >>> opt, params = vfn.optim.sgd(0.5), {"w": torch.tensor([1.0, 2.0])}
    >>> updates, state = opt.update({"w": torch.tensor([1.0, -1.0])}, opt.init(params), params)
    >>> vfn.optim.apply_updates(params, updates)
    {'w': tensor([0.5000, 2.5000])}
    """
    _check_numbers("sgd", lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and not momentum:
        raise VfnError(report("sgd", "nesterov=True needs a momentum, but momentum is 0", fix="momentum=0.9, say"))

    def init(params: Any) -> SgdState:
        return SgdState(_zero_count(), _zeros_like(params) if momentum else None)

    def update(grads: Any, state: SgdState, params: Any) -> tuple[Any, SgdState]:
        _check_state("sgd", state, SgdState)
        scale = -_rate(lr, state.count)

        def rule(grad: Any, param: Any, *kept: Any) -> tuple[Any, ...]:
            if weight_decay:
                grad = torch.add(grad, param, alpha=weight_decay)
            if not momentum:
                return (grad * scale,)
            total = torch.add(grad, kept[0], alpha=momentum)
            return (torch.add(grad, total, alpha=momentum) if nesterov else total) * scale, total

        updates, *sums = _by_leaf("sgd", rule, grads, params, *([state.momentum] if momentum else []))
        return updates, SgdState(state.count + 1, sums[0] if momentum else None)

    return Optimizer(init, update)


def adamw(lr: Rate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 1e-2,
          mask: Any = True) -> Optimizer:  # fmt: skip
    """Adam with decoupled weight decay.

    Args:
        lr: the learning rate, or a schedule: a function of the number of steps done.
        b1, b2: how much of the running means of the gradients and of their squares is kept each step.
        eps: added to the root of the mean square.
        weight_decay: times the learning rate, the part of a parameter that is taken away each step.
        mask: which parameters decay: a tree prefix of bools, or a function of the parameters that gives one.

    Source: Loshchilov and Hutter, arXiv 1711.05101; `torch.optim.AdamW`.

    >>> import torch, vescale_fn as vfn
    >>> opt = vfn.optim.adamw(vfn.optim.warmup_cosine(1e-3, 10, 100), mask={"w": True, "b": False})
    >>> params = {"w": torch.ones(2, 3), "b": torch.ones(3)}
    >>> updates, state = opt.update({"w": torch.ones(2, 3), "b": torch.zeros(3)}, opt.init(params), params)
    >>> updates["w"][0], updates["b"]
    (tensor([-0.0001, -0.0001, -0.0001]), tensor([-0., -0., -0.]))
    """
    _check_numbers("adamw", lr=lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)

    def init(params: Any) -> AdamState:
        return AdamState(_zero_count(), _zeros_like(params), _zeros_like(params))

    def update(grads: Any, state: AdamState, params: Any) -> tuple[Any, AdamState]:
        _check_state("adamw", state, AdamState)
        count = state.count + 1
        done = _float(count)
        # u = -lr * (m / c1) / (sqrt(v / c2) + eps), with the corrections c1 and c2 moved out of the leaves.
        root = torch.sqrt(1 - b2**done)
        scale = -_rate(lr, state.count) * root / (1 - b1**done)
        least, decay = eps * root, weight_decay * (1 - b1**done) / root

        def rule(grad: Any, param: Any, decays: Any, mean: Any, square: Any) -> tuple[Any, ...]:
            mean = torch.lerp(mean, grad, 1 - b1)
            square = torch.lerp(square, grad * grad, 1 - b2)
            size = torch.sqrt(square) + least
            step = torch.addcdiv(param * decay, mean, size) if decays and weight_decay else mean / size
            return step * scale, decays, mean, square

        decaying = _masked("adamw", mask, params)
        updates, _, mean, square = _by_leaf("adamw", rule, grads, params, decaying, state.mean, state.square)
        return updates, AdamState(count, mean, square)

    return Optimizer(init, update)


def lion(lr: Rate, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.0, mask: Any = True) -> Optimizer:
    """The sign of an interpolated momentum, with decoupled weight decay.

    Args:
        lr: the learning rate, or a schedule; about a tenth of what Adam takes.
        b1: how much of the running mean the step looks at, the rest being the gradient of now.
        b2: how much of the running mean is kept each step.
        weight_decay: times the learning rate, the part of a parameter that is taken away each step.
        mask: which parameters decay, as in `adamw`.

    Source: Chen et al., arXiv 2302.06675; `optax.lion`.

    >>> import torch, vescale_fn as vfn
    >>> opt, w = vfn.optim.lion(0.1), torch.tensor([1.0, 2.0])
    >>> opt.update(torch.tensor([3.0, -4.0]), opt.init(w), w)[0]
    tensor([-0.1000,  0.1000])
    """
    _check_numbers("lion", lr=lr, b1=b1, b2=b2, weight_decay=weight_decay)

    def init(params: Any) -> LionState:
        return LionState(_zero_count(), _zeros_like(params))

    def update(grads: Any, state: LionState, params: Any) -> tuple[Any, LionState]:
        _check_state("lion", state, LionState)
        scale = -_rate(lr, state.count)

        def rule(grad: Any, param: Any, decays: Any, mean: Any) -> tuple[Any, ...]:
            step = torch.sign(torch.lerp(mean, grad, 1 - b1))
            if decays and weight_decay:
                step = torch.add(step, param, alpha=weight_decay)
            return step * scale, decays, torch.lerp(mean, grad, 1 - b2)

        updates, _, mean = _by_leaf("lion", rule, grads, params, _masked("lion", mask, params), state.mean)
        return updates, LionState(state.count + 1, mean)

    return Optimizer(init, update)


# Transformations of gradients


def chain(*transformations: Optimizer) -> Optimizer:
    """One after the other: each is given the updates of the one before it.

    Args:
        transformations: optimisers or transformations of gradients; the state is the tuple of their states.

    Source: `optax.chain`.

    >>> import torch, vescale_fn as vfn
    >>> opt, w = vfn.optim.chain(vfn.optim.clip_by_global_norm(1.0), vfn.optim.sgd(1.0)), torch.zeros(2)
    >>> opt.update(torch.tensor([3.0, 4.0]), opt.init(w), w)[0]
    tensor([-0.6000, -0.8000])
    """
    wrong = [f"part {i} is a {type(one).__name__}" for i, one in enumerate(transformations)
             if not (hasattr(one, "init") and hasattr(one, "update"))]  # fmt: skip
    if wrong:
        fix = "chain(clip_by_global_norm(1.0), sgd(0.1)); chain(*parts) of a list"
        raise VfnError(report("chain", "each part must be an Optimizer", wrong, fix))

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(one.init(params) for one in transformations)

    def update(grads: Any, state: Sequence[Any], params: Any) -> tuple[Any, tuple[Any, ...]]:
        if not isinstance(state, (tuple, list)) or len(state) != len(transformations):
            raise _not_a_state("chain", state, f"the tuple of the states of its {len(transformations)} parts")
        after = []
        for one, its in zip(transformations, state, strict=True):
            grads, its = one.update(grads, its, params)
            after.append(its)
        return grads, tuple(after)

    return Optimizer(init, update)


def clip_by_global_norm(max_norm: float) -> Optimizer:
    """Scale all gradients by one factor, so that their norm as one long vector is at most `max_norm`.

    Source: `torch.nn.utils.clip_grad_norm_` (with its 1e-6 in the divisor), `optax.clip_by_global_norm`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.optim.clip_by_global_norm(5.0).update({"a": torch.tensor([6.0]), "b": torch.tensor(8.0)}, None, None)[0]
    {'a': tensor([3.0000]), 'b': tensor(4.0000)}
    """
    _check_numbers("clip_by_global_norm", max_norm=max_norm)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        factor = torch.clamp(max_norm / (global_norm(grads) + 1e-6), max=1.0)
        return tree.map_(lambda grad: grad * factor if _trained(grad) else grad, grads), state

    return Optimizer(lambda params: None, update)


def global_norm(grads: Any) -> Any:
    """The norm of all floating-point leaves as one long vector: a 0-d tensor.

    Squares of leaves that lie alike are added up before those of other layouts join them: sums that are still partial
    over a mesh axis meet partial sums, and the whole norm takes one reduction.

    >>> import torch, vescale_fn as vfn
    >>> vfn.optim.global_norm({"a": torch.tensor([3.0]), "b": torch.tensor(4.0)})
    tensor(5.)
    """
    sums: dict[Any, Any] = {}
    for leaf in filter(_trained, tree.leaves(grads)):
        axes = frozenset(axis for names in split_axes(spec_of(leaf), leaf.ndim) for axis in names)
        square = torch.sum(leaf * leaf)
        sums[axes] = sums[axes] + square if axes in sums else square
    if not sums:
        return torch.zeros(())
    first, *others = (sums[axes] for axes in sorted(sums, key=lambda axes: (-len(axes), sorted(axes))))
    for square in others:
        first = first + square
    return torch.sqrt(first)


def apply_updates(params: Any, updates: Any) -> Any:
    """The parameters with the updates added; leaves that are not floating point stay as they are.

    Source: `optax.apply_updates`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.optim.apply_updates({"w": torch.ones(2), "depth": 3}, {"w": torch.ones(2), "depth": 3})
    {'w': tensor([2., 2.]), 'depth': 3}
    """
    leaves, structure, (updates,) = _beside("apply_updates", params, updates, name="updates")
    moved = [_trained(p) and update is not None for p, update in zip(leaves, updates)]
    wrong = [i for i, moves in enumerate(moved) if moves and getattr(updates[i], "shape", None) != leaves[i].shape]
    if wrong:
        paths = tree.paths(params, "params")
        raise VfnError(report("apply_updates", "the updates do not fit the parameters",
                              [f"{paths[i]} is {described(leaves[i])}, its update {described(updates[i])}" for i in wrong],
                              "the updates that opt.update(grads, state, params) returns for these params"))  # fmt: skip
    return tree.unflatten(structure, [p + update if moves else p for p, update, moves in zip(leaves, updates, moved)])


# Schedules: functions of the number of steps done (optimisers give a 0-d tensor); the first step is number 0


def constant(value: float) -> Schedule:
    """The same rate at every step.

    >>> import vescale_fn as vfn
    >>> vfn.optim.constant(0.1)(7)
    0.1
    """
    _check_numbers("constant", value=value)
    return lambda count: value


def cosine(peak: float, steps: int, end: float = 0.0) -> Schedule:
    """Half a cosine from `peak` at the first step down to `end` after `steps` steps, and `end` from then on.

    Source: Loshchilov and Hutter, arXiv 1608.03983; `optax.cosine_decay_schedule`.

    >>> import vescale_fn as vfn
    >>> [round(float(vfn.optim.cosine(1.0, 4)(step)), 3) for step in (0, 2, 4, 9)]
    [1.0, 0.5, 0.0, 0.0]
    """
    _check_numbers("cosine", peak=peak, steps=steps, end=end)
    return warmup_cosine(peak, 0, steps, end)


def warmup_cosine(peak: float, warmup: int, steps: int, end: float = 0.0) -> Schedule:
    """A straight line up to `peak` over `warmup` steps, then half a cosine down to `end` after `steps` steps in all.

    The first step already moves: its rate is ``peak / warmup``.

    >>> import vescale_fn as vfn
    >>> rate = vfn.optim.warmup_cosine(1.0, 4, 12)
    >>> [round(float(rate(step)), 3) for step in (0, 1, 3, 4, 8, 12, 20)]
    [0.25, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    _check_numbers("warmup_cosine", peak=peak, warmup=warmup, steps=steps, end=end)
    if not 0 <= warmup < steps:
        raise VfnError(report("warmup_cosine", f"needed is 0 <= warmup < steps, but warmup={warmup} and steps={steps}"))

    def rate(count: Any) -> Any:
        done = _float(count)
        part = torch.clamp((done - warmup) / (steps - warmup), 0.0, 1.0)
        decayed = end + (peak - end) * (1 + torch.cos(math.pi * part)) / 2
        return decayed * torch.clamp((done + 1) / warmup, max=1.0) if warmup else decayed

    return rate


# What all of them share


def _check_numbers(where: str, **given: Any) -> None:
    """Raise where an argument of an optimiser is no number (a learning rate may be a schedule)."""
    wrong = {name: x for name, x in given.items()
             if not (isinstance(x, (numbers.Real, torch.Tensor)) or (name == "lr" and callable(x)))}  # fmt: skip
    if wrong:
        failures = [f"{name} is {described(x)}" for name, x in wrong.items()]
        fix = "a number, or for lr a schedule: vfn.optim.cosine(1e-3, 1000)" if "lr" in wrong else "a number"
        raise VfnError(report(where, "these arguments must be numbers", failures, fix))


def _rate(lr: Rate, count: Any) -> Any:
    return lr(_float(count)) if callable(lr) else lr


def _zero_count() -> Any:
    return torch.zeros((), dtype=torch.int64)


def _check_state(where: str, state: Any, wanted: type) -> None:
    if not all(hasattr(state, name) for name in wanted._fields):  # type: ignore[attr-defined]
        raise _not_a_state(where, state, f"{'an' if wanted is AdamState else 'a'} {wanted.__name__}")


def _not_a_state(where: str, state: Any, wanted: str) -> VfnError:
    found = "None" if state is None else f"a {type(state).__name__}"
    if isinstance(state, (tuple, list)):
        found += f" of length {len(state)}"
    fix = "state = opt.init(params) before the first step, then the state that the last update returned"
    return VfnError(report(where, f"update takes (grads, state, params), and its state must be {wanted}, not {found}",
                           fix=fix))  # fmt: skip


def _float(count: Any) -> Any:
    """A 0-d tensor in double precision, which does not promote the leaves that it meets (0-d ones: see `_by_leaf`)."""
    return torch.as_tensor(count).to(torch.float64)


def _trained(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor):
        return False
    if leaf.dtype.is_complex:
        found = f"no optimiser here trains complex numbers, but a leaf is {leaf.dtype} of shape {list(leaf.shape)}"
        raise VfnError(report("optim", found, fix="keep torch.view_as_real(leaf) in the tree"))
    return leaf.dtype.is_floating_point


def _zeros_like(params: Any) -> Any:
    return tree.map_(lambda leaf: torch.zeros_like(leaf) if _trained(leaf) else leaf, params)


def _masked(where: str, mask: Any, params: Any) -> Any:
    flags = tree.broadcast(mask(params) if callable(mask) else mask, params, where, "mask", "params")
    return tree.unflatten(tree.flatten(params)[1], flags)


def _beside(where: str, params: Any, *others: Any, name: str = "grads") -> tuple[list[Any], Any, list[list[Any]]]:
    """The leaves of `params`, its structure, and what stands at each leaf's place in the other trees: `name`, and state."""
    leaves, structure = tree.flatten(params)
    try:
        return leaves, structure, [structure.flatten_up_to(other) for other in others]
    except ValueError as error:
        failures = [problem for i, other in enumerate(others)
                    for problem in tree.partings(other, params, "state" if i else name, "params")]  # fmt: skip
        fix = "give gradients and state as `grad` and `init` return them for these params"
        raise VfnError(report(where, "a tree lacks the structure of params",
                              failures or str(error).splitlines()[:1], fix)) from None  # fmt: skip


def _by_leaf(where: str, rule: Callable[..., tuple[Any, ...]], grads: Any, params: Any, *others: Any) -> list[Any]:
    """`rule` on every floating-point leaf of `params` and what stands at its place in the other trees.

    Gives one tree for each result of the rule. Elsewhere, and where there is no gradient (None), all pass through.
    """
    leaves, structure, columns = _beside(where, params, grads, *others)
    rows = []
    for leaf, grad, *rest in zip(leaves, *columns):
        if grad is None or not _trained(leaf):
            rows.append((grad, *rest))
            continue
        update, *state = rule(grad, leaf, *rest)
        rows.append((update if update.dtype == leaf.dtype else update.to(leaf.dtype), *state))
    return [tree.unflatten(structure, column) for column in (zip(*rows) if rows else [[]] * len(columns))]
