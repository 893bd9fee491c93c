"""Gradients over any pytree, on plain tensors and on arrays: `grad`, `value_and_grad`, `vjp`.

They run on the plain autograd engine, so every kernel works and memory is freed as usual; when a `torch.func` transform is
already active they hand over to `torch.func`, which nests. Gradients come back in the structure, dtype and layout of what
they are gradients of, already reduced.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint

from . import _torch, context, tracebacks, tree
from .array import Array, is_array, mesh_of, moved, moved_together, spec_of, wrap
from .calls import called, checked_function, parameter
from .errors import TransformError, described, dtype_text, mesh_text, report, short
from .layout import WHOLE, layout, type_text
from .meanings import explained
from .mesh import axes_of, same
from .spec import P

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))

# --- the leaves that are differentiated -------------------------------------------------------------------------------


class Split:
    """The arguments of a call, with the floating-point tensors among those to differentiate taken out."""

    def __init__(self, where: str, f: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int]) -> None:
        self.where, self.args, self.argnums = where, args, argnums
        self.leaves, self.moving, self.defs, self.counts = [], [], [], []
        for n in argnums:
            leaves, treedef = tree.flatten(args[n])
            moving = _differentiable(leaves)
            if len(moving) < len(leaves):  # there may be keys, which are nodes around integers
                leaves, treedef = tree.flatten_opaque(args[n])
                moving = _differentiable(leaves)
            self.moving += [i + len(self.leaves) for i in moving] if self.leaves else moving
            self.leaves += leaves
            self.defs.append(treedef)
            self.counts.append(len(leaves))
        self.primals: list[torch.Tensor] = [self.leaves[i] for i in self.moving]
        if not self.moving:
            raise TransformError(report(
                where, "there is no floating-point tensor to differentiate",
                [f"argument {n}{_named(f, args, n)} holds {', '.join(sorted({_kind(x) for x in leaves})) or 'no leaves'}"
                 for n in argnums for leaves in [tree.flatten_opaque(args[n])[0]]]
                or ["it was given no argument to differentiate"],
                _how_to_differentiate(self.leaves, where)))  # fmt: skip

    def trees(self, leaves: Sequence[Any]) -> list[Any]:
        if len(self.defs) == 1:
            return [self.defs[0].unflatten(leaves)]
        out, start = [], 0
        for treedef, count in zip(self.defs, self.counts, strict=True):
            out.append(treedef.unflatten(leaves[start : start + count]))
            start += count
        return out

    def with_primals(self, primals: Sequence[Any]) -> list[Any]:
        """All arguments, with these in place of the differentiated leaves."""
        leaves = primals
        if len(primals) < len(self.leaves):
            leaves = list(self.leaves)
            for i, x in zip(self.moving, primals, strict=True):
                leaves[i] = x
        args = list(self.args)
        for n, value in zip(self.argnums, self.trees(leaves)):
            args[n] = value
        return args

    def gradients(self, grads: Sequence[Any]) -> list[Any]:
        """A gradient tree for each argument: zeros for integer and bool tensors, other leaves as they are."""
        if len(grads) < len(self.leaves):
            found = dict(zip(self.moving, grads, strict=True))
            grads = [
                found[i] if i in found else torch.zeros_like(x) if isinstance(x, torch.Tensor) else x
                for i, x in enumerate(self.leaves)
            ]
        return self.trees(grads)


def _named(f: Callable[..., Any], args: Sequence[Any], n: int) -> str:
    name = parameter(f, args, n)
    return f" ({name!r})" if name else ""


def _differentiable(leaves: Sequence[Any]) -> list[int]:
    return [
        i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
    ]


def _kind(x: Any) -> str:
    return f"{dtype_text(x.dtype)} tensors" if isinstance(x, torch.Tensor) else f"{type(x).__name__} leaves"


def _how_to_differentiate(leaves: Sequence[Any], where: str) -> str:
    """What to give in place of leaves that cannot be differentiated."""
    if any(isinstance(x, torch.nn.Module) for x in leaves):
        return "params = dict(module.named_parameters()), and torch.func.functional_call(module, params, args)"
    if any(isinstance(x, float) for x in leaves):
        return "torch.tensor(x) for a Python number"
    if any(isinstance(x, np.ndarray) for x in leaves):
        return "torch.from_numpy(x) for a numpy array"
    if where not in ("grad", "value_and_grad"):
        return "floating-point tensors: x.float()"
    return "point argnums at the parameters, or convert them with .float()"


def _is_place(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool)


def _argnums(argnums: Any, args: Sequence[Any], where: str) -> tuple[int, ...]:
    if type(argnums) is int and 0 <= argnums < len(args):
        return (argnums,)
    several = isinstance(argnums, (tuple, list))
    numbers = tuple(argnums) if several else (argnums,)
    wrong = [n for n in numbers if not -len(args) <= n < len(args)]
    if len(numbers) and not wrong and len({n % len(args) for n in numbers}) < len(numbers):
        raise TransformError(report(where, f"argnums={argnums!r} names an argument twice", fix="each of them once"))
    if wrong:
        given = f"{len(args)} argument{'s' * (len(args) != 1)}"
        fix = "argnums=0" if len(args) == 1 else f"argnums between 0 and {len(args) - 1}"
        fix = fix if args else "give what is differentiated by its place"
        raise TransformError(report(
            where, f"argnums={short(argnums)} does not fit a call with {given}",
            [f"there is no argument {short(n)}" for n in wrong],
            f"{fix}; arguments that are given by name are not counted"))  # fmt: skip
    return tuple(n % len(args) for n in numbers)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return type_text(value.shape, value.dtype, spec_of(value))
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {', '.join(map(_described, value))}"
    return described(value)


def _how_to_return(value: Any) -> str:
    """What to return in place of what is no loss."""
    if value is None:
        return "return loss: a `return` is missing"
    if isinstance(value, (int, float)):
        return "the tensor itself, without .item() or float(), from which no gradient comes back"
    if isinstance(value, (tuple, list)) and value and isinstance(value[0], torch.Tensor) and not value[0].ndim:
        rest = "aux" if len(value) == 2 else "(" + ", ".join(f"aux{i}" for i in range(1, len(value))) + ")"
        return f"has_aux=True, with `return loss, {rest}`: only the loss is differentiated"
    if isinstance(value, dict):
        return "one of its entries; for the others as well, `return loss, aux` and has_aux=True"
    if isinstance(value, torch.Tensor) and not value.ndim:
        return "its .abs(), .real or .imag" if value.is_complex() else "a loss computed in floating point"
    return "reduce it: loss.mean() or loss.sum(); with more results, return (loss, aux) and has_aux=True"


def _scalar(value: Any, where: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.ndim or not value.is_floating_point():
        raise TransformError(report(
            where, "the function must return one floating-point number, a 0-d tensor", [f"it returned {_described(value)}"],
            _how_to_return(value)))  # fmt: skip
    return value


# --- layouts of gradients ---------------------------------------------------------------------------------------------


def _goal(primal: torch.Tensor) -> P | None:
    """How the gradient of `primal` lies: as it, unreduced and reduced swapped; None for a plain tensor."""
    if not is_array(primal):
        return None
    spec = spec_of(primal)
    return P(*spec, unreduced=spec.reduced, reduced=spec.unreduced)


def settled(grads: Sequence[torch.Tensor], primals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Bring each gradient to the layout of its primal, differentiably, one by one."""
    out = []
    for g, x in zip(grads, primals, strict=True):
        goal, mesh = _goal(x), mesh_of(x) or mesh_of(g)
        if mesh is not None and (goal is None or not is_array(g) or spec_of(g) != goal):
            g = moved(g, mesh, goal, "grad")
        out.append(g)
    return out


