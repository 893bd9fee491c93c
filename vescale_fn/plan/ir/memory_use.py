"""How much memory a plan needs, call by call, and what is alive where it needs most."""

from __future__ import annotations

import html
import math
import operator
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from ..._core.base.source_lines import quoted, readable
from ..._core.distributed.collectives import Collective, Start
from . import graph as plan
from . import memory_aliases
from .branches import Branches
from .collective_nodes import in_order_of_ranks
from .loop import EACH, LAST, Loop, eaten, loop_of
from .mapped import Mapped
from .nested import bodies_of
from .rotated_loop import OWN, Rotated
from .shared_bodies import Shared
from .sums_in_place import is_in_place


@dataclass(frozen=True)
class Moment:
    """A call, the user's line, and how many bytes are alive while it runs: its results, and all that is needed yet."""

    call: str
    line: str
    bytes: int


@dataclass(frozen=True)
class LineMemory:
    """What is alive: what was made in one of the user's lines (or came as an argument), in bytes and in pieces."""

    line: str
    bytes: int
    count: int


class MemoryUse:
    """The memory that a plan needs on one process, predicted: what ``vfn.jit(f).lower(...).memory()`` returns.

    Printing it names the peak and what is alive there; a notebook draws memory over time.

    Args:
        timeline: the calls in order, each with the bytes that are alive while it runs.
        arguments: the bytes of arguments and constants, alive all the time.
        held: what is alive at the peak, largest first.
    """

    def __init__(self, timeline: Iterable[Moment], arguments: int, held: Iterable[LineMemory]) -> None:
        self.timeline, self.arguments, self.held = tuple(timeline), arguments, tuple(held)

    @cached_property
    def peak(self) -> int:
        """The most bytes that are alive at once."""
        return max((moment.bytes for moment in self.timeline), default=self.arguments)

    @cached_property
    def at(self) -> Moment | None:
        """The first call at which the peak is reached; None where nothing is called."""
        return next((moment for moment in self.timeline if moment.bytes == self.peak), None)

    def __repr__(self) -> str:
        lines = [f"peak {bytes_text(self.peak)}, of which arguments {bytes_text(self.arguments)}"]
        if self.at is not None:
            index = self.timeline.index(self.at)
            lines.append(f"reached in call {index + 1} of {len(self.timeline)}, {self.at.call}, {place(self.at.line)}")
            lines.append(f"over time  {_sparks([moment.bytes for moment in self.timeline])}")
        if self.held:
            lines.append("alive at the peak, by the lines that made it:")
        lines += [f"  {bytes_text(h.bytes):>10}  {h.count:>4}  {place(h.line)}" for h in self.held[:_SHOWN]]
        if len(self.held) > _SHOWN:
            rest = self.held[_SHOWN:]
            lines.append(f"  {bytes_text(sum(h.bytes for h in rest)):>10}  {sum(h.count for h in rest):>4}  elsewhere")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"{_plot(self)}<pre>{html.escape(repr(self))}</pre>"


_SHOWN = 8  # lines of what is alive at the peak
ARGUMENTS = "arguments"


def memory(
    graph: fx.Graph,
    mortal: frozenset[fx.Node] = frozenset(),
    together: Mapping[fx.Node, tuple[fx.Node, int]] | None = None,
) -> MemoryUse:
    """The memory that a plan needs: each thing lives from the call that makes it to the last that needs any view of it.

    Arguments and constants are alive all the time: a donated argument's memory is what a result is written into.

    Args:
        mortal: arguments that nobody else needs, which are alive up to their last use.
        together: of arguments that lie in one memory with others, the first of these, and how many bytes it has.
    """
    alive = _Alive(graph, mortal, together or {})
    timeline = [Moment(call_text(node), node.meta.get("line", ""), now) for node, now in alive.at.items()]
    return MemoryUse(timeline, alive.arguments, _by_line(alive.held(), alive.deepest))


def alive_at(graph: fx.Graph) -> dict[fx.Node, int]:
    """The bytes that are alive while each call of a plan runs, in order: those of the timeline of `memory`."""
    return _Alive(graph, frozenset(), {}).at


