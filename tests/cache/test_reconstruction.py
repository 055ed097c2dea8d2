"""Scores of cached keys while a model repeats its context, against a direct computation of the attention weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cache_cases import language_model
from limitlens.cache import reconstruction
from limitlens.cache.reconstruction import FIRST, repeat_attention
from limitlens.models import Captured, capture
from limitlens.models.chat import Chat, chat_of

IDS = torch.arange(40)[None] % 7 + 3


def test_weights_are_the_largest_over_queries_and_heads_of_a_group() -> None:
    """One chunk: the softmax is the model's own, over context, prompt and repetition."""
    loaded, calls = language_model(), list[Captured]()
    asked = loaded.tokenizer(FIRST, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        cache = loaded.model(input_ids=IDS, use_cache=True).past_key_values
        with capture(loaded.model, calls.append):
            loaded.model(input_ids=torch.cat([IDS, asked, IDS], 1), use_cache=False)
    found = repeat_attention(loaded, cache, IDS)
    assert cache.get_seq_length() == 40
    assert len(found) == len(calls) == 3
    for call, weights in zip(calls, found, strict=True):
        assert weights.shape == (2, 40)
        scores = call.scale * call.query[0, :, 40:] @ call.key[0].repeat_interleave(2, 0).mT
        hidden = torch.arange(call.key.shape[2]) > torch.arange(40, call.key.shape[2])[:, None]
        expected = scores.masked_fill(hidden, -torch.inf).softmax(-1)[..., :40].amax(1).view(2, 2, 40).amax(1)
        torch.testing.assert_close(weights, expected, atol=1e-5, rtol=1e-4)


def test_chunks_cover_the_context_and_hide_the_other_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk shares its softmax with the first tokens alone, so weights are larger than among all keys."""
    loaded = language_model()
    with torch.inference_mode():
        cache = loaded.model(input_ids=IDS, use_cache=True).past_key_values
    monkeypatch.setattr(reconstruction, "CHUNK", 16)
    found = repeat_attention(loaded, cache, IDS[0])
    assert all(bool((weights > 0).all()) and bool((weights <= 1).all()) for weights in found)


def test_a_chat_template_is_split_around_the_message() -> None:
    loaded = language_model()
    assert chat_of(loaded) is None
    tokenizer = loaded.tokenizer.__class__(tokenizer_object=loaded.tokenizer.backend_tokenizer)
    tokenizer.chat_template = "ab{{ messages[0]['content'] }}{% if add_generation_prompt %}cd{% endif %}"
    encode = loaded.tokenizer
    expected = Chat(*(tuple(encode(part, add_special_tokens=False)["input_ids"]) for part in ("ab", "cd")))
    assert chat_of(replace(loaded, tokenizer=tokenizer)) == expected
    tokenizer.chat_template = "{{ messages[0]['content'] | upper }}"  # the message cannot be found again
    assert chat_of(replace(loaded, tokenizer=tokenizer)) == Chat((), ()) or chat_of(loaded) is None


def attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the flash kernel of a GPU computes."""
    key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], 1) for one in (key, value))
    scores = scale * query @ key.mT
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the program runs in Triton's interpreter")
def test_chunks_in_one_forward_pass_have_the_scores_of_one_pass_each(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    loaded = language_model()
    with torch.inference_mode():
        cache = loaded.model(input_ids=IDS, use_cache=True).past_key_values
    monkeypatch.setattr(reconstruction, "CHUNK", 16)
    alone = repeat_attention(loaded, cache, IDS)
    monkeypatch.setattr(reconstruction, "_half_on_gpu", lambda loaded: True)
    monkeypatch.setattr(reconstruction, "_attend", attended)
    for packed in (16, 32, 64):
        monkeypatch.setattr(reconstruction, "PACKED", packed)
        for one, other in zip(alone, repeat_attention(loaded, cache, IDS), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert cache.get_seq_length() == 40


@pytest.mark.skipif(torch.cuda.is_available(), reason="the program runs in Triton's interpreter")
def test_largest_weights_of_heads_that_share_no_keys() -> None:
    """Queries of such heads are a view of (tokens, heads, k), in which heads do not lie one after the other."""
    pytest.importorskip("triton")
    from limitlens.attention.kernels.largest import largest_weights

    query = torch.randn(9, 4, 16).transpose(0, 1)
    key = torch.randn(7, 4, 16).transpose(0, 1)
    scores = query @ key.mT / 4
    total = scores.logsumexp(-1)
    expected = (scores - total[..., None]).amax(1).exp()
    torch.testing.assert_close(largest_weights(query, key, total, 1 / 4), expected, atol=1e-6, rtol=1e-5)
