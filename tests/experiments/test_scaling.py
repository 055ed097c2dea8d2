"""`limitlens scaling` from end to end: documents with predictions, measurements and p-values; figures; bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import special

from limitlens.cli import main
from limitlens.experiments.heat_flow import heat_flow
from limitlens.experiments.scaling import scaling, scaling_limits
from limitlens.experiments.schedules import schedules
from limitlens.theory import VonMisesFisherGap, critical_beta, uniform


def scaling_document(*arguments: Any, **options: Any) -> dict[str, Any]:
    return scaling_limits(*arguments, **options).document()


def run(capsys: pytest.CaptureFixture[str], *arguments: str, command: str = "scaling") -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([command, *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def z(entry: dict[str, float], against: str) -> float:
    return abs(entry["measured"] - entry[against]) / entry["stderr"]


def test_the_command_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--dim", "5", "--n", "10000", "--theta", "1", "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["inputs"]["beta"] == pytest.approx(critical_beta(10_000, uniform(5)))
    shared = document["quantities"]["participation"]
    assert shared["predicted"] == pytest.approx(0.2033, abs=5e-5)
    assert shared["exact"] == pytest.approx(0.2044, abs=5e-5)
    assert shared["stderr"] < 0.003
    for name, entry in document["quantities"].items():
        assert entry["status"] == "verified"
        assert z(entry, "predicted" if name == "keys_holding_90" else "exact") < 4, name
    for name in ("top_weight", "participation", "output_gap", "output_tangential"):
        assert document["laws"][name]["p"] > 0.01, name
    assert document["laws"]["output_gaussian"]["p"] < 1e-3  # no Gaussian at the critical scale
    assert document["regime"] == "selective"


def test_ordered_weights_fall_with_the_rank_and_follow_the_limit() -> None:
    """At the β where 400, 5 and 1.05 keys share the mass, ever more of it lies on one key."""
    law, tops = uniform(5), []
    for beta in (4.528, 53.26, 1425.8):
        made = scaling_limits(law, 2000, beta=beta, replicates=100)
        found = [row.measured.value for row in made.ordered_weights]
        assert found == sorted(found, reverse=True)
        assert len(found) == 32
        top = made.ordered_weights[0]
        assert top.measured.value == pytest.approx(made.quantities["top_weight"].exact, abs=5 * top.measured.stderr)
        tops.append(top.measured.value)
    assert tops[0] < 0.02 < 0.2 < tops[1] < 0.6 < 0.9 < tops[2]
    critical = scaling_limits(law, 10_000, theta=1.0, replicates=200)
    for row in critical.ordered_weights[:8]:
        assert abs(row.measured.value - row.predicted) < 5 * row.measured.stderr
    assert len(scaling_limits(uniform(3), 20, theta=1.0, replicates=20).ordered_weights) == 20


def test_averaging_side() -> None:
    document = scaling_document(uniform(5), 10_000, theta=200.0, replicates=1000, seed=1)
    side = document["averaging"]
    assert document["applies"] == {"averaging": True, "collapse": False}
    assert document["regime"] == "averaging"
    for name in ("mean", "bias", "radial_variance", "tangential_variance"):
        assert z(side[name], "predicted") < 3.5, name
    assert side["effective_sample_size"]["measured"] == pytest.approx(
        side["effective_sample_size"]["predicted"], rel=0.01
    )
    assert document["laws"]["output_gaussian"]["p"] > 0.01  # Gaussian from θ of about 100


def test_collapse_side() -> None:
    document = scaling_document(uniform(3), 10_000, theta=0.01, replicates=4000, seed=2)
    side = document["collapse"]
    assert document["applies"] == {"averaging": False, "collapse": True}
    assert document["regime"] == "frozen"
    assert z(side["nearest_distance"], "predicted") < 3.5
    assert z(side["one_minus_top_weight"], "predicted") < 3.5


def test_circle_has_no_collapse_formula_but_exact_values() -> None:
    document = scaling_document(uniform(2), 1000, beta=1e8, replicates=200)
    assert "one_minus_top_weight" not in document["collapse"]
    assert z(document["quantities"]["top_weight"], "exact") < 4


def test_off_axis_law_at_ten_billion_keys() -> None:
    document = scaling_document(VonMisesFisherGap(5, 3.0, 0.5), 10**10, theta=1.0, replicates=1000, seed=3)
    assert document["method"] == "nearest keys"
    assert document["replaced_mass"] < 1e-9
    assert "output_tangential" not in document["laws"]
    assert document["laws"]["top_weight"]["p"] > 0.01


def test_limit_is_far_away_in_high_dimension() -> None:
    """θ = 1 in dimension 64 averages over ten thousand keys; the exact values say so and the document warns."""
    document = scaling_document(uniform(64), 100_000, theta=1.0, replicates=100)
    shared = document["quantities"]["participation"]
    assert shared["exact"] / shared["predicted"] > 1e5
    assert z(shared, "exact") < 3.5
    assert document["regime"] == "averaging"
    assert "trust the exact values" in document["warnings"][0]


def test_a_selective_head_beyond_the_critical_n_is_not_said_to_have_stopped_selecting() -> None:
    """θ = 1 is at 1,000 keys, and the regime still selective at 5,000, where ten keys share the mass."""
    made = scaling_limits(uniform(3), 5000, beta=500, replicates=50)
    assert made.regime == "selective"
    assert made.control["critical_n"].predicted == pytest.approx(1000, rel=1e-6)
    advice = made.view().verdict[2]
    assert "stops selecting" not in advice
    assert "the critical scale, θ = 1, is at about 1000 keys" in advice


def test_pages_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--dim", "4", "--replicates", "200")
    assert code == 0
    assert "local exponent 3" in out
    assert "0.2952" in out
    code, out, _ = run(capsys, "--theta", "100", "--replicates", "50")
    assert "Formulas of the averaging side" in out
    code, out, _ = run(capsys, "--sizes", "4096:65536:2", "--dim", "9", command="schedules")
    assert "yarn" in out
    code, out, _ = run(capsys, "--n", "500", command="heat-flow")
    assert "grew to 0.610671; the backward heat equation at t = 0.2 predicts 0.610701" in " ".join(out.split())


def test_run_folder_and_figure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, _, _ = run(capsys, "--replicates", "20", "--n", "500", "--plot", "--out", str(folder))
    assert code == 0
    assert json.loads((folder / "run.json").read_text())["result"]["inputs"]["n"] == 500
    assert (folder / "scaling.png").stat().st_size > 20_000
    assert (folder / "scaling.pdf").exists()
    table = pd.read_parquet(folder / "scaling.parquet").set_index(["part", "quantity"])
    assert table.loc[("quantities", "participation"), "predicted"] == pytest.approx(0.2033, abs=5e-5)
    code, _, err = run(capsys, "--replicates", "20", "--n", "500", "--out", str(folder), "--device", "cuda")
    assert code == 0
    assert "ignored" in err
    flow, compared = tmp_path / "flow", tmp_path / "schedules"
    code, _, _ = run(capsys, "--layers", "10", "--n", "500", "--out", str(flow), command="heat-flow")
    assert code == 0
    assert len(pd.read_csv(flow / "heat_flow.csv")) == 11
    code, _, _ = run(capsys, "--sizes", "1000:2000:2", "--out", str(compared), command="schedules")
    assert code == 0
    assert len(pd.read_csv(compared / "schedules.csv")) == 8


def test_figures_show_what_they_say() -> None:
    (ordered,) = scaling_limits(uniform(3), 50, theta=1.0, replicates=20).figures()
    assert ordered.title == "Ordered weights"
    limit, measured = ordered.series
    assert (limit.name, measured.name) == ("scaling limit", "50 keys")
    assert list(measured.x) == list(range(1, 33))
    assert len(schedules([1e3, 1e4], beta=20.0).plot().axes) == 3
    heat = heat_flow(n=500).plot()
    assert heat.axes[0].get_lines()[0].get_ydata()[-1] == pytest.approx(0.5 * np.exp(0.2))


def test_the_verdict_says_how_the_critical_scale_grows() -> None:
    assert "n⁰·⁵⁰" in scaling(n=500, replicates=20).view().verdict[2]  # 2/α with α = 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dim", "1"], "dim is 1"),
        (["--theta", "0"], "theta is 0"),
        (["--theta", "-1"], "theta is -1"),
        (["--beta", "0"], "beta is 0"),
        (["--beta", "-3"], "beta is -3"),
        (["--n", "1"], "n is 1"),
        (["--n", "2.5"], "whole number"),
        (["--n", "nan"], "n is nan"),
        (["--theta", "1", "--beta", "2"], "both theta and beta"),
        (["--theta", "20000"], "less than n"),
        (["--law", "cauchy"], "'cauchy'"),
        (["--replicates", "1"], "replicates is 1"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_two(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("heat-flow", ["--amplitude", "2"], "amplitude is 2"),
        ("heat-flow", ["--n", "2.5"], "whole number"),
        ("schedules", ["--sizes", "20:10:2"], "range of context lengths"),
        ("schedules", ["--theta", "1", "--beta", "2"], "both theta and beta"),
    ],
)
def test_bad_input_of_schedules_and_heat_flow(
    capsys: pytest.CaptureFixture[str], command: str, arguments: list[str], words: str
) -> None:
    code, out, err = run(capsys, *arguments, command=command)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_a_value_matrix_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A diagonal, and the same matrix from a file, with mean and variance of each output."""
    value = np.diag([1.0, 2.0, 0.5])
    np.save(tmp_path / "value.npy", value)
    arguments = ["--dim", "3", "--n", "300", "--theta", "2", "--replicates", "500", "--json"]
    found = [run(capsys, *arguments, "--value", given)[1] for given in ("1,2,0.5", str(tmp_path / "value.npy"))]
    assert json.loads(found[0])["outputs"] == json.loads(found[1])["outputs"]
    outputs = json.loads(found[0])["outputs"]
    assert outputs["variance of output 2"]["exact"] == pytest.approx(16 * outputs["variance of output 3"]["exact"])
    keys = np.random.default_rng(3).standard_normal((4000, 300, 3))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    beta = json.loads(found[0])["inputs"]["beta"]
    drawn = np.einsum("rn,rnd->rd", special.softmax(beta * keys[..., 0], axis=1), keys) @ value
    for i, column in enumerate(drawn.T):
        error = column.std() / np.sqrt(4000)
        assert abs(column.mean() - outputs[f"mean of output {i + 1}"]["exact"]) < 4 * error
        assert outputs[f"variance of output {i + 1}"]["exact"] == pytest.approx(column.var(), rel=0.12)
    code, _, err = run(capsys, "--dim", "3", "--value", "1,2")
    assert code == 2
    assert "--value has shape (2,); expected 3 columns" in err


def test_laws_of_ordered_weights_are_shown_beside_the_measured_ones() -> None:
    found = scaling(dim=5, n=2000, theta=1, replicates=2000)
    assert len(found.weight_laws) == 12
    for share in found.weight_laws.values():
        assert abs(share.measured.value - share.exact) < 4 * share.measured.stderr
    assert found.laws["nearest_distance"].p > 0.001
    assert "P(w10 ≤ " in str(found)
    collapsed = scaling(dim=5, n=1000, beta=3000.0, replicates=1000)
    assert collapsed.laws["one_minus_top_weight"].p > 0.001
    assert collapsed.laws["output_distance"].p > 0.001
