"""A tiny rotary decoder trained to copy within 128 tokens, and the result of `temper` for it at 512 tokens."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch
import transformers

from limitlens.interventions.temper import Temper, temper
from limitlens.models import LoadedModel

TRAINED, TO = 128, 512


def texts(rows: int, length: int, seed: int) -> torch.Tensor:
    """Random letters where the second half of every 32 repeats the first: a task for an induction head."""
    halves = torch.randint(3, 29, (rows, length // 32, 16), generator=torch.Generator().manual_seed(seed))
    return torch.cat([halves, halves], -1).flatten(1)


def words() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer that knows letters, and no other words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokens = ["[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz"]
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


@cache
def decoder(steps: int = 150) -> LoadedModel:
    """Two layers, trained by Adam on windows of 128 tokens for so many steps."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=29, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=TRAINED, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for step in range(steps):
        ids = texts(8, TRAINED, step)
        loss = model(input_ids=ids, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return LoadedModel("copier", model.eval().requires_grad_(False), words())


@cache
def text(seed: int = 5) -> str:
    """A file of such letters, enough for four documents of 512 tokens."""
    tokens = words().convert_ids_to_tokens(texts(5, TO, 1000 + seed).flatten().tolist())
    path = Path(tempfile.mkdtemp()) / "letters.txt"
    path.write_text(" ".join(tokens))
    return str(path)


@cache
def tempered() -> Temper:
    """Two fits per head, and all schedules on two documents of each text."""
    return temper(decoder(), TO, text(), text(6), retrieval_weight=(0.0, 0.5), documents=2, steps=4, rate=0.1)
