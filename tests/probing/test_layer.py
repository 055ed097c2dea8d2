"""Errors of a layer: all heads at once against one head at a time; moment errors against their definition."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, islice

import numpy as np
import pytest
import torch

from head_cases import curve_of, replicate_rows
from limitlens.attention.kernels import peak_over
from limitlens.attention.state import Peak, State
from limitlens.models import Captured
from limitlens.probing import layer as layer_module
from limitlens.probing.collect import Collector, groups
from limitlens.probing.distributed import add_share, share_of
from limitlens.probing.layer import MIN_SNR, LayerCurves, layer_curves
from limitlens.probing.pilot import Layer, Traits
from limitlens.sampling.assignment import KEPT_STEP, Assignment, ForwardSlice
from limitlens.sampling.cells import Cells
from limitlens.statistics.estimators import ClusteredMoments

SHARED, GROUPS, QUERIES, KEY, VALUE, BLOCK = 3, 2, 12, 4, 5, 300


def collected(
    blocks: int,
    *,
    atom: bool = False,
    softcap: float | None = None,
    fused: bool = False,
    seed: int = 5,
    kept_step: int = KEPT_STEP,
) -> Collector:
    """A layer that has seen so many of four blocks of random tokens: two replicates are kept, two are streamed.

    `fused` collects as on a GPU: by one Triton program for all cells of a block.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    own = drawn(SHARED, GROUPS * QUERIES).double(), drawn(SHARED, GROUPS * QUERIES, VALUE).double()
    clusters = np.sort(np.arange(QUERIES) % 5)
    tokens = {"key": torch.empty(0, SHARED, KEY), "value": torch.empty(0, SHARED, VALUE)}
    traits = Traits(1.0, softcap, None, None, {}, None, None, "", tokens)
    sink = State(torch.ones(SHARED, dtype=torch.int64), *own) if atom else None
    layer = Layer(0, drawn(SHARED, GROUPS, QUERIES, KEY), sink, False, clusters, traits)
    assignment = Assignment([BLOCK] * 4, Cells((16, 48, 120)), 4, seed=0, kept_step=kept_step)
    assignment.marks = 3
    made = Collector(layer, assignment, fused=fused)
    for block in islice(assignment.assign_blocks(), blocks):
        key, value = (drawn(1, BLOCK, SHARED, size)[:, block.order].transpose(1, 2) for size in (KEY, VALUE))
        kept, none = len(block.slots), torch.empty(0, dtype=torch.int64)
        rows = torch.cat((torch.from_numpy(block.slots), assignment.slots + torch.arange(BLOCK - kept)))
        part = ForwardSlice(rows, none, none, False, 0, block, True)
        captured = Captured(0, layer.query, key, value, 1.0, False)
        for work in made.work(captured, part, slice(None), kept + torch.arange(3), 0).values():
            work()
        for work in made.cells(block, 3):
            work()
    return made


def assert_same(found: LayerCurves, other: LayerCurves, close: float = 1e-9) -> None:
    torch.testing.assert_close(found.reference.tensors(), other.reference.tensors(), rtol=close, atol=close)
    assert found.kinds.keys() == other.kinds.keys() >= {"output", "mean", "covariance", "hardmax"}
    for name, one in found.kinds.items():
        most = max(close, 1e-5) if name in ("mean", "covariance") else close  # those are in float32
        for own, a, b in zip(one._fields, one, other.kinds[name], strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=most * np.abs(b).max(), err_msg=f"{name} {own}")


@pytest.mark.parametrize(
    ("blocks", "atom", "softcap"), [(4, False, None), (4, True, None), (4, False, 2.0), (2, True, None)]
)
def test_heads_at_once_are_heads_one_by_one(blocks: int, atom: bool, softcap: float | None) -> None:
    """With and without a sink, with capped scores, and cut short, where cells of one step differ in length."""
    collector = collected(blocks, atom=atom, softcap=softcap, kept_step=16)
    assert (collector.assignment.filled == collector.assignment.filled[0]).all() == (blocks == 4)
    alone = layer_curves(collector, floats_at_once=1)
    assert alone.kinds["output"].squares.shape == (SHARED * GROUPS, 5, 4, 3)
    assert_same(layer_curves(collector, floats_at_once=1 << 30), alone)


