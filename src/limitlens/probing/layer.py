"""Errors of the heads of a layer: attention over nested samples of n tokens against attention over all N tokens read.

An attention sink (score a, value v_a), which every context contains once, keeps its mass as n grows. A sample with the
sink is therefore compared with all N tokens weighted as n tokens,

    Γ̄_n = (e^a v_a + (n/N) Σ e^s v) / (e^a + (n/N) Σ e^s),

which has the expected numerator and denominator of a sample. Error curves are divided by √(1 − n/N), since samples are
drawn without replacement.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.arrays import to_device, to_numpy
from limitlens.attention.kernels import attend_jobs
from limitlens.attention.state import Peak, State
from limitlens.errors import Array
from limitlens.probing.collect import Collector
from limitlens.probing.pilot import Layer
from limitlens.sampling.assignment import LEFT_OVER
from limitlens.statistics.error_curve import ErrorCurve
from limitlens.statistics.estimators import ClusteredMoments, members

FLOATS_AT_ONCE = 1 << 18  # numbers in the outputs that are merged at a time, few enough to stay in cache: 1 MiB
DEVICE_TIMES = 128  # factor on FLOATS_AT_ONCE on a GPU, where a launch takes as long for few numbers as for many
MIN_SNR = 4.0  # fits of moment curves leave out errors smaller than this many of their standard errors


class Squares(NamedTuple):
    """Squared errors of every head of a layer against attention over all tokens read.

    C is the number of groups of queries (by window of text), R of replicates, J of sample sizes.
    """

    squares: Array  # (heads, C, R, J): weighted so that the mean over C groups is the mean over all queries
    outputs: Array  # (heads, C, J): squared norm of the limit in each group, relative to its mean over all queries
    scale: Array  # (heads, J): root mean square norm of the limit, by which errors are divided


@dataclass(frozen=True, eq=False)
class LayerCurves:
    """Measured errors of all heads of a layer, for R replicates and J sizes, and attention over all tokens read."""

    counts: NDArray[np.int64]  # (R, J): tokens in each sample: the sizes asked for, unless the run was interrupted
    pool: int  # N, number of tokens read
    reference: State  # attention over all tokens read, (Hkv, G · m)
    # Errors of: "output", without sink; "atomic", with it; "mean" and "covariance" of outputs over queries; "hardmax".
    kinds: dict[str, Squares]

    def of(self, heads: slice, shared: slice) -> Self:
        """Errors of the query heads `heads` only; `shared` are the key/value heads that these query heads read."""
        kinds = {name: Squares(*(array[heads] for array in part)) for name, part in self.kinds.items()}
        return replace(self, reference=self.reference[shared], kinds=kinds)

    def curve(self, kind: str, head: int, sizes: Array, **known: Any) -> ErrorCurve:
        """Curve of the relative errors of one head, NaN where the limit is 0; `known` are fields of `ErrorCurve`."""
        squares, outputs, scale = (array[head] for array in self.kinds[kind])
        with np.errstate(divide="ignore", invalid="ignore"):
            moments = np.where(scale > 0, squares / scale**2, np.nan)
        return ErrorCurve(tuple(map(int, sizes)), moments, outputs, **known)

    @property
    def finite_population_correction(self) -> Array:
        """Factor √(1 − n/N) on errors if n of N tokens are drawn without replacement: (J,), or (R, J) if n varies."""
        factor = np.sqrt(1 - self.counts / self.pool)
        return np.asarray(factor[0] if (factor == factor[0]).all() else factor)


def layer_curves(collector: Collector, floats_at_once: int = FLOATS_AT_ONCE) -> LayerCurves:
    """Measure the errors of a layer's heads, with about `floats_at_once` numbers of their outputs at a time."""
    assignment = collector.assignment
    shared, rows = collector.queries.query.shape[:2]
    floats = floats_at_once * (1 if collector.key.device.type == "cpu" else DEVICE_TIMES)
    at_once = max(1, floats // (assignment.replicates * rows * collector.value.shape[-1]))
    parts = [_some_heads(collector, slice(start, start + at_once), floats) for start in range(0, shared, at_once)]
    references, found = zip(*parts, strict=True)
    by_kind = {name: zip(*(part[name] for part in found), strict=True) for name in found[0]}
    kinds = {name: Squares(*map(np.concatenate, arrays)) for name, arrays in by_kind.items()}
    return LayerCurves(assignment.filled.cumsum(1), assignment.seen, State.joined(references), kinds)


def _some_heads(collector: Collector, heads: slice, floats: int) -> tuple[State, dict[str, Squares]]:
    """Attention over all tokens read, (h, G · m), and squared errors by kind, of the h key/value heads `heads`."""
    assignment, atom = collector.assignment, collector.layer.atom
    counts = assignment.filled.cumsum(1)
    (*steps, left_over), peaks = zip(*_steps(collector, heads), strict=True)
    reference = State.joined([*(step.union()[None] for step in steps), left_over]).union()
    with_atom = None
    if atom is not None:
        # All replicates have the same counts, unless the run was interrupted.
        distinct = counts.T[:, :1] if (counts == counts[0]).all() else counts.T
        shares = to_device(distinct.flatten() / assignment.seen, reference.lse.device)
        limits = reference.thinned(shares).merge(atom[heads]).tensors()
        shaped = {name: part.reshape(*distinct.shape, *part.shape[1:]) for name, part in limits.items()}
        with_atom = atom[heads], State(**shaped)
    moments = ClusteredMoments(reference.output, collector.layer.clusters, *counts.shape)
    outputs = _output_errors(collector, steps, reference.output, with_atom, moments, floats)
    of_moments = {name: Squares(*parts) for name, parts in moments.squares().items()}
    return reference, outputs | of_moments | {"hardmax": hardmax_errors(collector.layer, peaks)}


def _steps(collector: Collector, heads: slice) -> list[tuple[State, Peak]]:
    """Attention (R, h, G · m) and largest scores (R, h, G · q) over the tokens by which R samples grow to each size.

    The last entry is of tokens in no sample. If tokens were not stored, their attention was computed as they were read.
    """
    assignment = collector.assignment
    kept = assignment.kept.T
    start, filled = assignment.start.T[kept], assignment.filled.T[kept]
    jobs = np.stack((start, start + filled), 1)
    states, peaks = attend_jobs(collector.queries, collector.key, collector.value, jobs, heads=heads)
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


def _output_errors(
    collector: Collector, steps: Sequence[State], reference: Tensor, with_atom: tuple[State, State] | None,
    moments: ClusteredMoments, floats: int,
) -> dict[str, Squares]:  # fmt: skip
    """Squared output errors of nested samples without the sink ("output") and, if there is one, with it ("atomic").

    `steps` are attention (R, h, G · m) over the tokens by which samples grow to each size. `reference` Γ (h, G · m, v)
    is the output over all tokens. `with_atom` is attention to the sink and the limits (J, R or 1, h, G · m) with it.
    `moments` is updated with the differences D = Γ_n − Γ. With a sink of value v, whose softmax weight is t in a sample
    and u in the limit, the difference is D(1 − t) + (v − Γ)(t − u).
    """
    replicates, *own = steps[0].output.shape
    member = members(collector.layer.clusters, steps[0].lse.device)
    at_once = max(1, floats // math.prod(own))
    limits = [reference[None, None]]
    if with_atom is not None:
        atom, limit = with_atom
        away, share = (atom.output - reference).float(), torch.exp(atom.lse - limit.lse)
        limits.append(limit.output)
    heads = own[0] * own[1] // len(member)
    errors = member.new_empty(len(limits), heads, member.shape[1], replicates, len(steps))
    several = max(1, at_once // replicates)
    for start in range(0, replicates, at_once):
        part = slice(start, start + at_once)
        about = (State(step.count, step.lse, (step.output - reference).float()) for step in (s[part] for s in steps))
        samples = accumulate(about, State.merge)
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
            for kind, difference in enumerate(differences):
                errors[kind, :, :, part, sizes] = _cluster_squares(difference, member).permute(2, 3, 1, 0)
    outputs = [_cluster_squares(limit, member).mean(1).permute(1, 2, 0) for limit in limits]  # (heads, C, J)
    return {
        name: _relative(error, output.expand(-1, -1, len(steps)))
        for name, error, output in zip(("output", "atomic"), errors, outputs, strict=False)
    }


def _cluster_squares(vectors: Tensor, member: Tensor) -> Tensor:
    """Squared norms of vectors (..., h, G · m, v), summed in each of C query groups, times C/m: (..., h · G, C)."""
    squares: Tensor = torch.linalg.vecdot(vectors, vectors)
    m, clusters = member.shape
    return squares.double().reshape(*vectors.shape[:-3], -1, m) @ (member * (clusters / m))


def _relative(errors: Tensor, outputs: Tensor) -> Squares:
    """`Squares` from squared errors (heads, C, R, J) and squared norms `outputs` (heads, C, J) of the limit."""
    mean = outputs.mean(1, keepdim=True)
    return Squares(*to_numpy(errors, torch.where(mean > 0, outputs / mean, 1.0), mean[:, 0].sqrt()))


def hardmax_errors(layer: Layer, peaks: Sequence[Peak]) -> Squares:
    """Squared errors of hardmax (the value at the largest score) over nested samples, against hardmax over all tokens.

    `peaks` are largest scores over the tokens by which samples grow, (R, h, G · q), and last over tokens in no sample.
    """
    best = Peak.joined(peaks).union().value
    _, clusters = np.unique(layer.detail_clusters, return_inverse=True)
    member = members(clusters, best.device)
    samples = accumulate(peaks[:-1], Peak.merge)
    squares = torch.stack([_cluster_squares(peak.value - best, member) for peak in samples], -1)  # (R, heads, C, J)
    return _relative(squares.permute(1, 2, 0, 3), _cluster_squares(best, member)[..., None].expand(*squares.shape[1:]))
