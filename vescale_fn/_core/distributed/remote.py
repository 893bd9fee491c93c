"""Ranks that an engine starts, on any machine: they connect to this process, which watches them as it does its own."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import functools
import os
import pickle
import secrets
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError, connection
from typing import Any

from ..base.errors import RankError
from ..base.messages import report
from .agent import BOOT, KEEP_ALIVE, Order
from .engines import Engine, Trouble
from .fork_server import library, pickled
from .launcher import NotStarted, Rank, end, results, told_to_end
from .streams import Streams
from .worker import Message, Settings

START, HANDSHAKE, ANSWER = (
    180.0,
    5,
    3.0,
)  # seconds: to import and meet, on a machine that has just been given; of a connection
LOST = "was lost with the connection to"
Here = tuple[int, str, str, int, float]  # what an agent says of itself: its number, machine, address, port, clock


def run_on(engine: Engine, call: Callable[[], Any], settings: Settings) -> list[bytes]:
    """As `launcher.run`, in ranks that `engine` starts."""
    body = pickled(call, f"{engine.name} starts the ranks in other processes, perhaps on other machines")
    waiting = Waiting()
    ranks = [Rank(waiting, waiting)]  # type: ignore[arg-type]
    with told_to_end(ranks), engine, Door(engine.address) as door:
        settings = dataclasses.replace(settings, device=engine.device or settings.device)
        try:
            engine.start([sys.executable, "-P", "-c", BOOT, *door.place], {"VESCALE_FN_KEY": door.key.hex()})
            agents = in_order(door.answers(engine, settings.nprocs, settings.queue, waiting))
            ranks[:] = [Rank(agent, agent) for agent in agents]  # type: ignore[arg-type]
            give_orders(agents, body, settings)
            with Carried(agents, settings.logs) as streams:
                return results(ranks, settings, streams, START, functools.partial(whereabouts, streams))
        except Trouble as error:
            what = f"{engine.name} has not started the ranks"
            raise RankError(report("launch", what, error.args, error.fix)) from None
        except NotStarted as error:
            raise RankError(f"launch: the ranks could not start\n\n{error}") from None
        except RankError as error:
            if LOST in str(error):  # of which the engine may know more
                raise type(error)("\n".join([str(error), *engine.state()])) from None
            raise
        finally:
            end(ranks)


def in_order(agents: Sequence[Agent]) -> list[Agent]:
    """The agents as ranks: those of one machine beside each other, machines and agents in the order of the engine's numbers."""
    agents = sorted(agents, key=lambda agent: agent.index)
    machines = list(dict.fromkeys(agent.machine for agent in agents))
    return sorted(agents, key=lambda agent: machines.index(agent.machine))


def give_orders(agents: Sequence[Agent], body: bytes, settings: Settings) -> None:
    """Tell each agent which rank it is to start, and what it is to run."""
    for rank, agent in enumerate(agents):
        beside = [other for other in agents if other.machine == agent.machine]
        agent.order((library(), sys.path, os.getcwd()))
        agent.order(Order(body, settings, rank, beside.index(agent), len(beside), agents[0].meeting))


def whereabouts(streams: Carried, ranks: list[Rank], silent: list[int]) -> dict[int, str]:
    """What each of the `silent` ranks is doing now."""
    agents: list[Any] = [ranks[i].process for i in silent]
    for agent in agents:
        agent.at = None
        agent.send_word("where", None)
    late = time.monotonic() + ANSWER
    while any(agent.at is None and agent.is_alive() for agent in agents) and time.monotonic() < late:
        streams.wait([], 0.1)
    unheard = {i: f"did not answer, on {agent.machine}" for i, agent in zip(silent, agents, strict=True)}
    return unheard | {i: agent.at[0] for i, agent in zip(silent, agents, strict=True) if agent.at}


class Waiting:
    """Stands for ranks that have not come yet: this process may be told to end while it waits for them."""

    told = False

    def terminate(self) -> None:
        self.told = True

    def join(self, seconds: float | None = None) -> None: ...
    def is_alive(self) -> bool:
        return False

    def close(self) -> None: ...


