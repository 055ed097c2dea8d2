"""From the cells of a layer to error curves: merge cumulatively, compare with the merge of everything.

Two views of the same samples. The pooled law alone: Γ_n against Γ_N. And with the atom that every context contains (the
sink): its mass does not grow with n, so a sample of n tokens and the atom is compared with n tokens' worth of the pool,

    Γ̄_n = (e^a v_a + (n/N) Σ_pool e^s v) / (e^a + (n/N) Σ_pool e^s),

the limit of many samples of n. Errors are divided by √(1 − n/N), since samples are drawn from the pool without
replacement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.arrays import to_device, to_numpy
from limitlens.attention.kernels import state_of
from limitlens.attention.state import Peak, State
from limitlens.errors import Array
from limitlens.probing.collect import Collector
from limitlens.probing.moment_errors import MOMENTS, OutputMoments, Squares, members
from limitlens.probing.peaks import hardmax_errors, peak_over
from limitlens.sampling.assignment import LEFT_OVER
from limitlens.statistics.error_curve import ErrorCurve

FLOATS_AT_ONCE = 1 << 18  # numbers in the outputs that are merged at a time, few enough to stay in cache: 1 MiB
DEVICE_TIMES = 128  # as many on a GPU, where a launch takes as long for few numbers as for many


@dataclass(frozen=True, eq=False)
class SampleErrors(Squares):
    """Output errors |Γ_n − Γ|²; the scales are root mean squares over queries of |Γ| and of |Γ − mean Γ|."""

    centred_scale: Array  # (heads, J)

    def centred(self, head: int, curve: ErrorCurve) -> Array:
        """Its errors relative to how much the output differs between queries, (J,)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(self.centred_scale[head] > 0, self.scale[head] / self.centred_scale[head], np.nan)
        return np.asarray(curve.error * ratio)


@dataclass(frozen=True, eq=False)
class LayerCurves:
    """The measured curves of a layer."""

    counts: NDArray[np.int64]  # (R, J): tokens in each sample: the sizes asked for, unless the stream was cut short
    pool: int  # N, the tokens of the reference
    reference: State  # attention over the whole pool, (Hkv, G · m)
    bare: SampleErrors  # of the pooled law alone
    atomic: SampleErrors | None  # with the atom, where the layer has one
    others: dict[str, Squares]  # of the pooled law: of the "mean", the "covariance", and of "hardmax"

    def of(self, heads: slice, shared: slice) -> LayerCurves:
        """Those of some query heads, which read these key/value heads."""
        others = {name: part.of(heads) for name, part in self.others.items()}
        atomic = None if self.atomic is None else self.atomic.of(heads)
        return LayerCurves(self.counts, self.pool, self.reference[shared], self.bare.of(heads), atomic, others)

    @property
    def finite_population_correction(self) -> Array:
        """√(1 − n/N), (J,), or (R, J) where a stream was cut short and samples differ in length."""
        factor = np.sqrt(1 - self.counts / self.pool)
        return np.asarray(factor[0] if (factor == factor[0]).all() else factor)


def layer_curves(collector: Collector) -> LayerCurves:
    """Merge the cells of a layer and measure its errors: on a CPU mostly of one key/value head at a time."""
    deck, (shared, rows) = collector.deck, collector.query.shape[:2]
    at_once = _at_once(collector.query, deck.replicates * rows * collector.value.shape[-1])
    parts = [_some_heads(collector, slice(start, start + at_once)) for start in range(0, shared, at_once)]
    references, views, others = zip(*parts, strict=True)
    bare, *atomic = map(SampleErrors.joined, zip(*views, strict=True))
    together = dict(zip((*MOMENTS, "hardmax"), map(Squares.joined, zip(*others, strict=True)), strict=True))
    counts, reference = deck.filled.cumsum(1), State.joined(references)
    return LayerCurves(counts, deck.seen, reference, bare, atomic[0] if atomic else None, together)


