"""The main job over time: by other models, optimisers and dtypes; saved, resumed elsewhere, killed, measured, configured."""

import json
import math
import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import optree
import pytest
import torch
import torch.distributed as dist
import whole
from torch._subclasses.fake_tensor import FakeTensor

import vescale_fn as vfn
from vescale_fn.errors import CheckpointError, RankError
from vescale_fn.recipes import choosing, command_line, data, llama, metrics, optimizers, options, stopping, train

TEXT = Path(__file__).parents[1] / "README.md"
TINY = f"--batch 4 --context 8 --dim 16 --heads 2 --layers 1 --sample 4 --data {TEXT} --simulate".split()


def ran(*argv, text=TINY):
    return train.on_ranks(options.parse([*text, *argv]))


def losses(*argv):
    return ran(*argv)["losses"]


# --- what trains, and how ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "parallel", "mesh", "more"),
    [
        ("gpt", "pp+tp+sp+vp", "pp=2,tp=2", "--precision fp16"),
        ("mixtral", "ep", "ep=2", ""),
        ("llama", "zero2", "dp=2", "--optimizer muon --precision bf16 --accumulate 2"),
    ],
    ids=["gpt", "mixtral", "llama"],
)
def test_by_name(model, parallel, mesh, more, capsys):
    argv = ["--steps", "3", "--model", model, "--parallel", parallel, "--mesh", mesh, *more.split()]
    assert train.main([*TINY, *argv, "--check"]) == 0
    out = capsys.readouterr().out
    assert f"{parallel} on mesh ({mesh.replace(',', ', ')})" in out
    assert f"model     {model}, " in out
    if "fp16" in more:
        assert "numbers   params=f32,compute=f16,reduce=f32,output=f32\n" in out
    if "bf16" in more:
        assert "numbers   params=f32,compute=bf16,reduce=f32,output=f32\n" in out
        assert "steps     3 of muon, each of 4 windows of 8 bytes, in 2 parts\n" in out
        differences = [float(x) for x in re.findall(r"^ +\d+  \S+   \S+    (\S+)$", out, re.MULTILINE)]
        assert len(differences) == 3
        assert max(differences) > 1e-6  # it is bf16


def test_parts_of_a_batch_make_the_same_run():
    argv = ["--steps", "2", "--mesh", "dp=1,tp=1", "--dropout", "0"]
    assert losses(*argv, "--accumulate", "4") == pytest.approx(losses(*argv), abs=1e-5)


def test_parts_of_a_batch_make_the_same_step():
    x, params, key = torch.arange(24.0).view(6, 4).double(), {"w": torch.ones(4).double()}, vfn.random.key(0)
    loss = lambda params, batch, key: (batch @ params["w"]).sin().mean()
    sgd = vfn.optim.sgd(0.1)  # whose step is as large as the gradient
    whole, _, value = train.make_step(loss, sgd)[1](params, sgd.init(params), x, key)
    add, step = train.make_step(loss, sgd, parts=3)
    earlier = add(params, x[2:4], key, add(params, x[:2], key))
    got, _, mean = step(params, sgd.init(params), x[4:], key, earlier)
    torch.testing.assert_close((got, mean), (whole, value), rtol=1e-12, atol=0)


def test_a_scaled_loss_makes_the_same_step_and_is_not_what_is_told():
    x, params, key = torch.arange(24.0).view(6, 4).double(), {"w": torch.ones(4).double()}, vfn.random.key(0)
    loss = lambda params, batch, key: (batch @ params["w"]).sin().mean()
    sgd = vfn.optim.sgd(0.1)
    scaled = vfn.precision.loss_scaled(sgd)
    want, _, value = train.make_step(loss, sgd)[1](params, sgd.init(params), x, key)
    for parts in 1, 2:
        add, step = train.make_step(train.scaled(loss), scaled, parts=parts)
        *earlier, last = x.chunk(parts)
        state = scaled.init(params)
        total = add(params, earlier[0], key, None, train.scale_of(state)) if earlier else None
        got, state, told = step(params, state, last, key, total)
        torch.testing.assert_close((got, told), (want, value), rtol=1e-12, atol=0)
        assert state.good == 1


RATE, STEPS = 0.02, 10  # of which the first five warm up


