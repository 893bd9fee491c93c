"""What a training program shows and writes down: a progress line, a journal, losses side by side, a plot."""

from __future__ import annotations

import io
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from . import metrics

LINES = 10  # where the progress line cannot be drawn over, it is printed this often


class Progress:
    """A line that says how far, how well and how fast: redrawn in a terminal, printed now and then elsewhere."""

    def __init__(self, total: int, stream: TextIO | None = None, begun: int = 0) -> None:
        """Start the clock for `total` steps, `begun` of which were done before."""
        self.total, self.begun, self.stream = total, begun, stream or sys.stdout
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
        left = (now - self.started) * (self.total - done) / (done - self.begun)
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


class Journal:
    """What is known of a run on one rank: all losses, and, where this rank talks, a progress line and files.

    Args:
        opt: the options of the run: `steps`, `batch`, `context`, `device`, `metrics`, `tensorboard`.
        begun: how many steps were done before.
        work: of this rank in a step: multiplications and additions.
        talks: whether this rank shows and writes.
    """

    def __init__(self, opt: Any, begun: int, work: float, talks: bool) -> None:
        self.losses: list[float] = []
        self.evaluated: list[tuple[int, float]] = []
        self.progress = Progress(opt.steps, None if talks else io.StringIO(), begun)
        self._opt, self._tokens = opt, opt.batch * opt.context
        self._write = talks and (opt.metrics or opt.tensorboard)
        self._used = work / metrics.peak(opt.device) if self._write else 0.0
        self._metrics = metrics.Metrics(opt.metrics, opt.tensorboard, begun) if self._write else metrics.Metrics()
        self._clock = time.perf_counter()

    def ready(self) -> None:
        """The next step begins now: what came between does not count for its speed."""
        self.progress.skip()
        self._clock = time.perf_counter()

    def step(self, done: int, loss: float) -> None:
        """A step is done, with this loss."""
        seconds = time.perf_counter() - self._clock
        self.losses.append(loss)
        self.progress.step(done, self.losses, self._tokens)
        if self._write:
            self._metrics.write(
                done,
                loss=loss,
                seconds=seconds,
                tokens_per_second=self._tokens / seconds,
                mfu=self._used / seconds,
                memory=metrics.memory(self._opt.device),
            )

    def held_out(self, done: int, loss: float) -> None:
        """The loss on held-out text after a step."""
        self.evaluated.append((done, loss))
        self._metrics.write(done, held_out=loss)

    def __enter__(self) -> Journal:
        self.ready()
        return self

    def __exit__(self, *_: Any) -> None:
        self._metrics.__exit__()
        self.progress.end()


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def side_by_side(one: Sequence[float], mesh: Sequence[float], allowed: float) -> tuple[bool, str]:
    """Whether both runs agree, and their losses step by step."""
    differences = [abs(a - b) for a, b in zip(one, mesh)]
    agrees = all(difference < allowed for difference in differences)  # False for NaN too
    rows = [f"  {step:4}  {a:.8f}   {b:.8f}    {abs(a - b):.1e}" for step, (a, b) in enumerate(zip(one, mesh), 1)]
    verdict = f"  largest difference {max(differences):.1e}: {'below' if agrees else 'NOT below'} {allowed:.0e}"
    return agrees, "\n".join(["  step  one device  on the mesh  difference", *rows, verdict])


def ending(evaluated: Sequence[tuple[int, float]], bigram: float, sample: bytes | None, seconds: float) -> list[str]:
    """The outcome, against the bigram model's, and the sample, if there is one."""
    score = evaluated[-1][1]
    text = (sample or b"").decode("utf-8", errors="replace").strip("\n").rstrip()
    apart = f"{abs(bigram - score):.3f} {'below' if score < bigram else 'ABOVE'} the bigram model's {bigram:.3f}"
    return [
        f"held-out  {score:.3f} nats a byte, {apart}",
        *(["sample", *(f"    | {line}".rstrip() for line in text.split("\n"))] if sample else []),
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
