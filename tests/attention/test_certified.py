"""Certified reads: predictions bound scores, samples are unbiased, and their errors keep the promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from limitlens.attention.certified import (
    RULES,
    SINKS,
    WINDOW,
    ReadRule,
    _interpolated,
    predicted_scores,
    quantiles,
    quantised,
    read_keys,
)
from limitlens.attention.subset import attend_subset
from limitlens.theory.certificates import error_quantile

PROMISE = (0.1, 0.1)


def case(count: int = 1500, spread: float = 1.5, seed: int = 0) -> tuple[Any, Any, Any]:
    """A query, keys whose scores have standard deviation `spread`, and values with a mean."""
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn(count, 16, generator=generator)
    query = torch.randn(1, 16, generator=generator)
    return query * spread / query.norm(), key, 0.5 + torch.randn(count, 16, generator=generator)


def errors(rule: ReadRule, query: Any, key: Any, value: Any, draws: int = 200) -> tuple[Any, Any]:
    """Relative errors of draws of a query's sample, and the shares of keys read."""
    scores, seen = query @ key.T, torch.ones(draws, len(key), dtype=torch.bool)
    uniform = torch.rand(draws, len(key), generator=torch.Generator().manual_seed(1))
    rows = (part.expand(draws, -1) for part in (scores, predicted_scores(rule, query, key)))
    scores, predicted = rows
    mask, weights = read_keys(rule, scores, predicted, value, seen, PROMISE, uniform)
    _, output = attend_subset(scores, value, mask=mask, log_weights=weights)
    _, full = attend_subset(scores[:1], value)
    return (output - full).norm(dim=-1) / full.norm(), mask.double().mean(-1)


def test_quantised_keys_are_within_half_a_step_and_bounds_bound() -> None:
    query, key, _ = case(300)
    copy, step = quantised(key, 4)
    assert ((copy - key).abs() <= step / 2 + 1e-6).all()
    assert len(copy[:64].unique(dim=0)) > 1
    assert all(len(copy[:64, channel].unique()) <= 16 for channel in range(16))
    scores = query @ key.T
    for name in ("pages", "proved"):
        bound = predicted_scores(RULES[name], query, key)
        assert (bound >= scores - 1e-5).all()
    assert (bound - scores).mean() < 1 < (predicted_scores(RULES["pages"], query, key) - scores).mean()
    better = [(predicted_scores(RULES[name], query, key) - scores).std() for name in ("int4", "int3", "int2")]
    assert better == sorted(better)


@pytest.mark.parametrize("name", [name for name in RULES if name not in ("earlier", "denominator", "chi2")])
def test_the_error_holds_as_often_as_promised(name: str) -> None:
    wrong, read = errors(RULES[name], *case())
    assert (wrong <= PROMISE[0]).double().mean() >= 0.9
    assert read.mean() < 1 or name in ("proved", "both")


def test_better_predictions_read_less_and_the_denominator_alone_does_not_bound_the_output() -> None:
    read = {name: float(errors(RULES[name], *case())[1].mean()) for name in ("int4", "pages", "output")}
    assert read["int4"] < read["pages"]
    assert read["int4"] < read["output"]
    wrong, _ = errors(RULES["denominator"], *case())
    assert (wrong <= PROMISE[0]).double().mean() < 0.6
    wrong, _ = errors(RULES["chi2"], *case())  # sized by a first sample, without a check
    assert (wrong <= PROMISE[0]).double().mean() < 0.89


def test_weights_of_sampled_keys_are_inverse_probabilities() -> None:
    """Their sums over the draws are the sums over all keys."""
    query, key, value = case()
    rule, draws = RULES["chi2"], 2000
    scores = (query @ key.T).expand(draws, -1)
    uniform = torch.rand(scores.shape, generator=torch.Generator().manual_seed(2))
    predicted = predicted_scores(rule, query, key).expand(draws, -1)
    mask, weights = read_keys(
        rule, scores, predicted, value, torch.ones_like(scores, dtype=torch.bool), PROMISE, uniform
    )
    assert mask[:, :SINKS].all()
    assert mask[:, -WINDOW:].all()
    assert (weights[:, :SINKS] == 0).all()
    total = (mask * (scores + weights).exp()).double().sum(-1)
    exact = float(scores[0].double().exp().sum())
    assert float(total.mean()) == pytest.approx(exact, abs=4 * float(total.std()) / draws**0.5)


def test_what_cannot_be_sampled_is_read_whole() -> None:
    query, key, value = case(300)
    wrong, read = errors(RULES["int4"], query, key[: SINKS + WINDOW], value[: SINKS + WINDOW], 4)
    assert (read == 1).all()
    assert (wrong < 1e-6).all()
    _, read = errors(RULES["int4"], query, key, 0 * value, 4)  # an error relative to nothing
    assert (read == 1).all()
    centred = value - value.mean(0)  # values that cancel: the tail is too heavy
    _, read = errors(RULES["int4"], 0 * query, key, centred, 4)
    assert (read == 1).all()


def test_hidden_keys_are_never_read_and_learned_sinks_count() -> None:
    query, key, value = case(600)
    scores = (query @ key.T).expand(8, -1)
    seen = torch.arange(600).expand(8, -1) < 400
    uniform = torch.rand(scores.shape, generator=torch.Generator().manual_seed(3))
    arguments = (RULES["int4"], scores, predicted_scores(RULES["int4"], query, key).expand(8, -1), value, seen)
    mask, _ = read_keys(*arguments, PROMISE, uniform)
    assert not mask[:, 400:].any()
    assert mask[:, 400 - WINDOW : 400].all()
    sunk, _ = read_keys(*arguments, PROMISE, uniform, torch.full((8,), 20.0))
    assert sunk.sum() >= mask.sum()


@pytest.mark.parametrize(("f", "nu"), [(1.0, 1.0), (3.3, 7.7), (40.0, 300.0), (128.0, 1e6)])
def test_quantiles_are_interpolated_to_a_percent(f: float, nu: float) -> None:
    planned, checked = quantiles(0.1, torch.device("cpu"))
    for table, exact in ((planned, error_quantile(1, 1 / f, 0.1)), (checked, error_quantile(1, 1 / f, 0.05, nu))):
        found = _interpolated(table, torch.tensor(f), torch.tensor(nu))
        assert float(found) == pytest.approx(float(exact), rel=0.01)
