"""JAX's SPMD model in eager PyTorch: write one function, as for one device, and say how its values are sharded."""

# First, for it answers a mistyped option: what follows imports torch.
from vescale_fn.recipes import command_line as _command_line  # noqa: F401 # pyright: ignore[reportUnusedImport]

from . import (
    checkpoint,
    data,
    debugging,
    errors,
    hardware,
    lax,
    nn,
    ops,
    optim,
    plan,
    precision,
    random,
    schedules,
    tree,
)
from ._core.arrays.array import Array
from ._core.arrays.placement import from_local, shard, spec_of, unshard, with_sharding
from ._core.arrays.shapes import ShapeDtype
from ._core.arrays.strict import strict
from ._core.base import front_door
from ._core.base.containers import register_dataclass
from ._core.base.context import current_mesh, set_mesh, use_mesh
from ._core.base.fingerprint import fingerprint
from ._core.base.tracebacks import full_tracebacks
from ._core.control_flow.associative_scan import associative_scan
from ._core.control_flow.cond import cond, switch
from ._core.control_flow.scan import map, scan
from ._core.control_flow.while_loop import fori_loop, while_loop
from ._core.distributed.abstract_mesh import abstract_mesh
from ._core.distributed.comm_log import comm_log
from ._core.distributed.deterministic import deterministic
from ._core.distributed.mesh import make_mesh
from ._core.distributed.ranks import launch, simulate
from ._core.shard_map.shard_map import shard_map
from ._core.shard_map.typed_op import typed_op
from ._core.sharding.index_map import shard_shape
from ._core.sharding.spec import P
from ._core.sharding.spec_trees import fsdp_specs, spec_from_rules
from ._core.sharding.spec_trees import spec_by_size as spec_by_size
from ._core.transforms.custom_jvp import custom_jvp
from ._core.transforms.custom_vjp import custom_vjp
from ._core.transforms.cut import cut
from ._core.transforms.grad import grad, value_and_grad
from ._core.transforms.jvp import jvp, linearize
from ._core.transforms.named import checkpoint_name, name
from ._core.transforms.remat import remat
from ._core.transforms.remat_policies import remat_policies
from ._core.transforms.residuals import print_saved_residuals, saved_residuals
from ._core.transforms.stop_gradient import stop_gradient
from ._core.transforms.vjp import vjp
from ._core.transforms.vmap import vmap
from .checkpoint import digest, elastic, export_weights, load, save
from .checkpoint import export as export
from .choice.auto import auto
from .choice.price import price
from .choice.search.shapes import mesh_shapes
from .debugging.debug_mode import debug
from .debugging.needless_moves import needless
from .debugging.parity import check as check
from .debugging.parity import check_parity
from .debugging.profile import profile
from .debugging.show import show
from .debugging.typeof import typeof
from .nn.modules import deferred, module_function
from .nn.modules import functionalize as functionalize
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
from .pipelined import pipeline
from .plan import debug_print, disable_jit, jit
from .plan.eval_shape import eval_shape, init
from .plan.saved_plans import load_plan, save_plan

__version__ = "0.1.0"

__all__ = [
    "Array",
    "P",
    "ShapeDtype",
    "abstract_mesh",
    "all_gather",
    "all_to_all",
    "associative_scan",
    "auto",
    "axis_index",
    "axis_size",
    "check_parity",
    "checkpoint",
    "checkpoint_name",
    "comm_log",
    "cond",
    "current_mesh",
    "custom_jvp",
    "custom_vjp",
    "cut",
    "data",
    "debug",
    "debug_print",
    "debugging",
    "deferred",
    "deterministic",
    "digest",
    "disable_jit",
    "dynamic_slice",
    "elastic",
    "errors",
    "eval_shape",
    "export_weights",
    "fingerprint",
    "fori_loop",
    "from_local",
    "fsdp_specs",
    "full_tracebacks",
    "grad",
    "hardware",
    "init",
    "jit",
    "jvp",
    "launch",
    "lax",
    "linearize",
    "load",
    "load_plan",
    "make_mesh",
    "map",
    "mesh_shapes",
    "module_function",
    "name",
    "needless",
    "nn",
    "ops",
    "optim",
    "pbroadcast",
    "pcast",
    "pipeline",
    "plan",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "precision",
    "price",
    "print_saved_residuals",
    "profile",
    "psum",
    "psum_scatter",
    "pvary",
    "random",
    "register_dataclass",
    "remat",
    "remat_policies",
    "save",
    "save_plan",
    "saved_residuals",
    "scan",
    "schedules",
    "set_mesh",
    "shard",
    "shard_map",
    "shard_shape",
    "show",
    "simulate",
    "spec_from_rules",
    "spec_of",
    "stop_gradient",
    "strict",
    "switch",
    "tree",
    "typed_op",
    "typeof",
    "unshard",
    "use_mesh",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
    "with_sharding",
]

__dir__ = front_door.listing(__name__)
__getattr__ = front_door.hints(__name__)
