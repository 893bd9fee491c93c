"""One formula for all leaves of several trees: on lists of tensors where no tracer or transform is active, else on each leaf.

An update is elementwise, and parameters, gradients and state lie alike: each rank computes on its own blocks, and nothing
moves. So the blocks go straight into torch's ``_foreach_`` kernels, past the interpreter, whose cost is per leaf and per op.
What records, differentiates, types or compares a program sees the same formula as plain torch ops on each leaf.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._core import torch_internals
from .._core.arrays.array import Array
from .._core.base import context, tree
from .._core.base.containers import opened
from .._core.base.errors import VfnError
from .._core.base.messages import described, report
from .._core.distributed.blocks import Blocks, of_each
from .._core.distributed.places import is_elsewhere, nothing
from .._core.sharding.layout import layout, spec_for
from .optimizer import is_trained
from .tensor_list import Many, One

Rule = Callable[..., tuple[Any, ...]]


def by_leaf(where: str, rule: Rule, grads: Any, params: Any, *others: Any) -> list[Any]:
    """`rule` on every floating-point leaf of `params` and what stands at its place in the other trees.

    Args:
        where: the optimiser's name, for messages.
        rule: ``rule(grad, param, *others) -> update, *others``, of elementwise functions; arguments that are no tensors
            it gets as they are.
        grads, params, others: trees; of `grads` and `others` the leaves may be anything.

    Returns:
        One tree for each result of the rule, in the dtypes of `params` and of `others` (a 0-d leaf would else take that of
        the numbers in the formula). Elsewhere, and where there is no gradient (None), all pass through.
    """
    leaves, structure, columns = beside(where, params, grads, *others)
    todo = [i for i, leaf in enumerate(leaves) if columns[0][i] is not None and is_trained(leaf)]
    if todo:
        given = [x if len(todo) == len(x) else [x[i] for i in todo] for x in (columns[0], leaves, *columns[1:])]
        check_shapes(where, params, todo, given[1], [given[0], *given[2:]])

        def in_their_dtypes(grad: Any, param: Any, *others: Any) -> tuple[Any, ...]:
            return tuple(map(in_dtype_of, (param, *others), rule(in_dtype_of(param, grad), param, *others)))

        for column, out in zip(columns, each(in_their_dtypes, *given)):
            for i, x in zip(todo, out):
                column[i] = x
    return [tree.unflatten(structure, column) for column in columns]


def in_dtype_of(like: Any, x: Any) -> Any:
    """A tensor of a formula in the dtype of another; what is no tensor as it is."""
    return x if not isinstance(like, (torch.Tensor, Many)) or x.dtype == like.dtype else x.to(like.dtype)


_dtype, _shape, _followed = (operator.attrgetter(x) for x in ("dtype", "shape", "requires_grad"))


def check_shapes(
    where: str, params: Any, places: Sequence[int], leaves: Sequence[Any], columns: Sequence[Sequence[Any]]
) -> None:
    """Raise where a gradient (the first column), or what a state has of a leaf, has another shape than the leaf itself.

    Args:
        where: the optimiser's name.
        params, places: the whole tree, and the places of its leaves that are looked at.
        leaves, columns: these leaves, and what stands beside each: what is no tensor has no shape.
    """
    shapes = list(map(_shape, leaves))
    failures = []
    for which, column in enumerate(columns):
        if isinstance(column[0], torch.Tensor) and list(map(_shape, column)) != shapes:
            paths = tree.paths(params, "params")
            whose = "state has" if which else "its gradient is"
            failures += [
                f"{paths[i]} is {described(leaf)}, {whose} {described(x)}"
                for i, leaf, x in zip(places, leaves, column)
                if x.shape != leaf.shape
            ]
    if failures:
        raise other_shapes(where, failures)


def other_shapes(where: str, failures: Sequence[str]) -> VfnError:
    """What is said of gradients, or of a state, of other parameters than these."""
    found = "gradients, parameters and state must have the same shapes"
    fix = "gradients by these parameters, and opt.init(params) for the state"
    return VfnError(report(where, found, list(dict.fromkeys(failures)), fix))


def beside(where: str, params: Any, *others: Any, name: str = "grads") -> tuple[list[Any], Any, list[list[Any]]]:
    """The leaves of `params`, its structure, and what stands at each leaf's place in the other trees: `name`, and state."""
    leaves, structure = opened(params, where, "params")
    try:
        return leaves, structure, [structure.flatten_up_to(other) for other in others]
    except ValueError as error:
        failures = [
            problem
            for i, other in enumerate(others)
            for problem in tree.partings(other, params, "state" if i else name, "params")
        ]
        fix = "give gradients and state as `grad` and `init` return them for these params"
        raise VfnError(
            report(
                where,
                "a tree lacks the structure of params",
                list(dict.fromkeys(failures)) or str(error).splitlines()[:1],
                fix,
            )
        ) from None


