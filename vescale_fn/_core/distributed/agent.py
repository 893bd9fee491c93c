"""The process that an engine starts for a rank, on whatever machine: it forks the rank and speaks for it to the caller.

It knows where the caller listens, and reports there; what to run, and as which rank, it is told. It sends on what the rank
says and prints, passes on signals, says how the rank ended, and ends it when the caller is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pickle
import signal
import socket
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from .. import torch_internals
from . import worker
from .launcher import Rank, end, fork, whereabouts
from .worker import Job, Settings

# A machine that has gone without a word is noticed after half a minute: seconds, seconds, a count, milliseconds.
KEEP_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000))
# What the engine runs; it needs nothing of ours until the caller has said where that is. The key is no argument, which
# every user of the machine could read. After Python's own library the caller's folders come first, if they exist here.
BOOT = """
import contextlib, importlib, os, socket, sys, time
from multiprocessing.connection import Client
host, port, index = sys.argv[1:]
pipe = Client((host, int(port)), authkey=bytes.fromhex(os.environ.pop("VESCALE_FN_KEY")))
with socket.socket(fileno=os.dup(pipe.fileno())) as end:
    for name, value in KEEP_ALIVE:
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    address = end.getsockname()[0]
meeting = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
pipe.send((int(os.environ.get(index, 0)), socket.gethostname(), address, meeting.getsockname()[1], time.monotonic()))
library, path, folder = pipe.recv()
for name in library:
    with contextlib.suppress(Exception):
        importlib.import_module(name)
path = [name or folder for name in path if os.path.exists(name or folder)]
sys.path[:] = [*path, *(name for name in sys.path if name not in path)]
with contextlib.suppress(OSError):
    os.chdir(folder)
from vescale_fn._core.distributed.agent import serve
serve(pipe, meeting, address)
os._exit(0)  # the rank is gone, and nothing else here needs an orderly end
""".replace("KEEP_ALIVE", repr(KEEP_ALIVE))


@dataclass(frozen=True)
class Order:
    """What an agent is to do."""

    body: bytes  # of `worker.dumps_call`
    settings: Settings
    rank: int
    local_rank: int
    local_size: int
    store: tuple[str, int]


def serve(pipe: connection.Connection, meeting: socket.socket, address: str) -> None:
    """The agent's part, from when it can import what the caller has."""
    torch_internals.preload()
    if (name := interface_of(address)) is not None:  # where the ranks reach the caller they reach each other
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    with tempfile.TemporaryDirectory(prefix="vescale_fn-") as folder:
        worker.end_with(os.getppid(), folder)
        order: Order = pipe.recv()
        prints = {number: os.pipe() for number in (1, 2)}
        job = Job(
            order.settings.nprocs,
            order.settings.device,
            order.settings.timeout,
            folder,
            {number: sink for number, (_, sink) in prints.items()},
            os.getpid(),
            local=(order.local_rank, order.local_size),
            store=(*order.store, meeting.detach() if order.rank == 0 else None),
        )
        ours = fork(worker.run_rank, order.rank, job, functools.partial(worker.call_pickled, order.body))
        for _, sink in prints.values():
            os.close(sink)
        for number in signal.SIGTERM, signal.SIGUSR2:  # with the second one submitit says that time is up
            signal.signal(number, lambda *_: ours.process.terminate())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # which reaches the caller too
        try:
            with contextlib.suppress(OSError, EOFError):  # the caller is gone
                speak_for(order.rank, ours, pipe, {source: number for number, (source, _) in prints.items()}, folder)
        finally:
            end([ours])


def speak_for(rank: int, ours: Rank, pipe: connection.Connection, prints: dict[int, int], folder: str) -> None:
    """Carry between the rank and the caller until the rank has ended."""
    said: dict[Any, Callable[[], None]] = {}

    def from_caller() -> None:
        what, value = pipe.recv()
        if what == "tell":
            with contextlib.suppress(OSError):
                ours.pipe.send(value)
        elif what == "signal":
            with contextlib.suppress(ProcessLookupError):
                os.kill(ours.process.pid, value)
        else:
            pipe.send_bytes(b"w" + pickle.dumps(whereabouts(folder, {rank: ours}, [rank])))

    def from_rank() -> None:
        try:
            pipe.send_bytes(b"m" + ours.pipe.recv_bytes())
        except EOFError:
            del said[ours.pipe]

    def from_print(source: int) -> None:
        chunk = os.read(source, 1 << 16)
        pipe.send_bytes(b"%d" % prints[source] + chunk)
        if not chunk:
            del said[source]

    said.update({source: functools.partial(from_print, source) for source in prints})
    said.update({pipe: from_caller, ours.pipe: from_rank})
    while True:
        ended = ours.process.exitcode is not None  # asked first: what it said last is there by then
        ready = connection.wait([*said, ours.process.sentinel], 0 if ended else None)
        for source in ready:
            if source in said:
                said[source]()
        if ended and not {source for source in ready if source in said and source is not pipe}:
            break
    pipe.send_bytes(b"e" + pickle.dumps(ours.process.exitcode))


def interface_of(address: str) -> str | None:
    """The network interface that has this address, where that can be asked."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(asking.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None
