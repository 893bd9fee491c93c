"""Ranks, meshes, simulated blocks, collectives, and the comparison of collectives across ranks."""
