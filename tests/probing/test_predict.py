"""Heads foretold from a pilot: against a probe that measures them, at the edges, from the command line, and back."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import limitlens as ll
from limitlens import cli
from limitlens.models import LoadedModel
from limitlens.probing import predict as predict_module
from limitlens.probing.pilot import Layer, Traits
from limitlens.probing.predict_layer import foretell
from limitlens.record import json_text
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
def told(request: pytest.FixtureRequest, text: str) -> ll.Predictions:
    return ll.predict(tiny(request.param), text, tokens=1600, queries=48, **OPTIONS)


def test_what_is_foretold_is_what_a_probe_measures(told: ll.Predictions, text: str) -> None:
    """In units of the error bars: the predictions' own twice, since a probe's queries are others, and the probe's."""
    run = ll.probe(tiny(told.model), text, 9600, replicates=20, queries=48, **OPTIONS)
    assert [(head.layer, head.head) for head in told.heads] == [head.place for head in run.records]
    for beside in (False, True):
        pairs = [
            (one.without_sink or one, head.law) if beside else (one, head.curve)
            for one, head in zip(told.heads, run.records, strict=True)
        ]
        miss = np.array([np.log(one.error / curve.error) for one, curve in pairs])
        own = np.array([np.log(one.high / one.low) / 3.92 for one, _ in pairs])
        theirs = np.array([curve.stderr / curve.error for _, curve in pairs])
        scaled = miss / np.sqrt(2 * own**2 + theirs**2)
        assert np.sqrt(np.square(scaled).mean()) < 1.7
        assert np.abs(scaled).max() < 5
        assert np.median(np.abs(miss)) < 0.1
    rates = [(one.rate.slope, head.law.rate.slope) for one, head in zip(told.heads, run.records, strict=True)]  # type: ignore[union-attr]
    assert np.mean([abs(a - b) for a, b in rates]) < 0.05
    assert "from the run's own tokens: the exact finite-n law" in str(run)
    assert all(len(error) == len(SIZES) for error in run.view().data()["heads"]["pilot_error"])  # type: ignore[operator]


def test_what_a_prediction_says(told: ll.Predictions) -> None:
    document = json.loads(json_text(told.document()))
    assert document["n"] == list(SIZES)
    assert document["tokens"] == len(document["windows"]["keys"]) * len(range(*document["pooled_positions"]))
    assert not set(document["windows"]["keys"]) & set(document["windows"]["queries"])
    assert len(document["windows"]["queries"]) >= 16
    for head in document["heads"]:
        assert all(
            low <= error <= high for low, error, high in zip(head["low"], head["error"], head["high"], strict=True)
        )
        low, high = head["rate"]["interval"]
        assert low <= head["rate"]["slope"] <= high
        assert (head["without_sink"] is not None) == TINY[told.model].causal
        assert head["without_sink"] is None or head["without_sink"]["rate"] == head["rate"]
        for needed in filter(None, head["tokens_for"].values()):
            assert needed["extrapolated"] == (not SIZES[0] <= needed["n"] <= SIZES[-1])
            assert needed["interval"][0] <= needed["n"] <= (needed["interval"][1] or np.inf)
    assert any(head["tokens_for"]["0.1"] for head in document["heads"])
    table = told.table
    assert list(table.columns) == ["layer", "head", "n", "error", "low", "high"]
    assert len(table) == 12 * len(SIZES)


def test_it_comes_back_as_it_was(told: ll.Predictions, tmp_path: Path) -> None:
    loaded = ll.load(told.save(tmp_path / "run"))
    assert json_text(loaded.document()) == json_text(told.document())
    assert str(loaded) == str(told)
    assert repr(loaded) == f"<Predictions of {told.model} on {told.corpus}: 12 heads from {told.tokens:,} tokens>"


