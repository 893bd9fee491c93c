"""Types of local values: for each manual axis, how one rank's value relates to the other ranks', and how ops combine
them.

Over a mesh axis a value is

- ``I`` invariant: the same on every rank; its cotangent is the same on every rank, and complete;
- ``V`` varying: each rank's own; so is its cotangent;
- ``U`` unreduced: the ranks' values are still to be added; its cotangent is reduced;
- ``R`` reduced: the same on every rank, and its cotangent is unreduced.

Where an invariant value meets a varying one it is promoted, by a cast whose transpose is the sum over the axis: the sum
that a user would otherwise have to write by hand, or forget. The type sits on the tensor itself, below any functorch
wrapper. This file is the rules; `tracking.py` applies them while a body runs.

Source: JAX's varying manual axes (`jax.typeof(x).vma`) and sharding in types; all four states also in Meta's
    spmd_types.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from . import _torch
from .blocks import Blocks
from .errors import TypingError, report
from .layout import layout, type_text
from .mesh import same
from .spec import P, split_axes


class Type:
    """The axes over which a value varies, is unreduced, is reduced; over all others it is invariant. Made by `of`."""

    __slots__ = ("plain", "reduced", "unreduced", "varying")

    def __init__(self, varying: frozenset[str], unreduced: frozenset[str], reduced: frozenset[str]) -> None:
        self.varying, self.unreduced, self.reduced = varying, unreduced, reduced
        self.plain = not unreduced and not reduced

    def letter(self, axis: str) -> str:
        """I, V, U or R."""
        return "V" if axis in self.varying else "U" if axis in self.unreduced else "R" if axis in self.reduced else "I"

    def __repr__(self) -> str:
        parts = [f"{letter}:{','.join(sorted(names))}" for letter, names in
                 (("V", self.varying), ("U", self.unreduced), ("R", self.reduced)) if names]  # fmt: skip
        return f"{{{' '.join(parts)}}}" if parts else ""


@functools.lru_cache(maxsize=4096)
def _interned(varying: frozenset[str], unreduced: frozenset[str], reduced: frozenset[str]) -> Type:
    return Type(varying, unreduced, reduced)


def of(varying: Iterable[str] = (), unreduced: Iterable[str] = (), reduced: Iterable[str] = ()) -> Type:
    """The type with these axes; equal types are one object."""
    return _interned(frozenset(varying), frozenset(unreduced), frozenset(reduced))


INVARIANT = of()


@functools.lru_cache(maxsize=4096)
def with_letter(type_: Type, axes: tuple[str, ...], letter: str) -> Type:
    """`type_`, but with `letter` over `axes`."""
    kept = [names.difference(axes) for names in (type_.varying, type_.unreduced, type_.reduced)]
    return of(*(names.union(axes) if letter == word else names for word, names in zip("VUR", kept)))


@functools.lru_cache(maxsize=4096)
def dual(type_: Type) -> Type:
    """The type of a cotangent: unreduced and reduced change places."""
    return of(type_.varying, type_.reduced, type_.unreduced)


@functools.lru_cache(maxsize=4096)
def both(inner: Type, outer: Type | None) -> Type:
    """The type of what is `inner` over some axes, and `outer` over others."""
    if outer is None:
        return inner
    return of(inner.varying | outer.varying, inner.unreduced | outer.unreduced, inner.reduced | outer.reduced)


@functools.lru_cache(maxsize=4096)
def over(type_: Type, axes: tuple[str, ...]) -> Type:
    """What a type says of these axes."""
    return of(*(names.intersection(axes) for names in (type_.varying, type_.unreduced, type_.reduced)))


@functools.lru_cache(maxsize=4096)
def differing(type_: Type, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the axes over which a value is not invariant."""
    return tuple(axis for axis in axes if type_.letter(axis) != "I")


@functools.lru_cache(maxsize=4096)
def of_spec(spec: P) -> Type:
    """The type of the local value of an array that lies as `spec`."""
    return of((axis for row in split_axes(spec, len(spec)) for axis in row), spec.unreduced, spec.reduced)


# --- classes of functions, by name --------------------------------------------------------------------------------------