def _settle_together(grads: Sequence[torch.Tensor], primals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same for finished values: what is to be added over the same axes travels as one collective a dtype."""
    out, moving = list(grads), {}
    if _PLAIN.issuperset(map(type, (*grads, *primals))):  # nothing lies anywhere
        return out
    for i, (g, x) in enumerate(zip(grads, primals, strict=True)):
        goal = _goal(x)
        if isinstance(g, Array) and goal is not None and layout(g._spec) != goal:
            moving[i] = goal
        elif isinstance(g, Array) != (goal is not None):
            out[i] = settled([g], [x])[0]
    arrays: list[Any] = [grads[i] for i in moving]
    found = moved_together(arrays, list(moving.values()), "grad: the layout of the primals")
    for i, g in zip(moving, found, strict=True):
        out[i] = g
    return out


# --- grad -------------------------------------------------------------------------------------------------------------


def value_and_grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """The function that returns ``(value, gradient)`` of `f`, or ``((value, aux), gradient)``.

    Args:
        f: a function that returns a 0-d floating-point tensor, or with `has_aux` a pair of it and anything.
        argnums: which argument, or arguments, to differentiate: any trees of tensors.
        has_aux: whether `f` returns ``(value, aux)``.

    Returns:
        A function of the same arguments. The gradient has the structure, dtypes and layouts of the argument: a plain
        tensor's is plain, an array's lies as it does and is reduced (over an axis that the spec calls ``reduced``: it
        stays unreduced). At integer and bool tensors it holds zeros; keys and other leaves pass through. With several
        argnums it is a tuple. Tensors that `f` closes over are constants.

    Raises:
        TransformError: `f` returns no scalar, or nothing to differentiate.

    Source: `jax.value_and_grad`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.value_and_grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0]), "n": 3})
    (tensor(5.), {'w': tensor([2., 4.]), 'n': 3})
    """

    return _value_and_grad(f, argnums, has_aux, "value_and_grad", True)


def _value_and_grad(
    f: Callable[..., Any], argnums: Any, has_aux: bool, where: str, wants_value: bool
) -> Callable[..., Any]:
    """`value_and_grad`, or without the value `grad`; `where` is the name that the user called it by."""
    checked_function(f, where)
    wrong = [n for n in (argnums if isinstance(argnums, (tuple, list)) else (argnums,)) if not _is_place(n)]
    if wrong:
        gave_arguments = any(isinstance(x, (torch.Tensor, dict)) for x in wrong)
        raise TransformError(report(
            where, f"argnums must be an int or a tuple of ints, the places of arguments, but it is {short(argnums)}",
            fix=f"vfn.{where}(f)(x, ...): the arguments go to the function that it returns" if gave_arguments
            else "argnums=0 for the first argument"))  # fmt: skip

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        if (known := _commonest(args, argnums)) is not None:
            place, leaves, shape = known
            primals = [x.detach().requires_grad_() for x in leaves]
            given = list(args)
            given[place] = tree.together(shape, iter(primals))
            with context.differentiating():
                value, aux = _call(f, given, kwargs, has_aux, where)
                grads = _gradients(value, primals, False)
            value, aux, grads = _finished(value, aux, grads, leaves, has_aux, wants_value)
            gradient = tree.together(shape, iter(grads))
        else:
            split = Split(where, f, args, _argnums(argnums, args, where))
            engine = _by_functorch if _torch.transforming() or _torch.forward_ad_active() else _by_autograd
            value, aux, grads = engine(f, split, kwargs, has_aux, wants_value)
            trees = split.gradients(grads)
            gradient = trees[0] if isinstance(argnums, int) else tuple(trees)
        if not wants_value:
            return (gradient, aux) if has_aux else gradient
        return ((value, aux), gradient) if has_aux else (value, gradient)

    return run


def grad(f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """The function that returns the gradient of `f`, or ``(gradient, aux)``; see `value_and_grad`.

    Instead of a raw ``loss.backward()``, which works on arrays too but leaves each ``.grad`` as autograd made it (for a
    replicated parameter often still ``unreduced``: partial sums), it brings every gradient to its parameter's layout.

    Source: `jax.grad`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.grad(vfn.grad(lambda x: x**3))(torch.tensor(2.0))
    tensor(12.)
    """
    return _value_and_grad(f, argnums, has_aux, "grad", False)


def _call(
    f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], has_aux: bool, where: str
) -> tuple[torch.Tensor, Any]:
    out = called(f, args, kwargs, where)
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise TransformError(report(
            where, "with has_aux=True the function must return (value, aux)", [f"it returned {_described(out)}"],
            "return loss, aux; or leave has_aux out, where the loss is all there is"))  # fmt: skip
    value, aux = out if has_aux else (out, None)
    return _scalar(value, where), aux


def _recording(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` out of inference mode, which keeps autograd from recording anything: a gradient there would be zero."""

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return f(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return f(*args, **kwargs)

    return run


def _fresh(x: torch.Tensor, attached: bool) -> torch.Tensor:
    """A variable to differentiate by: `x` itself under another name where an outer gradient goes through it."""
    if attached and x.requires_grad:
        out = x.view_as(x)
    else:
        out = (x.clone() if x.is_inference() else x.detach()).requires_grad_()
    return _keep_mark(out, x) if isinstance(x, Array) else out


def _keep_mark(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Aliases of an array keep what its spec says of its gradient."""
    if isinstance(x, Array) and hasattr(x, "_reduced"):
        out._reduced = x._reduced  # type: ignore[attr-defined]
    return out


class _Followed(context.differentiating):
    """A block in which autograd records."""

    def __enter__(self) -> None:
        super().__enter__()
        self.off = not torch.is_grad_enabled()
        if self.off:
            torch.set_grad_enabled(True)

    def __exit__(self, *error: Any) -> None:
        if self.off:
            torch.set_grad_enabled(False)
        super().__exit__(*error)


_FLOATS = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))
_dtype, _followed = operator.attrgetter("dtype"), operator.attrgetter("requires_grad")
_frozen = operator.methodcaller("is_inference")


def _commonest(args: Sequence[Any], argnums: Any) -> tuple[int, list[torch.Tensor], Any] | None:
    """The place of the argument to differentiate, its leaves and its shape, in the case that must cost little: plain
    tensors of floats, that nothing else follows, in lists, tuples and dictionaries. Else None: `Split` takes any case.
    """
    if (type(argnums) is not int or not 0 <= argnums < len(args) or context.grad_depth() or _torch.watched()
            or _torch.forward_ad_active() or not torch.is_grad_enabled() or torch.is_inference_mode_enabled()):  # fmt: skip
        return None
    leaves: list[torch.Tensor] = []
    shape = tree.apart(args[argnums], _PLAIN, leaves)
    plain = leaves and _PLAIN.issuperset(map(type, leaves)) and _FLOATS.issuperset(map(_dtype, leaves))
    if not plain or True in map(_followed, leaves) or True in map(_frozen, leaves):
        return None
    return argnums, leaves, shape


@_recording
def _by_autograd(
    f: Any, split: Split, kwargs: dict[str, Any], has_aux: bool, wants_value: bool
) -> tuple[Any, Any, list[torch.Tensor]]:
    originals = split.primals
    attached = context.grad_depth() > 0 or (torch.is_grad_enabled() and any(x.requires_grad for x in originals))
    with _Followed():
        primals = [_fresh(x, attached) for x in originals]
        value, aux = _call(f, split.with_primals(primals), kwargs, has_aux, split.where)
        grads = _gradients(value, primals, attached)
    if attached:
        value = settled([value], [_whole_like(value)])[0] if wants_value else None
        return value, aux, settled(grads, originals)
    return _finished(value, aux, grads, originals, has_aux, wants_value)


def _gradients(value: torch.Tensor, primals: Sequence[torch.Tensor], attached: bool) -> list[torch.Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(x) for x in primals]
    found = _backward(value, primals, create_graph=attached)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, primals)]


def _finished(value: torch.Tensor, aux: Any, grads: list[torch.Tensor], originals: Sequence[torch.Tensor], has_aux: bool,
              wants_value: bool) -> tuple[Any, Any, list[torch.Tensor]]:  # fmt: skip
    """What is given back where no outer gradient goes through it."""
    if has_aux:
        aux = tree.map_(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, aux)
    if not wants_value:
        return None, aux, _settle_together(grads, originals)
    value, *grads = _settle_together([value.detach(), *grads], [_whole_like(value), *originals])
    return value, aux, grads


def _backward(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """`torch.autograd.grad`, whose errors are put in our words."""
    try:
        return torch.autograd.grad(*args, **kwargs, allow_unused=True)
    except RuntimeError as error:
        if (ours := explained(error)) is None:
            raise
        raise ours from None


def _whole_like(value: torch.Tensor) -> torch.Tensor:
    """A stand-in for a value's layout, replicated: what it is settled to."""
    if not is_array(value):
        return value
    return wrap(_torch.local(_torch.peel(value)), mesh_of(value), WHOLE, torch.Size(()))  # type: ignore[attr-defined]


def _by_functorch(
    f: Any, split: Split, kwargs: dict[str, Any], has_aux: bool, wants_value: bool
) -> tuple[Any, Any, list[torch.Tensor]]:
    rest: dict[str, Any] = {}

    def flat(*primals: torch.Tensor) -> Any:
        args = split.with_primals([_keep_mark(p, x) for p, x in zip(primals, split.primals, strict=True)])
        value, aux = _call(f, args, kwargs, has_aux, split.where)
        leaves, rest["def"] = tree.flatten(aux)
        rest["leaves"] = leaves
        return value, tuple(x for x in leaves if isinstance(x, torch.Tensor))

    primals = split.primals
    grads, (value, tensors) = torch.func.grad_and_value(flat, argnums=tuple(range(len(primals))), has_aux=True)(
        *primals
    )
    found = iter(tensors)
    aux = tree.unflatten(rest["def"], [next(found) if isinstance(x, torch.Tensor) else x for x in rest["leaves"]])
    value = settled([value], [_whole_like(value)])[0] if wants_value else None
    return value, aux, settled(grads, primals)


# --- vjp --------------------------------------------------------------------------------------------------------------


class Flat:
    """`f` from its differentiated leaves to the tensors of its result, and the way back to a tree like its result."""

    def __init__(self, f: Callable[..., Any], split: Split) -> None:
        self.f, self.split = f, split

    def __call__(self, *moving: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = called(self.f, self.split.with_primals(moving), {}, self.split.where)
        self.leaves, self.treedef = tree.flatten(result)
        return tuple(x for x in self.leaves if isinstance(x, torch.Tensor))

    def rebuilt(self, tensors: Sequence[Any]) -> Any:
        """The last result's tree, with these in place of its tensors."""
        found = iter(tensors)
        return tree.unflatten(self.treedef, [next(found) if isinstance(x, torch.Tensor) else x for x in self.leaves])


def pullback_of(flat: Callable[..., Any], primals: Sequence[torch.Tensor], follow: bool = False) -> tuple[Any, Any]:
    """The results of a function of tensors, and the function from their cotangents to those of `primals`.

    Args:
        follow: whether the pullback will itself be differentiated.
    """
    if _torch.transforming() or _torch.forward_ad_active():
        return torch.func.vjp(flat, *primals)[:2]
    return _autograd_vjp(flat, primals, follow)


def vjp(f: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """``f(*primals)``, and the function from a cotangent of that result to the cotangents of the primals.

    Args:
        f: a function of trees of tensors to a tree of tensors.
        primals: its arguments.

    Returns:
        ``(out, pullback)``; ``pullback(cotangent)`` takes a tree like `out` and returns one tree for each primal, in
        its layout, with zeros at integer and bool tensors. It can be called again.

    Source: `jax.vjp`.

    >>> import torch, vescale_fn as vfn
    >>> out, pullback = vfn.vjp(lambda x: 3 * x, torch.tensor([1.0, 2.0]))
    >>> out, pullback(torch.tensor([1.0, 10.0]))
    (tensor([3., 6.]), (tensor([ 3., 30.]),))
    """
    checked_function(f, "vjp")
    split = Split("vjp", f, primals, range(len(primals)))
    flat = Flat(f, split)
    outs, back = pullback_of(flat, split.primals)
    out = flat.rebuilt(outs)

    def pullback(cotangent: Any, *more: Any) -> tuple[Any, ...]:
        if more:
            raise TransformError(report("vjp: pullback", f"it takes one cotangent, a tree like the result, but {len(more) + 1} "
                                        "were given", fix="pullback((a, b)) for a result (x, y)"))  # fmt: skip
        cotangents = _cotangents(cotangent, out)
        return tuple(split.gradients(settled(back(cotangents), split.primals)))

    return out, pullback


def partner_problem(x: torch.Tensor, partner: Any, word: str) -> str:
    """What is wrong with the tangent or cotangent of `x`; "" if nothing is."""
    if not isinstance(partner, torch.Tensor):
        return f"is {_described(x)}, its {word} is {described(partner)}, not a tensor"
    theirs = mesh_of(partner)
    if partner.shape != x.shape or partner.dtype != x.dtype:
        return f"is {_described(x)}, its {word} {_described(partner)}"
    if theirs is not None and (mine := mesh_of(x)) is not None and not same(mine, theirs):
        return f"lies on the {mesh_text(axes_of(mine))}, its {word} on the {mesh_text(axes_of(theirs))}"
    return ""


def _cotangents(cotangent: Any, out: Any) -> tuple[torch.Tensor, ...]:
    given = tree.broadcast(cotangent, out, "vjp: pullback", "the cotangent", "the result")
    wanted, failures = tree.leaves(out), []
    for name, ct, x in zip(tree.paths(out, "out"), given, wanted, strict=True):
        if isinstance(x, torch.Tensor) and (problem := partner_problem(x, ct, "cotangent")):
            failures.append(f"{name} {problem}")
    if failures:
        raise TransformError(report("vjp: pullback", "the cotangent does not fit the result", failures,
                                    "a tensor of the same shape and dtype for each, torch.ones_like(x) say"))  # fmt: skip
    return tuple(ct for ct, x in zip(given, wanted, strict=True) if isinstance(x, torch.Tensor))


@_recording
def _autograd_vjp(
    flat: Callable[..., Any], originals: Sequence[torch.Tensor], follow: bool
) -> tuple[Any, Callable[[Any], Any]]:
    attached = context.grad_depth() > 0 or (torch.is_grad_enabled() and any(x.requires_grad for x in originals))
    with _Followed():
        primals = [_fresh(x, attached) for x in originals]
        outs = flat(*primals)
    moving = [i for i, x in enumerate(outs) if x.requires_grad]

    def back(cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        pairs = [outs[i] for i in moving], [cotangents[i] for i in moving]
        found: Any = (None,) * len(primals)
        if moving:
            further = attached or follow or (torch.is_grad_enabled() and any(ct.requires_grad for ct in pairs[1]))
            found = _backward(pairs[0], primals, pairs[1], retain_graph=True, create_graph=further)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, primals, strict=True)]

    return (outs if attached else tuple(x.detach() for x in outs)), back
