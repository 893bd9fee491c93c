"""Ranks where this process cannot fork: a fresh interpreter is started, which imports once, and forks."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing import Pipe, connection
from typing import Any

from ..base.errors import RankError
from ..base.messages import report
from ..base.source_lines import is_library
from . import worker
from .failure_text import how_it_ended
from .launcher import NotStarted, Rank, read, run, told_to_end
from .streams import Streams
from .worker import Message, Settings

# A file beside the user's script may have the name of one of Python's own modules. So the interpreter starts with no
# folder of the user's on its path (-P, no PYTHONPATH), imports what the caller has of Python's library, and only then
# takes over the caller's path, on which everything else is found as it is there.
_BOOT = """
import contextlib, importlib, os, sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
library, path, pythonpath = pipe.recv()
for name in library:
    with contextlib.suppress(Exception):
        importlib.import_module(name)
sys.path[:] = path
if pythonpath is not None:
    os.environ["PYTHONPATH"] = pythonpath
from vescale_fn._core.distributed.fork_server import serve
serve(pipe)
"""


def run_fresh(call: Callable[[], Any], settings: Settings, reason: str) -> list[bytes]:
    """As `_rank_group.run`, in ranks that a fresh interpreter forks; `reason` says why this process does not."""
    body = pickled(call, reason, "call launch before this process uses CUDA or a process group")
    ours, theirs = Pipe()
    interpreter: list[Rank] = []
    with told_to_end(interpreter), Streams() as streams:
        command = [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno())]
        stdin = subprocess.DEVNULL if settings.stdin_rank is None else None
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=streams.ends.get(1),
            stderr=streams.ends.get(2),
            env={name: x for name, x in os.environ.items() if name != "PYTHONPATH"},
            pass_fds=[theirs.fileno()],
        )
        interpreter.append(Rank(process, ours))
        theirs.close()
        try:
            with contextlib.suppress(OSError):  # it has ended: so says the pipe
                ours.send((library(), sys.path, os.environ.get("PYTHONPATH")))
                ours.send((body, settings, os.getpid()))
            while not ours.poll():
                streams.wait([ours], 0.2)
            answer = read(ours)
            if answer is None:
                raise RankError(f"launch: the interpreter that was to start the ranks {how_it_ended(process.wait(5))}")
            if answer.kind == "failed":
                raise RankError(answer.text)
            return answer.value
        except KeyboardInterrupt:  # its ranks may have work to save; a second one ends them at once
            process.terminate()
            while process.poll() is None:
                streams.wait([], 0.1)
            raise
        finally:
            ours.close()
            process.terminate()  # it ends its ranks first
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def pickled(call: Callable[[], Any], reason: str, fix: str = "") -> bytes:
    """``call`` for another process; `reason` says why it goes to one, and `fix` what else could be done."""
    try:
        return worker.dumps_call(call, ())
    except Exception as error:
        if worker.cloudpickle is None:
            install = "pip install vescale_fn[launch], which carries closures and a notebook's functions"
            fix = f"{install}; or {fix}" if fix else install
        what = "fn or its arguments cannot be sent to the ranks"
        raise RankError(report("launch", what, [str(error), reason], fix)) from error


def library() -> list[str]:
    """What this process has imported of Python's own library."""
    return [
        name
        for name, module in tuple(sys.modules.items())
        if name in sys.stdlib_module_names and is_library(getattr(module, "__file__", None) or "")
    ]


def serve(pipe: connection.Connection) -> None:
    """The fresh interpreter's part."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    body, settings, caller = pipe.recv()
    worker.end_with(caller)
    try:
        results = run(functools.partial(worker.call_pickled, body), settings)
        pipe.send(Message("done", 0, value=results))
    except RankError as error:
        pipe.send(Message("failed", 0, text=str(error)))
    except NotStarted as error:
        pipe.send(Message("failed", 0, text=f"launch: the ranks could not start\n\n{error}"))
    except Exception:
        pipe.send(Message("failed", 0, text=f"launch: the ranks could not be watched\n\n{traceback.format_exc()}"))
    finally:
        os._exit(0)  # the ranks are gone, and nothing else here needs an orderly end
