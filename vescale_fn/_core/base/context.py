"""Where a program is: on how many played ranks, with which mesh, in which body; strict, recorded, logged, or not.

Everything that depends on "where am I" asks here and nowhere else. What is asked for lies in `state`: most of it belongs to
the thread, the mesh of `use_mesh` to the asyncio task, and the simulation, debug mode and dtype of sums to the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import state
from .errors import MeshError
from .messages import report, short
from .state import here


@dataclass(frozen=True)
class Body:
    """The `shard_map` body that is running.

    Args:
        mesh: the whole mesh.
        axes: the axes that are manual in it, those of the maps around it first.
        sizes: of these axes.
        check: whether types are checked.
        auto: the mesh of the other axes, along which its values are whole arrays; None where there are none.
        free: of these axes, those that are not manual only because entries of a `vmap` are split over them.
        unchecked: of its manual axes, those of maps around it without types.
    """

    mesh: Any
    axes: tuple[str, ...]
    sizes: Mapping[str, int] = field(hash=False)
    check: bool
    auto: Any = None
    free: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Entries:
    """The entries of a `vmap` that is running.

    Args:
        level: of its transform.
        over: the axes of the mesh over which they are laid out.
        name: the axis name, for collectives over them; None: it has none.
        size: how many there are.
        index: the number of the entry, a 0-d int32 tensor that differs between them; None where they have no name.
        body: the `shard_map` body in which it runs.
    """

    level: int
    over: tuple[str, ...]
    name: str | None
    size: int
    index: Any
    body: Body | None


class NotFree(Exception):
    """A body communicates over axes that no spec of its map names, and over which entries of a `vmap` were to stay split."""

    def __init__(self, axes: frozenset[str]) -> None:
        super().__init__(axes)
        self.axes = axes


class Unwatched(Exception):
    """A body with types runs in one without, which has to know its values for it, and so to be watched."""


def simulated() -> int | None:
    """The number of ranks that this process plays, or None when it is one rank of a real job."""
    return state.process.simulated


def set_simulated(n: int | None) -> None:
    """Play `n` ranks from now on (None: stop)."""
    state.process.simulated = n


def virtual() -> int | None:
    """The number of ranks that there are whatever the number of processes, under `deterministic`; else None."""
    return state.process.virtual


def current_mesh() -> Any:
    """The mesh set by `use_mesh` or `set_mesh`, or None.

    >>> import vescale_fn as vfn
    >>> vfn.current_mesh() is None
    True
    """
    return seen(_mesh())


def _mesh() -> Any:
    used = state.used_mesh.get()
    return here.slot.now.kept_mesh if used is None else used[0]


def body() -> Body | None:
    """The `shard_map` body that is running in this thread, or None."""
    run = here.slot.now.run
    return None if run is None else run.body


def run() -> Any:
    """What runs that body, a `shard_map.body.running`, or None."""
    return here.slot.now.run


def mode() -> Any:
    """The mode that watches that body; None where none does."""
    run = here.slot.now.run
    return None if run is None else run.mode


def is_strict() -> bool:
    """Whether moves that the program did not ask for raise."""
    return here.slot.now.strict


def mapping_entries(entries: Entries) -> contextlib.AbstractContextManager[None]:
    """Run the function that a `vmap` maps."""
    return setting(entries=(*here.slot.now.entries, entries))


def entries_over(level: int | None = None) -> tuple[str, ...]:
    """The axes over which the `vmap` at this level (None: any of them) lays its entries out."""
    return tuple(axis for entries in here.slot.now.entries if level in (None, entries.level) for axis in entries.over)


def entry_names() -> tuple[str, ...]:
    """The axis names of the `vmap`s around, outermost first."""
    around = here.slot.now.entries
    return tuple(entries.name for entries in around if entries.name is not None) if around else ()


def entries_named(name: str) -> Entries | None:
    """The entries of the innermost `vmap` around with this axis name."""
    return next((entries for entries in reversed(here.slot.now.entries) if entries.name == name), None)


def apart() -> tuple[tuple[str, str], ...]:
    """The axes along which a condition around differs, so that ranks go different ways, each with whose condition it is."""
    return here.slot.now.apart


def examined() -> bool:
    """Whether what runs here is a part of something else: of a `vfn.grad`, a body, debug mode, a parity check; or is
    to run as written."""
    now = here.slot.now
    return bool(
        now.as_written
        or now.grad_depth
        or now.run is not None
        or now.key_uses is not None
        or now.recorder is not None
        or now.unit is not None
        or state.process.watch is not None
    )


def on_one_device() -> bool:
    """Whether a program for a mesh runs on one device, to compare: `shard` and `with_sharding` leave values plain."""
    return here.slot.now.unit is not None


def seen(mesh: Any) -> Any:
    """The mesh that the program is to see: on one device, one with the same axes, all of size 1."""
    unit = here.slot.now.unit
    return mesh if mesh is None or unit is None else unit(mesh)


def record(name: str, given: Any, made: Any, axes: tuple[str, ...] = (), line: str = "") -> None:
    """Tell the recorder, where there is one, of a step of ours that it cannot see: what went in, what came out of it,
    the axes along which ranks communicated, and the line, where that is another than the user's present one."""
    recorder = here.slot.now.recorder
    if recorder is not None:
        recorder(name, given, made, axes, line)


