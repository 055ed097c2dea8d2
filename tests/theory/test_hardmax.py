"""Hardmax: its laws, the exact simulation in d = 1, the general study, and the transition from softmax."""

import numpy as np
import pytest

import limitlens as ll
from limitlens.errors import InputError
from limitlens.experiments.hardmax import Hardmax, HardmaxCurve, hardmax_line, hardmax_study, softmax_line
from limitlens.experiments.hardmax import hardmax as measure_hardmax
from limitlens.measures import Gaussian, Sphere
from limitlens.measures.named import named_measure
from limitlens.record import to_json
from limitlens.theory import hardmax
from limitlens.theory._summary import summary
from limitlens.theory.hardmax import hardmax_isotropic
from limitlens.theory.prediction import Status

SIZES = (100, 316, 1000, 3162, 10_000, 31_623, 100_000, 316_228, 1_000_000)


def test_laws_against_the_published_measurements():
    measured = {10**2: 0.3302, 10**4: 0.1704, 10**6: 0.1356}
    assert measured[10**4] / hardmax.hardmax_finite(10**4) == pytest.approx(1.003, abs=1e-3)
    assert measured[10**6] / hardmax.hardmax_finite(10**6) == pytest.approx(0.999, abs=1e-3)
    assert measured[10**2] / hardmax.hardmax_finite(10**2) == pytest.approx(1.061, abs=2e-3)
    off = [measured[n] / hardmax.hardmax_asymptotic(n) - 1 for n in measured]
    assert off == pytest.approx([0.45, 0.055, 0.029], abs=0.006)
    assert hardmax.hardmax_finite(1000, scale=3.0) == pytest.approx(3 * hardmax.hardmax_finite(1000))


def test_the_finite_law_is_heuristic_below_a_thousand_tokens():
    rng = np.random.default_rng(0)
    for n, replicates, above, below in ((10, 40_000, 1.174, 0.779), (100, 20_000, 1.058, 0.940)):
        tokens = rng.normal(size=(replicates, n))
        largest, smallest = tokens.max(axis=1, keepdims=True), tokens.min(axis=1, keepdims=True)
        for sign, ratio in ((1, above), (-1, below)):
            measured = np.abs(np.where(sign * tokens > 0, largest, smallest).mean(axis=1)).mean()
            assert measured / hardmax.hardmax_finite(n) == pytest.approx(ratio, abs=0.02)
        assert hardmax.finite_status(n) is Status.HEURISTIC
    assert hardmax.finite_status(1000) is Status.VERIFIED
    assert hardmax_line((100, 10_000), replicates=4).predicted["finite"].status is Status.HEURISTIC
    assert hardmax_line((1000, 10_000), replicates=4).predicted["finite"].status is Status.VERIFIED


def test_expected_maximum_of_few_normals():
    assert hardmax.extremes(2)[0] == pytest.approx(1 / np.sqrt(np.pi), rel=1e-12)
    assert hardmax.extremes(3)[0] == pytest.approx(1.5 / np.sqrt(np.pi), rel=1e-12)
    assert hardmax.extremes(100)[0] == pytest.approx(2.5075936, abs=1e-6)


def test_exact_simulation_meets_the_published_values_and_the_finite_law():
    curve = hardmax_line((100, 10_000, 1_000_000), replicates=800)
    error = curve.measured
    assert (curve.stderr / error < 0.0015).all()
    # The published values carry a sampling error of their own, of about 0.3%.
    assert error == pytest.approx([0.3302, 0.1704, 0.1356], rel=0.005)
    assert error[1:] / curve.predicted["finite"].value[1:] == pytest.approx([1, 1], abs=0.005)


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
    Hardmax({"measure": "gaussian", "dim": 1}, curves[-1], tuple(curves[:-1])).plot(tmp_path / "crossover.png")
    assert (tmp_path / "crossover.png").stat().st_size > 5000


