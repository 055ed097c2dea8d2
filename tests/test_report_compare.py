"""Runs side by side: what is marked, what is not, and what cannot be compared."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from limitlens.cli import main
from limitlens.comparison import LEVEL, compare, compare_records
from limitlens.errors import InputError
from limitlens.record import to_json, write_run
from limitlens.report.page import page
from report_cases import NASTY, probe_document, record


def plain(document: Any) -> Any:
    return json.loads(to_json(document))


def saved(folder: Path, result: dict[str, Any], command: str = "probe") -> Path:
    folder.mkdir()
    made = record(result, command)
    write_run(folder, {key: value for key, value in made.items() if key != "result"}, result)
    return folder


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    return plain(probe_document(3, 4))


def test_a_run_agrees_with_itself(probe: dict[str, Any]) -> None:
    found = compare_records([record(probe), record(probe)], ["a", "b"])
    assert (found["matched"], found["unit"]) == (12, "head")
    assert found["regimes"]["b"]["changed"] == 0
    assert not any(row["exceeds"] for row in found["differences"])
    assert all(row["difference"] in (0.0, None) for row in found["differences"])
    rate = next(row for row in found["summary"] if row["quantity"] == "rate")
    assert (rate["tested"]["b"], rate["marked"]["b"]) == (12, 0)


def test_a_shift_of_every_rate_is_marked_and_nothing_without_an_error_is(probe: dict[str, Any]) -> None:
    moved = copy.deepcopy(probe)
    for head in moved["heads"]:
        head["rate"]["slope"] += 0.1  # ten standard errors of 0.01
        head["horizon"] *= 3
    moved["heads"][0]["regime"] = "frozen" if moved["heads"][0]["regime"] != "frozen" else "averaging"
    found = compare_records([record(probe), record(moved)], ["a", "b"])
    rates = [row for row in found["differences"] if row["quantity"] == "rate"]
    assert all(row["exceeds"] for row in rates)
    assert all(row["difference"] == pytest.approx(0.1) for row in rates)
    assert all(row["difference_stderr"] == pytest.approx(0.01 * np.sqrt(2)) for row in rates)
    assert all(row["exceeds"] is None for row in found["differences"] if row["quantity"] == "horizon")
    assert found["regimes"]["b"]["changed"] == 1


def test_the_border_is_welchs_t_shared_out_over_the_heads(probe: dict[str, Any]) -> None:
    """12 heads, 20 replicates each, equal errors: 38 degrees of freedom at 5%/12."""
    border = stats.t.ppf(1 - LEVEL / 12 / 2, 38) * 0.01 * np.sqrt(2)
    for factor, marked in ((0.99, False), (1.01, True)):
        moved = copy.deepcopy(probe)
        for head in moved["heads"]:
            head["rate"]["slope"] += factor * border
        found = compare_records([record(probe), record(moved)], ["a", "b"])
        assert {row["exceeds"] for row in found["differences"] if row["quantity"] == "rate"} == {marked}


def test_chance_alone_marks_about_one_comparison_in_twenty(probe: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    trials, wrong = 400, 0
    bare = copy.deepcopy(probe)
    for head in bare["heads"]:  # only the rates are at stake
        head["relative_output_error_stderr"] = [None] * len(head["n"])
        head["tokens_for"] = {}
    for _ in range(trials):
        pair = [copy.deepcopy(bare), copy.deepcopy(bare)]
        for result in pair:
            for head in result["heads"]:
                draws = rng.normal(0.4, 0.05, 20)
                head["rate"] |= {"slope": draws.mean(), "stderr": draws.std(ddof=1) / np.sqrt(20)}
        found = compare_records([record(result) for result in pair], ["a", "b"])
        wrong += any(row["exceeds"] for row in found["differences"])
    assert stats.binomtest(wrong, trials, LEVEL).pvalue > 0.01


def test_errors_are_compared_at_the_largest_size_in_common(probe: dict[str, Any]) -> None:
    shorter = copy.deepcopy(probe)
    for head in shorter["heads"]:
        for name in ("n", "relative_output_error", "relative_output_error_stderr"):
            head[name] = head[name][:-2]
    found = compare_records([record(probe), record(shorter)], ["a", "b"])
    quantities = {row["quantity"] for row in found["summary"]}
    assert "error at n = 1,024" in quantities
    assert not {"error at n = 512", "error at n = 4,096"} & quantities


def test_two_models_are_compared_by_means_over_their_heads(probe: dict[str, Any]) -> None:
    other = plain(probe_document(2, 8, model="another", shift=0.2))
    found = compare_records([record(probe), record(other)], ["a", "b"])
    assert not found["same_model"]
    (rate,) = (row for row in found["differences"] if row["quantity"] == "rate")
    slopes = [[head["rate"]["slope"] for head in result["heads"]] for result in (probe, other)]
    welch = stats.ttest_ind(slopes[1], slopes[0], equal_var=False)
    assert rate["difference"] / rate["difference_stderr"] == pytest.approx(welch.statistic)
    assert rate["exceeds"] is bool(welch.pvalue < LEVEL)
    assert rate["exceeds"]
    assert found["regimes"]["b"]["changed"] is None
    assert "different models" in page(record(found, "compare"))


def test_runs_of_one_model_are_compared_where_they_meet(probe: dict[str, Any]) -> None:
    found = compare_records([record(probe), record(plain(probe_document(2, 8)))], ["a", "b"])
    assert found["matched"] == 8  # two layers of four heads


def test_three_runs_are_each_held_against_the_first(probe: dict[str, Any]) -> None:
    runs = [probe, plain(probe_document(3, 4, seed=1)), plain(probe_document(3, 4, shift=0.05))]
    found = compare_records([record(run) for run in runs], ["a", "b", "c"])
    rate = next(row for row in found["summary"] if row["quantity"] == "rate")
    assert rate["tested"] == {"b": 12, "c": 12}
    slopes = [head["rate"]["slope"] for head in runs[2]["heads"]]
    assert rate["medians"]["c"] == pytest.approx(np.median(slopes))


def test_studies_and_scaling_limits_are_compared() -> None:
    import limitlens as ll

    curves = [
        ll.study(ll.Gaussian(0.0, 1.0), ll.Head(h), [100, 300, 1000], replicates=40, queries=64, seed=s).document()
        for h, s in ((0.5, 0), (0.5, 1), (3.0, 0))
    ]
    records = [record(plain(curve), "study") for curve in curves]
    same, other = compare_records(records[:2], ["a", "b"]), compare_records(records[::2], ["a", "c"])
    assert not any(row["exceeds"] for row in same["differences"])
    marked = {(row["where"], row["quantity"]) for row in other["differences"] if row["exceeds"]}
    assert {("output", "rate"), ("output", "error at n = 1,000")} <= marked
    sweep = {"horizons": [0.5, 3.0], "studies": [plain(curves[0]), plain(curves[2])]}
    swept = compare_records([record(sweep, "study"), record(sweep, "study")], ["a", "b"])
    assert {"H = 0.5, output", "H = 3, mean"} <= {row["where"] for row in swept["differences"]}
    scaling = {"inputs": {"replicates": 100}, "quantities": {"entropy": {"measured": 1.0, "stderr": 0.01}}}
    further = {"inputs": {"replicates": 100}, "quantities": {"entropy": {"measured": 1.1, "stderr": 0.01}}}
    found = compare_records([record(scaling, "scaling"), record(further, "scaling")], ["a", "b"])
    assert found["differences"][0]["exceeds"] is True


def test_what_cannot_be_compared(probe: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least two"):
        compare([tmp_path])
    with pytest.raises(InputError, match="runs of probe, study were given"):
        compare_records([record(probe), record({"errors": {}}, "study")], ["a", "b"])
    with pytest.raises(InputError, match="'hardmax' cannot be compared"):
        compare_records([record({"hardmax": {}}, "hardmax")] * 2, ["a", "b"])
    broken = copy.deepcopy(probe)
    del broken["heads"][0]["n"]
    with pytest.raises(InputError, match="lacks what a comparison needs"):
        compare_records([record(probe), record(broken)], ["a", "b"])
    empty: dict[str, Any] = {"inputs": {}, "quantities": {}}
    with pytest.raises(InputError, match="nothing in common"):
        compare_records([record(empty, "scaling")] * 2, ["a", "b"])


def test_the_page_says_what_differs(probe: dict[str, Any]) -> None:
    moved = plain(probe_document(3, 4, shift=0.1))
    html = page(record(compare_records([record(probe), record(moved)], ["docs", NASTY]), "compare"))
    assert "rate in 12 of 12" in html
    assert "<script>window" not in html
    same = page(record(compare_records([record(probe), record(probe)], ["a", "b"]), "compare"))
    assert "No difference exceeds its error" in same


def test_the_command(probe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = saved(tmp_path / "a", probe), saved(tmp_path / "b", plain(probe_document(3, 4, shift=0.1)))
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as end:
        main(["compare", str(first), str(second), "--out", str(out), "--json"])
    assert end.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in document["runs"]] == ["a", "b"]
    assert {path.name for path in out.iterdir()} == {
        "run.json", "differences.csv", "differences.parquet", "report.html",
    }  # fmt: skip
    with pytest.raises(SystemExit):
        main(["compare", str(first), str(second)])
    printed = capsys.readouterr().out
    assert "differences exceed their errors" in printed
    assert "12 of 12" in printed
    with pytest.raises(SystemExit) as end:
        main(["compare", str(first), str(tmp_path / "nowhere")])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_runs_of_one_name_are_told_apart(probe: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    folders = [saved(tmp_path / "x" / "run", probe), saved(tmp_path / "y" / "run", probe)]
    names = [run["name"] for run in compare(folders)["runs"]]
    assert len(set(names)) == 2
    assert [run["name"] for run in compare([folders[0], folders[0]])["runs"]][1].endswith("(2)")
