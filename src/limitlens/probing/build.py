"""Measure layers that have seen the pool, and build the records of their heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from limitlens.errors import Array
from limitlens.probing.collect import Collector
from limitlens.probing.diagnostics import LayerDetail, LayerGeometry, layer_detail, layer_geometry
from limitlens.probing.layer import MIN_SNR, LayerCurves, layer_curves
from limitlens.probing.pilot import Layer
from limitlens.probing.predict import predict_pool
from limitlens.probing.record import HeadRecord
from limitlens.probing.regimes import Thresholds, classify, resampled
from limitlens.probing.sinks import layer_sinks
from limitlens.record import to_json
from limitlens.statistics.predicted_curve import PredictedErrors


@dataclass(frozen=True, eq=False)
class Measured:
    """All measurements of one layer; `special` (heads,) is the share of the pooled mass on special tokens."""

    layer: Layer
    curves: LayerCurves
    detail: LayerDetail
    geometry: LayerGeometry
    special: Array
    predictions: list[tuple[PredictedErrors, ...]]  # of each head: without its atom, and with it where there is one


def measure(collectors: Sequence[Collector], window: int) -> list[Measured]:
    """Measure layers of equal shape that have seen the pool, in windows of `window` tokens."""
    with torch.inference_mode():
        whole = Collector.joined(collectors)
        work: tuple[Callable[[], Any], ...] = (
            partial(predict_pool, whole), partial(layer_curves, whole), partial(layer_detail, whole, window),
            partial(layer_geometry, whole, collectors),
        )  # fmt: skip
        predictions, curves, detail, geometries = _run_all(work, whole.key.device)
        share = torch.exp(whole.states[-1].lse - curves.reference.lse)
        special = np.asarray(share.reshape(-1, whole.layer.query.shape[2]).mean(-1).cpu())
    shared, groups = collectors[0].layer.query.shape[:2]
    found = []
    for place, (own, geometry) in enumerate(zip(collectors, geometries, strict=True)):
        pairs = slice(place * shared, (place + 1) * shared)
        heads = slice(pairs.start * groups, pairs.stop * groups)
        parts = (curves.of(heads, pairs), detail.of(heads), geometry, special[heads], predictions[heads])
        found.append(Measured(own.layer, *parts))
    return found


def _run_all(work: Sequence[Callable[[], Any]], device: torch.device) -> list[Any]:
    """Run pieces of work; on a GPU each in a CUDA stream of its own, since small ones leave most of it idle."""
    if device.type == "cpu":
        return [piece() for piece in work]
    torch.linalg.eigh(torch.eye(1, device=device))  # the first call must come from one thread
    here, streams = torch.cuda.current_stream(device), _streams(device, len(work))

    def in_stream(piece: Callable[[], Any], stream: torch.cuda.Stream) -> Any:
        stream.wait_stream(here)
        with torch.cuda.stream(stream), torch.inference_mode():
            return piece()

    with ThreadPoolExecutor(len(work)) as pool:
        found = list(pool.map(in_stream, work, streams))
    for stream in streams:
        here.wait_stream(stream)
    return found


@cache
def _streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """CUDA streams, the same in every call: memory freed on a stream is reused there."""
    return [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]


def head_records(measured: Measured, causal: bool, window: int, thresholds: Thresholds, seed: int) -> list[HeadRecord]:
    """Build the records of a layer's query heads, in order."""
    layer, curves, detail, geometry = measured.layer, measured.curves, measured.detail, measured.geometry
    sizes = np.rint(curves.counts.mean(0))
    known = {"floor": np.full(len(sizes), detail.floor.max()), "seed": seed}
    known["finite_population_correction"] = curves.finite_population_correction
    sinks = layer_sinks(layer, curves.reference.lse, curves.pool, sizes, window)
    effective, top = detail.mean(detail.effective_sums), detail.mean(detail.top_sums)
    # a number for each head; None where it is not known
    numbers = {name: getattr(geometry, name) for name in ("horizon", "mean_tilt", "score_std", "horizon_one_sided")}
    numbers |= {"coupling": geometry.coupling, "pareto_k": detail.pareto_k, "top_weight": top}
    numbers |= {"entropy": detail.mean(detail.entropy_sums)}
    by_head = {name: to_json(values) for name, values in numbers.items() if values is not None}

    def record(head: int) -> HeadRecord:
        verdict = classify(effective[head], sizes, float(top[head]), thresholds)
        sums = (detail.effective_sums[head], detail.top_sums[head], detail.members[head])
        verdict = resampled(verdict, *sums, sizes, seed, thresholds)
        sink = sinks[head] if sinks else None
        predicted = [{"prediction": one, "text": one.text_shifts(sizes)} for one in measured.predictions[head]]
        noisy: dict[str, Any] = {"min_snr": MIN_SNR}
        extra = {"output": predicted[0], "atomic": predicted[-1], "mean": noisy, "covariance": noisy, "hardmax": noisy}
        found = {kind: part.curve(head, sizes, **known, **extra[kind]) for kind, part in curves.kinds.items()}
        without_sink = found.pop("output")
        with_sink = found.pop("atomic", None)
        return HeadRecord(
            layer=layer.index, head=head, kv_head=head // layer.query.shape[1],
            sliding_window=layer.traits.sliding_window, geometry_note=geometry.note or None,
            curve=with_sink or without_sink, without_sink=with_sink and without_sink,
            effective_tokens=effective[head], effective_tokens_growth=verdict.growth, sink=sink,
            sink_mass=sink.share_in_window if sink else None if causal else float(measured.special[head]),
            regime=verdict.regime, regime_reason=verdict.reason, regime_agreement=verdict.agreement,
            critical=detail.critical[head], moment_curves=found,
            **{name: values[head] for name, values in by_head.items()},
        )  # fmt: skip

    return [record(head) for head in range(len(top))]
