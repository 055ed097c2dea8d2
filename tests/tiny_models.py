"""Tiny random transformers, one for each kind of attention, built from configurations without any download.

Every test of captured heads runs over `TINY`; `dense_outputs` is the independent float64 computation they compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from limitlens.models import Captured

VOCABULARY = 97
LAYERS = 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
GROUPED: dict[str, Any] = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
DECODER: dict[str, Any] = {"output": "o_proj", "causal": True, "key_heads": 2, "rotary": True}


@dataclass(frozen=True)
class Tiny:
    """A tiny model and what must be found in it.

    `output` is how the names of the modules end that read the heads' outputs; sliding, softcap and sinks are what each
    layer must report; projected are the layers whose projections are known, and factor what follows them.
    """

    build: Callable[..., PreTrainedModel]
    output: str
    causal: bool
    query_heads: int = 4
    key_heads: int = 4
    sliding: tuple[int | None, ...] = (None,) * LAYERS
    softcap: float | None = None
    sinks: bool = False
    bias: bool = False
    rotary: bool = False
    projected: tuple[int, ...] = tuple(range(LAYERS))
    factor: float | None = 1.0
    implementation: str = "sdpa"

    def model(self, seed: int = 0, **build: Any) -> PreTrainedModel:
        """The model, its weights large enough that no softmax is flat, its biases and norms away from their start."""
        torch.manual_seed(seed)
        model = self.build(**build).eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.add_(0.25 * torch.randn_like(parameter))
        return model


def _of(architecture: str, **options: Any) -> Callable[..., PreTrainedModel]:
    """A function that builds the model, or with `head` its language model; it takes further options."""
    config = getattr(transformers, f"{architecture}Config")
    bare = f"{architecture}EncoderModel" if architecture == "T5" else f"{architecture}Model"
    whole = "GPT2LMHeadModel" if architecture == "GPT2" else f"{architecture.removesuffix('Text')}ForCausalLM"

    def build(*, head: bool = False, **more: Any) -> PreTrainedModel:
        return getattr(transformers, whole if head else bare)(config(**options | more))  # type: ignore[no-any-return]

    return build


TINY = {
    "bert": Tiny(_of("Bert", **SIZES), "attention.output.dense", causal=False),
    "distilbert": Tiny(
        _of("DistilBert", vocab_size=VOCABULARY, dim=32, n_layers=LAYERS, n_heads=4, hidden_dim=48),
        "out_lin",
        causal=False,
    ),
    "albert": Tiny(_of("Albert", embedding_size=16, **SIZES), "attention.dense", causal=False, projected=(0,)),
    "t5": Tiny(
        _of(
            "T5",
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=LAYERS,
            num_heads=4,
            relative_attention_max_distance=12,
        ),
        "SelfAttention.o",
        causal=False,
        bias=True,
    ),
    "mpnet": Tiny(
        _of("MPNet", **SIZES | {"max_position_embeddings": 200}),
        "attn.o",
        causal=False,
        bias=True,
        implementation="eager",
    ),
    "modernbert": Tiny(
        _of("ModernBert", local_attention=8, global_attn_every_n_layers=2, pad_token_id=0, **SIZES),
        "attn.Wo",
        causal=False,
        sliding=(None, 5, None),
        rotary=True,
        projected=(),
    ),
    "gpt2": Tiny(
        _of("GPT2", vocab_size=VOCABULARY, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=64),
        "attn.c_proj",
        causal=True,
    ),
    "opt": Tiny(
        _of("OPT", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=LAYERS, ffn_dim=48, num_attention_heads=4),
        "out_proj",
        causal=True,
        factor=8**-0.5,  # its queries are scaled before the scores are
    ),
    "llama": Tiny(_of("Llama", **GROUPED), **DECODER),
    "qwen3": Tiny(_of("Qwen3", **GROUPED), **DECODER, factor=None),
    "mistral": Tiny(_of("Mistral", sliding_window=6, **GROUPED), **DECODER, sliding=(6,) * LAYERS),
    "gemma2": Tiny(
        _of("Gemma2", sliding_window=6, attn_logit_softcapping=2.0, query_pre_attn_scalar=5, **GROUPED),
        **DECODER,
        sliding=(6, None, 6),
        softcap=2.0,
        implementation="eager",
    ),
    "gemma3": Tiny(
        _of("Gemma3Text", sliding_window=6, layer_types=["sliding_attention"] * 2 + ["full_attention"], **GROUPED),
        **DECODER,
        sliding=(6, 6, None),
        factor=None,
    ),
    "gpt_oss": Tiny(
        _of("GptOss", sliding_window=6, num_local_experts=2, num_experts_per_tok=1, **GROUPED),
        **DECODER,
        sliding=(6, None, 6),
        sinks=True,
        implementation="eager",
        factor=(1 + 0.1 * math.log(32)) ** 2,  # YaRN stretches queries and keys for a context 32 times longer
    ),
}


def dense_outputs(captured: Captured) -> Tensor:
    """The heads' outputs (B, Hq, L, v) by the formula of `Captured`, in float64, with the whole matrix of weights."""
    groups = captured.query.shape[1] // captured.key.shape[1]
    query = captured.query.double()
    key = captured.key.double().repeat_interleave(groups, dim=1)
    value = captured.value.double().repeat_interleave(groups, dim=1)
    scores = captured.scale * (query @ key.mT)
    if captured.softcap is not None:
        scores = captured.softcap * torch.tanh(scores / captured.softcap)
    if captured.bias is not None:
        scores = scores + captured.bias.double()
    if captured.mask is not None:
        scores = scores.masked_fill(~captured.mask, -torch.inf)
    elif captured.causal:
        length, there = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(length, there, dtype=torch.bool).triu(1 + there - length), -torch.inf)
    if captured.sinks is None:
        return torch.softmax(scores, dim=-1) @ value
    sinks = captured.sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1] @ value


def tiny_tokenizer(*, special: bool) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each letter, which dresses a text in [CLS] … [SEP] or in nothing."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = ["[UNK]", "[CLS]", "[SEP]", *letters]
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("."), "isolated")]
    )
    if special:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def letters(folder: Path, spaces: int = 0) -> str:
    """A text of 12,000 letters drawn one by one, and as many spaces among them: windows differ but by chance."""
    drawn = np.random.default_rng(5).choice(list("abcdefghijklmnopqrstuvwxyz" + " " * spaces), 12_000)
    path = folder / "letters.txt"
    path.write_text("".join(drawn))
    return str(path)
