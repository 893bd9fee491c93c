"""A KeyboardInterrupt between any two lines leaves nothing ambient behind, and the next call works.

One is raised at a line of this package, or of torch's fake tensors and modes, while a call runs: at every line of what is
short, at a sample of the lines of what is long. ``VFN_ALL_LINES=1`` takes them all.
"""

import gc
import linecache
import os
import random
import sys
import threading

import pytest
import torch
import torch._subclasses.fake_tensor

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.base import context, op_lines, state
from vescale_fn._core.shard_map import interrupts
from vescale_fn._core.transforms.kept_values import Keeper

OURS = os.path.dirname(vfn.__file__) + os.sep
TORCHS = (torch._subclasses.fake_tensor.__file__, torch.utils._python_dispatch.__file__)
SAMPLE = 10**6 if os.environ.get("VFN_ALL_LINES") else 60
LOCKING = [f"checkpoint/{name}.py" for name in ("locks", "atomic_folder", "save", "async_save", "stored_leaves")]


class Injected(KeyboardInterrupt):
    pass


def interrupted(f, at):
    """The lines that a call runs, as (file, line), until an interrupt comes at number `at` of them (-1: none comes)."""
    seen = []

    def local(frame, event, arg):
        if event == "line":
            seen.append((frame.f_code.co_filename.removeprefix(OURS), frame.f_lineno))
            if len(seen) == at:
                sys.settrace(None)
                raise Injected
        return local

    def calls(frame, event, arg):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if name == "__del__":  # what is raised there goes nowhere
            return None
        return local if file.startswith(OURS) or file in TORCHS else None

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        f()
    except Injected:
        pass
    finally:
        sys.settrace(before)
    return seen


def ambient():
    """Everything that is ambient; a setting that is there as nothing is as one that is not."""
    (thread, *process), torchs = interrupts.before()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    states = {name: value for name, value in vars(thread).items() if value != getattr(state.Thread, name)}
    return states, process, torchs, hooks, op_lines.listeners, "data" in vars(torch.Tensor)


def calls(mesh):
    x, w = torch.arange(8.0), torch.tensor(2.0)
    sharded = vfn.shard(x, mesh, P("a"))
    local = lambda x, w: vfn.psum((torch.ones(4) + x * w).sum(), "a")
    mapped = vfn.shard_map(local, mesh=mesh, in_specs=(P("a"), P()), out_specs=P())
    # with a collective, which says whose line it is while it runs
    replay = vfn.jit(lambda n: vfn.with_sharding(n.sum(), P()))
    whole = vfn.shard(torch.arange(8), mesh, P("a"))
    everything = vfn.remat_policies.everything_saveable
    module, params = vfn.module_function(torch.nn.Sequential(torch.nn.Linear(8, 2), torch.nn.Dropout(0.1)))

    def within(*blocks):
        def run():
            for block in blocks:
                with block():
                    torch.ones(2) + 1

        return run

    return {
        "shard_map": lambda: mapped(x, w),
        "grad of shard_map": lambda: vfn.grad(lambda w: mapped(x, w))(w),
        "recording": lambda: vfn.jit(lambda x: mapped(x, w))(sharded),
        "replay": lambda: replay(whole),
        "vmap": lambda: vfn.vmap(lambda x: x * vfn.grad(lambda x: x * x)(x))(x),
        "vjp": lambda: vfn.vjp(lambda x: (x * x).sum(), sharded),
        "linearize": lambda: vfn.linearize(torch.sin, x)[1](x),
        "jvp": lambda: vfn.jvp(torch.sin, (x,), (x,)),
        "remat": lambda: vfn.grad(vfn.remat(lambda x: (x * x).sum()))(x),
        "remat by a policy": lambda: vfn.grad(vfn.remat(lambda x: (x * x).sum(), policy=everything))(x),
        "eval_shape": lambda: vfn.eval_shape(torch.sin, x),
        "module": lambda: module(params, x, key=vfn.random.key(0)),
        "check": lambda: vfn.check_parity(lambda x: (x * x).sum(), sharded),
        "blocks": within(lambda: vfn.use_mesh(mesh), vfn.comm_log, vfn.strict, vfn.disable_jit, vfn.debug),
        "dtype of sums": lambda: vfn.precision.policy("params=f32,compute=bf16").apply(lambda x: x.sum())(x),
    }