def zeros_like(params: Any, dtype: torch.dtype | None = None) -> Any:
    """Zeros in the layout of the floating-point leaves; other leaves as they are."""
    return mapped(lambda leaf: torch.zeros_like(leaf, dtype=dtype) if is_trained(leaf) else leaf, params)


def mapped(f: Callable[[Any], Any], params: Any) -> Any:
    """What an optimiser begins with: `f` of each leaf."""
    leaves, structure = opened(params, "opt.init", "params")
    return tree.unflatten(structure, map(f, leaves))


# --- lists ------------------------------------------------------------------------------------------------------------


def choose(flag: Any, one: Any, other: Any) -> Any:
    """The tensors of one tree where a 0-d bool tensor is true, else those of another of the same structure."""
    leaves, structure = tree.flatten(one)
    others = structure.flatten_up_to(other)
    places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    if places:
        columns = [leaves[i] for i in places], [others[i] for i in places]
        for i, x in zip(places, each(lambda x, y: (torch.where(flag, x, y),), *columns)[0]):
            leaves[i] = x
    return tree.unflatten(structure, leaves)


def looked_on() -> bool:
    """Whether something must see each torch function, or each leaf: a recording, a transform, a body, debug mode."""
    return torch_internals.watched() or context.examined() or torch_internals.forward_ad_active()


def each(rule: Rule, *columns: Sequence[Any]) -> list[list[Any]]:
    """``rule(*row)`` for each row of these columns, of which there must be one: a column for each result.

    A column has tensors or values that are none. The tensors of a row are of one shape and lie alike.
    """
    run: _Run | None = _run
    if looked_on():
        recorder = None if context.examined() else torch_internals.recorder()
        run = functools.partial(_recorded, recorder) if recorder is not None and recorder.maps() else None
    groups = None if run is None else _groups(columns)
    if groups is None or run is None:
        return [list(out) for out in zip(*(rule(*row) for row in zip(*columns)))]
    if len(groups) == 1 and columns[0][0].ndim:
        return _on_lists(run, rule, columns)
    outs: list[Any] = [None] * len(columns[0])
    for members in groups:
        own = [[column[i] for i in members] for column in columns]
        # numbers in double precision would promote tensors of no dims, and lists and single ones not alike
        found = zip(*_on_lists(run, rule, own)) if own[0][0].ndim else (rule(*row) for row in zip(*own))
        for i, row in zip(members, found):
            outs[i] = row
    return [list(out) for out in zip(*outs)]


def _groups(columns: Sequence[Sequence[Any]]) -> list[Any] | None:
    """The rows that one call on lists can take, as lists of their places; None where some rows cannot go that way."""
    first = columns[0]
    keys: list[Any] = [[x.ndim == 0 for x in first]]
    for column in columns:
        kinds = set(map(type, column))
        if not any(issubclass(kind, torch.Tensor) for kind in kinds):
            keys.append(column)
            continue
        if not kinds <= _KINDS or (torch.is_grad_enabled() and True in map(_followed, column)):
            return None
        if Array in kinds and (len(kinds) > 1 or not _lie_alike(first, column)):
            return None
        if set(map(type, first)) != kinds and Array in {*kinds, *map(type, first)}:
            return None
        keys.append(list(map(_dtype, column)))
    if all(key.count(key[0]) == len(key) for key in keys):
        return [range(len(first))]
    groups: dict[Any, list[int]] = {}
    for i, key in enumerate(zip(*keys)):
        groups.setdefault(key, []).append(i)
    return list(groups.values())


