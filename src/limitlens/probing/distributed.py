"""The pool of a probe spread over the workers of a cluster.

A probe is an ordered list of blocks of windows. A worker runs the model over a few of them, merges what they give as
one process would, and returns the sum as plain tensors; the driver, which deals every token, adds the shares in order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.attention.device import choose_device
from limitlens.attention.state import Peak, State
from limitlens.errors import InputError
from limitlens.models import LoadedModel, Windows, load
from limitlens.probing.collect import Collector
from limitlens.probing.pilot import Pilot
from limitlens.probing.stream import Pool, going_on, standing, stream
from limitlens.sampling.assignment import Assignment, BlockAssignment
from limitlens.sampling.checkpoint import Checkpoint, Job, under
from limitlens.sampling.clock import Clock
from limitlens.sampling.cluster import PIECES, spread
from limitlens.sampling.interrupt import Interrupt

Tensors: TypeAlias = dict[str, Tensor]
Blocks: TypeAlias = tuple[Tensor, list[BlockAssignment]]  # token ids (windows, length) of blocks, and their cells
Given: TypeAlias = tuple[dict[int, Tensors], Clock]  # what they gave to each layer, and the seconds it took

KEPT = ("key", "value", "hidden")  # of a collector's tensors, those with a row for each kept token


class _Sent(Windows):
    """Windows that were sent to a worker: token ids (windows, length)."""

    def __init__(self, ids: Tensor, like: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        self.ids, (self.prefix, self.suffix), (self.count, self.length) = ids.numpy(), like, ids.shape

    def read(self, indices: Sequence[int]) -> NDArray[np.int32]:
        return np.asarray(self.ids[list(indices)])


class _Dealt(Assignment):
    """A deck of which some hands were dealt elsewhere."""

    def __init__(self, deck: Assignment, hands: list[BlockAssignment]) -> None:
        vars(self).update(vars(deck))
        self.dealt = hands

    def hands(self) -> Iterator[BlockAssignment]:
        return iter(self.dealt)


@dataclass(frozen=True, eq=False)
class _Work:
    """What every worker must know."""

    model: str | LoadedModel  # loaded there by its name, or sent as it is
    sha256: str | None  # of the driver's
    device: str
    around: tuple[tuple[int, ...], tuple[int, ...]]  # special tokens before and after each window
    rows: tuple[int, int, int]  # windows of a forward, of a block and at once, as in `Pool`
    pilot: Pilot
    deck: Assignment

    def prepare(self) -> Callable[[Blocks], Given]:
        """Load the model, and return what does the work."""
        loaded = load(self.model, device=choose_device(self.device)) if isinstance(self.model, str) else self.model
        if loaded.sha256 != self.sha256:
            raise InputError(f"the model {self.model} is another one on a worker; expected the same files everywhere")
        pilot = _moved(self.pilot, loaded.model.device)

        def work(blocks: Blocks) -> Given:
            ids, hands = blocks
            collectors = {i: Collector(layer, self.deck) for i, layer in pilot.layers.items()}
            pool, clock = Pool(_Sent(ids, self.around), np.arange(len(ids)), *self.rows), Clock()
            stream(
                loaded, pool, pilot, _Dealt(self.deck, hands), collectors, clock=clock, interrupt=Interrupt(),
                report=lambda tokens: None, job=Checkpoint().begin({}), warnings=[],
            )  # fmt: skip
            slots = np.concatenate([hand.slots for hand in hands])
            return {index: share_of(collector, slots) for index, collector in collectors.items()}, clock

        return work


def gather(
    address: str, device: str, model: str | LoadedModel,
    loaded: LoadedModel, pool: Pool, pilot: Pilot, deck: Assignment, collectors: dict[int, Collector],
    *, clock: Clock, interrupt: Interrupt, report: Callable[[int], None], job: Job, warnings: list[str],
) -> None:  # fmt: skip
    """What `stream` does, on the workers of the cluster at an address; an interrupt waits for what is out.

    They load the `model` by its name where it has one, as the driver has `loaded` it.
    """
    if isinstance(model, str) and os.path.exists(model):
        model = os.path.abspath(model)
    bare = {
        i: replace(layer, traits=replace(layer.traits, projections=None, ratios=None))
        for i, layer in pilot.layers.items()
    }
    around, rows = (pool.windows.prefix, pool.windows.suffix), (pool.per_forward, pool.per_block, pool.at_once)
    work = _Work(model, loaded.sha256, device, around, rows, replace(pilot, layers=bare, sizes={}), deck)
    hands, done = going_on(pool, deck, collectors, job, report)
    given: list[tuple[int, int, NDArray[np.int64]]] = []  # tokens, blocks and slots of the shares that are out

    def pieces(workers: int) -> Iterator[Blocks]:
        start, at_once = done * pool.per_block, max(1, len(deck.blocks) // (PIECES * workers))
        while not interrupt.asked and (some := list(islice(hands, at_once))):
            indices = pool.indices[start : start + at_once * pool.per_block]
            start += len(indices)
            ids = torch.from_numpy(pool.windows.read(indices.tolist()))
            given.append((ids.numel(), len(some), np.concatenate([hand.slots for hand in some])))
            yield ids, some

    for layers, spent in spread(address, work.prepare, pieces, gpus=device != "cpu"):
        tokens, blocks, slots = given.pop(0)
        for index, share in layers.items():
            add_share(collectors[index], share, slots)
        clock.model, clock.attention, done = clock.model + spent.model, clock.attention + spent.attention, done + blocks
        interrupt.during(report, tokens)
        if not given or not interrupt.asked:  # a checkpoint in between, or the end of what was out
            job.passed(tokens, partial(standing, done, pool, deck, collectors), interrupt)


def share_of(collector: Collector, slots: NDArray[np.int64]) -> Tensors:
    """What a collector has seen, of the kept tokens those in these slots."""
    rows = torch.as_tensor(slots)
    found = {name: part.cpu() for name, part in collector.tensors().items()}
    return found | {name: found[name][rows[rows < len(found[name])]] for name in KEPT if name in found}


def add_share(collector: Collector, share: Tensors, slots: NDArray[np.int64]) -> None:
    """Merge what another collector of the layer has seen, whose kept tokens are those in these slots."""
    here = {name: part.to(collector.query.device) for name, part in share.items()}
    if not collector.states:
        collector.prepare(here["key"], here["value"], here.get("hidden"))

    states = {"special": collector.special, **{f"state{k}": state for k, state in enumerate(collector.states)}}
    peaks = {f"peak{k}": peak for k, peak in enumerate(collector.peaks)}
    merged = {name: state.merge(State.of(under(f"{name}.", here))).tensors() for name, state in states.items()}
    merged |= {name: peak.merge(Peak(**under(f"{name}.", here))).tensors() for name, peak in peaks.items()}
    own = collector.tensors()
    for name, parts in merged.items():
        for part, tensor in parts.items():
            own[f"{name}.{part}"].copy_(tensor)  # in place: on a device the cells are views of one tensor
    for name in (f"{kind}.{part}" for kind in collector.moments for part in ("count", "total", "products")):
        own[name] += here[name]
    rows = torch.as_tensor(slots, device=collector.query.device)
    for name in KEPT:
        if name in own:
            own[name][rows[rows < len(own[name])]] = here[name]


def _moved(value: Any, device: torch.device) -> Any:
    """The same with every tensor in it on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: _moved(getattr(value, item.name), device) for item in fields(value)})
    return value
