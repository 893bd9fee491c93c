"""ARCHITECTURE.md's journeys pass the functions that it lists, in that order."""

import re
import sys
from pathlib import Path
from types import CodeType

import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = f"{Path(vfn.__file__).parent}/"
JOURNEYS = re.findall(r"<!-- journey: (.*?) -->\n```text\n(.*?)```", (ROOT / "ARCHITECTURE.md").read_text(), re.DOTALL)


def passed(run: CodeType, names: dict[str, object]) -> list[str]:
    """The functions of the package that a run calls, as `folder/file.function`, in the order of their first call."""
    calls: dict[CodeType, None] = {}

    def note(frame: object, event: str, _: object) -> None:
        if event == "call":
            calls.setdefault(frame.f_code)  # type: ignore[attr-defined]

    sys.setprofile(note)
    try:
        exec(run, names)
    finally:
        sys.setprofile(None)
    ours = [code for code in calls if code.co_filename.startswith(PACKAGE)]
    return [f"{code.co_filename.removeprefix(PACKAGE)[:-3]}.{code.co_qualname}" for code in ours]


@pytest.mark.fast
@pytest.mark.parametrize(("journey", "listed"), JOURNEYS, ids=[journey for journey, _ in JOURNEYS])
def test_a_journey(journey: str, listed: str, tmp_path: Path) -> None:
    run = compile(journey, "journey", "exec")
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("dp",))
        x, y = vfn.shard(torch.ones(8, 6), mesh, P("dp")), vfn.shard(torch.ones(6, 4), mesh, P())
        names = {"vfn": vfn, "P": P, "mesh": mesh, "a": torch.ones(12, 3), "x": x, "y": y, "path": tmp_path / "x"}
        calls = iter(passed(run, names))
    missing = [line.split()[0] for line in listed.splitlines() if line.split()[0] not in calls]
    assert missing == [], "in this order it is not passed"


def test_there_are_six_journeys() -> None:
    assert len(JOURNEYS) == 6
