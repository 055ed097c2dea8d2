"""Captured attention calls of tiny models, shared by several tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from limitlens.models import Captured, capture
from tiny_models import VOCABULARY

WINDOWS, LENGTH = 2, 19


def token_ids(seed: int = 1) -> Any:
    return torch.randint(3, VOCABULARY, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def run(model: Any, ids: Any, **inputs: Any) -> Any:
    with torch.inference_mode():
        options = {} if "t5" in type(model).__name__.lower() else {"use_cache": False}
        return model(input_ids=ids, **options, **inputs).last_hidden_state


def captures(model: Any, ids: Any, *, hidden: bool = False, **inputs: Any) -> tuple[list[Captured], Any]:
    found: list[Captured] = []
    with capture(model, found.append, hidden=hidden):
        states = run(model, ids, **inputs)
    return found, states


def watch_outputs(model: Any, ending: str) -> tuple[list[Any], Callable[[], None]]:
    """What enters the output projections, in the order of the calls: the heads' outputs, (B, L, Hq · v)."""
    outputs: list[Any] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
        for name, module in model.named_modules()
        if name.endswith(ending)
    ]
    return outputs, lambda: [hook.remove() for hook in hooks] and None


def assert_untouched(model: Any, implementation: str) -> None:
    assert model.config._attn_implementation == implementation
    assert not any("limitlens" in name for name in AttentionInterface().valid_keys())
    assert not any("limitlens" in name for name in AttentionMaskInterface().valid_keys())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
