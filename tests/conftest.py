"""What every test starts from: one thread, fixed seeds, nothing ambient; and `gloo`, the pool of real ranks."""

import gc
import os
import sys

gc.disable()  # until all tests are collected: nothing of what is made till then is garbage
# Nor is the package compiled by each of the hundred interpreters that tests start, a second each, whatever
# PYTHONDONTWRITEBYTECODE says: who imports a file first, until all tests are collected, leaves it compiled.
as_asked, sys.dont_write_bytecode = sys.dont_write_bytecode, False

STARTUP = os.path.join(os.path.dirname(__file__), "startup")
paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *(path for path in paths if path not in ("", STARTUP))])

import pytest

_pool = []

# Each mechanism once, on simulated and on real ranks, in under two minutes on two cores: `pytest -m fast`.
FAST = """
array checkpoint collectives debug errors goldens_collectives import_order init linearize matrix messages modules
nested_transforms optim partial_manual placement plan_collectives plan_local random random_mesh remat_in_bodies reshard
shard_map spec strict third_party torch_internals transform writes
""".split()


@pytest.hookimpl(optionalhook=True)  # of xdist, without which the tests run too
def pytest_xdist_auto_num_workers(config):
    """``-n auto``: a worker for each core, at most eight."""
    return min(len(os.sched_getaffinity(0)), 8)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Workers take tests from each other at the end, unless the command line says otherwise."""
    if getattr(config.option, "dist", None) == "no" and getattr(config.option, "numprocesses", None):
        config.option.dist = "worksteal"


def pytest_sessionstart(session):
    """torch, and the package, are imported by who runs tests: not by the process that deals them out to xdist's workers."""
    if hasattr(session.config, "workerinput") or not getattr(session.config.option, "numprocesses", None):
        global context, torch, torch_internals
        import torch

        from vescale_fn._core import torch_internals
        from vescale_fn._core.base import context

        torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem.removeprefix("test_") in FAST:
            item.add_marker("fast")
        if "gloo" in getattr(item, "fixturenames", ()):
            item.add_marker("gloo")
        if item.get_closest_marker("gpu") and torch.cuda.device_count() == 0:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # first: at the end others would wait for them


def pytest_collection_finish(session):
    """Fork the pool's nursery before the first test: later this process may not be fit to fork any more."""
    torch_internals.preload()  # not by each process that is forked from this one
    gc.freeze()  # what is here now, torch and all tests, no collection shall visit;
    gc.set_threshold(200_000, 20, 20)  # and they are seldom: together that was a tenth of the time of a run
    gc.enable()
    sys.dont_write_bytecode = as_asked
    needed = any("gloo" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not _pool and not session.config.option.collectonly:
        from pool import Pool

        _pool.append(Pool())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Garbage goes with the file that has made it: a process that has grown is slow to fork, and slow to look through."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_unconfigure():
    while _pool:
        _pool.pop().close()


@pytest.fixture
def gloo():
    """``gloo(n, fn, *args)``: run ``fn(*args)`` on `n` real ranks over gloo; the list of their results.

    `fn` is a function of the test's module, or anything that cloudpickle takes. An exception on a rank arrives as
    RankError with that rank's traceback, and the ranks are replaced before the next call.
    """
    return _pool[0].run


@pytest.fixture(autouse=True)
def _same_start():
    """Each test begins with the same seed, and leaves behind no mesh, no simulation, no default dtype."""
    before = context.simulated(), context.current_mesh()
    environ = dict(os.environ)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():  # else this notes the stack, for when it will be: a millisecond for each test
        torch.cuda.manual_seed_all(0)
    yield
    context.set_simulated(before[0])
    context.set_mesh(before[1])
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)
