"""Tail estimators, the sub-Gaussian check, and laws heavier than sub-Gaussian."""

import numpy as np
import pytest

from limitlens.errors import InputError
from limitlens.experiments.heavy_tails import HeavyTails, heavy_curve, heavy_samples
from limitlens.experiments.heavy_tails import tails as show_tails
from limitlens.record import to_json
from limitlens.statistics import tails
from limitlens.statistics.tails import Verdict
from limitlens.theory import heavy
from limitlens.theory.heavy import Existence
from limitlens.theory.prediction import Status


@pytest.mark.parametrize("shape", [-0.3, 0.0, 0.3, 0.7, 1.5])
def test_generalised_pareto_fit_recovers_shape_and_scale(shape):
    rng = np.random.default_rng(0)
    u = rng.random((200, 500))
    x = 2.0 * (-np.log(u) if shape == 0 else (u**-shape - 1) / shape)
    x.sort()
    k, sigma = tails.fit_generalised_pareto(x)
    assert k.shape == (200,)
    # The estimator has a bias of order 1/m; its standard error over 200 fits is 0.005.
    assert k.mean() == pytest.approx(shape, abs=0.03)
    assert sigma.mean() == pytest.approx(2.0, rel=0.03)
    one_k, one_sigma = tails.fit_generalised_pareto(x[3])
    assert (one_k, one_sigma) == pytest.approx((k[3], sigma[3]))


def test_fit_agrees_with_maximum_likelihood():
    from scipy.stats import genpareto

    rng = np.random.default_rng(1)
    x = genpareto.rvs(0.4, scale=3.0, size=2000, random_state=rng)
    k, sigma = tails.fit_generalised_pareto(np.sort(x))
    ml_k, _, ml_sigma = genpareto.fit(x, floc=0)
    assert float(k) == pytest.approx(ml_k, abs=0.02)
    assert float(sigma) == pytest.approx(ml_sigma, rel=0.02)


def test_pareto_shape_of_weights():
    rng = np.random.default_rng(2)
    # Weights U^{-γ} have a Pareto tail of shape γ; scores are their logarithms, and a shift changes nothing.
    for gamma in (0.2, 0.5, 0.9):
        scores = -gamma * np.log(rng.random((100, 10_000)))
        m = tails.tail_length(10_000) + 1
        top = np.sort(scores)[:, -m:]
        shape = tails.sorted_shape(top)
        expected = (300 * gamma + 5) / 310  # shrunk towards one half with the weight of ten observations
        assert shape.mean() == pytest.approx(expected, abs=0.03)
        assert tails.sorted_shape(top + 100.0) == pytest.approx(shape, abs=1e-6)
    assert tails.tail_length(1000) == 95
    assert tails.tail_length(100) == 20
    assert tails.sorted_shape(np.ones((2, 50))) == pytest.approx(5 / 59)  # equal scores have shape 0 before


def test_extreme_scores_do_not_break_the_fit():
    scores = np.concatenate((np.linspace(0, 1, 50), [5000.0]))
    assert np.isfinite(tails.sorted_shape(scores))
    assert tails.sorted_shape(scores) > 0.7


@pytest.mark.parametrize(
    ("draw", "verdict"),
    [
        (lambda rng: rng.normal(size=(20_000, 4)) @ rng.normal(size=(4, 4)) + 3, Verdict.SUB_GAUSSIAN),
        (lambda rng: rng.uniform(size=(20_000, 3)), Verdict.SUB_GAUSSIAN),
        (lambda rng: rng.laplace(size=(20_000, 2)), Verdict.ABOVE_GAUSSIAN),
        (lambda rng: rng.exponential(size=(20_000, 1)), Verdict.ABOVE_GAUSSIAN),
        (lambda rng: rng.standard_t(3, size=(20_000, 2)), Verdict.POWER),
    ],
    ids=["gaussian", "cube", "laplace", "exponential", "student3"],
)
def test_verdicts(draw, verdict):
    for seed in range(3):
        report = tails.check_tails(draw(np.random.default_rng(seed)))
        assert report.verdict is verdict, report
    assert verdict.value in str(report)
    assert report.verdict.meaning
    assert report.verdict.remedy


def test_gaussian_tokens_are_rarely_called_heavy_tailed():
    worst = []
    for seed in range(60):
        report = tails.check_tails(np.random.default_rng(seed).normal(size=(1000, 3)))
        worst.append((report.excess / report.stderr).max())
        assert report.verdict is Verdict.SUB_GAUSSIAN
    assert np.median(worst) > 0.5  # the threshold of four standard errors is not met by inflated errors
    assert tails.check_tails(np.random.default_rng(5).normal(size=(3000, 64))).verdict is Verdict.CANNOT_TELL


