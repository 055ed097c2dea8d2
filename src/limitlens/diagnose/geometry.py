"""The geometry of a layer's heads: horizons, coupling, tilts, and whether its tokens are sub-Gaussian."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from limitlens.diagnose.collect import Collector
from limitlens.diagnose.pilot import Traits
from limitlens.errors import Array
from limitlens.theory.reach import horizon_from_covariances, mean_tilt
from limitlens.theory.tails import TailReport, check_tails

PRINCIPAL_AXES = 64  # of a layer's tokens along which their tails are judged
_FEWEST_TOKENS = 100  # below this no tail is judged
_TOKENS_AN_AXIS = 16  # with fewer, whitening by the sample's own covariance would make any tail look light


@dataclass(frozen=True, eq=False)
class LayerGeometry:
    """What the second moments of a layer say, per query head.

    Attributes
    ----------
    horizon, mean_tilt, score_std : (heads,)
        Two-sided horizon H and tilt τ₀ of the mean query, over all pooled tokens; root mean square over the probe's
        queries of the standard deviation of their scores over the pool (before a softcap).
    one_sided, coupling : (heads,) or None
        ‖Σ^{1/2} A‖ and Ψ from the layer's input and projections, where they can be had.
    reason : str
        Why not, or what to keep in mind about them; empty when there is nothing to say.
    tails : TailReport or None
        Are the tokens sub-Gaussian along their leading principal axes; None with too few of them.
    tokens : str
        What was judged: "hidden states", or "keys" where the former cannot be had.
    """

    horizon: Array
    mean_tilt: Array
    score_std: Array
    one_sided: Array | None
    coupling: Array | None
    reason: str
    tails: TailReport | None
    tokens: str


def layer_geometry(collector: Collector) -> LayerGeometry:
    """Everything that second moments and a sample of tokens tell about a layer."""
    layer, traits = collector.layer, collector.layer.traits
    shared, groups, _, _ = layer.query.shape
    cov_q, mean_q = collector.moments["query"].covariance, collector.moments["query"].mean
    cov_k = collector.moments["key"].covariance.repeat_interleave(groups, 0)
    query = layer.query.flatten(0, 1).double()
    spread = (query @ cov_k * query).sum(-1).mean(-1)
    hidden = collector.moments["hidden"].spectrum() if "hidden" in collector.moments else None
    one_sided = None if hidden is None else _one_sided(traits, hidden[0][0], hidden[1][0], shared, groups)
    tails, tokens = _tails(collector, None if hidden is None else hidden[1][0])
    heads = [(np.asarray(q.cpu()), np.asarray(k.cpu())) for q, k in zip(cov_q, cov_k, strict=True)]
    return LayerGeometry(
        horizon=np.array([horizon_from_covariances(q, k, traits.scale) for q, k in heads]),
        mean_tilt=np.array(
            [mean_tilt(k, mean.cpu(), traits.scale) for (_, k), mean in zip(heads, mean_q, strict=True)]
        ),
        score_std=np.asarray(spread.sqrt().cpu()),
        one_sided=one_sided,
        coupling=None if hidden is None or one_sided is None else float(hidden[0].max()) * one_sided**2,
        reason=traits.reason,
        tails=tails,
        tokens=tokens,
    )


def _one_sided(traits: Traits, values: Tensor, axes: Tensor, shared: int, groups: int) -> Array | None:
    """‖Σ^{1/2} A‖ of every query head, where there is a score matrix A; Σ has eigenvalues (d,) and axes (d, d).

    It is the two-sided horizon of white queries: Cov(q) = Wq Wqᵀ in the place of Wq Σ Wqᵀ.
    """
    if traits.projections is None or traits.factor is None:
        return None
    Wq = traits.projections.query.double().reshape(shared * groups, -1, len(values))
    Wk = traits.projections.key.double().reshape(shared, -1, len(values))
    white = np.asarray((Wq @ Wq.mT).cpu())
    roots = Wk @ (axes * values.sqrt())
    cov_k = np.asarray((roots @ roots.mT).repeat_interleave(groups, 0).cpu())
    scale = traits.scale * traits.factor
    return np.array([horizon_from_covariances(q, k, scale) for q, k in zip(white, cov_k, strict=True)])


def _tails(collector: Collector, axes: Tensor | None) -> tuple[TailReport | None, str]:
    """The verdict on tokens of replicate 0 along the principal axes that a sample of this size can resolve."""
    deck = collector.deck
    slots = np.concatenate([s + np.arange(f) for s, f in zip(deck.start[0], deck.filled[0], strict=True)])
    if collector.hidden is None:
        sample, tokens = collector.key[slots].flatten(1), "keys"
    else:
        sample, tokens = collector.hidden[slots[slots < len(collector.hidden)]], "hidden states"
    if len(sample) < _FEWEST_TOKENS:
        return None, tokens
    rows = sample.double()
    if axes is None:
        axes = torch.linalg.eigh(torch.cov(rows.T))[1]
    leading = axes[:, -min(PRINCIPAL_AXES, max(1, len(rows) // _TOKENS_AN_AXIS)) :]
    return check_tails((rows @ leading).cpu().numpy()), tokens
