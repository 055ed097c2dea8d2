"""Stability of top keys under another context: exact in the first layer, by hand elsewhere, and bad input."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import stats

import limitlens as ll
from limitlens.errors import InputError
from limitlens.interventions.stability import MEASURES, Stability, _stability
from limitlens.models.catalog import LoadedModel
from tiny_models import TINY, tiny_tokenizer


def tiny(name: str) -> LoadedModel:
    return LoadedModel(name, TINY[name].model(), tiny_tokenizer(special=False))


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "t5"])
def test_the_first_layer_keeps_every_rank_and_no_normaliser(name: str) -> None:
    """Its keys and queries know nothing of the context; ratios of a softmax do not either."""
    found = ll.stability(tiny(name), keys=24, tail=12, queries=2, top=3, contexts=4, documents=3).table
    first, later = found[found.layer == 0], found[found.layer > 0]
    for measure in ("overlap", "stays", "ranks"):
        assert first[measure].to_numpy() == pytest.approx(1, abs=1e-6)
        assert later[measure].mean() < 0.99
    assert first["trusted"].all()
    assert first["variation"].min() > 1e-3


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_a_first_layer_that_does_not_see_the_context_does_not_change(name: str) -> None:
    """A sliding window that ends within the tail: weights stay as they are, learned sinks among them."""
    found = ll.stability(tiny(name), keys=24, tail=12, queries=2, top=3, contexts=4, documents=3).table
    assert found[found.layer == 0]["variation"].max() < 1e-6
    assert found[found.layer == 2]["variation"].min() > 1e-3


def test_measures_are_those_of_pairs_of_contexts() -> None:
    weights = torch.rand(4, 2, 3, 9, generator=torch.Generator().manual_seed(0)).softmax(-1)
    found = _stability(weights, 3)
    assert found.shape == (2, len(MEASURES))
    own, pairs = weights[:, 1].numpy(), list(combinations(range(4), 2))
    tops = [[set(np.argsort(-row)[:3]) for row in context] for context in own]
    overlap = np.mean([len(tops[r][q] & tops[s][q]) / 3 for r, s in pairs for q in range(3)])
    stays = np.mean([own[r, q].argmax() == own[s, q].argmax() for r, s in pairs for q in range(3)])
    ranks = np.mean([stats.spearmanr(own[r, q], own[s, q]).statistic for r, s in pairs for q in range(3)])
    assert found[1, :3] == pytest.approx([overlap, stays, ranks])
    largest = own.mean(0).argmax(-1)
    assert found[1, 3] == pytest.approx(
        np.mean([own[:, q, k].std(ddof=1) / own[:, q, k].mean() for q, k in enumerate(largest)])
    )


def test_trust_is_a_threshold_on_the_lower_end() -> None:
    known = {"keys": 24, "tail": 12, "queries": 2, "top": 3, "contexts": 4, "documents": 3}
    counts = [ll.stability(tiny("llama"), trust=trust, **known).table["trusted"].sum() for trust in (0, 0.9, 1)]
    assert counts[0] >= counts[1] >= counts[2]
    assert counts[2] == 4  # the first layer alone


def test_the_lower_end_is_that_of_students_interval() -> None:
    overlap = np.array([0.9, 0.8, 0.85, 0.95])
    low = stats.t.interval(0.95, 3, overlap.mean(), stats.sem(overlap))[0]
    found = np.repeat(overlap[:, None, None], len(MEASURES), -1)
    for trust in (low - 1e-6, low + 1e-6):
        made = Stability("model", "text", 8, 4, 1, 2, trust, ((0, 0),), found)
        assert made.table["trusted"].tolist() == [trust < low]


def test_mistakes_are_refused_in_one_sentence() -> None:
    with pytest.raises(InputError, match="top is 9, but only 8 keys are compared"):
        ll.stability(tiny("bert"), keys=8, tail=10, queries=2, top=9)
    with pytest.raises(InputError, match="trust is 2; expected a share"):
        ll.stability(tiny("bert"), trust=2)
    with pytest.raises(InputError, match="positions"):
        ll.stability(tiny("bert"), keys=4096)
