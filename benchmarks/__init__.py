"""Ratios, measured side by side in one process. `python -m benchmarks` runs all and writes README.md's tables."""
