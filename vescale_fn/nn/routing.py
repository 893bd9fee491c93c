"""Which experts each token goes to, and the losses that keep a router in balance."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._core.arrays.array import is_array, mesh_of
from .._core.arrays.placement import with_sharding
from .._core.base.errors import CollectiveError
from .._core.base.messages import described, meant, report, short
from .._core.sharding.spec import P
from .blockwise import wide

_SOFTMAXES = ("before", "after")


class Routes(NamedTuple):
    """The experts of each token, best first, and what their results are weighed by. Made by `route`."""

    experts: torch.Tensor  # i64[..., T, k]
    weights: torch.Tensor  # [..., T, k]
    count: int  # how many experts there are


def route(logits: torch.Tensor, k: int, *, softmax: str = "before", normalize: bool = False) -> Routes:
    """The k best experts of each token.

    Every token is routed for itself, and among equal scores the expert with the lower number is chosen, so that routes
    are the same on every mesh.

    Args:
        logits: the router's scores [..., T, E]; halves are computed in float32.
        k: how many experts a token goes to.
        softmax: "before": weights are probabilities over all experts. "after": over the chosen ones.
        normalize: with "before", make each token's weights add up to 1, which then is the same as "after".

    Returns:
        `Routes`: experts i64[..., T, k], best first, and their weights, differentiable in the logits. They lie as the
        tokens do.

    Raises:
        CollectiveError: logits that are no float tensor of 2 dims or more, a k that is not from 1 to E.

    Source: Shazeer et al. (arXiv 1701.06538); "before" as in Switch Transformers (arXiv 2101.03961), "after" as in
        Mixtral (arXiv 2401.04088).

    >>> import torch, vescale_fn as vfn
    >>> routes = vfn.nn.route(torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 3.0]]), 2, softmax="after")
    >>> routes.experts
    tensor([[1, 2],
            [0, 2]])
    """
    failures = []
    if not isinstance(logits, torch.Tensor) or logits.ndim < 2 or not logits.is_floating_point():
        failures.append(f"logits must be a float tensor [..., tokens, experts], but it is {described(logits)}")
    elif isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= logits.shape[-1]:
        failures.append(f"k must be from 1 to {logits.shape[-1]}, the number of experts, but it is {described(k)}")
    if softmax not in _SOFTMAXES:
        failures.append(f"softmax={short(softmax)} is not one of {_SOFTMAXES}{meant(softmax, _SOFTMAXES)}")
    if failures:
        raise CollectiveError(report("nn.route", "the arguments do not fit", failures))
    scores = wide(logits)
    scores = torch.softmax(scores, -1) if softmax == "before" else scores
    best, experts = torch.sort(scores, dim=-1, descending=True, stable=True)
    weights, experts = best[..., :k], experts[..., :k]
    if softmax == "after":
        weights = torch.softmax(weights, -1)
    elif normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routes(experts, weights.to(logits.dtype), logits.shape[-1])


def load_balance_loss(logits: torch.Tensor, routes: Routes) -> torch.Tensor:
    """How unevenly tokens are spread over experts: E times the sum over experts of (its share of the routes) x (its mean
    probability).

    It is 1 where both are even, and E where all tokens go to one expert. Gradients flow through the probabilities.

    Args:
        logits: the router's scores [..., T, E].
        routes: what `route` made of them.

    Returns:
        A number, of all tokens on all ranks: one all-reduce of 2 E numbers.

    Source: Fedus et al., "Switch Transformers" (arXiv 2101.03961), equations 4 to 6; with several experts a token, the
        shares are those of all its routes.

    >>> import torch, vescale_fn as vfn
    >>> logits = torch.eye(4) * 9
    >>> vfn.nn.load_balance_loss(logits, vfn.nn.route(logits, 1))
    tensor(1.)
    """
    probabilities = torch.softmax(wide(logits), -1)
    count, k = routes.count, routes.experts.shape[-1]
    chosen = (routes.experts.unsqueeze(-1) == torch.arange(count, device=logits.device)).sum(-2)
    sums = torch.stack([chosen.to(probabilities.dtype), probabilities]).sum(tuple(range(1, logits.ndim)))
    if is_array(sums):
        sums = with_sharding(sums, P(), mesh=mesh_of(sums))  # both at once
    tokens = logits.numel() // count
    return (sums[0] * sums[1]).sum() * (count / (k * tokens**2))


def router_z_loss(logits: torch.Tensor) -> torch.Tensor:
    """The mean over tokens of the squared logarithm of the sum of e^logits, which keeps a router's logits small.

    Args:
        logits: the router's scores [..., T, E].

    Returns:
        A number, of all tokens on all ranks.

    Source: Zoph et al., "ST-MoE" (arXiv 2202.08906), equation 5.

    >>> import torch, vescale_fn as vfn
    >>> vfn.nn.router_z_loss(torch.zeros(3, 1))
    tensor(0.)
    """
    return torch.logsumexp(wide(logits), -1).square().mean()


def route_problems(routes: Any, tokens: torch.Tensor) -> list[str]:
    """What is wrong with routes for these tokens."""
    if not isinstance(routes, Routes):
        return [f"routes must be what vfn.nn.route gives, but it is {described(routes)}"]
    if tuple(routes.experts.shape[:-1]) != tuple(tokens.shape[:-1]):
        return [f"routes are for {list(routes.experts.shape[:-1])} tokens, but x is {described(tokens)}"]
    return []
