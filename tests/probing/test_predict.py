"""Predictions from a pilot: against a measured probe, for small inputs, on the command line, saved and loaded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import limitlens as ll
from cache_cases import CONTEXT, language_model
from cache_cases import text as letters_text
from limitlens import cli
from limitlens.models import LoadedModel
from limitlens.probing import figures
from limitlens.probing import predict as predict_module
from limitlens.probing.pilot import Layer, Traits
from limitlens.probing.predict import predict_layer
from limitlens.record import json_text
from limitlens.report.page import page
from tiny_models import TINY, letters, tiny_tokenizer

SIZES, WINDOW = (8, 16, 32, 64, 128), 16
OPTIONS: dict[str, Any] = {"window": WINDOW, "sizes": SIZES, "seed": 3}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return letters(tmp_path_factory.mktemp("text"))


@cache
def tiny(name: str) -> LoadedModel:
    return LoadedModel(name, TINY[name].model(), tiny_tokenizer(special=not TINY[name].causal))


@pytest.fixture(scope="module", params=["bert", "llama"])
def predicted(request: pytest.FixtureRequest, text: str) -> ll.ProbeRun:
    return ll.predict(tiny(request.param), text, tokens=1600, queries=48, **OPTIONS)


def test_predictions_agree_with_what_a_probe_measures(predicted: ll.ProbeRun, text: str) -> None:
    """In units of the error bars: the predictions' own twice, since a probe's queries are others, and the probe's."""
    run = ll.probe(tiny(predicted.model), text, 9600, replicates=20, queries=48, **OPTIONS)
    heads = list(zip(predicted.records, run.records, strict=True))
    assert all(one.place == other.place for one, other in heads)
    for without_sink in (False, True):
        pairs = [
            (one.curve_without_sink, head.curve_without_sink) if without_sink else (one.curve, head.curve)
            for one, head in heads
        ]
        miss = np.array([np.log(one.error / curve.error) for one, curve in pairs])
        own = np.array([np.log(one.interval[1] / one.interval[0]) / 3.92 for one, _ in pairs])
        theirs = np.array([curve.stderr / curve.error for _, curve in pairs])
        scaled = miss / np.sqrt(2 * own**2 + theirs**2)
        assert np.sqrt(np.square(scaled).mean()) < 1.7
        assert np.abs(scaled).max() < 5
        assert np.median(np.abs(miss)) < 0.1
    rates = [(one.curve_without_sink.rate, head.curve_without_sink.rate) for one, head in heads]
    assert np.mean([abs(one.slope - other.slope) for one, other in rates]) < 0.05  # type: ignore[union-attr]
    if predicted.causal:
        shares = np.array([[head.sink.share for head in pair] for pair in heads])  # type: ignore[union-attr]
        assert np.abs(shares[:, 0] - shares[:, 1]).max() < 0.1
    assert "from the run's own tokens: the exact finite-n law" in str(run)
    assert all(len(error) == len(SIZES) for error in run.view().data()["heads"]["pilot_error"])  # type: ignore[operator]


def test_the_document_of_a_prediction(predicted: ll.ProbeRun) -> None:
    document = json.loads(json_text(predicted.document()))
    assert document["n"] == list(SIZES)
    assert document["replicates"] == 0
    assert document["tokens"] == len(document["windows"]["keys"]) * len(range(*document["pooled_positions"]))
    assert not set(document["windows"]["keys"]) & set(document["windows"]["pilot"])
    assert not set(document["windows"]["keys"] + document["windows"]["pilot"]) & set(document["windows"]["reserved"])
    assert len(document["windows"]["pilot"]) >= 16
    assert document["summary"]["rates"]["predictors"] == {}
    causal = TINY[predicted.model].causal
    for head in document["heads"]:
        ends = zip(*(head[f"relative_output_error{end}"] for end in ("_low", "", "_high")), strict=True)
        assert all(low <= error <= high for low, error, high in ends)
        low, high = head["rate"]["interval"]
        assert low <= head["rate"]["slope"] <= high
        assert (head["without_sink"] is not None, head["sink"] is not None) == (causal, causal)
        bare = head["without_sink"] or head
        assert bare["rate"]["slope"] == pytest.approx(head["rate_pilot"])
        assert {head[name] for name in ("regime", "horizon", "pareto_k", "entropy", "remedy")} == {None}
        for needed in filter(None, head["tokens_for"].values()):
            assert needed["extrapolated"] == (not SIZES[0] <= needed["n"] <= SIZES[-1])
            assert needed["interval"][0] <= needed["n"] <= (needed["interval"][1] or np.inf)
    assert any(head["tokens_for"]["0.1"] for head in document["heads"])


