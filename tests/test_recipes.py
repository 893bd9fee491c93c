"""The main job: the model, its numbers on every mesh, its text, its command line and what it prints."""

import io
import math
import random
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.recipes import (
    command_line,
    count_lines,
    data,
    layers,
    optimizers,
    options,
    report,
    sampling,
    train,
    transformer,
)

SMALL = transformer.Config(dim=16, heads=4, layers=2, hidden=24, dropout=0.2)
TEXT = Path(__file__).parents[1] / "README.md"
TINY = f"--steps 3 --batch 4 --context 8 --dim 16 --heads 2 --layers 1 --sample 12 --data {TEXT}".split()
FSDP = [(r"\.(qkv|up)$", P("dp", "tp")), (r"\.(out|down)$", P("tp", "dp")), (r".*", P())]
WORDS = torch.arange(3000).mul(7).remainder(251).to(torch.uint8)
KEY = vfn.random.key(3)


def make_params(dtype=torch.float64):
    return transformer.init(KEY, SMALL, dtype)


# The model


def test_scores_have_one_row_for_each_byte():
    scores = transformer.logits(make_params(), torch.zeros(3, 7, dtype=torch.int64), SMALL)
    assert scores.shape == (3, 7, 256)


def test_begins_near_a_uniform_guess():
    batch = data.random_batch(KEY, WORDS, 16, 24)
    assert transformer.loss(make_params(), batch, SMALL).item() == pytest.approx(math.log(256), abs=0.6)


def test_looks_only_back():
    params, tokens = make_params(), torch.randint(256, (2, 9))
    other = tokens.clone()
    other[:, 5] = (other[:, 5] + 1) % 256
    before, after = (transformer.logits(params, x, SMALL, KEY) for x in (tokens, other))
    assert before[:, :5].equal(after[:, :5])
    changed = (before != after).any(-1)
    assert changed[:, 5:].all()


def test_positions_matter():
    params = make_params()
    scores = transformer.logits(params, torch.tensor([[5, 9, 1], [9, 5, 1]]), SMALL)
    assert not torch.allclose(scores[0, 2], scores[1, 2])


def test_rotation_keeps_scores_of_equal_distances():
    angles = layers.rotation(10, 6, 10000.0, torch.zeros(0, dtype=torch.float64))
    q, k = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    turned_q, turned_k = (layers.rotate(x.expand(10, 6), angles) for x in (q, k))
    scores = turned_q @ turned_k.T
    for distance in range(-9, 10):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[0, 0] == pytest.approx((q @ k).item())


def test_the_loss_of_narrow_scores_is_not_rounded():
    scores, targets = torch.randn(3, 5, 7).bfloat16(), torch.arange(15).view(3, 5) % 7
    ours = layers.next_token_loss(scores, targets, 0.0, None)
    want = -scores.double().log_softmax(-1).gather(-1, targets[..., None]).mean()
    assert ours.dtype == torch.float32
    assert ours.item() == pytest.approx(want.item(), rel=1e-6)


def test_dropout_is_on_with_a_key_alone():
    params, batch = make_params(), data.random_batch(KEY, WORDS, 4, 8)
    score = lambda key, config=SMALL: transformer.loss(params, batch, config, key).item()
    assert score(KEY) == score(KEY) != score(None)
    assert score(KEY) != score(vfn.random.fold_in(KEY, 1))
    assert score(KEY, transformer.Config(16, 4, 2, 24, dropout=0.0)) == score(None)


def test_generates_bytes_from_a_key():
    params = make_params(torch.float32)
    scores = lambda tokens: transformer.logits(params, tokens, SMALL)
    texts = [sampling.generate(scores, b"def ", 20, 8, vfn.random.key(i)) for i in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 20


# The same numbers on every mesh


def losses(params, place, steps=4):
    """The losses of the first steps, and the loss without dropout after them."""
    optimizer = optimizers.make("adamw", 3e-2, 10)
    loss = lambda params, batch, key=None: transformer.loss(params, batch, SMALL, key)
    (_, step), state, found = train.make_step(loss, optimizer), optimizer.init(params), []
    for i in range(steps):
        batch = place(data.random_batch(vfn.random.fold_in(KEY, i), WORDS, 8, 12))
        params, state, value = step(params, state, batch, vfn.random.fold_in(KEY, 100 + i))
        found.append(value.item())
    return [*found, train.evaluate(loss, params, [batch])]


def losses_on(shape, specs=transformer.SPECS):
    """The same on a mesh ("dp", "tp") of this shape."""
    mesh = vfn.make_mesh(shape, ("dp", "tp"))
    params = make_params()
    params = vfn.shard(params, mesh, vfn.spec_from_rules(params, specs))
    return losses(params, lambda batch: vfn.shard(batch, mesh, P("dp")))


@pytest.fixture(scope="module")
def one_device():
    return losses(make_params(), lambda batch: batch)


def test_learns(one_device):
    assert one_device[-1] < one_device[0] - 0.5


# float64, sums in another order: a relative 1e-16 an addition, over 4 steps
@pytest.mark.parametrize("specs", [transformer.SPECS, FSDP], ids=["specs", "fsdp"])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4), (1, 1)])
def test_simulated_meshes_give_the_losses_of_one_device(one_device, shape, specs):
    with vfn.simulate(math.prod(shape)):
        assert losses_on(shape, specs) == pytest.approx(one_device, rel=1e-12)


