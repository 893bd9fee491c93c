"""Why an argument lies as it does, and what it would cost otherwise; what the calls of a line are given, and what they take."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._core.base.errors import SpecError, VfnError
from .._core.base.messages import described, meant, report
from .._core.sharding.index_map import local_shape
from .._core.sharding.layout import WHOLE, type_text
from .._core.sharding.placements import normal
from .._core.sharding.spec import P
from ..plan.ir.graph import calls, name_of, value
from ..plan.ir.memory_use import bytes_text, place
from .apply_calls import operands, results
from .choice_report import leaf_names
from .price_report import Price
from .price_text import columns, more_bytes, signed, time_text
from .recording import Recording
from .rules_text import kind_of
from .search.best import NothingFits
from .search.layouts import Layouts

_LINES = 4  # of those that use an argument
Again = Callable[[Mapping[str, int], dict[int, P]], Any]


def explained(recorded: Recording, layouts: Layouts, price: Price, again: Again | None, what: str) -> str:
    """The other ways to lay out an argument, or the calls of a line.

    Args:
        recorded: the step.
        layouts: that were chosen.
        price: of these.
        again: searches once more, on a mesh, with the specs of some placeholders given.
        what: a path, a regular expression of paths, or ``file:line``.

    Raises:
        SpecError: nothing is called so.
    """
    if not isinstance(what, str):
        fix = 'a path, "blocks.0.mlp.up", a regular expression of paths, "up$", or a line, "model.py:12"'
        raise SpecError(report("explain", f"{described(what)} names no argument", fix=fix))
    if re.search(r":\d+$", what):
        return "\n".join(_of_line(recorded, layouts, price, what))
    kinds = _found(recorded, what)
    staged = [one for one in price.ranks[0].at if one in layouts.mesh] if price.stages else []
    return "\n\n".join("\n".join(_of_inputs(recorded, layouts, price, staged, again, same)) for same in kinds)


# --- arguments ----------------------------------------------------------------------------------------------------------


def _found(recorded: Recording, what: str) -> list[list[int]]:
    """The placeholders that are meant, those that are alike together: of the first argument, the parameters, if it has any."""
    paths = _paths(recorded)
    first = next((name for name, path in paths.values() if path), "")
    full = {n: f"{name}.{path}" if path else name for n, (name, path) in paths.items()}
    short = {n: path if name == first and path else full[n] for n, (name, path) in paths.items()}
    exact = [n for n in paths if what in (short[n], full[n])]
    of_first = [n for n in paths if paths[n][0] == first and _matches(what, short[n])]
    found = exact or of_first or [n for n in paths if _matches(what, full[n])]
    if not found:
        known = list(dict.fromkeys(short.values()))
        some = ", ".join(known[:8]) + (f", ... ({len(known)} in all)" if len(known) > 8 else "")
        rows = [f"there are {some}"] if known else []
        raise SpecError(report("explain", f"no argument's path matches {what!r}{meant(what, known)}", rows))
    rows_: dict[Any, list[int]] = {}
    for n in found:
        x = value(recorded.placeholders[n])
        rows_.setdefault((kind_of(full[n]), tuple(x.shape), x.dtype), []).append(n)
    return list(rows_.values())


def _matches(pattern: str, path: str) -> bool:
    try:
        return re.search(pattern, path) is not None
    except re.error:
        return pattern in path


def _paths(recorded: Recording) -> dict[int, tuple[str, str]]:
    """Of each placeholder that is a tensor of an argument: the argument's name, and the path in it."""
    names = leaf_names(recorded)
    return {
        n: names[at]
        for n, (at, node) in enumerate(zip(recorded.leaves, recorded.placeholders))
        if at is not None and isinstance(value(node), torch.Tensor)
    }


def _of_inputs(
    recorded: Recording, layouts: Layouts, price: Price, staged: Sequence[str], again: Again | None, same: Sequence[int]
) -> Iterator[str]:
    """What arguments that are alike could be split by, and what it would cost; `staged`: the axes along which stages run."""
    mesh, first = dict(layouts.mesh), same[0]
    axes = {name: size for name, size in mesh.items() if name not in staged}
    x, chosen = value(recorded.placeholders[first]), P(*(layouts.inputs[first] or ()))
    name, path = _paths(recorded)[first]
    more = f" and {len(same) - 1} more like it" if len(same) > 1 else ""
    size = _bytes(x, axes, chosen)
    yield f"{path or name}{more}: {type_text(x.shape, x.dtype, WHOLE)}, chosen {chosen!r}, {bytes_text(size)} a rank"
    lines = {user.meta.get("line") or "?": None for n in same for user in recorded.placeholders[n].users}
    yield from (f"  used at {place(line)}" for line in list(lines)[:_LINES])
    for axis in staged:
        yield f"  {_places(recorded, layouts, price, axis, same)}"
    if again is None:
        yield "  what else it could be is not known of a layout without its search"
        return
    ways = list(dict.fromkeys(spec for spec in _ways(x, axes) if spec != normal(chosen, axes, x.shape)))
    if not ways:
        yield "  it has no dim that an axis divides: there is no other way"
        return
    if staged:
        yield "  of the whole step, were it without stages:"
    base = again(mesh, dict.fromkeys(same, chosen))
    rows, failures = list[tuple[float, list[str]]](), list[str]()
    for spec in ways:
        try:
            other = again(mesh, dict.fromkeys(same, spec))
        except NothingFits as error:
            failures.append(f"  {spec!r} does not fit: {_last_line(error)}")
            continue
        except VfnError as error:
            failures.append(f"  {spec!r}: {str(error).partition(chr(10))[0]}")
            continue
        parts = other.compute - base.compute, (other.seconds - other.compute) - (base.seconds - base.compute)
        rows.append(
            (sum(parts), [repr(spec), signed(sum(parts)), *map(signed, parts), more_bytes(other.bytes - base.bytes)])
        )
    if rows:
        head = ["instead", "a step", "computing", "communication", "memory"]
        yield from columns(head, [row for _, row in sorted(rows, key=lambda one: one[0])], left=1)
    yield from failures


