"""What is shown of an error ends at the user's line: at the prompt, in a script, a thread, a notebook, pytest, a rank."""

import os
import re
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import nbclient
import nbformat
import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.base import source_lines, tracebacks
from vescale_fn._core.transforms import grad
from vescale_fn.errors import RankError, VaryingTypeError

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
MISSING = re.compile(
    r"\((\d+) frames? of vescale_fn and torch hidden; vfn.full_tracebacks\(\) or VESCALE_FN_TRACEBACK=full shows them\)"
)
X = torch.arange(4.0)


# Mistakes, each with the functions of the user's through which it is reached, outermost first.


def branch(x):
    return x if x.sum() > 0 else -x


def outer_of_ours():
    with vfn.simulate(2):
        f = vfn.shard_map(branch, mesh=vfn.make_mesh((2,), ("dp",)), in_specs=P("dp"), out_specs=P("dp"))
        return vfn.grad(lambda x: f(x).sum())(X)


def look_up(params):
    return params["v"].sum()


def outer_of_the_users():
    return vfn.grad(vfn.remat(look_up))({"w": X})


def outer_of_torchs():
    with vfn.simulate(2):
        return vfn.shard(X, vfn.make_mesh((2,), ("dp",)), P("dp")) + torch.ones(3)


def of_another_size(x):
    return x.view(7)


def outer_of_a_body():
    with vfn.simulate(2):
        return vfn.shard_map(of_another_size, mesh=vfn.make_mesh((2,), ("dp",)), in_specs=P("dp"), out_specs=P("dp"))(X)


def outer_of_a_body_on_a_real_mesh():  # no torch_dispatch: what torch raises, it raises in C++ below our mode
    return vfn.shard_map(of_another_size, mesh=vfn.make_mesh((1,), ("dp",)), in_specs=P("dp"), out_specs=P("dp"))(X)


def outer_of_an_unchecked_body():
    mesh = vfn.make_mesh((1,), ("dp",))
    f = vfn.shard_map(of_another_size, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check_vma=False)
    return vfn.grad(lambda x: f(x).sum())(X)


def outer_in_a_cause():
    try:
        outer_of_ours()
    except VaryingTypeError as error:
        raise ValueError("the user's own words") from error


def outer_of_only_torch():
    return torch.func.grad(look_up)({"w": X})


MISTAKES = {
    outer_of_ours: (VaryingTypeError, ["outer_of_ours", "<lambda>", "branch"]),
    outer_of_the_users: (KeyError, ["outer_of_the_users", "look_up"]),
    outer_of_torchs: (RuntimeError, ["outer_of_torchs"]),
    outer_of_a_body: (RuntimeError, ["outer_of_a_body", "of_another_size"]),
    outer_of_a_body_on_a_real_mesh: (RuntimeError, ["outer_of_a_body_on_a_real_mesh", "of_another_size"]),
    outer_of_an_unchecked_body: (RuntimeError, ["outer_of_an_unchecked_body", "<lambda>", "of_another_size"]),
}


def caught(call) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("no error")


def functions(text: str) -> list[str]:
    return re.findall(r'^  File ".*", line \d+, in (\S+)$', text, re.MULTILINE)


@pytest.mark.parametrize("call", MISTAKES, ids=lambda f: f.__name__)
def test_the_users_line_is_the_last(call) -> None:
    kind, wanted = MISTAKES[call]
    error = caught(call)
    assert isinstance(error, kind)
    whole, notes = error.__traceback__, getattr(error, "__notes__", None)
    text = tracebacks.text(error, whole)
    assert functions(text) == ["caught", *wanted]
    missing = MISSING.fullmatch(text.splitlines()[-1])
    everything = "".join(traceback.format_exception(error))
    assert missing
    assert len(functions(everything)) == len(wanted) + 1 + int(missing[1])
    assert error.__traceback__ is whole
    assert getattr(error, "__notes__", None) == notes
    assert "hidden" not in everything


def test_an_error_that_another_caused() -> None:
    error = caught(outer_in_a_cause)
    text = tracebacks.text(error, error.__traceback__)
    first, second = text.split("\nThe above exception was the direct cause of the following exception:\n")
    assert functions(first) == ["outer_in_a_cause", "outer_of_ours", "<lambda>", "branch"]
    assert functions(second) == ["caught", "outer_in_a_cause"]
    assert MISSING.fullmatch(text.splitlines()[-1])


def test_notes_of_the_users_stay() -> None:
    error = caught(outer_of_ours)
    error.add_note("at step 7")
    assert tracebacks.text(error, error.__traceback__).splitlines()[-2] == "at step 7"
    assert error.__notes__ == ["at step 7"]


