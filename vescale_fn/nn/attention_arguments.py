"""What the arguments of attention must be: each other's shapes, the mask's, and the ranks'."""

from __future__ import annotations

from typing import Any

import torch

from .._core.base.errors import CollectiveError, RandomError
from .._core.base.messages import count_text, described, meant, report, short
from .._core.local_types.tensor_types import text
from .._core.sharding.spec import P
from ..random.parameters import probability
from .zigzag import chunks

Axes = tuple[str, ...]
METHODS = ("ring", "all_gather", "all_to_all")


def check(q: Any, k: Any, v: Any, causal: Any, method: Any, zigzag: Any, mask: Any, window: Any, spec: Any) -> None:
    """Whether the arguments fit each other, on any mesh."""
    given = {"q": q, "k": k, "v": v}
    failures = [
        f"{name} must be a floating-point tensor of 4 dims (batch, heads, sequence, width), but it is {described(x)}"
        for name, x in given.items()
        if not isinstance(x, torch.Tensor) or x.ndim != 4 or not x.is_floating_point()
    ]
    failures = failures or _unlike(given, causal, window)
    if method not in METHODS:
        failures.append(f"method={short(method)} is not one of {METHODS}{meant(method, METHODS)}")
    if not _is_side(zigzag):
        failures.append(f"zigzag must be a number of ranks, or 0 for the usual order, but it is {described(zigzag)}")
    if window is not None and not _is_window(window):
        failures.append(
            f"window must be the number of keys to the left and to the right, (left, right), where None is no "
            f"limit, or one number for both, but it is {described(window)}"
        )
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dtype in _dtypes(q)):
        failures.append(
            f"mask must be a tensor, bool (True: may be attended) or of the dtype of q or float32 (added to the "
            f"scores), but it is {described(mask)}"
        )
    if spec is not None and not (isinstance(spec, P) and len(spec) <= 4):
        failures.append(f"spec must be a P of at most 4 entries, but it is {described(spec)}")
    if failures:
        raise CollectiveError(report("nn.attention", "the arguments do not fit", failures))


_ALIKE = (("batch", 0, "q", "k"), ("batch", 0, "k", "v"), ("width", 3, "q", "k"), ("heads", 1, "k", "v"))
_ALIKE += (("length", 2, "k", "v"),)


def _unlike(given: dict[str, torch.Tensor], causal: Any, window: Any) -> list[str]:
    """In what tensors of 4 dims do not fit each other."""
    failures = [
        f"{a} and {b} have {word} {one.shape[dim]} and {other.shape[dim]}: {text(one)}, {text(other)}"
        for word, dim, a, b in _ALIKE
        for one, other in [(given[a], given[b])]
        if one.shape[dim] != other.shape[dim]
    ]
    heads, shared = given["q"].shape[1], given["k"].shape[1]
    if not shared or heads % shared:
        failures.append(
            f"the heads of k must divide those of q, but {count_text(heads, 'head')} of q are to "
            f"share {count_text(shared, 'head')} of k"
        )
    near = "causal: query i looks at keys up to i" if causal else "window: query i sees keys near i"
    queries, keys = given["q"].shape[2], given["k"].shape[2]
    if (causal or window is not None) and queries != keys:
        failures.append(f"{near}, but there are {queries} queries and {keys} keys")
    if len({x.dtype for x in given.values()}) > 1:
        failures.append(f"q, k and v must be of one dtype, but they are {', '.join(map(text, given.values()))}")
    return failures


def dropout_rate(dropout: Any, key: Any) -> float:
    """The probability of dropout, with which there must be one key unless it is 0."""
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)):
        raise RandomError(report("nn.attention", f"dropout must be a number, but it is {described(dropout)}"))
    rate = probability(dropout, "nn.attention", "dropout")
    if rate and key is None:
        fix = "key=vfn.random.key(seed), and another one at each step: vfn.random.fold_in(key, step)"
        raise RandomError(report("nn.attention", f"dropout={rate:g} needs a key, but key is None", fix=fix))
    return rate


def _is_window(window: Any) -> bool:
    pair = isinstance(window, (tuple, list)) and len(window) == 2
    return _is_side(window) or (pair and all(side is None or _is_side(side, -1) for side in window))


def _is_side(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _dtypes(q: Any) -> tuple[torch.dtype, ...]:
    return (torch.bool, torch.float32, q.dtype if isinstance(q, torch.Tensor) else torch.float64)


def mask_of_4_dims(mask: Any, shape: tuple[int, ...], what: str = "") -> Any:
    """A mask with the dims that broadcasting adds in front, once it is known to broadcast to [B, H, T, S]."""
    if mask is None:
        return None
    sizes = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if len(sizes) > 4 or any(size not in (1, all_) for size, all_ in zip(sizes, shape, strict=True)):
        raise CollectiveError(
            report(
                "nn.attention",
                f"the mask does not broadcast to [batch, heads, query, key] = {list(shape)}{what}",
                [f"it is {text(mask)}"],
                "mask[:, None, None, :] of a mask [batch, key]" if len(sizes) == 4 and mask.ndim == 2 else "",
            )
        )
    return mask.reshape(sizes) if mask.ndim < 4 else mask


def halved(method: str, causal: bool, zigzag: int) -> bool:
    """Whether a rank works on the two halves of its tokens."""
    return method == "ring" and causal and zigzag > 0


def check_parts(method: str, causal: bool, zigzag: int, names: Axes, counts: tuple[int, ...], in_body: bool) -> None:
    """Whether a sequence of which ranks have so many tokens may lie in such an order."""
    n, failures, fix = len(counts), [], ""
    along = f"{n} ranks along {', '.join(map(repr, names))}"
    if zigzag and zigzag != n and method == "ring":
        failures.append(f"tokens in the zigzag order of {zigzag} ranks go round a ring of {n}")
        fix = f"zigzag={n}, with the tokens in the order zigzag_order({sum(counts)}, {n}); or method='all_gather'"
    elif halved(method, causal, zigzag):
        if in_body and counts[0] % 2:
            failures.append(f"in zigzag order a rank has an early and a late half, but {counts[0]} tokens")
            fix = "pad the tokens at the end; or nn.attention on arrays, which does"
        if counts != chunks(sum(counts), n):
            failures.append(
                f"zigzag_order gives the ranks {list(chunks(sum(counts), n))} tokens, but they have {list(counts)}"
            )
            fix = "split the sequence over one axis; or pad the tokens at the end; or method='all_gather'"
    if failures:
        raise CollectiveError(report("nn.attention", f"the sequence cannot be split over {along}", failures, fix))