def _places(recorded: Recording, layouts: Layouts, price: Price, axis: str, same: Sequence[int]) -> str:
    """At which stages arguments are."""
    runs = {rank: [one.stage for one in price.stages if one.rank == rank] for rank in range(layouts.mesh[axis])}
    found: dict[tuple[int, ...], list[int]] = {}
    for n in same:
        spec = layouts.inputs[n]
        found.setdefault(() if spec is None else dict(spec.at).get(axis, ()), []).append(n)
    texts = list[str]()
    for at, those in found.items():
        stages = ", ".join(str(stage) for rank in at for stage in runs[rank])
        where = f"at {axis}={','.join(map(str, at))}, of stage {stages}" if at else f"on all ranks along {axis}"
        texts.append(where if len(found) == 1 else f"{len(those)} {where}")
    return "; ".join(texts)


def _last_line(error: Exception) -> str:
    """By how much: the first of the failures that a message lists."""
    return next((line.strip(" *") for line in str(error).splitlines() if line.startswith("  *")), str(error))


def _ways(x: torch.Tensor, axes: Mapping[str, int]) -> Iterator[P]:
    """The plain ways to split a tensor: not at all, a dim over an axis, a dim over all axes."""
    yield P()
    groups = [(name,) for name in axes] + ([tuple(axes)] if len(axes) > 1 else [])
    for names in groups:
        for dim, size in enumerate(x.shape):
            if size and size % math.prod(axes[name] for name in names) == 0:
                yield normal(P(*[None] * dim, names), axes, x.shape)


def _bytes(x: torch.Tensor, axes: Mapping[str, int], spec: P) -> int:
    return math.prod(local_shape(x.shape, dict(axes), spec, dict.fromkeys(axes, 0))) * x.element_size()


# --- lines --------------------------------------------------------------------------------------------------------------


def _of_line(recorded: Recording, layouts: Layouts, price: Price, what: str) -> Iterator[str]:
    """The calls of a line."""
    lines = dict.fromkeys(node.meta.get("line") or "" for node in calls(recorded.graph))
    nodes = [node for node in calls(recorded.graph) if _is_line(node.meta.get("line") or "", what)]
    if not nodes:
        file = what.rpartition(":")[0]
        there = sorted({int(line.rpartition(":")[2]) for line in lines if _is_line(line.rpartition(":")[0], file)})
        files = dict.fromkeys(line.rpartition(":")[0].rpartition("/")[2] for line in lines if line)
        known = (
            f"of {file} it has lines {', '.join(map(str, there))}" if there else f"it has lines of {', '.join(files)}"
        )
        raise SpecError(report("explain", f"no call of {recorded.name} comes from {what}", [known]))
    cost = next((one for one in price.lines if _is_line(one.line, what)), None)
    yield place(nodes[0].meta["line"])
    if cost is not None:
        took = f"{time_text(cost.compute)} of computing, {time_text(cost.exposed)} of waiting"
        yield f"  {took}, {bytes_text(cost.bytes)} of what is alive at the peak"
    shown: dict[str, int] = {}
    for node in nodes:
        text = _call_text(layouts, node)
        shown[text] = shown.get(text, 0) + 1
    yield from (f"  {text}{f'   {n} times' if n > 1 else ''}" for text, n in shown.items())


def _is_line(line: str, what: str) -> bool:
    """Whether a file or a line of it is meant: its path ends so, at a folder's end."""
    return line == what or line.endswith(f"/{what}")


def _call_text(layouts: Layouts, node: fx.Node) -> str:
    stated = layouts.calls.get(node.name)
    if stated is None:
        return f"{name_of(node) or node.name}: laid out as what it is given"
    ins = ", ".join(type_text(value(x).shape, value(x).dtype, spec) for x, spec in zip(operands(node), stated.ins))
    outs = ", ".join(type_text(x.shape, x.dtype, spec) for x, spec in zip(results(node), stated.outs))
    return f"{name_of(node) or 'part'}({ins}) -> {outs}"
