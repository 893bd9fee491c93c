"""`vfn.profile`: a trace with a row for each rank, on one clock."""

import gzip
import json

import pytest
import torch
from torch.profiler import record_function

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import VfnError


def rows_of(events):
    return {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}


def _work(path):
    mesh = vfn.make_mesh((2,), ("dp",))
    x = torch.arange(6.0).view(2, 3)
    with vfn.use_mesh(mesh), vfn.profile(path):
        with record_function("the step"):
            total = vfn.shard(x, mesh, P("dp")).exp().sum().item()
    return total


def test_a_row_for_each_rank_on_one_clock(gloo, tmp_path):
    path = tmp_path / "new" / "trace.json.gz"
    totals = gloo(2, _work, path)
    assert totals[0] == totals[1] == pytest.approx(torch.arange(6.0).exp().sum().item())
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert rows_of(events) == {0: "rank 0 (dp=0)", 1: "rank 1 (dp=1)"}
    steps = {e["pid"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "the step"}
    assert steps.keys() == {0, 1}
    assert max(start for start, _ in steps.values()) < min(
        end for _, end in steps.values()
    )  # they waited for each other
    assert min(e["ts"] for e in events if "ts" in e) == 0
    for rank, (start, end) in steps.items():
        inside = [e["name"] for e in events if e["pid"] == rank and start <= e.get("ts", -1) < end]
        assert "aten::exp" in inside
        assert any("all_reduce" in name or "allreduce" in name for name in inside)


def test_simulated_ranks_have_one_row_and_an_exception_is_no_loss(tmp_path):
    path = tmp_path / "trace.json"
    with vfn.simulate(2), pytest.raises(ZeroDivisionError), vfn.profile(path):
        vfn.shard(torch.ones(2), vfn.make_mesh((2,), ("dp",)), P("dp")).exp()
        raise ZeroDivisionError
    events = json.loads(path.read_text())["traceEvents"]
    assert rows_of(events) == {0: "2 simulated ranks"}
    assert sum(e["name"] == "aten::exp" for e in events) >= 2


def test_an_exception_on_all_ranks_gathers_nothing(gloo, tmp_path):
    def fail(path):
        with vfn.profile(path):
            torch.ones(2).exp()
            raise ZeroDivisionError

    def run(path):
        with pytest.raises(ZeroDivisionError):
            fail(path)

    gloo(2, run, tmp_path / "trace.json")
    for rank in range(2):
        events = json.loads((tmp_path / f"rank{rank}.trace.json").read_text())["traceEvents"]
        assert rows_of(events) == {rank: f"rank {rank}"}
        assert any(e["name"] == "aten::exp" for e in events)


def test_a_path_is_needed():
    with pytest.raises(VfnError) as error, vfn.profile(3):
        pass
    assert str(error.value) == 'profile: path must be a path, but it is the int 3\n  Instead: profile("trace.json")'
