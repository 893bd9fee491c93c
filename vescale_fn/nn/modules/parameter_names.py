"""Where each parameter of a module stands: its place in a tree, its names in a `state_dict`.

A module's attributes are the keys of dictionaries. `ModuleList`, `Sequential` and `ParameterList`, whose children are
numbered, are lists; what has no parameters of its own (a ReLU in a Sequential) is an empty dictionary there, so that
numbers stay what they were. A parameter that has several names is one leaf, under the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..._core import torch_internals
from ..._core.base import tree
from ..._core.base.errors import SpecError, TransformError
from ..._core.base.messages import described, dtype_text, meant, report
from ..._core.base.saved_names import saved_as

_NUMBERED = (nn.ModuleList, nn.Sequential)


@saved_as("vescale_fn.modules.names")
class Names:
    """The tree of a module's parameters, or of its buffers.

    Args:
        root: the module.
        kind: ``"parameters"`` or ``"buffers"``.
        of: by what the tree is called in messages.
        wanted: whether the tensor of this name belongs to the tree.

    Attributes:
        names: the dotted name of each leaf, in the order of the tree's leaves.
        tensors: the tensors themselves, in that order.
        aliases: each further name of a leaf -> the name that it has in the tree.
    """

    def __init__(self, root: nn.Module, kind: str, of: str, wanted: Callable[[str], bool] = lambda name: True) -> None:
        self.of = of
        self.aliases: dict[str, str] = {}
        self._first: dict[int, str] = {}
        found: dict[str, torch.Tensor] = {}
        skeleton = self._skeleton(root, kind, "", found, wanted)
        self.names, self._def = tree.flatten(skeleton)
        self.paths = tree.paths(skeleton, of)
        self.tensors = [found[name] for name in self.names]

    def _skeleton(
        self, module: nn.Module, kind: str, prefix: str, found: dict[str, torch.Tensor], wanted: Callable[[str], bool]
    ) -> Any:
        own: dict[str, Any] = {}
        parameters, buffers, submodules = torch_internals.held_by(module)
        for key, x in (parameters if kind == "parameters" else buffers).items():
            name = prefix + key
            if x is None or not wanted(name):
                continue
            if (first := self._first.setdefault(id(x), name)) is not name:
                self.aliases[name] = first
                continue
            found[name] = x
            own[key] = name
        children = {
            key: self._skeleton(child, kind, f"{prefix}{key}.", found, wanted)
            for key, child in submodules.items()
            if child is not None
        }
        numbered = isinstance(module, _NUMBERED) and not own and list(children) == list(map(str, range(len(children))))
        if numbered and any(children.values()):
            return list(children.values())
        if isinstance(module, nn.ParameterList) and own and list(own) == list(map(str, range(len(own)))):
            return list(own.values())
        return {**own, **{key: child for key, child in children.items() if child}}

    def tree(self, leaves: Iterable[Any]) -> Any:
        """The tree of these leaves."""
        return tree.unflatten(self._def, leaves)

    def leaves(self, given: Any, where: str) -> list[Any]:
        """The leaves of a tree that is given for this one."""
        leaves, treedef = tree.flatten(given)
        if treedef != self._def:
            failures = list(tree.partings(given, self.tree(self.names), self.of, f"the module's {self.of}"))
            raise SpecError(
                report(
                    where,
                    f"this is no tree of the module's {self.of}",
                    failures or [f"it is {described(given)}"],
                    f"the {self.of} that module_function returned, or a tree of their structure",
                )
            )
        wrong = [f"{path} is {described(x)}" for path, x in zip(self.paths, leaves) if not isinstance(x, torch.Tensor)]
        if wrong:
            raise TransformError(report(where, f"the leaves of {self.of} must be tensors", wrong))
        return leaves

    def flat(self, leaves: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The leaves by their dotted names, each under all that it has."""
        named = dict(zip(self.names, leaves, strict=True))
        return named | {alias: named[name] for alias, name in self.aliases.items()}

    def picked(self, named: Mapping[str, Any], failures: list[str]) -> list[Any]:
        """One value for each leaf, out of values by dotted names; what is missing or unfit is added to `failures`."""
        others: dict[str, list[str]] = {}
        for alias, name in self.aliases.items():
            others.setdefault(name, []).append(alias)
        picked = []
        for name, path, like in zip(self.names, self.paths, self.tensors, strict=True):
            found = next((named[known] for known in (name, *others.get(name, ())) if known in named), None)
            if found is None:
                failures.append(f"it lacks {name!r}, for {path}{meant(name, named)}")
            elif tuple(found.shape) != tuple(like.shape):
                failures.append(f"{name!r} is {_type(found)}, but {path} is {_type(like)}")
            picked.append(found)
        return picked


def _type(x: torch.Tensor) -> str:
    return f"{dtype_text(x.dtype)}[{','.join(map(str, x.shape))}]"
