"""`debug_print`: print values while a program runs, recorded or not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .._core import torch_internals
from .._core.arrays.array import is_array
from .._core.arrays.placement import unshard
from .._core.base import context, tree
from .._core.base.errors import TransformError
from .._core.base.messages import report, short
from .._core.distributed.blocks import Blocks
from .._core.distributed.communicator import coordinates
from .._core.distributed.mesh import communicator_of
from .._core.sharding.index_map import axes_of
from .ir.graph import Step


def debug_print(form: str, *args: Any, **kwargs: Any) -> None:
    """Print values while the program runs; in a function under `jit` in every replay, where `print` would run once.

    Whole values of arrays are printed, once: they are gathered, so every rank has to come here. In a `shard_map` body each
    rank prints its own value, with its place on the mesh. A gradient does not go through it; under `vmap` the batch is printed.

    Args:
        form: the text, with places as for `str.format`: ``"loss {}"``, ``"loss {loss:.3f}"``.
        args, kwargs: trees of tensors and of other values.

    Raises:
        TransformError: a form that does not fit the values.

    Source: `jax.debug.print`.

    >>> import torch, vescale_fn as vfn
    >>> @vfn.jit
    ... def f(x):
    ...     vfn.debug_print("the sum is {:.1f}", x.sum())
    ...     return x * 2
    >>> y = f(torch.ones(2)), f(torch.ones(3))
    the sum is 2.0
    the sum is 3.0
    """
    if not isinstance(form, str):
        raise TransformError(
            report(
                "debug_print",
                f"the first argument must be a text, but it is {short(form)}",
                fix='vfn.debug_print("loss {}", loss)',
            )
        )
    leaves, treedef = tree.flatten((args, kwargs))
    with torch.no_grad(), torch_internals.no_torch_function():
        leaves = [_seen(x) for x in leaves]
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        recorder = torch_internals.recorder() if torch_internals.dispatch_modes() else None
        body = context.body()
        step = Step("debug_print", _Print(form, leaves, treedef, None if body is None else body.mesh), effect=True)
        values = [list(x.blocks) if type(x) is Blocks else x for x in tensors]
        step(*values) if recorder is None else recorder.effect(step, *values)


def _seen(x: Any) -> Any:
    """A value as it is printed: out of transforms, whole outside of bodies."""
    if not isinstance(x, torch.Tensor):
        return x
    whole = unshard(x.detach()) if is_array(x) and not torch_internals.transforming() else x
    inner = torch_internals.peel(whole).detach()
    return unshard(inner) if is_array(inner) else inner


class _Print:
    """Prints when it is called with the tensors, each a tensor or the list of the simulated ranks' blocks."""

    def __init__(self, form: str, leaves: list[Any], treedef: Any, mesh: Any) -> None:
        self.form, self.treedef, self.mesh = form, treedef, mesh
        self.leaves = [_HERE if isinstance(x, torch.Tensor) else x for x in leaves]

    def __call__(self, *tensors: Any) -> None:
        if self.mesh is None:
            if not dist.is_initialized() or dist.get_rank() == 0:
                print(self._text(tensors))
            return
        communicator = communicator_of(self.mesh)
        same = (
            communicator.holds_blocks and max((len(x) for x in tensors if isinstance(x, (list, tuple))), default=1) == 1
        )
        for at, rank in enumerate(communicator.ranks[:1] if same else communicator.ranks):
            mine = [x[at] if isinstance(x, (list, tuple)) else x for x in tensors]
            print(self._text(mine) if same else f"[{self._place(rank)}] {self._text(mine)}", flush=True)

    def _place(self, rank: int) -> str:
        return ", ".join(f"{name}={coordinates(self.mesh, rank)[name]}" for name in axes_of(self.mesh))

    def _text(self, tensors: Any) -> str:
        values = iter(tensors)
        args, kwargs = tree.unflatten(self.treedef, [next(values) if x is _HERE else x for x in self.leaves])
        try:
            return self.form.format(*args, **kwargs)
        except (IndexError, KeyError, ValueError, TypeError) as error:
            raise TransformError(
                report(
                    "debug_print",
                    f"the form {self.form!r} does not fit the values",
                    [str(error)],
                    '"{}" for each value, "{name}" for one by name; "{:.3f}" for a 0-d tensor',
                )
            ) from None


_HERE = object()
