"""From the cells of a layer to error curves: merge cumulatively, compare with the merge of everything.

Two views of the same samples. The pooled law alone: Γ_n against Γ_N. And with the atom that every context contains (the
sink): its mass does not grow with n, so a sample of n tokens and the atom is compared with n tokens' worth of the pool,

    Γ̄_n = (e^a v_a + (n/N) Σ_pool e^s v) / (e^a + (n/N) Σ_pool e^s),

the limit of many samples of n. Errors are divided by √(1 − n/N), since samples are drawn from the pool without
replacement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.attention.kernels import state_of
from limitlens.attention.state import State, merge_all
from limitlens.diagnose.collect import Collector
from limitlens.diagnose.deck import LEFT_OVER
from limitlens.errors import Array


@dataclass(frozen=True, eq=False)
class View:
    """Output errors of every head of a layer.

    Attributes
    ----------
    errors : (heads, R, J)
        Root mean square over queries of |Γ_n − Γ|, finite pool corrected for.
    scale, centred_scale : (heads, J)
        Root mean squares over queries of |Γ| and of |Γ − mean Γ|.
    """

    errors: Array
    scale: Array
    centred_scale: Array

    @property
    def relative(self) -> Array:
        """Errors relative to the output, (heads, R, J)."""
        return _ratio(self.errors, self.scale[:, None])

    @property
    def relative_centred(self) -> Array:
        """Errors relative to how much the output differs between queries, (heads, R, J)."""
        return _ratio(self.errors, self.centred_scale[:, None])


@dataclass(frozen=True, eq=False)
class LayerCurves:
    """The measured curves of a layer.

    Attributes
    ----------
    counts : (R, J)
        Tokens in each sample: the sizes asked for, unless the stream was cut short.
    pool : int
        N, the tokens of the reference.
    reference : State
        Attention over the whole pool, (Hkv, G · m).
    bare : View
        Of the pooled law alone.
    atomic : View or None
        With the atom, where the layer has one.
    """

    counts: NDArray[np.int64]
    pool: int
    reference: State
    bare: View
    atomic: View | None


def layer_curves(collector: Collector) -> LayerCurves:
    """Merge the cells of a layer and measure its errors."""
    deck = collector.deck
    counts = deck.filled.cumsum(1)
    steps = [_step(collector, j) for j in range(counts.shape[1])]
    samples = [steps[0]]
    for step in steps[1:]:
        samples.append(samples[-1].merge(step))
    last = samples[-1]
    reference = merge_all([*(last[r] for r in range(len(counts))), *collector.states[-LEFT_OVER:]])
    atom = collector.layer.atom
    return LayerCurves(
        counts=counts,
        pool=deck.seen,
        reference=reference,
        bare=_view(collector, samples, [reference] * len(samples), counts),
        atomic=None
        if atom is None
        else _view(
            collector,
            [sample.merge(atom) for sample in samples],
            [_shrunk(reference, counts[:, j] / deck.seen).merge(atom) for j in range(len(samples))],
            counts,
        ),
    )


def _step(collector: Collector, j: int) -> State:
    """The states of step j of every replicate, (R, Hkv, G · m)."""
    deck, layer = collector.deck, collector.layer
    states = []
    for r in range(deck.replicates):
        if deck.kept[r, j]:
            part = slice(deck.start[r, j], deck.start[r, j] + deck.filled[r, j])
            key, value = collector.key[part].transpose(0, 1), collector.value[part].transpose(0, 1)
            states.append(state_of(collector.query, key, value, kernel=layer.kernel))
        else:
            states.append(collector.states[deck.number[r, j]])
    count, lse, output = (
        torch.stack([getattr(state, name) for state in states]) for name in ("count", "lse", "output")
    )
    return State(count, lse, output)


def _shrunk(reference: State, share: Array) -> State:
    """The pool as if it held a share of its tokens, one for each replicate: (R, Hkv, G · m)."""
    shift = torch.as_tensor(np.log(share), device=reference.lse.device)[:, None, None]
    count = torch.as_tensor(np.rint(share * float(reference.count[0])), device=reference.count.device)[:, None]
    return State(count, reference.lse + shift, reference.output)


def _view(collector: Collector, samples: list[State], limits: list[State], counts: NDArray[np.int64]) -> View:
    """Errors of samples (R, Hkv, G · m) against limits that broadcast to them, one of each for every size."""
    m = collector.layer.query.shape[2]

    def by_query(output: Tensor) -> Tensor:
        """(..., Hkv, G · m, v) to (..., heads, m, v)."""
        return output.reshape(*output.shape[:-3], -1, m, output.shape[-1])

    def size(vectors: Tensor) -> Array:
        """Root mean square of norms over queries: (..., heads, m, v) to (heads, ...)."""
        return np.asarray(vectors.square().sum(-1).mean(-1).sqrt().movedim(-1, 0).cpu())

    errors: list[Array] = []
    scales: tuple[list[Array], list[Array]] = ([], [])
    for sample, limit in zip(samples, limits, strict=True):
        errors.append(size(by_query(sample.output - limit.output)))
        output = by_query(limit.output)
        for book, vectors in zip(scales, (output, output - output.mean(-2, keepdim=True)), strict=True):
            book.append(size(vectors).reshape(errors[-1].shape[0], -1).mean(1))
    unseen = np.sqrt(1 - counts / collector.deck.seen)
    return View(np.stack(errors, -1) / unseen, np.stack(scales[0], -1), np.stack(scales[1], -1))


def _ratio(errors: Array, scale: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(scale > 0, errors / scale, np.nan)