@pytest.mark.filterwarnings("ignore:debug.*was never entered")
@pytest.mark.parametrize(
    "name",
    [
        "shard_map",
        "grad of shard_map",
        "recording",
        "replay",
        "vmap",
        "vjp",
        "linearize",
        "jvp",
        "remat",
        "remat by a policy",
        "eval_shape",
        "module",
        "check",
        "blocks",
        "dtype of sums",
    ],
)
def test_an_interrupt_leaves_nothing_behind(name):
    with vfn.simulate(2):
        f = calls(vfn.make_mesh((2,), ("a",)))[name]
        f()
        lines, clean = interrupted(f, -1), ambient()
        places_ = sorted(
            {line: n for n, line in reversed(list(enumerate(lines, 1)))}.values()
        )  # each line the first time
        sample = min(SAMPLE, max(10, 50_000 // len(lines)))
        again = random.Random(0).sample(range(1, len(lines) + 1), min(sample, len(lines)))
        chosen = random.Random(1).sample(places_, min(sample, len(places_)))
        saved = interrupts.before()
        try:
            for at in sorted({*again, *chosen}):
                where = interrupted(f, at)[-1]
                assert ambient() == clean, where
            gc.collect(0)
            assert ambient() == clean, "a block left late, as Python dropped it"
        finally:
            interrupts.undo(saved)  # what one call leaves is no fault of the tests that follow
        f()
    assert context.body() is None


def test_a_block_that_an_interrupt_kept_from_being_left_puts_nothing_back_when_it_is_dropped():
    with vfn.simulate(2):
        mesh, saved, clean = vfn.make_mesh((2,), ("a",)), interrupts.before(), ambient()
        for make in (
            lambda: context.setting(grad_depth=2),
            lambda: context.use_mesh(mesh),
            vfn.strict,
            vfn.comm_log,
            Keeper(vfn.remat_policies.nothing_saveable).again,
            Keeper(vfn.remat_policies.nothing_saveable).first,
        ):
            hooks = torch.autograd.graph.saved_tensors_hooks(abs, abs)
            with hooks, vfn.use_mesh(mesh), context.setting(grad_depth=1, keeper=0), vfn.strict():
                left = make()
                left.__enter__()
                again = interrupts.before()
                interrupts.undo(saved)
                del left
                gc.collect(0)
                assert ambient() == clean, make
                interrupts.undo(again)
            interrupts.undo(saved)


def test_an_interrupt_leaves_no_simulation_on():
    """But for one that comes before entering or leaving has done anything: then a ``with`` is no other than the bare call,
    or has not begun to leave its block, as with every context manager that is written in Python.

    Neither can be mended from inside: Python asks `__exit__` once, and not at all where `__enter__` raised; a method in C has
    no such line, but the ones that take `__exit__`'s three arguments only release locks and files.
    """

    outer = vfn.simulate(5)

    def run():
        with vfn.simulate(3), outer, outer:
            pass

    run()
    context.set_simulated(2)
    left_on = set()
    for at in range(1, len(interrupted(run, -1)) + 1):
        file, line = interrupted(run, at)[-1]
        if context.simulated() != 2:
            left_on.add(linecache.getline(os.path.join(OURS, file), line).strip())
            context.set_simulated(2)
    context.set_simulated(None)
    assert left_on <= {
        "entered = self._entered",
        "try:",
        "state.process.simulated = self._before[-1]  # not by a call: an interrupt in there would leave it on",
    }


@pytest.mark.filterwarnings("ignore:unclosed file")  # one that was just opened
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("thread", [False, True])
def test_a_save_that_was_interrupted_does_not_block_the_next(tmp_path, background, thread):
    """Neither in the same thread nor in another one, whichever line of taking, holding or giving back the lock it was."""
    path = tmp_path / "last"

    def save(x):
        saving = vfn.save(path, {"x": x}, background=background)
        if saving is not None:
            saving.wait()

    save(0)
    lines = [n for n, (file, _) in enumerate(interrupted(lambda: save(0), -1), 1) if file in LOCKING]
    for at in random.Random(background + 2 * thread).sample(lines, min(SAMPLE // 6, len(lines))):
        interrupted(lambda at=at: save(-at), at)
        failures = []
        if thread:
            again = threading.Thread(target=lambda at=at, failures=failures: failures.extend(failure_of(save, at)))
            again.start()
            again.join()
        else:
            failures = failure_of(save, at)
        assert not failures, at
        assert gc.isenabled(), at
        assert vfn.load(path) == {"x": at}, at
    assert os.listdir(tmp_path) == ["last"]


def failure_of(f, *args):
    try:
        f(*args)
    except Exception as error:
        return [error]
    return []
