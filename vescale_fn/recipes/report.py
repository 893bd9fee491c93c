"""What a training program shows: a progress line, losses side by side, a plot."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

LINES = 10  # where the progress line cannot be drawn over, it is printed this often


class Progress:
    """A line that says how far, how well and how fast: redrawn in a terminal, printed now and then elsewhere."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        """Start the clock for `total` steps."""
        self.total, self.stream = total, stream or sys.stdout
        self.redraws = self.stream.isatty()
        self.started = self.last_drawn = self.seen = time.perf_counter()
        self.speed_from: tuple[float, int] | None = None
        self.tokens = 0

    def step(self, done: int, losses: Sequence[float], tokens: int) -> None:
        """Show that `done` steps are done, the last of which took in `tokens` tokens."""
        now = self.seen = time.perf_counter()
        self.tokens += tokens
        if self.speed_from is None:  # the first step sets everything up: it does not count for the speed
            self.speed_from = (now, self.tokens)
        if done == self.total or (now - self.last_drawn > 0.1 if self.redraws else self._crosses(done)):
            self.last_drawn = now
            self._draw(self._line(done, losses, now))

    def skip(self) -> None:
        """Do not count the time since the last step for the speed."""
        if self.speed_from is not None:
            start, tokens = self.speed_from
            self.speed_from = (start + time.perf_counter() - self.seen, tokens)

    def end(self) -> None:
        """Leave the line standing."""
        if self.redraws:
            print(file=self.stream, flush=True)

    def _crosses(self, done: int) -> bool:
        return done * LINES // self.total != (done - 1) * LINES // self.total

    def _line(self, done: int, losses: Sequence[float], now: float) -> str:
        since, before = self.speed_from or (self.started, 0)
        speed = (self.tokens - before) / (now - since) if now > since else self.tokens / max(now - self.started, 1e-9)
        left = (now - self.started) * (self.total - done) / done
        return (
            f"step {done:{len(str(self.total))}}/{self.total}  loss {losses[-1]:.3f}  "
            f"{speed:,.0f} tokens/s  {_clock(now - self.started)} gone, {_clock(left)} to go"
        )

    def _draw(self, line: str) -> None:
        if not self.redraws:
            print(line, file=self.stream, flush=True)
            return
        width = shutil.get_terminal_size().columns - 1
        room = min(30, width - len(line) - 3)
        if room >= 10:
            full = round(room * int(line.split()[1].split("/")[0]) / self.total)
            line = f"[{'=' * full}{' ' * (room - full)}] {line}"
        print(f"\r{line[:width]:<{width}}", end="", file=self.stream, flush=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def side_by_side(one: Sequence[float], mesh: Sequence[float], allowed: float) -> tuple[bool, str]:
    """Whether both runs agree, and their losses step by step."""
    differences = [abs(a - b) for a, b in zip(one, mesh)]
    agrees = all(difference < allowed for difference in differences)  # False for NaN too
    rows = [f"  {step:4}  {a:.8f}   {b:.8f}    {abs(a - b):.1e}" for step, (a, b) in enumerate(zip(one, mesh), 1)]
    verdict = f"  largest difference {max(differences):.1e}: {'below' if agrees else 'NOT below'} {allowed:.0e}"
    return agrees, "\n".join(["  step  one device  on the mesh  difference", *rows, verdict])


def ending(result: dict[str, Any], sample: bytes, seconds: float) -> list[str]:
    """The outcome, against the bigram model's, and the sample."""
    score, bigram = result["held_out"][-1][1], result["bigram"]
    text = sample.decode("utf-8", errors="replace").strip("\n")
    apart = f"{abs(bigram - score):.3f} {'below' if score < bigram else 'ABOVE'} the bigram model's {bigram:.3f}"
    return [
        f"held-out  {score:.3f} nats a byte, {apart}",
        "sample",
        *(f"    | {line}".rstrip() for line in text.rstrip().split("\n")),
        f"took      {_clock(seconds)}",
    ]


def plotting() -> Any:
    """Matplotlib's pyplot, drawing to files.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ImportError("--save-plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_plot(path: str, losses: Sequence[float], held_out: Sequence[tuple[int, float]], bigram: float) -> None:
    """Draw the losses of all steps, those on held-out text, and the bigram model's."""
    plt = plotting()
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="0.7", linewidth=1, label="each step")
    axes.plot(*zip(*held_out), marker="o", color="C0", label="held-out text")
    axes.axhline(bigram, color="C3", linestyle="--", label=f"bigram model, {bigram:.2f}")
    axes.set(xlabel="step", ylabel="loss, nats a byte", title="A transformer learns bytes")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
