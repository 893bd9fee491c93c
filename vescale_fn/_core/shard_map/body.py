"""Running a `shard_map` body: what is switched on while it runs, and again where a backward pass computes it anew."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .. import torch_internals
from ..base import context, linear_map, op_arguments, state
from ..base.errors import InPlaceError, TransformError, VaryingTypeError
from ..base.messages import described, report
from ..local_types import replica_check, tensor_types, types
from ..local_types.tensor_types import mark
from .collective_maps import CollectiveMap
from .typed_mode import Checked
from .untyped_mode import Unchecked

Tensor = torch.Tensor


_intercepted: list[bool] = []
captures: list[Callable[[], Callable[[], Any]]] = []  # what else is entered again; asked at the call, like `capture`


class running:
    """A context in which a body runs: its axes are manual, its values typed.

    Args:
        body: mesh, axes, and whether types are checked.
        adopt: makes a local value of a whole array that the body closes over.
        intercepted: False where nothing needs watching: no types, a real mesh, no gradient.
        writes, remembered: those of a body that is entered again.
    """

    __slots__ = (
        "_records",
        "adopt",
        "body",
        "intercepted",
        "met",
        "mode",
        "remembered",
        "writes",
    )

    def __init__(
        self,
        body: context.Body,
        adopt: Callable[[Tensor], Tensor],
        intercepted: bool = True,
        writes: tensor_types.Writes | None = None,
        remembered: Mapping[Any, Any] | None = None,
    ) -> None:
        self.body, self.adopt, self.intercepted = body, adopt, intercepted
        self.writes, self.remembered = writes, remembered or {}
        self.met: dict[int, tuple[Tensor, Any]] = {}  # arrays from outside, with their versions

    def __enter__(self) -> running:
        self.mode = None
        if self.intercepted:
            _intercept()
            self.writes = self.writes or tensor_types.Writes()
            self.mode = (Checked if self.body.check else Unchecked)(self.body, self.adopt, self.writes)
            self.mode.remembered.update(self.remembered)
        else:
            state.unwatched.add(self)
        self._records = state.enter(self)
        if self.mode is not None:
            self.mode.__enter__()
        return self

    def taken_in(self, leaves: list[Any]) -> list[Any]:
        """Results as local values, which they are not yet where the body gives back what it closes over."""
        with torch_internals.no_torch_function():
            mode = self.mode
            if mode is None:
                auto = self.body.auto
                return [self.adopt(x) if isinstance(x, Tensor) and tensor_types.outside(x, auto) else x for x in leaves]
            known = tensor_types.read
            return [
                x if not isinstance(x, Tensor) or known(x) is not None else self._closed_over(mode, x) for x in leaves
            ]

    @staticmethod
    def _closed_over(mode: Checked | Unchecked, x: Tensor) -> Tensor:
        tensor_types.refuse_unseen(x)
        return mode.taken_in(x)

    def meet(self, x: Tensor) -> None:
        """Note an array from outside of which a body without types, on real ranks, gets the block itself: a view of it tells
        nobody of a write."""
        if not self.body.check and id(x) not in self.met:
            self.met[id(x)] = x, _versions(x)

    def sized_by_values(self) -> bool:
        """Whether the shapes of results may differ by rank, for all that is known: on real ranks, of a body with types."""
        return isinstance(self.mode, Checked) and self.mode.sized_by_values

    def __exit__(self, *exception: Any) -> None:
        if self.mode is not None:
            self.mode.__exit__(*exception)
        state.leave(*self._records)
        del self._records  # which hold this: no cycle is left
        state.unwatched.discard(self)
        if self.met and exception[0] is None:
            _refuse_written(self.met)


def _versions(x: Tensor) -> tuple[int, int]:
    """Of an array, by which writes through views count that are made below autograd, and of its block, for those above."""
    return torch_internals.version(x), torch_internals.version(torch_internals.local(torch_internals.peel(x)))


def _refuse_written(met: dict[int, tuple[Tensor, Any]]) -> None:
    written = [x for x, before in met.values() if _versions(x) != before]
    if written:
        raise InPlaceError(
            report(
                "shard_map",
                "the body has written into a view of an array from outside, by values that may differ by rank",
                [f"{described(x)}, of which ranks may now hold different values" for x in written],
                "return the value from the body, and write outside; or x.clone() of the array as an argument",
            )
        )


def _intercept() -> None:
    """Have torch ask us where it does what no mode of ours sees, from the first body on; outside of one it is as it was."""
    if not torch_internals.run_compiled_as_written(watched) or not (_intercepted or torch_internals.all_is_seen()):
        unseen = " and ".join(torch_internals.unseen())
        problem = f"a body cannot see how, in torch {torch.__version__}, {unseen}: gradients would be wrong"
        raise TransformError(report("shard_map", problem, fix="a release of torch that is tested, 2.11 to 2.15"))
    if not _intercepted:
        torch_internals.intercept_function_apply(_function_apply, watched)
        torch_internals.intercept_reverse_mode(_differentiated_by, watched)
        torch_internals.intercept_parameters(_made_parameter, watched)
        watch_checkpoints()
        _intercepted.append(True)


def watch_checkpoints() -> None:
    """Have `torch.utils.checkpoint` compute again in what was around it, a body or a module's draws."""
    torch_internals.intercept_checkpoint(computed_again, _is_around)


