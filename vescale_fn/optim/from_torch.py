"""The optimisers of torch.optim as pairs of pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._core import torch_internals
from .._core.base import tree
from .._core.base.containers import opened
from .optimizer import Optimizer, Rate, check_numbers, check_state, is_trained, rate_at, zero_count
from .per_leaf import beside, check_shapes


class TorchState(NamedTuple):
    """Steps done, and for each parameter what torch's optimiser keeps of it."""

    count: Any
    kept: Any


def from_torch(cls: Callable[..., torch.optim.Optimizer], lr: Rate, **options: Any) -> Optimizer:
    """An optimiser of torch.optim, or one written like them, as a pair of pure functions.

    Each update makes one, gives it copies of the parameters and of its state, and lets it take its step. So it costs copies,
    and is for what there is no function for here. An optimiser that reads numbers in its step (Adam its count of steps)
    cannot be recorded: `jit` runs such a step as written.

    Args:
        cls: a class of optimisers: ``cls(params, lr=..., **options)``, with all state in ``.state[param]``.
        lr: the learning rate, or a schedule: a function of the number of steps done.
        options: its other arguments.

    Returns:
        The pair. Its state is a tree: for each parameter a dictionary. What it begins with is found by a step on copies; where
        that makes an entry out of a gradient (SGD its momentum), the dictionary is empty until the first step.

    >>> import torch, vescale_fn as vfn
    >>> opt, w = vfn.optim.from_torch(torch.optim.RMSprop, lr=0.1), torch.tensor([1.0, 2.0])
    >>> opt.update(torch.tensor([1.0, -1.0]), opt.init(w), w)[0]
    tensor([-1.0000,  1.0000])
    """
    check_numbers("from_torch", lr=lr)

    def init(params: Any) -> TorchState:
        leaves, structure = opened(params, "opt.init", "params")
        todo = [i for i, leaf in enumerate(leaves) if is_trained(leaf)]
        kept: list[Any] = [{} for _ in leaves]
        if todo:
            own = _variables([leaves[i] for i in todo])
            rate = rate_at(lr, 0)
            theirs = cls(own, lr=float(rate) if callable(lr) else rate, **options)
            for variable in own:
                variable.grad = torch.zeros_like(variable)
                theirs.state[variable] = _Beginning(variable, theirs.state[variable])
            theirs.step()
            for variable, i in zip(own, todo):
                kept[i] = theirs.state[variable].begins
        return TorchState(zero_count(), tree.unflatten(structure, kept))

    def update(grads: Any, state: TorchState, params: Any) -> tuple[Any, TorchState]:
        check_state("from_torch", state, TorchState)
        leaves, structure, (found, kept) = beside("from_torch", params, grads, state.kept)
        todo = [i for i, leaf in enumerate(leaves) if found[i] is not None and is_trained(leaf)]
        if todo:
            check_shapes("from_torch", params, todo, [leaves[i] for i in todo], [[found[i] for i in todo]])
            rate = rate_at(lr, state.count)
            own = _variables([leaves[i] for i in todo])
            theirs = cls(own, lr=float(rate) if callable(lr) else rate, **options)
            for variable, i in zip(own, todo):
                variable.grad = found[i].detach().clone()
                theirs.state[variable] = {name: _copied(x) for name, x in kept[i].items()}
            theirs.step()
            for variable, i in zip(own, todo):
                found[i] = variable.detach() - leaves[i].detach()
                kept[i] = dict(theirs.state[variable])
        return tree.unflatten(structure, found), TorchState(state.count + 1, tree.unflatten(structure, kept))

    return Optimizer(init, update)


def _variables(leaves: Sequence[Any]) -> list[Any]:
    with torch.no_grad():
        return [leaf.detach().clone() for leaf in leaves]


class _Beginning(dict[str, Any]):
    """What an optimiser keeps of a parameter, and copies of it as it was put in: before the parameter took its first step."""

    def __init__(self, variable: torch.Tensor, given: Mapping[str, Any]) -> None:
        super().__init__()
        self.variable, self.version, self.begins = variable, torch_internals.version(variable), {}
        for name, x in given.items():
            self[name] = x

    def __setitem__(self, name: str, x: Any) -> None:
        if name not in self:
            early = torch_internals.version(self.variable) == self.version
            self.begins = {**self.begins, name: _copied(x)} if early else {}
        super().__setitem__(name, x)

    def setdefault(self, name: str, x: Any = None) -> Any:
        if name not in self:
            self[name] = x
        return self[name]


def _copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x
