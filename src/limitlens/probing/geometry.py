"""The geometry of a layer's heads: horizons, coupling, tilts, and whether its tokens are sub-Gaussian."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from limitlens.errors import Array
from limitlens.probing.collect import Collector
from limitlens.probing.pilot import Traits
from limitlens.statistics.tails import TailReport, check_tails

PRINCIPAL_AXES = 64  # of a layer's tokens along which their tails are judged
_FEWEST_TOKENS = 100  # below this no tail is judged
_TOKENS_AN_AXIS = 16  # with fewer, whitening by the sample's own covariance would make any tail look light


@dataclass(frozen=True, eq=False)
class LayerGeometry:
    """What the second moments of a layer say, per query head."""

    # (heads,): two-sided horizon H and tilt τ₀ of the mean query, over all pooled tokens; root mean square over the
    # probe's queries of the standard deviation of their scores over the pool (before a softcap)
    horizon: Array
    mean_tilt: Array
    score_std: Array
    # (heads,) or None: ‖Σ^{1/2} A‖ and Ψ from the layer's input and projections, where they can be had
    horizon_one_sided: Array | None
    coupling: Array | None
    reason: str  # why not, or what to keep in mind about them; empty when there is nothing to say
    tails: TailReport | None  # of the tokens along their leading principal axes; None with too few of them
    tokens: str  # what was judged: "hidden states", or "keys" where the former cannot be had


def layer_geometry(collector: Collector) -> LayerGeometry:
    """Everything that second moments and a sample of tokens tell about a layer.

    The formulas are those of `limitlens.theory.spectrum`, for all heads at once: with Cov(q) = RRᵀ the horizon is
    scale · √λ_max(RᵀCov(k)R), the mean tilt scale · √(E qᵀ Cov(k) E q).
    """
    layer, traits = collector.layer, collector.layer.traits
    shared, groups, _, _ = layer.query.shape
    mean_q, cov_k = collector.moments["query"].mean, collector.moments["key"].covariance
    cov_k = cov_k.repeat_interleave(groups, 0)
    root_q = _root(*collector.moments["query"].spectrum())
    query = layer.query.flatten(0, 1).double()
    spread = (query @ cov_k * query).sum(-1).mean(-1)
    tilt = (mean_q[:, None] @ cov_k @ mean_q[:, :, None]).flatten().clamp_min(0).sqrt()
    hidden = collector.moments["hidden"].spectrum() if "hidden" in collector.moments else None
    one_sided = None if hidden is None else _one_sided(traits, _root(*hidden)[0], shared, groups)
    tails, tokens = _tails(collector, None if hidden is None else hidden[1][0])
    coupling = None if hidden is None or one_sided is None else float(hidden[0].max()) * one_sided**2
    return LayerGeometry(
        horizon=np.asarray(_reach(root_q, cov_k).cpu()) * abs(traits.scale),
        mean_tilt=np.asarray(tilt.cpu()) * abs(traits.scale),
        score_std=np.asarray(spread.sqrt().cpu()),
        horizon_one_sided=one_sided, coupling=coupling, reason=traits.reason, tails=tails, tokens=tokens,
    )  # fmt: skip


def _root(values: Tensor, axes: Tensor) -> Tensor:
    """R with RRᵀ the matrix of these eigenvalues (..., d) and axes (..., d, d)."""
    return axes * values.sqrt()[..., None, :]


def _reach(root: Tensor, covariance: Tensor) -> Tensor:
    """√λ_max(RᵀCR) for each head: (heads,)."""
    values: Tensor = torch.linalg.eigvalsh(root.mT @ covariance @ root)
    return values[..., -1].clamp_min(0).sqrt()


def _one_sided(traits: Traits, root: Tensor, shared: int, groups: int) -> Array | None:
    """‖Σ^{1/2} A‖ of every query head, where there is a score matrix A; `root` (d, d) is that of Σ.

    It is the two-sided horizon of white queries: Cov(q) = Wq Wqᵀ in the place of Wq Σ Wqᵀ.
    """
    if traits.projections is None or traits.factor is None:
        return None
    Wq = traits.projections.query.double().reshape(shared * groups, -1, len(root))
    keys = traits.projections.key.double().reshape(shared, -1, len(root)) @ root
    values, axes = torch.linalg.eigh(keys @ keys.mT)
    root_k = _root(values.clamp_min(0), axes).repeat_interleave(groups, 0)
    return np.asarray(_reach(root_k, Wq @ Wq.mT).cpu()) * abs(traits.scale * traits.factor)


def _tails(collector: Collector, axes: Tensor | None) -> tuple[TailReport | None, str]:
    """The verdict on tokens of replicate 0 along the principal axes that a sample of this size can resolve."""
    slots = collector.deck.slots_of(0)
    if collector.hidden is None:
        sample, tokens = collector.key[slots].flatten(1), "keys"
    else:
        sample, tokens = collector.hidden[slots[slots < len(collector.hidden)]], "hidden states"
    if len(sample) < _FEWEST_TOKENS:
        return None, tokens
    rows = sample.double()
    known = torch.linalg.eigh(torch.cov(rows.T))[1] if axes is None else axes
    leading = known[:, -min(PRINCIPAL_AXES, max(1, len(rows) // _TOKENS_AN_AXIS)) :]
    return check_tails((rows @ leading).cpu().numpy()), tokens
