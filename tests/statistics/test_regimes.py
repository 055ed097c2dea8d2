"""Regimes of heads with scores of known spread, and the number of tokens that halves the mass of a sink."""

from __future__ import annotations

import numpy as np
import pytest

from limitlens.errors import Array, InputError
from limitlens.probing.pilot import dilution_length, sink_share
from limitlens.statistics.regimes import Regime, classify, effective_growth, resampled

SIZES = np.array([256.0, 512, 1024, 2048, 4096])


def measure(scores: Array) -> tuple[Array, float]:
    """Mean effective tokens at every size and the mean largest weight at the last, of scores (queries, n)."""
    effective = []
    for n in SIZES.astype(int):
        weights = np.exp(scores[:, :n] - scores[:, :n].max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        effective.append((1 / np.square(weights).sum(1)).mean())
    return np.array(effective), float(weights.max(1).mean())


def gaussian(spread: float, seed: int = 0) -> Array:
    return spread * np.random.default_rng(seed).standard_normal((200, int(SIZES[-1])))


@pytest.mark.parametrize(
    ("spread", "regime"),
    [
        (0.0, Regime.AVERAGING),
        (1.0, Regime.AVERAGING),
        (1.8, Regime.AVERAGING),  # √(2 ln n)/2 = 2.04 ends averaging
        (2.5, Regime.SELECTIVE),
        (3.5, Regime.SELECTIVE),
        (6.5, Regime.FROZEN),  # √(2 ln n) = 4.08 begins freezing, and at 6.5 one key holds most of the mass
        (15.0, Regime.FROZEN),
    ],
)
def test_gaussian_scores_fall_into_the_regime_of_their_spread(spread: float, regime: Regime) -> None:
    effective, top = measure(gaussian(spread))
    assert classify(effective, SIZES, top).regime is regime


def test_a_sink_freezes_a_head_until_it_is_diluted() -> None:
    scores = gaussian(0.5)
    # e^{score} averages e^{1/8} over the others, so these sinks are diluted at 143,000, 4,300 and 360 tokens.
    for strength, regime in ((12.0, Regime.FROZEN), (8.5, Regime.SELECTIVE), (6.0, Regime.AVERAGING)):
        with_sink = scores.copy()
        with_sink[:, 0] = strength
        effective, top = measure(with_sink)
        assert classify(effective, SIZES, top).regime is regime


def test_a_concentrated_head_that_still_spreads_is_not_frozen() -> None:
    effective = np.array([0.5, 1, 1.5, 2, 3]) + 1
    verdict = classify(effective, SIZES, 0.55)
    assert verdict.regime is Regime.SELECTIVE
    assert verdict.growth == pytest.approx(np.log(4 / 2.5) / np.log(4), rel=0.02)


def test_growth_is_the_exponent_of_the_last_sizes() -> None:
    bent = np.where(SIZES <= 1024, 7.0, 7 * (SIZES / 1024) ** 0.6)
    assert effective_growth(bent, SIZES) == pytest.approx(0.6)
    assert np.isnan(effective_growth(bent[:1], SIZES[:1]))
    assert classify(bent[:1], SIZES[:1], 0.1).growth is None


def test_with_one_size_the_levels_decide() -> None:
    assert classify(np.array([300.0]), np.array([512.0]), 0.02).regime is Regime.AVERAGING
    assert classify(np.array([1.2]), np.array([512.0]), 0.9).regime is Regime.FROZEN


def test_a_regime_has_a_reason_and_a_remedy() -> None:
    verdict = classify(np.array([30.0, 60, 120]), np.array([64.0, 128, 256]), 0.05)
    assert (
        verdict.reason == "the weights are spread over 120 effective tokens of 256; effective tokens grow like n^1.00"
    )
    assert verdict.regime.remedy == Regime.AVERAGING.remedy
    assert len({regime.remedy for regime in Regime} | {regime.meaning for regime in Regime}) == 6


@pytest.mark.parametrize(("regime", "count", "top"), [(Regime.AVERAGING, 65.0, 0.1), (Regime.FROZEN, 1.5, 0.51)])
def test_clusters_of_unequal_sizes_count_by_their_queries(regime: Regime, count: float, top: float) -> None:
    """All queries are alike and near a border (64 effective tokens, a weight of 1/2): every resample must agree."""
    members = np.arange(1.0, 17.0)
    tokens = count * (SIZES / SIZES[-1]) ** (0.9 if regime is Regime.AVERAGING else 0.1)
    verdict = classify(tokens, SIZES, top)
    found = resampled(verdict, (members[:, None] * tokens)[None], (members * top)[None], members, SIZES, seed=0)
    assert (found.regime, found.agreement) == (regime, 1.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: classify(np.ones(2), SIZES, 0.5), "one per size"),
        (lambda: classify(np.zeros(5), SIZES, 0.5), "positive"),
        (lambda: classify(np.ones(5), SIZES, 1.5), "at most 1"),
    ],
)
def test_bad_input_is_refused(call: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()  # type: ignore[operator]


def test_the_share_of_a_sink_is_the_softmax_weight() -> None:
    generator = np.random.default_rng(3)
    rest = generator.standard_normal((5, 40_000))
    sink = np.array([3.0, 5, 7, 9, 11])
    lse = np.log(np.exp(rest).sum(1))
    for n in (100, 10_000):
        predicted = sink_share(n, sink - lse + np.log(rest.shape[1]))
        drawn = np.exp(sink) / (np.exp(sink) + np.exp(rest[:, :n]).sum(1))
        np.testing.assert_allclose(predicted, drawn, atol=0.05 if n == 100 else 0.006)
    np.testing.assert_allclose(
        sink_share(rest.shape[1], sink - lse + np.log(rest.shape[1])), np.exp(sink) / (np.exp(sink) + np.exp(lse))
    )


def test_at_the_dilution_length_the_sink_holds_half() -> None:
    generator = np.random.default_rng(4)
    sink, lse = 4 * generator.standard_normal((3, 2, 64)) + 5, generator.standard_normal((3, 2, 64)) + 9
    log_length = sink - lse + np.log(5000)
    length = dilution_length(log_length)
    assert length.shape == (3, 2)
    np.testing.assert_allclose(sink_share(length[..., None], log_length).mean(-1), 0.5, rtol=1e-12)


def test_one_query_is_diluted_at_the_ratio_of_its_exponentials() -> None:
    np.testing.assert_allclose(dilution_length(np.array([[4.0]])), [np.exp(4.0)])
    assert dilution_length(np.array([-3.0])) == pytest.approx(np.exp(-3))


def test_scores_too_large_for_exponentials_are_no_obstacle() -> None:
    log_length = np.array([2000.0, 2002.0]) - np.array([1990.0, 1992.0]) + np.log(50)
    assert dilution_length(log_length) == pytest.approx(50 * np.exp(10))
    np.testing.assert_allclose(sink_share(50 * np.exp(10), log_length), 0.5)
    assert dilution_length(np.array([5000.0])) == np.inf
