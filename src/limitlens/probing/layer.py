"""From the cells of a layer to error curves: merge cumulatively, compare with the merge of everything.

Two views of the same samples. The pooled law alone: Γ_n against Γ_N. And with the atom that every context contains (the
sink): its mass does not grow with n, so a sample of n tokens and the atom is compared with n tokens' worth of the pool,

    Γ̄_n = (e^a v_a + (n/N) Σ_pool e^s v) / (e^a + (n/N) Σ_pool e^s),

the limit of many samples of n. Errors are divided by √(1 − n/N), since samples are drawn from the pool without
replacement.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.attention.kernels import state_of
from limitlens.attention.state import Peak, State, merge_all
from limitlens.curves.error_curve import ErrorCurve
from limitlens.errors import Array
from limitlens.probing.collect import Collector
from limitlens.probing.moment_errors import MOMENTS, OutputMoments, Squares
from limitlens.probing.peaks import hardmax_errors, peak_over
from limitlens.sampling.placement import LEFT_OVER

FLOATS_AT_ONCE = 1 << 17  # numbers in the outputs that are merged at a time: 1 MiB
DEVICE_TIMES = 256  # as many on a GPU


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

    @property
    def unseen(self) -> Array:
        """√(1 − n/N), (J,), or (R, J) where a stream was cut short and samples differ in length."""
        factor = np.sqrt(1 - self.counts / self.pool)
        return np.asarray(factor[0] if (factor == factor[0]).all() else factor)


def layer_curves(collector: Collector) -> LayerCurves:
    """Merge the cells of a layer and measure its errors, one key/value head at a time."""
    deck, atom = collector.deck, collector.layer.atom
    counts = deck.filled.cumsum(1)
    references: list[State] = []
    others: list[tuple[Squares, ...]] = []
    views: dict[str, list[SampleErrors]] = {"bare": [], "atomic": []}
    for head in range(collector.query.shape[0]):
        found = [_step(collector, head, j) for j in range(counts.shape[1])]
        steps, peaks = [state for state, _ in found], [peak for _, peak in found]
        reference = merge_all([*map(State.union, steps), *(state[head] for state in collector.states[-LEFT_OVER:])])
        references.append(reference)
        seen: list[tuple[State | None, list[State]]] = [(None, [reference[None]] * len(steps))]
        if atom is not None:
            device = reference.lse.device
            # One count for all replicates, unless the stream was cut short.
            distinct = (column[:1] if (column == column[0]).all() else column for column in counts.T)
            shares = [torch.as_tensor(column / deck.seen, device=device) for column in distinct]
            seen.append((atom[head], [reference.thinned(share).merge(atom[head]) for share in shares]))
        own = OutputMoments(reference.output, collector.layer.clusters, *counts.shape)
        for name, view in zip(views, _views(collector, steps, seen, own), strict=False):
            views[name].append(view)
        left_over = [peak[head] for peak in collector.peaks[-LEFT_OVER:]]
        others.append((*own.squares(), hardmax_errors(collector.layer, peaks, left_over)))
    joined = {name: SampleErrors.joined(parts) for name, parts in views.items() if parts}
    parts_of = zip((*MOMENTS, "hardmax"), zip(*others, strict=True), strict=True)
    together = {name: Squares.joined(parts) for name, parts in parts_of}
    return LayerCurves(counts, deck.seen, State.stack(references), joined["bare"], joined.get("atomic"), together)


def _step(collector: Collector, head: int, j: int) -> tuple[State, Peak]:
    """States (R, G · m) and peaks (R, G · q) of step j of every replicate, for one key/value head."""
    deck, query = collector.deck, collector.detail_query[head]
    kept, streamed = np.flatnonzero(deck.kept[:, j]), np.flatnonzero(~deck.kept[:, j])
    numbers = {int(r): deck.number[r, j] for r in streamed}
    found = {r: (collector.states[number][head], collector.peaks[number][head]) for r, number in numbers.items()}
    for length in np.unique(deck.filled[kept, j]):  # one length for all, unless the stream was cut short
        alike = kept[deck.filled[kept, j] == length]
        slots = torch.as_tensor(deck.start[alike, j][:, None] + np.arange(length), device=query.device)
        key, value = (rows.reshape(*slots.shape, rows.shape[-1]) for rows in collector.kept(slots.flatten(), head))
        states = state_of(collector.query[head], key, value, kernel=collector.layer.kernel)
        peaks = peak_over(query, key, value, collector.layer.traits.softcap)
        if len(alike) == deck.replicates:
            return states, peaks
        found |= {int(r): (states[place], peaks[place]) for place, r in enumerate(alike)}
    both = [found[r] for r in range(deck.replicates)]
    return State.stack([state for state, _ in both]), Peak.stack([peak for _, peak in both])


def _views(
    collector: Collector, steps: list[State], seen: list[tuple[State | None, list[State]]], moments: OutputMoments
) -> list[SampleErrors]:
    """Errors of nested samples, merged from their steps (R, G · m), in each way to look at them.

    A way is an atom that every sample contains, or None, and for every size the limit, (R, G · m) or (1, G · m);
    `moments` takes in what there is without one. A few replicates are merged at a time: their states stay in cache.
    """
    groups, m = collector.layer.query.shape[1:3]
    replicates, sizes, width = len(steps[0].lse), len(steps), steps[0].output.shape[-1]
    cluster = torch.nn.functional.one_hot(torch.as_tensor(collector.layer.clusters, device=steps[0].lse.device))
    member = cluster.double() * cluster.shape[1] / m  # (m, C)

    def squares(vectors: Tensor) -> Tensor:
        """Squared norms, (r, G · m, v) to (r, G, m)."""
        found: Tensor = torch.linalg.vecdot(vectors, vectors)
        return found.reshape(len(vectors), groups, m)

    errors = np.empty((len(seen), groups, member.shape[1], replicates, sizes))
    floats = FLOATS_AT_ONCE * (1 if steps[0].lse.device.type == "cpu" else DEVICE_TIMES)
    at_once = max(1, floats // (groups * m * width))
    for start in range(0, replicates, at_once):
        part = slice(start, start + at_once)
        samples = accumulate((step[part] for step in steps), State.merge)
        for j, sample in enumerate(samples):
            for way, (atom, limits) in enumerate(seen):
                limit = limits[j].output if len(limits[j].output) == 1 else limits[j].output[part]
                difference = (sample if atom is None else sample.merge(atom)).output - limit
                errors[way, :, :, part, j] = (squares(difference) @ member).permute(1, 2, 0).cpu()
                if atom is None:
                    moments.add(part, j, difference)
    found = []
    for way, (_, limits) in enumerate(seen):
        scale, centred = np.empty((2, groups, sizes))
        outputs = np.ones((groups, member.shape[1], sizes))
        for j, limit_state in enumerate(limits):
            output = limit_state.output
            middle = output.reshape(-1, groups, m, width).mean(-2, keepdim=True).expand(-1, -1, m, -1)
            both = (output, output - middle.reshape(output.shape))
            scale[:, j], centred[:, j] = (squares(vectors).mean(-1).sqrt().mean(0).cpu() for vectors in both)
            own = (squares(output) @ member).mean(0).cpu().numpy()  # (G, C)
            mean = own.mean(1, keepdims=True)
            np.divide(own, mean, out=outputs[:, :, j], where=mean > 0)
        found.append(SampleErrors(errors[way], outputs, scale, centred))
    return found
