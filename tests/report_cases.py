"""Synthetic probe runs for tests of pages: with everything that a run can hold, and with nothing optional."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from head_cases import SIZES, curve_of, head_record, probe_run, replicate_rows
from limitlens.estimate import Estimate
from limitlens.probing.overview import LayerRecord
from limitlens.probing.record import HeadRecord, Sink
from limitlens.probing.result import ProbeRun
from limitlens.statistics.regimes import classify
from limitlens.statistics.tails import Verdict

NASTY = "<script>window.hacked=1</script>\"'</title>&amp; 模型 \u2028 ]]>"


def probe_case(
    layers: int = 6,
    heads: int = 12,
    *,
    seed: int = 0,
    groups: int = 1,
    sink: bool = False,
    shift: float = 0.0,
    **changes: Any,
) -> ProbeRun:
    """A probe of layers × heads with every regime in it; `shift` is added to every rate, `changes` are fields."""
    rng = np.random.default_rng(seed)
    records = [_head(rng, layer, head, groups, sink, shift) for layer in range(layers) for head in range(heads)]
    judged = tuple(
        LayerRecord(
            layer, "hidden states", Verdict.ABOVE_GAUSSIAN if layer else Verdict.SUB_GAUSSIAN, 1.5, Estimate(0.1, 0.05)
        )
        for layer in range(layers)
    )
    given = {
        "model": "tiny", "corpus": "a corpus", "causal": sink, "layer_records": judged, "seed": seed,
        "warnings": ("a warning of the run",),
    }  # fmt: skip
    return probe_run(records, **given | changes)


def _head(rng: np.random.Generator, layer: int, head: int, groups: int, sink: bool, shift: float) -> HeadRecord:
    n = np.asarray(SIZES, dtype=float)
    horizon = float(np.exp(rng.normal(-0.2, 0.8)))
    slope = float(np.clip(0.52 - 0.12 * horizon + rng.normal(0, 0.02), 0.08, 0.55)) + shift
    errors = 1.4 * np.exp(rng.normal(0, 0.3)) * (n / 16) ** -slope
    rows = replicate_rows(errors, seed=int(rng.integers(1 << 30)))
    growth = 1.0 if slope > 0.4 else 0.6 if slope > 0.2 else 0.1
    effective = np.maximum(0.3 * n**growth, 1.0)
    top = float(np.clip(1.2 / effective[-1], 0, 0.95))
    verdict = classify(effective, n, top)
    return head_record(
        layer,
        head,
        errors=curve_of(rows),
        without_sink=curve_of(1.69 * rows) if sink else None,
        kv_head=head // groups,
        horizon=horizon,
        horizon_one_sided=1.2 * horizon,
        coupling=2 * horizon**2,
        mean_tilt=0.5 * horizon,
        score_std=1.5 * horizon,
        effective_tokens=effective,
        effective_tokens_growth=verdict.growth,
        top_weight=top,
        entropy=float(np.log(effective[-1])),
        sink=Sink("first token", 1 / (1 + n / 300), 0.4, 300.0) if sink else None,
        sink_mass=float(rng.uniform()),
        pareto_k=float(rng.normal(0.4, 0.2)),
        regime=verdict.regime,
        regime_reason=verdict.reason,
    )


def bare_probe(layers: int = 2, heads: int = 3) -> ProbeRun:
    """A probe without anything that a run may lack; its second head has no error at one size, and so no rate."""
    missing = {"horizon_one_sided": None, "coupling": None, "effective_tokens_growth": None}
    records = [replace(record, **missing) for record in probe_case(layers, heads).records]
    error_moments = records[1].curve.error_moments.copy()
    error_moments[:, :, 2] = np.nan
    curve = replace(records[1].curve, error_moments=error_moments)
    records[1] = replace(records[1], curve=curve, pareto_k=None, sink_mass=None)
    return probe_run(records, model="m", corpus="c", tokens=10_000)
