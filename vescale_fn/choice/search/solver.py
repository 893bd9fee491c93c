"""The integer program of choices, solved: the linear relaxation comes first, which is integral for most steps; where it is
not, HiGHS branches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .columns import ProgramColumns
from .highs import Deadline, OutOfTime, highs, is_infeasible, run, solver_of

PROVEN = 1e-3  # of the cost, within which choices of a larger program count as the best
WHOLE = 1e-6  # from which on a share of an option counts
_SMALL = 20_000  # columns of a program that is solved to the last digit, if it is not integral
_NEAR = 5e-3  # of the cost: what a larger one may miss


@dataclass(frozen=True)
class Solved:
    """Options that a solver found.

    Attributes:
        chosen: of each site the number of its option.
        seconds: what they cost.
        relaxed: whether the linear relaxation gave them, without a branch.
        proven: whether there are no better ones; time may have been too short to tell.
        least: seconds that all choices cost at least.
    """

    chosen: list[int]
    seconds: float
    relaxed: bool
    proven: bool
    least: float


class _Whole(NamedTuple):
    """Shares of options that are none or all, what they cost, and whether there are no better ones."""

    x: np.ndarray
    cost: float
    proven: bool


class Choices(ProgramColumns):
    """The integer program, and its best choices."""

    def bounded(self, deadline: Deadline, most: float = np.inf) -> float:
        """What all choices cost at least, by the relaxation; inf where there are none, or where that is more than `most`.

        Raises:
            OutOfTime: it was not found.
        """
        solver, kinds = self.relaxed(), highs().HighsModelStatus
        solver.setOptionValue("objective_bound", most * self.scale)
        try:
            run(solver, deadline)
        finally:
            solver.setOptionValue("objective_bound", np.inf)
        if is_infeasible(solver) or solver.getModelStatus() == kinds.kObjectiveBound:
            return np.inf
        if solver.getModelStatus() != kinds.kOptimal:
            raise deadline.error()
        return solver.getInfo().objective_function_value / self.scale

    def solve(self, deadline: Deadline, near: bool = False) -> Solved | None:
        """The best options; None if there are none. What was solved before is where it begins. `near`: of a large program
        those among options of which the relaxation has a share will do, if there are any.

        Raises:
            OutOfTime: it found none.
        """
        solver = self.relaxed()
        run(solver, deadline)
        if is_infeasible(solver):
            return None
        if solver.getModelStatus() != highs().HighsModelStatus.kOptimal:
            if not deadline.left:
                raise deadline.error()
            return self._best(self._whole(np.ones(len(self.cost)), deadline))  # without a relaxation that it trusts
        x = np.array(solver.getSolution().col_value[: self.integers])
        if not np.any(np.minimum(x, 1 - x) > WHOLE):
            return self._solved(x, relaxed=True, proven=True)
        return self._branched(solver, x, deadline, near and self.is_large)

    def _branched(self, relaxed: Any, x: np.ndarray, deadline: Deadline, near: bool) -> Solved | None:
        """The best whole options: at first among those of which the relaxation has a share, then among all that may be
        better than these, by what the relaxation says that each of them costs more at least."""
        least = relaxed.getInfo().objective_function_value
        more = np.array(relaxed.getSolution().col_dual)
        shares = np.ones(len(self.cost))
        shares[: self.integers][x < WHOLE] = 0.0
        first = self._whole(shares, deadline)
        if near:
            return None if first is None else self._solved(first.x, False, False, least)
        if first is None:
            return self._best(self._whole(np.ones(len(self.cost)), deadline))
        gap = first.cost - least
        if gap <= max(self._gap, _NEAR if self.is_large else 0.0) * abs(first.cost):
            return self._solved(first.x, False, gap <= self._gap * abs(first.cost), least)
        try:
            second = self._whole(np.where(more > gap * (1 + 1e-6), 0.0, 1.0), deadline)
        except OutOfTime:
            return self._solved(first.x, False, False, least)
        better = second is not None and second.cost <= first.cost
        return self._solved((second if better else first).x, False, second is None or second.proven, least)  # type: ignore[union-attr]

    def _best(self, found: _Whole | None) -> Solved | None:
        return None if found is None else self._solved(found.x, False, found.proven)

    def _whole(self, upper: np.ndarray, deadline: Deadline) -> _Whole | None:
        """The best whole options among columns with these upper limits; None if there are none."""
        solver = solver_of(self.lp(upper))
        solver.setOptionValue("mip_rel_gap", self._gap)
        kind = np.full(self.integers, int(highs().HighsVarType.kInteger), dtype=np.uint8)
        solver.changeColsIntegrality(self.integers, np.arange(self.integers, dtype=np.int32), kind)
        run(solver, deadline)
        if is_infeasible(solver):
            return None
        cost = solver.getInfo().objective_function_value
        if not np.isfinite(cost) or not solver.getSolution().value_valid:
            raise deadline.error()
        found = np.array(solver.getSolution().col_value[: self.integers])
        return _Whole(found, cost, solver.getModelStatus() == highs().HighsModelStatus.kOptimal)

    @property
    def is_large(self) -> bool:
        """Whether what is found may be a little off the best."""
        return len(self.cost) >= _SMALL

    @property
    def _gap(self) -> float:
        return PROVEN if self.is_large else 1e-9

    def _solved(self, x: np.ndarray, relaxed: bool, proven: bool, least: float = 0.0) -> Solved:
        """Whole options; `least`: what all cost at least, in the solver's units."""
        chosen = self.chosen(x)
        seconds = self.program.seconds(chosen)
        exact = relaxed or (proven and not self.is_large)
        return Solved(chosen, seconds, relaxed, proven, seconds if exact else min(least / self.scale, seconds))
