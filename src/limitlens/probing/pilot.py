"""Queries come first: from a forward over a few random windows, which are then left out of the pool.

An encoder's queries come from all positions. A causal model's come from the last positions of its windows, and only
keys before all of these are pooled, so that every pooled key lies in every query's past.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.arrays import to_device
from limitlens.attention.kernels import Kernel, Precision
from limitlens.attention.kernels.reference import attend_scores
from limitlens.attention.scores import scores_of
from limitlens.attention.state import State
from limitlens.attention.subset import attend_subset
from limitlens.errors import InputError
from limitlens.models import Captured, Projections, Windows, capture, projector
from limitlens.models.catalog import LoadedModel
from limitlens.sampling.workers import Workers, one_after_another

LARGEST_TAIL = 4  # a causal model's queries come at most from the last 1/4 of a window
DETAIL_QUERIES = 64  # queries of a head behind the diagnostics that need every score
NORMALISED = "queries or keys are normalised one by one after the projection: no score matrix exists"
CLUSTERS = 32  # of queries, or near: of as many windows each, and what is kept grows with their number


@dataclass(frozen=True, eq=False)
class Traits:
    """What a layer is, whatever it reads."""

    scale: float  # as in `Captured`, times the factor asked for
    softcap: float | None
    sinks: Tensor | None
    sliding_window: int | None  # as in `Captured`; it may be longer than the probe's windows
    # mean query, key and, where it can be had, hidden state of the first windows: (heads, d) each
    rough_mean: dict[str, Tensor]
    # as `limitlens.models.projections` and `Projections.ratios` give them, where they can be had
    projections: Projections | None
    ratios: Tensor | None
    note: str  # why they cannot, or what to keep in mind about them

    @cached_property
    def factor(self) -> float | None:
        """That of `Projections.factor`; a device is waited for."""
        return None if self.projections is None else self.projections.factor(self.ratios)

    @property
    def reason(self) -> str:
        """Why there is no such factor, or the note; empty when there is nothing to say."""
        return self.note if self.projections is None or self.factor is not None else NORMALISED


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention layer as the probe sees it: Hkv key/value heads, G query heads for each, m queries a head."""

    index: int  # the layer's place in the model
    query: Tensor  # (Hkv, G, m, k): queries, with the scale of the scores in them
    # what is in every context once, (Hkv, G · m): the first token of the query's own window, and the learned sink
    atom: State | None
    first: Tensor | None  # (Hkv, G · m) or None: the score of that first token alone
    clusters: NDArray[np.intp]  # (m,): of each query; those of one window are no independent witnesses, and are in one
    traits: Traits
    precision: Precision = "accurate"  # of its kernel

    @property
    def kernel(self) -> Kernel | Precision:
        """The kernel its scores need: the device's own, by precision, unless they are capped."""
        softcap = self.traits.softcap

        def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
            scores = scores_of(query, key, softcap)
            return attend_scores(scores if bias is None else scores + bias, value)

        return self.precision if softcap is None else attend

    @property
    def detail(self) -> Tensor:
        """The detail queries, (q,): spread over all windows that gave queries."""
        return self.some(DETAIL_QUERIES)

    def places(self, count: int) -> NDArray[np.int64]:
        """So many queries, or all there are, spread over all windows that gave queries."""
        m = self.query.shape[2]
        return torch.linspace(0, m - 1, min(count, m)).round().long().numpy()

    def some(self, count: int) -> Tensor:
        """The same where the queries are."""
        return to_device(self.places(count), self.query.device)

    @property
    def flat_query(self) -> Tensor:
        """Queries of one key/value head side by side, (Hkv, G · m, k): its keys need not be repeated."""
        return self.query.flatten(1, 2)


@dataclass(frozen=True, eq=False)
class Pilot:
    """What the pilot found: the layers by their place in the model."""

    layers: dict[int, Layer]
    causal: bool
    positions: range  # positions of a window whose keys are pooled
    queries: NDArray[np.intp]  # (m, 2) array: window and position of each query
    sizes: dict[str, Tensor]  # norms of what each layer gave, in words: see `check`

    def check(self) -> None:
        """Refuse numbers that are not finite; a device is waited for."""
        sizes = torch.stack(list(self.sizes.values())).tolist() if self.sizes else []
        for given, size in zip(self.sizes, sizes, strict=True):
            if not np.isfinite(size):
                given = f"{given} that is not finite, or far too large"
                raise InputError(f"{given}; expected a model whose weights are whole")