@pytest.mark.parametrize("rotated", [False, True])
def test_laplace_tokens_in_many_dimensions_are_not_called_sub_gaussian(rotated):
    rng = np.random.default_rng(6)
    for _ in range(3):
        tokens = rng.laplace(size=(3000, 64))
        if rotated:  # every principal axis mixes 64 coordinates to something nearly Gaussian
            tokens = tokens @ np.linalg.qr(rng.normal(size=(64, 64)))[0]
        report = tails.check_tails(tokens)
        assert report.verdict is Verdict.ABOVE_GAUSSIAN
        assert report.kurtosis > 10


@pytest.mark.parametrize("dim", [1, 8])
def test_a_law_on_few_points_has_no_power_tail(dim):
    for seed in range(6):
        tokens = (np.random.default_rng(seed).random((1000, dim)) < 0.01).astype(float)
        assert tails.check_tails(tokens).verdict is Verdict.ABOVE_GAUSSIAN


@pytest.mark.parametrize("dim", [1, 8])
def test_one_heavy_direction_is_detected_from_tokens_needed_on(dim):
    rng, n, found = np.random.default_rng(dim), tails.tokens_needed(dim), []
    for _ in range(100):
        tokens = rng.normal(size=(n, dim))
        tokens[:, 0] = rng.laplace(size=n) / np.sqrt(2)
        rotation = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
        found.append(tails.check_tails(tokens @ rotation, points=2).verdict is not Verdict.SUB_GAUSSIAN)
    assert np.mean(found) > 0.82  # nine in ten, less three standard errors


def test_no_verdict_promises_that_proved_rates_apply():
    for verdict in Verdict:
        assert "rates apply" not in verdict.meaning
        assert "proved" not in verdict.meaning


def test_log_moment_curve_of_laplace_is_its_own():
    tokens = np.random.default_rng(4).laplace(size=(200_000, 1))
    report = tails.check_tails(tokens, points=4)
    s = report.tilts[0]
    exact = -np.log(1 - s**2 / 2) / (s**2 / 2) - 1  # unit variance: scale 1/√2
    assert report.excess[0, 0] == pytest.approx(exact, abs=4 * report.stderr[0, 0])
    assert report.variance_proxy > 1.2


def test_standard_errors_of_log_moments_are_the_scatter_of_whole_samples():
    """Up to two thirds of the largest length; at that length they are 0.88 of the scatter."""
    rng = np.random.default_rng(8)
    reports = [tails.check_tails(rng.normal(size=(1000, 1)), points=3) for _ in range(300)]
    scatter = np.std([report.excess for report in reports], axis=0)
    stated = np.sqrt(np.mean([np.square(report.stderr) for report in reports], axis=0))
    assert (stated / scatter)[:, :2] == pytest.approx(np.ones((2, 2)), abs=0.12)  # 4% is the scatter of 300


def test_degenerate_directions_are_left_out():
    x = np.random.default_rng(5).normal(size=(1000, 1)) @ np.ones((1, 3))
    assert tails.check_tails(x).excess.shape[0] == 2


def test_laplace_limit_and_where_it_ends():
    grid = np.linspace(-60, 60, 240_001)
    density = np.exp(-np.abs(grid)) / 2 * (grid[1] - grid[0])
    for t in (0.3, 0.7):
        weight = density * np.exp(t * grid)
        assert heavy.laplace_limit([[t]], 1.0)[0, 0] == pytest.approx(weight @ grid / weight.sum(), rel=1e-5)
    with pytest.raises(InputError, match=r"1/b = 0\.5"):
        heavy.laplace_limit([[0.6]], 2.0)


def test_three_laws_of_laplace_tokens():
    assert heavy.laplace_law(0.3, 1.0).existence is Existence.NORMAL
    assert heavy.laplace_law(0.4, 2.0).existence is Existence.STABLE
    assert heavy.laplace_law(0.5, 2.0).existence is Existence.NONE
    assert [part.value for part in heavy.laplace_law(2.0, 2.0).predictions] == pytest.approx([0, 0.75, 2])
    assert [part.value for part in heavy.laplace_law(0.4, 2.0).predictions] == pytest.approx([0.2, 0, 0])
    assert heavy.student_law(3.0).existence is Existence.NONE
    assert all(kind.meaning for kind in Existence)


def laplace_errors(tilt, n, replicates, seed):
    """|Γ_n - Γ| over n Laplace tokens on a grid, so that n may be a billion."""
    y = np.arange(-3000, 6001) * 0.005
    probability = np.exp(-np.abs(y))
    probability /= probability.sum()
    counts = np.random.default_rng(seed).multinomial(n, probability, size=replicates)
    weight = np.exp(tilt * y)
    limit = (probability * weight) @ y / (probability @ weight)
    return np.abs(counts @ (weight * y) / (counts @ weight) - limit)