def _at_once(like: Tensor, floats: int) -> int:
    """How many things of so many numbers are taken at a time where this tensor lies."""
    return max(1, FLOATS_AT_ONCE * (1 if like.device.type == "cpu" else DEVICE_TIMES) // floats)


def _some_heads(collector: Collector, heads: slice) -> tuple[State, list[SampleErrors], list[Squares]]:
    """The reference (h, G · m) of h key/value heads, errors in each way to look at their samples, and the others."""
    deck, atom = collector.deck, collector.layer.atom
    counts = deck.filled.cumsum(1)
    (*steps, left_over), peaks = zip(*_steps(collector, heads), strict=True)
    reference = State.joined([*(step.union()[None] for step in steps), left_over]).union()
    beside = None
    if atom is not None:
        # One count for all replicates, unless the stream was cut short.
        distinct = counts.T[:, :1] if (counts == counts[0]).all() else counts.T
        shares = to_device(distinct.flatten() / deck.seen, reference.lse.device)
        limits = reference.thinned(shares).merge(atom[heads]).tensors()
        shaped = {name: part.reshape(*distinct.shape, *part.shape[1:]) for name, part in limits.items()}
        beside = atom[heads], State.of(shaped)
    moments = OutputMoments(reference.output, collector.layer.clusters, *counts.shape)
    views = _views(collector, steps, reference.output, beside, moments)
    return reference, views, [*moments.squares(), hardmax_errors(collector.layer, peaks)]


def _steps(collector: Collector, heads: slice) -> list[tuple[State, Peak]]:
    """States (R, h, G · m) and peaks (R, h, G · q) of every step of the replicates; those of no cell (·, h, ·) last."""
    deck = collector.deck
    if collector.on_device is not None:
        return collector.on_device.steps(deck, collector.key, collector.value, heads)
    states, peaks = _streamed(collector, heads, range(deck.states - LEFT_OVER, deck.states))
    last = State.joined(states), Peak.joined(peaks)
    return [*(_step(collector, heads, j) for j in range(deck.kept.shape[1])), last]


def _streamed(collector: Collector, heads: slice, numbers: Iterable[int]) -> tuple[list[State], list[Peak]]:
    """States (1, h, G · m) and peaks (1, h, G · q) of the streamed cells of these numbers, to be joined."""
    states = [collector.states[number][None, heads] for number in numbers]
    return states, [collector.peaks[number][None, heads] for number in numbers]


def _step(collector: Collector, heads: slice, j: int) -> tuple[State, Peak]:
    """States (R, h, G · m) and peaks (R, h, G · q) of step j of every replicate."""
    deck, device = collector.deck, collector.query.device
    kept, streamed = np.flatnonzero(deck.kept[:, j]), np.flatnonzero(~deck.kept[:, j])
    lengths = np.unique(deck.filled[kept, j]).tolist()  # one for all, unless the stream was cut short
    groups = [kept[deck.filled[kept, j] == length] for length in lengths]
    states: list[State] = []
    peaks: list[Peak] = []
    for length, alike in zip(lengths, groups, strict=True):
        slots = to_device((deck.start[alike, j][:, None] + np.arange(length)).flatten(), device)
        tokens = (held[:, heads].index_select(0, slots) for held in (collector.key, collector.value))
        key, value = (rows.reshape(len(alike), length, *rows.shape[1:]).transpose(1, 2) for rows in tokens)
        states.append(state_of(collector.query[heads], key, value, kernel=collector.layer.kernel))
        peaks.append(peak_over(collector.detail_query[heads], key, value, collector.layer.traits.softcap))
    if len(streamed):
        groups.append(streamed)
        more, best = _streamed(collector, heads, deck.number[streamed, j])
        states, peaks = states + more, peaks + best
    state, peak, order = State.joined(states), Peak.joined(peaks), np.concatenate(groups)
    if (np.diff(order) > 0).all():  # whole replicates, which are kept, come first
        return state, peak
    place = to_device(np.argsort(order), device)
    return state[place], peak[place]


def _views(
    collector: Collector, steps: Sequence[State], reference: Tensor, beside: tuple[State, State] | None,
    moments: OutputMoments,
) -> list[SampleErrors]:  # fmt: skip
    """Errors of nested samples, merged from their steps (R, h, G · m), against the reference (h, G · m, v).

    And beside an atom (h, G · m) against the limits (J, R, h, G · m) of every size and replicate, R of length 1 where
    all have one; `moments` takes in what there is without it. A few replicates are merged at a time, so that their
    states stay in cache, or all of several sizes. Outputs are merged as differences D from the reference Γ, in single
    precision: its rounding is to the errors what it is to the numbers themselves. An atom of value v that weighs t in
    a sample and u in its limit makes them D(1 − t) + (v − Γ)(t − u).
    """
    m, clusters = collector.layer.query.shape[2], collector.layer.clusters
    replicates, *own = steps[0].output.shape
    member = members(clusters, steps[0].lse.device)
    member = member * (member.shape[1] / m)

    def squares(vectors: Tensor) -> Tensor:
        """Squared norms, (..., h, G · m, v) to (..., h · G, m)."""
        found: Tensor = torch.linalg.vecdot(vectors, vectors)
        return found.reshape(*vectors.shape[:-3], -1, m)

    def about(step: State) -> State:
        return State(step.count, step.lse, (step.output - reference).float())

    groups, at_once = own[0] * own[1] // m, _at_once(member, math.prod(own))
    seen = [reference[None, None]]
    if beside is not None:
        atom, limit = beside
        away, share = (atom.output - reference).float(), torch.exp(atom.lse - limit.lse)
        seen.append(limit.output)
    errors = member.new_empty(len(seen), groups, member.shape[1], replicates, len(steps))
    several = max(1, at_once // replicates)
    for start in range(0, replicates, at_once):
        part = slice(start, start + at_once)
        samples = accumulate((about(step[part]) for step in steps), State.merge)
        for first in range(0, len(steps), several):
            sizes = slice(first, first + several)
            sample = State.joined([one[None] for one in islice(samples, several)])  # (sizes, replicates, h, G · m)
            differences = [sample.output]
            moments.add(part, sizes, sample.output)
            if beside is not None:
                here = torch.exp(atom.lse - torch.logaddexp(sample.lse, atom.lse))
                moved = here - (share[sizes, part] if share.shape[1] > 1 else share[sizes])
                rest = (1 - here).float()[..., None] * sample.output
                differences.append(rest.addcmul_(away, moved.float()[..., None]))
            for way, difference in enumerate(differences):
                errors[way, :, :, part, sizes] = (squares(difference).double() @ member).permute(2, 3, 1, 0)
    found = []
    for limits, error in zip(seen, errors, strict=True):
        heads = limits.reshape(*limits.shape[:-2], -1, m, own[-1])
        centred = (heads - heads.mean(-2, keepdim=True)).flatten(-3, -2)
        scales = (squares(vectors).mean(-1).sqrt().mean(1).T for vectors in (limits, centred))
        output = (squares(limits) @ member).mean(1).permute(1, 2, 0)  # (h · G, C, J)
        mean = output.mean(1, keepdim=True)
        parts = (torch.where(mean > 0, output / mean, 1.0), *scales)
        found.append(SampleErrors(*to_numpy(error, *(part.expand(*part.shape[:-1], len(steps)) for part in parts))))
    return found
