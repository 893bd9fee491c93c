"""The Triton backend: draws on a CUDA device in one kernel, with the bits of the torch definition.

Each function says False where it cannot help (Triton is not there, a kind or dtype that the kernel does not know, a
device on which it gave other bits), and the caller runs the torch ops. Nothing here waits for the device: a key on
the host is passed by value, a key on the device is read there.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..._core.base import dtypes, source_lines
from ..generators import counters, elementwise_draws
from ..generators.elementwise_draws import Draw
from ..generators.threefry import MASK, hash_words
from . import triton_kernels

AVAILABLE = importlib.util.find_spec("triton") is not None  # which comes with CUDA builds of torch

TILE = 1024  # elements that one program makes

# dtypes of each kind; in the self-test, its parameters
KNOWN: dict[str, tuple[tuple[torch.dtype, ...], tuple[elementwise_draws.Number, ...]]] = {
    "bits": (tuple(elementwise_draws.BITS), ()),
    "uniform": ((torch.float32,), (-1.25, 3.7)),
    "normal": ((torch.float32,), ()),
    "bernoulli": ((torch.float32,), (0.3,)),
    "rademacher": ((torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32), ()),
    "randint": (tuple(dtypes.INTEGERS), (-5, 1000, 296)),
    "exponential": ((torch.float32,), ()),
    "gumbel": ((torch.float32,), ()),
    "laplace": ((torch.float32,), ()),
    "logistic": ((torch.float32,), ()),
    "dropout": ((torch.float32, torch.float16, torch.bfloat16), (0.7, 1 / 0.7)),
}


def draw(
    draw: Draw,
    keys: torch.Tensor,
    rectangle: counters.Rectangle,
    out: torch.Tensor,
    x: torch.Tensor | None = None,
) -> bool:
    """Write the elements of a rectangle, for each key, into `out`; whether that was possible.

    Args:
        draw: of kind "dropout", with parameters (keep, scale): ``x * scale`` where the draw is below `keep`, else 0.
        keys: int32 [keys, streams, 2], on the CPU or on a CUDA device.
        out: contiguous, of as many elements, of `elementwise_draws.result_dtype(kind, dtype)`.
        x: what a dropout reads, contiguous, as `out`, and may be it. 16-bit numbers are multiplied as float32.
    """
    if not (AVAILABLE and out.device.type == "cuda" and knows(draw) and agrees(out.device, draw.kind, draw.dtype)):
        return False
    run(draw, keys, rectangle, out, x)
    return True


def knows(draw: Draw) -> bool:
    """Whether the kernel has this draw. Of a uniform one with its bounds exchanged the torch ops take the maximum."""
    kind, _, dtype, params = draw
    return kind in KNOWN and dtype in KNOWN[kind][0] and not (kind == "uniform" and params[1] < params[0])


def run(
    draw: Draw,
    keys: torch.Tensor,
    rectangle: counters.Rectangle,
    out: torch.Tensor,
    x: torch.Tensor | None = None,
) -> None:
    """Launch the kernel for a draw that it knows."""
    if not out.numel():
        return
    grid, arguments, constants = launch(draw, keys, rectangle, out, x)
    with torch.cuda.device_of(out):
        triton_kernels.load()[grid](*arguments, **constants, enable_fp_fusion=False)


def launch(
    draw: Draw,
    keys: torch.Tensor,
    rectangle: counters.Rectangle,
    out: torch.Tensor,
    x: torch.Tensor | None,
) -> Any:
    """How the draw is put to the kernel: the grid, the arguments, the constants that it is compiled for."""
    count, streams = keys.shape[:2]
    by_value = count * streams == 1 and keys.device.type == "cpu"
    k0, k1 = keys.flatten().tolist() if by_value else (0, 0)
    outer, inner = rectangle.walk
    rows, n = math.prod(len(index) for index, _ in outer), len(inner)
    first, bases, columns = 0, None, None
    if isinstance(inner, range):
        first = inner.start
    else:
        columns = on_device(inner, out.device)
    if rows == 1:
        first += sum(index[0] * stride for index, stride in outer)
        columns = columns if columns is None or not first else columns + first
    else:
        bases = row_bases(outer, out.device)
    kind, width, abc = scalars(draw)
    across = TILE if n >= 8 * TILE else min(TILE // 8, 1 << (n - 1).bit_length())
    down = min(TILE // across, 1 << (count * rows - 1).bit_length())
    arguments = (
        writable(out),
        x,
        None if by_value else keys.contiguous().to(out.device, non_blocking=True),
        k0,
        k1,
        bases,
        columns,
        first,
        rows,
        n,
        count * rows,
        *abc,
    )
    grid = (-(-count * rows // down) * -(-n // across),)
    return grid, arguments, dict(KIND=kind, WIDTH=width, STREAMS=streams, DOWN=down, ACROSS=across)


def scalars(draw: Draw) -> tuple[str, int, Sequence[elementwise_draws.Number]]:
    """The kernel's name of a kind, the width of its words, its three parameters: rounded to float32, or integers."""
    kind, _, dtype, params = draw
    if kind == "randint":
        return kind, max(32, dtypes.INTEGERS[dtype]), [int(p) for p in params]
    if kind == "bits":
        return kind, elementwise_draws.BITS[dtype][0], (0, 0, 0)
    if kind == "uniform" and tuple(params) == (0, 1):
        return "unit", 32, (0.0, 0.0, 0.0)
    given = torch.tensor([*params, 0.0, 0.0, 0.0][:3], dtype=torch.float32, device="cpu")
    if kind == "uniform":
        given[1] -= given[0]
    return kind, 32, given.tolist()


