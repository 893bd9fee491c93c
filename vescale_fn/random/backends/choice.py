"""Which code carries draws out: torch ops, or the C library. All give the same bits; the choice is about time alone."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from ..._core.base import source_lines, state
from ..._core.base.errors import RandomError
from ..._core.base.messages import report
from ..generators import counters, elementwise_draws
from ..generators.threefry import hash_words
from . import c_library

TORCH = "torch"


class Chosen(NamedTuple):
    """What carries draws out.

    Attributes:
        name: of the backend.
        variant: of the C library, where that is chosen.
        on_cuda: whether Triton draws on CUDA devices, where it is there; "torch" is for all devices.
    """

    name: str
    variant: int | None
    on_cuda: bool


def chosen() -> Chosen:
    """What carries draws out now."""
    return state.process.draws


def backend(name: str | None = None) -> str:
    """Tell, or set, what carries draws out. The bits of a draw do not depend on it.

    On CUDA devices draws run in Triton kernels, where Triton is installed; only "torch" makes them torch ops there too.

    Args:
        name: "torch" (always there), "c-avx512", "c-avx2", "c-baseline" (where the installation found a C compiler, and
            the processor has the instructions), or "auto" for the fastest of them. None leaves all as it is.

    Returns:
        The backend in force. The environment variable VESCALE_FN_RANDOM gives the first one.

    Raises:
        RandomError: a name that is unknown, or not available here.

    >>> import vescale_fn as vfn
    >>> before = vfn.random.backend()
    >>> vfn.random.backend("torch")
    'torch'
    >>> vfn.random.backend(before) == before
    True
    """
    if name is None:
        return chosen().name
    there = [TORCH, *c_library.available()]
    triton = name != TORCH
    if name == "auto":
        name = there[-1]
    if name not in there:
        known = name in c_library.VARIANTS
        missing = (
            "the C library was not built" if c_library.library is None else "this processor lacks its instructions"
        )
        fact = f"the backend {name!r} is not available: {missing}" if known else f"{name!r} is not a backend"
        raise RandomError(report("random.backend", fact, fix=f"one of {', '.join(map(repr, [*there, 'auto']))}"))
    variant = None if name == TORCH else c_library.VARIANTS.index(name)
    state.process.draws = Chosen(name, variant, triton)
    return name


def differing(variant: int, n: int = 300) -> list[str]:
    """The kinds for which this variant of the C library does not give the bits of the torch definition."""
    key = torch.tensor([[[0x13198A2E, 0x03707344], [-0x5BF6FCDE, 0x299F31D0]]], dtype=torch.int32, device="cpu")
    low = torch.arange(n, dtype=torch.int32, device="cpu")
    first, second = (hash_words(k0 & 0xFFFFFFFF, k1 & 0xFFFFFFFF, 7, low) for k0, k1 in key[0].tolist())
    params = {"uniform": (-1.25, 3.7), "bernoulli": (0.3,), "randint": (-5, 1000, 296)}
    wrong = []
    for (kind, dtype), code in c_library.CODES.items():
        if dtype in (torch.int8, torch.int16, torch.uint16):
            continue  # narrowed as uint8 is
        streams, values = elementwise_draws.KINDS[kind]
        words = (first, second)[:streams]
        given = params.get(kind, ())
        expected = values(*((w.clone() for w in pair) for pair in words), dtype, given)
        got = torch.empty_like(expected)
        rectangle = counters.Rectangle((8, 1 << 32), (range(7, 8), range(n)))
        c_library.draw(variant, code, key[:, :streams], rectangle, given, got)
        if not torch.equal(got.view(torch.uint8), expected.view(torch.uint8)):
            wrong.append(f"{kind} of {str(dtype).removeprefix('torch.')}")
    return wrong


def _start() -> None:
    """The backend of a new process: what is asked for, else the fastest that passes its test."""
    asked = os.environ.get("VESCALE_FN_RANDOM", "auto")
    backend(asked)
    name, variant, _ = chosen()
    if variant is not None and (wrong := differing(variant)):
        what = f"{name} differs from the torch definition in {', '.join(wrong)}"
        source_lines.warn(f"vescale_fn.random: {what}, so draws run on torch", RuntimeWarning)
        backend(TORCH)


_start()
