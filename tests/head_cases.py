"""Synthetic heads and probe runs whose error curves have known answers."""

from __future__ import annotations

from typing import Any

import numpy as np

from limitlens.errors import Array
from limitlens.probing.record import HeadRecord
from limitlens.probing.result import ProbeRun
from limitlens.statistics.critical_factor import CriticalFactor
from limitlens.statistics.error_curve import ErrorCurve
from limitlens.statistics.regimes import Regime

SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
MOMENT_CURVES = {"mean": 0.3, "covariance": 0.6, "hardmax": 2.0}  # their errors over those of the output
REPLICATES, STDERR = 20, 0.01  # of curves given by their errors alone: 20 replicates, standard errors of 1%


def replicate_rows(errors: Array, *, stderr: float = STDERR, replicates: int = REPLICATES, seed: int = 0) -> Array:
    """Squared errors (replicates, sizes) whose root mean square is `errors`, with that relative standard error."""
    errors = np.asarray(errors, dtype=float)
    noise = np.random.default_rng(seed).standard_normal((replicates, len(errors)))
    noise -= noise.mean(0)
    noise *= 2 * stderr * np.sqrt(replicates) / noise.std(0, ddof=1)
    return np.asarray(errors**2 * (1 + noise))


def curve_of(errors: Array, sizes: tuple[int, ...] | None = None, **known: Any) -> ErrorCurve:
    """The curve of errors (sizes,), or of rows of squared errors (replicates, sizes)."""
    errors = np.asarray(errors, dtype=float)
    rows = replicate_rows(errors) if errors.ndim == 1 else errors
    return ErrorCurve.of(SIZES[: rows.shape[1]] if sizes is None else sizes, rows, **known)


def head_record(
    layer: int, head: int, *, errors: Array, kv_head: int | None = None, sizes: Any = None, **changes: Any
) -> HeadRecord:
    """A head with such errors (sizes,) or rows of squared errors (replicates, sizes); `without_sink` likewise."""
    curve = errors if isinstance(errors, ErrorCurve) else curve_of(errors, sizes)
    n = np.asarray(curve.sizes, dtype=float)
    without_sink = changes.pop("without_sink", None)
    if without_sink is not None and not isinstance(without_sink, ErrorCurve):
        without_sink = curve_of(without_sink, curve.sizes)
    effective = 0.3 * n
    fields: dict[str, Any] = {
        "sliding_window": None, "horizon": 0.5, "horizon_one_sided": 0.6, "coupling": 0.5, "geometry_note": None,
        "mean_tilt": 0.25, "score_std": 0.75,
        "effective_tokens": effective, "effective_tokens_growth": 1.0, "top_weight": float(1.2 / effective[-1]),
        "entropy": float(np.log(effective[-1])), "sink": None, "sink_mass": 0.1, "pareto_k": 0.4,
        "regime": Regime.AVERAGING, "regime_reason": "many tokens share the mass",
        "critical": CriticalFactor(256, 2.5, 0.1, 0.25, 0.02),
        "moment_curves": {name: curve_of(f * curve.error, curve.sizes) for name, f in MOMENT_CURVES.items()},
    }  # fmt: skip
    where = {"layer": layer, "head": head, "kv_head": head if kv_head is None else kv_head}
    return HeadRecord(**where, curve=curve, without_sink=without_sink, **fields | changes)


def probe_run(records: Any, **changes: Any) -> ProbeRun:
    """A probe run with these heads."""
    found = tuple(records)
    fields: dict[str, Any] = {
        "model": "a model", "model_revision": None, "model_sha256": "1", "model_note": None, "causal": False,
        "corpus": "a text", "corpus_sha256": "2", "tokens": 84_992, "tokens_asked": 100_000, "window": 256,
        "windows": {"count": 391, "pilot": [0, 5], "reserved": [1, 2, 3], "pool": 386},
        "pooled_positions": (0, 256), "sizes_asked": found[0].sizes, "replicates": REPLICATES,
        "replicates_asked": REPLICATES, "queries": 256, "layer_records": (), "seed": 0,
        "batch": 16, "device": "cpu", "floor": 2e-7, "interrupted": False,
        "seconds": {"model": 1.0, "attention": 2.0, "total": 3.0}, "warnings": (),
    }  # fmt: skip
    return ProbeRun(records=found, **fields | changes)
