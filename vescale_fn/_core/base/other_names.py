"""Names of JAX's, torch's and optax's that people type first, and what to write here: name (below `vfn.`) -> text."""

from __future__ import annotations

_SHARD = 'vfn.shard(x, mesh, vfn.P("dp"))'
_ENTRY = 'vfn.P("dp", None): for each dim the axes that it is split over, or None'
_MESH = 'vfn.make_mesh((2, 4), ("dp", "tp"))'
_TREES = "vfn.shard(params, mesh, specs), with a spec, or a tree of them from vfn.spec_from_rules(params, rules)"
_FSDP = "vfn.shard(params, mesh, vfn.fsdp_specs(params, mesh, 'dp')), and a step that is written as for one device"
_DATA = 'vfn.shard(batch, mesh, vfn.P("dp")) of the batch; replicated parameters get their gradients summed'
_SUM = 'vfn.psum(x, "dp") in a shard_map body; on arrays the sum is made where it is needed'
_GATHER = 'vfn.all_gather(x, "dp") in a shard_map body; vfn.unshard(x) for the whole of an array'
_SCATTER = 'vfn.psum_scatter(x, "dp") in a shard_map body'
_PERMUTE = 'vfn.ppermute(x, "dp", [(0, 1), (1, 0)]) in a shard_map body: pairs of source and destination'
_INDEX = 'vfn.axis_index("dp") in a shard_map body: a rank is its place on each axis'
_SIZE = 'mesh.size(); vfn.axis_size("dp") in a shard_map body'
_LAUNCH = "vfn.launch(f, 8), or torchrun: vfn.make_mesh starts the process group"
_WAIT = "x itself: a value that is printed or read in Python has been waited for; torch.cuda.synchronize() to time it"
_DEVICES = 'vfn.make_mesh((2, -1), ("dp", "tp")): a mesh uses all ranks that there are'
_TREE = "vfn.tree.{}"
_TORCH = "torch.{}: torch's own, on plain tensors and on arrays alike"
_LOOP = "a Python loop: vfn.jit records it once, unrolled"
_WHERE = "torch.where(p, a, b), or a Python `if` on what all ranks know"
_REVERSE = "torch.func.{}: it takes arrays too"
_NOT_YET = "there is no rule of one's own for a derivative yet: torch.autograd.Function with setup_context"
_MODULE = "vfn.module_function(module): any torch.nn.Module as a pure function f(params, ...), and its parameters"
_STATE = "vfn.checkpoint.state_dict(tree) and vfn.checkpoint.from_state_dict"
_KEY = "vfn.random.key(0)"
_OPTIMIZER = "vfn.optim.{}: a pair of pure functions, init(params) and update(grads, state, params)"
_KEYED = "vfn.random.{}(key, ...): a draw takes a key, of vfn.random.key(seed)"

