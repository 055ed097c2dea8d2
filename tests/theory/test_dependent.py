"""Error over consecutive tokens: sums of covariances, and blocks as units, against simulation of known sequences."""

import numpy as np
import pytest

from limitlens.errors import InputError
from limitlens.theory.dependent import autocorrelation_time, block_errors, dependent_error


def ar1(rng, runs, n, rho):
    noise = rng.standard_normal((runs, n)) * np.sqrt(1 - rho**2)
    x = np.empty_like(noise)
    x[:, 0] = noise[:, 0] / np.sqrt(1 - rho**2)
    for t in range(1, n):
        x[:, t] = rho * x[:, t - 1] + noise[:, t]
    return x


def topics(rng, runs, n, stay):
    """Hidden Markov topics: a topic of variance 1 is drawn anew with probability 1 − stay at each token."""
    fresh = rng.random((runs, n)) > stay
    fresh[:, 0] = True
    draw = rng.standard_normal((runs, n))
    last = np.maximum.accumulate(np.where(fresh, np.arange(n), 0), 1)
    return np.take_along_axis(draw, last, 1)


SEQUENCES = {
    "ar1": (lambda rng, runs, n: ar1(rng, runs, n, 0.8), 0.8 ** np.arange(400)),
    "topics": (lambda rng, runs, n: topics(rng, runs, n, 0.95), 0.95 ** np.arange(1500)),
    "repeated": (
        lambda rng, runs, n: np.repeat(rng.standard_normal((runs, -(-n // 4) + 1)), 4, 1)[:, 2 : n + 2],
        np.array([1, 0.75, 0.5, 0.25]),
    ),
}


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("n", [30, 400])
def test_covariances_give_the_error_of_consecutive_tokens(name, n):
    """Nearly uniform weights, where the influence of a token is its value, up to 1/n."""
    draw, covariances = SEQUENCES[name]
    value = draw(np.random.default_rng(n), 20_000, n)
    found = np.square(value.mean(1))
    expected = dependent_error(covariances, n)
    slack = {"repeated": 0.02}.get(name, 0.0) * expected
    assert abs(found.mean() - expected) < 4 * found.std() / np.sqrt(len(found)) + slack


def test_times_of_known_sequences():
    assert autocorrelation_time(SEQUENCES["ar1"][1]) == pytest.approx(9, rel=1e-6)  # (1 + ρ)/(1 − ρ)
    assert autocorrelation_time(SEQUENCES["topics"][1]) == pytest.approx(39, rel=1e-6)
    assert autocorrelation_time(SEQUENCES["repeated"][1]) == pytest.approx(4)


def test_blocks_as_units_are_the_exact_law_of_blocks():
    """Attention over m of M blocks of dependent tokens, drawn with replacement, in simulation."""
    rng = np.random.default_rng(5)
    scores, values = 2 * topics(rng, 60, 8, 0.7), topics(rng, 120, 8, 0.7).reshape(60, 8, 2)
    w = np.exp(scores)
    weights, sums = w.sum(1), (w[..., None] * values).sum(1)
    outputs = sums / weights[:, None]
    limit = sums.sum(0) / weights.sum()
    predicted = block_errors(weights[None], outputs[None], np.array([3, 12]))[0]
    for m, expected in zip((3, 12), predicted, strict=True):
        chosen = rng.integers(60, size=(40_000, m))
        found = np.square(sums[chosen].sum(1) / weights[chosen].sum(1)[:, None] - limit).sum(-1)
        assert abs(found.mean() - expected) < 4 * found.std() / 200 + 0.002 * expected


def test_shapes_are_checked():
    with pytest.raises(InputError, match="expected \\(queries, M\\)"):
        block_errors(np.ones((1, 9)), np.ones((1, 8, 2)), np.array([4]))