class _Alive:
    """What is alive while each call runs.

    Attributes:
        at: how many bytes, by the call.
        arguments: those of arguments and constants.
        deepest: what is alive in the body that runs where the most is; None where none does.
    """

    def __init__(
        self, graph: fx.Graph, mortal: frozenset[fx.Node], together: Mapping[fx.Node, tuple[fx.Node, int]]
    ) -> None:
        lie = _lying_together(memory_aliases.memories(graph), together)
        last = memory_aliases.last_uses(graph, lie)
        ends: dict[fx.Node, list[memory_aliases.Memory]] = {}
        for piece, node in last.items():
            ends.setdefault(node, []).append(piece)
        one = dict(together.values())
        self.sizes = sizes = {piece: one.get(piece.maker, piece.bytes) for piece in last}
        self.at: dict[fx.Node, int] = {}
        self.deepest: MemoryUse | None = None
        live = top = 0
        self._begins: dict[memory_aliases.Memory, int] = {}  # how many calls there are before
        self._stops: dict[memory_aliases.Memory, int] = {}
        self._top = -1  # the call at which the most is alive
        within: dict[Any, MemoryUse] = {}  # by bodies, and which of their arguments die there
        for node in graph.nodes:
            if node.op == "output":
                break
            if node.target is operator.getitem:  # of what is there
                if live > top:
                    top, self._top, self.deepest = live, len(self.at), None
                self.at[node] = live
            else:
                over = is_in_place(node, last, lie)
                for piece in lie[node]:
                    if piece.maker is node:
                        self._begins[piece] = len(self.at) + over
                        live += sizes[piece]
            if node.op == "call_function" and node not in self.at:
                results = sum(sizes[piece] for piece in lie[node])
                uses = [_within(within, body, _dying(node, ends, lie)) for body in bodies_of(node)]
                now = _at_once(node, live, results, uses, within)
                now -= results * over
                if now > top:
                    top, self._top, self.deepest = now, len(self.at), max(uses, key=_made, default=None)
                self.at[node] = now
            live += _on_its_way(node)
            for piece in ends.get(node, ()):
                if not _is_given(piece.maker) or piece.maker in mortal:
                    self._stops[piece] = len(self.at)
                    live -= sizes[piece]
        self.arguments = sum(sizes[piece] for piece in self._begins if _is_given(piece.maker))

    def held(self) -> dict[memory_aliases.Memory, int]:
        """The pieces that are alive where the most is."""
        top, stops = self._top, self._stops
        return {x: self.sizes[x] for x, begin in self._begins.items() if begin <= top < stops.get(x, top + 1)}


def _lying_together(
    lie: dict[fx.Node, frozenset[memory_aliases.Memory]], together: Mapping[fx.Node, tuple[fx.Node, int]]
) -> dict[fx.Node, frozenset[memory_aliases.Memory]]:
    """The memories in which values lie, where some arguments lie in one."""
    if not together:
        return lie
    one = {memory_aliases.Memory(x): memory_aliases.Memory(first) for x, (first, _) in together.items()}
    return {x: frozenset(one.get(piece, piece) for piece in pieces) for x, pieces in lie.items()}


def _at_once(node: fx.Node, live: int, results: int, uses: list[MemoryUse], within: dict[Any, MemoryUse]) -> int:
    """The most bytes that are alive while a call runs whose bodies need `uses`; the rest as for `_of_loop`."""
    target: Any = node.target
    if isinstance(target, Loop):
        return _of_loop(node, live, results, within)
    more = target.needs([*map(_made, uses)]) if uses else _scratch(node, results)
    now = live + (int(more * target.at_once(node)) if isinstance(target, Mapped) else more)
    if isinstance(target, (Branches, Shared, Mapped)):  # whose results are those of the body
        return max(live if isinstance(target, Branches) else 0, now - results)
    return now


