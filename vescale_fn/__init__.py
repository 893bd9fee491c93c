"""vescale_fn: JAX's SPMD programming model, in eager PyTorch. Write one function, as for one device; say where arrays lie."""

from . import checkpoint, errors, nn, optim, plan, precision, random
from .array import Array, spec_of
from .checkpoint import export, load, save
from .containers import register_dataclass
from .context import current_mesh, set_mesh, use_mesh
from .debug import comm_log, debug, show
from .gradient import grad, value_and_grad
from .initial import eval_shape, init
from .mesh import make_mesh
from .modules import deferred, functionalize
from .needless import needless
from .ops import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    dynamic_slice,
    pbroadcast,
    pcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    pvary,
)
from .parity import check
from .placement import from_local, shard, unshard, with_sharding
from .plan import debug_print, disable_jit, jit
from .profiling import profile
from .pullback import vjp
from .ranks import launch, simulate
from .shard_map import shard_map
from .spec import P, shard_shape, spec_from_rules
from .spec_by_size import spec_by_size
from .strict import strict
from .tracebacks import full_tracebacks
from .transform import jvp, linearize, remat
from .vmap import vmap

__version__ = "0.1.0"

__all__ = [
    "Array",
    "P",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "check",
    "checkpoint",
    "comm_log",
    "needless",
    "current_mesh",
    "debug",
    "debug_print",
    "deferred",
    "disable_jit",
    "dynamic_slice",
    "errors",
    "eval_shape",
    "export",
    "from_local",
    "full_tracebacks",
    "functionalize",
    "grad",
    "init",
    "jit",
    "jvp",
    "launch",
    "linearize",
    "load",
    "make_mesh",
    "nn",
    "optim",
    "plan",
    "precision",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "profile",
    "psum",
    "psum_scatter",
    "pvary",
    "random",
    "register_dataclass",
    "remat",
    "save",
    "set_mesh",
    "shard",
    "shard_map",
    "shard_shape",
    "show",
    "simulate",
    "spec_by_size",
    "spec_from_rules",
    "spec_of",
    "strict",
    "unshard",
    "use_mesh",
    "value_and_grad",
    "vjp",
    "vmap",
    "with_sharding",
]
