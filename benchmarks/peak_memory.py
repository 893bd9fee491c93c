"""The most memory that a training step of a GPT needs at once: eager PyTorch beside its plan. Counted, not timed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Accountant(TorchDispatchMode):
    """Counts the bytes of all memory that is alive, after each operator: what was there when asked, and what ops make.

    It sees what reaches torch's dispatcher: each operator's results, forward and backward; not what a kernel needs while it
    runs.
    """

    def __init__(self, *alive: Any) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.at = ""
        self._seen: dict[int, Any] = {}
        self._watch(alive)
        self.peak = self.bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._watch(out)
        if self.bytes > self.peak:
            self.peak, self.at = self.bytes, str(func)
        return out

    def _watch(self, tree: Any) -> None:
        for x in pytree.tree_leaves(tree):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen[storage._cdata] = weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
                    self.bytes += storage.nbytes()

    def _gone(self, key: int, size: int) -> None:
        self.bytes -= size
        self._seen.pop(key, None)


@contextlib.contextmanager
def accounting(*alive: Any) -> Iterator[Accountant]:
    """Count the memory that is alive inside a ``with`` block, to begin with that of the tensors in `alive`."""
    with Accountant(*alive) as accountant:
        yield accountant
