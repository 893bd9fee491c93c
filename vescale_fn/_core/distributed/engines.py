"""What starts processes for the ranks of a launch: torchrun, Slurm by submitit, Ray. Each only starts and ends them."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from ..base.errors import MeshError
from ..base.messages import meant, report

ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "FINISHED", "INTERRUPTED", "NODE_FAIL"}
ENDED |= {"OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"}  # states of a job, in Slurm's words and submitit's
LEAVE = 10.0  # seconds for what the engine has started to end by itself


class Trouble(Exception):
    """The engine will not start the ranks, or not within the time: its `args` say why."""

    def __init__(self, *why: str, fix: str = "") -> None:
        super().__init__(*why)
        self.fix = fix


class Engine:
    """Starts one process for each rank, which runs a command, and sees that none is left."""

    name, package = "", ""
    known: tuple[str, ...] = ()  # its options, where the package does not check them
    device: str | None = None  # where the ranks compute, if this process cannot know

    def __init__(self, nprocs: int, device: str | None, limit: float, options: Mapping[str, Any]) -> None:
        self.nprocs, self.device, self.limit, self.options = nprocs, device, limit, dict(options)
        self.library: Any = needed(self.name, self.package) if self.package else None
        for option in self.known and options.keys() - {*self.known}:
            what = f"options[{option!r}] is no option of {self.name}{meant(option, self.known)}"
            raise MeshError(report("launch", what, fix=f"options out of {', '.join(self.known)}"))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        """End what has been started."""

    @property
    def address(self) -> str:
        """Where this process is reached from the ranks' machines."""
        return str(self.options.get("address", "127.0.0.1"))

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Have `command` started for each rank, with `env` beside its environment, or ask for that."""
        raise NotImplementedError

    def check(self, lost: str = "") -> None:
        """Raise `Trouble` where not all processes will come. `lost`: what is known of one that has come and gone."""
        raise NotImplementedError

    def state(self) -> tuple[str, ...]:
        """What the engine says of the processes, for a message."""
        return ()


class Torchrun(Engine):
    """torchrun on this machine."""

    name, known = "torchrun", ("address",)

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.log: IO[bytes] = tempfile.TemporaryFile()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", self.address]
        self.torchrun = subprocess.Popen(
            [*torchrun, "--nproc-per-node", str(self.nprocs), "--no-python", *command, "RANK"],
            env={"OMP_NUM_THREADS": "1", **os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,  # ^C in a terminal is the caller's alone, which tells the ranks
        )

    def check(self, lost: str = "") -> None:
        if self.torchrun.poll() is not None or lost:
            self.log.seek(0)
            raise Trouble(*filter(None, [lost]), *_last(self.log.read().decode(errors="replace")))

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "torchrun"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.torchrun.wait(LEAVE)
            if self.torchrun.poll() is None:
                self.torchrun.terminate()  # it ends its processes first
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.torchrun.wait(LEAVE)
            self.torchrun.kill()
            self.torchrun.wait()
            self.log.close()


class Slurm(Engine):
    """A Slurm job of submitit's; `options` are submitit's, and `cluster`, `folder` (shared by the machines) and `address`."""

    name, package = "slurm", "submitit"

    def __init__(self, nprocs: int, device: str | None, limit: float, options: Mapping[str, Any]) -> None:
        asks = any("gpu" in option or "gres" in option for option in options)
        super().__init__(nprocs, device or ("cuda" if asks else "cpu"), limit, options)
        self._local = options.get("cluster") == "local"
        nodes = options.get("nodes", 1)
        if not self._local and shutil.which("srun") is None:
            fix = 'a machine of the cluster; options={"cluster": "local"} tries the program on this one'
            raise MeshError(report("launch", 'on="slurm", but there is no srun here', fix=fix))
        if not isinstance(nodes, int) or nodes < 1 or nprocs % nodes:
            what = f'options["nodes"]={nodes!r} does not divide the {nprocs} ranks'
            raise MeshError(report("launch", what, fix="as many ranks on each machine, one for each GPU say"))
        if not self._local and math.isinf(limit) and not options.keys() & {"timeout_min", "slurm_time"}:
            fix = 'limit=3600.0, seconds, or options={"timeout_min": 60}'
            raise MeshError(report("launch", 'on="slurm" needs to know when Slurm may end the job', fix=fix))

    @property
    def address(self) -> str:
        return str(self.options.get("address") or ("127.0.0.1" if self._local else _outward_address()))

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        given = {name: x for name, x in self.options.items() if name not in ("address", "cluster", "folder")}
        nodes = given.setdefault("nodes", 1)
        minutes = 5_000_000 if math.isinf(self.limit) else math.ceil(self.limit / 60) + 5
        given.setdefault("timeout_min", minutes)
        self.folder = tempfile.mkdtemp(prefix=".vescale_fn-slurm-", dir=self.options.get("folder", os.getcwd()))
        place = "SUBMITIT_LOCAL_GLOBALID" if self._local else "SLURM_PROCID"
        # The process of submitit's becomes the agent: what Slurm signals is that one.
        become = (
            f"import os\nos.environ.update({dict(env)!r})\n"
            f"os.execv({command[0]!r}, {[*command, place]!r})  # nothing is left of this program"
        )
        try:
            cluster = self.options.get("cluster")
            executor = self.library.AutoExecutor(self.folder, cluster=cluster)
            executor.update_parameters(name="vescale_fn", tasks_per_node=self.nprocs // nodes, **given)
            with _deaf_to_interrupts() if self._local else contextlib.nullcontext():
                self.job = executor.submit(exec, become)
        except Exception as error:
            raise Trouble(str(error)) from error
        self._asked = time.monotonic()

    def check(self, lost: str = "") -> None:
        if not lost and time.monotonic() < self._asked + (0.5 if self._local else 10.0):
            return
        self._asked = time.monotonic()
        state = self.job.state
        if lost or state.split()[0] in ENDED:
            # submitit reads the first task's
            raise Trouble(*filter(None, [lost]), *self.state(), *_last(_stderr(self.job)))

    def state(self) -> tuple[str, ...]:
        return (f"Slurm's job {self.job.job_id} is {self.job.state}",)

    def __exit__(self, *_: object) -> None:
        if not hasattr(self, "folder"):
            return
        if hasattr(self, "job"):
            late = time.monotonic() + LEAVE
            if not self._local:
                self.job.cancel(check=False)
            while self._local and not self.job.done() and time.monotonic() < late:
                time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)


class Ray(Engine):
    """An actor of Ray's for each rank; `options` are an actor's, and `init`, `strategy` and `address`."""

    name, package = "ray", "ray"

    def __enter__(self) -> Ray:
        ray = self.library
        self.began = not ray.is_initialized()
        if self.began:
            ray.init(**{"log_to_driver": False, **self.options.get("init", {})})
        there = ray.cluster_resources()
        self.device = self.device or ("cuda" if there.get("GPU", 0) >= self.nprocs else "cpu")
        gpus = {"num_gpus": 1} if self.device == "cuda" else {}
        own = ("address", "init", "strategy")
        self.given = {"num_cpus": 1, **gpus, **{name: x for name, x in self.options.items() if name not in own}}
        self.needs = {"CPU": self.given["num_cpus"], "GPU": self.given.get("num_gpus", 0)}
        self.needs = {name: x for name, x in (self.needs | self.given.get("resources", {})).items() if x}
        few = [
            f"{self.nprocs} ranks need {x * self.nprocs:g} {name}, and there are {there.get(name, 0):g} in the cluster"
            for name, x in self.needs.items()
            if x * self.nprocs > there.get(name, 0)
        ]
        if few:
            self.__exit__()
            fix = 'fewer ranks, more machines, or options={"num_cpus": ...}, what each rank takes'
            raise MeshError(report("launch", "the Ray cluster is too small", few, fix))
        return self

    @property
    def address(self) -> str:
        return str(self.options.get("address") or self.library.util.get_node_ip_address())

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._command, self._env, self.running = command, env, []
        self.group = self.library.util.placement_group(
            [self.needs] * self.nprocs, strategy=self.options.get("strategy", "PACK")
        )

    def check(self, lost: str = "") -> None:
        ray = self.library
        if not self.running:
            if self.group.wait(1):
                self._start_actors()
            return
        done, _ = ray.wait([running for _, running in self.running], timeout=0)
        if done or lost:
            why = ()
            try:
                why = _last(ray.get(done[0])) if done else ()
            except Exception as error:
                why = _last(str(error))
            raise Trouble(*filter(None, [lost]), *why)

    def _start_actors(self) -> None:
        ray = self.library

        class Started:  # in here, so that Ray carries it by value, and its processes need not import this library
            def run(self, command: Sequence[str], env: Mapping[str, str]) -> str:
                import os
                import subprocess

                done = subprocess.run(command, env={**os.environ, **env}, stderr=subprocess.PIPE, text=True)
                return done.stderr

        for index in range(self.nprocs):
            where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self.group, index)
            actor = ray.remote(Started).options(scheduling_strategy=where, **self.given).remote()
            env = {**self._env, "VESCALE_FN_INDEX": str(index)}
            self.running.append((actor, actor.run.remote([*self._command, "VESCALE_FN_INDEX"], env)))

    def state(self) -> tuple[str, ...]:
        free = self.library.available_resources()
        return tuple(f"each rank needs {x:g} {name}; {free.get(name, 0):g} are free" for name, x in self.needs.items())

    def __exit__(self, *_: object) -> None:
        ray = self.library
        if running := getattr(self, "running", ()):
            ray.wait([ref for _, ref in running], num_returns=len(running), timeout=LEAVE)
        for actor, _ in running:
            ray.kill(actor)
        if hasattr(self, "group"):
            ray.util.remove_placement_group(self.group)
        if self.began:
            ray.shutdown()


ENGINES: dict[str, type[Engine]] = {"ray": Ray, "slurm": Slurm, "torchrun": Torchrun}


def needed(engine: str, package: str) -> Any:
    """An engine's package, or what to install."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        what = f'on="{engine}" needs {package}, which cannot be imported'
        raise MeshError(report("launch", what, [str(error)], f"pip install vescale_fn[{engine}]")) from None


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """What is started meanwhile ignores ^C, which a terminal sends to all: the ranks are told by their caller."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, before)


def _last(text: str, lines: int = 5) -> tuple[str, ...]:
    """The last lines of what a process has printed."""
    return tuple(line.strip() for line in text.strip().splitlines()[-lines:] if line.strip())


def _stderr(job: Any) -> str:
    """What the tasks of a job of submitit's have printed as errors."""
    texts = (job.task(i).stderr() for i in range(job.num_tasks))
    return next(filter(None, texts), "") or ""


def _outward_address() -> str:
    """The address by which this machine reaches others, which is that by which they reach it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))  # an address that is nobody's
            return asking.getsockname()[0]
        except OSError:
            return socket.gethostbyname(socket.gethostname())
