"""Runs under `vfn.elastic` while processes are killed, stopped and resized, and machines lose their memory: the digest stays.

No clock is read. A run trains a small model, with dropout and AdamW, on 8 ranks played by 1 to 8 processes, each on a
"machine" of its own, or on two, or on one: what a machine keeps in memory is a folder. Somebody else follows the steps that
the processes report, and at random ones, a random moment later, does one of `EVENTS`. The digest of each run must be that of
one process that nobody disturbs. ``python -m benchmarks.chaos --runs 100`` runs all of it, an hour or two on two cores;
``--seed`` repeats one run, and says what happened in it. tests/test_elastic.py runs a few short ones.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import random
import select
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import vescale_fn as vfn
from benchmarks.side_by_side import publish
from vescale_fn import P
from vescale_fn._core.distributed.spares import most_usable

RANKS, STEPS, SAVE_EVERY, TIMEOUT = 8, 200, 25, 10.0
KEY = vfn.random.key(0)
SPECS = {"up": P("dp", "tp"), "down": P("tp")}
OPTIMIZER = vfn.optim.adamw(1e-2)
EVENTS = {
    "kill": "some are killed, and their machines stay",
    "machine": "one is killed, and its machine's memory is lost",
    "machines": "several machines are lost at once",
    "all": "all machines are lost, and the checkpoint is left",
    "again": "one is killed, and a moment later, while the others recover, another one",
    "damage": "one is killed, and a copy on its machine has another bit",
    "stop": "one is stopped, and never goes on",
    "resize": "there are to be another number of processes",
}
RECORD = struct.Struct("<iiii")  # process, rank, how many there are, step; -1: it begins


# --- the program ------------------------------------------------------------------------------------------------------


def initial(key: Any) -> Any:
    keys = vfn.random.split(key)
    return {"up": vfn.random.normal(keys[0], (16, 32)) / 8, "down": vfn.random.normal(keys[1], (32, 16)) / 16}


def begin() -> Any:
    params = vfn.init(initial, KEY, spec=SPECS, mesh=vfn.make_mesh((4, 2), ("dp", "tp"), device="cpu"))
    return {"params": params, "opt": OPTIMIZER.init(params), "steps": 0}


def batch_of(i: int) -> Any:
    keys = vfn.random.split(vfn.random.fold_in(KEY, i))
    return vfn.random.normal(keys[0], (16, 16), spec=P("dp"), mesh=vfn.current_mesh()), keys[1]


def loss(params: Any, x: torch.Tensor, key: Any) -> torch.Tensor:
    hidden = vfn.random.dropout(key, torch.relu(x @ vfn.with_sharding(params["up"], P(None, "tp"))), 0.1)
    return (hidden @ params["down"] - x).square().mean()


def update(params: Any, state: Any, batch: Any) -> Any:
    value, grads = vfn.value_and_grad(loss)(params, *batch)
    updates, state = OPTIMIZER.update(grads, state, params)
    return vfn.optim.apply_updates(params, updates), state, value


def train(steps: int, jit: bool, folder: Path | None = None, machines: int = 0, reports: int = -1) -> str | None:
    """The digest of a run of so many steps; None of a spare."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    one = vfn.jit(update, donate_argnums=(0, 1)) if jit else update
    manager = vfn.checkpoint.Manager(folder / "saved", keep=2, background=machines == 2) if folder else None

    def tell(step: int, _: Any = None) -> None:
        if reports >= 0:
            os.write(reports, RECORD.pack(os.getpid(), rank, size, step))

    def step(state: Any, batch: Any) -> Any:
        params, opt, value = one(state["params"], state["opt"], batch)
        return {"params": params, "opt": opt, "steps": state["steps"] + 1}, value

    tell(-1)
    done = vfn.elastic(
        step,
        begin,
        batch_of,
        steps=steps,
        virtual=RANKS,
        manager=manager,
        save_every=SAVE_EVERY if manager else None,
        on_step=tell,
        memory=place(folder, machines, rank, size) if folder else None,
    )
    return None if done is None else vfn.digest(done)


def place(folder: Path, machines: int, rank: int, size: int) -> Path:
    """The memory of a process's machine: there is one for all, there are two, or as many as processes."""
    return folder / f"machine-{(0, rank * 2 // most_usable(RANKS, size), rank)[machines]}"


