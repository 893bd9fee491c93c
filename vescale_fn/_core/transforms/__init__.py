"""Gradients, `vjp`, `jvp`, `linearize`, `vmap`, `remat` over any pytree."""
