"""The most memory that a training step of a GPT needs at once: eager PyTorch beside its plan. Counted, not timed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import vescale_fn as vfn
from benchmarks.side_by_side import publish
from vescale_fn._core.base import tree
from vescale_fn.errors import TransformError
from vescale_fn.plan.ir import costs
from vescale_fn.recipes import transformer


class Accountant(TorchDispatchMode):
    """Counts the bytes of all memory that is alive, after each operator: what was there when asked, and what ops make.

    It sees what reaches torch's dispatcher: each operator's results, forward and backward; not what a kernel needs while it
    runs, but for what gloo gathers.
    """

    def __init__(self, *alive: Any) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.at = ""
        self._seen: dict[int, Any] = {}
        self._watch(alive)
        self.peak = self.bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._watch(out)
        now = self.bytes + _unseen(func, args)
        if now > self.peak:
            self.peak, self.at = now, str(func)
        return out

    def _watch(self, tree: Any) -> None:
        for x in pytree.tree_leaves(tree):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self._seen and storage.device.type != "meta":
                    self._seen[storage._cdata] = weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
                    self.bytes += storage.nbytes()

    def _gone(self, key: int, size: int) -> None:
        self.bytes -= size
        self._seen.pop(key, None)


def _unseen(func: Any, args: Any) -> int:
    """The bytes that a call takes while it runs and no mode sees: gloo gathers into memory of its own, by a thread of its own,
    as the most that a process has had resident tells."""
    if str(func) not in ("c10d.allgather_.default", "c10d._allgather_base_.default"):
        return 0
    return sum(x.nbytes for x in pytree.tree_leaves(args[0]) if x.device.type == "cpu")


@contextlib.contextmanager
def accounting(*alive: Any) -> Iterator[Accountant]:
    """Count the memory that is alive inside a ``with`` block, to begin with that of the tensors in `alive`."""
    with Accountant(*alive) as accountant:
        yield accountant


ROAM = 0.643  # of eager's peak: what ROAM (arXiv 2310.19295) reaches
SIZES = {  # what is most of it, batch and length
    "activations": (transformer.Config(dim=128, heads=4, layers=6, hidden=512, dropout=0.0), 16, 128),
    "both": (transformer.Config(dim=256, heads=8, layers=6, hidden=1024, dropout=0.0), 4, 128),
    "parameters": (transformer.Config(dim=256, heads=8, layers=6, hidden=1024, dropout=0.0), 1, 64),
}


def eager(config: transformer.Config, params: Any, batch: torch.Tensor) -> tuple[Any, Any]:
    """A step as PyTorch users write it, and what is alive before it: autograd, and AdamW in place, leaf by leaf."""
    leaves = [x.clone().requires_grad_() for x in tree.leaves(params)]
    opt = torch.optim.AdamW(leaves, lr=1e-3, foreach=False)
    structure = tree.flatten(params)[1]

    def step() -> None:
        opt.zero_grad(set_to_none=True)
        transformer.loss(tree.unflatten(structure, leaves), batch, config).backward()
        opt.step()
        opt.zero_grad(set_to_none=True)

    step()
    return step, [leaves, [list(state.values()) for state in opt.state.values()], batch]


def planned(
    config: transformer.Config, params: Any, batch: torch.Tensor, memory: int | None = None
) -> tuple[Any, Any, Any, float]:
    """The same step as a plan whose parameters and moments are donated; what is alive before it; what it predicts: memory, and
    seconds.
    """
    opt = vfn.optim.adamw(1e-3, weight_decay=1e-2)

    def step(params: Any, state: Any, batch: torch.Tensor) -> Any:
        loss, grads = vfn.value_and_grad(transformer.loss)(params, batch, config)
        updates, state = opt.update(grads, state, params)
        return loss, vfn.optim.apply_updates(params, updates), state

    jitted = vfn.jit(step, donate_argnums=(0, 1), memory=memory)
    _, *values = jitted(tree.map_(torch.clone, params), opt.init(params), batch)
    plan: Any = next(iter(jitted._plans.values()))  # itself: a jitted function runs as written where a mode looks on

    def run() -> None:
        values[:] = plan.taking(tree.leaves((*values, batch)), "step", "")[1:]

    lowered = jitted.lower(*values, batch)
    return run, [values, batch], lowered.memory(), costs.total(lowered.graph)


def within(config: transformer.Config, params: Any, batch: torch.Tensor, limit: int) -> tuple[int, float] | None:
    """The counted peak and the predicted seconds of the plan within a limit; None where there is none."""
    try:
        step, alive, _, seconds = planned(config, params, batch, limit)
    except TransformError:
        return None
    with accounting(alive) as account:
        step()
    return account.peak, seconds


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for name, (config, size, length) in SIZES.items():
        params = transformer.init(vfn.random.key(0), config)
        batch = vfn.random.randint(vfn.random.key(1), (size, length + 1), 0, 256).long()
        peaks = []
        step, alive = eager(config, params, batch)
        with accounting(alive) as account:
            step()
        peaks.append(account.peak)
        step, alive, use, once = planned(config, params, batch)
        with accounting(alive) as account:
            step()
        peaks.append(account.peak)
        held = sum(x.nbytes for x in tree.leaves(alive) if isinstance(x, torch.Tensor))
        mib = [one / 2**20 for one in (held, *peaks)]
        limited = within(config, params, batch, int(ROAM * peaks[0]))
        more = ["-", "-"] if limited is None else [limited[0] / peaks[0], limited[1] / once]
        rows.append([name, *mib, peaks[1] / peaks[0], use.peak / peaks[1], *more])
    publish(
        "peak_memory",
        [
            "most of it is",
            "arguments, MiB",
            "eager, MiB",
            "plan, MiB",
            "plan / eager",
            "predicted / counted",
            "with a limit / eager",
            "its time / the plan's, predicted",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