def test_softmax_lines_have_the_influence_prediction():
    curve = softmax_line(0.5, (1000, 10_000), replicates=4000)
    assert curve.measured == pytest.approx(curve.predicted["influence"].value, rel=0.05)
    assert softmax_line(4.0, (100, 1000), replicates=10).predicted == {}


def test_general_study_agrees_with_the_line_and_with_dense_argmax():
    torch = pytest.importorskip("torch")
    from limitlens.attention.head import Head
    from limitlens.sampling.streams import IidStream

    law, head, sizes = Gaussian(0.0, 1.0), Head(1.0), (100, 400, 1600)
    curve = hardmax_study(law, head, sizes, replicates=300, queries=400, seed=5)
    assert curve.finite_population_correction[0] == 1
    assert curve.finite_population_correction[2] > 1
    line = hardmax_line(sizes)
    assert (np.abs(curve.error - line.measured) < 4 * np.hypot(curve.stderr, line.stderr)).all()
    ours = hardmax_study(law, head, (100,), replicates=8, queries=400, seed=5)
    samples = (IidStream(law, 5).draw(range(r, r + 1), 0, 100)[0] for r in range(8))
    means = [tokens[(tokens @ tokens.T).argmax(1)].mean(0) for tokens in samples]
    centred = torch.stack(means) - torch.stack(means).mean(0)
    assert ours.error_moments[0, :, 0] == pytest.approx(centred.norm(dim=-1).numpy() * np.sqrt(8 / 7))


def test_other_laws_are_measured_without_a_formula():
    pytest.importorskip("torch")
    from limitlens.attention.head import Head

    errors = hardmax_study(Sphere(3), Head(np.eye(3)), (100, 1000), replicates=40, queries=500)
    curve = HardmaxCurve.of("hardmax", errors)
    assert curve.predicted == {}
    assert curve.measured[1] < curve.measured[0]
    document = to_json(curve)
    assert document["predicted"] == {}
    assert document["n"] == [100, 1000]
    assert list(Hardmax({"measure": "sphere", "dim": 3}, curve, ()).table["n"]) == [100, 1000]


def test_the_formula_is_for_tokens_of_mean_zero():
    """With N(3, 1) nearly all outputs are the largest token, so E|mean output| is 6.24 at n = 1,000."""
    assert 3 + hardmax.extremes(1000)[0] == pytest.approx(6.24, abs=0.005)
    assert hardmax.hardmax_finite(1000) == pytest.approx(0.21, abs=0.001)
    assert "hardmax" in summary(Gaussian(0.0, 1.0), [[0.5]], 1000).predicted
    assert "hardmax" not in summary(Gaussian(3.0, 1.0), [[0.5]], 1000).predicted


def test_the_result_names_its_matrix_and_its_error():
    from limitlens.attention.head import Head, designed_head

    options = {"measure": "vmf", "dim": 2, "replicates": 8, "queries": 50, "seed": 3}
    drawn = measure_hardmax([50, 100, 200], **options)
    assert drawn.inputs["matrix"] == "Σ^(−1/2) R Σ^(−1/2), R a random rotation of seed 3"
    assert "R a random rotation of seed 3" in drawn.view().verdict[0]
    law = named_measure("vmf", 2)
    assert drawn.inputs["A"] == designed_head(law, 1.0, seed=3).A.tolist()
    given = measure_hardmax([50, 100, 200], head=Head(np.eye(2)), **options)
    assert given.inputs["A"] == [[1.0, 0.0], [0.0, 1.0]]
    assert given.inputs["matrix"] == "that of the head given"
    plain = hardmax_study(law, Head(np.eye(2)), (50, 100, 200), replicates=8, queries=50, seed=3)
    assert given.hardmax.measured == pytest.approx(plain.error)
    (figure, *_, table) = given.view().sections[0].blocks
    # The mean output of von Mises-Fisher tokens is not 0: what falls is its scatter.
    assert given.inputs["error"] == figure.y.label == table.title == "E|mean output − its expectation|"
    line = measure_hardmax([50, 100, 200], replicates=4)
    assert (line.inputs["error"], line.inputs["A"]) == ("E|mean output|", [[1.0]])
    with pytest.raises(InputError, match="dimension 2 and the head 3; expected the same"):
        measure_hardmax([50, 100], head=Head(np.eye(3)), **options)