def row_bases(outer: Sequence[tuple[counters.Indices, int]], device: torch.device) -> torch.Tensor:
    """int64 [rows]: the counter at which each row begins, less the offset in the row."""
    bases = torch.zeros((), dtype=torch.int64, device=device)
    for index, stride in outer:
        bases = bases[..., None] + on_device(index, device) * stride
    return bases.flatten()


def on_device(index: counters.Indices, device: torch.device) -> torch.Tensor:
    """The indices as int64; a list is copied without waiting for the device."""
    if isinstance(index, range):
        return torch.arange(index.start, index.stop, index.step, device=device)
    return torch.from_numpy(np.asarray(index, dtype=np.int64)).to(device, non_blocking=True)


def writable(out: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that the kernel writes: a float, or a signed integer."""
    return out if out.is_floating_point() else out.view(dtypes.SIGNED[out.itemsize])


@functools.lru_cache(maxsize=1024)
def agrees(device: torch.device, kind: str, dtype: torch.dtype) -> bool:
    """Whether the kernel gives the bits of the torch definition on this device: seen on a few hundred elements.

    Asked once, at the first draw of the kind, which waits for the device; says in a warning where it does not.
    """
    try:
        fact = "gives other bits than the torch definition" if differing(device, kind, dtype) else None
    except Exception as error:  # of Triton's many parts: no C compiler for its launcher, a driver that is too old, ...
        fact = f"failed ({type(error).__name__}: {error})"
    if fact is None:
        return True
    name = str(dtype).removeprefix("torch.")
    source_lines.warn(
        f"vescale_fn.random: Triton's {kind} of {name} on {device} {fact}, so it runs on torch ops", RuntimeWarning
    )
    return False


def differing(device: torch.device, kind: str, dtype: torch.dtype, n: int = 300) -> bool:
    """Whether the kernel and the torch definition, on the CPU, differ for some element; counters are beyond 2**32."""
    key = torch.tensor([[[0x13198A2E, 0x03707344], [-0x5BF6FCDE, 0x299F31D0]]], dtype=torch.int32, device="cpu")
    params = KNOWN[kind][1]
    streams, values = elementwise_draws.KINDS["bernoulli" if kind == "dropout" else kind]
    low = torch.arange(n, dtype=torch.int32, device="cpu")
    words = [hash_words(k0 & MASK, k1 & MASK, 7, low) for k0, k1 in key[0, :streams].tolist()]
    x = None
    if kind == "dropout":
        x = torch.linspace(-3, 5, n, device="cpu").to(dtype)
        factor = torch.tensor(params[1], dtype=torch.float32, device="cpu")
        expected = torch.where(values(*words, torch.float32, params[:1]), x.float() * factor, 0.0).to(dtype)
        x = x.to(device)
    else:
        expected = values(*words, dtype, params)
    out = torch.empty(n, dtype=expected.dtype, device=device)
    rectangle = counters.Rectangle((8, 1 << 32), (range(7, 8), range(n)))
    run(Draw(kind, rectangle.shape, dtype, params), key[:, :streams], rectangle, out, x)
    return not torch.equal(out.cpu().view(torch.uint8), expected.view(torch.uint8))
