"""One head's record: everything the probe has to say about it, as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from limitlens.budgets.budget import budget_for
from limitlens.curves.fit import fit_rate, typical, typical_stderr
from limitlens.errors import Array
from limitlens.heads.diagnostics import LayerDetail
from limitlens.heads.geometry import LayerGeometry
from limitlens.heads.layer import LayerCurves, View
from limitlens.heads.pilot import Layer
from limitlens.heads.regimes import Regime, Thresholds, classify
from limitlens.heads.sinks import dilution_length, sink_share
from limitlens.theory import rates

ERRORS = (0.1, 0.05, 0.01)  # relative errors for which n(ε) is given
CONSTANT_RATE = 0.5  # the baseline of every prediction
MOMENT = 2  # root mean square over replicates too: for squares the finite pool's correction is exact


@dataclass(frozen=True, eq=False)
class Measured:
    """All measurements of one layer."""

    layer: Layer
    curves: LayerCurves
    detail: LayerDetail
    geometry: LayerGeometry
    special: Array
    """(heads,): share of the pooled mass on special tokens."""


def head_records(
    measured: Measured, *, causal: bool, window: int, thresholds: Thresholds, seed: int
) -> list[dict[str, Any]]:
    """The records of a layer's query heads, in order."""
    heads = measured.detail.entropy.shape[0]
    return [
        _record(measured, head, causal=causal, window=window, thresholds=thresholds, seed=seed) for head in range(heads)
    ]


def _record(
    measured: Measured, head: int, *, causal: bool, window: int, thresholds: Thresholds, seed: int
) -> dict[str, Any]:
    layer, curves, detail, geometry = measured.layer, measured.curves, measured.detail, measured.geometry
    sizes = np.rint(curves.counts.mean(0))
    verdict = classify(detail.effective_tokens[head], sizes, float(detail.top_weight[head]), thresholds)
    horizon = float(geometry.horizon[head])
    coupling = None if geometry.coupling is None else float(geometry.coupling[head])
    main = curves.bare if curves.atomic is None else curves.atomic
    sink = _sink(measured, head, sizes, window)
    return {
        "layer": layer.index,
        "head": head,
        "kv_head": head // layer.query.shape[1],
        "attention": "full" if layer.traits.sliding_window is None else "sliding window",
        "sliding_window": layer.traits.sliding_window,
        "horizon": horizon,
        "horizon_one_sided": None if geometry.one_sided is None else float(geometry.one_sided[head]),
        "coupling": coupling,
        "geometry_note": geometry.reason or None,
        "mean_tilt": float(geometry.mean_tilt[head]),
        "score_std": float(geometry.score_std[head]),
        "n": sizes.astype(int),
        **_curve(main, head, sizes, seed),
        "rate_sharp": rates.rate_sharp(horizon),
        "rate_sharp_output": rates.rate_sharp_output(horizon),
        "rate_rms_output": rates.rate_rms_output(horizon),
        "rate_drawn": rates.rate_drawn(horizon),
        "rate_proved": None if coupling is None else rates.rate_proved(coupling),
        "rate_constant": CONSTANT_RATE,
        "predicted_error": detail.predicted_error[head],
        "hardmax_error": detail.hardmax_error[head],
        "effective_tokens": detail.effective_tokens[head],
        "effective_tokens_growth": verdict.growth,
        "top_weight": float(detail.top_weight[head]),
        "entropy": float(detail.entropy[head]),
        "ordered_weights": {"rank": detail.ranks, "weight": detail.ordered_weights[head]},
        "sink_mass": sink["share_in_window"] if sink else None if causal else float(measured.special[head]),
        "sink": sink,
        "without_sink": None if curves.atomic is None else _curve(curves.bare, head, sizes, seed),
        "pareto_k": float(detail.pareto_k[head]),
        "local_dimension": float(detail.local_dimension[head]),
        "regime": verdict.regime.value,
        "regime_reason": verdict.reason,
        "remedy": verdict.regime.remedy,
        "error_is_lower_bound": verdict.regime is Regime.FROZEN,
    }


def _curve(view: View, head: int, sizes: Array, seed: int) -> dict[str, Any]:
    """The error curve of one view, its rate and n(ε)."""
    relative = view.relative[head]
    value, stderr = root_mean_square(relative)
    centred, _ = root_mean_square(view.relative_centred[head])
    rate = fit_rate(sizes, relative**MOMENT, moment=MOMENT, seed=seed) if np.isfinite(relative).all() else None
    return {
        "relative_output_error": value,
        "relative_output_error_stderr": stderr,
        "relative_centred_error": centred,
        "rate": None if rate is None else rate.document(),
        "tokens_for": {str(error): _tokens_for(sizes, value, stderr, error, seed) for error in ERRORS},
    }


def _tokens_for(sizes: Array, value: Array, stderr: Array, error: float, seed: int) -> dict[str, Any] | None:
    if len(sizes) < 3 or not (np.isfinite(value).all() and np.isfinite(stderr).all()):
        return None
    budget = budget_for(sizes, value, stderr, error, seed=seed)
    if budget.beyond:
        return None
    return {"n": budget.tokens, "interval": list(budget.interval), "extrapolated": budget.extrapolated}


def root_mean_square(errors: Array) -> tuple[Array, Array]:
    """Root mean square over replicates (R, J) and its standard error by the delta method: two arrays (J,)."""
    powers = errors**MOMENT
    return typical(powers, MOMENT), typical_stderr(powers, MOMENT)


def _sink(measured: Measured, head: int, sizes: Array, window: int) -> dict[str, Any] | None:
    """The atom's mass among n tokens, and the n that dilutes it to one half."""
    layer, curves = measured.layer, measured.curves
    if layer.atom is None:
        return None
    shared, groups, m, _ = layer.query.shape
    score, rest = (
        lse.reshape(shared * groups, m)[head].cpu().numpy() for lse in (layer.atom.lse, curves.reference.lse)
    )
    share = sink_share(sizes[:, None], score, rest, curves.pool).mean(1)
    return {
        "kind": _kind(layer),
        "share": share,
        "share_in_window": float(sink_share(window - 1, score, rest, curves.pool).mean()),
        "dilution_length": float(dilution_length(score, rest, curves.pool)),
    }


def _kind(layer: Layer) -> str:
    first, learned = layer.first is not None, layer.traits.sinks is not None
    return "first token and learned sink" if first and learned else "first token" if first else "learned sink"
