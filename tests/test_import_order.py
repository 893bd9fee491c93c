"""Imports point down, room by room as ARCHITECTURE.md lists them, and never in a circle; one door for private names of torch.

The checks are plain functions from a folder to a list of complaints, so that each can be seen failing on a small
package with a planted fault.
"""

import ast
import functools
import graphlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import private_names
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "vescale_fn"
DOOR = f"{PACKAGE}._core.torch_internals"  # the one folder that may use private torch names
LIGHT = (
    *(f"_core.base.{name}" for name in ("errors", "messages", "tree")),
    *(f"schedules.{name}" for name in "actions auto costs deadlocks drawing files letters named".split()),
    *(f"schedules.{name}" for name in "partial schedule simulator task_graph timed_task timeline validation".split()),
    "recipes.command_line",
)  # pure data: importable where torch is not wanted


# What ARCHITECTURE.md says


def rooms(text: str) -> list[str]:
    """The folders of ARCHITECTURE.md's table, from the ground up; a file of the root counts as one."""
    rows = re.findall(r"^\| (`[^|]*`) \|", text[text.index("| folder |") :].split("\n\n")[0], re.MULTILINE)
    return [name.replace("/", ".") for row in rows for name in re.findall(r"`([\w/]+)`", row)]


def room(module: str, order: list[str]) -> str | None:
    """The room that a module of ours is in."""
    inner = module.removeprefix(f"{PACKAGE}.")
    return next((name for name in order if f"{inner}.".startswith(f"{name}.")), None)


def modules(root: Path) -> dict[str, Path]:
    """Every module of the package; a folder's `__init__.py` goes by the name of the folder."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


# What the files do


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def written(module: str, path: Path) -> list[tuple[str, str, int, bool]]:
    """(name that is imported, module that it is imported from, line, inside a function?) for each import in the file."""
    found = []

    def visit(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    found.append((alias.name, alias.name, child.lineno, inside))
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                    base = ".".join([*package[: len(package) - child.level + 1], *filter(None, [child.module])])
                for alias in child.names:
                    found.append((f"{base}.{alias.name}", base, child.lineno, inside))
            elif not isinstance(child, ast.expr):  # no expression holds an import
                visit(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(parsed(path), False)
    return [entry for entry in found if entry[1].split(".")[0] == PACKAGE]


def imports(module: str, path: Path, known: dict[str, Path]) -> list[tuple[str, int, bool]]:
    """(imported module of ours, line, inside a function?) for each import in the file."""
    return [(full if full in known else base, line, inside) for full, base, line, inside in written(module, path)]


def behind(module: str, known: dict[str, Path], seen: frozenset[str] = frozenset()) -> set[str]:
    """The files that an import of `module` stands for: itself, or all that a facade exports."""
    if module not in known:
        return {module}
    if known[module].name != "__init__.py":
        return {module}
    if module in seen:
        return set()
    exported = (name for name, _, _ in imports(module, known[module], known))
    return set().union(*(behind(name, known, seen | {module}) for name in exported))


def arrows(root: Path) -> Iterator[tuple[str, str, int, bool]]:
    """(file, file that it imports, line, inside a function?), through facades."""
    known = modules(root)
    for module, path in known.items():
        if path.name != "__init__.py":
            for target, line, inside in imports(module, path, known):
                yield from ((module, name, line, inside) for name in sorted(behind(target, known)))


def in_order(edges: Iterable[tuple[str, str]]) -> list[str] | None:
    """Every name after those that it points to, or None where they go in a circle."""
    graph: dict[str, set[str]] = {}
    for source, target in edges:
        graph.setdefault(source, set()).add(target)
    try:
        return list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError:
        return None


def order_faults(root: Path) -> list[str]:
    known, order = modules(root), rooms((root / "ARCHITECTURE.md").read_text())
    files = [name for name, path in known.items() if path.name != "__init__.py"]
    faults = [f"ARCHITECTURE.md has no room for {name}" for name in files if room(name, order) is None]
    faults += [
        f"ARCHITECTURE.md lists {name}, which is empty" for name in order if name not in {room(f, order) for f in files}
    ]
    sound = []
    for module, name, line, inside in arrows(root):
        where, here, there = f"{known[module].relative_to(root)}:{line}", room(module, order), room(name, order)
        if inside:
            faults.append(f"{where} imports {name} inside a function")
        if name not in known or there is None:
            faults.append(f"{where} imports {name}, which is no file of a room")
        elif here is not None and order.index(there) > order.index(here):
            faults.append(f"{where} imports {name}, which is above it: {there} comes after {here}")
        else:
            sound.append((module, name))
    folders = {tuple(name if name.count(".") == 1 else name.rpartition(".")[0] for name in pair) for pair in sound}
    faults += ["files import each other in a circle"] * (in_order(sound) is None)
    return faults + ["folders import each other in a circle"] * (in_order(x for x in folders if x[0] != x[1]) is None)


# The root

ENTRIES = "__init__.py _core checkpoint choice data debugging errors.py hardware lax.py nn ops optim pipelined.py plan precision py.typed random recipes schedules tree.py".split()


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in (root / PACKAGE).iterdir() if path.name != "__pycache__")


def facade_faults(root: Path) -> list[str]:
    """An `__init__.py` holds a docstring, imports and `__all__`, nothing else."""
    faults = []
    for path in modules(root).values():
        if path.name != "__init__.py":
            continue
        for node in parsed(path).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            dunder = isinstance(node, ast.Assign) and all(
                isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets
            )
            if not (isinstance(node, ast.Import | ast.ImportFrom) or docstring or dunder):
                faults.append(f"{path.relative_to(root)}:{node.lineno} does more than export")
    return faults


def private_faults(root: Path) -> list[str]:
    """Private names of torch outside the one door."""
    return private_names.faults(
        {
            path.relative_to(root): parsed(path)
            for module, path in modules(root).items()
            if not f"{module}.".startswith(f"{DOOR}.")
        }
    )


# The package


@pytest.fixture(scope="module", autouse=True)
def _forget():
    """The trees of all files are a million objects, which every later collection of garbage would visit."""
    yield
    parsed.cache_clear()
    written.cache_clear()


def test_every_file_imports_only_from_its_room_and_those_below() -> None:
    assert order_faults(ROOT) == []


def test_the_listing_of_the_package_is_its_public_face() -> None:
    assert entries(ROOT) == ENTRIES


def test_facades_only_export() -> None:
    assert facade_faults(ROOT) == []


def test_private_names_of_torch_are_used_in_one_file() -> None:
    assert private_faults(ROOT) == []


def test_the_private_names_that_count_as_ours_are_ours_alone() -> None:
    trees = [parsed(path) for path in modules(ROOT).values()]
    assert private_names.own_faults(trees, private_names.OWN) == []
    planted = {"_schema": "Array", "_donated": "Nobody", "_nowhere": "Array"}
    assert private_names.own_faults(trees, planted) == [
        "torch has a _schema too",
        "_schema of Array is nowhere",
        "_donated of Nobody is nowhere",
        "_nowhere of Array is nowhere",
    ]


# A package without its facade: the files themselves, as `import vescale_fn` would never let them be.
BARE = """
import importlib, sys, types
package = types.ModuleType("vescale_fn")
package.__path__ = [sys.argv[1]]
sys.modules["vescale_fn"] = package
for name in sys.argv[2:]:
    importlib.import_module(name)
    if name in {light!r} and "torch" in sys.modules:
        sys.exit(name + " imports torch")
