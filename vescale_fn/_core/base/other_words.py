"""Keywords of JAX's, torch's and optax's that people type first, and what to write here: function (below `vfn.`) -> text."""

from __future__ import annotations

_SPEC = 'spec=vfn.P("dp"), mesh=mesh'
_NAMES = 'vfn.make_mesh((2, 4), ("dp", "tp"))'
_RANKS = "the ranks are numbers: vfn.launch(f, 8, *args)"
_ARGNUMS = "argnums: which argument, or which of them, by place"
_FLOATS = "nothing: leaves that are not floating point have no gradient"
_MAPPED = "axis_names={...}: the axes to map over; along the others the values are arrays"
_DRAW = {"sharding": _SPEC, "out_sharding": _SPEC, "size": "shape=..."}
_WHOLE = "nothing: a plan is always of the whole function, or none"
_ADAM = {
    "learning_rate": "lr, the first argument",
    "betas": "b1=0.9, b2=0.999",
    "wd": "weight_decay=...",
    "params": "vfn.optim.adamw(1e-3): the parameters are given to init and update",
    "fused": "nothing: vfn.jit makes one call of many leaves",
    "foreach": "nothing: vfn.jit makes one call of many leaves",
    "amsgrad": "vfn.optim.from_torch(torch.optim.AdamW, amsgrad=True)",
}

OTHER_WORDS: dict[str, dict[str, str]] = {
    "remat": {
        "concrete": "static_argnums=..., of arguments that are Python values",
        "context_fn": "policy=vfn.remat_policies.dots_saveable, for instance",
        "use_reentrant": "nothing: there is one way only",
    },
    "grad": {
        "wrt": _ARGNUMS,
        "argnames": _ARGNUMS,
        "allow_int": _FLOATS,
        "holomorphic": "torch.func.grad, on plain tensors; of complex values the gradient is torch's",
        "create_graph": "vfn.grad(vfn.grad(f)): a gradient may be differentiated again",
        "retain_graph": "nothing: no graph is kept",
    },
    "jit": {
        "device": 'vfn.make_mesh(shape, names, device="cuda"), or tensors that are there',
        "donate": "donate_argnums=(0, 1), by place",
        "mode": 'backend="inductor"',
        "fullgraph": _WHOLE,
        "dynamic": "nothing: each shape has a plan of its own",
        "inline": "nothing: jit inside of jit is inlined",
        "in_axis_resources": "in_specs=...",
        "out_axis_resources": "out_specs=...",
    },
    "vmap": {
        "in_dims": "in_axes=...",
        "out_dims": "out_axes=...",
        "randomness": "a key for each entry: vfn.random.split(key, n), mapped too",
        "chunk_size": "vfn.lax.map(f, xs, batch_size=n)",
    },
    "shard": {
        "sharding": "vfn.shard(x, mesh, spec): a mesh and a spec are given side by side",
        "placements": 'spec=vfn.P("dp", None): for each dim the axes that it is split over',
        "device_mesh": "mesh=...",
        "device": "vfn.shard(x, mesh, spec): a device that is one is x.to(device)",
    },
    "with_sharding": {"sharding": 'spec=vfn.P("dp")', "shardings": 'spec=vfn.P("dp")'},
    "unshard": {"dst": "nothing: every rank has the whole value", "mesh": "nothing: an array knows its mesh"},
    "shard_map": {
        "check_rep": "check_vma=...",
        "auto": _MAPPED,
        "manual_axes": _MAPPED,
        "in_shardings": "in_specs=...",
        "out_shardings": "out_specs=...",
        "device_mesh": "mesh=...",
        "in_placements": "in_specs=...",
        "out_placements": "out_specs=...",
    },
    "make_mesh": {
        "devices": "vfn.make_mesh(shape, names): a mesh uses all ranks that there are",
        "axis_types": "nothing: every axis is explicit, and in a shard_map body, or in its axis_names, manual",
        "mesh_dim_names": f"names=...: {_NAMES}",
        "mesh_shape": f"shape=...: {_NAMES}",
        "dp": _NAMES,
        "tp": _NAMES,
        "device_type": 'device="cuda"',
    },
    "simulate": {"devices": "vfn.simulate(8)", "mesh": "vfn.simulate(8), and a mesh made inside of it"},
    "launch": {
        **dict.fromkeys(("nproc", "world_size", "num_processes", "nproc_per_node"), _RANKS),
        "args": "vfn.launch(f, n, *args)",
        **dict.fromkeys(("engine", "cluster", "executor"), 'on="slurm", "ray" or "torchrun", and options={...} of it'),
        "backend": 'device="cuda" for NCCL, "cpu" for gloo',
    },
    "save": {
        **dict.fromkeys(("force", "overwrite"), "another path, or vfn.checkpoint.Manager(folder), which keeps several"),
        "block": "background=True, and .wait() on what it returns",
    },
    "load": {
        **dict.fromkeys(("target", "item", "template", "abstract_state"), "like=..."),
        "weights_only": "nothing: a checkpoint holds no code",
        "map_location": "like=..., whose devices and layouts are those of the result",
    },
    "checkpoint.Manager": {"max_to_keep": "keep=3", "async_save": "background=True", "directory": "folder=..."},
    "debug": {"nans": "vfn.precision.all_finite(tree)", "level": "vfn.debug(): it has one"},
    "precision.policy": {
        "param_dtype": 'vfn.precision.policy("params=f32,compute=bf16")',
        "compute_dtype": 'vfn.precision.policy("params=f32,compute=bf16")',
        "reduce_dtype": "nothing: sums between ranks are in the dtype of what is summed",
    },
    "nn.attention": {
        "is_causal": "causal=...",
        "attn_mask": "mask=...",
        "dropout_p": "dropout=..., key=vfn.random.key(0)",
        "enable_gqa": "nothing: heads of k divide those of q",
        "bias": "mask=..., a float tensor that is added to the scores",
    },
    "random.split": {"n": "num=...", "shape": "num=..."},
    "random.fold_in": {"step": "data=..."},
    "random.normal": {
        **_DRAW,
        **dict.fromkeys(("mean", "loc"), "vfn.random.normal(key, shape) * std + mean"),
        **dict.fromkeys(("std", "scale", "stddev"), "vfn.random.normal(key, shape) * std + mean"),
    },
    "random.uniform": {**_DRAW, "low": "minval=...", "high": "maxval=..."},
    "random.randint": {**_DRAW, "low": "minval=...", "high": "maxval=..."},
    "random.bernoulli": _DRAW,
    "random.dropout": {
        "p": "rate=...: vfn.random.dropout(key, x, rate)",
        "training": "if training: around it",
        "deterministic": "if not deterministic: around it",
        "inplace": "nothing: a new tensor",
    },
    "optim.adam": _ADAM,
    "optim.adamw": _ADAM,
    "optim.sgd": {
        "learning_rate": "lr, the first argument",
        "params": "vfn.optim.sgd(1e-2): the parameters are given to init and update",
        "dampening": "vfn.optim.from_torch(torch.optim.SGD, dampening=...)",
    },
}