def test_stable_rate_of_laplace_tokens():
    # n^{-(1-bt)} ln n: between 1e5 and 1e9 the logarithm takes 0.064 off the slope of the plain power.
    tilt, sizes = 0.75, (10**5, 10**9)
    medians = [np.median(laplace_errors(tilt, n, 3000, seed=n % 97)) for n in sizes]
    slope = np.log(medians[0] / medians[1]) / np.log(sizes[1] / sizes[0])
    with_log = (1 - tilt) - np.log(np.log(sizes[1]) / np.log(sizes[0])) / np.log(sizes[1] / sizes[0])
    assert heavy.laplace_law(tilt, 1.0).predictions[0].value == pytest.approx(0.25)
    assert slope == pytest.approx(with_log, abs=0.02)


def test_normal_rate_of_laplace_tokens_at_small_tilts():
    sizes = (10**4, 10**8)
    means = [laplace_errors(0.3, n, 2000, seed=1).mean() for n in sizes]
    assert np.log10(means[0] / means[1]) / 4 == pytest.approx(0.5, abs=0.02)


def test_attention_beyond_the_limit_of_laplace_tokens():
    found = heavy_curve("laplace", 2.0, (1000, 100_000), replicates=600)
    rate, share, growth = (found.predicted[name]["predicted"] for name in ("rate", "participation", "growth"))
    assert (rate, share, growth) == (0.0, 0.5, 1.0)
    assert found.predicted["participation"]["status"] == Status.VERIFIED.value
    summary = found.measured
    gap = abs(summary["participation"][1] - share)
    assert gap < 4 * summary["participation_stderr"][1]
    assert summary["participation_stderr"][1] < 0.02
    output, _, _ = heavy_samples("laplace", 2.0, (1000, 100_000), degrees=3.0, replicates=600, seed=0)
    assert np.median(output, axis=0) == pytest.approx(summary["median_output"])
    assert np.diff(output.mean(axis=0)) / np.log(100) == pytest.approx([growth], abs=0.1)
    assert found.limit is None


def test_laplace_tokens_at_the_end_of_the_limit_grow_half_as_fast():
    rate, share, growth = heavy.laplace_law(0.5, 2.0).predictions
    assert (rate.value, share.value, growth.value, growth.formula) == (0.0, 0.0, 1.0, "b/2")
    assert heavy.laplace_law(1.01, 1.0).predictions[2].value == 1.0
    y = np.arange(-3000, 6001) * 0.005
    probability = np.exp(-np.abs(y))
    means = []
    for n in (10**7, 10**9):
        counts = np.random.default_rng(1).multinomial(n, probability / probability.sum(), size=1500)
        means.append(np.mean(counts @ (np.exp(y) * y) / (counts @ np.exp(y))))
    assert (means[1] - means[0]) / np.log(100) == pytest.approx(
        heavy.laplace_law(1.0, 1.0).predictions[2].value, abs=0.03
    )


def test_the_largest_weight_of_student_tokens_tends_to_one():
    found = heavy_curve("student", 1.0, (1000, 10_000, 100_000), degrees=3, replicates=300)
    share = found.measured["participation"]
    assert share[0] < share[1] < share[2]
    assert share[2] > 0.85
    slope = np.log(found.measured["median_output"][2] / found.measured["median_output"][1]) / np.log(10)
    assert slope == pytest.approx(1 / 3, abs=0.06)


def test_gaussian_tokens_keep_their_limit():
    found = heavy_curve("gaussian", 1.0, (1000, 100_000), replicates=100)
    assert found.measured["median_output"][1] == pytest.approx(found.limit, abs=0.01)
    assert found.measured["top_weight"][1] < 0.01
    document = to_json(found)
    assert document["existence"] == Existence.NORMAL.value
    assert document["n"] == [1000, 100_000]
    assert list(HeavyTails({"law": "gaussian", "seed": 0}, (found,)).table["n"]) == [1000, 100_000]


def test_heavy_figure(tmp_path):
    show_tails(tilts=[0.4, 2.0], sizes=(100, 1000), replicates=20).plot(tmp_path / "tails.png")
    assert (tmp_path / "tails.png").stat().st_size > 5000


def test_a_law_without_a_limit_says_so():
    found = show_tails(law="student", tilts=[1.0], sizes=(100, 1000), replicates=20)
    assert "At 1 of 1 tilt there is no infinite-token limit" in str(found)


@pytest.mark.parametrize(
    "call",
    [
        lambda: tails.check_tails(np.ones((10, 2))),
        lambda: tails.check_tails(np.ones((1000, 2))),
        lambda: heavy.laplace_limit([[0.1]], -1.0),
        lambda: heavy.laplace_law(-1.0, 1.0),
        lambda: heavy.student_law(0),
        lambda: heavy_curve("cauchy", 1.0),
        lambda: heavy_curve("laplace", 0.0),
        lambda: heavy_curve("laplace", 1.0, (1,)),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call):
    with pytest.raises(InputError, match="expected"):
        call()
