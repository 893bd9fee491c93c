"""Choices of a large program within a memory, by prices of bytes; and what all choices take at least.

Without rows of memory the linear relaxation of a program is mostly whole, and found again in a moment where costs change; with
them it is neither. So what is held at the worst moments gets a price, by which solutions hold less; prices are best where these
take most, their bytes above the memory paid for. That bounds what any choices within the memory take (Lagrange). Between
solutions at neighbouring prices there is a gap: of the options that occur in any of them, which are few, the best whole ones
are found with rows of memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .held import HeldBytes
from .highs import Deadline, OutOfTime, highs, is_infeasible, run, solver_of
from .others import Best
from .solver import PROVEN, WHOLE, Choices

_CLOSE = 1e-3  # of the seconds: how near to the best prices will do
_ROUNDS = 40  # of prices
# Times what the fastest choices take: what it costs to need the memory twice, raised by this factor up to that.
_PENALTY, _RAISED, _MOST = 2.0, 8.0, 128.0
_STEADY = 0.3  # the share of the best prices so far in those that are tried next
_ROWS = 8  # times that moments are added
_EXACT = 1e-7  # of the memory: to which a solver keeps rows
_NODES = 200  # of a tree of whole numbers


class _Point(NamedTuple):
    """A solution of the relaxed program at some prices.

    Attributes:
        bound: what all choices within the memory cost at least, in the solver's units.
        x: the shares of columns.
    """

    bound: float
    x: np.ndarray


class Priced:
    """The search for choices within a memory.

    Args:
        choices: the program, without rows of memory.
        holds: what its options and moves hold.
        memory: in bytes.
        deadline: of all solutions.
    """

    def __init__(self, choices: Choices, holds: HeldBytes, memory: float, deadline: Deadline) -> None:
        self.choices, self.smallest = choices, np.inf
        self._holds, self._memory, self._deadline = holds, max(memory, 1.0), deadline
        self._cost = np.array(choices.lp(np.ones(len(choices.cost))).col_cost_)
        self._rows: dict[int, np.ndarray] = {}  # of moments the share of the memory that each column holds
        self._prices: dict[int, float] = {}  # of the memory at these moments
        self._kernel = np.zeros(choices.integers, dtype=bool)  # options that occur
        self._best: tuple[float, float, list[int]] | None = None  # seconds, bytes, choices

    def first(self) -> Best | None:
        """The fastest choices that fit, of those that were found.

        Raises:
            OutOfTime: none were found in the time.
        """
        free = self._at({})
        if free is None:
            return None
        chosen = self._noted(free)
        if self._best is not None and not _is_broken(free.x[: self.choices.integers]):
            return Best(chosen, self._best[0], self._best[1], True, True, self._best[0])
        bound = free.bound
        try:
            bound = self._set_prices(free)
            self._in_whole()
        except OutOfTime:
            if self._best is None:
                raise
        return self._found(bound)

    def bound(self, without: Sequence[int], most: float) -> float:
        """As of `others.ChoiceSolver`."""
        with self.choices.without(without):
            found = self._at(self._prices, most)
            if found is None:
                return np.inf
            self._noted(found)
            return found.bound / self.choices.scale

    def without(self, columns: Sequence[int]) -> Best | None:
        """As of `others.ChoiceSolver`."""
        self._best = None
        with self.choices.without(columns):
            found = self._at(self._prices)
            if found is not None:
                self._noted(found)
                self._in_whole()
        return self._found(-np.inf if found is None else found.bound)

    def _found(self, bound: float) -> Best | None:
        if self._best is None:
            return None
        seconds, peak, chosen = self._best
        least = min(bound / self.choices.scale, seconds)
        return Best(chosen, seconds, peak, False, seconds - least <= PROVEN * seconds, least)

    def _at(self, prices: Mapping[int, float], most: float = np.inf) -> _Point | None:
        """The relaxed optimum at some prices, from where the last one ended; None if there is none, or none below `most`."""
        solver, every = self.choices.relaxed(), np.arange(len(self._cost), dtype=np.int32)
        cost = sum((price * self._rows[moment] for moment, price in prices.items()), self._cost)
        paid = sum(prices.values())
        solver.changeColsCost(len(cost), every, cost)
        bound = self.choices.bounded(self._deadline, most + paid / self.choices.scale)
        if bound == np.inf:
            return None
        return _Point(bound * self.choices.scale - paid, np.array(solver.getSolution().col_value))

    def _noted(self, point: _Point) -> list[int]:
        """The choices of a solution, which are remembered, if they are the best, and its options."""
        shares = point.x[: self.choices.integers]
        self._kernel |= shares > WHOLE
        return self._kept(shares)

    def _kept(self, shares: np.ndarray) -> list[int]:
        chosen = self.choices.chosen(shares)
        moments = self._holds.by_moment(chosen)
        moment = int(moments.argmax())
        peak, seconds = float(moments[moment]), self.choices.program.seconds(chosen)
        if peak <= self._memory:
            if self._best is None or seconds < self._best[0]:
                self._best = seconds, peak, chosen
        elif moment not in self._rows:
            entries, row = self.choices.held(*self._holds.row(moment)), np.zeros(len(self._cost))
            row[[*entries]] = [size / self._memory for size in entries.values()]
            self._rows[moment] = row
        self.smallest = min(self.smallest, peak)
        return chosen

    def _set_prices(self, free: _Point) -> float:
        """The best prices, and what all choices cost at least by them."""
        unit, tried, bound = max(free.bound, 1.0), [free.x], -np.inf
        penalty = _PENALTY * unit
        for _ in range(_ROUNDS):
            moments = [*self._rows]
            costs = np.array([self._cost @ x for x in tried])
            needs = np.array([[self._rows[moment] @ x for moment in moments] for x in tried])
            value, new, over = _mixed(costs, needs, penalty)
            if value - bound <= _CLOSE * abs(value):
                if over <= WHOLE or penalty >= _MOST * unit:
                    break
                penalty *= _RAISED
                continue
            steady = _STEADY if self._prices else 0.0
            prices = {
                moment: steady * self._prices.get(moment, 0.0) + (1 - steady) * price
                for moment, price in zip(moments, new, strict=True)
            }
            point = self._at(prices)
            assert point is not None
            if point.bound > bound:
                bound, self._prices = point.bound, prices
            tried.append(point.x)
            self._noted(point)
            if self._best is not None and self._best[0] - bound / self.choices.scale <= _CLOSE * self._best[0]:
                break
        return max(bound, free.bound)

    def _in_whole(self) -> None:
        """The best whole options of those that occur, with as many rows of memory as it takes."""
        choices, count = self.choices, self.choices.integers
        upper = np.ones(len(self._cost))
        upper[:count] = self._kernel
        lp = choices.lp(upper)
        kind = np.full(count, int(highs().HighsVarType.kInteger), dtype=np.uint8)
        for _ in range(_ROWS):
            solver, known = solver_of(lp), len(self._rows)
            solver.setOptionValue("mip_rel_gap", _CLOSE)
            solver.setOptionValue("mip_max_nodes", _NODES)
            solver.changeColsIntegrality(count, np.arange(count, dtype=np.int32), kind)
            for row in self._rows.values():
                columns = np.flatnonzero(row).astype(np.int32)
                solver.addRow(-np.inf, 1 - _EXACT, len(columns), columns, row[columns])
            run(solver, self._deadline)
            if is_infeasible(solver) or not solver.getSolution().value_valid:
                return
            self._kept(np.array(solver.getSolution().col_value[:count]))
            if len(self._rows) == known:
                return


def _is_broken(shares: np.ndarray) -> bool:
    return bool(np.any(np.minimum(shares, 1 - shares) > WHOLE))


def _mixed(costs: np.ndarray, needs: np.ndarray, penalty: float) -> tuple[float, np.ndarray, float]:
    """Of a mixture of solutions that takes the memory, or more at a penalty: what it costs, what the memory is worth at each
    moment, and by how much it is exceeded."""
    count, moments = needs.shape
    h, rows = highs(), np.zeros((moments + 1, count + 1))
    rows[:moments, :count], rows[:moments, count], rows[moments, :count] = needs.T, -1.0, 1.0
    lp = h.HighsLp()
    lp.num_col_, lp.num_row_ = count + 1, moments + 1
    lp.col_cost_ = np.append(costs, penalty)
    lp.col_lower_, lp.col_upper_ = np.zeros(count + 1), np.full(count + 1, np.inf)
    lp.row_lower_, lp.row_upper_ = np.append(np.full(moments, -np.inf), 1.0), np.ones(moments + 1)
    lp.a_matrix_.format_ = h.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.arange(0, rows.size + 1, count + 1, dtype=np.int32)
    lp.a_matrix_.index_ = np.tile(np.arange(count + 1, dtype=np.int32), moments + 1)
    lp.a_matrix_.value_ = rows.ravel()
    solver = solver_of(lp)
    solver.run()
    solution = solver.getSolution()
    worth = np.maximum(0.0, -np.array(solution.row_dual[:moments]))
    return solver.getInfo().objective_function_value, worth, solution.col_value[count]
