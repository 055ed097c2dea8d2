"""Local exponent of keys around a query: bias and coverage for known laws, scikit-dimension, and the critical β."""

from __future__ import annotations

import math

import numpy as np
import pytest

from limitlens.errors import InputError
from limitlens.experiments.real_keys import real_keys
from limitlens.statistics.local_exponent import OUTSIDE, local_exponent, query_distances, support
from limitlens.theory import critical_beta, uniform


def sphere(rng: np.random.Generator, n: int, dim: int, ambient: int) -> np.ndarray:
    keys = np.zeros((n, ambient))
    keys[:, :dim] = rng.standard_normal((n, dim))
    return keys / np.linalg.norm(keys, axis=1, keepdims=True)


def test_exact_power_law_is_unbiased_and_covered() -> None:
    """r = U^{1/α} is the model itself: mean α, variance α²/(k − 3), 95% intervals that hold α 95% of the time."""
    rng, alpha, neighbours, trials = np.random.default_rng(0), 3.0, 20, 4000
    found = [local_exponent(rng.random(200) ** (1 / alpha), neighbours) for _ in range(trials)]
    exponents = np.array([estimate.exponent for estimate in found])
    assert abs(exponents.mean() - alpha) < 3 * exponents.std() / math.sqrt(trials)
    assert exponents.std() == pytest.approx(alpha / math.sqrt(neighbours - 3), rel=0.06)
    covered = np.mean([estimate.interval[0] < alpha < estimate.interval[1] for estimate in found])
    assert abs(covered - 0.95) < 3 * math.sqrt(0.95 * 0.05 / trials)


@pytest.mark.parametrize(("dim", "ambient"), [(3, 3), (4, 9), (6, 16)])
def test_spheres_and_subspheres(dim: int, ambient: int) -> None:
    """The exponent is that of the sphere the keys lie on, and the critical β follows, with its uncertainty."""
    rng, n, trials = np.random.default_rng(1), 5000, 200
    query = np.eye(ambient)[0]
    truth = critical_beta(n, uniform(dim).local)
    exponents, betas, errors = [], [], []
    for _ in range(trials):
        estimate = local_exponent(query_distances(query, sphere(rng, n, dim, ambient)), 40)
        beta, relative = estimate.critical_beta()
        exponents.append(estimate.exponent)
        betas.append(beta)
        errors.append(relative)
    assert np.mean(exponents) == pytest.approx(dim - 1, rel=0.05)
    log_ratio = np.log(np.array(betas) / truth)
    assert np.std(log_ratio) == pytest.approx(np.mean(errors), rel=0.2)
    assert np.mean(np.abs(log_ratio) < 1.96 * np.array(errors)) > 0.9


def test_critical_beta_of_another_context_length() -> None:
    estimate = local_exponent(np.random.default_rng(2).random(1000) ** (1 / 4), 100)
    here, there = estimate.critical_beta()[0], estimate.critical_beta(16_000)[0]
    assert there / here == pytest.approx(16 ** (2 / estimate.exponent), rel=1e-12)
    assert here == pytest.approx(critical_beta(1000, estimate.local), rel=1e-12)
    assert estimate.critical_beta(theta=5.0)[0] == pytest.approx(here / 5 ** (2 / estimate.exponent), rel=1e-12)


def test_equal_to_scikit_dimension() -> None:
    """The same estimator in a maintained library, around every point of a sample."""
    skdim = pytest.importorskip("skdim", reason="scikit-dimension is a development extra")
    rng, neighbours = np.random.default_rng(3), 25
    points = sphere(rng, 300, 4, 7)
    distances = np.sort(np.linalg.norm(points[:, None] - points[None], axis=2), axis=1)[:, 1:]
    theirs = skdim.id.MLE(unbiased=True).fit(points, n_neighbors=neighbours).dimension_pw_
    ours = [local_exponent(row, neighbours).exponent for row in distances]
    assert ours == pytest.approx(theirs, rel=1e-9)


def test_sample_of_keys_at_its_critical_temperature() -> None:
    """The critical β estimated from a sample puts its weights where the limit says: fair quantiles over queries."""
    rng = np.random.default_rng(4)
    keys, queries = sphere(rng, 4000, 5, 12), sphere(rng, 60, 5, 12)
    document = real_keys(queries, keys, seed=5).document()
    assert document["median"]["exponent"] == pytest.approx(4, abs=0.4)
    assert document["median"]["critical_beta"] == pytest.approx(critical_beta(4000, uniform(5).local), rel=0.2)
    inside = [row for row in document["queries"] if row["exponent"]["measured"] is not None]
    assert len(inside) >= 55  # queries of the keys' own law: 1 in 65 is farther out than all reference keys by chance
    quantiles = np.array([row["top_weight"]["quantile_in_limit"] for row in inside])
    assert abs(quantiles.mean() - 0.5) < 3 * quantiles.std() / math.sqrt(60)


