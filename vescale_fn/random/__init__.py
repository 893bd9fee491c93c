"""Keys and draws: JAX's numbers, bit for bit, on any mesh."""

from .draws import bernoulli, bits, normal, randint, uniform
from .keys import Key
from .masks import dropout
from .streams import clone, fold_in, key, key_data, key_impl, split, wrap_key_data

__all__ = [
    "Key",
    "key",
    "split",
    "fold_in",
    "clone",
    "key_data",
    "wrap_key_data",
    "key_impl",
    "bits",
    "uniform",
    "normal",
    "bernoulli",
    "randint",
    "dropout",
]
