"""Specs by size: each leaf of a tree split over some axes once more, along the dim that is largest on a rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from . import context, tree
from .containers import opened
from .errors import SpecError, axes_text, meant, mesh_text, report
from .spec import P, axes_named, axes_of, from_split_axes, split_axes


def spec_by_size(params: Any, mesh: Any, axes: str | Sequence[str], specs: Any = P()) -> Any:
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
    >>> vfn.spec_by_size(params, {"dp": 2, "tp": 8}, "dp", {"up": P(None, "tp"), "bias": P("tp"), "scale": P()})
    {'up': P('dp', 'tp'), 'bias': P(('tp', 'dp')), 'scale': P()}
    """
    if not isinstance(mesh, Mapping):
        context.checked_mesh(mesh, "spec_by_size")
    sizes: dict[str, int] = dict(cast("Any", mesh)) if isinstance(mesh, Mapping) else axes_of(mesh)
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    leaves, treedef = opened(params, "spec_by_size", "params", numpy=True)
    before = tree.broadcast(specs, params, "spec_by_size", "specs", "params")
    failures = [f"axis {name!r} is not an axis of the {mesh_text(sizes)}{meant(name, sizes)}"
                for name in names if name not in sizes]  # fmt: skip
    for path, spec in zip(tree.paths(params, "params"), before, strict=True):
        twice = sorted(axes_named(spec) & set(names))
        failures += [f"{path} is split over {axes_text(twice)} already: {spec!r}"] if twice else []
    if failures:
        raise SpecError(report("spec_by_size", "the leaves cannot be split over these axes", failures,
                               "axes of the mesh that no spec names yet"))  # fmt: skip
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
    return from_split_axes(rows, spec.unreduced, spec.reduced)
