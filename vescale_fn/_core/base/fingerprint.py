"""fingerprint: what decides, besides a program, its keys and its meshes, which bits come out of it."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import torch_internals
from . import context
from .front_door import public

# By which MKL, oneDNN, ATen, OpenBLAS and CUDA's libraries choose other kernels
_VARIABLES = """MKL_CBWR MKL_ENABLE_INSTRUCTIONS ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA ONEDNN_DEFAULT_FPMATH_MODE
DNNL_DEFAULT_FPMATH_MODE ATEN_CPU_CAPABILITY OPENBLAS_CORETYPE CUBLAS_WORKSPACE_CONFIG NVIDIA_TF32_OVERRIDE
TORCH_ALLOW_TF32_CUBLAS_OVERRIDE""".split()
_INSTRUCTIONS = re.compile(r"avx|fma|amx|sse4|f16c|asimd|sve|i8mm|bf16")


@public("fingerprint")
def fingerprint() -> dict[str, Any]:
    """What decides, besides a program, its keys and its meshes, which bits it computes, by name.

    The versions of Python, torch, vescale_fn, numpy, BLAS and oneDNN; the kind of processor, and those of its instructions that
    kernels are chosen by; the GPUs, where CUDA is in use; the number of ranks of `deterministic`, and of threads; torch's
    settings that kernels look up, and the variables of the environment by which libraries choose theirs. The number of
    processes is not in it. `save` stores it, and `load` compares it.

    Returns:
        Names and values that are text, numbers or None, for JSON: equal where the same bits may be expected.

    >>> import vescale_fn as vfn
    >>> found = vfn.fingerprint()
    >>> found["torch"], found["threads"]  # doctest: +SKIP
    ('2.13.0+cpu', 1)
    """
    return {
        **_installed(),
        "gpus": _gpus(),
        "virtual": context.virtual(),
        "threads": torch.get_num_threads(),
        **torch_internals.named_kernel_settings(),
        **{name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


@functools.lru_cache(maxsize=1)
def _installed() -> Mapping[str, Any]:
    """What stays as it is while a process runs."""
    about, processor = torch.__config__.show(), _processor()
    found = lambda pattern: (re.findall(pattern, about) or [None])[0]
    mkl = found(r"Math Kernel Library Version (\S+)")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vescale_fn": sys.modules[__name__.partition(".")[0]].__version__,
        "numpy": np.__version__,
        "blas": f"mkl {mkl}" if mkl else found(r"BLAS_INFO=(\w+)"),
        "onednn": found(r"MKL-DNN v(\S+)"),
        "processor": " ".join([platform.machine(), *(processor[word] for word in _NAMES if word in processor)]),
        "instructions": " ".join(sorted(filter(_INSTRUCTIONS.match, processor.get("flags", "").split()))),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


_NAMES = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part")


def _processor() -> dict[str, str]:
    """What the system says of the first processor; nothing where it is not Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {"model name": platform.processor()}
    rows = (line.partition(":") for line in text.splitlines())
    found = {name.strip(): value.strip() for name, _, value in rows}
    return found | {"flags": found.get("flags") or found.get("Features", "")}


def _gpus() -> str | None:
    """The GPUs and CUDA's versions; None where CUDA is not in use, for asking would begin to use it."""
    if not torch.cuda.is_initialized():
        return None
    names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
    return f"{', '.join(names)}; CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What differs between two fingerprints, a line each."""
    names = [name for name in dict.fromkeys((*saved, *here)) if saved.get(name) != here.get(name)]
    return [f"{name}: {saved.get(name)}, and here {here.get(name)}" for name in names]