def test_real_ranks_give_the_losses_of_one_device(one_device, gloo):
    for found in gloo(4, losses_on, (2, 2)):
        assert found == pytest.approx(one_device, rel=1e-12)


def test_a_step_communicates_as_a_hand_written_one():
    with vfn.simulate(4):
        mesh, params = vfn.make_mesh((2, 2), ("dp", "tp")), make_params()
        params = vfn.shard(params, mesh, vfn.spec_from_rules(params, transformer.SPECS))
        batch = vfn.shard(data.random_batch(KEY, WORDS, 8, 12), mesh, P("dp"))
        with vfn.comm_log() as log:
            vfn.value_and_grad(transformer.loss)(params, batch, SMALL, KEY)
    assert log.count("all_gather") == 0, str(log)
    tp = [line for line in str(log).splitlines() if re.match(r"all_reduce +tp", line)]
    assert len(tp) == 4 * SMALL.layers  # Megatron-LM: two forward, two backward in each block


def parse(argv):
    return options.parse(argv)


def test_without_its_marked_lines_the_program_runs_on_one_device(monkeypatch, capsys):
    package = types.ModuleType("one_device")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "one_device", package)
    folder = Path(count_lines.__file__).parent
    for name in (
        "layers",
        "optimizers",
        "metrics",
        "report",
        "data",
        "sampling",
        "stopping",
        "gpt",
        "llama",
        "mixtral",
        "command_line",
        "options",
        "train",
    ):
        source = (folder / f"{name}.py").read_text().splitlines()
        marked = {number for number, *_ in count_lines.distribution_lines(f"{name}.py")}
        left = "\n".join("" if i in marked else line for i, line in enumerate(source, 1))
        for word in (
            ("mesh", "shard", "P(", "simulate", "launch")
            if name in ("gpt", "llama", "command_line", "options", "train")
            else ()
        ):
            code = re.sub(r'"""(.|\n)*?"""|#.*|help="[^"]*"|\bmesh_text\b', "", left)
            assert word not in code, f"{word} is left in {name}.py"
        module = types.ModuleType(f"one_device.{name}")
        module.__package__ = "one_device"
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(left, f"{name}.py without its marked lines", "exec"), module.__dict__)
        setattr(package, name, module)
    stripped = package.train.run(package.options.parse(TINY))
    whole = train.run(parse([*TINY, "--mesh", "dp=1,tp=1"]))
    assert stripped["losses"] == pytest.approx(whole["losses"], rel=1e-6)  # two plans of the step, in fp32


# The text


def write(folder, count, size=100):
    for i in range(count):
        (folder / f"{i:02}.txt").write_bytes(bytes([i]) * size)


def test_every_tenth_file_is_held_out(tmp_path):
    write(tmp_path, 23)
    text, held_out = data.read_text(data.find_files(str(tmp_path)), 1)
    assert set(held_out.tolist()) == {9, 19}
    assert set(text.tolist()) == set(range(23)) - {9, 19}


def test_of_few_files_the_last_tenth_is_held_out(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(100)))
    text, held_out = data.read_text(data.find_files(str(tmp_path / "a")), 1)
    assert text.tolist() == list(range(90))
    assert held_out.tolist() == list(range(90, 100))


def test_the_standard_library_is_there():
    files = data.find_files()
    assert len(files) > 100
    assert all(file.suffix == ".py" for file in files)
    assert not any("site-packages" in file.parts for file in files)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nowhere", "nowhere does not exist"),
        (lambda folder: folder, "there are no * files in"),
    ],
)
def test_complains_where_there_is_no_text(tmp_path, make, message):
    with pytest.raises(data.DataError) as error:
        data.find_files(str(make(tmp_path)))
    assert message in str(error.value)
    assert "give --data a file or a folder of text" in str(error.value)


