"""Tensors without memory of their own: what would reach for their elements, from Python or from C, is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from .. import torch_internals
from ..base.errors import InPlaceError
from ..base.messages import described, report


def _reading(name: str) -> Callable[[Any], Any]:
    method = getattr(torch.Tensor, name)

    def read(self: Any) -> Any:  # `torch.tensor([x[0], x[1]])` asks for it where torch would read the memory itself
        with torch_internals.dispatch_seen():
            return method(self)

    return read


class WithoutMemory(torch.Tensor):
    """A tensor whose elements are those of others."""

    __bool__, __int__, __float__ = _reading("__bool__"), _reading("__int__"), _reading("__float__")  # type: ignore[assignment]
    __index__, __complex__ = _reading("__index__"), _reading("__complex__")  # type: ignore[assignment]

    elsewhere: tuple[str, str]  # where they are, and what to write instead
    instead_of_data: str  # what to write for `x.data = value`

    def _refusal(self, what: str) -> InPlaceError:
        where, instead = self.elsewhere
        return InPlaceError(report(what, f"this value has no memory of its own: {where}", fix=instead))

    def data_ptr(self) -> int:
        raise self._refusal("data_ptr")

    def untyped_storage(self) -> Any:
        return _NoStorage(self, self._refusal)

    def storage(self) -> Any:
        raise self._refusal("storage")

    def _typed_storage(self) -> Any:
        raise self._refusal("storage")

    def share_memory_(self) -> Any:
        raise self._refusal("share_memory_")

    def apply_(self, function: Any) -> Any:  # type: ignore[override]
        raise self._refusal("apply_")

    def is_shared(self) -> bool:
        return False

    @property
    def __cuda_array_interface__(self) -> Any:
        raise AttributeError(str(self._refusal("__cuda_array_interface__")))  # so that `hasattr` says no


def _refusing(what: str) -> Callable[..., NoReturn]:
    def refuse(self: _NoStorage, *args: Any, **kwargs: Any) -> NoReturn:
        raise self.refusal(f"untyped_storage().{what}" if what else "untyped_storage")

    return refuse


class _NoStorage:
    """The storage of a tensor without memory: which one it is, and how large. It is no storage to torch, which would read at
    address 0, but a sequence that has nothing."""

    _ANSWERED = frozenset(("_cdata", "_weak_ref", "nbytes", "size", "device", "element_size", "get_device"))
    __len__ = __getitem__ = __setitem__ = __iter__ = __bytes__ = __array__ = __reduce_ex__ = _refusing("")
    __bool__: Any = lambda self: True

    def __init__(self, of: WithoutMemory, refusal: Callable[[str], InPlaceError]) -> None:
        self.of, self.refusal, self.stands = of, refusal, torch_internals.storage(of)

    def __getattr__(self, name: str) -> Any:
        asks = callable(getattr(torch.UntypedStorage, name)) and name not in self._ANSWERED  # not: is_cuda, ...
        return _refusing(name).__get__(self) if asks else getattr(self.stands, name)

    def __eq__(self, other: Any) -> bool:
        return type(other) is _NoStorage and self.stands is other.stands

    def __hash__(self) -> int:
        return hash(self.stands)

    def __repr__(self) -> str:
        return f"<the memory of {described(self.of)}, which has none of its own>"


def _before_exchange(how: str, x: torch.Tensor, value: Any) -> None:
    """Refuse to make a tensor another name for memory that is not there: reading it would end the process."""
    if how == "data" and isinstance(value, WithoutMemory) and type(value) is not type(x):
        raise InPlaceError(
            report(
                "x.data = value",
                f"the value has no memory of its own, which x could have: {value.elsewhere[0]}",
                [f"x is {described(x)}, the value {described(value)}"],
                value.instead_of_data,
            )
        )
    if how == "set_" and not isinstance(value, torch.Tensor):
        if isinstance(value, _NoStorage) or torch_internals.stands_for_memory(value):
            raise InPlaceError(
                report(
                    "set_", "this storage only stands for one: that of an array has no elements", fix="x.copy_(array)"
                )
            )


torch_internals.ask_before_exchange(_before_exchange)
