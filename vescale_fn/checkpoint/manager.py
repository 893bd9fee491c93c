"""The checkpoints of a training run: one a step, of which the last few are kept."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from .._core.base.errors import CheckpointError
from .._core.base.front_door import public
from .._core.base.messages import report, short
from . import all_ranks, atomic_folder, locks, paths
from .async_save import Saving, finish_last
from .load import load
from .save import save


class Manager:
    """The checkpoints of one training run, in a folder: ``folder/step-100``, ``folder/step-200``, ...

    Every method is called by all ranks of the process group.

    Args:
        folder: it is made at the first save.
        keep: how many of the last checkpoints to keep; None: all. Older ones go when a new one is complete.
        keep_every: keep for good each step that this divides.
        background: write while the program goes on.

    Source: Orbax's ``CheckpointManager``, TorchTitan's ``CheckpointManager``.

    >>> import tempfile, torch, vescale_fn as vfn
    >>> manager = vfn.checkpoint.Manager(tempfile.mkdtemp(), keep=2)
    >>> for step in range(5):
    ...     manager.save(step, {"w": torch.full((2,), float(step)), "step": step})
    >>> manager.steps()
    [3, 4]
    >>> manager.restore({"w": torch.empty(2), "step": 0})
    {'w': tensor([4., 4.]), 'step': 4}
    """

    @public("checkpoint.Manager")
    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int | None = 3,
        *,
        keep_every: int | None = None,
        background: bool = False,
    ) -> None:
        for name, value in ("keep", keep), ("keep_every", keep_every):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise CheckpointError(
                    report("Manager", f"{name} must be a positive integer or None, but it is {short(value)}")
                )
        self.folder = paths.as_path(folder, "Manager")
        self.keep, self.keep_every, self.background = keep, keep_every, background
        self._saving: Saving | None = None

    def __repr__(self) -> str:
        options = f"keep={self.keep}, keep_every={self.keep_every}, background={self.background}"
        return f"Manager({str(self.folder)!r}, {options})"

    def save(self, step: int, tree: Any) -> None:
        """Save a tree as the checkpoint of a step, and then remove those that are too many.

        Args:
            step: how many steps have been done: a whole number, and none below a checkpoint that there is.
            tree: as for `vescale_fn.save`.

        Raises:
            CheckpointError: as for `vescale_fn.save`; in the background at the next `save`, `wait` or `restore`. Or there
                are checkpoints of later steps, which `rewind` removes.
        """
        self.wait()
        all_ranks.step(all_ranks.all_ranks("Manager.save"), "Manager.save", lambda: _checked(step), self._check_next)
        self._saving = save(self._path(step), tree, background=self.background)
        if not self.background:
            self._clean()

    def wait(self) -> None:
        """Wait for a save that goes on in the background; raise what it failed with."""
        finish_last()
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.wait()
            self._clean()

    def steps(self) -> list[int]:
        """The steps that there are complete checkpoints of, in order: the same list on all ranks."""
        return all_ranks.same_for_all("Manager.steps", self._steps)

    def latest(self) -> int | None:
        """The last step that there is a complete checkpoint of, or None."""
        return (self.steps() or [None])[-1]

    def restore(
        self,
        like: Any = None,
        step: int | None = None,
        *,
        mesh: Any = None,
        spec: Any = None,
        partial: bool = False,
        exact: bool | None = None,
    ) -> Any:
        """Load a checkpoint.

        Args:
            like, mesh, spec, partial, exact: as for `vescale_fn.load`.
            step: by default the last one.

        Raises:
            CheckpointError: there is none; or as for `vescale_fn.load`, with the other steps that there are.
        """
        self.wait()
        there = self.steps()
        wanted = step if step is not None else (there or [None])[-1]
        if wanted not in there:
            what = (
                f"there is no checkpoint of step {wanted} in {self.folder}"
                if there
                else f"{self.folder} has no checkpoint"
            )
            raise CheckpointError(report("Manager.restore", what, [f"there {_listed(there)}"] if there else []))
        try:
            return load(self._path(wanted), like, mesh=mesh, spec=spec, partial=partial, exact=exact)
        except CheckpointError as error:
            others = [each for each in there if each != wanted]
            if others:
                raise CheckpointError(
                    f"{error}\n  Besides step {wanted} there {_listed(others)}: restore(like, step={others[-1]})"
                ) from error
            raise

    def rewind(self, step: int) -> None:
        """Remove the checkpoints of all later steps."""
        self.wait()

        def remove() -> None:
            with paths.failing("Manager.rewind", self.folder):
                later = [each for each in self._steps() if each > step]
                left = [each for each in later if not atomic_folder.remove(self._path(each), "Manager.rewind")]
            if left:
                failures = [f"{self._path(each)} is not removed" for each in left]
                raise CheckpointError(
                    report(
                        "Manager.rewind",
                        "what vescale_fn has not written, links and damaged checkpoints stay as they are",
                        failures,
                        "remove them by hand",
                    )
                )

        all_ranks.same_for_all("Manager.rewind", remove)

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.wait()

    def _check_next(self, steps: list[int]) -> list[None]:
        """Raise unless all ranks are to save the same step, and there is none after it."""
        step, later = steps[0], [each for each in self._steps() if each > steps[0]]
        if len(set(steps)) > 1:
            said = [f"rank {rank} saves step {each}" for rank, each in enumerate(steps)]
            raise CheckpointError(report("Manager.save", "the ranks must save the same step", said))
        if later:
            raise CheckpointError(
                report(
                    "Manager.save",
                    f"step {step} comes before step {later[-1]}, which is in {self.folder} already",
                    fix=f"manager.rewind({step}), which removes what is later; or another folder",
                )
            )
        return [None] * len(steps)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def _steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return [
            step for step in self._mentioned() if (atomic_folder.found(self._path(step)) / paths.METADATA).is_file()
        ]

    def _mentioned(self) -> list[int]:
        """The steps that anything is called after, in order."""
        return sorted({*self._named(r"step-(\d+)"), *self._interrupted()})

    def _interrupted(self) -> set[int]:
        """The steps of which a save or a removal goes on, or has left something."""
        return self._named(r"\.step-(\d+)\.[\w-]+")

    def _named(self, form: str) -> set[int]:
        found = (re.fullmatch(form, name) for name in os.listdir(self.folder))
        return {int(each[1]) for each in found if each is not None}

    def _clean(self) -> None:
        """Remove what is too many, but for what another process writes; the newest one, just completed, is never among it."""

        def clean() -> None:
            with paths.failing("Manager.save", self.folder):
                for step in self._steps()[: -self.keep] if self.keep is not None else ():
                    if not (self.keep_every and step % self.keep_every == 0):
                        with contextlib.suppress(locks.Busy):
                            atomic_folder.remove(self._path(step), "Manager.save")
                for step in self._interrupted():
                    with contextlib.suppress(locks.Busy):
                        atomic_folder.sweep(self._path(step), "Manager.save")

        all_ranks.same_for_all("Manager.save", clean)


def _checked(step: Any) -> int:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CheckpointError(
            report(
                "Manager.save", f"step must be a whole number, but it is {short(step)}", fix="manager.save(step, tree)"
            )
        )
    return step


def _listed(steps: list[int]) -> str:
    return f"{'is step' if len(steps) == 1 else 'are steps'} {', '.join(map(str, steps[-8:]))}"
