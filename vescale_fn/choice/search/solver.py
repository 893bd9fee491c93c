"""The integer program of choices, for HiGHS: one option of each site, one way for each value between two of them.

The linear relaxation comes first, which is integral for most steps; where it is not, HiGHS branches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._core.base.errors import VfnError
from ..._core.base.messages import report
from .fusing import Row, rows_of
from .options import Layout
from .program import Group, Program

_SMALL = 20_000  # columns of a program that is solved to the last digit, if it is not integral
_TIES = 1e-7  # of the whole cost: what the order of options may weigh


def highs() -> Any:
    """The solver.

    Raises:
        VfnError: it is not installed.
    """
    try:
        import highspy
    except ImportError:
        what = "the solver HiGHS is not installed"
        raise VfnError(report("auto", what, fix="pip install 'vescale_fn[auto]', or pip install highspy")) from None
    return highspy


class OutOfTime(VfnError):
    """The solver found nothing in the time that it had."""


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
        entries: Counter[int] = Counter()
        for key, size in options.items():
            for column in self.columns.get(key, ()):
                entries[column] += size
        for key, size in moves.items():
            if key in self.moved:
                entries[self.moved[key]] += size
        scale = max(entries.values(), default=1.0)
        self.rows.append(([*entries], [size / scale for size in entries.values()], -np.inf, most / scale))

    def solve(self, seconds: float = 60.0) -> tuple[list[int] | None, float, bool]:
        """The best options, what they cost, and whether the relaxation gave them; None if there are none."""
        solver = self._solver(seconds)
        solver.run()
        kinds, relaxed = highs().HighsModelStatus, True
        if solver.getModelStatus() == kinds.kInfeasible:
            return None, float("inf"), True
        x = np.array(solver.getSolution().col_value[: self.integers])
        if np.any(np.minimum(x, 1 - x) > 1e-6) or solver.getModelStatus() != kinds.kOptimal:
            relaxed, columns = False, np.arange(self.integers, dtype=np.int32)
            kind = np.full(self.integers, int(highs().HighsVarType.kInteger), dtype=np.uint8)
            solver.changeColsIntegrality(self.integers, columns, kind)
            solver.run()
            if solver.getModelStatus() == kinds.kInfeasible:
                return None, float("inf"), False
            if not np.isfinite(solver.getInfo().objective_function_value) or not solver.getSolution().value_valid:
                what = f"the solver found no layout in {seconds:g} s"
                raise OutOfTime(report("auto", what, fix="more time, seconds=; or specs that are given, fixed="))
            x = np.array(solver.getSolution().col_value[: self.integers])
        chosen = [0] * len(self.program.sites)
        for a, b in zip(self.starts, self.starts[1:]):
            for n, k in self.choices[a + int(np.argmax(x[a:b]))].items():
                chosen[n] = k
        return chosen, self.program.seconds(chosen), relaxed

    def _solver(self, seconds: float) -> Any:
        h = highs()
        lp = h.HighsLp()
        scale = 1e6  # microseconds
        cost = np.array(self.cost) * scale
        lp.num_col_, lp.num_row_ = len(cost), len(self.rows)
        order = np.zeros(len(cost))
        for a, b in zip(self.starts, self.starts[1:]):
            order[a:b] = np.arange(b - a)
        lp.col_cost_ = cost + order * _TIES
        lp.col_lower_, lp.col_upper_ = np.zeros(len(cost)), np.ones(len(cost))
        lp.row_lower_ = np.array([row[2] for row in self.rows])
        lp.row_upper_ = np.array([row[3] for row in self.rows])
        lp.a_matrix_.format_ = h.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(row[0]) for row in self.rows)], dtype=np.int32)
        lp.a_matrix_.index_ = np.array([k for row in self.rows for k in row[0]], dtype=np.int32)
        lp.a_matrix_.value_ = np.array([v for row in self.rows for v in row[1]])
        solver = h.Highs.__base__()  # without callbacks, whose making prints a banner
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("time_limit", seconds)
        solver.setOptionValue("mip_rel_gap", 1e-9 if len(cost) < _SMALL else 1e-3)
        solver.passModel(lp)
        return solver
