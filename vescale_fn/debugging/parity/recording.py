"""Recording a run: each value that the user's lines make, from what it was made, and the cotangents that came back to it.

A function mode sees the torch functions that the user's code calls, before autograd and inside `shard_map` bodies; what
the library does on its own is left out, but for the steps that it tells of (`context.record`): collectives, arguments and
results of maps. So a run on one device and a run on a mesh make the same records, in which no rank's decomposition of
an op shows. Values are kept as copies: recording is for finding a mistake, on small inputs.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ..._core import torch_internals
from ..._core.base import context, op_arguments, tree
from ..._core.base.errors import TransformError
from ..._core.base.messages import report
from ..._core.base.source_lines import PACKAGE, user_line
from ..._core.distributed.blocks import of_each, parts
from ..._core.distributed.mesh import communicator_of
from ..._core.distributed.places import MeshPlace, place_of, spread_from
from ..._core.local_types import function_kinds
from ..._core.shard_map import body, typed_mode, untyped_mode
from ..._core.sharding.layout import layout
from ..._core.sharding.spec import P, place_text

_TORCH = torch.__file__.rsplit("/", 1)[0] + "/"
_MODES = (typed_mode.__file__, untyped_mode.__file__, body.__file__)
_PASSED = (__file__, *_MODES, _TORCH)  # between the user's call and the mode there may stand these
_OPEN = f"{PACKAGE}recipes/"  # code of ours that is as a user's
_NAMES = {"keyed_dropout": "random.dropout", "draw": "random draw"}
_SELDOM_VALUES = ("getter", "setter", "untouched", "number")  # of such calls the operands are seen only if a value came


class Held(NamedTuple):
    """What the ranks that this process plays hold of a value; `spec` is None where it is not known how it lies."""

    spec: P | None
    blocks: tuple[torch.Tensor, ...]

    def of(self, rank: int) -> torch.Tensor:
        """The block of the `rank`-th of the played ranks."""
        return self.blocks[rank if len(self.blocks) > 1 else 0]


class Node:
    """One value: the step that made it, the nodes that it was made from, and the cotangents that reached it."""

    __slots__ = ("axes", "cotangents", "held", "line", "name", "sources", "users")

    def __init__(self, name: str, line: str, held: Held, sources: tuple[int, ...], axes: tuple[str, ...]) -> None:
        self.name, self.line, self.held, self.sources, self.axes = name, line, held, sources, axes
        self.users: list[int] = []
        self.cotangents: dict[int, Held] = {}  # by how many values there were when it came

    @property
    def key(self) -> tuple[str, str]:
        """What the same step has in another run."""
        return self.name, self.line


def _of_all_ranks(place: MeshPlace, local: Any) -> Any:
    """What the ranks of a place hold, as if all did."""
    if not communicator_of(place.whole).holds_blocks:
        what = f"a value is at {place_text(place.at)}, which other processes cannot compare"
        raise TransformError(report("check_parity", what, fix="vfn.simulate(n), in which one process plays all ranks"))
    return spread_from(place, local)


def hold(x: torch.Tensor) -> Held:
    """A copy of a value as it is now."""
    with torch_internals.no_torch_function(), torch.no_grad():
        inner = torch_internals.peel(x)
        spec = None
        if isinstance(inner, DTensor):
            if context.body() is None:  # in one, an array lies on a part of the mesh only
                spec = layout(torch_internals.spec(inner))
            place, inner = place_of(torch_internals.mesh(inner)), torch_internals.local(inner)
            if (
                place is not None
            ):  # which other ranks have not: in a simulation they are shown what their counterparts have
                inner = _of_all_ranks(place, inner)
        return Held(spec, tuple(parts(of_each(lambda x: torch_internals.peel(x.detach().clone()), inner))))


class ValueRecorder(TorchFunctionMode):
    """Records while it is active. `note` goes to `context.recording`."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.arguments: list[int | None] = []  # the nodes of what the run is differentiated by
        self.results: list[int | None] = []  # and of what it gave
        self._found: dict[Any, int] = {}  # from a tensor's identity, or its memory, to its node
        self._first: dict[Any, int] = {}  # from a memory to its first node
        self._hooks: list[Any] = []
        self._kept: list[Any] = []  # tensors stay alive, so that their identities and memories stay theirs

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind, name = function_kinds.kind_of(func)
        if not _by_user(name, kind):
            return func(*args, **kwargs)
        sources: tuple[int, ...] | None = None
        # before the call, which may write its operands
        if kind not in _SELDOM_VALUES and name not in function_kinds.NOT_TYPED:
            with torch_internals.no_torch_function():
                sources = self._sources(op_arguments.tensors_in(args, kwargs), name)
        out = func(*args, **kwargs)
        made = (
            op_arguments.tensors_in(args[0] if name == "__setitem__" else out)
            if name not in function_kinds.NOT_TYPED
            else []
        )
        if made:
            with torch_internals.no_torch_function():
                if sources is None:
                    sources = self._sources(op_arguments.tensors_in(args, kwargs), name)
                for x in made:
                    self.add(_NAMES.get(name, name), x, sources)
        return out

    def record(self, name: str, given: Any, made: Any, axes: tuple[str, ...] = (), line: str = "") -> None:
        """A step of ours; `line`, if not where the user is."""
        with torch_internals.no_torch_function():
            before, after = tree.leaves(given), tree.leaves(made)
            together = len(before) == len(after)
            for i, x in enumerate(after):
                if isinstance(x, torch.Tensor):
                    inputs = [y for y in (before[i : i + 1] if together else before) if isinstance(y, torch.Tensor)]
                    self.add(name, x, self._sources(inputs, name), axes, line)

    def add(
        self, name: str, x: torch.Tensor, sources: tuple[int, ...], axes: tuple[str, ...] = (), line: str = ""
    ) -> int:
        """A new node for a tensor."""
        number = len(self.nodes)
        self.nodes.append(Node(name, line or user_line(), hold(x), sources, axes))
        for source in sources:
            self.nodes[source].users.append(number)
        self._kept.append(x)
        self._found[id(x)] = number
        memory = _memory(x)
        if memory is not None:
            self._found[memory] = number
            self._first.setdefault(memory, number)
        if x.requires_grad and torch_internals.peel(x) is x:
            self._hooks.append(x.register_hook(self._hook(number)))
        return number

    def find(self, x: torch.Tensor) -> int | None:
        """The node of a tensor: by itself, or by its memory where it is another name for the same."""
        found = self._found.get(id(x))
        return found if found is not None else self._found.get(_memory(x))

    def first(self, x: torch.Tensor) -> int | None:
        """The first node of a tensor's memory: of what the function closes over, before it was given other names."""
        return self._first.get(_memory(x))

    def close(self) -> None:
        """Let the run go; its nodes stay."""
        for hook in self._hooks:  # some are on tensors that live on
            hook.remove()
        self._hooks, self._kept, self._found, self._first = [], [], {}, {}

    def _sources(self, given: Sequence[torch.Tensor], name: str) -> tuple[int, ...]:
        """The nodes of the operands of a step. One that nothing recorded has made gets a node of its own."""
        numbers = []
        for i, x in enumerate(given):
            known = self.find(x)
            numbers.append(self.add(f"operand {i} of {_NAMES.get(name, name)}", x, ()) if known is None else known)
        return tuple(numbers)

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        def keep(cotangent: torch.Tensor) -> None:
            self.nodes[number].cotangents.setdefault(len(self.nodes), hold(cotangent))

        return keep


