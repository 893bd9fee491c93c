"""Layouts side by side, as text: what each costs, and in what it differs from the best one."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optree
import torch

from .._core.base import tree
from .._core.base.messages import count_text, mesh_text
from .._core.sharding.spec import P
from ..hardware import Hardware
from ..plan.ir.graph import name_of, value
from ..plan.ir.memory_use import bytes_text, place
from .apply_calls import results
from .price_report import Price
from .price_text import columns, more_bytes, signed, time_text
from .recording import Recording
from .rules_text import kind_of, rules_of
from .search.layouts import Layouts
from .verified import Verified, specs_of

_SHOWN = 6  # layouts of a table
_DIFFERENCES = 3  # that are told of a layout
_LINE = 96  # characters of one of the user's lines
_NEARLY = 0.02  # of the difference in time: less is no reason


def choice_text(
    recorded: Recording,
    ranked: Sequence[Verified],
    hardware: Hardware,
    budget: float | None,
    microbatches: int | None = None,
    others: Sequence[tuple[int | None, Mapping[str, int], Price]] = (),
) -> str:
    """The best layout, how it lays the arguments out, and the next best ones beside it.

    Args:
        recorded: the step.
        ranked: the layouts, the best first.
        hardware: that they are priced for.
        budget: the bytes that a rank may need; None: any.
        microbatches: the parts of a batch, where these were chosen.
        others: of other numbers of parts the best mesh, and its price.
    """
    best = ranked[0]
    cost, limit = best.price, "" if budget is None else f" of {bytes_text(int(budget))}"
    parts = [f"compute {time_text(cost.compute)}", f"exposed communication {time_text(cost.exposed)}"]
    parts += [f"bubble {time_text(cost.bubble)}"] * bool(cost.bubble)
    said = f": {best.given}" if best.name else ""
    in_parts = "" if microbatches is None else f", the batch in {count_text(microbatches, 'part')}"
    head = f"{recorded.name} on {mesh_text(best.layouts.mesh)}, {hardware.name}{in_parts}{said}"
    took = f"  predicted {time_text(cost.seconds)} ({', '.join(parts)}), peak {bytes_text(cost.peak)}{limit} a rank"
    held = [f"  {best.held}"] * bool(best.held)
    lines = [head, took, *held, *_unproven(best.found), "", *_arguments(recorded, best.layouts), ""]
    if len(ranked) == 1:
        lines.append("  no other layout was priced")
    else:
        lines += _table(recorded, ranked, budget)
    if others:
        rows = [
            [
                str(n or 1),
                _mesh(mesh),
                time_text(cost.seconds),
                _share(cost.seconds, best.price.seconds),
                bytes_text(cost.peak),
            ]
            for n, mesh, cost in others
        ]
        lines += [
            "",
            "  the best of other numbers of parts:",
            *columns(["parts", "mesh", "time", "", "peak"], rows, left=2),
        ]
    return "\n".join(lines)


def _unproven(found: Any) -> list[str]:
    """In words, by how much another layout may be faster than what a search found, where it proved less."""
    if not (within := getattr(found, "within", 0.0)):
        return []
    most = "faster" if within == 1 else f"up to {within:.1%} faster".replace("%", " %")
    return [f"  not proved to be the best on this mesh: by the search's prediction another layout may be {most}"]


def shown(ranked: Sequence[Verified]) -> list[tuple[int, Verified]]:
    """The layouts of a table, with their numbers: the best few, and of each that was given by name the best mesh."""
    rows, names = list[tuple[int, Verified]](), set[str]()
    for n, one in enumerate(ranked, 1):
        if n <= _SHOWN or (one.name and one.name not in names):
            rows.append((n, one))
        names.add(one.name)
    return rows


# --- how the arguments lie ----------------------------------------------------------------------------------------------


def argument_names(recorded: Recording) -> list[str]:
    """What the step calls its arguments."""
    given, names = recorded.call.args, list[str]()
    paths, at = recorded.call.names(), 0
    for n, one in enumerate(given):
        count = len(tree.leaves(one))
        first = paths[at] if count else f"args[{n}]"
        names.append(first[: min([i for i in map(first.find, ".[(") if i > 0] or [len(first)])])
        at += count
    return names


def dotted(x: Any) -> list[str]:
    """The paths of its leaves as rules see them: ``blocks.0.mlp.up``."""
    return [tree.dotted(accessor) for accessor in optree.tree_accessors(x)]


def _arguments(recorded: Recording, layouts: Layouts) -> Iterator[str]:
    """A line for each rule of an argument, or for an argument that is one leaf."""
    rows, earlier = list[tuple[str, str]](), dict[tuple[str, ...], str]()
    for name, given, specs in zip(argument_names(recorded), recorded.call.args, specs_of(recorded, layouts)):
        leaves = tree.leaves(given)
        if not any(isinstance(x, torch.Tensor) for x in leaves):
            continue
        paths = dotted(given)
        if paths == [""]:
            rows.append((name, f"{specs!r}{_made_of(recorded, layouts, name, specs)}"))
            continue
        lies = {path: spec for path, x, spec in zip(paths, leaves, tree.leaves(specs)) if _counts(x)}
        tensors, placed = {path: P(*spec) for path, spec in lies.items()}, any(spec.at for spec in lies.values())
        if not any(tuple(spec) for spec in tensors.values()):
            rows.append((name, "whole on the ranks of its stages" if placed else "whole on each rank"))
            continue
        rules = [(repr(pattern), repr(spec)) for pattern, spec in rules_of(tensors)]
        same = next((other for said, other in earlier.items() if said == tuple(map(str, rules))), None)
        if same is not None:
            rows.append((name, f"as {same}, by the same rules"))
            continue
        earlier[tuple(map(str, rules))] = name
        width = max((len(pattern) for pattern, _ in rules), default=0)
        rows += [(name if n == 0 else "", f"{one:<{width}}  {spec}") for n, (one, spec) in enumerate(rules)]
        rows += [("", "each on the ranks of its stages alone")] * placed
    width = max((len(name) for name, _ in rows), default=0)
    yield from (f"  {name:<{width}}  {text}" for name, text in rows)


def _counts(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 0


def _made_of(recorded: Recording, layouts: Layouts, name: str, spec: P) -> str:
    """Of whole numbers that lie whole on each rank, how the first floats lie that are made of them: there they are split."""
    node = next((x for x, path in zip(recorded.placeholders, recorded.paths) if path == name), None)
    if node is None or any(spec) or not isinstance(value(node), torch.Tensor) or value(node).is_floating_point():
        return ""
    of_it = {node}
    for user in recorded.graph.nodes:
        if of_it.isdisjoint(user.all_input_nodes):
            continue
        made, stated = results(user), layouts.calls.get(user.name)
        if made and made[0].is_floating_point():
            if stated is None or user.target is operator.getitem:
                return ""
            return f", and what {name_of(user)} makes of it {stated.outs[0]!r}"
        of_it.add(user)
    return ""


# --- the table ----------------------------------------------------------------------------------------------------------


def _table(recorded: Recording, ranked: Sequence[Verified], budget: float | None) -> Iterator[str]:
    rows = shown(ranked)
    prices = [one.price for _, one in rows]
    axes = list(dict.fromkeys(axis for one in prices for axis in waits_of(one)))
    bubble = any(one.bubble for one in prices)
    head = [
        "",
        "mesh",
        "time",
        "",
        "compute",
        *(f"waits for {axis}".removesuffix(" for ") for axis in axes),
        *["bubble"] * bubble,
        "peak",
    ]
    cells = []
    for n, one in rows:
        cost = one.price
        times = [cost.compute, *(waits_of(cost).get(axis, 0.0) for axis in axes), *[cost.bubble] * bubble]
        share = "" if one is ranked[0] else _share(cost.seconds, ranked[0].price.seconds)
        size = bytes_text(cost.peak) + ("" if one.fits else " !")
        cells.append([str(n), _mesh(one.layouts.mesh), time_text(cost.seconds), share, *map(time_text, times), size])
    first, *lines = columns(head, cells, left=2)
    yield first
    for line, (n, one) in zip(lines, rows):
        yield line
        if one is not ranked[0]:
            reasons = _reasons(recorded, ranked[0], one, budget) if n <= _SHOWN else [one.said]
            yield from (f"{' ' * (len(cells[-1][0]) + 4)}{text}" for text in reasons)


def _share(seconds: float, first: float) -> str:
    more = 100 * (seconds / max(first, 1e-15) - 1)
    return f"{more:+.3g} %" if abs(more) >= 0.05 else "the same"


def waits_of(price: Price) -> dict[str, float]:
    """The seconds of exposed communication by axis; "" for what no axis is known of."""
    rest = price.exposed - sum(price.exposed_by_axis.values())
    return {**price.exposed_by_axis, **({"": rest} if rest > 1e-6 * price.seconds else {})}


def _mesh(axes: Mapping[str, int]) -> str:
    return mesh_text(axes).removeprefix("mesh (").removesuffix(")")


def _reasons(recorded: Recording, best: Verified, other: Verified, budget: float | None) -> Iterator[str]:
    """In what a layout differs from the best one, what of its time and memory that costs, and by how much it does not fit."""
    if other.said:
        yield other.said
    yield from differences(recorded, best.layouts, other.layouts)
    if parts := _parts(best.price, other.price):
        yield f"costs {', '.join(parts)}{_line_that_costs(best.price, other.price)}"
    if not other.fits and budget is not None:
        yield f"! needs {bytes_text(int(other.price.peak - budget))} more than the {bytes_text(int(budget))} that there are"


def _parts(best: Price, other: Price) -> list[str]:
    """What differs of the time, by part, and of the memory; nothing of what is waited for over axes of another mesh."""
    found = [("computing", other.compute - best.compute), ("bubble", other.bubble - best.bubble)]
    if best.mesh == other.mesh:
        mine, its = waits_of(best), waits_of(other)
        for axis in dict.fromkeys([*mine, *its]):
            found.append((f"waiting for {axis}".removesuffix(" for "), its.get(axis, 0.0) - mine.get(axis, 0.0)))
    else:
        found.append(("waiting", other.exposed - best.exposed))
    texts = [f"{signed(time)} {what}" for what, time in found if abs(time) > 1e-9]
    return texts + [f"{more_bytes(other.peak - best.peak)} memory"] * (other.peak != best.peak)


def differences(recorded: Recording, best: Layouts, other: Layouts) -> Iterator[str]:
    """Which arguments lie otherwise, each with those of other arguments that do as it does: its gradient's means, say."""
    kinds: dict[tuple[str, P | None, P | None], list[str]] = {}
    of_leaf, first = leaf_names(recorded), next(iter(argument_names(recorded)), "")
    for at, mine, spec in zip(recorded.leaves, best.inputs, other.inputs):
        mine, spec = (
            None if one is None else P(*one) for one in (mine, spec)
        )  # the places of stages follow from their cuts
        if at is not None and mine != spec:
            argument, path = of_leaf[at]
            kind = ".".join(part or "*" for part in kind_of(path)) if path else ""
            kinds.setdefault((argument, spec, mine), []).append(kind)
    found: dict[tuple[tuple[str, ...], P | None, P | None], list[str]] = {}
    for (argument, spec, mine), names in kinds.items():
        found.setdefault((tuple(dict.fromkeys(_last(name) for name in names)), spec, mine), []).append(argument)
        kinds[argument, spec, mine] = list(dict.fromkeys(names))
    told = [
        f"{_listed(kinds[given[0], spec, mine], given[0], given[0] == first)}{_also(given[1:])}: {spec!r} instead of {mine!r}"
        for (_, spec, mine), given in found.items()
    ]
    if not told and dict(best.mesh) == dict(other.mesh):
        calls = [name for name, one in other.calls.items() if best.calls.get(name) != one]
        if calls:
            node = next((x for x in recorded.graph.nodes if x.name == calls[0]), None)
            where = f", first at {_short(node.meta.get('line') or '?')}" if node is not None else ""
            told = [f"arguments as in 1; {count_text(len(calls), 'call')} split otherwise{where}"]
    yield from told[:_DIFFERENCES]
    if len(told) > _DIFFERENCES:
        yield f"and {count_text(len(told) - _DIFFERENCES, 'difference')} more"


