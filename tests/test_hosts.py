"""Ranks on two hosts, whose cable is cut in the middle of a step, and one of which goes and comes back: see hosts.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_two_hosts():
    """In namespaces of their own, where this machine permits them; else the second host's processes are stopped."""
    permitted = subprocess.run(["unshare", "-rn", "ip", "link", "add", "a", "type", "veth"], capture_output=True)
    cabled = permitted.returncode == 0
    command = [*["unshare", "-rn"] * cabled, sys.executable, str(HERE / "hosts.py"), *["cabled"] * cabled]
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = ("host0", "cable"), ("host1", "cable1")
    if not cabled:
        names = ((os.uname().nodename, "lo"),) * 2
    places = [(host, local, cable) for host, cable in names for local in range(4)]
    if not cabled:
        places = [(names[0][0], rank, "lo") for rank in range(8)]
    assert [tuple(place) for *place, _ in found["back"]] == places
    assert [total for *_, total in found["back"]] == [8.0] * 8

    # Cut: what is waited for does not come, so it takes the timeout of the collective, which is 2 seconds.
    said, seconds = found["cut"]["said"], found["cut"]["seconds"]
    rank, line = re.search(
        r"^launch: rank (\d) of 8 raised RuntimeError.*?\n    (.*?)  # the step", said, re.DOTALL
    ).groups()
    assert int(rank) < 4, "a rank on the host that is seen from here"
    assert line == "total(torch.ones(8))"
    assert "vfn.psum" in said
    assert "Timed out waiting 2000ms" in said
    assert set(re.findall(r"(?:After it,|Meanwhile) rank (\d)", said)) == {str(i) for i in range(8)} - {rank}
    assert said.count(f"did not answer, on {names[1][0]}") == 4
    assert 1.5 < seconds < 60
    assert found["cut"]["left"] == [], "on the other host its ranks have ended by themselves"

    # Gone: the timeout is a minute, but a machine that says nothing at all is noticed before.
    said, seconds = found["gone"]["said"], found["gone"]["seconds"]
    first, *others = said.splitlines()
    assert re.fullmatch(
        rf"launch: rank \d of 8 was lost with the connection to {names[1][0]}; the other ranks were ended", first
    )
    assert all(line.startswith(("After it, rank ", "Meanwhile rank ")) for line in others)
    assert seconds < 55
