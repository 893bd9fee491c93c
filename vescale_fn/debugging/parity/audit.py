"""Running a function for `check_parity`: on one device or on a mesh, any number of times, with the gradients of its results.

On one device every mesh counts as one rank: `shard` and `with_sharding` leave values plain, the body of a `shard_map`
runs on whole values, and a draw with a spec is the whole draw.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..._core.arrays.array import Array, on_device
from ..._core.arrays.placement import unshard
from ..._core.base import context, tree
from ..._core.base.containers import checked
from ..._core.base.source_lines import is_users, quoted
from ..._core.distributed.divergence import Watch
from ..._core.distributed.mesh import communicator_of, unit
from ..._core.transforms.grad import zeros_for_none
from ..._core.transforms.primals import as_primals
from ..._core.transforms.vjp import vjp
from .recording import ValueRecorder
from .rounding import Rounded


class Outcome(NamedTuple):
    """Results and gradients of one run, leaf by leaf: gradients by the arguments, then by what the function closes over."""

    paths: list[str]
    results: list[Any]
    gradients: list[Any]

    @property
    def values(self) -> list[Any]:
        """All of them."""
        return [*self.results, *self.gradients]


class Failure(NamedTuple):
    """A run that raised; `backward` says whether the function itself had run to its end."""

    error: Exception
    backward: bool

    @property
    def text(self) -> str:
        """The error and the user's line, as in a message."""
        said, trace, line = f"{type(self.error).__name__}: {self.error}", self.error.__traceback__, ""
        while trace is not None:
            if is_users(trace.tb_frame.f_code.co_filename):
                line = f"\nat {quoted(f'{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}')}"
            trace = trace.tb_next
        return f"{'in its backward pass, ' * self.backward}{said}{line}".replace("\n", "\n    ")


class Audit:
    """A function and its arguments, ready to be run.

    Args:
        f: the function.
        whole, laid: its arguments, on one device and on the mesh.
        mesh: the mesh.
        paths: of the leaves of the arguments.
        gradients: whether to take them.
    """

    def __init__(
        self, f: Callable[..., Any], whole: Any, laid: Any, mesh: Any, paths: Sequence[str], gradients: bool
    ) -> None:
        self.f, self.whole, self.laid, self.mesh, self.gradients = f, whole, laid, mesh, gradients
        self.moving = [gradients and is_floating(x) for x in tree.leaves(whole)]
        self.by = [f"gradient of {path}" for path, moves in zip(paths, self.moving, strict=True) if moves]
        self.closed: list[torch.Tensor] = []  # found in the first run that has results
        self._searched = False
        self._generators = torch.get_rng_state()

    def run(
        self, mesh: Any, recorder: ValueRecorder | None = None, rounded: Rounded | None = None
    ) -> Outcome | Failure:
        """One run of copies of the arguments, on one device (None) or on the mesh; perhaps recorded, perhaps rounded."""
        args = tree.map_(_copied, self.laid if mesh is not None else self.whole)
        args = args if rounded is None else tree.map_(rounded.of, args)
        reached: dict[str, Any] = {}
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(context.use_mesh(self.mesh))
                if context.key_uses() is not None:  # a key is used once in each run
                    stack.enter_context(context.debugging())
                if recorder is not None:  # what was to be warned of has been
                    stack.enter_context(warnings.catch_warnings())
                    warnings.simplefilter("ignore")
                if mesh is None:
                    stack.enter_context(context.one_device(unit))
                    if self.mesh.device_type != "cpu":
                        args = tree.map_(lambda x: on_device(x, self.mesh) if isinstance(x, torch.Tensor) else x, args)
                        stack.enter_context(torch.device(self.mesh.device_type))
                elif not communicator_of(mesh).all_here:
                    stack.enter_context(_watched(mesh))
                if rounded is not None:
                    stack.enter_context(rounded)
                torch.set_rng_state(self._generators)
                searched = self._searched
                outcome = self._outcome(args, recorder, reached)
                return outcome if searched or not self.closed else self._of_what_stays(outcome, reached)
        except Exception as error:
            return Failure(error, "results" in reached)
        finally:
            if recorder is not None:
                recorder.close()

    def _outcome(self, args: Any, recorder: ValueRecorder | None, reached: dict[str, Any]) -> Outcome:
        own: set[int] = set()

        def called(*args: Any) -> Any:
            own.update(id(x) for x in tree.leaves(args))
            if recorder is None:
                out = checked(self.f(*args), "check_parity", "out", numpy=True)
            else:
                with context.recording(recorder.record):
                    recorder.record("the arguments", (), args)
                    recorder.arguments = [recorder.find(x) for x, moves in zip(tree.leaves(args), self.moving) if moves]
                    with recorder:
                        out = checked(self.f(*args), "check_parity", "out", numpy=True)
                recorder.results = [recorder.find(x) if isinstance(x, torch.Tensor) else None for x in tree.leaves(out)]
                recorder.arguments += [recorder.first(x) for x in self.closed]
            reached["paths"] = tree.paths(out, "out")
            reached["results"] = [x.detach() if isinstance(x, torch.Tensor) else x for x in tree.leaves(out)]
            # a single number stays where it is, so that its gradient begins as that of `vfn.grad` does
            whole = (
                out if len(reached["results"]) == 1 and getattr(reached["results"][0], "ndim", 1) == 0 else unshard(out)
            )
            reached["whole"] = tree.leaves(whole)
            return whole

        gradients: list[Any] = []
        if any(self.moving):
            out, pullback = vjp(called, *args)
            found = tree.leaves(pullback(tree.unflatten(tree.flatten(out)[1], _weights(tree.leaves(out)))))
            gradients = [g for g, moves in zip(found, self.moving, strict=True) if moves]
        else:
            called(*args)
        if self.gradients:
            gradients += self._by_closed(reached["whole"], own)
        return Outcome(reached["paths"], reached["results"], gradients)

    def _by_closed(self, outs: Sequence[Any], own: set[int]) -> list[Any]:
        """Gradients by the tensors that the function closes over and that require them."""
        pairs = [(x, w) for x, w in zip(outs, _weights(outs)) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not self._searched:
            self._searched = True
            names = _closed_over(self.f)
            order = list(names)
            self.closed = [x for x in _leaves_behind([x for x, _ in pairs]) if id(x) not in own]
            self.closed.sort(key=lambda x: order.index(id(x)) if id(x) in names else len(order))
            self.by += [f"gradient of {names.get(id(x), 'a tensor')} (closed over)" for x in self.closed]
        if not self.closed or not pairs:
            return [torch.zeros_like(x) for x in self.closed]
        ends, weights = zip(*pairs, strict=True)
        found = torch.autograd.grad(ends, self.closed, weights, retain_graph=True, allow_unused=True)
        return [g.detach() for g in as_primals(zeros_for_none(found, self.closed), self.closed)]

    def _of_what_stays(self, outcome: Outcome, reached: dict[str, Any]) -> Outcome:
        """The first run's outcome, without gradients by leaves that it made itself (those of an inner `vfn.grad`): they go
        with its graph, and no later run has them."""
        there = [weakref.ref(x) for x in self.closed]
        reached.clear()
        self.closed = []
        gc.collect()
        own = len(self.by) - len(there)
        stay = [*range(own), *(own + i for i, x in enumerate(there) if x() is not None)]
        self.closed = [x for ref in there if (x := ref()) is not None]
        self.by = [self.by[i] for i in stay]
        return outcome._replace(gradients=[outcome.gradients[i] for i in stay])


def is_floating(x: Any) -> bool:
    """Whether a leaf is a tensor that can have a gradient."""
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


@contextlib.contextmanager
def _watched(mesh: Any) -> Iterator[None]:
    """Ranks are compared before each collective, as in debug mode, so that none waits for one that has failed."""
    before = context.watch()
    context.set_watch(None)  # a block of its own, which a rank that fails is seen to leave
    try:
        with Watch(None, mesh.mesh.flatten().tolist(), results=False):
            yield
    finally:
        context.set_watch(before)


def _copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) and not isinstance(x, Array) else x


