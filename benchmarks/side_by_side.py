"""How everything here is timed: candidates take turns in one process, on one thread, and the medians are compared."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

Name = TypeVar("Name")

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent / "README.md"


def medians(
    candidates: Mapping[Name, Callable[[], Any]], *, rounds: int = 41, seconds: float = 0.01
) -> dict[Name, float]:
    """The median time of one call of each candidate, in microseconds of this process on the CPU.

    Every round runs each candidate once, for about `seconds`, in an order that rotates: what slows the machine for a
    while slows all of them. A candidate's first calls, which fill caches, are not counted.
    """
    calls = {}
    for name, candidate in candidates.items():
        for _ in range(5):
            candidate()
        start = time.process_time()
        candidate()
        calls[name] = max(1, round(seconds / max(time.process_time() - start, 1e-7)))
    times: dict[Name, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            candidate, count = candidates[name], range(calls[name])
            start = time.process_time()
            for _ in count:
                candidate()
            times[name].append((time.process_time() - start) / len(count) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; floats to three figures."""

    def text(value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        return f"{value:.3g}" if value < 1000 else f"{value:.0f}"

    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(text, line)) + " |" for line in lines)


def keep(name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], **more: Any) -> None:
    """Keep a table as `results/NAME.json`."""
    RESULTS.mkdir(exist_ok=True)
    setting = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    record = {"setting": setting, "columns": list(columns), "rows": [list(row) for row in rows], **more}
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def publish(name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], say: bool = True, **more: Any) -> None:
    """Print the table, keep it as `results/NAME.json`, and put it between the markers NAME of README.md."""
    shown = table(columns, rows)
    if say:
        print(f"{name}\n{shown}\n")
    keep(name, columns, rows, **more)
    before, begin, rest = README.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->\n")
    if not (begin and end):
        raise SystemExit(f"benchmarks/README.md has no place <!-- {name} --> ... <!-- end of {name} -->")
    README.write_text(f"{before}{begin}{shown}\n{end}{after}")
