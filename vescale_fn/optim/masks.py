"""Which leaves: by masks, by labels, by patterns in their paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree

from .._core.base import tree
from .._core.base.containers import checked
from .._core.base.errors import SpecError, VfnError
from .._core.base.messages import described, meant, report
from .optimizer import Optimizer, check_parts, not_a_state
from .per_leaf import beside

_NOTHING: Any = object()


def by_path(rules: Sequence[tuple[str, Any]], otherwise: Any = _NOTHING) -> Callable[[Any], Any]:
    """A mask, or labels, by patterns: for each leaf what stands beside the first pattern that is found in its path.

    Args:
        rules: (regular expression, value) pairs, tried in order with `re.search` on paths like ``blocks.0.attn.wq``.
        otherwise: what stands for leaves that match no rule; without it each leaf must match one.

    Returns:
        A function of a tree, that gives the tree of values: what `mask` and `labels` take. It raises SpecError where a leaf
        matches no rule, or a rule no leaf.

    >>> import torch, vescale_fn as vfn
    >>> decays = vfn.optim.by_path([(r"norm|bias", False)], otherwise=True)
    >>> decays({"wq": torch.ones(2, 2), "bias": torch.ones(2), "norm": torch.ones(2)})
    {'wq': True, 'bias': False, 'norm': False}
    """
    wrong = [
        f"rules[{i}] is {described(rule)}"
        for i, rule in enumerate(rules)
        if not (isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], str))
    ]
    if wrong:
        fix = 'by_path([(r"norm|bias", False)], otherwise=True)'
        raise SpecError(report("by_path", "rules are (pattern, value) pairs", wrong, fix))

    def values(params: Any) -> Any:
        checked(params, "by_path", "params")
        accessors, _, structure = optree.tree_flatten_with_accessor(params)
        found, failures, hits = [], [], set()
        for accessor in accessors:
            path = tree.dotted(accessor)
            matching = [i for i, (pattern, _) in enumerate(rules) if re.search(pattern, path)]
            hits.update(matching)
            if matching:
                found.append(rules[matching[0]][1])
            elif otherwise is not _NOTHING:
                found.append(otherwise)
            else:
                failures.append(f"no rule matches {path!r} ({accessor.codify('params')})")
        if accessors:
            failures += [f"rule {rule!r} matches no leaf" for i, rule in enumerate(rules) if i not in hits]
        if failures:
            fix = "otherwise=True, say, for leaves that match no rule; or take the unused rule away"
            raise SpecError(report("by_path", "the rules and the tree do not fit", failures, fix))
        return tree.unflatten(structure, found)

    return values


def flags(where: str, mask: Any, params: Any, name: str = "mask") -> Any:
    """A mask, or labels, as the tree of one entry for each leaf."""
    checked(params, where, "params")
    found = tree.broadcast(mask(params) if callable(mask) else mask, params, where, name, "params")
    return tree.unflatten(tree.flatten(params)[1], found)


def masked(opt: Optimizer, mask: Any) -> Optimizer:
    """An optimiser, or a transformation, of some leaves; the gradients of the others pass through as they are.

    Args:
        opt: what is done to the leaves of the mask. It has no state for the others.
        mask: a tree prefix of bools, or a function of the parameters that gives one: `by_path`.

    Source: `optax.masked`.

    >>> import torch, vescale_fn as vfn
    >>> opt = vfn.optim.masked(vfn.optim.sgd(0.5), {"w": True, "b": False})
    >>> params = {"w": torch.ones(2), "b": torch.ones(2)}
    >>> opt.update({"w": torch.ones(2), "b": torch.ones(2)}, opt.init(params), params)[0]
    {'w': tensor([-0.5000, -0.5000]), 'b': tensor([1., 1.])}
    """
    check_parts("masked", {"opt": opt}, "masked(vfn.optim.adamw(1e-3), mask)")

    def chosen(params: Any) -> list[bool]:
        return tree.leaves(flags("masked", mask, params))

    def init(params: Any) -> Any:
        return opt.init(_only(chosen(params), params, params))

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        here = chosen(params)
        updates, state = opt.update(_only(here, grads, params), state, _only(here, params, params))
        return _joined([(here, updates)], grads, params), state

    return Optimizer(init, update)


def partition(parts: Mapping[str, Optimizer], labels: Any) -> Optimizer:
    """Each leaf by the optimiser that its label names.

    Args:
        parts: label -> optimiser.
        labels: a tree prefix of labels, or a function of the parameters that gives one: `by_path`.

    Raises:
        SpecError: a label that names no part, with the paths of its leaves.

    Source: `optax.partition`.

    >>> import torch, vescale_fn as vfn
    >>> parts = {"matrix": vfn.optim.muon(0.02), "other": vfn.optim.adamw(3e-4)}
    >>> opt = vfn.optim.partition(parts, vfn.optim.by_path([(r"embed|head|bias", "other"), (r".*", "matrix")]))
    >>> params = {"wq": torch.ones(2, 3), "bias": torch.ones(3)}
    >>> sorted(opt.init(params))
    ['matrix', 'other']
    """
    fix = 'partition({"matrix": vfn.optim.muon(0.02), "other": vfn.optim.adamw(3e-4)}, labels)'
    if not isinstance(parts, Mapping):
        raise VfnError(report("partition", f"parts must be label -> optimiser, but it is {described(parts)}", fix=fix))
    check_parts("partition", {repr(label): one for label, one in parts.items()}, fix)

    def members(params: Any) -> dict[str, list[bool]]:
        found = tree.leaves(flags("partition", labels, params, "labels"))
        wrong = [(i, label) for i, label in enumerate(found) if label not in parts]
        if wrong:
            paths = tree.paths(params, "params")
            failures = [f"{paths[i]} has the label {label!r}{meant(label, parts)}" for i, label in wrong]
            raise SpecError(
                report(
                    "partition",
                    "there is no part for some labels",
                    failures,
                    f"one of the labels {', '.join(map(repr, parts))}, or another part",
                )
            )
        return {label: [one == label for one in found] for label in parts}

    def init(params: Any) -> dict[str, Any]:
        return {label: parts[label].init(_only(here, params, params)) for label, here in members(params).items()}

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, dict[str, Any]]:
        if not isinstance(state, dict) or state.keys() != parts.keys():
            raise not_a_state("partition", state, f"a dict with keys {', '.join(map(repr, parts))}")
        done, after = [], {}
        for label, here in members(params).items():
            given = _only(here, grads, params), state[label], _only(here, params, params)
            updates, after[label] = parts[label].update(*given)
            done.append((here, updates))
        return _joined(done, grads, params), after

    return Optimizer(init, update)


def _only(here: Sequence[bool], values: Any, params: Any) -> Any:
    """The tree `values`, shaped as `params`, with None for leaves that are not chosen."""
    _, structure, (entries,) = beside("masked", params, values)
    return tree.unflatten(structure, [x if chosen else None for x, chosen in zip(entries, here)])


def _joined(parts: Sequence[tuple[Sequence[bool], Any]], otherwise: Any, params: Any) -> Any:
    """For each leaf the entry of the part that has chosen it, or what there is otherwise."""
    _, structure, (entries,) = beside("masked", params, otherwise)
    for here, values in parts:
        found = structure.flatten_up_to(values)
        entries = [x if chosen else before for x, chosen, before in zip(found, here, entries)]
    return tree.unflatten(structure, entries)
