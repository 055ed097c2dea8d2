"""A tiny decoder and a text without a repeated token, which show what of the text each part of a program reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from limitlens.models import LoadedModel


def counted_words(count: int) -> str:
    """A text of words that are all different: w0 w1 w2 and so on."""
    return " ".join(f"w{number}" for number in range(count))


def counting_model(words: int, positions: int = 256) -> LoadedModel:
    """A decoder of one layer that reads such a text, in which token number i stands at place i."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    table = {word: number for number, word in enumerate([*counted_words(words).split(), "[UNK]"])}
    backend = Tokenizer(models.WordLevel(table, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=words + 1, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=positions,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    return LoadedModel("counting", model, tokenizer)


@contextmanager
def reading(loaded: LoadedModel) -> Iterator[list[torch.Tensor]]:
    """The token ids of every forward pass in the block, in their order."""
    found: list[torch.Tensor] = []
    table: Any = loaded.model.get_input_embeddings()
    hook = table.register_forward_pre_hook(lambda _, args: found.append(args[0].flatten()))
    yield found
    hook.remove()
