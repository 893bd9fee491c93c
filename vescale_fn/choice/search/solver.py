"""The integer program of choices, for HiGHS: one option of each site, one way for each value between two of them.

The linear relaxation comes first, which is integral for most steps; where it is not, HiGHS branches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._core.base.errors import VfnError
from ..._core.base.messages import report
from .options import Layout
from .program import Group, Program

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


class Choices:
    """The integer program: variables in columns.

    Attributes:
        first: of each site the column of its first option.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.cost: list[float] = []
        self.first: list[int] = []
        self.rows: list[tuple[list[int], list[float], float, float]] = []
        for site in program.sites:
            self.first.append(len(self.cost))
            self.cost += [site.count * option.seconds for option in site.options]
            columns = range(self.first[-1], len(self.cost))
            self.rows.append(([*columns], [1.0] * len(columns), 1.0, 1.0))
        self.integers = len(self.cost)
        self.moved: dict[tuple[int, Layout, Layout], int] = {}
        for n, group in enumerate(program.groups):
            self._group(n, group)

    def _column(self, cost: float) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1

    def _group(self, n: int, group: Group) -> None:
        program, site = self.program, self.program.sites[group.site]
        made: dict[Any, list[int]] = defaultdict(list)
        for k, option in enumerate(site.options):
            made[option.outs[group.part]].append(self.first[site.number] + k)
        shared: dict[Any, int] = {}
        for edge in group.edges:
            wanted: dict[Any, list[int]] = defaultdict(list)
            for k in range(len(program.sites[edge.site].options)):
                wanted[program.target(edge, k)].append(self.first[edge.site] + k)
            wanted.pop(None, None)
            if not wanted:
                continue
            out, into = {a: list[int]() for a in made}, {b: list[int]() for b in wanted}
            for a in made:
                for b in wanted:
                    price = program.price(group, a, b)
                    if len(group.edges) > 1 and price:
                        if (a, b) not in shared:
                            shared[a, b] = self.moved[n, a, b] = self._column(price)
                        way = self._column(0.0)
                        self.rows.append(([way, shared[a, b]], [1.0, -1.0], -np.inf, 0.0))
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
        columns = [self.first[n] + chosen[n] for n in sites]
        self.rows.append((columns, [1.0] * len(columns), -np.inf, len(columns) - 1.0))

    def bound(self, options: Any, moves: Any, most: float) -> None:
        """What options and moves hold together is at most that."""
        entries = [(self.first[n] + k, size) for (n, k), size in options.items()]
        entries += [(self.moved[key], size) for key, size in moves.items() if key in self.moved]
        scale = max((size for _, size in entries), default=1.0)
        self.rows.append(([k for k, _ in entries], [size / scale for _, size in entries], -np.inf, most / scale))

    def solve(self, seconds: float = 60.0) -> tuple[list[int] | None, float, bool]:
        """The best options, what they cost, and whether the relaxation gave them; None if there are none."""
        solver = self._solver(seconds)
        solver.run()
        status = solver.getModelStatus()
        kinds = highs().HighsModelStatus
        if status == kinds.kInfeasible:
            return None, float("inf"), True
        x = np.array(solver.getSolution().col_value[: self.integers])
        relaxed = bool(np.all(np.minimum(x, 1 - x) < 1e-6)) and status == kinds.kOptimal
        if not relaxed:
            columns = np.arange(self.integers, dtype=np.int32)
            kind = np.full(self.integers, int(highs().HighsVarType.kInteger), dtype=np.uint8)
            solver.changeColsIntegrality(self.integers, columns, kind)
            solver.run()
            if solver.getModelStatus() == kinds.kInfeasible:
                return None, float("inf"), False
            x = np.array(solver.getSolution().col_value[: self.integers])
        ends = [*self.first[1:], self.integers]
        chosen = [int(np.argmax(x[a:b])) for a, b in zip(self.first, ends)]
        return chosen, self.program.seconds(chosen), relaxed

    def _solver(self, seconds: float) -> Any:
        h = highs()
        lp = h.HighsLp()
        scale = 1e6  # microseconds
        cost = np.array(self.cost) * scale
        lp.num_col_, lp.num_row_ = len(cost), len(self.rows)
        order = np.zeros(len(cost))
        for a, b in zip(self.first, [*self.first[1:], self.integers]):
            order[a:b] = np.arange(b - a)
        lp.col_cost_ = cost + order * _TIES
        lp.col_lower_, lp.col_upper_ = np.zeros(len(cost)), np.ones(len(cost))
        lp.row_lower_ = np.array([row[2] for row in self.rows])
        lp.row_upper_ = np.array([row[3] for row in self.rows])
        lp.a_matrix_.format_ = h.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(row[0]) for row in self.rows)], dtype=np.int32)
        lp.a_matrix_.index_ = np.array([k for row in self.rows for k in row[0]], dtype=np.int32)
        lp.a_matrix_.value_ = np.array([v for row in self.rows for v in row[1]])
        solver = h.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("time_limit", seconds)
        solver.setOptionValue("mip_rel_gap", 1e-9)
        solver.passModel(lp)
        return solver
