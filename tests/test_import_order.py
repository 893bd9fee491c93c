"""The files of ARCHITECTURE.md's reading order import only from files above them, and keep to one door for private names.

The checks are plain functions from a folder to a list of complaints, so that each can be seen failing on a small
package with a planted fault.
"""

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "vescale_fn"
DOOR = f"{PACKAGE}._core.torch_internals"  # the one folder that may use private torch names
LIGHT = tuple(
    f"_core.base.{name}" for name in ("errors", "messages", "tree")
)  # pure data: importable where torch is not wanted


# What the list says


def reading_order(text: str) -> list[str]:
    """Module names in the order of the block below `<!-- reading order -->`."""
    block = re.search(r"<!-- reading order -->\n```\w*\n(.*?)\n```", text, re.DOTALL)
    assert block, "ARCHITECTURE.md has no code block under <!-- reading order -->"
    order, folders = [], []
    for line in block.group(1).splitlines():
        entry = re.match(r"( *)(\w+)(\.py|/)(?= |$)", line)
        if entry is None:
            continue  # the description runs on
        indent, name, kind = len(entry.group(1)) // 2, entry.group(2), entry.group(3)
        folders = folders[:indent]
        if kind == "/":
            folders.append(name)
        else:
            order.append(".".join([*folders, name]))
    return [name for name in order if not name.endswith("__init__")]


