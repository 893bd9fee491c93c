"""elastic: a run that goes on, with the same bits, where processes are lost, come back, or are others in number."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .._core import torch_internals
from .._core.arrays.array import is_array, mesh_of
from .._core.base import context, tree
from .._core.base.errors import CheckpointError
from .._core.base.fingerprint import differences, fingerprint
from .._core.base.front_door import public
from .._core.base.messages import described, report, short
from .._core.base.state import process
from .._core.distributed import ranks, spares
from .._core.distributed.deterministic import deterministic
from .._core.distributed.places import whole_mesh
from . import memory_files
from .buddies import Copies
from .leaving import Leaving
from .manager import Manager
from .recovery import Survey, everyone


@public("elastic")
def elastic(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Callable[[], Any],
    batches: Callable[[int], Any] | Sequence[Any],
    *,
    steps: int,
    virtual: int,
    manager: Manager | None = None,
    save_every: int | None = None,
    on_step: Callable[[int, Any], None] | None = None,
    buddies: bool = True,
    memory: str | os.PathLike[str] | None = None,
    exact: bool | None = True,
) -> Any:
    """Take steps from where the run is, and keep it going: the result has the bits of a run that was never disturbed.

    Every process calls this, in a program that is started again when processes are lost: ``vfn.launch(train, 8, restarts=10)``,
    ``torchrun --max-restarts``, a job that is queued again. Of the processes that there are the largest number that divides
    `virtual` plays the ranks (`deterministic`); the others are spares, and wait. After each step every process keeps its share
    of the state in memory that outlives it, and sends it to a neighbour on another machine, while the next step runs. A run
    that is started again goes on from the newest step of which such copies are left of all, verified by their sha256, or from
    the newest checkpoint of `manager`, or from the beginning. A step that was not copied yet is taken again, with the same
    batch and the same bits: at most one that was complete; none where processes are told to end, by SIGTERM, or are to be
    others in number. Where all of them are told to end, as the program is, `manager` saves the step.

    `step` and `batches` run with the mesh of the state as the current one. Meshes have to be made in here, by `state` say: they
    depend on how many processes there are now.

    Args:
        step: ``state, aux = step(state, batch)``, perhaps by `jit`. The new state is a tree like the old one.
        state: makes the state that the run begins with, the same each time. All that a step depends on is in it, or in its
            batch: parameters, optimiser state, keys.
        batches: the batch of a step, by its number from 0; a function, or a sequence.
        steps: how many there are to be in all.
        virtual: how many ranks there are, whatever the number of processes.
        manager: of the checkpoints, in a folder that all machines share.
        save_every: save after every so many steps, and after the last; None: after the last alone.
        on_step: is called with the number of steps done, and `aux`, on every process; again where a step is.
        buddies: keep a neighbour's copy beside one's own, so that a machine may be lost; where all processes are on one
            machine there is none to keep.
        memory: a folder in memory for the copies; by default in ``/dev/shm``. It needs twice this process's share of the
            state, four times with a neighbour's. Nothing is kept where nobody would start the program again: without
            ``restarts=`` or torchrun.
        exact: refuse a checkpoint of another `fingerprint`, as of other versions; as for `load`.

    Returns:
        The state after the last step, on the mesh of the processes that there are then; None on a spare.

    Raises:
        CheckpointError: the arguments are not as above; `step` returns another tree; there is no room in memory; the processes
            differ in what decides bits (`fingerprint`); a checkpoint is beyond the last step, or does not fit.

    Source: Gemini (Wang et al., SOSP 2023) for copies in the memory of neighbours; TorchElastic for restarts.

    >>> import torch, vescale_fn as vfn
    >>> def begin():
    ...     mesh = vfn.make_mesh((4,), ("dp",))
    ...     return vfn.shard(torch.zeros(8), mesh, vfn.P("dp"))
    >>> state = vfn.elastic(lambda w, batch: (w + batch, None), begin, lambda i: i, steps=5, virtual=4)
    >>> vfn.unshard(state)[0]
    tensor(10.)
    """
    _check(step, state, batches, steps, manager, save_every, on_step)
    find = batches if callable(batches) else batches.__getitem__
    with deterministic(virtual):
        me = spares.joined(virtual)
        if isinstance(me, spares.Spare):
            me.wait()
            return None
        with _group() as group:
            now = state()
            folder = memory_files.folder_of(memory)
            said = everyone(group, (folder and memory_files.identity(folder), fingerprint(), secrets.token_hex(8)))
            _check_alike([each for _, each, _ in said])
            done, now = _recovered(Survey(folder, group), now, manager, exact, steps)
            places, life = [place for place, *_ in said], said[0][2]
            copies = None if folder is None or None in places else Copies(folder, group, places, life, buddies)
            with _current_mesh(now), Leaving(steps, group, copies, manager) as leaving:
                if copies is not None:
                    copies.keep(done, now)
                for i in range(done + 1, steps + 1):
                    now, aux = _pair(step(now, find(i - 1)))
                    if copies is not None:
                        copies.keep(i, now)
                    if manager is not None and (i == steps or (save_every and i % save_every == 0)):
                        manager.save(i, now)
                    if on_step is not None:
                        on_step(i, aux)
                    leaving.after(i, now)
            if manager is not None:
                manager.wait()
            if copies is not None:
                copies.remove()
            everyone(group, None)
            me.done()
    return now


def _recovered(survey: Survey, like: Any, manager: Manager | None, exact: bool | None, steps: int) -> tuple[int, Any]:
    """The newest state that there is, and after how many steps it was."""
    found, saved = survey.newest, None if manager is None else manager.latest()
    newest = max(-1 if found is None else found.step, -1 if saved is None else saved)
    if newest > steps:
        what = f"the run is to end after {steps} steps, but there is a state after {newest}"
        raise CheckpointError(report("elastic", what, fix=f"manager.rewind({steps}), or more steps"))
    if found is not None and found.step == newest:
        return newest, survey.state(found, like)
    if manager is not None and saved is not None:
        return newest, manager.restore(like, exact=exact)
    return 0, like


@contextlib.contextmanager
def _group() -> Iterator[Any]:
    """A group of gloo's of all processes, for copies; None where there is one."""
    if not ranks.has_process_group() or dist.get_world_size() == 1:
        yield None
        return
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=torch_internals.group_timeout()))
    yield group
    dist.destroy_process_group(group)


