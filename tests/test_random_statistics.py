"""Whether the numbers have the distributions that their names say, and whether streams have nothing to do with each other.

The keys are fixed, so a test either always passes or always fails; the limits are those of one in ten thousand.
`python tests/battery_random.py` looks at far more.
"""

import math

import numpy as np
import pytest
import torch
from distributions import COV, DISTRIBUTIONS, Distribution

from vescale_fn import random

stats = pytest.importorskip("scipy.stats", reason="scipy is an extra")

N = 20_000
RARE = 1e-4


def sample(d: Distribution, n: int = N) -> np.ndarray:
    return d(random.fold_in(random.key(2024), DISTRIBUTIONS.index(d)), (n,)).double().numpy()


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """The p-value of counts, with cells of fewer than 10 expected put together."""
    small = expected < 10
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    return float(stats.chi2.sf(((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum(), len(counts) - 1))


@pytest.mark.parametrize("d", [d for d in DISTRIBUTIONS if d.law and not d.counts], ids=lambda d: d.id)
def test_continuous(d: Distribution) -> None:
    assert stats.kstest(sample(d), d.law(stats).cdf).pvalue > RARE


@pytest.mark.parametrize("d", [d for d in DISTRIBUTIONS if d.law and d.counts], ids=lambda d: d.id)
def test_counts(d: Distribution) -> None:
    drawn = sample(d).astype(int)
    drawn = (drawn + 1) // 2 if d.name == "rademacher" else drawn
    values = np.arange(drawn.min(), drawn.max() + 1)
    law = d.law(stats)
    expected = N * law.pmf(values)
    expected[-1] += N * law.sf(values[-1])
    expected[0] += N * (law.cdf(values[0]) - law.pmf(values[0]))
    assert chi_square(np.bincount(drawn - values[0]), expected) > RARE


@pytest.mark.parametrize(
    ("name", "params", "law"),
    [
        ("gamma", {"a": 0.01}, lambda: stats.gamma(0.01)),
        ("gamma", {"a": 200.0}, lambda: stats.gamma(200)),
        ("loggamma", {"a": 0.01}, lambda: stats.loggamma(0.01)),
        ("beta", {"a": 0.1, "b": 0.2}, lambda: stats.beta(0.1, 0.2)),
        ("t", {"df": 1.0}, lambda: stats.t(1)),
        ("truncated_normal", {"lower": 2.5, "upper": 9.0}, lambda: stats.truncnorm(2.5, 9)),
    ],
)
def test_parameters_at_the_edges(name: str, params: dict, law) -> None:
    drawn = getattr(random, name)(random.key(5), **params, shape=(N,), dtype=torch.float64).numpy()
    assert stats.kstest(drawn, law().cdf).pvalue > RARE


@pytest.mark.parametrize("lam", [0.01, 9.99, 10.0, 300.0, 20000.0])
def test_rates_of_poisson(lam: float) -> None:
    drawn = random.poisson(random.key(6), lam, (N,)).double().numpy()
    edges = stats.poisson(lam).ppf(np.linspace(0.02, 0.98, 25))
    edges = np.unique(edges)
    expected = N * np.diff(np.concatenate([[0], stats.poisson(lam).cdf(edges), [1]]))
    counts = np.bincount(np.searchsorted(edges, drawn), minlength=len(expected))
    assert chi_square(counts, expected) > RARE


def test_vectors() -> None:
    alpha = np.array([0.5, 1.0, 3.0])
    drawn = random.dirichlet(random.key(1), torch.from_numpy(alpha), (N,), torch.float64).numpy()
    np.testing.assert_allclose(drawn.sum(-1), 1, rtol=1e-12)
    for i, a in enumerate(alpha):
        assert stats.kstest(drawn[:, i], stats.beta(a, alpha.sum() - a).cdf).pvalue > RARE
    ball = random.ball(random.key(2), 3, 2, (N,), torch.float64)
    assert stats.kstest(ball.norm(dim=-1).pow(3).numpy(), stats.uniform.cdf).pvalue > RARE
    mean, cov = torch.tensor([1.0, -1.0, 0.5]).double(), torch.tensor(COV).double()
    normal = random.multivariate_normal(random.key(3), mean, cov, (N,)) - mean
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(cov), normal.T, upper=False)
    for row in white.numpy():
        assert stats.kstest(row, stats.norm.cdf).pvalue > RARE
    off = (white @ white.T / N - torch.eye(3)).abs().max()
    assert off < 5 / math.sqrt(N)
    falls = random.multinomial(random.key(4), 20, torch.tensor([0.2, 0.3, 0.5]), (N, 3)).numpy()
    assert (falls.sum(-1) == 20).all()
    for i, p in enumerate((0.2, 0.3, 0.5)):
        counts = np.bincount(falls[:, i].astype(int), minlength=21)
        assert chi_square(counts, N * stats.binom(20, p).pmf(np.arange(21))) > RARE


def families() -> dict[str, list]:
    key = random.key(77)
    return {
        "seeds": [random.key(seed) for seed in range(40)],
        "split": list(random.split(key, 40)),
        "folds": [random.fold_in(key, i) for i in range(40)],
        "a chain": [key := random.split(key)[0] for _ in range(40)],
    }


@pytest.mark.parametrize("family", ["seeds", "split", "folds", "a chain"])
def test_streams_have_nothing_to_do_with_each_other(family: str) -> None:
    n = 4096
    draws = torch.stack([random.normal(key, (n,), torch.float64) for key in families()[family]])
    together = torch.cat([draws, draws.roll(1, dims=1)])  # also shifted by one
    correlations = together @ draws.T / n
    k = len(draws)
    correlations[:k].fill_diagonal_(0)
    assert correlations.abs().max() < 5.5 / math.sqrt(n)  # the largest of 3,200
    spread = (correlations.square().sum() * n).item()  # chi-square
    assert abs(spread - (2 * k * k - k)) < 5 * math.sqrt(4 * k * k)


def test_no_two_streams_of_a_tree_share_a_word() -> None:
    """40 keys by 500 words of 64 bits: two alike would be seen once in 10**10 such tests."""
    words = [
        random.bits(key, (500,), torch.uint64).view(torch.int64) for family in families().values() for key in family
    ]
    assert len(torch.cat(words).unique()) == len(words) * 500 - 500 * shared()


def shared() -> int:
    """How many keys are in two families: `split(key, n)[i]` and `fold_in(key, i)` are one key."""
    found = [tuple(random.key_data(key).tolist()) for family in families().values() for key in family]
    return len(found) - len(set(found))
