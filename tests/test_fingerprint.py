"""fingerprint: what decides which bits come out, in checkpoints, and compared by those who load them."""

import json
import re
import sys
import warnings
import zlib

import pytest
import torch

import vescale_fn as vfn
from vescale_fn._core.base.fingerprint import differences
from vescale_fn.errors import CheckpointError


def test_it_names_what_decides():
    found = vfn.fingerprint()
    assert found == vfn.fingerprint() == json.loads(json.dumps(found))
    assert (found["torch"], found["vescale_fn"], found["gpus"]) == (torch.__version__, vfn.__version__, None)
    assert found["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert found["threads"] == torch.get_num_threads()
    assert found["processor"]
    assert found["blas"]


def test_settings_and_the_environment_are_in_it(monkeypatch):
    before = vfn.fingerprint()
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(threads + 1)
    torch.set_float32_matmul_precision("medium")
    try:
        after = vfn.fingerprint()
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(matmul)
    found = differences(before, after)
    assert f"threads: {threads}, and here {threads + 1}" in found
    assert f"torch.set_float32_matmul_precision: {matmul}, and here medium" in found
    assert any(re.fullmatch("MKL_CBWR: .*, and here COMPATIBLE", line) for line in found)
    assert vfn.fingerprint()["threads"] == threads


def changed(monkeypatch, **to):
    monkeypatch.setattr(sys.modules["vescale_fn.checkpoint.load"], "fingerprint", lambda: vfn.fingerprint() | to)


def test_an_exact_load_raises_where_it_differs(tmp_path, monkeypatch):
    tree = {"w": torch.ones(2)}
    vfn.save(tmp_path / "one", tree)
    assert vfn.digest(vfn.load(tmp_path / "one", exact=True)) == vfn.digest(tree)
    changed(monkeypatch, torch="1.0", processor="abacus")
    with pytest.raises(CheckpointError) as caught:
        vfn.load(tmp_path / "one", exact=True)
    here = vfn.fingerprint()
    assert str(caught.value) == (
        f"load: the bits of what goes on from {tmp_path / 'one'} may be others than those of the run that saved it\n"
        f"  * torch: {here['torch']}, and here 1.0\n"
        f"  * processor: {here['processor']}, and here abacus\n"
        "  Instead: the same versions, kind of processor and settings; or exact=False"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a run that has promised nothing there is nothing to say
        vfn.load(tmp_path / "one")


def test_what_does_not_say_it_is_not_exact(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    vfn.load(tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="it does not say by what"):
        vfn.load(tmp_path / "w.pt", exact=True)
    manager = vfn.checkpoint.Manager(tmp_path / "run")
    manager.save(1, {"w": torch.ones(2)})
    manager.restore(exact=True)
    file = tmp_path / "run" / "step-1" / "vescale_fn.json"
    lines = file.read_bytes().split(b"\n")
    there = json.loads(lines[1])
    del there["fingerprint"]  # as of an earlier vescale_fn
    lines[1] = json.dumps(there).encode()
    outer = json.loads(lines[0])
    outer["crc32"][0] = zlib.crc32(lines[1])
    lines[0] = json.dumps(outer).encode()
    file.write_bytes(b"\n".join(lines))
    assert manager.restore()["w"].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match="it does not say by what"):
        manager.restore(exact=True)


def test_a_deterministic_run_that_goes_on_elsewhere_is_warned(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys.modules["vescale_fn.checkpoint.save"], "fingerprint", lambda: vfn.fingerprint() | {"virtual": 8}
    )
    vfn.save(tmp_path / "one", {"w": torch.ones(2)})
    with pytest.warns(UserWarning, match="virtual: 8, and here None") as caught:
        vfn.load(tmp_path / "one")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vfn.load(tmp_path / "one", exact=False)
        changed(monkeypatch, virtual=8)
        vfn.load(tmp_path / "one")
        vfn.load(tmp_path / "one", exact=True)


def damaged(folder):
    vfn.save(folder, {"w": torch.ones(2)})
    try:
        if torch.distributed.get_rank() == 1:
            torch.set_num_threads(3)
        vfn.load(folder, exact=True)
    except CheckpointError as error:
        return re.sub(r"threads: \d+", "threads: N", str(error)).replace(str(folder), "FOLDER")
    finally:
        torch.set_num_threads(1)


def test_all_ranks_raise_where_one_differs(gloo, tmp_path):
    said = gloo(2, damaged, tmp_path / "one")
    assert (
        said
        == [
            "on rank 1 of 2: load: the bits of what goes on from FOLDER may be others than those of the run that saved it\n"
            "  * threads: N, and here 3\n"
            "  Instead: the same versions, kind of processor and settings; or exact=False"
        ]
        * 2
    )
