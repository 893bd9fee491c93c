"""What a torch function does, told by its name: whether it draws, writes, reads a number into Python, is linear."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from .. import torch_internals
from ..base import dtypes, op_arguments


def bounds(index: Any) -> list[torch.Tensor]:
    """The tensors that are bounds of slices in an index: torch reads numbers out of them, where no mode sees it."""
    return [
        x
        for part in (index if index.__class__ is tuple else (index,))
        if part.__class__ is slice
        for x in (part.start, part.stop, part.step)
        if isinstance(x, torch.Tensor)
    ]


def number_in_index(x: torch.Tensor, index: Any) -> tuple[int, torch.Tensor, tuple[Any, ...]] | None:
    """The first integer in an index that is a 0-d tensor, which torch would read: its dim of `x`, itself, and the index with 0
    in its place. None where there is none, or where other tensors are in the index."""
    parts = index if index.__class__ is tuple else (index,)
    if not any(isinstance(part, torch.Tensor) for part in parts):
        return None
    if any(isinstance(part, (list, torch.Tensor)) and not _is_integer(part) for part in parts):
        return None
    taken = sum(part is not None and part is not ... for part in parts)
    dim = 0
    for i, part in enumerate(parts):
        if isinstance(part, torch.Tensor):
            return dim, part, (*parts[:i], 0, *parts[i + 1 :])
        dim += x.ndim - taken if part is ... else part is not None
    return None


def has_mask(index: Any) -> bool:
    """Whether a mask is in an index: how many elements it takes is in its values."""
    return any(
        isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)
        for part in (index if index.__class__ is tuple else (index,))
    )


def _is_integer(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim == 0 and dtypes.category(x.dtype) == 1


# --- classes of functions ---------------------------------------------------------------------------------------------

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
# The values of its operands decide the shape of its result (`x[mask]` does so as well).
_SIZED_BY_VALUES = frozenset(
    """
    nonzero argwhere where masked_select unique unique_consecutive unique_dim _unique _unique2 bincount
    repeat_interleave one_hot""".split()
)
_PURE_OPERATORS = ("aten", "prims", "vescale_fn")  # namespaces whose ops are functions of their arguments alone


def kind_of(func: Any) -> tuple[str, str]:
    """The class of a torch function, which is a method of `checked.Checked`, and the function's name."""
    name = getattr(func, "__name__", "?")
    if name in ("__get__", "__set__"):
        return "getter" if name == "__get__" else "setter", func.__self__.__name__
    if torch_internals.is_operator(func):
        packet = getattr(func, "overloadpacket", func)
        name = packet.__name__
        if str(packet).split(".")[0] not in _PURE_OPERATORS:
            return "operator" if _schema(func) is not None else "unknown", name
    if func is torch.autograd.grad:
        return "gradient", name
    inplace_operator = name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__iter__")
    written = name == "__setitem__" or inplace_operator or (name.endswith("_") and not name.endswith("__"))
    other = "write" if written else "draw" if name in DRAWS else "function"
    return next((kind for kind, names in _NAMED.items() if name in names), other), name


_NAMED = {
    "alias": ("detach",),
    "dual": ("_make_dual",),
    "untouched": NOT_TYPED,
    "aside": _WRITES_ASIDE,
    "sized": _SIZED_BY_VALUES,
    "number": _READS_A_NUMBER,
    "index": ("__getitem__", "getitem"),
}

_COMMUNICATES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor")


def may_differ(func: Any) -> bool:
    """Whether an operator may give ranks something else although they give it the same: one that says that it draws, or that
    talks to other ranks. Of what is inside of others nothing is known; debug mode compares what they give."""
    overloads = [getattr(func, name) for name in func.overloads()] if hasattr(func, "overloads") else [func]
    return torch_internals.operator_name(overloads[0]).split("::")[0] in _COMMUNICATES or any(
        torch.Tag.nondeterministic_seeded in one.tags for one in overloads
    )


_signature = functools.lru_cache(maxsize=64)(inspect.signature)


def _schema(func: Any) -> Any:
    """The schema of an operator that writes some of its arguments; None for another."""
    overloads = [getattr(func, name) for name in func.overloads()] if hasattr(func, "overloads") else [func]
    found = torch_internals.schema(overloads[0]) if len(overloads) == 1 else None
    return found if found is not None and found.is_mutable else None


def written(func: Any, name: str, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a function of class "aside", or an operator, writes."""

    def argument(position: int, key: str) -> Any:
        return args[position] if len(args) > position else kwargs.get(key)

    if name in _WRITES_ASIDE:
        try:
            bound = _signature(func).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):  # a builtin: torch.batch_norm(x, weight, bias, mean, var, training, ...)
            bound = {
                key: argument(i, key)
                for i, key in enumerate(("input", "weight", "bias", "running_mean", "running_var", "training"))
            }
        if "embedding" in name:
            return op_arguments.tensors_in(bound["weight"]) if bound.get("max_norm") is not None else []
        if not bound.get("training", bound.get("use_input_stats", name == "instance_norm")):
            return []
        return op_arguments.tensors_in(bound.get("running_mean"), bound.get("running_var"))
    return op_arguments.tensors_in(
        [
            argument(i, a.name)
            for i, a in enumerate(_schema(func).arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
    )


# --- linear functions -------------------------------------------------------------------------------------------------

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
            if to is not None and have is not None and dtypes.category(to) < dtypes.category(have):
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


def has_number(args: Any, kwargs: Any) -> bool:
    """Whether something else than a tensor is an operand: a number of Python or numpy, a bool."""
    return any(not isinstance(a, torch.Tensor) for a in args) or any(
        not isinstance(a, torch.Tensor) for key, a in kwargs.items() if key not in ("alpha", "out")
    )
