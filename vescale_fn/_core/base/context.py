"""The ambient state of a thread: simulation, current mesh, the body that runs, strictness, logs.

The state is one object per thread; the mesh of `use_mesh` belongs to the asyncio task, too. Everything that depends on
"where am I" reads it here and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from .errors import MeshError
from .messages import report, short


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


_used_mesh: ContextVar[tuple[Any] | None] = ContextVar("mesh of use_mesh", default=None)


class _State(threading.local):
    kept_mesh: Any = None  # by `set_mesh`, outside of every `use_mesh`: notebooks run each cell in a task of its own
    body: Body | None = None
    adopt: Callable[[Any], Any] | None = None  # of a body that no mode watches
    strict: bool = False
    as_written: bool = False
    grad_depth: int = 0
    entries: tuple[Entries, ...] = ()  # of the vmaps around, outermost first
    followed: bool = False
    key_uses: dict[Any, Any] | None = None
    unit: Callable[[Any], Any] | None = None
    recorder: Callable[[str, Any, Any, tuple[str, ...], str], None] | None = None

    @property
    def used_mesh(self) -> tuple[Any] | None:
        """The mesh of the `use_mesh` around this point; None where there is none around it."""
        return _used_mesh.get()

    @used_mesh.setter
    def used_mesh(self, value: tuple[Any] | None) -> None:
        _used_mesh.set(value)

    @property
    def mesh(self) -> Any:
        used = _used_mesh.get()
        return self.kept_mesh if used is None else used[0]


_state = _State()
local_states: list[Any] = [_state]  # all that is ambient in one thread, in the files below as well
# Of the process, not of a thread: the threads of autograd must see them.
_simulated: int | None = None
_logs: list[tuple[int, Any]] = []  # each with the thread that it is of
_unlogged: list[int] = []  # threads
_watch: Any = None
_sums_in: Any = None


def simulated() -> int | None:
    """The number of ranks that this process plays, or None when it is one rank of a real job."""
    return _simulated


def set_simulated(n: int | None) -> None:
    """Play `n` ranks from now on (None: stop)."""
    global _simulated
    _simulated = n


def current_mesh() -> Any:
    """The mesh set by `use_mesh` or `set_mesh`, or None.

    >>> import vescale_fn as vfn
    >>> vfn.current_mesh() is None
    True
    """
    return seen(_state.mesh)


def body() -> Body | None:
    """The `shard_map` body that is running in this thread, or None."""
    return _state.body


def is_strict() -> bool:
    """Whether moves that the program did not ask for raise."""
    return _state.strict


def mapping_entries(entries: Entries) -> contextlib.AbstractContextManager[None]:
    """Run the function that a `vmap` maps."""
    return _setting(entries=(*_state.entries, entries))


def entries_over(level: int | None = None) -> tuple[str, ...]:
    """The axes over which the `vmap` at this level (None: any of them) lays its entries out."""
    return tuple(axis for entries in _state.entries if level in (None, entries.level) for axis in entries.over)


def entry_names() -> tuple[str, ...]:
    """The axis names of the `vmap`s around, outermost first."""
    return tuple(entries.name for entries in _state.entries if entries.name is not None)


def entries_named(name: str) -> Entries | None:
    """The entries of the innermost `vmap` around with this axis name."""
    return next((entries for entries in reversed(_state.entries) if entries.name == name), None)


def examined() -> bool:
    """Whether what runs here is a part of something else: of a `vfn.grad`, a body, debug mode, a parity check; or is
    to run as written."""
    state = _state
    return bool(
        state.as_written
        or state.grad_depth
        or state.body is not None
        or state.key_uses is not None
        or state.recorder is not None
        or state.unit is not None
        or _watch is not None
    )


def on_one_device() -> bool:
    """Whether a program for a mesh runs on one device, to compare: `shard` and `with_sharding` leave values plain."""
    return _state.unit is not None


def seen(mesh: Any) -> Any:
    """The mesh that the program is to see: on one device, one with the same axes, all of size 1."""
    return mesh if mesh is None or _state.unit is None else _state.unit(mesh)


def note(name: str, given: Any, made: Any, axes: tuple[str, ...] = (), line: str = "") -> None:
    """Tell the recorder, where there is one, of a step of ours that it cannot see: what went in, what came out of it,
    the axes along which ranks communicated, and the line, where that is another than the user's present one."""
    if _state.recorder is not None:
        _state.recorder(name, given, made, axes, line)