_KINDS = frozenset((*torch_internals.BARE, torch.nn.Parameter, Array))


def _lie_alike(first: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether arrays are split in the same way, each as the one at its place, and none is a partial sum."""
    if first is others:
        return not any(layout(spec).unreduced for spec in set(map(torch_internals.spec, first)))
    return set(map(type, first)) == {Array} and all(
        x is y
        or (
            x.mesh is y.mesh
            and x.placements == y.placements
            and x.tensor_meta.shape == y.tensor_meta.shape
            and x.tensor_meta.stride == y.tensor_meta.stride
        )
        for x, y in zip(map(torch_internals.spec, first), map(torch_internals.spec, others))
    )


_Run = Callable[[Rule, Sequence[Sequence[Any]]], Sequence[Any]]


def _run(rule: Rule, columns: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """What a rule gives for lists of plain tensors: a `Many`, or a value that is the same for all rows."""
    return rule(*(Many(x) if isinstance(x[0], torch.Tensor) else x[0] for x in columns))


def _recorded(recorder: Any, rule: Rule, columns: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """The same, recorded."""
    many: list[bool] = []

    def of_row(*row: Any) -> list[Any]:
        outs = rule(*(One([x]) if isinstance(x, torch.Tensor) else x for x in row))
        many[:] = [isinstance(x, Many) for x in outs]
        return [x.tensors[0] if isinstance(x, Many) else x for x in outs]

    found = zip(*recorder.mapped(of_row, columns))
    return [Many(column) if is_many else column[0] for column, is_many in zip(found, many)]


def _on_lists(run: _Run, rule: Rule, columns: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The rule once, on the local tensors of all rows."""
    first = columns[0]
    if type(first[0]) is not Array:
        return [out.tensors if isinstance(out, Many) else [out] * len(first) for out in run(rule, columns)]
    local = [list(map(_local, x)) if isinstance(x[0], torch.Tensor) else x for x in columns]
    if any(type(x[0]) is Blocks for x in local):
        return _on_blocks(rule, first, local)
    return [
        [_array(leaf, x) for leaf, x in zip(first, out.tensors)] if isinstance(out, Many) else [out] * len(first)
        for out in run(rule, local)
    ]


def _local(x: Any) -> Any:
    """What a rank holds of a leaf; of one that is at a place elsewhere one number in its place."""
    local = torch_internals.local(x)
    return local.reshape(-1)[:1] if _is_elsewhere(x) else local


def _is_elsewhere(x: Any) -> bool:
    return is_elsewhere(torch_internals.mesh(x)) and not torch_internals.is_recorded()


def _on_blocks(rule: Rule, first: Sequence[Any], columns: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """`_on_lists` for all simulated ranks: the blocks of each row that differ, in one list."""
    rows: list[tuple[Any, ...]] = []
    places: list[list[int]] = []  # of each leaf, for each rank, the row that is its own
    for values in zip(*columns):
        seen: dict[Any, int] = {}
        places.append([])
        ranks = len(values[0].blocks)
        for row in zip(*(x.blocks if type(x) is Blocks else itertools.repeat(x, ranks) for x in values)):
            known = tuple(map(id, row))
            if known not in seen:
                seen[known] = len(rows)
                rows.append(row)
            places[-1].append(seen[known])
    found: list[list[Any]] = []
    for out in _run(rule, list(zip(*rows))):
        if isinstance(out, Many):
            found.append([_array(leaf, Blocks([out.tensors[i] for i in at])) for leaf, at in zip(first, places)])
        else:
            found.append([out] * len(first))
    return found


def _array(leaf: Any, local: Any) -> Any:
    """What a rank has computed of a leaf, laid out as the leaf."""
    spec = torch_internals.spec(leaf)
    if _is_elsewhere(leaf):
        dtype, device = local.dtype, local.device
        local = of_each(lambda block: nothing(block.shape, dtype, device), torch_internals.local(leaf))
    if local.dtype != leaf.dtype:
        spec = spec_for(spec.mesh, layout(spec), leaf.shape, spec.tensor_meta.stride, local.dtype)
    return torch_internals.new_dtensor(Array, local, spec)
