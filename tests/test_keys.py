"""Choices of keys: each keeps what its name says, as many as asked for, and none that a query does not see."""

from __future__ import annotations

import pytest
import torch

from limitlens.errors import InputError
from limitlens.keys import CHOICES, Choice, Sight, keep
from limitlens.keys.recent import SINKS

LENGTH, DRAWS = 24, 6


def sight(held: int = 0) -> Sight:
    """Scores (2, 3, m, n) of causal queries that see the last 16 keys, their own among them."""
    position = torch.tensor([5, 11, 23])
    distance = position[:, None] - torch.arange(LENGTH)
    scores = torch.randn(2, 3, 3, LENGTH, generator=torch.Generator().manual_seed(1))
    return Sight(scores, (distance >= 0) & (distance < 16), position, held)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def kept(choice: Choice, given: Sight, counts: torch.Tensor | int, seed: int = 0) -> torch.Tensor:
    priority = choice.priority(given, DRAWS, generator(seed))
    return keep(priority, counts, given.seen).expand(len(priority), *given.scores.shape)


@pytest.mark.parametrize("name", list(CHOICES))
def test_a_choice_keeps_as_many_keys_as_asked_for_and_only_those_seen(name: str) -> None:
    given, choice = sight(), CHOICES[name]
    assert given.seen is not None
    assert choice.name == name
    assert choice.words
    counts = torch.tensor([[1, 4, 9], [2, 30, 16]]).view(2, 3, 1, 1)
    found = kept(choice, given, counts)
    assert not (found & ~given.seen).any()
    there = given.seen.sum(-1)
    torch.testing.assert_close(found.sum(-1), torch.minimum(counts[..., 0], there).expand(len(found), -1, -1, -1))
    torch.testing.assert_close(kept(choice, given, 4), kept(choice, given, torch.tensor([[[[4]]]])))


@pytest.mark.parametrize("name", list(CHOICES))
def test_more_keys_hold_fewer(name: str) -> None:
    given = sight()
    few, more = (kept(CHOICES[name], given, count) for count in (3, 7))
    assert not (few & ~more).any()


def test_only_an_oracle_looks_at_the_scores() -> None:
    given = sight()
    other = Sight(-given.scores, given.seen, given.position)
    for choice in CHOICES.values():
        same = torch.equal(kept(choice, given, 5), kept(choice, other, 5))
        assert same is not choice.oracle


def test_only_what_asks_for_an_order_needs_one() -> None:
    pooled = Sight(sight().scores)
    for choice in CHOICES.values():
        if choice.ordered:
            with pytest.raises(InputError, match="have no order"):
                choice.priority(pooled, DRAWS, generator())
        else:
            assert keep(choice.priority(pooled, DRAWS, generator()), 5).sum(-1).unique().tolist() == [5]


def test_random_keys_are_uniform_shared_by_queries_and_hold_the_sink() -> None:
    scores = torch.zeros(1, 1, 2, 10)
    found = keep(CHOICES["random"].priority(Sight(scores), 4000, generator()), 3)
    assert found.shape == (4000, 1, 1, 1, 10)  # one draw for every head and query
    share = found.double().mean((0, 1, 2, 3))
    torch.testing.assert_close(share, torch.full((10,), 0.3, dtype=torch.float64), atol=0.03, rtol=0)
    beside = keep(CHOICES["random"].priority(Sight(scores, held=1), 4000, generator()), 3)
    assert beside[..., 0].all()
    torch.testing.assert_close(
        beside[..., 1:].double().mean((0, 1, 2, 3)), torch.full((9,), 2 / 9, dtype=torch.float64), atol=0.03, rtol=0
    )
    assert torch.equal(found, keep(CHOICES["random"].priority(Sight(scores), 4000, generator()), 3))


def test_recent_keys_are_the_first_and_the_nearest() -> None:
    given = Sight(torch.zeros(1, 1, 1, LENGTH), None, torch.tensor([20]))
    found = keep(CHOICES["recent"].priority(given, 1, generator())[..., :21], SINKS + 3)
    assert torch.nonzero(found.flatten()).flatten().tolist() == [*range(SINKS), 18, 19, 20]


def test_top_keys_hold_the_most_mass() -> None:
    given = sight()
    assert given.seen is not None
    weights = torch.softmax(given.scores.masked_fill(~given.seen, -torch.inf), -1)
    masses = {name: (weights * kept(choice, given, 5)).sum(-1) for name, choice in CHOICES.items()}
    assert all((masses["top"] >= mass - 1e-6).all() for mass in masses.values())
