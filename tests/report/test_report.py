"""Report of a probe without a browser: sentences, page, figures, and folders that are refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from head_cases import SIZES, curve_of, head_record, probe_run
from limitlens.cli import main
from limitlens.errors import InputError
from limitlens.loading import load
from limitlens.probing.overview import slowest
from limitlens.probing.record import kept_share
from limitlens.probing.result import CONTEXT, STATES, ProbeRun
from limitlens.probing.view import trust, verdict
from limitlens.record import ARRAYS, FORMAT, json_text, read_run
from limitlens.report.page import page
from limitlens.report.text import falling
from limitlens.report.view import Table
from limitlens.statistics.regimes import Regime
from limitlens.theory import rates
from page_reader import Reader
from report_cases import NASTY, bare_probe, probe_case


def data_of(run: ProbeRun | str) -> Any:
    """The data of a page or of a run's page, as the scripts read it."""
    html = run if isinstance(run, str) else page(run.view(), {})
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture(scope="module")
def probe() -> ProbeRun:
    return probe_case()


def test_the_page_of_a_large_model_is_small_and_needs_no_network() -> None:
    half, html = (page(probe_case(layers, 32, groups=4, sink=True).view(), {}) for layers in (1, 2))
    a_head = (len(html.encode()) - len(half.encode())) / 32
    assert len(html.encode()) + (960 - 64) * a_head < 1_500_000
    linked = [
        value
        for _, attributes in Reader(html).tags
        for name, value in attributes.items()
        if name in ("src", "href", "data") and value
    ]
    assert all(value.startswith(("#", "data:")) for value in linked)
    assert len(data_of(html)["heads"]["layer"]) == 64


def test_names_from_outside_are_shown_as_text() -> None:
    run = probe_case(1, 2, model=NASTY, corpus=NASTY, warnings=(NASTY,))
    html = page(run.view(), {"command": "probe", "typed": f"limitlens probe {NASTY}"})
    parsed = Reader(html)
    assert sum(tag == "script" for tag, _ in parsed.tags) == 2  # the data and the page's own
    visible = " ".join(NASTY.split())
    assert parsed.text.count(visible) >= 4  # title, verdict, warning, command
    assert "<script>window" not in html
    assert "<script" not in run._repr_html_()


def test_the_findings_agree_with_the_numbers(probe: ProbeRun) -> None:
    measured, found, do = verdict(probe)
    assert "72 attention heads" in measured
    assert "64 to 4,096" in measured
    for regime, word in ((Regime.AVERAGING, "average"), (Regime.SELECTIVE, "select"), (Regime.FROZEN, "frozen")):
        count = sum(head.regime is regime for head in probe.records)
        assert count > 0
        assert re.search(rf"\b{count} (have )?{word}", found)
    slopes = {head.name: head.curve.rate.slope for head in probe.records if head.curve.rate is not None}
    assert min(slopes, key=lambda name: slopes[name]) in found
    assert falling(float(np.median(list(slopes.values())))) in found
    assert f"{kept_share(probe.records, 0.05, probe.window):.0%}" in do
    assert all(sentence.count(". ") == 0 and sentence.endswith(".") for sentence in (measured, found, do))


def test_a_context_is_one_that_the_model_can_have(probe: ProbeRun) -> None:
    assert not probe.causal
    assert "32,768" not in str(verdict(probe))
    assert f"In its window of {probe.window} tokens" in verdict(probe)[2]
    budget = data_of(probe)["budget"]
    assert budget["contexts"] == [64, 128, 256, None]
    assert budget["contexts"][budget["length"]] == probe.window
    decoder = replace(probe_case(1, 3), causal=True)
    assert f"In a context of {CONTEXT:,} tokens, random KV eviction" in verdict(decoder)[2]
    assert data_of(decoder)["budget"]["contexts"][-3:] == [CONTEXT, 4 * CONTEXT, None]


