"""Run a probe on the workers of a Ray cluster, each of which reads a share of the windows of text.

The driver (the process that started the probe) assigns tokens to samples and merges the workers' results in order.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.attention.kernels import choose_device
from limitlens.errors import InputError
from limitlens.models import LoadedModel, load
from limitlens.probing.collect import Collector
from limitlens.probing.pilot import Pilot
from limitlens.probing.stream import BlockProgress, Pool, run_blocks
from limitlens.sampling.assignment import Assignment, BlockAssignment
from limitlens.sampling.checkpoint import under
from limitlens.sampling.clock import Clock
from limitlens.sampling.cluster import PIECES, spread
from limitlens.sampling.interrupt import Interrupt

Tensors: TypeAlias = dict[str, Tensor]
Blocks: TypeAlias = tuple[Tensor, list[BlockAssignment]]  # token ids (windows, length) of blocks, and their cells
Share: TypeAlias = tuple[dict[int, Tensors], Clock]  # a worker's result: tensors of each layer, and seconds taken

KEPT = ("key", "value", "hidden")  # tensors of a collector with a row for each kept token


def _prepare(
    model: str | LoadedModel, sha256: str | None, device: str, special: NDArray[np.bool_], at_once: int, pilot: Pilot,
    assignment: Assignment,
) -> Callable[[Blocks], Share]:  # fmt: skip
    """Load the model on a worker, check its weights by `sha256`, and return the function that processes blocks."""
    loaded = load(model, device=choose_device(device)) if isinstance(model, str) else model
    if loaded.sha256 != sha256:
        raise InputError(f"the model {model} on a worker differs from the driver's; expected the same files everywhere")
    pilot = _moved(pilot, loaded.model.device)

    def work(blocks: Blocks) -> Share:
        ids, assigned = blocks
        collectors = {i: Collector(layer, assignment) for i, layer in pilot.layers.items()}
        clock = Clock()
        run_blocks(
            loaded, pilot, collectors, iter(assigned), torch.split(ids.long(), at_once), special, at_once,
            clock=clock, warnings=[], report=lambda _: None, passed=lambda _: None,
            interrupt=Interrupt(), progress=BlockProgress(),
        )  # fmt: skip
        slots = np.concatenate([block.slots for block in assigned])
        return {index: share_of(collector, slots) for index, collector in collectors.items()}, clock

    return work


def run(
    address: str, device: str, model: str | LoadedModel,
    loaded: LoadedModel, pool: Pool, pilot: Pilot, collectors: dict[int, Collector], blocks: Iterator[BlockAssignment],
    indices: NDArray[np.intp], special: NDArray[np.bool_],
    *, clock: Clock, interrupt: Interrupt, report: Callable[[int], None], passed: Callable[[int, bool], None],
) -> None:  # fmt: skip
    """Run the model over the windows `indices` like `stream.run_blocks`, on the workers of a Ray cluster.

    A `model` given by name is loaded by every worker; `loaded` is the same model on the driver. `passed` is called with
    a number of complete blocks, and whether to save. An interrupt takes effect after the blocks already sent.
    """
    if isinstance(model, str) and os.path.exists(model):
        model = os.path.abspath(model)
    bare = {
        i: replace(layer, traits=replace(layer.traits, projections=None, ratios=None))
        for i, layer in pilot.layers.items()
    }
    assignment = next(iter(collectors.values())).assignment  # the same for all layers
    bare_pilot = replace(pilot, layers=bare, sizes={})
    prepare = partial(_prepare, model, loaded.sha256, device, special, pool.at_once, bare_pilot, assignment)
    sent: list[tuple[int, int, NDArray[np.int64]]] = []  # tokens, blocks and slots of work sent and not returned yet

    def pieces(workers: int) -> Iterator[Blocks]:
        start, at_once = 0, max(1, len(assignment.blocks) // (PIECES * workers))
        while not interrupt.asked and (some := list(islice(blocks, at_once))):
            stop = start + at_once * pool.per_block
            ids = torch.from_numpy(pool.windows.read(indices[start:stop].tolist()))
            start = stop
            sent.append((ids.numel(), len(some), np.concatenate([block.slots for block in some])))
            yield ids, some

    for layers, spent in spread(address, prepare, pieces, gpus=device != "cpu"):
        tokens, count, slots = sent.pop(0)
        for index, share in layers.items():
            add_share(collectors[index], share, slots)
        clock.model += spent.model
        clock.attention += spent.attention
        report(tokens)
        passed(count, not sent or not interrupt.asked)  # save now, or once all work sent has returned


def share_of(collector: Collector, slots: NDArray[np.int64]) -> Tensors:
    """Result of a worker for one layer: the collector's tensors on the CPU; of stored tokens, only those in `slots`."""
    rows = torch.as_tensor(slots)
    found = {name: part.cpu() for name, part in collector.tensors().items()}
    return found | {name: found[name][rows[rows < len(found[name])]] for name in KEPT if name in found}


def add_share(collector: Collector, share: Tensors, slots: NDArray[np.int64]) -> None:
    """Merge the result of a worker (`share_of`) for one layer into the driver's collector of that layer."""
    device = collector.key.device
    share = {name: part.to(device) for name, part in share.items()}
    tensors = collector.tensors()
    for kind, held in (("state", collector.states), ("peak", collector.peaks)):
        merged = held.merge(type(held)(**under(f"{kind}.", share)))  # type: ignore[arg-type]
        for name, part in merged.tensors().items():
            tensors[f"{kind}.{name}"].copy_(part)
    for name in (f"{kind}.{part}" for kind in collector.moments for part in ("count", "total", "products")):
        tensors[name] += share[name]
    rows = torch.as_tensor(slots, device=device)
    for name in KEPT:
        if name in tensors:
            tensors[name][rows[rows < len(tensors[name])]] = share[name]


def _moved(value: Any, device: torch.device) -> Any:
    """Copy of a nested structure of dicts and dataclasses in which every tensor is moved to `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: _moved(getattr(value, item.name), device) for item in fields(value)})
    return value
