"""The commands `theory`, `hardmax` and `tails`: their numbers, and the time they take."""

import json
import subprocess
import sys

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from limitlens.attention.head import Head
from limitlens.cli import main
from limitlens.cli.laws import hardmax, study, tails, theory
from limitlens.errors import InputError
from limitlens.measures import Gaussian, GaussianMixture, Sphere
from limitlens.theory import summary

COMMANDS = typer.Typer()
for command in (theory, study, hardmax, tails):
    COMMANDS.command()(command)


def run(*arguments):
    result = CliRunner().invoke(COMMANDS, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_theory_prints_the_promised_numbers():
    document = json.loads(run("theory", "--measure", "gaussian", "--dim", 1, "--horizon", 1.5, "--n", 30000, "--json"))
    numbers = document["theory"]
    assert numbers["rate_sharp"] == pytest.approx(0.3077, abs=5e-5)
    assert numbers["rate_sharp_output"] == pytest.approx(0.1818, abs=5e-5)
    assert numbers["rate_drawn"] == pytest.approx(0.1538, abs=5e-5)
    assert numbers["rate_proved"] == pytest.approx(0.00685, abs=5e-6)
    assert numbers["coupling"] == pytest.approx(2.25)
    assert {rate["status"] for rate in document["rates"].values()} == {"proved", "verified", "heuristic", "drawn"}
    assert document["inputs"]["n"] == 30000
    flags = [query["interval"]["validity"] for query in document["queries"]]
    assert flags == ["valid", "doubtful", "meaningless", "meaningless"]
    assert document["uniform"]["uniform_gaussian"]["useful_from"] == pytest.approx(3.25 * np.exp(2.25))
    assert document["hardmax"]["finite"]["predicted"] == pytest.approx(0.1589, abs=1e-4)


def test_theory_loads_nothing_heavy():
    """So that it answers in two seconds; `make bench` has the time."""
    code = (
        "import sys, typer; from limitlens.cli.laws import theory\n"
        "try: typer.run(theory)\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'pandas', 'transformers', 'matplotlib', 'scipy.stats'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    call = [sys.executable, "-c", code, "--horizon", "1.5", "--n", "30000", "--json"]
    result = subprocess.run(call, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["theory"]["horizon"] == 1.5
    assert result.stderr == "[]\n"


def test_theory_page_is_for_people(tmp_path):
    page = run("theory", "--horizon", 0.5, "--sizes", "100:10000:3", "--out", tmp_path / "run")
    for words in ("Rates", "Constants", "Predicted errors", "Uniform error", "reaches 1 at", "Hardmax", "verified"):
        assert words in page
    made = json.loads((tmp_path / "run" / "run.json").read_text())
    assert made["command"] == "theory"
    assert made["result"]["curve"]["n"] == [100, 1000, 10000]


@pytest.mark.parametrize("horizon", [0.0, 0.5, 1.0, 5.0, 50.0])
@pytest.mark.parametrize("dim", [1, 8])
def test_theory_answers_at_every_horizon(horizon, dim):
    document = json.loads(run("theory", "--horizon", horizon, "--dim", dim, "--n", 1000, "--json"))
    assert document["theory"]["horizon"] == pytest.approx(horizon, abs=1e-12)
    output = document["curve"]["output"]["predicted"][0]
    assert output > 0
    assert (document["constants"] is None) == (document["theory"]["horizon"] >= 1)


def test_theory_of_other_laws_claims_less():
    document = summary(Sphere(3), 3 * np.eye(3), 1000).document()
    assert document["rates"]["rate_sharp"]["status"] == "heuristic"
    assert document["rates"]["rate_compact"] == {
        **document["rates"]["rate_compact"],
        "predicted": 0.5,
        "status": "proved",
    }
    assert "curve" not in document
    assert document["queries"][0]["rms_error_bound"]["predicted"] < np.inf
    assert any("Gaussian" in warning for warning in document["warnings"])
    mixture = GaussianMixture([0.5, 0.5], [[-1.0], [1.0]], 1.0)
    assert summary(mixture, 0.3, 1000).document()["queries"][0]["rms_error"]["predicted"] > 0


def test_hardmax_of_few_tokens_is_heuristic():
    for n, status in ((100, "heuristic"), (1000, "verified")):
        assert summary(Gaussian(0.0, 1.0), 1.5, n).document()["hardmax"]["finite"]["status"] == status


def test_a_study_of_another_law_uses_the_rate_of_its_variance_proxy():
    import limitlens as ll

    mixture = GaussianMixture([0.99, 0.01], [[0.0], [0.0]], [0.5, 50.0])
    found = ll.study(mixture, ll.Head(0.3), sizes=[16, 32, 64], replicates=4, seed=0).theory
    assert found["coupling"] == pytest.approx(0.0891, abs=1e-4)
    assert found["rate_proved"] == pytest.approx(1 / (2 * (1 + 32 * 225)))


def test_a_study_of_bounded_tokens_says_whether_its_rate_is_reached():
    import limitlens as ll

    sizes = {"sizes": [8, 16, 32], "replicates": 4, "queries": 8}
    far = ll.study(Sphere(50), ll.designed_head(Sphere(50), 1.0), **sizes, mask_self=True)
    assert (far.theory["rate_compact"], np.isnan(far.theory["rate_proved"])) == (0.5, True)
    assert any("not reached here" in warning for warning in far.warnings)
    table = next(section for section in far.view().sections if section.title == "Rates").blocks[0]
    assert table.columns[5] == "proved at least (asymptotically)"
    assert [row[5] for row in table.rows] == [0.5] * 3
    near = ll.study(ll.Sample(np.random.default_rng(0).normal(size=(64, 1))), ll.Head(0.1), **sizes)
    assert not any("not reached" in warning for warning in near.warnings)
    assert any("empirical law" in note for note in near.notes)


def test_law_and_head_are_given_by_numbers(tmp_path):
    found = json.loads(run("theory", "--mean", 3, "--matrix", 0.5, "--n", 1000, "--json"))
    assert found["constants"]["mean"]["predicted"] == pytest.approx(106.354, abs=1e-3)
    found = json.loads(run("theory", "--covariance", "9,.1", "--matrix", "0,5", "--json"))["theory"]
    assert (found["coupling"], found["horizon"]) == pytest.approx((22.5, 0.5))
    np.save(tmp_path / "A.npy", [[0.0, 1.0], [0.0, 0.0]])
    found = json.loads(run("theory", "--matrix", tmp_path / "A.npy", "--mean", -1, "--covariance", 4, "--json"))
    assert found["theory"]["horizon"] == pytest.approx(4)
    assert found["theory"]["mean_tilt"] == pytest.approx(2)
    assert json.loads(run("theory", "--dim", 3, "--spectrum", "2,1,0", "--json"))["theory"][
        "frobenius"
    ] == pytest.approx(np.sqrt(1.25))
    options = ("--mean", "1,0", "--matrix", "0.5", "--sizes", "10,20,40", "--replicates", 4, "--queries", 4)
    document = json.loads(run("study", *options, "--json"))
    assert document["measure"] == "Gaussian(dim=2, mean=[1, 0], covariance=1)"
    assert document["theory"]["mean_tilt"] == pytest.approx(0.5)


def test_theory_warns_of_self_dominance_and_offers_the_flag(capsys):
    from limitlens.cli.common import warn

    law = Gaussian(np.zeros(50), 1.0)
    found = summary(law, 0.3 * np.eye(50), 500).warnings
    assert len(found) == 1
    assert "pass mask_self=True" in found[0]
    warn(found, quiet=False)
    assert "pass --mask-self" in capsys.readouterr().err
    assert summary(law, 0.3 * np.eye(50), 500, mask_self=True).warnings == []


def test_theory_of_a_head_counts_its_values():
    law = Gaussian(0.0, 4.0)
    plain = summary(law, 0.2, 1000).document()
    scaled = summary(law, Head(0.2, V=3.0), 1000).document()
    assert scaled["theory"] == plain["theory"]
    for name in ("output", "mean", "averaged"):
        assert scaled["curve"][name]["predicted"] == pytest.approx(3 * plain["curve"][name]["predicted"])
    for name in ("covariance",):
        assert scaled["curve"][name]["predicted"] == pytest.approx(9 * plain["curve"][name]["predicted"])
    ratio = {"mean": 9, "covariance": 81}
    for name, factor in ratio.items():
        assert scaled["constants"][name]["predicted"] == pytest.approx(factor * plain["constants"][name]["predicted"])
    assert scaled["curve"]["relative_output"]["predicted"] == pytest.approx(
        plain["curve"]["relative_output"]["predicted"]
    )
    with pytest.raises(InputError, match="bias; expected"):
        summary(law, Head.from_projections([[1.0]], [[1.0]], query_bias=[1.0]), 1000)


def test_hardmax_prints_measured_and_predicted_errors_and_the_evidence(tmp_path):
    document = json.loads(run("hardmax", "--sizes", "100:1000000:9", "--json"))
    curve = document["hardmax"]
    assert [curve["n"][j] for j in (0, 4, 8)] == [100, 10_000, 1_000_000]
    assert [curve["measured"][j] for j in (0, 4, 8)] == pytest.approx([0.3302, 0.1704, 0.1356], rel=0.005)
    ratio = np.array(curve["measured"][4:]) / np.array(curve["predicted"]["finite"]["value"][4:])
    assert ratio == pytest.approx(np.ones(5), abs=0.005)
    assert curve["predicted"]["asymptotic"]["status"] == "proved"
    assert curve["rate"]["law"] == "log"
    (soft,) = document["softmax"]
    assert soft["rate"]["law"] == "power"
    page = run("hardmax", "--sizes", "100:1000000:5", "--replicates", 100, "--plot", "--out", tmp_path)
    assert "log (-" in page
    assert "power (+" in page
    assert {"run.json", "hardmax.csv", "hardmax.parquet", "hardmax.png", "hardmax.pdf"} <= {
        path.name for path in tmp_path.iterdir()
    }


def test_hardmax_in_higher_dimensions_has_a_formula_for_equal_singular_values():
    document = json.loads(
        run("hardmax", "--dim", 2, "--sizes", "50:800:3", "--replicates", 20, "--queries", 200, "--json")
    )
    assert document["hardmax"]["predicted"]["isotropic"]["status"] == "heuristic"  # from 50 tokens on
    assert document["softmax"] == []
    assert len(document["hardmax"]["measured"]) == 3


def test_tails_judges_a_file_and_shows_the_end_of_the_limit(tmp_path):
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).standard_t(2, size=(5000, 2)))
    verdict = json.loads(run("tails", "--sample", tmp_path / "tokens.npy", "--json"))
    assert verdict["verdict"] == "power tail"
    assert "remedy" in verdict
    assert "K(s u)" in run("tails", "--sample", tmp_path / "tokens.npy")
    document = json.loads(run("tails", "--tilts", "0.4,2", "--sizes", "100:10000:3", "--replicates", 50, "--json"))
    kinds = [tilt["existence"] for tilt in document["tilts"]]
    assert kinds == ["limit with a central limit theorem", "no limit"]
    page = run(
        "tails", "--tilts", "2", "--sizes", "100:1000:2", "--replicates", 20, "--plot", "--out", tmp_path / "run"
    )
    assert "no limit" in page
    assert {"run.json", "tails.csv", "tails.png"} <= {path.name for path in (tmp_path / "run").iterdir()}


def test_predicted_curve_lies_on_the_measured_one():
    import limitlens as ll
    from limitlens.theory.curve import output_error

    curve = ll.study(ll.Gaussian(0.0, 1.0), ll.Head(1.5), sizes=[200, 800, 3200], replicates=400, seed=1)
    predicted = output_error([[1.0]], [[1.5]], curve.sizes)
    output = curve.errors["output"]
    assert output.error / predicted == pytest.approx(np.ones(3), abs=4 * float((output.stderr / output.error).max()))


@pytest.mark.parametrize(
    "arguments",
    [
        ("theory", "--n", 1),
        ("theory", "--horizon", -1),
        ("theory", "--error", 0),
        ("theory", "--measure", "cauchy"),
        ("theory", "--radius", -2),
        ("theory", "--mean", "one"),
        ("theory", "--mean", "1,2", "--matrix", "1,2,3"),
        ("theory", "--mean", "1,2", "--dim", 3),
        ("theory", "--mean", 1, "--measure", "sphere"),
        ("theory", "--matrix", 1, "--horizon", 2),
        ("theory", "--matrix", "nowhere.npy"),
        ("theory", "--dim", 2, "--spectrum", "1,-1"),
        ("study", "--matrix", 1, "--horizons", "1,2"),
        ("study", "--sample", "tokens.npy", "--mean", 1),
        ("hardmax", "--sizes", "10:1"),
        ("hardmax", "--replicates", 1),
        ("tails", "--law", "cauchy"),
        ("tails", "--sample", "nowhere.npy"),
        ("tails", "--sample", "nowhere.npy", "--plot"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(arguments):
    with pytest.raises(InputError, match="expected"):
        run(*arguments)


def test_a_bound_beyond_the_range_of_floats_is_shown_as_a_power_of_ten(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["theory", "--dim", "2", "--horizon", "2", "--radius", "40", "--n", "10000"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "uniform_exponential" in line]
    power = 40**2 * 4 / np.log(10)  # e^{R²‖Σ^{1/2}A‖²}, here H = 2
    superscript = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
    for exponent in (power, power - 2, 2 * power):  # the constant, at n = 10⁴, and the n at which it is 1
        assert f"10{str(round(exponent)).translate(superscript)}" in line
    assert "∞" not in line


def test_hardmax_takes_a_law_and_a_matrix_in_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--sizes", "50,100,200", "--replicates", "4", "--queries", "16", "--json")
    with pytest.raises(SystemExit) as stopped:
        main(["hardmax", "--mean", "3,0", "--covariance", "1,4", "--matrix", "0.5,2", *small])
    document = json.loads(capsys.readouterr().out)
    assert stopped.value.code == 0
    assert document["inputs"]["dim"] == 2
    assert document["inputs"]["A"] == [[0.5, 0.0], [0.0, 2.0]]
    assert document["hardmax"]["predicted"] == {}
