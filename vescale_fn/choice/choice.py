"""What `auto` answers: the layout that it chose, the next best ones, and why."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import fx

from .._core.base import context, tree
from .._core.base.errors import SpecError
from .._core.base.messages import meant, mesh_text, report
from .._core.distributed.comm_log import CommLog
from .._core.distributed.mesh import make_mesh
from .._core.sharding.index_map import local_shape
from .._core.sharding.layout import type_text
from .._core.sharding.placements import normal
from .._core.sharding.spec import P
from ..hardware import Hardware
from ..plan.ir.graph import calls, name_of, value
from ..plan.ir.memory_use import MemoryUse, bytes_text, place
from ..plan.jit import Jitted, jit
from .agreed import check
from .apply import applied
from .apply_calls import operands, results
from .given import as_given
from .moves import MoveToWrite, moves
from .price import price
from .price_drawing import side_by_side
from .price_report import Price, Prices
from .recording import Recording
from .rules_text import Rule, kind_of, rules_of
from .search.layouts import Layouts
from .verified import Verified, specs_of

_SHOWN = 6  # layouts of a table
_REASONS = 2  # arguments that are named of those that lie otherwise


class ChosenLayout:
    """A layout of a step, chosen among many; made by `auto`. It prints as a table of the best ones.

    Args:
        recorded: the step.
        ranked: layouts with the prices of their plans, the best first.
        hardware: that they are priced for.
        budget: the bytes that a rank may need; None: any.
        again: searches once more, on a mesh, with the specs of some placeholders, by number, given: a layout with its
            ``seconds``, ``compute`` and ``bytes`` as predicted.
        donated: the arguments by position whose memory a call may use up.

    Attributes:
        microbatches: in how many parts the step computes its batch, where that was chosen, too.
        in_other_parts: the best layouts of other numbers of parts, the best first.
    """

    microbatches: int | None = None
    in_other_parts: tuple[ChosenLayout, ...] = ()

    def __init__(
        self,
        recorded: Recording,
        ranked: Sequence[Verified],
        hardware: Hardware,
        budget: float | None = None,
        again: Callable[[Mapping[str, int], dict[int, P]], Any] | None = None,
        donated: Sequence[int] = (),
    ) -> None:
        self.recorded, self.hardware, self.budget, self.donated = recorded, hardware, budget, tuple(donated)
        self.ranked, self._again = tuple(ranked), again
        self.layouts: Layouts = ranked[0].layouts

    # --- the layout ---------------------------------------------------------------------------------------------------

    def mesh(self) -> Any:
        """The mesh that the layout is of, made of the ranks that there are (`make_mesh`); all of them ask for it, and have
        chosen the same.

        Raises:
            DivergenceError: they have not.
        """
        made = make_mesh(tuple(self.layouts.mesh.values()), tuple(self.layouts.mesh))
        check(made, self.layouts, self.recorded.name)
        return made

    @property
    def specs(self) -> tuple[Any, ...]:
        """How the arguments lie: for each, by position, a tree of specs."""
        return specs_of(self.recorded, self.layouts)

    def rules(self, argument: int = 0) -> list[Rule]:
        """How the leaves of an argument lie, as few rules for `spec_from_rules`: (regular expression, spec), to paste."""
        return rules_of(dict(zip(_dotted(self.recorded.call.args[argument]), tree.leaves(self.specs[argument]))))

    @property
    def moves(self) -> list[MoveToWrite]:
        """Where the step is to say ``with_sharding``, so that it runs as chosen without this choice, from the first line on;
        nowhere, where one is chosen that was given and says so itself."""
        return [] if self.ranked[0].step is not None else moves(self.recorded, self.layouts)

    def applied(self, mesh: Any = None) -> Callable[..., Any]:
        """The step in this layout as a function, to be run eagerly; on the mesh of its arguments, where none is given."""
        if (step := self.ranked[0].step) is not None:
            return as_given(step, self.specs, self.layouts.mesh, mesh)
        return applied(self.recorded, self.layouts, mesh)

    def jit(self, mesh: Any = None, **how: Any) -> Jitted[..., Any]:
        """The step in this layout as a plan; `how`: the arguments of `jit`. What was donated when it was priced is here too,
        and the plan is held to the memory, ``memory=``, where it was then; to that of all ranks that it simulates."""
        memory = self.ranked[0].memory
        held = memory and memory * (context.simulated() or 1)
        return jit(self.applied(mesh), **{"donate_argnums": self.donated, "memory": held, **how})

    # --- what it costs ------------------------------------------------------------------------------------------------

    @property
    def predicted(self) -> Price:
        """What a step costs: seconds by part, bytes by axis, memory."""
        return self.ranked[0].price

    def memory(self) -> MemoryUse:
        """The memory that one rank needs, over the calls."""
        return self.predicted.memory

    def comms(self) -> CommLog:
        """The collectives of a step, as `comm_log` lists them."""
        return self.predicted.comms

    @property
    def others(self) -> tuple[ChosenLayout, ...]:
        """The next best ones; and the best ones of other numbers of `microbatches`."""
        return (*(self.of([one]) for one in self.ranked[1:]), *self.in_other_parts)

    def of(self, ranked: Sequence[Verified]) -> ChosenLayout:
        """A choice of other layouts of the step, the best first."""
        found = ChosenLayout(self.recorded, ranked, self.hardware, self.budget, self._again, self.donated)
        found.microbatches = self.microbatches
        return found

    def compare(self, *specs: Any, mesh: Mapping[str, int] | None = None, **named: Any) -> Prices:
        """What the step costs as it is written, its arguments in other layouts, beside this choice.

        Args:
            specs: each as for `price`: a tuple with a spec, or a prefix tree, for each argument.
            mesh: of these; by default that of the choice.
            named: the same, with names for the table.
        """
        rows = {**{f"other {i + 1}": one for i, one in enumerate(specs)}, **named}
        on = dict(self.layouts.mesh if mesh is None else mesh)
        how = {"mesh": on, "hardware": self.hardware, "donate_argnums": self.donated}
        of = lambda one: price(self.recorded.f, *self.recorded.call.args, specs=one, **how)
        prices = {name: one if isinstance(one, Price) else of(one) for name, one in rows.items()}
        return replace(self.predicted, name="chosen").compare(**prices)

    # --- why ----------------------------------------------------------------------------------------------------------

    def explain(self, what: str) -> str:
        """Why something lies as it does: of an argument, by the regular expression of its path (``r"mlp\\.up$"``), the other
        ways with what they would cost; of a line, ``"model.py:12"``, what its calls are given and give, and what they take.

        Raises:
            SpecError: nothing is called so.
        """
        if re.search(r":\d+$", what):
            return "\n".join(self._of_line(what))
        paths = self._paths()
        found = [n for n, path in enumerate(paths) if path is not None and re.search(what, path)]
        if not found:
            known = [path for path in paths if path is not None]
            raise SpecError(
                report(
                    "explain",
                    f"no argument's path, and no line, matches {what!r}{meant(what, known)}",
                    [f"there are {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"] if known else [],
                )
            )
        return "\n".join(line for same in _alike(found, paths, self.recorded) for line in self._of_inputs(same, paths))

    def _paths(self) -> list[str | None]:
        """Of each placeholder its path with dots, None where it is no tensor; the first argument's without its name."""
        args = self.recorded.call.args
        dotted = [f"{_name(self.recorded, n)}{path}" for n, arg in enumerate(args) for path in _dotted(arg)]
        of = dict(enumerate(dotted))
        return [
            (of.get(at) if at is not None else path) if isinstance(value(node), torch.Tensor) else None
            for at, path, node in zip(self.recorded.leaves, self.recorded.paths, self.recorded.placeholders)
        ]

    def _of_inputs(self, same: Sequence[int], paths: Sequence[str | None]) -> Iterator[str]:
        """What arguments that are alike could be split by, and what it would cost."""
        axes, first = dict(self.layouts.mesh), same[0]
        x = value(self.recorded.placeholders[first])
        chosen = P(*(self.layouts.inputs[first] or ()))
        yield f"{_names([paths[n] for n in same])}: {type_text(x.shape, x.dtype, chosen)}, {_share(x, axes, chosen)} a rank"
        lines = {user.meta.get("line") or "?": None for n in same for user in self.recorded.placeholders[n].users}
        for line in list(lines)[:4]:
            yield f"  used at {place(line)}"
        if self._again is None:
            yield "  what else it could be is not known of a choice without its search"
            return
        rows = [(repr(spec), spec) for spec in _ways(x, axes) if spec != normal(chosen, axes, x.shape)]
        base = self._again(axes, dict.fromkeys(same, chosen))
        for text, spec in rows:
            try:
                other = self._again(axes, dict.fromkeys(same, spec))
            except Exception as error:  # nothing fits, or no rule allows it
                yield f"  {text}: {str(error).partition(chr(10))[0]}"
                continue
            took = [(other.compute - base.compute), (other.seconds - other.compute) - (base.seconds - base.compute)]
            yield (
                f"  {text}: {_signed(sum(took))} a step (compute {_signed(took[0])}, communication {_signed(took[1])}), "
                f"memory {'+' if other.bytes >= base.bytes else '-'}{bytes_text(int(abs(other.bytes - base.bytes)))}"
            )

    def _of_line(self, what: str) -> Iterator[str]:
        """The calls of a line."""
        nodes = [node for node in calls(self.recorded.graph) if (node.meta.get("line") or "").endswith(what)]
        if not nodes:
            raise SpecError(report("explain", f"no call of {self.recorded.name} comes from {what}"))
        cost = next((one for one in self.predicted.lines if one.line.endswith(what)), None)
        yield place(nodes[0].meta["line"])
        if cost is not None:
            took = f"{cost.compute * 1e3:.3g} ms of computing, {cost.exposed * 1e3:.3g} ms of waiting"
            yield f"  {took}, {bytes_text(cost.bytes)} at the peak"
        shown: dict[str, int] = {}
        for node in nodes:
            text = self._call_text(node)
            shown[text] = shown.get(text, 0) + 1
        yield from (f"  {text}{f'   x{n}' if n > 1 else ''}" for text, n in shown.items())

    def _call_text(self, node: fx.Node) -> str:
        stated = self.layouts.calls.get(node.name)
        if stated is None:
            how = "as the rules vote" if self.ranked[0].step is None else "as the step that was given states"
            return f"{name_of(node) or node.name}: {how}"
        ins = ", ".join(type_text(value(x).shape, value(x).dtype, spec) for x, spec in zip(operands(node), stated.ins))
        outs = ", ".join(type_text(x.shape, x.dtype, spec) for x, spec in zip(results(node), stated.outs))
        return f"{name_of(node) or 'part'}({ins}) -> {outs}"

    # --- as a table ---------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        best, budget = self.predicted, "" if self.budget is None else f" of {bytes_text(int(self.budget))}"
        named = f": {_given_as(self.ranked[0])}" if self.ranked[0].name else ""
        head = (
            f"{self.recorded.name} on {mesh_text(self.layouts.mesh)}, {self.hardware.name}{named}: "
            f"predicted {_time(best.seconds)} (compute {_time(best.compute)}, exposed communication {_time(best.exposed)}), "
            f"peak {bytes_text(best.peak)}{budget}"
        )
        head += f", in {self.microbatches} parts" if self.microbatches is not None else ""
        head += f"\n  {told}" if (told := self.ranked[0].held) else ""
        lines = [head, *(f"  {pattern!r:<32} {spec!r}" for pattern, spec in self.rules())]
        if len(self.ranked) > 1:
            lines += ["the next best:"]
        for one in [one for n, one in enumerate(self.ranked) if 0 < n and (n < _SHOWN or one.name)]:
            cost = one.price
            over = "" if one.fits else f", {bytes_text(int(cost.peak - (self.budget or 0)))} too much"
            lines.append(
                f"  {_signed(cost.seconds - best.seconds)} (compute {_signed(cost.compute - best.compute)}, exposed "
                f"{_signed(cost.exposed - best.exposed)}), peak {bytes_text(cost.peak)}{over}: {self._why(one)}"
                f"{f'; {one.held}' if one.held else ''}"
            )
        lines += ["the best of other numbers of parts:"] if self.in_other_parts else []
        for other in self.in_other_parts:
            took, needs = _signed(other.predicted.seconds - best.seconds), bytes_text(other.predicted.peak)
            lines.append(f"  {took}, peak {needs}: {other.microbatches} on {mesh_text(other.layouts.mesh)}")
        return "\n".join(lines)

    def _why(self, other: Verified) -> str:
        """In what another layout differs."""
        if other.name:
            return _given_as(other)
        if dict(other.layouts.mesh) != dict(self.layouts.mesh):
            return mesh_text(other.layouts.mesh)
        kinds: dict[tuple[Any, ...], None] = {}
        for path, mine, spec in zip(self._paths(), self.layouts.inputs, other.layouts.inputs):
            if mine != spec and path is not None:
                kinds[".".join(part or "*" for part in kind_of(path)), spec, mine] = None
        if not kinds:
            return "the arguments lie alike, calls do not"
        told = [f"{path} {spec!r} for {mine!r}" for path, spec, mine in list(kinds)[:_REASONS]]
        more = len(kinds) - len(told)
        return "; ".join(told) + (f"; {more} more" if more > 0 else "")

    def _repr_html_(self) -> str:
        prices = [replace(one.price, name=f"{i + 1}") for i, one in enumerate(self.ranked[:_SHOWN])]
        return side_by_side(prices, repr(self))


