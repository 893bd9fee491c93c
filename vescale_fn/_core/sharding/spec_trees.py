"""Specs for whole trees: by rules on the paths of leaves, and by size."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import optree

from ..base import context, tree
from ..base.containers import checked, opened
from ..base.earlier_names import earlier_name
from ..base.errors import SpecError
from ..base.messages import axes_text, count_text, described, meant, mesh_text, report
from ..base.tree import dotted
from .index_map import axes_of
from .spec import P, axes_named, from_split_axes, split_axes, with_place


def fsdp_specs(params: Any, mesh: Any, axes: str | Sequence[str], specs: Any = P()) -> Any:
    """Specs that split every leaf over `axes`, too: the layout of ZeRO and FSDP, for any tree.

    Each leaf is split along the dim that is largest on a rank, of those whose size there is a multiple of that of the
    axes; the first, where several are as large. So all blocks are of one size, and a gather needs no padding. A leaf
    without such a dim (a number, say, or a vector of 5 over 2 ranks) lies as before, and so do keys.

    Args:
        params: a tree of tensors of any layout, or of anything with a shape; other leaves get `P()`.
        mesh: a DeviceMesh, or a mapping from axis names to sizes: no ranks are needed.
        axes: an axis, or several, major first; none gives `specs` again.
        specs: how the leaves lie otherwise, over other axes: a `P`, or a prefix tree of them.

    Returns:
        A tree of specs, of the structure of `params`.

    Raises:
        SpecError: axes that are not of the mesh, or that `specs` split over already.

    Source: Rajbhandari et al., "ZeRO" (arXiv 1910.02054); Zhao et al., "PyTorch FSDP" (arXiv 2304.11277).

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> params = {"up": torch.zeros(4, 16), "bias": torch.zeros(16), "scale": torch.zeros(())}
    >>> vfn.fsdp_specs(params, {"dp": 2, "tp": 8}, "dp", {"up": P(None, "tp"), "bias": P("tp"), "scale": P()})
    {'up': P('dp', 'tp'), 'bias': P(('tp', 'dp')), 'scale': P()}
    """
    if not isinstance(mesh, Mapping):
        context.checked_mesh(mesh, "fsdp_specs")
    sizes: dict[str, int] = dict(cast("Any", mesh)) if isinstance(mesh, Mapping) else axes_of(mesh)
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    leaves, treedef = opened(params, "fsdp_specs", "params", numpy=True)
    before = tree.broadcast(specs, params, "fsdp_specs", "specs", "params")
    failures = [
        f"axis {name!r} is not an axis of the {mesh_text(sizes)}{meant(name, sizes)}"
        for name in names
        if name not in sizes
    ]
    for path, spec in zip(tree.paths(params, "params"), before, strict=True):
        twice = sorted(axes_named(spec) & set(names))
        failures += [f"{path} is split over {axes_text(twice)} already: {spec!r}"] if twice else []
    if failures:
        raise SpecError(
            report(
                "fsdp_specs",
                "the leaves cannot be split over these axes",
                failures,
                "axes of the mesh that no spec names yet",
            )
        )
    whole = tree.leaves_in_opaque(params)  # the two numbers of a key stay together
    split = [s if keep else _split(x, s, names, sizes) for x, s, keep in zip(leaves, before, whole, strict=True)]
    return tree.unflatten(treedef, split)


def _split(leaf: Any, spec: P, names: tuple[str, ...], sizes: Mapping[str, int]) -> P:
    shape = tuple(getattr(leaf, "shape", ()))
    rows, ways = list(split_axes(spec, len(shape))), math.prod(sizes[name] for name in names)
    here = [size / math.prod(sizes[name] for name in row) for size, row in zip(shape, rows, strict=True)]
    fitting = [dim for dim, size in enumerate(here) if size and size % ways == 0]
    if not fitting or not names:
        return spec
    best = max(fitting, key=lambda dim: (here[dim], -dim))
    rows[best] = (*rows[best], *names)
    return with_place(from_split_axes(rows, spec.unreduced, spec.reduced), spec.at)


def spec_from_rules(tree: Any, rules: Sequence[tuple[str, P]]) -> Any:
    """A tree of specs for `tree`: for each leaf, the spec of the first pattern found in its path.

    Args:
        tree: any tree; a leaf's path is written with dots, like ``blocks.0.attn.wq``.
        rules: (regular expression, spec) pairs, tried in order with `re.search`.

    Raises:
        SpecError: a leaf that no rule matches, a rule that matches no leaf, or a spec with more entries than its leaf
            has dims; all of them at once.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> params = {"w": torch.zeros(4, 2), "b": torch.zeros(2)}
    >>> vfn.spec_from_rules(params, [(r"w$", P("tp", None)), (r"b$", P())])
    {'w': P('tp', None), 'b': P()}
    """
    _check_rules(rules)
    checked(tree, "spec_from_rules", "tree", numpy=True)
    accessors, leaves, treedef = optree.tree_flatten_with_accessor(tree)
    found: list[P] = []
    failures: list[str] = []
    hits: set[int] = set()
    for accessor, leaf in zip(accessors, leaves, strict=True):
        path, code = dotted(accessor), accessor.codify("tree")
        matching = [i for i, (pattern, _) in enumerate(rules) if re.search(pattern, path)]
        hits.update(matching)
        if not matching:
            failures.append(f"no rule matches {path!r} ({code})")
            continue
        spec = rules[matching[0]][1]
        ndim = getattr(leaf, "ndim", None)
        if ndim is not None and len(spec) > ndim:
            failures.append(
                f"rule {rules[matching[0]]!r} gives {count_text(len(spec), 'entry')} to {path!r}, which has "
                f"{count_text(ndim, 'dim')}"
            )
        found.append(spec)
    failures += [f"rule {rule!r} matches no leaf" for i, rule in enumerate(rules) if i not in hits]
    if failures:
        raise SpecError(
            report(
                "spec_from_rules",
                "the rules and the tree do not fit",
                failures,
                'add a rule, for instance (r".*", P()) at the end, or take the unused one away',
            )
        )
    return optree.tree_unflatten(treedef, found)


def are_rules(spec: Any) -> bool:
    """Whether a list of (regular expression, spec) pairs stands where specs are asked for; a `P` is a tuple, too."""
    found = cast("list[Any]", spec) if isinstance(spec, list) else []
    pairs = [cast("tuple[Any, ...]", x) for x in found if isinstance(x, tuple) and not isinstance(x, P)]
    return any(len(pair) > 0 and isinstance(pair[0], str) for pair in pairs)


def _check_rules(rules: Any) -> None:
    """Rules are (regular expression, spec) pairs."""
    if isinstance(rules, (str, Mapping)) or not isinstance(rules, Iterable):
        raise SpecError(
            report(
                "spec_from_rules",
                f"rules must be a list of pairs, but it is {described(rules)}",
                fix='spec_from_rules(tree, [(r"w$", P("tp")), (r".*", P())])',
            )
        )
    failures: list[str] = []
    for i, rule in enumerate(cast("Iterable[Any]", rules)):
        pair = cast("tuple[Any, ...]", rule) if isinstance(rule, tuple) else ()
        if len(pair) != 2:
            failures.append(f"rules[{i}] is {described(rule)}, not a (pattern, spec) pair")
            continue
        pattern, spec = pair
        if not isinstance(spec, P):
            failures.append(f"rules[{i}]: the spec of {pattern!r} is {described(spec)}, not a vfn.P")
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            failures.append(f"rules[{i}]: {described(pattern)} is not a regular expression ({error})")
    if failures:
        raise SpecError(
            report(
                "spec_from_rules",
                "the rules are not (regular expression, spec) pairs",
                failures,
                '[(r"w$", P("tp")), (r".*", P())]',
            )
        )


spec_by_size = earlier_name("spec_by_size", fsdp_specs)
