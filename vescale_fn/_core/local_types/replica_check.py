"""What must be the same on every rank, compared in debug mode: plain tensors and numbers that meet arrays, keys, calls of
`shard_map`, what their bodies use and give. While a plan is recorded, plain tensors that meet arrays are noted in it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import context, dtypes, op_arguments, tree
from ..base.errors import DivergenceError
from ..base.messages import mesh_text, report
from ..base.source_lines import quoted, user_line
from ..base.state import process
from ..distributed.blocks import Blocks
from ..distributed.communicator import groups
from ..distributed.divergence import RankCall, Value
from ..distributed.mesh import communicator_of
from ..sharding.index_map import axes_of
from ..sharding.layout import text
from . import tensor_types, types


def digest(x: torch.Tensor) -> str:
    """A hash of the bits of a plain tensor; "" of one without memory that can be read."""
    x = torch_internals.peel(x)
    if (
        type(x) not in (torch.Tensor, torch.nn.Parameter)
        or x.layout is not torch.strided
        or x.is_meta
        or torch_internals.tracing()
    ):
        return ""
    with torch_internals.no_torch_function(), torch_internals.no_transforms(), torch.no_grad():
        x = torch_internals.materialized(x.detach()).cpu()
        return hashlib.blake2b(dtypes.as_bytes(x).numpy().data, digest_size=8).hexdigest() if x.numel() else ""


def _shown(x: torch.Tensor) -> str:
    """A plain tensor's first values, and its sum, for those that differ further on."""
    with torch_internals.no_torch_function(), torch_internals.no_transforms(), torch.no_grad():
        flat = torch_internals.materialized(torch_internals.peel(x).detach()).cpu().reshape(-1)
        first = ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in flat[:3].tolist())
        wide = flat if flat.is_complex() else flat.to(torch.float64 if flat.is_floating_point() else torch.int64)
        return f"[{first}{', ...' if flat.numel() > 3 else ''}]" + (
            f" (sum {wide.sum().item():.9g})" if flat.numel() > 3 else ""
        )


def _value(path: str, x: Any) -> Value:
    if not isinstance(x, torch.Tensor):
        return Value(path, repr(x)[:60] if isinstance(x, (int, float, complex, str, type(None))) else type(x).__name__)
    below = torch_internals.peel(x)
    bits = "" if isinstance(below, DTensor) else digest(below)
    return Value(path, text(below), bits, _shown(below) if bits else "")


_NUMBERS = (int, float, complex)


def _number_text(x: Any, recorder: Any) -> str:
    """How a number, or a list of numbers, reads; "" for anything else, and for what stands for an input of a plan."""
    if isinstance(x, torch.Tensor):
        return ""
    parts = x if isinstance(x, (list, tuple)) else (x.start, x.stop, x.step) if isinstance(x, slice) else (x,)
    if not parts or (recorder is not None and any(map(recorder.stands_for_a_float, parts))):
        return ""
    found = [isinstance(one, _NUMBERS) for one in parts]
    return repr(x)[:200] if (any(found) if isinstance(x, slice) else all(found)) else ""


def _ledger() -> tuple[Any, Any]:
    """Where uses are noted, in debug mode and while a plan is recorded, and what records; None, None elsewhere."""
    watch = context.watch()
    if watch is not None:
        return watch.ledger, None
    recorder = torch_internals.recorder()
    return (None, None) if recorder is None else (recorder.ledger, recorder)


def bits(x: Any) -> str:
    """A plain tensor as the ledger of debug mode notes it: a few of its values, and a hash of all; "" of an array."""
    found = "" if isinstance(torch_internals.peel(x), DTensor) else digest(x)
    return found and f"{_shown(x)}\0{found}"


