"""Errors of a layer, of all its heads at once as on a device, are those of one head at a time."""

from __future__ import annotations

from dataclasses import fields
from itertools import accumulate, islice

import numpy as np
import pytest
import torch

from limitlens.attention.state import State
from limitlens.models import Captured
from limitlens.probing import layer as layer_module
from limitlens.probing.collect import Collector, groups
from limitlens.probing.distributed import add_share, share_of
from limitlens.probing.layer import LayerCurves, layer_curves
from limitlens.probing.pilot import Layer, Traits
from limitlens.sampling.assignment import KEPT_STEP, Assignment, ForwardSlice
from limitlens.sampling.cells import Cells

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
    layer = Layer(0, drawn(SHARED, GROUPS, QUERIES, KEY), sink, None, clusters, traits)
    assignment = Assignment([BLOCK] * 4, Cells((16, 48, 120)), 4, seed=0, kept_step=kept_step)
    assignment.marks = 3
    made = Collector(layer, assignment, fused=fused)
    for block in islice(assignment.assign_blocks(), blocks):
        key, value = (drawn(1, BLOCK, SHARED, size)[:, block.order].transpose(1, 2) for size in (KEY, VALUE))
        kept, none = len(block.slots), torch.empty(0, dtype=torch.int64)
        rows = torch.cat((torch.from_numpy(block.slots), assignment.slots + torch.arange(BLOCK - kept)))
        part = ForwardSlice(rows, none, none, none, False, 0, block, True)
        captured = Captured(0, layer.query, key, value, 1.0, False)
        for work in made.work(captured, part, slice(None), kept + torch.arange(3), 0, None).values():
            work()
        for work in made.cells(block, 3):
            work()
    return made


def assert_same(found: LayerCurves, other: LayerCurves, close: float = 1e-9) -> None:
    torch.testing.assert_close(found.reference.tensors(), other.reference.tensors(), rtol=close, atol=close)
    curves = {"bare": (found.bare, other.bare), "atomic": (found.atomic, other.atomic)}
    curves |= {name: (found.others[name], other.others[name]) for name in ("mean", "covariance", "hardmax")}
    for name, (one, two) in curves.items():
        most = max(close, 1e-5) if name in ("mean", "covariance") else close  # those are in float32
        assert (one is None) == (two is None)
        for own in fields(one) if one is not None else ():
            a, b = (getattr(part, own.name) for part in (one, two))
            np.testing.assert_allclose(a, b, rtol=0, atol=most * np.abs(b).max(), err_msg=f"{name} {own.name}")


@pytest.mark.parametrize(
    ("blocks", "atom", "softcap"), [(4, False, None), (4, True, None), (4, False, 2.0), (2, True, None)]
)
def test_heads_at_once_are_heads_one_by_one(blocks: int, atom: bool, softcap: float | None) -> None:
    """With and without a sink, with capped scores, and cut short, where cells of one step differ in length."""
    collector = collected(blocks, atom=atom, softcap=softcap, kept_step=16)
    assert (collector.assignment.filled == collector.assignment.filled[0]).all() == (blocks == 4)
    alone = layer_curves(collector, floats_at_once=1)
    assert alone.bare.squares.shape == (SHARED * GROUPS, 5, 4, 3)
    assert_same(layer_curves(collector, floats_at_once=1 << 30), alone)


@pytest.mark.parametrize("blocks", [4, 2])
def test_errors_are_those_of_merged_states(blocks: int) -> None:
    """Of samples as they are, and with a sink, from states merged in float64; cut short, replicates have own limits."""
    collector = collected(blocks, atom=True)
    assignment, layer, sink = collector.assignment, collector.layer, collector.layer.atom
    curves, counts = layer_curves(collector), assignment.filled.cumsum(1)
    (*steps, _), _ = zip(*layer_module._steps(collector, slice(None)), strict=True)
    assert sink is not None
    assert curves.atomic is not None
    clusters = torch.eye(5, dtype=torch.float64)[torch.from_numpy(layer.clusters)] * (5 / QUERIES)
    for j, sample in enumerate(accumulate(steps, State.merge)):
        limit = curves.reference.thinned(torch.from_numpy(counts[:, j] / assignment.seen)).merge(sink)
        pairs = ((curves.bare, sample, curves.reference), (curves.atomic, sample.merge(sink), limit))
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