def run_pilot(
    loaded: LoadedModel, windows: Windows, indices: NDArray[np.intp],
    *, queries: int, batch: int, seed: int, report: Callable[[int], None], score_scale: float = 1.0,
    precision: Precision = "accurate", check: bool = True, workers: Workers = one_after_another,
) -> Pilot:  # fmt: skip
    """Run the model over the pilot's windows, `batch` at a time, and take its queries; `report` is told of tokens.

    Without a `check` of what it has found nothing waits for a device, and whoever asked should.
    `score_scale` multiplies every score as it is looked at, before a softcap: the model's own forward is left as it is.
    """
    gather = _Gather(loaded, windows.length, indices, queries, seed, score_scale, precision)
    forwards, _ = workers.beside(batch)

    def pieces() -> Iterator[tuple[int, Tensor]]:
        """The windows of every forward, and which comes first."""
        start = 0
        for ids in windows.batches(batch, indices):
            for few in ids.tensor_split(min(forwards.count, len(ids))):
                yield start, few
                start += len(few)

    def forward(piece: tuple[int, Tensor]) -> int:
        gather.now.start, ids = piece
        run_until_last_attention(input_ids=ids.to(loaded.model.device))
        return ids.numel()

    def take(captured: Captured) -> None:
        workers.check()
        gather.take(captured)

    with torch.inference_mode(), capture(loaded.model, take, hidden=True) as run_until_last_attention:
        for tokens in forwards(forward, pieces()):
            report(tokens)
        pilot = gather.finish()
    if check:
        pilot.check()
    return pilot


class _Now(threading.local):
    """What a thread runs: windows from one on, and where the queries in these are, row and column."""

    start = 0
    place: tuple[int, Tensor, Tensor] = (-1, *torch.empty(2, 0))