def numbers_alike(name: str, func: Any, mesh: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Note the numbers that an op on arrays is given, which are the same on all ranks of `mesh`."""
    ledger, recorder = _ledger()
    if ledger is None or communicator_of(mesh).all_here:
        return
    found = [
        (key, text)
        for key, a in (*zip(_argument_names(func), args), *kwargs.items())
        if (text := _number_text(a, recorder))
    ]
    if found:
        line = quoted((recorder is not None and recorder.said) or user_line())
        ranks = communicator_of(mesh).processes()
        for key, shown in found:
            ledger.note(f"{key!r} of {name}", shown, ranks, line)


@functools.lru_cache(maxsize=4096)
def _argument_names(func: Any) -> list[str]:
    return [a.name for a in torch_internals.schema(func).arguments]


def looked_for() -> bool:
    """Whether what is the same on all ranks is compared, now or once a plan is recorded."""
    return (process.watch is not None and context.watch() is not None) or (
        torch_internals.dispatch_modes() > 0 and torch_internals.is_recorded()
    )


def key_alike(where: str, x: torch.Tensor, mesh: Any) -> None:
    """The bits of a key of a draw on a mesh: in debug mode and while a plan is recorded, noted."""
    watch = context.watch()
    if watch is None:
        same_plain(where, mesh, [("", x)])
    elif not communicator_of(mesh).all_here and (found := bits(x)):
        what = f"the key of {where}"
        watch.ledger.note(what, found, communicator_of(mesh).processes(), quoted(user_line()))


def body_alike(
    body: context.Body, name: str, args: Any, kwargs: Mapping[str, Any], out: Any, opaque: bool = False
) -> None:
    """Note what a function in a body with types is given that is the same on all ranks: floats, tensors from outside, and
    where the result is the same as well, ints. A tensor that it makes of Python values is the same too.

    Sizes of what depends on data may differ by rank, and so ints of which something that varies is made.
    """
    ledger, recorder = _ledger()
    if ledger is None:
        return
    processes = communicator_of(body.mesh).processes
    with torch_internals.no_torch_function():
        given, made = op_arguments.tensors_in(args, kwargs), op_arguments.tensors_in(out)
        type_ = tensor_types.read(made[0]) if made else None
        alike = tuple(axis for axis in body.axes if type_ is not None and type_.letter(axis) in "IR")
        line, everyone = quoted(user_line()), processes()
        for what, one, ints in _numbers((*args, *kwargs.values())) if given else ():
            if (alike or not ints) and (shown := _number_text(one, recorder)):
                ledger.note(f"{what} of {name}", shown, processes(alike) if ints else everyone, line)
        outside = [(i, x) for i, x in enumerate(given) if tensor_types.read(x) is None]
        if recorder is not None:
            for x in (torch_internals.peel(x) for _, x in outside):
                if torch_internals.is_bare(x):
                    recorder.counts_as_alike(x)
            return
        for what, x, which, axes in _tensors(outside, made, alike if opaque else ()):
            if found := bits(x):
                shown = text(torch_internals.peel(x))
                ledger.note(f"{what} of {name}, {shown}{which},", found, processes(axes) if axes else everyone, line)
        if not given and type_ is types.INVARIANT and (found := bits(made[0])):
            ledger.note(f"the tensor {text(torch_internals.peel(made[0]))} that {name} makes", found, everyone, line)


def stated_alike(body: context.Body, name: str, made: Sequence[torch.Tensor]) -> None:
    """In debug mode: results of an op are the same along the axes over which its author states that they are.

    Raises:
        DivergenceError: simulated ranks hold different values; of real ones the next call that they compare tells.
    """
    watch = context.watch()
    if watch is None:
        return
    communicator, line = communicator_of(body.mesh), quoted(user_line())
    for i, x in enumerate(made):
        type_, below = tensor_types.read(x), torch_internals.peel(x)
        axes = tuple(axis for axis in body.axes if type_ is not None and type_.letter(axis) in "IR")
        what = f"result {i} of {name}, {text(below)}{{the same along {', '.join(axes)}}}"
        if not axes or not _comparable(x):
            continue
        if isinstance(below, Blocks):
            _alike_here(name, what, [(group, below.blocks) for group in groups(body.mesh, axes)])
        elif found := bits(x):
            watch.ledger.note(f"{what},", found, communicator.processes(axes), line)


def _alike_here(name: str, what: str, all_groups: Iterable[tuple[Sequence[int], Sequence[torch.Tensor]]]) -> None:
    """Raise where ranks of one of these groups hold different blocks."""
    for group, blocks in all_groups:
        for rank in group:
            if digest(blocks[rank]) != digest(blocks[group[0]]):
                shown = [f"rank {at} has {_shown(blocks[at])}" for at in (group[0], rank)]
                fix = "another type in vfn.typed_op(out=...): 'varying', or 'unreduced' for parts of a sum"
                raise DivergenceError(report(name, f"ranks have different values of {what}", shown, fix))


def _tensors(outside: Any, made: Any, alike: tuple[str, ...]) -> Iterator[tuple[str, Any, str, tuple[str, ...]]]:
    """Arguments from outside of a body, and results that may have been drawn, or come from other ranks: what each is, and
    the axes along which it is the same, if not along all."""
    for i, x in outside:
        yield f"tensor {i}", x, " from outside of the body", ()
    for i, x in enumerate(made if alike else ()):
        if _comparable(x):
            yield f"result {i}", x, f"{{the same along {', '.join(alike)}}}", alike


def _numbers(args: Iterable[Any]) -> Iterator[tuple[str, Any, bool]]:
    """What may be numbers among arguments: what it is, and whether there is no float beside it."""
    for i, a in enumerate(args):
        ints = not _has_a_float(a)
        if isinstance(a, tuple):
            yield from ((f"number {j} of argument {i}", one, ints) for j, one in enumerate(a))
        else:
            yield f"argument {i}", a, ints


def _has_a_float(a: Any) -> bool:
    return isinstance(a, (float, complex)) or (isinstance(a, (list, tuple)) and any(map(_has_a_float, a)))


def results_alike(mapped: Any, body: context.Body, result: Any, leaves: Sequence[Any], alike: Sequence[Any]) -> None:
    """In debug mode: note results of a body, each of which is the same along the axes that `alike` has for it."""
    watch = context.watch()
    if watch is None or not watch.results or communicator_of(body.mesh).all_here:
        return
    for path, x, axes in zip(tree.paths(result, "out"), leaves, alike, strict=True):
        if isinstance(x, torch.Tensor) and axes and _comparable(x) and (found := bits(x)):
            what = f"{path} of {mapped.where}, {text(torch_internals.peel(x))}{{the same along {', '.join(axes)}}},"
            watch.ledger.note(what, found, communicator_of(body.mesh).processes(tuple(axes)), quoted(user_line()))


def _comparable(x: torch.Tensor) -> bool:
    """Whether the same computation gives the same bits on every rank."""
    return (
        x.device.type == "cpu"
        or not (x.is_floating_point() or x.is_complex())
        or (torch.are_deterministic_algorithms_enabled())
    )


def _on(mesh: Any) -> str:
    return f"on {mesh_text(axes_of(mesh))}"


def same_plain(where: str, mesh: Any, values: Iterable[tuple[str, Any]]) -> None:
    """Plain tensors among (path, value) pairs, which `where` takes to be the same on all ranks, are so: in debug mode they
    are compared here, and while a plan is recorded they are noted, for ranks to compare once it is."""
    watch = context.watch()
    if mesh is None or communicator_of(mesh).all_here:
        return
    if watch is None:
        if (recorder := torch_internals.recorder()) is None:
            return
        for _, x in values:
            if isinstance(x, torch.Tensor) and not isinstance(below := torch_internals.peel(x), DTensor):
                recorder.counts_as_alike(below)
        return
    plain = [
        (path, x)
        for path, x in values
        if isinstance(x, torch.Tensor) and not isinstance(torch_internals.peel(x), DTensor)
    ]
    if plain:
        watch.compare(
            communicator_of(mesh).processes(), RankCall(where, _on(mesh), tuple(_value(path, x) for path, x in plain))
        )


def same_call(mapped: Any, mesh: Any, args: Any, leaves: Sequence[Any]) -> None:
    """In debug mode: all ranks of `mesh` call the same `shard_map` with the same arguments."""
    watch = context.watch()
    if watch is not None and not communicator_of(mesh).all_here:
        values = tuple(_value(path, x) for path, x in zip(tree.paths(args, "args"), leaves, strict=True))
        details = f"in_specs={mapped.in_specs!r}, out_specs={mapped.out_specs!r}" + (
            "" if mapped.check else ", unchecked"
        )
        watch.compare(
            communicator_of(mesh).processes(), RankCall(f"shard_map({mapped.name})", _on(mesh), values, details)
        )


def same_shapes(mapped: Any, mesh: Any, result: Any, leaves: Sequence[Any]) -> None:
    """In debug mode: the blocks that the ranks of `mesh` return from a `shard_map` body are of the same shapes."""
    watch = context.watch()
    if watch is not None and not communicator_of(mesh).all_here:
        values = tuple(
            Value(path, text(torch_internals.peel(x)) if isinstance(x, torch.Tensor) else type(x).__name__)
            for path, x in zip(tree.paths(result, "out"), leaves, strict=True)
        )
        watch.compare(
            communicator_of(mesh).processes(), RankCall(f"the results of shard_map({mapped.name})", _on(mesh), values)
        )
