"""Control variates: exact expectation, reduced scatter, and the standard error that remains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import limitlens as ll
from limitlens.statistics.estimators import GaussianControls, TokenSums, _noise, controlled, denoised


def drawn_sums(law: ll.Gaussian, n: int, rounds: int, seed: int) -> TokenSums:
    tokens = law.sample(n * rounds, torch.Generator().manual_seed(seed)).reshape(rounds, n, law.dim)
    return TokenSums.zero(rounds, tokens).add(tokens)


@pytest.mark.parametrize("n", [2, 7, 100])
def test_controls_have_expectation_zero_for_any_mean_covariance_and_reach(n: int) -> None:
    rng = np.random.default_rng(n)
    root = rng.normal(size=(3, 3))
    law = ll.Gaussian(rng.normal(size=3), root @ root.T)
    head = ll.Head(rng.normal(size=(3, 3)), rng.normal(size=(2, 3)))
    found = GaussianControls(law, head).of(drawn_sums(law, n, 40_000, seed=n)).numpy()
    stderr = found.std(0) / np.sqrt(len(found))
    assert (np.abs(found.mean(0)) < 4 * stderr).all()
    assert (stderr < 0.05).all()


def test_controls_are_the_first_order_of_the_errors_at_short_reach() -> None:
    rng = np.random.default_rng(1)
    law = ll.Gaussian(np.zeros(4), np.diag([1.0, 0.5, 2.0, 1.5]))
    head = ll.Head(1e-3 * rng.normal(size=(4, 4)), rng.normal(size=(3, 4)))
    n, rounds = 4000, 60
    tokens = law.sample(n * rounds, torch.Generator().manual_seed(3)).reshape(rounds, n, 4)
    controls = GaussianControls(law, head)
    found = controls.of(TokenSums.zero(rounds, tokens).add(tokens)).numpy()
    slope = head.V @ law.covariance @ head.A
    limit = slope @ law.covariance @ slope.T
    exact = np.empty((rounds, 2))
    for r, sample in enumerate(tokens.numpy()):
        outputs = ll.attend(sample, head, sample)
        exact[r] = np.sum(outputs.mean(0) ** 2), np.sum((np.cov(outputs.T) - limit) ** 2)
    first = (found + 1) * [controls.pull_square / n, controls.spread_square / (n - 1)]
    assert_allclose(first[:, 0], exact[:, 0], rtol=0.02)
    assert np.median(np.abs(first[:, 1] / exact[:, 1] - 1)) < 0.05


def test_a_head_without_scores_or_values_has_controls_of_zero() -> None:
    law = ll.Gaussian(np.zeros(2), 1.0)
    sums = drawn_sums(law, 50, 3, seed=0)
    assert (GaussianControls(law, ll.Head(np.zeros((2, 2)))).of(sums)[:, 1] == 0).all()
    assert (GaussianControls(law, ll.Head(np.eye(2), np.zeros((2, 2)))).of(sums) == 0).all()


def test_sums_of_an_affine_image_are_those_of_the_image() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, slope, offset = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 30, 3), (2, 3), (2,))
    )
    mapped = TokenSums.zero(2, tokens).add(tokens).mapped(slope, offset)
    limits = tokens @ slope.T + offset
    direct = TokenSums.zero(2, limits).add(limits)
    assert mapped.count == direct.count
    assert_allclose(mapped.first, direct.first, rtol=1e-12)
    assert_allclose(mapped.second, direct.second, rtol=1e-12)


def test_the_adjusted_mean_is_right_and_its_standard_error_too() -> None:
    rng = np.random.default_rng(0)
    z, left = [], []
    for _ in range(1000):
        normal = rng.normal(size=(100, 3))
        controls = np.stack((normal**2 - 1, rng.normal(size=(100, 3))), -1)
        rows = np.abs(normal) + 0.2 * rng.normal(size=(100, 3))
        adjusted = controlled(rows, controls)
        left.append(adjusted.var(0) / rows.var(0))
        z.append((adjusted.mean(0) - np.sqrt(2 / np.pi)) / (adjusted.std(0, ddof=1) / np.sqrt(100)))
    scores = np.ravel(z)
    assert np.mean(left) < 0.3
    assert abs(scores.mean()) < 0.1  # a bias of a tenth of a standard error at most
    assert scores.std() == pytest.approx(1, abs=0.06)


def test_each_row_is_corrected_by_the_fit_to_the_other_rows() -> None:
    rng = np.random.default_rng(9)
    controls, rows = rng.normal(size=(60, 2, 1)), rng.normal(size=(60, 2))
    rows[0] += 50 * controls[0, :, 0]  # its own fit would follow it
    found = controlled(rows, controls)
    for r, size in ((0, 0), (0, 1), (7, 1)):
        others = np.arange(60) != r
        slope = np.polyfit(controls[others, size, 0], rows[others, size], 1)[0]
        assert found[r, size] == pytest.approx(rows[r, size] - slope * controls[r, size, 0])


def test_few_replicates_and_no_controls_leave_rows_alone() -> None:
    rows = np.random.default_rng(0).random((89, 2))
    assert controlled(rows, rows[..., None] - 0.5) is not rows
    assert controlled(rows, np.zeros((89, 2, 2))) is rows
    assert controlled(rows, np.zeros((89, 2, 0))) is rows


def noisy_norms(rng, shape, dim, variance, rare=0.0):
    """|v| (*shape,), |v + noise| with all queries, halves and quarters of them, then its squares with the latter two
    (*shape, 5), and the noise in its square as quarters tell it (*shape,).

    With `rare` some replicates are far from the others, and noisier still.
    """
    scale = np.exp(rare * rng.normal(size=(*shape, 1)))
    vectors = scale * rng.normal(size=(*shape, dim))
    quarters = scale[..., None] ** 1.5 * np.sqrt(4 * variance) * rng.normal(size=(*shape, 4, dim))
    halves = quarters.reshape(*shape, 2, 2, dim).mean(-2)
    parts = (quarters.mean(-2, keepdims=True), halves, quarters)
    seen = [np.linalg.norm(vectors[..., None, :] + part, axis=-1) for part in parts]
    found = [norm.mean(-1) for norm in seen] + [np.square(norm).mean(-1) for norm in seen[1:]]
    noise = np.square(quarters - parts[0]).sum((-1, -2)) / 12
    return np.linalg.norm(vectors, axis=-1), np.stack(found, -1), noise


def freed(norms, noise, known):
    """Rows (replicates, 1) of one size, of which hardly any token is a query; with or without what noise is known."""
    fewer = norms[..., 1:] if known else norms[..., 1:3]
    return denoised(norms[..., 0], noise if known else None, fewer, queries=32, sizes=[10**9])


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("dim", "rare"), [(1, 0.0), (8, 0.0), (3, 0.5)])
def test_denoised_means_are_those_without_noise(dim: int, rare: float, known: bool) -> None:
    """Noise of a sixth of the squared error or, where rare replicates carry it, of a quarter.

    It makes the error 9% to 13% too large. Multiplied by √(1 − share), the last one would be 3% too small.
    """
    clean, norms, noise = noisy_norms(np.random.default_rng(dim), (400_000, 1), dim, 0.2, rare)
    rows = freed(norms, noise, known)
    stderr = (rows - clean).std() / np.sqrt(len(rows))
    assert norms[..., 0].mean() > 1.09 * clean.mean()
    assert abs(rows.mean() - clean.mean()) < 3 * stderr + 0.004 * clean.mean()
    assert stderr < 0.002 * clean.mean()


@pytest.mark.parametrize("known", [False, True])
def test_denoised_rows_carry_the_scatter_of_their_correction(known: bool) -> None:
    """The standard error of a corrected mean, against the scatter of many corrected means."""
    _, norms, noise = noisy_norms(np.random.default_rng(2), (1500, 60, 1), 8, 0.64)
    rows = np.array([freed(*one, known) for one in zip(norms, noise, strict=True)])
    stderrs = rows.std(1, ddof=1) / np.sqrt(60)
    assert rows.mean(1).std() == pytest.approx(stderrs.mean(), rel=0.08)


def test_noise_that_is_known_leaves_less_scatter() -> None:
    """Of many queries the noise is known well: here exactly, at half of the squared error in 27 dimensions."""
    _, norms, _ = noisy_norms(np.random.default_rng(3), (20_000, 1), 27, 1.0)
    parabola, ratio = (freed(norms, np.full((20_000, 1), 27.0), known) for known in (False, True))
    assert ratio.mean() == pytest.approx(parabola.mean(), rel=0.01)
    assert ratio.var() < 0.8 * parabola.var()


@pytest.mark.parametrize("known", [False, True])
def test_queries_that_are_all_the_tokens_need_no_correction(known: bool) -> None:
    _, norms, _ = noisy_norms(np.random.default_rng(0), (5, 2), 3, 0.2)
    noise, fewer = (np.zeros((5, 2)), norms[..., 1:]) if known else (None, norms[..., 1:3])
    assert_allclose(denoised(norms[..., 0], noise, fewer, queries=100, sizes=[50, 100]), norms[..., 0])


@pytest.mark.parametrize("horizon", [0.1, 0.8])
def test_slopes_of_many_studies_scatter_as_their_standard_errors_say(horizon: float) -> None:
    law, rng = ll.Gaussian(np.zeros(3), 1.0), np.random.default_rng(0)
    rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    head = ll.Head(horizon * rotation)
    curves = [ll.study(law, head, "100:2000:4", replicates=100, queries=64, seed=seed) for seed in range(24)]
    for name in ("mean", "covariance", "output"):
        rates = [curve.rate(name) for curve in curves]
        slopes, stderrs = (np.array([getattr(rate, part) for rate in rates]) for part in ("slope", "stderr"))
        assert np.std(slopes, ddof=1) == pytest.approx(np.sqrt(np.mean(stderrs**2)), rel=0.4), name  # 24 of them: ± 15%
    shares = [curve.errors["mean"].error_moments[0].var(0) / curve.denoised_moments("mean").var(0) for curve in curves]
    assert np.mean(shares) < (0.12 if horizon < 0.5 else 0.8)


def test_the_noise_of_few_queries_is_the_variance_of_their_means() -> None:
    D, G = torch.randn(2, 3, 20, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = _noise(D, G)
    D, G = (part - part.mean(1, keepdim=True) for part in (D, G))
    products = torch.einsum("rqi,rqj->rqij", G + D, G + D) - torch.einsum("rqi,rqj->rqij", G, G)
    torch.testing.assert_close(found["mean"], D.var(1).sum(-1) / 20)
    torch.testing.assert_close(found["covariance"], products.var(1).sum((-1, -2)) / 20)
