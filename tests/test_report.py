"""The page of a run without a browser: what it says, how large it is, and what it refuses."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from limitlens.budgets.head_plan import plan_head, share
from limitlens.cli import main
from limitlens.errors import InputError
from limitlens.record import FORMAT, read_run, to_json, write_run
from limitlens.report import head_figures, notebook
from limitlens.report.page import command_line, embedded, page, write_report
from limitlens.report.parts import falling, join, short
from limitlens.report.prose import CONTEXT, kept_share, notable, trust, verdict
from report_cases import NASTY, bare_contract, probe_document, record

Run = dict[str, Any]


def plain(document: Any) -> Any:
    return json.loads(to_json(document))


def data_of(html: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found is not None
    return json.loads(found[1])


class Words(HTMLParser):
    """The text of a page as a reader sees it, and every tag."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


@pytest.fixture(scope="module")
def probe() -> Run:
    return plain(probe_document())


@pytest.fixture(scope="module")
def study() -> Any:
    import limitlens as ll

    return ll.study(ll.Gaussian(0.0, 1.0), ll.Head(1.5), [100, 300, 1000, 3000], replicates=20, queries=64, seed=1)


def test_the_page_of_a_large_model_is_small_and_needs_no_network() -> None:
    document = plain(probe_document(30, 32, groups=4, sink=True, intervals=False))
    html = page(record(document))
    assert len(html.encode()) < 1_500_000  # the promise is 5 MB
    linked = [
        value
        for _, attributes in Words(html).tags
        for name, value in attributes.items()
        if name in ("src", "href", "data") and value
    ]
    assert all(value.startswith(("#", "data:")) for value in linked)
    assert len(data_of(html)["heads"]["layer"]) == 960


def test_only_the_scripts_of_the_page_may_run() -> None:
    html = page(record(plain(bare_contract())))
    script = re.findall(r"<script>(.*?)</script>", html, re.S)
    assert len(script) == 1
    import base64
    import hashlib

    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html
    assert "default-src 'none'" in html


def test_names_from_outside_are_shown_as_text() -> None:
    document = plain(probe_document(1, 2, model=NASTY))
    document["corpus"] = NASTY
    document["warnings"] = [NASTY]
    made = record(document)
    made["arguments"]["model"] = NASTY
    html = page(made)
    parsed = Words(html)
    assert sum(tag == "script" for tag, _ in parsed.tags) == 2  # the data and the page's own
    visible = " ".join(NASTY.split())
    assert parsed.text.count(visible) >= 4  # title, verdict, warning, command
    assert "<script>window" not in html


def test_embedded_json_cannot_leave_its_element() -> None:
    text = embedded({"name": "</script><!-- & \u2028 \u2029 ü", "number": 0.123456789, "bad": float("nan")})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"name": "</script><!-- & \u2028 \u2029 ü", "number": 0.12346, "bad": None}


def test_the_verdict_tells_what_the_numbers_say(probe: Run) -> None:
    measured, found, do = verdict(probe)
    heads = probe["heads"]
    assert "72 attention heads" in measured
    assert "64 to 4,096" in measured
    for name, word in (("averaging", "average"), ("selective", "select"), ("frozen", "frozen")):
        count = sum(head["regime"] == name for head in heads)
        assert count > 0
        assert re.search(rf"\b{count} (have )?{word}", found)
    slowest = min(heads, key=lambda head: head["rate"]["slope"])
    assert f"layer {slowest['layer']}, head {slowest['head']}" in found
    assert falling(float(np.median([head["rate"]["slope"] for head in heads]))) in found
    assert f"{kept_share(heads, 0.05):.0%}" in do
    assert all(sentence.count(". ") == 0 and sentence.endswith(".") for sentence in (measured, found, do))


def test_the_share_kept_is_that_of_a_plan() -> None:
    heads = plain(probe_document(3, 8, groups=4, sink=True))["heads"]
    groups: dict[tuple[int, int], list[Any]] = {}
    for head in heads:
        groups.setdefault((head["layer"], head["kv_head"]), []).append(plan_head(head, 0.05, CONTEXT))
    kept = [share(group).keys or 0 for group in groups.values()]
    assert len(kept) == 6
    assert kept_share(heads, 0.05) == pytest.approx(sum(kept) / (6 * CONTEXT))
    assert kept_share(heads, 0.5) < kept_share(heads, 0.05)


def test_notable_heads_are_extremes_and_distinct(probe: Run) -> None:
    picked = notable(probe)
    assert len({(item.layer, item.head) for item in picked}) == len(picked)
    assert 2 <= len(picked) <= 5
    for why, score in (
        ("largest error left", lambda head: head["relative_output_error"][-1]),
        ("slowest to converge", lambda head: -head["rate"]["slope"]),
    ):
        head = max(probe["heads"], key=score)
        (item,) = (item for item in picked if why in item.why)
        assert (item.layer, item.head) == (head["layer"], head["head"])


