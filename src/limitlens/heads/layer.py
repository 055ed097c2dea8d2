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
from limitlens.errors import Array
from limitlens.heads.collect import Collector
from limitlens.sampling.placement import LEFT_OVER

FLOATS_AT_ONCE = 1 << 17  # numbers in the outputs that are merged at a time: 1 MiB


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
    deck, atom = collector.deck, collector.layer.atom
    counts = deck.filled.cumsum(1)
    references: list[State] = []
    views: dict[str, list[View]] = {"bare": [], "atomic": []}
    keys, values = (tokens.transpose(0, 1).contiguous() for tokens in (collector.key, collector.value))
    for head in range(collector.query.shape[0]):
        steps = [_step(collector, head, j, keys[head], values[head]) for j in range(counts.shape[1])]
        left_over = [state[head] for state in collector.states[-LEFT_OVER:]]
        reference = merge_all([*map(_union, steps), *left_over])
        references.append(reference)
        seen: list[tuple[State | None, list[State]]] = [(None, [reference[None]] * len(steps))]
        if atom is not None:
            shares = [_distinct(counts[:, j]) / deck.seen for j in range(len(steps))]
            seen.append((atom[head], [_shrunk(reference, share).merge(atom[head]) for share in shares]))
        for name, view in zip(views, _views(collector, steps, seen, counts), strict=False):
            views[name].append(view)
    return LayerCurves(
        counts=counts,
        pool=deck.seen,
        reference=_stacked(references),
        bare=_joined(views["bare"]),
        atomic=_joined(views["atomic"]) if views["atomic"] else None,
    )


def _step(collector: Collector, head: int, j: int, keys: Tensor, values: Tensor) -> State:
    """The states of step j of every replicate for the queries of one key/value head, (R, G · m).

    Keys and values are those that this head kept, (slots, ·).
    """
    deck = collector.deck
    found: dict[int, State] = {
        int(r): collector.states[deck.number[r, j]][head] for r in np.flatnonzero(~deck.kept[:, j])
    }
    kept = np.flatnonzero(deck.kept[:, j])
    for length in np.unique(deck.filled[kept, j]):  # one length for all, unless the stream was cut short
        alike = kept[deck.filled[kept, j] == length]
        slots = torch.as_tensor(deck.start[alike, j][:, None] + np.arange(length), device=keys.device)
        states = state_of(collector.query[head], keys[slots], values[slots], kernel=collector.layer.kernel)
        found |= {int(r): states[place] for place, r in enumerate(alike)}
    return _stacked([found[r] for r in range(deck.replicates)])


def _union(states: State) -> State:
    """States (R, G · m) of disjoint sets, not all of them empty, merged into one (G · m)."""
    shares = torch.softmax(states.lse, 0)
    return State(states.count.sum(0), states.lse.logsumexp(0), torch.einsum("rm,rmv->mv", shares, states.output))


def _distinct(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The counts of all replicates (R,), or the one they have in common (1,), unless the stream was cut short."""
    return counts[:1] if (counts == counts[0]).all() else counts


def _shrunk(reference: State, share: Array) -> State:
    """The pool as if it held each of these shares of its tokens: (shares, G · m)."""
    shift = torch.as_tensor(np.log(share), device=reference.lse.device)[:, None]
    count = torch.as_tensor(np.rint(share * float(reference.count)), device=reference.count.device)
    return State(count, reference.lse + shift, reference.output)


def _views(
    collector: Collector,
    steps: list[State],
    seen: list[tuple[State | None, list[State]]],
    counts: NDArray[np.int64],
) -> list[View]:
    """Errors of nested samples, merged from their steps (R, G · m), in each way to look at them.

    A way is an atom that every sample contains, or None, and for every size the limit, (R, G · m) or (1, G · m). A few
    replicates are merged at a time: their states stay in cache.
    """
    groups, m = collector.layer.query.shape[1:3]
    replicates, sizes, width = len(counts), len(steps), steps[0].output.shape[-1]

    def size(vectors: Tensor) -> Array:
        """Root mean square of norms over queries: (r, G · m, v) to (G, r)."""
        split = vectors.reshape(len(vectors), groups, m, width)
        return np.asarray((torch.linalg.vector_norm(split, dim=(-2, -1)) / m**0.5).T.cpu())

    errors = np.empty((len(seen), groups, replicates, sizes))
    at_once = max(1, FLOATS_AT_ONCE // (groups * m * width))
    for start in range(0, replicates, at_once):
        part = slice(start, start + at_once)
        samples = accumulate((step[part] for step in steps), State.merge)
        for j, sample in enumerate(samples):
            for way, (atom, limits) in enumerate(seen):
                limit = limits[j].output if len(limits[j].output) == 1 else limits[j].output[part]
                output = sample.output if atom is None else sample.merge(atom).output
                errors[way, :, part, j] = size(output - limit)
    unseen = np.sqrt(1 - counts / collector.deck.seen)
    found = []
    for way, (_, limits) in enumerate(seen):
        scale, centred = np.empty((2, groups, sizes))
        for j, limit_state in enumerate(limits):
            output = limit_state.output
            middle = output.reshape(-1, groups, m, width).mean(-2, keepdim=True).expand(-1, -1, m, -1)
            scale[:, j] = size(output).mean(1)
            centred[:, j] = size(output - middle.reshape(output.shape)).mean(1)
        found.append(View(errors[way] / unseen, scale, centred))
    return found


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
