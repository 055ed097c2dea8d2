"""Cells, streams, and the assignment of tokens to cells."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from limitlens.errors import InputError
from limitlens.measures import Gaussian
from limitlens.sampling.assignment import Assignment
from limitlens.sampling.cells import Cells, parse_sizes
from limitlens.sampling.streams import PAGE, IidStream, PoolStream


def test_sizes_are_geometric():
    assert parse_sizes("1000:30000:12")[0] == 1000
    assert parse_sizes("1000:30000:12")[-1] == 30000
    assert len(parse_sizes("1000:30000:12")) == 12
    assert parse_sizes("3:3:1") == (3,)
    assert parse_sizes("5,10,20") == (5, 10, 20)
    assert parse_sizes([1, 2, 4]) == (1, 2, 4)


@pytest.mark.parametrize("text", ["", "a:b:c", "1:2", "10:1:3", "1:10:0", "-1:10:3", "0,1", "1:inf:3", "nan"])
def test_bad_sizes_are_refused(text):
    with pytest.raises(InputError, match="expected"):
        parse_sizes(text)


@pytest.mark.parametrize("sizes", [(), (0, 1), (3, 2), (2, 2)])
def test_cells_want_increasing_sizes(sizes):
    with pytest.raises(InputError, match="increasing"):
        Cells(sizes)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=6, unique=True), st.integers(1, 999))
def test_blocks_cover_every_token_once_and_respect_borders(sizes, length):
    cells = Cells(tuple(sorted(sizes)))
    previous = 0
    for step, start, stop in cells.blocks(length):
        assert start == previous < stop <= cells.sizes[step]
        assert start // length == (stop - 1) // length
        assert step == 0 or start >= cells.sizes[step - 1]
        previous = stop
    assert previous == cells.sizes[-1] == sum(cells.steps)


def test_a_replicate_is_the_same_however_it_is_read():
    stream = IidStream(Gaussian([0.0, 1.0], 1.0), seed=3)
    whole = stream.draw(range(4), 0, 2 * PAGE + 10)
    again = IidStream(Gaussian([0.0, 1.0], 1.0), seed=3)
    part = again.draw(range(2, 3), PAGE - 5, PAGE + 7)
    assert torch.equal(part[0], whole[2, PAGE - 5 : PAGE + 7])
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole[0, :PAGE], whole[0, PAGE : 2 * PAGE])
    assert not torch.equal(IidStream(stream.measure, seed=4).draw(range(1), 0, 5), whole[:1, :5])


def test_a_pool_is_drawn_without_replacement():
    pool = torch.arange(50.0)[:, None]
    stream = PoolStream(pool, largest=40, seed=0)
    drawn = torch.cat([stream.draw(range(3), 0, 15), stream.draw(range(3), 15, 40)], 1)[..., 0]
    for replicate in drawn:
        assert len(replicate.unique()) == 40
    assert not torch.equal(drawn[0], drawn[1])
    assert stream.finite_population_correction(40) == pytest.approx(np.sqrt(0.2))
    with pytest.raises(InputError, match="sample has 50 tokens"):
        PoolStream(pool, largest=51, seed=0)


def test_the_finite_population_factor_is_that_of_a_mean():
    rng = np.random.default_rng(0)
    pool = torch.tensor(rng.exponential(size=(200, 1)))
    for n in (20, 100, 180):
        stream = PoolStream(pool, largest=n, seed=1)
        means = stream.draw(range(4000), 0, n).mean((1, 2))
        expected = float(pool.var(correction=1)) / n * stream.finite_population_correction(n) ** 2
        squared = float((means - pool.mean()).square().mean())
        assert squared == pytest.approx(expected, rel=4 * np.sqrt(2 / 4000))


def test_the_assignment_fills_every_cell_exactly_and_is_uniform():
    cells, blocks, replicates = Cells((2, 5)), [7, 0, 9, 4], 3
    counts = np.zeros((20, replicates * 2 + 1))
    rounds = 4000
    for seed in range(rounds):
        start, dealt = 0, np.zeros((replicates, 2), dtype=int)
        drawn = Assignment(blocks, cells, replicates, seed).draw()
        for block, (taken, parts) in zip(blocks, drawn, strict=True):
            dealt += taken
            assert sorted(np.concatenate(parts)) == list(range(block))
            for cell, part in enumerate(parts):
                counts[start + part, cell] += 1
            start += block
        assert (dealt == [[2, 3]] * replicates).all()
    expected = np.array([2, 3] * replicates + [5]) / 20
    deviation = (counts / rounds - expected) / np.sqrt(expected * (1 - expected) / rounds)
    assert np.abs(deviation).max() < 4.5


def test_an_assignment_needs_enough_tokens():
    with pytest.raises(InputError, match="need 30 tokens and the stream has 29"):
        next(Assignment([29], Cells((10,)), 3, 0).draw())