def _is_around() -> bool:
    here = state.now()
    return here.run is not None or here.keyed is not None


def _before_exchange(how: str, target: Tensor, _: Any) -> None:
    """What a call of `Tensor.set_` has to pass, which no mode sees."""
    mode = context.mode()
    if how == "set_" and isinstance(mode, Checked) and torch_internals.function_mode_on():
        mode.refuse_set(target)


torch_internals.ask_before_exchange(_before_exchange)


def _made_parameter(parameter: Tensor, data: Tensor) -> None:
    """A parameter that is made in a body, of which no mode learns, is its data under another name."""
    if (found := tensor_types.read(data)) is not None:
        mark(parameter, found)
        if tensor_types.is_borrowed(data):
            tensor_types.borrow(parameter)


def _differentiated_by(x: Tensor) -> Tensor:
    """What a gradient inside a body without types is taken by: a tensor from outside becomes the rank's own first, or its
    gradient would be the ranks' sum."""
    mode = context.mode()
    if isinstance(mode, Checked):
        return x
    with torch_internals.no_torch_function():
        x = mode.taken_in(x)
        if tensor_types.read(x) is None:  # on a real rank one without gradient is good as it is, but for its name
            (x,) = linear_map.apply(CollectiveMap("copy", mode.body.mesh, mode.body.axes, "closure"), x)
            mark(x, mode.own)
        return x


def watched() -> bool:
    """Whether the mode of a body sees what this thread calls."""
    return context.mode() is not None and torch_internals.function_mode_on()


def _function_apply(cls: Any, apply: Any, args: Any, kwargs: Any) -> Any:
    """A user's `autograd.Function` in a body: no mode sees that it is applied."""
    if cls.__module__ == linear_map.__name__ or cls is torch_internals.checkpoint_saver:
        return apply(*args, **kwargs)
    mode = context.mode()
    if cls is torch_internals.checkpoint_function:
        function, _, *given = args
        if not any(torch_internals.needs_gradient(x) for x in op_arguments.tensors_in(given)):
            return function(*given)
        raise TransformError(
            report(
                "torch.utils.checkpoint",
                "with use_reentrant=True the backward pass computes the function again outside of the shard_map body",
                fix="vfn.remat(f)(...), or checkpoint(f, ..., use_reentrant=False)",
            )
        )
    if not isinstance(mode, Checked):
        return mode.call(apply, cls.__name__, args, kwargs)
    return _typed_apply(mode, cls, apply, args, kwargs)