def test_five_keys_share_the_mass() -> None:
    rng = np.random.default_rng(8)
    keys, queries = sphere(rng, 1000, 64, 64), sphere(rng, 1, 64, 64)
    found = real_keys(queries, keys, seed=0).queries[0].five_key_beta.measured.value
    weight = np.exp(found * (keys @ queries[0]))
    assert weight.sum() ** 2 / np.square(weight).sum() == pytest.approx(5, rel=1e-6)


def test_keys_of_any_length_can_be_projected() -> None:
    rng = np.random.default_rng(6)
    keys = sphere(rng, 500, 4, 4)
    lengths = rng.uniform(0.5, 3, (500, 1))
    query = 2 * keys[0]
    assert query_distances(query, keys * lengths, normalise=True) == pytest.approx(query_distances(keys[0], keys[1:]))


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda unit: query_distances(2 * unit[0], unit), "the query has length 2.*on the sphere"),
        (lambda unit: query_distances(unit[0], 0.5 * unit), "a key has length 0.5.*on the sphere"),
        (lambda unit: query_distances(unit[0, :2], unit), "dimension 2 and the keys 4"),
        (lambda unit: query_distances(0 * unit[0], unit, normalise=True), "has length 0"),
        (lambda unit: query_distances(unit[0] * np.nan, unit), "query holds nan"),
        (lambda unit: local_exponent([0.0, *range(1, 40)]), "leave the query itself out"),
        (lambda unit: local_exponent(np.ones(40)), "all equal"),
        (lambda unit: local_exponent(np.arange(1, 10)), "9 keys were given"),
        (lambda unit: local_exponent(np.arange(1, 10), 3), "neighbours is 3"),
        (lambda unit: real_keys(unit[:0], unit), "no queries"),
    ],
)
def test_bad_input(act: object, words: str) -> None:
    unit = sphere(np.random.default_rng(7), 50, 4, 4)
    with pytest.raises(InputError, match=words):
        act(unit)  # type: ignore[operator]


def test_queries_outside_the_keys_support_have_no_local_exponent() -> None:
    """Keys in a cone of S^63 and queries at right angles to it, as in real heads: α̂ would exceed the dimension."""
    rng = np.random.default_rng(5)
    axis, away = np.eye(64)[0], np.eye(64)[1]
    keys = axis + 0.02 * rng.standard_normal((2000, 64))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    inside = axis + 0.02 * rng.standard_normal((40, 64))
    inside /= np.linalg.norm(inside, axis=1, keepdims=True)
    assert local_exponent(query_distances(away, keys)).exponent > 63
    radii = [local_exponent(query_distances(query, keys)).radius for query in (*inside, away)]
    usual = support(radii, keys)
    assert usual[-1] == 1 / 65 < OUTSIDE
    assert (usual[:-1] < OUTSIDE).mean() < 0.1
    assert usual[:-1].mean() == pytest.approx(0.5, abs=0.15)
    found = real_keys([away, away], keys)
    assert found.median == {"exponent": None, "critical_beta": None}
    row = found.queries[0]
    assert not row.exponent.measured.known
    assert not row.critical_beta.measured.known
    assert row.theta.predicted is None
    weight = np.exp(row.beta * (keys @ away))
    assert weight.sum() ** 2 / np.square(weight).sum() == pytest.approx(5, rel=1e-6)  # at the five-key β instead
    assert "There is no local exponent: the queries lie outside the keys' support." in str(found)
    mixed = real_keys([away, inside[0]], keys)
    assert mixed.median["exponent"] == mixed.queries[1].exponent.measured.value
    assert "1 of 2 queries lie outside the keys' support" in str(mixed)


def test_the_support_level_is_that_of_one_more_key() -> None:
    """Were the query one more key, it would fall below the level with that probability: 1 in 65."""
    rng, hits, trials = np.random.default_rng(6), 0, 1500
    for _ in range(trials):
        keys = sphere(rng, 65, 5, 5)
        radius = np.sort(np.linalg.norm(keys[1:] - keys[0], axis=1))[19]
        hits += int(support([radius], keys[1:])[0] < OUTSIDE)
    assert abs(hits / trials - 1 / 65) < 3 * math.sqrt(1 / 65 / trials) + 0.005