def of_torch(name, params):
    """The same by torch: for each optimiser what it has of the parameters."""
    matrices, others = [p for p in params if p.ndim > 1], [p for p in params if p.ndim == 1]
    adamw = lambda some: torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1 * (p.ndim > 1)} for p in some], betas=(0.9, 0.99)
    )
    if name == "adamw":
        return [adamw(params)]
    if name == "muon":
        hidden = torch.optim.Muon(matrices[:1], momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        return [hidden, adamw(matrices[1:] + others)]
    if name == "adafactor":
        return [torch.optim.Adafactor(params)]
    return [torch.optim.SGD(params, momentum=0.9, nesterov=True)]


def lion(params, grads):
    """Chen et al., arXiv 2302.06675, algorithm 2."""
    means = [torch.zeros_like(p) for p in params]
    for i, each in enumerate(grads):
        for p, g, m in zip(params, each, means):
            p -= RATE * (i + 1) / 5 * (torch.sign(0.9 * m + 0.1 * g) + 1.0 * (p.ndim > 1) * p)
            m.lerp_(g, 1 - 0.99)
    return params


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_optimizers_are_those_of_torch(name):
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)
    first = {"blocks": [{"w": draw(4, 6), "norm": draw(4)}], "embed": draw(5, 4)}
    leaves, structure = optree.tree_flatten(first, none_is_leaf=False)
    order = sorted(range(3), key=lambda i: leaves[i].shape != (4, 6))  # the matrix of a block first
    grads = [[draw(*p.shape) / (20 if i == 1 else 1) for p in leaves] for i in range(3)]
    optimizer = optimizers.make(name, RATE, STEPS)
    params, state = first, optimizer.init(first)
    for each in grads:
        updates, state = optimizer.update(optree.tree_unflatten(structure, each), state, params)
        params = vfn.optim.apply_updates(params, updates)
    norms = [torch.cat([g.flatten() for g in each]).norm().item() for each in grads]
    assert [norm > 1 for norm in norms] == [True, False, True]
    clipped = [[g / max(1.0, norm) for g in each] for each, norm in zip(grads, norms)]
    expected = [p.clone() for p in leaves]
    if name == "lion":
        lion(expected, clipped)
    else:
        parts = of_torch(name, [expected[i] for i in order])
        for i, each in enumerate(clipped):
            for p, g in zip(expected, each):
                p.grad = g
            for part in parts:
                for group in part.param_groups:
                    group["lr"] = RATE * (i + 1) / 5
                part.step()
    tolerance = RATE * (2e-2 if name == "muon" else 1e-6)  # its iterations are in bfloat16, and rates in float32
    for got, want in zip(optree.tree_leaves(params), expected):
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


# --- interrupted ------------------------------------------------------------------------------------------------------


def test_a_run_that_is_resumed_on_another_mesh_goes_on_as_if_nothing_had_been(tmp_path, capsys, monkeypatch):
    init, made = llama.init, []
    sizes = ["--steps", "6", "--layers", "3", "--dropout", "0"]
    whole = losses(*sizes, "--mesh", "dp=1,tp=1")
    checkpoints = [*sizes, "--checkpoints", str(tmp_path), "--save-every", "2", "--keep", "2"]
    monkeypatch.setattr(llama, "init", lambda *args: made.append(init(*args)) or made[-1])
    first = losses(
        *"--parallel pp+fsdp --mesh pp=2,dp=2 --microbatches 2 --schedule interleaved --chunks 2".split(), *checkpoints
    )
    assert all(isinstance(leaf, FakeTensor) for leaf in optree.tree_leaves(made))  # no rank has made whole parameters
    assert made
    for step in (6, 4):  # as if it had been killed after step 4
        assert (tmp_path / f"step-{step}").is_dir()
    (tmp_path / "step-6").rename(tmp_path / "gone")
    second = ran(*"--parallel pp --mesh pp=3 --microbatches 4 --schedule auto".split(), *checkpoints, "--resume")
    assert first == pytest.approx(whole, abs=1e-5)
    assert second["losses"] == pytest.approx(whole[4:], abs=1e-5)
    assert f"resumed   after step 4, from {tmp_path}" in capsys.readouterr().out

    for asked in ["--resume"], ["--evaluate", "--optimizer", "lion"]:  # all is done; nothing is to be done
        third = ran("--mesh", "dp=1,tp=1", *checkpoints, *asked)
        assert third["losses"] == []
        assert third["held_out"] == [(6, pytest.approx(second["held_out"][-1][1], abs=1e-5))]
    out = capsys.readouterr().out
    assert f"loaded    after step 6, from {tmp_path}\nheld-out  " in out
    assert out.count("steps     6 of adamw") == 1
    for other, said in [
        ("--evaluate --dim 32 --layers 2", f"--evaluate: {tmp_path} has checkpoints of a run with --dim 16 --layers 3"),
        ("--resume --optimizer lion", f"--resume: {tmp_path} has checkpoints of a run with --optimizer adamw"),
        ("", f"--checkpoints {tmp_path} has those of a run that has come to step 6: --resume, or another folder"),
    ]:
        with pytest.raises(SystemExit):
            ran(*checkpoints, *other.split())
        assert capsys.readouterr().err.endswith(f"error: {said}\n")


