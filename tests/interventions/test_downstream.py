"""Task accuracy with n keys per query: labelled documents, the logistic classifier, outcomes, bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import limitlens as ll
from command_line import run as command
from downstream_cases import data, documents, encoder, folder
from limitlens.errors import InputError
from limitlens.interventions.downstream import Downstream, read_labelled, train_classifier
from limitlens.models import Captured, capture


@cache
def asked() -> Downstream:
    return ll.downstream(encoder(), data(), [4, 42], test=30, window=42)


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    rows = documents()
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *(",".join(row) for row in rows)]))
    assert read_labelled(str(tmp_path / "rows.csv")) == rows
    assert read_labelled(data()) == rows
    for place, (words, label) in enumerate(rows):
        folder = tmp_path / "tree" / "inner" / label
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{place:03}.txt").write_text(words)
    assert sorted(read_labelled(str(tmp_path / "tree"))) == sorted(rows)


def test_the_head_is_the_minimum_of_its_loss() -> None:
    generator = np.random.default_rng(0)
    truth = np.array([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [0.3, 0.0, 0.0]])
    x = generator.normal(size=(3000, 2))
    noise = generator.gumbel(size=(3000, 3))
    best = x @ truth[:-1] + truth[-1]
    y = (best + noise).argmax(1)
    weights, penalty = train_classifier(x, y, 0)
    standardised = torch.tensor((x - x.mean(0)) / x.std(0))
    inner = np.vstack([weights[:-1] * x.std(0)[:, None], weights[-1] + x.mean(0) @ weights[:-1]])  # of standardised x
    inner, wanted = torch.tensor(inner, requires_grad=True), torch.tensor(y)
    loss = torch.nn.functional.cross_entropy(standardised @ inner[:-1] + inner[-1], wanted)
    (loss + penalty / 2 * inner[:-1].square().sum()).backward()
    assert inner.grad is not None
    assert inner.grad.abs().max() < 1e-4
    scores = x[:3] @ weights[:-1] + weights[-1]
    assert scores == pytest.approx((standardised[:3] @ inner[:-1] + inner[-1]).detach().numpy())
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(torch.tensor(best), wanted).item(), abs=0.02)


def test_all_keys_change_nothing_and_few_keys_something() -> None:
    table = asked().table
    every = table[table["keys"] == 42]
    assert (every["agreement"] == 1).all()
    assert every["margin_error"].max() < 1e-5
    assert every["accuracy_change"].abs().max() == 0
    few = table[(table["keys"] == 4) & (table["documents"] == "all")].iloc[0]
    assert few["margin_error"] > 0.05
    assert 0 < few["margin_error_stderr"] < few["margin_error"]
    assert every["accuracy"].iloc[0] > 0.8  # what the letters tell
    assert asked().trained == 60
    assert set(table["documents"]) == {"all", "low horizon", "middle horizon", "high horizon"}


def test_margins_are_relative_to_those_with_all_keys() -> None:
    outcomes = np.random.default_rng(1).uniform(1, 2, (12, 1, 7))
    made = replace(asked(), outcomes=outcomes, horizon=np.arange(12.0), sizes=(4,), documents=12)
    _, _, margin, change, _, full_margin, full_square = outcomes[:, 0].mean(0)
    found = made.table.iloc[0]
    assert found["margin"] == pytest.approx(margin / full_margin)
    assert found["margin_error"] == pytest.approx(np.sqrt(change / full_square))


def test_the_horizon_of_a_document_is_that_of_its_scores() -> None:
    """The largest singular value of the centred matrix of scores, over its number of tokens, of every head."""
    order = np.random.default_rng(0).permutation(len(documents()))
    ids = encoder().tokenizer(documents()[order[0]][0])["input_ids"]
    found = []

    def take(call: Captured) -> None:
        scores = call.scale * (call.query[0] @ call.key[0].mT).double()
        centred = scores - scores.mean(-1, keepdim=True)
        centred = centred - centred.mean(-2, keepdim=True)
        found.extend((torch.linalg.svdvals(centred)[:, 0] / len(ids)).tolist())

    with torch.inference_mode(), capture(encoder().model, take):
        encoder().model(input_ids=torch.tensor([ids]))
    assert asked().horizon[0] == pytest.approx(np.mean(found), rel=1e-4)


def test_the_command_and_its_mistakes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = ("downstream", folder(), "--test", 8, "--window", 42, "--keys", "4,42")
    code, out, _ = command(capsys, *small, "--data", data(), "--json", "--out", tmp_path / "run")
    told = json.loads(out)
    assert (code, told["documents"], len(told["keys"])) == (0, 8, 8)
    assert ll.load(tmp_path / "run").document() == told
    (tmp_path / "none.jsonl").write_text('{"text": "abc"}\n')
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_text("abc")
    (tmp_path / "broken.jsonl").write_text("abc")
    for given, words in (
        ((data(), "--keys", "4,43"), "4, 43 for documents of 42 tokens; expected numbers from 1 to 42"),
        ((tmp_path / "none.jsonl",), "a row without 'label'; expected a text and a label"),
        ((tmp_path / "one",), "fewer than two labels; expected a folder of .txt files for each label"),
        ((tmp_path / "broken.jsonl",), "cannot be read"),
        ((tmp_path / "nowhere",), "No such file"),
        ((data(), "--keys", "4", "--key-sharing", "alone"), "expected one of shared, own"),
    ):
        code, out, err = command(capsys, *small, "--data", *given)
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1
    with pytest.raises(InputError, match="0 train the head"):
        ll.downstream(encoder(), data(), [4], test=90, window=42)