def key_uses() -> dict[Any, Any] | None:
    """In debug mode, what each random key was used for; else None."""
    return here.slot.now.key_uses


def logs() -> tuple[Any, ...]:
    """The communication logs that record what this thread does: its own; those of all threads, for a thread of autograd's,
    which does not say for whom it computes."""
    slot = here.slot
    if not (slot.of_autograd or slot.now.logs):
        return ()
    threads = state.everywhere() if slot.of_autograd else [slot.now]
    return () if any(one.unlogged for one in threads) else tuple(log for one in threads for (log,) in one.logs)


def watch() -> Any:
    """In debug mode, what compares this rank's calls with those of the others (`agreement.Watch`); else None.

    On one device there are no others.
    """
    watch = state.process.watch
    return None if watch is None or here.slot.now.unit is not None else watch


def set_watch(value: Any) -> None:
    """Begin debug mode, or (None) end it."""
    state.process.watch = value


def grad_depth() -> int:
    """How many `vfn.grad`s on the plain autograd engine are being differentiated around this point."""
    return here.slot.now.grad_depth


class Restored:
    """A context that calls ``restore(value)`` when it is left. Two of them, one in the other, survive an interrupt between any
    two lines: where it comes while the one is left, the other still is."""

    def __init__(self, restore: Callable[[Any], Any], value: Any) -> None:
        self._restore, self._value = restore, value

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        self._restore(self._value)


def setting(**values: Any) -> contextlib.AbstractContextManager[None]:
    """Within the block, values of this thread's are these."""
    return setting_and_undoing(lambda: None, **values)


@contextlib.contextmanager
def setting_and_undoing(undo: Callable[[], None], **values: Any) -> Iterator[None]:
    """The same; ``undo()`` undoes what else the block does.

    A block that an interrupt keeps from being left is ended by `state.put_back`. When Python drops its generator, who knows
    when, that is left after all: it must not put back what was then.
    """
    now, block = here.slot.now, object()
    before = {name: getattr(now, name) for name in values}

    def leave(before: dict[str, Any]) -> None:
        if block in here.slot.now.blocks:
            undo()
            state.put(**before, blocks=tuple(other for other in here.slot.now.blocks if other is not block))

    with Restored(leave, before), Restored(leave, before):
        state.put(**values, blocks=(*now.blocks, block))
        yield