# where a product is slow and a message is nothing: the search splits what rows do not
SLOW = replace(vfn.hardware.cpu(2), flops={"float32": 1e6}, bytes=1e6, launch=1e-9)


def chosen_on_this_rank(opt):
    """A run in a layout that is chosen among what the search finds and a row; and that layout."""
    found, settled = [], choosing.settled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "TEXTS", ("dp",))
        patch.setattr(choosing, "CANDIDATES", 1)
        patch.setattr(choosing, "settled", lambda *given: found.append(settled(*given)) or found[-1])
        losses = train.run(opt)["losses"]
    return losses, found[0].parallel, found[0].mesh, repr(found[0].layout.specs(None, None, None).params)


def test_a_chosen_layout_trains_as_one_device_and_is_resumed_elsewhere(gloo, tmp_path, capsys):
    (tmp_path / "slow.json").write_text(SLOW.to_json())
    sizes = [*TINY[:-1], "--dropout", "0.1", "--accumulate", "2"]
    saved = ["--checkpoints", str(tmp_path / "run")]
    auto = "--parallel auto --mesh 2 --steps 2 --memory 1GiB --hardware".split()
    ranks = gloo(2, chosen_on_this_rank, options.parse([*sizes, *auto, str(tmp_path / "slow.json"), *saved]))
    assert ranks[0] == ranks[1]
    first, parallel, mesh, specs = ranks[0]
    assert (parallel, math.prod(mesh.values())) == ("auto", 2)
    assert any(f"'{axis}'" in specs for axis in mesh)
    again = "--steps 3 --dropout 0.1 --accumulate 2".split()
    whole = losses(*again, "--mesh", "dp=1,tp=1")
    assert first == pytest.approx(whole[:2], abs=1e-5)
    assert losses(*again, "--mesh", "dp=2", "--parallel", "zero1", *saved, "--resume") == [
        pytest.approx(whole[2], abs=1e-5)
    ]
    capsys.readouterr()
    (tmp_path / "run" / "step-3").rename(tmp_path / "gone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "TEXTS", ("dp",))
        patch.setattr(choosing, "CANDIDATES", 0)  # a row: the job runs as if that had been asked for
        last = losses(*again, *auto[:2], "--mesh", "dp=2", *saved, "--resume")
    assert last == [pytest.approx(whole[2], abs=1e-5)]
    out = capsys.readouterr().out
    assert "chosen    step on mesh (dp=2), 2 processes on CPUs: dp on dp=2, as given\n" in out
    assert "where     auto (dp) on mesh (dp=2)" in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--memory 1GiB", "--memory is about --parallel auto"),
        ("--mesh 4", "--mesh 4 names no axes: dp=4, or --parallel auto"),
        (
            "--parallel auto --deterministic 2 --elastic 1 --hardware measured",
            "--elastic begins again with the same bits, and so in the same layout: not with --hardware measured",
        ),
        ("--parallel auto --memory much", "--parallel auto: memory='much' is no amount of memory"),
        (
            "--parallel auto --hardware h10",
            "--hardware h10: write measured, cpu, b200, h100, a100, or a JSON file; did you mean 'h100'?",
        ),
        (
            "--parallel auto",
            "--parallel auto: the solver HiGHS is not installed\n  Instead: pip install 'vescale_fn[auto]'",
        ),
    ],
)
def test_what_a_layout_cannot_be_chosen_for(argv, said, monkeypatch, capsys):
    if argv == "--parallel auto":
        monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(SystemExit):
        options.parse([*TINY, *argv.split()])
    assert f"error: {said}" in capsys.readouterr().err


