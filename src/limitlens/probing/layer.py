"""Error curves of a layer: merge its cells cumulatively and compare them with the merge of everything.

The same samples are compared in two ways. Without a sink: Γ_n against Γ_N. With the atom that every context contains
(the sink): its mass does not grow with n, so a sample of n tokens and the atom is compared with n tokens' worth of the
pool,

    Γ̄_n = (e^a v_a + (n/N) Σ_pool e^s v) / (e^a + (n/N) Σ_pool e^s),

the limit of many samples of n. Errors are divided by √(1 − n/N), since samples are drawn from the pool without
replacement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.arrays import to_device, to_numpy
from limitlens.attention.state import Peak, State
from limitlens.errors import Array
from limitlens.probing.collect import Collector
from limitlens.probing.moment_errors import MOMENTS, OutputMoments, Squares, members
from limitlens.probing.peaks import hardmax_errors
from limitlens.sampling.assignment import LEFT_OVER
from limitlens.statistics.error_curve import ErrorCurve

FLOATS_AT_ONCE = 1 << 18  # numbers in the outputs that are merged at a time, few enough to stay in cache: 1 MiB
DEVICE_TIMES = 128  # times as many on a GPU, where a launch takes as long for few numbers as for many


@dataclass(frozen=True, eq=False)
class SampleErrors(Squares):
    """Output errors |Γ_n − Γ|²; the scales are root mean squares over queries of |Γ| and of |Γ − mean Γ|."""

    centred_scale: Array  # (heads, J)

    def centred(self, head: int, curve: ErrorCurve) -> Array:
        """Errors of a head relative to how much its output differs between queries, (J,)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(self.centred_scale[head] > 0, self.scale[head] / self.centred_scale[head], np.nan)
        return np.asarray(curve.error * ratio)


@dataclass(frozen=True, eq=False)
class LayerCurves:
    """Measured error curves of a layer."""

    counts: NDArray[np.int64]  # (R, J): tokens in each sample: the sizes asked for, unless the stream was cut short
    pool: int  # N, the tokens of the reference
    reference: State  # attention over the whole pool, (Hkv, G · m)
    bare: SampleErrors  # without the atom
    atomic: SampleErrors | None  # with the atom, where the layer has one
    others: dict[str, Squares]  # without the atom: errors of the "mean", the "covariance" and of "hardmax"

    def of(self, heads: slice, shared: slice) -> LayerCurves:
        """Restrict to some query heads and the key/value heads that they read."""
        others = {name: part.of(heads) for name, part in self.others.items()}
        atomic = None if self.atomic is None else self.atomic.of(heads)
        return LayerCurves(self.counts, self.pool, self.reference[shared], self.bare.of(heads), atomic, others)

    @property
    def finite_population_correction(self) -> Array:
        """√(1 − n/N): (J,), or (R, J) where a stream was cut short and samples differ in length."""
        factor = np.sqrt(1 - self.counts / self.pool)
        return np.asarray(factor[0] if (factor == factor[0]).all() else factor)


