"""What an optimiser is, a pair of pure functions, and what all of them check and count alike."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core import torch_internals
from .._core.base.errors import VfnError
from .._core.base.front_door import no_attribute
from .._core.base.messages import described, report, short

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

    if not TYPE_CHECKING:  # or type checkers would believe that every name is there

        def __getattr__(self, name: str) -> Any:
            raise no_attribute("optim.Optimizer", self, name)

    def __repr__(self) -> str:
        return _call_that_made(self) or f"Optimizer(init={self.init!r}, update={self.update!r})"


def _call_that_made(opt: Optimizer) -> str | None:
    """The call that returned an optimiser, as `adamw(0.001, weight_decay=0.1)`: its two functions close over the arguments
    of the function in which they were made. None where they do not tell."""
    if not all(inspect.isfunction(one) for one in opt):
        return None
    given = _closed_over(opt.init) | _closed_over(opt.update)
    for one in [one for one in given.values() if inspect.isfunction(one)]:  # helpers that were made beside them
        given = _closed_over(one) | given if one.__module__ == opt.update.__module__ else given
    function, _, inner = opt.update.__qualname__.partition(".<locals>.")
    name = given.get("where", function)  # several share one function, which is passed the name of each
    maker = opt.update.__globals__.get(name)
    if inner != "update" or not inspect.isfunction(maker):
        return None
    parts = list[str]()
    for parameter in inspect.signature(maker).parameters.values():
        value = given.get(parameter.name, parameter.default)
        if parameter.kind is parameter.VAR_POSITIONAL:
            parts += map(_text, given.get(parameter.name, ()))
        elif parameter.kind is parameter.VAR_KEYWORD:
            parts += [f"{key}={_text(one)}" for key, one in given.get(parameter.name, {}).items()]
        elif parameter.default is parameter.empty:
            parts.append("..." if value is parameter.empty else _text(value))
        elif not (value is parameter.default or (isinstance(value, _PLAIN) and value == parameter.default)):
            parts.append(f"{parameter.name}={_text(value)}")
    return f"{name}({', '.join(parts)})"


_PLAIN = int, float, str, tuple


def _closed_over(function: Any) -> dict[str, Any]:
    return dict(inspect.getclosurevars(function).nonlocals)


def _text(x: Any) -> str:
    if isinstance(x, Optimizer):
        return repr(x)
    if isinstance(x, dict) and len(x) <= 8:
        return f"{{{', '.join(f'{key!r}: {_text(value)}' for key, value in x.items())}}}"
    if callable(x):
        function, inner, _ = getattr(x, "__qualname__", type(x).__name__).partition(".<locals>")
        return f"{function}(...)" if inner else function
    return short(x)


def check_numbers(where: str, **given: Any) -> None:
    """Raise where an argument of an optimiser is no number (a learning rate may be a schedule)."""
    wrong = {
        name: x
        for name, x in given.items()
        if not (isinstance(x, (numbers.Real, torch.Tensor)) or (name in _SCHEDULED and callable(x)))
    }
    if wrong:
        failures = [f"{name} is {described(x)}" for name, x in wrong.items()]
        scheduled = [name for name in wrong if name in _SCHEDULED]
        fix = f"a number, or for {scheduled[0]} a schedule: vfn.optim.cosine(1e-3, 1000)" if scheduled else "a number"
        raise VfnError(report(where, "these arguments must be numbers", failures, fix))
    bad = {
        name: x
        for name, x in given.items()
        if isinstance(x, numbers.Real) and name in _NOT_NEGATIVE and not float(x) >= 0
    }
    if bad:
        raise VfnError(
            report(
                where,
                "these arguments must not be negative, nor NaN",
                [f"{name} is {x}" for name, x in bad.items()],
                "a number, zero or more",
            )
        )


_SCHEDULED = ("lr", "factor", "decay")
_NOT_NEGATIVE = ("lr", "max_norm", "limit")


def check_steps(where: str, **given: Any) -> None:
    """Raise where an argument is no positive number of steps."""
    wrong = {name: x for name, x in given.items() if not isinstance(x, int) or isinstance(x, bool) or x < 1}
    if wrong:
        raise VfnError(
            report(
                where,
                "these arguments must be numbers of steps",
                [f"{name} is {described(x)}" for name, x in wrong.items()],
                "an int of at least 1",
            )
        )


def check_parts(where: str, parts: dict[str, Any], fix: str) -> None:
    """Raise where one of the optimisers that another is made of is none."""
    wrong = [
        f"{name} is a {type(one).__name__}"
        for name, one in parts.items()
        if not (hasattr(one, "init") and hasattr(one, "update"))
    ]
    if wrong:
        raise VfnError(report(where, "each part must be an Optimizer", wrong, fix))


def check_state(where: str, state: Any, wanted: type) -> None:
    """Raise where a state is not that of the optimiser."""
    if not all(hasattr(state, name) for name in wanted._fields):  # type: ignore[attr-defined]
        article = "an" if wanted.__name__[0] in "AE" else "a"
        raise not_a_state(where, state, f"{article} {wanted.__name__}")


def not_a_state(where: str, state: Any, wanted: str) -> VfnError:
    """What is said of something that is not the state that an update needs."""
    found = "None" if state is None else f"a {type(state).__name__}"
    if isinstance(state, (tuple, list)):
        found += f" of length {len(state)}"
    fix = "state = opt.init(params) before the first step, then the state that the last update returned"
    return VfnError(
        report(where, f"update takes (grads, state, params), and its state must be {wanted}, not {found}", fix=fix)
    )


def zero_count() -> Any:
    """No steps done yet."""
    return torch.zeros((), dtype=torch.int64)


def steps_done(count: Any) -> Any:
    """A count as a 0-d tensor in double precision, which does not promote the leaves that it meets (0-d ones: see
    `leaves.by_leaf`)."""
    return torch.as_tensor(count).to(torch.float64)


def rate_at(lr: Rate, count: Any) -> Any:
    """A rate, or what a schedule gives after `count` steps."""
    return lr(steps_done(count)) if callable(lr) else lr


def is_trained(leaf: Any) -> bool:
    """Whether an optimiser has anything to do with a leaf: a floating-point tensor."""
    if not isinstance(leaf, torch.Tensor):
        return False
    if leaf.dtype.is_complex:
        found = f"no optimiser here trains complex numbers, but a leaf is {leaf.dtype} of shape {list(leaf.shape)}"
        raise VfnError(report("optim", found, fix="keep torch.view_as_real(leaf) in the tree"))
    return leaf.dtype.is_floating_point


def is_readable(x: Any) -> bool:
    """Whether Python may read a tensor's value here: nothing records, transforms or traces."""
    return not isinstance(x, torch.Tensor) or not (torch_internals.watched() or torch_internals.needs_gradient(x))