def test_the_share_kept_is_that_of_the_neediest_heads() -> None:
    run = probe_case(3, 8, groups=4, sink=True)
    groups: dict[tuple[int, int], list[int]] = {}
    for head in run.records:
        needed = head.keys_for(0.05, CONTEXT).n
        groups.setdefault((head.layer, head.kv_head), []).append(CONTEXT if needed is None else needed)
    assert len(groups) == 6
    share = sum(max(group) for group in groups.values()) / (6 * CONTEXT)
    assert kept_share(run.records, 0.05, CONTEXT) == pytest.approx(share)
    assert kept_share(run.records, 0.5, CONTEXT) < kept_share(run.records, 0.05, CONTEXT)
    budget = data_of(run)["budget"]
    assert budget["share"][budget["wanted"]][budget["length"]] == pytest.approx(share, rel=1e-4)
    assert budget["share"][0][-1] is None  # of endlessly many tokens no number is a share


def test_the_budgets_of_a_page_are_those_of_the_heads() -> None:
    run = probe_case(2, 4, groups=2, sink=True)
    budget = data_of(run)["budget"]
    assert len(budget["curves"]) == len(budget["answers"]["n"]) == 8
    marks = ("measured", "extrapolated", "beyond", "not known")
    for head, n, low, high, mark in zip(run.records, *budget["answers"].values(), strict=True):
        for e, error in enumerate(budget["errors"]):
            for c, context in enumerate(budget["contexts"]):
                found = head.keys_for(error, context or np.inf)
                assert marks[mark[e][c]] == found.mark
                told = [n[e][c], low[e][c], high[e][c]]
                expected = [found.n, *found.interval]
                assert told == [None if v is None else pytest.approx(v, rel=1e-4) for v in expected]


def test_budgets_of_a_head_with_a_sink_come_from_its_scaled_curve() -> None:
    for head in probe_case(2, 6, groups=2, sink=True).records:
        for error in (0.3, 0.05):
            for context in (100, 512, 8192, 1e9, np.inf):
                rest = max(context - 1, 1)
                assert head.keys_for(error, context) == head.curve_without_sink.scaled(
                    1 / head.sink_factor(rest)
                ).tokens_for(error, rest).plus(1)


def test_a_page_opens_at_the_slowest_head(probe: ProbeRun) -> None:
    first = probe.records[data_of(probe)["first"]]
    assert first is slowest(probe.records)[0] is max(probe.records, key=lambda head: head.curve.error[-1])


def test_a_head_whose_error_rises_is_named() -> None:
    n = np.asarray(SIZES, dtype=float)
    falls = [head_record(0, h, errors=0.9 * (n / 64) ** -0.3) for h in range(3)]
    rises = head_record(0, 3, errors=0.01 * (n / 64) ** 0.1)  # the smallest error left, and still growing
    run = probe_run([*falls, rises])
    assert "in 1 head it still grows (most in layer 0, head 3)" in verdict(run)[1]
    tables = [block for part in run.view().sections for block in part.blocks if isinstance(block, Table)]
    (table,) = (table for table in tables if "slowest" in table.title)
    assert [row[0] for row in table.rows] == ["0.0", "0.1", "0.2", "0.3"]


def test_trust_names_the_floor_and_every_bound(probe: ProbeRun) -> None:
    said = " ".join(trust(probe))
    unsettled = sum(head.error_is_lower_bound for head in probe.records)
    assert unsettled >= sum(head.regime is Regime.FROZEN for head in probe.records) > 0
    assert f"{unsettled} of {len(probe.records)} heads: the reference sample is too small" in said
    assert "at will" not in said
    assert "2·10⁻⁷" in said
    assert "The tokens of layers 1, 2, 3, 4 and 5 are heavier than Gaussian" in said
    assert "A warning of the run." in Reader(page(probe.view(), {})).text
    assert "interrupted" not in said
    assert "interrupted" in " ".join(trust(replace(probe, interrupted=True)))