# Its result is no value, or is the value itself.
NOT_TYPED = frozenset(
    """
    requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook backward dim ndimension size stride numel
    nelement element_size data_ptr storage_offset untyped_storage storage get_device is_floating_point is_complex
    is_contiguous is_signed is_pinned is_shared is_inference is_same_size is_set_to is_conj is_neg is_coalesced has_names
    __len__ __hash__ __repr__ __str__ __format__ __reduce_ex__ _set_grad_enabled set_default_dtype get_default_dtype
    result_type can_cast""".split()
)
_READS_A_NUMBER = frozenset(
    """
    item tolist numpy __array__ __dlpack__ __bool__ __int__ __float__ __index__ __complex__ is_nonzero equal allclose
    __contains__""".split()
)
# It gives each rank something else: uninitialised memory, or what comes from the rank's own generator.
DRAWS = frozenset(
    """
    empty empty_strided empty_permuted empty_like new_empty new_empty_strided rand randn randint randperm rand_like
    randn_like randint_like normal bernoulli multinomial poisson binomial rrelu dropout dropout1d dropout2d dropout3d
    alpha_dropout feature_dropout feature_alpha_dropout native_dropout gumbel_softmax normal_ uniform_ random_ bernoulli_
    exponential_ geometric_ cauchy_ log_normal_ dropout_ alpha_dropout_ feature_dropout_ feature_alpha_dropout_ rrelu_
    """.split()
)
# It writes arguments that are not its first, and without saying so in its name. What `written` finds.
_WRITES_ASIDE = frozenset(
    """
    batch_norm instance_norm native_batch_norm embedding embedding_bag""".split()
)
_PURE_OPERATORS = ("aten", "prims", "vescale_fn")  # namespaces whose ops are functions of their arguments alone


def kind_of(func: Any) -> tuple[str, str]:
    """The class of a torch function, which is a method of `tracking.Checked`, and the function's name."""
    name = getattr(func, "__name__", "?")
    if name in ("__get__", "__set__"):
        return "getter" if name == "__get__" else "setter", func.__self__.__name__
    if _torch.is_operator(func):
        packet = getattr(func, "overloadpacket", func)
        name = packet.__name__
        if str(packet).split(".")[0] not in _PURE_OPERATORS:
            return "operator" if _schema(func) is not None else "unknown", name
    if func is torch.autograd.grad:
        return "gradient", name
    if name == "detach":
        return "alias", name
    if name == "_make_dual":
        return "dual", name
    if name in NOT_TYPED:
        return "untouched", name
    if name in _WRITES_ASIDE:
        return "aside", name
    if name in _READS_A_NUMBER:
        return "number", name
    inplace_operator = name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__iter__")
    if name == "__setitem__" or inplace_operator or (name.endswith("_") and not name.endswith("__")):
        return "write", name
    return "draw" if name in DRAWS else "function", name


_signature = functools.lru_cache(maxsize=64)(inspect.signature)


def _schema(func: Any) -> Any:
    """The schema of an operator that writes some of its arguments; None for another."""
    overloads = [getattr(func, name) for name in func.overloads()] if hasattr(func, "overloads") else [func]
    found = overloads[0]._schema if len(overloads) == 1 else None
    return found if found is not None and found.is_mutable else None


