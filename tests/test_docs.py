"""What is written for readers runs: blocks of README and docs, docstring examples, notebooks. The promised names are there."""

import doctest
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import jupytext
import nbclient
import nbformat
import pytest
from printed import alike

import vescale_fn as vfn
from vescale_fn.recipes import count_lines

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}

PROMISED = """
simulate launch make_mesh use_mesh set_mesh current_mesh
P spec_from_rules shard unshard with_sharding from_local spec_of shard_shape
shard_map psum pmean pmax pmin all_gather psum_scatter all_to_all ppermute pbroadcast
axis_index axis_size pvary pcast dynamic_slice
grad value_and_grad vjp remat
comm_log strict show check_parity
random optim
""".split()
PROMISED_RANDOM = "key split fold_in key_data wrap_key_data bits uniform normal bernoulli randint dropout".split()


# README and docs


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def marked(mark: str) -> str:
    """The block under this comment, of the one page that has it."""
    texts = "\n".join(page.read_text() for page in PAGES)
    (found,) = re.findall(rf"<!-- {mark} -->\n```\w+\n(.*?)```", texts, re.DOTALL)
    return found


# Runs each file in a process of its own, which has torch and vescale_fn imported already: that is what takes the time. So
# does taking them down, which is left out.
EACH_FORKED = """
import atexit, os, runpy, sys
import vescale_fn._core.torch_internals

vescale_fn._core.torch_internals.preload()
for path in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        for stream, name in (1, "stdout"), (2, "stderr"):
            os.dup2(os.open(f"{path}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        status = 0
        try:
            runpy.run_path(path, run_name="__main__")
        except Exception as error:
            frames, status = error.__traceback__, 1
            while frames.tb_frame.f_code.co_filename != path:
                frames = frames.tb_next
            sys.excepthook(type(error), error, frames)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def run_python(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )


UNSURE = re.compile(r"^ *[\^~]+$|^\(\d+ frames? of vescale_fn.*\)$", re.MULTILINE)  # which some Pythons print
FAILING = {"check": "what check prints", "mistake": "what is printed"}


def test_blocks_run_and_print_what_is_there(tmp_path: Path) -> None:
    """As a reader would: each in a file and a process of its own, anywhere on the disk."""
    programs = {f"{page.stem}_{i}": block for page in PAGES for i, block in enumerate(blocks(page.read_text()))}
    scripts = []
    for name, block in [*programs.items(), *((mark, marked(mark)) for mark in FAILING)]:
        scripts.append(tmp_path / name / "program.py")
        scripts[-1].parent.mkdir()
        scripts[-1].write_text(block)
    forked = scripts[: len(programs)]
    ran = run_python(tmp_path, "-c", EACH_FORKED, *map(str, scripts))
    said = {script.parent.name: Path(f"{script}.stderr").read_text() for script in forked}
    again = re.compile(r".*; all start again \(.*\n")
    assert {name: again.sub("", text) for name, text in said.items()} == dict.fromkeys(said, "")  # nor any warning
    assert (ran.stdout.split(), ran.stderr) == (["0"] * len(forked) + ["1"] * len(FAILING), "")
    shown_of = {"README_0": "what it prints", "README_1": "what five lines print", **FAILING}
    for name, mark in shown_of.items():
        texts = [(tmp_path / name / f"program.py.{stream}").read_text() for stream in ("stdout", "stderr")]
        shown = UNSURE.sub("", "".join(texts).replace(f"{tmp_path / name}/", ""))
        assert alike(shown, UNSURE.sub("", marked(mark))), shown


def test_readme_begins_with_a_program() -> None:
    first = blocks((ROOT / "README.md").read_text())[0]
    lines = [line for line in first.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert 10 <= len(lines) <= 18
    assert "assert_close" in first
    assert "simulate(8)" in first


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 300
    dead = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]:
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
            path, _, anchor = target.partition("#")
            if "://" in target:
                continue
            file = (page.parent / path).resolve() if path else page
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if anchor and file.exists() else []
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            if not file.exists() or (anchor and anchor not in anchors):
                dead.append(f"{page.name}: {target}")
    assert dead == []


def test_readme_counts_the_lines_for_distribution() -> None:
    marks = [mark for name in count_lines.PROGRAM for _, _, mark in count_lines.distribution_lines(name)]
    text = " ".join((ROOT / "docs" / "training.md").read_text().split())
    assert f"**{len(marks)} lines** exist only for distribution" in text
    for mark, where in count_lines.MARKS.items():
        assert f"{marks.count(mark)} {where}" in text


# Docstrings


def modules() -> list[str]:
    root = ROOT / "vescale_fn"
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(root.rglob("*.py"))]
    return [name.removesuffix(".__init__") for name in names]


class Rounded(doctest.OutputChecker):
    """Takes what differs from what is written only by rounding."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return super().check_output(want, got, optionflags) or alike(got, want)


@pytest.mark.parametrize("name", modules())
def test_docstring_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    report: list[str] = []
    runner = doctest.DocTestRunner(
        Rounded(), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False
    )
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
    assert vfn.current_mesh() is None, f"an example of {name} leaves a mesh behind"


