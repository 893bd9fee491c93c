"""Attributes of JAX's, torch's and optax's that people type first, and what to write here: public name -> attribute -> text."""

from __future__ import annotations

_WAIT = "x itself: a value that is printed or read in Python has been waited for; torch.cuda.synchronize() to time it"
_BLOCK = "x.to_local(), this rank's block; vfn.unshard(x) for the whole value on every rank"
_PART = "torch.where, torch.index_put or torch.slice_scatter; or y = x.clone(), and y[0] = 1.0"
_STEP = "updates, state = optimizer.update(grads, state, params); params = vfn.optim.apply_updates(params, updates)"
_RANKS = "mesh.size and mesh.shape: a mesh uses all ranks that there are"

OTHER_ATTRIBUTES = {
    "Array": {
        "at": _PART,
        "set": _PART,
        "addressable_shards": _BLOCK,
        "addressable_data": _BLOCK,
        "global_shards": _BLOCK,
        "is_fully_addressable": "nothing: vfn.unshard(x) is right on every rank",
        "is_fully_replicated": "vfn.spec_of(x) == vfn.P()",
        "device_put": 'vfn.with_sharding(x, vfn.P("dp"))',
        "with_sharding": 'vfn.with_sharding(x, vfn.P("dp"))',
        "reshard": 'vfn.with_sharding(x, vfn.P("dp"))',
        "block_until_ready": _WAIT,
        "copy_to_host_async": "vfn.unshard(x)",
        "unshard": "vfn.unshard(x)",
        "devices": "x.device, and x.sharding.mesh",
        "aval": "vfn.typeof(x)",
        "weak_type": "nothing: dtypes follow torch's promotion",
        "astype": "x.to(torch.bfloat16)",
    },
    "Mesh": {
        "devices": _RANKS,
        "local_devices": _RANKS,
        "device_ids": _RANKS,
        "axis_types": "nothing: every axis is explicit, and in a shard_map body, or in its axis_names, manual",
        "axis_sizes": "mesh.shape",
        "shape_tuple": "mesh.shape",
        "empty": "nothing: a mesh has ranks",
        "is_multi_process": "torch.distributed.is_initialized()",
    },
    "random.Key": {
        "split": "vfn.random.split(key, 2)",
        "fold_in": "vfn.random.fold_in(key, data)",
        "next": "vfn.random.split(key, 2): a key is used once",
        "manual_seed": "vfn.random.key(seed)",
    },
    "optim.Optimizer": {
        "step": _STEP,
        "apply": _STEP,
        "zero_grad": "nothing: gradients are what vfn.grad(loss)(params) returns",
        "param_groups": "vfn.optim.partition(optimizers, labels), and a schedule as the learning rate",
        "state_dict": "the state that update returns, a tree: vfn.save(path, state)",
        "load_state_dict": "vfn.load(path, like=state)",
    },
    "debug": {
        "print": "vfn.debug_print",
        "callback": "vfn.debug_print; an eager function may call anything",
        "breakpoint": "with vfn.disable_jit(): breakpoint(), Python's",
        "visualize_array_sharding": "vfn.show(tree)",
        "inspect_array_sharding": "vfn.typeof(x).sharding",
    },
    "profile": {
        "start_trace": "with vfn.profile(path): around the steps",
        "stop_trace": "with vfn.profile(path): around the steps",
        "trace": "with vfn.profile(path): around the steps",
    },
    "checkpoint": {"__call__": "vfn.remat(f), which computes again what it does not keep; vfn.save(path, tree)"},
}