def places(folder: Path, machines: int, size: int) -> set[Path]:
    """The memory in which so many processes keep copies, of which some may be spares."""
    return {place(folder, machines, rank, size) for rank in range(most_usable(RANKS, size))}


# --- the chaos --------------------------------------------------------------------------------------------------------


class Disturber:
    """Follows a run, and disturbs it."""

    def __init__(self, seed: int, steps: int, events: Sequence[str], folder: Path, machines: int, reports: int) -> None:
        self.random, self.folder, self.machines, self.reports = random.Random(seed), folder, machines, reports
        self.todo = sorted((self.random.randrange(1, steps), event) for event in events)
        self.alive: dict[int, tuple[int, int]] = {}  # of those that were started last: their rank, and how many
        self.done, self.saved, self.most_lost = 0, 0, 0
        self.said: list[str] = []
        self.places: set[Path] = set()  # where the processes of now keep copies
        self.gone: set[Path] = set()  # memory lost since the run went on
        self.resumed, self.counts = True, Counter[str]()

    def follow(self, resize: Any) -> None:
        """Until nobody is left who could report."""
        while record := self.heard():
            pid, rank, size, step = record
            if step == -1:
                self.alive = {each: at for each, at in self.alive.items() if at[1] == size and at[0] != rank}
                self.alive[pid] = rank, size
                self.resumed = False
                continue
            if not self.resumed and self.said:
                self.check(step - 1, size)
                self.done = step - 1
            self.resumed, self.done = True, max(self.done, step)
            if step % SAVE_EVERY == 0 and self.machines != 2:
                self.saved = max(self.saved, step)
            if self.todo and self.done >= self.todo[0][0]:
                _, event = self.todo.pop(0)
                time.sleep(self.random.uniform(0, 0.04))  # anywhere in the steps that follow
                self.disturb(event, resize)

    def heard(self) -> tuple[int, ...] | None:
        data = os.read(self.reports, RECORD.size)
        return RECORD.unpack(data) if len(data) == RECORD.size else None

    def check(self, at: int, size: int) -> None:
        """What is lost of what was done is a step at most where a neighbour's copy is left; else what was not yet saved."""
        lost = max(0, self.done - at)  # a step may be complete before it is reported
        there = places(self.folder, self.machines, size)
        memory_is_left = len(self.places & self.gone | self.places - there) <= (len(self.places) > 1)
        self.places = there
        self.said.append(f"goes on after step {at} of {self.done}, {size} processes")
        assert at >= self.saved, f"step {self.saved} was saved, but the run goes on after step {at}"
        assert lost <= 1 or not memory_is_left, f"{lost} steps were lost, though a copy of each share was left"
        self.counts["from copies" if memory_is_left else "from what is left"] += 1
        self.counts["steps taken again"] += lost
        self.most_lost = max(self.most_lost, lost if memory_is_left else 0)
        self.gone = set()

    def disturb(self, event: str, resize: Any) -> None:
        self.said.append(f"{event} at step {self.done}")
        self.counts[event] += 1
        pids = sorted(self.alive, key=lambda pid: self.alive[pid])
        if event == "resize":
            resize.send(self.random.randint(1, RANKS))
            return
        count = {"kill": self.random.randint(1, len(pids)), "all": len(pids)}.get(event, 1)
        if event == "machines":
            count = self.random.randint(1, len(pids))
        victims = self.random.sample(pids, count)
        for pid in victims:  # first of all nobody goes on
            self.signal(pid, signal.SIGSTOP)
        if event in ("machine", "machines", "all", "damage"):
            for pid in victims:
                self.lose(place(self.folder, self.machines, *self.alive[pid]), event == "damage")
        for pid in victims:
            self.signal(pid, signal.SIGKILL if event != "stop" else signal.SIGSTOP)
        if event == "again":
            time.sleep(self.random.uniform(0, 1.5))
            while select.select([self.reports], [], [], 0)[0] and (record := self.heard()):
                if record[3] == -1:
                    self.alive[record[0]] = record[1], record[2]
            self.signal(self.random.choice(sorted(self.alive)), signal.SIGKILL)
            self.resumed = False

    def lose(self, memory: Path, damage: bool) -> None:
        self.gone.add(memory)
        if not damage:
            with contextlib.suppress(OSError):
                memory.rename(memory.with_name(f"gone-{self.random.getrandbits(64):x}"))
            return
        copies = sorted(path for path in memory.glob("*/*.*-of-*.*"))
        if copies:
            with open(self.random.choice(copies), "r+b") as file:
                at = self.random.randrange(os.fstat(file.fileno()).st_size)
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))

    @staticmethod
    def signal(pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Outcome(NamedTuple):
    """What came of a run."""

    digests: list[str]
    events: int
    counts: Counter[str]
    most_lost: int
    said: list[str]


def run(seed: int, steps: int = STEPS, events: int | None = None, kinds: Sequence[str] = tuple(EVENTS)) -> Outcome:
    """A run that is disturbed, as this seed says."""
    choice = random.Random(seed)
    machines = choice.choice([0, 1, 2, 2])
    weights = [0.3 if kind == "stop" else 1.0 for kind in kinds]
    chosen = choice.choices(kinds, weights, k=choice.randint(5, 10) if events is None else events)
    count, jit = choice.randint(1, RANKS), choice.random() < 0.5
    asked, asking = multiprocessing.Pipe(False)
    reports, reporting = os.pipe()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        folder = Path(name)
        disturber = Disturber(seed, steps, chosen, folder, machines, reports)
        disturber.places = places(folder, machines, count)
        answer, answering = multiprocessing.Pipe(False)

        def disturb() -> None:
            os.close(reporting)
            try:
                disturber.follow(asking)
                answering.send((disturber.counts, disturber.most_lost, disturber.said))
            except BaseException as error:
                answering.send((error, 0, disturber.said))

        process = multiprocessing.get_context("fork").Process(target=disturb)
        process.start()
        try:
            arguments = steps, jit, folder, machines, reporting
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
                found = vfn.launch(
                    train, count, *arguments, device="cpu", restarts=10**6, resize=asked, timeout=TIMEOUT, limit=900.0
                )
        finally:
            os.close(reporting)
            counts, most_lost, said = answer.recv() if answer.poll(30) else (TimeoutError("the disturber"), 0, [])
            process.join(5)
            process.kill()
            for end in asked, asking, answer, answering:
                end.close()
            os.close(reports)
    setting = f"{count} processes, machines: {('one', 'two', 'as many')[machines]}, {'jit' if jit else 'eager'}"
    said = [setting, *said]
    if isinstance(counts, BaseException):
        raise AssertionError("\n".join(map(str, [f"seed {seed}", *said]))) from counts
    return Outcome([each for each in found if each], len(chosen), counts, most_lost, said)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this run alone")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--publish", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.runs)
    undisturbed = {train(options.steps, jit) for jit in (False, True)}
    equal, total, most_lost, events = 0, Counter[str](), 0, 0
    for seed in seeds:
        begun = time.monotonic()
        try:
            outcome = run(seed, options.steps)
        except (AssertionError, vfn.errors.VfnError) as error:
            print(f"seed {seed}: {error}", file=sys.stderr, flush=True)
            continue
        good = {*outcome.digests} == undisturbed
        equal, events, total = equal + good, events + outcome.events, total + outcome.counts
        most_lost = max(most_lost, outcome.most_lost)
        told = dict(outcome.counts) if options.seed is None else "\n  " + "\n  ".join(outcome.said)
        print(f"seed {seed}: {'equal' if good else 'OTHER BITS'}, {time.monotonic() - begun:.0f} s, {told}", flush=True)
    rows = [
        ["runs with the digest of the undisturbed one", f"{equal} of {len(seeds)}"],
        *([f"{name}: {what}", total[name]] for name, what in EVENTS.items()),
        ["went on from copies in memory", total["from copies"]],
        ["went on from what was left, a checkpoint at least", total["from what is left"]],
        ["steps taken again, in all", total["steps taken again"]],
        ["completed steps taken again where a copy of each share was left, at most", most_lost],
    ]
    if options.publish:
        publish("chaos", ["", "count"], rows, seeds=[seeds[0], seeds[-1]], steps=options.steps)
    else:
        for what, count in rows:
            print(f"{count!s:>10}  {what}")
    if equal < len(seeds) or math.isnan(most_lost):
        raise SystemExit("not all runs are equal")


if __name__ == "__main__":
    main()
