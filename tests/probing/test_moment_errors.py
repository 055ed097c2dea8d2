"""Mean, covariance and argmax errors of real heads: by definition, unbiased, ranked against their own exponents."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from head_cases import curve_of, head_record, replicate_rows
from limitlens.attention.kernels import peak_over
from limitlens.attention.state import Peak
from limitlens.probing.moment_errors import MIN_SNR, OutputMoments
from limitlens.probing.overview import PREDICTORS, rate_skill, rate_skills
from limitlens.theory import rates

WINDOWS, EACH, DIM = 24, 8, 3


def test_squares_are_those_of_pairs_from_different_windows() -> None:
    """The sum over pairs of windows, by brute force, clusters of unequal size and two heads side by side."""
    rng = np.random.default_rng(0)
    clusters = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])
    limit, output = rng.normal(size=(2, 10, DIM)), rng.normal(size=(4, 2, 10, DIM))
    moments = OutputMoments(torch.tensor(limit).flatten(0, 1), clusters, 4, 1)
    moments.add(slice(0, 4), slice(0, 1), torch.tensor(output - limit).flatten(1, 2)[None])
    mean, covariance = (found.squares[..., 0].mean(1) for found in moments.squares())  # (heads, replicates)

    def product(terms: np.ndarray) -> float:
        pairs = [(x, y) for x in range(10) for y in range(10) if clusters[x] != clusters[y]]
        return float(np.mean([(terms[x] * terms[y]).sum() for x, y in pairs]))

    for r in range(4):
        for head in range(2):
            Y, G = output[r, head], limit[head]
            assert mean[head, r] == pytest.approx(product(Y - G), rel=1e-4, abs=1e-6)
            Yc, Gc = Y - Y.mean(0), G - G.mean(0)
            outer = Yc[:, :, None] * Yc[:, None] - Gc[:, :, None] * Gc[:, None]
            assert covariance[head, r] == pytest.approx(product(outer), rel=1e-4, abs=1e-5)
    scales = [found.scale[:, 0] for found in moments.squares()]
    np.testing.assert_allclose(scales[0], np.linalg.norm(limit.mean(1), axis=-1), rtol=1e-6)
    np.testing.assert_allclose(scales[1], [np.linalg.norm(np.cov(head.T, bias=True)) for head in limit], rtol=1e-5)


@pytest.mark.parametrize(("shared", "low", "high"), [(0.3, 1.0, 1.5), (2.0, 0.85, 1.15)])
def test_query_noise_adds_nothing_on_average_and_its_scatter_is_known(shared: float, low: float, high: float) -> None:
    """Errors of the mean that all queries share, and noise that those of a window share.

    Below the noise the plain square is off several times over, and the scatter that windows tell is on the safe side.
    """
    rng, draws = np.random.default_rng(1), 500
    noise = np.repeat(rng.normal(size=(draws, WINDOWS, DIM)) * 1.5, EACH, axis=1)
    errors = torch.tensor(noise + rng.normal(size=noise.shape) + shared / np.sqrt(DIM))
    moments = OutputMoments(torch.tensor(noise[0]), np.repeat(np.arange(WINDOWS), EACH), draws, 1)
    moments.add(slice(0, draws), slice(0, 1), errors[None])
    rows = moments.squares()[0].squares[0, :, :, 0]  # (windows, draws)
    found, told = rows.mean(0), rows.std(0, ddof=1) / np.sqrt(WINDOWS)
    plain = errors.mean(1).square().sum(-1).numpy()
    stderr = np.std(found) / np.sqrt(draws)
    assert abs(np.mean(found) - shared**2) < 3 * stderr
    assert np.mean(plain) - shared**2 > 3 * stderr
    assert low < np.sqrt(np.mean(np.square(told))) / np.std(found) < high


def test_sizes_at_the_level_of_noise_are_not_fitted() -> None:
    errors = np.array([0.8, 0.4, 0.2, 0.1, 0.05])
    rows = np.concatenate((replicate_rows(errors[:4]), replicate_rows(errors[4:], stderr=0.5)), axis=1)
    curve = replace(curve_of(rows), min_snr=MIN_SNR)
    assert curve.rate is not None
    assert curve.rate.used == (64, 128, 256, 512)
    assert curve.rate.slope == pytest.approx(1, abs=0.02)


def test_one_window_of_queries_says_nothing() -> None:
    moments = OutputMoments(torch.zeros(4, 2, dtype=torch.float64), np.zeros(4, int), 1, 1)
    moments.add(slice(0, 1), slice(0, 1), torch.ones(1, 1, 4, 2, dtype=torch.float64))
    assert np.isnan(moments.squares()[0].squares).all()


def test_a_peak_in_pieces_is_the_largest_score() -> None:
    rng = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(2, n, 4, generator=rng) for n in (5, 40, 40))
    found = peak_over(query, key, value, None, scores_at_once=30).merge(Peak.empty((2,), 5, 4, like=value))
    best = (query @ key.mT).argmax(-1)
    torch.testing.assert_close(found.value, torch.stack([value[h][best[h]] for h in range(2)]))


def test_every_kind_of_rate_is_ranked_against_exponents_of_its_kind() -> None:
    """Heads whose moments follow the sharp law of moments and whose outputs follow that of outputs."""
    n = np.array([64.0, 256, 1024, 4096])
    heads = []
    for place, horizon in enumerate((0.8, 1.2, 1.6, 2.4)):
        moment = curve_of(n ** -rates.rate_rms(horizon), (64, 256, 1024, 4096))
        output = n ** -rates.rate_rms_output(horizon)
        moment_curves = {"mean": moment, "covariance": moment}
        made = {"sizes": moment.sizes, "horizon": horizon, "coupling": 1.5 * horizon**2, "moment_curves": moment_curves}
        heads.append(head_record(0, place, errors=output, **made))
    skill = rate_skills(heads)
    assert not {"rate_sharp", "rate_rms", "rate_drawn", "rate_proved"} & skill["predictors"].keys()
    assert skill["predictors"]["rate_rms_output"]["mean_absolute_miss"] < 0.02
    for kind in ("mean", "covariance"):
        found = skill["moments"][kind]["predictors"]
        assert found.keys() == {*PREDICTORS[kind], "rate_constant", "rate_best_constant"}
        assert found["rate_rms"]["mean_absolute_miss"] < 0.005 < found["rate_sharp"]["mean_absolute_miss"]
        assert found["rate_rms"]["rank_correlation"] == pytest.approx(1)
        assert found["rate_proved"]["status"] == "heuristic"  # Ψ of the covariance is no variance proxy
        assert found["rate_drawn_coupling"]["status"] == "drawn"
        assert found["rate_proved"]["at_least_as_fast"] == 1
        drawn = [rates.rate_drawn_coupling(head.coupling) for head in heads]
        slopes = [head.moment_curves[kind].rate.slope for head in heads]
        miss = np.abs(np.subtract(drawn, slopes)).mean()
        assert found["rate_drawn_coupling"]["mean_absolute_miss"] == pytest.approx(miss)
        assert found["rate_best_constant"]["mean_absolute_miss"] <= found["rate_constant"]["mean_absolute_miss"]
    assert rate_skill([head_record(0, 0, errors=output, sizes=moment.sizes, moment_curves={})], "mean")["heads"] == 0
