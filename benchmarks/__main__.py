"""`python -m benchmarks`: all of them, each in a process of its own."""

import subprocess
import sys

NAMES = (
    "shard_map_call",
    "ops_in_bodies",
    "psum_of_a_tree",
    "grad_call",
    "custom_rules",
    "eager_ops",
    "replayed_step",
    "many_ranks",
    "loops",
    "torch_scan",
    "branches",
    "optimiser_step",
    "simulated_step",
    "simulated_first_call",
    "random_draws",
    "peak_memory",
    "memory_budget",
    "small_budgets",
    "arena",
    "saved_plan",
    "collectives",
    "gloo_step",
    "prefetch",
    "attention_over_a_sequence",
    "zero",
    "lines",
    "checkpoint",
    "digest",
    "any_size",
    "prices",
    "piped_prices",
    "chosen_models",
    "pasted_models",
    "search_time",
    "pipelines",
)

for name in NAMES:
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
