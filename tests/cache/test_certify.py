"""Certified reads of a model: coverage, reads, the JSON document, the live model, and what is refused."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom

import limitlens as ll
from cache_cases import language_model, text
from command_line import run
from limitlens.attention.certified import RULES
from limitlens.cache.certify import KNOWN, measure_reads, summarise
from limitlens.cache.certify_result import Certification
from limitlens.cache.cut import cut_windows, window_order
from limitlens.errors import InputError
from limitlens.models import LoadedModel
from limitlens.models.intervene import certified_reads
from tiny_models import TINY, tiny_tokenizer

CONTEXT = 128
PROMISE = (0.3, 0.2)


@cache
def certified() -> Certification:
    return ll.certify(language_model(), text(), context=CONTEXT, error=0.3, delta=0.2, documents=3, draws=16, heads=1.0)


def test_every_rule_is_measured_on_every_head() -> None:
    made = certified()
    assert list(made.rules) == list(RULES)
    assert len(made.heads) == 3 * 4
    assert made.kept
    for name, rule in made.rules.items():
        assert 68 / 256 < rule.read <= 1, name
        assert rule.bytes == pytest.approx(rule.read + RULES[name].selection_bytes(8))
        assert rule.bytes_shared >= rule.bytes - 1e-9
        assert rule.interval[0] <= rule.held <= rule.interval[1]
        assert rule.status == ("proved" if name == "proved" else "asymptotic")
    assert made.rules["proved"].held == 1
    cheapest = min(rule.bytes for rule in made.rules.values() if rule.keeps)
    assert made.overall["bytes"] == made.rules[made.rule].bytes == cheapest
    assert made.overall["read"] == pytest.approx(np.mean([head.read for head in made.heads]))
    assert {task.task for task in made.tasks} == {"text"}
    assert 0 < made.tasks[0].kl < 0.1
    assert set(made.link) == {"theory", *KNOWN}


def test_the_document_holds_what_the_contract_names() -> None:
    document = json.loads(json.dumps(certified().document()))
    assert set(document["overall"]) >= {"read", "held", "interval"}
    assert set(document["heads"][0]) >= {"layer", "head", "read", "held"}
    assert document["rules"]["int4"]["rejected"] == 0


def test_coverage_and_tests_follow_from_the_draws() -> None:
    """A made-up table of two documents: one head holds always, one in half of its draws, and is rejected."""
    loaded = language_model()
    windows = cut_windows(loaded, text(), "auto", CONTEXT)
    reads = np.full((2, 1, 1, 4, 4), np.nan)
    reads[:, 0, 0, 0] = [0.5, 1.0, 1.0, 0.0]
    reads[:, 0, 0, 1] = [0.25, 0.5, 0.5, 0.0]
    reads[0, 0, 0, 2] = [1.0, 1.0, 1.0, 1.0]
    known = np.ones((2, 1, 4, len(KNOWN)))
    found: dict[str, Any] = {"reads": reads, "shared": reads[..., :2, 0], "known": known, "layers": np.zeros((2, 1))}
    made = summarise(
        loaded, windows, [0, 1], text(), CONTEXT, found, ["int4"], PROMISE, (), draws=32, heads=1.0, seed=0
    )
    own = made.rules["int4"]
    assert (own.rejected, own.keeps, made.kept) == (1, False, False)
    assert own.read == pytest.approx((0.5 + 0.25 + 0.5 + 0.25 + 1) / 5)
    assert own.held == pytest.approx((1 + 0.5 + 1 + 0.5 + 1) / 5)
    assert own.whole == pytest.approx(0.2)
    by_head = {head.head: head for head in made.heads}
    assert set(by_head) == {0, 1, 2}
    assert by_head[1].p == pytest.approx(3 * binom.cdf(32, 64, 0.8))
    assert "No rule keeps the promise" in str(made)
    assert "1 of 3 heads always read everything" in str(made)
    nothing = found | {"reads": np.full_like(reads, np.nan)}
    with pytest.raises(InputError, match="and no head was drawn; expected a larger share"):
        summarise(loaded, windows, [0, 1], "", CONTEXT, nothing, ["int4"], PROMISE, (), draws=32, heads=0.01, seed=0)


def test_measured_errors_are_those_of_single_draws() -> None:
    """Half of the heads are left out as asked, and one that reads everything holds in every draw."""
    loaded = language_model()
    windows = cut_windows(loaded, text(), "auto", CONTEXT)
    order = window_order(windows, 0)[:4]
    jobs = [(PROMISE, "int4"), ((1e-6, 0.1), "int4")]
    found = measure_reads(loaded, windows, order, CONTEXT, jobs, draws=4, heads=0.5)
    assert found["reads"].shape == (4, 3, 2, 4, 4)
    assert np.isnan(found["reads"]).mean() == 0.5
    assert np.nanmean(found["reads"][:, :, 1, :, 1]) == 1
    assert np.nanmean(found["reads"][:, :, 1, :, 0]) > np.nanmean(found["reads"][:, :, 0, :, 0])
    again = measure_reads(loaded, windows, order, CONTEXT, jobs, draws=4, heads=0.5)
    assert np.array_equal(found["reads"], again["reads"], equal_nan=True)


def test_the_live_model_predicts_with_certified_reads() -> None:
    model = language_model().model
    ids = torch.tensor(cut_windows(language_model(), text(), "auto", CONTEXT)[0])[None].long()
    full = model(ids).logits
    with ll.intervene(model, certify=(0.3, 0.2)):
        changed = model(ids).logits
        again = model(ids).logits
    assert torch.equal(changed, again)
    torch.testing.assert_close(changed[:, :68], full[:, :68], rtol=1e-4, atol=1e-4)  # fewer keys than every query reads
    assert not torch.allclose(changed, full, atol=1e-3)
    with ll.intervene(model, keys=certified_reads((1e-6, 0.1), 0)):  # nothing can be left out
        torch.testing.assert_close(model(ids).logits, full, rtol=1e-3, atol=1e-3)
    with ll.intervene(model, certify=(0.3, 0.2), seed=1):
        assert not torch.equal(model(ids).logits, changed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"error": 0.0}, "the error is 0; expected a share between 0 and 1"),
        ({"error": 1.5}, "the error is 1.5; expected a share between 0 and 1"),
        ({"delta": 0.0}, "delta is 0; expected a probability of a larger error between 0 and 1"),
        ({"delta": 1.0}, "delta is 1; expected a probability of a larger error between 0 and 1"),
        ({"rules": ["best"]}, "the rule 'best' is unknown; expected some of denominator"),
        ({"rules": []}, "no rule was given; expected some of denominator"),
        ({"context": 64}, "context is 64; expected at least 128 tokens"),
        ({"documents": 1}, "documents is 1; expected at least 2"),
        ({"draws": 0}, "draws is 0; expected at least 1"),
        ({"heads": 2.0}, "heads is 2; expected a share above 0 and at most 1"),
        ({"tasks": ["sums"]}, "the tasks are sums; expected some of text"),
    ],
)
def test_bad_arguments_are_refused_before_a_model_loads(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ll.certify("no-model", text(), **options)


def test_a_short_text_and_an_encoder_are_refused() -> None:
    with pytest.raises(InputError, match="99 documents were asked for, so give more text or a shorter context"):
        ll.certify(language_model(), text(), context=CONTEXT, documents=99)
    bert = LoadedModel("bert", TINY["bert"].model(), tiny_tokenizer(special=False))
    with pytest.raises(InputError, match="is an encoder, which keeps no cache"):
        ll.certify(bert, text(), context=CONTEXT)


def test_the_command_prints_one_document(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("limitlens.cache.certify.load", lambda *args, **options: language_model())
    asked = (
        "--corpus",
        text(),
        "--context",
        "128",
        "--error",
        "0.3",
        "--documents",
        "2",
        "--draws",
        "4",
        "--rules",
        "int4",
    )
    code, out, _ = run(capsys, "certify", "letters", *asked, "--json")
    assert code == 0
    assert set(json.loads(out)["rules"]) == {"int4"}
    code, out, err = run(capsys, "certify", "letters", *asked, "--delta", "2")
    assert (code, out) == (2, "")
    assert "delta is 2; expected a probability" in err