def test_a_digest_at_the_end_and_an_exact_resume(tmp_path, capsys, monkeypatch):
    argv = [*"--mesh dp=2 --parallel zero1 --steps 2 --digest --checkpoints".split(), str(tmp_path)]
    found = ran(*argv)["digest"]
    assert f"\ndigest    {found}\n" in capsys.readouterr().out
    again = [*argv[:1], "tp=2", *argv[2:3], "tp", *argv[4:], "--resume", "--exact"]
    assert ran(*again)["digest"] == found  # nothing is left to do, and what lies otherwise is the same
    here = vfn.fingerprint()
    monkeypatch.setattr(sys.modules["vescale_fn.checkpoint.load"], "fingerprint", lambda: here | {"numpy": "0"})
    assert ran(*again[:-1])["done"] == 2
    with pytest.raises(CheckpointError, match=f"numpy: {here['numpy']}, and here 0"):
        ran(*again)
    with pytest.raises(SystemExit):
        options.parse([*argv, "--exact"])
    assert "--exact is about a run that goes on: it needs --resume" in capsys.readouterr().err


def test_a_run_whose_processes_are_lost_has_the_digest_of_one_that_nobody_disturbs(monkeypatch, tmp_path, capfd):
    """In a layout that is chosen, and chosen again after the loss."""
    texts, candidates = whole.some((("zero1",), 0), ((), 1))
    monkeypatch.setattr(choosing, "TEXTS", texts)
    monkeypatch.setattr(choosing, "CANDIDATES", candidates)
    (tmp_path / "slow.json").write_text(SLOW.to_json())
    argv = f"--mesh dp=2 --parallel auto --hardware {tmp_path / 'slow.json'} --deterministic 2".split()
    argv += "--steps 4 --evaluate-every 3 --dropout 0.1".split()
    alone = ran(*argv)
    out = capfd.readouterr().out
    assert (
        f"auto{'' if candidates else ' (zero1)'} on mesh (dp=2): one process, deterministic, simulated, on cpu\n" in out
    )
    assert f"\ndigest    {alone['digest']}\n" in out

    def kill():
        if dist.get_rank() == 1 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    at_batch(monkeypatch, 4, kill)
    again = ran(*argv, *"--device cpu --elastic 1 --checkpoints".split(), str(tmp_path / "run"), text=TINY[:-1])
    assert again["digest"] == alone["digest"]
    assert again["losses"] == alone["losses"][-len(again["losses"]) :]
    assert len(again["losses"]) < 3  # of 4 steps: a step is lost at most
    assert "\nresumed   after step " in capfd.readouterr().out
    on_one = ran(*argv, "--checkpoints", str(tmp_path / "run"), "--resume")  # a checkpoint like any other
    assert (on_one["losses"], on_one["digest"]) == ([], alone["digest"])
    choosing.as_before(tmp_path / "run", (noted := tmp_path / "run" / "chosen-layout").read_text())
    with pytest.raises(vfn.errors.VfnError, match="was begun in another layout"):
        choosing.as_before(tmp_path / "run", noted.read_text()[1:])


def at_batch(monkeypatch, number, do):
    """Let `do` happen in the middle of things, when batch `number` is drawn."""
    draw, left = data.random_batch, [number]

    def counted(*args):
        left[0] -= 1
        if left[0] == 0:
            do()
        return draw(*args)

    monkeypatch.setattr(data, "random_batch", counted)


def signalled(opt, number, rank, which):
    """A run on this rank; when batch `number` is drawn, one rank gets a signal."""
    with pytest.MonkeyPatch.context() as patch:
        at_batch(patch, number, lambda: dist.get_rank() == rank and os.kill(os.getpid(), which))
        return train.run(opt)["done"]


def test_a_run_that_is_told_to_end_and_then_killed_goes_on_with_half_the_ranks(tmp_path, gloo):
    alone = [*TINY[:-1], "--device", "cpu"]
    whole = losses("--steps", "9", "--mesh", "dp=1,tp=1")
    argv = [
        "--steps",
        "9",
        "--checkpoints",
        str(tmp_path / "run"),
        "--save-every",
        "2",
        "--evaluate-every",
        "9",
        "--metrics",
        str(tmp_path / "numbers"),
        "--parallel",
        "zero1",
        "--resume",
    ]
    on_two = lambda: options.parse([*alone, "--mesh", "dp=2", *argv])
    assert gloo(2, signalled, on_two(), 3, 0, signal.SIGTERM) == [3, 3]  # one was told, and both have stopped
    assert vfn.checkpoint.Manager(tmp_path / "run").latest() == 3
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        gloo(2, signalled, on_two(), 4, 1, signal.SIGKILL)
    last = vfn.checkpoint.Manager(tmp_path / "run").latest()
    assert last in (4, 6)  # what is written when it is killed does not count
    assert ran("--mesh", "dp=1", *argv, text=alone)["losses"] == pytest.approx(whole[last:], abs=1e-5)
    rows = map(json.loads, (tmp_path / "numbers").read_text().splitlines())
    found = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert [found[step] for step in range(1, 10)] == pytest.approx(whole, abs=1e-5)