def _by_user(name: str, kind: str) -> bool:
    """Whether the function that a mode sees now was called by the user's code."""
    if name in _NAMES or kind == "gradient":
        return True
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    return not file.startswith(PACKAGE) or file.startswith(_OPEN)


def _memory(x: torch.Tensor) -> Any:
    inner = torch_internals.peel(x)
    if isinstance(inner, DTensor):
        inner = torch_internals.local(inner)
    inner = parts(inner)[0]
    if not inner.numel() or inner.layout is not torch.strided:
        return None
    return (*torch_internals.memory(inner), inner.dtype)


def aligned(one: Sequence[Node], other: Sequence[Node]) -> dict[int, int]:
    """From the nodes of `other` to those of `one` that the same steps made, in order."""
    a, b = [node.key for node in one], [node.key for node in other]
    first = 0
    while first < min(len(a), len(b)) and a[first] == b[first]:
        first += 1
    last = 0
    while last < min(len(a), len(b)) - first and a[-1 - last] == b[-1 - last]:
        last += 1
    pairs = {i: i for i in range(first)}
    middle = difflib.SequenceMatcher(None, a[first : len(a) - last], b[first : len(b) - last], autojunk=False)
    for block in middle.get_matching_blocks():
        pairs |= {first + block.b + i: first + block.a + i for i in range(block.size)}
    return pairs | {len(b) - i: len(a) - i for i in range(1, last + 1)}
