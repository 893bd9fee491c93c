"""Parts of a module behind which a pipeline may cut: by their paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..._core.base.errors import SpecError
from ..._core.base.messages import described, meant, report
from ..._core.transforms.cut import cut


def cuts_of(pattern: Any, names: Iterable[str], where: str) -> frozenset[str]:
    """Those modules, of all `names`, that a regular expression finds."""
    names = list(names)
    fix = r"a regular expression for names as in named_modules(): r'layers\.\d+$'"
    try:
        found = frozenset(filter(re.compile(pattern).search, names))
    except (TypeError, re.error):
        what = f"pattern must be a regular expression, but it is {described(pattern)}"
        raise SpecError(report(where, what, fix=fix)) from None
    if not found:
        raise SpecError(report(where, f"no module is called {pattern!r}{meant(pattern, names)}", fix=fix))
    return found


def mark(cuts: frozenset[str], modules: Iterable[nn.Module], names: Iterable[str]) -> None:
    """Have the modules of one call mark what they give, by their names."""
    for module, name in zip(modules, names):
        if name in cuts:
            vars(module)["forward"] = _marking(module.forward, name)


def _marking(forward: Callable[..., Any], name: str) -> Any:
    return lambda *args, **kwargs: cut(forward(*args, **kwargs), name)