def layer_curves(collector: Collector, floats_at_once: int = FLOATS_AT_ONCE) -> LayerCurves:
    """Merge the cells of a layer and measure its errors, on a CPU mostly one key/value head at a time."""
    assignment = collector.assignment
    shared, rows = collector.query.shape[:2]
    floats = floats_at_once * (1 if collector.query.device.type == "cpu" else DEVICE_TIMES)
    at_once = max(1, floats // (assignment.replicates * rows * collector.value.shape[-1]))
    parts = [_some_heads(collector, slice(start, start + at_once), floats) for start in range(0, shared, at_once)]
    references, views, others = zip(*parts, strict=True)
    bare, *atomic = map(SampleErrors.joined, zip(*views, strict=True))
    together = dict(zip((*MOMENTS, "hardmax"), map(Squares.joined, zip(*others, strict=True)), strict=True))
    counts, reference = assignment.filled.cumsum(1), State.joined(references)
    return LayerCurves(counts, assignment.seen, reference, bare, atomic[0] if atomic else None, together)


def _some_heads(collector: Collector, heads: slice, floats: int) -> tuple[State, list[SampleErrors], list[Squares]]:
    """Measure h key/value heads: reference (h, G · m), errors without and with the atom, errors of the moments."""
    assignment, atom = collector.assignment, collector.layer.atom
    counts = assignment.filled.cumsum(1)
    (*steps, left_over), peaks = zip(*_steps(collector, heads), strict=True)
    reference = State.joined([*(step.union()[None] for step in steps), left_over]).union()
    with_atom = None
    if atom is not None:
        # One count for all replicates, unless the stream was cut short.
        distinct = counts.T[:, :1] if (counts == counts[0]).all() else counts.T
        shares = to_device(distinct.flatten() / assignment.seen, reference.lse.device)
        limits = reference.thinned(shares).merge(atom[heads]).tensors()
        shaped = {name: part.reshape(*distinct.shape, *part.shape[1:]) for name, part in limits.items()}
        with_atom = atom[heads], State.of(shaped)
    moments = OutputMoments(reference.output, collector.layer.clusters, *counts.shape)
    views = _views(collector, steps, reference.output, with_atom, moments, floats)
    return reference, views, [*moments.squares(), hardmax_errors(collector.layer, peaks)]


def _steps(collector: Collector, heads: slice) -> list[tuple[State, Peak]]:
    """States (R, h, G · m) and peaks (R, h, G · q) of the cells of each step; of the tokens of no cell (·, h, ·) last.

    Of a step the first replicates, or all, are kept and attended to here; the others are streamed.
    """
    assignment = collector.assignment
    kept = assignment.kept.T
    start, filled = assignment.start.T[kept], assignment.filled.T[kept]
    states, peaks = collector.attend(np.stack((start, start + filled), 1), heads)
    streamed_states, streamed_peaks = collector.states[:, heads], collector.peaks[:, heads]
    steps: list[tuple[State, Peak]] = []
    first = 0
    for j, count in enumerate(kept.sum(1).tolist()):
        state, peak = states[first : first + count], peaks[first : first + count]
        if count < assignment.replicates:
            begin = int(assignment.number[count, j])
            cells = slice(begin, begin + assignment.replicates - count)
            state = State.joined([state, streamed_states[cells]])
            peak = Peak.joined([peak, streamed_peaks[cells]])
        steps.append((state, peak))
        first += count
    left_over = slice(assignment.states - LEFT_OVER, assignment.states)
    return [*steps, (streamed_states[left_over], streamed_peaks[left_over])]


def _views(
    collector: Collector, steps: Sequence[State], reference: Tensor, with_atom: tuple[State, State] | None,
    moments: OutputMoments, floats: int,
) -> list[SampleErrors]:  # fmt: skip
    """Errors of nested samples, merged from their steps (R, h, G · m), against the reference (h, G · m, v).

    `with_atom` is an atom (h, G · m) and the limits (J, R, h, G · m) of every size and replicate with it; R is 1
    where all replicates have one limit. `moments` collects the differences without the atom. A few replicates are
    merged at a time, so that their states stay in cache, or all of several sizes. Outputs are merged as differences D
    from the reference Γ, in single precision, which loses nothing of the errors. An atom of value v that weighs t in a
    sample and u in its limit makes them D(1 − t) + (v − Γ)(t − u).
    """
    m, clusters = collector.layer.query.shape[2], collector.layer.clusters
    replicates, *own = steps[0].output.shape
    member = members(clusters, steps[0].lse.device)
    member = member * (member.shape[1] / m)

    def squares(vectors: Tensor) -> Tensor:
        """Squared norms of vectors (..., h, G · m, v), as (..., h · G, m)."""
        found: Tensor = torch.linalg.vecdot(vectors, vectors)
        return found.reshape(*vectors.shape[:-3], -1, m)

    def about(step: State) -> State:
        return State(step.count, step.lse, (step.output - reference).float())

    groups, at_once = own[0] * own[1] // m, max(1, floats // math.prod(own))
    compared = [reference[None, None]]
    if with_atom is not None:
        atom, limit = with_atom
        away, share = (atom.output - reference).float(), torch.exp(atom.lse - limit.lse)
        compared.append(limit.output)
    errors = member.new_empty(len(compared), groups, member.shape[1], replicates, len(steps))
    several = max(1, at_once // replicates)
    for start in range(0, replicates, at_once):
        part = slice(start, start + at_once)
        samples = accumulate((about(step[part]) for step in steps), State.merge)
        for first in range(0, len(steps), several):
            sizes = slice(first, first + several)
            sample = State.joined([one[None] for one in islice(samples, several)])  # (sizes, replicates, h, G · m)
            differences = [sample.output]
            moments.add(part, sizes, sample.output)
            if with_atom is not None:
                here = torch.exp(atom.lse - torch.logaddexp(sample.lse, atom.lse))
                moved = here - (share[sizes, part] if share.shape[1] > 1 else share[sizes])
                rest = (1 - here).float()[..., None] * sample.output
                differences.append(rest.addcmul_(away, moved.float()[..., None]))
            for view, difference in enumerate(differences):
                errors[view, :, :, part, sizes] = (squares(difference).double() @ member).permute(2, 3, 1, 0)
    found = []
    for limits, error in zip(compared, errors, strict=True):
        heads = limits.reshape(*limits.shape[:-2], -1, m, own[-1])
        centred = (heads - heads.mean(-2, keepdim=True)).flatten(-3, -2)
        scales = (squares(vectors).mean(-1).sqrt().mean(1).T for vectors in (limits, centred))
        output = (squares(limits) @ member).mean(1).permute(1, 2, 0)  # (h · G, C, J)
        mean = output.mean(1, keepdim=True)
        parts = (torch.where(mean > 0, output / mean, 1.0), *scales)
        found.append(SampleErrors(*to_numpy(error, *(part.expand(*part.shape[:-1], len(steps)) for part in parts))))
    return found
