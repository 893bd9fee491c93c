"""Gradients over any pytree, on plain tensors and on arrays: `grad`, `value_and_grad`.

They run on the plain autograd engine, so every kernel works and memory is freed as usual; when a `torch.func` transform is
already active they hand over to `torch.func`, which nests. Gradients come back in the structure, dtype and layout of what
they are gradients of, already reduced.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import torch

from .. import torch_internals
from ..arrays.array import Array, is_array, mesh_of, wrap
from ..base import context, dtypes, tracebacks, tree
from ..base.array_notes import noted, notes_of
from ..base.containers import checked
from ..base.errors import TransformError
from ..base.front_door import public
from ..base.messages import report, short
from ..base.torch_errors import explained
from ..base.user_calls import called, checked_function
from ..shard_map import interrupts
from ..sharding.layout import WHOLE
from .primals import PLAIN, Split, argnums_of, as_primals, described_result, is_place, scalar, settle_together

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here


A = TypeVar("A")  # what is differentiated, and so the gradient
Q = ParamSpec("Q")


@overload
def value_and_grad(
    f: Callable[Concatenate[A, Q], Any], argnums: Literal[0] = 0, has_aux: Literal[False] = False
) -> Callable[Concatenate[A, Q], tuple[torch.Tensor, A]]: ...
@overload
def value_and_grad(
    f: Callable[Q, Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[Q, Any]: ...
@torch_internals.not_compiled
@public("value_and_grad")
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
    wrong = [n for n in (argnums if isinstance(argnums, (tuple, list)) else (argnums,)) if not is_place(n)]
    if wrong:
        gave_arguments = any(isinstance(x, (torch.Tensor, dict)) for x in wrong)
        raise TransformError(
            report(
                where,
                f"argnums must be an int or a tuple of ints, the places of arguments, but it is {short(argnums)}",
                fix=f"vfn.{where}(f)(x, ...): the arguments go to the function that it returns"
                if gave_arguments
                else "argnums=0 for the first argument",
            )
        )

    @torch_internals.not_compiled
    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        saved = interrupts.before()
        try:
            if (known := _commonest(args, argnums)) is not None:
                place, leaves, shape = known
                primals = [x.detach().requires_grad_() for x in leaves]
                given = list(args)
                given[place] = tree.unflatten_plain(shape, iter(primals))
                with context.differentiating():
                    context.differentiated_by(primals)
                    value, aux = _call(f, given, kwargs, has_aux, where)
                    grads = _gradients(value, primals, False)
                value, aux, grads = _finished(value, aux, grads, leaves, has_aux, wants_value)
                gradient = tree.unflatten_plain(shape, iter(grads))
            else:
                split = Split(where, f, args, argnums_of(argnums, args, where))
                engine = (
                    _by_functorch
                    if torch_internals.transforming() or torch_internals.forward_ad_active()
                    else _by_autograd
                )
                value, aux, grads = engine(f, split, kwargs, has_aux, wants_value)
                trees = split.gradients(grads)
                gradient = trees[0] if isinstance(argnums, int) else tuple(trees)
            if not wants_value:
                return (gradient, aux) if has_aux else gradient
            return ((value, aux), gradient) if has_aux else (value, gradient)
        except BaseException:
            interrupts.undo(saved)
            raise

    return run


@overload
def grad(
    f: Callable[Concatenate[A, Q], Any], argnums: Literal[0] = 0, has_aux: Literal[False] = False
) -> Callable[Concatenate[A, Q], A]: ...
@overload
def grad(f: Callable[Q, Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[Q, Any]: ...
@torch_internals.not_compiled
@public("grad")
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
        raise TransformError(
            report(
                where,
                "with has_aux=True the function must return (value, aux)",
                [f"it returned {described_result(out)}"],
                "return loss, aux; or leave has_aux out, where the loss is all there is",
            )
        )
    value, aux = out if has_aux else (out, None)
    if has_aux:
        checked(aux, where, "aux", numpy=True)
    return scalar(value, where), aux


def recording(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` out of inference mode, which keeps autograd from recording anything: a gradient there would be zero."""

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return f(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return f(*args, **kwargs)

    return run


def within_another(primals: Sequence[torch.Tensor]) -> bool:
    """Whether an outer gradient may go through one that is taken by these: not in a backward pass that nothing follows."""
    return torch.is_grad_enabled() and (context.grad_depth() > 0 or any(x.requires_grad for x in primals))


def fresh(x: torch.Tensor, attached: bool, recorder: Any = None) -> torch.Tensor:
    """A variable to differentiate by: `x` itself under another name where an outer gradient goes through it."""
    if recorder is not None and (found := recorder.same_input(x)) is not None:
        return found.requires_grad_()
    if attached and x.requires_grad:
        out = x.view_as(x)
    else:
        out = (x.clone() if x.is_inference() else x.detach()).requires_grad_()
    return keep_mark(out, x) if isinstance(x, Array) else out


def keep_mark(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Aliases of an array keep what its spec says of its gradient."""
    if reduced := notes_of(x).reduced:
        noted(out).reduced = reduced
    return out


class Followed(context.differentiating):
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


_FLOATS = frozenset(dtypes.FLOATS)
_dtype, _followed = operator.attrgetter("dtype"), operator.attrgetter("requires_grad")
_frozen = operator.methodcaller("is_inference")


def _commonest(args: Sequence[Any], argnums: Any) -> tuple[int, list[torch.Tensor], Any] | None:
    """The place of the argument to differentiate, its leaves and its shape, in the case that must cost little: plain
    tensors of floats, that nothing else follows, in lists, tuples and dictionaries. Else None: `Split` takes any case.
    """
    if type(argnums) is not int or not 0 <= argnums < len(args):
        return None
    leaves: list[torch.Tensor] = []
    shape = tree.flatten_plain(args[argnums], PLAIN, leaves)
    plain = leaves and PLAIN.issuperset(map(type, leaves)) and _FLOATS.issuperset(map(_dtype, leaves))
    if (
        not plain
        or context.grad_depth()
        or torch_internals.watched()
        or torch_internals.forward_ad_active()
        or not torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or True in map(_followed, leaves)
        or True in map(_frozen, leaves)
    ):
        return None
    return argnums, leaves, shape


@recording
def _by_autograd(
    f: Any, split: Split, kwargs: dict[str, Any], has_aux: bool, wants_value: bool
) -> tuple[Any, Any, list[torch.Tensor]]:
    originals = split.primals
    attached = within_another(originals)
    with Followed():
        recorder = None if attached else torch_internals.recorder()
        primals = [fresh(x, attached, recorder) for x in originals]
        context.differentiated_by(primals)
        value, aux = _call(f, split.with_primals(primals), kwargs, has_aux, split.where)
        grads = _gradients(value, primals, attached)
    if attached:
        value = as_primals([value], [_whole_like(value)])[0] if wants_value else None
        return value, aux, as_primals(grads, originals)
    return _finished(value, aux, grads, originals, has_aux, wants_value)


def _gradients(value: torch.Tensor, primals: Sequence[torch.Tensor], attached: bool) -> list[torch.Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(x) for x in primals]
    refuse_twice(value)
    seed = None
    # followed, or `once_differentiable` would take what is made of it for a constant
    if attached and context.body() is None:
        seed = torch.ones_like(value).requires_grad_()
        context.count_followed()
    elif getattr(value.grad_fn, "is_asked", None) is False and value.output_nr == 0:
        value.grad_fn.is_asked = True  # type: ignore[union-attr]  # of a function that knows the gradients of its first result
    found = backward(value, primals, seed, create_graph=attached)
    return zeros_for_none(found, primals)


def refuse_twice(value: torch.Tensor) -> None:
    """Raise where a value depends on a gradient through a Function that can be differentiated once: torch would take that for a
    constant."""
    if not context.followed():
        return
    todo, seen = [value.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("::Error"):
            raise TransformError(
                report(
                    "grad",
                    "the gradient of a gradient goes through an autograd.Function that can be differentiated only once",
                    fix="a backward without @once_differentiable, of torch ops; or .detach() of the inner gradient",
                )
            )
        todo += [other for other, _ in node.next_functions]


def _finished(
    value: torch.Tensor,
    aux: Any,
    grads: list[torch.Tensor],
    originals: Sequence[torch.Tensor],
    has_aux: bool,
    wants_value: bool,
) -> tuple[Any, Any, list[torch.Tensor]]:
    """What is given back where no outer gradient goes through it."""
    if has_aux:
        aux = tree.map_(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, aux)
    if not wants_value:
        return None, aux, settle_together(grads, originals)
    value, *grads = settle_together([value.detach(), *grads], [_whole_like(value), *originals])
    return value, aux, grads


def zeros_for_none(grads: Sequence[Any], primals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients, with zeros where nothing depends on a primal."""
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, primals)]


def backward(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """`torch.autograd.grad`, whose errors are put in our words."""
    try:
        return torch.autograd.grad(*args, **kwargs, allow_unused=True)
    except RuntimeError as error:
        if (ours := explained(error)) is None:
            raise
        raise ours from None


def _whole_like(value: torch.Tensor) -> torch.Tensor:
    """A stand-in for a value's layout, replicated: what it is brought to."""
    if not is_array(value):
        return value
    return wrap(torch_internals.local(torch_internals.peel(value)), mesh_of(value), WHOLE, torch.Size(()))  # type: ignore[attr-defined]


def _by_functorch(
    f: Any, split: Split, kwargs: dict[str, Any], has_aux: bool, wants_value: bool
) -> tuple[Any, Any, list[torch.Tensor]]:
    rest: dict[str, Any] = {}

    def flat(*primals: torch.Tensor) -> Any:
        args = split.with_primals([keep_mark(p, x) for p, x in zip(primals, split.primals, strict=True)])
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
    value = as_primals([value], [_whole_like(value)])[0] if wants_value else None
    return value, aux, as_primals(grads, primals)