def key_uses() -> dict[Any, Any] | None:
    """In debug mode, what each random key was used for; else None."""
    return _state.key_uses


def logs() -> tuple[Any, ...]:
    """The communication logs that record what this thread does: its own; those of all threads, for a thread of autograd's,
    which does not say for whom it computes."""
    if not _logs:
        return ()
    here = threading.get_ident()
    of_autograd = isinstance(threading.current_thread(), threading._DummyThread)
    if _unlogged if of_autograd else here in _unlogged:
        return ()
    return tuple(log for thread, log in tuple(_logs) if of_autograd or thread == here)


def watch() -> Any:
    """In debug mode, what compares this rank's calls with those of the others (`agreement.Watch`); else None.

    On one device there are no others.
    """
    return None if _watch is None or _state.unit is not None else _watch


def set_watch(value: Any) -> None:
    """Begin debug mode, or (None) end it."""
    global _watch
    _watch = value


def grad_depth() -> int:
    """How many `vfn.grad`s on the plain autograd engine are being differentiated around this point."""
    return _state.grad_depth


class Restored:
    """A context that calls ``restore(value)`` when it is left. Two of them, one in the other, survive an interrupt between any
    two lines: where it comes while the one is left, the other still is."""

    def __init__(self, restore: Callable[[Any], Any], value: Any) -> None:
        self._restore, self._value = restore, value

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        self._restore(self._value)


@contextlib.contextmanager
def _setting(**values: Any) -> Iterator[None]:
    before = {name: getattr(_state, name) for name in values}
    with Restored(_set, before), Restored(_set, before):
        _set(values)
        yield


