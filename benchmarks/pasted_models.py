"""What a step of a model takes by prediction, as a search laid it out, and as somebody writes it who pastes what was chosen.

Models of two layers (float32 parameters, computed in bfloat16, AdamW, donated arguments) on eight H100s: the search's own
layout, carried out call by call; the step with its arguments so, by the rules alone; and with the lines of `choice.moves`.
Nothing is allocated or run. ``python -m benchmarks.pasted_models gpt`` takes one model.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

import vescale_fn as vfn
from benchmarks.side_by_side import publish
from vescale_fn.choice.verified import priced_as
from vescale_fn.recipes import dit, gpt, llama, mixtral, models, rows
from vescale_fn.recipes.parallel import ONE_DEVICE

KEY, OPTIMIZER = vfn.random.key(0), vfn.optim.adamw(1e-3)
POLICY = vfn.precision.policy("params=f32,compute=bf16")
MESHES = ({"tp": 8}, {"dp": 2, "tp": 4})
TEXT: dict[str, Any] = {"vocab": 32000, "layers": 2, "dropout": 0.0}
# model, its sizes, examples, their length
MODELS: dict[str, tuple[ModuleType, Any, int, int]] = {
    "gpt": (gpt, gpt.Config(**TEXT, dim=2048, heads=16, hidden=8192, context=2048), 8, 2048),
    "llama": (llama, llama.Config(**TEXT, dim=4096, heads=32, groups=8, hidden=11008), 8, 2048),
    "mixtral": (mixtral, mixtral.Config(**TEXT, dim=4096, heads=32, groups=8, hidden=14336), 8, 2048),
    "dit": (
        dit,
        dit.Config(
            size=32, patch=2, channels=4, classes=1000, dim=1152, heads=16, layers=2, hidden=4608, frequencies=256
        ),
        64,
        32,
    ),
}


def row(name: str, mesh: dict[str, int]) -> list[Any]:
    """Milliseconds, how many lines, and what is sent as in the layout that is the answer."""
    model, config, count, length = MODELS[name]
    params = vfn.eval_shape(lambda: model.init(KEY, config, torch.float32))
    batch = vfn.eval_shape(lambda: models.random_batch(KEY, config, count, length))
    step = rows.training(model, models.laid_out(config, ONE_DEVICE), OPTIMIZER, None, POLICY)
    args = params, vfn.eval_shape(OPTIMIZER.init, params), batch
    choice = vfn.auto(step, *args, mesh=mesh, hardware="h100", candidates=1, donate_argnums=(0, 1))
    searched = priced_as(choice.recorded, choice.layouts, choice.hardware, choice.donated)
    written = choice.written
    sent = [sorted((one.op, one.axis, one.bytes) for one in x.comms) for x in (choice.predicted, written)]
    seconds = [x.seconds * 1e3 for x in (searched, choice.pasted, written, choice.predicted)]
    on = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    return [name, on, *seconds[:3], len(choice.moves), seconds[3], "yes" if sent[0] == sent[1] else "no"]


def main() -> None:
    names = sys.argv[1:] or [*MODELS]
    columns = [
        "model",
        "mesh",
        "search, ms",
        "rules, ms",
        "rules and lines, ms",
        "lines",
        "answer, ms",
        "answer as written",
    ]
    publish("pasted_models", columns, [row(name, mesh) for name in names for mesh in MESHES])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