@pytest.mark.parametrize("blocks", [4, 2])
def test_errors_are_those_of_merged_states(blocks: int) -> None:
    """Of samples as they are, and with a sink, from states merged in float64; cut short, replicates have own limits."""
    collector = collected(blocks, atom=True)
    assignment, layer, sink = collector.assignment, collector.layer, collector.layer.atom
    curves, counts = layer_curves(collector), assignment.filled.cumsum(1)
    (*steps, _), _ = zip(*layer_module._steps(collector, slice(None)), strict=True)
    assert sink is not None
    clusters = torch.eye(5, dtype=torch.float64)[torch.from_numpy(layer.clusters)] * (5 / QUERIES)
    for j, sample in enumerate(accumulate(steps, State.merge)):
        limit = curves.reference.thinned(torch.from_numpy(counts[:, j] / assignment.seen)).merge(sink)
        pairs = (
            (curves.kinds["output"], sample, curves.reference),
            (curves.kinds["atomic"], sample.merge(sink), limit),
        )
        for found, state, wanted in pairs:
            square = (state.output - wanted.output).square().sum(-1).reshape(len(counts), -1, QUERIES) @ clusters
            np.testing.assert_allclose(found.squares[..., j], square.permute(1, 2, 0), rtol=2e-6)


def test_cells_in_one_launch_are_cells_one_by_one() -> None:
    """By the device's own program, under Triton's interpreter where there is no device; cells differ in length."""
    pytest.importorskip("triton", reason="the CUDA kernel needs triton, also to be interpreted")
    alone = layer_curves(collected(2, kept_step=16), floats_at_once=1)
    at_once = 2 * 4 * GROUPS * QUERIES * VALUE  # two of the three heads, and the third
    assert_same(layer_curves(collected(2, fused=True, kept_step=16), at_once), alone, close=1e-5)


@pytest.mark.parametrize("atom", [False, True])
def test_layers_side_by_side_are_layers_one_by_one(atom: bool) -> None:
    """Two layers measured together, as on a GPU, and apart."""
    pytest.importorskip("triton", reason="the CUDA kernel needs triton, also to be interpreted")
    layers = [collected(4, atom=atom, fused=True, seed=seed, kept_step=16) for seed in (5, 6)]
    assert [len(group) for group in groups([*layers, collected(4)])] == [2, 1]
    whole = layer_curves(Collector.joined(layers))
    for place, layer in enumerate(layers):
        pairs = slice(place * SHARED, (place + 1) * SHARED)
        assert_same(whole.of(slice(pairs.start * GROUPS, pairs.stop * GROUPS), pairs), layer_curves(layer), close=1e-6)


def test_the_share_of_a_worker_is_merged_in_place() -> None:
    here, there = collected(2), collected(4)
    lies = {name: tensor.data_ptr() for name, tensor in here.tensors().items()}
    counts = here.states.count + there.states.count
    slots = np.arange(here.assignment.slots)
    add_share(here, share_of(there, slots), slots)
    assert {name: tensor.data_ptr() for name, tensor in here.tensors().items()} == lies
    assert torch.equal(here.states.count, counts)


WINDOWS, EACH, DIM = 24, 8, 3


