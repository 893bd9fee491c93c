"""What `vfn.jit(f).lower(...)` shows of a plan: its calls, its collectives, its memory."""

from __future__ import annotations

import operator
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from .._core.distributed.collectives import Collective, Record, group_size
from .._core.distributed.comm_log import CommLog
from .._core.sharding.layout import WHOLE, type_text
from .ir import graph as plan
from .ir.arena import Arena, arena
from .ir.memory_use import MemoryUse, bytes_text, call_text, memory, place
from .ir.nested import Nested, all_collectives, bodies_of, nested


class Origin(NamedTuple):
    """Where what `lower` shows comes from, for `save_plan`.

    Attributes:
        plan: itself.
        key: of the calls that it serves.
        meshes: those that the call knows.
        call: for which it was made.
        traced: records it again: a recording and a plan, of a call.
        passes: that improve it.
    """

    plan: Any
    key: str
    meshes: Sequence[Any]
    call: Any
    traced: Callable[[Any], tuple[Any, Any]]
    passes: Sequence[plan.Pass]


class Lowered:
    """The plan of a function for arguments of these types: what ``vfn.jit(f).lower(*args)`` returns.

    Nothing has run. Printing it shows `text`.

    Args:
        graph: the plan, a `torch.fx.Graph` of ops on one process's blocks and of collectives.
        name: the function's.
        inputs, outputs: ``(path, type)`` of each leaf, as in ``("params['w']", "f32[8@dp,4]")``.
        donated: the places among `inputs` whose memory the results are written into.
        recorded: the plan as it was recorded, before passes improved it.

    Attributes:
        origin: what `save_plan` saves.

    >>> import torch, vescale_fn as vfn
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> graph = make_fx(lambda w, x: (torch.tanh(x @ w),), tracing_mode="fake")(torch.ones(4, 2), torch.ones(3, 4)).graph
    >>> print(Lowered(graph, "f", [("w", "f32[4,2]"), ("x", "f32[3,4]")], [("", "f32[3,2]")]).text())
    f: 2 calls, no collective, peak 128 B
      w  f32[4,2]
      x  f32[3,4]
      -> f32[3,2]
    <BLANKLINE>
    ?
        mm = mm(x_1, w_1)   f32[3,2]
        tanh = tanh(mm)     f32[3,2]
    """

    def __init__(
        self,
        graph: fx.Graph,
        name: str,
        inputs: Sequence[tuple[str, str]] = (),
        outputs: Sequence[tuple[str, str]] = (),
        donated: Iterable[int] = (),
        recorded: Lowered | None = None,
    ) -> None:
        self.graph, self.name, self.inputs, self.outputs = graph, name, tuple(inputs), tuple(outputs)
        self.donated, self.recorded = frozenset(donated), recorded
        self.origin: Origin | None = None

    def text(self, lines: int | None = 80) -> str:
        """The plan in words: what goes in and out, and the calls below the user's lines that they come from.

        Args:
            lines: how many lines it may take. A plan that is longer than that is told in short: only how often each op
                is called for a line, with the collectives one by one. None: every call.

        Returns:
            The text. Collectives are marked with a star.
        """
        comms, use = self.comms(), self.memory()
        count = _count(self.graph)
        told = f"{len(comms)} collective{'s' * (len(comms) != 1)} of {bytes_text(comms.bytes())}" if len(comms) else ""
        head = [
            f"{self.name}: {count} call{'s' * (count != 1)}, {told or 'no collective'}, peak {bytes_text(use.peak)}"
        ]
        widths = max((len(path) for path, _ in self.inputs), default=0)
        head += [
            f"  {path.ljust(widths)}  {kind}{'  donated' if i in self.donated else ''}"
            for i, (path, kind) in enumerate(self.inputs)
        ]
        head += [f"  -> {kind}{f'  {path}' if path else ''}" for path, kind in self.outputs]
        body = _calls(self.graph)
        if lines is not None and len(head) + len(body) > lines:
            room = max(lines // 8, 8)
            head = [*head[:room], f"  ... {len(head) - room} more"] if len(head) > room + 1 else head
            body = _summary(self.graph)
        if lines is not None and len(head) + len(body) > lines:
            rest = len(head) + len(body) - lines + 1
            body = [*body[:-rest], "... text(lines=None) has all calls"]
        return "\n".join([*head, *body])

    def comms(self) -> CommLog:
        """The collectives in order, as `comm_log` lists them: op, axes, bytes on one rank, why, and the user's line."""
        log = CommLog()
        for node, times, within in all_collectives(self.graph):
            for _ in range(times):
                log.append(_record(node, within))
        return log

    def memory(self) -> MemoryUse:
        """The memory that the plan needs on one process, by prediction: its peak, and over time."""
        return memory(self.graph)

    def arena(self, alignment: int = 64) -> Arena:
        """One block of memory for all that the plan makes, and where in it each value lies.

        Offsets are found by a few quick orders and an exact search after Moffitt's MiniMalloc (ASPLOS 2023); a plan always gets
        the same. `Arena.least` is a lower bound of its size: the most that is alive at once.

        Args:
            alignment: bytes of which each offset is a multiple; 512 on CUDA, as its allocator has it.

        >>> import torch, vescale_fn as vfn
        >>> f = vfn.jit(lambda x: (x @ x.T).exp() @ x)
        >>> arena = f.lower(torch.ones(32, 16)).arena()
        >>> arena.bytes, arena.least
        (6144, 6144)
        """
        return arena(self.graph, alignment)

    def __repr__(self) -> str:
        return self.text()


def _count(graph: fx.Graph) -> int:
    """How many calls there are to look at: the body of a loop counts once."""
    inside = sum(_count(body) for node in nested(graph) for body in bodies_of(node))
    return inside + sum(1 for node in plan.calls(graph) if node.target is not operator.getitem)


def _record(node: fx.Node, within: str = "") -> Record:
    collective: Any = node.target
    operand = node.args[0]
    one = operand[0] if isinstance(operand, (list, tuple)) else operand
    factor = group_size(collective.mesh, collective.axes) if collective.kind == "all_gather" else 1
    size = plan.nbytes(plan.value(one)) * factor  # type: ignore[arg-type]
    why = ", ".join(filter(None, (collective.why, within)))
    return Record(collective.kind, collective.axes, size, why, node.meta.get("line", ""))


def _runs(graph: fx.Graph) -> Iterator[tuple[str, list[fx.Node]]]:
    """The calls in order, those in a row that come from one of the user's lines together."""
    line, run = None, []
    for node in plan.calls(graph):
        here = node.meta.get("line", "?")
        if run and here != line:
            yield line or "?", run
            run = []
        line = here
        run.append(node)
    if run:
        yield line or "?", run


def _calls(graph: fx.Graph) -> list[str]:
    """Every call, below the line that it comes from."""
    lines: list[str] = []
    for line, run in _runs(graph):
        lines += ["", place(line)]
        texts = [f"{node.name} = {_call(node)}" for node in run]
        width = min(max(map(len, texts)), 72)
        for node, text in zip(run, texts):
            mark = "*" if isinstance(node.target, Collective) else " "
            lines.append(f"  {mark} {text.ljust(width)}   {_type(plan.value(node))}{_why(node)}")
            for i in range(len(bodies_of(node))):
                lines += [f"      {line}".rstrip() for line in _body(node, i)]
    return lines


def _body(node: fx.Node, i: int) -> list[str]:
    """A body: what it is given, its calls, what it gives."""
    when, given, gives = node.target.told(i)  # type: ignore[union-attr]
    return [
        f"{when}: {given}".rstrip(": "),
        *(f"  {line}".rstrip() for line in _calls(bodies_of(node)[i])),
        f"  -> {gives}",
    ]


def _collective(node: fx.Node) -> str:
    record, value = _record(node), plan.value(node)
    one = value[0] if isinstance(value, (list, tuple)) else value
    return f"{call_text(node)} over {record.axis}: {_type(one)}, {bytes_text(record.bytes)}, {record.why}"


def _call(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return f"{node.args[0]}[{node.args[1]}]"
    given = [_argument(x) for x in node.args] + [f"{name}={_argument(x)}" for name, x in node.kwargs.items()]
    if isinstance(node.target, Collective):
        given += [repr(axis) for axis in node.target.axes]
    return f"{call_text(node)}({', '.join(given)})"


def _argument(x: Any) -> str:
    if isinstance(x, (list, tuple)) and len(x) > 4:
        return f"[{_argument(x[0])}, ..., {_argument(x[-1])}]"
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(_argument, x))}]"
    return str(x).removeprefix("torch.")


