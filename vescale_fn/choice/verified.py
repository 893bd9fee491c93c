"""The best layouts of a search, checked: each is recorded as a plan on a mesh without ranks, with all passes, and priced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._core.base import tree
from .._core.base.errors import SpecError, TransformError
from .._core.base.messages import report
from .._core.sharding.spec import P
from ..hardware import Hardware
from ..plan.ir.memory_use import bytes_text
from .apply import applied
from .price import Price, price
from .recording import Recording
from .search.layouts import Layouts
from .search.search import NothingFits, replaced

_RAISED = 1.35  # times the bound, where the search finds nothing within it
_NEARLY = 0.02  # of the bound, by which it is lowered at least


@dataclass(frozen=True, eq=False)
class Verified:
    """A layout with what its plan costs.

    Attributes:
        layouts: itself.
        found: what the search predicted of it: ``seconds``, ``compute``, ``bytes``.
        price: of the plan.
        fits: whether a rank has the memory that it needs.
        name: of one that was given; "" of what the search found.
    """

    layouts: Layouts
    found: Any
    price: Price
    fits: bool
    name: str = ""


def verified(
    recorded: Recording,
    hardware: Hardware,
    memory: float | None,
    solve: Callable[..., Sequence[Any]],
    rounds: int = 5,
    donate: Sequence[int] = (),
    others: Sequence[Verified] = (),
) -> list[Verified]:
    """The layouts of a search, with the prices of their plans, the best first.

    Where every plan needs more than the memory, the search gets a bound that is lower by as much, or in proportion, whichever
    is higher, and searches again. Where it finds nothing, though a plan may need less than it
    predicts, the bound is raised.

    Args:
        recorded: the step.
        hardware: that it is priced for.
        memory: the most bytes that a rank may need; None: any.
        solve: the search, of ``memory=`` alone: layouts with predicted ``seconds``.
        rounds: how often it may search.
        donate: the arguments by position whose memory a call may use up.
        others: layouts with their prices that are ranked beside those of the search.

    Raises:
        VfnError: no plan within the memory was found.
    """
    bound, seen, found = memory, set[Any](), list[Verified]()
    failure: NothingFits | None = None
    for _ in range(rounds):
        try:
            new = [one for one in solve(memory=bound) if (key := _key(one.layouts)) not in seen and not seen.add(key)]
        except NothingFits as error:
            failure = failure or error
            if found or bound is None:
                break
            bound *= _RAISED
            continue
        found += [_priced(recorded, one, hardware, memory, donate) for one in new]
        if memory is None or bound is None or any(one.fits for one in found):
            break
        least = min(one.price.peak for one in found)  # what is found again is not priced again
        bound = min(max(bound - (least - memory), bound * memory / least), (1 - _NEARLY) * bound)
    found += others
    if not any(one.fits for one in found):
        raise (_does_not_fit(recorded, found, memory) if found or failure is None else failure)
    return ranked(found)


def ranked(found: Iterable[Verified]) -> list[Verified]:
    """Those that fit before those that do not, the fastest first; of equals that with fewer specs."""
    return sorted(
        found, key=lambda one: (not one.fits, one.price.seconds, _variety(one.layouts), repr(one.layouts.inputs))
    )


def _variety(layouts: Layouts) -> int:
    return len(set(layouts.inputs))


def stated(
    recorded: Recording,
    inputs: Sequence[P | None],
    mesh: Mapping[str, int],
    hardware: Hardware,
    memory: float | None,
    donate: Sequence[int] = (),
    name: str = "given",
) -> Verified:
    """The layout whose arguments lie so, and whose calls run as the rules vote; what replaces an argument lies as it does."""
    ends = replaced(recorded)
    outputs = tuple(inputs[ends[r]] if r in ends else None for r in range(len(recorded.results)))
    layouts = Layouts(dict(mesh), tuple(inputs), {}, outputs)
    cost = priced_as(recorded, layouts, hardware, donate)
    return Verified(layouts, None, cost, memory is None or cost.peak <= memory, name)


def _key(layouts: Layouts) -> Any:
    return tuple(layouts.mesh.items()), layouts.inputs, layouts.outputs, tuple(layouts.calls.items())


def _priced(
    recorded: Recording, found: Any, hardware: Hardware, memory: float | None, donate: Sequence[int]
) -> Verified:
    try:
        cost = priced_as(recorded, found.layouts, hardware, donate)
    except SpecError:  # a call that its rule does not allow to be split so after all: its arguments may still lie well
        return stated(recorded, found.layouts.inputs, found.layouts.mesh, hardware, memory, donate, "")
    return Verified(found.layouts, found, cost, memory is None or cost.peak <= memory)


def priced_as(recorded: Recording, layouts: Layouts, hardware: Hardware, donate: Sequence[int] = ()) -> Price:
    """What a step costs that is carried out in a layout."""
    if any(isinstance(x, torch.Tensor) for x in tree.leaves(recorded.call.kwargs)):
        what = "tensors given by name have no place among specs"
        raise TransformError(report("auto", what, fix="all tensors by position"))
    step = applied(recorded, layouts)
    given = functools.partial(step, **recorded.call.kwargs) if recorded.call.kwargs else step
    return price(
        given,
        *recorded.call.args,
        specs=specs_of(recorded, layouts),
        mesh=dict(layouts.mesh),
        hardware=hardware,
        donate_argnums=tuple(donate),
    )


def specs_of(recorded: Recording, layouts: Layouts) -> tuple[Any, ...]:
    """How the arguments lie, a tree of specs for each by position."""
    lies = {at: spec for at, spec in zip(recorded.leaves, layouts.inputs) if at is not None and spec is not None}
    leaves, treedef = tree.flatten(recorded.call.args)
    return tree.unflatten(treedef, [lies.get(i, P()) for i in range(len(leaves))])


def _does_not_fit(recorded: Recording, found: Sequence[Verified], memory: float | None) -> SpecError:
    least = min((one.price.peak for one in found), default=0)
    what = f"no plan of {recorded.name} that was found needs as little as {bytes_text(int(memory or 0))}"
    over = f"the least needs {bytes_text(least)}, {bytes_text(int(least - (memory or 0)))} more"
    return SpecError(
        report("auto", what, [over], f"memory={bytes_text(least)!r}, more ranks, or vfn.remat around layers")
    )
