"""The main job over time: saved, resumed elsewhere, stopped, measured, configured."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from vescale_fn.recipes import metrics, options, report, stopping, train

TEXT = Path(__file__).parents[1] / "README.md"
TINY = f"--batch 4 --context 8 --dim 16 --heads 2 --layers 1 --sample 4 --data {TEXT} --simulate".split()


def losses(*argv):
    return train.on_ranks(options.parse([*TINY, *argv], train.__doc__, train.CHECKED))["losses"]


def test_a_run_that_is_resumed_on_another_mesh_goes_on_as_if_nothing_had_been(tmp_path, capsys):
    whole = losses("--steps", "6", "--mesh", "dp=1,tp=1")
    checkpoints = ["--checkpoints", str(tmp_path), "--save-every", "2", "--keep", "2"]
    first = losses("--steps", "6", "--parallel", "fsdp", "--mesh", "dp=2", *checkpoints)
    for step in (6, 4):  # as if it had been killed after step 4
        assert (tmp_path / f"step-{step}").is_dir()
    (tmp_path / "step-6").rename(tmp_path / "gone")
    second = losses("--steps", "6", "--parallel", "zero1+tp", "--mesh", "dp=2,tp=2", *checkpoints, "--resume")
    assert first == pytest.approx(whole, abs=1e-5)
    assert second == pytest.approx(whole[4:], abs=1e-5)
    assert f"resumed   after step 4, from {tmp_path}" in capsys.readouterr().out
    assert losses("--steps", "6", "--mesh", "dp=1,tp=1", *checkpoints, "--resume") == []  # all is done


@pytest.mark.parametrize(
    ("model", "parallel", "mesh"), [("gpt", "dp+tp+sp+vp", "dp=2,tp=2"), ("mixtral", "fsdp+ep", "dp=2,ep=2")]
)
def test_models_and_parallelisms_by_name(model, parallel, mesh, capsys):
    assert train.main([*TINY, "--steps", "3", "--model", model, "--parallel", parallel, "--mesh", mesh, "--check"]) == 0
    out = capsys.readouterr().out
    assert f"{parallel} on mesh ({mesh.replace(',', ', ')})" in out
    assert f"model     {model}, " in out


def test_numbers_of_each_step(tmp_path):
    path, board = tmp_path / "run" / "numbers.jsonl", tmp_path / "board"
    extra = ["--steps", "4", "--evaluate-every", "2", "--mesh", "dp=1,tp=1", "--metrics", str(path)]
    pytest.importorskip("tensorboard", reason="an extra")
    found = losses(*extra, "--tensorboard", str(board))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["loss"] for row in steps] == found
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "held_out" in row] == [2, 4]
    for row in steps:
        assert row["tokens_per_second"] == pytest.approx(32 / row["seconds"])
        assert 0 < row["mfu"] < 1
        assert row["memory"] > 1e7
    assert list(board.iterdir())


def test_a_resumed_run_leaves_out_what_was_written_of_later_steps(tmp_path):
    path = tmp_path / "numbers.jsonl"
    path.write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n{"step": 3, "lo')
    with metrics.Metrics(path, done=1) as log:
        log.write(2, loss=2.5)
    assert path.read_text() == '{"step": 1, "loss": 3}\n{"step": 2, "loss": 2.5}\n'


def test_work_is_counted_on_shapes():
    w, x = torch.ones(4, 5), torch.ones(2, 4)
    assert metrics.flops(lambda w, x: (x @ w).sum(), w, x) == 2 * 2 * (
        2 * 4 * 5
    )  # the product, and one for its gradient
    assert metrics.peak("cpu") > 1e8


def test_a_trace_of_some_steps(tmp_path):
    losses("--steps", "7", "--mesh", "dp=1,tp=1", "--profile", str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    first, last = options.TRACED
    assert sorted({e["name"] for e in events if re.fullmatch(r"step \d", e["name"])}) == [
        f"step {i}" for i in range(first + 1, last + 1)
    ]


def test_a_file_of_options(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('steps = 7\nmodel = "gpt"\nsimulate = true\ncheck = false\nevaluate_every = 3\n')
    parse = lambda *argv: options.parse(["--config", str(file), "--data", str(TEXT), *argv], train.__doc__, 5)
    opt = parse("--steps", "9")
    assert (opt.steps, opt.model, opt.simulate, opt.check, opt.evaluate_every) == (9, "gpt", True, False, 3)
    for text, message in [
        ("stepz = 7", f"--config {file}: stepz is no option; write one of batch, check, "),
        ("simulate = 1", f"--config {file}: simulate = 1 should be true or false"),
        ("steps = true", f"--config {file}: steps = true should be a value"),
        ('steps = "many"', "argument --steps: invalid int value: 'many'"),
        ("steps 7", f"--config {file}: Expected '=' after a key"),
    ]:
        file.write_text(text)
        with pytest.raises(SystemExit):
            parse()
        assert message in capsys.readouterr().err


def test_a_run_that_is_told_to_end_saves_and_says_so(tmp_path):
    argv = [*TINY[:-1], "--steps", "100000", "--mesh", "dp=2", "--parallel", "dp", "--device", "cpu"]
    run = [sys.executable, "-m", "vescale_fn.recipes.train", *argv, "--checkpoints", str(tmp_path)]
    with subprocess.Popen([*run, "--evaluate-every", "100000", "--metrics", str(tmp_path / "numbers")], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:  # fmt: skip
        late = time.monotonic() + 120
        while not ((tmp_path / "numbers").exists() and (tmp_path / "numbers").read_text().count("\n") > 2):
            assert time.monotonic() < late
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    said = re.search(rf"stopped   by SIGTERM after step (\d+), saved in {tmp_path}: --resume", out)
    assert said, out
    assert (tmp_path / f"step-{said[1]}").is_dir()


def test_a_second_signal_ends_at_once():
    before = signal.getsignal(signal.SIGTERM)
    with stopping.Stopping() as stop:
        assert not stop.now("cpu")
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.now("cpu")
        assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGTERM) is before


def test_stopping_elsewhere_than_in_the_main_thread_asks_for_nothing():
    found = []

    def run():
        with stopping.Stopping() as stop:
            found.append(stop.now("cpu"))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False]


def test_a_run_that_had_nothing_left_to_do_has_no_outcome():
    assert math.isnan(float(report.ending([], 2.0, b"x", 1.0)[0].split()[1]))
