"""The fast tests on several releases of torch, each in an environment of its own; prints the table of CONTRIBUTING.md.

    python tests/on_each_torch.py --folder ~/environments 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0

An environment, ``torch-2.11.0`` in that folder, is made where it is not there yet, which downloads that torch.
"""

import argparse
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = (
    "torch",
    "vescale_fn",
    "ruff",
    "pyright",
)  # the release that is asked for; the checkout itself; no tests need the others


def requirements() -> list[str]:
    """What the package and its tests need beside torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for extra in extras if extra != "oracle" for line in extras[extra])]
    return [line for line in wanted if re.match(r"\w+", line)[0] not in LEFT_OUT]


def environment(folder: Path, release: str) -> Path:
    """The Python of the environment with this torch, which is made if need be."""
    home = folder / f"torch-{release}"
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile", f"torch=={release}", *requirements()]
        subprocess.run(install, check=True)
    return python


def result(python: Path, options: list[str]) -> str:
    """The last line of the tests there: ``1200 passed, 3 skipped``."""
    command = [python, "-m", "pytest", "-n", "auto", "-q", "-m", "fast", "-p", "no:cacheprovider", *options]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    for line in ran.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            print(line, file=sys.stderr)
    last = ran.stdout.splitlines()[-1] if ran.stdout else ran.stderr[-500:]
    return re.sub(r" in \d.*", "", last)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="+", metavar="RELEASE", help="of torch: 2.14.1")
    parser.add_argument("--folder", type=Path, required=True, help="where the environments are")
    parser.add_argument("--pytest", default="", help='more options of pytest: "-k shard_map"')
    given = parser.parse_args()
    print("| torch | fast tests |\n|---|---|", flush=True)
    found = []
    for release in given.releases:
        found.append(result(environment(given.folder, release), given.pytest.split()))
        print(f"| {release} | {found[-1]} |", flush=True)
    return int(any("failed" in line or "error" in line or "passed" not in line for line in found))


if __name__ == "__main__":
    sys.exit(main())
