"""The exact finite-n error of attention over Gaussian tokens and the curves made from it, against simulation."""

import numpy as np
import pytest

from grid_errors import grid_errors
from limitlens.errors import InputError
from limitlens.measures import Gaussian
from limitlens.theory import curve, rates
from limitlens.theory._summary import summary
from limitlens.theory.clt import asymptotic_covariance
from limitlens.theory.curve import pointwise_error
from limitlens.theory.hardmax import extremes


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def z_score(samples, predicted):
    return abs(samples.mean() - predicted) / (samples.std() / np.sqrt(len(samples)))


@pytest.mark.parametrize("n", [2, 30, 300])
@pytest.mark.parametrize("tilt", [0.1, 1.0, 3.0, 6.0])
def test_pointwise_error_matches_simulation(n, tilt):
    rng = np.random.default_rng(n)
    tokens = rng.normal(size=(20_000, n))
    weights = softmax(tilt * tokens)
    error = np.sum(weights * tokens, axis=1) - tilt
    exact = pointwise_error(tilt, n)
    participation = np.sum(weights**2, axis=1)
    assert z_score(error**2, exact.along[0, 0]) < 4
    assert z_score(participation, exact.across[0, 0]) < 4
    # Stein: the mean output is shorter than the limit by the share E Σw², exactly.
    assert z_score(error, -tilt * exact.across[0, 0]) < 4


def test_steins_identity_shrinks_towards_the_mean_of_the_tokens():
    rng = np.random.default_rng(3)
    tokens = 1.0 + rng.normal(size=(40_000, 30))
    output = np.sum(softmax(tokens) * tokens, axis=1)
    share = pointwise_error(1.0, 30).across[0, 0]
    assert z_score(output, 2.0 - share * 1.0) < 4  # the limit is 2, its distance to the mean 1
    assert z_score(output, 2.0 - share * 2.0) > 20  # (1 - E Σw²) Γ is for centred tokens alone


@pytest.mark.parametrize(("tilt", "own"), [(0.5, 1.0), (2.0, -1.0), (3.0, 2.0)])
def test_pointwise_error_with_the_query_among_the_tokens(tilt, own):
    rng = np.random.default_rng(7)
    tokens = rng.normal(size=(20_000, 100))
    tokens[:, 0] = own
    weights = softmax(tilt * tokens)
    error = np.sum(weights * tokens, axis=1) - tilt
    exact = pointwise_error(tilt, 100, own)
    assert z_score(error**2, exact.along[0, 0]) < 4
    assert z_score(np.sum(weights[:, 1:] ** 2, axis=1), exact.across[0, 0]) < 4
    assert z_score(weights[:, 0] ** 2, exact.own[0, 0]) < 4
    assert z_score(weights[:, 0] * error, exact.own_along[0, 0]) < 4


def test_values_along_and_across_the_tilt_may_be_correlated():
    """A query among its tokens, and one value that mixes both directions: the cross term of the error counts."""
    rng, query, V = np.random.default_rng(8), np.array([0.5, -1.0]), np.array([[1.0, 1.0]])
    tokens = rng.normal(size=(40_000, 4, 2))
    tokens[:, 0] = query
    output = np.einsum("rn,rnd->rd", softmax(tokens @ [0.5, 0.0]), tokens) @ V.T
    A = np.array([[1.0, 0.0], [0.0, 0.0]])  # the tilt is (0.5, 0), so is the limit
    exact = curve.query_error(np.eye(2), A, query[None], 4, V=V, own=True)[0, 0]
    assert z_score((output[:, 0] - 0.5) ** 2, exact) < 4


def test_limits_of_the_exact_error():
    flat = pointwise_error(0.0, [1, 10, 1e6])
    assert flat.along[0] == pytest.approx([1, 0.1, 1e-6])
    one = pointwise_error([0.5, 3.0], 1)
    assert one.along[:, 0] == pytest.approx([1.25, 10.0])  # one token: E(z - τ)²
    assert one.across[:, 0] == pytest.approx([1.0, 1.0])
    alone = pointwise_error(2.0, 1, own=5.0)
    assert (alone.along[0, 0], alone.own[0, 0], alone.own_along[0, 0]) == pytest.approx((9, 1, 3))
    # Many tokens: the central limit theorem, e^{τ²}(1+τ²)/n.
    tau = np.array([0.3, 1.0, 2.0])
    many = pointwise_error(tau, 1e14)
    assert many.along[:, 0] * 1e14 == pytest.approx(np.exp(tau**2) * (1 + tau**2), rel=1e-5)
    assert many.across[:, 0] * 1e14 == pytest.approx(np.exp(tau**2), rel=1e-5)
    # A steep tilt: hardmax, E(max - τ)² up to the gap between the two largest.
    steep = pointwise_error(200.0, 1000).along[0, 0]
    assert np.sqrt(steep) == pytest.approx(200 - extremes(1000)[0], abs=2e-3)
    assert asymptotic_covariance(Gaussian(0.0, 1.0), [[2.0]])[0, 0, 0] == pytest.approx(5 * np.exp(4))


