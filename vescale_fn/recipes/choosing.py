"""``--parallel auto``: the layout of the main job as `vfn.auto` chooses it, for its model, its sizes and the ranks there are.

What is chosen is either a row of `parallel.py`, and then the job runs as if that had been asked for; or what the search found,
and then a step is carried out in that. All ranks choose, and get the same.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import vescale_fn as vfn
from vescale_fn._core.base.messages import meant
from vescale_fn._core.distributed import environment
from vescale_fn.choice.search.solver import highs
from vescale_fn.plan.ir.memory_limit import limit

from . import optimizers
from .models import MODELS, laid_out, random_batch, suits
from .parallel import ONE_DEVICE, Layout, Specs, parallel
from .rows import rows

TEXTS = (
    "dp",
    "zero1",
    "fsdp",
    "tp",
    "tp+sp",
    "dp+tp",
    "dp+tp+sp",
    "zero1+tp",
    "fsdp+tp",
    "fsdp+tp+sp",
    "dp+ep",
    "fsdp+ep",
)
CANDIDATES = 2  # of the search, which are priced beside these rows
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
        """How a batch lies."""
        return self.choice.specs[2]

    def specs(self, params: Any, rules: Any, mesh: Any) -> Any:
        """Where everything lies."""
        return FoundSpecs(*self.choice.specs[:2])

    def step(self) -> Callable[..., Any]:
        """The step that was chosen for, of the same arguments as the job's."""
        step, mesh, lies = self.choice.jit(), self.choice.mesh(), self.choice.specs[3]
        return lambda params, state, batch, key, earlier=None: step(params, state, batch, vfn.shard(key, mesh, lies))


def check(opt: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Check what can be said of the options before anything is started."""
    opt.layout = ONE_DEVICE
    if opt.chosen_axes and (started := environment.world()):
        opt.mesh = {"dp": started.size}
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
    """The step of the job as its layout was chosen, where the search has found that; else the step as it is."""
    return layout.step() if isinstance(layout, FoundLayout) else step


def settled(opt: argparse.Namespace, make_step: Callable[..., Any]) -> argparse.Namespace:
    """The options, with mesh and layout chosen where that is asked for.

    Args:
        opt: of the job.
        make_step: the step of a loss, with an optimiser, and the specs by which it states its layout, or None.
    """
    if opt.parallel != "auto":
        return opt
    model, optimizer = MODELS[opt.model], optimizers.of(opt)

    def step_in(layout: Layout, specs: Specs | None) -> Callable[..., Any]:
        config = laid_out(opt.config, layout)
        loss = opt.precision.apply(lambda params, batch, key=None: model.loss(params, batch, config, key))
        return make_step(loss, optimizer, specs)

    key = vfn.random.key(opt.seed)
    params = vfn.eval_shape(lambda key: model.init(key, opt.config, opt.precision.params), key)
    state = vfn.eval_shape(optimizer.init, params)
    batch = vfn.eval_shape(lambda key: random_batch(key, opt.config, opt.batch, opt.context), key)
    shapes = _shapes(opt)
    args = params, state, batch, key
    texts = [text for text in TEXTS if suits(opt.model, text)]
    given = rows(step_in, args, model.NAMES, optimizer, [one for one in shapes if _divides(opt, one)], texts)
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
    )
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("chosen    " + repr(choice).replace("\n", "\n  "), flush=True)
    found, row = argparse.Namespace(**vars(opt)), choice.ranked[0].name
    found.mesh = dict(choice.layouts.mesh)
    text = row.partition(" on ")[0]
    found.layout = parallel(text, found.mesh) if row else FoundLayout(choice=choice)
    found.parallel = f"auto ({text})" if row else "auto"
    return found


def _shapes(opt: argparse.Namespace) -> list[dict[str, int]]:
    """The meshes to choose from."""
    if not opt.chosen_axes:
        return [dict(opt.mesh)]
    ranks = math.prod(opt.mesh.values())
    return vfn.mesh_shapes(ranks)


def _divides(opt: argparse.Namespace, mesh: dict[str, int]) -> bool:
    return opt.heads % mesh.get("tp", 1) == 0


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
