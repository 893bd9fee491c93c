"""Recording: a function is run once on tensors without values, and what it does to plain tensors becomes a graph.

The recorder is a dispatch mode that is on for that one run. It hands arrays and simulated blocks on to the interpreter, as
if it were not there, and notes the ops on plain tensors below, forward and backward alike;
`collectives` hands it the collectives.
What cannot be recorded (a value is read in Python) raises `Unrecordable`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from ..._core import torch_internals
from ..._core.arrays.array import Array
from ..._core.base import context, op_arguments, source_lines, state, tables
from ..._core.base.errors import InPlaceError, NoValueError
from ..._core.base.messages import op_text, report
from ..._core.base.stateful_draws import is_seeded, refuse_seeded
from ..._core.distributed import blocks
from ..._core.distributed.blocks import Blocks
from ..._core.distributed.collectives import Collective
from ..._core.distributed.replicated_uses import Ledger
from ..._core.sharding.layout import WHOLE, layout, type_text
from ..ir.cuts import CROSSES, CUT, UNCUT
from ..ir.graph import SUMS, Step
from ..ir.inplace import is_dense
from ..ir.ranks_as_one import ROW
from . import ambient, branches, loops, mapped_rules, while_loops
from .earlier import kept_from_it
from .fake_tensors import Lies, Valueless
from .frame import WAITS, Frame, OfOneRank, RanksApart, RecordAgain, Unrecordable, Unrollable
from .rank_rows import RankRows
from .traced_float import Number, apart, near
from .value_guards import READS, Guard, can_guard

_LIFT, _CLONE = torch.ops.aten.lift_fresh.default, torch.ops.aten.clone.default
_ADD, _ZEROS = torch.ops.aten.add.Tensor, torch.ops.aten.zeros.default
_EQUAL, _DETACH = torch.ops.aten.equal.default, torch.ops.aten.detach.default
_READS = {torch.ops.aten._local_scalar_dense.default, _EQUAL, torch.ops.aten.is_nonzero.default}
_BACKWARD = torch_internals.backward_code
_CHECKPOINT = torch.utils.checkpoint.__file__
_LARGEST_LITERAL = 1 << 16  # numbers of one that a saved plan holds


class Leaked(torch_internals.FakeTensor):
    """A value of a recording that is over, and that was kept from it: it has none of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise kept_from_it()

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"<a value of an earlier recording: {type_text(self.shape, self.dtype, WHOLE)}>"


