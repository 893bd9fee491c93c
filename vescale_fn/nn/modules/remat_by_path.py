"""Parts of a module whose values are computed again in the backward pass: by their paths, each with its policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from ..._core.base.errors import SpecError
from ..._core.base.messages import described, meant, report
from ..._core.transforms.remat import remat_call
from ..._core.transforms.remat_policies import Policy, nothing_saveable

Policies = Mapping[str, Policy]  # by the names of modules


def policies_of(patterns: Any, names: Iterable[str], where: str) -> dict[str, Policy]:
    """The policies of those modules, of all `names`, that a pattern fits; the first that does."""
    names, found, failures = list(names), dict[str, Policy](), []
    if not isinstance(patterns, Mapping):
        what = f"policies must be a dictionary from paths to policies, but it is {described(patterns)}"
        raise SpecError(report(where, what, fix="{'layers.*': vfn.remat_policies.nothing_saveable}"))
    for pattern, policy in patterns.items():
        fitting = [name for name in names if _fits(pattern, name)]
        if not fitting:
            failures.append(f"no module is called {pattern!r}{meant(pattern, names)}")
        if policy is not None and not callable(policy):
            failures.append(f"the policy of {pattern!r} is {described(policy)}")
        for name in fitting:
            found.setdefault(name, policy or nothing_saveable)
    if failures:
        fix = "paths as in named_modules(), with * for any one part and ** for any number of them; policies or None"
        raise SpecError(report(where, "policies are for modules by their paths", failures, fix))
    return found


def _fits(pattern: str, name: str) -> bool:
    parts = re.escape(pattern).replace(r"\*\*\.", r"(.*\.)?").replace(r"\*\*", ".*").replace(r"\*", r"[^.]*")
    return re.fullmatch(parts, name) is not None


def put(policies: Policies, modules: Iterable[nn.Module], names: Iterable[str]) -> None:
    """Have the modules of one call compute again what the policies say.

    The outermost of them around an op is what is run again as one; the innermost says what is kept.
    """
    entered: list[Policy] = []  # the policies of the modules that are running
    innermost = lambda op, shapes, name: entered[-1](op, shapes, name)
    policy = None if all(one is nothing_saveable for one in policies.values()) else innermost
    for module, name in zip(modules, names):
        if name in policies:
            vars(module)["forward"] = _run_again(module.forward, policies[name], entered, policy)


def _run_again(forward: Callable[..., Any], own: Policy, entered: list[Policy], policy: Policy | None) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        entered.append(own)
        try:
            return forward(*args, **kwargs)
        finally:
            entered.pop()

    return lambda *args, **kwargs: run(*args, **kwargs) if entered else remat_call(run, args, kwargs, policy)
