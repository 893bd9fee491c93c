"""The columns and rows of choices, for HiGHS: one option of each site, one way for each value between two of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .fusing import Row, rows_of
from .highs import highs, solver_of
from .options import Layout
from .program import Group, Program

_SCALE = 1e6  # microseconds
_LEAST = 1e5  # what a step costs at least in the solver's units, whose tolerance is 1e-7
_TIES = 2e-12  # of that: what the order of options may weigh


class ProgramColumns:
    """The integer program: variables in columns.

    Attributes:
        cost: of each column.
        rows: of each inequality the columns, their factors, and the limits.
        moved: of moves, by the number of the group and both layouts, the column.
        closed: columns that may not be taken.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.cost: list[float] = []
        self.rows: list[tuple[list[int], list[float], float, float]] = []
        self.moved: dict[tuple[int, Layout, Layout], int] = {}
        self.closed = set[int]()
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

    @contextmanager
    def without(self, columns: Iterable[int]) -> Iterator[None]:
        """Some columns may not be taken, in the meantime."""
        new = np.array([*{*columns} - self.closed], dtype=np.int32)
        solver, lower = self.relaxed(), np.zeros(len(new))
        solver.changeColsBounds(len(new), new, lower, lower)
        self.closed.update(new.tolist())
        try:
            yield
        finally:
            self.closed.difference_update(new.tolist())
            solver.changeColsBounds(len(new), new, lower, np.ones(len(new)))

    def bound(self, options: Any, moves: Any, most: float) -> None:
        """What options and moves hold together is at most that."""
        entries = self.held(options, moves)
        scale = max(entries.values(), default=1.0)
        self.rows.append(([*entries], [size / scale for size in entries.values()], -np.inf, most / scale))

    def only_worst(self) -> int:
        """Nothing costs but the worst moment: its column."""
        self.cost = [0.0] * len(self.cost)
        return self._column(1.0)

    def weigh(self, options: Any, moves: Any, worst: int, unit: float) -> None:
        """What options and moves hold together is at most the worst moment, counted in this unit."""
        entries = self.held(options, moves)
        sizes = [size / unit for size in entries.values()]
        self.rows.append(([*entries, worst], [*sizes, -1.0], -np.inf, 0.0))

    def held(self, options: Any, moves: Any) -> Counter[int]:
        """Of columns the bytes that they hold."""
        entries: Counter[int] = Counter()
        moving = {n for n, _, _ in self.moved}
        for key, size in options.items():
            for column in self.columns.get(key, ()):
                entries[column] += size
        for (n, a, b), size in moves.items():
            if (n, a, b) in self.moved:
                entries[self.moved[n, a, b]] += size
            elif a == b and n not in moving:  # chosen as one with who reads it
                group = self.program.groups[n]
                for k, option in enumerate(self.program.sites[group.site].options):
                    if option.outs[group.part] == a:
                        for column in self.columns.get((group.site, k), ()):
                            entries[column] += size
        return entries

    def chosen(self, x: np.ndarray) -> list[int]:
        """Of each site the number of the option that has the largest of these shares."""
        chosen = [0] * len(self.program.sites)
        for a, b in zip(self.starts, self.starts[1:]):
            for n, k in self.choices[a + int(np.argmax(x[a:b]))].items():
                chosen[n] = k
        return chosen

    def relaxed(self) -> Any:
        """The solver of the linear relaxation, with its last solution."""
        if self._solver is None:
            self._solver, self._known = solver_of(self.lp(np.ones(len(self.cost)))), len(self.rows)
        for columns, factors, low, high in self.rows[self._known :]:
            self._solver.addRow(low, high, len(columns), np.array(columns, dtype=np.int32), np.array(factors))
        self._known = len(self.rows)
        return self._solver

    @property
    def scale(self) -> float:
        """The solver's units of cost in a second."""
        return max(_SCALE, _LEAST / self._least) if self._least > 0 else _SCALE

    @property
    def _least(self) -> float:
        """What the cheapest options cost together."""
        return sum(min(self.cost[a:b]) for a, b in zip(self.starts, self.starts[1:]))

    def lp(self, upper: np.ndarray) -> Any:
        """The linear program, with these upper limits."""
        h = highs()
        lp = h.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.cost), len(self.rows)
        order = np.zeros(len(self.cost))
        for a, b in zip(self.starts, self.starts[1:]):
            order[a:b] = np.arange(b - a)
        lp.col_cost_ = np.array(self.cost) * self.scale + order * _TIES * max(self._least * self.scale, _LEAST)
        upper = upper.copy()
        upper[[*self.closed]] = 0.0
        lp.col_lower_, lp.col_upper_ = np.zeros(len(self.cost)), upper
        lp.row_lower_ = np.array([row[2] for row in self.rows])
        lp.row_upper_ = np.array([row[3] for row in self.rows])
        lp.a_matrix_.format_ = h.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(row[0]) for row in self.rows)], dtype=np.int32)
        lp.a_matrix_.index_ = np.array([k for row in self.rows for k in row[0]], dtype=np.int32)
        lp.a_matrix_.value_ = np.array([v for row in self.rows for v in row[1]])
        return lp
