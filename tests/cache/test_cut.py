"""Error curves of cut caches, against dense attention with learned sinks, a softcap and log-weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache_cases import CONTEXT, text
from limitlens.attention.policies import get_policy
from limitlens.cache.cut import DRAWS, QUERIES, cut_windows, measure_cut
from limitlens.cache.layers import layer_caches
from limitlens.models import Captured, LoadedModel, capture
from limitlens.models.intervene import policy_input
from limitlens.sampling.streams import generator_for
from tiny_models import TINY, dense_outputs, tiny_tokenizer

POLICIES = ("recent", "random", "priority")


def dense_errors(call: Captured, size: int, entropy: list[int]) -> np.ndarray:
    """Mean squared errors (policies, heads) of a layer that keeps `size` keys, in float64 by the formula."""
    rows = torch.linspace(CONTEXT, call.key.shape[2] - 1, QUERIES).long()
    past = policy_input(call, CONTEXT, torch.tensor([CONTEXT]), past=call.query[:, :, :CONTEXT])
    seen, whole = call.seen(), dense_outputs(call)[0][:, rows]
    assert seen is not None
    errors = []
    for place, name in enumerate(POLICIES):
        kept = get_policy(name).select(past, size, DRAWS, generator_for(*entropy, place))
        squares = []
        for draw, chosen in enumerate(kept.mask):
            mask = seen.expand(1, 4, *seen.shape[-2:]).clone()
            mask[..., :CONTEXT] &= chosen.expand(1, 2, 1, -1).repeat_interleave(
                2, 1
            )  # two query heads read each key/value head
            bias = torch.zeros(mask.shape)
            if kept.log_weights is not None:
                bias[..., :CONTEXT] = kept.log_weights[draw].repeat_interleave(2, 1)
            cut = dense_outputs(Captured(**vars(call) | {"mask": mask, "bias": bias}))[0][:, rows]
            squares.append((cut - whole).square().sum(-1).mean(-1).numpy())
        errors.append(np.mean(squares, 0))
    return np.array(errors)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_curves_are_dense_attention_with_sinks_softcaps_and_log_weights(name: str) -> None:
    loaded = LoadedModel(name, TINY[name].model(), tiny_tokenizer(special=False))
    windows, size, seed = cut_windows(loaded, text(), "auto", CONTEXT), CONTEXT // 8, 7
    curves = measure_cut(loaded, windows, [2], CONTEXT, POLICIES, seed=seed)
    assert curves.layers == tuple(layer for layer, own in enumerate(TINY[name].sliding) if own is None)
    assert [cache.entries < CONTEXT for cache in layer_caches(loaded, CONTEXT)] == [
        own is not None for own in TINY[name].sliding
    ]
    calls: list[Captured] = []
    with torch.inference_mode(), capture(loaded.model, calls.append):
        loaded.model(next(windows.batches(1, [2])), use_cache=False)
    for place, layer in enumerate(curves.layers):
        expected = dense_errors(calls[layer], size, [seed, 2, layer])
        assert expected.min() > 1e-4
        found = curves.squared_error[0, :, place, :, curves.sizes.index(size)]
        np.testing.assert_allclose(found, expected, rtol=1e-3)
        whole = dense_outputs(calls[layer])[0][:, torch.linspace(CONTEXT, windows.length - 1, QUERIES).long()]
        np.testing.assert_allclose(curves.full[0, place], whole.square().sum(-1).mean(-1).numpy(), rtol=1e-4)