def test_a_prediction_has_the_tables_and_answers_of_a_probe(predicted: ll.ProbeRun) -> None:
    assert {"relative_output_error", "relative_output_error_low", "n"} <= set(predicted.curves.columns)
    assert len(predicted.curves) == 12 * len(SIZES)
    assert len(predicted.heads) == 12
    assert not predicted.heads.isna().all().any()
    assert list(predicted.predict(500).columns) == ["layer", "head", "error", "low", "high", "extrapolated"]
    at = predicted.predict(32)
    expected = [head.curve.error[2] for head in predicted.records]
    np.testing.assert_allclose(at["error"], expected, rtol=1e-6)
    assert ((at["low"] <= at["error"]) & (at["error"] <= at["high"])).all()
    head = predicted.records[0]
    doubled = head.curve.scaled(0.5)
    np.testing.assert_allclose(doubled.error, 2 * head.curve.error, rtol=1e-5)
    assert 1 <= (head.keys_for(0.5, 4096).n or 0) <= 4096
    assert "predicted rate" in figures.map_figure(predicted, "rate").title


def test_views_say_that_errors_are_predicted(predicted: ll.ProbeRun) -> None:
    shown = str(predicted)
    for said in ("no replicates", "Nothing was measured", "95% interval", "What to do"):
        assert said in shown
    assert "regime" not in shown.split("note:")[0].split("Advice")[0]
    data = predicted.view().data()  # type: ignore[operator]
    assert (data["predicted"], data["regimes"]) == (True, [])
    assert "predicted, not measured" in page(predicted.view(), {"arguments": {}})
    assert "predicted" in predicted._repr_html_()


def test_a_plan_for_random_keys_needs_no_more_than_a_prediction() -> None:
    model, corpus = language_model(), letters_text()
    run = ll.predict(model, corpus, tokens=800, queries=16, window=32, sizes=[8, 16, 32])
    made = ll.plan(model, corpus, run=run, policy="random", total=0.5, context=CONTEXT)
    assert 0.4 < made.total.share <= 0.5


def test_it_comes_back_as_it_was(predicted: ll.ProbeRun, tmp_path: Path) -> None:
    loaded = ll.load(predicted.save(tmp_path / "run"))
    assert json_text(loaded.document()) == json_text(predicted.document())
    assert str(loaded) == str(predicted)
    assert repr(loaded) == f"<ProbeRun of {predicted.model} on {predicted.corpus}: predicted, 12 heads>"