@pytest.mark.parametrize("own", [None, -3.0, 2.5, 6.0])
def test_steep_tilts_continue_the_others_and_end_at_hardmax(own):
    """The grid changes at τ = 30. Far beyond, the output is the largest token, or the query's own if it is larger."""
    sizes = [2, 200, 10_000, 1e12]
    below, at = (curve.pointwise_error([tau], sizes, own) for tau in (30 - 1e-9, 30.0))
    for before, after in zip(vars(below).values(), vars(at).values(), strict=True):
        assert after == pytest.approx(before, rel=1e-7, abs=1e-12)
    far = curve.pointwise_error([1e5], 10_000, own)
    largest = 6.0 if own == 6.0 else extremes(10_000)[0]
    assert 1e5 - np.sqrt(far.along) == pytest.approx(largest, abs=0.04)  # an own token of 2.5 is rarely the largest
    assert far.across == pytest.approx(0.0 if own == 6.0 else 1.0, abs=2e-4)


def test_the_grid_of_a_steep_tilt_is_bounded():
    for own, most in ((None, 100), (2.0, 500)):
        for tilt in (30.0, 1e3, 1e5):
            log_s, *_ = curve._steep_averages(tilt, 1e3, 1e6, own)
            assert len(log_s) < most


def test_horizons_of_any_size_have_a_predicted_curve():
    """At H = 1e4 the output is the largest token, so the error is the limit, H x, but for E(max) = 3.24 of 1,000."""
    found = summary(Gaussian(0.0, 1.0), [[1e4]], 1000).predicted["curve"]["output"]
    assert found["predicted"] == pytest.approx(1e4 - np.sqrt(2 / np.pi) * extremes(1000)[0], rel=1e-5)


def test_sizes_together_or_alone_give_the_same_numbers():
    sizes = np.array([1, 10, 1e4, 1e9])
    together = pointwise_error([0.0, 0.2, 2.5, 9.0], sizes)
    for j, n in enumerate(sizes):
        assert pointwise_error([0.0, 0.2, 2.5, 9.0], n).along[:, 0] == pytest.approx(together.along[:, j], rel=1e-11)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dim", [1, 3])
def test_output_error_matches_simulation(dim, masked):
    rng = np.random.default_rng(dim)
    covariance = np.eye(dim) + 0.3 * np.diag(np.arange(dim))
    A = rng.normal(size=(dim, dim)) * 0.4
    V = rng.normal(size=(2, dim))
    mean = np.full(dim, 0.3)
    n, queries, root = 300, 60, np.linalg.cholesky(covariance)
    squares = []
    for _ in range(3000 if dim == 1 else 600):
        tokens = mean + rng.normal(size=(n, dim)) @ root.T
        scores = tokens[:queries] @ A.T @ tokens.T
        if masked:
            scores[np.arange(queries), np.arange(queries)] = -np.inf
        gap = softmax(scores) @ tokens - (mean + tokens[:queries] @ A.T @ covariance)
        squares.append(np.mean(np.sum((gap @ V.T) ** 2, axis=1)))
    squares = np.array(squares)
    predicted = curve.output_error(covariance, A, [n], V=V, mean=mean, mask_self=masked)[0]
    noise = squares.std() / np.sqrt(len(squares)) / squares.mean() / 2
    assert noise < 0.015
    assert predicted / np.sqrt(squares.mean()) == pytest.approx(1, abs=3 * noise + (0.015 if dim > 1 else 0))


def test_output_error_matches_the_grid_at_a_million_tokens():
    found = grid_errors(0.5, 10**6, 4000, seed=0)
    predicted = curve.output_error([[1.0]], [[0.5]], [10**6])[0]
    assert predicted**2 == pytest.approx(found.square.mean(), rel=4 * found.square.std() / 63 / found.square.mean())
    scaled = curve.output_error([[9.0]], [[0.5 / 9]], [10**6])[0]
    assert scaled == pytest.approx(3 * predicted, rel=1e-9)


@pytest.mark.parametrize("horizon", [0.5, 0.7, 0.9, 1.5])
@pytest.mark.parametrize("dim", [2, 4, 8, 16])
def test_output_error_beyond_one_dimension_sees_the_rare_queries(dim, horizon):
    # A flat spectrum needs one integral over the length of the query alone; rare long ones decide at large n.
    length = np.linspace(1e-3, np.sqrt(dim) + 9, 400)
    density = length ** (dim - 1) * np.exp(-(length**2) / 2)
    sizes = np.array([1e3, 1e5, 1e7])
    error = pointwise_error(horizon * length, sizes)
    exact = np.sqrt(density @ (error.along + (dim - 1) * error.across) / density.sum())
    A = horizon * np.linalg.qr(np.random.default_rng(dim).normal(size=(dim, dim)))[0]
    found = curve.output_error(np.eye(dim), A, sizes + 1, mask_self=True)
    assert found / exact == pytest.approx(np.ones(3), abs=0.002)


