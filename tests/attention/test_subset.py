"""Attention to a subset of keys: the formula, empty subsets, and gradients."""

from __future__ import annotations

import torch

from limitlens.attention.subset import attend_subset


def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores, weights = (3 * torch.randn(2, 3, 5, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    value = torch.randn(2, 3, 9, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, 3, 1, 9, generator=generator) < 0.6
    return scores, value, mask, weights, torch.randn(3, 1, generator=generator, dtype=torch.float64)


def test_the_formula() -> None:
    scores, value, mask, weights, sinks = case()
    lse, output = attend_subset(scores, value, mask=mask, log_weights=weights, sinks=sinks)
    exponentials = torch.exp(scores + weights) * mask
    mass = exponentials.sum(-1) + sinks.exp()
    torch.testing.assert_close(output, (exponentials / mass[..., None]) @ value)
    torch.testing.assert_close(lse, mass.log())
    whole, outputs = attend_subset(scores, value)
    torch.testing.assert_close(outputs, scores.softmax(-1) @ value)
    torch.testing.assert_close(whole, scores.logsumexp(-1))


def test_no_keys_give_nothing_and_only_a_sink_its_logit() -> None:
    scores, value, mask, _, sinks = case()
    for none in ({"mask": torch.zeros_like(mask)}, {}):
        some, values = (scores, value) if none else (scores[..., :0], value[..., :0, :])
        lse, output = attend_subset(some, values, **none)
        assert not output.any()
        assert torch.isneginf(lse).all()
        lse, output = attend_subset(some, values, sinks=sinks, **none)
        assert not output.any()
        torch.testing.assert_close(lse, sinks.expand_as(lse))


def test_large_scores_do_not_overflow_and_gradients_are_right() -> None:
    scores, value, mask, weights, sinks = case()
    lse, output = attend_subset(1000 + scores.float(), value.float(), mask=mask, sinks=sinks.float())
    assert torch.isfinite(lse).all()
    assert torch.isfinite(output).all()
    mask[..., 0] = True
    inputs = [part.clone().requires_grad_() for part in (scores, value, weights, sinks)]
    assert torch.autograd.gradcheck(lambda s, v, w, z: attend_subset(s, v, mask=mask, log_weights=w, sinks=z), inputs)
