"""Attention states: merging is associative and equals dense float64 softmax for any partition of the tokens."""

from __future__ import annotations

import itertools
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from limitlens.attention.kernels import attend_cpu, attend_plain, state_of
from limitlens.attention.state import Peak, State

EXACT = {"rtol": 1e-10, "atol": 1e-10}


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Queries, keys, values, a mask (never all −inf) and the cuts of the tokens into blocks, empty ones among them."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    m, n, k, v = (draw(st.integers(1, top)) for top in (4, 30, 3, 3))
    scale = draw(st.sampled_from([0.0, 1.0, 30.0, 1e4]))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key, value = normal(m, k), normal(n, k), normal(n, v)
    largest = (query @ key.T).abs().max().clamp_min(1e-12)
    query = query * scale / largest  # scores up to ±scale
    mask = torch.zeros(m, n, dtype=torch.float64)
    mask[torch.rand(m, n, generator=generator) < draw(st.sampled_from([0.0, 0.5]))] = float("-inf")
    mask[:, draw(st.integers(0, n - 1))] = 0.0
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=5)))
    return query, key, value, mask, [0, *cuts, n]


def pieces(problem: tuple[torch.Tensor, ...], kernel: object = attend_plain) -> list[State]:
    query, key, value, mask, cuts = problem
    return [
        state_of(query, key[a:b], value[a:b], bias=mask[:, a:b], kernel=kernel) for a, b in itertools.pairwise(cuts)
    ]


def assert_same(a: State, b: State, **tolerance: float) -> None:
    tolerance = tolerance or EXACT
    assert_close(a.count, b.count)
    assert_close(a.lse, b.lse, **tolerance)
    assert_close(a.output, b.output, **tolerance)


@given(problems(), st.sampled_from([attend_plain, attend_cpu]))
@settings(max_examples=150, deadline=None)
def test_any_cut_equals_dense_softmax(problem, kernel):
    query, key, value, mask, _ = problem
    scores = query @ key.T + mask
    weights = torch.softmax(scores, -1)
    state = reduce(State.merge, pieces(problem, kernel))
    assert int(state.count) == len(key)
    assert_close(state.lse, torch.logsumexp(scores, -1), **EXACT)
    assert_close(state.output, weights @ value, **EXACT)
    twice = reduce(State.merge, pieces((2 * query, *problem[1:]), kernel))
    assert_close(torch.exp(2 * state.lse - twice.lse), 1 / weights.square().sum(-1), **EXACT)


@given(problems())
@settings(max_examples=80, deadline=None)
def test_merge_is_associative_commutative_and_has_an_identity(problem):
    states = pieces(problem)
    a, b, c = states[0], states[-1], states[len(states) // 2]
    empty = State.empty((), a.lse.shape[0], a.output.shape[-1])
    assert_same(a.merge(b), b.merge(a))
    assert_same(a.merge(b).merge(c), a.merge(b.merge(c)))
    assert_same(a.merge(empty), a, rtol=0, atol=0)
    assert_same(empty.merge(a), a, rtol=0, atol=0)


def test_no_tokens_and_all_masked_are_empty():
    query, none = torch.randn(3, 2), torch.randn(0, 2)
    state = state_of(query, none, none)
    masked = state_of(query, query, query, bias=torch.full((1, 3), float("-inf")))
    for empty in (state, masked):
        assert torch.isneginf(empty.lse).all()
        assert not empty.output.any()


def test_one_token_is_its_value():
    query, token = torch.randn(4, 2) * 1e3, torch.randn(1, 2)
    state = state_of(query, token, token)
    assert_close(state.output, token.double().expand(4, 2))


@pytest.mark.parametrize("dims", [(1, 1), (64, 64), (5, 2), (2, 5)])
def test_fused_kernel_in_float32_is_close_to_float64(dims):
    torch.manual_seed(0)
    k, v = dims
    query, key, value = torch.randn(3, 50, k) / k**0.5, torch.randn(3, 999, k), torch.randn(3, 999, v)
    fast = state_of(query, key, value)
    exact = state_of(query.double(), key.double(), value.double(), kernel=attend_plain)
    assert_same(fast, exact, rtol=2e-4, atol=5e-6)


@pytest.mark.parametrize(
    "batches", [((), ()), ((3,), (3,)), ((3,), (2, 3)), ((2, 3), (3,)), ((), (3,)), ((1, 3), (2, 1))]
)
@pytest.mark.parametrize("masked", [False, True])
def test_the_fused_kernel_takes_batches_of_any_shape(
    batches: tuple[tuple[int, ...], tuple[int, ...]], masked: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    of_query, of_keys = batches
    query = torch.randn(*of_query, 4, 5, generator=generator)
    key, value = (torch.randn(*of_keys, 7, width, generator=generator) for width in (5, 3))
    bias = torch.zeros(4, 7).index_fill(0, torch.tensor([1]), float("-inf")) if masked else None  # one sees nothing
    for got, exact in zip(attend_cpu(query, key, value, bias), attend_plain(query, key, value, bias), strict=True):
        assert got.shape == exact.shape
        assert torch.allclose(got, exact, atol=1e-6)


def test_states_index_and_travel_as_safetensors(tmp_path):
    torch.manual_seed(0)
    state = state_of(torch.randn(3, 5, 2), torch.randn(3, 9, 2), torch.randn(3, 9, 4))
    save_file(state.tensors(), tmp_path / "state.safetensors")
    assert_same(State(**load_file(tmp_path / "state.safetensors")), state, rtol=0, atol=0)
    assert_same(state[1], State(**{name: tensor[1] for name, tensor in state.tensors().items()}), rtol=0, atol=0)


@given(problems())
@settings(deadline=None, max_examples=50)
def test_a_stack_of_states_has_the_union_of_its_sets(problem: tuple[torch.Tensor, ...]) -> None:
    parts = pieces(problem)
    whole = reduce(State.merge, parts)
    assert_same(State.joined([part[None] for part in parts]).union(), whole)
    assert_same(State.joined([part[None] for part in parts])[1 % len(parts)], parts[1 % len(parts)])


@given(problems())
@settings(deadline=None, max_examples=50)
def test_scores_that_were_formed_give_the_same_peak(problem: tuple[torch.Tensor, ...]) -> None:
    query, key, value, mask, cuts = problem
    scores = query @ key.T + mask
    blocks = [(a, b) for a, b in itertools.pairwise(cuts) if b > a]
    parts = [Peak.of([scores[:, a:b]], value[a:b]) for a, b in blocks]
    peak = parts[0]
    for part in parts[1:]:
        peak = peak.merge(part)
    assert_close(peak.score, scores.amax(-1), **EXACT)
    assert_close(peak.value, value[scores.argmax(-1)], **EXACT)  # of those that tie the first


def test_a_thinned_set_has_less_mass_and_the_same_output() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value, other = (torch.randn(n, 3, generator=generator).double() for n in (4, 50, 50, 20))
    state, rest = state_of(query, key, value), state_of(query, other, other)
    thin = state.thinned(torch.tensor([1.0, 0.5], dtype=torch.float64))
    assert thin.count.tolist() == [50, 25]
    assert_close(thin.output, state.output.expand(2, -1, -1))
    weights = torch.softmax(torch.stack((state.lse + torch.log(torch.tensor(0.5).double()), rest.lse)), 0)
    mixed = weights[0][:, None] * state.output + weights[1][:, None] * rest.output
    assert_close(thin.merge(rest).output[1], mixed, **EXACT)