"""


def bare(root: Path, whole: bool = True) -> str:
    """Imports the files (or the light ones alone), each after those that it imports, in a fresh process and without the facade; what went wrong, or ""."""
    light = {f"{PACKAGE}.{name}" for name in LIGHT}
    order = in_order((module, name) for module, name, _, _ in arrows(root) if ".recipes" not in module) or []
    order = sorted(
        {*light, *order} & set(modules(root)),
        key=lambda name: (name not in light, order.index(name) if name in order else 0),
    )
    code = BARE.replace("{light!r}", repr(light))
    command = [sys.executable, "-c", code, str(root / PACKAGE), *(order if whole else light & set(order))]
    return subprocess.run(command, capture_output=True, text=True, timeout=300).stderr.strip()


def test_light_files_do_not_import_torch_and_no_file_needs_the_facade() -> None:
    assert bare(ROOT) == ""


# The checks, seen failing

LISTING = """\
| folder | what it is |
|---|---|
| `_core/torch_internals` | the door |
| `_core/base` | messages |
| `spec` | data |
| `ops`, `array` | what users call |

"""

SOUND = {
    "ARCHITECTURE.md": LISTING,
    "vescale_fn/__init__.py": '"""Exports."""\nfrom vescale_fn.array import f\n__all__ = ["f"]\n',
    "vescale_fn/_core/base/errors.py": "class E(Exception): ...\n",
    "vescale_fn/_core/torch_internals/door.py": "from torch._C import x\n",
    "vescale_fn/spec.py": "from vescale_fn._core.torch_internals import door\nfrom vescale_fn._core.base import errors\n",
    "vescale_fn/ops/__init__.py": "from vescale_fn.ops.rules import r\n",
    "vescale_fn/ops/other.py": "from vescale_fn.ops import rules\n",
    "vescale_fn/ops/inner/__init__.py": "",
    "vescale_fn/ops/inner/one.py": "from vescale_fn.ops.low import x\n",
    "vescale_fn/ops/low.py": "x = 1\n",
    "vescale_fn/ops/rules.py": "import torch\nfrom vescale_fn.spec import errors\nr = torch.ops.aten._softmax\n",
    "vescale_fn/array.py": (
        "from vescale_fn.ops import r\n"
        "class A:\n    _mine = 1\n    def f(self): return self._mine\n"
        "def f(x): return r._b, x._donated\n"
    ),
}

FAULTS = {
    "points back": (
        order_faults,
        "vescale_fn/_core/base/errors.py",
        "from vescale_fn import spec",
        "imports vescale_fn.spec, which is above it: spec comes after _core.base",
    ),
    "points back through a facade": (
        order_faults,
        "vescale_fn/spec.py",
        "from vescale_fn.ops import r",
        "imports vescale_fn.ops.rules, which is above it",
    ),
    "points back, relatively": (order_faults, "vescale_fn/spec.py", "from . import array", "above it"),
    "imports itself through the top": (order_faults, "vescale_fn/spec.py", "import vescale_fn as vfn", "above it"),
    "inside a function": (
        order_faults,
        "vescale_fn/array.py",
        "def g():\n    from vescale_fn._core.base import errors",
        "inside a function",
    ),
    "in a circle": (
        order_faults,
        "vescale_fn/ops/rules.py",
        "from vescale_fn.ops import other",
        "files import each other in a circle",
    ),
    "folders in a circle": (
        order_faults,
        "vescale_fn/ops/rules.py",
        "from vescale_fn.ops.inner import one",
        "folders import each other in a circle",
    ),
    "no room": (order_faults, "vescale_fn/new.py", "x = 1", "ARCHITECTURE.md has no room for vescale_fn.new"),
    "listed, not there": (
        order_faults,
        "ARCHITECTURE.md",
        LISTING.replace("`spec`", "`gone`, `spec`"),
        "ARCHITECTURE.md lists gone, which is empty",
    ),
    "a facade that computes": (facade_faults, "vescale_fn/ops/__init__.py", "x = 1 + 1", "does more than export"),
    "private import": (private_faults, "vescale_fn/spec.py", "import torch._C", "uses torch._C"),
    "private from": (private_faults, "vescale_fn/spec.py", "from torch.testing._internal import x", "_internal"),
    "private attribute": (
        private_faults,
        "vescale_fn/spec.py",
        "import torch.distributed as dist\ndist._mine",
        "torch.distributed._mine",
    ),
    "private operator": (
        private_faults,
        "vescale_fn/spec.py",
        "import torch\no = torch.ops\nx = o._c10d.y",
        "torch.ops._c10d",
    ),
    "private name of something else": (
        private_faults,
        "vescale_fn/spec.py",
        "import os\nos._exit(x()._tree)",
        "(...)._tree",
    ),
    "private method": (private_faults, "vescale_fn/spec.py", "def h(x): return x._local_tensor", "_local_tensor"),
    "private name that a file of ours stores": (
        private_faults,
        "vescale_fn/array.py",
        "def g(x, y): x._local_tensor, x._spec = y\nclass B:\n    def h(self, op): self._schema = op._schema",
        "array.py:8 uses (...)._schema",
    ),
    "private store": (private_faults, "vescale_fn/array.py", "def g(x, y): x._spec = y", "_spec"),
    "private name by a string": (
        private_faults,
        "vescale_fn/spec.py",
        "import operator\ng = operator.attrgetter('shape', '_spec.mesh')",
        "(...)._spec",
    ),
    "private key": (private_faults, "vescale_fn/spec.py", "def h(x): return vars(x)['_parameters']", "_parameters"),
    "private module by a string": (
        private_faults,
        "vescale_fn/spec.py",
        "m = 'torch._dynamo.exc'",
        "torch._dynamo.exc",
    ),
    "private name of a base of torch's": (
        private_faults,
        "vescale_fn/array.py",
        "class C(A):\n    def h(self): return self._local_tensor",
        "self of C._local_tensor",
    ),
    "torch in a light file": (
        lambda root: [bare(root, whole=False)],
        "vescale_fn/_core/base/errors.py",
        "import torch",
        "vescale_fn._core.base.errors imports torch",
    ),
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


def test_a_sound_package_has_no_fault(tmp_path: Path) -> None:
    write(tmp_path, SOUND)
    assert order_faults(tmp_path) + facade_faults(tmp_path) + private_faults(tmp_path) == []
    assert bare(tmp_path, whole=False) == ""


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    check, path, text, message = FAULTS[name]
    whole = text if path.endswith(".md") else SOUND.get(path, "") + text + "\n"
    faults = check(write(tmp_path, SOUND | {path: whole}))
    assert any(message in fault for fault in faults), faults
