"""Donated arguments: results are written into their memory, and a later use of them raises.

Around a call of a plan: `check` refuses, before anything runs, what cannot be given away; what is not `is_alone` in its
memory is `copied` first; `give_away` marks the tensors when the call is done. Which result is written where is decided on
the graph, by the pass `donate`.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..._core import torch_internals
from ..._core.base.errors import DonationError
from ..._core.base.messages import report
from ..._core.base.source_lines import quoted, readable
from ..._core.distributed.blocks import Blocks


@dataclass(frozen=True)
class Gift:
    """A call that was given values to keep: what was called, in which of the user's lines, and the values' names."""

    where: str
    line: str
    names: Sequence[str]


class Donated(torch.Tensor):
    """What a tensor becomes when its memory has been given away: any use of it raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _used((*args, *(kwargs or {}).values()))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"<{_facts(self)}>"

    __hash__ = object.__hash__  # type: ignore[assignment]  # what holds it can still be looked through


class DonatedArray(DTensor):
    """The same for an array."""

    __torch_function__ = Donated.__torch_function__  # type: ignore[assignment]
    __repr__ = Donated.__repr__  # type: ignore[assignment]
    __hash__ = object.__hash__  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _used((*args, *(kwargs or {}).values()))

    def to_local(self, **kwargs: Any) -> Any:
        raise _used([self])

    full_tensor = redistribute = to_local  # type: ignore[assignment]


def check(
    where: str,
    leaves: Iterable[Any],
    donated: Iterable[int],
    names: Sequence[str],
    constants: Iterable[torch.Tensor] = (),
) -> None:
    """Raise if a donated leaf of a call is also another of its leaves, or a tensor that the function closes over.

    Args:
        where: what is called, for the message.
        leaves: all leaves of the call, in order.
        donated: the places of the donated ones.
        names: the path and type of each leaf, ``params['w'] (f32[4,8])``.
        constants: what the function uses without being given it.

    Raises:
        DonationError: naming all such leaves.
    """
    leaves, held = list(leaves), set(map(id, constants))
    if len(ids := set(map(id, leaves))) == len(leaves) and held.isdisjoint(ids):
        return
    given = set(donated)
    places: dict[int, list[int]] = {}
    for place, x in enumerate(leaves):
        if isinstance(x, torch.Tensor):
            places.setdefault(id(x), []).append(place)
    wrong = [
        " is the same tensor as ".join(names[place] for place in same)
        for same in places.values()
        if len(same) > 1 and given.intersection(same)
    ]
    wrong += [
        f"{names[place]} is a tensor that the function closes over" for place in given if id(leaves[place]) in held
    ]
    if wrong:
        raise DonationError(
            report(
                where,
                "a donated argument must not be another argument too: results are written into its memory",
                wrong,
                "pass x.clone() in all places but one; or leave the argument out of donate_argnums",
            )
        )


def is_alone(leaf: torch.Tensor) -> bool:
    """Whether nothing else that is alive has the memory of a tensor or an array.

    Something else may be a view of it, what it is a view of, a numpy array, another array around the same block. It must
    keep its values: where there is such, `copied` is what the plan may write into. To be asked before the leaf is taken
    apart, since it counts who holds its parts.
    """
    if not isinstance(leaf, DTensor):
        return torch_internals.has_own_memory(leaf)
    if sys.getrefcount(torch_internals.local(leaf)) > 2:  # the array, and this call
        return False
    if type(torch_internals.local(leaf)) is not Blocks:
        return torch_internals.has_own_memory(torch_internals.local(leaf))
    blocks = torch_internals.local(leaf).blocks
    times = Counter(map(id, blocks))
    own = torch_internals.has_own_memory
    return all(sys.getrefcount(block) <= times[id(block)] + 2 and own(block) for block in blocks)


def copied(x: torch.Tensor) -> torch.Tensor:
    """A copy of a plain tensor, with the same strides and what lies between its elements, which `as_strided` may read; of an
    expanded one nothing, for no plan writes there."""
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape)):
        return x.detach()
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) if x.numel() else 0
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    out.as_strided((span,), (1,)).copy_(x.detach().as_strided((span,), (1,)))
    return out


def give_away(leaves: Iterable[torch.Tensor], gift: Gift) -> None:
    """Mark donated leaves: using one raises from now on, and it keeps no memory alive."""
    device, nothing = None, torch.empty(0)
    for index, x in enumerate(leaves):
        if x.device != device:
            device = x.device
            nothing = torch.empty(0, device=device)
        x._donated = gift, index  # type: ignore[attr-defined]
        if isinstance(x, DTensor):
            torch_internals.set_local(x, nothing)
            torch_internals.set_spec(x, _Gone(x))
            x.__class__ = DonatedArray
        else:
            torch_internals.set_data(x, nothing)
            x.__class__ = Donated


class _Gone:
    """Stands for the spec of a donated array: whatever asks for it raises."""

    def __init__(self, x: Any) -> None:
        self.x = weakref.ref(x)

    def __getattr__(self, name: str) -> Any:
        raise _used([self.x()])


def _facts(x: Any) -> str:
    gift, index = x.__dict__["_donated"]
    return f"{gift.names[index]}, donated to {gift.where} at {readable(gift.line)}"


def _used(args: Iterable[Any]) -> DonationError:
    todo = deque(args)
    while todo:
        x = todo.popleft()
        if isinstance(x, (Donated, DonatedArray)):
            gift, index = x.__dict__["_donated"]
            return DonationError(
                report(
                    gift.where,
                    f"{gift.names[index]} was donated to an earlier call, and its memory holds something else now",
                    [f"donated at {quoted(gift.line)}"],
                    "what that call returned; or, where the value is needed afterwards, give the call x.clone(), or leave the "
                    "argument out of donate_argnums",
                )
            )
        todo.extend(x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ())
    return DonationError(report("jit", "a donated value was used"))
