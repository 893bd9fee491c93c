"""The frame around the code: formatter, linter, type checker, and the commands that README.md promises."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from whole import WHOLE

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def run(*command: str, cwd: Path = ROOT) -> str:
    ran = subprocess.run(
        command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert ran.returncode == 0, f"{' '.join(command)} exits with {ran.returncode}\n{ran.stdout}"
    return ran.stdout


def command(marker: str) -> str:
    """The shell block below `<!-- marker -->` in README.md."""
    block = re.search(rf"<!-- {marker} -->\n```sh\n(.*?)\n```", README, re.DOTALL)
    assert block, f"README.md has no sh block under <!-- {marker} -->"
    return block.group(1)


def test_ruff_finds_nothing() -> None:
    run(sys.executable, "-m", "ruff", "check", "--no-cache", ".")


def test_ruff_would_format_nothing() -> None:
    run(sys.executable, "-m", "ruff", "format", "--check", "--no-cache", ".")


def changed() -> list[str]:
    """The files of the package that the last five commits have changed, or that are not committed yet; on the whole, and where
    git does not tell, all of them."""
    ask = (["diff", "--name-only", "--diff-filter=d", "HEAD~5"], ["ls-files", "--others", "--exclude-standard"])
    told = [
        subprocess.run(["git", *words, "--", "vescale_fn"], cwd=ROOT, capture_output=True, text=True) for words in ask
    ]
    if WHOLE or any(each.returncode for each in told):
        return ["vescale_fn"]
    return [name for each in told for name in each.stdout.splitlines() if name.endswith(".py")]


def test_pyright_finds_nothing_here_and_every_mistake_of_a_user() -> None:
    """In one start, of what has changed: the whole package takes it as long as hundreds of tests."""
    user = ROOT / "tests" / "users_program.py"
    ran = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *changed(), str(user)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    ours, wrong, types = [], set(), {}
    for said in json.loads(ran.stdout)["generalDiagnostics"]:
        line = said["range"]["start"]["line"]
        if said["file"] != str(user):
            ours += [f"{said['file']}:{line + 1} {said['message']}"] if said["severity"] == "error" else []
        elif said["severity"] == "information":
            types[line] = said["message"].rsplit(" is ", 1)[1].strip('"')
        else:
            wrong.add(line)
    assert ours == []
    lines = dict(enumerate(user.read_text().splitlines()))
    assert wrong == {n for n, line in lines.items() if line.endswith("# wrong")}
    assert types == {n: line.rsplit("  # ", 1)[1] for n, line in lines.items() if line.startswith("reveal_type")}


def test_readme_has_one_command_to_run_and_one_to_test() -> None:
    assert command("main job").splitlines() == ["pip install -e .", "python -m vescale_fn.recipes.train"]
    assert command("test command").splitlines() == ['pip install -e ".[test]"', "python -m pytest -n auto"]


@pytest.mark.parametrize(("script", "status"), [("true", 0), ("true\nfalse\ntrue", 1), ("python -c 'exit(7)'", 7)])
def test_ci_runs_the_test_command_of_the_readme_and_passes_its_status_on(
    script: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "README.md").write_text(f"text\n\n<!-- test command -->\n```sh\n{script}\n```\n\n```sh\nexit 9\n```\n")
    python = tmp_path / "python"  # pip, which the scripts do not use, is most of the time of an environment
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@" --without-pip\n')
    python.chmod(0o755)
    ran = subprocess.run(
        [str(tmp_path / ".ci" / "run")],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHON": str(python), "TMPDIR": str(tmp_path)},
    )
    assert (ran.returncode, ran.stdout) == (status, f"+ {script}\n"), ran.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tmp.")] == []  # the venv is gone


def test_ci_refuses_a_readme_without_a_test_command(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "README.md").write_text("nothing\n")
    ran = subprocess.run([str(tmp_path / ".ci" / "run")], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (
        2,
        ".ci/run: README.md holds no ```sh block under <!-- test command -->\n",
    )


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "vescale_fn" / "py.typed").exists()


def test_nothing_names_the_machine_it_was_written_on() -> None:
    listed = run("git", "ls-files", "-z") if (ROOT / ".git").exists() else ""
    names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    if not names:
        pytest.skip("not a git checkout")
    local = re.compile(r"/(?:home|Users|root)/\w|/work/\w")
    found = [name for name in names if local.search((ROOT / name).read_text(errors="ignore"))]
    assert [name for name in found if name != "tests/test_project.py"] == []
