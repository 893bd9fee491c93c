"""What a public module shows of itself: `dir` lists its public names, and a missing name says what to write instead."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from .messages import meant, report
from .other_names import OTHER_NAMES


def listing(module: str) -> Callable[[], list[str]]:
    """The ``__dir__`` of a public module: its public names and what Python itself puts there, no files behind them."""

    def __dir__() -> list[str]:
        names = vars(sys.modules[module])
        return sorted({*names["__all__"], *(name for name in names if re.fullmatch("__.*__", name))})

    return __dir__


def hints(module: str) -> Any:
    """The ``__getattr__`` of a public module. The type is Any, or type checkers would believe that every name is there."""
    called = re.sub(r"^vescale_fn\b", "vfn", module)

    def __getattr__(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        full = f"{called}.{name}"
        instead = OTHER_NAMES.get(full.removeprefix("vfn."))
        if instead is not None:
            text = report(full, "there is no such name", fix=instead)
            if sys._getframe(1).f_code.co_name == "_handle_fromlist":
                raise ImportError(text)  # `from vescale_fn import ...`, which says nothing of an AttributeError
        else:
            public = {name: getattr(sys.modules[module], name) for name in sys.modules[module].__all__}
            inside = [f"{called}.{part}.{name}" for part, x in public.items() if name in getattr(x, "__all__", ())]
            text = report(
                full, f"there is no such name{'' if inside else meant(name, public)}", fix=" or ".join(inside)
            )
        raise AttributeError(text, name=name, obj=None)  # with the module, Python would add a question of its own

    return __getattr__