def test_a_full_disk_is_told_of_and_the_last_checkpoint_stays(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    def fill():
        while not (tmp_path / "step-2").is_dir():  # which is written in the background
            time.sleep(0.01)
        monkeypatch.setattr(os, "fsync", full)

    at_batch(monkeypatch, 4, fill)
    with pytest.raises(CheckpointError, match="No space left on device"):
        losses("--steps", "4", "--mesh", "dp=1,tp=1", "--checkpoints", str(tmp_path), "--save-every", "2")
    monkeypatch.undo()
    manager = vfn.checkpoint.Manager(tmp_path)
    assert manager.steps() == [2]
    assert manager.restore()["done"] == 2


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(which):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it, and goes on doing so
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with stopping.Stopping() as stop:
        assert not stop.now("cpu")
        os.kill(os.getpid(), which)
        assert stop.now("cpu")
        assert stop.told == which
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_an_interrupt_is_no_traceback(tmp_path, monkeypatch, capsys):
    """^C: the step is finished and saved; before there are steps, the run just ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background does without
    at_batch(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    argv = [*TINY, "--steps", "5", "--mesh", "dp=1,tp=1", "--checkpoints", str(tmp_path)]
    assert train.main(argv) == 130
    assert capsys.readouterr().out.endswith(f"\nstopped   after step 2, saved in {tmp_path}: --resume\n")
    assert vfn.checkpoint.Manager(tmp_path).latest() == 2
    monkeypatch.setattr(data, "read_text", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    assert train.main(argv[:-2]) == 130
    assert "KeyboardInterrupt" not in "".join(capsys.readouterr())


def test_stopping_elsewhere_than_in_the_main_thread_asks_for_nothing():
    found = []

    def run():
        with stopping.Stopping() as stop:
            found.append(stop.now("cpu"))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False]


# --- measured, and configured -----------------------------------------------------------------------------------------


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
    # the product, and one for its gradient
    assert metrics.flops(lambda w, x: (x @ w).sum(), w, x) == 2 * 2 * 2 * 4 * 5
    assert metrics.peak("cpu") > 1e8


def test_a_trace_of_some_steps(tmp_path):
    losses("--steps", "7", "--mesh", "dp=1,tp=1", "--profile", str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    first, last = command_line.TRACED
    assert sorted({e["name"] for e in events if re.fullmatch(r"step \d", e["name"])}) == [
        f"step {i}" for i in range(first + 1, last + 1)
    ]


def test_a_file_of_options(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(
        'steps = 7\nmodel = "gpt"\nsimulate = true\ncheck = false\nevaluate_every = 3\n'
        'optimizer = "lion"\nprecision = "bf16"\naccumulate = 2\nlr = 1e-3\n'
    )
    parse = lambda *argv: options.parse(["--config", str(file), "--data", str(TEXT), *argv])
    opt = parse("--steps", "9")
    assert (opt.steps, opt.model, opt.simulate, opt.check, opt.evaluate_every) == (9, "gpt", True, False, 3)
    assert (opt.optimizer, opt.precision.compute, opt.accumulate, opt.lr) == ("lion", torch.bfloat16, 2, 1e-3)
    assert parse("--optimizer", "sgd", "--lr", "0.5").lr == 0.5
    for text, message in [
        ("stepz = 7", f"--config {file}: stepz is no option; did you mean 'steps'?"),
        ("colour = 7", f"--config {file}: colour is no option; write one of accumulate, batch, check, "),
        ("simulate = 1", f"--config {file}: simulate = 1 should be true or false"),
        ("steps = true", f"--config {file}: steps = true should be a value"),
        ('steps = "many"', "argument --steps: invalid int value: 'many'"),
        ("mesh = { dp = 2 }", f"--config {file}: mesh should be one value, written as on the command line"),
        ("steps 7", f"--config {file}: Expected '=' after a key"),
    ]:
        file.write_text(text)
        with pytest.raises(SystemExit):
            parse()
        assert message in capsys.readouterr().err
