"""Pure optimisers: pairs of functions, ``init(params) -> state``, ``update(grads, state, params) -> updates, state``.

They run as they stand on plain tensors and on sharded arrays. Elementwise ones move nothing, since parameters, gradients and
state lie alike; what needs a sum over all ranks makes it in one collective.
"""

from .._core.base import front_door
from . import schedules
from .accumulate import AccumulateState, accumulate
from .adafactor import AdafactorState, Factors, adafactor
from .adam import AdamState, adam, adamw
from .chain import add_decayed_weights, chain, scale
from .clip import clip_by_global_norm, clip_by_value, global_norm
from .ema import EmaState, params_ema
from .ema import ema as ema
from .from_torch import TorchState, from_torch
from .lion import LionState, lion
from .masks import by_path, masked, partition
from .microbatches import microbatches
from .muon import MuonState, muon
from .optimizer import Optimizer
from .schedules import constant, cosine, join, linear, warmup_cosine, warmup_linear, warmup_stable_decay
from .sgd import SgdState, sgd
from .train_step import train_step
from .updates import apply_updates

__all__ = [
    "AccumulateState",
    "AdafactorState",
    "AdamState",
    "EmaState",
    "Factors",
    "LionState",
    "MuonState",
    "Optimizer",
    "SgdState",
    "TorchState",
    "accumulate",
    "adafactor",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "by_path",
    "chain",
    "clip_by_global_norm",
    "clip_by_value",
    "constant",
    "cosine",
    "from_torch",
    "global_norm",
    "join",
    "linear",
    "lion",
    "masked",
    "microbatches",
    "muon",
    "params_ema",
    "partition",
    "scale",
    "schedules",
    "sgd",
    "train_step",
    "warmup_cosine",
    "warmup_linear",
    "warmup_stable_decay",
]

__dir__ = front_door.listing(__name__)
__getattr__ = front_door.hints(__name__)