def test_a_run_without_optional_parts_has_a_page() -> None:
    data = data_of(bare_probe())
    assert data["heads"]["rate"][1] is None
    keys = [quantity["key"] for quantity in data["quantities"]]
    assert {"rate", "tokens_0.05", "regime", "score_std", "pareto_k", "sink_mass"} <= set(keys)
    assert "sink_dilution" not in keys  # no head has it


def test_beyond_is_not_the_same_as_not_known() -> None:
    n = np.asarray(SIZES, dtype=float)
    flat = head_record(0, 0, errors=0.9 * (n / 64) ** -0.05)
    data = data_of(probe_run([flat, bare_probe().records[1]]))
    assert data["heads"]["tokens_0.05"] == ["beyond", None]
    assert {row[0] for row in data["budget"]["answers"]["mark"][1]} == {3}


def test_a_law_that_the_evidence_does_not_decide_is_undecided() -> None:
    n, rng = np.asarray(SIZES, dtype=float), np.random.default_rng(0)
    errors = 0.5 * (n / 64) ** -0.4
    noisy = curve_of(np.square(errors * np.exp(rng.normal(0, 0.4, (20, len(n))))))
    clear = head_record(0, 0, errors=errors)
    assert noisy.rate is not None
    assert abs(noisy.rate.evidence) < 10
    assert data_of(probe_run([clear, head_record(0, 1, errors=noisy)]))["heads"]["law"] == ["power", "undecided"]


def test_rates_of_rms_errors_are_shown_with_predicted_rms_exponents(probe: ProbeRun) -> None:
    """A probe's errors are root mean squares over queries and replicates; 1/(1+2H²) is about one sample."""
    axis = data_of(probe)["rate_axes"][0]
    lines = {line["name"].split(":")[0]: line for line in axis["lines"]}
    assert not any("verified" in line["name"] for line in axis["lines"])  # of Gaussian tokens, which real ones are not
    rms = lines["root mean square"]
    assert min(rms["x"]) < 1 < max(rms["x"])
    np.testing.assert_allclose(rms["y"], [rates.rate_rms_output(h) for h in rms["x"]], rtol=2e-4)
    assert set(lines) == {"root mean square", "of one sample"}  # exponents of moments are about other errors
    assert max(abs(y - rates.rate_sharp_output(h)) for h, y in zip(rms["x"], rms["y"], strict=True)) > 0.02


