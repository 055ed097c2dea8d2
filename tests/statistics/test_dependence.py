"""Plateau test and autocorrelation times on sequences with known answers; records of contexts with known parts."""

import numpy as np
import pytest

from limitlens.statistics.contexts import between_share, context_record, interval
from limitlens.statistics.dependence import LONG, PLATEAU, block_products, memory
from theory.test_dependent import ar1, topics

RUNS, BLOCKS, SIZE = 16, 16, 100


def blocks_of(value):
    """Products of blocks (R, blocks, blocks) and sums of squares (1, R) of sequences (R, tokens)."""
    return block_products(value.reshape(1, len(value), BLOCKS, -1, 1).sum(3)), np.square(value).sum(1)[None]


@pytest.mark.parametrize(("rho", "time"), [(0.0, 1.0), (0.5, 3.0), (0.8, 9.0)])
def test_ar1_has_a_plateau_and_its_time(rho, time):
    found = [memory(*blocks_of(ar1(np.random.default_rng(seed), RUNS, BLOCKS * SIZE, rho))) for seed in range(60)]
    held = [one.low <= time <= one.high for one in found]
    assert np.mean([one.verdict == PLATEAU for one in found]) >= 0.9
    assert np.mean(held) >= 0.85
    assert np.exp(np.mean(np.log([one.spectral for one in found]))) == pytest.approx(time, rel=0.12)


def test_topics_as_long_as_the_context_are_long_memory():
    found = [
        memory(*blocks_of(topics(np.random.default_rng(seed), RUNS, BLOCKS * SIZE, 1 - 1 / 2000))) for seed in range(40)
    ]
    assert np.mean([one.verdict == LONG for one in found]) >= 0.8
    document = next(one for one in found if one.verdict == LONG).document()
    assert document["value"] is None
    assert document["at_least"] > 100


def test_the_part_between_documents_survives():
    """An influence of a document of variance 1 and of tokens of variance 400: at n = 1,600 a share of 0.8 stays."""
    rng = np.random.default_rng(3)
    value = rng.standard_normal((400, 1)) + 20 * rng.standard_normal((400, BLOCKS * SIZE))
    assert between_share(blocks_of(value)[0]) == pytest.approx(1 / (1 + 400 / (BLOCKS * SIZE)), abs=0.06)


def contexts(rng, shift=0.0, atom=None):
    """A record of uniform weights and values N(0, 1) + 2, two dimensions, with an own part `shift` of each query."""
    value = 2 + rng.standard_normal((8, RUNS, BLOCKS, SIZE, 2))
    owner = np.arange(8)
    value[np.arange(8), owner] += shift
    sums = np.concatenate((value.sum(3), np.full((8, RUNS, BLOCKS, 1), SIZE)), -1)
    total = value.sum((2, 3))
    squares = np.concatenate(
        (total, np.full((8, RUNS, 1), BLOCKS * SIZE), np.square(value).sum((2, 3, 4))[..., None]), -1
    )
    return context_record(sums, squares, size=SIZE, owner=owner, near=BLOCKS, atom=atom, errors=(0.1,))


def test_errors_of_independent_tokens_fall_like_one_over_root_n():
    found = contexts(np.random.default_rng(0))
    expected = np.sqrt(2 / found.n) / np.sqrt(8)
    assert found.n.tolist() == [100, 200, 400, 800, 1600]
    assert np.abs(found.error / expected - 1).max() < 0.15
    assert (found.error_low < expected).mean() >= 0.6
    assert np.abs(found.within / expected[:3] - 1).max() < 0.15
    assert found.memory.verdict == PLATEAU
    assert found.memory.time == pytest.approx(1, rel=0.3)


def test_an_own_text_shows_in_use_only():
    """Values of the own context are 0.5 larger: 0.5·√2 off a limit of length √8, at every n."""
    found = contexts(np.random.default_rng(1), shift=0.5)
    assert found.in_use[-1] == pytest.approx(0.25, rel=0.1)
    plain = np.sqrt(2 / 1600 / 8)  # the own context is 1/16 of the centre of all contexts
    assert found.error[-1] == pytest.approx(np.hypot(plain, 0.25 / RUNS), rel=0.1)


def test_a_sink_reduces_errors():
    """A sink of the weight of all 1,600 tokens halves every change at the largest n."""
    rng = np.random.default_rng(2)
    plain = contexts(rng)
    sink = contexts(np.random.default_rng(2), atom=(np.full(8, 1600.0), np.full((8, 2), 2.0)))
    assert sink.error[-1] == pytest.approx(plain.error[-1] / 2, rel=0.02)


@pytest.mark.parametrize("together", [1, 4])
def test_intervals_count_documents(together):
    """Squared errors of 16 contexts with a common part in each document: 95% intervals of 200 sets hold the truth."""
    rng = np.random.default_rng(together)
    documents = np.repeat(np.arange(16 // together), together)
    held = []
    for _ in range(400):
        error = rng.gamma(2, 0.5, (16 // together, 1))[documents] * rng.gamma(8, 1 / 8, (16, 1))
        low, high = interval(error, np.ones((16, 1)), documents)
        held.append(low[0] <= 1 <= high[0])
    assert 0.88 <= np.mean(held) <= 0.99
