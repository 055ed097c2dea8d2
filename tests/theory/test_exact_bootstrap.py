"""Exact error over n tokens of a sample against simulation, with and without replacement, with and without an atom."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

import limitlens as ll
from limitlens.errors import Array, InputError
from limitlens.sampling.workers import product, summed
from limitlens.statistics.error_curve import ErrorCurve, PredictedErrors
from limitlens.theory import weight_nodes
from limitlens.theory.curve import query_error
from limitlens.theory.exact_bootstrap import HALVINGS, parts_of, pilot_errors

M = 200
RNG = np.random.default_rng(0)
VALUES = RNG.normal(size=(M, 3))
SCORES = 1.5 * RNG.normal(size=(2, M))
ATOM = (np.array([3.0, 5.0]), RNG.normal(size=(2, 3)))


def simulated(n: int, replicates: int, *, replace: bool, atom: bool) -> tuple[Array, Array]:
    """Mean squared errors of simulated samples and their standard errors: (queries,) each."""
    rng = np.random.default_rng(1)
    weight = np.exp(SCORES)
    own = np.exp(ATOM[0])[:, None] * atom
    limit = (own * ATOM[1] + n / M * weight @ VALUES) / (own + n / M * weight.sum(1, keepdims=True))
    if replace:
        draws = rng.integers(M, size=(replicates, n))
    else:
        draws = rng.random((replicates, M)).argpartition(n, axis=1)[:, :n]
    picked = weight[:, draws]  # (queries, replicates, n)
    output = (own[:, None] * ATOM[1][:, None] + np.einsum("qrn,rnv->qrv", picked, VALUES[draws])) / (
        own[:, None] + picked.sum(-1)[..., None]
    )
    square = np.square(output - limit[:, None]).sum(-1)
    return square.mean(1), square.std(1) / np.sqrt(replicates)


@pytest.mark.parametrize("atom", [False, True])
@pytest.mark.parametrize("n", [4, 16, 30])
def test_with_replacement_it_is_the_infinite_replicate_bootstrap(n: int, atom: bool) -> None:
    found = pilot_errors(SCORES, VALUES, np.array([n]), ATOM)[atom].whole[:, 0]
    mean, stderr = simulated(n, 20_000, replace=True, atom=atom)
    assert np.abs(found - mean).max() < 4 * stderr.max()


def test_one_and_two_tokens_are_the_mean_over_all_samples() -> None:
    """Of one token, and of two with replacement, every sample is counted; 3e-3 is the accuracy of the grid."""
    (found,) = pilot_errors(SCORES, VALUES, np.array([1, 2]))
    first, second = np.indices((M, M)).reshape(2, -1)
    for row, scores in zip(found.error, SCORES, strict=True):
        weight = np.exp(scores)[:, None]
        limit = (weight * VALUES).sum(0) / weight.sum()
        pairs = (weight[first] * VALUES[first] + weight[second] * VALUES[second]) / (weight[first] + weight[second])
        exact = [np.square(outputs - limit).sum(1).mean() for outputs in (VALUES, pairs)]
        assert row == pytest.approx(exact, rel=3e-3)


@pytest.mark.parametrize("atom", [False, True])
@pytest.mark.parametrize("n", [60, 120])
def test_without_replacement_it_is_what_a_probe_measures(n: int, atom: bool) -> None:
    found = pilot_errors(SCORES, VALUES, np.array([n]), ATOM)[atom].error[:, 0] * (1 - n / M)
    mean, stderr = simulated(n, 20_000, replace=False, atom=atom)
    assert np.abs(found / mean - 1).max() < 0.02 + 4 * (stderr / mean).max()  # 2% at M = 200, falling like 1/M


@pytest.mark.parametrize("steep", [1, 4])
@pytest.mark.parametrize("n", [16, 30, 120])  # the last without replacement
def test_nothing_is_lost_below_the_first_s(n: int, steep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first s a hundred times lower changes at most 0.5%; one five times higher loses 0.9% at n = 120."""
    found = pilot_errors(steep * SCORES, VALUES, np.array([n]), ATOM)
    monkeypatch.setattr(weight_nodes, "SMALLEST_S", weight_nodes.SMALLEST_S / 100)
    for one, lower in zip(found, pilot_errors(steep * SCORES, VALUES, np.array([n]), ATOM), strict=True):
        assert one.error == pytest.approx(lower.error, rel=5e-3)


