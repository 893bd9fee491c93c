"""The type of keys: explicit, typed, without arithmetic; and the checks that every function here begins with.

A key is 64 bits, held as two int32 (gloo, DTensor and `torch.save` carry those; uint32 they do not). It lives on the
CPU unless it is moved, so that every rank has it without communication.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import optree
import optree.registry
import torch

from .._core import torch_internals
from .._core.base import tree
from .._core.base.errors import RandomError
from .._core.base.front_door import no_attribute
from .._core.base.messages import described, report, short
from . import key_reuse

IMPLS = ("threefry2x32",)


@dataclass(frozen=True, eq=False, repr=False)
class Key:
    """A random key, or an array of keys: what `key`, `split` and `fold_in` return and every draw takes first.

    It indexes, iterates and reshapes like an array of keys, and is a node of pytrees (optree's and torch's) around one
    int32 tensor, so it goes through `tree_map`, `vmap`, `shard`, `save`, pickle and copies. It has no arithmetic.

    Args:
        data: int32 [..., 2], the bits. `==` and `!=` of two arrays of keys go key by key, and give a tensor of bools.
        impl: the name of the generator, "threefry2x32".

    Source: JAX's typed key arrays (JEP 9263).

    >>> import vescale_fn as vfn
    >>> keys = vfn.random.split(vfn.random.key(0), 3)
    >>> keys.shape, len(keys), keys[0].shape
    ((3,), 3, ())
    >>> first, *rest = keys
    >>> keys == first
    tensor([ True, False, False])
    """

    data: Any
    impl: str = "threefry2x32"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array of keys: () for one key."""
        return tuple(self.data.shape[:-1])

    @property
    def ndim(self) -> int:
        """The number of dims of the array of keys: 0 for one key."""
        return self.data.ndim - 1

    @property
    def size(self) -> int:
        """How many keys there are."""
        return self.data.numel() // 2

    def reshape(self, *shape: Any) -> Key:
        """The same keys in another shape."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        return Key(self.data.reshape((*sizes, 2)), self.impl)

    if not TYPE_CHECKING:  # or type checkers would believe that every name is there

        def __getattr__(self, name: str) -> Any:
            raise no_attribute("random.Key", self, name)

    def __len__(self) -> int:
        self._need_dims("len()")
        return self.shape[0]

    def __iter__(self) -> Iterator[Key]:
        self._need_dims("iterating")
        return (Key(data, self.impl) for data in self.data.unbind(0))

    def __getitem__(self, index: Any) -> Key:
        self._need_dims("indexing")
        entries = index if isinstance(index, tuple) else (index,)
        used = sum(
            i.ndim if isinstance(i, torch.Tensor) and i.dtype == torch.bool else i is not None and i is not ...
            for i in entries
        )
        if used > self.ndim:
            raise IndexError(f"{used} indices for an array of keys of shape {self.shape}")
        return Key(self.data[(*entries, slice(None)) if any(i is ... for i in entries) else entries], self.impl)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RandomError(report("Key", "a key is no array of numpy's", fix="vfn.random.key_data(key), its bits"))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _ON_ARRAYS_OF_KEYS:
            raise RandomError(
                report(
                    getattr(func, "__name__", "torch"),
                    "torch's functions are not for keys, but for cat, stack, where and broadcast_to",
                    fix="vfn.random.key_data(key), its bits",
                )
            )
        return _ON_ARRAYS_OF_KEYS[func](*args, **kwargs or {})

    def _need_dims(self, what: str) -> None:
        if not self.ndim:
            raise RandomError(
                report(
                    "Key",
                    f"{what} needs an array of keys, but this is one key, of shape ()",
                    fix="k1, k2 = vfn.random.split(key)",
                )
            )

    def __eq__(self, other: object) -> Any:
        return _equal(self, other, "==")

    def __ne__(self, other: object) -> Any:
        same = _equal(self, other, "!=")
        return same if same is NotImplemented else ~same

    __hash__ = None  # type: ignore[assignment]  # the bits lie in a tensor
    __array_ufunc__ = None  # numpy leaves `==` to us

    def __bool__(self) -> bool:
        raise RandomError(report("Key", "a key is not true or false", fix="`if key is not None:`"))

    def __repr__(self) -> str:
        if not (isinstance(self.data, torch.Tensor) and torch_internals.is_plain(self.data)):
            return f"Key({type(self.data).__name__}, {self.impl})"
        if self.ndim:
            return f"Key(shape={self.shape}, {self.impl})"
        first, second = (word & 0xFFFFFFFF for word in self.data.tolist())
        return f"Key([{first}, {second}], {self.impl})"


def _equal(one: Key, other: object, symbol: str) -> Any:
    """Which keys have the same bits, broadcast; NotImplemented for what is no array, and so is never equal, like None."""
    if isinstance(other, Key) and one.impl == other.impl:
        try:
            torch.broadcast_shapes(one.shape, other.shape)
        except RuntimeError:
            said = f"the shapes {one.shape} and {other.shape} do not broadcast"
            raise RandomError(report("Key", f"`{symbol}` of arrays of keys: {said}")) from None
        return (one.data == other.data.to(one.data.device)).all(-1)
    if isinstance(other, (Key, Number, list, tuple)) or hasattr(other, "dtype"):
        fix = "vfn.random.key_data(key), its bits"
        raise RandomError(report("Key", f"`{symbol}` compares keys with keys, and this is {described(other)}", fix=fix))
    return NotImplemented


def _bits(where: str, keys: Sequence[Any]) -> tuple[list[Any], str]:
    """What keys are made of, and their generator, which all share."""
    if wrong := [described(key) for key in keys if not isinstance(key, Key)]:
        raise RandomError(report(where, f"keys go with keys alone, and this is {wrong[0]}", fix=_key_from(None)))
    return [key.data for key in keys], keys[0].impl


def _cat(tensors: Sequence[Any], dim: int = 0) -> Key:
    for key in tensors:
        if isinstance(key, Key) and not key.ndim:
            raise RandomError(report("cat", "this is one key, of shape (), and has no dim", fix="torch.stack(keys)"))
    data, impl = _bits("cat", tensors)
    return Key(torch.cat(data, _dim(dim, tensors[0].ndim)), impl)


def _stack(tensors: Sequence[Any], dim: int = 0) -> Key:
    data, impl = _bits("stack", tensors)
    return Key(torch.stack(data, _dim(dim, tensors[0].ndim + 1)), impl)


def _where(condition: torch.Tensor, input: Any, other: Any) -> Key:
    (one, another), impl = _bits("where", (input, other))
    return Key(torch.where(condition[..., None], one, another), impl)


def _broadcast_to(input: Key, size: Sequence[int]) -> Key:
    return Key(torch.broadcast_to(input.data, (*size, 2)), input.impl)


def _dim(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim {dim} of an array of keys of {ndim} dims")
    return dim % ndim


_ON_ARRAYS_OF_KEYS: dict[Any, Any] = {
    torch.cat: _cat,
    torch.concat: _cat,
    torch.concatenate: _cat,
    torch.stack: _stack,
    torch.where: _where,
    torch.broadcast_to: _broadcast_to,
}


def _no_arithmetic(symbol: str) -> Any:
    def refuse(self: Key, *others: Any) -> Any:
        raise RandomError(
            report(
                "Key",
                f"`{symbol}` is not for keys: arithmetic would make keys whose streams overlap",
                fix="vfn.random.split(key) for several keys, vfn.random.fold_in(key, i) for the i-th",
            )
        )

    return refuse


for _symbol, _names in {
    "+": "add radd iadd",
    "-": "sub rsub isub neg",
    "*": "mul rmul imul",
    "@": "matmul rmatmul",
    "/": "truediv rtruediv",
    "//": "floordiv rfloordiv",
    "%": "mod rmod",
    "**": "pow rpow",
    "^": "xor rxor",
    "&": "and rand",
    "|": "or ror",
    "~": "invert",
    "<<": "lshift rlshift",
    ">>": "rshift rrshift",
    "<": "lt",
    "<=": "le",
    ">": "gt",
    ">=": "ge",
    "int()": "int index",
    "float()": "float",
}.items():
    for _name in _names.split():
        setattr(Key, f"__{_name}__", _no_arithmetic(_symbol))


def _flatten(node: Any) -> tuple[tuple[Any], str]:
    return (node.data,), node.impl


def _unflatten(impl: Any, children: Any) -> Any:
    (data,) = children
    return Key(data, impl)


optree.register_pytree_node(
    cast(Any, Key),  # which optree's types take for a collection
    lambda node: (*_flatten(node), ("data",)),
    _unflatten,
    path_entry_type=optree.GetAttrEntry,
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)
torch.serialization.add_safe_globals([Key])
tree.mark_opaque(Key)  # there is nothing in a key to differentiate: gradient trees hold it as it is
torch_internals.register_tree_node(Key, _flatten, lambda children, impl: _unflatten(impl, children), ("data",))


def checked(key: Any, where: str, scalar: bool = True, use: str | None = key_reuse.DRAW) -> Key:
    """`key` if it is one (and, by default, only one), else a RandomError that says what to pass.

    Every public function that takes a key calls this once, first; in debug mode it notes the use that is made of it.
    """
    if not isinstance(key, Key):
        raise RandomError(
            report(where, f"the first argument must be a key, but it is {described(key)}", fix=_key_from(key))
        )
    if scalar and key.ndim:
        raise RandomError(
            report(
                where,
                f"it takes one key, but was given an array of keys of shape {key.shape}",
                fix=f"key[0], or vfn.vmap(lambda key: vfn.random.{where.split('.')[-1]}(key, ...))(keys)",
            )
        )
    if use is not None:
        key_reuse.note(key.data, where, use)
    return key


def _key_from(value: Any) -> str:
    if isinstance(value, int):
        return f"vfn.random.key({value})"
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim and value.shape[-1] == 2:
        return "vfn.random.wrap_key_data(...) around the raw bits"
    return "vfn.random.key(seed)"


def shape_of(shape: Any, where: str, name: str = "shape") -> tuple[int, ...]:
    """`shape` as a tuple of sizes (an int is one size), or a RandomError."""
    if type(shape) is tuple and all(type(size) is int and size >= 0 for size in shape):
        return shape
    if isinstance(shape, torch.Tensor) and shape.ndim:
        raise RandomError(
            report(where, f"{name} must be integers, but it is {described(shape)}", fix=f"{name}=x.shape")
        )
    entries: Any = shape if isinstance(shape, (Sequence, torch.Size)) and not isinstance(shape, str) else (shape,)
    sizes = []
    for size in entries:
        try:
            sizes.append(operator.index(size))
        except TypeError:
            raise RandomError(
                report(where, f"{name} must be integers, but {name}={short(shape)} has {described(size)}")
            ) from None
    if any(size < 0 for size in sizes):
        raise RandomError(report(where, f"{name} must not be negative, but {name}={shape!r}"))
    return tuple(sizes)
