"""The local view: `shard_map`, its body, collectives as differentiable linear maps."""
