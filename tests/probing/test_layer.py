"""Errors of a layer, of all its heads at once as on a device, are those of one head at a time."""

from __future__ import annotations

from dataclasses import fields
from itertools import accumulate, islice

import numpy as np
import pytest
import torch

from limitlens.attention.state import State
from limitlens.probing import layer as layer_module
from limitlens.probing.collect import Collector
from limitlens.probing.distributed import add_share, share_of
from limitlens.probing.joining import groups, joined
from limitlens.probing.layer import LayerCurves, layer_curves
from limitlens.probing.on_device import DeviceCells
from limitlens.probing.pilot import Layer, Traits
from limitlens.sampling import assignment
from limitlens.sampling.assignment import Assignment
from limitlens.sampling.cells import Cells

SHARED, GROUPS, QUERIES, KEY, VALUE, BLOCK = 3, 2, 12, 4, 5, 300


def collected(
    blocks: int, *, atom: bool = False, softcap: float | None = None, device: bool = False, seed: int = 5
) -> Collector:
    """A layer that has seen so many of four blocks of random tokens: two replicates are kept, two are streamed."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    own = drawn(SHARED, GROUPS * QUERIES).double(), drawn(SHARED, GROUPS * QUERIES, VALUE).double()
    clusters = np.sort(np.arange(QUERIES) % 5)
    traits = Traits(1.0, softcap, None, None, {}, None, None, "")
    sink = State(torch.ones(SHARED, dtype=torch.int64), *own) if atom else None
    layer = Layer(0, drawn(SHARED, GROUPS, QUERIES, KEY), sink, None, clusters, traits)
    deck = Assignment([BLOCK] * 4, Cells((16, 48, 120)), 4, seed=0)
    deck.marks = 3
    made = Collector(layer, deck)
    made.prepare(drawn(1, SHARED, KEY), drawn(1, SHARED, VALUE), None)
    if device:
        made.on_device = DeviceCells(
            made.query, torch.arange(GROUPS * QUERIES), deck.states + 1, made.value, "accurate"
        )
    for hand in islice(deck.hands(), blocks):
        key, value = (drawn(BLOCK, SHARED, size)[hand.order] for size in (KEY, VALUE))
        kept = len(hand.slots)
        if made.on_device is not None:
            rows = torch.cat((torch.from_numpy(hand.slots), deck.slots + torch.arange(BLOCK - kept)))
            special = (deck.wait, deck.wait + 3)
            made.on_device.put(made.stores, (key, value), rows, kept + torch.arange(3), deck.slots + deck.wait)
            made.on_device.take(hand, torch.tensor(hand.streamed), special, *made.waiting)
            continue
        made.key[hand.slots], made.value[hand.slots] = key[:kept], value[:kept]
        made.waiting = key[kept:], value[kept:]
        for cell in hand.streamed:
            made._stream(*cell)
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
def test_heads_at_once_are_heads_one_by_one(
    blocks: int, atom: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without a sink, with capped scores, and cut short, where cells of one step differ in length."""
    monkeypatch.setattr(assignment, "KEPT_STEP", 16)
    collector = collected(blocks, atom=atom, softcap=softcap)
    assert (collector.deck.filled == collector.deck.filled[0]).all() == (blocks == 4)
    monkeypatch.setattr(layer_module, "FLOATS_AT_ONCE", 1)
    alone = layer_curves(collector)
    assert alone.bare.squares.shape == (SHARED * GROUPS, 5, 4, 3)
    monkeypatch.setattr(layer_module, "FLOATS_AT_ONCE", 1 << 30)
    assert_same(layer_curves(collector), alone)


@pytest.mark.parametrize("blocks", [4, 2])
def test_errors_are_those_of_merged_states(blocks: int) -> None:
    """Of samples as they are, and with a sink, from states merged in float64; cut short, replicates have own limits."""
    collector = collected(blocks, atom=True)
    deck, layer, sink = collector.deck, collector.layer, collector.layer.atom
    curves, counts = layer_curves(collector), deck.filled.cumsum(1)
    (*steps, _), _ = zip(*layer_module._steps(collector, slice(None)), strict=True)
    assert sink is not None
    assert curves.atomic is not None
    clusters = torch.eye(5, dtype=torch.float64)[torch.from_numpy(layer.clusters)] * (5 / QUERIES)
    for j, sample in enumerate(accumulate(steps, State.merge)):
        limit = curves.reference.thinned(torch.from_numpy(counts[:, j] / deck.seen)).merge(sink)
        pairs = ((curves.bare, sample, curves.reference), (curves.atomic, sample.merge(sink), limit))
        for found, state, wanted in pairs:
            square = (state.output - wanted.output).square().sum(-1).reshape(len(counts), -1, QUERIES) @ clusters
            np.testing.assert_allclose(found.squares[..., j], square.permute(1, 2, 0), rtol=2e-6)


def test_cells_on_a_device_are_cells_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the device's own program, under Triton's interpreter where there is no device; cells differ in length."""
    pytest.importorskip("triton", reason="the CUDA kernel needs triton, also to be interpreted")
    monkeypatch.setattr(assignment, "KEPT_STEP", 16)
    monkeypatch.setattr(layer_module, "FLOATS_AT_ONCE", 1)
    alone = layer_curves(collected(2))
    at_once = 2 * 4 * GROUPS * QUERIES * VALUE  # two of the three heads, and the third
    monkeypatch.setattr(layer_module, "FLOATS_AT_ONCE", at_once)
    assert_same(layer_curves(collected(2, device=True)), alone, close=1e-5)


@pytest.mark.parametrize("atom", [False, True])
def test_layers_side_by_side_are_layers_one_by_one(atom: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers whose cells lie on a device, joined and parted again."""
    pytest.importorskip("triton", reason="the CUDA kernel needs triton, also to be interpreted")
    monkeypatch.setattr(assignment, "KEPT_STEP", 16)
    layers = [collected(4, atom=atom, device=True, seed=seed) for seed in (5, 6)]
    assert [len(group) for group in groups([*layers, collected(4)])] == [2, 1]
    whole = layer_curves(joined(layers))
    for place, layer in enumerate(layers):
        pairs = slice(place * SHARED, (place + 1) * SHARED)
        assert_same(whole.of(slice(pairs.start * GROUPS, pairs.stop * GROUPS), pairs), layer_curves(layer), close=1e-6)


def test_what_another_has_seen_is_merged_in_place() -> None:
    """On a device the states of all cells are one tensor, which the curves are read off."""
    here, there = collected(2), collected(4)
    lies = {name: tensor.data_ptr() for name, tensor in here.tensors().items()}
    counts = [state.count + other.count for state, other in zip(here.states, there.states, strict=True)]
    slots = np.arange(here.deck.slots)
    add_share(here, share_of(there, slots), slots)
    assert {name: tensor.data_ptr() for name, tensor in here.tensors().items()} == lies
    assert all(torch.equal(state.count, count) for state, count in zip(here.states, counts, strict=True))