def _typed_apply(mode: Checked, cls: Any, apply: Any, args: Any, kwargs: Any) -> Any:
    """A Function in a body with types: what it gives varies as its operands do, and as its forward has made it, which the
    mode does see: where that draws, say."""
    inside: list[types.Type] = []

    def applied(*args: Any, **kwargs: Any) -> Any:
        out = apply(*args, **kwargs)
        inside.extend(
            found for x in op_arguments.tensors_in(out) if (found := tensor_types.own(x)) is not None and found.plain
        )
        return out

    name, given = f"{cls.__name__}.apply", op_arguments.tensors_in(args, kwargs)
    out = mode.combining(applied, name, args, kwargs, to=None if given else mode.everywhere)
    made = [x for x in op_arguments.tensors_in(out) if tensor_types.own(x) is not None]
    extra = frozenset().union(*(found.varying for found in inside)) - frozenset().union(
        *(mode.typeof(x).varying for x in made)
    )
    if extra:
        if any(x.requires_grad for x in made):
            raise VaryingTypeError(
                report(
                    name,
                    "its forward makes something that differs by rank of operands that do not, so their gradients would not "
                    "be added up",
                    [f"operand {i} is {tensor_types.text(x, mode.typeof(x))}" for i, x in enumerate(given)],
                    f"vfn.pvary(x, {min(extra)!r}) for the operands",
                )
            )
        for x in made:
            have = mode.typeof(x)
            mark(x, types.of(have.varying | extra, have.unreduced, have.reduced))
    if mode.compared:
        replica_check.body_alike(mode.body, name, args, kwargs, out, opaque=True)
    return out


def local(x: Any) -> Any:
    """`x`; where it is an array from outside of the body that runs, as the value that the body computes with.

    For transforms, which take their arguments before any function of the body sees them.
    """
    run = context.run()
    if run is None or not isinstance(x, Tensor) or not tensor_types.outside(x, run.body.auto):
        return x
    if run.mode is None:
        return run.adopt(x)
    with torch_internals.no_torch_function():
        return run.mode.taken_in(x)


def capture(remembering: bool = False) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A function that enters the present body again, for what is computed anew during a backward pass.

    Modes are off there, and the thread may be another one. With `remembering` what has been taken in and promoted up to now is
    the same there: for what is differentiated by it.
    """
    run = context.run()
    if run is None:
        return contextlib.nullcontext
    remembered = dict(run.mode.remembered) if remembering and run.mode is not None else None
    return lambda: running(run.body, run.adopt, run.intercepted, run.writes, remembered)


def taken_in(xs: Iterable[Tensor]) -> bool:
    """Make values of the body that runs of those that are from outside of it, and say whether some were not yet."""
    mode = context.mode()
    if mode is None:
        return False
    with torch_internals.no_torch_function():
        before = len(mode.remembered)
        for x in xs:
            if tensor_types.read(x) is None:
                mode.taken_in(x)
        return len(mode.remembered) > before


def remembered() -> list[Tensor]:
    """What the body that runs has made of values to use in their place."""
    mode = context.mode()
    return [] if mode is None else [made for _, _, made in mode.remembered.values()]


def computed_again(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Callable[..., Any], context.Again]:
    """`fn` for a call with these arguments that a backward pass makes anew, and what it runs in.

    In a nest of checkpoints the arguments are other tensors then, which have lost their types.
    """
    known = [(tensor_types.read(x), tensor_types.is_borrowed(x)) for x in op_arguments.tensors_in(args, kwargs)]

    def again(*args: Any, **kwargs: Any) -> Any:
        with torch_internals.no_torch_function():
            for x, (type_, borrowed) in zip(op_arguments.tensors_in(args, kwargs), known, strict=True):
                if type_ is not None and tensor_types.own(x) is None:  # its base may have that of another view
                    mark(x, type_)
                    if borrowed:
                        tensor_types.borrow(x)
        return fn(*args, **kwargs)

    return again, context.Again(context.snapshot(), capture(), *(also() for also in captures))