@pytest.mark.parametrize("spread", [1.5, 3.0, 6.0])
def test_the_lightest_tokens_need_no_nodes_of_their_own(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Light tokens share the first node; errors are the same as with more nodes, with an atom and by halves too."""
    rng, asked, made = np.random.default_rng(3), [], weight_nodes.nodes
    monkeypatch.setattr(weight_nodes, "nodes", lambda low, high: asked.append(low) or made(low, high))
    given = spread * rng.normal(size=(6, 4000)), rng.normal(size=(4000, 4)), np.array([8, 64, 2000, 60_000])
    atom = (np.full(6, 9.0), rng.normal(size=(6, 4)))
    few = pilot_errors(*given, atom)
    monkeypatch.setattr(weight_nodes, "FAINT_MARGIN", np.inf)
    for one, other in zip(few, pilot_errors(*given, atom), strict=True):
        for own in fields(one):
            np.testing.assert_allclose(getattr(one, own.name), getattr(other, own.name), rtol=1e-5)
    assert asked[1] < asked[0] - 0.5 * spread


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_outputs_beside_an_atom_are_those_of_the_expected_sums(dtype: type) -> None:
    """|g|² with g = (b v_a + n Σ W v/M)/(b + n Σ W/M), of all tokens and of each half of them."""
    n, part = np.array([4, 30, 120]), parts_of(M)
    bare, beside = pilot_errors(SCORES.astype(dtype), VALUES, n, ATOM)
    own = np.exp(ATOM[0])[:, None]

    def outputs(chosen: Array, atom: bool) -> Array:
        weight = np.exp(SCORES[:, chosen])
        sums, mass = weight @ VALUES[chosen] / chosen.sum(), weight.mean(1, keepdims=True)
        g = [(atom * own * ATOM[1] + size * sums) / (atom * own + size * mass) for size in n]
        return np.square(g).sum(-1).T

    for atom, found in enumerate((bare, beside)):
        assert found.output == pytest.approx(outputs(part >= 0, bool(atom)), rel=1e-5)
        for halving, halves in enumerate(HALVINGS):
            for side in (0, 1):
                expected = outputs(halves[part] == side, bool(atom))
                assert found.half_outputs[side, halving] == pytest.approx(expected, rel=1e-5)


def test_halves_are_pilots_of_their_own() -> None:
    (whole,) = pilot_errors(SCORES, VALUES, np.array([16]))
    (first,) = pilot_errors(SCORES[:, : M // 2], VALUES[: M // 2], np.array([16]))
    assert whole.halves[0, 1] == pytest.approx(first.whole, rel=1e-3)


def test_many_gaussian_tokens_have_the_gaussian_law() -> None:
    """Pilots of 10,000 tokens against the closed form of `theory.curve`."""
    rng, tilt, sizes = np.random.default_rng(2), np.array([0.5, 0.3]), np.array([10, 100])
    exact = query_error(np.eye(2), np.eye(2), tilt[None], sizes)[0]
    pilots = [rng.normal(size=(10_000, 2)) for _ in range(12)]
    found = np.array([pilot_errors((tokens @ tilt)[None], tokens, sizes)[0].error[0] for tokens in pilots]) / exact
    stderr = found.std(0, ddof=1) / np.sqrt(len(pilots))
    assert stderr.max() < 0.02
    assert np.abs(found.mean(0) - 1).max() < 4 * stderr.max()


@pytest.mark.parametrize(
    "scores",
    [np.zeros((1, 50)), np.append(np.full((1, 49), -np.inf), [[0.0]], 1), np.append(np.zeros((1, 49)), [[80.0]], 1)],
    ids=["all equal", "one token seen", "one token holds everything"],
)
def test_extreme_weights_give_numbers(scores: Array) -> None:
    values = np.random.default_rng(3).normal(size=(50, 2))
    (found,) = pilot_errors(scores, values, np.array([2, 8, 25, 100]))
    assert np.isfinite(found.error).all()
    if not scores.any():  # the mean of n values: E|x̄ − μ|² = tr Cov / n
        expected = values.var(0).sum() / np.array([2, 8, 25, 100])
        assert found.whole[0] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("freedom", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("n", [10, 100])
def test_heavy_tailed_scores_are_binned_without_a_loss(n: int, freedom: float, dtype: type) -> None:
    """Student scores times 3 of range up to 570 against the integral over all tokens, without nodes.

    Scores clipped to a range of 40 below the largest gave 0.41 to 1.3 times this error.
    """
    rng = np.random.default_rng(0)
    scores, values = 3 * rng.standard_t(freedom, 2000), rng.normal(size=(2000, 4))
    logs = scores - np.logaddexp.reduce(scores) + np.log(2000)  # weights of mean 1
    weight = np.exp(logs)
    d = values - weight @ values / 2000
    exact = 0.0
    for log_s in np.arange(np.log(1e-3 / n), 300, 0.1):
        at = np.exp(np.minimum(log_s + logs, 200))
        e = np.exp(-at)
        kept = np.mean(e) ** (n - 2)
        s_a1 = (at * (np.expm1(-at) if log_s < 0 else e)) @ d / 2000
        s2_a2 = np.mean(at**2 * e * np.square(d).sum(1))
        exact += 0.1 * n * kept * (s2_a2 * np.mean(e) + (n - 1) * s_a1 @ s_a1)
    log_atom = np.quantile(logs, 0.98)  # an atom that some samples outweigh
    atom = (np.array([log_atom + scores[0] - logs[0]]), np.ones((1, 4)))
    alone, beside = pilot_errors(scores[None].astype(dtype), values, np.array([n]), atom)
    assert alone.whole[0, 0] == pytest.approx(exact, rel=4e-3)
    picked = rng.integers(2000, size=(20_000, n))
    drawn = np.column_stack((np.full(len(picked), log_atom), logs[picked]))
    share = np.exp(drawn - np.logaddexp.reduce(drawn, axis=1)[:, None])
    output = share[:, :1] + np.einsum("rn,rnv->rv", share[:, 1:], values[picked])
    own = np.exp(log_atom)
    centre = (own + n * (weight @ values / 2000)) / (own + n)
    square = np.square(output - centre).sum(1)
    assert abs(beside.whole[0, 0] - square.mean()) < 4e-3 * square.mean() + 4 * square.std() / np.sqrt(len(square))


def test_errors_of_a_query_do_not_depend_on_other_queries() -> None:
    """Other queries have a wider range of weights, and all share one grid of nodes."""
    rng, sizes = np.random.default_rng(6), np.array([4, 16, 60, 120, 500])
    far = np.concatenate((SCORES[:1], 9 * rng.normal(size=(1, M)), SCORES[:1] / 50))
    (among,), (alone,) = pilot_errors(far, VALUES, sizes), pilot_errors(SCORES[:1], VALUES, sizes)
    assert among.error[0] == pytest.approx(alone.error[0], rel=1e-6)
    assert among.halves[:, :, 0] == pytest.approx(alone.halves[:, :, 0], rel=1e-6)


@pytest.mark.parametrize(("spread", "close"), [(1.0, 2e-6), (40.0, 2e-3)])
def test_single_precision_scores_give_the_same_errors(spread: float, close: float) -> None:
    """The tolerance is below the error of the binning, 4e-3 of a square if one token has all the weight."""
    sizes, scores = np.array([4, 16, 60, 120, 1000]), (spread * SCORES).astype(np.float32)
    exact = pilot_errors(scores.astype(float), VALUES, sizes, ATOM)
    for elsewhere in ({}, {"matmul": product, "bags": summed}):
        for found, expected in zip(pilot_errors(scores, VALUES, sizes, ATOM, **elsewhere), exact, strict=True):
            for name in ("error", "output", "whole", "halves", "half_outputs"):
                assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=close), name


def test_invalid_pilots_are_refused() -> None:
    with pytest.raises(InputError, match="expected"):
        pilot_errors(np.zeros((1, 3)), np.zeros((3, 2)), np.array([2]))
    with pytest.raises(InputError, match="sees no token"):
        pilot_errors(np.full((1, 8), -np.inf), np.zeros((8, 2)), np.array([2]))


def predicted(sizes: Array, slope: float = 0.5, spread: float = 0.0) -> PredictedErrors:
    logs = np.tile(np.log(2.0) - slope * np.log(sizes), (201, 1))
    tilt = np.random.default_rng(4).standard_normal(201) * spread
    tilt[0] = 0
    return PredictedErrors(sizes, (logs + tilt[:, None] * np.log(sizes / sizes[0])).astype(np.float32))


def test_a_curve_continues_as_its_pilot_predicts() -> None:
    """Measured with slope 0.3 up to 512, predicted with slope 1/2: beyond, the curve has slope 1/2."""
    sizes = np.array([64, 128, 256, 512])
    rows = np.tile((2 * sizes**-0.3) ** 2, (10, 1)) * np.random.default_rng(5).uniform(0.9, 1.1, (10, 1))
    ahead = predicted(np.array([16.0, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]))
    curve = ErrorCurve.of(sizes, rows, prediction=ahead)
    at_512 = curve.error[-1]
    assert curve.predict(2048)[0] == pytest.approx(at_512 / 2, rel=1e-4)
    low, error, high = curve.predict(2048)[1], curve.predict(2048)[0], curve.predict(2048)[2]
    assert low < error < high
    found = curve.tokens_for(float(at_512) / 2)
    assert found.n == pytest.approx(2048, rel=2e-3)
    assert found.extrapolated
    assert curve.farthest == 8192
    assert curve.tokens_for(1e-3).beyond
    plain = ErrorCurve.of(sizes, rows)
    assert plain.predict(2048)[0] == pytest.approx(at_512 * 4**-0.3, rel=1e-4)


def test_predictions_end_where_their_interval_is_uninformative() -> None:
    sizes = np.array([64, 128, 256, 512])
    rows = np.tile((2 * sizes**-0.5) ** 2, (10, 1)) * np.random.default_rng(5).uniform(0.9, 1.1, (10, 1))
    ahead = predicted(np.array([64.0, 128, 256, 512, 1024, 2048, 4096, 8192]), spread=0.2)
    curve = ErrorCurve.of(sizes, rows, prediction=ahead)
    assert 512 < curve.farthest < 8192  # 1.96 · 0.2 · ln(n/512) reaches ln 2 at n = 5.9 · 512
    assert np.isnan(curve.predict(8192)[0])


def test_pilot_errors_is_public() -> None:
    assert ll.theory.pilot_errors is pilot_errors
