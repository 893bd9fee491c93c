"""From a plan's graph to a Python function: a line a node, each value let go after its last use.

What runs is the text that `Code.source` shows. A line is the shortest call that leads to the node's operator
(`callables`); what Python has no literal for, a mesh, a collective, a dtype, is a global of the text, under a name of its own.
"""

from __future__ import annotations

import functools
import itertools
import keyword
import linecache
import math
import operator
import os
import re
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.base.host_memory import HostMemory
from ..._core.distributed.collectives import Collective
from ..ir import host_copies, memory_aliases
from ..ir.branches import Branches, While
from ..ir.graph import Step, calls, output, value
from ..ir.leaf_lists import LEAVES, LISTED
from ..ir.loop import Loop
from ..ir.mapped import Mapped
from ..ir.nested import Nested
from ..ir.rotated_loop import Rotated
from ..ir.shared_bodies import Shared, apart
from . import fast_sums
from .branching import Branching, Repeating
from .fast_calls import of_each_row, way
from .looping import Looping, RotatedLooping
from .mapping import mapping
from .stride_checks import as_recorded, uncertain

_count = itertools.count(1)


@dataclass(frozen=True)
class Code:
    """A plan as Python.

    Args:
        run: takes the list of the placeholders' values, which it empties, and gives the tuple of the outputs.
        source: what runs, as text.
        file: the name under which tracebacks show it.
        graph: what it computes.
        nodes: by line, what runs there.
        bodies: the code of the bodies in it.
    """

    run: Callable[[list[Any]], tuple[Any, ...]]
    source: str
    file: str
    graph: fx.Graph
    nodes: dict[int, fx.Node]
    bodies: tuple[Code, ...] = ()

    def node_of(self, error: BaseException | TracebackType | None) -> fx.Node | None:
        """The node that was running when an error was raised, None where it was raised elsewhere."""
        at = error.__traceback__ if isinstance(error, BaseException) else error
        while at is not None:
            if at.tb_frame.f_code.co_filename == self.file:
                found = self.nodes.get(at.tb_lineno)
                inside = (node for code in self.bodies if (node := code.node_of(at.tb_next)) is not None)
                return next(inside, found)
            at = at.tb_next
        return None


def generate(
    graph: fx.Graph, name: str = "plan", done: dict[fx.Graph, Code] | None = None, writer: Writer | None = None
) -> Code:
    """The Python function that computes what a graph says.

    Args:
        graph: as `graph` describes it; its nodes' ``val`` tells what the arguments are.
        name: of the function.
        done: the code of bodies that there is.
        writer: writes its text.
    """
    writer = Writer({} if done is None else done) if writer is None else writer
    text, nodes = writer.write(graph, name)
    file = f"<{name} {next(_count)}>"
    code: CodeType = compile(text, file, "exec")
    exec(code, writer.globals)
    body = writer.globals[name]
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    weakref.finalize(body, linecache.cache.pop, file, None)

    bodies = tuple(writer.bodies.values())
    source = "\n".join([text, *(code.source for code in bodies)])
    return Code(functools.partial(torch_internals.called_on_plain_tensors, body), source, file, graph, nodes, bodies)


