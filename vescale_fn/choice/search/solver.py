"""The integer program of choices, for HiGHS: one option of each site, one way for each value between two of them.

The linear relaxation comes first, which is integral for most steps; where it is not, HiGHS branches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .fusing import Row, rows_of
from .highs import Deadline, OutOfTime, highs, run, solver_of
from .options import Layout
from .program import Group, Program

_SMALL = 20_000  # columns of a program that is solved to the last digit, if it is not integral
_NEAR = 5e-3  # of the cost: what a larger one may miss
_SCALE = 1e6  # microseconds
_WHOLE = 1e-6  # from which on a share of an option counts
_LEAST = 1e5  # what a step costs at least in the solver's units, whose tolerance is 1e-7
_TIES = 2e-12  # of that: what the order of options may weigh


@dataclass(frozen=True)
class Solved:
    """Options that a solver found.

    Attributes:
        chosen: of each site the number of its option.
        seconds: what they cost.
        relaxed: whether the linear relaxation gave them, without a branch.
        proven: whether there are no better ones; time may have been too short to tell.
    """

    chosen: list[int]
    seconds: float
    relaxed: bool
    proven: bool


class _Whole(NamedTuple):
    """Shares of options that are none or all, what they cost, and whether there are no better ones."""

    x: np.ndarray
    cost: float
    proven: bool


def _is_infeasible(solver: Any) -> bool:
    kinds = highs().HighsModelStatus
    return solver.getModelStatus() in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible)


class Choices:
    """The integer program: variables in columns.

    Attributes:
        cost: of each column.
        rows: of each inequality the columns, their factors, and the limits.
        moved: of moves, by the number of the group and both layouts, the column.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.cost: list[float] = []
        self.rows: list[tuple[list[int], list[float], float, float]] = []
        self.moved: dict[tuple[int, Layout, Layout], int] = {}
        self.starts = [0]
        self.choices: list[Row] = []
        self.columns: dict[tuple[int, int], list[int]] = defaultdict(list)  # of a site's options
        for rows in rows_of(program):
            for row in rows:
                for key in row.items():
                    self.columns[key].append(len(self.cost))
                sites = [(program.sites[n], k) for n, k in row.items()]
                self.cost.append(sum(site.count * site.options[k].seconds for site, k in sites))
            self.choices += rows
            columns = [*range(self.starts[-1], len(self.cost))]
            self.rows.append((columns, [1.0] * len(columns), 1.0, 1.0))
            self.starts.append(len(self.cost))
        self.integers = len(self.cost)
        self._solver: Any = None  # of the relaxation, which keeps its last solution
        self._known = 0  # the rows that it has
        for n, group in enumerate(program.groups):
            self._group(n, group)

    def _column(self, cost: float) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1

    def _group(self, n: int, group: Group) -> None:
        program, site = self.program, self.program.sites[group.site]
        made: dict[Any, list[int]] = defaultdict(list)
        for k, option in enumerate(site.options):
            made[option.outs[group.part]] += self.columns.get((site.number, k), [])
        made = {lies: columns for lies, columns in made.items() if columns}
        readers = dict[Any, dict[Any, list[int]]]()
        for edge in group.edges:
            wanted: dict[Any, list[int]] = defaultdict(list)
            for k in range(len(program.sites[edge.site].options)):
                wanted[program.target(edge, k)] += self.columns.get((edge.site, k), [])
            wanted.pop(None, None)
            wanted = {lies: columns for lies, columns in wanted.items() if columns}
            # what is chosen as one, and never moves; and what others read in just this way
            if wanted and wanted != made:
                readers[tuple((lies, *columns) for lies, columns in wanted.items())] = wanted
        for wanted in readers.values():
            self._flow(n, group, made, wanted, len(readers) > 1)

    def _flow(self, n: int, group: Group, made: Any, wanted: Any, shared: bool) -> None:
        """One way from how a value is made to how it is wanted."""
        out, into = {a: list[int]() for a in made}, {b: list[int]() for b in wanted}
        for a in made:
            for b in wanted:
                price = self.program.price(group, a, b)
                if shared and price:
                    if (n, a, b) not in self.moved:
                        self.moved[n, a, b] = self._column(price)
                    way = self._column(0.0)
                    self.rows.append(([way, self.moved[n, a, b]], [1.0, -1.0], -np.inf, 0.0))
                else:
                    way = self._column(price)
                    self.moved.setdefault((n, a, b), way)
                out[a].append(way)
                into[b].append(way)
        for ways, ends in ((out, made), (into, wanted)):
            for key, columns in ways.items():
                ones = [1.0] * len(columns) + [-1.0] * len(ends[key])
                self.rows.append((columns + ends[key], ones, 0.0, 0.0))

    def forbid(self, chosen: Sequence[int], sites: Sequence[int]) -> None:
        """No more of these sites' options together."""
        columns = Counter(column for n in sites for column in self.columns[n, chosen[n]])
        self.rows.append(([*columns], [float(x) for x in columns.values()], -np.inf, len(sites) - 1.0))

    def bound(self, options: Any, moves: Any, most: float) -> None:
        """What options and moves hold together is at most that."""
        entries = self._held(options, moves)
        scale = max(entries.values(), default=1.0)
        self.rows.append(([*entries], [size / scale for size in entries.values()], -np.inf, most / scale))

    def only_worst(self) -> int:
        """Nothing costs but the worst moment: its column."""
        self.cost = [0.0] * len(self.cost)
        return self._column(1.0)

    def weigh(self, options: Any, moves: Any, worst: int, unit: float) -> None:
        """What options and moves hold together is at most the worst moment, counted in this unit."""
        entries = self._held(options, moves)
        sizes = [size / unit for size in entries.values()]
        self.rows.append(([*entries, worst], [*sizes, -1.0], -np.inf, 0.0))

    def _held(self, options: Any, moves: Any) -> Counter[int]:
        """Of columns the bytes that they hold."""
        entries: Counter[int] = Counter()
        for key, size in options.items():
            for column in self.columns.get(key, ()):
                entries[column] += size
        for (n, a, b), size in moves.items():
            if (n, a, b) in self.moved:
                entries[self.moved[n, a, b]] += size
            elif a == b:  # chosen as one with who reads it
                group = self.program.groups[n]
                for k, option in enumerate(self.program.sites[group.site].options):
                    if option.outs[group.part] == a:
                        for column in self.columns.get((group.site, k), ()):
                            entries[column] += size
        return entries

    def solve(self, deadline: Deadline) -> Solved | None:
        """The best options; None if there are none. What was solved before is where it begins.

        Raises:
            OutOfTime: it found none.
        """
        solver = self._relaxed()
        run(solver, deadline)
        if _is_infeasible(solver):
            return None
        if solver.getModelStatus() != highs().HighsModelStatus.kOptimal:
            if not deadline.left:
                raise deadline.error()
            return self._best(self._whole(np.ones(len(self.cost)), deadline))  # without a relaxation that it trusts
        x = np.array(solver.getSolution().col_value[: self.integers])
        if not np.any(np.minimum(x, 1 - x) > _WHOLE):
            return self._solved(x, relaxed=True, proven=True)
        return self._branched(solver, x, deadline)

    def _branched(self, relaxed: Any, x: np.ndarray, deadline: Deadline) -> Solved | None:
        """The best whole options: at first among those of which the relaxation has a share, then among all that may be
        better than these, by what the relaxation says that each of them costs more at least."""
        least = relaxed.getInfo().objective_function_value
        more = np.array(relaxed.getSolution().col_dual)
        shares = np.ones(len(self.cost))
        shares[: self.integers][x < _WHOLE] = 0.0
        first = self._whole(shares, deadline)
        if first is None:
            return self._best(self._whole(np.ones(len(self.cost)), deadline))
        gap = first.cost - least
        if gap <= max(self._gap, _NEAR if len(self.cost) >= _SMALL else 0.0) * abs(first.cost):
            return self._solved(first.x, False, gap <= self._gap * abs(first.cost))
        try:
            second = self._whole(np.where(more > gap * (1 + 1e-6), 0.0, 1.0), deadline)
        except OutOfTime:
            return self._solved(first.x, False, False)
        better = second is not None and second.cost <= first.cost
        return self._solved((second if better else first).x, False, second is None or second.proven)  # type: ignore[union-attr]

    def _best(self, found: _Whole | None) -> Solved | None:
        return None if found is None else self._solved(found.x, False, found.proven)

    def _whole(self, upper: np.ndarray, deadline: Deadline) -> _Whole | None:
        """The best whole options among columns with these upper limits; None if there are none."""
        solver = solver_of(self._lp(upper))
        solver.setOptionValue("mip_rel_gap", self._gap)
        kind = np.full(self.integers, int(highs().HighsVarType.kInteger), dtype=np.uint8)
        solver.changeColsIntegrality(self.integers, np.arange(self.integers, dtype=np.int32), kind)
        run(solver, deadline)
        if _is_infeasible(solver):
            return None
        cost = solver.getInfo().objective_function_value
        if not np.isfinite(cost) or not solver.getSolution().value_valid:
            raise deadline.error()
        found = np.array(solver.getSolution().col_value[: self.integers])
        return _Whole(found, cost, solver.getModelStatus() == highs().HighsModelStatus.kOptimal)

    @property
    def _gap(self) -> float:
        return 1e-9 if len(self.cost) < _SMALL else 1e-3

    def _solved(self, x: np.ndarray, relaxed: bool, proven: bool) -> Solved:
        chosen = [0] * len(self.program.sites)
        for a, b in zip(self.starts, self.starts[1:]):
            for n, k in self.choices[a + int(np.argmax(x[a:b]))].items():
                chosen[n] = k
        return Solved(chosen, self.program.seconds(chosen), relaxed, proven)

    def _relaxed(self) -> Any:
        """The linear relaxation, with its last solution."""
        if self._solver is None:
            self._solver = solver_of(self._lp(np.ones(len(self.cost))))
        for columns, factors, low, high in self.rows[self._known :]:
            self._solver.addRow(low, high, len(columns), np.array(columns, dtype=np.int32), np.array(factors))
        self._known = len(self.rows)
        return self._solver

    def _lp(self, upper: np.ndarray) -> Any:
        h = highs()
        lp = h.HighsLp()
        ends = zip(self.starts, self.starts[1:])
        least = sum(min(self.cost[a:b]) for a, b in ends)
        scale = max(_SCALE, _LEAST / least) if least > 0 else _SCALE
        cost = np.array(self.cost) * scale
        lp.num_col_, lp.num_row_ = len(cost), len(self.rows)
        order = np.zeros(len(cost))
        for a, b in zip(self.starts, self.starts[1:]):
            order[a:b] = np.arange(b - a)
        lp.col_cost_ = cost + order * _TIES * max(least * scale, _LEAST)
        lp.col_lower_, lp.col_upper_ = np.zeros(len(cost)), upper
        lp.row_lower_ = np.array([row[2] for row in self.rows])
        lp.row_upper_ = np.array([row[3] for row in self.rows])
        lp.a_matrix_.format_ = h.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(row[0]) for row in self.rows)], dtype=np.int32)
        lp.a_matrix_.index_ = np.array([k for row in self.rows for k in row[0]], dtype=np.int32)
        lp.a_matrix_.value_ = np.array([v for row in self.rows for v in row[1]])
        self._known = len(self.rows)
        return lp
