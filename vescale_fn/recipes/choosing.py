"""``--parallel auto``: the layout of the main job as `vfn.auto` chooses it, for its model, its sizes and the ranks there are.

What is chosen is either a row of `parallel.py`, and then the job runs as if that had been asked for; or what the search found,
and then a step is carried out in that. All ranks choose, and get the same.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import vescale_fn as vfn
from vescale_fn._core.base.messages import meant, report
from vescale_fn._core.distributed import environment
from vescale_fn.choice.agreed import digest
from vescale_fn.choice.search.highs import highs
from vescale_fn.plan.ir.memory_limit import limit

from . import optimizers
from .models import MODELS, laid_out, random_batch, suits
from .parallel import ONE_DEVICE, Layout, Specs, parallel
from .rows import meshes, rows

TEXTS = (  # those that a model has dims for, each on the meshes that have its axes
    *("dp", "zero1", "fsdp", "fsdp+remat", "hsdp"),
    *("tp", "tp+sp", "dp+tp", "dp+tp+sp", "dp+tp+sp+vp", "zero1+tp", "fsdp+tp", "fsdp+tp+sp", "fsdp+tp+sp+vp"),
    *("dp+cp", "fsdp+cp", "fsdp+cp+remat", "dp+ep", "fsdp+ep", "fsdp+ep+remat"),
)
CANDIDATES = 2  # of the search, which are priced beside these rows
_USUAL, _UNTIL_DONE = 60.0, 1e6  # seconds of a search: one that time has cut off may end otherwise the next time
GPUS = ("b200", "h100", "a100")


@dataclass(frozen=True, eq=False)
class FoundSpecs:
    """Where parameters and the optimiser's state lie in a layout that the search found: as `parallel.Specs`, for a step that
    states nothing."""

    params: Any
    state: Any

    def staged(self, *_: Any) -> FoundSpecs:
        """The same: there are no stages."""
        return self

    def init(self, optimizer: vfn.optim.Optimizer, params: Any) -> Any:
        """The state of an optimiser, each rank having its part of it."""
        return vfn.jit(lambda given: vfn.with_sharding(optimizer.init(given), self.state))(params)


@dataclass(frozen=True, eq=False)
class FoundLayout(Layout):
    """A layout that the search found. It names no dims: the model states nothing, and the calls are carried out as chosen."""

    choice: Any = None

    def spec(self, *names: str | None, without: str | None = None) -> vfn.P:
        """How a batch lies, or the first of its parts."""
        return self.choice.specs[2][0]

    def specs(self, params: Any, rules: Any, mesh: Any) -> Any:
        """Where everything lies."""
        return FoundSpecs(*self.choice.specs[:2])

    def step(self) -> Callable[..., Any]:
        """The step that was chosen for, of the same arguments as the job's."""
        step, mesh, lie = self.choice.jit(), self.choice.mesh(), self.choice.specs[2:]
        return lambda params, state, *rest: step(params, state, *vfn.shard(rest, mesh, lie))