def test_windows_are_pieces_of_the_text():
    batch = data.random_batch(KEY, WORDS, 50, 9)
    assert (batch.shape, batch.dtype) == ((50, 10), torch.int64)
    assert all(bytes(row) in bytes(WORDS.tolist()) for row in batch.tolist())
    assert batch.equal(data.random_batch(KEY, WORDS, 50, 9))
    whole = data.windows(WORDS, torch.tensor([0, len(WORDS) - 10]), 9)
    assert whole[1].tolist() == WORDS[-10:].tolist()
    spread = torch.cat(data.even_batches(WORDS, 3, 4, 9))
    assert spread[0].tolist() == WORDS[:10].tolist()
    assert spread[-1].tolist() == WORDS[-10:].tolist()


def test_random_windows_reach_both_ends():
    starts = data.random_batch(KEY, torch.arange(6, dtype=torch.uint8), 200, 2)[:, 0]
    assert set(starts.tolist()) == {0, 1, 2, 3}


def test_bigram_loss_is_the_formula():
    draw = random.Random(0)
    text, held_out = ([draw.choice(b"abc") for _ in range(n)] for n in (400, 61))
    total = 0.0
    for a, b in zip(held_out, held_out[1:]):
        pairs = sum((x, y) == (a, b) for x, y in zip(text, text[1:]))
        total -= math.log((pairs + 0.1) / (sum(x == a for x in text[:-1]) + 25.6))
    ours = data.bigram_loss(torch.tensor(text, dtype=torch.uint8), [torch.tensor([held_out])])
    assert ours == pytest.approx(total / 60, rel=1e-9)


def test_bigram_loss_of_what_is_certain_and_of_what_is_not():
    turns = torch.tensor(list(b"ab") * 500, dtype=torch.uint8)
    assert data.bigram_loss(turns, [turns[None, :100].long()]) < 0.1
    noise = torch.randint(256, (400_000,), dtype=torch.uint8)
    assert data.bigram_loss(noise, [noise[None, :5000].long()]) == pytest.approx(math.log(256), abs=0.15)


# The command line


