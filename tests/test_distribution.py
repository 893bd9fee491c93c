"""What is published: the source distribution holds all that its tests need, the wheel is for any Python of its platform."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
UNTRACKED = shutil.ignore_patterns(".git", ".venv", "build", "dist", "__pycache__", "*.egg-info", "*.so", ".*_cache")


def run(*command: str, cwd: Path) -> str:
    """What a command prints, with no checkout of the project on its path."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    ran = subprocess.run(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert ran.returncode == 0, (
        f"{' '.join(command)} exits with {ran.returncode}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
    )
    return ran.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, built from a copy of the checkout and unpacked."""
    folder = tmp_path_factory.mktemp("distribution")
    shutil.copytree(ROOT, folder / "checkout", ignore=UNTRACKED)
    run(sys.executable, "-c", BUILD, "build_sdist", str(folder), cwd=folder / "checkout")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def test_the_wheel_of_the_source_distribution_runs_on_any_python(unpacked: Path, tmp_path: Path) -> None:
    run(sys.executable, "-c", BUILD, "build_wheel", str(tmp_path), cwd=unpacked)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        packed.extractall(tmp_path / "site")
    assert {"vescale_fn/py.typed", "vescale_fn/recipes/README.md"} <= names
    assert "vescale_fn/random/backends/_native.so" in names or not shutil.which("cc")
    assert {name for name in names if name.endswith(".so")} <= {"vescale_fn/random/backends/_native.so"}
    code = "import vescale_fn as vfn; print(vfn.__file__, vfn.random.backend(), vfn.random.key(0))"
    where, backend, *_ = run(sys.executable, "-c", code, cwd=tmp_path / "site").split()
    assert where.startswith(str(tmp_path))
    assert backend.startswith("c-") or not shutil.which("cc")


def test_the_source_distribution_passes_its_tests(unpacked: Path) -> None:
    """A few files of them, and without xdist; that nothing is left out is compared file by file."""
    tracked = {
        path.relative_to(ROOT)
        for part in ("tests", "notebooks", "benchmarks", ".ci", "docs")
        for path in (ROOT / part).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and ".ipynb_checkpoints" not in path.parts
    }
    assert {str(path) for path in tracked if not (unpacked / path).exists()} == set()
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "fast and not gloo"]
    files = ["tests/test_spec.py", "tests/test_errors.py", "tests/test_random_mesh.py"]
    assert " passed" in run(sys.executable, "-m", "pytest", *options, *files, cwd=unpacked)


def test_the_native_library_is_the_only_compiled_file_that_is_looked_for() -> None:
    assert [path.name for path in (ROOT / "vescale_fn").rglob("*.so")] in ([], ["_native.so"])