def defined(module: types.ModuleType) -> list[str]:
    """The public functions and classes that a module without `__all__` defines itself."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return [name for name in own if not name.startswith("_")]


def undocumented(module: types.ModuleType) -> list[str]:
    """Public classes of a module without a docstring, and functions without an example in it."""
    faults = []
    for name in getattr(module, "__all__", None) or defined(module):
        value = getattr(module, name)
        text = (vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)) or ""
        if inspect.isclass(value):
            if not text:
                faults.append(f"{module.__name__}.{name} has no docstring")
        elif not inspect.ismodule(value) and ">>>" not in text:
            faults.append(f"{module.__name__}.{name} has no example in its docstring")
    return faults


DOCUMENTED = [
    "vescale_fn",
    "vescale_fn.checkpoint",
    "vescale_fn.nn",
    "vescale_fn.random",
    "vescale_fn.optim",
]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_public_names_have_a_docstring_with_an_example(name: str) -> None:
    assert undocumented(importlib.import_module(name)) == []


def test_a_name_without_an_example_is_found() -> None:
    module = types.ModuleType("planted")
    exec("__all__ = ['f', 'g', 'E']\ndef f(): 'Text.'\ndef g():\n  '>>> 1'\nclass E(Exception): ...", vars(module))
    assert undocumented(module) == ["planted.f has no example in its docstring", "planted.E has no docstring"]


def test_the_promised_names_are_there() -> None:
    assert [name for name in PROMISED if not hasattr(vfn, name)] == []
    assert [name for name in PROMISED_RANDOM if not hasattr(vfn.random, name)] == []
    assert [name for name in PROMISED if name not in vfn.__all__] == []


# Notebooks

# One process that has imported what every notebook imports, which is what takes the time. Each visitor gets a fork of it, a
# kernel, and is let go when that ends.
KERNELS = """
import atexit, os, select, signal, socket, sys

os.environ["JPY_PARENT_PID"] = str(os.getpid())  # a kernel ends with this process, as this does with the tests
import matplotlib.pyplot, torch, vescale_fn._core.torch_internals
from ipykernel.kernelapp import IPKernelApp

vescale_fn._core.torch_internals.preload()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
door = socket.socket(socket.AF_UNIX)
door.bind(sys.argv[1])
door.listen()
print("open", flush=True)
while door in select.select([door, sys.stdin], [], [])[0]:
    visitor, _ = door.accept()
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        door.close()
        IPKernelApp.launch_instance(["-f", visitor.recv(4096).decode()])
        atexit._run_exitfuncs()
        os._exit(0)
    visitor.close()
"""
VISITOR = """
import signal, socket, sys

signal.signal(signal.SIGINT, signal.SIG_IGN)  # which Jupyter sends before it asks a kernel to end
kernel = socket.socket(socket.AF_UNIX)
kernel.connect(sys.argv[1])
kernel.sendall(sys.argv[2].encode())
kernel.recv(1)
"""


@pytest.fixture(scope="module")
def jupyter_path() -> Iterator[str]:
    """A folder in which Jupyter finds a kernel named "fork"."""
    environment = {
        **ENVIRONMENT,
        "PYTHONWARNINGS": "default",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # read when matplotlib is imported
    }
    with tempfile.TemporaryDirectory() as folder:
        door = f"{folder}/door"
        argv = [sys.executable, "-S", "-c", VISITOR, door, "{connection_file}"]
        spec = Path(folder, "kernels", "fork", "kernel.json")
        spec.parent.mkdir(parents=True)
        spec.write_text(json.dumps({"argv": argv, "display_name": "fork", "language": "python"}))
        command, pipe = [sys.executable, "-c", KERNELS, door], subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            yield folder
            process.kill()


def shown(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """What each code cell shows, as text. A progress bar and other things on stderr do not count; what is printed may
    have come in pieces."""
    cells = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        texts, printing = [], False
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stdout":
                texts = [*texts[:-1], texts[-1] + output.text] if printing else [*texts, output.text]
                printing = True
            elif output.output_type in ("execute_result", "display_data"):
                texts.append(output.data.get("text/html", output.data.get("text/plain", "")))
                printing = False
        cells.append(texts)
    return cells


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_its_percent_source(path: Path) -> None:
    source, notebook = jupytext.read(path.with_suffix(".py")), nbformat.read(path, as_version=4)
    assert [(cell.cell_type, cell.source) for cell in source.cells] == [
        (cell.cell_type, cell.source) for cell in notebook.cells
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_shows_what_is_stored(path: Path, jupyter_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = nbformat.read(path, as_version=4)
    assert any(shown(stored)), f"{path.name} is stored without its outputs"
    assert "assert" in [cell for cell in stored.cells if cell.cell_type == "code"][-1].source
    fresh = nbformat.read(path, as_version=4)
    monkeypatch.setenv("JUPYTER_PATH", jupyter_path)
    client = nbclient.NotebookClient(fresh, timeout=300, startup_timeout=300, kernel_name="fork")
    client.execute()  # raises on the first cell that raises
    for index, (now, then) in enumerate(zip(shown(fresh), shown(stored), strict=True), 1):
        same = len(now) == len(then) and all(map(alike, now, then))
        assert same or now == then, f"In[{index}] shows something else; `python notebooks/build.py` stores it"


def test_texts_are_compared_up_to_rounding() -> None:
    stored = "out  f64[8,8]  1.1e-16  5e-17  equal\nloss 1.3476, 4 steps of tensor([0.25, -0.])"
    assert alike("out f64[8,8]  4.4e-16  0  equal\nloss 1.3475, 4 steps of tensor([0.2500, 0.])", stored)
    for found in ("1.1e-16", "0.1"), ("1.3476", "1.3576"), ("4 steps", "5 steps"), ("8,8", "8,9"), ("equal", "1.1e-1"):
        assert not alike(stored.replace(*found), stored)
    assert not alike(stored + " 0", stored)


def test_there_is_a_notebook() -> None:
    assert "01_one_program_many_devices" in [path.stem for path in NOTEBOOKS]