def test_trust_names_the_floor_and_every_bound(probe: Run) -> None:
    said = " ".join(trust(probe))
    frozen = sum(head["regime"] == "frozen" for head in probe["heads"])
    heavy = sum(head["pareto_k"] > 0.7 for head in probe["heads"])
    assert frozen > 0
    assert f"{frozen} frozen head" in said
    assert heavy > 0
    assert f"{heavy} head" in said
    assert "2·10⁻⁷" in said
    assert "A warning of the run." in Words(page(record(probe))).text


def test_what_the_contract_names_is_enough_for_a_page() -> None:
    document = plain(bare_contract())
    data = data_of(page(record(document)))
    assert data["heads"]["rate"][1] is None
    keys = [quantity["key"] for quantity in data["quantities"]]
    assert {"rate", "tokens_0.05", "regime", "score_std", "pareto_k", "sink_mass"} <= set(keys)
    assert "local_dimension" not in keys  # no head has it
    assert "hardmax_error" not in data["heads"]


def test_beyond_is_not_the_same_as_not_known() -> None:
    document = plain(bare_contract())
    document["heads"][0]["tokens_for"]["0.05"] = None
    document["heads"][1]["tokens_for"]["0.05"] = None
    document["heads"][1]["relative_output_error"][2] = None
    data = data_of(page(record(document)))
    assert data["heads"]["tokens_0.05"][:2] == ["beyond", None]


def test_a_study_and_its_sweeps_have_pages(study: Any, tmp_path: Path) -> None:
    curve = plain(study.document())
    html = write_report(study, tmp_path / "study.html").read_text()
    text = Words(html).text
    assert "horizon 1.5" in text
    assert falling(study.rate("output").slope) in text
    data = data_of(html)
    relative = np.asarray(curve["errors"]["output"]["value"]) / curve["scale"]["output"]
    assert data["budget"]["curves"][0]["error"] == pytest.approx(relative.tolist(), rel=1e-4)
    names = {series["name"] for series in data["figures"][0]["series"]}
    assert {"mean", "covariance", "output", "output, predicted"} <= names
    swept = {"horizons": [0.5, 1.5, 3.0], "studies": [curve, curve, curve]}
    assert "Fitted rates over the horizon" in str(data_of(page({"result": swept}))["figures"])
    growth = {"law": "exponential", "exponential_rate": 1.0, "polynomial_degree": 2.0, "evidence": 3.0}
    constants = {"value": [1.0, 2.0, 4.0], "stderr": [0.1, 0.1, 0.2]}
    grown = {
        "radii": [1.0, 2.0, 3.0], "n": 3000, "studies": [curve] * 3,
        "constants": dict.fromkeys(("uniform", "mean", "covariance"), constants),
        "growth": dict.fromkeys(("uniform", "mean", "covariance"), growth),
    }  # fmt: skip
    assert "exponentially" in Words(page({"result": grown})).text


def test_a_bar_never_reaches_zero_on_a_logarithmic_axis(study: Any) -> None:
    document = plain(study.document())
    document["errors"]["mean"]["stderr"] = [10.0] * 4
    series = data_of(page({"result": document}))["figures"][0]["series"]
    (mean,) = (entry for entry in series if entry["name"] == "mean")
    assert min(mean["low"]) > 0


def test_scaling_limits_have_pages() -> None:
    from limitlens.experiments.heat import heat_document
    from limitlens.experiments.real_keys import keys_document
    from limitlens.experiments.scaling import scaling_document
    from limitlens.theory.scaling import critical_beta
    from limitlens.theory.scaling.laws import named_law
    from limitlens.theory.schedules import compare_schedules, schedules_document

    law = named_law("uniform", 5)
    document = scaling_document(law, 500, effective=1.0, replicates=50, seed=0)
    document["inputs"].update(law="uniform", dim=5)
    text = Words(page(record(plain(document), "scaling"))).text
    assert "selective" in text
    assert "n⁰·⁵⁰" in text  # 2/α with α = 4
    steps = compare_schedules([100.0, 1000.0], critical_beta(100.0, law), law)
    assert "critical schedule" in Words(page({"result": plain(schedules_document(steps, law))})).text
    heat = heat_document(2, 200.0, 10, 0.5, n=200, seed=0)
    assert "backward heat equation" in Words(page({"result": plain(heat)})).text
    rng = np.random.default_rng(0)
    keys = keys_document(rng.standard_normal((4, 5)), rng.standard_normal((800, 5)), normalise=True, seed=0)
    assert "4 queries on 800 real keys" in Words(page({"result": plain(keys)})).text