def test_what_is_not_ours_is_left_alone() -> None:
    for call in (outer_of_only_torch, lambda: {}["x"]):
        error = caught(call)
        assert tracebacks.text(error, error.__traceback__) == "".join(traceback.format_exception(error))


def test_a_fault_of_ours_is_shown_to_where_it_is(monkeypatch) -> None:
    monkeypatch.setattr(grad, "_call", grad._finished)  # called with other arguments than it has
    error = caught(lambda: vfn.grad(torch.sum)(X))
    assert isinstance(error, TypeError)
    assert functions(tracebacks.text(error, error.__traceback__))[-1] == "run"


def test_all_of_it_on_request() -> None:
    error = caught(outer_of_ours)
    vfn.full_tracebacks()
    try:
        assert tracebacks.text(error, error.__traceback__) == "".join(traceback.format_exception(error))
    finally:
        vfn.full_tracebacks(False)


SCRIPT = """
import threading, torch
import vescale_fn as vfn

def loss(w):
    return w * 2

def step():
    vfn.grad(loss)(torch.ones(3))

def in_a_thread():
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()

in_a_thread()
vfn.full_tracebacks(False)
in_a_thread()
step()
"""


def test_a_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = ENVIRONMENT | {"VESCALE_FN_TRACEBACK": "full"}
    ran = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 1
    texts = ran.stderr.split("Traceback (most recent call last):\n")[1:]
    message = "vescale_fn.errors.TransformError: grad: the function must return one floating-point number, a 0-d tensor"
    assert [message in text.splitlines() for text in texts] == [True] * 3
    assert ["grad.py" in text for text in texts] == [True, False, False]
    assert [MISSING.search(text) is None for text in texts] == [True, False, False]
    assert [functions(text)[-1] for text in texts[1:]] == ["step", "step"]
    assert functions(texts[2]) == ["<module>", "step"]


def test_a_notebook() -> None:
    cells = [
        "import torch, vescale_fn as vfn",
        "def loss(w):\n    return w * 2\nvfn.grad(loss)(torch.ones(3))",
        "import sys, traceback\nprint(len(traceback.extract_tb(sys.last_traceback)))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(
        notebook, timeout=120, startup_timeout=300, kernel_name="python3", allow_errors=True
    ).execute(env=ENVIRONMENT)
    (output,) = [o for o in notebook.cells[1].outputs if o.output_type == "error"]
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output.traceback))
    assert "vfn.grad(loss)(torch.ones(3))" in text
    assert "grad.py" not in text
    assert MISSING.search(text)
    assert int(notebook.cells[2].outputs[0].text) > 3  # for %debug it is all there


PYTEST = """
import torch
import vescale_fn as vfn

def lookup(params):
    return params["v"]

def test_ours():
    vfn.grad(lambda w: w * 2)(torch.ones(3))

def test_users():
    vfn.grad(lookup)({"w": torch.ones(3)})

def view(x):
    return x.view(7)

def test_torchs_on_a_real_mesh():
    mesh = vfn.make_mesh((1,), ("dp",))
    vfn.shard_map(view, mesh=mesh, in_specs=vfn.P("dp"), out_specs=vfn.P("dp"))(torch.ones(4))

def test_torchs_on_a_simulated_mesh():
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("dp",))
        vfn.shard_map(view, mesh=mesh, in_specs=vfn.P("dp"), out_specs=vfn.P("dp"))(torch.ones(4))
"""


def test_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(PYTEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    environment = ENVIRONMENT | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "grad.py" not in ran.stdout
    assert "test_it.py:9: TransformError" in ran.stdout
    assert "test_it.py:6: KeyError" in ran.stdout
    assert ran.stdout.count("test_it.py:15: RuntimeError") == 2
    assert "typed_mode.py" not in ran.stdout


def fails_on_a_rank():
    f = vfn.shard_map(branch, mesh=vfn.make_mesh((2,), ("dp",)), in_specs=P("dp"), out_specs=P("dp"))
    return f(X)


def test_a_rank(gloo) -> None:
    with pytest.raises(RankError) as error:
        gloo(2, fails_on_a_rank)
    text = str(error.value)
    assert functions(text)[-2:] == ["fails_on_a_rank", "branch"]
    assert "typed_mode.py" not in text
    assert MISSING.search(text)


def test_warnings_point_at_the_users_line_once_for_each() -> None:
    def called_by_torch(x):
        source_lines.warn("mind the step")
        return x

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            vfn.vmap(called_by_torch)(X)
        vfn.vmap(called_by_torch)(X)
    assert [(w.filename, w.lineno, str(w.message)) for w in seen] == [
        (__file__, called_by_torch.__code__.co_firstlineno + 1, "mind the step")
    ]
