"""Samples of single documents: token assignment, independent tokens, dependent tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import limitlens as ll
from limitlens.errors import InputError
from limitlens.models.catalog import LoadedModel
from limitlens.sampling.assignment import DocumentAssignment
from limitlens.sampling.cells import Cells
from tiny_models import TINY, tiny_tokenizer

WINDOW = 32
LETTERS = list("abcdefghijklmnopqrstuvwxyz")


def model() -> LoadedModel:
    """One that knows no positions, so that tokens of its first layer are those of the text."""
    made = TINY["bert"].model()
    made.embeddings.position_embeddings.weight.zero_()
    return LoadedModel("letters", made, tiny_tokenizer(special=False))


def probed(text: str, folder: Path, sampling: str, **more: Any) -> Any:
    path = folder / "text.txt"
    path.write_text(text)
    known: dict[str, Any] = {"window": WINDOW, "sizes": [4, 8, 16, 32], "replicates": 60, "queries": 64}
    return ll.probe(model(), str(path), 6000, sampling=sampling, **known | more)


@pytest.mark.parametrize("contiguous", [False, True])
def test_every_replicate_is_one_document_and_every_token_is_assigned_once(contiguous: bool) -> None:
    assignment = DocumentAssignment([60, 60, 20], Cells((3, 8, 15)), 5, 7, 20, contiguous)
    seen, start = [], 0
    samples: dict[int, list[int]] = {r: [] for r in range(5)}
    for block, (counts, parts) in zip(assignment.blocks, assignment.draw(), strict=True):
        for cell, places in enumerate(parts[:-1]):
            assert len(places) == counts.ravel()[cell]
            samples[cell // 3] += (start + places).tolist()
        seen += [start + places for places in parts]
        start += block
    assert sorted(np.concatenate(seen).tolist()) == [*range(140)]
    assert len({own[0] // 20 for own in samples.values()}) == 5  # each another one
    for own in samples.values():
        assert len(own) == 15
        assert len({place // 20 for place in own}) == 1
        assert bool((np.diff(own) % 20 == 1).all()) is contiguous


@pytest.mark.parametrize("sampling", ["document", "contiguous"])
def test_a_document_of_independent_tokens_is_a_sample_of_the_pool(sampling: str, tmp_path: Path) -> None:
    text = "".join(np.random.default_rng(0).choice(LETTERS, 8000))
    pool, single = (probed(text, tmp_path, which) for which in ("pooled", sampling))
    assert single.sampling == sampling
    off = []
    for a, b in zip(pool.records[:4], single.records[:4], strict=True):
        off.append((b.curve.error - a.curve.error) / np.hypot(a.curve.stderr, b.curve.stderr))
        assert (b.curve.stderr / b.curve.error).max() < 0.15
    assert np.abs(off).max() < 3.5
    assert abs(np.mean(off)) < 1.5


def test_a_document_of_one_topic_stays_apart_from_the_pool(tmp_path: Path) -> None:
    """Every window of the text has three letters of its own: more tokens of it say nothing new."""
    rng = np.random.default_rng(1)
    text = "".join("".join(rng.choice(rng.choice(LETTERS, 3, replace=False), WINDOW)) for _ in range(250))
    pool, single = (probed(text, tmp_path, which) for which in ("pooled", "document"))
    for a, b in zip(pool.records[:4], single.records[:4], strict=True):
        assert b.curve.error[-1] > a.curve.error[-1] + 4 * np.hypot(a.curve.stderr[-1], b.curve.stderr[-1])
        assert b.curve.rate.slope < 0.5 * a.curve.rate.slope
    found = ll.compare(pool, single)
    rate = next(row for row in found.summary if row.quantity == "rate")
    assert rate.real
    assert rate.difference.value < -0.1
    assert any("single documents" in warning for warning in single.warnings)


def test_mistakes_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the largest size is 64 and a document has 32 tokens to draw from"):
        probed("abc " * 4000, tmp_path, "document", sizes=[16, 64])
    with pytest.raises(InputError, match="sampling is 'text'; expected one of pooled, document, contiguous"):
        probed("abc", tmp_path, "text")