class Door:
    """Where agents report, each with the key of this launch."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listening = socket.create_server((address, 0), family=family, backlog=4096)
        self.key = secrets.token_bytes(32)
        self.place = [address, str(self._listening.getsockname()[1])]

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def answers(self, engine: Engine, count: int, seconds: float, waiting: Waiting) -> list[Agent]:
        """The agents, once all have reported; an error if the engine says that they will not, or after `seconds`."""
        found: list[Agent] = []
        start = time.monotonic()
        try:
            while len(found) < count:
                if waiting.told:
                    raise RankError("launch: ended by SIGTERM while it waited for ranks")
                if time.monotonic() > start + seconds:
                    said = f"{len(found)} of {count} ranks have come within {seconds:g} seconds"
                    raise Trouble(said, *engine.state(), fix="queue=3600.0, seconds that they may wait for their place")
                if connection.wait([self._listening], 0.2):
                    found += filter(None, [self._answered()])
                else:
                    lost = next((agent for agent in found if agent.has_gone()), None)
                    engine.check(f"the process that was to start a rank on {lost.machine} has gone" if lost else "")
        except BaseException:
            for agent in found:
                agent.close()
            raise
        return found

    def _answered(self) -> Agent | None:
        taken, _ = self._listening.accept()
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HANDSHAKE, 0))
        _keep_alive(taken)
        pipe = connection.Connection(taken.detach())
        try:
            connection.deliver_challenge(pipe, self.key)
            connection.answer_challenge(pipe, self.key)
            here: Here = pipe.recv()
        except (OSError, EOFError, AuthenticationError):  # a stranger, or one that has gone again
            pipe.close()
            return None
        with socket.socket(fileno=os.dup(pipe.fileno())) as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        return Agent(pipe, here)


def _keep_alive(taken: socket.socket) -> None:
    """Let a machine that has gone without a word be noticed."""
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE:
        if hasattr(socket, name):
            taken.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Agent:
    """A rank somewhere, as a process and the pipe to it; `pump` takes what has come from its agent."""

    def __init__(self, pipe: connection.Connection, here: Here) -> None:
        self.index, self.machine, address, port, clock = here
        self.meeting = address, port
        self.exitcode: int | str | None = None
        self.at: list[str] | None = None  # the answer to "where"
        self.pipe, self._later = pipe, time.monotonic() - clock
        self._said: deque[Message] = deque()
        self._words: deque[tuple[str, Any]] = deque()

    def pump(self, printed: Callable[[int, bytes], None]) -> bool:
        """Take what has come, and whether that was anything; send what a signal's handler has left to send."""
        came = False
        try:
            while self._words:
                self.pipe.send(self._words.popleft())
            while self.exitcode is None and self.pipe.poll():
                came = True
                self._take(self.pipe.recv_bytes(), printed)
        except (EOFError, OSError):
            came = came or self.exitcode is None
            self.exitcode = self.exitcode if self.exitcode is not None else f"{LOST} {self.machine}"
        return came

    def _take(self, frame: bytes, printed: Callable[[int, bytes], None]) -> None:
        kind, rest = frame[:1], frame[1:]
        if kind == b"m":
            message: Message = pickle.loads(rest)
            self._said.append(dataclasses.replace(message, when=message.when + self._later))
        elif kind == b"e":
            self.exitcode = pickle.loads(rest)
        elif kind == b"w":
            self.at = list(pickle.loads(rest).values())
        else:
            printed(int(kind), rest)

    def has_gone(self) -> bool:
        """Whether the agent has gone before it was told what to do."""
        return self.pipe.poll()  # which is true at an end too, and until then it says nothing

    def order(self, what: Any) -> None:
        """Tell the agent before its rank is there."""
        with contextlib.suppress(OSError):  # it has gone: `pump` finds out
            self.pipe.send(what)

    def send_word(self, what: str, value: Any) -> None:
        """Have something sent with the next `pump`: at once it could land within another word, from a signal's handler."""
        self._words.append((what, value))

    # As the pipe to a rank

    def send(self, word: Any) -> None:
        self.send_word("tell", word)

    def poll(self) -> bool:
        return bool(self._said)

    def recv(self) -> Message:
        return self._said.popleft()

    # As a rank's process

    @property
    def sentinel(self) -> Any:
        return self.pipe

    def is_alive(self) -> bool:
        return self.exitcode is None

    def terminate(self) -> None:
        self.send_word("signal", signal.SIGTERM)

    def kill(self) -> None:
        self.send_word("signal", signal.SIGKILL)

    def join(self, seconds: float) -> None:
        late = time.monotonic() + seconds
        self.pump(lambda *_: None)
        while self.exitcode is None and time.monotonic() < late:
            connection.wait([self.pipe], 0.05)
            self.pump(lambda *_: None)

    def close(self) -> None:
        self.exitcode = self.exitcode if self.exitcode is not None else "was left"
        self.pipe.close()


class Carried(Streams):
    """Carries what all ranks print, on their machines, to `sys.stdout` and `sys.stderr` here, or to a file for each."""

    def __init__(self, agents: Sequence[Agent], logs: str | None) -> None:
        super().__init__()
        self._agents, self._logs = agents, logs
        self._decoders: dict[tuple[int, int], codecs.IncrementalDecoder] = {}

    def wait(self, others: list[Any], seconds: float) -> None:
        """Wait until something comes of any rank, and take it."""
        if not self._take():
            connection.wait([agent.pipe for agent in self._agents if agent.is_alive()], seconds)
            self._take()

    def _take(self) -> bool:
        came = [agent.pump(functools.partial(self._print, rank)) for rank, agent in enumerate(self._agents)]
        return any(came)

    def _print(self, rank: int, number: int, chunk: bytes) -> None:
        if self._logs is not None:
            with open(os.path.join(self._logs, f"rank-{rank}.log"), "ab") as log:
                log.write(chunk)
            return
        decoder = self._decoders.setdefault((rank, number), codecs.getincrementaldecoder("utf-8")("replace"))
        stream = sys.stdout if number == 1 else sys.stderr
        if stream is not None:
            stream.write(decoder.decode(chunk))
            stream.flush()
