"""The geometry of a layer's heads: horizons, coupling, tilts, and whether its tokens are sub-Gaussian."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from limitlens.diagnose.collect import Collector
from limitlens.diagnose.pilot import Traits
from limitlens.errors import Array
from limitlens.theory.reach import Reach, horizon_from_covariances, mean_tilt, reach_per_head
from limitlens.theory.tails import TailReport, check_tails

PRINCIPAL_AXES = 128  # of a layer's tokens along which their tails are judged
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
    shared, groups, _, dim = layer.query.shape
    cov_q, mean_q = collector.moments["query"].covariance, collector.moments["query"].mean
    cov_k = collector.moments["key"].covariance.repeat(groups, axis=0)
    query = layer.query.flatten(0, 1).double().cpu().numpy()
    spread = (query @ cov_k * query).sum(-1).mean(-1)
    heads = range(shared * groups)
    hidden = collector.moments["hidden"].spectrum() if "hidden" in collector.moments else None
    reaches = None if hidden is None else _reaches(traits, hidden, shared, groups, dim)
    tails, tokens = _tails(collector, None if hidden is None else hidden[1][0])
    return LayerGeometry(
        horizon=np.array([horizon_from_covariances(cov_q[h], cov_k[h], traits.scale) for h in heads]),
        mean_tilt=np.array([mean_tilt(cov_k[h], mean_q[h], traits.scale) for h in heads]),
        score_std=np.sqrt(spread),
        one_sided=None if reaches is None else np.array([reach.horizon_one_sided for reach in reaches]),
        coupling=None if reaches is None else np.array([reach.coupling for reach in reaches]),
        reason=traits.reason,
        tails=tails,
        tokens=tokens,
    )


def _reaches(traits: Traits, hidden: tuple[Array, Array], shared: int, groups: int, dim: int) -> list[Reach] | None:
    """The reach of every query head from the layer's projections, where there is a score matrix."""
    if traits.projections is None or traits.factor is None:
        return None
    values, axes = hidden[0][0], hidden[1][0]
    # The theory's A is Wkᵀ Wq/√k: whatever else multiplies the scores goes into Wq.
    Wq = traits.projections.query.double().cpu().numpy() * (traits.factor * traits.scale * np.sqrt(dim))
    Wk = traits.projections.key.double().cpu().numpy()
    return reach_per_head(
        (axes * values) @ axes.T,
        list(Wq.reshape(shared * groups, dim, -1)),
        list(Wk.reshape(shared, dim, -1).repeat(groups, axis=0)),
    )


def _tails(collector: Collector, axes: Array | None) -> tuple[TailReport | None, str]:
    """The verdict on tokens of replicate 0 along the principal axes that a sample of this size can resolve."""
    deck = collector.deck
    slots = np.concatenate([s + np.arange(f) for s, f in zip(deck.start[0], deck.filled[0], strict=True)])
    if collector.hidden is None:
        sample, tokens = collector.key[slots].flatten(1), "keys"
    else:
        sample, tokens = collector.hidden[slots[slots < len(collector.hidden)]], "hidden states"
    if len(sample) < _FEWEST_TOKENS:
        return None, tokens
    rows = sample.double().cpu().numpy()
    if axes is None:
        axes = np.linalg.eigh(np.cov(rows.T))[1]
    leading = axes[:, -min(PRINCIPAL_AXES, max(1, len(rows) // _TOKENS_AN_AXIS)) :]
    return check_tails(rows @ leading), tokens