def test_figures_for_papers(probe: ProbeRun, tmp_path: Path) -> None:
    for kind in ("png", "pdf"):
        probe.plot(tmp_path / f"rates.{kind}")
        probe.plot_map("regime", tmp_path / f"map.{kind}")
    assert (tmp_path / "rates.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    shown = np.asarray(probe.plot_map("horizon").axes[0].images[0].get_array())
    assert shown[1, 2] == pytest.approx(probe.records[14].horizon)
    regimes = np.asarray(probe.plot_map("regime").axes[0].images[0].get_array())
    assert regimes[1, 2] == list(Regime).index(probe.records[14].regime)
    assert np.asarray(probe.plot_map("tokens_for_0.1").axes[0].images[0].get_array()).shape == (6, 12)
    with pytest.raises(InputError, match="has a value of 'nonsense'; expected one of regime, "):
        probe.plot_map("nonsense")
    with pytest.raises(InputError, match=r"give the name of a file as path='map\.png'"):
        probe.plot_map("map.png")
    with pytest.raises(InputError, match="no layer 99"):
        probe.head(99, 0)


def test_a_terminal_and_a_notebook_show_the_heads(probe: ProbeRun) -> None:
    text = str(probe)
    for told in ("The 5 slowest heads", "tokens for 10%", "the constant 1/2", *verdict(probe)[1:]):
        assert told in text
    worst = slowest(probe.records)[0]
    assert f"{worst.layer}.{worst.head}" in text.split("The 5 slowest heads")[1]
    shown = probe_case(2, 3)._repr_html_()
    assert shown.count('src="data:image/png') == 1  # the map of heads
    assert "6 attention heads" in shown
    assert len(repr(probe)) < 200


def test_a_loaded_probe_shows_the_same_page(tmp_path: Path) -> None:
    for place, run in enumerate((probe_case(2, 3, sink=True, groups=3), bare_probe())):
        folder = run.save(tmp_path / str(place))
        again = ProbeRun.load(read_run(folder))
        assert again.document() == run.document()
        assert page(again.view(), {}) == page(run.view(), {})
        assert str(again) == str(run)
        for name, table in run.tables().items():
            assert again.tables()[name].equals(table)
        assert all(np.array_equal(array, run.arrays()[name], equal_nan=True) for name, array in again.arrays().items())


def test_run_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no run folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"holds no run\.json"):
        read_run(tmp_path)
    file = tmp_path / "run.json"
    file.write_text('{"command": "probe", "result": {"heads": [')
    with pytest.raises(InputError, match="cannot be read"):
        read_run(tmp_path)
    file.write_bytes(b"\xff\xfe\x00broken")
    with pytest.raises(InputError, match="cannot be read"):
        read_run(tmp_path)
    for other in (
        {"kind": "probe", "result": {}},
        {"format": FORMAT + 1, "kind": "probe", "versions": {"limitlens": "9.9"}, "result": {}},
        {"format": FORMAT, "kind": "probe", "result": 3},
        {"format": FORMAT, "result": {}},
        [1, 2],
    ):
        file.write_text(json.dumps(other))
        with pytest.raises(InputError, match="another version"):
            read_run(tmp_path)
    file.write_text(json.dumps({"format": FORMAT + 1, "versions": {"limitlens": "9.9"}, "result": {}}))
    with pytest.raises(
        InputError, match=rf"of limitlens \(9\.9\), format {FORMAT + 1}; expected a run of format {FORMAT}"
    ):
        read_run(tmp_path)


def test_probes_that_are_not_whole(tmp_path: Path) -> None:
    folder = probe_case(1, 2, sink=True).save(tmp_path / "run")
    whole = (folder / "run.json").read_text()
    document = json.loads(whole)
    del document["result"]["heads"][0]["entropy"]
    (folder / "run.json").write_text(json_text(document))
    with pytest.raises(InputError, match=r"lacks what a probe needs .*'entropy'"):
        load(folder)
    (folder / "run.json").write_text(whole)
    for name, message in ((STATES, "has no states"), (ARRAYS, "is incomplete")):
        broken = Path(shutil.copytree(folder, tmp_path / name))
        (broken / name).unlink()
        with pytest.raises(InputError, match=message):
            ProbeRun.load(read_run(broken))
    (folder / STATES).write_bytes(b"broken")
    with pytest.raises(InputError, match="cannot be read"):
        len(ProbeRun.load(read_run(folder)).states)


def test_the_report_command_and_its_output(tmp_path: Path, probe: ProbeRun, capsys: pytest.CaptureFixture[str]) -> None:
    folder = probe_case(1, 3).save(tmp_path / "run")
    with pytest.raises(SystemExit) as end:
        main(["report", str(folder), "--json"])
    assert end.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert told["report"] == str(folder / "report.html")
    assert told["bytes"] == (folder / "report.html").stat().st_size
    other = tmp_path / "deep" / "page.html"
    with pytest.raises(SystemExit):
        main(["report", str(folder), "--out", str(other), "--quiet"])
    assert capsys.readouterr().out == ""
    assert other.read_text() == (folder / "report.html").read_text()
    for bad in ([str(tmp_path / "nowhere")], [str(folder), "--out", "/proc/nowhere/page.html"]):
        with pytest.raises(SystemExit) as end:
            main(["report", *bad])
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith("limitlens: ")
        assert said.count("\n") == 1