def modules(root: Path) -> dict[str, Path]:
    """Every module of the package; a folder's `__init__.py` goes by the name of the folder."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


# What the files do


def imports(module: str, path: Path, known: dict[str, Path]) -> list[tuple[str, int, bool]]:
    """(imported module of ours, line, inside a function?) for each import in the file."""
    found = []

    def visit(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    found.append((alias.name, child.lineno, inside))
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                    base = ".".join([*package[: len(package) - child.level + 1], *filter(None, [child.module])])
                for alias in child.names:
                    full = f"{base}.{alias.name}"
                    found.append((full if full in known else base, child.lineno, inside))
            visit(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    visit(ast.parse(path.read_text()), False)
    return [entry for entry in found if entry[0].split(".")[0] == PACKAGE]


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


def order_faults(root: Path) -> list[str]:
    known, order = modules(root), reading_order((root / "ARCHITECTURE.md").read_text())
    files = {name for name, path in known.items() if path.name != "__init__.py"}
    faults = [f"{name} is not in the reading order of ARCHITECTURE.md" for name in sorted(files - set(order))]
    faults += [
        f"the reading order of ARCHITECTURE.md lists {name}, which is no file" for name in order if name not in files
    ]
    faults += [f"ARCHITECTURE.md lists {name} twice" for name in sorted(set(order)) if order.count(name) > 1]
    place = {name: index for index, name in enumerate(order)}
    for module in order:
        if module not in files:
            continue
        for target, line, inside in imports(module, known[module], known):
            where = f"{known[module].relative_to(root)}:{line}"
            if inside:
                faults.append(f"{where} imports {target} inside a function")
            for name in sorted(behind(target, known)):
                if name not in files:
                    faults.append(f"{where} imports {name}, which is no file")
                elif place.get(name, -1) >= place[module]:
                    faults.append(f"{where} imports {name}, which comes later in the reading order")
    return faults


# Folders

ENTRIES = "__init__.py _core checkpoint debugging errors.py nn ops optim plan precision py.typed random recipes tree.py".split()


def folder_faults(root: Path) -> list[str]:
    """The list goes through each folder once: then imports point one way between folders, too."""
    faults, seen = [], []
    for name in reading_order((root / "ARCHITECTURE.md").read_text()):
        folder = name.rpartition(".")[0]
        if folder in seen[:-1]:
            faults.append(f"ARCHITECTURE.md lists {name} apart from the rest of its folder")
        elif folder not in seen:
            seen.append(folder)
    return faults


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in (root / PACKAGE).iterdir() if path.name != "__pycache__")


def facade_faults(root: Path) -> list[str]:
    """An `__init__.py` holds a docstring, imports and `__all__`, nothing else."""
    faults = []
    for path in modules(root).values():
        if path.name != "__init__.py":
            continue
        for node in ast.parse(path.read_text()).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            dunder = isinstance(node, ast.Assign) and all(
                isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets
            )
            if not (isinstance(node, ast.Import | ast.ImportFrom) or docstring or dunder):
                faults.append(f"{path.relative_to(root)}:{node.lineno} does more than export")
    return faults


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(trees: Iterable[ast.AST]) -> set[str]:
    """Names that are defined, assigned or imported under that name somewhere in the package."""
    ours = {"_replace", "_fields", "_asdict", "_make"}  # of named tuples
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            ours.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            ours.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            ours.add(node.attr)
        elif isinstance(node, ast.alias):
            ours.add(node.asname or node.name.split(".")[-1])
    return ours


def private_uses(tree: ast.AST, ours: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of each private name of torch, and of each private attribute of a value that is not ours."""
    stands_for: dict[str, str] = {}  # a name in this file -> the module or function that it was imported as

    def dotted(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return stands_for.get(node.id)
        if isinstance(node, ast.Attribute):
            base = dotted(node.value)
            return base and f"{base}.{node.attr}"
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                stands_for[name.asname or name.name.split(".")[0]] = (
                    name.name if name.asname else name.name.split(".")[0]
                )
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for name in node.names:
                stands_for[name.asname or name.name] = f"{node.module}.{name.name}"
                yield node.lineno, f"{node.module}.{name.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = dotted(node.value) or ""
            if value.startswith("torch.ops"):  # aten = torch.ops.aten
                stands_for[node.targets[0].id] = value
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if name is not None:
                yield node.lineno, name
            elif _private(node.attr) and node.attr not in ours:
                yield node.lineno, f"torch.(...).{node.attr}"


def private_faults(root: Path) -> list[str]:
    """Private names of torch outside the one door. In `torch.ops.aten` a name is an operator's, however it begins."""
    trees = {module: ast.parse(path.read_text()) for module, path in modules(root).items()}
    ours, faults = own_names(trees.values()), []
    for module, tree in trees.items():
        if f"{module}.".startswith(f"{DOOR}."):
            continue
        path = modules(root)[module].relative_to(root)
        for line, name in dict.fromkeys(private_uses(tree, ours)):
            parts = name.split(".")
            if parts[0] == "torch" and parts[1:3] != ["ops", "aten"] and any(map(_private, parts)):
                faults.append(f"{path}:{line} uses {name}; private names go through _core/torch_internals")
    return faults


# The package


def test_every_file_imports_only_from_files_above_it() -> None:
    assert order_faults(ROOT) == []


def test_each_folder_is_a_layer() -> None:
    assert folder_faults(ROOT) == []


def test_the_listing_of_the_package_is_its_public_face() -> None:
    assert entries(ROOT) == ENTRIES


def test_facades_only_export() -> None:
    assert facade_faults(ROOT) == []


def test_private_names_of_torch_are_used_in_one_file() -> None:
    assert private_faults(ROOT) == []


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


def bare(root: Path, order: list[str]) -> str:
    """Imports the files in their order, in a fresh process and without the facade; what went wrong, or ""."""
    code = BARE.replace("{light!r}", repr({f"{PACKAGE}.{name}" for name in LIGHT}))
    light_first = sorted(order, key=lambda name: name.removeprefix(f"{PACKAGE}.") not in LIGHT)
    ran = subprocess.run(
        [sys.executable, "-c", code, str(root / PACKAGE), *light_first], capture_output=True, text=True, timeout=300
    )
    return ran.stderr.strip()


def test_light_files_do_not_import_torch_and_no_file_needs_the_facade() -> None:
    order = [name for name in reading_order((ROOT / "ARCHITECTURE.md").read_text()) if ".recipes" not in name]
    assert bare(ROOT, order) == ""


# The checks, seen failing

LISTING = """\
<!-- reading order -->
```text
vescale_fn/
  __init__.py   exports
  _core/
    torch_internals/
      door.py   the door
    base/
      errors.py messages, which
                go on here
  spec.py       data
  ops/
    rules.py    the table
  array.py      arrays
```
"""

SOUND = {
    "ARCHITECTURE.md": LISTING,
    "vescale_fn/__init__.py": '"""Exports."""\nfrom vescale_fn.array import f\n__all__ = ["f"]\n',
    "vescale_fn/_core/base/errors.py": "class E(Exception): ...\n",
    "vescale_fn/_core/torch_internals/door.py": "from torch._C import x\n",
    "vescale_fn/spec.py": "from vescale_fn._core.torch_internals import door\nfrom vescale_fn._core.base import errors\n",
    "vescale_fn/ops/__init__.py": "from vescale_fn.ops.rules import r\n",
    "vescale_fn/ops/rules.py": "import torch\nfrom vescale_fn.spec import errors\nr = torch.ops.aten._softmax\n",
    "vescale_fn/array.py": "from vescale_fn.ops import r\ndef f(self): return self._mine\nclass A: _mine = 1\n",
}

FAULTS = {
    "points back": (
        order_faults,
        "vescale_fn/_core/base/errors.py",
        "from vescale_fn import spec",
        "spec, which comes later",
    ),
    "points back through a facade": (
        order_faults,
        "vescale_fn/spec.py",
        "from vescale_fn.ops import r",
        "imports vescale_fn.ops.rules, which comes later",
    ),
    "points back, relatively": (order_faults, "vescale_fn/spec.py", "from . import array", "comes later"),
    "imports itself through the top": (order_faults, "vescale_fn/spec.py", "import vescale_fn as vfn", "comes later"),
    "inside a function": (
        order_faults,
        "vescale_fn/array.py",
        "def g():\n    from vescale_fn._core.base import errors",
        "inside a function",
    ),
    "not listed": (order_faults, "vescale_fn/new.py", "x = 1", "vescale_fn.new is not in the reading order"),
    "listed, not there": (
        order_faults,
        "ARCHITECTURE.md",
        LISTING.replace("  spec.py", "  gone.py       x\n  spec.py"),
        "lists vescale_fn.gone, which is no file",
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
    "torch in a light file": (
        lambda root: [bare(root, reading_order(LISTING)[1:2])],
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
    assert bare(tmp_path, reading_order(LISTING)[1:2]) == ""


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    check, path, text, message = FAULTS[name]
    whole = text if path.endswith(".md") else SOUND.get(path, "") + text + "\n"
    faults = check(write(tmp_path, SOUND | {path: whole}))
    assert any(message in fault for fault in faults), faults
