"""The ops for which DTensor's own propagator is trusted: a sweep found it equal to one device in all layouts tried.

Written by ``python tests/sweep.py --prove``; not by hand. It is asked only about even shards, and only where the table
(`table.py`) has no rule.
"""

PROVED: frozenset[str] = frozenset(
    {
        "aten._fft_c2c.default",
        "aten._fft_c2r.default",
        "aten._fft_r2c.default",
        "aten._upsample_nearest_exact1d.default",
        "aten.bucketize.Tensor",
        "aten.grid_sampler_2d.default",
        "aten.grid_sampler_2d_backward.default",
        "aten.upsample_linear1d.default",
        "aten.upsample_nearest1d.default",
        "aten.upsample_trilinear3d.default",
    }
)