def written(func: Any, name: str, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a function of class "aside", or an operator, writes."""

    def argument(position: int, key: str) -> Any:
        return args[position] if len(args) > position else kwargs.get(key)

    if name in _WRITES_ASIDE:
        try:
            bound = _signature(func).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):  # a builtin: torch.batch_norm(x, weight, bias, mean, var, training, ...)
            bound = {key: argument(i, key) for i, key in
                     enumerate(("input", "weight", "bias", "running_mean", "running_var", "training"))}  # fmt: skip
        if "embedding" in name:
            return tensors(bound["weight"]) if bound.get("max_norm") is not None else []
        if not bound.get("training", bound.get("use_input_stats", name == "instance_norm")):
            return []
        return tensors(bound.get("running_mean"), bound.get("running_var"))
    return tensors([argument(i, a.name) for i, a in enumerate(_schema(func).arguments)
                    if a.alias_info is not None and a.alias_info.is_write])  # fmt: skip


# --- how ops combine types --------------------------------------------------------------------------------------------

# The only functions that an unreduced value may go through, by how they are linear. Everything else needs it whole.
_LINEAR = {
    "linear": """
        neg positive clone contiguous detach alias to type type_as float double half bfloat16 cuda cpu view view_as
        reshape reshape_as flatten unflatten ravel transpose t permute movedim moveaxis swapaxes swapdims mT T mH H
        adjoint squeeze unsqueeze expand expand_as broadcast_to narrow select split split_with_sizes chunk unbind
        tensor_split __getitem__ getitem index_select take gather flip roll rot90 repeat repeat_interleave tile unfold
        diagonal diag trace tril triu sum mean cumsum real imag data requires_grad pad view_as_real
        view_as_complex""",
    "sum of": "add __add__ __radd__ sub __sub__ subtract",
    "row of": "cat concat concatenate stack hstack vstack dstack column_stack",
    "product of": "mul multiply __mul__ __rmul__ matmul __matmul__ __rmatmul__ mm bmm mv dot inner outer einsum linear "
    "tensordot kron vdot",
    "quotient of": "div divide true_divide __truediv__ truediv",
}
LINEARITY = {name: how for how, names in _LINEAR.items() for name in names.split()}


def not_linear(function: str, args: Any, kwargs: Any) -> str | None:
    """Why these arguments make a function that is linear by its name not linear; or None."""
    given = (*args, *kwargs.values())
    if function == "pad" and (kwargs.get("value", args[3] if len(args) > 3 else None) or 0) != 0:
        return "the padding would be added once a rank"
    if kwargs.get("rounding_mode") is not None:
        return f"rounding_mode={kwargs['rounding_mode']!r} rounds each rank's part"
    if function in _CASTS or kwargs.get("dtype") is not None:
        have = args[0].dtype if args and isinstance(args[0], torch.Tensor) else None
        for a in given if function in _CASTS else [kwargs["dtype"]]:
            to = _cast_to(a)
            if to is not None and have is not None and _rank_of(to) < _rank_of(have):
                return f"{to} rounds each rank's part"
    return None


_CASTS = frozenset("to type type_as".split())


def _cast_to(a: Any) -> torch.dtype | None:
    """The dtype that an argument of a cast stands for."""
    if isinstance(a, torch.Tensor):
        return a.dtype
    if isinstance(a, str) and a.startswith("torch."):
        a = getattr(torch, a.split(".")[-1], None)
    return a if isinstance(a, torch.dtype) else getattr(a, "dtype", None)


def _rank_of(dtype: torch.dtype) -> int:
    return 0 if dtype is torch.bool else 2 if dtype.is_floating_point or dtype.is_complex else 1


def has_number(args: Any, kwargs: Any) -> bool:
    """Whether something else than a tensor is an operand: a number of Python or numpy, a bool."""
    return any(not isinstance(a, torch.Tensor) for a in args) or any(
        not isinstance(a, torch.Tensor) for key, a in kwargs.items() if key not in ("alpha", "out")
    )


class Misuse(Exception):
    """Types that do not go together over `axis`, and why; `tracking` adds which function and which values."""

    def __init__(self, axis: str, why: str, instead: str) -> None:
        super().__init__(why)
        self.axis, self.why, self.instead = axis, why, instead


@functools.lru_cache(maxsize=8192)
def combine(function: str, types: tuple[Type, ...], numbers: bool) -> tuple[Type, Type]:
    """The type that the operands of a function are brought to where they are invariant or reduced, and its result's
    type.

    Args:
        types: of the tensor operands, in order.
        numbers: whether a number is an operand as well.
    """
    varying: frozenset[str] = frozenset().union(*(t.varying for t in types))
    if all(t.plain for t in types):
        return of(varying), of(varying)
    result: dict[str, list[str]] = {"V": [], "U": [], "R": [], "I": []}
    marked = frozenset().union(*(t.unreduced | t.reduced for t in types))
    for axis in sorted(marked | varying):
        letters = [t.letter(axis) for t in types]
        result[_over_one_axis(function, axis, letters, numbers)].append(axis)
    return of(varying), of(result["V"], result["U"], result["R"])


@functools.lru_cache(maxsize=8192)
def union(types: tuple[Type, ...]) -> Type | None:
    """The type of what is made of plain values, by any function; None where one is not plain."""
    return combine("", types, False)[1] if all(t.plain for t in types) else None


def _over_one_axis(function: str, axis: str, letters: list[str], numbers: bool) -> str:
    if "U" in letters:
        how, others = LINEARITY.get(function), [letter for letter in letters if letter != "U"]
        sum_first = f"vfn.psum(x, {axis!r}) first, or vfn.psum_scatter"
        if how is None:
            raise Misuse(axis, f"{function} is not linear, so the sum over {axis!r} must come before it", sum_first)
        if how == "linear" and (letters[0] != "U" or ("U" in letters[1:] and not function.endswith("_as"))):
            raise Misuse(axis, f"{function} is not linear in its other operands, such as an index", sum_first)
        if "V" in others:
            raise Misuse(axis, "a value still to be added over the ranks meets one that differs by rank", sum_first)
        if how == "sum of" and numbers:
            raise Misuse(
                axis, f"the number would be added once a rank of {axis!r}", f"{sum_first}, then add the number"
            )
        if how in ("sum of", "row of") and others:
            raise Misuse(
                axis, f"the invariant value would be added once a rank of {axis!r}", f"{sum_first}, then {function}"
            )
        if how == "product of" and (letters.count("U") > 1 or len(letters) > 2):
            raise Misuse(
                axis, f"{function} is not linear in two unreduced values together, nor with a third", sum_first
            )
        if how == "quotient of" and letters[0] != "U":
            raise Misuse(axis, "dividing by an unreduced value is not linear", sum_first)
        if how in ("product of", "quotient of") and others not in ([], ["R"]):
            raise Misuse(axis, "an unreduced value may only be scaled by a reduced one, whose gradient is unreduced too",
                         f"vfn.pcast(w, {axis!r}, to='reduced') for the other operand")  # fmt: skip
        return "U"
    if "V" in letters:
        return "V"
    if "R" in letters and "I" in letters:
        raise Misuse(axis, "a reduced value meets an invariant one: their cotangents differ",
                     f"vfn.pcast(x, {axis!r}, to='reduced') for the invariant one")  # fmt: skip
    return "R" if "R" in letters else "I"


@functools.lru_cache(maxsize=4096)
def promotion(have: Type, varying: Type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes over which a value must be cast from invariant, and from reduced, to varying."""
    return tuple(sorted(varying.varying - have.varying - have.unreduced - have.reduced)), tuple(
        sorted(varying.varying & have.reduced)
    )


@functools.lru_cache(maxsize=4096)
def promoted(have: Type, want: Type) -> Type:
    """The type of a value that was `have` once it varies where `want` does."""
    return with_letter(have, tuple(sorted(want.varying)), "V")


# --- on the tensor ----------------------------------------------------------------------------------------------------


def mark(x: torch.Tensor, type_: Type) -> None:
    """Give a local value its type. What it is a view of notes it too: so a view that `vmap` makes unseen has one."""
    x = _torch.peel(x)
    x.vfn_type = type_  # type: ignore[attr-defined]
    if (base := _torch.base(x)) is not None:
        base.vfn_view_type = type_  # type: ignore[attr-defined]


class Writes:
    """The writes of one running body: whether one made an invariant value varying. It signs the memory they went to. And
    since when the body runs, by the count of autograd's nodes.

    Types sit on tensors, but several tensors can be names of one memory (views, `detach`, ``.data``): once something
    that differs by rank is written, all of them vary, also those that were made before.
    """

    __slots__ = ("any", "since")

    def __init__(self) -> None:
        self.any, self.since = False, _torch.autograd_count()


class _Now(threading.local):
    writes: Writes | None = None


_now = _Now()


def swap_writes(writes: Writes | None) -> Writes | None:
    """Make `writes` those of the body that runs in this thread; returns what was there."""
    before, _now.writes = _now.writes, writes
    return before


def _memory(x: torch.Tensor) -> Any:
    x = _torch.peel(x)
    x = _torch.local(x) if isinstance(x, DTensor) else x
    return _torch.storage(x.blocks[0] if type(x) is Blocks else x)


def retype(x: torch.Tensor, type_: Type) -> None:
    """Note that a write made a value, and so all that shares its memory, vary as `type_`."""
    mark(x, type_)
    if (base := _torch.base(_torch.peel(x))) is not None:
        mark(base, type_)
    if _now.writes is not None and (memory := _memory(x)) is not None:
        before = getattr(memory, "vfn_written", None)
        varying = type_.varying | (
            before[1].varying if before is not None and before[0] is _now.writes else frozenset()
        )
        memory.vfn_written = (_now.writes, of(varying=varying))
        _now.writes.any = True


def _as_written(x: torch.Tensor, found: Type) -> Type:
    """`found`, and what was written into the memory of `x` since."""
    writes = _now.writes
    if writes is not None and writes.any and found.plain:
        written = getattr(_memory(x), "vfn_written", None)
        if written is not None and written[0] is writes:
            return of(varying=found.varying | written[1].varying)
    return found


def borrow(x: torch.Tensor) -> None:
    """Note that a local value is another name for memory that belongs to someone else, so it must not be written."""
    _torch.peel(x).vfn_borrowed = True  # type: ignore[attr-defined]


def is_borrowed(x: torch.Tensor) -> bool:
    """Whether a local value, or what it is a view of, belongs to someone else."""
    x = _torch.peel(x)
    return hasattr(x, "vfn_borrowed") or hasattr(_torch.base(x), "vfn_borrowed")


def own(x: torch.Tensor) -> Type | None:
    """The type that this very tensor was given."""
    return getattr(_torch.peel(x), "vfn_type", None)


def read(x: torch.Tensor) -> Type | None:
    """The type that a local value, or the value that it is a view of, was given; None for one from outside."""
    found = getattr(x, "vfn_type", None)
    if found is not None:
        return found
    x = _torch.peel(x)
    found = getattr(x, "vfn_type", None)
    if found is None and (base := _torch.base(x)) is not None:
        found = getattr(base, "vfn_type", None) or getattr(base, "vfn_view_type", None)
    return found


def kept(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`out`, which is `x` lying otherwise: in a body it has the type of `x`."""
    if (found := read(x)) is not None:
        mark(out, found)
    return out


def outside(x: torch.Tensor, auto: Any) -> bool:
    """Whether `x` is an array, but not one of a body whose values are arrays on the mesh `auto`."""
    below = _torch.peel(x)
    return isinstance(below, DTensor) and (auto is None or not same(below._spec.mesh, auto))


def refuse_unseen(x: torch.Tensor) -> None:
    """Raise where a value that has a gradient was made since the body began, and yet has no type."""
    if _now.writes is not None and _torch.made_after(x, _now.writes.since) and read(x) is None:
        raise TypingError(report(
            "shard_map", "a value with a gradient was made in the body by something that the body cannot see, so nothing is "
            "known of how it differs by rank", [f"it is {text(x)}, made by {type(x.grad_fn).__name__}"],
            "wrap the extension that made it as a torch.library.custom_op or a torch.autograd.Function; a value from "
            "outside of the body should be its argument"))  # fmt: skip


def typeof(x: torch.Tensor, axes: tuple[str, ...]) -> Type:
    """The type of a local value in a body with these manual axes; one from outside is invariant.

    A value that differs by rank and was made behind the back of the body (a `Blocks` with different blocks, an array
    on a part of the mesh) is taken to vary over every axis; but where autograd follows it a guess could cost a
    gradient.

    Raises:
        TypingError: a value that autograd follows, and that was made in the body by something that no mode sees.
    """
    found = read(x)
    if found is not None:
        return _as_written(x, found)
    below = _torch.peel(x)
    refuse_unseen(x)
    if not isinstance(below, DTensor) and (type(below) is not Blocks or len(set(map(id, below.blocks))) == 1):
        return _as_written(x, INVARIANT)
    if _torch.needs_gradient(x):
        raise TypingError(report(
            "shard_map", "a value that differs by rank, and has a gradient, was made where the body could not see it",
            [f"it is {text(x)}"], "take it out of its own body first, or detach it"))  # fmt: skip
    return of(axes)


def _collect(value: Any, into: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        into.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, into)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, into)


def tensors(*values: Any) -> list[torch.Tensor]:
    """The tensors in lists, tuples and dicts, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        _collect(value, found)
    return found


def with_tensors(value: Any, new: Iterator[torch.Tensor]) -> Any:
    """The same structure with other tensors."""
    if isinstance(value, torch.Tensor):
        return next(new)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(with_tensors(item, new) for item in value))
    if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        return type(value)(with_tensors(item, new) for item in value)
    if isinstance(value, dict):
        return {key: with_tensors(item, new) for key, item in value.items()}
    return value


def mark_all(value: Any, type_: Type) -> Any:
    """Give every tensor in a result its type, and return the result."""
    for x in tensors(value):
        mark(x, type_)
    return value


def mark_made(value: Any, type_: Type, operands: Iterable[torch.Tensor]) -> Any:
    """`mark_all`, but what comes from outside the body stays unmarked: a function may give back its own operand, as
    `contiguous` does, and the base of a view may be the caller's. Marked, it would count as local in the next body too."""
    outside: set[int] = set()
    for x in operands:
        if read(x) is None:
            x = _torch.peel(x)
            outside.update((id(x), id(_torch.base(x))))
    if not outside:
        return mark_all(value, type_)
    for x in map(_torch.peel, tensors(value)):
        if id(x) not in outside:
            x.vfn_type = type_  # type: ignore[attr-defined]
            if (base := _torch.base(x)) is not None and id(base) not in outside:
                base.vfn_view_type = type_  # type: ignore[attr-defined]
    return value


def text(x: torch.Tensor, type_: Type | None = None) -> str:
    """A value on one short line: ``f32[2,3]{V:i}``."""
    lies = layout(x._spec) if isinstance(x, DTensor) else P()
    return f"{type_text(x.shape, x.dtype, lies)}{type_ or ''}"
