"""A tiny language model, a text and a cache plan, shared by the tests of `limitlens.cache`."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from limitlens.attention.policies import POLICIES
from limitlens.cache.budgets import fisher_costs
from limitlens.cache.cut import cut_windows, measure_cut, window_order
from limitlens.cache.layers import layer_caches
from limitlens.cache.plan import CHECKED, FITTED, make_plan
from limitlens.models import LoadedModel
from tiny_models import GROUPED, tiny_tokenizer

CONTEXT = 64


@cache
def language_model() -> LoadedModel:
    """A grouped-query decoder with its head, its scores large enough that choices of keys matter."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**GROUPED | {"vocab_size": 29, "max_position_embeddings": 256})
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.15 * torch.randn_like(parameter))
    return LoadedModel("letters", model, tiny_tokenizer(special=False))


@cache
def text() -> str:
    """A file of random letters, enough for sixteen windows."""
    path = Path(tempfile.mkdtemp()) / "letters.txt"
    path.write_text(" ".join("".join(row) for row in np.random.default_rng(5).choice(list("abcdefgh"), (400, 8))))
    return str(path)


@cache
def prompt() -> str:
    """The beginning of the text in a file of its own, short enough for the positions of the model."""
    path = Path(text()).with_name("prompt.txt")
    path.write_text(Path(text()).read_text()[:100])
    return str(path)


@cache
def measured() -> Any:
    """What every plan is made of: error curves and Fisher costs."""
    windows = cut_windows(language_model(), text(), "auto", CONTEXT)
    order = window_order(windows, 0)[: FITTED + CHECKED]
    curves = measure_cut(language_model(), windows, order, CONTEXT, tuple(POLICIES))
    return curves, fisher_costs(language_model(), windows, order[:FITTED], CONTEXT)


@cache
def planned(**options: Any) -> Any:
    """A plan for half of the cache, or as asked for."""
    asked = {"share": None if "error" in options else 0.5, **options}
    made = make_plan(*measured(), layer_caches(language_model(), CONTEXT), **asked)
    return replace(made, model="letters", corpus=text())
