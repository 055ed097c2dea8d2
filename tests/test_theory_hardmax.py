"""Hardmax: its laws, the exact simulation on the line, the general study, and the way to it from softmax."""

import numpy as np
import pytest

from limitlens.errors import InputError
from limitlens.experiments.hardmax import hardmax_line, hardmax_study, softmax_line
from limitlens.measures import Gaussian, Sphere
from limitlens.theory import hardmax

SIZES = (100, 316, 1000, 3162, 10_000, 31_623, 100_000, 316_228, 1_000_000)


def test_laws_against_the_published_measurements():
    measured = {10**2: 0.3302, 10**4: 0.1704, 10**6: 0.1356}
    assert measured[10**4] / hardmax.hardmax_finite(10**4) == pytest.approx(1.003, abs=1e-3)
    assert measured[10**6] / hardmax.hardmax_finite(10**6) == pytest.approx(0.999, abs=1e-3)
    assert measured[10**2] / hardmax.hardmax_finite(10**2) == pytest.approx(1.061, abs=2e-3)
    off = [measured[n] / hardmax.hardmax_asymptotic(n) - 1 for n in measured]
    assert off == pytest.approx([0.45, 0.055, 0.029], abs=0.006)
    assert hardmax.hardmax_finite(1000, scale=3.0) == pytest.approx(3 * hardmax.hardmax_finite(1000))


def test_expected_maximum_of_few_normals():
    assert hardmax.expected_maximum(2) == pytest.approx(1 / np.sqrt(np.pi), rel=1e-12)
    assert hardmax.expected_maximum(3) == pytest.approx(1.5 / np.sqrt(np.pi), rel=1e-12)
    assert hardmax.expected_maximum(100) == pytest.approx(2.5075936, abs=1e-6)


def test_exact_simulation_meets_the_published_values_and_the_finite_law():
    curve = hardmax_line((100, 10_000, 1_000_000), replicates=800)
    assert (curve.stderr / curve.measured < 0.0015).all()
    # The published values carry a sampling error of their own, of about 0.3%.
    assert curve.measured == pytest.approx([0.3302, 0.1704, 0.1356], rel=0.005)
    assert curve.measured[1:] / curve.predicted["finite"][1:] == pytest.approx([1, 1], abs=0.005)


def test_exact_simulation_agrees_with_drawing_every_token():
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(40_000, 50))
    output = np.where(tokens > 0, tokens.max(axis=1, keepdims=True), tokens.min(axis=1, keepdims=True))
    plain = np.abs(output.mean(axis=1))
    fast = hardmax_line((50,), replicates=100)
    noise = np.hypot(plain.std() / 200, fast.stderr[0])
    assert abs(plain.mean() - fast.measured[0]) < 4 * noise


def test_fits_prefer_the_logarithm_for_hardmax_and_the_power_law_below_one():
    hard = hardmax_line(SIZES).rate
    soft = softmax_line(0.5, SIZES).rate
    assert hard.law == "log"
    assert hard.evidence < -10
    assert soft.law == "power"
    assert soft.evidence > 10
    assert soft.slope == pytest.approx(0.5, abs=0.02)


def test_crossover_from_the_power_law_to_the_logarithm(tmp_path):
    curves = [softmax_line(horizon, SIZES[::2], replicates=300) for horizon in (0.5, 2.0, 8.0)]
    curves.append(hardmax_line(SIZES[::2]))
    slopes = [curve.rate.slope for curve in curves]
    assert slopes == sorted(slopes, reverse=True)
    assert (curves[0].rate.law, curves[-1].rate.law) == ("power", "log")
    last = [curve.measured[-1] for curve in curves]
    assert last == sorted(last)  # the error at a million tokens grows with the horizon towards that of hardmax
    from limitlens.report.tail_figures import plot_crossover

    plot_crossover(curves, str(tmp_path / "crossover.png"))
    assert (tmp_path / "crossover.png").stat().st_size > 5000


def test_influence_prediction_beside_softmax():
    curve = softmax_line(0.5, (1000, 10_000), replicates=4000)
    assert curve.measured == pytest.approx(curve.predicted["influence"], rel=0.05)
    assert softmax_line(4.0, (100, 1000), replicates=10).predicted == {}


def test_general_study_agrees_with_the_line_and_with_states():
    torch = pytest.importorskip("torch")
    from limitlens.attention.attend import attend_state
    from limitlens.attention.head import Head
    from limitlens.sampling.streams import IidStream

    law, head, sizes = Gaussian(0.0, 1.0), Head(1.0), (100, 400, 1600)
    curve = hardmax_study(law, head, sizes, replicates=300, queries=400, seed=5)
    assert curve.correction[0] == 1
    assert curve.correction[2] < 1
    line = hardmax_line(sizes)
    assert (np.abs(curve.measured - line.measured) < 4 * np.hypot(curve.stderr, line.stderr)).all()
    tokens = IidStream(law, 5).draw(range(7, 8), 0, 100)[0]
    state = attend_state(tokens, head, tokens, top=1)
    ours = hardmax_study(law, head, (100,), replicates=8, queries=400, seed=5)
    means = [
        attend_state(part, head, part, top=1).hardmax.mean(0)
        for part in (IidStream(law, 5).draw(range(r, r + 1), 0, 100)[0] for r in range(8))
    ]
    assert torch.allclose(means[7], state.hardmax.mean(0))
    centred = torch.stack(means) - torch.stack(means).mean(0)
    assert ours.errors[:, 0] == pytest.approx(centred.norm(dim=-1).numpy() * np.sqrt(8 / 7))


def test_other_laws_are_measured_without_a_formula():
    pytest.importorskip("torch")
    from limitlens.attention.head import Head

    curve = hardmax_study(Sphere(3), Head(np.eye(3)), (100, 1000), replicates=40, queries=500)
    assert curve.predicted == {}
    assert curve.measured[1] < curve.measured[0]
    document = curve.document()
    assert document["predicted"] == {}
    assert document["n"] == [100, 1000]
    assert list(curve.table()["n"]) == [100, 1000]


@pytest.mark.parametrize(
    "call",
    [
        lambda: hardmax.hardmax_finite(1),
        lambda: hardmax.hardmax_asymptotic(float("inf")),
        lambda: hardmax_line((100, 50)),
        lambda: hardmax_line((100,), replicates=1),
        lambda: softmax_line(100.0, (100,)),
    ],
)
def test_bad_input_is_told_in_one_sentence(call):
    with pytest.raises(InputError, match="expected"):
        call()
