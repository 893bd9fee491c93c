"""`vfn.digest` of 256 MiB beside hashlib's sha256 of the same bytes, however the value lies; and what travels for it.

The mesh is simulated: this process reads the blocks of all 8 ranks, so that a rank of its own takes an eighth of the time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

import vescale_fn as vfn
from benchmarks.side_by_side import medians, publish
from vescale_fn import P

RANKS, SIZE = 8, 2**28
COLUMNS = ["value", "layout", "GiB/s", "of sha256", "bytes sent per MiB"]


def main() -> None:
    torch.set_num_threads(1)
    words = torch.randint(-(2**31), 2**31, (SIZE // 4,), dtype=torch.int32)
    x = words.view(torch.float32).view(-1, 1024)
    with vfn.simulate(RANKS):
        mesh = vfn.make_mesh((RANKS,), ("dp",))
        cases: dict[tuple[str, str], Any] = {
            ("f32[65536,1024]", "plain"): x,
            ("bf16[65536,2048]", "plain"): x.view(torch.bfloat16),
            ("f32[1024,65536]", "plain, transposed"): x.T,
            ("f32[65536,1024]", "P('dp')"): vfn.shard(x, mesh, P("dp")),
            ("f32[65536,1024]", "P(None, 'dp')"): vfn.shard(x, mesh, P(None, "dp")),
            ("f32[8388608,8]", "P(None, 'dp')"): vfn.shard(x.view(-1, 8), mesh, P(None, "dp")),
        }
        calls: dict[Any, Callable[[], Any]] = {None: lambda: hashlib.sha256(words.numpy()).digest()}
        calls |= {case: lambda value=value: vfn.digest(value) for case, value in cases.items()}
        times = medians(calls, rounds=5)
        rows: list[list[Any]] = [["the bytes", "hashlib.sha256", SIZE / 2**30 / times[None] * 1e6, 1.0, 0]]
        for case, value in cases.items():
            with vfn.comm_log() as log:
                vfn.digest(value)
            sent = sum(one.bytes for one in log) / (SIZE / 2**20)
            rows.append([*case, SIZE / 2**30 / times[case] * 1e6, times[None] / times[case], int(sent)])
    publish("digest", COLUMNS, rows)


if __name__ == "__main__":
    main()