def _of_loop(node: fx.Node, live: int, results: int, within: dict[Any, MemoryUse]) -> int:
    """The most bytes that are alive while a loop runs, of `live` with all that it is given and gives, its `results`.

    The first iteration runs before there are results. Each later one has let the entries of lists go that those before it have
    used, and adds its own to the lists that it gives; its carry is its own, and may end in the middle of the body. Of a loop in
    parts the next iteration begins before it, and the one before it ends behind it, so that late results come after two.
    """
    loop, count, vals = loop_of(node), loop_of(node).length, plan.value(node)
    lists, carried = _let_go(node)
    first, later = (_made(_within(within, loop.body, (*places, *lists))) for places in ((), carried))
    begins, late = (loop.begins, loop.late) if isinstance(loop, Rotated) else (False, ())
    begin, end = (_made(_within(within, loop.bodies[i], ())) for i in (0, -1))
    given = sum(plan.nbytes(plan.value(node.args[i])) for i in lists) // count  # type: ignore[arg-type]
    kept = sum(plan.nbytes(vals[i]) for i, kind in enumerate(loop.keeps, loop.carry) if kind == EACH) // count
    kept -= sum(plan.nbytes(vals[i]) for i in loop.shifted) // count
    last = sum(plan.nbytes(vals[i]) for i in late if i >= loop.carry and loop.keeps[i - loop.carry] not in (EACH, LAST))
    found = [live - count * given + (end if late else 0)]
    for i in {0, 1, 2, count - 1} & {*range(count)}:
        ahead, behind = (size * there for size, there in zip(loop.crossing, (i + 1 < count, i > 0)))
        here = live - i * given - (results if i == 0 else (count - i) * kept + last * (i == 1))
        found.append(here + (later if i else first) + ahead + behind)
        if begins and ahead:
            found.append(here + begin + loop.crossing[0] + behind)
        if late and i:
            found.append(here - given + end + ahead + behind)
    return max(found)


def _let_go(node: fx.Node) -> tuple[list[int], list[int]]:
    """Of what a loop is given, the places of lists whose entries die in an iteration, unless another list has them; and of what
    it carries those of values that do, unless the ends of iterations use them."""
    loop = loop_of(node)
    lists: Any = [(i, node.args[i].args) for i in eaten(node)]  # type: ignore[union-attr]
    totals = loop.totals if isinstance(loop, Rotated) else ()
    mortal = [i for i, (maker, place) in lists if place not in loop_of(maker).shifted]
    return mortal, [i for i in range(loop.carry) if i not in totals]


def _dying(node: fx.Node, ends: dict[fx.Node, list[memory_aliases.Memory]], lie: Any) -> tuple[int, ...]:
    """The places of the arguments of a call of a shared body that are needed there for the last time."""
    if not isinstance(node.target, (Shared, Mapped)):
        return ()
    given: Any = [x if isinstance(x, (list, tuple)) else [x] for x in node.args]
    uses = Counter(piece for xs in given for x in xs for piece in lie[x])
    gone = {piece for piece in ends.get(node, ()) if piece.maker.op != "placeholder" and uses[piece] == 1}
    return tuple(i for i, xs in enumerate(given) if all(lie[x] and gone.issuperset(lie[x]) for x in xs))


def _within(known: dict[Any, MemoryUse], body: fx.Graph, dying: tuple[int, ...]) -> MemoryUse:
    """The memory that a body needs, of whose arguments some die."""
    if (body, dying) not in known:
        places = [x for x in body.nodes if x.op == "placeholder"]
        known[body, dying] = memory(body, frozenset(places[i] for i in dying))
    return known[body, dying]


def _scratch(node: fx.Node, results: int) -> int:
    """The bytes that a call takes for itself while it runs, besides its `results`, where they are many: flash attention adds up
    the gradient of the queries in float32 on a GPU, with a number for each row; collectives have values in the order of the
    ranks; a pipeline's step says what it holds."""
    if isinstance(node.target, Collective):
        return in_order_of_ranks(node)
    if isinstance(node.target, plan.Step) and node.target.holds is not None:
        return max(0, node.target.holds() - results)
    if not plan.name_of(node).endswith("flash_attention_backward"):
        return 0
    query = plan.value(node.args[1])  # type: ignore[arg-type]
    rows = math.prod(query.shape[:-1])
    return 4 * (query.numel() + rows) if query.device.type != "cpu" else 0


def _on_its_way(node: fx.Node) -> int:
    """By how many bytes there are more behind a call, or fewer, as what a collective takes for itself is alive from its start
    until it has been waited for."""
    if isinstance(node.target, Start) and any(x.op != "output" for x in node.users):
        return in_order_of_ranks(node)
    start = node.args[0] if node.args else None
    return -in_order_of_ranks(start) if isinstance(start, fx.Node) and isinstance(start.target, Start) else 0


def _made(use: MemoryUse) -> int:
    return use.peak - use.arguments


