"""A trace of what all ranks do, on one clock, for a browser."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from .._core.base import context
from .._core.base.errors import VfnError
from .._core.base.front_door import no_attributes, public
from .._core.base.messages import described, report
from .._core.distributed import ranks
from .._core.distributed.communicator import coordinates

_SHOWN = {"X", "B", "E", "i", "s", "f"}  # spans, marks and arrows; torch's own processes and threads get other names


@contextlib.contextmanager
@public("profile")
def profile(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write a Chrome trace of what runs inside a ``with`` block, one row a rank; it must be entered on every rank.

    Open it in https://ui.perfetto.dev or chrome://tracing. A row is named after the rank's place in the current mesh
    (`use_mesh`), and holds its threads and, on a GPU, its streams. All rows share one clock, as far as the machines'
    clocks agree. Simulated ranks run in one process, and have one row together. Name parts of a program by
    `torch.profiler.record_function`. The first rank writes the file when the block ends. Where it ends by an exception,
    each rank writes its own row, into ``rank0.trace.json`` and so on.

    Args:
        path: of the file, whose folder is made; one that ends in ``.gz`` is compressed.

    Raises:
        VfnError: `path` is no path.

    Source: `jax.profiler.trace`, `torch.profiler`.

    >>> import json, pathlib, tempfile, torch, vescale_fn as vfn
    >>> path = pathlib.Path(tempfile.mkdtemp(), "trace.json")
    >>> with vfn.profile(path), torch.profiler.record_function("step 1"):
    ...     y = torch.ones(3).exp()
    >>> events = json.loads(path.read_text())["traceEvents"]
    >>> {"step 1", "aten::exp"} <= {event["name"] for event in events}
    True
    """
    if not isinstance(path, (str, os.PathLike)):
        raise VfnError(
            report("profile", f"path must be a path, but it is {described(path)}", fix='profile("trace.json")')
        )
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    recorder = torch.profiler.profile(activities=activities, acc_events=True)  # one cycle, of which nothing is cleared
    rank, count = (dist.get_rank(), dist.get_world_size()) if ranks.has_process_group() else (0, 1)
    recorder.start()
    try:
        yield
    except BaseException:  # others may be where this rank will never come: nothing is gathered
        recorder.stop()
        path = Path(path)
        _write(path if count == 1 else path.with_name(f"rank{rank}.{path.name}"), _row(recorder, rank, _name(rank)))
        raise
    recorder.stop()
    rows: list[Any] = [_row(recorder, rank, _name(rank))] * count
    if count > 1:
        dist.gather_object(rows[0], rows if rank == 0 else None)
    if rank == 0:
        _write(Path(path), [event for row in rows for event in row])


def _name(rank: int) -> str:
    if (count := context.simulated()) is not None:
        return f"{count} simulated ranks"
    mesh = context.current_mesh()
    if mesh is None or rank not in mesh.mesh.flatten().tolist():
        return f"rank {rank}"
    place = ", ".join(f"{axis}={i}" for axis, i in coordinates(mesh, mesh.mesh.flatten().tolist().index(rank)).items())
    return f"rank {rank} ({place})"


def _row(recorder: torch.profiler.profile, rank: int, name: str) -> list[dict[str, Any]]:
    """The events of this rank, in microseconds since the epoch."""
    with tempfile.TemporaryDirectory(prefix="vescale_fn-") as folder:
        file = Path(folder, "trace.json")
        recorder.export_chrome_trace(str(file))
        trace = json.loads(file.read_text())
    begin = trace.get("baseTimeNanoseconds", 0) / 1000
    threads: dict[Any, int] = {}
    row = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
    ]
    for event in trace["traceEvents"]:
        if event["ph"] not in _SHOWN or not isinstance(event["pid"], int):
            continue
        on_device = event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
        thread = f"stream {event['tid']}" if on_device else f"thread {event['tid']}"
        event |= {"pid": rank, "tid": threads.setdefault(thread, len(threads)), "ts": event["ts"] + begin}
        if "id" in event:
            event["id"] = f"{rank}.{event['id']}"  # an arrow of one rank does not end in another
        row.append(event)
    return row + [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": i, "args": {"name": thread}}
        for thread, i in threads.items()
    ]


def _write(path: Path, events: list[dict[str, Any]]) -> None:
    first = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first, 3)
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


no_attributes("profile", profile)
