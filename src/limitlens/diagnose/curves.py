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
    """Merge the cells of a layer and measure its errors, one key/value head at a time."""
    deck = collector.deck
    counts = deck.filled.cumsum(1)
    references: list[State] = []
    views: dict[str, list[View]] = {"bare": [], "atomic": []}
    for head in range(collector.query.shape[0]):
        samples = list(accumulate((_step(collector, head, j) for j in range(counts.shape[1])), State.merge))
        left_over = [state[head] for state in collector.states[-LEFT_OVER:]]
        reference = merge_all([*(samples[-1][r] for r in range(deck.replicates)), *left_over])
        references.append(reference)
        views["bare"].append(_view(collector, samples, [reference] * len(samples), counts))
        if collector.layer.atom is not None:
            atom = collector.layer.atom[head]
            with_atom = [sample.merge(atom) for sample in samples]
            limits = [_shrunk(reference, counts[:, j] / deck.seen).merge(atom) for j in range(len(samples))]
            views["atomic"].append(_view(collector, with_atom, limits, counts))
    return LayerCurves(
        counts=counts,
        pool=deck.seen,
        reference=_stacked(references),
        bare=_joined(views["bare"]),
        atomic=_joined(views["atomic"]) if views["atomic"] else None,
    )


def _step(collector: Collector, head: int, j: int) -> State:
    """The states of step j of every replicate for the queries of one key/value head, (R, G · m)."""
    deck = collector.deck
    found: dict[int, State] = {
        int(r): collector.states[deck.number[r, j]][head] for r in np.flatnonzero(~deck.kept[:, j])
    }
    kept = np.flatnonzero(deck.kept[:, j])
    for length in np.unique(deck.filled[kept, j]):  # one length for all, unless the stream was cut short
        alike = kept[deck.filled[kept, j] == length]
        slots = torch.as_tensor(deck.start[alike, j][:, None] + np.arange(length), device=collector.key.device)
        key, value = collector.key[slots, head], collector.value[slots, head]
        states = state_of(collector.query[head], key, value, kernel=collector.layer.kernel)
        found |= {int(r): states[place] for place, r in enumerate(alike)}
    return _stacked([found[r] for r in range(deck.replicates)])


def _shrunk(reference: State, share: Array) -> State:
    """The pool as if it held a share of its tokens, one for each replicate: (R, G · m)."""
    shift = torch.as_tensor(np.log(share), device=reference.lse.device)[:, None]
    count = torch.as_tensor(np.rint(share * float(reference.count)), device=reference.count.device)
    return State(count, reference.lse + shift, reference.output)


def _view(collector: Collector, samples: list[State], limits: list[State], counts: NDArray[np.int64]) -> View:
    """Errors of samples (R, G · m) against limits that broadcast to them, one of each for every size."""
    groups, m = collector.layer.query.shape[1:3]

    def size(vectors: Tensor) -> Array:
        """Root mean square of norms over queries: (..., G, m, v) to (G, ...)."""
        return np.asarray(vectors.square().sum(-1).mean(-1).sqrt().movedim(-1, 0).cpu())

    errors: list[Array] = []
    scales: tuple[list[Array], list[Array]] = ([], [])
    for sample, limit in zip(samples, limits, strict=True):
        wrong = sample.output - limit.output
        errors.append(size(wrong.reshape(len(wrong), groups, m, -1)))
        output = limit.output.reshape(-1, groups, m, wrong.shape[-1])
        for book, vectors in zip(scales, (output, output - output.mean(-2, keepdim=True)), strict=True):
            book.append(size(vectors).mean(1))
    unseen = np.sqrt(1 - counts / collector.deck.seen)
    return View(np.stack(errors, -1) / unseen, np.stack(scales[0], -1), np.stack(scales[1], -1))


def _joined(views: list[View]) -> View:
    """The views of all key/value heads as one of all query heads."""
    names = ("errors", "scale", "centred_scale")
    return View(*(np.concatenate([getattr(view, name) for view in views]) for name in names))


def _stacked(states: list[State]) -> State:
    """States without detail along a new first axis."""
    return State(
        count=torch.stack([state.count for state in states]),
        lse=torch.stack([state.lse for state in states]),
        output=torch.stack([state.output for state in states]),
    )


def _ratio(errors: Array, scale: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(scale > 0, errors / scale, np.nan)