class Recorder(torch_internals.TorchDispatchMode):
    """The mode under which a function is recorded.

    Attributes:
        frame: what is being recorded, the function or the body of a loop: its graph, and the tensors that it used without being
            given them, each of which has a placeholder after the inputs.
        read: those of them whose value it read in Python.
        ledger: the numbers in it that are to be the same on all ranks.
        guards: the truth values of whole numbers among the inputs that it read.
        writes: what memory was written in place, in order.
        has_shared: whether a call was recorded as one node.
        cuts: the calls of `vfn.cut`, where a pipeline records; None elsewhere.
        earlier: the recordings of this call that were given up (`Earlier`); None where there is one alone.

    Args:
        disguise: gives of the value of a float among the inputs, and its number, what stands for it.
        given: the plain tensors and floats that the inputs stand for, in order; None where they have no values.
        rolls: whether the body of a loop is recorded once, and not for each iteration.
        shares: whether equal calls of a jitted function are recorded once.
        as_one: whether what simulated ranks do is recorded once for all of them.
        earlier: see the attribute.
        cuts: whether calls of `vfn.cut` are noted.
    """

    records_plan = True

    def __init__(
        self,
        disguise: Callable[[float, int], float] = near,
        given: Sequence[Any] | None = None,
        rolls: bool = False,
        shares: bool = False,
        as_one: bool = False,
        earlier: Any = None,
        cuts: bool = False,
    ) -> None:
        super().__init__()
        self.cuts: list[Any] | None = [] if cuts else None
        self.earlier = earlier
        self.counted: Any = None  # sees which operators are recorded of the function itself
        self.watching: Any = None  # sees which functions of torch it calls
        self.said = ""  # the user's line of what is recorded at another one
        self.said_again: Any = None  # and what repeats it, where that is a repetition
        self.rolls, self.shares, self.has_shared = rolls, shares, False
        self.writes: list[int] = []
        self._inputs, self.guards, self._answers = given, [], {}
        self._disguise, self._disguise_computed = disguise, near if disguise is near else apart
        self._numbers: dict[float, fx.Node] = {}  # what stands for floats -> their nodes
        self._computed: dict[Any, fx.Node] = {}  # the first of the nodes that compute the same float
        self._first: dict[fx.Node, fx.Node] = {}  # and of each of them that one
        self._given_out: list[weakref.ref[Number]] = []  # these, for whoever keeps one
        self.is_over = False
        self.frame = Frame(None)
        self.ledger = Ledger()
        self.loops: dict[int, Any] = {}  # the calls of loops, by the memory of their first results
        self._fake = Valueless(None if earlier is None else earlier.values)
        self.rows = RankRows(self) if as_one else None
        self._lines: dict[int, str] = {}  # of what autograd recorded, by its number
        # of what is being computed again; held, so that no later one is taken for it
        self._row: tuple[list[int], int] | None = None  # of the call of a row that is being recorded: see `row`
        self._in_row, self._has_rows = 0, False
        self._again: object = None
        self._times = 0
        self.formulas: dict[
            fx.Node, int
        ] = {}  # the calls that are mapped over leaves, with how much was written before
        self.lost = frozenset[int]()  # the ids of tensors to which no op may come: see `ended_transforms`
        self.literals: dict[int, torch.Tensor] = {}  # id of a stand-in -> the tensor that the program writes down
        self.read: list[torch.Tensor] = []
        self._reason = ""  # why a value is read
        self._sought: list[torch.Tensor] | None = None  # while it is found out what is read
        self.kept: list[Any] = []  # stand-ins live as long as the recorder: they are known by identity
        self._around = contextlib.ExitStack()

    @property
    def graph(self) -> fx.Graph:
        """What has been recorded: of the function, or of the body of a loop that is being recorded."""
        return self.frame.graph

    @property
    def constants(self) -> list[Any]:
        """What is used there without being given."""
        return self.frame.constants

    @property
    def is_in_body(self) -> bool:
        """Whether it records a body of a loop, or a branch."""
        return self.frame.outer is not None

    def scan(self, repeated: Any, xs: list[torch.Tensor], count: int, reverse: bool) -> Any:
        """A loop as one call, whose body is recorded once: its last carry and what it collects, as leaves. None where its body
        has to be recorded for each iteration."""
        return loops.recorded(self, repeated, xs, count, reverse) if self._nests() else None

    def choice(self, index: torch.Tensor, chosen: Any) -> Any:
        """A choice as one call, each branch of which is recorded: its results. None where one is to be taken now."""
        return branches.recorded(self, index, chosen) if self._nests(self.cuts is not None) else None

    def while_loop(self, loop: Any) -> Any:
        """A loop of unknown length as one call: the leaves of its last carry. None where its condition is to be read now."""
        return while_loops.recorded(self, loop) if self._nests(self.cuts is not None) else None

    def mapped(self, rule: Callable[..., Any], columns: Sequence[Sequence[Any]]) -> list[Any]:
        """What a formula gives for each row of plain tensors and other values: as one call for rows that are alike."""
        return mapped_rules.recorded(self, rule, columns)

    def maps(self) -> bool:
        """Whether `mapped` can be asked here: nothing else looks at what is done, and it is no simulated rank's part."""
        ours = (
            self.shares
            and self.frame.outer is None
            and not self._has_rows
            and (self.rows is None or not self.rows.used)
        )
        return ours and ambient.only_recorded() and not torch_internals.watched_by_other_modes()

    def takes_rows(self) -> bool:
        """Whether a call on the blocks of simulated ranks is noted once for all of them."""
        return self.rows is not None

    def for_all_ranks(self, *call: Any) -> Any:
        """What a call gives that is noted once: see `RankRows.call`."""
        return self.rows.call(*call)  # type: ignore[union-attr]

    def _leave_rows(self) -> None:
        """What comes is recorded of each rank by itself."""
        if self.rows is not None and self.rows.used:
            raise RanksApart
        self.rows = None

    def _nests(self, always: bool = False) -> bool:
        """Whether a call with bodies can be recorded; `always`: also where loops are written out."""
        torch_internals.settle()
        self._leave_rows()
        return (self.rolls or always) and not torch_internals.raw_duals()

    def reads_for(self, reason: str) -> None:
        """Note why the value is read that is read next."""
        self._reason = reason

    def sought(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The plain tensors whose one value Python would be given where it reads `x`."""
        before, self._sought = self._sought, []
        try:
            x.item()
            return list({id(one): one for one in self._sought}.values())
        finally:
            self._sought = before

    def __enter__(self) -> Any:
        self._dtype, self._settings = torch.get_default_dtype(), torch_internals.kernel_settings()
        self.bottom = sys._getframe(1).f_code
        self._around.enter_context(torch_internals.casts_not_kept())
        self._around.enter_context(torch_internals.default_dtype(self._dtype))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.watching is not None:
            self.watching.leave()
            if self.watching.waits and error[0] is None:
                raise RecordAgain
        self.frame.forget()
        changed = torch.get_default_dtype() is not self._dtype
        self._around.close()
        if changed and error[0] is None:
            raise Unrecordable("the function leaves torch's default dtype changed", "?")

    # --- what the function is given ---------------------------------------------------------------------------------

    def input(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """The stand-in of an input, a plain tensor."""
        return self._placeholder(x, name)

    def same_input(self, x: torch.Tensor) -> torch.Tensor | None:
        """An array that is an input under another name, as `detach` gives it, without a node; None for anything else."""
        local: Any = torch_internals.held_local(x) if type(x) is Array and x.vfn_notes is None else None
        if type(local) is not torch_internals.FakeTensor or not self.is_stand_in(local):
            return None
        spec = torch_internals.spec(x)
        if (
            local._plan_node.op != "placeholder" or layout(spec).unreduced
        ):  # a value, or a sum, of which other names know
            return None
        return torch_internals.new_dtensor(Array, local, spec)

    def row_of_inputs(self, given: Sequence[torch.Tensor]) -> None:
        """Note that stand-ins of inputs are the simulated ranks' blocks of one array."""
        self._has_rows = True
        nodes = list(map(self.node, given))
        numbers = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
        holders = [numbers[node] for node in nodes]
        for node, number in numbers.items():
            node.meta[ROW] = holders, number, 0

    def abstract(self, x: torch.Tensor) -> torch.Tensor:
        """The stand-in of a tensor of which shape and dtype are known, and on which device it will be is not."""
        fake = self._fake.like(x, torch_internals.default_device() if x.device.type == "meta" else x.device)
        self._note(fake, self._new_placeholder("abstract", fake))
        return fake

    def number(self, value: float, name: str) -> Number:
        """The stand-in of an input, a Python float."""
        return self._number(value, value, self._new_placeholder(name, value), self._disguise)

    def computed(self, value: float, meant: float, node: fx.Node) -> Number:
        """The stand-in of a float that a node gives; `meant`: its value in this call."""
        key = node.target, tuple(self._first.get(x, x) if isinstance(x, fx.Node) else repr(x) for x in node.args)
        self._first[node] = self._computed.setdefault(key, node)
        return self._number(value, meant, node, self._disguise_computed)

    def _number(self, value: float, meant: float, node: fx.Node, disguise: Callable[[float, int], float]) -> Number:
        number = len(self._numbers)
        while (other := disguise(value, number)) in self._numbers:  # sums of what others are less by
            number += 1
        value = other
        self._numbers[value] = node
        found = Number(value, meant, node, self)
        self._given_out.append(weakref.ref(found))
        return found

    def asked(self, what: str) -> Any:
        """The value of a float is needed, for what is said."""
        raise Unrecordable(f"the value of a float among the arguments is asked for by {what}", self._line()[0] or "?")

    def _new_placeholder(self, name: str, val: Any) -> fx.Node:
        last = self.frame.last
        if last is None or last is not next(iter(reversed(self.graph.nodes))):
            with self.graph.inserting_before() if last is None else self.graph.inserting_after(last):
                node = self.graph.placeholder(name)
        else:
            node = self.graph.placeholder(name)
        self.frame.last = node
        node.meta["val"], node.meta["line"] = val, ""
        return node

    def _placeholder(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if x.layout is not torch.strided:
            raise Unrecordable("a sparse tensor is used", self._line()[0] or "?")
        fake = self._fake.like(x)
        self._note(fake, self._new_placeholder(name, fake))
        self.frame.given.add(torch_internals.memory_number(fake))
        return fake

    def _constant(self, x: torch.Tensor) -> torch.Tensor:
        found = self.frame.known.get(id(x))
        if found is None:
            if self.frame.outer is None and self.earlier is not None and self.earlier.gives(self, x):
                return x
            if self.is_ours(x) and not self.frame.is_around(x._plan_node.graph):  # type: ignore
                raise Unrollable
            found = self.frame.known[id(x)] = self._placeholder(x, "constant")
            self.frame.hold(x, found._plan_node)  # type: ignore[attr-defined]
        return found

    def take(self, x: torch.Tensor, node: fx.Node) -> None:
        """Take what an earlier recording made, which has been written as it is to be, for what a node gives."""
        self._note(x, node)
        self.frame.given.add(torch_internals.memory_number(x))

    def outer(self, x: Any) -> Any:
        """The node that gives what the body of a loop uses without being given it: a tensor, or the node of a float."""
        if isinstance(x, fx.Node):
            return x if x.graph is self.graph else self.frame.float_of(x, self._new_placeholder)
        return self.node(x)

    # --- loops ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def within(self, frame: Frame) -> Iterator[None]:
        """What is recorded goes into this frame."""
        before, mode = self.frame, context.mode()
        remembered = dict(mode.remembered) if mode is not None else {}
        self.frame = frame
        try:
            yield
        finally:
            self.frame = before
            frame.forget()
            if mode is not None:
                for key in mode.remembered.keys() - remembered.keys():
                    mode.remembered.pop(key, None)  # which may let others go

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """What is asked for is of the frame around."""
        inner = self.frame
        assert inner.outer is not None
        self.frame = inner.outer
        try:
            yield
        finally:
            self.frame = inner

    def fake(self, x: torch.Tensor) -> torch.Tensor:
        """What stands for a plain tensor here."""
        return self._stand_in(x)

    def twin(self, x: torch.Tensor) -> torch.Tensor:
        """Another stand-in of the same value, in no memory of it."""
        fake = self._fake.like(x)
        self._note(fake, self.node(x))
        return fake

    def fake_like(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor without values that lies as this one."""
        return self._fake.like(x)

    def fake_dense(self, x: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
        """A new tensor without values like this one, or of another shape, without gaps."""
        return self._fake.contiguous(x.shape if shape is None else shape, x)

    def fake_stack(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """A new tensor without values, of `count` like this one along a new leading dim."""
        return self._fake.contiguous((count, *x.shape), x)

    def of_one_rank(self, x: torch.Tensor) -> torch.Tensor:
        """What one rank has where `x` stands for what ranks have: how it lies may be asked, nothing is computed of it."""
        if type(x) is Leaked:
            return x
        fake = self._fake.like(x)
        self._note(fake, OfOneRank())  # type: ignore[arg-type]
        return fake

    def waiting(self, lies: Lies) -> torch.Tensor:
        """A tensor without values that lies so, of which there is no node yet."""
        fake: Any = self._fake.lying(*lies)
        fake._plan_recorder, fake._plan_node = self, WAITS
        return fake

    def keep(self, x: torch.Tensor) -> None:
        """A tensor that waited has become one that is known."""
        self.kept.append(torch_internals.local(x) if isinstance(x, DTensor) else x)

    def stand_in(self, x: torch.Tensor, name: str, sliced: bool) -> torch.Tensor:
        """A new input of the body of a loop, without gaps, or (`sliced`) a slice of what it goes over."""
        with torch_internals.unrecorded(), self._fake:
            fake = x.select(0, 0) if sliced else x
        if sliced or not is_dense(fake):
            fake = self._fake.like(fake) if sliced else self._fake.contiguous(fake.shape, fake)
        return self._placeholder(fake, name)

    def total(self, node: fx.Node) -> tuple[fx.Node, fx.Node]:
        """A new input of the body of a loop, and its sum with what a node gives."""
        total = self.stand_in(self._fake.contiguous(node.meta["val"].shape, node.meta["val"]), "total", False)
        added = self.graph.call_function(_ADD, (total._plan_node, node))  # type: ignore[attr-defined]
        added.meta = {"val": self._fake(_ADD, (total, node.meta["val"]), {}), "line": node.meta.get("line", "")}
        return total._plan_node, added  # type: ignore[attr-defined]

    def zeros(self, x: torch.Tensor) -> fx.Node:
        """The node of zeros like what `x` stands for, in order."""
        out = self._fake.contiguous(x.shape, x)
        node = self.graph.call_function(_ZEROS, (list(x.shape),), {"dtype": x.dtype, "device": x.device})
        return self._made(node, out, self._line()[0], None)._plan_node

    def step(self, step: Step, args: tuple[Any, ...], shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Record a call of ours, and give what stands for its result, of this shape and otherwise like a tensor."""
        line, again = self._line()
        node = self.graph.call_function(step, tuple(self._nodes(args)))
        return self._made(node, self._fake.contiguous(shape, like), line, again)

    def call_on_ranks(self) -> None:
        """Make ready for a call that takes, and gives, what each rank has: no part of a body, nor of what ranks do alike."""
        torch_internals.settle()
        if self.frame.outer is not None:
            raise Unrollable
        self._leave_rows()

    def gives(self, step: Step, args: Sequence[Any], lies: Sequence[Any]) -> list[torch.Tensor]:
        """Record a call of ours that takes one list, and give what stands for its results, each lying as said (shape, stride,
        dtype, device)."""
        line, again = self._line()
        node = self.graph.call_function(step, (self._nodes(list(args)),))
        return self._made(node, [self._fake.lying(*one) for one in lies], line, again)

    def mark(self, x: torch.Tensor, number: int, back: bool) -> torch.Tensor:
        """Note that a plain tensor crosses the `number`-th cut, `back` as a cotangent; and give what stands for it behind."""
        line, again = self._line()
        node = self.graph.call_function(UNCUT if back else CUT, (self.node(x),))
        node.meta[CROSSES] = number
        return self._made(node, self._fake.like(x), line, again)

    def called(self, loop: Step, args: tuple[Any, ...], vals: list[Any]) -> tuple[fx.Node, list[Any]]:
        """Record the call of a loop, and give it and what stands for its results."""
        line, again = self._line()
        node = self.graph.call_function(loop, args)
        self._made(node, vals, line, again)
        return node, vals

    def more_results(self, node: fx.Node, vals: list[Any]) -> list[Any]:
        """Let a loop, which has come to keep more, give these as well. Stand-ins of them, nodes for numbers."""
        parts = self.more_parts(node, vals)
        for val, part in zip(vals, parts, strict=True):
            if isinstance(val, torch.Tensor):
                self._note(val, part)
        return [val if isinstance(val, torch.Tensor) else part for val, part in zip(vals, parts, strict=True)]

    def more_parts(self, node: fx.Node, vals: Sequence[Any]) -> list[fx.Node]:
        """The same, of which no tensor stands for any: the nodes."""
        places = len(node.meta["val"])
        node.meta["val"] = [*node.meta["val"], *vals]
        found = []
        with node.graph.inserting_after(node):
            for i, val in enumerate(vals, places):
                part = node.graph.create_node("call_function", operator.getitem, (node, i))
                part.meta = {**node.meta, "val": val}
                found.append(part)
        return found

    def outer_part(self, part: fx.Node) -> fx.Node:
        """What gives here what a node does that no tensor stands for."""
        if part.graph is self.graph or not isinstance(part.meta["val"], torch.Tensor):
            return self.outer(part)
        fake = self._fake.like(part.meta["val"])
        self._note(fake, part)
        return self.outer(fake)

    def forget_inputs(self) -> None:
        """Hold the inputs no longer: what was recorded may be kept for long."""
        self._inputs, self.is_over = None, True
        for one in self._given_out:
            if (number := one()) is not None:
                number.settle()

    def end(self) -> None:
        """Mark what the function may have kept, where nothing is computed of it any more."""
        for x in self.kept:
            x.__class__ = Leaked

    def is_ours(self, x: torch.Tensor) -> bool:
        """Whether `x` is a value of this recording, here or in another frame."""
        return getattr(x, "_plan_recorder", None) is self

    def _is_noted_outside(self, x: torch.Tensor) -> bool:
        """Whether `x` is an array from outside of the recording that remembers something."""
        if type(x) is not Array or x.vfn_notes is None:
            return False
        local: Any = torch_internals.held_local(x)
        return local is not None and not self.is_ours(blocks.held(local)[0])

    def is_stand_in(self, x: torch.Tensor) -> bool:
        """Whether `x` is a value of what is recorded here."""
        return self.is_ours(x) and x._plan_node.graph is self.graph  # type: ignore[attr-defined]

    def node(self, x: torch.Tensor) -> fx.Node:
        """The node that gives a plain tensor."""
        if not self.is_stand_in(x):
            x = self._constant(x)
        return x._plan_node  # type: ignore[attr-defined]

    def know(self, x: torch.Tensor, **what: Any) -> None:
        """Note of a plain tensor what only the one who made it knows."""
        self.node(x).meta.update(what)

    def counts_as_alike(self, x: torch.Tensor) -> None:
        """Note that a plain tensor counts as the same on all ranks."""
        if torch_internals.is_bare(x) and x.layout is torch.strided:
            self.node(x).meta["alike"] = True

    def stands_for_a_float(self, x: Any) -> bool:
        """Whether a number stands for an input of the plan, or was computed from one."""
        return isinstance(x, Number) or (type(x) is float and x in self._numbers)

    def float_of(self, x: Any) -> Any:
        """What is equal for numbers that stand for the same input, or for the same function of the inputs; None for others."""
        node = x.node if isinstance(x, Number) else self._numbers.get(x) if type(x) is float else None
        return None if node is None else self._first.get(node, node)

    def _note(self, fake: torch.Tensor, node: fx.Node) -> None:
        fake._plan_recorder, fake._plan_node = self, node  # type: ignore[attr-defined]
        self.kept.append(fake)

    # --- what the function does -------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and type(args[0]) is torch_internals.FakeTensor:  # asked of each block of a new array
            return args[0].fake_device
        if self.watching is not None:
            self.watching.passed_by()
        if self.lost and any(id(x) in self.lost for x in op_arguments.tensors_in(args, kwargs)):
            raise Unrollable
        if self.frame.outer is not None:
            self.frame.see(op_arguments.tensors_in(args, kwargs))
        elif Array in types:
            self.frame.see(filter(self._is_noted_outside, op_arguments.tensors_in(args, kwargs)))
        if not _PLAIN.issuperset(types):
            self._line()  # which the autograd node that was just made will have
            return NotImplemented
        with torch_internals.no_torch_function():  # a body's modes are not to see what is done here
            return self._recorded(_ZEROS if func is _NO_ZEROS else func, args, kwargs)

    def _recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        about = _about(func)
        if about.reads:
            return self._read(func, op_arguments.tensors_in(args, kwargs), args, kwargs)
        if about.nothing:
            return func(*args, **kwargs)
        if about.seeded:
            refuse_seeded(func, args, kwargs)
        line, again = self._line()
        self._check_settings(line)
        if about.writes:
            self._check_writes(func, args, kwargs, line)
        if func is _LIFT:
            return self._literal(args[0], line, again)
        if about.reshapes:
            return self._in_another_shape(func, args, kwargs, line, again)
        fakes, fake_kwargs = self._stand_ins((args, kwargs))
        nodes, node_kwargs = self._nodes((fakes, fake_kwargs))
        if func is _AS_STRIDED:  # a part of a value may begin elsewhere in its memory for each rank
            self._leave_rows()
        if about.sized or func is _AS_STRIDED:
            self._check_numbers(func, fakes, nodes, kwargs, line)
        outs = [(x, x.shape) for x in fake_kwargs.values() if isinstance(x, torch.Tensor)]
        try:
            out = self._fake(func, fakes, fake_kwargs)
        except torch_internals.NO_VALUE_ERRORS as error:
            raise Unrecordable(
                f"torch's {_name(func)} gives a result whose shape, or whether it can run, depends on values",
                line or "?",
            ) from error
        if any(x.shape != shape for x, shape in outs):
            raise Unrecordable(f"torch's {_name(func)} gives its out= another shape", line or "?")
        if torch.get_default_dtype() is not self._dtype:
            func, more = ambient.resolved(func, args, kwargs, out)
            node_kwargs |= more
        self._count(func, line)
        name = about.node if func is about.op else None
        node = self.graph.create_node("call_function", func, tuple(nodes), node_kwargs, name)
        if torch_internals.in_backward_pass():
            node.meta["backward"] = True
        return self._made(node, out, line, again)

    def _count(self, func: Any, line: str) -> None:
        """Tell what counts them of an operator of the function itself."""
        if self.counted is None or self.frame.outer is not None or torch_internals.in_backward_pass():
            return
        if not (self._has_rows or (self.rows is not None and self.rows.used)):
            self.counted.see(func, line)

    def _literal(self, x: torch.Tensor, line: str, again: Any) -> torch.Tensor:
        """A tensor that was written down: the plan keeps it, and each run gets a copy."""
        node = self.graph.call_function(_CLONE, (self.node(x),))
        out = self._made(node, self._fake.like(x), line, again)
        self.literals[id(out)] = x
        if x.device.type == "cpu" and x.numel() <= _LARGEST_LITERAL:
            tables.table(x)
        return out

    def _in_another_shape(self, func: Any, args: Any, kwargs: Any, line: str, again: Any) -> torch.Tensor:
        """`squeeze_` and its like: the tensor is from here on the view of it that has the other shape."""
        self._leave_rows()
        x, twin = args[0], torch_internals.out_of_place(func)
        if self.is_ours(x) and not self.is_stand_in(x):
            raise _writes_outside(op_text(func), False, line)
        if twin is None or torch_internals.schema(twin).arguments[0].alias_info is None:  # `set_`, `resize_`
            raise Unrecordable(f"torch's {_name(func)} changes a tensor's memory", line)
        nodes = self._nodes(args)
        self._freed(x)
        with self._fake:
            func(x, *self._stand_ins(args[1:]), **kwargs)
        return self._rebound(x, self.graph.call_function(twin, tuple(nodes), self._nodes(kwargs)), line, again)

    def _freed(self, x: torch.Tensor) -> None:
        """A tensor is about to become another value: the node that gave it describes what it was by a tensor of its own."""
        before = self.node(x)
        before.meta["val"] = self._fake.like(x)
        if before.target is operator.getitem:  # what gives several knows each of them, too
            whole, place = before.args
            whole.meta["val"] = [*whole.meta["val"][:place], before.meta["val"], *whole.meta["val"][place + 1 :]]  # type: ignore

    def _rebound(self, x: torch.Tensor, node: fx.Node, line: str, again: Any) -> torch.Tensor:
        self._made(node, x, line, again)
        x._plan_node = node  # type: ignore[attr-defined]
        return x

    def assigned(self, x: torch.Tensor, value: Any, assign: Any) -> None:
        """`x.data = value`: the tensor is from here on another name of the value's memory."""
        with torch_internals.no_torch_function():
            if not isinstance(value, torch.Tensor) or type(value) not in _PLAIN:
                return assign(x, value)
            self._leave_rows()
            line, again = self._line()
            if not self.is_stand_in(x) and torch_internals.memory(x) == torch_internals.memory(value):
                return None  # as `nn.Module.to` does that changes nothing
            self._check_exchange("`.data = `", x, line)
            value = self._stand_in(value)
            if value.device != x.device:
                raise Unrecordable("`.data = ` moves a tensor to another device", line or "?")
            node = self.graph.call_function(_DETACH, (self.node(value),))
            self._freed(x)
            assign(x, value)
            self.literals.pop(id(x), None)
            self._rebound(x, node, line, again)

    def swapped(self, x: torch.Tensor) -> None:
        """`torch.utils.swap_tensors`, with `x` as one of the two. What arrays hold goes with them."""
        line = self._line()[0]
        self._check_exchange("torch.utils.swap_tensors", x, line)
        if type(x) in _PLAIN:
            raise Unrecordable("torch.utils.swap_tensors exchanges two tensors", line or "?")

    def _check_exchange(self, what: str, x: torch.Tensor, line: str) -> None:
        """Raise where a tensor that outlives the function is to become another."""
        held = torch_internals.local(x) if isinstance(x, DTensor) else x
        for part in blocks.parts(held):
            given = self.is_stand_in(part) and part._plan_node.op == "placeholder"
            if given or not self.is_stand_in(part):
                raise _writes_outside(what, given, line)

    def row(self, call: Callable[..., Any], given: Iterable[tuple[Any, Sequence[Any]]]) -> list[Any]:
        """What one call on the blocks of simulated ranks gives each of them. `given`: (key, arguments) of each rank; with equal
        keys there is one call. Their nodes know each other."""
        self._has_rows = True
        before, holders, seen = (self._row, self._in_row), list[int](), dict[Any, tuple[int, Any]]()
        outs = []
        try:
            for key, local in given:
                if key not in seen:
                    self._row, self._in_row = (holders, len(seen)), 0
                    seen[key] = len(seen), call(*local)
                number, out = seen[key]
                holders.append(number)
                outs.append(out)
        finally:
            self._row, self._in_row = before
        return outs

    def _made(self, node: fx.Node, out: Any, line: str, again: Any) -> Any:
        """The result of a call, each tensor of it known by its node."""
        node.meta["val"], node.meta["line"] = out, line
        if self._row is not None:
            node.meta[ROW] = *self._row, self._in_row
            self._in_row += 1
        if again is not None:
            node.meta["again"] = again
        if (sums := context.sums_in()) is not None:
            node.meta[SUMS] = sums
        if isinstance(out, torch.Tensor):
            if not self.is_stand_in(out):  # what is written in place is known already
                self._note(out, node)
        elif isinstance(out, (list, tuple)):
            for i, one in enumerate(out):
                if isinstance(one, torch.Tensor) and not self.is_stand_in(one):
                    part = self.graph.create_node("call_function", operator.getitem, (node, i))
                    part.meta.update(node.meta, val=one)
                    if self._row is not None:
                        part.meta[ROW] = *node.meta[ROW], i
                    self._note(one, part)
        return out

    def collective(self, collective: Collective, x: Any, *turn: torch.Tensor) -> Any:
        """A collective on a local value, noted instead of being carried out."""
        with torch_internals.no_torch_function():
            return self._collective(collective, x, map(self.node, turn))

    def _collective(self, collective: Collective, x: Any, turn: Iterable[fx.Node]) -> Any:
        line, again = self._line()
        collective = dataclasses.replace(collective, line=line)
        if type(x) is Blocks and self.rows is not None:
            return self.rows.collective(collective, x, line, again)
        if type(x) is Blocks:
            blocks_ = [self._stand_in(block) for block in x.blocks]
            out = Blocks(collective.like_all(blocks_, self._fake.contiguous))
            node = self.graph.call_function(collective, ([self.node(block) for block in blocks_], *turn))
            self._made(node, out.blocks, line, again)
            return out
        return self.made_by(collective, x, line, again, turn)

    def made_by(
        self, collective: Collective, x: torch.Tensor, line: str, again: Any, turn: Iterable[fx.Node] = ()
    ) -> torch.Tensor:
        """What a collective gives for one block."""
        out = collective.like(self._stand_in(x), self._fake.contiguous)
        return self._made(self.graph.call_function(collective, (self.node(x), *turn)), out, line, again)

    def effect(self, step: Step, *args: Any) -> None:
        """A call that does something besides giving a result; plain tensors among its arguments are values of the plan."""
        self._leave_rows()
        line, _ = self._line()
        node = self.graph.call_function(step, tuple(self._nodes(args)))
        node.meta["val"], node.meta["line"] = None, line

    def _stand_in(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.is_stand_in(x) else self._constant(x)

    def _stand_ins(self, a: Any) -> Any:
        return op_arguments.mapped(lambda x: self._stand_in(x) if isinstance(x, torch.Tensor) else x, a)

    def _nodes(self, a: Any) -> Any:
        return op_arguments.mapped(self._node_of, a)

    def _node_of(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return self.node(x)
        if self._numbers and isinstance(x, float) and (node := self._numbers.get(float.__add__(x, 0.0))) is not None:
            return self.outer(node)
        return x

    def _read(self, func: Any, tensors: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Any:
        if self._sought is not None:
            self._sought += tensors
            return 0
        reason, self._reason = self._reason, ""
        if any(any(row.holders) for x in tensors if (row := getattr(x, "_plan_row", None)) is not None):
            self._leave_rows()
        ours = list(map(self.is_ours, tensors))
        values = {id(x): self.literals.get(id(x)) if own else x for x, own in zip(tensors, ours, strict=True)}
        if any(
            value is None or (value is not x and torch_internals.version(x))
            for x, value in zip(tensors, values.values())
        ):
            if (
                func is not _EQUAL
                and self._inputs is not None
                and self.frame.outer is None
                and can_guard(node := self.node(tensors[0]))
            ):
                self._leave_rows()
                return self._answer(node, self._inputs)
            what = "torch.distributions checks values, but for those with validate_args=False"
            reason = reason or (what if _checks_values() else "a value is read in Python")
            raise Unrecordable(reason, self._line()[0] or "?")
        for x, own in zip(tensors, ours, strict=True):
            if not own:  # a constant, whose value counts as it is now
                self._constant(x)
                self.read.append(x)
        return func(*(values.get(id(a), a) for a in args), **kwargs)

    def _answer(self, node: fx.Node, inputs: Sequence[Any]) -> bool:
        """The truth value that a node gives for the inputs of now, which the plan is made for."""
        if node not in self._answers:
            if len(self.guards) == READS:
                raise Unrecordable(f"more than {READS} truth values are read in Python", self._line()[0] or "?")
            guard = Guard(node, {x._plan_node: c for c in self.constants for x in (self.frame.known[id(c)],)})  # type: ignore
            try:
                with torch_internals.unrecorded():
                    guard.value = self._answers[node] = guard(inputs)
            except NoValueError:  # of inputs that are shapes alone
                what = "a truth value of arguments is read in Python, and of them only shapes are known"
                raise Unrecordable(what, self._line()[0] or "?") from None
            self.guards.append(guard)
        return self._answers[node]

    def _check_settings(self, line: str) -> None:
        if (now := torch_internals.kernel_settings()) != self._settings:
            what = torch_internals.changed_setting(self._settings, now)
            raise Unrecordable(f"{what} is set inside the function, and not around its call", line)

    def _check_numbers(self, func: Any, fakes: Any, nodes: Any, kwargs: Any, line: str) -> None:
        """Raise where a number among the arguments says what a later call may have otherwise."""
        if func is not _AS_STRIDED:
            if any(isinstance(a, fx.Node) and isinstance(a.meta["val"], float) for a in nodes):
                raise Unrecordable(
                    f"the value of a float among the arguments decides the shape of torch's {_name(func)}", line
                )
        elif [*fakes, kwargs.get("storage_offset")][3] is not None:
            # the next argument may begin elsewhere in its memory
            if torch_internals.memory_number(fakes[0]) in self.frame.given:
                raise Unrecordable("torch's as_strided counts from where the memory of an argument begins", line or "?")

    def _check_writes(self, func: Any, args: Any, kwargs: Any, line: str) -> None:
        for position, name in blocks.written(func):
            target = args[position] if position < len(args) else kwargs.get(name)
            for x in target if isinstance(target, (list, tuple)) else (target,):
                if not isinstance(x, torch.Tensor):
                    continue
                if not self.is_stand_in(x) or torch_internals.memory_number(x) in self.frame.given:
                    raise _writes_outside(op_text(func), self.is_stand_in(x), line)
                if self.rows is not None:
                    self.rows.check_write(x)
                self.writes.append(torch_internals.memory_number(x))

    def _line(self) -> tuple[str, Any]:
        """The user's line that led here; and, where it is being computed again for a backward pass, which time this is."""
        frame: FrameType | None = sys._getframe(1)
        if not torch_internals.in_backward_pass():
            line = self.said or source_lines.user_line(frame)
            self._lines[torch_internals.autograd_count() - 1] = line
            return line, self.said_again
        line, top, user = "", None, None
        while frame is not None:
            code = frame.f_code
            if code is _BACKWARD:
                break
            if code.co_filename == _CHECKPOINT:
                top = frame
            elif user is None and source_lines.is_users(code.co_filename):
                user = frame
            frame = frame.f_back
        top = state.now().repeats or top
        if top is not self._again:
            self._again, self._times = top, self._times + (top is not None)
        again = self._times if top is not None and not state.now().may_merge else None
        if user is not None:
            line = f"{user.f_code.co_filename}:{user.f_lineno}"
            self._lines[torch_internals.autograd_count() - 1] = line
            return line, again
        return self._lines.get(torch_internals.current_autograd_number(), "") or source_lines.user_line(frame), again


def _writes_outside(where: str, given: bool, line: str) -> InPlaceError:
    what = "an argument" if given else "a tensor that the function closes over"
    return InPlaceError(
        report(
            where,
            f"jit: this changes {what} in place, and a recorded function is pure",
            [f"at {source_lines.quoted(line)}"] if line else [],
            "a new value: x = x + y for x += y, x.clone() before the write; to update parameters in their own "
            "memory return the new ones, and vfn.jit(f, donate_argnums=...)",
        )
    )


def _checks_values() -> bool:
    """Whether a distribution of torch's is looking at the values that it is given."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not source_lines.is_users(frame.f_code.co_filename):
        if frame.f_globals.get("__name__") == "torch.distributions.distribution":
            return True
        frame = frame.f_back
    return False


_SIZED = frozenset(
    (
        "arange",
        "range",
        *(
            f"upsample_{kind}"
            for kind in ("nearest1d nearest2d nearest3d linear1d bilinear2d bicubic2d trilinear3d").split()
        ),
    )
)
_PLAIN = frozenset((*torch_internals.BARE, torch.nn.Parameter))
_AS_STRIDED = torch.ops.aten.as_strided.default
_NO_ZEROS = torch.ops.aten._efficientzerotensor.default  # that of forward mode, which must not be written
_DEVICE = torch.ops.prim.device.default
_NOTHING = {
    torch.ops.aten.detach_.default,
    _DEVICE,
    torch.ops.aten._has_same_storage_numel.default,
}


def _name(func: Any) -> str:
    return torch_internals.operator_name(func).split("::")[-1].strip("_")


class _About(NamedTuple):
    """What is asked of an operator each time it is recorded.

    Attributes:
        op: itself.
        reads: it gives a value to Python.
        nothing: it computes nothing.
        seeded: it may draw from a generator of torch's.
        writes: it writes some argument.
        reshapes: it gives its argument another shape.
        sized: a number among its arguments decides the shape of its result.
        node: what a graph calls its nodes, which fx finds out in 2 us; None where that may depend on the graph.
    """

    op: Any
    reads: bool
    nothing: bool
    seeded: bool
    writes: bool
    reshapes: bool
    sized: bool
    node: str | None


_operators: dict[int, _About] = {}  # by their identity, as torch computes their hash in Python


def _about(op: Any) -> _About:
    found = _operators.get(id(op))
    if found is None:
        node = fx.Graph().call_function(op).name
        found = _operators[id(op)] = _About(
            op,
            op in _READS,
            op in _NOTHING,
            is_seeded(op),
            bool(blocks.written(op)),
            torch.Tag.inplace_view in op.tags,
            _name(op) in _SIZED,
            None if node[-1].isdigit() else node,
        )
    return found