def test_squares_are_those_of_pairs_from_different_windows() -> None:
    """The sum over pairs of windows, by brute force, clusters of unequal size and two heads side by side."""
    rng = np.random.default_rng(0)
    clusters = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])
    limit, output = rng.normal(size=(2, 10, DIM)), rng.normal(size=(4, 2, 10, DIM))
    moments = ClusteredMoments(torch.tensor(limit).flatten(0, 1), clusters, 4, 1)
    moments.add(slice(0, 4), slice(0, 1), torch.tensor(output - limit).flatten(1, 2)[None])
    mean, covariance = (found[0][..., 0].mean(1) for found in moments.squares().values())  # (heads, replicates)

    def product(terms: np.ndarray) -> float:
        pairs = [(x, y) for x in range(10) for y in range(10) if clusters[x] != clusters[y]]
        return float(np.mean([(terms[x] * terms[y]).sum() for x, y in pairs]))

    for r in range(4):
        for head in range(2):
            Y, G = output[r, head], limit[head]
            assert mean[head, r] == pytest.approx(product(Y - G), rel=1e-4, abs=1e-6)
            Yc, Gc = Y - Y.mean(0), G - G.mean(0)
            outer = Yc[:, :, None] * Yc[:, None] - Gc[:, :, None] * Gc[:, None]
            assert covariance[head, r] == pytest.approx(product(outer), rel=1e-4, abs=1e-5)
    scales = [found[2][:, 0] for found in moments.squares().values()]
    np.testing.assert_allclose(scales[0], np.linalg.norm(limit.mean(1), axis=-1), rtol=1e-6)
    np.testing.assert_allclose(scales[1], [np.linalg.norm(np.cov(head.T, bias=True)) for head in limit], rtol=1e-5)


@pytest.mark.parametrize(("shared", "low", "high"), [(0.3, 1.0, 1.5), (2.0, 0.85, 1.15)])
def test_query_noise_adds_nothing_on_average_and_its_scatter_is_known(shared: float, low: float, high: float) -> None:
    """Errors of the mean that all queries share, and noise that those of a window share.

    Below the noise the plain square is off several times over, and the scatter that windows tell is on the safe side.
    """
    rng, draws = np.random.default_rng(1), 500
    noise = np.repeat(rng.normal(size=(draws, WINDOWS, DIM)) * 1.5, EACH, axis=1)
    errors = torch.tensor(noise + rng.normal(size=noise.shape) + shared / np.sqrt(DIM))
    moments = ClusteredMoments(torch.tensor(noise[0]), np.repeat(np.arange(WINDOWS), EACH), draws, 1)
    moments.add(slice(0, draws), slice(0, 1), errors[None])
    rows = moments.squares()["mean"][0][0, :, :, 0]  # (windows, draws)
    found, told = rows.mean(0), rows.std(0, ddof=1) / np.sqrt(WINDOWS)
    plain = errors.mean(1).square().sum(-1).numpy()
    stderr = np.std(found) / np.sqrt(draws)
    assert abs(np.mean(found) - shared**2) < 3 * stderr
    assert np.mean(plain) - shared**2 > 3 * stderr
    assert low < np.sqrt(np.mean(np.square(told))) / np.std(found) < high


def test_sizes_at_the_level_of_noise_are_not_fitted() -> None:
    errors = np.array([0.8, 0.4, 0.2, 0.1, 0.05])
    rows = np.concatenate((replicate_rows(errors[:4]), replicate_rows(errors[4:], stderr=0.5)), axis=1)
    curve = replace(curve_of(rows), min_snr=MIN_SNR)
    assert curve.rate is not None
    assert curve.rate.used == (64, 128, 256, 512)
    assert curve.rate.slope == pytest.approx(1, abs=0.02)


def test_one_window_of_queries_gives_no_moment_error() -> None:
    moments = ClusteredMoments(torch.zeros(4, 2, dtype=torch.float64), np.zeros(4, int), 1, 1)
    moments.add(slice(0, 1), slice(0, 1), torch.ones(1, 1, 4, 2, dtype=torch.float64))
    assert np.isnan(moments.squares()["mean"][0]).all()


def test_a_peak_in_pieces_is_the_largest_score() -> None:
    rng = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(2, n, 4, generator=rng) for n in (5, 40, 40))
    found = peak_over(query, key, value, None, scores_at_once=30).merge(Peak.empty((2,), 5, 4, like=value))
    best = (query @ key.mT).argmax(-1)
    torch.testing.assert_close(found.value, torch.stack([value[h][best[h]] for h in range(2)]))