def test_the_same_seed_predicts_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many forwards the windows take, and another seed predicts something else."""
    calls: list[tuple[float, float]] = []
    small: dict[str, Any] = {"tokens": 200, "queries": 6, "window": WINDOW, "sizes": (8, 16)}
    first = ll.predict(tiny("llama"), text, progress=lambda *done: calls.append(done), **small)
    assert calls == [(1, 3), (2, 3), (3, 3)]
    monkeypatch.setattr(predict_module, "FORWARD", 5 * WINDOW)
    again, other = (ll.predict(tiny("llama"), text, seed=seed, **small) for seed in (0, 1))
    name = "relative_output_error"
    np.testing.assert_allclose(again.curves[name], first.curves[name], rtol=1e-3)
    assert not np.allclose(other.curves[name], first.curves[name], rtol=1e-3)


def test_a_text_of_two_windows_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz" * 2)
    found = ll.predict(tiny("llama"), str(path), queries=4, window=20, sizes=(4, 8, 16, 64))
    names = [f"relative_output_error{end}" for end in ("", "_low", "_high")]
    assert np.isfinite(found.curves[names]).all(axis=None)
    assert [warning.split(":")[0] for warning in found.warnings] == [
        "the text has 2 windows", "all queries come from one window", "intervals of a decoder are too narrow",
    ]  # fmt: skip
    path.write_text("abcdefghijklmnopqrstuvwxyz")
    with pytest.raises(ll.InputError, match="holds 1 whole windows of 20 tokens; expected one for queries and one"):
        ll.predict(tiny("llama"), str(path), queries=4, window=20, sizes=(4, 8))
    with pytest.raises(ll.InputError, match="the pilot has 2 tokens; expected at least 8"):
        ll.predict(tiny("llama"), str(path), queries=4, window=4, tokens=4, sizes=(4, 8))


@pytest.mark.parametrize(("changed", "message"), [({"tokens": 0}, "tokens is 0"), ({"queries": 1}, "queries is 1")])
def test_bad_numbers_are_refused(changed: dict[str, Any], message: str, text: str) -> None:
    with pytest.raises(ll.InputError, match=message):
        ll.predict(tiny("bert"), text, **OPTIONS | changed)


def layer_of(scores: torch.Tensor) -> Layer:
    """A layer of one head whose scores of keys e₁, e₂, ... are these (m, M)."""
    traits = Traits(1.0, None, None, None, {}, None, None, "")
    return Layer(0, scores[None, None], None, False, np.arange(len(scores)), traits)


@pytest.mark.parametrize("gap", [0.0, 30.0, 90.0, 1000.0])
def test_one_key_that_holds_everything(gap: float) -> None:
    """A sample without it attends to the others alike: |Γ_n − Γ|² is (1 − 1/M)^n (|v̄ − v₁|² + s²/n), by hand."""
    tokens, n = 600, np.array([16, 32, 64])
    values = np.random.default_rng(0).standard_normal((tokens, 1, 3))
    scores = torch.zeros(4, tokens)
    scores[:, 0] = gap
    ((found,),) = predict_layer(layer_of(scores), torch.eye(tokens)[:, None], torch.as_tensor(values), n.tolist())
    v, rest = values[:, 0], values[1:, 0]
    assert found.defined
    if gap == 0:
        limit = v.mean(0)
        expected = np.sqrt(v.var(0).sum() / n)
    else:
        limit = v[0]
        square = np.square(rest.mean(0) - v[0]).sum() + rest.var(0).sum() / n
        expected = np.sqrt((1 - 1 / tokens) ** n * square)
    np.testing.assert_allclose(np.exp(found.at(n)[0]), expected / np.linalg.norm(limit), rtol=0.01)


def test_a_head_without_output_has_no_error(text: str) -> None:
    loaded = LoadedModel("silent", TINY["bert"].model(), tiny_tokenizer(special=True))
    model: Any = loaded.model
    for layer in model.encoder.layer:
        layer.attention.self.value.weight.zero_()
        layer.attention.self.value.bias.zero_()
    found = ll.predict(loaded, text, tokens=160, queries=4, **OPTIONS)
    document = json.loads(json_text(found.document()))
    assert document["heads"][0]["relative_output_error"] == [None] * len(SIZES)
    assert document["heads"][0]["rate"] is None
    assert document["heads"][0]["tokens_for"] == dict.fromkeys(("0.1", "0.05", "0.01"))
    assert "–" in str(found)
    assert "nan" not in str(found)


def test_the_command(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = tmp_path_factory.mktemp("model")
    TINY["llama"].model().save_pretrained(model)
    tiny_tokenizer(special=False).save_pretrained(model)
    given = ["predict", str(model), "--corpus", text, "--window", "16", "--sizes", "8:32:3"]
    capsys.readouterr()

    def run(*more: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main([*given, *more])
        shown = capsys.readouterr()
        return int(stopped.value.code or 0), shown.out, shown.err

    code, out, err = run("--tokens", "160", "--queries", "4", "--json", "--out", str(tmp_path / "run"))
    assert (code, err.count("\n"), "intervals of a decoder are too narrow" in err) == (0, 1, True)
    document = json.loads(out)
    assert (document["n"], document["tokens_asked"], document["queries"]) == ([8, 16, 32], 160, 4)
    loaded = ll.load(tmp_path / "run")
    assert loaded.made["command"] == "predict"
    assert json_text(loaded.document()) == json_text(document)
    code, out, err = run("--queries", "4", "--quiet")
    assert (code, err) == (0, "")
    assert "The 5 slowest heads" in out
    assert json.loads((tmp_path / "run" / "run.json").read_text())["kind"] == "probe"
    code, _, err = run("--tokens", "0.5")
    assert code == 2
    assert "tokens is 0.5; expected a whole number" in err