class _Gather:
    """Takes from each captured layer the rows that were chosen as queries. Nothing waits for a device."""

    def __init__(
        self, loaded: LoadedModel, length: int, indices: NDArray[np.intp], queries: int, seed: int, score_scale: float,
        precision: Precision,
    ) -> None:  # fmt: skip
        self.loaded, self.length, self.indices, self.queries, self.seed = loaded, length, indices, queries, seed
        self.score_scale, self.precision = score_scale, precision
        self.now, self.lock = _Now(), threading.Lock()
        self.causal: bool | None = None
        self.tail = length
        self.chosen: NDArray[np.intp] = np.empty((0, 2), np.intp)
        # of each layer, by the first of the windows: queries, and the first keys and values of their windows
        self.parts: dict[int, dict[int, tuple[Tensor, Tensor, Tensor]]] = {}
        self.traits: dict[int, Traits] = {}
        self.projections = projector(loaded.model)
        self.sizes: dict[str, list[Tensor]] = {}

    def take(self, captured: Captured) -> None:
        start = self.now.start
        with self.lock:
            if self.causal is None:
                self._choose(captured.causal)
        if captured.causal != self.causal:
            mixed = f"{self.loaded.name} has both causal and bidirectional layers"
            raise InputError(f"{mixed}; expected one kind, so choose another model")
        if captured.bias is not None:
            raise InputError(
                f"layer {captured.layer} of {self.loaded.name} adds a bias to its scores by relative position, and a "
                "pooled key has none; choose a model with rotary, learned or no positions"
            )
        for name in ("query", "key", "value"):
            given = f"layer {captured.layer} of {self.loaded.name} gives a {name}"
            size = torch.linalg.vector_norm(getattr(captured, name), dtype=torch.float32)
            self.sizes.setdefault(given, []).append(size)
        if start == 0:
            self.traits[captured.layer] = self._traits(captured)
        if self.now.place[0] != start:
            stop = start + captured.query.shape[0]
            window, position = self.chosen[(self.chosen[:, 0] >= start) & (self.chosen[:, 0] < stop)].T
            self.now.place = (start, *to_device(np.stack((window - start, position)), captured.query.device))
        _, row, column = self.now.place
        query = captured.query[row, :, column].float() * (captured.scale * self.score_scale)
        first = (captured.key[row, :, 0].float(), captured.value[row, :, 0].float())
        self.parts.setdefault(captured.layer, {})[start] = (query, *first)

    def finish(self) -> Pilot:
        positions = range(1, self.length - self.tail) if self.causal else range(self.length)
        chosen = np.stack((self.indices[self.chosen[:, 0]], self.chosen[:, 1]), axis=1)
        layers = {index: self._layer(index) for index in sorted(self.parts)}
        sizes = {given: torch.stack(found).sum() for given, found in self.sizes.items()}
        return Pilot(layers, bool(self.causal), positions, chosen, sizes)

    def _choose(self, causal: bool) -> None:
        """Draw the queries among the last positions of a causal model's windows, among all of an encoder's.

        As many from every window, or one more: what differs between windows then adds least to their mean.
        """
        self.causal, count = causal, len(self.indices)
        if causal:
            self.tail = min(-(-self.queries // count), max(1, self.length // LARGEST_TAIL))
            if self.length - self.tail < 2:
                short = f"windows of {self.length} tokens are too short for a causal model"
                raise InputError(f"{short}; expected 8 or more")
        turn, place = divmod(np.arange(min(self.queries, count * self.tail)), count)
        generator = np.random.default_rng(np.random.SeedSequence([self.seed, 0x0A5C]))
        window, orders = generator.permutation(count)[place], generator.random((count, self.tail)).argsort(1)
        found = np.sort(window * self.tail + orders[window, turn])
        self.chosen = np.stack((found // self.tail, self.length - self.tail + found % self.tail), axis=1)

    def _traits(self, captured: Captured) -> Traits:
        made, note = self.projections(captured.layer)
        if made is not None and captured.hidden is None:
            made, note = None, "the input of the query projection could not be read"
        rough_mean = {name: getattr(captured, name).mean((0, 2), dtype=torch.float32) for name in ("query", "key")}
        if captured.hidden is not None:
            rough_mean["hidden"] = captured.hidden.mean((0, 1), dtype=torch.float32)[None]
        own = (captured.scale * self.score_scale, captured.softcap, captured.sinks, captured.sliding_window)
        return Traits(*own, rough_mean, made, None if made is None else made.ratios(captured), note)

    def _layer(self, index: int) -> Layer:
        in_order = (part for _, part in sorted(self.parts[index].items()))
        rows, keys, values = (torch.cat(part) for part in zip(*in_order, strict=True))
        traits = self.traits[index]
        heads, shared = rows.shape[1], keys.shape[1]
        query = rows.transpose(0, 1).reshape(shared, heads // shared, *rows.shape[::2]).contiguous()
        atom, first, count = None, None, 0
        scores = query.new_zeros(*query.shape[:3], 1, 0, dtype=torch.float64)  # one query and no key
        value = values.new_zeros(shared, 1, 1, 0, values.shape[-1], dtype=torch.float64)
        if self.causal and (traits.sliding_window is None or traits.sliding_window >= self.length):
            key, value = (part.double().transpose(0, 1)[:, None, :, None] for part in (keys, values))
            scores = scores_of(query.double()[..., None, :], key, traits.softcap)
            first, count = scores.flatten(1), 1
        if count or traits.sinks is not None:
            sinks = None if traits.sinks is None else traits.sinks.double().view(shared, -1, 1, 1)
            lse, output = attend_subset(scores, value, sinks=sinks)
            counts = torch.full((shared,), count, dtype=torch.int64, device=query.device)
            atom = State(counts, lse.flatten(1), output.flatten(1, 3))
        rank = np.unique(self.chosen[:, 0], return_inverse=True)[1]
        together = max(1, round((int(rank.max()) + 1) / CLUSTERS))  # windows in a cluster
        return Layer(index, query, atom, first, rank // together, traits, self.precision)
