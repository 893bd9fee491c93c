"""The long battery: `python tests/battery_random.py [MILLIONS]`, a minute for every two; not part of the ordinary tests.

It looks for relations between the streams of a tree of keys, where a generator with counters would show them: words that
are alike, bits that lean, neighbours that correlate, and means of every distribution over many keys. Each line is one
check with its p-value. Under no fault the p-values are uniform; the run ends with one for all of them together, and with
status 1 if one is below 1e-6 or that one below 1e-4.
"""

import sys

import numpy as np
import torch
from distributions import DISTRIBUTIONS
from scipy import stats

from vescale_fn import random

KEY = random.key(20260101)


def tree(depth: int, width: int) -> list:
    """The leaves of a tree that splits on even levels and folds on odd ones."""
    keys = [KEY]
    for level in range(depth):
        if level % 2:
            keys = [random.fold_in(key, i + 1000 * level) for key in keys for i in range(width)]
        else:
            keys = [part for key in keys for part in random.split(key, width)]
    return keys


def disjoint(millions: int) -> float:
    """Words of 64 bits of all leaves: as many are alike as of random ones (none)."""
    leaves = tree(4, 8)
    per = max(1, millions * 1_000_000 // len(leaves))
    words = torch.cat([random.bits(key, (per,), torch.uint64).view(torch.int64) for key in leaves])
    alike = len(words) - len(words.unique())
    return float(stats.poisson.sf(alike - 1, len(words) ** 2 / 2.0**65)) if alike else 1.0


def leaning(millions: int) -> float:
    """Each of the 32 bits is set half of the time."""
    words = random.bits(random.fold_in(KEY, 1), (millions * 1_000_000,), torch.uint32).view(torch.int32)
    n = len(words)
    z = [((words >> bit & 1).sum().item() - n / 2) / np.sqrt(n / 4) for bit in range(32)]
    return float(stats.chi2.sf(np.square(z).sum(), 32))


def avalanche(millions: int) -> float:
    """Keys one bit apart: their words differ in each bit half of the time."""
    n = millions * 20_000
    total = 0.0
    for bit in range(40):
        first, second = random.key(12345), random.key(12345 ^ 1 << bit)
        a, b = (random.bits(key, (n,), torch.uint32).view(torch.int32) for key in (first, second))
        flips = torch.stack([(a ^ b) >> i & 1 for i in range(32)]).sum(1).double()
        total += float(((flips - n / 2).square() / (n / 4)).sum())
    return float(stats.chi2.sf(total, 40 * 32))


def serial(millions: int) -> float:
    """Pairs of neighbours fill a grid of 64 by 64 evenly."""
    u = random.uniform(random.fold_in(KEY, 2), (millions * 1_000_000, 2))
    cell = (u * 64).long()
    counts = torch.bincount(cell[:, 0] * 64 + cell[:, 1], minlength=4096).double().numpy()
    return float(stats.chisquare(counts).pvalue)


def across(millions: int) -> float:
    """Pairs of elements of two sister streams at one index fill the grid evenly."""
    left, right = random.split(random.fold_in(KEY, 3))
    cells = [(random.uniform(key, (millions * 1_000_000,)) * 64).long() for key in (left, right)]
    counts = torch.bincount(cells[0] * 64 + cells[1], minlength=4096).double().numpy()
    return float(stats.chisquare(counts).pvalue)


def parents(millions: int) -> float:
    """The normal numbers of a key and of the keys split off it do not correlate."""
    n, keys = millions * 50_000, [KEY, *random.split(KEY, 30), *(random.fold_in(KEY, i) for i in range(100, 130))]
    draws = torch.stack([random.normal(key, (n,), torch.float64) for key in keys])
    correlations = (draws @ draws.T / np.sqrt(n)).triu(1)
    pairs = len(keys) * (len(keys) - 1) // 2
    return float(stats.chi2.sf(correlations.square().sum().item(), pairs))


def law(d, millions: int) -> float:
    """A million numbers of one distribution, each thousand of another key."""
    keys = random.split(random.fold_in(KEY, 50 + DISTRIBUTIONS.index(d)), 1000)
    drawn = torch.func.vmap(lambda key: d(key, (1000 * millions,)))(keys).double().flatten().numpy()
    return float(stats.kstest(drawn, d.law(stats).cdf).pvalue)


def main(millions: int = 2) -> int:
    checks = {check.__name__: check for check in (disjoint, leaning, avalanche, serial, across, parents)}
    checks |= {d.id: lambda m, d=d: law(d, m) for d in DISTRIBUTIONS if d.law and not d.counts}
    found = []
    for name, check in checks.items():
        found.append(check(millions))
        print(f"{name:32} p = {found[-1]:.4g}", flush=True)
    together = stats.kstest([p for p in found if p < 1], "uniform").pvalue
    print(f"{'all together':32} p = {together:.4g}")
    return int(min(found) < 1e-6 or together < 1e-4)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