OTHER_NAMES = {
    # JAX: where values lie
    "NamedSharding": f"{_SHARD}: a mesh and a spec are given side by side",
    "PositionalSharding": _SHARD,
    "SingleDeviceSharding": "vfn.unshard(x) for the whole value as a plain tensor",
    "Sharding": "vfn.P, which vfn.spec_of(x) returns",
    "sharding": "vfn.P, vfn.make_mesh and vfn.shard, at the top",
    "PartitionSpec": _ENTRY,
    "PS": _ENTRY,
    "Mesh": _MESH,
    "AbstractMesh": f"vfn.simulate(8) and {_MESH}: this process plays all ranks",
    "get_abstract_mesh": "vfn.current_mesh()",
    "get_mesh": "vfn.current_mesh()",
    "device_put": _SHARD,
    "device_get": "vfn.unshard(x)",
    "with_sharding_constraint": 'vfn.with_sharding(x, vfn.P("dp")), which is a statement, not a hint',
    "shard_constraint": 'vfn.with_sharding(x, vfn.P("dp"))',
    "reshard": 'vfn.with_sharding(x, vfn.P("dp"))',
    "make_array_from_process_local_data": 'vfn.from_local(x, mesh, vfn.P("dp"))',
    "make_array_from_single_device_arrays": 'vfn.from_local(x, mesh, vfn.P("dp"))',
    "replicate": "vfn.shard(x, mesh, vfn.P())",
    "gather": "vfn.unshard(x) for the whole value; vfn.with_sharding(x, vfn.P()) to keep it an array",
    "match_partition_rules": "vfn.spec_from_rules(tree, rules)",
    # JAX: ranks
    "devices": _DEVICES,
    "local_devices": _DEVICES,
    "device_count": _SIZE,
    "local_device_count": _SIZE,
    "process_index": _INDEX,
    "process_count": _SIZE,
    "distributed": _LAUNCH,
    "default_backend": 'vfn.make_mesh(shape, names, device="cuda")',
    "block_until_ready": _WAIT,
    # JAX: transforms
    "pmap": "vfn.shard_map(f, in_specs=..., out_specs=...), or vfn.jit(f) of a function of whole arrays",
    "xmap": "vfn.shard_map(f, in_specs=..., out_specs=...), or vfn.jit(f) of a function of whole arrays",
    "pjit": "vfn.jit(f): the layouts of its arguments are those of the arrays that it is given",
    "make_jaxpr": "vfn.jit(f).lower(*args).text()",
    "ensure_compile_time_eval": "plain Python: a value that is no tensor is known when vfn.jit records",
    "jacfwd": _REVERSE.format("jacfwd"),
    "jacrev": _REVERSE.format("jacrev"),
    "jacobian": _REVERSE.format("jacrev"),
    "hessian": _REVERSE.format("hessian"),
    "value_and_jacfwd": _REVERSE.format("jacfwd"),
    "grad_and_value": "vfn.value_and_grad(f): the value comes first",
    "checkpoint_policies": "vfn.remat(f) of the parts of a function that are to be computed again",
    "checkpoint_name": "vfn.remat(f) of the parts of a function that are to be computed again",
    "custom_vjp": _NOT_YET,
    "custom_jvp": _NOT_YET,
    "custom_gradient": _NOT_YET,
    "stop_gradient": "x.detach()",
    "scan": _LOOP,
    "fori_loop": _LOOP,
    "while_loop": "a Python loop: a condition that reads a tensor runs as written, not as a plan",
    "map": "vfn.vmap(f), or a Python loop",
    "cond": _WHERE,
    "select": "torch.where(p, a, b)",
    "switch": _WHERE,
    "associative_scan": "torch.cumsum and its kind, or a Python loop",
    "lax": "vfn.psum, vfn.all_gather and their family are at the top; of loops and conditions: Python's",
    "numpy": "torch, whose every op works on arrays",
    "scipy": "torch.special and torch.linalg",
    "pure_callback": "a plain Python call: an eager function may call anything",
    "ShapeDtypeStruct": "vfn.eval_shape(f, *args): tensors that have shapes and no values, of which it also takes any",
    "debug_callback": "vfn.debug_print",
    "debugging_print": "vfn.debug_print",
    "config": "with vfn.debug(), vfn.strict() or vfn.disable_jit(): settings are contexts",
    # JAX: trees
    **{
        place + "tree_" + name: _TREE.format(name)
        for place in ("", "tree.")
        for name in "all flatten leaves leaves_with_path map map_with_path reduce structure unflatten".split()
    },
    "tree_util": "vfn.tree, whose functions are vfn.tree.map, vfn.tree.leaves and so on",
    "tree.transpose": "vfn.tree.map(lambda *leaves: ..., *trees)",
    "tree.flatten_with_path": "vfn.tree.leaves_with_path(tree), and vfn.tree.structure(tree)",
    "register_pytree_node": "optree.register_pytree_node(cls, ..., namespace=''), or @vfn.register_dataclass",
    "register_pytree_node_class": "@vfn.register_dataclass",
    # JAX: collectives
    "pshuffle": _PERMUTE,
    "pswapaxes": 'vfn.all_to_all(x, "dp", split_axis, concat_axis)',
    "psum_invariant": 'vfn.psum(x, "dp")',
    # JAX: random
    "PRNGKey": _KEY,
    "random.PRNGKey": _KEY,
    "random.seed": f"{_KEY}: there is no state to seed",
    "random.manual_seed": f"{_KEY}: there is no state to seed",
    "manual_seed": f"{_KEY}: there is no state to seed",
    "random.rand": _KEYED.format("uniform"),
    "random.randn": _KEYED.format("normal"),
    "random.random": _KEYED.format("uniform"),
    "random.randperm": _KEYED.format("permutation"),
    "random.shuffle": _KEYED.format("permutation"),
    "random.gaussian": _KEYED.format("normal"),
    "random.split_key": "vfn.random.split(key, 2)",
    "rand": _KEYED.format("uniform"),
    "randn": _KEYED.format("normal"),
    # torch: DTensor and parallelisms
    "DTensor": "vfn.Array, which is one: made by vfn.shard, vfn.from_local and draws with a spec",
    "Shard": f"{_ENTRY}; Shard(0) is the first",
    "Replicate": "vfn.P(), or None for a dim",
    "Partial": 'vfn.P(unreduced={"dp"})',
    "Placement": _ENTRY,
    "DeviceMesh": _MESH,
    "init_device_mesh": _MESH,
    "distribute_tensor": _SHARD,
    "distribute_module": f"{_TREES}; {_MODULE}",
    "parallelize_module": f"{_TREES}; {_MODULE}",
    "ColwiseParallel": 'vfn.P("tp", None) for the weight, which torch.nn.Linear keeps as (out, in)',
    "RowwiseParallel": 'vfn.P(None, "tp") for the weight, which torch.nn.Linear keeps as (out, in)',
    "SequenceParallel": 'vfn.with_sharding(x, vfn.P("dp", "tp")) of the activations',
    "local_map": "vfn.shard_map(f, in_specs=..., out_specs=...)",
    "redistribute": 'vfn.with_sharding(x, vfn.P("dp"))',
    "full_tensor": "vfn.unshard(x)",
    "to_local": "x.to_local(), or a shard_map, whose body computes on each rank's block",
    "fully_shard": _FSDP,
    "FSDP": _FSDP,
    "FullyShardedDataParallel": _FSDP,
    "zero": _FSDP,
    "DDP": _DATA,
    "DistributedDataParallel": _DATA,
    "DataParallel": _DATA,
    "init_process_group": _LAUNCH,
    "destroy_process_group": "nothing: it ends with the process",
    "spawn": _LAUNCH,
    "all_reduce": _SUM,
    "allreduce": _SUM,
    "reduce": _SUM,
    "pall_gather": _GATHER,
    "allgather": _GATHER,
    "all_gather_into_tensor": _GATHER,
    "reduce_scatter": _SCATTER,
    "reduce_scatter_tensor": _SCATTER,
    "all_to_all_single": 'vfn.all_to_all(x, "dp", split_axis, concat_axis) in a shard_map body',
    "broadcast": 'vfn.pbroadcast(x, "dp", source=0) in a shard_map body; vfn.shard(x, mesh, vfn.P()) of a value',
    "scatter": _SHARD,
    "send": _PERMUTE,
    "recv": _PERMUTE,
    "isend": _PERMUTE,
    "irecv": _PERMUTE,
    "barrier": "nothing: ranks wait where they communicate; torch.distributed.barrier() where files or times ask for it",
    "get_rank": _INDEX,
    "rank": _INDEX,
    "local_rank": _INDEX,
    "get_world_size": _SIZE,
    "world_size": _SIZE,
    # torch: functions and modules
    "functional_call": _MODULE,
    "make_functional": _MODULE,
    "Module": _MODULE,
    "nn.Module": _MODULE,
    "nn.Linear": _MODULE,
    "nn.Embedding": f"vfn.nn.embedding(ids, table, ...); or {_MODULE}",
    "nn.Parameter": "a tensor in the tree of parameters: any argument may be differentiated",
    "nn.Dropout": "vfn.random.dropout(key, x, rate)",
    "nn.dropout": "vfn.random.dropout(key, x, rate)",
    "nn.functional": _TORCH.format("nn.functional"),
    "nn.scaled_dot_product_attention": "vfn.nn.attention(q, k, v), or torch's own",
    "nn.flash_attention": "vfn.nn.attention(q, k, v)",
    "nn.flex_attention": "torch.nn.attention.flex_attention.flex_attention, which takes arrays too",
    "nn.ring_attention": 'vfn.nn.attention(q, k, v, method="ring")',
    "nn.MoE": "vfn.nn.experts",
    "nn.init": "vfn.random.init, whose initialisers take a key",
    "nn.initializers": "vfn.random.init, whose initialisers take a key",
    "initializers": "vfn.random.init, whose initialisers take a key",
    "functional": _TORCH.format("nn.functional"),
    "Tensor": "torch.Tensor; on a mesh vfn.Array",
    "tensor": "torch.tensor(...), and vfn.shard to put it on a mesh",
    "array": "torch.tensor(...), and vfn.shard to put it on a mesh",
    "zeros": "torch.zeros(...), and vfn.shard to put it on a mesh",
    "ones": "torch.ones(...), and vfn.shard to put it on a mesh",
    "no_grad": _TORCH.format("no_grad()"),
    "autograd": "vfn.grad(f), a function of trees",
    "backward": "vfn.grad(f), a function of trees: nothing is stored on parameters",
    "compile": 'vfn.jit(f), or vfn.jit(f, backend="inductor")',
    "script": "vfn.jit(f)",
    "trace": "vfn.jit(f).lower(*args)",
    "register_hook": "a function that returns what a hook would have seen: vfn.grad(f, has_aux=True)",
    "register_forward_hook": "a function that returns what a hook would have seen: vfn.grad(f, has_aux=True)",
    "utils": "vfn.remat, vfn.save and vfn.load are at the top",
    # checkpoints
    "save_checkpoint": "vfn.save(path, tree), or vfn.checkpoint.Manager(folder)",
    "load_checkpoint": "vfn.load(path, like=tree)",
    "restore": "vfn.load(path, like=tree)",
    "CheckpointManager": "vfn.checkpoint.Manager(folder)",
    "get_state_dict": _STATE,
    "load_state_dict": _STATE,
    "checkpoint.restore": "vfn.load(path, like=tree)",
    "checkpoint.checkpoint": "vfn.remat(f), which computes again what it does not keep",
    "checkpoint.CheckpointManager": "vfn.checkpoint.Manager(folder)",
    "checkpoint.get_state_dict": _STATE,
    "checkpoint.set_state_dict": _STATE,
    # optimisers
    **{
        place + name: _OPTIMIZER.format(ours)
        for place in ("", "optim.")
        for name, ours in {
            "Adam": "adam(1e-3)",
            "AdamW": "adamw(1e-3)",
            "SGD": "sgd(1e-2)",
            "Lion": "lion(1e-4)",
            "Muon": "muon(1e-2)",
            "Adafactor": "adafactor(1e-3)",
        }.items()
    },
    **{
        place + name: "vfn.optim.clip_by_global_norm(1.0), in a vfn.optim.chain before the optimiser"
        for place in ("", "optim.")
        for name in ("clip_grad_norm_", "clip_grad_norm")
    },
    "optim.apply_if_finite": "vfn.precision.loss_scaled(optimizer), which leaves a step out whose gradients are not finite",
    "optim.inject_hyperparams": "a schedule as the learning rate; or the rate as an argument of the step, a float",
    "optim.multi_transform": "vfn.optim.partition",
    "optim.MultiSteps": "vfn.optim.accumulate, or vfn.optim.microbatches",
    "optim.lr_scheduler": "vfn.optim.warmup_cosine and its family: a schedule in the place of the learning rate",
    "optim.GradientTransformation": "vfn.optim.Optimizer",
    "grad_scaler": "vfn.precision.loss_scaled(optimizer)",
    "GradScaler": "vfn.precision.loss_scaled(optimizer)",
    "autocast": 'torch.autocast, or vfn.precision.policy("params=f32,compute=bf16")',
    "amp": 'vfn.precision.policy("params=f32,compute=bf16")',
}
