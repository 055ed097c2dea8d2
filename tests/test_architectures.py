"""plan, trial, intervene, predict and probe on every tiny architecture, with sliding windows of all lengths."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import limitlens as ll
from cache_cases import CONTEXT, text
from limitlens.errors import InputError
from limitlens.models import LoadedModel
from tiny_models import LAYERS, TINY, tiny_tokenizer

DECODERS = [name for name, tiny in TINY.items() if tiny.causal]
# Windows that end before the cut, at it, between the cut and the end of the text, and behind the end.
SLIDING = {"mistral-64": 64, "mistral-65": 65, "mistral-100": 100, "gemma2-100": 100, "mistral-300": 300}
POSITIONS = {"gpt2": {"n_positions": 256}}


@cache
def loaded(name: str) -> LoadedModel:
    """A tiny model by its name in TINY, or NAME-WINDOW for another sliding window; a decoder with its head."""
    plain = name.split("-")[0]
    more: dict[str, Any] = {"head": True} | POSITIONS.get(plain, {}) if TINY[plain].causal else {}
    more |= {"sliding_window": SLIDING[name]} if name in SLIDING else {}
    return LoadedModel(name, TINY[plain].model(**more), tiny_tokenizer(special=not TINY[plain].causal))


@pytest.mark.parametrize("name", [*DECODERS, *SLIDING])
def test_plans_count_and_trials_cut_what_the_cache_of_a_decoder_holds(name: str) -> None:
    """Entries and bytes are those of the model's own cache after the context; sliding layers keep theirs."""
    model = loaded(name)
    made = ll.plan(model, text(), total=0.5, context=CONTEXT, windows=(1, 1))
    (ids,) = torch.arange(CONTEXT).remainder(26).add(3)[None, None]
    with torch.inference_mode():
        layers = model.model(input_ids=ids, use_cache=True).past_key_values.layers
    held = [layer.keys.shape[2] for layer in layers]
    assert made.layer_kinds == tuple("full" if entries == CONTEXT else "sliding" for entries in held)
    assert made.own_cache == tuple((entries,) * TINY[name.split("-")[0]].key_heads for entries in held)
    sizes = [(layer.keys.numel() + layer.values.numel()) * layer.keys.element_size() for layer in layers]
    assert made.size(made.own_cache).bytes == sum(sizes)
    assert made.total.entries_without_plan == sum(map(sum, made.own_cache))
    assert made.total.share == made.total.bytes / sum(sizes)  # all entries of a model have one size
    for kind, own, kept, rows in zip(made.layer_kinds, made.own_cache, made.budgets, made.shares, strict=True):
        assert kind == "full" or (kept == own and set(rows) == {1.0})
    if "full" in made.by_kind:
        assert 0.45 < made.by_kind["full"].share <= 0.5
    else:
        assert made.total.share == 1
        assert "Nothing is saved: every layer has a sliding window shorter than the context" in str(made)
    tried = ll.trial(made, documents=2, model=model)
    full, *cut = tried.rows
    assert (full.share, full.bytes) == (1, sum(sizes))
    # three allocations of ten policies, two of the best policies, and three published methods
    assert len(cut) == (3 * 10 + 2 + 3 if "full" in made.by_kind else 1)
    assert all(row.bytes <= made.total.bytes and (row.kl > 1e-6) == ("full" in made.by_kind) for row in cut)
    own = next(row for row in cut if row.allocation == "plan")
    assert (own.share, own.bytes) == (made.total.share, made.total.bytes)
    assert f"{own.share:.1%} of the cache" in str(tried)


@pytest.mark.parametrize("name", [*DECODERS, *SLIDING])
def test_a_cut_cache_predicts_as_a_masked_text_whatever_the_window(name: str) -> None:
    """Token by token from a cache, or the whole text at once: the same logits, and others without the cut."""
    model, ids = loaded(name), torch.randint(3, 29, (1, CONTEXT + 48), generator=torch.Generator().manual_seed(0))
    full = any(window is None or window > CONTEXT for window in windows_of(name))
    with torch.inference_mode():
        before = model.model(input_ids=ids).logits[0, CONTEXT:]
        with ll.intervene(model, keys="snapkv", count=9, cut=CONTEXT):
            whole = model.model(input_ids=ids, use_cache=False).logits[0, CONTEXT:]
            cache = model.model(input_ids=ids[:, :CONTEXT], use_cache=True).past_key_values
            parts = [model.model(input_ids=part, past_key_values=cache) for part in ids[:, CONTEXT:].split(1, 1)]
    torch.testing.assert_close(torch.cat([part.logits[0] for part in parts]), whole, rtol=1e-3, atol=1e-3)
    assert torch.allclose(whole, before, atol=1e-3) is not full


def windows_of(name: str) -> list[int | None]:
    own = TINY[name.split("-")[0]].sliding
    return [SLIDING.get(name, window) if window else None for window in own]


@pytest.mark.parametrize("name", [name for name, tiny in TINY.items() if not tiny.causal])
def test_an_encoder_is_refused_where_a_cache_is_needed(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is an encoder, which keeps no cache; expected a decoder"):
        ll.plan(loaded(name), text(), context=CONTEXT)


@pytest.mark.parametrize("name", TINY)
def test_every_architecture_is_probed_predicted_and_intervened_in(name: str) -> None:
    model, asked = loaded(name), {"window": 24, "sizes": [8, 32], "queries": 16}
    tokens = 1200
    with torch.inference_mode(), ll.intervene(model, keys="recent", count=3):
        model.model(input_ids=torch.arange(3, 27)[None])
    if name == "mpnet":  # its bias is constant from a distance of 91 on
        with pytest.raises(InputError, match="layer 0 of mpnet adds a bias to its scores that still changes with dist"):
            ll.probe(model, text(), tokens, replicates=2, **asked)
        asked["window"], tokens = 184, 2200
    probed = ll.probe(model, text(), tokens, replicates=4, **asked)
    for run in (probed, ll.predict(model, text(), tokens=tokens // 2, **asked)):
        assert any("add a relative position bias" in warning for warning in run.warnings) == TINY[name].bias
        assert len(run.records) == LAYERS * TINY[name].query_heads
        assert [head.sliding_window for head in run.records[:: TINY[name].query_heads]] == windows_of(name)
