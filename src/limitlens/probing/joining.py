"""Layers that are alike, side by side as one layer of many heads.

On a device to measure the heads of one layer takes as long as to measure those of six: most of it is launches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from limitlens.attention.state import State
from limitlens.probing.collect import Collector
from limitlens.probing.moments import Moments
from limitlens.probing.on_device import DeviceCells

NUMBERS = 1 << 29  # in the states of layers that are joined: 4 GB


def groups(collectors: Iterable[Collector], bounded: bool = False) -> list[list[Collector]]:
    """Neighbouring layers that may be joined; on a CPU, and where memory is bounded, each is alone."""
    found: list[list[Collector]] = []
    for collector in collectors:
        if (
            not bounded
            and found
            and _alike(found[-1][0], collector)
            and _numbers(collector) * (len(found[-1]) + 1) <= NUMBERS
        ):
            found[-1].append(collector)
        else:
            found.append([collector])
    return found


def joined(collectors: Sequence[Collector]) -> Collector:
    """Layers that are alike as one, for whatever is measured head by head."""
    one = copy.copy(collectors[0])
    if len(collectors) == 1:
        return one
    layers = [collector.layer for collector in collectors]
    atoms = [layer.atom for layer in layers if layer.atom is not None]
    query = torch.cat([layer.query for layer in layers])
    one.layer = replace(layers[0], query=query, atom=State.joined(atoms) if atoms else None, first=None)
    one.query, one.detail_query = one.layer.flat_query, torch.cat([each.detail_query for each in collectors])
    one.key, one.value = (torch.cat(part, 1) for part in zip(*((c.key, c.value) for c in collectors), strict=True))
    one.special = State.joined([each.special for each in collectors])
    one.on_device = DeviceCells.joined([cells for each in collectors if (cells := each.on_device) is not None])
    one.moments = {name: Moments.joined([each.moments[name] for each in collectors]) for name in one.moments}
    one.states, one.peaks = [], []
    return one


def _alike(one: Collector, other: Collector) -> bool:
    if one.on_device is None or other.on_device is None:
        return False
    shapes, atoms = ([(c.layer.query.shape, c.value.shape) for c in (one, other)], (one.layer.atom, other.layer.atom))
    known = one.moments.keys() == other.moments.keys()
    return shapes[0] == shapes[1] and (atoms[0] is None) == (atoms[1] is None) and known


def _numbers(collector: Collector) -> int:
    return 0 if collector.on_device is None else collector.on_device.states.output.numel()
