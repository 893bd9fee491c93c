"""`custom_jvp`: a function with a rule of its own for tangents, whose transpose gives its gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from .. import torch_internals
from ..base import context, tracebacks, tree
from ..base.containers import opened
from ..base.errors import TransformError
from ..base.messages import report
from ..base.user_calls import called, checked_function
from ..local_types import tensor_types
from ..shard_map import body
from . import ruled_calls as rules
from .custom_rules import CustomRule, Tangents, applied
from .stop_gradient import stop_gradient

Tensor = torch.Tensor
Q = ParamSpec("Q")
R = TypeVar("R")
__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here


class custom_jvp(rules.Ruled[Q, R]):
    """`f`, whose derivative is by a rule of yours, in forward and in reverse mode: a decorator; `defjvp` gives the rule.

    Args:
        f: a function of trees, by position, to a tree.
        nondiff_argnums, nondiff_argnames: arguments without derivative, such as functions: any Python values, handed to
            the rule before all else.

    ``rule(primals, tangents)`` takes two tuples with an entry for each argument and returns ``(out, tangent_out)``. It must
    be linear in the tangents, of which gradients take the transpose; the tangent of a result has its shape and dtype,
    None counts as zero. At leaves that are no floating-point tensors a tangent is zero (tensors) or the leaf itself, and is
    not read. The innermost transform that follows an argument uses the rule, those around it differentiate the rule.

    Raises:
        TransformError: no rule; `f` closes over a tensor that is differentiated; what the rule gives does not fit.
        VaryingTypeError: in a `shard_map` body, a tangent differs by rank where its result does not.

    Source: `jax.custom_jvp`.

    >>> import torch, vescale_fn as vfn
    >>> @vfn.custom_jvp
    ... def log1pexp(x):
    ...     return torch.log1p(torch.exp(x))
    >>> @log1pexp.defjvp
    ... def rule(primals, tangents):
    ...     (x,), (t,) = primals, tangents
    ...     return log1pexp(x), (1 - 1 / (1 + torch.exp(x))) * t
    >>> vfn.grad(log1pexp)(torch.tensor(100.0))  # where autograd's is inf / inf
    tensor(1.)
    """

    rule: Callable[..., Any] | None = None

    def defjvp(self, jvp: Callable[..., Any], symbolic_zeros: bool = False) -> Callable[..., Any]:
        """Set the rule, and return it: a decorator."""
        checked_function(jvp, "custom_jvp.defjvp")
        if symbolic_zeros:
            what = "symbolic_zeros=True is not supported: the rule gets tensors"
            raise TransformError(report("custom_jvp.defjvp", what, fix="a rule for tangents that may be zeros"))
        self.rule = jvp
        return jvp

    def defjvps(self, *jvps: Callable[..., Any] | None) -> None:
        """Set the rule by one function for each argument, ``jvp(tangent, out, *primals)``, or None for zero; their results are
        added up."""
        if self.nondiff:
            fix = "f.defjvp(rule), which takes those arguments first"
            raise TransformError(report("custom_jvp.defjvps", "not together with nondiff_argnums", fix=fix))

        def rule(primals: Any, tangents: Any) -> Any:
            out = self(*primals)  # type: ignore[call-arg]
            slopes = [jvp(t, out, *primals) for jvp, t in zip(jvps, tangents, strict=True) if jvp is not None]
            zero = tree.map_(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else x, out)
            return out, functools.reduce(lambda a, b: tree.map_(torch.add, a, b), slopes) if slopes else zero

        self.rule = rule

    @torch_internals.not_compiled
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R:
        given = self.arguments(self.rule, "defjvp(rule)", args, kwargs, stop_gradient)
        level = given.level()
        if level is None:
            return rules.without_rule(self.fun, given.whole(given.tensors), self.where)
        return _Call(self, given, level).run()


class _Call:
    """One call, for a transform that differentiates it."""

    def __init__(self, f: custom_jvp[Any, Any], given: rules.Arguments, level: int) -> None:
        self.f, self.given, self.where = f, given, f.where
        self.tensors = given.tensors
        self.way = rules.way(self.tensors, level)

    def ruled(self, tensors: Sequence[Tensor], tangents: Sequence[Tensor]) -> tuple[list[Any], Any, list[Any]]:
        """The leaves of the result, its tree, and the tangents of those leaves that have derivatives."""
        primals = self.given.rebuilt(tensors)
        slopes = [torch.zeros_like(x) if isinstance(x, Tensor) else x for x in self._unmoved()]
        for i, t in zip(self.given.moving, tangents, strict=True):
            slopes[i] = t
        operands = (*self.given.nondiff(), primals, tree.unflatten(self.given.treedef, slopes))
        found = called(self.f.rule, operands, {}, self.where)  # type: ignore[arg-type]
        out, slope = rules.pair(found, self.where, "the rule", "(out, tangent_out)")
        outs, out_def = opened(out, self.where, "out", numpy=True, modules=True)
        try:
            spread = tree.broadcast(slope, out, self.where, "tangent_out", "out", is_leaf=tree.none)
        except ValueError as error:
            raise TransformError(str(error)) from None
        nodes = tree.leaves(out, is_leaf=tree.none)
        found = [t for t, x in zip(spread, nodes, strict=True) if x is not None]
        if context.body() is not None:
            outs, found = ([body.local(x) for x in xs] for xs in (outs, found))
        smooth = [i for i, x in enumerate(outs) if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())]
        paths = tree.paths(out, "out")
        values = [outs[i] for i in smooth]
        fits = rules.fitted(
            self.where,
            "tangent",
            [paths[i] for i in smooth],
            values,
            [found[i] for i in smooth],
            rules.types_of(values),
        )
        fits = [torch.zeros_like(x) if t is None else t for x, t in zip(values, fits, strict=True)]
        self.smooth = smooth
        return outs, out_def, fits

    def _unmoved(self) -> list[Any]:
        moving = set(self.given.moving)
        return [None if i in moving else x for i, x in enumerate(self.given.leaves)]

    def run(self) -> Any:
        how = self.way
        if how.alone:
            tangents = list(applied(Tangents, *self.tensors))
            _as(tangents, self.tensors)
        else:
            tangents = [torch.zeros_like(x) for x in how.inner]
        with how.running(self.where):
            outs, out_def, slopes = self.ruled(how.inner, tangents)
        made, rest = [outs[i] for i in self.smooth], slopes if how.alone else []
        rules.refuse_closed_over(self.where, how, made)
        if not made:
            return tree.unflatten(out_def, outs)
        rule = CustomRule(
            self.where,
            how.level,
            how.depth,
            how.alone,
            len(self.tensors),
            len(made),
            self.pull,
            self.push,
            None,
            how.alone,
            rules.types_of([*self.tensors, *made, *rest]),
            rules.ambient(),
        )
        for i, x in zip(self.smooth, rules.joined(rule, self.tensors, made, rest), strict=True):
            outs[i] = x
        return tree.unflatten(out_def, outs)

    def push(self, args: Sequence[Tensor], tangents: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.ruled(args, tangents)[2]

    def pull(self, args: Sequence[Tensor], rest: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Sequence[Any]:
        """The transpose of the rule, which is linear in the tangents."""
        further = torch.is_grad_enabled()
        if torch_internals.transforming():
            zeros = [torch.zeros_like(x) for x in args]
            return torch.func.vjp(lambda *tangents: tuple(self.push(args, tangents)), *zeros)[1](tuple(cotangents))
        if not further:
            args = [x.detach() for x in args]
        with torch.enable_grad():
            tangents = [torch.zeros_like(x, requires_grad=True) for x in args]
            _as(tangents, args)
            slopes = self.push(args, tangents)
        pairs = [(t, ct) for t, ct in zip(slopes, cotangents, strict=True) if t.requires_grad]
        if not pairs:
            return [None] * len(args)
        outs, cts = zip(*pairs)
        return torch.autograd.grad(outs, tangents, cts, create_graph=further, allow_unused=True)


def _as(xs: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Give values of a body the types of others."""
    for x, other in zip(xs, others, strict=True):
        if (type_ := tensor_types.read(other)) is not None:
            tensor_types.mark(x, type_)
