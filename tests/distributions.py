"""The table of distributions that the tests go through: a new one is a new line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from vescale_fn import random
from vescale_fn.random.backends import draw_op
from vescale_fn.random.generators.counters import Rectangle
from vescale_fn.random.sharded import Draw


def draw_local(key: random.Key, draw: Draw, indices: Any) -> torch.Tensor:
    """One rectangle of a draw: the elements at these global indices, one vector a dim."""
    return draw_op.draw(key.data, draw, Rectangle(draw.shape, tuple(indices)), torch.device("cpu"))


def same_keys(one: random.Key, another: random.Key) -> bool:
    """Two arrays of keys of one shape, with the same bits."""
    return one.shape == another.shape and bool((one == another).all())


@dataclass(frozen=True)
class Distribution:
    """One distribution with its parameters."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)  # numbers, or lists for what must be a tensor
    smooth: tuple[str, ...] = ()  # parameters with a gradient
    rtol: float = 0.0  # of float32 against jax; 0: the same bits
    atol: float = 0.0
    differ: float = 0.0  # the part of all elements that may be another draw, where a trial is accepted by a last bit
    law: Callable[[Any], Any] | None = None  # scipy.stats -> the distribution
    vector: int = 0  # the size of one draw that is a vector
    event: int = 0  # how many trailing dims of the parameters' shapes are not those of a batch
    counts: bool = False
    local: bool = True  # element i depends on the key and on i alone

    @property
    def id(self) -> str:
        values = [f"{v}" for v in self.params.values() if not isinstance(v, (list, torch.Tensor))]
        return "-".join([self.name, *values])

    def __call__(self, key: Any, shape: Any, **more: Any) -> torch.Tensor:
        params = {name: torch.tensor(v) if isinstance(v, list) else v for name, v in self.params.items()}
        if self.name == "multinomial":
            shape = (*shape, self.vector)
        return getattr(random, self.name)(key, **{**params, **more}, shape=shape)


D = Distribution
COV = [[2.0, 0.5, 0.1], [0.5, 1.0, 0.2], [0.1, 0.2, 0.7]]
WIDE = dict(rtol=1e-4, atol=1e-6)  # where powers or sums are rounded elsewhere than in jax
DISTRIBUTIONS = [
    D("uniform", {"minval": -1.0, "maxval": 2.5}, ("minval", "maxval"), law=lambda s: s.uniform(-1, 3.5)),
    D("normal", law=lambda s: s.norm()),
    D("bernoulli", {"p": 0.3}, counts=True, law=lambda s: s.bernoulli(0.3)),
    D("randint", {"minval": -3, "maxval": 9}, counts=True, law=lambda s: s.randint(-3, 9)),
    D("exponential", law=lambda s: s.expon()),
    D("gumbel", law=lambda s: s.gumbel_r()),
    D("gumbel", {"mode": "high"}, law=lambda s: s.gumbel_r()),
    D("laplace", law=lambda s: s.laplace()),
    D("logistic", law=lambda s: s.logistic()),
    D("cauchy", rtol=2e-7, law=lambda s: s.cauchy()),
    D("maxwell", rtol=5e-7, law=lambda s: s.maxwell()),
    D("rademacher", counts=True, law=lambda s: s.randint(0, 2)),
    D("truncated_normal", {"lower": -2.0, "upper": 1.0}, ("lower", "upper"), law=lambda s: s.truncnorm(-2, 1)),
    D("pareto", {"b": 2.0}, ("b",), law=lambda s: s.pareto(2)),
    D("rayleigh", {"scale": 2.0}, ("scale",), rtol=2e-7, law=lambda s: s.rayleigh(scale=2)),
    D("lognormal", {"sigma": 0.5}, ("sigma",), rtol=2e-7, law=lambda s: s.lognorm(0.5)),
    D(
        "weibull_min",
        {"scale": 2.0, "concentration": 1.5},
        ("scale", "concentration"),
        rtol=1e-6,
        law=lambda s: s.weibull_min(1.5, scale=2),
    ),
    D(
        "triangular",
        {"left": -1.0, "mode": 0.5, "right": 2.0},
        ("left", "mode", "right"),
        rtol=1e-6,
        atol=1e-6,
        law=lambda s: s.triang(0.5, -1, 3),
    ),
    D("double_sided_maxwell", {"loc": 0.5, "scale": 2.0}, ("loc", "scale"), rtol=1e-6, atol=1e-6),
    D("wald", {"mean": 1.5}, ("mean",), rtol=1e-3, atol=1e-5, law=lambda s: s.invgauss(1.5)),  # by cancellation
    D("gamma", {"a": 0.3}, ("a",), **WIDE, law=lambda s: s.gamma(0.3)),
    D("gamma", {"a": 2.5}, ("a",), **WIDE, law=lambda s: s.gamma(2.5)),
    D("loggamma", {"a": 0.3}, ("a",), rtol=1e-4, atol=5e-5, law=lambda s: s.loggamma(0.3)),
    D("beta", {"a": 2.0, "b": 3.0}, ("a", "b"), **WIDE, law=lambda s: s.beta(2, 3)),
    D("chisquare", {"df": 3.0}, ("df",), **WIDE, law=lambda s: s.chi2(3)),
    D("t", {"df": 5.0}, ("df",), **WIDE, law=lambda s: s.t(5)),
    D("f", {"dfnum": 3.0, "dfden": 5.0}, ("dfnum", "dfden"), **WIDE, law=lambda s: s.f(3, 5)),
    D("generalized_normal", {"p": 1.5}, ("p",), **WIDE, law=lambda s: s.gennorm(1.5)),
    D("geometric", {"p": 0.3}, counts=True, differ=1e-3, law=lambda s: s.geom(0.3)),
    D("poisson", {"lam": 3.0}, counts=True, law=lambda s: s.poisson(3)),
    D("poisson", {"lam": 50.0}, counts=True, differ=2e-3, local=False, law=lambda s: s.poisson(50)),
    D("binomial", {"n": 20, "p": 0.3}, counts=True, differ=1e-3, local=False, law=lambda s: s.binom(20, 0.3)),
    D("binomial", {"n": 200, "p": 0.7}, counts=True, differ=2e-3, local=False, law=lambda s: s.binom(200, 0.7)),
    D("multinomial", {"n": 20, "p": [0.2, 0.3, 0.5]}, vector=3, event=1, counts=True, differ=2e-3, local=False),
    D("dirichlet", {"alpha": [0.5, 1.0, 3.0]}, ("alpha",), **WIDE, vector=3, event=1),
    D("ball", {"d": 3, "p": 2.0}, ("p",), **WIDE, vector=3),
    D("ball", {"d": 2, "p": 1.0}, **WIDE, vector=2),
    D(
        "multivariate_normal",
        {"mean": [1.0, -1.0, 0.5], "cov": COV},
        ("mean", "cov"),
        rtol=2e-6,
        atol=1e-6,
        vector=3,
        event=2,
    ),
]
