"""Calling a function that has a derivative rule: its arguments, which transform uses the rule, and what the rule gives."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from .. import torch_internals
from ..base import context, state, tree
from ..base.containers import opened
from ..base.errors import TransformError, VaryingTypeError
from ..base.messages import count_text, described, report
from ..base.user_calls import called, checked_function, positional
from ..local_types import tensor_types, types
from ..shard_map import body
from .custom_rules import CustomRule, Joined, Unfollowed, applied, closed_over, hiding, mark

Tensor = torch.Tensor
Q = ParamSpec("Q")
R = TypeVar("R")


def by_position(f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], where: str) -> tuple[Any, ...]:
    """All arguments of a call by position, defaults filled in: as rules take them."""
    if not kwargs and len(args) == _most(f):
        return tuple(args)
    try:
        bound = inspect.signature(f).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        if not kwargs:
            return tuple(args)  # a builtin, or a call whose error says more
        failures = [str(error)]
    else:
        bound.apply_defaults()
        if not bound.kwargs:
            return bound.args
        failures = [f"{name!r} has no position" for name in bound.kwargs]
    what = "arguments by keyword must have a position, since the rule takes them by position"
    raise TransformError(report(where, what, failures, f"give {', '.join(kwargs) or 'them'} by position"))


@functools.lru_cache(maxsize=1024)
def _most(f: Callable[..., Any]) -> int | None:
    """How many arguments `f` takes by position at most; None where there is no such number."""
    return positional(f)


def places(f: Callable[..., Any], nums: Any, names: Any, where: str) -> tuple[int, ...]:
    """The places of the arguments that are not differentiated, by number and by name."""
    numbers = [nums] if isinstance(nums, int) else list(nums)
    wrong = [n for n in numbers if not isinstance(n, int) or isinstance(n, bool)]
    given = [names] if isinstance(names, str) else list(names)
    known = list(inspect.signature(f).parameters) if given or any(n < 0 for n in numbers if n not in wrong) else []
    unknown = [name for name in given if name not in known]
    if wrong or unknown:
        failures = [f"nondiff_argnums has {described(n)}" for n in wrong]
        failures += [f"there is no parameter {name!r}" for name in unknown]
        what = "nondiff_argnums are places of arguments, nondiff_argnames their names"
        raise TransformError(report(where, what, failures, "nondiff_argnums=(0,), or nondiff_argnames=('f',)"))
    return tuple(sorted({n % len(known) if n < 0 else n for n in numbers} | {known.index(name) for name in given}))


class Ruled(Generic[Q, R]):
    """A function with a rule of its own for its derivative: how `custom_jvp` and `custom_vjp` begin."""

    def __init__(
        self,
        f: Callable[Q, R],
        nondiff_argnums: int | Sequence[int] = (),
        nondiff_argnames: str | Sequence[str] = (),
    ) -> None:
        kind = type(self).__name__
        checked_function(f, kind)
        functools.update_wrapper(self, f)  # type: ignore[arg-type]
        self.fun = f
        self.where = f"{kind} of {getattr(f, '__name__', type(f).__name__)}"
        self.nondiff = places(f, nondiff_argnums, nondiff_argnames, kind)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)  # type: ignore[arg-type]

    def arguments(self, rule: Any, missing: str, args: Any, kwargs: Any, stop: Callable[[Any], Any]) -> Arguments:
        """Those of a call. `missing`: what sets the rule; `stop`: what is done to those without derivative."""
        if rule is None:
            raise TransformError(report(self.where, "it has no rule yet", fix=f"f.{missing} before the first call"))
        every = by_position(self.fun, args, kwargs, self.where)
        return Arguments(self.where, [stop(x) if n in self.nondiff else x for n, x in enumerate(every)], self.nondiff)


class Arguments:
    """The arguments of a call, by position: the leaves of those that are differentiated, and the others."""

    def __init__(self, where: str, args: Sequence[Any], static: Sequence[int]) -> None:
        self.where, self.args, self.static = where, args, [n for n in static if n < len(args)]
        self.dynamic = [n for n in range(len(args)) if n not in self.static]
        chosen = tuple(args[n] for n in self.dynamic)
        self.leaves, self.treedef = opened(chosen, where, "args", numpy=True, modules=True)
        self.moving = [
            i for i, x in enumerate(self.leaves) if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
        ]
        if context.body() is not None:
            self.leaves = [body.local(x) if i in self.moving else x for i, x in enumerate(self.leaves)]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that have derivatives."""
        return [self.leaves[i] for i in self.moving]

    def level(self) -> int | None:
        """The level of the transform that is to use the rule; None: the function runs as it is."""
        now = state.now()
        found = None if now.for_types else torch_internals.follower(self.tensors, now.ruled)
        if found is not None and len(now.derivatives) > 1:
            now.derivatives[-1]()
        return found

    def nondiff(self) -> list[Any]:
        """The other arguments."""
        return [self.args[n] for n in self.static]

    def rebuilt(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments that are differentiated, with these in place of their tensors."""
        leaves = list(self.leaves)
        for i, x in zip(self.moving, tensors, strict=True):
            leaves[i] = x
        return tree.unflatten(self.treedef, leaves)

    def whole(self, tensors: Sequence[Any]) -> list[Any]:
        """All arguments, in order."""
        args, chosen = list(self.args), self.rebuilt(tensors)
        for n, x in zip(self.dynamic, chosen, strict=True):
            args[n] = x
        return args


@dataclasses.dataclass
class RuledRun:
    """How a function with a rule is run for a transform that differentiates it.

    Attributes:
        level, depth, alone: as a `CustomRule` has them.
        inner: the arguments' tensors, which the transform does not follow.
    """

    level: int
    depth: int
    alone: bool
    inner: list[Tensor]

    def running(self, where: str) -> Any:
        """What the function, and its rule, run in: the transforms around this one, as far as they can tell."""
        if self.alone:
            return contextlib.nullcontext()
        if self.level or self.depth < 2:
            return hiding(where, *range(self.level, torch_internals.level() + 1))
        return context.setting(grad_depth=self.depth - 1)


def way(tensors: Sequence[Tensor], level: int) -> RuledRun:
    """How to run a function whose tensors are followed at this level."""
    depth = context.grad_depth()
    alone = level == 0 and depth < 2 and not any(torch_internals.is_dual(torch_internals.peel(x)) for x in tensors)
    if alone:
        inner = [x.detach() for x in tensors]
    elif level or depth < 2:
        inner = list(applied(Unfollowed, level, *tensors))
    else:
        inner = [x.view_as(x) for x in tensors]
    if context.body() is not None:
        mark(inner, [tensor_types.read(x) for x in tensors])
    return RuledRun(level, depth, alone, inner)


def ambient() -> Callable[[], Any]:
    """What a rule for cotangents runs in: the body, the mesh and the module of its call."""
    now = state.now()
    around_it = now.run, now.unit, now.keyed, now.key_uses, now.recorder, context.current_mesh()
    if around_it.count(None) == len(around_it) and not now.strict and now.grad_depth < 2:
        return contextlib.nullcontext
    again = context.Again(context.snapshot(), body.capture(), *(also() for also in body.captures))
    depth = max(context.grad_depth() - 1, 0)

    @contextlib.contextmanager
    def around() -> Any:
        with again, context.setting(grad_depth=depth):
            yield

    return around


def types_of(xs: Sequence[Tensor]) -> list[types.Type | None]:
    """Of the values of a body; None for each outside of one."""
    here = context.body()
    return [tensor_types.type_in(x, here) if here is not None else None for x in xs]


def joined(rule: CustomRule, args: Sequence[Tensor], outs: Sequence[Tensor], rest: Sequence[Tensor]) -> list[Tensor]:
    """The results of the function, with the rule for their derivative."""
    if torch_internals.level() > 1:
        rule = dataclasses.replace(rule, layers=torch_internals.active_layers())
    made = applied(Joined, rule, *args, *outs, *rest)
    mark(made, rule.types[rule.given : rule.given + rule.made])
    return list(made)


def refuse_closed_over(where: str, how: RuledRun, outs: Sequence[Tensor]) -> None:
    """Raise where a result follows a tensor that the transform differentiates by, and that is no argument."""
    if how.level or (how.depth < 2 and not how.alone):
        lost = (
            torch_internals.follower(outs, range(how.level + 1, torch_internals.level() + 1), forward=False)
            == how.level
        )
    elif how.alone and how.depth == 0:
        lost = any(x.requires_grad for x in outs)
    else:
        lost = _reaches(outs, state.now().primals, [] if how.alone else how.inner)
    if lost:
        raise closed_over(where)


def without_rule(f: Callable[..., Any], args: Sequence[Any], where: str) -> Any:
    """``f(*args)``, where no transform differentiates by an argument."""
    out = called(f, args, {}, where)
    if state.now().for_types:
        return out
    tensors = [x for x in tree.leaves(out) if isinstance(x, Tensor)]
    level = torch_internals.follower(tensors, forward=False)
    if level or (level == 0 and context.grad_depth() and _reaches(tensors, state.now().primals, [])):
        raise closed_over(where)
    return out


def _reaches(outs: Sequence[Tensor], primals: Sequence[Tensor], stops: Sequence[Tensor]) -> bool:
    """Whether autograd comes from a result to a primal, other than through one of the stops."""
    ends = {id(x) for x in primals} | {x.grad_fn for x in primals if x.grad_fn is not None}
    seen: set[Any] = {x.grad_fn for x in stops if x.grad_fn is not None}
    leaves = {id(x) for x in stops if x.grad_fn is None}
    todo = [x.grad_fn for x in outs if x.requires_grad]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = id(getattr(node, "variable", None))
        if (node in ends or leaf in ends) and leaf not in leaves:
            return True
        todo += [other for other, _ in node.next_functions]
    return False


def fitted(
    where: str, word: str, paths: Sequence[str], xs: Sequence[Tensor], found: Sequence[Any], known: Sequence[Any]
) -> list[Any]:
    """Derivatives of `xs`, of their shapes, dtypes and, in a body, types (`known`); or an error that names each that is not."""
    failures, out = [], []
    for path, x, d in zip(paths, xs, found, strict=True):
        if d is not None and not isinstance(d, Tensor):
            failures.append(f"{path} is {described(x)}, its {word} {described(d)}")
        elif d is not None and (d.shape != x.shape or d.dtype != x.dtype):
            failures.append(f"{path} is {tensor_types.text(x)}, its {word} {tensor_types.text(d)}")
    if failures:
        what = f"the rule gives {word}s that do not fit"
        raise TransformError(report(where, what, failures, f"a {word} of the same shape and dtype, or None for zero"))
    mode, here = context.mode(), context.body()
    if here is None or not here.check:
        return list(found)
    extra: list[str] = []
    for path, x, d, want in zip(paths, xs, found, known, strict=True):
        if d is None or want is None:
            out.append(d)
            continue
        have = mode.typeof(d)
        wider = sorted(have.varying - want.varying)
        if wider or have.unreduced != want.unreduced or have.reduced != want.reduced:
            given = f"{path} is {tensor_types.text(x, types.dual(want) if word == 'cotangent' else want)}"
            failures.append(f"{given}, its {word} {tensor_types.text(d, have)}")
            extra = extra or wider
        out.append(mode.promoted(d, have, want))
    if failures:
        fix = f"vfn.psum(x, {extra[0]!r}) of it in the rule" if extra else f"a {word} of that type"
        what = f"the rule gives a {word} whose type is not that of its value"
        raise VaryingTypeError(report(where, what, failures, fix))
    return out


def pair(value: Any, where: str, what: str, parts: str) -> tuple[Any, Any]:
    """What a rule gives, where that is a pair."""
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return value[0], value[1]
    said = count_text(len(value), "entry") if isinstance(value, (tuple, list)) else described(value)
    raise TransformError(
        report(where, f"{what} must return a pair, {parts}", [f"it returned {said}"], f"return {parts}")
    )