def _given_as(one: Verified) -> str:
    """What a layout that was given is called."""
    return f"{one.name}, {'as the rules vote' if one.step is None else 'the step that was given'}"


def _dotted(x: Any) -> list[str]:
    return [tree.dotted(accessor) for accessor in optree.tree_accessors(x)]


def _name(recorded: Recording, argument: int) -> str:
    """What begins the paths of an argument; nothing for the first one, the parameters."""
    return f"{argument}." if argument else ""


def _alike(found: Sequence[int], paths: Sequence[str | None], recorded: Recording) -> list[list[int]]:
    """Arguments of one kind, as the same parameter of each layer, together."""
    rows: dict[Any, list[int]] = {}
    for n in found:
        x = value(recorded.placeholders[n])
        rows.setdefault((kind_of(paths[n] or ""), tuple(x.shape), x.dtype), []).append(n)
    return list(rows.values())


def _names(paths: Sequence[str | None]) -> str:
    return f"{paths[0]}{f' and {len(paths) - 1} more like it' if len(paths) > 1 else ''}"


def _ways(x: torch.Tensor, axes: Mapping[str, int]) -> Iterator[P]:
    """The plain ways to split a tensor: not at all, a dim over an axis, a dim over all axes."""
    yield P()
    groups = [(name,) for name in axes] + ([tuple(axes)] if len(axes) > 1 else [])
    for names in groups:
        for dim, size in enumerate(x.shape):
            if size and size % math.prod(axes[name] for name in names) == 0:
                yield normal(P(*[None] * dim, names), axes, x.shape)


def _share(x: torch.Tensor, axes: Mapping[str, int], spec: P) -> str:
    size = math.prod(local_shape(x.shape, dict(axes), spec, dict.fromkeys(axes, 0)))
    return bytes_text(size * x.element_size())


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{_time(abs(seconds))}"
