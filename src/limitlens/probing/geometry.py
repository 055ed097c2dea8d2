"""Geometry of a layer's heads from second moments: horizons, coupling, tilts, and tails of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from limitlens.arrays import array_like, to_numpy
from limitlens.errors import Array
from limitlens.probing.collect import Collector
from limitlens.statistics.estimators import norm_by_squaring
from limitlens.statistics.tails import TailReport, tails_of

PRINCIPAL_AXES = 64  # principal axes of a layer's tokens along which their tails are tested, at most
_FEWEST_TOKENS = 100  # smallest number of tokens whose tails are tested
_TOKENS_AN_AXIS = (
    16  # tokens for each axis: with fewer, whitening by the sample's own covariance would make any tail look light
)


@dataclass(frozen=True, eq=False)
class LayerGeometry:
    """Geometry of a layer, by query head."""

    horizon: Array  # (heads,): two-sided horizon H over all pooled tokens
    mean_tilt: Array  # (heads,): tilt τ₀ of the mean query
    score_std: Array  # (heads,): standard deviation of scores over the pool, before a softcap; RMS over queries
    horizon_one_sided: Array | None  # (heads,): ‖Σ^{1/2} A‖ from the layer's input and projections, where known
    coupling: Array | None  # (heads,): Ψ, alike
    reason: str  # why they are not known, or a caveat; empty where there is nothing to say
    tails: TailReport | None  # tails of the tokens along their leading principal axes; None with too few of them
    tokens: str  # the tokens tested: "hidden states", or "keys" where hidden states are not known


def layer_geometry(whole: Collector, layers: Sequence[Collector]) -> list[LayerGeometry]:
    """Compute the geometry of layers; `whole` holds the heads of all of them (`Collector.joined`).

    The formulas are those of `limitlens.theory.spectrum`, for all heads at once: with Cov(k) = RRᵀ the horizon is
    scale · √λ_max(RᵀCov(q)R), the mean tilt scale · √(E qᵀ Cov(k) E q). The one-sided horizon ‖Σ^{1/2} A‖ is that of
    white queries: Cov(q) = Wq Wqᵀ in the place of Wq Σ Wqᵀ.
    """
    moments, (shared, groups, _, dim), count = whole.moments, whole.layer.query.shape, len(layers)
    mean_q, cov_k = moments["query"].mean.reshape(shared, groups, -1), moments["key"].covariance
    query = whole.query.double()
    spread = (query @ cov_k * query).sum(-1).reshape(shared * groups, -1).mean(-1)
    tilt = (mean_q @ cov_k * mean_q).sum(-1).flatten()
    pairs, largest, axes = [(cov_k, moments["query"].covariance)], tilt.new_zeros(count), [None] * count
    traits, weighed = [layer.layer.traits for layer in layers], []
    if "hidden" in moments:
        covariance = moments["hidden"].covariance
        values, axes = torch.linalg.eigh(covariance)
        largest = values[:, -1]
        for place, (own, spread_of) in enumerate(zip(traits, covariance, strict=True)):
            if own.projections is not None and own.factor is not None:
                W = (part.double() for part in (own.projections.query, own.projections.key))
                Wq, Wk = (part.reshape(-1, dim, part.shape[-1]) for part in W)
                pairs.append((Wk @ spread_of @ Wk.mT, Wq @ Wq.mT))
                weighed.append(place)
    reach = _reach(*(torch.cat(side) for side in zip(*pairs, strict=True)))
    found = to_numpy(reach, *(part.clamp_min(0).sqrt() for part in (tilt, spread)), largest)
    reaches, tilts, spreads = (part.reshape(-1, shared * groups // count) for part in found[:-1])
    white, told = dict(zip(weighed, reaches[count:], strict=True)), []
    for place, (layer, own, top) in enumerate(zip(layers, traits, found[-1], strict=True)):
        horizon, mean_tilt = (part[place] * abs(own.scale) for part in (reaches, tilts))
        one_sided = white[place] * abs(own.scale * (own.factor or 1.0)) if place in white else None
        coupling = None if one_sided is None else top * one_sided**2
        judged = _tails(layer, axes[place])
        told.append(LayerGeometry(horizon, mean_tilt, spreads[place], one_sided, coupling, own.reason, *judged))
    return told


def _reach(key: Tensor, query: Tensor) -> Tensor:
    """√λ_max(RᵀBR) of covariances of keys A = RRᵀ, (Hkv, d, d), and of the queries that share them, (heads, d, d)."""
    if key.device.type != "cpu":  # eigenproblems one by one leave a GPU idle: A B has the eigenvalues of RᵀBR
        return norm_by_squaring(key.repeat_interleave(len(query) // len(key), 0) @ query).sqrt()
    values, axes = torch.linalg.eigh(key)
    root = (axes * values.clamp_min(0).sqrt()[..., None, :]).repeat_interleave(len(query) // len(key), 0)
    found: Tensor = torch.linalg.eigvalsh(root.mT @ query @ root)
    return found[..., -1].clamp_min(0).sqrt()


def _tails(collector: Collector, axes: Tensor | None) -> tuple[TailReport | None, str]:
    """Test the tails of replicate 0 along the principal axes that a sample of its size can resolve."""
    slots, tokens, store = collector.assignment.slots_of(0), "keys", collector.key
    if collector.hidden is not None:
        tokens, store = "hidden states", collector.hidden
    slots = slots[slots < len(store)]
    if len(slots) < _FEWEST_TOKENS:
        return None, tokens
    rows = store.index_select(0, array_like(store, slots)).flatten(1).double()
    known = torch.linalg.eigh(torch.cov(rows.T))[1] if axes is None else axes
    leading = known[:, -min(PRINCIPAL_AXES, max(1, len(rows) // _TOKENS_AN_AXIS)) :]
    return tails_of(rows @ leading), tokens