def _is_given(maker: fx.Node) -> bool:
    """Whether what lies in a memory is there before and after."""
    return maker.op == "placeholder" and OWN not in maker.meta


def _by_line(alive: dict[memory_aliases.Memory, int], inside: MemoryUse | None) -> list[LineMemory]:
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for piece, size in alive.items():
        line = ARGUMENTS if _is_given(piece.maker) else piece.maker.meta.get("line", "")
        sizes[line] += size
        counts[line] += 1
    for one in inside.held if inside is not None else ():
        if one.line != ARGUMENTS:
            sizes[one.line] += one.bytes
            counts[one.line] += one.count
    return [LineMemory(line, size, counts[line]) for line, size in sizes.most_common() if size]


def call_text(node: fx.Node) -> str:
    """What a node calls, in a word."""
    return plan.name_of(node) or getattr(node.target, "__name__", str(node.target))


def bytes_text(count: int) -> str:
    """A number of bytes, to three figures: ``1.21 MiB``."""
    power = min(int(math.log(count, 1024)), 4) if count else 0
    scaled = count / 1024**power
    return f"{count} B" if power == 0 else f"{scaled:.{2 - min(int(math.log10(scaled)), 2)}f} {'KMGT'[power - 1]}iB"


def place(line: str) -> str:
    """One of the user's lines with what stands there, its file by its name alone: ``train.py:12: `x = f(y)` ``."""
    return _short(line, quoted(line))


def _short(line: str, told: str) -> str:
    return told.removeprefix(os.path.dirname(line) + os.sep)


def _sparks(values: list[int], width: int = 60) -> str:
    """Numbers over time as a row of bars, the most of each stretch."""
    count = min(width, len(values))
    tops = [max(values[i * len(values) // count : (i + 1) * len(values) // count]) for i in range(count)]
    return "".join("▁▂▃▄▅▆▇█"[min(7, 8 * top // max(*tops, 1))] for top in tops)


def _plot(use: MemoryUse, width: float = 640.0, height: float = 200.0) -> str:
    """Memory over time as a drawing: arguments below, what the plan makes above; hovering names the call."""
    if not use.timeline:
        return ""
    left, top, count = 70.0, 24.0, len(use.timeline)
    y = lambda size: top + height * (1 - size / max(use.peak, 1))
    stretches = [
        range(i * count // min(count, 320), (i + 1) * count // min(count, 320)) for i in range(min(count, 320))
    ]
    bars: list[str] = []
    for stretch in stretches:  # of several calls the one that needs most
        moment = max((use.timeline[i] for i in stretch), key=lambda m: m.bytes)
        x, w = left + width * stretch.start / count, width * len(stretch) / count
        told = html.escape(f"{moment.call}: {bytes_text(moment.bytes)}, {_short(moment.line, readable(moment.line))}")
        bars.append(_rect(x, y(moment.bytes), w, y(0) - y(moment.bytes), "#f28e2b", told))
    below = _rect(left, y(use.arguments), width, y(0) - y(use.arguments), "#4e79a7", f"{ARGUMENTS}: {use.arguments}")
    index = next(i for i, moment in enumerate(use.timeline) if moment is use.at)
    x = left + width * (index + 0.5) / count
    marks = [
        _text(left - 6, y(use.peak) + 4, bytes_text(use.peak), "end"),
        _text(left - 6, y(use.arguments) + 4, bytes_text(use.arguments), "end")
        if use.arguments < 0.9 * use.peak
        else "",
        _text(min(max(x, left + 60), left + width - 60), top - 8, f"peak: {use.at.call if use.at else ''}", "middle"),
        _text(left, top + height + 14, "first call", "start"),
        _text(left + width, top + height + 14, f"call {count}", "end"),
        f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{top - 5}' y2='{top}' stroke='black'/>",
    ]
    size = f"width='{left + width + 10:.0f}' height='{top + height + 24:.0f}'"
    return f"<svg {size} role='img'>{''.join(bars)}{below}{''.join(marks)}</svg>"


def _rect(x: float, y: float, w: float, h: float, color: str, told: str) -> str:
    return f"<rect x='{x:.1f}' y='{y:.1f}' width='{w:.2f}' height='{h:.1f}' fill='{color}'><title>{told}</title></rect>"


def _text(x: float, y: float, text: Any, anchor: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' font-size='11' text-anchor='{anchor}'>{html.escape(str(text))}</text>"
