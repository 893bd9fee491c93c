"""Keys and draws: JAX's numbers, bit for bit, on any mesh."""

from .._core.base import front_door
from . import init
from .backends.choice import backend
from .basic import bernoulli, bits, normal, randint, uniform
from .continuous import (
    cauchy,
    double_sided_maxwell,
    exponential,
    gumbel,
    laplace,
    logistic,
    lognormal,
    maxwell,
    pareto,
    rademacher,
    rayleigh,
    triangular,
    truncated_normal,
    wald,
    weibull_min,
)
from .discrete import binomial, geometric, multinomial, poisson
from .dropout_masks import dropout
from .gammas import beta, chisquare, f, gamma, generalized_normal, loggamma, t
from .keys import Key
from .multivariate import ball, dirichlet, multivariate_normal
from .permutations import categorical, choice, orthogonal, permutation
from .streams import clone, fold_in, key, key_data, key_impl, split, wrap_key_data

__all__ = [
    "Key",
    "backend",
    "ball",
    "bernoulli",
    "beta",
    "binomial",
    "bits",
    "categorical",
    "cauchy",
    "chisquare",
    "choice",
    "clone",
    "dirichlet",
    "double_sided_maxwell",
    "dropout",
    "exponential",
    "f",
    "fold_in",
    "gamma",
    "generalized_normal",
    "geometric",
    "gumbel",
    "init",
    "key",
    "key_data",
    "key_impl",
    "laplace",
    "loggamma",
    "logistic",
    "lognormal",
    "maxwell",
    "multinomial",
    "multivariate_normal",
    "normal",
    "orthogonal",
    "pareto",
    "permutation",
    "poisson",
    "rademacher",
    "randint",
    "rayleigh",
    "split",
    "t",
    "triangular",
    "truncated_normal",
    "uniform",
    "wald",
    "weibull_min",
    "wrap_key_data",
]

__dir__ = front_door.listing(__name__)
__getattr__ = front_door.hints(__name__)
