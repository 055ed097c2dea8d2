"""Comparisons of runs: significant differences, insignificant ones, and runs that cannot be compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from cache_cases import planned
from head_cases import SIZES, head_record, probe_run
from limitlens.cli import main
from limitlens.comparison import LEVEL, Comparison, compare, find_differences
from limitlens.errors import InputError
from limitlens.estimate import Estimate
from limitlens.probing.result import ProbeRun
from limitlens.record import json_text, read_run
from limitlens.report.page import page
from limitlens.statistics.documents import holm
from limitlens.statistics.regimes import Regime

NASTY = "<script>window.hacked=1</script>\"'</title>&amp; 模型 \u2028 ]]>"
N = np.asarray(SIZES, dtype=float)
REGIMES = (Regime.AVERAGING, Regime.SELECTIVE, Regime.FROZEN)


def synthetic(layers: int = 3, heads: int = 4, *, shift: float = 0.0, seed: int = 0, **changes: Any) -> ProbeRun:
    """Heads of many rates; `shift` is added to every rate, and leaves its standard error as it is."""
    rng = np.random.default_rng(seed)
    records = []
    for layer in range(layers):
        for head in range(heads):
            slope, constant = rng.uniform(0.3, 0.5), rng.uniform(1, 3)
            errors = constant * (N / N[0]) ** -(slope + shift)
            regime = REGIMES[(layer + head) % 3]
            records.append(head_record(layer, head, errors=errors, horizon=rng.uniform(0.5, 2), regime=regime))
    return probe_run(records, **changes)


@pytest.fixture(scope="module")
def probe() -> ProbeRun:
    return synthetic()


def rows_of(found: Comparison, quantity: str) -> list[Any]:
    return [row for row in found.differences if row.quantity == quantity]


def test_a_run_agrees_with_itself(probe: ProbeRun) -> None:
    found = compare(probe, probe)
    document = found.document()
    assert (document["matched"], document["unit"]) == (12, "head")
    second = found.names[1]
    assert not any(row.exceeds for row in found.differences)
    assert all(row.difference.value == 0 or not row.difference.known for row in found.differences)
    rate = next(row for row in document["summary"] if row["quantity"] == "rate")
    assert (rate["run"], rate["tested"], rate["marked"]) == (second, 12, 0)


def test_a_shift_of_every_rate_is_marked_and_nothing_without_an_error_is(probe: ProbeRun) -> None:
    moved = synthetic(shift=0.1)  # many standard errors
    records = [replace(head, horizon=3 * head.horizon) for head in moved.records]
    found = compare(probe, replace(moved, records=tuple(records)))
    rates = rows_of(found, "rate")
    stderr = [head.curve.rate.stderr for head in probe.records if head.curve.rate is not None]
    assert all(row.exceeds for row in rates)
    assert [row.difference.value for row in rates] == pytest.approx([0.1] * 12)
    assert [row.difference.stderr for row in rates] == pytest.approx(np.sqrt(2) * np.array(stderr))
    assert all(row.exceeds is None for row in rows_of(found, "horizon"))


@pytest.mark.parametrize("corpus", ["2", "3"], ids=["one text", "two texts"])
def test_the_choice_of_text_counts_between_texts_only(probe: ProbeRun, corpus: str) -> None:
    text = 0.2 * np.linspace(1, 2, len(SIZES))[None]
    records = [replace(head, curve=replace(head.curve, text=text)) for head in probe.records]
    runs = [replace(probe, records=tuple(records), corpus_sha256=sha256) for sha256 in ("2", corpus)]
    found = compare(*runs)
    curves = [head.curve if corpus == "2" else head.curve.for_other_text for head in records]
    for quantity, own in (
        ("rate", [curve.rate.stderr for curve in curves if curve.rate is not None]),
        (f"error at n = {SIZES[-1]:,}", [curve.stderr[-1] for curve in curves]),
    ):
        assert [row.difference.stderr for row in rows_of(found, quantity)] == pytest.approx(np.sqrt(2) * np.array(own))
    assert curves[0].stderr[-1] / curves[0].error[-1] == pytest.approx(0.01 if corpus == "2" else 0.4, rel=0.2)


def test_the_border_is_welchs_t_shared_out_over_the_heads() -> None:
    """12 heads, 20 replicates each, equal errors: 38 degrees of freedom at 5%/12."""
    border = stats.t.ppf(1 - LEVEL / 12 / 2, 38) * 0.01 * np.sqrt(2)
    first = {(f"head {i}", "rate"): (Estimate(0.4, 0.01), 20) for i in range(12)}
    for factor, marked in ((0.99, False), (1.01, True)):
        other = {place: (Estimate(0.4 + factor * border, 0.01), 20) for place in first}
        assert {row.exceeds for row in find_differences([first, other], ["a", "b"])} == {marked}


def test_holm_is_never_less_sure_than_bonferroni() -> None:
    assert holm([]) == []
    assert holm([0.04, 0.001, 0.03]) == pytest.approx([0.06, 0.003, 0.06])
    chances = np.random.default_rng(0).uniform(0, 0.1, 20).tolist()
    assert all(a <= min(1, 20 * p) for a, p in zip(holm(chances), chances, strict=True))


def test_small_differences_of_all_heads_are_significant_together(probe: ProbeRun) -> None:
    """Horizons have no error of their own; their mean over heads has one, head by head."""
    rng = np.random.default_rng(3)
    moved = [replace(head, horizon=head.horizon + 0.05 + 0.01 * rng.standard_normal()) for head in probe.records]
    found = compare(probe, replace(probe, records=tuple(moved)), synthetic(corpus="same"))
    rows = {(row.quantity, row.run): row for row in found.summary if row.p is not None}
    horizon = rows["horizon", found.names[1]]
    assert horizon.real
    assert horizon.places == 12
    assert horizon.difference.value == pytest.approx(0.05, abs=0.01)
    own = [b.horizon - a.horizon for a, b in zip(probe.records, moved, strict=True)]
    t = stats.ttest_1samp(own, 0)
    assert horizon.difference.stderr == pytest.approx(np.std(own, ddof=1) / np.sqrt(12))
    assert horizon.p == pytest.approx(min(1, t.pvalue * len(rows)))
    assert not any(row.real for row in found.summary if row.run == found.names[2])
    assert f"horizon of {found.names[1]} (+0.0" in found.view().verdict[1]
    shifted = compare(probe, synthetic(shift=0.1))
    rate = next(row for row in shifted.summary if row.quantity == "rate")
    common = np.mean([row.difference.stderr for row in rows_of(shifted, "rate")])
    assert rate.difference.value == pytest.approx(0.1)
    assert rate.difference.stderr == pytest.approx(
        common, rel=1e-3
    )  # every head moved alike: what is left is a head's own error


def test_chance_alone_marks_about_one_comparison_in_twenty() -> None:
    rng = np.random.default_rng(0)
    trials, wrong = 400, 0
    for _ in range(trials):
        columns = []
        for _ in range(2):
            draws = rng.normal(0.4, 0.05, (12, 20))
            measured = zip(draws.mean(1), draws.std(1, ddof=1) / np.sqrt(20), strict=True)
            columns.append({(f"head {i}", "rate"): (Estimate(*value), 20) for i, value in enumerate(measured)})
        wrong += any(row.exceeds for row in find_differences(columns, ["a", "b"]))
    assert stats.binomtest(wrong, trials, LEVEL).pvalue > 0.01


def test_errors_are_compared_at_the_largest_size_in_common(probe: ProbeRun) -> None:
    shorter = [
        head_record(head.layer, head.head, errors=head.curve.error[:-2], effective_tokens=head.effective_tokens[:-2])
        for head in probe.records
    ]
    found = compare(probe, probe_run(shorter))
    quantities = {row.quantity for row in found.summary}
    assert "error at n = 1,024" in quantities
    assert not {"error at n = 512", "error at n = 4,096"} & quantities


def test_two_models_are_compared_by_means_over_their_heads(probe: ProbeRun) -> None:
    other = synthetic(2, 8, shift=0.2, model="another", model_sha256="9")
    found = compare(probe, other)
    assert found.unit == "model average"
    (rate,) = rows_of(found, "rate")
    slopes = [[head.curve.rate.slope for head in run.records if head.curve.rate is not None] for run in (probe, other)]
    welch = stats.ttest_ind(slopes[1], slopes[0], equal_var=False)
    assert rate.in_errors == pytest.approx(welch.statistic)
    assert rate.exceeds is bool(welch.pvalue < LEVEL)
    assert rate.exceeds
    assert "different models" in page(found.view(), found.made)
    assert "mean in " in str(found)


def test_runs_of_one_model_are_compared_where_they_meet(probe: ProbeRun) -> None:
    assert compare(probe, synthetic(2, 8)).matched == 8  # two layers of four heads


def test_three_runs_are_each_held_against_the_first(probe: ProbeRun) -> None:
    runs = [probe, synthetic(seed=1), synthetic(shift=0.05)]
    found = compare(*runs)
    rates = {row.run: row for row in found.summary if row.quantity == "rate"}
    assert {run: row.tested for run, row in rates.items()} == dict.fromkeys(found.names[1:], 12)
    slopes = [head.curve.rate.slope for head in runs[2].records if head.curve.rate is not None]
    assert rates[found.names[2]].value == pytest.approx(np.median(slopes))


def test_studies_are_compared() -> None:
    import limitlens as ll
    from limitlens.experiments.sweeps import HorizonSweep

    curves = [
        ll.study(ll.Gaussian(0.0, 1.0), ll.Head(h), [100, 300, 1000], replicates=40, queries=64, seed=s)
        for h, s in ((0.5, 0), (0.5, 1), (3.0, 0))
    ]
    same, other = compare(*curves[:2]), compare(*curves[::2])
    assert not any(row.exceeds for row in same.differences)
    marked = {(row.where, row.quantity) for row in other.differences if row.exceeds}
    assert {("output", "rate of the output"), ("output", "error of the output at n = 1,000")} <= marked
    summary = {row.quantity: row for row in other.summary}
    for name in curves[0].errors:  # each error by itself
        slopes = [curve.errors[name].rate.slope for curve in curves[::2]]
        row = summary[f"rate of the {name}"]
        assert [row.first, row.value] == pytest.approx(slopes)
        assert row.p is None
    assert [run["horizon"] for run in other.runs] == pytest.approx([0.5, 3.0])
    sweep = HorizonSweep((0.5, 3.0), (curves[0], curves[2]))
    with pytest.raises(InputError, match="'horizons' cannot be compared"):
        compare(sweep, sweep)
    with pytest.raises(InputError, match="runs of study, horizons were given"):
        compare(curves[0], sweep)


def test_what_cannot_be_compared(probe: ProbeRun, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least two"):
        compare(tmp_path)
    plan = planned()
    with pytest.raises(InputError, match="runs of probe, plan were given"):
        compare(probe, plan)
    with pytest.raises(InputError, match="'plan' cannot be compared"):
        compare(plan, plan)
    folder = probe.save(tmp_path / "broken")
    stored = json.loads((folder / "run.json").read_text())
    del stored["result"]["heads"][0]["n"]
    (folder / "run.json").write_text(json.dumps(stored))
    with pytest.raises(InputError, match="lacks what a probe"):
        compare(folder, folder)
    elsewhere = probe_run([head_record(7, 0, errors=2 / np.sqrt(N))])
    with pytest.raises(InputError, match="nothing in common"):
        compare(probe, elsewhere)


def test_the_page_shows_the_differences(probe: ProbeRun) -> None:
    moved = synthetic(shift=0.1, corpus=NASTY)
    found = compare(probe, moved)
    html = page(found.view(), found.made)
    assert "rate in 12 of 12" in html
    assert "<script>window" not in html
    same = compare(probe, probe)
    assert "No difference exceeds its error" in page(same.view(), same.made)
    assert "No difference exceeds its error" in str(same)
    assert "<table" in found._repr_html_()
    assert "12 heads in common" in repr(found)


def test_a_comparison_is_read_back_as_it_was(probe: ProbeRun, tmp_path: Path) -> None:
    found = compare(probe, synthetic(shift=0.1))
    back = Comparison.load(read_run(found.save(tmp_path)))
    assert json_text(back.document()) == json_text(found.document())
    assert json_text(back.view().__dict__) == json_text(found.view().__dict__)
    assert len(back.table) == len(found.differences)


def test_a_comparison_is_drawn_where_there_is_something_to_draw(probe: ProbeRun, tmp_path: Path) -> None:
    compare(probe, synthetic(shift=0.1)).plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0
    few = synthetic(1, 2)
    with pytest.raises(InputError, match="no figure"):
        compare(few, few).plot()


def test_the_command(probe: ProbeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = probe.save(tmp_path / "a"), synthetic(shift=0.1).save(tmp_path / "b")
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


def test_runs_of_one_name_are_distinguished(probe: ProbeRun, tmp_path: Path) -> None:
    folders = [probe.save(tmp_path / parent / "run") for parent in ("x", "y")]
    assert len(set(compare(*folders).names)) == 2
    assert compare(folders[0], folders[0]).names[1].endswith("(2)")
    assert compare(probe, synthetic(corpus="code")).names == ["a model on a text", "a model on code"]
