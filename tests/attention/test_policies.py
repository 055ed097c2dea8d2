"""Key policies: each keeps the keys its name says, as many as requested, and none that a query cannot see."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch

from cases import KEY_CASES, KeyCase
from limitlens.attention.policies import PATTERNS, KeyPolicy, PolicyInput, Selection, get_policy, keep
from limitlens.attention.policies import POLICIES as CACHED
from limitlens.attention.policies.expected import FUTURE, LAW, Expected, future_queries
from limitlens.attention.policies.snapkv import SMOOTH
from limitlens.attention.policies.streaming import SINKS
from limitlens.errors import InputError

LENGTH, DRAWS, DIM = 24, 6, 4
POLICIES = CACHED | PATTERNS
every = pytest.mark.parametrize("name", KEY_CASES)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sight(held: int = 0, past: int = LENGTH, length: int = LENGTH) -> PolicyInput:
    """Two by three heads of random keys; causal queries that see the last 16 keys, their own among them."""
    position = torch.tensor([5, 11, length - 1])
    distance = position[:, None] - torch.arange(length)
    key, value, query = (torch.randn(2, 3, count, DIM, generator=generator(count)) for count in (length, length + 1, 3))
    asked = torch.randn(2, 3, 2, past, DIM, generator=generator(7))
    seen = (distance >= 0) & (distance < 16)
    again = torch.rand(2, 3, length, generator=generator(9))
    return PolicyInput(key, value[:, :, 1:], query @ key.mT, seen, position, held, asked, repeat_attention=again)


def kept(choice: KeyPolicy, given: PolicyInput, counts: torch.Tensor | int, seed: int = 0) -> torch.Tensor:
    found = choice.select(given, counts, DRAWS, generator(seed)).mask
    assert given.scores is not None
    return found.expand(len(found), *given.scores.shape)


def attended(given: PolicyInput, scores: torch.Tensor, found: Selection) -> torch.Tensor:
    """Attention outputs over what was kept."""
    added = 0 if found.log_weights is None else found.log_weights
    weights = (scores + added).masked_fill(~found.mask, -torch.inf).softmax(-1)
    return weights @ given.value


def test_every_choice_has_a_case() -> None:
    assert set(KEY_CASES) == set(POLICIES)
    with pytest.raises(InputError, match="'nearest'; expected one of random, "):
        get_policy("nearest")


@every
def test_policies_that_a_pooled_law_lacks_are_refused(name: str) -> None:
    """Pooled tokens have keys and values alone: no order, no scores, no earlier queries."""
    choice, whole = POLICIES[name], sight()
    pooled = PolicyInput(whole.key, whole.value)
    needed = choice.ordered or choice.sees_queries or choice.needs_past or choice.needs_repeat
    missing = "pooled tokens have no order|no scores were given|no earlier queries were given|no attention weights"
    told = f"({missing}).*'{name}'"
    with pytest.raises(InputError, match=told) if needed else nullcontext():
        choice.select(pooled, 4, 1, generator(0))


@every
def test_a_policy_keeps_the_keys_of_its_case(name: str) -> None:
    choice, case = POLICIES[name], KEY_CASES[name]
    assert choice.name == name
    assert choice.label
    found = KeyCase(
        choice.sees_queries, choice.ordered, choice.needs_past, choice.sampled, choice.unbiased, choice.needs_repeat
    )
    assert found == case


@every
def test_a_policy_keeps_the_requested_number_of_visible_keys(name: str) -> None:
    given, choice = sight(), POLICIES[name]
    assert given.seen is not None
    counts = torch.tensor([[1, 4, 9], [2, 30, 16]]).view(2, 3, 1, 1)
    found = kept(choice, given, counts)
    assert len(found) == (DRAWS if choice.sampled else 1)
    assert not (found & ~given.seen).any()
    there = given.seen.sum(-1)
    torch.testing.assert_close(found.sum(-1), torch.minimum(counts[..., 0], there).expand(len(found), -1, -1, -1))
    torch.testing.assert_close(kept(choice, given, 4), kept(choice, given, torch.tensor([[[[4]]]])))


@every
def test_the_same_seed_gives_the_same_keys_and_more_keys_hold_fewer(name: str) -> None:
    given, choice = sight(), POLICIES[name]
    few, again, more = (kept(choice, given, count) for count in (3, 3, 7))
    assert torch.equal(few, again)
    assert not (few & ~more).any()
    assert torch.equal(few, kept(choice, given, 3, seed=1)) is not choice.sampled


@every
def test_keeping_everything_is_full_attention(name: str) -> None:
    """To the last bit: nothing is dropped, nothing weighs more than itself."""
    given, choice = sight(), POLICIES[name]
    assert given.scores is not None
    assert given.seen is not None
    for counts in (LENGTH, LENGTH + 5, torch.tensor([[[[LENGTH]]]])):
        found = choice.select(given, counts, DRAWS, generator())
        assert torch.equal(found.mask.expand(len(found.mask), 2, 3, 3, LENGTH)[0, 0, 0], given.seen)
        assert found.log_weights is None or not found.log_weights.masked_fill(~found.mask, 0).any()


@every
def test_only_what_looks_at_queries_changes_with_them(name: str) -> None:
    given, choice = sight(), POLICIES[name]
    assert given.scores is not None
    assert given.past is not None
    other = replace(given, scores=-given.scores)
    assert torch.equal(kept(choice, given, 5), kept(choice, other, 5)) is not choice.sees_queries
    other = replace(given, past=-given.past)
    assert torch.equal(kept(choice, given, 5), kept(choice, other, 5)) is not choice.needs_past
    assert given.repeat_attention is not None
    other = replace(given, repeat_attention=-given.repeat_attention)
    assert torch.equal(kept(choice, given, 5), kept(choice, other, 5)) is not choice.needs_repeat


@every
def test_missing_inputs_of_a_policy_are_refused(name: str) -> None:
    given, choice = sight(), POLICIES[name]
    missing = []
    for without, what in (
        (replace(given, scores=None, seen=None), "scores"),
        (replace(given, position=None, seen=None), "order"),
        (replace(given, past=None, seen=None), "earlier queries"),
        (replace(given, repeat_attention=None, seen=None), "repeated context"),
    ):
        try:
            found = choice.select(without, 5, DRAWS, generator()).mask
            assert found.sum(-1).unique().tolist() == [5]
        except InputError as error:
            missing += [what] if what in str(error) else [str(error)]
    case = KEY_CASES[name]
    needed = (case.sees_queries, case.ordered, case.needs_past, case.needs_repeat)
    named = ("scores", "order", "earlier queries", "repeated context")
    assert missing == [name for name, need in zip(named, needed, strict=True) if need]


@pytest.mark.parametrize("name", [name for name, case in KEY_CASES.items() if case.unbiased])
def test_weighted_sums_are_unbiased(name: str) -> None:
    """Over many draws Σ_kept e^{w+s} (1, v) has the mean of the full sums, within four standard errors."""
    given, draws = sight(held=1), 4000
    given = PolicyInput(given.key, given.value, given.scores, None, None, 1, given.past)
    assert given.scores is not None
    found = POLICIES[name].select(given, 8, draws, generator(3))
    assert found.log_weights is not None
    weight = found.log_weights.double().exp() * found.mask
    for query in range(3):
        mass = given.scores[:, :, query].double().exp()
        for part in (mass, mass * given.value[..., 0].double()):
            sums = (weight[..., 0, :] * part).sum(-1)
            off = (sums.mean(0) - part.sum(-1)) / (sums.std(0) / draws**0.5)
            assert off.abs().max() < 4


def test_eviction_without_weights_is_biased() -> None:
    """The same keys without weights sum to less: the check above can fail."""
    given = sight()
    found = POLICIES["random_eviction"].select(PolicyInput(given.key, given.value), 8, 4000, generator(3))
    assert found.log_weights is None
    assert found.mask.double().sum(-1).mean() == 8


def test_random_keys_are_uniform_and_hold_the_sink() -> None:
    key = torch.zeros(1, 1, 10, DIM)
    found = POLICIES["random"].select(PolicyInput(key, key), 3, 4000, generator()).mask
    assert found.shape == (4000, 1, 1, 1, 10)  # one draw for every query of a head
    share = found.double().mean((0, 1, 2, 3))
    torch.testing.assert_close(share, torch.full((10,), 0.3, dtype=torch.float64), atol=0.03, rtol=0)
    beside = POLICIES["random"].select(PolicyInput(key, key, held=1), 3, 4000, generator())
    assert beside.mask[..., 0].all()
    assert beside.log_weights is not None
    torch.testing.assert_close(beside.log_weights[0, 0, 0, 0], torch.tensor([0.0] + [4.5] * 9).clamp_min(1).log())
    torch.testing.assert_close(
        beside.mask[..., 1:].double().mean((0, 1, 2, 3)),
        torch.full((9,), 2 / 9, dtype=torch.float64),
        atol=0.03,
        rtol=0,
    )


def test_recent_keys_are_the_nearest_and_sinks_the_first_too() -> None:
    key = torch.zeros(1, 1, 21, DIM)
    given = PolicyInput(key, key, None, None, torch.tensor([20]))
    for name, places in (("recent", range(14, 21)), ("streaming", [*range(SINKS), 18, 19, 20])):
        found = POLICIES[name].select(given, SINKS + 3, 1, generator()).mask
        assert torch.nonzero(found.flatten()).flatten().tolist() == list(places)


def test_top_keys_hold_the_most_mass() -> None:
    given = sight()
    assert given.scores is not None
    assert given.seen is not None
    weights = torch.softmax(given.scores.masked_fill(~given.seen, -torch.inf), -1)
    masses = {name: (weights * kept(choice, given, 5)).sum(-1) for name, choice in POLICIES.items()}
    assert all((masses["oracle_topk"] >= mass - 1e-6).all() for mass in masses.values())


def test_short_keys_are_kept_first() -> None:
    key = torch.arange(1.0, 9).view(1, 8, 1).flip(1)
    found = POLICIES["knorm"].select(PolicyInput(key, key, held=1), 3, 1, generator()).mask
    assert torch.nonzero(found.flatten()).flatten().tolist() == [0, 6, 7]


def test_the_attention_of_the_last_queries_is_added_up() -> None:
    """A key that all of them look at, and its neighbours."""
    length, spot = 200, 40
    key = torch.zeros(1, length, DIM)
    key[0, spot, 0] = 30
    past = torch.zeros(1, 1, length, DIM)
    past[..., 0] = 1
    given = PolicyInput(key, torch.ones(1, length, DIM), past=past)
    found = POLICIES["snapkv"].select(given, SMOOTH, 1, generator()).mask.flatten()
    assert torch.nonzero(found).flatten().tolist() == [*range(spot - SMOOTH // 2, spot + SMOOTH // 2 + 1)]


def test_snapkv_weights_are_means_over_the_queries_that_see_a_key() -> None:
    """Key by key in plain numbers, of one query head with fewer queries than keys and of two with as many."""
    length = 9
    for groups, asked in ((1, 4), (2, length)):
        key = torch.randn(1, length, DIM, generator=generator(1))
        past = torch.randn(1, groups, asked, DIM, generator=generator(2))
        found = POLICIES["snapkv"].priority(PolicyInput(key, key, past=past), 1, generator())[0, 0, 0].tolist()
        weights: list[list[float]] = [[] for _ in range(length)]  # of each key, by the queries that see it
        for head, row in product(range(groups), range(asked)):
            seen = length - asked + row + 1
            masses = [math.exp(float(past[0, head, row] @ key[0, j])) for j in range(seen)]
            for j, mass in enumerate(masses):
                weights[j].append(mass / sum(masses))
        means = [sum(row) / len(row) for row in weights]
        near = [means[max(0, j - SMOOTH // 2) : j + SMOOTH // 2 + 1] for j in range(length)]
        assert found == pytest.approx([sum(row) / len(row) for row in near], rel=1e-5)


def test_priority_weights_are_the_threshold_over_the_estimate() -> None:
    """Of each draw: max(1, τ / a) with τ the largest a/u that is left out, and 1 for the first token."""
    given, policy = sight(held=1), POLICIES["priority"]
    given.value[1, 2, 9] *= 100  # one key weighs more than any threshold: it stands for itself
    given = PolicyInput(given.key, given.value, held=1, past=given.past)
    estimate = POLICIES["snapkv"].priority(given, 1, generator())[0, 1, 2, 0] * given.value[1, 2].norm(dim=-1)
    estimate = estimate + 0.1 * estimate.mean()
    ratio = policy.priority(given, DRAWS, generator(5))
    found = policy.select_by(given, ratio, 6)
    assert found.log_weights is not None
    for draw in range(DRAWS):
        numbers = ratio[draw, 1, 2, 0].tolist()
        order = sorted(range(1, LENGTH), key=lambda j: -numbers[j])
        assert torch.nonzero(found.mask[draw, 1, 2, 0]).flatten().tolist() == sorted([0, *order[:5]])
        assert 9 in order[:5]
        for j in order[:5]:
            expected = max(1.0, numbers[order[5]] / float(estimate[j]))
            assert float(found.log_weights[draw, 1, 2, 0, j].exp()) == pytest.approx(expected, rel=1e-4)
        assert float(found.log_weights[draw, 1, 2, 0, 0]) == 0


def test_expected_attention_is_the_mean_over_gaussian_queries() -> None:
    """Against the average of e^{<q,k>} over queries drawn from the law, and value norms beside it."""
    length = 12
    key, value = (torch.randn(1, length, DIM, generator=generator(seed)) for seed in (1, 2))
    mean, root = torch.randn(DIM, generator=generator(3)), 0.2 * torch.randn(DIM, DIM, generator=generator(4))
    draws = (mean + torch.randn(200_000, DIM, generator=generator(5)).double() @ root.double()).double()
    past = draws[:LAW].float().view(1, 1, LAW, DIM)
    law = Expected().priority(PolicyInput(key, value, past=past), 1, generator())[0, 0, 0].double() / value[
        0
    ].double().norm(dim=-1)
    # The same law as the past has: its own mean and covariance.
    centred = past[0, 0].double() - past[0, 0].double().mean(0)
    normal = torch.randn(200_000, DIM, generator=generator(6), dtype=torch.float64)
    root = torch.linalg.cholesky(centred.T @ centred / LAW)
    drawn = torch.exp((past[0, 0].double().mean(0) + normal @ root.T) @ key[0].double().T).mean(0)
    torch.testing.assert_close(law, drawn / drawn.sum(), rtol=0.03, atol=0)


def test_sampling_by_a_guess_beats_uniform_sampling_where_the_guess_is_right() -> None:
    """Served queries like the last ones: a smaller error at equal keys than random keys."""
    length, count = 256, 64
    key, value = (torch.randn(1, length, 8, generator=generator(seed)) for seed in (1, 2))
    query = torch.randn(1, 1, length, 8, generator=generator(3)) * 0.3 + 0.5
    served = torch.randn(1, 32, 8, generator=generator(4)) * 0.3 + 0.5
    given = PolicyInput(key, value, served @ key.mT, past=query)
    assert given.scores is not None
    full = given.scores.softmax(-1) @ value
    errors = {}
    for name in ("random", "priority"):
        found = POLICIES[name].select(given, count, 200, generator(5))
        errors[name] = (attended(given, given.scores, found) - full).square().mean()
    assert errors["priority"] < 0.7 * errors["random"]


def test_patterns_keep_the_places_that_their_names_say() -> None:
    def places(name: str, position: int, count: int) -> list[int]:
        key = torch.zeros(1, 16, DIM)
        given = PolicyInput(key, key, position=torch.tensor([position]))
        return torch.nonzero(PATTERNS[name].select(given, count, 1, generator()).mask.flatten()).flatten().tolist()

    assert places("strided", 15, 4) == [3, 7, 11, 15]
    assert places("strided", 5, 8) == [1, 3, 5, 7, 9, 11, 13, 15]
    assert places("dilated", 15, 3) == [7, 11, 15]
    assert places("dilated", 15, 5) == [3, 7, 11, 14, 15]
    assert places("block", 6, 4) == [4, 5, 6, 7]
    assert places("block", 6, 8) == [*range(8)]
    assert set(places("bigbird", 15, 8)) >= {12, 13, 14, 15}


def test_bigbird_is_half_a_window_and_half_random() -> None:
    """Among those a query sees alone: of 8 keys 4 to 5 are the nearest, the others are spread evenly."""
    key = torch.zeros(1, 40, DIM)
    seen = torch.arange(40) <= 31
    given = PolicyInput(key, key, seen=seen[None], position=torch.tensor([31]))
    share = PATTERNS["bigbird"].select(given, 8, 4000, generator()).mask.double().mean((0, 1, 2))
    assert share[28:32].tolist() == [1.0] * 4
    assert not share[32:].any()
    torch.testing.assert_close(share[:27], torch.full((27,), float(share[:27].mean())).double(), atol=0.03, rtol=0)


def test_keep_takes_the_highest_priorities() -> None:
    priority = torch.tensor([[3.0, 1.0, 2.0, 5.0]])
    assert keep(priority, 2).tolist() == [[True, False, False, True]]
    assert keep(priority, 2, torch.tensor([True, True, True, False])).tolist() == [[True, False, True, False]]


def test_future_queries_are_rotated_to_the_mean_of_the_next_positions() -> None:
    """Against the rotation matrices of each position, with dimensions that are not rotated beside the pairs."""
    theta, context, asked = torch.tensor([0.9, 0.05]), 30, 3
    query = torch.randn(2, asked, 5, generator=generator(6))

    def rotation(position: int) -> torch.Tensor:
        matrix = torch.eye(5, dtype=torch.float64)
        for pair, angle in enumerate((theta.double() * position).tolist()):
            rows = [pair, pair + 2]
            matrix[pair, rows] = torch.tensor([math.cos(angle), -math.sin(angle)], dtype=torch.float64)
            matrix[pair + 2, rows] = torch.tensor([math.sin(angle), math.cos(angle)], dtype=torch.float64)
        return matrix

    mean = torch.stack([rotation(t) for t in range(context, context + FUTURE)]).mean(0)
    found = future_queries(query, theta, context)
    for row in range(asked):
        expected = query[:, row].double() @ rotation(context - asked + row) @ mean.T  # rotate back, then forward
        torch.testing.assert_close(found[:, row].double(), expected, atol=1e-5, rtol=1e-5)
    key = torch.randn(1, 9, 4, generator=generator(7))
    past = torch.randn(1, 1, 9, 4, generator=generator(8))
    plain, rotated = (
        POLICIES["expected"].priority(PolicyInput(key, key, past=past, frequencies=given), 1, generator())
        for given in (None, theta)
    )
    assert not torch.allclose(plain, rotated)
