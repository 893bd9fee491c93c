"""Plans as files: replayed in another process as where they were recorded; for anything else the function is recorded anew."""

import functools
import importlib
import inspect
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import TransformError
from vescale_fn.plan.saved import made_for


def loss(p, x):
    return ((torch.relu(x @ p["a"]) @ p["b"] + p["c"]).softmax(-1) ** 2).mean()


def stepping(rate, factor=2.0):
    opt = vfn.optim.adamw(rate)

    def step(p, s, x, lr):
        value, g = vfn.value_and_grad(loss)(p, x)
        u, s = opt.update(g, s, p)
        return {"loss": value * factor}, vfn.optim.apply_updates(p, u), s, (lr * 2.0, None, 3, [x])

    return step


def arguments(rate=1e-3):
    p = {"a": torch.randn(6, 4), "b": torch.randn(4, 3), "c": torch.zeros(3)}
    return p, vfn.optim.adamw(rate).init(p), torch.randn(5, 6), 0.5


def clones(tree):
    return vfn.tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


def test_a_saved_plan_is_replayed_and_nothing_is_recorded(tmp_path):
    args, jit = arguments(), functools.partial(vfn.jit, donate_argnums=(0, 1))
    vfn.save_plan(jit(stepping(1e-3)).lower(*args), tmp_path / "step")
    again = jit(stepping(1e-3), plans=[vfn.load_plan(tmp_path / "step")])
    for lr in (0.5, 0.25):
        got, want = again(*clones((*args[:3], lr))), stepping(1e-3)(*args[:3], lr)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert type(got[2]) is type(want[2])
    assert again.cache_info().records == 0
    assert again.cache_info().hits == 1
    assert again.lower(*args).text(lines=None) == jit(stepping(1e-3)).lower(*args).text(lines=None)
    assert repr(vfn.load_plan(tmp_path / "step")) == f"<SavedPlan of step for 1 rank, by {made_for.software()}>"


def test_what_is_computed_again_is_marked_in_a_loaded_plan_too(tmp_path):
    def gradient(ws, x):
        layer = vfn.remat(lambda w, x: torch.tanh(x @ w))
        return vfn.grad(lambda ws: functools.reduce(lambda x, w: layer(w, x), ws, x).square().sum())(ws)

    ws, x = [torch.randn(6, 6) for _ in range(3)], torch.randn(5, 6)
    vfn.save_plan(vfn.jit(gradient).lower(ws, x), tmp_path / "plan")
    again = vfn.jit(gradient, plans=[vfn.load_plan(tmp_path / "plan")])
    text = again.lower(ws, x).text(lines=None)
    assert text == vfn.jit(gradient).lower(ws, x).text(lines=None)
    assert "  again" in text
    assert again.cache_info().records == 0


def test_a_loop_is_saved_with_its_body(tmp_path):
    def loss(w, x):
        return vfn.scan(lambda h, w: (torch.tanh(h @ w), h.sum()), x, w)[0].square().mean()

    w, x = torch.randn(7, 6, 6), torch.randn(5, 6)
    f = vfn.jit(vfn.value_and_grad(loss))
    vfn.save_plan(f.lower(w, x), tmp_path / "loop")
    again = vfn.jit(vfn.value_and_grad(loss), plans=[vfn.load_plan(tmp_path / "loop")])
    torch.testing.assert_close(again(w, x), f(w, x), rtol=0, atol=0)
    assert again.cache_info().records == 0
    assert again.lower(w, x).text(lines=None) == f.lower(w, x).text(lines=None)