def _current_mesh(state: Any) -> Any:
    meshes = {id(mesh): mesh for x in tree.leaves(state) if is_array(x) for mesh in [whole_mesh(mesh_of(x))]}
    return context.use_mesh(next(iter(meshes.values()))) if len(meshes) == 1 else contextlib.nullcontext()


def _pair(out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        what = f"step must return (state, aux), but it returned {described(out)}"
        raise CheckpointError(report("elastic", what, fix="return state, loss; or return state, None"))
    return out


def _check_alike(prints: list[dict[str, Any]]) -> None:
    differ = [
        f"process {i}: {line}"
        for i, each in enumerate(prints)
        if each != prints[0]
        for line in differences(prints[0], each)
    ]
    if differ:
        fix = "the same versions, kind of processor and settings on all machines (vfn.fingerprint())"
        raise CheckpointError(report("elastic", "the processes would compute other bits than process 0", differ, fix))


def _check(step: Any, state: Any, batches: Any, steps: Any, manager: Any, save_every: Any, on_step: Any) -> None:
    counts = [("steps", steps, 0), *([] if save_every is None else [("save_every", save_every, 1)])]
    failures = [
        f"{name} must be a function, but it is {described(x)}"
        for name, x in (("step", step), ("state", state), ("on_step", on_step or len))
        if not callable(x)
    ]
    failures += [
        f"{name} must be a whole number of at least {least}, but it is {short(x)}"
        for name, x, least in counts
        if isinstance(x, bool) or not isinstance(x, int) or x < least
    ]
    if not (callable(batches) or (hasattr(batches, "__getitem__") and (failures or len(batches) >= steps))):
        failures.append(f"batches must be a function, or a sequence of one for each step, but it is {short(batches)}")
    if not isinstance(manager, (Manager, type(None))):
        failures.append(f"manager must be a vfn.checkpoint.Manager, but it is {described(manager)}")
    if save_every is not None and manager is None:
        failures.append(f"save_every={short(save_every)}, but there is no manager to save with")
    if failures:
        raise CheckpointError(report("elastic", "the arguments do not make a run", failures))
    if process.notes is not None:
        what = "deterministic(check=...) compares runs from their first step on, and this one may begin at any"
        raise CheckpointError(
            report("elastic", what, fix="deterministic(check=...) around the steps alone, without elastic")
        )