def _weights(outs: Sequence[Any]) -> list[Any]:
    """Fixed random weights, so that every result counts; one for a single number."""
    moving = [x for x in outs if is_floating(x)]
    alone = len(moving) == 1 and moving[0].ndim == 0
    weights: list[Any] = []
    for i, x in enumerate(outs):
        if not is_floating(x):
            weights.append(torch.zeros_like(x) if isinstance(x, torch.Tensor) else x)
        elif alone:
            weights.append(torch.ones_like(x))
        else:
            generator = torch.Generator().manual_seed(i)
            weights.append(torch.randn(x.shape, generator=generator, device="cpu", dtype=torch.float64).to(x))
    return weights


# --- what a function closes over --------------------------------------------------------------------------------------


def _leaves_behind(outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The variables on which these depend, by the graph of autograd."""
    found: list[torch.Tensor] = []
    seen: set[Any] = set()
    todo: list[Any] = [x.grad_fn for x in outs]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += [node.variable] if hasattr(node, "variable") else []
            todo += [below for below, _ in node.next_functions]
    return found


def _closed_over(f: Any) -> dict[int, str]:
    """What a function calls the tensors that it closes over, parameters of modules among them."""
    if isinstance(f, torch.nn.Module):
        return {id(x): name for name, x in f.named_parameters()}
    names: dict[int, str] = {}
    with contextlib.suppress(TypeError, ValueError):
        found = inspect.getclosurevars(inspect.unwrap(f))
        for name, value in {**found.globals, **found.nonlocals}.items():
            if isinstance(value, torch.nn.Module):
                names |= {id(x): f"{name}.{inner}" for inner, x in value.named_parameters()}
            else:
                leaves = tree.leaves(value) if isinstance(value, (torch.Tensor, list, tuple, dict)) else []
                names |= {id(x): path for x, path in zip(leaves, tree.paths(value, name))}
    return names
