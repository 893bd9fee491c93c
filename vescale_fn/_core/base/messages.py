"""How a message is put together: what was called, what was there, what is needed, what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast


def report(where: str, what: str, failures: Iterable[str] = (), fix: str = "") -> str:
    """Lay out a message: ``where: what``, one bullet for each failure, and what to write instead."""
    lines = [f"{where}: {what}", *(f"  * {failure}" for failure in failures)]
    if fix:
        lines.append(f"  Instead: {fix}")
    return "\n".join(lines)


class Sizes(Protocol):
    """Sizes of axes by their names: a mapping, or what a mesh has as its shape."""

    def items(self) -> Iterable[tuple[str, int]]: ...


def mesh_text(axes: Sizes) -> str:
    """A mesh on one short line: ``mesh (dp=2, tp=4)``."""
    return "mesh (" + ", ".join(f"{name}={size}" for name, size in axes.items()) + ")"


def axes_text(names: Iterable[str]) -> str:
    """Axes in a sentence: ``axis 'dp'``, ``axes 'dp' and 'tp'``."""
    listed = [repr(name) for name in names]
    return f"ax{'is' if len(listed) == 1 else 'es'} {' and '.join(listed)}"


def meant(wrong: Any, known: Iterable[Any]) -> str:
    """A question, where one of the known names is close to a wrong one: ``; did you mean 'dp'?``; else nothing."""
    if not isinstance(wrong, str):
        return ""
    names = [name for name in known if isinstance(name, str)]
    swapped = [name for name in names if sorted(name.lower()) == sorted(wrong.lower())]
    close = swapped or difflib.get_close_matches(wrong, names, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def count_text(n: int, word: str) -> str:
    """A number of things: ``1 dim``, ``2 dims``, ``2 entries``."""
    return f"{n} {word if n == 1 else word[:-1] + 'ies' if word.endswith('y') else word + 's'}"


_WORDS = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def dtype_text(dtype: Any) -> str:
    """A dtype as types are written: ``f32``, ``bf16``, ``i64``, ``bool``."""
    name = str(dtype).removeprefix("torch.")
    word = name.rstrip("0123456789")
    return f"{_WORDS.get(word, word)}{name[len(word) :]}"


def described(value: Any) -> str:
    """Any value in a few words, on one line: ``the tensor f32[2,3]{V:dp}``, ``the int 3``."""
    kind = type(value).__name__
    if value is None:
        return "None"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        what = {"ndarray": "numpy array", "Array": "array"}.get(kind, "tensor")
        sizes = ",".join(map(str, value.shape))
        type_ = getattr(value, "type_text", None) or f"{dtype_text(value.dtype)}[{sizes}]"
        return f"the {what} {type_}{getattr(value, 'vfn_type', None) or ''}"
    if hasattr(value, "shape") and not isinstance(value, type):
        return f"the {kind} of shape {tuple(value.shape)}"
    if isinstance(value, type):
        return f"the class {cast('type[Any]', value).__name__}"
    if callable(value):
        named = getattr(value, "__name__", None)
        return f"the function {named}" if named else f"a {kind}"
    if kind in ("tuple", "list") and any(not isinstance(x, (str, int, float, tuple, type(None))) for x in value):
        inside = ", ".join(described(x) for x in value[:4]) + ", ..." * (len(value) > 4)
        return f"a {kind} of {inside}"
    if isinstance(value, dict) and value:
        keys = list(cast("Mapping[Any, Any]", value))
        return f"a {kind} with keys {', '.join(map(repr, keys[:4]))}{', ...' * (len(keys) > 4)}"
    said = " ".join(repr(cast("object", value)).split())
    kind = {"P": "spec"}.get(kind, kind)
    return f"the {kind} {said if len(said) <= 60 else said[:57] + '...'}"


def short(value: Any) -> str:
    """A value as it is written, where that is short; else `described`."""
    plain = isinstance(value, (str, int, float, tuple, list, type(None)))
    said = repr(cast("object", value)) if plain else "\n"
    return described(value) if "\n" in said else said


def op_text(op: Any) -> str:
    """The name by which users call an operator of torch: ``add`` for ``aten.add.Tensor``."""
    parts = str(op).split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).lstrip("_")