class Writer:
    """Writes one function; collects its globals."""

    def __init__(self, done: dict[fx.Graph, Code]) -> None:
        self.done = done
        self.graph: fx.Graph  # that is written
        self.globals: dict[str, Any] = {}
        self.names: dict[Any, str] = {}  # of nodes, and of the globals by identity
        self.taken = {"values", "given", *keyword.kwlist}
        self.numbers: Counter[str] = Counter()  # how often a name was taken
        self.bodies: dict[fx.Graph, Code] = {}
        self.together: dict[fx.Node, fx.Node] = {}  # parts that are taken out in the line of what gives them: to it

    def write(self, graph: fx.Graph, name: str) -> tuple[str, dict[int, fx.Node]]:
        self.taken.add(name)
        for node in graph.nodes:
            self.names[node] = self.fresh(node.name)
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        dies = last_uses(graph, self.parts(graph))
        self.graph = graph
        lines, nodes = [f"def {name}(values):"], {}
        if inputs:
            lines.append(f"    {', '.join(map(self.names.__getitem__, inputs))}, = values")
            lines.append("    values.clear()")
        unused = [x for x in inputs if not x.users]
        if unused:
            lines.append(f"    del {', '.join(map(self.names.__getitem__, unused))}")
        for node in calls(graph):
            if node in self.together:
                continue
            dead = [self.names[x] for x in dies.get(node, ())]
            lines.append("    " + self.line(node, [f"del {', '.join(dead)}"] if dead else []))
            nodes[len(lines)] = node
        result = output(graph)
        lines.append(f"    return {self.text(tuple(result.args[0]))}")  # type: ignore[arg-type]
        nodes[len(lines)] = result
        return "\n".join(lines) + "\n", nodes

    @functools.cached_property
    def lie(self) -> Any:
        """Where values lie; it is hardly ever asked for."""
        return memory_aliases.memories(self.graph)

    @functools.cached_property
    def last(self) -> Any:
        """What needs each memory last."""
        return memory_aliases.last_uses(self.graph, self.lie)

    def parts(self, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
        """Find what gives several results of which one is used, or all: they are taken out in its line."""
        for node in calls(graph):
            v = value(node)
            if not isinstance(v, (list, tuple)) or any(x.target is not operator.getitem for x in node.users):
                continue
            indices = [x.args[1] for x in node.users]
            if len(indices) == 1 or sorted(indices) == list(range(len(v))):  # type: ignore[type-var]
                self.together.update((x, node) for x in node.users)
        return self.together

    def line(self, node: fx.Node, endings: Sequence[str]) -> str:
        """A node as one line, with what is done behind it."""
        target = f"{self.names[node]} = " if node.users else ""
        parts = sorted((x for x in node.users if x in self.together), key=lambda x: x.args[1])  # type: ignore
        if parts:
            target = ", ".join(map(self.names.__getitem__, parts)) + " = "
        ending = "".join(f"; {one}" for one in endings)
        line = node.meta.get("line", "")
        part = f"[{parts[0].args[1]}]" if len(parts) == 1 else ""
        comment = f"  # {_comment(line)}" if line else ""
        if isinstance(node.target, (Shared, Mapped)):  # which lets go of what it is given after its last use there
            body = self.body(node.target.bodies[0], isinstance(node.target, Shared))
            run = mapping(node.target, body) if isinstance(node.target, Mapped) else body
            name = self.globally(run, "body")
            return f"given = {self.text([*node.args])}{ending}; {target}{name}(given){part}{comment}"
        return self.kept(node, target, self.checked(node) + part) + ending + comment

    def kept(self, node: fx.Node, target: str, call: str) -> str:
        """A call whose result is given its name."""
        return target + call

    def checked(self, node: fx.Node) -> str:
        """The call of a node, whose result is seen to lie as was recorded, where that is not sure."""
        strides = uncertain(node)
        if strides is None:
            return self.call(node)
        return f"{self.globally(as_recorded, 'as_recorded')}({self.call(node)}, {self.text(strides)})"

    def call(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return f"{self.text(node.args[0])}[{self.text(node.args[1])}]"
        args = [self.text(x) for x in self.constants(node)]
        named = [f"{k}={self.text(v)}" for k, v in node.kwargs.items()]
        short = None if LEAVES in node.meta else way(node)
        if short is None:
            return f"{self.globally(self.function(node), name_of_global(node.target))}({', '.join(args + named)})"
        if short.kind == "infix":
            return f" {short.name} ".join(args) if len(args) > 1 else f"{short.name}{args[0]}"
        if short.kind == "sizes":
            args[1:] = map(self.text, node.args[1])  # type: ignore[arg-type]
        if short.kind == "function":
            return f"{self.globally(short.call, f'torch_{short.name}')}({', '.join(args + named)})"
        return f"{args[0]}.{short.name}({', '.join(args[1:] + named)})"

    def function(self, node: fx.Node) -> Any:
        """What is called where there is no shorter way in Python."""
        if LEAVES in node.meta and not (isinstance(node.target, Step) and node.target.name == LISTED.name):
            op: Any = node.target
            return lambda *lists: list(map(op, *lists))
        if isinstance(node.target, Nested):
            return _RUN[type(node.target)](node, *map(self.body, node.target.bodies))
        if host_copies.runs(node) is host_copies.offload:
            return HostMemory().offload
        if isinstance(node.target, Step):
            return of_each_row(node) or node.target.run
        return fast_sums.shortest(node, self.last, self.lie) or node.target

    def body(self, body: fx.Graph, shared: bool = False) -> Any:
        """The function of a body, one for all calls that share it."""
        if body not in self.done:
            self.done[body] = generate(apart(body) if shared else body, "body", self.done)
        self.bodies[body] = self.done[body]
        return self.done[body].run.args[0]  # type: ignore[attr-defined]

    def constants(self, node: fx.Node) -> list[Any]:
        """The arguments of a node, a number beside a tensor as a tensor: that spares torch to make one each time."""
        args: list[Any] = list(node.args)
        if len(args) == 2 and node.target in _TAKES_NUMBERS and type(args[1]) in (float, int):
            x = value(args[0]) if isinstance(args[0], fx.Node) else list(map(value, args[0]))
            lists = isinstance(x, list)
            x = x[0] if lists else x
            if isinstance(x, torch.Tensor) and x.ndim and x.dtype in (torch.float32, torch.float64):
                if not lists or x.device.type == "cpu":  # beside a list it must be where the list is
                    args[1] = _Number(args[1], x.dtype)
        return args

    def text(self, x: Any) -> str:
        """An argument as Python."""
        if isinstance(x, fx.Node):
            return self.names[x]
        if isinstance(x, _Number):
            return self.globally(x.tensor(), name_of_global(x), key=repr(x))
        # a subclass prints itself
        if x is None or type(x) in (bool, int, str) or (type(x) is float and math.isfinite(x)):
            return repr(x)
        if type(x) is list:
            return f"[{', '.join(map(self.text, x))}]"
        if isinstance(x, (list, tuple)):
            return f"({', '.join(map(self.text, x))}{',' if len(x) == 1 else ''})"
        if isinstance(x, dict):
            return f"{{{', '.join(f'{self.text(k)}: {self.text(v)}' for k, v in x.items())}}}"
        return self.globally(x, name_of_global(x))

    def globally(self, x: Any, name: str, key: Any = None) -> str:
        """The name of a value as a global."""
        key = ("global", id(x) if key is None else key)
        if key not in self.names:
            self.names[key] = self.fresh(name)
            self.globals[self.names[key]] = x
        return self.names[key]

    def fresh(self, name: str) -> str:
        # ASCII alone: Python takes some letters for the same (NFKC), and would mix up two names that differ here
        name = re.sub(r"\W", "_", name, flags=re.ASCII).lstrip("0123456789") or "value"
        found = name
        while found in self.taken:
            self.numbers[name] += 1
            found = f"{name}_{self.numbers[name]}"
        self.taken.add(found)
        return found


@functools.lru_cache(maxsize=4096)
def _comment(line: str) -> str:
    """A source line as a comment. A file may have any name, a line break in it too, which would end the comment."""
    return "".join(c if c.isprintable() else "?" for c in os.path.basename(line))


@dataclass(frozen=True)
class _Number:
    """A number that stands beside a tensor of `dtype`."""

    number: float
    dtype: torch.dtype

    def tensor(self) -> torch.Tensor:
        return torch.tensor(self.number, dtype=self.dtype, device="cpu")


_aten = torch.ops.aten
_TAKES_NUMBERS = {
    getattr(_aten, name + in_place).Tensor for name in ("add", "sub", "mul", "div") for in_place in ("", "_")
} | {_aten._foreach_mul.Scalar, _aten._foreach_mul_.Scalar}


# what runs a call with bodies, of the call and the functions of its bodies
_RUN: dict[type, Callable[..., Any]] = {Loop: Looping, Rotated: RotatedLooping, Branches: Branching, While: Repeating}


def last_uses(graph: fx.Graph, together: dict[fx.Node, fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nothing needs after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node not in together:
            for x in node.all_input_nodes:
                last[x] = node
    dies: dict[fx.Node, list[fx.Node]] = {}
    for x, node in last.items():
        if node.op != "output":
            dies.setdefault(node, []).append(x)
    return dies


def name_of_global(x: Any) -> str:
    """What a value is called as a global."""
    if isinstance(x, _Number):
        return f"n_{x.number!r}"
    if isinstance(x, torch_internals.OpOverload):
        return torch_internals.operator_name(x).replace("::", "_")
    if isinstance(x, (torch.dtype, torch.layout, torch.memory_format)):
        return str(x).removeprefix("torch.")
    if isinstance(x, torch.device):
        return str(x)
    if isinstance(x, Collective):
        return "_".join((x.kind, *x.axes))
    return getattr(x, "__name__", None) or type(x).__name__.lower()
