"""Which values of a function `remat` keeps, by a policy, and what it computes again.

While the function runs, each op of torch's and each collective is one step. A step whose values the policy keeps is not run
again: the backward pass gets the kept ones. Of the others only those are, from which something that autograd asked for
follows; in the place of the rest stands memory without values. What draws from torch's generator is always run, and so draws
the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import context, op_arguments, source_lines, state
from ..base.errors import TransformError
from ..base.messages import report
from ..distributed.blocks import held, written
from .placeholders import Placeholder, memories, placeholder, restored

Tensor = torch.Tensor
_COMMUNICATES = frozenset(
    "psum pmax pmin all_gather psum_scatter all_gather_invariant all_to_all ppermute pbroadcast sum_at_source".split()
)
_NO_STEPS = ("aten::detach", "prim::device")  # which autograd calls as well, as it likes
_STEPS = _COMMUNICATES | {"with_sharding"}  # the linear maps that count as steps


@dataclass
class RematStep:
    """What was done, once.

    Attributes:
        op: the operator, or a linear map's kind.
        name, shapes: as policies are told, the shapes of its operands.
        sources: the steps that its operands come from.
        out: its result, with `Placeholder` in place of tensors.
        runs: whether it is run again in any case: it draws, writes, or only looks at memory in another way.
        aliases: whether the result lies in the memory of an operand.
        kept: its tensors, where they are kept.
        place: the memory of its only tensor, while that may be given a name.
        label: the name by which it is kept.
        line: the user's.
    """

    op: Any
    name: str
    shapes: Sequence[Any]
    sources: frozenset[int]
    out: Any
    runs: bool
    aliases: bool
    kept: list[tuple[Tensor, torch.device | None]] | None = None
    place: Any = None
    label: str | None = None
    line: str = ""

    def without_running(self) -> Any:
        """Its result, of the kept tensors; or of tensors that may hold anything."""
        values = iter(self.kept or ())

        def of(like: Any) -> Any:
            if not isinstance(like, Placeholder):
                return like
            if self.kept is None:
                return like.empty()
            x, device = next(values)
            return x.detach() if device is None else x.to(device)

        return op_arguments.mapped(of, self.out)

    def kinds(self) -> list[str]:
        """The types of its tensors that have elements, as messages write them; on torch 2.11 a checkpoint makes one without."""
        found = self.out if isinstance(self.out, (list, tuple)) else [self.out]
        return [like.text() for like in found if isinstance(like, Placeholder) and 0 not in (like.shape or ())]


class Keeper:
    """One call of a function under a policy, and what is to be computed again of it."""

    def __init__(self, policy: Callable[[str, Sequence[Any], str | None], Any]) -> None:
        self.policy, self.steps = policy, list[RematStep]()
        self.writers: dict[Any, frozenset[int]] = {}  # of some memory: the steps that what it holds comes from
        self.asked: set[int] = set()  # the steps whose values autograd has asked for
        self.needed: frozenset[int] | None = None
        self.at: int | None = None  # the next step, while it is computed again
        self.busy = False  # in a step
        self.begun = True  # and not yet ended

    # --- what runs ---

    def linear(self, op: Any, xs: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """A linear map of ours."""
        if self.busy:
            return run()
        kind = getattr(op, "row", "")
        if kind in _STEPS:
            return self.step(kind, kind.removesuffix("_invariant"), [list(xs), {}], False, run)
        out = self._uncounted(run)
        if self.at is None:  # what is made of values, and not counted, needs what they need
            sources = self._sources(xs)
            for place in memories(out):
                self.writers.setdefault(place, sources)
        return out

    def step(self, op: Any, name: str, operands: Any, runs: bool, run: Callable[[], Any]) -> Any:
        """One step, for the first time or again."""
        return self._first(op, name, operands, runs, run) if self.at is None else self._again(op, run)

    def named(self, x: Tensor, label: str) -> None:
        """A value is given a name: its step is kept, or not, as the policy says of the name."""
        if self.at is None:
            self._uncounted(lambda: self._named(x, label))

    def _named(self, x: Tensor, label: str) -> None:
        place, sources = memories(x), self._sources(x)
        if len(sources) != 1:
            return
        step = self.steps[min(sources)]
        if step.kept is None and step.place == place and (how := self.policy(step.name, step.shapes, label)):
            self._keep(step, how, [restored(x, step.out)], label)
        elif step.kept is not None and step.label is None and not self.policy(step.name, step.shapes, label):
            step.kept = None

    def _uncounted(self, run: Callable[[], Any]) -> Any:
        """What `run` gives, where none of what it does is a step: it may move an array, or compute a view that was put off."""
        before, self.busy = self.busy, True
        try:
            return run()
        finally:
            self.busy = before

    def _sources(self, operands: Any) -> frozenset[int]:
        return frozenset().union(*(self.writers.get(place, ()) for place in memories(operands)))

    def _first(self, op: Any, name: str, operands: Any, runs: bool, run: Callable[[], Any]) -> Any:
        given = op_arguments.tensors_in(operands)
        sources, places = self._sources(given), memories(given)
        targets = _written(op, operands) if runs else ()
        out = self._uncounted(run)
        tensors = op_arguments.tensors_in(out)
        number, aliases = len(self.steps), not places.isdisjoint(memories(tensors))
        line = source_lines.user_line() if state.now().kept is not None else ""
        shapes = [tuple(x.shape) for x in given]
        step = RematStep(
            op, name, shapes, sources, op_arguments.mapped(placeholder, out), runs or aliases, aliases, line=line
        )
        self.steps.append(step)
        for place in targets:  # what is written later is not kept as it was
            for other in self.writers.get(place, ()):
                self.steps[other].kept, self.steps[other].place = None, None
            self.writers[place] = self.writers.get(place, frozenset()) | {number}
        for place in memories(tensors) - places:
            self.writers[place] = frozenset((number,))
        if tensors and not step.runs:
            if how := self.policy(name, shapes, None):
                self._keep(step, how, tensors, None)
            elif isinstance(step.out, Placeholder):
                step.place = memories(out)
        return out

    def _keep(self, step: RematStep, how: Any, tensors: Sequence[Tensor], label: str | None) -> None:
        step.label = label
        step.kept = self._uncounted(lambda: [_kept(x, how == "offload") for x in tensors])
        _tell_recorder(tensors)

    def _again(self, op: Any, run: Callable[[], Any]) -> Any:
        at = self.at
        assert at is not None
        self.at = at + 1
        if at >= len(self.steps) or self.steps[at].op != op:
            what = "the function does something else when its values are computed again, and so the policy's are not its own"
            raise TransformError(report("remat", what, fix="a function of its arguments alone"))
        step = self.steps[at]
        runs = step.kept is None and (step.runs or at in self._needed() or torch_internals.recorder() is not None)
        out = self._uncounted(run if runs else step.without_running)
        if self.begun and not step.aliases:  # for a gradient that the function takes itself
            for place in memories(out):
                self.writers[place] = frozenset((at,))
        return out

    def _needed(self) -> frozenset[int]:
        """The steps that are run again."""
        if self.needed is None:
            found, todo = set[int](), list(self.asked)
            while todo:
                at = todo.pop()
                if at not in found:
                    found.add(at)
                    if self.steps[at].kept is None:
                        todo += self.steps[at].sources
            self.needed = frozenset(found)
        return self.needed

    def residuals(self) -> list[RematStep]:
        """The steps whose values are kept, and are needed."""
        return [step for i, step in enumerate(self.steps) if step.kept is not None and i in self._needed()]

    # --- what it runs in ---

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """For the function's first run."""
        pack, unpack = torch_internals.saved_tensor_hooks()

        def packed(x: Tensor) -> Any:
            self.asked |= self._uncounted(lambda: self._sources(x))
            return pack(x)

        with self._watching(torch.autograd.graph.saved_tensors_hooks(packed, unpack)):
            yield
        if torch_internals.recorder() is None:  # which leaves out of the plan what nobody asks for
            for i, step in enumerate(self.steps):
                step.kept = step.kept if i in self._needed() else None
        self.writers, self.begun = {}, False

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """For each run of the function in a backward pass."""
        before = self.at, self.busy
        self.at, self.busy, self.needed = 0, False, None
        try:
            with self._watching():
                yield
        finally:
            self.at, self.busy = before

    @contextlib.contextmanager
    def _watching(self, *blocks: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        undo = functools.partial(torch_internals.set_ambient, torch_internals.ambient())
        with context.setting_and_undoing(undo, keeper=self), contextlib.ExitStack() as entered:
            for block in (*blocks, _Watch(self)):
                entered.enter_context(context.UnlessDropped(block))
            yield


class _Watch(torch_internals.TorchDispatchMode):
    """Shows each operator to a keeper."""

    def __init__(self, keeper: Keeper) -> None:
        super().__init__()
        self.keeper = keeper

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        keeper = self.keeper
        name = torch_internals.operator_name(func)
        if keeper.busy or name in _NO_STEPS:
            return func(*args, **kwargs)
        runs = _writes(func) or torch.Tag.nondeterministic_seeded in func.tags
        return keeper.step(func, name.split("::")[-1], [args, kwargs], runs, lambda: func(*args, **kwargs))


def _writes(func: Any) -> bool:
    return torch_internals.schema(func).is_mutable


def _written(op: Any, operands: Any) -> frozenset[Any]:
    """The memory that an operator writes."""
    args, kwargs = operands
    targets = [args[at] if at < len(args) else kwargs.get(name) for at, name in written(op)]
    return memories(targets)


def _kept(x: Tensor, offload: bool) -> tuple[Tensor, torch.device | None]:
    return (x.to("cpu"), x.device) if offload and x.device.type != "cpu" else (x.detach(), None)


def _tell_recorder(xs: Sequence[Tensor]) -> None:
    """Where a plan is recorded, its passes leave these values alone."""
    recorder = torch_internals.recorder()
    if recorder is None:
        return
    for x in xs:
        for part in held(torch_internals.local(x) if isinstance(x, DTensor) else x):
            recorder.know(part, held=True)