def test_hardmax_and_tails_have_pages() -> None:
    from limitlens.experiments.hardmax import hardmax_line, softmax_line
    from limitlens.experiments.heavy_tails import heavy_curve

    sizes = (100, 300, 1000)
    document = {
        "inputs": {"measure": "gaussian", "dim": 1, "replicates": 50, "seed": 0},
        "hardmax": hardmax_line(sizes, 50).document(),
        "softmax": [softmax_line(0.5, sizes, 50, 0).document()],
    }
    assert "logarithm" in Words(page({"result": plain(document)})).text
    tilts = [heavy_curve("laplace", tilt, sizes, replicates=20).document() for tilt in (0.4, 2.0)]
    text = Words(page({"result": plain({"inputs": {"law": "laplace"}, "tilts": tilts})})).text
    assert "At 1 of 2 tilts there is no infinite-token limit" in text


def test_a_plan_has_a_page() -> None:
    from limitlens.budgets.plan import plan

    made = plan(plain(probe_document(2, 3)), 0.1, 8192, trial=False)
    text = Words(page({"result": plain(made.document())})).text
    assert f"{made.total['ratio']:.0%} of all KV entries" in text
    assert "10% error" in text


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
        {"command": "probe", "result": {}},
        {"format": FORMAT + 1, "versions": {"limitlens": "9.9"}, "result": {}},
        {"format": FORMAT, "result": 3},
        [1, 2],
    ):
        file.write_text(json.dumps(other))
        with pytest.raises(InputError, match="another version"):
            read_run(tmp_path)
    file.write_text(json.dumps({"format": FORMAT + 1, "versions": {"limitlens": "9.9"}, "result": {}}))
    with pytest.raises(InputError, match=r"another version of limitlens \(9\.9\)"):
        read_run(tmp_path)


def test_runs_that_lack_what_a_page_needs() -> None:
    document = plain(bare_contract())
    del document["heads"][0]["relative_output_error"]
    with pytest.raises(InputError, match=r"lacks what its report needs \(KeyError: 'relative_output_error'\)"):
        page(record(document))
    with pytest.raises(InputError, match="'doctor' has no report"):
        page({"command": "doctor", "result": {"device": "cpu"}})
    with pytest.raises(InputError, match="expected a run folder"):
        write_report(3, "x.html")
    with pytest.raises(InputError, match="no file was given"):
        write_report(record(plain(bare_contract())))


def test_the_command_writes_beside_its_run(tmp_path: Path, probe: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_run(folder, {key: value for key, value in record(probe).items() if key != "result"}, probe)
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


def test_the_command_line_can_be_typed_again() -> None:
    made = {
        "command": "probe",
        "arguments": {"model": "a b", "tokens": 1e5, "window": None, "json": False, "mask_self": True, "seed": 3},
    }
    assert command_line(made) == "limitlens probe 'a b' --tokens 100000 --mask-self --seed 3"


def test_numbers_are_written_for_people() -> None:
    assert [short(v) for v in (0.0, 0.12345, 12345.6, 2.5e8, 1e-6, None, float("inf"))] == [
        "0", "0.123", "12,346", "2.5·10⁸", "10⁻⁶", "–", "∞",
    ]  # fmt: skip
    assert falling(0.47) == "n⁻⁰·⁴⁷"
    assert join(["a", "b", "c"]) == "a, b and c"


def test_figures_for_papers(probe: Run, tmp_path: Path) -> None:
    for kind in ("png", "pdf"):
        head_figures.plot_rates(probe, str(tmp_path / f"rates.{kind}"))
        head_figures.plot_map(probe, "regime", str(tmp_path / f"map.{kind}"))
        head_figures.plot_head(probe, 1, 2, str(tmp_path / f"head.{kind}"))
    assert (tmp_path / "rates.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    figure = head_figures.plot_map(probe, "horizon")
    shown = np.asarray(figure.axes[0].images[0].get_array())
    assert shown[1, 2] == pytest.approx(probe["heads"][14]["horizon"])
    with pytest.raises(InputError, match="has a number 'nonsense'"):
        head_figures.plot_map(probe, "nonsense")
    with pytest.raises(InputError, match="no layer 99"):
        head_figures.plot_head(probe, 99, 0)
    without = {"heads": [{**head, "rate": None} for head in probe["heads"]]}
    with pytest.raises(InputError, match="fit rates"):
        head_figures.plot_rates(without)


def test_a_notebook_shows_the_sentences_and_every_head() -> None:
    shown = notebook.probe_html(plain(probe_document(2, 3, model=NASTY)))
    assert shown.count("<td") == 6
    assert "<script" not in shown
    assert "6 attention heads" in shown
