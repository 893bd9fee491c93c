"""Draws from torch's own generators: which calls are such draws, and the keyed call to write in place of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from .errors import RandomError
from .messages import report
from .op_arguments import bind, tensors_in

# Draws from torch's generators: every rank has its own, so no mesh would give the numbers of one device.
DRAW = "a stateful draw on an array: every rank would draw from a generator of its own"
_PLAIN = "a draw from torch's global generator, whose numbers depend on all that was drawn before"
_RANK = "a draw from a generator, which would depend on which ranks a process plays"
_OWN = "a draw from a generator, whose numbers depend on all that was drawn before"
_DROPOUT = "vfn.random.dropout(key, x, rate)"
_KEYED = {
    "bernoulli": f"vfn.random.bernoulli(key, p, {{shape}}); for dropout {_DROPOUT}",
    "rand": "vfn.random.uniform(key, {shape}{spec})",
    "uniform": "vfn.random.uniform(key, {shape}, minval=..., maxval=...{spec})",
    "randn": "vfn.random.normal(key, {shape}{spec})",
    "normal": "mean + std * vfn.random.normal(key, {shape}{spec})",
    "log_normal": "math.exp(mean) * vfn.random.lognormal(key, std, {shape}{spec})",
    "exponential": "vfn.random.exponential(key, {shape}{spec}) / rate",
    "cauchy": "median + sigma * vfn.random.cauchy(key, {shape}{spec})",
    "geometric": "vfn.random.geometric(key, p, {shape}{spec})",
    "multinomial": "vfn.random.categorical(key, logits)",
    "randint": "vfn.random.randint(key, {shape}, {low}, {high}{spec})",
    "random": "vfn.random.randint(key, {shape}, low, high{spec})",
    "randperm": "vfn.random.permutation(key, {n})",
    "poisson": "vfn.random.poisson(key, rate)",
    "binomial": "vfn.random.binomial(key, count, prob)",
    "_standard_gamma": "vfn.random.gamma(key, concentration)",
    "_sample_dirichlet": "vfn.random.dirichlet(key, concentration)",
    "rrelu_with_noise": "torch.where(x < 0, x * slope, x) with slope = "
    "vfn.random.uniform(key, {shape}, minval=lower, maxval=upper{spec})",
    "attention": "dropout_p=0, or attention written out, its weights through vfn.random.dropout(key, weights, rate)",
    "rnn": "dropout=0 in the module, and vfn.random.dropout(key, x, rate) between its layers",
    **dict.fromkeys(("native_dropout", "_fused_dropout", "dropout", "alpha_dropout", "feature_dropout"), _DROPOUT),
}
_UNTAGGED = {"random", "random_", "binomial", "_sample_dirichlet", "_cudnn_init_dropout_state"}  # torch forgot them


def is_seeded(func: Any) -> bool:
    """Whether an op may draw from a generator of torch's."""
    return (
        torch.Tag.nondeterministic_seeded in func.tags
        or torch_internals.operator_name(func).removeprefix("aten::") in _UNTAGGED
    )


def refuse_seeded(func: Any, args: Sequence[Any], kwargs: dict[str, Any], own: bool = False) -> None:
    """Raise a RandomError that names the keyed call, where this call of an aten op draws from torch's global generator;
    on arrays, or if `own`, also where it draws from a generator that it is given."""
    if not is_seeded(func):
        return
    bound = bind(func, args, kwargs)
    name = torch_internals.operator_name(func).removeprefix("aten::")
    if not _draws(name, bound):
        return
    array = any(isinstance(x, DTensor) for x in tensors_in(args, kwargs))
    if bound.get("generator") is not None and not (array or own):
        return
    what = DRAW if array else _PLAIN if bound.get("generator") is None else _OWN
    raise RandomError(
        report(f"torch's {name}", what, fix=f"a keyed draw, the same on every mesh: {_keyed(name, bound, array)}")
    )


def refuse_factory(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise a RandomError where a torch function of no tensors, called in a body, draws."""
    name = getattr(func, "__name__", "?")
    if name in _KEYED:
        size = args if args and isinstance(args[0], int) else args[0] if args else kwargs.get("size")
        bound = {"size": (size,) if isinstance(size, int) else size}
        raise RandomError(report(f"torch's {name}", _RANK, fix=f"a keyed draw: {_keyed(name, bound, False)}"))


def _draws(name: str, bound: dict[str, Any]) -> bool:
    """Whether a call of a seeded op draws: one that drops nothing, or does not train, does not."""
    chances = [bound[at] for at in ("dropout_p", "p", "dropout") if at in bound and ("drop" in at or "dropout" in name)]
    trains = [bound[at] for at in ("train", "training") if at in bound]
    if chances and isinstance(chances[0], (int, float)) and not chances[0]:
        return False
    return not (trains and trains[0] is False)


def _keyed(name: str, bound: dict[str, Any], array: bool) -> str:
    kind = name.removesuffix("_").removesuffix("_like").removesuffix("_functional")
    if "attention" in name:
        kind = "attention"
    elif "rnn" in name or name in ("lstm", "gru", "_cudnn_init_dropout_state"):
        kind = "rnn"
    size = bound.get("size")
    said = {at: bound[at] for at in ("low", "high", "n") if isinstance(bound.get(at), int)}
    text = _KEYED.get(kind, "vfn.random.bits(key, {shape}, ...)")
    return text.format_map(
        {
            "low": 0,
            "high": "high",
            "n": "n",
            **said,
            "shape": repr(tuple(size)) if isinstance(size, (list, tuple)) else "x.shape",
            "spec": ", spec=vfn.spec_of(x)" if array else "",
        }
    )
