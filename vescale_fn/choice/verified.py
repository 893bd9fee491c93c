"""The best layouts of a search, checked: each is recorded as a plan on a mesh without ranks, with all passes, and priced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .._core.base import tree
from .._core.base.errors import SpecError, TransformError, VfnError
from .._core.base.messages import report
from .._core.sharding.spec import P
from ..hardware import Hardware
from ..plan.ir.memory_use import bytes_text
from ..plan.jit import jit
from .apply import applied
from .held_to import Holding
from .price import Price, price
from .recording import Recording
from .search.best import NothingFits
from .search.highs import OutOfTime
from .search.layouts import Layouts
from .search.replaced import replaced

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
        memory: the bytes to which its plan is held (`jit`), where it would need more by itself.
        step: to be run as it is written, with its arguments as `layouts` says; None: the recorded one, carried out in
            `layouts`.
        written: of one that is carried out call by call: its step as it is best written, with the price of that, where that
            was asked for.
        unwritten: in words, why that was not found; "" where it was, or was not asked for.
    """

    layouts: Layouts
    found: Any
    price: Price
    fits: bool
    name: str = ""
    memory: int | None = None
    step: Callable[..., Any] | None = None
    written: Verified | None = None
    unwritten: str = ""

    @property
    def held(self) -> str:
        """How its plan is held to the memory, in words; "" where nothing has to be done for that."""
        return "" if self.memory is None else self.price.repeated.text()

    @property
    def given(self) -> str:
        """What one that was given is called."""
        return self.name and f"{self.name}, as given"

    @property
    def said(self) -> str:
        """What it is besides how the arguments lie, in words: whose layout, and how it is held to the memory."""
        return "; ".join(filter(None, (self.given, self.held)))


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

    Those that need more than the memory are held to it, as `jit` does, by computing values again (`held_to`); so the search
    is asked without a bound, too. Where every plan needs more all the same, the search gets a bound that is lower by as
    much, or in proportion, whichever is higher, and searches again. Where it finds nothing, though a plan may need less than it
    predicts, the bound is raised.

    Args:
        recorded: the step.
        hardware: that it is priced for.
        memory: the most bytes that a rank may need; None: any.
        solve: the search, of ``memory=`` alone: layouts with predicted ``seconds``.
        rounds: how often it may search; 0: only the others are ranked.
        donate: the arguments by position whose memory a call may use up.
        others: layouts with their prices that are ranked beside those of the search.

    Raises:
        VfnError: no plan within the memory was found, or the time was too short to find any.
    """
    found, seen = list[Verified](), set[Any]()
    fitting, beyond = _free(solve, memory) if rounds else ([], [])
    bound, failure, lowered = memory, None, False
    for _ in range(rounds):
        new, missing = (fitting, None) if fitting else _within(solve, bound)
        failure = failure or missing
        new = [one for one in (*new, *beyond) if (key := _key(one.layouts)) not in seen and not seen.add(key)]
        found += [_priced(recorded, one, hardware, memory, donate) for one in new]
        fitting, beyond = [], []
        if memory is None or bound is None or _any_fits(found) or (missing and lowered):
            break
        if isinstance(missing, OutOfTime):  # which it would be again
            break
        if not missing:
            lowered = True
        bound = bound * _RAISED if missing else _lower(bound, memory, found)
    found += others
    Holding(memory, functools.partial(_held_to, recorded, hardware=hardware, donate=donate)).some_of(found)
    if not _any_fits(found):
        raise (_does_not_fit(recorded, found, memory, failure) if found or failure is None else failure)
    return ranked(found)


def _any_fits(found: Sequence[Verified]) -> bool:
    return any(one.fits for one in found)


def _within(solve: Callable[..., Sequence[Any]], bound: float | None) -> tuple[Sequence[Any], VfnError | None]:
    """What is found within a bound; or why nothing is."""
    try:
        return solve(memory=bound), None
    except (NothingFits, OutOfTime) as error:
        return [], error


def _lower(bound: float, memory: float, found: Sequence[Verified]) -> float:
    """The bound for which plans may fit where none does now: what is found again is not priced again."""
    least = min(one.price.peak for one in found)
    return min(max(bound - (least - memory), bound * memory / least), (1 - _NEARLY) * bound)


def _free(solve: Callable[..., Sequence[Any]], memory: float | None) -> tuple[list[Any], list[Any]]:
    """The best layouts of all: where the best is predicted to fit, it is what a bound would give, too, and those count that fit
    beside it; else the better half of them, which may yet fit."""
    if memory is None:
        return [], []
    try:
        free = [*solve(memory=None)]
    except (NothingFits, OutOfTime):
        return [], []
    fits = [one for one in free if one.bytes <= memory]
    return (fits, []) if fits[:1] == free[:1] else ([], free[: -(-len(free) // 2)])


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
) -> Verified:
    """The layout whose arguments lie so, and whose calls run as the rules vote; what replaces an argument lies as it does."""
    ends = replaced(recorded)
    outputs = tuple(inputs[ends[r]] if r in ends else None for r in range(len(recorded.results)))
    layouts = Layouts(dict(mesh), tuple(inputs), {}, outputs)
    cost = priced_as(recorded, layouts, hardware, donate)
    return Verified(layouts, None, cost, memory is None or cost.peak <= memory)


def _key(layouts: Layouts) -> Any:
    return tuple(layouts.mesh.items()), layouts.inputs, layouts.outputs, tuple(layouts.calls.items()), layouts.keeps


def _priced(
    recorded: Recording, found: Any, hardware: Hardware, memory: float | None, donate: Sequence[int]
) -> Verified:
    try:
        cost = priced_as(recorded, found.layouts, hardware, donate)
    except SpecError:  # a call that its rule does not allow to be split so after all: its arguments may still lie well
        return stated(recorded, found.layouts.inputs, found.layouts.mesh, hardware, memory, donate)
    return Verified(found.layouts, found, cost, memory is None or cost.peak <= memory)


def _held_to(
    recorded: Recording, one: Verified, memory: int, hardware: Hardware, donate: Sequence[int]
) -> Verified | None:
    """A layout whose plan is held to some memory; None where no plan is found that is."""
    try:
        cost = priced_as(recorded, one.layouts, hardware, donate, memory, one.step)
    except (TransformError, SpecError):
        return None
    return replace(one, price=cost, fits=cost.peak <= memory, memory=memory)


def priced_as(
    recorded: Recording,
    layouts: Layouts,
    hardware: Hardware,
    donate: Sequence[int] = (),
    memory: int | None = None,
    step: Callable[..., Any] | None = None,
) -> Price:
    """What a step costs that is carried out in a layout, or one that states its own; `memory`: as of `jit`."""
    step = applied(recorded, layouts) if step is None else step
    return price(
        jit(step, donate_argnums=tuple(donate), memory=memory),
        *recorded.call.args,
        specs=specs_of(recorded, layouts),
        mesh=dict(layouts.mesh),
        hardware=hardware,
    )


def specs_of(recorded: Recording, layouts: Layouts) -> tuple[Any, ...]:
    """How the arguments lie, a tree of specs for each by position."""
    lies = {at: spec for at, spec in zip(recorded.leaves, layouts.inputs) if at is not None and spec is not None}
    leaves, treedef = tree.flatten(recorded.call.args)
    return tree.unflatten(treedef, [lies.get(i, P()) for i in range(len(leaves))])


def _does_not_fit(
    recorded: Recording, found: Sequence[Verified], memory: float | None, failure: VfnError | None
) -> NothingFits:
    least = min((one.price.peak for one in found), default=0)
    what = f"no plan of {recorded.name} that was found needs as little as {bytes_text(int(memory or 0))}"
    over = f"the least needs {bytes_text(least)}, {bytes_text(int(least - (memory or 0)))} more"
    held = "to compute values again, as jit(memory=...) does it, did not save as much in those that were tried"
    late = ["the search for others within the memory ended with its time, seconds="] * isinstance(failure, OutOfTime)
    fix = f"memory={bytes_text(least)!r}, more ranks, or microbatches=, so that there is a part of the batch at a time"
    return NothingFits(report("auto", what, [over, held, *late], fix))