class UnlessDropped:
    """What a generator in such a block enters, but does not leave where Python drops it: ``undo()`` does."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is not GeneratorExit:
            self._inner.__exit__(kind, *error)


class _Used(tuple[Any]):
    """The mesh of `use_mesh`, and the blocks that have set one."""

    blocks: tuple[object, ...] = ()


def _use(mesh: Any, *block: object) -> None:
    used = _Used((mesh,))
    used.blocks = (*getattr(state.used_mesh.get(), "blocks", ()), *block)
    state.used_mesh.set(used)


@contextlib.contextmanager
def _using(mesh: Any) -> Iterator[None]:
    before, block = state.used_mesh.get(), object()

    def leave(before: tuple[Any] | None) -> None:
        if block in getattr(state.used_mesh.get(), "blocks", ()):  # see `setting_and_undoing`
            state.used_mesh.set(before)

    with Restored(leave, before), Restored(leave, before):
        _use(mesh, block)
        yield


def checked_mesh(mesh: Any, where: str) -> Any:
    """`mesh` if it is a mesh, else a MeshError."""
    if not hasattr(mesh, "mesh_dim_names"):
        fix = 'mesh = vfn.make_mesh((2, 4), ("dp", "tp"))'
        if where in ("shard", "from_local"):
            fix += f", then vfn.{where}(tree, mesh, spec)"
        raise MeshError(report(where, f"the mesh must be a DeviceMesh, but it is {short(mesh)}", fix=fix))
    return mesh


def use_mesh(mesh: Any) -> contextlib.AbstractContextManager[None]:
    """Make `mesh` the current mesh inside a ``with`` block, so that specs need not name it; in this thread and asyncio task.

    Args:
        mesh: a DeviceMesh from `make_mesh`, or None for no mesh.

    >>> import vescale_fn as vfn
    >>> with vfn.simulate(2):
    ...     with vfn.use_mesh(vfn.make_mesh((2,), ("dp",))):
    ...         print(vfn.current_mesh().mesh_dim_names)
    ('dp',)
    """
    return _using(mesh if mesh is None else checked_mesh(mesh, "use_mesh"))


def set_mesh(mesh: Any) -> None:
    """Make `mesh` the current mesh from here on: `use_mesh` for a notebook. None takes it away.

    >>> import vescale_fn as vfn
    >>> vfn.set_mesh(None)
    """
    mesh = mesh if mesh is None else checked_mesh(mesh, "set_mesh")
    if state.used_mesh.get() is None:
        state.put(kept_mesh=mesh)
    else:
        _use(mesh)


def as_written() -> contextlib.AbstractContextManager[None]:
    """Let no function be recorded."""
    return setting(as_written=True)


def one_device(unit: Callable[[Any], Any] | None) -> contextlib.AbstractContextManager[None]:
    """Let every mesh count as ``unit(mesh)``, its like with one rank; None ends that."""
    return setting(unit=unit)


def recording(
    recorder: Callable[[str, Any, Any, tuple[str, ...], str], None],
) -> contextlib.AbstractContextManager[None]:
    """Have `note` call ``recorder(name, given, made, axes, line)``."""
    return setting(recorder=recorder)


def debugging() -> contextlib.AbstractContextManager[None]:
    """Note what each key is used for."""
    return setting(key_uses={})


@contextlib.contextmanager
def logging_to(log: Any) -> Iterator[None]:
    """Record every collective of this thread into `log` as well."""
    entry = (log,)
    with Restored(_end_log, entry), Restored(_end_log, entry):
        state.put(logs=(*here.slot.now.logs, entry))
        yield


def _end_log(entry: tuple[Any]) -> None:
    state.put(logs=tuple(other for other in here.slot.now.logs if other is not entry))


def devices() -> str:
    """On which devices a plan is to run that is only looked at, "cpu" or "cuda"; "" where its mesh says it."""
    return here.slot.now.devices


def rates() -> Any:
    """What the hardware does for which stages are cut that are only looked at; None where its devices say it."""
    return here.slot.now.rates


def pipelines() -> Any:
    """What notes the pipelines that a recording as for one device meets; None where nobody asks."""
    return here.slot.now.pipelines


def scheduled() -> Mapping[Any, Any]:
    """The schedules that were chosen of pipelines that ask for "auto": by axis, its ranks and the number of microbatches."""
    return here.slot.now.scheduled


def unlogged() -> contextlib.AbstractContextManager[None]:
    """Record no collective of this thread: none is carried out."""
    return setting(unlogged=True)


def snapshot() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What brings this thread's state of now back, any number of times: for what a backward pass computes again."""
    now, mesh = here.slot.now, _mesh()

    # not the uses of keys, and no recorder: what is computed again draws again, on purpose
    ours = dict(run=now.run, strict=now.strict, unit=now.unit, grad_depth=now.grad_depth, key_uses=None, recorder=None)
    return lambda: Again(lambda: setting(**ours), lambda: _using(mesh))


class Again:
    """A context that can be entered any number of times: each time the contexts that these functions make, anew."""

    def __init__(self, *makers: Callable[[], Any]) -> None:
        self.makers, self.stacks = makers, []

    def __enter__(self) -> None:
        stack = contextlib.ExitStack()
        try:
            for make in self.makers:
                stack.enter_context(make())
            self.stacks.append(stack)
        except BaseException:  # left by nobody, they would put back what was when Python drops them, who knows when
            stack.close()
            raise

    def __exit__(self, *error: Any) -> Any:
        return self.stacks.pop().__exit__(*error)


class differentiating:
    """Run the function that a `vfn.grad` differentiates, and its backward pass."""

    def __enter__(self) -> None:
        self.primals = here.slot.now.primals
        state.put(grad_depth=here.slot.now.grad_depth + 1)
        self.sums_in = state.process.sums_in

    def __exit__(self, *error: Any) -> None:
        now = here.slot.now
        depth = now.grad_depth - 1
        state.put(grad_depth=depth, followed=now.followed and depth > 0, primals=self.primals)
        state.process.sums_in = self.sums_in


def differentiated_by(primals: Sequence[Any]) -> None:
    """What the innermost of them differentiates by."""
    state.put(primals=primals)


def count_followed() -> None:
    """A gradient was taken that an outer one may go through."""
    state.put(followed=True)


def followed() -> bool:
    """Whether such a gradient was taken since the outermost gradient began."""
    return here.slot.now.followed


def sums_in() -> Any:
    """The dtype in which sums over ranks are made of what is narrower; None: in its own."""
    return state.process.sums_in


def sum_in(dtype: Any) -> None:
    """Make sums over ranks in this dtype from here on."""
    state.process.sums_in = dtype


def setting_sums_back() -> Restored:
    """A context that sets that dtype back; where something is differentiated, once its backward pass is done as well.

    No generator's, which Python may leave late: see `setting_and_undoing`.
    """
    return Restored(_end_sums, state.process.sums_in)


def _end_sums(before: Any) -> None:
    if not here.slot.now.grad_depth:
        state.process.sums_in = before
