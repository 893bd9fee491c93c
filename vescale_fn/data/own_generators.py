"""The generators that a data set has of its own: what it draws from them would follow from what was read before."""

from __future__ import annotations

import functools
import inspect
import itertools
import pickle
import random
from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from .._core.base.errors import DataError
from .._core.base.messages import described, report
from .._core.base.source_lines import is_users
from .feistel import MASK

MOST, FIRST = 10_000, 100  # objects that are looked at, and of each container: it may have very many samples
_NO_HOLDERS = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, torch.Tensor, np.ndarray)
Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def found_in(*roots: Any) -> list[Any]:
    """The generators that these objects hold, in attributes, containers, closures, or as names that their functions use.

    Raises:
        DataError: one that cannot be seeded.
    """
    found, seen, todo = list[Any](), set[int](), deque[Any](roots)
    while todo and len(seen) < MOST:
        x = todo.popleft()
        if id(x) in seen or isinstance(x, _NO_HOLDERS):
            continue
        seen.add(id(x))
        if isinstance(x, random.SystemRandom):
            what = f"the data set draws from {described(x)}, whose numbers nothing decides"
            raise DataError(
                report("data.batches", what, fix="random.Random, or torch's, numpy's or Python's own generator")
            )
        if isinstance(x, Generator):
            found.append(x)
        else:
            todo += _held(x)
    return found


def _held(x: Any) -> Iterator[Any]:
    if isinstance(x, dict):
        yield from itertools.islice(x.values(), FIRST)
    elif isinstance(x, (list, tuple)):
        yield from x[:FIRST]
    elif isinstance(x, functools.partial):
        yield from (x.func, x.args, x.keywords)
    elif isinstance(x, (MethodType, BuiltinFunctionType)):
        yield x.__self__
        yield getattr(x, "__func__", None)
    elif isinstance(x, FunctionType):
        if is_users(x.__code__.co_filename):
            yield from (x.__globals__.get(name) for name in x.__code__.co_names)
            yield from inspect.getclosurevars(x).nonlocals.values()
            yield from (x.__defaults__, x.__kwdefaults__)
    else:
        yield from list(getattr(x, "__dict__", {}).values())
        for kind in type(x).__mro__:
            yield from (y for y in vars(kind).values() if isinstance(y, (FunctionType, Generator)))


def seed(generator: Any, number: int) -> None:
    """Begin a generator anew."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(number).state
    else:
        generator.seed(number & MASK)


def kept(generators: list[Any]) -> list[Any]:
    """How far they are; `put_back` takes it."""
    return [
        x.bit_generator.state
        if isinstance(x, np.random.Generator)
        else x.getstate()
        if isinstance(x, random.Random)
        else x.get_state()
        for x in generators
    ]


def put_back(generators: list[Any], states: list[Any]) -> None:
    """Have them go on from there."""
    for x, state in zip(generators, states, strict=True):
        if isinstance(x, np.random.Generator):
            x.bit_generator.state = state
        elif isinstance(x, random.Random):
            x.setstate(state)
        else:
            x.set_state(state)


def places(generators: list[Any]) -> list[bytes]:
    """How far they are, as what can be compared."""
    return [pickle.dumps(x.numpy().tobytes() if isinstance(x, torch.Tensor) else x) for x in kept(generators)]
