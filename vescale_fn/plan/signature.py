"""One call of a function under `jit`: its leaves, what they are called, and the key of the plan that serves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from .._core import torch_internals
from .._core.base import tree
from .._core.base.containers import opened
from .._core.base.errors import TransformError
from .._core.base.messages import described, report, short
from .._core.base.user_calls import called, owner, parameter
from .._core.sharding.layout import WHOLE, as_written, type_text
from .arriving import arrived
from .picked import Picked
from .tracing import ambient
from .tracing import leaves as leaves_
from .tracing.value_guards import Guard


class PlanKey(tuple[Any, ...]):
    """The key of a plan: the tree, the signatures of its leaves, the static arguments and what is ambient.

    There may be thousands of leaves, so a key knows its hash, and, once it was the key of two calls, what tells it of another.
    """

    _hash: int | None = None
    _serves: Callable[[Sequence[Any]], bool] | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash

    def expect(self, leaves: Sequence[Any], before: PlanKey | None) -> None:
        """Be ready for more calls like that of these leaves, if the one before had this key too."""
        if before != self:
            return
        places = [i for i, x in enumerate(leaves) if type(x) is torch.Tensor and x.layout is torch.strided]
        apart = set(range(len(leaves))).difference(places)
        others = [(i, leaves_.signature(leaves[i])) for i in sorted(apart)]
        alike = torch_internals.alike([leaves[i] for i in places])

        def serves(leaves: Sequence[Any]) -> bool:
            tensors = [leaves[i] for i in places] if others else leaves
            return alike(*tensors) and all(leaves_.signature(leaves[i]) == one for i, one in others)

        self._serves = serves

    def is_of(self, treedef: Any, leaves: Sequence[Any], fixed: Any, around: Any) -> bool:
        """Whether it is the key of a call; False may mean that it is not known to be."""
        known = self._serves is not None and self[0] == treedef and self[2] == fixed and self[3] == around
        return known and self._serves(leaves)  # type: ignore[misc]


class JitCall:
    """A call.

    Args:
        f: the function.
        args, kwargs: what it is called with.
        static, donated: the arguments that the plan is made for, and that it may use up.
        in_specs: how the arguments are to lie, or None.
        before: the key of the call before.

    Attributes:
        leaves, treedef: of the arguments, without the static ones.
        key: equal for calls that one plan serves, or several with guards.
        guards: of the plan that was recorded for this call.
        raised: what recording it raised, perhaps an error of the function itself, until somebody shows it.
        watched: the processes that are to run it as in debug mode, as they run it as written.
        found: whether nobody has written it: it is an iteration of a loop.
    """

    key: PlanKey
    found = False
    guards: Sequence[Guard] = ()
    raised: Exception | None = None
    watched: tuple[int, ...] = ()
    _names: list[str] | None = None
    _static: tuple[int, ...] = ()
    _named: Mapping[str, Any] = MappingProxyType({})  # the static arguments by name

    def __init__(
        self,
        f: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        static: Picked | None,
        donated: Picked | None,
        in_specs: Any = None,
        before: PlanKey | None = None,
    ) -> None:
        self.f, self.args, self.kwargs = f, args, kwargs
        self._donated, self._in_specs, fixed = donated, in_specs, ()
        if static is not None:
            self._static = static.of(len(args))
            fixed = tuple(_typed(args[n]) for n in self._static)
            args = tuple(None if n in self._static else x for n, x in enumerate(args))
            if kwargs and (named := {name: kwargs[name] for name in static.names if name in kwargs}):
                self._named = named
                fixed = (*fixed, *((name, _typed(x)) for name, x in named.items()))
                kwargs = {name: x for name, x in kwargs.items() if name not in named}
        given = (args, kwargs) if kwargs else (args,)
        self.leaves, self.treedef = opened(given, "jit", self.names, numpy=True, modules=True, passing=self._owner)
        around = ambient.around()
        again = before is not None and before.is_of(self.treedef, self.leaves, fixed, around)
        self.key = (
            before if again else PlanKey((self.treedef, tuple(map(leaves_.signature, self.leaves)), fixed, around))
        )

    def _owner(self) -> Sequence[Any]:
        return owner(self.f, self.args)

    def static(self) -> list[Any]:
        """The leaves of the static arguments."""
        return tree.leaves([*(self.args[n] for n in self._static), *self._named.values()])

    def run(self) -> Any:
        """The function's own result."""
        return self._called(self.args, self.kwargs)

    def function(self, *given: Any, **kwargs: Any) -> Any:
        """The function of what is not static."""
        args = [self.args[n] if n in self._static else x for n, x in enumerate(given)]
        return self._called(args, {**kwargs, **self._named})

    def _called(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._in_specs is not None:
            name = getattr(self.f, "__name__", type(self.f).__name__)
            named = kwargs.keys() - self._named.keys()
            args = arrived(args, self._static, named, self.names, self._in_specs, f"jit({name})")
        return called(self.f, args, kwargs, "jit")

    def follows_gradients(self) -> bool:
        """Whether autograd follows an argument."""
        return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in self.leaves)

    def names(self) -> list[str]:
        """The leaves as the function's own code would name them: ``params['w']``."""
        if self._names is not None:
            return self._names
        found = self._names = []
        for n, arg in enumerate(self.args):
            if n not in self._static:
                found += tree.paths(arg, parameter(self.f, self.args, n) or f"args[{n}]")
        for name in self._by_name():
            found += tree.paths(self.kwargs[name], name)
        return found

    def _by_name(self) -> list[str]:
        """The arguments by name that are not static, in the order of their leaves."""
        return sorted(self.kwargs.keys() - self._named.keys())

    def donated(self) -> list[int]:
        """The places of the leaves that the plan may use up."""
        if self._donated is None:
            return []
        places, names = self._donated.of(len(self.args)), self._donated.names
        given = [(n in places, arg) for n, arg in enumerate(self.args) if n not in self._static]
        given += [(name in names, self.kwargs[name]) for name in self._by_name()]
        return [i for i, donated in enumerate(d for d, arg in given for _ in tree.leaves(arg)) if donated]

    def unhashable(self) -> TransformError:
        """What is said where the key has no hash."""
        named = zip(self.names(), self.leaves, strict=True)
        failures = [f"{name} is {described(x)}" for name, x in named if not _is_hashable(leaves_.signature(x))]
        failures += [
            f"args[{n}], which is static, is {described(self.args[n])}"
            for n in self._static
            if not _is_hashable(self.args[n])
        ]
        failures += [
            f"{name}, which is static, is {described(x)}" for name, x in self._named.items() if not _is_hashable(x)
        ]
        return TransformError(
            report(
                "jit",
                "arguments are trees of tensors and of hashable Python values",
                failures,
                "torch.as_tensor(x) for numbers; a tuple for a list of settings; what never changes, closed over",
            )
        )


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _typed(x: Any) -> Any:
    """A static argument as a key: with its types, since 1, 1.0 and True are equal, and so are 0.0 and -0.0."""
    if isinstance(x, (tuple, frozenset)):
        return type(x), (tuple if isinstance(x, tuple) else frozenset)(map(_typed, x))
    return type(x), repr(x) if isinstance(x, (float, complex)) else x


def difference(before: Any, now: Any, names: Sequence[str]) -> str:
    """In what two keys differ."""
    if before[0] != now[0]:
        return "the arguments' trees differ"
    for name, one, other in zip(names, before[1], now[1]):
        if one != other:
            was, is_ = _shown(one), _shown(other)
            return f"{name} was {was} and is {is_}" if was != is_ else f"{name} ({is_}) lies otherwise in memory"
    if before[2] != now[2]:
        return "a static argument differs"
    return next((f"{name} differs" for name, one, other in zip(ambient.NAMES, before[3], now[3]) if one != other), "")


def _shown(signature: Any) -> str:
    if isinstance(signature, tuple) and len(signature) > 1:
        spec = signature[0]
        if hasattr(spec, "tensor_meta"):
            return type_text(spec.tensor_meta.shape, spec.tensor_meta.dtype, as_written(spec))
        if isinstance(spec, torch.Size):
            return type_text(spec, signature[2], WHOLE)
        return short(signature[1])
    return short(signature)
