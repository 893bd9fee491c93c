"""Ratios, measured side by side in one process. `python -m benchmarks` runs all of them and writes README.md's tables."""
