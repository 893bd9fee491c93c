"""`deterministic`: what a program computes depends on its meshes, not on how many processes play their ranks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..base import context, state
from ..base.errors import MeshError
from ..base.front_door import public
from ..base.messages import described, report, short
from .bit_notes import BitNotes

MOST = 2**20  # ranks: beyond that a number is a mistake, which would take all memory


def _matmul(name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(torch.backends.cuda.matmul, name), lambda x: setattr(torch.backends.cuda.matmul, name, x)


def _cudnn(name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    def put(x: Any) -> None:  # not by the attribute, which may not be set after `torch.backends.disable_global_flags`
        torch.backends.cudnn.set_flags(**{f"_{name}": x})

    return lambda: getattr(torch.backends.cudnn, name), put


# What torch's kernels look up: how to ask, how to set, and what to.
_SETTINGS: list[tuple[Any, Callable[[Any], None], Any]] = [
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda x: torch.use_deterministic_algorithms(x[0], warn_only=x[1]),
        (True, False),
    ),
    (torch.get_num_threads, torch.set_num_threads, 1),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    (*_matmul("allow_fp16_reduced_precision_reduction"), False),
    (*_matmul("allow_bf16_reduced_precision_reduction"), False),
    (*_cudnn("allow_tf32"), False),
    (*_cudnn("benchmark"), False),
    (*_cudnn("deterministic"), True),
]


@public("deterministic")
def deterministic(
    virtual: int, *, kernels: str = "torch", check: str | os.PathLike[str] | None = None
) -> Deterministic:
    """Let there be `virtual` ranks, from the call on, whatever the number of processes; as a context manager, until the block
    ends.

    One process or several play them: each as many, in their order. Meshes made from here on are of that many ranks. What a
    program computes on them then depends, bit for bit, on the program, its keys and its meshes, and not on how many
    processes there are: a sum over ranks follows one binary tree over them in the mesh's order, neighbours first, and a
    kernel sees one rank's block alone, in a process that plays several ranks too. Torch's kernels are set to give the
    same each time: deterministic algorithms, one thread, no TF32, nothing chosen by trying.

    The number of processes has to divide `virtual`. It holds for the same versions of torch and the same kind of processor.

    Args:
        virtual: how many ranks there are.
        kernels: whose kernels compute: "torch", torch's own.
        check: a folder, made if need be, in which a run notes a sha256 of what each collective is given, for each rank. A run
            that finds such notes is compared with them, and ends at the first collective that is given other bits: on another
            number of processes, on another machine, or simply again. The folder is one that all processes reach; collectives
            of parts of a mesh are left out.

    Raises:
        DivergenceError: by a collective, where the run noted in `check` has made another one there, or given it other bits.
        MeshError: `virtual` is not a positive integer, `kernels` not "torch", or `check` no folder; by `make_mesh`, `launch`
            and `simulate`, where the number of processes, or of simulated ranks, does not go with it.

    >>> import vescale_fn as vfn
    >>> with vfn.deterministic(virtual=8):
    ...     mesh = vfn.make_mesh((2, 4), ("dp", "tp"))
    >>> mesh.played_ranks
    range(0, 8)
    """
    if not isinstance(virtual, int) or isinstance(virtual, bool) or not 1 <= virtual <= MOST:
        what = f"virtual={short(virtual)} is not a number of ranks; it must be an integer from 1 to {MOST:,}"
        raise MeshError(report("deterministic", what, fix="the number of ranks of the mesh: virtual=8"))
    if kernels != "torch":
        what = f"kernels must be 'torch', but it is {described(kernels)}"
        raise MeshError(report("deterministic", what, fix="kernels='torch', or no such argument"))
    return Deterministic(virtual, None if check is None else _folder(check))


def _folder(check: Any) -> str:
    try:
        folder = Path(check).absolute()
        folder.mkdir(parents=True, exist_ok=True)
    except (TypeError, OSError) as error:
        what = f"check must be a folder, but it is {described(check)}"
        raise MeshError(report("deterministic", what, [str(error)])) from None
    return str(folder)


class Deterministic:
    """What `deterministic` switched on; leaving its block brings back what was before."""

    def __init__(self, virtual: int, check: str | None = None) -> None:
        self.virtual, self.check = virtual, check
        self._before = [_now()]
        self._entered = 0
        self._set()

    def __enter__(self) -> Deterministic:
        if self._entered == len(self._before):  # entered again: what is to come back is what is now
            self._before.append(_now())
        self._entered += 1
        self._set()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        state.process.virtual, state.process.notes, settings = self._before.pop()
        for (_, put, _), value in zip(_SETTINGS, settings, strict=True):
            put(value)

    def _set(self) -> None:
        for _, put, value in _SETTINGS:
            put(value)
        state.process.virtual = self.virtual
        if self.check is not None:
            state.process.notes = BitNotes(self.check)

    def __repr__(self) -> str:
        return f"deterministic(virtual={self.virtual})"


def _now() -> tuple[Any, ...]:
    return context.virtual(), state.process.notes, [ask() for ask, _, _ in _SETTINGS]


def carried(call: Callable[[], Any]) -> Callable[[], Any]:
    """A function that is as it would be here in a process started for it: under what `deterministic` has switched on."""
    virtual, notes = context.virtual(), state.process.notes
    return call if virtual is None else functools.partial(_called_under, virtual, notes and notes.folder, call)


def _called_under(virtual: int, check: str | None, call: Callable[[], Any]) -> Any:
    with Deterministic(virtual, check):
        return call()


def check_divides(where: str, processes: int) -> None:
    """Raise where the ranks that there are whatever the number of processes cannot be played by as many."""
    virtual = context.virtual()
    if virtual is not None and virtual % processes:
        counts = [n for n in range(1, min(virtual, 2**12) + 1) if virtual % n == 0]
        what = f"{processes} processes cannot play {virtual} ranks, as many each, of deterministic(virtual={virtual})"
        raise MeshError(report(where, what, fix=f"{', '.join(map(str, counts[:-1]))} or {counts[-1]} processes"))