def test_runs_and_checks_on_a_simulated_mesh(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs it")
    plot = tmp_path / "loss.png"
    assert train.main([*TINY, "--simulate", "--check", "--save-plot", str(plot)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "dp+tp on mesh (dp=2, tp=2): one process, simulated, on cpu" in out
    assert re.search(r"largest difference \d\.\de[-+]\d\d: below 1e-05", out)
    assert re.search(r"held-out  \d\.\d{3} nats a byte, \d\.\d{3} (below|ABOVE) the bigram model's \d\.\d{3}", out)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_ranks_in_zigzag_order_may_have_uneven_parts(capsys):
    argv = "--context 7 --parallel cp-zigzag --mesh cp=3 --dropout 0 --simulate --check".split()
    assert train.main([*TINY, *argv]) == 0
    assert re.search(r"largest difference \d\.\de[-+]\d\d: below 1e-05", capsys.readouterr().out)


@pytest.mark.gloo
def test_runs_and_checks_on_processes(capfd):
    assert train.main([*TINY, "--check", "--device", "cpu", "--parallel", "pp", "--mesh", "pp=2"]) == 0
    out = capfd.readouterr().out
    assert "pp on mesh (pp=2): 2 processes, on cpu" in out
    assert out.count("step 3/3") == 1  # one rank talks
    assert re.search(r"largest difference \d\.\de[-+]\d\d: below 1e-05", out)


def test_a_difference_is_an_exit_status(capsys, monkeypatch):
    monkeypatch.setitem(train.ALLOWED, torch.float32, 0.0)
    assert train.main([*TINY, "--mesh", "dp=1,tp=1", "--check"]) == 1
    assert "NOT below 0e+00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--mesh qq=2", "'qq=2' in 'qq=2': write it like dp=2,tp=2, with axes of pp, replica, dp, cp, ep, tp"),
        ("--mesh dp=0", "'dp=0' in 'dp=0': write it like dp=2,tp=2"),
        ("--mesh dp=1,tp=3", "tp=3 must divide --heads 4"),
        ("--parallel fsdp+qq", "'fsdp+qq': 'qq' is none of them; write names from dp, zero1"),
        ("--parallel fsdp", "the mesh is dp=2, tp=2, but 'fsdp' leaves tp idle"),
        ("--parallel dp+ep --mesh dp=2,ep=2", "--parallel dp+ep: llama has no dims for all of these"),
        (
            "--parallel cp-zigzag --mesh cp=2",
            "--parallel cp-zigzag: a token's dropout goes by its place, which is another: --dropout 0",
        ),
        ("--parallel pp", "--parallel pp needs ranks for at least two stages: --mesh pp=2,..."),
        ("--parallel dp --mesh pp=2,dp=2", "the mesh is pp=2, dp=2, but 'dp' leaves pp idle"),
        ("--schedule zbv", "--schedule is about a pipeline: it needs --parallel pp+... and --mesh pp=2,..."),
        ("--parallel pp --mesh pp=2 --schedule 2f2b", "argument --schedule: invalid choice: '2f2b'"),
        (
            "--parallel pp --mesh pp=2 --accumulate 2",
            "--parallel pp: a pipeline has the parts of a batch already, --microbatches N: not with --accumulate",
        ),
        ("--parallel pp --mesh pp=2 --chunks 2", "--chunks is about --schedule interleaved, and here is 1f1b"),
        ("--parallel pp --mesh pp=2 --schedule interleaved --chunks 0", "--chunks 0 must be at least 1"),
        (
            "--parallel pp --mesh pp=2 --schedule interleaved --chunks 3 --layers 4",
            "--schedule interleaved on pp=2 has 6 stages, and --layers 4 are cut into 5 at most",
        ),
        ("--parallel pp --mesh pp=2 --microbatches 0", "--microbatches 0 must be at least 1"),
        ("--parallel pp --mesh pp=2 --microbatches 5", "--microbatches 5 must divide --batch 16"),
        (
            "--parallel pp --mesh pp=2 --schedule dualpipev --microbatches 2 --layers 3",
            "--microbatches 2 must be at least 4",
        ),
        (
            "--parallel pp --mesh pp=2 --schedule zbv",
            "--schedule zbv on pp=2 has 4 stages, and --layers 2 are cut into 3 at most",
        ),
        ("--resume", "--resume needs --checkpoints FOLDER, where they are"),
        ("--evaluate", "--evaluate needs --checkpoints FOLDER, where they are"),
        ("--deterministic 8", "--deterministic 8: the mesh has 4 ranks, and must have as many"),
        ("--elastic 2", "--elastic needs --deterministic N, the number of ranks that processes play"),
        ("--deterministic 4 --elastic 0", "--elastic must be at least 1"),
        ("--deterministic 4 --elastic 2 --check", "--elastic is for training on processes: not with --check"),
        ("--deterministic 4 --processes 3", "--processes 3 must divide --deterministic 4"),
        (
            "--deterministic 4 --processes 2 --simulate",
            "--processes are real ones: not with --simulate, where one plays all ranks",
        ),
        ("--evaluate --checkpoints nowhere", "--evaluate: there is no checkpoint in nowhere"),
        ("--resume --checkpoints x --check", "--check compares the first steps of a run: not with --resume"),
        ("--accumulate 3", "--accumulate 3 must divide --batch 16"),
        ("--precision fp8", "'fp8': write fp32, bf16, fp16, fp64, or a policy like params=f32,compute=bf16,reduce=f32"),
        (
            "--precision params=f16",
            "'params=f16': float16 is for computing alone; write fp16, or a policy like params=f32,",
        ),
        ("--stepz 3", "--stepz is no option; did you mean '--steps'?"),
        ("--evaluate-evry=3", "--evaluate-evry=3 is no option; did you mean '--evaluate-every'?"),
        (
            "--parallel dp --mesh dp=512 --device cuda",
            "--device cuda: 512 GPUs needed, one for each rank here, but there ",
        ),
        ("--lr 0", "--lr 0.0 must be above 0"),
        ("--steps 3 --profile x", "--profile traces steps 4 to 6: it needs more --steps, and not --evaluate"),
        ("--optimizer adam", "argument --optimizer: invalid choice: 'adam'"),
        ("--config nowhere.toml", "--config nowhere.toml: [Errno 2] No such file"),
        ("--steps 0", "--steps must be at least 1"),
        ("--dim 30", "--dim 30 must be an even number for each of --heads 4"),
        ("--dropout 1", "--dropout 1.0 must be at least 0 and below 1"),
        ("--data /no/such/text", "/no/such/text does not exist; give --data a file or a folder of text"),
    ],
)
def test_complains_before_it_starts(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(argv.split())
    assert stop.value.code == 2
    usage, said, *more = capsys.readouterr().err.splitlines()
    assert usage == "usage: python -m vescale_fn.recipes.train [options]; --help lists them"
    assert message in said
    assert more == []


def test_another_number_of_processes_than_were_started_is_no_option(monkeypatch, capsys):
    place = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    argv = "--mesh dp=4 --parallel dp --deterministic 4 --processes".split()
    assert parse([*argv, "4"]).processes == 4
    with pytest.raises(SystemExit):
        parse([*argv, "2"])
    assert capsys.readouterr().err.splitlines()[1].endswith("--processes 2: there are 4, started already")


def test_a_plot_without_matplotlib_complains_before_it_starts(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        parse(["--save-plot", "loss.png"])
    assert "--save-plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "answer"),
    [("--presicion bf16", "--presicion is no option; did you mean '--precision'?"), ("--help", "--precision NAME")],
)
def test_what_a_command_line_is_answered_needs_no_torch(argv, answer):
    command = [sys.executable, "-X", "importtime", "-m", command_line.PROGRAM, *argv.split()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer in ran.stdout + ran.stderr
    imported = re.findall(r"^import time: .*\| +(\S+)$", ran.stderr, re.MULTILINE)
    assert "argparse" in imported
    assert {"torch", "numpy", "optree"}.isdisjoint(imported)


def test_each_rate_of_the_command_line_has_its_optimiser():
    assert list(command_line.RATES) == list(optimizers.OPTIMIZERS)
    assert set(command_line.MODELS) == set(options.MODELS)


def test_a_mesh_on_the_command_line():
    assert command_line.mesh_of("tp=3") == {"tp": 3}
    assert list(command_line.mesh_of("tp=3,dp=2").items()) == [("dp", 2), ("tp", 3)]


# What it shows


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream, steps=50):
    progress = report.Progress(steps, stream)
    for done in range(1, steps + 1):
        progress.step(done, [2.5] * done, 64)
    progress.end()
    return stream.getvalue()


def test_progress_in_a_file_is_ten_lines():
    lines = shown(io.StringIO()).splitlines()
    assert len(lines) == 10
    assert re.fullmatch(r"step 50/50  loss 2\.500  [\d,]+ tokens/s  0:00 gone, 0:00 to go", lines[-1])


def test_progress_shows_the_loss_of_the_step_itself():
    stream = io.StringIO()
    progress = report.Progress(2, stream)
    progress.step(1, [4.0], 64)
    progress.step(2, [4.0, 2.0], 64)
    assert [line.split()[3] for line in stream.getvalue().splitlines()] == ["4.000", "2.000"]


def test_help_tells_the_ways_to_run(capsys):
    with pytest.raises(SystemExit) as end:
        parse(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert "A language model learns real text" in text
    assert "\n    python -m vescale_fn.recipes.train --simulate " in text
    assert "torchrun --nproc-per-node 4 -m vescale_fn.recipes.train\n" in text


def test_the_readme_says_each_option_once(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    there = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    page = TEXT.parent / "docs" / "training.md"
    table = re.search(r"<!-- options -->\n(.*?)\n\n", page.read_text(), re.DOTALL)[1]
    assert sorted(re.findall(r"`(--[a-z-]+)`", table)) == sorted(there)
    assert len(there) > 30


def test_progress_in_a_terminal_is_one_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = shown(Terminal())
    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert re.match(r"\[=+\] step 50/50 ", text.split("\r")[-1])
    assert all(len(line.strip("\n")) < 100 for line in text.split("\r"))


def test_side_by_side():
    agrees, text = report.side_by_side([2.5, 2.25], [2.5, 2.250001], 1e-5)
    assert agrees
    assert text.splitlines()[-1] == "  largest difference 1.0e-06: below 1e-05"
    assert not report.side_by_side([2.5], [2.6], 1e-5)[0]
    assert not report.side_by_side([2.5, 2.5], [2.5, math.nan], 1e-5)[0]


def test_lines_for_distribution_are_counted(capsys):
    count_lines.main()
    *_, program, start, total = capsys.readouterr().out.splitlines()
    counts = [int(line.split()[0]) for line in (program, start, total)]
    assert counts[0] + counts[1] == counts[2]
    assert total == f"{counts[2]} lines in all"
    assert 5 < counts[0] < 40  # names of dims, where values are stated to lie by them, `shard`: not more is needed