@pytest.mark.parametrize("horizon", [0.2, 0.3])
@pytest.mark.parametrize("dim", [4, 8, 16, 32])
def test_output_error_counts_the_own_token_beyond_one_dimension(dim, horizon):
    # With A = H I the own token lies along the tilt: again one integral over its length; long ones win their softmax.
    length = np.linspace(1e-3, np.sqrt(dim) + 9, 400)
    density = length ** (dim - 1) * np.exp(-(length**2) / 2)
    sizes = [100, 1000, 10_000, 1e6]
    error = pointwise_error(horizon * length, sizes, length)
    exact = np.sqrt(density @ (error.along + (dim - 1) * error.across) / density.sum())
    found = curve.output_error(np.eye(dim), horizon * np.eye(dim), sizes)
    assert found / exact == pytest.approx(np.ones(4), abs=0.005)


@pytest.mark.parametrize("horizon", [0.9, 1.0, 1.5, 2.0])
def test_exact_curve_has_the_rms_output_exponent(horizon):
    sizes = np.array([1e8, 1e9, 1e19, 1e20])
    error = curve.output_error([[1.0]], [[horizon]], sizes)
    early, late = (np.log10(error[j] / error[j + 1]) for j in (0, 2))
    exponent = rates.rate_rms_output(horizon)
    assert abs(late - exponent) < 0.012
    assert abs(late - exponent) < abs(early - exponent)
    # The slope is already past the exponent of one typical sample, which is larger.
    assert late < rates.rate_sharp_output(horizon)


def test_exact_curve_is_half_below_the_threshold():
    error = curve.output_error([[1.0]], [[0.5]], [1e8, 1e9])
    assert np.log10(error[0] / error[1]) == pytest.approx(0.5, abs=1e-3)
    assert rates.rate_rms_output(np.sqrt(0.5)) == pytest.approx(0.5)


@pytest.mark.parametrize("horizon", [0.3, 0.5, 0.9, 1.5, 2.0, 3.0])
def test_three_piece_law_within_a_quarter_of_the_averaged_error(horizon):
    for n in (10**3, 10**4, 10**5, 10**6):
        found = grid_errors(horizon, n, 2400, seed=1).absolute
        noise = found.std() / np.sqrt(len(found)) / found.mean()
        ratio = curve.averaged_error_1d(horizon, [n])[0] / found.mean()
        assert abs(ratio - 1) < 0.25, (n, ratio, noise)
        assert noise < 0.02


def test_three_pieces_at_their_own_tilts():
    n = 10**4
    L = np.sqrt(2 * np.log(n))
    low, middle, high = curve.three_piece([1.0, 0.75 * L, 2 * L], n)
    assert low == pytest.approx(np.sqrt(2 / np.pi) * np.exp(0.5) * np.sqrt(2 / n))
    assert middle == pytest.approx(np.exp(-(L**2) / 32))
    assert high == pytest.approx(2 * L - 3.7190165, abs=1e-6)  # the 1 - 1e-4 normal quantile


def test_mean_error_in_higher_dimensions_matches_simulation():
    rng = np.random.default_rng(9)
    A = 0.4 * np.linalg.qr(rng.normal(size=(3, 3)))[0]
    n, norms = 400, []
    for _ in range(1500):
        tokens = rng.normal(size=(n, 3))
        norms.append(np.linalg.norm((softmax(tokens @ A.T @ tokens.T) @ tokens).mean(axis=0)))
    norms = np.array(norms)
    predicted = curve.mean_error(np.eye(3), A, [n])[0]
    assert predicted / norms.mean() == pytest.approx(1, abs=0.03 + 3 * norms.std() / np.sqrt(1500) / norms.mean())
    assert curve.mean_error(np.eye(3), 3 * A, [n]) is None


def test_expected_norm_of_known_gaussians():
    assert curve.expected_norm([[4.0]]) == pytest.approx(2 * np.sqrt(2 / np.pi))
    assert curve.expected_norm(np.eye(3)) == pytest.approx(np.sqrt(8 / np.pi))
    assert curve.expected_norm(np.zeros((2, 2))) == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: pointwise_error(-1.0, 10),
        lambda: pointwise_error(1.0, 0),
        lambda: pointwise_error(1.0, 1e30),
        lambda: pointwise_error(float("nan"), 10),
        lambda: curve.three_piece([1.0], 1),
        lambda: curve.query_error(np.eye(2), np.eye(2), np.ones((1, 3)), [10]),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call):
    with pytest.raises(InputError, match="expected"):
        call()