def test_no_law_is_named_where_the_evidence_does_not_decide():
    """Three sizes close together tell a power law from a logarithm by little: document, view and figure say so."""
    result = measure_hardmax("1000:3000:3", horizons=[0.5], replicates=30)
    (soft,) = result.softmax
    assert soft.rate.law == "undecided"
    assert result.document()["softmax"][0]["rate"]["verdict"] == "undecided"
    figure, laws, _ = result.view().sections[0].blocks
    assert "softmax, H = 0.5 (law: undecided)" in [series.name for series in figure.series]
    assert laws.rows[0][-1].startswith("undecided (")
    decided = measure_hardmax(SIZES, horizons=[0.5], replicates=100)
    assert decided.view().sections[0].blocks[1].rows[1][-1].startswith("log (-")
    assert "follows a logarithm" in decided.view().verdict[1]


def test_a_saved_result_is_read_back(tmp_path):
    from limitlens.record import json_text, read_run

    made = measure_hardmax((100, 300, 1000), horizons=[0.5, 4.0], replicates=20, seed=3)
    made.save(tmp_path)
    read = Hardmax.load(read_run(tmp_path))
    assert json_text(read.document()) == json_text(made.document())
    assert read.view() == made.view()
    assert "Hardmax on gaussian tokens" in str(read)
    assert len(repr(read)) < 200


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
def test_bad_input_is_refused_in_one_sentence(call):
    with pytest.raises(InputError, match="expected"):
        call()


@pytest.mark.parametrize("dim", [2, 3])
def test_the_law_in_several_dimensions_meets_simulation(dim):
    """Drawn tokens that are their own queries, with a rotation that has no trace, against the law."""
    rng, n, sets = np.random.default_rng(dim), 1000, 300
    rotation = np.roll(np.eye(dim, dtype=np.float32), 1, 0)
    means = []
    for _ in range(sets):
        tokens = rng.standard_normal((n, dim), dtype=np.float32)
        means.append(tokens[np.argmax(tokens @ rotation @ tokens.T, axis=1)].mean(axis=0))
    size = np.linalg.norm(means, axis=1)
    assert size.mean() == pytest.approx(hardmax_isotropic(n, np.eye(dim)), abs=3.5 * size.std() / np.sqrt(sets))


def test_the_law_falls_with_the_power_of_the_logarithm():
    """(ln n)^{−(d+1)/4}, approached slowly: local slopes between n = 1e30 and 1e90."""
    sizes = np.array([1e30, 1e90])
    for dim in (2, 3):
        found = [hardmax_isotropic(n, np.eye(dim)) for n in sizes]
        slope = -np.diff(np.log(found))[0] / np.diff(np.log(np.log(sizes)))[0]
        assert slope == pytest.approx((dim + 1) / 4, rel=0.03)


def test_several_dimensions_have_a_prediction_or_say_that_none_is_known():
    found = ll.hardmax([100, 1000, 3000], dim=3, replicates=20, queries=256)
    line = found.hardmax.predicted["isotropic"]
    assert line.status.value == "heuristic"  # it begins below 1,000
    assert line.value[1] == pytest.approx(0.2791, abs=2e-3)
    assert "No formula is known" not in str(found)
    other = ll.hardmax([100, 1000, 3000], dim=3, head=ll.Head(np.diag([3.0, 1.0, 1.0])), replicates=4, queries=64)
    assert not other.hardmax.predicted
    assert "No formula is known" in str(other)
