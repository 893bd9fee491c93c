"""Python of one rank's program for all that are here: a loop over ranks between two collectives, in which a call stands once.

What ranks hold of a value is a list, with one entry for those that hold the same; what all of them hold is no list. In a loop
each goes through the entries in turn; what several ranks share is computed by the first of them, and let go by the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ..._core.distributed.collectives import Collective
from ..._core.distributed.rows import Holders, together
from ..ir.graph import AT_ONCE, HOLDERS, calls, output
from ..ir.per_rank import PerRank
from ..ir.rank_runs import firsts, runs
from ..ir.ranks_as_one import RanksAsOne
from .codegen import Writer, name_of_global

_ONE = "i"  # what counts the turns of a loop


class RankLoops(Writer):
    """Writes the function of one rank's program, for all.

    Args:
        ranks: what it is of them.
    """

    def __init__(self, ranks: RanksAsOne) -> None:
        super().__init__({})
        self.ranks = ranks
        self.taken.add(_ONE)
        self.lists: dict[fx.Node, str] = {}
        self.last: dict[Any, Any] = {}
        self.lie: dict[Any, Any] = {}
        self.lines: list[str] = []
        self.nodes: dict[int, fx.Node] = {}
        self.loop: _Loop | None = None

    def write(self, graph: fx.Graph, name: str) -> tuple[str, dict[int, fx.Node]]:
        self.taken.add(name)
        for node in graph.nodes:
            self.names[node] = self.fresh(node.name)
            if any(_holders(node)):
                self.lists[node] = self.fresh(f"{node.name}s")
        apart = {node for x, node in self.parts(graph).items() if _holders(x) != _holders(node)}
        self.together = {x: node for x, node in self.together.items() if node not in apart}
        self.together.update((x, node) for node in calls(graph) if AT_ONCE in node.meta for x in node.users)
        stretches = runs(graph)
        self.until: dict[fx.Node, int] = {}  # of each value, the last run that needs it
        for i, run in enumerate((*stretches, [output(graph)])):
            self.until.update((x, i) for node in run if node not in self.together for x in node.all_input_nodes)
        self.lines.append(f"def {name}(values):")
        self._inputs([node for node in graph.nodes if node.op == "placeholder"])
        for i, run in enumerate(stretches):
            if isinstance(run[0].target, Collective):
                self._collective(run[0], i)
            elif AT_ONCE in run[0].meta:
                self._on_lists(run[0], i)
            else:
                self._run(run, i)
        self._results(output(graph))
        return "\n".join(self.lines) + "\n", self.nodes

    def text(self, x: Any) -> str:
        if isinstance(x, fx.Node):
            if self.loop is None:
                return f"*{self.lists[x]}" if x in self.lists else self.names[x]
            return self.loop.text(x)
        if isinstance(x, PerRank):
            assert self.loop is not None
            return self.loop.number(x)
        return super().text(x)

    def kept(self, node: fx.Node, target: str, call: str) -> str:
        if self.loop is not None and node in self.loop.listed_alone:
            return f"{self.lists[node]}.append({call})"
        return target + call

    def _add(self, line: str, node: fx.Node | None = None) -> None:
        self.lines.append("    " + line)
        if node is not None:
            self.nodes[len(self.lines)] = node

    def _inputs(self, given: Sequence[fx.Node]) -> None:
        for node, places in zip(given, self.ranks.places, strict=True):
            at = list(dict.fromkeys(places))
            if not node.users:
                continue
            if node not in self.lists:
                self._add(f"{self.names[node]} = values[{at[0]}]")
            elif at == list(range(at[0], at[-1] + 1)):
                self._add(f"{self.lists[node]} = values[{at[0]}:{at[-1] + 1}]")
            else:
                self._add(f"{self.lists[node]} = [{', '.join(f'values[{i}]' for i in at)}]")
        self._add("values.clear()")

    def _collective(self, node: fx.Node, i: int) -> None:
        given, n = node.args[0], self.ranks.count
        assert isinstance(given, fx.Node)
        if given not in self.lists:
            blocks = f"[{self.names[given]}] * {n}"
        elif _holders(given) == tuple(range(n)):
            blocks = self.lists[given]
        else:
            blocks = f"[{', '.join(f'{self.lists[given]}[{k}]' for k in _holders(given))}]"
        call = f"{self.globally(node.target, name_of_global(node.target))}({blocks})"
        if not node.users:
            line = call
        elif node not in self.lists:
            line = f"{self.names[node]} = {call}[0]"
        elif _holders(node) == tuple(range(n)):
            line = f"{self.lists[node]} = [*{call}]"
        else:
            parts = ", ".join(f"given[{rank}]" for rank in firsts(_holders(node)))
            line = f"given = {call}; {self.lists[node]} = [{parts}]; del given"
        self._add(line + self._dead(node, i), node)

    def _on_lists(self, node: fx.Node, i: int) -> None:
        """A call on lists, for all ranks."""
        line, n = self.call(node), len(firsts(_holders(node)))
        if node.users:
            parts = [
                f"{self.lists[x]} = [*given[{x.args[1] * n}:{x.args[1] * n + n}]]"  # type: ignore[operator]
                if x in self.lists
                else f"{self.names[x]} = given[{x.args[1]}]"
                for x in node.users
            ]
            line = f"given = {line}; {'; '.join(parts)}; del given"
        self._add(line + self._dead(node, i), node)

    def _dead(self, node: fx.Node, i: int) -> str:
        """How what nothing needs behind a run is let go."""
        dead = [self.lists.get(x, self.names[x]) for x in node.all_input_nodes if self.until[x] == i]
        return f"; del {', '.join(dead)}" if dead else ""

    def _run(self, run: Sequence[fx.Node], i: int) -> None:
        self.loop = _Loop(self, run, i)
        for line, node in self.loop.written():
            self._add(line, node)
        self.loop = None

    def _results(self, end: fx.Node) -> None:
        given: Any = end.args[0]
        taken, texts = dict[Any, Any](), list[str]()
        for place, rank, same in self.ranks.results:
            node, number = given[place], _holders(given[place])[rank]
            text = f"{self.lists[node]}[{number}]" if node in self.lists else self.names[node]
            if taken.setdefault((node, number), same) != same:  # each has memory of its own
                text += ".clone()"
            texts.append(text)
        self._add(f"return ({''.join(f'{text}, ' for text in texts)})", end)


class _Loop:
    """What ranks do between two collectives.

    Args:
        writer: writes it.
        run: the calls, in order.
        place: of the run, among all.
    """

    def __init__(self, writer: RankLoops, run: Sequence[fx.Node], place: int) -> None:
        self.writer, self.run = writer, [node for node in run if node not in writer.together]
        self.place = place
        parts = (x for node in self.run for x in node.users if x in writer.together)
        self.made = dict.fromkeys([*self.run, *parts])
        # in each turn what these ranks hold is gone through
        self.all = together(frozenset(map(_holders, self.run or run)))
        self.turns = firsts(self.all)
        self.columns: dict[Any, tuple[str, tuple[Any, ...]]] = {}
        self.at: Holders = self.all  # which ranks the call that is being written is one for
        self.lines: list[tuple[str, fx.Node | None]] = []
        self.users: dict[fx.Node, list[fx.Node]] = {}
        for node in self.run:
            for x in node.all_input_nodes:
                self.users.setdefault(x, []).append(node)
        self.kept = {x for x in self.made if x in writer.lists and (self._stays(x) or self._is_read_by_others(x))}

        # which only lists hold: no call of the same ranks needs them here
        self.listed_alone = {
            x
            for x in self.kept
            if x not in writer.together and not any(_holders(user) == _holders(x) for user in self.users.get(x, ()))
        }

    def written(self) -> list[tuple[str, fx.Node | None]]:
        """Its lines, each with what runs there."""
        ends = self._ends()
        block: Any = None
        for node in self.run:
            self.at = _holders(node)
            endings, after = ends.get(node, ((), ()))
            indent = "" if self.at == self.all else "    "
            if indent and block != self.at:
                self.lines.append((f"if {self._first(self.at)}:", None))
            block = self.at
            self.lines.append((indent + self.writer.line(node, endings), node))
            for holders, gone in after:
                self.lines.append((f"if {self._last(holders)}: {gone}", None))
                block = None
        if len(self.turns) == 1 or not self.run:
            return self.lines
        lists = [f"{self.writer.lists[x]} = []" for x in self.made if x in self.kept]
        head: list[tuple[str, fx.Node | None]] = [("; ".join(lists), None)] if lists else []
        return [*head, (self._header(), None), *(("    " + line, node) for line, node in self.lines)]

    def _header(self) -> str:
        if not self.columns or list(self.columns) == [("index", self.all)]:
            return f"for {_ONE} in range({len(self.turns)}):"
        names, rows = zip(*self.columns.values())
        if len(names) == 1:
            return f"for {names[0]} in {self.writer.globally(rows[0], 'turns', key=rows)}:"
        turns = tuple(zip(*rows))
        return f"for {', '.join(names)} in {self.writer.globally(turns, 'turns', key=turns)}:"

    # what is written of a value

    def text(self, x: fx.Node) -> str:
        """A value where a call of `at` is written."""
        if x not in self.writer.lists or (x in self.made and _holders(x) == self.at):
            return self.writer.names[x]
        return self._slot(x)

    def number(self, x: PerRank) -> str:
        """A number of each rank."""
        values = [x.values[rank] for rank in self.turns]
        return self._column("number", x.values, values) if len(values) > 1 else str(values[0])

    def _slot(self, x: fx.Node) -> str:
        return f"{self.writer.lists[x]}[{self._index(_holders(x))}]"

    def _index(self, holders: Holders) -> str:
        places = [holders[rank] for rank in self.turns]
        return self._column("index", holders, places) if len(places) > 1 else str(places[0])

    def _first(self, holders: Holders) -> str:
        of_turns = [holders[rank] for rank in self.turns]
        return self._column("first", holders, [k not in of_turns[:i] for i, k in enumerate(of_turns)])

    def _last(self, holders: Holders) -> str:
        of_turns = [holders[rank] for rank in self.turns]
        return self._column("last", holders, [k not in of_turns[i + 1 :] for i, k in enumerate(of_turns)])

    def _column(self, kind: str, of: Any, values: Sequence[Any]) -> str:
        if (kind, of) not in self.columns:
            name = _ONE if (kind, of) == ("index", self.all) else self.writer.fresh(kind)
            self.columns[kind, of] = name, tuple(values)
        return self.columns[kind, of][0]

    # what becomes of values

    def _stays(self, x: fx.Node) -> bool:
        """Whether a value is needed behind this run."""
        return self.writer.until.get(x, -1) > self.place

    def _is_read_by_others(self, x: fx.Node) -> bool:
        return any(_holders(user) != _holders(x) for user in self.users.get(x, ()))

    def _ends(self) -> dict[fx.Node, tuple[list[str], list[tuple[Holders, str]]]]:
        """For each call what is done behind it: there, or in the last turn of some ranks."""
        found: dict[fx.Node, tuple[list[str], list[tuple[Holders, str]]]] = {}
        place = {node: i for i, node in enumerate(self.run)}
        at = lambda node: found.setdefault(node, ([], []))
        for x in self.made:
            maker = self.writer.together.get(x, x)
            if x in self.kept - self.listed_alone:
                at(maker)[0].append(f"{self.writer.lists[x]}.append({self.writer.names[x]})")
        for x in dict.fromkeys([*self.users, *(x for x in self.made if x in self.kept)]):
            users = self.users.get(x, [])
            maker = [self.writer.together.get(x, x)] if x in self.made else []
            own = [user for user in users if _holders(user) == _holders(x)]
            if x in self.writer.lists and x in self.made and x not in self.listed_alone:
                last = max([*own, *maker], key=place.__getitem__)
                at(last)[0].append(f"del {self.writer.names[x]}")
            local = x in self.made and x in self.writer.lists and x not in self.kept
            if local or self._stays(x) or not users:
                continue
            last = max(users, key=place.__getitem__)
            if len(own) == len(users) or len(self.turns) == 1:
                at(last)[0].append(self._gone(x))
            else:
                at(last)[1].append((_holders(x), self._gone(x)))
        return found

    def _gone(self, x: fx.Node) -> str:
        if x in self.writer.lists and len(self.turns) == 1:  # of which one rank's part is looked at, for all
            return f"{self.writer.lists[x]}.clear()"
        return f"{self._slot(x)} = None" if x in self.writer.lists else f"del {self.writer.names[x]}"


def _holders(node: fx.Node) -> Holders:
    return node.meta[HOLDERS]
