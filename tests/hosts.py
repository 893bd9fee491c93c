"""Two hosts on one machine: two network namespaces and the cable between them, four ranks in each.

    unshare -rn python tests/hosts.py cabled

Launches across them, cuts the cable in the middle of a step, takes a host away and gives it back; prints as JSON what was seen,
and after how many seconds. Without ``cabled``, for a machine that permits no namespaces, the second host is processes of
this one, and that its cable is cut means that they are stopped.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

import vescale_fn as vfn
from vescale_fn._core import torch_internals
from vescale_fn._core.distributed import engines, remote
from vescale_fn._core.distributed.agent import BOOT, KEEP_ALIVE
from vescale_fn.errors import RankError

EACH, TIMEOUT = 4, 2.0
NEWUTS, NEWNET = 0x04000000, 0x40000000
# A host that is gone is noticed after 2 seconds here, not half a minute.
QUICK = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 1), ("TCP_USER_TIMEOUT", 2_000))
libc = ctypes.CDLL(None, use_errno=True)


def ip(*words):
    subprocess.run(["ip", *words], check=True)


class Host:
    """Another machine: a process in a network of its own, which starts agents as it is told."""

    def __init__(self, cabled):
        self.cabled = cabled
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=self._be, args=(theirs,))
        self.process.start()
        theirs.close()
        assert self.pipe.recv() == "there"
        if cabled:
            ip("link", "add", "cable", "type", "veth", "peer", "name", "cable1", "netns", str(self.process.pid))
            ip("addr", "add", "10.9.0.1/24", "dev", "cable")
            ip("link", "set", "cable", "up")
        self.pipe.send("cable")
        assert self.pipe.recv() == "up"

    def _be(self, pipe):
        if self.cabled:
            assert libc.unshare(NEWNET | NEWUTS) == 0
            socket.sethostname("host1")
        pipe.send("there")
        pipe.recv()
        if self.cabled:
            ip("link", "set", "lo", "up")
            ip("addr", "add", "10.9.0.2/24", "dev", "cable1")
            ip("link", "set", "cable1", "up")
        pipe.send("up")
        agents = []
        while (order := pipe.recv()) is not None:
            if order == "left":
                pipe.send([agent.pid for agent in agents if agent.is_alive()])
            elif order == "kill":
                for agent in agents:
                    agent.kill()
            else:
                agents = start_agents(*order)
                pipe.send([agent.pid for agent in agents])

    def ask(self, order):
        self.pipe.send(order)
        return self.pipe.recv()

    def cut(self):
        """What the other host says does not arrive any more, and it does not hear this one."""
        if self.cabled:
            ip("link", "set", "cable", "down")
        else:
            for pid in self.ranks():
                os.kill(pid, signal.SIGSTOP)

    def mend(self):
        if self.cabled:
            ip("link", "set", "cable", "up")
        else:
            for pid in self.ranks():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def ranks(self):
        """The processes of its agents and of their ranks."""
        agents = self.ask("left")
        return [*agents, *(pid for agent in agents for pid in children(agent))]

    def wait_until_empty(self, seconds=30):
        late = time.monotonic() + seconds
        while self.ranks() and time.monotonic() < late:
            time.sleep(0.1)
        return self.ranks()

    def close(self):
        self.pipe.send(None)
        self.process.join(10)


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as found:
        return [int(child) for child in found.read().split()]


def start_agents(arguments, env, first, count):
    started = [
        multiprocessing.get_context("fork").Process(target=boot, args=(arguments, env, first + i)) for i in range(count)
    ]
    for process in started:
        process.start()
    return started


def boot(arguments, env, index):
    os.environ |= {**env, "HOSTS_INDEX": str(index)}
    sys.argv = ["-c", *arguments, "HOSTS_INDEX"]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    exec(BOOT.replace(repr(KEEP_ALIVE), repr(QUICK)), {})
    os._exit(0)


class Hosts(engines.Engine):
    """Starts half of the ranks here, half on the other host."""

    name, other = "hosts", None

    @property
    def address(self):
        return "10.9.0.1" if self.other.cabled else "127.0.0.1"

    def start(self, command, env):
        self.agents = start_agents(command[4:], env, 0, EACH)
        self.other.ask((command[4:], env, EACH, EACH))

    def check(self, lost=""):
        if lost:
            raise engines.Trouble(lost)

    def __exit__(self, *_):
        for agent in self.agents:
            agent.join(10)
            assert agent.exitcode is not None


def summed():
    x = torch.ones(1)
    dist.all_reduce(x)
    return socket.gethostname(), int(os.environ["LOCAL_RANK"]), os.environ["GLOO_SOCKET_IFNAME"], x.item()


def training(steps):
    """Steps without an end, on a mesh of both hosts; each is told of."""
    mesh = vfn.make_mesh((2, EACH), ("dp", "tp"))
    total = vfn.shard_map(
        lambda x: vfn.psum(x, ("dp", "tp")), mesh=mesh, in_specs=vfn.P(("dp", "tp")), out_specs=vfn.P()
    )
    with open(steps, "ab", buffering=0) as told:
        while True:
            total(torch.ones(8))  # the step
            told.write(b"%d\n" % dist.get_rank())


def disturbed(how, timeout):
    """What a launch says whose training is disturbed in the middle, and after how many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        steps = os.path.join(folder, "steps")
        watcher = multiprocessing.get_context("fork").Process(target=disturb, args=(steps, how))
        watcher.start()
        try:
            vfn.launch(training, 2 * EACH, steps, on="hosts", device="cpu", timeout=timeout)
            said = "returned"
        except RankError as error:
            said = str(error)
        end = time.monotonic()
        watcher.join()
        with open(f"{steps}.disturbed") as when:
            return {"said": said, "seconds": end - float(when.read())}


def disturb(steps, how):
    """Once each rank has made twenty steps."""
    late = time.monotonic() + 90
    while time.monotonic() < late:
        time.sleep(0.05)
        if os.path.exists(steps) and min(open(steps).read().split().count(str(i)) for i in range(2 * EACH)) >= 20:
            break
    with open(f"{steps}.disturbed", "w") as when:
        when.write(str(time.monotonic()))
    how()


def gone(other):
    """As a machine whose power is off: it says nothing any more, not even that its processes have ended."""
    other.cut()
    for pid in other.ranks():
        os.kill(pid, signal.SIGKILL)


def main():
    cabled = sys.argv[1:] == ["cabled"]
    if cabled:
        ip("link", "set", "lo", "up")
        libc.unshare(NEWUTS)
        socket.sethostname("host0")
    torch_internals.preload()  # not by each of the 24 ranks that are forked from here
    Hosts.other = other = Host(cabled)
    engines.ENGINES["hosts"] = Hosts
    remote.KEEP_ALIVE = QUICK
    found = {"cabled": cabled}
    found["cut"] = disturbed(other.cut, TIMEOUT)
    if not cabled:
        other.mend()
    start = time.monotonic()
    found["cut"] |= {"left": other.wait_until_empty(), "until empty": time.monotonic() - start}
    other.mend()
    found["gone"] = disturbed(lambda: gone(other), 60.0)
    other.mend()
    found["back"] = vfn.launch(summed, 2 * EACH, on="hosts", device="cpu")
    print(json.dumps(found, indent=1))
    other.close()


if __name__ == "__main__":
    main()