def _set(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(_state, name, value)


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
    return _setting(used_mesh=(mesh if mesh is None else checked_mesh(mesh, "use_mesh"),))


def set_mesh(mesh: Any) -> None:
    """Make `mesh` the current mesh from here on: `use_mesh` for a notebook. None takes it away.

    >>> import vescale_fn as vfn
    >>> vfn.set_mesh(None)
    """
    mesh = mesh if mesh is None else checked_mesh(mesh, "set_mesh")
    if _state.used_mesh is None:
        _state.kept_mesh = mesh
    else:
        _state.used_mesh = (mesh,)


def being_strict() -> contextlib.AbstractContextManager[None]:
    """Let `is_strict` hold."""
    return _setting(strict=True)


def as_written() -> contextlib.AbstractContextManager[None]:
    """Let no function be recorded."""
    return _setting(as_written=True)


def one_device(unit: Callable[[Any], Any] | None) -> contextlib.AbstractContextManager[None]:
    """Let every mesh count as ``unit(mesh)``, its like with one rank; None ends that."""
    return _setting(unit=unit)


def recording(
    recorder: Callable[[str, Any, Any, tuple[str, ...], str], None],
) -> contextlib.AbstractContextManager[None]:
    """Have `note` call ``recorder(name, given, made, axes, line)``."""
    return _setting(recorder=recorder)


def entered_body(value: Body | None) -> contextlib.AbstractContextManager[None]:
    """Run a `shard_map` body."""
    return _setting(body=value)


def swap_body(value: Body | None) -> Body | None:
    """`entered_body` without the context manager, for the path of every call: set the body, and return the one before."""
    before, _state.body = _state.body, value
    return before


def adopt() -> Callable[[Any], Any] | None:
    """What makes a local value of an array that the running body closes over, where no mode does; else None."""
    return _state.adopt


def swap_adopt(value: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """Set what `adopt` gives, and return what it was before."""
    before, _state.adopt = _state.adopt, value
    return before


def debugging() -> contextlib.AbstractContextManager[None]:
    """Note what each key is used for."""
    return _setting(key_uses={})


@contextlib.contextmanager
def logging_to(log: Any) -> Iterator[None]:
    """Record every collective of this thread into `log` as well."""
    entry = threading.get_ident(), log
    with Restored(_end_log, entry), Restored(_end_log, entry):
        _logs.append(entry)
        yield


def _end_log(entry: tuple[int, Any]) -> None:
    _logs[:] = [other for other in _logs if other is not entry]


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Record no collective of this thread: none is carried out."""
    here = threading.get_ident()
    before = _unlogged.count(here)
    with Restored(_end_unlogged, before), Restored(_end_unlogged, before):
        _unlogged.append(here)
        yield


def _end_unlogged(before: int) -> None:
    here = threading.get_ident()
    while _unlogged.count(here) > before:
        _unlogged.remove(here)


def captured() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What brings this thread's state of now back, any number of times: for what a backward pass computes again."""
    # not the uses of keys, and no recorder: what is computed again draws again, on purpose
    kept = {name: getattr(_state, name) for name in ("body", "strict", "unit")}
    return functools.partial(_setting, **kept, used_mesh=(_state.mesh,), key_uses=None, recorder=None)


class Again:
    """A context that can be entered any number of times: each time the contexts that these functions make, anew."""

    def __init__(self, *makers: Callable[[], Any]) -> None:
        self.makers, self.stacks = makers, []

    def __enter__(self) -> None:
        stack = contextlib.ExitStack()
        for make in self.makers:
            stack.enter_context(make())
        self.stacks.append(stack)

    def __exit__(self, *error: Any) -> Any:
        return self.stacks.pop().__exit__(*error)


class differentiating:
    """Run the function that a `vfn.grad` differentiates, and its backward pass."""

    def __enter__(self) -> None:
        _state.grad_depth += 1
        self.sums_in = _sums_in

    def __exit__(self, *error: Any) -> None:
        global _sums_in
        _state.grad_depth -= 1
        _state.followed = _state.followed and _state.grad_depth > 0
        _sums_in = self.sums_in


def count_followed() -> None:
    """A gradient was taken that an outer one may go through."""
    _state.followed = True


def followed() -> bool:
    """Whether such a gradient was taken since the outermost gradient began."""
    return _state.followed


def sums_in() -> Any:
    """The dtype in which sums over ranks are made of what is narrower; None: in its own."""
    return _sums_in


@contextlib.contextmanager
def summing_in(dtype: Any) -> Iterator[None]:
    """Make sums over ranks in this dtype; where something is differentiated, until its backward pass is done as well."""
    with Restored(_end_sums, _sums_in), Restored(_end_sums, _sums_in):
        _set_sums(dtype)
        yield


def _set_sums(dtype: Any) -> None:
    global _sums_in
    _sums_in = dtype


def _end_sums(before: Any) -> None:
    if not _state.grad_depth:
        _set_sums(before)


def ambient() -> tuple[Any, ...]:
    """Everything ambient in this thread, for `set_ambient`."""
    own: tuple[Any, int] = (), 0
    if _logs or _unlogged:
        here = threading.get_ident()
        own = [entry for entry in _logs if entry[0] == here], _unlogged.count(here)
    states = [state.__dict__.copy() for state in local_states]
    return states, own, _used_mesh.get(), (_simulated, _watch, _sums_in)


def set_ambient(saved: tuple[Any, ...]) -> None:
    """Put back what `ambient` has found."""
    global _simulated, _watch, _sums_in
    states, (logs, unlogged), used_mesh, (_simulated, _watch, _sums_in) = saved
    for state, values in zip(local_states, states):
        if vars(state) != values:
            vars(state).clear()
            vars(state).update(values)
    for entry in [entry for entry in _logs if entry[0] == threading.get_ident() and entry not in logs]:
        _end_log(entry)
    _end_unlogged(unlogged)
    if _used_mesh.get() is not used_mesh:
        _used_mesh.set(used_mesh)


def clear() -> None:
    """Forget everything ambient, as in a fresh process (a forked rank calls it)."""
    global _sums_in
    set_simulated(None)
    set_watch(None)
    _sums_in = None
    _logs.clear()
    _unlogged.clear()
    _state.kept_mesh, _state.used_mesh = None, None
    _state.body, _state.strict, _state.grad_depth, _state.key_uses = None, False, 0, None
    _state.adopt = None
    _state.unit, _state.recorder, _state.as_written = None, None, False
