"""`custom_vjp`: a function with a rule of its own for cotangents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from .. import torch_internals
from ..base import context, tracebacks, tree
from ..base.containers import opened
from ..base.errors import SpecError, TransformError
from ..base.messages import described, report
from ..base.user_calls import called, checked_function
from ..shard_map import body
from . import ruled_calls as rules
from .custom_rules import CustomRule
from .fwd_results import FwdCheck

Tensor = torch.Tensor
Q = ParamSpec("Q")
R = TypeVar("R")
__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here


class custom_vjp(rules.Ruled[Q, R]):
    """`f`, whose gradient is by a rule of yours: a decorator; `defvjp` gives the rule.

    Args:
        f: a function of trees, by position, to a tree.
        nondiff_argnums, nondiff_argnames: arguments without derivative, such as functions: any Python values, handed to
            `fwd` at their places and to `bwd` before all else. No tensor that is differentiated.

    ``fwd(*args)`` returns ``(out, residuals)``, ``bwd(residuals, cotangent)`` a tuple with a cotangent for each argument: a
    tree like it of tensors with its shapes and dtypes, or None for zero, for the argument or for a part of it; None or
    anything else at leaves that are no floating-point tensors. The cotangent is a tree like `out`, with zeros where nothing
    came back and at integer and bool tensors. In a `shard_map` body each cotangent has the type of its argument.

    The innermost transform that follows an argument uses the rule, those around it differentiate `fwd` and `bwd`, as in
    JAX; on autograd alone (``.backward(create_graph=True)``) the rule counts at every order. Besides the residuals the
    arguments are kept, by which a second derivative runs `fwd` again; under `jit` only what is used is kept.

    Raises:
        TransformError: no rule; forward-mode differentiation; `f` closes over a tensor that is differentiated; what the
            rule gives does not fit: of `fwd` another tree, shape or dtype than of `f`, which is run once without values for
            each kind of plain arguments.
        VaryingTypeError: in a body, a cotangent differs by rank where its argument does not.

    Source: `jax.custom_vjp`.

    >>> import torch, vescale_fn as vfn
    >>> @vfn.custom_vjp
    ... def clipped(x):  # the identity, whose gradient is clipped
    ...     return x
    >>> clipped.defvjp(lambda x: (x, None), lambda _, g: (g.clamp(-1, 1),))
    >>> vfn.grad(lambda x: (5 * clipped(x)).sum())(torch.ones(2))
    tensor([1., 1.])
    """

    fwd: Callable[..., Any] | None = None
    bwd: Callable[..., Any] | None = None

    def defvjp(
        self,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        symbolic_zeros: bool = False,
        optimize_remat: bool = False,
    ) -> None:
        """Set the rule. `optimize_remat` changes nothing: a plan keeps what is used of `fwd`, and no more."""
        checked_function(fwd, "custom_vjp.defvjp")
        checked_function(bwd, "custom_vjp.defvjp")
        if symbolic_zeros:
            what = "symbolic_zeros=True is not supported: fwd gets values, and bwd tensors"
            raise TransformError(report("custom_vjp.defvjp", what, fix="a rule for cotangents that may be zeros"))
        self.fwd, self.bwd, self.check = fwd, bwd, FwdCheck(self.fun, self.where)

    @torch_internals.not_compiled
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R:
        given = self.arguments(self.fwd, "defvjp(fwd, bwd)", args, kwargs, lambda x: x)
        self._refuse_followed(given)
        level = given.level()
        if level is None:
            return rules.without_rule(self.fun, given.whole(given.tensors), self.where)
        return _Call(self, given, level).run()

    def _refuse_followed(self, given: rules.Arguments) -> None:
        for n, x in zip(given.static, given.nondiff(), strict=True):
            tensors = [leaf for leaf in tree.leaves(x) if isinstance(leaf, Tensor)]
            if torch_internals.follower(tensors) is not None:
                failures = [f"argument {n} is {described(x)}"]
                what = "an argument that nondiff_argnums names is differentiated, and the rule gives no gradient for it"
                fix = "leave it out of nondiff_argnums: the rule may give None for it; or vfn.stop_gradient(x)"
                raise TransformError(report(self.where, what, failures, fix))


class _Call:
    """One call, for a transform that differentiates it."""

    def __init__(self, f: custom_vjp[Any, Any], given: rules.Arguments, level: int) -> None:
        self.f, self.given, self.where = f, given, f.where
        self.tensors = given.tensors
        self.way = rules.way(self.tensors, level)

    def forward(self, tensors: Sequence[Tensor]) -> tuple[list[Any], Any, list[Any], Any]:
        """The leaves of result and residuals, and their trees."""
        with self.way.running(self.where):
            out = called(self.f.fwd, self.given.whole(tensors), {}, self.where)  # type: ignore[arg-type]
        out, res = rules.pair(out, self.where, "fwd", "(out, residuals)")
        self.f.check(self.given, out)
        return *opened(out, self.where, "out", numpy=True, modules=True), *tree.flatten(res)

    def run(self) -> Any:
        outs, self.out_def, res, self.res_def = self.forward(self.way.inner)
        if context.body() is not None:
            outs, res = ([body.local(x) for x in xs] for xs in (outs, res))
        self.outs = [None if isinstance(x, Tensor) else x for x in outs]
        self.dtypes = [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else None for x in outs]
        self.smooth = [i for i, x in enumerate(outs) if _is_smooth(x)]
        self.res = [None if isinstance(x, Tensor) else x for x in res]
        self.kept = [i for i, x in enumerate(res) if isinstance(x, Tensor)]
        made, rest = [outs[i] for i in self.smooth], [res[i] for i in self.kept]
        rules.refuse_closed_over(self.where, self.way, made)
        if not made:
            return tree.unflatten(self.out_def, outs)
        self.known = rules.types_of([*self.tensors, *made, *rest])
        rule = CustomRule(
            self.where,
            self.way.level,
            self.way.depth,
            self.way.alone,
            len(self.tensors),
            len(made),
            self.pull,
            self.push,
            self.again,
            False,
            self.known,
            rules.ambient(),
        )
        for i, x in zip(self.smooth, rules.joined(rule, self.tensors, made, rest), strict=True):
            outs[i] = x
        return tree.unflatten(self.out_def, outs)

    def again(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The residuals once more, as functions of the arguments."""
        _, _, res, _ = self.forward(tensors)
        return [res[i] for i in self.kept]

    def pull(self, args: Sequence[Tensor], rest: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Any]:
        res, cts = list(self.res), list(self.outs)
        for i, x in zip(self.kept, rest, strict=True):
            res[i] = x
        for i, of in enumerate(self.dtypes):
            if of is not None and i not in self.smooth:
                cts[i] = torch.zeros(of[0], dtype=of[1], device=of[2])
        for i, x in zip(self.smooth, cotangents, strict=True):
            cts[i] = x
        operands = (*self.given.nondiff(), tree.unflatten(self.res_def, res), tree.unflatten(self.out_def, cts))
        found = called(self.f.bwd, operands, {}, self.where)  # type: ignore[arg-type]
        leaves, paths = self._cotangents(found)
        moving = self.given.moving
        return rules.fitted(
            self.where,
            "cotangent",
            [paths[i] for i in moving],
            args,
            [leaves[i] for i in moving],
            self.known[: len(args)],
        )

    def _cotangents(self, found: Any) -> tuple[list[Any], list[str]]:
        """What the rule gives for each leaf of the arguments, and the leaves' paths."""
        wanted = self.given.rebuilt(self.tensors)
        fix = "a tuple with a cotangent for each differentiated argument, None for zero: (ct,) for one argument"
        if not isinstance(found, (tuple, list)) or isinstance(found, Tensor) or len(found) != len(wanted):
            n = len(wanted)
            said = f"a {type(found).__name__} of {len(found)}" if isinstance(found, (tuple, list)) else described(found)
            what = f"bwd must return a tuple with a cotangent for each of the {n} argument{'s' * (n != 1)}"
            raise TransformError(report(self.where, what, [f"it returned {said}"], fix))
        try:
            spread = tree.broadcast(tuple(found), wanted, self.where, "cotangents", "args", is_leaf=tree.none)
        except SpecError as error:
            raise TransformError(str(error)) from None
        nodes = tree.leaves(wanted, is_leaf=tree.none)  # of which None is one in both
        leaves = [ct for ct, x in zip(spread, nodes, strict=True) if x is not None]
        return leaves, tree.paths(wanted, "args")

    def push(self, args: Sequence[Tensor], tangents: Sequence[Tensor]) -> Sequence[Tensor]:
        raise TransformError(
            report(
                self.where,
                "it has a rule for cotangents alone, and cannot be differentiated in forward mode (jvp, jacfwd, hessian)",
                fix="vfn.custom_jvp, whose rule is for tangents and gives gradients as well; or reverse mode: "
                "vfn.linearize, torch.func.jacrev",
            )
        )


def _is_smooth(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
