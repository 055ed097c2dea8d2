"""Probes of a real encoder: a small run if the encoder is installed, a full run against an independent computation.

The full run needs a text: LIMITLENS_TEXT=wikitext.txt pytest tests/probing/test_probe_real.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from limitlens.models import ALIASES, LoadedModel, load
from limitlens.probing.probe import probe

TEXT = os.environ.get("LIMITLENS_TEXT")
WINDOW, TOKENS, SIZES, QUERIES, REPLICATES = 256, 100_000, (64, 128, 256, 512, 1024, 2048, 4096), 256, 8

pytestmark = pytest.mark.skipif(ALIASES["minilm"].locate() is None, reason=ALIASES["minilm"].command)


@pytest.fixture(scope="module")
def minilm() -> LoadedModel:
    return load("minilm")


def test_a_small_run_of_a_real_encoder(minilm: LoadedModel) -> None:
    run = probe(minilm, tokens=16_000, sizes="64:1024:5", queries=64, seed=1)
    heads = run.heads
    assert len(heads) == 72
    assert run.replicates == run.tokens // 1024 == 10
    errors = np.array([head.curve.error for head in run.records])
    assert (errors[:, 0] > errors[:, -1]).all()
    assert 0.02 < errors[:, -1].min() < 0.2 < errors[:, -1].max() < 3
    assert 0 < heads.rate.min() < 0.35 < heads.rate.median() < 0.6
    # The scores of a wide head pick single tokens: the wider, the slower.
    assert run.document()["summary"]["rates"]["rank_correlation_score_std"] < -0.4
    assert (heads.horizon**2 <= heads.coupling * 1.05).all()  # H² ≤ Ψ, the two from different subsets of the tokens
    assert heads.effective_tokens.between(1, 1024).all()


@pytest.fixture(scope="module")
def layers(minilm: LoadedModel) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of every layer over the text, (windows, 256, 12, 32), by hooks on BERT's own modules."""
    if TEXT is None:
        pytest.skip("set LIMITLENS_TEXT to a text of at least 100,000 tokens, such as WikiText-2")
    ids = minilm.tokenizer(Path(TEXT).read_text("utf-8"), add_special_tokens=False)["input_ids"]
    own = WINDOW - 2
    rows = [[101, *ids[i : i + own], 102] for i in range(0, TOKENS // WINDOW * own, own)]
    found: list[list[Tensor]] = [[] for _ in range(18)]
    hooks = [
        getattr(layer.attention.self, name).register_forward_hook(
            lambda _, __, output, place=3 * number + part: found[place].append(output.unflatten(-1, (12, 32)))
        )
        for number, layer in enumerate(minilm.model.encoder.layer)
        for part, name in enumerate(("query", "key", "value"))
    ]
    with torch.inference_mode():
        for start in range(0, len(rows), 32):
            minilm.model(input_ids=torch.tensor(rows[start : start + 32]))
    for hook in hooks:
        hook.remove()
    together = [torch.cat(parts) for parts in found]
    return [(together[3 * i], together[3 * i + 1], together[3 * i + 2]) for i in range(6)]


def dense_errors(query: Tensor, key: Tensor, value: Tensor, generator: np.random.Generator) -> Any:
    """Relative output errors (sizes,) of one head: queries (m, 32), keys and values (N, 32), all scores formed."""
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()

    def attend(chosen: Any) -> Tensor:
        scores = query @ key[chosen].T / 32**0.5
        return torch.softmax(scores, -1) @ value[chosen]

    limit = attend(slice(None))
    wrong = np.zeros((REPLICATES, len(SIZES)))
    for r in range(REPLICATES):
        order = generator.permutation(len(key))
        for j, n in enumerate(SIZES):
            wrong[r, j] = (attend(order[:n]) - limit).square().sum(-1).mean() / (1 - n / len(key))
    return np.sqrt(wrong.mean(0) / float(limit.square().sum(-1).mean()))


def test_errors_are_those_of_an_independent_computation(
    minilm: LoadedModel, layers: list[tuple[Tensor, Tensor, Tensor]]
) -> None:
    assert TEXT is not None
    generator = np.random.default_rng(11)
    asked = generator.choice(20 * WINDOW, QUERIES, replace=False)  # the first 20 windows ask, the others answer
    expected = []
    for query, key, value in layers:
        queries = query[:20].flatten(0, 1)[asked]
        keys, values = key[20:].flatten(0, 1), value[20:].flatten(0, 1)
        expected += [dense_errors(queries[:, h], keys[:, h], values[:, h], generator) for h in range(12)]
    run = probe(minilm, TEXT, TOKENS, window=WINDOW, sizes=SIZES, queries=QUERIES, seed=0)
    measured = np.array([head.curve.error for head in run.records])
    ratio = measured / np.array(expected)
    at = SIZES.index(1024)
    print("\nmedian over heads of |probe/dense - 1| at each n:", np.round(np.median(np.abs(ratio - 1), axis=0), 3))
    print("layer 0 at n = 1024, probe:", np.round(np.sort(measured[:12, at]), 3))
    print("layer 0 at n = 1024, dense:", np.round(np.sort(np.array(expected)[:12, at]), 3))
    spread, rate = run.heads.score_std, run.heads.rate
    print(
        f"rates {rate.min():.2f}..{rate.max():.2f}, correlation with the spread {np.corrcoef(spread, rate)[0, 1]:.2f}"
    )
    assert (np.median(np.abs(ratio - 1), axis=0) < 0.10).all()
    assert measured[:12, at].min() == pytest.approx(0.10, abs=0.02)
    assert measured[:12, at].max() == pytest.approx(0.96, abs=0.05)