def check(opt: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Check what can be said of the options before anything is started."""
    opt.layout = ONE_DEVICE
    started, opt.machines = environment.world(), 1
    if opt.chosen_axes and started:
        whole = started.size % started.local_size == 0
        opt.mesh, opt.machines = {"dp": started.size}, started.size // started.local_size if whole else 1
    try:
        highs()
        if opt.memory is not None:
            limit(opt.memory, caller="auto")
    except vfn.errors.VfnError as error:
        parser.error(f"--parallel auto: {str(error).removeprefix('auto: ')}")
    known = ("measured", "cpu", *GPUS)
    if opt.hardware is not None and opt.hardware not in known and not Path(opt.hardware).is_file():
        parser.error(f"--hardware {opt.hardware}: write {', '.join(known)}, or a JSON file{meant(opt.hardware, known)}")


def carried_out(step: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """The step of the job, of parts of a batch with a key for each, as its layout was chosen, where the search has found that;
    else the step as it is."""
    return layout.step() if isinstance(layout, FoundLayout) else step


def settled(opt: argparse.Namespace, make_step: Callable[..., Any]) -> argparse.Namespace:
    """The options, with mesh and layout chosen where that is asked for.

    Args:
        opt: of the job.
        make_step: the step of a loss, with an optimiser, the specs by which it states its layout, or None, and the number of
            parts of a batch: of parameters, state, the parts, and a key for each.
    """
    if opt.parallel != "auto":
        return opt
    model, optimizer = MODELS[opt.model], optimizers.of(opt)

    def step_in(layout: Layout, specs: Specs | None) -> Callable[..., Any]:
        config = laid_out(opt.config, layout)
        loss = opt.precision.apply(lambda params, batch, key=None: model.loss(params, batch, config, key))
        return make_step(loss, optimizer, specs, opt.accumulate)

    key = vfn.random.key(opt.seed)
    params = vfn.eval_shape(lambda key: model.init(key, opt.config, opt.precision.params), key)
    state = vfn.eval_shape(optimizer.init, params)
    part = vfn.eval_shape(lambda key: random_batch(key, opt.config, opt.batch // opt.accumulate, opt.context), key)
    shapes = _shapes(opt)
    args = params, state, (part,) * opt.accumulate, tuple(vfn.random.split(key, opt.accumulate))
    texts = [text for text in TEXTS if suits(opt.model, text)]
    given = rows(
        step_in, args, model.NAMES, optimizer, [one for one in _for_rows(opt, shapes) if _divides(opt, one)], texts
    )
    met = vfn.make_mesh(tuple(shapes[0].values()), tuple(shapes[0]), device=opt.device)  # where the ranks agree
    hardware = _hardware(opt, met)
    choice = vfn.auto(
        step_in(ONE_DEVICE, None),
        *args,
        mesh=[met, *shapes[1:]],
        memory=opt.memory,
        hardware=hardware,
        others=given,
        donate_argnums=(0, 1),
        candidates=CANDIDATES,
        seconds=_USUAL if opt.elastic is None else _UNTIL_DONE,
    )
    if opt.elastic is not None and opt.checkpoints:
        as_before(Path(opt.checkpoints), digest([choice.layouts], [choice.ranked[0].name, choice.ranked[0].memory]))
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("chosen    " + repr(choice).replace("\n", "\n  "), flush=True)
    found, row = argparse.Namespace(**vars(opt)), choice.ranked[0].name
    found.mesh = dict(choice.layouts.mesh)
    text = row.partition(" on ")[0]
    found.layout = parallel(text, found.mesh) if row else FoundLayout(choice=choice)
    found.parallel = f"auto ({text})" if row else "auto"
    return found


def as_before(folder: Path, chosen: str) -> None:
    """Raise where a run that is to go on with the same bits was begun in another layout; note in which it is begun."""
    noted = folder / "chosen-layout"
    if not noted.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        own = folder / f".chosen-layout-{os.getpid()}"
        own.write_text(chosen)
        own.replace(noted)  # all ranks write the same
    elif noted.read_text() != chosen:
        what = f"the run in {folder} was begun in another layout: other options, or another release, choose another one now"
        raise vfn.errors.VfnError(report("--parallel auto --elastic", what, fix="another folder, or without --elastic"))


def _shapes(opt: argparse.Namespace) -> list[dict[str, int]]:
    """The meshes to choose from."""
    if not opt.chosen_axes:
        return [dict(opt.mesh)]
    return vfn.mesh_shapes(math.prod(opt.mesh.values()), opt.machines)


def _for_rows(opt: argparse.Namespace, shapes: list[dict[str, int]]) -> list[dict[str, int]]:
    """The same, and those with axes that only rows of the table can use: of sequences, experts and replicas."""
    more = meshes(math.prod(opt.mesh.values()), opt.machines) if opt.chosen_axes else []
    return shapes + [one for one in more if one not in shapes]


def _divides(opt: argparse.Namespace, mesh: dict[str, int]) -> bool:
    whole = ("tp", opt.heads), ("cp", opt.context), ("ep", getattr(opt.config, "experts", 1))
    return not any(size % mesh.get(axis, 1) for axis, size in whole)


def _hardware(opt: argparse.Namespace, mesh: Any) -> Any:
    """What there is, or what is asked for: by name, measured, or from a file."""
    if opt.hardware == "measured":
        return vfn.hardware.measure(mesh)
    if opt.hardware is not None and Path(opt.hardware).is_file():
        return vfn.hardware.Hardware.from_json(Path(opt.hardware).read_text())
    if opt.hardware is not None or opt.device == "cpu":
        return opt.hardware
    name = torch.cuda.get_device_name().lower()
    return next((gpu for gpu in GPUS if gpu in name), "h100")
