"""The derivative of a loop as a loop that can be differentiated in turn: for gradients of gradients, and under transforms.

Its body computes one iteration anew, from the carry that was kept, and takes the gradient of that. So nothing is kept of an
iteration but its carry, and any order follows from the same rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..._core import torch_internals
from ..._core.arrays.array import is_array, mesh_of, moved, spec_of
from ..._core.base import context, state
from ..._core.control_flow.scan import is_split, scanned
from ..._core.local_types import tensor_types, types
from ..._core.shard_map import body
from ..._core.sharding.spec import P, axes_named
from ..._core.transforms.primals import as_primals
from . import ended_transforms
from .frame import Unrollable

Leaves = list[torch.Tensor]


class Differentiated:
    """A loop, of which autograd follows some values.

    Args:
        repeated: its body, a `scan.Repeated`.
        init: the first carry.
        xs: what it goes over.
        given, cut: the carry and the slice of one iteration, which it was run with.
        results: what it gave: the new carry, what is collected, and where autograd follows, `given`.
        captured: what it uses from outside that autograd follows.
        count, reverse: of the loop.
        layer: the transform that follows them; None for autograd.

    Attributes:
        moving, moving_xs: the places of what is followed, of the carry and of what it goes over.
        inputs: of that the first carry, what it goes over, and `captured`.
    """

    def __init__(
        self,
        repeated: Any,
        init: Leaves,
        xs: Leaves,
        given: Leaves,
        cut: Leaves,
        results: Leaves,
        captured: Leaves,
        count: int,
        reverse: bool,
        layer: Any = None,
    ) -> None:
        self.layer, self.repeated, self.xs, self.init, self.likes = layer, repeated, xs, init, results
        self.captured, self.count, self.reverse = captured, count, reverse
        self.around = around()
        self.moving = [i for i, x in enumerate(given) if x.requires_grad]
        self.moving_xs = [i for i, x in enumerate(cut) if x.requires_grad]
        self.moved_xs = [xs[i] for i in self.moving_xs]
        self.inputs = [*(self.init[i] for i in self.moving), *self.moved_xs, *captured]

    def arriving(self, cotangents: Sequence[Any]) -> tuple[Leaves, list[tuple[int, torch.Tensor]]]:
        """The cotangents of the last carry, where that is followed; and of what is collected the places among `likes` and the
        cotangents, where any came."""
        init, carried = [self.init[i] for i in self.moving], [cotangents[i] for i in self.moving]
        rows = list(enumerate(zip(self.likes, cotangents, strict=True)))[len(self.init) :]
        lead = [*[None] * len(self.init), *map(self.repeated.leading.get, range(len(rows)))]
        along = [(i, _along(ct, x, lead[i])) for i, (x, ct) in rows if ct is not None and x.requires_grad]
        return as_cotangents(carried, init), along

    def differentiable(self, cotangents: Sequence[Any], moved_xs: Sequence[torch.Tensor], carries: Leaves) -> list[Any]:
        """The cotangents of the inputs, which autograd follows.

        Args:
            cotangents: of the results of the loop, None where nothing comes back.
            moved_xs: as the attribute, as autograd knows it.
            carries: what was carried into each iteration.
        """
        with self.around:
            return self._differentiable(cotangents, moved_xs, carries)

    def _differentiable(
        self, cotangents: Sequence[Any], moved_xs: Sequence[torch.Tensor], carries: Leaves
    ) -> list[Any]:
        if self.is_over:
            cotangents = [None if ct is None else ended_transforms.now(ct) for ct in cotangents]
            moved_xs, carries = ([*map(ended_transforms.now, leaves)] for leaves in (moved_xs, carries))
        first, rows = self.arriving(cotangents)
        places, xs = [place for place, _ in rows], [*map(ended_transforms.now, self.xs)]
        carries = [
            tensor_types.kept(c, like)
            for c, like in zip(carries, self.likes[len(self.likes) - len(carries) :], strict=True)
        ]
        for i, x in zip(self.moving_xs, moved_xs, strict=True):
            xs[i] = tensor_types.kept(x, xs[i])

        def step(state: Any, row: Any) -> Any:
            (cts, sums), (row_cts, x, c) = state, row
            by, own, more = self._of_one(list(c), list(x), [*zip(self.moving, cts), *zip(places, row_cts)])
            own = as_cotangents(own, by)
            totals = zip(sums, more, self.captured, strict=True)
            sums = [total if g is None else total + as_primals([g], [x])[0] for total, g, x in totals]
            return (own[: len(cts)], sums), own[len(cts) :]

        start = first, as_cotangents([None] * len(self.captured), self.captured)
        along = [ct for _, ct in rows], xs, carries
        leading = {i: spec_of(x)[0] for i, x in enumerate(moved_xs) if is_split(x)}
        (own, sums), along = scanned(step, start, along, self.count, not self.reverse, 1, "scan", leading=leading)
        return [*own, *along, *sums]

    @property
    def is_over(self) -> bool:
        """Whether the transform is over."""
        return self.layer is not None and self.layer.is_over

    def _by(self, c: Leaves, x: Leaves) -> Leaves:
        """What an iteration is differentiated by of its carry and its slice."""
        return [*(c[i] for i in self.moving), *(x[i] for i in self.moving_xs)]

    def _of_one_anew(self, c: Leaves, x: Leaves, cts: Sequence[tuple[int, torch.Tensor]]) -> tuple[Leaves, Any, Any]:
        """The same in a transform of its own, where the one that followed the loop is over: what the body closes over is an
        argument, too."""
        by = self._by(c, x)
        more = [x.view_as(x) for x in map(ended_transforms.now, self.captured)]
        with torch_internals.new_gradient() as layer, torch.enable_grad(), for_a_derivative():
            c, x, more = ([layer.whole(iter([leaf]), True, 0) for leaf in leaves] for leaves in (c, x, more))
            for leaf in (*self._by(c, x), *more):
                torch_internals.begin_following(leaf)
            with ended_transforms.standing_for(self.captured, more):
                now, y = self.repeated.step(c, x)
                outs = [*self.repeated.checked(now), *y.leaves, *c]
            pairs = [(outs[i], ct) for i, ct in cts if outs[i].requires_grad]
            grads = gradients(pairs, self._by(c, x), more, True)
            grads = [None if g is None else layer.parts(g, True, 0)[0] for g in grads]
        return by, grads[: len(by)], grads[len(by) :]

    def _of_one(self, c: Leaves, x: Leaves, cts: Sequence[tuple[int, torch.Tensor]]) -> tuple[Leaves, Any, Any]:
        """The gradients of one iteration, of whose results these have cotangents: what it is differentiated by of the carry
        and the slice, with the gradients, and those by `captured`."""
        if self.is_over:
            return self._of_one_anew(c, x, cts)
        with torch.enable_grad(), for_a_derivative():
            for leaves, moving in ((c, self.moving), (x, self.moving_xs)):
                for i in moving:
                    leaves[i] = _variable(leaves[i])
            by = self._by(c, x)
            start = torch_internals.autograd_count()
            now, y = self.repeated.step(c, x)
            outs = [*self.repeated.checked(now), *y.leaves, *c]
            refuse_others(outs, start, self.captured, by)
            pairs = [(outs[i], ct) for i, ct in cts if outs[i].requires_grad]
            grads = gradients(pairs, by, self.captured, True)
        return by, grads[: len(by)], grads[len(by) :]


def around() -> context.Again:
    """What is around now, the body too, to be entered in a backward pass."""
    return context.Again(context.snapshot(), body.capture(remembering=True), *(also() for also in body.captures))


def for_a_derivative() -> Any:
    """The block in which a body runs once more for its derivative.

    In a derivative of such a derivative a custom rule ends the recording of bodies: in the third order a rule is no longer told
    from the operations of its function, whose own derivative then counts.
    """
    return context.setting(derivatives=(*state.now().derivatives, _unroll))


def _unroll() -> None:
    raise Unrollable


def as_cotangents(cts: Sequence[torch.Tensor | None], primals: Sequence[torch.Tensor]) -> Leaves:
    """Cotangents of values, zeros for None, of their layouts and in a body of their types."""
    found = as_primals([torch.zeros_like(x) if ct is None else ct for ct, x in zip(cts, primals, strict=True)], primals)
    return [typed(ct, x) for ct, x in zip(found, primals, strict=True)]


def typed(ct: torch.Tensor, primal: torch.Tensor) -> torch.Tensor:
    """The cotangent of a value, in a body of the type that goes with that of the value."""
    if (type_ := tensor_types.read(primal)) is not None:
        tensor_types.mark(ct, types.dual(type_))
    return ct


def captured(results: Leaves, start: int, seen: Iterable[torch.Tensor], own: Leaves) -> Leaves | None:
    """The tensors from outside that autograd follows into the results of one iteration.

    Args:
        results: of it.
        start: autograd's count of nodes when it began.
        seen: what it used that autograd follows.
        own: what it was given.

    Returns:
        Them, without `own`; None where one of them was not seen.
    """
    found: dict[int, torch.Tensor] = {}
    with torch_internals.no_torch_function():
        known = {(x.grad_fn, x.output_nr): x for x in (*seen, *results)}
        for edge, leaf in torch_internals.edges_from_before([x for x in results if x.requires_grad], start):
            x = known.get(edge) if leaf is None else leaf
            if x is None:
                return None
            if all(x is not given for given in own):
                found[id(x)] = x
    return list(found.values())


def distinct(rows: Iterable[Leaves]) -> Leaves:
    """Each value that autograd follows once: a checkpoint makes a second tensor of a value that it computes again, and with
    both as inputs a gradient would be counted twice."""
    with torch_internals.no_torch_function():
        return list(
            {(x.grad_fn, x.output_nr) if x.grad_fn is not None else id(x): x for xs in rows for x in xs}.values()
        )


def refuse_others(results: Leaves, start: int, known: Leaves, own: Leaves) -> None:
    """Raise where what was run once more has used something else from outside that autograd follows, whose gradient would be
    lost; or in a body an array, as a local one. `known` is what it used the first time."""
    found, here = captured(results, start, [*known, *own], own), context.body()
    outside = here is not None and any(tensor_types.outside(x, here.auto) for x in known)
    if found is None or outside or any(all(x is not one for one in known) for x in found):
        raise Unrollable


def check_recorded_again(first: Any, again: Any, further: bool) -> None:
    """Raise where a call that `remat` has recorded again follows other values than it did at first, whose cotangents it would
    give: in a `shard_map` body a value that had been promoted before the remat is promoted anew in the call.

    Args:
        first, again: the calls.
        further: whether autograd follows the cotangents; then nothing is known of a body's values, nor of entries.
    """
    if again is first:
        return
    kinds = [[(x.shape, x.dtype, tensor_types.read(x)) for x in call.inputs] for call in (first, again)]
    in_body = any(type_ is not None for *_, type_ in kinds[0])
    unknown = torch_internals.transforming() or (further and in_body)
    if kinds[0] != kinds[1] or unknown:
        raise Unrollable


def is_smooth(x: torch.Tensor) -> bool:
    """Whether a leaf can have a gradient."""
    return x.is_floating_point() or x.is_complex()


def gradients(pairs: Sequence[tuple[Any, Any]], by: Leaves, captured: Leaves, further: bool) -> list[Any]:
    """The gradients of one iteration, for these pairs of a result and its cotangent; None where nothing comes back.

    Args:
        pairs: of results.
        by, captured: by what; of `captured` some may be computed of others.
        further: whether autograd follows the gradients.
    """
    if not pairs:
        return [None] * (len(by) + len(captured))
    outs, cts = zip(*pairs)
    # what is around may have hidden torch functions: here a remat, or a user's derivative, runs bodies of `shard_map`
    with torch_internals.ending_at(captured), torch_internals.torch_function():
        found = torch.autograd.grad(
            outs, [*by, *captured], cts, allow_unused=True, retain_graph=True, create_graph=further
        )
    return list(found)


def _variable(x: torch.Tensor) -> torch.Tensor:
    """`x` under another name, to differentiate by."""
    return x.view_as(x) if x.requires_grad else torch_internals.begin_following(x.detach())


def lies_stacked(spec: P, lead: Any) -> P:
    """The layout of what has this one in an iteration, stacked: `lead` splits the leading dim, unless its axes are in use."""
    lead = None if axes_named(P(lead)) & axes_named(spec) else lead
    return P(lead, *spec, unreduced=spec.unreduced, reduced=spec.reduced)


def _along(ct: torch.Tensor, like: torch.Tensor, lead: Any) -> torch.Tensor:
    """The cotangent of what a loop collects, laid out as that is: `like` is of one iteration, `lead` for `lies_stacked`."""
    goal = None
    if is_array(like):
        spec = lies_stacked(spec_of(like), lead)
        goal = P(*spec, unreduced=spec.reduced, reduced=spec.unreduced)
    if goal is None and not is_array(ct) or (is_array(ct) and spec_of(ct) == goal):
        return typed(ct, like)
    return moved(ct, mesh_of(like) if goal is not None else mesh_of(ct), goal, "grad")
