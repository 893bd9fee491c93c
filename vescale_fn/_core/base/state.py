"""What is ambient: one record for each thread, and a few values of the whole process.

A thread's record is never changed: what sets something puts another record in its place, by one assignment. So an interrupt
finds the one or the other, and to put an old record back undoes all that was set since.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any


class Thread:
    """What is ambient in one thread; `context` says what each value means."""

    kept_mesh: Any = None  # by `set_mesh`, outside of every `use_mesh`: notebooks run each cell in a task of its own
    run: Any = None  # the `shard_map` body that is running, a `shard_map.body.running`
    strict: bool = False
    as_written: bool = False
    grad_depth: int = 0
    followed: bool = False
    primals: Sequence[Any] = ()  # what the innermost `vfn.grad` on the plain engine differentiates by
    keeper: Any = None  # of a `vfn.remat` with a policy, while its function runs: a `kept_values.Keeper`
    may_merge: bool = False  # whether a plan may merge what is computed again with what it repeats
    repeats: object | None = None  # of a derivative that makes again what it has not kept: each time another one
    keeps_all: bool = False  # whether `vfn.remat` computes nothing again: what is around it does
    computed_again: bool = False  # whether this is in what `vfn.remat` computes again; known where a pipeline records
    kept: list[Any] | None = None  # where `saved_residuals` collects what is kept for a backward pass
    for_types: bool = False  # whether a function is run for the types of its results alone
    ruled: tuple[int, ...] = ()  # while a custom derivative's rule runs: levels that no rule in it is for
    # derivatives of recorded bodies that this is part of, by what ends them: see `plan.tracing.loop_again.for_a_derivative`
    derivatives: tuple[Callable[[], Any], ...] = ()
    entries: tuple[Any, ...] = ()  # of the vmaps around, outermost first
    key_uses: dict[Any, Any] | None = None
    unit: Callable[[Any], Any] | None = None
    recorder: Callable[[str, Any, Any, tuple[str, ...], str], None] | None = None
    logs: tuple[tuple[Any], ...] = ()
    unlogged: bool = False
    apart: tuple[tuple[str, str], ...] = ()  # axes along which a condition around differs, and whose condition it is
    keyed: Any = None  # the mode in which a module draws from a key
    rates: Any = None  # by which stages that are only looked at are cut: a `plan.ir.costs.Rates`
    pipelines: Any = None  # what notes those that a recording meets: a `choice.piped.PipelineNotes`
    scheduled: Mapping[Any, Any] = MappingProxyType({})  # of pipelines with schedule="auto" the one that was chosen
    line: str = ""  # of the user's, of the recorded collective that runs
    devices: str = ""  # "cpu" or "cuda": on which a plan is to run that is only looked at; "" where the mesh says it
    blocks: tuple[object, ...] = ()  # the `context.setting`s in force, each by an object of its own


class Process:
    """What is ambient in all threads: those of autograd compute for another thread, and must see it."""

    simulated: int | None = None
    virtual: int | None = None
    notes: Any = None  # of the bits that collectives are given, under `deterministic(check=)`: a `bit_notes.BitNotes`
    watch: Any = None
    sums_in: Any = None
    draws: Any = None  # by what: a `random.backends.choice.Chosen`
    every_rank: Any = (
        None  # what records a plan for many ranks of an abstract mesh: a `plan.tracing.every_rank.EveryRank`
    )
    full_tracebacks = os.environ.get("VESCALE_FN_TRACEBACK", "") == "full"


class _Slot:
    now = Thread()

    def __init__(self) -> None:
        self.of_autograd = isinstance(threading.current_thread(), threading._DummyThread)


class _Here(threading.local):
    def __init__(self) -> None:
        self.slot = _Slot()
        _slots.append(weakref.ref(self.slot, _slots.remove))


_slots: list[weakref.ref[_Slot]] = []
here = _Here()
process = Process()
# bodies that run without a mode, in any thread: where it is empty nobody needs to ask for them
unwatched: set[Any] = set()
used_mesh: ContextVar[tuple[Any] | None] = ContextVar("mesh of use_mesh", default=None)  # of an asyncio task


def now() -> Thread:
    """What is ambient in this thread."""
    return here.slot.now


def everywhere() -> list[Thread]:
    """What is ambient in each thread."""
    return [slot.now for ref in tuple(_slots) if (slot := ref()) is not None]


def put(**values: Any) -> None:
    """Set values of this thread."""
    slot, made = here.slot, Thread()
    made.__dict__.update(slot.now.__dict__, **values)
    slot.now = made


def enter(run: Any) -> tuple[Thread, Thread]:
    """Set the body that is running; returns the records of before and of now, for `leave`."""
    slot, made = here.slot, Thread()
    before = slot.now
    if before.__dict__:
        made.__dict__.update(before.__dict__)
    made.run = run
    slot.now = made
    return before, made


def leave(before: Thread, entered: Thread) -> None:
    """Set the body that was running before, and leave what else has been set since."""
    slot = here.slot
    if slot.now is entered:
        slot.now = before
    else:
        put(run=before.run)


def saved() -> tuple[Any, ...]:
    """All that is ambient here, for `put_back`."""
    return here.slot.now, used_mesh.get(), process.simulated, process.virtual, process.watch, process.sums_in


def put_back(before: tuple[Any, ...]) -> None:
    """Put back what `saved` has found."""
    here.slot.now, mesh, process.simulated, process.virtual, process.watch, process.sums_in = before
    if used_mesh.get() is not mesh:
        used_mesh.set(mesh)


def clear() -> None:
    """Forget everything, as in a fresh process."""
    _slots[:] = [weakref.ref(here.slot, _slots.remove)]
    process.notes = None
    put_back((Thread(), None, None, None, None, None))
