"""Estimates of time and memory against counts of operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from limitlens.cost import FORWARD_RATE, forward_cost

SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 192}
CASES = {
    "encoder": (transformers.AutoModel, transformers.BertConfig(**SIZES, vocab_size=500)),
    "decoder": (transformers.AutoModelForCausalLM, transformers.LlamaConfig(**SIZES, vocab_size=500)),
    "tied decoder": (
        transformers.AutoModelForCausalLM,
        transformers.LlamaConfig(**SIZES, vocab_size=3000, tie_word_embeddings=True, num_key_value_heads=2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("window", [16, 256])
def test_the_time_of_forward_passes_follows_the_operations_they_need(name: str, window: int) -> None:
    kind, config = CASES[name]
    model = kind.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros((2, window), dtype=torch.long))
    seconds, memory = forward_cost(model, 2 * window, window)
    expected = counter.get_total_flops() / (FORWARD_RATE * torch.get_num_threads())
    assert expected / 1.5 < seconds < expected * 1.5
    assert memory >= 4 * window * (64 + 4 * window)  # states and scores of a layer
    assert forward_cost(model, 4 * window, window) == (pytest.approx(2 * seconds), memory)
