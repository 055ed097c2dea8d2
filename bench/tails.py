"""Tails of the hidden states of every layer of four models: are they sub-Gaussian, and what is left of the proved rate.

The theorem on the rate, 1/(2(1 + 32 Ψ)) with Ψ = ‖S‖ ‖S^{1/2}A‖², needs centred tokens with a variance proxy S. Where
the log-moment curve of a layer's tokens exceeds that of a Gaussian law with their covariance Σ, S = Σ is not allowed.
The smallest multiple that the sample allows is p Σ, whose Ψ is p² times that of Σ. Tokens are the inputs of the query
projection, minus their mean, without the first token of a decoder's window, along their 64 leading principal axes (one
axis for 16 tokens at most), as in a probe. Other directions and larger tilts may need a larger p, so the rate with p Σ
is at least the one that the theorem proves with a multiple of Σ.

`python -m bench tails` runs the models that are installed; QWEN_GGUF names the file of Qwen2.5-Coder-1.5B-Instruct.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from limitlens.models import ALIASES, Captured, LoadedModel, Windows, capture, load, open_corpus, projector
from limitlens.probing.diagnostics import PRINCIPAL_AXES
from limitlens.statistics.tails import Verdict, check_tails
from limitlens.theory import rates

TEXT, WINDOW, TOKENS_PER_AXIS = "stdlib-docs", 256, 16
TOKENS = {"minilm": 8192, "mpnet": 8192, "smollm2": 8192, "qwen": 4096}


def couplings(call: Captured, loaded: LoadedModel, covariance: torch.Tensor) -> np.ndarray:
    """Coupling Ψ = ‖Σ‖ ‖Σ^{1/2}A‖² of each query head of a layer, (Hq,), from its projections."""
    made, note = projector(loaded.model)(call.layer)
    factor = None if made is None else made.factor(made.ratios(call))
    if made is None or factor is None:
        raise SystemExit(f"bench: layer {call.layer} of {loaded.name} has no score matrix ({note})")
    dim = call.query.shape[-1]
    Wq, Wk = (part.double().reshape(-1, dim, part.shape[-1]) for part in (made.query, made.key))
    Wk = Wk.repeat_interleave(len(Wq) // len(Wk), 0)
    squares = torch.linalg.eigvals(Wk @ covariance @ Wk.mT @ Wq @ Wq.mT).real.amax(-1)  # of positive semidefinite ones
    largest = torch.linalg.eigvalsh(covariance)[-1]
    return (largest * squares * (call.scale * factor) ** 2).numpy()


def measured(name: str, loaded: LoadedModel, tokens: int) -> dict[str, Any]:
    windows = Windows(loaded, open_corpus(TEXT), length=WINDOW, tokens=tokens)
    hidden: dict[int, list[torch.Tensor]] = {}
    calls: dict[int, Captured] = {}

    def take(call: Captured) -> None:
        assert call.hidden is not None
        hidden.setdefault(call.layer, []).append(call.hidden[:, int(call.causal) :].flatten(0, 1).clone())
        calls.setdefault(call.layer, call)

    with torch.inference_mode(), capture(loaded.model, take, hidden=True) as run_until_last_attention:
        for ids in windows.batches(4):
            run_until_last_attention(input_ids=ids)
    layers = []
    for layer in sorted(hidden):
        x = torch.cat(hidden.pop(layer)).double()
        covariance = torch.cov(x.T)
        axes = torch.linalg.eigh(covariance)[1][:, -min(PRINCIPAL_AXES, len(x) // TOKENS_PER_AXIS) :]
        report = check_tails((x - x.mean(0)) @ axes)
        psi = couplings(calls.pop(layer), loaded, covariance)
        worst = np.unravel_index(report.excess.argmax(), report.excess.shape)
        proxy, power = report.variance_proxy, report.verdict is Verdict.POWER
        with_proxy = None if power else float(np.median([rates.rate_proved(proxy**2 * one) for one in psi]))
        layers.append({
            "layer": layer, "verdict": report.verdict.value, "variance_proxy": proxy,
            "variance_proxy_stderr": float(report.stderr[worst]), "kurtosis_z": report.kurtosis,
            "pareto_shape": report.pareto_norm.value, "pareto_shape_stderr": report.pareto_norm.stderr,
            "mean_over_spread": float(x.mean(0).norm() / covariance.trace().sqrt()),
            "coupling_median": float(np.median(psi)),
            "rate_proved_by_covariance": float(np.median([rates.rate_proved(one) for one in psi])),
            "rate_proved_by_proxy": with_proxy,
        })  # fmt: skip
        one = layers[-1]
        left = "none" if power else f"{with_proxy:.2g}"
        print(
            f"  {name} layer {layer:2}: {one['verdict']:21} variance proxy {proxy:5.2f} ± "
            f"{one['variance_proxy_stderr']:.2f} Σ, shape {one['pareto_shape']:5.2f} ± "
            f"{one['pareto_shape_stderr']:.2f}, Ψ {one['coupling_median']:8.3g}, proved rate "
            f"{one['rate_proved_by_covariance']:.2g} with Σ, {left} with the proxy", flush=True,
        )  # fmt: skip
    counts = Counter(one["verdict"] for one in layers)
    print(f"  {name}: {len(x):,} tokens a layer, {dict(counts)}", flush=True)
    return {"tokens": len(x), "axes": axes.shape[1], "text_sha256": windows.sha256, "weights_sha256": loaded.sha256,
            "verdicts": dict(counts), "layers": layers}  # fmt: skip


def run() -> dict[str, Any]:
    found: dict[str, Any] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, tokens in TOKENS.items():
            where = os.environ.get("QWEN_GGUF", name) if name == "qwen" else name
            if Path(where).is_file() or (where in ALIASES and ALIASES[where].locate()):
                found[name] = measured(name, load(where), tokens)
            else:
                print(f"  {name} is not installed and was left out", flush=True)
    finally:
        torch.set_num_threads(threads)
    return {"text": TEXT, "window": WINDOW, "models": found}
