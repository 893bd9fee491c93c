"""Values of transforms of `torch.func` that are over, in a body that runs once more for its derivative.

A body closes over what its transform had wrapped. When that is over, torch takes what is below the wrapper, which nothing of
the transform follows: the gradient would be lost without a word. So what a body closes over becomes an argument: a mode puts
new variables in the place of such values, and an op that comes to one of them all the same ends the recording of the body.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..._core import torch_internals
from ..._core.base import op_arguments
from ..._core.shard_map import body


class Instead(torch_internals.TorchFunctionMode):
    """While it is on, torch's functions are given what stands for values of transforms that are over.

    Args:
        pairs: of an old and a new value.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        super().__init__()
        self.pairs, self.new = pairs, {id(old): new for old, new in pairs}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        modes = [self, *_modes()]
        args, kwargs = op_arguments.mapped(lambda x: _now(x, modes), (args, kwargs or {}))
        return func(*args, **kwargs)


def _modes() -> list[Instead]:
    return [mode for mode in torch_internals.all_function_modes() if isinstance(mode, Instead)][::-1]


def _now(x: Any, modes: Sequence[Instead]) -> Any:
    below = x
    while isinstance(below, torch.Tensor):
        x, known = below, (mode.new.get(id(below)) for mode in modes)
        below = next((new for new in known if new is not None), None)
        below = torch_internals.below_ended(x) if below is None else below
    return x


def now(x: torch.Tensor) -> torch.Tensor:
    """What stands for a value: a new one, or what is left of it below the transforms that are over. Torch takes off one."""
    return _now(x, _modes())


@contextlib.contextmanager
def standing_for(old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> Iterator[None]:
    """A block in which `new` values stand for `old` ones, and no op may come to these."""
    recorder = torch_internals.recorder()
    before = recorder.lost
    recorder.lost = before | {id(torch_internals.peel(x)) for x in old}
    try:
        with Instead(list(zip(old, new, strict=True))):
            yield
    finally:
        recorder.lost = before


def _captured() -> Callable[[], Any]:
    """What stands for what, to be so again in a backward pass."""
    modes = _modes()[::-1]
    if not modes:
        return contextlib.nullcontext

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(Instead(mode.pairs))
            yield

    return again


body.captures.append(_captured)