def _why(node: fx.Node) -> str:
    if not isinstance(node.target, Collective):
        return "  again" if "again" in node.meta else ""
    return f"  {bytes_text(_record(node).bytes)}, {node.target.why}"


def _type(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        kinds = [_type(x) for x in value]
        return f"{len(kinds)} x {kinds[0]}" if kinds and len(set(kinds)) == 1 else ", ".join(kinds)
    return type_text(value.shape, value.dtype, WHOLE) if isinstance(value, torch.Tensor) else ""


def _summary(graph: fx.Graph) -> list[str]:
    """What the user's lines call how often, from one collective to the next; the collectives one by one.

    Between two collectives each line stands once, where it first takes part.
    """
    lines: list[str] = []
    counts: dict[str, Counter[str]] = {}

    def tell() -> None:
        for line, calls in counts.items():
            words = ", ".join(f"{name} x{n}" if n > 1 else name for name, n in calls.items())
            lines.append(place(line))
            lines.extend(textwrap.wrap(words, 110, initial_indent="    ", subsequent_indent="    "))
        counts.clear()

    for node in plan.calls(graph):
        if isinstance(node.target, Collective):
            tell()
            lines.append(f"* {_collective(node)}")
        elif isinstance(node.target, Nested):
            tell()
            for i, body in enumerate(node.target.bodies):
                lines.append(f"{place(node.meta.get('line', '?'))}: {node.target.told(i)[0]}")
                lines += [f"    {line}" for line in _summary(body)]
        elif node.target is not operator.getitem:
            counts.setdefault(node.meta.get("line", "?"), Counter())[call_text(node)] += 1
    tell()
    return lines
