"""Lines of code that exist only for distribution: ours, counted, beside those that the veScale paper gives.

No clock is read. A line counts if it ends in ``# mesh``; tests/test_parallelisms.py takes these away from each model and
runs what is left on one device. Comments, docstrings and blank lines do not count.
"""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks.side_by_side import publish
from vescale_fn.recipes import count_lines

PAPER = {"llama": (29, 63, 126), "mixtral": (38, 100, 162), "dit": (38, 95, 82)}  # of arXiv 2509.07003


def code_lines(path: Path) -> int:
    """How many lines of a file hold code."""
    source = path.read_text()
    lines = {i for i, line in enumerate(source.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> None:
    folder = Path(count_lines.__file__).parent
    rows = []
    for name, others in PAPER.items():
        marked = len(count_lines.distribution_lines(f"{name}.py"))
        rows.append([name, code_lines(folder / f"{name}.py"), marked, *others])
    shared = [code_lines(folder / "parallel.py"), len(count_lines.distribution_lines("train.py"))]
    publish(
        "lines",
        ["model", "its lines", "of these for distribution", "veScale", "TorchTitan", "Megatron-LM"],
        rows,
        shared=dict(zip(("parallel.py", "train.py"), shared)),
    )
    print(f"for all models alike: {shared[0]} lines of the table of parallelisms, {shared[1]} of train.py")


if __name__ == "__main__":
    main()
