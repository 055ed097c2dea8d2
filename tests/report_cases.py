"""Documents of probes that nobody ran, for pages that must show whatever a run can hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from limitlens.budgets.budget import budget_for
from limitlens.heads.overview import rate_skill, summary
from limitlens.heads.regimes import classify
from limitlens.record import FORMAT
from limitlens.theory import rates

SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
NASTY = "<script>window.hacked=1</script>\"'</title>&amp; 模型 \u2028 ]]>"


def probe_document(
    layers: int = 6,
    heads: int = 12,
    *,
    seed: int = 0,
    groups: int = 1,
    sink: bool = False,
    model: str = "tiny",
    shift: float = 0.0,
    intervals: bool = True,
) -> dict[str, Any]:
    """A probe of layers × heads with every regime in it; `shift` is added to every rate."""
    rng = np.random.default_rng(seed)
    n = np.asarray(SIZES, dtype=float)
    records = []
    for layer in range(layers):
        for head in range(heads):
            horizon = float(np.exp(rng.normal(-0.2, 0.8)))
            slope = float(np.clip(0.52 - 0.12 * horizon + rng.normal(0, 0.02), 0.08, 0.55)) + shift
            value = 1.4 * np.exp(rng.normal(0, 0.3)) * (n / 16) ** -slope
            stderr = 0.02 * value
            growth = 1.0 if slope > 0.4 else 0.6 if slope > 0.2 else 0.1
            effective = np.maximum(0.3 * n**growth, 1.0)
            top = float(np.clip(1.2 / effective[-1], 0, 0.95))
            verdict = classify(effective, n, top)
            found = {error: budget_for(n, value, stderr, error) for error in (0.1, 0.05, 0.01)} if intervals else {}
            curve = {
                "relative_output_error": value.tolist(),
                "relative_output_error_stderr": stderr.tolist(),
                "rate": {
                    "slope": slope, "stderr": 0.01, "interval": [slope - 0.02, slope + 0.02], "law": "power",
                    "constant": float(value[0] * n[0] ** slope), "evidence": 12.0, "misfit": 0.8, "used": list(SIZES),
                    "log_exponent": 2.5,
                },
                "tokens_for": {
                    str(error): None
                    if budget.beyond
                    else {"n": budget.tokens, "interval": list(budget.interval), "extrapolated": budget.extrapolated}
                    for error, budget in found.items()
                },
            }  # fmt: skip
            bare = {
                **curve,
                "relative_output_error": (1.3 * value).tolist(),
                "relative_output_error_stderr": (1.3 * stderr).tolist(),
            }
            records.append(
                {
                    "layer": layer, "head": head, "kv_head": head // groups, "sliding_window": None,
                    "horizon": horizon, "horizon_one_sided": 1.2 * horizon, "coupling": 2 * horizon**2,
                    "mean_tilt": 0.5 * horizon, "score_std": 1.5 * horizon, "n": list(SIZES), **curve,
                    "rate_sharp": rates.rate_sharp(horizon), "rate_sharp_output": rates.rate_sharp_output(horizon),
                    "rate_rms_output": rates.rate_rms_output(horizon), "rate_drawn": rates.rate_drawn(horizon),
                    "rate_constant": 0.5, "hardmax_error": (1.2 / np.log(n)).tolist(),
                    "effective_tokens": effective.tolist(), "effective_tokens_growth": verdict.growth,
                    "top_weight": top, "entropy": float(np.log(effective[-1])), "sink_mass": float(rng.uniform()),
                    "sink": {
                        "kind": "first token", "share": (1 / (1 + n / 300)).tolist(), "share_in_window": 0.4,
                        "dilution_length": 300.0,
                    } if sink else None,
                    "without_sink": bare if sink else None,
                    "ordered_weights": {"rank": [1, 2, 4, 8, 16], "weight": [top / r for r in (1, 2, 4, 8, 16)]},
                    "predicted_error": (1.1 * value).tolist(),
                    "pareto_k": float(rng.normal(0.4, 0.2)), "local_dimension": float(rng.uniform(4, 20)),
                    "regime": verdict.regime.value, "regime_reason": verdict.reason, "remedy": verdict.regime.remedy,
                    "error_is_lower_bound": verdict.regime.value == "frozen",
                }
            )  # fmt: skip
    return {
        "model": model, "corpus": "a corpus", "tokens": 84_992, "tokens_asked": 100_000, "window": 256,
        "n": list(SIZES),
        "replicates": 20, "queries": 256, "heads": records, "windows": {"reserved": [1, 2, 3]}, "floor": 2e-7,
        "summary": summary(records) | {"rates": rate_skill(records)}, "seed": seed, "interrupted": False,
        "seconds": {"model": 1.0, "attention": 2.0}, "warnings": ["a warning of the run"],
    }  # fmt: skip


def bare_contract(layers: int = 2, heads: int = 3) -> dict[str, Any]:
    """A probe with nothing but the keys that the contract names, some of them null."""
    full = probe_document(layers, heads)
    kept = (
        "layer", "head", "kv_head", "horizon", "horizon_one_sided", "coupling", "mean_tilt", "score_std", "n",
        "relative_output_error", "relative_output_error_stderr", "rate", "rate_sharp", "effective_tokens", "top_weight",
        "entropy", "sink_mass", "pareto_k", "regime", "tokens_for",
    )  # fmt: skip
    records = [{key: head[key] for key in kept} for head in full["heads"]]
    records[1] |= {"rate": None, "pareto_k": None, "sink_mass": None, "coupling": None}
    return {"model": "m", "corpus": "c", "tokens": 1000, "heads": records, "seconds": {"model": 1.0, "attention": 1.0}}


def record(result: dict[str, Any], command: str = "probe") -> dict[str, Any]:
    """The contents of a run.json."""
    return {
        "format": FORMAT,
        "command": command,
        "arguments": {"model": result.get("model"), "tokens": 1e5, "seed": 0, "json": False},
        "seed": 0,
        "versions": {"limitlens": "0.1.0"},
        "host": {"cores": 2},
        "started": "2026-01-01T00:00:00+00:00",
        "finished": "2026-01-01T00:01:00+00:00",
        "result": result,
    }