OTHERS = {
    "a rate that the optimiser closes over": lambda args: (stepping(2e-3), args),
    "a number that it closes over": lambda args: (stepping(1e-3, 3.0), args),
    "another function": lambda args: (lambda *a: stepping(1e-3)(*a), args),
    "a shape": lambda args: (stepping(1e-3), (*args[:2], torch.randn(4, 6), 0.5)),
    "a dtype": lambda args: (
        stepping(1e-3),
        (*args[:2], args[2].double().float().to(torch.bfloat16).float().T.contiguous().T, 0.5),
    ),
    "an int": lambda args: (stepping(1e-3), (*args[:3], 1)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_plan_that_does_not_fit_is_not_used(tmp_path, what):
    args = arguments()
    vfn.save_plan(vfn.jit(stepping(1e-3)).lower(*args), tmp_path / "step")
    f, other = OTHERS[what](args)
    again = vfn.jit(f, plans=[vfn.load_plan(tmp_path / "step")])
    with pytest.warns(UserWarning, match="no saved plan serves .*, which is recorded anew: "):
        got = again(*other)
    torch.testing.assert_close(got, f(*other))
    assert again.cache_info().records == 1


def test_it_says_why_in_one_line(tmp_path, monkeypatch):
    x = torch.ones(3)
    vfn.save_plan(vfn.jit(torch.sin).lower(x), tmp_path / "sin")
    saved = vfn.load_plan(tmp_path / "sin")
    with pytest.warns(UserWarning, match="no saved plan serves sin") as said:
        vfn.jit(torch.sin, plans=[saved])(torch.ones(4))
    assert str(said[0].message).splitlines()[0] == (
        "jit: no saved plan serves sin, which is recorded anew: it was made for arguments of other types or layouts, or "
        "under other settings"
    )
    here = made_for.software()
    monkeypatch.setattr(made_for, "software", lambda: "torch 9.9.9, vescale_fn 0")
    with pytest.warns(UserWarning, match="no saved plan serves sin") as said:
        vfn.jit(torch.sin, plans=[saved])(x)
    assert str(said[0].message).endswith(f"it was made by {here}, and here is torch 9.9.9, vescale_fn 0")


W = torch.ones(3)


def printing(x):
    vfn.debug_print("{}", x)
    return x + 1


REFUSED = {
    "a plan whose function closes over 1 tensors, one of (3,),": lambda: vfn.jit(lambda x: x * W).lower(torch.ones(3)),
    "the plan's step debug_print": lambda: vfn.jit(printing).lower(torch.ones(3)),
    "is no plan: it comes from vfn.jit(f).lower(...)": lambda: vfn.jit(torch.sin),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_data_is_refused(tmp_path, what):
    with pytest.raises(TransformError) as raised:
        vfn.save_plan(REFUSED[what](), tmp_path / "plan")
    assert what in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_simulated_ranks_that_do_not_do_the_same_is_refused(tmp_path):
    with (
        vfn.simulate(2),
        pytest.raises(TransformError, match="simulated ranks that do not all do the same cannot be saved"),
    ):
        x = vfn.shard(torch.ones(3), vfn.make_mesh((2,), ("a",)), P("a"))
        vfn.save_plan(vfn.jit(torch.sin).lower(x), tmp_path / "plan")


def test_a_plan_of_ranks_that_one_process_plays_is_refused(tmp_path):
    with (
        vfn.deterministic(2),
        pytest.raises(TransformError, match="of several ranks that one process plays cannot be saved"),
    ):
        x = vfn.shard(torch.ones(4), vfn.make_mesh((2,), ("a",)), P("a"))
        vfn.save_plan(vfn.jit(torch.sin).lower(x), tmp_path / "plan")


def test_what_is_no_plan_is_refused(tmp_path):
    (tmp_path / "a").write_text("{}")
    (tmp_path / "b").write_bytes(b"\x80\x04")
    for name, said in {"a": "is no plan that this version", "b": "cannot be read", "c": "cannot be read"}.items():
        with pytest.raises(TransformError, match=said):
            vfn.load_plan(tmp_path / name)
    with pytest.raises(TransformError, match=r"plans=\[vfn.load_plan\(path\)\]"):
        vfn.jit(torch.sin, plans=["path"])


def test_a_damaged_plan_is_recorded_anew_and_runs_nothing(tmp_path):
    path, x = tmp_path / "sin", torch.ones(3)
    vfn.save_plan(vfn.jit(torch.sin).lower(x), path)
    data = json.loads(path.read_text())
    for target in (
        {"op": "aten::no_such.default"},
        {"op": "os::system.default"},
        {"step": "eval", "given": {}},
        "system",
    ):
        (entry,) = data["plans"]
        next(row for row in entry["graph"] if row["op"] == "call_function")["target"] = target
        path.write_text(json.dumps(data))
        with pytest.warns(UserWarning, match="is recorded anew"):
            assert torch.equal(vfn.jit(torch.sin, plans=[vfn.load_plan(path)])(x), torch.sin(x))


def calling(path, target):
    """A plan of sin whose first call is another."""
    data = json.loads(path.read_text())
    (entry,) = data["plans"]
    next(row for row in entry["graph"] if row["op"] == "call_function")["target"] = {"op": target}
    path.write_text(json.dumps(data))


NOT_OF_TENSORS = {
    "aten::from_file.default": "which is no function of tensors and numbers alone",
    "aten::save.default": "which is no function of tensors and numbers alone",
    "aten::warn.default": "which is no function of tensors and numbers alone",
    "aten::manual_seed.default": "which is no function of tensors and numbers alone",
    "c10d::barrier.default": "which is not torch's; where you trust it: load_plan(path, namespaces=['c10d'])",
    "vfn_tests::doubled.default": "which is not torch's; where you trust it: load_plan(path, namespaces=['vfn_tests'])",
}


@pytest.mark.parametrize("target", NOT_OF_TENSORS)
def test_a_plan_calls_functions_of_tensors_alone(tmp_path, target):
    path, x = tmp_path / "sin", torch.ones(3)
    vfn.save_plan(vfn.jit(torch.sin).lower(x), path)
    calling(path, target)
    with pytest.warns(UserWarning, match="is recorded anew") as said:
        assert torch.equal(vfn.jit(torch.sin, plans=[vfn.load_plan(path)])(x), torch.sin(x))
    said = str(said[0].message).splitlines()[0]
    start = "jit: no saved plan serves sin, which is recorded anew: "
    assert said in (
        f"{start}it calls {target}, {NOT_OF_TENSORS[target]}",
        f"{start}torch has no operator {target} here",
    )


@torch.library.custom_op("vfn_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor, how: str) -> torch.Tensor:
    return x * 2


doubled.register_fake(lambda x, how: torch.empty_like(x))


def test_operators_of_ones_own_are_named(tmp_path):
    def f(x):
        return doubled(x, "fast") + 1

    x = torch.ones(3)
    vfn.save_plan(vfn.jit(f).lower(x), tmp_path / "plan")
    again = vfn.jit(f, plans=[vfn.load_plan(tmp_path / "plan", namespaces=["vfn_tests"])])
    assert torch.equal(again(x), f(x))
    assert again.cache_info().records == 0
    with pytest.raises(TransformError, match="Instead: namespaces=..vfn_tests..") as raised:
        vfn.load_plan(tmp_path / "plan", namespaces="vfn_tests")
    assert str(raised.value).startswith("load_plan: namespaces is 'vfn_tests', not a list of names")


def test_no_word_of_a_file_becomes_code(tmp_path):
    path, x, planted = tmp_path / "sin", torch.ones(3), "__import__('pathlib').Path('planted').touch()"
    vfn.save_plan(vfn.jit(torch.sin).lower(x), path)
    whole = json.loads(path.read_text())
    texts = {"name": f"sin\n{planted}", "line": f"a\n{planted}:3", "kwargs": {f"x={planted}, y": 1}, "op": planted}
    for key, text in texts.items():
        data = json.loads(json.dumps(whole))
        (entry,) = data["plans"]
        entry["graph"][1][key] = text
        path.write_text(json.dumps(data))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(vfn.jit(torch.sin, plans=[vfn.load_plan(path)])(x), torch.sin(x))
    assert not (tmp_path / "planted").exists()
    assert not Path("planted").exists()


# Two programs, each in a process of its own, in turn: an interpreter, and a fork of it.
PROGRAM = """
import os, sys, torch, vescale_fn as vfn
sys.path.insert(0, {folder!r})
if os.fork():
    assert os.wait()[1] == 0
    with open({folder!r} + "/steps.py", "w") as file:
        file.write({changed!r})
    sys.stderr.write("---")
from steps import step
f = vfn.jit(step, plans=[vfn.load_plan({path!r})])
print(f(torch.ones(2), torch.eye(2)).tolist(), f.cache_info().records, flush=True)
"""


def test_another_process_uses_it_and_another_source_file_does_not(tmp_path, monkeypatch):
    folder, path = tmp_path / "here", str(tmp_path / "plan")
    folder.mkdir()
    source = (
        "import vescale_fn as vfn\ndef step(w, x):\n    return w - 0.1 * vfn.grad(lambda w: ((x @ w) ** 2).sum())(w)\n"
    )
    (folder / "steps.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "steps", raising=False)
    vfn.save_plan(vfn.jit(importlib.import_module("steps").step).lower(torch.ones(2), torch.eye(2)), path)
    monkeypatch.delitem(sys.modules, "steps")
    moved = folder.rename(tmp_path / "there")
    program = PROGRAM.format(folder=str(moved), path=path, changed=source.replace("0.1", "0.2"))
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [line.split("] ")[1] for line in ran.stdout.splitlines()] == ["0", "1"]
    as_saved, changed = ran.stderr.split("---")
    assert as_saved == ""
    assert "the function, or what it closes over, has changed since" in changed


def _on_ranks(path, rows):
    """A step with uneven shards and buckets, saved by all ranks and replayed by them; then where one rank's plan is missing."""
    mesh = vfn.make_mesh((3,), ("dp",))
    torch.manual_seed(0)
    params = [torch.randn(rows, rows) for _ in range(3)]
    x = torch.randn(4, rows)
    held, data = vfn.shard(params, mesh, P("dp")), vfn.shard(x, mesh, P())

    def step(params, x):
        def loss(params):
            h = x
            for w in params:
                h = torch.tanh(h @ w)
            return h.square().mean()

        value, grads = vfn.value_and_grad(loss)(params)
        return value, [w - 0.1 * g for w, g in zip(params, grads)]

    want = step(params, x)
    vfn.save_plan(vfn.jit(step).lower(held, data), path)
    torch.distributed.barrier()
    saved = vfn.load_plan(path)
    again = vfn.jit(step, plans=[saved])
    torch.testing.assert_close(vfn.unshard(again(held, data)), want)
    counts = [again.cache_info().records]
    if torch.distributed.get_rank() == 1:
        saved.software = "torch 9"
    again = vfn.jit(step, plans=[saved])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.testing.assert_close(vfn.unshard(again(held, data)), want)
    return [*counts, again.cache_info().records], [str(one.message).splitlines()[0] for one in said]


@pytest.mark.parametrize("rows", [6, 4])
def test_ranks_save_their_plans_and_use_them_together_or_not_at_all(gloo, tmp_path, rows):
    for rank, (counts, said) in enumerate(gloo(3, _on_ranks, str(tmp_path / "plan"), rows)):
        assert counts == [0, 1]
        assert len(said) == 1
        assert ("recorded anew: it was made by torch 9" if rank == 1 else "on rank 1 it was made by torch 9") in said[0]


def test_the_documentation_says_what_is_kept():
    assert "data alone" in inspect.getdoc(vfn.save_plan)