def test_the_same_seed_foretells_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many forwards the windows take, and another seed foretells something else."""
    calls: list[tuple[float, float]] = []
    small: dict[str, Any] = {"tokens": 200, "queries": 6, "window": WINDOW, "sizes": (8, 16)}
    first = ll.predict(tiny("llama"), text, progress=lambda *done: calls.append(done), **small)
    assert calls == [(1, 3), (2, 3), (3, 3)]
    monkeypatch.setattr(predict_module, "FORWARD", 5 * WINDOW)
    again, other = (ll.predict(tiny("llama"), text, seed=seed, **small) for seed in (0, 1))
    np.testing.assert_allclose(again.table["error"], first.table["error"], rtol=1e-3)
    assert not np.allclose(other.table["error"], first.table["error"], rtol=1e-3)


def test_a_text_of_two_windows_is_told_and_foretold(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz" * 2)
    found = ll.predict(tiny("llama"), str(path), queries=4, window=20, sizes=(4, 8, 16, 64))
    assert np.isfinite(found.table[["error", "low", "high"]]).all(axis=None)
    assert [warning.split(":")[0] for warning in found.warnings] == [
        "the text has 2 windows", "all queries come from one window", "few windows say little of a decoder",
    ]  # fmt: skip
    path.write_text("abcdefghijklmnopqrstuvwxyz")
    with pytest.raises(ll.InputError, match="holds 1 whole windows of 20 tokens; expected one for queries and one"):
        ll.predict(tiny("llama"), str(path), queries=4, window=20, sizes=(4, 8))
    with pytest.raises(ll.InputError, match="the pilot has 2 tokens; expected at least 8"):
        ll.predict(tiny("llama"), str(path), queries=4, window=4, tokens=4, sizes=(4, 8))


@pytest.mark.parametrize(("changed", "message"), [({"tokens": 0}, "tokens is 0"), ({"queries": 1}, "queries is 1")])
def test_bad_numbers_are_told(changed: dict[str, Any], message: str, text: str) -> None:
    with pytest.raises(ll.InputError, match=message):
        ll.predict(tiny("bert"), text, **OPTIONS | changed)


def layer_of(scores: torch.Tensor) -> Layer:
    """A layer of one head whose scores of keys e₁, e₂, ... are these (m, M)."""
    traits = Traits(1.0, None, None, None, {}, None, None, "")
    return Layer(0, scores[None, None], None, None, np.arange(len(scores)), traits)


@pytest.mark.parametrize("gap", [0.0, 30.0, 90.0, 1000.0])
def test_one_key_that_holds_everything(gap: float) -> None:
    """A sample without it attends to the others alike: |Γ_n − Γ|² is (1 − 1/M)^n (|v̄ − v₁|² + s²/n), by hand."""
    tokens, n = 600, np.array([16, 32, 64])
    values = np.random.default_rng(0).standard_normal((tokens, 1, 3))
    scores = torch.zeros(4, tokens)
    scores[:, 0] = gap
    ((told,),) = foretell(layer_of(scores), torch.eye(tokens)[:, None], torch.as_tensor(values), n.tolist())
    v, rest = values[:, 0], values[1:, 0]
    assert told.defined
    if gap == 0:
        limit = v.mean(0)
        expected = np.sqrt(v.var(0).sum() / n)
    else:
        limit = v[0]
        square = np.square(rest.mean(0) - v[0]).sum() + rest.var(0).sum() / n
        expected = np.sqrt((1 - 1 / tokens) ** n * square)
    np.testing.assert_allclose(told.error(n)[0], expected / np.linalg.norm(limit), rtol=0.01)


def test_a_head_without_output_has_no_error(text: str) -> None:
    loaded = LoadedModel("silent", TINY["bert"].model(), tiny_tokenizer(special=True))
    model: Any = loaded.model
    for layer in model.encoder.layer:
        layer.attention.self.value.weight.zero_()
        layer.attention.self.value.bias.zero_()
    found = ll.predict(loaded, text, tokens=160, queries=4, **OPTIONS)
    document = json.loads(json_text(found.document()))
    assert document["heads"][0]["error"] == [None] * len(SIZES)
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
    given = ["probe", str(model), "--pilot-only", "--corpus", text, "--window", "16", "--sizes", "8:32:3"]
    capsys.readouterr()

    def run(*more: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main([*given, *more])
        shown = capsys.readouterr()
        return int(stopped.value.code or 0), shown.out, shown.err

    code, out, err = run("--tokens", "160", "--queries", "4", "--json", "--out", str(tmp_path / "run"))
    assert (code, err.count("\n"), "few windows say little of a decoder" in err) == (0, 1, True)
    document = json.loads(out)
    assert (document["n"], document["tokens_asked"], document["queries"]) == ([8, 16, 32], 160, 4)
    loaded = ll.load(tmp_path / "run")
    assert loaded.made["arguments"]["pilot_only"] is True
    assert json_text(loaded.document()) == json_text(document)
    code, out, err = run("--queries", "4", "--quiet")
    assert (code, err) == (0, "")
    assert "The 5 slowest heads" in out
    assert json.loads((tmp_path / "run" / "run.json").read_text())["kind"] == "prediction"
    code, _, err = run("--replicates", "4")
    assert code == 2
    assert "--replicates is of no use with --pilot-only" in err