def leaf_names(recorded: Recording) -> list[tuple[str, str]]:
    """Of each leaf of the arguments by position: the argument's name, and its path in that."""
    return [(name, path) for name, x in zip(argument_names(recorded), recorded.call.args) for path in dotted(x)]


def _last(kind: str) -> str:
    """What a parameter and its state have in common."""
    return kind.rpartition(".")[2]


def _listed(kinds: Sequence[str], argument: str, is_first: bool) -> str:
    """Paths, those of another argument than the first with its name."""
    some = [kind if kind and is_first else f"{argument}.{kind}".rstrip(".") for kind in kinds]
    return ", ".join(some[:3]) + (f" and {len(some) - 3} more" if len(some) > 3 else "")


def _also(arguments: Sequence[str]) -> str:
    return f" (and in {', '.join(arguments)})" if arguments else ""


def _line_that_costs(best: Price, other: Price) -> str:
    """The line of which most of the difference is, where there is one."""
    mine = {one.line: one.seconds for one in best.lines}
    costs = {one.line: one.seconds - mine.get(one.line, 0.0) for one in other.lines}
    line = max(costs, key=lambda one: costs[one], default=None)
    if line is None or costs[line] <= max(_NEARLY * abs(other.seconds - best.seconds), 1e-9):
        return ""
    return f"; {signed(costs[line])} at {_short(line)}"


def _short(line: str) -> str:
    said = place(line)
    return said if len(said) <= _LINE else f"{said[: _LINE - 4]}...`"
