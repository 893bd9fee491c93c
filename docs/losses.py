"""`python docs/losses.py`: draw docs/images/losses.png, the losses of one program on one device and on three meshes.

The main job itself, a small Llama that learns the bytes of Python's standard library, dropout on, in float32 (a few minutes).
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

STEPS = 120
RUNS = {
    "one device": ("dp", "dp=1"),
    "fsdp, 8 ranks": ("fsdp", "dp=8"),
    "tp+sp, 4 ranks": ("tp+sp", "tp=4"),
    "fsdp+cp+tp, 2 x 2 x 2 ranks": ("fsdp+cp+tp", "dp=2,cp=2,tp=2"),
}


def losses(folder: Path, parallel: str, mesh: str) -> list[float]:
    """The losses of a run of the main job, step by step."""
    path = folder / f"{mesh}.jsonl"
    job = [sys.executable, "-m", "vescale_fn.recipes.train", "--simulate", "--metrics", str(path)]
    sizes = ["--steps", STEPS, "--dim", 64, "--context", 64, "--sample", 1, "--evaluate-every", STEPS]
    options = ["--parallel", parallel, "--mesh", mesh, *map(str, sizes)]
    subprocess.run([*job, *options], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return [
        loss for loss in (json.loads(line).get("loss") for line in path.read_text().splitlines()) if loss is not None
    ]


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """The curves above, how far each is from the first below."""
    plt.rcParams["font.size"] = 9
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7.2, 4.2), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    steps = range(1, STEPS + 1)
    (first, one), *others = curves.items()
    above.plot(steps, one, color="0.75", linewidth=5, label=first, solid_capstyle="round")
    for (name, curve), color, style in zip(others, ("C0", "C1", "C2"), ("-", "--", ":"), strict=True):
        above.plot(steps, curve, color=color, linestyle=style, linewidth=1.6, label=name)
        below.plot(steps, [abs(a - b) for a, b in zip(curve, one, strict=True)], ".", color=color, markersize=3)
    above.set_ylabel("loss, nats a byte")
    above.legend(frameon=False)
    above.set_title("One program, one device and three meshes: the same losses", loc="left", fontsize=10)
    below.set(ylabel="difference from\none device", xlabel="step")
    below.set_yscale("symlog", linthresh=1e-7)
    below.set_ylim(0, 1e-4)
    below.set_yticks([0, 1e-7, 1e-6, 1e-5, 1e-4])
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)
    worst = max(abs(a - b) for _, curve in others for a, b in zip(curve, one, strict=True))
    print(f"{path}: the largest difference is {worst:.1e}, of losses from {one[0]:.2f} to {one[-1]:.2f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        curves = {name: losses(Path(folder), *how) for name, how in RUNS.items()}
    draw(curves, Path(__file__).parent / "images" / "losses.png")
