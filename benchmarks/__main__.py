"""`python -m benchmarks`: all of them, each in a process of its own."""

import subprocess
import sys

for name in ("shard_map_call", "eager_ops", "simulated_step", "random_draws"):
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
