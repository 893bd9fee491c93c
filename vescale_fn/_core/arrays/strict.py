"""`strict`: moves of data that nobody asked for, and draws from torch's global generator, raise."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import context, op_lines
from ..base.errors import ReshardError
from ..base.messages import axes_text, op_text, report
from ..base.op_arguments import tensors_in
from ..base.source_lines import quoted, spelled
from ..base.stateful_draws import refuse_seeded
from ..sharding.index_map import axes_of
from ..sharding.layout import text, type_text
from ..sharding.spec import P
from .reshard_plan import MoveStep, traffic

_MOVES = ("all_gather", "all_to_all")


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Inside this ``with`` block, a move of data that the program did not ask for raises, and so does a stateful draw.

    Moves that `shard`, `with_sharding`, `unshard` or a collective name are asked for, and so are those of their gradients.
    A gather that an op needs because of how its arguments lie is not: the error names the op, its arguments, the bytes
    that would travel, and the `with_sharding` to paste. Sums are asked for by what is computed: a partial sum is added up
    where it is first needed whole, and `comm_log` shows where.

    A draw from torch's global generator (``torch.rand(3)``, ``F.dropout``, ``x.normal_()``), on arrays or on plain tensors,
    depends on what was drawn before, and each rank has a generator of its own: the error names the keyed call.

    Raises:
        ReshardError: an op needs an argument to lie otherwise.
        RandomError: something draws from torch's global generator.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(2):
    ...     x = vfn.shard(torch.arange(4.0), vfn.make_mesh((2,), ("dp",)), P("dp"))
    ...     with vfn.strict():
    ...         y = x * 2  # nothing moves
    ...         try:
    ...             y = x.cumsum(0)
    ...         except vfn.errors.ReshardError as error:
    ...             print(str(error).splitlines()[-1])
      Instead: x = vfn.with_sharding(x, P()) before it
    """
    undo = functools.partial(torch_internals.set_ambient, torch_internals.ambient())
    with context.setting_and_undoing(undo, strict=True), op_lines.noted(), context.UnlessDropped(_Watch()):
        yield


class _Watch(torch_internals.TorchDispatchMode):
    """Looks at every op, and carries it out as it is."""

    only_looks = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_seeded(func, args, kwargs or {})
        return func(*args, **kwargs or {})


def refuse_moves(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], moves: Sequence[tuple[int, tuple[MoveStep, ...], P]]
) -> None:
    """Raise where an op would move some of its tensors: which one, by which steps, to which layout."""
    tensors = tensors_in(args, kwargs)
    bad = [
        (i, steps, target)
        for i, steps, target in moves
        if isinstance(tensors[i], DTensor) and any(step.kind in _MOVES for step in steps)
    ]
    if not bad:
        return
    line, backward = op_lines.here()
    words = _argument_names(func, args, kwargs)
    failures, ways = [], []
    for i, steps, target in bad:
        x, word = tensors[i], words[i]
        name, own = (None if backward else spelled(x)) or (word, False)
        who = f"its argument {word}" if name == word else f"{name}, its argument {word},"
        sent = traffic(tuple(x.shape), axes_of(torch_internals.mesh(x)), steps, x.element_size())
        how = ", ".join(f"{kind.replace('_', '-')} over {axes_text(axes)}: {n:,} bytes" for kind, axes, n in sent)
        needed = type_text(x.shape, x.dtype, target)
        failures.append(f"{who} is {text(x)} and would have to be {needed} ({how} on each rank)")
        stated = f"vfn.with_sharding({name}, {target!r})"
        ways.append(f"{name} = {stated} before it" if own else f"{stated} in place of {name}")
    if backward:
        raise ReshardError(
            report(
                op_text(func),
                "strict: the backward pass needs a move of data that the program did not ask for",
                [*failures, f"for the gradient of {quoted(line)}"],
                "with_sharding of what this line takes or gives, so that its gradient lies as it needs to",
            )
        )
    raise ReshardError(
        report(
            op_text(func),
            "strict: this op needs a move of data that the program did not ask for",
            [*failures, f"at {quoted(line)}"],
            "; ".join(ways),
        )
    )


def _argument_names(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """What each tensor among an op's arguments is called."""
    names = [*(a.name for a in torch_internals.schema(func).arguments[: len(args)]), *kwargs]
    found = []
    for name, a in zip(names, (*args, *kwargs.values())):
        if isinstance(a, (list, tuple)):
            found += [f"{name}[{i}]" for i, x in enumerate(a) if isinstance(x, torch.Tensor)]
        elif isinstance(a, torch.Tensor):
            found.append(name)
    return found
