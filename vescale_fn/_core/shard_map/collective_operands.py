"""What may go through a collective: tensors and numbers of the right types and sizes; all that may not, named at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..base import context, tree
from ..base.containers import opened
from ..base.errors import CollectiveError, VaryingTypeError
from ..base.messages import count_text, described, mesh_text, report
from ..distributed.blocks import Blocks
from ..local_types import tensor_types, types
from ..sharding.index_map import axes_of

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def operands(where: str, x: Any, body: context.Body | None) -> tuple[list[Any], Any]:
    """The leaves of `x`, and its structure; or an error that names all leaves that nothing can be done with."""
    leaves, treedef = opened(x, where, "x", numpy=True)
    if _PLAIN.issuperset(map(type, leaves)):
        return leaves, treedef
    wrong = {i: found for i, leaf in enumerate(leaves) if (found := _no_operand(leaf)) is not None}
    if wrong:
        paths = tree.paths(x, "x")
        on = f" on the {mesh_text(axes_of(body.mesh))}" if body is not None else ""
        raise CollectiveError(
            report(
                where,
                f"x must hold tensors and numbers{on}",
                [f"{paths[i]} {found}" for i, found in wrong.items()],
                "the tensors alone, of one shape on all ranks",
            )
        )
    return leaves, treedef


def _no_operand(leaf: Any) -> str | None:
    if isinstance(leaf, torch.Tensor):
        if type(leaf) is Blocks and len(shapes := dict.fromkeys(tuple(block.shape) for block in leaf.blocks)) > 1:
            return f"has another shape on some ranks: {', '.join(map(str, map(list, shapes)))}"
        return None
    return None if isinstance(leaf, (int, float, complex, np.ndarray, np.generic)) else f"is {described(leaf)}"


def refuse_unreduced(
    where: str, x: Any, leaves: Sequence[Any], have: Sequence[types.Type], names: Sequence[str]
) -> None:
    """Raise where a leaf is still to be added over one of these axes."""
    wrong = [(i, a) for i, t in enumerate(have) for a in names if t.letter(a) == "U"]
    if wrong:
        raise VaryingTypeError(
            report(
                where,
                "an unreduced value, still to be added over the ranks, may only be summed",
                [
                    f"{tree.paths(x, 'x')[i]} is {tensor_types.text(leaves[i], have[i])}: unreduced over {a!r}"
                    for i, a in wrong
                ],
                f"vfn.psum(x, {wrong[0][1]!r}) first",
            )
        )


def dim_problem(dim: Any, ndim: int, word: str, of: str = "x") -> str | None:
    """What is wrong with a dim, by the parameter's name."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        return f"{word} must be an int, a dim of {of}, but it is {described(dim)}"
    if -ndim <= dim < ndim:
        return None
    return f"{word}={dim} is not one of the {count_text(ndim, 'dim')} of {of}"


def size_problem(leaf: torch.Tensor, dim: int, word: str, tiled: bool, n: int, span: str) -> str | None:
    """What is wrong with the size of a dim that is cut into one piece a rank."""
    size = leaf.shape[dim]
    if tiled:
        return f"tiled, {word}={dim} has size {size}, which is not divisible by {span}" if size % n else None
    if size == n:
        return None
    instead = "; tiled=True cuts it into equal pieces" if size % n == 0 else ""
    return f"{word}={dim} has size {size}, but untiled it must be {span}{instead}"


def refuse_what_cannot_be_reduced(
    where: str, x: Any, leaves: Sequence[Any], body: context.Body | None, names: Any
) -> None:
    """Keys, whose bits are no numbers; and what has no order, or is unreduced, for `pmax` and `pmin`."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(leaf.dtype is torch.int32 and leaf.ndim and leaf.shape[-1] == 2 for leaf in tensors):  # as a key's bits
        nodes, _ = tree.flatten_opaque(x)
        keys = [path for path, node in zip(tree.paths_opaque(x, "x"), nodes) if tree.none_or_opaque(node)]
        if keys:
            raise CollectiveError(
                report(
                    where,
                    "a random key is not a number, and a reduction of its bits no key",
                    [f"{path} is a Key" for path in keys],
                    "vfn.random.fold_in(key, vfn.axis_index(axis)), or vfn.pbroadcast of one rank's key",
                )
            )
    if where in ("pmax", "pmin"):
        wrong = [
            (path, leaf)
            for path, leaf in zip(tree.paths(x, "x"), leaves)
            if isinstance(leaf, complex) or (isinstance(leaf, torch.Tensor) and leaf.is_complex())
        ]
        if wrong:
            raise CollectiveError(
                report(
                    where,
                    "complex numbers have no order",
                    [f"{path} is {described(leaf)}" for path, leaf in wrong],
                    "its .abs(), .real or .imag",
                )
            )
        if body is not None and body.check:
            have = [tensor_types.type_in(x, body) if isinstance(x, torch.Tensor) else types.INVARIANT for x in leaves]
            refuse_unreduced(where, x, leaves, have, names)
