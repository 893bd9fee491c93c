"""`ChosenLayout`, the answer of `auto`: the layout that it chose, the next best ones, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .._core.arrays.placement import shard
from .._core.base import context, tree
from .._core.base.errors import SpecError, VfnError
from .._core.base.messages import mesh_text, report
from .._core.distributed.comm_log import CommLog
from .._core.distributed.mesh import make_mesh
from .._core.sharding.spec import P
from ..hardware import Hardware
from ..plan.ir.memory_use import MemoryUse
from ..plan.jit import Jitted, jit
from ..schedules import Schedule
from .agreed import check
from .apply import applied
from .as_written import does_not_run, fewest_lines, priced_ways
from .choice_explained import explained
from .choice_report import choice_text, dotted, shown
from .given import as_given
from .price import price
from .price_drawing import side_by_side
from .price_report import Price, Prices
from .recording import Recording
from .rules_text import Rule, rules_of
from .scheduled import chosen_of, scheduled
from .search.layouts import Layouts
from .step_timeline import StepTimeline
from .verified import Verified, specs_of
from .written import MoveToWrite


class ChosenLayout:
    """A layout of a step, chosen among many; made by `auto`. It prints as a table of the best ones.

    Args:
        recorded: the traced step.
        ranked: layouts with the prices of their plans, the best first.
        hardware: that they are priced for.
        budget: the memory limit of a rank, in bytes; None: no limit.
        again: repeats the search on a mesh with the specs of some placeholders, by number, fixed: a layout with its predicted
            ``seconds``, ``compute`` and ``bytes``.
        donated: the arguments, by position, whose memory a call may use up.

    Attributes:
        microbatches: the number of microbatches, where that was chosen, too.
        in_other_parts: the best layouts for other numbers of microbatches, the best first.
        left_out: the meshes that were not searched, each with the reason.
    """

    microbatches: int | None = None
    in_other_parts: tuple[ChosenLayout, ...] = ()
    left_out: tuple[str, ...] = ()

    def __init__(
        self,
        recorded: Recording,
        ranked: Sequence[Verified],
        hardware: Hardware,
        budget: float | None = None,
        again: Callable[[Mapping[str, int], dict[int, P]], Any] | None = None,
        donated: Sequence[int] = (),
    ) -> None:
        self.recorded, self.hardware, self.budget, self.donated = recorded, hardware, budget, tuple(donated)
        self.ranked, self._again = tuple(ranked), again
        self._written = ranked[0].written
        self.layouts: Layouts = ranked[0].layouts

    # --- the layout ---------------------------------------------------------------------------------------------------

    def mesh(self) -> Any:
        """The mesh of the layout, made of the available ranks (`make_mesh`); all of them must call this, and must have chosen
        the same layout.

        Raises:
            DivergenceError: they have not.
        """
        made = make_mesh(tuple(self.layouts.mesh.values()), tuple(self.layouts.mesh))
        check(made, self.layouts, self.recorded.name)
        return made

    @property
    def specs(self) -> tuple[Any, ...]:
        """The layout of the arguments: a tree of specs for each, by position."""
        return specs_of(self.recorded, self.layouts)

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of the step's pipeline, to be written as ``schedule=``, where it was chosen, too: for a step that says
        ``schedule="auto"`` and runs in stages; else None."""
        chosen = chosen_of(self.ranked[0].step)
        return None if chosen is None else chosen.schedule

    def shard(self, *args: Any, mesh: Any = None) -> Any:
        """The first arguments of the step, sharded as chosen: a single one as itself, several as a tuple."""
        specs = self.specs[: len(args)]
        if len(args) > len(specs):
            what = f"{len(args)} arguments, and the step was recorded with {len(self.specs)}"
            raise SpecError(report("choice.shard", what, fix="choice.shard(params, state), with arguments by position"))
        found = shard(args, self.mesh() if mesh is None else mesh, specs)
        return found[0] if len(args) == 1 else found

    def rules(self, argument: int = 0) -> list[Rule]:
        """The specs of an argument's leaves, as a few rules for `spec_from_rules` to paste: (regular expression, spec)."""
        return rules_of(dict(zip(dotted(self.recorded.call.args[argument]), tree.leaves(self.specs[argument]))))

    @property
    def moves(self) -> list[MoveToWrite]:
        """The lines to write besides the `rules`, so that the step gets this layout by itself: none where the rules alone are
        enough, or where a step was given. `written` is the price of the step with these lines, `pasted` without them.

        Raises:
            TransformError: the step does not run a second time, or not on arrays.
        """
        return list(getattr(self._as_written.step, "lines", ()))

    @property
    def written(self) -> Price:
        """The price of the step with its arguments laid out by the `rules`, and with all `moves` written into it: the price of
        this layout, wherever that is as fast as what the search found."""
        return self._as_written.price

    @property
    def _as_written(self) -> Verified:
        """The best way to write the step; found on first use, where it is not known yet."""
        one = self.ranked[0]
        if one.step is not None:
            return one
        if self._written is None:
            of = priced_ways(self.recorded, one, self.hardware, self.budget, self.donated)
            self._written = fewest_lines(of)
        return self._written

    @property
    def pasted(self) -> Price:
        """The price of the step as it is, with its arguments laid out by the `rules`, and its calls by the sharding rules:
        without the rest of this choice, before any of its `moves` are written.

        Raises:
            TransformError: it does not run so, as where the carry of a scan would leave it in another layout.
        """
        try:
            return self.compare(pasted=self.specs)[1]
        except VfnError as error:
            raise does_not_run("choice.pasted", self.recorded.name, "with the rules alone", error) from error

    def applied(self, mesh: Any = None) -> Callable[..., Any]:
        """The step in this layout as a function that runs eagerly; on the mesh of its arguments, where none is given."""
        if (step := self.ranked[0].step) is not None:
            return as_given(step, self.specs, self.layouts.mesh, mesh)
        return applied(self.recorded, self.layouts, mesh)

    def jit(self, mesh: Any = None, **how: Any) -> Jitted[..., Any]:
        """The step in this layout as a plan; `how`: the arguments of `jit`. The arguments that were donated in its price are
        donated here, too. Where the priced plan was held to a memory limit, so is this one, by ``memory=``: on simulated
        ranks, to the memory of all of them together."""
        memory = self.ranked[0].memory
        held = memory and memory * (context.simulated() or 1)
        return jit(self.applied(mesh), **{"donate_argnums": self.donated, "memory": held, **how})

    # --- what it costs ------------------------------------------------------------------------------------------------

    @property
    def predicted(self) -> Price:
        """The predicted price of the step: seconds by part, bytes by axis, memory."""
        return self.ranked[0].price

    def timeline(self) -> StepTimeline:
        """The predicted timeline of the step: when it computes, when it waits, and what is sent over which axes meanwhile."""
        return self.predicted.timeline()

    def memory(self) -> MemoryUse:
        """The memory of one rank, call by call."""
        return self.predicted.memory

    def comms(self) -> CommLog:
        """The collectives of a step, as `comm_log` lists them."""
        return self.predicted.comms

    @property
    def others(self) -> tuple[ChosenLayout, ...]:
        """The next best layouts, and the best ones for other numbers of `microbatches`."""
        return (*(self.of([one]) for one in self.ranked[1:]), *self.in_other_parts)

    def of(self, ranked: Sequence[Verified]) -> ChosenLayout:
        """A choice of other layouts of the step, the best first."""
        found = ChosenLayout(self.recorded, ranked, self.hardware, self.budget, self._again, self.donated)
        found.microbatches, found.left_out = self.microbatches, self.left_out
        return found

    def compare(self, *specs: Any, mesh: Mapping[str, int] | None = None, **named: Any) -> Prices:
        """The price of the step as it is, with its arguments in other layouts, beside this choice.

        Args:
            specs: each as for `price`: a tuple with a spec, or a prefix tree, for each argument.
            mesh: for these; by default, that of the choice.
            named: the same, with names for the table.
        """
        rows = {**{f"other {i + 1}": one for i, one in enumerate(specs)}, **named}
        on = dict(self.layouts.mesh if mesh is None else mesh)
        how = {"mesh": on, "hardware": self.hardware, "donate_argnums": self.donated}
        step = scheduled(self.recorded.f, chosen_of(self.ranked[0].step))
        of = lambda one: price(step, *self.recorded.call.args, specs=one, **how)
        prices = {name: one if isinstance(one, Price) else of(one) for name, one in rows.items()}
        return replace(self.predicted, name="chosen").compare(**prices)

    # --- why ----------------------------------------------------------------------------------------------------------

    def explain(self, what: str) -> str:
        """Why something has its layout: for an argument, its other layouts with what they would cost; for a line, its calls.

        Args:
            what: a path of the parameters, ``"blocks.0.mlp.up"``, or of another argument, ``"state.mean.blocks.0.mlp.up"``; a
                regular expression for paths, ``r"mlp\\.up$"``; or a line, ``"model.py:12"``.

        Raises:
            SpecError: nothing has this name.
        """
        return explained(self.recorded, self.layouts, self.predicted, self._again, what)

    # --- as a table ---------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        parts = [(one.microbatches, one.layouts.mesh, one.predicted) for one in self.in_other_parts]
        text = choice_text(self.recorded, self.ranked, self.hardware, self.budget, self.microbatches, parts)
        unwritten = [f"  not as it would be written: {why}"] if (why := self.ranked[0].unwritten) else []
        return "\n".join((text, *(f"  not searched: {one}" for one in self.left_out), *unwritten))

    def _repr_html_(self) -> str:
        name = lambda n, one: ": ".join(filter(None, (f"{n}", mesh_text(one.layouts.mesh), one.name)))
        prices = [replace(one.price, name=name(n, one)) for n, one in shown(self.ranked)]
        return side_by_side(prices, repr(self))
